"""One publisher, one server, and a faulty link between them, in virtual time; a seed determines every fault.

Two kinds of link:

* `wire`: the faults of NATS over TCP. Bytes arrive in order or not at all. A cut loses the bytes in transit, in both
  directions; bytes that the client has not yet written follow on the next connection. Servers stall, lose their leader,
  are overloaded, killed and restarted, and lose messages between each other.
* `chaos`: every frame may be dropped, repeated or delayed by itself, in both directions. No real link does that; a
  machine that works on such a link works on real ones.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from fast_server import Frame, Server

from jetstream_ext import errors
from jetstream_ext.protocol.fast import Event, FastBatch, Input, State
from jetstream_ext.testing.reference.wire.protocol import Publish
from jetstream_ext.types import BatchMessage, EndReason, GapMode

VERSIONS = ("2.14.0", "2.14.6", "2.15.1")
ACK_TIMEOUT = 5.0
TOO_LARGE = 200
REFUSED = 10**6  # an expected sequence that no stream has


class WrongError(AssertionError):
    """The machine broke a rule."""


class WatchedBatch(FastBatch):
    """A batch that reports every change of its state to `changed`."""

    def __init__(self, changed: Callable[[State, Input], None], **options: Any) -> None:
        super().__init__(**options)
        self._changed = changed

    def _happen(self, event: Input, *details: Any, **named: Any) -> list[Event]:
        before = self.state
        events = super()._happen(event, *details, **named)
        if self.state is not before:
            self._changed(before, event)
        return events


class World:
    """One schedule; its seed determines every event."""

    def __init__(self, seed: int, mode: GapMode, *, chaos: bool, trace: Callable[[str], None] | None = None) -> None:
        self.random = random = Random(seed)
        self.mode, self.chaos = mode, chaos
        self._trace = trace
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.server = Server(random.choice(VERSIONS), seed, max_msg_size=TOO_LARGE)
        flow = random.choice((1, 2, 3, 10, 500))
        self.outstanding = random.randint(1, 3)
        self.machine = WatchedBatch(
            self._changed,
            batch_id="b",
            flow=flow,
            max_outstanding_acks=self.outstanding,
            gap=mode,
            timeout=ACK_TIMEOUT,
            keepalive=random.choice((0.0, 2.0, 5.0)),
        )
        self.state = self.machine.state
        self.machine.open("i")
        self.bad = 0.0 if random.random() < 0.3 else random.choice((0.01, 0.05, 0.2))
        self.connected, self.epoch = True, 0
        self.free_at = [0.0, 0.0]  # per direction, when the last frame arrives
        self.unwritten: list[Publish] = []
        self.latency = random.choice((0.0005, 0.01, 0.3))
        self.finals: list[bytes] = []
        self.sent_frames: list[tuple[int, int]] = []
        self.reported: set[int] = set()
        self.acks = [0]
        self.heard_at = 0.0
        self.ops = self._plan()
        self.op: tuple[str, Any] | None = next(self.ops)
        self.op_began = 0.0
        self.flushing = 0
        self.timer_at: float | None = None
        self.number = 0
        self.steps = 0

    # -- the heap ---------------------------------------------------------------------------------------------

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._order), call))

    def say(self, text: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.now:9.4f}  {text}")

    def run(self) -> None:
        self.say(f"{self.mode.value}, {'chaos' if self.chaos else 'wire'}, window {self.machine.room}, bad {self.bad}")
        if not self.chaos and self.bad:
            self._trouble()
        self.at(0.0, self.progress)
        while self._heap and self.op is not None:
            when, _, call = heapq.heappop(self._heap)
            self.now = max(self.now, when)
            call()
            self._check_bounds()
        if self.op is not None:
            raise WrongError(f"no event is left, but {self.op} waits in {self.machine.state}")
        self._settle()
        self._check_end()

    def _changed(self, before: State, event: Input) -> None:
        if before is not self.state:
            raise WrongError(f"{event} found {before} after {self.state}")
        self.state = self.machine.state
        self.say(f"  {before.name} -> {self.state.name} ({event.value})")

    def _settle(self) -> None:
        """Deliver the frames in transit, so that the stored messages are final."""
        self.op = None
        until = self.now + 30
        while self._heap and self._heap[0][0] <= until:
            when, _, call = heapq.heappop(self._heap)
            self.now = max(self.now, when)
            call()

    # -- the publisher ----------------------------------------------------------------------------------------

    def _plan(self) -> Iterator[tuple[str, Any] | None]:
        random = self.random
        for _ in range(random.randint(1, 6)):
            yield random.choices(
                [("add", random.randint(1, 12)), ("many", random.randint(1, 40)), ("flush", 0), ("ping", 0),
                 ("idle", random.choice((0.1, 3.0, 12.0)))],
                weights=[4, 4, 2, 1, 1],
            )[0]  # fmt: skip
        yield random.choices([("commit", 0), ("discard", 0), ("idle", 30.0)], weights=[8, 1, 1])[0]
        yield None

    def _next_op(self) -> None:
        self.op = next(self.ops)
        self.op_began = self.now
        self.flushing = 0

    def progress(self) -> None:
        """Run the publisher until it has to wait: a short version of the shell."""
        machine = self.machine
        while self.op is not None:
            name, value = self.op
            if machine.state is State.ENDED:
                self.say(f"ended: {machine.end_reason} {machine.error!r}")
                self.op = None
                break
            if name == "idle":
                self.at(self.now + value, self._next_after(self.op))
                self.op = ("idling", value)
                break
            if name == "idling":
                break
            if machine.state not in (State.NEW, State.OPEN):
                machine.waiting(self.now)
                break
            if not self._step(name, value):
                machine.waiting(self.now)
                break
        if self.op is None or self.op[0] == "idling":
            machine.not_waiting()
        self._arm()

    def _next_after(self, op: tuple[str, Any]) -> Callable[[], None]:
        def ended() -> None:
            if self.op == ("idling", op[1]):
                self._next_op()
                self.progress()

        return ended

    def _step(self, name: str, value: int) -> bool:
        """Take one step of an operation; return False if it has to wait."""
        machine = self.machine
        if name in ("add", "many"):
            if machine.room <= 0:
                return False
            if name == "add":
                self.write(machine.add(self._message(), self.now))
                taken = 1
            else:
                entries = (self._message() for _ in range(value))
                data, taken, _, _ = machine.add_many(entries, self.now)
                self.write(data)
            base = machine.window.base
            refused = len({each.seq for each in machine.reports.errors if each.seq > base})
            if machine.sent - base - refused > machine.window.flow * self.outstanding:
                raise WrongError("sent beyond the window")
            if value > taken:
                self.op = (name, value - taken)
            else:
                self._next_op()
        elif name == "flush" and machine.sent:
            if not self.flushing:
                self.flushing = machine.sent
                if not machine.is_settled(machine.sent):
                    self.write(machine.ping(self.now))
            if not machine.is_settled(self.flushing):
                return False
            self._check_flushed()
            self._next_op()
        elif name == "ping" and machine.sent:
            if not self.flushing:
                self.flushing = machine.window.pongs + 1
                self.write(machine.ping(self.now))
            if machine.window.pongs < self.flushing:
                return False
            self._next_op()
        elif name == "commit" and machine.sent:
            self.write(machine.commit(self.now))
            return False
        elif name == "discard":
            machine.discard()
        else:
            self._next_op()
        return True

    def _message(self) -> BatchMessage:
        self.number += 1
        payload = b"%d" % self.number
        kind = self.random.random()
        if kind < self.bad / 4:
            return BatchMessage("s.1", payload.rjust(TOO_LARGE + 1, b"0"))
        if kind < self.bad / 2:
            return BatchMessage("s.1", payload, expected_last_seq=REFUSED)
        return BatchMessage("s.1", payload)

    def _arm(self) -> None:
        due = self.machine.next_timer()
        if due is not None and (self.timer_at is None or due < self.timer_at):
            self.timer_at = due
            self.at(due, self._fire)

    def _fire(self) -> None:
        if self.timer_at is None or self.now < self.timer_at:
            return
        self.timer_at = None
        self.happened(*self.machine.handle_timer(self.now))

    def happened(self, events: list[Event], out: bytes) -> None:
        self.write(out)
        for event in events:
            self.say(f"  {event}")
        self.acks.append(self.machine.acked)
        if self.machine.acked < self.acks[-2]:
            raise WrongError("acknowledgements went back")
        self.progress()

    # -- the link ---------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if not data:
            return
        for message in Server.cut(data):
            *_, seq, op, _ = message.reply.split(".")
            self._check_sent(int(seq), int(op))
            self.say(f"→ {seq} op {op}")
            if not self.connected:
                continue  # the connection refuses the message; it has a sequence, but is never sent
            if self.chaos:
                for delay in self._fates():
                    self.at(self.now + delay, self._arrival(message, self.epoch))
            else:
                self._send(message)

    def _send(self, message: Publish) -> None:
        when = self.free_at[0] = max(self.free_at[0], self.now + self.random.random() * self.latency)
        self.at(when, self._arrival(message, self.epoch))

    def _fates(self) -> list[float]:
        """Return when each copy of a frame arrives."""
        random = self.random
        if random.random() < self.bad / 2:
            return []
        copies = 2 if random.random() < self.bad / 2 else 1
        return [self.latency + (random.random() * 2.0 if random.random() < self.bad else 0.0) for _ in range(copies)]

    def _arrival(self, message: Publish, epoch: int) -> Callable[[], None]:
        def arrive() -> None:
            if epoch != self.epoch:
                return  # it was in transit when the connection was cut
            is_message = message.reply.rsplit(".", 2)[1] in ("0", "1")
            if not self.chaos and is_message and self.random.random() < self.bad / 8:
                self.say(f"✗ {message.reply} vanishes")
                return
            self.reply(self.server.take(message, self.now))

        return arrive

    def reply(self, frames: list[Frame]) -> None:
        if not self.connected:
            return
        for frame in frames:
            if b'"batch":' in frame[1]:
                self.finals.append(frame[1])
            if self.chaos:
                for delay in self._fates():
                    self.at(self.now + delay, self._delivery(frame, self.epoch))
            else:
                when = self.free_at[1] = max(self.free_at[1], self.now + self.random.random() * self.latency)
                self.at(when, self._delivery(frame, self.epoch))

    def _delivery(self, frame: Frame, epoch: int) -> Callable[[], None]:
        def deliver() -> None:
            if epoch != self.epoch:
                return
            self.say(f"← {frame[0].decode()} {frame[1].decode()!r}")
            self.heard_at = self.now
            self.happened(*self.machine.receive([frame], self.now))

        return deliver

    # -- trouble on the wire ----------------------------------------------------------------------------------

    def _trouble(self) -> None:
        random = self.random
        for _ in range(random.randint(0, 4)):
            kind = random.choice((self._cut, self._cut, self._stall, self._election, self._overload, self._kill))
            self.at(random.random() * random.choice((10 * self.latency, 50 * self.latency, 10.0)), kind)

    def _stall(self) -> None:
        self.say("the server stalls")
        until = self.now + self.random.choice((0.5, 4.0, 8.0))
        self.free_at = [max(self.free_at[0], until), max(self.free_at[1], until)]

    def _election(self) -> None:
        self.say("the leader is away")
        self.server.leaderless = True
        self.at(self.now + self.random.choice((0.1, 2.0, 7.0)), self._elected)

    def _elected(self) -> None:
        self.say("a new leader")
        self.reply(self.server.new_leader(self.now))

    def _overload(self) -> None:
        self.say("overload")
        self.server.overloaded = True

        def over() -> None:
            self.server.overloaded = False

        self.at(self.now + self.random.choice((0.01, 1.0, 7.0)), over)

    def _kill(self) -> None:
        self.say("the server is killed")
        self.server.restart(self.now)
        self._cut()

    def _cut(self) -> None:
        if not self.connected:
            return
        self.say("the connection is cut")
        self.connected = False
        self.epoch += 1
        self.free_at = [self.now, self.now]
        events = self.machine.disconnected(self.now)
        if self.random.random() < 0.9:
            self.at(self.now + self.random.choice((0.01, 0.5, 3.0, 6.0)), self._reconnect)
        self.happened(events, b"")

    def _reconnect(self) -> None:
        self.say("the connection is back")
        self.connected = True
        self.heard_at = self.now
        self.happened([], self.machine.reconnected(self.now))

    # -- what must hold ---------------------------------------------------------------------------------------

    def _check_sent(self, seq: int, op: int) -> None:
        ends = op == 3 and seq == self.machine.sent + 1  # a batch that ends here ends on the server, once
        if self.machine.state is State.ENDED and (not ends or any(each == 3 for _, each in self.sent_frames)):
            raise WrongError("something was sent after the end")
        if op in (0, 1):
            if seq != sum(1 for _, each in self.sent_frames if each in (0, 1)) + 1 or (op == 0) != (seq == 1):
                raise WrongError(f"message {seq} op {op} out of turn")
            if any(each == 3 for _, each in self.sent_frames):
                raise WrongError("a message after the end of the batch")
        if op == 4 and any(each == 3 for _, each in self.sent_frames):
            raise WrongError("a ping after the commit")
        self.sent_frames.append((seq, op))

    def _check_bounds(self) -> None:
        self.steps += 1
        if self.now > 3000 or self.steps > 20_000:
            raise WrongError(f"{self.op} never ends")
        waits = self.op is not None and self.op[0] != "idling" and self.machine.state is not State.ENDED
        since = max(self.heard_at, self.op_began)
        if waits and self.now > since + 2 * ACK_TIMEOUT + 0.001:
            raise WrongError(f"{self.op} waits since {since:g}, and it is {self.now:g}")

    def _known_lost(self) -> set[int]:
        """Return the messages that were reported as lost, refused or in doubt."""
        machine = self.machine
        lost = {seq for gap in machine.reports.gaps for seq in range(gap.first_lost, gap.seq)}
        lost |= {error.seq for error in machine.reports.errors}
        return lost | {seq for doubt in machine.reports.in_doubt for seq in range(doubt.first, doubt.last + 1)}

    def _check_flushed(self) -> None:
        if self.chaos and self.mode is GapMode.OK:
            return  # the report of a loss may itself be lost
        missing = set(range(1, self.flushing + 1)) - set(self.server.stored())
        if self.mode is GapMode.OK:
            missing -= self._known_lost()
        if missing:
            raise WrongError(f"flush returned, but {sorted(missing)} are neither stored nor reported")

    def _check_end(self) -> None:
        machine, stored = self.machine, set(self.server.stored())
        if machine.next_timer() is not None and machine.state is State.ENDED:
            raise WrongError("a timer after the end")
        acked = set(range(1, machine.acked + 1))
        if self.mode is GapMode.FAIL and not acked <= stored:
            raise WrongError(f"acknowledged, but not stored: {sorted(acked - stored)}")
        if self.mode is GapMode.OK and not self.chaos and not acked <= stored | self._known_lost():
            raise WrongError(f"neither stored nor reported: {sorted(acked - stored - self._known_lost())}")
        if machine.state is not State.ENDED:
            return
        error = machine.error
        if machine.ack is not None and b'"seq":%d,' % machine.ack.seq not in b"".join(self.finals):
            raise WrongError("a final ack that the server did not send")
        everything = set(range(1, machine.sent + 1))
        if machine.end_reason is EndReason.COMMITTED:
            if machine.ack is None or error is not None:
                raise WrongError("committed without a final ack")
            if self.mode is GapMode.FAIL and not everything <= stored:
                raise WrongError(f"committed without {sorted(everything - stored)}")
        elif machine.end_reason is not EndReason.DISCARDED and error is None:
            raise WrongError("ended without an error")
        if isinstance(error, errors.BatchError):
            if (error.sent, error.acked, error.ack) != (machine.sent, machine.acked, machine.ack):
                raise WrongError("the error and the batch disagree")
            if error.outcome == "not_stored" and stored and not self.chaos:
                raise WrongError("the outcome is not_stored, but messages are stored")
            if error.outcome == "stored" and not everything <= stored:
                raise WrongError("the outcome is stored, but messages are missing")
        lost = range(error.first_lost, error.last_lost + 1) if isinstance(error, errors.BatchGapError) else ()
        if stored.intersection(lost) and not self.chaos:
            raise WrongError(f"stored, but named in the error as lost: {error}")
        if not self.chaos:
            gaps = {seq for gap in machine.reports.gaps for seq in range(gap.first_lost, gap.seq)}
            if stored & gaps:
                raise WrongError(f"stored, but reported as lost: {sorted(stored & gaps)}")
