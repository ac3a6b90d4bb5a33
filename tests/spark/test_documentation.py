"""The documentation names every option and no others."""

import re
from pathlib import Path

import pytest

from jetstream_ext.spark import options

PAGE = Path(__file__).parents[2] / "docs" / "spark.md"
STREAMS = {*options.ConnectionOptions.names(), *options.ReadOptions.names(), *options.WriteOptions.names()}
BUCKETS = {*options.KvOptions.names(), *options.FeedOptions.names(), *options.KvWriteOptions.names()}


def named(rows: list[str]) -> set[str]:
    return {name for row in rows for name in re.findall(r"`+(\w+)`+", row)}


def test_the_page_names_every_option_and_no_other() -> None:
    if not PAGE.is_file():
        pytest.skip("no documentation beside the tests")
    tables = PAGE.read_text(encoding="utf-8").partition("## Options")[2].partition("### Notes")[0]
    cells = [line.split(" | ")[0] for line in tables.splitlines() if line.startswith("| `")]
    assert named(cells) == STREAMS | BUCKETS
