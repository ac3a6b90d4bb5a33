"""What keeps the content of a live table current: one table of its phases, and one answer to every doubt, to load again.

A load reads the newest messages as a snapshot does. From there the table follows the log: each step reads on to an end that no
reply has passed, looks at the leader's state, and commits. The content is then that of one revision.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Final

from jetstream_ext.client.api import settled_state
from jetstream_ext.client.doorbell import REST, Waiter, shared
from jetstream_ext.errors import RequestTimeoutError
from jetstream_ext.kv.bucket import KeyedStream
from jetstream_ext.kv.entries import EVERYTHING, update_of, updates_of
from jetstream_ext.kv.present import Piece, ProvedReader, empty_content, read_now, read_under_the_same_limits, stored_of
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.following import PHASES, Doubt, Event, Mark, Phase, find_doubt, settings_of
from jetstream_ext.protocol.subjects import covering, matcher
from jetstream_ext.protocol.table import Content
from jetstream_ext.protocol.updates import Record
from jetstream_ext.text import get_logger, log_state

_log = get_logger("kv")

INTERVAL: Final = 0.004
"""The shortest time from one look that has found something to the next, unless a caller waits: a table of a busy bucket asks
so often at most."""
POLL: Final = 0.25
"""The longest pause in seconds without a doorbell, and while a message is awaited."""
_SEEN: Final = 0.9  # seconds: every delete marker is stored for longer
_CERTAIN: Final = Doubt.LOST, Doubt.LIMITS, Doubt.KEYS  # what the table would show next is wrong
_LOAD_SHARE: Final = 20  # a table spends at most one part in so many of its time on loads because of other doubts
_SMALL: Final = 1_000  # keys: one request reads them


class DoubtedError(Exception):
    """The table has to be loaded before it shows anything else."""

    def __init__(self, doubt: Doubt, why: str = "") -> None:
        super().__init__(why or doubt.value)
        self.doubt = doubt


class Follower:
    """The content of a table of a stream, brought up to date by `step`; `committed` is called when it has another revision."""

    def __init__(self, source: KeyedStream, patterns: list[str], committed: Callable[[], None], *, rings: bool) -> None:
        self.source = source
        self.content: Content = Content()
        self.phase: Phase = Phase.OPENING
        self.mark: Mark | None = None
        self.leader_seq: int = 0
        """The leader's last sequence, when it was asked last."""
        self._filter: str | None = None  # for the server; None reads the whole stream
        self._rings = rings
        self.waiter: Waiter = self._new_waiter()
        self._patterns = patterns
        self._subjects = source.subjects()
        self._committed = committed
        self._position = 0  # what is staged or committed
        self._dense = True  # and nothing is missing between the two
        self._session = 0  # of the connection, when the table was current
        self._heard = float("-inf")  # when the leader was asked for the state of the mark
        self._looked = float("-inf")  # when the server was asked what has become of values that have expired
        self._last_load: tuple[float, float] = float("-inf"), 0.0  # because of a doubt: when it ended, and its seconds
        self._doubt: Doubt | None = None  # why the table is to be loaded, as soon as the last load is long enough ago

    def _new_waiter(self) -> Waiter:
        return Waiter(shared(self.source.context, self.source.stream, self._filter), poll=POLL, rings=self._rings)

    @property
    def current(self) -> bool:
        """Whether the table had everything that was stored when it looked last, and knows of nothing that has changed that."""
        return self._in_step and self._doubt in (None, Doubt.PERHAPS)

    @property
    def _in_step(self) -> bool:
        return self.phase is Phase.FOLLOWING and self._session == self.source.context.connection.session

    def enter(self, event: Event, why: object = "") -> None:
        before, self.phase = self.phase, PHASES.get((self.phase, event), self.phase)
        if self.phase is not before:
            fields = {"revision": self.content.revision, "keys": len(self.content.values)}
            log_state(_log, f"table of {self.source.what}", f"{before.name} -> {self.phase.name}", why, **fields)

    def longest_pause(self) -> float:
        """Return after how many seconds the table has to look again, even if nothing wakes it."""
        if not self._in_step:
            return INTERVAL
        now = asyncio.get_running_loop().time()
        pauses = [float("inf") if self._doubt is None else self._due(self._doubt) - now]
        if self.content.overdue:
            pauses.append(POLL)
        if self.mark is not None and (expiry := self.content.next_expiry()) is not None:
            pauses.append((expiry - self.mark.state.now).total_seconds() - (now - self._heard))
        return max(0.0, min(pauses))

    # -- everything ---------------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Read what is stored now, and tell the watchers what has changed."""
        loop, session, began = asyncio.get_running_loop(), self.source.context.connection.session, 0.0

        async def look() -> StreamState:
            return await self._known_stream(await settled_state(self.source.readable_state, self.content.revision))

        async def read(state: StreamState) -> tuple[Content, Mark]:
            nonlocal began
            began = loop.time()
            content, time = await read_now(self.source, self._patterns, state)
            return content, Mark(state, (content.revision, time))

        self._begin(*await read_under_the_same_limits(self.source, look, read))
        if self._doubt is not None:
            self._last_load = loop.time(), loop.time() - began
        self._session, self._heard, self._doubt = session, began, None
        self.enter(Event.LOADED)
        self._committed()

    async def restore(self, records: list[tuple[str, Record]], revision: int, mark: Mark) -> None:
        """Begin with what a checkpoint has, and read what came since; raise DoubtedError if that is not enough."""
        state = await settled_state(self.source.readable_state, revision)
        await self.source.check_same(mark.state, state)
        if state.last_seq < revision:
            raise DoubtedError(Doubt.LOST, f"the stream ends at sequence {state.last_seq}, before revision {revision}")
        content = empty_content(state)
        await asyncio.to_thread(lambda: content.feed([update_of(self._subjects, *it) for it in records]))
        content.revision = revision
        self._begin(content, mark, state)
        if content.dirty is not None:
            content.dirty.clear()
        self.enter(Event.RESTORED)
        while self.phase is not Phase.FOLLOWING:  # again if the connection is lost meanwhile
            await self.step()

    def _begin(self, content: Content, mark: Mark, state: StreamState | None = None) -> None:
        """Follow a content from its revision on; `state` is the stream's if it is not that of the mark."""
        state = state or mark.state
        before, self.content = self.content, content
        self._position, self._dense = content.revision, True
        self._subjects = self.source.subjects(matcher(self._patterns))
        self._filter = None if self._has_all(state) else covering(list(map(self.source.subject, self._patterns)))
        self.waiter.leave()
        self.waiter = self._new_waiter()
        self.mark = mark
        content.succeed(before)

    def _has_all(self, state: StreamState) -> bool:
        """Whether the table has every subject of the stream."""
        if self._patterns != [EVERYTHING] or not self.source.prefix:
            return self._patterns == [EVERYTHING]
        by_others = not state.subjects or not state.contiguous or state.config.get("subject_transform")
        return not by_others and self.source.only_keys(state)

    # -- what came since ----------------------------------------------------------------------------------------------

    async def step(self) -> int:
        """Make the table current; return how many of its messages were read.

        Raise DoubtedError if it has to be loaded, which the next call does.
        """
        if self.phase is Phase.RELOADING:
            assert self._doubt is not None
            await asyncio.sleep(max(0.0, self._due(self._doubt) - asyncio.get_running_loop().time()))
            await self.load()
            return 1
        assert self.mark is not None
        connection = self.source.context.connection
        session, count, asked = connection.session, 0, asyncio.get_running_loop().time()
        if session != self._session:  # the server may have been restarted, without its last messages
            self.enter(Event.UNSURE, "the connection was lost")
        stored = None
        if self.phase is Phase.CHECKING:
            self.content.unstage()  # what is staged may be lost as well
            self._position, self._dense = self.content.revision, True
            stored = await self._newest_stored()
        reader = ProvedReader(self.source, self.mark.state.last_seq)
        async with aclosing(reader.follow(self._position, subject=self._filter)) as pieces:
            async for piece in pieces:
                if len(piece):
                    count += self._stage(piece)
                if session != connection.session:
                    break
                if piece.exact:
                    await self._commit_all(reader, piece, stored, asked, session)
                elif self._dense and piece.whole and self.content.staged and self.phase is Phase.FOLLOWING:
                    await self._known_stream(await self.source.readable_state())
                    self._commit(Mark(self.mark.state, (self._position, piece.last.time)), self._position)
                    self._committed()
                asked = asyncio.get_running_loop().time()
        return count

    def _stage(self, piece: Piece) -> int:
        """Take messages for the next commit; return how many of them are the table's."""
        found = piece.found
        if isinstance(found, list):
            seqs, size = [message.seq for message in found], sum(len(message.data) for message in found)
        else:
            seqs, size = found.seqs, found.size
        missing = seqs[-1] - self._position - len(seqs)
        self._dense = self._dense and not missing
        # With a filter, most of what is missing are messages of others.
        updates = updates_of(found, self._subjects)
        self.content.stage(updates, size, 0 if self._filter else missing)
        self._position = seqs[-1]
        return len(updates)

    async def _commit_all(
        self, reader: ProvedReader, piece: Piece, stored: int | None, asked: float, session: int
    ) -> None:
        """Commit after the last piece of the log; with it, the table has all that was stored when `reader.end` was asked."""
        content, end, mark = self.content, reader.end, self.mark
        assert mark is not None
        state = await self._known_stream(end)
        shown = len(piece) and (piece.last.seq, piece.last.time) in end.ends
        if self._position != content.revision and not shown:  # what was read may be of another stream
            state = await self._known_stream(await self.source.readable_state())
        if settings_of(mark.state) != settings_of(end):
            self._consider(Doubt.LIMITS)
        content.settle(end.now, end.first_seq)
        revision = max(self._position, end.last_seq)
        has_all = self._filter is None and self._position <= end.last_seq
        doubt = find_doubt(
            mark.state,
            end,
            keys=content.count_after_commit() if has_all else None,
            partial=self._filter is not None,
            current=asked - self._heard < _SEEN and not content.overdue,
        )
        if doubt is Doubt.PERHAPS and len(content) > _SMALL:
            doubt = None if stored is None else await self._recount(revision)
        self._consider(doubt)
        if stored is not None and content.newest_after_commit() > stored:
            self._consider(Doubt.REMOVED)
        newest = (piece.last.seq, piece.last.time) if len(piece) else mark.newest
        if end.last_seq > newest[0]:
            newest = end.last_seq, end.last_time
        self._commit(Mark(end, newest), revision)
        self._heard, self._session = asked, session
        content.settle(end.now, end.first_seq)  # of what was staged
        if asked - self._looked >= POLL and (overdue := content.overdue_keys):
            self._looked = asked
            content.expose(overdue, await stored_of(self.source, reader, overdue), now=False)
        self.enter(Event.CONFIRMED)
        if state.leader != mark.state.leader:
            self.enter(Event.UNSURE, "the stream has another leader")
        self._committed()

    def _commit(self, mark: Mark, revision: int) -> None:
        self._position, self._dense = revision, True
        self.mark = mark
        self.content.commit(revision)

    # -- doubts -------------------------------------------------------------------------------------------------------

    async def _known_stream(self, state: StreamState) -> StreamState:
        """Return a state of the stream; raise an error if it is another stream, or ends before the table's revision."""
        if self.mark is not None:
            await self.source.check_same(self.mark.state, state)
        self.leader_seq = state.last_seq
        if state.last_seq < self.content.revision:
            raise RequestTimeoutError(
                f"{self.source.what}: its leader ends at sequence {state.last_seq}, and the table has revision "
                f"{self.content.revision}: the leader still has to catch up, or has lost its last messages"
            )
        return state

    async def _newest_stored(self) -> int:
        """Return the sequence of the newest message that is stored of what the table has read."""
        assert self.mark is not None
        state = await self._known_stream(await self.source.readable_state())
        reader, (seq, time) = ProvedReader(self.source, state.last_seq), self.mark.newest
        newest = await reader.newest_up_to(self.content.revision, state.first_seq)
        if newest is not None and (newest.time > time or (newest.seq == seq and newest.time != time)):
            self._consider(Doubt.LOST)
        return 0 if newest is None else newest.seq

    async def _recount(self, revision: int) -> Doubt | None:
        """Return whether keys may be gone since the table was current: unless the stream has as many at a revision."""
        if len(self._patterns) == 1:
            state, stored = await self.source.count_keys(self._patterns[0])
            if state.last_seq == revision and self.content.count_after_commit() <= stored:
                return None
        return Doubt.REMOVED

    def _due(self, doubt: Doubt) -> float:
        """Return when a doubt lets the table load, by the event loop's clock."""
        ended, seconds = self._last_load
        return ended + (REST if doubt is Doubt.PERHAPS else min(_LOAD_SHARE * seconds, REST))

    def _consider(self, found: Doubt | None) -> None:
        """Note a doubt; raise DoubtedError if the table is to be loaded before it shows anything else."""
        if found is not None and (self._doubt in (None, Doubt.PERHAPS) or found in _CERTAIN):
            self._doubt = found
        doubt = self._doubt
        if doubt is not None and (doubt in _CERTAIN or self._due(doubt) <= asyncio.get_running_loop().time()):
            self.enter(Event.DOUBTED, doubt.value)
            raise DoubtedError(doubt)
