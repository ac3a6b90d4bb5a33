"""Every numbered example, run as its first line says, one after another against one real server."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jetstream_ext.testing import NatsServer

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("[0-9]*.py"))
LONGEST = 60

# What each of them must say, last line first where there are many.
SAYS = {
    "01_order_batch": ["stored 4 messages at once", "refused, not_stored", "the stream has 4 messages"],
    "02_metrics_ingest": ["50,000 metrics in", "the stream has 50,000 messages"],
    "03_bulk_export": ["4,000 messages"],
    "04_user_record_then": [
        "now:  {'1234.address': 'Birch Road 2', '1234.name': 'Ann'}",
        "then: {'1234.address': 'Alder Street 1', '1234.email': 'ann@example.org', '1234.name': 'Ann'}",
        "unavailable: 1234.name",
    ],
    "05_bank_transfer": ["of 12 transfers", "total: 300"],
    "06_work_queue_mirror": [
        "the mirror over the leaf node is ok",
        "the hub is paused, 2,000 jobs are queued",
        "2,000 in the archive, once and in order: True; 0 in the queue",
    ],
    "07_spark_batch": ["clicks.page0: 10,000 clicks", "clicks.page2: 10,000 clicks"],
    "08_test_with_faults": ["reported 500, stored 500, sent again: True"],
    "09_exactly_once_worker": ["5 workers cancelled", "{'loud.and': 1000, 'loud.on': 1000}"],
    "10_spark_streaming": [
        "5,000 bills\n6,000 bills, after a restart\n6,000 bills, after the loss of its checkpoint\n"
    ],
    "11_polars": ["c0: 3,334 purchases for 4,167,", "c2: 3,333 purchases for", "3 totals stored"],
    "12_duckdb": ["s0: 5,000 readings, at most 24.0 °C", "s3: 5,000 readings, at most 24.5 °C"],
    "13_pandas": ["10,000 visits stored", "visits.page0: 1,429", "visits.page1: 1,429"],
    "14_feature_flags": ["the old basket\nchanged: shop.new-basket\nthe flag is on\nthe new basket\n"],
    "15_group": ["500 bills: killed a member", "2500 bills: killed a member", "billed once and in order: True"],
    "16_outbox": ["150 booked, 0 seats left, 150 bills\neach booking has one bill: True"],
    "17_state": ["500 votes counted: killed the worker", "counts: True\neach count stored once: True"],
}


def test_every_example_has_an_expectation() -> None:
    assert [path.stem for path in EXAMPLES] == sorted(SAYS)


def test_every_example_is_short() -> None:
    lines = {path.stem: len(path.read_text(encoding="utf-8").splitlines()) for path in EXAMPLES}
    assert {name: count for name, count in lines.items() if count >= LONGEST} == {}


@pytest.fixture(scope="module")
def one_server() -> Iterator[NatsServer]:
    """A server of the examples' own: they choose plain names, and none takes those of another."""
    with NatsServer() as server:
        yield server


def test_no_example_uses_a_stream_of_another() -> None:
    uses: dict[str, str] = {}
    for path in EXAMPLES:
        for name in set(re.findall(r'"([A-Z]+)"', path.read_text(encoding="utf-8"))):
            assert uses.setdefault(name, path.stem) == path.stem, name
    assert len(uses) > 12


def run(path: Path, url: str, folder: Path, environment: dict[str, str] | None) -> subprocess.CompletedProcess[str]:
    strict = [] if "spark" in path.stem else ["-W", "error"]  # pyspark has warnings of its own
    return subprocess.run(
        [sys.executable, *strict, path, url],
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
        cwd=folder,
        env=environment,
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_prints_its_results(
    path: Path, one_server: NatsServer, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    environment = request.getfixturevalue("spark_environment") if "spark" in path.stem else None
    done = run(path, one_server.url, tmp_path, environment)
    assert done.returncode == 0, done.stderr
    for words in SAYS[path.stem]:
        assert words in done.stdout
    if "spark" not in path.stem:  # which takes a minute each on a small machine
        again = run(path, one_server.url, tmp_path, environment)
        assert again.returncode == 0, again.stderr
