"""The one door to nats-py's internals; every other module goes through it.

Three things nats-py cannot do through its public face, and how they are done here on the user's own connection
(so that TLS, authentication, reconnects and limits stay nats-py's):

* **Reading in bulk.** `Connection` stands in front of the connection's parser: `Parser.parse` of this one instance is
  replaced, which is where nats-py's read loop hands over what came from the socket. Frames of our subscriptions are
  cut out as bytes; everything else reaches nats-py's parser untouched and in order.
* **Writing in bulk.** A window's commands are appended to nats-py's own write buffer in one piece, under its limits.
* **Hearing at once that the connection is gone**: the end of nats-py's reader task.

If a future nats-py has other internals, `PublicConnection` does the same work through public subscriptions and
`publish`, more slowly, and says so once in a warning. What a user of either needs to know is in `sinks`.
"""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections import deque
from collections.abc import Awaitable
from typing import Any, TypeVar

from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.js.kv import KeyValue
from nats.js.manager import JetStreamManager

from jetstream_ext.client.public_connection import PublicConnection as PublicConnection
from jetstream_ext.client.sinks import Door, call, tell_disconnected, tell_reconnected
from jetstream_ext.client.sinks import Inbox as Inbox
from jetstream_ext.client.sinks import Sink as Sink
from jetstream_ext.protocol import frames
from jetstream_ext.protocol.frames import Frame

# States of nats-py's parser (nats.protocol.parser).
_AWAITING_CONTROL_LINE = 1
_MAX_CONTROL_LINE = 4096
_USABLE = frozenset({Client.CONNECTED, Client.DRAINING_SUBS})

_T = TypeVar("_T")


_Line = tuple[Sink | None, bytes, int, int, int]
"""What a control line says, and its own length: who takes the message, its subject, its header size, its whole size."""


