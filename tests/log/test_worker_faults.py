"""Workers that are cancelled, disconnected or doubled at any point: each input counts once, in order."""

import asyncio
import contextlib
import copy
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

import nats
import nats.js.errors
import pytest
from clients import quiet
from nats.js import JetStreamContext
from workers import MakePair, MakeStateful, Pair

import jetstream_ext as jsx
from jetstream_ext import BatchMessage, StoredMsg, errors
from jetstream_ext.client.fenced_write import FencedWriter
from jetstream_ext.testing import NatsServer
from jetstream_ext.types import Entry

publish_once = FencedWriter._publish
FAULTS = [
    "cancelled before", "cancelled behind", "lost before", "lost behind", "fails before", "fails behind", "late", "held",
]  # fmt: skip
Publication = tuple[FencedWriter, Sequence[Entry], bytes, float]


def copies(pair: Pair) -> Callable[[StoredMsg], list[BatchMessage]]:
    """Return a handler with as many outputs as the remainder of the input's sequence by 3."""
    return lambda msg: [pair.out(msg)] * (msg.seq % 3)


def expected(last: int) -> list[int]:
    return [n for n in range(1, last + 1) for _ in range(n % 3)]


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
        monkeypatch.setattr(FencedWriter, "_publish", lambda *publication: self.publish(publication))

    async def publish(self, publication: Publication) -> jsx.BatchAck:
        if self.held is not None and not self.held.done():
            # The server refuses others because of the one in its pipeline.
            raise errors.WrongLastSequenceError(code=400, err_code=10071, outcome="not_stored")
        fault = None if self.ending else self.choose(self.count)
        self.count += 1
        self.ending = False
        if fault is None:
            return await publish_once(*publication)
        self.happened.append(fault)
        what, _, when = fault.partition(" ")
        if when == "behind":
            await publish_once(*publication)
        if what in ("late", "held"):  # the message reaches the server after its sender has given up
            writer, *rest = publication
            self.late.append(asyncio.create_task(self._later(publish_once(copy.copy(writer), *rest))))
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


async def until_done(pair: Pair, **options: Any) -> int:
    """Restart a worker until it reaches the end; return the number of starts."""
    for start in range(1, 1000):
        with contextlib.suppress(asyncio.CancelledError, errors.FencedError):
            await pair.work(copies(pair), **options)
            return start
    pytest.fail("it never came to the end")


