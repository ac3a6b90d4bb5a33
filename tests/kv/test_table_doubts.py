"""What live tables do when messages vanish, are lost, or may have been missed: the leader's state decides."""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig
from nats.js.kv import KeyValue

import jetstream_ext.kv as kvx
import jetstream_ext.log as log
from jetstream_ext.errors import RequestTimeoutError
from jetstream_ext.testing import NatsServer

MakeBucket = Callable[..., Awaitable[KeyValue]]


async def ignore(_: Exception) -> None: ...


async def until(true: Callable[[], object], within: float = 10.0) -> None:
    async with asyncio.timeout(within):
        while not true():
            await asyncio.sleep(0.005)


def revisions(table: Any) -> dict[str, int]:
    return {
        key: entry.seq if hasattr(entry, "seq") else entry.revision for key, entry in table.items() if key is not None
    }


class TestDeletedMessages:
    """The newest message of a subject is deleted (``STREAM.MSG.DELETE``), so that an older one is the last again."""

    @staticmethod
    async def fill(js: JetStreamContext, name: str) -> None:
        for subject in ("pin", "a.x", "a.y", "a.x", "a.once", "b", "a.pin"):
            await js.publish(f"{name}.{subject}", b"")

    @staticmethod
    async def delete(js: JetStreamContext, name: str, prefix: str) -> dict[str, int]:
        await js.delete_msg(name, 4)
        await js.delete_msg(name, 5)
        names = {"pin": 1, "a.x": 2, "a.y": 3, "b": 6, "a.pin": 7}
        return {f"{name}.{subject}": seq for subject, seq in names.items() if subject.startswith(prefix)}

    @pytest.mark.parametrize("prefix", ["", "a."])
    async def test_while_a_table_follows(
        self, js: JetStreamContext, stream_name: Callable[[], str], prefix: str
    ) -> None:
        name = stream_name()
        await js.add_stream(StreamConfig(name=name, subjects=[f"{name}.>"], allow_direct=True))
        await self.fill(js, name)
        async with log.Table(js, name, f"{name}.{prefix}>" if prefix else ">") as table:
            changes = table.changes()
            expected = await self.delete(js, name, prefix)
            await until(lambda: revisions(table) == expected)
            found = {(change.subject, change.old.seq, change.new and change.new.seq) for change in [
                await anext(changes), await anext(changes)
            ] if change.old is not None}  # fmt: skip
            assert found == {(f"{name}.a.x", 4, 2), (f"{name}.a.once", 5, None)}

    @pytest.mark.parametrize("prefix", ["", "a."])
    @pytest.mark.parametrize("written", [False, True])
    async def test_while_the_program_was_away(
        self, js: JetStreamContext, stream_name: Callable[[], str], tmp_path: Path, prefix: str, written: bool
    ) -> None:
        name = stream_name()
        await js.add_stream(StreamConfig(name=name, subjects=[f"{name}.>"], allow_direct=True))
        await self.fill(js, name)

        def table() -> log.Table:
            return log.Table(js, name, f"{name}.{prefix}>" if prefix else ">", checkpoint=tmp_path / "t.db")

        async with table():
            pass
        expected = await self.delete(js, name, prefix)
        if written:
            expected[f"{name}.a.new"] = (await js.publish(f"{name}.a.new", b"")).seq
        async with table() as restored:
            assert revisions(restored) == expected

    @pytest.mark.parametrize("history", [1, 5])
    @pytest.mark.parametrize("keys", [None, ["a.*"]])
    async def test_in_a_bucket_that_is_written(
        self, js: JetStreamContext, stream_name: Callable[[], str], history: int, keys: list[str] | None
    ) -> None:
        name = stream_name()  # nats-py's buckets do not allow that their messages are deleted
        config = StreamConfig(name=f"KV_{name}", subjects=[f"$KV.{name}.>"], allow_direct=True)
        await js.add_stream(config.evolve(max_msgs_per_subject=history, allow_rollup_hdrs=True))
        kv = await js.key_value(name)
        for key in ("a.x", "a.y", "a.y", "a.pin", "b"):
            await kv.put(key, b"1")
        async with kvx.Table(kv, keys) as table:
            await kv._js.delete_msg(kv._stream, 3)
            for n in range(3):
                await table.wait_for(await kv.put(f"b.{n}", b"new"))  # explains that a message is gone
            y = {} if history == 1 else {"a.y": 2}
            await until(lambda: {key: it for key, it in revisions(table).items() if key < "b"} == {
                "a.x": 1, **y, "a.pin": 4
            })  # fmt: skip
            assert dict(table) == dict(await kvx.snapshot(kv, keys))

    async def test_writes_can_hide_it_in_a_large_table(
        self, js: JetStreamContext, stream_name: Callable[[], str], load: Callable[..., Awaitable[None]], tmp_path: Path
    ) -> None:
        """The limit of this: a write can explain that one message more is gone."""
        name = stream_name()
        config = StreamConfig(name=f"KV_{name}", subjects=[f"$KV.{name}.>"], allow_direct=True, max_msgs_per_subject=5)
        await js.add_stream(config.evolve(allow_batched=True))
        kv = await js.key_value(name)
        await load(kv, {f"k.{n}": b"" for n in range(1_001)})
        revision = await kv.put("k.7", b"deleted")
        await kv.put("pin", b"")
        async with kvx.Table(kv, checkpoint=tmp_path / "t.db"):
            pass
        await js.delete_msg(kv._stream, revision)
        await kv.put("new", b"")
        async with kvx.Table(kv, checkpoint=tmp_path / "t.db") as table:
            assert table["k.7"].value == b"deleted"
            await table.wait_for(await kv.put("k.7", b"newer"))
            assert dict(table) == dict(await kvx.snapshot(kv))


