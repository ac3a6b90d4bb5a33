"""Live tables of buckets, on real servers."""

import asyncio
import gc
import logging
import shutil
import sys
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy
from nats.js.errors import BucketNotFoundError, InvalidKeyError
from nats.js.kv import KeyValue

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import RequestTimeoutError, StreamRecreatedError, UnsupportedFeatureError
from jetstream_ext.kv import present
from jetstream_ext.testing import NatsServer

sys.path.insert(0, str(Path(__file__).parent))

from table_checker import TableChecker

Load = Callable[..., Awaitable[None]]
MakeBucket = Callable[..., Awaitable[KeyValue]]


@pytest.fixture
async def writer(server: NatsServer) -> Any:
    """The JetStream context of another client, which writes."""
    nc = await nats.connect(server.url)
    yield nc.jetstream(timeout=10)
    await nc.close()


async def ignore(_: Exception) -> None: ...


async def until(true: Callable[[], object], within: float = 20.0) -> None:
    async with asyncio.timeout(within):
        while not true():
            await asyncio.sleep(0.005)


@pytest.fixture
def subscribed(caplog: pytest.LogCaptureFixture) -> Callable[[int], Awaitable[None]]:
    """Wait until the doorbells of so many tables were armed."""
    caplog.set_level(logging.DEBUG, "jetstream_ext.client")

    async def wait(tables: int) -> None:
        await until(lambda: sum(": armed;" in record.message for record in caplog.records) >= tables)

    return wait


def values(table: kvx.Table) -> dict[str, bytes]:
    return {key: entry.value for key, entry in table.items()}


