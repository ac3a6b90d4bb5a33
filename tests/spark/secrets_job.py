"""Every way to give credentials, right and wrong, in one Spark application that logs as much as possible.

``python secrets_job.py '{"conf": {…}, "read": [{…}, …], "write": {…}, "fail": [{…}, …], "checkpoint": …}'``: options, each with
the stream to read in `path`. Prints plans, progress and exceptions.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any


def main() -> None:
    from pyspark.sql import SparkSession

    given: dict[str, Any] = json.loads(sys.argv[1])
    builder = SparkSession.builder.master("local[2]").appName("secrets")
    for name, value in given["conf"].items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()

    for options in given["read"]:
        frame = spark.read.format("jetstream").options(**options).load()
        frame.explain(extended=True)
        print("rows:", frame.count(), flush=True)
    rows = spark.range(3).selectExpr("CAST(id AS string) AS data")
    rows.write.format("jetstream").mode("append").options(**given["write"]).save()

    source = spark.readStream.format("jetstream").options(**given["read"][0]).load().select("data")
    writer = source.writeStream.format("jetstream").options(**given["write"]).queryName("secrets")
    query = writer.option("checkpointLocation", given["checkpoint"]).trigger(availableNow=True).start()
    query.awaitTermination()
    query.explain(extended=True)
    print("progress:", json.dumps(query.lastProgress, default=str), flush=True)

    for options in given["fail"]:
        try:
            frame = spark.read.format("jetstream").options(**options).load()
            frame.explain(extended=True)
            frame.count()
        except Exception:
            traceback.print_exc(file=sys.stdout)
            print("failed", flush=True)
    print("done", flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
