"""A message that is reported as stored is stored once, and an answer shows the moment that it names."""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from link import Link
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import BatchMessage, errors
from jetstream_ext.testing import NatsServer, ReferenceServer, StaleReplica

# nats-py leaves the sockets of lost connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored .*<function (StreamWriter|_SelectorTransport)")
Connect = Callable[..., Awaitable[Client]]
MakeStream = Callable[..., Awaitable[str]]
Within = Callable[[float, Awaitable[Any]], Awaitable[Any]]


def level(api_level: int) -> Callable[[bytes], bytes]:
    """Return a function that replaces the API level in a server's greeting."""
    return lambda line: re.sub(rb'"api_lvl":[0-9]+', b'"api_lvl":%d' % api_level, line)


async def payloads(js: JetStreamContext, stream: str) -> list[bytes]:
    return [message.data for message in await jsx.DirectGet(js, stream).scan(confirm=True).to_list()]


class TestMessageIds:
    async def test_a_batch_whose_ids_the_stream_has_is_refused(
        self, js: JetStreamContext, make_stream: MakeStream
    ) -> None:
        stream = await make_stream()
        messages = [BatchMessage(f"{stream}.a", b"%d" % n, msg_id="x" if n == 1 else None) for n in range(3)]
        await jsx.publish_atomic(js, messages)
        with pytest.raises(errors.AtomicPublishDuplicateMessageIDError, match="duplicate message id") as caught:
            await jsx.publish_atomic(js, messages)
        assert caught.value.outcome == "not_stored"
        batch = jsx.AtomicBatch(js)
        await batch.add_many(messages)
        with pytest.raises(errors.AtomicPublishDuplicateMessageIDError):
            await batch.commit_eob()
        assert batch.state == "failed"
        assert await batch.resolve() == "not_stored"
        assert len(await payloads(js, stream)) == 3


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

    async def test_reads_wait_until_a_lagging_replica_has_caught_up(self, connect: Connect) -> None:
        async with ReferenceServer() as server:
            js = (await connect(server.url)).jetstream(timeout=30)
            for storage in ("file", "memory"):
                await js.add_stream(name=storage, subjects=[f"{storage}.>"], storage=storage, allow_direct=True)
                for subject in "abcab":
                    await js.publish(f"{storage}.{subject}")
                direct = jsx.DirectGet(js, storage)
                all_of_them = [f"{storage}.>"]
                reads: dict[str, Callable[[], jsx.MessageBatch]] = {
                    "batch": lambda direct=direct: direct.batch(3, seq=3, min_seq=5),
                    "multi_last": lambda direct=direct, all_=all_of_them: direct.multi_last(all_, min_seq=5),
                    "up_to_seq": lambda direct=direct, all_=all_of_them: direct.multi_last(all_, up_to_seq=5),
                    "pages": lambda direct=direct, all_=all_of_them: direct.multi_last(all_, up_to_seq=5, max_bytes=1),
                }
                for name, make in reads.items():
                    server.faults.add(StaleReplica("$JS.API.DIRECT.GET.>", behind=3, times=5))
                    read = make()
                    assert [message.seq for message in await read.to_list()] == [3, 4, 5], (storage, name)
                    assert read.up_to_seq == (None if name == "batch" else 5), (storage, name)


class TestIngest:
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

            outcome = await within(90, jsx.ingest(js, source(), flow=10, patience=60, timeout=2))
        assert not isinstance(outcome, Exception)
        stored = await jsx.DirectGet(direct, "S").scan(confirm=True).to_list()
        assert [int(message.data) for message in stored] == list(range(30))


