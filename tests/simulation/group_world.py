"""Members of a group on one virtual time line: clocks that differ, delays, lost messages, pauses, crashes.

The machine under test decides; this module is its shell, written like `log.membership`, `log.assignment` and `log.group_worker`, and its servers.
It checks

* always: a commit that succeeds continues exactly where the one before it ended, whoever stored that one; nothing is
  committed that was not handled; the first handlings of a partition's messages are in order; in an exactly-once group no
  output is stored twice, and the state of a partition is that of its position; a partition that was released has its
  position behind all that was handled;
* while the clocks differ by less than the margin: a member is the stored owner of the partition whenever it takes messages;
* after the trouble: every member has its share, works on it, and nobody works on anything else.

Each task of a member is a coroutine. It waits only for `Signal`: an answer, a timer, a lock.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from jetstream_ext.log.state import Changes, WorkerState
from jetstream_ext.protocol.membership import Do, Membership, Owner, Phase
from jetstream_ext.protocol.partitions import assign
from jetstream_ext.protocol.records import Total

TTL: Final = 6.0
MARGIN: Final = 0.6
HEARTBEAT: Final = 2.0
TIMEOUT: Final = 1.0
PATIENCE: Final = 8.0
LEAVE_TIMEOUT: Final = 1.0
REVOKE_TIMEOUT: Final = 3.0


NO_JOB: Final[Any] = None  # a state without TTLs needs it only for its errors


class WrongError(AssertionError):
    """A member did what it must not."""


class Cancelled(BaseException):
    """A task was cancelled."""


class LostError(Exception):
    """No answer came in time."""


class MovedError(Exception):
    """Another writer has stored a record."""


# -- the servers ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Record:
    owner: str
    position: int
    revision: int
    tag: int  # which store wrote it, as the payload says
    total: Total = field(default_factory=Total)  # of the state, in the output stream


@dataclass(slots=True, eq=False)
class View:
    """What the bucket had at one moment."""

    alive: frozenset[str]
    leaving: frozenset[str]
    owners: dict[int, Owner]
    revision: int


class Servers:
    """The leaders of the bucket, and of the output stream of an exactly-once group, which keeps every position."""

    def __init__(self) -> None:
        self.revision = 0
        self.records: dict[int, Record] = {}
        self.keys: dict[str, tuple[float, bool]] = {}  # when it expires by the leader's clock, and whether it leaves
        self.outputs: dict[int, list[Record]] = {}
        self.states: dict[int, dict[str, bytes]] = {}  # of each partition the newest messages of the keys
        self._view: View | None = None

    def put_member(self, member: str, now: float, leaving: bool) -> int:
        self.revision += 1
        self.keys[member] = now + TTL, leaving
        self._view = None
        return self.revision

    def delete_member(self, member: str) -> None:
        self.keys.pop(member, None)
        self._view = None

    def expire(self, now: float) -> None:
        gone = [member for member, (expires, _) in self.keys.items() if expires <= now]
        for member in gone:
            del self.keys[member]
            self._view = None

    def view(self, now: float) -> View:
        self.expire(now)
        if self._view is None or self._view.revision != self.revision:
            leaving = frozenset(member for member, (_, leaves) in self.keys.items() if leaves)
            owners = {number: Owner(record.owner, record.revision) for number, record in self.records.items()}
            self._view = View(frozenset(self.keys), leaving, owners, self.revision)
        return self._view


# -- tasks ------------------------------------------------------------------------------------------------------------


class Signal:
    """What a task waits for."""

    __slots__ = ("answer", "done", "error", "task")

    def __init__(self) -> None:
        self.done = False
        self.answer: Any = None
        self.error: Exception | None = None
        self.task: Task | None = None

    def __await__(self) -> Generator[Signal, None, Any]:
        if not self.done:
            yield self
        if self.error is not None:
            raise self.error
        return self.answer

    def set(self, answer: Any = None, error: Exception | None = None) -> None:
        if not self.done:
            self.done, self.answer, self.error = True, answer, error
            if self.task is not None:
                self.task.wake()


class Task:
    """A coroutine that runs until it waits."""

    __slots__ = ("_coroutine", "_running", "_waits_for", "actor", "done", "ended")

    def __init__(self, actor: Actor, coroutine: Coroutine[Signal, None, None]) -> None:
        self.done = False
        self.actor = actor
        self.ended = Signal()
        self._coroutine = coroutine
        self._waits_for: Signal | None = None
        self._running = False

    def wake(self) -> None:
        """Go on once what runs now waits."""
        self.actor.world.ready.append(self)

    def resume_when_awake(self) -> None:
        self.actor.when_awake(self.resume)

    def resume(self, error: BaseException | None = None) -> None:
        if self.done:
            return
        self._running = True
        self._waits_for = None
        try:
            signal = self._coroutine.send(None) if error is None else self._coroutine.throw(error)
        except (StopIteration, Cancelled):
            self.done = True
            self.ended.set()
        else:
            signal.task = self
            self._waits_for = signal
        finally:
            self._running = False

    def cancel(self) -> None:
        if self.done or self._running:
            return
        if self._waits_for is not None:
            self._waits_for.task = None
            self.resume(Cancelled())
        else:
            self._coroutine.close()
            self.done = True


class Lock:
    def __init__(self) -> None:
        self.locked = False
        self._waiting: deque[Signal] = deque()

    async def __aenter__(self) -> None:
        while self.locked:
            signal = Signal()
            self._waiting.append(signal)
            try:
                await signal
            except Cancelled:
                self._wake_next()
                raise
        self.locked = True

    async def __aexit__(self, *_: object) -> None:
        self.locked = False
        self._wake_next()

    def _wake_next(self) -> None:
        while self._waiting and not self.locked:
            signal = self._waiting.popleft()
            if signal.task is not None:
                signal.set()
                return


# -- members ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Held:
    """A partition in the hands of a member."""

    number: int
    writer: Writer
    committed: int
    position: int
    in_hand: int | None = None
    ending: bool = False
    handed_over: bool = False
    lock: Lock = field(default_factory=Lock)
    task: Task | None = None

    @property
    def handled(self) -> int:
        return self.position if self.in_hand is None else self.in_hand

    @property
    def is_busy(self) -> bool:
        return self.in_hand is not None or self.lock.locked or (self.task is not None and not self.task.done)


class Actor:
    """A member's process."""

    def __init__(self, world: World, name: str, rate: float, offset: float) -> None:
        self.world = world
        self.id = name
        self.rate = rate
        self.offset = offset
        self.machine = Membership(name, world.partitions, ttl=TTL, margin=MARGIN)
        self.held: dict[int, Held] = {}
        self.view: View | None = None
        self.state = "runs"  # or "leaves", "gone"
        self.leaving = False
        self.paused_until = self.blind_until = self.cut_until = 0.0
        self.reads_first = False  # after a pause: answers before timers
        self.idle: Signal = Signal()
        self.callbacks = Lock()
        self.tasks: list[Task] = []
        self._alarm = math.inf

    @property
    def local(self) -> float:
        return self.world.now * self.rate + self.offset

    def sleep(self, seconds: float) -> Signal:
        signal = Signal()
        self.world.after(seconds / self.rate, lambda: self.when_awake(signal.set))
        return signal

    def when_awake(self, call: Callable[[], None], *, answer: bool = False) -> None:
        """Run something in the process: not while it is paused, and never after it has gone."""
        if self.state == "gone":
            return
        if self.paused_until > self.world.now:
            later = 0.0 if answer is self.reads_first else 1e-6
            self.world.at(self.paused_until + later, lambda: self.when_awake(call, answer=answer))
            return
        call()

    def spawn(self, coroutine: Coroutine[Signal, None, None]) -> Task:
        task = Task(self, coroutine)
        self.tasks = [it for it in self.tasks if not it.done]
        self.tasks.append(task)
        task.wake()
        return task

    def request(self, serve: Callable[[], Any], timeout: float = TIMEOUT) -> Signal:
        """Ask a server; the signal raises LostError if no answer has come within the time by the member's clock."""
        world, signal = self.world, Signal()
        late = world.now + timeout / self.rate
        found: list[Any] = []
        answered = math.inf

        def arrive() -> None:
            found.append(serve())

        if not world.is_lost(self):
            arrives = world.now + world.delay()
            world.at(arrives, arrive)
            if not world.is_lost(self):
                answered = arrives + world.delay()

        def resolve() -> None:
            in_time = answered <= world.now and (self.reads_first or late > world.now - 1e-5)
            if in_time and found:
                signal.set(found[0])
            else:
                signal.set(error=LostError())

        world.at(min(answered, late), lambda: self.when_awake(resolve, answer=answered < late))
        return signal

    # -- joining and leaving -------------------------------------------------------------------------------------

    def start(self) -> None:
        self.spawn(self.renew_often())
        self.spawn(self.follow())
        if not self.world.once:
            self.spawn(self.commit_often())

    def crash(self) -> None:
        self.state = "gone"
        for task in self.tasks:
            task.cancel()

    async def leave(self, seconds: float) -> None:
        self.leaving = True
        self.machine.leave()
        self.step()
        self.world.after(seconds / self.rate, lambda: self.when_awake(self.idle.set))
        try:
            await self.renew()
        except LostError:
            pass
        if not self.machine.idle:
            await self.idle
        clean = self.machine.idle
        self.world.say(f"{self.id} has left{'' if clean else ' in a hurry'}")
        me = self.tasks.pop(next(n for n, it in enumerate(self.tasks) if it._running))
        for task in self.tasks:
            task.cancel()
        for held in self.held.values():
            held.ending = True
        self.held.clear()
        self.tasks = [me]
        world = self.world
        if not world.is_lost(self):
            world.after(world.delay(), lambda: world.servers.delete_member(self.id))
        self.state = "gone"

    async def renew(self) -> None:
        sent, leaving, world = self.local, self.leaving, self.world
        await self.request(
            lambda: world.servers.put_member(self.id, world.leader_now, leaving), min(TIMEOUT, HEARTBEAT)
        )
        self.renewed(sent)

    def renewed(self, sent: float) -> None:
        self.machine.renewed(sent, self.local)
        self.step()

    async def renew_often(self) -> None:
        while True:
            begun = self.local
            try:
                await self.renew()
            except LostError:
                await self.sleep(0.1)
            else:
                await self.sleep(max(0.0, begun + HEARTBEAT - self.local))

    async def follow(self) -> None:
        """See what the bucket has, again and again."""
        world = self.world
        while True:
            if self.blind_until <= world.now:
                try:
                    view = await self.request(lambda: world.servers.view(world.leader_now))
                except LostError:
                    continue
                if view is not self.view and (self.view is None or view.revision >= self.view.revision):
                    self.view = view
                    self.machine.see(view.alive, view.leaving, view.owners, view.revision)
                    self.step()
            await self.sleep(0.25 if world.trouble else 0.8)

    # -- partitions ----------------------------------------------------------------------------------------------

    def step(self) -> None:
        if self.state == "gone" or self.view is None:
            return
        for do, numbers in self.machine.due(self.local):
            self.world.say(f"{self.id}: {do.name} {numbers}")
            match do:
                case Do.CLAIM:
                    self.spawn(self.claim(numbers))
                case Do.REVOKE:
                    for number in numbers:
                        self.in_time(self.held[number])
                case Do.RELEASE:
                    for number in numbers:
                        self.spawn(self.release(number, 0, "left over"))
                case Do.LOSE:
                    for number in numbers:
                        self.lose(number)
        if self.leaving and self.machine.idle:
            self.idle.set()
        until = self.machine.wake_at(self.local)
        if until < self._alarm:
            self._alarm = until
            self.world.at(
                max((until - self.offset) / self.rate, self.world.now) + 1e-9, lambda: self.when_awake(self._ring)
            )

    def _ring(self) -> None:
        self._alarm = math.inf
        self.step()

    async def claim(self, numbers: tuple[int, ...]) -> None:
        claimed: list[Held] = []
        tasks = [self.spawn(self.claim_one(number, claimed)) for number in numbers]
        for task in tasks:
            await task.ended
        async with self.callbacks:
            if any(map(self.is_owned, claimed)):
                await self.callback()
            for held in filter(self.is_owned, claimed):
                self.begin(held)

    def is_owned(self, held: Held) -> bool:
        return self.held.get(held.number) is held and self.machine.phase(held.number) is Phase.OWNED

    async def claim_one(self, number: int, claimed: list[Held]) -> None:
        writer = Writer(self, number)
        try:
            record = await writer.read()
            owner = None if record is None else Owner(record.owner, record.revision)
            if not self.machine.may_claim(number, owner):
                raise MovedError
            position = 1 if record is None else record.position
            revision = await writer.store(self.id, position, "claim")
        except (LostError, MovedError):
            self.machine.failed(number, self.local)
            self.step()
            return
        if self.machine.claimed(number, revision, self.local):
            held = self.held[number] = Held(number, writer, position, position)
            claimed.append(held)

    async def callback(self) -> None:
        if self.world.random.random() < 0.2:
            await self.sleep(self.world.random.uniform(0.0, 2.0))

    def begin(self, held: Held) -> None:
        number = held.number
        self.world.holders[number] = held
        self.world.say(f"{self.id} works on {number} from {held.position}")
        held.task = self.spawn(self.work_once(held) if self.world.once else self.work(held))

    def in_time(self, held: Held) -> None:
        """Revoke a partition within a time; then it is lost."""
        held.ending = True
        task = self.spawn(self.revoke(held))

        def give_up() -> None:
            if task.done:
                return
            task.cancel()
            if self.held.get(held.number) is held:
                self.world.say(f"{self.id} gives up {held.number}")
                self.lose(held.number)
                self.let_go(held, held.committed)

        self.world.after(REVOKE_TIMEOUT / self.rate, lambda: self.when_awake(give_up))

    async def revoke(self, held: Held) -> None:
        if held.task is not None and not held.task.done:
            await held.task.ended
        async with held.lock:
            pass
        async with self.callbacks:
            if self.held.get(held.number) is held:
                await self.callback()
            if self.held.get(held.number) is held:
                held.handed_over = True
                self.drop(held)
                self.let_go(held, 0 if self.world.once else held.handled)
        self.step()

    def let_go(self, held: Held, position: int) -> None:
        if self.machine.handed_over(held.number):
            self.spawn(self.release(held.number, position, "release"))
        self.step()

    async def release(self, number: int, position: int, what: str) -> None:
        writer = Writer(self, number)
        try:
            record = await writer.read()
            if record is None or record.owner != self.id:
                self.machine.released(number, 0 if record is None else record.revision)
                self.step()
                return
            revision = await writer.store("", max(record.position, position), what)
        except (LostError, MovedError):
            self.machine.failed(number, self.local)
        else:
            self.machine.released(number, revision)
        self.step()

    def lose(self, number: int) -> None:
        held = self.held.get(number)
        if held is not None:
            self.world.say(f"{self.id} has lost {number}")
            held.ending = True
            self.drop(held)
            if held.task is not None:
                held.task.cancel()

    def fenced(self, held: Held) -> None:
        if self.held.get(held.number) is held:
            self.world.say(f"{self.id} is fenced on {held.number}")
            self.machine.fenced(held.number, self.local)
            self.lose(held.number)
            self.step()

    def drop(self, held: Held) -> None:
        held.ending = True
        del self.held[held.number]

    # -- messages ------------------------------------------------------------------------------------------------

    def may_go_on(self, held: Held) -> bool:
        if not held.ending and not self.machine.is_valid(self.local):
            self.step()
        return not held.ending

    async def handle(self, held: Held, count: int) -> None:
        """Have messages in hand for a while."""
        world = self.world
        world.take(self, held, count)
        seconds = world.random.uniform(0.0, 0.6) if world.random.random() < 0.95 else world.random.uniform(0.6, 5.0)
        if world.trouble and world.random.random() < 0.05:  # the handler blocks the event loop
            self.paused_until = max(self.paused_until, world.now + seconds)
            self.reads_first = world.random.random() < 0.5
        await self.sleep(seconds)

    async def work(self, held: Held) -> None:
        """As `run` does: one message after the other, and a commit now and then."""
        random = self.world.random
        while self.may_go_on(held):
            held.in_hand = held.position
            held.position += random.randint(1, 5)
            await self.handle(held, held.position - held.in_hand)
            held.in_hand = None
            self.world.handled(held.number, held.position)
            if random.random() < 0.3:
                await self.store_position(held)
            await self.sleep(random.uniform(0.05, 0.6 if self.world.trouble else 4.0))

    async def commit_often(self) -> None:
        while True:
            await self.sleep(1.0 if self.world.trouble else 4.0)
            for held in list(self.held.values()):
                if held.handled > held.committed:
                    self.spawn(self.store_position(held))

    async def store_position(self, held: Held) -> None:
        async with held.lock:
            position = held.handled
            if position <= held.committed or self.held.get(held.number) is not held:
                return
            try:
                revision = await held.writer.store(self.id, position, "commit", held.committed)
            except MovedError:
                self.fenced(held)
                return
            except LostError:
                return
            held.committed = position
            self.machine.stored(held.number, revision)

    async def work_once(self, held: Held) -> None:
        """As a worker of an exactly-once group does: the outputs and the position are one batch in the output stream."""
        writer, random = Writer(self, held.number, outputs=True), self.world.random
        try:
            found = await writer.read()
            while True:
                held.position = 1 if found is None else found.position
                total = Total() if found is None else found.total
                try:
                    await writer.store(self.id, held.position, "claim", total=total)
                    break
                except MovedError:
                    found = await writer.read()
            state = WorkerState(NO_JOB)
            state.begin_with(await writer.read_state(), {})
            if state.total != total:
                await writer.store(self.id, held.position, "outputs", held.position, total=total)
                raise self.world.wrong(f"{self.id} finds another state of {held.number} than that of its position")
            while self.may_go_on(held):
                start = held.in_hand = held.position
                held.position += random.randint(1, 5)
                state.begin()
                key = f"{start % 3}"
                state[key] = b"%d" % (int(state.get(key, b"0")) + held.position - start)
                await self.handle(held, held.position - start)
                step = state.end(failed=False)
                await writer.store(self.id, held.position, "outputs", start, step.after, step.total)
                held.in_hand = None
                await self.sleep(random.uniform(0.05, 0.6 if self.world.trouble else 4.0))
        except MovedError:
            self.fenced(held)
        except LostError:  # its patience is over: the member fails, and is started again by something else
            self.world.say(f"{self.id} fails")
            self.state = "leaves"
            self.spawn(self.leave(LEAVE_TIMEOUT))


