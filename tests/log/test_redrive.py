"""Dead letters are listed, handed back to their streams once, and dropped."""

import asyncio
import contextlib
import json
import random
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import RetentionPolicy, StorageType, StreamSource, SubjectTransform
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from jetstream_ext import DirectGet, StoredMsg, errors
from jetstream_ext.log import (
    DeadLetter,
    Last,
    LogReader,
    OffsetStore,
    Redriven,
    dead_letters,
    drop,
    exactly_once,
    redrive,
)

sys.path.insert(0, str(Path(__file__).parent))

from redrive_wire import Die, Frame, Wires, headers_of, send

Make = Callable[..., Awaitable[str]]
Bury = Callable[..., Awaitable[tuple[str, str, str]]]

FENCE = "Nats-Expected-Last-Subject-Sequence"


async def arrives_late(js: JetStreamContext, frame: Frame) -> None:
    """Let a copy arrive after the duplicate window; it is refused by its fence."""

    async def arrive() -> None:
        async with asyncio.timeout(60):
            while (await js.publish(frame.subject, frame.payload, headers=headers_of(frame))).duplicate:
                await asyncio.sleep(0.1)

    with pytest.raises(APIError) as refused:
        await arrive()
    assert refused.value.err_code == errors.ErrorCode.WRONG_LAST_SEQUENCE


async def stored(js: JetStreamContext, stream: str, subject: str | None = None) -> list[StoredMsg]:
    return [it async for it in DirectGet(js, stream).scan(subject=subject)]


async def payloads(js: JetStreamContext, stream: str) -> list[bytes]:
    return [it.data for it in await stored(js, stream)]


async def list_sequences(js: JetStreamContext, stream: str, dead: str) -> list[int]:
    return [letter.message.seq async for letter in dead_letters(js, stream, dead)]


async def bury_more(js: JetStreamContext, source: str, stream: str, dead: str, **start: Any) -> None:
    """Make dead letters of the inputs of another stream, or of later ones."""

    def fail(_: StoredMsg) -> None:
        raise ZeroDivisionError

    letters = DeadLetter(dead, attempts=1, backoff=0)
    reader = LogReader(js, source, **start)
    await exactly_once(reader, stream, fail, name="more", prefix=f"{stream}.at", dead_letter=letters)


async def update(js: JetStreamContext, stream: str, **config: Any) -> None:
    await js.update_stream((await js.stream_info(stream)).config.evolve(**config))


async def move_subjects(js: JetStreamContext, source: str, to: str) -> None:
    """Let another stream store the subjects of a stream."""
    await update(js, source, subjects=[f"{source}.unused"])
    await js.add_stream(name=to, subjects=[f"{source}.0", f"{source}.1", f"{source}.2"], allow_direct=True)


async def test_dead_letters_are_listed_with_their_origin(js: JetStreamContext, bury: Bury) -> None:
    stream, dead, source = await bury(3)
    await js.publish(dead, b"no letter")
    found = [it async for it in dead_letters(js, stream, dead)]
    assert [it.data for it in found] == [b"0", b"1", b"2"]
    assert [(it.stream, it.subject, it.seq, it.attempts, it.worker) for it in found] == [
        (source, f"{source}.{n % 2}", n + 1, 1, "w") for n in range(3)
    ]
    assert found[0].error == "ZeroDivisionError: no"
    assert ("Kind", "test") in found[0].headers
    inputs = await stored(js, source)
    assert abs((found[0].time - inputs[0].time).total_seconds()) < 0.001
    assert found[0].time < datetime.now(UTC)
    assert {(it.cut, it.complete) for it in found} == {((), True)}


async def test_redrive_hands_each_letter_back_once(js: JetStreamContext, bury: Bury, offsets: OffsetStore) -> None:
    stream, dead, source = await bury(5)
    await js.publish(dead, b"no letter")
    done = await redrive(js, stream, dead, offsets=offsets)
    assert (done.sent, done.found, done.left) == (5, 0, 1)
    found = (await stored(js, source))[5:]
    assert [(it.subject, it.data) for it in found] == [(f"{source}.{n % 2}", b"%d" % n) for n in range(5)]
    assert {it.headers["Kind"] for it in found} == {"test"}
    assert [it.data for it in await stored(js, stream, dead)] == [b"no letter"]
    assert (await redrive(js, stream, dead, offsets=offsets)).sent == 0


