"""Dead letters are listed, handed back to their streams once, and dropped."""

import asyncio
import contextlib
import random
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import RetentionPolicy, StorageType, StreamSource, SubjectTransform
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from jetstream_ext import DirectGet, StoredMsg, errors
from jetstream_ext.log import OffsetStore, Redriven, dead_letters, drop, redrive

sys.path.insert(0, str(Path(__file__).parent))

from redrive_letters import Bury, Frame, headers_of, send


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


async def test_dead_letters_are_listed_with_their_origin(js: JetStreamContext, bury: Bury) -> None:
    letters = await bury(3)
    await js.publish(letters.dead, b"no letter")
    found = [it async for it in dead_letters(js, letters.stream, letters.dead)]
    inputs = await stored(js, letters.source)
    assert [(it.data, it.stream, it.subject, it.seq, it.attempts, it.worker) for it in found] == [
        (it.data, letters.source, it.subject, it.seq, 1, "w") for it in inputs
    ]
    assert found[0].error == "ZeroDivisionError: no"
    assert ("Kind", "test") in found[0].headers
    assert abs((found[0].time - inputs[0].time).total_seconds()) < 0.001
    assert found[0].time < datetime.now(UTC)
    assert {(it.cut, it.complete) for it in found} == {((), True)}


async def test_redrive_hands_each_letter_back_once(js: JetStreamContext, bury: Bury) -> None:
    """A message that is no letter stays, and so does one that was cut."""
    letters = await bury(5)
    [letter, *_] = [it async for it in dead_letters(js, letters.stream, letters.dead)]
    await js.publish(letters.dead, b"no letter")
    await js.publish(letters.dead, b"", headers=dict(letter.message.headers) | {"Dead-Letter-Cut": "data, headers"})
    assert await letters.redrive() == Redriven(sent=5, found=0, left=2)
    found = (await stored(js, letters.source))[5:]
    assert [(it.subject, it.data) for it in found] == [(f"{letters.source}.{n % 2}", b"%d" % n) for n in range(5)]
    assert {it.headers["Kind"] for it in found} == {"test"}
    assert [it.data for it in await stored(js, letters.stream, letters.dead)] == [b"no letter", b""]
    [left] = [it async for it in dead_letters(js, letters.stream, letters.dead)]
    assert (left.cut, left.complete, left.seq) == (("data", "headers"), False, letter.seq)
    assert await letters.redrive() == Redriven(0, 0, 2)


async def test_more_letters_than_are_read_at_once(bury: Bury) -> None:
    letters = await bury(130)
    assert (await letters.redrive(max_messages=110)).sent == 110
    assert (await letters.redrive()).sent == 20
    assert await letters.redriven() == [b"%d" % n for n in range(130)]


async def test_some_letters(bury: Bury) -> None:
    letters = await bury(4)
    seqs = await letters.seqs()
    assert (await letters.redrive(seqs=[seqs[2], seqs[0]])).sent == 2
    assert await letters.redriven() == [b"0", b"2"]
    assert (await letters.redrive(subject=f"{letters.stream}.other", seqs=seqs)).sent == 0
    assert (await letters.redrive(seqs=seqs, max_messages=1)).sent == 1
    assert await letters.redriven() == [b"0", b"2", b"1"]


@pytest.mark.parametrize("window", [0.1, 120.0])
async def test_calls_that_end_anywhere_hand_each_letter_back_once(
    js: JetStreamContext, bury: Bury, window: float
) -> None:
    """A cancellation acts as a kill. Others store on the subjects, and the server may have forgotten the message ids."""
    rng, ended = random.Random(7), 0
    letters = await bury(40, duplicate_window=window)
    while await letters.seqs():
        call = asyncio.ensure_future(letters.redrive(max_messages=rng.randint(1, 4)))
        await asyncio.wait({call}, timeout=rng.uniform(0.0, 0.001 * (4 + ended)))
        ended += not call.done()
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        if rng.random() < 0.3:
            await js.publish(f"{letters.source}.{rng.randint(0, 1)}", b"other")
        if window < 1 and rng.random() < 0.2:
            await letters.forget_ids()
    assert ended > 5
    assert [it for it in await letters.redriven() if it != b"other"] == [b"%d" % n for n in range(40)]


