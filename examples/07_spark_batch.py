"""Count a stream's messages with Spark: ``python examples/07_spark_batch.py URL``. Needs ``nats-jetstream-ext[spark]``."""

import asyncio
import os
import sys

import nats

import jetstream_ext as jsx


async def fill(url: str) -> None:
    async with await nats.connect(url) as nc:
        js = nc.jetstream()
        await jsx.ensure_stream(js, name="CLICKS", subjects=["clicks.>"], allow_batched=True, allow_direct=True)
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add_many((f"clicks.page{n % 3}", b"%d" % (n % 100)) for n in range(30_000))


def main(url: str) -> None:
    asyncio.run(fill(url))

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as sf

    spark = SparkSession.builder.appName("clicks").getOrCreate()
    clicks = spark.read.format("jetstream").option("servers", url).load("CLICKS")
    rows = (
        clicks.groupBy("subject")
        .agg(sf.count("*").alias("clicks"), sf.sum(clicks.data.cast("string").cast("int")).alias("seconds"))
        .orderBy("subject")
        .collect()
    )
    for row in rows:
        print(f"{row.subject}: {row.clicks:,} clicks, {row.seconds:,} seconds")
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
