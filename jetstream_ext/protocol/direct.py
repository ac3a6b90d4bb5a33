"""Direct Get on the wire (ADR-31): requests out, replies in.

A reply to a batch request is a run of messages and one end-of-batch frame (EOB). Every message names the sequence of
the message before it in the same reply (``Nats-Last-Sequence``, 0 on the first), and the EOB names the last one sent:
together they prove that nothing was dropped on the way. Servers send the reply without flow control and cut off a slow
consumer, which only this chain shows.

On every server from 2.10 on, the header block of a message ends with the server's own lines (see `headers.reply_row`).
Any other frame is the EOB, which has status 204, or a refusal, which has status 404, 408, 412, 413, 500 or 503. A status
line alone proves nothing: a stored message can carry one, and servers before 2.12.8 return it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import compress, repeat
from operator import ge
from typing import Any, Final, final

import orjson

from jetstream_ext import errors
from jetstream_ext.errors import JetStreamExtError, MessageNotFoundError, MessagesLostError, ResponseError, Status
from jetstream_ext.protocol import advice, feature_table
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.frames import Frame, parts
from jetstream_ext.protocol.options import rfc3339

DEFAULT_MAX_BYTES: Final = 8 * 1024 * 1024  # of one reply; the server's own 64 MiB make it cut off slow consumers

# Servers take a later time, which does not fit into their nanoseconds, for one long ago.
_LATEST: Final = datetime(2262, 4, 11, tzinfo=UTC)
_SUBJECT_LINE: Final = b"\r\nNats-Subject: "
_TIME_LINE: Final = b"\r\nNats-Time-Stamp: "


@dataclass(frozen=True, slots=True)
class Request:
    """One direct-get request; fields that are None are left out."""

    seq: int | None = None
    next_by_subj: str | None = None
    start_time: datetime | None = None
    last_by_subj: str | None = None
    multi_last: tuple[str, ...] | None = None
    up_to_seq: int | None = None
    up_to_time: datetime | None = None
    batch: int | None = None
    max_bytes: int | None = None

    def address(self, api: str) -> tuple[str, bytes]:
        """Return subject and payload of the request to the direct-get subject `api`."""
        if self.last_by_subj is not None:
            return f"{api}.{self.last_by_subj}", b""  # for this form permission on that subject is enough
        return api, orjson.dumps(self.body())

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None:
                body[name] = rfc3339(min(value, _LATEST), name) if isinstance(value, datetime) else value
        return body

    def __str__(self) -> str:
        parts = self.body()
        if self.multi_last is not None:  # perhaps thousands
            parts["multi_last"] = f"{len(self.multi_last)} filters"
        return " ".join(f"{name} {value}" for name, value in parts.items())


@final
class StoredMsg:
    """A message as the stream stores it.

    Headers and times are decoded on access, so that a bulk read of payloads does not pay for them.

    Attributes:
        stream: The stream that answered (a mirror answers with its own name).
        subject: Its subject.
        seq: Its stream sequence.
        data: Its payload; empty for delete markers.
        headers: The stored headers with which the message can be published again: without what the server adds to a
            reply, and without the instructions that it carried out (``Nats-Batch-*``, ``Nats-Expected-*``,
            ``Nats-Schedule*``, ``Nats-Rollup``, ``Nats-Incr``, ``Nats-Required-Api-Level``), or its note of the origin
            (``Nats-Stream-Source``). Of several values of a name, the last.
        header_pairs: The same as a list of name and value, in the stored order, with every value of a repeated name.
        raw_subject: `subject` as bytes; in the text, U+FFFD stands for bytes that are not UTF-8.
        raw_headers: Every stored header, with those instructions, as a list of name and value in bytes.
        time: When it was stored (aware, UTC, microseconds).
        time_ns: When it was stored, in nanoseconds since the epoch.
        num_pending: The number of matching messages after it, if the reply has it.
        last_seq: The sequence of the message before it in the same reply, if the reply has it.
    """

    __slots__ = ("_body", "_header_size", "_lines", "_seq", "_stream")

    def __init__(
        self,
        *,
        stream: str,
        subject: str,
        seq: int,
        data: bytes = b"",
        headers: Mapping[str, str] | None = None,
        time_ns: int = 0,
        num_pending: int | None = None,
        last_seq: int | None = None,
    ) -> None:
        self._stream = stream
        self._seq = seq
        self._body = data
        self._header_size = 0  # of a message of a batch, whose body begins with its header block
        numbers = (b"" if number is None else b": %d" % number for number in (num_pending, last_seq))
        time = b": " + h.format_time_ns(time_ns).encode()
        self._lines: h.Row | None = [subject.encode(), b"", time, *numbers, b"", h.stored_lines(headers or {})]

    def _row(self) -> h.Row:
        lines = self._lines
        if lines is None:
            lines = h.reply_row(self._body[: self._header_size])
            if not lines:
                raise malformed(
                    self._stream, f"message {self._seq}", "it lacks a header that the server adds", self._body
                )
            self._lines = lines
        return lines

    def _malformed(self, error: ResponseError) -> ResponseError:
        return malformed(self._stream, f"message {self._seq}", error)

    def _number(self, place: int) -> int | None:
        try:
            return h.line_number(line) if (line := self._row()[place]) else None
        except ResponseError as error:
            raise self._malformed(error) from None

    @property
    def stream(self) -> str:
        return self._stream

    @property
    def subject(self) -> str:
        return self._row()[h.ROW_SUBJECT].decode("utf-8", "replace")

    @property
    def raw_subject(self) -> bytes:
        return self._row()[h.ROW_SUBJECT]

    @property
    def seq(self) -> int:
        return self._seq

    @property
    def data(self) -> bytes:
        return self._body[self._header_size :]

    @property
    def _stored_block(self) -> bytes:
        return self._row()[h.ROW_STORED]

    @property
    def headers(self) -> dict[str, str]:
        stored = self._stored_block
        return dict(h.copied_pairs(stored)) if stored else {}

    @property
    def header_pairs(self) -> list[tuple[str, str]]:
        return h.copied_pairs(self._stored_block)

    @property
    def raw_headers(self) -> list[tuple[bytes, bytes]]:
        return h.raw_pairs(self._stored_block)

    @property
    def time_ns(self) -> int:
        row = self._row()
        try:
            return h.parse_time_ns(h.line_value(row[h.ROW_TIME]))
        except ResponseError as error:
            raise self._malformed(error) from None

    @property
    def time(self) -> datetime:
        row = self._row()
        try:
            return h.parse_time(h.line_value(row[h.ROW_TIME]))
        except ResponseError as error:
            raise self._malformed(error) from None

    @property
    def num_pending(self) -> int | None:
        return self._number(h.ROW_PENDING)

    @property
    def last_seq(self) -> int | None:
        return self._number(h.ROW_LAST)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StoredMsg):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in (*_SHOWN, "raw_subject", "raw_headers"))

    def __hash__(self) -> int:
        return hash((self._stream, self._seq, self.data))

    def __repr__(self) -> str:
        return f"StoredMsg({', '.join(f'{name}={getattr(self, name)!r}' for name in _SHOWN)})"

    def __reduce__(self) -> tuple[object, ...]:
        return single_message, (self._stream, self._seq, self.data, self._row())


_SHOWN: Final = ("stream", "subject", "seq", "data", "headers", "time_ns", "num_pending", "last_seq")


def single_message(stream: str, seq: int, data: bytes, row: h.Row) -> StoredMsg:
    """Return a message that came alone; of the row, the sequence and the stream do not count."""
    message = batch_message(stream, seq, data, 0)
    message._lines = row
    return message


def batch_message(stream: str, seq: int, body: bytes, header_size: int) -> StoredMsg:
    """Return a message of a batched reply; `body` is its header block and its payload."""
    message = object.__new__(StoredMsg)
    message._stream = stream
    message._seq = seq
    message._body = body
    message._header_size = header_size
    message._lines = None
    return message


def _check(message: StoredMsg) -> None:
    """Raise ResponseError if the server's lines cannot be read: the time is malformed, or one is missing."""
    _ = message.time_ns


