"""`retry_transaction`: when it runs a function again, for how long, and after a lost answer."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest
from nats.js.kv import KeyValue

import jetstream_ext.kv as kvx
from jetstream_ext.errors import BatchOutcomeUnknownError, KeyConflictError, NoStreamError
from jetstream_ext.kv.transaction import Transaction
from jetstream_ext.testing import ReferenceServer
from jetstream_ext.testing.reference import ChangeLeader, Cut, Drop, Lose, Overload, Rule, Unavailable

READ = "$JS.API.STREAM.MSG.GET.KV_B"


class Counting:
    """Adds one to a key, and counts its runs."""

    runs = 0

    async def __call__(self, tx: Transaction) -> int:
        self.runs += 1
        entry = await tx.get("count")
        count = int(entry.value) + 1 if entry else 1
        tx.put("count", b"%d" % count)
        return count


def is_commit(message: Any) -> bool:
    return b"Nats-Batch-Commit" in message.header or b"Nats-Msg-Id" in message.header


@pytest.fixture
async def reference() -> AsyncIterator[tuple[ReferenceServer, KeyValue]]:
    """A reference server, whose faults are exact, and its bucket "B"."""
    async with ReferenceServer() as server:
        nc = await nats.connect(server.url, connect_timeout=10, reconnect_time_wait=0.05, max_reconnect_attempts=-1)
        try:
            yield server, await kvx.enable(await nc.jetstream(timeout=30).create_key_value(bucket="B"))
        finally:
            await nc.close()


async def test_result_is_that_of_the_committed_run(make_bucket) -> None:
    kv = await make_bucket()
    runs = 0

    async def add(tx: Transaction) -> int:
        nonlocal runs
        runs += 1
        await tx.get("a")
        if runs < 4:
            await kv.put("a", b"%d" % runs)
        tx.put("a", b"mine")
        return runs

    assert (await kvx.retry_transaction(kv, add)).result == 4
    assert (await kv.get("a")).value == b"mine"


async def test_persistent_conflict_is_raised_when_patience_ends(make_bucket) -> None:
    kv = await make_bucket()

    async def never(tx: Transaction) -> None:
        await tx.get("a")
        await kv.put("a", b"theirs")
        tx.put("a", b"mine")

    with pytest.raises(KeyConflictError):
        await kvx.retry_transaction(kv, never, patience=0.5)
    for wrong, error in ((0, ValueError), (-1, ValueError), (True, TypeError)):
        with pytest.raises(error, match="patience"):
            await kvx.retry_transaction(kv, Counting(), patience=wrong)


async def test_conflict_with_a_condition_of_the_caller_is_not_retried(make_bucket) -> None:
    kv = await make_bucket()
    await kv.put("a", b"1")
    for operation in (lambda tx: tx.create("a", b""), lambda tx: tx.update("a", b"", last=7)):
        runs = 0

        async def once(tx: Transaction, operation: Any = operation) -> None:
            nonlocal runs
            runs += 1
            await tx.get("other")
            operation(tx)

        with pytest.raises(KeyConflictError) as caught:
            await kvx.retry_transaction(kv, once)
        assert (caught.value.keys, runs) == (("a",), 1)


async def test_transient_errors_are_retried(reference) -> None:
    server, kv = reference
    add = Counting()

    async def read_in_a_group(tx: Transaction) -> int:
        async with asyncio.TaskGroup() as group:
            for key in ("a", "b"):
                group.create_task(tx.get(key))
        return await add(tx)

    for expected, (fn, fault) in enumerate(
        [
            (add, Unavailable(READ, times=2)),
            (read_in_a_group, Unavailable(READ, times=2)),
            (add, Lose(READ)),
            (add, Cut(READ, before=True)),
            (add, Unavailable("$KV.B.>", times=2)),
            (add, Overload("$KV.B.>")),
            (add, ChangeLeader("$KV.B.>", nth=2)),
        ],
        start=1,
    ):
        server.faults.add(fault)
        add.runs = 0
        assert (await kvx.retry_transaction(kv, fn, timeout=1)).result == expected, fault
        assert (await kv.get("count")).value == b"%d" % expected
        server.faults.remove(fault)
    server.faults.add(Unavailable("$KV.B.>", times=None))
    with pytest.raises(NoStreamError):
        await kvx.retry_transaction(kv, add, patience=0.2)


async def test_function_may_commit_or_discard_itself(make_bucket) -> None:
    kv = await make_bucket()

    async def commits(tx: Transaction) -> dict[str, int]:
        tx.put("a", b"1")
        return dict(await tx.commit())

    async def discards(tx: Transaction) -> str:
        tx.put("a", b"2")
        await tx.discard()
        return "no"

    assert await kvx.retry_transaction(kv, commits) == ({"a": 1}, 1)
    assert await kvx.retry_transaction(kv, discards) == ("no", 0)
    assert (await kv.get("a")).value == b"1"


class TestLostAnswers:
    @pytest.mark.parametrize("window", [120, 0.1], ids=["", "beyond the duplicate window"])
    async def test_commit_without_an_answer_takes_effect_once(self, reference, window: float) -> None:
        """Whether the server has stored it, or it was lost."""
        server, kv = reference
        config = (await kv._js.stream_info("KV_B")).config
        await kv._js.update_stream(config.evolve(duplicate_window=window))
        for expected, fault in enumerate((Drop(kind="pub_ack"), Lose("$KV.B.>", when=is_commit)), start=1):
            server.faults.add(fault)
            assert (await kvx.retry_transaction(kv, Counting(), timeout=0.5)).result == expected, fault
            entry = await kv.get("count")
            assert (entry.value, entry.revision) == (b"%d" % expected, expected), fault

    @pytest.mark.parametrize(
        ("history", "fault", "result", "value"),
        [
            (1, Drop(kind="pub_ack"), None, b"100"),
            (2, Drop(kind="pub_ack"), 1, b"100"),
            (2, Lose("$KV.B.>", when=is_commit), 101, b"101"),
        ],
        ids=["the other removed it", "the other followed", "the other came first"],
    )
    async def test_another_write(self, reference, history: int, fault: Rule, result: int | None, value: bytes) -> None:
        """What the commit did is known unless another write has removed what it stored."""
        server, kv = reference
        await kv._js.update_stream((await kv._js.stream_info("KV_B")).config.evolve(max_msgs_per_subject=history))
        server.faults.add(fault)
        running = asyncio.ensure_future(kvx.retry_transaction(kv, Counting(), timeout=1))
        async with asyncio.timeout(15):  # less than `patience`
            while not server.faults.seen.get(id(fault)):
                await asyncio.sleep(0.005)
            await kv.put("count", b"100")
            if result is None:
                with pytest.raises(BatchOutcomeUnknownError, match="has removed messages since"):
                    await running
            else:
                assert (await running).result == result
        assert (await kv.get("count")).value == value

    async def test_a_message_that_may_be_on_the_old_connection_stays_unknown(self, reference) -> None:
        server, kv = reference
        server.faults.add(Lose("$KV.B.>", when=is_commit))
        tx = kvx.transaction(kv, timeout=0.5)
        tx.put("a", b"1")
        with pytest.raises(BatchOutcomeUnknownError):
            await tx.commit()
        nc = kv._js._nc
        nc._transport._bare_io_writer.transport.abort()
        async with asyncio.timeout(15):
            while not (nc.stats["reconnects"] and nc.is_connected):
                await asyncio.sleep(0.01)
        with pytest.raises(BatchOutcomeUnknownError, match="the message may still arrive over the old connection"):
            await tx.resolve()
        assert tx.state == "unknown"

    async def test_an_outcome_that_stays_unknown_ends_the_call_before_its_patience(self, reference) -> None:
        server, kv = reference
        lost = Lose("$KV.B.>", when=is_commit)
        server.faults.add(lost)
        running = asyncio.ensure_future(kvx.retry_transaction(kv, Counting(), patience=600, timeout=0.5))
        async with asyncio.timeout(20):
            while not server.faults.seen.get(id(lost)):
                await asyncio.sleep(0.005)
            kv._js._nc._transport._bare_io_writer.transport.abort()
            with pytest.raises(BatchOutcomeUnknownError, match="the message may still arrive over the old connection"):
                await running

    async def test_plain_transaction_leaves_the_outcome_to_the_caller(self, reference) -> None:
        server, kv = reference
        for fault, outcome, revisions in (
            (Drop(kind="pub_ack"), "stored", {"a": 1}),
            (Lose("$KV.B.>", when=is_commit), "not_stored", {}),
        ):
            server.faults.add(fault)
            with pytest.raises(BatchOutcomeUnknownError):
                async with kvx.transaction(kv, timeout=4) as tx:
                    tx.put("a", b"1")
            assert (tx.state, tx.revisions) == ("unknown", {})
            assert await tx.resolve(timeout=30) == outcome
            assert (tx.state, tx.revisions) == ("committed" if outcome == "stored" else "failed", revisions)
