"""What Spark calls to write: the `jetstream` sink, batch and streaming.

The driver makes a writer for each write (for every micro-batch of a streaming query a new one), Spark carries it to the
tasks and back to the driver; it keeps nothing but what the driver found out. Which query and which micro-batch it is
stands in the task's local properties, and nowhere else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from pyspark import TaskContext
from pyspark.sql import datasource
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from jetstream_ext.spark.markers import ReplayError
from jetstream_ext.spark.patience import SinkError
from jetstream_ext.spark.rows import Columns, RowReader
from jetstream_ext.spark.sink_states import SinkFacts
from jetstream_ext.spark.write_options import WriteOptions

if TYPE_CHECKING:
    from jetstream_ext.spark.connections import Lease
    from jetstream_ext.spark.rows import Message

_log = logging.getLogger("jetstream_ext")

_QUERY: Final = "sql.streaming.queryId"
_BATCH: Final = "streaming.sql.batchId"
# Of rows that come one by one: how many are stored together, and how many are taken without looking at their bytes.
_ROWS_AT_ONCE: Final = 10_000
_BYTES_AT_ONCE: Final = 8 << 20
_ROWS_A_TIME: Final = 100

# Spark 4.0 hands rows to a streaming sink; later ones Arrow.
_HAS_STREAM_ARROW: Final = hasattr(datasource, "DataSourceStreamArrowWriter")
if TYPE_CHECKING or not _HAS_STREAM_ARROW:
    _StreamWriter = DataSourceStreamWriter
else:
    _StreamWriter = datasource.DataSourceStreamArrowWriter


class Written(WriterCommitMessage):
    """What a task did.

    Attributes:
        rows: Rows that it was given.
        skipped: Rows of them that an earlier attempt had stored.
        writer: The query.
    """

    def __init__(self, rows: int, skipped: int, writer: str) -> None:
        self.rows = rows
        self.skipped = skipped
        self.writer = writer


class _Writer:
    """What both kinds of writer share."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        from jetstream_ext.spark.sink_states import check_sink

        self._options = options
        self._columns = Columns.of(schema, options)
        self._facts: SinkFacts = _on_driver(
            options, lambda lease: check_sink(lease.connection.context(options), options)
        )

    def _write(self, writer: str, batch: int, rows: Iterator[Any], *, arrow: bool) -> Written:
        from jetstream_ext.spark.writing import Task, write_partition

        context = _task()
        reader = RowReader(self._columns, self._options, self._facts.subjects, context.partitionId())
        chunks = map(reader.from_arrow, rows) if arrow else _chunks(reader, rows)
        done = write_partition(self._options, self._facts, Task(writer, batch, context.partitionId()), chunks)
        return Written(done.rows, done.skipped, writer)

    def _committed(self, messages: Sequence[WriterCommitMessage | None], batch: int) -> None:
        written = [message for message in messages if isinstance(message, Written)]
        rows, skipped = sum(one.rows for one in written), sum(one.skipped for one in written)
        _log.info(
            "stream %r: batch %d has %d rows, %d of them stored before", self._options.stream, batch, rows, skipped
        )
        count = self._options.sink_partitions
        if count is None or not rows or len(messages) == count:
            return
        from jetstream_ext.spark.layout import correct_layout

        options, writer = self._options, written[0].writer
        _on_driver(
            options,
            lambda lease: correct_layout(
                lease.connection.context(options), options, writer, batch, len(messages), rollup=self._facts.rollup
            ),
        )
        raise ReplayError(
            f"stream {options.stream!r}: the option sinkPartitions says {count}, but the rows came in {len(messages)} "
            f"partitions; set it to {len(messages)} and start again (every row is stored once, and none will be repeated)"
        )

    def _aborted(self, messages: Sequence[WriterCommitMessage | None], batch: int) -> None:
        # Nothing to take back: what was stored stays, and is recognized when the batch comes again.
        done = sum(isinstance(message, Written) for message in messages)
        _log.warning("stream %r: batch %d failed; %d of its tasks were done", self._options.stream, batch, done)


class JetStreamWriter(_Writer, DataSourceArrowWriter):
    """Writes a DataFrame.

    Args:
        options: The write.
        schema: The rows' columns.

    Raises:
        OptionError: A column or an option is wrong.
        PlanningError: The stream cannot be written to this way.
    """

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        from jetstream_ext.spark.writing import new_writer

        super().__init__(options, schema)
        # Made here, for all attempts at all tasks.
        self._writer = options.write_id or new_writer()

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Store the rows of one partition (called on an executor)."""
        return self._write(self._writer, 0, iterator, arrow=True)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Check the end of the write (called on the driver)."""
        self._committed(messages, 0)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Say that the write failed (called on the driver)."""
        self._aborted(messages, 0)


class JetStreamStreamWriter(_Writer, _StreamWriter):
    """Writes the micro-batches of a streaming query; otherwise as `JetStreamWriter`."""

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Store the rows of one partition (called on an executor)."""
        context = _task()
        query, batch = context.getLocalProperty(_QUERY), context.getLocalProperty(_BATCH)
        if not query or not batch:
            raise SinkError(
                "this Spark does not tell its tasks the query and the micro-batch, without which rows that come again "
                "cannot be recognized; use foreachBatch, and df.write with a writeId"
            )
        return self._write(query, int(batch), iterator, arrow=_HAS_STREAM_ARROW)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Check the end of the micro-batch (called on the driver)."""
        self._committed(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Say that the micro-batch failed (called on the driver)."""
        self._aborted(messages, batchId)


def _task() -> TaskContext:
    context = TaskContext.get()
    assert context is not None
    return context


def _chunks(reader: RowReader, rows: Iterator[Any]) -> Iterator[list[Message]]:
    collected: list[Message] = []
    size = 0
    while some := reader.from_rows(islice(rows, _ROWS_A_TIME)):
        collected += some
        size += sum(len(message[1]) for message in some)
        if len(collected) >= _ROWS_AT_ONCE or size >= _BYTES_AT_ONCE:
            yield collected
            collected, size = [], 0
    yield collected


def _on_driver(options: WriteOptions, work: Callable[[Lease], Any]) -> Any:
    from jetstream_ext.spark.connections import connections

    with connections().lend(options.connection, "jetstream-ext spark driver") as lease:
        return lease.run(work(lease))