def stored_block(message: StoredMsg) -> bytes:
    """Return the stored headers as `headers.ROW_STORED` has them."""
    return message._stored_block


def size_of(message: StoredMsg) -> int:
    """Return a message's bytes as servers count them for ``max_bytes``: subject, header block and payload."""
    stored = message._stored_block
    return len(message.raw_subject) + (len(stored) + len(b"\r\n\r\n") if stored else 0) + len(message.data)


@dataclass(slots=True)
class Block:
    """Some consecutive messages of one reply, as columns of equal length.

    A body is a message's header block and payload in one piece; its other fields are cut out on access.
    """

    stream: str = ""
    seqs: list[int] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    header_sizes: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.seqs)

    def keep(self, start: int, stop: int) -> None:
        self.seqs = self.seqs[start:stop]
        self.bodies = self.bodies[start:stop]
        self.header_sizes = self.header_sizes[start:stop]

    def part(self, start: int, stop: int) -> Block:
        """Return a block with some of the rows."""
        rows = slice(start, stop)
        return Block(self.stream, self.seqs[rows], self.bodies[rows], self.header_sizes[rows])

    def arrange(self, order: Sequence[int]) -> None:
        """Keep the rows with the indices `order`, in this order."""
        self.seqs = list(map(self.seqs.__getitem__, order))
        self.bodies = list(map(self.bodies.__getitem__, order))
        self.header_sizes = list(map(self.header_sizes.__getitem__, order))

    def select(self, mask: Sequence[bool]) -> None:
        self.seqs = list(compress(self.seqs, mask))
        self.bodies = list(compress(self.bodies, mask))
        self.header_sizes = list(compress(self.header_sizes, mask))

    def extend(self, other: Block) -> None:
        """Add the rows of `other`, which must be of the same stream."""
        self.seqs += other.seqs
        self.bodies += other.bodies
        self.header_sizes += other.header_sizes

    @property
    def size(self) -> int:
        """Bytes of all headers and payloads."""
        return sum(map(len, self.bodies))

    @property
    def rows(self) -> list[h.Row]:
        """Each message's header lines (see `headers.reply_row`; `ROW_STREAM` may be empty)."""
        return list(self.each_row())

    def each_row(self) -> Iterator[h.Row]:
        """Yield `rows` one by one: thousands of lists at once keep the garbage collector busy."""
        prefix = b"NATS/1.0\r\nNats-Stream: %b\r\nNats-Subject: " % self.stream.encode()
        skip = len(prefix)
        for body, size in zip(self.bodies, self.header_sizes, strict=True):
            # Without stored headers one split gives the same places, the last of them empty.
            row = body[skip:size].split(b"\r\n") if body.startswith(prefix) else []
            if len(row) != 7 or not h.are_in_place(row):
                row = h.reply_row(body[:size])
                if not row:
                    self.check()
            yield row

    def columns(self, prefix: str = "") -> tuple[list[str], list[bytes], list[bytes]] | None:
        """Return the subjects (``surrogateescape``), without `prefix`, the times, and the stored headers, as `each_row` does.

        None if a subject does not begin with `prefix`, or if a server did not write its lines in the usual form.
        """
        count = len(self)
        heads = [body[:size] for body, size in zip(self.bodies, self.header_sizes, strict=True)]
        lines, stored = b"".join(heads).split(h.CRLF), [b""] * count
        if len(lines) != 8 * count + 1 or lines[:-1:8].count(h.VERSION) != count:  # some messages have stored headers
            rows = [head.rsplit(h.CRLF, 8) for head in heads]
            if set(map(len, rows)) != {9}:
                return None
            stored = [b"" if row[0] == h.VERSION else row[0] for row in rows]
            lines = [line for row in rows for line in row[:8]]
        if lines[7::8].count(b"") != count or lines[1::8].count(b"Nats-Stream: %b" % self.stream.encode()) != count:
            return None
        names, times = h.CRLF.join([b"", *lines[2::8]]), h.CRLF.join([b"", *lines[4::8]])
        before = _SUBJECT_LINE + prefix.encode()
        if names.count(before) != count or times.count(_TIME_LINE) != count:
            return None
        return names.decode("utf-8", "surrogateescape").split(before.decode())[1:], times.split(_TIME_LINE)[1:], stored

    @property
    def subjects(self) -> list[bytes]:
        return [row[h.ROW_SUBJECT] for row in self.each_row()]

    @property
    def datas(self) -> list[bytes]:
        return [body[size:] for body, size in zip(self.bodies, self.header_sizes, strict=True)]

    def pending(self, index: int) -> int:
        """How many matching messages follow row `index`; raise ResponseError if that is no number."""
        row = h.reply_row(self.bodies[index][: self.header_sizes[index]])
        if row and (digits := row[h.ROW_PENDING][18:]).isdigit() and len(digits) < 20:
            return int(digits)
        pending = self.message(index).num_pending
        assert pending is not None  # it is from the wire
        return pending

    def check(self) -> None:
        """Raise ResponseError for the first message whose lines of the server cannot be read."""
        for message in self.messages():
            _check(message)

    def drop_malformed(self) -> list[ResponseError]:
        """Drop the messages whose lines of the server cannot be read; return the errors."""
        errors: list[ResponseError] = []

        def is_good(message: StoredMsg) -> bool:
            try:
                _check(message)
            except ResponseError as error:
                errors.append(error)
                return False
            return True

        self.select(list(map(is_good, self.messages())))
        return errors

    def message(self, index: int) -> StoredMsg:
        return batch_message(self.stream, self.seqs[index], self.bodies[index], self.header_sizes[index])

    def messages(self) -> Iterator[StoredMsg]:
        return map(batch_message, repeat(self.stream), self.seqs, self.bodies, self.header_sizes)


