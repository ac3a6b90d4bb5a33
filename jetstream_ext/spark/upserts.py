"""Upserts of an aggregation into a bucket, for Spark's output mode ``update``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class Upsert:
    """Writes each micro-batch to a bucket; made by `upsert`."""

    options: Mapping[str, str]

    def __call__(self, frame: DataFrame, batch: int) -> None:
        writer = frame.write.format("jetstream_kv").options(**self.options).option("perMicroBatch", "true")
        writer.mode("append").save()


def upsert(**options: str) -> Upsert:
    """Return a function for ``foreachBatch`` that upserts the rows of each micro-batch into a bucket, exactly once.

    Spark does not accept Python sinks for the output mode ``update``, in which a query emits the rows of an aggregation that
    have changed. With this function it does::

        totals.writeStream.outputMode("update").foreachBatch(upsert(servers=url, bucket="totals"))

    A micro-batch is recognised by the query and its number, as with ``writeStream.format("jetstream_kv")``. If a query has
    several upserts into one bucket, give each of them a ``writeId`` of its own, and do not change it.

    Args:
        options: The options of the `jetstream_kv` sink, such as ``servers`` and ``bucket``.
    """
    return Upsert(options)