async def test_more_letters_than_are_read_at_once(js: JetStreamContext, bury: Bury, offsets: OffsetStore) -> None:
    stream, dead, source = await bury(130)
    assert (await redrive(js, stream, dead, offsets=offsets, max_messages=110)).sent == 110
    assert (await redrive(js, stream, dead, offsets=offsets)).sent == 20
    assert await payloads(js, source) == 2 * [b"%d" % n for n in range(130)]


async def test_some_letters(js: JetStreamContext, bury: Bury, offsets: OffsetStore) -> None:
    stream, dead, source = await bury(4)
    letters = await list_sequences(js, stream, dead)
    assert (await redrive(js, stream, dead, seqs=[letters[2], letters[0]], offsets=offsets)).sent == 2
    assert (await payloads(js, source))[4:] == [b"0", b"2"]
    assert (await redrive(js, stream, f"{stream}.other", seqs=letters, offsets=offsets)).sent == 0
    assert (await redrive(js, stream, dead, seqs=letters, max_messages=1, offsets=offsets)).sent == 1
    assert (await payloads(js, source))[6:] == [b"1"]


async def test_a_letter_that_was_cut_stays(js: JetStreamContext, bury: Bury, offsets: OffsetStore) -> None:
    stream, dead, source = await bury(2)
    [letter, _] = [it async for it in dead_letters(js, stream, dead)]
    cut = dict(letter.message.headers) | {"Dead-Letter-Cut": "data, headers"}
    await js.publish(dead, b"", headers=cut)
    assert await redrive(js, stream, dead, offsets=offsets) == Redriven(sent=2, found=0, left=1)
    [left] = [it async for it in dead_letters(js, stream, dead)]
    assert (left.cut, left.complete, left.seq) == (("data", "headers"), False, letter.seq)
    assert (await payloads(js, source))[2:] == [b"0", b"1"]


@pytest.mark.parametrize("window", [0.1, 120.0])
async def test_calls_that_end_anywhere_hand_each_letter_back_once(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, window: float
) -> None:
    """A cancellation acts as a kill. Also when the server has forgotten the ids of the messages."""
    rng, count = random.Random(7), 40
    stream, dead, source = await bury(count, duplicate_window=window)
    ended = 0
    while await list_sequences(js, stream, dead):
        call = asyncio.ensure_future(redrive(js, stream, dead, offsets=offsets, max_messages=rng.randint(1, 4)))
        await asyncio.wait({call}, timeout=rng.uniform(0.0, 0.001 * (4 + ended)))
        ended += not call.done()
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        if window < 1 and rng.random() < 0.2:
            await asyncio.sleep(2 * window)
    assert ended > 5
    assert (await payloads(js, source))[count:] == [b"%d" % n for n in range(count)]


async def test_a_call_that_died_is_ended_by_the_next_one(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, die: Die
) -> None:
    """Behind the window, also if it sent nothing, or to a stream that had no messages."""
    failures: list[str] = []
    for copies, to_new in ((0, False), (2, False), (3, False), (0, True), (1, True), (2, True)):
        stream, dead, source = await bury(3, duplicate_window=0.1)
        to_stream, before = source, 3
        if to_new:
            to_stream, before = f"{source}NEW", 0
            await move_subjects(js, source, to_stream)
        await die(stream, dead, copies, to_stream=to_stream)
        await asyncio.sleep(0.3)
        done = await redrive(js, stream, dead, offsets=offsets, to_stream=to_stream)
        there = (await payloads(js, to_stream))[before:]
        expected = Redriven(3 - copies, min(1, copies), 0)
        if done != expected or there != [b"0", b"1", b"2"] or await stored(js, stream, dead):
            failures.append(f"{copies} copies, {to_new=}: {done}, {there}")
    assert not failures, "\n".join(failures)


