"""The PySpark connector: formats `jetstream` (streams, read and written) and `jetstream_kv` (buckets, read).

Spark finds the formats by itself (`pyspark_jetstream`); `register` registers them explicitly. Needs
``nats-jetstream-ext[spark]``.

========================  ==========================================================================================
``source``                what Spark calls for a stream: the data source and its batch reader
``streaming``             a streaming query: what Spark calls, where it starts, how far a micro-batch goes
``sink``                  what Spark calls to write, and what the driver checks first
``kv``                    what Spark calls to read a bucket
``options``               every option, parsed and checked before anything is connected
``planning``              driver: check the streams, resolve the ends, cut ranges into partitions
``offsets``               the offsets in Spark's checkpoint; `lag`
``reading``               executor: one range, proved complete, as Arrow record batches
``write``                 executor: one partition, by fast ingest or by transactions
``rows``                  executor: rows as messages, and their message ids
``transactional``         executor: rows and a marker in one atomic batch
``connection``            one connection per worker process, kept between tasks; questions and their retries
``errors``                what the connector raises
``java``                  the check for a Java that Spark runs on
========================  ==========================================================================================
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from jetstream_ext.spark.offsets import lag

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["lag", "register"]


def register(spark: SparkSession) -> None:
    """Register the `jetstream` and `jetstream_kv` formats with a session (classic or Connect).

    Only needed where this package was installed after the session had searched for ``pyspark_*`` modules, as in
    notebooks.

    Raises:
        ModuleNotFoundError: PySpark is not installed.
    """
    if importlib.util.find_spec("pyspark") is None:
        raise ModuleNotFoundError(
            "the connector needs PySpark: pip install 'nats-jetstream-ext[spark]'", name="pyspark"
        )
    # Imported here, because pyspark is an optional dependency and slow to import.
    from pyspark.errors import AnalysisException

    from jetstream_ext.spark.kv import JetStreamKvDataSource
    from jetstream_ext.spark.source import JetStreamDataSource

    for source in (JetStreamDataSource, JetStreamKvDataSource):
        try:
            spark.dataSource.register(source)
        except AnalysisException as error:
            # Spark 4.0 refuses a format that it has found by itself; later versions accept it.
            if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
                raise
