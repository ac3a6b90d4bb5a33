"""Transactions on a real server."""

# ruff: noqa: PT012 - the exit of the block raises

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from nats.js.errors import InvalidKeyError, KeyWrongLastSequenceError

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
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
from jetstream_ext.kv import keyed_stream
from jetstream_ext.kv.bucket import Bucket


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


@pytest.mark.parametrize(
    ("operation", "keys"),
    [
        (lambda tx: tx.create("there", b""), ("there",)),
        (lambda tx: tx.update("there", b"", last=7), ("there",)),
        (lambda tx: tx.update("missing", b"", last=7), ("missing",)),
        (lambda tx: tx.delete("there", last=7), ("there",)),
        (lambda tx: tx.purge("missing", last=7), ("missing",)),
        (lambda tx: [tx.create("there", b""), tx.update("missing", b"", last=2)], ("there", "missing")),
    ],
)
async def test_conflict_names_its_keys(make_bucket, operation, keys: tuple[str, ...]) -> None:
    kv = await make_bucket()
    await kv.put("there", b"1")
    with pytest.raises(KeyConflictError) as caught:
        async with kvx.transaction(kv) as tx:
            tx.put("other", b"1")
            operation(tx)
    assert caught.value.keys == keys
    assert caught.value.outcome == "not_stored"
    assert isinstance(caught.value, KeyWrongLastSequenceError)
    assert tx.state == "failed"
    assert await values(kv) == {"there": b"1"}


async def test_deleted_key_can_be_created_again(make_bucket) -> None:
    kv = await make_bucket(history=2)
    await kv.put("deleted", b"1")
    await kv.delete("deleted")
    await kv.put("purged", b"1")
    await kv.purge("purged")
    async with kvx.transaction(kv) as tx:
        tx.create("deleted", b"2")
        tx.create("purged", b"3")
        tx.create("new", b"4")
    assert await values(kv) == {"deleted": b"2", "purged": b"3", "new": b"4"}


class TestReads:
    async def test_change_of_a_read_key_is_a_conflict(self, make_bucket) -> None:
        kv = await make_bucket()
        await kv.put("a", b"1")
        for change in (kv.put("a", b"2"), kv.delete("a")):
            with pytest.raises(KeyConflictError) as caught:
                async with kvx.transaction(kv) as tx:
                    assert (await tx.get("a")) is not None
                    tx.put("a", b"mine")
                    await change
            assert caught.value.keys == ("a",)
            assert caught.value.stale_read
            await kv.put("a", b"1")

    async def test_read_of_a_missing_key_is_a_condition(self, make_bucket) -> None:
        kv = await make_bucket()
        async with kvx.transaction(kv) as tx:
            assert await tx.get("a") is None
            tx.put("a", b"1")
        with pytest.raises(KeyConflictError):
            async with kvx.transaction(kv) as tx:
                assert await tx.get("b") is None
                tx.put("b", b"1")
                await kv.put("b", b"0")

    async def test_read_of_a_deleted_key_allows_its_creation(self, make_bucket) -> None:
        kv = await make_bucket()
        await kv.put("a", b"1")
        await kv.delete("a")
        async with kvx.transaction(kv) as tx:
            assert await tx.get("a") is None
            tx.create("a", b"2")
        assert await values(kv) == {"a": b"2"}

    async def test_key_that_is_only_read_is_a_condition(self, make_bucket) -> None:
        kv = await make_bucket()
        await kv.put("limit", b"10")
        async with kvx.transaction(kv) as tx:
            await tx.get("limit")
            tx.put("used", b"9")
        with pytest.raises(KeyConflictError) as caught:
            async with kvx.transaction(kv) as tx:
                await tx.get("limit")
                tx.put("used", b"10")
                await kv.put("limit", b"5")
        assert caught.value.keys == ("limit",)
        assert (await values(kv))["used"] == b"9"

    async def test_more_keys_read_than_written_are_conditions(self, make_bucket) -> None:
        kv = await make_bucket()
        for key in ("x", "y", "z"):
            await kv.put(key, b"1")
        async with kvx.transaction(kv) as tx:
            assert len(await tx.get_many(["x", "y", "z", "none"])) == 3
            tx.put("sum", b"3")
        assert tx.revisions == {"sum": 4}
        for change in (kv.put("y", b"2"), kv.put("none", b"1")):
            with pytest.raises(KeyConflictError) as caught:
                async with kvx.transaction(kv) as tx:
                    await tx.get_many(["x", "y", "z", "none"])
                    tx.put("sum", b"4")
                    await change
            assert caught.value.stale_read
        assert (await values(kv))["sum"] == b"3"

    async def test_transaction_without_writes_checks_its_reads(self, make_bucket) -> None:
        kv = await make_bucket()
        await kv.put("x", b"1")
        await kv.put("y", b"2")
        async with kvx.transaction(kv) as tx:
            await tx.get("x")
            await tx.get("y")
        assert tx.state == "committed"
        with pytest.raises(KeyConflictError) as caught:
            async with kvx.transaction(kv) as tx:
                await tx.get("x")
                await kv.put("x", b"3")
                await tx.get("y")
        assert caught.value.keys == ("x",)

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

    async def test_reads_need_no_direct_gets(self, make_bucket) -> None:
        kv = await make_bucket(allow=False)
        await kvx.enable(kv, direct=False)
        await kv.put("a", b"1")
        async with kvx.transaction(kv) as tx:
            assert (await tx.get("a")).value == b"1"  # type: ignore[union-attr]
            await tx.get_many(["b", "c"])
            tx.put("d", b"1")


