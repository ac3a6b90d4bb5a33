"""Members of a group on one virtual time line: clocks that differ, delays, lost messages, pauses, crashes.

The machine under test decides; this module is its shell and its servers. It checks

* always: a commit that succeeds continues exactly where the one before it ended, whoever stored that one;
* while the clocks differ by less than the margin: a member is the stored owner of the partition whenever it takes a message,
  and a message is taken twice only if a member was paused, crashed, or lost the partition;
* after the trouble: every partition has an owner, each member has its share, and nobody works on others.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from jetstream_ext.protocol.membership import Claim, Lose, Membership, Owner, Release, Revoke
from jetstream_ext.protocol.partitions import assign

TTL = 6.0
MARGIN = 0.6
HEARTBEAT = 2.0


class WrongError(AssertionError):
    """A member did what it must not."""


@dataclass
class Record:
    owner: str
    position: int
    revision: int


@dataclass
class View:
    """What the bucket had at one moment."""

    alive: set[str]
    leaving: set[str]
    owners: dict[int, Owner]
    revision: int


class Bucket:
    """The leader of the bucket."""

    def __init__(self) -> None:
        self.revision = 0
        self.records: dict[int, Record] = {}
        self.keys: dict[str, tuple[float, bool]] = {}  # when it expires by the leader's clock, and whether it leaves

    def put_member(self, member: str, now: float, leaving: bool) -> None:
        self.revision += 1
        self.keys[member] = now + TTL, leaving

    def store(self, partition: int, owner: str, position: int, expected: int) -> int | None:
        """Store a record behind the one with the revision `expected`; return its revision, or None."""
        record = self.records.get(partition)
        if (0 if record is None else record.revision) != expected:
            return None
        self.revision += 1
        self.records[partition] = Record(owner, position, self.revision)
        return self.revision

    def view(self, now: float) -> View:
        alive = {member for member, (expires, _) in self.keys.items() if expires > now}
        leaving = {member for member in alive if self.keys[member][1]}
        owners = {number: Owner(record.owner, record.revision) for number, record in self.records.items()}
        return View(alive, leaving, owners, self.revision)


@dataclass
class Work:
    """A partition in the hands of a member."""

    revision: int
    committed: int
    position: int
    revoking: bool = False
    storing: bool = False


@dataclass
class Actor:
    """A member's process."""

    id: str
    rate: float
    offset: float
    machine: Membership
    work: dict[int, Work] = field(default_factory=dict)
    view: View | None = None
    paused_until: float = 0.0
    final: dict[int, int] = field(default_factory=dict)  # where to release partitions
    state: str = "runs"  # or "leaves", "gone"
    leaving: bool = False
    alarm: float = math.inf


