"""The consumers of a stream: create, update and find them, and inform them of changes of the stream."""

from typing import Any

from ..streams.store import StoredMessage
from ..streams.stream import Stream
from ..wire.errors import api_error
from .config import ConsumerConfig, check_consumer, check_consumer_update, set_inactive_threshold
from .consumer import Consumer

__all__ = ["Consumers"]


class Consumers:
    """The consumers of one stream, by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, Consumer] = {}

    def __len__(self) -> int:
        return len(self.by_name)

    def create(self, stream: Stream, request: dict[str, Any], action: str, *, pedantic: bool) -> Consumer:
        """Create or update a consumer as a request asks.

        Raises:
            ApiError: The server refuses the request.
        """
        config = check_consumer(request, stream.config, stream.profile, pedantic=pedantic)
        name = config["durable_name"] or config["name"]
        existing = self.by_name.get(name) if name else None
        if existing is not None:
            set_inactive_threshold(config)
            if action == "create" and config != existing.config:
                raise api_error(10148)
            target = existing.config["deliver_subject"]
            bound = bool(target) and stream.context.router.has_interest(target)
            check_consumer_update(existing.config, config, bound=bound)
            config["pause_until"] = existing.config["pause_until"]
            existing.update(config)
            return existing
        if action == "update":
            raise api_error(10149)
        if 0 < stream.config["max_consumers"] <= len(self):
            raise api_error(10026)
        if stream.config["retention"] == "workqueue":
            self._check_work_queue(config)
        if not name:
            name = config["name"] = stream.context.make_name()
        set_inactive_threshold(config)
        return self.add(stream, name, config)

    def add(self, stream: Stream, name: str, config: ConsumerConfig) -> Consumer:
        """Start a consumer with a checked configuration."""
        consumer = Consumer(stream, name, config, lambda: self.by_name.pop(name, None))
        self.by_name[name] = consumer
        return consumer

    def close(self) -> None:
        """Stop all consumers."""
        for consumer in self._all():
            consumer.close()

    def want(self, subject: str) -> bool:
        """Whether the filter of a consumer matches a subject."""
        return any(consumer.cursor.wants(subject) for consumer in self._all())

    def need(self, message: StoredMessage) -> bool:
        """Whether a consumer still has to process a message."""
        return any(consumer.needs(message) for consumer in self._all())

    def message_stored(self, message: StoredMessage) -> None:
        """Handle a new message."""
        for consumer in self._all():
            consumer.message_stored(message)

    def messages_removed(self, messages: list[StoredMessage]) -> None:
        """Handle the removal of messages."""
        for consumer in self._all():
            for message in messages:
                consumer.message_removed(message)

    def stream_purged(self, pattern: str) -> None:
        """Handle a purge of the messages that match a pattern; an empty one matches all."""
        for consumer in self._all():
            consumer.stream_purged(pattern)

    def interest_changed(self) -> None:
        """Handle that clients have subscribed or unsubscribed."""
        for consumer in self._all():
            consumer.interest_changed()

    def _all(self) -> list[Consumer]:
        return list(self.by_name.values())  # a copy: a consumer may be deleted meanwhile

    def _check_work_queue(self, config: ConsumerConfig) -> None:
        if config["ack_policy"] not in ("explicit", "flow_control"):
            raise api_error(10098)
        if config["deliver_policy"] != "all":
            raise api_error(10101)
        if not self.by_name:
            return
        filters = [config["filter_subject"]] if config["filter_subject"] else config["filter_subjects"]
        if not filters:
            raise api_error(10099)
        if any(consumer.cursor.overlaps(filters) for consumer in self._all()):
            raise api_error(10100)