async def test_several_calls_at_the_same_time(js: JetStreamContext, bury: Bury, offsets: OffsetStore) -> None:
    for again in ((False, False, False), (False, True), (True, True)):
        stream, dead, source = await bury(30)
        calls = (redrive(js, stream, dead, offsets=OffsetStore(js, offsets.bucket), again=it) for it in again)
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert all(not isinstance(it, BaseException) or isinstance(it, errors.FencedError) for it in done), again
        await redrive(js, stream, dead, offsets=offsets)
        assert sorted(map(int, await payloads(js, source))) == sorted(2 * list(range(30))), again


async def test_a_suspended_call_sends_nothing_that_another_one_has_sent(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, wires: Wires, die: Die
) -> None:
    """It has read the letter, but not published it; the other call has not deleted it yet, and the window is over."""
    stream, dead, source = await bury(3, duplicate_window=0.1)

    async def let_another_one_send(number: int) -> None:
        if number == 1:
            await die(stream, dead, 1)
            await asyncio.sleep(0.3)

    wire = await wires(let_another_one_send)
    with pytest.raises(errors.FencedError):
        await redrive(wire.js, stream, dead, offsets=OffsetStore(wire.js, offsets.bucket))
    assert await redrive(js, stream, dead, offsets=offsets) == Redriven(sent=2, found=1, left=0)
    assert (await payloads(js, source))[3:] == [b"0", b"1", b"2"]


async def test_what_is_not_known_is_an_error(js: JetStreamContext, bury: Bury, offsets: OffsetStore, die: Die) -> None:
    """The letter stays, the others are handed back, and only a call that says so sends it again."""
    stream, dead, source = await bury(3, duplicate_window=0.1)
    first = (await list_sequences(js, stream, dead))[0]
    await die(stream, dead, 1)
    await js.purge_stream(source)
    for others in (2, 0):  # the first call does not make the second one forget it
        with pytest.raises(errors.HistoryUnavailableError, match=rf"{first} .*again=True.* {others} others$") as caught:
            await redrive(js, stream, dead, offsets=offsets)
        assert caught.value.keys == (f"{source}.0",)
        assert await payloads(js, source) == [b"1", b"2"]
        assert await list_sequences(js, stream, dead) == [first]
    await asyncio.sleep(0.3)
    assert await redrive(js, stream, dead, offsets=offsets, again=True) == Redriven(sent=1, found=0, left=0)
    assert await payloads(js, source) == [b"1", b"2", b"0"]


async def test_a_call_that_sends_again_and_dies_is_ended_by_the_next_one(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, die: Die
) -> None:
    for copies in (0, 1):
        stream, dead, source = await bury(1, duplicate_window=0.1)
        await die(stream, dead, 1)
        await js.purge_stream(source)
        await js.publish(f"{source}.0", b"new")
        await asyncio.sleep(0.3)
        await die(stream, dead, copies, again=True)
        assert await redrive(js, stream, dead, offsets=offsets) == Redriven(1 - copies, copies, 0)
        assert await payloads(js, source) == [b"new", b"0"]


async def test_a_letter_stays_while_its_target_takes_it_for_a_copy_that_is_gone(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, die: Die
) -> None:
    stream, dead, source = await bury(1)
    await die(stream, dead, 1)
    await js.purge_stream(source)
    with pytest.raises(errors.HistoryUnavailableError, match="until its duplicate_window is over"):
        await redrive(js, stream, dead, offsets=offsets, again=True)
    assert await payloads(js, source) == []
    assert len(await list_sequences(js, stream, dead)) == 1


async def test_letters_in_doubt_do_not_count_for_the_maximum(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, die: Die
) -> None:
    stream, dead, source = await bury(1)
    await die(stream, dead, 1)
    await js.purge_stream(source)
    await js.publish(f"{source}.0", b"more")
    await bury_more(js, source, stream, dead, start=Last())
    seqs = await list_sequences(js, stream, dead)
    with pytest.raises(errors.HistoryUnavailableError, match=r"has handed back 1 other$"):
        await redrive(js, stream, dead, offsets=offsets, seqs=seqs, max_messages=1)
    assert await payloads(js, source) == [b"more", b"more"]


