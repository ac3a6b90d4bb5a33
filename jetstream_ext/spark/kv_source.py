"""What Spark calls: the `jetstream_kv` data source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import BinaryType, DataType, LongType, StringType, StructType, TimestampType

from jetstream_ext.spark.kv_options import KvOptions
from jetstream_ext.spark.schemas import check_schema, schema_of

if TYPE_CHECKING:
    from pyarrow import RecordBatch

    from jetstream_ext.spark.kv_planning import KvPart

_COLUMNS: Final[dict[str, DataType]] = {
    "bucket": StringType(),
    "key": StringType(),
    "value": BinaryType(),
    "revision": LongType(),
    "created": TimestampType(),
    "operation": StringType(),
}


class JetStreamKvDataSource(DataSource):
    """The `jetstream_kv` format: a key-value bucket as a table of its keys, as of one revision.

    Columns: ``bucket string, key string, value binary, revision long, created timestamp, operation string``.

    Options, besides those of `jetstream` that say how to connect:

    ==================  ==========================================================================================
    ``bucket``          the bucket's name; or as the argument of ``load()``
    ``keys``            keys and patterns of keys (``orders.*``, ``users.>``), comma-separated; all
    ``asOf``            ``now`` (default; when the query is planned), a revision, or an RFC 3339 time with its zone
    ``includeDeleted``  return deleted keys, too: their markers, with ``operation`` DEL or PURGE (false)
    ``consistency``     what happens to a key that changed after ``asOf`` if what it was is gone (a bucket keeps
                        ``history`` values of a key): ``latest`` (default) returns what it is now, so that every key
                        is there once and some have a later revision; ``strict`` fails and says how many
    ``minPartitions``   partitions at least (2)
    ==================  ==========================================================================================

    Needs nats-server 2.11, ``allow_direct`` on the bucket, and permission to publish to
    ``$JS.API.STREAM.INFO.KV_<bucket>``, ``$JS.API.DIRECT.GET.KV_<bucket>`` and ``$JS.API.STREAM.MSG.GET.KV_<bucket>``.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``spark.read.format``."""
        return "jetstream_kv"

    def schema(self) -> StructType:
        """Return all columns; a mistake in the options shows here, at ``load()``.

        Raises:
            OptionError: An option is missing, unknown, malformed or in conflict with another.
        """
        KvOptions.parse(self.options)
        return schema_of(_COLUMNS)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch query.

        Raises:
            OptionError: An option is missing, unknown, malformed or in conflict with another.
            SchemaError: The schema names other columns, or other types, than the format has.
        """
        options = KvOptions.parse(self.options)
        check_schema(schema, _COLUMNS)
        return JetStreamKvReader(options, schema)


class KvPartition(InputPartition):
    """Some keys, as Spark carries them to an executor."""

    def __init__(self, part: KvPart) -> None:
        super().__init__(None)
        self.part = part


class JetStreamKvReader(DataSourceReader):
    """Reads a bucket as it was when the query was planned, or before."""

    def __init__(self, options: KvOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        """List the keys and pin the revision (called on the driver).

        Raises:
            JetStreamExtError: The read cannot work; the text says what to change.
        """
        from jetstream_ext.spark.connections import connections
        from jetstream_ext.spark.kv_planning import plan_kv

        options = self._options
        with connections().lend(options.connection, "jetstream-ext spark driver") as lease:
            parts = lease.run(plan_kv(lease.connection.context(options), options))
        return [KvPartition(part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        """Read some keys (called on an executor)."""
        from jetstream_ext.spark.kv_reading import read_keys

        if not isinstance(partition, KvPartition):
            return iter(())  # Spark's stand-in for an empty list of partitions
        return read_keys(self._options, self._schema, partition.part)