class TestReading:
    async def test_it_has_what_is_stored(self, make_bucket: MakeBucket, load: Load) -> None:
        for count in (0, 10, 3_000):
            kv = await make_bucket(history=3)
            await load(kv, {f"k.{n}": b"%d" % n for n in range(count)})
            await kv.put("gone", b"1")
            await kv.delete("gone")
            revision = await kv.put("a", b"2")
            async with kvx.Table(kv) as table:
                assert (table.revision, table.lag, len(table)) == (revision, 0, count + 1)
                assert table["a"] == (await kvx.get_many(kv, ["a"]))["a"]
                assert dict(table) == dict(await kvx.snapshot(kv))
                assert "gone" not in table
                with pytest.raises(KeyError):
                    table["gone"]

    async def test_a_client_reads_the_writes_of_another(
        self, make_bucket: MakeBucket, writer: JetStreamContext
    ) -> None:
        kv = await make_bucket()
        other = await writer.key_value(kv._name)
        async with kvx.Table(kv) as table:
            for n in range(30):
                revision = await other.put(f"k{n % 7}", b"%d" % n)
                await table.wait_for(revision)
                assert table[f"k{n % 7}"].value == b"%d" % n
                assert table.revision >= revision
            for pause in (0.0, 0.3):  # without being asked
                await asyncio.sleep(pause)
                await other.put("k0", str(pause).encode())
                await until(lambda: table["k0"].value == str(pause).encode())  # noqa: B023

    async def test_only_the_keys_that_match(self, make_bucket: MakeBucket) -> None:
        names = ["a.x", "a.b.c", "b.y", "c"]
        for keys in (["a.>"], ["a.*", "a.b.c"], ["a.x", "b.y"]):
            kv = await make_bucket()
            for name in names:
                await kv.put(name, b"1")
            async with kvx.Table(kv, keys) as table:
                for value in (b"1", b"2"):
                    expected = await kvx.snapshot(kv, keys)
                    await table.wait_for(expected.revision)
                    assert dict(table) == dict(expected)
                    for name in names:
                        revision = await kv.put(name, value)
                await table.wait_for(revision)
                assert table.revision == revision, "also that of a key that is not in the table"
        with pytest.raises(InvalidKeyError):
            kvx.Table(kv, ["a b"])
        with pytest.raises(ValueError, match="must not be empty"):
            kvx.Table(kv, [])

    async def test_an_idle_table_asks_once_in_five_seconds_at_most(
        self, own_server: NatsServer, subscribed: Callable[[int], Awaitable[None]]
    ) -> None:
        async with await nats.connect(own_server.url) as nc:
            kv = await nc.jetstream().create_key_value(bucket="B", direct=True)
            kv = await kvx.enable(kv, ttl=True)
            await kv.put("a", b"1")

            async def requests() -> int:
                return (await nc.jetstream().account_info()).api.total

            async with kvx.Table(kv), kvx.Table(kv, ["a.>"]):
                await subscribed(2)
                await asyncio.sleep(2)  # the looks after the doorbell was armed come soon
                before, began = await requests(), time.monotonic()
                await asyncio.sleep(5.5)
                assert await requests() - before <= 2 * ((time.monotonic() - began) // 5 + 1)

    async def test_older_servers(self) -> None:
        for version in ("2.11.0", "2.12.8", "2.14.6"):
            async with NatsServer(version=version) as server, await nats.connect(server.url) as nc:
                kv = await nc.jetstream(timeout=30).create_key_value(bucket="B", direct=True)
                for n in range(30):
                    await kv.put(f"k{n % 7}", b"%d" % n)
                await kv.delete("k1")
                async with kvx.Table(kv) as table, kvx.Table(kv, ["k2", "k3"]) as part:
                    assert dict(table) == dict(await kvx.snapshot(kv))
                    for n in range(20):
                        revision = await kv.put(f"k{n % 9}", b"x%d" % n)
                        await table.wait_for(revision)
                        assert table[f"k{n % 9}"].value == b"x%d" % n
                    await part.wait_for(revision)
                    assert set(part) == {"k2", "k3"}
                    await kv.purge("k4")
                    await until(lambda: "k4" not in table)
        async with NatsServer(version="2.10.26") as server, await nats.connect(server.url) as nc:
            kv = await nc.jetstream(timeout=30).create_key_value(bucket="B", direct=True)
            with pytest.raises(UnsupportedFeatureError):
                await kvx.Table(kv).__aenter__()


@asynccontextmanager
async def opened(kv: KeyValue, *keys: list[str] | None) -> AsyncIterator[list[kvx.Table]]:
    """Open a table for each list of keys."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(kvx.Table(kv, each)) for each in keys]


async def test_the_memory_is_that_of_keys_and_values(make_bucket: MakeBucket, load: Load) -> None:
    kv, count, size = await make_bucket(), 5_000, 1_000
    await load(kv, {f"k.{n}": bytes(size) for n in range(count)})
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        async with kvx.Table(kv):
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / count < size + 450


class TestRemovals:
    async def test_expiry(self, make_bucket: MakeBucket) -> None:
        """By the TTL of the bucket or of the key, with and without markers."""

        async def check(markers: bool, own: bool) -> None:
            kv = await make_bucket(**({} if own else {"ttl": 4.0}), **({"limit_marker_ttl": 60.0} if markers else {}))
            async with kvx.Table(kv) as table:
                changes = table.changes()
                revision = await kv.create("a", b"1", **({"msg_ttl": 4.0} if own else {}))
                async with asyncio.timeout(60):
                    stored, expired = await anext(changes), await anext(changes)
                assert "a" not in table
                assert (stored.old, stored.new and stored.new.value, stored.revision) == (None, b"1", revision)
                assert (expired.old, expired.new) == (stored.new, None)
                assert expired.revision == (revision + 1 if markers else revision)

        await asyncio.gather(*(check(markers, own) for markers in (False, True) for own in (False, True)))

    async def test_what_is_removed_without_a_marker(self, make_bucket: MakeBucket) -> None:
        """By a purge of the stream or of a subject, a limit, or limits that change."""

        async def check(left: str, purge: dict[str, Any], **limits: Any) -> None:
            kv = await make_bucket()
            for key in "abc":
                await kv.put(key, b"1")
            async with kvx.Table(kv) as table:
                changes = table.changes()
                if limits:
                    config = (await kv._js.stream_info(kv._stream)).config
                    await kv._js.update_stream(config.evolve(**limits))
                else:
                    key = {"subject": kv._pre + purge["subject"]} if "subject" in purge else {}
                    await kv._js.purge_stream(kv._stream, **purge | key)
                await until(lambda: set(table) == set(left))
                gone = [await anext(changes) for _ in range(3 - len(left))]
                assert [(change.key, change.new) for change in gone] == [
                    (key, None) for key in "abc" if key not in left
                ]
                if "max_age" not in limits:
                    await table.wait_for(await kv.put("b", b"2"))
                    assert table["b"].value == b"2"

        await asyncio.gather(
            check("c", {"seq": 3}),
            check("", {}),
            check("bc", {"keep": 2}),
            check("ac", {"subject": "b"}),
            check("c", {}, max_msgs=1, discard=DiscardPolicy.OLD),
            check("", {}, max_age=1.0, duplicate_window=1.0),
        )

    async def test_another_bucket_of_the_name_or_none(self, make_bucket: MakeBucket) -> None:
        for again in (True, False):
            kv = await make_bucket()
            await kv.put("a", b"1")
            async with kvx.Table(kv) as table:
                changes = table.changes()
                waiting = asyncio.create_task(table.wait_for(99, timeout=20))
                await asyncio.sleep(0)
                await kv._js.delete_key_value(kv._name)
                if again:
                    new = await kvx.enable(await kv._js.create_key_value(bucket=kv._name))
                    await new.put("a", b"2")
                for failing in (waiting, anext(changes), table.wait_for(1_000)):
                    with pytest.raises((StreamRecreatedError, BucketNotFoundError)):
                        await failing
                for _ in range(100):
                    with pytest.raises((StreamRecreatedError, BucketNotFoundError)) as caught:
                        table["a"]
                assert "failed" in repr(table)
                frames, traceback = 0, caught.value.__traceback__
                while traceback is not None:  # the error does not grow with every call that raises it
                    frames, traceback = frames + 1, traceback.tb_next
                assert frames < 10


async def stalled(work: Callable[[], Awaitable[object]]) -> None:
    """Do work with another loop and connection, while this loop stands still."""

    def run() -> None:
        async def main() -> None:
            await work()

        asyncio.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


class TestAfterAStall:
    async def test_a_delete_marker_that_was_purged(
        self, make_bucket: MakeBucket, server: NatsServer, subscribed: Callable[[int], Awaitable[None]]
    ) -> None:
        kv = await make_bucket()
        for key in ("pin", "s.a", "s.b"):
            await kv.put(key, b"1")

        async def remove() -> None:
            async with await nats.connect(server.url) as nc:
                bucket = await nc.jetstream(timeout=30).key_value(kv._name)
                await bucket.delete("s.a")
                await bucket.purge_deletes(olderthan=-1)
                await bucket.put("s.b", b"2")

        seen: list[bool] = []
        async with opened(kv, None, ["s.>"], ["s.a", "s.b"]) as tables:
            await subscribed(2)  # two of them have the same filter
            tables[0].on_change(lambda change: seen.append(change.key == "s.b" and "s.a" in tables[0]))
            await stalled(remove)
            await tables[0].wait_for(await kv.put("s.b", b"3"))
            assert "s.a" not in tables[0]
            assert True not in seen, "a state that the bucket never had"
            await until(lambda: not any("s.a" in table for table in tables))

    async def test_a_value_and_its_marker_that_both_expired(self, make_bucket: MakeBucket, server: NatsServer) -> None:
        kv = await make_bucket(limit_marker_ttl=1.0)
        for key in ("pin", "s.pin"):
            await kv.put(key, b"1")

        async def expired() -> None:
            async with await nats.connect(server.url) as nc, asyncio.timeout(60):
                while (await nc.jetstream(timeout=30).stream_info(kv._stream)).state.messages > 2:
                    await asyncio.sleep(0.05)

        async with kvx.Table(kv, ["s.>"]) as table:
            await table.wait_for(await kv.create("s.a", b"1", msg_ttl=1.0))
            await stalled(expired)
            await table.wait_for(await kv.put("s.pin", b"2"))
            assert set(table) == {"s.pin"} == set(await kvx.snapshot(kv, ["s.>"]))

    async def test_a_key_that_is_renewed_in_time_never_vanishes(
        self, make_bucket: MakeBucket, server: NatsServer
    ) -> None:
        kv = await make_bucket(ttl=1.0)
        removed: list[kvx.KeyValueChange] = []

        async def renew() -> float:
            """Return the longest time that may have been between two writes."""
            begins: list[float] = []
            async with await nats.connect(server.url) as nc:
                bucket = await nc.jetstream(timeout=30).key_value(kv._name)
                longest = 0.0
                for _ in range(4):
                    begins.append(time.monotonic())
                    await bucket.put("session", b"1")
                    longest = max(longest, time.monotonic() - begins[max(0, len(begins) - 2)])
                    await asyncio.sleep(0.8)
                return max(longest, time.monotonic() - begins[-1])

        async with kvx.Table(kv) as table:
            table.on_change(lambda change: removed.append(change) if change.new is None else None)
            renewing = asyncio.get_running_loop().run_in_executor(None, lambda: asyncio.run(renew()))
            while not renewing.done():
                time.sleep(0.15)
                before = list(removed)
                await asyncio.sleep(0.02)
            # The last write is not renewed; on a busy machine, another one may have come too late.
            assert await renewing > 1 or not before


async def test_an_older_value_is_there_again_when_a_newer_one_expires(make_bucket: MakeBucket) -> None:
    kv = await make_bucket(history=5)
    config = (await kv._js.stream_info(kv._stream)).config
    await kv._js.update_stream(config.evolve(allow_msg_ttl=True))
    await kv.put("a", b"old")
    async with kvx.Table(kv) as table:
        changes = table.changes()
        ack = await kv._js.publish(f"{kv._pre}a", b"new", headers={"Nats-TTL": "4s"})
        await table.wait_for(ack.seq)
        assert values(table) == {"a": b"new"}
        await until(lambda: values(table) == {"a": b"old"}, 60)
        stored, exposed = await anext(changes), await anext(changes)
        assert (stored.new, exposed.new and exposed.new.value) == (exposed.old, b"old")
        assert dict(table) == dict(await kvx.snapshot(kv))


async def test_a_server_that_has_lost_its_last_messages(own_server: NatsServer, tmp_path: Path) -> None:
    async with await nats.connect(
        own_server.url, max_reconnect_attempts=-1, reconnect_time_wait=0.1, error_cb=ignore
    ) as nc:
        kv = await nc.jetstream(timeout=10).create_key_value(bucket="B", direct=True)
        for key in "abcd":
            await kv.put(key, b"old")
        own_server.pause()
        shutil.copytree(own_server.store_dir, tmp_path / "store")
        own_server.resume()
        await kv.put("b", b"lost")
        await kv.put("a", b"lost")
        path = tmp_path / "t.db"
        async with kvx.Table(kv, checkpoint=path):
            pass
        async with kvx.Table(kv) as table:
            own_server.kill()
            shutil.rmtree(own_server.store_dir)
            shutil.copytree(tmp_path / "store", own_server.store_dir)
            own_server.restart()
            async with await nats.connect(own_server.url) as other:
                bucket = await other.jetstream(timeout=10).key_value("B")
                for n in range(4):
                    await bucket.put("c", b"%d" % n)
                    await bucket.put("a", b"new")
                revision = await bucket.put("d", b"1")
                await table.wait_for(revision, timeout=20)
                assert dict(table) == dict(await kvx.snapshot(bucket))
                async with kvx.Table(bucket, checkpoint=path) as restored:
                    assert dict(restored) == dict(table)


class TestTransactions:
    """A table never shows a part of a transaction, wherever a reply ends."""

    KEYS = tuple(f"k{n}" for n in range(10))

    @pytest.mark.parametrize("history", [1, 64])
    async def test_short_replies(
        self, make_bucket: MakeBucket, writer: JetStreamContext, monkeypatch: pytest.MonkeyPatch, history: int
    ) -> None:
        monkeypatch.setattr(present, "_CATCH_UP_BATCH", 7)
        kv = await make_bucket(history=history)
        other = await writer.key_value(kv._name)
        seen: set[tuple[int, tuple[bytes, ...]]] = set()
        async with opened(kv, None, ["k1", "k3", "k9"], ["k1", "k3", "k5"]) as tables:
            for number, table in enumerate(tables):

                def note(_: object, number: int = number, table: kvx.Table = table) -> None:
                    seen.add((number, tuple({entry.value for entry in table.values()})))

                table.on_change(note)
            for n in range(40):
                async with kvx.transaction(other) as tx:
                    for key in self.KEYS:
                        tx.put(key, b"%d" % n)
                if n % 4 == 3:
                    for table in tables:
                        await table.wait_for(max(tx.revisions.values()))
        assert {number for number, _ in seen} == {0, 1, 2}
        assert all(len(shown) == 1 for _, shown in seen)


class TestChanges:
    async def test_each_in_order(self, make_bucket: MakeBucket) -> None:
        kv = await make_bucket(history=64)
        await kv.put("a", b"0")
        async with kvx.Table(kv) as table:
            first, second, called = table.changes(), table.changes(), list[kvx.KeyValueChange]()
            stop = table.on_change(called.append)
            for n in range(1, 20):
                await kv.put("a", b"%d" % n)
            revision = await kv.delete("a") or 21
            async with asyncio.timeout(10):
                found = [await anext(first) for _ in range(20)]
                assert [await anext(second) for _ in range(20)] == found
            assert [change.old and change.old.value for change in found] == [b"%d" % n for n in range(20)]
            assert [change.new and change.new.value for change in found] == [b"%d" % n for n in range(1, 20)] + [None]
            assert [change.revision for change in found] == list(range(2, 22))
            assert (called, first.skipped) == (found, 0)
            stop()
            await table.wait_for(await kv.put("b", b"1"))
            assert len(called) == 20
            assert (await anext(first)).key == "b"
            del revision

    async def test_the_end_of_a_table_ends_them(self, make_bucket: MakeBucket) -> None:
        kv = await make_bucket()
        async with kvx.Table(kv) as table:
            changes, waiting = table.changes(), table.changes()
            ends = asyncio.create_task(anext(waiting, None))
            await table.wait_for(await kv.put("a", b"1"))
            await asyncio.sleep(0)
        assert (await changes.__anext__()).key == "a", "what was there is still returned"
        assert await anext(changes, None) is None
        assert (await ends) is not None
        assert [change async for change in waiting] == []

    async def test_changes_that_were_replaced_before_the_table_read_them_count(
        self, make_bucket: MakeBucket, server: NatsServer
    ) -> None:
        kv = await make_bucket()

        async def write() -> None:
            async with await nats.connect(server.url) as nc:
                bucket = await nc.jetstream().key_value(kv._name)
                for n in range(200):
                    await bucket.put("a", b"%d" % n)

        async with kvx.Table(kv) as table:
            changes = table.changes()
            await stalled(write)
            await table.wait_for(await kv.put("b", b"1"))
            told = 0
            while told < 201:
                change = await anext(changes)
                told += 1 + change.skipped
            assert (told, change.key, changes.skipped > 100) == (201, "b", True)

    async def test_an_error_of_a_callback_ends_nothing(self, make_bucket: MakeBucket) -> None:
        kv, reported, called = await make_bucket(), list[Any](), list[Any]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))

        def fail(change: kvx.KeyValueChange) -> None:
            called.append(change)
            raise ValueError(change.key)

        async with kvx.Table(kv) as table:
            table.on_change(fail)
            for key in "ab":
                await table.wait_for(await kv.put(key, b"1"))
        assert [str(error) for error in reported] == ["a", "b"]
        assert len(called) == 2


class TestLife:
    async def test_cancelling_leaves_nothing(self, make_bucket: MakeBucket, leak_check: Any) -> None:
        kv = await make_bucket()
        await kv.put("a", b"1")

        async with kvx.Table(kv):
            assert (await kv._js.stream_info(kv._stream)).state.consumer_count == 0

        async def use() -> None:  # without calls of nats-py, which lose cancellations on Python 3.11
            async with kvx.Table(kv) as table:
                await table.wait_for(99, timeout=30)

        for turns in range(0, 90, 4):
            using = asyncio.create_task(use())
            for _ in range(turns):
                await asyncio.sleep(0)
            using.cancel()
            with pytest.raises(asyncio.CancelledError):
                await using
            await leak_check.assert_clean()

    async def test_a_table_that_is_dropped_ends(self, make_bucket: MakeBucket) -> None:
        kv = await make_bucket()
        for watched in (False, True):
            tasks = asyncio.all_tasks()
            table = kvx.Table(kv)
            await table.__aenter__()
            if watched:
                table.on_change(print)
            with pytest.warns(ResourceWarning, match="was dropped while it was open"):
                del table
            gc.collect()
            await until(lambda: asyncio.all_tasks() == tasks)  # noqa: B023

    async def test_it_is_for_one_block(self, make_bucket: MakeBucket) -> None:
        kv = await make_bucket()
        await kv.put("a", b"1")
        table = kvx.Table(kv)

        def calls() -> list[Callable[[], object]]:
            return [table.changes, lambda: table.on_change(print)]

        for call in (*calls(), lambda: table["a"], lambda: len(table)):
            with pytest.raises(RuntimeError, match="enter it"):
                call()
        with pytest.raises(RuntimeError, match="not open"):
            await table.wait_for(1)
        async with table:
            with pytest.raises(RuntimeError, match="once"):
                await table.__aenter__()
        for call in calls():
            with pytest.raises(RuntimeError, match="closed"):
                call()
        with pytest.raises(RuntimeError, match="closed"):
            await table.wait_for(1)
        with pytest.raises(RuntimeError, match="once"):
            await table.__aenter__()
        assert values(table) == {"a": b"1"}

    async def test_a_wait_ends_in_time(self, make_bucket: MakeBucket) -> None:
        kv = await make_bucket()
        async with kvx.Table(kv) as table:
            with pytest.raises(RequestTimeoutError, match=r"did not reach revision 5 within 0\.2 s; it has 0"):
                await table.wait_for(5, timeout=0.2)

    async def test_a_server_that_restarts(self, own_server: NatsServer, caplog: pytest.LogCaptureFixture) -> None:
        options = {"reconnect_time_wait": 0.05, "max_reconnect_attempts": -1, "error_cb": ignore}
        async with await nats.connect(own_server.url, **options) as nc:
            kv = await kvx.enable(await nc.jetstream(timeout=10).create_key_value(bucket="B"))
            await kv.put("a", b"1")
            impatient = await nc.jetstream(timeout=3).key_value("B")
            with caplog.at_level(logging.WARNING, "jetstream_ext"):
                async with kvx.Table(impatient) as table:
                    own_server.kill()
                    await until(lambda: "not current" in caplog.text)
                    assert values(table) == {"a": b"1"}
                    await asyncio.to_thread(own_server.restart)
                    async with asyncio.timeout(30):
                        while True:
                            try:
                                revision = await kv.put("a", b"2")
                                break
                            except (nats.errors.Error, nats.js.errors.Error):
                                await asyncio.sleep(0.1)
                    await table.wait_for(revision, timeout=30)
                    assert values(table) == {"a": b"2"}
            assert "current again" in caplog.text

    async def test_without_permission_to_subscribe_it_polls(self) -> None:
        users = (
            "{user: a, password: a}, {user: b, password: b, permissions: "
            '{publish: ["$JS.API.>"], subscribe: ["_INBOX.>"]}}'
        )
        errors: list[Exception] = []

        async def note(error: Exception) -> None:
            errors.append(error)

        with NatsServer(config=f"authorization {{users: [{users}]}}") as server:
            async with (
                await nats.connect(server.url, user="a", password="a") as nc,
                await nats.connect(server.url, user="b", password="b", error_cb=note) as limited,
            ):
                kv = await kvx.enable(await nc.jetstream(timeout=30).create_key_value(bucket="B"))
                async with kvx.Table(await limited.jetstream(timeout=30).key_value("B")) as table:
                    for n in range(3):
                        await asyncio.sleep(0.4)
                        await kv.put("a", b"%d" % n)
                        await until(lambda: values(table) == {"a": b"%d" % n}, 2.0)  # noqa: B023
        assert len(errors) == 1, "it does not try again"


@pytest.mark.parametrize("history", [1, 64])
async def test_every_state_is_one_that_the_bucket_had(
    make_bucket: MakeBucket, server: NatsServer, history: int
) -> None:
    kv = await make_bucket(history=history)
    checker, stop = TableChecker(), asyncio.Event()
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(await nats.connect(server.url)) for _ in range(3)]
        buckets = [await nc.jetstream(timeout=10).key_value(kv._name) for nc in clients]
        tables = [await stack.enter_async_context(kvx.Table(bucket)) for bucket in buckets[:2]]
        async with asyncio.TaskGroup() as group:
            for number, bucket in enumerate(buckets):
                group.create_task(checker.write(bucket, number, 20, stop, tables=tables[:2]))
            for number in range(5):
                if number >= 2:  # the later ones load while the others write
                    await asyncio.sleep(0.3)
                    tables.append(await stack.enter_async_context(kvx.Table(buckets[2])))
                group.create_task(checker.read(f"table {number}", tables[number], number, stop))
            async with asyncio.timeout(60):
                while sum(map(len, checker.samples.values())) <= 100:
                    await asyncio.sleep(0.05)
            stop.set()
        end = await kvx.snapshot(kv)
        for table in tables:
            await table.wait_for(end.revision)
            assert dict(table) == dict(end)
    checker.check()


class TestExpiry:
    async def test_a_limit_that_was_raised_removes_nothing_at_its_old_time(self, js, stream_name) -> None:
        kv = await kvx.ensure_bucket(js, stream_name(), ttl=2)
        await kv.put("a", b"v")
        async with kvx.Table(kv) as table:
            seen: list[kvx.KeyValueChange] = []
            table.on_change(seen.append)
            config = (await js.stream_info(kv._stream)).config
            await js.update_stream(config.evolve(max_age=3600))
            await asyncio.sleep(3)
            assert table["a"].value == b"v"
            assert seen == []

    async def test_an_older_value_that_never_expires_comes_back(self, js, stream_name) -> None:
        """Also in a table that is too large for one request."""
        kv = await kvx.ensure_bucket(js, stream_name(), history=2, ttl=2)
        for part in range(2):
            async with kvx.transaction(kv) as tx:
                for n in range(600):
                    tx.put(f"k.{part}.{n}", b"pinned", ttl=jsx.NEVER)
        async with kvx.Table(kv) as table:
            await table.wait_for(await kv.put("k.0.5", b"new"))
            assert table["k.0.5"].value == b"new"
            async with asyncio.timeout(20):
                while table["k.0.5"].value == b"new":
                    await asyncio.sleep(0.05)
            assert (len(table), table["k.0.5"].value) == (1200, b"pinned")
