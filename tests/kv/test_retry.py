"""`retry_transaction`: when it runs a function again, for how long, and after a lost answer."""

import asyncio
import sys
from datetime import timedelta
from typing import Any

import nats.errors
import pytest

import jetstream_ext.kv as kvx
from jetstream_ext.client.atomic import AtomicBatch
from jetstream_ext.errors import (
    BatchAbandonedError,
    BatchOutcomeUnknownError,
    DirectGetDisabledError,
    KeyConflictError,
    NoStreamError,
    RequestTimeoutError,
    server_error,
)
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.transaction import Transaction
from jetstream_ext.protocol.api import StreamState


class Counting:
    """Adds one to a key, and counts its runs."""

    def __init__(self, *failures: Exception) -> None:
        self.runs = 0
        self.failures = list(failures)

    async def __call__(self, tx: Transaction) -> int:
        self.runs += 1
        entry = await tx.get("count")
        count = int(entry.value) + 1 if entry else 1
        tx.put("count", b"%d" % count)
        if self.failures:
            raise self.failures.pop(0)
        return count


async def test_result_is_that_of_the_committed_run(make_bucket) -> None:
    kv = await make_bucket()
    runs = 0

    async def add(tx: Transaction) -> int:
        nonlocal runs
        runs += 1
        await tx.get("a")
        if runs < 4:
            await kv.put("a", b"%d" % runs)
        tx.put("a", b"mine")
        return runs

    assert await kvx.retry_transaction(kv, add) == 4
    assert (await kv.get("a")).value == b"mine"


async def test_persistent_conflict_is_raised_after_give_up_after(make_bucket) -> None:
    kv = await make_bucket()
    runs = 0

    async def never(tx: Transaction) -> None:
        nonlocal runs
        runs += 1
        await tx.get("a")
        await kv.put("a", b"%d" % runs)
        tx.put("a", b"mine")

    loop = asyncio.get_running_loop()
    start = loop.time()
    with pytest.raises(KeyConflictError):
        await kvx.retry_transaction(kv, never, give_up_after=0.5)
    assert loop.time() - start < 20  # without it, 30 s
    assert runs > 3


async def test_conflict_with_a_condition_of_the_caller_is_not_retried(make_bucket) -> None:
    kv = await make_bucket()
    await kv.put("a", b"1")
    for operation in (lambda tx: tx.create("a", b""), lambda tx: tx.update("a", b"", last=7)):
        runs = 0

        async def once(tx: Transaction, operation: Any = operation) -> None:
            nonlocal runs
            runs += 1
            await tx.get("other")
            operation(tx)

        with pytest.raises(KeyConflictError) as caught:
            await kvx.retry_transaction(kv, once)
        assert (caught.value.keys, runs) == (("a",), 1)


@pytest.mark.parametrize(
    "failure",
    [ZeroDivisionError(), DirectGetDisabledError(), BatchOutcomeUnknownError()],
    ids=lambda failure: type(failure).__name__,
)
async def test_exception_of_the_function_ends_the_call(make_bucket, failure: Exception) -> None:
    kv = await make_bucket()
    fn = Counting(failure)
    with pytest.raises(type(failure)):
        await kvx.retry_transaction(kv, fn)
    assert fn.runs == 1
    assert (await kvx.snapshot(kv)).revision == 0


@pytest.mark.parametrize(
    "failure",
    [
        RequestTimeoutError(),
        NoStreamError(outcome="not_stored"),
        BatchAbandonedError(outcome="not_stored"),
        server_error(code=429, err_code=10167),
        nats.errors.ConnectionReconnectingError(),
        nats.js.errors.ServiceUnavailableError(),
    ],
    ids=lambda failure: type(failure).__name__,
)
@pytest.mark.parametrize("of", ["read", "commit"])
async def test_transient_errors_are_retried(
    make_bucket, monkeypatch: pytest.MonkeyPatch, failure: Exception, of: str
) -> None:
    kv = await make_bucket()
    failures = [failure] * 2
    owner, name = (Bucket, "look_up") if of == "read" else (AtomicBatch, "commit_eob")
    original = getattr(owner, name)

    async def failing(self: Any, *args: Any) -> Any:
        if failures:
            raise failures.pop()
        return await original(self, *args)

    monkeypatch.setattr(owner, name, failing)
    fn = Counting()
    assert await kvx.retry_transaction(kv, fn) == 1
    assert fn.runs == 3
    failures += [failure] * 50
    with pytest.raises(type(failure)):
        await kvx.retry_transaction(kv, Counting(), give_up_after=0.2)


