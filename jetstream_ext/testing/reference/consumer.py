"""One consumer: what is delivered, what is acknowledged, what has to go out again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import headers, subjects, times
from .advisories import deliveries_exceeded
from .consumer_config import ConsumerConfig, consumer_json
from .cursor import Cursor
from .delivery import Pull, Push
from .progress import Pending, Progress, moved_floor, parse_delay

if TYPE_CHECKING:
    from .connections import Message
    from .store import StoredMessage
    from .stream import Stream
    from .timers import Timer

__all__ = ["Consumer"]


class Consumer:
    """A consumer of one stream; `next_delivery` is the consumer sequence of the next delivery."""

    def __init__(self, stream: Stream, name: str, config: ConsumerConfig) -> None:
        self.stream = stream
        self.name = name
        self.config: ConsumerConfig = config
        self.created: int = stream.now
        self.next_delivery: int = 1
        self.pending: dict[int, Pending] = {}
        self.redeliver: list[int] = []
        self._redelivered: dict[int, int] = {}
        self.cursor: Cursor = Cursor(stream, config)
        self._floor = (0, self.cursor.next - 1)
        self._progress = Progress((0, self.cursor.next - 1), stream.profile.stored_progress)
        if not stream.profile.reset:
            self._floor = self._progress.floor = (0, 0)
        self._pumping = False
        self._timer: Timer | None = None
        self._pause: Timer | None = None
        self._subscriptions = self._respond()
        self._target: Pull | Push = Push(self) if config["deliver_subject"] else Pull(self)
        self._watch_pause()

    def _respond(self) -> list[Any]:
        respond_to = self.stream.jetstream.respond_to
        name = f"{self.stream.name}.{self.name}"
        found = [respond_to(f"$JS.API.CONSUMER.MSG.NEXT.{name}", self._on_next)]
        if self.config["ack_policy"] in ("explicit", "all"):
            found.append(respond_to(f"$JS.ACK.{name}.*.*.*.*.*", self._on_ack))
        return found

    # Life.

    def close(self, *, deleted: bool = True) -> None:
        """Stop."""
        self._target.close(deleted=deleted)
        for timer in (self._timer, self._pause):
            if timer is not None:
                timer.cancel()
        for subscription in self._subscriptions:
            self.stream.jetstream.ignore(subscription)

    def delete(self) -> None:
        """Stop, and be gone from the stream."""
        self.close()
        self.stream.consumers.pop(self.name, None)
        self.stream.drop_uninteresting(deleted=True)

    def update(self, config: ConsumerConfig) -> None:
        """Go on under another configuration."""
        moved = config["deliver_subject"] != self.config["deliver_subject"]
        self.config = self.cursor.config = config
        if moved:
            self._target.close()
            self._target = Push(self)
        self._arm()
        self._watch_pause()

    def pause(self, until: int | None) -> None:
        """Deliver nothing until an instant."""
        self.config["pause_until"] = until
        self._watch_pause()
        self.pump()

    @property
    def paused_for(self) -> int:
        """For how many nanoseconds it is paused."""
        until = self.config["pause_until"]
        return max(until - self.stream.now, 0) if until is not None else 0

    def _watch_pause(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        if self.paused_for:
            self._pause = self.stream.at(self.config["pause_until"], self.pump)

    def reset(self, seq: int) -> int:
        """Start again at a sequence, or after the acknowledged ones if it is 0; return where.

        Raises:
            ValueError: The deliver policy does not allow it; the text is the server's.
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
        self._redelivered.clear()
        self.cursor.restart(seq)
        self.next_delivery = 1
        self._floor = (0, seq - 1)
        self._progress = Progress((0, seq - 1), self.stream.profile.stored_progress)
        self._arm()
        if self.stream.config["retention"] == "interest":
            self.stream.drop_uninteresting()
        return seq

    # Which messages.

    def needs(self, message: StoredMessage) -> bool:
        """Whether a message of an interest or work queue stream must be kept for it."""
        seq = message.seq
        if not self.cursor.wants(message.subject):
            return False
        if seq in self._redelivered:
            return True
        if seq <= self._floor[1]:
            return False
        return self.config["ack_policy"] != "explicit" or seq >= self.cursor.next or seq in self.pending

    def _next_message(self) -> tuple[StoredMessage, int] | None:
        """Return the next message and its delivery count; it is taken off whatever queue it was on."""
        while self.redeliver:
            seq = self.redeliver.pop(0)
            count = self._redelivered[seq] = self._redelivered.get(seq, 0) + 1
            limit = self.config["max_deliver"]
            if 0 < limit <= count:
                if count == limit:
                    deliveries_exceeded(self.stream, self.name, seq, count)
                self._forget(seq)
                continue
            message = self.stream.store.get(seq)
            if message is not None:
                return message, count + 1
        if self.at_limit():
            return None
        message = self.cursor.take()
        return None if message is None else (message, 1)

    def at_limit(self) -> bool:
        """Whether so many messages are unacknowledged that no more go out."""
        return bool(0 < self.config["max_ack_pending"] <= len(self.pending))

    # Out.

    def pump(self) -> None:
        """Deliver what can be delivered."""
        if self._pumping or self.paused_for:
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
            header, payload = headers.add(header, ("Nats-Msg-Size", str(len(payload)))), b""
        size = len(message.subject) + len(reply) + len(header) + len(payload)
        taken: Any = self._target.take(size)
        if taken is None:
            if count == 1:
                self.cursor.put_back(message.seq)
            else:
                self._redelivered[message.seq] -= 1
                self.redeliver.insert(0, message.seq)
            return False
        subject, bytes_left = self._target.target(taken)
        delivery, self.next_delivery = self.next_delivery, self.next_delivery + 1
        self._progress.note_delivery(delivery, message.seq, stream.now)
        if self.config["ack_policy"] == "none":
            self._floor = self._progress.floor = (delivery, message.seq)
        elif message.seq in self.pending:
            self.pending[message.seq].since = stream.now
        else:
            self.pending[message.seq] = Pending(delivery, stream.now)
        stream.send(subject, payload, header=header, reply=reply, shown=message.subject)
        self._target.sent(size)
        if bytes_left:
            self._target.finish(taken)
        self._arm()
        if self.config["ack_policy"] == "none":
            stream.acknowledged(message.seq)
        return True

    def send_heartbeat(self, subject: str, *, stalled_on: str = "") -> None:
        """Say that nothing is lost: there is nothing to send."""
        lines = [("Nats-Last-Consumer", str(self.next_delivery - 1)), ("Nats-Last-Stream", str(self.cursor.next - 1))]
        if stalled_on:
            lines.append(("Nats-Consumer-Stalled", stalled_on))
        self.stream.send(subject, header=headers.status("100 Idle Heartbeat", *lines))

    # In.

    def _on_next(self, message: Message) -> None:
        if message.reply:
            self._target.request(message.reply, message.payload)

    def _on_ack(self, message: Message) -> None:
        *_, _count, seq, delivery, _time, _left = message.subject.split(".")
        stream_seq, number = headers.parse_number(seq), headers.parse_number(delivery)
        if stream_seq is None or number is None:
            return
        word = message.payload
        answers = bool(message.reply) and stream_seq > 0
        in_place = self.stream.config["retention"] == "limits" and self.config["ack_policy"] == "explicit"
        if word in (b"", b"+ACK", b"+OK"):
            # The store itself answers for sequence 0, where the consumer does not.
            answers = self.acknowledge(stream_seq, number) and (answers or (in_place and bool(message.reply)))
        elif word.startswith(b"+NXT"):
            self.acknowledge(stream_seq, number)
            if message.reply:
                self._target.request(message.reply, word[4:])
            answers = False
        elif word.startswith(b"-NAK"):
            self._refused(stream_seq, number, word[4:].strip())
        elif word == b"+WPI":
            if stream_seq in self.pending:
                self.pending[stream_seq].since = self.stream.now
                self._arm()
        elif word.startswith(b"+TERM"):
            answers = self.acknowledge(stream_seq, number) and (answers or (in_place and bool(message.reply)))
        if answers:
            self.stream.send(message.reply)

    def acknowledge(self, seq: int, delivery: int) -> bool:
        """Take an acknowledgement; return whether it made sense."""
        if seq >= self.cursor.next and not self.config["flow_control"]:
            return False
        was_full = self.at_limit()
        gone = [seq]
        if self.config["ack_policy"] == "explicit":
            entry = self.pending.pop(seq, None)
            if entry is not None:
                self._floor = moved_floor(
                    self.pending, self._floor, (self.next_delivery - 1, self.cursor.next - 1), entry.delivery, seq
                )
                self._progress.floor = moved_floor(
                    self.pending, self._progress.floor, self._progress.delivered, entry.delivery, seq
                )
            self._redelivered.pop(seq, None)
            self.redeliver = [each for each in self.redeliver if each != seq]
        elif delivery > self._floor[0] and seq > self._floor[1]:
            self._floor = (delivery, seq)
            if seq in self.pending or not self._progress.stored:  # a store takes it for that of a message only
                self._progress.floor = self._floor
            gone = [each for each in self.pending if each <= seq]
            for each in gone:
                del self.pending[each]
                self._redelivered.pop(each, None)
            self.redeliver = [each for each in self.redeliver if each > seq]
        else:
            return True
        self._progress.last_ack = self.stream.now
        self._arm()
        for each in gone:
            self.stream.acknowledged(each)
        if was_full or self.redeliver:
            self.pump()
        return True

    def _refused(self, seq: int, delivery: int, delay: bytes) -> None:
        entry = self.pending.get(seq)
        if delivery <= self._floor[0] or delivery > self.next_delivery or entry is None:
            return
        wait = parse_delay(delay)
        if wait is not None:
            self.redeliver = [each for each in self.redeliver if each != seq]
            entry.since = self.stream.now - int(self.config["ack_wait"]) + wait
            self._arm()
            return
        if seq not in self.redeliver:
            self.redeliver.append(seq)
        self.pump()

    # Time.

    def _deadline(self, seq: int) -> int:
        backoff = self.config["backoff"]
        wait = backoff[min(self._redelivered.get(seq, 0), len(backoff) - 1)] if backoff else self.config["ack_wait"]
        return self.pending[seq].since + int(wait)

    def _arm(self) -> None:
        waiting = [self._deadline(seq) for seq in self.pending if seq not in self.redeliver]
        when = min(waiting, default=None) if self.config["ack_policy"] in ("explicit", "all") else None
        if self._timer is not None:
            if self._timer.active and self._timer.when == when:
                return
            self._timer.cancel()
        self._timer = self.stream.at(when, self._expire) if when is not None else None

    def _expire(self) -> None:
        self._timer = None
        now = self.stream.now
        limit = self.config["max_deliver"]
        due = sorted(seq for seq in self.pending if seq not in self.redeliver and self._deadline(seq) <= now)
        for seq in due:
            count = max(self._redelivered.get(seq, 0), 1)
            if 0 < limit <= count:
                if count == limit:
                    deliveries_exceeded(self.stream, self.name, seq, count)
                self._forget(seq)
                self._redelivered[seq] = count
            else:
                self.redeliver.append(seq)
                self.pending[seq].since = now
        self._arm()
        self.pump()

    def _forget(self, seq: int) -> None:
        entry = self.pending.pop(seq, None)
        if entry is not None:
            self._floor = moved_floor(
                self.pending, self._floor, (self.next_delivery - 1, self.cursor.next - 1), entry.delivery, seq
            )

    # What happens to the stream.

    def message_stored(self, message: StoredMessage) -> None:
        """Take note of a new message."""
        if self.cursor.wants(message.subject):
            self.pump()

    def message_removed(self, message: StoredMessage) -> None:
        """Take note of a message that is gone."""
        entry = self.pending.get(message.seq)
        if entry is not None:
            self._forget(message.seq)
            progress = self._progress
            progress.floor = moved_floor(self.pending, progress.floor, progress.delivered, entry.delivery, message.seq)
            progress.last_ack = self.stream.now
            self._redelivered.pop(message.seq, None)
            self.redeliver = [each for each in self.redeliver if each != message.seq]
            self._arm()
            self.pump()

    def stream_purged(self, pattern: str) -> None:
        """Take note of a purge of everything under a pattern; an empty one is everything."""
        store = self.stream.store
        wider = False
        first = store.first
        if pattern and not (
            self.cursor.filters and any(subjects.is_subset(each, pattern) for each in self.cursor.filters)
        ):
            if not self.cursor.overlaps([pattern]):
                return
            wider = True
        elif pattern:
            following = store.next_for(pattern, 0)
            first = following.seq if following is not None else store.last + 1
        self.cursor.next = max(self.cursor.next, first)
        if self._floor[1] < first:
            self._drop_purged(first, wider=wider)
        if not self.pending:
            self._redelivered.clear()
            self._floor = (self.next_delivery - 1, self.cursor.next - 1)
        self.redeliver = [seq for seq in self.redeliver if seq >= self.cursor.next]
        self._progress.delivered = (self.next_delivery - 1, self.cursor.next - 1)
        self._progress.floor = self._floor
        self._arm()

    def _drop_purged(self, first: int, *, wider: bool) -> None:
        delivery = self._floor[0]
        for seq, entry in list(self.pending.items()):
            if seq < first or (wider and self.stream.store.get(seq) is None):
                delivery = max(delivery, entry.delivery)
                del self.pending[seq]
                self._redelivered.pop(seq, None)
                if self.stream.profile.reset:
                    self._progress.last_ack = self.stream.now
        self._floor = (delivery, first - 1)

    def interest_changed(self) -> None:
        """See who listens now."""
        self._target.interest_changed()

    def info_json(self, *, stored: bool = False) -> dict[str, Any]:
        """Return what an info reply says about the consumer; see `config_json` for `stored`."""
        stream = self.stream
        on_disk = stream.config["storage"] == "file" and not self.config["mem_storage"]
        # A state in memory is none before the first delivery.
        counts = on_disk and stream.profile.stored_progress
        info: dict[str, Any] = {
            "stream_name": stream.name,
            "name": self.name,
            "created": times.rfc3339(self.created),
            "config": consumer_json(self.config, stream.profile, stored=stored),
            **self._progress.as_json(None if counts else (self.next_delivery - 1, self.cursor.next - 1)),
            "num_ack_pending": len(self.pending),
            "num_redelivered": 0 if self.config["max_deliver"] == 1 else len(self._redelivered),
            "num_waiting": self._target.waiting,
            "num_pending": self.cursor.num_pending(),
        }
        info |= self._target.info_json()
        if self.paused_for:
            info |= {"paused": True, "pause_remaining": self.paused_for}
        info["ts"] = times.rfc3339(self.stream.now)
        return info
