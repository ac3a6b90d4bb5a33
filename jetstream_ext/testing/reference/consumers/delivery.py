"""What a consumer delivers, and where: its position, waiting pull requests, and a deliver subject."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

from ..context import Timer
from ..router import Message
from ..streams.store import StoredMessage
from ..streams.stream import Stream
from ..wire import golang, subjects
from ..wire.errors import ApiError
from ..wire.golang import BOOL, DURATION, INT, NOT_MODELLED, JsonError, decode
from ..wire.protocol import get_header, parse_number, status_header
from .config import ConsumerConfig

# -- the position: the next message to deliver, and the delivered and acknowledged sequences --------------------------

Pair = tuple[int, int]
"""A consumer sequence and a stream sequence."""


class Cursor:
    """The position of one consumer in its stream.

    `next` is the next stream sequence to look at. A `last_per_subject` consumer first delivers a list of sequences, and
    continues after the last message that the stream had when the consumer was created.
    """

    next: int

    def __init__(self, stream: Stream, config: ConsumerConfig) -> None:
        self._stream = stream
        self.config: ConsumerConfig = config
        self._first_of_each: list[int] = []
        self._resume = stream.store.last
        self._start()

    @property
    def filters(self) -> list[str]:
        """The filter subjects; an empty list matches all messages."""
        one = self.config["filter_subject"]
        return [one] if one else list(self.config["filter_subjects"])

    def wants(self, subject: str) -> bool:
        filters = self.filters
        return not filters or any(subjects.matches(each, subject) for each in filters)

    def overlaps(self, filters: list[str]) -> bool:
        return any(subjects.collide(one, other) for one in self.filters or [">"] for other in filters)

    def num_pending(self) -> int:
        """Count the messages that were never taken."""
        if self._first_of_each:
            return len(self._first_of_each) + self._count(self._resume + 1)
        return self._count(self.next) if len(self._stream.store) else 0

    def take(self) -> StoredMessage | None:
        """Return the next new message and move past it, or `None` at the end of the stream.

        A deleted message of the `last_per_subject` list also gives `None`: a real server then waits for the next message
        or request.
        """
        store = self._stream.store
        if self._first_of_each:
            seq = self._first_of_each.pop(0)
            self.next = (seq if self._first_of_each else self._resume) + 1
            return store.get(seq)
        found = [store.next_for(each, self.next) for each in self.filters or [""]]
        message = min((each for each in found if each), key=lambda each: each.seq, default=None)
        self.next = max(self.next, store.last + 1) if message is None else message.seq + 1
        return message

    def put_back(self, seq: int) -> None:
        """Move back to the message taken last; one of the `last_per_subject` list is lost, as on real servers."""
        self.next = seq

    def restart(self, seq: int) -> None:
        self._first_of_each = []
        self.next = seq

    def _count(self, seq: int) -> int:
        return sum(self._stream.store.count(each, seq) for each in self.filters or [""])

    def _start(self) -> None:
        stream, config, filters = self._stream, self.config, self.filters
        store = stream.store
        policy = config["deliver_policy"]
        if config["opt_start_seq"]:
            self.next = max(int(config["opt_start_seq"]), store.first)
            return
        if policy == "all" or (policy == "last_per_subject" and stream.config["max_msgs_per_subject"] == 1):
            first = store.first
        elif policy == "last":
            newest = [store.last_for(each, store.last) for each in filters]
            first = max((message.seq for message in newest if message), default=0) if filters else store.last
        elif policy == "last_per_subject":
            newest = [store.last_for(subject) for each in filters for subject in store.totals(each)]
            self._first_of_each = sorted({message.seq for message in newest if message})
            first = self._first_of_each[0] if self._first_of_each else store.last
        elif config["opt_start_time"] is not None:
            first = store.seq_from_time(config["opt_start_time"])
        else:
            first = store.last + 1
        self.next = 1 if store.first == 0 else max(min(first, store.last + 1), store.first)


@dataclass(slots=True)
class Pending:
    """A delivered message that is not acknowledged."""

    delivery: int
    since: int


# -- the target -------------------------------------------------------------------------------------------------------

_NEXT: golang.Schema = {
    "expires": DURATION,
    "batch": INT,
    "no_wait": BOOL,
    "idle_heartbeat": DURATION,
    **dict.fromkeys(("max_bytes", "group", "min_pending", "min_ack_pending", "id", "priority"), NOT_MODELLED),
}
_NUMBER = re.compile(rb"[+-]?[0-9]{1,18}")
_JITTER = 600 * golang.MILLISECOND


class Consumer(Protocol):
    """The part of a consumer that its target uses."""

    stream: Stream
    name: str
    config: ConsumerConfig
    cursor: Cursor
    redeliver: list[int]
    pending: dict[int, Pending]

    def pump(self) -> None: ...
    def delete(self) -> None: ...
    def at_limit(self) -> bool: ...
    def acknowledge(self, seq: int, delivery: int) -> bool: ...
    def send_heartbeat(self, subject: str, *, stalled_on: str = "") -> None: ...


class Target:
    """Where a consumer delivers its messages.

    If `ready`, the consumer calls `take`, sends its next message to the returned subject, and calls `sent`; `None` means
    that no message can be delivered now. It calls `idle` when it has nothing more to deliver.
    """

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._context = consumer.stream.context
        self._send_status = self._context.send_status
        self._inactivity = Timer(self._context, self._check_inactivity)
        self._last_active = self._context.now

    def close(self) -> None:
        self._inactivity.cancel()

    def watch_inactivity(self) -> None:
        """Delete the consumer some time after its last activity, if its configuration says so."""
        if self._consumer.config["inactive_threshold"]:
            self._inactivity.set(self._last_active + self._consumer.config["inactive_threshold"] + _JITTER)

    def _check_inactivity(self) -> None:
        self._consumer.delete()


@dataclass(eq=False, slots=True)
class _Request:
    """A pull request that is not answered completely."""

    reply: str
    left: int
    no_wait: bool
    expires: int | None
    heartbeat: int
    next_beat: int
    delivered: int = 0

    def pending(self) -> tuple[tuple[str, str], ...]:
        return (("Nats-Pending-Messages", str(self.left)), ("Nats-Pending-Bytes", "0"))


class Pull(Target):
    """Deliver to a queue of pull requests."""

    def __init__(self, consumer: Consumer) -> None:
        super().__init__(consumer)
        self._queue: list[_Request] = []
        self._timer = Timer(self._context, lambda: self.idle(end_of_stream=True))
        self.watch_inactivity()

    def close(self) -> None:
        super().close()
        self._timer.cancel()
        for each in self._queue:
            self._send_status(each.reply, "409 Consumer Deleted")
        self._queue = []

    def info_json(self) -> dict[str, Any]:
        return {"num_waiting": len(self._queue)}

    def ready(self) -> bool:
        return bool(self._queue)

    def request(self, reply: str, payload: bytes) -> None:
        now = self._context.now
        try:
            wanted = _parse(payload)
        except (ApiError, JsonError) as error:
            self._send_status(reply, f"400 Bad Request - {error}")
            return
        if self._has_room(reply, wanted):
            expires, beat = wanted.get("expires", 0), wanted.get("idle_heartbeat", 0)
            end = now + expires if expires else None
            batch, no_wait = wanted.get("batch", 0), wanted.get("no_wait", False)
            self._queue.append(_Request(reply, batch, no_wait, end, beat, now + beat))
            self._consumer.pump()

    def take(self) -> str | None:
        while self._queue:
            each = self._queue.pop(0)
            if each.expires is not None and each.expires <= self._context.now:
                self._send_status(each.reply, "408 Request Timeout", *each.pending())
            elif self._context.router.has_interest(each.reply):
                each.delivered += 1
                each.left -= 1
                if each.left > 0:
                    self._queue.append(each)
                    each.next_beat = self._context.now + each.heartbeat
                self._last_active = self._context.now
                return each.reply
        return None

    def sent(self) -> None:
        """Do nothing: each message answers a request."""

    def interest_changed(self) -> None:
        """Do nothing: each delivery looks for interest in the request's reply subject."""

    def idle(self, *, end_of_stream: bool) -> None:
        """End the requests that do not wait any longer."""
        now = self._context.now
        for each in list(self._queue):
            if each.expires is not None and now >= each.expires:
                self._send_status(each.reply, "408 Request Timeout", *each.pending())
                self._queue.remove(each)
            elif end_of_stream and each.no_wait and (each.expires is None or each.delivered):
                self._send_status(each.reply, "404 No Messages")
                self._queue.remove(each)
            elif not self._context.router.has_interest(each.reply):
                self._queue.remove(each)
            elif each.heartbeat and now >= each.next_beat:
                self._consumer.send_heartbeat(each.reply)
                each.next_beat = now + each.heartbeat
        beats = [each.next_beat for each in self._queue if each.heartbeat]
        ends = [each.expires for each in self._queue if each.expires is not None]
        self._timer.set(min([*beats, *ends], default=None))

    def _has_room(self, reply: str, wanted: dict[str, Any]) -> bool:
        consumer = self._consumer
        if wanted.get("no_wait", False):
            pending = consumer.cursor.num_pending() + len(consumer.redeliver)
            if pending == 0 and not wanted.get("expires", 0):
                self._last_active = self._context.now
                self._send_status(reply, "404 No Messages")
                return False
        if len(self._queue) >= consumer.config["max_waiting"]:
            self.idle(end_of_stream=False)
        if len(self._queue) >= consumer.config["max_waiting"]:
            if not wanted.get("idle_heartbeat", 0):
                self._send_status(reply, "409 Exceeded MaxWaiting")
            return False
        return True

    def _check_inactivity(self) -> None:
        now = self._context.now
        if self._queue:
            self._last_active = now
        if now - self._last_active < self._consumer.config["inactive_threshold"]:
            self.watch_inactivity()
        else:
            self._consumer.delete()


