"""The cost of a read for the server: messages sent for rows, and requests for a plan, an idle query and a partition."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine, Iterator
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


class Holding:
    """A proxy that can hold back the replies until it has passed on some requests about streams, in a separate thread."""

    def __init__(self, url: str) -> None:
        self._port = urlsplit(url).port
        self._loop = asyncio.new_event_loop()
        self._passing = asyncio.Event()
        self._sent, self._wanted = b"", 0

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        thread = threading.Thread(target=self._loop.run_forever)
        thread.start()
        try:
            self._passing.set()
            listener = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0))
            try:
                yield f"nats://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
            finally:
                self._run(self._end(listener))
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
            self._loop.close()

    def hold(self, requests: int) -> None:
        async def hold() -> None:
            self._sent, self._wanted = b"", requests
            self._passing.clear()

        self._run(hold())

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _end(self, listener: asyncio.Server) -> None:
        listener.close()
        self._passing.set()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, to_server = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_requests(reader, to_server))
                group.create_task(self._pass_replies(behind, writer))
        finally:
            writer.close()
            to_server.close()

    async def _pass_requests(self, reader: asyncio.StreamReader, to_server: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            to_server.write(data)
            self._sent += data
            if self._sent.count(b"$JS.API.STREAM.INFO.") >= self._wanted:
                self._passing.set()
        to_server.close()

    async def _pass_replies(self, behind: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await behind.read(1 << 16):
            await self._passing.wait()
            writer.write(data)
        writer.close()


def test_many_streams_are_planned_at_once(
    cell: Any, server: Any, with_js: Any, stream_name: Any, batch_read: Any, stream_query: Any
) -> None:
    prefix, proxy = stream_name(), Holding(server.url)
    names = [f"{prefix}_{number}" for number in range(20)]

    async def create(js: JetStreamContext) -> None:
        for name in names:
            await js.add_stream(StreamConfig(name=name, subjects=[f"{name}.>"], allow_direct=True))
            await js.publish(f"{name}.a")

    with_js(create)
    with proxy.running() as url:
        batch_read(names[0], servers=url).partitions()  # it is connected
        for kind in ("batch read", "micro-batch"):
            with cell(kind):
                proxy.hold(5)  # with one request after the other, no reply would ever come
                if kind == "batch read":
                    parts = batch_read(",".join(names), servers=url).partitions()
                else:
                    query = stream_query(",".join(names), servers=url)
                    start = query.initial()
                    parts = query.partitions(start, query.latest(start))
                assert len(parts) == len(names), "streams are missing"