async def test_a_target_whose_messages_are_consumed_leaves_letters_in_doubt(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, wires: Wires
) -> None:
    """A copy that was consumed does not refuse an attempt that arrives later."""
    stream, dead, source = await bury(2)
    queue = f"{source}_queue"
    await update(js, source, subjects=[f"{source}.unused"])
    await js.add_stream(
        name=queue, subjects=[f"{source}.0", f"{source}.1"], retention=RetentionPolicy.WORK_QUEUE, allow_direct=True
    )

    async def lose_the_first(number: int) -> bool:
        return number > 1

    wire = await wires(lose_the_first)
    call = redrive(wire.js, stream, dead, offsets=OffsetStore(wire.js, offsets.bucket), to_stream=queue, timeout=1.0)
    with pytest.raises(errors.HistoryUnavailableError, match=r"retention 'workqueue'.* has handed back 1 other$"):
        await call
    assert await payloads(js, queue) == [b"1"]
    assert (await redrive(js, stream, dead, offsets=offsets, to_stream=queue, again=True)).sent == 1


async def test_a_letter_of_unknown_outcome_is_found_behind_a_refusal(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, wires: Wires
) -> None:
    """An attempt without an answer is stored; what refuses the next one does not make the call forget it."""
    stream, dead, source = await bury(2, duplicate_window=0.1)

    async def lose_and_refuse(number: int) -> bool:
        if number == 2:
            await send(js, wire.copies[0])
            await asyncio.sleep(0.3)
            await update(js, source, max_msg_size=1)
        return number > 1

    wire = await wires(lose_and_refuse)
    with pytest.raises(errors.ServerError, match="was refused, and stays"):
        await redrive(wire.js, stream, dead, offsets=OffsetStore(wire.js, offsets.bucket), timeout=1.0)
    await update(js, source, max_msg_size=-1)
    assert await redrive(js, stream, dead, offsets=offsets) == Redriven(sent=1, found=1, left=0)
    assert (await payloads(js, source))[2:] == [b"0", b"1"]


async def test_an_attempt_that_arrives_late_is_refused(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, wires: Wires, die: Die
) -> None:
    """Beyond the duplicate window: of this call, which went on at another server, or of one that died."""
    stream, dead, source = await bury(3, duplicate_window=0.1)

    async def lose_the_first(number: int) -> bool:
        return number > 1

    wire = await wires(lose_the_first)
    call = redrive(wire.js, stream, dead, offsets=OffsetStore(wire.js, offsets.bucket), timeout=1.0)
    assert await call == Redriven(sent=3, found=0, left=0)
    await arrives_late(js, wire.copies[0])
    assert (await payloads(js, source))[3:] == [b"0", b"1", b"2"]

    stream, dead, source = await bury(3, duplicate_window=0.1)
    wire = await die(stream, dead, 0)
    assert (await redrive(js, stream, dead, offsets=offsets)).sent == 3
    await arrives_late(js, wire.copies[0])
    assert (await payloads(js, source))[3:] == [b"0", b"1", b"2"]


async def test_a_late_attempt_is_stored_if_the_target_has_removed_the_copy(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, die: Die
) -> None:
    """This limit is documented: beyond the window only the copy, which is the newest message of its subject, refuses it."""
    stream, dead, source = await bury(1, duplicate_window=0.1)
    late = (await die(stream, dead, 0)).copies[0]
    assert (await redrive(js, stream, dead, offsets=offsets)).sent == 1
    await js.delete_msg(source, 2)
    await asyncio.sleep(0.3)
    await send(js, late)
    assert [it.seq for it in await stored(js, source)] == [1, 3]


