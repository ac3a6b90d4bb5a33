"""What a row lacks or has twice is an error that says what it has; a file is stored as its rows are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_tools import Json, Run, assert_usage, payloads, stored
from click.testing import Result

from jetstream_ext.testing import NatsServer

SUBJECT = "the subject (--subject or --subject-from)"
HEADERS = "the headers (--headers-from)"
MANY = {f"c{n}": 1 for n in range(30)}
Check = Callable[..., Result]


@pytest.fixture
def check(run: Run, tmp_path: Path) -> Check:
    """Write a file, and let ingest check its rows for a stream that takes every subject."""

    def check(content: str | bytes, *options: str, suffix: str = "jsonl") -> Result:
        file = tmp_path / f"rows.{suffix}"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        how = ("ingest", file, "--stream", "NONE", "--create", ">", "--dry-run", "--json")
        return run(*how, *options)

    return check


def problem(done: Result) -> str | None:
    """Return what is wrong with the first row that cannot be sent, or with the file."""
    if not done.stdout:
        return str(done.stderr).removeprefix("Error: ").rstrip("\n")
    return next(iter(json.loads(done.stdout)["problems"]), None)


def test_a_missing_column_is_named_with_the_columns_that_there_are(check: Check, tmp_path: Path) -> None:
    s = ("--subject", "s")
    columns = ", ".join(repr(name) for name in [*MANY][:20])
    many = json.dumps(MANY)
    failures = []
    for suffix, content, options, words in (
        ("jsonl", '{"id":1,"headers":{}}', (*s, "--headers-from", "heders"), f"'heders' for {HEADERS}; did you mean 'headers'? The columns are 'id', 'headers'"),
        ("csv", 'n,h\n1,"{}"\n', (*s, "--headers-from", "hh"), f"'hh' for {HEADERS}; did you mean 'h'? The columns are 'n', 'h'"),
        ("jsonl", many, (*s, "--headers-from", "h"), f"'h' for {HEADERS}; the columns are {columns}, …"),
        ("jsonl", '{"data":"x","n":1}', (*s, "--data-from", "daat"), "'daat' for the payload (--data-from); did you mean 'data'? The columns are 'data', 'n'"),
        ("jsonl", '{"country":"de"}', ("--subject", "a.{contry}"), f"'contry' for {SUBJECT}; did you mean 'country'? The only column is 'country'"),
        ("csv", "to;n\na;1\n", ("--subject", "{to}"), f"'to' for {SUBJECT}; the only column is 'to;n'; if ';' separates the columns, give --delimiter ';'"),
        ("csv", "to\tn\na\t1\n", ("--subject", "{to}"), f"'to' for {SUBJECT}; the only column is 'to\\tn'; if a tab separates the columns, give --delimiter tab"),
        ("jsonl", '{"a;b;c":1}', ("--subject", "{to}"), f"'to' for {SUBJECT}; the only column is 'a;b;c'"),
        ("jsonl", "{}", (*s, "--data-from", "n"), "'n' for the payload (--data-from); the row is empty"),
    ):  # fmt: skip
        done = check(content, *options, suffix=suffix)
        place = tmp_path / "rows.csv" if suffix == "csv" else "row 1"
        if (done.exit_code, problem(done)) != (1, f"{place}: there is no column {words}"):
            failures.append(f"{content!r} {options}: {done.output}")
    assert not failures, "\n".join(failures)


def test_an_empty_value_is_no_missing_column(check: Check) -> None:
    assert problem(check('{"to":null}', "--subject", "{to}")) == "row 1: column 'to' has no value; the subject needs it"
    nothing = check('{"n":null}', "--subject", "s", "--data-from", "n")
    assert problem(nothing) == "row 1: column 'n' has no value; the payload needs it"
    for empty in ("null", '""', "{}"):
        done = check(f'{{"h":{empty}}}', "--subject", "s", "--headers-from", "h")
        assert done.exit_code == 0, done.output
    coded = check('{"data_base64":"/w=="}', "--subject", "s", "--data-from", "data")
    assert json.loads(coded.stdout)["examples"] == [{"subject": "s", "data_base64": "/w=="}]


def test_a_key_that_a_message_needs_is_in_a_line_once(check: Check) -> None:
    failures = []
    for text, key in (
        (r'{"to":"a","data":"1","data":"2"}', "data"),
        (r'{"to":"a","data":"1","d\u0061ta":"2"}', "data"),
        (r'{"to":"a","data":{"a":1},"data":"2"}', "data"),
        (r'{"to":"a","data_base64":"MQ==","data_base64":"Mg=="}', "data_base64"),
        (r'{"to":"a","data":"1","to":"b"}', "to"),
        (r'{"to":"a","data":"1","h":{},"h":null}', "h"),
        (r'{"to":"a","data":"1","h":{"X":"1","Y":"2","X":"1"}}', "X"),
        (r'{"to":"a","data":"1","h":{"X":"1","\u0058":"1"}}', "X"),
        (r'{"to":"a","data":"1","n":{"X":1,"X":2},"n":"\u0058","h":{"X":"data"}}', None),
        (r'{"to":"a","data":"\"data\":1,\"data\":2","h":{"X":"X"}}', None),
    ):
        content = text if '"h"' in text else text.replace("{", '{"h":{},', 1)
        found = problem(check(content, "--subject", "{to}", "--data-from", "data", "--headers-from", "h"))
        if found != (key and f"row 1: the key {key!r} is there twice"):
            failures.append(f"{text}: {found}")
    # A whole line that is the payload keeps both.
    assert problem(check('{"id":1,"id":2}', "--subject", "s")) is None
    assert problem(check('{"id":1,"id":2}', "--subject", "s.{id}")) == "row 1: the key 'id' is there twice"
    assert not failures, "\n".join(failures)


def test_headers_that_are_none_are_refused(check: Check) -> None:
    failures = []
    for value, words in (
        ("[1]", " is neither a map nor a JSON object"),
        ("x", " is neither a map nor a JSON object"),
        ('{"X": "\\ud800"}', " is neither a map nor a JSON object"),
        ('{"X": "1", "X": "2"}', ": the key 'X' is there twice"),
        ('{"Y": "1", "X": []}', ": header 'X' has an empty list of values"),
        ('{"X": 1}', " has a header that is not a string"),
        ('{"X": [null]}', " has a header that is not a string"),
    ):
        found = problem(check(json.dumps({"h": value}), "--subject", "s", "--headers-from", "h"))
        if found != f"row 1: column 'h'{words}":
            failures.append(f"{value}: {found}")
    assert not failures, "\n".join(failures)


def test_an_integer_of_any_size_is_part_of_a_subject(check: Check) -> None:
    for number in ("18446744073709551616", "-9223372036854775809", "1" * 300):
        done = check(f'{{"id":{number},"other":1.5}}', "--subject", "s.{id}")
        assert [each["subject"] for each in json.loads(done.stdout)["examples"]] == [f"s.{number}"], done.output
    done = check('{"id":1,"other":1.5}', "--subject", "s.{other}")
    assert problem(done) == "row 1: column 'other' is neither a string nor an integer; the subject needs it"


def test_lines_are_stored_unchanged_and_empty_ones_left_out(
    server: NatsServer, ok: Json, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, line = stream_name(), '{"to": "a",  "id": 12345678901234567890123, "price": 1.10}'
    for name, content, rows in (
        ("rows.csv", b'\xef\xbb\xbf\r\n\n\nto,v\n\na,"\n"\n\n', [b'{"to":"a","v":"\\n"}']),
        ("rows.jsonl", f"\ufeff{line}\r\n\n{line}".encode(), [line.encode()] * 2),
    ):
        (tmp_path / name).write_bytes(content)
        ok("ingest", tmp_path / name, "--stream", stream, "--subject", f"{stream}.{{to}}", "--create", f"{stream}.>")
        assert payloads(server.url, stream)[-len(rows) :] == rows


def test_the_subject_is_the_column_of_that_name_unless_an_option_says_otherwise(
    server: NatsServer, run: Run, ok: Json, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, rows = stream_name(), tmp_path / "rows.csv"
    rows.write_text(f"subject,n\n{stream}.a,1\n{stream}.b,2\n")
    how = ("ingest", rows, "--stream", stream)
    assert ok(*how, "--create", f"{stream}.>")["rows"] == 2
    ok(*how, "--subject-from", "subject", "--data-from", "n", "--again")
    found = [(message.subject.rpartition(".")[2], message.data) for message in stored(server.url, stream)]
    rest = [("a", b"1"), ("b", b"2")]
    assert found == [(to, b'{"subject":"%b.%b","n":"%b"}' % (stream.encode(), to.encode(), n)) for to, n in rest] + rest
    assert_usage(run(*how, "--subject", "a", "--subject-from", "n"), "give --subject or --subject-from, not both")
