"""Which rows of an attempt the transactional sink stores: a model of a partition, whose attempts end anywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine, Generator, Iterator, Sequence
from types import SimpleNamespace, coroutine
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.spark import transactional
from jetstream_ext.spark.markers import Marker, ReplayError, decode
from jetstream_ext.spark.rows import Rows, digests_of
from jetstream_ext.spark.transactional import Transactions


def message(data: bytes) -> StoredMsg:
    return StoredMsg(stream="S", subject="_spark.S.q.0", seq=7, data=data)


@coroutine
def switch() -> Generator[None, None, None]:
    """Let other attempts run."""
    yield


class Partition:
    """What a stream holds of a partition."""

    def __init__(self, rollup: bool = False, limit: int = 1 << 30) -> None:
        self.rollup = rollup
        self.limit = limit  # how many markers it keeps
        self.rows: Counter[bytes] = Counter()
        self.markers: dict[int, Marker] = {}  # by sequence
        self.last_seq = 0


class ModelRecord:
    """As `StoredRecord`, for the markers of a `Partition`."""

    what, subject = "partition 0 of micro-batch 0", "_spark.S.q.0"

    def __init__(self, of: Any, *_: Any) -> None:
        self.of = of
        self.last, self.seq = Marker(), 0

    async def read(self) -> None:
        await switch()
        markers = self.of.partition.markers
        self.seq = max(markers, default=0)
        self.last = markers.get(self.seq, Marker())
        assert self.last.batch <= self.of.batch

    async def read_at(self, seq: int) -> Marker | None:
        await switch()
        found: Marker | None = self.of.partition.markers.get(seq)
        return found

    async def store(self, messages: Sequence[Any], record: Marker, *, keep: bool) -> bool:
        await switch()
        partition = self.of.partition
        if max(partition.markers, default=0) != self.seq:
            await self.read()
            return False
        if partition.rollup and not keep:
            partition.markers.clear()
        partition.rows.update(data for _, data in messages)
        partition.last_seq += len(messages) + 1
        self.seq = partition.last_seq
        partition.markers[self.seq] = self.last = decode(Marker, message(record.encode()))
        assert self.last == record
        for seq in sorted(partition.markers)[: -partition.limit]:
            del partition.markers[seq]
        await switch()  # the answer may be lost with the attempt
        return True


@pytest.fixture(autouse=True, scope="module")
def _without_a_server() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transactional, "StoredRecord", ModelRecord)
        patch.setattr(transactional, "most_rows", lambda *_: 999)
        yield


def rows_of(rows: Sequence[int]) -> Rows:
    return Rows(["S.a"] * len(rows), [b"%d" % row for row in rows])


async def attempt(partition: Partition, batch: int, rows: Sequence[int], size: int) -> int:
    """Run an attempt at a partition; return how many rows it has skipped."""
    transactions = Transactions(
        SimpleNamespace(
            partition=partition,
            batch=batch,
            partitions=0,
            context=None,
            options=SimpleNamespace(transaction_rows=999),
            state=None,
        ),
        0,
    )  # type: ignore[arg-type]
    await transactions.open()
    for first in range(0, len(rows), size):
        await transactions.store(transactions.next(rows_of(rows[first : first + size])))
    transactions.check_end()
    return transactions.skipped


def run(work: Coroutine[Any, Any, Any], steps: int = 1 << 30) -> Any:
    """Run some steps of an attempt; return its result, or None if it has not ended."""
    try:
        for _ in range(steps):
            work.send(None)
    except StopIteration as end:
        return end.value
    return None


ROWS = st.lists(st.integers(0, 4), max_size=12)
ATTEMPT = st.tuples(ROWS, st.integers(1, 5), st.integers(0, 12))  # its rows, their number per transaction, its steps


@settings(max_examples=300)
@given(st.booleans(), st.lists(st.lists(ATTEMPT, min_size=1, max_size=5), max_size=3))
def test_attempts_that_end_anywhere_store_every_row_of_the_last_one_once(
    rollup: bool, batches: list[list[tuple[list[int], int, int]]]
) -> None:
    partition = Partition(rollup)
    for batch, attempts in enumerate(batches):
        before = partition.rows.copy()
        most: Counter[bytes] = Counter()  # of equal rows in one attempt
        for rows, size, steps in attempts[:-1]:
            most |= Counter(b"%d" % row for row in rows)
            work = attempt(partition, batch, rows, size)
            run(work, steps)
            work.close()
        rows, size, _ = attempts[-1]
        last = Counter(b"%d" % row for row in rows)
        already = partition.rows - before
        assert run(attempt(partition, batch, rows, size)) == sum((already & last).values())
        assert partition.rows == before + (already | last)
        assert already <= most


def run_at_once(partition: Partition, attempts: list[tuple[list[int], int]], turns: list[int]) -> None:
    running = [attempt(partition, 0, rows, size) for rows, size in attempts]
    for turn in [*turns, *[0] * 1000]:
        if not running:
            return
        work = running[turn % len(running)]
        if run(work, 1) is not None:
            running.remove(work)
    pytest.fail("the attempts do not end")


SIZES = st.lists(st.integers(1, 5), min_size=2, max_size=3)
TURNS = st.lists(st.integers(0, 2), max_size=60)


@settings(max_examples=300)
@given(st.lists(st.tuples(ROWS, st.integers(1, 5)), min_size=2, max_size=3), TURNS)
def test_attempts_at_once_store_every_row_once(attempts: list[tuple[list[int], int]], turns: list[int]) -> None:
    partition = Partition(rollup=True)
    run_at_once(partition, attempts, turns)
    most: Counter[bytes] = Counter()
    for rows, _ in attempts:
        most |= Counter(b"%d" % row for row in rows)
    assert partition.rows == most


@settings(max_examples=300)
@given(ROWS, SIZES, TURNS, st.integers(1, 3))
def test_attempts_at_once_with_the_same_rows_need_only_the_newest_marker(
    rows: list[int], sizes: list[int], turns: list[int], limit: int
) -> None:
    partition = Partition(limit=limit)
    run_at_once(partition, [(rows, size) for size in sizes], turns)
    assert partition.rows == Counter(b"%d" % row for row in rows)


@settings(max_examples=300)
@given(ROWS, st.lists(st.tuples(st.integers(1, 5), st.integers(0, 12), st.integers(1, 4)), max_size=4))
def test_the_same_rows_are_recognised_whatever_markers_are_left(
    rows: list[int], attempts: list[tuple[int, int, int]]
) -> None:
    partition = Partition()
    for size, steps, left in attempts:
        work = attempt(partition, 0, rows, size)
        run(work, steps)
        work.close()
        for seq in sorted(partition.markers)[:-left]:
            del partition.markers[seq]
    run(attempt(partition, 0, rows, 3))
    assert partition.rows == Counter(b"%d" % row for row in rows)


def marker(**fields: Any) -> bytes:
    digests = Marker(0, 2, "d", digests_of(rows_of([1, 2])), 3).encode()
    return orjson.dumps(orjson.loads(digests) | fields)


def test_a_malformed_marker_is_refused(cell: Any) -> None:
    for data in [
        b"[]",
        marker(v=3),
        marker(v=2.0),
        marker(rows=1),
        marker(rows=-2),
        marker(digests=""),
        marker(digests="AAAA"),
        marker(digests="A" * 15 + "!"),
        marker(digests=None),
        marker(previous="3"),
    ]:
        with cell(data):
            assert decode(Marker, message(marker())).previous == 3
            with pytest.raises(ReplayError, match=r"message 7 on '_spark\.S\.q\.0' is not a marker of this sink"):
                decode(Marker, message(data))


def test_a_marker_that_names_itself_ends_the_chain() -> None:
    partition = Partition()
    assert run(attempt(partition, 0, [1, 2], 2)) == 0
    (seq, last), *_ = partition.markers.items()
    partition.markers[seq] = Marker(0, 2, last.digest, last.digests, previous=seq)
    assert run(attempt(partition, 0, [2, 1], 2)) == 2
