"""Durable sourcing from a work queue on a leaf node whose link breaks: every message is stored once and in order.

There are three servers. The work queue is on `edge`, a leaf node of `hub`; the stream that reads it is on `far`, another
leaf node. The link of `edge` goes through a slow relay, which is cut several times with data in flight; every third time
the hub crashes instead. A client publishes on `edge` all the time.

nats-server 2.15.1 sometimes skips messages when the link is back: the reading stream goes on with a later message, and
the work queue counts the ones before it as stored. A run in which that happens is reported as an expected failure, if
nothing else is wrong.

CI runs a short version; `python -m nox -s full -- longer` runs it at full size.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack
from itertools import pairwise

import nats
import nats.errors
import nats.js.errors
import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import RetentionPolicy

import jetstream_ext as jsx
from jetstream_ext.testing import NatsServer
from jetstream_ext.testing.process import HeldPort

FULL = bool(os.environ.get("JETSTREAM_EXT_FULL"))
MESSAGES, CUTS = (10_000, 5) if FULL else (1_500, 2)
VERSIONS = [None, "2.14.0"] if FULL else [None]
OUTAGES = (0.1, 1.5, 0.5, 4.0, 12.0)
"""Seconds; the longest outlasts the 10 s after which a reading server restarts the source."""
PAYLOAD = 100
SLACK = 150.0


class Relay:
    """A slow TCP relay that can be cut."""

    CHUNK, PAUSE = 4096, 0.004

    def __init__(self, target: int) -> None:
        self.was_cut = asyncio.Event()
        self._target = target
        self._up = True
        self._passed = 0
        self._limit: int | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Listen; return the port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        self.cut()
        self._server.close()
        await asyncio.gather(*self._tasks)

    def cut(self) -> None:
        """Abort all connections and accept no new ones."""
        self._up, self._limit = False, None
        for writer in self._writers:
            writer.transport.abort()
        self.was_cut.set()

    def cut_after(self, more: int) -> None:
        """Cut after `more` bytes from the leaf node."""
        self.was_cut.clear()
        self._limit = self._passed + more

    def mend(self) -> None:
        self._up = True

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        try:
            if self._up:
                onward, back = await asyncio.open_connection("127.0.0.1", self._target)
                self._writers.add(back)
                await asyncio.gather(self._carry(reader, back, count=True), self._carry(onward, writer, count=False))
                self._writers.discard(back)
        except OSError:
            pass  # the hub is down or the relay was cut; the leaf node reconnects
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, count: bool) -> None:
        try:
            while data := await reader.read(self.CHUNK):
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(self.PAUSE)
                self._passed += len(data) * count
                if self._limit is not None and self._passed >= self._limit:
                    self.cut()
        except OSError:
            pass  # cut
        finally:
            writer.transport.abort()


class Servers:
    """The three servers and the relay."""

    def __init__(self, hub: NatsServer, relay: Relay, edge: Client, far: Client) -> None:
        self.hub = hub
        self.relay = relay
        self.edge: JetStreamContext = edge.jetstream()
        self.far: JetStreamContext = far.jetstream()
        self.edge_from_far: JetStreamContext = far.jetstream(domain="edge", timeout=1)

    async def linked(self) -> None:
        """Wait until `far` reaches `edge`."""
        async with asyncio.timeout(SLACK):
            while True:
                try:
                    await self.edge_from_far.account_info()
                    return
                except (nats.js.errors.ServiceUnavailableError, nats.errors.TimeoutError):
                    await asyncio.sleep(0.05)


@pytest.fixture(params=VERSIONS, ids=str)
async def servers(request: pytest.FixtureRequest) -> AsyncIterator[Servers]:
    version = request.param
    held = HeldPort()
    relay = Relay(held.port)
    port = await relay.start()
    # Without "advertise" the leaf node learns the hub's own port and bypasses the relay.
    hub_config = f"jetstream {{ domain: hub }}\nleafnodes {{ port: {held.port}, advertise: '127.0.0.1:{port}' }}"

    def leaf(name: str, via: int) -> NatsServer:
        remote = f"{{ url: 'nats://127.0.0.1:{via}', compression: off }}"
        config = f"jetstream {{ domain: {name} }}\nleafnodes {{ reconnect: 1, remotes: [ {remote} ] }}"
        return NatsServer(version=version, name=name, config=config)

    with ExitStack() as stack:
        stack.callback(held.close)
        held.make_way()
        hub = stack.enter_context(NatsServer(version=version, name="hub", config=hub_config))
        edge, far = stack.enter_context(leaf("edge", port)), stack.enter_context(leaf("far", held.port))
        clients = [await nats.connect(server.url, connect_timeout=10) for server in (edge, far)]
        servers = Servers(hub, relay, *clients)
        await servers.linked()
        yield servers
        for client in clients:
            await client.close()
        await relay.close()


async def messages(js: JetStreamContext, stream: str) -> int:
    return (await js.stream_info(stream)).state.messages


async def test_a_work_queue_behind_a_broken_link_is_stored_once_and_in_order(servers: Servers) -> None:
    relay, edge, far = servers.relay, servers.edge, servers.far
    await edge.add_stream(name="W", subjects=["w.>"], retention=RetentionPolicy.WORK_QUEUE)
    to_far = "deliver.to-far"
    entry = await jsx.create_source_consumer(
        servers.edge_from_far, "W", "to-far", deliver_subject=to_far, timeout=SLACK
    )
    await jsx.ensure_stream(far, name="ALL", sources=[entry], allow_direct=True)

    async def publish() -> None:
        for number in range(MESSAGES):
            await edge.publish(f"w.{number % 7}", b"%d" % number + b" " * PAYLOAD)

    publishing = asyncio.create_task(publish())
    for number in range(CUTS):
        relay.cut_after(MESSAGES * PAYLOAD // (CUTS + 1))
        async with asyncio.timeout(SLACK):
            await relay.was_cut.wait()
        (health,) = await jsx.source_health(far, "ALL", timeout=2)
        assert health.state is jsx.SourceState.UNREACHABLE
        assert await messages(far, "ALL") < MESSAGES
        if number % 3 == 2:
            servers.hub.kill()
        await asyncio.sleep(OUTAGES[number])
        if number % 3 == 2:
            await asyncio.to_thread(servers.hub.restart)
        relay.mend()
        await servers.linked()
    async with asyncio.timeout(SLACK):
        await publishing
        while await messages(edge, "W") or not (await jsx.source_health(far, "ALL"))[0].ok:
            await asyncio.sleep(0.1)
    stored = [int(message.data) for message in await jsx.DirectGet(far, "ALL").scan().to_list()]
    gaps = [(before, after) for before, after in pairwise(stored) if after != before + 1]
    if gaps and stored[0] == 0 and stored[-1] == MESSAGES - 1 and len(gaps) <= CUTS and sorted(set(stored)) == stored:
        pytest.xfail(f"the server skipped messages after a cut: it stored {gaps} one after the other")
    assert stored == list(range(MESSAGES))
