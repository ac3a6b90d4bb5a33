"""The Spark that the benchmarks of the connector run on."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession


@contextmanager
def session() -> Iterator[SparkSession]:
    """Run Spark in this process, on two cores."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # not the first python3 on PATH
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()
