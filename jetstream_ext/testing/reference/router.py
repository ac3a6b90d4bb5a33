"""Core NATS: client connections, subscriptions, permissions, and the delivery of messages."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from .releases import Profile
from .wire import subjects
from .wire.protocol import Close, Deliver, Line, Output, status_header


@dataclass(frozen=True, slots=True)
class Message:
    """A message between publisher and subscribers.

    Attributes:
        origin: The connection that published it; `None` is the server itself.
        shown: The subject that clients see, if it differs from the one that routes the message:
            a consumer delivers to an inbox, and shows the subject of the stored message.
    """

    subject: str
    payload: bytes = b""
    reply: str = ""
    header: bytes = b""
    origin: int | None = None
    shown: str = ""


Handler = Callable[[Message], bool | None]
"""A part of the server that takes messages; it returns `False` for a message it leaves to others."""


@dataclass(eq=False, slots=True)
class Subscription:
    """The interest of a client in a subject, or of a part of the server, which has a `handler`."""

    subject: str
    queue: str = ""
    connection: int | None = None
    sid: str = ""
    handler: Handler | None = None
    limit: int = 0
    delivered: int = 0
    key: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """The subjects a user may publish and subscribe to; `None` allows everything that is not denied."""

    publish: Sequence[str] | None = None
    publish_deny: Sequence[str] = ()
    subscribe: Sequence[str] | None = None
    subscribe_deny: Sequence[str] = ()

    def may_publish(self, subject: str) -> bool:
        """Whether the user may publish to a subject."""
        allowed = self.publish is None or any(subjects.matches(pattern, subject) for pattern in self.publish)
        return allowed and not any(subjects.matches(pattern, subject) for pattern in self.publish_deny)

    def may_subscribe(self, subject: str) -> bool:
        """Whether the user may subscribe to a subject or pattern."""
        allowed = self.subscribe is None or any(_covers(pattern, subject) for pattern in self.subscribe)
        return allowed and not any(_covers(pattern, subject) for pattern in self.subscribe_deny)

    def may_receive(self, subject: str) -> bool:
        """Whether the user receives messages on a subject: a permitted pattern may match denied subjects."""
        return not any(subjects.matches(pattern, subject) for pattern in self.subscribe_deny)


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A user with a name, a password and permissions."""

    name: str
    password: str
    permissions: Permissions = field(default_factory=Permissions)


@dataclass(eq=False, slots=True)
class Connection:
    """The connection of one client, with the options of its CONNECT."""

    id: int
    authorized: bool = False
    permissions: Permissions = field(default_factory=Permissions)
    verbose: bool = False
    pedantic: bool = False
    echo: bool = True
    headers: bool = False
    no_responders: bool = False
    async_info: bool = False
    """Whether the client accepts an INFO after the first one."""
    ponged: bool = False
    """Whether the server has sent a PONG."""
    subscriptions: dict[str, Subscription] = field(default_factory=dict)


class Router:
    """Deliver messages one after the other, in the order they are published.

    A message published during a delivery, such as an acknowledgement, waits in a queue, so handlers never nest.
    """

    def __init__(self, profile: Profile, random: Random) -> None:
        self._profile = profile
        self._random = random
        self._subscriptions: subjects.Sublist[Subscription] = subjects.Sublist()
        self._queue: deque[Message] = deque()
        self._running = False
        self.outputs: list[Output] = []
        self.connections: dict[int, Connection] = {}
        self.intercept: Callable[[Message], list[Message]] | None = None
        """Replaces every message of the server itself by the messages it returns; the fault injector uses it."""

    def subscribe(self, subscription: Subscription) -> None:
        subscription.key = self._subscriptions.insert(subscription.subject, subscription)

    def unsubscribe(self, *subscriptions: Subscription) -> None:
        for subscription in subscriptions:
            self._subscriptions.remove(subscription.subject, subscription.key)

    def respond_to(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Call a handler of the server for messages on a subject, until `unsubscribe`."""
        subscription = Subscription(subject, queue, handler=handler)
        self.subscribe(subscription)
        return subscription

    def has_interest(self, subject: str) -> bool:
        return bool(self._subscriptions.match(subject))

    def has_exact_interest(self, subject: str, queue: str = "") -> bool:
        """Whether a subscription names this very subject, not a pattern for it, and this queue group."""
        return any(each.subject == subject and each.queue == queue for each in self._subscriptions.match(subject))

    def send_line(self, connection: int, text: str) -> None:
        self.outputs.append(Line(connection, text))

    def close(self, connection: int) -> None:
        """Close a connection after everything already sent to it."""
        self.outputs.append(Close(connection))

    def send(
        self, subject: str, payload: bytes = b"", *, header: bytes = b"", reply: str = "", shown: str = ""
    ) -> None:
        message = Message(subject, payload, reply, header, shown=shown)
        for each in [message] if self.intercept is None else self.intercept(message):
            self.publish(each)

    def publish(self, message: Message) -> None:
        """Deliver a message, and the messages that its handlers publish."""
        self._queue.append(message)
        if self._running:
            return
        self._running = True
        try:
            while self._queue:
                self._deliver(self._queue.popleft())
        finally:
            self._running = False
            self._queue.clear()

    def send_no_responders(self, message: Message) -> None:
        """Answer a request with 503, because no subscription matches it."""
        connection = self.connections.get(message.origin if message.origin is not None else -1)
        if connection is None or not (connection.headers and connection.no_responders):
            return
        named = [("Nats-Subject", message.subject)] if self._profile.names_subject_in_503 else []
        answer = Message(message.reply, header=status_header("503", *named))
        for subscription in list(self._subscriptions.match(message.reply)):
            if subscription.connection == connection.id:
                self._hand_over(subscription, answer)

    def _deliver(self, message: Message) -> None:
        reached = 0
        groups: dict[str, list[Subscription]] = {}
        for subscription in list(self._subscriptions.match(message.subject)):
            if not self._may_receive(subscription, message):
                continue
            if subscription.queue:
                groups.setdefault(subscription.queue, []).append(subscription)
            else:
                reached += self._hand_over(subscription, message)
        for members in groups.values():
            chosen = members[0] if len(members) == 1 else self._random.choice(members)
            reached += self._hand_over(chosen, message)
        if not reached and message.reply and message.origin is not None:
            self.send_no_responders(message)

    def _may_receive(self, subscription: Subscription, message: Message) -> bool:
        if subscription.connection is None:
            return True
        connection = self.connections[subscription.connection]
        if message.origin == connection.id and not connection.echo:
            return False
        return connection.permissions.may_receive(message.subject)

    def _hand_over(self, subscription: Subscription, message: Message) -> bool:
        if subscription.handler is not None:
            return subscription.handler(message) is not False
        assert subscription.connection is not None
        connection = self.connections.get(subscription.connection)
        if connection is None:
            return False
        header = message.header if connection.headers else b""
        subject = message.shown or message.subject
        self.outputs.append(Deliver(connection.id, subscription.sid, subject, message.payload, message.reply, header))
        subscription.delivered += 1
        if subscription.limit and subscription.delivered >= subscription.limit:
            self.unsubscribe(subscription)
            connection.subscriptions.pop(subscription.sid, None)
        return True


def _covers(pattern: str, subject: str) -> bool:
    # Here the wildcards of a subscription are ordinary tokens: a permission for `*` covers a subscription to `>`.
    left, right = pattern.split("."), subject.split(".")
    if left[-1] == ">":
        left, right = left[:-1], right[: len(left) - 1] if len(right) >= len(left) else []
    return len(left) == len(right) and all(one in ("*", other) for one, other in zip(left, right, strict=True))
