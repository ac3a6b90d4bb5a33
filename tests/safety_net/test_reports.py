"""A message that is reported as stored is stored once, and an answer shows the moment that it names."""

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import nats.errors
import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import BatchMessage, errors
from jetstream_ext.testing import Faults, Lose, NatsServer, ReferenceServer, StaleReplica

sys.path.insert(0, str(Path(__file__).parent))

from link import Link

# nats-py leaves the sockets of lost connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored .*<function (StreamWriter|_SelectorTransport)")
ISSUE = "Every wait ends, every report is true: "
Connect = Callable[..., Awaitable[Client]]
MakeStream = Callable[..., Awaitable[str]]
Within = Callable[[float, Awaitable[Any]], Awaitable[Any]]


def level(api_level: int) -> Callable[[bytes], bytes]:
    """Return a function that replaces the API level in a server's greeting."""
    return lambda line: re.sub(rb'"api_lvl":[0-9]+', b'"api_lvl":%d' % api_level, line)


async def payloads(js: JetStreamContext, stream: str) -> list[bytes]:
    return [message.data for message in await jsx.DirectGet(js, stream).scan(confirm=True).to_list()]


class TestBatchIdUsedAgain:
    @pytest.fixture
    async def stream(self, js: JetStreamContext, make_stream: MakeStream) -> str:
        """A stream with a batch ``order`` of two messages."""
        stream = await make_stream()
        await jsx.publish_atomic(js, self.batch(stream, "3 apples", "5 plums"), batch_id="order")
        return stream

    @staticmethod
    def batch(stream: str, *contents: str) -> list[BatchMessage]:
        return [BatchMessage(f"{stream}.a", text.encode(), msg_id=text.replace(" ", "-")) for text in contents]

    @pytest.mark.xfail(strict=True, raises=AssertionError, reason=ISSUE + "a batch id used again is a false success")
    async def test_publish_atomic_does_not_return_the_ack_of_other_content(
        self, js: JetStreamContext, stream: str
    ) -> None:
        outcome: object = None
        try:
            await jsx.publish_atomic(js, self.batch(stream, "3 apples", "9 pears"), batch_id="order")
        except errors.BatchError as error:
            outcome = error
        assert b"9 pears" not in await payloads(js, stream)
        assert outcome is not None, "9 pears are reported as stored"

    @pytest.mark.xfail(strict=True, raises=AssertionError, reason=ISSUE + "resolve() takes another batch for this one")
    async def test_resolve_does_not_take_a_refused_batch_for_an_earlier_one_of_other_content(
        self, js: JetStreamContext, stream: str
    ) -> None:
        batch = jsx.AtomicBatch(js, batch_id="order")
        for message in self.batch(stream, "3 apples", "9 pears"):
            await batch.add_message(message)
        with pytest.raises(errors.AtomicPublishDuplicateMessageIDError):
            await batch.commit_eob()
        outcome: object = None
        try:
            outcome = await batch.resolve()
        except errors.BatchError:
            pass
        assert outcome != "stored"

    @pytest.mark.xfail(strict=True, raises=AssertionError, reason=ISSUE + "resolve() takes another batch for this one")
    async def test_resolve_does_not_take_a_lost_batch_for_another_publishers_of_the_same_id(
        self, connect: Connect
    ) -> None:
        async with ReferenceServer(faults=Faults(Lose("s.>", when=lambda m: b"9 pears" in m.payload))) as server:
            js, other = [(await connect(server.url)).jetstream(timeout=30) for _ in range(2)]
            await js.add_stream(name="S", subjects=["s.>"], allow_atomic=True, allow_direct=True)
            await jsx.publish_atomic(js, [("s.a", b"first")])  # from now on the connection knows the stream
            await jsx.publish_atomic(other, [("s.a", b"3 apples"), ("s.a", b"5 plums")], batch_id="order")
            batch = jsx.AtomicBatch(js, batch_id="order")
            await batch.add("s.a", b"7 figs")
            batch._session._timeout = 0.3  # the answer to the commit is lost
            with pytest.raises(errors.BatchOutcomeUnknownError):
                await batch.commit("s.a", b"9 pears")
            outcome: object = None
            try:
                outcome = await batch.resolve(timeout=30)
            except errors.BatchError:
                pass
            assert b"9 pears" not in await payloads(js, "S")
            assert outcome != "stored"


