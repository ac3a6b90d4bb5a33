"""Messages removed before they were read, and recreated streams: the reader reports both."""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import nats.errors
import nats.js.errors
import pytest
from clients import connected
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, RetentionPolicy, StreamConfig

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.client import api
from jetstream_ext.log import First, Last, LogReader, New, OffsetStore, Seq, Stored, Time, reading
from jetstream_ext.testing import NatsServer

Make = Callable[..., Awaitable[str]]
More = Callable[[str, int, int], Awaitable[None]]


async def numbers(reader: LogReader) -> list[int]:
    return [int(msg.data) async for msg in reader]


async def seqs(reading: Awaitable[list[jsx.StoredMsg]]) -> list[int]:
    return [msg.seq for msg in await reading]


async def test_a_purged_position_raises_and_stays(js: JetStreamContext, make_stream: Make) -> None:
    for subject in (None, "1"):
        name = await make_stream(20)
        reader = LogReader(js, name, subject=subject and f"{name}.{subject}")
        assert [msg.seq for msg in await reader.read(1)] == [1]
        reader.seek(5)
        await js.purge_stream(name, seq=11)
        with pytest.raises(errors.PositionLostError, match="5 to 10 were removed") as caught:
            await reader.read()
        assert (caught.value.stream, caught.value.expected, caught.value.got) == (name, 5, 11)
        assert ("it is unknown how many" in str(caught.value)) is (subject is not None)
        assert reader.position == 5, "the position stays until seek moves it"
        reader.seek(caught.value.got or 0)
        assert await numbers(reader) == [n for n in range(11, 21) if subject is None or n % 3 == 1]


async def test_a_purge_of_everything_is_a_loss_for_unread_messages_only(
    js: JetStreamContext, make_stream: Make, more: More
) -> None:
    name, empty = await make_stream(20), await make_stream()
    behind, at_the_end = LogReader(js, name, start=Seq(20)), LogReader(js, name)
    assert len(await numbers(at_the_end)) == 20
    found_empty = LogReader(js, empty)
    assert await found_empty.read() == []
    await more(empty, 1, 10)
    for stream, reader, expected, got in ((name, behind, 20, 21), (empty, found_empty, 1, 11)):
        await js.purge_stream(stream)
        with pytest.raises(errors.PositionLostError) as caught:
            await reader.read()
        assert (caught.value.expected, caught.value.got) == (expected, got)
    assert await numbers(at_the_end) == [], "a reader at the end has lost nothing"
    await more(name, 21, 22)
    assert await numbers(at_the_end) == [21, 22]
    assert await numbers(LogReader(js, name)) == [21, 22], "First() starts at the oldest stored message"


