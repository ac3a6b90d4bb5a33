"""Groups whose members are started, stopped, killed and paused, on a cluster whose servers are killed."""

import asyncio
import contextlib
import itertools
import os
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import nats.errors
import nats.js.errors
import orjson
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import log
from jetstream_ext.testing import NatsCluster

sys.path.insert(0, str(Path(__file__).parent))

Connect = Callable[..., Awaitable[Client]]

PROGRAM = str(Path(__file__).parent / "group_process.py")
KEYS, PARTITIONS, HEARTBEAT, TTL, EVERY = 24, 8, 1.0, 3, 20
TIMEOUT = 2.0  # of the members' requests
SLOW = 3.0  # seconds that ten processes, which start and compute on two cores, may add to what is measured
MODES = ["once", "iterate", "run"] if os.environ.get("JETSTREAM_EXT_FULL") else ["once", "run"]
SEEDS = range(20 if os.environ.get("JETSTREAM_EXT_FULL") else 1)


class Members:
    """The processes of a group."""

    def __init__(self, urls: list[str], mode: str, dice: random.Random) -> None:
        self.urls, self.mode, self.dice = urls, mode, dice
        self.processes: list[asyncio.subprocess.Process] = []
        self.paused: set[int] = set()
        self.resuming: list[asyncio.Task[None]] = []
        self.events: list[tuple[float, str]] = []

    @property
    def running(self) -> list[asyncio.subprocess.Process]:
        return [it for it in self.processes if it.returncode is None and it.pid not in self.paused]

    async def start(self) -> None:
        label = f"m{len(self.processes)}"
        self.processes.append(
            await asyncio.create_subprocess_exec(sys.executable, PROGRAM, ",".join(self.urls), self.mode, label)
        )

    def note(self, what: str, process: asyncio.subprocess.Process) -> None:
        self.events.append((time.time(), f"{what} m{self.processes.index(process)}"))

    async def disturb(self, longest_pause: float) -> None:
        running = self.running
        what = self.dice.choice(["start", "start", "leave", "kill", "pause"])
        if len(running) < 3 or (what == "start" and len(running) < 10):
            await self.start()
        elif what != "start":
            process = self.dice.choice(running)
            process.send_signal({"leave": signal.SIGTERM, "kill": signal.SIGKILL, "pause": signal.SIGSTOP}[what])
            self.note(what, process)
            if what == "pause":
                self.paused.add(process.pid)
                seconds = self.dice.choice([self.dice.uniform(0.1, 2 * TTL), self.dice.uniform(TTL, longest_pause)])
                self.resuming.append(asyncio.ensure_future(self.resume(process, seconds)))

    async def resume(self, process: asyncio.subprocess.Process, seconds: float) -> None:
        await asyncio.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            self.note("resume", process)
        self.paused.discard(process.pid)

    def resume_all(self) -> None:
        for process in self.processes:
            if process.pid in self.paused and process.returncode is None:
                process.send_signal(signal.SIGCONT)

    async def end(self) -> None:
        for task in self.resuming:
            task.cancel()
        for process in self.processes:
            if process.returncode is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            await process.wait()

    def check(self) -> None:
        codes = {process.returncode for process in self.processes if process.returncode is not None}
        assert codes <= {0, -signal.SIGTERM, -signal.SIGKILL}, "a member ended with an error"


