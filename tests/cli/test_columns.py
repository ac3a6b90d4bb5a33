"""Columns that the options of ingest name: what a row lacks is an error that says what it has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from cli_tools import Run

from jetstream_ext.cli.files.row_files import JsonRow, RowError, Rows, Source
from jetstream_ext.cli.files.row_messages import RowMapping

SUBJECT = "the subject (--subject or --subject-from)"
HEADERS = "the headers (--headers-from)"
MANY = [f"c{n}" for n in range(30)]


def refusal(mapping: RowMapping, row: dict[str, Any]) -> str:
    with pytest.raises(RowError) as caught:
        mapping.message(row, "row 1")
    return caught.value.message.removeprefix("row 1: ")


@pytest.mark.parametrize(
    ("mapping", "row", "words"),
    [
        (RowMapping("s", headers_from="heders"), {"id": 1, "headers": {}}, f"'heders' for {HEADERS}; did you mean 'headers'? The columns are 'id', 'headers'"),
        (RowMapping("s", headers_from="h"), dict.fromkeys(MANY), f"'h' for {HEADERS}; the columns are {str(MANY[:20])[1:-1]}, …"),
        (RowMapping("s", "daat"), {"data": "x", "n": 1}, "'daat' for the payload (--data-from); did you mean 'data'? The columns are 'data', 'n'"),
        (RowMapping("a.{contry}"), {"country": "de"}, f"'contry' for {SUBJECT}; did you mean 'country'? The only column is 'country'"),
        (RowMapping("{to}"), {"to;n": "a;1"}, f"'to' for {SUBJECT}; the only column is 'to;n'; if ';' separates the columns, give --delimiter ';'"),
        (RowMapping("{to}"), {"to\tn": "a\t1"}, f"'to' for {SUBJECT}; the only column is 'to\\tn'; if a tab separates the columns, give --delimiter tab"),
        (RowMapping("{to}"), JsonRow({"a;b;c": 1}), f"'to' for {SUBJECT}; the only column is 'a;b;c'"),
        (RowMapping("s", "n"), {}, "'n' for the payload (--data-from); the row is empty"),
    ],
)  # fmt: skip
def test_a_missing_column_is_named_with_the_columns_that_there_are(
    mapping: RowMapping, row: dict[str, Any], words: str
) -> None:
    assert refusal(mapping, row) == f"there is no column {words}"


def test_an_empty_value_is_no_missing_column() -> None:
    assert refusal(RowMapping("{to}"), {"to": None}) == "column 'to' has no value; the subject needs it"
    assert refusal(RowMapping("s", "n"), {"n": None}) == "column 'n' has no value; the payload needs it"
    for empty in (None, "", {}):
        assert RowMapping("s", headers_from="h").message({"h": empty}, "row 1").headers is None
    assert RowMapping("s", "data").message({"data_base64": "/w=="}, "row 1").payload == b"\xff"


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_misspelt_column_stores_nothing(
    run: Run, tmp_path: Path, stream_name: Callable[[], str], suffix: str
) -> None:
    stream, rows = stream_name(), tmp_path / f"rows.{suffix}"
    rows.write_text('n,h\n1,"{}"\n' if suffix == "csv" else '{"n": 1, "h": {"X": "1"}}\n')
    done = run("ingest", rows, "--stream", stream, "--subject", stream, "--headers-from", "hh", "--create", stream)
    place = rows if suffix == "csv" else f"{rows}, row 1"
    assert done.exit_code == 1
    assert (
        f"Error: {place}: there is no column 'hh' for {HEADERS}; did you mean 'h'? The columns are 'n', 'h'"
        in done.stderr
    )


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (rb'{"data":"1","data":"2"}', "data"),
        (rb'{"data":"1","d\u0061ta":"2"}', "data"),
        (rb'{"data":{"a":1},"data":"2"}', "data"),
        (rb'{"data_base64":"MQ==","data_base64":"Mg=="}', "data_base64"),
        (rb'{"to":"a","data":"1","to":"b"}', "to"),
        (rb'{"data":"1","h":{},"h":null}', "h"),
        (rb'{"data":"1","h":{"X":"1","Y":"2","X":"1"}}', "X"),
        (rb'{"data":"1","h":{"X":"1","\u0058":"1"}}', "X"),
        (rb'{"data":"1","n":{"X":1,"X":2},"n":"\u0058","h":{"X":"data"}}', None),
        (rb'{"data":"\"data\":1,\"data\":2","h":{"X":"X"}}', None),
    ],
)
def test_a_key_that_a_message_needs_is_in_a_line_once(text: bytes, key: str | None) -> None:
    row = JsonRow({"to": "a", "h": {}} | orjson.loads(text))
    row.text = text
    mapping = RowMapping("{to}", "data", "h")
    if key is None:
        assert mapping.message(row, "row 1").headers == {"X": row["h"]["X"]}
    else:
        assert refusal(mapping, row) == f"the key {key!r} is there twice"


@pytest.mark.parametrize("number", ["18446744073709551616", "-9223372036854775809", "1" * 400])
def test_an_integer_of_any_size_is_part_of_a_subject(number: str) -> None:
    row = JsonRow({"id": float(number[:300]), "other": 1.5})
    row.text = b'{"id":%b,"other":1.5}' % number.encode()
    assert RowMapping("s.{id}").message(row, "row 1").subject == f"s.{number}"
    assert refusal(RowMapping("s.{other}"), row) == (
        "column 'other' is neither a string nor an integer; the subject needs it"
    )


def test_empty_lines_before_the_header_of_csv_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes(b'\xef\xbb\xbf\r\n\n\nc,v\n\n"\n",1\n\n')
    rows = Rows(Source(file, "rows.csv", "csv"))
    assert rows.columns() == ("c", "v")
    assert list(rows.read()) == [{"c": "\n", "v": "1"}]


def test_a_line_that_is_the_payload_keeps_equal_keys() -> None:
    row = JsonRow({"id": 2})
    row.text = b'{"id":1,"id":2}'
    assert RowMapping("s").message(row, "row 1").payload == row.text
    assert refusal(RowMapping("s.{id}"), row) == "the key 'id' is there twice"
