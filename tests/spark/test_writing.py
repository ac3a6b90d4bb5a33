"""One partition, written as an executor writes it, without Spark."""

import asyncio
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

import jetstream_ext as jsx
from jetstream_ext.client import fenced_write
from jetstream_ext.errors import (
    BatchOutcomeUnknownError,
    FencedError,
    StreamMismatchError,
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


def last(with_js: Any, stream: str, name: str) -> dict[str, Any]:
    message = with_js(lambda js: jsx.DirectGet(js, stream).get_last(f"_spark.{stream}.{QUERY}.{name}"))
    return json.loads(message.data)


@pytest.mark.parametrize("semantics", ["dedupe", "transactional", "none"])
def test_rows_are_stored_in_order(write: Any, stored: Any, semantics: str) -> None:
    assert write(range(2500), semantics=semantics) == Written(QUERY, 2500)
    assert stored() == list(range(2500))


def test_a_partition_without_rows_stores_nothing(cell: Any, write: Any, stored: Any) -> None:
    for semantics in ["dedupe", "transactional", "none"]:
        with cell(semantics):
            assert write([], semantics=semantics) == Written(QUERY, 0)
            assert stored() == []


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
    def test_a_marker_and_the_layout_are_stored(self, write: Any, with_js: Any, stream: str) -> None:
        write(range(2500), batch=7, partition=1)
        marker = last(with_js, stream, "1")
        assert marker.items() >= {"v": 2, "batch": 7, "rows": 2500}.items()
        assert len(marker["digests"]) == 16 * 502
        before = with_js(lambda js: js.get_msg(stream, marker["previous"]))
        assert json.loads(before.data)["rows"] == 1998
        assert last(with_js, stream, "_layout") == {
            "v": 1,
            "batch": 7,
            "partitions": 2,
            "complete": False,
            "attempt": "",
            "minimum": 0,
        }

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

    def test_an_old_attempt_is_fenced_by_the_layout_alone(self, write: Any, stored: Any) -> None:
        write(range(10), batch=1, partition=1)
        with pytest.raises(FencedError):
            write(range(10), batch=0, partition=0)
        assert stored() == list(range(10))

    def test_another_number_of_partitions_is_refused(self, write: Any, stored: Any) -> None:
        write(range(10), partition=1)
        with pytest.raises(ReplayError, match="was first stored with 2 partitions and now has 3"):
            write(range(10), partition=0, sinkPartitions="3")
        with pytest.raises(ReplayError, match="a partition with index 2"):
            write(range(10), partition=2)
        assert stored() == list(range(10))
        write(range(10), batch=1, sinkPartitions="3")

    def test_two_attempts_at_once_store_each_row_once(
        self, cell: Any, write: Any, stored: Any, own_connections: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Before one of the first attempt's transactions, and after it has read the markers, the second stores everything."""
        publish = fenced_write.publish_atomic

        def run(batch: int, others: Any, at: int) -> None:
            calls = itertools.count(1)

            async def late(js: JetStreamContext, messages: Any, **options: Any) -> Any:
                if next(calls) == at:
                    with own_connections():
                        await asyncio.to_thread(write, others, batch=batch, transactionRows="600")
                return await publish(js, messages, **options)

            monkeypatch.setattr(fenced_write, "publish_atomic", late)
            assert write(range(2500), batch=batch).rows == 2500
            assert sorted(stored()) == sorted([*range(2500)] * (batch + 1))

        orders = {"the same order": [*range(2500)], "another order": [*reversed(range(2500))]}
        for batch, (order, at) in enumerate(itertools.product(orders, (1, 2, 3))):
            with cell(order, at):
                run(batch, orders[order], at)

    def test_an_unknown_outcome_is_resolved(
        self, cell: Any, write: Any, stored: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        publish = fenced_write.publish_atomic

        def run(batch: int, stored_before: bool) -> None:
            calls = itertools.count(1)

            async def unsure(js: JetStreamContext, messages: Any, **options: Any) -> Any:
                if next(calls) != 2:
                    return await publish(js, messages, **options)
                if stored_before:
                    await publish(js, messages, **options)
                raise BatchOutcomeUnknownError("no answer")

            monkeypatch.setattr(fenced_write, "publish_atomic", unsure)
            write(range(3500), batch=batch)
            assert stored() == [*range(3500)] * (batch + 1)

        for batch, stored_before in enumerate((True, False)):
            with cell(stored_before):
                run(batch, stored_before)

    def test_transient_errors_are_retried_and_others_are_raised(
        self, write: Any, stored: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        publish = fenced_write.publish_atomic
        failures: list[Exception] = [
            server_error(code=503, err_code=10210, description="busy"),
            server_error(code=503, err_code=10210, description="busy"),
        ]

        async def refused(js: JetStreamContext, messages: Any, **options: Any) -> Any:
            if failures:
                raise failures.pop()
            return await publish(js, messages, **options)

        monkeypatch.setattr(fenced_write, "publish_atomic", refused)
        write(range(10))
        failures.append(StreamMismatchError("not that stream"))
        with pytest.raises(SinkError, match="partition 0 of micro-batch 1: not that stream; restart"):
            write(range(10), batch=1)
        assert stored() == list(range(10))

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

    def test_a_foreign_message_on_the_subject_of_a_marker_is_refused(
        self, cell: Any, write: Any, with_js: Any, stream: str
    ) -> None:
        for message in [
            b"hello",
            b'{"v":true,"batch":0,"rows":1,"digest":""}',
            b'{"v":1,"batch":-1,"rows":1,"digest":""}',
            b'{"v":1,"batch":0,"rows":1.0,"digest":""}',
            b'{"v":1,"batch":0,"rows":1,"digest":%b}' % (b"[" * 900 + b"]" * 900),
        ]:
            with cell(message):
                with_js(lambda js, message=message: js.publish(f"_spark.{stream}.{QUERY}.0", message))
                with pytest.raises(ReplayError, match="is not a marker of this sink"):
                    write(range(10))

    def test_an_expired_marker_whose_delete_marker_is_left_is_no_record(
        self, write: Any, change: Any, with_js: Any, stream: str
    ) -> None:
        change(
            max_age=2, duplicate_window=2, subject_delete_marker_ttl=3600, allow_msg_ttl=True, allow_rollup_hdrs=True
        )
        write(range(10))
        reasons: dict[str, str] = {}
        deadline = time.monotonic() + 60
        while len(reasons) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
            messages = with_js(lambda js: jsx.DirectGet(js, stream).scan(subject=f"_spark.{stream}.>").to_list())
            reasons = {m.subject: m.headers["Nats-Marker-Reason"] for m in messages if not m.data}
        assert set(reasons.values()) == {"MaxAge"}
        change(max_age=0)
        for _ in range(2):
            write(range(10, 25), batch=1)
        messages = with_js(lambda js: jsx.DirectGet(js, stream).scan(subject=f"{stream}.*").to_list())
        assert [int(message.data) for message in messages if message.data] == list(range(10, 25))

    def test_markers_fit_into_a_stream_of_small_messages(self, cell: Any, write: Any, stored: Any, change: Any) -> None:
        for count, limit in enumerate((450, 600, 1024, 4096), 1):
            with cell(limit):
                change(max_msg_size=limit)
                batch = (1 << 62) + count
                assert write(range(500), batch=batch) == Written(QUERY, 500)
                assert write([*reversed(range(500))], batch=batch) == Written(QUERY, 500, skipped=500)
                assert stored() == [*range(500)] * count

    def test_rollup_keeps_only_the_records_of_the_newest_micro_batch(
        self, write: Any, with_js: Any, stream: str, change: Any
    ) -> None:
        change(allow_rollup_hdrs=True)
        for batch in range(3):
            for _ in range(2):
                write(range(2500), batch=batch)
        messages = with_js(lambda js: jsx.DirectGet(js, stream).scan().to_list())
        assert Counter(message.subject.startswith("_spark") for message in messages) == {False: 7500, True: 4}


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

    def test_a_stream_that_keeps_one_message_of_each_subject(self, write: Any, change: Any) -> None:
        change(max_msgs_per_subject=1)
        with pytest.raises(ZeroDivisionError):
            write([*range(2100), ZeroDivisionError()])
        assert write(range(2500)).skipped in (999, 1998)
        assert write(range(2500)).skipped == 2500
        with pytest.raises(ReplayError):
            write([*range(1, 2500)])

    def test_the_markers_vanish_during_an_attempt(
        self, write: Any, stored: Any, remove: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        publish, calls = fenced_write.publish_atomic, [0]

        async def removing(js: JetStreamContext, messages: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == 3:
                await asyncio.to_thread(remove, 0)
            return await publish(js, messages, **options)

        monkeypatch.setattr(fenced_write, "publish_atomic", removing)
        with pytest.raises(ReplayError, match="the markers of its first 1,998 rows were removed"):
            write(range(2500))
        assert stored() == list(range(1998))


class TestVersion1:
    """Markers that an earlier version of this library has stored."""

    @pytest.fixture
    def store(self, with_js: Any, stream: str) -> Callable[..., None]:
        """Store rows, and a marker of version 1 of these and the rows before."""

        async def run(js: JetStreamContext, rows: range, batch: int) -> None:
            digest = blake2b(digest_size=16)
            for row in range(rows.stop):
                data = b"%d" % row
                head = b"0 %d %b" % (len(stream) + 2, f"{stream}.{row % 3}".encode())
                digest.update(b"%d:%b%b" % (len(head + data), head, data))
                if row in rows:
                    await js.publish(f"{stream}.{row % 3}", data)
            marker = {"v": 1, "batch": batch, "rows": rows.stop, "digest": digest.hexdigest()}
            await js.publish(f"_spark.{stream}.{QUERY}.0", json.dumps(marker).encode())

        return lambda rows, batch=0: with_js(lambda js: run(js, rows, batch))

    def test_the_same_rows_are_recognised(self, write: Any, stored: Any, store: Any) -> None:
        store(range(25))
        assert write(range(30), transactionRows="10").skipped == 25
        assert write([*range(28), *range(29, 40), 28], transactionRows="20").skipped == 30
        assert stored() == list(range(40))

    def test_other_rows_are_refused(self, cell: Any, write: Any, stored: Any, store: Any) -> None:
        store(range(25))
        for rows in (range(24), [1, 0, *range(2, 30)]):
            with cell(rows):
                with pytest.raises(ReplayError, match=r"25 of its rows .* written by an older version of this library"):
                    write(rows)
                assert stored() == list(range(25))


def test_markers_fit_into_the_messages_that_a_server_takes(with_js: Any, cache: Connections) -> None:
    with NatsServer(config="max_payload: 2048") as small:
        config = StreamConfig(name="SMALL", subjects=["s.*", "_spark.SMALL.>"], allow_atomic=True, allow_direct=True)
        with_js(lambda js: js.add_stream(config), small.url)
        given = {"servers": small.url, "stream": "SMALL", "semantics": "transactional", "sinkPartitions": "2"}
        options = WriteOptions.parse(given, streaming=True)
        state = with_js(lambda js: state_of(js, "SMALL"), small.url)
        for skipped in (0, 500):
            done = write_partition(options, state, Task(QUERY, 0, 0), lambda *_: chunks("s", range(500)))
            assert done == Written(QUERY, 500, skipped)


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