class Connection(Door):
    """The fast road: nats-py's parser and write buffer, directly."""

    _TOMBSTONES = 64
    _KNOWN_LIMIT = 4096

    def __init__(self, nc: Client) -> None:
        super().__init__(nc, lambda: _server_info(nc))
        self._parser = nc._ps
        self._parse = nc._ps.parse
        self._sinks: dict[bytes, Sink | None] = {}
        self._graves: deque[bytes] = deque()
        self._buffer: bytearray = nc._ps.buf
        self._needed = 0
        # Control lines of our messages that were read before, and how long the newest was, its end included.
        self._known: dict[bytes, _Line] = {}
        self._width = 1
        self._watched: asyncio.Task[Any] | None = None
        self._connection_lost = False

    @property
    def usable(self) -> bool:
        """Whether what is written now can reach the server it is meant for."""
        return self.nc._status in _USABLE  # asked for every message

    # -- subscriptions ------------------------------------------------------------------------------------------

    async def inbox(self, sink: Sink, *, tail: str = "") -> Inbox:
        """Subscribe `sink` to a new inbox; `tail` is added to what is subscribed."""
        subject = self.nc.new_inbox()
        inbox = Inbox(self.drop, subject)
        self._watch()
        try:
            subscription = await _cancellable(self.nc.subscribe(subject + tail))
        except BaseException:
            # nats-py registers a subscription before it sends it, so a cancellation in between would leak it.
            for known in list(self.nc._subs.values()):
                if known.subject == subject + tail:
                    self.drop(known)
            raise
        self._sinks[b"%d" % subscription._id] = sink
        inbox.subscription = subscription
        return inbox

    def drop(self, subscription: Subscription) -> None:
        """Unsubscribe without suspending, so that no cancellation can come in between."""
        sid = b"%d" % subscription._id
        nc = self.nc
        if self.nc._subs.get(subscription._id) is subscription:
            nc._remove_sub(subscription._id)
            subscription._closed = True
            subscription._stop_processing()
            if self.usable:
                self._append(b"UNSUB %b\r\n" % sid)
        # Late frames of a reply that was left early are thrown away here, not parsed by nats-py one by one.
        self._sinks[sid] = None
        self._known.clear()
        self._graves.append(sid)
        if len(self._graves) > self._TOMBSTONES:
            self._sinks.pop(self._graves.popleft(), None)

    # -- writing ------------------------------------------------------------------------------------------------

    def write_nowait(self, data: bytes, messages: int, payload_bytes: int) -> None:
        """Append encoded commands to nats-py's buffer in one piece.

        Raises:
            ConnectionClosedError, ConnectionDrainingError, ConnectionReconnectingError: Nothing was written.
        """
        self.check_usable()
        self._append(data)
        self.nc.stats["out_msgs"] += messages
        self.nc.stats["out_bytes"] += payload_bytes

    def _append(self, data: bytes) -> None:
        nc = self.nc
        nc._pending.append(data)
        nc._pending_data_size += len(data)
        queue = nc._flush_queue
        assert queue is not None
        if queue.empty():  # nats-py's flusher takes all that is pending; one call is enough
            queue.put_nowait(asyncio.get_running_loop().create_future())

    async def write(self, data: bytes, messages: int, payload_bytes: int) -> None:
        """Write as `write_nowait` does, then wait while the buffer is over nats-py's own limit.

        The bytes are in the buffer before the first suspension: a cancelled call has written everything.
        """
        self.write_nowait(data, messages, payload_bytes)
        if self.nc._pending_data_size > self.nc._max_pending_size > 0:
            await _cancellable(self.nc._flush_pending(force_flush=True))

    # -- reading ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        task = self.nc._reading_task
        if task is not None and task is not self._watched:
            self._watched = task
            task.add_done_callback(self._reader_ended)

    def _reader_ended(self, task: asyncio.Task[Any]) -> None:
        if task is self._watched:
            self._watched = None
        self._connection_lost = True
        tell_disconnected(self._sinks.values())

    async def parse(self, data: bytes = b"") -> None:
        """Stand in for `Parser.parse`: cut out the frames of our subscriptions, pass on the rest."""
        parser = self._parser
        buffer = parser.buf
        if buffer is not self._buffer:  # the parser was reset: a new connection
            self._buffer = buffer
            self._needed = 0
            self._watch()
        if self._connection_lost and self.nc.is_connected:
            # The answer to the ping that nats-py sends when it has subscribed again and written what was pending.
            self._connection_lost = False
            tell_reconnected(self._sinks.values())
        if not self._sinks:
            await self._parse(data)
            return
        if parser.state != _AWAITING_CONTROL_LINE:
            # nats-py is inside a message that is not ours; let it have the rest of it.
            rest = parser.needed + 2 - len(buffer)
            head, data = data[:rest], data[rest:]
            await self._parse(head)
            if not data or parser.buf is not buffer:
                return
        elif buffer:
            if len(buffer) + len(data) < self._needed:
                buffer.extend(data)
                return  # a large message of ours is still coming in; do not look at it again until it is whole
            data = b"".join((buffer, data))
            buffer.clear()
        self._needed = 0
        await self._cut(data, buffer)

    async def _cut(self, data: bytes, buffer: bytearray) -> None:
        parser, sinks, known = self._parser, self._sinks, self._known
        pos, size, width = 0, len(data), self._width
        sink: Sink | None = None
        batch: list[Frame] = []
        payloads = 0
        while pos < size:
            # Frames of one subscription come in runs with one subject and few sizes, so few control lines are new, and
            # most are as long as the one before.
            line = known.get(data[pos : pos + width])
            if line is None:
                eol = data.find(b"\r\n", pos)
                if eol < 0:
                    if size - pos <= _MAX_CONTROL_LINE:
                        break
                    eol = size - 2  # longer than any control line of a message; nats-py decides
                read = frames.message_line(data[pos:eol])
                if read is None or read.sid not in sinks:
                    if batch:
                        self._deliver(sink, batch, payloads)
                        batch, payloads = [], 0
                    end = eol + 2 if read is None else eol + read.total + 4
                    await self._parse(data[pos:end])
                    if parser.buf is not buffer:
                        return  # the parser was reset meanwhile: the rest belongs to a connection that is gone
                    pos = end
                    continue
                width = eol + 2 - pos
                line = (sinks[read.sid], read.subject, read.header_size, read.total, width)
                if len(known) >= self._KNOWN_LIMIT:
                    known.clear()
                known[data[pos : pos + width]] = line
            to, subject, header_size, total, length = line
            start = pos + length
            end = start + total
            if end + 2 > size:
                self._needed = end + 2 - pos
                break
            if to is not sink:
                if batch:
                    self._deliver(sink, batch, payloads)
                    batch, payloads = [], 0
                sink = to
            batch.append((subject, data[start:end], header_size))
            payloads += total - header_size
            pos = end + 2
        self._width = width
        if pos < size:
            buffer += memoryview(data)[pos:]
        if batch:
            self._deliver(sink, batch, payloads)

    def _deliver(self, sink: Sink | None, batch: list[Frame], payload_bytes: int) -> None:
        stats = self.nc.stats
        stats["in_msgs"] += len(batch)
        stats["in_bytes"] += payload_bytes
        if sink is not None:
            call(sink.frames, batch)


