"""The reading of a stream for some partitions of a group: the I/O of `protocol.dispatch`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from jetstream_ext.client.doorbell import Waiter
from jetstream_ext.log.group_store import Settings
from jetstream_ext.log.observed import reading_for
from jetstream_ext.log.offsets import First, Seq, StoredOffset
from jetstream_ext.log.reader import LogReader, wait_at_end, waiter_of
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.dispatch import Dispatcher

_AT_ONCE: Final = 0.001  # seconds: what is stored is read, and nothing is awaited


class Lane:
    """One reading of the stream, for some of the partitions; `partitions_of` returns those of messages."""

    def __init__(
        self,
        reader: LogReader,
        partitions_of: Callable[[Sequence[StoredMsg]], Sequence[int]],
        *,
        consumer: str,
        settings: Settings,
        buffer: int,
        buffer_bytes: int,
    ) -> None:
        self.task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self.dispatcher: Dispatcher = Dispatcher(
            partitions_of, buffer=buffer, buffer_bytes=buffer_bytes, wake=self._wake
        )
        self._reader = reader
        self._consumer = consumer  # the name of the group, or of its partition
        self._settings = settings
        self._waiter: Waiter | None = None

    def _wake(self) -> None:
        self._changed.set()
        if self._waiter is not None:
            self._waiter.wake()

    def _start(self, seq: int) -> First | Seq | StoredOffset:
        settings = self._settings
        if settings.first and seq <= settings.start:
            return First()  # what has been removed meanwhile is no loss
        if self._reader.created is None:
            return StoredOffset("", settings.stream, settings.created, seq)  # the stream may have been created again
        return Seq(seq)

    async def read(self, given: Callable[[Iterable[int]], None]) -> None:
        """Give messages to the partitions; call `given` with those that got some."""
        with reading_for(self._reader, self._consumer), waiter_of(self._reader) as self._waiter:
            await self._read(self._waiter, given)

    async def _read(self, waiter: Waiter, given: Callable[[Iterable[int]], None]) -> None:
        while True:
            self._changed.clear()
            read = self.dispatcher.next_read()
            if read is None:
                waiter.found()
                await self._changed.wait()
                continue
            if self._reader.position != read.start:
                self._reader.seek(self._start(read.start))
            rows = await self._reader.read_for(_AT_ONCE, read.max_messages)
            end = self._reader.position
            assert end is not None
            given(self.dispatcher.feed(rows or [], read.start, end).given)
            if rows is not None or not read.may_wait:
                waiter.found()
                await asyncio.sleep(0)  # what the reader has already must not keep the event loop
            elif not self._changed.is_set():
                await wait_at_end(self._reader, waiter)