async def test_a_purge_during_a_read_is_reported(
    js: JetStreamContext, make_stream: Make, wire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The purge happens between the reader's request and the answer."""
    monkeypatch.setattr(reading, "_GROUP", 10)
    for on_lost in ("error", "skip"):
        name = await make_stream(40)
        reader = LogReader(wire.js, name, start=Seq(1), on_lost=on_lost)  # type: ignore[arg-type]
        assert await seqs(reader.read()) == list(range(1, 11))
        wire.before("DIRECT.GET", 1, lambda: js.purge_stream(name, seq=18))  # noqa: B023
        if on_lost == "error":
            with pytest.raises(errors.PositionLostError) as caught:
                await reader.read()
            assert (caught.value.expected, caught.value.got) == (11, 18)
        else:
            assert await numbers(reader) == list(range(18, 41))


async def test_messages_before_a_gap_are_returned_first(js: JetStreamContext, make_stream: Make, wire: Any) -> None:
    name = await make_stream(20)
    await js.delete_msg(name, 7)
    reader = LogReader(wire.js, name, start=Seq(1))
    # The reader asks at the start and after the group. After the purge it cannot know whether 7 was deleted before.
    wire.before("STREAM.INFO", 2, lambda: js.purge_stream(name, seq=10))
    assert [msg.seq for msg in await reader.read()] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(errors.PositionLostError) as caught:
        await reader.read()
    assert (caught.value.expected, caught.value.got) == (7, 10)


async def test_a_purge_before_the_first_message_was_read_is_no_loss(
    js: JetStreamContext, make_stream: Make, wire: Any
) -> None:
    """The oldest message is purged while the reader looks it up, so that the next one is the oldest."""
    name = await make_stream(20, first_seq=101)
    reader = LogReader(wire.js, name)
    wire.before("STREAM.INFO", 1, lambda: js.purge_stream(name, seq=103))
    wire.before("STREAM.INFO", 2, lambda: js.purge_stream(name, seq=106))
    assert await reader.open() == 103
    await js.purge_stream(name, seq=105)
    assert await seqs(reader.read()) == list(range(105, 121))


@pytest.fixture
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for direct gets brings a few messages only."""
    monkeypatch.setattr(reading, "_REQUEST_BYTES", 400)


@pytest.mark.usefixtures("small_requests")
async def test_a_purge_behind_the_first_message_is_a_loss_even_in_the_first_group(
    js: JetStreamContext, make_stream: Make, wire: Any
) -> None:
    for purge, got in (({"seq": 31}, 31), ({}, 41)):
        name = await make_stream(40)
        wire.before("DIRECT.GET", 2, lambda: js.purge_stream(name, **purge))  # type: ignore[arg-type] # noqa: B023
        reader = LogReader(wire.js, name)
        read = await seqs(reader.read())
        assert read == list(range(1, len(read) + 1))
        with pytest.raises(errors.PositionLostError) as caught:
            await reader.read()
        assert (caught.value.expected, caught.value.got, reader.position) == (len(read) + 1, got, len(read) + 1)
        reader.seek(First())
        assert await seqs(reader.read()) == list(range(got, 41)), "the start is looked up again"


@pytest.mark.usefixtures("small_requests")
async def test_a_gap_that_may_be_older_than_the_read_moves_the_start_behind_it(
    js: JetStreamContext, make_stream: Make, wire: Any
) -> None:
    """Nothing was returned yet. So the reader starts at the message that is the oldest one now, and returns all after it."""
    for filtered in (True, False):
        name = await make_stream(40)
        if not filtered:
            await js.delete_msg(name, 3)
        wire.before("DIRECT.GET", 2, lambda: js.purge_stream(name, seq=30))  # noqa: B023
        reader = LogReader(wire.js, name, subject=f"{name}.1" if filtered else None)
        assert await seqs(reader.read()) == [n for n in range(30, 41) if not filtered or n % 3 == 1]
        assert await seqs(reader.read()) == []
        assert reader.position == 41


async def test_a_filtered_reader_reports_what_is_removed_after_its_first_verified_group(
    js: JetStreamContext, make_stream: Make, more: More
) -> None:
    name = await make_stream(10)
    reader = LogReader(js, name, subject=f"{name}.late")
    assert await reader.read() == []
    for n in range(11, 16):
        await js.publish(f"{name}.late", b"%d" % n)
    await js.purge_stream(name, seq=14)
    with pytest.raises(errors.PositionLostError) as caught:
        await reader.read()
    assert (caught.value.expected, caught.value.got, reader.position) == (11, 14, 11)
    reader.seek(14)
    assert await seqs(reader.read()) == [14, 15]


async def test_a_reader_starts_at_the_edge_of_a_stream_whose_oldest_messages_expire_all_the_time(
    js: JetStreamContext, make_stream: Make, more: More, wire: Any
) -> None:
    """Before each of the reader's first requests to the leader, messages are stored, and all older ones expire."""
    for messages, subject in itertools.product((0, 3), (None, "1", "late")):
        name, last = await make_stream(messages), messages

        async def expire() -> None:
            nonlocal last
            await more(name, last + 1, last + 10)  # noqa: B023
            last += 10
            await js.purge_stream(name, seq=last - 2)  # noqa: B023

        for number in range(1, 6):
            wire.before("STREAM.INFO", number, expire)
        reader = LogReader(wire.js, name, subject=subject and f"{name}.{subject}")
        read = await seqs(reader.read())
        assert read == sorted(set(read)), (messages, subject)
        assert (subject == "late") is (read == []), (messages, subject)


async def test_what_is_purged_before_the_first_message_is_a_loss_at_other_starts(
    js: JetStreamContext, make_stream: Make, more: More
) -> None:
    """`First()` is the oldest message whenever the reader gets there; the others name a place."""
    name, empty = await make_stream(10), await make_stream()
    when = (await jsx.DirectGet(js, name).get(5)).time
    starts = ((Seq(5), 5), (Time(when), 5), (Last(), 10), (New(), 11))
    readers = [LogReader(js, name, start=start) for start, _ in starts]
    first = LogReader(js, empty)
    for reader in (*readers, first):
        await reader.open()
    for stream in (name, empty):
        await more(stream, 11, 40)
        await js.purge_stream(stream, seq=21)
    for reader, (start, lost) in zip(readers, starts, strict=True):
        with pytest.raises(errors.PositionLostError) as caught:
            await reader.read()
        assert caught.value.expected == lost, start
    assert len(await first.read()) == 10


async def test_a_reader_overtaken_by_limits_raises(js: JetStreamContext, make_stream: Make, more: More) -> None:
    name = await make_stream(10, max_msgs=10)
    reader = LogReader(js, name, tail=True)
    await reader.read(5)
    await more(name, 11, 15)
    assert [msg.seq for msg in await reader.read(100)] == [6, 7, 8, 9, 10], (
        "they were read before the limit removed them"
    )
    await more(name, 16, 30)
    with pytest.raises(errors.PositionLostError) as caught:
        await anext(reader)
    assert (caught.value.expected, caught.value.got) == (11, 21)


async def test_a_recreated_stream_is_detected(js: JetStreamContext, make_stream: Make, more: More) -> None:
    for messages in (3, 30):
        name = await make_stream(20)
        reader = LogReader(js, name)
        await reader.read(10)
        reader.seek(11)
        created = reader.created
        await js.delete_stream(name)
        with pytest.raises(nats.js.errors.NotFoundError):
            await reader.read()
        await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_atomic=True)
        await more(name, 1, messages)
        for _ in range(2):
            with pytest.raises(errors.StreamRecreatedError) as caught:
                await reader.read()
            assert (caught.value.stream, caught.value.expected) == (name, created)
            assert caught.value.found != created
        reader.seek(First())
        assert await seqs(reader.read()) == list(range(1, messages + 1)), "seek accepts the new stream"


