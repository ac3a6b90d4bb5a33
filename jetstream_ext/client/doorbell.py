"""What wakes the readers that wait at the end of a stream: it says that it is time to look, and nothing else.

::

    look ── nothing new ──► wait 2 ms ──► arm the doorbell ──► look ──► wait for the ring ──► look
                                │                                 ▲
                                └─ it cannot be had ──► pause ────┘ (all pauses grow)

A doorbell is armed only while a reader waits at the end of the stream, and rings once, so it costs nothing while messages flow.
Where the client can hear what is published for the stream, it is a subscription that ends by itself after one message. That
one rings before the message is stored, and not for one that was published before and is not stored yet, which is why one look
is not enough. Otherwise it is an ephemeral consumer that is set to the position (ADR-60) and asked for one message. The
library deletes it when no reader waits, and the server if the client does not come back. On a stream with another retention than
``limits``, a consumer would change what is kept, so there is none, nor if it took the last place of ``max_consumers``.

A doorbell may be lost without a word, and a message may be stored long after it was published. So the readers also look
after pauses that grow, up to `REST`. A bell that has not rung for a message is not used for a while.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self
from weakref import WeakKeyDictionary, WeakValueDictionary

import orjson
from nats.js.api import DEFAULT_PREFIX
from nats.js.errors import APIError
from nats.nuid import NUID

from jetstream_ext.client.api import Api
from jetstream_ext.client.base_connection import BaseConnection, InboxHandler, InboxSubscription, NotPermittedError
from jetstream_ext.client.connection import Context
from jetstream_ext.client.retry import is_transient
from jetstream_ext.errors import RequestTimeoutError
from jetstream_ext.protocol import frames
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.feature_table import CONSUMER_RESET
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.options import reads_subject
from jetstream_ext.text import get_logger, log_state

_log = get_logger("client")

REST: Final = 5.5
"""The longest pause in seconds between two looks of a reader that waits for the doorbell."""
_QUIET: Final = 0.002  # seconds without a message after which it is armed
_LONG_QUIET: Final = 0.25  # if that costs a new consumer each time: servers before 2.14
# The first pauses after a ring, and after it was armed, how they grow, and up to which one: the next is `REST`.
_RUNG: Final = 0.001, 2, 1.0
_ARMED: Final = 0.008, 8, 0.5
_TRUSTED: Final = 1.0  # what is stored is looked for after a pause of so many seconds: then the bell should have rung
_ARM_TIMEOUT: Final = 0.3
_RESET_TIMEOUT: Final = 0.15  # a consumer that is gone does not answer
# How soon a kind of bell is tried again after an error, after the server has refused it, and if the user may not, which only
# a reconnect is likely to change: nats-py reports each refusal to the application.
_FAILED: Final = 5.0
_REFUSED: Final = 30.0
_NOT_PERMITTED: Final = 600.0
_KEPT: Final = 1.0  # for how long a consumer that is not armed is kept for the next time
_INACTIVE: Final = 5.0  # after how long a server deletes the consumer of a client that was killed
_EXPIRES: Final = 30.0  # of one request to the consumer
_MOST_SUBJECTS: Final = 8


class Doorbell:
    """The doorbell of a stream and a filter on one connection; `shared` returns it."""

    def __init__(self, context: Context, stream: str, subject: str | None) -> None:
        self.context: Context = context
        self.stream: str = stream
        self.subject: str | None = subject
        self.resets: bool = True
        """Whether consumers have answered to resets."""
        self._waiting: set[Waiter] = set()  # those that it wakes
        self._arming = asyncio.Lock()
        self._bell: _Bell | None = None
        self._armed_at = -math.inf
        self._armed = False
        # Until when a kind of bell is not tried in a session of the connection, and how often it has not rung.
        self._not_before: dict[tuple[type[_Bell], int], float] = {}
        self._silent: dict[type[_Bell], int] = {}

    @property
    def _source(self) -> str:
        return f"doorbell of {self.stream!r}"

    # -- for the waiters ----------------------------------------------------------------------------------------------

    async def arm(self, waiter: Waiter, state: StreamState, position: int, *, quiet: float, within: float) -> bool:
        """Let the next message from a position on wake a waiter; return False if that cannot be had `within` so many seconds.

        What is stored already may not wake it, so look after the call. `state` is the stream's as far as it is known, and there
        was no message for `quiet` seconds.
        """
        async with self._arming:
            self._waiting.add(waiter)
            waiter.hears = True
            self.revise(state)
            if self._armed:
                return True
            bell = self._bell or self._choose(state, quiet)
            if bell is not None and await self._arm(bell, position, min(within, _ARM_TIMEOUT)):
                return True
            self._wake(ring=False)
            return False

    async def _arm(self, bell: _Bell, position: int, within: float) -> bool:
        self._bell, self._armed = bell, True
        try:
            async with asyncio.timeout(within):
                await bell.arm(position)
        except BaseException as error:
            self._drop(bell)
            if not isinstance(error, Exception):
                self._wake(ring=False)
                raise
            if not isinstance(error, TimeoutError) or within == _ARM_TIMEOUT:
                self._set_back(type(bell), _pause_after(error))
            log_state(_log, self._source, "not armed", error, kind=bell.kind, error=error)
            return False
        if self._bell is not bell:  # lost meanwhile
            bell.close()
            return False
        self._armed_at = asyncio.get_running_loop().time()
        log_state(_log, self._source, "armed", kind=bell.kind, position=position)
        return True

    def revise(self, state: StreamState) -> None:
        """Wake the waiters if the bell does not ring any more for a stream in this state."""
        bell = self._bell
        if bell is not None and not bell.fits(state):
            others = self._armed
            self._drop(bell)
            if others:
                self._wake(ring=False)

    def leave(self, waiter: Waiter, *, keep: bool) -> None:
        """Wake a waiter no more; with `keep`, it may soon wait again."""
        self._waiting.discard(waiter)
        bell = self._bell
        if not self._waiting and self._armed and bell is not None:
            if keep:
                self._armed = False
                bell.rest()
            else:
                self._drop(bell)

    def distrust(self) -> None:
        """Use another bell for a while: this one has not rung for a message."""
        bell = self._bell
        if bell is not None and self._armed:
            kind = type(bell)
            self._silent[kind] = times = self._silent.get(kind, 0) + 1
            self._set_back(kind, min(_REFUSED * 4.0 ** (times - 1), _NOT_PERMITTED))
            self.lose(bell)

    # -- which bell ---------------------------------------------------------------------------------------------------

    def _choose(self, state: StreamState, quiet: float) -> _Bell | None:
        now, session = asyncio.get_running_loop().time(), self.context.connection.session

        def may_try(kind: type[_Bell]) -> bool:
            return now >= self._not_before.get((kind, session), 0.0)

        if (subjects := self.audible(state)) and may_try(_Listener):
            return _Listener(self, subjects)
        most = state.config.get("max_consumers") or -1
        place = state.retention == "limits" and (most < 0 or state.consumers + 1 < most)
        lasting = self.resets and CONSUMER_RESET.at(state.api_level)
        if place and may_try(_Consumer) and (lasting or quiet >= _LONG_QUIET):
            return _Consumer(self, state, resets=lasting)
        return None

    def audible(self, state: StreamState) -> list[str]:
        """Return the subjects to subscribe to, or none if what is published for the stream cannot be heard there."""
        config = state.config
        by_server = config.get("subject_transform") or config.get("allow_msg_schedules")
        here = self.context.prefix == DEFAULT_PREFIX and not self.context.nc.options.get("no_echo")
        if state.origin or not state.contiguous or by_server or not here:
            return []
        apart = reads_subject(state.name)
        subjects = [self.subject] if self.subject else [each for each in state.subjects if each != apart]
        # This client's own requests and their answers must not ring.
        own = any(each.startswith((">", "*", "$JS", "_INBOX")) for each in subjects)
        return [] if own or len(subjects) > _MOST_SUBJECTS else subjects

    def _set_back(self, kind: type[_Bell], seconds: float) -> None:
        session = self.context.connection.session
        self._not_before = {key: when for key, when in self._not_before.items() if key[1] == session}
        self._not_before[kind, session] = asyncio.get_running_loop().time() + seconds

    # -- for the bell -------------------------------------------------------------------------------------------------

    def ring(self) -> None:
        """Wake the waiters; it has to be armed again."""
        self._armed = False
        self._silent = {kind: times for kind, times in self._silent.items() if not isinstance(self._bell, kind)}
        self._wake(ring=True)

    def _wake(self, *, ring: bool) -> None:
        waiting, self._waiting = self._waiting, set()
        for waiter in waiting:
            waiter.hears = False
            if ring:
                waiter.ring()
            waiter.wake()

    def lose(self, bell: _Bell, why: Exception | None = None) -> None:
        """Wake the waiters, because a bell does not ring any more."""
        if bell is not self._bell:
            return
        if why is not None:
            self._set_back(type(bell), _pause_after(why))
        elif self._armed and asyncio.get_running_loop().time() < self._armed_at + _TRUSTED:
            self._set_back(type(bell), _FAILED)
        log_state(_log, self._source, "lost", why, kind=bell.kind)
        self._drop(bell)
        self._wake(ring=False)

    def _drop(self, bell: _Bell) -> None:
        self._armed = False
        if self._bell is bell:
            self._bell = None
        bell.close()


def _pause_after(error: Exception) -> float:
    if isinstance(error, NotPermittedError):
        return _NOT_PERMITTED
    return _FAILED if isinstance(error, TimeoutError) or is_transient(error) else _REFUSED


class _Bell(ABC):
    """One way to notice a message."""

    kind: str

    def __init__(self, doorbell: Doorbell) -> None:
        self._doorbell = doorbell

    @property
    def _connection(self) -> BaseConnection:
        return self._doorbell.context.connection

    def _handler(self, frames: Callable[[list[Frame]], None]) -> InboxHandler:
        return InboxHandler(frames, self._lost, self._lost, self._refused)

    def _lost(self) -> None:
        self._doorbell.lose(self)

    def _refused(self, error: Exception) -> None:
        self._doorbell.lose(self, error)

    @abstractmethod
    def fits(self, state: StreamState) -> bool:
        """Whether it still rings for a stream in this state."""

    @abstractmethod
    async def arm(self, position: int) -> None:
        """Ring once for the next message from a position on."""

    @abstractmethod
    def rest(self) -> None:
        """Ring no more until it is armed again, which may be soon."""

    @abstractmethod
    def close(self) -> None:
        """Leave nothing, here or on the server."""


class _Listener(_Bell):
    """A subscription for one message."""

    kind = "subscription"

    def __init__(self, doorbell: Doorbell, subjects: list[str]) -> None:
        super().__init__(doorbell)
        self._subjects = subjects
        self._inboxes: list[InboxSubscription] = []
        self._heard_one = False

    def fits(self, state: StreamState) -> bool:
        return self._doorbell.audible(state) == self._subjects

    async def arm(self, position: int) -> None:
        self.close()
        self._heard_one, handler = False, self._handler(self._heard)
        for subject in self._subjects:
            inbox = await self._connection.inbox(handler, subject=subject, timeout=_ARM_TIMEOUT, once=True)
            self._inboxes.append(inbox)
        if self._heard_one:
            self.close()

    def _heard(self, _: list[Frame]) -> None:
        if not self._heard_one:
            self._heard_one = True
            self.close()
            self._doorbell.ring()

    def rest(self) -> None:
        self.close()

    def close(self) -> None:
        inboxes, self._inboxes = self._inboxes, []
        for inbox in inboxes:
            inbox.close()


class _Consumer(_Bell):
    """An ephemeral consumer that is asked for one message. The server that has it may be another one than the leader."""

    kind = "consumer"

    def __init__(self, doorbell: Doorbell, state: StreamState, *, resets: bool) -> None:
        super().__init__(doorbell)
        self._leader = state.leader
        self._resets = resets
        self._name = _new_name()
        self._exists = False  # perhaps
        self._inbox: InboxSubscription | None = None
        self._end: asyncio.TimerHandle | None = None

    def fits(self, state: StreamState) -> bool:
        most = state.config.get("max_consumers") or -1
        return self._leader == state.leader and state.retention == "limits" and (most < 0 or state.consumers < most)

    async def arm(self, position: int) -> None:
        self._stop()
        self._inbox = inbox = await self._connection.inbox(self._handler(self._heard), timeout=_ARM_TIMEOUT)
        if self._exists and not await self._reset(position):
            self._delete()
        if self._inbox is inbox and not self._exists:
            await self._create(position)
        if self._inbox is inbox:
            self._ask(inbox)

    async def _reset(self, position: int) -> bool:
        """Let the consumer go on at a position, if it can (ADR-60)."""
        doorbell, inbox = self._doorbell, self._inbox
        if not (self._resets and doorbell.resets):
            return False
        try:
            subject = f"CONSUMER.RESET.{doorbell.stream}.{self._name}"
            await Api(doorbell.context, _RESET_TIMEOUT).ask(subject, {"seq": position})
        except RequestTimeoutError as late:
            if self._inbox is inbox and not isinstance(late, NotPermittedError):
                doorbell.resets = False
            return False
        except APIError:
            return False
        return True

    async def _create(self, position: int) -> None:
        doorbell = self._doorbell
        config: dict[str, Any] = {
            "name": self._name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": position,
            "ack_policy": "none",
            "replay_policy": "instant",
            "headers_only": True,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": int(_INACTIVE * 1e9),
        }
        subject = f"CONSUMER.CREATE.{doorbell.stream}.{self._name}"
        if doorbell.subject is not None:
            config["filter_subject"] = doorbell.subject
            subject += f".{doorbell.subject}"
        self._exists = True
        try:
            await Api(doorbell.context, _ARM_TIMEOUT).ask(subject, {"stream_name": doorbell.stream, "config": config})
        except (APIError, NotPermittedError):
            self._exists = False
            raise

    def _ask(self, inbox: InboxSubscription) -> None:
        doorbell = self._doorbell
        to = f"{doorbell.context.prefix}.CONSUMER.MSG.NEXT.{doorbell.stream}.{self._name}"
        request = orjson.dumps({"batch": 1, "expires": int(_EXPIRES * 1e9)})
        command = frames.pub(to.encode(), inbox.subject.encode(), b"", request)
        self._connection.write_nowait(command, 1, len(request))

    def _heard(self, received: list[Frame]) -> None:
        status, inbox = received[0][1][:12], self._inbox
        if not status.startswith(b"NATS/1.0 "):
            self.rest()
            self._doorbell.ring()
        elif status == b"NATS/1.0 408" and inbox is not None and self._connection.usable:
            self._ask(inbox)  # the request has expired
        else:  # the consumer is gone
            self._lost()

    def rest(self) -> None:
        self._stop()
        self._end = asyncio.get_running_loop().call_later(_KEPT, self._doorbell.lose, self)

    def _delete(self) -> None:
        """Delete the consumer, and take another name for the next one."""
        doorbell = self._doorbell
        if self._exists and self._connection.end is None:
            subject = f"{doorbell.context.prefix}.CONSUMER.DELETE.{doorbell.stream}.{self._name}"
            self._connection.write_if_usable(frames.pub(subject.encode(), b"", b"", b""))
        self._exists, self._name = False, _new_name()

    def _stop(self) -> None:
        inbox, self._inbox = self._inbox, None
        if inbox is not None:
            inbox.close()
        end, self._end = self._end, None
        if end is not None:
            end.cancel()

    def close(self) -> None:
        self._stop()
        self._delete()


def _new_name() -> str:
    return f"doorbell-{NUID().next().decode()}"


_doorbells: Final[WeakKeyDictionary[BaseConnection, WeakValueDictionary[tuple[str, str, str | None], Doorbell]]] = (
    WeakKeyDictionary()
)


def shared(context: Context, stream: str, subject: str | None) -> Doorbell:
    """Return the one doorbell of a stream and a filter (None: everything) on the context's connection."""
    of_connection = _doorbells.setdefault(context.connection, WeakValueDictionary())
    key = context.prefix, stream, None if subject == ">" else subject
    if (doorbell := of_connection.get(key)) is None:
        doorbell = of_connection[key] = Doorbell(context, *key[1:])
    return doorbell