class TestMixedClusters:
    async def test_the_streams_own_server_decides_whether_there_is_fast_ingest(
        self, own_server: NatsServer, connect: Connect, within: Within
    ) -> None:
        direct = (await connect(own_server.url)).jetstream()
        await direct.add_stream(name="S", subjects=["s.>"], allow_batched=True)
        async with Link(own_server.port, greeting=level(3)) as link:
            js = (await connect(link.url)).jetstream()
            publisher = jsx.FastPublisher(js)
            outcome = await within(60, publisher.add("s.a", b"1"))
            await publisher.discard()
        assert isinstance(outcome, jsx.FastPubAck)

    async def test_nothing_is_sent_to_an_older_server_of_the_stream(self, connect: Connect, within: Within) -> None:
        async with ReferenceServer(dialect="2.12") as server:
            direct = (await connect(server.url)).jetstream()
            await direct.add_stream(name="S", subjects=["s.>"])
            async with Link(server.port, greeting=level(5)) as link:
                js = (await connect(link.url)).jetstream()
                publisher = jsx.FastPublisher(js)
                outcome = await within(60, publisher.add("s.a", b"1"))
                await publisher.discard()
            assert isinstance(outcome, errors.UnsupportedFeatureError)
            assert (await direct.stream_info("S")).state.messages == 0