class Writer:
    """As `FencedWriter`: each record follows the one before; an answer that was lost is found out."""

    def __init__(self, actor: Actor, number: int, *, outputs: bool = False) -> None:
        self.fence = 0
        self.actor = actor
        self._number = number
        self._outputs = outputs
        self._in_doubt: set[int] = set()

    async def read(self) -> Record | None:
        record: Record | None = await self._patiently(self._newest, self.actor.local + PATIENCE)
        self.fence = 0 if record is None else record.revision
        self._in_doubt.clear()
        return record

    async def read_state(self) -> dict[str, bytes]:
        states, number = self.actor.world.servers.states, self._number
        state: dict[str, bytes] = await self._patiently(
            lambda: dict(states.get(number, {})), self.actor.local + PATIENCE
        )
        return state

    async def store(
        self,
        owner: str,
        position: int,
        what: str,
        start: int = 0,
        changes: Changes | None = None,
        total: Total | None = None,
    ) -> int:
        """Store a record, and what belongs to it. `what` and `start` are for the checks."""
        actor, world = self.actor, self.actor.world
        deadline, tag = actor.local + PATIENCE, next(world.tags)
        while True:
            self._in_doubt.add(tag)
            fence = self.fence
            record = Record(owner, position, 0, tag, total or Total())

            def store(fence: int = fence, record: Record = record) -> int:
                revision = world.store(
                    actor, self._number, record, fence, what, start, self._in_doubt, outputs=self._outputs
                )
                if revision and self._outputs:
                    world.store_state(self._number, record, changes or {})
                return revision

            try:
                revision: int = await actor.request(store)
            except LostError:
                revision = 0
            if not revision:
                newest, follower = await self._patiently(self._ends, deadline)
                if follower is not None and follower.tag in self._in_doubt:
                    if follower.tag == tag:
                        revision = follower.revision
                    else:
                        self.fence = follower.revision
                elif (0 if newest is None else newest.revision) != self.fence:
                    raise MovedError
            if revision:
                self.fence = revision
                self._in_doubt.clear()
                return revision
            if actor.local >= deadline:
                raise LostError
            await actor.sleep(0.1)

    async def _patiently(self, look: Callable[[], Any], deadline: float) -> Any:
        while True:
            try:
                return await self.actor.request(look)
            except LostError:
                if self.actor.local >= deadline:
                    raise
                await self.actor.sleep(0.1)

    def _newest(self) -> Record | None:
        return self.actor.world.newest(self._number, outputs=self._outputs)

    def _ends(self) -> tuple[Record | None, Record | None]:
        """Return the newest record, and the first one behind the fence: the bucket has only the newest."""
        newest = self._newest()
        known = self.actor.world.servers.outputs.get(self._number, []) if self._outputs else [newest] if newest else []
        return newest, next((it for it in known if it.revision > self.fence), None)


