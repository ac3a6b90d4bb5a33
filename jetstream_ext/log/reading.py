"""How a reader reads: what one responder after the other has, or what the stream's leader proves."""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import cached_property, partial
from itertools import chain, repeat
from operator import attrgetter
from typing import Final, NamedTuple

from jetstream_ext.client.api import (
    bisect_time,
    first_since,
    gather_bounded,
    get_at_leader,
    newest_up_to,
    settled_state,
)
from jetstream_ext.client.connection import Context
from jetstream_ext.client.direct_reader import MessageBatch, link_of, read_blocks, read_one
from jetstream_ext.client.doorbell import Look, Waiter
from jetstream_ext.client.replaced import were_replaced_by_newer
from jetstream_ext.errors import (
    MessageNotFoundError,
    PositionLostError,
    RequestTimeoutError,
    StreamConfigMismatchError,
    StreamRecreatedError,
)
from jetstream_ext.log.observed import observed_receiving
from jetstream_ext.log.offsets import First, Last, New, Seq, StoredOffset, Time
from jetstream_ext.protocol.api import StreamState, recreated
from jetstream_ext.protocol.direct import Request, StoredMsg
from jetstream_ext.protocol.loss import find_gaps
from jetstream_ext.protocol.reads import OneReply, Scan
from jetstream_ext.text import get_logger, numbered, plural

_log: Final = get_logger("log")

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

Found = First | Seq | Time | Last | New | StoredOffset


class Group(NamedTuple):
    """Some messages from a position on: all that match, up to the position `after` them.

    `behind` is how many sequences (without the leader: messages) there were from the first position on. Where the stream ends,
    if that is certain, is `end`: one more than its last sequence.
    """

    rows: list[StoredMsg]
    after: int
    behind: int
    end: float


class TrustedLog:
    """A stream as one responder after the other has it, for a reader of the messages that match a filter (None: all)."""

    def __init__(
        self,
        context: Context,
        stream: str,
        subject: str | None,
        timeout: float,
        new_waiter: Callable[[], Waiter],
        *,
        skips: bool,
    ) -> None:
        self.created: str | None = None
        """When the stream was created, as the server writes it, if that is known."""
        self.readable: bool = False
        """Whether a server has said that the stream can be read."""
        self.most: int = _GROUP
        """How many messages a group has, about."""
        self.state: StreamState | None = None
        """The stream as the leader has reported it last; None: the next read asks again, if it asks a leader."""
        self._context = context
        self._stream = stream
        self._subject = subject
        self._filter = subject or ">"
        self._new_waiter = new_waiter
        self._skips = skips  # losses are skipped, with a warning
        self._span = _GROUP  # how many sequences the next group has
        self.timeout: float = timeout
        """Seconds to wait for an answer."""

    @cached_property
    def waiter(self) -> Waiter:
        """What waits at the end of the stream; it needs a connection, which a reader may not have yet."""
        return self._new_waiter()

    def restart(self, position: int | None) -> None:
        """Begin again at a position, if it is known; after an error about another stream, accept that one."""

    async def find(self, start: Found) -> int:
        """Return the sequence of a start. The responders may lag, and each request may reach another one.

        Raises RequestTimeoutError if they differ too much, and as direct gets do.
        """
        if isinstance(start, StoredOffset):
            self.created = start.created or None
        if isinstance(start, Seq | StoredOffset):
            return start.seq
        last = 0 if isinstance(start, First) else await self._last_seq()
        newest: StoredMsg | None = None
        if isinstance(start, Last | Time):
            newest = await newest_up_to(self._get, last, 1, subject=self._filter)
        if newest is None:
            return last + 1
        if isinstance(start, Time):
            if newest.time < start.when:
                return newest.seq + 1
            seq = await bisect_time(self._next, 1, last + 1, start.when)
            return seq if seq <= last else self._disagree()
        return newest.seq

    async def _last_seq(self) -> int:
        """Return the sequence of the newest message; 0 if there is none."""
        seq, pending = 1, 1
        while pending:  # about two requests: what is pending after a message has at least as many sequences
            rows, pending = await self._request(seq, 1, ">")
            if rows:
                seq = rows[0].seq + pending
            elif seq > 1:
                self._disagree()
            else:
                return 0
        return seq

    def _disagree(self) -> int:
        raise RequestTimeoutError(f"stream {self._stream!r}: the responders to direct gets differ; try again")

    async def _get(self, request: Request) -> StoredMsg | None:
        try:
            return await read_one(self._context, self._stream, request, self.timeout)
        except MessageNotFoundError:
            return None

    def _next(self, seq: int) -> Awaitable[StoredMsg | None]:
        return self._get(Request(seq=seq, next_by_subj=self._filter))

    async def read(self, position: int, consumer: str | None, *, few: bool) -> Group:
        """Return the next messages; an observer is told the name `consumer`. With `few`, see `VerifiedLog`."""
        rows, pending = await self._request(position, _GROUP, self._filter, consumer)
        self.readable = True
        after = rows[-1].seq + 1 if rows else position
        return Group(rows, after, len(rows) + pending, math.inf if pending else after)

    async def lag(self, position: int) -> int:
        """Return how much there is from a position on: messages that match, or with the leader sequences."""
        rows, pending = await self._request(position, 1, self._filter)
        return len(rows) + pending

    async def _request(
        self, position: int, count: int, subject: str, consumer: str | None = None
    ) -> tuple[list[StoredMsg], int]:
        """Return some messages as one responder has them, up to `count`, and how many it has after those.

        One request at a time: only the rows show how far the responder is.
        """
        size = min(_REQUEST_BYTES, link_of(self._context.connection).room(1))
        plan = OneReply(Request(seq=position, next_by_subj=subject, batch=count, max_bytes=size))
        batch = MessageBatch(plan, read_blocks(self._context, self._stream, plan, self.timeout, consumer=consumer))
        return await batch.to_list(), batch.num_pending or 0


