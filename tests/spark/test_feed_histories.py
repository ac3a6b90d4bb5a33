"""Change feeds beside writers, without Spark, stopped at every point: each stored change once, and the last state of each key.

``nox -s full -- spark_histories`` runs many; JETSTREAM_EXT_SPARK_SEED=<seed> repeats the choices of the one that failed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jetstream_ext.testing import NatsCluster, NatsServer

sys.path.insert(0, str(Path(__file__).parent))

from feed_history import FeedHistory

FEEDS = int(os.environ.get("JETSTREAM_EXT_SPARK_FEEDS", "1"))
SEED = os.environ.get("JETSTREAM_EXT_SPARK_SEED")
TRIGGERS = 25


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a few messages with each request, so that the bucket changes in the middle of a partition; never wait."""
    monkeypatch.setattr("jetstream_ext.client.api.SETTLE", 0.2)
    monkeypatch.setattr("jetstream_ext.spark.reading.DEFAULT_MAX_BYTES", 2000)
    monkeypatch.setattr("jetstream_ext.spark.waiting._LONGEST_PAUSE", 0.001)


@pytest.mark.parametrize("plain", [False, True], ids=["with the start", "without the start"])
@pytest.mark.parametrize("history", [1, 5])
def test_a_feed_beside_writers_has_each_stored_change_once(
    server: NatsServer, stream_name: Callable[[], str], history: int, plain: bool
) -> None:
    for seed in [int(SEED)] if SEED else range(FEEDS):
        try:
            FeedHistory(server.url, stream_name(), seed, history=history, plain=plain).run(TRIGGERS)
        except BaseException as error:
            error.add_note(f"JETSTREAM_EXT_SPARK_SEED={seed}")
            raise


@pytest.mark.skipif(not os.environ.get("JETSTREAM_EXT_FULL"), reason="nox -s full -- spark_histories runs it")
@pytest.mark.parametrize("history", [1, 5])
def test_a_feed_of_a_replicated_bucket_has_each_stored_change_once(
    stream_name: Callable[[], str], history: int
) -> None:
    """Replicas answer that have not caught up with the leader."""
    with NatsCluster() as cluster:
        for seed in [int(SEED)] if SEED else range(FEEDS // 10 + 1):
            server = cluster.servers[seed % len(cluster.servers)]
            try:
                FeedHistory(server.url, stream_name(), seed, history=history, replicas=3).run(TRIGGERS)
            except BaseException as error:
                error.add_note(f"JETSTREAM_EXT_SPARK_SEED={seed}")
                raise
