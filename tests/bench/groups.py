"""The throughput of groups of 1, 2 and 4 processes with a handler that computes, compared with nats-py's pull consumer."""

import asyncio
import sys
import time
from typing import Any

import nats
from record import CLIENT, RATE, Group

import jetstream_ext as jsx
from jetstream_ext.testing import NatsServer

CONSUMER, RUN, ONCE = "nats-py pull consumer", "member.run", "exactly_once_group"
MEMBERS = (1, 2, 4)
MESSAGES, EMPTY, PARTITIONS = 40_000, 100_000, 16
WORK = 100  # microseconds of a handler

# One member. It publishes how many messages it has handled, and its CPU seconds since the first one.
PROGRAM = """
import asyncio, sys, time, hashlib, nats, jetstream_ext as jsx
from jetstream_ext import log

BLOCK = b"x" * 10_000

def rounds(micros):
    start = time.process_time()
    for _ in range(2_000):
        hashlib.blake2b(BLOCK).digest()
    return round(micros * 1e-6 * 2_000 / (time.process_time() - start))

async def main(url, case, name, number, micros, partitions):
    nc = await nats.connect(url)
    js, count, used, loops = nc.jetstream(timeout=30), 0, 0.0, rounds(int(micros))

    def handle(message):
        nonlocal count, used
        used = used or time.process_time()
        count += 1
        for _ in range(loops):
            hashlib.blake2b(BLOCK).digest()
        return jsx.BatchMessage("OUT." + name, b"")

    async def consume():
        consumer = await js.pull_subscribe("IN.>", name, stream="IN")
        while True:
            try:
                for message in await consumer.fetch(500, timeout=0.5):
                    handle(message)
                    await message.ack()
            except (asyncio.TimeoutError, nats.errors.TimeoutError):
                pass

    async def work():
        if case == "consumer":
            await consume()
        group = log.Group(js, "IN", name, partitions=int(partitions), start=log.New(), poll=0.02)
        if case == "once":
            await log.exactly_once_group(group, "OUT", handle, prefix="OUT.at")
        async with group.join() as member:
            await member.run(lambda message: None if handle(message) else None)

    working = asyncio.ensure_future(work())
    while not working.done():
        cpu = time.process_time() - used if used else 0.0
        await nc.publish("count." + number, b"%d %f" % (count, cpu))
        await asyncio.sleep(0.02)
    working.result()

asyncio.run(main(*sys.argv[1:]))
"""
CASES = {CONSUMER: "consumer", RUN: "run", ONCE: "once"}


def case(what: str, members: int) -> str:
    return f"{what}, {members}"


def empty(what: str) -> str:
    return f"{what}, empty handler"


def run(name: str, *, quick: bool) -> Group:
    """Measure `groups`."""
    rounds, less = (1, 100) if quick else (3, 1)
    group = Group(name, messages=MESSAGES // less, empty=EMPTY // less, work=WORK, partitions=PARTITIONS, rounds=rounds)
    with NatsServer() as server:
        asyncio.run(_measure(server.url, group, rounds, less))
    return group


async def _measure(url: str, group: Group, rounds: int, less: int) -> None:
    nc = await nats.connect(url)
    js = nc.jetstream(timeout=30)
    for stream in ("IN", "OUT"):
        await jsx.ensure_stream(
            js, name=stream, subjects=[f"{stream}.>"], allow_direct=True, allow_atomic=True, allow_batched=True
        )
    for number in range(rounds):
        for what, mode in CASES.items():
            for members in MEMBERS:
                seconds, _ = await _time(nc, mode, f"{mode}-{members}-{number}", members, MESSAGES // less, WORK)
                group.note(case(what, members), RATE, MESSAGES // less / seconds)
            seconds, used = await _time(nc, mode, f"{mode}-empty-{number}", 1, EMPTY // less, 0)
            group.note(empty(what), RATE, EMPTY // less / seconds)
            group.note(empty(what), CLIENT, used / (EMPTY // less) * 1e6)
    await nc.close()


async def _time(nc: Any, mode: str, name: str, members: int, messages: int, work: int) -> tuple[float, float]:
    """Return the seconds from the first stored message until all are handled, and the CPU seconds of the members."""
    js = nc.jetstream(timeout=30)
    await js.purge_stream("IN")
    if mode == "consumer":
        policy = nats.js.api.DeliverPolicy.NEW
        config = nats.js.api.ConsumerConfig(durable_name=name, deliver_policy=policy, max_ack_pending=10_000)
        await js.add_consumer("IN", config)
    counts: dict[str, tuple[int, float]] = {}
    changed = asyncio.Event()

    async def note(message: Any) -> None:
        count, used = message.data.split()
        counts[message.subject] = int(count), float(used)
        changed.set()

    listening = await nc.subscribe("count.*", cb=note)
    command = [sys.executable, "-c", PROGRAM, nc.connected_url.geturl(), mode, name]
    processes = [
        await asyncio.create_subprocess_exec(*command, str(n), str(work), str(PARTITIONS)) for n in range(members)
    ]
    try:
        async with asyncio.timeout(300):
            while len(counts) < members:
                await asyncio.sleep(0.05)
            await asyncio.sleep(2.0)  # the partitions have their owners
            start = time.perf_counter()
            async with jsx.FastPublisher(js, flow=500) as publisher:
                await publisher.add_many((f"IN.{n % 1000}", b"x" * 100) for n in range(messages))
            while sum(count for count, _ in counts.values()) < messages:
                changed.clear()
                await changed.wait()
        return time.perf_counter() - start, sum(used for _, used in counts.values())
    finally:
        for process in processes:
            process.kill()
            await process.wait()
        await listening.unsubscribe()
