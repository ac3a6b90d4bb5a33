"""Consumers: deliveries, acknowledgements and redeliveries of one, and all consumers of a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..context import Timer
from ..router import Message, Subscription
from ..streams.store import StoredMessage
from ..streams.stream import Stream
from ..wire import golang, subjects
from ..wire.errors import api_error, not_modelled
from ..wire.protocol import add_headers, parse_number
from .config import ConsumerConfig, check_consumer, consumer_json
from .delivery import Cursor, Pair, Pending, Pull, Push


class Consumer:
    """A consumer of one stream; `next_delivery` is the consumer sequence of the next delivery."""

    def __init__(self, stream: Stream, name: str, config: ConsumerConfig, forget: Callable[[], object]) -> None:
        self.stream: Stream = stream
        self.name: str = name
        self.config: ConsumerConfig = config
        self.created: int = stream.context.now
        self.next_delivery: int = 1
        self.pending: dict[int, Pending] = {}
        self.redeliver: list[int] = []
        self.cursor: Cursor = Cursor(stream, config)
        self._forget_me = forget
        self._redeliveries: dict[int, int] = {}
        self._floor = self._delivered = (0, self.cursor.next - 1)
        self._last_delivery: int | None = None
        self._last_ack: int | None = None
        self._pumping = False
        self._ack_timer = Timer(stream.context, self._expire)
        self._subscriptions = self._respond()
        self._target: Pull | Push = Push(self) if config["deliver_subject"] else Pull(self)

    def _respond(self) -> list[Subscription]:
        respond_to = self.stream.context.router.respond_to
        name = f"{self.stream.name}.{self.name}"
        found = [respond_to(f"$JS.API.CONSUMER.MSG.NEXT.{name}", self._on_next)]
        if self.config["ack_policy"] in ("explicit", "all"):
            found.append(respond_to(f"$JS.ACK.{name}.*.*.*.*.*", self._on_ack))
        return found

    # Life cycle.

    def close(self) -> None:
        self._target.close()
        self._ack_timer.cancel()
        self.stream.context.router.unsubscribe(*self._subscriptions)

    def delete(self) -> None:
        """Stop, and leave the stream."""
        self.close()
        self._forget_me()
        self.stream.drop_unneeded()

    def reset(self, seq: int) -> int:
        """Restart at a sequence, or after the acknowledgement floor if it is 0; return the first sequence to deliver.

        Raises:
            ValueError: The deliver policy does not allow this sequence; the text is the server's.
        """
        if seq:
            policy = self.config["deliver_policy"]
            if policy == "by_start_sequence" and seq < self.config["opt_start_seq"]:
                raise ValueError("below start seq")
            if policy == "by_start_time" and seq < self.stream.store.seq_from_time(self.config["opt_start_time"]):
                raise ValueError("below start time")
            if policy not in ("all", "by_start_sequence", "by_start_time"):
                raise ValueError("not allowed")
        seq = max(seq or self._floor[1] + 1, 1)
        self.pending.clear()
        self.redeliver.clear()
        self._redeliveries.clear()
        self.cursor.restart(seq)
        self.next_delivery = 1
        self._floor = self._delivered = (0, seq - 1)
        self._last_delivery = self._last_ack = None
        self._arm()
        self.stream.drop_unneeded()
        return seq

    # Choosing the next message.

    def needs(self, message: StoredMessage) -> bool:
        """Whether an interest or work queue stream must keep a message for this consumer."""
        seq = message.seq
        if not self.cursor.wants(message.subject):
            return False
        if seq in self._redeliveries:
            return True
        if seq <= self._floor[1]:
            return False
        return self.config["ack_policy"] != "explicit" or seq >= self.cursor.next or seq in self.pending

    def _next_message(self) -> tuple[StoredMessage, int] | None:
        """Take the next message, a redelivery first, and return it with its delivery count."""
        while self.redeliver:
            seq = self.redeliver.pop(0)
            count = self._redeliveries[seq] = self._redeliveries.get(seq, 0) + 1
            limit = self.config["max_deliver"]
            if 0 < limit <= count:
                self._give_up(seq, count)
                continue
            message = self.stream.store.get(seq)
            if message is not None:
                return message, count + 1
        if self.at_limit():
            return None
        message = self.cursor.take()
        return None if message is None else (message, 1)

    def at_limit(self) -> bool:
        """Whether `max_ack_pending` stops the delivery."""
        return bool(0 < self.config["max_ack_pending"] <= len(self.pending))

    # Delivering.

    def pump(self) -> None:
        """Deliver messages until the target or `max_ack_pending` stops it, or none is left."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._target.ready():
                found = self._next_message()
                if found is None or not self._deliver(*found):
                    break
        finally:
            self._pumping = False
        self._target.idle(end_of_stream=not self.at_limit())

    def _deliver(self, message: StoredMessage, count: int) -> bool:
        stream = self.stream
        left = self.cursor.num_pending()
        reply = f"$JS.ACK.{stream.name}.{self.name}.{count}.{message.seq}.{self.next_delivery}.{message.time}.{left}"
        header, payload = message.header, message.payload
        if self.config["headers_only"]:
            header, payload = add_headers(header, ("Nats-Msg-Size", str(len(payload)))), b""
        subject = self._target.take()
        if subject is None:
            if count == 1:
                self.cursor.put_back(message.seq)
            else:
                self._redeliveries[message.seq] -= 1
                self.redeliver.insert(0, message.seq)
            return False
        now = stream.context.now
        delivery, self.next_delivery = self.next_delivery, self.next_delivery + 1
        self._delivered, self._last_delivery = (delivery, max(message.seq, self._delivered[1])), now
        acknowledged = self.config["ack_policy"] == "none"
        if acknowledged:
            self._floor = (delivery, message.seq)
        elif message.seq in self.pending:
            self.pending[message.seq].since = now
        else:
            self.pending[message.seq] = Pending(delivery, now)
        stream.context.send(subject, payload, header=header, reply=reply, shown=message.subject)
        self._target.sent()
        self._arm()
        if acknowledged:
            stream.acknowledged(message.seq)
        return True

    def send_heartbeat(self, subject: str, *, stalled_on: str = "") -> None:
        lines = [("Nats-Last-Consumer", str(self.next_delivery - 1)), ("Nats-Last-Stream", str(self.cursor.next - 1))]
        if stalled_on:
            lines.append(("Nats-Consumer-Stalled", stalled_on))
        self.stream.context.send_status(subject, "100 Idle Heartbeat", *lines)

    # Acknowledgements.

    def _on_next(self, message: Message) -> None:
        if message.reply:
            self._target.request(message.reply, message.payload)

    def _on_ack(self, message: Message) -> None:
        *_, _count, seq_text, delivery_text, _time, _left = message.subject.split(".")
        seq, delivery = parse_number(seq_text), parse_number(delivery_text)
        if seq is None or delivery is None:
            return
        word = message.payload
        answers = bool(message.reply) and seq > 0
        if word in (b"", b"+ACK", b"+OK") or word.startswith(b"+TERM"):
            answers = self.acknowledge(seq, delivery) and answers
        elif word.startswith(b"+NXT"):
            self.acknowledge(seq, delivery)
            if message.reply:
                self._target.request(message.reply, word[4:])
            answers = False
        elif word.startswith(b"-NAK"):
            self._nak(seq, delivery, word[4:].strip())
        elif word == b"+WPI" and seq in self.pending:
            self.pending[seq].since = self.stream.context.now
            self._arm()
        if answers:
            self.stream.context.send(message.reply)

    def acknowledge(self, seq: int, delivery: int) -> bool:
        """Process an acknowledgement; return whether the server answers it."""
        if seq >= self.cursor.next and not self.config["flow_control"]:
            return False
        was_full = self.at_limit()
        done = [seq]
        if self.config["ack_policy"] == "explicit":
            entry = self.pending.pop(seq, None)
            if entry is not None:
                self._move_floor((entry.delivery, seq))
            self._drop_redelivery(seq)
        elif delivery > self._floor[0] and seq > self._floor[1]:
            self._floor = (delivery, seq)
            done = [each for each in self.pending if each <= seq]
            for each in done:
                del self.pending[each]
                self._redeliveries.pop(each, None)
            self.redeliver = [each for each in self.redeliver if each > seq]
        else:
            return True
        self._last_ack = self.stream.context.now
        self._arm()
        for each in done:
            self.stream.acknowledged(each)
        if was_full or self.redeliver:
            self.pump()
        return True

    def _nak(self, seq: int, delivery: int, argument: bytes) -> None:
        entry = self.pending.get(seq)
        if delivery <= self._floor[0] or delivery > self.next_delivery or entry is None:
            return
        delay = _parse_delay(argument)
        if delay is not None:
            self.redeliver = [each for each in self.redeliver if each != seq]
            entry.since = self.stream.context.now - int(self.config["ack_wait"]) + delay
            self._arm()
            return
        if seq not in self.redeliver:
            self.redeliver.append(seq)
        self.pump()

    @property
    def _position(self) -> Pair:
        return self.next_delivery - 1, self.cursor.next - 1

    def _move_floor(self, done: Pair) -> None:
        """Move the acknowledgement floor after a message that is acknowledged or no longer delivered."""
        delivery, seq = done
        if not self.pending:
            self._floor = self._position
        elif delivery == self._floor[0] + 1:
            following = min((each for each in self.pending if each > seq), default=None)
            self._floor = done if following is None else (self.pending[following].delivery - 1, following - 1)

    def _drop_redelivery(self, seq: int) -> None:
        self._redeliveries.pop(seq, None)
        self.redeliver = [each for each in self.redeliver if each != seq]

    # Redelivery.

    def _deadline(self, seq: int) -> int:
        backoff = self.config["backoff"]
        wait = backoff[min(self._redeliveries.get(seq, 0), len(backoff) - 1)] if backoff else self.config["ack_wait"]
        return self.pending[seq].since + int(wait)

    def _arm(self) -> None:
        if self.config["ack_policy"] in ("explicit", "all"):
            waiting = [self._deadline(seq) for seq in self.pending if seq not in self.redeliver]
            self._ack_timer.set(min(waiting, default=None))

    def _expire(self) -> None:
        now = self.stream.context.now
        due = sorted(seq for seq in self.pending if seq not in self.redeliver and self._deadline(seq) <= now)
        for seq in due:
            count = max(self._redeliveries.get(seq, 0), 1)
            if 0 < self.config["max_deliver"] <= count:
                self._give_up(seq, count)
                self._redeliveries[seq] = count
            else:
                self.redeliver.append(seq)
                self.pending[seq].since = now
        self._arm()
        self.pump()

    def _give_up(self, seq: int, count: int) -> None:
        """Stop delivering a message, and publish the advisory the first time."""
        if count == self.config["max_deliver"]:
            self.stream.send_advisory(
                f"CONSUMER.MAX_DELIVERIES.{self.stream.name}.{self.name}",
                "max_deliver",
                {"consumer": self.name, "stream_seq": seq, "deliveries": count},
            )
        self.pending.pop(seq, None)

    # Changes of the stream.

    def message_stored(self, message: StoredMessage) -> None:
        if self.cursor.wants(message.subject):
            self.pump()

    def message_removed(self, message: StoredMessage) -> None:
        entry = self.pending.pop(message.seq, None)
        if entry is not None:
            self._move_floor((entry.delivery, message.seq))
            self._last_ack = self.stream.context.now
            self._drop_redelivery(message.seq)
            self._arm()
            self.pump()

    def stream_purged(self, pattern: str) -> None:
        """Handle a purge of the messages that match a pattern; an empty one matches all."""
        store = self.stream.store
        if pattern and not self.cursor.overlaps([pattern]):
            return
        first = store.first
        if pattern and any(subjects.is_subset(each, pattern) for each in self.cursor.filters):
            following = store.next_for(pattern, 0)
            first = following.seq if following is not None else store.last + 1
        self.cursor.next = max(self.cursor.next, first)
        for seq in [seq for seq in self.pending if store.get(seq) is None]:
            entry = self.pending.pop(seq)
            self._move_floor((entry.delivery, seq))
            self._drop_redelivery(seq)
            self._last_ack = self.stream.context.now
        if not self.pending:
            self._redeliveries.clear()
            self._floor = self._position
        self._delivered = self._position
        self._arm()

    def interest_changed(self) -> None:
        self._target.interest_changed()

    def info_json(self) -> dict[str, Any]:
        """Return the fields of an info reply."""
        stream = self.stream
        # Before the first delivery, a consumer in memory has no stored state and reports its position.
        in_memory = stream.config["storage"] == "memory" or self.config["mem_storage"]
        delivered = self._position if in_memory and self._delivered == (0, 0) else self._delivered
        info: dict[str, Any] = {
            "stream_name": stream.name,
            "name": self.name,
            "created": golang.rfc3339(self.created),
            "config": consumer_json(self.config, stream.profile),
            "delivered": _sequences(delivered, self._last_delivery),
            "ack_floor": _sequences(self._delivered if self._floor == self._position else self._floor, self._last_ack),
            "num_ack_pending": len(self.pending),
            "num_redelivered": 0 if self.config["max_deliver"] == 1 else len(self._redeliveries),
            "num_pending": self.cursor.num_pending(),
        }
        info |= self._target.info_json()
        info["ts"] = golang.rfc3339(self.stream.context.now)
        return info


