"""Mirrors and sources: streams that copy other streams, with or without a durable consumer (ADR-60)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from . import headers, ids, subjects, times
from .consumer import Consumer
from .consumer_config import check_consumer
from .errors import api_error
from .store import StoredMessage

if TYPE_CHECKING:
    from .connections import Message, Subscription
    from .stream import Stream
    from .timers import Timer

__all__ = ["Puller", "start_pullers"]

_RETRY = 10 * times.SECOND


class Puller:
    """Copies one stream into another.

    From a stream that keeps its messages by limits alone, they are taken straight out of its store. From
    another one, or if the configuration names a consumer, they come by way of a consumer, whose flow control
    requests are answered with what is stored here.
    """

    def __init__(self, target: Stream, source: dict[str, Any], *, mirror: bool) -> None:
        self._target = target
        self._source = source
        self._mirror = mirror
        self._next = 0
        self._delivery = 0
        self._heard: int | None = None
        self._error: dict[str, object] | None = None
        self._own: Consumer | None = None
        self._listening: list[Subscription] = []
        self._retry: Timer | None = None
        self.connect()

    @property
    def origin_name(self) -> str:
        """The stream that is copied."""
        return str(self._source["name"])

    def close(self) -> None:
        """Stop."""
        self._stop_listening()
        if self._own is not None and self._own.stream.consumers.get(self._own.name) is self._own:
            self._own.delete()
        self._own = None

    def connect(self) -> None:
        """Copy what the origin has, if it is there, and what comes."""
        origin = self._target.jetstream.streams.get(self.origin_name)
        if "external" in self._source:
            return
        wanted = self._source.get("consumer")
        if wanted is not None and not wanted.get("server_managed"):
            self._reset(origin, wanted["name"], wanted["deliver_subject"])
        elif origin is None:
            return
        elif wanted is not None or (origin.config["retention"] != "limits" and self._target.profile.durable_sourcing):
            self._create_consumer(origin, wanted)
        else:
            self._heard = self._target.now
            self._next = max(self._next, self._first(origin))
            while (message := origin.store.next_for(self._pattern, self._next)) is not None:
                self._take(message)

    def origin_gone(self, origin: Stream) -> None:
        """Wait for the origin to come back."""
        if origin.name == self.origin_name:
            self._stop_listening()
            self._own = None

    def origin_stored(self, origin: Stream, message: StoredMessage) -> None:
        """Take a new message of a stream, if it is the one that is copied, and in no other way."""
        if origin.name != self.origin_name or self._listening or self._source.get("consumer"):
            return
        if message.seq >= self._next and subjects.matches(self._pattern, message.subject):
            self._take(message)
            if origin.config["retention"] != "limits":
                origin.acknowledged(message.seq)

    def info_json(self) -> dict[str, Any]:
        """Return the row of an info reply."""
        active = -1 if self._heard is None else self._target.now - self._heard
        row: dict[str, Any] = {"name": self.origin_name, "lag": 0, "active": active}
        if self._error is not None:
            row["error"] = self._error
        # Before 2.12 a mirror learns its own filter with the first answer of its origin.
        known = not self._mirror or self._heard is not None or self._target.profile.strict_json
        if known and self._source.get("filter_subject"):
            row["filter_subject"] = self._source["filter_subject"]
        return row

    @property
    def _pattern(self) -> str:
        return str(self._source.get("filter_subject") or ">")

    def _first(self, origin: Stream) -> int:
        if self._source.get("opt_start_seq"):
            return int(self._source["opt_start_seq"])
        if self._source.get("opt_start_time") is not None:
            return origin.store.seq_from_time(self._source["opt_start_time"])
        return 1

    def _take(self, message: StoredMessage) -> None:
        target = self._target
        self._heard = target.now
        self._next = message.seq + 1
        if self._mirror:
            target.store_sourced(message.subject, message.header, message.payload, seq=message.seq, time=message.time)
            return
        header = headers.remove(message.header, "Nats-Stream-Source")
        for name in headers.names(header):
            if name.startswith(("Nats-Expected-", "Nats-Batch-")):
                header = headers.remove(header, name)
        wanted = self._source.get("consumer")
        name = f"{self.origin_name}:{wanted['name']}" if wanted else self.origin_name
        parts = [name, str(message.seq), self._pattern, ">"]
        if target.profile.strict_json:
            parts.append(message.subject)
        if target.profile.stream_identity:
            origin = target.jetstream.streams.get(self.origin_name)
            parts.append(origin.identity if origin is not None else "")
        header = headers.add(header, ("Nats-Stream-Source", " ".join(parts)))
        target.store_sourced(message.subject, header, message.payload)

    # By way of a consumer.

    def _create_consumer(self, origin: Stream, wanted: dict[str, Any] | None) -> None:
        prefix = "JS_MIRROR_" if self._mirror else "JS_SRC_"
        random = self._target.random
        name = wanted["name"] if wanted and wanted.get("name") else prefix + ids.short(random)
        deliver = f"$JSC.M.{ids.short(random)}" if self._mirror else f"$JSC.S.{ids.short(random)}"
        given: dict[str, Any] = {"durable_name": name, "name": name, "ack_policy": "flow_control", "sourcing": True}
        given |= {"deliver_subject": deliver, "filter_subject": self._source.get("filter_subject", "")}
        if self._source.get("opt_start_seq"):
            given |= {"deliver_policy": "by_start_sequence", "opt_start_seq": self._source["opt_start_seq"]}
        kind = "mirror" if self._mirror else "src"
        given["metadata"] = {f"_nats.{kind}.stream": self._target.name, f"_nats.{kind}.acc": "$G"}
        self._listen(deliver)
        config = check_consumer(given, origin.config, origin.profile, pedantic=False)
        consumer = origin.consumers[name] = self._own = Consumer(origin, name, config)
        self._heard = self._target.now
        consumer.pump()

    def _reset(self, origin: Stream | None, name: str, deliver: str) -> None:
        """Ask the consumer to start again at its floor; without an answer, ask again later."""
        self._stop_listening()
        target = self._target
        self._retry = target.at(target.now + _RETRY, self.connect)
        reply = f"$JSC.R.{ids.short(target.random)}"

        def answered(message: Message) -> None:
            target.jetstream.ignore(subscription)
            if self._retry is not None:
                self._retry.cancel()
            answer = json.loads(message.payload)
            if answer.get("config", {}).get("ack_policy") != "flow_control":
                self._error = api_error(10214 if self._mirror else 10217).as_json()
                return
            self._error = None
            self._heard = target.now
            self._listen(deliver)
            consumer = origin.consumers.get(name) if origin is not None else None
            if consumer is not None:
                consumer.interest_changed()

        subscription = target.jetstream.respond_to(reply, answered)
        target.send(f"$JS.API.CONSUMER.RESET.{self.origin_name}.{name}", reply=reply)

    def _listen(self, deliver: str) -> None:
        self._delivery = 0
        self._listening.append(self._target.jetstream.respond_to(deliver, self._delivered))

    def _stop_listening(self) -> None:
        for subscription in self._listening:
            self._target.jetstream.ignore(subscription)
        self._listening = []
        if self._retry is not None:
            self._retry.cancel()

    def _delivered(self, message: Message) -> None:
        self._heard = self._target.now
        if message.header.startswith(b"NATS/1.0 100"):
            self._confirm(message)
            return
        _, _, _, _, _, seq, delivery, time, _ = message.reply.split(".")
        self._delivery = int(delivery)
        if int(seq) >= self._next:
            self._take(StoredMessage(int(seq), message.shown, message.header, message.payload, int(time)))

    def _confirm(self, message: Message) -> None:
        """Answer a flow control request, or a heartbeat that says that one is open."""
        reply = message.reply or headers.get(message.header, "Nats-Consumer-Stalled")
        if reply:
            lines = [("Nats-Last-Consumer", str(self._delivery)), ("Nats-Last-Stream", str(max(self._next - 1, 0)))]
            self._target.send(reply, header=headers.block(lines))


def start_pullers(stream: Stream) -> None:
    """Copy what a stream mirrors and sources."""
    config = stream.config
    stream.pullers = []
    if config["mirror"]:
        stream.pullers.append(Puller(stream, config["mirror"], mirror=True))
    for source in config["sources"]:
        stream.pullers.append(Puller(stream, source, mirror=False))
