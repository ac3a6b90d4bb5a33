"""Reading a stream as a log: no consumer on the server, the reader owns its position."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Iterator
from typing import Final, Literal, Self

from nats.js import JetStreamContext

from jetstream_ext.client.api import get_at_leader, stream_state
from jetstream_ext.client.context import Context
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.client.retry import Retry
from jetstream_ext.errors import (
    DirectGetDisabledError,
    PositionLostError,
    StreamConfigMismatchError,
    StreamRecreatedError,
)
from jetstream_ext.log.offsets import OffsetStore
from jetstream_ext.log.positions import First, Last, Seq, Start, Stored, StoredOffset, Time, check_start
from jetstream_ext.protocol.direct import Request
from jetstream_ext.protocol.gaps import first_gap
from jetstream_ext.protocol.stored_msg import StoredMsg
from jetstream_ext.protocol.stream_state import StreamState
from jetstream_ext.protocol.subjects import check_filter


def check_readable(state: StreamState, server_version: str, *, others_delete: bool) -> None:
    """Refuse a stream that a log cannot be read from.

    Args:
        state: The stream.
        server_version: The connected server's version, for the error.
        others_delete: Whether the reader accepts that consumers delete messages before it has read them.

    Raises:
        DirectGetDisabledError: It lacks ``allow_direct``.
        StreamConfigMismatchError: Its consumers delete messages.
        UnsupportedFeatureError: Its server is older than 2.11.
    """
    state.check_direct_reads(server_version)
    if state.retention != "limits" and not others_delete:
        raise StreamConfigMismatchError(
            f"stream {state.name!r} has {state.retention} retention: acknowledgements of its consumers delete messages "
            "that this reader has not read. Read a copy of it with limits retention, or read what is left with "
            "on_lost='skip'",
            diff={"retention": ("limits", state.retention)},
        )


# Messages and bytes of a group, about. The two questions that a group costs should not count beside its messages.
_GROUP: Final = 4096
_GROUP_BYTES: Final = 4 << 20
_REQUEST_BYTES: Final = 1 << 20
# A filter can leave few messages among many sequences; a group then spans more of them.
_WIDEST: Final = 1 << 40
_ANY: Final = ">"
# How long a leader that was just elected may take to have what the last one had.
_SETTLE: Final = 3.0
_SETTLE_PAUSE: Final = 0.1


class _Source:
    """One stream, from the first look on: another one of the same name is an error.

    Args:
        js: nats-py's context.
        stream: The stream's name.
        subject: The filter, or None.
        timeout: Seconds to wait for an answer; None is the context's own.
        others_delete: Consumers may delete messages of it.
    """

    def __init__(
        self, js: JetStreamContext, stream: str, subject: str | None, timeout: float | None, *, others_delete: bool
    ) -> None:
        self._direct = DirectGet(js, stream, timeout=timeout)
        self._js = Context(js)
        self.context = js
        self.stream = stream
        self.subject = subject
        self.timeout: float = self._js.timeout if timeout is None else float(timeout)
        self.created: str | None = None
        self.checked: bool = False
        """Whether the leader has said that the stream can be read."""
        self._others_delete = others_delete
        self._span = _GROUP

    def end_of_group(self, position: int, last: int) -> int:
        """Return up to where to read from a position, in a stream that ends at `last`."""
        return min(last, position + self._span - 1)

    async def read(self, position: int, end: int) -> tuple[list[StoredMsg], int]:
        """Return the messages of a range, or of a part of it from its beginning on, and where that ends."""
        rows: list[StoredMsg] = []
        size, last = 0, end
        scan = self._direct.scan(
            subject=self.subject, seq=position, up_to_seq=end, max_bytes=_REQUEST_BYTES, confirm=True
        )
        async with scan as messages:
            async for message in messages:
                rows.append(message)
                size += len(message.data)
                if size >= _GROUP_BYTES or len(rows) >= 2 * _GROUP:
                    last = message.seq
                    break
        if last < end:
            self._span = max(1, last - position + 1)
        elif 2 * len(rows) < _GROUP and 2 * size < _GROUP_BYTES:
            self._span = min(self._span * 4, _WIDEST)
        return rows, last

    async def look(self) -> StreamState:
        """Return what the leader says now.

        Raises:
            StreamRecreatedError: The stream is another one.
            Exception: As for `check_readable` and `state.look`.
        """
        state = await stream_state(self._js, self.stream, self.timeout)
        if not self.checked:
            check_readable(state, self._js.connection.server_version, others_delete=self._others_delete)
            self.checked = True
        if self.created is None:
            self.created = state.created
        elif state.created != self.created:
            raise StreamRecreatedError(
                f"stream {self.stream!r} was deleted and created anew at {state.created}; the position belongs to the "
                f"one of {self.created}",
                stream=self.stream,
                expected=self.created,
                found=state.created,
            )
        return state

    async def settled(self, position: int) -> StreamState:
        """Look again for a while: a leader that was just elected may not have applied everything yet."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _SETTLE
        while True:
            state = await self.look()
            if position <= state.last_seq + 1:
                return state
            if loop.time() >= deadline:
                raise PositionLostError(
                    f"stream {self.stream!r} ends at sequence {state.last_seq}, before the position {position}: it has "
                    "lost its end, or the position is another stream's",
                    stream=self.stream,
                    expected=position,
                    got=state.last_seq + 1,
                )
            await asyncio.sleep(_SETTLE_PAUSE)

    def take_over(self, offset: StoredOffset) -> None:
        """Refuse a stored position that is not one of this stream."""
        if offset.stream != self.stream:
            raise ValueError(
                f"the position of {offset.name!r} is one in stream {offset.stream!r}, and this reader reads "
                f"{self.stream!r}: take another name"
            )
        if self.created is None:
            self.created = offset.created
        elif self.created != offset.created:
            raise StreamRecreatedError(
                f"stream {self.stream!r} of {self.created} is not the one that the position of {offset.name!r} belongs "
                f"to, of {offset.created}",
                stream=self.stream,
                expected=offset.created,
                found=self.created,
            )

    async def find(self, start: object, last: int) -> int:
        """Return where a start is that depends on the moment; `last` was the stream's last sequence before now."""
        found: StoredMsg | None = None
        if isinstance(start, Time):
            found = await self._ask(Request(start_time=start.when, next_by_subj=self.subject))
            if found is not None and found.time < start.when:
                found = None  # so servers can answer for a time that lies ahead
        elif isinstance(start, Last):
            found = await self._ask(Request(last_by_subj=self.subject or _ANY))
            if found is None and (self.subject or _ANY) == _ANY:
                found = await self._newest(last)
        return last + 1 if found is None else found.seq

    async def _newest(self, last: int) -> StoredMsg | None:
        """Return the newest message: for ``>`` servers look at the last sequence only, which can be deleted."""
        newest = await self._ask(Request(seq=1, next_by_subj=_ANY))
        while newest is not None and newest.seq < last:
            middle = (newest.seq + last + 1) // 2
            found = await self._ask(Request(seq=middle, next_by_subj=_ANY))
            if found is None:
                last = middle - 1
            else:
                newest = found
        return newest

    async def _ask(self, request: Request) -> StoredMsg | None:
        return await get_at_leader(self._js, self.stream, request.body(), self.timeout)


