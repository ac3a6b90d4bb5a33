"""A nats-py with unknown internals: slower, with one warning, and otherwise the same."""

import asyncio
import base64
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import nats
import nats.errors
import pytest
from client_cells import each
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.client.base_connection import FallbackConnection
from jetstream_ext.client.connection import connection_of
from jetstream_ext.testing import NatsServer
from jetstream_ext.types import own_headers


def with_unknown_internals(nc: Client) -> Client:
    """Change an internal of `nc` without an effect on nats-py itself."""
    parse = nc._ps.parse
    nc._ps.parse = lambda data=b"": parse(data)  # type: ignore[method-assign]
    return nc


@pytest.fixture
def nc(nc: Client) -> Client:
    return with_unknown_internals(nc)


@pytest.fixture(autouse=True)
def expected() -> Iterator[None]:
    """Ignore the warning in tests of other behaviour."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "jetstream_ext does not know the internals", RuntimeWarning)
        yield


@pytest.fixture
async def stream(js: JetStreamContext, stream_name: Callable[[], str]) -> str:
    name = stream_name()
    await js.add_stream(
        name=name, subjects=[f"{name}.>"], allow_direct=True, allow_atomic=True, allow_batched=True, allow_msg_ttl=True
    )
    return name


async def settled(leak_check: Any) -> None:
    for _ in range(5):  # the fallback unsubscribes in the background
        await asyncio.sleep(0)
    await leak_check.assert_clean()


async def test_it_warns_once_per_connection(server: NatsServer) -> None:
    for _ in range(2):
        nc = with_unknown_internals(await nats.connect(server.url, connect_timeout=10))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            js = nc.jetstream()
            direct = jsx.DirectGet(js, "NO_SUCH_STREAM")
            for _ in range(3):
                with pytest.raises(NotFoundError):
                    await direct.get(1)
            with pytest.raises(NotFoundError):
                await jsx.DirectGet(js, "NO_OTHER").get(1)
        assert [(warning.category, "several times slower" in str(warning.message)) for warning in caught] == [
            (RuntimeWarning, True)
        ]
        assert isinstance(connection_of(nc), FallbackConnection)
        assert connection_of(nc) is connection_of(nc)
        await nc.close()


async def test_every_value_of_a_header_is_sent(js: JetStreamContext, stream: str) -> None:
    headers = own_headers([("K", "1"), ("K", "2")])
    await jsx.publish_atomic(js, [jsx.BatchMessage(f"{stream}.a", b"", headers)])
    answer = await js._nc.request(f"$JS.API.STREAM.MSG.GET.{stream}", b'{"seq": 1}', timeout=30)
    lines = base64.b64decode(json.loads(answer.data)["message"]["hdrs"]).split(b"\r\n")
    assert [line for line in lines if line.startswith(b"K: ")] == [b"K: 1", b"K: 2"]


async def test_direct_gets_work(js: JetStreamContext, stream: str, leak_check: Any) -> None:
    spoof = {"Nats-Sequence": "77", "Status": "204", "Description": "EOB", "K": "v"}
    await js.publish(f"{stream}.a", b"", headers=spoof)
    await js.publish(f"{stream}.b", b"two")
    direct = jsx.DirectGet(js, stream)
    for messages in (await direct.scan().to_list(), [await direct.get(1), await direct.get(2)]):
        assert [(m.seq, m.data) for m in messages] == [(1, b""), (2, b"two")]
        assert messages[0].headers == {"Status": "204", "Description": "EOB", "K": "v"}
    last = direct.multi_last([f"{stream}.>"], max_bytes=1)
    assert [m.seq async for m in last] == [1, 2]
    assert (last.up_to_seq, last.num_pending) == (2, 0)
    assert await direct.batch(3, seq=9).to_list() == []
    with pytest.raises(errors.MessageNotFoundError):
        await direct.get(9)
    await settled(leak_check)


UNFINISHED = {
    "unfinished": (b"NATS/1.0\r\nA: bcd", {}),
    "after a forged stream": (b"NATS/1.0\r\nNats-Stream: OTHER\r\nA: bcd", {}),
    "no value": (b"NATS/1.0\r\nfoo", {}),
    "line feeds only": (b"NATS/1.0\nA: b\n\n", {}),
    "two bytes": (b"xx", {}),
    "a status": (b"NATS/1.0 404 a", {}),
    "complete, with the server's names": (
        b"NATS/1.0\r\nNats-Last-Sequence: 9\r\nNats-Stream: OTHER\r\nNats-Sequence: 7\r\nA: b\r\n\r\n",
        {"A": "b"},
    ),
    "complete, with a value like the server's": (
        b"NATS/1.0\r\nA: of Nats-Stream: OTHER\r\n\r\n",
        {"A": "of Nats-Stream: OTHER"},
    ),
}


@each("block, headers", UNFINISHED.values())
async def test_messages_with_any_header_block_are_read(
    server: NatsServer, js: JetStreamContext, stream_name: Callable[[], str], block: bytes, headers: dict[str, str]
) -> None:
    """The server puts its own lines in place of the last two bytes of a block, whatever they are."""
    stream = stream_name()
    await js.add_stream(name=stream, subjects=[f"{stream}.>"], allow_direct=True)
    await js.publish(f"{stream}.a", b"1")
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n')
    writer.write(b"HPUB %b.b %d %d\r\n%b2\r\nPING\r\n" % (stream.encode(), len(block), len(block) + 1, block))
    await reader.readuntil(b"PONG\r\n")
    writer.close()
    await js.publish(f"{stream}.c", b"3")
    async with await nats.connect(server.url, connect_timeout=10) as known:
        assert (await jsx.DirectGet(known.jetstream(timeout=30), stream).get(2)).headers == headers
    direct = jsx.DirectGet(js, stream)
    for read in (await direct.batch(9).to_list(), await direct.scan(confirm=True).to_list()):
        assert [(m.stream, m.seq, m.data, m.headers) for m in read] == [
            (stream, 1, b"1", {}),
            (stream, 2, b"2", headers),
            (stream, 3, b"3", {}),
        ]
    single = await direct.get(2)
    assert (single.stream, single.seq, single.data, single.headers) == (stream, 2, b"2", headers)