async def test_function_may_commit_or_discard_itself(make_bucket) -> None:
    kv = await make_bucket()

    async def commits(tx: Transaction) -> dict[str, int]:
        tx.put("a", b"1")
        return dict(await tx.commit())

    async def discards(tx: Transaction) -> str:
        tx.put("a", b"2")
        await tx.discard()
        return "no"

    assert await kvx.retry_transaction(kv, commits) == {"a": 1}
    assert await kvx.retry_transaction(kv, discards) == "no"
    assert (await kv.get("a")).value == b"1"


async def test_invalid_give_up_after_is_refused(make_bucket) -> None:
    kv = await make_bucket(allow=False)
    for wrong, error in ((0, ValueError), (-1, ValueError), (True, TypeError)):
        with pytest.raises(error, match="give_up_after"):
            await kvx.retry_transaction(kv, Counting(), give_up_after=wrong)


class Lossy:
    """Loses the answer of the first commit (`stored`), or the commit itself."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, stored: bool, then: Any = None, resolves: bool = True
    ) -> None:
        self.stored, self.then, self.resolves = stored, then, resolves
        self.lost = self.repeated = 0
        self.commit = Transaction.commit
        repeat = Transaction.repeat

        async def lossy(tx: Transaction) -> Any:
            if self.lost:
                return await self.commit(tx)
            self.lost += 1
            if self.stored:
                await self.commit(tx)
            else:
                tx._batch_id = "lost"
                tx._messages = tx._staging.messages(msg_id=tx._batch_id)
            tx._state = "unknown"
            tx._revisions = {}
            if self.then is not None:
                await self.then()
            raise BatchOutcomeUnknownError(batch_id=tx._batch_id)

        async def counting(tx: Transaction) -> None:
            self.repeated += 1
            await repeat(tx)

        monkeypatch.setattr(Transaction, "commit", lossy)
        monkeypatch.setattr(Transaction, "repeat", counting)


class TestLostAnswers:
    @pytest.mark.parametrize("stored", [True, False])
    async def test_commit_without_an_answer_takes_effect_once(
        self, make_bucket, monkeypatch: pytest.MonkeyPatch, stored: bool
    ) -> None:
        kv = await make_bucket()
        lossy, fn = Lossy(monkeypatch, stored=stored), Counting()
        assert await kvx.retry_transaction(kv, fn) == 1
        assert (fn.runs, lossy.repeated) == (1, 1)
        assert (await kv.get("count")).value == b"1"
        assert await kvx.retry_transaction(kv, fn) == 2

    async def test_overwritten_commit_takes_effect_once(self, make_bucket, monkeypatch: pytest.MonkeyPatch) -> None:
        kv = await make_bucket()
        lossy, fn = Lossy(monkeypatch, stored=True, then=lambda: kv.put("count", b"100")), Counting()
        assert await kvx.retry_transaction(kv, fn) == 1
        assert (fn.runs, lossy.repeated) == (1, 1)
        assert (await kv.get("count")).value == b"100"

    async def test_function_runs_again_if_another_write_came_first(
        self, make_bucket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kv = await make_bucket()
        _, fn = Lossy(monkeypatch, stored=False, then=lambda: kv.put("count", b"100")), Counting()
        assert await kvx.retry_transaction(kv, fn) == 101
        assert fn.runs == 2
        assert (await kv.get("count")).value == b"101"

    async def test_commit_is_not_repeated_beyond_the_duplicate_window(
        self, make_bucket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kv = await make_bucket()
        lossy = Lossy(monkeypatch, stored=True)

        async def cannot(tx: Transaction, *, timeout: float | None = None) -> Any:
            raise BatchOutcomeUnknownError("cannot be known")

        monkeypatch.setattr(StreamState, "duplicate_window", timedelta(0))
        monkeypatch.setattr(Transaction, "resolve", cannot)
        with pytest.raises(BatchOutcomeUnknownError, match="cannot be known"):
            await kvx.retry_transaction(kv, Counting(), give_up_after=4)
        assert lossy.repeated == 0

    async def test_the_error_has_the_reason_of_the_last_whole_attempt(
        self, make_bucket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kv = await make_bucket()
        Lossy(monkeypatch, stored=True)
        times: list[float] = []

        async def cannot(tx: Transaction, *, timeout: float) -> Any:
            times.append(timeout)
            raise BatchOutcomeUnknownError(f"tried for {timeout:g} s")

        monkeypatch.setattr(StreamState, "duplicate_window", timedelta(0))
        monkeypatch.setattr(Transaction, "resolve", cannot)
        with pytest.raises(BatchOutcomeUnknownError, match="tried for"):
            await kvx.retry_transaction(kv, Counting(), give_up_after=4)
        assert times
        assert min(times) > 0.001

    async def test_outcome_is_resolved_if_the_commit_cannot_be_repeated(
        self, make_bucket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kv = await make_bucket()
        for outcome, result, runs in (("stored", 1, 1), ("not_stored", 2, 2)):
            with pytest.MonkeyPatch.context() as patch:
                Lossy(patch, stored=outcome == "stored")

                async def resolve(tx: Transaction, *, timeout: float | None = None, outcome: Any = outcome) -> Any:
                    tx._state = "committed" if outcome == "stored" else "failed"
                    return outcome

                patch.setattr(Transaction, "resolve", resolve)
                patch.setattr(Transaction, "can_repeat", False)
                fn = Counting()
                assert await kvx.retry_transaction(kv, fn) == result
                assert fn.runs == runs

    @pytest.mark.parametrize("reconnected", [True, False])
    @pytest.mark.parametrize("repeated", [True, False])
    async def test_a_commit_sent_twice_is_not_called_lost_after_a_reconnect(
        self, make_bucket, monkeypatch: pytest.MonkeyPatch, repeated: bool, reconnected: bool
    ) -> None:
        async def lost(*_: Any, **__: Any) -> Any:
            raise BatchOutcomeUnknownError("no answer")

        async def not_stored(batch: AtomicBatch, *, timeout: float | None = None) -> str:
            return "not_stored"

        bucket = Bucket(await make_bucket(), None)
        tx = Transaction(bucket, with_id=True)
        tx.put("a", b"1")
        with monkeypatch.context() as patch:
            patch.setattr(AtomicBatch, "commit_eob", lost)
            patch.setattr(AtomicBatch, "state", "unknown")
            patch.setattr(sys.modules[Transaction.__module__], "publish_unobserved", lost)
            patch.setattr(AtomicBatch, "resolve", not_stored)
            with pytest.raises(BatchOutcomeUnknownError):
                await tx.commit()
            if repeated:
                with pytest.raises(BatchOutcomeUnknownError):
                    await tx.repeat()
            if reconnected:
                patch.setattr(type(bucket.context.connection), "session", bucket.context.connection.session + 1)
            if repeated and reconnected:
                for _ in range(2):
                    with pytest.raises(BatchOutcomeUnknownError, match="sent twice and the client has reconnected"):
                        await tx.resolve()
                assert tx.state == "unknown"
            else:
                assert await tx.resolve() == "not_stored"

    async def test_plain_transaction_leaves_the_outcome_to_the_caller(
        self, make_bucket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kv = await make_bucket()
        Lossy(monkeypatch, stored=False)
        with pytest.raises(BatchOutcomeUnknownError):
            async with kvx.transaction(kv) as tx:
                tx.put("a", b"1")
        assert tx.state == "unknown"
        assert not tx.can_repeat
