"""The measurements of ``bench``: this library and plain nats-py in turn, on a scratch stream."""

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
from jetstream_ext.client.base_connection import mark_retrieved
from jetstream_ext.client.context import Context
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.client.fast import FastPublisher
from jetstream_ext.client.features import Features
from jetstream_ext.protocol import feature_table
from jetstream_ext.protocol.feature_table import Feature
from jetstream_ext.types import BatchMessage

_ATOMIC_BATCH: Final = 500  # servers accept 1,000 by default
_FETCH: Final = 500
_CLOSE_TIMEOUT: Final = 5.0
_POLL: Final = 0.5
_SUBJECTS: Final = 10
_SYNCHRONOUS_SHARE: Final = 50  # calls that wait for each answer move this fraction of the messages
_WINDOWED_SHARE: Final = 5


@dataclass(slots=True)
class Case:
    """One row of the table: a call, and the messages per second of each round."""

    name: str
    group: str
    ours: bool
    needs: Feature | None
    run: Callable[[], Coroutine[object, object, int]]
    """Moves messages and returns their number."""
    rates: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median of the rates."""
        return statistics.median(self.rates)

    @property
    def least(self) -> float:
        """The lowest rate."""
        return min(self.rates)

    @property
    def most(self) -> float:
        """The highest rate."""
        return max(self.rates)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The measured cases, and those that the server of this version lacks."""

    version: str
    cases: tuple[Case, ...]
    left_out: tuple[Case, ...]

    def base(self, group: str) -> Case:
        """Return the fastest of nats-py's calls in a group."""
        return max((case for case in self.cases if case.group == group and not case.ours), key=lambda case: case.median)


@asynccontextmanager
async def scratch(js: JetStreamContext, found: Features, on_left: Callable[[str], None]) -> AsyncIterator[str]:
    """Create a stream for the duration of a block; call `on_left` with its name if it cannot be deleted."""
    name = f"JSX_BENCH_{NUID().next().decode()}"
    # Servers may refuse options that they do not know.
    options: dict[str, Any] = {
        feature.option: True
        for feature in (feature_table.DIRECT_GET, feature_table.ATOMIC, feature_table.FAST_INGEST)
        if feature.at(found.api_level)
    }
    try:
        description = "Temporary stream of `jetstream-ext bench`; safe to delete."
        await js.add_stream(name=name, subjects=[f"{name}.*"], description=description, **options)
        yield name
    finally:
        # Even if the creation was not answered: it may have happened, and the name is unique.
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT):
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
    on_progress: Callable[[float, int], None],
) -> Outcome:
    """Run every case once per round, in turn, so that a machine that slows down slows all of them.

    One more round warms up. `messages` are those of the fastest calls; slower calls move a fraction of them.
    `on_progress` is called after each case with the share of the work done, and the number of messages moved so far.
    """
    cases = _Cases(js, stream, messages, size)
    every = cases.all()
    able = [case for case in every if case.needs is None or case.needs.at(found.api_level)]
    done = moved = 0
    for number in range(rounds + 1):
        await cases.empty_stream()
        for case in able:
            start = time.perf_counter()
            count = await _while_connected(js, case)
            elapsed = time.perf_counter() - start
            if number:
                case.rates.append(count / elapsed)
            done, moved = done + 1, moved + count
            on_progress(done / (len(able) * (rounds + 1)), moved)
    return Outcome(found.server_version, tuple(able), tuple(case for case in every if case not in able))


async def _while_connected(js: JetStreamContext, case: Case) -> int:
    """Run a case until it ends or the connection is lost: some of nats-py's calls then never return."""
    client = Context(js).nc
    this = asyncio.current_task()
    if this is not None and this.cancelling():
        # nats-py swallowed the cancellation; see `_cancel`.
        raise asyncio.CancelledError
    task = asyncio.ensure_future(case.run())
    try:
        while not (await asyncio.wait({task}, timeout=_POLL))[0]:
            if not client.is_connected:
                raise nats.errors.ConnectionClosedError
        return task.result()
    finally:
        await _cancel(task)


async def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task until it ends: before Python 3.12, a call swallows a cancellation that arrives with its answer."""
    loop = asyncio.get_running_loop()
    end = loop.time() + _CLOSE_TIMEOUT
    while not task.done() and loop.time() < end:
        task.cancel()
        await asyncio.wait({task}, timeout=_POLL)
    if task.done():
        mark_retrieved(task)  # publish_async raises another error when it is cancelled


class _Cases:
    """The cases. Those that read come last: they read what the others published."""

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

    async def empty_stream(self) -> None:
        await self._js.purge_stream(self._stream)
        self._first = (await self._js.stream_info(self._stream)).state.last_seq + 1

    def _some(self, count: int) -> Iterator[tuple[str, bytes]]:
        return ((self._subjects[n % _SUBJECTS], self._payload) for n in range(count))

    async def _publish(self) -> int:
        count = max(1, self._messages // _SYNCHRONOUS_SHARE)
        for subject, payload in self._some(count):
            await self._js.publish(subject, payload)
        return count

    async def _publish_async(self) -> int:
        count = max(1, self._messages // _WINDOWED_SHARE)
        acks = [await self._js.publish_async(subject, payload) for subject, payload in self._some(count)]
        await self._js.publish_async_completed()
        return len(await asyncio.gather(*acks))

    async def _publish_atomic(self) -> int:
        batches = max(1, self._messages // _WINDOWED_SHARE // _ATOMIC_BATCH)
        batch = [BatchMessage(subject, payload) for subject, payload in self._some(_ATOMIC_BATCH)]
        for _ in range(batches):
            await publish_atomic(self._js, batch)
        return batches * _ATOMIC_BATCH

    async def _add_many(self) -> int:
        async with FastPublisher(self._js) as publisher:
            await publisher.add_many(self._some(self._messages))
        return self._messages

    async def _get_msg(self) -> int:
        count = max(1, self._messages // _SYNCHRONOUS_SHARE)
        for seq in range(self._first, self._first + count):
            await self._js.get_msg(self._stream, seq, direct=True)
        return count

    async def _fetch(self) -> int:
        """Measure nats-py's usual way to read in bulk; it is fastest without acknowledgements."""
        count, read = max(1, self._messages // _WINDOWED_SHARE), 0
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
