"""A user's connection as this package uses it; the only module that uses nats-py's internals.

`Connection` adds to the user's own connection what nats-py's public interface lacks, so nats-py still does TLS,
authentication and reconnects, and its limits hold. It cuts the frames of our subscriptions out of the bytes that nats-py's
read loop passes to `Parser.parse`, and passes the rest on, untouched and in order. It appends the commands of a window to
nats-py's write buffer in one piece, and writes that to the socket itself where the next turn of the loop would be late. It
detects a lost connection at once, at the end of nats-py's reader task. If nats-py has other internals, `connection_of` warns
once and returns the slower `FallbackConnection`.

`Context` is a caller's JetStream context. `OwnClient` is a connection that this package opens itself, for a command or
for Spark.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib.util
import inspect
import itertools
import math
import re
import ssl
import sys
import warnings
from asyncio.tasks import _enter_task, _leave_task  # documented in "Extending asyncio"
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import nats.errors
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.js.api import PubAck
from nats.js.kv import KeyValue
from nats.js.manager import JetStreamManager

from jetstream_ext.client.base_connection import (
    REFUSAL,
    REFUSED_SUBSCRIPTION,
    BaseConnection,
    FallbackConnection,
    InboxHandler,
    InboxSubscription,
    NotConnectedError,
    NotPermittedError,
    OtherDomainError,
    call_handler,
    cancel,
    notify,
    refused_message,
)
from jetstream_ext.errors import JetStreamExtError, RequestTimeoutError
from jetstream_ext.protocol import feature_table, frames
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.api import Target
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.options import check_seconds
from jetstream_ext.protocol.subjects import bucket_prefix, bucket_stream, check_subject
from jetstream_ext.text import get_logger, log_state
from jetstream_ext.types import own_headers

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
_CLOSE_TIMEOUT: Final = 2.0
# Short enough for a read to survive a server's restart within its own timeout.
_RECONNECT_WAIT: Final = 0.25
_SEED: Final = re.compile(r"BEGIN USER NKEY SEED-+\s+(\S+)")
# An nkey seed, the content of a credentials or PEM file, or a token that is longer than the name of a file can be.
_SECRET: Final = re.compile(r"^\s*S[A-Z2-7]{50,}\s*$|-----|[\r\n\0]|[^/]{256}|.{1025}")

_DOMAIN: Final = re.compile(r"\$JS\.([^.]+)\.API\Z")

_MISSING: Final = object()

_CLOSED_SIDS_KEPT = 64
_REFUSED_KEPT = 1024
_PARSED_LINES_KEPT = 4096

_Line = tuple[InboxHandler | None, bytes, int, int, int]
"""A parsed control line: the handler, the subject, the header size, the total size, and the length of the line."""


class Connection(BaseConnection):
    """Reads from nats-py's parser and writes to its buffer directly."""

    def __init__(self, nc: Client) -> None:
        super().__init__(nc, lambda: _server_info(nc))
        self._parser = nc._ps
        self._parse = nc._ps.parse
        self._sids: dict[Subscription, int] = {}
        self._closed_sids: deque[bytes] = deque()
        self._buffer: bytearray = nc._ps.buf
        self._needed = 0
        self._parsed_lines: dict[bytes, _Line] = {}
        self._line_length = 1  # of the newest parsed line, with its CRLF
        self._watched_reader: asyncio.Task[Any] | None = None
        self._connection_lost = False
        self._delivering = False  # a handler of frames runs
        self._process_err = nc._process_err
        self._refused: dict[str, int] = {}  # when a message was refused, by its subject in lower case, oldest first
        self._refusals = itertools.count()
        self._refused_inboxes: set[str] = set()  # of the subjects of this library's own subscriptions, few

    @property
    def usable(self) -> bool:
        status: int = self.nc._status  # cheaper than nats-py's properties: it is checked for every message
        return status == Client.CONNECTED

    async def inbox(
        self, handler: InboxHandler, *, subject: str = "", tail: str = "", timeout: float
    ) -> InboxSubscription:
        nc = self.nc
        if nc.is_closed:
            raise nats.errors.ConnectionClosedError
        if nc.is_draining:
            raise nats.errors.ConnectionDrainingError
        self._watch_reader()
        inbox = InboxSubscription(self, subject or nc.new_inbox())
        nc._sid = sid = nc._sid + 1
        # The same as nats-py's `subscribe`, without its unbounded wait for the flusher.
        subscription = inbox.subscription = nc._subs[sid] = Subscription(nc, sid, inbox.subject + tail)
        self._sids[subscription] = sid
        self._handlers[b"%d" % sid] = handler
        self._inbox_opened()
        if nc.is_connected:  # otherwise nats-py subscribes when it is connected again
            self._append(b"SUB %b  %d\r\n" % (subscription.subject.encode(), sid))
        return inbox

    def drop(self, subscription: Subscription) -> None:
        number, nc = self._sids.pop(subscription), self.nc
        sid = b"%d" % number
        if nc._subs.get(number) is subscription:  # nats-py runs nothing for it, because it has no callback
            del nc._subs[number]
            if nc.is_connected:
                self._append(b"UNSUB %b\r\n" % sid)
        self._inbox_dropped()
        # `_cut` discards late frames of this subscription; nats-py would parse them one by one.
        self._handlers[sid] = None
        self._parsed_lines.clear()
        self._closed_sids.append(sid)
        if len(self._closed_sids) > _CLOSED_SIDS_KEPT:
            self._handlers.pop(self._closed_sids.popleft(), None)

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
        if self._delivering and self.push():
            return
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

    async def _flushed(self) -> None:
        # The same as nats-py's forced flush, which takes its own timeout and a cancellation for success.
        queue = self.nc._flush_queue
        assert queue is not None
        written = asyncio.get_running_loop().create_future()
        await queue.put(written)
        await written

    async def _pong(self) -> None:
        pong = asyncio.get_running_loop().create_future()
        await self.nc._send_ping(pong)
        await asyncio.shield(pong)  # nats-py's read loop would end with a PONG for a cancelled future

    def _check_state(self) -> None:
        """Do nothing: nats-py's reader task ends with a connection, and its parser gets the data of a new one."""

    def _watch_reader(self) -> None:
        if (task := self.nc._reading_task) is not None and task is not self._watched_reader:
            self._watched_reader = task
            task.add_done_callback(self._reader_ended)

    def _reader_ended(self, task: asyncio.Task[Any]) -> None:
        if task is self._watched_reader:
            self._watched_reader = None
        self._connection_lost = True
        notify(self._handlers.values(), connected=False)

    async def process_err(self, text: str) -> None:
        """Replace `Client._process_err`, which keeps only the newest error: note which messages were refused."""
        if (found := REFUSAL.search(text)) is not None:
            subject = found[1].lower()
            self._refused.pop(subject, None)
            self._refused[subject] = next(self._refusals)
            if len(self._refused) > _REFUSED_KEPT:
                del self._refused[next(iter(self._refused))]
        if (found := REFUSED_SUBSCRIPTION.search(text)) is not None:
            self._refused_inboxes.add(found[1].lower())
        await self._process_err(text)

    def _refused_subscriptions(self) -> Collection[str]:
        return self._refused_inboxes

    def _newest_refusal(self, subjects: Collection[str]) -> object:
        return max((self._refused[subject] for subject in subjects if subject in self._refused), default=None)

    async def parse(self, data: bytes = b"") -> None:
        """Replace `Parser.parse`: cut out the frames of our subscriptions and pass on the rest."""
        parser = self._parser
        buffer = parser.buf
        if buffer is not self._buffer:  # the parser was reset: a new connection
            self._buffer = buffer
            self._needed = 0
            # It may have other permissions. What the server refuses again is in the data.
            self._refused.clear()
            self._refused_inboxes.clear()
            self._watch_reader()
        if self._connection_lost and self.nc.is_connected:
            # The first data is the answer to a ping, which nats-py sends after the subscriptions and its buffer.
            self._connection_lost = False
            notify(self._handlers.values(), connected=True)
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
        parser, handlers, parsed_lines = self._parser, self._handlers, self._parsed_lines
        pos, size, line_length = 0, len(data), self._line_length
        handler: InboxHandler | None = None
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
                if read is None or read.sid not in handlers:
                    if batch:
                        self._deliver(handler, batch, payloads)
                        batch, payloads = [], 0
                    end = eol + 2 if read is None else eol + read.total + 4
                    await self._parse(data[pos:end])
                    if parser.buf is not buffer:
                        return  # the parser was reset: the rest is of the lost connection
                    pos = end
                    continue
                self._check_total(read.total)
                line_length = eol + 2 - pos
                line = (handlers[read.sid], read.subject, read.header_size, read.total, line_length)
                if len(parsed_lines) >= _PARSED_LINES_KEPT:
                    parsed_lines.clear()
                parsed_lines[data[pos : pos + line_length]] = line
            to, subject, header_size, total, length = line
            start = pos + length
            end = start + total
            if end + 2 > size:
                self._needed = end + 2 - pos
                break
            if to is not handler:
                if batch:
                    self._deliver(handler, batch, payloads)
                    batch, payloads = [], 0
                handler = to
            batch.append((subject, data[start:end], header_size))
            payloads += total - header_size
            pos = end + 2
        self._line_length = line_length
        if pos < size:
            buffer += memoryview(data)[pos:]
        if batch:
            self._deliver(handler, batch, payloads)

    def _deliver(self, handler: InboxHandler | None, batch: list[Frame], payload_bytes: int) -> None:
        stats = self.nc.stats
        stats["in_msgs"] += len(batch)
        stats["in_bytes"] += payload_bytes
        if handler is not None:
            self._delivering = True
            try:
                call_handler(handler.frames, batch)
            finally:
                self._delivering = False

    def _check_total(self, total: int) -> None:
        """Raise, for nats-py to end the connection, if a message is larger than any: it would be buffered without bound."""
        if total > max(_LARGEST_MESSAGE, min(self.max_payload, _LARGEST_LIMIT)) + _MESSAGE_HEADERS:
            raise _protocol_error("a message that is larger than any that it can have")