class TestWaits:
    async def test_a_wait_ends_when_the_table_is_current(self, make_bucket: MakeBucket) -> None:
        kv = await make_bucket()
        async with kvx.Table(kv) as table:
            await table.wait_for(0)
            revision = await kv.put("a", b"1")
            await table.wait_for(0)
            await table.wait_for(revision)
            with pytest.raises(ValueError, match="from 0"):
                await table.wait_for(-1)

    async def test_a_wait_after_a_reconnect_looks_first(self, own_server: NatsServer, tmp_path: Path) -> None:
        """The stream is restored from an older copy: the table knows of a later revision that is not stored."""
        options = {"max_reconnect_attempts": -1, "reconnect_time_wait": 0.05, "error_cb": ignore}
        reconnected = asyncio.Event()

        async def note() -> None:
            reconnected.set()

        async with await nats.connect(own_server.url, reconnected_cb=note, **options) as nc:
            kv = await nc.jetstream(timeout=10).create_key_value(bucket="B", direct=True, history=64)
            for _ in range(5):
                await kv.put("a", b"old")
            own_server.pause()
            shutil.copytree(own_server.store_dir, tmp_path / "store")
            own_server.resume()
            for _ in range(5):
                await kv.put("a", b"lost")
            async with kvx.Table(kv) as table:
                await table.wait_for(10)
                own_server.kill()
                shutil.rmtree(own_server.store_dir)
                shutil.copytree(tmp_path / "store", own_server.store_dir)
                own_server.restart()
                await asyncio.wait_for(reconnected.wait(), 20)
                revision = await kv.put("a", b"new")
                assert revision == 6
                for wanted in (0, revision):
                    with pytest.raises(RequestTimeoutError, match=r"ends at sequence 6|did not reach revision"):
                        await table.wait_for(wanted, timeout=0.5)
                assert table["a"].value == b"lost", "it keeps what it has"
                while revision < 12:
                    revision = await kv.put("a", b"new")
                await table.wait_for(revision, timeout=20)
                assert dict(table) == dict(await kvx.snapshot(kv))


async def test_other_subjects_of_a_buckets_stream(make_bucket: MakeBucket, caplog: pytest.LogCaptureFixture) -> None:
    kv = await make_bucket()
    config = (await kv._js.stream_info(kv._stream)).config
    await kv._js.update_stream(config.evolve(subjects=[*config.subjects, f"{kv._name}.events.>"]))
    for n in range(5):
        await kv.put(f"k.{n}", b"1")
        await kv._js.publish(f"{kv._name}.events.{n}", b"")
    async with kvx.Table(kv) as table:
        changes = table.changes()
        assert set(table) == {f"k.{n}" for n in range(5)}
        await kv._js.publish(f"{kv._name}.events.5", b"")
        await table.wait_for(await kv.put("k.5", b"2"))
        assert dict(table) == dict(await kvx.snapshot(kv))
        change = await anext(changes)
        assert (change.key, change.skipped) == ("k.5", 0)
        await kv._js.purge_stream(kv._stream, subject=f"{kv._pre}k.1")
        await until(lambda: "k.1" not in table)
        await kv._js.purge_stream(kv._stream, subject=f"{kv._name}.events.>")
        await table.wait_for(await kv.put("k.1", b"3"))
        assert dict(table) == dict(await kvx.snapshot(kv))
    assert "RELOADING -> RELOADING" not in caplog.text


async def test_a_change_is_seen_at_once_after_a_rest(make_bucket: MakeBucket) -> None:
    kv = await make_bucket()
    async with kvx.Table(kv) as table, kvx.Table(kv, ["a", "b"]) as part:
        await asyncio.sleep(1.5)
        for n in range(5):
            await asyncio.sleep(0.3)
            await kv.put("a", b"%d" % n)
            began = time.monotonic()
            await until(lambda: all(it.get("a") is not None and it["a"].value == b"%d" % n for it in (table, part)))  # noqa: B023
            assert time.monotonic() - began < 0.5


async def test_a_load_reports_only_what_has_changed(js: JetStreamContext, stream_name: Callable[[], str]) -> None:
    """Messages that the table has read one by one, and now reads together: of 60, some have a time that ends in 0."""
    name = stream_name()
    await js.add_stream(StreamConfig(name=name, subjects=[f"{name}.>"], allow_direct=True))
    async with log.Table(js, name) as table:
        for number in range(60):
            headers = {"B": "1", "A": "a\u00e9 "} if number % 2 else None
            ack = await js.publish(f"{name}.{number}", b"%d" % number, headers=headers)
            await table.wait_for(ack.seq)
        seen: list[Any] = []
        table.on_change(seen.append)
        await js.purge_stream(name, subject=f"{name}.7")  # leaves no marker, so the table loads
        await until(lambda: f"{name}.7" not in table)
        ack = await js.publish(f"{name}.new", b"")
        await table.wait_for(ack.seq)
    assert [(change.subject, change.revision) for change in seen] == [(f"{name}.7", 60), (f"{name}.new", 61)]
