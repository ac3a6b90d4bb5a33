"""The reading of a stream for some partitions of a group: the I/O of `protocol.dispatch`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from jetstream_ext.log.group_store import Settings
from jetstream_ext.log.observed import reading_for
from jetstream_ext.log.offsets import First, Seq, StoredOffset
from jetstream_ext.log.reader import LogReader
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.dispatch import Dispatcher

_FIRST_PAUSE: Final = 0.005  # at the end of the stream, as for `LogReader`


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
        poll: float,
    ) -> None:
        self.task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self.dispatcher: Dispatcher = Dispatcher(
            partitions_of, buffer=buffer, buffer_bytes=buffer_bytes, wake=self._changed.set
        )
        self._reader = reader
        self._consumer = consumer  # the name of the group, or of its partition
        self._settings = settings
        self._poll = poll

    def _start(self, seq: int) -> First | Seq | StoredOffset:
        settings = self._settings
        if settings.first and seq <= settings.start:
            return First()  # what has been removed meanwhile is no loss
        if self._reader.created is None:
            return StoredOffset("", settings.stream, settings.created, seq)  # the stream may have been created again
        return Seq(seq)

    async def read(self, given: Callable[[Iterable[int]], None]) -> None:
        """Give messages to the partitions; call `given` with those that got some."""
        with reading_for(self._reader, self._consumer):
            await self._read(given)

    async def _read(self, given: Callable[[Iterable[int]], None]) -> None:
        pause = _FIRST_PAUSE
        while True:
            self._changed.clear()
            read = self.dispatcher.next_read()
            if read is None:
                await self._changed.wait()
                continue
            if self._reader.position != read.start:
                self._reader.seek(self._start(read.start))
            rows = await self._reader.read_for(self._poll, read.max_messages)
            end = self._reader.position
            assert end is not None
            given(self.dispatcher.feed(rows or [], read.start, end).given)
            if rows is not None or not read.may_wait:
                pause = _FIRST_PAUSE
                await asyncio.sleep(0)  # what the reader has already must not keep the event loop
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._changed.wait()
            pause = min(2 * pause, self._poll)
