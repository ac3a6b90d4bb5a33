"""A message that is reported as stored is stored once, and an answer shows the moment that it names."""

import asyncio
import contextlib
import itertools
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


async def refused_batch(js: JetStreamContext, messages: list[BatchMessage], batch_id: str | None) -> jsx.AtomicBatch:
    """Return a batch whose commit was refused because the stream has some of its message ids."""
    batch = jsx.AtomicBatch(js, batch_id=batch_id)
    await batch.add_many(messages)
    with pytest.raises(errors.AtomicPublishDuplicateMessageIDError) as caught:
        await batch.commit_eob()
    assert (caught.value.outcome, batch.state) == (
        ("not_stored", "failed") if batch_id is None else ("unknown", "unknown")
    )
    return batch


async def lost_batch(js: JetStreamContext, messages: list[BatchMessage], batch_id: str) -> jsx.AtomicBatch:
    """Return a batch whose commit was never sent, although the library cannot know that."""
    batch = jsx.AtomicBatch(js, batch_id=batch_id)
    await batch.add_many(messages)
    machine = batch._session.machine
    machine.commit(None)
    machine.lost("silence")
    batch._session._settle()
    assert batch.state == "unknown"
    return batch


class TestBatchesWithOneId:
    """Every report about a batch with an id of the caller is about this batch."""

    def batch(self, stream: str, text: str, *, ids: str = "") -> list[BatchMessage]:
        """Return one message for each letter of `text`; the letters in `ids` have a message id."""
        return [
            BatchMessage(
                f"{stream}.a", letter.encode(), headers={"By": letter}, msg_id=letter if letter in ids else None
            )
            for letter in text
        ]

    async def test_a_repeated_batch_is_reported_as_stored(self, js: JetStreamContext, make_stream: MakeStream) -> None:
        for direct, ids in itertools.product((True, False), ("xyz", "x", "z")):
            stream = await make_stream(allow_direct=direct)
            messages = self.batch(stream, "xyz", ids=ids)
            ack = await jsx.publish_atomic(js, messages, batch_id="job")
            assert await jsx.publish_atomic(js, messages, batch_id="job") == ack, (direct, ids)
            await jsx.publish_atomic(js, self.batch(stream, "uvw"), batch_id="job")  # the newest on its subject
            await js.publish(f"{stream}.a", b"newer")
            assert await jsx.publish_atomic(js, messages, batch_id="job") == ack, (direct, ids)
            batch = await refused_batch(js, messages, "job")
            assert await batch.resolve() == "stored", (direct, ids)
            assert (batch.ack, batch.state) == (ack, "committed")
            assert (await js.stream_info(stream)).state.messages == 7

    async def test_a_message_with_an_id_may_be_sent_again_with_other_headers_but_not_with_another_payload(
        self, js: JetStreamContext, make_stream: MakeStream
    ) -> None:
        stream = await make_stream()

        async def publish(payload: bytes, trace: str) -> jsx.BatchAck:
            message = BatchMessage(f"{stream}.a", payload, headers={"traceparent": trace}, msg_id="1")
            return await jsx.publish_atomic(js, [message], batch_id="job")

        ack = await publish(b"3 apples", "one")
        assert await publish(b"3 apples", "two") == ack
        with pytest.raises(errors.AtomicPublishDuplicateMessageIDError, match="not this batch") as caught:
            await publish(b"9 pears", "one")
        assert caught.value.outcome == "not_stored"

    async def test_another_batch_with_the_id_is_not_this_one(
        self, js: JetStreamContext, make_stream: MakeStream
    ) -> None:
        for other in ("xyw", "xy", "xyzw", "zyx", "xzy", "x"):
            stream = await make_stream()
            await jsx.publish_atomic(js, self.batch(stream, other, ids="x"), batch_id="job")
            messages = self.batch(stream, "xyz", ids="x")
            with pytest.raises(errors.AtomicPublishDuplicateMessageIDError, match="not this batch") as caught:
                await jsx.publish_atomic(js, messages, batch_id="job")
            assert caught.value.outcome == "not_stored", other
            batch = await refused_batch(js, messages, "job")
            for _ in range(2):
                with pytest.raises(errors.AtomicPublishDuplicateMessageIDError, match="not this batch"):
                    await batch.resolve()
            assert batch.state == "failed", other
            assert (await js.stream_info(stream)).state.messages == len(other)

    async def test_two_publishers_whose_messages_are_mixed_are_not_reported_as_stored(
        self, js: JetStreamContext, make_stream: MakeStream
    ) -> None:
        stream = await make_stream()
        one = await lost_batch(js, self.batch(stream, "xyz"), "job")
        # The server takes the commit of another publisher for that of the batch it has.
        header = {"Nats-Batch-Id": "job", "Nats-Batch-Sequence": "4", "Nats-Batch-Commit": "1"}
        await js._nc.request(f"{stream}.a", b"w", headers=header, timeout=30)
        assert (await js.stream_info(stream)).state.messages == 4
        with pytest.raises(errors.BatchOutcomeUnknownError, match="another publisher uses the id"):
            await one.resolve()

    async def test_removed_messages_leave_the_outcome_unknown(
        self, js: JetStreamContext, make_stream: MakeStream
    ) -> None:
        for overwritten in ("first", "last"):
            stream = await make_stream(max_msgs_per_subject=1)
            messages = [BatchMessage(f"{stream}.{name}", b"", msg_id=name) for name in ("first", "last")]
            await jsx.publish_atomic(js, messages, batch_id="job")
            await js.publish(f"{stream}.{overwritten}", b"newer")
            with pytest.raises(errors.BatchOutcomeUnknownError, match="removed") as caught:
                await jsx.publish_atomic(js, messages, batch_id="job")
            assert caught.value.outcome == "unknown"
            assert isinstance(caught.value.__cause__, errors.AtomicPublishDuplicateMessageIDError)

    async def test_a_discarded_batch_is_not_stored_by_the_commit_of_a_later_one(
        self, js: JetStreamContext, make_stream: MakeStream
    ) -> None:
        for how in ("publish_atomic", "add", "add_many", "commit"):
            stream = await make_stream(max_msg_size=1000)
            subject, large = f"{stream}.a", bytes(2000)
            earlier = jsx.AtomicBatch(js, batch_id="job")
            await earlier.add(subject, b"earlier")
            await earlier.discard()

            async def publish(how: str = how, subject: str = subject, large: bytes = large) -> None:
                batch = jsx.AtomicBatch(js, batch_id="job", ack_first=False)
                match how:
                    case "publish_atomic":
                        await jsx.publish_atomic(js, [(subject, large), (subject, b"2")], batch_id="job")
                    case "add":
                        await batch.add(subject, large)
                        await batch.add(subject, b"2")
                        await batch.commit_eob()
                    case "add_many":
                        await batch.add_many([(subject, large), (subject, b"2")])
                        await batch.commit_eob()
                    case "commit":
                        await batch.add(subject, large)
                        await batch.commit(subject, b"2")

            # The server refuses message 1 and keeps the earlier batch, of which message 2 could be the next one.
            with pytest.raises(errors.MessageTooLargeError) as caught:
                await publish()
            assert caught.value.outcome == "not_stored"
            assert (await js.stream_info(stream)).state.messages == 0
            assert await earlier.resolve() == "not_stored"
            batch = jsx.AtomicBatch(js, batch_id="job", ack_first=False)
            with pytest.raises(errors.AtomicPublishIncompleteError):  # its first message ends the earlier batch
                await self.two(batch, subject)
            await self.two(jsx.AtomicBatch(js, batch_id="job", ack_first=False), subject)
            assert await payloads(js, stream) == [b"1", b"2"], how

    @staticmethod
    async def two(batch: jsx.AtomicBatch, subject: str) -> None:
        await batch.add(subject, b"1")
        await batch.add(subject, b"2")
        await batch.commit_eob()

    async def test_no_other_batch_has_a_generated_id(self, js: JetStreamContext, make_stream: MakeStream) -> None:
        stream = await make_stream()
        messages = self.batch(stream, "xyz", ids="x")
        await jsx.publish_atomic(js, messages)
        with pytest.raises(errors.AtomicPublishDuplicateMessageIDError, match="messages with its ids") as caught:
            await jsx.publish_atomic(js, messages)
        assert caught.value.outcome == "not_stored"
        batch = await refused_batch(js, messages, None)
        with pytest.raises(errors.AtomicPublishDuplicateMessageIDError):
            await batch.resolve()


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

            outcome = await within(90, jsx.ingest(js, source(), flow=10, timeout=60, ack_timeout=2))
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