@dataclass(frozen=True, slots=True)
class EndOfBatch:
    """What the end of a reply said."""

    num_pending: int  # matching messages beyond this reply
    last_seq: int  # the last sequence in this reply (0: none)
    up_to_seq: int | None = None  # `multi_last` only: the sequence at which the answer is consistent
    found: bool = True  # False: the server answered 404 instead


class ReplyDecoder:
    """Decodes the reply to one batch request and checks that it is complete.

    Feed it frames in the order they came. It is finished when `end` is set, or `broken`: then everything returned so
    far is good, and the rest must be requested again from `last_seq` on. Sequences before `start` are refused, because
    requesting the rest of such an answer would never end. `stream` and `server_version` (of the connected server) are
    for errors.
    """

    def __init__(self, stream: str, *, start: int = 1, server_version: str = "") -> None:
        self.end: EndOfBatch | None = None
        self.broken: MessagesLostError | None = None
        self.last_seq: int = 0
        self.count: int = 0
        self.size: int = 0  # about the bytes of all subjects, stored headers and payloads: what `max_bytes` counts
        self._asked = stream
        self._server_version = server_version
        self._floor = start - 1
        self._prev = b"0"
        self._responder = b""
        self._stream_line = b""
        self._added = 0
        self._stream = ""

    @property
    def responder(self) -> str:
        """The stream that answers; empty before its first message."""
        return self._stream

    def feed(self, frames: list[Frame]) -> Block:
        """Decode more of the reply, and keep of the list what belongs to its messages.

        Raises what `status_error` returns, UnsupportedFeatureError, or ResponseError.
        """
        raws: list[bytes] = []
        prev, stream_line = self._prev, self._stream_line
        for _, body, size in frames:
            # Nearly every message: the server's six lines end its header block as in the first message of the reply,
            # whose names were checked.
            row = body[:size].rsplit(b"\r\n", 8)
            if len(row) == 9 and row[1] == stream_line and row[6][20:] == prev:
                raws.append(prev := row[3][15:])
                continue
            self._prev = prev
            row = self._row(body[:size])
            if not row:
                break
            last = h.line_value(row[h.ROW_LAST])
            if last != prev:
                self.broken = self._lost(last, prev)
                break
            raws.append(prev := h.line_value(row[h.ROW_SEQUENCE]))
            stream_line = self._stream_line
        self._prev = prev
        if not raws:
            self._check_end()
            return Block(self._stream)
        del frames[len(raws) :]
        try:
            seqs = list(map(int if b"".join(raws).isdigit() else h.count, raws))
        except (ValueError, ResponseError):
            raise self._malformed("a sequence is not a number from 0 to 2**64-1", b" ".join(raws)) from None
        if seqs[0] <= self._floor or (seqs[-1] + 1) >> 64 or any(map(ge, seqs, seqs[1:])):
            raise self._malformed(f"the sequences do not increase after {self._floor}")
        self.last_seq = self._floor = seqs[-1]
        self.count += len(seqs)
        bodies = [body for _, body, _ in frames]
        sizes = [size for _, _, size in frames]
        # The lines that the server adds have about the same length on every message.
        self.size += sum(map(len, bodies)) - len(bodies) * self._added
        self._check_end()
        return Block(self._stream, seqs, bodies, sizes)

    def _malformed(self, problem: object, frame: bytes = b"") -> ResponseError:
        return malformed(self._asked, f"the direct-get reply after message {self._floor}", problem, frame)

    def _lost(self, last: bytes, prev: bytes) -> MessagesLostError:
        try:
            got = h.count(last) if last else None
        except ResponseError as error:
            raise self._malformed(error, last) from None
        expected = max(h.count(prev), self._floor)
        until = "" if got is None else f" and up to {got}"
        return MessagesLostError(
            f"stream {self._asked!r}: messages after sequence {expected}{until} were lost in transit (a slow consumer or a "
            f"lost connection); repeat the read with a smaller max_bytes, or continue it after {expected}",
            expected=expected,
            got=got,
        )

    def _row(self, header: bytes) -> h.Row:
        """Return `headers.reply_row` of a message; nothing for the end of the reply."""
        row = h.reply_row(header)
        if not row:
            if h.single_row(header):
                raise feature_table.DIRECT_BATCH.unsupported(
                    server_version=self._server_version,
                    detail=f"stream {self._asked!r} answered a batch request with a single message",
                )
            self._finish(header)
            return row
        responder = h.line_value(row[h.ROW_STREAM])
        if responder != self._responder:
            if self._responder:
                raise self._malformed("it came from two streams", header)
            self._responder = responder
            self._stream = responder.decode("utf-8", "replace")
            self._stream_line = b"Nats-Stream: %b" % responder
        if not self._added:
            stored = len(row[h.ROW_STORED]) + 4 if row[h.ROW_STORED] else 0
            self._added = len(header) - len(row[h.ROW_SUBJECT]) - stored
        return row

    def _finish(self, header: bytes) -> None:
        code, _ = _status(self._asked, header)
        if code == Status.NOT_FOUND:
            if self._responder:
                # multi_last: a message that was there when the server put the answer together is gone; ask again.
                self.broken = self._lost(b"", self._prev)
            else:
                self.end = EndOfBatch(num_pending=0, last_seq=0, found=False)
            return
        if code != Status.END_OF_BATCH:
            raise status_error(self._asked, header, self._server_version)
        values = dict(h.parse_lines(header))
        up_to = values.get(h.UP_TO_SEQUENCE)
        try:
            self.end = EndOfBatch(
                num_pending=h.count(values.get(h.NUM_PENDING, "").encode()),
                last_seq=h.count(values.get(h.LAST_SEQUENCE, "").encode()),
                up_to_seq=None if up_to is None else h.count(up_to.encode()),
            )
        except ResponseError as error:
            raise self._malformed(error, header) from None

    def _check_end(self) -> None:
        # The end names the last message, and an empty page says 0. If that message did not come, messages were lost.
        if self.end is not None and self.end.last_seq != self.last_seq:
            self.broken = self._lost(b"%d" % self.end.last_seq, self._prev)
            self.end = None
        elif self.end is not None and self.end.num_pending and not self.count:
            # Requesting the rest of such an answer would never end.
            raise self._malformed("it has no messages, but num_pending is not 0")


