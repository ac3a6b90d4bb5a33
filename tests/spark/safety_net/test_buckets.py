"""Buckets as tables: every key and no event, whatever text it is and whichever replica or mirror replies."""

from __future__ import annotations

import asyncio
import importlib.util
from collections import Counter
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig, StreamConfig, StreamSource
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import StringType, StructType

import jetstream_ext.kv as kvx
from jetstream_ext.testing import NatsServer
from pyspark_jetstream_kv import DefaultSource

KEYS, ROUNDS, EVENTS = 4, 3, 5
SPARK_LIMITS_BATCHES = importlib.util.find_spec("pyspark.sql.streaming.datasource") is not None


def test_a_partial_mirror_that_answers_hides_no_key(
    cell: Any, make_stream: Any, stream_name: Any, bucket_read: Any, with_js: Any
) -> None:
    def check(newest: str) -> None:
        bucket, mirror = stream_name(), stream_name()
        make_stream(name=f"KV_{bucket}", subjects=[f"$KV.{bucket}.>"], max_msgs_per_subject=1)

        async def fill(js: JetStreamContext) -> None:
            await js.publish(f"$KV.{bucket}.other.first")
            for number in range(20):
                await js.publish(f"$KV.{bucket}.key.{number}", b"value")
            if newest == "in the mirror, too":
                await js.publish(f"$KV.{bucket}.other.last")
            only_others = StreamSource(name=f"KV_{bucket}", filter_subject=f"$KV.{bucket}.other.>")
            await js.add_stream(StreamConfig(name=mirror, mirror=only_others, mirror_direct=True, allow_direct=True))
            # The server chooses the responder: wait until the mirror is chosen sometimes.
            async with asyncio.timeout(60):
                while True:
                    answer = await js._nc.request(f"$JS.API.DIRECT.GET.KV_{bucket}", b'{"seq":1}', timeout=30)
                    if answer.headers["Nats-Stream"] == mirror:
                        return
                    await asyncio.sleep(0.01)

        with_js(fill)
        counts = {len(bucket_read(bucket, keys="key.>").rows()) for _ in range(30)}
        with_js(lambda js: js.delete_stream(mirror))
        assert counts == {20}

    for newest in ["in the bucket only", "in the mirror, too"]:
        with cell(newest):
            check(newest)


def make_bucket(with_js: Any, bucket: str) -> dict[str, bytes]:
    """Store each key `ROUNDS` times, each time with `EVENTS` events, and at the end events only; return the keys' values."""

    async def fill(js: JetStreamContext) -> None:
        kv = await kvx.ensure_bucket(js, bucket, history=ROUNDS, events=[f"{bucket}.events.>"])
        for number in range(KEYS * ROUNDS + 1):
            async with kvx.transaction(kv) as tx:
                if number < KEYS * ROUNDS:
                    tx.put(f"k{number % KEYS}", b"%d" % number)
                for _ in range(EVENTS):
                    tx.publish(f"{bucket}.events.changed", b"%d" % number)

    with_js(fill)
    return {f"k{key}": b"%d" % (key + KEYS * (ROUNDS - 1)) for key in range(KEYS)}


def test_events_are_a_stream_and_no_rows_of_the_bucket(
    cell: Any, with_js: Any, stream_name: Any, stream_query: Any, batch_read: Any, bucket_read: Any, bucket_query: Any
) -> None:
    bucket = stream_name()
    values = make_bucket(with_js, bucket)
    rows = stream_query(f"KV_{bucket}", subjects=f"{bucket}.events.>").rows()
    assert Counter(row["data"] for row in rows) == {b"%d" % number: EVENTS for number in range(KEYS * ROUNDS + 1)}
    assert {row["subject"].rpartition(".")[0] for row in rows} == {f"{bucket}.events.changed"}
    assert len(batch_read(f"KV_{bucket}", subjects=f"{bucket}.events.>").rows()) == len(rows)
    for options in ({}, {"consistency": "strict"}, {"includeDeleted": "true"}, {"keys": "*"}):
        with cell(options):
            found = bucket_read(bucket, **options).rows()
            assert {row["key"]: row["value"] for row in found} == values
            assert len(found) == KEYS
    for given, count in (("snapshot", KEYS), ("1", KEYS * ROUNDS)):
        with cell(given):
            found = bucket_query(bucket, startingOffsets=given).rows()
            assert len(found) == count
            assert {row["key"]: row["value"] for row in found} == values


@pytest.mark.skipif(not SPARK_LIMITS_BATCHES, reason="limits on micro-batches need Spark 4.2")
def test_a_limit_of_a_feed_counts_keys_and_no_events(with_js: Any, stream_name: Any, bucket_query: Any) -> None:
    bucket = stream_name()
    make_bucket(with_js, bucket)
    feed = bucket_query(bucket, startingOffsets="1", maxRowsPerTrigger="5")
    start, sizes = feed.initial(), []
    while (end := feed.latest(start)) != start:
        sizes.append(sum(map(len, feed.parts(start, end))))
        start = end
    assert [size for size in sizes if size] == [5, 5, 2]
    assert len(sizes) <= 4


ROWS = {
    "plain": ("PUT", b"\xff\xfe"),
    "\\xff": ("PUT", b"key"),
    "a.\\xe9": ("PUT", b"key"),
    "back\\\\slash": ("PUT", b"key"),
    "header": ("PUT", b"header"),
    "operation": ("PUT", b"operation"),
}


@pytest.fixture
def bucket(server: NatsServer, with_js: Any, stream_name: Any, publish_raw: Any) -> str:
    name = stream_name()
    with_js(lambda js: js.create_key_value(KeyValueConfig(bucket=name, history=2, direct=True)))
    prefix = b"$KV.%b." % name.encode()
    publish_raw(server, [(prefix + b"plain", b"\xff\xfe")])
    publish_raw(server, [(prefix + key, b"key") for key in (b"\xff", b"a.\xe9", b"back\\slash")])
    publish_raw(server, [(prefix + b"header", b"header")], block=b"NATS/1.0\r\n\xff: \xfe\r\nName: \xe9\r\n\r\n")
    publish_raw(server, [(prefix + b"operation", b"operation")], block=b"NATS/1.0\r\nKV-Operation: \xff\r\n\r\n")
    return name


def test_text_that_is_not_utf_8_is_read(
    cell: Any, server: NatsServer, bucket: str, bucket_read: Any, bucket_query: Any
) -> None:
    for name, rows in {
        "batch": bucket_read(bucket).rows(),
        "strict": bucket_read(bucket, consistency="strict", asOf="6").rows(),
        "snapshot": bucket_query(bucket).rows(),
        "changes": bucket_query(bucket, startingOffsets="1").rows(),
    }.items():
        with cell(name):
            assert {row["key"]: (row["operation"], row["value"]) for row in rows} == ROWS
            assert len(rows) == len(ROWS)
    source = DefaultSource(CaseInsensitiveDict({"servers": server.url, "bucket": bucket}))
    reader: Any = source.reader(StructType().add("key", StringType()))
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    assert sorted(key for batch in batches for key in batch.to_pydict()["key"]) == sorted(ROWS)