class Inputs:
    """A producer of numbered messages, and the times in which the cluster could store none."""

    def __init__(self, js: JetStreamContext) -> None:
        self.js = js
        self.count = 0
        self.away: list[tuple[float, float]] = []

    async def produce(self, until: float) -> None:
        while time.time() < until:
            await self.store("IN", f"IN.{self.count % KEYS}", b"%d" % self.count)
            self.count += 1
            await asyncio.sleep(0.005)

    async def store(self, stream: str, subject: str, data: bytes) -> None:
        headers = {"Nats-Msg-Id": data.decode()}
        begun = time.time()
        while True:
            with contextlib.suppress(nats.errors.Error, nats.js.errors.Error):
                await self.js.publish(subject, data, timeout=TIMEOUT, headers=headers, stream=stream)
                break
            await asyncio.sleep(0.05)
        if time.time() - begun > 0.5:
            self.away.append((begun, time.time()))

    async def probe(self, subject: str, until: float) -> None:
        """Find the times in which another stream can store nothing."""
        for number in itertools.count():
            if time.time() > until:
                return
            begun = time.time()
            while True:
                with contextlib.suppress(nats.errors.Error, nats.js.errors.Error):
                    await self.js.publish(subject, b"%d" % number, timeout=TIMEOUT)
                    break
                await asyncio.sleep(0.05)
            if time.time() - begun > 0.5:
                self.away.append((begun, time.time()))
            await asyncio.sleep(0.2)

    @property
    def events(self) -> list[tuple[float, str]]:
        return [(first, f"a stream stores nothing until {last % 1000:.2f}") for first, last in self.away]

    def available(self, begin: float, end: float) -> float:
        """Return for how many of these seconds the cluster could store messages.

        A request that a member has sent before that ends only after its timeout.
        """
        at, total = begin, 0.0
        for first, last in sorted((first, last + TIMEOUT) for first, last in self.away):
            if last <= at or first >= end:
                continue
            total += max(0.0, first - at)
            at = last
        return total + max(0.0, end - at)


class Owners:
    """Which members have claimed which partitions, by what they have sent to the group's bucket."""

    def __init__(self) -> None:
        self.labels: dict[str, str] = {}
        self.claims: dict[int, list[tuple[float, str]]] = {number: [] for number in range(PARTITIONS)}

    async def note(self, message: Msg) -> None:
        if not message.data:
            return
        *_, kind, name = message.subject.split(".")
        body = orjson.loads(message.data)
        if kind == "members":
            self.labels[name] = body["label"]
        elif kind == "partitions":
            claims = self.claims[int(name)]
            if not claims or claims[-1][1] != body["owner"]:
                claims.append((time.time(), body["owner"]))

    def events(self, number: int) -> list[tuple[float, str]]:
        return [
            (at, f"{self.labels.get(owner, owner)} claims it" if owner else "it is released")
            for at, owner in self.claims[number]
        ]


async def kill_leaders(
    cluster: NatsCluster,
    js: JetStreamContext,
    dice: random.Random,
    until: float,
    killed: list[float],
    between: tuple[float, float],
) -> None:
    """Kill the leader of one of the streams, and restart it, again and again; note when."""
    while time.time() < until:
        await asyncio.sleep(dice.uniform(*between))
        leader: str | None = None
        with contextlib.suppress(nats.errors.Error, nats.js.errors.Error):
            info = await js.stream_info(dice.choice(["IN", "OUT", "KV_groups"]))
            leader = info.cluster.leader if info.cluster is not None else None
        server = next((it for it in cluster.servers if it.name == leader), None) or dice.choice(cluster.servers)
        await asyncio.to_thread(server.kill)
        killed.append(time.time())
        await asyncio.sleep(dice.uniform(0.2, 2.0))
        await asyncio.to_thread(server.restart)


@pytest.fixture
async def members() -> AsyncIterator[list[Members]]:
    made: list[Members] = []
    yield made
    for each in made:
        await each.end()


async def outputs(js: JetStreamContext) -> list[jsx.StoredMsg]:
    while True:
        try:
            found = [it async for it in jsx.DirectGet(js, "OUT", timeout=20).scan(subject="OUT.*", confirm=True)]
        except (nats.errors.Error, nats.js.errors.Error):
            await asyncio.sleep(0.2)
        else:
            return found


