"""The change feed of a bucket, called as Spark calls it, against a real server."""

from __future__ import annotations

import itertools
import json
import pickle
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig, StreamConfig, StreamSource
from nats.js.kv import KeyValue
from pyspark.sql.datasource import CaseInsensitiveDict

from jetstream_ext.spark import waiting
from jetstream_ext.spark.connection import Connections
from jetstream_ext.spark.options import FeedOptions, OptionError
from jetstream_ext.spark.planning import DataLossError, PlanningError
from jetstream_ext.spark.source import SchemaError
from jetstream_ext.spark.streaming import HAS_LIMITS
from jetstream_ext.testing import Faults, NatsServer, ReferenceServer, StaleReplica
from pyspark_jetstream_kv import DefaultSource

Offset = dict[str, Any]
Row = dict[str, Any]
Make = Callable[..., str]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetstream_ext.client.api.SETTLE", 0.2)
    monkeypatch.setattr(waiting, "_LONGEST_PAUSE", 0.001)


class Feed:
    """A query, and its offsets as Spark's logs have them."""

    def __init__(self, url: str, bucket: str, **options: str) -> None:
        self._given = {"servers": url, "bucket": bucket, "requestTimeout": "20"}
        self.bucket = bucket
        self.rows: list[Row] = []  # of all committed micro-batches
        self.offset: Offset | None = None
        self.restart(**options)

    def restart(self, **options: str) -> None:
        self._given |= options
        source = DefaultSource(CaseInsensitiveDict(self._given))
        self.reader: Any = source.streamReader(source.schema())

    def start(self) -> Offset:
        return through_the_log(self.reader.initialOffset()) if self.offset is None else self.offset

    def plan(self, *, plain: bool = False) -> Offset:
        """Return the end of the next micro-batch; `plain`: Spark before 4.2, which passes no start."""
        if plain or not HAS_LIMITS:
            return through_the_log(self.reader.latestOffset())
        return through_the_log(self.reader.latestOffset(self.start(), self.reader.getDefaultReadLimit()))

    def read(self, end: Offset, *, between: Callable[[], None] = lambda: None) -> list[Row]:
        parts = self.reader.partitions(self.start(), end)
        between()
        rows: list[Row] = []
        for part in parts:
            reader, copy = pickle.loads(pickle.dumps((self.reader, part)))
            rows += [row for batch in reader.read(copy) for row in batch.to_pylist()]
        return rows

    def trigger(self, *, plain: bool = False) -> list[Row] | None:
        """Run a micro-batch and return its rows, or None if there is nothing new."""
        end = self.plan(plain=plain)
        if end == self.offset:
            return None
        rows = self.read(end)
        self.offset = end
        self.rows += rows
        return rows

    def drain(self) -> list[Row]:
        """Return the rows of all micro-batches until there is nothing new."""
        found: list[Row] = []
        while (rows := self.trigger()) is not None:
            found += rows
        return found

    @property
    def seq(self) -> int:
        assert self.offset is not None
        return int(self.offset["streams"][f"KV_{self.bucket}"]["seq"])


def through_the_log(offset: Offset) -> Offset:
    return dict(json.loads(json.dumps(offset)))


def changes(rows: list[Row]) -> list[tuple[int, str, str, bytes]]:
    return [(row["revision"], row["key"], row["operation"], row["value"]) for row in rows]


@pytest.fixture
def make(with_js: Any, stream_name: Callable[[], str]) -> Make:
    """Make a bucket with five keys, of which "b" was deleted and "c" purged: revisions 1 to 9."""

    def bucket(fill: Callable[[KeyValue], Awaitable[None]] = five, **config: Any) -> str:
        name = stream_name()

        async def create(js: JetStreamContext) -> None:
            await fill(await js.create_key_value(KeyValueConfig(bucket=name, direct=True, **config)))

        with_js(create)
        return name

    return bucket


async def five(kv: KeyValue) -> None:
    for key in "abcde":
        await kv.put(key, key.encode())
    await kv.put("a", b"a2")
    await kv.delete("b")
    await kv.put("c", b"c2")
    await kv.purge("c")


SNAPSHOT = [(4, "d", "PUT", b"d"), (5, "e", "PUT", b"e"), (6, "a", "PUT", b"a2")]
MARKERS = [(7, "b", "DEL", b""), (9, "c", "PURGE", b"")]


async def nothing(kv: KeyValue) -> None:
    pass


@pytest.fixture
def put(with_js: Any) -> Callable[..., None]:
    """Write keys one after the other: put a value, or delete the key where it is None."""

    def write(bucket: str, *pairs: tuple[str, bytes | None]) -> None:
        async def work(js: JetStreamContext) -> None:
            kv = await js.key_value(bucket)
            for key, value in pairs:
                await (kv.delete(key) if value is None else kv.put(key, value))

        with_js(work)

    return write


