"""What Spark calls in a streaming query: the reader of the `jetstream` source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from jetstream_ext.spark.given import OptionError
from jetstream_ext.spark.options import ReadOptions
from jetstream_ext.spark.partitions import JetStreamPartition, read_partition

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:  # before Spark 4.2
    HAS_LIMITS = False

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """Stand in for what this Spark does not have."""
else:
    HAS_LIMITS = True

if TYPE_CHECKING:
    from pyarrow import RecordBatch

    from jetstream_ext.spark.following import Limit


class JetStreamStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows streams.

    One instance lives on the driver as long as the query; `read` runs on copies of it.

    Args:
        options: The read.
        schema: The columns.

    Raises:
        OptionError: A limit is given and this Spark has none.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        from jetstream_ext.spark.following import Follower

        if not HAS_LIMITS and (options.max_offsets is not None or options.max_bytes is not None):
            from pyspark import __version__

            name = "maxBytesPerTrigger" if options.max_offsets is None else "maxOffsetsPerTrigger"
            raise OptionError(
                f"option {name!r}: Spark {__version__} cannot limit a micro-batch of a Python source, which needs "
                "Spark 4.2; leave it out or upgrade"
            )
        self._options = options
        self._schema = schema
        self._follower = Follower(options)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the offset before the first batch."""
        offset: dict[str, Any] = self._run("initial")
        return offset

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Remember what there is: the query ends when that is read."""
        self._run("freeze")

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit of a batch. Spark takes one of its own kinds; `latestOffset` applies both."""
        if self._options.max_offsets is not None:
            return ReadMaxRows(self._options.max_offsets)
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any] | None = None, limit: Any = None) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next batch (Spark before 4.2 says neither where it starts nor how far it may go)."""
        offset: dict[str, Any] = self._run("latest", start, self._limit(limit))
        return offset

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return the newest offset, for ``progress.sources[].latestOffset``."""
        return self._follower.reported()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return what to read from `start` to `end`."""
        return [JetStreamPartition(part) for part in self._run("plan", start, end)]

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        """Read one range (called on an executor)."""
        return read_partition(self._options, self._schema, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: Spark's checkpoint is the only record of the query."""

    def stop(self) -> None:
        """Do nothing: the connection belongs to the process."""

    def _limit(self, limit: Any) -> Limit | None:
        from jetstream_ext.spark.following import Limit

        if limit is None or isinstance(limit, ReadAllAvailable):
            return None
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else self._options.max_offsets
        size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._options.max_bytes
        return Limit(rows, size)

    def _run(self, method: str, *arguments: Any) -> Any:
        from jetstream_ext.spark.connections import connections

        with connections().lend(self._options.connection, "jetstream-ext spark driver") as lease:
            context = lease.connection.context(self._options)
            return lease.run(getattr(self._follower, method)(context, *arguments))
