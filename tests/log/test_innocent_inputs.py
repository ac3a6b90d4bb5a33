"""What is no failure of an input does not make it a dead letter, and what is stored is not stored again."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import BatchMessage, StoredMsg, errors
from jetstream_ext.client.fenced_write import FencedWriter
from jetstream_ext.log import (
    DeadLetter,
    Group,
    LogReader,
    Processed,
    dead_letters,
    exactly_once,
    exactly_once_group,
)
from jetstream_ext.protocol.partitions import partition_of
from jetstream_ext.testing import NatsServer

Make = Callable[..., Awaitable[str]]


def work(reader: LogReader, target: str, handler: Any, *, attempts: int = 2, **options: Any) -> Awaitable[Processed]:
    letter = DeadLetter(f"{target}.dead", attempts, 0.0)
    return exactly_once(reader, target, handler, name="w", prefix=f"{target}.at", dead_letter=letter, **options)


async def numbers(js: JetStreamContext, target: str, what: str = "out") -> list[int]:
    return [int(msg.data) for msg in await jsx.DirectGet(js, target).scan(subject=f"{target}.{what}").to_list()]


async def test_a_refusal_while_an_earlier_attempt_is_on_its_way_is_no_failure(
    js: JetStreamContext, make_stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit waits in the leader's pipeline, and its retry is refused because of that."""
    source, target = await make_stream(3), await make_stream()
    publish, attempts, late = FencedWriter._publish, 0, set[Any]()

    async def publish_late(self: FencedWriter, *arguments: Any) -> Any:
        nonlocal attempts
        if not arguments[0]:
            return await publish(self, *arguments)
        attempts += 1
        if attempts == 1:

            async def arrive() -> None:
                await asyncio.sleep(0.3)
                await publish(self, *arguments)

            late.add(asyncio.ensure_future(arrive()))
            raise errors.RequestTimeoutError("no answer")
        if not next(iter(late)).done():
            raise errors.WrongLastSequenceError("in flight", outcome="not_stored")
        return await publish(self, *arguments)

    monkeypatch.setattr(FencedWriter, "_publish", publish_late)

    def handle(message: StoredMsg) -> BatchMessage:
        return BatchMessage(f"{target}.out", message.data)

    done = await work(LogReader(js, source), target, handle)
    assert attempts > 2
    assert (done.inputs, done.dead_letters) == (3, 0)
    assert await numbers(js, target) == [1, 2, 3]


