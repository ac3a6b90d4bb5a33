"""`resolve`: whether a batch is stored although the answer to its commit was lost."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import nats
import pytest
from client_cells import each
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.client.connection import connection_of
from jetstream_ext.testing import NatsServer

MakeStream = Any


def messages(name: str, count: int, **options: Any) -> list[jsx.BatchMessage]:
    return [jsx.BatchMessage(f"{name}.{i}", b"%d" % i, **options) for i in range(count)]


async def commit_and_miss_the_answer(batch: jsx.AtomicBatch) -> None:
    """Commit, and cancel the call before the answer arrives."""
    task = asyncio.create_task(batch.commit_eob())
    while batch._session.machine.state.value != "committing":
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert batch.state == "unknown"


async def commit_unanswered(batch: jsx.AtomicBatch) -> None:
    """Commit with a short timeout; the answers to the batch's other requests may take their time."""
    batch._session._timeout, patient = 0.3, batch._session._timeout
    try:
        await batch.commit_eob()
    finally:
        batch._session._timeout = patient


def lose_commits(monkeypatch: pytest.MonkeyPatch, nc: Client) -> list[bytes]:
    """Drop every write that contains a commit; return the list that collects them."""
    connection = connection_of(nc)
    write, lost = connection.write_nowait, []

    def lossy(data: bytes, count: int, size: int) -> None:
        if b"Nats-Batch-Commit" in data:
            lost.append(data)
        else:
            write(data, count, size)

    monkeypatch.setattr(connection, "write_nowait", lossy)
    return lost


