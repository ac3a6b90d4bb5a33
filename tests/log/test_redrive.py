"""Dead letters are listed, handed back to their streams once, and dropped."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest
from nats.js import JetStreamContext
from nats.js.api import StorageType, StreamSource, SubjectTransform
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

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
    redrive_letters,
    redrive_search,
)
from jetstream_ext.log.redrive_search import can_fence
from jetstream_ext.log.redriving import _Redriving
from jetstream_ext.protocol.api import StreamState

Make = Callable[..., Awaitable[str]]
Bury = Callable[..., Awaitable[tuple[str, str, str]]]


async def stored(js: JetStreamContext, stream: str, subject: str | None = None) -> list[StoredMsg]:
    return [it async for it in DirectGet(js, stream).scan(subject=subject)]


async def payloads(js: JetStreamContext, stream: str) -> list[bytes]:
    return [it.data for it in await stored(js, stream)]


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
    stream, dead, source = await bury(230)
    assert (await redrive(js, stream, dead, offsets=offsets, max_messages=120)).sent == 120
    assert (await redrive(js, stream, dead, offsets=offsets)).sent == 110
    assert await payloads(js, source) == 2 * [b"%d" % n for n in range(230)]


async def test_some_letters(js: JetStreamContext, bury: Bury, offsets: OffsetStore) -> None:
    stream, dead, source = await bury(4)
    letters = [it.message.seq async for it in dead_letters(js, stream, dead)]
    assert (await redrive(js, stream, dead, seqs=[letters[2], letters[0]], offsets=offsets)).sent == 2
    assert (await payloads(js, source))[4:] == [b"0", b"2"]
    assert (await redrive(js, stream, f"{stream}.other", seqs=letters, offsets=offsets)).sent == 0
    assert (await redrive(js, stream, dead, seqs=letters, max_messages=1, offsets=offsets)).sent == 1
    assert (await payloads(js, source))[6:] == [b"1"]


@pytest.mark.parametrize("window", [0.1, 120.0])
@pytest.mark.parametrize("step", ["note", "publish", "delete"])
async def test_a_call_that_died_is_ended_by_the_next_one(
    js: JetStreamContext,
    bury: Bury,
    offsets: OffsetStore,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    window: float,
) -> None:
    """Also when the server has forgotten the ids of the messages."""
    stream, dead, source = await bury(5, duplicate_window=window)
    method = {"note": "_send", "publish": "_publish", "delete": "delete"}[step]
    was, calls = getattr(_Redriving, method), 0

    async def die(self: _Redriving, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3 or step == "note":
            raise KeyboardInterrupt
        return await was(self, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(_Redriving, method, die)
        with pytest.raises(KeyboardInterrupt):
            await redrive(js, stream, dead, offsets=offsets)
    await asyncio.sleep(2 * window if window < 1 else 0)
    done = await redrive(js, stream, dead, offsets=offsets)
    assert done.sent + done.found == 5 - (2 if step == "delete" else 0) or step == "delete"
    assert (await payloads(js, source))[5:] == [b"%d" % n for n in range(5)]
    assert await stored(js, stream, dead) == []


@pytest.mark.parametrize("step", ["_send", "_publish"])
async def test_a_call_to_a_new_stream_that_died_is_ended_by_the_next_one(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The stream had no message that could be a witness."""
    stream, dead, source = await bury(3)
    await move_subjects(js, source, new := f"{source}NEW")

    async def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_Redriving, step, die)
        with pytest.raises(KeyboardInterrupt):
            await redrive(js, stream, dead, offsets=offsets, to_stream=new)
    assert (await redrive(js, stream, dead, offsets=offsets, to_stream=new)).sent == 3
    assert await payloads(js, new) == [b"0", b"1", b"2"]
    assert await stored(js, stream, dead) == []


async def test_two_calls_at_the_same_time(js: JetStreamContext, bury: Bury, offsets: OffsetStore) -> None:
    stream, dead, source = await bury(150)
    calls = (redrive(js, stream, dead, offsets=OffsetStore(js, offsets.bucket)) for _ in range(3))
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert all(not isinstance(it, BaseException) or isinstance(it, errors.FencedError) for it in done)
    await redrive(js, stream, dead, offsets=offsets)
    assert sorted(map(int, await payloads(js, source))) == sorted(2 * list(range(150)))


