"""Workers with a state whose processes are killed, stopped and doubled, and whose server is killed.

Behind each position, outputs and state are those of the inputs before it, each counted once.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import os
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import nats.errors
import nats.js.errors
import pytest
from clients import connected
from nats.aio.msg import Msg
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import log
from jetstream_ext.testing import NatsServer

sys.path.insert(0, str(Path(__file__).parent))

from state_process import FENCED, PARTITIONS, START

pytestmark = pytest.mark.timeout(900)
FULL = bool(os.environ.get("JETSTREAM_EXT_FULL"))
PROCESS = str(Path(__file__).with_name("state_process.py"))
KEYS = [f"k{n}" for n in range(24)]
ACCOUNTS = [f"a{n}" for n in range(50)]
PAUSE = 5.0  # seconds, longer than the key of a member lasts
LEASE = 10.0  # seconds

Apply = Callable[[dict[str, bytes], jsx.StoredMsg], list[tuple[str, bytes]]]


class Workers:
    """Processes of workers on one server, their inputs, and what they are seen to send."""

    def __init__(self, server: NatsServer, js: JetStreamContext) -> None:
        self.server, self.js = server, js
        self.dice = random.Random()
        self.began = time.monotonic()
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.active: dict[str, str] = {}  # by name the label of the process that has sent outputs last
        self.kills = self.terminated = self.fenced = self.servers = 0
        self._labels = itertools.count()
        self._sent: dict[str, asyncio.Event] = defaultdict(asyncio.Event)  # by name of a worker, and by label

    async def note(self, message: Msg) -> None:
        _, kind, name, *_ = message.subject.split(".")
        self._sent[name].set()
        if kind == "out" and message.headers:
            self.active[name] = message.headers["Label"]
            self._sent[message.headers["Label"]].set()

    async def until_sent(self, name: str) -> None:
        """Wait for the next message of a worker, or the next output of a process."""
        self._sent[name].clear()
        async with asyncio.timeout(90):
            await self._sent[name].wait()

    async def start(self, work: str, name: str, stream: str = "ALL") -> tuple[str, asyncio.subprocess.Process]:
        label = f"p{next(self._labels)}"
        command = [sys.executable, PROCESS, self.server.url, work, name, stream, label]
        process = self.processes[label] = await asyncio.create_subprocess_exec(*command)
        return label, process

    async def soon(self, longest: float = 0.3) -> None:
        """Wait for any moment."""
        await asyncio.sleep(self.dice.choice((0.0, self.dice.uniform(0, 0.03), self.dice.uniform(0, longest))))

    async def kill(self, process: asyncio.subprocess.Process) -> None:
        assert process.returncode is None, "the worker has ended"
        process.kill()
        self.kills += 1
        await process.wait()

    async def terminate(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        self.terminated += 1
        await process.wait()

    async def kill_often(self, work: str, name: str, stream: str, kills: int) -> None:
        """Kill a worker: while it starts, or at work.

        A start after two kills waits for 10 s, so between most of them another one ends by itself.
        """
        for number in range(1, kills + 1):
            _, process = await self.start(work, name, stream)
            await self.until_sent(name)
            await self.soon()
            await self.kill(process)
            if number == kills or not FULL or self.dice.random() < 0.05:
                continue
            label, process = await self.start(work, name, stream)
            await self.until_sent(label)
            await self.soon()
            if FULL and self.dice.random() < 0.1:  # while it releases its name
                process.terminate()
                await asyncio.sleep(self.dice.uniform(0, 0.01))
                process.kill()
            await self.terminate(process)
        await self.start(work, name, stream)

    async def kill_server(self, times: int, between: float) -> None:
        for _ in range(times):
            await asyncio.sleep(self.dice.uniform(0.2, between))
            await asyncio.to_thread(self.server.kill)
            self.servers += 1
            await self.soon(1.0)
            await asyncio.to_thread(self.server.restart)

    async def during(self, made: Callable[[], tuple[str, bytes]], *trouble: Coroutine[Any, Any, None]) -> None:
        """Store inputs while the trouble lasts."""
        over = asyncio.Event()

        async def feed() -> None:
            while not over.is_set():
                subject, data = made()
                with contextlib.suppress(nats.errors.Error, nats.js.errors.Error):
                    await self.js.publish(subject, data, timeout=2)
                await asyncio.sleep(0.01)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(feed())
            running = [tasks.create_task(each) for each in trouble]
            try:
                await asyncio.gather(*running)
            finally:
                over.set()

    async def end(self) -> None:
        for process in tuple(self.processes.values()):  # more may be started meanwhile
            if process.returncode is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            await process.wait()

    # -- what is checked ----------------------------------------------------------------------------------------------

    async def check(self, apply: Apply, *workers: str, stream: str = "ALL") -> list[dict[str, bytes]]:
        """Wait until workers have come to the end of their inputs, and compare what they have stored; return the states."""
        inputs = await self.read("IN")
        mine = {worker: [it for it in inputs if is_of(worker, it)] for worker in workers}
        async with asyncio.timeout(300):
            for worker in workers:
                while await self.position(stream, worker) <= mine[worker][-1].seq:
                    await asyncio.sleep(0.1)
        stored: dict[str, list[jsx.StoredMsg]] = {worker: [] for worker in workers}
        for message in await self.read(stream):
            worker = worker_of(message.subject)
            if worker in stored:
                stored[worker].append(message)
        states = [check_worker(worker, mine[worker], stored[worker], apply) for worker in workers]
        codes = {process.returncode for process in self.processes.values()} - {None}
        assert codes <= {0, -signal.SIGTERM, -signal.SIGKILL, FENCED if self.fenced else 0}, (
            "a worker has ended with an error"
        )
        print(
            f"{stream}: {len(inputs)} inputs, {sum(map(len, stored.values()))} messages of {len(workers)} workers; "
            f"{self.kills} kills, {self.terminated} terminated, {self.fenced} fenced, {self.servers} kills of the server "
            f"in {time.monotonic() - self.began:.0f} s"
        )
        return states

    async def read(self, stream: str) -> list[jsx.StoredMsg]:
        return [it async for it in jsx.DirectGet(self.js, stream, timeout=30).scan(confirm=True)]

    async def position(self, stream: str, worker: str) -> int:
        with contextlib.suppress(nats.errors.Error, nats.js.errors.Error):
            found = await self.js.get_last_msg(stream, f"{stream}.at.{worker}")
            return int(json.loads(found.data or b"{}")["seq"])
        return 0


@functools.cache
def worker_of(subject: str) -> str:
    """Return the worker that stores a message; in the group "g" it has the name of a partition."""
    _, kind, name, following, *_ = [*subject.split("."), ""]
    if name != "g":
        return name
    return f"g.{log.partition_of(f'IN.{following}', PARTITIONS, [1]) if kind == 'out' else following}"


def is_of(worker: str, message: jsx.StoredMsg) -> bool:
    group, _, number = worker.partition(".")
    return group != "g" or log.partition_of(message.subject, PARTITIONS, [1]) == int(number)


def check_worker(
    worker: str, inputs: list[jsx.StoredMsg], stored: list[jsx.StoredMsg], apply: Apply
) -> dict[str, bytes]:
    """Compare outputs and state behind each position with those of the inputs before it; return the state."""
    state, expected = dict[str, bytes](), dict[str, bytes]()
    outputs, wanted = list[tuple[str, bytes]](), list[tuple[str, bytes]]()
    done = 0
    for message in stored:
        _, kind, text = message.subject.split(".", 2)
        key = text[len("g" if kind == "out" and worker.startswith("g.") else worker) + 1 :]
        if kind == "out":
            outputs.append((key, message.data))
        elif kind == "state" and (message.headers or {}).get("KV-Operation") == "DEL":
            state.pop(key, None)  # it may be a key of the same commit
        elif kind == "state":
            state[key] = message.data
        else:
            record = json.loads(message.data)
            while done < len(inputs) and inputs[done].seq < record["seq"]:
                wanted += apply(expected, inputs[done])
                done += 1
            assert outputs == wanted, f"{worker} at {record['seq']}"
            plain = {key: value for key, value in state.items() if not key.startswith("timed.")}
            assert plain == expected, f"{worker} at {record['seq']}"
            assert len(plain) == record["state"]["keys"]
            outputs.clear()
            wanted.clear()
    assert done == len(inputs), worker
    for key in KEYS:
        assert state.get(f"timed.{key}", state.get(key)) == state.get(key)
    return state


def count(expected: dict[str, bytes], message: jsx.StoredMsg) -> list[tuple[str, bytes]]:
    key = message.subject.split(".")[1]
    n = int(expected.get(key, b"0")) + 1
    expected[key] = b"%d" % n
    expected[f"odd.{key}"] = b""
    if n % 2 == 0:
        del expected[f"odd.{key}"]
    return [(key, b"%d" % n)]


def transfer(expected: dict[str, bytes], message: jsx.StoredMsg) -> list[tuple[str, bytes]]:
    a, b, amount = message.data.decode().split()
    balances = {account: int(expected.get(account, b"%d" % START)) for account in (a, b)}
    if balances[a] < int(amount):
        return [("refused", message.data)]
    balances[a] -= int(amount)
    balances[b] += int(amount)
    expected |= {account: b"%d" % balance for account, balance in balances.items()}
    return [(account, b"%d" % balance) for account, balance in balances.items()]


def any_key() -> tuple[str, bytes]:
    return f"IN.{random.choice(KEYS)}", b""


def any_transfer() -> tuple[str, bytes]:
    a, b = random.sample(ACCOUNTS, 2)
    return "IN.transfers", f"{a} {b} {random.randrange(1, 2 * START)}".encode()


@pytest.fixture
async def workers(victim: NatsServer) -> AsyncIterator[Workers]:
    """Streams that keep every message, and one, ROLLED, that keeps the newest of each key, some with a TTL."""
    async with connected(victim.url) as nc:
        js = nc.jetstream(timeout=10)
        await js.add_stream(name="IN", subjects=["IN.>"], allow_direct=True)
        for name, rolls_up in (("ALL", False), ("ROLLED", True)):
            options: dict[str, Any] = {"allow_rollup_hdrs": rolls_up, "allow_msg_ttl": rolls_up}
            await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_atomic=True, **options)
        made = Workers(victim, js)
        for name in ("ALL", "ROLLED"):
            for kind in ("at", "out"):
                await nc.subscribe(f"{name}.{kind}.>", cb=made.note)
        yield made
        await made.end()


async def test_counts(workers: Workers) -> None:
    """Workers are killed at any moment: each key is counted once for each input."""
    letters = ("abcd", "efhi") if FULL else ("ab", "ef")
    names, kills = dict(zip(("ALL", "ROLLED"), map(list, letters), strict=True)), 25 if FULL else 2
    await workers.during(
        any_key, *(workers.kill_often("count", name, stream, kills) for stream in names for name in names[stream])
    )
    for stream in names:
        for state in await workers.check(count, *names[stream], stream=stream):
            assert set(KEYS) <= set(state)
    assert workers.kills == (200 if FULL else 8)


async def test_bank(workers: Workers) -> None:
    """Workers and their server are killed: each transfer is made once, and the total remains."""
    names = {"ALL": ["a", "b", "c"], "ROLLED": ["d"]} if FULL else {"ALL": ["a"], "ROLLED": ["d"]}
    kills, servers = (20, 20) if FULL else (1, 2)
    await workers.during(
        any_transfer,
        *(workers.kill_often("bank", name, stream, kills) for stream in names for name in names[stream]),
        workers.kill_server(servers, 5.0 if FULL else 2.0),
    )
    for stream in names:
        for state in await workers.check(transfer, *names[stream], stream=stream):
            balances = [int(state.get(account, b"%d" % START)) for account in ACCOUNTS]
            assert min(balances) >= 0
            assert sum(balances) == START * len(ACCOUNTS)
    refused = [it async for it in jsx.DirectGet(workers.js, "ALL").scan(subject="ALL.out.a.refused")]
    assert refused


async def test_take_overs(workers: Workers) -> None:
    """Of two processes of a name, the other one goes on with the state: after each take-over, and when the active one dies."""
    over = asyncio.Event()

    async def restart(work: str, name: str) -> None:
        """Start a process again whenever it ends."""
        while not over.is_set():
            _, process = await workers.start(work, name)
            if over.is_set():
                process.kill()
            code = await process.wait()  # meanwhile others count, too
            workers.fenced += code == FENCED

    async def kill_active(name: str, times: int) -> None:
        """Kill the process that has sent outputs, and wait until another one does."""
        for number in range(times + 1):
            async with asyncio.timeout(3 * LEASE):
                while (label := workers.active.get(name)) is None or workers.processes[label].returncode is not None:
                    await workers.until_sent(name)
            if number < times:
                await workers.soon()
                await workers.kill(workers.processes[label])

    async def take_over(times: int) -> None:
        """Two processes of a name fence each other."""
        async with asyncio.timeout(10 * LEASE + LEASE * times):
            while workers.fenced < times:
                await asyncio.sleep(0.1)

    swapped, standby = (["t", "u", "v"], ["s", "r"]) if FULL else (["t"], ["s"])
    async with asyncio.TaskGroup() as tasks:
        for name in (*swapped, *standby):
            for _ in range(2):
                tasks.create_task(restart("standby" if name in standby else "count", name))
        kills = (kill_active(name, 12 if FULL else 1) for name in standby)
        await workers.during(any_key, take_over(30 if FULL else 1), *kills)
        await workers.check(count, *swapped, *standby)
        over.set()
        await workers.end()


async def test_groups(workers: Workers) -> None:
    """The state moves with its partition while members come, go, die and are paused."""
    dice = workers.dice
    zombies: list[asyncio.Task[None]] = []

    async def pause(process: asyncio.subprocess.Process) -> None:
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(dice.uniform(1.0, PAUSE))
        process.send_signal(signal.SIGCONT)
        await workers.soon(2.0)
        await workers.terminate(process)

    async def end(process: asyncio.subprocess.Process) -> None:
        match dice.choice(("kill", "kill", "terminate", "pause")):
            case "kill":
                await workers.kill(process)
            case "terminate":
                await workers.terminate(process)
            case _:
                zombies.append(asyncio.ensure_future(pause(process)))

    async def scale(times: int) -> None:
        """From one member to 8 and back."""
        members = [(await workers.start("group", "g"))[1]]
        await workers.until_sent("g")
        for _ in range(times):
            while len(members) < 8:
                members += [(await workers.start("group", "g"))[1] for _ in range(2)]
                await workers.soon(1.0)
                if dice.random() < 0.5:
                    await end(members.pop(dice.randrange(len(members))))
            await workers.until_sent("g")
            while len(members) > 1:
                await workers.soon(2.0 if FULL else 0.7)
                await end(members.pop(dice.randrange(len(members))))
            await workers.until_sent("g")

    await workers.during(any_key, scale(12 if FULL else 1))
    await asyncio.gather(*zombies)
    await workers.check(count, *(f"g.{number}" for number in range(PARTITIONS)))
