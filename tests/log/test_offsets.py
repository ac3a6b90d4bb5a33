"""Positions in a bucket: their format, the fence between readers, and automatic commits."""

import asyncio
import json
import pickle
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import nats.errors
import nats.js.errors
import pytest
from nats.js import JetStreamContext

from jetstream_ext import errors
from jetstream_ext.log import LogReader, New, OffsetStore, Stored

sys.path.insert(0, str(Path(__file__).parent))

from group_members import replace_publish

Make = Callable[..., Awaitable[str]]
More = Callable[[str, int, int], Awaitable[None]]
Store = Callable[..., Awaitable[OffsetStore]]


async def test_a_new_reader_continues_at_the_stored_position(
    js: JetStreamContext, make_stream: Make, make_store: Store, stream_name: Any
) -> None:
    name, bucket = await make_stream(10), stream_name()
    store = await make_store(bucket)
    assert await store.fetch("r") is None
    assert await LogReader(js, name, start=Stored("r", default=New()), offsets=store).open() == 11
    reader = LogReader(js, name, start=Stored("r"), offsets=store)
    assert await reader.open() == 1
    await reader.read(4)
    stored = await store.commit(reader)
    assert (stored.name, stored.stream, stored.created, stored.seq) == ("r", name, reader.created, 5)
    assert await store.fetch("r") == stored
    assert pickle.loads(pickle.dumps(stored)) == stored
    entry = await (await js.key_value(bucket)).get("r")
    shown = {"v": 1, "stream": name, "created": reader.created, "seq": 5, "writer": stored.writer}
    assert json.loads(entry.value or b"") == shown

    again = LogReader(js, name, start=Stored("r"), offsets=await make_store(bucket))
    assert again.name == "r"
    assert await again.open() == 5
    assert [msg.seq for msg in await again.read()] == [5, 6, 7, 8, 9, 10]
    assert (await again.offsets.commit(again)).seq == 11


async def test_a_position_of_an_earlier_release_is_read(
    js: JetStreamContext, make_stream: Make, make_store: Store
) -> None:
    name, store = await make_stream(5), await make_store()
    for writer in ("writer", "worker"):
        body = {"v": 1, "stream": name, "created": "", "seq": 3, writer: "PJuOHMHJfKT3"}
        await (await js.key_value(store.bucket)).put("r", json.dumps(body).encode())
        found = await store.fetch("r")
        assert found is not None
        assert (found.seq, found.writer) == (3, "PJuOHMHJfKT3")
        assert await LogReader(js, name, start=Stored("r"), offsets=store).open() == 3


async def test_the_reader_that_fetched_last_fences_the_other(
    js: JetStreamContext, make_stream: Make, make_store: Store, stream_name: Any
) -> None:
    name, bucket = await make_stream(20), stream_name()
    old, new = await make_store(bucket), await make_store(bucket)
    first = LogReader(js, name, start=Stored("r"), offsets=old)
    await first.read(3)
    await old.commit(first)
    second = LogReader(js, name, start=Stored("r"), offsets=new)
    await second.read(3)
    await new.commit(second)
    await first.read(3)
    with pytest.raises(errors.FencedError, match="another reader of this name") as caught:
        await old.commit(first)
    assert (caught.value.name, caught.value.seq) == ("r", 7)
    found = await new.fetch("r")
    assert found is not None
    assert found.seq == 7
    # A fetch takes the name back.
    await old.fetch("r")
    await old.commit(first)
    with pytest.raises(errors.FencedError):
        await new.commit(second)


async def test_a_commit_over_a_position_that_was_not_fetched_or_was_deleted_needs_a_fetch(
    js: JetStreamContext, make_stream: Make, make_store: Store, stream_name: Any
) -> None:
    bucket, reader = stream_name(), LogReader(js, await make_stream(5))
    first, other = await make_store(bucket), await make_store(bucket)
    with pytest.raises(ValueError, match="Stored"):
        await first.commit(reader)
    await first.commit(reader, name="r")
    with pytest.raises(errors.FencedError, match="not fetched"):
        await other.commit(reader, name="r", position=3)
    assert (await other.fetch("r") or pytest.fail("gone")).seq == 1
    await (await js.key_value(bucket)).delete("r")
    with pytest.raises(errors.FencedError, match="deleted"):
        await other.commit(reader, name="r")
    assert await other.fetch("r") is None
    assert (await other.commit(reader, name="r", position=2)).seq == 2


