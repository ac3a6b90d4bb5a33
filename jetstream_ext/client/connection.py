"""A user's connection as this package uses it; the only module that uses nats-py's internals.

`Connection` adds to the user's own connection what nats-py's public interface lacks, so nats-py still does TLS,
authentication and reconnects, and its limits hold. It cuts the frames of our subscriptions out of the bytes that nats-py's
read loop passes to `Parser.parse`, and passes the rest on, untouched and in order. It appends the commands of a window to
nats-py's write buffer in one piece, and writes that to the socket itself where the next turn of the loop would be late. It
detects a lost connection at once, at the end of nats-py's reader task. If nats-py has other internals, `connection_of` warns
once and returns the slower `FallbackConnection`.

`Context` is a caller's JetStream context.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final

import nats.errors
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.js.api import PubAck
from nats.js.errors import APIError, NoStreamResponseError
from nats.js.kv import KeyValue
from nats.js.manager import JetStreamManager

from jetstream_ext.client.base_connection import (
    BaseConnection,
    FallbackConnection,
    InboxHandler,
    InboxSubscription,
    NotConnectedError,
    call_handler,
)
from jetstream_ext.errors import JetStreamExtError, RequestTimeoutError, ResponseError
from jetstream_ext.protocol import feature_table, frames
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.api import Target, parse_object, parsing
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.numbers import json_number, json_text
from jetstream_ext.protocol.options import check_seconds
from jetstream_ext.protocol.subjects import addressed, bucket_prefix, bucket_stream, check_subject
from jetstream_ext.text import get_logger

# States of nats-py's parser (nats.protocol.parser).
_AWAITING_CONTROL_LINE = 1
_MAX_CONTROL_LINE = 4096
_LONGEST_LINE = 1 << 18  # more than any server sends: a list of its cluster's URLs
# A server's INFO says how large messages are that it takes, but a stream's leader may be another server. A server keeps its
# limit in 31 bits; most leave it at 1 MiB and can queue 64 MiB for a client.
_LARGEST_MESSAGE = 64 << 20
_LARGEST_LIMIT = (1 << 31) - 1
_MESSAGE_HEADERS = 1 << 20  # more than the header lines that a server adds

_log = get_logger("client")
_DOMAIN: Final = re.compile(r"\$JS\.([^.]+)\.API\Z")

_MISSING: Final = object()

# What nats-py appends to an inbox for the reply to a request: a dot, an id of 22 characters and 4 more.
_REQUEST_TOKEN: Final = 27

_CLOSED_SIDS_KEPT = 64
_PARSED_LINES_KEPT = 4096

_Line = tuple[InboxSubscription, bytes, int, int, int]
"""A parsed control line: the inbox, the subject, the header size, the total size, and the length of the line."""


class Connection(BaseConnection):
    """Reads from nats-py's parser and writes to its buffer directly."""

    def __init__(self, nc: Client) -> None:
        super().__init__(nc, lambda: _server_info(nc))
        self._parser = nc._ps
        self._parse = nc._ps.parse
        self._process_err = nc._process_err
        self._by_sid: dict[bytes, InboxSubscription] = {}
        self._closed_sids: deque[bytes] = deque()
        self._buffer: bytearray = nc._ps.buf
        self._needed = 0
        self._parsed_lines: dict[bytes, _Line] = {}
        self._line_length = 1  # of the newest parsed line, with its CRLF
        self._watched_reader: asyncio.Task[Any] | None = None

    @property
    def usable(self) -> bool:
        status: int = self.nc._status  # cheaper than nats-py's properties: it is checked for every message
        return status == Client.CONNECTED

    async def inbox(
        self, handler: InboxHandler, *, subject: str = "", tail: str = "", timeout: float, once: bool = False
    ) -> InboxSubscription:
        nc = self.nc
        if not self.usable:
            self.check_open()
        self._watch_reader()
        inbox = InboxSubscription(self, subject, tail, handler)
        nc._sid = sid = nc._sid + 1
        inbox.sid = sid
        # The same as nats-py's `subscribe`, without its unbounded wait for the flusher.
        subscription = nc._subs[sid] = Subscription(nc, sid, inbox.filter)
        self._by_sid[b"%d" % sid] = inbox
        if nc.is_connected:  # otherwise nats-py subscribes when it is connected again
            self._append(b"SUB %b  %d\r\n" % (inbox.filter.encode(), sid) + (b"UNSUB %d 1\r\n" % sid if once else b""))
        return self._opened(inbox, subscription)

    def _unsubscribe(self, sid: int, subscription: Subscription) -> None:
        nc = self.nc
        if nc._subs.get(sid) is subscription:  # nats-py runs nothing for it, because it has no callback
            del nc._subs[sid]
            if nc.is_connected:
                self._append(b"UNSUB %d\r\n" % sid)
        # `_cut` discards late frames of this subscription; nats-py would parse them one by one.
        self._closed_sids.append(b"%d" % sid)
        if len(self._closed_sids) > _CLOSED_SIDS_KEPT:
            del self._by_sid[self._closed_sids.popleft()]

    def write_nowait(self, data: bytes, messages: int, payload_bytes: int) -> None:
        nc = self.nc
        if nc._status != Client.CONNECTED:
            self.check_usable()
        self._append(data)
        stats = nc.stats
        stats["out_msgs"] += messages
        stats["out_bytes"] += payload_bytes

    def _append(self, data: bytes) -> None:
        nc = self.nc
        nc._pending.append(data)
        nc._pending_data_size += len(data)
        queue = nc._flush_queue
        assert queue is not None
        if queue.empty():  # one wake-up is enough: nats-py's flusher writes the whole buffer
            queue.put_nowait(asyncio.get_running_loop().create_future())

    def push(self) -> bool:
        nc = self.nc
        writer = getattr(nc._transport, "_io_writer", None)  # a WebSocket has none
        if writer is None or not self.usable or writer.is_closing() or writer.transport.get_write_buffer_size():
            return False
        writer.writelines(nc._pending)
        nc._pending = []
        nc._pending_data_size = 0
        return True

    @property
    def ready(self) -> bool:
        return self.nc._status == Client.CONNECTED and self.has_room

    @property
    def has_room(self) -> bool:
        nc = self.nc
        return nc._pending_data_size <= nc._max_pending_size or nc._max_pending_size <= 0

    def _watch_reader(self) -> None:
        if (task := self.nc._reading_task) is not None and task is not self._watched_reader:
            self._watched_reader = task
            task.add_done_callback(self._reader_ended)

    def _reader_ended(self, task: asyncio.Task[Any]) -> None:
        if task is self._watched_reader:
            self._watched_reader = None
        self._tell(connected=False)

    async def process_err(self, text: str) -> None:
        """Replace `Client._process_err`, which keeps only the newest error: note what was refused."""
        self._note_refusal(text)
        await self._process_err(text)

    async def parse(self, data: bytes = b"") -> None:
        """Replace `Parser.parse`: cut out the frames of our subscriptions and pass on the rest."""
        parser = self._parser
        buffer = parser.buf
        if buffer is not self._buffer:  # the parser was reset: a new connection
            self._buffer = buffer
            self._needed = 0
            self._watch_reader()
        if self._lost and self.nc.is_connected:
            # The first data is the answer to a ping, which nats-py sends after the subscriptions and its buffer.
            self._tell(connected=True)
        if parser.state != _AWAITING_CONTROL_LINE:
            # nats-py is inside a message of another subscription: pass it the rest.
            self._check_total(parser.needed)
            rest = parser.needed + 2 - len(buffer)
            head, data = data[:rest], data[rest:]
            await self._parse(head)
            if not data or parser.buf is not buffer:
                return
        elif buffer:
            if len(buffer) + len(data) < self._needed:
                buffer.extend(data)
                return  # a large message of ours is still incomplete: do not parse it again yet
            data = b"".join((buffer, data))
            buffer.clear()
        self._needed = 0
        await self._cut(data, buffer)

    async def _cut(self, data: bytes, buffer: bytearray) -> None:
        parser, inboxes, parsed_lines = self._parser, self._by_sid, self._parsed_lines
        pos, size, line_length = 0, len(data), self._line_length
        inbox: InboxSubscription | None = None
        batch: list[Frame] = []
        payloads = 0
        while pos < size:
            # Frames of a subscription come in runs with one subject and few sizes: most control lines are known and have
            # the length of the one before.
            line = parsed_lines.get(data[pos : pos + line_length])
            if line is None:
                eol = data.find(b"\r\n", pos)
                if eol < 0:
                    if size - pos <= _MAX_CONTROL_LINE:
                        break
                    if size - pos > _LONGEST_LINE:
                        raise _protocol_error("a line without an end")
                    eol = size - 2  # too long for the control line of a message: nats-py decides
                read = frames.message_line(data[pos:eol])
                if read is None or read.sid not in inboxes:
                    if batch:
                        self._deliver(inbox, batch, payloads)
                        batch, payloads = [], 0
                    end = eol + 2 if read is None else eol + read.total + 4
                    await self._parse(data[pos:end])
                    if parser.buf is not buffer:
                        return  # the parser was reset: the rest is of the lost connection
                    pos = end
                    continue
                self._check_total(read.total)
                line_length = eol + 2 - pos
                line = (inboxes[read.sid], read.subject, read.header_size, read.total, line_length)
                if len(parsed_lines) >= _PARSED_LINES_KEPT:
                    parsed_lines.clear()
                parsed_lines[data[pos : pos + line_length]] = line
            to, subject, header_size, total, length = line
            start = pos + length
            end = start + total
            if end + 2 > size:
                self._needed = end + 2 - pos
                break
            if to is not inbox:
                if batch:
                    self._deliver(inbox, batch, payloads)
                    batch, payloads = [], 0
                inbox = to
            batch.append((subject, data[start:end], header_size))
            payloads += total - header_size
            pos = end + 2
        self._line_length = line_length
        if pos < size:
            buffer += memoryview(data)[pos:]
        if batch:
            self._deliver(inbox, batch, payloads)

    def _deliver(self, inbox: InboxSubscription | None, batch: list[Frame], payload_bytes: int) -> None:
        stats = self.nc.stats
        stats["in_msgs"] += len(batch)
        stats["in_bytes"] += payload_bytes
        if inbox is not None and inbox.handler is not None:
            call_handler(inbox.handler.frames, batch)

    def _check_total(self, total: int) -> None:
        """Raise, for nats-py to end the connection, if a message is larger than any: it would be buffered without bound."""
        if total > max(_LARGEST_MESSAGE, min(self.max_payload, _LARGEST_LIMIT)) + _MESSAGE_HEADERS:
            raise _protocol_error("a message that is larger than any that it can have")


