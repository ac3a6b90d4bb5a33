"""`FencedWriter` stores once, one writer at a time, even if answers are lost."""

import asyncio
import json
import pickle
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import nats
import nats.errors
import pytest
from client_cells import each
from clients import quiet
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.client import fenced_write
from jetstream_ext.client.api import get_at_leader
from jetstream_ext.client.connection import Context
from jetstream_ext.client.fenced_write import FencedWriter, RecordMovedError
from jetstream_ext.testing import Faults, ReferenceServer
from jetstream_ext.testing.reference import Cut, Drop, Lose

MakeStream = Callable[..., Awaitable[str]]


def writer(js: JetStreamContext, stream: str, **options: Any) -> FencedWriter:
    defaults: dict[str, Any] = {"name": "writer 'w'", "patience": 60.0, "timeout": 30.0}
    return FencedWriter(Context(js), stream, f"{stream}.record", **{**defaults, **options})


async def payloads(js: JetStreamContext, stream: str) -> list[bytes]:
    return [message.data for message in await jsx.DirectGet(js, stream).scan().to_list()]


async def test_messages_and_their_record_are_stored_together(
    js: JetStreamContext, stream: str, leak_check: Any
) -> None:
    one = writer(js, stream)
    assert await one.read() is None
    ack = await one.store([(f"{stream}.a", b"1"), jsx.BatchMessage(f"{stream}.b", b"2")], b"two")
    assert (ack.stream, ack.seq, ack.batch_size, one.fence) == (stream, 3, 3, 3)
    assert (await one.store([], b"none")).seq == 4
    record = await writer(js, stream).read()
    assert record is not None
    assert (record.seq, record.data) == (4, b"none")
    assert await payloads(js, stream) == [b"1", b"2", b"two", b"none"]
    await leak_check.assert_clean()


@each("allow_atomic", [True, False])
async def test_a_record_alone_needs_no_atomic_batches(
    js: JetStreamContext, make_stream: MakeStream, allow_atomic: bool
) -> None:
    stream = await make_stream(allow_atomic=allow_atomic)
    one = writer(js, stream)
    assert [(await one.store([], b"%d" % i)).seq for i in range(3)] == [1, 2, 3]
    if not allow_atomic:
        with pytest.raises(errors.AtomicPublishDisabledError):
            await one.store([(f"{stream}.a", b"")], b"4")
        assert (await one.store([], b"4")).seq == 4


@each("messages", [True, False])
async def test_of_two_writers_only_the_first_to_store_succeeds(
    js: JetStreamContext, make_stream: MakeStream, messages: bool
) -> None:
    stream = await make_stream()
    one, other = writer(js, stream), writer(js, stream)
    await one.store([], b"start")
    await other.read()
    await one.store([(f"{stream}.a", b"mine")], b"one")
    with pytest.raises(RecordMovedError, match="another writer") as caught:
        await other.store([(f"{stream}.a", b"theirs")] if messages else [], b"other")
    assert isinstance(caught.value, errors.FencedError)
    assert (caught.value.seq, caught.value.record and caught.value.record.data) == (3, b"one")
    assert pickle.loads(pickle.dumps(caught.value)).record == caught.value.record
    assert await payloads(js, stream) == [b"start", b"mine", b"one"]
    await other.read()
    assert (await other.store([], b"other")).seq == 4


async def test_a_removed_record_is_an_error_until_the_next_read(js: JetStreamContext, stream: str) -> None:
    one = writer(js, stream)
    await one.store([], b"1")
    await js.purge_stream(stream)
    with pytest.raises(RecordMovedError, match="was removed") as caught:
        await one.store([], b"2")
    assert (caught.value.record, caught.value.seq) == (None, None)
    await one.read()
    await one.store([], b"2")


# -- answers that are lost


@asynccontextmanager
async def faulty(faults: Faults) -> AsyncIterator[JetStreamContext]:

    async with (
        ReferenceServer(faults=faults) as server,
        await nats.connect(
            server.url, reconnect_time_wait=0.01, max_reconnect_attempts=-1, error_cb=quiet, connect_timeout=10
        ) as nc,
    ):
        js = nc.jetstream(timeout=30)
        await js.add_stream(name="S", subjects=["S.>"], allow_atomic=True, allow_direct=True)
        with pytest.MonkeyPatch.context() as patch:
            # The timeout of a writer is for the answers that are lost. The leader's answers to its reads are not.
            patch.setattr(fenced_write, "get_at_leader", lambda *where: get_at_leader(*where[:3], 30))
            yield js


@each("messages", [[], [("S.a", b"x")], [("S.a", b"x")] * 3])
@each("fault", [Drop(kind="pub_ack"), Lose("S.>"), Lose("S.record"), Drop(kind="pub_ack", times=3)])
async def test_a_store_whose_answer_is_lost_succeeds_once(fault: Any, messages: list[Any]) -> None:
    faults = Faults()
    async with faulty(faults) as js:
        one = writer(js, "S", timeout=0.2)
        await one.store([], b"0")
        faults.add(fault)
        for i in (1, 2):
            ack = await one.store(messages, b"%d" % i)
            assert ack.seq == one.fence == 1 + i * (len(messages) + 1)
            assert ack.batch_size == len(messages) + 1
        data = [data for _, data in messages]
        assert await payloads(js, "S") == [b"0", *data, b"1", *data, b"2"]


