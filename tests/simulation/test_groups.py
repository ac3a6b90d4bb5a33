"""A few seconds of the simulation of groups; `nox -s full -- group_simulation` runs 100,000 schedules."""

import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from group_schedules import replay, run

from jetstream_ext.protocol.membership import Membership

SCHEDULES = 100  # of each mode


def test_schedules() -> None:
    first = Random().randrange(10**9)  # different seeds in every run; a failure names its seed
    failures = [f"{name}: {error}" for name, error in run(first, SCHEDULES) if error is not None]
    assert not failures, "replay with: python tests/simulation --replay <name>\n" + "\n".join(failures)


@pytest.mark.parametrize("name", ["group:calm:7", "group:wild:7"])
def test_a_schedule_can_be_replayed(name: str) -> None:
    one: list[str] = []
    other: list[str] = []
    replay(name, one.append)
    replay(name, other.append)
    assert one == other
    assert len(one) > 3


def _valid_too_long(self: Membership, sent: float, now: float, was: Callable[..., None] = Membership.renewed) -> None:
    was(self, sent + 5.0, now)


BUGS: dict[str, tuple[str, Any]] = {
    "a partition is claimed from a live member": ("may_claim", lambda *_: True),
    "nothing is ever lost": ("_is_lost", lambda *_: False),
    "a member counts as alive for too long": ("renewed", _valid_too_long),
}


@pytest.mark.parametrize("bug", BUGS)
def test_finds_bugs(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    """The simulation must find the defect of a machine with a known one."""
    monkeypatch.setattr(Membership, *BUGS[bug])
    assert any(error is not None for _, error in run(0, 100))
