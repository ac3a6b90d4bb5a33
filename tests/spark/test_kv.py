"""Buckets as tables: keys by name, the whole log in each task, or ranges of the log; revisions, and history that is gone."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import nats
import pytest
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig, StreamConfig, StreamSource
from nats.js.errors import NoStreamResponseError, ServiceUnavailableError
from nats.js.kv import KeyValue
from pyspark.sql.datasource import CaseInsensitiveDict, InputPartition

import jetstream_ext.kv as kvx
from jetstream_ext.errors import (
    DirectGetDisabledError,
    HistoryUnavailableError,
    RequestTimeoutError,
    StreamRecreatedError,
)
from jetstream_ext.spark import buckets, kv
from jetstream_ext.spark.options import OptionError
from jetstream_ext.spark.planning import PlanningError, state_of
from jetstream_ext.testing import NatsServer, ReferenceServer
from jetstream_ext.testing.reference.faults import Faults, StaleReplica
from pyspark_jetstream_kv import DefaultSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("cache")

KEYS = 1_200
Change = Callable[[KeyValue], Any]


@pytest.fixture
def whole_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every bucket have more keys than a task lists."""
    monkeypatch.setattr(kv, "_MOST_LISTED", 0)


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch, whole_log: None) -> None:
    """Let every bucket be too large for a read of the whole log as well."""
    monkeypatch.setattr(kv, "_SMALL_LOG", 0)
    monkeypatch.setattr(kv, "_MESSAGES_PER_RANGE", KEYS // 3)


class Read:
    """A read of one bucket: planned by the driver, then read part by part."""

    def __init__(self, url: str, bucket: str, **given: str) -> None:
        self.url, self.bucket = url, bucket
        self.given = given
        source = DefaultSource(CaseInsensitiveDict({"servers": url, "bucket": bucket, "requestTimeout": "5"} | given))
        self.reader: Any = source.reader(source.schema())
        self.parts: list[Any] = []

    def plan(self) -> Read:
        self.parts = self.reader.partitions()
        return self

    def again(self, **given: str) -> Read:
        """Plan another read of the bucket."""
        return Read(self.url, self.bucket, **self.given | given).plan()

    def change(self, change: Change) -> Read:
        async def connect_and_change() -> None:
            async with await nats.connect(self.url) as nc:
                await change(await nc.jetstream(timeout=10).key_value(self.bucket))

        asyncio.run(connect_and_change())
        return self

    def batches(self, part: Any) -> Iterator[list[dict[str, Any]]]:
        reader, sent = pickle.loads(pickle.dumps((self.reader, part)))
        return (batch.to_pylist() for batch in reader.read(sent))

    def rows(self) -> list[dict[str, Any]]:
        return [row for part in self.parts for batch in self.batches(part) for row in batch]

    def values(self) -> dict[str, bytes]:
        """Return the value of every key, each of which was read once."""
        rows = self.rows()
        repeated = [key for key, count in Counter(row["key"] for row in rows).items() if count > 1]
        assert not repeated
        return {row["key"]: row["value"] for row in rows}


async def create_bucket(js: JetStreamContext, *, own_ttls: bool = False, **config: Any) -> KeyValue:
    """Create a bucket as other clients do; nats-py always lets messages have TTLs of their own."""
    add_stream = js.add_stream
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(js, "add_stream", lambda given: add_stream(given.evolve(allow_msg_ttl=own_ttls)))
        return await js.create_key_value(KeyValueConfig(direct=True, **config))


@pytest.fixture
def make(server: NatsServer, with_js: Any, stream_name: Callable[[], str]) -> Callable[..., Read]:
    """Make a bucket, fill it, and prepare a read: ``make(fill, history=3, options={"keys": …})``."""

    def make(fill: Change, *, options: dict[str, str] | None = None, **config: Any) -> Read:
        name = stream_name()

        async def create(js: JetStreamContext) -> None:
            await fill(await create_bucket(js, bucket=name, **config))

        with_js(create)
        return Read(server.url, name, **(options or {}))

    return make


def key(number: int) -> str:
    return f"customer.{number:05}.address"


def value(number: int, version: int = 0) -> bytes:
    return b"%d/%d" % (number, version)


EVERY_KEY = {key(number): value(number) for number in range(KEYS)}


def written(numbers: Iterable[int], version: int) -> dict[str, bytes]:
    return {key(number): value(number, version) for number in numbers}


async def write(bucket: KeyValue, entries: dict[str, bytes]) -> None:
    """Write in the order of `entries`, also while the stream elects a leader."""

    async def publish(js: JetStreamContext, name: str, data: bytes) -> None:
        deadline = time.monotonic() + 30
        while True:
            try:
                await js.publish(f"$KV.{bucket._name}.{name}", data)
                return
            except (NoStreamResponseError, ServiceUnavailableError):
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)

    items = list(entries.items())
    for start in range(0, len(items), 500):
        await asyncio.gather(*(publish(bucket._js, *item) for item in items[start : start + 500]))


