"""What ``bench`` measures: this library and plain nats-py, in turn, on a scratch stream of its own."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import nats.errors
import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig
from nats.nuid import NUID

from jetstream_ext.client.atomic import publish_atomic
from jetstream_ext.client.context import Context
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.client.fast import FastPublisher
from jetstream_ext.client.features import Features
from jetstream_ext.protocol import feature_table
from jetstream_ext.protocol.feature_table import Feature
from jetstream_ext.types import BatchMessage

_ATOMIC: Final = 500  # messages per batch; a server takes 1,000 unless it is configured to take fewer
_FETCH: Final = 500
_GOODBYE: Final = 5.0
_LOOK_EVERY: Final = 0.5
_SUBJECTS: Final = 10
_ONE_BY_ONE: Final = 50  # what waits for each answer gets this part of the messages
_WINDOWED: Final = 5


@dataclass(slots=True)
class Case:
    """One row of the table.

    Attributes:
        name: The call.
        group: ``publish`` or ``read``.
        ours: Whether it is this library's.
        needs: What the server must have for it.
        run: Moves messages, and returns how many.
        rates: Messages per second, of each round.
    """

    name: str
    group: str
    ours: bool
    needs: Feature | None
    run: Callable[[], Coroutine[object, object, int]]
    rates: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median of the rates."""
        return statistics.median(self.rates)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a bench found.

    Attributes:
        version: The server's version.
        cases: What was measured.
        left_out: What the server cannot do.
    """

    version: str
    cases: tuple[Case, ...]
    left_out: tuple[Case, ...]

    def base(self, group: str) -> Case:
        """Return the fastest of nats-py's calls in a group."""
        return max((case for case in self.cases if case.group == group and not case.ours), key=lambda case: case.median)


@asynccontextmanager
async def scratch(js: JetStreamContext, found: Features, on_left: Callable[[str], None]) -> AsyncIterator[str]:
    """Make a stream that is this block's own, and delete it at the end, however the block ends.

    Args:
        js: The JetStream.
        found: What its server can do.
        on_left: Called with the stream's name if it could not be deleted.
    """
    name = f"JSX_BENCH_{NUID().next().decode()}"
    # A server that does not know an option may refuse it.
    options: dict[str, Any] = {
        feature.option: True
        for feature in (feature_table.DIRECT_GET, feature_table.ATOMIC, feature_table.FAST_INGEST)
        if feature.at(found.api_level)
    }
    try:
        await js.add_stream(
            name=name,
            subjects=[f"{name}.*"],
            description="Scratch of `jetstream-ext bench`; nobody needs it.",
            **options,
        )
        yield name
    finally:
        # Also after a creation that was not answered: it may have happened, and the name is nobody else's.
        try:
            async with asyncio.timeout(_GOODBYE):
                await js.delete_stream(name)
        except nats.js.errors.NotFoundError:
            pass
        except (nats.errors.Error, OSError):
            on_left(name)


async def measure(
    js: JetStreamContext,
    found: Features,
    stream: str,
    messages: int,
    size: int,
    rounds: int,
    tell: Callable[[float, int], None],
) -> Outcome:
    """Run every case once per round, in turn, so that a machine that slows down slows them all.

    Args:
        js: The JetStream.
        found: What its server can do.
        stream: An empty stream that takes the subjects ``<stream>.*``.
        messages: How many messages the fastest calls move; slower ones move a part of that.
        size: Bytes per payload.
        rounds: How often; one more round before these warms up.
        tell: Called after each case with the share of the work that is done, and the messages moved so far.

    Raises:
        ConnectionClosedError: nats-py's: the connection was lost, so the figures would be none.
    """
    cases = _Cases(js, stream, messages, size)
    every = cases.all()
    able = [case for case in every if case.needs is None or case.needs.at(found.api_level)]
    done = moved = 0
    for number in range(rounds + 1):
        await cases.start_anew()
        for case in able:
            start = time.perf_counter()
            count = await _while_connected(js, case)
            elapsed = time.perf_counter() - start
            if number:
                case.rates.append(count / elapsed)
            done, moved = done + 1, moved + count
            tell(done / (len(able) * (rounds + 1)), moved)
    return Outcome(found.server_version, tuple(able), tuple(case for case in every if case not in able))