@pytest.fixture
def feed(server: NatsServer, cache: Connections) -> Callable[..., Feed]:
    del cache
    return lambda bucket, **options: Feed(server.url, bucket, **options)


class TestStart:
    def test_the_state_comes_first_and_then_every_change(
        self, cell: Any, make: Make, feed: Callable[..., Feed], put: Any
    ) -> None:
        for history in [1, 5]:
            with cell(history):
                query = feed(make(history=history))
                assert changes(query.drain()) == SNAPSHOT
                put(query.bucket, ("a", b"a3"), ("d", None), ("new", b"1"))
                assert changes(query.drain()) == [
                    (10, "a", "PUT", b"a3"),
                    (11, "d", "DEL", b""),
                    (12, "new", "PUT", b"1"),
                ]

    def test_the_revision_of_the_snapshot_survives_a_restart_before_the_first_commit(
        self, cell: Any, make: Make, feed: Callable[..., Feed], put: Any
    ) -> None:
        for history in [1, 5]:
            with cell(history):
                query = feed(make(history=history))
                end = query.plan()  # Spark has written it down
                put(query.bucket, ("e", b"e2"), ("e", b"e3"))
                query.restart()
                assert query.start()["streams"][f"KV_{query.bucket}"]["snapshot"] == 11
                rows = query.read(end)
                query.offset = end
                left = [row for row in SNAPSHOT if history > 1 or row[1] != "e"]
                assert changes(rows) == left
                later = [(10, "e", "PUT", b"e2"), (11, "e", "PUT", b"e3")]
                assert changes(query.drain()) == later[-history:]

    @pytest.mark.skipif(not HAS_LIMITS, reason="needs limits on micro-batches, which Spark 4.2 has")
    def test_the_revision_of_the_snapshot_survives_until_all_of_it_is_read(
        self, make: Make, feed: Callable[..., Feed], put: Any
    ) -> None:
        """A restart between two of its micro-batches does not make a change a row of the snapshot, or the reverse."""
        query = feed(make(history=5), maxRowsPerTrigger="3")
        assert changes(query.trigger() or []) == SNAPSHOT[:1]
        assert query.seq == 4
        put(query.bucket, ("d", b"d2"), ("a", None))
        query.restart()
        assert changes(query.drain()) == [*SNAPSHOT[1:], (10, "d", "PUT", b"d2"), (11, "a", "DEL", b"")]
        assert "snapshot" not in json.dumps(query.offset)

    def test_a_revision_is_the_first_one_that_is_read(self, make: Make, feed: Callable[..., Feed]) -> None:
        bucket = make(history=5)
        assert changes(feed(bucket, startingOffsets="5").drain()) == [*SNAPSHOT[1:], *MARKERS]
        assert [row["revision"] for row in feed(bucket, startingOffsets="1").drain()] == [1, 2, 4, 5, 6, 7, 9]
        with pytest.raises(DataLossError, match="ends at sequence 9, before the start at 11"):
            feed(bucket, startingOffsets="11").drain()


class TestRows:
    def test_every_column_is_read_and_a_schema_prunes_them(self, make: Make, server: NatsServer, feed: Any) -> None:
        query = feed(make(), keys="d")
        row = query.drain()[0]
        assert time.time() - row.pop("created").timestamp() < 60
        assert row == {"bucket": query.bucket, "key": "d", "value": b"d", "revision": 4, "operation": "PUT"}
        source = DefaultSource(CaseInsensitiveDict({"servers": server.url, "bucket": query.bucket}))
        from pyspark.sql.types import LongType, StringType, StructType

        reader = source.streamReader(StructType().add("revision", LongType()).add("key", StringType()))
        assert query.offset is not None
        parts = reader.partitions(query.reader.initialOffset(), query.offset)
        batches = [batch for part in parts for batch in reader.read(part)]
        assert {tuple(batch.schema.names) for batch in batches} == {("revision", "key")}
        with pytest.raises(SchemaError, match="'seq' does not exist"):
            source.streamReader(StructType().add("seq", LongType()))

    def test_the_marker_of_an_expired_key_is_a_change(
        self, make: Make, feed: Callable[..., Feed], with_js: Any
    ) -> None:
        query = feed(make(nothing, limit_marker_ttl=60))
        query.drain()
        stream = f"KV_{query.bucket}"

        async def expire(js: JetStreamContext) -> None:
            await js.publish(f"$KV.{query.bucket}.a", b"1", headers={"Nats-TTL": "1"})
            while (await js.stream_info(stream)).state.last_seq < 2:
                pass

        with_js(expire)
        assert changes(query.drain()) == [(2, "a", "PURGE", b"")]

    def test_a_replica_that_lags_repeats_no_key_of_the_snapshot(self, with_js: Any, cache: Connections) -> None:
        """It still has messages that others had replaced before the snapshot."""
        faults = Faults()
        with ReferenceServer(faults=faults) as server:

            async def create(js: JetStreamContext) -> None:
                kv = await js.create_key_value(KeyValueConfig(bucket="B", direct=True, history=2))
                for number in range(30):
                    await kv.put(f"k{number % 10}", b"%d" % number)

            with_js(create, server.url)
            query = Feed(server.url, "B", startingOffsets="snapshot")
            end = query.plan()
            parts = query.reader.partitions(query.start(), end)
            rows: list[Row] = []
            for part in parts:
                faults.add(stale := StaleReplica("$JS.API.DIRECT.GET.>", behind=10, times=3))
                rows += [row for batch in query.reader.read(part) for row in batch.to_pylist()]
                faults.remove(stale)
            assert [row["revision"] for row in rows] == list(range(21, 31))