def call_as(task: asyncio.Task[Any] | None, waiter: asyncio.Future[Any] | None, function: Callable[[], None]) -> bool:
    """Call `function`, which raises no Exception, as part of `task`, which waits for `waiter`, and in its context.

    Returns False, and calls nothing, if that is not possible. In `function`, `asyncio.current_task()` is `task`, also if
    this is called from a handler, which is part of nats-py's reader task.
    """
    context = _context_of(task, waiter)
    if task is None or context is None:
        return False
    loop, running = asyncio.get_running_loop(), asyncio.current_task()
    if running is not None:
        _leave_task(loop, running)
    _enter_task(loop, task)
    try:
        context.run(function)
    except RuntimeError:  # it runs already: tasks may share one
        return False
    finally:
        _leave_task(loop, task)
        if running is not None:
            _enter_task(loop, running)
    return True


def _context_of(task: asyncio.Task[Any] | None, waiter: asyncio.Future[Any] | None) -> contextvars.Context | None:
    """Return the context of a task, or None if it is not known: before Python 3.12, only the future that it awaits has it."""
    if sys.version_info >= (3, 12):
        return None if task is None else task.get_context()
    callbacks = getattr(waiter, "_callbacks", None)
    return callbacks[0][1] if callbacks else None


def _protocol_error(what: str) -> nats.errors.ProtocolError:
    """Return nats-py's error, after which it connects again; it has no text of its own."""
    _log.warning("the server sends %s; the connection ends", what)
    return nats.errors.ProtocolError()


