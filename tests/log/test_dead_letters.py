"""Dead letters: an input that fails again and again is stored aside, and a worker that dies of one is not stuck."""

import asyncio
import json
import logging
import pickle
import signal
import sys
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import nats
import nats.errors
import pytest
from nats.js import JetStreamContext
from nats.js.errors import APIError
from workers import MakePair, Pair

import jetstream_ext as jsx
from jetstream_ext import BatchMessage, StoredMsg, errors
from jetstream_ext.log import (
    DeadLetter,
    Group,
    LogReader,
    Processed,
    dead_letters,
    exactly_once,
    exactly_once_group,
)
from jetstream_ext.testing import NatsServer

Make = Callable[..., Awaitable[str]]
More = Callable[[str, int, int], Awaitable[None]]


def letter(target: str, attempts: int = 3, backoff: Any = 0.0) -> DeadLetter:
    return DeadLetter(f"{target}.dead", attempts, backoff)


def work(reader: LogReader, target: str, handler: Any, **options: Any) -> Awaitable[Processed]:
    options = {"name": "w", "prefix": f"{target}.at", "dead_letter": letter(target), **options}
    return exactly_once(reader, target, handler, **options)


async def stored(js: JetStreamContext, target: str, suffix: str) -> list[StoredMsg]:
    return [msg async for msg in LogReader(js, target, subject=f"{target}.{suffix}")]


async def numbers(js: JetStreamContext, target: str) -> list[int]:
    return [int(msg.data) for msg in await stored(js, target, "out")]


async def records(js: JetStreamContext, target: str) -> list[dict[str, Any]]:
    return [json.loads(msg.data) for msg in await stored(js, target, "at.w")]


class Failing:
    """A handler that fails for some inputs: always, or the first few times. It keeps what it was called with."""

    def __init__(self, target: str, fails: dict[int, int]) -> None:
        self.target = target
        self.fails = dict(fails)
        self.calls: list[int | list[int]] = []

    def __call__(self, message: StoredMsg) -> BatchMessage:
        self.calls.append(message.seq)
        self.fail(message)
        return BatchMessage(f"{self.target}.out", message.data)

    def group(self, messages: list[StoredMsg]) -> list[BatchMessage]:
        self.calls.append([message.seq for message in messages])
        for message in messages:
            self.fail(message)
        return [BatchMessage(f"{self.target}.out", message.data) for message in messages]

    def fail(self, message: StoredMsg) -> None:
        if self.fails.get(message.seq, 0) > 0:
            self.fails[message.seq] -= 1
            raise ZeroDivisionError(f"input {message.seq}")


ALWAYS = 1 << 30


async def test_an_input_that_fails_again_and_again_becomes_a_dead_letter(
    js: JetStreamContext, make_pair: MakePair, caplog: pytest.LogCaptureFixture, leak_check: Any
) -> None:
    pair = await make_pair(10)
    handler = Failing(pair.target, {4: ALWAYS, 7: 2})
    with caplog.at_level(logging.WARNING, "jetstream_ext"):
        done = await pair.work(handler, dead_letter=pair.letter())
    assert done == Processed(inputs=10, outputs=9, commits=done.commits, position=11, dead_letters=1)
    assert await pair.outputs() == [1, 2, 3, 5, 6, 7, 8, 9, 10]
    assert handler.calls == [1, 2, 3, 4, 4, 4, 5, 6, 7, 7, 7, 8, 9, 10]
    (dead,) = [it async for it in dead_letters(js, pair.target, f"{pair.target}.dead")]
    found = await jsx.DirectGet(js, pair.source).get(4)
    assert dead.data == found.data
    assert (dead.stream, dead.subject, dead.seq, dead.time) == (pair.source, found.subject, 4, found.time)
    assert (dead.attempts, dead.error, dead.worker) == (3, "ZeroDivisionError: input 4", "w")
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "input 4" in warning
    assert f"{pair.target}.dead" in warning
    # The letter and the position behind it are one batch.
    position = await jsx.DirectGet(js, pair.target).get(dead.message.seq + 1)
    assert position.subject == f"{pair.target}.at.w"
    assert dict(position.raw_headers)[b"Nats-Batch-Id"] == dict(dead.message.raw_headers)[b"Nats-Batch-Id"]
    record = json.loads(position.data)
    assert (record["seq"], record.get("failed")) == (5, None)
    await leak_check.assert_clean()


