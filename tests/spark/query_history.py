"""A random history of a streaming query, driven as Spark drives it, and of the streams that it reads, on a real server.

The streams gain messages, and lose them in every way that there is; the query stops at every point, and another process
with other options goes on from the offsets, which are JSON as in Spark's logs. What has to come out is known, because every
message says in its payload which one it is. `History.run` raises AssertionError about the first thing that is wrong.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import nats
from nats.js import JetStreamContext
from nats.js.api import StreamConfig
from pyspark.sql.datasource import CaseInsensitiveDict

import jetstream_ext as jsx
from jetstream_ext.spark.planning import DataLossError
from jetstream_ext.spark.streaming import HAS_LIMITS
from pyspark_jetstream import DefaultSource

Offset: TypeAlias = dict[str, Any]
Message: TypeAlias = tuple[str, int, int]  # the stream, which of the streams of this name, and the sequence

SUBJECTS: Final = ("a", "b", "c")
FILTERS: Final = ((), (), ("a",), ("a", "b"))


class CrashError(Exception):
    """The process of the query ends."""


class ServerBugError(Exception):
    """The server itself has lost messages, so the expected rows are unknown.

    nats-server 2.15.1 sometimes miscounts the messages after some in the middle of a stream were deleted and its head was
    purged. With too few, the stream is empty once further ones are deleted until this count is 0. With too many, the limit
    of a stream removes messages that are below it.
    """


@dataclass
class Stream:
    """What a stream has to hold."""

    name: str
    limits: dict[str, int]
    number: int = 0  # of the streams that had this name
    exists: bool = False
    last_seq: int = 0
    stored: dict[int, str] = field(default_factory=dict)  # subjects by sequence
    expired: set[Message] = field(default_factory=set)  # left at the head of the stream, by a limit or a purge
    removed: bool = False  # something else than its limits has removed messages

    @property
    def compacts(self) -> bool:
        """Whether newer messages replace older ones, so that these do not have to be reported.

        Once messages were removed, others may take their number; then it cannot be known that they are lost.
        """
        return "max_msgs_per_subject" in self.limits

    @property
    def first_seq(self) -> int:
        return min(self.stored, default=self.last_seq + 1)

    def add(self, subject: str) -> None:
        self.last_seq += 1
        self.stored[self.last_seq] = subject
        if "max_msgs_per_subject" in self.limits:
            same = [seq for seq, other in self.stored.items() if other == subject]
            for seq in same[: -self.limits["max_msgs_per_subject"]]:
                del self.stored[seq]
        while len(self.stored) > self.limits.get("max_msgs", len(self.stored)):
            self.expire(self.first_seq + 1)

    def expire(self, first: int) -> None:
        """Remove what is before the sequence `first`."""
        for seq in [seq for seq in self.stored if seq < first]:
            self.expired.add((self.name, self.number, seq))
            del self.stored[seq]


class Streams:
    """The streams of a history, on the server and as they have to be."""

    def __init__(self, url: str, names: list[str], chance: random.Random, least: int) -> None:
        self._chance = chance
        self._least = least  # messages of a new stream
        self._runner = asyncio.Runner()
        self._nc = self._runner.run(nats.connect(url, connect_timeout=10))
        self._js: JetStreamContext = self._nc.jetstream(timeout=30)
        limits: list[dict[str, int]] = [{}, {}, {"max_msgs": 60}, {"max_msgs_per_subject": 15}]
        self.streams = {name: Stream(name, chance.choice(limits)) for name in names}
        self.numbers: dict[str, int] = {}  # by the time of creation
        self.subjects: dict[Message, str] = {}
        try:
            for stream in self.streams.values():
                self.create(stream)
        except BaseException:
            self._disconnect()
            raise

    def close(self) -> None:
        try:
            for stream in self.streams.values():
                if stream.exists:
                    self.delete(stream)
        finally:
            self._disconnect()

    def _disconnect(self) -> None:
        try:
            self._runner.run(self._nc.close())
        finally:
            self._runner.close()

    def _ask(self, subject: str, **request: Any) -> dict[str, Any]:
        answer = self._runner.run(self._nc.request(f"$JS.API.{subject}", json.dumps(request).encode(), timeout=30))
        content: dict[str, Any] = json.loads(answer.data)
        assert "error" not in content, content
        return content

    def _do(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._runner.run(work())

    def disturb(self) -> str:
        """Do something to a stream; return what."""
        stream = self._chance.choice(list(self.streams.values()))
        if not stream.exists:
            self.create(stream)
            return f"create {stream.name}"
        kinds = (
            [self.publish] * 8 + [self.remove_some] * 4 + [self.purge_head] * 3 + [self.purge_subject, self.purge_all]
        )
        kinds += [self.recreate, self.delete]
        action = self._chance.choice(kinds)
        action(stream)
        if stream.exists:
            self._compare(stream)
        return f"{action.__name__} {stream.name}: {stream.first_seq} to {stream.last_seq}"

    def create(self, stream: Stream) -> None:
        config = StreamConfig(
            name=stream.name, subjects=[f"{stream.name}.>"], allow_direct=True, allow_batched=True
        ).evolve(**stream.limits)
        self._do(lambda: self._js.add_stream(config))
        while self._ask(f"STREAM.INFO.{stream.name}")["state"]["last_seq"]:
            # The server has found the files of the stream that was deleted just before.
            self._ask(f"STREAM.DELETE.{stream.name}")
            self._do(lambda: self._js.add_stream(config))
        stream.number, stream.last_seq, stream.exists = stream.number + 1, 0, True
        stream.stored, stream.removed = {}, False
        self.numbers[self._ask(f"STREAM.INFO.{stream.name}")["created"]] = stream.number
        while stream.last_seq < self._least:
            self.publish(stream)

    def delete(self, stream: Stream) -> None:
        self._ask(f"STREAM.DELETE.{stream.name}")
        stream.exists, stream.stored, stream.last_seq = False, {}, 0

    def recreate(self, stream: Stream) -> None:
        self.delete(stream)
        self.create(stream)

    def publish(self, stream: Stream) -> None:
        chosen = [self._chance.choice(SUBJECTS) for _ in range(self._chance.choice((1, 5, 40, 120)))]
        messages = []
        for subject in chosen:
            stream.add(subject)
            self.subjects[stream.name, stream.number, stream.last_seq] = subject
            messages.append((f"{stream.name}.{subject}", f"{stream.number}:{stream.last_seq}".encode()))

        async def send() -> None:
            async with jsx.FastPublisher(self._js) as publisher:
                await publisher.add_many(messages)

        self._do(send)
        self._compare(stream)

    def _compare(self, stream: Stream) -> None:
        found = self._ask(f"STREAM.INFO.{stream.name}")["state"]
        assert found["last_seq"] == stream.last_seq, f"the last sequence is {found['last_seq']}, not {stream.last_seq}"
        if found["messages"] != len(stream.stored):
            raise ServerBugError

    def remove_some(self, stream: Stream) -> None:
        seqs = list(stream.stored)
        for seq in self._chance.sample(seqs, min(len(seqs), self._chance.choice((1, 5, 30)))):
            try:
                self._ask(f"STREAM.MSG.DELETE.{stream.name}", seq=seq)
            except AssertionError:
                raise ServerBugError from None
            del stream.stored[seq]
            stream.removed = True

    def purge_head(self, stream: Stream) -> None:
        first = self._chance.randint(stream.first_seq, stream.last_seq + 1)
        self._ask(f"STREAM.PURGE.{stream.name}", seq=first)
        stream.expire(first)
        stream.removed = True

    def purge_subject(self, stream: Stream) -> None:
        subject = self._chance.choice(SUBJECTS)
        self._ask(f"STREAM.PURGE.{stream.name}", filter=f"{stream.name}.{subject}")
        stream.stored = {seq: other for seq, other in stream.stored.items() if other != subject}
        stream.removed = True

    def purge_all(self, stream: Stream) -> None:
        self._ask(f"STREAM.PURGE.{stream.name}")
        stream.expire(stream.last_seq + 1)
        stream.removed = True


@dataclass
class Attempt:
    """What one attempt at a micro-batch has read."""

    partitions: list[Any]
    rows: list[list[Message]] = field(default_factory=list)  # by partition
    firsts: list[int] = field(default_factory=list)  # the last sequence of the first rows of each partition


class Reports(logging.Handler):
    """The losses that were logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class History:
    """One query, from its start until it has read everything.

    Args:
        url: The server.
        names: The streams, which do not exist yet.
        seed: What the history follows from.
        plain: Spark before 4.2, which does not say where a micro-batch starts.
    """

    def __init__(self, url: str, names: list[str], seed: int, *, plain: bool) -> None:
        self._chance = chance = random.Random(seed)
        self._plain = plain or not HAS_LIMITS
        self._filters = chance.choice(FILTERS)
        self._start = chance.choice(("earliest", "earliest", "latest", 5))
        self._streams = Streams(url, names, chance, least=5 if self._start == 5 else chance.choice((0, 1)))
        self._on_recreate = chance.choice((None, None, "earliest", "keep"))
        if self._on_recreate == "keep" and self._plain:
            # A restarted query cannot tell a stream that was restored up to an earlier message from one that lost messages.
            self._on_recreate = None
        self._options = {"servers": url, "stream": ",".join(names), "requestTimeout": "30"}
        if self._filters:
            # Each stream has its own subjects.
            self._options["subjects"] = ",".join(f"*.{subject}" for subject in self._filters)
        if self._on_recreate:
            self._options["onRecreate"] = self._on_recreate
        if self._start != "earliest":
            start = "latest" if self._start == "latest" else json.dumps(dict.fromkeys(names, self._start))
            self._options["startingOffsets"] = start
        self._reader: Any = None
        self._fails = True  # failOnDataLoss
        self._committed: Offset | None = None
        self._pending: Offset | None = None
        self._attempts: list[Attempt] = []
        self._delivered: set[Message] = set()
        self._excused: set[Message] = set()  # lost, and that was reported or is allowed
        self._skipped: dict[tuple[str, int], int] = {}  # sequences up to this one are not to be read
        self._disturbed = set[str]()  # streams that were deleted since the last micro-batch
        self._reports = Reports()
        self.events: list[str] = []
        self.abandoned = False
        if self._start == 5:
            self._skipped = {(name, 1): 4 for name in names}

    def run(self, steps: int) -> None:
        log = logging.getLogger("jetstream_ext.spark")
        log.addHandler(self._reports)
        try:
            for _ in range(steps):
                if self._chance.random() < 0.5:
                    self._disturb()
                else:
                    self._trigger(crashes=True)
            self._drain()
        except ServerBugError:
            self.abandoned = True
        except BaseException as error:
            error.add_note("\n".join([repr(self._options), *self.events[-40:]]))
            raise
        finally:
            log.removeHandler(self._reports)
            self._streams.close()

    def _note(self, event: str) -> None:
        self.events.append(event)

    def _disturb(self) -> None:
        before = {stream.name: (stream.number, stream.exists) for stream in self._streams.streams.values()}
        self._note(self._streams.disturb())
        for name, stream in self._streams.streams.items():
            if before[name] != (stream.number, stream.exists):
                self._note_another(stream)

    def _note_another(self, stream: Stream) -> None:
        self._disturbed.add(stream.name)
        if self._on_recreate == "keep":
            offsets = [offset["streams"].get(stream.name, {"seq": 0}) for offset in self._known()]
            self._skipped[stream.name, stream.number] = max((at["seq"] for at in offsets), default=0)
        if self._committed is None and isinstance(self._start, int):
            begin = max(self._start - 1, self._skipped.get((stream.name, stream.number), 0))
            self._skipped[stream.name, stream.number] = begin

    def _known(self) -> list[Offset]:
        return [offset for offset in (self._committed, self._pending) if offset is not None]

    # -- the query ----------------------------------------------------------------------------------------------

    def _maybe_crash(self, crashes: bool) -> None:
        if crashes and self._chance.random() < 0.12:
            self._note("the process ends")
            raise CrashError

    def _new_reader(self) -> Any:
        options = self._options | {
            "failOnDataLoss": str(self._fails).lower(),
            "minPartitions": f"{self._chance.choice((1, 2, 3, 7))}",
        }
        if self._chance.random() < 0.3:
            options["maxRecordsPerPartition"] = f"{self._chance.choice((1, 10, 50))}"
        if not self._plain and self._chance.random() < 0.5:
            options["maxRowsPerTrigger"] = f"{self._chance.choice((1, 10, 100))}"
        source = DefaultSource(CaseInsensitiveDict(options))
        self._note(f"a process begins: {options}")
        return source.streamReader(source.schema())

    def _trigger(self, *, crashes: bool) -> bool:
        """Run a micro-batch, or part of one; return whether there was none."""
        try:
            return self._micro_batch(crashes)
        except CrashError:
            self._reader = None
        except DataLossError as error:
            self._note(f"DataLossError: {error}")
            if not self._fails:
                raise
            self._check_reports([str(error)])
            self._reader, self._fails = None, False  # as the user would do
        return False

    def _micro_batch(self, crashes: bool) -> bool:
        if self._reader is None:
            self._reader = self._new_reader()
            if crashes and not self._plain and self._chance.random() < 0.2:
                self._reader.prepareForTriggerAvailableNow()
        reader, first = self._reader, self._committed is None
        start = _stored(reader.initialOffset()) if self._committed is None else self._committed
        self._maybe_crash(crashes)
        if self._pending is None:
            self._reports.texts.clear()
            self._attempts = []
            end = _stored(self._latest(reader, start))
            if end == start and not first:
                self._reader = None if self._chance.random() < 0.5 else reader
                return True
            self._maybe_crash(crashes)
            self._pending = end
            self._note(f"from {json.dumps(start)} to {json.dumps(end)}")
        self._maybe_crash(crashes)
        self._attempt(start, self._pending, crashes)
        self._maybe_crash(crashes)
        self._commit(start, self._pending)
        self._fails = True
        if "false" in str(reader._options.fail_on_data_loss).lower():
            self._reader = None
        return False

    def _latest(self, reader: Any, start: Offset) -> Offset:
        if self._plain:
            return dict(reader.latestOffset())
        return dict(reader.latestOffset(start, reader.getDefaultReadLimit()))

    def _attempt(self, start: Offset, end: Offset, crashes: bool) -> None:
        parts = self._reader.partitions(start, end)
        attempt = Attempt([part.value for part in parts])
        self._note(
            f"partitions: {[(part.stream, part.first, part.last, part.from_head) for part in attempt.partitions]}"
        )
        self._maybe_crash(crashes)
        restless = crashes and self._chance.random() < 0.3
        for part in parts:
            reader, copy = pickle.loads(pickle.dumps((self._reader, part)))
            rows: list[Message] = []
            with closing(reader.read(copy)) as batches:
                for some in _blocks(batches):
                    if not rows:
                        attempt.firsts.append(some[-1][2])
                    rows += some
                    if restless and self._chance.random() < 0.2:
                        self._disturb()
            if not rows:
                attempt.firsts.append(copy.value.last)
            attempt.rows.append(rows)
            self._maybe_crash(crashes)
        self._check(attempt)
        self._attempts.append(attempt)
        self._check_reports(self._reports.texts)

    def _commit(self, start: Offset, end: Offset) -> None:
        rows = {row for attempt in self._attempts for part in attempt.rows for row in part}
        twice = rows & self._delivered
        assert not twice, f"read twice: {sorted(twice)[:10]}"
        self._delivered |= rows
        if self._committed is None and self._start == "latest":
            for name, at in end["streams"].items():
                if number := self._streams.numbers.get(at["created"]):
                    self._skipped[name, number] = at["seq"]
        for name, at in end["streams"].items():
            self._check_stream(name, start["streams"].get(name), at)
            stream = self._streams.streams[name]
            if self._streams.numbers.get(at["created"]) == stream.number and stream.exists:
                self._disturbed.discard(name)
        self._committed, self._pending, self._attempts = end, None, []
        self._note("committed")

    def _drain(self) -> None:
        """Read everything that is there, and check it."""
        self._reader = None  # it may end at what was stored when it began
        for stream in self._streams.streams.values():
            if not stream.exists:
                self._streams.create(stream)
                self._note_another(stream)
            self._streams.publish(stream)
        for _ in range(2_000):
            if self._trigger(crashes=False):
                break
            if self._plain and self._pending is None and self._committed is not None and self._is_at_the_end():
                break
        else:
            raise AssertionError("the query does not come to its end")
        for name, stream in self._streams.streams.items():
            if self._on_recreate != "keep":
                self._require_delivered(stream, stream.last_seq, name)

    def _is_at_the_end(self) -> bool:
        assert self._committed is not None
        return all(
            self._streams.numbers.get(at["created"]) == (stream := self._streams.streams[name]).number
            and at["seq"] == stream.last_seq
            for name, at in self._committed["streams"].items()
        )

    # -- what has to be true ------------------------------------------------------------------------------------

    def _matches(self, subject: str) -> bool:
        return not self._filters or subject in self._filters

    def _check(self, attempt: Attempt) -> None:
        seen: set[Message] = set()
        for part, rows in zip(attempt.partitions, attempt.rows, strict=True):
            place = f"partition {part.first} to {part.last} of {part.stream}"
            for row in rows:
                assert part.first <= row[2] <= part.last, f"{row} is in {place}"
                assert self._matches(self._streams.subjects[row]), f"{row} does not match"
            assert len(rows) == len(set(rows)), f"{place} repeats rows"
            assert not seen & set(rows), f"{place} repeats rows of another one"
            seen |= set(rows)
            stream = self._streams.streams[part.stream]
            if stream.exists and self._streams.numbers.get(part.seen and part.seen.created) == stream.number:
                expected = {
                    (part.stream, stream.number, seq)
                    for seq, subject in stream.stored.items()
                    if part.first <= seq <= part.last and self._matches(subject)
                }
                assert expected <= set(rows), f"{place} lacks {sorted(expected - set(rows))[:10]}"
        if self._attempts and not self._reports.texts:
            before = [(part.stream, part.first, part.last) for part in self._attempts[-1].partitions]
            now = [(part.stream, part.first, part.last) for part in attempt.partitions]
            assert now == before, f"the partitions were {before} and are {now}"

    def _check_stream(self, name: str, before: dict[str, Any] | None, at: dict[str, Any]) -> None:
        """Check that each message up to the end was read, unless it was removed, and that what expired was reported."""
        stream, number = self._streams.streams[name], self._streams.numbers.get(at["created"])
        if number is None or number != stream.number or not stream.exists:
            return
        self._require_delivered(stream, at["seq"], name)
        lost = {
            message
            for message in stream.expired - self._delivered - self._excused
            if message[1] == number
            and self._skipped.get((name, number), 0) < message[2] <= at["seq"]
            and self._matches(self._streams.subjects[message])
        }
        if lost and not stream.compacts and not any(name in text for text in self._reports.texts):
            lost -= set(filter(lambda message: self._may_expire(name, before, message), lost))
            assert not lost, f"not reported: {sorted(lost)[:10]}, up to {at}"
        self._excused |= {message for message in stream.expired if message[2] <= at["seq"]}

    def _may_expire(self, name: str, before: dict[str, Any] | None, message: Message) -> bool:
        """Return whether a message may be gone without a report: it expired before the query first read that far."""
        from_head = before is None or not before["created"] or (not before["seq"] and self._start == "earliest")
        if before is not None and self._streams.numbers.get(before["created"]) != message[1]:
            from_head = True
        if not from_head:
            return False
        attempt = self._attempts[0]
        for part, first in zip(attempt.partitions, attempt.firsts, strict=True):
            if part.stream == name and part.first <= message[2] <= part.last:
                return part.from_head and message[2] <= first
        return True

    def _require_delivered(self, stream: Stream, last: int, name: str) -> None:
        skipped = self._skipped.get((name, stream.number), 0)
        expected = {
            (name, stream.number, seq)
            for seq, subject in stream.stored.items()
            if skipped < seq <= last and self._matches(subject)
        }
        missing = expected - self._delivered
        assert not missing, f"never read: {sorted(missing)[:10]} of {len(missing)}"

    def _check_reports(self, reports: list[str]) -> None:
        """Check that what was reported as lost can be lost."""
        for text in reports:
            for name, stream in self._streams.streams.items():
                if name not in text or name in self._disturbed or not stream.exists:
                    continue
                committed = self._committed and self._committed["streams"].get(name)
                if committed and (committed["seq"] or self._start != "earliest"):
                    begin = committed["seq"] + 1
                elif self._start == 5:
                    begin = 5
                elif self._pending is not None:
                    at = self._pending["streams"].get(name, {})
                    begin = at.get("first", at.get("head", 1))
                else:
                    begin = 1
                assert stream.first_seq > begin, f"a loss is reported, but the stream has everything: {text}"
                assert stream.removed or not stream.compacts, (
                    f"a loss is reported, but newer messages replaced all: {text}"
                )


def _stored(offset: Offset) -> Offset:
    """Return an offset as it comes out of Spark's log."""
    return dict(json.loads(json.dumps(offset)))


def _blocks(batches: Iterator[Any]) -> Iterator[list[Message]]:
    for batch in batches:
        rows = []
        for row in batch.to_pylist():
            number, seq = row["data"].split(b":")
            assert int(seq) == row["seq"], f"message {row['seq']} of {row['stream']} is {row['data']!r}"
            rows.append((row["stream"], int(number), row["seq"]))
        yield rows
