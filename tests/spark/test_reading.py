"""One partition, read as an executor reads it, without Spark."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig
from pyspark.sql.types import StructType

import jetstream_ext as jsx
from jetstream_ext.client.api import stream_state
from jetstream_ext.client.connection import Context
from jetstream_ext.spark import reading
from jetstream_ext.spark.connection import Connections
from jetstream_ext.spark.offsets import Seen
from jetstream_ext.spark.options import ReadOptions
from jetstream_ext.spark.planning import DataLossError
from jetstream_ext.spark.ranges import SequenceRange
from jetstream_ext.spark.source import JetStreamDataSource
from jetstream_ext.testing import NatsServer


@pytest.fixture
def stream(with_js: Any, stream_name: Callable[[], str]) -> str:
    """A stream of 50 messages on 10 subjects, with the sequence as its text."""
    name = stream_name()

    async def fill(js: JetStreamContext) -> None:
        await js.add_stream(StreamConfig(name=name, subjects=[f"{name}.*"], allow_direct=True, allow_batched=True))
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add_many((f"{name}.{i % 10}", b"%d" % i) for i in range(1, 51))

    with_js(fill)
    return name


@pytest.fixture
def batches(server: NatsServer, cache: Connections) -> Callable[..., Iterator[pa.RecordBatch]]:
    def read(part: SequenceRange, schema: StructType | None = None, **given: str) -> Iterator[pa.RecordBatch]:
        options = {"servers": server.url, "stream": part.stream, "requestTimeout": "3"} | given
        source = JetStreamDataSource(options)
        return reading.read_range(ReadOptions.parse(options, streaming=None), schema or source.schema(), part)

    return read


@pytest.fixture
def seqs(batches: Callable[..., Iterator[pa.RecordBatch]]) -> Callable[..., list[int]]:
    def read(part: SequenceRange, **given: str) -> list[int]:
        return [seq for batch in batches(part, **given) for seq in batch.column("seq").to_pylist()]

    return read


def test_a_range_that_ends_in_a_gap_is_read(cell: Any, stream: str, seqs: Any, with_js: Any) -> None:
    async def delete(js: JetStreamContext) -> None:
        for seq in (18, 19, 20, 48, 49, 50):
            await js.delete_msg(stream, seq)

    with_js(delete)
    for tail_check in ["true", "false"]:
        with cell(tail_check):
            assert seqs(SequenceRange(stream, 11, 20), tailCheck=tail_check) == list(range(11, 18))
            assert seqs(SequenceRange(stream, 41, 50), tailCheck=tail_check) == list(range(41, 48))
            assert seqs(SequenceRange(stream, 48, 50), tailCheck=tail_check) == []
            assert seqs(SequenceRange(stream, 19, 22), tailCheck=tail_check) == [21, 22]


def test_filters_select_the_rows(stream: str, seqs: Any) -> None:
    part = SequenceRange(stream, 1, 50)
    assert seqs(replace(part, filters=(f"{stream}.3",), on_server=True)) == [3, 13, 23, 33, 43]
    assert seqs(replace(part, filters=(f"{stream}.3",))) == [3, 13, 23, 33, 43]
    assert seqs(replace(part, filters=(f"{stream}.3", f"{stream}.4"))) == [3, 4, 13, 14, 23, 24, 33, 34, 43, 44]
    assert seqs(replace(part, filters=(f"{stream}.3", f"{stream}.4", "*.3"), on_server=True)) == [
        *(3, 4, 13, 14, 23, 24, 33, 34, 43, 44)
    ]
    assert seqs(replace(part, filters=(f"{stream}.3", f"{stream}.4", "other"), on_server=True)) == [
        *(3, 4, 13, 14, 23, 24, 33, 34, 43, 44)
    ]
    assert seqs(replace(part, filters=("other",))) == []
    assert seqs(replace(part, filters=("other",), on_server=True)) == []


def test_several_filters_read_in_small_replies(stream: str, seqs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "DEFAULT_MAX_BYTES", 300)
    part = SequenceRange(stream, 1, 50, filters=("*.3", "*.4", f"{stream}.4", "*.5"), on_server=True)
    assert seqs(part) == [seq for seq in range(1, 51) if seq % 10 in (3, 4, 5)]


def test_a_schema_selects_the_columns(stream: str, batches: Callable[..., Iterator[pa.RecordBatch]]) -> None:
    schema = StructType().add("data", "binary").add("seq", "long")
    [batch] = batches(SequenceRange(stream, 5, 5), schema)
    assert batch.to_pylist() == [{"data": b"5", "seq": 5}]


class TestHeadThatExpires:
    """Between the plan and the read, the stream lost sequences 1 to 25."""

    @pytest.fixture(autouse=True)
    def _purged(self, stream: str, with_js: Any) -> None:
        with_js(lambda js: js.purge_stream(stream, seq=26))

    def test_an_expired_head_is_a_loss(self, cell: Any, stream: str, seqs: Any) -> None:
        for first, last in [(1, 50), (11, 50), (11, 20), (25, 30)]:
            with cell(first, last):
                lost = "sequence 25" if first == 25 else f"sequences {first} to {min(last, 25)}"
                message = f"{lost} of stream '{stream}' {'is' if first == 25 else 'are'} gone .*now starts at 26"
                with pytest.raises(DataLossError, match=message):
                    seqs(SequenceRange(stream, first, last))

    def test_an_expired_head_is_a_loss_with_a_filter(self, stream: str, seqs: Any) -> None:
        with pytest.raises(DataLossError, match="sequences 11 to 25"):
            seqs(SequenceRange(stream, 11, 50, (f"{stream}.7",), on_server=True))

    def test_an_expired_head_is_a_warning_if_losses_are_tolerated(
        self, stream: str, seqs: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, "jetstream_ext"):
            assert seqs(SequenceRange(stream, 11, 30), failOnDataLoss="false") == [26, 27, 28, 29, 30]
        assert "sequences 11 to 25" in caplog.text

    def test_an_expired_head_is_no_loss_for_an_earliest_start(self, stream: str, seqs: Any) -> None:
        assert seqs(SequenceRange(stream, 1, 30, from_head=True)) == [26, 27, 28, 29, 30]

    def test_a_deleted_message_behind_the_head_is_no_loss(self, stream: str, seqs: Any, with_js: Any) -> None:
        with_js(lambda js: js.delete_msg(stream, 28))
        assert seqs(SequenceRange(stream, 28, 30)) == [29, 30]
        assert seqs(SequenceRange(stream, 26, 30)) == [26, 27, 29, 30]


def _planned(with_js: Any, stream: str) -> SequenceRange:
    """Return the range of a whole stream as a plan makes it."""
    state = with_js(lambda js: stream_state(Context(js), stream, 10))
    return SequenceRange(stream, 1, state.last_seq, seen=Seen.of(state))


def test_no_row_of_a_recreated_stream_is_read(
    stream: str, seqs: Any, with_js: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The next micro-batch reads them."""
    part = _planned(with_js, stream)

    async def recreate(js: JetStreamContext) -> None:
        config = (await js.stream_info(stream)).config
        await js.delete_stream(stream)
        await js.add_stream(config)
        for _ in range(60):
            await js.publish(f"{stream}.1", b"another stream")

    with_js(recreate)
    with pytest.raises(DataLossError, match="re-created while it was read"):
        seqs(part)
    with caplog.at_level(logging.WARNING, "jetstream_ext.spark"):
        assert seqs(part, failOnDataLoss="false") == []
    assert "re-created while it was read" in caplog.text
    with pytest.raises(DataLossError, match="re-created while it was read"):
        seqs(part, failOnDataLoss="false", onRecreate="fail")


def test_a_stream_that_is_deleted_before_its_partition_is_read_is_a_loss(
    stream: str, seqs: Any, with_js: Any, caplog: pytest.LogCaptureFixture
) -> None:
    part = _planned(with_js, stream)
    with_js(lambda js: js.delete_stream(stream))
    with pytest.raises(DataLossError, match="was deleted"):
        seqs(part)
    with caplog.at_level(logging.WARNING, "jetstream_ext.spark"):
        assert seqs(part, failOnDataLoss="false") == []
    assert "was deleted" in caplog.text