async def test_a_stream_is_the_same_after_a_restart_that_changed_its_creation_time() -> None:
    """nats-server 2.12.8 does so after an update of the stream's configuration."""
    async with NatsServer(version="2.12.8") as server, connected(server.url) as nc:
        js = nc.jetstream(timeout=10)
        await js.add_stream(name="S", subjects=["S"], allow_direct=True)
        await js.publish("S", b"1")
        await asyncio.to_thread(server.restart)
        reader = LogReader(js, "S")
        assert await seqs(reader.read()) == [1]
        created = reader.created
        await js.update_stream((await js.stream_info("S")).config.evolve(description="the same stream"))
        await asyncio.to_thread(server.restart)
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(nats.errors.Error):
                    await js.publish("S", b"2")
                    break
                await asyncio.sleep(0.05)
        assert await seqs(reader.read()) == [2]
        assert reader.created != created, "positions are stored with the new time"
        offsets = await OffsetStore(js).create()
        await offsets.commit(reader, name="r")
        assert await LogReader(js, "S", start=Stored("r")).read() == []


async def test_a_stream_recreated_during_a_read_is_detected(
    js: JetStreamContext, make_stream: Make, more: More, wire: Any
) -> None:
    """The new stream has the same sequences, so only its creation time differs."""
    name = await make_stream(20)
    reader = LogReader(wire.js, name, start=Seq(5))

    async def again() -> None:
        await js.delete_stream(name)
        await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_atomic=True)
        await more(name, 1, 20)

    wire.before("STREAM.INFO", 2, again)
    with pytest.raises(errors.StreamRecreatedError):
        await reader.read()
    assert reader.position == 5


async def test_other_retention_than_limits_is_refused_unless_losses_are_skipped(
    js: JetStreamContext, make_stream: Make, more: More
) -> None:
    for retention in (RetentionPolicy.WORK_QUEUE, RetentionPolicy.INTEREST):
        name = await make_stream(retention=retention)
        await js.add_consumer(name, durable_name="C", ack_policy="explicit")
        await more(name, 1, 10)
        with pytest.raises(errors.StreamConfigMismatchError, match="retention") as caught:
            await LogReader(js, name).read()
        assert caught.value.diff == {"retention": ("limits", str(retention.value))}
        assert await numbers(LogReader(js, name, on_lost="skip")) == list(range(1, 11))


