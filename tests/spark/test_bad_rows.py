"""Rows that can never be stored: dropped, or stored as dead letters, while all others are stored."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig
from pyspark.sql.types import BinaryType, MapType, StringType

import jetstream_ext as jsx
from jetstream_ext.spark import sink
from jetstream_ext.spark.bad_rows import DeadLetterError, RowError, TaskResult
from jetstream_ext.spark.options import OptionError, WriteOptions
from jetstream_ext.spark.planning import PlanningError
from jetstream_ext.testing import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Row = tuple[Any, ...]  # subject, data and, if there are any, headers
SEMANTICS = ["dedupe", "transactional", "none"]
COLUMNS = {"subject": StringType(), "data": BinaryType(), "headers": MapType(StringType(), StringType())}


@pytest.fixture
def stream(with_js: Any, stream_name: Callable[[], str]) -> str:
    return make(with_js, stream_name())


def make(with_js: Any, name: str, url: str | None = None, **config: Any) -> str:
    given = StreamConfig(
        name=name,
        subjects=[f"{name}.>", f"_spark.{name}.>"],
        allow_direct=True,
        allow_batched=True,
        allow_atomic=True,
    )
    with_js(lambda js: js.add_stream(given.evolve(**config)), *([] if url is None else [url]))
    return name


@pytest.fixture
def dead(with_js: Any, stream_name: Callable[[], str]) -> str:
    """The subject of dead letters."""
    return make_dead(with_js, stream_name())


def make_dead(with_js: Any, name: str) -> str:
    """Make an ordinary stream, without batches, for dead letters, and return its subject."""
    with_js(lambda js: js.add_stream(StreamConfig(name=name, subjects=[f"{name}.dead"], allow_direct=True)))
    return f"{name}.dead"


@pytest.fixture
def write(sink: Any, server: NatsServer) -> Callable[..., TaskResult]:
    """Write one partition of a micro-batch, as the driver and an executor do."""

    def run(
        stream: str,
        rows: Iterable[Row | Exception],
        semantics: str,
        on_bad_row: str,
        *,
        url: str = server.url,
        batch: int = 0,
        partition: int = 0,
        timeout: str = "5",
    ) -> TaskResult:
        given = {"servers": url, "onBadRow": on_bad_row, "requestTimeout": timeout}
        if semantics == "transactional":
            given |= {"sinkPartitions": "2", "transactionRows": "7"}
        target = sink(stream, semantics, COLUMNS, **given)
        done: TaskResult = target.task(target.writer(), rows, batch=batch, partition=partition)
        return done

    return run


@pytest.fixture
def stored(with_js: Any) -> Callable[..., list[jsx.StoredMsg]]:
    """Read the messages of a stream on a subject, by default all but the sink's markers."""

    def read(stream: str, subject: str | None = None, *url: str) -> list[jsx.StoredMsg]:
        return with_js(lambda js: jsx.DirectGet(js, stream).scan(subject=subject or f"{stream}.>").to_list(), *url)

    return read


def bad_and_good(stream: str) -> tuple[list[Row], list[Row]]:
    """Return rows of every kind that is bad, and good ones."""
    bad: list[Row] = [
        (None, b"null"),
        ("", b"empty"),
        (f"{stream}..x", b"invalid"),
        (f"{stream}.*", b"wildcard"),
        ("elsewhere", b"foreign"),
        (f"{stream}." + "x" * 5000, b"long"),
        (f"{stream}.a", b"reserved", {"Nats-Rollup": "all", "Kept": "1"}),
        (f"{stream}.a", b"name", {"A b": "1", "Kept": "2"}),
        (f"{stream}.a", b"value", {"A": "1\r\nB: 2"}),
        (f"{stream}.a", b"headers", {"A": "x" * 70_000}),
        (f"{stream}.a", bytes((1 << 20) + 1)),
    ]
    return bad, [(f"{stream}.{number % 3}", b"%d" % number) for number in range(40)]


def mixed(bad: list[Row], good: list[Row]) -> list[Row]:
    """Return the rows with a bad one behind every third good one."""
    rows: list[Row] = []
    left = iter(bad)
    for index, row in enumerate(good):
        rows.append(row)
        rows += [] if index % 3 or (one := next(left, None)) is None else [one]
    assert next(left, None) is None
    return rows


