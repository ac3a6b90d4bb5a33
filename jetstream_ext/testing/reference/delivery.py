"""Where a consumer's messages go: to waiting pull requests, or to a subject."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import headers, ids, times
from .gojson import BOOL, DURATION, INT, STRING, JsonError, Struct, decode

if TYPE_CHECKING:
    from .consumer import Consumer
    from .timers import Timer

__all__ = ["Pull", "Push"]

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


@dataclass(eq=False, slots=True)
class _Waiting:
    """A pull request that is not yet answered in full."""

    reply: str
    left: int
    max_bytes: int
    no_wait: bool
    expires: int | None
    heartbeat: int
    next_beat: int
    delivered: int = 0

    def pending(self) -> tuple[tuple[str, str], ...]:
        """Return the lines that say what is missing."""
        return (("Nats-Pending-Messages", str(self.left)), ("Nats-Pending-Bytes", str(self.max_bytes)))


class Pull:
    """The queue of pull requests of a consumer."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._queue: list[_Waiting] = []
        self._timer: Timer | None = None
        self._idle: Timer | None = None
        self._last = consumer.stream.now
        self._watch_idle()

    def close(self, *, deleted: bool = True) -> None:
        """Send every request away."""
        for timer in (self._timer, self._idle):
            if timer is not None:
                timer.cancel()
        for each in self._queue if deleted else []:
            self._status(each.reply, "409 Consumer Deleted")
        self._queue = []

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    def info_json(self) -> dict[str, Any]:
        """Return what an info reply says about push delivery: nothing."""
        return {}

    def ready(self) -> bool:
        """Whether a message could go out."""
        return bool(self._queue)

    def interest_changed(self) -> None:
        """Do nothing: interest is looked at when a message is there."""

    def request(self, reply: str, payload: bytes) -> None:
        """Take a request for messages."""
        config = self._consumer.config
        now = self._consumer.stream.now
        try:
            wanted = _parse(payload)
        except JsonError as error:
            self._status(reply, f"400 Bad Request - {error}")
            return
        batch, expires, max_bytes = wanted.get("batch", 0), wanted.get("expires", 0), wanted.get("max_bytes", 0)
        if 0 < config["max_batch"] < batch:
            self._status(reply, f"409 Exceeded MaxRequestBatch of {config['max_batch']}")
        elif 0 < config["max_expires"] < expires:
            self._status(reply, f"409 Exceeded MaxRequestExpires of {times.format_duration(config['max_expires'])}")
        elif 0 < config["max_bytes"] < max_bytes:
            self._status(reply, f"409 Exceeded MaxRequestMaxBytes of {config['max_bytes']}")
        elif self._has_room(reply, wanted):
            beat = wanted.get("idle_heartbeat", 0)
            end = now + expires if expires else None
            no_wait = wanted.get("no_wait", False)
            self._queue.append(_Waiting(reply, batch, max_bytes, no_wait, end, beat, now + beat))
            self._consumer.pump()

    def _has_room(self, reply: str, wanted: dict[str, Any]) -> bool:
        consumer = self._consumer
        if wanted.get("no_wait", False):
            pending = consumer.cursor.num_pending() + len(consumer.redeliver)
            if pending == 0 and not wanted.get("expires", 0):
                self._touch()
                self._status(reply, "404 No Messages")
                return False
            self._expire(end_of_stream=False)
            if 0 < pending < sum(each.left for each in self._queue):
                self._touch()
                self._status(reply, "408 Requests Pending")
                return False
        if len(self._queue) >= consumer.config["max_waiting"]:
            self._expire(end_of_stream=False)
        if len(self._queue) >= consumer.config["max_waiting"]:
            if not wanted.get("idle_heartbeat", 0):
                self._status(reply, "409 Exceeded MaxWaiting")
            return False
        return True

    def take(self, size: int) -> _Waiting | None:
        """Return the request that gets the next message, `None` if there is none any more."""
        consumer = self._consumer
        while self._queue:
            each = self._queue[0]
            if each.expires is not None and each.expires <= consumer.stream.now:
                self._status(each.reply, "408 Request Timeout", *each.pending())
                del self._queue[0]
                continue
            if each.max_bytes > 0:
                if size > each.max_bytes:
                    self._status(each.reply, "409 Message Size Exceeds MaxBytes", *each.pending())
                    del self._queue[0]
                    continue
                each.max_bytes -= size
                if each.max_bytes == 0:
                    each.left = 1
            if not consumer.stream.jetstream.has_interest(each.reply):
                del self._queue[0]
                continue
            each.delivered += 1
            each.left -= 1
            del self._queue[0]
            if each.left > 0:
                self._queue.append(each)
                each.next_beat = consumer.stream.now + each.heartbeat
            return each
        return None

    def target(self, taken: _Waiting) -> tuple[str, bool]:
        """Return where a message goes, and whether bytes were left over when the request was done."""
        self._touch()
        return taken.reply, taken.left <= 0 < taken.max_bytes

    def finish(self, taken: _Waiting) -> None:
        """Say that a request got all its messages and not all its bytes."""
        self._status(taken.reply, "409 Batch Completed", *taken.pending())

    def sent(self, size: int) -> None:
        """Take no note: pull requests are their own flow control."""

    def idle(self, *, end_of_stream: bool) -> None:
        """Look after the requests that go on waiting."""
        self._expire(end_of_stream=end_of_stream)

    def _expire(self, *, end_of_stream: bool) -> None:
        stream = self._consumer.stream
        now = stream.now
        for each in list(self._queue):
            if each.expires is not None and now >= each.expires:
                self._status(each.reply, "408 Request Timeout", *each.pending())
                self._queue.remove(each)
            elif end_of_stream and each.no_wait and (each.expires is None or each.delivered):
                if stream.profile.metadata:
                    self._status(each.reply, "404 No Messages")
                else:
                    self._status(each.reply, "408 Request Timeout", *each.pending())
                self._queue.remove(each)
            elif not stream.jetstream.has_interest(each.reply):
                self._queue.remove(each)
            elif each.heartbeat and now >= each.next_beat:
                self._consumer.send_heartbeat(each.reply)
                each.next_beat = now + each.heartbeat
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        whens = [each.next_beat for each in self._queue if each.heartbeat]
        whens += [each.expires for each in self._queue if each.expires is not None]
        if whens:
            self._timer = self._consumer.stream.at(min(whens), lambda: self._expire(end_of_stream=True))

    def _status(self, reply: str, line: str, *lines: tuple[str, str]) -> None:
        self._consumer.stream.send(reply, header=headers.status(line, *lines))

    def _touch(self) -> None:
        self._last = self._consumer.stream.now

    def _watch_idle(self) -> None:
        threshold = self._consumer.config["inactive_threshold"]
        if threshold:
            self._idle = self._consumer.stream.at(self._last + threshold + _JITTER, self._check_idle)

    def _check_idle(self) -> None:
        consumer = self._consumer
        if self._queue or consumer.stream.now - self._last < consumer.config["inactive_threshold"]:
            self._last = consumer.stream.now if self._queue else self._last
            self._watch_idle()
        else:
            consumer.delete()


