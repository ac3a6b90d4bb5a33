"""Bill each purchase once with Spark: ``python examples/10_spark_streaming.py URL``. Needs ``nats-jetstream-ext[spark]``."""

import asyncio
import os
import sys
import tempfile

import nats

import jetstream_ext as jsx


async def purchase(url: str, first: int, last: int) -> None:
    async with await nats.connect(url) as nc:
        js = nc.jetstream()
        for name, subjects in (("PURCHASES", "purchases.*"), ("BILLS", "bills.>")):
            await jsx.ensure_stream(js, name=name, subjects=[subjects], allow_batched=True, allow_direct=True)
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add_many((f"purchases.{n % 7}", b"%d" % n) for n in range(first, last))


async def bills(url: str) -> int:
    async with await nats.connect(url) as nc:
        return (await nc.jetstream().stream_info("BILLS")).state.messages


def main(url: str) -> None:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.appName("billing").getOrCreate()
    source = spark.readStream.format("jetstream").option("servers", url)

    def bill(checkpoint: str) -> None:
        purchases = source.load("PURCHASES")
        rows = purchases.selectExpr("concat('bills.', subject) AS subject", "data", "concat(stream, ':', seq) AS msgId")
        writer = rows.writeStream.format("jetstream").options(servers=url, stream="BILLS")
        # Without this trigger the query would run indefinitely.
        query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        query.awaitTermination()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(purchase(url, 0, 5_000))
        bill(f"{folder}/one")
        print(f"{asyncio.run(bills(url)):,} bills")
        asyncio.run(purchase(url, 5_000, 6_000))
        bill(f"{folder}/one")  # continues from its checkpoint
        print(f"{asyncio.run(bills(url)):,} bills, after a restart")
        bill(f"{folder}/two")  # starts again; the server drops the second copies by their message ids
        print(f"{asyncio.run(bills(url)):,} bills, after the loss of its checkpoint")
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
