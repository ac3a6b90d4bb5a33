"""Many atomic batches, with several commits in flight."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Generator, Iterable
from contextlib import aclosing
from typing import Any, Self

from nats.js import JetStreamContext

from jetstream_ext.client.atomic_session import AtomicSession
from jetstream_ext.client.context import Context
from jetstream_ext.types import BatchAck, Entry

Messages = Iterable[Entry] | AsyncIterable[Entry]


class AtomicBatches:
    """The acks of many batches, in order; made by `publish_atomic_many`.

    Await it for the list of acks, or iterate over it: then a batch is taken from the source when fewer than `in_flight`
    commits are unanswered, and each ack is known as it comes. Close an iteration that ends early with `aclose`.
    """

    def __init__(self, acks: AsyncGenerator[BatchAck, None]) -> None:
        self._acks = acks
        self._listed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> BatchAck:
        return await self._acks.__anext__()

    def __await__(self) -> Generator[Any, None, list[BatchAck]]:
        return self.to_list().__await__()

    async def to_list(self) -> list[BatchAck]:
        """Publish everything and return all acks.

        Raises:
            RuntimeError: It was awaited before.
            BatchError, UnsupportedFeatureError: As for `publish_atomic_many`.

        Cancellation: As for `publish_atomic_many`.
        """
        if self._listed:
            raise RuntimeError("these batches were published already: call publish_atomic_many again")
        self._listed = True
        try:
            return [ack async for ack in self._acks]
        finally:
            await self._acks.aclose()

    async def aclose(self) -> None:
        """Take no more batches; those whose commit was sent may still be stored.

        Cancellation: As for `publish_atomic_many`.
        """
        await self._acks.aclose()


def publish_atomic_many(
    js: JetStreamContext,
    batches: Iterable[Messages] | AsyncIterable[Messages],
    *,
    in_flight: int = 4,
    timeout: float | None = None,
) -> AtomicBatches:
    """Store many batches, each of them whole or not at all, with several commits in flight.

    ``acks = await publish_atomic_many(js, batches)``, or ``async for ack in publish_atomic_many(js, batches)``. The
    batches are committed in their order, and the acks come in that order. If a batch fails, no further one is started,
    and the error is raised when the commits in flight are answered: **they may be stored**, although an earlier batch is
    not (a note on the error says which). For "all in order or stop" use `publish_atomic` in a loop.

    Args:
        js: nats-py's JetStream context.
        batches: Each of them the messages of one batch, as for `publish_atomic`; from an iterable or an async one.
        in_flight: How many commits may be unanswered, from 1. Each open batch counts against the server's limits.
        timeout: Seconds to wait for each reply; None is the context's timeout.

    Returns:
        An awaitable of all acks, and an async iterator over them.

    Raises:
        ValueError, TypeError: An argument is out of its range or of another type.
        EmptyBatchError, BatchOutcomeUnknownError, BatchError, UnsupportedFeatureError: As for `publish_atomic`; raised
            when the result is awaited or iterated.

    Cancellation: Batches whose commit was sent may still be stored, and no others; nothing is left behind.

    Requires: nats-server 2.12 and ``allow_atomic`` on the stream.
    """
    if isinstance(in_flight, bool) or not isinstance(in_flight, int) or in_flight < 1:
        raise ValueError(f"in_flight must be an integer from 1 up, not {in_flight!r}")
    context = Context(js)
    return AtomicBatches(_publish(context, batches, in_flight, context.resolve_timeout(timeout)))


async def _publish(
    context: Context,
    batches: Iterable[Messages] | AsyncIterable[Messages],
    in_flight: int,
    timeout: float | None,
) -> AsyncGenerator[BatchAck, None]:
    commits: deque[AtomicSession] = deque()
    try:
        async with aclosing(_each(batches)) as source:
            async for batch in source:
                while len(commits) >= in_flight:
                    yield await _oldest(commits)
                commits.append(await _begin(context, batch, timeout))
                while commits and commits[0].answered:
                    yield await _oldest(commits)
        while commits:
            yield await _oldest(commits)
    except Exception as error:
        if commits:
            fates = await asyncio.gather(*(commit.committed() for commit in commits), return_exceptions=True)
            error.add_note("batches whose commit was in flight: " + ", ".join(map(_fate, fates)))
        raise
    finally:
        for commit in commits:
            commit.discard()


async def _begin(context: Context, messages: Messages, timeout: float | None) -> AtomicSession:
    """Send a batch and its commit."""
    session = AtomicSession(context, timeout=timeout, in_one_go=True)
    try:
        await session.fill(messages)
        await session.send_commit(None)  # in the same write as the messages, if they are few
    except BaseException:
        session.discard()
        raise
    return session


async def _oldest(commits: deque[AtomicSession]) -> BatchAck:
    commit = commits.popleft()
    try:
        return await commit.committed()
    finally:
        commit.discard()


def _fate(result: BatchAck | BaseException) -> str:
    return f"{result.batch_id} stored" if isinstance(result, BatchAck) else f"{result!r}"


async def _each(batches: Iterable[Messages] | AsyncIterable[Messages]) -> AsyncGenerator[Messages, None]:
    if isinstance(batches, AsyncIterable):
        async for batch in batches:
            yield batch
    else:
        for batch in batches:
            yield batch
