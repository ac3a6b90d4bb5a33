"""What was read can be written: each kind of stored message, copied with its headers by each way to write."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import Awaitable, Callable, Sequence

import pyarrow as pa
import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamSource

import jetstream_ext as jsx
from jetstream_ext import StoredMsg, arrow, log

Make = Callable[..., Awaitable[str]]
Copy = Callable[[JetStreamContext, str, Sequence[StoredMsg], str], Awaitable[None]]

INSTRUCTIONS = (
    b"Nats-Batch-",
    b"Nats-Expected-",
    b"Nats-Schedule",
    b"Nats-Rollup",
    b"Nats-Incr",
    b"Nats-Required-",
    b"Nats-Stream-Source",
)


async def every(js: JetStreamContext, stream: str, subject: str = ">") -> list[StoredMsg]:
    return await jsx.DirectGet(js, stream).scan(subject=subject).to_list()


def instructions(message: StoredMsg) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in message.raw_headers if name.startswith(INSTRUCTIONS)}


@pytest.fixture
async def source(js: JetStreamContext, make_stream: Make) -> str:
    """A stream with one message of each kind, and what they need."""
    name, inputs = await make_stream(allow_rollup_hdrs=True, allow_msg_schedules=True), await make_stream()
    counters = await make_stream(allow_msg_counter=True, allow_msg_ttl=False)
    expiring = await make_stream(allow_rollup_hdrs=True, max_age=1.0, subject_delete_marker_ttl=3600.0)
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=1)
    schedule = {"Nats-Schedule": f"@at {soon:%Y-%m-%dT%H:%M:%SZ}", "Nats-Schedule-Target": f"{name}.fired"}
    await js.publish(f"{name}.schedule", b"fired", headers=schedule | {"K": "schedule"})
    await js.publish(f"{expiring}.a", b"gone")
    await js.publish(f"{name}.plain", b"plain", headers={"K": "plain", "Nats-Msg-Id": "own"})
    async with jsx.AtomicBatch(js) as batch:
        await batch.add(f"{name}.atomic.1", b"1", headers={"K": "atomic"}, stream=name, expected_last_subject_seq=0)
        await batch.add(f"{name}.atomic.2", b"2", msg_ttl=3600)
    async with jsx.FastPublisher(js) as publisher:
        await publisher.add(f"{name}.fast", b"fast", headers={"K": "fast"}, stream=name)
    await jsx.ingest(js, [(f"{name}.ingest", b"ingest", {"K": "ingest"})])
    await js.publish(f"{name}.expects", b"x", headers={"Nats-Expected-Stream": name, "Nats-Required-Api-Level": "0"})
    await js.publish(f"{name}.rollup", b"rollup", headers={"Nats-Rollup": "sub", "K": "rollup"})
    await js.publish(f"{inputs}.a", b"input", headers={"K": "worker", "Nats-Msg-Id": "of the input"})
    await log.exactly_once(
        log.LogReader(js, inputs),
        name,
        lambda msg: (f"{name}.out", msg.data, msg.headers),
        name="w",
        prefix=f"{name}.at",
    )
    await js.publish(f"{counters}.a", headers={"Nats-Incr": "+5"})
    (counter,) = await every(js, counters)
    assert instructions(counter) == {"Nats-Incr": "+5"}
    await js.publish(f"{name}.counter", counter.data, headers=counter.headers)
    async with asyncio.timeout(30):
        while not await every(js, name, f"{name}.fired"):
            await asyncio.sleep(0.05)
        while not (markers := await every(js, expiring)) or markers[0].data:
            await asyncio.sleep(0.05)
    await js.publish(f"{name}.marker", headers=markers[0].headers)
    sourced = f"{inputs}-copy"
    await js.add_stream(name=sourced, sources=[StreamSource(name=inputs)], allow_direct=True)
    async with asyncio.timeout(30):
        while not (copies := await every(js, sourced)):
            await asyncio.sleep(0.05)
    assert list(instructions(copies[0])) == ["Nats-Stream-Source"]
    await js.publish(f"{name}.sourced", copies[0].data, headers=copies[0].headers)
    return name


async def one_batch(js: JetStreamContext, source: str, messages: Sequence[StoredMsg], target: str) -> None:
    async with jsx.AtomicBatch(js) as batch:
        for place, message in enumerate(messages):
            await batch.add(f"{target}.{place:03}", message.data, headers=message.headers)


async def fast(js: JetStreamContext, source: str, messages: Sequence[StoredMsg], target: str) -> None:
    async with jsx.FastPublisher(js) as publisher:
        await publisher.add_many((f"{target}.{place:03}", m.data, m.headers) for place, m in enumerate(messages))


async def by_ingest(js: JetStreamContext, source: str, messages: Sequence[StoredMsg], target: str) -> None:
    for _ in range(2):
        await jsx.ingest(
            js,
            [(f"{target}.{place:03}", m.data, m.headers) for place, m in enumerate(messages)],
            msg_id=lambda entry: f"copy of {entry[0]}",
        )


async def by_arrow(js: JetStreamContext, source: str, messages: Sequence[StoredMsg], target: str) -> None:
    table = await arrow.to_arrow(js, source)
    subjects = pa.array([f"{target}.{place:03}" for place in range(len(table))])
    await arrow.from_arrow(js, table.set_column(table.schema.get_field_index("subject"), "subject", subjects))


async def nats_py(js: JetStreamContext, source: str, messages: Sequence[StoredMsg], target: str) -> None:
    for place, message in enumerate(messages):
        await js.publish(f"{target}.{place:03}", message.data, headers=message.headers)


async def worker(js: JetStreamContext, source: str, messages: Sequence[StoredMsg], target: str) -> None:
    places = {message.seq: place for place, message in enumerate(messages)}
    await log.exactly_once(
        log.LogReader(js, source),
        target,
        lambda msg: jsx.BatchMessage(f"{target}.{places[msg.seq]:03}", msg.data, msg.headers),
        name="w",
        prefix=f"{target}.at",
    )


async def group(js: JetStreamContext, source: str, messages: Sequence[StoredMsg], target: str) -> None:
    places = {message.seq: place for place, message in enumerate(messages)}
    bucket = f"groups-{target}"
    members = log.Group(js, source, "copies", partitions=2, bucket=bucket)
    working = asyncio.ensure_future(
        log.exactly_once_group(
            members,
            target,
            lambda msg: (f"{target}.{places[msg.seq]:03}", msg.data, msg.headers),
            prefix=f"{target}.at",
        )
    )
    try:
        while len(await every(js, target, f"{target}.*")) < len(messages):
            await asyncio.sleep(0.02)
            assert not working.done(), working
    finally:
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working
        await js.delete_key_value(bucket)


async def dead_letter(js: JetStreamContext, source: str, messages: Sequence[StoredMsg], target: str) -> None:
    """Each input becomes a dead letter in the target; the letters are handed back; what arrives is copied on."""

    def fail(msg: StoredMsg) -> None:
        raise ValueError("no")

    dead = log.DeadLetter(f"{target}.dead", attempts=1)
    await log.exactly_once(log.LogReader(js, source), target, fail, name="w", prefix=f"{target}.at", dead_letter=dead)
    before = (await js.stream_info(source)).state.last_seq
    bucket = f"redrive-{target}"
    await log.redrive(js, target, dead.subject, offsets=log.OffsetStore(js, bucket))
    back = [message for message in await every(js, source) if message.seq > before]
    assert [message.subject for message in back] == [message.subject for message in messages]
    await js.purge_stream(target)
    for place, message in enumerate(back):
        await js.publish(f"{target}.{place:03}", message.data, headers=message.headers)
    await js.delete_key_value(bucket)


@pytest.mark.parametrize("copy", [one_batch, fast, by_ingest, by_arrow, nats_py, worker, group, dead_letter])
async def test_a_copy_has_the_headers_and_no_old_instructions(
    js: JetStreamContext, make_stream: Make, source: str, copy: Copy
) -> None:
    messages = await every(js, source)
    kinds = set().union(*map(instructions, messages))
    assert kinds >= {
        "Nats-Batch-Id", "Nats-Batch-Sequence", "Nats-Batch-Commit", "Nats-Expected-Stream", "Nats-Rollup",
        "Nats-Schedule-Next", "Nats-Expected-Last-Subject-Sequence", "Nats-Required-Api-Level",
    }  # fmt: skip
    headers = set().union(*(message.headers for message in messages))
    assert headers >= {"K", "Nats-Msg-Id", "Nats-TTL", "Nats-Marker-Reason"}
    assert not any(name.encode().startswith(INSTRUCTIONS) for name in headers)
    target = await make_stream()
    async with asyncio.timeout(60):
        await copy(js, source, messages, target)
    copies = sorted(await every(js, target, f"{target}.*"), key=lambda message: message.subject)
    assert [message.data for message in copies] == [message.data for message in messages]
    own = {
        one_batch: ("Nats-Batch-",),
        worker: ("Nats-Batch-", "Nats-Expected-"),
        group: ("Nats-Batch-", "Nats-Expected-"),
    }
    for old, new in zip(messages, copies, strict=True):
        expected = old.headers
        if copy in (worker, group):
            expected.pop("Nats-Msg-Id", None)
        elif copy in (by_ingest, by_arrow):
            expected.setdefault("Nats-Msg-Id", new.headers["Nats-Msg-Id"])
        elif copy is dead_letter:
            expected["Nats-Msg-Id"] = new.headers["Nats-Msg-Id"]
        assert new.headers == expected
        assert all(name.startswith(own.get(copy, ())) for name in instructions(new))
        assert instructions(old).get("Nats-Batch-Id", "") != instructions(new).get("Nats-Batch-Id")


async def test_a_target_without_ttls_refuses_a_message_that_has_one(js: JetStreamContext, make_stream: Make) -> None:
    one, other = await make_stream(), await make_stream(allow_msg_ttl=False)
    await js.publish(f"{one}.a", b"1", headers={"Nats-TTL": "3600"})
    (message,) = await every(js, one)
    entry = (f"{other}.a", message.data, message.headers)
    with pytest.raises(jsx.errors.MessageTTLDisabledError):
        await jsx.publish_atomic(js, [jsx.BatchMessage(*entry)])
    with pytest.raises(jsx.errors.MessageTTLDisabledError):
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add(*entry[:2], headers=entry[2])
    with pytest.raises(jsx.errors.IngestError, match="per-message TTL is disabled") as refused:
        await jsx.ingest(js, [entry])
    assert isinstance(refused.value.__cause__, jsx.errors.MessageTTLDisabledError)
    assert await every(js, other) == []
