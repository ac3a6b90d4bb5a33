"""Checkpoints of live tables."""

import asyncio
import logging
import re
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from nats.js.kv import KeyValue

import jetstream_ext.kv as kvx
import jetstream_ext.log as log

MakeBucket = Callable[..., Awaitable[KeyValue]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table.db"


class Loads:
    """Counts the loads of tables from the servers, by the records of the tables' states."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG, "jetstream_ext.kv")
        self._caplog = caplog

    def __len__(self) -> int:
        return sum(
            bool(re.search("(OPENING|RELOADING) -> FOLLOWING", record.message)) for record in self._caplog.records
        )

    def clear(self) -> None:
        self._caplog.clear()


@pytest.fixture
def loads(caplog: pytest.LogCaptureFixture) -> Loads:
    return Loads(caplog)


async def fill(kv: KeyValue, count: int = 10) -> int:
    for n in range(count):
        await kv.put(f"k.{n}", b"%d" % n)
    await kv.delete("k.0")
    return int(await kv.put("last", b"1"))


async def test_a_restart_reads_what_came_since(make_bucket: MakeBucket, path: Path, loads: Loads) -> None:
    for keys in (None, ["k.*"], ["k.1", "k.2", "last"]):
        path.unlink(missing_ok=True)
        loads.clear()
        kv = await make_bucket()
        await fill(kv)
        async with kvx.Table(kv, keys, checkpoint=path) as table:
            before = dict(table)
        await kv.put("k.1", b"new")
        await kv.delete("k.2")
        await kv.put("k.11", b"added")
        async with kvx.Table(kv, keys, checkpoint=path) as table:
            expected = dict(await kvx.snapshot(kv, keys))
            assert dict(table) == expected != before
            await table.wait_for(await kv.put("k.3", b"newer"))
            assert dict(table) == dict(await kvx.snapshot(kv, keys))
        assert len(loads) == 1, keys


async def test_it_is_written_while_the_table_is_open(
    make_bucket: MakeBucket, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "jetstream_ext.kv")
    kv = await make_bucket()
    await fill(kv)
    async with kvx.Table(kv, checkpoint=path) as table:
        revision = await kv.put("k.1", b"new")
        await table.wait_for(revision)
        async with asyncio.timeout(10):
            while f"checkpoint saved; revision={revision}" not in caplog.text:
                await asyncio.sleep(0.02)
        copy = path.with_name("copy.db")
        for suffix in ("", "-wal"):
            copy.with_name(copy.name + suffix).write_bytes(path.with_name(path.name + suffix).read_bytes())
    database = sqlite3.connect(copy)
    assert database.execute("SELECT data FROM messages WHERE key = ?", (b"k.1",)).fetchone() == (b"new",)
    database.close()


async def test_a_file_that_is_not_usable_is_written_anew(
    make_bucket: MakeBucket, path: Path, loads: Loads, caplog: pytest.LogCaptureFixture
) -> None:
    kv = await make_bucket()
    for n in range(200):
        await kv.put(f"k.{n}", b"value-%d" % n)
    async with kvx.Table(kv, checkpoint=path):
        pass
    for change, why in (
        (lambda path: path.write_bytes(path.read_bytes()[:6000]), "damaged|malformed"),
        (lambda path: path.write_bytes(path.read_bytes()[:10]), "its beginning is lost"),
        (lambda path: path.write_bytes(bytes(512) + path.read_bytes()[512:]), "its beginning is lost"),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), "its beginning is lost"),
        (lambda path: spoil(path, b"value-7", b"value-8"), "is damaged"),
        (lambda path: execute(path, "PRAGMA user_version = 9"), "another version"),
        (lambda path: execute(path, "DELETE FROM messages WHERE key = CAST('k.3' AS BLOB)"), "should have"),
        (lambda path: execute(path, "UPDATE note SET content = 'x'"), "note is malformed"),
        (lambda path: execute(path, "UPDATE note SET content = '[]'"), "note is malformed"),
        (lambda path: execute(path, "UPDATE messages SET seq = 99 WHERE key = X'6B2E33'"), "is damaged"),
    ):
        change(path)
        caplog.clear()
        loads.clear()
        for _ in range(2):
            async with kvx.Table(kv, checkpoint=path) as table:
                assert dict(table) == dict(await kvx.snapshot(kv))
        assert len(loads) == 1, f"{why}: once for the file that is not usable"
        assert [record.message for record in caplog.records if "is rebuilt" in record.message], why
        assert len([record for record in caplog.records if re.search(why, record.message)]) == 1, why


def execute(path: Path, command: str) -> None:
    database = sqlite3.connect(path)
    database.execute(command)
    database.commit()
    database.close()


def spoil(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


async def test_other_files_are_left_alone(make_bucket: MakeBucket, path: Path, tmp_path: Path, caplog: Any) -> None:
    kv = await make_bucket()
    path.write_bytes(b"important")
    database = tmp_path / "mine.db"
    execute(database, "CREATE TABLE mine (x)")
    for file in (path, database):
        before = file.read_bytes()
        with pytest.raises(ValueError, match="left as it is"):
            async with kvx.Table(kv, checkpoint=file):
                pass
        assert file.read_bytes() == before
    with pytest.raises(OSError, match="cannot be opened"):
        async with kvx.Table(kv, checkpoint=tmp_path / "none" / "x.db"):
            pass
    empty = tmp_path / "empty.db"  # is as good as none
    empty.touch()
    async with kvx.Table(kv, checkpoint=empty):
        pass
    assert empty.stat().st_size
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_file_is_of_one_table_at_a_time(make_bucket: MakeBucket, path: Path) -> None:
    kv = await make_bucket()
    async with kvx.Table(kv, checkpoint=path):
        with pytest.raises(BlockingIOError, match="in use by another table"):
            async with kvx.Table(kv, checkpoint=path):
                pass
    async with kvx.Table(kv, checkpoint=path):
        pass


async def test_what_happened_meanwhile(make_bucket: MakeBucket, tmp_path: Path) -> None:
    async def check(how: str, number: int, keys: list[str] | None) -> None:
        path = tmp_path / f"{how}{number}.db"
        kv = await make_bucket(**({"ttl": 1.0} if how == "expired" else {}))
        await fill(kv)
        async with kvx.Table(kv, keys, checkpoint=path):
            pass
        match how:
            case "another bucket":
                await kv._js.delete_key_value(kv._name)
                kv = await kvx.enable(await kv._js.create_key_value(bucket=kv._name))
                await kv.put("k.1", b"of the other one")
            case "purge":
                await kv._js.purge_stream(kv._stream)
            case "purge of a key":
                await kv._js.purge_stream(kv._stream, subject=f"{kv._pre}k.1")
            case "limits":
                config = (await kv._js.stream_info(kv._stream)).config
                await kv._js.update_stream(config.evolve(max_msgs=3, discard="old"))
            case "expired":
                async with asyncio.timeout(60):
                    while (await kv._js.stream_info(kv._stream)).state.messages:
                        await asyncio.sleep(0.05)
            case "other keys":
                keys = ["last"]
        async with kvx.Table(kv, keys, checkpoint=path) as table:
            assert dict(table) == dict(await kvx.snapshot(kv, keys)), how

    hows = ("another bucket", "purge", "purge of a key", "limits", "expired", "other keys")
    async with asyncio.TaskGroup() as group:
        for how in hows:
            for number, keys in enumerate((None, ["k.*"])):
                group.create_task(check(how, number, keys))


async def test_cancelling_leaves_a_usable_file(make_bucket: MakeBucket, path: Path, leak_check: Any) -> None:
    kv = await make_bucket()
    await fill(kv)
    for turns in range(0, 120, 8):

        async def use() -> None:
            async with kvx.Table(kv, checkpoint=path) as table:
                await table.wait_for(9_999, timeout=30)

        using = asyncio.create_task(use())
        for _ in range(turns):
            await asyncio.sleep(0)
        using.cancel()
        with pytest.raises(asyncio.CancelledError):
            await using
        await leak_check.assert_clean()
        async with asyncio.timeout(10):
            while True:
                try:
                    async with kvx.Table(kv, checkpoint=path) as table:
                        assert dict(table) == dict(await kvx.snapshot(kv))
                    break
                except BlockingIOError:
                    await asyncio.sleep(0.02)


async def test_a_file_of_another_kind_of_table(make_bucket: MakeBucket, path: Path) -> None:
    kv = await make_bucket()
    await fill(kv)
    async with kvx.Table(kv, checkpoint=path):
        pass
    async with log.Table(kv._js, kv._stream, checkpoint=path) as table:
        assert set(table) == {kv._pre + key for key in await kvx.snapshot(kv)}
