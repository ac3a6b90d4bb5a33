"""A reply in which something that the server itself adds is malformed is refused, or skipped on request."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import nats
import pytest
from frame_proxy import Frame, FrameProxy
from nats.js import JetStreamContext
from read_as_spark import Read, read_as_spark

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import ResponseError
from jetstream_ext.log import LogReader
from jetstream_ext.testing import NatsServer

EMPTY = b"NATS/1.0\r\n\r\n"
KEYS = ["a", "b", "c"]

Store = Callable[[bytes], Awaitable[str]]


@pytest.fixture
def store(server: NatsServer, js: JetStreamContext, stream_name: Callable[[], str]) -> Store:
    """Create a bucket of three messages; the header block of the second one is `block`."""

    async def store(block: bytes) -> str:
        name = stream_name()
        await kvx.enable(await js.create_key_value(bucket=name, history=5))
        await js.publish(f"$KV.{name}.a", b"a")
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n')
        writer.write(b"HPUB $KV.%b.b %d %d\r\n%bb\r\nPING\r\n" % (name.encode(), len(block), len(block) + 1, block))
        await reader.readuntil(b"PONG\r\n")
        writer.close()
        await writer.wait_closed()
        await js.publish(f"$KV.{name}.c", b"c")
        return name

    return store


async def snapshot(js: JetStreamContext, name: str) -> list[bytes]:
    found = await kvx.snapshot(await js.key_value(name))
    return [found[key].value for key in KEYS]


async def snapshot_of_the_past(js: JetStreamContext, name: str) -> list[bytes]:
    kv = await js.key_value(name)
    await kv.put("a", b"newer")
    found = await kvx.snapshot(kv, at=3)
    return [found[key].value for key in KEYS]


async def get_many(js: JetStreamContext, name: str) -> list[bytes]:
    found = await kvx.get_many(await js.key_value(name), KEYS)
    return [found[key].value for key in KEYS]


def spoil(name: bytes, value: bytes) -> Callable[[Frame], Awaitable[Frame]]:
    """Return what a proxy does to give a header of the second message another value."""

    async def spoil(frame: Frame) -> Frame:
        if b"Nats-Sequence: 2\r\n" not in frame.header:
            return frame
        found = re.findall(rb"%b: [^\r]*" % name, frame.header)
        return frame.with_header(found[-1], b"%b: %b" % (name, value)) if found else frame

    return spoil


spoil_the_time = spoil(b"Nats-Time-Stamp", b"yesterday")


@pytest.fixture
async def connect(server: NatsServer) -> AsyncIterator[Callable[..., Awaitable[JetStreamContext]]]:
    """Connect through a proxy that changes what the server sends."""
    async with contextlib.AsyncExitStack() as stack:

        async def connect(change: Callable[[Frame], Awaitable[Frame]]) -> JetStreamContext:
            proxy = await stack.enter_async_context(FrameProxy(server.port, on_delivery=change))
            nc = await nats.connect(proxy.url, connect_timeout=10)
            stack.push_async_callback(nc.close)
            return nc.jetstream()

        yield connect


async def times_of(messages: Any) -> Any:
    return [message.time async for message in messages]


READS_OF_TIMES: dict[str, Callable[[JetStreamContext, str], Awaitable[Any]]] = {
    "get": lambda js, name: jsx.DirectGet(js, f"KV_{name}").get(2),
    "get_last": lambda js, name: jsx.DirectGet(js, f"KV_{name}").get_last(f"$KV.{name}.b"),
    "batch": lambda js, name: times_of(jsx.DirectGet(js, f"KV_{name}").batch(10)),
    "multi_last": lambda js, name: times_of(jsx.DirectGet(js, f"KV_{name}").multi_last([f"$KV.{name}.>"])),
    "scan": lambda js, name: times_of(jsx.DirectGet(js, f"KV_{name}").scan()),
    "scan with confirm": lambda js, name: times_of(jsx.DirectGet(js, f"KV_{name}").scan(confirm=True)),
    "log reader": lambda js, name: times_of(LogReader(js, f"KV_{name}")),
    "snapshot": snapshot,
    "snapshot of the past": snapshot_of_the_past,
    "get_many": get_many,
}


async def test_refused_reply_is_reported_with_its_stream_and_sequence(
    connect: Callable[..., Awaitable[JetStreamContext]], store: Store
) -> None:
    name, js = await store(EMPTY), await connect(spoil_the_time)
    for read in READS_OF_TIMES.values():
        with pytest.raises(
            ResponseError, match=rf"^stream 'KV_{name}': message 2 is malformed: b'yesterday' is a time"
        ):
            await read(js, name)


async def test_spark_reports_a_refused_reply_or_skips_it_on_request(server: NatsServer, store: Store) -> None:
    pytest.importorskip("pyspark")
    stream = f"KV_{await store(EMPTY)}"
    async with FrameProxy(server.port, on_delivery=spoil_the_time) as proxy:
        read = await asyncio.to_thread(read_as_spark, proxy.url, stream=stream)
        skipped = await asyncio.to_thread(read_as_spark, proxy.url, stream=stream, onBad="skip")
    assert f"stream '{stream}': message 2 is malformed: b'yesterday' is a time" in read.error
    assert skipped == Read(["a", "c"], error="")


async def test_scan_skips_a_refused_reply_on_request_and_logs_it(
    connect: Callable[..., Awaitable[JetStreamContext]], store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    name = await store(EMPTY)
    for value in (b"yesterday", b"", b"2026-01-01T00:00:00", b"2026-13-01T00:00:00Z"):
        direct = jsx.DirectGet(await connect(spoil(b"Nats-Time-Stamp", value)), f"KV_{name}")
        for confirm in (False, True):
            caplog.clear()
            assert [message.seq async for message in direct.scan(on_bad="skip", confirm=confirm)] == [1, 3]
            assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
                f"skipped a message: stream 'KV_{name}': message 2 is malformed: {value!r} is a time that is not RFC 3339"
            ]


async def test_scan_reports_counts_that_are_no_numbers(
    connect: Callable[..., Awaitable[JetStreamContext]], store: Store
) -> None:
    """They tell what else the reply must have, so that no message can be passed over."""
    bucket = await store(EMPTY)

    def spoil_the_last(name: bytes) -> Callable[[Frame], Awaitable[Frame]]:
        async def spoil(frame: Frame) -> Frame:
            if not frame.header.endswith(b"Nats-Last-Sequence: 2\r\n\r\n") or b" EOB" in frame.header:
                return frame
            found = re.findall(rb"%b: [^\r]*" % name, frame.header)
            return frame.with_header(found[-1], b"%b: 1_0" % name)

        return spoil

    for name in (b"Nats-Sequence", b"Nats-Num-Pending"):
        js = await connect(spoil_the_last(name))
        with pytest.raises(ResponseError, match=rf"^stream 'KV_{bucket}': .*message [0-3] .*is not a number"):
            await jsx.DirectGet(js, f"KV_{bucket}").scan(on_bad="skip").to_list()
