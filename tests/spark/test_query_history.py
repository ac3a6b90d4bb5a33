"""Random histories of streaming queries without Spark: every message once, or a loss that is reported.

``nox -s full -- spark_histories`` runs many; JETSTREAM_EXT_SPARK_SEED=<seed> repeats the one that failed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jetstream_ext.testing import NatsServer

sys.path.insert(0, str(Path(__file__).parent))

from query_history import History

HISTORIES = int(os.environ.get("JETSTREAM_EXT_SPARK_HISTORIES", "2"))
SEED = os.environ.get("JETSTREAM_EXT_SPARK_SEED")
STEPS = 40


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a few messages with each request, so that streams change in the middle of a partition; never wait."""
    monkeypatch.setattr("jetstream_ext.client.api.SETTLE", 0.2)
    monkeypatch.setattr("jetstream_ext.spark.reading.DEFAULT_MAX_BYTES", 300)
    monkeypatch.setattr("jetstream_ext.spark.reading._ROWS", 1)
    monkeypatch.setattr("jetstream_ext.spark.waiting._LONGEST_PAUSE", 0.001)


@pytest.mark.parametrize("plain", [False, True], ids=["with the start", "without the start"])
def test_random_histories(server: NatsServer, stream_name: Callable[[], str], plain: bool) -> None:
    seeds = [int(SEED)] if SEED else range(HISTORIES)
    abandoned = 0
    for seed in seeds:
        names = [stream_name() for _ in range(1 + seed % 3)]
        history = History(server.url, names, seed, plain=plain)
        try:
            history.run(STEPS)
            abandoned += history.abandoned
        except BaseException as error:
            error.add_note(f"JETSTREAM_EXT_SPARK_SEED={seed}")
            raise
    assert abandoned <= 2 + HISTORIES // 50
