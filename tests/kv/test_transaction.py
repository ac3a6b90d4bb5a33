"""Transactions on a real server."""

# ruff: noqa: PT012 - the exit of the block raises

import inspect
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from nats.js.errors import InvalidKeyError, KeyWrongLastSequenceError

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.client.atomic_session import AtomicSession
from jetstream_ext.errors import (
    AtomicPublishDisabledError,
    AtomicPublishTooLargeError,
    BatchClosedError,
    KeyConflictError,
    MaxPayloadError,
    MessageTooLargeError,
    MessageTTLDisabledError,
    RequestTimeoutError,
)
from jetstream_ext.kv import bucket


async def values(kv: Any) -> dict[str, bytes]:
    return {key: entry.value for key, entry in (await kvx.snapshot(kv)).items()}


async def test_all_operations_are_committed_together(make_bucket, found) -> None:
    kv = await make_bucket(history=3)
    for key in ("c", "d", "e"):
        await kv.put(key, b"0")
    async with kvx.transaction(kv) as tx:
        tx.put("a", b"1")
        tx.create("b", b"2")
        tx.update("c", b"3", last=1)
        tx.delete("d", last=2)
        tx.purge("e")
        assert tx.revisions == {}
        assert tx.state == "open"
    assert tx.state == "committed"
    assert tx.revisions == {"a": 4, "b": 5, "c": 6, "d": 7, "e": 8}
    assert await values(kv) == {"a": b"1", "b": b"2", "c": b"3"}
    assert [entry.operation for entry in await found(kv.history, "d")] == [None, "DEL"]
    assert [entry.operation for entry in await found(kv.history, "e")] == ["PURGE"]
    tx.revisions["a"] = 9  # a copy
    assert tx.revisions["a"] == 4


async def test_exception_writes_nothing(make_bucket) -> None:
    kv = await make_bucket()
    with pytest.raises(ZeroDivisionError):
        async with kvx.transaction(kv) as tx:
            tx.put("a", b"1")
            raise ZeroDivisionError
    assert tx.state == "discarded"
    assert (await kvx.snapshot(kv)).revision == 0


async def test_empty_transaction_commits(make_bucket) -> None:
    kv = await make_bucket(allow=False)
    async with kvx.transaction(kv) as tx:
        pass
    assert (tx.state, dict(tx.revisions)) == ("committed", {})


async def test_conflict_names_its_keys(make_bucket) -> None:
    kv = await make_bucket()
    await kv.put("there", b"1")
    for operation, keys, text in (
        (lambda tx: tx.create("there", b""), ("there",), "cannot be created, because it exists \\(at revision 1"),
        (lambda tx: tx.update("there", b"", last=7), ("there",), "key 'there' is at revision 1, not 7"),
        (lambda tx: tx.update("missing", b"", last=7), ("missing",), "key 'missing' is at revision 0, not 7"),
        (lambda tx: tx.delete("there", last=7), ("there",), "key 'there' is at revision 1, not 7"),
        (lambda tx: tx.purge("missing", last=7), ("missing",), "key 'missing' is at revision 0, not 7"),
        (lambda tx: [tx.create("there", b""), tx.update("missing", b"", last=2)], ("there", "missing"), ""),
    ):
        with pytest.raises(KeyConflictError, match=f"nothing was written; .*{text}") as caught:
            async with kvx.transaction(kv) as tx:
                tx.put("other", b"1")
                operation(tx)
        assert caught.value.keys == keys
        assert (caught.value.outcome, caught.value.stale_read, tx.state) == ("not_stored", False, "failed")
        assert isinstance(caught.value, KeyWrongLastSequenceError)
    assert await values(kv) == {"there": b"1"}


