"""Workers that are cancelled, disconnected or doubled at any point: each input counts once, in order."""

import asyncio
import copy
import itertools
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import nats
import nats.errors
import nats.js.errors
import pytest
from clients import quiet
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import BatchMessage, StoredMsg, errors
from jetstream_ext.client.fenced_write import FencedWriter
from jetstream_ext.log import DeadLetter, LogReader, dead_letters, exactly_once
from jetstream_ext.testing import NatsServer
from jetstream_ext.types import Entry

Make = Callable[..., Awaitable[str]]
publish_once = FencedWriter._publish
FAULTS = [
    "cancelled before", "cancelled behind", "lost before", "lost behind", "fails before", "fails behind", "late", "held",
]  # fmt: skip


def handler(target: str, source: str = "") -> Callable[[StoredMsg], list[BatchMessage]]:
    """Return as many outputs as the remainder of the input's sequence by 3."""
    return lambda msg: [BatchMessage(f"{target}.out", msg.data)] * (msg.seq % 3)


def expected(last: int) -> list[int]:
    return [n for n in range(1, last + 1) for _ in range(n % 3)]


async def outputs(js: JetStreamContext, name: str) -> list[int]:
    return [int(msg.data) async for msg in LogReader(js, name, subject=f"{name}.out")]


class FaultyCommits:
    """Stands in for what a fenced writer sends: some commits fail, before or after they are stored.

    With `can_end`, the commit after a cancellation, by which the worker says that it has ended, does not fail.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, choose: Callable[[int], str | None], *, can_end: bool = False
    ) -> None:
        self.choose = choose
        self.can_end = can_end
        self.ending = False
        self.count = 0
        self.happened: list[str] = []
        self.late: list[asyncio.Task[Any]] = []
        self.held: asyncio.Task[Any] | None = None
        faulty = self

        async def publish(
            writer: FencedWriter, messages: Sequence[Entry], record: bytes, timeout: float
        ) -> jsx.BatchAck:
            return await faulty.publish(writer, messages, record, timeout)

        monkeypatch.setattr(FencedWriter, "_publish", publish)

    async def publish(
        self, writer: FencedWriter, messages: Sequence[Entry], record: bytes, timeout: float
    ) -> jsx.BatchAck:
        if (
            self.held is not None and not self.held.done()
        ):  # the server refuses others because of the one in its pipeline
            raise errors.WrongLastSequenceError(code=400, err_code=10071, outcome="not_stored")
        fault = None if self.ending else self.choose(self.count)
        self.count += 1
        self.ending = False
        if fault is None:
            return await publish_once(writer, messages, record, timeout)
        self.happened.append(fault)
        what, _, when = fault.partition(" ")
        if when == "behind":
            await publish_once(writer, messages, record, timeout)
        if what in ("late", "held"):  # the message reaches the server after its sender has given up
            self.late.append(
                asyncio.create_task(self._later(publish_once(copy.copy(writer), messages, record, timeout)))
            )
        if what == "held":
            self.held = self.late[-1]
        if what == "cancelled":
            self.ending = self.can_end
            raise asyncio.CancelledError
        if what == "fails":
            raise errors.BatchAbandonedError("the connection was lost", outcome="not_stored")
        raise errors.BatchOutcomeUnknownError("no answer")

    async def _later(self, publishing: Coroutine[Any, Any, jsx.BatchAck]) -> None:
        await asyncio.sleep(random.uniform(0, 0.1))
        try:
            await publishing
        except nats.js.errors.APIError as error:
            assert error.err_code == errors.ErrorCode.WRONG_LAST_SEQUENCE  # noqa: PT017 - another commit came first

    async def settle(self) -> None:
        await asyncio.gather(*self.late)


async def until_done(js: JetStreamContext, source: str, target: str, **options: Any) -> int:
    """Restart a worker until it reaches the end; return the number of starts."""
    for start in range(1, 1000):
        try:
            await exactly_once(
                LogReader(js, source), target, handler(target), name="w", prefix=f"{target}.at", **options
            )
            return start
        except (asyncio.CancelledError, errors.FencedError):
            pass
    pytest.fail("it never came to the end")


async def test_a_faulty_commit_stores_each_output_once(
    js: JetStreamContext, make_stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commits are the claim, one in the middle, and the last one."""
    for fault, commit in itertools.product(FAULTS, (0, 1, 3)):
        case = f"{fault} at commit {commit}"
        source, target = await make_stream(30), await make_stream()
        with monkeypatch.context() as patch:
            choose = {commit: fault}.get
            faulty = FaultyCommits(patch, choose)
            starts = await until_done(js, source, target, max_messages=10)
            await faulty.settle()
        assert faulty.happened == [fault], case
        assert starts == (2 if fault.startswith("cancelled") else 1), case
        assert await outputs(js, target) == expected(30), case