class Waiter:
    """How a reader, worker or table spends the time between two looks at its stream; use it as a context manager.

    Without a `doorbell`, or while it cannot be had, the pauses grow up to `poll` seconds; with it, up to `REST`.
    """

    def __init__(self, doorbell: Doorbell | None, *, poll: float) -> None:
        self.hears: bool = False
        """Whether the doorbell wakes it."""
        self._doorbell = doorbell
        self._poll = poll
        self._woken = asyncio.Event()
        self._armed_at = -math.inf
        self._pause = _ARMED  # the next one while it hears, and how it grows
        self._rested = False  # a long one has ended without a ring
        self.found()

    def found(self) -> None:
        """Note that the last look has found something."""
        if self.hears and self._rested and self._doorbell is not None:
            self._doorbell.distrust()
        self.leave(keep=True)
        self._since: float | None = None  # when a look has found nothing for the first time
        self._delay = min(_QUIET, self._poll)  # the next pause while it does not hear
        self._rings = 0  # in vain, one soon after the other
        self._at_once = False

    def ring(self) -> None:
        """Take note that a message was published: it is stored already, or soon."""
        if asyncio.get_running_loop().time() > self._armed_at + _TRUSTED:
            self._rings = 0
        self._rings += 1
        self._at_once = self._rings == 1  # what is published meanwhile must ring again
        self._delay = min(_QUIET * 2.0**self._rings, self._poll)
        self._pause = _RUNG

    def wake(self) -> None:
        """End the pause."""
        self._woken.set()

    def leave(self, *, keep: bool = False) -> None:
        """Wait no more, until the next `pause`; with `keep`, that may be soon."""
        if self.hears and self._doorbell is not None:
            self.hears = False
            self._doorbell.leave(self, keep=keep)

    async def pause(self, state: StreamState | None, position: int, until: float = math.inf) -> None:
        """Wait after a look that has found nothing from a position on, until the next look is due, or the time `until`."""
        clock, doorbell = asyncio.get_running_loop().time, self._doorbell
        now = clock()
        self._since = now if self._since is None else self._since
        if self.hears and doorbell is not None and state is not None:
            doorbell.revise(state)
        if self.hears:
            pause, factor, last = self._pause
            woken = await self._sleep(min(until, now + pause))
            self._rested = not woken and pause >= _TRUSTED and not self._rings
            if not woken:  # otherwise `ring` may have set it
                self._pause = REST if pause >= last else factor * pause, factor, last
            return
        if self._at_once:
            self._at_once = False
        elif await self._sleep(min(until, now + self._delay)) or (now := clock()) >= until:
            return
        self._woken.clear()
        if doorbell is not None and state is not None:
            self._rested, self._armed_at = False, now
            if not self._rings:
                self._pause = _ARMED
            if await doorbell.arm(self, state, position, quiet=now - self._since, within=until - now):
                return
            self._woken.clear()
        self._delay = min(2 * self._delay, self._poll)

    async def _sleep(self, until: float) -> bool:
        """Wait until the time `until`; return whether it was woken before."""
        try:
            async with asyncio.timeout_at(None if until == math.inf else until):
                await self._woken.wait()
        except TimeoutError:
            return False
        self._woken.clear()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(keep=kind is None)
