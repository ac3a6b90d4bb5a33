"""A partition in the hands of a member: which messages are handled, and from where the next owner goes on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from jetstream_ext.client.fenced_write import FencedWriter
from jetstream_ext.log.lane import Lane
from jetstream_ext.protocol.direct import StoredMsg

BLOCK: Final = 16
"""So many messages of one partition are handled before those of another one."""


@dataclass(eq=False, slots=True)
class Held:
    """A partition that this member works on."""

    number: int
    attempt: int  # the one of `Membership` that has claimed it
    lane: Lane
    writer: FencedWriter
    committed: int
    uncommitted: int = 0  # messages that were handled since
    queue: deque[StoredMsg] = field(default_factory=deque)  # the next messages for the caller
    in_hand: int | None = None  # the sequence of the message that the caller handles
    ending: bool = False  # no further messages: it is revoked, or lost
    last: int = 0  # the position before it gets messages, and after it has ended
    given: asyncio.Event = field(default_factory=asyncio.Event)  # messages, or the end
    done: asyncio.Event = field(default_factory=asyncio.Event)  # nothing is in hand any more
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # of the writer
    task: asyncio.Task[None] | None = None
    stop: Callable[[], None] | None = None  # ends the task behind its current commit

    @property
    def position(self) -> int:
        """The next sequence that the caller gets."""
        if self.queue:
            return self.queue[0].seq
        dispatcher = self.lane.dispatcher
        if self.ending or self.number not in dispatcher:
            return self.last
        return dispatcher.position(self.number)

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
        if self.number not in self.lane.dispatcher:
            self.lane.dispatcher.add(self.number, self.last)

    def move(self, position: int) -> None:
        """Let the caller get the messages from another position on; `begin` again."""
        if not self.ending:  # otherwise the partition may be in other hands of this member
            self.lane.dispatcher.remove(self.number)
            self.queue.clear()
        self.last = position

    def end(self) -> None:
        """Let the caller get no further message."""
        if self.ending:
            return
        self.last, self.ending = self.position, True
        self.queue.clear()
        self.lane.dispatcher.remove(self.number)
        self.given.set()
        if self.stop is not None:
            self.stop()

    def pick_up(self) -> StoredMsg:
        assert self.in_hand is None
        message = self.queue.popleft()
        self.in_hand = message.seq
        self.done.clear()
        return message

    def put_down(self) -> None:
        self.uncommitted += self.uncommitted_in_hand
        self.in_hand = None
        self.done.set()

    async def finished(self) -> None:
        """Wait until nothing is in hand, and no commit is on its way."""
        if self.in_hand is not None:
            await self.done.wait()
        if self.task is not None:
            await asyncio.wait({self.task})
        async with self.lock:
            pass
