"""A streaming query in a process of its own, to be killed: from one stream to another until all is there.

``python fault_job.py '{"servers": …, "source": …, "sink": …, "semantics": …, "checkpoint": …, "master": …}'``
"""

from __future__ import annotations

import json
import sys
from typing import Any


def slow(pause: float, straggler: bool) -> Any:
    """Pass rows on, some at a time; a straggler's first attempt waits long."""

    def work(batches: Any) -> Any:
        import time

        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        late = straggler and context.partitionId() == 0 and context.attemptNumber() == 0
        for batch in batches:
            for first in range(0, batch.num_rows, 500):
                time.sleep(pause * (200 if late else 1))
                yield batch.slice(first, 500)

    return work


def main() -> None:
    from pyspark.sql import SparkSession

    given = json.loads(sys.argv[1])
    builder = SparkSession.builder.master(given.get("master", "local[2,3]")).appName("fault")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
    }
    for name, value in (settings | given.get("conf", {})).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    source = spark.readStream.format("jetstream").options(servers=given["servers"], minPartitions="2")
    if given.get("limit"):
        source = source.option("maxOffsetsPerTrigger", str(given["limit"]))
    frame = source.load(given["source"]).selectExpr(f"'{given['sink']}.out' AS subject", "data")
    frame = frame.mapInArrow(slow(given.get("pause", 0.05), given.get("straggler", False)), frame.schema)
    options = {"servers": given["servers"], "stream": given["sink"], "semantics": given["semantics"]}
    if given["semantics"] == "transactional":
        options["sinkPartitions"] = "2"
    query = (
        frame.writeStream.format("jetstream")
        .options(**options)
        .option("checkpointLocation", given["checkpoint"])
        .trigger(availableNow=True)
        .start()
    )
    print("started", flush=True)
    query.awaitTermination()
    print("done", flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
