"""The `jetstream_kv` data source: what Spark calls for a bucket, and its batch reader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.types import BinaryType, DataType, LongType, StringType, StructType, TimestampType

from jetstream_ext.spark.options import FeedOptions, KvOptions, KvWriteOptions, OptionError
from jetstream_ext.spark.source import check_schema, schema_of

if TYPE_CHECKING:
    from pyarrow import RecordBatch

# Imported where they are used, because Spark imports this module in several processes of every query: all that reads, writes
# or connects.

BUCKET_COLUMNS: Final[dict[str, DataType]] = {
    "bucket": StringType(),
    "key": StringType(),
    "value": BinaryType(),
    "revision": LongType(),
    "created": TimestampType(),
    "operation": StringType(),
}


class JetStreamKvDataSource(DataSource):
    """The `jetstream_kv` format: a key-value bucket as a table of its keys, as of one revision, or its changes as a stream.

    Columns: ``bucket string, key string, value binary, revision long, created timestamp, operation string``.

    The options, and the permissions and servers that they need, are in the documentation (Spark, "Options"). A wrong
    option or schema is an error on the driver: `OptionError`, `SchemaError`.
    """

    @classmethod
    def name(cls) -> str:
        return "jetstream_kv"

    def schema(self) -> StructType:
        """Return all columns, after a check of the options, so that ``load()`` raises their errors."""
        KvOptions.parse(self.options, streaming=None)
        FeedOptions.parse(self.options, streaming=None)
        return schema_of(BUCKET_COLUMNS)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = KvOptions.parse(self.options)
        check_schema(schema, BUCKET_COLUMNS)
        return JetStreamKvReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        from jetstream_ext.spark.feed import JetStreamKvStreamReader  # imported only where it is used, as in `source`

        options = FeedOptions.parse(self.options)
        check_schema(schema, BUCKET_COLUMNS)
        return JetStreamKvStreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from jetstream_ext.spark.kv_sink import JetStreamKvWriter

        options = KvWriteOptions.parse(self.options, streaming=False)
        if overwrite:
            raise OptionError(
                "mode 'overwrite' is not supported: the sink writes the keys of its rows, and leaves all other keys as they are; "
                "use .mode('append')"
            )
        return JetStreamKvWriter(options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        from jetstream_ext.spark.kv_sink import JetStreamKvStreamWriter

        # In output mode "complete", each micro-batch has all rows of the result.
        options = KvWriteOptions.parse(self.options, streaming=True)
        return JetStreamKvStreamWriter(options, schema, only_changes=overwrite)


class JetStreamKvReader(DataSourceReader):
    def __init__(self, options: KvOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        from jetstream_ext.spark.connection import run_on_driver
        from jetstream_ext.spark.kv import plan_kv

        parts = run_on_driver(self._options.connection, lambda context: plan_kv(context, self._options))
        return [InputPartition(part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        from jetstream_ext.spark.kv import read_keys

        return read_keys(self._options, self._schema, getattr(partition, "value", None))