class TestTwoStreams:
    """A batch is of one stream: an atomic one refuses the message, a fast one ends."""

    async def test_nothing_is_stored(self, js: JetStreamContext, make_stream: MakeStream) -> None:
        first, second = await make_stream(), await make_stream()
        for count in (2, 3, 500):
            messages = [(f"{first}.a", b"%d" % n) for n in range(count - 1)] + [(f"{second}.a", b"2")]

            async def source(messages: list[tuple[str, bytes]] = messages) -> Any:
                for message in messages:
                    yield message

            calls: dict[str, Callable[[], Awaitable[object]]] = {
                "publish_atomic": lambda messages=messages: jsx.publish_atomic(js, messages),
                "publish_atomic_many": lambda messages=messages: jsx.publish_atomic_many(js, [messages]).to_list(),
                "async source": lambda source=source: jsx.publish_atomic(js, source()),
            }
            for name, call in calls.items():
                with pytest.raises(errors.BadSubjectError, match=f"'{first}'.*'{second}.a'") as caught:
                    await call()
                assert not isinstance(caught.value, errors.ServerError), (name, count)
        for stream in (first, second):
            assert (await js.stream_info(stream)).state.last_seq == 0

    async def test_a_fast_batch_ends_with_the_final_ack_or_reports_it(
        self, js: JetStreamContext, make_stream: MakeStream
    ) -> None:
        first, second = await make_stream(), await make_stream()
        calls: dict[str, Callable[[jsx.FastPublisher], Awaitable[object]]] = {
            "add": lambda publisher: publisher.add(f"{second}.a", b"3"),
            "add_many": lambda publisher: publisher.add_many([(f"{first}.b", b"2"), (f"{second}.a", b"3")]),
            "commit": lambda publisher: publisher.commit(f"{second}.a", b"3"),
        }
        stored = 0
        for name, call in calls.items():
            stored += (good := 2 if name == "add_many" else 1)
            async with contextlib.AsyncExitStack() as stack:
                publisher = jsx.FastPublisher(js)
                stack.push_async_callback(publisher.discard)
                await publisher.add(f"{first}.a", b"1")
                # The other stream refuses the message, and its own lacks it: either answer may be first.
                kinds = (errors.FastPublishUnknownBatchError, errors.BatchGapError)
                with contextlib.suppress(*kinds):
                    await call(publisher)
                with pytest.raises(kinds) as caught:
                    await publisher.flush()
                error = caught.value
                assert (error.outcome, error.acked) == ("partial", good), name
                assert error.ack is not None
                assert error.ack.batch_size == good
                assert publisher.end_reason in (jsx.EndReason.ERROR, jsx.EndReason.GAP)
            assert [(await js.stream_info(each)).state.messages for each in (first, second)] == [stored, 0]
        for name, call in calls.items():
            stored += 3 if name == "add_many" else 2 if name == "add" else 1
            publisher = jsx.FastPublisher(js, gap=jsx.GapMode.OK)
            await publisher.add(f"{first}.a", b"1")
            await call(publisher)
            if name != "commit":
                await publisher.add(f"{first}.c", b"4")
                await publisher.commit_eob()
            bad = 3 if name == "add_many" else 2
            assert publisher.end_reason is jsx.EndReason.COMMITTED
            assert {(each.seq, type(each.error)) for each in publisher.errors} <= {
                (bad, errors.FastPublishUnknownBatchError)
            }
            lost = {seq for gap in publisher.gaps for seq in range(gap.first_lost, gap.seq)}
            assert lost | {each.seq for each in publisher.errors} == {bad}, name
            assert [(await js.stream_info(each)).state.messages for each in (first, second)] == [stored, 0]

    async def test_a_fast_batch_takes_a_subject_that_its_stream_has_got_since(
        self, js: JetStreamContext, make_stream: MakeStream
    ) -> None:
        stream = await make_stream()
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add(f"{stream}.a", b"1")
            config = (await js.stream_info(stream)).config
            await js.update_stream(config.evolve(subjects=[f"{stream}.>", f"{stream}-2.>"]))
            await publisher.add_many((f"{stream}-2.a", b"%d" % n) for n in range(10))
        assert (await js.stream_info(stream)).state.messages == 11

    async def test_the_batch_stays_open(self, js: JetStreamContext, make_stream: MakeStream) -> None:
        first, second = await make_stream(), await make_stream()
        calls: dict[str, Callable[[jsx.AtomicBatch], Awaitable[object]]] = {
            "add": lambda batch: batch.add(f"{second}.a", b"3"),
            "add_many": lambda batch: batch.add_many([(f"{first}.b", b"2"), (f"{second}.a", b"3")]),
            "commit": lambda batch: batch.commit(f"{second}.a", b"3"),
        }
        for name, call in calls.items():
            async with jsx.AtomicBatch(js) as batch:
                await batch.add(f"{first}.a", b"1")
                for _ in range(2):
                    with pytest.raises(errors.BadSubjectError, match="must be of one stream"):
                        await call(batch)
                await batch.add(f"{first}.c", b"4")
            assert batch.ack.batch_size == batch.size == (4 if name == "add_many" else 2), name

    async def test_the_next_batch_takes_a_subject_that_the_stream_has_got_since(
        self, js: JetStreamContext, make_stream: MakeStream
    ) -> None:
        stream = await make_stream()
        await jsx.publish_atomic(js, [(f"{stream}.a", b"1")])  # now the stream's subjects are cached
        await js.update_stream(name=stream, subjects=[f"{stream}.>", f"{stream}more.*"], allow_atomic=True)
        messages = [(f"{stream}.a", b"2"), (f"{stream}more.a", b"3"), (f"{stream}more.b", b"4")]
        with pytest.raises(errors.BadSubjectError, match="begin another batch"):
            await jsx.publish_atomic(js, iter(messages))
        assert (await jsx.publish_atomic(js, messages)).batch_size == 3
        await js.update_stream(name=stream, subjects=[f"{stream}.>", f"{stream}much.*"], allow_atomic=True)
        messages = [(f"{stream}.a", b"2"), (f"{stream}much.a", b"3")]
        assert (await jsx.publish_atomic(js, messages)).batch_size == 2, "a list is tried again"
        await js.update_stream(name=stream, subjects=[f"{stream}.>", f"{stream}most.*"], allow_atomic=True)
        async with jsx.AtomicBatch(js) as batch:
            await batch.add(f"{stream}.a", b"2")
            with pytest.raises(errors.BadSubjectError, match="begin another batch"):
                await batch.add_many([(f"{stream}most.a", b"3"), (f"{stream}.b", b"4")])
        async with jsx.AtomicBatch(js) as batch:
            await batch.add_many([(f"{stream}.b", b"4"), (f"{stream}most.b", b"5")])
        assert batch.ack.batch_size == 2
