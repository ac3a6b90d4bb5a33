"""Let Spark find the `jetstream_kv` format by itself (Spark imports every top-level module named ``pyspark_*``)."""

from jetstream_ext.spark.kv import JetStreamKvDataSource as DefaultSource

__all__ = ["DefaultSource"]
