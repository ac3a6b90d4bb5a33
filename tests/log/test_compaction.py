"""Streams that keep the newest messages of each subject: what a newer message replaced is not lost, what a purge removed is."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy

from jetstream_ext import StoredMsg
from jetstream_ext.errors import PositionLostError
from jetstream_ext.log import First, LogReader, Seq, Time, reading
from jetstream_ext.testing import ReferenceServer, VirtualClock

Make = Callable[..., Awaitable[str]]
KEEP_ONE: dict[str, Any] = {"max_msgs_per_subject": 1}
ROLLUP = {"Nats-Rollup": "sub"}


async def publish(js: JetStreamContext, name: str, subjects: str, **options: Any) -> None:
    for subject in subjects:
        await js.publish(f"{name}.{subject}", subject.encode(), **options)


async def seqs(reader: LogReader) -> list[int]:
    return [message.seq for message in await reader.read()]


async def test_a_reader_passes_over_a_stream_whose_old_messages_were_all_replaced(
    js: JetStreamContext, make_stream: Make
) -> None:
    name = await make_stream(**KEEP_ONE)
    await publish(js, name, "abc")
    reader = LogReader(js, name, start=Seq(2))
    await publish(js, name, "abcabc")
    assert await seqs(reader) == [7, 8, 9]
    await publish(js, name, "a" * 20)
    assert await seqs(reader) == [29], "the first message of the stream is still below the position"
    await publish(js, name, "bcbc")
    await publish(js, name, "a")
    assert await seqs(reader) == [32, 33, 34]


PURGES: dict[str, dict[str, Any]] = {
    "everything": {},
    "up to a sequence": {"seq": 5},
    "all but the newest": {"keep": 2},
    "a subject": {"subject": "a"},
    "a subject but its newest": {"subject": "h", "keep": 1},
}


async def test_a_purge_of_unread_messages_is_reported(js: JetStreamContext, make_stream: Make) -> None:
    for purge, keep in itertools.product(PURGES, (1, 2)):
        case = f"{purge}, {keep=}"
        name = await make_stream(max_msgs_per_subject=keep)
        await publish(js, name, "hh" + "abcdef" if purge.endswith("its newest") else "abcdefgh")
        reader = LogReader(js, name, start=Seq(1))
        await reader.open()
        options = dict(PURGES[purge])
        if "subject" in options:
            options["subject"] = f"{name}.{options['subject']}"
        before = (await js.stream_info(name)).state
        await js.purge_stream(name, **options)
        after = (await js.stream_info(name)).state
        if after.first_seq == before.first_seq:
            assert (purge, keep) == ("a subject but its newest", 1), "only then nothing is removed"
            continue
        for _ in range(2):
            with pytest.raises(PositionLostError) as caught:
                pytest.fail(f"{case}: {await reader.read()}")
            assert (caught.value.expected, caught.value.got) == (1, max(after.first_seq, 1)), case
        reader.seek(caught.value.got or 0)
        assert len(await seqs(reader)) == after.messages, case


async def test_a_purge_is_reported_although_the_beginning_was_replaced_before(
    js: JetStreamContext, make_stream: Make
) -> None:
    name = await make_stream(**KEEP_ONE)
    await publish(js, name, "abcdefgh")
    reader = LogReader(js, name, start=Seq(1))
    assert [message.seq for message in await reader.read(2)] == [1, 2]
    reader.seek(3)  # discards what the reader has fetched
    await publish(js, name, "abc")
    assert [message.seq for message in await reader.read(2)] == [4, 5]
    reader.seek(6)
    await js.purge_stream(name, seq=8)
    with pytest.raises(PositionLostError) as caught:
        await reader.read()
    assert (caught.value.expected, caught.value.got) == (6, 8)


async def test_limits_that_remove_or_refuse_messages_are_reported(js: JetStreamContext, make_stream: Make) -> None:
    name = await make_stream(max_msgs_per_subject=1, max_msgs=4)
    await publish(js, name, "abcabc")
    assert await seqs(LogReader(js, name, start=Seq(1))) == [4, 5, 6], "the limit is not reached"
    await publish(js, name, "de")
    with pytest.raises(PositionLostError):
        await LogReader(js, name, start=Seq(4)).read()

    name = await make_stream(max_msgs_per_subject=1, discard=DiscardPolicy.NEW, discard_new_per_subject=True)
    await publish(js, name, "abcdefgh")
    await js.purge_stream(name, seq=6)
    await publish(js, name, "ijklmnopq")
    with pytest.raises(PositionLostError) as caught:
        await LogReader(js, name, start=Seq(3)).read()
    assert (caught.value.expected, caught.value.got) == (3, 6)


async def test_limits_that_were_changed_since_the_last_read_count(js: JetStreamContext, make_stream: Make) -> None:
    async def change(**config: Any) -> None:
        await js.update_stream((await js.stream_info(name)).config.evolve(**config))

    name = await make_stream(**KEEP_ONE)
    await publish(js, name, "abcde")
    reader = LogReader(js, name, start=Seq(1))
    await reader.open()
    await publish(js, name, "abcde")
    await change(max_msgs_per_subject=5)
    assert await seqs(reader) == [6, 7, 8, 9, 10]

    name = await make_stream(max_msgs=10)
    await publish(js, name, "abcdefghij")
    reader = LogReader(js, name, start=Seq(4))
    await reader.open()
    await publish(js, name, "klmnopqrst")
    await change(max_msgs=-1, allow_rollup_hdrs=True)
    with pytest.raises(PositionLostError) as caught:
        await reader.read()
    assert (caught.value.expected, caught.value.got) == (4, 11)


async def test_expiry_by_age_is_reported_unless_the_messages_were_too_young(
    js: JetStreamContext, make_stream: Make
) -> None:
    name = await make_stream(max_msgs_per_subject=1, max_age=3600)
    await publish(js, name, "a")
    reader = LogReader(js, name)
    assert await seqs(reader) == [1]
    await publish(js, name, "bba")
    assert await seqs(reader) == [3, 4]
    assert await seqs(LogReader(js, name, start=Time(datetime.now(UTC) - timedelta(minutes=1)))) == [3, 4]
    config = (await js.stream_info(name)).config
    await js.update_stream(config.evolve(max_age=0.2, duplicate_window=0.1))
    await publish(js, name, "cc")
    behind = LogReader(js, name, start=Seq(5))
    while (await js.stream_info(name)).state.messages:
        await asyncio.sleep(0.02)
    await publish(js, name, "d")
    with pytest.raises(PositionLostError):
        await behind.read()


async def test_rollups_of_a_subject_replace_and_rollups_of_the_stream_do_not(
    js: JetStreamContext, make_stream: Make
) -> None:
    name = await make_stream(allow_rollup_hdrs=True)
    await publish(js, name, "aabb")
    reader = LogReader(js, name, start=Seq(1))
    await reader.open()
    await publish(js, name, "ab", headers=ROLLUP)
    assert await seqs(reader) == [5, 6]
    await publish(js, name, "ccc")
    await js.publish(f"{name}.d", b"d", headers={"Nats-Rollup": "all"})
    with pytest.raises(PositionLostError):
        await reader.read()


async def test_a_purge_is_reported_unless_a_rollup_may_have_replaced_the_messages(
    js: JetStreamContext, make_stream: Make
) -> None:
    async def purged(keep: int, newer: str, **options: Any) -> LogReader:
        name = await make_stream(allow_rollup_hdrs=True, max_msgs_per_subject=keep)
        await publish(js, name, "abc" * 5)
        reader = LogReader(js, name, start=Seq(1))
        await reader.open()
        await publish(js, name, newer[:1], **options)
        await js.purge_stream(name, keep=3)
        await publish(js, name, newer[1:])
        return reader

    for keep, newer in itertools.product((-1, 5), ("", "a", "abcab")):
        reader = await purged(keep, newer)
        with pytest.raises(PositionLostError) as caught:
            pytest.fail(f"{keep=}, {newer=}: {await reader.read()}")
        assert caught.value.expected == 1
        if newer:  # the effect of the rollup cannot be told from that of the purge
            reader = await purged(keep, newer, headers=ROLLUP)
            assert len([message async for message in reader]) == 2 + len(newer), (keep, newer)


@pytest.fixture
async def timed() -> AsyncIterator[tuple[JetStreamContext, VirtualClock]]:
    """A server whose clock the test moves."""
    clock = VirtualClock()
    async with ReferenceServer(clock=clock) as server, await nats.connect(server.url, connect_timeout=10) as nc:
        yield nc.jetstream(timeout=30), clock


async def test_messages_that_expire_are_reported_unless_markers_replace_them(
    timed: tuple[JetStreamContext, VirtualClock],
) -> None:
    js, clock = timed
    cases: list[tuple[str, dict[str, Any]]] = [
        ("aaa", {"allow_rollup_hdrs": True}),
        ("a", {"max_msgs_per_subject": 1}),
        ("a", {"subject_delete_marker_ttl": 60}),
    ]
    for number, (expiring, options) in enumerate(cases):
        name = f"S{number}"
        await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_msg_ttl=True, **options)
        await publish(js, name, expiring, headers={"Nats-TTL": "60"})
        await publish(js, name, "a" if number == 0 else "b")
        reader = LogReader(js, name, start=Seq(1))
        await reader.open()
        clock.advance(61)
        if "subject_delete_marker_ttl" in options:
            found = [message async for message in reader]
            assert [message.seq for message in found] == [2, 3]
            assert found[1].headers["Nats-Marker-Reason"] == "MaxAge"
        else:
            with pytest.raises(PositionLostError):
                await reader.read()


@pytest.mark.parametrize("seed", range(3))
async def test_every_newest_message_is_returned_once_and_in_order(
    js: JetStreamContext, make_stream: Make, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(reading, "_GROUP", rng.choice([3, 4096]))
    keep = rng.choice([0, 1, 2, 5])
    name = await make_stream(max_msgs_per_subject=keep, allow_rollup_hdrs=keep == 0 or rng.random() < 0.5)
    rollups = keep == 0 or (await js.stream_info(name)).config.allow_rollup_hdrs
    reader = LogReader(js, name, start=rng.choice([First(), Seq(1)]))
    newest: dict[str, int] = {}
    read: list[StoredMsg] = []
    for _ in range(40):
        for _ in range(rng.randint(0, 12)):
            subject = f"{name}.{rng.choice('aaaaaabbcdefgh')}"
            newest[subject] = (
                await js.publish(subject, headers=ROLLUP if rollups and rng.random() < 0.5 else None)
            ).seq
        read += await reader.read(rng.randint(1, 20))
    read += [message async for message in reader]
    order = [message.seq for message in read]
    assert order == sorted(set(order))
    assert {message.subject: message.seq for message in read} == newest
