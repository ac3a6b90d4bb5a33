"""export --rows gives back the table that ingest read, or names what it cannot."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_tools import Json, Run, assert_usage, payloads, with_js

import jetstream_ext as jsx
from jetstream_ext.cli import export
from jetstream_ext.cli.files import table_files
from jetstream_ext.testing import NatsServer

FIELDS = ("", " x ", "\r", "a\rb", "a\r\nb", '"', "\0", "null", "1.10", "\ufeff", "=1", "\u00e9", "a,b\t;", "[1]")
LINES = (
    '{"n": 1.10, "id": 12345678901234567890123,  "x": {"b": [1e2]}}',
    '{"id":1,"id":2}',
    '{"a\\u000ab": "\\u000d"}',
)


@pytest.fixture
def fill(server: NatsServer, stream_name: Callable[[], str]) -> Callable[..., str]:
    """Store payloads in a new stream; return its name."""

    def fill(*content: bytes, headers: dict[str, str] | None = None) -> str:
        stream = stream_name()
        config: Any = {"subjects": [stream], "allow_direct": True, "allow_atomic": True}
        with_js(server.url, lambda js: jsx.ensure_stream(js, name=stream, **config))
        messages = [(stream, payload, headers or {}) for payload in content]
        with_js(server.url, lambda js: jsx.publish_atomic(js, messages))
        return stream

    return fill


@pytest.mark.parametrize("suffix", ["csv", "tsv.gz", "jsonl", "parquet"])
def test_the_table_that_was_ingested_is_exported(
    ok: Json, tmp_path: Path, stream_name: Callable[[], str], suffix: str
) -> None:
    stream, rows, out = stream_name(), tmp_path / f"rows.{suffix.removesuffix('.gz')}", tmp_path / f"out.{suffix}"
    if suffix == "jsonl":
        rows.write_text("".join(f"{line}\n" for line in LINES))
    elif suffix == "parquet":
        columns = {"n": [1, None], "x": [0.1, 2e100], "t": ["\u00e9", ""], "b": [True, None], "l": [[1], []]}
        pq.write_table(
            pa.table(columns | {"s": [{"a": "x", "b": None}, {"a": "y", "b": [2.5]}], "none": [None] * 2}), rows
        )
    else:
        with rows.open("w", newline="") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_ALL, delimiter="\t" if "tsv" in suffix else ",")
            writer.writerows([("a b", 'q"', "=c\r"), *((field, "x", field) for field in FIELDS)])
    how = ("--stream", stream, "--subject", stream, "--create", stream)
    ok("ingest", rows, *how)
    done = ok("export", stream, out, "--rows")
    assert (done["bytes"], done["headers_left_out"]) == (out.stat().st_size, 0)
    assert sorted(path.name for path in tmp_path.glob("*.*")) == sorted([rows.name, out.name])
    if suffix == "jsonl":
        assert out.read_bytes() == rows.read_bytes()
    elif suffix == "parquet":
        assert pq.read_table(out).equals(pq.read_table(rows))
    before = ok("export", stream, tmp_path / "before.jsonl")["messages"]
    ok("ingest", out, *how)
    ok("export", stream, tmp_path / "after.jsonl", "--start-seq", before + 1)
    both = [
        [json.loads(line)["data"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("before", "after")
    ]
    assert both[0] == both[1]
    assert len(both[0]) == before


PAYLOADS = (
    b'{"n":1.10,"t":"a\\"b,","x":null}',
    b' {"n":12345678901234567890123,\r\n"new, key":{"b":[1e2,"\\u00e9"]},"e":""}\n',
    b'{"t":true,"e":"=1"}',
    b"{}",
)


def test_a_csv_file_of_rows_has_every_key_and_the_digits_of_numbers(
    ok: Json, run: Run, tmp_path: Path, fill: Callable[..., str]
) -> None:
    stream, out = fill(*PAYLOADS, headers={"X": "1"}), tmp_path / "out.csv"
    done = run("export", stream, out, "--rows")
    assert (done.exit_code, done.stderr) == (0, "left out 4 headers: --rows writes only payloads\n")
    assert out.read_text().splitlines() == [
        'n,t,x,"new, key",e',
        '1.10,"a""b,",,,',
        '12345678901234567890123,,,"{""b"":[1e2,""\u00e9""]}",""',
        ',true,,,"=1"',
        ",,,,",
    ]
    ok("export", stream, out, "--rows", "--overwrite", "--delimiter", ";")
    assert out.read_text().splitlines()[3] == ';true;;;"=1"'
    lines = tmp_path / "out.jsonl"
    ok("export", stream, lines, "--rows")
    assert [json.loads(line) for line in lines.read_text().splitlines()] == [json.loads(data) for data in PAYLOADS]


ASCII = "".join(map(chr, range(128)))
NUMBERS = [b"1.5", b"-2", b"-0.25", b"2e+3", b"1E-5", b"-1.5e-7", b"12345678901234567890123", b"0", b"true", b"null"]


@pytest.mark.parametrize("options", [("--rows",), ()], ids=["rows", "messages"])
def test_every_delimiter_that_is_accepted_gives_the_same_rows(
    run: Run, tmp_path: Path, fill: Callable[..., str], options: tuple[str, ...]
) -> None:
    names = ["a", ASCII, *ASCII]
    stream = fill(
        *(b'{"a":%b,"b":%b}' % (number, NUMBERS[-n]) for n, number in enumerate(NUMBERS)),
        json.dumps(dict.fromkeys(names, -1.5)).encode(),
        json.dumps({name: [name, {name: -1.5}] for name in names}).encode(),
        json.dumps({name: name for name in names}).encode(),
        b'{"a":[-1.5,2e+3],"b":{"c":-2}}',
    )
    file, wanted, accepted = tmp_path / "out.csv", list[Any](), ""
    for delimiter in "," + ASCII:
        done = run("export", stream, file, *options, "--overwrite", "--delimiter", delimiter)
        if done.exit_code == 2:
            assert_usage(done, "--delimiter is 'tab' or one ASCII character, no letter, digit or quote")
            continue
        assert done.exit_code == 0, done.output
        accepted += delimiter
        with file.open(newline="") as rows:
            found = list(csv.DictReader(rows, delimiter=delimiter))
        wanted = wanted or found
        assert found == wanted, delimiter
    assert set(",;|\t .:-") <= set(accepted)
    assert set('"_\r\na0').isdisjoint(accepted)
    assert len(wanted) == len(NUMBERS) + 4
    if options:
        assert [(row["a"], row["b"]) for row in wanted[:2]] == [("1.5", "1.5"), ("-2", "")]


def test_a_table_with_a_delimiter_of_numbers_is_ingested_as_it_was(
    server: NatsServer, ok: Json, tmp_path: Path, fill: Callable[..., str], stream_name: Callable[[], str]
) -> None:
    stream, file = fill(b'{"a":1.5,"b":-2}', b'{"a":2e+3,"b":7}'), tmp_path / "out.csv"
    for delimiter in ".-+ :'":
        copy = stream_name()
        ok("export", stream, file, "--rows", "--delimiter", delimiter, "--overwrite")
        ok("ingest", file, "--delimiter", delimiter, "--stream", copy, "--create", copy, "--subject", copy)
        rows = [json.loads(payload) for payload in payloads(server.url, copy)]
        assert rows == [{"a": "1.5", "b": "-2"}, {"a": "2e+3", "b": "7"}], delimiter


UNWRITABLE: tuple[tuple[str, list[bytes], str], ...] = (
    ("jsonl", [b"{}", b"[1]"], "message 2 of stream 'S': its payload is not a JSON object"),
    ("csv", [b"{}", b"{}", b"\xff"], "message 3 of stream 'S': its payload cannot become a row: "),
    ("csv", [b'{"a":1}', b'{"a":{"b":1,"b":2}}'], "message 2 of stream 'S': its payload cannot become a row: the key 'b'"),
    ("parquet", [b'{"a":1}', b'{"a":1,"a":2}'], "message 2 of stream 'S': its payload cannot become a row: the key 'a'"),
    ("parquet", [b'{"a":1.2345678901234567891}'], "message 1 of stream 'S': its payload cannot become a row: the number"),
    ("parquet", [b'{"a":1}', b"{}", b'{"a":"x"}'], "message 3: column 'a' cannot have its value (Could not convert 'x'"),
    ("parquet", [b'{"a":1}', b'{"a":18446744073709551616}'], "message 2: column 'a' cannot have its value"),
    ("parquet", [b'{"a":0.5}', b'{"a":9007199254740993}'], "message 2: column 'a' cannot have its value"),
    ("parquet", [b'{"a":0.5}', b'{"a":true}'], "message 2: column 'a' cannot have its value (Expected number, got bool)"),
    ("parquet", [b'{"a":[{"b":[0.5,1]}]}', b'{"a":[{"b":[true]}]}'], "message 2: column 'a' cannot have its value"),
    ("parquet", [b'{"a":1e-400}'], "message 1 of stream 'S': its payload cannot become a row: the number 1e-400"),
    ("csv", [b'{"a":' + b"[" * 300 + b"]" * 300 + b"}"], "message 1: its payload is nested too deeply"),
    ("parquet", [b"{}"], "the payloads are empty objects, so that there are no columns"),
    ("csv", [b"{}"], "the payloads are empty objects, so that there are no columns"),
    ("parquet", [b'{"b":1,"a":[{}]}'], "column 'a' has empty objects, which Parquet cannot store"),
)  # fmt: skip


def test_what_a_table_cannot_hold_is_refused_by_name(run: Run, tmp_path: Path, fill: Callable[..., str]) -> None:
    failures = []
    for suffix, content, words in UNWRITABLE:
        stream = fill(*content)
        done = run("export", stream, tmp_path / f"out.{suffix}", "--rows")
        begin = "Error: " + words.replace("stream 'S'", f"stream '{stream}'")
        if (done.exit_code, done.stdout, done.stderr.count("\n")) != (1, "", 1) or list(tmp_path.iterdir()):
            failures.append(f"{suffix} {content}: {done.output}")
        elif not done.stderr.startswith(begin) or "export" not in done.stderr.removeprefix(begin):
            failures.append(f"{suffix} {content}: {done.stderr}")
    assert not failures, "\n".join(failures)


def test_types_that_change_far_into_a_stream_are_unified_or_refused(
    run: Run, ok: Json, tmp_path: Path, fill: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_files, "_BLOCK", 2)
    stream, out = fill(b'{"a":1}', b"{}", b'{"b":["x"]}', b'{"a":0.5}'), tmp_path / "out.parquet"
    ok("export", stream, out, "--rows")
    assert pq.read_table(out).to_pydict() == {"a": [1.0, None, None, 0.5], "b": [None, None, ["x"], None]}
    stream = fill(b'{"a":1}', b"{}", b'{"a":"x"}')
    done = run("export", stream, tmp_path / "mixed.parquet", "--rows")
    assert "column 'a' has values of different types, int64 before message 3, string from it on; export" in done.stderr


def test_an_empty_cell_of_a_single_column_is_no_empty_line(
    ok: Json, tmp_path: Path, fill: Callable[..., str], stream_name: Callable[[], str]
) -> None:
    stream, out = fill(b'{"a":""}', b'{"a":null}', b'{"a":1}', b"{}"), tmp_path / "out.csv"
    ok("export", stream, out, "--rows")
    assert out.read_text() == 'a\n""\n""\n1\n""\n'
    assert ok("ingest", out, "--stream", stream_name(), "--subject", "x", "--create", "x")["sent"] == 4


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_an_unfinished_export_of_rows_is_continued(
    ok: Json, run: Run, tmp_path: Path, fill: Callable[..., str], monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    stream, out = fill(b'{"a":1}', b'{"b":2}'), tmp_path / f"out.{suffix}"
    with monkeypatch.context() as patch:
        patch.setattr(export._Part, "finish", Mock(side_effect=KeyboardInterrupt))
        assert "--resume continues" in run("export", stream, out, "--rows").stderr
    assert "another stream, subject, start or format" in run("export", stream, out, "--resume").stderr
    assert ok("export", stream, out, "--rows", "--resume")["messages"] == 2
    assert out.read_text() == ("a,b\n1,\n,2\n" if suffix == "csv" else '{"a":1}\n{"b":2}\n')
