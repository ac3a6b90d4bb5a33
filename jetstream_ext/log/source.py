"""The stream behind a reader: what its leader says, and groups of its messages."""

from __future__ import annotations

import asyncio
from typing import Final

from nats.js import JetStreamContext

from jetstream_ext.client.api import get_at_leader, stream_state
from jetstream_ext.client.context import Context
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.errors import PositionLostError, StreamRecreatedError
from jetstream_ext.log.offsets import StoredOffset
from jetstream_ext.log.starts import Last, Time
from jetstream_ext.log.state import check_readable
from jetstream_ext.protocol.direct import Request
from jetstream_ext.protocol.stored_msg import StoredMsg
from jetstream_ext.protocol.stream_state import StreamState

# Messages and bytes of a group, about. The two questions that a group costs should not count beside its messages.
_GROUP: Final = 4096
_GROUP_BYTES: Final = 4 << 20
_REQUEST_BYTES: Final = 1 << 20
# A filter can leave few messages among many sequences; a group then spans more of them.
_WIDEST: Final = 1 << 40
_ANY: Final = ">"
# How long a leader that was just elected may take to have what the last one had.
_SETTLE: Final = 3.0
_SETTLE_PAUSE: Final = 0.1


class Source:
    """One stream, from the first look on: another one of the same name is an error.

    Args:
        js: nats-py's context.
        stream: The stream's name.
        subject: The filter, or None.
        timeout: Seconds to wait for an answer; None is the context's own.
        others_delete: Consumers may delete messages of it.
    """

    def __init__(
        self, js: JetStreamContext, stream: str, subject: str | None, timeout: float | None, *, others_delete: bool
    ) -> None:
        self._direct = DirectGet(js, stream, timeout=timeout)
        self._js = Context(js)
        self.context = js
        self.stream = stream
        self.subject = subject
        self.timeout: float = self._js.timeout if timeout is None else float(timeout)
        self.created: str | None = None
        self.checked: bool = False
        """Whether the leader has said that the stream can be read."""
        self._others_delete = others_delete
        self._span = _GROUP

    def end_of_group(self, position: int, last: int) -> int:
        """Return up to where to read from a position, in a stream that ends at `last`."""
        return min(last, position + self._span - 1)

    async def read(self, position: int, end: int) -> tuple[list[StoredMsg], int]:
        """Return the messages of a range, or of a part of it from its beginning on, and where that ends."""
        rows: list[StoredMsg] = []
        size, last = 0, end
        scan = self._direct.scan(
            subject=self.subject, seq=position, up_to_seq=end, max_bytes=_REQUEST_BYTES, confirm=True
        )
        async with scan as messages:
            async for message in messages:
                rows.append(message)
                size += len(message.data)
                if size >= _GROUP_BYTES or len(rows) >= 2 * _GROUP:
                    last = message.seq
                    break
        if last < end:
            self._span = max(1, last - position + 1)
        elif 2 * len(rows) < _GROUP and 2 * size < _GROUP_BYTES:
            self._span = min(self._span * 4, _WIDEST)
        return rows, last

    async def look(self) -> StreamState:
        """Return what the leader says now.

        Raises:
            StreamRecreatedError: The stream is another one.
            Exception: As for `check_readable` and `state.look`.
        """
        state = await stream_state(self._js, self.stream, self.timeout)
        if not self.checked:
            check_readable(state, self._js.connection.server_version, others_delete=self._others_delete)
            self.checked = True
        if self.created is None:
            self.created = state.created
        elif state.created != self.created:
            raise StreamRecreatedError(
                f"stream {self.stream!r} was deleted and created anew at {state.created}; the position belongs to the "
                f"one of {self.created}",
                stream=self.stream,
                expected=self.created,
                found=state.created,
            )
        return state

    async def settled(self, position: int) -> StreamState:
        """Look again for a while: a leader that was just elected may not have applied everything yet."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _SETTLE
        while True:
            state = await self.look()
            if position <= state.last_seq + 1:
                return state
            if loop.time() >= deadline:
                raise PositionLostError(
                    f"stream {self.stream!r} ends at sequence {state.last_seq}, before the position {position}: it has "
                    "lost its end, or the position is another stream's",
                    stream=self.stream,
                    expected=position,
                    got=state.last_seq + 1,
                )
            await asyncio.sleep(_SETTLE_PAUSE)

    def take_over(self, offset: StoredOffset) -> None:
        """Refuse a stored position that is not one of this stream."""
        if offset.stream != self.stream:
            raise ValueError(
                f"the position of {offset.name!r} is one in stream {offset.stream!r}, and this reader reads "
                f"{self.stream!r}: take another name"
            )
        if self.created is None:
            self.created = offset.created
        elif self.created != offset.created:
            raise StreamRecreatedError(
                f"stream {self.stream!r} of {self.created} is not the one that the position of {offset.name!r} belongs "
                f"to, of {offset.created}",
                stream=self.stream,
                expected=offset.created,
                found=self.created,
            )

    async def find(self, start: object, last: int) -> int:
        """Return where a start is that depends on the moment; `last` was the stream's last sequence before now."""
        found: StoredMsg | None = None
        if isinstance(start, Time):
            found = await self._ask(Request(start_time=start.when, next_by_subj=self.subject))
            if found is not None and found.time < start.when:
                found = None  # so servers can answer for a time that lies ahead
        elif isinstance(start, Last):
            found = await self._ask(Request(last_by_subj=self.subject or _ANY))
            if found is None and (self.subject or _ANY) == _ANY:
                found = await self._newest(last)
        return last + 1 if found is None else found.seq

    async def _newest(self, last: int) -> StoredMsg | None:
        """Return the newest message: for ``>`` servers look at the last sequence only, which can be deleted."""
        newest = await self._ask(Request(seq=1, next_by_subj=_ANY))
        while newest is not None and newest.seq < last:
            middle = (newest.seq + last + 1) // 2
            found = await self._ask(Request(seq=middle, next_by_subj=_ANY))
            if found is None:
                last = middle - 1
            else:
                newest = found
        return newest

    async def _ask(self, request: Request) -> StoredMsg | None:
        return await get_at_leader(self._js, self.stream, request.body(), self.timeout)
