"""What rings once for the next message of a stream: a subscription, or an ephemeral consumer that is asked for one message."""

from __future__ import annotations

from typing import Any, Final, Protocol

import orjson
from nats.js.errors import NotFoundError
from nats.nuid import NUID

from jetstream_ext.client.api import Api
from jetstream_ext.client.base_connection import InboxHandler, InboxSubscription, NotPermittedError
from jetstream_ext.client.connection import Context
from jetstream_ext.protocol import frames
from jetstream_ext.protocol.frames import Frame

ARM_TIMEOUT: Final = 0.3
"""Seconds in which a bell must be armed."""
_INACTIVE: Final = 5.0  # after how long a server deletes the consumer of a client that was killed
_EXPIRES: Final = 30.0  # of one request to the consumer


class Owner(Protocol):
    """A `Doorbell`."""

    context: Context
    stream: str
    subject: str | None

    def ring(self) -> None: ...

    def lose(self, bell: Subscription, why: Exception | None = None) -> None: ...


class Subscription:
    """Subscriptions to subjects, each for one message."""

    kind: str = "subscription"

    def __init__(self, doorbell: Owner, depends: tuple[str, ...]) -> None:
        self.depends: tuple[str, ...] = depends
        """What it rings for: the subjects."""
        self.lasts: bool = False
        """Whether it can be armed again."""
        self._doorbell = doorbell
        self._inboxes: list[InboxSubscription] = []

    async def arm(self, position: int) -> None:
        """Ring once for the next message from a position on."""
        for subject in self.depends:
            await self._subscribe(subject)

    async def _subscribe(self, subject: str = "") -> None:
        doorbell = self._doorbell

        def lost() -> None:
            doorbell.lose(self)

        def refused(error: Exception) -> None:
            doorbell.lose(self, error)

        handler = InboxHandler(self._heard, lost, lost, refused)
        inbox = await doorbell.context.connection.inbox(
            handler, subject=subject, timeout=ARM_TIMEOUT, once=bool(subject)
        )
        self._inboxes.append(inbox)

    def _heard(self, received: list[Frame]) -> None:
        self.close()
        self._doorbell.ring()

    def close(self) -> None:
        """Leave nothing, here or on the server."""
        inboxes, self._inboxes = self._inboxes, []
        for inbox in inboxes:
            inbox.close()


class Consumer(Subscription):
    """An ephemeral consumer that is asked for one message.

    Another server than the leader may have it: it `depends` on the leader, so that it goes to another one with the leader.
    Servers before 2.14 cannot set it to another position, and then it does not last.
    """

    kind = "consumer"

    def __init__(self, doorbell: Owner, depends: tuple[str, ...], *, lasts: bool) -> None:
        super().__init__(doorbell, depends)
        self.lasts = lasts
        self._name = ""  # of the consumer, if it may exist

    async def arm(self, position: int) -> None:
        if not (self._name and await self._reset(position)):
            self.close()
            await self._create(position)
        self._ask()

    async def _reset(self, position: int) -> bool:
        """Let the consumer go on at a position (ADR-60); return False if it is gone."""
        doorbell = self._doorbell
        try:
            subject = f"CONSUMER.RESET.{doorbell.stream}.{self._name}"
            await Api(doorbell.context, ARM_TIMEOUT).ask(subject, {"seq": position})
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
            await Api(doorbell.context, ARM_TIMEOUT).ask(subject, {"stream_name": doorbell.stream, "config": config})
        except NotPermittedError:
            self._name = ""  # nor need it be deleted
            raise

    def _ask(self) -> None:
        doorbell = self._doorbell
        for inbox in self._inboxes:  # none if it was lost meanwhile
            to = f"{doorbell.context.prefix}.CONSUMER.MSG.NEXT.{doorbell.stream}.{self._name}"
            request = orjson.dumps({"batch": 1, "expires": int(_EXPIRES * 1e9)})
            doorbell.context.connection.write_if_usable(frames.pub(to.encode(), inbox.subject.encode(), b"", request))

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
        doorbell, name, self._name = self._doorbell, self._name, ""
        if name:
            subject = f"{doorbell.context.prefix}.CONSUMER.DELETE.{doorbell.stream}.{name}"
            doorbell.context.connection.write_if_usable(frames.pub(subject.encode(), b"", b"", b""))