async def test_a_call_that_died_is_ended_by_the_next_one(bury: Bury) -> None:
    """Behind the window, also if it sent nothing, or to a stream that had no messages."""
    failures: list[str] = []
    for copies, to_new in ((0, False), (2, False), (3, False), (0, True), (1, True), (2, True)):
        letters = await bury(3)
        to_stream = await letters.move_subjects() if to_new else ""
        await letters.die(copies, to_stream=to_stream or None)
        await letters.forget_ids()
        done, there = await letters.redrive(to_stream=to_stream or None), await letters.redriven(to_stream)
        if done != Redriven(3 - copies, min(1, copies), 0) or there != [b"0", b"1", b"2"] or await letters.seqs():
            failures.append(f"{copies} copies, {to_new=}: {done}, {there}")
    assert not failures, "\n".join(failures)


async def test_a_letter_stays_noted_until_it_is_sent(js: JetStreamContext, bury: Bury) -> None:
    """A call that sends something else does not make the next one forget to look."""
    letters = await bury(3)
    late = (await letters.die(0)).copies[0]
    assert await letters.redrive(subject=f"{letters.stream}.other") == Redriven(0, 0, 0)
    assert (await letters.redrive(seqs=(await letters.seqs())[1:2])).sent == 1
    await send(js, late)
    await letters.forget_ids()
    assert await letters.redrive() == Redriven(sent=1, found=1, left=0)
    assert await letters.redriven() == [b"1", b"0", b"2"]


async def test_several_calls_at_the_same_time(bury: Bury) -> None:
    for again in ((False, False, False), (False, True), (True, True)):
        letters = await bury(30)
        done = await asyncio.gather(*(letters.redrive(again=it) for it in again), return_exceptions=True)
        assert all(not isinstance(it, BaseException) or isinstance(it, errors.FencedError) for it in done), again
        await letters.redrive()
        assert sorted(map(int, await letters.redriven())) == list(range(30)), again


async def test_a_suspended_call_sends_nothing_that_another_one_has_sent(bury: Bury) -> None:
    """It has read the letter, but not published it; the other call has not deleted it yet, and the window is over."""
    letters = await bury(3)

    async def let_another_one_send(number: int) -> None:
        if number == 1:
            await letters.die(1)
            await letters.forget_ids()

    wire = await letters.wire(let_another_one_send)
    with pytest.raises(errors.FencedError):
        await letters.redrive(wire.js)
    assert await letters.redrive() == Redriven(sent=2, found=1, left=0)
    assert await letters.redriven() == [b"0", b"1", b"2"]


async def test_what_is_not_known_is_an_error(js: JetStreamContext, bury: Bury) -> None:
    """The letter stays with those behind it. `seqs` leaves it out, and only a call that says so sends it again."""

    async def remove_the_copy(source: str) -> None:
        await js.delete_msg(source, 4)

    async def create_again(source: str) -> None:
        config = (await js.stream_info(source)).config
        await js.delete_stream(source)
        await js.add_stream(config)
        for number in range(10):
            await js.publish(f"{source}.0", b"new %d" % number)

    for lose, why in (
        (js.purge_stream, "may have lost messages"),
        (create_again, "was created again"),
        (remove_the_copy, "has removed messages"),
    ):
        letters = await bury(3)
        first, second, third = await letters.seqs()
        await letters.die(1)
        await lose(letters.source)
        for _ in range(2):
            text = rf"{first} .*{why}.*again=True.* 0 others$"
            with pytest.raises(errors.HistoryUnavailableError, match=text) as caught:
                await letters.redrive()
            assert caught.value.keys == (f"{letters.source}.0",)
        assert (await letters.redrive(seqs=[third])).sent == 1
        with pytest.raises(errors.HistoryUnavailableError):  # the call before has not forgotten it
            await letters.redrive()
        assert await letters.seqs() == [first, second]
        await letters.forget_ids()
        assert await letters.redrive(again=True) == Redriven(sent=2, found=0, left=0)
        assert (await letters.redriven())[-3:] == [b"2", b"0", b"1"]


