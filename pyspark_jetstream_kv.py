"""Let Spark find the `jetstream_kv` format by itself.

Spark imports every top-level module named ``pyspark_*`` in every session that uses a Python data source. So this one
imports the format only when Spark makes an instance of it.
"""

from collections.abc import MutableMapping
from typing import Any

from pyspark.sql.datasource import DataSource

__all__ = ["DefaultSource"]


class DefaultSource(DataSource):
    """Stand in for `JetStreamKvDataSource`: an instance is one of that class."""

    @classmethod
    def name(cls) -> str:
        return "jetstream_kv"

    def __new__(cls, options: MutableMapping[str, str]) -> Any:
        from jetstream_ext.spark.kv_source import JetStreamKvDataSource

        return JetStreamKvDataSource(options)
