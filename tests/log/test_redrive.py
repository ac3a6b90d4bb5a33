"""Dead letters are listed, handed back to their streams once, and dropped."""

import asyncio
import contextlib
import random
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nats.errors
import nats.js.errors
import pytest
from nats.js import JetStreamContext
from nats.js.api import StorageType, StreamSource, SubjectTransform
from nats.js.errors import APIError, NoStreamResponseError

from jetstream_ext import DirectGet, StoredMsg, errors
from jetstream_ext.client.api import stream_state
from jetstream_ext.client.connection import Context
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
    redrive_search,
)
from jetstream_ext.log.redriving import _Redriving
from jetstream_ext.protocol.api import StreamState

sys.path.insert(0, str(Path(__file__).parent))

from group_members import replace_publish

Make = Callable[..., Awaitable[str]]
Bury = Callable[..., Awaitable[tuple[str, str, str]]]


class DiedError(BaseException):
    """The call ends as that of a killed process: it does nothing more."""


class Copies:
    """The copies of letters that a context publishes.

    `before` is awaited before each with its number, from 1; if it returns False, the copy is not sent, and gets no answer.
    With `dies_behind`, the call dies when so many copies are stored.
    """

    def __init__(
        self,
        js: JetStreamContext,
        patch: pytest.MonkeyPatch,
        before: Callable[[int], Awaitable[Any]] | None = None,
        *,
        dies_behind: int = -1,
    ) -> None:
        self.sent: list[tuple[str, bytes, dict[str, str]]] = []
        publish = js.publish

        async def watched(subject: str, payload: bytes = b"", **options: Any) -> Any:
            headers = options.get("headers") or {}
            if not headers.get("Nats-Msg-Id", "").startswith("redrive:"):
                return await publish(subject, payload, **options)
            self.sent.append((subject, payload, dict(headers)))
            if dies_behind == 0:
                raise DiedError
            if before is not None and await before(len(self.sent)) is False:
                raise nats.errors.TimeoutError
            ack = await publish(subject, payload, **options)
            if len(self.sent) == dies_behind:
                raise DiedError
            return ack

        replace_publish(patch, js, watched)

    def header(self, name: str) -> list[str | None]:
        return [headers.get(name) for _, _, headers in self.sent]


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


async def die(
    js: JetStreamContext, stream: str, dead: str, offsets: OffsetStore, copies: int, **options: Any
) -> Copies:
    """Let a call die behind a number of copies, and before it deletes a letter."""
    with pytest.MonkeyPatch.context() as patch:
        found = Copies(js, patch, dies_behind=copies)
        with pytest.raises(DiedError):
            await redrive(js, stream, dead, offsets=offsets, **options)
    return found


async def update(js: JetStreamContext, stream: str, **config: Any) -> None:
    await js.update_stream((await js.stream_info(stream)).config.evolve(**config))


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


