"""`ingest` counts the seconds while the machine is suspended."""

import time

import pytest

from jetstream_ext.client import ingest


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="Linux only")
def test_a_suspended_machine_counts() -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= ingest.elapsed() <= time.clock_gettime(time.CLOCK_BOOTTIME)


def test_every_platform_has_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "_CLOCK", None)
    before = time.monotonic()
    assert before <= ingest.elapsed() <= time.monotonic()
