"""What wakes the readers that wait at the end of a stream: it says that it is time to look, and nothing else.

::

    look ── nothing new ──► wait 2 ms ──► arm the doorbell ──► look ──► wait for the ring ──► look
                                │                                 ▲
                                └─ it cannot be had ──► pause ────┘ (the pauses grow)

A doorbell is armed only while a reader waits at the end of the stream, and rings once, so it costs nothing while messages flow.
Where the client can hear what is published for the stream, it is a subscription that ends by itself after one message.
Otherwise it is an ephemeral consumer that is set to the position (ADR-60) and asked for one message. On a stream with another
retention than ``limits`` a consumer would change what is kept, so there is none, nor if it took the last place of
``max_consumers``.

A doorbell may be lost without a word, and a subscription rings before the message is stored. So one rule says when to look
again: after a pause in proportion to the time since the bell was armed, or rang, and after a second every `REST`. A bell that is lost counts as
one that rings. A kind of bell that fails, or has not rung for a message, is not tried for a while.

All that wait for one doorbell share what they ask: an answer is for each of them whose last look and ring were before it was
asked for.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import orjson
from nats.js.api import DEFAULT_PREFIX
from nats.js.errors import NotFoundError
from nats.nuid import NUID

from jetstream_ext.client.api import Api, gather_bounded, get_at_leader, stream_state
from jetstream_ext.client.base_connection import (
    BaseConnection,
    InboxHandler,
    InboxSubscription,
    NotPermittedError,
    mark_retrieved,
)
from jetstream_ext.client.connection import Context
from jetstream_ext.client.retry import is_transient
from jetstream_ext.protocol import frames
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.feature_table import CONSUMER_RESET
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.options import reads_subject
from jetstream_ext.text import get_logger, log_state

_log = get_logger("client")

_T = TypeVar("_T")

REST: Final = 5.5
"""The longest pause in seconds between two looks of a reader that waits for the doorbell."""
_QUIET: Final = 0.002  # seconds without a message after which it is armed, and the shortest pause between two looks
_LONG_QUIET: Final = 0.25  # if that costs a new consumer each time: servers before 2.14
_GROWTH: Final = 7  # how many times as long as the bell was armed, or has rung, the next pause is
_TRUSTED: Final = 1.0  # so long after it was armed, or rang, what was published before is stored
# How long a kind of bell is not tried after an error that may pass, and after another one, or if it has not rung.
_FAILED: Final = 5.0
_REFUSED: Final = 60.0
_KEPT: Final = 1.0  # for how long a consumer is kept while no reader waits
_MOST_SUBJECTS: Final = 8
_ARM_TIMEOUT: Final = 0.3
_INACTIVE: Final = 5.0  # after how long a server deletes the consumer of a client that was killed
_EXPIRES: Final = 30.0  # of one request to the consumer


class Doorbell:
    """The doorbell of a stream and a filter on one connection; `shared` returns it."""

    def __init__(self, context: Context, stream: str, subject: str | None) -> None:
        self.context: Context = context
        self.stream: str = stream
        self.subject: str | None = subject
        self.since: float = -math.inf
        """When it was armed, or rang, or was lost."""
        self.looks: defaultdict[float, Shared[Look]] = defaultdict(Shared)
        """By how long an answer may take."""
        self._waiting: set[Waiter] = set()  # those that it wakes
        self._arming = asyncio.Lock()
        self._bell: _Subscription | None = None
        self._armed = False
        self._vain = 0  # how often it has rung without a new message, one ring soon after the other
        self._end: asyncio.TimerHandle | None = None
        self._not_before: dict[tuple[int, str], float] = {}  # until when a kind of bell is not tried in a session

    # -- for the waiters ----------------------------------------------------------------------------------------------

    @property
    def quiet(self) -> float:
        """After how many seconds without a message or a ring it should be armed."""
        return _QUIET * 2.0 ** min(self._vain, 30)

    def join(self, waiter: Waiter, state: StreamState | None) -> bool:
        """Let it wake a waiter if it is armed, and still rings for a stream in this state; return whether that is so."""
        bell = self._bell
        if bell is not None and state is not None and (type(bell), bell.depends) not in self._ways(state):
            self.lose(bell)
        if self._armed:
            self._waiting.add(waiter)
        return self._armed

    async def arm(self, waiter: Waiter, state: StreamState, position: int, quiet: float) -> None:
        """Let the next message from a position on wake a waiter, if that can be had.

        What is stored already may not wake it, so look after the call. `state` is the stream's as far as it is known, and there
        was no message for `quiet` seconds.
        """
        async with self._arming:
            if self.join(waiter, state):
                return
            bell = self._bell or self._choose(state, quiet)
            if bell is None:
                return
            self._bell, self._armed = bell, True
            self._waiting.add(waiter)
            try:
                async with asyncio.timeout(_ARM_TIMEOUT):
                    await bell.arm(position)
            except BaseException as error:
                self.lose(bell, error if isinstance(error, Exception) else None)
                if not isinstance(error, Exception):
                    raise
            if self._bell is not bell or not self._armed:  # it was lost meanwhile, or has rung
                bell.close()
            else:
                self.since = asyncio.get_running_loop().time()
                log_state(_log, f"doorbell of {self.stream!r}", "armed", kind=bell.kind, position=position)

    def leave(self, waiter: Waiter, *, keep: bool) -> None:
        """Wake a waiter no more; with `keep`, it may soon wait again."""
        self._waiting.discard(waiter)
        if not self._waiting and self._bell is not None:
            if not (keep and self._bell.lasts):
                self._close()
            elif self._end is None:
                self._end = asyncio.get_running_loop().call_later(_KEPT, self._close_unless_needed)

    def _close_unless_needed(self) -> None:
        self._end = None
        if not self._waiting:
            self._close()

    def found(self, *, silent: bool) -> None:
        """Take note that there was a new message, and whether the bell should have rung for it, and has not."""
        self._vain = 0
        if silent and self._armed and self._bell is not None:
            self.lose(self._bell, RuntimeError("it has not rung for a message"))

    # -- which bell ---------------------------------------------------------------------------------------------------

    def _ways(self, state: StreamState) -> Iterator[tuple[type[_Subscription], tuple[str, ...]]]:
        """Yield which bells ring for a stream in this state, and what they depend on; the best first."""
        if subjects := self._audible(state):
            yield _Subscription, tuple(subjects)
        most, own = state.config.get("max_consumers") or -1, isinstance(self._bell, _Consumer)
        if state.retention == "limits" and (most < 0 or state.consumers - own + 1 < most):
            yield _Consumer, (state.leader,)

    def _audible(self, state: StreamState) -> list[str]:
        """Return the subjects to subscribe to, or none if what is published for the stream cannot be heard there."""
        config = state.config
        names = "subject_transform", "allow_msg_schedules", "subject_delete_marker_ttl"
        by_server = any(config.get(name) for name in names)  # it stores messages that it does not publish there
        here = self.context.prefix == DEFAULT_PREFIX and not self.context.nc.options.get("no_echo")
        if state.origin or not state.contiguous or by_server or not here:
            return []
        apart = reads_subject(state.name)
        subjects = [self.subject] if self.subject else [each for each in state.subjects if each != apart]
        # This client's own requests and their answers must not ring.
        own = any(each.startswith((">", "*", "$JS", "_INBOX")) for each in subjects)
        return [] if own or len(subjects) > _MOST_SUBJECTS else subjects

    def _choose(self, state: StreamState, quiet: float) -> _Subscription | None:
        now, resets = asyncio.get_running_loop().time(), CONSUMER_RESET.at(state.api_level)
        for kind, depends in self._ways(state):
            if now < self._not_before.get((self.context.connection.session, kind.kind), 0.0):
                continue
            if kind is _Subscription or resets or quiet >= _LONG_QUIET:
                return kind(self, depends, lasts=resets)
        return None

    # -- for the bell -------------------------------------------------------------------------------------------------

    def ring(self) -> None:
        """Wake the waiters; it has to be armed again."""
        if self._armed:
            self._wake(rang=True)

    def lose(self, bell: _Subscription, why: Exception | None = None) -> None:
        """Wake the waiters, because a bell does not ring any more; after an error, do not try its kind for a while."""
        if bell is not self._bell:
            return
        log_state(_log, f"doorbell of {self.stream!r}", "lost", why, kind=bell.kind, error=why)
        if why is not None:
            passes = isinstance(why, TimeoutError) or is_transient(why)
            seconds = _FAILED if passes else _REFUSED
            if isinstance(why, NotPermittedError):  # nats-py reports each refusal to the application
                seconds = math.inf
            key = self.context.connection.session, bell.kind
            self._not_before[key] = asyncio.get_running_loop().time() + seconds
        self._close()
        self._wake(rang=False)

    def _wake(self, *, rang: bool) -> None:
        now = asyncio.get_running_loop().time()
        self._vain = 1 if now > self.since + _TRUSTED else self._vain + 1
        self.since, self._armed = now, False
        for waiter in tuple(self._waiting):
            self.leave(waiter, keep=True)
            waiter.rang = rang
            waiter.wake()

    def _close(self) -> None:
        bell, self._bell, self._armed = self._bell, None, False
        if bell is not None:
            bell.close()
        if self._end is not None:
            self._end.cancel()
            self._end = None


class _Subscription:
    """A bell: subscriptions to the subjects that it `depends` on, each for one message. It is armed once."""

    kind: str = "subscription"

    def __init__(self, doorbell: Doorbell, depends: tuple[str, ...], *, lasts: bool) -> None:
        self.depends: tuple[str, ...] = depends
        self.lasts: bool = lasts and self.kind == "consumer"
        """Whether it can be armed again."""
        self._doorbell = doorbell
        self._inboxes: list[InboxSubscription] = []

    async def arm(self, position: int) -> None:
        """Ring once for the next message from a position on."""
        for subject in self.depends:
            await self._subscribe(subject)

    async def _subscribe(self, subject: str = "") -> None:
        def lost(error: Exception | None = None) -> None:
            self._doorbell.lose(self, error)

        handler, connection = InboxHandler(self._heard, lost, lost, lost), self._doorbell.context.connection
        self._inboxes.append(await connection.inbox(handler, subject=subject, timeout=_ARM_TIMEOUT, once=bool(subject)))

    def _heard(self, received: list[Frame]) -> None:
        self.close()
        self._doorbell.ring()

    def close(self) -> None:
        """Leave nothing, here or on the server."""
        inboxes, self._inboxes = self._inboxes, []
        for inbox in inboxes:
            inbox.close()


class _Consumer(_Subscription):
    """A bell: an ephemeral consumer that is asked for one message.

    Another server than the leader may have it: it `depends` on the leader, so that it goes to another one with the leader.
    Servers before 2.14 cannot set it to another position, and then it does not last.
    """

    kind = "consumer"
    _name = ""  # of the consumer, if it may exist

    async def arm(self, position: int) -> None:
        if not (self._name and await self._reset(position)):
            self.close()
            await self._create(position)
        self._ask()

    async def _reset(self, position: int) -> bool:
        """Let the consumer go on at a position (ADR-60); return False if it is gone."""
        try:
            await self._request(f"CONSUMER.RESET.{self._doorbell.stream}.{self._name}", {"seq": position})
        except NotFoundError:
            return False
        return True

    async def _create(self, position: int) -> None:
        doorbell, name = self._doorbell, f"doorbell-{NUID().next().decode()}"
        config: dict[str, Any] = {
            "name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": position,
            "ack_policy": "none",
            "replay_policy": "instant",
            "headers_only": True,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": int(_INACTIVE * 1e9),
        }
        subject = f"CONSUMER.CREATE.{doorbell.stream}.{name}"
        if doorbell.subject is not None:
            config["filter_subject"] = doorbell.subject
            subject += f".{doorbell.subject}"
        await self._subscribe()
        self._name = name
        try:
            await self._request(subject, {"stream_name": doorbell.stream, "config": config})
        except NotPermittedError:
            self._name = ""  # nor need it be deleted
            raise

    async def _request(self, subject: str, body: dict[str, Any]) -> None:
        await Api(self._doorbell.context, _ARM_TIMEOUT).ask(subject, body)

    def _send(self, request: str, reply: bytes = b"", body: bytes = b"") -> None:
        context = self._doorbell.context
        subject = f"{context.prefix}.CONSUMER.{request}.{self._doorbell.stream}.{self._name}"
        context.connection.write_if_usable(frames.pub(subject.encode(), reply, b"", body))

    def _ask(self) -> None:
        for inbox in self._inboxes:  # none if it was lost meanwhile
            body = orjson.dumps({"batch": 1, "expires": int(_EXPIRES * 1e9)})
            self._send("MSG.NEXT", inbox.subject.encode(), body)

    def _heard(self, received: list[Frame]) -> None:
        status = received[0][1][:12]
        if not status.startswith(b"NATS/1.0 "):
            self._doorbell.ring()
        elif status == b"NATS/1.0 408":
            self._ask()  # the request has expired
        else:  # the consumer is gone
            self._doorbell.lose(self)

    def close(self) -> None:
        super().close()
        if self._name:
            self._send("DELETE")
            self._name = ""


class Shared(Generic[_T]):
    """A question that several callers have: one request at a time is under way."""

    def __init__(self) -> None:
        self._asked = -math.inf
        self._answer: asyncio.Future[_T] | None = None

    async def get(self, after: float, ask: Callable[[], Awaitable[_T]]) -> tuple[float, _T]:
        """Return the answer to a request that was sent after a time, and when that was; raise as `ask` does."""
        loop = asyncio.get_running_loop()
        while (answer := self._answer) is not None and (self._asked > after or not answer.done()):
            asked = self._asked
            if not answer.done():
                await asyncio.wait([answer])
            if asked > after and not answer.cancelled():
                return asked, answer.result()
        asked, answer = self._asked, self._answer = loop.time(), loop.create_future()
        try:
            answer.set_result(await ask())
        except Exception as error:
            answer.set_exception(error)
            mark_retrieved(answer)
            raise
        finally:
            answer.cancel()  # unless it is done; another caller asks
            if self._answer is answer and (answer.cancelled() or answer.exception() is not None):
                self._answer = None  # an error is for those that wait already
        return asked, answer.result()


class Look:
    """What the leader says of a doorbell's stream: its state, and messages that match the filter. Each is asked for once."""

    def __init__(self, doorbell: Doorbell) -> None:
        self._of = doorbell
        self._state = Shared[StreamState]()
        self._messages: dict[int, Shared[StoredMsg | None]] = {}

    async def ask(self, seqs: Sequence[int], timeout: float) -> Look:
        """Ask for the messages at some sequences, and for the state, unless these messages may say enough."""

        async def ask_for(seq: int) -> None:
            await (self.message(seq, timeout) if seq else self.state(timeout))

        wanted = seqs if seqs and self._of.subject is None else (0, *seqs)
        await gather_bounded(ask_for, wanted, limit=len(wanted))
        return self

    async def state(self, timeout: float) -> StreamState:
        """Return the stream's state; raise as `stream_state` does."""
        ask = partial(stream_state, self._of.context, self._of.stream, timeout)
        return (await self._state.get(-math.inf, ask))[1]

    async def message(self, seq: int, timeout: float) -> StoredMsg | None:
        """Return the first message at or after a sequence, or None; raise as `get_at_leader` does."""
        request = {"seq": seq, "next_by_subj": self._of.subject or ">"}
        ask = partial(get_at_leader, self._of.context, self._of.stream, request, timeout)
        _, found = await self._messages.setdefault(seq, Shared()).get(-math.inf, ask)
        if found is None:
            self._messages.pop(seq, None)  # it may be stored soon
        return found


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

    Unless the doorbell `rings`, or while it cannot be had, the pauses grow up to `poll` seconds; else up to `REST`.
    """

    def __init__(self, doorbell: Doorbell, *, poll: float, rings: bool = True) -> None:
        self.rang: bool = False
        """Whether a message is expected, because the doorbell has rung."""
        self._doorbell = doorbell
        self._poll = poll
        self._rings = rings
        self._woken = asyncio.Event()
        self._looked = -math.inf  # when it was asked what the last look has shown
        self._after: float | None = None  # what was asked after this is new to the next look; None: only what it asks
        self._began: float | None = None  # when a look has found nothing for the first time
        self._rested = False  # a long pause has ended without a ring
        self._has_paused = False

    async def look(self, seqs: Sequence[int] | None, timeout: float) -> Look:
        """Return what the leader says; raise as `Api.ask` does.

        Without `seqs`, it is asked after the call. With them, for the look after a pause, it may have been asked before, by
        another one that waits for the doorbell, but after the last look and ring. After a ring, it is asked for the messages at
        these sequences. A reader that has not paused yet does not share what it asks, so it waits for no other one's answer.
        """
        doorbell = self._doorbell
        if not self._has_paused:
            self._looked = asyncio.get_running_loop().time()
            return await Look(doorbell).ask((), timeout)
        after, self._after = self._after, None
        if seqs is None or after is None:
            after = asyncio.get_running_loop().time()
        ahead = seqs or () if self.rang else ()
        self._looked, look = await doorbell.looks[timeout].get(after, lambda: Look(doorbell).ask(ahead, timeout))
        return look

    def found(self) -> None:
        """Note that the last look has found something."""
        self._doorbell.found(silent=self._rested)
        self.leave(keep=True)
        self.rang = False

    def looked(self, when: float) -> None:
        """Note a look of the caller that asked the server itself, at a time of the loop's clock."""
        self._looked = when

    def wake(self) -> None:
        """End the pause."""
        self._woken.set()

    def leave(self, *, keep: bool = False) -> None:
        """Wait no more, until the next `pause`; with `keep`, that may be soon."""
        self._doorbell.leave(self, keep=keep)
        self._began = self._after = None
        self._rested = False

    async def pause(self, state: StreamState | None, position: int, until: float = math.inf) -> None:
        """Wait after a look that has found nothing from a position on, until the next look is due, or the time `until`."""
        clock, doorbell = asyncio.get_running_loop().time, self._doorbell
        now = clock()
        self._began = now if self._began is None else self._began
        self._rested, self._has_paused = False, True
        if self._rings and doorbell.join(self, state):
            armed = self._looked - doorbell.since
            pause = min(max(_QUIET, _GROWTH * armed), _TRUSTED) if armed < _TRUSTED else REST
            due = now if armed < 0 else self._looked + pause
            woken = await self._sleep(min(until, due))
            self._rested = not woken and clock() > now + _TRUSTED
        else:
            since = max(self._began, doorbell.since) if self._rings else self._began
            looked = max(self._looked, since)
            due = looked + min(max(doorbell.quiet, looked - since), self._poll)
            woken = await self._sleep(min(until, due))
            if self._rings and not woken and state is not None and (now := clock()) < until:
                await doorbell.arm(self, state, position, now - since)
                self.rang = False
        self._after = max(self._looked, doorbell.since)
        self._looked = clock()

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
