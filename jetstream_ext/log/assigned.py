"""A partition that is assigned to a member: which messages are handled, and from where the next owner continues."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from jetstream_ext.client.fenced_write import FencedWriter
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.dispatch import Dispatcher
from jetstream_ext.protocol.records import Failed

BLOCK: Final = 16
"""So many messages of one partition are handled before those of another one."""


@dataclass(eq=False, slots=True)
class AssignedPartition:
    """A partition that this member has claimed, until it is handed over or lost."""

    number: int
    dispatcher: Dispatcher
    writer: FencedWriter
    committed: int
    failed: Failed | None  # the message whose handling has failed last, as it is stored
    announced: bool = False  # `on_assigned` was called
    ending: bool = False  # no further messages: it is revoked, or lost
    uncommitted: int = 0  # messages that were handled since the last commit
    queue: deque[StoredMsg] = field(default_factory=deque)  # the next messages for the caller
    in_hand: int | None = None  # the sequence of the message that the caller handles
    given: asyncio.Event = field(default_factory=asyncio.Event)  # messages, or the end
    done: asyncio.Event = field(default_factory=asyncio.Event)  # nothing is in hand any more
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # of the writer
    task: asyncio.Task[None] | None = None  # handles its messages
    stop: Callable[[], None] | None = None  # ends the task behind its current commit
    _last: int = field(init=False)  # the position before it gets messages, and after it has ended

    def __post_init__(self) -> None:
        self._last = self.committed

    @property
    def reading(self) -> bool:
        return self.number in self.dispatcher and not self.ending

    @property
    def position(self) -> int:
        """The next sequence that the caller gets."""
        if self.queue:
            return self.queue[0].seq
        return self.dispatcher.position(self.number) if self.reading else self._last

    @property
    def uncommitted_in_hand(self) -> bool:
        """Whether a message is in hand behind the last commit."""
        return self.in_hand is not None and self.in_hand >= self.committed

    @property
    def handled(self) -> int:
        """The sequence behind what the caller has handled."""
        return self.position if self.in_hand is None else self.in_hand

    def begin(self) -> None:
        """Let the caller get messages."""
        if not self.reading and not self.ending:
            self.dispatcher.add(self.number, self._last)

    def move(self, position: int) -> None:
        """Let the caller get the messages from another position on; `begin` again."""
        if self.reading:
            self.dispatcher.remove(self.number)
        self.queue.clear()
        self._last = position

    def end(self) -> None:
        """Let the caller get no further message."""
        if self.ending:
            return
        self.move(self.position)
        self.ending = True
        self.given.set()
        if self.stop is not None:
            self.stop()

    def pick_up(self) -> StoredMsg:
        message = self.queue.popleft()
        self.in_hand = message.seq
        self.done.clear()
        return message

    def put_down(self) -> None:
        self.uncommitted += self.uncommitted_in_hand
        self.in_hand = None
        self.done.set()

    @property
    def is_finished(self) -> bool:
        """Whether it is ending, nothing is in hand, and no commit is on its way."""
        is_idle = self.in_hand is None or self.done.is_set()
        return self.ending and is_idle and (self.task is None or self.task.done()) and not self.lock.locked()

    async def finished(self) -> None:
        if self.in_hand is not None:
            await self.done.wait()
        if self.task is not None:
            await asyncio.wait({self.task})
        async with self.lock:
            pass
