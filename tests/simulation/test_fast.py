"""A few seconds of the simulation; CI also runs 20,000 schedules, and `nox -s full -- simulation` 200,000."""

import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fast_schedules import name_of, replay, run

from jetstream_ext.protocol.fast import FastBatch
from jetstream_ext.protocol.fast_window import Window
from jetstream_ext.types import BatchFlowAck, BatchFlowGap, GapMode

SCHEDULES = 250  # of each mode


def test_schedules() -> None:
    first = Random().randrange(10**9)  # different seeds in every run; a failure names its seed
    failures = [f"{name_of(*schedule)}: {error}" for schedule, error in run(first, SCHEDULES) if error is not None]
    assert not failures, "replay with: python tests/simulation --replay <name>\n" + "\n".join(failures)


def test_a_schedule_can_be_replayed() -> None:
    for name in ("ok:wire:58", "fail:chaos:25"):
        one: list[str] = []
        other: list[str] = []
        replay(name, one.append)
        replay(name, other.append)
        assert one == other
        assert len(one) > 3


def test_schedules_that_found_a_defect() -> None:
    replay("ok:wire:176")  # a window full of refused messages is never acknowledged
    replay("ok:chaos:1025")  # the same for messages whose reports were lost


def _moves_back(self: Window, ack: BatchFlowAck, sent: int) -> bool:
    self.acked = min(ack.seq, sent)
    return True


def _trusts_gaps(self: FastBatch, reply: object, gap: BatchFlowGap, now: float, events: object) -> None:
    self.window.acked = min(gap.seq, self.sent)


def _never_asks(self: FastBatch, now: float) -> tuple[list[object], bytes]:
    return [], b""


BUGS: dict[str, tuple[type, str, Any, GapMode, int]] = {  # the last is the seed at which the search begins
    "acks that go back": (Window, "acknowledge", _moves_back, GapMode.FAIL, 0),
    "a gap that moves the window": (FastBatch, "_gap", _trusts_gaps, GapMode.FAIL, 0),
    "no timers": (FastBatch, "handle_timer", _never_asks, GapMode.OK, 0),
    "no doubts": (FastBatch, "_doubts", lambda *_: [], GapMode.OK, 425),
}


def test_finds_bugs() -> None:
    """The simulation must find the defect of a machine with a known one."""
    for bug, (owner, name, wrong, mode, first) in BUGS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, wrong)
            assert any(error is not None for (at, _, _), error in run(first, 2000) if at is mode), bug
