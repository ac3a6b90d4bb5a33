"""Streams that keep the newest messages of each subject: what a newer message replaced is not lost, what a purge removed is."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, StreamSource

from jetstream_ext import StoredMsg
from jetstream_ext.errors import PositionLostError
from jetstream_ext.log import First, LogReader, Seq, Time
from jetstream_ext.log import reader as reader_module
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.gaps import only_a_rollup, were_replaced
from jetstream_ext.testing import ReferenceServer, VirtualClock

Make = Callable[..., Awaitable[str]]
KEEP_ONE: dict[str, Any] = {"max_msgs_per_subject": 1}
ROLLUP = {"Nats-Rollup": "sub"}

NOW = datetime(2026, 1, 1, tzinfo=UTC)
CREATED = NOW - timedelta(days=1)
HOUR_NS = 3600 * 10**9


def state_of(config: dict[str, Any], **fields: Any) -> StreamState:
    """A stream of 10 messages on 10 subjects, from sequence 51 to 60."""
    given = {"first_seq": 51, "last_seq": 60, "messages": 10, "num_subjects": 10, "size": 1000, "now": NOW} | fields
    return StreamState("S", CREATED.isoformat(), config, **given)


COMPACTING: dict[str, Any] = {"max_msgs_per_subject": 1}
REFUSING: dict[str, Any] = COMPACTING | {"discard": "new", "discard_new_per_subject": True}


def test_the_state_decides_without_an_earlier_one() -> None:
    failures = []
    for config, fields, replaced in (
        ({}, {}, False),
        ({"allow_msg_ttl": True}, {}, False),
        (COMPACTING, {}, True),
        ({"allow_rollup_hdrs": True}, {}, True),
        (COMPACTING | {"retention": "workqueue"}, {}, False),
        (COMPACTING, {"messages": 0, "num_subjects": 0, "first_seq": 61}, False),
        # A replaced message has as many newer ones as the stream keeps.
        ({"max_msgs_per_subject": 5}, {"messages": 13}, False),
        ({"max_msgs_per_subject": 5}, {"messages": 14}, True),
        ({"max_msgs_per_subject": 5, "allow_rollup_hdrs": True}, {"messages": 13}, True),
        (COMPACTING | {"max_msgs": 11}, {}, True),
        (COMPACTING | {"max_msgs": 10}, {}, False),
        (COMPACTING | {"max_msgs": 10, "discard": "new"}, {}, True),
        (COMPACTING | {"max_bytes": 1500, "max_msg_size": 500}, {}, True),
        (COMPACTING | {"max_bytes": 1500, "max_msg_size": 501}, {}, False),
        (COMPACTING | {"max_bytes": 1 << 26}, {}, False),
        (COMPACTING | {"max_bytes": 1 << 27}, {}, True),
        (COMPACTING | {"max_bytes": 1500, "discard": "new"}, {}, True),
        (COMPACTING | {"max_age": HOUR_NS}, {}, False),
        (COMPACTING | {"max_age": 25 * HOUR_NS}, {}, True),
        # A mirror keeps the times of its origin, which may be older than the mirror.
        (COMPACTING | {"max_age": 25 * HOUR_NS}, {"origin": {"name": "O"}}, False),
        # Newer messages are refused, and replace nothing.
        (REFUSING, {}, False),
        (REFUSING | {"allow_rollup_hdrs": True}, {}, True),
    ):
        if were_replaced(state_of(config, **fields), None, None) is not replaced:
            failures.append((config, fields, replaced))
    assert not failures, "\n".join(map(repr, failures))


def test_the_age_of_a_message_decides_whether_it_can_have_expired() -> None:
    """Its marker replaces it; a limit that was lifted since may have acted."""
    limit = COMPACTING | {"max_age": HOUR_NS}
    markers = limit | {"subject_delete_marker_ttl": HOUR_NS // 2}
    for config, earlier, minutes, replaced in (
        (limit, None, 59, True),
        (limit, None, 60, False),
        (markers, None, 89, True),
        (markers, None, 90, False),
        (markers, limit, 89, False),  # it stored no markers then
        (COMPACTING, limit, 59, True),
        (COMPACTING, limit, 60, False),
    ):
        state = state_of(config)
        before = None if earlier is None else replace(state, config=earlier)
        found = were_replaced(state, before, NOW - timedelta(minutes=minutes))
        assert found is replaced, (config, earlier, minutes)


def test_an_earlier_state_shows_that_something_else_removed_messages() -> None:
    failures = []
    for config, before, replaced in (
        (COMPACTING, {}, True),
        (COMPACTING, {"num_subjects": 9, "messages": 9}, True),
        (COMPACTING, {"num_subjects": 11, "messages": 10}, False),
        (COMPACTING, {"messages": 11}, False),
        (COMPACTING, {"messages": 11, "config": {"max_msgs_per_subject": 2}}, True),
        (COMPACTING, {"messages": 11, "config": COMPACTING | {"allow_rollup_hdrs": True}}, True),
        (COMPACTING | {"allow_rollup_hdrs": True}, {"messages": 11}, True),
        (COMPACTING | {"allow_rollup_hdrs": True}, {"messages": 11, "num_subjects": 11}, False),
        # Options that were changed since: each of them may have acted.
        ({"max_msgs_per_subject": 5}, {"config": COMPACTING}, True),
        ({"max_msgs_per_subject": 5}, {"config": {}}, False),
        ({}, {"config": COMPACTING}, True),
        (REFUSING, {"config": COMPACTING}, True),
        ({}, {"config": REFUSING}, False),
        (COMPACTING, {"config": COMPACTING | {"retention": "interest"}}, False),
        ({"allow_rollup_hdrs": True}, {"config": {"max_msgs": 10}}, False),
        ({"allow_rollup_hdrs": True}, {"config": {"max_msgs": 11}}, True),
        (COMPACTING, {"config": COMPACTING | {"max_msgs": 10, "discard": "new"}}, True),
        (COMPACTING, {"config": COMPACTING | {"max_bytes": 1500}}, False),
        (COMPACTING, {"config": COMPACTING | {"max_age": HOUR_NS}}, False),
    ):
        state = state_of(config)
        if were_replaced(state, replace(state, **before), None) is not replaced:
            failures.append((config, before, replaced))
    assert not failures, "\n".join(map(repr, failures))


def test_fewer_messages_may_need_a_rollup() -> None:
    failures = []
    for config, before, only in (
        (COMPACTING, {"messages": 11}, False),
        ({"allow_rollup_hdrs": True}, {"messages": 11}, True),
        ({"allow_rollup_hdrs": True}, {"messages": 10}, False),
        (COMPACTING, {"messages": 11, "config": COMPACTING | {"allow_rollup_hdrs": True}}, True),
        (COMPACTING | {"allow_rollup_hdrs": True}, {"messages": 11, "config": {"max_msgs_per_subject": 2}}, False),
    ):
        state = state_of(config)
        if only_a_rollup(state, replace(state, **before)) is not only:
            failures.append((config, before, only))
    assert not failures, "\n".join(map(repr, failures))


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


async def test_limits_that_remove_the_oldest_messages_are_reported(js: JetStreamContext, make_stream: Make) -> None:
    name = await make_stream(max_msgs_per_subject=1, max_msgs=4)
    await publish(js, name, "abcabc")
    assert await seqs(LogReader(js, name, start=Seq(1))) == [4, 5, 6], "the limit is not reached"
    await publish(js, name, "de")
    with pytest.raises(PositionLostError):
        await LogReader(js, name, start=Seq(4)).read()


async def test_a_purge_of_a_stream_that_refuses_newer_messages_is_reported(
    js: JetStreamContext, make_stream: Make
) -> None:
    name = await make_stream(max_msgs_per_subject=1, discard=DiscardPolicy.NEW, discard_new_per_subject=True)
    await publish(js, name, "abcdefgh")
    reader = LogReader(js, name, start=Seq(3))
    await js.purge_stream(name, seq=6)
    await publish(js, name, "ijklmnopq")
    with pytest.raises(PositionLostError) as caught:
        await reader.read()
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


async def test_messages_that_a_mirror_gets_later_may_be_old(js: JetStreamContext, make_stream: Make) -> None:
    origin = await make_stream()
    await publish(js, origin, "abc")
    mirror = f"{origin}M"
    await js.add_stream(name=mirror, mirror=StreamSource(name=origin), allow_direct=True, max_msgs_per_subject=1)
    reader = LogReader(js, mirror, start=Seq(1), tail=True)
    found: list[StoredMsg] = []
    async with asyncio.timeout(60):
        while len(found) < 3:
            found += await reader.read()
    assert await reader.read(timeout=0) == []
    assert reader._since == found[-1].time, "the stored time of the newest message, not the time of the read"


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


TTLS: dict[str, Any] = {"allow_direct": True, "allow_msg_ttl": True, "allow_rollup_hdrs": True}


async def test_a_rollup_right_before_the_check_may_not_have_acted_yet(
    timed: tuple[JetStreamContext, VirtualClock],
) -> None:
    js, clock = timed
    for number, (seconds, mirror) in enumerate(itertools.product((1, 6), (False, True))):
        name = f"S{number}"
        await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_rollup_hdrs=True)
        await publish(js, name, "aaaabbbb")
        await publish(js, name, "b", headers=ROLLUP)
        if mirror:
            origin, name = StreamSource(name=name), f"M{number}"
            await js.add_stream(name=name, mirror=origin, allow_direct=True, allow_rollup_hdrs=True)
            async with asyncio.timeout(60):
                while (await js.stream_info(name)).state.last_seq < 9:
                    await asyncio.sleep(0.01)
        clock.advance(seconds)
        reader = LogReader(js, name, start=Seq(1))
        await reader.open()
        await js.purge_stream(name, seq=3)
        if seconds < 5 or mirror:  # its effect cannot be told from that of the purge
            assert (await reader.read())[-1].seq == 9, (seconds, mirror)
        else:
            with pytest.raises(PositionLostError):
                pytest.fail(f"{seconds=}, {mirror=}: {await reader.read()}")


async def test_a_rollup_that_has_expired_may_have_replaced_the_messages(
    timed: tuple[JetStreamContext, VirtualClock],
) -> None:
    js, clock = timed
    for newer, seconds, replaced in (
        ("rollup", 3, True), ("purged", 3, True), ("purged", 0, False), ("kept", 3, False), ("deleted", 0.9, False),
    ):  # fmt: skip
        name = f"{newer}{replaced}"
        await js.add_stream(name=name, subjects=[f"{name}.>"], **TTLS)
        await publish(js, name, "aaaabb")
        clock.advance(10)
        reader = LogReader(js, name, start=Seq(1))
        await reader.open()
        await publish(js, name, "a", headers=ROLLUP | {"Nats-TTL": "1"} if newer == "rollup" else None)
        await publish(js, name, "ab")
        if newer == "deleted":
            await js.delete_msg(name, 7)
        if newer != "rollup":
            await js.purge_stream(name, seq=8 if newer == "purged" else 5)
        clock.advance(seconds)
        if replaced:
            found = [each.seq async for each in reader]
            assert found == ([8, 9] if newer == "purged" else [5, 6, 8, 9]), newer
        else:
            with pytest.raises(PositionLostError):
                pytest.fail(f"{newer}, {seconds} s: {await reader.read()}")


async def test_messages_of_one_subject_that_expire_are_reported(timed: tuple[JetStreamContext, VirtualClock]) -> None:
    js, clock = timed
    await js.add_stream(name="S", subjects=["S.>"], **TTLS)
    await publish(js, "S", "aaa", headers={"Nats-TTL": "60"})
    await publish(js, "S", "a")
    reader = LogReader(js, "S", start=Seq(1))
    await reader.open()
    clock.advance(61)
    with pytest.raises(PositionLostError):
        await reader.read()


async def test_too_many_new_messages_are_not_searched_for_a_rollup(
    js: JetStreamContext, make_stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "_GROUP", 10)
    monkeypatch.setattr("jetstream_ext.client.replaced._MOST_MESSAGES", 10)
    for count in (9, 10):
        name = await make_stream(allow_rollup_hdrs=True)
        await publish(js, name, "a" * 30)
        reader = LogReader(js, name, start=Seq(1))
        await reader.open()
        await js.purge_stream(name, keep=1)
        await publish(js, name, "a" * count)
        if count < 10:
            with pytest.raises(PositionLostError):
                await reader.read()
        else:
            assert await seqs(reader) == [*range(30, 41)]


@pytest.mark.parametrize("markers", [True, False])
async def test_a_marker_replaces_the_message_that_expired(
    timed: tuple[JetStreamContext, VirtualClock], markers: bool
) -> None:
    js, clock = timed
    options = {"subject_delete_marker_ttl": 60} if markers else {"max_msgs_per_subject": 1}
    await js.add_stream(name="S", subjects=["S.>"], allow_direct=True, allow_msg_ttl=True, **options)
    await publish(js, "S", "a", headers={"Nats-TTL": "60"})
    await publish(js, "S", "b")
    reader = LogReader(js, "S", start=Seq(1))
    await reader.open()
    clock.advance(61)
    if markers:
        found = [message async for message in reader]
        assert [message.seq for message in found] == [2, 3]
        assert found[1].headers["Nats-Marker-Reason"] == "MaxAge"
    else:
        with pytest.raises(PositionLostError):
            await reader.read()


async def test_buckets_are_compacted_streams(js: JetStreamContext, stream_name: Callable[[], str]) -> None:
    kv = await js.create_key_value(bucket=stream_name(), direct=True)
    for n in range(5):
        await kv.put("hot", b"%d" % n)
        await kv.put(f"key{n % 2}", b"%d" % n)
    reader = LogReader(js, f"KV_{kv._name}", start=Seq(1))
    assert await seqs(reader) == [8, 9, 10]
    for n in range(5):
        await kv.put("key0", b"")
        await kv.put("key1", b"")
        await kv.put("hot", b"%d" % n)
    assert await seqs(reader) == [23, 24, 25]
    await kv.delete("hot")
    await kv.purge("key0")
    await kv.put("key1", b"")
    assert await seqs(reader) == [26, 27, 28]


@pytest.mark.parametrize("seed", range(3))
async def test_every_newest_message_is_returned_once_and_in_order(
    js: JetStreamContext, make_stream: Make, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(reader_module, "_GROUP", rng.choice([3, 4096]))
    keep = rng.choice([0, 1, 2, 5])
    name = await make_stream(max_msgs_per_subject=keep, allow_rollup_hdrs=keep == 0 or rng.random() < 0.5)
    rollups = keep == 0 or (await js.stream_info(name)).config.allow_rollup_hdrs
    reader = LogReader(js, name, start=rng.choice([First(), Seq(1)]))
    newest: dict[str, int] = {}
    read: dict[str, list[int]] = {}
    order: list[int] = []
    for _ in range(40):
        for _ in range(rng.randint(0, 12)):
            subject = f"{name}.{rng.choice('aaaaaabbcdefgh')}"
            newest[subject] = (
                await js.publish(subject, headers=ROLLUP if rollups and rng.random() < 0.5 else None)
            ).seq
        for message in await reader.read(rng.randint(1, 20)):
            read.setdefault(message.subject, []).append(message.seq)
            order.append(message.seq)
    while messages := await reader.read():
        for message in messages:
            read.setdefault(message.subject, []).append(message.seq)
            order.append(message.seq)
    assert order == sorted(set(order))
    assert {subject: found[-1] for subject, found in read.items()} == newest