def _sequences(pair: Pair, when: int | None) -> dict[str, Any]:
    active = {} if when is None else {"last_active": golang.rfc3339(when)}
    return {"consumer_seq": pair[0], "stream_seq": pair[1], **active}


def _parse_delay(argument: bytes) -> int | None:
    """Return the delay of a negative acknowledgement in nanoseconds, `None` for none."""
    if not argument:
        return None
    if argument.startswith(b"{"):
        try:
            return int(golang.decode(argument, {"delay": golang.DURATION}, strict=False).get("delay", 0))
        except golang.JsonError:
            return None
    return golang.parse_duration(argument.decode("utf-8", "replace"))


class Consumers:
    def __init__(self) -> None:
        self.by_name: dict[str, Consumer] = {}

    def __len__(self) -> int:
        return len(self.by_name)

    def create(self, stream: Stream, request: dict[str, Any], action: str) -> Consumer:
        config = check_consumer(request, stream.config)
        name = config["durable_name"] or config["name"]
        existing = self.by_name.get(name) if name else None
        if existing is not None:
            if config == existing.config:
                return existing
            raise api_error(10148) if action == "create" else not_modelled("update of a consumer")
        if action == "update":
            raise api_error(10149)
        if 0 < stream.config["max_consumers"] <= len(self):
            raise api_error(10026)
        if stream.config["retention"] == "workqueue":
            self._check_work_queue(config)
        if not name:
            name = config["name"] = stream.context.make_name()
        return self.add(stream, name, config)

    def add(self, stream: Stream, name: str, config: ConsumerConfig) -> Consumer:
        consumer = Consumer(stream, name, config, lambda: self.by_name.pop(name, None))
        self.by_name[name] = consumer
        return consumer

    def close(self) -> None:
        for consumer in self._all():
            consumer.close()

    def want(self, subject: str) -> bool:
        return any(consumer.cursor.wants(subject) for consumer in self._all())

    def need(self, message: StoredMessage) -> bool:
        return any(consumer.needs(message) for consumer in self._all())

    def message_stored(self, message: StoredMessage) -> None:
        for consumer in self._all():
            consumer.message_stored(message)

    def messages_removed(self, messages: list[StoredMessage]) -> None:
        for consumer in self._all():
            for message in messages:
                consumer.message_removed(message)

    def stream_purged(self, pattern: str) -> None:
        for consumer in self._all():
            consumer.stream_purged(pattern)

    def interest_changed(self) -> None:
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