_FALLBACK_WARNING = (
    "jetstream_ext does not know the internals of this version of nats-py; it uses nats-py's public interface instead, which "
    "is several times slower. It knows those of nats-py 2.16."
)
_CONNECTION_ATTRIBUTE = "_jetstream_ext_connection"
"""The attribute of a client that holds its connection, which lives exactly as long as the client."""


def _is_transport(value: object) -> bool:
    return value is None or hasattr(value, "writelines")


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
    "_send_ping": inspect.iscoroutinefunction,
    "_server_info": dict,
    "_sid": int,
    "_status": int,
    "_subs": dict,
    "_transport": _is_transport,
}
_STATS: Final = frozenset({"in_bytes", "in_msgs", "out_bytes", "out_msgs"})
_PARSER: Final[Mapping[str, Any]] = {
    "buf": bytearray,
    "needed": int,
    "parse": inspect.iscoroutinefunction,
    "state": int,
}
# What `OwnClient` needs to send no credentials without TLS: methods of `Client` that it overrides, and attributes.
_OVERRIDDEN: Final = frozenset({"_close", "_connect_command", "_process_info"})
_TLS: Final[Mapping[str, Any]] = {
    "_current_server": object,
    "_pending": list,
    "_pending_data_size": int,
    "_server_pool": list,
    "_transport": object,
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
            warnings.warn(_FALLBACK_WARNING, RuntimeWarning, stacklevel=3)
        setattr(nc, _CONNECTION_ATTRIBUTE, connection)
    return connection


def _internals_known(nc: Client) -> bool:
    try:
        subject = Subscription(nc, 1, "a").subject  # sends nothing
    except (AttributeError, TypeError):
        return False
    return (
        _has(nc, _CLIENT)
        and _has(nc._ps, _PARSER)
        and getattr(inspect.getmodule(nc._ps), "AWAITING_CONTROL_LINE", None) == _AWAITING_CONTROL_LINE
        and nc.stats.keys() >= _STATS
        and subject == "a"
    )


def _has(owner: object, internals: Mapping[str, Any]) -> bool:
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
        return connection_of(self.nc)

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
        """Publish by nats-py's ``js.publish``, within `timeout` seconds; `what` is as in `bounded`.

        Raises BadSubjectError or MaxPayloadError for a message that would make the server close the connection, and
        NotPermittedError as soon as the server refuses the message: then it is not stored. Raises OtherDomainError for the
        ack of a stream of another domain than the context's.
        """
        assert isinstance(self.js, JetStreamContext)  # only those publish
        self.connection.check_request(subject)
        frames.check_size(len(h.encode(headers.items())) + len(payload), self.connection.max_payload, subject)
        publishing = self.js.publish(subject, payload, timeout=timeout, headers=own_headers(headers.items()))
        refused = NotPermittedError(subject, refused_message(subject))
        try:
            ack = await self.connection.answered(publishing, timeout, what, subject, subject, refused)
        except RequestTimeoutError as late:
            raise self.connection.explained(late, [subject]) from late.__cause__
        target = self.target()
        if other := target.other_stream(ack.stream, ack.domain):
            raise OtherDomainError(target.answered_by(other))
        return ack


def bucket_parts(kv: KeyValue) -> tuple[JetStreamContext, str, str, str]:
    """Return a bucket's JetStream context, its name, its stream, and the subject prefix of its keys."""
    with _required():
        return kv._js, kv._name, kv._stream, kv._pre


def open_bucket(js: JetStreamContext, name: str) -> KeyValue:
    """Return nats-py's bucket `name` without a request; the first read of it finds out whether it exists."""
    with _required():
        return KeyValue(name, bucket_stream(name), bucket_prefix(name), js, direct=False)


class OwnClient(Client):
    """A connection that this package opens itself.

    Attributes:
        opened: Whether `open` has succeeded.
        refusal: The last permission that the server refused; a request without permission gets no reply.
    """

    def __init__(self) -> None:
        super().__init__()
        self.opened: bool = False
        self.refusal: str | None = None
        self._failures: list[Exception] = []
        self._tries: float = math.inf
        self._needs_tls: bool = False
        self._closing: bool = False
        if (parser := getattr(self, "_ps", None)) is not None:
            parser.parse = _reconnecting(parser.parse)

    async def open(
        self, servers: Sequence[str], *, shown: str, timeout: float, tries: float = math.inf, **arguments: Any
    ) -> None:
        """Connect to one of `servers` within `timeout` seconds and `tries` attempts; `shown` names them in errors.

        `arguments` are those of nats-py's ``connect``.

        Raises:
            JetStreamExtError: No server could be reached, or it refused the credentials. If a URL or the arguments ask for
                TLS, a server without it never gets the credentials, not even after a reconnect.
        """
        self._needs_tls = "tls" in arguments or any(url.lower().startswith(("tls:", "wss:")) for url in servers)
        if self._needs_tls and any(url.lower().startswith("ws:") for url in servers):
            raise JetStreamExtError(f"no connection to {shown}: ws:// has no TLS, but TLS was requested; use wss://")
        if self._needs_tls and not (vars(Client).keys() >= _OVERRIDDEN and _has(self, _TLS)):
            raise JetStreamExtError("this version of nats-py may send credentials without TLS; install nats-py 2.16")
        if any(url.lower().startswith("ws") for url in servers) and importlib.util.find_spec("aiohttp") is None:
            raise JetStreamExtError("WebSockets need the package aiohttp: pip install 'nats-py[aiohttp]'")
        self._tries = tries
        try:
            async with asyncio.timeout(timeout) as limit:
                await self.connect(
                    servers=list(servers),
                    connect_timeout=timeout / len(servers),  # type: ignore[arg-type] # only its annotation says int
                    error_cb=self._note,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=_RECONNECT_WAIT,  # type: ignore[arg-type]
                    **arguments,
                )
            self.opened = True
        except Exception as error:  # aiohttp and ssl have types of their own
            within, last = "", error
            if limit.expired():
                within, last = f" within {timeout:g} s", self._failures[-1] if self._failures else error
            why = str(last) or ("no answer" if isinstance(last, TimeoutError) else type(last).__name__)
            if _is_refused_login(last) and "timeout" not in str(last).lower():  # it may only have been too slow
                why += f"; the server refused {_login_of(arguments)}"
            raise JetStreamExtError(f"no connection to {shown}{within}: {why}") from error
        finally:
            if not self.opened:
                await self.close_quickly()

    async def close_quickly(self) -> None:
        """Close the connection within seconds; an error of that is logged, so that it hides no other error.

        nats-py fails to close after a refusal, and hangs after half a TLS handshake. asyncio raises TypeError or
        AttributeError in the first releases of Python 3.12 and 3.13 if much is still to be written.

        Cancellation: The socket is closed.
        """
        self._closing = True
        tasks = self._tasks()
        closing = asyncio.ensure_future(self.close())
        try:
            await asyncio.wait({closing}, timeout=_CLOSE_TIMEOUT)
            if closing.done() and not closing.cancelled() and closing.exception() is not None:
                log_state(_log, "connection", "not closed", closing.exception() or "")
            await cancel(closing, _CLOSE_TIMEOUT)
            # One may have lost the cancellation of nats-py's close(), which cancels none while it waits for the socket.
            tasks |= self._tasks()
            await asyncio.gather(*(cancel(task, _CLOSE_TIMEOUT) for task in tasks))
        finally:
            closing.cancel()
            for task in tasks:
                task.cancel()
            self._abort()

    def _tasks(self) -> set[asyncio.Task[Any]]:
        """Return nats-py's tasks of this connection, but for that of the caller."""
        names = ("_reading_task", "_flusher_task", "_ping_interval_task", "_reconnection_task")
        tasks = {getattr(self, name, None) for name in names}
        tasks |= {
            getattr(subscription, "_wait_for_msgs_task", None) for subscription in getattr(self, "_subs", {}).values()
        }
        return {task for task in tasks if task is not None and task is not asyncio.current_task()}

    def _abort(self) -> None:
        # The transport's own close() waits for a peer that does not read. The AttributeError is of a WebSocket, which
        # has no such writer, and of asyncio, which cannot abort what has closed after its last bytes were written.
        with contextlib.suppress(AttributeError):
            self._transport._bare_io_writer.transport.abort()  # type: ignore[union-attr]

    async def _connect_to_server(self, server: Any) -> None:
        if self._closing:  # a reconnect task that nats-py has lost track of
            raise asyncio.CancelledError
        self._abort()  # nats-py leaves the socket of an attempt that failed open
        await super()._connect_to_server(server)

    async def _note(self, error: Exception) -> None:
        """Note an error that nats-py reports (called by nats-py)."""
        text = str(error).lower()
        if "permissions violation" in text:
            self.refusal = str(error)
        if self.opened:
            return
        self._failures.append(error)
        refused = _is_refused_login(error) or isinstance(error, JetStreamExtError)
        if refused or len(self._failures) >= self._tries:
            raise error  # through nats-py's connect(), which would retry for minutes

    async def _process_connect_init(self) -> None:
        try:
            await super()._process_connect_init()
        except (nats.errors.Error, OSError):
            raise
        except Exception as error:  # nats-py checks no field of INFO, and its reconnect task would end with this error
            raise nats.errors.Error(f"the server's first answers are malformed: {error}") from error

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        before = len(self._server_pool) if self._needs_tls else 0
        await super()._process_info(info, initial_connection)
        if self._needs_tls and not self._encrypted and (current := self._current_server) is not None:
            # Anyone on the network may have sent this INFO. The servers that it names must have a certificate for the
            # host that the user named, or else they could be servers of an attacker with certificates of their own.
            for server in self._server_pool[before:]:
                server.tls_name = current.tls_name or current.uri.hostname

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        if self._needs_tls and not self._encrypted:  # nats-py would write the pending messages to this socket
            self._pending, self._pending_data_size = [], 0
        await super()._close(status, do_cbs)

    @property
    def _encrypted(self) -> bool:
        """Whether the socket in use is encrypted; a server's INFO only says that it should be."""
        channel = getattr(self._transport, "_io_writer", None) or getattr(self._transport, "_ws", None)
        return channel is not None and channel.get_extra_info("ssl_object") is not None

    def _connect_command(self) -> bytes:
        # nats-py calls this before each CONNECT, also after a reconnect and for servers that it has discovered. It would
        # send the credentials without TLS to a server that does not require it.
        if self._needs_tls and not self._encrypted:
            raise JetStreamExtError("the server does not require TLS, but TLS was requested; nothing was sent")
        return super()._connect_command()


def _is_refused_login(error: Exception) -> bool:
    text = str(error).lower()
    return "authorization" in text or "authentication" in text


def _login_of(arguments: Mapping[str, Any]) -> str:
    """Return by what nats-py logs in with the arguments of its ``connect``, without any secret."""
    # A user name may be a token.
    kinds = {
        "user_credentials": "the credentials of {}",
        "nkeys_seed": "the nkey of {}",
        "password": "the user and password",
        "token": "the token",
        "user": "the user, which has no password",
    }
    found = next((name for name in kinds if arguments.get(name)), None)
    return "a login without credentials" if found is None else kinds[found].format(arguments[found])


def _reconnecting(parse: Callable[[bytes], Awaitable[None]]) -> Callable[[bytes], Awaitable[None]]:
    """Return nats-py's `parse`, after whose errors it connects again; it would log a traceback and read no more."""

    async def parse_or_reconnect(data: bytes = b"") -> None:
        try:
            await parse(data)
        except (nats.errors.Error, OSError):
            raise
        except Exception as error:  # whatever its code meets on malformed words of a server
            raise nats.errors.ProtocolError from error

    return parse_or_reconnect


def may_be_secret(name: str) -> bool:
    """Return whether a text may be a secret itself, given where the name of its file belongs; then never repeat it."""
    return _SECRET.search(name) is not None


def login(path: Path, *, jwt: bool = False) -> dict[str, Any]:
    """Return nats-py's arguments for a file with an nkey seed, or with `jwt` for a credentials file.

    Raises:
        JetStreamExtError: The file is not valid, on which nats-py would fail or search indefinitely, or nkeys is missing.
    """
    if importlib.util.find_spec("nkeys") is None:
        raise JetStreamExtError("credentials and nkeys need the package nkeys: pip install 'nats-py[nkeys]'")
    text = path.read_text(encoding="utf-8", errors="replace")
    if jwt:
        if "BEGIN NATS USER JWT" not in text:
            raise JetStreamExtError(f"{path} is not a credentials file: it has no user JWT")
        text = found[1] if (found := _SEED.search(text)) else ""
    import nkeys  # an extra of nats-py

    try:
        nkeys.from_seed(bytearray(text.strip().encode()))
    except Exception:  # nkeys raises many types
        raise JetStreamExtError(f"{path} has no nkey seed of a user") from None
    return {"user_credentials" if jwt else "nkeys_seed": str(path)}


def tls_context(authority: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext:
    """Return the TLS context for files in PEM format (None: the system's authorities, no certificate).

    Raises:
        JetStreamExtError: A file is not valid.
    """
    try:
        context = ssl.create_default_context(cafile=authority)
    except ssl.SSLError as error:
        raise JetStreamExtError(f"the TLS files are not valid: {authority} holds no certificates: {error}") from None
    if certificate is not None and key is not None:
        try:
            # Without a password, OpenSSL would prompt for the one of an encrypted key on the terminal.
            context.load_cert_chain(certificate, key, password="")
        except ssl.SSLError as error:
            raise JetStreamExtError(
                f"the TLS files are not valid: {certificate} and {key} are not a certificate and its unencrypted key: {error}"
            ) from None
    return context
