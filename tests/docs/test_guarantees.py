"""The page on guarantees: an existing test for every statement, and a section for every call that promises something."""

from __future__ import annotations

import re
from pathlib import Path

import jetstream_ext as jsx
from jetstream_ext import arrow, log
from jetstream_ext import kv as kvx

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
PAGE = (DOCS / "guarantees.md").read_text(encoding="utf-8")
# They ask at most, and a lost answer is a timeout.
ONLY_ASK = {
    "features", "marker_reason", "source_health", "ttl_headers", "watch_abandoned", "with_ttl",
    "create_source_consumer", "kv.enable", "log.partition_of",
}  # fmt: skip


def statements(page: str) -> dict[tuple[str, str], str]:
    """Return the texts of a page by heading and term; the text before the first term of a section has the term ``""``."""
    found: dict[tuple[str, str], str] = {}
    for section in re.split(r"^###? ", page, flags=re.MULTILINE)[1:]:
        heading, body = section.split("\n", 1)
        lead, *terms = re.split(r"^(\S.*)\n(?=: )", body, flags=re.MULTILINE)
        if lead.strip():
            found[heading, ""] = lead
        for term, text in zip(terms[::2], terms[1::2], strict=True):
            assert (heading, term) not in found, f"{heading}: {term} is there twice"
            found[heading, term] = text
    return found


STATEMENTS = statements(PAGE)
TESTED_BY = statements((DOCS / "guarantees-tests.md").read_text(encoding="utf-8"))


def test_every_statement_has_its_tests_on_the_page_of_tests() -> None:
    assert len(STATEMENTS) > 100
    # "As in ...": the other section has the tests.
    assert {key for key, text in STATEMENTS.items() if not re.match(r":? ?As in \S+\.$", text.strip())} == set(
        TESTED_BY
    )


def test_the_tests_exist() -> None:
    assert all("`" in text for text in TESTED_BY.values())
    named = {entry for text in TESTED_BY.values() for entry in re.findall(r"`([^`]+)`", text)}
    assert len(named) > 400
    missing = {entry for entry in named if not exists(entry)}
    assert missing == set()


def exists(entry: str) -> bool:
    file, *within = entry.split("::")
    if not (TESTS / file).is_file():
        return False
    text = (TESTS / file).read_text(encoding="utf-8")
    return all(re.search(rf"^ *(async )?(def|class) {name}\b", text, re.MULTILINE) for name in within)


def test_guarantees_name_no_tests() -> None:
    assert "::test_" not in PAGE


def test_every_call_is_on_the_page() -> None:
    calls = {name for name in jsx.__all__ if name[0].islower()} | {"DirectGet", "AtomicBatch", "FastPublisher"}
    calls |= {f"kv.{name}" for name in kvx.__all__ if name[0].islower()}
    calls |= {"log.LogReader", "log.OffsetStore", "log.Group.join", "log.Group.status", "log.Group.reset"}
    calls |= {f"log.{name}" for name in log.__all__ if name[0].islower()}
    calls |= {"arrow.RecordBatchReader"} | {f"arrow.{name}" for name in arrow.__all__ if name[0].islower()}
    heads = " ".join(re.findall(r"^### (.*)$", PAGE, re.MULTILINE))
    assert {name for name in calls - ONLY_ASK if name not in heads} == set()
