"""Client connections and their subscriptions: core NATS, without any JetStream."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from . import subjects

__all__ = ["Connection", "Message", "Permissions", "Subscription", "User"]


@dataclass(frozen=True, slots=True)
class Message:
    """A message on its way; `origin` is the connection that published it, `None` the server itself.

    A consumer's message goes to where the consumer delivers, and shows the subject that it was stored under.
    """

    subject: str
    payload: bytes = b""
    reply: str = ""
    header: bytes = b""
    origin: int | None = None
    shown: str = ""


Handler = Callable[[Message], bool | None]
"""A part of the server; `False` says that the message is not for it."""


@dataclass(eq=False, slots=True)
class Subscription:
    """Interest in a subject: of a client, or of a part of the server, which then has a `handler`."""

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
    """What a user may publish and subscribe to; `None` allows everything that is not denied."""

    publish: Sequence[str] | None = None
    publish_deny: Sequence[str] = ()
    subscribe: Sequence[str] | None = None
    subscribe_deny: Sequence[str] = ()

    def may_publish(self, subject: str) -> bool:
        """Whether a message may go to this subject."""
        allowed = self.publish is None or any(subjects.matches(pattern, subject) for pattern in self.publish)
        return allowed and not any(subjects.matches(pattern, subject) for pattern in self.publish_deny)

    def may_subscribe(self, subject: str) -> bool:
        """Whether a subscription to this subject is accepted."""
        allowed = self.subscribe is None or any(_covers(pattern, subject) for pattern in self.subscribe)
        return allowed and not any(_covers(pattern, subject) for pattern in self.subscribe_deny)

    def may_receive(self, subject: str) -> bool:
        """Whether a message on this subject is delivered: a wildcard subscription may cover denied ones."""
        return not any(subjects.matches(pattern, subject) for pattern in self.subscribe_deny)


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """Someone who may connect, by name and password."""

    name: str
    password: str
    permissions: Permissions = field(default_factory=Permissions)


@dataclass(eq=False, slots=True)
class Connection:
    """One client."""

    id: int
    authorized: bool = False
    permissions: Permissions = field(default_factory=Permissions)
    verbose: bool = False
    pedantic: bool = False
    echo: bool = True
    headers: bool = False
    no_responders: bool = False
    async_info: bool = False
    """It understands an INFO that comes later."""
    greeted: bool = False
    subscriptions: dict[str, Subscription] = field(default_factory=dict)


def _covers(pattern: str, subject: str) -> bool:
    # The wildcards of a subscription are tokens like any other here: a `*` that is allowed allows `>` too.
    left, right = pattern.split("."), subject.split(".")
    if left[-1] == ">":
        left, right = left[:-1], right[: len(left) - 1] if len(right) >= len(left) else []
    return len(left) == len(right) and all(one in ("*", other) for one, other in zip(left, right, strict=True))