@pytest.mark.parametrize("during", [False, True])
async def test_retention_that_is_changed_under_a_running_reader_is_an_error(
    js: JetStreamContext, make_stream: Make, more: More, wire: Any, during: bool
) -> None:
    """What a consumer acknowledged out of order leaves a hole that looks like deleted messages."""
    name = await make_stream(10)
    reader, skipping = LogReader(wire.js, name), LogReader(js, name, on_lost="skip")
    assert await numbers(skipping) == list(range(1, 11))
    assert await seqs(reader.read()) == list(range(1, 11))

    async def acknowledge() -> None:
        await js.add_consumer(name, durable_name="C", ack_policy="explicit")
        await js.update_stream((await js.stream_info(name)).config.evolve(retention="interest"))
        consumer = await js.pull_subscribe_bind("C", name)
        for message in await consumer.fetch(20):
            if message.metadata.sequence.stream in (12, 13, 18):
                await message.ack_sync()

    await more(name, 11, 20)
    if during:
        wire.before("STREAM.INFO", 2, acknowledge)
    else:
        await acknowledge()
    for _ in range(2):
        with pytest.raises(errors.StreamConfigMismatchError, match="interest retention"):
            await reader.read()
        assert reader.position == 11
    assert await numbers(skipping) == [n for n in range(11, 21) if n not in (12, 13, 18)]


async def test_a_stream_that_cannot_be_read_is_refused(
    js: JetStreamContext, make_stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no direct gets, does not exist, or ends before the position."""
    monkeypatch.setattr(api, "SETTLE", 0.3)
    name = await make_stream(20, allow_direct=False)
    with pytest.raises(errors.DirectGetDisabledError, match="allow_direct"):
        await LogReader(js, name, tail=True).read()
    with pytest.raises(nats.js.errors.NotFoundError):
        await LogReader(js, "NOT_THERE", start=Last()).open()
    with pytest.raises(errors.PositionLostError, match="ends at sequence 20") as caught:
        await LogReader(js, await make_stream(20), start=Seq(23)).read()
    assert (caught.value.expected, caught.value.got) == (23, 21)


async def test_a_server_before_2_11_is_refused() -> None:
    async with NatsServer(version="2.10.26") as server, connected(server.url) as nc:
        js = nc.jetstream()
        await js.add_stream(StreamConfig(name="S", subjects=["s"], allow_direct=True, discard=DiscardPolicy.OLD))
        with pytest.raises(errors.UnsupportedFeatureError, match=r"2\.11"):
            await asyncio.wait_for(LogReader(js, "S").read(), 30)


async def test_a_loss_that_ends_behind_its_group_is_reported_once_to_its_end(
    js: JetStreamContext, make_stream: Make, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(reading, "_GROUP", 4)
    name = await make_stream(20)
    reader, skipping = LogReader(js, name), LogReader(js, name, on_lost="skip")
    for each in (reader, skipping):
        assert await seqs(each.read(4)) == [1, 2, 3, 4]
    await js.purge_stream(name, seq=15)
    with pytest.raises(errors.PositionLostError) as caught:
        await reader.read()
    assert (caught.value.expected, caught.value.got) == (5, 15)
    reader.seek(15)
    for each in (reader, skipping):
        assert await seqs(each.read(1)) == [15]
    assert caplog.text.count("5 to 14 were removed before they were read") == 1


async def test_a_loss_after_the_reader_has_skipped_another_one_is_reported(
    js: JetStreamContext, stream_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that compacts: after the skip, the reader knows which subjects it had."""
    monkeypatch.setattr(reading, "_GROUP", 4)
    name = stream_name()
    await js.add_stream(name=name, subjects=[f"{name}.*"], allow_direct=True, max_msgs_per_subject=1)
    for n in range(20):
        await js.publish(f"{name}.{n}", b"")
    reader = LogReader(js, name)
    assert await seqs(reader.read(4)) == [1, 2, 3, 4]
    await js.purge_stream(name, seq=15)
    with pytest.raises(errors.PositionLostError) as caught:
        await reader.read()
    assert caught.value.got is not None
    reader.seek(caught.value.got)
    await js.purge_stream(name, seq=18)
    with pytest.raises(errors.PositionLostError) as caught:
        await reader.read()
    assert (caught.value.expected, caught.value.got) == (15, 18)