async def expired(bucket: KeyValue, left: int = 0) -> None:
    """Wait until the bucket has only so many values."""
    async with asyncio.timeout(30):
        while (await bucket.status()).values > left:
            await asyncio.sleep(0.1)


def writes(numbers: Iterable[int], version: int) -> Change:
    return lambda bucket: write(bucket, written(numbers, version))


async def fill(bucket: KeyValue) -> None:
    await write(bucket, EVERY_KEY)


async def several_versions(bucket: KeyValue) -> None:
    """Write every key, every second one twice, and every tenth one three times."""
    await fill(bucket)
    await write(bucket, written(range(0, KEYS, 2), 1))
    await write(bucket, written(range(0, KEYS, 10), 2))


NEWEST = EVERY_KEY | written(range(0, KEYS, 2), 1) | written(range(0, KEYS, 10), 2)
ERROR = r"rows may be missing, because the history needed for {} \(such as '{}'\)"


class TestThePlan:
    def test_a_plan_does_not_grow_with_the_keys(self, make: Callable[..., Read], ranges: None) -> None:
        small, large = make(partial(write, entries=written(range(10), 0))).plan(), make(fill).plan()
        assert len(large.parts) == 3
        sizes = [len(pickle.dumps(part)) for part in (*small.parts, *large.parts)]
        assert max(sizes) < 2_000
        assert max(sizes) - min(sizes) < 50