async def test_last_operation_on_a_key_is_stored_with_its_first_condition(make_bucket, found) -> None:
    kv = await make_bucket(history=5)
    for key in ("a", "deleted", "purged"):
        await kv.put(key, b"1")
    await kv.delete("deleted")
    await kv.purge("purged")
    async with kvx.transaction(kv) as tx:
        tx.update("a", b"2", last=1)
        tx.put("b", b"1")
        tx.delete("a")
        tx.purge("b")
        tx.create("b", b"3")
        tx.create("a", b"4")
        tx.create("deleted", b"5")
        tx.create("purged", b"6")
        for again in ("a", "b", "deleted"):
            with pytest.raises(KeyConflictError, match="this transaction already writes it") as caught:
                tx.create(again, b"")
            assert (caught.value.keys, caught.value.stale_read) == ((again,), False)
        with pytest.raises(ValueError, match="no revision to compare with"):
            tx.update("b", b"", last=1)
    assert await values(kv) == {"a": b"4", "b": b"3", "deleted": b"5", "purged": b"6"}
    assert [entry.operation for entry in await found(kv.history, "b")] == [None]
    with pytest.raises(KeyConflictError) as caught:
        async with kvx.transaction(kv) as tx:
            tx.update("a", b"", last=1)
            tx.delete("a")
            tx.put("a", b"")
    assert caught.value.keys == ("a",)