def _protocol_error(what: str) -> nats.errors.ProtocolError:
    """Return nats-py's error, after which it connects again; it has no text of its own."""
    _log.warning("the server sends %s; the connection ends", what)
    return nats.errors.ProtocolError()


_CONNECTION_ATTRIBUTE = "_jetstream_ext_connection"  # of a client: its connection lives exactly as long


# What `Connection` uses of nats-py's objects, besides what `FallbackConnection` uses as well: the type of each attribute,
# or the predicate that it meets. tests/test_imports.py compares these tables with the code.
_CLIENT: Final[Mapping[str, Any]] = {
    "CONNECTED": int,
    "_flush_queue": asyncio.Queue | None,
    "_max_pending_size": int,
    "_pending": list,
    "_pending_data_size": int,
    "_process_err": inspect.iscoroutinefunction,
    "_ps": object,
    "_reading_task": asyncio.Task | None,
    "_server_info": dict,
    "_sid": int,
    "_status": int,
    "_subs": dict,
    "_transport": lambda transport: transport is None or hasattr(transport, "writelines"),
}
_STATS: Final = frozenset({"in_bytes", "in_msgs", "out_bytes", "out_msgs"})
_PARSER: Final[Mapping[str, Any]] = {
    "buf": bytearray,
    "needed": int,
    "parse": inspect.iscoroutinefunction,
    "state": int,
}


