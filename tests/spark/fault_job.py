"""A streaming query in a separate process, to be killed: copies one stream to another until all rows are there.

``python fault_job.py '{"servers": …, "source": …, "sink": …, "semantics": …, "checkpoint": …, "master": …}'``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from pipeline import rows_for, target_of


def slow(pause: float, straggling: int | None, attempts: str | None) -> Any:
    """Pass rows on, some at a time; after `straggling` rows the first attempt at partition 0 of every batch pauses long.

    Every attempt leaves a file in the folder `attempts`.
    """

    def work(batches: Any) -> Any:
        import time
        from pathlib import Path

        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        if attempts is not None:
            Path(attempts, f"{context.taskAttemptId()}-{context.partitionId()}-{context.attemptNumber()}").touch()
        late = straggling is not None and context.partitionId() == 0 and context.attemptNumber() == 0
        passed = 0
        for batch in batches:
            for first in range(0, batch.num_rows, 100):
                time.sleep(pause * (200 if late and passed >= straggling else 1))
                yield batch.slice(first, 100)
                passed += 100

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
        # Rows that are passed on are stored at once, not when the partition is complete.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "100",
    }
    for name, value in (settings | given.get("conf", {})).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    source = spark.readStream.format("jetstream").options(servers=given["servers"], minPartitions="2")
    if tuple(map(int, spark.version.split(".")[:2])) >= (4, 2):  # before, micro-batches have no limit
        source = source.option("maxOffsetsPerTrigger", str(given["limit"]))
    semantics, sink = given["semantics"], given["sink"]
    frame = source.load(given["source"]).selectExpr(*rows_for(semantics, sink, given.get("bad", "false")))
    work = slow(given.get("pause", 0.05), given.get("straggling"), given.get("attempts"))
    frame = frame.mapInArrow(work, frame.schema)
    form, options = target_of(semantics, sink, 2, given["transaction"])
    options |= {"onBadRow": given.get("on_bad_row", "fail")}
    query = (
        frame.writeStream.format(form)
        .options(servers=given["servers"], **options)
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
