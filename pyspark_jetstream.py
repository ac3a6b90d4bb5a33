"""Let Spark find the `jetstream` format by itself (Spark imports every top-level module named ``pyspark_*``)."""

from jetstream_ext.spark.source import JetStreamDataSource as DefaultSource

__all__ = ["DefaultSource"]
