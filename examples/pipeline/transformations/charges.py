"""A declarative pipeline that charges for each message of the stream ``METERS``, by a message in the stream ``CHARGES``.

``spark-pipelines run --spec examples/pipeline/spark-pipeline.yml``. Needs Spark 4.1 or newer, with Spark Connect
(``pyspark[pipelines]``), and ``nats-jetstream-ext[spark]``.
"""

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

SERVERS = os.environ.get("NATS_URL", "nats://localhost:4222")
spark = SparkSession.active()

dp.create_sink("charges", "jetstream", {"servers": SERVERS, "stream": "CHARGES"})


@dp.append_flow(target="charges")
def charge() -> DataFrame:
    meters = spark.readStream.format("jetstream").option("servers", SERVERS).load("METERS")
    return meters.selectExpr("concat('charges.', subject) AS subject", "data", "concat(stream, ':', seq) AS msgId")
