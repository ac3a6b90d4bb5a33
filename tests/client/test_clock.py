"""`elapsed`: seconds that also count while the machine is suspended."""

import importlib
import time

import pytest

from jetstream_ext.client import clock


def test_elapsed_never_goes_back() -> None:
    times = [clock.elapsed() for _ in range(100)]
    assert times == sorted(times)


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="Linux only")
def test_a_suspended_machine_counts() -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= clock.elapsed() <= time.clock_gettime(time.CLOCK_BOOTTIME)


def test_every_platform_has_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
    monkeypatch.delattr(time, "CLOCK_MONOTONIC", raising=False)
    try:
        before = time.monotonic()
        assert before <= importlib.reload(clock).elapsed() <= time.monotonic()
    finally:
        monkeypatch.undo()
        importlib.reload(clock)
