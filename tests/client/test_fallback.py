"""A nats-py with unknown internals: slower, with one warning, and otherwise the same."""

import asyncio
import base64
import json
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import nats
import nats.errors
import pytest
from client_cells import each
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.client.base_connection import FallbackConnection, InboxHandler
from jetstream_ext.client.connection import _CLIENT, connection_of
from jetstream_ext.protocol.frames import Frame, parts, pub
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
                with pytest.raises(errors.DirectGetDisabledError):
                    await direct.get(1)
            with pytest.raises(errors.DirectGetDisabledError):
                await jsx.DirectGet(js, "NO_OTHER").get(1)
        assert [(warning.category, "several times slower" in str(warning.message)) for warning in caught] == [
            (RuntimeWarning, True)
        ]
        assert isinstance(connection_of(nc), FallbackConnection)
        assert connection_of(nc) is connection_of(nc)
        await nc.close()


@each("missing", sorted(_CLIENT))
def test_any_missing_internal_selects_the_fallback(missing: str) -> None:
    nc = Client()
    setattr(nc, missing, object())
    assert isinstance(connection_of(nc), FallbackConnection)


async def test_every_value_of_a_header_is_sent(js: JetStreamContext, stream: str) -> None:
    headers = own_headers([("K", "1"), ("K", "2")])
    await jsx.publish_atomic(js, [jsx.BatchMessage(f"{stream}.a", b"", headers)])
    answer = await js._nc.request(f"$JS.API.STREAM.MSG.GET.{stream}", b'{"seq": 1}', timeout=30)
    lines = base64.b64decode(json.loads(answer.data)["message"]["hdrs"]).split(b"\r\n")
    assert [line for line in lines if line.startswith(b"K: ")] == [b"K: 1", b"K: 2"]


async def test_fast_ingest_works(js: JetStreamContext, stream: str, leak_check: Any) -> None:
    headers = {"K": "v", "Unicode": "ä"}
    async with jsx.FastPublisher(js, flow=10) as publisher:
        await publisher.add(f"{stream}.a", b"0", headers=headers)
        await publisher.add_many((f"{stream}.{i % 3}", b"%d" % i) for i in range(1, 200))
        await publisher.flush()
    assert publisher.ack.batch_size == 200
    messages = await jsx.DirectGet(js, stream).scan(batch=30).to_list()
    assert [m.data for m in messages] == [b"%d" % i for i in range(200)]
    assert messages[0].headers == headers
    await settled(leak_check)


async def test_concurrent_writes_keep_their_order(js: JetStreamContext, nc: Client, stream: str) -> None:
    # Every publish waits for the flusher: reordered writes would be gaps.
    nc._max_pending_size = 1
    async with jsx.FastPublisher(js) as publisher:
        await publisher.add(f"{stream}.a", b"first")
        await asyncio.gather(*(publisher.add_many((f"{stream}.a", b"x") for _ in range(20)) for _ in range(5)))
    assert publisher.ack.batch_size == 101