class World:
    """One schedule."""

    def __init__(self, seed: int, *, wild: bool, trace: Callable[[str], None] | None = None) -> None:
        self.random = Random(f"{seed}:{wild}")
        self.wild = wild
        self.trace = trace
        self.now = 0.0
        self.partitions = self.random.choice((1, 3, 4, 8))
        self.most = self.random.choice((2, 3, 5))
        self.bucket = Bucket()
        self.skew = 0.0  # of the leader's clock
        self.actors: dict[str, Actor] = {}
        self.taken: dict[int, set[int]] = {number: set() for number in range(self.partitions)}
        self.excuses: set[int] = set()  # partitions of which messages may be taken twice
        self.trouble = True
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    # -- time ---------------------------------------------------------------------------------------------------------

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.at(self.now + seconds, call)

    def say(self, text: str) -> None:
        if self.trace is not None:
            self.trace(f"{self.now:8.3f} {text}")

    def run(self) -> None:
        for _ in range(self.random.randint(1, self.most)):
            self.join()
        end = self.random.uniform(20.0, 60.0)
        self.after(self.random.uniform(0.0, 3.0), self.disturb)
        self._run_until(end)
        self.say("the trouble is over")
        self.trouble = False
        if not any(actor.state == "runs" for actor in self.actors.values()):
            self.join()
        paused = max((actor.paused_until for actor in self.actors.values()), default=0.0)
        self._run_until(max(self.now, paused) + 2 * TTL + 2 * HEARTBEAT + (8 * TTL if self.wild else 0))
        self.check_calm()

    def _run_until(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            self.now, _, call = heapq.heappop(self._events)
            call()
        self.now = end

    def delay(self) -> float:
        if self.trouble and self.random.random() < 0.1:
            return self.random.uniform(0.0, 4.0)
        return self.random.uniform(0.001, 0.05)

    def is_lost(self) -> bool:
        return self.trouble and self.random.random() < 0.05

    @property
    def leader_now(self) -> float:
        return self.now + self.skew

    # -- trouble ------------------------------------------------------------------------------------------------------

    def disturb(self) -> None:
        if not self.trouble:
            return
        running = [actor for actor in self.actors.values() if actor.state == "runs"]
        what = self.random.choice(("join", "join", "join", "leave", "crash", "pause", "pause", "leader"))
        if what == "join" and len(running) < self.most:
            self.join()
        elif what == "leader":
            # The machines measure from the moment of sending; a clock that jumps ahead shortens what is left.
            reach = 4 * TTL if self.wild else MARGIN / 3
            self.skew = self.random.uniform(-reach, reach)
            self.say(f"another leader, {self.skew:+.3f} s")
        elif running and what != "join":
            actor = self.random.choice(running)
            self.say(f"{what} {actor.id}")
            if what == "pause":
                actor.paused_until = max(actor.paused_until, self.now + self.random.uniform(0.1, 4 * TTL))
                self.excuse(actor)
            elif what == "crash":
                actor.state = "gone"
                self.excuse(actor)
            else:
                actor.state = "leaves"
                self.when_awake(actor, lambda: self.leave(actor))
        self.after(self.random.uniform(0.2, 6.0), self.disturb)

    # -- members ------------------------------------------------------------------------------------------------------

    def join(self) -> None:
        name = f"m{len(self.actors)}"
        drift = 0.05 if self.wild else 0.01
        actor = Actor(
            name,
            self.random.uniform(1 - drift, 1 + drift),
            self.random.uniform(0.0, 1000.0),
            Membership(name, self.partitions, ttl=TTL, margin=MARGIN),
        )
        self.actors[name] = actor
        self.say(f"join {name}")
        self.renew(actor)
        self.watch(actor)
        self.tick(actor)

    def excuse(self, actor: Actor) -> None:
        """Messages of these partitions may be handled, and no one else knows."""
        self.excuses |= {number for number in range(self.partitions) if actor.machine.phase(number)} | set(actor.final)

    def leave(self, actor: Actor) -> None:
        actor.leaving = True
        actor.machine.leave()
        self.renew(actor, again=False)
        self.wake(actor)

    def local(self, actor: Actor) -> float:
        return self.now * actor.rate + actor.offset

    def when_awake(self, actor: Actor, call: Callable[[], None]) -> None:
        """Run something in the member's process: not while it is paused, and never after it has gone."""
        if actor.state == "gone":
            return
        if actor.paused_until > self.now:
            self.at(actor.paused_until, lambda: self.when_awake(actor, call))
            return
        call()

    def renew(self, actor: Actor, *, again: bool = True) -> None:
        def send() -> None:
            sent = self.local(actor)
            leaving = actor.leaving

            def arrive() -> None:
                if actor.id in self.bucket.keys or actor.state != "gone":
                    self.bucket.put_member(actor.id, self.leader_now, leaving)
                if not self.is_lost():
                    self.after(self.delay(), lambda: self.when_awake(actor, answered))

            def answered() -> None:
                actor.machine.renewed(sent, self.local(actor))
                self.wake(actor)

            if not self.is_lost():
                self.after(self.delay(), arrive)
            if again and actor.state == "runs":
                self.after(HEARTBEAT / actor.rate, lambda: self.when_awake(actor, send))

        self.when_awake(actor, send)

    def watch(self, actor: Actor) -> None:
        """Let the member see the bucket, again and again."""

        def look() -> None:
            view = self.bucket.view(self.leader_now)

            def arrive() -> None:
                if actor.view is None or view.revision >= actor.view.revision:
                    actor.view = view
                    actor.machine.see(view.alive, view.leaving, view.owners, view.revision)
                    self.wake(actor)

            self.after(self.delay(), lambda: self.when_awake(actor, arrive))
            if actor.state != "gone":
                self.after(0.3, look)

        look()

    def tick(self, actor: Actor) -> None:
        """Take messages and commit, again and again."""

        def work() -> None:
            self.wake(actor)  # as the shell does before it returns a message
            for number, held in list(actor.work.items()):
                if not held.revoking:
                    self.take(actor, number, held)
                    if self.random.random() < 0.4:
                        self.commit(actor, number, held)
            if actor.state != "gone":
                self.after(self.random.uniform(0.05, 0.4), lambda: self.when_awake(actor, work))

        self.when_awake(actor, work)

    def take(self, actor: Actor, number: int, held: Work) -> None:
        record = self.bucket.records.get(number)
        if not self.wild:
            if record is None or record.owner != actor.id:
                raise WrongError(f"{self.now:.3f}: {actor.id} takes a message of {number}, which {record} has")
            if held.position in self.taken[number] and number not in self.excuses:
                raise WrongError(f"{self.now:.3f}: {actor.id} takes message {held.position} of {number} again")
        self.taken[number].add(held.position)
        held.position += 1

    def store(self, actor: Actor, number: int, owner: str, position: int, expected: int, done: Callable[[int | None], None],
              failed: Callable[[], None]) -> None:  # fmt: skip
        """As `FencedWriter.store`: `done` gets the revision, or None if another record is there; `failed`: it is not known."""

        def arrive() -> None:
            revision = self.bucket.store(number, owner, position, expected)
            lost = self.is_lost()
            self.after(self.delay(), lambda: self.when_awake(actor, failed if lost else lambda: done(revision)))

        if self.is_lost():
            self.say(f"a record of {actor.id} for {number} is lost")
            self.after(1.0, lambda: self.when_awake(actor, failed))
        else:
            self.after(self.delay(), arrive)

    def commit(self, actor: Actor, number: int, held: Work) -> None:
        start, end = held.committed, held.position
        before = held.revision
        if start == end or held.storing:
            return
        held.storing = True

        def done(revision: int | None) -> None:
            held.storing = False
            if actor.work.get(number) is not held:
                return
            if revision is None:
                self.fenced(actor, number)
                return
            held.revision, held.committed = revision, max(held.committed, end)
            actor.machine.stored(number, revision)

        def arrive_checked() -> None:
            record = self.bucket.records.get(number)
            if record is not None and record.revision == before and record.position != start:
                raise WrongError(f"{actor.id} commits {start}..{end} of {number} behind {record.position}")

        self.after(0.0, arrive_checked)
        self.store(actor, number, actor.id, end, held.revision, done, lambda: self.doubt(actor, number))

    def doubt(self, actor: Actor, number: int) -> None:
        """An answer was lost: read the record, as `FencedWriter` does."""
        held = actor.work.get(number)
        record = self.bucket.records.get(number)
        if held is None or record is None:
            return
        held.storing = False
        if record.owner != actor.id:
            self.fenced(actor, number)
        elif record.revision > held.revision:
            held.revision, held.committed = record.revision, max(held.committed, record.position)
            actor.machine.stored(number, record.revision)

    def fenced(self, actor: Actor, number: int) -> None:
        self.say(f"{actor.id} is fenced on {number}")
        if self.wild or number in self.excuses:
            self.excuses.add(number)
        held = actor.work.pop(number, None)
        if held is not None:
            actor.machine.fenced(number, held.revision, self.local(actor))
        self.wake(actor)

    # -- the shell of the machine -------------------------------------------------------------------------------------

    def wake(self, actor: Actor) -> None:
        if actor.state == "gone":
            return
        for action in actor.machine.due(self.local(actor)):
            self.say(f"{actor.id}: {action}")
            match action:
                case Claim(number, attempt):
                    self.claim(actor, number, attempt)
                case Revoke(numbers):
                    for number in numbers:
                        self.revoke(actor, number)
                case Release(number, attempt):
                    self.release(actor, number, attempt)
                case Lose(numbers):
                    for number in numbers:
                        self.excuses.add(number)
                        actor.work.pop(number, None)
        if actor.leaving and actor.machine.idle and actor.view is not None:
            owned = [number for number, record in self.bucket.records.items() if record.owner == actor.id]
            if not owned or not actor.machine.is_valid(self.local(actor)):
                self.say(f"{actor.id} has left")
                actor.state = "gone"
                self.bucket.keys.pop(actor.id, None)
                self.excuses |= set(owned)
                return
        until = actor.machine.wake_at(self.local(actor))
        if until < actor.alarm:
            actor.alarm = until
            self.at(max((until - actor.offset) / actor.rate, self.now) + 1e-6, lambda: self.when_awake(actor, ring))

        def ring() -> None:
            actor.alarm = math.inf
            if not actor.machine.is_valid(self.local(actor)):
                self.excuse(actor)
            self.wake(actor)

    def claim(self, actor: Actor, number: int, attempt: int) -> None:
        def read() -> None:
            record = self.bucket.records.get(number)
            position, revision = (1, 0) if record is None else (record.position, record.revision)
            owner = None if record is None else Owner(record.owner, record.revision)
            self.after(self.delay(), lambda: self.when_awake(actor, lambda: answered(owner, position, revision)))

        def answered(owner: Owner | None, position: int, revision: int) -> None:
            if not actor.machine.may_claim(owner):
                failed()
                return
            final = actor.final.get(number, 0)
            if owner is not None and owner.id == actor.id:
                position = max(position, final)
            self.store(actor, number, actor.id, position, revision, lambda at: stored(at, position), failed)

        def stored(revision: int | None, position: int) -> None:
            if revision is None:
                failed()
            elif actor.machine.claimed(number, attempt, revision, self.local(actor)):
                actor.final.pop(number, None)
                actor.work[number] = Work(revision, position, position)
            self.wake(actor)

        def failed() -> None:
            actor.machine.failed(number, attempt, self.local(actor))
            self.wake(actor)

        self.after(self.delay(), read)

    def revoke(self, actor: Actor, number: int) -> None:
        held = actor.work.get(number)
        if held is None:
            actor.machine.revoked(number)
            return
        held.revoking = True

        def done() -> None:
            if held.storing:  # a commit is on its way
                self.after(0.05, lambda: self.when_awake(actor, done))
            elif actor.work.get(number) is held:
                actor.final[number] = actor.work.pop(number).position
                actor.machine.revoked(number)
                self.wake(actor)

        self.after(self.random.uniform(0.0, 2.0), lambda: self.when_awake(actor, done))

    def release(self, actor: Actor, number: int, attempt: int) -> None:
        def read() -> None:
            record = self.bucket.records.get(number)
            self.after(self.delay(), lambda: self.when_awake(actor, lambda: answered(record)))

        def answered(record: Record | None) -> None:
            if record is None or record.owner != actor.id:
                failed()
                return
            position = max(actor.final.get(number, 0), record.position)
            self.store(actor, number, "", position, record.revision, stored, failed)

        def stored(revision: int | None) -> None:
            if revision is None:
                failed()
                return
            actor.final.pop(number, None)
            actor.machine.released(number, attempt, revision)
            self.wake(actor)

        def failed() -> None:
            actor.machine.failed(number, attempt, self.local(actor))
            self.wake(actor)

        self.after(self.delay(), read)

    # -- the end ------------------------------------------------------------------------------------------------------

    def check_calm(self) -> None:
        running = {actor.id: actor for actor in self.actors.values() if actor.state == "runs"}
        wanted = assign(running, self.partitions)
        for name, actor in running.items():
            owned = sorted(number for number, record in self.bucket.records.items() if record.owner == name)
            if owned != wanted[name] or list(actor.machine.owned) != wanted[name]:
                raise WrongError(
                    f"{name} should own {wanted[name]}, is stored for {owned}, works on {actor.machine.owned}"
                )
        if not self.wild:
            return
        for actor in self.actors.values():
            if actor.state == "gone":
                actor.work.clear()
