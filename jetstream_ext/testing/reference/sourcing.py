"""Mirrors and sources: streams that copy other streams, directly or through a durable consumer (ADR-60)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from .consumers.config import check_consumer
from .consumers.consumer import Consumer, Consumers
from .context import Timer
from .router import Message, Subscription
from .streams.store import StoredMessage
from .streams.stream import Stream
from .wire import golang, subjects
from .wire.errors import api_error
from .wire.protocol import add_headers, get_header, header_names, remove_header

_RETRY = 10 * golang.SECOND


class Origin(Protocol):
    stream: Stream
    consumers: Consumers


FindOrigin = Callable[[str], Origin | None]


class Puller:
    """Copy one stream into another.

    The messages of a stream with limits retention are read directly from its store. Those of another stream, or if the
    configuration names a consumer, come through a consumer; its flow control requests are answered with what is stored
    here.
    """

    def __init__(self, target: Stream, source: dict[str, Any], find_origin: FindOrigin, *, mirror: bool) -> None:
        self._target = target
        self._context = target.context
        self._source = source
        self._find_origin = find_origin
        self._mirror = mirror
        self._next = 0
        self._delivery = 0
        self._last_active: int | None = None
        self._error: dict[str, object] | None = None
        self._consumer: Consumer | None = None
        """The consumer that this puller has created."""
        self._subscriptions: list[Subscription] = []
        self._retry = Timer(self._context, self.connect)
        self.connect()

    @property
    def origin_name(self) -> str:
        return str(self._source["name"])

    def close(self) -> None:
        """Stop, and delete the consumer that this puller has created."""
        self._unsubscribe()
        own, origin = self._consumer, self._find_origin(self.origin_name)
        if own is not None and origin is not None and origin.consumers.by_name.get(own.name) is own:
            own.delete()
        self._consumer = None

    def connect(self) -> None:
        """Copy the messages that the origin has, and follow it."""
        origin = self._find_origin(self.origin_name)
        wanted = self._source.get("consumer")
        if wanted is not None and not wanted.get("server_managed"):
            self._use_consumer(origin, wanted["name"], wanted["deliver_subject"])
        elif origin is None:
            return
        elif wanted is not None or origin.stream.config["retention"] != "limits":
            self._create_consumer(origin, wanted)
        else:
            store = origin.stream.store
            self._last_active = self._context.now
            self._next = max(self._next, self._first_seq(origin.stream))
            while (message := store.next_for(self._pattern, self._next)) is not None:
                self._copy(message)

    def origin_deleted(self, name: str) -> None:
        """Handle the deletion of a stream; if it is the origin, wait for its return."""
        if name == self.origin_name:
            self._unsubscribe()
            self._consumer = None

    def origin_stored(self, origin: Stream, message: StoredMessage) -> None:
        """Copy a new message of a stream, if it is the origin and this puller reads directly from its store."""
        if origin.name != self.origin_name or self._subscriptions or self._source.get("consumer"):
            return
        if message.seq >= self._next and subjects.matches(self._pattern, message.subject):
            self._copy(message)

    def info_json(self) -> dict[str, Any]:
        active = -1 if self._last_active is None else self._context.now - self._last_active
        row: dict[str, Any] = {"name": self.origin_name, "lag": 0, "active": active}
        if self._error is not None:
            row["error"] = self._error
        if self._source.get("filter_subject"):
            row["filter_subject"] = self._source["filter_subject"]
        return row

    @property
    def _pattern(self) -> str:
        return str(self._source.get("filter_subject") or ">")

    def _first_seq(self, origin: Stream) -> int:
        if self._source.get("opt_start_seq"):
            return int(self._source["opt_start_seq"])
        if self._source.get("opt_start_time") is not None:
            return origin.store.seq_from_time(self._source["opt_start_time"])
        return 1

    def _copy(self, message: StoredMessage) -> None:
        target, profile = self._target, self._target.profile
        self._last_active = self._context.now
        self._next = message.seq + 1
        if self._mirror:
            target.append_copy(message.subject, message.header, message.payload, seq=message.seq, time=message.time)
            return
        header = remove_header(message.header, "Nats-Stream-Source")
        for name in header_names(header):
            if name.startswith(("Nats-Expected-", "Nats-Batch-")):
                header = remove_header(header, name)
        wanted = self._source.get("consumer")
        name = f"{self.origin_name}:{wanted['name']}" if wanted else self.origin_name
        parts = [name, str(message.seq), self._pattern, ">", message.subject]
        if profile.source_header_has_identity:
            origin = self._find_origin(self.origin_name)
            parts.append(origin.stream.identity if origin is not None else "")
        header = add_headers(header, ("Nats-Stream-Source", " ".join(parts)))
        target.append_copy(message.subject, header, message.payload)

    # Copying through a consumer.

    def _create_consumer(self, origin: Origin, wanted: dict[str, Any] | None) -> None:
        prefix, letter, kind = ("JS_MIRROR_", "M", "mirror") if self._mirror else ("JS_SRC_", "S", "src")
        name = wanted["name"] if wanted and wanted.get("name") else prefix + self._context.make_name()
        deliver = f"$JSC.{letter}.{self._context.make_name()}"
        request: dict[str, Any] = {
            "durable_name": name,
            "name": name,
            "ack_policy": "flow_control",
            "sourcing": True,
            "deliver_subject": deliver,
            "filter_subject": self._source.get("filter_subject", ""),
            "metadata": {f"_nats.{kind}.stream": self._target.name, f"_nats.{kind}.acc": "$G"},
        }
        if self._source.get("opt_start_seq"):
            request |= {"deliver_policy": "by_start_sequence", "opt_start_seq": self._source["opt_start_seq"]}
        self._subscribe(deliver)
        config = check_consumer(request, origin.stream.config)
        self._consumer = origin.consumers.add(origin.stream, name, config)
        self._last_active = self._context.now
        self._consumer.pump()

    def _use_consumer(self, origin: Origin | None, name: str, deliver: str) -> None:
        """Restart a consumer at its floor, and copy what it delivers; if there is none, try again later."""
        self._unsubscribe()
        consumer = origin.consumers.by_name.get(name) if origin is not None else None
        if consumer is None:
            self._retry.set_in(_RETRY)
        elif consumer.config["ack_policy"] != "flow_control":
            self._error = api_error(10214 if self._mirror else 10217).as_json()
        else:
            self._error, self._last_active = None, self._context.now
            consumer.reset(0)
            self._subscribe(deliver)
            consumer.interest_changed()

    def _subscribe(self, deliver: str) -> None:
        self._delivery = 0
        self._subscriptions.append(self._context.router.respond_to(deliver, self._on_delivery))

    def _unsubscribe(self) -> None:
        self._context.router.unsubscribe(*self._subscriptions)
        self._subscriptions = []
        self._retry.cancel()

    def _on_delivery(self, message: Message) -> None:
        self._last_active = self._context.now
        if message.header.startswith(b"NATS/1.0 100"):
            self._confirm(message)
            return
        _, _, _, _, _, seq, delivery, time, _ = message.reply.split(".")
        self._delivery = int(delivery)
        if int(seq) >= self._next:
            self._copy(StoredMessage(int(seq), message.shown, message.header, message.payload, int(time)))

    def _confirm(self, message: Message) -> None:
        """Answer a flow control request, or a heartbeat that mentions an open one."""
        reply = message.reply or get_header(message.header, "Nats-Consumer-Stalled")
        if reply:
            lines = [("Nats-Last-Consumer", str(self._delivery)), ("Nats-Last-Stream", str(max(self._next - 1, 0)))]
            self._context.send(reply, header=add_headers(b"", *lines))
