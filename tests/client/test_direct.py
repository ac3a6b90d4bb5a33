"""Direct gets from a real server: answers, refusals, cancellation and lost connections."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import nats
import nats.errors
import nats.js.errors
import pytest
from client_cells import each
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.testing import NatsServer

MakeStream = Callable[..., Awaitable[str]]


async def fill(js: JetStreamContext, stream: str, count: int, size: int = 1, names: str = "abc") -> None:
    """Store `count` messages; the payload of each begins with its sequence."""
    async with jsx.FastPublisher(js) as publisher:
        await publisher.add_many(
            (f"{stream}.{names[i % len(names)]}", str(i + 1).encode().ljust(size)) for i in range(count)
        )


@pytest.fixture
async def stream(js: JetStreamContext, make_stream: MakeStream) -> str:
    """A stream with messages 1 to 12 on the subjects a, b, c in turn."""
    name = await make_stream()
    await fill(js, name, 12)
    return name


@pytest.fixture
def direct(js: JetStreamContext, stream: str) -> jsx.DirectGet:
    return jsx.DirectGet(js, stream, timeout=20)


async def seqs(batch: jsx.MessageBatch) -> list[int]:
    return [message.seq for message in await batch.to_list()]


async def test_min_seq_times_out_if_the_write_never_happens(js: JetStreamContext, stream: str) -> None:
    timeout, said = 0.5, ""
    while "did not reach sequence 13" not in said:  # the first answer may be late on a busy machine
        timeout *= 2
        with pytest.raises(errors.RequestTimeoutError) as late:
            await jsx.DirectGet(js, stream, timeout=timeout).get_last(f"{stream}.a", min_seq=13)
        said = str(late.value)
        assert timeout < 30, said


class TestBatch:
    async def test_a_batch_sends_one_request(self, direct: jsx.DirectGet, stream: str) -> None:
        batch = direct.batch(2, seq=4)
        assert (batch.num_pending, batch.last_seq, batch.up_to_seq) == (None, None, None)
        messages = await batch.to_list()
        assert [(m.seq, m.subject, m.data) for m in messages] == [(4, f"{stream}.a", b"4"), (5, f"{stream}.b", b"5")]
        assert [(m.num_pending, m.last_seq) for m in messages] == [(8, 0), (7, 4)]
        assert (batch.num_pending, batch.last_seq, batch.up_to_seq) == (7, 5, None)

    async def test_a_batch_is_an_async_context_manager(self, direct: jsx.DirectGet) -> None:
        async with direct.batch(3) as messages:
            assert [message.seq async for message in messages] == [1, 2, 3]
            assert [message.seq async for message in messages] == []
            assert await messages.to_list() == []

    async def test_to_list_returns_the_remaining_messages(self, direct: jsx.DirectGet) -> None:
        batch = direct.batch(5)
        assert (await anext(batch)).seq == 1
        assert await seqs(batch) == [2, 3, 4, 5]

    async def test_two_reads_run_at_the_same_time(self, direct: jsx.DirectGet) -> None:
        results = await asyncio.gather(*(seqs(direct.scan(batch=3)) for _ in range(10)))
        assert results == [list(range(1, 13))] * 10


class TestContent:
    async def test_empty_payloads_and_headers_are_ordinary(self, js: JetStreamContext, make_stream: MakeStream) -> None:
        name = await make_stream()
        headers = {"K": "v", "Empty": "", "Unicode": "ä→ß", "Colon": "a: b", "Nats-Msg-Id": "id1"}
        await js.publish(f"{name}.a", b"", headers=headers)
        await js.publish(f"{name}.b", b"")
        await js.publish(f"{name}.c", b"\r\n\x00MSG a 1 5\r\n", headers={"K": "w"})
        direct = jsx.DirectGet(js, name)
        for messages in (
            await direct.batch(9).to_list(), await direct.scan().to_list(), [await direct.get(seq) for seq in (1, 2, 3)],
            await direct.multi_last([f"{name}.>"]).to_list(),
        ):  # fmt: skip
            assert [m.headers for m in messages] == [headers, {}, {"K": "w"}]
            assert [m.data for m in messages] == [b"", b"", b"\r\n\x00MSG a 1 5\r\n"]

    async def test_a_mirror_answers_with_its_own_name(
        self, js: JetStreamContext, stream: str, stream_name: Callable[[], str]
    ) -> None:
        mirror = stream_name()
        await js.add_stream(name=mirror, mirror=nats.js.api.StreamSource(name=stream), allow_direct=True)
        async with asyncio.timeout(60):
            while (await js.stream_info(mirror)).state.messages < 12:
                await asyncio.sleep(0.01)
        assert {m.stream for m in await jsx.DirectGet(js, mirror).scan().to_list()} == {mirror}


class TestScan:
    async def test_a_scan_reads_many_small_messages(self, js: JetStreamContext, make_stream: MakeStream) -> None:
        name = await make_stream()
        await fill(js, name, 20_000)
        messages = await jsx.DirectGet(js, name).scan().to_list()
        assert [int(m.data) for m in messages] == [m.seq for m in messages] == list(range(1, 20_001))

    @each("storage", ["memory", "file"])
    async def test_multi_last_with_min_seq_contains_a_key_that_is_overwritten(
        self, js: JetStreamContext, make_stream: MakeStream, storage: str
    ) -> None:
        name = await make_stream(max_msgs_per_subject=1, storage=storage)
        direct, stop = jsx.DirectGet(js, name, timeout=20), asyncio.Event()

        async def overwrite() -> None:
            while not stop.is_set():
                await js.publish(f"{name}.k")

        async with asyncio.TaskGroup() as group:
            group.create_task(overwrite())
            for _ in range(20):
                ack = await js.publish(f"{name}.k")
                (message,) = await direct.multi_last([f"{name}.k"], min_seq=ack.seq).to_list()
                assert message.seq >= ack.seq
            stop.set()

    async def test_multi_last_by_time_with_min_seq_is_of_that_time(self, js: JetStreamContext, stream: str) -> None:
        direct = jsx.DirectGet(js, stream, timeout=20)
        await asyncio.sleep(0.01)
        ack = await js.publish(f"{stream}.a")
        when = (await direct.get(ack.seq)).time
        batch = direct.multi_last([f"{stream}.>"], up_to_time=when, min_seq=ack.seq)
        assert (await seqs(batch), batch.up_to_seq) == ([10, 11, 12], 12)
        before = direct.multi_last([f"{stream}.>"], up_to_time=datetime(2020, 1, 1, tzinfo=UTC), min_seq=1)
        assert (await seqs(before), before.up_to_seq) == ([], 0)


class TestRefusals:
    @each("name", ["a b", "", "a.b", "x\r\n", "*", ">"])
    def test_invalid_stream_names_are_refused(self, js: JetStreamContext, name: str) -> None:
        with pytest.raises(errors.BadSubjectError):
            jsx.DirectGet(js, name)

    @each(
        "timeout, error",
        [(0, ValueError), (-1, ValueError), (float("nan"), ValueError), ("5", TypeError), (True, TypeError)],
    )
    def test_invalid_timeouts_are_refused(self, js: JetStreamContext, timeout: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match="timeout"):
            jsx.DirectGet(js, "S", timeout=timeout)

    @each(
        "call, error",
        [
            (lambda d: d.batch(0), ValueError),
            (lambda d: d.batch(-1), ValueError),
            (lambda d: d.batch(True), ValueError),
            (lambda d: d.batch(1.5), ValueError),
            (lambda d: d.batch(2**63), ValueError),
            (lambda d: d.batch(1, max_bytes=2**63), ValueError),
            (lambda d: d.batch(1, seq=0), ValueError),
            (lambda d: d.batch(1, seq=2**64), ValueError),
            (lambda d: d.batch(1, max_bytes=0), ValueError),
            (lambda d: d.batch(1, subject="a b"), errors.BadSubjectError),
            (lambda d: d.batch(1, subject="\ud800"), errors.BadSubjectError),
            (lambda d: d.batch(1, start_time=datetime(2026, 1, 1)), ValueError),  # noqa: DTZ001 - naive on purpose
            (lambda d: d.batch(1, start_time=0), TypeError),
            (lambda d: d.batch(1, seq=1, start_time=datetime.now(UTC)), ValueError),
            (lambda d: d.scan(prefetch=0), ValueError),
            (lambda d: d.scan(prefetch=5), ValueError),
            (lambda d: d.scan(up_to_seq=0), ValueError),
            (lambda d: d.scan(subject="a..b"), errors.BadSubjectError),
            (lambda d: d.scan(min_seq=0), ValueError),
            (lambda d: d.multi_last([]), ValueError),
            (lambda d: d.multi_last("orders.>"), TypeError),
            (lambda d: d.multi_last(iter(())), ValueError),
            (lambda d: d.multi_last(["a", "a b"]), errors.BadSubjectError),
            (lambda d: d.multi_last(["a"], batch=0), ValueError),
            (lambda d: d.multi_last(["a"], up_to_seq=1, up_to_time=datetime.now(UTC)), ValueError),
            (lambda d: d.multi_last(["a"], up_to_time=datetime(2026, 1, 1)), ValueError),  # noqa: DTZ001
        ],
    )
    def test_invalid_arguments_are_refused_at_the_call(
        self, js: JetStreamContext, call: Callable[[jsx.DirectGet], object], error: type[Exception]
    ) -> None:
        with pytest.raises(error):
            call(jsx.DirectGet(js, "S"))

    async def test_invalid_arguments_of_single_gets_send_nothing(self, js: JetStreamContext, leak_check: Any) -> None:
        direct = jsx.DirectGet(js, "S")
        sent = js._nc.stats["out_msgs"]
        for bad in (
            direct.get(0), direct.get(-1), direct.get(True), direct.get(1, min_seq=0), direct.get_last("a b"),
            direct.get_last(""), direct.get_last("a", min_seq="x"), direct.get_next("a", seq=0), direct.get_next("a..b"),  # type: ignore[arg-type]
            direct.get_at(datetime(2026, 1, 1)), direct.get_at(datetime.now(UTC), subject="a b"),  # noqa: DTZ001
        ):  # fmt: skip
            with pytest.raises(ValueError, match=r".+"):
                await bad
        assert js._nc.stats["out_msgs"] == sent
        await leak_check.assert_clean()

    async def test_a_request_over_max_payload_keeps_the_connection(
        self, direct: jsx.DirectGet, nc: Client, leak_check: Any
    ) -> None:
        with pytest.raises(errors.MaxPayloadError):
            await direct.multi_last(["x" * 1000] * (nc.max_payload // 1000)).to_list()
        assert (await direct.get(1)).seq == 1
        await leak_check.assert_clean()

    async def test_a_failed_read_cannot_be_continued(self, js: JetStreamContext) -> None:
        scan = jsx.DirectGet(js, "NO_SUCH_STREAM").scan()
        with pytest.raises(NotFoundError):
            await scan.to_list()
        with pytest.raises(errors.JetStreamExtError, match="cannot be continued"):
            await scan.to_list()
        await scan.aclose()


class TestLeaving:
    @each("options", [{}, {"confirm": True}, {"min_seq": 12}])
    async def test_break_and_aclose_leave_nothing_behind(
        self, direct: jsx.DirectGet, leak_check: Any, options: dict[str, Any]
    ) -> None:
        batch = direct.scan(batch=2, prefetch=4, **options)
        async for message in batch:
            assert message.seq == 1
            break
        await batch.aclose()
        await leak_check.assert_clean()
        assert await batch.to_list() == []
        await batch.aclose()

    async def test_an_exception_in_the_block_leaves_nothing_behind(
        self, direct: jsx.DirectGet, leak_check: Any
    ) -> None:
        async def fail() -> None:
            async with direct.scan(batch=2) as messages:
                async for _ in messages:
                    raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        await leak_check.assert_clean()

    async def test_a_second_task_is_refused(self, direct: jsx.DirectGet, leak_check: Any) -> None:
        batch = direct.scan(batch=2)
        first = asyncio.create_task(batch.to_list())
        await asyncio.sleep(0)
        for second in (batch.to_list(), anext(batch), batch.aclose()):
            with pytest.raises(RuntimeError, match="another task"):
                await second
        assert await first == await direct.scan(batch=2).to_list()
        await leak_check.assert_clean()

    @each(
        "read",
        [
            lambda d: d.get(3), lambda d: d.get_last(">"), lambda d: d.get(99, min_seq=12),
            lambda d: d.scan(batch=2, prefetch=3).to_list(), lambda d: d.scan(confirm=True, batch=5).to_list(),
            lambda d: d.multi_last([">"], max_bytes=1).to_list(),
        ],
    )  # fmt: skip
    async def test_cancellation_at_any_point_leaves_nothing_behind(
        self, direct: jsx.DirectGet, leak_check: Any, read: Callable[[jsx.DirectGet], Awaitable[object]]
    ) -> None:
        for ticks in range(40):
            task = asyncio.ensure_future(read(direct))
            for _ in range(ticks):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await leak_check.assert_clean()
            # The read may have ended just before the cancellation; for sequence 99 with an error.
            assert task.cancelled() or isinstance(task.exception(), errors.MessageNotFoundError | None)
        assert await seqs(direct.batch(2)) == [1, 2]


class TestLostConnections:
    async def test_a_paused_server_ends_every_read_with_a_timeout(
        self, own_js: JetStreamContext, own_server: NatsServer, own_stream: MakeStream
    ) -> None:
        name = await own_stream()
        await fill(own_js, name, 3)
        direct = jsx.DirectGet(own_js, name, timeout=0.1)
        own_server.pause()
        try:
            for read in (direct.get(1), direct.scan().to_list(), direct.multi_last([">"]).to_list()):
                async with asyncio.timeout(20):
                    with pytest.raises(errors.RequestTimeoutError, match=name) as caught:
                        await read
                assert isinstance(caught.value, nats.errors.TimeoutError)
        finally:
            own_server.resume()
        assert (await jsx.DirectGet(own_js, name, timeout=20).get(1)).seq == 1

    async def test_a_slow_reader_holds_two_replies_at_most(
        self, own_nc: Client, own_js: JetStreamContext, own_stream: MakeStream
    ) -> None:
        name = await own_stream()
        await fill(own_js, name, 1000, size=100)
        before, read = own_nc.stats["in_msgs"], 0
        async with jsx.DirectGet(own_js, name).scan(batch=100, prefetch=2) as messages:
            async for _ in messages:
                read += 1
                if read in (1, 350, 600):
                    await asyncio.sleep(0.3)
                    # Behind the block that is being read, a part of one reply.
                    assert own_nc.stats["in_msgs"] - before - read <= 100 + 2 * 101 + read // 100
        assert read == 1000

    async def test_a_scan_continues_after_a_restart(
        self, own_nc: Client, own_js: JetStreamContext, own_server: NatsServer, own_stream: MakeStream
    ) -> None:
        name = await own_stream()
        await fill(own_js, name, 2000, size=100)
        read: list[int] = []
        async with jsx.DirectGet(own_js, name, timeout=60).scan(batch=50, prefetch=2) as messages:
            async for message in messages:
                read.append(message.seq)
                if len(read) in (40, 1000):
                    await asyncio.to_thread(own_server.kill)
                    await asyncio.to_thread(own_server.restart)
        assert read == list(range(1, 2001))

    async def test_a_reply_that_breaks_off_between_two_reads_is_continued(
        self, own_nc: Client, own_js: JetStreamContext, own_server: NatsServer, own_stream: MakeStream
    ) -> None:
        name = await own_stream()
        await fill(own_js, name, 2000, size=4000)
        read: list[int] = []
        async with (
            asyncio.timeout(60),
            jsx.DirectGet(own_js, name, timeout=120).scan(batch=2000, max_bytes=1 << 25) as messages,
        ):
            async for message in messages:
                read.append(message.seq)
                if len(read) == 1:
                    own_server.kill()  # while most of the reply is on its way
                    await asyncio.to_thread(own_server.restart)
        assert read == list(range(1, 2001))

    async def test_a_lost_connection_is_detected_before_the_timeout(
        self, own_nc: Client, own_js: JetStreamContext, own_server: NatsServer, own_stream: MakeStream
    ) -> None:
        name = await own_stream()
        await fill(own_js, name, 3)
        direct = jsx.DirectGet(own_js, name, timeout=60)
        for read in (direct.get(2), direct.batch(1, seq=2).to_list()):
            own_server.pause()
            reading = asyncio.ensure_future(read)
            await asyncio.sleep(0)
            own_server.kill()
            await asyncio.to_thread(own_server.restart)
            async with asyncio.timeout(30):
                found = await reading
            assert (found if isinstance(found, jsx.StoredMsg) else found[0]).seq == 2

    async def test_a_closed_connection_ends_the_read(
        self, own_nc: Client, own_js: JetStreamContext, own_stream: MakeStream
    ) -> None:
        name = await own_stream()
        await fill(own_js, name, 100)
        scan = jsx.DirectGet(own_js, name).scan(batch=10)
        assert (await anext(scan)).seq == 1
        await own_nc.close()
        with pytest.raises(nats.errors.ConnectionClosedError):
            await scan.to_list()
        with pytest.raises(nats.errors.ConnectionClosedError):
            await jsx.DirectGet(own_js, name).get(1)


async def messages_of(batch: jsx.MessageBatch) -> AsyncIterator[jsx.StoredMsg]:
    async for message in batch:
        yield message


async def test_a_batch_works_in_a_comprehension_and_a_generator(direct: jsx.DirectGet) -> None:
    assert [m.seq async for m in messages_of(direct.batch(2))] == [1, 2]
    assert {m.seq async for m in direct.batch(2)} == {1, 2}