async def test_more_letters_than_one_note_holds(js: JetStreamContext, bury: Bury, offsets: OffsetStore) -> None:
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
    js: JetStreamContext, bury: Bury, offsets: OffsetStore
) -> None:
    """Behind the window, also if it sent nothing, or to a stream that had no messages."""
    failures: list[str] = []
    for copies, to_new in ((0, False), (2, False), (3, False), (0, True), (2, True)):
        stream, dead, source = await bury(3, duplicate_window=0.1)
        to_stream, before = source, 3
        if to_new:
            to_stream, before = f"{source}NEW", 0
            await move_subjects(js, source, to_stream)
        await die(js, stream, dead, offsets, copies, to_stream=to_stream)
        await asyncio.sleep(0.3)
        done = await redrive(js, stream, dead, offsets=offsets, to_stream=to_stream)
        there = (await payloads(js, to_stream))[before:]
        if done != Redriven(3 - copies, copies, 0) or there != [b"0", b"1", b"2"] or await stored(js, stream, dead):
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
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read the letter, but not published it; the other call has not deleted it yet, and the window is over."""
    stream, dead, source = await bury(3, duplicate_window=0.1)
    other = js._nc.jetstream(timeout=30)

    async def let_another_one_send(number: int) -> None:
        if number == 1:
            await die(other, stream, dead, OffsetStore(other, offsets.bucket), 3)
            await asyncio.sleep(0.3)

    with monkeypatch.context() as patch:
        Copies(js, patch, let_another_one_send)
        with pytest.raises(errors.FencedError):
            await redrive(js, stream, dead, offsets=offsets)
    assert (await redrive(js, stream, dead, offsets=offsets)).found == 3
    assert (await payloads(js, source))[3:] == [b"0", b"1", b"2"]


@pytest.mark.parametrize("window", [0.1, 120.0])
async def test_what_is_not_known_is_an_error(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, window: float
) -> None:
    """The letters stay, and only a call that says so sends them again, one or all."""
    stream, dead, source = await bury(3, duplicate_window=window)
    await die(js, stream, dead, offsets, 3)
    await js.purge_stream(source)
    for _ in range(2):  # the first call does not make the second one forget it
        with pytest.raises(errors.HistoryUnavailableError, match="again=True") as caught:
            await redrive(js, stream, dead, offsets=offsets)
    assert set(caught.value.keys) == {f"{source}.0", f"{source}.1"}
    first, *others = await list_sequences(js, stream, dead)
    assert (await redrive(js, stream, dead, offsets=offsets, seqs=[first], again=True)).sent == 1
    await asyncio.sleep(0.3)
    with pytest.raises(errors.HistoryUnavailableError, match=str(others[0])):
        await redrive(js, stream, dead, offsets=offsets)
    assert await payloads(js, source) == [b"0"]
    assert await list_sequences(js, stream, dead) == others
    await die(js, stream, dead, offsets, 0, again=True)
    with pytest.raises(errors.HistoryUnavailableError):  # a call with `again` that died leaves them in doubt
        await redrive(js, stream, dead, offsets=offsets)
    await die(js, stream, dead, offsets, 2, again=True)
    assert await redrive(js, stream, dead, offsets=offsets) == Redriven(sent=0, found=2, left=0)
    assert await payloads(js, source) == [b"0", b"1", b"2"]


async def test_letters_in_doubt_hold_up_no_others(js: JetStreamContext, bury: Bury, offsets: OffsetStore) -> None:
    """Nor do they count for the maximum."""
    stream, dead, source = await bury(3)
    await die(js, stream, dead, offsets, 3)
    await js.purge_stream(source)
    await js.publish(f"{source}.0", b"more")
    await bury_more(js, source, stream, dead, start=Last())
    seqs = await list_sequences(js, stream, dead)
    with pytest.raises(errors.HistoryUnavailableError, match=r"has handed back 1 other$"):
        await redrive(js, stream, dead, offsets=offsets, seqs=seqs, max_messages=1)
    assert await payloads(js, source) == [b"more", b"more"]


async def test_a_letter_of_unknown_outcome_is_found_behind_a_refusal(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt without an answer is stored; what refuses the next one does not make the call forget it."""
    stream, dead, source = await bury(2, duplicate_window=0.1)
    publish, copies = js.publish, list[bytes]()

    async def lose_and_refuse(subject: str, payload: bytes = b"", **options: Any) -> Any:
        if not subject.startswith(f"{source}."):
            return await publish(subject, payload, **options)
        copies.append(payload)
        if len(copies) == 1:
            raise nats.errors.TimeoutError
        await publish(subject, payload, **options)  # that is the first attempt
        raise nats.js.errors.BadRequestError(code=400, err_code=10054, description="too large")

    with monkeypatch.context() as patched:
        replace_publish(patched, js, lose_and_refuse)
        with pytest.raises(errors.ServerError, match="was refused, and stays"):
            await redrive(js, stream, dead, offsets=offsets)
    await asyncio.sleep(0.3)
    assert await redrive(js, stream, dead, offsets=offsets) == Redriven(sent=1, found=1, left=0)
    assert (await payloads(js, source))[2:] == [b"0", b"1"]


