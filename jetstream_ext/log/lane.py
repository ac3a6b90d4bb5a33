"""The reading of a stream for a member of a group: the I/O of `protocol.dispatch`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from jetstream_ext.client.api import gather_bounded
from jetstream_ext.client.doorbell import Waiter
from jetstream_ext.log.group_store import Settings
from jetstream_ext.log.observed import reading_for
from jetstream_ext.log.offsets import First, Seq, StoredOffset
from jetstream_ext.log.reader import LogReader, read_at_most, wait_at_end, waiter_of
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.dispatch import Dispatcher, Read

_AT_ONCE: Final = 0.001  # seconds: what is stored is read, and nothing is awaited

Given = Callable[[Iterable[int]], None]


class Lanes:
    """One lane for all partitions of a member, and with ``token`` one more for each partition that is behind.

    `dispatcher` has the partitions and their messages. `new_reader` returns a reader for one partition, or for all (None);
    `partitions_of` the partitions of messages; `name` is the group's.
    """

    def __init__(
        self,
        new_reader: Callable[[int | None], LogReader],
        partitions_of: Callable[[Sequence[StoredMsg]], Sequence[int]],
        *,
        name: str,
        settings: Settings,
        buffer: int,
        buffer_bytes: int,
    ) -> None:
        self.dispatcher: Dispatcher = Dispatcher(
            partitions_of,
            buffer=buffer,
            buffer_bytes=buffer_bytes,
            filtered=settings.token is not None,
            wake=self._wake,
        )
        self._new_reader = new_reader
        self._buffer = buffer
        self._name = name
        self._settings = settings
        self._common = new_reader(None)
        self._waiter: Waiter | None = None
        self._changed = asyncio.Event()  # for the common lane
        self._behind = asyncio.Event()  # for the others

    def _wake(self, alone: bool) -> None:
        if alone:
            self._behind.set()
            return
        self._changed.set()
        if self._waiter is not None:
            self._waiter.wake()

    async def read(self, given: Given) -> None:
        """Give messages to the partitions; call `given` with those that got some."""
        lanes = [partial(self._read_for_all, given), partial(self._catch_up, given)]
        await gather_bounded(lambda lane: lane(), lanes, limit=len(lanes))

    async def _read_for_all(self, given: Given) -> None:
        reader, dispatcher = self._common, self.dispatcher
        with reading_for(reader, self._name), waiter_of(reader) as waiter:
            self._waiter = waiter
            while True:
                self._changed.clear()
                read = dispatcher.next_read()
                if read is None:
                    waiter.leave(keep=True)
                    await self._changed.wait()
                    continue
                rows = await self._read(reader, read)
                given(dispatcher.feed(rows or [], read.start, reader.position or read.start))
                if rows:
                    waiter.found()
                if rows is not None or not read.may_wait:
                    if rows and len(rows) == read.max_messages and dispatcher.owned < self._settings.partitions:
                        dispatcher.part()
                    await asyncio.sleep(0)  # what the reader has already must not keep the event loop
                elif not self._changed.is_set():
                    await wait_at_end(reader, waiter)

    async def _catch_up(self, given: Given) -> None:
        """Read for the partitions that are behind, for one after the other."""
        dispatcher, readers = self.dispatcher, dict[int, LogReader]()
        with contextlib.ExitStack() as observing:
            while True:
                self._behind.clear()
                idle = True
                for number in dispatcher.alone:
                    if (read := dispatcher.next_read_of(number)) is None:
                        continue
                    idle = False
                    if (reader := readers.get(number)) is None:
                        reader = readers[number] = self._new_reader(number)
                        read_at_most(reader, self._buffer)
                        observing.enter_context(reading_for(reader, f"{self._name}.{number}"))
                    rows = await self._read(reader, read)
                    given(dispatcher.feed(rows or [], read.start, reader.position or read.start, alone=number))
                    if rows is None:
                        dispatcher.join(number)
                if not dispatcher.alone:
                    observing.close()
                    readers.clear()
                if idle:
                    await self._behind.wait()
                await asyncio.sleep(0)

    async def _read(self, reader: LogReader, read: Read) -> list[StoredMsg] | None:
        if reader.position != read.start:
            reader.seek(self._start(reader, read.start))
        return await reader.read_for(_AT_ONCE, read.max_messages)

    def _start(self, reader: LogReader, seq: int) -> First | Seq | StoredOffset:
        settings = self._settings
        if settings.first and seq <= settings.start:
            return First()  # what has been removed meanwhile is no loss
        if reader.created is None:
            return StoredOffset("", settings.stream, settings.created, seq)  # the stream may have been created again
        return Seq(seq)