async def _cancellable(operation: Awaitable[_T]) -> _T:
    """Await nats-py's `operation` and let a cancellation through, which it swallows while it flushes."""
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    result = await operation
    if task.cancelling() > before:
        raise asyncio.CancelledError
    return result


_REASON = (
    "this version of nats-py has other internals than jetstream_ext knows (2.16 to 2.x); "
    "it works through nats-py's public interface instead, several times slower"
)


_PUBLIC = "_jetstream_ext_connection"
"""Where a client keeps its `PublicConnection`: as long as the client, and no longer."""


def connection_of(nc: Client) -> Connection | PublicConnection:
    """Return the door to `nc`; the same one for every caller."""
    parser = getattr(nc, "_ps", None)
    for known in (getattr(getattr(parser, "parse", None), "__self__", None), getattr(nc, _PUBLIC, None)):
        if isinstance(known, Connection | PublicConnection):
            return known
    if not _internals_known(nc):
        public = PublicConnection(nc, lambda: _server_info(nc))
        setattr(nc, _PUBLIC, public)
        warnings.warn(_REASON, RuntimeWarning, stacklevel=3)
        return public
    connection = Connection(nc)
    nc._ps.parse = connection.parse  # type: ignore[method-assign]
    return connection


def _server_info(nc: Client) -> dict[str, Any]:
    return getattr(nc, "_server_info", None) or {}


def _internals_known(nc: Client) -> bool:
    parser = getattr(nc, "_ps", None)
    return (
        isinstance(getattr(parser, "buf", None), bytearray)
        and isinstance(getattr(parser, "state", None), int)
        and isinstance(getattr(parser, "needed", None), int)
        and inspect.iscoroutinefunction(getattr(parser, "parse", None))
        and isinstance(getattr(nc, "_status", None), int)
        and isinstance(getattr(nc, "_pending", None), list)
        and isinstance(getattr(nc, "_pending_data_size", None), int)
        and isinstance(getattr(nc, "_max_pending_size", None), int)
        and isinstance(getattr(nc, "_subs", None), dict)
        and isinstance(getattr(nc, "stats", None), dict)
        and isinstance(getattr(nc, "_reading_task", ""), asyncio.Task | None)
        and inspect.iscoroutinefunction(getattr(nc, "_flush_pending", None))
        and (getattr(nc, "_flush_queue", "") is None or hasattr(nc._flush_queue, "empty"))
        and callable(getattr(nc, "_remove_sub", None))
    )


class JetStream:
    """What this library needs of a caller's JetStream context: its connection, prefix and default timeout.

    Raises:
        TypeError: It is something else.
        BadSubjectError: Its prefix or domain cannot be part of a subject.
    """

    def __init__(self, js: JetStreamContext | JetStreamManager) -> None:
        if not isinstance(js, JetStreamManager):
            raise TypeError(f"expected a nats-py JetStream context (nc.jetstream()), not {type(js).__name__}")
        frames.check_subject(js._prefix)  # nats-py takes any: with a space in it the server ends the connection
        self.context = js
        self.prefix: str = js._prefix
        self.timeout: float = float(js._timeout)
        self.nc: Client = js._nc

    @property
    def connection(self) -> Connection | PublicConnection:
        """The door to its connection."""
        return connection_of(self.nc)


def bucket_of(kv: KeyValue) -> tuple[JetStreamContext, str, str, str]:
    """Return a bucket's JetStream context, its name, its stream, and the subject prefix of its keys."""
    return kv._js, kv._name, kv._stream, kv._pre