async def test_an_attempt_that_arrives_behind_the_look_of_the_next_call_is_found(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, wires: Wires, die: Die
) -> None:
    """A refusal by the fence makes the call look again. Its message id alone would not help beyond the window."""
    for window in (0.1, 120.0):
        stream, dead, source = await bury(3, duplicate_window=window)
        late = (await die(stream, dead, 0)).copies[0]

        async def arrive(number: int, late: Frame = late) -> None:
            if number == 1:
                await send(js, late)
                await asyncio.sleep(0.3)

        wire = await wires(arrive)
        done = await redrive(wire.js, stream, dead, offsets=OffsetStore(wire.js, offsets.bucket))
        assert done == Redriven(sent=2, found=1, left=0)
        assert (await payloads(js, source))[3:] == [b"0", b"1", b"2"]


async def test_other_producers_on_the_subject(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, wires: Wires
) -> None:
    """A letter is never sent without its fence: it is sent again, and after `patience` it stays."""
    stream, dead, source = await bury(3)
    busy = True

    async def interfere(number: int) -> None:
        if busy or number % 4:
            await js.publish(f"{source}.0", b"other")

    wire = await wires(interfere)
    store = OffsetStore(wire.js, offsets.bucket)
    with pytest.raises(
        errors.WrongLastSequenceError, match=r"was refused, and stays .*other producers store on its subject"
    ):
        await redrive(wire.js, stream, dead, offsets=store, patience=1.0)
    assert len(await list_sequences(js, stream, dead)) == 3
    busy = False
    assert (await redrive(wire.js, stream, dead, offsets=store)).sent == 3
    assert all(FENCE in headers_of(frame) for frame in wire.copies)
    assert [it for it in await payloads(js, source) if it != b"other"] == 2 * [b"0", b"1", b"2"]


async def test_a_stream_of_letters_that_is_created_again_loses_none(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, wires: Wires
) -> None:
    """Its messages have the sequences of the letters that a call has sent, and has not deleted yet."""
    stream, dead, source = await bury(2)
    config = (await js.stream_info(stream)).config
    before = [it.seq for it in await stored(js, stream, dead)]

    async def create_again(number: int) -> None:
        if number == 2:
            await js.delete_stream(stream)
            await js.add_stream(config)
            for seq in range(1, max(before) + 1):
                await js.publish(dead if seq in before else f"{stream}.other", b"new")

    wire = await wires(create_again)
    with pytest.raises(errors.StreamRecreatedError):
        await redrive(wire.js, stream, dead, offsets=OffsetStore(wire.js, offsets.bucket))
    assert [it.data for it in await stored(js, stream, dead)] == [b"new", b"new"]
    assert await redrive(js, stream, dead, offsets=offsets) == Redriven(0, 0, 2)
    assert [it.data for it in await stored(js, stream, dead)] == [b"new", b"new"]
    assert (await payloads(js, source))[2:] == [b"0", b"1"]


async def test_a_target_that_cannot_be_read_holds_up_no_others(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, wires: Wires, die: Die
) -> None:
    stream, dead, source = await bury(1)
    await die(stream, dead, 1)
    other = f"{source}_other"
    await js.add_stream(name=other, subjects=[other], allow_direct=True)
    await js.publish(other, b"other")
    await bury_more(js, other, stream, dead)
    wire = await wires()
    wire.lost = (f"STREAM.INFO.{source}", f"STREAM.MSG.GET.{source}")
    for again in (False, True):
        with pytest.raises(errors.HistoryUnavailableError, match=r"read.*repeat the call"):
            await redrive(
                wire.js,
                stream,
                dead,
                offsets=OffsetStore(wire.js, offsets.bucket),
                timeout=1.0,
                patience=2.0,
                again=again,
            )
        assert await payloads(js, other) == [b"other", b"other"]
    assert await redrive(js, stream, dead, offsets=offsets, again=True) == Redriven(sent=0, found=1, left=0)