async def test_a_refusal_that_stays_is_an_unknown_outcome_if_an_attempt_was_not_answered(
    js: JetStreamContext, make_stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = await make_stream(3), await make_stream()
    publish, attempts = FencedWriter._publish, 0

    async def refuse(self: FencedWriter, *arguments: Any) -> Any:
        nonlocal attempts
        if not arguments[0]:
            return await publish(self, *arguments)
        attempts += 1
        if attempts == 1:
            raise errors.RequestTimeoutError("no answer")
        raise errors.WrongLastSequenceError("refused", outcome="not_stored")

    monkeypatch.setattr(FencedWriter, "_publish", refuse)
    handler = lambda message: BatchMessage(f"{target}.out", message.data)  # noqa: E731
    with pytest.raises(errors.RequestTimeoutError, match="it is not known what is stored"):
        await work(LogReader(js, source), target, handler, patience=1)
    assert await numbers(js, target, "dead") == []


async def test_a_grouped_handler_may_change_its_list(js: JetStreamContext, make_stream: Make) -> None:
    source, target = await make_stream(6), await make_stream()

    def handle(messages: list[StoredMsg]) -> list[BatchMessage]:
        outputs = []
        while messages:
            outputs.append(BatchMessage(f"{target}.out", messages.pop(0).data))
        return outputs

    async with asyncio.timeout(30):
        done = await work(LogReader(js, source), target, handle, grouped=True)
    assert (done.inputs, done.outputs) == (6, 6)
    assert await numbers(js, target) == [1, 2, 3, 4, 5, 6]


async def test_a_cancellation_that_the_handler_hides(js: JetStreamContext, make_stream: Make) -> None:
    for swallows in (False, True):
        source, target = await make_stream(3), await make_stream()
        there = asyncio.Event()

        async def handle(message: StoredMsg) -> BatchMessage:
            there.set()  # noqa: B023
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                if not swallows:  # noqa: B023
                    raise RuntimeError("interrupted") from error
            return BatchMessage(f"{target}.out", message.data)  # noqa: B023

        working = asyncio.ensure_future(work(LogReader(js, source, tail=True), target, handle, attempts=1))
        async with asyncio.timeout(30):
            await there.wait()
            working.cancel()
            await asyncio.wait({working})
        assert working.cancelled(), f"{swallows=}"
        assert await numbers(js, target, "dead") == []


async def test_an_input_that_kills_a_member_leaves_those_of_its_other_partitions_alone(
    js: JetStreamContext, server: NatsServer, make_stream: Make, stream_name: Callable[[], str]
) -> None:
    """Of those that may kill a process, only one at a time is in its hands."""
    source, target, bucket = await make_stream(), await make_stream(), stream_name()
    keys = [next(k for k in range(99) if partition_of(f"{source}.{k}", 4, [1]) == number) for number in range(4)]
    for key in keys:
        await js.publish(f"{source}.{key}", b"%d" % key)
    killed, release = asyncio.Event(), asyncio.Event()

    async def handle(message: StoredMsg) -> BatchMessage:
        if message.data == b"%d" % keys[1]:
            await asyncio.sleep(0.1)
            killed.set()
            await asyncio.Event().wait()
        await release.wait()
        return BatchMessage(f"{target}.out", message.data)

    async def run(nc: Any) -> None:
        group = Group(
            nc.jetstream(timeout=30), source, "g", partitions=4, key=[1], bucket=bucket, heartbeat=0.3, poll=0.05
        )
        letter = DeadLetter(f"{target}.dead", 1, 0.0)
        await exactly_once_group(group, target, handle, prefix=f"{target}.at", dead_letter=letter)

    async with asyncio.timeout(120):
        while not (found := await numbers(js, target, "dead")):
            async with await nats.connect(server.url, connect_timeout=10) as nc:
                working = asyncio.ensure_future(run(nc))
                if killed.is_set():
                    release.set()  # the other inputs were in the hands of the member that died
                killed.clear()
                while not killed.is_set() and not await numbers(js, target, "dead"):
                    await asyncio.wait({working}, timeout=0.05)
                if await numbers(js, target, "dead"):
                    while len(await numbers(js, target)) < 3:
                        await asyncio.wait({working}, timeout=0.05)
            working.cancel()  # without its connection, it stores no end
            await asyncio.wait({working})
    assert found == [keys[1]]
    assert sorted(await numbers(js, target)) == sorted({*keys} - {keys[1]})


async def test_blanks_that_a_client_strips_are_kept(js: JetStreamContext, nc: Any, make_stream: Make) -> None:
    """The input is not handed back with another subject or header."""
    source, target = await make_stream(), await make_stream()
    blanks = ["\u00a0", "\u0085", "\x1f"]
    inbox = await nc.subscribe(nc.new_inbox())
    for blank in blanks:
        block = f"NATS/1.0\r\nA:{blank}x\r\nB: y\r\n\r\n".encode()
        subject = f"{source}.x{blank}" if blank != "\x1f" else f"{source}.x"
        line = f"HPUB {subject} {inbox.subject} {len(block)} {len(block)}\r\n".encode()
        await nc._send_command(line + block + b"\r\n")
        await nc._flush_pending()
        await inbox.next_msg(30)

    def fail(_: StoredMsg) -> None:
        raise ZeroDivisionError

    await work(LogReader(js, source), target, fail, attempts=1)
    letters = [it async for it in dead_letters(js, target, f"{target}.dead")]
    assert len(letters) == len(blanks)
    for blank, letter in zip(blanks, letters, strict=True):
        assert not letter.complete, repr(blank)
        assert letter.headers == (("B", "y"),), repr(blank)


class _HostileStr(str):
    def __bool__(self) -> bool:
        raise ZeroDivisionError

    def __format__(self, _: str) -> str:
        raise ZeroDivisionError


class _HostileError(Exception):
    def __str__(self) -> str:
        return _HostileStr("text")

    def __repr__(self) -> str:
        raise ZeroDivisionError


async def test_errors_that_cannot_be_printed_do_not_end_the_worker(
    js: JetStreamContext, make_stream: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor do they fill the log."""

    def fail(_: Any) -> None:
        raise _HostileError("x" * 100_000)

    def fail_at_length(_: Any) -> None:
        raise RuntimeError("x" * 1_000_000)

    with caplog.at_level(logging.DEBUG, "jetstream_ext"):
        for handler in (fail, fail_at_length):
            source, target = await make_stream(3), await make_stream()
            done = await work(LogReader(js, source), target, handler, grouped=handler is fail)
            assert done.dead_letters == 3
    assert max(len(record.getMessage()) for record in caplog.records if "worker" in record.getMessage()) < 2000
