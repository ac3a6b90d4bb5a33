"""What `ingest` reports after an outage is what the stream holds, whatever the server has forgotten meanwhile."""

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import nats.errors
import nats.js.errors
import pytest
from link import Link
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext.client import api as api_module
from jetstream_ext.errors import IngestError, StreamRecreatedError
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.testing import NatsServer

# nats-py leaves the sockets of lost connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored .*<function (StreamWriter|_SelectorTransport)")
Connect = Callable[..., Awaitable[Client]]
Outage = Callable[[], Awaitable[None]]
SENT, COUNT = 10, 20
SHORT = 0.2  # seconds; a duplicate window that ends during the outages here


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.02)


async def add_stream(js: JetStreamContext, **config: Any) -> None:
    await js.add_stream(name="S", subjects=["s.>"], **{"allow_batched": True, "allow_direct": True, **config})


async def stored(js: JetStreamContext) -> list[int]:
    """Return the numbers that the stream holds, in order."""
    found, seq = list[int](), 0
    with contextlib.suppress(nats.js.errors.NotFoundError):
        while True:
            message = await js.get_msg("S", seq=seq + 1, subject=">", next=True)
            found.append(int(message.data or b""))
            seq = message.seq or 0
    return found


async def last_seq(js: JetStreamContext) -> int:
    return (await js.stream_info("S")).state.last_seq or 0


async def cut(link: Link, js: JetStreamContext) -> None:
    """Cut the link for now, and wait until the client has noticed."""
    link.accepting = False
    link.cut()

    async def noticed() -> bool:
        return not js._nc.is_connected

    await until(noticed)


async def forgotten(js: JetStreamContext) -> None:
    """Wait until the server has forgotten the ids of what it has stored by now, with a window of `SHORT`."""
    await js.add_stream(name="PROBE", subjects=["probe"], duplicate_window=SHORT)
    await js.publish("probe", b"", headers={"Nats-Msg-Id": "probe"})

    async def stored_again() -> bool:
        return not (await js.publish("probe", b"", headers={"Nats-Msg-Id": "probe"})).duplicate

    await until(stored_again)


async def run(
    js: JetStreamContext, outage: Outage, message: Callable[[int], Any] | None = None, **options: Any
) -> jsx.IngestReport:
    """Ingest numbers; the outage comes while the first ones are sent and not acknowledged."""

    async def source() -> AsyncIterator[Any]:
        for n in range(COUNT):
            if n == SENT:
                await outage()
            yield ("s.a", b"%d" % n) if message is None else message(n)

    async with asyncio.timeout(120):
        return await jsx.ingest(js, source(), **{"flow": 100, "patience": 60, **options})


class TestRestart:
    @pytest.fixture
    async def js(self, own_server: NatsServer, connect: Connect) -> JetStreamContext:
        return (await connect(own_server.url)).jetstream()

    @pytest.fixture
    def restart(self, own_server: NatsServer, js: JetStreamContext) -> Outage:
        """Kill and restart the server once it has the first messages."""

        async def restart() -> None:
            async def arrived() -> bool:
                return await last_seq(js) == SENT

            await until(arrived)
            await asyncio.to_thread(own_server.kill)
            await asyncio.to_thread(own_server.restart)

        return restart

    async def test_messages_that_the_stream_has_are_not_sent_again(self, js: JetStreamContext, restart: Outage) -> None:
        await add_stream(js, allow_direct=False)
        report = await run(js, restart)
        assert (report.stored, report.duplicates, report.in_doubt) == (COUNT, SENT, 0)
        assert await stored(js) == list(range(COUNT))

    async def test_an_older_value_never_replaces_a_newer_one(self, js: JetStreamContext, restart: Outage) -> None:
        # A restarted server does not know the ids of the messages that were replaced.
        await add_stream(js, max_msgs_per_subject=1)
        report = await run(js, restart)
        assert (report.stored, report.in_doubt) == (COUNT, 0)
        assert await stored(js) == [COUNT - 1]
        assert await last_seq(js) == COUNT, "every message was stored once"

    async def test_with_ids_of_the_caller_replaced_messages_are_sent_again_and_in_doubt(
        self, js: JetStreamContext, restart: Outage
    ) -> None:
        await add_stream(js, max_msgs_per_subject=1)
        report = await run(js, restart, msg_id=lambda entry: f"number-{int(entry[1])}")
        assert (report.stored, report.in_doubt) == (COUNT, SENT)
        assert await last_seq(js) == COUNT + SENT - 1

    async def test_messages_that_were_lost_with_the_stream_are_sent_again(
        self, js: JetStreamContext, restart: Outage
    ) -> None:
        await add_stream(js, storage="memory")

        async def restarted_and_created() -> None:
            await restart()

            async def created() -> bool:
                try:
                    await add_stream(js, storage="memory")
                except nats.errors.Error:
                    return False
                return True

            await until(created)

        report = await run(js, restarted_and_created)
        assert (report.stored, report.in_doubt) == (COUNT, 0)
        assert await stored(js) == list(range(COUNT))


