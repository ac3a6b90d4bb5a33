"""Access to a user's connection: inbox subscriptions, requests, writing, bounded waits, and the connection's state.

`FallbackConnection` uses only nats-py's public interface; `connection.Connection` uses its internals and is faster.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from jetstream_ext.errors import RequestTimeoutError
from jetstream_ext.protocol import frames
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.text import get_logger, log_state
from jetstream_ext.types import own_headers

_log: Final = get_logger("client")

# Seconds between two looks at the connection, during a wait and while inboxes are open: nats-py has no event for one that
# is closed while it reconnects or while its server reads nothing.
_WAIT_POLL: Final = 0.05
_INBOX_POLL: Final = 0.2
_USABLE_POLL: Final = 0.02
_ROOM_POLL: Final = 0.001
_CANCEL_AGAIN: Final = 0.5
_CANCELLATIONS: Final = 10

# Bytes that may wait for nats-py, which has the same limit for its own buffer by default.
_MAX_QUEUED: Final = 2 << 20

# How nats-py reports what the server refused; nats-py has put the text into lower case.
_REFUSAL: Final = re.compile(
    r"""violation for (publish|subscription) to "(.*?)"(?: using queue ".*"| \(sid "\d+"\))?'?$""", re.IGNORECASE
)
_REFUSED_KEPT: Final = 1024

_T = TypeVar("_T")


class NotPermittedError(RequestTimeoutError):
    """There is no answer, and the server said why: the user may not publish to `subject`; `text` overrides the text."""

    def __init__(self, subject: str = "", text: str = "") -> None:
        refused = f"the server has refused a message to {subject!r}: the user had no permission to publish to it"
        super().__init__(text or refused)


class NotConnectedError(nats.errors.ConnectionClosedError):
    """nats-py's error of a closed connection, for a client that was never connected."""

    def __str__(self) -> str:
        return "the client is not connected; await nats.connect(...) first"


def never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class InboxHandler:
    """The callbacks of one inbox subscription. They are called on the loop and must not block or raise."""

    frames: Callable[[list[Frame]], None]  # takes delivered messages, in order
    # The connection is lost, and with it perhaps sent messages and answers. Called again if it is then closed.
    disconnected: Callable[[], None]
    reconnected: Callable[[], None] | None = None  # nats-py has restored the subscription and written its buffer
    # The server has refused the subscription, or has ended it, so no message will come.
    refused: Callable[[NotPermittedError], None] | None = None


class InboxSubscription:
    """A subscription to `filter` that delivers to an `InboxHandler` until `close`, after which `handler` is None."""

    def __init__(self, connection: BaseConnection, subject: str, tail: str, handler: InboxHandler) -> None:
        self.subject: str = subject or connection.nc.new_inbox()
        self.filter: str = self.subject + tail
        self.handler: InboxHandler | None = handler
        self.subscription: Subscription | None = None
        self.sid = 0  # `Connection` needs it
        self._connection = connection
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Unsubscribe. Never suspends; safe to call twice and on a closed connection."""
        self.handler = None
        subscription, self.subscription = self.subscription, None
        if subscription is not None:
            self._connection.drop(self, subscription)

    def owner_dropped(self, what: str, then: Iterable[Callable[[], object]] = ()) -> None:
        """Close, from the owner's ``__del__`` and so perhaps from another thread, if `what` was left open; warn if so."""
        if self.subscription is None or self._connection.end is not None:
            return

        def close() -> None:
            self.close()
            for end in then:
                end()

        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing runs any more
            self._loop.call_soon_threadsafe(close)
        # At last, because it may raise.
        warnings.warn(
            f"{what} was dropped while it was open; use `async with`, or end it", ResourceWarning, stacklevel=3
        )


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a callback that calls the bound method `method` as long as its object is referred to elsewhere.

    A connection and a loop hold such callbacks, so that an object that its user has dropped is collected.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments: object) -> None:
        if (target := reference()) is not None:
            target(*arguments)

    return call


