"""The records of one start of a worker: it claims the name, commits positions with their outputs, and releases the name.

::

    claim     read the newest record of the name: its position, or the reader's start
              another worker took over lately, and has not released the name ──► wait, read it again
              store it again as this start's own ───────────────────── moved ──► store the newer one
    commit    store outputs and a record of the new position ───────── moved ──► FencedError
    release   store the position again, as one whose worker has ended

`client.fenced_write` stores, and finds out whether a commit was stored whose answer was lost.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nats.nuid import NUID

from jetstream_ext.client.fenced_write import FencedWriter, RecordMovedError
from jetstream_ext.errors import FencedError, RequestTimeoutError
from jetstream_ext.log.job import Job, Source
from jetstream_ext.log.liveness import POLL, RELEASE_TIMEOUT, TAKEOVER
from jetstream_ext.log.observed import store_position
from jetstream_ext.log.offsets import StoredOffset
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.records import Failed, Record, Total
from jetstream_ext.text import counted, get_logger, log_state
from jetstream_ext.types import Entry

_log = get_logger("log")

# After so many commits in a row, a worker pauses for so many times the time of the last one, but not for longer than so
# many seconds: the claim of another worker must come between two commits. They are in a row if less time than that of a
# commit is between them.
_IN_A_ROW, _TIMES, _LONGEST_PAUSE = 200, 5, 0.5


@dataclass(slots=True, eq=False)
class Commits:
    """What one start of a worker has stored.

    With an `epoch` it is the worker of a partition: the group decides which worker works, so it claims the name at once and
    does not release it, and records of another epoch do not count.

    Attributes:
        newest: The newest record: before the claim, one without a position.
        count: How many records this start has stored.
    """

    job: Job
    reader: Source
    epoch: str
    newest: Record = field(init=False)
    count: int = 0
    _took: float = 0.0  # seconds of the last commit
    _ended: float = 0.0  # when it ended
    _in_a_row: int = 0
    _writer: FencedWriter = field(init=False)

    def __post_init__(self) -> None:
        job = self.job
        self.newest = Record(seq=0, writer=NUID().next().decode(), epoch=self.epoch)
        self._writer = FencedWriter(
            job.context,
            job.output_stream,
            job.record,
            name=job.what,
            timeout=job.timeout,
            patience=job.patience,
            rollup=job.rolls_up,
            msg_ttl=job.forever,
        )

    async def claim(self, check: Callable[[], None]) -> None:
        """Take the name over: go to the stored position, and store it again as this start's own; `check` may raise meanwhile.

        Cancellation: The name may be taken over.
        """
        clock, patience, reader = asyncio.get_running_loop().time, self.job.patience, self.reader
        deadline = clock() + patience
        found = await self._writer.read()
        while True:
            check()
            record = self._decode(found)
            took_over = 0
            if record is not None and self.epoch:
                if record.epoch != self.epoch:
                    record = None  # from before a reset of the group: the reader is where that has let it start
            elif record is not None and not record.released:
                now = self.job.now()
                if abs(now - record.took_over) < TAKEOVER:  # a time far in the future is another program's
                    log_state(_log, self.job.what, "waits", "another worker of its name has just taken over")
                    await asyncio.sleep(POLL)
                    found, deadline = await self._writer.read(), clock() + patience
                    continue
                took_over = math.ceil(now)
            failed, state = (None, None) if record is None else (record.failed, record.state)
            if self.job.keeps_state is not None:
                state = state or Total()
            elif state is not None:
                raise ValueError(
                    f"{self.job.where}: the worker has a state of {counted(state.keys, 'key')}; pass state= as the start before has "
                    "done; this start has stored nothing"
                )
            if record is not None:
                # The reader looks its stream up only if it has not done so.
                known = (record.stream, record.created) == (reader.stream, reader.created)
                offset = StoredOffset(self.job.name, record.stream, record.created, record.seq)
                reader.seek(record.seq if known else offset)
            try:
                await self._save(None, seq=await reader.open(), failed=failed, state=state, took_over=took_over)
                return
            except RecordMovedError as moved:
                if clock() >= deadline:
                    raise RequestTimeoutError(
                        f"{self.job.where}: another worker of this name stored its position before each attempt to take over for "
                        f"{patience:.4g} s; this one has stored nothing: stop the other one, or start this one again"
                    ) from moved
                found = moved.record
                self._writer.follow(found)

    async def store(
        self, outputs: Sequence[Entry], position: int, failed: Failed | None = None, state: Total | None = None
    ) -> Exception | None:
        """Store outputs and a position, all or nothing, and how often the input at the position has failed.

        With changes of the state among the outputs, `state` is its total then.

        Returns:
            Why the outputs cannot be stored, whatever the state of the stream is; then nothing of the commit is stored.

        Raises:
            FencedError: Another worker has taken over, or the newest record was removed.
        """
        idle = asyncio.get_running_loop().time() - self._ended
        self._in_a_row = self._in_a_row + 1 if idle < self._took else 0
        if self._in_a_row == _IN_A_ROW and not self.epoch:
            await asyncio.sleep(min(_TIMES * self._took, _LONGEST_PAUSE))
            self._in_a_row = 0
        try:
            await self._save(outputs, seq=position, failed=failed, state=state or self.newest.state)
        except RecordMovedError as moved:
            newest, job = self._decode(moved.record), self.job
            text = (
                f"its position on {job.record!r} was removed, and a worker that is started begins at the reader's start"
            )
            if newest is not None:
                text = f"another worker of this name has taken over and is at sequence {newest.seq}"
            raise FencedError(
                f"{job.where}: {text}; stop this one, which can store nothing more",
                name=job.name,
                seq=None if newest is None else newest.seq,
            ) from moved
        except Exception as error:
            if outputs and self.job.refuses_outputs(error):
                return error
            raise
        return None

    @property
    def fence(self) -> int:
        """The sequence of the newest record."""
        return self._writer.fence

    async def release(self) -> None:
        """Store that this worker has ended, behind its newest record; errors are ignored, and it takes 2 s at most.

        A commit whose answer did not come may be that record. One that is still on its way is refused behind the release,
        or the release is refused behind it: then the next start may wait.
        """
        if self.epoch or not self.job.context.connection.usable:
            return
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT):
                newest = self._decode(await self._writer.read())
                if newest is not None and newest.writer == self.newest.writer:
                    self.newest, self.count = newest, newest.number + 1
                    await self._save(None, released=True)
        except Exception as error:
            log_state(_log, self.job.what, "name not released", error=error)

    async def _save(self, outputs: Sequence[Entry] | None, **changes: Any) -> None:
        """Store a record with these changes behind its outputs; without outputs, of a claim or a release, it is not observed."""
        reader, clock = self.reader, asyncio.get_running_loop().time
        stream, created = reader.stream, reader.created or ""
        record = replace(self.newest, stream=stream, created=created, number=self.count, **changes)
        began = clock()
        if outputs is None:
            await self._writer.store((), record.encode())
        else:
            await store_position(self._writer, record.encode(), self.job.name, record.seq, outputs)
        self._ended = clock()
        self._took = self._ended - began
        self.newest = record
        self.count += 1
        log_state(_log, self.job.what, "committed", position=record.seq, outputs=len(outputs or ()))

    def _decode(self, found: StoredMsg | None) -> Record | None:
        if found is None:
            return None
        try:
            return Record.decode(found.data)
        except ValueError as error:
            raise ValueError(
                f"stream {found.stream!r}: message {found.seq} on {found.subject!r} is not the position of a worker, so "
                "another program published on this subject; delete that message, or use another prefix"
            ) from error
