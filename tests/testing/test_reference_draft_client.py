"""The client of this library on the draft dialect of the reference server."""

from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest
from nats.aio.client import Client

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import WrongLastSequenceError
from jetstream_ext.testing import ReferenceServer, VirtualClock
from jetstream_ext.testing.reference import Drop, Lose

CONFIG: dict[str, Any] = {"name": "S", "subjects": ["s.>"], "max_msgs_per_subject": 100}


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
async def draft(clock: VirtualClock) -> AsyncIterator[ReferenceServer]:
    async with ReferenceServer(dialect="draft", clock=clock) as server:
        yield server


@pytest.fixture
async def js(draft: ReferenceServer) -> AsyncIterator[Any]:
    nc: Client = await nats.connect(draft.url, connect_timeout=10)
    yield nc.jetstream()
    await nc.close()


async def test_fast_ingest_stores_all_messages(js: Any, draft: ReferenceServer) -> None:
    await js.add_stream(**CONFIG, allow_batched=True)
    for round_, gap in enumerate(jsx.GapMode, 1):
        draft.faults.add(Drop(kind="flow_ack", nth=2))  # so that the client pings
        async with jsx.FastPublisher(js, flow=10, gap=gap, timeout=30.0) as pub:
            for index in range(57):
                await pub.add("s.a", str(index).encode())
            await pub.flush()
            assert (pub.batch_seq, pub.flow) == (57, 10)
        assert (pub.ack.seq, pub.ack.batch_size, pub.end_reason) == (57 * round_, 57, jsx.EndReason.COMMITTED)


async def test_gap_is_reported_or_ends_the_batch(js: Any, draft: ReferenceServer) -> None:
    await js.add_stream(**CONFIG, allow_batched=True)
    draft.faults.add(Lose("s.>", nth=5, times=2))
    async with jsx.FastPublisher(js, flow=10, gap=jsx.GapMode.OK) as pub:
        await pub.add_many(("s.a", b"x") for _ in range(30))
    assert [(gap.first_lost, gap.seq) for gap in pub.gaps] == [(5, 7)]
    assert (pub.ack.batch_size, (await js.stream_info("S")).state.messages) == (30, 28)
    await js.purge_stream("S")
    draft.faults.add(Lose("s.>", nth=5))
    with pytest.raises(jsx.errors.BatchGapError) as caught:
        async with jsx.FastPublisher(js, flow=10, gap=jsx.GapMode.FAIL) as pub:
            await pub.add_many(("s.a", b"x") for _ in range(30))
    assert (caught.value.first_lost, caught.value.last_lost) == (5, 5)
    assert caught.value.ack is not None
    assert caught.value.ack.batch_size == (await js.stream_info("S")).state.messages == 4


async def publish(js: Any, gap: jsx.GapMode, refused: int) -> jsx.FastPublisher:
    """Publish 29 messages, one of which has an expectation that is wrong."""
    async with jsx.FastPublisher(js, flow=10, gap=gap) as pub:
        for index in range(1, 30):
            await pub.add("s.a", b"x", expected_last_seq=99 if index == refused else None)
    return pub


async def test_refused_message_is_reported_or_ends_the_batch(js: Any) -> None:
    await js.add_stream(**CONFIG, allow_batched=True)
    for refused in (1, 2, 8):
        with pytest.raises(WrongLastSequenceError):
            await publish(js, jsx.GapMode.FAIL, refused)
        assert (await js.stream_info("S")).state.messages == refused - 1, refused
        await js.purge_stream("S")
    for refused in (2, 8):
        pub = await publish(js, jsx.GapMode.OK, refused)
        assert [each.seq for each in pub.errors] == [refused]
        assert (await js.stream_info("S")).state.messages == 28
        await js.purge_stream("S")


async def test_direct_get_finds_the_messages(js: Any) -> None:
    await js.add_stream(**CONFIG)
    for index in range(9):
        await js.publish(f"s.{'abc'[index % 3]}", str(index).encode())
    direct = jsx.DirectGet(js, "S")
    first = await direct.get(1)
    assert (first.data, first.time.year) == (b"0", 2027)
    assert (await direct.get_last("s.b")).seq == 8
    assert (await direct.get_next("s.c", seq=4)).seq == 6
    assert (await direct.get_at(first.time)).seq == 1
    assert [each.seq for each in await direct.batch(5, subject="s.>").to_list()] == [1, 2, 3, 4, 5]
    assert [each.seq for each in await direct.batch(5).to_list()] == [1, 2, 3, 4, 5]
    assert [each.seq for each in await direct.batch(5, subject="s.a", start_time=first.time).to_list()] == [1, 4, 7]
    assert [each.seq for each in await direct.multi_last(["s.a", "s.b"]).to_list()] == [7, 8]
    assert [each.seq for each in await direct.multi_last(["s.*"], up_to_seq=5).to_list()] == [3, 4, 5]
    assert len(await direct.scan(batch=2).to_list()) == 9
    assert len(await direct.scan(subject="s.a", batch=2, confirm=True).to_list()) == 3


async def test_key_value_transaction_and_ttl(js: Any, clock: VirtualClock) -> None:
    kv = await kvx.enable(await js.create_key_value(bucket="B", history=5), direct=True, atomic=True, ttl=20)
    async with kvx.transaction(kv) as tx:
        tx.put("a", b"1")
        tx.put("b", b"2", ttl=30)
    assert {key: entry.value for key, entry in (await kvx.snapshot(kv)).items()} == {"a": b"1", "b": b"2"}
    clock.advance(30)
    assert (await kvx.get_many(kv, ["a", "b"])).keys() == {"a"}
    shown = await kvx.snapshot(kv, ["b"], include_deletes=True)
    assert shown["b"].reason == "MaxAge"