def bad_results(target: str) -> dict[str, Any]:
    return {
        "a subject of another stream": BatchMessage("elsewhere", b""),
        "the position's subject": BatchMessage(f"{target}.at.w", b""),
        "a bad header": BatchMessage(f"{target}.out", b"", headers={"a b": "c"}),
        "a line break in a header": BatchMessage(f"{target}.out", b"", headers={"a": "b\r\nc"}),
        "no bytes": BatchMessage(f"{target}.out", "text"),  # type: ignore[arg-type]
        "no subject": BatchMessage(7, b""),  # type: ignore[arg-type]
        "a message that is too large": BatchMessage(f"{target}.out", bytes(2048)),
        "a payload that is too large": BatchMessage(f"{target}.out", bytes(2 << 20)),
        "a TTL that the stream refuses": BatchMessage(f"{target}.out", b"", msg_ttl=5),
        "an expectation that does not hold": BatchMessage(f"{target}.out", b"", expected_last_subject_seq=99999),
        "more than a batch": [BatchMessage(f"{target}.out", b"0")] * 1001,
        "a rollup that the stream refuses": BatchMessage(f"{target}.out", b"", headers={"Nats-Rollup": "sub"}),
    }


@pytest.mark.parametrize("most", [2, 100])
@pytest.mark.parametrize("grouped", [False, True])
async def test_outputs_that_cannot_be_stored_are_a_failure_of_their_input(
    make_pair: MakePair, grouped: bool, most: int
) -> None:
    """With two inputs in a commit, those after it are handled already, and handled again."""
    for kind in bad_results("t"):
        pair = await make_pair(5, max_msg_size=1500)

        def handler(given: Any) -> Any:
            messages = given if grouped else [given]
            if any(message.seq == 3 for message in messages):
                return bad_results(pair.target)[kind]  # noqa: B023
            return [pair.out(message) for message in messages]  # noqa: B023

        done = await pair.work(handler, grouped=grouped, max_messages=most, dead_letter=pair.letter(2))
        dead = [(it.data, it.headers["Dead-Letter-Attempts"]) for it in await pair.stored("dead")]
        found = done.inputs, done.outputs, done.dead_letters, await pair.outputs(), dead
        assert found == (5, 4, 1, [1, 2, 4, 5], [(b"3", "2")]), kind


async def test_a_grouped_handler_gets_one_input_at_a_time_after_a_failure(make_pair: MakePair) -> None:
    pair = await make_pair(9)
    handler = Failing(pair.target, {2: ALWAYS, 3: 2})
    done = await pair.work(handler.group, grouped=True, max_messages=4, dead_letter=pair.letter())
    assert (done.inputs, done.dead_letters) == (9, 1)
    assert handler.calls == [[1, 2, 3, 4], [1], [2], [2], [2], [3], [3], [3], [4], [5, 6, 7, 8], [9]]
    assert await pair.outputs() == [1, 3, 4, 5, 6, 7, 8, 9]


async def test_attempts_count_across_restarts(make_pair: MakePair) -> None:
    pair = await make_pair(5)
    handler, letters = Failing(pair.target, {3: ALWAYS}), pair.letter(4, 3600)
    for attempt in range(1, 4):
        working = asyncio.ensure_future(pair.work(handler, dead_letter=letters))
        await until_attempts(pair, attempt)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
    assert handler.calls.count(3) == 3
    done = await pair.work(handler, dead_letter=letters)
    assert (handler.calls.count(3), done.dead_letters) == (4, 1)
    assert await pair.outputs() == [1, 2, 4, 5]
    (dead,) = await pair.stored("dead")
    assert dead.headers["Dead-Letter-Attempts"] == "4"