async def die_before_the_deletes(
    js: JetStreamContext, stream: str, dead: str, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def die(self: _Redriving, seq: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_Redriving, "delete", die)
        with pytest.raises(KeyboardInterrupt):
            await redrive(js, stream, dead, offsets=offsets)


async def test_what_is_not_known_is_an_error(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, dead, source = await bury(3)
    await die_before_the_deletes(js, stream, dead, offsets, monkeypatch)
    await js.purge_stream(source)
    for _ in range(2):  # the first call does not make the second one forget it
        with pytest.raises(errors.HistoryUnavailableError, match="again=True") as caught:
            await redrive(js, stream, dead, offsets=offsets)
    assert set(caught.value.keys) == {f"{source}.0", f"{source}.1"}
    assert len(await stored(js, stream, dead)) == 3
    assert (await redrive(js, stream, dead, offsets=offsets, again=True)).sent == 3
    assert await payloads(js, source) == [b"0", b"1", b"2"]


async def test_a_refusal_behind_an_attempt_without_an_answer_forgets_nothing(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt arrives after its retry was refused, and is found by the next call, beyond the duplicate window."""
    stream, dead, source = await bury(2, duplicate_window=0.1)
    publish, attempts = _Redriving._publish, list[Any]()

    async def publish_late(self: _Redriving, letter: Any) -> Any:
        attempts.append(letter)
        if len(attempts) == 1:
            raise errors.RequestTimeoutError("no answer")
        await publish(self, letter)  # that is the first attempt
        raise errors.BatchServerError("refused", outcome="not_stored")

    with monkeypatch.context() as patched:
        patched.setattr(_Redriving, "_publish", publish_late)
        with pytest.raises(errors.BatchServerError):
            await redrive(js, stream, dead, offsets=offsets)
    await asyncio.sleep(0.3)
    assert await redrive(js, stream, dead, offsets=offsets) == Redriven(sent=1, found=1, left=0)
    assert (await payloads(js, source))[2:] == [b"0", b"1"]


async def test_a_target_that_cannot_be_looked_at_is_refused_before_anything_is_sent(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore
) -> None:
    stream, dead, source = await bury(2)
    config = (await js.stream_info(source)).config
    config.allow_direct = False
    await js.update_stream(config)
    with pytest.raises(errors.DirectGetDisabledError, match=source):
        await redrive(js, stream, dead, offsets=offsets)
    config.allow_direct = True
    await js.update_stream(config)
    assert (await redrive(js, stream, dead, offsets=offsets)).sent == 2


async def put_in_doubt(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch, **config: Any
) -> tuple[str, str, str]:
    """Make three letters of which it is not known whether they were sent."""
    stream, dead, source = await bury(3, **config)
    await die_before_the_deletes(js, stream, dead, offsets, monkeypatch)
    await js.purge_stream(source)
    return stream, dead, source


async def list_sequences(js: JetStreamContext, stream: str, dead: str) -> list[int]:
    return [letter.message.seq async for letter in dead_letters(js, stream, dead)]


@pytest.mark.parametrize("window", [0.1, 120.0])
async def test_sending_one_letter_again_leaves_the_others_in_doubt(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch, window: float
) -> None:
    stream, dead, source = await put_in_doubt(js, bury, offsets, monkeypatch, duplicate_window=window)
    first, *others = await list_sequences(js, stream, dead)
    assert (await redrive(js, stream, dead, offsets=offsets, seqs=[first], again=True)).sent == 1
    await asyncio.sleep(0.3)
    for _ in range(2):
        with pytest.raises(errors.HistoryUnavailableError, match=str(others[0])):
            await redrive(js, stream, dead, offsets=offsets)
    assert await payloads(js, source) == [b"0"]
    assert await list_sequences(js, stream, dead) == others


@pytest.mark.parametrize("step", ["_publish", "delete"])
async def test_a_call_with_again_that_died_leaves_its_letters_in_doubt(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    stream, dead, source = await put_in_doubt(js, bury, offsets, monkeypatch)

    async def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_Redriving, step, die)
        with pytest.raises(KeyboardInterrupt):
            await redrive(js, stream, dead, offsets=offsets, again=True)
    if step == "delete":  # their copies are there
        assert (await redrive(js, stream, dead, offsets=offsets)).found == 3
        assert await payloads(js, source) == [b"0", b"1", b"2"]
    else:
        with pytest.raises(errors.HistoryUnavailableError):
            await redrive(js, stream, dead, offsets=offsets)
        assert await payloads(js, source) == []
        assert len(await list_sequences(js, stream, dead)) == 3


@pytest.mark.parametrize("first", [False, True])
async def test_two_calls_of_which_one_sends_again(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, first: bool
) -> None:
    stream, dead, source = await bury(60)
    calls = (redrive(js, stream, dead, offsets=OffsetStore(js, offsets.bucket), again=again) for again in (first, True))
    await asyncio.gather(*calls, return_exceptions=True)
    await redrive(js, stream, dead, offsets=offsets)
    assert sorted(map(int, await payloads(js, source))) == sorted(2 * list(range(60)))


async def test_a_lost_answer_puts_only_its_own_letter_in_doubt(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, dead, source = await bury(10)
    publish, tried = _Redriving._publish, list[Any]()

    async def lose(self: _Redriving, letter: Any) -> Any:
        tried.append(letter)
        stored = await publish(self, letter)
        if len(tried) == 2:
            await js.purge_stream(source)  # the letter's copy, too
            raise errors.RequestTimeoutError("no answer")
        return stored

    with monkeypatch.context() as patched:
        patched.setattr(_Redriving, "_publish", lose)
        with pytest.raises(errors.HistoryUnavailableError, match="has handed back 9 others"):
            await redrive(js, stream, dead, offsets=offsets, again=True)
    assert len(set(tried)) == 10
    assert len(await list_sequences(js, stream, dead)) == 1


@pytest.mark.parametrize("step", ["_end", "_look"])
async def test_letters_of_a_stream_that_is_created_again_during_the_call_stay(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """They have the sequences of those that were sent."""
    stream, dead, source = await bury(2)
    if step == "_look":
        await die_before_the_deletes(js, stream, dead, offsets, monkeypatch)
    config = (await js.stream_info(stream)).config
    was = getattr(_Redriving, step)
    before = [it.seq for it in await stored(js, stream, dead)]

    async def create_again(self: _Redriving, *arguments: Any) -> Any:
        await js.delete_stream(stream)
        await js.add_stream(config)
        for seq in range(1, max(before) + 1):
            await js.publish(dead if seq in before else f"{stream}.other", b"new")
        return await was(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(_Redriving, step, create_again)
        with contextlib.suppress(errors.StreamRecreatedError):
            await redrive(js, stream, dead, offsets=offsets)
    assert [it.data for it in await stored(js, stream, dead)] == [b"new", b"new"]
    assert (await payloads(js, source))[2:] == [b"0", b"1"]


async def test_letters_in_doubt_do_not_count_for_the_maximum(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, dead, source = await put_in_doubt(js, bury, offsets, monkeypatch)
    await js.publish(f"{source}.0", b"more")
    letters = DeadLetter(dead, attempts=1, backoff=0)
    reader = LogReader(js, source, start=Last())
    await exactly_once(reader, stream, lambda _: 1 / 0, name="m", prefix=f"{stream}.at", dead_letter=letters)  # type: ignore[arg-type,return-value]
    seqs = await list_sequences(js, stream, dead)
    with pytest.raises(errors.HistoryUnavailableError, match=r"has handed back 1 other$"):
        await redrive(js, stream, dead, offsets=offsets, seqs=seqs, max_messages=1)
    assert await payloads(js, source) == [b"more", b"more"]


async def test_a_target_that_cannot_be_looked_at_holds_up_no_others(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, dead, source = await bury(2)
    await die_before_the_deletes(js, stream, dead, offsets, monkeypatch)
    config = (await js.stream_info(source)).config
    config.allow_direct = False
    await js.update_stream(config)
    other = f"{source}_other"
    await js.add_stream(name=other, subjects=[other], allow_direct=True)
    await js.publish(other, b"other")
    letters = DeadLetter(dead, attempts=1, backoff=0)
    await exactly_once(
        LogReader(js, other), stream, lambda _: 1 / 0, name="o", prefix=f"{stream}.at", dead_letter=letters  # type: ignore[arg-type,return-value]
    )  # fmt: skip
    with pytest.raises(errors.HistoryUnavailableError, match="cannot be read"):
        await redrive(js, stream, dead, offsets=offsets, patience=0.5)
    assert await payloads(js, other) == [b"other", b"other"]
    config.allow_direct = True
    await js.update_stream(config)
    assert (await redrive(js, stream, dead, offsets=offsets)) == Redriven(sent=0, found=2, left=0)


async def test_letters_before_one_whose_target_is_missing_are_handed_back(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, stream_name: Callable[[], str]
) -> None:
    stream, dead, source = await bury(1)
    missing = stream_name()
    await js.add_stream(name=missing, subjects=[missing], allow_direct=True)
    await js.publish(missing, b"")
    letters = DeadLetter(dead, attempts=1, backoff=0)
    await exactly_once(
        LogReader(js, missing), stream, lambda _: 1 / 0, name="o", prefix=f"{stream}.at", dead_letter=letters  # type: ignore[arg-type,return-value]
    )  # fmt: skip
    await js.delete_stream(missing)
    with pytest.raises(NotFoundError):
        await redrive(js, stream, dead, offsets=offsets)
    assert await payloads(js, source) == [b"0", b"0"]
    assert len(await list_sequences(js, stream, dead)) == 1


async def test_what_would_repeat_letters_later_is_refused(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, stream_name: Callable[[], str]
) -> None:
    stream, dead, source = await bury(1)
    short = stream_name()
    await js.create_key_value(bucket=short, ttl=60)
    with pytest.raises(errors.StreamConfigMismatchError, match="forgets its keys"):
        await redrive(js, stream, dead, offsets=OffsetStore(js, short))
    mirror = stream_name()
    await js.add_stream(name=mirror, mirror=StreamSource(name=stream), allow_direct=True)
    with pytest.raises(errors.StreamConfigMismatchError, match="is a mirror"):
        await redrive(js, mirror, dead, offsets=offsets)
    with pytest.raises(errors.StreamConfigMismatchError, match="is a mirror"):
        await drop(js, mirror, [1])
    config = (await js.stream_info(source)).config
    config.no_ack = True
    await js.update_stream(config)
    with pytest.raises(errors.StreamConfigMismatchError, match="no_ack"):
        await redrive(js, stream, dead, offsets=offsets)
    assert len(await list_sequences(js, stream, dead)) == 1


async def move_subjects(js: JetStreamContext, source: str, to: str) -> None:
    """Let another stream store the subjects of a stream."""
    config = (await js.stream_info(source)).config
    config.subjects = [f"{source}.unused"]
    await js.update_stream(config)
    await js.add_stream(name=to, subjects=[f"{source}.0", f"{source}.1", f"{source}.2"], allow_direct=True)


async def test_the_subjects_were_moved_after_the_letters_were_sent(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, dead, source = await bury(3)
    await die_before_the_deletes(js, stream, dead, offsets, monkeypatch)
    await move_subjects(js, source, f"{source}_new")
    assert (await redrive(js, stream, dead, offsets=offsets)).found == 3
    assert await stored(js, stream, dead) == []
    assert await stored(js, f"{source}_new") == []


@pytest.mark.parametrize("deleted", [False, True])
async def test_the_subjects_were_moved_before_the_letters_were_sent(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch, deleted: bool
) -> None:
    stream, dead, source = await bury(3)

    async def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_Redriving, "_send", die)
        with pytest.raises(KeyboardInterrupt):
            await redrive(js, stream, dead, offsets=offsets)
    new = f"{source}_new"
    await move_subjects(js, source, new)
    for _ in range(2):
        with pytest.raises(errors.ServerError, match=rf"goes to stream '{source}'"):
            await redrive(js, stream, dead, offsets=offsets)
    if deleted:  # it may have had the letters
        await js.delete_stream(source)
        with pytest.raises(errors.HistoryUnavailableError):
            await redrive(js, stream, dead, offsets=offsets, to_stream=new)
    assert (await redrive(js, stream, dead, offsets=offsets, to_stream=new, again=deleted)).sent == 3
    assert await payloads(js, new) == [b"0", b"1", b"2"]
    assert await stored(js, stream, dead) == []


@pytest.mark.parametrize("created_again", [False, True])
async def test_the_target_was_deleted(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch, created_again: bool
) -> None:
    """What it had is not known; letters of other streams are handed back."""
    stream, dead, source = await bury(3)
    await die_before_the_deletes(js, stream, dead, offsets, monkeypatch)
    config = (await js.stream_info(source)).config
    await js.delete_stream(source)
    if created_again:
        await js.add_stream(config)
        for number in range(10):
            await js.publish(f"{source}.0", b"new %d" % number)
    other = f"{source}_other"
    await js.add_stream(name=other, subjects=[other], allow_direct=True)
    await js.publish(other, b"other")
    letters = DeadLetter(dead, attempts=1, backoff=0)
    reader = LogReader(js, other)
    await exactly_once(reader, stream, lambda _: 1 / 0, name="o", prefix=f"{stream}.at", dead_letter=letters)  # type: ignore[arg-type,return-value]
    with pytest.raises(errors.HistoryUnavailableError, match=r"has handed back 1 other$"):
        await redrive(js, stream, dead, offsets=offsets)
    assert await payloads(js, other) == [b"other", b"other"]
    undecided = [it.message.seq async for it in dead_letters(js, stream, dead)]
    assert len(undecided) == 3
    assert (await redrive(js, stream, f"{stream}.other", offsets=offsets)).sent == 0, "they are not asked for"
    assert await drop(js, stream, undecided[:2]) == 2
    with pytest.raises(errors.HistoryUnavailableError):
        await redrive(js, stream, dead, offsets=offsets)
    if not created_again:
        await js.add_stream(config)
    assert (await redrive(js, stream, dead, offsets=offsets, again=True)).sent == 1
    assert (await payloads(js, source))[-1:] == [b"2"]
    assert (await redrive(js, stream, dead, offsets=offsets)) == Redriven(0, 0, 0)


async def test_a_stream_of_letters_that_was_created_again_loses_none(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Letters of the new stream have the sequences that an unfinished call has noted."""
    stream, dead, source = await bury(3)
    await die_before_the_deletes(js, stream, dead, offsets, monkeypatch)
    config = (await js.stream_info(stream)).config
    await js.delete_stream(stream)
    await js.add_stream(config)

    def fail(message: StoredMsg) -> None:
        raise ZeroDivisionError

    letters = DeadLetter(dead, attempts=1, backoff=0)
    await exactly_once(LogReader(js, source), stream, fail, name="w", prefix=f"{stream}.at", dead_letter=letters)
    assert (await redrive(js, stream, dead, offsets=offsets)).sent == 6
    assert sorted(await payloads(js, source)) == sorted(4 * [b"0", b"1", b"2"])


async def test_a_letter_that_is_refused_stays_with_those_behind_it(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore
) -> None:
    stream, dead, source = await bury(4)
    config = (await js.stream_info(source)).config
    config.subjects = [f"{source}.0"]
    await js.update_stream(config)
    with pytest.raises(NoStreamResponseError):
        await redrive(js, stream, dead, offsets=offsets, timeout=10, patience=3)
    assert [it.data for it in await stored(js, stream, dead)][-3:] == [b"1", b"2", b"3"]
    config.subjects = [f"{source}.>"]
    await js.update_stream(config)
    await redrive(js, stream, dead, offsets=offsets)
    assert (await payloads(js, source))[4:] == [b"0", b"1", b"2", b"3"]


async def test_to_another_stream(js: JetStreamContext, bury: Bury, offsets: OffsetStore) -> None:
    stream, dead, source = await bury(1)
    with pytest.raises(errors.ServerError, match="was refused, and stays"):
        await redrive(js, stream, dead, offsets=offsets, to_stream=stream)
    assert len(await stored(js, stream, dead)) == 1
    assert (await redrive(js, stream, dead, offsets=offsets, to_stream=source)).sent == 1


async def test_drop_deletes_dead_letters_only(js: JetStreamContext, bury: Bury) -> None:
    stream, dead, _ = await bury(3)
    other = (await js.publish(dead, b"no letter")).seq
    letters = [it.message.seq async for it in dead_letters(js, stream, dead)]
    with pytest.raises(ValueError, match="is no dead letter"):
        await drop(js, stream, [letters[0], other])
    assert await drop(js, stream, letters[:2]) == 2
    assert await drop(js, stream, letters[:2]) == 0
    assert [it.data async for it in dead_letters(js, stream, dead)] == [b"2"]


async def test_a_stream_that_denies_deletes(js: JetStreamContext, make_stream: Make, offsets: OffsetStore) -> None:
    name = await make_stream(deny_delete=True)
    with pytest.raises(errors.StreamConfigMismatchError, match="deny_delete"):
        await redrive(js, name, f"{name}.dead", offsets=offsets)
    with pytest.raises(errors.StreamConfigMismatchError, match="deny_delete"):
        await drop(js, name, [1])


class Publishes:
    """Records what is published to a stream with a message id, which the copies of letters have.

    `before` is awaited before each of them; if it returns False, the message is not sent, and gets no answer.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stream: str, before: Callable[[int], Awaitable[Any]]) -> None:
        self.sent: list[tuple[str, bytes, dict[str, str]]] = []
        publish = Context.publish

        async def record(context: Context, subject: str, payload: bytes, headers: Any, *arguments: Any) -> Any:
            if subject.startswith(f"{stream}.") and "Nats-Msg-Id" in headers:
                self.sent.append((subject, payload, dict(headers)))
                if await before(len(self.sent)) is False:
                    raise errors.RequestTimeoutError("no answer")
            return await publish(context, subject, payload, headers, *arguments)

        monkeypatch.setattr(Context, "publish", record)

    @property
    def fences(self) -> list[str | None]:
        return [headers.get("Nats-Expected-Last-Subject-Sequence") for _, _, headers in self.sent]

    @property
    def ids(self) -> list[str]:
        return [headers["Nats-Msg-Id"] for _, _, headers in self.sent]


async def die_at_the_first_publish(
    js: JetStreamContext, stream: str, dead: str, source: str, offsets: OffsetStore
) -> Publishes:
    """Let a call end before its first letter is sent; return the letter as it would have been."""

    async def die(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        publishes = Publishes(patched, source, die)
        with pytest.raises(KeyboardInterrupt):
            await redrive(js, stream, dead, offsets=offsets)
    return publishes


async def arrives_late(js: JetStreamContext, message: tuple[str, bytes, dict[str, str]]) -> None:
    """Let a message arrive after the duplicate window; it is refused by its fence."""
    await asyncio.sleep(0.3)
    subject, payload, headers = message
    with pytest.raises(APIError) as refused:
        await js.publish(subject, payload, headers=headers)
    assert refused.value.err_code == errors.ErrorCode.WRONG_LAST_SEQUENCE


async def test_a_first_attempt_that_arrives_late_is_refused(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the duplicate window: the server of the client was suspended, and the client went on at another one."""
    stream, dead, source = await bury(3, duplicate_window=0.1)

    async def lose_the_first(number: int) -> bool:
        return number > 1

    with monkeypatch.context() as patched:
        publishes = Publishes(patched, source, lose_the_first)
        assert await redrive(js, stream, dead, offsets=offsets) == Redriven(sent=3, found=0, left=0)
    assert publishes.fences == ["3", "3", "2", "4"]
    await arrives_late(js, publishes.sent[0])
    assert (await payloads(js, source))[3:] == [b"0", b"1", b"2"]


async def test_an_attempt_of_a_dead_call_that_arrives_late_is_refused(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore
) -> None:
    stream, dead, source = await bury(3, duplicate_window=0.1)

    publishes = await die_at_the_first_publish(js, stream, dead, source, offsets)
    assert (await redrive(js, stream, dead, offsets=offsets)).sent == 3
    await arrives_late(js, publishes.sent[0])
    assert (await payloads(js, source))[3:] == [b"0", b"1", b"2"]


@pytest.mark.parametrize("window", [0.1, 120.0])
async def test_an_attempt_that_arrives_behind_the_look_of_the_next_call_is_found(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch, window: float
) -> None:
    """A refusal by the fence makes the call look again. Its message id alone would not help beyond the window."""
    stream, dead, source = await bury(3, duplicate_window=window)

    publishes = await die_at_the_first_publish(js, stream, dead, source, offsets)
    send = _Redriving._send

    async def send_later(self: _Redriving, letters: Any) -> None:
        subject, payload, headers = publishes.sent[0]
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

    publishes = await die_at_the_first_publish(js, stream, dead, source, offsets)
    assert await redrive(js, stream, f"{stream}.other", offsets=offsets) == Redriven(0, 0, 0)
    subject, payload, headers = publishes.sent[0]
    await js.publish(subject, payload, headers=headers)
    await asyncio.sleep(0.3)
    assert await redrive(js, stream, dead, offsets=offsets) == Redriven(sent=2, found=1, left=0)
    assert (await payloads(js, source))[3:] == [b"0", b"1", b"2"]


async def test_a_suspended_call_sends_nothing_that_another_one_has_sent(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read the letter, but not published it; the other call has not deleted it yet, and the window is over."""
    stream, dead, source = await bury(3, duplicate_window=0.1)

    async def let_another_one_send(number: int) -> None:
        if number == 1:
            await die_before_the_deletes(js, stream, dead, OffsetStore(js, offsets.bucket), monkeypatch)
            await asyncio.sleep(0.3)

    with monkeypatch.context() as patched:
        Publishes(patched, source, let_another_one_send)
        with pytest.raises(errors.FencedError):
            await redrive(js, stream, dead, offsets=offsets)
    assert (await redrive(js, stream, dead, offsets=offsets)).found == 3
    assert (await payloads(js, source))[3:] == [b"0", b"1", b"2"]


async def test_other_producers_on_the_subject_do_not_stop_a_redrive(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A letter that this call alone can have sent needs no look, which would read all that the others have stored."""
    stream, dead, source = await bury(4)

    async def interfere(number: int) -> None:
        if number == 2:
            await js.publish(f"{source}.1", b"other")

    with monkeypatch.context() as patched:
        patched.setattr(_Redriving, "_look", None)
        publishes = Publishes(patched, source, interfere)
        assert (await redrive(js, stream, dead, offsets=offsets)).sent == 4
    assert publishes.fences == ["3", "4", "6", "5", "7"]
    assert (await payloads(js, source))[4:] == [b"0", b"other", b"1", b"2", b"3"]


@pytest.mark.parametrize("unanswered", [False, True])
async def test_a_subject_with_a_busy_producer_has_no_fence_after_ten_refusals(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch, unanswered: bool
) -> None:
    stream, dead, source = await bury(1)

    async def interfere(number: int) -> bool:
        await js.publish(f"{source}.0", b"other")
        return number > unanswered

    with monkeypatch.context() as patched:
        publishes = Publishes(patched, source, interfere)
        assert (await redrive(js, stream, dead, offsets=offsets)).sent == 1
    attempts = 10 + unanswered
    assert publishes.fences[attempts:] == [None]
    assert None not in publishes.fences[:attempts]
    assert (await payloads(js, source)).count(b"0") == 2


async def test_a_stream_that_stores_under_other_subjects_has_no_fence(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, dead, source = await bury(2)
    config = (await js.stream_info(source)).config
    config.subject_transform = SubjectTransform(src=f"{source}.0", dest=f"{source}.moved")
    await js.update_stream(config)

    async def send(_: int) -> None:
        pass

    with monkeypatch.context() as patched:
        publishes = Publishes(patched, source, send)
        assert (await redrive(js, stream, dead, offsets=offsets)).sent == 2
    assert publishes.fences == [None, None]
    assert not can_fence(StreamState("S", "", {"allow_msg_counter": True}))


async def test_a_copy_of_another_call_counts_as_found(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, dead, source = await bury(3)
    letters = await stored(js, stream, dead)
    await js.publish(
        f"{source}.1", b"1", headers={"Nats-Msg-Id": f"redrive:{stream}:{letters[1].seq}:{letters[1].time_ns}"}
    )
    publish, tried = _Redriving._publish, list[int]()

    async def lose_an_answer(self: _Redriving, letter: Any) -> Any:
        tried.append(letter.seq)
        outcome = await publish(self, letter)
        if len(tried) == 1:
            raise errors.RequestTimeoutError("no answer")
        return outcome

    with monkeypatch.context() as patched:
        patched.setattr(_Redriving, "_publish", lose_an_answer)
        assert await redrive(js, stream, dead, offsets=offsets) == Redriven(sent=2, found=1, left=0)
    assert (await payloads(js, source))[3:] == [b"1", b"0", b"2"]


async def test_a_leader_that_may_have_a_successor_is_not_believed(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cut off from the others and answers what it had when it was. They have the letters."""
    stream, dead, source = await bury(3)
    before = await stream_state(Context(js), source)
    await die_before_the_deletes(js, stream, dead, offsets, monkeypatch)

    async def answer(context: Context, name: str, timeout: float) -> StreamState:
        return replace(before, leader_is_certain=False)

    async def refuse(*_: Any) -> int:
        return before.last_seq

    with monkeypatch.context() as patched:
        patched.setattr(redrive_search, "stream_state", answer)
        patched.setattr(redrive_search.CopySearch, "_marked", refuse)
        await redrive(js, stream, f"{stream}.other", offsets=offsets, patience=0.3)
        with pytest.raises(errors.HistoryUnavailableError, match="cannot be read"):
            await redrive(js, stream, dead, offsets=offsets, patience=0.3)
    assert (await redrive(js, stream, dead, offsets=offsets)).found == 3
    assert (await payloads(js, source))[3:] == [b"0", b"1", b"2"]


async def test_a_letter_that_a_new_leader_does_not_know_yet_is_not_forgotten(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, dead, _ = await bury(3)
    await die_before_the_deletes(js, stream, dead, offsets, monkeypatch)
    get, asked = redrive_letters.get_at_leader, set[int]()

    async def get_late(context: Context, name: str, request: Any, timeout: float) -> StoredMsg | None:
        if name == stream and request["seq"] not in asked:
            asked.add(request["seq"])
            return None
        return await get(context, name, request, timeout)

    monkeypatch.setattr(redrive_letters, "get_at_leader", get_late)
    assert await redrive(js, stream, dead, offsets=offsets) == Redriven(sent=0, found=3, left=0)
    assert await stored(js, stream, dead) == []


async def test_a_target_that_could_not_be_read_for_a_moment(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `again` its letters are looked for once more; nothing was lost, so they are not sent again."""
    stream, dead, source = await bury(3)
    await die_before_the_deletes(js, stream, dead, offsets, monkeypatch)
    look_patiently = _Redriving._look_patiently

    async def fail(*_: Any) -> None:
        raise errors.RequestTimeoutError("no answer")

    async def fail_once(self: _Redriving, letters: Any) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(redrive_search.CopySearch, "look", fail)
            await look_patiently(self, letters)
        monkeypatch.setattr(_Redriving, "_look_patiently", look_patiently)

    with monkeypatch.context() as patched:
        patched.setattr(redrive_search.CopySearch, "look", fail)
        for again in (False, True):
            with pytest.raises(errors.HistoryUnavailableError, match="cannot be read: repeat the call"):
                await redrive(js, stream, dead, offsets=offsets, again=again, patience=0.2)
    monkeypatch.setattr(_Redriving, "_look_patiently", fail_once)
    done = await redrive(js, stream, dead, offsets=offsets, again=True, patience=0.2)
    assert done == Redriven(sent=0, found=3, left=0)
    assert (await payloads(js, source))[3:] == [b"0", b"1", b"2"]
    assert await stored(js, stream, dead) == []


async def test_two_calls_that_send_again_use_the_same_ids(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one is suspended between the read of a letter and its publish."""
    stream, dead, source = await put_in_doubt(js, bury, offsets, monkeypatch)
    other: list[Redriven] = []

    async def let_another_one_send(number: int) -> None:
        if number == 2:
            other.append(await redrive(js, stream, dead, offsets=OffsetStore(js, offsets.bucket), again=True))

    with monkeypatch.context() as patched:
        publishes = Publishes(patched, source, let_another_one_send)
        with pytest.raises(errors.FencedError):
            await redrive(js, stream, dead, offsets=offsets, again=True)
    assert other == [Redriven(sent=2, found=1, left=0)]
    first, second = publishes.ids[:2]
    assert first.partition("/")[2]
    assert publishes.ids[2] == second
    assert {it.partition("/")[2] for it in publishes.ids} == {first.partition("/")[2]}
    assert await payloads(js, source) == [b"0", b"1", b"2"]


async def test_a_bucket_in_memory_is_refused(js: JetStreamContext, bury: Bury, stream_name: Callable[[], str]) -> None:
    stream, dead, source = await bury(1)
    bucket = stream_name()
    await js.create_key_value(bucket=bucket, storage=StorageType.MEMORY)
    with pytest.raises(errors.StreamConfigMismatchError, match="is in memory"):
        await redrive(js, stream, dead, offsets=OffsetStore(js, bucket))
    assert await payloads(js, source) == [b"0"]


async def test_targets_that_cannot_be_read_take_one_patience_together(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, dead, source = await bury(1)
    for number in range(3):
        other = f"{source}_{number}"
        await js.add_stream(name=other, subjects=[other], allow_direct=True)
        await js.publish(other, b"")
        letters = DeadLetter(dead, attempts=1, backoff=0)
        await exactly_once(
            LogReader(js, other), stream, lambda _: 1 / 0, name=other, prefix=f"{stream}.at", dead_letter=letters  # type: ignore[arg-type,return-value]
        )  # fmt: skip
    await die_before_the_deletes(js, stream, dead, offsets, monkeypatch)

    async def fail(*_: Any) -> None:
        raise errors.RequestTimeoutError("no answer")

    monkeypatch.setattr(redrive_search.CopySearch, "look", fail)
    async with asyncio.timeout(2.5):
        with pytest.raises(errors.HistoryUnavailableError, match="cannot be read"):
            await redrive(js, stream, dead, offsets=offsets, patience=1)


async def test_notes_of_an_earlier_version_are_in_doubt(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say nothing by which a target shows that it has not lost its last messages; what it has is found."""
    stream, dead, source = await bury(2)
    await die_before_the_deletes(js, stream, dead, offsets, monkeypatch)
    created = (await stream_state(Context(js), source)).created
    first, second = await stored(js, stream, dead)
    copy = (await stored(js, source))[-1]
    await js.delete_msg(source, copy.seq)
    rows = [[it.seq, it.time_ns, source, f"{source}.0", created, 2, ""] for it in (first, second)]
    kv = await js.key_value(offsets.bucket)
    note = {"v": 1, "writer": "x", "number": 1, "letters": rows}
    await kv.put(f"redrive.{stream}", orjson.dumps(note))
    with pytest.raises(errors.HistoryUnavailableError, match=rf"\[{second.seq}\]"):
        await redrive(js, stream, dead, offsets=offsets)
    assert await list_sequences(js, stream, dead) == [second.seq]
    assert await redrive(js, stream, dead, offsets=offsets, again=True) == Redriven(sent=1, found=0, left=0)


@pytest.mark.parametrize(
    "note",
    [
        b"", b"{}", b"[]", b'{"v": 3, "letters": []}', b'{"v": 2, "letters": [1]}', b'{"v": 2, "letters": [[]]}',
        b'{"v": 2, "letters": [[1, 1, "S", "s", 1, "yesterday", ""]]}', b'{"v": 2, "letters": [[1, 1, "S", "s", 1, 1, ""]]}',
        b'{"v": 2, "letters": [[1, 1, "S", "s", -1, null, ""]]}', b'{"v": 1, "letters": [[1, 1, "S", "s", 1, ""]]}',
    ],
)  # fmt: skip
async def test_a_note_that_no_redrive_writes_is_refused(
    js: JetStreamContext, bury: Bury, offsets: OffsetStore, note: bytes
) -> None:
    stream, dead, _ = await bury(1)
    await offsets.create()
    await (await js.key_value(offsets.bucket)).put(f"redrive.{stream}", note)
    with pytest.raises(ValueError, match="no redrive writes"):
        await redrive(js, stream, dead, offsets=offsets)
    assert len(await list_sequences(js, stream, dead)) == 1