def _parse(payload: bytes) -> dict[str, Any]:
    text = payload.strip()
    if not text.startswith(b"{"):
        return {"batch": int(text) if _NUMBER.fullmatch(text) else 1}
    wanted = decode(text, _NEXT, strict=False)
    beat = wanted.get("idle_heartbeat", 0)
    if beat > 0 and beat * 2 > wanted.get("expires", 0):
        raise JsonError("heartbeat value too large")
    return wanted


class Push(Target):
    """Deliver to a subject, with heartbeats, and with acknowledgements by flow control.

    A real server also asks for flow control when many bytes are on their way; the model never has to.
    """

    def __init__(self, consumer: Consumer) -> None:
        super().__init__(consumer)
        self._open_request = ""
        """The reply subject of the flow control request without an answer."""
        self._heartbeat = Timer(self._context, self._on_heartbeat)
        self._flow_subject = f"$JS.FC.{consumer.stream.name}.{consumer.name}"
        self._active = self._has_interest()
        self._subscription = self._context.router.respond_to(f"{self._flow_subject}.*", self._on_confirmation)
        self._restart_heartbeat()
        if not self._active:
            self.watch_inactivity()

    def close(self) -> None:
        super().close()
        self._heartbeat.cancel()
        self._context.router.unsubscribe(self._subscription)

    def info_json(self) -> dict[str, Any]:
        return {"num_waiting": 0, **({"push_bound": True} if self._active else {})}

    def ready(self) -> bool:
        return self._active

    def request(self, reply: str, payload: bytes) -> None:
        self._send_status(reply, "409 Consumer is push based")

    def take(self) -> str | None:
        return self._subject

    def sent(self) -> None:
        """Ask for an acknowledgement by flow control if no message can be delivered without it."""
        self._restart_heartbeat()
        if self._consumer.at_limit():
            self._request_acknowledgement()

    def idle(self, *, end_of_stream: bool) -> None:
        """Do nothing: heartbeats have a timer."""

    def interest_changed(self) -> None:
        active = self._has_interest()
        if active == self._active:
            return
        self._active = active
        if active:
            self._inactivity.cancel()
            self._consumer.pump()
        else:
            self._open_request, self._last_active = "", self._context.now
            self.watch_inactivity()

    @property
    def _subject(self) -> str:
        return str(self._consumer.config["deliver_subject"])

    def _has_interest(self) -> bool:
        return self._context.router.has_exact_interest(self._subject, self._consumer.config["deliver_group"])

    def _restart_heartbeat(self) -> None:
        if self._consumer.config["idle_heartbeat"]:
            self._heartbeat.set_in(self._consumer.config["idle_heartbeat"])

    def _on_heartbeat(self) -> None:
        if self._active:
            self._consumer.send_heartbeat(self._subject, stalled_on=self._open_request)
            if self._consumer.pending:
                self._request_acknowledgement()
        self._restart_heartbeat()

    def _request_acknowledgement(self) -> None:
        if self._consumer.config["ack_policy"] == "flow_control" and not self._open_request:
            self._open_request = f"{self._flow_subject}.{self._context.make_name()[:4]}"
            self._context.send(self._subject, header=status_header("100 FlowControl Request"), reply=self._open_request)

    def _on_confirmation(self, message: Message) -> None:
        if message.subject != self._open_request:
            return
        self._open_request = ""
        seq = parse_number(get_header(message.header, "Nats-Last-Stream"))
        if seq:
            self._consumer.acknowledge(seq, parse_number(get_header(message.header, "Nats-Last-Consumer")) or 0)
        self._consumer.pump()