def _parse(payload: bytes) -> dict[str, Any]:
    text = payload.strip()
    if text.startswith(b"{"):
        wanted = decode(text, _NEXT, strict=False)
        if wanted.get("idle_heartbeat", 0) * 2 > wanted.get("expires", 0) and wanted.get("idle_heartbeat", 0) > 0:
            raise JsonError("heartbeat value too large")
        return wanted
    return {"batch": int(text) if _NUMBER.fullmatch(text) else 1}


class Push:
    """The deliver subject of a consumer, with heartbeats and flow control."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._window = _FLOW_WINDOW // 16 if consumer.config["flow_control"] else 0
        self._unconfirmed = 0
        self._asked = 0
        self._question = ""
        self._beat: Timer | None = None
        self._idle: Timer | None = None
        stream = consumer.stream
        self.active: bool = self._interest()
        self._subscription = stream.jetstream.respond_to(f"$JS.FC.{stream.name}.{consumer.name}.*", self._answered)
        self._restart_heartbeat()
        if not self.active:
            self._watch_idle()

    def close(self, *, deleted: bool = True) -> None:
        """Stop."""
        for timer in (self._beat, self._idle):
            if timer is not None:
                timer.cancel()
        self._consumer.stream.jetstream.ignore(self._subscription)

    @property
    def waiting(self) -> int:
        """How many pull requests wait: none."""
        return 0

    def info_json(self) -> dict[str, Any]:
        """Return what an info reply says about push delivery."""
        return {"push_bound": True} if self.active else {}

    def ready(self) -> bool:
        """Whether a message may go out."""
        return self.active and not (self._window and self._unconfirmed > self._window)

    def request(self, reply: str, payload: bytes) -> None:
        """Refuse a pull request."""
        self._consumer.stream.send(reply, header=headers.status("409 Consumer is push based"))

    def take(self, size: int) -> str | None:
        """Return the deliver subject."""
        return str(self._consumer.config["deliver_subject"])

    def target(self, taken: str) -> tuple[str, bool]:
        """Return where a message goes."""
        return taken, False

    def finish(self, taken: str) -> None:
        """Do nothing: there is no request to finish."""

    def sent(self, size: int) -> None:
        """Take note of a message that went out, and ask for confirmation if many did."""
        self._restart_heartbeat()
        if not self._window:
            return
        self._unconfirmed += size
        consumer = self._consumer
        stalled = consumer.config["ack_policy"] == "flow_control" and consumer.at_limit()
        if not self._question and (self._unconfirmed > self._window // 2 or stalled):
            self._ask()
        elif self._question and self._unconfirmed - self._asked >= self._window:
            self._asked += size

    def idle(self, *, end_of_stream: bool) -> None:
        """Do nothing: the heartbeat has its own timer."""

    def interest_changed(self) -> None:
        """See whether somebody listens."""
        active = self._interest()
        if active == self.active:
            return
        self.active = active
        if active:
            if self._idle is not None:
                self._idle.cancel()
            self._consumer.pump()
        else:
            self._unconfirmed, self._question = 0, ""
            self._watch_idle()

    def _interest(self) -> bool:
        config = self._consumer.config
        return self._consumer.stream.jetstream.has_listener(config["deliver_subject"], config["deliver_group"])

    def _watch_idle(self) -> None:
        consumer = self._consumer
        threshold = consumer.config["inactive_threshold"]
        if threshold:
            self._idle = consumer.stream.at(consumer.stream.now + threshold, consumer.delete)

    def _restart_heartbeat(self) -> None:
        consumer = self._consumer
        if self._beat is not None:
            self._beat.cancel()
        if consumer.config["idle_heartbeat"]:
            self._beat = consumer.stream.at(consumer.stream.now + consumer.config["idle_heartbeat"], self._on_heartbeat)

    def _on_heartbeat(self) -> None:
        consumer = self._consumer
        if self.active:
            consumer.send_heartbeat(consumer.config["deliver_subject"], stalled_on=self._question)
            if consumer.config["ack_policy"] == "flow_control" and consumer.pending and not self._question:
                self._ask()
        self._restart_heartbeat()

    def _ask(self) -> None:
        consumer = self._consumer
        stream = consumer.stream
        self._question = f"$JS.FC.{stream.name}.{consumer.name}.{ids.short(stream.random)[:4]}"
        self._asked = self._unconfirmed
        header = headers.status("100 FlowControl Request")
        stream.send(consumer.config["deliver_subject"], header=header, reply=self._question)

    def _answered(self, message: Any) -> None:
        if message.subject != self._question:
            return
        self._window = min(self._window * 2, _FLOW_WINDOW)
        self._unconfirmed = max(self._unconfirmed - self._asked, 0)
        self._question, self._asked = "", 0
        consumer = self._consumer
        if consumer.config["ack_policy"] == "flow_control":
            seq = headers.parse_number(headers.get(message.header, "Nats-Last-Stream"))
            delivery = headers.parse_number(headers.get(message.header, "Nats-Last-Consumer"))
            if seq:
                consumer.acknowledge(seq, delivery or 0)
        consumer.pump()