class TestMultiLast:
    async def test_pages_are_all_of_one_moment(self, js: JetStreamContext, make_stream: MakeStream) -> None:
        stream = await make_stream(storage="memory")
        for n in range(4):
            await js.publish(f"{stream}.{n}")
        read = jsx.DirectGet(js, stream).multi_last([f"{stream}.>"], up_to_seq=1000, max_bytes=1)
        async with read as messages:
            found = [await anext(messages)]
            await js.publish(f"{stream}.0")
            found += [message async for message in messages]
        assert [message.seq for message in found] == [1, 2, 3, 4]

    async def test_answer_of_a_lagging_replica_has_no_later_up_to_seq(self, connect: Connect) -> None:
        faults = Faults(StaleReplica("$JS.API.DIRECT.GET.>", behind=3, times=None))
        async with ReferenceServer(faults=faults) as server:
            js = (await connect(server.url)).jetstream(timeout=30)
            await js.add_stream(name="S", subjects=["s.>"], storage="memory", allow_direct=True)
            for n in range(5):
                await js.publish("s.a", b"%d" % n)
            read = jsx.DirectGet(js, "S").multi_last(["s.a"], up_to_seq=5)
            try:
                found = await read.to_list()
            except errors.JetStreamExtError:
                return
            assert read.up_to_seq is not None
            assert [message.seq for message in found] == [read.up_to_seq]

    @pytest.mark.parametrize("name", ["batch", "multi_last"])
    async def test_reads_of_many_messages_wait_for_a_sequence(
        self, js: JetStreamContext, make_stream: MakeStream, name: str
    ) -> None:
        stream = await make_stream()
        ack = await js.publish(f"{stream}.a")
        direct = jsx.DirectGet(js, stream)
        if name == "batch":
            read = direct.batch(10, min_seq=ack.seq)
        else:
            read = direct.multi_last([f"{stream}.a"], min_seq=ack.seq)
        assert [message.seq for message in await read.to_list()] == [ack.seq]

    @pytest.mark.parametrize("storage", ["file", "memory"])
    @pytest.mark.parametrize("name", ["batch", "multi_last", "up_to_seq", "pages"])
    async def test_reads_wait_until_a_lagging_replica_has_caught_up(
        self, connect: Connect, storage: str, name: str
    ) -> None:
        faults = Faults(StaleReplica("$JS.API.DIRECT.GET.>", behind=3, times=5))
        async with ReferenceServer(faults=faults) as server:
            js = (await connect(server.url)).jetstream(timeout=30)
            await js.add_stream(name="S", subjects=["s.>"], storage=storage, allow_direct=True)
            for subject in "abcab":
                await js.publish(f"s.{subject}")
            direct = jsx.DirectGet(js, "S")
            read = {
                "batch": lambda: direct.batch(3, seq=3, min_seq=5),
                "multi_last": lambda: direct.multi_last(["s.>"], min_seq=5),
                "up_to_seq": lambda: direct.multi_last(["s.>"], up_to_seq=5),
                "pages": lambda: direct.multi_last(["s.>"], up_to_seq=5, max_bytes=1),
            }[name]()
            assert [message.seq for message in await read.to_list()] == [3, 4, 5]
            assert read.up_to_seq == (None if name == "batch" else 5)