class TestRecreation:
    """The stream that has acknowledged messages is deleted during the run."""

    @pytest.fixture
    async def js(self, own_server: NatsServer, connect: Connect) -> JetStreamContext:
        return (await connect(own_server.url)).jetstream()

    async def test_a_stream_that_was_created_again_is_an_error_and_nothing_counts_as_stored(
        self, js: JetStreamContext
    ) -> None:
        for before, acknowledged in itertools.product((0, 3), (SENT, SENT - 5)):
            await add_stream(js)
            for n in range(before):
                await js.publish("s.a", b"%d" % n)
            progress: list[int] = []

            async def recreate(
                before: int = before, acknowledged: int = acknowledged, progress: Any = progress
            ) -> None:
                async def arrived() -> bool:
                    return await last_seq(js) == before + SENT and progress[-1] == acknowledged

                await until(arrived)
                await js.delete_stream("S")
                await add_stream(js)

            with pytest.raises(IngestError, match="'S' was deleted and created again during the run") as caught:
                await run(
                    js,
                    recreate,
                    flow=1 if acknowledged == SENT else 5,
                    max_outstanding_acks=3,
                    on_progress=lambda now, most=acknowledged, to=progress: to.append(min(now.stored, most)),
                    progress_every=0,
                )
            error = caught.value
            assert isinstance(error.__cause__, StreamRecreatedError)
            assert (error.index, error.report and error.report.stored) == (0, 0), (before, acknowledged)
            assert error.in_doubt >= SENT, (before, acknowledged)
            found = await stored(js)
            assert len(found) < COUNT
            assert all(n < error.in_doubt for n in found), (before, acknowledged)
            await js.delete_stream("S")

    async def test_so_is_one_that_is_created_again_between_two_batches(
        self, own_server: NatsServer, js: JetStreamContext, connect: Connect
    ) -> None:
        await add_stream(js)
        async with Link(own_server.port) as link:
            client = (await connect(link.url)).jetstream()
            recreating: list[asyncio.Task[None]] = []

            async def outage() -> None:
                await cut(link, client)
                link.accepting = True

            async def recreate() -> None:
                await js.delete_stream("S")
                await add_stream(js)

            def found(progress: jsx.IngestProgress) -> None:
                if progress.stored == SENT and not recreating:  # what the search has found
                    recreating.append(asyncio.create_task(recreate()))

            with pytest.raises(IngestError, match="'S' was deleted and created again during the run"):
                await run(client, outage, on_progress=found, progress_every=0)
            await recreating[0]

    async def test_a_stream_that_was_deleted_is_an_error_and_nothing_counts_as_stored(
        self, js: JetStreamContext
    ) -> None:
        await add_stream(js)
        progress: list[int] = []

        async def delete() -> None:
            async def arrived() -> bool:
                return progress[-1] == SENT

            await until(arrived)
            await js.delete_stream("S")

        with pytest.raises(IngestError, match=r"'S' was deleted during the run.*; nothing is stored") as caught:
            await run(
                js, delete, flow=1, timeout=2, on_progress=lambda now: progress.append(now.stored), progress_every=0
            )
        assert (caught.value.index, caught.value.in_doubt) == (0, 0)
        assert caught.value.report is not None
        assert caught.value.report.stored == 0

    async def test_a_stream_whose_creation_time_changed_is_the_same(
        self, own_server: NatsServer, js: JetStreamContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Some servers change it in a restart after an update; only the messages show that the stream is the same."""
        await add_stream(js)
        progress: list[int] = []
        parse = api_module.parse_stream_state
        restarted = False

        def parsed(*arguments: Any) -> StreamState:
            state = parse(*arguments)
            return dataclasses.replace(state, created="2026-01-01T00:00:00Z") if restarted else state

        monkeypatch.setattr(api_module, "parse_stream_state", parsed)

        async def restart() -> None:
            nonlocal restarted

            async def arrived() -> bool:
                return progress[-1] == SENT

            await until(arrived)
            await asyncio.to_thread(own_server.kill)
            await asyncio.to_thread(own_server.restart)
            restarted = True

        report = await run(js, restart, flow=1, on_progress=lambda now: progress.append(now.stored), progress_every=0)
        assert (report.stored, report.in_doubt) == (COUNT, 0)
        assert await stored(js) == list(range(COUNT))


class TestSilentSource:
    """The source of an async `ingest` waits for its next message."""

    @pytest.fixture
    async def link(self, own_server: NatsServer) -> AsyncIterator[Link]:
        async with Link(own_server.port) as link:
            yield link

    async def test_what_was_lost_is_sent_again_meanwhile_and_a_closed_connection_ends_the_call(
        self, own_server: NatsServer, link: Link, connect: Connect
    ) -> None:
        direct = (await connect(own_server.url)).jetstream()
        await add_stream(direct)
        for drains in (False, True):
            nc = await connect(link.url)

            async def source() -> AsyncIterator[tuple[str, bytes]]:
                for n in range(SENT):
                    if n == SENT - 5:
                        link.accepting = False
                        link.cut()
                        link.accepting = True
                    yield "s.a", b"%d" % n
                await asyncio.Event().wait()

            before = await last_seq(direct)
            running = asyncio.create_task(jsx.ingest(nc.jetstream(), source(), patience=60))

            async def arrived(enough: int = before + SENT) -> bool:
                return await last_seq(direct) >= enough

            await until(arrived)
            await (nc.drain() if drains else nc.close())
            async with asyncio.timeout(10):
                with pytest.raises(IngestError, match=r"connection is (closed|draining)|is not known"):
                    await running

    async def test_a_closed_connection_ends_add_many(self, own_server: NatsServer, connect: Connect) -> None:
        await add_stream((await connect(own_server.url)).jetstream())
        for opened in (True, False):
            nc = await connect(own_server.url)
            publisher, waiting = jsx.FastPublisher(nc.jetstream()), asyncio.Event()

            async def source(opened: bool = opened, waiting: asyncio.Event = waiting) -> AsyncIterator[Any]:
                if opened:
                    yield "s.a", b"1"
                waiting.set()
                await asyncio.Event().wait()

            adding = asyncio.create_task(publisher.add_many(source()))
            await waiting.wait()
            await nc.close()
            async with asyncio.timeout(10):
                with pytest.raises((jsx.errors.BatchAbandonedError, nats.errors.ConnectionClosedError)):
                    await adding


async def test_a_slow_source_survives_a_second_outage_later_than_its_patience(
    own_server: NatsServer, connect: Connect
) -> None:
    """With so few messages the server has acknowledged none of them by a flow ack."""
    js = (await connect(own_server.url)).jetstream(timeout=10)
    await add_stream(js)
    patience = 1.5

    async def source() -> AsyncIterator[tuple[str, bytes]]:
        for n in range(6):
            if n in (2, 4):
                await asyncio.to_thread(own_server.restart)
            yield "s.a", b"%d" % n
            await asyncio.sleep(patience / 2)

    report = await jsx.ingest(js, source(), patience=patience, timeout=10)
    assert (report.stored, report.in_doubt) == (6, 0)
    assert await stored(js) == list(range(6))


@pytest.mark.parametrize("end", ["close", "drain"])
async def test_the_end_of_the_connection_is_an_ingest_error(own_server: NatsServer, connect: Connect, end: str) -> None:
    await add_stream((await connect(own_server.url)).jetstream())
    nc, begun = await connect(own_server.url), asyncio.Event()

    def sent(progress: jsx.IngestProgress) -> None:
        if progress.stored:
            begun.set()

    endless = (("s.a", b"%d" % n) for n in itertools.count())
    running = asyncio.create_task(jsx.ingest(nc.jetstream(), endless, on_progress=sent, progress_every=0))
    await begun.wait()
    await getattr(nc, end)()
    async with asyncio.timeout(10):
        with pytest.raises(IngestError, match=r"the connection is (closed|draining)") as caught:
            await running
    assert caught.value.index > 0


class TestLongOutage:
    """The link is away for longer than the duplicate window; the server has stored the first messages."""

    @pytest.fixture
    async def direct(self, own_server: NatsServer, connect: Connect) -> JetStreamContext:
        return (await connect(own_server.url)).jetstream()

    @pytest.fixture
    async def link(self, own_server: NatsServer) -> AsyncIterator[Link]:
        async with Link(own_server.port) as link:
            yield link

    @pytest.fixture
    async def js(self, link: Link, connect: Connect) -> JetStreamContext:
        return (await connect(link.url)).jetstream()

    @pytest.fixture
    def outage(self, link: Link, direct: JetStreamContext, js: JetStreamContext) -> Outage:
        async def outage() -> None:
            async def arrived() -> bool:
                return await last_seq(direct) == SENT

            await until(arrived)
            await cut(link, js)

            await forgotten(direct)
            link.accepting = True

        return outage

    async def test_a_connection_that_was_lost_before_anything_was_sent_does_not_use_up_the_timeout(
        self, direct: JetStreamContext, link: Link, js: JetStreamContext
    ) -> None:
        await add_stream(direct)
        timeout = 6.0

        async def outage() -> None:
            await cut(link, js)
            link.accepting = True

        async def quiet() -> AsyncIterator[Any]:
            await asyncio.sleep(timeout)
            for n in range(COUNT):
                if n == SENT:
                    await outage()
                yield "s.a", b"%d" % n

        await cut(link, js)
        asyncio.get_running_loop().call_later(0.2, setattr, link, "accepting", True)
        report = await jsx.ingest(js, quiet(), patience=timeout)
        assert report.stored == COUNT
        assert await stored(direct) == list(range(COUNT))

    async def test_a_source_may_use_its_buffer_and_headers_again(
        self, direct: JetStreamContext, link: Link, js: JetStreamContext
    ) -> None:
        await add_stream(direct)
        headers, data = {}, bytearray(2)

        async def lost() -> bool:
            return link.dropped.count(b"PUB s.a ") == SENT - 1

        async def outage() -> None:
            await until(lost)
            await cut(link, js)
            link.accepting = link.requests = True

        def message(n: int) -> Any:
            link.requests = link.requests and n != 1  # the first message opens the batch; the next ones are lost
            data[:] = b"%02d" % n
            headers["Number"] = str(n)
            return "s.a", data, headers

        report = await run(js, outage, message)
        assert report.stored == COUNT
        assert report.duplicates + report.resent == SENT
        found = await jsx.DirectGet(direct, "S").scan().to_list()
        assert [(int(each.data), each.headers["Number"]) for each in found] == [(n, str(n)) for n in range(COUNT)]

    @pytest.mark.parametrize("config", [{}, {"allow_direct": False}, {"max_msgs": 5}, {"max_msgs_per_subject": 1}])
    async def test_nothing_is_stored_twice(
        self, direct: JetStreamContext, js: JetStreamContext, outage: Outage, config: dict[str, Any]
    ) -> None:
        await add_stream(direct, duplicate_window=SHORT, **config)
        report = await run(js, outage)
        assert (report.stored, report.in_doubt) == (COUNT, 0)
        assert await last_seq(direct) == COUNT
        kept = config.get("max_msgs", config.get("max_msgs_per_subject", COUNT))
        assert await stored(direct) == list(range(COUNT))[-kept:]

    async def test_a_search_that_does_not_end_in_time_says_so(
        self, direct: JetStreamContext, link: Link, js: JetStreamContext, outage: Outage
    ) -> None:
        """Each answer comes in time, but the search as a whole has to end too."""
        await add_stream(direct, allow_direct=False, duplicate_window=SHORT)

        async def slow_afterwards() -> None:
            await outage()
            link.rate = 50_000

        with pytest.raises(IngestError, match=r"tried for 3 s") as caught:
            await run(
                js,
                slow_afterwards,
                lambda n: ("s.a", b"%d" % n + b" " * 20_000),
                msg_id=lambda entry: (
                    f"number-{int(entry[1])}"
                ),  # with the default ids, one message shows that all are stored
                patience=3,
            )
        assert (caught.value.index, caught.value.in_doubt) == (0, SENT)

    async def test_what_was_purged_is_in_doubt(
        self, direct: JetStreamContext, js: JetStreamContext, outage: Outage
    ) -> None:
        await add_stream(direct, duplicate_window=SHORT)

        async def purged() -> None:
            await outage()
            await direct.purge_stream("S")

        report = await run(js, purged)
        assert (report.stored, report.in_doubt) == (COUNT, SENT)
        assert await stored(direct) == list(range(COUNT))


class TestWithoutPermission:
    CONFIG = """
        authorization { users: [
            { user: admin, password: p },
            { user: writer, password: p, permissions: { publish: ["s.>"], subscribe: ["_INBOX.>"] } }
        ] }
    """

    async def test_a_stream_that_may_not_be_read_leaves_it_in_doubt(
        self, own_server: NatsServer, connect: Connect
    ) -> None:
        """The client may ask for the stream, but not for its messages."""
        writer = '{ publish: ["s.>", "$JS.API.STREAM.INFO.S", "$JS.API.STREAM.NAMES"] }'
        users = f"{{ user: admin, password: p }}, {{ user: writer, password: p, permissions: {writer} }}"
        async with NatsServer(config=f"authorization {{ users: [ {users} ] }}") as server, Link(server.port) as link:
            admin = (await connect(server.url, user="admin", password="p")).jetstream()
            await add_stream(admin)
            js = (await connect(link.url, user="writer", password="p")).jetstream()

            async def outage() -> None:
                await cut(link, js)
                link.accepting = True

            report = await run(js, outage, msg_id=lambda entry: entry[1].decode())
            assert (report.stored, report.duplicates, report.in_doubt) == (COUNT, 0, SENT)
            assert await stored(admin) == list(range(COUNT))

    @pytest.mark.parametrize("known", [True, False], ids=["within the window", "after the window"])
    async def test_what_may_be_stored_is_in_doubt(self, connect: Connect, known: bool) -> None:
        async with NatsServer(config=self.CONFIG) as server, Link(server.port) as link:
            admin = (await connect(server.url, user="admin", password="p")).jetstream()
            await add_stream(admin, duplicate_window=120 if known else SHORT)
            js = (await connect(link.url, user="writer", password="p")).jetstream()

            async def outage() -> None:
                async def arrived() -> bool:
                    return await last_seq(admin) == SENT

                await until(arrived)
                await cut(link, js)
                if not known:
                    await asyncio.sleep(1.5)  # the server forgets the ids, possibly late
                link.accepting = True

            report = await run(js, outage, timeout=2)
            assert report.stored == COUNT
            found = await stored(admin)
            assert report.in_doubt >= len(found) - len(set(found))
            assert (report.duplicates, report.in_doubt) == (0, SENT)
            if known:  # the server has dropped the copies
                assert found == list(range(COUNT))
