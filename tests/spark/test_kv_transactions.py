"""Attempts at micro-batches that die, overlap and partition their keys differently, on a real server.

Every message carries its micro-batch and attempt, and the bucket keeps all of them: each key of each micro-batch must be
stored once, and never after a later micro-batch.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig, RePublish

import jetstream_ext.kv as kvx
from jetstream_ext.client import fenced_write, outcome
from jetstream_ext.client.api import stream_state
from jetstream_ext.client.connection import Context
from jetstream_ext.client.fenced_write import FencedWriter
from jetstream_ext.errors import FencedError
from jetstream_ext.kv.commit import Staged
from jetstream_ext.spark.bad_rows import RowError
from jetstream_ext.spark.kv_rows import KeyWrite
from jetstream_ext.spark.kv_transactions import DRIVER, Conflict, KeyTransactions, KvMicroBatch
from jetstream_ext.spark.options import KvWriteOptions
from jetstream_ext.spark.transactional import SinkError

SEEDS = int(os.environ.get("JETSTREAM_EXT_KV_ATTEMPTS", "1"))
KEYS = [f"k.{number}" for number in range(40)]


class DiesError(Exception):
    """The process of an attempt dies."""


async def refuse(conflict: Conflict) -> None:
    raise RowError(conflict.reason)


class Query:
    """The micro-batches of a query that writes to one bucket."""

    def __init__(self, js: JetStreamContext, bucket: str, random: random.Random) -> None:
        self._js, self._bucket, self._random = js, bucket, random
        options = {"servers": "nats://unused:4222", "bucket": bucket, "transactionRows": "3"}
        self._options = KvWriteOptions.parse(options, streaming=True)
        self._attempts = 0
        self._zombies: set[asyncio.Task[None]] = set()

    async def run(self, batch: int, keys: Sequence[str]) -> None:
        """Run a micro-batch as Spark does, until an attempt succeeds."""
        while True:
            self._attempts += 1
            attempt = asyncio.create_task(self._attempt(batch, keys, f"a{self._attempts}"))
            if self._random.random() < 0.3:  # the driver is replaced while this attempt goes on
                self._zombies.add(attempt)
                await asyncio.sleep(self._random.random() * 0.2)
                continue
            try:
                await attempt
                return
            except (DiesError, FencedError, SinkError):
                continue

    async def close(self) -> None:
        await asyncio.gather(*self._zombies, return_exceptions=True)

    async def _attempt(self, batch: int, keys: Sequence[str], attempt: str) -> None:
        """Store the keys in partitions of its own; each task has two attempts, which may overlap."""
        keys = self._random.sample(list(keys), len(keys))
        handed, partitions = keys[: self._random.randrange(8)], self._random.randrange(1, 4)
        rest = keys[len(handed) :]
        state = await stream_state(Context(self._js), f"KV_{self._bucket}")
        micro = KvMicroBatch(self._js, self._options, state, "query", batch, attempt)

        def writes(of: Sequence[str], partition: int) -> list[KeyWrite]:
            return [KeyWrite(key, f"{batch} {attempt}".encode(), Staged("PUT"), 0, partition) for key in of]

        async def task(partition: int) -> None:
            transactions = KeyTransactions(micro, f"{partition}", refuse)
            if await transactions.open():
                await transactions.store(writes(rest[partition::partitions], partition))

        async def twice(partition: int) -> None:
            if self._random.random() < 0.2:  # speculation
                self._zombies.add(asyncio.create_task(task(partition)))
            if self._random.random() < 0.2:  # this attempt at the task is small enough for the driver
                handed.extend(rest[partition::partitions])
                return
            try:
                await task(partition)
            except (DiesError, FencedError, SinkError):
                await task(partition)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._quietly(twice(number))) for number in range(partitions)]
        for one in tasks:
            if (error := one.result()) is not None:
                raise error
        await KeyTransactions(micro, DRIVER, refuse).finish(writes(handed, 99))

    @staticmethod
    async def _quietly(work: Any) -> Exception | None:
        try:
            await work
        except Exception as error:
            return error
        return None


def _dying(work: Any, chosen: random.Random) -> Any:
    """Let a call of a writer take long, and sometimes die, before it or after it."""

    async def call(*arguments: Any) -> Any:
        dies = chosen.random()
        if dies < 0.01:
            raise DiesError
        if dies > 0.8:
            await asyncio.sleep(chosen.random() * 0.02)
        result = await work(*arguments)
        if dies > 0.95:
            await asyncio.sleep(chosen.random() * 0.1)
        if 0.01 < dies < 0.02:
            raise DiesError
        return result

    return call


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("history", [1, 5])
async def test_each_key_of_a_micro_batch_is_stored_once(
    nc: Client,
    js: JetStreamContext,
    stream_name: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    history: int,
) -> None:
    chosen, bucket = random.Random(seed), stream_name()
    log = await nc.subscribe(f"log.{bucket}.>")
    republish = RePublish(src=f"$KV.{bucket}.>", dest=f"log.{bucket}.>")  # every message, also those that are replaced
    kv = await js.create_key_value(KeyValueConfig(bucket=bucket, history=history, republish=republish))
    await kvx.enable(kv, spark=True)
    for name in ("read", "store"):
        monkeypatch.setattr(FencedWriter, name, _dying(getattr(FencedWriter, name), chosen))
    query, batches = Query(js, bucket, chosen), [chosen.sample(KEYS, chosen.randrange(1, len(KEYS))) for _ in range(6)]
    try:
        for number, keys in enumerate(batches):
            await query.run(number, keys)
    finally:
        await query.close()
    stored, last = Counter[tuple[str, int]](), dict[str, int]()
    for _ in range(sum(map(len, batches))):
        message = await log.next_msg(timeout=10)
        key, batch = message.subject.removeprefix(f"log.{bucket}."), int(message.data.split()[0])
        stored[key, batch] += 1
        assert batch > last.get(key, -1), (key, batch, last)
        last[key] = batch
    await nc.flush()
    assert not log.pending_msgs
    assert stored == Counter((key, number) for number, keys in enumerate(batches) for key in keys)
    markers = await js.stream_info(f"KV_{bucket}", subjects_filter=f"_spark.KV_{bucket}.>")
    assert len(markers.state.subjects or {}) <= 60


async def test_the_driver_leaves_out_what_another_attempt_at_a_task_has_stored(
    js: JetStreamContext, stream_name: Callable[[], str], found: Any
) -> None:
    """Rows in another order have other last values, so one attempt can be too large for the driver and the next one not."""
    bucket = stream_name()
    await kvx.enable(await js.create_key_value(KeyValueConfig(bucket=bucket, history=5)), spark=True)
    options = KvWriteOptions.parse({"servers": "nats://unused:4222", "bucket": bucket}, streaming=True)
    state = await stream_state(Context(js), f"KV_{bucket}")
    micro = KvMicroBatch(js, options, state, "query", 0, "attempt")

    def writes(value: bytes, *keys: str) -> list[KeyWrite]:
        return [KeyWrite(key, value, Staged("PUT"), 0, 0) for key in keys]

    first = KeyTransactions(micro, "0", refuse)
    assert await first.open()
    await first.store(writes(b"first", "a", "b"))
    driver = KeyTransactions(micro, DRIVER, refuse)
    assert await driver.finish(writes(b"second", "a", "b", "c"))
    assert driver.skipped == 2
    with pytest.raises(SinkError, match="another attempt at it has begun"):
        await first.store(writes(b"third", "d"))
    kv = await js.key_value(bucket)
    stored = {key: [entry.value for entry in await found(kv.history, key)] for key in await found(kv.keys)}
    assert stored == {"a": [b"first"], "b": [b"first"], "c": [b"second"]}


async def test_a_former_leader_that_answers_reads_makes_no_row_a_bad_row(
    js: JetStreamContext, stream_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are stored, but the reads that would show it are answered with an earlier state."""
    bucket = stream_name()
    await kvx.enable(await js.create_key_value(KeyValueConfig(bucket=bucket)), spark=True)
    options = KvWriteOptions.parse({"servers": "nats://unused:4222", "bucket": bucket}, streaming=True)
    micro = KvMicroBatch(js, options, await stream_state(Context(js), f"KV_{bucket}"), "query", 0, "attempt")
    writes = [KeyWrite(key, b"", Staged("PUT", expected=0, creates=True), 0, 0) for key in ("a", "b")]
    first, second = (KeyTransactions(micro, "0", refuse) for _ in range(2))
    assert await first.open()
    assert await second.open()
    await first.store(writes)
    stale, find = 2, outcome.get_at_leader

    async def find_earlier_state(*request: Any) -> Any:
        nonlocal stale
        stale -= 1
        return None if stale >= 0 else await find(*request)

    for module in (outcome, fenced_write):
        monkeypatch.setattr(module, "get_at_leader", find_earlier_state)
    await second.store(writes)  # `refuse` would raise RowError
    assert stale < 0
    assert second.skipped == 2
