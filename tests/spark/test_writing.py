"""One partition, written as an executor writes it, without Spark."""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

import jetstream_ext as jsx
from jetstream_ext.client import fenced_write
from jetstream_ext.errors import (
    FencedError,
    server_error,
)
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.spark.connection import Connections
from jetstream_ext.spark.markers import ReplayError
from jetstream_ext.spark.options import WriteOptions
from jetstream_ext.spark.planning import state_of
from jetstream_ext.spark.rows import Message, Rows
from jetstream_ext.spark.sink import Task, Written, write_partition
from jetstream_ext.spark.transactional import SinkError
from jetstream_ext.testing import NatsServer

QUERY = "q1"


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
def change(with_js: Any, stream: str) -> Callable[..., None]:
    """Change the configuration of the stream."""

    async def run(js: JetStreamContext, config: dict[str, Any]) -> None:
        found = (await js.stream_info(stream)).config
        await js.update_stream(found.evolve(**config))

    return lambda **config: with_js(lambda js: run(js, config))


@pytest.fixture
def write(server: NatsServer, stream: str, cache: Connections, with_js: Any) -> Callable[..., Written]:
    def run(rows: Any, batch: int = 0, partition: int = 0, semantics: str = "transactional", **options: str) -> Written:
        given = {"servers": server.url, "stream": stream, "semantics": semantics, "requestTimeout": "3"} | options
        if semantics == "transactional":
            given.setdefault("sinkPartitions", "2")
        state = with_js(lambda js: state_of(js, stream))
        parsed = WriteOptions.parse(given, streaming=True)
        return write_partition(parsed, state, Task(QUERY, batch, partition), lambda *_: chunks(stream, rows))

    return run


def chunks(stream: str, rows: Any) -> Iterator[Rows]:
    """Yield numbered rows, ten at a time; raise an exception among them."""
    chunk: list[Message] = []
    for row in rows:
        if isinstance(row, Exception):
            raise row
        chunk.append((f"{stream}.{row % 3}", b"%d" % row, None, None))
        if len(chunk) == 10:
            yield Rows.of(chunk)
            chunk = []
    yield Rows.of(chunk)


@pytest.fixture
def stored(with_js: Any, stream: str) -> Callable[[], list[int]]:
    def read() -> list[int]:
        messages = with_js(lambda js: jsx.DirectGet(js, stream).scan(subject=f"{stream}.*").to_list())
        return [int(message.data) for message in messages]

    return read


@pytest.mark.parametrize("semantics", ["dedupe", "transactional", "none"])
def test_rows_are_stored_in_order(write: Any, stored: Any, semantics: str) -> None:
    assert write(range(2500), semantics=semantics) == Written(QUERY, 2500)
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


