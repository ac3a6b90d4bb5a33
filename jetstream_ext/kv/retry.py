"""Transactions that are run again until they succeed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import nats.errors
import nats.js.errors
from nats.js.kv import KeyValue

from jetstream_ext.client.api import LAG_PAUSE
from jetstream_ext.errors import (
    AtomicPublishIncompleteError,
    BatchAbandonedError,
    BatchOutcomeUnknownError,
    KeyConflictError,
    NoStreamError,
    RequestTimeoutError,
    ServerError,
)
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.transaction import Transaction

_Result = TypeVar("_Result")

_FIRST_PAUSE: Final = 0.004
_LONGEST_PAUSE: Final = 0.5

# What says that nothing was written, and that the reason may pass: a leader that is away, a connection that is lost.
_PASSING: Final = (
    BatchAbandonedError,
    NoStreamError,
    AtomicPublishIncompleteError,
    RequestTimeoutError,
    nats.js.errors.ServiceUnavailableError,
    nats.errors.NoRespondersError,
    nats.errors.ConnectionReconnectingError,
)


async def retry_transaction(
    kv: KeyValue,
    fn: Callable[[Transaction], Awaitable[_Result]],
    *,
    give_up_after: float = 30.0,
    timeout: float | None = None,
) -> _Result:
    """Run `fn` in a transaction and commit it; run it again, in a new one, while others change what it has read.

    Between two runs there is a random pause that doubles from 4 ms to half a second. It is also run again when the
    bucket's leader is away for a while. When the answer to a commit is lost, it is found out first whether the
    transaction was written, so that `fn` never counts twice (see "Transactions" in the documentation for what that
    needs). An exception of `fn` itself ends it, and nothing is written.

    ::

        async def withdraw(tx):
            account = await tx.get("account.7")
            tx.put("account.7", b"%d" % (int(account.value) - 10))

        await kvx.retry_transaction(kv, withdraw)

    Args:
        kv: nats-py's bucket.
        fn: Called with the `Transaction`; everything it does besides may happen more than once.
        give_up_after: Seconds after which no new run begins.
        timeout: Seconds to wait for each answer; None is the context's own.

    Returns:
        What `fn` returned in the run that was committed.

    Raises:
        KeyConflictError: There was a conflict still when the time was over.
        BatchOutcomeUnknownError: Whether the last run was written could not be found out.
        BatchError, RequestTimeoutError: The bucket could not be written to until the time was over, or refuses.
        Exception: Whatever `fn` raises.

    Cancellation: Nothing is written, unless a commit was on its way already.

    Requires: As for `transaction`.
    """
    if isinstance(give_up_after, bool) or not give_up_after > 0:
        raise ValueError(f"give_up_after must be over 0 seconds, not {give_up_after!r}")
    bucket = Bucket(kv, timeout)
    loop = asyncio.get_running_loop()
    end = loop.time() + give_up_after
    pause = _FIRST_PAUSE
    while True:
        tx = Transaction(bucket, with_id=True)
        try:
            result = await fn(tx)
            if tx.state == "open":
                await _commit(bucket, tx, end)
            return result
        except (KeyConflictError, ServerError, *_PASSING) as failure:
            passing = isinstance(failure, _PASSING)
            if isinstance(failure, KeyConflictError):
                passing = failure.stale_read
            elif isinstance(failure, ServerError):
                passing = passing or failure.retryable
            if not passing or tx.state in ("committed", "unknown") or loop.time() + pause >= end:
                raise
        finally:
            await tx.discard()
        await asyncio.sleep(random.uniform(pause / 2, pause))  # noqa: S311 - spreads, hides nothing
        await bucket.js.connection.wait_usable(max(0.001, end - loop.time()))
        pause = min(_LONGEST_PAUSE, pause * 2)


async def _commit(bucket: Bucket, tx: Transaction, end: float) -> None:
    """Commit, and where the answer is lost find out whether it was.

    Raises:
        BatchOutcomeUnknownError: That could not be found out.
        BatchAbandonedError, KeyConflictError: It was not written, nor will be.
    """
    loop = asyncio.get_running_loop()
    sent = loop.time()
    try:
        await tx.commit()
        return
    except BatchOutcomeUnknownError as error:
        unknown = error
    while loop.time() < end:
        try:
            await bucket.js.connection.wait_usable(end - loop.time())
            if tx.can_repeat and loop.time() + bucket.timeout - sent < await _duplicate_window(bucket):
                await tx.repeat()
            else:
                await tx.resolve(timeout=max(0.001, end - loop.time()))
            break
        except BatchOutcomeUnknownError as error:
            unknown = error
            if not tx.can_repeat:
                break
        except _PASSING:
            pass  # of this attempt nothing is written; the first one is still in doubt
        await asyncio.sleep(LAG_PAUSE)
    if tx.state == "unknown":
        raise unknown
    if tx.state == "failed":
        raise BatchAbandonedError(
            f"the commit of a transaction on bucket {bucket.name!r} was lost; nothing is written",
            batch_id=unknown.batch_id,
            outcome="not_stored",
        ) from unknown


async def _duplicate_window(bucket: Bucket) -> float:
    """Return for how many seconds the bucket's servers know a message id again."""
    state = await bucket.state(direct=False)
    return float(state.config.get("duplicate_window") or 0) / 1e9