async def until_attempts(pair: Pair, attempts: int) -> None:
    async with asyncio.timeout(60):
        while not any(record.get("failed", {}).get("attempts") == attempts for record in await pair.records()):
            await asyncio.sleep(0.01)


async def test_a_worker_that_was_fenced_during_a_pause_stores_nothing(make_pair: MakePair) -> None:
    pair = await make_pair(3)
    first = asyncio.ensure_future(pair.work(Failing(pair.target, {2: 1}), dead_letter=pair.letter(2, 3.0)))
    await until_attempts(pair, 1)
    assert (await pair.work()).position == 4
    with pytest.raises(errors.FencedError):
        await asyncio.wait_for(first, 60)
    assert await pair.outputs() == [1, 2, 3]
    assert not await pair.stored("dead")


async def test_what_the_handler_raises_counts_whatever_it_is(make_pair: MakePair) -> None:
    """Also a cancellation of something that it waited for, and the failure of a task group.

    Before Python 3.13, `Task.cancelling` counts the cancellation that a TaskGroup makes when it fails.
    """

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    async def handler(message: StoredMsg) -> BatchMessage:
        if message.seq == 2:
            raise errors.RequestTimeoutError("no answer")
        if message.seq == 3:
            raise asyncio.CancelledError
        if message.seq == 4:
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
        return pair.out(message)

    pair = await make_pair(5)
    done = await pair.work(handler, dead_letter=pair.letter())
    assert (done.dead_letters, await pair.outputs()) == (3, [1, 5])
    kinds = [it.headers["Dead-Letter-Error"].partition(":")[0] for it in await pair.stored("dead")]
    assert kinds == ["RequestTimeoutError", "CancelledError", "ExceptionGroup"]


async def test_an_error_that_is_not_the_inputs_ends_the_worker(
    js: JetStreamContext, server: NatsServer, make_pair: MakePair
) -> None:
    async def update(**config: Any) -> None:
        await js.update_stream((await js.stream_info(pair.target)).config.evolve(**config))

    faults: dict[str, tuple[Callable[[Any], Awaitable[Any]], Callable[[], Awaitable[Any]]]] = {
        "atomic writes are disabled": (lambda _: update(allow_atomic=False), lambda: update(allow_atomic=True)),
        "the stream is full": (lambda _: update(max_msgs=1, discard="new"), lambda: update(max_msgs=-1, discard="old")),
        "the connection is closed": (lambda own: own._nc.close(), lambda: asyncio.sleep(0)),
        "the stream is deleted": (lambda _: js.delete_stream(pair.target), lambda: js.add_stream(config)),
    }
    for fault, (begin, end) in faults.items():
        pair = await make_pair(3)
        config = (await js.stream_info(pair.target)).config
        async with await nats.connect(server.url, connect_timeout=10) as nc:
            own = nc.jetstream(timeout=30)

            async def handler(message: StoredMsg) -> BatchMessage:
                if message.seq == 2:
                    await begin(own)  # noqa: B023
                return pair.out(message)  # noqa: B023

            with pytest.raises((errors.JetStreamExtError, nats.errors.Error, APIError)):
                await pair.work(handler, pair.reader(js=own), patience=1, dead_letter=pair.letter(1))
        await end()
        assert not any("failed" in record for record in await pair.records()), fault
        await pair.work()
        assert await pair.outputs() == [1, 2, 3], fault


HEADERS = [
    ("Trace", "a"),
    ("Trace", "b"),
    ("nats-rollup", "all"),
    ("X", ""),
    ("Ünicode", "no token"),
    ("Text", "äöü ☃"),
    ("Dead-Letter-Error", "an earlier one"),
    ("Dead-Letter-Header-Nats-Msg-Id", "older"),
    ("dead-letter-x", "y"),
    ("Odd\nname", "v"),
    ("Odd", "va\rlue"),
    ("Nats-Msg-Id", "id-1"),
]


