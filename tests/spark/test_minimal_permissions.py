"""The connector sends no request that needs other permissions than docs/spark.md lists.

A server does not reply to a request that it refuses, so each would cost its whole timeout even where a fallback exists.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig, StreamConfig

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.spark import kv, reading
from jetstream_ext.spark.connection import Connections
from jetstream_ext.spark.kv import plan_kv
from jetstream_ext.spark.kv_source import JetStreamKvDataSource
from jetstream_ext.spark.options import KvOptions, ReadOptions
from jetstream_ext.spark.planning import plan_read
from jetstream_ext.spark.source import JetStreamDataSource
from jetstream_ext.spark.streaming import HAS_LIMITS
from jetstream_ext.testing import NatsServer

SECRET = "pass"
READ = ["$JS.API.STREAM.INFO.{}", "$JS.API.DIRECT.GET.{}", "$JS.API.STREAM.MSG.GET.{}"]
PERMISSIONS = {
    "reader": [one.format("S") for one in READ],
    "trusting": [one.format("S") for one in READ[:2]],
    "writer": ["S.*", "$JS.API.STREAM.INFO.S", "$JS.API.STREAM.NAMES"],
    "transactional": ["S.*", "$JS.API.STREAM.INFO.S", "_spark.S.>", "$JS.API.STREAM.MSG.GET.S"],
    "diverting": ["S.*", "dead.rows", "$JS.API.STREAM.INFO.S", "$JS.API.STREAM.NAMES"],
    "unasked": ["S.*", "dead.rows", "$JS.API.STREAM.INFO.S", "_spark.S.>", "$JS.API.STREAM.MSG.GET.S"],
    "buckets": [one.format("KV_B") for one in READ],
    "keys": ["$KV.B.>", "_spark.KV_B.>", "$JS.API.STREAM.INFO.KV_B", "$JS.API.STREAM.MSG.GET.KV_B"],
    "changes": ["$KV.B.>", "_spark.KV_B.>", *(one.format("KV_B") for one in READ)],
}

PAGE = Path(__file__).parents[2] / "docs" / "spark.md"
ROWS = {
    "reader": "reading",
    "trusting": "reading",
    "writer": "writing, dedupe or none",
    "transactional": "writing, transactional",
    "diverting": "writing with a subject as onBadRow",
    "unasked": "writing with a subject as onBadRow",
    "buckets": "buckets, reading and following",
    "keys": "buckets, writing",
    "changes": "buckets, writing",
}


def documented(row: str) -> set[str]:
    """Return the subjects that a row of the page allows, for stream S, bucket B and dead letters on ``dead.rows``."""
    table = PAGE.read_text(encoding="utf-8").partition("## Permissions")[2]
    cells = dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", table.replace("`", ""), re.MULTILINE))
    if row == "buckets, reading and following":
        return {re.sub(r"\.S$", ".KV_B", subject) for subject in documented("reading")}
    named = {
        subject.replace("<S>", "S").replace("<bucket>", "B")
        for subject in re.findall(r"[\w$.<>]+\.[\w$.<>]+", cells[row])
    }
    if row.startswith("writing"):
        named |= {"S.*"}
        named |= documented("writing, dedupe or none") if row == "writing, transactional" else set()
        named |= {"dead.rows"} | documented("writing, transactional") if "onBadRow" in row else set()
    return named


def test_the_users_here_have_only_permissions_of_the_page() -> None:
    assert documented("reading") == set(PERMISSIONS["reader"])
    assert documented("buckets, writing") == set(PERMISSIONS["changes"])
    assert "$JS.API.STREAM.NAMES" in documented("writing, transactional")
    for user, row in ROWS.items():
        assert set(PERMISSIONS[user]) <= documented(row), user


@pytest.fixture
def guarded() -> Iterator[NatsServer]:
    users = [{"user": "admin", "password": SECRET}] + [
        {
            "user": name,
            "password": SECRET,
            "permissions": {"publish": {"allow": allowed}, "subscribe": {"allow": ["_INBOX.>"]}},
        }
        for name, allowed in PERMISSIONS.items()
    ]
    with NatsServer(config=f"authorization: {json.dumps({'users': users})}") as server:
        yield server


@pytest.fixture(autouse=True)
def _password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JETSTREAM_EXT_PERMISSIONS", SECRET)


@pytest.fixture
def given(guarded: NatsServer, with_js: Any) -> Callable[[str], dict[str, str]]:
    """Return the options of a user; there is a stream of 100 messages that ends in a gap, and a bucket."""

    async def fill(js: JetStreamContext) -> None:
        await js.add_stream(
            StreamConfig(
                name="S",
                subjects=["S.*", "_spark.S.>"],
                allow_direct=True,
                allow_batched=True,
                allow_atomic=True,
            )
        )
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add_many((f"S.{row % 10}", b"") for row in range(100))
        await js.delete_msg("S", 100)
        await js.add_stream(StreamConfig(name="DEAD", subjects=["dead.*"], allow_direct=True))
        kv = await kvx.enable(await js.create_key_value(KeyValueConfig(bucket="B", direct=True)), spark=True)
        await kv.put("k", b"v")

    with_js(fill, guarded.url, user="admin", password=SECRET)
    return lambda user: {
        "servers": guarded.url,
        "user": user,
        "passwordEnv": "JETSTREAM_EXT_PERMISSIONS",
        "requestTimeout": "20",
    }


def test_reading_needs_only_the_documented_permissions(cell: Any, given: Any, cache: Connections) -> None:
    for (user, tail_check), subjects in itertools.product([("reader", "true"), ("trusting", "false")], ["S.1", "S.*"]):
        with cell(user, tail_check, subjects):
            options = given(user) | {"stream": "S", "tailCheck": tail_check, "subjects": subjects, "minPartitions": "3"}
            read, schema = ReadOptions.parse(options), JetStreamDataSource(options).schema()
            with cache.lend(read.connection, "driver") as lease:
                parts = lease.run(plan_read(lease.connection.context(), read))
                rows = sum(batch.num_rows for part in parts for batch in reading.read_range(read, schema, part))
                assert lease.connection.client.refusal is None
            assert rows == (10 if subjects == "S.1" else 99)


@pytest.mark.parametrize(
    ("user", "semantics"), [("writer", "dedupe"), ("writer", "none"), ("transactional", "transactional")]
)
def test_writing_needs_only_the_documented_permissions(
    given: Any, sink: Any, cache: Connections, user: str, semantics: str
) -> None:
    target = sink("S", semantics, **given(user) | ({"sinkPartitions": "1"} if semantics == "transactional" else {}))
    rows = [("S.a", b"%d" % row) for row in range(2500)]
    with pytest.raises(ZeroDivisionError):
        target.write([[*rows, ZeroDivisionError()]])
    with cache.lend(ReadOptions.parse(given(user) | {"stream": "S"}).connection, "driver") as lease:
        for _ in range(2):  # the first attempt reads what the one before has stored
            [done] = target.write([rows])
            assert lease.connection.client.refusal is None
    assert (done.rows, done.skipped) == (2500, 2500 if semantics == "transactional" else 0)


@pytest.mark.parametrize(
    ("user", "semantics"), [("diverting", "dedupe"), ("diverting", "none"), ("unasked", "transactional")]
)
def test_dead_letters_need_only_the_documented_permissions(
    given: Any, sink: Any, cache: Connections, with_js: Any, guarded: NatsServer, user: str, semantics: str
) -> None:
    options = given(user) | ({"sinkPartitions": "1"} if semantics == "transactional" else {})
    target = sink("S", semantics, onBadRow="dead.rows", **options)
    with cache.lend(ReadOptions.parse(given(user) | {"stream": "S"}).connection, "driver") as lease:
        writer = target.writer()
        # Without the permission, the driver does not know whether a stream stores the dead letters.
        assert (lease.connection.client.refusal is None) == (user == "diverting")
        done = target.task(writer, [("S.a", b"1"), (None, b"2")])
        assert lease.connection.client.refusal is None
    assert (done.rows, done.diverted) == (1, 1)
    stored = with_js(lambda js: js.stream_info("DEAD"), guarded.url, user="admin", password=SECRET)
    assert stored.state.messages == 1


def test_buckets_need_only_the_documented_permissions(given: Any, cache: Connections) -> None:
    options = given("buckets") | {"bucket": "B"}
    read, schema = KvOptions.parse(options), JetStreamKvDataSource(options).schema()
    with cache.lend(read.connection, "driver") as lease:
        parts = lease.run(plan_kv(lease.connection.context(), read))
        rows = [row for part in parts for batch in kv.read_keys(read, schema, part) for row in batch.to_pylist()]
        assert lease.connection.client.refusal is None
    assert [row["value"] for row in rows] == [b"v"]


@pytest.mark.parametrize("user", ["keys", "changes"])
def test_writing_buckets_needs_only_the_documented_permissions(
    given: Any, kv_sink: Any, cache: Connections, user: str
) -> None:
    target, changes = kv_sink("B", **given(user)), user == "changes"
    rows = [(f"k.{row}", b"%d" % row) for row in range(2500)]
    with cache.lend(ReadOptions.parse(given(user) | {"stream": "S"}).connection, "driver") as lease:
        first = target.writer(overwrite=changes)
        assert target.task(first, rows[:1500]).skipped == 0  # its driver dies
        [done, _] = target.write([rows[:1500], rows[1500:]], overwrite=changes)
        assert done.skipped == 1500
        assert lease.connection.client.refusal is None


@pytest.mark.parametrize("history", [1, 5])
def test_a_change_feed_needs_only_the_documented_permissions(
    given: Any, guarded: NatsServer, with_js: Any, cache: Connections, history: int
) -> None:
    async def change(js: JetStreamContext) -> None:
        config = (await js.stream_info("KV_B")).config
        await js.update_stream(config.evolve(max_msgs_per_subject=history))
        for value in range(3):
            await js.publish("$KV.B.k", b"%d" % value)

    options = given("buckets") | {"bucket": "B"}
    source = JetStreamKvDataSource(options)
    reader: Any = source.streamReader(source.schema())
    rows: list[bytes] = []
    with cache.lend(KvOptions.parse(options).connection, "driver") as lease:
        start = reader.initialOffset()
        for _ in range(2):
            with_js(change, guarded.url, user="admin", password=SECRET)
            end = reader.latestOffset(start, reader.getDefaultReadLimit()) if HAS_LIMITS else reader.latestOffset()
            parts = reader.partitions(start, end)
            rows += [row["value"] for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
            start = end
        assert lease.connection.client.refusal is None
    assert rows[-1] == b"2"


def test_a_query_without_the_permissions_for_a_doorbell_asks_again_and_again(
    given: Any, guarded: NatsServer, with_js: Any, cache: Connections
) -> None:
    async def publish(js: JetStreamContext) -> int:
        await js.publish("S.a", b"new")
        return (await js.stream_info("S")).state.consumer_count

    source = JetStreamDataSource(given("reader") | {"stream": "S"})
    reader: Any = source.streamReader(source.schema())

    def ask(start: Any) -> Any:
        return reader.latestOffset(start, reader.getDefaultReadLimit()) if HAS_LIMITS else reader.latestOffset()

    end = ask(reader.initialOffset())
    for _ in range(2):
        until = time.monotonic() + 1.5  # the server refuses the first kind of doorbell, then the second one
        while time.monotonic() < until:
            assert ask(end) == end
            time.sleep(0.01)
        assert with_js(publish, guarded.url, user="admin", password=SECRET) == 0
        start, deadline = end, time.monotonic() + 30
        while (end := ask(start)) == start:
            assert time.monotonic() < deadline, "the query does not notice the message"
            time.sleep(0.01)
    rows = [row for part in reader.partitions(start, end) for batch in reader.read(part) for row in batch.to_pylist()]
    assert [row["data"] for row in rows] == [b"new"]
