"""Make the Python processes that Spark starts cheap: each of them would otherwise cost a second of CPU, most of it imports.

Spark puts its own modules on the path as a zip file, from which Python compiles them again in every process; without it,
they come from the installed pyspark, compiled. Its daemons fork their workers, so they import what each worker would
import, and take it out of the garbage collections that a worker makes after each task.
"""

import gc
import importlib
import sys

MODULES = (
    "jetstream_ext.spark.kv",
    "jetstream_ext.spark.kv_source",
    "jetstream_ext.spark.reading",
    "jetstream_ext.spark.sink",
    "jetstream_ext.spark.source",
    "jetstream_ext.spark.streaming",
    "jetstream_ext.spark.ledger",
    "pandas",
    "pyarrow.compute",
    "pyspark.logger.worker_io",
    "pyspark.sql.conversion",
    "pyspark.sql.streaming.stateful_processor_util",
    "pyspark.worker_message",
)

if any(argument.startswith("pyspark.") for argument in sys.orig_argv):
    sys.path[:] = [path for path in sys.path if not path.endswith(".zip")]
if "pyspark.daemon" in sys.orig_argv:
    for module in MODULES:
        try:
            importlib.import_module(module)
        except ImportError:  # not in every release of Spark
            continue
    gc.freeze()
