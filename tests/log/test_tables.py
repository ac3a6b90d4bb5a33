"""Live tables of the last message per subject, on real servers."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig, StreamSource
from nats.js.errors import NotFoundError

import jetstream_ext as jsx
import jetstream_ext.log as log
from jetstream_ext.errors import BadSubjectError, DirectGetDisabledError, StreamConfigMismatchError

MakeStream = Callable[..., Awaitable[str]]


async def until(true: Callable[[], object], within: float = 20.0) -> None:
    async with asyncio.timeout(within):
        while not true():
            await asyncio.sleep(0.005)


@pytest.fixture
def make_stream(js: JetStreamContext, stream_name: Callable[[], str]) -> MakeStream:
    async def make(**config: Any) -> str:
        name = stream_name()
        await js.add_stream(StreamConfig(name=name, subjects=[f"{name}.>"], allow_direct=True).evolve(**config))
        return name

    return make


async def test_it_has_the_last_message_of_every_subject(js: JetStreamContext, make_stream: MakeStream) -> None:
    stream = await make_stream()
    for n in range(10):
        await js.publish(f"{stream}.{n % 3}", b"%d" % n, headers={"N": str(n)})
    async with log.Table(js, stream) as table:
        assert {subject: message.data for subject, message in table.items()} == {
            f"{stream}.0": b"9",
            f"{stream}.1": b"7",
            f"{stream}.2": b"8",
        }
        message = table[f"{stream}.1"]
        assert message == await jsx.DirectGet(js, stream).get_last(f"{stream}.1")
        assert (message.headers, message.stream, message.subject) == ({"N": "7"}, stream, f"{stream}.1")
        ack = await js.publish(f"{stream}.new", b"", headers={"KV-Operation": "PUT", "KV-Other": "DEL"})
        await table.wait_for(ack.seq)
        assert table[f"{stream}.new"].headers == {"KV-Operation": "PUT", "KV-Other": "DEL"}


async def test_a_message_that_says_so_is_a_removal(js: JetStreamContext, make_stream: MakeStream) -> None:
    """As in a bucket, and as a worker stores it for a key that its handler has deleted from the state."""
    stream = await make_stream()
    for operation in ("DEL", "PURGE"):
        async with log.Table(js, stream) as table:
            changes = table.changes()
            await js.publish(f"{stream}.a", b"1")
            ack = await js.publish(f"{stream}.a", b"2", headers={"KV-Operation": operation})
            await table.wait_for(ack.seq)
            assert not table
            async for change in changes:
                if change.new is None:
                    break
            assert (change.subject, change.revision) == (f"{stream}.a", ack.seq)
        async with log.Table(js, stream) as table:
            assert not table


async def test_filters(js: JetStreamContext, make_stream: MakeStream) -> None:
    for several in (False, True):
        stream = await make_stream()
        wanted: Any = [f"{stream}.a.>", f"{stream}.b"] if several else f"{stream}.a.*"
        async with log.Table(js, stream, wanted) as table:
            changes = table.changes()
            for subject in ("a.x", "c", "b", "a.y"):
                ack = await js.publish(f"{stream}.{subject}", subject.encode())
            await table.wait_for(ack.seq)
            assert set(table) == {f"{stream}.{name}" for name in ("a.x", "a.y", *(["b"] if several else []))}
            first = await anext(changes)
            assert (first.subject, first.old, first.new) == (f"{stream}.a.x", None, table[f"{stream}.a.x"])


async def test_a_servers_marker_is_a_removal(js: JetStreamContext, make_stream: MakeStream) -> None:
    stream = await make_stream(
        max_msgs_per_subject=1, allow_msg_ttl=True, subject_delete_marker_ttl=60.0, allow_rollup_hdrs=True
    )
    async with log.Table(js, stream) as table:
        ack = await js.publish(f"{stream}.a", b"", headers=jsx.ttl_headers(timedelta(seconds=5)))
        await table.wait_for(ack.seq)
        assert f"{stream}.a" in table
        await until(lambda: not table)
        assert table.revision == ack.seq + 1


async def test_a_batch_without_its_end_holds_up_nothing(js: JetStreamContext, make_stream: MakeStream) -> None:
    stream = await make_stream(allow_atomic=True)
    async with jsx.AtomicBatch(js) as batch:
        for n in range(10):
            await batch.add(f"{stream}.{n}", b"")
    await js.delete_msg(stream, batch.ack.seq)
    async with log.Table(js, stream) as table, log.Table(js, stream, [f"{stream}.3", f"{stream}.7"]) as part:
        assert (table.revision, len(table)) == (batch.ack.seq, 9)
        assert len(part) == 2
        ack = await js.publish(f"{stream}.3", b"1")
        for each in (table, part):
            await each.wait_for(ack.seq)


async def test_a_mirror(js: JetStreamContext, make_stream: MakeStream, stream_name: Callable[[], str]) -> None:
    stream, mirror = await make_stream(), stream_name()
    await js.add_stream(StreamConfig(name=mirror, mirror=StreamSource(name=stream), allow_direct=True))
    async with log.Table(js, mirror) as table:
        await js.publish(f"{stream}.a", b"1")
        await until(lambda: set(table) == {f"{stream}.a"})


async def test_a_checkpoint(js: JetStreamContext, make_stream: MakeStream, tmp_path: Path) -> None:
    stream = await make_stream()
    await js.publish(f"{stream}.a", b"1", headers={"A": "b"})
    for n in range(3):
        async with log.Table(js, stream, checkpoint=tmp_path / "t.db") as table:
            assert (len(table), table[f"{stream}.a"].headers) == (1 + n, {"A": "b"})
            await js.publish(f"{stream}.{n}", b"1")


@pytest.mark.parametrize("config", [{"retention": "workqueue"}, {"retention": "interest"}, {"allow_direct": False}])
async def test_streams_that_it_cannot_follow(js: JetStreamContext, make_stream: MakeStream, config: Any) -> None:
    stream = await make_stream(**config)
    with pytest.raises((StreamConfigMismatchError, DirectGetDisabledError)):
        async with log.Table(js, stream):
            pass


async def test_bad_arguments(js: JetStreamContext) -> None:
    for stream, subject in (("S.x", ">"), ("S", "a..b"), ("S", ["a", "b c"])):
        with pytest.raises(BadSubjectError):
            log.Table(js, stream, subject)
    with pytest.raises(ValueError, match="at least one"):
        log.Table(js, "S", [])
    for value, shown in ((5, "int"), (None, "NoneType"), (b"a", "bytes")):
        with pytest.raises(TypeError, match=f"^subject must be a filter, or a list of filters, not {shown}$"):
            log.Table(js, "S", value)  # type: ignore[arg-type]
    with pytest.raises(NotFoundError):
        async with log.Table(js, "NONE"):
            pass
    assert nats


async def test_a_large_table_notices_that_the_newest_message_of_a_subject_was_deleted(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    """Also where a rollup could have removed it."""
    name = stream_name()
    await jsx.ensure_stream(
        js, name=name, subjects=[f"{name}.>"], allow_direct=True, allow_batched=True, allow_rollup_hdrs=True
    )
    async with jsx.FastPublisher(js, flow=500) as publisher:
        for value in (b"old", b"new"):
            await publisher.add_many((f"{name}.{n}", value) for n in range(1_200))
    async with log.Table(js, name) as table:
        await js.delete_msg(name, table[f"{name}.5"].seq)
        async with asyncio.timeout(10):
            while table[f"{name}.5"].data == b"new":
                await asyncio.sleep(0.05)
        assert len(table) == 1_200