@pytest.mark.parametrize("mode", ["by_name", "whole_log", "ranges"])
class TestEveryMode:
    @pytest.fixture(autouse=True)
    def _mode(self, request: pytest.FixtureRequest, mode: str) -> None:
        if mode != "by_name":
            request.getfixturevalue(mode)

    def test_every_key_is_read_once(self, cell: Any, make: Callable[..., Read]) -> None:
        for consistency, history in itertools.product(["latest", "strict"], [1, 3]):
            with cell(consistency, history):
                options = {"consistency": consistency, "minPartitions": "5"}
                read = make(several_versions, history=history, options=options).plan()
                assert len(read.parts) >= 5
                assert read.values() == NEWEST

    def test_keys_select_the_rows(self, cell: Any, make: Callable[..., Read]) -> None:
        async def beside_others(bucket: KeyValue) -> None:
            await kvx.enable(bucket, events=[f"{bucket._name}.>"])
            await several_versions(bucket)
            await write(bucket, {"customer.1": b"", "other": b"", "customer.00001.name": b"x"})
            for number in range(30):
                await bucket._js.publish(f"{bucket._name}.{number}", b"no key")

        for history in (1, 3):
            read = make(beside_others, history=history)
            for keys, expected in {
                "customer.000*.address": {},
                "customer.00001.*,customer.02*.>": {"customer.00001.name": b"x", key(1): NEWEST[key(1)]},
                "customer.*.address": NEWEST,
                "none.>": {},
                ">": NEWEST | {"customer.1": b"", "other": b"", "customer.00001.name": b"x"},
            }.items():
                with cell(history, keys):
                    assert read.again(keys=keys).values() == expected

    def test_deleted_keys_are_read_on_request(self, cell: Any, make: Callable[..., Read]) -> None:
        def check(history: int) -> None:
            async def with_deletes(bucket: KeyValue) -> None:
                await fill(bucket)
                await bucket.delete(key(1))
                await bucket.purge(key(2))
                await bucket.delete(key(3))
                await bucket.put(key(3), b"again")

            read = make(with_deletes, history=history).plan()
            assert read.values() == {k: v for k, v in EVERY_KEY.items() if k not in (key(1), key(2))} | {
                key(3): b"again"
            }
            all_rows = read.again(includeDeleted="true").rows()
            found = {row["key"]: row["operation"] for row in all_rows}
            assert len(found) == len(all_rows) == KEYS
            assert (found[key(1)], found[key(2)], found[key(3)]) == ("DEL", "PURGE", "PUT")

        for history in [1, 3]:
            with cell(history):
                check(history)

    def test_keys_that_clients_refuse_are_read(
        self, cell: Any, make: Callable[..., Read], server: NatsServer, publish_raw: Callable[..., None]
    ) -> None:
        def check(history: int) -> None:
            read = make(fill, history=history, options={"minPartitions": "4"})
            odd = {
                b"\xff": "\\xff",
                b"\xfe": "\\xfe",
                b"\\xff": "\\\\xff",
                "\ufffd".encode(): "\ufffd",
                b"k.\xff": "k.\\xff",
            }
            prefix = b"$KV.%b." % read.bucket.encode()
            publish_raw(server, ((prefix + name, b"old") for name in odd))
            read.change(writes(range(KEYS), 1))
            publish_raw(server, ((prefix + name, name) for name in odd))
            read.change(writes(range(10), 2))
            expected = written(range(KEYS), 1) | written(range(10), 2) | {text: name for name, text in odd.items()}
            assert read.plan().values() == expected

        for history in [1, 3]:
            with cell(history):
                check(history)

    def test_with_history_no_change_shows(self, make: Callable[..., Read]) -> None:
        async def change(bucket: KeyValue) -> None:
            await write(bucket, written(range(100, 600), 9) | {"new": b"new"})
            await bucket.delete(key(1_000))

        for consistency in ("latest", "strict"):
            read = make(several_versions, history=4, options={"consistency": consistency}).plan()
            assert read.change(change).values() == NEWEST

    def test_new_keys_do_not_show_if_no_key_has_changed(self, cell: Any, make: Callable[..., Read]) -> None:
        for consistency in ["latest", "strict"]:
            with cell(consistency):
                read = make(several_versions, options={"consistency": consistency}).plan()
                assert read.change(partial(write, entries={"new.1": b"new", "new.2": b"new"})).values() == NEWEST

    def test_a_bucket_that_was_created_again_is_noticed(self, cell: Any, make: Callable[..., Read]) -> None:
        def check(history: int) -> None:
            async def create_again(bucket: KeyValue) -> None:
                js = bucket._js
                await js.delete_key_value(bucket._name)
                again = await js.create_key_value(KeyValueConfig(bucket=bucket._name, direct=True, history=history))
                await write(again, written(range(2 * KEYS), 7))

            read = make(fill, history=history).plan().change(create_again)
            for part in read.parts:
                with pytest.raises(StreamRecreatedError):
                    list(read.batches(part))

        for history in [1, 3]:
            with cell(history):
                check(history)

    def test_keys_that_expire_leave_no_row_and_a_strict_read_fails(self, make: Callable[..., Read]) -> None:
        async def expire(bucket: KeyValue) -> None:
            await expired(bucket)
            await bucket.put("new", b"new")

        ten = {str(number): b"" for number in range(10)}
        read = make(partial(write, entries=ten), history=2, ttl=5).plan()
        assert read.change(expire).values().keys() <= {"new"}
        read = make(partial(write, entries=ten), history=2, ttl=5, options={"consistency": "strict"}).plan()
        with pytest.raises(HistoryUnavailableError, match="keys may be missing"):
            read.change(expire).rows()

    def test_a_strict_read_beside_a_writer_is_exact_or_an_error(
        self, cell: Any, make: Callable[..., Read], with_js: Any
    ) -> None:
        def check(history: int) -> None:
            keys, random = 400, Random(history)
            names = [key(number) for number in range(keys)]
            log: list[tuple[int, str, bytes | None]] = []  # revision, key, value
            read = make(lambda bucket: asyncio.sleep(0), history=history, options={"consistency": "strict"})

            def at(revision: int) -> dict[str, bytes]:
                entries = {name: data for seq, name, data in log if seq <= revision}
                return {name: data for name, data in entries.items() if data is not None}

            def read_once() -> dict[str, bytes] | None:
                try:
                    return read.plan().values()
                except (HistoryUnavailableError, RequestTimeoutError):
                    return None

            async def write_meanwhile(js: JetStreamContext) -> int:
                bucket, exact = await js.key_value(read.bucket), 0

                async def change(number: int) -> None:
                    name, how = names[number % keys], random.random()
                    if number < keys or how < 0.9:
                        data = b"%d" % number
                        log.append((await bucket.put(name, data), name, data))
                    else:
                        await (bucket.delete(name) if how < 0.97 else bucket.purge(name))
                        log.append(((await js.stream_info(f"KV_{bucket._name}")).state.last_seq, name, None))

                for number in range(keys):
                    await change(number)
                for turn in range(12):  # on a slow machine, only reads beside a slow writer are exact
                    reading = asyncio.ensure_future(asyncio.to_thread(read_once))
                    while not reading.done():
                        await change(keys + random.randrange(keys))
                        await asyncio.sleep(0.001 * 2**turn * random.random())
                    if (found := await reading) is not None:
                        assert found == at(read.parts[0].value.point.revision)
                        exact += 1
                    if exact and turn > 4:
                        break
                return exact

            assert with_js(write_meanwhile) > 0

        for history in [2, 4]:
            with cell(history):
                check(history)