async def test_what_others_store_and_what_limits_remove_leaves_no_doubt(js: JetStreamContext, bury: Bury) -> None:
    """Also an attempt that arrives late then is refused."""
    letters = await bury(3)
    late = (await letters.die(0)).copies[0]
    await js.publish(f"{letters.source}.0", b"other")
    await js.purge_stream(letters.source, seq=3)
    assert await letters.redrive() == Redriven(sent=3, found=0, left=0)
    await arrives_late(js, late)
    assert await letters.redriven() == [b"other", b"0", b"1", b"2"]


async def test_a_call_that_sends_again_and_dies_is_ended_by_the_next_one(js: JetStreamContext, bury: Bury) -> None:
    for copies in (0, 1):
        letters = await bury(1)
        await letters.die(1)
        await js.purge_stream(letters.source)
        await letters.forget_ids()
        await letters.die(copies, again=True)
        assert await letters.redrive() == Redriven(1 - copies, copies, 0)
        assert await letters.redriven() == [b"0"]


async def test_a_copy_whose_note_is_lost_is_found_by_its_id(js: JetStreamContext, bury: Bury) -> None:
    """As long as the server takes another one for a duplicate."""
    letters = await bury(2, duplicate_window=120)
    await letters.die(1)
    await js.delete_key_value(letters.source)  # the bucket of the notes
    assert await letters.redrive() == Redriven(sent=1, found=1, left=0)
    assert await letters.redriven() == [b"0", b"1"]


async def test_a_letter_stays_while_its_target_takes_it_for_a_copy_that_is_gone(
    js: JetStreamContext, bury: Bury
) -> None:
    letters = await bury(1, duplicate_window=120)
    await letters.die(1)
    await js.purge_stream(letters.source)
    with pytest.raises(errors.RequestTimeoutError, match="until its duplicate_window is over"):
        await letters.redrive(again=True, patience=1.0)
    assert await letters.redriven() == []
    assert len(await letters.seqs()) == 1


async def test_a_target_whose_messages_are_consumed_leaves_letters_in_doubt(bury: Bury) -> None:
    """A copy that was consumed does not refuse an attempt that arrives later."""
    letters = await bury(2)
    queue = await letters.move_subjects(retention=RetentionPolicy.WORK_QUEUE)
    wire = await letters.wire_that_loses_the_first()
    with pytest.raises(errors.HistoryUnavailableError, match="retention 'workqueue'"):
        await letters.redrive(wire.js, to_stream=queue, timeout=1.0)
    assert await letters.redriven(queue) == []
    assert (await letters.redrive(to_stream=queue, again=True)).sent == 2


async def test_a_letter_of_unknown_outcome_is_found_behind_a_refusal(js: JetStreamContext, bury: Bury) -> None:
    """An attempt without an answer is stored; what refuses the next one does not make the call forget it."""
    letters = await bury(2)

    async def lose_and_refuse(number: int) -> bool:
        if number == 2:
            await send(js, wire.copies[0])
            await letters.forget_ids()
            await letters.update(max_msg_size=1)
        return number > 1

    wire = await letters.wire(lose_and_refuse)
    with pytest.raises(errors.ServerError, match="was refused, and stays"):
        await letters.redrive(wire.js, timeout=1.0)
    await letters.update(max_msg_size=-1)
    assert await letters.redrive() == Redriven(sent=1, found=1, left=0)
    assert await letters.redriven() == [b"0", b"1"]


