"""A server that breaks the NATS protocol ends its connection or the call, not the client's memory or patience."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import nats
import nats.errors
import pytest
from client_cells import each
from clients import quiet
from nats.aio.client import Client

import jetstream_ext as jsx
from jetstream_ext.errors import ResponseError
from jetstream_ext.log import OffsetStore

INFO = {"server_id": "F", "version": "2.15.1", "proto": 1, "headers": True, "max_payload": 1 << 20, "api_lvl": 4}
NO_STREAM = {"error": {"code": 404, "err_code": 10059, "description": "stream not found"}}

Answer = Callable[[asyncio.StreamWriter, bytes, bytes], Awaitable[None]]
Connect = Callable[[Answer], Awaitable[Client]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Connect to a server that answers a request by calling a function with its subject and the start of a MSG line."""
    opened: list[Client] = []
    listeners: list[asyncio.Server] = []

    async def connect(answer: Answer) -> Client:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            sids: dict[bytes, bytes] = {}
            writer.write(b"INFO %b\r\n" % json.dumps(INFO).encode())
            try:
                while line := await reader.readline():
                    words = line.split()
                    if words[0] == b"PING":
                        writer.write(b"PONG\r\n")
                    elif words[0] == b"SUB":
                        sids[words[1].rstrip(b".*>")] = words[-1]
                    elif words[0] in (b"PUB", b"HPUB"):
                        await reader.readexactly(int(words[-1]) + 2)
                        sid = next(sid for prefix, sid in sids.items() if words[2].startswith(prefix))
                        await answer(writer, words[1], b"MSG %b %b " % (words[2], sid))
            except ConnectionError:
                pass
            finally:
                writer.transport.abort()

        listeners.append(await asyncio.start_server(serve, "127.0.0.1", 0))
        port = listeners[-1].sockets[0].getsockname()[1]

        opened.append(await nats.connect(f"nats://127.0.0.1:{port}", allow_reconnect=False, error_cb=quiet))
        return opened[-1]

    yield connect
    for nc in opened:
        await nc.close()
    for listener in listeners:
        listener.close()


@pytest.mark.internals("nats-py's own parser buffers without bound")
@each(
    "beginning",
    [b"MSG a", b"-ERR '", b"INFO {", b"x", b"MSG a 1 ", b"%b9223372036854775807\r\n", b"%b99999999999999999999999\r\n"],
)
@each("of_an_inbox", [True, False])
async def test_a_line_or_message_without_an_end_ends_the_connection(
    connect: Connect, beginning: bytes, of_an_inbox: bool
) -> None:
    sent = 0

    async def feed(writer: asyncio.StreamWriter, subject: bytes, line: bytes) -> None:
        nonlocal sent
        writer.write(beginning % line if b"%" in beginning else beginning)
        while sent < 1 << 26:
            writer.write(b"x" * 60_000)
            await writer.drain()
            sent += 60_000

    js = (await connect(feed)).jetstream(timeout=20)
    with pytest.raises(nats.errors.Error) as caught:
        await (jsx.DirectGet(js, "S").get(1) if of_an_inbox else jsx.features(js))
    assert not isinstance(caught.value, nats.errors.TimeoutError)
    assert sent < 1 << 24


@each("answer", [b"3", b"[]", b'{"error":7}', b"[" * 10_000, b'{"config":[1]}', b'"error"'])
async def test_an_answer_that_nats_py_cannot_process_is_a_response_error(connect: Connect, answer: bytes) -> None:
    async def lie(writer: asyncio.StreamWriter, subject: bytes, line: bytes) -> None:
        body = json.dumps(NO_STREAM).encode() if b".STREAM.INFO." in subject else answer
        writer.write(line + b"%d\r\n%b\r\n" % (len(body), body))

    js = (await connect(lie)).jetstream(timeout=20)
    with pytest.raises(ResponseError, match="positions"):
        await OffsetStore(js, "positions").create()
