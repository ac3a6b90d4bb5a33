"""Events that are stored in the same commit as keys, and keys that a transaction only reads."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from clients import quiet
from nats.js import JetStreamContext
from nats.js.kv import KeyValue

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext import StoredMsg, errors, log
from jetstream_ext.testing import NatsServer


@pytest.fixture
def topic(stream_name: Callable[[], str]) -> str:
    """What the subjects of a test's events begin with; streams of one server cannot share them."""
    return stream_name()


@pytest.fixture
async def kv(js: JetStreamContext, stream_name: Callable[[], str], topic: str) -> KeyValue:
    return await kvx.ensure_bucket(js, stream_name(), events=[f"{topic}.>"], history=3)


async def events_of(kv: KeyValue, topic: str) -> list[StoredMsg]:
    return [message async for message in jsx.DirectGet(kv._js, kv._stream).scan(subject=f"{topic}.>")]


class TestEvents:
    async def test_keys_and_events_are_stored_together(self, kv: KeyValue, topic: str) -> None:
        async with kvx.transaction(kv) as tx:
            tx.put("a", b"1")
            first = tx.publish(f"{topic}.created", b"event 1", headers={"Kind": "x"})
            second = tx.publish(f"{topic}.created")
            tx.put("b", b"2")
        stored = await events_of(kv, topic)
        assert [(it.subject, it.data) for it in stored] == [(first, b"event 1"), (second, b"")]
        assert stored[0].headers["Kind"] == "x"
        assert first < second
        assert all(re.fullmatch(rf"{topic}\.created\.[0-9a-f]{{26}}", it) for it in (first, second))
        assert tx.revisions == {key: (await kv.get(key)).revision for key in ("a", "b")}

    async def test_nothing_is_stored_if_a_key_has_changed(self, kv: KeyValue, topic: str) -> None:
        await kv.put("a", b"1")
        tx = kvx.transaction(kv)
        await tx.get("a")
        tx.put("a", b"2")
        tx.publish(f"{topic}.x")
        await kv.put("a", b"other")
        with pytest.raises(errors.KeyConflictError):
            await tx.commit()
        assert await events_of(kv, topic) == []

    async def test_an_event_depends_on_what_was_read(self, kv: KeyValue, topic: str) -> None:
        """Also without a key that is written, and with more keys than events."""
        for key in "abc":
            await kv.put(key, b"1")
        for reads in ("a", "abc"):
            tx = kvx.transaction(kv)
            await tx.get_many(list(reads))
            tx.publish(f"{topic}.x", reads.encode())
            assert await tx.commit() == {}
            late = kvx.transaction(kv)
            await late.get_many(list(reads))
            late.publish(f"{topic}.x", b"late")
            await kv.put(reads[-1], b"2")
            with pytest.raises(errors.KeyConflictError) as caught:
                await late.commit()
            assert caught.value.keys == (reads[-1],)
        assert [it.data for it in await events_of(kv, topic)] == [b"a", b"abc"]

    async def test_events_are_no_keys(self, kv: KeyValue, topic: str) -> None:
        await kv.put("a", b"0")
        async with kvx.Table(kv) as table, kvx.Table(kv, ["a"]) as some:
            for n in range(5):
                async with kvx.transaction(kv) as tx:
                    await tx.get_many(["a", "b", "c"])
                    tx.put("a", b"%d" % n)
                    tx.publish(f"{topic}.x", b"%d" % n)
            revision = tx.revisions["a"]
            for each in (table, some):
                await each.wait_for(revision)
                assert {key: entry.value for key, entry in each.items()} == {"a": b"4"}
            await kv.delete("a")
            await kv.put("z", b"1")
            await table.wait_for((await kv.get("z")).revision)
            assert list(table) == ["z"]
        assert await kv.keys() == ["z"]
        assert [it.operation for it in await kv.history("a")] == [None, None, "DEL"]
        now, then = await kvx.snapshot(kv), await kvx.snapshot(kv, at=revision)
        assert (list(now), then["a"].value, list(then)) == (["z"], b"4", ["a"])
        assert list(await kvx.get_many(kv, ["a", "z"])) == ["z"]
        assert len(await events_of(kv, topic)) == 5  # more than the bucket's history

    async def test_a_mirror_of_a_bucket_with_events_is_a_bucket(
        self, js: JetStreamContext, kv: KeyValue, topic: str, mirrored: Callable[..., Any]
    ) -> None:
        """Also if its first message is an event."""
        for n in range(3):
            async with kvx.transaction(kv) as tx:
                tx.publish(f"{topic}.x", b"%d" % n)
                tx.put("a", b"%d" % n)
        stream = await mirrored(kv, "copy", 6, max_msgs_per_subject=3, allow_direct=True)
        mirror = KeyValue(stream.removeprefix("KV_"), stream, kv._pre, js, direct=True)
        assert {key: it.value for key, it in (await kvx.snapshot(mirror)).items()} == {"a": b"2"}
        assert (await kvx.get_many(mirror, ["a"]))["a"].value == b"2"
        async with kvx.Table(mirror) as table:
            assert list(table) == ["a"]

    async def test_many_events_do_not_slow_the_keys_down(self, js: JetStreamContext, kv: KeyValue, topic: str) -> None:
        """A read of the keys does not read the events."""
        await jsx.ensure_stream(js, name=kv._stream, allow_batched=True)
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add_many((f"{topic}.x.{n}", b"e" * 1000) for n in range(5_000))
        for key in "abc":
            await kv.put(key, b"1")
        before = js._nc.stats["in_bytes"]
        assert list(await kvx.snapshot(kv)) == ["a", "b", "c"]
        async with kvx.Table(kv) as table:
            assert list(table) == ["a", "b", "c"]
        assert js._nc.stats["in_bytes"] - before < 1_000_000

    async def test_a_subject_that_the_bucket_does_not_store_is_an_error(self, kv: KeyValue, topic: str) -> None:
        tx = kvx.transaction(kv)
        tx.put("a", b"1")
        tx.publish(f"{topic}other.x")
        with pytest.raises(errors.BadSubjectError, match=r"enable\(kv, events=\[\.\.\.\]\)"):
            await tx.commit()
        assert tx.state == "failed"
        again = await kvx.enable(kv, events=[f"{topic}other.>"])
        async with kvx.transaction(again) as tx:
            tx.put("a", b"1")
            tx.publish(f"{topic}other.x")
        assert len(await events_of(kv, f"{topic}other")) == 1

    async def test_what_cannot_be_an_event_is_refused_at_once(
        self, js: JetStreamContext, kv: KeyValue, stream_name: Callable[[], str]
    ) -> None:
        tx = kvx.transaction(kv)
        for subject in ("", "a b", "a.*", "a.>", "a..b", f"$KV.{kv._name}.a", "$JS.API.x", f"_spark.{kv._stream}.x"):
            with pytest.raises((errors.BadSubjectError, ValueError)):
                tx.publish(subject)
        with pytest.raises(TypeError):
            tx.publish("a.b", "text")  # type: ignore[arg-type]
        with pytest.raises(errors.BadHeaderError):
            tx.publish("a.b", headers={"a": "b\r\nc: d"})
        for name in ("Nats-Rollup", "Nats-Expected-Last-Sequence", "Nats-Batch-Id", "Nats-Schedule"):
            with pytest.raises(errors.BadHeaderError, match="servers would obey it"):
                tx.publish("a.b", headers={name: "all"})
        for bad in ("orders", "orders.*", "$KV.x.>", "_INBOX.>", "*.x.>", ">", "a b.>"):
            with pytest.raises((errors.BadSubjectError, ValueError)):
                await kvx.ensure_bucket(js, stream_name(), events=[bad])
            with pytest.raises((errors.BadSubjectError, ValueError)):
                await kvx.enable(kv, events=[bad])
        with pytest.raises(TypeError, match="list"):
            await kvx.enable(kv, events="orders.>")

    async def test_the_ack_of_another_stream_proves_nothing(
        self, js: JetStreamContext, kv: KeyValue, topic: str, stream_name: Callable[[], str]
    ) -> None:
        """Another stream has taken over subjects that the client still takes for the bucket's."""
        async with kvx.transaction(kv) as tx:
            tx.publish(f"{topic}.x")
        config = (await js.stream_info(kv._stream)).config
        await js.update_stream(config.evolve(subjects=config.subjects[:1]))
        other = stream_name()
        await js.add_stream(name=other, subjects=[f"{topic}.>"], allow_atomic=True)
        tx = kvx.transaction(kv)
        tx.publish(f"{topic}.x")
        with pytest.raises(errors.BatchOutcomeUnknownError, match=other):
            await tx.commit()
        assert tx.state == "unknown"
        with pytest.raises(errors.BatchOutcomeUnknownError, match=other):
            await tx.resolve()
        await js.delete_stream(other)
        await js.delete_stream(kv._stream)
        await js.add_stream(name=other, subjects=[f"{kv._pre}>"])
        tx = kvx.transaction(kv)
        tx.put("a", b"1")
        with pytest.raises(errors.BatchOutcomeUnknownError, match=other):
            await tx.commit()

    async def test_events_account_for_nothing_that_is_missing(
        self, js: JetStreamContext, kv: KeyValue, topic: str
    ) -> None:
        await kv.create("x.1", b"v")
        revision = await kv.create("x.2", b"v")
        await js.purge_stream(kv._stream, subject=f"{kv._pre}x.1")
        async with kvx.transaction(kv) as tx:
            tx.create("new", b"1")
            tx.publish(f"{topic}.x")
        with pytest.raises(errors.HistoryUnavailableError, match="no history accounts for"):
            await kvx.snapshot(kv, at=revision)

    async def test_a_large_table_notices_what_went_while_it_was_away(
        self, js: JetStreamContext, stream_name: Callable[[], str], topic: str, tmp_path: Path
    ) -> None:
        kv = await kvx.ensure_bucket(js, stream_name(), events=[f"{topic}.>"])
        await jsx.ensure_stream(js, name=kv._stream, allow_batched=True)
        async with jsx.FastPublisher(js, flow=500) as publisher:
            await publisher.add_many((f"{kv._pre}k.{n}", b"v") for n in range(1_500))
        file = tmp_path / "checkpoint"
        async with kvx.Table(kv, checkpoint=file) as table:
            assert len(table) == 1_500
        await js.purge_stream(kv._stream, subject=f"{kv._pre}k.5")
        for n in range(5):
            async with kvx.transaction(kv) as tx:
                tx.put(f"k.{n + 100}", b"w")
                tx.publish(f"{topic}.x")
        async with kvx.Table(kv, checkpoint=file) as table:
            async with asyncio.timeout(10):
                while "k.5" in table:
                    await asyncio.sleep(0.05)
            assert len(table) == 1_499

    async def test_the_same_call_again_changes_nothing(self, js: JetStreamContext, kv: KeyValue, topic: str) -> None:
        before = (await js.stream_info(kv._stream)).config
        assert before.subjects == [f"$KV.{kv._name}.>", f"_reads.{kv._stream}", f"{topic}.>"]
        await kvx.ensure_bucket(js, kv._name, events=[f"{topic}.>"])
        await kvx.enable(kv, events=[f"{topic}.created.>"])  # the other filter has it
        await kvx.ensure_bucket(js, kv._name)
        assert (await js.stream_info(kv._stream)).config == before

    async def test_a_worker_follows_the_events(self, js: JetStreamContext, kv: KeyValue, topic: str) -> None:
        async def spend(tx: kvx.Transaction) -> int:
            found = await tx.get("count")
            count = int(found.value) + 1 if found else 1
            tx.put("count", b"%d" % count)
            tx.publish(f"{topic}.counted", b"%d" % count)
            return count

        for n in range(1, 8):
            done = await kvx.retry_transaction(kv, spend)
            assert done == (n, (await kv.get("count")).revision)
        reader = log.LogReader(js, kv._stream, subject=f"{topic}.>")
        assert [it.data for it in await reader.read()] == [b"%d" % n for n in range(1, 8)]

    async def test_a_lost_answer_is_resolved_with_the_event(
        self, kv: KeyValue, topic: str, js: JetStreamContext, nc: Any
    ) -> None:
        tx = kvx.transaction(kv)
        tx.publish(f"{topic}.x", b"1")
        tx.put("a", b"1")
        loop = asyncio.get_running_loop()
        running = loop.create_task(tx.commit())
        while not running.done() and tx.state != "unknown":
            running.cancel()
            await asyncio.wait([running])
        stored = "stored" if len(await events_of(kv, topic)) else "not_stored"
        if tx.state == "unknown":
            assert await tx.resolve() == stored
        assert ((await kvx.get_many(kv, ["a"])) != {}) == (stored == "stored")


