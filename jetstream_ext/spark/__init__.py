"""The PySpark connector: formats `jetstream` (streams) and `jetstream_kv` (buckets), both read, followed and written.

Spark finds the formats by itself (`pyspark_jetstream`); `register` registers them explicitly. Needs
``nats-jetstream-ext[spark]``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from jetstream_ext.spark.offsets import lag
    from jetstream_ext.spark.upserts import upsert
else:
    _MODULES = {"lag": "offsets", "upsert": "upserts"}

    def __getattr__(name: str) -> object:
        # Imported when it is used, because every process of a Spark query imports this package.
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


__all__ = ["lag", "register", "upsert"]


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


def register(spark: SparkSession) -> None:
    """Register the `jetstream` and `jetstream_kv` formats with a session (classic or Connect).

    Only needed where this package was installed after the session had searched for ``pyspark_*`` modules, as in
    notebooks.

    Raises:
        ModuleNotFoundError: PySpark, or a package that the connector needs beside it, is not installed.
    """
    if importlib.util.find_spec("pyspark") is None:
        raise ModuleNotFoundError(
            f"PySpark is not installed for {sys.executable}: pip install 'nats-jetstream-ext[spark]'; on a platform that "
            "brings its own PySpark, run the program with that platform's Python",
            name="pyspark",
        )
    for name in ("pyarrow", "numpy"):
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(
                f"the connector needs {name}, which is not installed for {sys.executable}: pip install "
                "'nats-jetstream-ext[spark-runtime]', here and on every executor; it leaves the platform's PySpark as it is",
                name=name,
            )
    # Imported here, because pyspark is an optional dependency and slow to import.
    from pyspark.errors import AnalysisException

    from jetstream_ext.spark.kv_source import JetStreamKvDataSource
    from jetstream_ext.spark.source import JetStreamDataSource

    for source in (JetStreamDataSource, JetStreamKvDataSource):
        try:
            spark.dataSource.register(source)
        except AnalysisException as error:
            # Spark 4.0 refuses a format that it has found by itself; later versions accept it.
            if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
                raise