class TestPolicies:
    def test_bad_rows_are_dropped(
        self, cell: Any, write: Any, stored: Any, with_js: Any, stream_name: Callable[[], str]
    ) -> None:
        for semantics in SEMANTICS:
            stream = make(with_js, stream_name())
            with cell(semantics):
                bad, good = bad_and_good(stream)
                done = write(stream, mixed(bad, good), semantics, "drop")
                assert (done.rows, done.dropped, done.diverted) == (40, len(bad), 0)
                assert done.example == "row 1 of partition 0: its subject is null"
                assert [message.data for message in stored(stream)] == [row[1] for row in good]

    def test_bad_rows_become_dead_letters_once(
        self, cell: Any, write: Any, stored: Any, with_js: Any, stream_name: Callable[[], str]
    ) -> None:
        for semantics in SEMANTICS:
            stream, dead = make(with_js, stream_name()), make_dead(with_js, stream_name())
            with cell(semantics):
                bad, good = bad_and_good(stream)
                rows = mixed(bad, good)
                for attempt in range(2):
                    done = write(stream, rows, semantics, dead, batch=3, partition=1)
                    assert (done.rows, done.dropped, done.diverted) == (40, 0, len(bad))
                    assert done.skipped == (40 if attempt and semantics == "transactional" else 0)
                times = 2 if semantics == "none" else 1
                assert Counter(message.data for message in stored(stream)) == {row[1]: times for row in good}
                letters = {message.data[:9]: message for message in stored(dead.split(".")[0], dead)}
                assert letters.keys() == {row[1][:9] for row in bad}
                assert len(stored(dead.split(".")[0], dead)) == len(bad)
                null = letters[b"null"].headers
                assert null["Dead-Letter-Error"] == "its subject is null"
                assert "Dead-Letter-Subject" not in null
                assert {
                    name: null[f"Dead-Letter-{name}"] for name in ("Target", "Worker", "Batch", "Partition", "Row")
                } == {
                    "Target": stream,
                    "Worker": "a-query",
                    "Batch": "3",
                    "Partition": "1",
                    "Row": "1",
                }
                assert letters[b"foreign"].headers["Dead-Letter-Subject"] == "elsewhere"
                assert (
                    letters[b"reserved"].headers.items()
                    >= {"Dead-Letter-Header-Nats-Rollup": "all", "Kept": "1"}.items()
                )
                assert letters[b"name"].headers.items() >= {"Dead-Letter-Raw-Header": "A%20b=1", "Kept": "2"}.items()
                assert letters[b"value"].headers["Dead-Letter-Raw-Header"] == "A=1%0D%0AB%3A%202"
                assert letters[b"headers"].headers["Dead-Letter-Cut"] == "headers"
                large = letters[bytes(9)]
                assert (large.data, large.headers["Dead-Letter-Cut"]) == (bytes(4096), "data")
                assert "1048577 bytes" in large.headers["Dead-Letter-Error"] or semantics != "none"

    def test_a_bad_row_fails_the_task_by_default(self, cell: Any, stream: str, write: Any) -> None:
        for semantics in SEMANTICS:
            with cell(semantics):
                _, good = bad_and_good(stream)
                with pytest.raises(
                    RowError, match=r"partition 0 of micro-batch 0: row 2 cannot be stored: its subject is null"
                ):
                    write(stream, [*good[:2], (None, b"")], semantics, "fail")


def test_dead_letters_can_go_to_the_stream_of_the_rows(
    cell: Any, write: Any, stored: Any, with_js: Any, stream_name: Callable[[], str]
) -> None:
    for semantics in SEMANTICS:
        stream = make(with_js, stream_name())
        with cell(semantics):
            bad, good = bad_and_good(stream)
            for _ in range(2):
                write(stream, mixed(bad, good), semantics, f"{stream}.dead")
            assert len(stored(stream, f"{stream}.dead")) == len(bad)
            times = 2 if semantics == "none" else 1
            for token in range(3):
                assert len(stored(stream, f"{stream}.{token}")) == times * len(good[token::3])


