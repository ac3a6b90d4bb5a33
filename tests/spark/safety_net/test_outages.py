"""The driver's questions while the server is away for a moment: asked again within ``requestTimeout``, not once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import nats
import pytest
from nats.js.api import StreamConfig

from jetstream_ext.testing import NatsCluster, NatsServer

QUESTIONS = [
    "initial offset",
    "latest offset",
    "available now",
    "micro-batch plan",
    "batch plan",
    "sink",
    "bucket plan",
]


async def _fill(url: str, replicas: int = 1) -> str:
    """Return the name of the leader of stream S."""
    nc = await nats.connect(url)
    js = nc.jetstream(timeout=10)
    config = StreamConfig(name="S", subjects=["S.>"], allow_direct=True, allow_batched=True, num_replicas=replicas)
    await js.add_stream(config)
    await js.add_stream(StreamConfig(name="KV_B", subjects=["$KV.B.>"], allow_direct=True, max_msgs_per_subject=1))
    for _ in range(10):
        await js.publish("S.a")
    await js.publish("$KV.B.key")
    cluster = (await js.stream_info("S")).cluster
    await nc.close()
    return (cluster and cluster.leader) or ""


@pytest.fixture(scope="module")
def questions(
    stream_query: Any, batch_read: Any, bucket_read: Any, sink: Any
) -> Callable[..., dict[str, Callable[[], Any]]]:
    """Prepare every question, so that what is left is to ask it."""

    def prepare(url: str, timeout: int = 5) -> dict[str, Callable[[], Any]]:
        options = {"servers": url, "requestTimeout": f"{timeout}"}
        query = stream_query("S", **options)
        start = query.initial()
        end = query.latest(start)
        answers: dict[str, Callable[[], Any]] = {
            "initial offset": stream_query("S", **options).initial,
            "latest offset": lambda: query.latest(start),
            "available now": stream_query("S", **options).reader.prepareForTriggerAvailableNow,
            "micro-batch plan": lambda: query.partitions(start, end),
            "batch plan": batch_read("S", **options).partitions,
            "sink": sink("S", **options).plan,
            "bucket plan": bucket_read("B", **options).partitions,
        }
        assert list(answers) == QUESTIONS
        return answers

    return prepare


@pytest.fixture(scope="module")
def asked(questions: Any) -> Iterator[dict[str, Future[Any]]]:
    """Ask all questions of a server that dies before it answers, and is back a moment later."""
    with NatsServer() as server:
        asyncio.run(_fill(server.url))
        prepared = questions(server.url)
        server.pause()  # what is asked now is on its way, and lost with the server
        with ThreadPoolExecutor(len(prepared)) as pool:
            futures = {name: pool.submit(question) for name, question in prepared.items()}
            time.sleep(0.5)
            assert not any(future.done() for future in futures.values())
            server.kill()
            server.restart()
        yield futures


@pytest.fixture(scope="module")
def asked_in_election(questions: Any) -> Iterator[dict[str, Future[Any]]]:
    """Ask all questions about a stream whose leader was killed; the others need 4 to 9 s to elect a new one."""
    with NatsCluster(3) as cluster:
        leader = asyncio.run(_fill(cluster.url, replicas=3))
        [gone] = [server for server in cluster.servers if server.name == leader]
        prepared = questions(",".join(url for url in cluster.urls if url != gone.url), timeout=12)
        del prepared["bucket plan"]
        gone.kill()
        with ThreadPoolExecutor(len(prepared)) as pool:
            futures = {name: pool.submit(question) for name, question in prepared.items()}
        yield futures


@pytest.mark.parametrize("question", QUESTIONS[:-1])
def test_a_question_outlives_the_leader_of_its_stream(asked_in_election: dict[str, Future[Any]], question: str) -> None:
    asked_in_election[question].result()


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_outlives_the_server_that_was_asked(asked: dict[str, Future[Any]], question: str) -> None:
    asked[question].result()


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_waits_for_a_server_that_is_away(questions: Any, question: str) -> None:
    with NatsServer() as server:
        asyncio.run(_fill(server.url))
        ask = questions(server.url)[question]
        server.kill()
        restart = threading.Timer(0.3, server.restart)
        restart.start()
        try:
            ask()
        finally:
            restart.join()
