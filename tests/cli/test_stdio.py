"""ingest - and export - read from stdin and write to stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_tools import Json, Run, with_js

import jetstream_ext as jsx
from jetstream_ext.cli import export
from jetstream_ext.cli.__main__ import cli
from jetstream_ext.testing import NatsServer


def fill(url: str, stream: str, payloads: list[bytes]) -> None:
    config: Any = {"subjects": [f"{stream}.>"], "allow_direct": True, "allow_atomic": True, "allow_batched": True}
    with_js(url, lambda js: jsx.ensure_stream(js, name=stream, **config))
    with_js(url, lambda js: jsx.publish_atomic(js, [(f"{stream}.a", payload) for payload in payloads]))


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("rows", [(), ("--rows",)], ids=["messages", "rows"])
def test_stdout_gets_what_a_file_gets_and_stdin_takes_it_back(
    server: NatsServer,
    run: Run,
    ok: Json,
    tmp_path: Path,
    stream_name: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    rows: tuple[str, ...],
) -> None:
    monkeypatch.setattr(export, "_BLOCK", 4)
    stream, out = stream_name(), tmp_path / "out"
    fill(server.url, stream, [b'{"n":%d}' % n for n in range(10)])
    ok("export", stream, out, "--format", form, *rows)
    done = run("export", stream, "-", "--format", form, *rows)
    assert (done.exit_code, done.stdout_bytes) == (0, out.read_bytes())
    assert done.stderr.startswith("wrote 10 messages up to sequence 10 to stdout (")
    reported = json.loads(run("export", stream, "-", "--format", form, *rows, "--json").stderr)
    assert (reported["file"], reported["messages"], reported["bytes"]) == ("-", 10, out.stat().st_size)
    with_js(server.url, lambda js: js.purge_stream(stream))
    how = ("ingest", "-", "--format", form, "--stream", stream, "--subject", f"{stream}.a")
    again = run(*how, stdin=out.read_bytes())
    assert again.stdout.startswith(f"10 rows of stdin are in {stream}: 10 sent ("), again.output
    assert f"{stream}: 10 already stored, 0 sent" in run(*how, stdin=out.read_bytes()).stdout
    assert list(tmp_path.iterdir()) == [out]


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", "S", "-"], "- needs --format csv|jsonl|parquet"),
        (["ingest", "-", "--stream", "S"], "- needs --format csv|jsonl|parquet"),
        (["export", "S", "-", "--format", "csv", "--resume"], "--resume and --overwrite are for files, not for -"),
        (["export", "S", "-", "--format", "csv", "--start-seq", str(2**64)], "'--start-seq'"),
    ],
)
def test_wrong_usage_of_stdin_and_stdout(run: Run, arguments: list[str], words: str) -> None:
    done = run(*arguments)
    assert (done.exit_code, words in done.stderr) == (2, True)


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
    assert (done.exit_code, done.stderr.count("\n"), "stdin is not a valid Parquet file" in done.stderr) == (1, 1, True)


@pytest.mark.parametrize("name", ["stdin", "stdout"])
def test_a_closed_stdin_or_stdout_is_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = {"stdin": ["ingest", "-", "--stream", "S"], "stdout": ["export", "S", "-"]}[name]
    monkeypatch.setattr(sys, name, None)
    with pytest.raises(click.ClickException, match=f"{name} is closed"):
        cli.main([*command, "--format", "csv"], standalone_mode=False)


def test_an_export_replaces_no_pipe_or_device(run: Run, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe.csv")
    done = run("export", "S", pipe, "--overwrite")
    assert (done.exit_code, "pipe.csv is not a regular file; - with --format" in done.stderr) == (1, True)
    assert pipe.is_fifo()
