"""What is no failure of an input does not make it a dead letter, and what is stored is not stored again."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import BatchMessage, StoredMsg, errors
from jetstream_ext.client.fenced_write import FencedWriter
from jetstream_ext.log import DeadLetter, Group, LogReader, Processed, exactly_once, exactly_once_group
from jetstream_ext.log.worker import Worker
from jetstream_ext.protocol.dead_letters import describe, letter_headers, origin
from jetstream_ext.protocol.partitions import partition_of

Make = Callable[..., Awaitable[str]]


def work(reader: LogReader, target: str, handler: Any, *, attempts: int = 2, **options: Any) -> Awaitable[Processed]:
    letter = DeadLetter(f"{target}.dead", attempts, 0.0)
    return exactly_once(reader, target, handler, name="w", prefix=f"{target}.at", dead_letter=letter, **options)


async def numbers(js: JetStreamContext, target: str, what: str = "out") -> list[int]:
    return [int(msg.data) for msg in await jsx.DirectGet(js, target).scan(subject=f"{target}.{what}").to_list()]


async def kill(working: "asyncio.Future[Any]", monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop a worker as a kill does: it stores nothing more."""

    async def nothing(*_: Any) -> None: ...

    with monkeypatch.context() as patched:
        patched.setattr(Worker, "_store_end", nothing)
        working.cancel()
        await asyncio.wait({working})


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
        await work(LogReader(js, source), target, handler, patience=3)
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


async def test_a_stream_that_is_full_is_no_failure_of_the_inputs(js: JetStreamContext, make_stream: Make) -> None:
    source, target = await make_stream(3), await make_stream(max_bytes=40_000, discard="new")
    await js.publish(f"{target}.fill", bytes(20_000))

    def handle(message: StoredMsg) -> BatchMessage:
        return BatchMessage(f"{target}.out", message.data.rjust(6, b"0") + bytes(30_000))

    for _ in range(4):
        with pytest.raises(errors.BatchServerError, match="maximum bytes"):
            await work(LogReader(js, source), target, handle, patience=4)
    assert await numbers(js, target, "dead") == []


@pytest.mark.parametrize("swallows", [False, True])
async def test_a_cancellation_that_the_handler_hides(js: JetStreamContext, make_stream: Make, swallows: bool) -> None:
    source, target = await make_stream(3), await make_stream()
    there = asyncio.Event()

    async def handle(message: StoredMsg) -> BatchMessage:
        there.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError as error:
            if not swallows:
                raise RuntimeError("interrupted") from error
        return BatchMessage(f"{target}.out", message.data)

    working = asyncio.ensure_future(work(LogReader(js, source, tail=True), target, handle, attempts=1))
    async with asyncio.timeout(30):
        await there.wait()
        working.cancel()
        await asyncio.wait({working})
    assert working.cancelled()
    assert await numbers(js, target, "dead") == []


async def test_a_task_group_that_fails_in_the_handler_is_a_failure(js: JetStreamContext, make_stream: Make) -> None:
    """Before Python 3.13, `Task.cancelling` counts the cancellation that a TaskGroup makes when it fails."""
    source, target = await make_stream(3), await make_stream()

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    async def handle(message: StoredMsg) -> BatchMessage:
        if message.data != b"3":
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
        return BatchMessage(f"{target}.out", message.data)

    done = await work(LogReader(js, source), target, handle)
    assert (done.inputs, done.dead_letters) == (3, 2)
    assert await numbers(js, target) == [3]


