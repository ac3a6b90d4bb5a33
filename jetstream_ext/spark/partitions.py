"""A sequence range as Spark carries it from the driver to an executor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from jetstream_ext.spark.options import ReadOptions
from jetstream_ext.spark.ranges import SequenceRange

if TYPE_CHECKING:
    from pyarrow import RecordBatch


class JetStreamPartition(InputPartition):
    """One sequence range."""

    def __init__(self, part: SequenceRange) -> None:
        super().__init__(None)
        self.part = part


def read_partition(options: ReadOptions, schema: StructType, partition: InputPartition) -> Iterator[RecordBatch]:
    """Read one range (called on an executor)."""
    if not isinstance(partition, JetStreamPartition) or not len(partition.part):
        return iter(())  # Spark's stand-in for an empty list of partitions, or one that is there for its number
    # Imported where it is used: Spark loads the source's modules in every session that has the package.
    from jetstream_ext.spark.reading import read_range

    return read_range(options, schema, partition.part)
