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
from typing import Final, Protocol

from nats.nuid import NUID

from jetstream_ext.client import telemetry
from jetstream_ext.client.fenced_write import RecordMovedError
from jetstream_ext.errors import FencedError, RequestTimeoutError
from jetstream_ext.log.liveness import POLL, TAKEOVER
from jetstream_ext.log.observed import observed_commit
from jetstream_ext.log.offsets import OffsetStore, PositionedReader, StoredOffset
from jetstream_ext.log.output_stream import OutputStream
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.records import Failed, Record
from jetstream_ext.text import get_logger, log_state
from jetstream_ext.types import BatchMessage

_log = get_logger("log")

# Seconds that a worker which is ended may take to release its name.
_RELEASE_TIMEOUT: Final = 2.0
# After so many commits, a worker pauses for so many times the time of the last one, but not for longer than so
# many seconds: the claim of another worker takes some round trips, and must come between two commits.
_IN_A_ROW, _TIMES, _LONGEST_PAUSE = 200, 5, 0.5


class Source(PositionedReader, Protocol):
    """What a worker reads from: a `LogReader`, or one partition's part of one.

    `read_for` returns None at the end, behind which nothing comes: the worker then stores its position and returns.
    """

    confirm: bool
    offsets: OffsetStore

    def seek(self, start: StoredOffset | int) -> None: ...


