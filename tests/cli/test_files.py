"""ingest and export are exact, and continue after Ctrl-C, a kill of client or server, a malformed row or a full disk."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import nats.js.errors
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_tools import Json, Run, assert_fails, fill, payloads, with_js
from nats.js import JetStreamContext

from jetstream_ext.cli import export
from jetstream_ext.cli.files import formats
from jetstream_ext.testing import NatsServer, ReferenceServer
from jetstream_ext.testing.reference import Faults, Ignore

Start = Callable[..., "subprocess.Popen[str]"]
PATIENCE = 60  # seconds


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("out*"))


# -- unfinished exports ------------------------------------------------------------------------------------------------


@pytest.fixture
def blocking() -> Iterator[ReferenceServer]:
    """A server that does not answer the second request of an export, and all others; it has 5,000 messages."""
    with ReferenceServer(faults=Faults(Ignore("$JS.API.DIRECT.GET.>", nth=2, times=1))) as server:
        fill(server.url, "S", (b"%d" % n for n in range(5_000)))
        yield server


def wait_for_content(running: subprocess.Popen[str], part: Path) -> None:
    """Wait until messages are in the unfinished file."""
    end = time.monotonic() + PATIENCE
    while not (part.exists() and part.stat().st_size > 10_000):
        assert time.monotonic() < end, "export did not start to write"
        assert running.poll() is None, "export has ended"
        time.sleep(0.01)


def test_an_export_stopped_with_ctrl_c_can_be_resumed(
    blocking: ReferenceServer, process: Start, ok: Json, run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "out.csv"
    with process("export", "S", out, "--timeout", f"{PATIENCE}s", url=blocking.url) as exporting:
        wait_for_content(exporting, tmp_path / "out.csv.part")
        exporting.send_signal(signal.SIGINT)
        _, said = exporting.communicate(timeout=PATIENCE)
    assert exporting.returncode == 130
    stored = json.loads((tmp_path / "out.csv.part.json").read_text())["messages"]
    assert 0 < stored < 5_000
    assert f"stopped: {stored:,} messages up to sequence {stored:,} of 5,000 are in {out}.part; " in said
    assert_fails(run("export", "S", out, url=blocking.url), "--resume continues it, --overwrite starts again")
    assert ok("export", "S", out, "--resume", url=blocking.url)["messages"] == 5_000
    with out.open(newline="", encoding="utf-8") as file:
        assert [int(row["seq"]) for row in csv.DictReader(file)] == list(range(1, 5_001))
    assert files_of(tmp_path) == ["out.csv"]


def test_a_parquet_export_that_was_killed_continues_after_its_journal(
    blocking: ReferenceServer, process: Start, ok: Json, tmp_path: Path
) -> None:
    out, part = tmp_path / "out.parquet", tmp_path / "out.parquet.part"
    with process("export", "S", out, "--timeout", f"{PATIENCE}s", url=blocking.url) as exporting:
        wait_for_content(exporting, part)
        exporting.kill()
    with part.open("r+b") as file:  # what reached the disk after the journal may be anything
        file.seek(json.loads(Path(f"{part}.json").read_bytes())["size"])
        file.write(b"\xff" * 1000)
    assert ok("export", "S", out, "--resume", url=blocking.url)["messages"] == 5_000
    table = pq.read_table(out)
    assert table["seq"].to_pylist() == list(range(1, 5_001))
    assert table["data"].to_pylist() == [b"%d" % n for n in range(5_000)]
    assert files_of(tmp_path) == ["out.parquet"]


def test_an_export_of_a_killed_server_can_be_resumed(
    own_server: NatsServer, run: Run, ok: Json, tmp_path: Path
) -> None:
    out, part, count = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part", 60_000
    fill(own_server.url, "S", (b"%d" % n for n in range(count)))
    ended = threading.Event()

    def kill() -> None:
        while not ended.is_set() and not (part.exists() and part.stat().st_size):
            time.sleep(0.0005)
        own_server.pause()  # at once, so that the export cannot end before the kill
        own_server.kill()

    killing = threading.Thread(target=kill)
    killing.start()
    try:
        done = run("export", "S", out, url=own_server.url)
    finally:
        ended.set()
        killing.join()
    own_server.restart()
    assert not out.exists(), "the export has ended before the server was killed"
    assert_fails(done, "the same command with --resume continues")
    stored = json.loads((tmp_path / "out.jsonl.part.json").read_text())["messages"]
    assert 0 < stored < count
    assert f"; {stored:,} message" in done.stderr
    assert ok("export", "S", out, "--resume", url=own_server.url)["messages"] == count
    assert [json.loads(line)["data"] for line in out.read_text().splitlines()] == [str(n) for n in range(count)]


def test_an_export_stopped_while_it_writes_parquet_can_be_resumed(
    server: NatsServer, run: Run, ok: Json, tmp_path: Path, stream_name: Callable[[], str], monkeypatch: Any
) -> None:
    stream, out = stream_name(), tmp_path / "out.parquet"
    fill(server.url, stream, (b"%d" % n for n in range(25_000)))  # which are converted in three parts
    with monkeypatch.context() as patch:
        patch.setattr(pq.ParquetWriter, "write_table", Mock(side_effect=KeyboardInterrupt))
        done = run("export", stream, out)
    assert (done.exit_code, done.stdout, "--resume continues" in done.stderr) == (130, "", True)
    assert files_of(tmp_path) == ["out.parquet.part", "out.parquet.part.json"]
    assert ok("export", stream, out, "--resume")["messages"] == 25_000
    assert pq.read_table(out)["data"].to_pylist() == [b"%d" % n for n in range(25_000)]


def test_an_export_to_a_file_that_may_not_grow_can_be_resumed(
    server: NatsServer, ok: Json, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, out = stream_name(), tmp_path / "out.jsonl"
    fill(server.url, stream, [b"x"] * 5_000)
    limit = 200_000
    done = subprocess.run(
        [sys.executable, "-m", "jetstream_ext.cli", "export", stream, out, "--server", server.url],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "File too large" in done.stderr
    assert "--resume continues" in done.stderr
    assert ok("export", stream, out, "--resume")["messages"] == 5_000
    assert [json.loads(line)["seq"] for line in out.read_text().splitlines()] == list(range(1, 5_001))


def tiny_disk(folder: Path, size: str, command: list[object]) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder that is a small disk of its own, for as long as the command runs.

    Afterwards stdout ends with the names of what is on it.
    """
    script = 'mount -t tmpfs -o size="$1" tmpfs "$2" && shift && cd "$1" && shift && { "$@"; code=$?; ls; exit $code; }'
    return subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", size, folder, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_an_export_to_a_full_disk_can_be_resumed(
    server: NatsServer, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    if shutil.which("unshare") is None or tiny_disk(tmp_path, "4k", ["true"]).returncode != 0:
        pytest.skip("no disk can be mounted here: no unprivileged mount namespaces")
    stream = stream_name()
    fill(server.url, stream, (b"%064x" % (n**40 % 2**256) for n in range(10_000)))  # which do not compress to nothing
    # Parquet has room for the unfinished file, but not for the finished one.
    for size, form in (("4k", "csv"), ("1200k", "parquet")):
        exporting = [sys.executable, "-m", "jetstream_ext.cli", "export", stream, f"out.{form}", "--server", server.url]
        done = tiny_disk(tmp_path, size, exporting)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), (size, form, done.stderr)
        assert done.stderr.startswith("Error: No space left on device")
        assert f"out.{form}" not in done.stdout.split()
        if size != "4k":
            assert "the same command with --resume continues" in done.stderr
            assert f"out.{form}.part" in done.stdout.split()


