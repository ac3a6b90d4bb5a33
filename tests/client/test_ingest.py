"""`ingest` on a healthy server: sources, ids, refused messages, progress, cancellation."""

import asyncio
import pickle
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import nats
import nats.errors
import nats.js.errors
import pytest
from client_cells import each
from clients import quiet
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.testing import NatsServer

MakeStream = Callable[..., Awaitable[str]]


async def messages(js: JetStreamContext, stream: str) -> list[jsx.StoredMsg]:
    return await jsx.DirectGet(js, stream).scan().to_list()


class TestSources:
    @each("count", [0, 1, 2, 199, 200, 201, 1000])
    @each("kind", ["sync", "async"])
    async def test_everything_is_stored_in_order(
        self, js: JetStreamContext, make_stream: MakeStream, leak_check: Any, count: int, kind: str
    ) -> None:
        stream = await make_stream()
        entries = [(f"{stream}.{i % 3}", b"%d" % i) for i in range(count)]

        async def slowly() -> AsyncIterator[tuple[str, bytes]]:
            for entry in entries:
                await asyncio.sleep(0)
                yield entry

        report = await jsx.ingest(js, entries if kind == "sync" else slowly())
        assert [(each.subject, each.data) for each in await messages(js, stream)] == entries
        assert (report.stored, report.duplicates, report.resent) == (count, 0, 0)
        assert report.batches == (1 if count else 0)
        assert report.seconds > 0
        await leak_check.assert_clean()

    async def test_a_message_of_another_stream_ends_the_run(
        self, js: JetStreamContext, make_stream: MakeStream
    ) -> None:
        first, second = await make_stream(), await make_stream()
        with pytest.raises(
            errors.IngestError, match=f"index 4 .*'{second}'.*'{first}'.*must be of one stream"
        ) as caught:
            await jsx.ingest(js, [(f"{second if n == 4 else first}.a", b"%d" % n) for n in range(40)])
        assert (caught.value.index, caught.value.in_doubt) == (4, 0)
        assert [(await js.stream_info(name)).state.messages for name in (first, second)] == [4, 0]

    async def test_every_form_of_message_is_stored(self, js: JetStreamContext, stream: str) -> None:
        headers = {"K": "v"}
        await jsx.ingest(js, [
            (f"{stream}.1", b"plain"), (f"{stream}.2", b"headers", headers), (f"{stream}.3", b""),
            jsx.BatchMessage(f"{stream}.4", b"full", headers={"K": "w"}, msg_ttl=60),
            (f"{stream}.5", b"own", {"Nats-Msg-Id": "mine"}), jsx.BatchMessage(f"{stream}.6", b"own id", msg_id="my own"),
            (f"{stream}.7", memoryview(b"view")),  # type: ignore[list-item]
        ])  # fmt: skip
        stored = await messages(js, stream)
        assert [each.data for each in stored] == [b"plain", b"headers", b"", b"full", b"own", b"own id", b"view"]
        assert (stored[1].headers["K"], stored[3].headers["K"], stored[3].headers["Nats-TTL"]) == ("v", "w", "60")
        assert (stored[4].headers["Nats-Msg-Id"], stored[5].headers["Nats-Msg-Id"]) == ("mine", "my own")
        assert headers == {"K": "v"}

    async def test_source_errors_come_after_the_messages_before_them(self, js: JetStreamContext, stream: str) -> None:
        def source() -> Iterator[tuple[str, bytes]]:
            for i in range(250):
                yield f"{stream}.a", b"%d" % i
            raise RuntimeError("source")

        with pytest.raises(RuntimeError, match="source"):
            await jsx.ingest(js, source())
        assert len(await messages(js, stream)) == 250


class TestIds:
    async def test_default_ids_name_the_run_and_the_place(self, js: JetStreamContext, stream: str) -> None:
        for _ in range(2):
            await jsx.ingest(js, [(f"{stream}.a", b"x")] * 3)
        ids = [each.headers["Nats-Msg-Id"] for each in await messages(js, stream)]
        runs = [re.fullmatch(r"([A-Za-z0-9]{22})-(\d+)", each) for each in ids]
        assert [each and each[2] for each in runs] == ["1", "2", "3"] * 2
        assert len({each and each[1] for each in runs}) == 2

    async def test_ids_of_the_caller_make_a_second_run_store_nothing(self, js: JetStreamContext, stream: str) -> None:
        entries = [(f"{stream}.a", b"%d" % i) for i in range(500)]

        def content(entry: Any) -> str:
            return entry[1].decode()

        first = await jsx.ingest(js, entries[:300], msg_id=content)
        second = await jsx.ingest(js, entries, msg_id=content)
        # All 500 are in the stream; fast ingest does not tell which of them it skipped.
        assert (first.stored, second.stored, second.duplicates) == (300, 500, 0)
        assert [each.data for each in await messages(js, stream)] == [each[1] for each in entries]

    async def test_error_in_msg_id_comes_after_the_messages_before_it(self, js: JetStreamContext, stream: str) -> None:
        def broken(entry: Any) -> str:
            return {b"0": "a", b"1": "b"}[entry[1]]

        with pytest.raises(KeyError):
            await jsx.ingest(js, [(f"{stream}.a", b"%d" % i) for i in range(5)], msg_id=broken)
        assert len(await messages(js, stream)) == 2