FIVE = {f"a.{number}": b"v" for number in range(5)}


class TestClassesWithoutKeys:
    def test_a_strict_read_fails_if_all_matching_keys_have_expired(self, make: Callable[..., Read]) -> None:
        async def change(bucket: KeyValue) -> None:
            await expired(bucket)
            await bucket.put("b.z", b"new")

        options = {"consistency": "strict", "keys": "a.*", "minPartitions": "5"}
        read = make(partial(write, entries=FIVE), history=2, ttl=5, options=options).plan().change(change)
        assert len(read.parts) == 5
        for part in read.parts:
            with pytest.raises(HistoryUnavailableError, match="keys may be missing"):
                list(read.batches(part))


async def allow_deletes(context: JetStreamContext, stream: str) -> Any:
    state = await state_of(context, stream)
    assert state is not None
    return replace(state, config={**state.config, "deny_delete": False})


@pytest.mark.usefixtures("ranges")
class TestHistoriesWithGaps:
    def test_a_value_that_expires_before_an_older_one_repeats_no_key(
        self, cell: Any, make: Callable[..., Read]
    ) -> None:
        async def fill_with_ttl(bucket: KeyValue) -> None:
            await write(bucket, {"k": b"v1"} | {f"other.{number}": b"" for number in range(98)})
            await bucket._js.publish(f"$KV.{bucket._name}.k", b"v2", headers={"Nats-TTL": "2s"})

        for consistency in ("latest", "strict"):
            with cell(consistency):
                options = {"consistency": consistency, "minPartitions": "2"}
                read = make(fill_with_ttl, history=2, own_ttls=True, options=options).plan()
                assert len(read.parts) == 2  # classes of keys
                before = read.values()
                assert read.change(partial(expired, left=99)).values() == before | {"k": b"v1"}

    def test_a_log_is_cut_only_if_older_values_never_outlive_newer_ones(self, make: Callable[..., Read]) -> None:
        cells = [(1, True, True, True), (2, False, False, True), (2, True, False, False), (2, False, True, False)]
        for history, own_ttls, deletes, cut in cells:
            read = make(several_versions, history=history, own_ttls=own_ttls, options={"minPartitions": "20"})
            with pytest.MonkeyPatch.context() as patch:
                if deletes:
                    patch.setattr(buckets, "state_of", allow_deletes)
                read.plan()
            assert len(read.parts) == (20 if cut else 8)  # ranges, or classes of keys
            assert read.values() == NEWEST