class VerifiedLog(TrustedLog):
    """A stream as its leader proves it.

    ::

        look ──► fetch a group of messages ──► look ──► accept what is proved

    Messages may be removed before, while and after they are read, and the stream may become another one. So the leader is
    asked before and after each group. The stream is the same if its last message that is known, the *witness*, is still
    stored: one with the same sequence and time. Messages that are missing at its beginning are lost, unless newer ones
    replaced them (`protocol.loss`); those that are missing behind a message that is stored were deleted, which is no loss.
    """

    created: str | None
    readable: bool
    state: StreamState | None
    _look: Look | None = None  # which has shown the state
    _is_another: bool = False

    def restart(self, position: int | None) -> None:
        state, self.state = self.state, None
        if self._is_another:
            self._is_another, self.created, state = False, None, None
        # A message that was stored, if any was, and when: the nearest one that is known to the position.
        self._witness: tuple[int, datetime] | None = state.ends[0] if state is not None and state.ends else None
        # The start is the oldest message: what is removed before the first group was verified is no loss.
        self._at_head = False
        # The state when no message at or above the position had been removed from the beginning of the stream, and a time
        # before which the message at the position had not been stored.
        self._before: StreamState | None = None
        self._since: datetime | None = None
        if state is not None and position is not None:
            self._note(state, position)

    async def find(self, start: Found) -> int:
        state = await self._look_after(())
        if isinstance(start, StoredOffset):
            state.check_created(start.created)
        position, newest = state.last_seq + 1, None
        match start:
            case Seq(seq) | StoredOffset(seq=seq):
                position = seq
            case First():
                position = state.first_seq
            case Time(when):
                position = await first_since(self._context, state, when, self.timeout, subject=self._filter)
            case Last() if self._filter == ">":  # for it, servers look only at the last sequence
                newest = await newest_up_to(self._get, state.last_seq, state.first_seq)
            case Last():
                newest = await self._get(Request(last_by_subj=self._filter))
        if newest is not None:
            position = newest.seq
        self._at_head = isinstance(start, First)
        self._since = min(start.when, state.now) if isinstance(start, Time) else None
        self._note(state, position)
        return position

    async def _get(self, request: Request) -> StoredMsg | None:
        return await get_at_leader(self._context, self._stream, request.body(), self.timeout)

    async def lag(self, position: int) -> int:
        return max(0, (await self._look_after(())).last_seq + 1 - position)

    async def read(self, position: int, consumer: str | None, *, few: bool) -> Group:
        """With `few`, a few messages may be asked for at the leader, and the first one together with the stream's state."""
        first, state = position, self.state
        if state is None or position > state.last_seq:
            ahead: tuple[int, ...] = ()
            if few and self._may_ask_for(2) and self._witness is not None:
                ahead = self._witness[0], position
            look = await self.waiter.look(ahead, self.timeout)
            if ahead and state is not None and (row := await self._rung_for(look, position, consumer)) is not None:
                return Group([row], position + 1, 1, math.inf)
            state = await self._look_from(position, look, ahead)
            if position > state.last_seq:
                self._at_head = False
                self._move(state, position, ())
                return Group([], position, 0, position)
        self._note(state, position)
        last, complete = state.last_seq, self._subject is None and state.has_every_sequence
        # With the witness in the same answer, both are of the same stream.
        if self._witness is not None and state.first_seq <= self._witness[0]:
            first = min(position, self._witness[0])
        few = few and (first < position or position == last)  # it has read up to here before, or there is only one
        rows, end = await self._fetch(first, position, state, consumer, few=few)
        if rows and state.first_seq <= position == last and (rows[-1].seq, rows[-1].time) == state.ends[0]:
            await self._check_same(state, rows)  # it was all that was stored from the position on
            certain = False
        else:
            state = await self._look_after(rows)
            certain = state.leader_is_certain
        rows = rows[bisect_left(rows, position, key=attrgetter("seq")) :]
        rows, end = await self._accept(position, rows, end, state, complete=complete)
        behind = max(0, state.last_seq + 1 - position)
        return Group(rows, end + 1, behind, state.last_seq + 1 if certain else math.inf)

    # -- what the leader says -----------------------------------------------------------------------------------------

    async def _look_after(self, rows: Sequence[StoredMsg]) -> StreamState:
        """Return the stream's state as its leader reports it now; `rows` were read just before.

        Raises an error if the reader cannot read the stream, or StreamRecreatedError if it is another one than before.
        """
        state = await self._state_of(await self.waiter.look(None, self.timeout))
        await self._check_same(state, rows)
        return state

    async def _rung_for(self, look: Look, position: int, consumer: str | None) -> StoredMsg | None:
        """Return the message at a position if the doorbell has rung for it, and nothing else has to be known.

        The witness shows that the stream is the same, and as no sequence is passed over, nothing is missing.
        """
        if not self.waiter.rang or self._filter != ">":
            return None
        assert self._witness is not None
        with observed_receiving(self._context.connection, self._stream, consumer) as count:
            row, known = await look.message(position, self.timeout), await look.message(self._witness[0], self.timeout)
            if row is None or known is None or row.seq != position or (known.seq, known.time) != self._witness:
                return None
            if "\ufffd" in row.subject:  # the leader cannot show such a subject
                return None
            count(1)
        self._since, self._witness = row.time, (row.seq, row.time)
        return row

    async def _state_of(self, look: Look) -> StreamState:
        state = await look.state(self.timeout)
        if self.readable:
            state.check_sequences()
        else:
            state.check_direct_reads(self._context.connection.server_version)
        if state.retention != "limits" and not self._skips:
            raise StreamConfigMismatchError(
                f"stream {self._stream!r} has {state.retention} retention: acknowledgements of its consumers delete "
                "messages that this reader has not read. Read a copy of it with limits retention, or read what is "
                "left with on_lost='skip'",
                diff={"retention": ("limits", state.retention)},
            )
        self.readable, self.state, self._look = True, state, look
        if self._witness is None and state.ends:
            self._witness = state.ends[0]
        return state

    async def _look_from(self, position: int, look: Look, ahead: tuple[int, ...]) -> StreamState:
        """Return the state once `position` is at most one after the stream's end; raise an error if it stays beyond.

        If there are messages at the position, `_check_same` must follow their read. `look` is the first one, and messages at the
        sequences `ahead` may be asked for in the next ones.
        """
        looks = chain([look], repeat(None))

        async def state_now() -> StreamState:
            return await self._state_of(next(looks) or await self.waiter.look(ahead, self.timeout))

        state = await settled_state(state_now, position - 1)
        if position <= state.last_seq:
            return state
        await self._check_same(state)
        if not state.leader_is_certain:
            raise RequestTimeoutError(
                f"stream {self._stream!r}: its leader has not heard from the other servers lately, so another one may lead "
                f"and have more than the {state.last_seq} sequences that it reported; the position stays"
            )
        if position > state.last_seq + 1:
            raise PositionLostError(
                f"stream {self._stream!r} ends at sequence {state.last_seq}, before the position {position}: the "
                "stream lost its last messages, or the position belongs to another stream",
                stream=self._stream,
                expected=position,
                got=state.last_seq + 1,
            )
        return state

    async def _check_same(self, state: StreamState, rows: Sequence[StoredMsg] = ()) -> None:
        """Raise StreamRecreatedError if it is another stream than before; `state` is that of now, `rows` were just read.

        Its creation time does not tell that alone. A stream that was restored from an older copy keeps it, as one in memory
        does whose servers all restarted, and some servers change it when they restart.
        """
        witness, found = self._witness, self._witness
        other_creation = recreated(self.created or "", state.created)
        if witness is not None and witness not in state.ends:
            # Rows of the stream before show nothing of one that was created after they were read.
            at = len(rows) if other_creation else bisect_left(rows, witness[0], key=attrgetter("seq"))
            row: StoredMsg | None = rows[at] if at < len(rows) and rows[at].seq == witness[0] else None
            row = row or await self._get(Request(seq=witness[0]))
            found = None if row is None else (row.seq, row.time)
        if found == witness or (found is None and not other_creation):
            self.created = state.created
            return
        if found is not None and witness is not None:
            why = (
                f"stream {self._stream!r} has lost messages, or was deleted and created again, because its message "
                f"{found[0]} was stored at {found[1].isoformat()}, and earlier at {witness[1].isoformat()}"
            )
        else:
            why = (
                f"stream {self._stream!r}: its creation time was {self.created} and is {state.created}, and the message that "
                "would show whether it is the same stream is gone, so it counts as another one"
            )
        self._is_another = True
        raise StreamRecreatedError(
            f"{why}; sequences below the position may be those of messages that this reader has not returned: start "
            "another reader, or seek to where it should continue",
            stream=self._stream,
            expected=self.created or "",
            found=state.created,
        )

    # -- messages -----------------------------------------------------------------------------------------------------

    def _may_ask_for(self, count: int) -> bool:
        """Whether the connection carries the answers if so many messages are asked for at the same time."""
        return count <= _FEW and count * self._context.connection.max_payload <= _FEW_BYTES

    async def _fetch(
        self, first: int, position: int, state: StreamState, consumer: str | None, *, few: bool
    ) -> tuple[list[StoredMsg], int]:
        """Return a group of messages from the sequence `first` on, and the sequence where it ends.

        From a position on, which is not below `first`, the group is complete. `state` is from just before.
        """
        last = state.last_seq
        if few and self._may_ask_for(last - position + 1):
            rows = await self._fetch_at_leader([first, *range(max(position, first + 1), last + 1)], consumer)
            if not any("\ufffd" in row.subject for row in rows):  # the leader cannot show such a subject
                return rows, last
        most, start = min(self.most, _GROUP), max(position, state.first_seq)
        end = min(last, start + self._span - 1)
        subject = None if self._filter == ">" else self._filter
        plan = Scan(subject=subject, seq=first, up_to_seq=end, max_bytes=_REQUEST_BYTES)
        reading = read_blocks(self._context, self._stream, plan, self.timeout, confirm=True, consumer=consumer)
        rows, size = [], 0
        async with contextlib.aclosing(reading) as blocks:
            async for block in blocks:
                rows += block.messages()
                size += block.size
                if rows[-1].seq >= position and (size >= _GROUP_BYTES or len(rows) >= 2 * most):
                    end = rows[-1].seq
                    self._span = end - position + 1
                    return rows, end
        if 2 * len(rows) < most and 2 * size < _GROUP_BYTES:
            self._span = min(self._span * 4, _WIDEST)
        return rows, end

    async def _fetch_at_leader(self, seqs: list[int], consumer: str | None) -> list[StoredMsg]:
        """Return the first message that matches from each of these sequences on, up to the last one."""
        assert self._look is not None
        with observed_receiving(self._context.connection, self._stream, consumer) as count:
            found = await gather_bounded(partial(self._look.message, timeout=self.timeout), seqs, limit=len(seqs))
            count(len(found) - found.count(None))
        by_seq = {message.seq: message for message in found if message is not None and message.seq <= seqs[-1]}
        return [by_seq[seq] for seq in sorted(by_seq)]

    # -- what is missing ----------------------------------------------------------------------------------------------

    async def _accept(
        self, position: int, rows: list[StoredMsg], end: int, state: StreamState, *, complete: bool
    ) -> tuple[list[StoredMsg], int]:
        """Return the messages of a group that may be returned, and up to where everything is verified then.

        `rows` are those from a position on up to the sequence `end`, all of them as the leader has proved; `state` is from
        after them. `complete`: before, the stream had every sequence, and none is filtered out.
        """
        if self._at_head:
            position = rows[0].seq if rows else end + 1
        first, missing = state.first_seq, None
        if position < first:
            missing = next(find_gaps(position - 1, [*(row.seq for row in rows), end + 1], end), None)
        if missing is not None and missing.start < first and not await self._were_replaced(state):
            older = self._at_head and not complete  # the gap may be older than this read
            kept = [row for row in rows if row.seq < missing.start]
            if kept and not older:
                # Messages before the gap are verified and returned first; the next call reports the gap.
                rows, end = kept, missing.start - 1
            else:
                if not older:
                    self._report_loss(missing.start, first)
                    end = max(end, first - 1)
                rows = [row for row in rows if row.seq >= first]  # the oldest one now, and what follows
        self._at_head = self._at_head and not rows and first > end + 1
        self._move(state, end + 1, rows)
        return rows, end

    async def _were_replaced(self, state: StreamState) -> bool:
        return await were_replaced_by_newer(self._context, state, self._before, self._since, self.timeout)

    def _move(self, state: StreamState, position: int, rows: Sequence[StoredMsg]) -> None:
        """Note that everything below a position is verified in this state; `rows` are the newest messages of it."""
        if rows:
            self._since = rows[-1].time
        self._note(state, position)
        if rows and position <= state.last_seq:
            self._witness = rows[-1].seq, rows[-1].time
        else:
            self._witness = state.ends[0] if state.ends else None

    def _note(self, state: StreamState, position: int) -> None:
        """Note a state of the stream that later ones are compared with; everything below `position` is verified."""
        if state.first_seq <= position:
            self._before = state
        if state.last_seq < position and not state.origin:  # a mirror stores messages with the times of its origin
            self._since = state.now

    def _report_loss(self, position: int, first: int) -> None:
        """Raise an error for the removed messages, or log a warning."""
        count = first - position
        removed = plural(count, "was removed before it was read", "were removed before they were read")
        what = f"stream {self._stream!r}: {numbered(position, first - 1, 'sequence')} {removed}"
        if self._subject is not None:
            what += f" (it is unknown {plural(count, 'whether it', 'how many of them')} matched {self._subject!r})"
        if not self._skips:
            raise PositionLostError(
                f"{what}; seek to {first} to continue after them", stream=self._stream, expected=position, got=first
            )
        _log.warning("%s; continuing at sequence %d", what, first)