async def test_a_leader_that_may_have_a_successor_is_not_believed(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, wires: Wires, die: Die
) -> None:
    """It is cut off from the others and answers what it had when it was. They may have the letter."""
    stream, dead, source = await bury(1)
    await die(stream, dead, 0)
    wire = await wires()

    async def make_uncertain(frame: Frame) -> Frame:
        if b"io.nats.jetstream.api.v1.stream_info_response" not in frame.payload:
            return frame
        answer = json.loads(frame.payload)
        if answer["config"]["name"] == source:
            answer["cluster"] = {"leader": "a", "replicas": [{"name": it, "active": 10**10} for it in "bc"]}
        return replace(frame, payload=json.dumps(answer).encode())

    wire.proxy.on_delivery = make_uncertain
    with pytest.raises(errors.HistoryUnavailableError, match=r"majority.*repeat the call"):
        await redrive(wire.js, stream, dead, offsets=OffsetStore(wire.js, offsets.bucket), patience=2.0)
    assert await payloads(js, source) == [b"0"]
    assert (await redrive(js, stream, dead, offsets=offsets)).sent == 1


async def test_what_would_repeat_letters_later_is_refused(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, make_stream: Make, stream_name: Callable[[], str]
) -> None:
    stream, dead, source = await bury(1)

    async def refuses(text: str, called: Awaitable[Any]) -> None:
        with pytest.raises(errors.StreamConfigMismatchError, match=text):
            await called

    for config in ({"ttl": 60}, {"storage": StorageType.MEMORY}):
        bucket = stream_name()
        await js.create_key_value(bucket=bucket, **config)  # type: ignore[arg-type]
        await refuses("may lose what a redrive has noted", redrive(js, stream, dead, offsets=OffsetStore(js, bucket)))
    mirror = stream_name()
    await js.add_stream(name=mirror, mirror=StreamSource(name=stream), allow_direct=True)
    denies = await make_stream(deny_delete=True)
    for name, text in ((mirror, "is a mirror"), (denies, "deny_delete")):
        await refuses(text, redrive(js, name, dead, offsets=offsets))
        await refuses(text, drop(js, name, [1]))
    await update(js, source, no_ack=True)
    await refuses("no_ack", redrive(js, stream, dead, offsets=offsets))
    transform = SubjectTransform(src=f"{source}.0", dest=f"{source}.moved")
    await update(js, source, no_ack=False, subject_transform=transform)
    await refuses("subject_transform", redrive(js, stream, dead, offsets=offsets))
    transform = SubjectTransform(src=f"{source}.2", dest=f"{source}.moved")
    await update(js, source, allow_direct=False, subject_transform=transform)
    assert (await redrive(js, stream, dead, offsets=offsets)).sent == 1


async def test_the_subjects_were_moved_to_another_stream(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, die: Die
) -> None:
    """A letter that was sent before is found where it is; what is not found there goes elsewhere only on request."""
    stream, dead, source = await bury(1)
    await die(stream, dead, 1)
    await move_subjects(js, source, f"{source}_new")
    assert await redrive(js, stream, dead, offsets=offsets) == Redriven(sent=0, found=1, left=0)
    assert await payloads(js, f"{source}_new") == []

    stream, dead, source = await bury(2)
    await die(stream, dead, 0)
    new = f"{source}_new"
    await move_subjects(js, source, new)
    with pytest.raises(errors.ServerError, match=rf"was refused, and stays .*goes to stream '{source}'"):
        await redrive(js, stream, dead, offsets=offsets)
    with pytest.raises(
        errors.HistoryUnavailableError, match=f"now belongs to stream '{new}'.* has handed back 1 other$"
    ):
        await redrive(js, stream, dead, offsets=offsets, to_stream=new)
    await js.delete_stream(source)
    with pytest.raises(errors.HistoryUnavailableError):
        await redrive(js, stream, dead, offsets=offsets, to_stream=new)
    assert (await redrive(js, stream, dead, offsets=offsets, to_stream=new, again=True)).sent == 1
    assert await payloads(js, new) == [b"1", b"0"]


async def test_a_letter_that_was_sent_to_another_stream_is_in_doubt(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, die: Die
) -> None:
    stream, dead, source = await bury(1)
    await die(stream, dead, 0)
    new = f"{source}_new"
    await js.add_stream(name=new, subjects=[f"{new}.>"], allow_direct=True)
    with pytest.raises(errors.HistoryUnavailableError, match=f"goes to stream '{new}' now"):
        await redrive(js, stream, dead, offsets=offsets, to_stream=new)
    assert (await redrive(js, stream, dead, offsets=offsets)).sent == 1


