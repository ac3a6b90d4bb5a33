"""Fast ingest on every release that has it, its refusal on older ones, and forged replies."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import nats
import orjson
import pytest
from client_cells import each
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.testing import NatsServer

VERSIONS = ["2.14.0", "2.14.6", "2.15.1"]
OK, FAIL = jsx.GapMode.OK, jsx.GapMode.FAIL


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def server(version: str) -> Iterator[NatsServer]:
    with NatsServer(version=version) as server:
        yield server


@pytest.fixture
async def there(server: NatsServer) -> AsyncIterator[Client]:
    nc = await nats.connect(server.url, connect_timeout=10)
    yield nc
    await nc.close()


@pytest.fixture
async def js(there: Client, stream_name: Callable[[], str]) -> JetStreamContext:
    return there.jetstream(timeout=30)


@pytest.fixture
async def stream(js: JetStreamContext, stream_name: Callable[[], str]) -> str:
    name = stream_name()
    await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_batched=True, max_msg_size=1000)
    return name


async def stored(js: JetStreamContext, stream: str) -> list[bytes]:
    return [message.data for message in await jsx.DirectGet(js, stream).scan().to_list()]


@each("gap", jsx.GapMode)
@each("count", [1, 2, 99, 100, 101, 1234])
async def test_everything_is_stored_in_order(js: JetStreamContext, stream: str, gap: jsx.GapMode, count: int) -> None:
    await js.purge_stream(stream)
    async with jsx.FastPublisher(js, gap=gap) as pub:
        await pub.add_many((f"{stream}.{i % 3}", b"%d" % i) for i in range(count - 1))
        await pub.add(f"{stream}.a", b"last", headers={"K": "v"})
        await pub.flush()
        await pub.ping()
    assert (pub.end_reason, pub.ack.batch_size, pub.ack.stream) == (jsx.EndReason.COMMITTED, count, stream)
    assert await stored(js, stream) == [*(b"%d" % i for i in range(count - 1)), b"last"]


async def test_duplicate_or_refused_last_message_does_not_hang(js: JetStreamContext, stream: str) -> None:
    # Servers 2.14.0 to 2.14.2 never answer such a message if it commits; this library commits by a separate message.
    for gap in jsx.GapMode:
        pub = jsx.FastPublisher(js, gap=gap)
        await pub.add(f"{stream}.a", b"1", msg_id=f"{gap}")
        async with asyncio.timeout(20):
            ack = await pub.commit(f"{stream}.a", b"1", msg_id=f"{gap}")
        assert ack.batch_size == 2
    pub = jsx.FastPublisher(js, gap=OK)
    await pub.add(f"{stream}.a", b"2")
    async with asyncio.timeout(20):
        await pub.commit(f"{stream}.a", b"3", expected_last_seq=10**6)
    assert [report.seq for report in pub.errors] == [2]
    assert await stored(js, stream) == [b"1", b"1", b"2"]


class TestRealGaps:
    async def test_gap_ends_a_batch_in_fail_mode(self, js: JetStreamContext, stream: str) -> None:
        pub = jsx.FastPublisher(js, flow=10)
        await pub.add_many([(f"{stream}.a", b"x")] * 15)
        _lose(pub, 3)
        with pytest.raises(errors.BatchGapError) as caught:
            await pub.add_many([(f"{stream}.a", b"y")] * 100)
        assert (caught.value.first_lost, caught.value.last_lost) == (16, 18)
        assert caught.value.ack is not None
        assert (caught.value.ack.batch_size, caught.value.acked) == (15, 15)
        assert await stored(js, stream) == [b"x"] * 15

    async def test_gaps_are_reported_in_ok_mode(self, js: JetStreamContext, stream: str) -> None:
        heard: list[jsx.BatchFlowGap] = []
        async with jsx.FastPublisher(js, flow=10, gap=OK, on_gap=heard.append) as pub:
            for _ in range(3):
                await pub.add_many([(f"{stream}.a", b"x")] * 15)
                _lose(pub, 2)
            await pub.add_many([(f"{stream}.a", b"x")] * 15)
            _lose(pub, 1)
            await pub.flush()
        assert heard == pub.gaps == [jsx.BatchFlowGap(16, 18), jsx.BatchFlowGap(33, 35), jsx.BatchFlowGap(50, 52),
                                     jsx.BatchFlowGap(67, 68)]  # fmt: skip
        assert pub.ack.batch_size == 67, "the highest sequence, not how many are stored"
        assert len(await stored(js, stream)) == 60

    @each("gap", jsx.GapMode)
    async def test_repeated_sequence_ends_the_batch(
        self, js: JetStreamContext, there: Client, stream: str, gap: jsx.GapMode
    ) -> None:
        await js.purge_stream(stream)
        pub = jsx.FastPublisher(js, flow=10, gap=gap)
        await pub.add_many([(f"{stream}.a", b"x")] * 5)
        await pub.flush()
        # Another client publishes into the batch: a sequence that the server has already ends the batch in both modes.
        await there.publish(f"{stream}.a", b"z", reply=f"{_inbox(pub)}.{pub.batch_id}.10.{gap.value}.3.1.$FI")
        async with asyncio.timeout(20):
            assert await pub.wait_closed() is jsx.EndReason.ERROR
        with pytest.raises(errors.BatchAbandonedError):
            await pub.add(f"{stream}.a", b"6")
        assert pub.ack.batch_size == 5
        assert pub.gap_count == 0
        assert await stored(js, stream) == [b"x"] * 5


@each("kind", ["too large", "expectation"])
async def test_refused_messages_are_reported_or_end_the_batch(js: JetStreamContext, stream: str, kind: str) -> None:
    await js.purge_stream(stream)
    reports: list[object] = []
    bad = (
        jsx.BatchMessage(f"{stream}.a", bytes(2000))
        if kind == "too large"
        else jsx.BatchMessage(f"{stream}.a", b"bad", expected_last_seq=10**6)
    )
    error = errors.MessageTooLargeError if kind == "too large" else errors.WrongLastSequenceError
    good = [jsx.BatchMessage(f"{stream}.a", b"good")] * 10
    async with jsx.FastPublisher(
        js, flow=2, gap=OK, max_outstanding_acks=1, on_error=reports.append, on_gap=reports.append
    ) as pub:
        # More refused messages than the window has room for.
        await pub.add_many([*good, *[bad] * 10, *good])
        await pub.flush()
    assert [report.seq for report in pub.errors] == list(range(11, 21))
    assert {type(report.error) for report in pub.errors} == {error}
    assert [report for report in reports if isinstance(report, jsx.BatchFlowError)] == pub.errors
    assert await stored(js, stream) == [b"good"] * 20
    pub = jsx.FastPublisher(js, flow=2)
    with pytest.raises(error) as caught:
        await pub.add_many([*good, bad, *good])
    assert isinstance(caught.value, errors.BatchError)
    assert (caught.value.acked, caught.value.outcome) == (10, "partial")
    assert await stored(js, stream) == [b"good"] * 30


@each("version", VERSIONS, together=True)
async def test_a_batch_that_the_server_dropped_is_an_error(version: str) -> None:
    with NatsServer(version=version, config="jetstream { limits { batch { timeout: 3s } } }") as server:
        async with await nats.connect(server.url, connect_timeout=10) as nc:
            js = nc.jetstream(timeout=30)
            await js.add_stream(name="S", subjects=["S.>"], allow_direct=True, allow_batched=True)
            await check_dropped_batches(js, "S")


async def check_dropped_batches(js: JetStreamContext, stream: str) -> None:
    # Servers before 2.15 open another batch for a ping after message 1, and report that message as lost.
    batches = [(jsx.FastPublisher(js, gap=gap, keepalive=0), sent) for gap in jsx.GapMode for sent in (1, 5)]
    for pub, sent in batches:
        await pub.add_many([(f"{stream}.a", b"x")] * sent)
    async with asyncio.timeout(60):
        while (await js.stream_info(stream)).state.messages < 12:
            await asyncio.sleep(0.05)
    await asyncio.sleep(5)  # longer than the server keeps the batch; polling would keep it alive
    await js.account_info()  # a server that was busy meanwhile forgets the batch now
    await asyncio.sleep(0.1)
    for pub, sent in batches:
        with pytest.raises(errors.FastPublishUnknownBatchError) as caught:
            await pub.ping()
        ended = (caught.value.outcome, pub.gap_count, pub.end_reason)
        assert ended == ("unknown", 0, jsx.EndReason.ERROR), sent
    assert len(await stored(js, stream)) == 12


@pytest.mark.parametrize("version", ["2.11.11", "2.12.8"], indirect=True)
@each("prefix", [{}, {"prefix": "$JS.API"}])
async def test_nothing_is_sent_to_servers_without_fast_ingest(
    js: JetStreamContext, there: Client, version: str, stream_name: Callable[[], str], prefix: dict[str, str]
) -> None:
    name = stream_name()
    await js.add_stream(name=name, subjects=[f"{name}.>"])
    pub = jsx.FastPublisher(there.jetstream(**prefix))
    with pytest.raises(
        errors.UnsupportedFeatureError, match=rf"nats-server 2\.14.*{version}.*; nothing was sent"
    ) as caught:
        await pub.add(f"{name}.a", b"1")
    assert (caught.value.required_api_level, caught.value.server_version) == (4, version)
    assert (await js.stream_info(name)).state.messages == 0


def _frame(kind: str, **fields: Any) -> bytes:
    return orjson.dumps({"type": kind, **fields})


ERROR = {"code": 400, "err_code": 10071, "description": "no"}
# a forged reply, its sequence and operation  ->  ack_seq, flow, gaps, errors, end reason
INJECTED: list[tuple[str, int, int, bytes, Any]] = [
    ("an ack", 5, 1, _frame("ack", seq=4, msgs=7), (4, 7, 0, 0, None)),
    ("a stale ack", 5, 1, _frame("ack", seq=0, msgs=9), (0, 9, 0, 0, None)),
    ("a zero ack", 5, 1, _frame("ack", seq=3, msgs=0), (3, 1, 0, 0, None)),
    ("an ack of the future", 5, 1, _frame("ack", seq=99, msgs=7), (0, 10, 0, 0, None)),
    ("an ack without numbers", 5, 1, _frame("ack"), (0, 10, 0, 0, None)),
    ("a negative ack", 5, 1, _frame("ack", seq=-1, msgs=1), (0, 10, 0, 0, None)),
    ("a gap", 5, 1, _frame("gap", last_seq=3, seq=5), (0, 10, 1, 0, None)),
    ("a gap twice", 5, 1, _frame("gap", last_seq=3, seq=5), (0, 10, 1, 0, None)),
    ("an err", 5, 1, _frame("err", seq=2, error=ERROR), (0, 10, 0, 1, None)),
    ("an err of the future", 99, 1, _frame("err", seq=99, error=ERROR), (0, 10, 0, 0, None)),
    ("an unknown type", 5, 1, _frame("weather", seq=1), (0, 10, 0, 0, None)),
    ("no JSON", 5, 1, b"\xff{", (0, 10, 0, 0, None)),
    ("a list", 5, 1, b"[1]", (0, 10, 0, 0, None)),
    ("nothing", 5, 1, b"", (0, 10, 0, 0, None)),
    ("a long number", 5, 1, b'{"type":"ack","seq":' + b"9" * 500 + b',"msgs":1}', (0, 10, 0, 0, None)),
    ("another batch's end", 5, 3, orjson.dumps({"stream": "S", "seq": 9, "batch": "x", "count": 5}), (0, 10, 0, 0, None)),
    ("an unknown batch", 5, 1, orjson.dumps({"error": {"code": 400, "err_code": 10208, "description": "?"}}),
     (0, 10, 0, 1, None)),
    ("the draft's ack", 5, 1, b'{"last_seq":4,"seq":4,"ack_msgs":6}', (4, 6, 0, 0, None)),
]  # fmt: skip


@pytest.mark.parametrize("version", ["2.15.1"], indirect=True)
@each("what, seq, op, said, after", INJECTED)
async def test_forged_replies_do_no_harm(
    js: JetStreamContext, there: Client, stream: str, what: str, seq: int, op: int, said: bytes, after: Any
) -> None:
    await js.purge_stream(stream)
    pub = jsx.FastPublisher(js, flow=10, gap=OK)
    pub._batch.clock._ask_every = 60.0
    await pub.add_many([(f"{stream}.a", b"x")] * 5)
    await pub.flush()
    for _ in range(2 if "twice" in what else 1):
        await there.publish(f"{_inbox(pub)}.{pub.batch_id}.10.ok.{seq}.{op}.$FI", said)
    for tail in ("x", "10.ok.1", "10.ok.x.1.$FI", "10.ok.-1.1.$FI", f"10.ok.{'9' * 5000}.1.$FI"[:3000]):
        await there.publish(
            f"{_inbox(pub)}.{pub.batch_id}.{tail}", _frame("gap", last_seq=1, seq=9)
        )  # malformed subjects
    await there.flush()
    await asyncio.sleep(0.02)
    assert (pub.ack_seq, pub.flow, pub.gap_count, pub.error_count, pub.end_reason) == after
    pub._batch.clock._ask_every = 0.2  # not before: the answer to a ping would change what is compared
    await pub.add_many([(f"{stream}.a", b"x")] * 50)
    assert (await pub.commit_eob()).batch_size == 55
    assert len(await stored(js, stream)) == 55
    await pub.discard()


def _lose(pub: jsx.FastPublisher, count: int) -> None:
    """Skip sequences, as if that many messages had been lost."""
    pub._batch.sent += count


def _inbox(pub: jsx.FastPublisher) -> str:
    inbox = pub._session._inbox
    assert inbox is not None
    return inbox.subject