async def _while_connected(js: JetStreamContext, case: Case) -> int:
    """Run a case as long as there is a connection: some of nats-py's calls wait for ever without one."""
    client = Context(js).nc
    this = asyncio.current_task()
    if this is not None and this.cancelling():
        # Ctrl-C came while nats-py waited for an answer that was just there; see `_end`.
        raise asyncio.CancelledError
    task = asyncio.ensure_future(case.run())
    try:
        while not (await asyncio.wait({task}, timeout=_LOOK_EVERY))[0]:
            if not client.is_connected:
                raise nats.errors.ConnectionClosedError
        return task.result()
    finally:
        await _end(task)


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel until it ends: before Python 3.12, a call whose answer is just there swallows its cancellation."""
    loop = asyncio.get_running_loop()
    end = loop.time() + _GOODBYE
    while not task.done() and loop.time() < end:
        task.cancel()
        await asyncio.wait({task}, timeout=_LOOK_EVERY)
    if task.done() and not task.cancelled():
        task.exception()  # publish_async makes another error of its cancellation


class _Cases:
    """The cases. Those that read come after those that publish: they read what these left."""

    def __init__(self, js: JetStreamContext, stream: str, messages: int, size: int) -> None:
        self._js = js
        self._stream = stream
        self._subjects = [f"{stream}.{n}" for n in range(_SUBJECTS)]
        self._messages = messages
        self._payload = b"x" * size
        self._first = 1

    def all(self) -> list[Case]:
        return [
            Case("js.publish", "publish", False, None, self._publish),
            Case("js.publish_async", "publish", False, None, self._publish_async),
            Case("publish_atomic", "publish", True, feature_table.ATOMIC, self._publish_atomic),
            Case("FastPublisher.add_many", "publish", True, feature_table.FAST_INGEST, self._add_many),
            Case("js.get_msg(direct=True)", "read", False, None, self._get_msg),
            Case("pull_subscribe, fetch", "read", False, None, self._fetch),
            Case("DirectGet.scan", "read", True, feature_table.DIRECT_BATCH, self._scan),
        ]

    async def start_anew(self) -> None:
        """Empty the stream."""
        await self._js.purge_stream(self._stream)
        self._first = (await self._js.stream_info(self._stream)).state.last_seq + 1

    def _some(self, count: int) -> Iterator[tuple[str, bytes]]:
        return ((self._subjects[n % _SUBJECTS], self._payload) for n in range(count))

    async def _publish(self) -> int:
        count = max(1, self._messages // _ONE_BY_ONE)
        for subject, payload in self._some(count):
            await self._js.publish(subject, payload)
        return count

    async def _publish_async(self) -> int:
        count = max(1, self._messages // _WINDOWED)
        acks = [await self._js.publish_async(subject, payload) for subject, payload in self._some(count)]
        await self._js.publish_async_completed()
        return len(await asyncio.gather(*acks))

    async def _publish_atomic(self) -> int:
        batches = max(1, self._messages // _WINDOWED // _ATOMIC)
        batch = [BatchMessage(subject, payload) for subject, payload in self._some(_ATOMIC)]
        for _ in range(batches):
            await publish_atomic(self._js, batch)
        return batches * _ATOMIC

    async def _add_many(self) -> int:
        async with FastPublisher(self._js) as publisher:
            await publisher.add_many(self._some(self._messages))
        return self._messages

    async def _get_msg(self) -> int:
        count = max(1, self._messages // _ONE_BY_ONE)
        for seq in range(self._first, self._first + count):
            await self._js.get_msg(self._stream, seq, direct=True)
        return count

    async def _fetch(self) -> int:
        """What reads much with nats-py today; without acknowledgements it is fastest."""
        count, read = max(1, self._messages // _WINDOWED), 0
        config = ConsumerConfig(ack_policy=AckPolicy.NONE, mem_storage=True)
        subscription = await self._js.pull_subscribe(f"{self._stream}.*", stream=self._stream, config=config)
        try:
            while read < count:
                read += len(await subscription.fetch(min(_FETCH, count - read)))
        finally:
            await subscription.unsubscribe()
        return read

    async def _scan(self) -> int:
        count = 0
        async with DirectGet(self._js, self._stream).scan() as messages:
            async for _ in messages:
                count += 1
        return count