def connection_of(nc: Client) -> Connection | FallbackConnection:
    """Return the one `BaseConnection` of `nc`."""
    connection: Connection | FallbackConnection | None = getattr(nc, _CONNECTION_ATTRIBUTE, None)
    if connection is None:
        if _internals_known(nc):
            connection = Connection(nc)
            nc._ps.parse = connection.parse  # type: ignore[method-assign]
            nc._process_err = connection.process_err  # type: ignore[assignment, method-assign]
        else:
            connection = FallbackConnection(nc, lambda: _server_info(nc))
            warnings.warn(
                "jetstream_ext does not know the internals of this version of nats-py; it uses nats-py's public interface "
                "instead, which is several times slower. It knows those of nats-py 2.16.",
                RuntimeWarning,
                stacklevel=3,
            )
        setattr(nc, _CONNECTION_ATTRIBUTE, connection)
    return connection


def _internals_known(nc: Client) -> bool:
    try:
        subject = Subscription(nc, 1, "a").subject  # sends nothing
    except (AttributeError, TypeError):
        return False
    return (
        has_internals(nc, _CLIENT)
        and has_internals(nc._ps, _PARSER)
        and getattr(inspect.getmodule(nc._ps), "AWAITING_CONTROL_LINE", None) == _AWAITING_CONTROL_LINE
        and nc.stats.keys() >= _STATS
        and subject == "a"
    )


