"""Consumer reset on a real server: the call, and nats-py's subscribers during a reset."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import nats
import nats.errors
import nats.js.errors
import pytest
from client_cells import each
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, ConsumerReset, DeliverPolicy

import jetstream_ext as jsx
from jetstream_ext.errors import ConsumerInvalidResetError, RequestTimeoutError, UnsupportedFeatureError
from jetstream_ext.testing import NatsServer

MakeStream = Callable[..., Awaitable[str]]
SLACK = 60.0  # longer than anything takes on a busy machine
RESETS, MESSAGES = 25, 5000


@pytest.fixture
def js(nc: Client) -> JetStreamContext:
    """A JetStream context with a long timeout."""
    return nc.jetstream(timeout=SLACK)


@pytest.fixture
def ten(js: JetStreamContext, make_stream: MakeStream) -> Callable[..., Awaitable[str]]:
    """Create a stream with ten messages and a consumer on it; the default is a durable pull consumer ``c``."""

    async def ten(consumer: ConsumerConfig | None = None, *, messages: int = 10) -> str:
        name = await make_stream()
        for number in range(1, messages + 1):
            await js.publish(f"{name}.{number}", b"%d" % number)
        await js.add_consumer(name, consumer or ConsumerConfig(name="c", durable_name="c"))
        return name

    return ten


def seqs(msgs: list[Msg]) -> list[int]:
    return [msg.metadata.sequence.stream for msg in msgs]


async def fetch(sub: JetStreamContext.PullSubscription, count: int) -> list[Msg]:
    """Fetch `count` messages: nats-py returns fewer if they arrive slowly."""
    msgs: list[Msg] = []
    while len(msgs) < count:
        msgs += await sub.fetch(count - len(msgs), timeout=SLACK)
    return msgs


# -- the call ---------------------------------------------------------------------------------------------------------


async def test_without_a_start_it_restarts_at_the_ack_floor(js: JetStreamContext, ten: Any) -> None:
    name = await ten()
    sub = await js.pull_subscribe_bind("c", name)
    for msg in await fetch(sub, 5):
        if msg.metadata.sequence.stream in (1, 2, 4):
            await msg.ack_sync(timeout=30)
    reset = await jsx.reset_consumer(js, name, "c")
    assert isinstance(reset, ConsumerReset)
    assert reset.reset_seq == 3
    assert (reset.info.name, reset.info.stream_name) == ("c", name)
    assert (reset.info.num_pending, reset.info.num_ack_pending) == (8, 0)
    again = await fetch(sub, 8)
    assert seqs(again) == list(range(3, 11))  # 4 was acknowledged, but is above the floor
    assert {msg.metadata.num_delivered for msg in again} == {1}
    assert again[0].metadata.sequence.consumer == 1


@each("seq", [1, 7, 10, 11, 2**64 - 1])
async def test_a_reset_to_a_sequence_delivers_from_there(js: JetStreamContext, ten: Any, seq: int) -> None:
    name = await ten()
    reset = await jsx.reset_consumer(js, name, "c", seq=seq)
    assert reset.reset_seq == seq
    assert reset.info.num_pending == max(0, 11 - seq)


async def test_a_reset_to_a_time_delivers_from_there(js: JetStreamContext, ten: Any) -> None:
    name = await ten()
    times = [message.time for message in await jsx.DirectGet(js, name).scan().to_list()]
    assert (await jsx.reset_consumer(js, name, "c", time=times[4])).reset_seq == 5
    assert (await jsx.reset_consumer(js, name, "c", time=times[4] + timedelta(microseconds=1))).reset_seq == 6
    assert (await jsx.reset_consumer(js, name, "c", time=datetime(1999, 1, 1, tzinfo=UTC))).reset_seq == 1
    later = times[-1] + timedelta(hours=1)
    assert (await jsx.reset_consumer(js, name, "c", time=later)).reset_seq == 11
    await js.publish(f"{name}.11", b"11")
    sub = await js.pull_subscribe_bind("c", name)
    assert seqs(await fetch(sub, 1)) == [11]


@each("consumer", [False, True])
async def test_an_unknown_stream_or_consumer_is_an_error_at_once(
    js: JetStreamContext, nc: Client, ten: Any, consumer: bool, leak_check: Any
) -> None:
    name = await ten()
    sent = nc.stats["out_msgs"]
    with pytest.raises(nats.js.errors.NotFoundError) as missing:
        await jsx.reset_consumer(js, *((name, "nope") if consumer else ("NOPE", "c")))
    assert nc.stats["out_msgs"] == sent + 1  # the request that no server answers is not sent
    assert missing.value.err_code == (10014 if consumer else 10059)
    with pytest.raises(nats.js.errors.NotFoundError):
        await jsx.reset_consumer(js, *((name, "nope") if consumer else ("NOPE", "c")), time=datetime.now(UTC))
    await leak_check.assert_clean()


@each("policy", [DeliverPolicy.LAST, DeliverPolicy.NEW, DeliverPolicy.LAST_PER_SUBJECT])
async def test_deliver_policies_that_forbid_a_sequence_are_refused(
    js: JetStreamContext, ten: Any, policy: DeliverPolicy
) -> None:
    subject = ">" if policy is DeliverPolicy.LAST_PER_SUBJECT else None
    name = await ten(ConsumerConfig(name="c", durable_name="c", deliver_policy=policy, filter_subject=subject))
    with pytest.raises(ConsumerInvalidResetError) as refused:
        await jsx.reset_consumer(js, name, "c", seq=3)
    assert isinstance(refused.value, nats.js.errors.ConsumerInvalidResetError)
    assert (refused.value.code, refused.value.err_code) == (400, 10204)
    with pytest.raises(ConsumerInvalidResetError):
        await jsx.reset_consumer(js, name, "c", time=datetime.now(UTC))
    await jsx.reset_consumer(js, name, "c")


@each(
    "wrong",
    [
        {"seq": 0},
        {"seq": -1},
        {"seq": 2**64},
        {"seq": True},
        {"seq": 1.0},
        {"seq": "3"},
        {"time": datetime(2026, 1, 1)},  # noqa: DTZ001
        {"seq": 1, "time": datetime.now(UTC)},
        {"timeout": 0},
        {"timeout": -1},
    ],
)
async def test_invalid_arguments_are_refused_before_any_request(
    js: JetStreamContext, wrong: dict[str, Any], leak_check: Any
) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each has its own text
        await jsx.reset_consumer(js, "S", "c", **wrong)
    with pytest.raises(ValueError, match="name"):
        await jsx.reset_consumer(js, "S.x", "c")
    with pytest.raises(ValueError, match="name"):
        await jsx.reset_consumer(js, "S", "")
    with pytest.raises(TypeError):
        await jsx.reset_consumer(js, "S", "c", time="2026-01-01T00:00:00Z")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        await jsx.reset_consumer("js", "S", "c")  # type: ignore[arg-type]
    await leak_check.assert_clean()


class FakeApi:
    """A JetStream API with canned answers under its own prefix."""

    def __init__(self, nc: Client, answering: Client, prefix: str) -> None:
        self.asked: list[str] = []
        self.js = nc.jetstream(prefix=prefix, timeout=SLACK)
        self._prefix = prefix
        self._nc = answering

    async def answer(self, what: str, payload: bytes | None) -> None:
        async def reply(msg: Msg) -> None:
            self.asked.append(msg.subject.removeprefix(f"{self._prefix}."))
            if payload is not None:
                await msg.respond(payload)

        await self._nc.subscribe(f"{self._prefix}.{what}", cb=reply)
        await self._nc.request("$JS.API.INFO", timeout=SLACK)  # nats-py's flush() overtakes the subscription


@pytest.fixture
async def fake(nc: Client, server: NatsServer, stream_name: Callable[[], str]) -> AsyncIterator[FakeApi]:
    answering = await nats.connect(server.url, connect_timeout=10)
    try:
        yield FakeApi(nc, answering, stream_name())
    finally:
        await answering.close()


def with_level(level: int | None) -> bytes:
    metadata = "" if level is None else f'"metadata":{{"_nats.level":"{level}","_nats.ver":"2.{level}.x"}}'
    return b'{"name":"c","config":{%b}}' % metadata.encode()


async def test_the_server_of_the_consumer_decides_whether_reset_is_supported(fake: FakeApi) -> None:
    await fake.answer("CONSUMER.RESET.>", None)
    for stream, level in (("S0", None), ("S1", 1), ("S3", 3)):
        await fake.answer(f"CONSUMER.INFO.{stream}.>", with_level(level))
        with pytest.raises(UnsupportedFeatureError, match=r"2\.14") as old:
            await jsx.reset_consumer(fake.js, stream, "c", seq=3)
        assert (old.value.feature, old.value.required_api_level) == ("consumer reset", 4)
        assert fake.asked[-1] == f"CONSUMER.INFO.{stream}.c"


async def test_the_timeout_covers_the_whole_call(fake: FakeApi, leak_check: Any) -> None:
    await fake.answer("CONSUMER.INFO.>", with_level(4))
    await fake.answer("CONSUMER.RESET.>", None)
    timeout = 0.05
    while "CONSUMER.RESET.S.c" not in fake.asked:  # the first answer may be slow on a busy machine
        timeout *= 2
        with pytest.raises(RequestTimeoutError, match=rf"within {timeout:g} s") as late:
            await jsx.reset_consumer(fake.js, "S", "c", timeout=timeout)
    assert "CONSUMER.RESET.S.c" in str(late.value)
    assert isinstance(late.value, nats.errors.TimeoutError)
    await leak_check.assert_clean()


async def test_cancellation_leaves_nothing_behind(fake: FakeApi, leak_check: Any) -> None:
    await fake.answer("CONSUMER.INFO.>", None)
    task = asyncio.create_task(jsx.reset_consumer(fake.js, "S", "c", timeout=SLACK))
    async with asyncio.timeout(SLACK):
        while not fake.asked:
            await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await leak_check.assert_clean()


# -- nats-py's subscribers, and a reset made by another process -------------------------------------------------------


# -- under load -------------------------------------------------------------------------------------------------------


async def test_resets_under_load_lose_no_message(
    js: JetStreamContext, server: NatsServer, make_stream: MakeStream
) -> None:
    """Three fetchers work during many resets: every message above the last floor is delivered."""
    name = await make_stream()
    config = ConsumerConfig(name="c", durable_name="c", ack_policy=AckPolicy.EXPLICIT, ack_wait=5, max_ack_pending=500)
    await js.add_consumer(name, config)
    generation = 0
    delivered: list[tuple[int, int]] = []  # (number of confirmed resets, sequence)
    stop = asyncio.Event()
    chance = random.Random(8)

    async def work(js: JetStreamContext) -> None:
        sub = await js.pull_subscribe_bind("c", name)
        while not stop.is_set():
            try:
                msgs = await sub.fetch(50, timeout=0.5)
            except TimeoutError:  # from nats-py or from asyncio
                continue
            for msg in msgs:
                delivered.append((generation, msg.metadata.sequence.stream))
                await msg.ack()
        await sub.unsubscribe()

    async def publish() -> None:
        async with jsx.FastPublisher(js) as publisher:
            for number in range(MESSAGES):
                await publisher.add(f"{name}.x", b"%d" % number)
                if number % 100 == 0:
                    await asyncio.sleep(0.005)

    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        for _ in range(3):
            nc = await nats.connect(server.url, connect_timeout=10)
            stack.push_async_callback(nc.close)
            group.create_task(work(nc.jetstream(timeout=SLACK)))
        publishing = group.create_task(publish())
        floor = 0
        for number in range(RESETS):
            last = (await js.stream_info(name)).state.last_seq
            # To random sequences, and sometimes to the ack floor, which only the fetchers move.
            seq = chance.randint(1, last + 20) if number % 5 and last else None
            if number == RESETS - 1:
                seq = max(1, last // 2)
            reset = await jsx.reset_consumer(js, name, "c", seq=seq)
            generation += 1
            floor = reset.reset_seq - 1
            await asyncio.sleep(0.05)  # let the fetchers work between two resets
        await publishing
        # The first message after the last reset can arrive before the answer to that reset.
        wanted = set(range(floor + 1, MESSAGES + 1))
        async with asyncio.timeout(2 * SLACK):
            # A fetcher can hold a message that was acknowledged before the reset, so both conditions are needed.
            while not {seq for when, seq in delivered if when >= RESETS - 1} >= wanted:
                await asyncio.sleep(0.05)
            while True:
                info = await js.consumer_info(name, "c")
                if info.ack_floor.stream_seq == MESSAGES and not info.num_pending and not info.num_ack_pending:
                    break
                await asyncio.sleep(0.05)
        stop.set()
    assert generation == RESETS
