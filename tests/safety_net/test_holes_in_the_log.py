"""A reader returns every message or reports the missing ones, wherever in the stream it started."""

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

import jetstream_ext as jsx
from jetstream_ext.errors import JetStreamExtError, PositionLostError
from jetstream_ext.log import LogReader, exactly_once
from jetstream_ext.testing import NatsServer

sys.path.insert(0, str(Path(__file__).parent))

from frame_proxy import FrameProxy, before_request

ISSUE = "Key-value and log: no guess, no hole"
MESSAGES = 3000
PURGED = 2500


@pytest.fixture
async def numbers(js: JetStreamContext, stream_name: Callable[[], str]) -> str:
    """A stream of 3,000 messages."""
    name = stream_name()
    await jsx.ensure_stream(
        js, StreamConfig(name=name, subjects=[f"{name}.in"], allow_direct=True, allow_atomic=True, allow_msg_ttl=True)
    )
    for begin in range(0, MESSAGES, 500):
        await jsx.publish_atomic(js, [jsx.BatchMessage(f"{name}.in", b"%d" % n) for n in range(begin, begin + 500)])
    return name


def purge_between_requests(js: JetStreamContext, name: str) -> Callable[..., Awaitable[Any]]:
    """Return a hook that purges most of the stream when the reader asks for the second part of its first group."""
    return before_request(2, rf"\.DIRECT\.GET\.{name}$", lambda: js.purge_stream(name, seq=PURGED + 1))


async def test_reader_from_the_first_message_reports_a_purge_during_its_first_group(
    server: NatsServer, js: JetStreamContext, numbers: str
) -> None:
    async with FrameProxy(server.port, purge_between_requests(js, numbers)) as proxy:
        nc = await nats.connect(proxy.url, connect_timeout=10)
        read: list[int] = []
        expected: int | None = MESSAGES + 1
        try:
            async for message in LogReader(nc.jetstream(timeout=30), numbers):
                read.append(message.seq)  # noqa: PERF401 - messages before an error count, too
        except PositionLostError as error:
            expected = error.expected
        finally:
            await nc.close()
    assert read == list(range(1, len(read) + 1)), "the sequences that were returned have a hole"
    assert expected == len(read) + 1


async def test_worker_does_not_end_as_a_success_when_inputs_are_purged_unhandled(
    server: NatsServer, js: JetStreamContext, numbers: str, stream_name: Callable[[], str]
) -> None:
    output = stream_name()
    await js.add_stream(name=output, subjects=[f"{output}.>"], allow_direct=True, allow_atomic=True)
    handled: list[int] = []
    expected: int | None = MESSAGES + 1
    async with FrameProxy(server.port, purge_between_requests(js, numbers)) as proxy:
        nc = await nats.connect(proxy.url, connect_timeout=10)
        try:
            reader = LogReader(nc.jetstream(timeout=30), numbers)
            await exactly_once(
                reader, output, lambda message: handled.append(message.seq), name="w", prefix=f"{output}.at"
            )
        except PositionLostError as error:
            expected = error.expected
        finally:
            await nc.close()
    assert handled == list(range(1, len(handled) + 1)), "the worker passed over inputs"
    assert expected == len(handled) + 1


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason=f"{ISSUE}: above sequence 2**62 a reader silently returns nothing",
)
async def test_reader_never_passes_over_messages_with_large_sequences(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    await js.add_stream(name=name, subjects=[name], allow_direct=True, first_seq=(1 << 62) + 1)
    for n in range(5):
        await js.publish(name, b"%d" % n)
    try:
        read = [message.data async for message in LogReader(js, name)]
    except JetStreamExtError:
        return  # an error is also correct
    assert read == [b"0", b"1", b"2", b"3", b"4"]