async def test_a_position_of_another_or_recreated_stream_is_refused(
    js: JetStreamContext, make_stream: Make, make_store: Store, more: More
) -> None:
    name, other, store = await make_stream(5), await make_stream(5), await make_store()
    await store.commit(LogReader(js, name), name="r")
    with pytest.raises(ValueError, match="take another name"):
        await LogReader(js, other, start=Stored("r"), offsets=store).open()
    await js.delete_stream(name)
    await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_atomic=True)
    await more(name, 1, 9)
    reader = LogReader(js, name, start=Stored("r"), offsets=store)
    with pytest.raises(errors.StreamRecreatedError):
        await reader.read()
    reader.seek(1)
    assert len(await reader.read()) == 9, "the reader can read the new stream"


async def test_a_value_that_is_not_a_position_is_refused(
    js: JetStreamContext, make_store: Store, stream_name: Any
) -> None:
    bucket = stream_name()
    store = await make_store(bucket)
    kv = await js.key_value(bucket)
    for value in (
        b"",
        b"7",
        b"[]",
        b'{"v":2}',
        b'{"v":1,"stream":"S","created":"","seq":0,"writer":""}',
        b'{"v":true,"stream":"S","created":"","seq":1,"writer":""}',
        b'{"v":1,"stream":"S","created":"","seq":1.5,"writer":""}',
        b'{"v":1,"stream":"S","created":"","seq":18446744073709551616,"writer":""}',
        b'{"v":1,"stream":%b,"created":"","seq":1,"writer":""}' % (b"[" * 900 + b"]" * 900),
    ):
        await kv.put("r", value)
        with pytest.raises(ValueError, match="not a position"):
            await store.fetch("r")


async def test_a_missing_bucket_is_reported_and_can_be_created(js: JetStreamContext, stream_name: Any) -> None:
    store = OffsetStore(js, stream_name())
    advice = rf"bucket '{store.bucket}' does not exist; OffsetStore\(js, '{store.bucket}'\)\.create\(\)"
    with pytest.raises(nats.js.errors.BucketNotFoundError, match=advice):
        await store.fetch("r")
    await store.create()
    assert await (await store.create()).fetch("r") is None


async def test_a_stream_that_is_no_bucket_is_refused(js: JetStreamContext, stream_name: Any) -> None:
    mirror, endless, origin = stream_name(), stream_name(), stream_name()
    await js.create_key_value(bucket=origin)
    of_origin = nats.js.api.StreamSource(name=f"KV_{origin}")
    await js.add_stream(name=f"KV_{mirror}", mirror=of_origin, max_msgs_per_subject=1)
    await js.add_stream(name=f"KV_{endless}", subjects=[f"$KV.{endless}.>"])
    for name in (mirror, endless):
        for call in (OffsetStore(js, name).fetch("r"), OffsetStore(js, name).create()):
            with pytest.raises(nats.js.errors.BadBucketError):
                await call