class OutputsRefusedError(Exception):
    """The outputs of a commit cannot be stored, whatever the state of the stream is; nothing of the commit is."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Commits:
    """What one start of the worker `name` has stored.

    With an `epoch` it is the worker of a partition: the group decides which worker works, so it claims the name at once and
    does not release it, and records of another epoch do not count.

    Attributes:
        position: That of the newest record.
        failed: The input at that position, if its handling has failed.
        count: How many records this start has stored.
    """

    def __init__(self, output: OutputStream, reader: Source, name: str, *, epoch: str = "") -> None:
        self.id: Final = NUID().next().decode()
        self.position: int = 0
        self.failed: Failed | None = None
        self.count: int = 0
        self._output = output
        self._reader = reader
        self._name = name
        self._what = f"worker {name!r} on stream {output.name!r}"
        self._epoch = epoch
        self._took_over = 0
        self._took = 0.0  # seconds of the last commit
        self._writer = output.writer(name)

    async def claim(self, check: Callable[[], None]) -> None:
        """Take the name over: go to the stored position, and store it again as this start's own; `check` may raise meanwhile.

        Cancellation: The name may be taken over.
        """
        loop, patience = asyncio.get_running_loop(), self._output.patience
        deadline = loop.time() + patience
        ahead: float | None = None  # of the loop's clock: the leader's
        taken_over, old_at = 0, 0.0  # the newest take-over, and when it is `TAKEOVER` old
        found = await self._writer.read()
        while True:
            check()
            record = self._decode(found)
            if record is not None and self._epoch and record.epoch != self._epoch:
                record = None  # from before a reset of the group: the reader is where that has let it start
            if record is not None:
                self._go_to(record)
                self.failed = record.failed
            self._took_over = 0
            if record is not None and not record.released and not self._epoch:
                if ahead is None:
                    ahead = (await self._output.look()).now.timestamp() - loop.time()
                now = ahead + loop.time()
                self._took_over = math.ceil(now)
                if record.took_over != taken_over:
                    taken_over = record.took_over
                    old_at = loop.time() + min(TAKEOVER, taken_over + TAKEOVER - now)
                if loop.time() < old_at:
                    log_state(_log, f"worker {self._name!r}", "waits", "another worker of its name has just taken over")
                    await asyncio.sleep(min(POLL, old_at - loop.time()))
                    found = await self._writer.read()
                    deadline = loop.time() + patience
                    continue
            try:
                await self._save([], await self._reader.open(), self.failed)
                return
            except RecordMovedError as moved:
                if loop.time() >= deadline:
                    raise RequestTimeoutError(
                        f"{self._what}: another worker of this name stored its position before each attempt to take over for "
                        f"{patience:.4g} s; this one has stored nothing: stop the other one, or start this one again"
                    ) from moved
                found = moved.record
                self._writer.follow(found)

    async def store(self, outputs: Sequence[BatchMessage], position: int, failed: Failed | None = None) -> None:
        """Store outputs and a position, all or nothing, and how often the input at the position has failed.

        Raises:
            OutputsRefusedError: The outputs cannot be stored.
            FencedError: Another worker has taken over, or the newest record was removed.
        """
        if self.count % _IN_A_ROW == 0 and not self._epoch:
            await asyncio.sleep(min(_TIMES * self._took, _LONGEST_PAUSE))
        observer = telemetry.observer
        if observer is None:
            await self._store_fenced(outputs, position, failed)
            return
        connection = self._output.context.connection
        with observed_commit(observer, connection, self._output.name, self._name, position) as operation:
            operation.describe(messages=len(outputs))
            await self._store_fenced(outputs, position, failed)

    async def release(self, position: int) -> None:
        """Store the last position, and that this worker has ended; errors are ignored if that position is stored already."""
        stored = position == self.position
        if self._epoch and stored:
            return
        try:
            await self._store_fenced([], position, self.failed if stored else None, released=True)
        except Exception as error:
            if not stored:
                raise
            log_state(_log, f"worker {self._name!r}", "name not released", error=error)

    async def release_after_error(self) -> None:
        """Store that this worker has ended, behind its newest record; errors are ignored, and it takes 2 s at most.

        A commit whose answer did not come may be that record. One that is still on its way is refused behind the release,
        or the release is refused behind it: then the next start may wait.
        """
        if self._epoch or not self._output.context.connection.usable:
            return
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT):
                newest = self._decode(await self._writer.read())
                if newest is not None and newest.writer == self.id:
                    self.count = newest.number + 1
                    await self._save([], newest.seq, newest.failed, released=True)
        except Exception as error:
            log_state(_log, f"worker {self._name!r}", "name not released", error=error)

    async def _store_fenced(
        self, outputs: Sequence[BatchMessage], position: int, failed: Failed | None, *, released: bool = False
    ) -> None:
        try:
            await self._save(outputs, position, failed, released=released)
        except RecordMovedError as moved:
            raise self._fenced(moved) from moved
        except Exception as error:
            if outputs and self._output.refuses_outputs(error):
                raise OutputsRefusedError(error) from error
            raise

    async def _save(
        self, outputs: Sequence[BatchMessage], position: int, failed: Failed | None, *, released: bool = False
    ) -> None:
        reader = self._reader
        record = Record(
            seq=position,
            stream=reader.stream,
            created=reader.created or "",
            writer=self.id,
            number=self.count,
            epoch=self._epoch,
            failed=failed,
            took_over=self._took_over,
            released=released,
        )
        clock = asyncio.get_running_loop().time
        began = clock()
        await self._writer.store(outputs, record.encode())
        self._took = clock() - began
        self.position, self.failed = position, failed
        self.count += 1
        log_state(_log, f"worker {self._name!r}", "committed", position=position, outputs=len(outputs))

    def _fenced(self, moved: RecordMovedError) -> FencedError:
        newest = self._decode(moved.record)
        if newest is None:
            return FencedError(
                f"{self._what}: its position on {self._output.record!r} was removed; stop this worker (a restarted one begins at "
                "the reader's start again)",
                name=self._name,
            )
        return FencedError(
            f"{self._what}: another worker of this name has taken over and is at sequence {newest.seq}; stop this one, which "
            "can store nothing more",
            name=self._name,
            seq=newest.seq,
        )

    def _go_to(self, record: Record) -> None:
        """Move the reader to a stored position; look the input stream up only if the reader has not done so."""
        reader = self._reader
        known = (record.stream, record.created) == (reader.stream, reader.created)
        reader.seek(record.seq if known else StoredOffset(self._name, record.stream, record.created, record.seq))

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