async def publish_raw(nc: Any, subject: str, block: bytes, payload: bytes = b"") -> None:
    """Publish a message with a block of headers that no client sends."""
    inbox = await nc.subscribe(nc.new_inbox())
    line = f"HPUB {subject} {inbox.subject} {len(block)} {len(block) + len(payload)}\r\n".encode()
    await nc._send_command(line + block + payload + b"\r\n")
    await nc._flush_pending()
    await inbox.next_msg(30)


async def test_a_dead_letter_keeps_the_headers_of_its_input(js: JetStreamContext, nc: Any, make_stream: Make) -> None:
    source, target = await make_stream(), await make_stream()
    block = "NATS/1.0\r\n" + "".join(f"{name}: {value}\r\n" for name, value in HEADERS)
    payload = bytes(range(256))
    await publish_raw(nc, f"{source}.x", block.encode() + b"Binary: \xff\xfe\r\n\r\n", payload)
    await work(LogReader(js, source), target, Failing(target, {1: ALWAYS}))
    (dead,) = [it async for it in dead_letters(js, target, f"{target}.dead")]
    odd = {"Ünicode", "Odd\nname", "Odd"}
    assert (dead.data, dead.complete) == (payload, False)
    assert list(dead.headers) == [(name, value) for name, value in HEADERS if name not in odd]
    raw = [value for name, value in dead.message.header_pairs if name == "Dead-Letter-Raw-Header"]
    assert [tuple(map(unquote_to_bytes, value.split("="))) for value in raw] == [
        *((name.encode(), value.encode()) for name, value in HEADERS if name in odd),
        (b"Binary", b"\xff\xfe"),
    ]
    assert ("Dead-Letter-Header-Nats-Msg-Id", "id-1") in dead.message.header_pairs
    assert "Nats-Msg-Id" not in dead.message.headers


async def test_blanks_that_a_client_strips_are_kept(js: JetStreamContext, nc: Any, make_stream: Make) -> None:
    """The input is not handed back with another subject or header."""
    source, target = await make_stream(), await make_stream()
    blanks = ["\u00a0", "\u0085", "\x1f"]
    for blank in blanks:
        subject = f"{source}.x{blank}" if blank != "\x1f" else f"{source}.x"
        await publish_raw(nc, subject, f"NATS/1.0\r\nA:{blank}x\r\nB: y\r\n\r\n".encode())
    await work(LogReader(js, source), target, Failing(target, dict.fromkeys((1, 2, 3), ALWAYS)))
    letters = [it async for it in dead_letters(js, target, f"{target}.dead")]
    assert [(it.complete, it.headers) for it in letters] == [(False, (("B", "y"),))] * len(blanks)


async def test_the_error_of_a_dead_letter_is_one_short_line(js: JetStreamContext, make_stream: Make) -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    raised = [LookupError(text) for text in ("", "two\r\nlines\x1b[31m", "x" * 100_000, "\ud800", "☃" * 5000)]
    raised.append(OddError())  # type: ignore[arg-type]
    source, target = await make_stream(len(raised)), await make_stream()

    def handler(message: StoredMsg) -> None:
        raise raised[message.seq - 1]

    await work(LogReader(js, source), target, handler, dead_letter=letter(target, 2))
    dead = await stored(js, target, "dead")
    assert len(dead) == len(raised)
    for it, error in zip(dead, raised, strict=True):
        text = it.headers["Dead-Letter-Error"]
        assert text.startswith(type(error).__qualname__)
        assert text.isprintable()
        assert len(text.encode()) <= 1024
    assert all(len(json.dumps(record)) < 1500 for record in await records(js, target))


LARGE: dict[str, tuple[dict[str, Any], bytes, dict[str, str] | None]] = {
    "larger than the stream takes": ({"max_msg_size": 1000}, bytes(900), None),
    "headers that leave no room for those of a dead letter": ({}, b"1", {"Large": "x" * 65_400}),
    "larger than the server takes": ({}, bytes(1 << 20), None),
    "both": ({"max_msg_size": 70_000}, bytes(3000), {"Large": "x" * 65_400}),
}