# -- the world --------------------------------------------------------------------------------------------------------


class World:
    """One schedule."""

    def __init__(self, seed: int, *, wild: bool, trace: Callable[[str], None] | None = None) -> None:
        self.random = Random(f"{seed}:{wild}")
        self.wild = wild
        self.trace = trace
        self.now = 0.0
        self.once = self.random.random() < 0.3
        self.partitions = self.random.choice((1, 3, 4, 8))
        self.most = self.random.choice((2, 3, 5))
        self.servers = Servers()
        self.skew = 0.0  # of the leader's clock
        self.actors: dict[str, Actor] = {}
        self.trouble = True
        self.away_until = 0.0  # no server answers
        # Of each partition: the first message that nobody has handled, how often messages were taken, and the newest holder.
        self.handled_to = dict.fromkeys(range(self.partitions), 1)
        self.takes = dict.fromkeys(range(self.partitions), 0)
        self.holders: dict[int, Held] = {}
        self.ready: deque[Task] = deque()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.tags = itertools.count(1)  # of the records

    # -- time ---------------------------------------------------------------------------------------------------------

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), call))

    def say(self, text: str) -> None:
        if self.trace is not None:
            self.trace(f"{self.now:8.3f} {text}")

    def run(self) -> None:
        try:
            self._run()
        finally:
            for actor in self.actors.values():
                for task in actor.tasks:
                    task.cancel()

    def _run(self) -> None:
        for _ in range(self.random.randint(1, self.most)):
            self.join()
        end = self.random.uniform(15.0, 45.0)
        self.after(self.random.uniform(0.0, 3.0), self.disturb)
        self._run_until(end)
        self.say("the trouble is over")
        self.trouble = False
        self.away_until = 0.0
        for actor in self.actors.values():
            actor.blind_until = actor.cut_until = 0.0
        paused = max((actor.paused_until for actor in self.actors.values() if actor.state != "gone"), default=0.0)
        self._run_until(max(self.now, paused) + PATIENCE)  # some fail only now
        if not any(actor.state == "runs" for actor in self.actors.values()):
            self.join()
        # Messages that are late may still come, and then keys may be stored that nobody renews.
        self._run_until(self.now + 2 * TTL + 2 * HEARTBEAT + (8 * TTL if self.wild else 0))
        before = dict(self.takes)
        self._run_until(self.now + 12.0)
        self.check_calm(before)

    def _run_until(self, end: float) -> None:
        events, ready = self._events, self.ready
        while True:
            while ready:
                ready.popleft().resume_when_awake()
            if not events or events[0][0] > end:
                break
            self.now, _, call = heapq.heappop(events)
            call()
        self.now = end

    def delay(self) -> float:
        random = self.random
        if self.trouble and (dice := random.random()) < 0.1:
            return random.uniform(0.0, 4.0) if dice > 0.01 else random.uniform(0.0, 2 * TTL)
        return 0.001 + 0.049 * random.random()

    def is_lost(self, actor: Actor) -> bool:
        if not self.trouble:
            return False
        return self.random.random() < 0.04 or self.now < self.away_until or self.now < actor.cut_until

    @property
    def leader_now(self) -> float:
        return self.now + self.skew

    # -- trouble ------------------------------------------------------------------------------------------------------

    def disturb(self) -> None:
        if not self.trouble:
            return
        random = self.random
        running = [actor for actor in self.actors.values() if actor.state == "runs"]
        what = random.choice(
            ("join", "join", "join", "leave", "leave", "crash", "pause", "pause", "pause", "leader", "leader", "blind",
             "cut", "away")
        )  # fmt: skip
        if what == "join":
            if len(running) < self.most:
                self.join()
        elif what == "leader":
            # The machines measure from the moment of sending; a clock that jumps ahead shortens what is left.
            reach = 4 * TTL if self.wild else MARGIN / 3
            self.skew = random.uniform(-reach, reach)
            self.say(f"another leader, {self.skew:+.3f} s")
        elif what == "away":
            self.away_until = self.now + random.uniform(0.2, 1.5 * TTL)
            self.say(f"no leader until {self.away_until:.3f}")
        elif running:
            actor = random.choice(running)
            until = self.now + random.choice((random.uniform(0.1, TTL), random.uniform(0.1, 4 * TTL)))
            self.say(f"{what} {actor.id} (until {until:.3f})")
            if what == "pause":
                actor.paused_until = max(actor.paused_until, until)
                actor.reads_first = random.random() < 0.5
            elif what == "blind":
                actor.blind_until = until
            elif what == "cut":
                actor.cut_until = until
            elif what == "crash":
                actor.crash()
            else:
                actor.state = "leaves"
                seconds = random.choice((LEAVE_TIMEOUT, PATIENCE))
                actor.when_awake(lambda: void(actor.spawn(actor.leave(seconds))))
        self.after(random.uniform(0.1, 5.0), self.disturb)

    def join(self) -> None:
        drift = 0.05 if self.wild else 0.01
        name = f"m{len(self.actors)}"
        actor = self.actors[name] = Actor(
            self, name, self.random.uniform(1 - drift, 1 + drift), self.random.uniform(0.0, 1000.0)
        )
        self.say(f"join {name}")
        actor.start()

    # -- what is checked ----------------------------------------------------------------------------------------------

    def wrong(self, text: str) -> WrongError:
        return WrongError(f"{self.now:.3f}: {text}")

    def newest(self, number: int, *, outputs: bool) -> Record | None:
        if not outputs:
            return self.servers.records.get(number)
        known = self.servers.outputs.get(number)
        return known[-1] if known else None

    def store(
        self, actor: Actor, number: int, record: Record, fence: int, what: str, start: int, own: set[int], *, outputs: bool
    ) -> int:  # fmt: skip
        """Store a record behind the one at `fence`; return its revision, or 0 if another one is there."""
        newest = self.newest(number, outputs=outputs)
        if (0 if newest is None else newest.revision) != fence:
            return 0
        before = 1 if newest is None else newest.position
        if what in ("commit", "outputs"):
            # A position may be stored behind one that this member stored, and whose answer was lost.
            if before != start and (outputs or newest is None or newest.tag not in own or before > record.position):
                raise self.wrong(f"{actor.id} commits {start}..{record.position} of {number} behind {before}")
        elif record.position < before or (what == "claim" and outputs and record.position != before):
            raise self.wrong(f"{actor.id} takes {number} back to {record.position} from {before}, to {what} it")
        if what == "outputs":
            self.handled(number, record.position)
        elif record.position > self.handled_to[number]:
            raise self.wrong(f"{actor.id} commits {number} at {record.position}, handled: {self.handled_to[number]}")
        holder = self.holders.get(number)
        if what == "release" and holder is not None and holder.handed_over and holder.writer.actor is actor:
            newest = self.newest(number, outputs=True) if self.once else record
            if holder.handled > (1 if newest is None else newest.position):
                raise self.wrong(f"{actor.id} releases {number} at {record.position}, has handled {holder.handled}")
        if what == "claim" and holder is not None and holder.writer.actor is not actor:
            del self.holders[number]  # the hand-over came too late
        self.servers.revision += 1
        record.revision = self.servers.revision
        if outputs:
            self.servers.outputs.setdefault(number, []).append(record)
        else:
            self.servers.records[number] = record
        if what != "commit":
            self.say(f"stored: {what} of {number} by {actor.id}, at {record.position}")
        return record.revision

    def store_state(self, number: int, record: Record, changes: Changes) -> None:
        """Store changes of the state with a position; it counts the messages before that."""
        state = self.servers.states.setdefault(number, {})
        for key, (value, _) in changes.items():
            assert value is not None
            state[key] = value
        if sum(map(int, state.values())) != record.position - 1 or record.total.keys != len(state):
            raise self.wrong(f"the state of {number} at {record.position} is {state}")

    def take(self, actor: Actor, held: Held, count: int) -> None:
        number = held.number
        self.takes[number] += 1
        start = held.position - count
        record = self.servers.records.get(number)
        if not self.wild and (record is None or record.owner != actor.id):
            raise self.wrong(f"{actor.id} takes messages of {number}, which {record} has")
        if start > self.handled_to[number]:
            raise self.wrong(f"{actor.id} takes {start} of {number}, but nobody has handled {self.handled_to[number]}")

    def handled(self, number: int, position: int) -> None:
        self.handled_to[number] = max(self.handled_to[number], position)

    def check_calm(self, before: dict[int, int]) -> None:
        running = {actor.id: actor for actor in self.actors.values() if actor.state == "runs"}
        wanted = assign(running, self.partitions)
        for name, actor in running.items():
            owned = sorted(number for number, record in self.servers.records.items() if record.owner == name)
            works = sorted(actor.held)
            if not owned == works == list(actor.machine.owned) == wanted[name]:
                raise self.wrong(
                    f"{name} should own {wanted[name]}, is stored for {owned}, owns {actor.machine.owned}, works on {works}"
                )
        idle = [number for number, takes in self.takes.items() if takes == before[number]]
        if idle:
            raise self.wrong(f"nobody takes messages of {idle}")


def void(_: object) -> None: ...
