"""Read a stream as Spark's driver and workers do, but without Spark, in a separate process."""

import json
import subprocess
import sys
from dataclasses import dataclass

_PROGRAM = """
import json, sys
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark_jetstream import DefaultSource

found = {"data": [], "error": ""}
try:
    source = DefaultSource(CaseInsensitiveDict(json.loads(sys.argv[1])))
    reader = source.reader(source.schema())
    for partition in reader.partitions():
        for block in reader.read(partition):
            found["data"] += [data.decode() for data in block.column("data").to_pylist()]
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Read:
    """The result of a read."""

    data: list[str]
    """The payloads."""
    error: str
    """The error that ended the read, as Spark logs it, or an empty string."""


def read_as_spark(servers: str, **options: str) -> Read:
    """Read stream ``S``, or the one in `options`."""
    given = {"servers": servers, "stream": "S", "requestTimeout": "10", **options}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(given)], capture_output=True, text=True, check=True, timeout=180
    )
    return Read(**json.loads(done.stdout.splitlines()[-1]))
