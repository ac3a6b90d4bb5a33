"""Transactions of many workers have the effect of one after the other, in the order of their commits."""

import asyncio
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import nats
import pytest
from nats.js import JetStreamContext
from nats.js.kv import KeyValue

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import KeyConflictError
from jetstream_ext.testing import NatsServer

SECONDS = 120.0 if os.environ.get("JETSTREAM_EXT_FULL") else 3.0
KEYS = [f"k{n}" for n in range(12)]


@dataclass
class Done:
    reads: dict[str, int]  # the revision that was found; 0: none
    writes: dict[str, int]
    event: str


async def work(kv: KeyValue, rng: random.Random, topic: str, until: float, done: list[Done]) -> int:
    conflicts = 0
    while time.monotonic() < until:
        tx = kvx.transaction(kv)
        keys = rng.sample(KEYS, rng.randrange(1, 6))
        found = await tx.get_many(keys)
        if rng.random() < 0.5:
            await asyncio.sleep(rng.random() * 0.005)
        writes = rng.sample(KEYS, rng.randrange(1, 3))
        for key in writes:
            tx.put(key, b"%d" % rng.randrange(100))
        event = tx.publish(f"{topic}.done", " ".join(writes).encode()) if rng.random() < 0.3 else ""
        try:
            await tx.commit()
        except KeyConflictError:
            conflicts += 1
        else:
            done.append(Done({key: found[key].revision if key in found else 0 for key in keys}, tx.revisions, event))
    return conflicts


@pytest.mark.parametrize("carriers", [True, False], ids=["read keys are fenced", "the whole bucket is fenced"])
async def test_transactions_are_serialisable(
    server: NatsServer, js: JetStreamContext, stream_name: Callable[[], str], carriers: bool
) -> None:
    topic = stream_name()
    kv = await kvx.ensure_bucket(js, stream_name(), events=[f"{topic}.>"], history=2)
    if not carriers:
        config = (await js.stream_info(kv._stream)).config
        await js.update_stream(config.evolve(subjects=[s for s in config.subjects if not s.startswith("_reads")]))
    clients = [await nats.connect(server.url, connect_timeout=30) for _ in range(6)]
    done: list[Done] = []
    until = time.monotonic() + SECONDS
    workers = [
        work(await nc.jetstream(timeout=30).key_value(kv._name), random.Random(n), topic, until, done)
        for n, nc in enumerate(clients)
    ]
    conflicts = sum(await asyncio.gather(*workers))
    for nc in clients:
        await nc.close()
    newest = dict.fromkeys(KEYS, 0)
    for each in sorted(done, key=lambda it: min(it.writes.values())):
        assert {key: newest[key] for key in each.reads} == each.reads
        newest |= each.writes
    found = await kvx.get_many(kv, KEYS)
    assert {key: entry.revision for key, entry in found.items()} == {key: seq for key, seq in newest.items() if seq}
    events = [message.subject async for message in jsx.DirectGet(js, kv._stream).scan(subject=f"{topic}.>")]
    assert sorted(events) == sorted(each.event for each in done if each.event)
    assert len(done) > 10
    assert conflicts > 10
    print(f"{len(done)} committed, {conflicts} conflicts")