class TestLoss:
    def test_a_purge_of_changes_that_were_not_read_is_a_loss(
        self, cell: Any, make: Make, feed: Callable[..., Feed], put: Any, with_js: Any
    ) -> None:
        def check(restarted: bool, plain: bool) -> None:
            query = feed(make())
            query.trigger(plain=plain)
            put(query.bucket, ("a", b"1"), ("b", b"1"), ("c", b"1"))
            with_js(lambda js: js.purge_stream(f"KV_{query.bucket}", seq=12))
            if restarted:
                query.restart()
            with pytest.raises(DataLossError, match=rf"sequences 10 to 11 of stream 'KV_{query.bucket}' are gone"):
                query.trigger(plain=plain)
            query.restart(failOnDataLoss="false")
            assert changes(query.trigger(plain=plain) or []) == [(12, "c", "PUT", b"1")]

        for plain, restarted in itertools.product([False, True], [False, True]):
            with cell(plain, restarted):
                check(restarted, plain)

    def test_keys_that_are_purged_before_the_snapshot_is_read_are_no_loss(
        self, make: Make, feed: Callable[..., Feed], put: Any, with_js: Any
    ) -> None:
        query = feed(make(), minPartitions="3")
        end = query.plan()
        with_js(lambda js: js.purge_stream(f"KV_{query.bucket}", seq=6))
        assert changes(query.read(end)) == SNAPSHOT[2:]
        with_js(lambda js: js.purge_stream(f"KV_{query.bucket}"))
        query.restart()
        assert query.read(end) == []

    def test_changes_that_expired_before_they_were_read_are_a_loss(
        self, make: Make, feed: Callable[..., Feed], put: Any, with_js: Any
    ) -> None:
        query = feed(make(nothing, ttl=5), startingOffsets="latest")
        query.drain()
        put(query.bucket, ("a", b"1"), ("b", b"1"))
        wait_until_empty(with_js, query.bucket)
        put(query.bucket, ("c", b"1"))
        with pytest.raises(DataLossError, match="sequences 1 to 2"):
            query.drain()

    def test_keys_that_expired_after_they_were_read_are_no_loss(
        self, make: Make, feed: Callable[..., Feed], put: Any, with_js: Any
    ) -> None:
        """Also beside a key that is written again and again, which moves the first revision past the position."""
        query = feed(make(nothing, ttl=6))
        put(query.bucket, ("a", b"1"), ("b", b"1"), ("hot", b"1"))
        query.drain()
        deadline = time.monotonic() + 60
        while with_js(lambda js: js.stream_info(f"KV_{query.bucket}")).state.messages > 1:
            assert time.monotonic() < deadline
            put(query.bucket, ("hot", b"2"), ("hot", b"3"))
            assert [row["value"] for row in query.drain()] == [b"3"]

    def test_changes_after_a_quiet_time_are_no_loss(
        self, cell: Any, make: Make, feed: Callable[..., Feed], with_js: Any, put: Any
    ) -> None:
        """Nothing was written for longer than the TTL, and then one key several times."""

        def check(plain: bool, own: bool) -> None:
            query = feed(make(nothing, ttl=None if own else 4))

            async def two(js: JetStreamContext) -> None:
                for key in "ab":
                    await js.publish(f"$KV.{query.bucket}.{key}", headers={"Nats-TTL": "1"} if own else None)

            with_js(two)
            query.trigger(plain=plain)
            while with_js(lambda js: js.stream_info(f"KV_{query.bucket}")).state.messages:
                pass
            assert not query.trigger(plain=plain)
            put(query.bucket, ("hot", b"1"), ("hot", b"2"), ("hot", b"3"))
            assert [row["value"] for row in query.trigger(plain=plain) or []] == [b"3"]

        for plain, own in itertools.product([False, True], [False, True]):
            with cell(plain, own):
                check(plain, own)

    def test_a_bucket_that_was_created_again(
        self, make: Make, feed: Callable[..., Feed], put: Any, with_js: Any
    ) -> None:
        query = feed(make(history=5))
        query.drain()

        async def recreate(js: JetStreamContext) -> None:
            await js.delete_key_value(query.bucket)
            await js.create_key_value(KeyValueConfig(bucket=query.bucket, history=5, direct=True))

        with_js(recreate)
        put(query.bucket, ("a", b"1"), ("a", b"2"), ("b", b"1"))
        with pytest.raises(DataLossError, match="was deleted and re-created"):
            query.drain()
        query.restart(onRecreate="earliest")
        # There is no snapshot of the new bucket: each of its revisions is a change.
        assert changes(query.drain()) == [(1, "a", "PUT", b"1"), (2, "a", "PUT", b"2"), (3, "b", "PUT", b"1")]

    def test_a_bucket_that_was_created_again_before_its_snapshot_is_read(
        self, cell: Any, make: Make, feed: Callable[..., Feed], put: Any, with_js: Any
    ) -> None:
        def check(history: int) -> None:
            query = feed(make(history=history))
            end = query.plan()

            async def recreate(js: JetStreamContext) -> None:
                await js.delete_key_value(query.bucket)
                await js.create_key_value(KeyValueConfig(bucket=query.bucket, history=history, direct=True))

            with pytest.raises(DataLossError, match="deleted or re-created while it was read"):
                query.read(end, between=lambda: with_js(recreate))
            query.restart(onRecreate="earliest")
            assert query.read(end) == []

        for history in [1, 5]:
            with cell(history):
                check(history)

    def test_a_bucket_that_is_missing_or_none_is_an_error(
        self, make: Make, feed: Callable[..., Feed], with_js: Any, stream_name: Callable[[], str]
    ) -> None:
        name = stream_name()
        with pytest.raises(PlanningError, match=f"bucket '{name}' does not exist"):
            feed(name).drain()
        with_js(lambda js: js.add_stream(StreamConfig(name=f"KV_{name}", subjects=[f"{name}.>"], allow_direct=True)))
        with pytest.raises(PlanningError, match=r"option 'bucket': .* is not a bucket"):
            feed(name).drain()
        origin, mirror = make(), stream_name()
        config = StreamConfig(name=f"KV_{mirror}", mirror=StreamSource(name=f"KV_{origin}"), max_msgs_per_subject=1)
        with_js(lambda js: js.add_stream(config))
        with pytest.raises(PlanningError, match=r"option 'bucket': .* is a mirror"):
            feed(mirror).drain()


