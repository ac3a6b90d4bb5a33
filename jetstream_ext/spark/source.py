"""The `jetstream` data source: what Spark calls for a stream, and its batch reader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.types import ArrayType, BinaryType, DataType, LongType, MapType, StringType, StructType, TimestampType

from jetstream_ext.protocol.options import COLUMN_SYNONYMS
from jetstream_ext.spark.options import OptionError, ReadOptions, WriteOptions
from jetstream_ext.text import did_you_mean

if TYPE_CHECKING:
    from pyarrow import RecordBatch

# Spark imports this module in several processes of a query, one after the other, and each needs a part of the connector
# only. So everything but the options is imported where it is used.

_COLUMNS: dict[str, DataType] = {
    "stream": StringType(),
    "seq": LongType(),
    "subject": StringType(),
    "time": TimestampType(),
    "data": BinaryType(),
    "headers": MapType(StringType(), ArrayType(StringType())),
}
# Those that only an explicit schema has.
_ALL_COLUMNS: dict[str, DataType] = {**_COLUMNS, "timeNanos": LongType()}


class JetStreamDataSource(DataSource):
    """The `jetstream` format: a JetStream stream as a table of its messages, and rows as its messages.

    Columns when read: ``stream string, seq long, subject string, time timestamp, data binary, headers
    map<string,array<string>>``; an explicit ``.schema("seq long, data binary")`` reads only the columns it names, and can
    also name ``timeNanos long``, the time as nanoseconds since 1970. When written: ``subject string, data binary|string``,
    optionally ``headers`` (values ``string`` or ``array<string>``), ``msgId string`` and ``msgTtl`` (``string`` or a whole
    number). A ``Nats-Msg-Id`` in ``headers`` is left out, as several rows may come from one message; ``msgId`` sets one.

    The options, and the permissions and servers that they need, are in the documentation (Spark, "Options"). A wrong
    option, schema or stream is an error on the driver: `OptionError`, `SchemaError`, `PlanningError`.

    Spark creates an instance in a planning process and pickles it to the others: it holds nothing but the options.
    """

    @classmethod
    def name(cls) -> str:
        return "jetstream"

    def schema(self) -> StructType:
        """Return all columns, after a check of the options, so that ``load()`` raises their errors."""
        ReadOptions.parse(self.options, streaming=None)
        return schema_of(_COLUMNS)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = ReadOptions.parse(self.options)
        check_schema(schema, _ALL_COLUMNS)
        return JetStreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from jetstream_ext.spark.sink import JetStreamWriter

        return JetStreamWriter(self._write_options(overwrite, streaming=False), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        from jetstream_ext.spark.sink import JetStreamStreamWriter

        return JetStreamStreamWriter(self._write_options(overwrite, streaming=True), schema)

    def _write_options(self, overwrite: bool, *, streaming: bool) -> WriteOptions:
        options = WriteOptions.parse(self.options, streaming=streaming)
        if overwrite:
            raise OptionError(
                "mode 'overwrite' (and output mode 'complete') is not supported: rows can only be appended to a stream; "
                "use .mode('append'), and purge the stream first if you need to"
            )
        return options

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        from jetstream_ext.spark.streaming import JetStreamStreamReader

        options = ReadOptions.parse(self.options, streaming=True)
        check_schema(schema, _ALL_COLUMNS)
        return JetStreamStreamReader(options, schema)


class JetStreamReader(DataSourceReader):
    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        from jetstream_ext.spark.connection import run_on_driver
        from jetstream_ext.spark.planning import plan_read

        parts = run_on_driver(self._options.connection, lambda context: plan_read(context, self._options))
        return [InputPartition(part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        from jetstream_ext.spark.reading import read_range

        return read_range(self._options, self._schema, getattr(partition, "value", None))


class SchemaError(ValueError):
    """The schema given with ``.schema(...)`` has columns that the format does not have."""


def schema_of(columns: Mapping[str, DataType]) -> StructType:
    schema = StructType()
    for name, kind in columns.items():
        schema = schema.add(name, kind)
    return schema


def check_schema(schema: StructType, columns: Mapping[str, DataType]) -> None:
    """Raise SchemaError if a schema has a column or a type that the format does not have; names may have any case."""
    kinds = {name.lower(): kind for name, kind in columns.items()}
    declared = ", ".join(f"{name} {kind.simpleString()}" for name, kind in columns.items())
    if not schema.fields or len(set(map(str.lower, schema.names))) != len(schema.names):
        raise SchemaError(f"the schema must name some of these columns, each once: {declared}")
    for field in schema.fields:
        kind = kinds.get(field.name.lower())
        if kind is None:
            raise SchemaError(
                f"column {field.name!r} does not exist; the format has: {declared}"
                f"{did_you_mean(field.name, columns, COLUMN_SYNONYMS)}"
            )
        if field.dataType != kind:
            raise SchemaError(
                f"column {field.name!r} is {kind.simpleString()}, not {field.dataType.simpleString()}; "
                "declare that type and cast the column in the query"
            )