def has_internals(owner: object, internals: Mapping[str, Any]) -> bool:
    """Return whether an object of nats-py has all of `internals`."""
    for name, kind in internals.items():
        value = getattr(owner, name, _MISSING)
        if value is _MISSING or not (kind(value) if inspect.isfunction(kind) else isinstance(value, kind)):
            return False
    return True


@contextlib.contextmanager
def _required() -> Iterator[None]:
    """Raise the documented error if nats-py lacks an internal that has no substitute."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        raise JetStreamExtError(
            f"jetstream_ext cannot use this version of nats-py: {error}; install nats-py 2.16"
        ) from error


def _server_info(nc: Client) -> Mapping[str, Any]:
    """Return the ``INFO`` of the connected server, or what nats-py's public interface says of it."""
    info: object = getattr(nc, "_server_info", None)
    if info is not None:
        return info if isinstance(info, dict) else {}  # nats-py takes any JSON as the server's INFO
    with _required():
        version = nc.connected_server_version
    release = f"{version.major}.{version.minor}.{version.patch}"
    return {"version": release, "api_lvl": feature_table.api_level(release), "jetstream": True}


class Context:
    """The connection, the API prefix and the default timeout of nats-py's JetStream context `js`."""

    def __init__(self, js: JetStreamContext | JetStreamManager) -> None:
        if not isinstance(js, JetStreamManager):
            raise TypeError(f"expected a nats-py JetStream context (nc.jetstream()), not {type(js).__name__}")
        self.js = js
        self.nc: Client
        self.prefix: str
        with _required():
            self.nc, self.prefix, timeout = js._nc, js._prefix, js._timeout
        self.timeout: float = float(timeout)
        check_subject(self.prefix)  # nats-py does not; a space in it makes the server close the connection

    def resolve_timeout(self, timeout: float | None, name: str = "timeout") -> float:
        """Return the context's own timeout for None; raises as `check_seconds` does."""
        return self.timeout if timeout is None else check_seconds(timeout, name)

    @property
    def domain(self) -> str | None:
        """The JetStream domain, if the context has one; nats-py makes it part of the prefix."""
        found = _DOMAIN.match(self.prefix)
        return found[1] if found else None

    def target(self, stream: str | None = None) -> Target:
        """Return what the context's messages are for; `stream` is the stream that stores them, if that is known."""
        domain = self.domain
        return Target(domain, domain is not None and domain != self.connection.domain, stream)

    @property
    def connection(self) -> BaseConnection:
        """The client's connection; raises as `check_client` does."""
        self.check_client()
        return getattr(self.nc, _CONNECTION_ATTRIBUTE, None) or connection_of(self.nc)

    def check_client(self) -> None:
        """Raise NotConnectedError if the client was never connected, or RuntimeError if another event loop connected it.

        Without a running loop, only the first is checked.
        """
        reader = getattr(self.nc, "_reading_task", _MISSING)
        if reader is None and not (self.nc.is_connected or self.nc.is_closed):
            raise NotConnectedError
        if not isinstance(reader, asyncio.Future):
            return
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return
        if reader.get_loop() is not running and not self.nc.is_closed:
            raise RuntimeError("the nats-py client was connected in another event loop; connect and use it in one loop")

    async def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, str], timeout: float, what: str
    ) -> PubAck:
        """Publish a message, and return its ack within `timeout` seconds; `what` names the awaited thing.

        Raises as nats-py's ``js.publish`` does; BadSubjectError, BadHeaderError or MaxPayloadError if a server would not take the
        message, which is then not sent; NotPermittedError if the server has refused it. After a RequestTimeoutError or a
        ResponseError (the ack is malformed, or that of a stream of another domain) it may be stored.
        """
        subject = addressed(subject, self.prefix)
        header = h.encode(headers.items()) if headers else b""
        try:
            _, reply, size = await self.connection.request(subject, payload, timeout, header=header)
        except nats.errors.NoRespondersError as error:
            raise NoStreamResponseError from error
        except RequestTimeoutError:
            late = RequestTimeoutError(f"timed out after {timeout:.4g} s while waiting for {what}")
            raise self.connection.explained(late, [subject]) from None
        answer = parse_object(f"the ack on {subject}", reply[size:])
        if "error" in answer:
            raise APIError.from_error(answer["error"])
        with parsing(f"the ack on {subject}"):
            ack = PubAck.from_response(answer)
            json_text(ack.stream, "stream")
            json_number(ack.seq, "seq", low=1)
        target = self.target()
        if other := target.other_stream(ack.stream, ack.domain):
            raise ResponseError(target.answered_by(other))
        return ack


