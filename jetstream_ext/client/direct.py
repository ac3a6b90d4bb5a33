"""`DirectGet`: single messages, batches, the last message per subject, and whole ranges (ADR-31)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, TypedDict, Unpack

from nats.js import JetStreamContext

from jetstream_ext.client import telemetry
from jetstream_ext.client.api import first_since, get_at_leader, wait_for_sequence
from jetstream_ext.client.base_connection import NotPermittedError
from jetstream_ext.client.connection import Context
from jetstream_ext.client.direct_reader import MessageBatch, read_blocks, read_one, skip_malformed
from jetstream_ext.errors import MessageNotFoundError, RequestTimeoutError
from jetstream_ext.protocol.direct import DEFAULT_MAX_BYTES, Block, Request, StoredMsg, not_found
from jetstream_ext.protocol.options import check_int, check_list, check_sequence, check_word, rfc3339
from jetstream_ext.protocol.reads import MultiLast, OneReply, Plan, Scan
from jetstream_ext.protocol.subjects import check_filter, check_name

_INT64_MAX: Final = (1 << 63) - 1
_EPOCH: Final = datetime.fromtimestamp(0, UTC)


class DirectGet:
    """Read stored messages from any replica of a stream, without a consumer (ADR-31, Direct Get API).

    Any replica or mirror may answer, so an answer can lag behind a publish that was just acknowledged. The stream needs
    ``allow_direct``. Batches, times and `multi_last` need nats-server 2.11; `get`, `get_last` and `get_next` work on
    2.10.

    Servers with file storage do not find messages from sequence 2**62 on, although they acknowledge them. A read with
    `confirm` or `min_seq` raises `StreamConfigMismatchError` for a stream that has reached this sequence, unless
    `up_to_seq` of a `scan` ends the range before. Other reads ask no leader: there such messages look as if they did not
    exist.

    If a lost connection interrupts an answer, the library requests the rest once more, and a single get again within its
    time. Every call can raise:

    * `nats.errors.ConnectionClosedError`, `nats.errors.ConnectionDrainingError`: at once, if the application closes or
      drains the connection;
    * `MessagesLostError`: the connection, or messages of a reply, were lost twice at the same place;
    * `RequestTimeoutError`: see `timeout`;
    * `BadRequestError`, `RequiredApiLevelError`, `ServerError`: the server refused the request;
    * `ResponseError`: an answer breaks the protocol; its text names the stream, and the message if one is to blame;
    * `MaxPayloadError`: nothing was sent; the request is over the server's limit.

    The logger ``jetstream_ext.direct`` has a DEBUG record of each request, retry, pause and failure.

    Args:
        js: nats-py's JetStream context; its prefix, domain and timeout are honoured.
        stream: The stream's name.
        timeout: Seconds, over 0; None is the context's own. They limit a single get in total. In a read of many
            messages they limit each wait: for a request's first message, for its next message, for a reconnect, for a
            replica that has what a proof needs. After half of that time the library sends the request once more, because
            its responder may have died, and takes the reply that comes first.

    Raises:
        BadSubjectError: `stream` is not a valid stream name, or the context's prefix is not a valid subject.
        ValueError: `timeout` is not over 0.
        TypeError: `js` is not nats-py's JetStream context, `stream` is not a string, or `timeout` is not a number.
    """

    def __init__(self, js: JetStreamContext, stream: str, *, timeout: float | None = None) -> None:
        check_name(stream, "stream name")
        self._js = Context(js)
        self._stream = stream
        self._timeout = self._js.resolve_timeout(timeout)

    def __repr__(self) -> str:
        return f"<DirectGet stream={self._stream!r}>"

    async def get(self, seq: int, *, min_seq: int | None = None) -> StoredMsg:
        """Return the message with stream sequence `seq`.

        Args:
            seq: The stream sequence, from 1.
            min_seq: Read your own writes: the answer reflects the stream at this sequence or later. If a replica cannot
                prove that, the library asks the leader. Needs permission for ``STREAM.INFO`` and ``STREAM.MSG.GET``.

        Returns:
            The message; `StoredMsg.num_pending` and `StoredMsg.last_seq` are None.

        Raises:
            ValueError: A sequence is not from 1 to 2**64-1.
            MessageNotFoundError: There is no such message (without `min_seq`: the responder has no such message).
            nats.js.errors.NotFoundError: There is no such stream.
            DirectGetDisabledError: No ``allow_direct``, or no server that can answer now; at once.
            RequestTimeoutError: No answer, or the leader has no `min_seq`, within `timeout` seconds.
            JetStreamExtError, nats.errors.Error: See the class.

        Cancellation: Safe; nothing is left behind.

        Requires: nats-server 2.10 (ADR-31, Direct Get API).
        """
        return await self._single(Request(seq=check_sequence(seq, "seq")), min_seq=min_seq)

    async def get_last(self, subject: str, *, min_seq: int | None = None) -> StoredMsg:
        """Return the last message on `subject` (a filter may have wildcards).

        The request goes to ``$JS.API.DIRECT.GET.<stream>.<subject>`` with an empty payload, so permissions on that
        subject alone are enough.

        Args:
            subject: The subject or filter.
            min_seq: As for `get`.

        Raises:
            BadSubjectError: `subject` is not a valid subject or filter.
            ValueError, MessageNotFoundError, nats.js.errors.NotFoundError, DirectGetDisabledError, RequestTimeoutError: As
                for `get`.

        Cancellation: Safe; nothing is left behind.

        Requires: nats-server 2.10 (ADR-31, Subject-Appended Direct Get API).
        """
        check_filter(subject)
        return await self._single(Request(last_by_subj=subject), min_seq=min_seq)

    async def get_next(self, subject: str, *, seq: int = 1, min_seq: int | None = None) -> StoredMsg:
        """Return the first message on `subject` (a filter may have wildcards) with a sequence of at least `seq`.

        Args:
            subject: The subject or filter.
            seq: The first stream sequence to look at.
            min_seq: As for `get`.

        Raises:
            BadSubjectError: `subject` is not a valid subject or filter.
            ValueError, MessageNotFoundError, nats.js.errors.NotFoundError, DirectGetDisabledError, RequestTimeoutError: As
                for `get`.

        Cancellation: Safe; nothing is left behind.

        Requires: nats-server 2.10 (ADR-31, Direct Get API).
        """
        check_filter(subject)
        return await self._single(Request(seq=check_sequence(seq, "seq"), next_by_subj=subject), min_seq=min_seq)

    async def get_at(self, when: datetime, *, subject: str | None = None, min_seq: int | None = None) -> StoredMsg:
        """Return the first message stored at or after `when`, an aware datetime.

        Args:
            when: The time, to the microsecond.
            subject: A subject or filter; None is every subject.
            min_seq: As for `get`.

        Raises:
            ValueError: `when` is not timezone-aware, or `min_seq` is out of range.
            TypeError: `when` is not a datetime.
            BadSubjectError: `subject` is not a valid subject or filter.
            MessageNotFoundError, nats.js.errors.NotFoundError, DirectGetDisabledError, RequestTimeoutError: As for `get`.
            UnsupportedFeatureError: The server is older than 2.11.

        Cancellation: Safe; nothing is left behind.

        Requires: nats-server 2.11 (ADR-31, Batched requests); where messages were deleted, before 2.12 also permission for
        ``STREAM.INFO`` and ``STREAM.MSG.GET``.
        """
        rfc3339(when, "when")
        if subject is not None:
            check_filter(subject)
        return await self._single(Request(start_time=when, next_by_subj=subject or ">"), min_seq=min_seq)

    async def _single(self, request: Request, *, min_seq: int | None) -> StoredMsg:
        observer = telemetry.observer
        if observer is None:
            return await self._read_one(request, min_seq)
        with observer.begin(telemetry.Kind.RECEIVE, self._js.connection, stream=self._stream) as operation:
            found = await self._read_one(request, min_seq)
            operation.describe(messages=1)
            return found

    async def _read_one(self, request: Request, min_seq: int | None) -> StoredMsg:
        if min_seq is None:
            return await read_one(self._js, self._stream, request, self._timeout)
        need = check_sequence(min_seq, "min_seq")
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._timeout
        with suppress(MessageNotFoundError):
            found = await read_one(self._js, self._stream, request, self._timeout)
            if found.stream == self._stream and found.seq >= need:
                return found
        try:
            state = await wait_for_sequence(self._js, self._stream, need, max(0.001, deadline - clock()))
            left = max(0.001, deadline - clock())
            if (when := request.start_time) is not None:  # servers before 2.12 find a time wrongly
                subject = request.next_by_subj or ">"
                seq = await first_since(self._js, state, when, left, subject=subject)
                if seq > state.last_seq:
                    raise not_found(self._stream, request)
                request = Request(seq=seq, next_by_subj=subject)
            at_leader = await get_at_leader(self._js, self._stream, request.body(), left)
        except NotPermittedError:
            raise
        except RequestTimeoutError as error:
            late = f"the leader did not answer or did not reach sequence {need} within {self._timeout:.4g} s"
            raise RequestTimeoutError(f"stream {self._stream!r}: {late}") from error
        if at_leader is None:
            raise not_found(self._stream, request)
        return at_leader

    def batch(
        self,
        batch: int,
        *,
        subject: str | None = None,
        seq: int | None = None,
        start_time: datetime | None = None,
        up_to_time: datetime | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
        min_seq: int | None = None,
    ) -> MessageBatch:
        """Read up to `batch` messages with one request; if the reply breaks off, another request reads the rest.

        Args:
            batch: The maximum number of messages, 1 to 2**63-1.
            subject: Filter, wildcards allowed; None is every subject.
            seq: The first stream sequence to look at (default 1).
            start_time: Start at the first message stored at or after this aware datetime instead.
            up_to_time: End before the first message stored after this aware datetime, to the microsecond.
            max_bytes: Stop after the message that brings subjects, headers and payloads to this many bytes, whatever the
                connection carries: on a slow one, other calls wait for the reply.
            min_seq: As for `scan`.

        Returns:
            The messages, in the order of their sequences; the request goes out on first use.

        Raises:
            ValueError: A number is out of range, a datetime is not timezone-aware, or both starts are given.
            TypeError: `start_time` or `up_to_time` is not a datetime.
            BadSubjectError: `subject` is not a valid subject or filter.
            JetStreamExtError, nats.errors.Error: While iterating: as for `scan`.

        Cancellation: The call itself sends nothing; see `MessageBatch` for the read.

        Requires: nats-server 2.11 (ADR-31, Batched requests).
        """
        start = _start(seq, start_time)
        if subject is not None:
            check_filter(subject)
        request = Request(
            seq=start,
            start_time=start_time,
            next_by_subj=subject or ">",  # without a filter, 2.11.0 answers 404 if `seq` itself was deleted
            batch=check_int(batch, "batch", high=_INT64_MAX),
            max_bytes=check_int(max_bytes, "max_bytes", high=_INT64_MAX),
        )
        return self._read(OneReply(request, up_to_ns=_nanoseconds(up_to_time)), min_seq=min_seq)

    def multi_last(
        self,
        subjects: Sequence[str],
        *,
        up_to_seq: int | None = None,
        up_to_time: datetime | None = None,
        batch: int | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
        min_seq: int | None = None,
    ) -> MessageBatch:
        """Read the last message of every subject that matches one of `subjects`, all as of one sequence.

        Without `batch`, the read pages to the end at that sequence. By ADR-31, an answer is exact only as far as the stream's
        history reaches: a subject that was overwritten since `up_to_seq` or `up_to_time` is missing from the answer if the
        stream does not keep the old message (``max_msgs_per_subject`` 1). If one is overwritten between two pages, the read
        raises `HistoryUnavailableError`. A read of now that fits into one page contains every subject.

        `MessageBatch.up_to_seq` is that sequence. Every page is of a responder that has reached it; the read waits (within
        the timeout) for one. If the message at that sequence was removed, or `up_to_seq` is beyond the end of the stream
        or of the responder, that needs permission for ``STREAM.INFO`` and ``STREAM.MSG.GET``.

        Args:
            subjects: Subjects and filters; together they may match 1024 subjects (a server's default).
            up_to_seq: The point in time as a stream sequence; None is now. If the stream ends before, it is the end of the
                stream, which `MessageBatch.up_to_seq` then says.
            up_to_time: The point in time as an aware datetime (exclusive) instead.
            batch: The maximum number of messages, 1 to 2**63-1.
            max_bytes: Bytes per page, 1 to 2**63-1; as for `batch`, also on a slow connection.
            min_seq: Read your own writes: wait (within the timeout) until the leader has this sequence, and for a replica
                of the stream that has it; a mirror's answer does not count. With `up_to_time`, the leader decides what was
                stored up to then. Needs permission for ``STREAM.INFO`` and ``STREAM.MSG.GET``.

        Returns:
            As for `batch`.

        Raises:
            ValueError: No subjects, a number out of range, a datetime that is not timezone-aware, or both points in time.
            TypeError: `subjects` is a single subject, or `up_to_time` is not a datetime.
            BadSubjectError: One of `subjects` is not a valid subject or filter.
            TooManySubjectsError: While iterating: the filters match too many subjects.
            RequestTimeoutError: While iterating: as for `scan`, and if no responder has reached the point in time.
            HistoryUnavailableError: While iterating: subjects changed between two pages; repeat it with a larger `max_bytes`.
            MirrorAnswersError, StreamRecreatedError: While iterating, with `min_seq`: as for `scan`.
            JetStreamExtError, nats.errors.Error: While iterating: as for `scan`.

        Cancellation: As for `batch`.

        Requires: nats-server 2.11 (ADR-31, Multi-subject requests).
        """
        check_list(subjects, "subjects", "subjects")
        filters = tuple(subjects)
        if not filters:
            raise ValueError("subjects must have at least one subject")
        for subject in filters:
            check_filter(subject)
        if up_to_seq is not None and up_to_time is not None:
            raise ValueError("give up_to_seq or up_to_time, not both")
        if up_to_time is not None:
            rfc3339(up_to_time, "up_to_time")
        request = Request(
            multi_last=filters,
            up_to_seq=None if up_to_seq is None else check_sequence(up_to_seq, "up_to_seq"),
            up_to_time=up_to_time,
            batch=None if batch is None else check_int(batch, "batch", high=_INT64_MAX),
            max_bytes=check_int(max_bytes, "max_bytes", high=_INT64_MAX),
        )
        if min_seq is not None:
            check_sequence(min_seq, "min_seq")
        return self._read(MultiLast(request, need=min_seq), min_seq=min_seq)

    def scan(
        self,
        *,
        subject: str | None = None,
        seq: int | None = None,
        start_time: datetime | None = None,
        up_to_seq: int | None = None,
        up_to_time: datetime | None = None,
        batch: int | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
        prefetch: int = 2,
        confirm: bool = False,
        min_seq: int | None = None,
        on_bad: Literal["error", "skip"] = "error",
    ) -> MessageBatch:
        """Read a whole range of the stream, with as many requests as it takes.

        Without `up_to_seq`, the read ends where the answering replica has no more messages. Memory is bounded: at most
        `prefetch` replies are on their way and one is being read, each of `max_bytes` plus one message.

        Args:
            subject: Filter, wildcards allowed; None is every subject.
            seq: First stream sequence (default 1).
            start_time: Start at the first message stored at or after this aware datetime instead.
            up_to_seq: Last stream sequence, inclusive.
            up_to_time: End before the first message stored after this aware datetime, to the microsecond.
            batch: Messages per request at most, 1 to 2**63-1; None lets requests follow the size of the messages.
            max_bytes: Bytes per request at most, 1 to 2**63-1; requests ask for no more than the connection carries in
                about half a second. After the connection was lost during a reply, they ask for an eighth, one at a time: a
                server with a small ``max_pending`` closes connections that read too much at once.
            prefetch: Requests in flight at most, 1 to 4.
            confirm: Prove at the stream's leader that the range is complete, and at the end that it is of one stream: a
                replica or mirror may lag, and its shorter answer looks like the end of the stream. Only messages of the
                stream itself count. If a mirror answers under the stream's name, the read asks again, because a replica may
                answer the next request. Without `up_to_seq`, the range ends at the leader's last sequence when the read
                starts. Needs permission for ``STREAM.INFO`` and ``STREAM.MSG.GET``. With `up_to_seq`, a client without
                permission for ``STREAM.INFO`` can read as well, but the read then does not notice if the stream is deleted
                and created again.
            min_seq: Read your own writes: wait (within the timeout) until the leader has this sequence, and prove the
                range up to it. Only messages of the stream itself count, as with `confirm`.
            on_bad: What to do about a message whose time, which the server adds to it, is malformed: with ``"error"``, the
                attribute `StoredMsg.time` raises `ResponseError`; with ``"skip"``, the read leaves the message out and logs
                a warning with its sequence. No released server sends such a message, and what a publisher stores is
                never bad.

        Returns:
            As for `batch`.

        Raises:
            ValueError, TypeError, BadSubjectError: As for `batch`.
            nats.js.errors.NotFoundError: While iterating: there is no such stream.
            DirectGetDisabledError: While iterating: no ``allow_direct``, or no server that can answer now, at once.
            UnsupportedFeatureError: While iterating: the server is older than 2.11.
            MessagesLostError: While iterating: messages were lost on their way, twice at the same place.
            RequestTimeoutError: While iterating: no answer came for `timeout` seconds, or for that time no responder was
                there, the leader did not reach `min_seq`, or no replica had what the leader has.
            MirrorAnswersError: While iterating, with `confirm` or `min_seq`: for `timeout` seconds, a mirror answered and
                no replica that has what the leader has.
            StreamRecreatedError: At the end, with `confirm` or `min_seq`: the stream was deleted and created again during the read.
            nats.js.errors.APIError: While iterating, with `confirm` or `min_seq`: the leader refused.
            StreamConfigMismatchError: While iterating, with `confirm` or `min_seq`: the stream has file storage and has
                reached sequence 2**62, and `up_to_seq` is not below it (see the class).
            JetStreamExtError, nats.errors.Error: While iterating: see the class.

        Cancellation: As for `batch`.

        Requires: nats-server 2.11 (ADR-31, Batched requests).
        """
        return MessageBatch(
            *scan_blocks(
                self._js,
                self._stream,
                self._timeout,
                subject=subject,
                seq=seq,
                start_time=start_time,
                up_to_seq=up_to_seq,
                up_to_time=up_to_time,
                batch=batch,
                max_bytes=max_bytes,
                prefetch=prefetch,
                confirm=confirm,
                min_seq=min_seq,
                on_bad=on_bad,
            )
        )

    def _read(self, plan: Plan, *, min_seq: int | None = None) -> MessageBatch:
        if min_seq is not None:
            check_sequence(min_seq, "min_seq")
        proved = min_seq is not None
        blocks = read_blocks(self._js, self._stream, plan, self._timeout, min_seq=min_seq, same_stream=proved)
        return MessageBatch(plan, blocks)


class ScanOptions(TypedDict, total=False):
    """The keyword arguments of every call that reads a whole range; see `DirectGet.scan`."""

    subject: str | None
    seq: int | None
    start_time: datetime | None
    up_to_seq: int | None
    up_to_time: datetime | None
    batch: int | None
    max_bytes: int
    prefetch: int
    confirm: bool
    min_seq: int | None
    on_bad: Literal["error", "skip"]


def scan_blocks(
    js: Context, stream: str, timeout: float, **options: Unpack[ScanOptions]
) -> tuple[Scan, AsyncGenerator[Block, None]]:
    """Check the arguments of `DirectGet.scan`; return its plan and its messages."""
    subject, start_time, up_to_seq = options.get("subject"), options.get("start_time"), options.get("up_to_seq")
    batch, min_seq, on_bad = options.get("batch"), options.get("min_seq"), options.get("on_bad", "error")
    start = _start(options.get("seq"), start_time)
    if subject is not None:
        check_filter(subject)
    plan = Scan(
        subject=subject,
        seq=start or 1,
        start_time=start_time,
        up_to_seq=None if up_to_seq is None else check_sequence(up_to_seq, "up_to_seq"),
        up_to_ns=_nanoseconds(options.get("up_to_time")),
        batch=None if batch is None else check_int(batch, "batch", high=_INT64_MAX),
        max_bytes=check_int(options.get("max_bytes", DEFAULT_MAX_BYTES), "max_bytes", high=_INT64_MAX),
        prefetch=check_int(options.get("prefetch", 2), "prefetch", high=4),
    )
    check_word(on_bad, ("error", "skip"), "on_bad")
    if min_seq is not None:
        check_sequence(min_seq, "min_seq")
    confirm = options.get("confirm", False)
    proved = confirm or min_seq is not None
    blocks = read_blocks(js, stream, plan, timeout, confirm=confirm, min_seq=min_seq, same_stream=proved)
    return plan, skip_malformed(blocks) if on_bad == "skip" else blocks


def _nanoseconds(time: datetime | None) -> int | None:
    """Return the last nanosecond of the microsecond of an aware datetime, since the epoch."""
    if time is None:
        return None
    rfc3339(time, "up_to_time")
    return (time - _EPOCH) // timedelta(microseconds=1) * 1000 + 999


def _start(seq: int | None, start_time: datetime | None) -> int | None:
    if start_time is None:
        return 1 if seq is None else check_sequence(seq, "seq")
    if seq is not None:
        raise ValueError("give seq or start_time, not both")
    rfc3339(start_time, "start_time")
    return None