@pytest.fixture
def lost_commits(nc: Client, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    return lose_commits(monkeypatch, nc)


@each("count", [1, 2, 30])
async def test_a_stored_batch_is_found(
    js: JetStreamContext, make_stream: MakeStream, leak_check: Any, count: int
) -> None:
    name = await make_stream()
    await js.publish(f"{name}.before", b"")
    batch = jsx.AtomicBatch(js)
    await batch.add_many(messages(name, count))
    await commit_and_miss_the_answer(batch)
    with pytest.raises(errors.BatchOutcomeUnknownError):
        await batch.add(f"{name}.x")
    assert await batch.resolve() == "stored"
    assert batch.state == "committed"
    assert batch.ack == jsx.BatchAck(name, 1 + count, batch.batch_id, count)
    assert await batch.resolve() == "stored"
    await leak_check.assert_clean()


@each("direct", [True, False])
@each("count", [1, 2, 30])
async def test_a_commit_that_never_arrived_is_not_stored(
    js: JetStreamContext, make_stream: MakeStream, lost_commits: list[bytes], leak_check: Any, count: int, direct: bool
) -> None:
    name = await make_stream(allow_direct=direct)
    batch = jsx.AtomicBatch(js)
    await batch.add_many(messages(name, count))
    await js.publish(f"{name}.0", b"another publisher's")
    with pytest.raises(errors.BatchOutcomeUnknownError, match="stored or no"):
        await commit_unanswered(batch)
    assert await batch.resolve() == "not_stored"
    assert batch.state == "failed"
    with pytest.raises(errors.BatchAbandonedError) as caught:
        await batch.add(f"{name}.x")
    assert caught.value.outcome == "not_stored"
    assert await batch.resolve() == "not_stored"
    assert (await js.stream_info(name)).state.messages == 1
    await leak_check.assert_clean()


async def test_a_commit_that_arrives_after_the_answer_stores_nothing(
    js: JetStreamContext, nc: Client, make_stream: MakeStream, lost_commits: list[bytes]
) -> None:
    name = await make_stream()
    batch = jsx.AtomicBatch(js)
    await batch.add_many(messages(name, 3))
    with pytest.raises(errors.BatchOutcomeUnknownError):
        await commit_unanswered(batch)
    assert await batch.resolve() == "not_stored"
    connection = connection_of(nc)
    type(connection).write_nowait(connection, lost_commits[0], 1, 0)
    await nc.flush()
    assert (await js.stream_info(name)).state.messages == 0


async def test_overwritten_messages_leave_the_outcome_unknown(
    js: JetStreamContext, make_stream: MakeStream, lost_commits: list[bytes]
) -> None:
    name = await make_stream(max_msgs_per_subject=1)
    batch = jsx.AtomicBatch(js)
    await batch.add(f"{name}.0")
    for _ in range(3):
        await js.publish(f"{name}.0", b"newer")
    with pytest.raises(errors.BatchOutcomeUnknownError):
        await commit_unanswered(batch)
    with pytest.raises(errors.BatchOutcomeUnknownError, match="removed") as caught:
        await batch.resolve()
    assert (caught.value.outcome, caught.value.batch_id) == ("unknown", batch.batch_id)
    assert batch.state == "unknown"


async def test_a_recreated_stream_leaves_the_outcome_unknown(
    js: JetStreamContext, make_stream: MakeStream, lost_commits: list[bytes]
) -> None:
    name = await make_stream()
    batch = jsx.AtomicBatch(js)
    await batch.add_many(messages(name, 3))
    with pytest.raises(errors.BatchOutcomeUnknownError):
        await commit_unanswered(batch)
    await js.delete_stream(name)
    with pytest.raises(errors.BatchOutcomeUnknownError, match="was deleted;"):
        await batch.resolve()
    await js.add_stream(name=name, subjects=[f"{name}.>"], allow_atomic=True)
    with pytest.raises(errors.BatchOutcomeUnknownError, match="deleted and created again"):
        await batch.resolve()


async def test_a_batch_that_was_acknowledged_can_be_resolved_after_a_restart(
    own_server: Any, own_nc: Client, own_js: JetStreamContext, own_stream: MakeStream
) -> None:
    name = await own_stream()
    batch = jsx.AtomicBatch(own_js, timeout=60)
    await batch.add(f"{name}.0")
    await batch.add(f"{name}.1")
    await own_nc.flush()
    own_server.pause()
    task = asyncio.create_task(batch.commit_eob())
    while batch._session.machine.state.value != "committing" or own_nc.pending_data_size:
        await asyncio.sleep(0)
    await asyncio.to_thread(own_server.kill)
    with pytest.raises(errors.BatchOutcomeUnknownError):
        await task
    await asyncio.to_thread(own_server.restart)
    while not own_nc.is_connected:
        await asyncio.sleep(0.01)
    assert await batch.resolve() == "not_stored"


async def test_resolve_needs_an_ended_batch(js: JetStreamContext, make_stream: MakeStream) -> None:
    name = await make_stream()
    batch = jsx.AtomicBatch(js)
    for _ in range(2):
        with pytest.raises(errors.BatchError, match="is still open"):
            await batch.resolve()
        await batch.add(f"{name}.1")
    await batch.discard()
    assert await batch.resolve() == "not_stored"
    async with jsx.AtomicBatch(js) as batch:
        await batch.add(f"{name}.1")
    assert await batch.resolve() == "stored"
    batch = jsx.AtomicBatch(js)
    with pytest.raises(errors.WrongLastSequenceError):
        await batch.commit(f"{name}.1", expected_last_seq=77)
    assert await batch.resolve() == "not_stored"


@each("version", ["2.12.0", "2.12.8", "2.14.6"])
async def test_resolve_works_on_older_servers(
    version: str, monkeypatch: pytest.MonkeyPatch, stream_name: Callable[[], str]
) -> None:
    with NatsServer(version=version) as server:
        nc = await nats.connect(server.url, connect_timeout=10)
        js = nc.jetstream(timeout=30)
        name = stream_name()
        await js.add_stream(name=name, subjects=[f"{name}.>"], allow_atomic=True, allow_direct=True)
        batch = jsx.AtomicBatch(js)
        await batch.add_many(messages(name, 3))
        await commit_and_miss_the_answer(batch)
        assert await batch.resolve() == "stored"
        for count in (1, 3):
            batch = jsx.AtomicBatch(js)
            await batch.add_many(messages(name, count))
            with monkeypatch.context() as patch:
                lose_commits(patch, nc)
                with pytest.raises(errors.BatchOutcomeUnknownError):
                    await commit_unanswered(batch)
            assert await batch.resolve() == "not_stored"
        await nc.close()


@each("last", ["fired", "other"])
async def test_the_message_of_a_fired_schedule_is_not_part_of_the_batch(
    js: JetStreamContext, make_stream: MakeStream, last: str
) -> None:
    """It has the batch's headers of the message that scheduled it."""
    name = await make_stream(allow_msg_schedules=True, allow_rollup_hdrs=True)
    schedule = {"Nats-Schedule": f"@at {datetime.now(UTC) + timedelta(seconds=1):%Y-%m-%dT%H:%M:%SZ}"}
    batch = jsx.AtomicBatch(js)
    await batch.add(f"{name}.schedule", b"later", headers=schedule | {"Nats-Schedule-Target": f"{name}.fired"})
    await batch.add(f"{name}.{last}", b"last")
    await commit_and_miss_the_answer(batch)
    async with asyncio.timeout(30):
        while (await js.stream_info(name)).state.last_seq < 3:
            await asyncio.sleep(0.05)
    assert await batch.resolve() == "stored"
    assert (batch.ack.seq, batch.ack.batch_size) == (2, 2)


async def test_a_batch_is_found_in_a_stream_that_was_created_again_before_it(
    js: JetStreamContext, make_stream: MakeStream
) -> None:
    name = await make_stream()
    await jsx.publish_atomic(js, messages(name, 2))  # now the stream is cached
    config = (await js.stream_info(name)).config
    await js.delete_stream(name)
    await js.add_stream(config)
    batch = jsx.AtomicBatch(js)
    await batch.add_many(messages(name, 2))
    await commit_and_miss_the_answer(batch)
    async with asyncio.timeout(30):
        while not (await js.stream_info(name)).state.messages:
            await asyncio.sleep(0.05)
    assert await batch.resolve() == "stored"


async def test_an_outcome_that_may_not_be_read_is_unknown() -> None:
    writer = '{ publish: ["s.>", "$JS.API.STREAM.INFO.S", "$JS.API.STREAM.NAMES"] }'
    users = f"{{ user: admin, password: p }}, {{ user: writer, password: p, permissions: {writer} }}"
    async with NatsServer(config=f"authorization {{ users: [ {users} ] }}") as server:
        admin = await nats.connect(server.url, user="admin", password="p", connect_timeout=10)
        await admin.jetstream().add_stream(name="S", subjects=["s.>"], allow_atomic=True)
        await admin.close()

        async def ignore(_: Exception) -> None: ...

        nc = await nats.connect(server.url, user="writer", password="p", connect_timeout=10, error_cb=ignore)
        batch = jsx.AtomicBatch(nc.jetstream())
        await batch.add_many(messages("s", 2))
        await commit_and_miss_the_answer(batch)
        with pytest.raises(errors.BatchOutcomeUnknownError, match=r"refused a message to .*MSG\.GET\.S") as caught:
            await batch.resolve(timeout=30)
        assert "tried for" not in str(caught.value)
        await nc.close()