def test_batches_of_large_values_are_cut_by_their_bytes(
    cell: Any, make: Callable[..., Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    size, limit = 64 << 10, 512 << 10
    monkeypatch.setattr(kv, "_BYTES_AT_ONCE", limit)
    monkeypatch.setattr(buckets, "_BATCH_BYTES", limit)

    async def fill(bucket: KeyValue) -> None:
        for number in range(200):
            await bucket.put(key(number), number.to_bytes() * size)

    for changed in [False, True]:
        with cell(changed):
            read = make(fill, options={"minPartitions": "1"}).plan()
            if changed:
                read.change(fill)
            [part] = read.parts
            batches = list(read.reader.read(part))
            found = [name for batch in batches for name in batch.column("key").to_pylist()]
            assert sorted(found) == [key(number) for number in range(200)]
            assert max(batch.nbytes for batch in batches) <= limit + 10_000


@pytest.mark.usefixtures("ranges")
class TestRanges:
    def test_without_history_a_change_is_an_error(self, cell: Any, make: Callable[..., Read]) -> None:
        for consistency in ["latest", "strict"]:
            with cell(consistency):
                read = make(several_versions, options={"consistency": consistency}).plan().change(writes([7, 8], 9))
                for part in read.parts:
                    with pytest.raises(HistoryUnavailableError, match=ERROR.format("2 keys", key(7))) as error:
                        list(read.batches(part))
                    assert error.value.keys == (key(7), key(8))

    def test_a_change_during_the_read_of_a_range_is_an_error(self, make: Callable[..., Read]) -> None:
        read = make(fill, options={"minPartitions": "1"})
        read.plan()
        [first, *_] = read.parts
        whole = replace(first.value.span, first=1, last=KEYS)
        batches = read.batches(InputPartition(replace(first.value, span=whole)))
        found = next(batches)
        assert 0 < len(found) < KEYS
        read.change(writes([KEYS - 1], 9))
        with pytest.raises(HistoryUnavailableError, match=ERROR.format("1 key", key(KEYS - 1))):
            list(batches)

    def test_a_revision_too_far_in_the_past_is_refused(
        self, make: Callable[..., Read], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kv, "_MOST_CHANGES", 100)
        make(fill, history=2, options={"asOf": f"{KEYS - 100}"}).plan()
        with pytest.raises(
            PlanningError, match=rf"'asOf': .* written 101 times since revision {KEYS - 101}; .* at most 100 rev"
        ):
            make(fill, history=2, options={"asOf": f"{KEYS - 101}"}).plan()


@pytest.mark.usefixtures("ranges")
class TestReplicas:
    def test_a_lagging_replica_repeats_no_key(self, cell: Any, with_js: Any) -> None:
        """It still has messages that others replaced before the revision."""

        def check(history: int) -> None:
            faults = Faults()
            with ReferenceServer(faults=faults) as server:

                async def create(js: JetStreamContext) -> None:
                    await several_versions(await create_bucket(js, bucket="B", history=history))

                with_js(create, server.url)
                read = Read(server.url, "B").plan()
                seen = 0
                for part in read.parts:
                    point = part.value.point
                    state = replace(point.state, replicated=True)
                    part = InputPartition(replace(part.value, point=replace(point, state=state)))
                    faults.add(lag := StaleReplica("$JS.API.DIRECT.GET.>", behind=KEYS // 3, times=3))
                    rows = [row for batch in read.batches(part) for row in batch]
                    faults.remove(lag)
                    assert {row["key"]: row["value"] for row in rows}.items() <= NEWEST.items()
                    seen += len(rows)
                assert seen == KEYS

        for history in [1, 3]:
            with cell(history):
                check(history)


# -- what does not depend on how the keys are read -------------------------------------------------------------------


TEN = {f"k.{i}": b"%d" % i for i in range(10)}


async def ten(bucket: KeyValue) -> None:
    await write(bucket, {"k.0": b"0"})
    for name, data in list(TEN.items())[1:]:
        await bucket.put(name, data)


async def change_two(bucket: KeyValue) -> None:
    await bucket.put("k.1", b"new")
    await bucket.delete("k.2")


def test_every_column_is_read(make: Callable[..., Read]) -> None:
    read = make(ten, options={"keys": "k.3"}).plan()
    [row] = read.rows()
    assert abs((datetime.now(UTC) - row.pop("created")).total_seconds()) < 60
    assert row == {"bucket": read.bucket, "key": "k.3", "value": b"3", "revision": 4, "operation": "PUT"}


def test_more_keys_than_a_request_takes_are_read(cell: Any, make: Callable[..., Read]) -> None:
    for count in [1023, 1024, 1025, 3000]:
        with cell(count):
            entries = {f"k{i}": b"%d" % i for i in range(count)}
            assert make(partial(write, entries=entries), options={"minPartitions": "1"}).plan().values() == entries


def test_without_history_every_key_is_read_once(make: Callable[..., Read]) -> None:
    read = make(ten).plan().change(partial(write, entries={"k.1": b"new", "k.2": b"new"}))
    assert read.values() == TEN | {"k.1": b"new", "k.2": b"new"}
    assert sorted(row["revision"] for row in read.rows())[-2:] == [11, 12]


class TestThePast:
    def test_with_history_the_past_is_exact(self, cell: Any, make: Callable[..., Read]) -> None:
        read = make(ten, history=5).change(change_two).change(partial(write, entries={"k.new": b"new"}))
        first = {f"k.{i}": b"%d" % i for i in range(4)}
        for at, consistency in itertools.product(["10", "4", "2020-01-01T00:00:00Z"], ["latest", "strict"]):
            with cell(at, consistency):
                expected = {"10": TEN, "4": first}.get(at, {})
                assert read.again(asOf=at, consistency=consistency).values() == expected
        assert read.plan().values() == {k: v for k, v in TEN.items() if k != "k.2"} | {"k.1": b"new", "k.new": b"new"}

    def test_a_time_means_the_same_revision_as_in_a_snapshot(self, make: Callable[..., Read], with_js: Any) -> None:
        read = make(ten, history=5).change(change_two)

        async def snapshots(js: JetStreamContext) -> dict[datetime, dict[str, bytes]]:
            bucket = await js.key_value(read.bucket)
            found = await kvx.snapshot(bucket, include_deletes=True)
            times = [entry.created + timedelta(microseconds=n) for entry in found.values() for n in (-1, 0)]
            past = {time: await kvx.snapshot(bucket, at=time) for time in times}
            return {time: {key: entry.value for key, entry in found.items()} for time, found in past.items()}

        for when, expected in with_js(snapshots).items():
            assert read.again(asOf=when.isoformat(), consistency="strict").values() == expected

    def test_a_time_in_the_future_is_awaited_or_refused(self, make: Callable[..., Read]) -> None:
        soon = datetime.now(UTC) + timedelta(seconds=1)
        read = make(ten, options={"asOf": soon.isoformat()}).plan()
        assert datetime.now(UTC) > soon
        assert read.values() == TEN
        for at, message in (
            ("2100-01-01T00:00:00Z", "2100-01-01T00:00:00.* is in the future"),
            ("11", "no revision 11 yet"),
        ):
            with pytest.raises(PlanningError, match=rf"'asOf': bucket .* {message}"):
                read.again(asOf=at)

    def test_without_history_the_past_has_present_values(self, make: Callable[..., Read]) -> None:
        read = make(ten).change(partial(write, entries={"k.1": b"new"}))
        assert read.again(asOf="10").values() == TEN | {"k.1": b"new"}
        with pytest.raises(HistoryUnavailableError, match="the history needed for 1 key"):
            read.again(asOf="10", consistency="strict", minPartitions="1").rows()


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
            DefaultSource(CaseInsensitiveDict({"servers": "nats://n"} | options)).schema()


def test_an_unreadable_bucket_is_refused(make: Callable[..., Read], with_js: Any) -> None:
    read = make(ten)
    stream, mirror = f"KV_{read.bucket}", f"{read.bucket}M"
    config = StreamConfig(name=f"KV_{mirror}", mirror=StreamSource(name=stream), allow_direct=True)
    with_js(lambda js: js.add_stream(config))
    with pytest.raises(PlanningError, match=f"'bucket': bucket '{mirror}' is a mirror of stream '{stream}'; open the"):
        Read(read.url, mirror).plan()
    with pytest.raises(PlanningError, match="bucket 'NONE' does not exist"):
        Read(read.url, "NONE").plan()

    async def disable(bucket: KeyValue) -> None:
        config = (await bucket._js.stream_info(stream)).config
        await bucket._js.update_stream(config.evolve(allow_direct=False))

    with pytest.raises(DirectGetDisabledError, match="direct get is disabled; enable it"):
        read.change(disable).plan()


def test_spark_reads_a_bucket(spark: SparkSession, make: Callable[..., Read]) -> None:
    read = make(ten, history=3)
    reader = spark.read.format("jetstream_kv").option("servers", read.url)
    assert {row.key: bytes(row.value) for row in reader.load(read.bucket).collect()} == TEN
    rows = reader.option("asOf", "3").schema("revision long, key string").load(read.bucket).collect()
    assert sorted(map(tuple, rows)) == [(1, "k.0"), (2, "k.1"), (3, "k.2")]