def call_handler(handler: Callable[..., None], *arguments: object) -> None:
    """Call a handler and report its exception to the loop: raised, it would end nats-py's read loop silently."""
    try:
        handler(*arguments)
    except (Exception, asyncio.CancelledError) as error:  # no suspension here: the handler itself raised it
        asyncio.get_running_loop().call_exception_handler(
            {"message": "jetstream_ext: the handler of a server message raised", "exception": error}
        )


def complete(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)


class BaseConnection(ABC):
    """Access to the connection `nc`; `server_info` returns the ``INFO`` of the connected server."""

    def __init__(self, nc: Client, server_info: Callable[[], Mapping[str, Any]]) -> None:
        self.nc = nc
        self._server_info = server_info
        self._inboxes: dict[InboxSubscription, None] = {}  # the open ones
        self._poll: asyncio.TimerHandle | None = None
        self._lost = False
        # What the server has refused since it was connected: messages, by `_refused_as` and oldest first, with the number of
        # the refusal; and the subjects where answers come, if the user may not subscribe to them.
        self._refused: dict[str, int] = {}
        self._refusals = 0
        self._silent = ""
        self._asked: dict[asyncio.Future[Any], str] = {}  # the answers that are awaited, by where the message went

    # -- inboxes and what their handlers are told ---------------------------------------------------------------------

    @abstractmethod
    async def inbox(
        self, handler: InboxHandler, *, subject: str = "", tail: str = "", timeout: float, once: bool = False
    ) -> InboxSubscription:
        """Subscribe `handler` to `subject` (default: a new inbox) with `tail` appended, within `timeout` seconds.

        With `once`, the server ends the subscription after one message; close it then.
        """

    def _opened(self, inbox: InboxSubscription, subscription: Subscription) -> InboxSubscription:
        inbox.subscription = subscription
        self._inboxes[inbox] = None
        if self._poll is None:
            self._poll = asyncio.get_running_loop().call_later(_INBOX_POLL, self._check_inboxes)
        return inbox

    def drop(self, inbox: InboxSubscription, subscription: Subscription) -> None:
        """Unsubscribe without suspending, so that no cancellation can interrupt it."""
        self._inboxes.pop(inbox, None)
        if not self._inboxes and self._poll is not None:
            self._poll.cancel()
            self._poll = None
        self._unsubscribe(inbox.sid, subscription)

    @abstractmethod
    def _unsubscribe(self, sid: int, subscription: Subscription) -> None: ...

    def _check_inboxes(self) -> None:
        self._poll = None
        if self.end is not None:
            self._tell(connected=False)
            return
        self._look()
        if self._inboxes:
            self._poll = asyncio.get_running_loop().call_later(_INBOX_POLL, self._check_inboxes)

    def _look(self) -> None:  # noqa: B027 - nothing to do for a connection that hears of it
        """Take note of a connection that is lost or back, and of what the server has refused."""

    def _tell(self, *, connected: bool) -> None:
        """Tell every handler that the connection is lost or back; the callbacks may open and close inboxes."""
        self._lost = not connected
        if not connected:  # the next connection may have other permissions, and what is refused again is noted
            self._refused.clear()
            self._silent = ""
        log_state(_log, "connection", "reconnected" if connected else "disconnected")
        for inbox in list(self._inboxes):
            handler = inbox.handler
            callback = None if handler is None else handler.reconnected if connected else handler.disconnected
            if callback is not None:
                call_handler(callback)

    def _note_refusal(self, text: str) -> None:
        """Tell who waits if `text`, an error that nats-py reports, says that the server has refused something."""
        if (found := _REFUSAL.search(text)) is None:
            return
        subject = self._refused_as(found[2])
        if found[1].lower() == "publish":
            self._refusals += 1
            self._refused.pop(subject, None)
            self._refused[subject] = self._refusals
            if len(self._refused) > _REFUSED_KEPT:
                del self._refused[next(iter(self._refused))]
            for answer, asked in self._asked.items():
                if self._refused_as(asked) == subject:
                    complete(answer, NotPermittedError(asked))
            return
        answers = self.nc.new_inbox().rpartition(".")[0]
        if subject.startswith(f"{answers.lower()}."):
            self._silent = f"{answers}.>"
        for inbox in list(self._inboxes):
            handler, name = inbox.handler, inbox.filter
            if subject == self._refused_as(name) and handler is not None and handler.refused is not None:
                text = f"the server refused the subscription: no permission to subscribe to {name}"
                call_handler(handler.refused, NotPermittedError(name, text))

    def _refused_as(self, subject: str) -> str:
        """Return one name of a subject in refusals: a server maps the API of its own domain, and nats-py lowers the case."""
        subject, domain = subject.lower(), f"$js.{self.domain}.api.".lower()
        return "$js.api." + subject.removeprefix(domain) if subject.startswith(domain) else subject

    # -- requests -----------------------------------------------------------------------------------------------------

    async def request(
        self, subject: str, payload: bytes, timeout: float, *, header: bytes = b"", again: float = math.inf
    ) -> Frame:
        """Send a request, and return the first reply within `timeout` seconds; while nats-py reconnects, it waits.

        A request that changes nothing can be sent `again` after so many seconds without a reply, and after a reconnect.

        Raises:
            NotPermittedError: The server has refused the request: it was not carried out. Or it has refused the subscription
                to the reply, as the text says.
            NoRespondersError: nats-py's: no server or client is subscribed to the subject.
            RequestTimeoutError: There was no reply in time.
            ConnectionReconnectingError: nats-py's: the connection was lost after the request was sent.
            ConnectionClosedError, ConnectionDrainingError: nats-py's: no reply can come any more.
            BadSubjectError, MaxPayloadError: The subject is too long, or the message is too large; nothing was sent.

        Cancellation: Nothing is left behind; a request that was sent may be carried out.
        """
        frames.check_line(subject, self.inbox_size)
        frames.check_size(len(header) + len(payload), self.max_payload, subject)
        loop = asyncio.get_running_loop()
        deadline, answer = loop.time() + timeout, loop.create_future()

        def lost() -> None:
            complete(answer, self.end or nats.errors.ConnectionReconnectingError())

        def refused(_: Exception) -> None:
            complete(answer, NotPermittedError(subject, f"no answer on {subject}{self.why_silent(())}"))

        handler = InboxHandler(lambda got: complete(answer, got[0]), lost, refused=refused)
        inbox = await self.inbox(handler, timeout=timeout)
        command = frames.pub(subject.encode(), inbox.subject.encode(), header, payload)
        try:
            while True:
                if not self.usable:
                    await self.wait_usable(deadline - loop.time())
                    answer = loop.create_future()  # nothing was sent yet when the connection was lost
                self.write_nowait(command, 1, len(header) + len(payload))
                until = min(deadline, loop.time() + again)
                try:
                    reply: Frame | None = await self.reply(answer, until, subject)
                except nats.errors.ConnectionReconnectingError:
                    if again == math.inf:
                        raise
                else:
                    if reply is not None:
                        break
                    if until == deadline:
                        text = f"no answer on {subject} within {timeout:.4g} s{self.why_silent(())}"
                        raise RequestTimeoutError(text)
                answer = loop.create_future()
        finally:
            inbox.close()
        # A message that a publisher has stored with this status is no status: a direct get adds its sequence.
        if (
            reply[1].startswith(b"NATS/1.0 503")
            and len(reply[1]) == reply[2]
            and b"\r\nNats-Sequence: " not in reply[1]
        ):
            raise nats.errors.NoRespondersError
        return reply

    async def reply(self, answer: asyncio.Future[_T | None], until: float, subject: str) -> _T | None:
        """Return what a handler puts into `answer`, or None at the time `until`; raise it if it is an error.

        Raises NotPermittedError as soon as the server refuses a message to `subject`.
        """
        timer = asyncio.get_running_loop().call_at(until, complete, answer, None)
        self._asked[answer] = subject
        try:
            result = await answer
        finally:
            timer.cancel()
            del self._asked[answer]
        if isinstance(result, Exception):
            raise result
        return result

    # -- writing ------------------------------------------------------------------------------------------------------

    def write_nowait(self, data: bytes, messages: int, payload_bytes: int) -> None:
        """Append encoded commands to nats-py's buffer, or raise as `check_usable` does and write nothing."""
        self.check_usable()
        self._append(data)

    def write_if_usable(self, command: bytes) -> None:
        """Write a command that the connection may lose; while nats-py drains its subscriptions, it still publishes."""
        if command and (self.usable or (self.nc.is_draining and not self.nc.is_draining_pubs)):
            self._append(command)

    @abstractmethod
    def _append(self, data: bytes) -> None:
        """Append encoded commands to nats-py's buffer."""

    async def write(self, data: bytes, messages: int, payload_bytes: int, *, timeout: float) -> None:
        """Call `write_nowait`, then wait for up to `timeout` seconds while the buffer is over nats-py's own limit."""
        self.write_nowait(data, messages, payload_bytes)
        if not self.has_room:
            await self.wait_room(timeout)

    def push(self) -> bool:
        """Write nats-py's buffer to the socket now, if no wait for the socket can follow; return whether it was written."""
        return False

    @property
    def ready(self) -> bool:
        """Whether the connection is `usable` and `has_room`."""
        return self.usable and self.has_room

    @property
    @abstractmethod
    def has_room(self) -> bool:
        """Whether nats-py's write buffer is within its own limit; callers that write much wait until it is."""

    async def wait_room(self, timeout: float, *, over: Callable[[], bool] = never) -> None:
        """Wait for `has_room` for up to `timeout` seconds, or until `over` returns True; raise as `wait_usable` does."""
        late = f"no room in the write buffer of the connection for {timeout:.4g} s"
        await self._wait(lambda: self.has_room or over(), timeout, late, _ROOM_POLL)

    # -- bounded waits ------------------------------------------------------------------------------------------------

    async def bounded(self, operation: Awaitable[_T], timeout: float, what: str, *, subject: str = "") -> _T:
        """Await an operation of nats-py, or an event, until `timeout` seconds have passed or the connection has ended.

        nats-py's own waits have no bound, and some swallow a cancellation, so the operation runs in its own task. An error
        of the socket, or a full buffer while nats-py reconnects, is a ConnectionReconnectingError; RequestTimeoutError names
        `what` was awaited. Raises NotPermittedError as soon as the server refuses a message to `subject`.
        """
        refused = self.refusals(subject)
        task = asyncio.ensure_future(operation)
        task.add_done_callback(mark_retrieved)
        deadline = asyncio.get_running_loop().time() + timeout
        try:
            while True:
                remaining = deadline - asyncio.get_running_loop().time()
                done, _ = await asyncio.wait({task}, timeout=max(0.0, min(remaining, _WAIT_POLL)))
                if done:
                    return task.result()
                if refused():
                    raise NotPermittedError(subject)
                if (end := self.end) is not None:
                    raise end
                if remaining <= 0:
                    raise RequestTimeoutError(f"timed out after {timeout:.4g} s while waiting for {what}")
        except nats.errors.TimeoutError:  # it is an OSError, too
            raise
        except (OSError, nats.errors.OutboundBufferLimitError) as error:
            raise nats.errors.ConnectionReconnectingError from error
        finally:
            cancel_soon(task)

    async def wait_usable(self, timeout: float) -> None:
        """Wait until the connection is usable; raise RequestTimeoutError, or `end` if it will not be any more."""
        late = f"the connection was lost and did not come back within {timeout:.4g} s"
        await self._wait(lambda: self.usable, timeout, late, _USABLE_POLL)

    async def _wait(self, goal: Callable[[], bool], timeout: float, late: str, pause: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            if (end := self.end) is not None:  # it makes room, too
                raise end
            if goal():
                return
            remaining = deadline - loop.time()
            if remaining <= 0:
                raise RequestTimeoutError(late)
            await asyncio.sleep(min(pause, remaining))

    # -- what the server has refused ----------------------------------------------------------------------------------

    def refusals(self, subject: str) -> Callable[[], bool]:
        """Return a function that returns whether the server has refused a message to `subject` since this call."""

        def newest() -> int:
            self._look()
            return self._refused.get(self._refused_as(subject), 0)

        before = newest()
        return lambda: newest() > before

    def why_silent(self, subjects: Iterable[str]) -> str:
        """Return the permission whose lack may be why a message to one of `subjects` has no answer, for an error; or ""."""
        self._look()
        for subject in subjects:
            if self._refused_as(subject) in self._refused:
                return f"; {NotPermittedError(subject)}"
        if self._silent:
            return f"; the server has refused a subscription: the user had no permission to subscribe to {self._silent}, where answers come"
        return ""

    def explained(self, late: RequestTimeoutError, subjects: Iterable[str]) -> RequestTimeoutError:
        """Return the error about an answer that did not come to one of `subjects`, with what `why_silent` says."""
        why = "" if isinstance(late, NotPermittedError) else self.why_silent(subjects)
        return late if why in str(late) else RequestTimeoutError(f"{late}{why}")

    # -- the connection's state ---------------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether bytes written now can reach the server, and their answers this client."""
        return bool(self.nc.is_connected) and not self.nc.is_draining

    @property
    def end(self) -> nats.errors.Error | None:
        """nats-py's error of a connection on which no answer can come any more, now or later; None of any other."""
        if self.nc.is_closed:
            return nats.errors.ConnectionClosedError()
        # nats-py's drain() ends the subscriptions first; what they had received is delivered until then.
        return nats.errors.ConnectionDrainingError() if self.nc.is_draining_pubs else None

    def check_usable(self) -> None:
        """Raise nats-py's own error unless bytes written now can reach the server."""
        if self.usable:
            return
        self.check_open()
        raise nats.errors.ConnectionReconnectingError

    def check_open(self) -> None:
        """Raise nats-py's own error if the connection is closed or draining."""
        if self.nc.is_closed:
            raise nats.errors.ConnectionClosedError
        if self.nc.is_draining:
            raise nats.errors.ConnectionDrainingError

    @property
    def session(self) -> int:
        """A number that changes with every reconnect."""
        return int(self.nc.stats["reconnects"])

    @property
    def max_payload(self) -> int:
        """The server's limit for headers and payload together, in bytes; servers' default if its ``INFO`` has no valid one."""
        limit = self.nc.max_payload
        return limit if type(limit) is int and limit > 0 else 1 << 20

    @cached_property
    def inbox_size(self) -> int:
        return len(self.nc.new_inbox().encode())

    @property
    def server_version(self) -> str:
        return self._info_text("version")

    @property
    def api_level(self) -> int | None:
        """The connected server's JetStream API level (None: a server before 2.12)."""
        level = self._server_info().get("api_lvl")
        return level if type(level) is int else None

    @property
    def has_jetstream(self) -> bool:
        """Whether the connected server has JetStream; without it, the server may still reach one that has."""
        return self._server_info().get("jetstream") is True

    @property
    def domain(self) -> str | None:
        return self._info_text("domain") or None

    def _info_text(self, name: str) -> str:
        value = self._server_info().get(name)
        return value if isinstance(value, str) else ""


class FallbackConnection(BaseConnection):
    """The slower connection, for nats-py with other internals.

    Writing and `drop` go on in background tasks. A task ends when nats-py's buffer has taken its bytes, or when the
    connection is closed. nats-py keeps only the newest error, so of several refusals at once only the last is noticed.
    """

    def __init__(self, nc: Client, server_info: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__(nc, server_info)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._writing = asyncio.Lock()
        self._queued = 0  # bytes that nats-py has not taken yet
        self._session = 0
        self._newest_error: object = nc.last_error

    async def inbox(
        self, handler: InboxHandler, *, subject: str = "", tail: str = "", timeout: float, once: bool = False
    ) -> InboxSubscription:
        inbox = InboxSubscription(self, subject, tail, handler)

        async def subscribe() -> Subscription:
            subscription = await self.nc.subscribe(inbox.filter, cb=deliver)
            if once:
                await subscription.unsubscribe(limit=1)
            return subscription

        async def deliver(msg: Msg) -> None:
            if inbox.handler is not None:  # nats-py delivers what it has received until the subscription has ended
                block = h.rebuild(msg.headers)
                call_handler(inbox.handler.frames, [(msg.subject.encode(), block + msg.data, len(block))])

        subscribing = self._track(asyncio.ensure_future(subscribe()))

        def drop_late(_: object) -> None:
            if not subscribing.cancelled() and subscribing.exception() is None:
                self._unsubscribe(0, subscribing.result())

        try:
            subscription = await self.bounded(asyncio.shield(subscribing), timeout, "the subscription to an inbox")
        except BaseException:
            inbox.handler = None
            subscribing.add_done_callback(drop_late)
            subscribing.cancel()  # nats-py's flush takes that for success
            raise
        self._look()  # an earlier loss does not concern the new handler
        return self._opened(inbox, subscription)

    @property
    def usable(self) -> bool:
        self._look()  # before a caller decides what to send: the next look of `_check_inboxes` may be later
        return super().usable

    def _look(self) -> None:
        session, connected = self.nc.stats["reconnects"], self.nc.is_connected
        if (session != self._session or not connected) and not self._lost:
            self._tell(connected=False)
        if connected and self._lost:
            self._session = session
            self._tell(connected=True)
        if (error := self.nc.last_error) is not self._newest_error:
            self._newest_error = error
            self._note_refusal(str(error))

    def _unsubscribe(self, sid: int, subscription: Subscription) -> None:
        # The command is in nats-py's buffer at once.
        self._spawn(self.bounded(subscription.unsubscribe(), _WAIT_POLL, "the end of a subscription"))

    def _append(self, data: bytes) -> None:
        self._queued += len(data)
        publishing = self._spawn(self._publish(data))  # fails if the connection is lost, which the handlers are told

        def written(_: object) -> None:
            self._queued -= len(data)

        publishing.add_done_callback(written)

    @property
    def has_room(self) -> bool:
        return self._queued <= _MAX_QUEUED

    async def _publish(self, data: bytes) -> None:
        async with self._writing:  # keeps the order of the calls
            for command in frames.parse_pubs(data):
                headers = own_headers(h.parse_lines(command.header)) if command.header else None
                await self.nc.publish(command.subject, command.payload, reply=command.reply, headers=headers)

    def _spawn(self, coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        # Until the connection is closed: nats-py's flush then waits for a task that has ended.
        return self._track(asyncio.ensure_future(self.bounded(coroutine, math.inf, "nats-py")))

    def _track(self, task: asyncio.Task[_T]) -> asyncio.Task[_T]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(mark_retrieved)
        return task


def mark_retrieved(task: asyncio.Future[Any]) -> None:
    """Mark a task's exception as retrieved: asyncio logs it otherwise, although the caller has raised another error."""
    if not task.cancelled():
        task.exception()


def cancel_soon(task: asyncio.Future[Any], times: int = _CANCELLATIONS) -> None:
    """Cancel a task, again in each of the next rounds of the loop until it ends: nats-py's flush swallows cancellations."""
    if not task.done():
        task.cancel()
        if times > 1:
            asyncio.get_running_loop().call_soon(cancel_soon, task, times - 1)


async def cancel(task: asyncio.Task[Any], timeout: float) -> None:
    """Cancel a task until it ends, for up to `timeout` seconds; its error is ignored.

    Before Python 3.12, a call of nats-py swallows a cancellation that arrives with its answer.
    """
    task.add_done_callback(mark_retrieved)
    deadline = asyncio.get_running_loop().time() + timeout
    while not task.done() and (remaining := deadline - asyncio.get_running_loop().time()) > 0:
        task.cancel()
        await asyncio.wait({task}, timeout=min(remaining, _CANCEL_AGAIN))
