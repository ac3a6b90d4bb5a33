"""Durable sourcing in a cluster whose leaders are killed: every message of the work queue is copied once and in order.

CI kills the leader of the consumer; `python -m nox -s full -- faults` also kills the leaders of both streams.
"""

import asyncio
from typing import Any

import nats.errors
from nats.js import JetStreamContext
from nats.js.api import RetentionPolicy

import jetstream_ext as jsx
from jetstream_ext.testing import NatsCluster

# After several elections in a row, the reading server retries only after 15, 25 and 35 s.
SLACK = 150.0


async def leader(js: JetStreamContext, stream: str, consumer: str | None = None) -> str:
    """Wait until the stream, or its consumer, has a leader, and return that server's name."""
    async with asyncio.timeout(SLACK):
        while True:
            try:
                info: Any = await (js.consumer_info(stream, consumer) if consumer else js.stream_info(stream))
                if info.cluster is not None and info.cluster.leader:
                    return str(info.cluster.leader)
            except (nats.errors.Error, TimeoutError):
                pass  # an election is in progress
            await asyncio.sleep(0.1)


async def copied(js: JetStreamContext, stream: str, *, more: int) -> None:
    """Wait until `stream` has received `more` messages, so that the next fault comes while it copies."""
    seen: list[int] = []
    async with asyncio.timeout(SLACK):
        while not seen or seen[-1] - seen[0] < more:
            try:
                seen.append((await js.stream_info(stream)).state.messages)
            except (nats.errors.Error, TimeoutError):
                pass  # an election is in progress
            await asyncio.sleep(0.05)


async def test_copy_is_complete_and_in_order_after_leaders_are_killed(
    cluster: NatsCluster, connect: Any, full: bool
) -> None:
    nc = await connect(cluster.urls)
    js, patient = nc.jetstream(timeout=2), nc.jetstream(timeout=SLACK)
    servers = {server.name: server for server in cluster.servers}
    await patient.add_stream(name="W", subjects=["w"], retention=RetentionPolicy.WORK_QUEUE, num_replicas=3)
    entry = await jsx.create_source_consumer(patient, "W", "to-all", deliver_subject="deliver.to-all")
    await jsx.ensure_stream(patient, name="ALL", sources=[entry], num_replicas=3, allow_direct=True)
    done = asyncio.Event()

    async def publish() -> int:
        number = 0
        while True:
            try:
                await js.publish("w", b"%d" % number)
            except (nats.errors.Error, TimeoutError):
                await asyncio.sleep(0.05)  # the message may be stored; send it again, possibly as a second copy
                continue
            number += 1
            if done.is_set():
                return number
            await asyncio.sleep(0.002)

    publishing = asyncio.create_task(publish())
    for victim in (("W", "to-all"), ("ALL", None), ("W", None))[: 3 if full else 1]:
        await copied(js, "ALL", more=200)
        server = servers[await leader(js, *victim)]
        server.kill()
        await asyncio.to_thread(cluster.wait_ready, timeout=SLACK)
        await leader(js, *victim)
        await asyncio.to_thread(server.restart)
        await asyncio.to_thread(cluster.wait_ready, timeout=SLACK)
    done.set()
    published = await publishing
    await leader(js, "W")
    await leader(js, "ALL")

    async def settled() -> bool:
        try:
            origin, copy = (await js.stream_info("W")).state, (await js.stream_info("ALL")).state
            (health,) = await jsx.source_health(js, "ALL")
        except (nats.errors.Error, TimeoutError):
            return False
        return not origin.messages and copy.messages >= origin.last_seq and health.ok and not health.pending

    async with asyncio.timeout(SLACK):
        while not await settled():
            await asyncio.sleep(0.1)
    last = (await patient.stream_info("W")).state.last_seq
    stored = await jsx.DirectGet(patient, "ALL").scan(confirm=True).to_list()
    # The publisher may have stored a number twice, but each message of the origin was copied once, in its place.
    assert [int(dict(message.raw_headers)[b"Nats-Stream-Source"].split()[1]) for message in stored] == list(
        range(1, last + 1)
    )
    assert {int(message.data) for message in stored} == set(range(published))
