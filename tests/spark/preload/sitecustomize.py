"""Import, before Spark forks its Python workers, what each of them would import again: a second of CPU per worker."""

import importlib
import sys

MODULES = (
    "jetstream_ext.spark.kv",
    "jetstream_ext.spark.sink",
    "jetstream_ext.spark.source",
    "jetstream_ext.spark.streaming",
    "jetstream_ext.spark.transactional",
    "pyarrow.compute",
    "pyspark.logger.worker_io",
    "pyspark.sql.conversion",
    "pyspark.sql.streaming.stateful_processor_util",
    "pyspark.worker_message",
)

if "pyspark.daemon" in sys.orig_argv:
    for module in MODULES:
        try:
            importlib.import_module(module)
        except ImportError:  # not in every release of Spark
            continue