def random_fault(rng: random.Random) -> Callable[[int], str | None]:
    return lambda _: rng.choice(FAULTS) if rng.random() < 0.5 else None


@pytest.mark.parametrize("seed", range(3))
async def test_random_faults_store_each_output_once(
    js: JetStreamContext, make_stream: Make, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    source, target = await make_stream(200), await make_stream()
    faulty = FaultyCommits(monkeypatch, random_fault(rng))
    workers = [rng.randint(1, 30) for _ in range(rng.randint(1, 3))]
    await asyncio.gather(*(until_done(js, source, target, max_messages=most) for most in workers))
    await faulty.settle()
    assert len(faulty.happened) > 2
    assert await outputs(js, target) == expected(200)


async def test_faults_of_commits_are_no_failures_of_inputs(
    js: JetStreamContext, make_stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dead letters after one attempt, no input becomes one, if a worker that ends can store that it has ended."""
    rng = random.Random(0)
    source, target = await make_stream(200), await make_stream()
    faulty = FaultyCommits(monkeypatch, random_fault(rng), can_end=True)
    letters = DeadLetter(f"{target}.dead", attempts=1)
    await until_done(js, source, target, max_messages=10, dead_letter=letters)
    await faulty.settle()
    assert len(faulty.happened) > 2
    assert [letter async for letter in dead_letters(js, target, letters.subject)] == []
    assert await outputs(js, target) == expected(200)


async def test_a_worker_cancelled_at_any_await_loses_and_repeats_nothing(
    js: JetStreamContext, make_stream: Make, leak_check: Any
) -> None:
    """A cancellation acts as a kill: before the handler, before the commit, or before its answer."""
    rng = random.Random(0)
    source, target = await make_stream(120), await make_stream()
    stopped = 0
    while True:
        work = exactly_once(
            LogReader(js, source), target, handler(target), name="w", prefix=f"{target}.at", max_messages=7
        )
        task = asyncio.ensure_future(work)
        for _ in range(rng.randint(1, 60 + stopped)):
            await asyncio.sleep(0)
        task.cancel()
        try:
            await task
            break
        except asyncio.CancelledError:
            stopped += 1
            await leak_check.assert_clean()
    assert stopped > 5
    assert await outputs(js, target) == expected(120)


async def test_a_claim_after_another_worker_committed_continues_there(
    js: JetStreamContext, make_stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker runs to its end between this worker's read of the position and its claim."""
    source, target = await make_stream(30), await make_stream()
    published = False

    def work(reader: LogReader) -> Awaitable[Any]:
        return exactly_once(reader, target, handler(target), name="w", prefix=f"{target}.at")

    async def publish(writer: FencedWriter, messages: Sequence[Entry], record: bytes, timeout: float) -> jsx.BatchAck:
        nonlocal published
        if not published:
            published = True
            assert (await work(LogReader(js, source))).inputs == 30
            await jsx.publish_atomic(js, [jsx.BatchMessage(f"{source}.0", b"%d" % n) for n in range(31, 41)])
        return await publish_once(writer, messages, record, timeout)

    monkeypatch.setattr(FencedWriter, "_publish", publish)
    done = await work(LogReader(js, source))
    assert (done.inputs, done.position) == (10, 41)
    assert await outputs(js, target) == expected(40)


async def test_an_unexplained_refusal_raises_after_patience(
    js: JetStreamContext, make_stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deposed leader refuses the commit, and answers with the earlier position. An attempt before may have no answer."""
    for unanswered, code, told in ((0, 10071, "is still the newest"), (1, 0, "it is not known what is stored")):
        source, target = await make_stream(5), await make_stream()
        attempts = 0

        async def refuse(
            writer: FencedWriter, messages: Sequence[Entry], record: bytes, timeout: float
        ) -> jsx.BatchAck:
            nonlocal attempts
            if not messages and unanswered:  # noqa: B023
                return await publish_once(writer, messages, record, timeout)
            attempts += 1
            if attempts <= unanswered:  # noqa: B023
                raise errors.RequestTimeoutError("no answer")
            raise errors.WrongLastSequenceError(code=400, err_code=code, outcome="not_stored")  # noqa: B023

        letters = DeadLetter(f"{target}.dead", attempts=1)
        options: dict[str, Any] = {"name": "w", "prefix": f"{target}.at", "patience": 3.0, "dead_letter": letters}
        with monkeypatch.context() as patch:
            patch.setattr(FencedWriter, "_publish", refuse)
            with pytest.raises(errors.RequestTimeoutError, match=told):
                await exactly_once(LogReader(js, source), target, handler(target), **options)
        assert [it async for it in dead_letters(js, target, f"{target}.dead")] == [], told


@pytest.fixture
async def reconnecting_nc(own_server: NatsServer) -> Any:

    nc = await nats.connect(
        own_server.url, connect_timeout=10, reconnect_time_wait=0.05, max_reconnect_attempts=-1, error_cb=quiet
    )
    yield nc
    await nc.close()


async def test_a_worker_survives_restarts_of_its_server(own_server: NatsServer, reconnecting_nc: Client) -> None:
    rng = random.Random(0)
    js = reconnecting_nc.jetstream(timeout=30)
    for name in ("S", "T"):
        await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_atomic=True)
    await jsx.publish_atomic(js, [jsx.BatchMessage("S.0", b"%d" % n) for n in range(1, 801)])
    at = set(rng.sample(range(20, 780), 3))

    async def slow(msg: StoredMsg) -> list[BatchMessage]:
        if msg.seq in at:
            at.discard(msg.seq)
            await asyncio.to_thread(own_server.kill)
            await asyncio.to_thread(own_server.restart)
        return handler("T")(msg)

    done = await exactly_once(LogReader(js, "S", timeout=2), "T", slow, name="w", prefix="T.at", max_messages=20)
    assert done.position == 801
    assert await outputs(js, "T") == expected(800)


async def test_a_tailing_worker_survives_lost_connections(own_server: NatsServer, reconnecting_nc: Client) -> None:
    js = reconnecting_nc.jetstream(timeout=30)
    for name in ("S", "T"):
        await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_atomic=True)
    reader = LogReader(js, "S", tail=True, timeout=2)
    task = asyncio.ensure_future(exactly_once(reader, "T", handler("T"), name="w", prefix="T.at"))
    stored = 0
    for _ in range(3):
        await jsx.publish_atomic(js, [jsx.BatchMessage("S.0", b"%d" % n) for n in range(stored + 1, stored + 11)])
        stored += 10
        async with asyncio.timeout(60):
            while (reader.position or 0) <= stored:
                await asyncio.sleep(0.02)
        await asyncio.to_thread(own_server.kill)
        await asyncio.to_thread(own_server.restart)
        async with asyncio.timeout(60):
            while not reconnecting_nc.is_connected:
                await asyncio.sleep(0.02)
    async with asyncio.timeout(60):
        while await outputs(js, "T") != expected(stored):
            await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
