"""Ranges that end at a time, on every server that has batches: `scan`, `batch` and Arrow with `up_to_time`."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import nats
import pytest
from client_cells import named
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import StreamConfig, StreamSource

import jetstream_ext as jsx
from jetstream_ext import arrow, errors
from jetstream_ext.testing import NatsServer

VERSIONS = ["2.11.0", "2.11.11", "2.12.8", "2.15.1"]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
FAR = datetime(9999, 12, 31, tzinfo=UTC)
CONFIG = """
accounts { A {
  jetstream: enabled
  users: [
    { user: all, password: p }
    { user: reader, password: p, permissions: { publish: ["$JS.API.DIRECT.GET.*"], subscribe: ["_INBOX.>"] } }
  ]
} }
no_auth_user: all
"""

Make = Callable[..., Awaitable[str]]


@pytest.fixture(scope="module", params=VERSIONS)
def server(request: pytest.FixtureRequest) -> Iterator[NatsServer]:
    with NatsServer(version=request.param, config=CONFIG) as server:
        yield server


def nanoseconds(when: datetime) -> int:
    return (when - EPOCH) // MICROSECOND * 1000


async def seqs(batch: jsx.MessageBatch) -> list[int]:
    return [message.seq for message in await batch.to_list()]


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


async def test_a_range_ends_before_the_first_later_message(js: JetStreamContext, make: Make) -> None:
    for storage in ("file", "memory"):
        with named(storage=storage):
            name = await make(storage=storage)
            await fill(js, name, 15)
            await check(js, name)


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


async def test_deleted_messages_do_not_move_the_end(js: JetStreamContext, make: Make) -> None:
    """Neither single ones, nor the first, nor the last ones, nor many in a row."""
    for storage in ("file", "memory"):
        for gone in ([5], [1, 2], [12, 13], [4, 5, 6, 7, 8], [2, 4, 6, 8, 10, 12], [1, 2, 3, 6, 7, 11, 13]):
            with named(storage=storage, gone=gone):
                name = await make(storage=storage)
                await fill(js, name, 13)
                removed = [each.time for each in await everything(js, name) if each.seq in gone]
                for seq in gone:
                    await js.delete_msg(name, seq)
                await check(js, name, *removed)


async def test_purged_messages_do_not_move_the_end(js: JetStreamContext, make: Make) -> None:
    name = await make()
    await fill(js, name, 12)
    before = [each.time for each in await everything(js, name)]
    await js.purge_stream(name, subject=f"{name}.1")
    await check(js, name, *before)
    await js.purge_stream(name, seq=6)
    await check(js, name, *before)


async def test_compaction_does_not_move_the_end(js: JetStreamContext, make: Make) -> None:
    for history in (1, 2):
        with named(history=history):
            name = await make(max_msgs_per_subject=history)
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


async def test_a_range_that_has_no_message_is_empty(js: JetStreamContext, make: Make) -> None:
    name, past = await make(), datetime(2020, 1, 1, tzinfo=UTC)
    direct = jsx.DirectGet(js, name)
    for filled in (False, True):
        for when in (past, EPOCH, datetime.now(UTC) - timedelta(hours=1)):
            with named(filled=filled, when=when):
                assert await seqs(direct.scan(up_to_time=when)) == []
                assert await seqs(direct.scan(up_to_time=when, confirm=True)) == []
                assert await seqs(direct.batch(9, up_to_time=when)) == []
                assert await seqs(direct.scan(subject=f"{name}.1", up_to_time=when)) == []
        await fill(js, name, 3)


async def test_a_range_ends_with_the_stream_if_nothing_was_stored_later(js: JetStreamContext, make: Make) -> None:
    name = await make()
    direct = jsx.DirectGet(js, name)
    assert await seqs(direct.scan(up_to_time=FAR)) == []
    await fill(js, name, 5)
    for when in (datetime.now(UTC) + timedelta(hours=1), datetime(2300, 1, 1, tzinfo=UTC), FAR):
        with named(when=when):
            assert await seqs(direct.scan(up_to_time=when)) == [1, 2, 3, 4, 5]
            assert await seqs(direct.scan(up_to_time=when, confirm=True)) == [1, 2, 3, 4, 5]
            assert await seqs(direct.scan(up_to_time=when, min_seq=5)) == [1, 2, 3, 4, 5]
            assert await seqs(direct.batch(9, up_to_time=when)) == [1, 2, 3, 4, 5]


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


async def test_a_range_that_begins_in_a_distant_future_is_empty(js: JetStreamContext, make: Make) -> None:
    """Servers count nanoseconds in 64 bits, which overflow in 2262."""
    name = await make()
    await fill(js, name, 3)
    direct = jsx.DirectGet(js, name)
    for when in (datetime.now(UTC) + timedelta(days=1), datetime(2300, 1, 1, tzinfo=UTC), FAR - timedelta(days=1)):
        with named(when=when):
            assert await seqs(direct.scan(start_time=when, up_to_time=FAR)) == []
            assert await seqs(direct.scan(start_time=when)) == []
            for options in ({"up_to_seq": 2}, {"min_seq": 3}, {"up_to_seq": 2, "min_seq": 3}, {"confirm": True}):
                assert await seqs(direct.scan(start_time=when, **options)) == []
            assert await seqs(direct.batch(9, start_time=when)) == []
            for min_seq in (None, 3):
                with pytest.raises(errors.MessageNotFoundError):
                    await direct.get_at(when, min_seq=min_seq)


async def test_the_zone_of_the_time_does_not_matter(js: JetStreamContext, make: Make) -> None:
    name = await make()
    await fill(js, name, 4)
    when = (await everything(js, name))[1].time + MICROSECOND
    for hours in (-11, 0, 5.5, 13):
        assert await seqs(
            jsx.DirectGet(js, name).scan(up_to_time=when.astimezone(timezone(timedelta(hours=hours))))
        ) == [1, 2]


async def test_messages_stored_during_the_read_are_not_in_a_range_that_is_over(
    js: JetStreamContext, make: Make
) -> None:
    name = await make()
    await fill(js, name, 10)
    when = (await everything(js, name))[-1].time + MICROSECOND
    for confirm in (False, True):
        async with jsx.DirectGet(js, name).scan(up_to_time=when, batch=2, prefetch=1, confirm=confirm) as messages:
            found = [(await anext(messages)).seq]
            await fill(js, name, 20)
            assert found + [message.seq async for message in messages] == list(range(1, 11))


async def test_arrow_reads_the_same_range(js: JetStreamContext, make: Make) -> None:
    name = await make()
    await fill(js, name, 9)
    messages = await everything(js, name)
    for when in instants(*(message.time for message in messages[3:5])):
        expected = until(messages, when)
        with named(when=when):
            for confirm in (False, True):
                table = await arrow.to_arrow(js, name, up_to_time=when, confirm=confirm)
                assert table.column("seq").to_pylist() == expected
            parts = [part async for part in arrow.record_batches(js, name, up_to_time=when, batch_rows=2)]
            assert [seq for part in parts for seq in part.column("seq").to_pylist()] == expected
            async with arrow.RecordBatchReader(js, name, up_to_time=when) as reader:
                whole = await asyncio.to_thread(reader.read_all)
            assert whole.column("seq").to_pylist() == expected
    both = await arrow.to_arrow(js, name, start_time=messages[2].time, up_to_time=messages[5].time + MICROSECOND)
    assert both.column("seq").to_pylist() == [3, 4, 5, 6]


async def test_a_time_without_zone_is_refused_at_the_call(js: JetStreamContext) -> None:
    direct, naive = jsx.DirectGet(js, "S"), datetime(2026, 1, 1)  # noqa: DTZ001
    for call in (
        lambda **end: direct.scan(**end),
        lambda **end: direct.scan(confirm=True, **end),
        lambda **end: direct.batch(9, **end),
        lambda **end: arrow.record_batches(js, "S", **end),
    ):
        with pytest.raises(ValueError, match=r"up_to_time.*timezone-aware"):
            call(up_to_time=naive)
        for bad in ("2026-01-01T00:00:00Z", 0, 1.5):
            with pytest.raises(TypeError, match="up_to_time"):
                call(up_to_time=bad)
    with pytest.raises(ValueError, match=r"up_to_time.*timezone-aware"):
        await arrow.to_arrow(js, "S", up_to_time=naive)


@pytest.fixture
async def reader_js(server: NatsServer) -> AsyncIterator[JetStreamContext]:
    """A context of a client that may only ask for direct gets; a refused request would end at its timeout."""
    refusals: list[Exception] = []

    async def note(error: Exception) -> None:
        refusals.append(error)

    nc = await nats.connect(server.url, user="reader", password="p", connect_timeout=10, error_cb=note)
    yield nc.jetstream(timeout=10)
    await nc.flush()
    await nc.close()
    assert refusals == []


async def test_permission_for_direct_gets_is_enough(
    js: JetStreamContext, reader_js: JetStreamContext, make: Make
) -> None:
    name = await make()
    await fill(js, name, 6)
    messages = await everything(js, name)
    when = messages[3].time + MICROSECOND
    direct = jsx.DirectGet(reader_js, name)
    for end, expected in ((when, [1, 2, 3, 4]), (EPOCH, []), (FAR, [1, 2, 3, 4, 5, 6])):
        with named(end=end):
            assert await seqs(direct.scan(up_to_time=end)) == expected
            assert await seqs(direct.batch(9, up_to_time=end)) == expected
            assert (await arrow.to_arrow(reader_js, name, up_to_time=end)).column("seq").to_pylist() == expected


async def test_a_confirmed_range_is_complete_beside_partial_mirrors(
    nc: Client, js: JetStreamContext, make: Make
) -> None:
    """Also where the last message of the range, or the first one after it, is missing from the mirrors."""
    name = await make()
    await fill(js, name, 30)
    for number in (0, 1):
        source = StreamSource(name=name, filter_subject=f"{name}.{number}")
        await js.add_stream(StreamConfig(name=f"{name}_{number}", mirror=source, mirror_direct=True))
        async with asyncio.timeout(60):
            while (await js.stream_info(f"{name}_{number}")).state.messages < 10:
                await asyncio.sleep(0.01)
    messages = await everything(js, name)
    assert len(messages) == 30
    for message in messages[3:9]:
        for when in (message.time, message.time + MICROSECOND):
            with named(seq=message.seq, when=when):
                for _ in range(4):
                    scan = jsx.DirectGet(js, name).scan(up_to_time=when, confirm=True)
                    assert await seqs(scan) == until(messages, when)


async def test_a_server_without_batches_says_so() -> None:
    async with NatsServer(version="2.10.26") as server, await nats.connect(server.url, connect_timeout=10) as nc:
        js = nc.jetstream(timeout=10)
        await js.add_stream(name="S", subjects=["s.>"], allow_direct=True)
        await js.publish("s.a")
        for when in (EPOCH, FAR):
            with pytest.raises(errors.UnsupportedFeatureError, match=r"2\.11"):
                await jsx.DirectGet(js, "S").scan(up_to_time=when).to_list()
            with pytest.raises(errors.UnsupportedFeatureError, match=r"2\.11"):
                await jsx.DirectGet(js, "S").batch(9, up_to_time=when).to_list()