def flip(part: Path, place: int) -> None:
    content = bytearray(part.read_bytes())
    content[place] ^= 1
    part.write_bytes(content)


def change_journal(part: Path, **fields: object) -> None:
    path = Path(f"{part}.json")
    journal = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in journal.items() if value is not None}))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut off": lambda part: os.truncate(part, part.stat().st_size // 2),
    "empty": lambda part: os.truncate(part, 0),
    "missing": lambda part: part.unlink(),
    "a bit at the start": lambda part: flip(part, 5),
    "a bit in the middle": lambda part: flip(part, part.stat().st_size // 2),
    "a bit at the end": lambda part: flip(part, -1),
    "zeros": lambda part: part.write_bytes(bytes(part.stat().st_size)),
    "another file": lambda part: part.write_bytes(b"seq\n" * part.stat().st_size),
    "no journal": lambda part: Path(f"{part}.json").unlink(),
    "an empty journal": lambda part: Path(f"{part}.json").write_bytes(b""),
    "half of a journal": lambda part: os.truncate(f"{part}.json", 40),
    "a list as journal": lambda part: Path(f"{part}.json").write_text("[]"),
    "a journal of other types": lambda part: change_journal(part, size="1"),
    "a journal with a size below 0": lambda part: change_journal(part, size=-1),
    "a journal without a field": lambda part: change_journal(part, seq=None),
    # Such a file of an older version holds JSON lines.
    "a journal of an older version": lambda part: change_journal(part, format="parquet", crc=None),
}


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_a_damaged_unfinished_export_is_reported_and_can_be_started_again(
    server: NatsServer,
    run: Run,
    ok: Json,
    tmp_path: Path,
    stream_name: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
) -> None:
    stream, out = stream_name(), tmp_path / f"out.{suffix}"
    part, journal = tmp_path / f"out.{suffix}.part", tmp_path / f"out.{suffix}.part.json"
    fill(server.url, stream, [b"%0100d" % n for n in range(2_000)])
    with monkeypatch.context() as patch:
        patch.setattr(export._Part, "finish", Mock(side_effect=KeyboardInterrupt))
        done = run("export", stream, out)
    assert (done.exit_code, "--resume continues" in done.stderr) == (130, True)
    whole = {path: path.read_bytes() for path in (part, journal)}
    failures = []
    for damage, do in DAMAGES.items():
        for path, content in whole.items():
            path.write_bytes(content)
        do(part)
        before = {path: path.read_bytes() for path in tmp_path.glob("out*")}
        done = run("export", stream, out, "--resume")
        if (
            (done.exit_code, done.stdout, done.stderr.count("\n"), "--resume" in done.stderr) != (1, "", 1, False)
            or str(part) not in done.stderr
            or "--overwrite discards the export and starts again" not in done.stderr
            or {path: path.read_bytes() for path in tmp_path.glob("out*")} != before
        ):
            failures.append(f"{damage}: {done.output}")
    assert not failures, "\n".join(failures)
    assert ok("export", stream, out, "--overwrite")["messages"] == 2_000
    assert files_of(tmp_path) == [out.name]
    finished = out.read_bytes()
    out.unlink()
    for path, content in whole.items():
        path.write_bytes(content)
    with part.open("ab") as file:  # what follows the journal does not count
        file.write(b"\xff" * 1000)
    assert ok("export", stream, out, "--resume")["messages"] == 2_000
    assert (out.read_bytes(), files_of(tmp_path)) == (finished, [out.name])
    if suffix == "parquet":
        for cut in (8, 10_000, len(whole[part]) - 4):
            check_damaged_while_it_is_converted(run, stream, tmp_path / f"out{cut}.parquet", cut, monkeypatch)


