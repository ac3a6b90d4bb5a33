"""Requests of the driver while the server is down for a moment: retried within ``requestTimeout``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import nats
import pytest
from nats.js.api import StreamConfig

from jetstream_ext.testing import NatsCluster, NatsServer

REQUESTS = [
    "initial offset",
    "latest offset",
    "available now",
    "micro-batch plan",
    "batch plan",
    "sink",
    "bucket plan",
]


async def _fill(url: str, wait_for_interest: Any, replicas: int = 1) -> str:
    """Return the name of the leader of stream S."""
    async with await nats.connect(url, connect_timeout=10) as nc:
        js = nc.jetstream(timeout=30)
        config = StreamConfig(name="S", subjects=["S.>"], allow_direct=True, allow_batched=True, num_replicas=replicas)
        await js.add_stream(config)
        await js.add_stream(StreamConfig(name="KV_B", subjects=["$KV.B.>"], allow_direct=True, max_msgs_per_subject=1))
        await wait_for_interest(js, "S.a")
        await wait_for_interest(js, "$KV.B.key")
        for _ in range(10):
            await js.publish("S.a")
        await js.publish("$KV.B.key")
        cluster = (await js.stream_info("S")).cluster
        return (cluster and cluster.leader) or ""


@pytest.fixture(scope="module")
def requests(
    stream_query: Any, batch_read: Any, bucket_read: Any, sink: Any
) -> Callable[..., dict[str, Callable[[], Any]]]:
    """Prepare every request up to the point of sending it."""

    def prepare(url: str, timeout: int = 30) -> dict[str, Callable[[], Any]]:
        options = {"servers": url, "requestTimeout": f"{timeout}"}
        query = stream_query("S", **options)
        start = query.initial()
        end = query.latest(start)
        answers: dict[str, Callable[[], Any]] = {
            "initial offset": stream_query("S", **options).initial,
            "latest offset": lambda: query.latest(start),
            "available now": stream_query("S", **options).reader.prepareForTriggerAvailableNow,
            "micro-batch plan": lambda: stream_query("S", **options).partitions(start, end),
            "batch plan": batch_read("S", **options).partitions,
            "sink": sink("S", **options).writer,
            "bucket plan": bucket_read("B", **options).partitions,
        }
        assert list(answers) == REQUESTS
        return answers

    return prepare


@pytest.fixture(scope="module")
def sent(requests: Any, wait_for_interest: Any, own_connections: Any) -> Iterator[dict[str, Future[Any]]]:
    """Send all requests to a server that dies before it replies and restarts a moment later."""
    with NatsServer() as server, own_connections():
        asyncio.run(_fill(server.url, wait_for_interest))
        prepared = requests(server.url)
        server.pause()  # requests sent now are lost with the server
        with ThreadPoolExecutor(len(prepared)) as pool:
            futures = {name: pool.submit(request) for name, request in prepared.items()}
            time.sleep(0.5)
            assert not any(future.done() for future in futures.values())
            server.kill()
            server.restart()
        yield futures


@pytest.fixture(scope="module")
def sent_in_election(requests: Any, wait_for_interest: Any, own_connections: Any) -> Iterator[dict[str, Future[Any]]]:
    """Send all requests about a stream whose leader was killed; the others need 4 to 9 s to elect a new one."""
    with NatsCluster(3) as cluster, own_connections():
        leader = asyncio.run(_fill(cluster.url, wait_for_interest, replicas=3))
        [gone] = [server for server in cluster.servers if server.name == leader]
        prepared = requests(",".join(url for url in cluster.urls if url != gone.url), timeout=60)
        del prepared["bucket plan"]
        gone.kill()
        with ThreadPoolExecutor(len(prepared)) as pool:
            futures = {name: pool.submit(request) for name, request in prepared.items()}
        yield futures


def test_a_request_survives_the_leader_of_its_stream(cell: Any, sent_in_election: dict[str, Future[Any]]) -> None:
    for kind in REQUESTS[:-1]:
        with cell(kind):
            sent_in_election[kind].result()


def test_a_request_survives_its_server(cell: Any, sent: dict[str, Future[Any]]) -> None:
    for kind in REQUESTS:
        with cell(kind):
            sent[kind].result()


def test_a_request_waits_for_a_server_that_is_down(cell: Any, requests: Any, wait_for_interest: Any) -> None:
    with NatsServer() as server:
        asyncio.run(_fill(server.url, wait_for_interest))
        prepared = requests(server.url)
        server.kill()
        with ThreadPoolExecutor(len(prepared)) as pool:
            futures = {name: pool.submit(request) for name, request in prepared.items()}
            time.sleep(0.3)
            assert not any(future.done() for future in futures.values())
            server.restart()
        for kind in REQUESTS:
            with cell(kind):
                futures[kind].result()