REFUSED: list[tuple[str, Any, type[BaseException]]] = [
    ("subject", ("a b", b"x"), errors.BadSubjectError),
    ("header", ("{}.a", b"x", {"K": "a\r\nb"}), errors.BadHeaderError),
    ("no message", 7, TypeError),
    ("text", ("{}.a", "text"), TypeError),
    ("headers", ("{}.a", b"x", ["K"]), TypeError),
    ("too much", ("{}.a", b"x", None, None, None, None, None, None, None, None, None), TypeError),
    ("size", ("{}.a", bytes(2_000_000)), errors.MaxPayloadError),
    ("size of the stream", ("{}.a", bytes(5000)), nats.js.errors.APIError),
    ("expectation", jsx.BatchMessage("{}.a", b"x", expected_last_seq=10**9), nats.js.errors.APIError),
    ("no stream", ("no.such.stream", b"x"), nats.js.errors.NoStreamResponseError),
]


class TestRefusedMessages:
    @each("what, bad, cause", REFUSED)
    @each("place", [0, 1, 333])
    async def test_refused_message_is_named_and_everything_before_it_is_stored(
        self,
        js: JetStreamContext,
        make_stream: MakeStream,
        leak_check: Any,
        what: str,
        bad: Any,
        cause: type[BaseException],
        place: int,
    ) -> None:
        stream = await make_stream(max_msg_size=2000)
        if isinstance(bad, jsx.BatchMessage):
            bad = jsx.BatchMessage(f"{stream}.a", bad.payload, expected_last_seq=bad.expected_last_seq)
        elif isinstance(bad, tuple):
            bad = (bad[0].format(stream), *bad[1:])
        entries: list[Any] = [(f"{stream}.a", b"%d" % i) for i in range(700)]
        entries[place] = bad
        with pytest.raises(errors.IngestError, match=f"message at index {place}\\b") as caught:
            await jsx.ingest(js, entries)
        assert caught.value.index == place
        assert isinstance(caught.value.__cause__, cause)
        report = caught.value.report
        assert report is not None
        assert report.stored == place
        assert [each.data for each in await messages(js, stream)] == [b"%d" % i for i in range(place)]
        assert pickle.loads(pickle.dumps(caught.value)).report == report
        await leak_check.assert_clean()