def test_a_row_of_any_size_near_a_limit_is_stored_or_bad(
    cell: Any, server: NatsServer, with_js: Any, write: Any, stored: Any, stream_name: Callable[[], str]
) -> None:
    def check(url: str, limit: str, semantics: str) -> None:
        name = make(with_js, stream_name(), url, **({} if limit == "max_payload" else {limit: 1024}))
        for headers in (None, {"A": "ü" * 40}):
            rows = [(f"{name}.{size}", bytes(size), headers) for size in range(690, 1031)]
            done = write(name, rows, semantics, "drop", url=url, partition=int(headers is not None))
            assert done.dropped + done.rows == len(rows)
            # The sink reserves room for the headers of a batch, and for the number of an equal row.
            reserved = {"none": 0, "dedupe": 80, "transactional": 190}[semantics] + (100 if headers else 0)
            assert 6 <= done.dropped <= 6 + reserved
            if limit != "max_bytes":  # there a message may have removed all others
                sizes = [len(message.data) for message in stored(name, f"{name}.>", url)][-done.rows :]
                assert sizes == list(range(690, 690 + done.rows))

    with NatsServer(config="max_payload: 1024") as small:
        for limit, semantics in itertools.product(("max_msg_size", "max_payload", "max_bytes"), SEMANTICS):
            if (limit, semantics) != ("max_bytes", "transactional"):  # such a stream cannot hold markers
                with cell(limit, semantics):
                    check(small.url if limit == "max_payload" else server.url, limit, semantics)


