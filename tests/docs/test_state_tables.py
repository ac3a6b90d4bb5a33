"""The tables of states that the documentation draws from the machines."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from jetstream_ext.protocol.atomic import State as AtomicState
from jetstream_ext.protocol.fast import State as FastState
from jetstream_ext.protocol.membership import Phase
from jetstream_ext.protocol.range_read import State as ReadState

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("state_tables", DOCS / "_ext" / "state_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def cells(table: tuple[list[str], list[list[str]]]) -> dict[tuple[str, str], str]:
    """Map event and state to what the table says."""
    head, rows = table
    return {
        (name, state): said
        for names, *row in rows
        for name in names.split("; ")
        for state, said in zip(head[1:], row, strict=True)
    }


def test_every_state_has_a_column(tables: ModuleType) -> None:
    # A batch is suspended in ok mode only, and drains in fail mode only.
    without = {"fast-ok": "DRAINING", "fast-fail": "SUSPENDED"}
    for name, states in [
        ("atomic", AtomicState),
        ("fast-ok", FastState),
        ("fast-fail", FastState),
        ("range-read", ReadState),
        ("membership", Phase),
    ]:
        head, _ = tables.TABLES[name]()
        assert head[1:] == [state.name for state in states if state.name != without.get(name)]


CELLS = {
    ("atomic", "`commit`", "OPEN"): "**COMMITTING**",
    ("atomic", "the ack of the batch", "COMMITTING"): "**COMMITTED**",
    ("atomic", "10167", "COMMITTING"): "**FAILED** its error (not_stored)",
    ("atomic", "`resolve` finds the batch", "UNKNOWN"): "**COMMITTED**",
    ("atomic", "`add`", "COMMITTED"): "`BatchClosedError` (stored)",
    ("fast-fail", "`gap` frame", "OPEN"): "**DRAINING** `BatchGapError` (unknown)",
    ("fast-ok", "`gap` frame", "OPEN"): "·",
    ("fast-fail", "10208", "COMMITTING"): "·",
    (
        "fast-fail",
        "10208 to the end of the batch",
        "COMMITTING",
    ): "**ENDED** ERROR `BatchOutcomeUnknownError` (unknown)",
    ("fast-ok", "the connection is lost", "OPEN"): "**SUSPENDED**",
    ("fast-ok", "`ack` frame", "NEW"): "",
    ("range-read", "the connection is lost", "READING"): "**RESUMING**",
    ("range-read", "the connection is lost", "PAUSED"): "·",
    ("membership", "the claim is stored", "LAPSED"): "**FREE**",
    ("membership", "the claim is stored", "OWNED"): "·",
    ("range-read", "a mirror's messages arrive", "READING"): "**PAUSED**",
    (
        "range-read",
        "a mirror's messages arrive, `timeout` seconds after the last new message",
        "READING",
    ): "**ENDED** `MirrorAnswersError`",
    ("range-read", "the leader has a message that no responder delivered", "ASKING"): "**PAUSED**",
    (
        "range-read",
        "the connection is lost a second time at one place, while more than 64 KiB are asked for",
        "READING",
    ): "**RESUMING**",
    ("range-read", "the pause is over", "READING"): "",
}


def test_what_a_cell_says(tables: ModuleType) -> None:
    said = {(name, *place): text for name, table in tables.TABLES.items() for place, text in cells(table()).items()}
    assert {place: said[place] for place in CELLS} == CELLS


def test_a_state_without_a_way_to_it_is_an_error(tables: ModuleType) -> None:
    machine = tables.atomic_batch(AtomicState.OPEN)
    with pytest.raises(AssertionError, match="no way to"):
        tables.reached(machine, AtomicState.FAILED)


def test_the_pages_show_them(tables: ModuleType) -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "design").glob("*.md"))
    assert all(f"```{{state-table}} {name}\n" in text for name in tables.TABLES)
    for name in tables.TABLES:
        lines = tables.markdown(name).splitlines()
        assert len({line.count("|") for line in lines}) == 1