def wait_until_empty(with_js: Any, bucket: str) -> None:
    async def wait(js: JetStreamContext) -> None:
        while (await js.stream_info(f"KV_{bucket}")).state.messages:
            pass

    with_js(wait)


CONNECTION = {"servers": "nats://n:4222", "bucket": "B"}


def test_a_streaming_read_refuses_an_option_without_effect(cell: Any) -> None:
    for given, message in [
        ({"startingOffsets": "earliest"}, "'startingOffsets': 'earliest' is not 'snapshot', 'latest' or a revision"),
        ({"startingOffsets": "0"}, "'startingOffsets': '0' is not"),
        ({"asOf": "5"}, "'asOf': it applies only to batch reads; a streaming query starts at 'startingOffsets'"),
        ({"consistency": "strict"}, "'consistency': it applies only to batch reads"),
        ({"includeDeleted": "true", "startingOffsets": "latest"}, "'includeDeleted': it applies to the snapshot"),
        ({"maxTriggerDelay": "1m"}, "'maxTriggerDelay': it limits the wait"),
        ({"maxRowsPerTrigger": "1", "maxOffsetsPerTrigger": "1"}, "cannot be combined"),
        ({"keys": "a..b"}, "'keys': .*empty token"),
        ({"stream": "S"}, "'stream': unknown option"),
        ({"startingTime": "2026-01-01T00:00:00Z"}, "'startingtime': unknown option; did you mean"),
        ({"endingOffsets": "5"}, "'endingoffsets': unknown option"),
        ({"bucket": ""}, "'bucket'"),
    ]:
        with cell(given, message), pytest.raises(OptionError, match=message):
            FeedOptions.parse(CaseInsensitiveDict(CONNECTION | given))
