"""The page on guarantees: every test that it names is there, and every call that promises something is on it."""

from __future__ import annotations

import re
from pathlib import Path

import jetstream_ext as jsx
from jetstream_ext import arrow, log
from jetstream_ext import kv as kvx

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "guarantees.md").read_text(encoding="utf-8")
# They ask at most, and a lost answer is a timeout.
ONLY_ASK = {
    "features", "marker_reason", "source_health", "ttl_headers", "watch_abandoned", "with_ttl",
    "create_source_consumer", "kv.enable",
}  # fmt: skip


def test_the_tests_that_are_named_are_there() -> None:
    named = set(re.findall(r"`(\w+/test_\w+\.py)::(?:Test\w+::)?(test_\w+)`", PAGE))
    assert len(named) > 50
    missing = {
        f"{file}::{name}"
        for file, name in named
        if not re.search(rf"^ *(async )?def {name}\(", (TESTS / file).read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert missing == set()


def test_every_statement_names_one() -> None:
    _, *sections = re.split(r"^### ", PAGE, flags=re.MULTILINE)
    assert len(sections) > 10
    for section in sections:
        for statement in re.split(r"^(?=: )", section, flags=re.MULTILINE)[1:] or [section]:
            assert "::test_" in statement or "As in" in statement, statement


def test_every_call_is_on_the_page() -> None:
    calls = {name for name in jsx.__all__ if name[0].islower()} | {"DirectGet", "AtomicBatch", "FastPublisher"}
    calls |= {f"kv.{name}" for name in kvx.__all__ if name[0].islower()}
    calls |= {"log.LogReader", "log.OffsetStore", "log.Group.join", "log.Group.status", "log.Group.reset"}
    calls |= {f"log.{name}" for name in log.__all__ if name[0].islower()}
    calls |= {"arrow.RecordBatchReader"} | {f"arrow.{name}" for name in arrow.__all__ if name[0].islower()}
    heads = " ".join(re.findall(r"^### (.*)$", PAGE, re.MULTILINE))
    assert {name for name in calls - ONLY_ASK if name not in heads} == set()
