"""What export writes, ingest stores again as it was; what a file cannot hold is refused by name."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_tools import Json, Run, assert_fails, fill, payloads, stored, with_js

from jetstream_ext import arrow
from jetstream_ext.testing import NatsServer

TEXTS = pa.map_(pa.string(), pa.string())
AWKWARD = (
    b"x\r",
    b"a\rb",
    b"a\r\nb",
    b"\n",
    b"",
    b"\x00",
    b'"',
    b'a,"b"\t',
    b" x ",
    b"\xff",
    b'{"n": 1.10}',
    b"x" * 200_000,
)
Found = tuple[str, bytes, list[tuple[str, str]]]


def own(url: str, stream: str) -> list[Found]:
    """Return the subject, the payload and the headers of each message, without those for the server."""
    return [
        (m.subject, m.data, [pair for pair in m.header_pairs if not pair[0].startswith("Nats-")])
        for m in stored(url, stream)
    ]


def block(*lines: str) -> bytes:
    return "".join(f"{line}\r\n" for line in ("NATS/1.0", *lines, "")).encode()


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_an_export_is_stored_again_as_it_was_without_options(
    server: NatsServer,
    run: Run,
    ok: Json,
    tmp_path: Path,
    stream_name: Callable[[], str],
    publish_raw: Callable[..., None],
    suffix: str,
) -> None:
    stream, out = stream_name(), tmp_path / f"out.{suffix}"
    fill(server.url, stream, AWKWARD)
    a, b = f"{stream}.a".encode(), f"{stream}.b.\u00e9".encode()
    publish_raw(
        server, [(a, b"\xff"), (b, b'{"n": 1.10}')], block=block("X: 1", "Y: two, \u00e9", "X: 3", "Nats-Msg-Id: 7")
    )
    publish_raw(server, [(b, b""), (a, b"x")], block=block("empty:", 'q: "'))
    before = own(server.url, stream)
    done = ok("export", stream, out)
    assert (done["messages"], done["last_seq"], done["bytes"]) == (len(before), len(before), out.stat().st_size)
    with_js(server.url, lambda js: js.delete_stream(stream))
    how = ("ingest", out, "--stream", stream, "--create", stream, "--create", f"{stream}.>")
    done = run(*how)
    assert done.exit_code == 0, done.output
    assert done.stderr == "left out headers that were for other messages: Nats-Msg-Id (1)\n"
    after = own(server.url, stream)
    assert [(subject, data, sorted(headers)) for subject, data, headers in after] == [
        (subject, data, sorted(headers)) for subject, data, headers in before
    ]
    assert [value for name, value in after[len(AWKWARD)][2] if name == "X"] == ["1", "3"]
    again = ok(*how)
    assert (again["already_stored"], again["sent"], again["headers_left_out"]) == (len(before), 0, 0)


def test_parquet_has_exact_times_and_every_value_of_a_header(
    server: NatsServer, ok: Json, tmp_path: Path, stream_name: Callable[[], str], publish_raw: Callable[..., None]
) -> None:
    stream, out, lines = stream_name(), tmp_path / "out.parquet", tmp_path / "out.jsonl"
    fill(server.url, stream, [b"\xff", b""])
    publish_raw(server, [(stream.encode(), b"x")], block=block("X: 1", "Y: two", "X: 3"))
    times = [message.time_ns for message in stored(server.url, stream)]
    ok("export", stream, out)
    table = pq.read_table(out)
    assert table.schema.remove_metadata() == pa.schema(
        [arrow.SCHEMA.field(name) for name in ("seq", "time", "subject", "headers", "data")]
    )
    assert table["time"].cast(pa.int64()).to_pylist() == times
    assert table["headers"].to_pylist()[2] == [("X", ["1", "3"]), ("Y", ["two"])]
    ok("export", stream, lines)
    texts = [json.loads(line)["time"] for line in lines.read_text().splitlines()]
    assert pa.array(texts).cast(pa.timestamp("ns", tz="UTC")).cast(pa.int64()).to_pylist() == times


def test_a_line_that_is_none_of_the_export_that_the_file_seems_to_be_is_refused(
    run: Run, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, out = stream_name(), tmp_path / "out.jsonl"
    line = {"seq": 4, "time": "t", "subject": stream, "headers": {}, "data": "d"}
    out.write_text(json.dumps(line) + "\n" + json.dumps(line | {"amount": 5}) + "\n")
    how = ("ingest", out, "--stream", stream, "--create", stream)
    done = run(*how)
    assert (done.exit_code, "row 2: column 'amount' is none of an export" in done.stderr) == (1, True)
    assert "the 1 row before it is stored" in done.stderr
    assert run(*how, "--data-from", "data", "--again").exit_code == 0


def test_explicit_options_win_over_the_columns_of_an_export(
    server: NatsServer, ok: Json, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    one, two, out = stream_name(), stream_name(), tmp_path / "out.jsonl"
    out.write_text(
        json.dumps({"seq": 4, "time": "t", "subject": f"{one}.a", "headers": {"X": ["1", "2"]}, "data": "d"}) + "\n"
    )
    how = ("ingest", out, "--stream", two, "--create", f"{two}.>", "--again")
    ok(*how, "--subject", f"{two}.{{seq}}")
    ok(*how, "--subject", f"{two}.b", "--data-from", "time")
    ok(*how, "--subject", f"{two}.c", "--no-restore")
    assert own(server.url, two) == [
        (f"{two}.4", b"d", [("X", "1"), ("X", "2")]),
        (f"{two}.b", b"t", [("X", "1"), ("X", "2")]),
        (f"{two}.c", out.read_bytes().strip(), []),
    ]


def test_bytes_that_are_not_utf_8_are_refused(
    server: NatsServer,
    run: Run,
    ok: Json,
    tmp_path: Path,
    stream_name: Callable[[], str],
    publish_raw: Callable[..., None],
) -> None:
    instead = "; export other messages with --subject or --start-seq, and read this one with DirectGet\n"
    for column in ("subject", "headers"):
        stream = stream_name()
        fill(server.url, stream, [])
        fine = f"{stream}.\ufffd".encode()
        publish_raw(server, [(fine, b"fine")] * 1500, block=block("X: \ufffd"))
        if column == "subject":
            publish_raw(server, [(stream.encode() + b".\xff", b"x")])
        else:
            publish_raw(server, [(stream.encode(), b"x")], block=block("X: 1").replace(b"1", b"\xff"))
        publish_raw(server, [(stream.encode(), b"fine")])
        for suffix in ("csv", "jsonl", "parquet"):
            out = tmp_path / f"out.{suffix}"
            done = run("export", stream, out)
            lost = (
                f"message 1501 of stream '{stream}' does not fit column '{column}', which is "
                if suffix == "parquet"
                else f"message 1501 of stream '{stream}': column '{column}' would lose bytes that are not UTF-8"
            )
            assert_fails(done, f"Error: {lost}", instead)
            assert list(tmp_path.iterdir()) == []
            # As the message says:
            assert ok("export", stream, out, "--start-seq", 1502)["messages"] == 1
            assert ok("export", stream, out, "--overwrite", "--subject", fine.decode())["messages"] == 1500
            out.unlink()


def test_lines_that_are_no_headers_are_refused(
    run: Run, ok: Json, tmp_path: Path, publish_raw: Callable[..., None]
) -> None:
    status, fine = "NATS/1.0 408 Request Timeout", [(b"s", b"fine")]
    with NatsServer(version="2.11.10") as server:  # newer ones store no status
        with_js(server.url, lambda js: js.add_stream(name="S", subjects=["s"], allow_direct=True))
        publish_raw(server, fine)
        publish_raw(server, fine, block=block())
        publish_raw(server, fine, block=block("X: 1", "Nats-Sequence: 7", ": of no name"))
        for suffix in ("csv", "jsonl", "parquet"):
            assert ok("export", "S", tmp_path / f"fine.{suffix}", url=server.url)["messages"] == 3
            (tmp_path / f"fine.{suffix}").unlink()
        refused = (
            ([status, "X: 1"], status),
            ([status], status),
            (["NATS/1.0", "X: 1", "no colon"], "no colon"),
            (["NATS/1.0", "X: 1", "X: 2", "no colon", "Y: 1"], "no colon"),
            (["NATS/1.0", "no colon"], "no colon"),
        )
        for lines, _ in refused:
            publish_raw(server, fine, block="".join(f"{line}\r\n" for line in (*lines, "")).encode())
        for suffix in ("csv", "jsonl", "parquet"):
            for seq, (_, lost) in enumerate(refused, 4):
                out = tmp_path / f"{seq}.{suffix}"
                done = run("export", "S", out, "--start-seq", seq, url=server.url)
                words = (
                    f"message {seq} of stream 'S': column 'headers' would lose the line '{lost}', which is no header; "
                )
                assert_fails(done, f"Error: {words}", "export other messages with --subject or --start-seq, and ")
                assert list(tmp_path.iterdir()) == []


def test_a_header_without_a_name_is_exported_and_refused_by_ingest(
    server: NatsServer, run: Run, ok: Json, tmp_path: Path, stream_name: Callable[[], str], publish_raw: Any
) -> None:
    stream = stream_name()
    fill(server.url, stream, [])
    publish_raw(server, [(f"{stream}.a".encode(), b"x")], block=block(": of no name"))
    for suffix in ("csv", "jsonl", "parquet"):
        out = tmp_path / f"out.{suffix}"
        ok("export", stream, out)
        assert_fails(run("ingest", out, "--stream", stream), "row 1", "header name ''")


def test_numbers_that_json_cannot_express_are_refused_by_row_and_column(
    server: NatsServer, run: Run, ok: Json, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, rows = stream_name(), tmp_path / "rows.parquet"
    how = ("ingest", rows, "--stream", stream, "--subject", stream, "--create", stream)
    for value, shown in (
        (pa.array([1.5, float("inf")]), "inf"),
        (pa.array([1.5, float("nan")], pa.float32()), "nan"),
        (pa.array([[1.5], [float("-inf")]]), "-inf"),
        (pa.array([{"a": None}, {"a": [float("nan")]}]), "nan"),
    ):
        pq.write_table(pa.table({"n": pa.array([None, 1]), "x": value}), rows)
        for column in ((), ("--data-from", "x")):
            words = f"row 2: column 'x' has {shown}, which JSON cannot express; --non-finite null stores null; "
            assert_fails(run(*how, "--again", *column), words)
        ok(*how, "--non-finite", "null", "--again")
        assert b"null" in payloads(server.url, stream)[-1]


def test_values_of_every_arrow_type_become_json_without_loss(
    server: NatsServer, ok: Json, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, rows = stream_name(), tmp_path / "rows.parquet"
    berlin, nanos = pa.timestamp("ms", tz="Europe/Berlin"), 1_600_000_000_123_456_789
    columns: dict[str, tuple[Any, object]] = {
        "decimal": (pa.array([Decimal("1.10")]), "1.10"),
        "uint64": (pa.array([2**64 - 1], pa.uint64()), 2**64 - 1),
        "date": (pa.array([date(2020, 1, 2)]), "2020-01-02"),
        "time": (pa.array([1], pa.time64("us")), "00:00:00.000001"),
        "time in nanoseconds": (pa.array([1], pa.time64("ns")), "00:00:00.000000001"),
        "zone": (pa.array([datetime(2020, 7, 1, tzinfo=UTC)], berlin), "2020-07-01T02:00:00+02:00"),
        "UTC": (pa.array([nanos], pa.timestamp("ns", tz="UTC")), "2020-09-13T12:26:40.123456789Z"),
        "here": (pa.array([nanos], pa.timestamp("ns", tz="-05:30")), "2020-09-13T06:56:40.123456789-05:30"),
        "duration": (pa.array([timedelta(days=1, microseconds=-1)]), "PT86399.999999S"),
        "nanos": (pa.array([-1_500_000_001], pa.duration("ns")), "-PT1.500000001S"),
        "durations": (pa.array([[timedelta(seconds=90)]]), ["PT90S"]),
        "times": (pa.array([[1]], pa.list_(pa.timestamp("ns"))), ["1970-01-01T00:00:00.000000001"]),
        "struct": (pa.array([{"a": [b"\xff"], "b": None}]), {"a": ["/w=="], "b": None}),
        "map": (pa.array([[(1, "x")]], pa.map_(pa.int64(), pa.string())), [[1, "x"]]),
        "empty map": (pa.array([[]], TEXTS), {}),
        "map in a struct": (
            pa.array([{"m": [("k", "v")], "n": []}], pa.struct({"m": TEXTS, "n": TEXTS})),
            {"m": {"k": "v"}, "n": {}},
        ),
        "maps in a list": (pa.array([[[("k", "v")], [], None]], pa.list_(TEXTS)), [{"k": "v"}, {}, None]),
        "map in a map": (pa.array([[("a", [("k", "v")])]], pa.map_(pa.string(), TEXTS)), {"a": {"k": "v"}}),
        "map in a map of numbers": (pa.array([[(1, [("k", "v")])]], pa.map_(pa.int64(), TEXTS)), [[1, {"k": "v"}]]),
        "twice in a struct": (
            pa.array([{"m": [("k", "v"), ("k", "w")]}], pa.struct({"m": TEXTS})),
            {"m": [["k", "v"], ["k", "w"]]},
        ),
        "twice": (pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64())), [["a", 1], ["a", 2]]),
        "dictionary": (pa.array(["x"]).dictionary_encode(), "x"),
        "large": (pa.array([b"\x00"], pa.large_binary()), "AA=="),
        "text": (pa.array(["\u00e9"], pa.large_string()), "\u00e9"),
        "null": (pa.nulls(1), None),
        "float": (pa.array([0.1]), 0.1),
    }
    table = pa.table({name: array for name, (array, _) in columns.items()})
    missing = pa.table({name: pa.nulls(1, array.type) for name, (array, _) in columns.items()})
    pq.write_table(pa.concat_tables([table, missing]), rows)
    ok("ingest", rows, "--stream", stream, "--subject", f"{stream}.a", "--create", f"{stream}.>")
    assert [json.loads(data) for data in payloads(server.url, stream)] == [
        {name: value for name, (_, value) in columns.items()},
        dict.fromkeys(columns),
    ]


def test_maps_of_which_some_are_empty_survive_ingest_and_export_of_rows(
    ok: Json, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, rows, out = stream_name(), tmp_path / "rows.parquet", tmp_path / "out.parquet"
    pq.write_table(pa.table({"tags": pa.array([[("k", "v")], []], TEXTS)}), rows)
    ok("ingest", rows, "--stream", stream, "--subject", f"{stream}.a", "--create", f"{stream}.>")
    ok("export", stream, out, "--rows")
    assert pq.read_table(out).to_pylist() == [{"tags": {"k": "v"}}, {"tags": {"k": None}}]


def test_a_file_with_very_many_columns_is_checked_quickly(ok: Json, tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    names = [f"c{number}" for number in range(100_000)]
    rows.write_text("\n".join([",".join(names), ",".join("1" * len(names))]))
    how = ("ingest", rows, "--stream", "NONE", "--create", "s", "--subject", "s", "--data-from", "c99999", "--dry-run")
    assert ok(*how)["examples"] == [{"subject": "s", "data": "1"}]  # with work for each pair of columns it takes hours


def test_a_column_of_json_lines_is_stored_with_the_digits_of_its_numbers(
    server: NatsServer, run: Run, ok: Json, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, rows = stream_name(), tmp_path / "rows.jsonl"
    rows.write_text('{"d": {"id": 12345678901234567890123, "price": 1.10}}\n{"d": 1.0e2}\n')
    ok("ingest", rows, "--stream", stream, "--subject", f"{stream}.a", "--data-from", "d", "--create", f"{stream}.>")
    assert payloads(server.url, stream) == [
        b'{"id":12345678901234567890123,"price":1.10}',
        b"1.0e2",
    ]
    for value, words in (('{"a":1,"a":2}', "the key 'a' is there twice"), ("[" * 300 + "]" * 300, "ecursion limit")):
        rows.write_text(f'{{"d": {value}}}\n')
        done = run("ingest", rows, "--stream", stream, "--subject", f"{stream}.a", "--data-from", "d", "--again")
        assert (done.exit_code, done.stderr.count("\n"), words in done.stderr) == (1, 1, True), done.output


def test_every_field_of_a_csv_file_is_stored_as_it_is(
    server: NatsServer, ok: Json, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, rows = stream_name(), tmp_path / "rows.csv"
    fields = ["", " x ", "\r", "a\rb", "a\r\nb", '"', "\0", "null", "1.10", "\ufeff", "x" * 200_000, "=1"]
    with rows.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([["a", "\u00e9 b"], *([field, "y"] for field in fields)])
    ok("ingest", rows, "--stream", stream, "--subject", f"{stream}.a", "--create", f"{stream}.>")
    assert [json.loads(data) for data in payloads(server.url, stream)] == [
        {"a": field, "\u00e9 b": "y"} for field in fields
    ]


def test_compressed_files_have_the_rows_of_the_others(
    server: NatsServer, run: Run, ok: Json, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, content = stream_name(), [b"%d" % n for n in range(1_000)]
    fill(server.url, stream, content)
    for suffix in ("csv.gz", "jsonl.zst", "tsv.zst", "ndjson.gz"):
        out, plain, copy = tmp_path / f"out.{suffix}", tmp_path / f"plain.{suffix.partition('.')[0]}", stream_name()
        ok("export", stream, out)
        ok("export", stream, plain)
        assert sorted(path.name for path in tmp_path.glob("*.*")) == sorted([out.name, plain.name])
        if suffix.endswith("gz"):
            assert gzip.decompress(out.read_bytes()) == plain.read_bytes()
        ok("ingest", out, "--stream", copy, "--subject", copy, "--create", copy)
        assert payloads(server.url, copy) == content, suffix
        out.write_bytes(out.read_bytes()[:-20])
        assert_fails(run("ingest", out, "--stream", copy, "--subject", copy), f"{out} is damaged")
        out.unlink()
        plain.unlink()


def test_files_in_other_encodings_are_ingested(
    server: NatsServer, run: Run, ok: Json, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    for encoding in ("latin-1", "utf-16", "utf-16-le", "cp037", "shift_jis"):
        stream, rows = stream_name(), tmp_path / f"{encoding}.csv"
        texts = ["\u30a2\n\u30bd" if encoding == "shift_jis" else "\u00e9\u00fc\r\n", "a"]
        with rows.open("w", encoding=encoding, newline="") as file:
            csv.writer(file, delimiter=";").writerows([["n"], *([text] for text in texts)])
        how = ("ingest", rows, "--stream", stream, "--subject", stream, "--create", stream, "--delimiter", ";")
        done = run(*how)
        assert done.exit_code == 1
        if encoding != "utf-16-le":  # its NULs are characters of UTF-8
            assert "line 2: the text is not UTF-8; give its --encoding" in done.stderr.replace("line 1", "line 2")
        ok(*how, "--encoding", encoding)
        assert [json.loads(data) for data in payloads(server.url, stream)] == [{"n": text} for text in texts], encoding
        done = run(*how, "--encoding", "latin-2000")
        assert (done.exit_code, "--encoding 'latin-2000' is not known" in done.stderr) == (2, True)


def test_files_and_options_that_do_not_fit_are_refused(
    run: Run, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    no_delimiter = "--delimiter is 'tab' or one ASCII character, no letter, digit or quote"
    headers = "the headers (--headers-from); the columns are 'a', 'a'"
    stream, failures = stream_name(), []
    for name, options, status, words in (
        ("x.parquet", ("--encoding", "latin-1"), 2, "--encoding is for CSV and JSON lines, not for parquet"),
        ("x.parquet", ("--delimiter", ";"), 2, "--delimiter is for CSV, not for parquet"),
        ("x.csv", ("--encoding", "punycode"), 1, "the text is not in the encoding punycode"),
        ("x.csv", ("--delimiter", "ab"), 2, no_delimiter),
        ("x.csv", ("--delimiter", "a"), 2, no_delimiter),
        ("x.parquet.gz", (), 1, "Parquet files are compressed inside; leave out .gz"),
        ("x.csv.gz", (), 1, "x.csv.gz is damaged: "),
        ("x.csv.zst", (), 1, "x.csv.zst is damaged: "),
        ("x.gz", (), 1, "the name has no known suffix"),
        ("x.parquet", (), 1, "x.parquet: there are two columns 'a'"),
        ("x.parquet", ("--headers-from", "h"), 1, f"x.parquet: there is no column 'h' for {headers}"),
        ("x.csv", ("--skip", str(2**63)), 2, "'--skip'"),
    ):
        rows = tmp_path / name
        pq.write_table(pa.table([[1], [2]], names=["a", "a"]), rows)
        done = run("ingest", rows, "--stream", stream, "--subject", stream, "--create", stream, *options)
        if (done.exit_code, words in done.stderr) != (status, True):
            failures.append(f"{name} {options}: {done.output}")
    assert not failures, "\n".join(failures)


def test_what_zstd_and_parquet_need_is_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetstream_ext.cli.files.formats.importlib.util.find_spec", lambda _: None)
    for name, what in (("x.csv.zst", "zstd"), ("x.parquet", "Parquet")):
        done = run("export", "S", tmp_path / name)
        assert done.stderr == f"Error: {what} needs pyarrow: pip install 'nats-jetstream-ext[arrow]'\n"
