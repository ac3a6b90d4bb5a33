"""Every read of a bucket, while random operations change it, equals its acknowledged history or reports an error.

The tests print the seeds of their examples. JETSTREAM_EXT_HISTORY_SEED=<seed> runs the examples of a seed again, and
searches for a shorter one that fails, which takes up to five minutes.
"""

import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from jetstream_ext.testing import NatsCluster, NatsServer

sys.path.insert(0, str(Path(__file__).parent))

from history_machine import READINGS, HistoryMachine, LaggingMachine
from history_model import Tally

FULL = bool(os.environ.get("JETSTREAM_EXT_FULL"))
SEED = os.environ.get("JETSTREAM_EXT_HISTORY_SEED")
# Operations in all, in how many tests, and the steps of an example; a step has up to 30 operations.
OPERATIONS = 100_000 if FULL else 1_500
TURNS = 8 if FULL else 1
STEPS = 40 if FULL else 25


def run(machine: type[HistoryMachine], operations: int, **attributes: Any) -> None:
    """Run a machine until it has done so many operations; print the seeds and what it has done."""
    tally = Tally()
    seed = int(SEED or (random.SystemRandom().randrange(1 << 32) if FULL else 16))
    try:
        while tally.operations < operations:
            print(f"\n{machine.__name__} {attributes.get('reading', '')}: JETSTREAM_EXT_HISTORY_SEED={seed}")
            members = {"tally": tally, "_hypothesis_internal_use_seed": seed, **attributes}
            run_state_machine_as_test(
                type(machine.__name__, (machine,), members),
                settings=settings(
                    max_examples=8,
                    stateful_step_count=STEPS,
                    deadline=None,
                    database=None,
                    print_blob=False,
                    report_multiple_bugs=False,
                    phases=[Phase.generate, Phase.shrink] if FULL or SEED else [Phase.generate],
                    suppress_health_check=list(HealthCheck),
                ),
            )
            seed += 1
    finally:
        print(tally)
    assert tally.decided == tally.decidable, "a read failed although nothing that it needs was removed"
    if FULL:
        assert 2 * sum(tally.exact.values()) > sum(tally.checks.values())


@pytest.mark.parametrize("turn", range(TURNS))
@pytest.mark.parametrize("reading", READINGS)
def test_every_read_equals_the_history_or_reports_an_error(reading: str, turn: int) -> None:
    with NatsServer() as server:
        run(HistoryMachine, OPERATIONS // TURNS // len(READINGS), server=server, reading=reading)


def test_every_read_beside_a_lagging_replica_equals_the_history_or_reports_an_error() -> None:
    with NatsCluster(3) as cluster:
        server = cluster.servers[0]
        run(LaggingMachine, 10_000 if FULL else 200, server=server, cluster=cluster)