@each("messages", [[], [("S.a", b"x")]])
async def test_a_cancelled_store_is_found_by_the_next(messages: list[Any]) -> None:
    faults = Faults()
    async with faulty(faults) as js:
        one = writer(js, "S")
        await one.store([], b"0")
        faults.add(Drop(kind="pub_ack"))
        task = asyncio.ensure_future(one.store(messages, b"1"))
        async with asyncio.timeout(30):
            while (await js.stream_info("S")).state.messages < 2 + len(messages):
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert one.fence == 1
        assert (await one.store(messages, b"2")).seq == 3 + 2 * len(messages)
        assert (await payloads(js, "S"))[-1] == b"2"


async def test_lasting_errors_are_raised_when_the_patience_ends() -> None:
    faults = Faults()
    async with faulty(faults) as js:
        one = writer(js, "S", timeout=0.3, patience=0.5)
        faults.add(Lose("S.>", times=None))
        async with asyncio.timeout(30):
            with pytest.raises(nats.errors.TimeoutError):
                await one.store([], b"1")
            with pytest.raises(errors.BatchOutcomeUnknownError):
                await one.store([("S.a", b"")], b"1")


@each("seed", range(6))
async def test_competing_writers_leave_no_gap_and_no_repetition(seed: int) -> None:
    """Every writer stores numbered records and their messages, and reads again when it is fenced."""
    rng = random.Random(seed)
    chance = rng.choice([0.05, 0.15, 0.3])
    faults = Faults(
        Drop(kind="pub_ack", times=None, chance=chance),
        Lose("S.>", times=None, chance=chance),
        Cut("S.>", times=2, chance=0.02),
        seed=seed,
    )
    async with faulty(faults) as js:

        async def work(index: int) -> None:
            one = writer(js, "S", timeout=0.15, patience=300)
            stores = 0
            while stores < 6:
                record = await one.read()
                number = 0 if record is None else json.loads(record.data)["n"]
                try:
                    while stores < 6:
                        number += 1
                        count = rng.randrange(3)
                        outputs = [("S.out", b"%d.%d" % (number, i)) for i in range(count)]
                        await one.store(outputs, json.dumps({"n": number, "writer": index, "count": count}).encode())
                        stores += 1
                except errors.FencedError:
                    await asyncio.sleep(rng.random() * 0.02)

        writers = rng.randint(1, 3)
        await asyncio.gather(*(work(index) for index in range(writers)))
        faults.rules.clear()
        stored = await jsx.DirectGet(js, "S", timeout=30).scan().to_list()
    number, outputs = 0, []
    for message in stored:
        if message.subject == "S.out":
            outputs.append(message.data)
            continue
        number += 1
        record = json.loads(message.data)
        assert record["n"] == number
        assert outputs == [b"%d.%d" % (number, i) for i in range(record["count"])]
        outputs = []
    assert (number, outputs) == (6 * writers, [])


# -- retries


async def recreate(js: JetStreamContext, stream: str) -> None:
    """Delete a stream and create it again, with another writer's record at the sequence of the first one."""
    config = (await js.stream_info(stream)).config
    await js.delete_stream(stream)
    await js.add_stream(config)
    await writer(js, stream).store([], b"other")


@each("messages", [True, False])
@each("read", [True, False])
async def test_a_checked_writer_does_not_follow_the_record_of_another_stream(
    js: JetStreamContext, make_stream: MakeStream, read: bool, messages: bool
) -> None:
    stream = await make_stream()
    one, entries = writer(js, stream, checked=True), [(f"{stream}.a", b"")] if messages else []
    await (writer(js, stream) if read else one).store([], b"first")
    if read:
        await one.read()
    await recreate(js, stream)
    for _ in range(2):
        with pytest.raises(errors.StreamRecreatedError, match="is not the record on") as caught:
            await one.store(entries, b"second")
        assert caught.value.stream == stream
    assert await payloads(js, stream) == [b"other"]
    await one.read()
    assert (await one.store(entries, b"second")).seq == 2 + messages


async def test_a_store_whose_answer_is_lost_is_not_repeated_in_another_stream(
    js: JetStreamContext, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = writer(js, stream)
    await one.store([], b"first")

    async def lose(*_: Any) -> Any:
        await recreate(js, stream)
        raise errors.BatchOutcomeUnknownError

    monkeypatch.setattr(one, "_publish", lose)
    with pytest.raises(errors.StreamRecreatedError) as caught:
        await one.store([], b"second")
    assert isinstance(caught.value.__cause__, errors.BatchOutcomeUnknownError)
    assert await payloads(js, stream) == [b"other"]
