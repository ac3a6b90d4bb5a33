"""Transactions of keys on a real server: two attempts at one task, and reads that a former leader answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig

import jetstream_ext.kv as kvx
from jetstream_ext.client import fenced_write, outcome
from jetstream_ext.client.api import stream_state
from jetstream_ext.client.connection import Context
from jetstream_ext.kv.commit import Staged
from jetstream_ext.spark.bad_rows import RowError
from jetstream_ext.spark.kv_rows import KeyWrite
from jetstream_ext.spark.kv_sink import KeyTransactions
from jetstream_ext.spark.ledger import MicroBatch, SinkError
from jetstream_ext.spark.options import KvWriteOptions


async def refuse(write: KeyWrite, reason: str) -> None:
    raise RowError(reason)


@pytest.fixture
async def transactions(js: JetStreamContext, stream_name: Callable[[], str]) -> Callable[..., KeyTransactions]:
    """Make the transactions of an attempt at a partition of one micro-batch."""
    bucket = stream_name()
    await kvx.enable(await js.create_key_value(KeyValueConfig(bucket=bucket, history=5)), spark=True)
    options = KvWriteOptions.parse({"servers": "nats://unused:4222", "bucket": bucket}, streaming=True)
    state = await stream_state(Context(js), f"KV_{bucket}")

    def make(partition: str, attempt: str = "attempt") -> KeyTransactions:
        return KeyTransactions(MicroBatch(js, options, state, "a bucket", "query", 0, attempt), partition, refuse)

    return make


async def test_the_driver_leaves_out_what_another_attempt_at_a_task_has_stored(
    js: JetStreamContext, transactions: Callable[..., KeyTransactions], found: Any
) -> None:
    """Rows in another order have other last values, so one attempt can be too large for the driver and the next one not."""

    def writes(value: bytes, *keys: str) -> list[KeyWrite]:
        return [KeyWrite(key, value, Staged("PUT"), 0, 0) for key in keys]

    first = transactions("0")
    assert await first.open()
    await first.store_writes(writes(b"first", "a", "b"))
    driver = transactions("_driver", "attempt._driver")
    assert await driver.finish(writes(b"second", "a", "b", "c"))
    assert driver.skipped == 2
    with pytest.raises(SinkError, match="another attempt at it has begun"):
        await first.store_writes(writes(b"third", "d"))
    kv = await js.key_value(driver._kv._name)
    stored = {key: [entry.value for entry in await found(kv.history, key)] for key in await found(kv.keys)}
    assert stored == {"a": [b"first"], "b": [b"first"], "c": [b"second"]}


async def test_a_former_leader_that_answers_reads_makes_no_row_a_bad_row(
    transactions: Callable[..., KeyTransactions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are stored, but the reads that would show it are answered with an earlier state."""
    writes = [KeyWrite(key, b"", Staged("PUT", expected=0, creates=True), 0, 0) for key in ("a", "b")]
    first, second = transactions("0"), transactions("0")
    assert await first.open()
    assert await second.open()
    await first.store_writes(writes)
    stale, find = 1, outcome.get_at_leader

    async def find_earlier_state(*request: Any) -> Any:
        nonlocal stale
        stale -= 1
        return None if stale >= 0 else await find(*request)

    for module in (outcome, fenced_write):
        monkeypatch.setattr(module, "get_at_leader", find_earlier_state)
    await second.store_writes(writes)  # `refuse` would raise RowError
    assert stale < 0
    assert second.skipped == 2