@pytest.mark.parametrize("group", [False, True])
async def test_an_input_that_is_too_large_as_a_dead_letter_is_cut(
    js: JetStreamContext, make_stream: Make, make_group: Callable[..., Group], group: bool
) -> None:
    failures: list[str] = []
    for what, (config, data, headers) in LARGE.items():
        source, target = await make_stream(), await make_stream(**config)
        await js.publish(f"{source}.x", data, headers=headers)
        await js.publish(f"{source}.x", b"2")
        handler = Failing(target, {1: ALWAYS})
        if group:
            members = [
                asyncio.ensure_future(
                    exactly_once_group(
                        make_group(source, name=source, partitions=1),
                        target,
                        handler,
                        prefix=f"{target}.at",
                        dead_letter=letter(target, 1),
                    )
                )
                for _ in range(2)
            ]
            async with asyncio.timeout(60):
                while not await stored(js, target, "out"):
                    await asyncio.sleep(0.02)
                    assert not any(member.done() for member in members), members
            for member in members:
                member.cancel()
            await asyncio.wait(members)
        else:
            done = await work(LogReader(js, source), target, handler)
            assert (done.inputs, done.dead_letters) == (2, 1), what
        letters = [it async for it in dead_letters(js, target, f"{target}.dead")]
        if [(it.seq, it.complete) for it in letters] != [(1, False)] or await numbers(js, target) != [2]:
            failures.append(f"{what}: {[(it.seq, it.cut) for it in letters]}")
    assert not failures, "\n".join(failures)


async def test_a_dead_letter_that_cannot_be_stored_ends_the_worker_and_loses_nothing(make_pair: MakePair) -> None:
    pair = await make_pair(1, max_msg_size=300)
    with pytest.raises(errors.MessageTooLargeError, match="cannot be stored as a dead letter"):
        await pair.work(Failing(pair.target, {1: ALWAYS}), dead_letter=pair.letter())
    assert not await pair.stored("dead")
    assert (await pair.records())[-1]["seq"] == 1
    done = await pair.work(lambda message: None)
    assert (done.inputs, done.dead_letters) == (1, 0)


async def test_a_record_of_another_input_does_not_count(make_pair: MakePair, more: More) -> None:
    pair = await make_pair(1)
    await pair.work()
    await pair.forge(failed={"seq": 99, "attempts": 9, "error": ""})
    await more(pair.source, 2, 2)
    handler = Failing(pair.target, {2: 2})
    done = await pair.work(handler, dead_letter=pair.letter())
    assert (done.inputs, done.dead_letters) == (1, 0)
    assert handler.calls == [2, 2, 2]


async def test_the_dead_letters_subject_is_checked_at_the_start(make_pair: MakePair) -> None:
    pair, compacted = await make_pair(1), await make_pair(1, max_msgs_per_subject=1)
    own = pair.reader(stream=pair.target, subject=f"{pair.target}.dead")
    cases: list[tuple[Pair, dict[str, Any], type[Exception], str]] = [
        (pair, {"dead_letter": DeadLetter("elsewhere")}, errors.StreamConfigMismatchError, "subjects"),
        (pair, {"dead_letter": DeadLetter(f"{pair.target}.at.w")}, ValueError, "position"),
        (pair, {"dead_letter": "elsewhere"}, TypeError, "DeadLetter"),
        (pair, {"dead_letter": pair.letter(), "reader": own}, ValueError, "dead letter"),
        (compacted, {"dead_letter": compacted.letter()}, errors.StreamConfigMismatchError, "max_msgs_per_subject"),
    ]
    for each, options, error, text in cases:
        with pytest.raises(error, match=text):
            await each.work(**options)
        assert not await each.outputs()
    await compacted.work(dead_letter=compacted.letter(), position_may_vanish=True)


async def test_a_dead_letter_outlives_the_streams_max_age(make_pair: MakePair) -> None:
    pair = await make_pair(1, max_age=3600, allow_msg_ttl=True)
    await pair.work(Failing(pair.target, {1: ALWAYS}), dead_letter=pair.letter())
    (dead,) = await pair.stored("dead")
    assert dead.headers["Nats-TTL"] == "never"


