"""One partition, written as an executor writes it, without a JVM."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig
from pyspark.sql.types import ArrayType, BinaryType, StringType, StructType

import jetstream_ext as jsx
from jetstream_ext.client import fenced_write
from jetstream_ext.errors import server_error
from jetstream_ext.spark.ledger import SinkError

QUERY = "a-query"


@pytest.fixture
def stream(with_js: Any, stream_name: Callable[[], str]) -> str:
    name = stream_name()

    async def make(js: JetStreamContext) -> None:
        await js.add_stream(
            StreamConfig(
                name=name,
                subjects=[f"{name}.*", f"_spark.{name}.>"],
                allow_direct=True,
                allow_batched=True,
                allow_atomic=True,
            )
        )

    with_js(make)
    return name


@pytest.fixture
def write(sink: Any, stream: str) -> Callable[..., tuple[int, int]]:
    """Run a task; return how many rows it had, and how many of them were stored before."""

    def run(rows: Any, batch: int = 0, partition: int = 0, semantics: str = "transactional", **options: str) -> Any:
        if semantics == "transactional":
            options.setdefault("sinkPartitions", "2")
        target = sink(stream, semantics, requestTimeout="3", **options)
        given = (row if isinstance(row, Exception) else (f"{stream}.{row % 3}", b"%d" % row) for row in rows)
        done = target.task(target.writer(), given, batch=batch, partition=partition)
        return done.rows, done.skipped

    return run


@pytest.fixture
def stored(with_js: Any, stream: str) -> Callable[[], list[int]]:
    def read() -> list[int]:
        messages = with_js(lambda js: jsx.DirectGet(js, stream).scan(subject=f"{stream}.*").to_list())
        return [int(message.data) for message in messages]

    return read


@pytest.mark.parametrize("semantics", ["dedupe", "transactional", "none"])
def test_rows_are_stored_in_order(write: Any, stored: Any, semantics: str) -> None:
    assert write(range(2500), semantics=semantics) == (2500, 0)
    assert stored() == list(range(2500))


def ids(with_js: Any, stream: str) -> list[str]:
    messages = with_js(lambda js: jsx.DirectGet(js, stream).scan().to_list())
    return [message.headers["Nats-Msg-Id"] for message in messages]


def test_ids_name_query_batch_partition_and_content(write: Any, with_js: Any, stream: str) -> None:
    write([5, 5, 6, 5], batch=3, partition=1, semantics="dedupe")
    first, second, other, third = ids(with_js, stream)
    assert re.fullmatch(rf"{QUERY}:3:1:[A-Za-z0-9+/]{{16}}", first)
    assert (second, third) == (f"{first}:1", f"{first}:2")
    assert other != first
    assert len(other) == len(first)


def test_equal_rows_of_two_partitions_are_stored(write: Any, stored: Any) -> None:
    for semantics in ("dedupe", "transactional"):
        for partition in range(2):
            write([1, 1], partition=partition, semantics=semantics)
    assert stored() == [1] * 8


def test_repeated_rows_are_stored_once(cell: Any, write: Any, stored: Any) -> None:
    for batch, (semantics, end) in enumerate(itertools.product(["dedupe", "transactional"], [150, 2100])):
        with cell(semantics, end):
            with pytest.raises(ZeroDivisionError):
                write([*range(end), ZeroDivisionError()], batch, semantics=semantics)
            write(range(2500), batch, semantics=semantics)
            again = write(range(2500), batch, semantics=semantics)
            assert again == (2500, 2500 if semantics == "transactional" else 0)
            assert Counter(stored()) == dict.fromkeys(range(2500), batch + 1)


def test_rows_are_recognised_in_another_order_and_without_some(cell: Any, write: Any, stored: Any) -> None:
    for batch, semantics in enumerate(["dedupe", "transactional"]):
        with cell(semantics):
            write([*[5] * 10, *range(10, 20)], batch, semantics=semantics)
            write([5, *reversed(range(10, 30))], batch, semantics=semantics)
            assert Counter(stored()) == {
                row: count * (batch + 1) for row, count in Counter([*[5] * 10, *range(10, 30)]).items()
            }


def test_rows_with_ids_of_their_own_do_not_count_as_equal_rows(sink: Any, stream: str, with_js: Any) -> None:
    target, row = sink(stream), (f"{stream}.1", b"1")
    for rows in ([(*row, "own"), row], [row, row]):
        target.task(target.writer(), rows)
    own, made, another = ids(with_js, stream)
    assert (own, another) == ("own", f"{made}:1")


def test_headers_of_kafkas_shape(cell: Any, sink: Any, stream: str, with_js: Any) -> None:
    """In order, also those with equal names; a null value is an empty one, and null headers are none."""

    async def last(js: JetStreamContext) -> list[tuple[bytes, bytes]]:
        message = await jsx.DirectGet(js, stream).get_last(f"{stream}.a")
        return [pair for pair in message.raw_headers if not pair[0].startswith(b"Nats-")]

    for value, encode in ((StringType(), str), (BinaryType(), str.encode)):
        headers = ArrayType(StructType().add("key", StringType()).add("value", value))
        columns = {"subject": StringType(), "data": BinaryType(), "headers": headers}
        target = sink(stream, "transactional", columns, sinkPartitions="1")

        def write(*pairs: tuple[str | None, Any], batch: int, target: Any = target) -> list[tuple[bytes, bytes]]:
            given = [{"key": name, "value": text} for name, text in pairs]
            target.write([[(f"{stream}.a", b"", given or None)]], batch=batch)
            found: list[tuple[bytes, bytes]] = with_js(last)
            return found

        with cell(value):
            batch = 10 if isinstance(value, BinaryType) else 0
            pairs = [("B", encode("1")), ("A", encode("\u00fc")), ("B", None), ("A", encode("3"))]
            assert write(*pairs, batch=batch) == [(b"B", b"1"), (b"A", "\u00fc".encode()), (b"B", b""), (b"A", b"3")]
            assert write(batch=batch + 1) == []
            with pytest.raises(jsx.errors.JetStreamExtError, match=r"row 0 .*: one of its headers has no name \(key\)"):
                write((None, encode("1")), batch=batch + 2)
    with pytest.raises(jsx.errors.JetStreamExtError, match=r"row 0 .*: its header 'A' is not UTF-8"):
        write(("A", b"\xff"), batch=13)


def test_an_old_attempt_is_ended_by_a_later_micro_batch(write: Any, stored: Any) -> None:
    write(range(10), batch=0)
    write(range(10, 20), batch=1)
    with pytest.raises(jsx.errors.FencedError, match="micro-batch 1 is already stored"):
        write(range(10), batch=0)
    assert stored() == list(range(20))


def test_a_transient_error_that_lasts_too_long_is_raised(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def busy(js: JetStreamContext, messages: Any, **options: Any) -> Any:
        raise server_error(code=503, err_code=10210, description="busy")

    monkeypatch.setattr(fenced_write, "publish_atomic", busy)
    monkeypatch.setattr("jetstream_ext.spark.ledger.PATIENCE", 3.0)
    with pytest.raises(
        SinkError, match=r"micro-batch 0: every attempt failed for 3 s: .*busy.*; its rows may be stored; restart"
    ):
        write(range(10))


def test_markers_fit_into_a_stream_of_small_messages(cell: Any, sink: Any, with_js: Any, stream_name: Any) -> None:
    for limit in (450, 600, 1024, 4096):
        with cell(limit):
            name = stream_name()
            config = StreamConfig(name=name, subjects=[f"{name}.*", f"_spark.{name}.>"], allow_atomic=True)
            with_js(lambda js, config=config, limit=limit: js.add_stream(config.evolve(max_msg_size=limit)))
            target, rows = (
                sink(name, "transactional", sinkPartitions="1"),
                [(f"{name}.1", b"%d" % row) for row in range(500)],
            )
            for some, skipped in ((rows, 0), (rows[::-1], 500)):
                done = target.task(target.writer(), some, batch=1 << 62)
                assert (done.rows, done.skipped) == (500, skipped)


def test_an_error_names_the_rows_among_which_one_became_too_large(
    cell: Any, with_js: Any, sink: Any, stream_name: Any
) -> None:
    """The stream takes less than when the driver checked it."""
    for semantics, where in [("transactional", "micro-batch 0: .*"), ("dedupe", "row 13 of partition 0: .*")]:
        with cell(semantics):
            name = stream_name()
            config = StreamConfig(
                name=name, subjects=[f"{name}.*", f"_spark.{name}.>"], allow_batched=True, allow_atomic=True
            )
            with_js(lambda js, config=config: js.add_stream(config))
            target = sink(name, semantics, **({"sinkPartitions": "1"} if semantics == "transactional" else {}))
            writer = target.writer()
            with_js(lambda js, config=config: js.update_stream(config.evolve(max_msg_size=2000)))
            rows = [(f"{name}.1", bytes(3000) if row == 13 else b"") for row in range(20)]
            with pytest.raises(SinkError, match=rf"stream '{name}'[:,] {where}(it was not added|maximum|takes 2000)"):
                target.task(writer, rows)
