"""ingest and export keep every row, and continue after Ctrl-C, a malformed row or a full disk."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import nats
import nats.js.errors
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_tools import Json, Run, with_js
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext.testing import NatsServer

NAMES = ("Ann", 'Bo "B" Box', "Cä\nCé")


def fill(server: NatsServer, stream: str, count: int, data: bytes = b"x") -> None:
    async def publish() -> None:
        nc = await nats.connect(server.url, connect_timeout=10)
        try:
            js = nc.jetstream()
            await js.add_stream(name=stream, subjects=[f"{stream}.>"], allow_direct=True, allow_batched=True)
            async with jsx.FastPublisher(js) as publisher:
                await publisher.add_many((f"{stream}.{n % 3}", data) for n in range(count))
        finally:
            await nc.close()

    asyncio.run(publish())


def write_rows(path: Path, stream: str, count: int = 3) -> None:
    rows = [{"to": f"{stream}.{n % 2}", "name": NAMES[n % 3], "n": str(n)} for n in range(count)]
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_ingest_export_and_ingest_again_keep_every_row(
    ok: Json, run: Run, tmp_path: Path, stream_name: Callable[[], str], suffix: str
) -> None:
    one, two = stream_name(), stream_name()
    rows, out = tmp_path / f"rows.{suffix}", tmp_path / f"out.{suffix}"
    write_rows(rows, one)
    said = ok("ingest", rows, "--stream", one, "--subject-from", "to", "--create", f"{one}.>")
    assert (said["rows"], said["sent"], said["complete"]) == (3, 3, True)

    done = ok("export", one, out)
    assert (done["messages"], done["last_seq"], done["bytes"]) == (3, 3, out.stat().st_size)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [out.name, rows.name]

    # An exported file can be ingested.
    ok("ingest", out, "--stream", two, "--subject", f"{two}.{{seq}}", "--data-from", "data", "--create", f"{two}.>")
    again = tmp_path / "again.jsonl"
    ok("export", two, again, "--subject", f"{two}.2")
    [line] = again.read_text().splitlines()
    assert json.loads(json.loads(line)["data"]) == {"to": f"{one}.1", "name": NAMES[1], "n": "1"}


def test_ingest_takes_the_subject_from_the_column_subject(
    ok: Json, run: Run, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, rows = stream_name(), tmp_path / "rows.csv"
    rows.write_text(f"subject,n\n{stream}.a,1\n{stream}.b,2\n")
    assert ok("ingest", rows, "--stream", stream, "--create", f"{stream}.>")["rows"] == 2
    rows.write_text("n\n1\n")
    done = run("ingest", rows, "--stream", stream)
    assert (done.exit_code, "column 'subject'" in done.stderr) == (1, True)
    assert run("ingest", rows, "--stream", stream, "--subject", "a", "--subject-from", "n").exit_code == 2


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_binary_payloads_are_exported_as_base64_and_ingested_as_bytes(
    server: NatsServer, ok: Json, tmp_path: Path, stream_name: Callable[[], str], suffix: str
) -> None:
    one, two = stream_name(), stream_name()
    fill(server, one, 1, b"\xff\x00")
    out = tmp_path / f"out.{suffix}"
    ok("export", one, out)
    ok("ingest", out, "--stream", two, "--subject", two, "--data-from", "data", "--create", two)
    ok("export", two, tmp_path / "again.jsonl")
    assert json.loads((tmp_path / "again.jsonl").read_text())["data_base64"] == "/wA="


def test_a_resumed_ingest_continues_after_the_stored_rows(
    ok: Json, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, rows = stream_name(), tmp_path / "rows.csv"
    write_rows(rows, stream, 100)
    how = ("ingest", rows, "--stream", stream, "--subject-from", "to", "--create", f"{stream}.>")
    assert ok(*how, "--skip", 40)["sent"] == 60
    again = ok(*how, "--resume")
    assert (again["rows"], again["skipped"], again["already_stored"], again["sent"]) == (100, 0, 60, 40)


def test_a_malformed_row_is_reported_and_all_rows_before_it_are_stored(
    run: Run, ok: Json, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, rows = stream_name(), tmp_path / "rows.jsonl"
    rows.write_text(f'{{"to": "{stream}.a"}}\n{{"to": "{stream}.b"}}\n{{"other": 1}}\n{{"to": "{stream}.c"}}\n')
    how = ("ingest", rows, "--stream", stream, "--subject-from", "to")
    done = run(*how, "--create", f"{stream}.>")
    assert done.exit_code == 1
    assert "row 3: there is no column 'to' for the subject" in done.stderr
    assert "2 rows before it are stored" in done.stderr
    rows.write_text(f'{{"to": "{stream}.a"}}\n{{"to": "elsewhere"}}\n')
    done = run(*how, "--again")
    assert done.exit_code == 1
    assert f"{rows}, row 2: stream '{stream}' does not store its subject 'elsewhere'" in done.stderr
    assert ok("export", stream, tmp_path / "out.csv")["messages"] == 3


def test_an_export_stopped_with_ctrl_c_can_be_resumed(
    server: NatsServer,
    process: Callable[..., subprocess.Popen[str]],
    ok: Json,
    run: Run,
    tmp_path: Path,
    stream_name: Callable[[], str],
) -> None:
    stream, out = stream_name(), tmp_path / "out.csv"
    fill(server, stream, 100_000)
    part = tmp_path / "out.csv.part"
    with process("export", stream, out) as exporting:
        end = time.monotonic() + 60
        while not (part.exists() and part.stat().st_size > 100_000) and time.monotonic() < end:
            time.sleep(0.005)
        exporting.send_signal(signal.SIGINT)
        _, said = exporting.communicate(timeout=60)
    assert exporting.returncode == 130
    assert "--resume continues" in said
    stored = json.loads((tmp_path / "out.csv.part.json").read_text())["messages"]
    assert 0 < stored < 100_000
    assert f"{stored:,} messages" in said
    assert "--resume continues" in run("export", stream, out).stderr
    assert ok("export", stream, out, "--resume")["messages"] == 100_000
    with out.open(newline="", encoding="utf-8") as file:
        assert [int(row["seq"]) for row in csv.DictReader(file)] == list(range(1, 100_001))


def test_an_ingest_stopped_with_ctrl_c_ends_at_a_known_row(
    server: NatsServer,
    process: Callable[..., subprocess.Popen[str]],
    ok: Json,
    tmp_path: Path,
    stream_name: Callable[[], str],
) -> None:
    stream, rows = stream_name(), tmp_path / "rows.csv"
    write_rows(rows, stream, 100_000)
    how = ("ingest", rows, "--stream", stream, "--subject-from", "to", "--create", f"{stream}.>")

    async def begun(js: JetStreamContext) -> None:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(nats.js.errors.NotFoundError):
                    await js.stream_info(stream)
                    return
                await asyncio.sleep(0.005)

    with process(*how) as ingesting:
        with_js(server.url, begun)
        ingesting.send_signal(signal.SIGINT)
        _, said = ingesting.communicate(timeout=60)
    assert ingesting.returncode == 130
    assert "stopped" in said
    done = ok(*how, "--resume")
    assert done["rows"] == 100_000
    if "exactly" in said:
        assert f"exactly {done['already_stored']:,} row" in said
    out = tmp_path / "out.jsonl"
    assert ok("export", stream, out)["messages"] == 100_000


def test_an_export_to_a_full_disk_can_be_resumed(
    server: NatsServer, ok: Json, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, out = stream_name(), tmp_path / "out.jsonl"
    fill(server, stream, 5_000)
    limit = 200_000
    done = subprocess.run(
        [sys.executable, "-m", "jetstream_ext.cli", "export", stream, out, "--server", server.url],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "File too large" in done.stderr
    assert "--resume continues" in done.stderr
    assert ok("export", stream, out, "--resume")["messages"] == 5_000
    assert [json.loads(line)["seq"] for line in out.read_text().splitlines()] == list(range(1, 5_001))


def test_export_writes_an_empty_stream_and_keeps_an_existing_file(
    server: NatsServer, ok: Json, run: Run, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, out = stream_name(), tmp_path / "out.parquet"
    fill(server, stream, 0)
    assert ok("export", stream, out)["messages"] == 0
    assert pq.read_table(out).num_rows == 0
    assert "--overwrite" in run("export", stream, out).stderr
    ok("export", stream, out, "--overwrite")
    done = run("export", stream, tmp_path / "out.xml")
    assert (done.exit_code, "--format" in done.stderr) == (1, True)