async def test_an_attempt_that_arrives_late_is_refused(js: JetStreamContext, bury: Bury) -> None:
    """Beyond the duplicate window, unless the target has removed the copy: this limit is documented."""
    letters = await bury(1)
    wire = await letters.wire_that_loses_the_first()
    assert await letters.redrive(wire.js, timeout=1.0) == Redriven(sent=1, found=0, left=0)
    await arrives_late(js, wire.copies[0])
    assert await letters.redriven() == [b"0"]
    await js.delete_msg(letters.source, 2)
    await letters.forget_ids()
    await send(js, wire.copies[0])
    assert [it.seq for it in await stored(js, letters.source)] == [1, 3]


async def test_an_attempt_that_arrives_behind_the_look_of_the_next_call_is_found(
    js: JetStreamContext, bury: Bury
) -> None:
    """A refusal by the fence makes the call look again. Its message id alone would not help beyond the window."""
    for window in (0.1, 120.0):
        letters = await bury(3, duplicate_window=window)
        late = (await letters.die(0)).copies[0]

        async def arrive(number: int, late: Frame = late) -> None:
            if number == 1:
                await send(js, late)
                await letters.forget_ids()  # noqa: B023

        wire = await letters.wire(arrive)
        assert await letters.redrive(wire.js) == Redriven(sent=2, found=1, left=0)
        assert await letters.redriven() == [b"0", b"1", b"2"]


async def test_other_producers_on_the_subject(js: JetStreamContext, bury: Bury) -> None:
    """A letter is never sent without its fence: it is sent again, and after `patience` it stays."""
    letters = await bury(3)
    busy = True

    async def interfere(number: int) -> None:
        if busy or number % 4:
            await js.publish(f"{letters.source}.0", b"other")

    wire = await letters.wire(interfere)
    text = r"was refused, and stays .*other producers store on its subject"
    with pytest.raises(errors.WrongLastSequenceError, match=text):
        await letters.redrive(wire.js, patience=1.0)
    assert len(await letters.seqs()) == 3
    busy = False
    assert (await letters.redrive(wire.js)).sent == 3
    assert all("Nats-Expected-Last-Subject-Sequence" in headers_of(frame) for frame in wire.copies)
    assert [it for it in await letters.redriven() if it != b"other"] == [b"0", b"1", b"2"]


async def test_a_stream_of_letters_that_is_created_again_loses_none(js: JetStreamContext, bury: Bury) -> None:
    """Its messages have the sequences of the letters that a call has sent, and has not deleted yet."""
    letters = await bury(2)
    config, before = (await js.stream_info(letters.stream)).config, await letters.seqs()

    async def create_again(number: int) -> None:
        if number == 2:
            await js.delete_stream(letters.stream)
            await js.add_stream(config)
            for seq in range(1, max(before) + 1):
                await js.publish(letters.dead if seq in before else f"{letters.stream}.other", b"new")

    wire = await letters.wire(create_again)
    with pytest.raises(errors.StreamRecreatedError):
        await letters.redrive(wire.js)
    assert await letters.redrive() == Redriven(0, 0, 2)
    assert [it.data for it in await stored(js, letters.stream, letters.dead)] == [b"new", b"new"]
    assert await letters.redriven() == [b"0", b"1"]


async def test_a_target_that_cannot_be_read(bury: Bury) -> None:
    """Its letter stays, also with `again`."""
    letters = await bury(1)
    await letters.die(1)
    wire = await letters.wire()
    for lost in (f"STREAM.INFO.{letters.source}", f"STREAM.MSG.GET.{letters.source}"):
        wire.lost = lost
        with pytest.raises(errors.RequestTimeoutError, match=lost):
            await letters.redrive(wire.js, timeout=0.5, patience=0.5, again=True)
    assert await letters.redrive(again=True) == Redriven(sent=0, found=1, left=0)
    assert await letters.redriven() == [b"0"]


