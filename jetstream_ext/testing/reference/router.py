"""Core NATS: client connections, subscriptions, and the delivery of messages."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

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


@dataclass(eq=False, slots=True)
class Connection:
    """The connection of one client, with the options of its CONNECT."""

    id: int
    echo: bool = True
    headers: bool = False
    no_responders: bool = False
    subscriptions: dict[str, Subscription] = field(default_factory=dict)


class Router:
    """Deliver messages one after the other, in the order they are published.

    A message published during a delivery, such as an acknowledgement, waits in a queue, so handlers never nest.
    """

    def __init__(self, random: Random) -> None:
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
            self._subscriptions.remove(subscription.key)

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
        answer = Message(message.reply, header=status_header("503", ("Nats-Subject", message.subject)))
        for subscription in list(self._subscriptions.match(message.reply)):
            if subscription.connection == connection.id:
                self._hand_over(subscription, answer)

    def _deliver(self, message: Message) -> None:
        reached = 0
        groups: dict[str, list[Subscription]] = {}
        for subscription in list(self._subscriptions.match(message.subject)):
            own = message.origin is not None and subscription.connection == message.origin
            if own and not self.connections[message.origin or 0].echo:
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
