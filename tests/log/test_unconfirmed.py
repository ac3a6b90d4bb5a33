"""Readers with ``confirm=False`` trust whichever responder answers and ask no leader."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import BatchMessage, errors
from jetstream_ext.log import (
    First,
    Last,
    LogReader,
    New,
    OffsetStore,
    Seq,
    Stored,
    StoredOffset,
    Time,
    exactly_once,
)
from jetstream_ext.testing import ReferenceServer, Unavailable

Make = Callable[..., Awaitable[str]]
More = Callable[[str, int, int], Awaitable[None]]
MakeStore = Callable[..., Awaitable[OffsetStore]]


async def seqs(reader: LogReader) -> list[int]:
    return [message.seq async for message in reader]


async def test_it_reads_to_the_end_and_continues_there(
    js: JetStreamContext, make_stream: Make, more: More, wire: Any
) -> None:
    for subject in (None, "1"):
        name = await make_stream(5000)
        await js.delete_msg(name, 4)
        reader = LogReader(wire.js, name, confirm=False, subject=subject and f"{name}.{subject}")
        wanted = [n for n in range(1, 5011) if n != 4 and (subject is None or n % 3 == 1)]
        assert await reader.open() == 1
        assert await seqs(reader) == [n for n in wanted if n <= 5000]
        assert reader.position == max(n for n in wanted if n <= 5000) + 1
        await more(name, 5001, 5010)
        assert await seqs(reader) == [n for n in wanted if n > 5000]
        assert reader.created is None
        assert await reader.lag() == 0
    assert set(wire.requests) == {"DIRECT.GET"}, "no request is for a leader"


STARTS: dict[str, tuple[Callable[[datetime], Any], str | None, int]] = {
    "the oldest": (lambda _: First(), None, 1),
    "a sequence": (lambda _: Seq(7), None, 7),
    "a time": (lambda half: Time(half), None, 11),
    "a time before the first message": (lambda half: Time(half - timedelta(hours=1)), None, 1),
    "a time in the future": (lambda half: Time(half + timedelta(hours=1)), None, 21),
    "a time, filtered": (lambda half: Time(half), "1", 13),
    "the last": (lambda _: Last(), None, 20),
    "the last, filtered": (lambda _: Last(), "1", 19),
    "the last of a subject without messages": (lambda _: Last(), "9", 21),
    "the next": (lambda _: New(), None, 21),
    "the next, filtered": (lambda _: New(), "1", 21),
}


async def test_every_start_is_found_by_direct_gets(
    js: JetStreamContext, make_stream: Make, more: More, wire: Any
) -> None:
    name = await make_stream(10)
    half = (await jsx.DirectGet(js, name).get(10)).time + timedelta(microseconds=1)
    await more(name, 11, 20)
    for kind, (start, subject, position) in STARTS.items():
        reader = LogReader(wire.js, name, start=start(half), subject=subject and f"{name}.{subject}", confirm=False)
        assert await reader.open() == position, kind
    assert set(wire.requests) == {"DIRECT.GET"}, "no request is for a leader"


async def test_starts_are_found_where_messages_were_removed(
    js: JetStreamContext, make_stream: Make, more: More
) -> None:
    name = await make_stream(20)
    for seq in (18, 19, 20):
        await js.delete_msg(name, seq)
    for start, position in ((Last(), 17), (New(), 18)):
        assert await LogReader(js, name, start=start, confirm=False).open() == position
    await js.purge_stream(name)
    starts = (First(), Time(datetime.now(UTC)), Last(), New())
    readers = [LogReader(js, name, start=start, confirm=False) for start in starts]
    assert [await reader.open() for reader in readers] == [1] * 4
    behind = LogReader(js, name, start=Seq(1), confirm=False)
    await more(name, 21, 22)
    assert [await seqs(reader) for reader in (*readers, behind)] == [[21, 22]] * 5


async def test_it_waits_for_messages_and_needs_direct_gets(js: JetStreamContext, make_stream: Make, more: More) -> None:
    name = await make_stream()
    reader = LogReader(js, name, tail=True, confirm=False, poll=0.02)
    assert await reader.read(timeout=0) == []
    await more(name, 1, 1)
    assert (await anext(reader)).seq == 1
    with pytest.raises(errors.DirectGetDisabledError):
        await LogReader(js, await make_stream(5, allow_direct=False), confirm=False, tail=True).read()


async def test_positions_are_stored_without_the_time_of_creation_unless_it_is_known(
    js: JetStreamContext, make_stream: Make, make_store: MakeStore
) -> None:
    name, offsets = await make_stream(10), await make_store()
    reader = LogReader(js, name, start=Stored("r"), offsets=offsets, confirm=False)
    await reader.read(4)
    stored = await offsets.commit(reader)
    assert (stored.seq, stored.created) == (5, "")
    assert await seqs(LogReader(js, name, start=Stored("r"), offsets=offsets, confirm=False)) == list(range(5, 11))
    with pytest.raises(ValueError, match="belongs to stream"):
        await LogReader(js, "OTHER", start=Stored("r"), offsets=offsets, confirm=False).open()
    reader.seek(StoredOffset("r", name, "2026-01-01T00:00:00Z", 3))
    assert await reader.open() == 3
    assert (await offsets.commit(reader, name="r")).created == "2026-01-01T00:00:00Z"


async def test_a_worker_may_trust_its_responder(js: JetStreamContext, make_stream: Make, more: More) -> None:
    source, target = await make_stream(10), await make_stream()

    async def work() -> int:
        done = await exactly_once(
            LogReader(js, source, confirm=False),
            target,
            lambda message: BatchMessage(f"{target}.out", message.data),
            name="w",
            prefix=f"{target}.at",
        )
        return done.inputs

    assert await work() == 10
    await more(source, 11, 13)
    assert await work() == 3
    assert (await js.stream_info(target, subjects_filter=f"{target}.out")).state.subjects == {f"{target}.out": 13}


async def test_no_start_needs_the_leader() -> None:
    """It does not answer; the stream has three messages."""
    async with ReferenceServer() as server:
        nc = await nats.connect(server.url, connect_timeout=10)
        js = nc.jetstream(timeout=30)
        await js.add_stream(name="S", subjects=["s.>"], allow_direct=True)
        for n in range(3):
            await js.publish("s.a", b"%d" % n)
        for request in ("$JS.API.STREAM.INFO.S", "$JS.API.STREAM.MSG.GET.S"):
            server.faults.add(Unavailable(request, times=None))
        for start, first in ((First(), 1), (Time(datetime(2000, 1, 1, tzinfo=UTC)), 1), (Last(), 3), (New(), 4)):
            reader = LogReader(js, "S", start=start, confirm=False, patience=0.5)
            assert await seqs(reader) == list(range(first, 4)), start
        await nc.close()
