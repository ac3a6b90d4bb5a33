"""A change feed, driven as Spark drives it, beside writers of its bucket, and compared with what the writers stored.

The query stops at every point, and another process with other options goes on from the offsets, which are JSON as in Spark's
logs. `FeedHistory.run` raises AssertionError about the first thing that is wrong.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import nats
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig
from nats.js.errors import NoStreamResponseError
from pyspark.sql.datasource import CaseInsensitiveDict

import jetstream_ext as jsx
from jetstream_ext.kv.entries import operation
from jetstream_ext.protocol.subjects import matcher
from jetstream_ext.spark.streaming import HAS_LIMITS
from pyspark_jetstream_kv import DefaultSource

Offset: TypeAlias = dict[str, Any]
Change: TypeAlias = tuple[str, str, bytes]  # key, operation, value

HEADERS: Final[dict[str, dict[str, str] | None]] = {
    "PUT": None,
    "DEL": {"KV-Operation": "DEL"},
    "PURGE": {"KV-Operation": "PURGE", "Nats-Rollup": "sub"},
}
WRITERS: Final = 3
CRASHES: Final = 0.12


class CrashError(Exception):
    """The process of the query ends."""


class Writers:
    """Write to a bucket from a thread, and record what every revision is.

    One key is hot; others are put, deleted and purged; some appear only once.
    """

    def __init__(self, url: str, bucket: str, seed: int, *, pause: float = 0.01) -> None:
        self.log: dict[int, Change] = {}
        self._url, self._bucket, self._chance = url, bucket, random.Random(seed)
        self._pause = pause
        self._stop = threading.Event()
        self._failure: list[BaseException] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
        if self._failure:
            raise self._failure[0]

    def _run(self) -> None:
        try:
            asyncio.run(self._write_all())
        except BaseException as error:  # the test raises it
            self._failure.append(error)

    async def _write_all(self) -> None:
        nc = await nats.connect(self._url, connect_timeout=10)
        try:
            js = nc.jetstream(timeout=30)
            await asyncio.gather(*(self._write(js, writer) for writer in range(WRITERS)))
        finally:
            await nc.close()

    async def _write(self, js: JetStreamContext, writer: int) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            await self.write(js, b"%d:%d" % (writer, count))
            if self._chance.random() < 0.3:
                await asyncio.sleep(self._pause)

    async def write(self, js: JetStreamContext, value: bytes) -> None:
        draw = self._chance.random()
        if draw < 0.3:
            key, kind = "hot", "PUT"
        elif draw < 0.35:
            key, kind = f"new.{value.decode().replace(':', '-')}", "PUT"
        else:
            kind = self._chance.choices(["PUT", "DEL", "PURGE"], [8, 2, 1])[0]
            key = f"k.{self._chance.randrange(30)}"
        data = value if kind == "PUT" else b""
        ack = await js.publish(f"$KV.{self._bucket}.{key}", data, headers=HEADERS[kind])
        self.log[ack.seq] = (key, kind, data)


@dataclass
class MicroBatch:
    """A micro-batch that Spark has written down, and what each attempt at it has read."""

    start: Offset
    end: Offset
    attempts: list[dict[int, Change]] = field(default_factory=list)
    partitions: list[tuple[int, int]] | None = None


class FeedHistory:
    """One query, from its start until it has read what the writers stored.

    Args:
        url: The server.
        bucket: A bucket that does not exist yet.
        seed: What the choices of the query and of the writers follow from.
        history: How many values of a key the bucket keeps.
        plain: Spark before 4.2, which does not say where a micro-batch starts.
        replicas: Of the bucket.
    """

    def __init__(
        self, url: str, bucket: str, seed: int, *, history: int, plain: bool = False, replicas: int = 1
    ) -> None:
        self._chance = random.Random(seed)
        self._url, self._bucket = url, bucket
        self._config = KeyValueConfig(bucket=bucket, history=history, direct=True, replicas=replicas)
        self._plain = plain or not HAS_LIMITS
        self._writers = Writers(url, bucket, seed)
        self._start = self._chance.choice(("snapshot", "snapshot", "latest", 40))
        self._with_deleted = self._start == "snapshot" and self._chance.random() < 0.3
        self._keys = self._chance.choice((">", ">", "k.*", "hot,new.>"))
        self._reader: Any = None
        self._committed: list[MicroBatch] = []
        self._pending: MicroBatch | None = None
        self.events: list[str] = []

    def run(self, triggers: int) -> None:
        try:
            asyncio.run(self._create())
            with self._writers.running():
                for _ in range(triggers):
                    self._trigger(crashes=True)
            for _ in range(1000):
                if self._trigger(crashes=False):
                    break
            else:
                raise AssertionError("the query does not come to its end")
            self._compare(asyncio.run(self.stored(self._url, self._bucket)))
        except BaseException as error:
            error.add_note("\n".join(self.events[-40:]))
            raise

    async def _create(self) -> None:
        nc = await nats.connect(self._url, connect_timeout=10)
        try:
            js = nc.jetstream(timeout=30)
            await js.create_key_value(self._config)
            deadline = asyncio.get_running_loop().time() + 30
            while True:
                try:
                    await self._writers.write(js, b"first")
                    break
                except NoStreamResponseError:  # the server does not know of the new stream yet
                    if asyncio.get_running_loop().time() > deadline:
                        raise
                    await asyncio.sleep(0.1)
            for number in range(self._chance.choice((50, 200))):
                await self._writers.write(js, b"first:%d" % number)
        finally:
            await nc.close()

    @staticmethod
    async def stored(url: str, bucket: str) -> dict[int, Change]:
        """Return every message that a bucket's stream has."""
        nc = await nats.connect(url, connect_timeout=10)
        found: dict[int, Change] = {}
        try:
            async with jsx.DirectGet(nc.jetstream(timeout=30), f"KV_{bucket}").scan(confirm=True) as messages:
                async for message in messages:
                    key = message.subject.removeprefix(f"$KV.{bucket}.")
                    found[message.seq] = (key, operation(message.headers)[0], message.data)
        finally:
            await nc.close()
        return found

    # -- the query ----------------------------------------------------------------------------------------------

    def _new_reader(self) -> Any:
        options = {
            "servers": self._url,
            "bucket": self._bucket,
            "requestTimeout": "30",
            "startingOffsets": f"{self._start}",
            "keys": self._keys,
            "minPartitions": f"{self._chance.choice((1, 2, 3, 7))}",
        }
        if self._with_deleted:
            options["includeDeleted"] = "true"
        if self._chance.random() < 0.3:
            options["maxRecordsPerPartition"] = f"{self._chance.choice((5, 50))}"
        if not self._plain and self._chance.random() < 0.6:
            options["maxRowsPerTrigger"] = f"{self._chance.choice((10, 100))}"
        source = DefaultSource(CaseInsensitiveDict(options))
        self.events.append(f"a process begins: {options}")
        return source.streamReader(source.schema())

    def _maybe_crash(self, crashes: bool) -> None:
        if crashes and self._chance.random() < CRASHES:
            self.events.append("the process ends")
            raise CrashError

    def _trigger(self, *, crashes: bool) -> bool:
        """Run a micro-batch, or part of one; return whether there was none."""
        try:
            return self._micro_batch(crashes)
        except CrashError:
            self._reader = None
        return False

    def _micro_batch(self, crashes: bool) -> bool:
        if self._reader is None:
            self._reader = self._new_reader()
        reader, first = self._reader, not self._committed
        end: Offset = {}
        if self._plain and self._pending is None:
            end = through_the_log(reader.latestOffset())  # Spark before 4.2 asks for the start after that
        start = through_the_log(reader.initialOffset()) if first else self._committed[-1].end
        self._maybe_crash(crashes)
        if self._pending is None:
            end = end or through_the_log(reader.latestOffset(start, reader.getDefaultReadLimit()))
            if end == start and not first:
                return True
            self._maybe_crash(crashes)  # before Spark writes the offset down
            self._pending = MicroBatch(start, end)
            self.events.append(f"from {json.dumps(start)} to {json.dumps(end)}")
        batch = self._pending
        self._maybe_crash(crashes)
        # A restart resolves the start of the first micro-batch again.
        self._attempt(batch, start, crashes)
        self._maybe_crash(crashes)  # after the write, before Spark notes that the micro-batch is committed
        self._committed.append(batch)
        self._pending = None
        self.events.append("committed")
        return self._plain and not crashes and _seq(batch.start) == _seq(batch.end)

    def _attempt(self, batch: MicroBatch, start: Offset, crashes: bool) -> None:
        parts = self._reader.partitions(start, batch.end)
        spans = [(part.value.first, part.value.last) for part in parts]
        assert batch.partitions in (None, spans), f"the partitions were {batch.partitions} and are {spans}"
        batch.partitions = spans
        rows: dict[int, Change] = {}
        for part in parts:
            reader, copy = pickle.loads(pickle.dumps((self._reader, part)))
            previous = 0
            for some in reader.read(copy):
                for row in some.to_pylist():
                    revision = row["revision"]
                    assert revision not in rows, f"revision {revision} is read twice in one micro-batch"
                    assert copy.value.first <= revision <= copy.value.last
                    assert revision > previous, f"revision {revision} is after {previous}"
                    assert row["bucket"] == self._bucket
                    rows[revision] = (row["key"], row["operation"], row["value"])
                    previous = revision
            self._maybe_crash(crashes)
        if batch.attempts:
            more = rows.keys() - batch.attempts[-1].keys()
            assert not more, f"a replay has rows that the attempt before it had not: {sorted(more)[:10]}"
        batch.attempts.append(rows)

    # -- what has to be true ------------------------------------------------------------------------------------

    def _compare(self, stored: dict[int, Change]) -> None:
        log, matches = self._writers.log, matcher(self._keys.split(","))
        first, snapshot = self._first_change()
        delivered: dict[int, Change] = {}
        for batch in self._committed:
            seen = {revision for attempt in batch.attempts for revision in attempt}
            twice = seen & delivered.keys()
            assert not twice, f"revisions in two micro-batches: {sorted(twice)[:10]}"
            for attempt in batch.attempts:
                wrong = {revision: row for revision, row in attempt.items() if log.get(revision) != row}
                assert not wrong, f"rows that were not stored so: {wrong}"
            delivered |= batch.attempts[-1]
        assert all(matches(key) for key, _, _ in delivered.values())
        expected = {revision: row for revision, row in stored.items() if revision >= first and matches(row[0])}
        missing = expected.keys() - delivered.keys()
        assert not missing, f"stored changes that were never read: {sorted(missing)[:10]} of {len(missing)}"
        at_start: dict[str, int] = {}
        for revision in sorted(log):
            if revision <= snapshot:
                at_start[log[revision][0]] = revision
        for revision, (key, kind, _) in delivered.items():
            if revision < first:
                assert at_start[key] == revision, f"revision {revision} was not the newest of {key!r} at {snapshot}"
                assert kind == "PUT" or self._with_deleted
        last: dict[str, int] = {}
        for revision in sorted(delivered):
            last[delivered[revision][0]] = revision
        for revision in sorted(stored):
            key, kind, _ = stored[revision]
            newest = max(other for other, row in stored.items() if row[0] == key)
            if revision == newest and matches(key) and (revision >= first or snapshot):
                shown = kind == "PUT" or revision >= first or self._with_deleted
                assert last.get(key) == (revision if shown else None), f"the last row of {key!r} is not its state"

    def _first_change(self) -> tuple[int, int]:
        """Return the first revision that is a row, as all later ones are, and the revision of the snapshot (0 without one)."""
        if isinstance(self._start, int):
            return self._start, 0
        begin = self._committed[0].end["streams"][f"KV_{self._bucket}"]
        if self._start == "latest":
            return begin["seq"] + 1, 0
        return begin["snapshot"] + 1, begin["snapshot"]


def _seq(offset: Offset) -> int:
    return int(next(iter(offset["streams"].values()))["seq"])


def through_the_log(offset: Offset) -> Offset:
    """Return an offset as it comes out of Spark's log."""
    return dict(json.loads(json.dumps(offset)))