class TestRefusals:
    async def test_a_stream_without_allow_batched_is_an_error(
        self, js: JetStreamContext, make_stream: MakeStream
    ) -> None:
        stream = await make_stream(allow_batched=False)
        with pytest.raises(errors.IngestError, match="allow_batched") as caught:
            await jsx.ingest(js, [(f"{stream}.a", b"x")] * 3)
        assert isinstance(caught.value.__cause__, errors.FastPublishDisabledError)
        assert await messages(js, stream) == []

    async def test_a_stream_with_no_ack_is_an_error_at_once(
        self, js: JetStreamContext, make_stream: MakeStream
    ) -> None:
        stream = await make_stream(no_ack=True)
        with pytest.raises(errors.IngestError, match="has no_ack, so the server does not confirm") as caught:
            await jsx.ingest(js, [(f"{stream}.a", b"x")] * 3)
        assert isinstance(caught.value.__cause__, errors.StreamConfigMismatchError)
        publisher = jsx.FastPublisher(js)
        with pytest.raises(errors.StreamConfigMismatchError, match="nothing was sent; turn no_ack off"):
            await publisher.add(f"{stream}.a", b"x")
        await publisher.discard()
        assert await messages(js, stream) == []

    @each("expectation", [{}, {"expected_last_seq": 1}])
    async def test_a_ttl_on_a_stream_without_ttls_names_the_option(
        self, js: JetStreamContext, make_stream: MakeStream, expectation: dict[str, Any]
    ) -> None:
        stream = await make_stream(allow_msg_ttl=False)
        entries: list[Any] = [(f"{stream}.a", b"1"), jsx.BatchMessage(f"{stream}.a", b"2", msg_ttl=60, **expectation)]
        with pytest.raises(errors.IngestError) as caught:
            await jsx.ingest(js, entries)
        assert str(caught.value) == (
            f"the message at index 1 (subject '{stream}.a') was refused: per-message TTL is disabled; the message before it "
            f"is stored; enable TTLs on stream '{stream}' with allow_msg_ttl=True (jetstream_ext.ensure_stream) or "
            f"'jetstream-ext enable {stream} --ttl'"
        )

    async def test_a_message_for_another_stream_names_both(self, js: JetStreamContext, make_stream: MakeStream) -> None:
        first, second = await make_stream(), await make_stream(allow_msg_ttl=False)
        with pytest.raises(errors.IngestError) as caught:
            await jsx.ingest(js, [(f"{first}.a", b""), jsx.BatchMessage(f"{second}.a", stream=first)])
        assert str(caught.value).endswith(
            f"; a message expects stream '{first}', and stream '{second}' stores its subject"
        )

    @each("version", ["2.11.11", "2.12.8"])
    async def test_a_server_without_fast_ingest_is_an_error(self, version: str) -> None:
        async with NatsServer(version=version) as server, await nats.connect(server.url, connect_timeout=10) as nc:
            js = nc.jetstream()
            await js.add_stream(name="S", subjects=["s.>"])
            with pytest.raises(errors.UnsupportedFeatureError, match=f"{version}.*nothing was sent"):
                await jsx.ingest(js, [("s.1", b"x")])
            assert (await js.stream_info("S")).state.messages == 0

    @each("options", [{"timeout": 0}, {"patience": 0}, {"patience": float("nan")}, {"progress_every": -1}])
    async def test_options_are_checked(self, js: JetStreamContext, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
            await jsx.ingest(js, [], **options)

    async def test_a_closed_connection_is_an_error(self, own_nc: Any, own_js: JetStreamContext) -> None:
        await own_nc.close()
        with pytest.raises(errors.IngestError, match=r"connection is closed.*nothing is stored"):
            await jsx.ingest(own_js, [("s.1", b"x")])

    async def test_messages_without_an_answer_may_be_stored(
        self, own_server: NatsServer, own_js: JetStreamContext
    ) -> None:
        await own_js.add_stream(name="S", subjects=["s.>"], allow_batched=True)

        async def source() -> AsyncIterator[tuple[str, bytes]]:
            yield "s.1", b"first"
            while not (await own_js.stream_info("S")).state.messages:
                await asyncio.sleep(0.01)
            own_server.pause()
            for _ in range(9):
                yield "s.1", b"later"

        try:
            with pytest.raises(errors.IngestError, match=r"was not acknowledged: .*may be stored$") as caught:
                await jsx.ingest(own_js, source(), flow=100, patience=1.0, timeout=0.5)
        finally:
            own_server.resume()
        assert 0 < caught.value.in_doubt == 10 - caught.value.index
        assert "nothing is stored" not in str(caught.value)
        async with asyncio.timeout(30):
            while (await own_js.stream_info("S")).state.messages <= caught.value.index:
                await asyncio.sleep(0.05)


async def test_a_full_stream_is_an_error_at_once(js: JetStreamContext, make_stream: Any) -> None:
    name = await make_stream(allow_batched=True, max_msgs=3, discard="new")
    async with asyncio.timeout(30):
        with pytest.raises(errors.IngestError, match="was refused: maximum messages exceeded"):
            await jsx.ingest(js, [(f"{name}.a", b"x")] * 5)


class TestProgress:
    async def test_progress_counts_up_to_everything(self, js: JetStreamContext, stream: str) -> None:
        heard: list[jsx.IngestProgress] = []
        await jsx.ingest(
            js, [(f"{stream}.a", b"x")] * 1000, flow=50, on_progress=heard.append, progress_every=0.0
        )  # fmt: skip
        assert [each.stored for each in heard] == sorted(each.stored for each in heard)
        assert (heard[0].stored, heard[-1].stored, heard[-1].window) == (0, 1000, 0)
        assert max(each.window for each in heard) <= 101
        assert all(each.rate >= 0 for each in heard)

    async def test_an_error_in_on_progress_does_not_stop_the_ingest(
        self, js: JetStreamContext, stream: str, loop_is_quiet: list[dict[str, Any]]
    ) -> None:
        def broken(progress: jsx.IngestProgress) -> None:
            raise RuntimeError("progress")

        report = await jsx.ingest(js, [(f"{stream}.a", b"x")] * 10, on_progress=broken)
        assert report.stored == 10
        assert {str(each["exception"]) for each in loop_is_quiet} == {"progress"}
        loop_is_quiet.clear()


async def test_cancelling_leaves_nothing_behind(js: JetStreamContext, stream: str, leak_check: Any) -> None:
    for ticks in (0, 1, 2, 3, 5, 8, 13, 21, 34, 55):
        endless = ((f"{stream}.a", b"x") for _ in range(10**6))
        running = asyncio.create_task(jsx.ingest(js, endless))
        for _ in range(ticks):
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await leak_check.assert_clean()


async def test_a_failed_ingest_leaves_no_task_of_an_async_source(
    js: JetStreamContext, stream: str, leak_check: Any
) -> None:
    async def source() -> AsyncIterator[Any]:
        for entry in ((f"{stream}.a", b"x"), ("a b", b"refused"), (f"{stream}.a", b"y")):
            yield entry

    messages = source()
    with pytest.raises(errors.IngestError, match="message at index 1"):
        await jsx.ingest(js, messages)
    await leak_check.assert_clean()
    assert [each async for each in messages] == [(f"{stream}.a", b"y")], "the source is the caller's to close"


@each("before", [0, 3])
@each("fields", [(), ("x",), (b"x", None, None, "id"), (b"x", {"Nats-Msg-Id": "id"}, 60)])
async def test_only_tuples_of_two_or_three_are_messages(
    js: JetStreamContext, make_stream: MakeStream, before: int, fields: tuple[Any, ...]
) -> None:
    stream = await make_stream()
    entries: list[Any] = [(f"{stream}.1", b"%d" % n) for n in range(before)] + [(f"{stream}.1", *fields)]
    with pytest.raises(errors.IngestError, match=r"a tuple of \d|must be bytes") as caught:
        await jsx.ingest(js, entries)
    assert caught.value.index == before

    async def given_one_by_one() -> AsyncIterator[Any]:
        for entry in entries:
            yield entry

    for given in (entries, given_one_by_one()):
        publisher = jsx.FastPublisher(js)
        with pytest.raises(TypeError, match=r"a tuple of \d|must be bytes"):
            await publisher.add_many(given)
        await (publisher.commit_eob() if before else publisher.discard())
    assert (await js.stream_info(stream)).state.messages == 3 * before


class TestPermissions:
    CONFIG = """
        authorization { users = [
            { user: admin, password: p },
            { user: writer, password: p, permissions: { publish: { deny: ["s.refused"] } } },
            { user: deaf, password: p, permissions: { subscribe: { deny: ["_INBOX.>"] } } },
        ] }
    """

    @pytest.fixture
    def guarded(self) -> Iterator[NatsServer]:
        with NatsServer(config=self.CONFIG) as server:
            yield server

    @staticmethod
    @asynccontextmanager
    async def connected(server: NatsServer, user: str, timeout: float) -> AsyncIterator[JetStreamContext]:

        options = {"user": user, "password": "p", "error_cb": quiet, "connect_timeout": 10}
        async with await nats.connect(server.url, **options) as nc:
            yield nc.jetstream(timeout=timeout)

    @each("place, expectation", [(0, {}), (1, {}), (299, {}), (150, {"expected_last_subject_seq": 0})])
    async def test_a_message_without_permission_ends_the_call(
        self, guarded: NatsServer, place: int, expectation: dict[str, int]
    ) -> None:
        entries: list[Any] = [("s.a", b"%d" % n) for n in range(300)]
        entries[place] = jsx.BatchMessage("s.refused", b"", **expectation)
        async with self.connected(guarded, "admin", 30) as admin, self.connected(guarded, "writer", 2) as js:
            await admin.add_stream(name="S", subjects=["s.>"], allow_batched=True, allow_direct=True)
            await admin.purge_stream("S")
            async with asyncio.timeout(60):
                with pytest.raises(errors.IngestError) as caught:
                    await jsx.ingest(js, entries, patience=300)
            stored = await messages(admin, "S")
        before = {0: "nothing is stored", 1: "the message before it is stored"}
        assert str(caught.value) == (
            f"the message at index {place} (subject 's.refused') was refused: the server has refused a message to 's.refused': "
            f"the user had no permission to publish to it; {before.get(place, f'the {place} messages before it are stored')}"
        )
        assert (caught.value.index, caught.value.in_doubt) == (place, 0)
        assert [message.data for message in stored] == [b"%d" % n for n in range(place)]

    async def test_a_client_that_may_not_hear_answers_ends_the_call(self, guarded: NatsServer) -> None:
        async with self.connected(guarded, "admin", 30) as admin, self.connected(guarded, "deaf", 1) as js:
            await admin.add_stream(name="S", subjects=["s.>"], allow_batched=True, allow_direct=True)
            async with asyncio.timeout(60):
                with pytest.raises(errors.IngestError) as caught:
                    await jsx.ingest(js, [("s.a", b"x")], patience=300)
        assert str(caught.value) == (
            "the message at index 0 (subject 's.a') was not acknowledged; the server has refused a subscription: the user had no "
            "permission to subscribe to _INBOX.>, where answers come; it may be stored"
        )
