"""When a live table looks for messages: when one was published for its keys, when a caller waits, and after a pause."""

from __future__ import annotations

import asyncio
from typing import Final

from nats.js.api import DEFAULT_PREFIX

from jetstream_ext.client.base_connection import InboxHandler, InboxSubscription
from jetstream_ext.kv.keyed_stream import KeyedStream
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.options import reads_subject
from jetstream_ext.text import get_logger, log_state

_log = get_logger("kv")

POLL: Final = 0.25
"""The longest pause in seconds without a subscription, and while a message is awaited."""
REST: Final = 5.0
"""With one, when no message is awaited."""
INTERVAL: Final = 0.004
"""The shortest time from one look to the next, unless a caller waits: a table of a busy bucket asks so often at most."""
# After a message was published, how soon it may be stored, and for how long that is looked for with growing pauses.
_STORED_SOON: Final = 0.001
_STORED_WITHIN: Final = 1.0
# With more published messages between two looks, the table reads without pauses, and the subscription only costs.
_BUSY: Final = 16
_MOST_SUBJECTS: Final = 8


class Wakeups:
    """The pauses of one table, and the subscription that ends them."""

    def __init__(self, source: KeyedStream) -> None:
        self.wanted: list[str] = []
        """The subjects to subscribe to; none if what is published for the keys is not known, or may not be received."""
        self._source = source
        self._inboxes: list[InboxSubscription] = []
        self._event = asyncio.Event()
        self._urgent = asyncio.Event()  # a caller waits
        self._published = 0  # how many messages have arrived since the last look
        self._awaited = 0  # how many of them were not read yet: perhaps they are not stored yet
        self._until = 0.0  # how long they are looked for
        self._pause = INTERVAL

    @property
    def armed(self) -> bool:
        return bool(self._inboxes)

    def watch(self, state: StreamState, subject: str | None) -> None:
        """Note on which subjects the messages of a table are published: all of the stream, or a filter."""
        self.disarm()
        apart = reads_subject(state.name)
        subjects = [each for each in state.subjects if each != apart] if subject is None else [subject]
        by_others = state.origin or not state.contiguous or state.config.get("subject_transform")
        # This client's own requests and their answers must not wake it.
        own = any(each.startswith((">", "*", "$JS", "_INBOX")) for each in subjects)
        elsewhere = by_others or self._source.context.prefix != DEFAULT_PREFIX
        self.wanted = [] if own or elsewhere or len(subjects) > _MOST_SUBJECTS else subjects

    async def arm(self) -> None:
        """Subscribe to what is published for the keys."""
        handler = InboxHandler(self._noticed, self._lost, self._event.set, self._refused)
        for subject in self.wanted:
            connection = self._source.context.connection
            self._inboxes.append(await connection.inbox(handler, subject=subject, timeout=self._source.timeout))
        log_state(_log, f"table of {self._source.what}", "subscribed", subjects=len(self.wanted))
        if not self.wanted:  # the server has refused one of them meanwhile
            self.disarm()

    def disarm(self) -> None:
        inboxes, self._inboxes = self._inboxes, []
        if inboxes:
            log_state(_log, f"table of {self._source.what}", "unsubscribed", published=self._published)
        for inbox in inboxes:
            inbox.close()

    def hurry(self) -> None:
        """End the pause: a caller waits."""
        self._event.set()
        self._urgent.set()

    def begin(self) -> None:
        """Note that the table looks now."""
        self._event.clear()
        self._urgent.clear()
        if self._published:
            self._awaited, self._published = self._awaited + self._published, 0
            self._until, self._pause = asyncio.get_running_loop().time() + _STORED_WITHIN, _STORED_SOON

    async def pause(self, read: int, longest: float) -> None:
        """Wait until there may be something to read, after a look that has found so many messages."""
        now = asyncio.get_running_loop().time()
        self._awaited = max(0, self._awaited - read) if now < self._until else 0
        if read:
            self._pause = _STORED_SOON if self.armed else INTERVAL
        if self.armed and not self._awaited:
            pause = REST
        else:
            pause, self._pause = self._pause, min(2 * self._pause, POLL)
        await _wait(self._event, now + min(pause, longest))
        await _wait(self._urgent, now + INTERVAL)

    def _noticed(self, frames: list[Frame]) -> None:
        self._published += len(frames)
        self._event.set()
        if self._published > _BUSY:
            self.disarm()

    def _lost(self) -> None:
        self.disarm()
        self._event.set()

    def _refused(self, _: Exception) -> None:
        self.wanted = []  # the table polls instead
        self._lost()


async def _wait(event: asyncio.Event, until: float) -> None:
    try:
        async with asyncio.timeout_at(until):
            await event.wait()
    except TimeoutError:
        pass
