"""Groups whose members are processes: paused for longer than their keys last, restarted one after the other."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import datetime
from pathlib import Path

import nats
import pytest
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig, StreamSource

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext import log
from jetstream_ext.testing import NatsServer

PROGRAM = str(Path(__file__).parent / "member_process.py")
PARTITIONS, KEYS = 4, 20
# `nox -s full -- group_faults` runs all of them.
MODES = ["once", "iterate", "run"] if os.environ.get("JETSTREAM_EXT_FULL") else ["once"]
# Keys that outlive the tests: only a hand-over lets another member take a partition.
LONG = 100.0

Start = Callable[..., Awaitable[asyncio.subprocess.Process]]


@pytest.fixture
def server() -> Iterator[NatsServer]:
    """A server for this test only, because all its members use the same names."""
    with NatsServer() as server:
        yield server


@pytest.fixture
async def own(server: NatsServer) -> AsyncIterator[JetStreamContext]:
    """Streams for inputs and outputs, and a copy of the bucket that keeps every record."""
    nc = await nats.connect(server.url)
    js = nc.jetstream(timeout=10)
    for name in ("IN", "OUT"):
        await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_atomic=True)
    bucket = await js.create_key_value(KeyValueConfig(bucket="groups", history=64, direct=True))
    await kvx.enable(bucket, direct=True, ttl=True)
    await js.add_stream(name="RECORDS", mirror=StreamSource("KV_groups"), allow_direct=True)
    yield js
    await nc.close()


@pytest.fixture
async def start(server: NatsServer) -> AsyncIterator[Start]:
    """Start a member."""
    processes: list[asyncio.subprocess.Process] = []

    async def start(mode: str, label: str, heartbeat: float) -> asyncio.subprocess.Process:
        command = [sys.executable, PROGRAM, server.url, mode, label, str(heartbeat)]
        processes.append(await asyncio.create_subprocess_exec(*command))
        return processes[-1]

    yield start
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def fill(js: JetStreamContext, first: int, last: int) -> None:
    """Store the numbers from `first` to `last`."""
    for begin in range(first, last + 1, 500):
        numbers = range(begin, min(last + 1, begin + 500))
        await jsx.publish_atomic(js, [jsx.BatchMessage(f"IN.{n % KEYS}", b"%d" % n) for n in numbers])


async def outputs(js: JetStreamContext) -> list[jsx.StoredMsg]:
    return [it async for it in jsx.DirectGet(js, "OUT").scan(subject="OUT.*", confirm=True)]


async def records(js: JetStreamContext, number: int) -> list[jsx.StoredMsg]:
    """Return all records of a partition."""
    last = (await js.stream_info("KV_groups")).state.last_seq
    async with asyncio.timeout(60):
        while (await js.stream_info("RECORDS")).state.last_seq < last:
            await asyncio.sleep(0.05)
    subject = f"$KV.groups.IN.g.partitions.{number}"
    return [it async for it in jsx.DirectGet(js, "RECORDS").scan(subject=subject)]


def label_of(message: jsx.StoredMsg) -> str:
    return (message.headers or {})["Label"]


async def owners(js: JetStreamContext) -> list[str | None]:
    """Return the label of each partition's owner."""
    status = await log.Group(js, "IN", "g", partitions=PARTITIONS, key=[1]).status()
    labels = {member.id: member.label for member in status.members}
    return [labels.get(it.owner or "") for it in status.partitions]


async def until(condition: Callable[[], Awaitable[object]], seconds: float = 120) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.2)


def check_handled(found: list[jsx.StoredMsg], mode: str, last: int) -> None:
    """Check that each number was handled, once or at least once, in order for each key."""
    numbers = [int(it.data) for it in found]
    assert set(numbers) == set(range(1, last + 1))
    if mode == "once":
        assert len(numbers) == last
    for key in range(KEYS):
        mine = list(dict.fromkeys(number for number in numbers if number % KEYS == key))
        assert mine == sorted(mine), key


@pytest.mark.parametrize("mode", MODES)
async def test_a_member_that_was_stopped_for_longer_than_its_ttl_stores_nothing(
    own: JetStreamContext, start: Start, mode: str
) -> None:
    last = 1500 if mode == "iterate" else 4000
    await fill(own, 1, last)
    stopped = await start(mode, "stopped", 1.0)

    async def has_committed() -> bool:
        if await owners(own) != ["stopped"] * PARTITIONS:
            return False
        status = await log.Group(own, "IN", "g", partitions=PARTITIONS, key=[1]).status()
        return all(it.position > 1 for it in status.partitions)

    await until(has_committed)  # it has messages in its hands all the time
    stopped.send_signal(signal.SIGSTOP)
    await start(mode, "other", 1.0)

    async def is_taken_over() -> bool:
        return await owners(own) == ["other"] * PARTITIONS

    await until(is_taken_over)
    before = len(await outputs(own))

    async def goes_on() -> bool:
        return len(await outputs(own)) > before + 100

    await until(goes_on)
    count = len(await outputs(own))
    stopped.send_signal(signal.SIGCONT)

    async def works_again() -> bool:
        return "stopped" in await owners(own)

    await until(works_again)
    await until(lambda: all_handled(own, last))
    found = await outputs(own)
    check_handled(found, mode, last)
    # What it stores afterwards, it stores as the owner: behind a record with which the other member has released the partition.
    claimed: dict[int, datetime] = {}
    for number in range(PARTITIONS):
        stored = await records(own, number)
        values = [json.loads(it.data) for it in stored]
        mine = values[0]["writer"]
        taken = next(n for n, it in enumerate(values) if it["writer"] != mine)
        for n in range(taken + 1, len(values)):
            if values[n]["writer"] == mine != values[n - 1]["writer"]:
                assert values[n - 1]["owner"] == "", f"partition {number} at {stored[n].seq}"
                claimed.setdefault(number, stored[n].time)
    late = [it for it in found[count:] if label_of(it) == "stopped"]
    early = [
        it
        for it in late
        for number in [log.partition_of(it.subject, PARTITIONS, [1])]
        if number not in claimed or it.time < claimed[number]
    ]
    # Outputs that the handler stores itself are not fenced: those of the messages that it had in its hands.
    assert len(early) <= {"once": 0, "iterate": 1, "run": PARTITIONS}[mode]


async def all_handled(js: JetStreamContext, last: int) -> bool:
    return {int(it.data) for it in await outputs(js)} >= set(range(1, last + 1))


@pytest.mark.parametrize("mode", MODES)
async def test_restarting_each_member_hands_its_partitions_over(own: JetStreamContext, start: Start, mode: str) -> None:
    """The keys of members outlive the test, so work goes on only if each partition is handed over."""
    await fill(own, 1, 100)
    count = 3 if os.environ.get("JETSTREAM_EXT_FULL") else 2
    members = [await start(mode, f"m{n}", LONG) for n in range(count)]

    async def shared(labels: set[str]) -> bool:
        return set(await owners(own)) == labels

    await until(lambda: shared({f"m{n}" for n in range(count)}))
    last = 100
    for n, member in enumerate(members):
        member.terminate()
        assert await member.wait() == 0
        await fill(own, last + 1, last + 100)
        last += 100
        await until(lambda last=last: all_handled(own, last))  # type: ignore[misc]
        await start(mode, f"m{n}again", LONG)
        labels = {f"m{each}again" if each <= n else f"m{each}" for each in range(count)}
        await until(lambda labels=labels: shared(labels))  # type: ignore[misc]
    check_handled(await outputs(own), mode, last)