async def test_what_would_repeat_letters_later_is_refused(
    js: JetStreamContext, bury: Bury, make_stream: Callable[..., Awaitable[str]], stream_name: Callable[[], str]
) -> None:
    letters = await bury(1)

    async def refuses(text: str, called: Awaitable[Any]) -> None:
        with pytest.raises(errors.StreamConfigMismatchError, match=text):
            await called

    for config in ({"ttl": 60}, {"storage": StorageType.MEMORY}):
        bucket = stream_name()
        await js.create_key_value(bucket=bucket, **config)  # type: ignore[arg-type]
        await refuses("may lose what a redrive has noted", letters.redrive(offsets=OffsetStore(js, bucket)))
    mirror = stream_name()
    await js.add_stream(name=mirror, mirror=StreamSource(name=letters.stream), allow_direct=True)
    for name, text in ((mirror, "is a mirror"), (await make_stream(deny_delete=True), "deny_delete")):
        await refuses(text, redrive(js, name, letters.dead))
        await refuses(text, drop(js, name, [1]))
    await letters.update(no_ack=True)
    await refuses("no_ack", letters.redrive())
    transform = SubjectTransform(src=f"{letters.source}.0", dest=f"{letters.source}.moved")
    await letters.update(no_ack=False, subject_transform=transform)
    await refuses("subject_transform", letters.redrive())
    transform = SubjectTransform(src=f"{letters.source}.2", dest=f"{letters.source}.moved")
    await letters.update(allow_direct=False, subject_transform=transform)
    assert (await letters.redrive()).sent == 1


async def test_the_subjects_were_moved_to_another_stream(js: JetStreamContext, bury: Bury) -> None:
    """A letter that was sent before is found where it is; what is not found there goes elsewhere only on request."""
    letters = await bury(1)
    await letters.die(1)
    new = await letters.move_subjects()
    assert await letters.redrive(to_stream=new) == Redriven(sent=0, found=1, left=0)
    assert await letters.redriven(new) == []

    letters = await bury(1)
    await letters.die(0)
    new = await letters.move_subjects()
    with pytest.raises(errors.ServerError, match=rf"was refused, and stays .*goes to stream '{letters.source}'"):
        await letters.redrive()
    with pytest.raises(errors.HistoryUnavailableError, match=f"goes to stream '{new}' now"):
        await letters.redrive(to_stream=new)
    await js.delete_stream(letters.source)
    with pytest.raises(NotFoundError, match=letters.source):
        await letters.redrive(again=True)
    with pytest.raises(errors.HistoryUnavailableError, match="it was deleted"):
        await letters.redrive(to_stream=new)
    assert (await letters.redrive(to_stream=new, again=True)).sent == 1
    assert await letters.redriven(new) == [b"0"]


async def test_a_letter_that_is_refused_stays_with_those_behind_it(js: JetStreamContext, bury: Bury) -> None:
    letters = await bury(4)
    await letters.update(subjects=[f"{letters.source}.0"])
    with pytest.raises(NoStreamResponseError):
        await letters.redrive(patience=1.0)
    assert await letters.redriven() == [b"0"]
    assert len(await letters.seqs()) == 3
    await js.purge_stream(letters.source)  # the call knows that the letter was not stored
    await letters.update(subjects=[f"{letters.source}.>"])
    await letters.redrive()
    assert await letters.redriven() == [b"1", b"2", b"3"]


async def test_drop_deletes_dead_letters_only(js: JetStreamContext, bury: Bury) -> None:
    letters = await bury(3)
    other = (await js.publish(letters.dead, b"no letter")).seq
    seqs = await letters.seqs()
    with pytest.raises(ValueError, match="is no dead letter"):
        await drop(js, letters.stream, [seqs[0], other])
    assert await drop(js, letters.stream, seqs[:2]) == 2
    assert await drop(js, letters.stream, seqs[:2]) == 0
    assert await letters.seqs() == seqs[2:]