def bucket_parts(kv: KeyValue) -> tuple[JetStreamContext, str, str, str]:
    """Return a bucket's JetStream context, its name, its stream, and the subject prefix of its keys."""
    with _required():
        return kv._js, kv._name, kv._stream, kv._pre


def open_bucket(js: JetStreamContext, name: str) -> KeyValue:
    """Return nats-py's bucket `name` without a request; the first read of it finds out whether it exists."""
    with _required():
        return KeyValue(name, bucket_stream(name), bucket_prefix(name), js, direct=False)


def tasks_of(nc: Client) -> set[asyncio.Task[Any]]:
    """Return nats-py's tasks of a connection, but for that of the caller."""
    names = ("_reading_task", "_flusher_task", "_ping_interval_task", "_reconnection_task")
    tasks = {getattr(nc, name, None) for name in names}
    with contextlib.suppress(AttributeError):
        tasks |= {subscription._wait_for_msgs_task for subscription in nc._subs.values()}
    return {task for task in tasks if task is not None and task is not asyncio.current_task()}


def abort(nc: Client) -> None:
    """Close the socket of a connection at once; the transport's own close() waits for a peer that does not read."""
    # The AttributeError is of a WebSocket, which has no such writer, and of asyncio, which cannot abort what has closed
    # after its last bytes were written.
    with contextlib.suppress(AttributeError):
        nc._transport._bare_io_writer.transport.abort()  # type: ignore[union-attr]


def is_encrypted(nc: Client) -> bool:
    """Return whether the socket in use is encrypted; a server's INFO only says that it should be."""
    transport = nc._transport
    channel = getattr(transport, "_io_writer", None) or getattr(transport, "_ws", None)
    return channel is not None and channel.get_extra_info("ssl_object") is not None