class TestReads:
    async def test_change_of_what_was_read_is_a_conflict(self, make_bucket) -> None:
        """Whether the key is written, only read, or there are more such keys than messages that carry conditions."""
        kv = await make_bucket()
        for n, (read, written, changed) in enumerate(
            [
                (["x"], ["x"], "x"),
                (["none"], ["none"], "none"),
                (["gone"], ["gone"], "gone"),
                (["x"], ["sum"], "x"),
                (["x", "none"], ["sum", "other"], "none"),
                (["x", "y", "z", "none"], ["sum"], "y"),
                (["x", "y", "z", "none"], ["sum"], "none"),
                (["x", "y"], [], "x"),
            ]
        ):
            for how in ("put", "delete"):
                own = f"{n}.{how}."
                async with kvx.transaction(kv) as tx:
                    for key in ("x", "y", "z"):
                        tx.put(own + key, b"1")
                    tx.delete(own + "gone")
                tx = kvx.transaction(kv)
                await tx.get_many([own + key for key in read])
                for key in written:
                    tx.put(own + key, b"mine")
                await (kv.put(own + changed, b"2") if how == "put" else kv.delete(own + changed))
                with pytest.raises(KeyConflictError) as caught:
                    await tx.commit()
                cell = (read, written, changed, how)
                assert (caught.value.keys, caught.value.stale_read) == ((own + changed,), True), cell
        assert b"mine" not in (await values(kv)).values()

    async def test_unchanged_reads_are_committed(self, make_bucket) -> None:
        kv = await make_bucket()
        await kv.put("x", b"1")
        await kv.put("y", b"2")
        await kv.put("deleted", b"1")
        await kv.delete("deleted")
        for read, written in (
            (["x"], ["sum"]),
            (["x", "deleted"], ["deleted", "x"]),
            (["x", "y", "deleted", "none"], ["sum"]),
            (["x", "y"], []),
        ):
            async with kvx.transaction(kv) as tx:
                await tx.get_many(read)
                for key in written:
                    tx.put(key, b"3")
            assert (tx.state, tx.revisions.keys()) == ("committed", set(written))

    async def test_known_conflicts_are_raised_before_the_commit(self, make_bucket) -> None:
        kv = await make_bucket()
        await kv.put("there", b"1")
        await kv.put("gone", b"1")
        await kv.purge("gone")
        async with kvx.transaction(kv) as tx:
            await tx.get_many(["there", "gone"])
            with pytest.raises(KeyConflictError, match=r"it exists \(at revision 1\)") as caught:
                tx.create("there", b"")
            assert (caught.value.keys, caught.value.stale_read) == (("there",), False)
            for operation in (lambda: tx.update("there", b"", last=6), lambda: tx.delete("there", last=6)):
                with pytest.raises(KeyConflictError, match="revision 1, not 6"):
                    operation()
            tx.update("there", b"2", last=1)
            tx.create("gone", b"2")
        assert await values(kv) == {"there": b"2", "gone": b"2"}

    async def test_write_to_another_key_during_the_commit_is_a_conflict_of_no_key(
        self, make_bucket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Only where the whole bucket must be unchanged, because more keys were read than messages can name."""
        kv = await make_bucket()
        config = (await kv._js.stream_info(kv._stream)).config
        await kv._js.update_stream(config.evolve(subjects=config.subjects[:1]))
        fill = AtomicSession.fill

        async def write_and_fill(session: Any, messages: Any, call: Any) -> Any:
            await kv.put("another", b"1")
            return await fill(session, messages, call)

        monkeypatch.setattr(AtomicSession, "fill", write_and_fill)
        for written in (["sum"], ["sum", "other"]):
            tx = kvx.transaction(kv)
            await tx.get_many(["x", "y"])
            for key in written:
                tx.put(key, b"2")
            if len(written) == 2:
                await tx.commit()
                continue
            with pytest.raises(KeyConflictError, match="another client wrote to the bucket; run the") as caught:
                await tx.commit()
            assert (caught.value.keys, caught.value.stale_read) == ((), True)

    async def test_one_key_is_one_publish_and_needs_no_batch(self, make_bucket, nc) -> None:
        kv = await make_bucket(allow=False)
        async with kvx.transaction(kv) as tx:
            tx.create("a", b"1")
        sent = nc.stats["out_msgs"]
        async with kvx.transaction(kv) as tx:
            tx.put("a", b"2")
        assert nc.stats["out_msgs"] == sent + 1
        async with kvx.transaction(kv) as tx:
            entry = await tx.get("a")
            tx.put("a", entry.value + b"3")
        assert tx.revisions == {"a": 3}
        behind = kvx.transaction(kv)
        await behind.get("a")
        await kv.put("a", b"4")
        behind.put("a", b"lost")
        with pytest.raises(KeyConflictError):
            await behind.commit()
        assert (await kv.get("a")).value == b"4"
        tx = kvx.transaction(kv)
        tx.put("a", b"5")
        tx.put("b", b"5")
        with pytest.raises(AtomicPublishDisabledError):
            await tx.commit()

    async def test_reads_see_own_writes(self, make_bucket) -> None:
        kv = await make_bucket()
        await kv.put("a", b"1")
        async with kvx.transaction(kv) as tx:
            tx.put("a", b"2")
            tx.create("b", b"3")
            mine = await tx.get("a")
            assert mine is not None
            assert (mine.value, mine.revision) == (b"2", 0)
            tx.delete("b")
            assert await tx.get("b") is None
            assert list(await tx.get_many(["b", "a"])) == ["a"]
            tx.put("a", mine.value + b"!")
        assert await values(kv) == {"a": b"2!"}
        assert (await kvx.snapshot(kv)).revision == 3

    async def test_key_is_read_once(self, make_bucket) -> None:
        kv = await make_bucket()
        await kv.put("a", b"1")
        with pytest.raises(KeyConflictError):
            async with kvx.transaction(kv) as tx:
                first = await tx.get("a")
                await kv.put("a", b"2")
                assert await tx.get("a") == first
                tx.put("a", b"3")


class FormerLeader:
    """For its first answers, a server that takes itself for the leader of the bucket and has only its first message."""

    def __init__(self, kv: Any, monkeypatch: pytest.MonkeyPatch, *, reads: int, looks: int) -> None:
        self.reads, self.looks = reads, looks
        self._look, self._get = bucket.stream_state, bucket.get_at_leader
        monkeypatch.setattr(bucket, "stream_state", self.look)
        monkeypatch.setattr(bucket, "get_at_leader", self.get)

    async def look(self, *arguments: Any) -> Any:
        self.looks -= 1
        return replace(await self._look(*arguments), replicated=True, leader_is_certain=self.looks < 0)

    async def get(self, context: Any, stream: str, request: Any, timeout: float) -> Any:
        self.reads -= 1
        return await self._get(context, stream, {"seq": 1} if self.reads >= 0 else request, timeout)


class TestReadOnly:
    async def test_value_of_a_former_leader_is_a_conflict(self, make_bucket, monkeypatch: Any) -> None:
        kv = await make_bucket(history=5)
        await kv.put("a", b"1")
        await kv.put("a", b"2")
        former = FormerLeader(kv, monkeypatch, reads=1, looks=3)
        with pytest.raises(KeyConflictError):
            async with kvx.transaction(kv) as tx:
                entry = await tx.get("a")
                assert entry is not None
                assert entry.value == b"1"
        assert former.looks < 0, "it waits for a leader that is certain"

        async def read(tx: kvx.Transaction) -> bytes:
            entry = await tx.get("a")
            assert entry is not None
            return entry.value

        former.reads, former.looks = 1, 2
        assert await kvx.retry_transaction(kv, read) == (b"2", 0)

    async def test_wait_for_a_certain_leader_ends(self, make_bucket, monkeypatch: Any) -> None:
        kv = await make_bucket()
        await kv.put("a", b"1")
        FormerLeader(kv, monkeypatch, reads=0, looks=1000)
        with pytest.raises(RequestTimeoutError, match="has not heard from the other servers"):
            async with kvx.transaction(kv, timeout=4) as tx:
                await tx.get("a")
        assert tx.state == "failed"


class TestRefusals:
    async def test_bucket_without_atomic_batches_names_enable(self, make_bucket) -> None:
        kv = await make_bucket(allow=False, direct=True)
        with pytest.raises(AtomicPublishDisabledError, match="enable") as caught:
            async with kvx.transaction(kv) as tx:
                tx.put("a", b"1")
                tx.put("b", b"1")
        assert caught.value.outcome == "not_stored"
        assert (await kvx.snapshot(kv)).revision == 0

    async def test_bucket_without_ttls_names_key_and_enable(self, js, stream_name) -> None:
        name = stream_name()
        config = {"max_msgs_per_subject": 1, "allow_rollup_hdrs": True, "allow_atomic": True}
        await js.add_stream(name=f"KV_{name}", subjects=[f"$KV.{name}.>"], **config)
        kv = await js.key_value(name)
        with pytest.raises(MessageTTLDisabledError, match=r"'short'.*enable"):
            async with kvx.transaction(kv) as tx:
                tx.put("long", b"1")
                tx.put("short", b"1", ttl=60)

    async def test_message_over_the_bucket_limit_is_described_once(self, make_bucket) -> None:
        kv = await make_bucket(max_value_size=64)
        await kv.put("a", b"1")
        for operation in ("put", "delete", "purge"):
            tx = kvx.transaction(kv)
            getattr(tx, operation)("a", *[b"x" * 64][: operation == "put"])
            with pytest.raises(MessageTooLargeError) as caught:
                await tx.commit()
            error = caught.value
            assert str(error) == (
                f"bucket {kv._name!r}: the message of key 'a' has {error.size} bytes with its headers; the bucket takes 64 "
                "(max_msg_size); nothing was written (error 10054)"
            )
            assert (error.subject, error.limit, error.outcome) == (f"{kv._pre}a", 64, "not_stored")
            assert error.size > 64
        assert await values(kv) == {"a": b"1"}

    async def test_value_over_the_server_limit_names_its_key(self, make_bucket, nc) -> None:
        kv = await make_bucket()
        for ttl in (jsx.NEVER, None):
            tx = kvx.transaction(kv)
            tx.put("small", b"1")
            tx.put("large", b"x" * (nc.max_payload - 10), ttl=ttl)
            tx.put("last", b"1")
            with pytest.raises(MaxPayloadError, match=r"key 'large' has \d+ bytes.*max_payload.*nothing was written"):
                await tx.commit()
            assert tx.state == "failed"
        assert await values(kv) == {}

    async def test_more_keys_than_the_server_accepts_write_nothing(self, make_bucket) -> None:
        kv = await make_bucket()
        with pytest.raises(AtomicPublishTooLargeError, match="1,001 keys"):
            async with kvx.transaction(kv) as tx:
                for n in range(1001):
                    tx.put(f"k.{n}", b"")
        assert (await kvx.snapshot(kv)).revision == 0
        async with kvx.transaction(kv) as tx:
            for n in range(1000):
                tx.put(f"k.{n}", b"")
        assert tx.revisions["k.999"] == 1000

    async def test_invalid_arguments_are_refused_and_change_nothing(self, make_bucket, nc) -> None:
        kv = await make_bucket()
        async with kvx.transaction(kv) as tx:
            for key in ("", "a b", "a..b", "a.*"):
                with pytest.raises(InvalidKeyError):
                    tx.put(key, b"")
                with pytest.raises(InvalidKeyError):
                    await tx.get(key)
                with pytest.raises(InvalidKeyError):
                    await tx.get_many([key])
            for operation, error, text in (
                (lambda: tx.put("a", "text"), TypeError, "the value of key 'a'"),  # type: ignore[arg-type]
                (lambda: tx.put("a", b"x" * (nc.max_payload + 1)), MaxPayloadError, "key 'a' has .* bytes"),
                (lambda: tx.put("a", b"", ttl=0.5), ValueError, "TTL"),
                (lambda: tx.update("a", b"", last="7"), ValueError, "last must be"),  # type: ignore[arg-type]
                (lambda: tx.delete("a", last=-1), ValueError, "from 0 to"),
            ):
                with pytest.raises(error, match=text):
                    operation()
        assert (await kvx.snapshot(kv)).revision == 0

    async def test_use_after_the_end_raises_batch_closed(self, make_bucket) -> None:
        kv = await make_bucket()
        async with kvx.transaction(kv) as tx:
            tx.put("a", b"1")
        with pytest.raises(BatchClosedError, match="committed"):
            tx.put("b", b"1")
        with pytest.raises(BatchClosedError):
            await tx.get("a")
        with pytest.raises(BatchClosedError):
            await tx.commit()
        with pytest.raises(BatchClosedError):
            await tx.resolve()

    async def test_commit_and_discard_without_a_with_block(self, make_bucket) -> None:
        kv = await make_bucket()
        tx = kvx.transaction(kv)
        tx.put("a", b"1")
        assert await tx.commit() == {"a": 1}
        other = kvx.transaction(kv)
        other.put("a", b"2")
        await other.discard()
        assert await values(kv) == {"a": b"1"}
        assert "committed" in repr(tx)


async def test_ttls_are_stored_and_values_that_expire_replace_history(make_bucket) -> None:
    kv = await make_bucket(history=5)
    for key in ("a", "d", "e"):
        await kv.put(key, b"0")
    await kv.delete("e")
    async with kvx.transaction(kv) as tx:
        tx.put("a", b"1", ttl=timedelta(minutes=1))
        tx.create("b", b"2", ttl=61)
        tx.purge("c", ttl=62)
        tx.put("d", b"3", ttl=jsx.NEVER)
        tx.create("e", b"4", ttl=63)
    stored = {m.subject.removeprefix(kv._pre): m for m in await jsx.DirectGet(kv._js, kv._stream).scan().to_list()}
    rollups = {key for key, m in stored.items() if (b"Nats-Rollup", b"sub") in m.raw_headers}
    assert {key: m.headers["Nats-TTL"] for key, m in stored.items()} == {
        "a": "60", "b": "61", "c": "62", "d": "never", "e": "63",
    }  # fmt: skip
    assert rollups == {"a", "c", "e"}


async def test_every_attribute_of_a_transaction_is_documented(make_bucket) -> None:
    kv = await make_bucket()

    async def look(tx: kvx.Transaction) -> kvx.Transaction:
        return tx

    for tx in (kvx.transaction(kv), (await kvx.retry_transaction(kv, look)).result):
        names = {name for name in dir(tx) if not name.startswith("_")}
        assert {"get", "put", "commit", "resolve"} <= names
        assert type(tx) is kvx.Transaction  # whose docstrings are the reference
        assert [name for name in names if not inspect.getdoc(getattr(kvx.Transaction, name))] == []