class TestReadKeys:
    async def test_only_the_keys_that_were_read_can_conflict(self, kv: KeyValue) -> None:
        """Writes to other keys cannot, in whatever number; see "Transactions" in the documentation."""
        for key in ("a", "b"):
            await kv.put(key, b"1")
        for number in range(20):
            tx = kvx.transaction(kv)
            assert list(await tx.get_many(["a", "b", "missing"])) == ["a", "b"]
            await kv.put("other", b"%d" % number)
            tx.put("sum", b"2")
            await kv.put("other", b"%d" % number)
            await tx.commit()
            assert tx.revisions == {"sum": (await kv.get("sum")).revision}
        for key in ("a", "missing"):
            tx = kvx.transaction(kv)
            await tx.get_many(["a", "b", "missing"])
            tx.put("sum", b"3")
            await kv.put(key, b"2")
            with pytest.raises(errors.KeyConflictError) as caught:
                await tx.commit()
            assert (caught.value.keys, caught.value.stale_read) == ((key,), True)

    async def test_a_bucket_that_was_created_again_without_the_subject(
        self, js: JetStreamContext, kv: KeyValue
    ) -> None:
        """The client still takes it for the earlier one, which stored the subject."""
        for writes in ("ab", "b"):
            async with kvx.transaction(kv) as tx:
                await tx.get_many(["x", "y", "z"])
                tx.put("a", b"1")
            await js.delete_stream(kv._stream)
            await js.add_stream(
                name=kv._stream,
                subjects=[f"{kv._pre}>"],
                max_msgs_per_subject=1,
                allow_atomic=True,
                allow_rollup_hdrs=True,
            )
            tx = kvx.transaction(kv)
            await tx.get_many(["x", "y", "z"])
            for key in writes:
                tx.create(key, b"1")
            assert list(await tx.commit()) == list(writes)
            await kvx.enable(kv)

    async def test_a_client_that_may_only_publish_keys_depends_on_the_whole_bucket(self) -> None:
        users = """authorization { users: [
            {user: admin, password: p},
            {user: app, password: p, permissions: {
                publish: ["$KV.B.>", "$JS.API.>"], subscribe: ["_INBOX.>"]}}] }"""
        async with NatsServer(config=users) as server:
            admin = await nats.connect(server.url, user="admin", password="p")
            kv = await kvx.ensure_bucket(admin.jetstream(), "B")
            app = await nats.connect(server.url, user="app", password="p", error_cb=quiet)
            own = await app.jetstream().key_value("B")
            async with kvx.transaction(own) as tx:
                await tx.get_many(["a", "b"])
                tx.put("c", b"1")
            assert (await kv.get("c")).value == b"1"
            await app.close()
            await admin.close()

    async def test_more_keys_than_a_batch_has_room_for(self, kv: KeyValue) -> None:
        async with kvx.transaction(kv) as tx:
            await tx.get_many([f"k{n}" for n in range(1200)])
            tx.put("c", b"1")
        assert tx.revisions == {"c": (await kv.get("c")).revision}