async def arrives_late(js: JetStreamContext, message: tuple[str, bytes, dict[str, str]]) -> None:
    """Let a message arrive after the duplicate window; it is refused by its fence."""
    subject, payload, headers = message

    async def send() -> None:
        async with asyncio.timeout(60):
            while (await js.publish(subject, payload, headers=headers)).duplicate:
                await asyncio.sleep(0.1)

    with pytest.raises(APIError) as refused:
        await send()
    assert refused.value.err_code == errors.ErrorCode.WRONG_LAST_SEQUENCE


async def test_an_attempt_that_arrives_late_is_refused(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the duplicate window: of this call, which went on at another server, or of one that died."""
    stream, dead, source = await bury(3, duplicate_window=0.1)

    async def lose_the_first(number: int) -> bool:
        return number > 1

    with monkeypatch.context() as patch:
        copies = Copies(js, patch, lose_the_first)
        assert await redrive(js, stream, dead, offsets=offsets) == Redriven(sent=3, found=0, left=0)
    await arrives_late(js, copies.sent[0])
    assert (await payloads(js, source))[3:] == [b"0", b"1", b"2"]

    stream, dead, source = await bury(3, duplicate_window=0.1)
    copies = await die(js, stream, dead, offsets, 0)
    assert (await redrive(js, stream, dead, offsets=offsets)).sent == 3
    await arrives_late(js, copies.sent[0])
    assert (await payloads(js, source))[3:] == [b"0", b"1", b"2"]


async def test_other_producers_on_the_subject_do_not_stop_a_redrive(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After ten refusals in a row a letter has no fence, also if an attempt had no answer."""
    for unanswered in (0, 1):
        stream, dead, source = await bury(3)

        async def interfere(number: int) -> bool:
            await js.publish(f"{source}.0", b"other")  # noqa: B023
            return number > unanswered  # noqa: B023

        with monkeypatch.context() as patch:
            copies = Copies(js, patch, interfere)
            assert (await redrive(js, stream, dead, offsets=offsets)).sent == 3
        fences = copies.header("Nats-Expected-Last-Subject-Sequence")
        assert fences.index(None) == 10 + unanswered
        assert [it for it in await payloads(js, source) if it != b"other"] == 2 * [b"0", b"1", b"2"]


async def test_a_stream_that_stores_under_other_subjects_has_no_fence(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, dead, source = await bury(2)
    await update(js, source, subject_transform=SubjectTransform(src=f"{source}.0", dest=f"{source}.moved"))
    with monkeypatch.context() as patch:
        copies = Copies(js, patch)
        assert (await redrive(js, stream, dead, offsets=offsets)).sent == 2
    assert copies.header("Nats-Expected-Last-Subject-Sequence") == [None, None]


async def test_a_stream_of_letters_that_is_created_again_loses_none(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
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

    with monkeypatch.context() as patch:
        Copies(js, patch, create_again)
        with contextlib.suppress(errors.StreamRecreatedError):
            await redrive(js, stream, dead, offsets=offsets)
    assert [it.data for it in await stored(js, stream, dead)] == [b"new", b"new"]
    with contextlib.suppress(errors.StreamRecreatedError):
        await redrive(js, stream, dead, offsets=offsets)
    assert [it.data for it in await stored(js, stream, dead)] == [b"new", b"new"]
    assert (await payloads(js, source))[2:] == [b"0", b"1"]


async def test_a_target_that_cannot_be_read_holds_up_no_others(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore
) -> None:
    stream, dead, source = await bury(2)
    await die(js, stream, dead, offsets, 2)
    await update(js, source, allow_direct=False)
    other = f"{source}_other"
    await js.add_stream(name=other, subjects=[other], allow_direct=True)
    await js.publish(other, b"other")
    await bury_more(js, other, stream, dead)
    for again in (False, True):
        with pytest.raises(errors.HistoryUnavailableError, match="cannot be read: repeat the call"):
            await redrive(js, stream, dead, offsets=offsets, patience=3.0, again=again)
        assert await payloads(js, other) == [b"other", b"other"]
    await update(js, source, allow_direct=True)
    assert await redrive(js, stream, dead, offsets=offsets, again=True) == Redriven(sent=0, found=2, left=0)


async def test_what_would_repeat_letters_later_is_refused(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, make_stream: Make, stream_name: Callable[[], str]
) -> None:
    stream, dead, source = await bury(1)

    async def refuses(error: type[Exception], text: str, called: Awaitable[Any]) -> None:
        with pytest.raises(error, match=text):
            await called

    for text, config in (("forgets its keys", {"ttl": 60}), ("is in memory", {"storage": StorageType.MEMORY})):
        bucket = stream_name()
        await js.create_key_value(bucket=bucket, **config)
        call = redrive(js, stream, dead, offsets=OffsetStore(js, bucket))
        await refuses(errors.StreamConfigMismatchError, text, call)
    mirror = stream_name()
    await js.add_stream(name=mirror, mirror=StreamSource(name=stream), allow_direct=True)
    denies = await make_stream(deny_delete=True)
    for name, text in ((mirror, "is a mirror"), (denies, "deny_delete")):
        await refuses(errors.StreamConfigMismatchError, text, redrive(js, name, dead, offsets=offsets))
        await refuses(errors.StreamConfigMismatchError, text, drop(js, name, [1]))
    await update(js, source, no_ack=True)
    await refuses(errors.StreamConfigMismatchError, "no_ack", redrive(js, stream, dead, offsets=offsets))
    await update(js, source, no_ack=False, allow_direct=False)
    await refuses(errors.DirectGetDisabledError, source, redrive(js, stream, dead, offsets=offsets))
    await update(js, source, allow_direct=True)
    assert await payloads(js, source) == [b"0"]
    assert (await redrive(js, stream, dead, offsets=offsets)).sent == 1


async def move_subjects(js: JetStreamContext, source: str, to: str) -> None:
    """Let another stream store the subjects of a stream."""
    await update(js, source, subjects=[f"{source}.unused"])
    await js.add_stream(name=to, subjects=[f"{source}.0", f"{source}.1", f"{source}.2"], allow_direct=True)


async def test_the_subjects_were_moved_to_another_stream(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore
) -> None:
    """Letters that were sent before are found where they are; the others go to the stream that the call names."""
    stream, dead, source = await bury(3)
    await die(js, stream, dead, offsets, 3)
    await move_subjects(js, source, f"{source}_new")
    assert await redrive(js, stream, dead, offsets=offsets) == Redriven(sent=0, found=3, left=0)
    assert await payloads(js, f"{source}_new") == []

    stream, dead, source = await bury(3)
    await die(js, stream, dead, offsets, 0)
    new = f"{source}_new"
    await move_subjects(js, source, new)
    for _ in range(2):
        with pytest.raises(errors.ServerError, match=rf"was refused, and stays .*goes to stream '{source}'"):
            await redrive(js, stream, dead, offsets=offsets)
    await js.delete_stream(source)  # it may have had the letters
    with pytest.raises(errors.HistoryUnavailableError):
        await redrive(js, stream, dead, offsets=offsets, to_stream=new)
    assert (await redrive(js, stream, dead, offsets=offsets, to_stream=new, again=True)).sent == 3
    assert await payloads(js, new) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("created_again", [False, True])
async def test_the_target_was_deleted(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, created_again: bool
) -> None:
    """What it had is not known."""
    stream, dead, source = await bury(3)
    await die(js, stream, dead, offsets, 3)
    config = (await js.stream_info(source)).config
    await js.delete_stream(source)
    if created_again:
        await js.add_stream(config)
        for number in range(10):
            await js.publish(f"{source}.0", b"new %d" % number)
    with pytest.raises(errors.HistoryUnavailableError, match=r"has handed back 0 others$"):
        await redrive(js, stream, dead, offsets=offsets)
    undecided = await list_sequences(js, stream, dead)
    assert len(undecided) == 3
    assert (await redrive(js, stream, f"{stream}.other", offsets=offsets)).sent == 0, "they are not asked for"
    assert await drop(js, stream, undecided[:2]) == 2
    with pytest.raises(errors.HistoryUnavailableError):
        await redrive(js, stream, dead, offsets=offsets)
    if not created_again:
        await js.add_stream(config)
    assert (await redrive(js, stream, dead, offsets=offsets, again=True)).sent == 1
    assert (await payloads(js, source))[-1:] == [b"2"]
    assert await redrive(js, stream, dead, offsets=offsets) == Redriven(0, 0, 0)


async def test_a_letter_that_is_refused_stays_with_those_behind_it(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore
) -> None:
    stream, dead, source = await bury(4)
    await update(js, source, subjects=[f"{source}.0"])
    with pytest.raises(NoStreamResponseError):
        await redrive(js, stream, dead, offsets=offsets, timeout=10, patience=3.0)
    assert [it.data for it in await stored(js, stream, dead)][-3:] == [b"1", b"2", b"3"]
    await update(js, source, subjects=[f"{source}.>"])
    await redrive(js, stream, dead, offsets=offsets)
    assert (await payloads(js, source))[4:] == [b"0", b"1", b"2", b"3"]


async def test_drop_deletes_dead_letters_only(js: JetStreamContext, bury: Bury) -> None:
    stream, dead, _ = await bury(3)
    other = (await js.publish(dead, b"no letter")).seq
    letters = await list_sequences(js, stream, dead)
    with pytest.raises(ValueError, match="is no dead letter"):
        await drop(js, stream, [letters[0], other])
    assert await drop(js, stream, letters[:2]) == 2
    assert await drop(js, stream, letters[:2]) == 0
    assert await list_sequences(js, stream, dead) == letters[2:]


async def test_an_attempt_that_arrives_behind_the_look_of_the_next_call_is_found(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal by the fence makes the call look again. Its message id alone would not help beyond the window."""
    send = _Redriving._send
    for window in (0.1, 120.0):
        stream, dead, source = await bury(3, duplicate_window=window)
        late = (await die(js, stream, dead, offsets, 0)).sent[0]

        async def send_later(self: _Redriving, letters: Any, late: Any = late) -> None:
            subject, payload, headers = late
            await js.publish(subject, payload, headers=headers)
            await asyncio.sleep(0.3)
            await send(self, letters)

        with monkeypatch.context() as patched:
            patched.setattr(_Redriving, "_send", send_later)
            assert await redrive(js, stream, dead, offsets=offsets) == Redriven(sent=2, found=1, left=0)
        assert (await payloads(js, source))[3:] == [b"0", b"1", b"2"]


async def test_a_letter_stays_noted_until_it_is_sent(js: JetStreamContext, bury: Bury, offsets: OffsetStore) -> None:
    """A call that looks in vain, and sends nothing itself, does not make the next one forget to look."""
    stream, dead, source = await bury(3, duplicate_window=0.1)

    subject, payload, headers = (await die(js, stream, dead, offsets, 0)).sent[0]
    assert await redrive(js, stream, f"{stream}.other", offsets=offsets) == Redriven(0, 0, 0)
    await js.publish(subject, payload, headers=headers)
    await asyncio.sleep(0.3)
    assert await redrive(js, stream, dead, offsets=offsets) == Redriven(sent=2, found=1, left=0)
    assert (await payloads(js, source))[3:] == [b"0", b"1", b"2"]


async def test_a_leader_that_may_have_a_successor_is_not_believed(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cut off from the others and answers what it had when it was. They have the letters."""
    stream, dead, source = await bury(3)
    before = await stream_state(Context(js), source)
    await die(js, stream, dead, offsets, 3)

    async def answer(context: Context, name: str, timeout: float) -> StreamState:
        return replace(before, leader_is_certain=False)

    async def refuse(*_: Any) -> int:
        return before.last_seq

    async def fences(*_: Any) -> dict[str, int]:
        return {f"{source}.0": 3, f"{source}.1": 2}

    with monkeypatch.context() as patched:
        patched.setattr(redrive_search, "stream_state", answer)
        patched.setattr(redrive_search.CopySearch, "_marked", refuse)
        patched.setattr(redrive_search.CopySearch, "fences", fences)
        await redrive(js, stream, f"{stream}.other", offsets=offsets, patience=3.0)
        with pytest.raises(errors.HistoryUnavailableError, match="cannot be read"):
            await redrive(js, stream, dead, offsets=offsets, patience=3.0)
    assert (await redrive(js, stream, dead, offsets=offsets)).found == 3
    assert (await payloads(js, source))[3:] == [b"0", b"1", b"2"]
