"""Ranges that mirrors answer: they are read as the stream itself has them."""

from collections.abc import Awaitable, Callable

import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig, StreamSource

import jetstream_ext as jsx
from jetstream_ext import DirectGet
from jetstream_ext.errors import StreamRecreatedError
from jetstream_ext.log import LogReader


@pytest.fixture
async def origin(js: JetStreamContext, stream_name: Callable[[], str]) -> str:
    """A stream of 300 messages on three subjects, without sequences 100 to 119 and 200."""
    name = stream_name()
    await js.add_stream(StreamConfig(name=name, subjects=[f"{name}.*"], allow_direct=True, allow_batched=True))
    async with jsx.FastPublisher(js) as publisher:
        await publisher.add_many((f"{name}.{i % 3}", b"%d" % i) for i in range(1, 301))
    for seq in (*range(100, 120), 200):
        await js.delete_msg(name, seq)
    return name


Mirror = Callable[..., Awaitable[str]]


@pytest.fixture
async def mirror(js: JetStreamContext, origin: str, stream_name: Callable[[], str]) -> Mirror:
    async def make(messages: int, **source: object) -> str:
        name = stream_name()
        config = StreamConfig(
            name=name, mirror=StreamSource(name=origin, **source), mirror_direct=True, allow_direct=True
        )
        await js.add_stream(config)
        while (await js.stream_info(name)).state.messages < messages:
            pass
        return name

    return make


def present(first: int, last: int) -> list[int]:
    return [seq for seq in range(first, last + 1) if not (100 <= seq < 120 or seq == 200)]


async def read(js: JetStreamContext, stream: str, subject: str | None = None) -> list[int]:
    found = await DirectGet(js, stream).scan(subject=subject, up_to_seq=300, confirm=True).to_list()
    return [message.seq for message in found]


async def test_a_filtered_mirror_does_not_shorten_the_read(js: JetStreamContext, origin: str, mirror: Mirror) -> None:
    await mirror(93, filter_subject=f"{origin}.1")
    for _ in range(8):  # either may answer
        assert await read(js, origin) == present(1, 300)
        assert await read(js, origin, f"{origin}.2") == [seq for seq in present(1, 300) if seq % 3 == 2]


async def test_a_mirror_that_starts_in_the_middle_does_not_shorten_the_read(
    js: JetStreamContext, origin: str, mirror: Mirror
) -> None:
    await mirror(50, opt_start_seq=251)
    for _ in range(8):
        assert await read(js, origin) == present(1, 300)


async def test_messages_deleted_from_a_mirror_are_still_read(js: JetStreamContext, origin: str, mirror: Mirror) -> None:
    name = await mirror(279)
    for seq in (50, 51, 250, 300):
        await js.delete_msg(name, seq)
    for _ in range(8):
        assert await read(js, origin) == present(1, 300)


async def test_messages_deleted_from_the_stream_are_not_read_from_a_mirror(
    js: JetStreamContext, origin: str, mirror: Mirror
) -> None:
    await mirror(279)
    for seq in (50, 51, 250, 300):
        await js.delete_msg(origin, seq)
    for _ in range(8):
        assert await read(js, origin) == [seq for seq in present(1, 300) if seq not in (50, 51, 250, 300)]


async def test_a_stream_that_was_created_again_during_the_read_is_an_error(
    js: JetStreamContext, origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = (await js.stream_info(origin)).config
    read_ = DirectGet(js, origin).scan(batch=50, prefetch=1, confirm=True)
    seen = [await anext(read_)]
    await js.delete_stream(origin)
    await js.add_stream(config)
    for _ in range(400):
        await js.publish(f"{origin}.1")
    with pytest.raises(StreamRecreatedError):
        seen += [message async for message in read_]
    assert seen


async def test_a_mirror_of_an_earlier_stream_adds_no_message(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    origin, name = stream_name(), stream_name()
    config = StreamConfig(name=origin, subjects=[origin], allow_direct=True)
    await js.add_stream(config)
    for _ in range(20):
        await js.publish(origin, b"earlier")
    await js.add_stream(name=name, mirror=StreamSource(name=origin), mirror_direct=True, allow_direct=True)
    while (await js.stream_info(name)).state.messages < 20:
        pass
    await js.delete_stream(origin)
    await js.add_stream(config)
    for _ in range(20):
        await js.publish(origin, b"new")
    for _ in range(20):
        assert {message.data async for message in DirectGet(js, origin).scan(confirm=True)} == {b"new"}
        assert {message.data async for message in LogReader(js, origin)} == {b"new"}
