"""`Connection`: byte streams in any pieces, compared with nats-py's own parser."""

import asyncio
import contextlib
import itertools
import ssl
from typing import Any
from urllib.parse import urlparse

import nats
import nats.errors
import pytest
from client_cells import each
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client, Srv
from nats.aio.transport import TcpTransport
from nats.protocol.parser import Parser

from jetstream_ext.client.base_connection import FallbackConnection, InboxHandler, InboxSubscription, cancel
from jetstream_ext.client.connection import Connection, connection_of
from jetstream_ext.errors import JetStreamExtError, RequestTimeoutError
from jetstream_ext.own_client import OwnClient
from jetstream_ext.protocol.frames import Frame, parts
from jetstream_ext.testing import NatsServer

Heard = tuple[Any, ...]
INTERNALS = pytest.mark.internals("the fallback gets messages from nats-py's subscriptions, and writes by its publish")


class Recorder(Client):
    """A nats-py client without a socket that records what its parser delivers."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Heard] = []
        self._status = Client.CONNECTED
        self._flush_queue = asyncio.Queue()
        self._flusher_task = asyncio.get_running_loop().create_future()  # type: ignore[assignment]

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        await asyncio.sleep(0)  # nats-py may suspend here
        self.heard.append(("foreign", sid, subject, reply, data, headers or b""))

    async def _process_ping(self) -> None:
        self.heard.append(("PING",))

    async def _process_pong(self) -> None:
        self.heard.append(("PONG",))

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        self.heard.append(("INFO", info))

    async def _process_err(self, err_msg: str) -> None:
        self.heard.append(("ERR", err_msg))


def listener(nc: Recorder, name: str) -> InboxHandler:
    def take(frames: list[Frame]) -> None:
        nc.heard += [(name, *parts(frame)) for frame in frames]

    return InboxHandler(take, lambda: nc.heard.append((name, "gone")))


async def opened() -> tuple[Recorder, Connection, InboxSubscription, InboxSubscription]:
    """A connection with two inboxes, of the subscription ids 1 and 12."""
    nc = Recorder()
    connection = connection_of(nc)
    assert isinstance(connection, Connection)
    first = await connection.inbox(listener(nc, "one"), timeout=5)
    nc._sid = 11
    second = await connection.inbox(listener(nc, "two"), timeout=5)
    assert [inbox.sid for inbox in (first, second)] == [1, 12]
    return nc, connection, first, second


def msg(sid: int, data: bytes, *, subject: bytes = b"a.b", reply: bytes = b"", header: bytes = b"") -> bytes:
    middle = b"%b %d %b" % (subject, sid, reply + b" " if reply else b"")
    if header:
        return b"HMSG %b%d %d\r\n%b%b\r\n" % (middle, len(header), len(header) + len(data), header, data)
    return b"MSG %b%d\r\n%b\r\n" % (middle, len(data), data)


HEADER = b"NATS/1.0 204 EOB\r\nK: v\r\n\r\n"
TRAP = b"\r\nMSG a.b 1 3\r\nabc\r\nPING\r\n"

# Bytes, and what must be delivered for them.
STREAM: list[tuple[bytes, Heard | None]] = [
    (msg(1, b"one"), ("one", b"a.b", b"", b"one")),
    (msg(1, b"two"), ("one", b"a.b", b"", b"two")),
    (b"PING\r\n", ("PING",)),
    (msg(1, b"x", header=HEADER), ("one", b"a.b", HEADER, b"x")),
    (msg(1, b"", header=HEADER), ("one", b"a.b", HEADER, b"")),
    (msg(12, b"", reply=b"r.1"), ("two", b"a.b", b"", b"")),
    (msg(12, b"12", reply=b"5", subject=b"MSG"), ("two", b"MSG", b"", b"12")),
    (msg(12, b"12 34", subject=b"12"), ("two", b"12", b"", b"12 34")),
    (msg(2, TRAP), ("foreign", 2, b"a.b", b"", TRAP, b"")),
    (msg(1, TRAP, header=HEADER), ("one", b"a.b", HEADER, TRAP)),
    (msg(121, b"z", header=HEADER, reply=b"r"), ("foreign", 121, b"a.b", b"r", b"z", HEADER)),
    (msg(11, b""), ("foreign", 11, b"a.b", b"", b"", b"")),
    (b"+OK\r\n", None),
    (b"PONG\r\n", ("PONG",)),
    (b'INFO {"server_id":"x","connect_urls":["a","b"]}\r\n', ("INFO", {"server_id": "x", "connect_urls": ["a", "b"]})),
    (b"-ERR 'Permissions Violation for Subscription'\r\n", ("ERR", "'permissions violation for subscription'")),
    (msg(12, b"last", header=HEADER, reply=b"r"), ("two", b"a.b", HEADER, b"last")),
    (msg(1, b"end"), ("one", b"a.b", b"", b"end")),
]  # fmt: skip
WHOLE = b"".join(data for data, _ in STREAM)
EXPECTED = [heard for _, heard in STREAM if heard]


async def fed(pieces: list[bytes]) -> list[Heard]:
    nc, *_ = await opened()
    for piece in pieces:
        await nc._ps.parse(piece)
    assert nc._ps.buf == b"", "everything was parsed"
    return nc.heard


async def test_foreign_messages_are_delivered_as_by_nats_py() -> None:
    nc = Recorder()
    parser = Parser(nc)
    await parser.parse(b"".join(data for data, heard in STREAM if not heard or heard[0] not in ("one", "two")))
    assert nc.heard == [heard for heard in EXPECTED if heard[0] not in ("one", "two")]


@INTERNALS
async def test_a_byte_stream_split_at_every_position_is_delivered() -> None:
    for cut in range(1, len(WHOLE)):
        assert await fed([WHOLE[:cut], WHOLE[cut:]]) == EXPECTED, cut
    assert await fed([WHOLE[i : i + 1] for i in range(len(WHOLE))]) == EXPECTED


@INTERNALS
@given(st.permutations(range(len(STREAM))), st.lists(st.integers(1, len(WHOLE) - 1), max_size=6, unique=True))
def test_messages_in_any_order_and_pieces_are_delivered(order: list[int], cuts: list[int]) -> None:
    data = b"".join(STREAM[i][0] for i in order)
    pieces = [data[a:b] for a, b in itertools.pairwise([0, *sorted(cuts), len(data)])]
    assert asyncio.run(fed(pieces)) == [heard for i in order if (heard := STREAM[i][1])]


@INTERNALS
@each("sid", [1, 2])
@each("header", [b"", HEADER])
async def test_a_large_message_is_not_parsed_again_with_every_piece(sid: int, header: bytes) -> None:
    nc, connection, *_ = await opened()
    looked = 0
    cut = connection._cut

    async def counting(data: bytes, buffer: bytearray) -> None:
        nonlocal looked
        looked += len(data)
        await cut(data, buffer)

    connection._cut = counting  # type: ignore[method-assign]
    payload = bytes(range(256)) * 4096
    data = msg(1, b"before") + msg(sid, payload, header=header) + msg(1, b"after")
    for start in range(0, len(data), 32768):
        await nc._ps.parse(data[start : start + 32768])
    before, large, after = nc.heard
    assert (before, after) == (("one", b"a.b", b"", b"before"), ("one", b"a.b", b"", b"after"))
    assert large == (("one", b"a.b", header, payload) if sid == 1 else ("foreign", 2, b"a.b", b"", payload, header))
    assert looked < 2 * len(data) + 4 * 32768


@INTERNALS
async def test_many_small_messages_are_delivered_in_blocks() -> None:
    nc, connection, *_ = await opened()
    blocks: list[int] = []
    inbox = await connection.inbox(InboxHandler(lambda frames: blocks.append(len(frames)), lambda: None), timeout=5)
    assert inbox.subscription is not None
    await nc._ps.parse(msg(inbox.subscription._id, b"x") * 1000)
    assert blocks == [1000]
    assert nc.stats["in_msgs"] == 1000
    assert nc.stats["in_bytes"] == 1000


@INTERNALS
@each("cut", [3, 14, 20, 40])
@each("sid", [1, 2])
async def test_a_reset_parser_drops_an_incomplete_message(cut: int, sid: int) -> None:
    nc, *_ = await opened()
    await nc._ps.parse(msg(sid, bytes(100), header=HEADER)[:cut])
    nc._ps.reset()  # as nats-py does for a new connection
    await nc._ps.parse(WHOLE)
    assert (nc.heard, nc._ps.buf) == (EXPECTED, b"")


MALFORMED = [
    b"MSG a.b 1\r\n", b"MSG a.b 1 x\r\nx\r\n", b"MSG a.b 1 -5\r\n", b"MSG a.b 1 -100\r\n", b"MSG\r\n", b"MSG \r\n",
    b"HMSG a.b 1 5\r\n", b"HMSG a.b 1 x 5\r\n", b"MSG a.b 1 r s 5\r\nabcde\r\n", b"msg a.b 1 1\r\nx\r\n",
    b"MSG a.b 1 1_0\r\n", b"MSG a.b 1 +1\r\nx\r\n", b"NONSENSE\r\n", b"\r\n", b"MSG a.b 1 \xb2\r\n",
    b"MSG a.b 1 " + b"9" * 30 + b"\r\n", b"MSG a.b 2 " + b"9" * 4400 + b"\r\n",
]  # fmt: skip


@INTERNALS
@each("line", MALFORMED)
async def test_a_malformed_line_fails_as_in_nats_py(line: bytes) -> None:
    async def fate(nc: Recorder) -> tuple[object, int]:
        try:
            await asyncio.wait_for(nc._ps.parse(msg(2, b"before") + line), 30)
        except nats.errors.ProtocolError as error:
            return type(error), 0
        return None, nc._ps.needed

    plain = Recorder()
    nc, *_ = await opened()
    assert await fate(nc) == await fate(plain)
    assert nc.heard == plain.heard == [("foreign", 2, b"a.b", b"", b"before", b"")]


@INTERNALS
@each("sid", [1, 2])
@each(
    "max_payload, size, accepted",
    [
        (1 << 20, 64 << 20, True), (1 << 20, 66 << 20, False),  # another server may have another limit
        (100 << 20, (100 << 20) + 70_000, True), (100 << 20, 102 << 20, False),
        (1 << 40, (2 << 30) + 70_000, True), (1 << 40, 3 << 30, False), ("100", 66 << 20, False),
    ],
)  # fmt: skip
async def test_a_message_can_be_as_large_as_its_server_allows(
    max_payload: Any, size: int, accepted: bool, sid: int
) -> None:
    nc, *_ = await opened()
    nc._max_payload = max_payload
    refused = pytest.raises(nats.errors.ProtocolError)
    with contextlib.nullcontext() if accepted else refused:
        await nc._ps.parse(b"MSG a.b %d %d\r\nbegin" % (sid, size))
        await nc._ps.parse(b"more")


# -- subscriptions


@INTERNALS
async def test_late_messages_of_a_closed_inbox_are_dropped() -> None:
    nc, _, first, _ = await opened()
    first.close()
    first.close()
    await nc._ps.parse(msg(1, b"late") + msg(12, b"ours") + msg(1, b"late", header=HEADER)[:20])
    await nc._ps.parse(msg(1, b"late", header=HEADER)[20:])
    assert nc.heard == [("two", b"a.b", b"", b"ours")]
    assert 1 not in nc._subs
    assert b"".join(nc._pending).endswith(b"UNSUB 1\r\n")


@INTERNALS
async def test_an_inbox_can_be_closed_inside_its_own_delivery() -> None:
    nc, connection, *_ = await opened()
    taken: list[Frame] = []

    def take(frames: list[Frame]) -> None:
        taken.extend(frames)
        inbox.close()

    inbox = await connection.inbox(InboxHandler(take, lambda: None), timeout=5)
    data = msg(13, b"x")
    await nc._ps.parse(data + msg(2, b"foreign") + data)
    await nc._ps.parse(data)
    assert nc.heard == [("foreign", 2, b"a.b", b"", b"foreign", b"")]
    assert 13 not in nc._subs
    assert parts(taken[0]) == (b"a.b", b"", b"x")


@INTERNALS
@each("failure", [ZeroDivisionError, asyncio.CancelledError])
async def test_a_failing_handler_does_not_end_the_connection(
    loop_is_quiet: list[dict[str, Any]], failure: type[BaseException]
) -> None:
    # nats-py's read loop logs an unexpected exception and ends.
    nc, connection, *_ = await opened()

    def fail(*_: object) -> None:
        raise failure

    await connection.inbox(InboxHandler(fail, fail), timeout=5)
    await nc._ps.parse(msg(13, b"x") + msg(1, b"ours"))
    assert nc.heard == [("one", b"a.b", b"", b"ours")]
    reader = asyncio.get_running_loop().create_task(asyncio.sleep(0))
    nc._reading_task = reader  # type: ignore[assignment]
    connection._watch_reader()
    await reader
    await asyncio.sleep(0)
    assert nc.heard[1:] == [("one", "gone"), ("two", "gone")]
    assert [type(context["exception"]) for context in loop_is_quiet] == [failure] * 2
    loop_is_quiet.clear()


class Stuck(Recorder):
    """A client whose flush queue is full, so that its `subscribe` suspends."""

    def __init__(self) -> None:
        super().__init__()
        self._flush_queue = asyncio.Queue(maxsize=1)
        self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())


@INTERNALS
async def test_a_write_times_out_while_nats_py_flushes() -> None:
    nc = Stuck()
    nc._max_pending_size = 10
    nc._flush_timeout = 60
    connection = connection_of(nc)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await connection.write(b"PUB a 5\r\nabcde\r\n", 1, 5, timeout=5)
    assert nc._pending == [b"PUB a 5\r\nabcde\r\n"]


@each("kind", [Connection, FallbackConnection])
async def test_room_in_the_write_buffer_is_waited_for(nc: Client, kind: type[Connection | FallbackConnection]) -> None:
    connection = Connection(nc) if kind is Connection else FallbackConnection(nc, dict)
    command = b"PUB a  1000000\r\n%b\r\n" % bytes(1_000_000)
    assert connection.has_room
    while connection.has_room:
        connection.write_nowait(command, 1, 1_000_000)
    await connection.wait_room(60)
    assert connection.has_room


@pytest.mark.usefixtures("full_transport_pauses_the_writer")
@each("kind", [Connection, FallbackConnection])
async def test_a_wait_for_room_ends(own_server: NatsServer, kind: type[Connection | FallbackConnection]) -> None:
    async with await nats.connect(own_server.url) as nc:
        connection = Connection(nc) if kind is Connection else FallbackConnection(nc, dict)
        command = b"PUB a  1000000\r\n%b\r\n" % bytes(1_000_000)

        async def fill() -> None:
            while True:  # until the sockets' own buffers are full, too
                connection.write_nowait(command, 1, 1_000_000)
                await connection.wait_room(0.2)

        own_server.pause()
        try:
            with pytest.raises(RequestTimeoutError, match="room in the write buffer"):
                await fill()
            assert not connection.has_room
            await connection.wait_room(60, over=lambda: True)
            waiting = asyncio.ensure_future(connection.wait_room(60))
            await asyncio.sleep(0)
            nc._status = Client.CLOSED
            with pytest.raises(nats.errors.ConnectionClosedError):
                await waiting
        finally:
            nc._status = Client.CONNECTED
            own_server.resume()


# -- the connection itself


@INTERNALS
@each(
    "status, error",
    [
        (Client.CLOSED, nats.errors.ConnectionClosedError),
        (Client.RECONNECTING, nats.errors.ConnectionReconnectingError),
        (Client.DRAINING_PUBS, nats.errors.ConnectionDrainingError),
        (Client.DISCONNECTED, nats.errors.ConnectionReconnectingError),
    ],
)
async def test_nothing_is_written_without_a_connection(status: int, error: type[Exception]) -> None:
    nc, connection, *_ = await opened()
    written, nc._status = list(nc._pending), status
    with pytest.raises(error):
        connection.write_nowait(b"PUB a 0\r\n\r\n", 1, 0)
    with pytest.raises(error):
        await connection.write(b"PUB a 0\r\n\r\n", 1, 0, timeout=5)
    assert nc._pending == written
    assert nc.stats["out_msgs"] == 0


# -- a connection of this package's own


class NotOpened(OwnClient):
    """Fails to connect with `failure`, and keeps the arguments of the attempt."""

    def __init__(self, failure: Exception) -> None:
        super().__init__()
        self.failure = failure
        self.arguments: dict[str, Any] = {}

    async def connect(self, *_: Any, **arguments: Any) -> None:
        self.arguments = arguments
        raise self.failure


@each(
    "servers, arguments",
    [
        (["ws://h"], {"tls": ssl.create_default_context()}),
        (["wss://h", "WS://i"], {}),
        (["tls://h", "ws://i"], {}),
    ],
)
async def test_a_websocket_without_tls_is_refused_if_tls_is_required(
    servers: list[str], arguments: dict[str, Any]
) -> None:
    client = NotOpened(ZeroDivisionError())
    with pytest.raises(JetStreamExtError, match="use wss://"):
        await client.open(servers, shown="h", timeout=5, **arguments)
    assert not client.arguments


async def test_messages_that_wait_for_a_reconnect_are_not_written_to_a_socket_without_tls() -> None:
    received = bytearray()
    ended = asyncio.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionResetError):
            received.extend(await reader.read())
        writer.close()
        ended.set()

    client = NotOpened(ZeroDivisionError())
    with pytest.raises(JetStreamExtError, match="ZeroDivisionError"):
        await client.open(["tls://h"], shown="h", timeout=5)
    async with await asyncio.start_server(connected, "127.0.0.1") as listening, asyncio.timeout(30):
        url = urlparse(f"tls://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        transport = TcpTransport()
        await transport.connect(url, 1024, 10)
        client._transport, client._current_server, client._flush_queue = transport, Srv(url), asyncio.Queue()
        client._status = Client.RECONNECTING
        client._pending, client._pending_data_size = [b"PUB a 6\r\nsecret\r\n"], 17
        await Client.close(client)
        await ended.wait()
    assert received == b""


class Scripted:
    """Greets each connection with the next of `greetings`, and completes the connection after CONNECT."""

    def __init__(self, *greetings: bytes) -> None:
        self._greetings = list(greetings)
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        writer.write(self._greetings.pop(0))
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                if line == b"PING\r\n":
                    writer.write(b"PONG\r\n")
        writer.close()


GREETINGS = [
    b"INFO []\r\n", b"INFO 5\r\n", b'INFO {"connect_urls": 5}\r\n', b'INFO {"connect_urls": ["["]}\r\n',
    b"INFO \xff\r\n", b"INFO\r\n", b"HTTP/1.1 400\r\n",
]  # fmt: skip


async def test_a_malformed_greeting_does_not_end_the_attempts_to_reconnect() -> None:
    good = b'INFO {"version": "2.15.1", "max_payload": 1048576}\r\n'
    script = Scripted(good, *GREETINGS, good)
    async with await asyncio.start_server(script.serve, "127.0.0.1") as listening, asyncio.timeout(60):
        port = listening.sockets[0].getsockname()[1]
        client = OwnClient()
        connected_again = asyncio.Event()

        async def reconnected() -> None:
            connected_again.set()

        await client.open([f"nats://127.0.0.1:{port}"], shown="h", timeout=30, reconnected_cb=reconnected)
        script.writers[0].transport.abort()
        await connected_again.wait()
        await client.close_quickly()


@each(
    "failure, text",
    [
        (LookupError("a type of aiohttp"), "no connection to h: a type of aiohttp"),
        (TimeoutError(), "no connection to h: no answer"),
        (ConnectionRefusedError(), "no connection to h: ConnectionRefusedError"),
    ],
)
async def test_every_failure_to_connect_is_the_documented_error(failure: Exception, text: str) -> None:
    client = NotOpened(failure)
    with pytest.raises(JetStreamExtError) as caught:
        await client.open(["nats://h", "nats://i"], shown="h", timeout=30)
    assert str(caught.value) == text
    assert client.arguments["connect_timeout"] == 15  # for each server, so that a silent one leaves time for the next


async def test_closing_quickly_ends_all_tasks_while_the_server_reads_nothing(
    own_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jetstream_ext.own_client._CLOSE_TIMEOUT", 0.5)

    async def ignore(_: object) -> None:
        pass

    client = OwnClient()
    await client.open([own_server.url], shown="h", timeout=30)
    await client.subscribe("noise", cb=ignore)
    await client.flush()
    own_server.pause()
    noise: list[asyncio.Task[None]] = []
    try:
        async with asyncio.timeout(30):
            while client.pending_data_size == 0 or len(noise) < 20:
                noise.append(asyncio.ensure_future(client.publish("none", bytes(1_000_000))))
                await asyncio.sleep(0.01)
        await client.close_quickly()
    finally:
        own_server.resume()
    for task in noise:
        await cancel(task, 30)
    # nats-py's close() waits for the socket before it ends the callbacks of the subscriptions.
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_attempt_to_reconnect_that_fails_leaves_no_socket_open(
    own_server: NatsServer, opened_sockets: list[asyncio.StreamWriter]
) -> None:
    opened = opened_sockets

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    client = OwnClient()
    await client.open([own_server.url], shown="h", timeout=30)
    own_server.kill()
    async with await asyncio.start_server(hang_up, "127.0.0.1", own_server.port), asyncio.timeout(30):
        while len(opened) < 4:
            await asyncio.sleep(0.01)
        assert all(writer.transport.is_closing() for writer in opened[:-1])
    await client.close_quickly()


@each("lost_track", [False, True])
async def test_closing_quickly_ends_a_reconnect_whose_cancellation_is_lost(
    own_server: NatsServer, lost_track: bool
) -> None:
    """Before Python 3.12, `wait_for` loses a cancellation that arrives together with its result."""

    class Deaf(OwnClient):
        async def _select_next_server(self) -> None:
            try:
                await super()._select_next_server()
            except asyncio.CancelledError:
                if self.is_closed and not lost.is_set():
                    lost.set()
                    raise TimeoutError from None
                raise

    lost = asyncio.Event()
    client = Deaf()
    await client.open([own_server.url], shown="h", timeout=30)
    own_server.kill()
    async with asyncio.timeout(30):
        while client._reconnection_task is None:
            await asyncio.sleep(0.01)
        reconnecting = client._reconnection_task
        if lost_track:
            client._reconnection_task = None
        await asyncio.sleep(0.1)
        await client.close_quickly()
        assert lost_track or reconnecting.done()
        reconnecting.cancel()
        await asyncio.wait([reconnecting])
    assert lost.is_set()
    own_server.restart()