class TestIngest:
    @pytest.mark.xfail(
        strict=True,
        raises=AssertionError,
        reason=ISSUE + "messages stored twice after the duplicate window are not reported",
    )
    async def test_an_outage_longer_than_the_duplicate_window_is_never_reported_as_once(
        self, own_server: NatsServer, connect: Connect, within: Within
    ) -> None:
        direct = (await connect(own_server.url)).jetstream()
        await direct.add_stream(
            name="S", subjects=["s.>"], allow_batched=True, allow_direct=True, duplicate_window=0.2, storage="memory"
        )
        async with Link(own_server.port) as link:
            js = (await connect(link.url)).jetstream()

            async def source() -> Any:
                for n in range(40):
                    if n == 15:
                        link.replies = False
                    yield "s.a", b"%d" % n

            running = asyncio.ensure_future(jsx.ingest(js, source(), flow=10, timeout=30, ack_timeout=30))
            async with asyncio.timeout(30):
                while (await direct.stream_info("S")).state.messages < 20:
                    await asyncio.sleep(0.02)
            link.accepting = False
            link.cut()
            await asyncio.sleep(1.5)  # the server forgets the ids, possibly late
            link.accepting = link.replies = True
            outcome = await within(60, running)
        stored = [int(data) for data in await payloads(direct, "S")]
        if isinstance(outcome, jsx.IngestReport) and not getattr(outcome, "in_doubt", None):
            assert stored == list(range(40))

    @pytest.mark.xfail(
        strict=True, raises=AssertionError, reason=ISSUE + "an older server during an upgrade ends ingest"
    )
    async def test_an_older_server_in_between_does_not_end_ingest(
        self, own_server: NatsServer, connect: Connect, within: Within
    ) -> None:
        direct = (await connect(own_server.url)).jetstream()
        await direct.add_stream(name="S", subjects=["s.>"], allow_batched=True, allow_direct=True)
        async with Link(own_server.port) as link:
            js = (await connect(link.url)).jetstream()

            async def source() -> Any:
                for n in range(30):
                    if n == 15:
                        link.greeting = level(3)
                        link.cut()
                        await asyncio.sleep(0.1)
                    yield "s.a", b"%d" % n

            outcome = await within(6, jsx.ingest(js, source(), flow=10, timeout=3, ack_timeout=1))
        assert not isinstance(outcome, Exception)
        assert [int(data) for data in await payloads(direct, "S")] == list(range(30))


class TestMixedClusters:
    @pytest.mark.xfail(strict=True, raises=AssertionError, reason=ISSUE + "fast ingest trusts the greeting")
    async def test_the_streams_own_server_decides_whether_there_is_fast_ingest(
        self, own_server: NatsServer, connect: Connect, within: Within
    ) -> None:
        direct = (await connect(own_server.url)).jetstream()
        await direct.add_stream(name="S", subjects=["s.>"], allow_batched=True)
        async with Link(own_server.port, greeting=level(3)) as link:
            js = (await connect(link.url)).jetstream()
            publisher = jsx.FastPublisher(js)
            outcome = await within(3, publisher.add("s.a", b"1"))
            await publisher.discard()
        assert isinstance(outcome, jsx.FastPubAck)

    @pytest.mark.xfail(strict=True, raises=AssertionError, reason=ISSUE + "fast ingest trusts the greeting")
    async def test_nothing_is_sent_to_an_older_server_of_the_stream(self, connect: Connect, within: Within) -> None:
        async with ReferenceServer(dialect="2.12") as server:
            direct = (await connect(server.url)).jetstream()
            await direct.add_stream(name="S", subjects=["s.>"])
            async with Link(server.port, greeting=level(5)) as link:
                js = (await connect(link.url)).jetstream()
                publisher = jsx.FastPublisher(js)
                outcome = await within(3, publisher.add("s.a", b"1"))
                await publisher.discard()
            assert isinstance(outcome, errors.UnsupportedFeatureError)
            assert (await direct.stream_info("S")).state.messages == 0


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason=ISSUE + "a batch over two streams is only reported as incomplete"
)
async def test_a_batch_over_two_streams_names_them(
    js: JetStreamContext, make_stream: MakeStream, within: Within
) -> None:
    first, second = await make_stream(), await make_stream()
    outcome = await within(6, jsx.publish_atomic(js, [(f"{first}.a", b"1"), (f"{second}.a", b"2")]))
    assert isinstance(outcome, nats.errors.Error | ValueError)
    named = str(outcome).replace(f"{first}.a", "").replace(f"{second}.a", "")
    assert first in named
    assert second in named
