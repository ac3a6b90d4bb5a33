"""All streams of the server, and what they need from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .api import Api
from .sourcing import start_pullers
from .stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from .connections import Handler, Subscription
    from .engine import Engine
    from .limits import Limits
    from .store import StoredMessage
    from .stream_config import StreamConfig
    from .timers import Timer
    from .versions import Profile

__all__ = ["JetStream"]


class JetStream:
    """The streams of a server."""

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self._engine = engine
        self.limits = limits
        self.streams: dict[str, Stream] = {}
        self.api: Api = Api(self)

    @property
    def profile(self) -> Profile:
        """The release."""
        return self._engine.profile

    @property
    def now(self) -> int:
        """The instant."""
        return self._engine.now

    @property
    def random(self) -> Random:
        """The server's random numbers."""
        return self._engine.random

    @property
    def server_name(self) -> str:
        """The name of the server."""
        return self._engine.server_id

    def at(self, when: int, call: Callable[[], None]) -> Timer:
        """Arrange a call."""
        return self._engine.timers.at(when, call)

    def send(
        self, subject: str, payload: bytes = b"", *, header: bytes = b"", reply: str = "", shown: str = ""
    ) -> None:
        """Publish as the server; clients see the subject `shown`, if one is given."""
        self._engine.router.send(subject, payload, header=header, reply=reply, shown=shown)

    def respond_to(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Handle the messages on a subject."""
        return self._engine.router.respond_to(subject, handler, queue=queue)

    def ignore(self, subscription: Subscription) -> None:
        """Stop handling them."""
        self._engine.router.unsubscribe(subscription)

    def has_interest(self, subject: str) -> bool:
        """Whether anybody would get a message on a subject."""
        return self._engine.router.has_interest(subject)

    def has_listener(self, subject: str, queue: str = "") -> bool:
        """Whether somebody subscribes to this very subject, not to a pattern for it, and in this queue group."""
        return self._engine.router.has_listener(subject, queue)

    def find_config(self, name: str) -> StreamConfig | None:
        """Return the configuration of a stream, `None` if there is no such stream."""
        stream = self.streams.get(name)
        return None if stream is None else stream.config

    def add(self, config: StreamConfig) -> Stream:
        """Create a stream from a checked configuration."""
        stream = self.streams[config["name"]] = Stream(self, config)
        stream.open()
        start_pullers(stream)
        for other in list(self.streams.values()):
            for puller in other.pullers:
                if other is not stream and puller.origin_name == stream.name:
                    puller.connect()
        return stream

    def delete(self, stream: Stream) -> None:
        """Delete a stream with all that belongs to it."""
        for puller in stream.pullers:
            puller.close()
        for consumer in list(stream.consumers.values()):
            consumer.close()
        stream.atomic.forget_all()
        stream.fast.forget_all()
        stream.close()
        del self.streams[stream.name]
        for other in list(self.streams.values()):
            for puller in other.pullers:
                puller.origin_gone(stream)

    def message_stored(self, stream: Stream, message: StoredMessage) -> None:
        """Let the mirrors and sources of a stream have a message."""
        for other in list(self.streams.values()):
            for puller in other.pullers:
                puller.origin_stored(stream, message)

    def interest_changed(self) -> None:
        """Let the push consumers see who listens now."""
        for stream in list(self.streams.values()):
            for consumer in list(stream.consumers.values()):
                consumer.interest_changed()