def test_a_task_that_dies_repeats_no_dead_letter(
    cell: Any, write: Any, stored: Any, with_js: Any, stream_name: Callable[[], str]
) -> None:
    for semantics in ["dedupe", "transactional"]:
        stream, dead = make(with_js, stream_name()), make_dead(with_js, stream_name())
        with cell(semantics):
            rows = [
                (f"{stream}.a", b"%d" % number) if number % 5 else (None, b"%d" % (number // 20))
                for number in range(200)
            ]
            for end in (150, 80):
                with pytest.raises(ZeroDivisionError):
                    write(stream, [*rows[:end], ZeroDivisionError()], semantics, dead)
            # Spark may give the rows in another order.
            done = write(stream, [*reversed(rows)], semantics, dead)
            assert (done.rows, done.diverted) == (160, 40)
            assert Counter(message.data for message in stored(dead.split(".")[0], dead)) == {
                b"%d" % n: 4 for n in range(10)
            }
            assert len(stored(stream)) == 160


def test_a_restart_of_the_server_neither_loses_nor_repeats_dead_letters(
    with_js: Any, write: Any, stored: Any, stream_name: Callable[[], str]
) -> None:
    with NatsServer() as own:
        name = make(with_js, stream_name(), own.url)
        with ThreadPoolExecutor() as thread:
            rows: list[Row] = [(None, b"%d" % number) for number in range(5000)]
            writing = thread.submit(write, name, rows, "dedupe", f"{name}.dead", url=own.url, timeout="5")

            async def kill(js: JetStreamContext) -> None:
                while (await js.stream_info(name)).state.messages < 300:
                    assert not writing.done()
                own.kill()

            with_js(kill, own.url)
            assert not writing.done()
            own.restart()
            assert writing.result().diverted == 5000
        found = Counter(message.data for message in stored(name, f"{name}.dead", own.url))
        assert found == {row[1]: 1 for row in rows}


def test_a_dead_letter_is_cut_to_what_its_stream_takes(with_js: Any, stream: str, write: Any, stored: Any) -> None:
    for limit, kept, cut in ((6000, 4096, "data"), (3000, 0, "data"), (700, 0, "data, headers")):
        name = f"{stream}{limit}"
        with_js(
            lambda js, name=name, limit=limit: js.add_stream(
                StreamConfig(name=name, subjects=[f"{name}.dead"], allow_direct=True, max_msg_size=limit)
            )
        )
        write(stream, [(None, bytes(20_000), {"A": "x" * 500})], "dedupe", f"{name}.dead")
        [letter] = stored(name, f"{name}.dead")
        assert (letter.data, letter.headers["Dead-Letter-Cut"]) == (bytes(kept), cut)


def test_a_dead_letter_that_cannot_be_stored_fails_the_task(
    with_js: Any, stream: str, dead: str, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink, "PATIENCE", 3.0)
    rows = [(None, b"x")]
    with_js(lambda js: js.update_stream(name=dead.split(".")[0], subjects=[dead], max_msgs=1, discard="new"))
    write(stream, rows, "dedupe", dead)
    with pytest.raises(
        DeadLetterError, match=r"micro-batch 1: the dead letter of row 0 .*maximum messages exceeded.*onBadRow"
    ):
        write(stream, rows, "dedupe", dead, batch=1)

    async def unchecked(*_: object) -> None:
        """The stream is deleted after the driver's check."""

    monkeypatch.setattr(sink, "check_dead_letters", unchecked)
    monkeypatch.setattr(sink, "PATIENCE", 0.01)  # the second attempt does not begin: it could only time out
    with pytest.raises(DeadLetterError, match="no stream stores that subject, or the stream has no leader"):
        write(stream, rows, "dedupe", "nowhere")


class TestOnTheDriver:
    def test_a_subject_that_no_stream_stores_is_refused(self, stream: str, write: Any) -> None:
        with pytest.raises(PlanningError, match="'onBadRow': no stream stores the subject 'dorp'; create one, or give"):
            write(stream, [], "dedupe", "dorp")

    def test_an_invalid_subject_is_refused(self, cell: Any) -> None:
        for value, problem in [("a.*", "has a wildcard"), ("", "is empty"), ("a b", "white space")]:
            with cell(value, problem), pytest.raises(OptionError, match=f"option 'onBadRow': .*{problem}"):
                WriteOptions.parse({"servers": "nats://s", "stream": "S", "onBadRow": value}, streaming=True)

    def test_a_subject_of_the_markers_is_refused(self) -> None:
        given = {"servers": "nats://s", "stream": "S", "semantics": "transactional", "sinkPartitions": "2"}
        with pytest.raises(
            OptionError, match=r"'onBadRow': subjects below '_spark\.S' are for the markers of the sink"
        ):
            WriteOptions.parse(given | {"onBadRow": "_spark.S.dead"}, streaming=True)

    def test_the_commit_logs_the_numbers(
        self, cell: Any, sink: Any, stream: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        bad, good = bad_and_good(stream)
        for streaming in (False, True):
            with cell(streaming):
                target = sink(stream, "dedupe", COLUMNS, onBadRow="drop")
                target.write([good], streaming=streaming)
                assert not caplog.text
                target.write([good, bad[:3], [bad[3], *good]], batch=7, streaming=streaming)
                numbers = f"bad rows of micro-batch {7 * streaming}: dropped: 4, stored as dead letters: 0"
                example = "row 0 of partition 1: its subject is null"
                assert caplog.messages[-1] == f"stream '{stream}': {numbers}; for example {example}"
                caplog.clear()


def test_one_bad_row_does_not_wedge_a_query(
    spark: SparkSession,
    server: NatsServer,
    with_js: Any,
    stream: str,
    dead: str,
    stored: Any,
    stream_name: Callable[[], str],
    tmp_path: Path,
) -> None:
    source = make(with_js, stream_name())

    async def publish(js: JetStreamContext) -> None:
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add_many((f"{source}.a", b"%d" % number) for number in range(300))

    def run(policy: str) -> None:
        rows = spark.readStream.format("jetstream").option("servers", server.url).load(source)
        rows = rows.selectExpr(f"IF(seq % 50 = 7, NULL, '{stream}.b') AS subject", "data")
        options = {"servers": server.url, "stream": stream, "semantics": "transactional", "onBadRow": policy}
        options["sinkPartitions"] = "2"
        writer = rows.writeStream.format("jetstream").options(**options)
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
        writer.start().awaitTermination()

    from pyspark.errors import PySparkException

    with_js(publish)
    with pytest.raises(PySparkException, match="cannot be stored: its subject is null"):
        run("fail")
    run(dead)
    found = Counter(message.data for message in stored(stream))
    bad = {b"%d" % number for number in range(6, 300, 50)}
    assert set(found) == {b"%d" % number for number in range(300)} - bad
    assert set(found.values()) == {1}
    letters = stored(dead.split(".")[0], dead)
    assert Counter(letter.data for letter in letters) == Counter(bad)
