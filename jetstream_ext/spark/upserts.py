"""Upserts of an aggregation into a bucket, for Spark's output mode ``update``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class Upsert:
    """Writes each micro-batch to a bucket; made by `upsert`."""

    options: Mapping[str, str]

    def __call__(self, frame: DataFrame, batch: int) -> None:
        names = {name.lower() for name in self.options}
        once = {"txnVersion": str(batch)} if "txnappid" in names else {"perMicroBatch": "true"}
        frame.write.format("jetstream_kv").options(**self.options, **once).mode("append").save()


def upsert(**options: str) -> Callable[[DataFrame, int], None]:
    """Return a function for ``foreachBatch`` that upserts the rows of each micro-batch into a bucket, exactly once.

    Spark does not accept Python sinks for the output mode ``update``, in which a query emits the rows of an aggregation that
    have changed. With this function it does::

        totals.writeStream.outputMode("update").foreachBatch(upsert(servers=url, bucket="totals"))

    A micro-batch is recognised by the query and its number, as with ``writeStream.format("jetstream_kv")``. If a query has
    several upserts into one bucket, give each of them a ``writeId`` of its own, and do not change it. Spark Connect does not
    tell the sink which query it is. There, give each upsert a name of its own with the option ``txnAppId``, and a new one with
    each new checkpoint: the sink skips a micro-batch if the bucket already has one with this name and number.

    Args:
        options: The options of the `jetstream_kv` sink, such as ``servers`` and ``bucket``.
    """
    return Upsert(options)
