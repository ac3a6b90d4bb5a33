"""Atomic batches against a real server: all of a batch is stored, or nothing."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import repeat
from typing import Any

import nats
import nats.errors
import nats.js.errors
import pytest
from client_cells import each
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.testing import NatsServer

MakeStream = Callable[..., Awaitable[str]]
BATCH_HEADERS = {"Nats-Batch-Id", "Nats-Batch-Sequence", "Nats-Batch-Commit"}


async def stored(js: JetStreamContext, stream: str) -> list[jsx.StoredMsg]:
    return await jsx.DirectGet(js, stream).scan().to_list()


async def payloads(js: JetStreamContext, stream: str) -> list[bytes]:
    return [message.data for message in await stored(js, stream)]


async def count(js: JetStreamContext, stream: str) -> int:
    return (await js.stream_info(stream)).state.messages


@pytest.mark.usefixtures("level")
class TestCommitting:
    async def test_a_clean_exit_commits(self, js: JetStreamContext, stream: str, leak_check: Any) -> None:
        async with jsx.AtomicBatch(js) as batch:
            assert (batch.state, batch.size) == ("open", 0)
            with pytest.raises(errors.BatchError, match="is still open: nothing is stored; commit it first") as caught:
                _ = batch.ack
            assert caught.value.outcome == "not_stored"
            for i in range(1, 6):
                await batch.add(f"{stream}.{i}", b"%d" % i)
                assert (batch.state, batch.size) == ("open", i)
                assert await count(js, stream) == 0
        assert batch.state == "committed"
        assert batch.ack == jsx.BatchAck(stream, 5, batch.batch_id, 5)
        assert await payloads(js, stream) == [b"1", b"2", b"3", b"4", b"5"]
        await leak_check.assert_clean()

    async def test_commit_with_a_last_message(self, js: JetStreamContext, stream: str, leak_check: Any) -> None:
        batch = jsx.AtomicBatch(js)
        await batch.add(f"{stream}.a", b"1")
        ack = await batch.commit(f"{stream}.b", b"2", headers={"K": "v"})
        assert (ack, batch.state) == (batch.ack, "committed")
        assert [set(m.headers) - BATCH_HEADERS for m in await stored(js, stream)] == [set(), {"K"}]
        await leak_check.assert_clean()

    async def test_a_batch_of_one_message_commits(self, js: JetStreamContext, stream: str) -> None:
        assert (await jsx.AtomicBatch(js).commit(f"{stream}.a", b"1")).batch_size == 1
        batch = jsx.AtomicBatch(js)
        await batch.add(f"{stream}.a", b"2")
        assert (await batch.commit_eob()).batch_size == 1
        assert await payloads(js, stream) == [b"1", b"2"]

    async def test_a_batch_can_have_a_thousand_messages(self, js: JetStreamContext, stream: str) -> None:
        async with jsx.AtomicBatch(js) as batch:
            for i in range(1000):
                await batch.add(f"{stream}.a", b"%d" % i)
        assert batch.ack.batch_size == 1000
        assert await payloads(js, stream) == [b"%d" % i for i in range(1000)]

    async def test_every_option_of_a_message_is_stored(self, js: JetStreamContext, stream: str) -> None:
        headers = {"K": "v", "Unicode": "ä"}
        async with jsx.AtomicBatch(js) as batch:
            await batch.add(f"{stream}.a", b"", headers=headers, msg_id="m1", msg_ttl=60, expected_last_seq=0)
            await batch.add(f"{stream}.b", b"\r\n", stream=stream, expected_last_subject_seq=0)
            await batch.add_many([jsx.BatchMessage(f"{stream}.a", msg_ttl=jsx.NEVER)])
        assert headers == {"K": "v", "Unicode": "ä"}
        first, second, third = await stored(js, stream)
        assert (first.data, second.data, third.data) == (b"", b"\r\n", b"")
        assert first.headers == {**headers, "Nats-Msg-Id": "m1", "Nats-TTL": "60"}
        instructions = set(first.raw_headers) - {
            (name.encode(), value.encode()) for name, value in first.headers.items()
        }
        assert instructions == {
            (b"Nats-Expected-Last-Sequence", b"0"), (b"Nats-Batch-Id", batch.batch_id.encode()),
            (b"Nats-Batch-Sequence", b"1"),
        }  # fmt: skip
        assert third.headers["Nats-TTL"] == "never"

    async def test_the_caller_may_reuse_its_headers(self, js: JetStreamContext, stream: str) -> None:
        headers: dict[str, str] = {}
        async with jsx.AtomicBatch(js) as batch:
            for i in range(4):
                headers["I"] = str(i)
                await batch.add(f"{stream}.a", b"", headers=headers)
            headers.clear()
        assert [m.headers["I"] for m in await stored(js, stream)] == ["0", "1", "2", "3"]

    async def test_an_add_in_progress_is_part_of_the_commit(self, js: JetStreamContext, stream: str) -> None:
        batch = jsx.AtomicBatch(js)
        await batch.add(f"{stream}.a", b"0")
        _, ack = await asyncio.gather(batch.add(f"{stream}.a", b"1"), batch.commit(f"{stream}.a", b"2"))
        assert ack.batch_size == 3
        assert await payloads(js, stream) == [b"0", b"1", b"2"]


class TestDebugRecords:
    @each("end", ["commit", "refused", "discard"])
    async def test_each_state_change_is_one_debug_record(
        self,
        js: JetStreamContext,
        stream: str,
        caplog: pytest.LogCaptureFixture,
        end: str,
    ) -> None:
        caplog.clear()
        caplog.set_level("DEBUG", logger="jetstream_ext.atomic")
        batch = jsx.AtomicBatch(js)
        await batch.add(f"{stream}.secret", b"hidden", headers={"Token": "hidden"})
        changes = ["NEW -> OPEN (the server that takes the batch is known); messages=0, sent=0, acked=0"]
        if end == "commit":
            await batch.commit_eob()
            changes += [
                "OPEN -> COMMITTING (the commit was sent); messages=1, sent=2, acked=1",
                "COMMITTING -> COMMITTED (the ack of the batch); messages=1, sent=2, acked=1",
            ]
        elif end == "refused":
            with pytest.raises(errors.WrongLastSequenceError):
                await batch.commit(f"{stream}.a", b"hidden", expected_last_subject_seq=9)
            changes += [
                "OPEN -> COMMITTING (the commit was sent); messages=2, sent=2, acked=1",
                (
                    "COMMITTING -> FAILED (a message or the commit was refused); messages=2, sent=2, acked=1, "
                    "error=WrongLastSequenceError"
                ),
            ]
        else:
            changes += ["OPEN -> DISCARDED (the caller discarded the batch); messages=1, sent=1, acked=1"]
        await batch.discard()
        await batch.discard()
        assert [record.getMessage() for record in caplog.records if record.name == "jetstream_ext.atomic"] == [
            f"batch {batch.batch_id}: {change}" for change in changes
        ]
        assert {record.levelname for record in caplog.records} == {"DEBUG"}
        assert "hidden" not in caplog.text
        assert "secret" not in caplog.text


class TestNothingStored:
    async def test_an_exception_in_the_block_discards_the_batch(
        self, js: JetStreamContext, stream: str, leak_check: Any
    ) -> None:
        batch = jsx.AtomicBatch(js)

        async def fail() -> None:
            async with batch:
                await batch.add(f"{stream}.a", b"1")
                await batch.add(f"{stream}.a", b"2")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        assert batch.state == "discarded"
        with pytest.raises(errors.BatchClosedError, match="was discarded: nothing is stored, so there is no ack"):
            _ = batch.ack
        assert await count(js, stream) == 0
        await leak_check.assert_clean()

    async def test_a_discarded_batch_refuses_further_calls(
        self, js: JetStreamContext, stream: str, leak_check: Any
    ) -> None:
        batch = jsx.AtomicBatch(js)
        await batch.add(f"{stream}.a", b"1")
        await batch.discard()
        await batch.discard()
        for operation in (batch.add(f"{stream}.a"), batch.commit(f"{stream}.a"), batch.commit_eob()):
            with pytest.raises(errors.BatchClosedError) as caught:
                await operation
            assert caught.value.outcome == "not_stored"
        assert await count(js, stream) == 0
        await leak_check.assert_clean()

    async def test_an_empty_batch_sends_nothing(self, js: JetStreamContext, leak_check: Any) -> None:
        sent = js._nc.stats["out_msgs"]
        async with jsx.AtomicBatch(js) as batch:
            pass
        assert batch.state == "discarded"
        with pytest.raises(errors.BatchClosedError, match="was discarded: nothing is stored, so there is no ack"):
            _ = batch.ack
        for call in (jsx.AtomicBatch(js).commit_eob(), jsx.publish_atomic(js, [])):
            with pytest.raises(errors.EmptyBatchError):
                await call
        unused = jsx.AtomicBatch(js)
        await unused.discard()
        with pytest.raises(errors.BatchClosedError):
            await unused.add("a")
        assert js._nc.stats["out_msgs"] == sent
        await leak_check.assert_clean()

    async def test_a_committed_batch_refuses_further_calls(self, js: JetStreamContext, stream: str) -> None:
        batch = jsx.AtomicBatch(js)
        ack = await batch.commit(f"{stream}.a", b"1")
        for operation in (batch.add(f"{stream}.a"), batch.commit(f"{stream}.a"), batch.commit_eob()):
            with pytest.raises(errors.BatchClosedError) as caught:
                await operation
            assert (caught.value.outcome, caught.value.ack) == ("stored", ack)
        await batch.discard()
        assert batch.state == "committed"

    @each(
        "bad, error",
        [
            ({"expected_last_seq": 7}, errors.WrongLastSequenceError),
            ({"expected_last_subject_seq": 7}, errors.WrongLastSequenceError),
            ({"stream": "ANOTHER"}, errors.StreamMismatchError),
            ({"msg_id": "taken"}, errors.AtomicPublishDuplicateMessageIDError),
        ],
    )
    @pytest.mark.usefixtures("level")
    async def test_a_failed_expectation_stores_nothing(
        self,
        js: JetStreamContext,
        make_stream: MakeStream,
        leak_check: Any,
        bad: dict[str, Any],
        error: type[errors.BatchError],
    ) -> None:
        stream = await make_stream()
        await js.publish(f"{stream}.z", b"before", headers={"Nats-Msg-Id": "taken"})
        batch = jsx.AtomicBatch(js)

        async def block() -> None:
            async with batch:
                await batch.add(f"{stream}.a", b"1", **bad)
                await batch.add(f"{stream}.b", b"2")

        with pytest.raises(error) as caught:
            await block()
        assert type(caught.value) is error
        assert (caught.value.outcome, caught.value.batch_id) == ("not_stored", batch.batch_id)
        assert isinstance(caught.value, errors.BatchError)
        assert isinstance(caught.value, nats.js.errors.APIError)
        assert batch.state == "failed"
        assert await payloads(js, stream) == [b"before"]
        await leak_check.assert_clean()

    @each("dealt_with", [True, False])
    async def test_an_error_caught_in_the_block_is_raised_at_its_end_unless_discarded(
        self, js: JetStreamContext, stream: str, leak_check: Any, dealt_with: bool
    ) -> None:
        batch = jsx.AtomicBatch(js)

        async def block() -> None:
            async with batch:
                await batch.add(f"{stream}.a", expected_last_seq=7)
                with pytest.raises(errors.WrongLastSequenceError):
                    await batch.commit_eob()
                if dealt_with:
                    await batch.discard()

        if dealt_with:
            await block()
        else:
            with pytest.raises(errors.WrongLastSequenceError):
                await block()
        assert batch.state == "failed"
        assert await count(js, stream) == 0
        await leak_check.assert_clean()

    async def test_a_refusal_after_a_cancelled_add_fails_the_batch(
        self, js: JetStreamContext, make_stream: MakeStream, leak_check: Any
    ) -> None:
        # A cancelled add is part of the batch: if the server refuses its message, the batch must not commit without it.
        stream = await make_stream()
        batch = jsx.AtomicBatch(js)
        adding = asyncio.create_task(batch.add(f"{stream}.a", b"1", headers={"Nats-Required-Api-Level": "99"}))
        while not batch.size:
            await asyncio.sleep(0)
        adding.cancel()
        await asyncio.wait([adding])
        assert adding.cancelled()
        await js._nc.flush()
        with pytest.raises(errors.RequiredApiLevelError):
            await batch.commit_eob()
        assert await count(js, stream) == 0
        await leak_check.assert_clean()

    async def test_a_batch_that_the_server_dropped_is_refused_at_commit(self, stream_name: Callable[[], str]) -> None:
        config = 'jetstream { limits { batch { timeout: "100ms" } } }'
        async with NatsServer(config=config) as server, await nats.connect(server.url, connect_timeout=10) as nc:
            js = nc.jetstream()
            name = stream_name()
            await js.add_stream(name=name, subjects=[f"{name}.>"], allow_atomic=True)
            abandoned = await nc.subscribe(f"$JS.EVENT.ADVISORY.STREAM.BATCH_ABANDONED.{name}")
            batch = jsx.AtomicBatch(js)
            await batch.add(f"{name}.a", b"1")
            assert b'"timeout"' in (await abandoned.next_msg(timeout=30)).data
            with pytest.raises(errors.AtomicPublishIncompleteError):
                await batch.commit_eob()
            assert await count(js, name) == 0


class TestRefusedAtOnce:
    """A typed error at once, nothing stored, nothing left open."""

    async def test_arguments_of_the_wrong_type_are_refused(self, js: JetStreamContext, leak_check: Any) -> None:
        batch: Any = jsx.AtomicBatch(js)
        for call in (batch.add(7), batch.add("a", "text"), batch.add_many([7]), batch.add_many([("a",)])):
            with pytest.raises(TypeError, match=r"must be|a tuple of 1"):
                await call
        for timeout in ("1", True):
            with pytest.raises(TypeError, match="timeout"):
                await batch.resolve(timeout=timeout)
        for timeout in (0, -1, float("nan")):
            with pytest.raises(ValueError, match="timeout"):
                await batch.resolve(timeout=timeout)
        assert (batch.size, batch.state) == (0, "open")
        await leak_check.assert_clean()


class TestPublishAtomic:
    @each("asynchronous", [True, False])
    async def test_a_source_that_fails_late_stores_nothing(
        self, js: JetStreamContext, stream: str, leak_check: Any, asynchronous: bool
    ) -> None:
        def source() -> Iterator[jsx.BatchMessage]:
            for _ in range(50):
                yield jsx.BatchMessage(f"{stream}.a", b"x")
            raise ZeroDivisionError

        async def async_source() -> AsyncIterator[jsx.BatchMessage]:
            for message in source():
                yield message

        with pytest.raises(ZeroDivisionError):
            await jsx.publish_atomic(js, async_source() if asynchronous else source())
        assert await count(js, stream) == 0
        await leak_check.assert_clean()

    @each("how", ["iterable", "async iterable", "add_many", "add"])
    async def test_an_endless_source_is_stopped_by_the_refusal(
        self, js: JetStreamContext, stream: str, how: str
    ) -> None:
        messages = repeat(jsx.BatchMessage(f"{stream}.a"), 100_000)
        batch = jsx.AtomicBatch(js)

        async def source() -> AsyncIterator[jsx.BatchMessage]:
            for message in messages:
                yield message

        async def add() -> None:
            for message in messages:
                await batch.add_many([message])

        with pytest.raises(errors.AtomicPublishTooLargeError) as caught:
            await {
                "iterable": lambda: jsx.publish_atomic(js, messages), "add_many": lambda: batch.add_many(messages),
                "async iterable": lambda: jsx.publish_atomic(js, source()), "add": add,
            }[how]()  # fmt: skip
        assert (caught.value.sent, caught.value.outcome) == (2000, "not_stored")
        assert await count(js, stream) == 0


async def test_the_time_of_a_source_does_not_count(js: JetStreamContext, stream: str) -> None:
    timeout, pause, large = 0.4, 0.25, bytes(40_000)  # each large message is a block of its own

    async def source(count: int) -> AsyncIterator[tuple[str, bytes]]:
        for _ in range(count):
            yield f"{stream}.a", b""
        await asyncio.sleep(2 * pause)  # until the end is known

    def blocking(count: int) -> Iterator[tuple[str, bytes]]:
        for _ in range(count):
            yield f"{stream}.a", large
            time.sleep(pause)

    assert (await jsx.publish_atomic(js, source(2), timeout=timeout)).batch_size == 2
    assert (await jsx.publish_atomic(js, blocking(3), timeout=timeout)).batch_size == 3
    acks = await jsx.publish_atomic_many(js, [source(2), *(blocking(2) for _ in range(4))], timeout=timeout)
    assert [ack.batch_size for ack in acks] == [2] * 5


async def test_a_source_may_discard_its_own_batch(js: JetStreamContext, stream: str) -> None:
    def source(batch: jsx.AtomicBatch) -> Iterator[tuple[str, bytes]]:
        yield f"{stream}.a", b"1"
        with contextlib.suppress(StopIteration):
            batch.discard().send(None)
        yield f"{stream}.a", b"2"

    for _ in range(60):  # more than a stream has places
        batch = jsx.AtomicBatch(js)
        with pytest.raises(errors.BatchClosedError):
            await batch.add_many(source(batch))
    assert (await jsx.publish_atomic(js, [(f"{stream}.a", b"")])).batch_size == 1