_log = logging.getLogger("jetstream_ext")

# The first pause at the end of the stream; it doubles up to `poll`.
_FIRST_PAUSE: Final = 0.005
_FIRST: Final = First()


class LogReader:
    """Read a stream in order, without a consumer; the position is the reader's own (Direct Get, ADR-31).

    ::

        reader = LogReader(js, "ORDERS", start=Time(yesterday), subject="orders.eu.>")
        async for msg in reader:        # to the end of the stream; with tail=True it waits for more
            ...
        reader.position                 # the next sequence to read

    Every message that is stored, and matches, is returned exactly once and in order, whichever replica or mirror
    answers: the end of the stream, and what is missing in the middle, are proved at its leader. Messages that were
    deleted from the middle are passed over. It is an error if the reader comes too late: if what it should read next
    was purged, has expired, or went with the stream.

    An ``async for`` may be left and taken up again; nothing has to be closed. One task at a time may read.

    Args:
        js: nats-py's JetStream context; its prefix, domain and timeout are honoured.
        stream: The stream's name.
        start: `First()`, `Seq(n)`, `Time(t)`, `Last()`, `New()` or `Stored(name)`.
        subject: Read only what matches this filter (wildcards allowed); None is everything.
        tail: At the end of the stream, ``async for`` waits for more instead of ending. The leader is asked again after
            5 ms, then after twice as long each time, up to `poll`.
        on_lost: What happens where messages are gone that the reader has not read: ``"error"`` raises
            `PositionLostError`, ``"skip"`` goes on behind them, with a warning in the log ``jetstream_ext``. A filtered
            reader cannot know whether what is gone would have matched; it takes it that it would.
        offsets: Where `Stored` is looked up and `OffsetStore.commit` stores; None is ``OffsetStore(js)``.
        timeout: Seconds to wait for an answer; None is the context's own.
        patience: Seconds that trouble which passes (an election, a restart, a lost connection) may last.
        poll: The longest pause, in seconds, between two looks at the end of the stream: how late a message may be
            noticed after a quiet time, and how often an idle reader asks.

    Raises:
        BadSubjectError: The name or the filter cannot be one.
        TypeError: `start` is none.
        ValueError: A number is not over 0, or `on_lost` is something else. While reading: the stored position is one in
            another stream.
        PositionLostError: While reading: see `on_lost`; and if the stream ends before the position. The position stays;
            `seek` to the error's ``got`` goes on behind the loss.
        StreamRecreatedError: While reading: the stream is not the one that the reader began with.
        StreamConfigMismatchError: While reading: the stream's retention is not ``limits``, so that consumers delete
            messages (with ``on_lost="skip"`` that is no error).
        DirectGetDisabledError: While reading: the stream lacks ``allow_direct``.
        nats.js.errors.NotFoundError: While reading: there is no such stream, or no bucket of `offsets`.
        UnsupportedFeatureError: While reading: the server is older than 2.11.
        RequestTimeoutError, nats.js.errors.ServiceUnavailableError: While reading: trouble that lasted longer than
            `patience`.

    Cancellation: Any call may be cancelled. The position is behind the last message that was returned, nothing is left
        behind, and the reader can be used again.

    Requires: nats-server 2.11, ``allow_direct``, permission for ``STREAM.INFO``, ``STREAM.MSG.GET`` and ``DIRECT.GET``.
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
    ) -> None:
        if subject is not None:
            check_filter(subject)
        if on_lost not in ("error", "skip"):
            raise ValueError(f"on_lost must be 'error' or 'skip', not {on_lost!r}")
        for name, value in (("patience", patience), ("poll", poll)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name} must be a number of seconds over 0, not {value!r}")
        self._skips = on_lost == "skip"
        self._source = _Source(js, stream, subject, timeout, others_delete=self._skips)
        self._tail = tail
        self._offsets = OffsetStore(js, timeout=timeout) if offsets is None else offsets
        self._patience = float(patience)
        self._poll = float(poll)
        self._reading = False
        self._name = start.name if isinstance(start, Stored) else None
        self._seek(check_start(start))

    def __repr__(self) -> str:
        return f"<LogReader stream={self._source.stream!r} subject={self._source.subject!r} position={self._position}>"

    # -- where it is --------------------------------------------------------------------------------------------

    @property
    def context(self) -> JetStreamContext:
        """The context that the reader was made with."""
        return self._source.context

    @property
    def stream(self) -> str:
        """The stream's name."""
        return self._source.stream

    @property
    def subject(self) -> str | None:
        """The filter."""
        return self._source.subject

    @property
    def tail(self) -> bool:
        """Whether iteration waits at the end of the stream."""
        return self._tail

    @property
    def offsets(self) -> OffsetStore:
        """Where the position is stored."""
        return self._offsets

    @property
    def name(self) -> str | None:
        """The name of a reader that was started with `Stored`."""
        return self._name

    @property
    def created(self) -> str | None:
        """When the stream was created, in the server's words; None before the reader has asked."""
        return self._source.created

    @property
    def position(self) -> int | None:
        """The next sequence to read, from 1; None before the start was looked up (by the first read, or `open`).

        Of all sequences below it, the reader has returned what was stored there and matched, or was told to begin
        behind them. Nothing from it on has been returned. A reader that has reached the end is at one more than the
        stream's last sequence, whether or not that one matched.
        """
        return self._position

    def seek(self, start: Start | StoredOffset | int) -> None:
        """Go on somewhere else with the next read.

        Args:
            start: As for the reader; an integer is a stream sequence, a `StoredOffset` is what it says.

        Raises:
            TypeError, ValueError: It is none.
            RuntimeError: Another task is reading.
        """
        self._check_alone()
        if isinstance(start, int):
            start = Seq(start)
        self._seek(start if isinstance(start, StoredOffset) else check_start(start))

    def _seek(self, start: Start | StoredOffset) -> None:
        self._start = start
        self._position: int | None = start.seq if isinstance(start, Seq) else None
        # At the start that "the oldest message" is, nothing is lost before there was a first message.
        self._at_head = False
        self._state: StreamState | None = None
        self._ready: deque[StoredMsg] = deque()
        self._ahead = 0

    async def open(self) -> int:
        """Look the start up, unless that is done, and return the position.

        Reading does this by itself; call it to pin a start that depends on the moment.

        Raises:
            RuntimeError: Another task is reading.
            Exception: As for reading (see `LogReader`), but for `PositionLostError`.

        Cancellation: Safe; nothing is left behind.
        """
        with self._alone():
            retry = Retry(self._patience)
            while True:
                try:
                    if self._position is None:
                        return await self._resolve()
                    if self._source.created is None:
                        await self._look()
                    return self._position
                except Exception as error:
                    await self._wait_out(error, retry)

    # -- reading ------------------------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StoredMsg:
        self._check_alone()
        if not self._ready:
            with self._alone():
                if not await self._fill(None if self._tail else 0.0):
                    raise StopAsyncIteration
        return self._take()

    async def read(self, max_messages: int = 1000, timeout: float | None = None) -> list[StoredMsg]:
        """Return the next messages: as many as there are now, up to `max_messages`.

        Where there are none, it waits for the first one; an empty list means that none came, as the leader says.

        Args:
            max_messages: From 1. One call returns about 4,000 messages or 4 MiB at most.
            timeout: Seconds to wait for a first message, whatever `tail` is; 0 does not wait. None is the reader's
                timeout with ``tail=True``, else 0. Trouble that passes is waited out besides (see `patience`).

        Raises:
            ValueError: A number is out of range.
            RuntimeError: Another task is reading.
            Exception: As for iteration; see `LogReader`.

        Cancellation: Safe: the position has not moved.
        """
        if isinstance(max_messages, bool) or not isinstance(max_messages, int) or max_messages < 1:
            raise ValueError(f"max_messages must be an integer from 1 up, not {max_messages!r}")
        if timeout is None:
            timeout = self._source.timeout if self._tail else 0.0
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
            raise ValueError(f"timeout must be a number of seconds from 0 up, not {timeout!r}")
        self._check_alone()
        if not self._ready:
            with self._alone():
                await self._fill(timeout)
        return [self._take() for _ in range(min(max_messages, len(self._ready)))]

    def _take(self) -> StoredMsg:
        message = self._ready.popleft()
        self._position = message.seq + 1 if self._ready else self._ahead
        return message

    def _check_alone(self) -> None:
        if self._reading:
            raise RuntimeError("another task is reading with this reader; give each task one of its own")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        self._check_alone()
        self._reading = True
        try:
            yield
        finally:
            self._reading = False

    async def _fill(self, wait: float | None) -> bool:
        """Have messages ready; False: for `wait` seconds (None: for ever) the stream had no more."""
        loop = asyncio.get_running_loop()
        deadline = math.inf if wait is None else loop.time() + wait
        retry = Retry(self._patience)
        pause = min(_FIRST_PAUSE, self._poll)
        while True:
            try:
                if await self._advance():
                    return True
            except Exception as error:
                await self._wait_out(error, retry)
                continue
            retry.reset()
            left = deadline - loop.time()
            if left <= 0:
                return False
            # No event tells when something is stored: who mirrors, sources or imports does not see it published.
            await asyncio.sleep(min(pause, left))
            pause = min(pause * 2, self._poll)

    async def _wait_out(self, error: Exception, retry: Retry) -> None:
        """Wait a little after trouble that passes; raise everything else."""
        if isinstance(error, DirectGetDisabledError) and not self._source.checked:
            raise error  # the leader says so
        await retry.pause(error)
        self._state = None

    async def _advance(self) -> bool:
        """Have messages ready; False: the stream ends before the position, as its leader says."""
        while True:
            position = await self._resolve() if self._position is None else self._position
            state = self._state
            if state is None or position > state.last_seq:
                state = await self._look()
                if position > state.last_seq + 1:
                    state = self._state = await self._source.settled(position)
            if position > state.last_seq:
                return False
            await self._group(position, state)
            if self._ready:
                return True

    async def _group(self, position: int, state: StreamState) -> None:
        """Read a group of messages, have it checked by the leader, and make it ready."""
        if position < state.first_seq and not self._at_head:
            position = self._lost(position, state.first_seq)
        rows, end = await self._source.read(position, self._source.end_of_group(position, state.last_seq))
        state = await self._look()
        missing = first_gap([row.seq for row in rows], position, end)
        if missing is None or state.first_seq <= missing:
            self._at_head = False
        elif not self._at_head:
            # What was read before the hole is whole; the hole is for the next call to tell of.
            kept = [row for row in rows if row.seq < missing]
            if kept:
                rows, end = kept, missing - 1
            else:
                self._lost(missing, min(state.first_seq, end + 1))
        self._ready.extend(rows)
        self._ahead = end + 1
        if not rows:
            self._position = self._ahead

    # -- what the leader says -----------------------------------------------------------------------------------

    async def _look(self) -> StreamState:
        self._state = await self._source.look()
        return self._state

    def _lost(self, position: int, first: int) -> int:
        """Raise, or return where to go on."""
        what = f"stream {self.stream!r}: sequences {position} to {first - 1} were removed before they were read"
        if self.subject is not None:
            what += f" (which of them match {self.subject!r} cannot be known)"
        if not self._skips:
            raise PositionLostError(
                f"{what}; seek to {first} to go on behind them",
                stream=self.stream,
                expected=position,
                got=first,
            )
        _log.warning("%s; going on at %d", what, first)
        return first

    async def _resolve(self) -> int:
        """Find out where the start is."""
        start = self._start
        if isinstance(start, Stored):
            start = await self._offsets.fetch(start.name) or start.default
        if isinstance(start, StoredOffset):
            self._source.take_over(start)
        state = await self._look()
        if isinstance(start, Seq | StoredOffset):
            position = start.seq
        elif isinstance(start, First):
            position = state.first_seq
        else:
            position = await self._source.find(start, state.last_seq)
        self._at_head = isinstance(start, First)
        self._position = position
        return position