async def test_a_planned_stop_during_a_commit_does_not_count_for_the_next_input(
    js: JetStreamContext, make_stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = await make_stream(5), await make_stream()
    there = asyncio.Event()

    async def hang(_: StoredMsg) -> None:
        there.set()
        await asyncio.Event().wait()

    working = asyncio.ensure_future(work(LogReader(js, source), target, hang, attempts=1))
    await there.wait()
    await kill(working, monkeypatch)  # the next start is careful
    publish, calls = FencedWriter._publish, list[int]()

    async def publish_and_cancel(self: FencedWriter, messages: Any, record: bytes, timeout: float) -> Any:
        if json.loads(record).get("failed", {}).get("seq") == 3:
            asyncio.get_running_loop().call_soon(working.cancel)  # the commit is on its way
        return await publish(self, messages, record, timeout)

    def handle(message: StoredMsg) -> BatchMessage:
        calls.append(message.seq)
        return BatchMessage(f"{target}.out", message.data)

    with monkeypatch.context() as patched:
        patched.setattr(FencedWriter, "_publish", publish_and_cancel)
        working = asyncio.ensure_future(work(LogReader(js, source), target, handle, attempts=1))
        await asyncio.wait({working})
    assert working.cancelled()
    await work(LogReader(js, source), target, handle, attempts=1)
    assert calls == [1, 2, 3, 4, 5]
    assert await numbers(js, target) == [1, 2, 3, 4, 5]
    assert await numbers(js, target, "dead") == []


async def test_a_take_over_from_a_live_worker_is_no_death(
    js: JetStreamContext, make_stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = await make_stream(5), await make_stream()
    there, go_on = asyncio.Event(), asyncio.Event()

    async def hang(message: StoredMsg) -> BatchMessage:
        if message.seq == 2:
            there.set()
            await go_on.wait()
        return BatchMessage(f"{target}.out", message.data)

    working = asyncio.ensure_future(work(LogReader(js, source), target, hang, attempts=1))
    await there.wait()
    await kill(working, monkeypatch)  # the next start is careful
    there.clear()
    alive = asyncio.ensure_future(work(LogReader(js, source), target, hang, attempts=1))
    await there.wait()
    await work(LogReader(js, source), target, lambda it: BatchMessage(f"{target}.out", it.data), attempts=1)
    go_on.set()
    with pytest.raises(errors.FencedError):
        await alive
    assert await numbers(js, target) == [1, 2, 3, 4, 5]
    assert await numbers(js, target, "dead") == []


async def test_an_input_that_kills_a_member_leaves_those_of_its_other_partitions_alone(
    js: JetStreamContext, make_stream: Make, stream_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that may kill a process, only one at a time is in its hands."""
    source, target, bucket = await make_stream(), await make_stream(), stream_name()
    keys = [next(k for k in range(99) if partition_of(f"{source}.{k}", 4, [1]) == number) for number in range(4)]
    for key in keys:
        await js.publish(f"{source}.{key}", b"%d" % key)
    killed = asyncio.Event()

    async def handle(message: StoredMsg) -> BatchMessage:
        if message.data == b"%d" % keys[1]:
            await asyncio.sleep(0.1)
            killed.set()
            await asyncio.Event().wait()
        await asyncio.sleep(0.3)
        return BatchMessage(f"{target}.out", message.data)

    async def run() -> None:
        group = Group(js, source, "g", partitions=4, key=[1], bucket=bucket, heartbeat=0.3, poll=0.05)
        letter = DeadLetter(f"{target}.dead", 2, 0.0)
        await exactly_once_group(group, target, handle, prefix=f"{target}.at", dead_letter=letter)

    async with asyncio.timeout(120):
        while not (found := await numbers(js, target, "dead")):
            working = asyncio.ensure_future(run())
            dying = asyncio.ensure_future(killed.wait())
            while not killed.is_set() and not await numbers(js, target, "dead"):
                await asyncio.wait({working, dying}, timeout=0.1)
            dying.cancel()
            await kill(working, monkeypatch)
            killed.clear()
        assert found == [keys[1]]
        working = asyncio.ensure_future(run())
        while len(await numbers(js, target)) < 3:
            await asyncio.sleep(0.1)
        working.cancel()
        await asyncio.wait({working})
    assert sorted(await numbers(js, target)) == sorted({*keys} - {keys[1]})


@pytest.mark.parametrize("blank", ["\u00a0", "\u0085", "\x1f"])
async def test_blanks_that_a_client_strips_are_kept(
    js: JetStreamContext, nc: Any, make_stream: Make, blank: str
) -> None:
    """The input is not handed back with another subject or header."""
    source, target = await make_stream(), await make_stream()
    block = f"NATS/1.0\r\nA:{blank}x\r\nB: y\r\n\r\n".encode()
    subject = f"{source}.x{blank}" if blank != "\x1f" else f"{source}.x"
    done = asyncio.Event()

    async def answer(_: Any) -> None:
        done.set()

    inbox = nc.new_inbox()
    await nc.subscribe(inbox, cb=answer)
    line = f"HPUB {subject} {inbox} {len(block)} {len(block)}\r\n".encode()
    await nc._send_command(line + block + b"\r\n")
    await nc.flush()
    async with asyncio.timeout(10):
        await done.wait()

    def fail(_: StoredMsg) -> None:
        raise ZeroDivisionError

    await work(LogReader(js, source), target, fail, attempts=1)
    [dead] = await jsx.DirectGet(js, target).scan(subject=f"{target}.dead").to_list()
    known = origin(dead)
    assert known is not None
    assert not known.complete
    assert ("A", "x") not in known.headers
    assert ("B", "y") in known.headers


def test_blanks_around_the_subject_make_a_letter_incomplete() -> None:
    message = StoredMsg(stream="S", subject="s.x\u00a0", seq=1, data=b"", time_ns=1)
    dead = StoredMsg(
        stream="T",
        subject="dead",
        seq=1,
        data=b"",
        time_ns=1,
        headers=letter_headers(message, attempts=1, error="e", worker="w"),
    )
    known = origin(dead)
    assert known is not None
    assert not known.complete


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
    assert describe(_HostileError()) == "_HostileError: text"
    source, target = await make_stream(3), await make_stream()

    def fail(_: list[StoredMsg]) -> None:
        raise _HostileError("x" * 100_000)

    with caplog.at_level(logging.DEBUG, "jetstream_ext"):
        done = await work(LogReader(js, source), target, fail, grouped=True)
    assert done.dead_letters == 3
    assert max(len(record.getMessage()) for record in caplog.records if "worker" in record.getMessage()) < 2000


async def test_many_errors_in_one_are_logged_shortly(js: JetStreamContext, make_stream: Make, caplog: Any) -> None:
    source, target = await make_stream(3), await make_stream()

    def fail(_: StoredMsg) -> None:
        raise RuntimeError("x" * 1_000_000)

    await work(LogReader(js, source), target, fail)
    assert caplog.records
    assert all(len(record.getMessage()) < 2000 for record in caplog.records)
