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
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import BinaryType, StringType, StructField, StructType
from pyspark_jetstream import DefaultSource as StreamSource
from pyspark_jetstream_kv import DefaultSource as BucketSource

from jetstream_ext.errors import JetStreamExtError
from jetstream_ext.testing import NatsServer

EPIC = "Spark: the same rows on every replay, through every failure, at any size"

QUESTIONS = ["initial offset", "latest offset", "available now", "micro-batch plan", "batch plan", "sink", "bucket plan"]


async def _fill(url: str) -> None:
    nc = await nats.connect(url)
    js = nc.jetstream()
    await js.add_stream(StreamConfig(name="S", subjects=["S.>"], allow_direct=True, allow_batched=True))
    await js.add_stream(StreamConfig(name="KV_B", subjects=["$KV.B.>"], allow_direct=True, max_msgs_per_subject=1))
    for _ in range(10):
        await js.publish("S.a")
    await js.publish("$KV.B.key")
    await nc.close()


def _questions(url: str) -> dict[str, Callable[[], Any]]:
    options = CaseInsensitiveDict({"servers": url, "stream": "S", "requestTimeout": "5"})
    source = StreamSource(options)
    bucket = BucketSource(CaseInsensitiveDict({"servers": url, "bucket": "B", "requestTimeout": "5"}))
    fresh, query = (source.streamReader(source.schema()) for _ in range(2))
    start = query.initialOffset()
    limit = query.getDefaultReadLimit()
    end = query.latestOffset(start, limit)
    frozen = source.streamReader(source.schema())
    rows = StructType([StructField("subject", StringType()), StructField("data", BinaryType())])
    answers: dict[str, Callable[[], Any]] = {
        "initial offset": fresh.initialOffset,
        "latest offset": lambda: query.latestOffset(start, limit),
        "available now": frozen.prepareForTriggerAvailableNow,
        "micro-batch plan": lambda: query.partitions(start, end),
        "batch plan": source.reader(source.schema()).partitions,
        "sink": lambda: source.streamWriter(rows, False),
        "bucket plan": bucket.reader(bucket.schema()).partitions,
    }
    assert list(answers) == QUESTIONS
    return answers


@pytest.fixture(scope="module")
def asked() -> Iterator[dict[str, Future[Any]]]:
    """Ask all questions of a server that dies before it answers, and is back a moment later."""
    with NatsServer() as server:
        asyncio.run(_fill(server.url))
        questions = _questions(server.url)
        server.pause()  # what is asked now is on its way, and lost with the server
        with ThreadPoolExecutor(len(questions)) as pool:
            futures = {name: pool.submit(question) for name, question in questions.items()}
            time.sleep(0.5)
            assert not any(future.done() for future in futures.values())
            server.kill()
            server.restart()
        yield futures


@pytest.mark.xfail(strict=True, raises=JetStreamExtError, reason=f"{EPIC}: the driver asks once, without retry")
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_outlives_the_server_that_was_asked(asked: dict[str, Future[Any]], question: str) -> None:
    asked[question].result()


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_waits_for_a_server_that_is_away(question: str) -> None:
    with NatsServer() as server:
        asyncio.run(_fill(server.url))
        ask = _questions(server.url)[question]
        server.kill()
        restart = threading.Timer(0.3, server.restart)
        restart.start()
        try:
            ask()
        finally:
            restart.join()
