"""What a reader knows of its stream: which stream it is, up to where it was read completely, and what is missing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from operator import attrgetter
from typing import Final

from jetstream_ext.client.api import get_at_leader, settled_state
from jetstream_ext.client.connection import Context
from jetstream_ext.client.replaced import were_replaced_by_newer
from jetstream_ext.errors import (
    PositionLostError,
    RequestTimeoutError,
    StreamConfigMismatchError,
    StreamRecreatedError,
)
from jetstream_ext.protocol.api import StreamState, recreated
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.loss import find_gaps
from jetstream_ext.text import get_logger, numbered, plural

_log: Final = get_logger("log")

Ask = Callable[[Sequence[int] | None], Awaitable[StreamState]]


class VerifiedLog:
    """The part of a stream that a reader has verified, and the state of the stream that shows it.

    ::

        look ──► begin(position) ──► read a group of messages ──► look ──► accept(position, rows, end)

    Messages may be removed before, while and after they are read, and the stream may become another one. So the leader is
    asked before and after each group. The stream is the same if its last message that is known, the *witness*, is still
    stored: one with the same sequence and time. Messages that are missing at its beginning are lost, unless newer ones
    replaced them (`protocol.loss`); those that are missing behind a message that is stored were deleted, which is no loss.

    Args:
        context: The context.
        stream: The stream's name.
        subject: The reader's filter, for errors.
        timeout: Seconds to wait for an answer.
        ask: Returns the stream's state; see `Waiter.look` about its argument.
        skips: Whether losses are skipped, with a warning, and no error.
    """

    def __init__(
        self, context: Context, stream: str, subject: str | None, timeout: float, *, ask: Ask, skips: bool
    ) -> None:
        self.created: str | None = None
        """When the stream was created, as the server writes it, if that is known."""
        self.state: StreamState | None = None
        """The stream as the leader reported it last; None: the next read asks again."""
        self.readable: bool = False
        """Whether a server has said that the stream can be read."""
        self._context = context
        self._stream = stream
        self._subject = subject
        self._timeout = timeout
        self._ask = ask
        self._skips = skips
        self._is_another = False
        self.restart(None)

    def restart(self, position: int | None) -> None:
        """Begin anew at a position, if it is known; after an error about another stream, that one is accepted."""
        state, self.state = self.state, None
        if self._is_another:
            self._is_another, self.created, state = False, None, None
        # A message that was stored, if any was, and when: the nearest one that is known to the position.
        self.witness: tuple[int, datetime] | None = state.ends[0] if state is not None and state.ends else None
        self._at_head = False
        # The state when no message at or above the position had been removed from the beginning of the stream, and a time
        # before which the message at the position had not been stored.
        self._before: StreamState | None = None
        self._since: datetime | None = None
        if state is not None and position is not None:
            self._note(state, position)

    def start_at(
        self, position: int, state: StreamState, *, at_head: bool = False, since: datetime | None = None
    ) -> None:
        """Note where a start was found in a state, and a time before which the message there had not been stored.

        With `at_head` the start is the oldest message: what is removed before something was verified is no loss.
        """
        self._at_head, self._since = at_head, since
        self._note(state, position)

    async def look(self, rows: Sequence[StoredMsg] = ()) -> StreamState:
        """Return the stream's state as its leader reports it now; `rows` were read just before.

        Raises an error if the reader cannot read the stream, or StreamRecreatedError if it is another one than before.
        """
        state = await self._look(None)
        await self.check_same(state, rows)
        return state

    async def _look(self, ahead: Sequence[int] | None) -> StreamState:
        state = await self._ask(ahead)
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
        self.readable, self.state = True, state
        if self.witness is None and state.ends:
            self.witness = state.ends[0]
        return state

    async def look_at(self, position: int, *, few: bool) -> StreamState:
        """As `look`, once `position` is at most one after the stream's end; raise an error if it stays beyond.

        If there are messages at the position, `check_same` or `look` must follow their read. With `few`, the message there and
        the witness may be asked for at the same time.
        """
        ahead = sorted({position, *(() if self.witness is None else self.witness[:1])}) if few else ()
        state = await settled_state(partial(self._look, ahead), position - 1)
        if position <= state.last_seq:
            return state
        await self.check_same(state)
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
        self._at_head = False
        self._move(state, position, ())
        return state

    async def begin(self, position: int, state: StreamState) -> int:
        """Return where to read a group from, in this state: the position, or the oldest message."""
        if position < state.first_seq:
            await self.check_same(state)
            if self._at_head or await self._were_replaced(state):
                position = state.first_seq
            else:
                position = self._report_loss(position, state.first_seq)
        self._note(state, position)
        return position

    def is_last(self, rows: Sequence[StoredMsg], position: int, state: StreamState) -> bool:
        """Whether the state from before a read shows that its last row is all that is stored from a position on."""
        if not rows or not state.first_seq <= position == state.last_seq:
            return False
        return (rows[-1].seq, rows[-1].time) == state.ends[0]

    async def accept(
        self, position: int, rows: list[StoredMsg], end: int, *, complete: bool
    ) -> tuple[list[StoredMsg], int]:
        """Return the messages of a group that may be returned, and up to where everything is verified then.

        `rows` are those from a position on up to the sequence `end`, all of them as the leader has proved. The state was
        looked at after them. `complete`: before, the stream had every sequence, and none is filtered out.
        """
        state = self.state
        assert state is not None
        if self._at_head:
            position = rows[0].seq if rows else end + 1
        missing: range | None = None
        if position < state.first_seq:
            missing = next(find_gaps(position - 1, [*(row.seq for row in rows), end + 1], end), None)
        if missing is not None and missing.start < state.first_seq and not await self._were_replaced(state):
            if self._at_head and not complete:
                # The gap may be older than this read. What is returned begins at the message that is the oldest one now.
                rows = [row for row in rows if row.seq >= state.first_seq]
            elif kept := [row for row in rows if row.seq < missing.start]:
                # Messages before the gap are verified and returned first; the next call reports the gap.
                rows, end = kept, missing.start - 1
            else:
                after = min(state.first_seq, end + 1) if rows and self._skips else state.first_seq
                self._report_loss(missing.start, after)
                end = max(end, after - 1)
        if rows or state.first_seq <= end + 1:
            self._at_head = False
        self._move(state, end + 1, rows)
        return rows, end

    def _move(self, state: StreamState, position: int, rows: Sequence[StoredMsg]) -> None:
        """Note that everything below a position is verified in this state; `rows` are the newest messages of it."""
        if rows:
            self._since = rows[-1].time
        self._note(state, position)
        if rows and position <= state.last_seq:
            self.witness = rows[-1].seq, rows[-1].time
        else:
            self.witness = state.ends[0] if state.ends else None

    def _note(self, state: StreamState, position: int) -> None:
        """Note a state of the stream that later ones are compared with; everything below `position` is verified."""
        if state.first_seq <= position:
            self._before = state
        if state.last_seq < position and not state.origin:  # a mirror stores messages with the times of its origin
            self._since = state.now

    async def _were_replaced(self, state: StreamState) -> bool:
        """Return whether newer messages replaced what is missing at the stream's beginning; else it is lost."""
        return await were_replaced_by_newer(self._context, state, self._before, self._since, self._timeout)

    async def check_same(self, state: StreamState, rows: Sequence[StoredMsg] = ()) -> None:
        """Raise StreamRecreatedError if it is another stream than before; `state` is that of now, `rows` were just read.

        Its creation time does not tell that alone. A stream that was restored from an older copy keeps it, as one in memory
        does whose servers all restarted, and some servers change it when they restart.
        """
        other_creation = recreated(self.created or "", state.created)
        if self.witness is None or self.witness in state.ends:
            found = self.witness
        else:  # rows of the stream before show nothing of one that was created after they were read
            found = await self._find(self.witness[0], () if other_creation else rows)
        if found == self.witness or (found is None and not other_creation):
            self.created = state.created
            return
        if found is not None:
            assert self.witness is not None
            why = (
                f"stream {self._stream!r} has lost messages, or was deleted and created again, because its message "
                f"{found[0]} was stored at {found[1].isoformat()}, and earlier at {self.witness[1].isoformat()}"
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

    async def _find(self, seq: int, rows: Sequence[StoredMsg]) -> tuple[int, datetime] | None:
        at = bisect_left(rows, seq, key=attrgetter("seq"))
        found: StoredMsg | None = rows[at] if at < len(rows) and rows[at].seq == seq else None
        if found is None:
            found = await get_at_leader(self._context, self._stream, {"seq": seq}, self._timeout)
        return None if found is None else (found.seq, found.time)

    def _report_loss(self, position: int, first: int) -> int:
        """Raise an error for the removed messages, or log a warning and return where to continue."""
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
        return first
