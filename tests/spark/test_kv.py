"""Buckets as tables: keys, revisions, and history that is no longer stored."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig, StreamConfig, StreamSource
from nats.js.errors import NoStreamResponseError
from nats.js.kv import KeyValue
from pyspark.sql.datasource import CaseInsensitiveDict

from jetstream_ext.errors import DirectGetDisabledError, HistoryUnavailableError
from jetstream_ext.kv import snapshot
from jetstream_ext.spark import kv
from jetstream_ext.spark.connection import Connections
from jetstream_ext.spark.kv import plan_kv
from jetstream_ext.spark.kv_source import JetStreamKvDataSource
from jetstream_ext.spark.options import KvOptions, OptionError
from jetstream_ext.spark.planning import PlanningError
from jetstream_ext.testing import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


Read = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def read(server: NatsServer, cache: Connections) -> Read:
    """Plan a read, do something, and read."""

    def run(bucket: str, *, between: Any = None, url: str = server.url, **given: str) -> list[dict[str, Any]]:
        options = KvOptions.parse(
            CaseInsensitiveDict({"servers": url, "bucket": bucket, "requestTimeout": "3"} | given)
        )
        schema = JetStreamKvDataSource(CaseInsensitiveDict({"servers": url, "bucket": bucket})).schema()
        with cache.lend(options.connection, "test") as lease:
            parts = lease.run(plan_kv(lease.connection.context(), options))
            if between is not None:
                lease.run(between(lease.connection.context()))
        return [row for part in parts for batch in kv.read_keys(options, schema, part) for row in batch.to_pylist()]

    return run


@pytest.fixture
def make(with_js: Any, stream_name: Callable[[], str]) -> Callable[..., str]:
    def bucket(fill: Callable[[KeyValue], Awaitable[None]], **config: Any) -> str:
        name = stream_name()

        async def create(js: JetStreamContext) -> None:
            await fill(await js.create_key_value(KeyValueConfig(bucket=name, direct=True, **config)))

        with_js(create)
        return name

    return bucket


async def ten(kv: KeyValue) -> None:
    for i in range(10):
        await retried(partial(kv.put, f"k.{i}", b"%d" % i))


def values(rows: list[dict[str, Any]]) -> dict[str, bytes]:
    assert len({row["key"] for row in rows}) == len(rows)
    return {row["key"]: row["value"] for row in rows}


TEN = {f"k.{i}": b"%d" % i for i in range(10)}


async def retried(write: Callable[[], Awaitable[Any]]) -> None:
    """Write, and retry while the stream has no leader."""
    deadline = asyncio.get_running_loop().time() + 30
    while True:
        try:
            await write()
            return
        except NoStreamResponseError:
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(0.1)


def put(bucket: str, **changes: bytes | None) -> Any:
    async def change(js: JetStreamContext) -> None:
        kv = await js.key_value(bucket)
        for key, value in changes.items():
            key = key.replace("_", ".")
            await retried(partial(kv.delete, key) if value is None else partial(kv.put, key, value))

    return change


def test_every_column_is_read(make: Callable[..., str], read: Read) -> None:
    bucket = make(ten)
    row = read(bucket, keys="k.3")[0]
    assert abs((datetime.now(UTC) - row.pop("created")).total_seconds()) < 60
    assert row == {"bucket": bucket, "key": "k.3", "value": b"3", "revision": 4, "operation": "PUT"}


ODD = {b"\xff": "\\xff", b"\xfe": "\\xfe", b"\\xff": "\\\\xff", "\ufffd".encode(): "\ufffd", b"k.\xff": "k.\\xff"}


@pytest.fixture
def odd(make: Callable[..., str], server: NatsServer, publish_raw: Callable[..., None]) -> str:
    """A bucket with keys that clients refuse, too; the values are the keys."""
    bucket = make(ten, history=2)
    publish_raw(server, ((b"$KV.%b.%b" % (bucket.encode(), key), key) for key in ODD))
    return bucket


def test_keys_that_clients_refuse_are_rows_with_different_keys(cell: Any, odd: str, read: Read) -> None:
    for consistency in ["latest", "strict"]:
        with cell(consistency):
            texts = {text: key for key, text in ODD.items()}
            assert values(read(odd, consistency=consistency)) == TEN | texts
            assert values(read(odd, consistency=consistency, asOf="12")) == TEN | {"\\xff": b"\xff", "\\xfe": b"\xfe"}
            assert values(read(odd, consistency=consistency, keys="k.>")) == TEN | {"k.\\xff": b"k.\xff"}
            assert values(read(odd, consistency=consistency, keys="k.1,\ufffd")) == {
                "k.1": b"1",
                "\ufffd": "\ufffd".encode(),
            }


def test_more_keys_than_a_request_takes_are_read(cell: Any, make: Callable[..., str], read: Read) -> None:
    def check(count: int) -> None:
        async def fill(kv: KeyValue) -> None:
            await asyncio.gather(*(kv.put(f"k{i}", b"%d" % i) for i in range(count)))

        assert values(read(make(fill), minPartitions="1")) == {f"k{i}": b"%d" % i for i in range(count)}

    for count in [1023, 1024, 1025, 3000]:
        with cell(count):
            check(count)


class TestChangedMeanwhile:
    def test_without_history_every_key_is_read_once(self, make: Callable[..., str], read: Read) -> None:
        bucket = make(ten)
        rows = read(bucket, between=put(bucket, k_1=b"new", k_2=b"new"))
        assert values(rows) == TEN | {"k.1": b"new", "k.2": b"new"}
        assert sorted(row["revision"] for row in rows)[-2:] == [11, 12]


class TestThePast:
    def test_with_history_the_past_is_exact(self, make: Callable[..., str], read: Read, with_js: Any) -> None:
        bucket = make(ten, history=5)
        with_js(put(bucket, k_1=b"new", k_2=None, k_new=b"new"))
        for consistency in ("latest", "strict"):
            assert values(read(bucket, asOf="10", consistency=consistency)) == TEN
            assert sorted(values(read(bucket, asOf="4", consistency=consistency))) == ["k.0", "k.1", "k.2", "k.3"]
        after = values(read(bucket))
        assert (after["k.1"], "k.2" in after, after["k.new"]) == (b"new", False, b"new")
        assert values(read(bucket, asOf="2020-01-01T00:00:00Z")) == {}

    def test_a_time_means_the_same_revision_as_in_a_snapshot(
        self, make: Callable[..., str], read: Read, with_js: Any
    ) -> None:
        bucket = make(ten, history=5)
        with_js(put(bucket, k_1=b"new", k_2=None))

        async def snapshots(js: JetStreamContext) -> dict[datetime, dict[str, bytes]]:
            bucket_now = await js.key_value(bucket)
            found = await snapshot(bucket_now, include_deletes=True)
            times = [entry.created + timedelta(microseconds=n) for entry in found.values() for n in (-1, 0)]
            past = {time: await snapshot(bucket_now, at=time) for time in times}
            return {time: {key: entry.value for key, entry in found.items()} for time, found in past.items()}

        for time, expected in with_js(snapshots).items():
            assert values(read(bucket, asOf=time.isoformat(), consistency="strict")) == expected

    def test_a_time_in_the_future_is_awaited_or_refused(self, make: Callable[..., str], read: Read) -> None:
        bucket = make(ten)
        soon = datetime.now(UTC) + timedelta(seconds=1)
        assert values(read(bucket, asOf=soon.isoformat())) == TEN
        assert datetime.now(UTC) > soon
        with pytest.raises(PlanningError, match=r"'asOf': bucket .* 2100-01-01T00:00:00.* is in the future"):
            read(bucket, asOf="2100-01-01T00:00:00Z")

    def test_without_history_the_past_has_present_values(
        self, make: Callable[..., str], read: Read, with_js: Any
    ) -> None:
        bucket = make(ten)
        with_js(put(bucket, k_1=b"new"))
        assert values(read(bucket, asOf="10")) == TEN | {"k.1": b"new"}
        with pytest.raises(HistoryUnavailableError, match="the history needed for 1 of"):
            read(bucket, asOf="10", consistency="strict", minPartitions="1")

    def test_a_future_revision_is_refused(self, make: Callable[..., str], read: Read) -> None:
        with pytest.raises(PlanningError, match=r"'asOf': bucket .* has no revision 11 yet; its last is 10"):
            read(make(ten), asOf="11")


def test_an_invalid_option_is_named(cell: Any) -> None:
    for options, message in [
        ({}, "'bucket': it is missing; give the name of one bucket"),
        ({"bucket": "A,B"}, "'bucket': 'A,B' is not a valid bucket name"),
        ({"bucket": "a.b"}, "'bucket': 'a.b' is not a valid bucket name"),
        ({"bucket": "A", "asOf": "yesterday"}, "'asOf': 'yesterday' is not an RFC 3339 time"),
        ({"bucket": "A", "consistency": "exact"}, "'consistency': 'exact' is not one of latest, strict"),
        ({"bucket": "A", "keys": "a..b"}, "'keys'"),
        ({"bucket": "A", "key": "a"}, "did you mean 'keys'"),
    ]:
        with cell(options, message), pytest.raises(OptionError, match=message):
            JetStreamKvDataSource(CaseInsensitiveDict({"servers": "nats://n"} | options)).schema()


def test_an_unreadable_bucket_is_refused(with_js: Any, read: Read, stream_name: Callable[[], str]) -> None:
    with pytest.raises(PlanningError, match="bucket 'NONE' does not exist"):
        read("NONE")
    name = stream_name()

    async def create(js: JetStreamContext) -> None:
        await js.create_key_value(KeyValueConfig(bucket=name, direct=False))
        config = (await js.stream_info(f"KV_{name}")).config
        await js.update_stream(config.evolve(allow_direct=False))

    with_js(create)
    with pytest.raises(DirectGetDisabledError, match="direct get is disabled; enable it"):
        read(name)


def test_a_mirror_bucket_names_the_bucket_to_read(with_js: Any, read: Read, make: Callable[..., str]) -> None:
    origin = make(ten)
    mirror = f"{origin}M"
    config = StreamConfig(name=f"KV_{mirror}", mirror=StreamSource(name=f"KV_{origin}"), allow_direct=True)
    with_js(lambda js: js.add_stream(config))
    with pytest.raises(
        PlanningError, match=f"'bucket': bucket '{mirror}' is a mirror of stream 'KV_{origin}'; open the"
    ):
        read(mirror)


def test_spark_reads_a_bucket(spark: SparkSession, server: NatsServer, make: Callable[..., str]) -> None:
    bucket = make(ten, history=3)
    reader = spark.read.format("jetstream_kv").option("servers", server.url)
    frame = reader.load(bucket)
    assert {row.key: bytes(row.value) for row in frame.collect()} == TEN
    rows = reader.option("asOf", "3").schema("revision long, key string").load(bucket).collect()
    assert sorted(map(tuple, rows)) == [(1, "k.0"), (2, "k.1"), (3, "k.2")]
