"""The wire format of fast ingest (ADR-50): the commands of one batch, and the server's replies to them.

The operation is in the reply subject: ``<inbox>.<id>.<flow>.<gap>.<seq>.<op>.$FI``, always with the flow that was
requested first. The server answers on the reply subject of the message that made it answer.

Released servers type their control frames (``ack``, ``gap``, ``err``); the ADR's draft has one untyped frame for all
three. Both decode to the same values. A reply without a type is a final ack (it names the batch), a refusal (it has an
error), or the ordinary ack of a server without fast ingest, which stored the message like any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from jetstream_ext.errors import ResponseError, ServerError, Status, server_error
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.api import parse_batch_ack, parse_object, parse_refusal
from jetstream_ext.protocol.fast_window import LARGEST_FLOW
from jetstream_ext.protocol.frames import Frame, check_size, pub
from jetstream_ext.protocol.numbers import LARGEST, json_number, parse_number
from jetstream_ext.protocol.options import as_message, message_headers, payload_bytes
from jetstream_ext.protocol.subjects import SubjectCache
from jetstream_ext.types import BatchAck, BatchFlowAck, BatchFlowGap, BatchMessage, Entry, GapMode

START: Final = b"0"
APPEND: Final = b"1"
COMMIT_EOB: Final = b"3"
PING: Final = b"4"

_OPERATIONS: Final = frozenset({START, APPEND, COMMIT_EOB, PING})
_REPLY_TAIL: Final = len(str(LARGEST)) + len(".1.$FI")
# Nearly every reply: the same result as by JSON, in a fifth of the time.
_ACK: Final = re.compile(rb'\{"type":"ack","seq":(0|[1-9][0-9]{0,17}),"msgs":(0|[1-9][0-9]{0,3})\}').fullmatch
_EXPECTED_KEPT: Final = 4  # names of streams that messages expect, for errors
_BLOCK_BYTES: Final = 1 << 20  # a window of large messages must not be held in memory twice


class Encoded(NamedTuple):
    """A checked message without a sequence."""

    subject: bytes
    header: bytes
    payload: bytes


class FastWire:
    """Checks messages and encodes the commands of one batch; `open` sets the prefix of the reply subjects."""

    def __init__(
        self, *, batch_id: str, flow: int, gap: GapMode, max_payload: int, inbox_size: int, prefix: str
    ) -> None:
        self.max_payload: int = max_payload  # the server's limit for headers and payload together, in bytes
        self._tokens = f".{batch_id}.{flow}.{gap.value}."
        self._reply = b""
        self._headers = h.HeaderCache()
        self.subject: bytes = b""  # of the first message: pings and the end of the batch need a subject of the stream
        self.expected_streams: set[str] = set()
        self.subjects: SubjectCache = SubjectCache(inbox_size + len(self._tokens) + _REPLY_TAIL, prefix)

    def open(self, inbox: str) -> None:
        self._reply = (inbox + self._tokens).encode()

    def encode(self, message: BatchMessage) -> Encoded:
        """Check and encode; raise BadSubjectError, BadHeaderError, MaxPayloadError, ValueError or TypeError."""
        subject = self.subjects.encode(message.subject)
        pairs = message_headers(message)
        if message.stream is not None and len(self.expected_streams) < _EXPECTED_KEPT:
            self.expected_streams.add(message.stream)
        header = h.outside_a_batch(h.encode(pairs)) if pairs else b""
        payload = payload_bytes(message.payload, "the payload on subject", message.subject)
        check_size(len(header) + len(payload), self.max_payload, message.subject)
        return Encoded(subject, header, payload)

    def message(self, encoded: Encoded, seq: int) -> bytes:
        # The limit may have changed since the message was encoded.
        check_size(len(encoded.header) + len(encoded.payload), self.max_payload)
        if seq == 1:
            self.subject = encoded.subject
        return pub(encoded.subject, self._reply_to(seq, START if seq == 1 else APPEND), encoded.header, encoded.payload)

    def plain(self, subject: str, payload: bytes, seq: int) -> bytes:
        """Check, encode and number a message without headers and options, in one step."""
        if seq == 1 or type(payload) is not bytes or len(payload) > self.max_payload:
            return self.message(self.encode(BatchMessage(subject, payload)), seq)
        size = len(payload)
        return b"PUB %b %b%d.1.$FI %d\r\n%b\r\n" % (self.subjects[subject], self._reply, seq, size, payload)

    def many(self, entries: Iterator[Entry], limit: int, sent: int) -> tuple[bytes, int, int, BaseException | None]:
        """Encode up to `limit` messages (and about 1 MiB) from `entries`, numbered from ``sent + 1``.

        Returns their bytes, their number, the sum of their payloads' sizes, and the exception of `entries` or of a refused
        message. Each message is checked before the next one is taken from `entries`.
        """
        out: list[bytes] = []
        size, last, largest = 0, sent, _BLOCK_BYTES
        known, top, reply, cached = self.subjects, self.max_payload, b" " + self._reply, self._headers.encode
        bulk = tuple if sent else None  # the first message is not appended: it opens the batch
        stopped: BaseException | None = None
        try:
            for seq, entry in zip(range(sent + 1, sent + limit + 1), entries):  # noqa: B905 - `entries` may be longer
                if type(entry) is bulk and len(entry) == 2 and type(entry[1]) is bytes and len(entry[1]) <= top:
                    # Nearly every message of a bulk is this or the next one. Their parts are joined only once.
                    subject, payload = entry
                    sizes = b"%d.1.$FI %d\r\n" % (seq, len(payload))
                    out += b"PUB ", known[subject], reply, sizes, payload, b"\r\n"
                elif (
                    type(entry) is bulk
                    and len(entry) == 3
                    and type(entry[1]) is bytes
                    and (type(entry[2]) is h.EncodedHeaders or (type(entry[2]) is dict and entry[2]))
                ):
                    subject, payload, headers = entry
                    raw = known[subject]
                    header = headers.block if type(headers) is h.EncodedHeaders else cached(headers)
                    header_size = len(header)
                    total = header_size + len(payload)
                    check_size(total, top, subject)
                    largest -= header_size
                    sizes = b"%d.1.$FI %d %d\r\n" % (seq, header_size, total)
                    out += b"HPUB ", raw, reply, sizes, header, payload, b"\r\n"
                else:
                    encoded = self.encode(as_message(entry))
                    out.append(self.message(encoded, seq))
                    largest -= len(encoded.header)
                    payload = encoded.payload
                last = seq
                size += len(payload)
                if size >= largest:
                    break
            else:
                stopped = StopIteration() if last < sent + limit else None
        except BaseException as error:
            stopped = error
        return b"".join(out), last - sent, size, stopped

    def ping(self, sent: int) -> bytes:
        return pub(self.subject, self._reply_to(max(1, sent), PING), b"", b"")

    def end(self, sent: int) -> bytes:
        """Return the end-of-batch marker: it takes a sequence after `sent`, and is not stored."""
        return pub(self.subject, self._reply_to(sent + 1, COMMIT_EOB), b"", b"")

    def _reply_to(self, seq: int, op: bytes) -> bytes:
        return b"%b%d.%b.$FI" % (self._reply, seq, op)


@dataclass(frozen=True, slots=True)
class BatchFlowError:
    """The server refused the message with batch sequence ``seq``."""

    seq: int
    error: ServerError


@dataclass(frozen=True, slots=True)
class OrdinaryAck:
    """The ack of an ordinary publish: the server has no fast ingest."""


@dataclass(frozen=True, slots=True)
class UnrecognisedReply:
    """A reply of an unknown type, or one that cannot be about the batch."""

    payload: bytes


# A plain ServerError is a refusal outside of a control frame: JSON, or a bare status (then without an ``err_code``).
Said = BatchFlowAck | BatchFlowGap | BatchFlowError | BatchAck | ServerError | OrdinaryAck | UnrecognisedReply


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply: the sequence and the operation of the message that it answers, and what it says."""

    seq: int
    op: bytes
    said: Said


