"""Virtual time for whole calls: an event loop without sockets, and a network between its clients and one engine.

nats-py runs unchanged on `VirtualLoop`: the loop's clock jumps to the next timer, and a connection is a `_Link` to the
reference server's engine. A link delivers bytes in order and may be slow. When it is cut, the bytes for the client are
lost; those for the server are lost or arrive late, as from a client that a server has not yet missed. None of them
outlives the server's process.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from jetstream_ext.testing.reference import Engine, Profile
from jetstream_ext.testing.reference.faults import Faults
from jetstream_ext.testing.reference.jetstream import HostedStream
from jetstream_ext.testing.reference.streams.store import StoredMessage
from jetstream_ext.testing.reference.wire.golang import SECOND
from jetstream_ext.testing.reference.wire.protocol import Close, Deliver, Output, Parser, Publish, encode, get_header

START = 1_800_000_000 * SECOND
_SPINS = 50_000  # turns of the loop at one point of time; more is a loop that never ends


class WrongError(AssertionError):
    """A rule was broken."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose time passes only while it would wait; its connections are made by `network`."""

    network: "Network"

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._spins = 0
        self._selector = self

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise WrongError("nothing is scheduled, but a call still waits")
        if timeout > 0:
            self._now += timeout
            self._spins = 0
        else:
            self._spins += 1
            if self._spins > _SPINS:
                raise WrongError(f"the loop spins at {self._now:g} s")
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    async def create_connection(self, protocol_factory: Callable[[], Any], *_: Any, **__: Any) -> Any:  # type: ignore[override]
        return await self.network.connect(protocol_factory())


class _Pipe:
    """One direction of a link: bytes arrive in order, after a delay; None is the end."""

    def __init__(self, loop: VirtualLoop, deliver: Callable[[bytes | None], None]) -> None:
        self._loop, self._deliver = loop, deliver
        self._moving: deque[tuple[float, bytes | None]] = deque()
        self._held_until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def push(self, data: bytes | None, delay: float) -> None:
        self._moving.append((self._loop.time() + delay, data))
        self._arm()

    def hold(self, seconds: float) -> None:
        """Deliver nothing for some seconds."""
        self._held_until = max(self._held_until, self._loop.time() + seconds)

    def release(self, seconds: float) -> None:
        """Hold nothing for longer than some seconds from now on."""
        self._held_until = min(self._held_until, self._loop.time() + seconds)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._arm()

    @property
    def is_busy(self) -> bool:
        return bool(self._moving)

    def clear(self) -> None:
        """Lose what is on its way."""
        self._moving.clear()

    def _arm(self) -> None:
        if self._moving and self._timer is None:
            self._timer = self._loop.call_at(max(self._moving[0][0], self._held_until), self._arrived)

    def _arrived(self) -> None:
        self._timer = None
        now = self._loop.time() + 1e-9
        while self._moving and max(self._moving[0][0], self._held_until) <= now:
            self._deliver(self._moving.popleft()[1])
        self._arm()


class _Link(asyncio.Transport):
    """The client's end of one connection."""

    def __init__(self, network: "Network", protocol: Any, number: int, latency: float) -> None:
        super().__init__()
        self.number, self.latency = number, latency
        self.parser = Parser(1 << 20)
        self.protocol = protocol
        self.closed = False
        self._network = network
        self.up = _Pipe(network.loop, lambda data: network.arrived(self, data))
        self.down = _Pipe(network.loop, self._received)
        protocol.connection_made(self)

    def _received(self, data: bytes | None) -> None:
        if self.closed:
            return
        if data is None:
            self._network.cut(self, late=False)
        else:
            self._network.say(f"  \u2190 {data[:160]!r}")
            self.protocol.data_received(data)

    def write(self, data: Any) -> None:
        if not self.closed:
            self.up.push(bytes(data), self._network.delay(self))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self._network.hang_up(self, None)

    abort = close

    def is_reading(self) -> bool:
        return not self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


