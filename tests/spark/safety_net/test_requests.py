"""The cost of a read for the server: messages sent for rows, and requests for a plan, an idle query and a partition."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import nats
import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

import jetstream_ext as jsx

MESSAGES = 20_000


@pytest.fixture(scope="module")
def rare(measured: Any) -> str:
    """A stream of many messages, three of which are on rare subjects."""

    async def fill() -> None:
        async with await nats.connect(measured.url, connect_timeout=10) as nc:
            js = nc.jetstream()
            await js.add_stream(StreamConfig(name="RARE", subjects=["RARE.>"], allow_direct=True, allow_batched=True))
            subjects = {100: "RARE.first", 10_000: "RARE.second", 19_000: "RARE.first"}
            async with jsx.FastPublisher(js) as publisher:
                await publisher.add_many((subjects.get(seq, "RARE.common"), b"") for seq in range(1, MESSAGES + 1))

    asyncio.run(fill())
    return "RARE"


def test_a_batch_read_of_several_rare_subjects_is_sent_few_other_messages(
    measured: Any, rare: str, batch_read: Any
) -> None:
    reader = batch_read(rare, servers=measured.url, subjects="RARE.first,RARE.second")
    before = measured.sent()
    assert sorted(row["seq"] for row in reader.rows()) == [100, 10_000, 19_000], "rows are missing"
    assert measured.sent() - before < 500


def test_a_micro_batch_of_several_rare_subjects_is_sent_few_other_messages(
    measured: Any, rare: str, stream_query: Any
) -> None:
    query = stream_query(rare, servers=measured.url, subjects="RARE.first,RARE.second")
    before = measured.sent()
    start = query.initial()
    assert query.seqs(start, query.latest(start)) == [100, 10_000, 19_000], "rows are missing"
    assert measured.sent() - before < 500


@pytest.mark.parametrize("options", [{"minPartitions": "20"}, {"maxRowsPerTrigger": "50"}], ids=str)
def test_many_subjects_are_planned_with_few_requests(
    make_stream: Any, stream_query: Any, publish: Any, requests_seen: Any, options: dict[str, str]
) -> None:
    if "maxRowsPerTrigger" in options:
        pytest.importorskip("pyspark.sql.streaming.datasource", reason="limits need Spark 4.2")
    name = make_stream()
    publish([(f"{name}.{number % 500}", b"") for number in range(5000)])
    query = stream_query(name, subjects=",".join(f"{name}.{number}" for number in range(50)), **options)
    start = query.initial()
    with requests_seen(name) as requests:
        query.latest(start)
    assert len(requests) < 1500


def test_an_idle_query_asks_the_server_at_most_twice_a_second(
    make_stream: Any, stream_query: Any, requests_seen: Any
) -> None:
    name, seconds = make_stream(10), 3
    query = stream_query(name)
    end = query.latest(query.initial())
    until = time.monotonic() + seconds
    with requests_seen(name) as requests:
        while time.monotonic() < until:
            assert query.latest(end) == end, "there is something new"
            time.sleep(0.01)  # as Spark does
    assert len(requests) <= 2 * seconds + 1


@pytest.mark.parametrize("streaming", [False, True])
def test_the_identity_of_a_stream_is_checked_once_for_all_partitions(
    make_stream: Any, batch_read: Any, stream_query: Any, requests_seen: Any, streaming: bool
) -> None:
    name = make_stream(800)
    reader = (stream_query if streaming else batch_read)(name, minPartitions="8")
    start = reader.initial() if streaming else {}
    partitions = reader.partitions(start, reader.latest(start)) if streaming else reader.partitions()
    with requests_seen(name) as requests:
        assert [len(reader.read(partition)) for partition in partitions] == [100] * 8, "rows are missing"
    assert sum(".STREAM.INFO." in request for request in requests) <= 1


class Distance:
    """A proxy that delays every reply by some milliseconds, in a separate thread."""

    def __init__(self, url: str, delay: float) -> None:
        self._port = urlsplit(url).port
        self._delay = delay
        self._writers: list[asyncio.StreamWriter] = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator[str]:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            serving = asyncio.start_server(self._serve, "127.0.0.1", 0)
            listener = asyncio.run_coroutine_threadsafe(serving, loop).result()
            try:
                yield f"nats://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
            finally:
                asyncio.run_coroutine_threadsafe(self._end(listener), loop).result()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def _end(self, listener: asyncio.Server) -> None:
        listener.close()
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, to_server = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, to_server]
        await asyncio.gather(self._pass(reader, to_server, 0), self._pass(behind, writer, self._delay))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(1 << 16):
            loop.call_later(delay, writer.write, data)
        loop.call_later(delay, writer.close)


FAR = 0.25  # seconds of a round trip to a server that is far away


@pytest.fixture
def many_streams(make_stream: Any, stream_name: Any, with_js: Any) -> list[str]:
    prefix = stream_name()
    names = [f"{prefix}_{number}" for number in range(20)]

    async def create(js: JetStreamContext) -> None:
        for name in names:
            await js.add_stream(StreamConfig(name=name, subjects=[f"{name}.>"], allow_direct=True))
            await js.publish(f"{name}.a")

    with_js(create)
    return names


def test_many_streams_are_planned_at_once_for_a_batch_read(many_streams: Any, server: Any, batch_read: Any) -> None:
    with Distance(server.url, FAR)() as url:
        reader = batch_read(many_streams[0], servers=url)
        reader.partitions()  # it is connected
        reader = batch_read(",".join(many_streams), servers=url)
        begun = time.monotonic()
        assert len(reader.partitions()) == len(many_streams), "streams are missing"
        assert time.monotonic() - begun < len(many_streams) * FAR, "less than one round trip for each of them"


def test_many_streams_are_planned_at_once_for_a_micro_batch(many_streams: Any, server: Any, stream_query: Any) -> None:
    with Distance(server.url, FAR)() as url:
        query = stream_query(many_streams[0], servers=url)
        query.initial()  # it is connected
        query = stream_query(",".join(many_streams), servers=url)
        begun = time.monotonic()
        start = query.initial()
        assert len(query.partitions(start, query.latest(start))) == len(many_streams), "streams are missing"
        assert time.monotonic() - begun < len(many_streams) * FAR, "less than one round trip for each of them"