def decode(frame: Frame) -> Reply:
    """Decode one reply; raise ResponseError if it is no fast-ingest reply."""
    subject, body, header_size = frame
    header, payload = body[:header_size], body[header_size:]
    words = subject.rsplit(b".", 3)
    seq = parse_number(words[1]) if len(words) == 4 and words[2] in _OPERATIONS else None
    if seq is None:
        raise ResponseError("a reply came to a subject that is not a fast-ingest reply subject", frame=subject)
    return Reply(seq, words[2], _said(header, payload))


def _said(header: bytes, payload: bytes) -> Said:
    if (plain := _ACK(payload)) is not None:
        return BatchFlowAck(int(plain[1]), int(plain[2]))
    if header and not payload:
        status = h.parse_status(header)
        if status is not None:
            code, text = status
            description = "no stream stores the subject" if code == Status.UNAVAILABLE else text
            return server_error(code=code, description=description)
    reply = parse_object("a fast-ingest reply", payload)
    kind = reply.get("type")
    if kind == "ack":
        return BatchFlowAck(_number(reply, "seq", payload), _number(reply, "msgs", payload, high=LARGEST_FLOW))
    if kind == "gap":
        return BatchFlowGap(_number(reply, "last_seq", payload), _number(reply, "seq", payload))
    if kind == "err":
        return BatchFlowError(_number(reply, "seq", payload), parse_refusal(reply.get("error"), payload))
    if kind is not None:
        return UnrecognisedReply(payload[:1024])
    if "ack_msgs" in reply or "last_seq" in reply or reply.keys() == {"seq", "error"}:
        return _draft(reply, payload)
    if reply.get("error") is not None:
        return parse_refusal(reply["error"], payload, stream=reply.get("stream"))
    if "batch" in reply:
        return parse_batch_ack(reply, payload)
    if "stream" in reply and "seq" in reply:
        return OrdinaryAck()
    raise ResponseError("a fast-ingest reply is of an unknown kind", frame=payload)


def _draft(reply: dict[str, Any], payload: bytes) -> Said:
    last, seq = _number(reply, "last_seq", payload, 0), _number(reply, "seq", payload, 0)
    if reply.get("error"):
        return BatchFlowError(seq, parse_refusal(reply["error"], payload, stream=reply.get("stream")))
    if last and seq > last + 1 and not reply.get("ack_msgs"):
        return BatchFlowGap(last + 1, seq)
    return BatchFlowAck(max(last, seq), _number(reply, "ack_msgs", payload, 1, high=LARGEST_FLOW))


def _number(
    reply: dict[str, Any], name: str, payload: bytes, default: int | None = None, *, high: int = LARGEST
) -> int:
    try:
        return json_number(reply.get(name, default), name, high=high)
    except ValueError as error:
        raise ResponseError(f"a fast-ingest reply is malformed: {error}", frame=payload) from None
