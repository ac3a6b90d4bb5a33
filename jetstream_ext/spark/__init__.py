"""The PySpark connector: formats `jetstream` (streams, read and written) and `jetstream_kv` (buckets, read and followed).

Spark finds the formats by itself (`pyspark_jetstream`); `register` registers them explicitly. Needs
``nats-jetstream-ext[spark]``.
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
