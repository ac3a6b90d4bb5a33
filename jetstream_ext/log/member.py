"""A member of a group, as its user sees it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Final, Self

from nats.js import JetStreamContext

from jetstream_ext.client import telemetry
from jetstream_ext.errors import StreamRecreatedError
from jetstream_ext.log.held import BLOCK, Held
from jetstream_ext.log.observed import observed_handling
from jetstream_ext.log.offsets import OffsetStore, StoredOffset
from jetstream_ext.log.session import Session
from jetstream_ext.protocol.api import recreated
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.options import check_function

MessageHandler = Callable[[StoredMsg], Awaitable[None] | None]

_IDLE: Final = 5.0


class Member:
    """A member of a group: `Group.join` makes it, ``async with`` joins and leaves.

    Attributes:
        id: The member's id, a random one for each `join`.
        label: Its name for people, in `Group.status`.
    """

    def __init__(self, session: Session) -> None:
        self.id: str = session.id
        self.label: str = session.label
        self._session = session
        self._reading = False

    def __repr__(self) -> str:
        return f"<Member {self.label!r} of group {self._session.group.name!r}: partitions {list(self.partitions)}>"

    async def __aenter__(self) -> Self:
        await self._session.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close(clean=kind is None)

    def __del__(self) -> None:
        if "_session" in self.__dict__:
            self._session.dropped()

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partitions that the member works on now."""
        return self._session.partitions

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StoredMsg:
        """Return the next message of any of the member's partitions; the one before it counts as handled.

        Raises:
            Exception: See `Group.join`.

        Cancellation: Safe: no message is lost.
        """
        session = self._session
        if self._reading:
            raise RuntimeError(f"{session.what}: another task iterates over this member")
        self._reading = True
        try:
            if session.current is not None and session.current.in_hand is not None:
                await session.put_down(session.current)
            await session.pauses.breathe()
            while True:
                session.check()
                if not session.is_valid():
                    session.step()  # the process was suspended, or the loop blocked: what has ended must not be returned
                session.ready.clear()
                message = session.pick_up()
                if message is not None:
                    return message
                if session.is_stopped:
                    raise StopAsyncIteration
                await session.ready.wait()
        finally:
            self._reading = False

    async def run(self, handler: MessageHandler) -> None:
        """Call `handler` for each message: one after the other for each partition, the partitions at the same time.

        ::

            async with group.join() as member:
                await member.run(handle)            # until `stop` is called, or it is cancelled

        A message counts as handled when the handler returns. One slow partition does not hold up the others. If a partition
        is lost (see `Group.join`), its handler is cancelled; before it is handed over, its handler may finish.

        Args:
            handler: Called with a `StoredMsg`; may be an async function.

        Raises:
            TypeError: `handler` is no function.
            RuntimeError: Another task reads from this member, or a loop over it has a message in its hands.
            Exception: What the handler raised: the message is not handled, and the member should be left. Others as for
                iteration.

        Cancellation: The handlers are cancelled; their messages are not handled. Leave the member then.
        """
        check_function(handler, "handler")
        session = self._session
        session.check()
        if self._reading:
            raise RuntimeError(f"{session.what}: another task reads from this member")
        if session.current is not None and session.current.in_hand is not None:
            raise RuntimeError(
                f"{session.what}: a message of partition {session.current.number} is in the hands of a loop over this member; use "
                "either run() or a loop, or join again"
            )
        self._reading = True
        try:
            await session.serve(partial(_handle_each, session, handler))
        finally:
            session.abort()
            self._reading = False

    def stop(self) -> None:
        """Ask the member to leave: `run` and the iteration end once what is in hand is handled and its position stored.

        ::

            loop.add_signal_handler(signal.SIGTERM, member.stop)

        Returns at once. Handlers may finish, for up to `revoke_timeout` (see `Group.join`); then `on_revoked` is called, and
        the partitions are handed over, for up to the group's `patience` if no server answers. Call it in the event loop's thread, at
        any time: a second call does nothing, and a member that is entered afterwards leaves at once.
        """
        self._session.stop()

    async def commit(self) -> None:
        """Store the positions behind the messages that are handled.

        In an iteration, the last message that it has returned counts as handled, whichever task calls this. In `on_revoked` the
        call stores only the positions of the partitions that are handed over, of which nothing is being handled any more. In a
        handler of `run`, messages that are still being handled do not count.

        Raises:
            FencedError: Another member owns one of the partitions now; the positions of the others are stored.
            Exception: Transient errors lasted longer than the group's `patience`; the positions may be stored.

        Cancellation: The positions may be stored.
        """
        self._session.check()
        await self._session.commit()


class PartitionReader:
    """One partition as the input of an exactly-once worker; see `log.worker.Source`."""

    def __init__(self, session: Session, held: Held) -> None:
        group = session.group
        self.name: str | None = None
        self.stream: str = group.stream
        self.subject: str | None = group.subject
        self.context: JetStreamContext = group.context
        self.confirm: bool = True
        self.offsets: OffsetStore = OffsetStore(group.context, group.store.bucket.name)
        self._created = session.settings.created
        self._session = session
        self._held = held

    @property
    def created(self) -> str | None:
        return self._created

    @property
    def position(self) -> int | None:
        return self._held.position

    async def open(self) -> int:
        return self._held.position

    def seek(self, start: StoredOffset | int) -> None:
        if isinstance(start, StoredOffset):
            if start.stream != self.stream or recreated(start.created, self._created):
                raise StreamRecreatedError(
                    f"{self._session.what}: the stored position of partition {self._held.number} is one in stream {start.stream!r} "
                    f"that was created at {start.created}, and the group reads stream {self.stream!r} that was created at "
                    f"{self._created}; nothing is stored; call Group.reset to start again",
                    stream=self.stream,
                    expected=start.created,
                    found=self._created,
                )
            start = start.seq
        self._held.move(start)

    async def read_for(self, seconds: float, max_messages: int = 1000) -> list[StoredMsg] | None:
        """Return messages, an empty list after `seconds` without one, or None once the partition is revoked or lost."""
        held = self._held
        dispatcher = held.lane.dispatcher
        seconds = self._session.pause_between_commits(seconds)
        if not held.ending:
            held.begin()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not held.ending:
                    if not self._session.is_valid():
                        self._session.step()  # see `Member.__anext__`
                        await asyncio.sleep(0)
                        continue
                    if rows := dispatcher.take(held.number, max_messages):
                        return rows
                    held.given.clear()
                    await held.given.wait()
        return None if held.ending else []


async def _handle_each(session: Session, handler: MessageHandler, held: Held) -> None:
    source = PartitionReader(session, held)
    while (found := await source.read_for(_IDLE, BLOCK)) is not None:
        held.queue.extend(found)
        while held.queue:
            await _handle(session, handler, held.pick_up())
            await session.put_down(held)
            await session.pauses.breathe()
            if not session.is_valid():
                session.step()


async def _handle(session: Session, handler: MessageHandler, message: StoredMsg) -> None:
    observer = telemetry.observer
    if observer is None:
        result = handler(message)
        if inspect.isawaitable(result):
            await result
        return
    with observed_handling(observer, session.store.context.connection, session.group.name, message):
        result = handler(message)
        if inspect.isawaitable(result):
            await result
