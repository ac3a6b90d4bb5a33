"""Snapshots of 5,000 keys under concurrent writes: each equals the bucket at its revision."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import nats
import pytest
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import RePublish
from nats.js.kv import KeyValue

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.testing import NatsServer

KEYS = [f"k.{n % 10}.{n}" for n in range(5_000)]
SOME = KEYS[::3]
READS: list[tuple[str, list[str] | None, Callable[[str], bool]]] = [
    ("all of it", None, lambda _: True),
    ("a filter that matches 500 keys", ["k.3.*"], lambda key: key.startswith("k.3.")),
    ("a filter that matches too many for one answer", ["k.*.*"], lambda _: True),
    ("filters", ["k.1.>", "k.2.*", "k.5.5"], lambda key: key.startswith(("k.1.", "k.2.")) or key == "k.5.5"),
    ("1667 keys by name", SOME, frozenset(SOME).__contains__),
]

MakeLogged = Callable[[int], Awaitable[tuple[KeyValue, "Log"]]]


class Log:
    """Every message that a bucket ever stored, received through the stream's republishing."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.events: dict[int, tuple[str, bytes, bool]] = {}

    async def take(self, message: Msg) -> None:
        headers = message.headers or {}
        key = message.subject[len(self.prefix) :]
        self.events[int(headers["Nats-Sequence"])] = key, message.data, "KV-Operation" in headers

    async def states(self, last: int, revisions: set[int]) -> dict[int, dict[str, tuple[int, bytes]]]:
        """Return the content of the bucket at each of `revisions`."""
        async with asyncio.timeout(200):
            while len(self.events) < last:
                await asyncio.sleep(0.01)
        state: dict[str, tuple[int, bytes]] = {}
        states = {}
        for seq in range(1, last + 1):
            key, value, deleted = self.events[seq]
            if deleted:
                state.pop(key, None)
            else:
                state[key] = seq, value
            if seq in revisions:
                states[seq] = dict(state)
        return states


@pytest.fixture
async def logged(server: NatsServer, js: JetStreamContext, stream_name) -> AsyncIterator[MakeLogged]:
    """Create a bucket with a log of every message that it ever stores."""
    listener = await nats.connect(server.url, connect_timeout=10)

    async def make(history: int) -> tuple[KeyValue, Log]:
        name = stream_name()
        log = Log(f"log.{name}.")
        await listener.subscribe(f"log.{name}.>", cb=log.take, pending_msgs_limit=-1, pending_bytes_limit=-1)
        await listener.flush()
        kv = await js.create_key_value(
            bucket=name, history=history, direct=True, republish=RePublish(src=f"$KV.{name}.>", dest=f"log.{name}.>")
        )
        config = (await js.stream_info(f"KV_{name}")).config
        await js.update_stream(config.evolve(allow_batched=True, allow_atomic=True))
        return kv, log

    yield make
    await listener.close()


async def flood(js: JetStreamContext, kv: KeyValue, rng: random.Random, stop: asyncio.Event) -> int:
    """Put, delete and purge random keys until `stop` is set; return the number of writes."""
    done = 0

    async def messages() -> AsyncIterator[tuple[str, bytes] | tuple[str, bytes, dict[str, str]]]:
        nonlocal done
        while not stop.is_set():
            subject = f"{kv._pre}{rng.choice(KEYS) if rng.random() < 0.7 else KEYS[rng.randrange(20)]}"
            dice = rng.random()
            if dice < 0.9:
                yield subject, b"%d" % done
            elif dice < 0.97:
                yield subject, b"", {"KV-Operation": "DEL"}
            else:
                yield subject, b"", {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}
            done += 1
            if done % 50 == 0:
                await asyncio.sleep(0.001)

    async with jsx.FastPublisher(js, flow=50) as publisher:
        await publisher.add_many(messages())
    return done


@pytest.mark.parametrize("history", [1, 3])
async def test_snapshots_equal_the_bucket_at_their_revision(server: NatsServer, logged, history: int) -> None:
    kv, log = await logged(history)
    async with jsx.FastPublisher(kv._js, flow=500) as publisher:
        await publisher.add_many((f"{kv._pre}{key}", b"first") for key in KEYS)
    stop = asyncio.Event()
    writers = []
    connections = [await nats.connect(server.url, connect_timeout=10) for _ in range(2)]
    try:
        for n, nc in enumerate(connections):
            writers.append(asyncio.create_task(flood(nc.jetstream(timeout=30), kv, random.Random(n), stop)))
        taken = []
        async with asyncio.timeout(300):
            for _ in range(2):
                for what, filters, wanted in READS:
                    before = (await kv._js.stream_info(kv._stream)).state.last_seq
                    snap = await kvx.snapshot(kv, filters)
                    assert snap.revision >= before
                    taken.append((what, wanted, snap))
        stop.set()
        written = sum(await asyncio.gather(*writers))
    finally:
        for writer in writers:
            writer.cancel()
        for nc in connections:
            await nc.close()
    assert written > 100
    last = (await kv._js.stream_info(kv._stream)).state.last_seq
    states = await log.states(last, {snap.revision for _, _, snap in taken})
    print(f"{len(taken)} snapshots over {written} writes, {last}")
    for what, wanted, snap in taken:
        truth = {key: value for key, value in states[snap.revision].items() if wanted(key)}
        got = {key: (entry.revision, entry.value) for key, entry in snap.items()}
        assert got == truth, what