class Network:
    """The links of a loop, and the engine behind them: one server that clients reach over separate paths."""

    def __init__(self, loop: VirtualLoop, version: str, seed: int, say: Callable[[str], None]) -> None:
        self.loop, self.say, self.random = loop, say, Random(seed)
        loop.network = self
        self.faults = Faults(seed=seed)
        self.engine = Engine(Profile.of(version), seed=seed, faults=self.faults)
        self.journal: dict[str, dict[int, StoredMessage]] = {}
        """Every message that a stream has ever stored, also those that its limits have removed."""
        self.duplicates = 0  # acks that say that the server knew the message's id
        self.latencies = [0.0005]
        self.late_limit = math.inf
        """Seconds within which what was sent over a link arrives after the link is lost, if it is not lost, too."""
        self._links: dict[int, _Link] = {}
        self._lost: list[_Link] = []
        self._numbers = 0
        self._ended: set[int] = set()  # the connections that the server has closed
        self._down_until = 0.0
        self._restarts = 0
        self._alarm: asyncio.TimerHandle | None = None
        self._due = 0

    # -- the server -----------------------------------------------------------------------------------------------

    @property
    def now(self) -> int:
        return START + round(self.loop.time() * SECOND)

    def stream(self, name: str) -> HostedStream:
        assert self.engine.jetstream is not None
        return self.engine.jetstream.streams[name]

    def create(self, config: bytes) -> None:
        """Create a stream, and record what it stores."""
        name = config.split(b'"')[3].decode()
        self._handle(0, Publish(f"$JS.API.STREAM.CREATE.{name}", config))
        stream, journal = self.stream(name).stream, self.journal.setdefault(name, {})
        append, undo = stream._add, stream.undo_append

        def recorded(*arguments: Any, **options: Any) -> StoredMessage:
            message = append(*arguments, **options)
            journal[message.seq] = message
            self.say(f"      {name} {message.seq}: {message.subject} {message.payload[:40]!r}")
            return message

        def undone(seq: int) -> bool:
            found = undo(seq)
            if found:
                del journal[seq]
                self.say(f"      {name} {seq}: lost with the old leader")
            return found

        stream._add, stream.undo_append = recorded, undone  # type: ignore[method-assign]

    def store(self, subject: str, payload: bytes) -> None:
        """Publish without a connection, and so without faults."""
        rules, self.faults.rules = self.faults.rules, []
        self._handle(0, Publish(subject, payload))
        self.faults.rules = rules

    def change_leader(self, name: str, unsaved: int) -> None:
        self.say(f"    {name} has a new leader, which lacks up to {unsaved} messages")
        self._take(self.engine.change_leader(name, self.now, unsaved=unsaved))

    def restart(self, seconds: float) -> None:
        """Kill the server, and start it again after some seconds, with what is in its streams."""
        self.say(f"    the server is killed; back in {seconds:g} s")
        self._down_until = max(self._down_until, self.loop.time() + seconds)
        for link in list(self._links.values()):
            self.cut(link, late=False)
        for number in range(1, self._numbers + 1):
            self._ended.add(number)
            self._take(self.engine.detach(number, self.now))
        assert self.engine.jetstream is not None
        self._restarts += 1
        self.engine.context.server_id = f"{self.engine.context.server_id[:-4]}{self._restarts:04}"  # a new process
        for hosted in self.engine.jetstream.streams.values():
            hosted.atomic.forget_all()
            hosted.fast.forget_all()
        self.loop.call_later(seconds, self._restarted)

    def _restarted(self) -> None:
        # A server knows only the message ids of the messages that it finds in its store.
        assert self.engine.jetstream is not None
        for hosted in self.engine.jetstream.streams.values():
            stream = hosted.stream
            window = stream.config["duplicate_window"]
            stream.duplicates._seen = {
                msg_id: (message.seq, message.time)
                for message in stream.store
                if message.time > self.now - window and (msg_id := get_header(message.header, "Nats-Msg-Id"))
            }

    # -- the links --------------------------------------------------------------------------------------------------

    async def connect(self, protocol: Any) -> tuple[_Link, Any]:
        await asyncio.sleep(self.random.choice(self.latencies))
        if self.loop.time() < self._down_until:
            raise ConnectionRefusedError("the server is down")
        self._numbers += 1
        link = self._links[self._numbers] = _Link(self, protocol, self._numbers, self.random.choice(self.latencies))
        self._take(self.engine.attach(link.number, self.now))
        return link, protocol

    def cut_one(self) -> None:
        """Cut one of the links."""
        if self._links:
            self.cut(self._links[self.random.choice(sorted(self._links))], late=self.random.random() < 0.5)

    def cut(self, link: _Link, *, late: bool) -> None:
        """Cut a link; what is on its way to the server is lost or arrives late."""
        self.say(f"    link {link.number} is cut" + (", and what was sent arrives late" if late else ""))
        if late:
            link.up.hold(self.random.choice((0.01, 1.0, 4.0)))
        else:
            link.up.clear()
        self.hang_up(link, ConnectionResetError("cut"))

    def stall(self, seconds: float) -> None:
        """Deliver nothing for some seconds, in either direction."""
        self.say(f"    the links stall for {seconds:g} s")
        for link in self._links.values():
            link.up.hold(seconds)
            link.down.hold(seconds)

    def hang_up(self, link: _Link, error: Exception | None) -> None:
        """Close the client's end; the server notices once it has read what was sent."""
        if not link.closed:
            link.closed = True
            link.up.release(self.late_limit)
            del self._links[link.number]
            self._lost.append(link)
            self.loop.call_soon(link.protocol.connection_lost, error)
            link.up.push(None, self.delay(link))

    @property
    def is_arriving(self) -> bool:
        """Whether what was sent over a lost link is still on its way."""
        self._lost = [link for link in self._lost if link.up.is_busy]
        return bool(self._lost)

    def calm(self) -> None:
        """End the faults, and make the links fast: with a round trip longer than a timeout, no call succeeds."""
        self.faults.rules.clear()
        self.latencies = [0.0005]
        for link in self._links.values():
            link.latency = self.latencies[0]

    def hang_up_all(self) -> None:
        """Close every link, and take no others."""
        self._down_until = math.inf
        for link in list(self._links.values()):
            self.hang_up(link, None)

    def delay(self, link: _Link) -> float:
        return link.latency * self.random.random()

    def arrived(self, link: _Link, data: bytes | None) -> None:
        if data is None:
            self._take(self.engine.detach(link.number, self.now))
        elif self.loop.time() >= self._down_until and link.number not in self._ended:
            for command in link.parser.feed(data):
                if isinstance(command, Publish):
                    self.say(f"  \u2192 {command.subject} {command.payload[:60]!r} reply {command.reply}")
                    if command.subject.startswith("$JS.API."):  # its answer may show every message
                        self._fix_streams()
                self._handle(link.number, command)

    def _fix_streams(self) -> None:
        assert self.engine.jetstream is not None
        for hosted in self.engine.jetstream.streams.values():
            hosted.stream.shown = hosted.stream.store.last

    def _handle(self, number: int, command: Any) -> None:
        self._take(self.engine.handle(number, command, self.now))

    def _take(self, outputs: list[Output]) -> None:
        joined: dict[int, bytes] = {}
        for output in outputs:
            joined[output.connection] = joined.get(output.connection, b"") + encode(output)
        for number, data in joined.items():
            if (link := self._links.get(number)) is not None and data:
                link.down.push(data, self.delay(link))
        for output in outputs:
            self.duplicates += isinstance(output, Deliver) and b'"duplicate": true' in output.payload
            if isinstance(output, Close):
                self._ended.add(output.connection)
                if (link := self._links.get(output.connection)) is not None:
                    link.down.push(None, self.delay(link))
        due = self.engine.next_timer()
        if due is not None and (self._alarm is None or due < self._due):
            if self._alarm is not None:
                self._alarm.cancel()
            self._due = due
            self._alarm = self.loop.call_at((due - START) / SECOND + 1e-6, self._timer)

    def _timer(self) -> None:
        self._alarm = None
        self._take(self.engine.handle_timer(self.now))
