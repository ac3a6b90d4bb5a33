"""A few seconds of the simulation of groups; `nox -s full -- group_simulation` runs 100,000 schedules."""

import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from group_schedules import replay, run

from jetstream_ext.protocol.membership import Membership, Owner, Phase

SCHEDULES = 60  # of each mode


def test_schedules() -> None:
    first = Random().randrange(10**9)  # different seeds in every run; a failure names its seed
    failures = [f"{name}: {error}" for name, error in run(first, SCHEDULES) if error is not None]
    assert not failures, "replay with: python tests/simulation --replay <name>\n" + "\n".join(failures)


def test_a_schedule_can_be_replayed() -> None:
    for name in ("group:calm:7", "group:wild:7"):
        one: list[str] = []
        other: list[str] = []
        replay(name, one.append)
        replay(name, other.append)
        assert one == other
        assert len(one) > 3


def test_a_schedule_that_found_a_defect_passes() -> None:
    """An older claim of a member went on behind its newer one, and then no task worked on the partition."""
    replay("group:calm:140")


def _valid_too_long(self: Membership, sent: float, now: float, was: Callable[..., None] = Membership.renewed) -> None:
    was(self, sent + 5.0, now)


def _claims_what_it_does_not_know(self: Membership, owner: Owner | None) -> bool:
    return owner is None or owner.id in ("", self.me) or owner.id not in self._alive


def _trusts_its_view(self: Membership, partition: int, now: float) -> bool:
    owner = self._owner(partition)
    return self._phases[partition] is Phase.OWNED and owner is not None and owner.id != self.me


BUGS: dict[str, tuple[str, Any]] = {
    "a partition is claimed from a live member": ("may_claim", lambda *_: True),
    "a partition is claimed from a member that is not known yet": ("may_claim", _claims_what_it_does_not_know),
    "nothing is ever lost": ("_is_lost", lambda *_: False),
    "a member works on when its key may have ended": ("_is_lost", _trusts_its_view),
    "a member counts as alive for too long": ("renewed", _valid_too_long),
    "an older claim counts as the current one": ("_is_current", lambda self, n, _, phase: self.phase(n) is phase),
}


def test_finds_bugs() -> None:
    """The simulation must find the defect of a machine with a known one."""
    for bug, (name, wrong) in BUGS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Membership, name, wrong)
            assert any(error is not None for _, error in run(3, 200)), bug