async def test_a_cancelled_write_has_written_everything(
    nc: Client, heard: tuple[FallbackConnection, str, list[Frame]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jetstream_ext.client.base_connection._MAX_QUEUED", 0)
    connection, subject, frames = heard
    data = [pub(subject.encode(), b"", b"", b"%d" % i) for i in range(4)]
    nc._max_pending_size = 1  # every publish waits for the flusher
    first = asyncio.create_task(connection.write(data[0] + data[1], 2, 2, timeout=5))
    second = asyncio.create_task(connection.write(data[2] + data[3], 2, 2, timeout=5))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([first, second])
    assert second.cancelled()
    async with asyncio.timeout(30):
        while len(frames) < 4:
            await asyncio.sleep(0.001)
    assert [parts(frame)[2] for frame in frames] == [b"0", b"1", b"2", b"3"]


async def test_atomic_batches_work(js: JetStreamContext, stream: str, leak_check: Any) -> None:
    async with jsx.AtomicBatch(js, ack_every=2) as batch:
        for i in range(5):
            await batch.add(f"{stream}.a", b"%d" % i, headers={"I": str(i)})
    assert batch.ack.batch_size == 5
    failed = jsx.AtomicBatch(js)
    await failed.add(f"{stream}.a", b"", expected_last_seq=99)
    with pytest.raises(errors.WrongLastSequenceError):
        await failed.commit_eob()
    messages = await jsx.DirectGet(js, stream).batch(10).to_list()
    assert [(m.data, m.headers["I"]) for m in messages] == [(b"%d" % i, str(i)) for i in range(5)]
    await settled(leak_check)


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


async def test_a_closed_connection_ends_calls(nc: Client, js: JetStreamContext, stream: str) -> None:
    publisher = jsx.FastPublisher(js)
    await publisher.add(f"{stream}.a", b"x")
    await nc.close()
    with pytest.raises(errors.BatchAbandonedError, match="connection was closed"):
        await publisher.add(f"{stream}.a", b"y")
    assert publisher.end_reason is jsx.EndReason.DISCONNECTED
    with pytest.raises(nats.errors.ConnectionClosedError):
        await jsx.DirectGet(js, stream).get(1)


async def test_a_lost_connection_ends_a_read_before_its_timeout(
    own_nc: Client, own_js: JetStreamContext, own_server: NatsServer, own_stream: Callable[..., Awaitable[str]]
) -> None:
    with_unknown_internals(own_nc)
    name = await own_stream()
    for i in range(3):
        await own_js.publish(f"{name}.a", b"%d" % i)
    direct = jsx.DirectGet(own_js, name, timeout=60)
    for read in (direct.get(2), direct.batch(1, seq=2).to_list()):
        own_server.pause()
        sent = own_nc.stats["out_msgs"]
        reading = asyncio.ensure_future(read)
        async with asyncio.timeout(10):
            while own_nc.stats["out_msgs"] == sent:
                await asyncio.sleep(0)
        own_server.kill()
        await asyncio.to_thread(own_server.restart)
        async with asyncio.timeout(20):
            found = await reading
        assert (found if isinstance(found, jsx.StoredMsg) else found[0]).seq == 2


@pytest.fixture
async def heard(nc: Client) -> AsyncIterator[tuple[FallbackConnection, str, list[Frame]]]:
    connection = connection_of(nc)
    assert isinstance(connection, FallbackConnection)
    frames: list[Frame] = []
    inbox = await connection.inbox(InboxHandler(frames.extend, lambda: None), timeout=5)
    yield connection, inbox.subject, frames
    inbox.close()
    await asyncio.sleep(0)


UNFINISHED = {
    "unfinished": (b"NATS/1.0\r\nA: bcd", {"A": "b"}),
    "a name twice": (b"NATS/1.0\r\nA: 1\r\nB: 2\r\nA: bcd", {"A": "b", "B": "2"}),
    "after a forged stream": (b"NATS/1.0\r\nNats-Stream: OTHER\r\nA: bcd", {"A": "b"}),
    "no value": (b"NATS/1.0\r\nfoo", {}),
    "line feeds only": (b"NATS/1.0\nA: b\n\n", {}),
    "garbage": (b"\x00garbage\xff", {}),
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
    direct = jsx.DirectGet(js, stream)
    for read in (await direct.batch(9).to_list(), await direct.scan(confirm=True).to_list()):
        assert [(m.stream, m.seq, m.data, m.headers) for m in read] == [
            (stream, 1, b"1", {}),
            (stream, 2, b"2", headers),
            (stream, 3, b"3", {}),
        ]
    single = await direct.get(2)
    assert (single.stream, single.seq, single.data, single.headers) == (stream, 2, b"2", headers)


async def test_a_loss_is_known_before_the_next_write(own_nc: Client, own_server: NatsServer) -> None:
    connection = connection_of(with_unknown_internals(own_nc))
    told: list[str] = []
    handler = InboxHandler(lambda _: None, lambda: told.append("lost"), lambda: told.append("back"))
    inbox = await connection.inbox(handler, timeout=5)
    assert connection._poll is not None
    connection._poll.cancel()  # only the callers look at the connection
    await own_nc.force_reconnect()
    async with asyncio.timeout(30):
        while not own_nc.is_connected or not own_nc.stats["reconnects"]:
            await asyncio.sleep(0.001)
    connection.write_nowait(pub(b"a", b"", b"", b""), 1, 0)
    assert told == ["lost", "back"]
    inbox.close()
