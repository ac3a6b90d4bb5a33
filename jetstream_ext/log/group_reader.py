"""The reading of a stream for the partitions of a member: the I/O of `protocol.dispatch`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Final

from jetstream_ext.client.doorbell import Waiter
from jetstream_ext.errors import PositionLostError
from jetstream_ext.log.group_plan import GroupPlan
from jetstream_ext.log.group_store import Settings
from jetstream_ext.log.observed import reading_for
from jetstream_ext.log.offsets import First, Seq, StoredOffset
from jetstream_ext.log.reader import LogReader
from jetstream_ext.protocol.dispatch import Dispatcher
from jetstream_ext.text import get_logger

_log = get_logger("log")

BUFFER_BYTES: Final = 4 << 20
_AT_ONCE: Final = 0.001  # seconds: what is stored is read, and nothing is awaited
_RETRY: Final = 0.1


class GroupReader:
    """Reads the stream once for all partitions of a member, and with ``token`` for each one that is behind.

    Args:
        name: The member's name.
        given: Called with partitions that have got messages.
        is_outage: Tells whether an error is one of servers that are away, so that the reading waits for them.

    Attributes:
        dispatcher: It has the partitions and their messages.
    """

    def __init__(
        self,
        group: GroupPlan,
        settings: Settings,
        name: str,
        given: Callable[[Iterable[int]], None],
        is_outage: Callable[[Exception], bool],
    ) -> None:
        self.dispatcher: Dispatcher = Dispatcher(
            group.partitions_of,
            buffer=group.buffer,
            buffer_bytes=BUFFER_BYTES,
            partitions=None if group.token is None else group.partitions,
            wake=self._wake,
        )
        self._group = group
        self._settings = settings
        self._name = name
        self._given = given
        self._is_outage = is_outage
        self._waiter: Waiter | None = None
        self._changed = asyncio.Event()

    def _wake(self) -> None:
        self._changed.set()
        if self._waiter is not None:
            self._waiter.wake()

    async def read(self) -> None:
        """Read for the partitions, also after a suspension or an outage that was longer than the reader's patience."""
        common = self._group.reader()
        while True:
            try:
                await self._read_with(common)
            except PositionLostError as error:
                raise self._explained(error) from error
            except Exception as error:
                if not self._is_outage(error):
                    raise
                _log.warning("%s cannot read, and tries again: %s", self._name, error)
                await asyncio.sleep(_RETRY)

    async def _read_with(self, common: LogReader) -> None:
        dispatcher, name, apart = self.dispatcher, self._group.name, dict[int, LogReader]()
        with contextlib.ExitStack() as observing, reading_for(common, name), common.source.waiter as waiter:
            self._waiter = waiter
            while True:
                self._changed.clear()
                if (read := dispatcher.next_read()) is None:
                    waiter.leave(keep=True)
                    await self._changed.wait()
                    continue
                reader = common if read.partition is None else apart.get(read.partition)
                if reader is None:
                    reader = apart[read.partition or 0] = self._group.reader(read.partition)
                    reader.source.most = self._group.buffer
                    observing.enter_context(reading_for(reader, f"{name}.{read.partition}"))
                if reader.position != read.start:
                    reader.seek(self._start(reader, read.start))
                rows = await reader.read_for(_AT_ONCE, read.max_messages)
                self._given(dispatcher.feed(rows or [], read, reader.position or read.start, at_end=rows is None))
                if rows and reader is common:
                    waiter.found()
                if apart and not dispatcher.parted:
                    observing.close()
                    apart.clear()
                if rows is None and read.may_wait and not self._changed.is_set():
                    await waiter.pause(common.source.state, common.position or 1)
                else:
                    await asyncio.sleep(0)  # what the reader has already must not keep the event loop

    def _start(self, reader: LogReader, seq: int) -> First | Seq | StoredOffset:
        settings = self._settings
        if settings.first and seq <= settings.start:
            return First()  # what has been removed meanwhile is no loss
        if reader.created is None:
            return StoredOffset("", settings.stream, settings.created, seq)  # the stream may have been created again
        return Seq(seq)

    def _explained(self, error: PositionLostError) -> PositionLostError:
        """Return the error of a reading with what a member can do."""
        text = (
            f"{self._name}: the next message of stream {error.stream!r} is at sequence {error.got}, and the group was at {error.expected}: what "
            "it has not handled was removed, or the stream created again; all positions stay; stop the members and call "
            f'Group.reset(log.Seq({error.got})), or make the group with on_lost="skip" to continue after what was removed'
        )
        return PositionLostError(text, stream=error.stream, expected=error.expected, got=error.got)
