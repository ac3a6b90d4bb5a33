"""Reading a stream as a log: no consumer on the server, the reader owns its position."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from operator import attrgetter
from typing import Final, Literal, Self

from nats.js import JetStreamContext

from jetstream_ext.client.api import (
    bisect_time,
    check_same_stream,
    first_since,
    gather_bounded,
    get_at_leader,
    newest_up_to,
    settled_state,
    stream_state,
)
from jetstream_ext.client.connection import Context
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.client.direct_reader import MessageBatch, link_of, read_blocks, read_one
from jetstream_ext.client.doorbell import Waiter, shared
from jetstream_ext.client.replaced import were_replaced_by_newer
from jetstream_ext.client.retry import Retry, is_transient, is_transient_read
from jetstream_ext.errors import (
    MessageNotFoundError,
    PositionLostError,
    RequestTimeoutError,
    StreamConfigMismatchError,
    StreamRecreatedError,
)
from jetstream_ext.log.observed import consumer_of, observe_lag, observed_receiving
from jetstream_ext.log.offsets import First, Last, OffsetStore, Seq, Start, Stored, StoredOffset, Time, check_start
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import DEFAULT_MAX_BYTES, Request, StoredMsg
from jetstream_ext.protocol.feature_table import START_TIME_LEVEL
from jetstream_ext.protocol.loss import Gaps
from jetstream_ext.protocol.numbers import LARGEST
from jetstream_ext.protocol.options import check_bool, check_int, check_seconds, check_word
from jetstream_ext.protocol.reads import OneReply, Scan
from jetstream_ext.protocol.subjects import can_be_asked_for, check_filter
from jetstream_ext.text import get_logger, log_state, numbered, plural

_log = get_logger("log")

_FIRST: Final = First()
# Messages and bytes of a group, about. A group costs two requests, which should be few compared with its messages.
_GROUP: Final = 4096
_GROUP_BYTES: Final = 4 << 20
_REQUEST_BYTES: Final = 1 << 20
# So few messages are read one by one from the leader: one round trip, and no replica or mirror has to catch up. The answers
# have a third more bytes, and together they must not be too much for the connection.
_FEW: Final = 8
_FEW_BYTES: Final = 16 << 20
# The most sequences of a group: a filter can leave few messages among many sequences.
_WIDEST: Final = 1 << 40


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
    message of every subject. A removed message leaves no trace of its subject, so if messages are missing at the
    beginning of such a stream, the reader decides by the stream's state. The messages are lost

    * if the stream is empty, has too few messages for one subject to have reached ``max_msgs_per_subject``, or refuses
      newer messages instead (``discard_new_per_subject``);
    * if a limit may have removed them: ``max_msgs`` is reached, less than one message fits into ``max_bytes`` (both only
      with discard ``old``), or they may be older than ``max_age`` (and the delete markers that replaced them may be gone);
    * if subjects have disappeared since this reader last checked the stream's beginning, or if the stream has fewer
      messages than then and no rollup was stored since (or less than 5 s before). Compaction never does that; purges,
      deletions and the expiry of a message's own TTL do.

    Otherwise they were replaced. Three cases cannot be decided. A purge, a deletion or the end of a message's own TTL that
    happened before this reader checked the stream for the first time, or after which as many new subjects (or messages)
    arrived, or (if rollups are allowed) a rollup, more than about 4,000 messages or 4 MiB, or (if messages have TTLs) one
    that is gone again after a second or more and may have been a rollup, counts as a replacement. Limits that were changed are known to the
    reader only if it checked the stream before and after; then the old and the new ones count. A marker that the server
    stores when a TTL ends (``subject_delete_marker_ttl``) replaces the message.

    An ``async for`` may be left and continued later; nothing has to be closed, and nothing is left on the server. One task at
    a time may read.

    Args:
        js: nats-py's JetStream context; its prefix, domain and timeout are honoured.
        stream: The stream's name.
        start: `First()`, `Seq(n)`, `Time(t)`, `Last()`, `New()` or `Stored(name)`. With `First()`, what is removed before
            the reader returns its first message, or has found that none matches so far, is no loss; what is removed after
            that is one.
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
        ValueError: A number is not over 0, or `on_lost` is another word. While reading: the stored position belongs to
            another stream.
        PositionLostError: While reading: see `on_lost`; also if the stream ends before the position. The position
            stays; `seek` to the error's ``got`` continues after the loss.
        StreamRecreatedError: While reading: the stream was deleted and created again since the reader began, or since the
            position was stored. It counts as created again if its creation time has changed and the first and last messages
            that the reader last knew of are gone, or if it has another message where the reader has been: it was restored
            from an older copy, or emptied. For a stored position, the creation time decides alone.
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
        if subject is not None:
            check_filter(subject)
        check_word(on_lost, ("error", "skip"), "on_lost")
        self._patience = check_seconds(patience, "patience")
        self._poll = check_seconds(poll, "poll")
        check_bool(doorbell, "doorbell")
        self._rings = doorbell and confirm
        self._waiter: Waiter | None = None  # at the end of the stream
        self._skips = on_lost == "skip"
        self._context = Context(js)
        self._timeout = self._context.resolve_timeout(timeout)
        self._direct = DirectGet(js, stream, timeout=timeout)
        self._span = _GROUP
        self._created: str | None = None
        self._seen: StreamState | None = None  # the last one; the next must be of the same stream
        self._checked = False  # the leader has said that the stream can be read
        self.context: JetStreamContext = js
        self.stream: str = stream
        self._source = f"reader of {stream!r}"  # for the log
        self.subject: str | None = subject
        self.tail: bool = tail
        self.confirm: bool = confirm
        self.offsets: OffsetStore = OffsetStore(js, timeout=timeout) if offsets is None else offsets
        self.name: str | None = start.name if isinstance(start, Stored) else None
        self._pending = 0  # how many messages the last answer of a responder had and announced
        self._reading = False
        self._state: StreamState | None = None
        self._start_at(check_start(start))

    def __repr__(self) -> str:
        return f"<LogReader stream={self.stream!r} subject={self.subject!r} position={self._position}>"

    @property
    def created(self) -> str | None:
        """When the stream was created, as the server writes it; None before the reader has asked.

        With ``confirm=False`` the reader does not ask: it is what a stored position says, or None.
        """
        return self._created

    @property
    def position(self) -> int | None:
        """The next sequence to read, from 1; None before the start was looked up (by the first read, or `open`).

        The reader has returned every matching message below it, except those before its start, and no message at or
        above it. At the end, it is one more than the stream's last sequence, whether or not that message matched; with
        ``confirm=False`` it is one more than the sequence of the last message returned.
        """
        return self._position

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
            log_state(_log, self._source, "seek", start=self._start)

    def _start_at(self, start: Start | StoredOffset) -> None:
        self._start = start
        self._position: int | None = start.seq if isinstance(start, Seq) else None
        # It starts at the oldest message and has verified nothing yet: what is removed before that is no loss.
        self._at_head = False
        # A start that was later than every message when it was looked up: messages stored before it are left out.
        self._not_before: datetime | None = None
        # The state when no message at or above the position had been removed from the beginning of the stream, and a time
        # before which the message at the position had not been stored.
        self._before: StreamState | None = None
        self._since: datetime | None = None
        # Sequences and times of stored messages. If the stream has another message at the sequence of the first one, it has
        # lost what the reader has verified; the other one counts if the first was removed.
        self._witnesses: tuple[tuple[int, datetime], ...] = ()
        if self._state is not None and self._position is not None:
            self._note(self._state, self._position)
        self._state = None
        self._ready: deque[StoredMsg] = deque()
        self._after_ready = 0  # the position once `_ready` is returned

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
        check_int(max_messages, "max_messages")
        if timeout is None:
            timeout = self._timeout if self.tail else 0.0
        check_seconds(timeout, "timeout", zero=True)
        if not self._ready:
            with self._exclusive():
                if timeout:
                    await self._fill(asyncio.get_running_loop().time() + timeout, wait=True)
                else:
                    await self._fill(math.inf, wait=False)
        return self._take_up_to(max_messages)

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
        check_int(max_messages, "max_messages")
        check_seconds(seconds, "seconds")
        if not self._ready:
            with self._exclusive():
                if not await self._fill(asyncio.get_running_loop().time() + seconds, wait=self.tail):
                    return None
        return self._take_up_to(max_messages)

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
        position = await self._resolve()
        if self.confirm:
            return max(0, (await self._look()).last_seq + 1 - position)
        batch = self._batch(1, position, DEFAULT_MAX_BYTES)
        return len(await batch.to_list()) + (batch.num_pending or 0)

    def _batch(self, count: int, position: int, max_bytes: int) -> MessageBatch:
        plan = OneReply(Request(seq=position, next_by_subj=self.subject or ">", batch=count, max_bytes=max_bytes))
        reading = read_blocks(self._context, self.stream, plan, self._timeout, consumer=consumer_of(self))
        return MessageBatch(plan, reading)

    def _take_up_to(self, count: int) -> list[StoredMsg]:
        return [self._take() for _ in range(min(count, len(self._ready)))]

    def _take(self) -> StoredMsg:
        message = self._ready.popleft()
        self._position = message.seq + 1 if self._ready else self._after_ready
        return message

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        if self._reading:
            raise RuntimeError("another task is reading with this LogReader; use one LogReader per task")
        self._reading = True
        try:
            yield
        finally:
            self._reading = False

    async def _fill(self, until: float, *, wait: bool) -> bool:
        """Make messages ready, or return at the time `until`; without `wait`, return False at the end of the stream."""
        loop, retry, few = asyncio.get_running_loop(), self._retry(), True
        waiter: Waiter | None = None
        with contextlib.ExitStack() as waiting:
            while True:
                try:
                    ended = await retry.attempt(partial(self._advance, until, few=few))
                except Exception as error:
                    few = False  # their answers may have been too large for the connection
                    observe_lag(self, None)
                    await retry.pause_if_transient(error)
                    self._state = None
                    continue
                observe_lag(self, self._known_lag)
                if ended and not wait:
                    return False
                if self._ready or loop.time() >= until:
                    if self._ready and waiter is not None:
                        waiter.found()
                    return True
                retry.reset()
                waiter = waiter or waiting.enter_context(waiter_of(self))
                await wait_at_end(self, waiter, until)

    @property
    def _known_lag(self) -> int:
        """As `lag`, as far as the last answer says."""
        if self.confirm and self._state is not None and self._position is not None:
            return max(0, self._state.last_seq + 1 - self._position)
        return self._pending

    def _retry(self) -> Retry:
        # Direct gets that the leader calls disabled stay disabled; once it allows them, the responders are only away.
        return Retry(
            self._patience, transient=lambda error: (is_transient_read if self._checked else is_transient)(error)
        )

    async def _advance(self, until: float, *, few: bool) -> bool:
        """Make messages ready; return True if there are none up to the stream's end, as its leader or responder reports.

        That is the end that this call sees first, because others may store messages as fast as they are read. Return False
        at the time `until` as well, after a group that has nothing to return.
        """
        loop = asyncio.get_running_loop()
        before, end, moved = self._state, math.inf, False
        while not self._ready:
            if moved and loop.time() >= until:
                return False
            moved = True
            position = await self._resolve()
            if not self.confirm:
                # One request at a time: only the rows show how far the responder is.
                size = min(_REQUEST_BYTES, link_of(self._context.connection).room(1))
                batch = self._batch(_GROUP, position, size)
                rows = await batch.to_list()
                self._pending = len(rows) + (batch.num_pending or 0)
                if not rows:
                    return True
                self._checked = True
                self._make_ready(rows, rows[-1].seq + 1)
                if not self._ready and not batch.num_pending:
                    return True
                continue
            if position > end:
                return True
            state = self._state
            if state is None or position > state.last_seq:
                state = await self._look_at(position)
                if position > state.last_seq:
                    await self._check_witnesses(state)
                    self._witnesses = state.ends[:1]
                    self._at_head = False
                    self._note(state, position)
                    return True
            if state is not before and state.leader_is_certain:
                end = min(end, state.last_seq)
            await self._read_group(position, state, few=few)
        return False

    async def _read_group(self, position: int, state: StreamState, *, few: bool) -> None:
        """Read a group of messages, have the leader verify it, and make it ready; a `few` at the end come from the leader."""
        if position < state.first_seq:
            if self._at_head or await self._were_replaced(state):
                position = state.first_seq
            else:
                position = self._report_loss(position, state.first_seq)
        at_end = few and self._before is not None and self._before.last_seq < position  # when it looked before
        self._note(state, position)
        before, complete = state, self.subject is None and state.has_every_sequence
        rows, end, heard = await self._read_rows(position, state, few=at_end)
        if not (at_end and _shows(state, rows, position)):
            # A read that has all its rows may have waited for the end of the answer.
            state = await self._look(max(0.001, heard + self._timeout - asyncio.get_running_loop().time()))
        await self._check_witnesses(state, rows)
        rows = rows[bisect_left(rows, position, key=attrgetter("seq")) :]
        if self._at_head:
            position = rows[0].seq if rows else end + 1
        gaps = Gaps(position, end)
        gaps.add([row.seq for row in rows])
        gaps.close()
        missing = gaps.lowest
        if 0 < missing < state.first_seq and not await self._were_replaced(state):
            if self._at_head and not complete:
                # The gap may be older than this read. What is returned begins at the message that is the oldest one now.
                rows = [row for row in rows if row.seq >= state.first_seq]
            elif kept := [row for row in rows if row.seq < missing]:
                # Messages before the gap are verified and returned first; the next call reports the gap.
                rows, end = kept, missing - 1
            else:
                after = min(state.first_seq, end + 1) if rows and self._skips else state.first_seq
                self._report_loss(missing, after)
                end = max(end, after - 1)
        if rows or state.first_seq <= end + 1:
            self._at_head = False
        if rows:
            self._since = rows[-1].time
        self._note(state, end + 1)
        self._keep_witnesses(end, rows, before, state)
        self._make_ready(rows, end + 1)

    def _make_ready(self, rows: list[StoredMsg], after: int) -> None:
        """Let messages be returned, with the position after them; those before the start are left out."""
        if (start := self._not_before) is not None:
            rows = list(itertools.dropwhile(lambda row: row.time < start, rows))
            if rows:
                self._not_before = None
        self._ready.extend(rows)
        self._after_ready = after
        log_state(_log, self._source, "messages ready", messages=len(rows), position=after)
        if not rows:
            self._position = after

    async def _check_witnesses(self, state: StreamState, rows: Sequence[StoredMsg] = ()) -> None:
        """Raise StreamRecreatedError if the stream has another message where it had a witness.

        A stream keeps its creation time if it was restored from an older copy, or if it is in memory and all its servers
        restarted. `state` is what its leader says now, `rows` what was just read.
        """
        for seq, time in self._witnesses:
            if (seq, time) in state.ends:
                return
            at = bisect_left(rows, seq, key=attrgetter("seq"))
            found: StoredMsg | None = rows[at] if at < len(rows) and rows[at].seq == seq else None
            if found is None:
                found = await get_at_leader(self._context, self.stream, {"seq": seq}, self._timeout)
            if found is not None and found.time == time:
                return
            if found is not None:
                raise StreamRecreatedError(
                    f"stream {self.stream!r} has lost messages, or was deleted and created again, because its message {seq} "
                    f"was stored at {found.time.isoformat()}, and earlier at {time.isoformat()}; sequences below the position "
                    f"{self._position} may be those of messages that this reader has not returned: start another reader, "
                    "or seek to where it should continue",
                    stream=self.stream,
                    expected=self._created or "",
                    found=state.created,
                )

    def _keep_witnesses(self, end: int, rows: Sequence[StoredMsg], *states: StreamState) -> None:
        """Keep the messages that are known next to the sequence `end`, up to which everything is verified."""
        last = [(row.seq, row.time) for row in rows[-1:]] + [(state.last_seq, state.last_time) for state in states]
        known = sorted({*last, *self._witnesses})
        after, before = [it for it in known if it[0] >= end][:1], [it for it in known if it[0] <= end][-1:]
        self._witnesses = tuple(dict.fromkeys(after + before))

    async def _were_replaced(self, state: StreamState) -> bool:
        """Return whether newer messages replaced what is missing at the stream's beginning; else it is lost."""
        return await were_replaced_by_newer(self._context, state, self._before, self._since, self._timeout)

    def _note(self, state: StreamState, position: int) -> None:
        """Note a state of the stream that later ones are compared with; everything below `position` is verified."""
        if state.first_seq <= position:
            self._before = state
        if state.last_seq < position and not state.origin:  # a mirror stores messages with the times of its origin
            self._since = state.now

    def _report_loss(self, position: int, first: int) -> int:
        """Raise an error for the removed messages, or log a warning and return where to continue."""
        count = first - position
        removed = plural(count, "was removed before it was read", "were removed before they were read")
        what = f"stream {self.stream!r}: {numbered(position, first - 1, 'sequence')} {removed}"
        if self.subject is not None:
            what += f" (it is unknown {plural(count, 'whether it', 'how many of them')} matched {self.subject!r})"
        if not self._skips:
            raise PositionLostError(
                f"{what}; seek to {first} to continue after them", stream=self.stream, expected=position, got=first
            )
        _log.warning("%s; continuing at sequence %d", what, first)
        return first

    async def _resolve(self) -> int:
        """Return the position; look up the start and the stream, unless that is done."""
        if self._position is not None:
            if self._created is None and self.confirm:
                self._note(await self._look(), self._position)
            return self._position
        start = self._start
        if isinstance(start, Stored):
            start = await self.offsets.fetch(start.name) or start.default
        if isinstance(start, StoredOffset) and start.stream != self.stream:
            raise ValueError(
                f"the stored position of {start.name!r} belongs to stream {start.stream!r}, and this reader reads "
                f"{self.stream!r}; take another name"
            )
        if not self.confirm:
            if isinstance(start, StoredOffset):
                self._created = start.created or None
            self._position = await self._find_unconfirmed(start)
            log_state(_log, self._source, "start found", position=self._position)
            return self._position
        state = await self._look()
        if isinstance(start, StoredOffset):
            state.check_created(start.created)
        self._position = await self._find(start, state)
        log_state(_log, self._source, "start found", position=self._position, last_seq=state.last_seq)
        self._at_head = isinstance(start, First)
        if isinstance(start, Time):
            self._since = min(start.when, state.now)
            if self._position > state.last_seq:
                self._not_before = start.when
        self._note(state, self._position)
        return self._position

    async def _read_rows(self, position: int, state: StreamState, *, few: bool) -> tuple[list[StoredMsg], int, float]:
        """Return a group of messages from a position on, the sequence where it ends, and when all of it was known.

        The messages begin with the newest witness, if it is below the position: so the same answer shows both. `state` is
        the stream's state before. A `few` messages are read from its leader.
        """
        loop = asyncio.get_running_loop()
        heard = 0.0
        rows: list[StoredMsg] = []
        size, end = 0, min(state.last_seq, position + self._span - 1)
        read_to = end
        first = min([position, *(seq for seq, _ in self._witnesses[:1] if seq >= state.first_seq)])
        count = state.last_seq - position + 1
        if few and count <= _FEW and count * self._context.connection.max_payload <= _FEW_BYTES:
            seqs = [first, *range(max(position, first + 1), state.last_seq + 1)]
            found = await self._read_few(seqs)
            if found is not None:
                return found, state.last_seq, loop.time()
        plan = Scan(subject=self.subject, seq=first, up_to_seq=end, max_bytes=_REQUEST_BYTES)
        reading = read_blocks(self._context, self.stream, plan, self._timeout, confirm=True, consumer=consumer_of(self))
        async with contextlib.aclosing(reading) as blocks:
            async for block in blocks:
                heard = loop.time()
                rows += block.messages()
                size += block.size
                if rows[-1].seq >= position and (size >= _GROUP_BYTES or len(rows) >= 2 * _GROUP):
                    read_to = rows[-1].seq
                    break
        if read_to < end:
            self._span = read_to - position + 1
        elif 2 * len(rows) < _GROUP and 2 * size < _GROUP_BYTES:
            self._span = min(self._span * 4, _WIDEST)
        if not rows or rows[-1].seq < read_to:
            heard = loop.time()  # the leader has proved that nothing else is there
        return rows, read_to, heard

    async def _read_few(self, seqs: list[int]) -> list[StoredMsg] | None:
        """Return the messages with these sequences, from the leader; None if one of them has a subject that it cannot show."""

        async def read(seq: int) -> StoredMsg | None:
            request = {"seq": seq, "next_by_subj": self.subject or ">"}
            return await get_at_leader(self._context, self.stream, request, self._timeout)

        with observed_receiving(self, self._context.connection) as count:
            found = await gather_bounded(read, seqs, limit=len(seqs))
            count(len(found) - found.count(None))
        by_seq = {message.seq: message for message in found if message is not None and message.seq <= seqs[-1]}
        rows = [by_seq[seq] for seq in sorted(by_seq)]
        return None if any("\ufffd" in row.subject for row in rows) else rows

    async def _look(self, timeout: float | None = None) -> StreamState:
        """Return the stream's state as its leader reports it now; raise an error if the reader cannot read it."""
        state = await stream_state(self._context, self.stream, self._timeout if timeout is None else timeout)
        if self._checked:
            state.check_sequences()
        else:
            state.check_direct_reads(self._context.connection.server_version)
        if state.retention != "limits" and not self._skips:
            raise StreamConfigMismatchError(
                f"stream {self.stream!r} has {state.retention} retention: acknowledgements of its consumers delete "
                "messages that this reader has not read. Read a copy of it with limits retention, or read what is "
                "left with on_lost='skip'",
                diff={"retention": ("limits", state.retention)},
            )
        self._checked = True
        if self._seen is not None:
            await check_same_stream(self._context, self._seen, state, self._timeout)
        self._created, self._seen, self._state = state.created, state, state
        self._witnesses = self._witnesses or state.ends[:1]
        return state

    async def _look_at(self, position: int) -> StreamState:
        """Return the stream's state once `position` is at most one after its end; raise an error if it stays beyond."""
        state = await settled_state(self._look, position - 1)
        if position > state.last_seq and not state.leader_is_certain:
            raise RequestTimeoutError(
                f"stream {self.stream!r}: its leader has not heard from the other servers lately, so another one may lead and "
                f"have more than the {state.last_seq} sequences that it reported; the position stays"
            )
        if position > state.last_seq + 1:
            raise PositionLostError(
                f"stream {self.stream!r} ends at sequence {state.last_seq}, before the position {position}: the "
                "stream lost its last messages, or the position belongs to another stream",
                stream=self.stream,
                expected=position,
                got=state.last_seq + 1,
            )
        return state

    async def _find(self, start: Start | StoredOffset, state: StreamState) -> int:
        """Return the sequence of a start; `state` is the stream's state before."""
        if isinstance(start, Seq | StoredOffset):
            return start.seq
        if isinstance(start, First):
            return state.first_seq
        subject = self.subject or ">"
        if isinstance(start, Time):
            return await first_since(self._context, state, start.when, self._timeout, subject=subject)
        found: StoredMsg | None = None
        if isinstance(start, Last):
            found = await get_at_leader(self._context, self.stream, {"last_by_subj": subject}, self._timeout)
            if found is None and subject == ">" and state.messages:
                # For ``>``, servers look only at the last sequence, which may be deleted.

                async def find(request: Request) -> StoredMsg | None:
                    return await get_at_leader(self._context, self.stream, request.body(), self._timeout)

                found = await newest_up_to(find, state.last_seq, state.first_seq)
        return state.last_seq + 1 if found is None else found.seq

    async def _find_unconfirmed(self, start: Start | StoredOffset) -> int:
        """Return the sequence of a start as the responders have it."""
        if isinstance(start, Seq | StoredOffset):
            return start.seq
        # The oldest message names a subject, whose last message shows how far the responder is.
        oldest = None if isinstance(start, First) else await self._find_one(Request(seq=1, next_by_subj=">"))
        if isinstance(start, Time):
            self._not_before = start.when  # a responder may lack messages that it is about to get
        if oldest is None:
            return 1
        last, found = await self._reached(oldest), None
        disagree = RequestTimeoutError(f"stream {self.stream!r}: the responders to direct gets differ; try again")
        if last is None:
            raise disagree  # this one lacks the subject
        if isinstance(start, Last):
            found = await newest_up_to(self._find_one, last, oldest.seq, subject=self.subject or ">")
        elif isinstance(start, Time):
            subject = self.subject or ">"
            if (self._context.connection.api_level or 0) >= START_TIME_LEVEL:
                found = await self._find_one(Request(start_time=start.when, next_by_subj=subject))
                seq = last + 1 if found is None else found.seq
            else:
                seq = await bisect_time(
                    lambda seq: self._find_one(Request(seq=seq, next_by_subj=subject)), oldest.seq, last + 1, start.when
                )
            if seq > last:
                newest = await newest_up_to(self._find_one, last, oldest.seq, subject=subject)
                if newest is not None and newest.time >= start.when:
                    raise disagree
            return seq
        return last + 1 if found is None else found.seq

    async def _reached(self, oldest: StoredMsg) -> int | None:
        """Return the last sequence that a responder has, or None if it lacks the subject of the message `oldest`."""
        if can_be_asked_for(oldest.subject):
            newest_of = self._direct.multi_last([oldest.subject])
            await newest_of.to_list()
            return newest_of.up_to_seq
        newest = await newest_up_to(self._find_one, LARGEST, oldest.seq)
        return None if newest is None else newest.seq

    async def _find_one(self, request: Request) -> StoredMsg | None:
        try:
            found = await read_one(self._context, self.stream, request, self._timeout)
        except MessageNotFoundError:
            found = None
        self._checked = True
        return found


def _shows(state: StreamState, rows: list[StoredMsg], position: int) -> bool:
    """Whether a state from before a read shows that the last row is all that the stream has had from a position on."""
    if not rows or not state.first_seq <= position == state.last_seq:
        return False
    return (rows[-1].seq, rows[-1].time) == state.ends[0]


# The next two are for whoever reads to the end again and again.


def waiter_of(reader: LogReader) -> Waiter:
    """Return what waits at the end of a reader's stream."""
    waiter = reader._waiter  # noqa: SLF001 - its own module
    if waiter is None:
        context, rings, poll = reader._context, reader._rings, reader._poll  # noqa: SLF001 - its own module
        waiter = Waiter(shared(context, reader.stream, reader.subject) if rings else None, poll=poll)
        reader._waiter = waiter  # noqa: SLF001 - its own module
    return waiter


async def wait_at_end(reader: LogReader, waiter: Waiter, until: float = math.inf) -> None:
    """Wait at the end of a reader's stream until it is time to look for more, or until the time `until`."""
    await waiter.pause(reader._state, reader.position or 1, until)  # noqa: SLF001 - its own module
