"""Do what Spark's driver and workers do with the data sources, but without Spark: a program for a separate process.

It reads one job as JSON from each line of standard input, and answers with a line: how the job ended, and the most memory
that the process has needed.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import BinaryType, StringType, StructType

import pyspark_jetstream
import pyspark_jetstream_kv

ROWS = pa.RecordBatch.from_pydict({"subject": ["w0.a"] * 30, "data": [b"x"] * 30})


def read(options: Any, source: type = pyspark_jetstream.DefaultSource) -> int:
    found = source(options)
    reader = found.reader(found.schema())
    return sum(block.num_rows for partition in reader.partitions() for block in reader.read(partition))


def read_kv(options: Any) -> int:
    return read(options, pyspark_jetstream_kv.DefaultSource)


def follow(options: Any) -> int:
    source = pyspark_jetstream.DefaultSource(options)
    reader: Any = source.streamReader(source.schema())
    start, rows = reader.initialOffset(), 0
    for _ in range(3):
        end = json.loads(json.dumps(reader.latestOffset(start, reader.getDefaultReadLimit())))
        rows += sum(block.num_rows for part in reader.partitions(start, end) for block in reader.read(part))
        start = end
    return rows


def write(options: Any) -> int:
    schema = StructType().add("subject", StringType()).add("data", BinaryType())
    writer: Any = pyspark_jetstream.DefaultSource(options).writer(schema, overwrite=False)
    written = writer.write(iter([ROWS]))
    writer.commit([written])
    return int(written.rows)


JOBS: dict[str, Callable[[Any], int]] = {"read": read, "read_kv": read_kv, "follow": follow, "write": write}


def main() -> None:
    properties = {"sql.streaming.queryId": "q", "streaming.sql.batchId": "1"}
    TaskContext._taskContext = SimpleNamespace(partitionId=lambda: 0, getLocalProperty=properties.get)  # type: ignore[assignment]
    for line in sys.stdin:
        job, began = json.loads(line), time.monotonic()
        answer: dict[str, Any] = {"rows": 0, "kinds": [], "text": ""}
        try:
            answer["rows"] = JOBS[job["job"]](CaseInsensitiveDict(job["options"]))
        except Exception as error:
            answer |= {"kinds": [kind.__name__ for kind in type(error).__mro__], "text": str(error)}
        answer["seconds"] = time.monotonic() - began
        answer["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
