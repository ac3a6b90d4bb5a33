"""The reading of a stream for the partitions of a member."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from jetstream_ext.errors import PositionLostError
from jetstream_ext.log.assigned import BLOCK
from jetstream_ext.log.lane import Lanes
from jetstream_ext.log.task_scope import TaskScope
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.text import get_logger, numbered, plural

_log = get_logger("log")

_RETRY: Final = 0.1


@dataclass(slots=True)
class GroupReader:
    """The reading of the stream for all partitions.

    Args:
        given: Called with partitions that have got messages.
        is_outage: Tells whether an error is one of servers that are away, so that the reading waits for them.
    """

    lanes: Lanes
    tasks: TaskScope
    given: Callable[[Iterable[int]], None]
    is_outage: Callable[[Exception], bool]

    def next_block(self) -> tuple[int, list[StoredMsg]] | None:
        """Return the next messages of one partition, of each partition in turn; None if there are none."""
        taken = self.lanes.dispatcher.take_any()
        if taken is None:
            return None
        number, message = taken
        return number, [message, *self.lanes.dispatcher.take(number, BLOCK - 1)]

    async def read(self) -> None:
        """Read for the partitions, also after a suspension or an outage that was longer than the reader's patience."""
        while True:
            try:
                await self.lanes.read(self.given)
            except PositionLostError as error:
                raise self._explained(error) from error
            except Exception as error:
                if not self.is_outage(error):
                    raise
                _log.warning("%s cannot read, and tries again: %s", self.tasks.name, error)
                await asyncio.sleep(_RETRY)

    def _explained(self, error: PositionLostError) -> PositionLostError:
        """Return the error of a reading with what a member can do."""
        expected, got = error.expected or 0, error.got or 0
        stream, first = f"stream {error.stream!r}", f"log.Seq({got})"
        what = f"{stream} ends at sequence {got - 1}, before the position {expected} of the group"
        remedy = f"stop the members and call Group.reset({first})"
        if got > expected:
            removed = numbered(expected, got - 1, "sequence")
            what = f"{stream}: {removed} {plural(got - expected, 'was', 'were')} removed before the group handled them"
            remedy += ' to continue after them, or make the group with on_lost="skip"'
        text = f"{self.tasks.name}: {what}; all positions stay; {remedy}"
        return PositionLostError(text, stream=error.stream, expected=error.expected, got=error.got)
