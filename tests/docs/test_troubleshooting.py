"""The page on troubleshooting: an entry with cause and fix for every public error, under the words that users see."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path

from jetstream_ext import errors
from jetstream_ext.testing.reference.wire.errors import api_error

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
ENTRIES = dict(entry.split("\n", 1) for entry in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:])
# The sections whose headings quote only messages of this library.
OWN_MESSAGES = PAGE[PAGE.index("\n## Command line\n") :]
CLASSES = {
    name: cls
    for name, cls in vars(errors).items()
    if inspect.isclass(cls) and issubclass(cls, errors.JetStreamExtError)
}
MESSAGES = " ".join((DOCS / "_generated" / "messages.txt").read_text(encoding="utf-8").split())


def heading(name: str) -> str:
    found = [heading for heading in ENTRIES if f"`{name}`" in heading]
    assert len(found) == 1, f"{name}: {found}"
    return found[0]


def test_every_error_has_one_entry_under_its_words() -> None:
    said = MESSAGES + " ".join(api_error(code).description for code in errors.SERVER_ERRORS)
    for name in CLASSES:
        title = heading(name)
        codes = {code for code, cls in errors.SERVER_ERRORS.items() if cls.__name__ == name}
        if name != "KeyConflictError":  # the code of its base
            assert not codes or re.search(rf"`{name}` \((\d+)\)", title), title
        _, _, words = title.partition(": ")
        assert all(part.strip() in said for part in re.split(r"…|, ", words) if part.strip() != "and others"), title


def test_a_heading_quotes_a_message() -> None:
    for title in re.findall(r"^### (.*)$", OWN_MESSAGES, re.MULTILINE):
        quoted = [part.strip() for text in re.findall(r"`([^`]+)`", title) for part in text.split("…")]
        assert [part for part in quoted if part not in MESSAGES] == [], title


def test_every_entry_has_a_cause_and_a_fix() -> None:
    wanted = re.compile(r"^Cause\n: \S.*^Fix\n: \S", re.DOTALL | re.MULTILINE)
    assert [title for title, entry in ENTRIES.items() if not wanted.search(entry)] == []


def test_every_number_in_a_heading_has_an_entry_in_the_index() -> None:
    """Without it, Sphinx's search would find no number."""
    error_numbers = runpy.run_path(str(DOCS / "_ext" / "error_numbers.py"))["error_numbers"]
    found = {int(number) for title in ENTRIES for number in error_numbers(title)}
    assert found == {int(number) for title in ENTRIES for number in re.findall(r"\d{4,}", title)}
    assert len(found) > 25


def test_the_codes_are_those_of_the_classes() -> None:
    named = {(name, int(code)) for title in ENTRIES for name, code in re.findall(r"`(\w+Error)` \((\d{5})\)", title)}
    assert len(named) > 15
    assert all(errors.SERVER_ERRORS[code].__name__ == name for name, code in named)
