"""Compile the tests, and meanwhile archive the classes of Spark's JVM: `nox -s tests` starts many processes and JVMs.

A JVM of Spark loads ten thousand classes from jars, which is most of its start. From an archive (class data sharing) it maps
them into memory.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Spark's JVMs live only for seconds here, so an optimising compiler, parallel collectors and the web UI cost more than
# they gain.
LAUNCHER = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
SPARK = f"{LAUNCHER} -XX:-UsePerfData -Dspark.ui.enabled=false -Dspark.sql.shuffle.partitions=2"
ARCHIVE = Path(sys.prefix, "spark-classes.jsa")

PROGRAM = """
from pyspark import SparkContext
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[2]").getOrCreate()
rows = spark.createDataFrame([(n, str(n)) for n in range(10)], "n long, text string")
assert rows.groupBy("text").count().orderBy("text").count() == 10
stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
options = {"checkpointLocation": "checkpoint"}
stream.writeStream.format("noop").trigger(availableNow=True).options(**options).start().awaitTermination()
spark.stop()
jvm = SparkContext._gateway.proc
jvm.stdin.close()
jvm.wait()
"""


def set_options() -> None:
    """Give the JVMs that this process and its children start their options, and the archive if it was made."""
    shared = f" -XX:SharedArchiveFile={ARCHIVE} -Xlog:cds=off -Xlog:cds+dynamic=off" if ARCHIVE.exists() else ""
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", LAUNCHER)
    os.environ.setdefault("SPARK_SUBMIT_OPTS", SPARK + shared)


def archive_classes() -> None:
    """Without an archive, if this Java makes none, the tests only take longer."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "classes.jsa")
        options = f"{SPARK} -XX:ArchiveClassesAtExit={made} -Xlog:disable"
        environment = {**os.environ, "SPARK_LAUNCHER_OPTS": LAUNCHER, "SPARK_SUBMIT_OPTS": options}
        subprocess.run([sys.executable, "-c", PROGRAM], cwd=folder, env=environment, capture_output=True, check=False)
        if made.exists():
            shutil.move(made, ARCHIVE)


if __name__ == "__main__":
    compiling = subprocess.Popen([sys.executable, "-m", "pytest", "--collect-only", "-qq"], stdout=subprocess.DEVNULL)
    if not ARCHIVE.exists():
        archive_classes()
    sys.exit(compiling.wait())
