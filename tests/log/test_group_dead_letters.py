"""Messages whose handler fails in `member.run`: attempts, pauses, dead letters, and what the partitions do meanwhile."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamSource

from jetstream_ext import DirectGet, StoredMsg, errors
from jetstream_ext.log import DeadLetter, First, Group, Member, drop, partition_of

sys.path.insert(0, str(Path(__file__).parent))

from group_members import MakeGroup, until

Make = Callable[..., Awaitable[str]]


async def letters(js: JetStreamContext, stream: str) -> list[StoredMsg]:
    return [it async for it in DirectGet(js, stream).scan(subject=f"{stream}.dead")]


class Handler:
    """Fails for some sequences; `seen` has every call."""

    def __init__(self, *bad: int) -> None:
        self.bad = bad
        self.seen: list[int] = []

    def __call__(self, message: StoredMsg) -> None:
        self.seen.append(message.seq)
        if message.seq in self.bad:
            raise ZeroDivisionError("no")


async def run(group: Group, handler: Any, dead_letter: DeadLetter, done: Callable[[], Any], **options: Any) -> None:
    """Run a member until something has happened, and let it leave."""
    async with asyncio.timeout(60), group.join(**options) as member:
        running = asyncio.ensure_future(member.run(handler, dead_letter=dead_letter))
        await until(lambda: done() or running.done())
        member.stop()
        await running


async def test_without_dead_letters_a_message_that_always_fails_stops_its_partition(
    make_stream: Make, make_group: MakeGroup
) -> None:
    group, handler = make_group(await make_stream(messages=5), partitions=1), Handler(2)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            async with group.join() as member:
                await member.run(handler)
    assert handler.seen[-1] == 2
    assert 3 not in handler.seen


async def test_a_message_that_always_fails_is_stored_and_passed(
    make_stream: Make, make_group: MakeGroup, js: JetStreamContext
) -> None:
    source, target = await make_stream(messages=9), await make_stream()
    group, handler = make_group(source, partitions=1), Handler(4)
    await run(group, handler, DeadLetter(f"{target}.dead", attempts=3, backoff=0), lambda: 9 in handler.seen)
    assert handler.seen == [1, 2, 3, 4, 4, 4, 5, 6, 7, 8, 9]
    [letter] = await letters(js, target)
    headers = letter.headers or {}
    assert letter.data == b"4"
    assert {name: headers[f"Dead-Letter-{name}"] for name in ("Stream", "Sequence", "Attempts", "Worker")} == {
        "Stream": source,
        "Sequence": "4",
        "Attempts": "3",
        "Worker": "g",
    }
    assert "ZeroDivisionError: no" in headers["Dead-Letter-Error"]
    assert [it.position for it in (await group.status()).partitions] == [10]


async def test_a_pause_delays_one_partition(make_stream: Make, make_group: MakeGroup, js: JetStreamContext) -> None:
    source, target = await make_stream(messages=60), await make_stream()
    bad = next(
        n for n in range(10, 60) if partition_of(f"{source}.{n % 3}", 4, [1]) != partition_of(f"{source}.0", 4, [1])
    )
    blocked = partition_of(f"{source}.{bad % 3}", 4, [1])
    others = {n for n in range(1, 61) if partition_of(f"{source}.{n % 3}", 4, [1]) != blocked}
    handler = Handler(bad)
    dead_letter = DeadLetter(f"{target}.dead", attempts=2, backoff=3600)
    await run(make_group(source, key=[1]), handler, dead_letter, lambda: {*others, bad} <= set(handler.seen))
    assert handler.seen.count(bad) == 1, "the member leaves in the pause"
    assert await letters(js, target) == []


async def test_attempts_count_across_hand_overs(make_stream: Make, make_group: MakeGroup, js: JetStreamContext) -> None:
    """Also if the caller commits the positions: those are its own business."""
    for auto_commit in (True, False):
        source, target = await make_stream(messages=6), await make_stream()
        group, attempts = make_group(source, partitions=1), 0
        for _ in range(2):
            handler = Handler(3)
            dead_letter = DeadLetter(f"{target}.dead", attempts=3, backoff=3600)
            await run(group, handler, dead_letter, lambda h=handler: 3 in h.seen, auto_commit=auto_commit)
            attempts += handler.seen.count(3)
            assert [it.position for it in (await group.status()).partitions] == [3 if auto_commit else 1]
        handler = Handler(3)
        await run(group, handler, dead_letter, lambda h=handler: 6 in h.seen, auto_commit=auto_commit)
        assert attempts + handler.seen.count(3) == 3
        [letter] = await letters(js, target)
        assert (letter.headers or {})["Dead-Letter-Attempts"] == "3"


async def test_a_letter_is_stored_once_if_its_position_was_not(
    make_stream: Make, make_group: MakeGroup, js: JetStreamContext
) -> None:
    """The next owner handles the message again, and stores the same letter, which the server drops."""
    source, target = await make_stream(messages=3), await make_stream()
    for _ in range(2):
        handler = Handler(2)
        dead_letter = DeadLetter(f"{target}.dead", attempts=1)
        group = make_group(source, partitions=1)
        await run(group, handler, dead_letter, lambda h=handler: 3 in h.seen, auto_commit=False)
        assert handler.seen == [1, 2, 3]
    assert len(await letters(js, target)) == 1


async def test_a_letter_that_cannot_be_stored_ends_the_member(
    make_stream: Make, make_group: MakeGroup, js: JetStreamContext
) -> None:
    source, target = await make_stream(messages=3), await make_stream(max_msgs=1, discard="new")
    await js.publish(f"{target}.x", b"")
    group, handler = make_group(source, partitions=1), Handler(2)
    with pytest.raises(errors.ServerError, match=rf"sequence 2 of stream '{source}' failed .*'{target}.dead'.*stays"):
        await run(group, handler, DeadLetter(f"{target}.dead", attempts=1), lambda: 3 in handler.seen)
    assert handler.seen == [1, 2]
    assert [it.position for it in (await group.status()).partitions] == [2]


async def test_the_group_must_not_read_its_dead_letters(
    make_stream: Make, make_group: MakeGroup, js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    source, other, copy = await make_stream(messages=3), await make_stream(), stream_name()
    await js.add_stream(name=copy, sources=[StreamSource(name=other)], allow_direct=True)
    compacted = await make_stream(max_msgs_per_subject=1)
    cases = [
        (source, f"{source}.dead", ValueError, "would read each of its dead letters"),
        (copy, f"{other}.dead", ValueError, "would read each of its dead letters"),
        (source, stream_name(), errors.StreamConfigMismatchError, "no stream stores subject"),
        (source, f"{compacted}.dead", errors.StreamConfigMismatchError, "max_msgs_per_subject"),
    ]
    for number, (stream, subject, error, text) in enumerate(cases):
        async with make_group(stream, partitions=1, name=f"g{number}").join() as member:
            with pytest.raises(error, match=text):
                await member.run(lambda _: pytest.fail("it handles a message"), dead_letter=DeadLetter(subject))
    async with make_group(source, partitions=1, subject=f"{source}.0").join() as member:
        running = asyncio.ensure_future(member.run(lambda _: None, dead_letter=DeadLetter(f"{source}.dead")))
        await until(lambda: member.partitions)
        member.stop()
        await running


async def test_what_is_no_failure_of_the_handler(make_stream: Make, make_group: MakeGroup) -> None:
    """A `FencedError` of a commit, and a cancellation; one that the handler makes by itself is a failure."""
    source, target = await make_stream(messages=3), await make_stream()
    dead_letter, group = DeadLetter(f"{target}.dead", attempts=2, backoff=0), make_group(source, partitions=1)
    seen: list[int] = []

    def fence(_: StoredMsg) -> None:
        raise errors.FencedError("moved")

    with pytest.raises(errors.FencedError):
        await run(group, fence, dead_letter, lambda: False)

    async def wait(message: StoredMsg) -> None:
        seen.append(message.seq)
        await asyncio.Event().wait()

    async with group.join() as member:
        running = asyncio.ensure_future(member.run(wait, dead_letter=dead_letter))
        await until(lambda: seen)
        running.cancel()
        await asyncio.wait({running})
    assert seen == [1]

    async def cancels(message: StoredMsg) -> None:
        seen.append(message.seq)
        inner = asyncio.ensure_future(asyncio.Event().wait())
        inner.cancel()
        await inner

    await run(group, cancels, dead_letter, lambda: 3 in seen)
    assert seen[:6] == [1, 1, 1, 2, 2, 3]


async def test_a_dead_letter_must_be_one(make_stream: Make, make_group: MakeGroup) -> None:
    async with make_group(await make_stream(messages=1)).join() as member:
        with pytest.raises(TypeError, match="dead_letter must be a DeadLetter"):
            await member.run(print, dead_letter="x")  # type: ignore[arg-type]
        assert isinstance(member, Member)


async def test_a_letter_that_was_dropped_is_stored_again(
    make_stream: Make, make_group: MakeGroup, js: JetStreamContext
) -> None:
    """Its message id would be a duplicate: then the message would be passed without a letter."""
    source, target = await make_stream(messages=2), await make_stream()
    group, letter = make_group(source, partitions=1), DeadLetter(f"{target}.dead", attempts=1, backoff=0)
    for turn in (1, 2):
        handler = Handler(1)
        await run(group, handler, letter, lambda: 2 in handler.seen)  # noqa: B023
        [stored] = await letters(js, target)
        assert stored.data == b"1", turn
        assert await drop(js, target, [stored.seq]) == 1
        await group.reset(First())


@pytest.mark.parametrize("config", [{"retention": "interest"}, {"no_ack": True}])
async def test_a_stream_that_does_not_keep_letters_is_refused(
    make_stream: Make, make_group: MakeGroup, js: JetStreamContext, config: dict[str, Any]
) -> None:
    target = await make_stream(**config)
    async with make_group(await make_stream(messages=1), partitions=1).join() as member:
        with pytest.raises(errors.StreamConfigMismatchError, match=r"interest|no_ack"):
            await member.run(Handler(), dead_letter=DeadLetter(f"{target}.dead"))