def malformed(stream: str, what: str, problem: object, frame: bytes = b"") -> ResponseError:
    """Return the error for a malformed reply of a stream; `problem` may be an error that names neither."""
    frame = problem.frame if isinstance(problem, ResponseError) else frame
    return ResponseError(f"stream {stream!r}: {what} is malformed: {problem}", frame=frame)


def not_found(stream: str, request: Request | None = None) -> MessageNotFoundError:
    """Return the error for a single get that found nothing, with what was asked for."""
    # Not "the stream has none": the replica that answered may lag behind.
    return MessageNotFoundError(
        f"stream {stream!r}: no message{'' if request is None else _wanted(request)} was found", stream=stream
    )


def _wanted(request: Request) -> str:
    if request.last_by_subj is not None:
        return f" on {request.last_by_subj!r}"
    on = f" on {request.next_by_subj!r}" if request.next_by_subj not in (None, ">") else ""
    if request.start_time is not None:
        return f"{on} stored at {request.start_time.isoformat()} or later"
    if request.next_by_subj is not None:
        return f"{on} from sequence {request.seq} on"
    return f" with sequence {request.seq}"


def _status(stream: str, header: bytes) -> tuple[int, str]:
    try:
        status = h.parse_status(header)
    except ResponseError as error:
        raise malformed(stream, "a direct-get reply", error) from None
    if status is None:
        raise malformed(
            stream, "a direct-get reply", "it has neither the server's lines of a message nor a status", header
        )
    return status


