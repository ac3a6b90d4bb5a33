"""What the sinks record: attempts that die, overlap and are repeated store each row once, or are refused by an error."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig, StreamConfig

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.client.fenced_write import FencedWriter
from jetstream_ext.errors import FencedError
from jetstream_ext.spark.ledger import MicroBatch, ReplayError, SinkError

SEEDS = int(os.environ.get("JETSTREAM_EXT_SINK_HISTORIES", "6"))
VERSION_2 = json.loads((Path(__file__).parent / "data" / "version_2.json").read_text())
Rows = Sequence[Any]


class Target:
    """A stream or bucket, the sink for it, and what is stored there."""

    def __init__(self, with_js: Any, name: str, make_sink: Any, *, bucket: bool = False, **config: Any) -> None:
        self.name, self.bucket = name, bucket
        self.prefix = f"_spark.{'KV_' * bucket}{name}.a-query"
        self._stream = f"KV_{name}" if bucket else name
        self._run, self._sink = with_js, make_sink

        async def make(js: JetStreamContext) -> None:
            if bucket:
                kv = await js.create_key_value(KeyValueConfig(bucket=name, history=64))
                await kvx.enable(kv, spark=True)
                return
            subjects = [f"{name}.*", f"_spark.{name}.>"]
            given = StreamConfig(name=name, subjects=subjects, allow_direct=True, allow_atomic=True)
            await js.add_stream(given.evolve(**config))

        with_js(make)

    def sink(self, partitions: int = 2, **options: str) -> Any:
        options = {"transactionRows": "2"} | options
        if self.bucket:
            return self._sink(self.name, **options)
        return self._sink(self.name, "transactional", sinkPartitions=f"{partitions}", **options)

    def rows(self, numbers: Rows, batch: int = 0) -> list[Any]:
        """Return rows with these numbers, and what is no number as it is."""
        of = (lambda row: f"k.{row}") if self.bucket else (lambda _: f"{self.name}.rows")
        return [(of(row), b"%d %d" % (batch, row)) if isinstance(row, int) else row for row in numbers]

    def write(
        self, parts: Sequence[Rows], *, batch: int = 0, partitions: int | None = None, **options: str
    ) -> list[Any]:
        sink = self.sink(len(parts) if partitions is None else partitions, **options)
        results: list[Any] = sink.write([self.rows(part, batch) for part in parts], batch=batch)
        return results

    def stored(self, batch: int = 0) -> list[int]:
        """Return the numbers of the rows of a micro-batch that are stored, sorted."""
        subject = f"$KV.{self.name}.>" if self.bucket else f"{self.name}.*"
        found = self._run(lambda js: jsx.DirectGet(js, self._stream).scan(subject=subject, confirm=True).to_list())
        pairs = [one.data.split() for one in found]
        return sorted(int(row) for of, row in pairs if int(of) == batch)

    def publish(self, subject: str, data: bytes, **headers: str) -> None:
        self._run(lambda js: js.publish(subject, data, headers=headers or None))

    def purge(self, name: str) -> None:
        self._run(lambda js: js.purge_stream(self._stream, subject=f"{self.prefix}.{name}"))

    def records(self) -> dict[str, Any]:
        """Return the newest records by their names."""
        found = self._run(lambda js: jsx.DirectGet(js, self._stream).scan(subject=f"{self.prefix}.>").to_list())
        return {one.subject.removeprefix(f"{self.prefix}."): json.loads(one.data) for one in found if one.data}


@pytest.fixture(params=["stream", "bucket"])
def target(request: pytest.FixtureRequest, with_js: Any, stream_name: Any, sink: Any, kv_sink: Any) -> Target:
    bucket = request.param == "bucket"
    return Target(with_js, stream_name(), kv_sink if bucket else sink, bucket=bucket)


@pytest.fixture
def stream(with_js: Any, stream_name: Callable[[], str], sink: Any) -> Target:
    return Target(with_js, stream_name(), sink)


class DiesError(Exception):
    """The process of a task or of the driver dies."""


class History:
    """A query whose tasks and drivers die, are repeated and overlap."""

    def __init__(self, target: Target, chance: random.Random, batches: dict[int, Sequence[int]]) -> None:
        self._target, self._chance, self._batches = target, chance, batches
        self._done = -1  # the last complete micro-batch

    def run(self) -> None:
        for batch in self._batches:
            self._complete(batch)

    def _complete(self, batch: int) -> None:
        """Run a micro-batch as Spark does, until an attempt has succeeded."""
        while self._done < batch:
            try:
                if self._attempt(batch):
                    self._done = max(self._done, batch)
            except (DiesError, SinkError, FencedError):
                continue
        if self._chance.random() < 0.2:  # Spark could not record that it was done
            with suppress(DiesError, SinkError, FencedError):
                self._target.write(self._parts(batch), batch=batch)

    def _parts(self, batch: int) -> list[list[Any]]:
        rows = list(self._batches[batch])
        if self._target.bucket:
            self._chance.shuffle(rows)
        parts = [rows[part::2] for part in range(2)]
        for part in parts:
            self._chance.shuffle(part)
        return parts

    def _attempt(self, batch: int) -> bool:
        writer = self._target.sink().writer()
        results = []
        for partition, part in enumerate(self._parts(batch)):
            rows: list[Any] = list(part)
            others = [
                (0.2, DiesError()),
                (0.15, lambda partition=partition, part=part: self._task(writer, batch, partition, part)),
                (0.1, lambda: self._complete(batch)),  # the driver is replaced while this task goes on
                (0.05, lambda: [self._complete(one) for one in self._batches if one <= batch + 1]),
            ]
            for chance, event in others:
                if self._chance.random() < chance:
                    rows.insert(self._chance.randrange(len(rows) + 1), event)
            results.append(self._task(writer, batch, partition, rows))
        if None in results or self._done >= batch:
            writer.abort(results, batch)
            return False
        if self._chance.random() < 0.1:
            raise DiesError
        writer.commit(results, batch)
        return True

    def _task(self, writer: Any, batch: int, partition: int, rows: Rows) -> Any:
        """Try a task twice."""
        rows = list(rows)
        for _ in range(2):
            try:
                given = self._target.rows(rows, batch)
                return self._target.sink().task(writer, given, batch=batch, partition=partition)
            except (DiesError, SinkError, FencedError):
                rows = [row for row in rows if isinstance(row, int)]
        return None


def test_each_row_is_stored_once_whatever_dies_and_overlaps(
    cell: Any, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FencedWriter.store
    for seed in range(SEEDS):
        chance = random.Random(seed)
        # The queries of all histories have one name.
        batches = {100 * seed + number: range(chance.randrange(3, 14)) for number in range(3)}

        async def dying(writer: FencedWriter, *what: Any, chance: random.Random = chance) -> Any:
            dies = chance.random()
            if dies < 0.02:
                raise DiesError
            ack = await store(writer, *what)
            if dies > 0.98:
                raise DiesError
            return ack

        with cell(seed), monkeypatch.context() as patch:
            patch.setattr(FencedWriter, "store", dying)
            History(target, chance, batches).run()
        for batch, rows in batches.items():
            with cell(seed, batch):
                assert target.stored(batch) == list(rows)


# -- checkpoints of version 2 ---------------------------------------------------------------------------------------


def test_a_query_of_version_2_goes_on(cell: Any, with_js: Any, server: Any, sink: Any, kv_sink: Any) -> None:
    """The messages were stored by version 2: micro-batches 0 and 1, and 2, in which the second task has died."""
    parts: dict[int, list[Rows]] = {
        batch: [range(10 * batch, 10 * batch + 5), range(10 * batch + 5, 10 * batch + 10)] for batch in range(4)
    }
    for complete in (True, False):
        with cell(complete):
            target = Target(with_js, "OLD", sink)
            for subject, data in VERSION_2["stream"][: VERSION_2["stream_complete"] if complete else None]:
                target.publish(subject, data.encode())

            def write(batch: int, rows: list[Rows], target: Target = target) -> None:
                given = [[("OLD.rows", b"%d" % row) for row in part] for part in rows]
                target.sink(len(rows)).write(given, batch=batch)

            def stored(target: Target = target) -> Counter[bytes]:
                found = with_js(lambda js: jsx.DirectGet(js, "OLD").scan(subject="OLD.*").to_list())
                return Counter(one.data for one in found)

            batch = 1 if complete else 2  # which Spark repeats, in other orders
            with pytest.raises(ReplayError, match="was first stored with sinkPartitions=2, and it is 3 now"):
                write(batch, [*parts[batch], []])
            with pytest.raises(FencedError):
                write(batch - 1, parts[batch - 1])
            for number in range(batch, 4):
                write(number, [list(reversed(part)) for part in parts[number]])
            assert stored() == {b"%d" % row: 1 for row in range(40)}
            with_js(lambda js: js.delete_stream("OLD"))
    for name in ("bucket_complete", "bucket"):
        with cell(name):
            target = Target(with_js, "OLD", kv_sink, bucket=True)
            for subject, data in VERSION_2[name]:
                target.publish(subject, data.encode())
            before = 1 if name == "bucket_complete" else 2
            for batch in range(before, 4):
                target.write([[6, 4, 2, 0], [5, 3, 1]], batch=batch)
            assert all(target.stored(batch) == list(range(7)) for batch in range(before, 4))
            with_js(lambda js: js.delete_stream("KV_OLD"))


# -- records that were removed, or are of another kind ----------------------------------------------------------------


def interrupted(target: Target) -> None:
    """Store the first five rows in the second of two partitions, and fail in the first."""
    with pytest.raises(DiesError):
        target.write([[DiesError()], range(5)])


def test_markers_that_limits_have_removed_are_missed(stream: Target) -> None:
    interrupted(stream)
    stream.purge("1.0")
    for rows in (range(5), [4, 1, 0]):
        with pytest.raises(ReplayError, match=r"were removed.* purge the subject '_spark\.\w+\.a-query\.1\.>'"):
            stream.write([[7], rows])
        assert stream.stored() in ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 7])
    stream.purge("1.>")
    stream.write([[7], range(5)])
    assert stream.stored() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 7]


def test_a_retried_task_misses_a_marker(stream: Target) -> None:
    writer, rows = stream.sink(1).writer(), stream.rows([0, 1, 2, 3, DiesError()])
    with pytest.raises(DiesError):
        stream.sink(1).task(writer, rows)
    stream.purge("0.0")
    if stream.stored():
        with pytest.raises(ReplayError, match="markers of its first transactions were removed"):
            stream.sink(1).task(writer, stream.rows(range(4)))


@pytest.mark.parametrize("expired", [False, True])
def test_markers_without_their_position_are_refused(stream: Target, expired: bool) -> None:
    """The position is the oldest record of a micro-batch, so limits remove it first, and perhaps all markers of a partition."""
    interrupted(stream)
    stream.purge("_position")
    if expired:
        for name in ("_position", "0.0"):
            stream.publish(f"{stream.prefix}.{name}", b"", **{"Nats-Marker-Reason": "MaxAge"})
    with pytest.raises(ReplayError, match=r"were removed.* purge the subject '_spark\.\w+\.a-query\.>'"):
        stream.write([[9], range(5)])
    assert stream.stored() == [0, 1, 2, 3, 4]


def test_a_task_may_begin_while_another_one_claims_and_stores(stream: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = stream.sink(2)
    writer, newest, begun = sink.writer(), MicroBatch.newest, [False]

    async def after_the_other(of: MicroBatch, names: str) -> Any:
        if not begun[0]:
            begun[0] = True
            await asyncio.to_thread(sink.task, writer, stream.rows(range(5)), partition=1)
        return await newest(of, names)

    monkeypatch.setattr(MicroBatch, "newest", after_the_other)
    sink.task(writer, stream.rows(range(5, 9)))
    assert stream.stored() == list(range(9))


def test_other_messages_are_refused(cell: Any, stream: Target) -> None:
    stream.write([range(3), []])
    marker = stream.records()["0.0"]
    version_1 = {"v": 1, "batch": 1, "rows": 2, "digest": "d"}
    others: list[Any] = [
        [],
        version_1,
        *(marker | {"batch": 1} | wrong for wrong in ({"v": 4}, {"v": 3.0}, {"digests": "AAAA"})),
    ]
    others += [
        marker | {"batch": 1} | wrong for wrong in ({"digests": "A" * 15 + "!"}, {"digests": None}, {"batch": "1"})
    ]
    for body in others:
        with cell(body):
            stream.publish(f"{stream.prefix}.0.0", json.dumps(body).encode())
            with pytest.raises(ReplayError, match=r"message \d+ on '_spark\..*\.0\.0' is not a record of this sink"):
                stream.write([range(3), []], batch=1)
    assert stream.stored(1) == []


# -- the number of partitions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 2])  # the task that begins first
def test_a_number_that_was_too_small_is_corrected(stream: Target, first: int) -> None:
    parts = [range(3), range(3, 6), range(6, 9)]
    sink = stream.sink(2)
    writer = sink.writer()
    for index in (0, 1, 2) if first == 0 else (2, 0, 1):  # and then the driver dies
        expected = pytest.raises(ReplayError, match=r"index 2, .* is 2\. Nothing of .* at least 3, and restart without")
        with expected if index == 2 else nullcontext():
            sink.task(writer, stream.rows(parts[index]), partition=index)
    assert stream.stored() == list(range(6))
    with pytest.raises(ReplayError, match="has at least 3 partitions, but the option sinkPartitions is 2"):
        stream.write([range(0, 9, 2), range(1, 9, 2)])
    stream.write(parts)
    assert stream.stored() == list(range(9))


def test_fewer_partitions_than_declared_are_no_error(stream: Target) -> None:
    for batch, parts in enumerate(([range(3), range(3, 6)], [range(4)], [])):
        stream.write(parts, batch=batch, partitions=3)
        assert stream.records()["_position"]["complete"] is True
        assert stream.stored(batch) == [row for part in parts for row in part]


def test_an_attempt_in_other_partitions_is_refused(stream: Target) -> None:
    with pytest.raises(DiesError):
        stream.write([range(4), [DiesError()]])
    with pytest.raises(ReplayError, match=r"a partition with index 2.* restore that with df\.repartition"):
        stream.write([[], [], range(3, 6)], partitions=2)
    with pytest.raises(ReplayError, match="first stored with sinkPartitions=2, and it is 3 now"):
        stream.write([range(6, 9), range(3), range(3, 6)])
    stream.write([range(4), range(4, 9)])
    assert stream.stored() == list(range(9))


def test_a_repetition_in_fewer_partitions_says_that_rows_may_be_stored_twice(stream: Target) -> None:
    with pytest.raises(DiesError):
        stream.write([[], [2, 3], [4, 5], [DiesError()]])
    with pytest.raises(ReplayError, match=r"had 2 partitions\. All of them are stored\. .* may be stored twice"):
        stream.write([range(4), range(4, 9)], partitions=4)


def test_a_complete_micro_batch_is_recognised(target: Target) -> None:
    target.write([range(5), range(5, 9)])
    assert target.records()["_position"]["complete"] is True
    target.write([[3, 0], [6, 5, 8, 7]])
    assert target.stored() == list(range(9))


def test_rows_that_a_complete_micro_batch_did_not_have_are_stored(stream: Target) -> None:
    """The checkpoint was set back to before the micro-batch was planned, which then has messages that came later."""
    stream.write([range(5), range(5, 9)])
    stream.write([range(5), range(5, 12)])
    assert stream.stored() == list(range(12))
    with pytest.raises(ReplayError, match="first stored with sinkPartitions=2, and it is 3 now"):
        stream.write([range(5), range(5, 7), range(7, 12)])


def test_an_earlier_micro_batch_is_fenced(target: Target) -> None:
    for batch in range(2):
        target.write([range(5), range(5, 9)], batch=batch)
    with pytest.raises(
        FencedError, match="start with a new checkpoint; a batch write needs another writeId or txnAppId"
    ):
        target.write([range(5), range(5, 9)], batch=0)


def test_a_later_version_is_known_by_records_of_version_2(with_js: Any, sink: Any) -> None:
    """They have it in `_layout`, and an earlier version that stored a position would hide that."""
    target = Target(with_js, "OLD", sink)
    target.prefix = "_spark.OLD.app"
    target.publish(f"{target.prefix}._layout", b'{"v":2,"batch":7,"partitions":1,"complete":true}')
    for version in (5, 6, 7):
        options = {"txnAppId": "app", "txnVersion": f"{version}"}
        target.sink(1, **options).write([[("OLD.rows", b"1")]], streaming=False)
        assert target.records().keys() - {"_position" if version == 7 else ""} == {"_layout"}
    with_js(lambda js: js.delete_stream("OLD"))


def test_a_version_of_a_bucket_without_rows_is_recorded(target: Target) -> None:
    for version, rows in ((3, range(0)), (2, range(4))):
        sink = target.sink(1, txnAppId="app", txnVersion=f"{version}")
        sink.write([target.rows(rows, 0)], streaming=False)
    assert target.stored() == []


def test_a_write_without_a_name_leaves_no_records(target: Target) -> None:
    target.sink(2).write([target.rows(range(4)), target.rows(range(4, 9))], streaming=False)
    assert target.stored() == list(range(9))
    target.prefix = target.prefix.rpartition(".")[0]
    assert target.records() == {}


def test_the_subjects_of_markers_are_used_again(target: Target) -> None:
    target.write([range(9), range(9, 12)])
    before = target.records().keys()
    for batch in range(1, 4):
        target.write([range(9), range(9, 12)], batch=batch)
    assert target.records().keys() == before
