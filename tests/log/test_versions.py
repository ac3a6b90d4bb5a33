"""The log on every server line that supports it."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.log import First, Last, LogReader, New, OffsetStore, Seq, Stored, Time, exactly_once
from jetstream_ext.testing import NatsServer

READS = ["2.11.0", "2.11.11", "2.12.8", "2.14.6", "2.15.1"]
WORKS = ["2.12.1", "2.12.8", "2.14.0", "2.14.6", "2.15.1"]


@pytest.fixture(scope="module", params=sorted({*READS, *WORKS}))
def line(request: pytest.FixtureRequest) -> Iterator[NatsServer]:
    """A server of each version, which its tests share."""
    with NatsServer(version=request.param) as server:
        yield server


@pytest.fixture
async def js(line: NatsServer) -> AsyncIterator[JetStreamContext]:
    async with await nats.connect(line.url, connect_timeout=10) as nc:
        js = nc.jetstream(timeout=30)
        yield js
        for stream in await js.streams_info():
            await js.delete_stream(stream.config.name)


async def fill(js: JetStreamContext, first: int, last: int, prefix: str = "s") -> None:
    for n in range(first, last + 1):
        await js.publish(f"{prefix}.{n % 3}", b"%d" % n)


@pytest.mark.parametrize("line", READS, indirect=True)
async def test_every_server_line_can_be_read(js: JetStreamContext) -> None:
    await js.add_stream(name="S", subjects=["s.*"], allow_direct=True)
    await fill(js, 1, 30)
    for seq in (4, 5, 6, 20, 30):
        await js.delete_msg("S", seq)
    there = [n for n in range(1, 30) if n not in (4, 5, 6, 20)]
    middle = (await js.get_msg("S", 12, direct=True)).time
    assert middle is not None
    store = await OffsetStore(js).create()

    async def seqs(**options: Any) -> list[int]:
        return [msg.seq async for msg in LogReader(js, "S", **options)]

    last = 30
    for confirm in (True, False):
        assert await seqs(confirm=confirm, start=First()) == there
        assert await seqs(confirm=confirm, subject="s.1") == [n for n in there if n % 3 == 1]
        assert await seqs(confirm=confirm, start=Seq(5)) == there[3:]
        assert await seqs(confirm=confirm, start=Last()) == there[-1:]
        assert await seqs(confirm=confirm, start=Last(), subject="s.1") == [n for n in there if n % 3 == 1][-1:]
        assert await seqs(confirm=confirm, start=New()) == []
        found = await seqs(confirm=confirm, start=Time(middle))
        assert found in ([n for n in there if n >= 12], [n for n in there if n >= 11])
        assert await seqs(confirm=confirm, start=Time(datetime(2099, 1, 1, tzinfo=UTC))) == []
        reader = LogReader(js, "S", tail=True, confirm=confirm)
        assert len(await reader.read(100)) == len(there)
        await fill(js, last + 1, last + 3)
        there += [last + 1, last + 2, last + 3]
        last += 3
        assert [msg.seq for msg in await reader.read()] == there[-3:]
        reader = LogReader(js, "S", start=Stored(f"r{confirm}"), offsets=store, confirm=confirm)
        async with store.committing(reader, every=5) as messages:
            assert [msg.seq async for msg in messages] == there
        assert await LogReader(js, "S", start=Stored(f"r{confirm}"), offsets=store).open() == last + 1
    await js.purge_stream("S", seq=10)
    with pytest.raises(errors.PositionLostError):
        await seqs(start=Seq(3))
    assert (await seqs(start=Seq(3), confirm=False))[0] == 10


@pytest.mark.parametrize("line", READS, indirect=True)
async def test_a_time_is_found_where_messages_were_removed(js: JetStreamContext) -> None:
    # Servers before 2.12 may answer a request with `start_time` with a later message, or none.
    await js.add_stream(name="S", subjects=["s.*"], allow_direct=True, max_msgs_per_subject=1)
    for subject in ("a", "b", "c", *"d" * 40):
        await js.publish(f"s.{subject}", b"")
    there = await jsx.DirectGet(js, "S").scan().to_list()
    for confirm in (True, False):
        for number, message in enumerate(there):
            found = [msg.seq async for msg in LogReader(js, "S", start=Time(message.time), confirm=confirm)]
            assert found == [one.seq for one in there[number:]], confirm


@pytest.mark.parametrize("line", ["2.11.11", "2.15.1"], indirect=True)
async def test_a_time_in_the_future_is_waited_for(js: JetStreamContext) -> None:
    cases = list(itertools.product((True, False), (3, 0)))
    for number, (_, stored) in enumerate(cases):
        await js.add_stream(name=f"S{number}", subjects=[f"s{number}.*"], allow_direct=True)
        await fill(js, 1, stored, f"s{number}")
    when = datetime.now(UTC) + timedelta(seconds=0.4)
    readers = [LogReader(js, f"S{n}", start=Time(when), confirm=confirm) for n, (confirm, _) in enumerate(cases)]
    found: list[list[int]] = []
    for number, (reader, (_, stored)) in enumerate(zip(readers, cases, strict=True)):
        await reader.open()
        await fill(js, stored + 1, 6, f"s{number}")
        found.append([message.seq for message in await reader.read()])
    while datetime.now(UTC) <= when:
        await asyncio.sleep(0.05)
    for number, (reader, case) in enumerate(zip(readers, cases, strict=True)):
        await fill(js, 7, 8, f"s{number}")
        found[number] += [message.seq async for message in reader]
        everything = await jsx.DirectGet(js, f"S{number}").scan().to_list()
        assert found[number] == [message.seq for message in everything if message.time >= when], case
        assert found[number][-2:] == [7, 8]


@pytest.mark.parametrize("line", READS, indirect=True)
async def test_every_server_line_tells_a_purge_from_compaction(js: JetStreamContext) -> None:
    await js.add_stream(name="S", subjects=["s.*"], allow_direct=True, max_msgs_per_subject=1)
    await fill(js, 1, 5)
    reader = LogReader(js, "S", start=Seq(1))
    assert [msg.seq for msg in await reader.read(2)] == [3, 4]
    reader.seek(4)
    await fill(js, 6, 8)
    assert [msg.seq for msg in await reader.read()] == [6, 7, 8]
    reader.seek(7)
    await js.purge_stream("S", seq=8)
    with pytest.raises(errors.PositionLostError):
        await reader.read()


@pytest.mark.parametrize("line", WORKS, indirect=True)
async def test_every_server_line_runs_a_worker(js: JetStreamContext) -> None:
    await js.add_stream(name="S", subjects=["s.*"], allow_direct=True)
    await js.add_stream(
        name="T",
        subjects=["t.>"],
        allow_direct=True,
        allow_atomic=True,
        allow_msg_ttl=True,
        allow_rollup_hdrs=True,
        max_age=3600,
    )
    await fill(js, 1, 40)
    second: list[Any] = []

    async def work(*, zombie: bool = False, standby: bool = False) -> Any:
        async def handle(msg: jsx.StoredMsg) -> list[jsx.BatchMessage]:
            if zombie and msg.seq == 25:
                second.append(await work())
            return [jsx.BatchMessage("t.out", msg.data)] * (msg.seq % 3)

        return await exactly_once(
            LogReader(js, "S"), "T", handle, name="w", prefix="t.at", max_messages=10, standby=standby
        )

    with pytest.raises(errors.FencedError):
        await work(zombie=True)
    assert [done.inputs for done in second] == [20]
    assert (await work()).inputs == 0
    assert [done.inputs for done in await asyncio.gather(work(standby=True), work(standby=True))] == [0, 0]
    out = [int(msg.data) async for msg in LogReader(js, "T", subject="t.out")]
    assert out == [n for n in range(1, 41) for _ in range(n % 3)]
    positions = [msg async for msg in LogReader(js, "T", subject="t.at.w")]
    assert len(positions) == 1, "each position replaces the one before"
    assert positions[0].headers["Nats-TTL"] == "never"
