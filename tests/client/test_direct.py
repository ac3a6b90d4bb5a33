"""Direct gets from a real server: answers, refusals, cancellation and lost connections."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import nats
import nats.errors
import nats.js.errors
import pytest
from client_cells import each, named, seqs
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

import jetstream_ext as jsx
from jetstream_ext import arrow, errors
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


async def test_min_seq_times_out_if_the_write_never_happens(js: JetStreamContext, stream: str) -> None:
    timeout, said = 0.5, ""
    while "did not reach sequence 13" not in said:  # the first answer may be late on a busy machine
        timeout *= 2
        with pytest.raises(errors.RequestTimeoutError) as late:
            await jsx.DirectGet(js, stream, timeout=timeout).get_last(f"{stream}.a", min_seq=13)
        said = str(late.value)
        assert timeout < 30, said


async def test_a_batch_is_read_in_parts_and_by_several_tasks(direct: jsx.DirectGet) -> None:
    async with direct.batch(5) as batch:
        assert (batch.num_pending, batch.last_seq, batch.up_to_seq) == (None, None, None)
        assert (await anext(batch)).seq == 1
        assert await seqs(batch) == [2, 3, 4, 5]
        assert [message.seq async for message in batch] == []
    results = await asyncio.gather(*(seqs(direct.scan(batch=3)) for _ in range(10)))
    assert results == [list(range(1, 13))] * 10


class TestMinSeq:
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
    def test_invalid_arguments_are_refused_at_the_call(self, js: JetStreamContext) -> None:
        now, naive, d = datetime.now(UTC), datetime(2026, 1, 1), jsx.DirectGet(js, "S")  # noqa: DTZ001 - naive on purpose
        calls: list[tuple[type[Exception], Callable[..., object], list[tuple[tuple[Any, ...], dict[str, Any]]]]] = [
            (
                errors.BadSubjectError,
                jsx.DirectGet,
                [((js, name), {}) for name in ("a b", "", "a.b", "x\r\n", "*", ">")],
            ),
            (ValueError, jsx.DirectGet, [((js, "S"), {"timeout": bad}) for bad in (0, -1, float("nan"))]),
            (TypeError, jsx.DirectGet, [((js, "S"), {"timeout": bad}) for bad in ("5", True)]),
            (ValueError, d.batch, [((count,), {}) for count in (0, -1, True, 1.5, 2**63)]),
            (ValueError, d.batch, [((1,), {"max_bytes": bad}) for bad in (0, 2**63)]),
            (ValueError, d.batch, [((1,), {"seq": bad}) for bad in (0, 2**64)]),
            (ValueError, d.batch, [((1,), {"start_time": naive}), ((1,), {"seq": 1, "start_time": now})]),
            (TypeError, d.batch, [((1,), {"start_time": 0})]),
            (errors.BadSubjectError, d.batch, [((1,), {"subject": bad}) for bad in ("a b", "\ud800")]),
            (
                ValueError,
                d.scan,
                [((), {"prefetch": 0}), ((), {"prefetch": 5}), ((), {"up_to_seq": 0}), ((), {"min_seq": 0})],
            ),
            (errors.BadSubjectError, d.scan, [((), {"subject": "a..b"})]),
            (ValueError, d.multi_last, [(([],), {}), ((iter(()),), {}), ((["a"],), {"batch": 0})]),
            (
                ValueError,
                d.multi_last,
                [((["a"],), {"up_to_seq": 1, "up_to_time": now}), ((["a"],), {"up_to_time": naive})],
            ),
            (TypeError, d.multi_last, [(("orders.>",), {})]),
            (errors.BadSubjectError, d.multi_last, [((["a", "a b"],), {})]),
        ]
        for call in (d.scan, lambda **end: d.batch(9, **end), lambda **end: arrow.record_batches(js, "S", **end)):
            calls.append((ValueError, call, [((), {"up_to_time": naive})]))
            calls.append((TypeError, call, [((), {"up_to_time": bad}) for bad in ("2026-01-01T00:00:00Z", 0, 1.5)]))
        for error, call, arguments in calls:
            for positional, options in arguments:
                with named(call=call, positional=positional, options=options), pytest.raises(error):
                    call(*positional, **options)

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
        with suppress(ZeroDivisionError):
            async with direct.scan(batch=2, **options) as batch:
                assert (await anext(batch)).seq == 1
                raise ZeroDivisionError
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
    async def test_a_scan_continues_after_a_restart(
        self, own_nc: Client, own_js: JetStreamContext, own_server: NatsServer, own_stream: MakeStream
    ) -> None:
        """Also if the server dies while most of one large reply is on its way."""
        name = await own_stream()
        await fill(own_js, name, 2000, size=4000)
        direct = jsx.DirectGet(own_js, name, timeout=60)
        for scan, kills in (
            (direct.scan(batch=50, prefetch=2), (40, 1000)), (direct.scan(batch=2000, max_bytes=1 << 25), (1,)),
        ):  # fmt: skip
            read: list[int] = []
            async with asyncio.timeout(60), scan as messages:
                async for message in messages:
                    read.append(message.seq)
                    if len(read) in kills:
                        own_server.kill()
                        await asyncio.to_thread(own_server.restart)
            assert read == list(range(1, 2001))

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
                    with pytest.raises(errors.RequestTimeoutError, match=f"{name}.*no answer") as caught:
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