def test_dedupe_stores_repeated_rows_once(write: Any, stored: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        write([*range(150), ZeroDivisionError()], semantics="dedupe")
    write(range(200), semantics="dedupe")
    write(range(200), semantics="dedupe")
    assert stored() == list(range(200))
    write(range(200), batch=1, semantics="dedupe")
    assert len(stored()) == 400


def test_dedupe_recognises_rows_in_another_order(write: Any, stored: Any) -> None:
    write([1, 2, 3, 2], semantics="dedupe")
    write([2, 2, 1, 3], semantics="dedupe")
    assert stored() == [1, 2, 3, 2]


def test_dedupe_recognises_the_rest_after_equal_rows_vanished(write: Any, stored: Any) -> None:
    write([*[5] * 10, *range(10, 20)], semantics="dedupe")
    write([5, *range(10, 30)], semantics="dedupe")
    assert Counter(stored()) == Counter([*[5] * 10, *range(10, 30)])


def test_rows_with_ids_of_their_own_do_not_count_as_equal_rows(
    server: NatsServer, stream: str, cache: Connections, with_js: Any
) -> None:
    options = WriteOptions.parse({"servers": server.url, "stream": stream}, streaming=True)
    state = StreamState(stream, "", {"subjects": [f"{stream}.*"]})
    row = (f"{stream}.1", b"1", None)
    for chunk in ([(*row, "own"), (*row, None)], [(*row, None), (*row, None)]):
        write_partition(options, state, Task(QUERY, 0, 0), lambda *_, rows=chunk: [Rows.of(rows)])
    own, made, another = ids(with_js, stream)
    assert (own, another) == ("own", f"{made}:1")


class TestTransactions:
    def test_repeated_rows_are_stored_once(self, write: Any, stored: Any) -> None:
        rows = range(2500)
        assert write(rows) == Written(QUERY, 2500)
        assert write(rows) == Written(QUERY, 2500, skipped=2500)
        assert stored() == list(rows)
        assert write(rows, batch=1) == Written(QUERY, 2500)
        assert len(stored()) == 5000

    def test_a_retry_stores_the_remaining_rows(self, write: Any, stored: Any) -> None:
        with pytest.raises(ZeroDivisionError):
            write([*range(2100), ZeroDivisionError()])
        assert stored() in (list(range(999)), list(range(1998)))
        assert write(range(2500)).rows == 2500
        assert stored() == list(range(2500))

    def test_an_old_attempt_is_fenced(self, write: Any, stored: Any) -> None:
        write(range(10), batch=0)
        write(range(10, 20), batch=1)
        with pytest.raises(FencedError, match="micro-batch 1 is already stored"):
            write(range(10), batch=0)
        with pytest.raises(
            FencedError, match="start with a new checkpoint; a batch write needs another writeId or txn"
        ):
            write(range(10), batch=0)
        assert stored() == list(range(20))

    def test_a_transient_error_that_lasts_too_long_is_raised(self, write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        async def busy(js: JetStreamContext, messages: Any, **options: Any) -> Any:
            raise server_error(code=503, err_code=10210, description="busy")

        monkeypatch.setattr(fenced_write, "publish_atomic", busy)
        monkeypatch.setattr("jetstream_ext.spark.transactional.PATIENCE", 3.0)
        with pytest.raises(
            SinkError,
            match=r"partition 0 of micro-batch 0: every attempt failed for 3 s: .*busy.*; its rows may be stored; restart",
        ):
            write(range(10))

    def test_markers_fit_into_a_stream_of_small_messages(self, cell: Any, write: Any, stored: Any, change: Any) -> None:
        for count, limit in enumerate((450, 600, 1024, 4096), 1):
            with cell(limit):
                change(max_msg_size=limit)
                batch = (1 << 62) + count
                assert write(range(500), batch=batch) == Written(QUERY, 500)
                assert write([*reversed(range(500))], batch=batch) == Written(QUERY, 500, skipped=500)
                assert stored() == [*range(500)] * count


class TestRemovedMarkers:
    """Attempts that cannot read all markers of their micro-batch."""

    @pytest.fixture
    def remove(self, with_js: Any, stream: str) -> Callable[..., None]:
        """Remove all markers of the partition but the newest `keep`."""

        def run(keep: int) -> None:
            with_js(lambda js: js.purge_stream(stream, subject=f"_spark.{stream}.{QUERY}.0", keep=keep))

        return run

    def test_other_rows_are_refused(self, cell: Any, write: Any, stored: Any, remove: Any) -> None:
        write(range(2500))
        remove(1)
        refusal = r"partition 0 of micro-batch 0: 2,500 of its rows .* their markers were removed from the stream"
        for rows in ([1, 0, *range(2, 2500)], range(1000), [], [*range(1997), 5]):
            with cell(len(rows)):
                with pytest.raises(ReplayError, match=refusal):
                    write(rows)
                assert stored() == list(range(2500))


def test_an_error_names_the_rows_among_which_one_is_invalid(
    cell: Any, stream: str, server: NatsServer, cache: Connections
) -> None:
    for (semantics, where), (data, headers) in itertools.product(
        [
            ("transactional", r"partition 1 of micro-batch 0: one of its rows 10 to 14"),
            ("none", r"row 0 of partition 1, or a later one, could not be stored"),
        ],
        [(bytes(2 << 20), None), (b"", {"A": "1\r\nNats-Rollup: all"})],
    ):
        with cell(semantics, where, data, headers):
            given = {"servers": server.url, "stream": stream, "semantics": semantics}
            if semantics == "transactional":
                given |= {"sinkPartitions": "2", "transactionRows": "10"}
            options = WriteOptions.parse(given, streaming=True)
            rows = [(f"{stream}.1", b"1", None, None)] * 14 + [(f"{stream}.1", data, headers, None)]
            with pytest.raises(SinkError, match=rf"{where}( was refused)?: .*(max_payload|line break)"):
                write_partition(
                    options,
                    StreamState(stream, "", {"subjects": [">"]}),
                    Task(QUERY, 0, 1),
                    lambda *_, rows=rows: [Rows.of(rows)],
                )


def test_an_error_names_the_row_that_was_refused(stream: str, server: NatsServer, cache: Connections) -> None:
    options = WriteOptions.parse({"servers": server.url, "stream": stream, "requestTimeout": "3"}, streaming=True)
    small = [(f"{stream}.1", b"", None, None)] * 10
    messages = [(f"{stream}.1", bytes(2 << 20) if row == 3 else b"", None, None) for row in range(5)]
    with pytest.raises(SinkError, match=r"row 13 of partition 1: .* more than the server's max_payload") as caught:
        write_partition(
            options,
            StreamState(stream, "", {"subjects": [">"]}),
            Task(QUERY, 0, 1),
            lambda *_: map(Rows.of, [small, messages]),
        )
    assert str(caught.value).endswith("; rows 0 to 12 are stored")
    assert "message 3" not in str(caught.value)