def test_arguments_are_checked(js: JetStreamContext) -> None:
    for arguments in ({"bucket": "a.b"}, {"timeout": 0}, {"patience": -1}):
        with pytest.raises(ValueError, match=r"bucket|must be"):
            OffsetStore(js, **arguments)  # type: ignore[arg-type]
    for bad in ({"every": 0}, {"every": True}, {"seconds": 0}):
        with pytest.raises(ValueError, match="must be"):
            OffsetStore(js).committing(LogReader(js, "S"), name="r", **bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Stored"):
        OffsetStore(js).committing(LogReader(js, "S"))


class Flaky:
    """Publishes that are lost, unanswered or cancelled as planned; later ones work."""

    def __init__(self, js: JetStreamContext, monkeypatch: pytest.MonkeyPatch, plan: list[str]) -> None:
        self.plan = plan
        self._publish = js.publish
        replace_publish(monkeypatch, js, self.publish)

    async def publish(self, *arguments: Any, **options: Any) -> Any:
        what = self.plan.pop(0) if self.plan else "works"
        if what == "is refused":  # the server is overloaded
            raise nats.js.errors.APIError(code=429, err_code=10167)
        if what == "is lost":
            raise nats.errors.TimeoutError
        ack = await self._publish(*arguments, **options)
        if what == "is not answered":
            raise nats.errors.TimeoutError
        if what == "is cancelled":
            raise asyncio.CancelledError
        return ack


async def test_a_commit_whose_answer_is_lost_takes_effect_once(
    js: JetStreamContext, make_stream: Make, make_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for plan in (["is lost"], ["is not answered"], ["is refused"], ["is lost", "is not answered", "is lost"]):
        store = await make_store()
        reader = LogReader(js, await make_stream(5))
        await store.commit(reader, name="r")
        await reader.read(2)
        with monkeypatch.context() as patch:
            Flaky(js, patch, list(plan))
            stored = await store.commit(reader, name="r")
        assert stored.seq == 3, plan
        assert stored == await store.fetch("r"), plan
        await reader.read(2)
        assert (await store.commit(reader, name="r")).revision == stored.revision + 1, plan


async def test_a_cancelled_commit_does_not_fence_its_own_reader(
    js: JetStreamContext, make_stream: Make, make_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await make_store()
    reader = LogReader(js, await make_stream(5))
    flaky = Flaky(js, monkeypatch, ["is cancelled"])
    with pytest.raises(asyncio.CancelledError):
        await store.commit(reader, name="r")
    assert flaky.plan == []
    await reader.read(2)
    assert (await store.commit(reader, name="r")).seq == 3


async def test_a_commit_raises_after_patience(
    js: JetStreamContext, make_stream: Make, stream_name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await OffsetStore(js, stream_name(), patience=2).create()
    reader = LogReader(js, await make_stream(5))
    await store.commit(reader, name="r")
    Flaky(js, monkeypatch, ["is lost"] * 1000)
    with pytest.raises(nats.errors.TimeoutError):
        await store.commit(reader, name="r")


async def test_committing_commits_every_n_messages(js: JetStreamContext, make_stream: Make, make_store: Store) -> None:
    name, store = await make_stream(25), await make_store()
    reader = LogReader(js, name, start=Stored("r"), offsets=store)
    async with store.committing(reader, every=10, seconds=3600) as messages:
        committed = [(msg.seq, messages.committed) async for msg in messages]
    assert committed == [(n, 1 if n <= 10 else 11 if n <= 20 else 21) for n in range(1, 26)]
    assert messages.committed == 26
    assert (await store.fetch("r") or pytest.fail("gone")).seq == 26


async def test_committing_excludes_the_message_whose_handler_raised(
    js: JetStreamContext, make_stream: Make, make_store: Store
) -> None:
    name, store = await make_stream(25), await make_store()

    async def consume(fails_on: int) -> list[int]:
        seen: list[int] = []
        reader = LogReader(js, name, start=Stored("r"), offsets=store)
        async with store.committing(reader) as messages:
            async for msg in messages:
                if msg.seq == fails_on:
                    raise ZeroDivisionError(str(seen))
                seen.append(msg.seq)
        return seen

    with pytest.raises(ZeroDivisionError, match=r"\[1, 2, 3, 4, 5, 6\]"):
        await consume(7)
    assert (await store.fetch("r") or pytest.fail("gone")).seq == 7
    assert await consume(0) == list(range(7, 26))


async def test_a_failed_commit_does_not_hide_the_error_of_the_handler(
    js: JetStreamContext, make_stream: Make, make_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, store = await make_stream(5), await make_store()

    async def refuse(*args: Any, **options: Any) -> None:
        raise errors.FencedError("another one was started")

    async def consume() -> None:
        async with store.committing(LogReader(js, name, start=Stored("r"), offsets=store)) as messages:
            async for msg in messages:
                if msg.seq == 3:
                    monkeypatch.setattr(store, "commit", refuse)
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        await consume()
    assert any("another one was started" in note for note in caught.value.__notes__)


async def test_committing_commits_while_the_reader_waits(
    js: JetStreamContext, make_stream: Make, make_store: Store, leak_check: Any
) -> None:
    """The last messages before a quiet time are committed after `seconds`."""
    store = await make_store()
    reader = LogReader(js, await make_stream(3), start=Stored("r"), offsets=store, tail=True)

    async def follow() -> None:
        async with store.committing(reader, seconds=0.2) as messages:
            async for _ in messages:
                pass

    task, watcher = asyncio.create_task(follow()), await make_store(store.bucket)
    async with asyncio.timeout(60):
        while getattr(await watcher.fetch("r"), "seq", 0) < 4:
            await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await leak_check.assert_clean()


async def test_committing_takes_the_name_over(
    js: JetStreamContext, make_stream: Make, make_store: Store, stream_name: Any
) -> None:
    name, bucket = await make_stream(10), stream_name()
    readers = []
    for _ in range(2):
        store = await make_store(bucket)
        readers.append(store.committing(LogReader(js, name, start=Stored("r"), offsets=store), every=1))
    old, new = readers

    async def both() -> None:
        async with old:
            await anext(old)
            async with new:
                await anext(new)
            with pytest.raises(errors.FencedError, match="another reader"):
                await anext(old)

    with pytest.raises(errors.FencedError, match="another reader"):
        await both()  # the commit at the end of the block raises it again
    assert (old.committed, new.committed) == (1, 2)
