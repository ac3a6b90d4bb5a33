"""Ranges that end at a time, on every server that has batches: `scan`, `batch` and Arrow with `up_to_time`."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from client_cells import named, seqs
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import arrow, errors
from jetstream_ext.testing import NatsServer

VERSIONS = ["2.11.0", "2.11.11", "2.12.8", "2.15.1"]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
FAR = datetime(9999, 12, 31, tzinfo=UTC)

Make = Callable[..., Awaitable[str]]


@pytest.fixture(scope="module", params=VERSIONS)
def server(request: pytest.FixtureRequest) -> Iterator[NatsServer]:
    with NatsServer(version=request.param) as server:
        yield server


def nanoseconds(when: datetime) -> int:
    return (when - EPOCH) // MICROSECOND * 1000


async def everything(js: JetStreamContext, stream: str) -> list[jsx.StoredMsg]:
    return await jsx.DirectGet(js, stream).scan(confirm=True).to_list()


def until(messages: list[jsx.StoredMsg], when: datetime) -> list[int]:
    """Return the sequences before the first message that was stored after the microsecond `when`."""
    return [each.seq for each in itertools.takewhile(lambda each: each.time_ns < nanoseconds(when) + 1000, messages)]


def instants(*times: datetime) -> list[datetime]:
    """Return the times just around those given, and others that precede and follow every message."""
    around = [time + step * MICROSECOND for time in times for step in (-1, 0, 1)]
    return [*around, datetime(1970, 1, 2, tzinfo=UTC), min(times) - timedelta(days=1), max(times) + timedelta(days=1)]


async def check(js: JetStreamContext, stream: str, *removed: datetime) -> None:
    """Compare reads up to many instants with the messages that the stream has; `removed` are times of others."""
    messages = await everything(js, stream)
    direct = jsx.DirectGet(js, stream)
    for when in instants(*(message.time for message in messages), *removed):
        expected = until(messages, when)
        with named(when=when, after=len(expected)):
            assert await seqs(direct.scan(up_to_time=when)) == expected
            assert await seqs(direct.scan(up_to_time=when, batch=4, prefetch=4)) == expected
            assert await seqs(direct.scan(up_to_time=when, confirm=True)) == expected
            assert await seqs(direct.batch(1000, up_to_time=when)) == expected
            assert await seqs(direct.batch(3, up_to_time=when)) == expected[:3]


async def fill(js: JetStreamContext, stream: str, count: int, first: int = 1) -> None:
    for n in range(first, first + count):
        await js.publish(f"{stream}.{n % 3}", b"%d" % n)


async def test_a_message_that_was_stored_exactly_then_is_in_the_range(js: JetStreamContext, make: Make) -> None:
    """Stored times have nanoseconds; one message of a thousand has a whole number of microseconds."""
    name = await make()
    messages: list[jsx.StoredMsg] = []
    exact: list[jsx.StoredMsg] = []
    while not exact:
        pending = [asyncio.ensure_future(js.publish(f"{name}.a")) for _ in range(2000)]
        await asyncio.gather(*pending)
        messages = await everything(js, name)
        exact = [message for message in messages if message.time_ns % 1000 == 0]
    direct = jsx.DirectGet(js, name)
    for message in exact[:5]:
        assert nanoseconds(message.time) == message.time_ns
        expected = until(messages, message.time)
        assert message.seq in expected
        assert await seqs(direct.scan(up_to_time=message.time)) == expected
        assert await seqs(direct.scan(up_to_time=message.time, confirm=True)) == expected
        assert message.seq not in await seqs(direct.scan(up_to_time=message.time - MICROSECOND))


async def test_removed_messages_do_not_move_the_end(js: JetStreamContext, make: Make) -> None:
    """Neither single ones, nor the first, nor the last ones, nor many in a row."""
    for storage in ("file", "memory"):
        for gone in ([], [1, 2, 12, 13], [4, 5, 6, 7, 8], [2, 4, 6, 8, 10, 12]):
            with named(storage=storage, gone=gone):
                name = await make(storage=storage)
                await fill(js, name, 13)
                removed = [each.time for each in await everything(js, name) if each.seq in gone]
                for seq in gone:
                    await js.delete_msg(name, seq)
                await check(js, name, *removed)
    before = [each.time for each in await everything(js, name)]
    await js.purge_stream(name, subject=f"{name}.1")
    await js.purge_stream(name, seq=6)
    await check(js, name, *before)


async def test_compaction_does_not_move_the_end(js: JetStreamContext, make: Make) -> None:
    name = await make(max_msgs_per_subject=2)
    times: list[datetime] = []
    for n in range(20):
        await js.publish(f"{name}.{(0, 1, 0, 2, 0)[n % 5]}.{n % 2}")
        times.append((await everything(js, name))[-1].time)
    assert len(await everything(js, name)) < 20
    await check(js, name, *times)


async def test_expired_messages_do_not_move_the_end(js: JetStreamContext, make: Make) -> None:
    name = await make(allow_msg_ttl=True)
    expiring = {1, 4, 5, 6, 9, 12}
    for n in range(1, 13):
        await js.publish(f"{name}.{n % 3}", headers={"Nats-TTL": "1s"} if n in expiring else None)
    removed = [each.time for each in await everything(js, name) if each.seq in expiring]
    async with asyncio.timeout(60):
        while (await js.stream_info(name)).state.messages > 12 - len(expiring):
            await asyncio.sleep(0.05)
    await check(js, name, *removed)


async def test_a_range_before_or_after_every_message(js: JetStreamContext, make: Make) -> None:
    """Servers count nanoseconds in 64 bits, which overflow in 2262."""
    name, now = await make(), datetime.now(UTC)
    direct = jsx.DirectGet(js, name)
    every: list[int] = []
    for _ in range(2):
        for when in (datetime(2020, 1, 1, tzinfo=UTC), EPOCH, now - timedelta(hours=1)):
            with named(when=when, every=every):
                for options in ({}, {"confirm": True}, {"subject": f"{name}.1"}):
                    assert await seqs(direct.scan(up_to_time=when, **options)) == []
                assert await seqs(direct.batch(9, up_to_time=when)) == []
        for when in (now + timedelta(days=1), datetime(2300, 1, 1, tzinfo=UTC), FAR - timedelta(days=1)):
            with named(when=when, every=every):
                for options in ({}, {"confirm": True}, {"min_seq": 3} if every else {}):
                    assert await seqs(direct.scan(up_to_time=when, **options)) == every
                    assert await seqs(direct.scan(start_time=when, **options)) == []
                    assert await seqs(direct.scan(start_time=when, up_to_time=FAR, up_to_seq=2, **options)) == []
                assert await seqs(direct.batch(9, up_to_time=when)) == every
                assert await seqs(direct.batch(9, start_time=when)) == []
                for min_seq in (None, 3) if every else ():
                    with pytest.raises(errors.MessageNotFoundError):
                        await direct.get_at(when, min_seq=min_seq)
        await fill(js, name, 3)
        every = [1, 2, 3]


async def test_other_limits_apply_as_well(js: JetStreamContext, make: Make) -> None:
    """A range begins at a sequence or a time, and ends at the limit that comes first."""
    name = await make()
    await fill(js, name, 12)
    await js.delete_msg(name, 8)
    messages = await everything(js, name)
    times = {each.seq: each.time + MICROSECOND for each in messages}  # after the message and, here, before the next one
    assert all(later.time > times[each.seq] for each, later in itertools.pairwise(messages))
    direct = jsx.DirectGet(js, name)
    for confirm in (False, True):
        with named(confirm=confirm):

            def read(confirm: bool = confirm, **options: Any) -> Awaitable[list[int]]:
                return seqs(direct.scan(confirm=confirm, **options))

            assert await read(start_time=times[3], up_to_time=times[9]) == [4, 5, 6, 7, 9]
            assert await read(start_time=times[7], up_to_time=times[7]) == []
            assert await read(start_time=times[9], up_to_time=times[3]) == []
            assert await read(seq=4, up_to_time=times[6]) == [4, 5, 6]
            assert await read(seq=4, up_to_time=times[6].astimezone(timezone(timedelta(hours=-11)))) == [4, 5, 6]
            assert await read(seq=7, up_to_time=times[6]) == []
            assert await read(up_to_seq=4, up_to_time=times[9]) == [1, 2, 3, 4]
            assert await read(up_to_seq=9, up_to_time=times[4]) == [1, 2, 3, 4]
            assert await read(up_to_seq=8, up_to_time=times[7]) == [1, 2, 3, 4, 5, 6, 7]
            assert await read(up_to_seq=100, up_to_time=times[2]) == [1, 2]
            assert await read(up_to_time=times[9], min_seq=12) == [1, 2, 3, 4, 5, 6, 7, 9]
            assert await read(subject=f"{name}.1", up_to_time=times[9]) == [1, 4, 7]
            assert await read(subject=f"{name}.1", up_to_time=times[12]) == [1, 4, 7, 10]
            assert await read(subject=f"{name}.none", up_to_time=times[12]) == []
    assert await seqs(direct.batch(3, start_time=times[3], up_to_time=times[9])) == [4, 5, 6]
    assert await seqs(direct.batch(9, start_time=times[3], up_to_time=times[5])) == [4, 5]
    assert await seqs(direct.batch(9, start_time=times[9], up_to_time=times[3])) == []
    assert await seqs(direct.batch(9, seq=4, subject=f"{name}.1", up_to_time=times[9], min_seq=12)) == [4, 7]


async def test_arrow_reads_the_same_range(js: JetStreamContext, make: Make) -> None:
    name = await make()
    await fill(js, name, 9)
    messages = await everything(js, name)
    for when in instants(messages[4].time):
        with named(when=when):
            tables = [await arrow.to_arrow(js, name, up_to_time=when, confirm=confirm) for confirm in (False, True)]
            async with arrow.RecordBatchReader(js, name, up_to_time=when, batch_rows=2) as reader:
                tables.append(await asyncio.to_thread(reader.read_all))
            for table in tables:
                assert table.column("seq").to_pylist() == until(messages, when)
    both = await arrow.to_arrow(js, name, start_time=messages[2].time, up_to_time=messages[5].time + MICROSECOND)
    assert both.column("seq").to_pylist() == [3, 4, 5, 6]
