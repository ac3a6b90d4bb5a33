"""Random faults, short timeouts and short duplicate windows: the report of `ingest` is what the stream holds."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from nats.aio.client import Client

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.testing import Cut, Delay, Drop, Faults, Lose, Overload, ReferenceServer, Stall, Unavailable

# nats-py leaves the sockets of lost connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored .*<function (StreamWriter|_SelectorTransport)")
Connect = Callable[..., Awaitable[Client]]
COUNT = 40


def rules(rng: random.Random, window: float, running: asyncio.Event) -> list[Any]:
    """Return up to four faults; those that last, last about as long as the duplicate window."""
    seconds, nth = rng.uniform(0.3, 2) * window, rng.randint(1, COUNT)
    some = {"times": rng.randint(1, 6), "nth": nth}
    return rng.sample(
        [
            Cut("s.>", nth=nth, before=rng.random() < 0.5),
            Cut("s.>", times=3, chance=0.1),
            Stall("s.>", nth=rng.randint(1, COUNT), seconds=seconds),
            Stall("s.>", times=2, chance=0.1, seconds=seconds),
            Drop("_INBOX.>", kind="flow_ack", **some),
            Drop("_INBOX.>", kind="pub_ack", **some),
            Drop("_INBOX.>", kind="pub_ack", times=4, chance=0.3),
            Delay("_INBOX.>", kind="pub_ack", times=4, chance=0.5, seconds=seconds),
            Drop("_INBOX.>", kind="api", times=2, chance=0.3, when=lambda _: running.is_set()),
            Lose("s.>", **some),
            Lose("s.>", times=3, chance=0.1),
            Overload("s.>", **some),
            Unavailable("s.>", **some),
        ],
        rng.randint(1, 4),
    )


@pytest.mark.parametrize("seed", range(16))
async def test_a_report_is_what_the_stream_holds(connect: Connect, seed: int) -> None:
    rng = random.Random(seed)
    window = rng.choice([0.1, 0.3, 1.0, 120.0])
    kept = rng.choice([-1, -1, 1])
    config = {"max_msgs_per_subject": kept, "duplicate_window": window, "allow_direct": rng.random() < 0.8}
    own_ids = rng.random() < 0.3
    pauses = {rng.randrange(COUNT): rng.uniform(0, window if window < 10 else 0.5) for _ in range(3)}

    async def source() -> AsyncIterator[Any]:
        for n in range(COUNT):
            await asyncio.sleep(pauses.get(n, 0))
            yield f"s.{n % 3}", b"%d" % n

    running = asyncio.Event()
    plan = Faults(*rules(rng, min(window, 1.0), running), seed=seed)
    async with ReferenceServer(faults=plan) as server:
        direct = (await connect(server.url)).jetstream(timeout=30)
        await direct.add_stream(name="S", subjects=["s.>"], allow_batched=True, **config)
        js = (await connect(server.url)).jetstream()
        running.set()
        try:
            async with asyncio.timeout(200):
                report = await jsx.ingest(
                    js,
                    source(),
                    flow=rng.choice([1, 5, 20]),
                    timeout=rng.uniform(0.3, 1.0),
                    patience=30,
                    msg_id=(lambda entry: f"n{entry[1].decode()}") if own_ids else None,
                )
        except errors.IngestError as error:
            assert error.report is not None  # noqa: PT017 - most runs raise nothing
            report, rest = error.report, error.in_doubt
        else:
            rest = 0
            assert report.stored == COUNT
        running.clear()
        messages = await jsx.DirectGet(direct, "S").scan(confirm=True).to_list() if config["allow_direct"] else None
        last_seq = (await direct.stream_info("S")).state.last_seq
        assert last_seq is not None
        assert report.stored - report.in_doubt <= last_seq <= report.stored + report.in_doubt + rest
        if messages is not None and not report.in_doubt and not rest:
            numbers = [int(message.data) for message in messages]
            assert numbers == list(range(report.stored))[-3 if kept == 1 else 0 :]
