"""Reading a stream as a log: no consumer on the server, the reader owns its position."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from typing import Final, Literal, Self

from nats.js import JetStreamContext

from jetstream_ext.client.connection import Context
from jetstream_ext.client.doorbell import Waiter, shared
from jetstream_ext.client.retry import Retry, is_transient, is_transient_read
from jetstream_ext.log.observed import consumer_of, observe_lag
from jetstream_ext.log.offsets import (
    Checkpoint,
    First,
    OffsetStore,
    Seq,
    Start,
    Stored,
    StoredOffset,
    Time,
    check_start,
    decode_checkpoint,
)
from jetstream_ext.log.reading import TrustedLog, VerifiedLog
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.options import check_bool, check_int, check_seconds, check_word
from jetstream_ext.protocol.records import Record
from jetstream_ext.protocol.subjects import check_filter, check_name
from jetstream_ext.text import get_logger, log_state

_log = get_logger("log")

_FIRST: Final = First()


class LogReader:
    """Read a stream in order, without a consumer; the reader owns its position (Direct Get, ADR-31).

    ::

        reader = LogReader(js, "ORDERS", start=Time(yesterday), subject="orders.eu.>")
        async for msg in reader:        # to the end of the stream; with tail=True it waits for more
            ...
        reader.position                 # the next sequence to read

    The reader returns every stored message that matches exactly once and in order, whichever replica or mirror answers:
    the stream's leader proves the end of the stream and every gap in the middle. The reader skips messages that were
    deleted from the middle. It raises an error if the messages at its position were purged, have expired, or were
    deleted with the stream.

    On a stream that keeps the newest messages of each subject (``max_msgs_per_subject``, or rollups of a subject) the
    reader also skips messages that newer ones of their subjects replaced, wherever they were. It returns the newest
    message of every subject. A removed message leaves no trace of its subject, so if messages are missing at the beginning
    of such a stream, the leader's report of the stream decides whether they were replaced or are lost: how many messages
    and subjects it has and had, its limits, and whether a rollup was stored. The page "Streams as logs" has the rules. A
    purge, a deletion or the end of a message's own TTL that happened before this reader checked the stream for the first
    time counts as a replacement, and so does one that as many new messages and subjects hide, or a rollup.

    An ``async for`` may be left and continued later; nothing has to be closed, and nothing is left on the server. One task at
    a time may read.

    Args:
        js: nats-py's JetStream context; its prefix, domain and timeout are honoured.
        stream: The stream's name.
        start: `First()`, `Seq(n)`, `Time(t)`, `Last()`, `New()`, `Stored(name)` or `Checkpoint(text)`. With `First()`, what
            is removed before the reader returns its first message, or has found that none matches so far, is no loss; what
            is removed after that is one.
        subject: Read only what matches this filter (wildcards allowed); None is everything.
        tail: At the end of the stream, ``async for`` waits for more instead of ending.
        on_lost: What happens where messages were lost that the reader has not read: ``"error"`` raises
            `PositionLostError`, ``"skip"`` continues after them and logs a warning to the logger ``jetstream_ext.log``. A
            filtered reader cannot know whether the removed messages would have matched; it assumes so.
        offsets: Where `Stored` is looked up and `OffsetStore.commit` stores; None is ``OffsetStore(js)``.
        timeout: Seconds to wait for an answer; None is the context's own.
        patience: Seconds that transient errors (an election, a restart, a lost connection) may last. A call fails after
            `timeout` and `patience` together if nothing answers.
        poll: Without a doorbell, the longest pause, in seconds, between two requests at the end of the stream: how late the
            reader may notice a message after a quiet time, and how often an idle reader asks.
        doorbell: At the end of the stream, wait for a doorbell, which rings within a millisecond, and ask the leader once in
            5.5 s. It is a subscription to the subjects for one message, or else an ephemeral consumer, and all that wait for
            the same on one connection share it. Where neither is possible or permitted, the reader polls, as it does with
            False, and with ``confirm=False``.
        confirm: Have the leader verify what is read. False trusts the replica or mirror that answers and asks no leader:
            for many readers of one stream, and for reading a mirror or replica while the leader is away. The end of the
            stream is then where the responder's is. Messages that the responder lacks or that were removed are skipped
            without an error, and so is everything from sequence 2**62 on with file storage, where servers find no
            messages. A recreated stream is not noticed. `on_lost` has no effect. `Stored` still asks the leader of the
            bucket of `offsets`.

    Attributes:
        context: The JetStream context.
        stream: The stream's name.
        subject: The filter, or None.
        tail: Whether the iteration waits at the end of the stream.
        confirm: Whether the leader verifies what is read.
        offsets: Where positions are stored.
        name: The name of a reader that was started with `Stored`, or None.

    Raises:
        BadSubjectError: The stream's name or the filter is not valid.
        TypeError: `start` is not a start, or a number is of another type.
        ValueError: A number is not over 0, or `on_lost` is another word. While reading: the stored position or checkpoint
            belongs to another stream.
        PositionLostError: While reading: see `on_lost`; also if the stream ends before the position. The position
            stays; `seek` to the error's ``got`` continues after the loss.
        StreamRecreatedError: While reading: the stream was deleted and created again since the reader began, or since the
            position was stored. It counts as created again if it has another message at the sequence of the last one that
            the reader knew of (it was restored from an older copy, or emptied), or if that one is gone and the stream's
            creation time has changed. For a stored position or a checkpoint, the creation time decides alone. `seek` accepts
            the stream as it is now.
        StreamConfigMismatchError: While reading: the stream's retention is not ``limits``, so that consumers delete
            messages (no error with ``on_lost="skip"``); or it has file storage and has reached sequence 2**62, from which on
            servers find no messages.
        DirectGetDisabledError: While reading: the stream lacks ``allow_direct``.
        nats.js.errors.NotFoundError: While reading: the stream, or the bucket of `offsets`, does not exist.
        UnsupportedFeatureError: While reading: the server is older than 2.11.
        RequestTimeoutError, nats.js.errors.ServiceUnavailableError: While reading: transient errors lasted longer than
            `patience`.

    Cancellation: Any call may be cancelled. The position is then after the last message that was returned, nothing is
        left behind, and the reader can be used again.

    Requires: nats-server 2.11, ``allow_direct``, permission for ``DIRECT.GET`` and, unless ``confirm=False``, for
        ``STREAM.INFO`` and ``STREAM.MSG.GET``.
    """

    def __init__(
        self,
        js: JetStreamContext,
        stream: str,
        *,
        start: Start = _FIRST,
        subject: str | None = None,
        tail: bool = False,
        on_lost: Literal["error", "skip"] = "error",
        offsets: OffsetStore | None = None,
        timeout: float | None = None,
        patience: float = 30.0,
        poll: float = 0.25,
        confirm: bool = True,
        doorbell: bool = True,
    ) -> None:
        check_name(stream, "stream name")
        if subject is not None:
            check_filter(subject)
        check_word(on_lost, ("error", "skip"), "on_lost")
        check_bool(doorbell, "doorbell")
        self.context: JetStreamContext = js
        self.stream: str = stream
        self.subject: str | None = subject
        self.tail: bool = tail
        self.confirm: bool = confirm
        self.name: str | None = start.name if isinstance(start, Stored) else None
        self.offsets: OffsetStore = OffsetStore(js, timeout=timeout) if offsets is None else offsets
        self._patience = check_seconds(patience, "patience")
        context, poll = Context(js), check_seconds(poll, "poll")

        def new_waiter() -> Waiter:
            return Waiter(shared(context, stream, subject), poll=poll, rings=doorbell and confirm)

        # Groups use it as well: they read to the end again and again.
        self.source: TrustedLog = (VerifiedLog if confirm else TrustedLog)(
            context, stream, subject, context.resolve_timeout(timeout), new_waiter, skips=on_lost == "skip"
        )
        self._reading = False
        self._start_at(check_start(start))

    def __repr__(self) -> str:
        return f"<LogReader stream={self.stream!r} subject={self.subject!r} position={self.position}>"

    @property
    def created(self) -> str | None:
        """When the stream was created, as the server writes it; None before the reader has asked.

        With ``confirm=False`` the reader does not ask: it is what a stored position or checkpoint says, or None.
        """
        return self.source.created

    @property
    def position(self) -> int | None:
        """The next sequence to read, from 1; None before the start was looked up (by the first read, or `open`).

        The reader has returned every matching message below it, except those before its start, and no message at or
        above it. At the end, it is one more than the stream's last sequence, whether or not that message matched; with
        ``confirm=False`` it is one more than the sequence of the last message returned.
        """
        return self._position

    @property
    def checkpoint(self) -> str:
        """The position as text, with the stream and when it was created. `Checkpoint` starts a reader there.

        Store it in your own database, in the transaction that stores the results of the messages before it. Inside an
        ``async for`` it is the position behind the message of this round. With ``confirm=False`` the reader does not know
        when the stream was created, and a reader that starts there does not notice that it was created again.

        Raises:
            RuntimeError: The position is not known yet: read first, or await `open`.
        """
        if self.position is None or (self.created is None and self.confirm):
            raise RuntimeError("the position of this reader is not known yet: read first, or await reader.open()")
        return Record(stream=self.stream, created=self.created or "", seq=self.position).encode().decode()

    def seek(self, start: Start | StoredOffset | int) -> None:
        """Continue at another place with the next read.

        Args:
            start: As for the reader; an integer is a stream sequence, a `StoredOffset` is the position in it.

        Raises:
            TypeError, ValueError: `start` is not a start.
            RuntimeError: Another task is reading.
        """
        with self._exclusive():
            if isinstance(start, int):
                start = Seq(start)
            self._start_at(start if isinstance(start, StoredOffset) else check_start(start))
            log_state(_log, f"reader of {self.stream!r}", "seek", start=self._start)

    def _start_at(self, start: Start | StoredOffset) -> None:
        self._start = start
        self._position = start.seq if isinstance(start, Seq) else None
        self._ready: deque[StoredMsg] = deque()  # the messages from the position on
        self._after = 0  # the position once they are returned
        # What is stored before that time, and before the first message to return, is left out.
        self._not_before: datetime | None = None
        self.source.restart(self._position)

    async def open(self) -> int:
        """Look the start up, unless that is done, and return the position.

        Reading does this by itself; call it to pin a start that depends on the moment.

        Raises:
            RuntimeError: Another task is reading.
            Exception: As for reading (see `LogReader`), except `PositionLostError`.

        Cancellation: Safe; nothing is left behind.
        """
        with self._exclusive():
            return await self._retry().call(self._resolve)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StoredMsg:
        if not self._ready:
            with self._exclusive():
                if not await self._fill(math.inf, wait=self.tail):
                    raise StopAsyncIteration
        return self._take()

    def _take(self) -> StoredMsg:
        message = self._ready.popleft()
        self._position = message.seq + 1 if self._ready else self._after
        return message

    async def read(self, max_messages: int = 1000, timeout: float | None = None) -> list[StoredMsg]:
        """Return the next messages: as many as are stored now, up to `max_messages`.

        If there are none, the call waits for the first one. An empty list means that the leader reported none in time.

        Args:
            max_messages: From 1. One call returns about 4,000 messages or 4 MiB at most.
            timeout: Seconds to wait for a first message, whatever `tail` is; 0 reads to the end of the stream, past what
                `subject` or the start leaves out, and does not wait there. What is stored during the call does not move that
                end. None is the reader's timeout with ``tail=True``, else 0. Transient errors may take the reader's `timeout`
                and `patience` in addition.

        Raises:
            ValueError, TypeError: A number is out of range, or of another type.
            RuntimeError: Another task is reading.
            Exception: As for iteration; see `LogReader`.

        Cancellation: Safe: the position has not moved.
        """
        if timeout is None:
            timeout = self.source.timeout if self.tail else 0.0
        check_seconds(timeout, "timeout", zero=True)
        return await self._read(max_messages, timeout or math.inf, wait=timeout > 0) or []

    async def read_for(self, seconds: float, max_messages: int = 1000) -> list[StoredMsg] | None:
        """Return the next messages as `read` does, an empty list after `seconds` without one, or None at the end of the stream.

        With ``tail=True`` the stream has no end. Call it in a loop to do something else every `seconds`, such as storing the
        position: that also moves while nothing matches.

        Args:
            seconds: How long the call may look for a first message. One request more, and transient errors, may take the
                reader's `timeout` and `patience` in addition.
            max_messages: As for `read`.

        Raises:
            ValueError, TypeError: A number is out of range, or of another type.
            RuntimeError: Another task is reading.
            Exception: As for iteration; see `LogReader`.

        Cancellation: Safe: the position has not moved.
        """
        check_seconds(seconds, "seconds")
        return await self._read(max_messages, seconds, wait=self.tail)

    async def _read(self, max_messages: int, seconds: float, *, wait: bool) -> list[StoredMsg] | None:
        check_int(max_messages, "max_messages")
        if not self._ready:
            with self._exclusive():
                if not await self._fill(asyncio.get_running_loop().time() + seconds, wait=wait):
                    return None
        return [self._take() for _ in range(min(max_messages, len(self._ready)))]

    async def lag(self) -> int:
        """Return how many sequences the stream has at or above the position, whether or not their messages match.

        The leader is asked; with ``confirm=False`` the responder, which counts the messages that match `subject`.

        Raises:
            RuntimeError: Another task is reading.
            Exception: As for `open`.

        Cancellation: Safe; nothing is left behind.
        """
        with self._exclusive():
            return await self._retry().call(self._lag)

    async def _lag(self) -> int:
        return await self.source.lag(await self._resolve())

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        if self._reading:
            raise RuntimeError("another task is reading with this LogReader; use one LogReader per task")
        self._reading = True
        try:
            yield
        finally:
            self._reading = False

    def _retry(self) -> Retry:
        return Retry(self._patience, transient=self._is_transient)

    def _is_transient(self, error: Exception) -> bool:
        # Direct gets that the leader calls disabled stay disabled; once it allows them, the responders are only away.
        return is_transient_read(error) if self.source.readable else is_transient(error)

    async def _fill(self, until: float, *, wait: bool) -> bool:
        """Make messages ready, or return at the time `until`; without `wait`, return False at the end of the stream."""
        clock, retry, few = asyncio.get_running_loop().time, self._retry(), True
        waiter: Waiter | None = None
        with contextlib.ExitStack() as waiting:
            while True:
                try:
                    ended = await retry.attempt(partial(self._advance, until, few=few))
                except Exception as error:
                    few = False  # their answers may have been too large for the connection
                    observe_lag(self, None)
                    await retry.pause_if_transient(error)
                    self.source.state = None
                    continue
                if ended and not wait:
                    return False
                if self._ready or clock() >= until:
                    if self._ready and waiter is not None:
                        waiter.found()
                    return True
                retry.reset()
                waiter = waiter or waiting.enter_context(self.source.waiter)
                await waiter.pause(self.source.state, self._position or 1, until)

    async def _advance(self, until: float, *, few: bool) -> bool:
        """Make messages ready; return True if there are none up to the stream's end.

        That is the end that this call sees first, because others may store messages as fast as they are read. Return False
        at the time `until` as well, after a group that has nothing to return.
        """
        end, clock = math.inf, asyncio.get_running_loop().time
        position = await self._resolve()
        while True:
            rows, after, behind, last = await self.source.read(position, consumer_of(self), few=few)
            observe_lag(self, behind)
            if rows and (start := self._not_before) is not None:
                rows = list(itertools.dropwhile(lambda row: row.time < start, rows))
            if rows:
                self._ready.extend(rows)
                self._after, self._not_before = after, None
                log_state(_log, f"reader of {self.stream!r}", "messages ready", messages=len(rows), position=after)
                return False
            self._position = position = after
            end = min(end, last)
            if position >= end:
                return True
            if clock() >= until:
                return False

    async def _resolve(self) -> int:
        """Return the position; look up the start and the stream, unless that is done."""
        if self._position is not None and not (self.confirm and self.created is None):
            return self._position
        start = self._start
        if isinstance(start, Stored):
            start = await self.offsets.fetch(start.name) or start.default
        if isinstance(start, Checkpoint):
            start = decode_checkpoint(start.text)
        if isinstance(start, StoredOffset) and start.stream != self.stream:
            what = f"the stored position of {start.name!r}" if start.name else "the checkpoint"
            raise ValueError(
                f"{what} belongs to stream {start.stream!r}, and this reader reads {self.stream!r}; "
                f"{'take another name' if start.name else 'keep one checkpoint for each stream'}"
            )
        self._position = await self.source.find(start)
        if isinstance(start, Time):
            self._not_before = start.when  # there may be no message yet, and a responder may lack some
        log_state(_log, f"reader of {self.stream!r}", "start found", position=self._position)
        return self._position