async def until_answered(call: Callable[[], Awaitable[object]]) -> None:
    """Repeat a call until it is not the server's silence that it raises."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(errors.RequestTimeoutError):
                await call()
                return


class TestTwoStreams:
    """A batch over two streams is refused before anything is sent, if the servers can tell."""

    async def test_nothing_is_stored(self, nc: Client, js: JetStreamContext, make_stream: MakeStream) -> None:
        first, second = await make_stream(), await make_stream()
        seen = await nc.subscribe(f"{first}.>")
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
                before = seen.pending_msgs
                with pytest.raises(errors.BadSubjectError, match=f"'{second}'.*'{first}'") as caught:
                    await call()
                assert not isinstance(caught.value, errors.ServerError), (name, count)
                await nc.flush()
                assert name == "async source" or seen.pending_msgs == before, (name, count)
        for stream in (first, second):
            assert (await js.stream_info(stream)).state.last_seq == 0

    async def test_a_fast_batch_stays_open(self, js: JetStreamContext, make_stream: MakeStream) -> None:
        first, second = await make_stream(), await make_stream()
        messages = [(f"{first}.b", b"2"), (f"{second}.a", b"3")]

        async def source() -> Any:
            for message in messages:
                yield message

        calls: dict[str, Callable[[jsx.FastPublisher], Awaitable[object]]] = {
            "add": lambda publisher: publisher.add(f"{second}.a", b"3"),
            "add with options": lambda publisher: publisher.add(f"{second}.a", b"3", msg_id="x"),
            "add_many": lambda publisher: publisher.add_many(messages),
            "async source": lambda publisher: publisher.add_many(source()),
            "commit": lambda publisher: publisher.commit(f"{second}.a", b"3"),
        }
        sent = 0
        for gap, (name, call) in itertools.product(jsx.GapMode, calls.items()):
            async with jsx.FastPublisher(js, gap=gap) as publisher:
                await publisher.add(f"{first}.a", b"1")
                for _ in range(2):
                    with pytest.raises(errors.BadSubjectError, match=f"'{second}'.*'{first}'.*must be of one stream"):
                        await call(publisher)
                assert publisher.end_reason is None, (name, gap)
                sent += publisher.batch_seq
            assert (await js.stream_info(first)).state.messages == sent, (name, gap)
        assert (await js.stream_info(second)).state.messages == 0

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

    async def test_a_subject_that_the_stream_has_got_since_is_accepted(
        self, js: JetStreamContext, make_stream: MakeStream
    ) -> None:
        stream = await make_stream()
        await jsx.publish_atomic(js, [(f"{stream}.a", b"1")])  # now the stream's subjects are cached
        await js.update_stream(name=stream, subjects=[f"{stream}.>", f"{stream}more.*"], allow_atomic=True)
        async with jsx.AtomicBatch(js) as batch:
            await batch.add(f"{stream}.a", b"2")
            await batch.add(f"{stream}more.a", b"3")
            await batch.add(f"{stream}more.b", b"4")
        assert batch.ack.batch_size == 3
        await js.update_stream(name=stream, subjects=[f"{stream}.>", f"{stream}most.*"], allow_atomic=True)
        async with jsx.AtomicBatch(js) as batch:
            await batch.add(f"{stream}.a", b"2")
            await batch.add_many([(f"{stream}most.a", b"3"), (f"{stream}.b", b"4"), (f"{stream}most.b", b"5")])
        assert batch.ack.batch_size == 4


async def test_a_stall_does_not_end_the_check_for_two_streams(own_server: NatsServer, connect: Connect) -> None:
    js = (await connect(own_server.url)).jetstream(timeout=30)
    for name in ("one", "two"):
        await js.add_stream(name=name, subjects=[f"{name}.>"], allow_atomic=True)
    async with jsx.AtomicBatch(js) as batch:
        await batch.add("one.a", b"1")
        await asyncio.to_thread(own_server.pause)
        try:
            with pytest.raises(errors.RequestTimeoutError, match=r"which stream stores 'two\.a' is unknown"):
                await batch.add("two.a", b"2")
        finally:
            await asyncio.to_thread(own_server.resume)
        with pytest.raises(errors.BadSubjectError, match="must be of one stream"):
            await until_answered(lambda: batch.add("two.a", b"2"))
    assert batch.ack.batch_size == 1
