"""Who gets a message: client subscriptions, queue groups, and the server's own responders."""

from collections import deque
from collections.abc import Callable
from random import Random

from . import headers
from .connections import Connection, Handler, Message, Subscription
from .subjects import Sublist
from .versions import Profile
from .wire import Close, Deliver, Line, Output

__all__ = ["Router"]


class Router:
    """Delivers messages, one after the other, in the order they were published.

    What a delivery causes (an acknowledgement, a reply) is queued behind it, so handlers never nest.
    """

    def __init__(self, profile: Profile, random: Random) -> None:
        self._profile = profile
        self._random = random
        self._table: Sublist[Subscription] = Sublist()
        self._queue: deque[Message] = deque()
        self._running = False
        self.outputs: list[Output] = []
        self.connections: dict[int, Connection] = {}
        self.intercept: Callable[[Message], list[Message]] | None = None
        """Sees every message that the server itself sends, and returns what to send instead."""

    def subscribe(self, subscription: Subscription) -> None:
        """Add interest."""
        subscription.key = self._table.insert(subscription.subject, subscription)

    def unsubscribe(self, subscription: Subscription) -> None:
        """Remove interest."""
        self._table.remove(subscription.subject, subscription.key)

    def respond_to(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Let a part of the server handle a subject; `unsubscribe` ends it."""
        subscription = Subscription(subject, queue, handler=handler)
        self.subscribe(subscription)
        return subscription

    def has_interest(self, subject: str) -> bool:
        """Whether anybody would get a message on this subject."""
        return bool(self._table.match(subject))

    def has_listener(self, subject: str, queue: str = "") -> bool:
        """Whether somebody subscribes to this very subject, not to a pattern for it, and in this queue group."""
        return any(each.subject == subject and each.queue == queue for each in self._table.match(subject))

    def line(self, connection: int, text: str) -> None:
        """Send a control line."""
        self.outputs.append(Line(connection, text))

    def close(self, connection: int) -> None:
        """End a connection, after what is already on its way."""
        self.outputs.append(Close(connection))

    def send(
        self, subject: str, payload: bytes = b"", *, header: bytes = b"", reply: str = "", shown: str = ""
    ) -> None:
        """Publish as the server; clients see the subject `shown`, if one is given."""
        message = Message(subject, payload, reply, header, shown=shown)
        for each in [message] if self.intercept is None else self.intercept(message):
            self.publish(each)

    def publish(self, message: Message) -> None:
        """Deliver a message and everything that follows from it."""
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

    def _deliver(self, message: Message) -> None:
        reached = 0
        groups: dict[str, list[Subscription]] = {}
        for subscription in list(self._table.match(message.subject)):
            if not self._wants(subscription, message):
                continue
            if subscription.queue:
                groups.setdefault(subscription.queue, []).append(subscription)
            else:
                reached += self._hand_over(subscription, message)
        for members in groups.values():
            chosen = members[0] if len(members) == 1 else self._random.choice(members)
            reached += self._hand_over(chosen, message)
        if not reached and message.reply and message.origin is not None:
            self.no_responders(message)

    def _wants(self, subscription: Subscription, message: Message) -> bool:
        if subscription.connection is None:
            return True
        connection = self.connections[subscription.connection]
        if message.origin == connection.id and not connection.echo:
            return False
        return connection.permissions.may_receive(message.subject)

    def _hand_over(self, subscription: Subscription, message: Message) -> int:
        if subscription.handler is not None:
            return 0 if subscription.handler(message) is False else 1
        assert subscription.connection is not None
        connection = self.connections.get(subscription.connection)
        if connection is None:
            return 0
        header = message.header if connection.headers else b""
        self.outputs.append(
            Deliver(
                connection.id,
                subscription.sid,
                message.shown or message.subject,
                message.payload,
                message.reply,
                header,
            )
        )
        subscription.delivered += 1
        if subscription.limit and subscription.delivered >= subscription.limit:
            self.unsubscribe(subscription)
            connection.subscriptions.pop(subscription.sid, None)
        return 1

    def no_responders(self, message: Message) -> None:
        """Tell the publisher of a request that nobody is there to answer it."""
        connection = self.connections.get(message.origin if message.origin is not None else -1)
        if connection is None or not (connection.headers and connection.no_responders):
            return
        named = [("Nats-Subject", message.subject)] if self._profile.names_subject_in_503 else []
        answer = Message(message.reply, header=headers.status("503", *named))
        for subscription in list(self._table.match(message.reply)):
            if subscription.connection == connection.id:
                self._hand_over(subscription, answer)
