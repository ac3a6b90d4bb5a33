"""A client that may publish can store any bytes as headers; every read path returns that message and all others."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import ResponseError
from jetstream_ext.log import LogReader
from jetstream_ext.testing import NatsServer

sys.path.insert(0, str(Path(__file__).parent))

from frame_proxy import Frame, FrameProxy
from read_as_spark import Read, read_as_spark

UNREADABLE = {
    "unfinished": b"NATS/1.0\r\nA: bcd",
    "line feeds only": b"NATS/1.0\nA: b\n\n",
    "garbage": b"\x00garbage\xff",
}
EMPTY = b"NATS/1.0\r\n\r\n"
FORGED = b"NATS/1.0\r\nNats-Stream: OTHER\r\nA: bcd"
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


async def get(js: JetStreamContext, name: str) -> list[bytes]:
    return [(await jsx.DirectGet(js, f"KV_{name}").get(seq)).data for seq in (1, 2, 3)]


async def get_last(js: JetStreamContext, name: str) -> list[bytes]:
    return [(await jsx.DirectGet(js, f"KV_{name}").get_last(f"$KV.{name}.{key}")).data for key in KEYS]


async def batch(js: JetStreamContext, name: str) -> list[bytes]:
    return [message.data for message in await jsx.DirectGet(js, f"KV_{name}").batch(10, seq=1).to_list()]


async def multi_last(js: JetStreamContext, name: str) -> list[bytes]:
    return [message.data async for message in jsx.DirectGet(js, f"KV_{name}").multi_last([f"$KV.{name}.>"])]


async def scan(js: JetStreamContext, name: str) -> list[bytes]:
    return [message.data async for message in jsx.DirectGet(js, f"KV_{name}").scan(confirm=True)]


async def log_reader(js: JetStreamContext, name: str) -> list[bytes]:
    return [message.data async for message in LogReader(js, f"KV_{name}")]


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


PATHS = pytest.mark.parametrize(
    "path", [get, get_last, batch, multi_last, scan, log_reader, snapshot, snapshot_of_the_past, get_many]
)
BLOCKS = pytest.mark.parametrize("block", UNREADABLE.values(), ids=UNREADABLE)


@BLOCKS
@PATHS
async def test_read_returns_every_message_beside_a_malformed_header_block(
    js: JetStreamContext, store: Store, path: Callable[[JetStreamContext, str], Awaitable[list[bytes]]], block: bytes
) -> None:
    assert await path(js, await store(block)) == [b"a", b"b", b"c"]


@BLOCKS
async def test_transaction_reads_a_key_with_a_malformed_header_block(
    js: JetStreamContext, store: Store, block: bytes
) -> None:
    tx = kvx.transaction(await js.key_value(await store(block)))
    found = await tx.get_many(KEYS)
    assert [found[key].value for key in KEYS] == [b"a", b"b", b"c"]


@pytest.mark.parametrize("call", ["get", "get_last", "get_next"])
async def test_single_get_names_the_responder_and_not_a_forged_stream(
    js: JetStreamContext, store: Store, call: str
) -> None:
    name = await store(FORGED)
    direct, subject = jsx.DirectGet(js, f"KV_{name}"), f"$KV.{name}.b"
    if call == "get":
        message = await direct.get(2)
    elif call == "get_last":
        message = await direct.get_last(subject)
    else:
        message = await direct.get_next(subject, seq=1)
    assert (message.stream, message.subject, message.seq, message.data) == (f"KV_{name}", subject, 2, b"b")


@pytest.mark.parametrize("path", [batch, multi_last, scan, log_reader, snapshot, snapshot_of_the_past, get_many])
async def test_read_returns_every_message_beside_a_forged_stream(
    js: JetStreamContext, store: Store, path: Callable[[JetStreamContext, str], Awaitable[list[bytes]]]
) -> None:
    assert await path(js, await store(FORGED)) == [b"a", b"b", b"c"]


async def test_export_writes_every_message_beside_a_malformed_header_block(
    server: NatsServer, store: Store, tmp_path: Path
) -> None:
    name, file = await store(UNREADABLE["unfinished"]), tmp_path / "messages.jsonl"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NATS_")}
    command = [sys.executable, "-m", "jetstream_ext.cli", "export", f"KV_{name}", str(file), "--server", server.url]
    done = await asyncio.to_thread(
        subprocess.run, command, env=environment | {"XDG_CONFIG_HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len([json.loads(line) for line in file.read_text().splitlines()]) == 3


async def test_spark_reads_every_message_beside_a_malformed_header_block(server: NatsServer, store: Store) -> None:
    pytest.importorskip("pyspark")
    stream = f"KV_{await store(UNREADABLE['unfinished'])}"
    read = await asyncio.to_thread(read_as_spark, server.url, stream=stream)
    assert read == Read(["a", "b", "c"], error="")


# These replies stay refused: the time that the server itself adds to the second message is malformed.


async def spoil_the_second_message(frame: Frame) -> Frame:
    if b"Nats-Sequence: 2\r\n" not in frame.header:
        return frame
    return frame.with_header(re.findall(rb"Nats-Time-Stamp: [^\r]*", frame.header)[-1], b"Nats-Time-Stamp: yesterday")


async def get_the_second(js: JetStreamContext, stream: str) -> Any:
    return (await jsx.DirectGet(js, stream).get(2)).time


async def scan_all(js: JetStreamContext, stream: str) -> Any:
    return [message.time async for message in jsx.DirectGet(js, stream).scan()]


@pytest.mark.parametrize("path", [get_the_second, scan_all])
async def test_refused_reply_is_reported_with_its_stream_and_sequence(
    server: NatsServer, store: Store, path: Callable[[JetStreamContext, str], Awaitable[Any]]
) -> None:
    stream = f"KV_{await store(EMPTY)}"
    async with FrameProxy(server.port, on_delivery=spoil_the_second_message) as proxy:
        nc = await nats.connect(proxy.url, connect_timeout=10)
        try:
            with pytest.raises(ResponseError) as caught:
                await path(nc.jetstream(), stream)
        finally:
            await nc.close()
    assert stream in str(caught.value)
    assert re.search(r"\b2\b", str(caught.value))


async def test_scan_skips_a_refused_reply_on_request(server: NatsServer, store: Store) -> None:
    stream = f"KV_{await store(EMPTY)}"
    async with FrameProxy(server.port, on_delivery=spoil_the_second_message) as proxy:
        nc = await nats.connect(proxy.url, connect_timeout=10)
        try:
            options: dict[str, Any] = {"on_bad": "skip"}
            read = [message.seq async for message in jsx.DirectGet(nc.jetstream(), stream).scan(**options)]
        finally:
            await nc.close()
    assert read == [1, 3]


async def test_spark_skips_a_refused_reply_on_request(server: NatsServer, store: Store) -> None:
    pytest.importorskip("pyspark")
    stream = f"KV_{await store(EMPTY)}"
    async with FrameProxy(server.port, on_delivery=spoil_the_second_message) as proxy:
        read = await asyncio.to_thread(read_as_spark, proxy.url, stream=stream, onBad="skip")
    assert read == Read(["a", "c"], error="")
