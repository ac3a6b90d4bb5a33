"""positions: what readers and Spark queries have stored in a bucket."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cli_tools import Json, Run, with_js
from nats.js import JetStreamContext

from jetstream_ext.cli.positions import _ago
from jetstream_ext.log import LogReader, OffsetStore, Stored
from jetstream_ext.spark import progress
from jetstream_ext.spark.offsets import Position
from jetstream_ext.spark.progress import PositionMirror, SinkRecord, store_record
from jetstream_ext.testing import NatsServer


@pytest.fixture
def names(server: NatsServer, stream_name: Callable[[], str]) -> tuple[str, str]:
    """The names of a stream with ten messages, and of a bucket with the positions of a reader, a query and its sink."""
    stream, bucket = stream_name(), stream_name()

    async def create(js: JetStreamContext) -> None:
        await js.add_stream(name=stream, subjects=[f"{stream}.>"], allow_direct=True)
        for number in range(10):
            await js.publish(f"{stream}.a", b"%d" % number)
        offsets = await OffsetStore(js, bucket).create()
        reader = LogReader(js, stream, start=Stored("billing"), offsets=offsets)
        await reader.read(4, 5)
        await offsets.commit(reader)
        created = reader.created or ""
        positions = {stream: Position(created, 7), f"{stream}-gone": Position("2026-01-31T08:00:00Z", 3)}
        with mock.patch.object(progress, "_TIMEOUT", 30):  # a query waits 2 s at most, too few on a busy machine
            await PositionMirror(bucket, "copy", "app-1").store(js, positions, {stream: 3}, last=True)
            assert await store_record(js, bucket, "copy.sink", SinkRecord(stream, "q", 17, 500, 4, 2, 1))
        await js.publish(f"$KV.{bucket}.note", b"something else")
        await js.publish(f"$KV.{bucket}.deleted", b"", headers={"KV-Operation": "DEL"})

    with_js(server.url, create)
    return stream, bucket


def test_positions_of_readers_and_queries(run: Run, ok: Json, names: tuple[str, str]) -> None:
    stream, bucket = names
    found = ok("positions", bucket)
    shown = {
        (one["name"], one["kind"], one["stream"]): (one["position"], one["lag"], one["note"])
        for one in found["readers"]
    }
    assert shown == {
        ("billing", "reader", stream): (5, 6, None),
        ("copy", "spark-source", stream): (8, 3, None),
        ("copy", "spark-source", f"{stream}-gone"): (4, None, "the stream does not exist"),
    }
    [sink] = found["sinks"]
    counts = {"batch": 17, "rows": 500, "already_stored": 4, "dropped": 2, "diverted": 1}
    assert sink.items() >= ({"name": "copy.sink", "stream": stream, "query": "q"} | counts).items()
    assert found["other_keys"] == ["note"]
    assert all(0 <= one["age"] < 3600 for one in (*found["readers"], sink))
    lines = run("positions", bucket).stdout.splitlines()
    [billing] = [line for line in lines if "billing" in line]
    assert [cell.strip() for cell in billing.strip("│").split("│")][:4] == ["billing", stream, "5", "6"]
    assert lines[-1] == "1 other key of the bucket left out, which hold no position."


def test_a_stream_that_has_changed_is_said(server: NatsServer, run: Run, ok: Json, names: tuple[str, str]) -> None:
    stream, bucket = names

    async def again(js: JetStreamContext) -> None:
        await js.delete_stream(stream)
        await js.add_stream(name=stream, subjects=[f"{stream}.>"])
        await js.publish(f"{stream}.a", b"")
        now: Any = await js._api_request(f"$JS.API.STREAM.INFO.{stream}")
        ahead = {stream: Position(now["created"], 9)}
        await PositionMirror(bucket, "ahead").store(js, ahead, {}, last=True)

    with_js(server.url, again)
    notes = {one["name"]: (one["lag"], one["note"]) for one in ok("positions", bucket)["readers"]}
    assert notes["billing"] == (None, "the stream was created again, or its creation time has changed")
    assert notes["ahead"] == (0, "the stream ends at 1")
    assert "0 (the stream ends at 1)" in run("positions", bucket).stdout


def test_a_bucket_without_positions(server: NatsServer, run: Run, stream_name: Callable[[], str]) -> None:
    bucket = stream_name()
    assert f"bucket '{bucket}' does not exist" in run("positions", bucket).stderr
    with_js(server.url, lambda js: js.create_key_value(bucket=bucket))
    assert run("positions", bucket).stdout == "No reader and no query has a position in this bucket.\n"


def test_a_bucket_with_too_many_keys_is_refused(
    run: Run, names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jetstream_ext.cli.positions._MOST_KEYS", 2)
    done = run("positions", names[1])
    assert done.exit_code == 1
    assert "has more than 2 keys, which is more than readers and queries need" in done.stderr


def test_a_record_of_an_impossible_stream_is_left_out(server: NatsServer, ok: Json, names: tuple[str, str]) -> None:
    async def store(js: JetStreamContext) -> None:
        kv = await js.key_value(names[1])
        await kv.put("evil", b'{"v":1,"kind":"spark-source","streams":{"a b":{"created":"","last_read":1}}}')

    with_js(server.url, store)
    assert sorted(ok("positions", names[1])["other_keys"]) == ["evil", "note"]


def test_positions_need_only_the_documented_permissions(run: Run) -> None:
    page = (Path(__file__).parents[2] / "docs" / "permissions.md").read_text(encoding="utf-8")
    [row] = re.findall(r"`jetstream-ext positions` needs (.*?)\.\n", page, re.DOTALL)
    allowed = [one.replace("<bucket>", "B").replace("<stream>", "S") for one in re.findall(r"`([^`]+)`", row)]
    assert len(allowed) == 3
    publish = {"allow": allowed}
    some = {"user": "some", "password": "x", "permissions": {"publish": publish, "subscribe": {"allow": ["_INBOX.>"]}}}
    users = {"users": [{"user": "all", "password": "x"}, some]}

    async def fill(js: JetStreamContext) -> None:
        await js.add_stream(name="S", subjects=["s"])
        await js.create_key_value(bucket="B")
        await PositionMirror("B", "copy").store(js, {"S": Position("", 0)}, {}, last=True)

    with NatsServer(config=f"authorization: {json.dumps(users)}") as server:
        at = server.url.removeprefix("nats://")
        with_js(f"nats://all:x@{at}", fill)
        done = run("positions", "B", url=f"nats://some:x@{at}")
    assert done.exit_code == 0, done.output
    assert "copy" in done.stdout


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s ago"), (59.9, "59 s ago"), (61, "1 min ago"), (7300, "2 h ago"), (1e6, "11 d ago")]
)
def test_ages_are_short(seconds: float, text: str) -> None:
    assert _ago(seconds) == text
