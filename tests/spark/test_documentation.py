"""The documentation names every option, and no other."""

import re
from pathlib import Path

import pytest

from jetstream_ext.spark import options
from jetstream_ext.spark.kv import JetStreamKvDataSource
from jetstream_ext.spark.source import JetStreamDataSource

PAGE = Path(__file__).parents[2] / "docs" / "spark.md"
STREAMS = {
    *options.CONNECTION_OPTIONS,
    *options.READ_OPTIONS,
    *options.STREAMING_OPTIONS,
    *options.WRITE_OPTIONS,
} - {"maxMessagesPerTrigger"}  # another name of maxOffsetsPerTrigger
BUCKETS = set(options.KV_OPTIONS)


def named(rows: list[str]) -> set[str]:
    return {name for row in rows for name in re.findall(r"`+(\w+)`+", row)}


@pytest.mark.parametrize(("source", "expected"), [(JetStreamDataSource, STREAMS), (JetStreamKvDataSource, BUCKETS)])
def test_the_classes(source: type, expected: set[str]) -> None:
    assert source.__doc__
    lines = [re.split(r"  +", line.strip()) for line in source.__doc__.splitlines() if line.startswith("    ``")]
    rows = [cells[0] for cells in lines if len(cells) > 1]
    assert named(rows) == expected


def test_the_page() -> None:
    if not PAGE.is_file():
        pytest.skip("no documentation beside the tests")
    tables = PAGE.read_text(encoding="utf-8").partition("## Options")[2].partition("### What else")[0]
    cells = [line.split(" | ")[0] for line in tables.splitlines() if line.startswith("| `")]
    assert named(cells) == STREAMS | BUCKETS
