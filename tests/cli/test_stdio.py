"""ingest - and export - read from stdin and write to stdout."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_tools import Json, Run, assert_fails, assert_usage, fill

from jetstream_ext.cli import export
from jetstream_ext.cli.__main__ import cli
from jetstream_ext.testing import NatsServer


@pytest.mark.parametrize("rows", [(), ("--rows",)], ids=["messages", "rows"])
def test_stdout_gets_what_a_file_gets_and_stdin_takes_it_back(
    server: NatsServer,
    run: Run,
    ok: Json,
    tmp_path: Path,
    stream_name: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
    rows: tuple[str, ...],
) -> None:
    monkeypatch.setattr(export, "_BLOCK", 4)
    stream = stream_name()
    fill(server.url, stream, (b'{"n":%d}' % n for n in range(10)))
    for form in ("csv", "jsonl", "parquet"):
        out, copy = tmp_path / form, stream_name()
        ok("export", stream, out, "--format", form, *rows)
        done = run("export", stream, "-", "--format", form, *rows)
        assert (done.exit_code, done.stdout_bytes) == (0, out.read_bytes()), form
        assert done.stderr.startswith("wrote 10 messages up to sequence 10 to stdout (")
        reported = json.loads(run("export", stream, "-", "--format", form, *rows, "--json").stderr)
        assert (reported["file"], reported["messages"], reported["bytes"]) == ("-", 10, out.stat().st_size)
        how = ("ingest", "-", "--format", form, "--stream", copy, "--subject", copy, "--create", copy)
        again = run(*how, stdin=out.read_bytes())
        assert again.stdout.startswith(f"10 rows of stdin are in {copy}: 10 sent ("), again.output
        assert f"{copy}: 10 already stored, 0 sent" in run(*how, stdin=out.read_bytes()).stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["csv", "jsonl", "parquet"]


def test_other_content_of_stdin_is_sent_and_with_resume_without_its_stored_rows(
    server: NatsServer, ok: Json, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream = stream_name()
    how = ("ingest", "-", "--format", "csv", "--stream", stream, "--subject", stream, "--create", stream)
    counts = [
        ok(*how, *options, stdin=stdin)
        for stdin, options in ((b"n\n1\n2\n", ()), (b"n\n2\n3\n", ()), (b"n\n1\n3\n4\n", ("--resume",)))
    ]
    assert [(done["file"], done["already_stored"], done["sent"]) for done in counts] == [
        ("-", 0, 2),
        ("-", 0, 2),
        ("-", 2, 1),
    ]


def test_wrong_usage_of_stdin_and_stdout(run: Run) -> None:
    for arguments, words in (
        (["export", "S", "-"], "- needs --format csv|jsonl|parquet"),
        (["ingest", "-", "--stream", "S"], "- needs --format csv|jsonl|parquet"),
        (["export", "S", "-", "--format", "csv", "--resume"], "--resume and --overwrite are for files, not for -"),
        (["export", "S", "-", "--format", "csv", "--start-seq", str(2**64)], "'--start-seq'"),
    ):
        assert_usage(run(*arguments), words)


def test_a_bad_row_of_stdin_is_named(run: Run, stream_name: Callable[[], str]) -> None:
    stream = stream_name()
    how = ("ingest", "-", "--format", "jsonl", "--stream", stream, "--subject", stream, "--create", stream)
    done = run(*how, stdin=b'{"n":1}\n[]\n')
    assert done.stderr.startswith("Error: stdin, line 2: the line is not a JSON object; the 1 row before it is stored;")


def test_a_closed_pipe_ends_an_export_silently(
    server: NatsServer, process: Callable[..., subprocess.Popen[str]], stream_name: Callable[[], str]
) -> None:
    stream = stream_name()
    fill(server.url, stream, [b"x" * 500] * 900)
    with process("export", stream, "-", "--format", "jsonl") as exporting:
        assert exporting.stdout is not None
        assert exporting.stderr is not None
        assert json.loads(exporting.stdout.readline())["seq"] == 1
        exporting.stdout.close()
        assert (exporting.stderr.read(), exporting.wait(30)) == ("", 1)


def test_a_parquet_file_from_stdin_may_not_be_one(run: Run, tmp_path: Path) -> None:
    table = tmp_path / "x.parquet"
    pq.write_table(pa.table({"a": [1]}), table)
    done = run("ingest", "-", "--format", "parquet", "--stream", "S", "--subject", "S", stdin=table.read_bytes()[:-9])
    assert_fails(done, "stdin is not a valid Parquet file")


@pytest.mark.parametrize("name", ["stdin", "stdout"])
def test_a_closed_stdin_or_stdout_is_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = {"stdin": ["ingest", "-", "--stream", "S"], "stdout": ["export", "S", "-"]}[name]
    monkeypatch.setattr(sys, name, None)
    with pytest.raises(click.ClickException, match=f"{name} is closed"):
        cli.main([*command, "--format", "csv"], standalone_mode=False)
