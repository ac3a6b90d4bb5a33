"""Messages whose handler fails in `member.run`: attempts, pauses, dead letters, and what the partitions do meanwhile."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamSource
from workers import MakePair

from jetstream_ext import StoredMsg, errors
from jetstream_ext.log import DeadLetter, First, Group, Member, drop, partition_of

sys.path.insert(0, str(Path(__file__).parent))

from group_members import MakeGroup, until

Make = Callable[..., Awaitable[str]]


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


async def positions(group: Group) -> list[int | None]:
    return [it.position for it in (await group.status()).partitions]


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


async def test_a_message_that_always_fails_is_stored_and_passed(make_pair: MakePair, make_group: MakeGroup) -> None:
    pair = await make_pair(9)
    group, handler = make_group(pair.source, partitions=1), Handler(4)
    await run(group, handler, pair.letter(), lambda: 9 in handler.seen)
    assert handler.seen == [1, 2, 3, 4, 4, 4, 5, 6, 7, 8, 9]
    [letter] = await pair.stored("dead")
    assert letter.data == b"4"
    expected = {"Stream": pair.source, "Sequence": "4", "Attempts": "3", "Worker": "g"}
    assert {name: letter.headers[f"Dead-Letter-{name}"] for name in expected} == expected
    assert "ZeroDivisionError: no" in letter.headers["Dead-Letter-Error"]
    assert await positions(group) == [10]


async def test_a_pause_delays_one_partition(make_pair: MakePair, make_group: MakeGroup) -> None:
    pair = await make_pair(60)
    numbers = {n: partition_of(f"{pair.source}.{n % 3}", 4, [1]) for n in range(1, 61)}
    bad = next(n for n in range(10, 60) if numbers[n] != numbers[3])
    others = {n for n, number in numbers.items() if number != numbers[bad]}
    handler = Handler(bad)
    await run(
        make_group(pair.source, key=[1]), handler, pair.letter(2, 3600), lambda: {*others, bad} <= set(handler.seen)
    )
    assert handler.seen.count(bad) == 1, "the member leaves in the pause"
    assert await pair.stored("dead") == []


async def test_attempts_count_across_hand_overs(make_pair: MakePair, make_group: MakeGroup) -> None:
    """Also if the caller commits the positions: those are its own business."""
    for auto_commit in (True, False):
        pair = await make_pair(6)
        group, attempts = make_group(pair.source, partitions=1), 0
        for until_seen in (3, 3, 6):
            handler = Handler(3)
            seen = lambda h=handler, n=until_seen: n in h.seen  # noqa: E731
            await run(group, handler, pair.letter(3, 3600), seen, auto_commit=auto_commit)
            attempts += handler.seen.count(3)
            if until_seen == 3:
                assert await positions(group) == [3 if auto_commit else 1]
        assert attempts == 3
        [letter] = await pair.stored("dead")
        assert letter.headers["Dead-Letter-Attempts"] == "3"


async def test_a_letter_is_stored_once_if_its_position_was_not(make_pair: MakePair, make_group: MakeGroup) -> None:
    """The next owner handles the message again, and stores the same letter, which the server drops."""
    pair = await make_pair(3)
    for _ in range(2):
        handler, group = Handler(2), make_group(pair.source, partitions=1)
        await run(group, handler, pair.letter(1), lambda h=handler: 3 in h.seen, auto_commit=False)
        assert handler.seen == [1, 2, 3]
    assert len(await pair.stored("dead")) == 1


async def test_a_letter_that_cannot_be_stored_ends_the_member(
    make_pair: MakePair, make_group: MakeGroup, js: JetStreamContext
) -> None:
    pair = await make_pair(3, max_msgs=1, discard="new")
    await js.publish(f"{pair.target}.x", b"")
    group, handler = make_group(pair.source, partitions=1), Handler(2)
    text = rf"input 2 of stream '{pair.source}' failed .*'{pair.target}.dead'.*stays"
    with pytest.raises(errors.ServerError, match=text):
        await run(group, handler, pair.letter(1), lambda: 3 in handler.seen)
    assert handler.seen == [1, 2]
    assert await positions(group) == [2]


async def test_subjects_that_cannot_have_dead_letters_are_refused(
    make_stream: Make, make_group: MakeGroup, js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    source, other, copy = await make_stream(messages=3), await make_stream(), stream_name()
    await js.add_stream(name=copy, sources=[StreamSource(name=other)], allow_direct=True)
    mismatch = errors.StreamConfigMismatchError
    cases: list[tuple[str, str, type[Exception], str]] = [
        (source, f"{source}.dead", ValueError, "would read each dead letter of its own"),
        (copy, f"{other}.dead", ValueError, "would read each dead letter of its own"),
        (source, stream_name(), mismatch, "no stream stores subject"),
        (source, f"{await make_stream(max_msgs_per_subject=1)}.dead", mismatch, "max_msgs_per_subject"),
        (source, f"{await make_stream(retention='interest')}.dead", mismatch, "interest"),
        (source, f"{await make_stream(no_ack=True)}.dead", mismatch, "no_ack"),
    ]
    for number, (stream, subject, error, text) in enumerate(cases):
        async with make_group(stream, partitions=1, name=f"g{number}").join() as member:
            with pytest.raises(error, match=text):
                await member.run(lambda _: pytest.fail("it handles a message"), dead_letter=DeadLetter(subject))
    async with make_group(source, partitions=1, subject=f"{source}.0").join() as member:
        with pytest.raises(TypeError, match="dead_letter must be a DeadLetter"):
            await member.run(print, dead_letter="x")  # type: ignore[arg-type]
        assert isinstance(member, Member)
        running = asyncio.ensure_future(member.run(lambda _: None, dead_letter=DeadLetter(f"{source}.dead")))
        await until(lambda: member.partitions)
        member.stop()
        await running


async def test_what_is_no_failure_of_the_handler(make_pair: MakePair, make_group: MakeGroup) -> None:
    """A `FencedError` of a commit, and a cancellation; one that the handler makes by itself is a failure."""
    pair = await make_pair(3)
    dead_letter, group = pair.letter(2), make_group(pair.source, partitions=1)
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


async def test_a_letter_that_was_dropped_is_stored_again(
    make_pair: MakePair, make_group: MakeGroup, js: JetStreamContext
) -> None:
    """Its message id would be a duplicate: then the message would be passed without a letter."""
    pair = await make_pair(2)
    group = make_group(pair.source, partitions=1)
    for turn in (1, 2):
        handler = Handler(1)
        await run(group, handler, pair.letter(1), lambda h=handler: 2 in h.seen)
        [stored] = await pair.stored("dead")
        assert stored.data == b"1", turn
        assert await drop(js, pair.target, [stored.seq]) == 1
        await group.reset(First())
