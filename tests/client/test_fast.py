"""Fast ingest against a real server: what is stored, what is refused, and how batches end."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from client_cells import each
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy

import jetstream_ext as jsx
from jetstream_ext import errors

MakeStream = Callable[..., Awaitable[str]]


async def stored(js: JetStreamContext, stream: str) -> list[jsx.StoredMsg]:
    return await jsx.DirectGet(js, stream).scan().to_list()


async def payloads(js: JetStreamContext, stream: str) -> list[bytes]:
    return [message.data for message in await stored(js, stream)]


class TestPublishing:
    async def test_a_clean_exit_commits(self, js: JetStreamContext, stream: str, leak_check: Any) -> None:
        async with jsx.FastPublisher(js, flow=10) as pub:
            assert (pub.batch_seq, pub.ack_seq, pub.flow, pub.end_reason) == (0, 0, 10, None)
            with pytest.raises(errors.BatchError, match="it is still open; its final ack comes with the commit"):
                _ = pub.ack
            ack = await pub.add(f"{stream}.a", b"1")
            assert ack == jsx.FastPubAck(1, pub.ack_seq)
            for i in range(2, 26):
                ack = await pub.add(f"{stream}.a", b"%d" % i)
                assert ack.batch_seq == pub.batch_seq == i
                assert pub.batch_seq - pub.ack_seq <= pub.flow * 2
        assert pub.end_reason is jsx.EndReason.COMMITTED
        assert pub.ack == jsx.BatchAck(stream, 25, pub.batch_id, 25)
        assert (pub.ack_seq, pub.gaps, pub.errors, pub.gap_count, pub.error_count) == (25, [], [], 0, 0)
        assert await payloads(js, stream) == [b"%d" % i for i in range(1, 26)]
        await leak_check.assert_clean()

    async def test_pings_of_an_idle_batch_do_not_end_it(self, js: JetStreamContext, stream: str) -> None:
        for gap in jsx.GapMode:
            async with jsx.FastPublisher(js, gap=gap, timeout=0.4) as pub:
                await pub.add(f"{stream}.a", b"x")
                for _ in range(10):
                    await pub.ping()
                    await asyncio.sleep(0.1)

    async def test_every_option_of_a_message_is_stored(self, js: JetStreamContext, stream: str) -> None:
        headers = {"K": "v", "Empty": "", "Unicode": "ä→ß"}
        async with jsx.FastPublisher(js) as pub:
            await pub.add(f"{stream}.a", b"", headers=headers, msg_id="m1", msg_ttl=60, stream=stream)
            await pub.add(f"{stream}.a", b"", expected_last_subject_seq=1)
            await pub.add(f"{stream}.b", b"", expected_last_seq=2, msg_ttl=jsx.NEVER)
            await pub.add(f"{stream}.c", b"\r\n", expected_last_subject_seq=3, expected_last_subject=f"{stream}.b")
        assert headers == {"K": "v", "Empty": "", "Unicode": "ä→ß"}
        first, second, third, fourth = await stored(js, stream)
        assert first.headers == {**headers, "Nats-Msg-Id": "m1", "Nats-TTL": "60"}
        assert (b"Nats-Expected-Stream", stream.encode()) in first.raw_headers
        assert (second.raw_headers, second.data) == ([(b"Nats-Expected-Last-Subject-Sequence", b"1")], b"")
        assert third.headers["Nats-TTL"] == "never"
        assert fourth.data == b"\r\n"

    @each("flow", [1, 7, 100, 65535])
    @each("outstanding", [1, 3])
    async def test_add_many_stores_everything_in_order(
        self, js: JetStreamContext, make_stream: MakeStream, flow: int, outstanding: int
    ) -> None:
        stream = await make_stream()

        def entries() -> Iterator[Any]:
            for i in range(400):
                payload = b"%d" % i
                yield [(f"{stream}.{i % 7}", payload), (f"{stream}.h", payload, {"I": str(i)}),
                       jsx.BatchMessage(f"{stream}.m", payload)][i % 3]  # fmt: skip

        async with jsx.FastPublisher(js, flow=flow, max_outstanding_acks=outstanding) as pub:
            ack = await pub.add_many(entries())
            assert ack.batch_seq == 400
            assert ack.batch_seq - ack.ack_seq <= pub.flow * outstanding
        messages = await stored(js, stream)
        assert [m.data for m in messages] == [b"%d" % i for i in range(400)]
        assert messages[1].headers == {"I": "1"}

    async def test_add_many_accepts_an_async_iterable(self, js: JetStreamContext, stream: str) -> None:
        async def entries() -> AsyncIterator[Any]:
            for i in range(300):
                if i % 50 == 0:
                    await asyncio.sleep(0)
                yield (f"{stream}.a", b"%d" % i) if i % 2 else jsx.BatchMessage(f"{stream}.b", b"%d" % i)

        async with jsx.FastPublisher(js, flow=10) as pub:
            assert (await pub.add_many(entries())).batch_seq == 300
        assert await payloads(js, stream) == [b"%d" % i for i in range(300)]

    async def test_every_change_of_state_is_one_debug_record(
        self, js: JetStreamContext, stream: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("DEBUG", logger="jetstream_ext.fast")
        async with jsx.FastPublisher(js) as pub:
            for _ in range(300):
                await pub.add(f"{stream}.a", b"secret", headers={"K": "secret"})
        records = [each.getMessage() for each in caplog.records if each.name == "jetstream_ext.fast"]
        assert [text.partition(" (")[0] for text in records] == [
            f"batch {pub.batch_id}: {change}"
            for change in ("NEW -> STARTING", "STARTING -> OPEN", "OPEN -> COMMITTING", "COMMITTING -> ENDED")
        ]
        assert "secret" not in "".join(records)

    async def test_an_empty_source_sends_nothing(self, js: JetStreamContext, stream: str, leak_check: Any) -> None:
        async with jsx.FastPublisher(js) as pub:
            assert await pub.add_many([]) == jsx.FastPubAck(0, 0)
        assert pub.end_reason is jsx.EndReason.DISCARDED
        await leak_check.assert_clean()

    async def test_flush_and_ping_store_nothing(self, js: JetStreamContext, stream: str) -> None:
        async with jsx.FastPublisher(js, flow=100) as pub:
            await pub.flush()
            with pytest.raises(errors.EmptyBatchError):
                await pub.ping()
            for _ in range(3):
                await pub.add(f"{stream}.a", b"x")
            await pub.flush()
            assert (await js.stream_info(stream)).state.messages == 3
            assert (await pub.ping()).batch_seq == 3
            await pub.flush()
        assert len(await payloads(js, stream)) == 3, "pings are not stored"


class TestEnding:
    async def test_commit_with_a_last_message(self, js: JetStreamContext, stream: str, leak_check: Any) -> None:
        pub = jsx.FastPublisher(js)
        await pub.add(f"{stream}.a", b"1")
        ack = await pub.commit(f"{stream}.a", b"2", headers={"K": "v"})
        assert (ack.batch_size, ack.seq, pub.ack) == (2, 2, ack)
        assert [m.headers for m in await stored(js, stream)] == [{}, {"K": "v"}]
        await leak_check.assert_clean()

    async def test_commit_eob_commits_without_another_message(self, js: JetStreamContext, stream: str) -> None:
        pub = jsx.FastPublisher(js)
        with pytest.raises(errors.EmptyBatchError):
            await pub.commit_eob()
        await pub.add(f"{stream}.a", b"1")
        assert (await pub.commit_eob()).batch_size == 1
        assert (await jsx.FastPublisher(js).commit(f"{stream}.a", b"only")).batch_size == 1
        assert await payloads(js, stream) == [b"1", b"only"]

    async def test_discard_keeps_what_was_sent(self, js: JetStreamContext, stream: str, leak_check: Any) -> None:
        pub = jsx.FastPublisher(js)
        await pub.add(f"{stream}.a", b"1")
        await pub.flush()
        await pub.discard()
        await pub.discard()
        assert pub.end_reason is jsx.EndReason.DISCARDED
        with pytest.raises(
            errors.BatchClosedError,
            match=r"it was discarded, so it has no final ack; (message 1 is not|every message was) acknowledged",
        ):
            _ = pub.ack
        assert await payloads(js, stream) == [b"1"]
        await leak_check.assert_clean()

    @each("end", ["commit", "discard", "discard unused"])
    async def test_a_batch_is_closed_after_its_end(self, js: JetStreamContext, stream: str, end: str) -> None:
        pub = jsx.FastPublisher(js)
        if end != "discard unused":
            await pub.add(f"{stream}.a", b"1")
        await (pub.commit_eob() if end == "commit" else pub.discard())
        operations = (
            pub.add(f"{stream}.a", b"2"), pub.add_many([(f"{stream}.a", b"2")]), pub.commit(f"{stream}.a"),
            pub.commit_eob(), pub.ping(),
        )  # fmt: skip
        for operation in operations:
            with pytest.raises(errors.BatchClosedError) as caught:
                await operation
            assert caught.value.batch_id == pub.batch_id
        assert await pub.wait_closed() is pub.end_reason

    async def test_an_idle_batch_notices_its_end(self, js: JetStreamContext, stream: str, leak_check: Any) -> None:
        pub = jsx.FastPublisher(js, keepalive=0.05)
        await pub.add(f"{stream}.a", b"1")
        await js.update_stream(
            name=stream, subjects=[f"{stream}.>"], allow_direct=True, allow_atomic=True, allow_msg_ttl=True
        )
        async with asyncio.timeout(30):
            assert await pub.wait_closed() is jsx.EndReason.ERROR
        with pytest.raises(errors.ServerError) as caught:
            await pub.add(f"{stream}.a", b"2")
        assert isinstance(caught.value, errors.BatchError)
        await leak_check.assert_clean()

    async def test_an_idle_batch_is_kept_alive(self, js: JetStreamContext, stream: str) -> None:
        pongs = asyncio.Event()
        pub = jsx.FastPublisher(js, keepalive=0.02, on_flow=lambda _: pongs.set())
        await pub.add(f"{stream}.a", b"1")
        for _ in range(3):
            pongs.clear()
            async with asyncio.timeout(30):
                await pongs.wait()
        assert pub.end_reason is None
        await pub.discard()


class TestGapsAndRefusals:
    async def test_a_full_stream_refuses_messages_in_both_modes(
        self, js: JetStreamContext, make_stream: MakeStream
    ) -> None:
        stream = await make_stream(max_msgs=3, discard=DiscardPolicy.NEW)
        async with jsx.FastPublisher(js, gap=jsx.GapMode.OK) as pub:
            await pub.add_many((f"{stream}.a", b"%d" % i) for i in range(6))
        assert [report.seq for report in pub.errors] == [4, 5, 6]
        assert await payloads(js, stream) == [b"0", b"1", b"2"]
        await js.purge_stream(stream)
        pub = jsx.FastPublisher(js)
        await pub.add_many((f"{stream}.a", b"%d" % i) for i in range(4))
        with pytest.raises(errors.BatchServerError, match="maximum messages"):
            await pub.commit_eob()
        assert pub.ack.batch_size == 3

    async def test_ok_mode_reports_a_subject_of_no_stream(self, js: JetStreamContext, stream: str) -> None:
        async with jsx.FastPublisher(js, gap=jsx.GapMode.OK) as pub:
            await pub.add(f"{stream}.a", b"1")
            await pub.add("no.such.stream", b"2")
            await pub.add(f"{stream}.a", b"3")
            await pub.flush()
        (report,) = pub.errors
        assert (report.seq, report.error.code) == (2, 503)
        assert pub.gaps == [jsx.BatchFlowGap(2, 3)]


class TestHandlers:
    async def test_coroutine_handlers_run_in_order_and_have_ended_after_the_block(
        self, js: JetStreamContext, stream: str
    ) -> None:
        running, most, seen = 0, 0, list[int]()

        async def handler(ack: jsx.BatchFlowAck) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            seen.append(ack.seq)
            running -= 1

        async with jsx.FastPublisher(js, flow=1, on_flow=handler) as publisher:
            await publisher.add_many((f"{stream}.a", b"%d" % n) for n in range(300))
        assert (running, most) == (0, 1)
        assert seen == sorted(seen)
        assert len(seen) > 100

    @each("how", ["clean", "error", "cancelled"])
    async def test_a_handler_that_hangs_is_cancelled_at_the_end_of_the_block(
        self, js: JetStreamContext, stream: str, how: str
    ) -> None:
        started, ended = asyncio.Event(), asyncio.Event()

        async def handler(_: object) -> None:
            try:
                started.set()
                await asyncio.Event().wait()
            finally:
                ended.set()

        async def use() -> None:
            async with jsx.FastPublisher(js, flow=1, on_flow=handler, timeout=4) as publisher:
                await publisher.add_many((f"{stream}.a", b"x") for _ in range(10))
                await started.wait()
                if how == "error":
                    raise ZeroDivisionError
                if how == "cancelled":
                    await asyncio.Event().wait()

        before = asyncio.all_tasks()
        using = asyncio.ensure_future(use())
        if how == "cancelled":
            await started.wait()
            using.cancel()
        async with asyncio.timeout(60):
            (outcome,) = await asyncio.gather(using, return_exceptions=True)
        assert type(outcome) is {"clean": type(None), "error": ZeroDivisionError}.get(how, asyncio.CancelledError)
        assert ended.is_set()
        assert not any("_await_all" in repr(task) for task in asyncio.all_tasks() - before), "the handler's task"

    async def test_a_bounded_number_of_events_waits_for_a_coroutine_handler(
        self, js: JetStreamContext, stream: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        started, seen = asyncio.Event(), list[int]()

        async def handler(ack: jsx.BatchFlowAck) -> None:
            await started.wait()
            seen.append(ack.seq)

        async with jsx.FastPublisher(js, flow=1, on_flow=handler) as publisher:
            await publisher.add_many((f"{stream}.a", b"") for _ in range(2000))
            await publisher.ping()  # its answer is the last one
            assert sum("_await_all" in repr(task) for task in asyncio.all_tasks()) == 1
            started.set()
        assert seen == sorted(seen)
        assert seen[-1] >= 1999
        assert 2 < len(seen) < 1500, "of 2000"
        assert caplog.text.count("handler is behind") == 1

    @each("kind", ["plain", "cancelled", "coroutine"])
    async def test_handler_errors_go_to_the_loop_s_exception_handler(
        self, js: JetStreamContext, stream: str, loop_is_quiet: list[dict[str, Any]], kind: str
    ) -> None:
        failure = asyncio.CancelledError if kind == "cancelled" else ZeroDivisionError

        def plain(_: object) -> None:
            raise failure  # CancelledError: as from the result of a cancelled future

        async def coroutine(_: object) -> None:
            raise ZeroDivisionError

        async with jsx.FastPublisher(js, flow=2, on_flow=coroutine if kind == "coroutine" else plain) as pub:
            for _ in range(5):
                await pub.add(f"{stream}.a", b"x")
        assert pub.end_reason is jsx.EndReason.COMMITTED
        await asyncio.sleep(0)
        assert loop_is_quiet
        assert {type(context["exception"]) for context in loop_is_quiet} == {failure}
        assert pub.batch_id in loop_is_quiet[0]["message"]
        loop_is_quiet.clear()


async def test_a_refusal_of_the_batch_names_the_stream_and_the_expected_one(
    js: JetStreamContext, make_stream: MakeStream
) -> None:
    stream = await make_stream(allow_batched=False)
    disabled = f"fast ingest is disabled on stream '{stream}', .* 'jetstream-ext enable {stream} --batched' "
    with pytest.raises(errors.FastPublishDisabledError, match=disabled) as off:
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add(f"{stream}.a")
    assert off.value.stream == stream
    other = await make_stream()
    both = f"; a message expects stream '{stream}', and stream '{other}' stores its subject"
    with pytest.raises(errors.StreamMismatchError, match=both):
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add_many([jsx.BatchMessage(f"{other}.a", stream=stream)])