def check_repeats(found: list[jsx.StoredMsg]) -> None:
    """Check that messages are handled again only from a position that was committed.

    A member commits behind `EVERY` messages of a partition, and may handle as many more meanwhile. When one that was paused
    goes on, it still stores the message of the partition that it has in its hands.
    """
    places: dict[int, dict[int, int]] = {}
    for number in range(PARTITIONS):
        mine = sorted({int(it.data) for it in found if partition(it) == number})
        places[number] = {it: place for place, it in enumerate(mine)}
    reached = dict.fromkeys(range(PARTITIONS), 0)  # behind the messages that were handled
    runs: dict[tuple[int, str], tuple[int, int, int]] = {}  # where a member began and is, and how far behind it began
    for message in found:
        number, label = partition(message), (message.headers or {})["Label"]
        place = places[number][int(message.data)]
        begin, end, behind = runs.get((number, label), (0, -1, 0))
        if place not in (end - 1, end):  # the former is stored again, because its ack was lost
            begin, behind = place, reached[number] - place
        assert place == begin or behind <= 2 * EVERY + 2, f"{label} goes on {behind} messages behind in {number}"
        runs[number, label] = begin, place + 1, behind
        reached[number] = max(reached[number], place + 1)


def partition(message: jsx.StoredMsg) -> int:
    return log.partition_of(message.subject.replace("OUT", "IN"), PARTITIONS, [1])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
async def test_every_input_is_handled_in_order(
    cluster: NatsCluster, connect: Connect, full: bool, members: list[Members], mode: str, seed: int
) -> None:
    """Exactly once, where that is promised; and no partition waits for longer than it must."""
    dice = random.Random(f"{mode}:{seed}")
    nc = await connect(cluster.urls)
    js = nc.jetstream(timeout=10)
    for name in ("IN", "OUT"):
        await js.add_stream(name=name, subjects=[f"{name}.>"], num_replicas=3, allow_direct=True, allow_atomic=True)
    group = Members(cluster.urls, mode, dice)
    members.append(group)
    for _ in range(10 if full else 3):
        await group.start()
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(nats.errors.Error, nats.js.errors.Error, KeyError):
                await log.Group.open(js, "IN", "g")
                break
            await asyncio.sleep(0.1)
    owners, killed = Owners(), list[float]()
    await nc.subscribe("$KV.groups.IN.g.>", cb=owners.note)
    end = time.time() + (60 if full else 6)
    inputs = Inputs(js)

    async def disturb() -> None:
        while time.time() < end:
            await asyncio.sleep(1.0 if full else 0.5)
            await group.disturb(60.0 if full else 5.0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(inputs.produce(end))
        tasks.create_task(inputs.probe("OUT.probes.x", end))
        tasks.create_task(inputs.probe("$KV.groups.probe", end))
        tasks.create_task(disturb())
        tasks.create_task(kill_leaders(cluster, js, dice, end, killed, (2.0, 5.0) if full else (1.0, 2.0)))
    if len(group.running) < 2:
        await group.start()
    async with asyncio.timeout(120):
        while len({it.data for it in await outputs(js)}) < inputs.count:
            await asyncio.sleep(0.3)
    group.resume_all()
    await asyncio.sleep(TTL)  # those that were paused may try to store more
    found = await outputs(js)
    group.check()
    numbers = [int(it.data) for it in found]
    assert set(numbers) == set(range(inputs.count)), "nothing is lost"
    if mode == "once":
        assert len(numbers) == inputs.count, "nothing is stored twice"
    by_key: dict[str, list[int]] = defaultdict(list)
    for message in found:
        if (number := int(message.data)) not in by_key[message.subject]:
            by_key[message.subject].append(number)
    for key, each in by_key.items():
        assert each == sorted(each), f"the order of {key}"
    check_repeats(found)
    times: dict[int, list[float]] = defaultdict(list)
    for message in found:
        times[partition(message)].append(message.time.timestamp())
    longest, begin, finish, number = max(
        (inputs.available(begin, min(finish, end)), begin, finish, number)
        for number, each in times.items()
        for begin, finish in itertools.pairwise(each)
    )
    events = [*group.events, *owners.events(number), *inputs.events, *((at, "a server is killed") for at in killed)]
    print(
        f"{mode}, seed {seed}: {inputs.count} inputs, {len(numbers) - inputs.count} repeated; "
        f"partition {number} was idle for {longest:.2f} s, of the {finish - begin:.2f} s from {begin % 1000:.2f} on:"
    )
    for at, text in sorted(events):
        if begin - TTL <= at <= finish:
            print(f"    {at % 1000:.2f} {text}")
    if full:  # the processes of other tests would count, too
        assert longest < TTL + HEARTBEAT + SLOW