def check_damaged_while_it_is_converted(
    run: Run, stream: str, out: Path, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = export._Part.finish

    def damaged(part: Any) -> None:
        os.truncate(part.path, cut)
        finish(part)

    with monkeypatch.context() as patch:
        patch.setattr(export._Part, "finish", damaged)
        done = run("export", stream, out)
    assert_fails(done, f"{out}.part is damaged", "--overwrite discards the export")
    assert "--resume" not in done.stderr
    assert not out.exists()


# -- where an export writes --------------------------------------------------------------------------------------------


def test_an_export_that_cannot_start_leaves_no_files(
    server: NatsServer, run: Run, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream = stream_name()
    fill(server.url, stream, [b"x"], allow_direct=False)
    done = run("export", stream, tmp_path / "out.csv", "--timeout", "20s")
    assert_fails(done, "direct")
    assert "--resume" not in done.stderr
    assert_fails(run("export", stream, tmp_path / "out.xml"), "the name has no known suffix; give --format")
    assert files_of(tmp_path) == []


def test_export_writes_an_empty_stream_and_keeps_an_existing_file(
    server: NatsServer, ok: Json, run: Run, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, out = stream_name(), tmp_path / "out.parquet"
    fill(server.url, stream, [])
    assert ok("export", stream, out)["messages"] == 0
    assert pq.read_table(out).num_rows == 0
    assert_fails(run("export", stream, out), f"{out} already exists; --overwrite replaces it")
    ok("export", stream, out, "--overwrite")


@pytest.mark.parametrize("suffix", ["jsonl", "csv.gz"])
def test_a_second_export_to_the_same_file_is_refused_and_changes_nothing(
    server: NatsServer,
    run: Run,
    tmp_path: Path,
    stream_name: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
) -> None:
    stream, out = stream_name(), tmp_path / f"out.{suffix}"
    fill(server.url, stream, [b"1", b"2"])
    finish = export._Part.finish

    def second_export(self: Any) -> None:
        before = {path: path.read_bytes() for path in tmp_path.glob("out*")}
        for options in ((), ("--resume",), ("--overwrite",)):
            done = run("export", stream, out, *options)
            assert_fails(done, f"Error: another export writes {out}.part; wait for it, or export to another file\n")
        assert {path: path.read_bytes() for path in tmp_path.glob("out*")} == before
        finish(self)

    monkeypatch.setattr(export._Part, "finish", second_export)
    assert "wrote 2 messages" in run("export", stream, out).stdout
    assert files_of(tmp_path) == [out.name]


def test_an_export_replaces_no_symbolic_link_pipe_or_device(
    server: NatsServer, run: Run, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, target = stream_name(), tmp_path / "target.csv"
    fill(server.url, stream, [b"1"])
    (tmp_path / "out.csv").symlink_to("target.csv")
    os.mkfifo(tmp_path / "pipe.csv")
    for options in ((), ("--overwrite",)):
        done = run("export", stream, tmp_path / "out.csv", *options)
        assert_fails(done, f"{tmp_path / 'out.csv'} is a symbolic link; give the path of its target, {target}\n")
        done = run("export", stream, tmp_path / "pipe.csv", *options)
        assert_fails(done, "pipe.csv is not a regular file; - with --format writes to stdout")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "pipe.csv"]
    target.write_text("kept")
    assert run("export", stream, tmp_path / "out.csv", "--overwrite").exit_code == 1
    assert target.read_text() == "kept"


MAKE: dict[str, Callable[[Path], object]] = {
    "dangling link": lambda path: path.symlink_to("missing"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a file": lambda path: path.symlink_to("target"),
    "directory": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
}


def test_an_export_writes_its_unfinished_file_to_nothing_else(
    server: NatsServer, run: Run, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, target, out = stream_name(), tmp_path / "target", tmp_path / "out.csv.gz"
    fill(server.url, stream, [b"1"])
    target.write_text("kept")
    advice = "remove it, or export to another file\n"
    failures = []
    for suffix in (".part", ".part.json", ".part.json.new", ".new"):
        for kind, make in MAKE.items():
            path = tmp_path / f"{out.name}{suffix}"
            make(path)
            for options in ((), ("--resume",), ("--overwrite",)):
                done = run("export", stream, out, *options)
                words = (
                    f"Error: {path} is a symbolic link, a directory or a pipe; export writes unfinished data there: "
                )
                if (done.exit_code, done.stdout, done.stderr) != (1, "", f"{words}{advice}"):
                    failures.append(f"{suffix} {kind} {options}: {done.output}")
            if sorted(tmp_path.iterdir()) != [path, target] or target.read_text() != "kept":
                failures.append(f"{suffix} {kind}: files have changed")
            path.rmdir() if kind == "directory" else path.unlink()
    assert not failures, "\n".join(failures)
    assert run("export", stream, out).exit_code == 0


def test_a_link_that_takes_the_place_of_an_unfinished_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "out.part").symlink_to("missing")
    with pytest.raises(OSError, match=r"out\.part") as caught, formats.exclusive(tmp_path / "out.part"):
        pass
    assert caught.value.errno == errno.ELOOP


# -- ingest ------------------------------------------------------------------------------------------------------------


def test_ingest_stores_each_row_once_after_kills_of_client_and_server(
    own_server: NatsServer, process: Start, ok: Json, tmp_path: Path
) -> None:
    rows, count = tmp_path / "rows.csv", 100_000
    rows.write_text("n\n" + "".join(f"{n}\n" for n in range(count)))
    how = ("ingest", rows, "--stream", "S", "--subject", "s", "--data-from", "n", "--create", "s")

    def after(more: int, running: subprocess.Popen[str], stop: Callable[[], None]) -> None:
        """Call `stop` when `more` messages were stored, in the same turn: `running` must not end before."""

        async def wait(js: JetStreamContext) -> None:
            before = None
            async with asyncio.timeout(2 * PATIENCE):
                while True:
                    assert running.poll() is None, "ingest has ended"
                    with contextlib.suppress(nats.js.errors.NotFoundError):
                        messages = (await js.stream_info("S")).state.messages
                        before = messages if before is None else before
                        if messages >= before + more:
                            return stop()
                    await asyncio.sleep(0.005)

        with_js(own_server.url, wait)

    with process(*how, url=own_server.url) as killed:
        after(1_000, killed, killed.kill)
    with process(*how, "--json", url=own_server.url) as going_on:
        after(1_000, going_on, own_server.kill)
        assert going_on.poll() is None, "ingest has ended before the server was killed"
        own_server.restart()
        shown, said = going_on.communicate(timeout=2 * PATIENCE)
    assert (going_on.returncode, said) == (0, "")
    done = json.loads(shown)
    assert (done["rows"], done["complete"]) == (count, True)
    assert payloads(own_server.url, "S") == [b"%d" % n for n in range(count)]


def test_an_ingest_stopped_with_ctrl_c_ends_at_a_known_row(
    server: NatsServer, process: Start, ok: Json, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, rows, count = stream_name(), tmp_path / "rows.jsonl", 100_000
    rows.write_text("".join(f'{{"n":{n}}}\n' for n in range(count)))
    how = ("ingest", rows, "--stream", stream, "--subject", stream, "--create", stream)

    async def begun(js: JetStreamContext) -> None:
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(nats.js.errors.NotFoundError):
                    await js.stream_info(stream)
                    return ingesting.send_signal(signal.SIGINT)
                await asyncio.sleep(0.005)

    with process(*how) as ingesting:
        with_js(server.url, begun)
        _, said = ingesting.communicate(timeout=PATIENCE)
    assert (ingesting.returncode, "stopped" in said) == (130, True)
    done = ok(*how)
    assert done["rows"] == count
    said = said.replace("nothing was sent", "exactly 0 rows")
    found = re.search(r"(exactly|at least) ([\d,]+) row", said)
    assert found is not None, said
    known = int(found[2].replace(",", ""))
    assert known == done["already_stored"] if found[1] == "exactly" else known <= done["already_stored"], said
    assert payloads(server.url, stream) == rows.read_bytes().splitlines()


def test_ingest_reports_the_refused_row_and_what_is_stored(
    server: NatsServer, run: Run, ok: Json, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, rows = stream_name(), tmp_path / "rows.csv"
    fill(server.url, stream, [], max_msg_size=200)
    rows.write_text(f"n\n1\n2\n{'x' * 300}\n4\n")
    how = ("ingest", rows, "--stream", stream, "--subject")
    done = run(*how, "nowhere.at.all")
    place = f"Error: {rows}, row 1: stream '{stream}' does not store its subject 'nowhere.at.all'"
    assert_fails(done, f"{place}; nothing is stored\n")
    done = run(*how, stream)
    assert_fails(done, f"Error: row 3 of {rows}: ", "message size exceeds maximum allowed; the 2 rows before it are")
    assert done.stderr.endswith("; correct the row or the options; the command with --resume then sends the rest\n")
    assert "code=" not in done.stderr
    rows.write_text(f"to,n\n{stream},1\n{stream},2\nelsewhere,3\n")
    done = run(*how, "{to}", "--again")
    assert_fails(done, f"Error: {rows}, row 3: stream '{stream}' does not store its subject 'elsewhere'; this run has")
    with_js(server.url, lambda js: js.purge_stream(stream))
    rows.write_text("a\n1\n")
    assert f"1 row of {rows} is in {stream}" in run(*how, stream).stdout
    assert "1 message up to sequence " in run("export", stream, tmp_path / "out.csv").stdout
    rows.write_text("a,b\n1\n")
    with_js(server.url, lambda js: js.purge_stream(stream))
    assert run(*how, stream).stderr.endswith("; nothing is stored\n")


def test_ingest_refuses_repeated_columns_pipes_and_values_that_python_cannot_hold(
    run: Run, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, twice, pipe, beyond = stream_name(), tmp_path / "twice.csv", tmp_path / "p.csv", tmp_path / "x.parquet"
    twice.write_text("to,to\na,b\n")
    os.mkfifo(pipe)
    pq.write_table(pa.table({"t": pa.array([[2**62]], pa.list_(pa.timestamp("us")))}), beyond)
    for path, words in {
        twice: "there are two columns 'to'; nothing is stored",
        pipe: "is not a regular file",
        beyond: f"{beyond}, after row 0: ",
    }.items():
        done = run("ingest", path, "--stream", stream, "--subject", stream, "--create", stream)
        assert_fails(done, words)