class FormerLeader:
    """For its first answers, a server that takes itself for the leader of the bucket and has only its first message."""

    def __init__(self, kv: Any, monkeypatch: pytest.MonkeyPatch, *, reads: int, looks: int) -> None:
        self.reads, self.looks = reads, looks
        self._look, self._get = keyed_stream.stream_state, keyed_stream.get_at_leader
        monkeypatch.setattr(keyed_stream, "stream_state", self.look)
        monkeypatch.setattr(keyed_stream, "get_at_leader", self.get)

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
        assert await kvx.retry_transaction(kv, read) == b"2"

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

    async def test_value_over_the_bucket_limit_names_its_key(self, make_bucket) -> None:
        kv = await make_bucket(max_value_size=1000)
        with pytest.raises(MessageTooLargeError, match="'large'"):
            async with kvx.transaction(kv) as tx:
                tx.put("small", b"1")
                tx.put("large", b"x" * 2000)
                tx.put("last", b"1")
        assert await values(kv) == {}

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

    @pytest.mark.parametrize("with_headers", [True, False])
    async def test_value_over_the_server_limit_with_its_headers_names_its_key(
        self, make_bucket, nc, with_headers: bool
    ) -> None:
        kv = await make_bucket()
        tx = kvx.transaction(kv)
        tx.put("small", b"1")
        tx.put("large", b"x" * (nc.max_payload - 10), ttl=jsx.NEVER if with_headers else None)
        tx.put("last", b"1")
        with pytest.raises(MaxPayloadError, match=r"key 'large' has \d+ bytes.*max_payload.*nothing was written"):
            await tx.commit()
        assert tx.state == "failed"
        assert await values(kv) == {}

    async def test_value_over_the_server_limit_is_refused_locally(self, make_bucket, nc) -> None:
        kv = await make_bucket()
        async with kvx.transaction(kv) as tx:
            with pytest.raises(MaxPayloadError, match="'large'"):
                tx.put("large", b"x" * (nc.max_payload + 1))
            tx.put("small", b"1")
        assert await values(kv) == {"small": b"1"}

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

    async def test_invalid_keys_are_refused(self, make_bucket) -> None:
        kv = await make_bucket()
        async with kvx.transaction(kv) as tx:
            for key in ("", "a b", "a..b", "a.*"):
                with pytest.raises(InvalidKeyError):
                    tx.put(key, b"")
                with pytest.raises(InvalidKeyError):
                    await tx.get(key)
                with pytest.raises(InvalidKeyError):
                    await tx.get_many([key])
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


async def test_ttls_are_stored_and_replace_history(make_bucket, found) -> None:
    kv = await make_bucket(history=5)
    await kv.put("a", b"0")
    async with kvx.transaction(kv) as tx:
        tx.put("a", b"1", ttl=60)
        tx.create("b", b"2", ttl=61)
        tx.purge("c", ttl=62)
        tx.put("d", b"3", ttl=jsx.NEVER)
    stored = {m.subject.removeprefix(kv._pre): m for m in await jsx.DirectGet(kv._js, kv._stream).scan().to_list()}
    assert {key: m.headers["Nats-TTL"] for key, m in stored.items()} == {"a": "60", "b": "61", "c": "62", "d": "never"}
    assert len(await found(kv.history, "a")) == 1


async def test_concurrent_increments_lose_nothing(make_bucket) -> None:
    kv = await make_bucket(storage="memory")

    async def add(tx: kvx.Transaction) -> int:
        entry = await tx.get("count")
        count = int(entry.value) + 1 if entry else 1
        tx.put("count", b"%d" % count)
        return count

    counts = await asyncio.gather(*(kvx.retry_transaction(kv, add) for _ in range(50)))
    assert sorted(counts) == list(range(1, 51))
    assert (await kv.get("count")).value == b"50"


async def test_write_skew_is_refused(make_bucket) -> None:
    """Of two doctors on call, each may leave if the other stays."""
    kv = await make_bucket(storage="memory")
    for _ in range(5):
        await kv.put("anna", b"on")
        await kv.put("ben", b"on")

        async def leave(tx: kvx.Transaction, who: str, other: str) -> bool:
            if (await tx.get(other)).value != b"on":  # type: ignore[union-attr]
                return False
            await asyncio.sleep(0.005)
            tx.put(who, b"off")
            return True

        left = await asyncio.gather(
            kvx.retry_transaction(kv, lambda tx: leave(tx, "anna", "ben")),
            kvx.retry_transaction(kv, lambda tx: leave(tx, "ben", "anna")),
        )
        assert sorted(left) == [False, True]


@pytest.mark.parametrize("found", [0, 1, 3])
async def test_transaction_that_found_a_key_sends_one_more_request_before_the_commit(
    make_bucket, monkeypatch: pytest.MonkeyPatch, found: int
) -> None:
    kv = await make_bucket()
    for number in range(found):
        await kv.put(f"found.{number}", b"0")
    states: list[None] = []
    requests: list[dict[str, Any]] = []
    state, get = Bucket.unchecked_state, Bucket.get_at_leader

    async def counted_state(bucket: Bucket) -> Any:
        states.append(None)
        return await state(bucket)

    async def counted_get(bucket: Bucket, **request: Any) -> Any:
        requests.append(request)
        return await get(bucket, **request)

    monkeypatch.setattr(Bucket, "unchecked_state", counted_state)
    monkeypatch.setattr(Bucket, "get_at_leader", counted_get)
    async with kvx.transaction(kv) as tx:
        for key in ("missing", *(f"found.{number}" for number in range(found))):
            await tx.get(key)
            tx.put(key, b"1")
    assert states == []
    assert [request for request in requests if "seq" in request] == [{"seq": 1}][:found]
    assert len(requests) == 1 + found + (found > 0)