@pytest.mark.parametrize("created_again", [False, True])
async def test_the_target_was_deleted(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, die: Die, created_again: bool
) -> None:
    """What it had is not known."""
    stream, dead, source = await bury(1)
    await die(stream, dead, 1)
    config = (await js.stream_info(source)).config
    await js.delete_stream(source)
    if created_again:
        await js.add_stream(config)
        for number in range(10):
            await js.publish(f"{source}.0", b"new %d" % number)
    for _ in range(2):
        with pytest.raises(errors.HistoryUnavailableError, match=r"has handed back 0 others$"):
            await redrive(js, stream, dead, offsets=offsets)
    assert len(await list_sequences(js, stream, dead)) == 1
    assert (await redrive(js, stream, f"{stream}.other", offsets=offsets)).sent == 0, "it is not asked for"
    if not created_again:
        with pytest.raises(NotFoundError):
            await redrive(js, stream, dead, offsets=offsets, again=True)
        await js.add_stream(config)
    assert (await redrive(js, stream, dead, offsets=offsets, again=True)).sent == 1
    assert (await payloads(js, source))[-1:] == [b"0"]
    assert await redrive(js, stream, dead, offsets=offsets) == Redriven(0, 0, 0)


async def test_a_letter_that_is_refused_stays_with_those_behind_it(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore
) -> None:
    stream, dead, source = await bury(4)
    await update(js, source, subjects=[f"{source}.0"])
    with pytest.raises(NoStreamResponseError):
        await redrive(js, stream, dead, offsets=offsets, timeout=10, patience=3.0)
    assert [it.data for it in await stored(js, stream, dead)][-3:] == [b"1", b"2", b"3"]
    await js.purge_stream(source)  # the call knows that the letter was not stored
    await update(js, source, subjects=[f"{source}.>"])
    await redrive(js, stream, dead, offsets=offsets)
    assert await payloads(js, source) == [b"1", b"2", b"3"]


async def test_drop_deletes_dead_letters_only(js: JetStreamContext, bury: Bury) -> None:
    stream, dead, _ = await bury(3)
    other = (await js.publish(dead, b"no letter")).seq
    letters = await list_sequences(js, stream, dead)
    with pytest.raises(ValueError, match="is no dead letter"):
        await drop(js, stream, [letters[0], other])
    assert await drop(js, stream, letters[:2]) == 2
    assert await drop(js, stream, letters[:2]) == 0
    assert await list_sequences(js, stream, dead) == letters[2:]


async def test_a_letter_stays_noted_until_it_is_sent(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, die: Die
) -> None:
    """A call that sends something else does not make the next one forget to look."""
    stream, dead, source = await bury(3, duplicate_window=0.1)
    late = (await die(stream, dead, 0)).copies[0]
    last = (await list_sequences(js, stream, dead))[-1]
    assert await redrive(js, stream, f"{stream}.other", offsets=offsets) == Redriven(0, 0, 0)
    assert (await redrive(js, stream, dead, offsets=offsets, seqs=[last])).sent == 1
    with pytest.raises(APIError):  # the letter that was sent has its subject
        await send(js, late)
    assert await redrive(js, stream, dead, offsets=offsets) == Redriven(sent=2, found=0, left=0)

    stream, dead, source = await bury(3, duplicate_window=0.1)
    late = (await die(stream, dead, 0)).copies[0]
    second = (await list_sequences(js, stream, dead))[1]
    assert (await redrive(js, stream, dead, offsets=offsets, seqs=[second])).sent == 1
    await send(js, late)
    await asyncio.sleep(0.3)
    assert await redrive(js, stream, dead, offsets=offsets) == Redriven(sent=1, found=1, left=0)
    assert (await payloads(js, source))[3:] == [b"1", b"0", b"2"]
