"""Fifty thousand mutated frames; `nox -s full -- mutations` feeds ten million."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from families import FAMILIES, run_case, run_cases

from jetstream_ext.kv import history
from jetstream_ext.protocol import api, fast_wire, records

CASES = 500  # of each family


@pytest.mark.parametrize("family", FAMILIES)
def test_mutated_frames_lead_to_documented_errors_only(family: str) -> None:
    report = run_cases(family, 0, CASES)
    assert not report.failures, "replay with: python tests/mutations --replay <name>\n" + "\n".join(report.failures[:5])
    assert report.frames >= CASES // 5


def test_a_case_can_be_replayed() -> None:
    for name in FAMILIES:
        assert run_case(name, 4711) == run_case(name, 4711)


def _is_number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


# A defect in a module, and the family that must find it.
DEFECTS: dict[str, tuple[str, ModuleType, str, Any]] = {
    "a flow without limit": ("fast", fast_wire, "LARGEST_FLOW", 1 << 70),
    "digits of other scripts": ("buckets", history, "parse_number", _is_number),
    "positions of any size": ("stored", records, "json_number", lambda value, name, low=0: int(value)),
    "texts of any type": ("states", api, "json_text", lambda value, name: value),
}


def test_defects_are_found() -> None:
    for defect, (family, module, name, value) in DEFECTS.items():
        assert not run_cases(family, 0, 20).failures, defect
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, value)
            assert run_cases(family, 0, 400).failures, defect


def test_cases_that_found_a_defect() -> None:
    run_case("replies", 654)  # a time without its Z gave a naive datetime
    run_case("states", 865745323)  # a limit of {} counted as none where it was checked, and not where it was used