async def test_a_faulty_commit_stores_each_output_once(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commits are the claim, one in the middle, and the last one."""
    for fault, commit in itertools.product(FAULTS, (0, 1, 3)):
        case = f"{fault} at commit {commit}"
        pair = await make_pair(30)
        with monkeypatch.context() as patch:
            faulty = FaultyCommits(patch, {commit: fault}.get)
            starts = await until_done(pair, max_messages=10)
            await faulty.settle()
        assert faulty.happened == [fault], case
        assert starts == (2 if fault.startswith("cancelled") else 1), case
        assert await pair.outputs() == expected(30), case


@pytest.mark.parametrize("seed", range(4))
async def test_random_faults_store_each_output_once(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """With dead letters after one attempt, no input becomes one, if a worker that ends can store that it has ended."""
    rng = random.Random(seed)
    pair = await make_pair(200)
    letters = seed == 0
    faulty = FaultyCommits(monkeypatch, lambda _: rng.choice(FAULTS) if rng.random() < 0.5 else None, can_end=letters)
    workers = [10] if letters else [rng.randint(1, 30) for _ in range(rng.randint(1, 3))]
    dead_letter = pair.letter(1) if letters else None
    await asyncio.gather(*(until_done(pair, max_messages=most, dead_letter=dead_letter) for most in workers))
    await faulty.settle()
    assert len(faulty.happened) > 2
    assert await pair.stored("dead") == []
    assert await pair.outputs() == expected(200)


async def cancelled(work: Callable[[], Awaitable[Any]]) -> AsyncIterator[None]:
    """Start a worker and cancel it after some turns of the event loop, until it comes to its end; yield after each cancellation."""
    rng = random.Random(0)
    for stopped in itertools.count():
        task = asyncio.ensure_future(work())
        for _ in range(rng.randint(1, 80 + stopped)):
            await asyncio.sleep(0)
        task.cancel()
        try:
            await task
            return
        except asyncio.CancelledError:
            yield


async def test_a_worker_cancelled_at_any_await_loses_and_repeats_nothing(make_pair: MakePair, leak_check: Any) -> None:
    """A cancellation acts as a kill: before the handler, before the commit, or before its answer."""
    pair = await make_pair(120)
    stopped = 0
    async for _ in cancelled(lambda: pair.work(copies(pair), max_messages=7)):
        stopped += 1
        await leak_check.assert_clean()
    assert stopped > 5
    assert await pair.outputs() == expected(120)


@pytest.mark.parametrize("seed", range(4))
async def test_random_faults_leave_the_state_of_each_position(
    make_stateful: MakeStateful, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """`StatefulPair.count` checks the state at each call; outputs, state and position agree whenever the workers have ended."""
    rng = random.Random(seed)
    pair = await make_stateful(200, allow_rollup_hdrs=seed % 2 == 1)
    faulty = FaultyCommits(monkeypatch, lambda _: rng.choice(FAULTS) if rng.random() < 0.5 else None)
    workers = [rng.randint(1, 30) for _ in range(seed or 1)]
    done = 0
    while done < 200:
        ended = await asyncio.gather(*(pair.work(max_messages=most) for most in workers), return_exceptions=True)
        for end in ended:
            assert not isinstance(end, AssertionError | ValueError | errors.HistoryUnavailableError), end
        await faulty.settle()
        done = len(await pair.stored("out"))
        await pair.assert_exact(done)
    assert len(faulty.happened) > 2


async def test_a_worker_cancelled_at_any_await_has_the_state_of_its_position(
    make_stateful: MakeStateful, leak_check: Any
) -> None:
    pair = await make_stateful(120, allow_rollup_hdrs=True)
    stopped = 0
    async for _ in cancelled(lambda: pair.work(max_messages=7)):
        stopped += 1
        await leak_check.assert_clean()
        await pair.assert_exact(len(await pair.stored("out")))
    assert stopped > 5
    await pair.assert_exact(120)


async def test_a_claim_after_another_worker_committed_continues_there(
    js: JetStreamContext, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker runs to its end between this worker's read of the position and its claim."""
    pair = await make_pair(30)
    published = False

    async def publish(*publication: Any) -> jsx.BatchAck:
        nonlocal published
        if not published:
            published = True
            assert (await pair.work(copies(pair))).inputs == 30
            await jsx.publish_atomic(js, [jsx.BatchMessage(f"{pair.source}.0", b"%d" % n) for n in range(31, 41)])
        return await publish_once(*publication)

    monkeypatch.setattr(FencedWriter, "_publish", publish)
    done = await pair.work(copies(pair))
    assert (done.inputs, done.position) == (10, 41)
    assert await pair.outputs() == expected(40)


async def test_an_unexplained_refusal_raises_after_patience(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deposed leader refuses the commit, and answers with the earlier position. An attempt before may have no answer."""
    for unanswered, code, told in ((0, 10071, "is still the newest"), (1, 0, "it is not known what is stored")):
        pair = await make_pair(5)
        attempts = 0

        async def refuse(*publication: Any) -> jsx.BatchAck:
            nonlocal attempts
            if not publication[1] and unanswered:  # noqa: B023
                return await publish_once(*publication)
            attempts += 1
            if attempts <= unanswered:  # noqa: B023
                raise errors.RequestTimeoutError("no answer")
            raise errors.WrongLastSequenceError(code=400, err_code=code, outcome="not_stored")  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(FencedWriter, "_publish", refuse)
            with pytest.raises(errors.RequestTimeoutError, match=told):
                await pair.work(copies(pair), patience=3.0, dead_letter=pair.letter(1))
        assert await pair.stored("dead") == [], told


@pytest.fixture
async def reconnecting(own_server: NatsServer) -> AsyncIterator[Pair]:
    """Streams of a server that the test may kill."""
    options: dict[str, Any] = {"reconnect_time_wait": 0.05, "max_reconnect_attempts": -1, "error_cb": quiet}
    async with await nats.connect(own_server.url, connect_timeout=10, **options) as nc:
        js = nc.jetstream(timeout=30)
        for name in ("S", "T"):
            await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_atomic=True)
        yield Pair(js, "S", "T")


async def test_a_worker_survives_restarts_of_its_server(own_server: NatsServer, reconnecting: Pair) -> None:
    rng, pair = random.Random(0), reconnecting
    await jsx.publish_atomic(pair.js, [jsx.BatchMessage("S.0", b"%d" % n) for n in range(1, 801)])
    at = set(rng.sample(range(20, 780), 3))

    async def slow(msg: StoredMsg) -> list[BatchMessage]:
        if msg.seq in at:
            at.discard(msg.seq)
            await asyncio.to_thread(own_server.kill)
            await asyncio.to_thread(own_server.restart)
        return copies(pair)(msg)

    done = await pair.work(slow, pair.reader(timeout=2), max_messages=20)
    assert done.position == 801
    assert await pair.outputs() == expected(800)


async def test_a_tailing_worker_survives_lost_connections(own_server: NatsServer, reconnecting: Pair) -> None:
    pair = reconnecting
    reader = pair.reader(tail=True, timeout=2)
    task = asyncio.ensure_future(pair.work(copies(pair), reader))
    async with asyncio.timeout(240):
        for stored in (0, 10, 20):
            messages = [jsx.BatchMessage("S.0", b"%d" % n) for n in range(stored + 1, stored + 11)]
            await jsx.publish_atomic(pair.js, messages)
            while (reader.position or 0) <= stored + 10:
                await asyncio.sleep(0.02)
            await asyncio.to_thread(own_server.kill)
            await asyncio.to_thread(own_server.restart)
            while not pair.js._nc.is_connected:
                await asyncio.sleep(0.02)
        while await pair.outputs() != expected(30):
            await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
