"""Rows that were acknowledged just before are read, whichever replica or mirror answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from nats.js import JetStreamContext
from nats.js.api import PubAck, StreamConfig, StreamSource
from nats.js.errors import NoStreamResponseError

from jetstream_ext.spark import reading
from jetstream_ext.spark.connection import Connections
from jetstream_ext.spark.options import ReadOptions
from jetstream_ext.spark.ranges import SequenceRange
from jetstream_ext.spark.source import JetStreamDataSource
from jetstream_ext.testing import NatsCluster, NatsServer

ROUNDS = 40
EACH = 25


async def publish(js: JetStreamContext, subject: str) -> PubAck:
    """Publish, and retry while the stream has no leader."""
    deadline = asyncio.get_running_loop().time() + 30
    while True:
        try:
            return await js.publish(subject, b"")
        except NoStreamResponseError:
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(0.1)


def read_and_write(with_js: Any, url: str, stream: str) -> None:
    given = {"servers": url, "stream": stream, "requestTimeout": "10"}
    options, schema = ReadOptions.parse(given), JetStreamDataSource(given).schema()

    def read(first: int, last: int) -> list[int]:
        part = SequenceRange(stream, first, last)
        return [seq for batch in reading.read_range(options, schema, part) for seq in batch.column("seq").to_pylist()]

    async def rounds(js: JetStreamContext) -> None:
        for number in range(ROUNDS):
            acks = await asyncio.gather(*(publish(js, f"{stream}.a") for _ in range(EACH)))
            assert max(ack.seq for ack in acks) == (number + 1) * EACH
            first = number * EACH + 1
            assert await asyncio.to_thread(read, first, first + EACH - 1) == list(range(first, first + EACH))

    with_js(rounds, url)


def test_replicas_return_acknowledged_rows(with_js: Any, cache: Connections) -> None:
    with NatsCluster() as cluster:
        config = StreamConfig(name="R", subjects=["R.*"], allow_direct=True, num_replicas=3)
        with_js(lambda js: js.add_stream(config), cluster.servers[0].url)
        for server in cluster.servers[:2]:  # at least one of them is not the leader
            with_js(lambda js: js.purge_stream("R"), server.url)
            with_js(lambda js: js.delete_stream("R"), server.url)
            with_js(lambda js: js.add_stream(config), server.url)
            read_and_write(with_js, server.url, "R")


def test_mirrors_return_acknowledged_rows(
    with_js: Any, cache: Connections, server: NatsServer, stream_name: Callable[[], str]
) -> None:
    name, mirror = stream_name(), stream_name()

    async def make(js: JetStreamContext) -> None:
        await js.add_stream(StreamConfig(name=name, subjects=[f"{name}.*"], allow_direct=True))
        config = StreamConfig(name=mirror, mirror=StreamSource(name=name), mirror_direct=True, allow_direct=True)
        await js.add_stream(config)

    with_js(make)
    read_and_write(with_js, server.url, name)
