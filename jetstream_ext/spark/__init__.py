"""The PySpark connector: formats `jetstream` (streams, read and written) and `jetstream_kv` (buckets, read).

Spark finds the formats by itself (`pyspark_jetstream`); `register` does it by hand. Needs ``nats-jetstream-ext[spark]``.

From a query to rows, and from rows to messages::

    source.py       what Spark calls: the data source and its reader
      options.py    every option parsed and checked, before anything is connected (given.py: looked up, refused)
      bounds.py     where a read starts and ends: by sequence, by time, earliest, latest
      planning.py   driver: refuse what cannot work, resolve the ends (states.py: what a stream's leader says of it)
      pushed.py     the query's own filters, where Spark hands them down
      balance.py    where the messages are, for even partitions of filtered and gappy ranges
      ranges.py     pure arithmetic: sequence ranges into partitions (partitions.py: as Spark carries them)
      subjects.py   subject filters, matched here or left to the server
      reading.py    executor: one range as blocks of columns, proved complete
    stream_source.py  what Spark calls in a streaming query
      following.py  driver: where the query starts, how far a batch goes, what to read for it
      offsets.py    the offsets in Spark's checkpoint; `lag`
    sink.py         what Spark calls to write, in batches and in streaming queries
      write_options.py  every option parsed and checked
      sink_states.py    driver: refuse a stream that cannot be written to this way
      rows.py       executor: rows as messages, refused where they cannot be
      writing.py    executor: one partition, by fast ingest (dedupe.py: the ids) or by transactions
      transactional.py  rows and a marker in one atomic batch (markers.py, layout.py: what is kept in the stream)
      patience.py   what passes by itself, and how long a sink waits for it
    kv_source.py    what Spark calls to read a bucket
      kv_options.py, kv_planning.py, kv_reading.py: options; keys and revision; the values, as of that revision
      arrow.py      blocks to Arrow record batches
      connections.py  one connection per worker process, kept between tasks (connect.py: opened, with its secrets)
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

    Only needed where the executors' Python finds this package but the driver's search for ``pyspark_*`` modules was
    over before it was installed, as in notebooks.

    Raises:
        ModuleNotFoundError: There is no PySpark.
    """
    if importlib.util.find_spec("pyspark") is None:
        raise ModuleNotFoundError(
            "the connector needs PySpark: pip install 'nats-jetstream-ext[spark]'", name="pyspark"
        )
    # Not at the top: pyspark is an extra, and heavy.
    from pyspark.errors import AnalysisException

    from jetstream_ext.spark.kv_source import JetStreamKvDataSource
    from jetstream_ext.spark.source import JetStreamDataSource

    for source in (JetStreamDataSource, JetStreamKvDataSource):
        try:
            spark.dataSource.register(source)
        except AnalysisException as error:
            # Spark 4.0 refuses what it has found by itself; later ones take it again.
            if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
                raise
