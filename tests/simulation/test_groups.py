"""A few seconds of the simulation of groups; `nox -s full -- group_simulation` runs 100,000 schedules."""

import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from group_schedules import replay, run

from jetstream_ext.log.state import WorkerState
from jetstream_ext.protocol import membership
from jetstream_ext.protocol.membership import OWNED, Event, Membership, Owner, Phase

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


def _is_free_if_unknown(self: Membership, owner: Owner | None) -> bool:
    return owner is None or owner.id in ("", self.me) or owner.id not in self._alive


# A method that is another one, or a cell of the table.
BUGS: dict[str, tuple[str | tuple[Phase, Event], Any]] = {
    "a partition is claimed from a live member": ("_is_free", lambda *_: True),
    "a partition is claimed from a member that is not known yet": ("_is_free", _is_free_if_unknown),
    "a member counts as alive for too long": ("renewed", _valid_too_long),
    "a member works on when its key may have ended": ((OWNED, Event.KEY_ENDED), None),
    "a member works on what another one has taken": ((OWNED, Event.TAKEN), None),
    "a partition that is handed over is never released": ((Phase.REVOKING, Event.HANDED_OVER), None),
    "a claim that has failed is not tried again": ((Phase.CLAIMING, Event.FAILED), None),
    "a partition that has moved begins without its state": ("begin_with", lambda *_: None),
}


def test_finds_bugs() -> None:
    """The simulation must find the defect of a machine with a known one."""
    for bug, (where, wrong) in BUGS.items():
        with pytest.MonkeyPatch.context() as patch:
            if isinstance(where, str):
                patch.setattr(WorkerState if where == "begin_with" else Membership, where, wrong)
            else:
                patch.setitem(membership._NEXT, where, wrong)
            assert any(error is not None for _, error in run(3, 200)), bug
