"""Where a consumer delivers messages: to waiting pull requests, or to a deliver subject."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

from ..context import Timer
from ..router import Message
from ..streams.stream import Stream
from ..wire import headers, times
from ..wire.gojson import BOOL, DURATION, INT, STRING, JsonError, Struct, decode
from .config import ConsumerConfig
from .position import Cursor, Pending

_NEXT = Struct(
    "JSApiConsumerGetNextRequest",
    {
        "expires": DURATION,
        "batch": INT,
        "max_bytes": INT,
        "no_wait": BOOL,
        "idle_heartbeat": DURATION,
        "group": STRING,
        "min_pending": INT,
        "min_ack_pending": INT,
        "id": STRING,
        "priority": INT,
    },
)
_NUMBER = re.compile(rb"[+-]?[0-9]{1,18}")
_FLOW_WINDOW = 32 << 20
_JITTER = 600 * times.MILLISECOND


class ConsumerView(Protocol):
    """The part of a consumer that its delivery target uses."""

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


class _Delivery:
    """What pull and push delivery have in common.

    If `ready`, the consumer calls `take` with the size of its next message, sends the message to the returned subject, and
    calls `sent`; `None` means that the message cannot be delivered now. It calls `idle` when it has nothing more to deliver.
    """

    def __init__(self, consumer: ConsumerView) -> None:
        self._consumer = consumer
        self._context = consumer.stream.context
        self._send_status = self._context.send_status

    @property
    def waiting(self) -> int:
        """The number of waiting pull requests."""
        return 0

    def idle(self, *, end_of_stream: bool) -> None:
        """Do nothing; push delivery has a timer for its heartbeats."""

    def interest_changed(self) -> None:
        """Do nothing; pull delivery checks the interest in a reply subject at each delivery."""

    def info_json(self) -> dict[str, Any]:
        return {}


@dataclass(eq=False, slots=True)
class _Request:
    """A pull request that is not answered completely."""

    reply: str
    left: int
    max_bytes: int
    no_wait: bool
    expires: int | None
    heartbeat: int
    next_beat: int
    delivered: int = 0

    def pending(self) -> tuple[tuple[str, str], ...]:
        return (("Nats-Pending-Messages", str(self.left)), ("Nats-Pending-Bytes", str(self.max_bytes)))


class Pull(_Delivery):
    """Deliver to a queue of pull requests."""

    def __init__(self, consumer: ConsumerView) -> None:
        super().__init__(consumer)
        self._queue: list[_Request] = []
        self._taken: _Request | None = None
        self._timer = Timer(self._context, lambda: self._expire(end_of_stream=True))
        self._inactivity = Timer(self._context, self._check_inactivity)
        self._last_active = self._context.now
        self._watch_inactivity()

    def close(self) -> None:
        self._timer.cancel()
        self._inactivity.cancel()
        for each in self._queue:
            self._send_status(each.reply, "409 Consumer Deleted")
        self._queue = []

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def ready(self) -> bool:
        return bool(self._queue)

    def request(self, reply: str, payload: bytes) -> None:
        config, now = self._consumer.config, self._context.now
        try:
            wanted = _parse(payload)
        except JsonError as error:
            self._send_status(reply, f"400 Bad Request - {error}")
            return
        batch, expires, max_bytes = wanted.get("batch", 0), wanted.get("expires", 0), wanted.get("max_bytes", 0)
        if 0 < config["max_batch"] < batch:
            self._send_status(reply, f"409 Exceeded MaxRequestBatch of {config['max_batch']}")
        elif 0 < config["max_expires"] < expires:
            limit = times.format_duration(config["max_expires"])
            self._send_status(reply, f"409 Exceeded MaxRequestExpires of {limit}")
        elif 0 < config["max_bytes"] < max_bytes:
            self._send_status(reply, f"409 Exceeded MaxRequestMaxBytes of {config['max_bytes']}")
        elif self._has_room(reply, wanted):
            beat = wanted.get("idle_heartbeat", 0)
            end = now + expires if expires else None
            no_wait = wanted.get("no_wait", False)
            self._queue.append(_Request(reply, batch, max_bytes, no_wait, end, beat, now + beat))
            self._consumer.pump()

    def take(self, size: int) -> str | None:
        while self._queue:
            each = self._queue.pop(0)
            if each.expires is not None and each.expires <= self._context.now:
                self._send_status(each.reply, "408 Request Timeout", *each.pending())
                continue
            if each.max_bytes > 0:
                if size > each.max_bytes:
                    self._send_status(each.reply, "409 Message Size Exceeds MaxBytes", *each.pending())
                    continue
                each.max_bytes -= size
                if each.max_bytes == 0:
                    each.left = 1
            if not self._context.router.has_interest(each.reply):
                continue
            each.delivered += 1
            each.left -= 1
            if each.left > 0:
                self._queue.append(each)
                each.next_beat = self._context.now + each.heartbeat
            self._taken = each
            self._last_active = self._context.now
            return each.reply
        return None

    def sent(self, size: int) -> None:
        """Tell the request if it has all its messages but not all its bytes."""
        taken = self._taken
        if taken is not None and taken.left <= 0 < taken.max_bytes:
            self._send_status(taken.reply, "409 Batch Completed", *taken.pending())

    def idle(self, *, end_of_stream: bool) -> None:
        """End the requests that do not wait any longer."""
        self._expire(end_of_stream=end_of_stream)

    def _has_room(self, reply: str, wanted: dict[str, Any]) -> bool:
        consumer = self._consumer
        if wanted.get("no_wait", False):
            pending = consumer.cursor.num_pending() + len(consumer.redeliver)
            if pending == 0 and not wanted.get("expires", 0):
                self._last_active = self._context.now
                self._send_status(reply, "404 No Messages")
                return False
            self._expire(end_of_stream=False)
            if 0 < pending < sum(each.left for each in self._queue):
                self._last_active = self._context.now
                self._send_status(reply, "408 Requests Pending")
                return False
        if len(self._queue) >= consumer.config["max_waiting"]:
            self._expire(end_of_stream=False)
        if len(self._queue) >= consumer.config["max_waiting"]:
            if not wanted.get("idle_heartbeat", 0):
                self._send_status(reply, "409 Exceeded MaxWaiting")
            return False
        return True

    def _expire(self, *, end_of_stream: bool) -> None:
        now = self._context.now
        for each in list(self._queue):
            if each.expires is not None and now >= each.expires:
                self._send_status(each.reply, "408 Request Timeout", *each.pending())
                self._queue.remove(each)
            elif end_of_stream and each.no_wait and (each.expires is None or each.delivered):
                if self._context.profile.end_is_404:
                    self._send_status(each.reply, "404 No Messages")
                else:
                    self._send_status(each.reply, "408 Request Timeout", *each.pending())
                self._queue.remove(each)
            elif not self._context.router.has_interest(each.reply):
                self._queue.remove(each)
            elif each.heartbeat and now >= each.next_beat:
                self._consumer.send_heartbeat(each.reply)
                each.next_beat = now + each.heartbeat
        beats = [each.next_beat for each in self._queue if each.heartbeat]
        ends = [each.expires for each in self._queue if each.expires is not None]
        self._timer.set(min([*beats, *ends], default=None))

    def _watch_inactivity(self) -> None:
        threshold = self._consumer.config["inactive_threshold"]
        if threshold:
            self._inactivity.set(self._last_active + threshold + _JITTER)

    def _check_inactivity(self) -> None:
        now = self._context.now
        if self._queue:
            self._last_active = now
        if now - self._last_active < self._consumer.config["inactive_threshold"]:
            self._watch_inactivity()
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


class Push(_Delivery):
    """Deliver to a subject, with heartbeats and flow control."""

    def __init__(self, consumer: ConsumerView) -> None:
        super().__init__(consumer)
        stream = consumer.stream
        self._window = _FLOW_WINDOW // 16 if consumer.config["flow_control"] else 0
        self._unconfirmed = 0
        self._confirming = 0
        """How many of the unconfirmed bytes the open flow control request asks about."""
        self._open_request = ""
        """The reply subject of the flow control request without an answer."""
        self._heartbeat = Timer(self._context, self._on_heartbeat)
        self._inactivity = Timer(self._context, consumer.delete)
        self._flow_subject = f"$JS.FC.{stream.name}.{consumer.name}"
        self._active = self._has_interest()
        self._subscription = self._context.router.respond_to(f"{self._flow_subject}.*", self._on_confirmation)
        self._restart_heartbeat()
        if not self._active:
            self._watch_inactivity()

    def close(self) -> None:
        self._heartbeat.cancel()
        self._inactivity.cancel()
        self._context.router.unsubscribe(self._subscription)

    def info_json(self) -> dict[str, Any]:
        return {"push_bound": True} if self._active else {}

    def ready(self) -> bool:
        return self._active and not (self._window and self._unconfirmed > self._window)

    def request(self, reply: str, payload: bytes) -> None:
        self._send_status(reply, "409 Consumer is push based")

    def take(self, size: int) -> str | None:
        return self._subject

    def sent(self, size: int) -> None:
        """Count the bytes of a message, and send a flow control request if one is due."""
        self._restart_heartbeat()
        if not self._window:
            return
        self._unconfirmed += size
        stalled = self._acks_by_flow_control and self._consumer.at_limit()
        if not self._open_request and (self._unconfirmed > self._window // 2 or stalled):
            self._send_flow_request()
        elif self._open_request and self._unconfirmed - self._confirming >= self._window:
            self._confirming += size

    def interest_changed(self) -> None:
        active = self._has_interest()
        if active == self._active:
            return
        self._active = active
        if active:
            self._inactivity.cancel()
            self._consumer.pump()
        else:
            self._unconfirmed, self._open_request = 0, ""
            self._watch_inactivity()

    @property
    def _subject(self) -> str:
        return str(self._consumer.config["deliver_subject"])

    @property
    def _acks_by_flow_control(self) -> bool:
        return bool(self._consumer.config["ack_policy"] == "flow_control")

    def _has_interest(self) -> bool:
        return self._context.router.has_exact_interest(self._subject, self._consumer.config["deliver_group"])

    def _watch_inactivity(self) -> None:
        if self._consumer.config["inactive_threshold"]:
            self._inactivity.set_in(self._consumer.config["inactive_threshold"])

    def _restart_heartbeat(self) -> None:
        if self._consumer.config["idle_heartbeat"]:
            self._heartbeat.set_in(self._consumer.config["idle_heartbeat"])

    def _on_heartbeat(self) -> None:
        if self._active:
            self._consumer.send_heartbeat(self._subject, stalled_on=self._open_request)
            if self._acks_by_flow_control and self._consumer.pending and not self._open_request:
                self._send_flow_request()
        self._restart_heartbeat()

    def _send_flow_request(self) -> None:
        self._open_request = f"{self._flow_subject}.{self._context.make_name()[:4]}"
        self._confirming = self._unconfirmed
        self._context.send(self._subject, header=headers.status("100 FlowControl Request"), reply=self._open_request)

    def _on_confirmation(self, message: Message) -> None:
        if message.subject != self._open_request:
            return
        self._window = min(self._window * 2, _FLOW_WINDOW)
        self._unconfirmed = max(self._unconfirmed - self._confirming, 0)
        self._open_request, self._confirming = "", 0
        if self._acks_by_flow_control:
            seq = headers.parse_number(headers.get(message.header, "Nats-Last-Stream"))
            delivery = headers.parse_number(headers.get(message.header, "Nats-Last-Consumer"))
            if seq:
                self._consumer.acknowledge(seq, delivery or 0)
        self._consumer.pump()