def no_responders(stream: str, *, allowed: bool | None = None, no_jetstream: str = "") -> errors.DirectGetDisabledError:
    """Return the error for a direct get that no server answers.

    `allowed` is whether the stream allows direct gets, if that is known; otherwise `no_jetstream` may be why, too.
    """
    if allowed:
        text = "no replica answers direct gets now, although the stream allows them; try again later"
    elif allowed is None:
        text = (
            "no server answers direct gets: the stream does not exist, lacks allow_direct, or none of its replicas is "
            f"available{no_jetstream}; {advice.enable_stream(stream, 'direct', what='direct gets')}"
        )
    else:
        text = f"it does not allow direct gets; {advice.enable_stream(stream, 'direct', what='direct gets')}"
    return errors.DirectGetDisabledError(f"stream {stream!r}: {text}", stream=stream)


def status_error(stream: str, header: bytes, server: str = "", asked: Request | None = None) -> JetStreamExtError:
    """Return the error for a direct get that a server, of this version if known, refused."""
    code, text = _status(stream, header)
    if code == Status.NOT_FOUND:
        return not_found(stream, asked)
    if code == Status.BAD_REQUEST and text == "Empty Request":
        # This library sends no empty request: the server dropped the fields that it does not know.
        return feature_table.DIRECT_BATCH.unsupported(
            server_version=server, detail=f"the server of stream {stream!r} did not recognise any field of the request"
        )
    if code == Status.BAD_REQUEST:
        return errors.BadRequestError(
            f"stream {stream!r}: the server refused the direct get: {text}", description=text, stream=stream
        )
    if code == Status.REQUIRED_API_LEVEL:
        return errors.RequiredApiLevelError(
            f"stream {stream!r}: the server's API level is lower than the request needs",
            code=code,
            err_code=errors.ErrorCode.REQUIRED_API_LEVEL,
            description=text,
            outcome="not_stored",
        )
    if code == Status.TOO_MANY_SUBJECTS:
        return errors.TooManySubjectsError(
            f"stream {stream!r}: the filters match more subjects than one answer can hold ({text}); "
            "use narrower filters"
        )
    if code == Status.UNAVAILABLE:
        return no_responders(stream)
    if code == Status.INTERNAL_ERROR:
        return errors.ServerError(
            f"stream {stream!r}: the server reported an internal error: {text}", code=code, description=text
        )
    return ResponseError(f"stream {stream!r}: unexpected status {code} {text}", frame=header)


def decode_single(stream: str, frame: Frame, server_version: str = "", request: Request | None = None) -> StoredMsg:
    """Decode the reply to a request without a batch; raise what `status_error` returns, or ResponseError."""
    _, header, payload = parts(frame)
    row = h.single_row(header)
    if not row:
        raise status_error(stream, header, server_version, request)
    try:
        seq = h.line_number(row[h.ROW_SEQUENCE])
    except ResponseError as error:
        raise malformed(stream, "the sequence of a message", error) from None
    if request is not None and request.next_by_subj is None and seq != (request.seq or seq):
        raise malformed(stream, "a direct-get reply", f"it has message {seq} instead of {request.seq}", header)
    responder = h.line_value(row[h.ROW_STREAM]).decode("utf-8", "replace")
    message = single_message(responder, seq, payload, row)
    _check(message)
    return message