def test_bad_options_are_refused() -> None:
    for options in (
        {"attempts": 0}, {"attempts": True}, {"attempts": 1.5}, {"backoff": -1}, {"backoff": ()}, {"backoff": [1, -1]},
        {"backoff": float("inf")}, {"backoff": float("nan")}, {"subject": "a.*"}, {"subject": ""}, {"subject": "a b"},
    ):  # fmt: skip
        with pytest.raises(ValueError):  # noqa: PT011 - each has a text of its own
            pytest.fail(f"{options}: {DeadLetter(**{'subject': 'a', **options})}")
    for subject, backoff in (("a", "1"), (7, 0)):
        with pytest.raises(TypeError):
            DeadLetter(subject, backoff=backoff)  # type: ignore[arg-type]


def test_a_dead_letter_option_is_a_value() -> None:
    one = DeadLetter("a", 3, [1, 2])
    assert one == pickle.loads(pickle.dumps(one)) == DeadLetter("a", 3, (1.0, 2.0))
    assert len({one, DeadLetter("a", 3, (1, 2))}) == 1
    assert [one.pause_after(n) for n in (1, 2, 3, 99)] == [1.0, 2.0, 2.0, 2.0]
    assert DeadLetter("a", backoff=2).pause_after(7) == 2.0


async def test_a_cancellation_that_the_handler_hides(make_pair: MakePair) -> None:
    for swallows in (False, True):
        pair, there = await make_pair(3), asyncio.Event()

        async def handle(message: StoredMsg) -> BatchMessage:
            there.set()  # noqa: B023
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                if not swallows:  # noqa: B023
                    raise RuntimeError("interrupted") from error
            return pair.out(message)  # noqa: B023

        working = asyncio.ensure_future(pair.work(handle, pair.reader(tail=True), dead_letter=pair.letter(1)))
        async with asyncio.timeout(30):
            await there.wait()
            working.cancel()
            await asyncio.wait({working})
        assert working.cancelled(), f"{swallows=}"
        assert await pair.stored("dead") == []


async def test_without_dead_letters_a_handler_can_hide_a_cancellation(make_pair: MakePair) -> None:
    pair, there, hidden = await make_pair(3), asyncio.Event(), asyncio.Event()

    async def handle(message: StoredMsg) -> BatchMessage:
        if not hidden.is_set():
            there.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                hidden.set()
        return pair.out(message)

    working = asyncio.ensure_future(pair.work(handle, pair.reader(tail=True)))
    async with asyncio.timeout(30):
        await there.wait()
        working.cancel()
        await hidden.wait()
        while await pair.outputs() != [1, 2, 3]:
            await asyncio.sleep(0.05)
        working.cancel()
        await asyncio.wait({working})
    assert working.cancelled()


# -- workers that die -------------------------------------------------------------------------------------------------

PROGRAM = """
import asyncio, os, signal, sys
import nats
from jetstream_ext import BatchMessage
from jetstream_ext.log import DeadLetter, LogReader, exactly_once

url, source, target, poison, how = sys.argv[1:6]

def handler(message):
    if message.seq == int(poison):
        if how == "exit":
            sys.exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    return BatchMessage(target + ".out", message.data)

async def main():
    js = (await nats.connect(url)).jetstream(timeout=30)
    await exactly_once(LogReader(js, source), target, handler, name="w", prefix=target + ".at", max_messages=10,
                       dead_letter=DeadLetter(target + ".dead", 1, 0))

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["kill", "exit"])
async def test_the_end_of_a_process_is_no_attempt(server: NatsServer, make_pair: MakePair, how: str) -> None:
    """The next start handles the input again, with the same outputs stored once."""
    pair = await make_pair(30)
    arguments = [server.url, pair.source, pair.target, "14", how]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(PROGRAM), *arguments, cwd=Path(__file__).parents[2]
    )
    assert await asyncio.wait_for(process.wait(), 120) == (7 if how == "exit" else -signal.SIGKILL)
    done = await pair.work(dead_letter=pair.letter(1))
    assert done.dead_letters == 0
    assert await pair.outputs() == list(range(1, 31))
