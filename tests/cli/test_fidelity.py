"""ingest and export keep every byte, and report exactly which rows are stored."""

from __future__ import annotations

import asyncio
import csv
import errno
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import nats
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_tools import Json, Run, with_js
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import arrow
from jetstream_ext.cli import export
from jetstream_ext.cli.files import formats
from jetstream_ext.testing import NatsServer

Start = Callable[..., "subprocess.Popen[str]"]
AWKWARD = (b"x\r", b"a\rb", b"a\r\nb", b"\n", b"", b"\x00", b'"', b'a,"b', b" x ", b"\xff", b"x" * 200_000)
DIGITS = '{"to": "%s.a",  "id": 12345678901234567890123, "price": 1.10}'


def fill(url: str, stream: str, payloads: list[bytes]) -> None:
    async def publish(js: JetStreamContext) -> None:
        await js.add_stream(name=stream, subjects=[stream], allow_direct=True, allow_batched=True)
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add_many((stream, payload) for payload in payloads)

    with_js(url, publish)


def payloads(url: str, stream: str) -> list[bytes]:
    async def read(js: JetStreamContext) -> list[bytes]:
        return [message.data for message in await jsx.DirectGet(js, stream).scan().to_list()]

    found: list[bytes] = with_js(url, read)
    return found


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_every_payload_survives_export_and_ingest(
    server: NatsServer, ok: Json, tmp_path: Path, stream_name: Callable[[], str], suffix: str
) -> None:
    one, two, out = stream_name(), stream_name(), tmp_path / f"out.{suffix}"
    fill(server.url, one, list(AWKWARD))
    ok("export", one, out)
    ok("ingest", out, "--stream", two, "--subject", two, "--data-from", "data", "--create", two)
    assert payloads(server.url, two) == list(AWKWARD)


FORMULAS = (b"=1+1", b"+1", b"-1+1", b"@SUM(A1)", b"\tx", b"\rx", b"\nx", "\uff1d1".encode(), b"-", b"-01", b"--5")
# Where a comma is the decimal sign, spreadsheets split cells at semicolons, also those in quotes.
FORMULAS_INSIDE = {
    b"\t=1": "'\t'=1",
    b"a;=1;": "a;'=1;",
    b'a;"=1&"': 'a;"\'=1&"',
    b"a;;+1\n-1\r\n@1\t=1": "a;;'+1\n'-1\r\n'@1\t'=1",
    "a;\uff1d1".encode(): "a;'\uff1d1",
}
NO_FORMULAS = (
    b"-5",
    b"-0.5e+3",
    b"5",
    b"a=1",
    b" =1",
    b"'=1",
    b"",
    b'"=1"',
    b"a,=1",
    b"a;1",
    b"a; =1",
    b"a;b=1",
    b"a;'=1",
)


def test_export_for_a_spreadsheet_has_no_cell_that_is_a_formula(
    server: NatsServer, ok: Json, run: Run, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, plain, safe = stream_name(), tmp_path / "plain.csv", tmp_path / "safe.csv"

    async def publish(js: JetStreamContext) -> None:
        await js.add_stream(name=stream, subjects=[f"={stream}"], allow_direct=True, allow_batched=True)
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add_many(
                (f"={stream}", payload) for payload in (*FORMULAS, *FORMULAS_INSIDE, *NO_FORMULAS, b"\xfb\xff")
            )

    with_js(server.url, publish)
    ok("export", stream, plain)
    ok("export", stream, safe, "--spreadsheet")
    with plain.open(newline="") as one, safe.open(newline="") as other:
        rows, cells = list(csv.DictReader(one)), list(csv.DictReader(other))
    unchanged = [payload.decode() for payload in NO_FORMULAS]
    data = [*(f"'{payload.decode()}" for payload in FORMULAS), *FORMULAS_INSIDE.values(), *unchanged, ""]
    assert [row["data"] for row in cells] == data
    assert {row["subject"] for row in cells} == {f"'={stream}"}
    assert (rows[-1]["data_base64"], cells[-1]["data_base64"]) == ("+/8=", "'+/8=")
    changed = {"subject", "data", "data_base64"}
    assert [{name: row[name] for name in row.keys() - changed} for row in cells] == [
        {name: row[name] for name in row.keys() - changed} for row in rows
    ]
    refused = run("export", stream, tmp_path / "x.jsonl", "--spreadsheet")
    assert (refused.exit_code, "--spreadsheet is for CSV, not for jsonl" in refused.stderr) == (2, True)


def test_a_json_line_is_stored_unchanged(
    server: NatsServer, ok: Json, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, rows = stream_name(), tmp_path / "rows.jsonl"
    rows.write_text(f"\ufeff{DIGITS % stream}\r\n\n{DIGITS % stream}")
    ok("ingest", rows, "--stream", stream, "--subject-from", "to", "--create", f"{stream}.>")
    assert payloads(server.url, stream) == [(DIGITS % stream).encode()] * 2


def test_ingest_refuses_repeated_columns_and_pipes(run: Run, tmp_path: Path, stream_name: Callable[[], str]) -> None:
    stream, twice, pipe = stream_name(), tmp_path / "twice.csv", tmp_path / "pipe.csv"
    twice.write_text("to,to\na,b\n")
    os.mkfifo(pipe)
    for path, words in {twice: "there are two columns 'to'; nothing is stored", pipe: "is not a regular file"}.items():
        done = run("ingest", path, "--stream", stream, "--subject", stream, "--create", stream)
        assert (done.exit_code, done.stderr.count("\n"), words in done.stderr) == (1, 1, True), done.output


def test_reports_count_one_row_in_the_singular_and_say_if_nothing_is_stored(
    server: NatsServer, run: Run, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, rows, out = stream_name(), tmp_path / "rows.csv", tmp_path / "out.csv"
    rows.write_text("a\n1\n")
    how = ("ingest", rows, "--stream", stream, "--subject", stream, "--create", stream)
    assert f"1 row of {rows} is in {stream}" in run(*how).stdout
    assert "1 message up to sequence 1" in run("export", stream, out).stdout
    rows.write_text("a,b\n1\n")
    assert f"; rows of earlier runs stay in {stream}, nothing else is stored; " in run(*how).stderr
    with_js(server.url, lambda js: js.purge_stream(stream))
    assert run(*how).stderr.endswith("; nothing is stored\n")


def test_ingest_reports_the_refused_row_and_the_server_s_reason(
    server: NatsServer, run: Run, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, rows = stream_name(), tmp_path / "rows.csv"
    rows.write_text(f"n\n1\n2\n{'x' * 300}\n4\n")
    options = {"allow_direct": True, "allow_batched": True, "max_msg_size": 200}
    with_js(server.url, lambda js: js.add_stream(name=stream, subjects=[stream], **options))
    advice = "correct the row or the options; the command with --resume then sends the rest"
    not_stored = f"stream '{stream}' does not store its subject 'nowhere.at.all'; nothing is stored"
    for subject, place, words in (
        ("nowhere.at.all", f"{rows}, row 1", not_stored),
        (
            stream,
            f"row 3 of {rows}",
            f"message size exceeds maximum allowed; the 2 rows before it are stored; {advice}",
        ),
    ):
        done = run("ingest", rows, "--stream", stream, "--subject", subject)
        assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
        assert done.stderr.startswith(f"Error: {place}: ")
        assert done.stderr.endswith(f"{words}\n")
        assert "code=" not in done.stderr


def test_an_export_that_cannot_start_leaves_no_files(
    server: NatsServer, run: Run, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream = stream_name()

    async def closed(js: JetStreamContext) -> None:
        await js.add_stream(name=stream, subjects=[stream])
        await js.publish(stream, b"x")

    with_js(server.url, closed)
    done = run("export", stream, tmp_path / "out.csv", "--timeout", "20s")
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert "direct" in done.stderr
    assert "--resume" not in done.stderr
    assert [path.name for path in tmp_path.glob("out*")] == []


def test_an_export_stopped_while_it_writes_parquet_can_be_resumed(
    server: NatsServer, process: Start, ok: Json, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, out = stream_name(), tmp_path / "out.parquet"
    fill(server.url, stream, [b"%d" % n for n in range(100_000)])
    with process("export", stream, out) as exporting:
        end = time.monotonic() + 60
        while exporting.poll() is None and not (tmp_path / "out.parquet.new").exists():
            assert time.monotonic() < end, "export did not reach the Parquet file"
            time.sleep(0.001)
        exporting.send_signal(signal.SIGINT)
        shown, said = exporting.communicate(timeout=60)
    names = {path.name for path in tmp_path.glob("out*")}
    if "out.parquet" in names:  # it was faster
        assert "--resume continues" not in said
    else:
        assert (exporting.returncode, shown, "--resume continues" in said) == (130, "", True)
        assert names == {"out.parquet.part", "out.parquet.part.json"}
        assert ok("export", stream, out, "--resume")["messages"] == 100_000
    assert pq.read_table(out)["seq"].to_pylist() == list(range(1, 100_001))


def test_an_export_of_a_killed_server_can_be_resumed(
    process: Start, ok: Json, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, out = stream_name(), tmp_path / "out.jsonl"
    part = tmp_path / "out.jsonl.part"
    with NatsServer() as doomed:
        fill(doomed.url, stream, [b"%d" % n for n in range(100_000)])
        with process("export", stream, out, "--timeout", "5s", url=doomed.url) as exporting:
            end = time.monotonic() + 60
            while exporting.poll() is None and not (part.exists() and part.stat().st_size > 100_000):
                assert time.monotonic() < end, "export did not start to write"
                time.sleep(0.001)
            doomed.kill()
            shown, said = exporting.communicate(timeout=60)
        if not out.exists():  # else it was faster
            assert (exporting.returncode, shown, said.count("\n")) == (1, "", 1), said
            assert said.startswith("Error: ")
            assert "the same command with --resume continues" in said
            stored = json.loads((tmp_path / "out.jsonl.part.json").read_text())["messages"]
            assert f"{stored:,} messages up to" in said
            doomed.restart()
            assert ok("export", stream, out, "--resume", url=doomed.url)["messages"] == 100_000
    assert [json.loads(line)["data"] for line in out.read_text().splitlines()] == [str(n) for n in range(100_000)]


def test_ingest_stores_each_row_once_after_kills_of_client_and_server(
    process: Start, ok: Json, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, rows, count = stream_name(), tmp_path / "rows.csv", 100_000
    rows.write_text("n\n" + "".join(f"{n}\n" for n in range(count)))
    how = ("ingest", rows, "--stream", stream, "--subject", stream, "--data-from", "n", "--create", stream)

    def stored(url: str, at_least: int, running: subprocess.Popen[str]) -> None:
        async def wait(js: JetStreamContext) -> None:
            async with asyncio.timeout(120):
                while running.poll() is None:
                    try:
                        if (await js.stream_info(stream)).state.messages >= at_least:
                            return
                    except nats.js.errors.NotFoundError:
                        pass
                    await asyncio.sleep(0.01)

        with_js(url, wait)

    with NatsServer() as server:
        with process(*how, url=server.url) as killed:
            stored(server.url, 5_000, killed)
            killed.kill()
        with process(*how, "--json", url=server.url) as going_on:
            stored(server.url, 30_000, going_on)
            server.kill()
            server.restart()
            shown, said = going_on.communicate(timeout=120)
        assert (going_on.returncode, said) == (0, "")
        done = json.loads(shown)
        assert (done["rows"], done["complete"]) == (count, True)
        assert payloads(server.url, stream) == [b"%d" % n for n in range(count)]


def test_an_unfinished_parquet_export_of_an_older_version_is_not_continued(
    server: NatsServer, run: Run, ok: Json, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, out, part = stream_name(), tmp_path / "out.parquet", tmp_path / "out.parquet.part"
    fill(server.url, stream, [b"1", b"2", b"3"])
    created = with_js(server.url, lambda js: js._api_request(f"$JS.API.STREAM.INFO.{stream}"))["created"]
    row = {"seq": 1, "time": "2026-01-01T00:00:00+00:00", "subject": stream, "headers": {}, "data": "1"}
    part.write_text(f"{json.dumps(row)}\n")
    journal = {"stream": stream, "created": created, "subject": "", "first": 1, "format": "parquet"}
    journal |= {"end": 3, "seq": 1, "messages": 1, "size": part.stat().st_size}
    Path(f"{part}.json").write_text(json.dumps(journal))
    before = part.read_bytes()
    done = run("export", stream, out, "--resume")
    assert done.exit_code == 1
    assert "an older version; --overwrite discards the export and starts again" in done.stderr
    assert part.read_bytes() == before
    assert ok("export", stream, out, "--overwrite")["messages"] == 3
    assert pq.read_table(out)["data"].to_pylist() == [b"1", b"2", b"3"]


@pytest.fixture(params=["csv", "jsonl", "parquet"])
def unfinished(
    request: pytest.FixtureRequest,
    server: NatsServer,
    run: Run,
    tmp_path: Path,
    stream_name: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[str, Path, Path]:
    """The stream, the file and the unfinished file of an export of 2,000 messages that was stopped before its end."""
    stream, out = stream_name(), tmp_path / f"out.{request.param}"
    fill(server.url, stream, [b"%0100d" % n for n in range(2_000)])
    with monkeypatch.context() as patch:
        patch.setattr(export._Part, "finish", Mock(side_effect=KeyboardInterrupt))
        done = run("export", stream, out)
    assert (done.exit_code, "--resume continues" in done.stderr) == (130, True)
    return stream, out, tmp_path / f"{out.name}.part"


def flip(part: Path, place: int) -> None:
    content = bytearray(part.read_bytes())
    content[place] ^= 1
    part.write_bytes(content)


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
}


def change_journal(part: Path, **fields: object) -> None:
    path = Path(f"{part}.json")
    journal = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in journal.items() if value is not None}))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_unfinished_export_is_reported_and_can_be_started_again(
    unfinished: tuple[str, Path, Path], run: Run, ok: Json, tmp_path: Path, damage: str
) -> None:
    stream, out, part = unfinished
    DAMAGES[damage](part)
    before = {path: path.read_bytes() for path in tmp_path.glob("out*")}
    for _ in range(2):
        done = run("export", stream, out, "--resume")
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.output
        assert str(part) in done.stderr
        assert "--overwrite" in done.stderr
        assert "--resume continues" not in done.stderr
        assert {path: path.read_bytes() for path in tmp_path.glob("out*")} == before
    assert ok("export", stream, out, "--overwrite")["messages"] == 2_000
    assert list(tmp_path.glob("out*")) == [out]


def test_an_unfinished_export_is_continued_without_what_follows_its_journal(
    unfinished: tuple[str, Path, Path], ok: Json, tmp_path: Path
) -> None:
    stream, out, part = unfinished
    with part.open("ab") as file:
        file.write(b"\xff" * 1000)
    assert ok("export", stream, out, "--resume")["messages"] == 2_000
    assert list(tmp_path.glob("out*")) == [out]
    assert b"\xff" * 1000 not in out.read_bytes()


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
            words = f"another export writes {out}.part; wait for it, or export to another file"
            assert (done.exit_code, done.stderr) == (1, f"Error: {words}\n")
        assert {path: path.read_bytes() for path in tmp_path.glob("out*")} == before
        finish(self)

    monkeypatch.setattr(export._Part, "finish", second_export)
    assert "wrote 2 messages" in run("export", stream, out).stdout
    assert list(tmp_path.glob("out*")) == [out]


def test_an_export_writes_no_symbolic_link(
    server: NatsServer, run: Run, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, target = stream_name(), tmp_path / "target.csv"
    fill(server.url, stream, [b"1"])
    (tmp_path / "out.csv").symlink_to("target.csv")
    for options in ((), ("--overwrite",)):
        done = run("export", stream, tmp_path / "out.csv", *options)
        assert (done.exit_code, done.stderr) == (
            1,
            f"Error: {tmp_path / 'out.csv'} is a symbolic link; give the path of its target, {target}\n",
        )
        assert list(tmp_path.iterdir()) == [tmp_path / "out.csv"]
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


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("suffix", [".part", ".part.json", ".part.json.new", ".new"])
def test_an_export_writes_its_unfinished_file_to_nothing_else(
    server: NatsServer, run: Run, tmp_path: Path, stream_name: Callable[[], str], suffix: str, kind: str
) -> None:
    stream, target, out = stream_name(), tmp_path / "target", tmp_path / "out.csv.gz"
    fill(server.url, stream, [b"1"])
    target.write_text("kept")
    path = tmp_path / f"{out.name}{suffix}"
    MAKE[kind](path)
    for options in ((), ("--resume",), ("--overwrite",)):
        done = run("export", stream, out, *options)
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr == (
            f"Error: {path} is a symbolic link, a directory or a pipe; export writes unfinished data there: remove it, or export "
            "to another file\n"
        )
    assert sorted(tmp_path.iterdir()) == [path, target]
    assert target.read_text() == "kept"
    shutil.rmtree(path) if kind == "directory" else path.unlink()
    assert run("export", stream, out).exit_code == 0


def test_a_link_that_takes_the_place_of_an_unfinished_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "out.part").symlink_to("missing")
    with pytest.raises(OSError, match=r"out\.part") as caught, formats.exclusive(tmp_path / "out.part"):
        pass
    assert caught.value.errno == errno.ELOOP


def test_a_file_that_is_damaged_while_it_is_converted_is_reported(
    unfinished: tuple[str, Path, Path], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, out, part = unfinished
    if out.suffix != ".parquet":
        return
    finish = export._Part.finish
    for cut in (8, 10_000, part.stat().st_size - 4):

        def damaged(self: Any, cut: int = cut) -> None:
            os.truncate(self.path, cut)
            finish(self)

        whole = part.read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(export._Part, "finish", damaged)
            done = run("export", stream, out, "--resume")
        assert (done.exit_code, done.stderr.count("\n")) == (1, 1), done.output
        assert f"{part} is damaged" in done.stderr
        assert "--overwrite discards the export" in done.stderr
        assert "--resume" not in done.stderr
        part.write_bytes(whole)
    assert not out.exists()


BLOCK = b"NATS/1.0\r\nX: 1\r\nY: two\r\nX: 3\r\nNats-Rollup: sub\r\n\r\n"


def test_parquet_has_exact_times_and_every_value_of_a_header(
    server: NatsServer, ok: Json, tmp_path: Path, stream_name: Callable[[], str], publish_raw: Callable[..., None]
) -> None:
    one, two, out = stream_name(), stream_name(), tmp_path / "out.parquet"
    fill(server.url, one, [b"\xff", b""])
    publish_raw(server, [(one.encode(), b"x")], block=BLOCK.replace(b"Nats-Rollup: sub\r\n", b""))

    async def read(js: JetStreamContext) -> list[jsx.StoredMsg]:
        return await jsx.DirectGet(js, one).scan().to_list()

    stored = with_js(server.url, read)
    ok("export", one, out)
    table = pq.read_table(out)
    assert table.schema.remove_metadata() == pa.schema(
        [arrow.SCHEMA.field(name) for name in ("seq", "time", "subject", "headers", "data")]
    )
    assert table["time"].cast(pa.int64()).to_pylist() == [message.time_ns for message in stored]
    assert table["headers"].to_pylist()[2] == [("X", ["1", "3"]), ("Y", ["two"])]
    how = ("--subject", two, "--data-from", "data", "--headers-from", "headers", "--create", two)
    ok("ingest", out, "--stream", two, *how)
    assert ok("ingest", out, "--stream", two, *how, "--resume")["sent"] == 0

    async def copied(js: JetStreamContext) -> list[object]:
        found = await jsx.DirectGet(js, two).scan().to_list()
        own = [[pair for pair in message.header_pairs if pair[0] in ("X", "Y")] for message in found]
        return [(message.data, pairs) for message, pairs in zip(found, own, strict=True)]

    assert with_js(server.url, copied) == [(b"\xff", []), (b"", []), (b"x", [("X", "1"), ("X", "3"), ("Y", "two")])]


def test_times_of_day_with_nanoseconds_are_ingested_exactly(
    server: NatsServer, ok: Json, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, rows = stream_name(), tmp_path / "rows.parquet"
    pq.write_table(pa.table({"t": pa.array([1, None], pa.time64("ns"))}), rows)
    ok("ingest", rows, "--stream", stream, "--subject", stream, "--create", stream)
    assert payloads(server.url, stream) == [b'{"t":"00:00:00.000000001"}', b'{"t":null}']


def test_a_parquet_value_that_python_cannot_hold_is_refused(
    run: Run, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, rows = stream_name(), tmp_path / "rows.parquet"
    pq.write_table(pa.table({"t": pa.array([[2**62]], pa.list_(pa.timestamp("us")))}), rows)
    done = run("ingest", rows, "--stream", stream, "--subject", stream, "--create", stream)
    assert done.exit_code == 1
    assert f"{rows.name}, after row 0: " in done.stderr
    assert "nothing is stored" in done.stderr


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_headers_of_an_exported_file_are_stored_again_without_instructions_to_the_server(
    server: NatsServer,
    ok: Json,
    tmp_path: Path,
    stream_name: Callable[[], str],
    publish_raw: Callable[..., None],
    suffix: str,
) -> None:
    one, two, out = stream_name(), stream_name(), tmp_path / f"out.{suffix}"
    with_js(server.url, lambda js: js.add_stream(name=one, subjects=[one], allow_direct=True, allow_rollup_hdrs=True))
    publish_raw(server, [(one.encode(), b"x")], block=BLOCK)
    ok("export", one, out)
    ok(
        "ingest",
        out,
        "--stream",
        two,
        "--subject",
        two,
        "--data-from",
        "data",
        "--headers-from",
        "headers",
        "--create",
        two,
    )

    async def headers(js: JetStreamContext) -> dict[str, str]:
        return (await jsx.DirectGet(js, two).get(1)).headers

    found = with_js(server.url, headers)
    assert {name: value for name, value in found.items() if not name.startswith("Nats-")} == {"X": "3", "Y": "two"}
    assert "Nats-Rollup" not in found


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[1]", "is neither a map nor a JSON object"),
        ("x", "is neither a map nor a JSON object"),
        ('{"X": "\\ud800"}', "is neither a map nor a JSON object"),
        ('{"X": "1", "X": "2"}', "the key 'X' is there twice"),
        ('{"Y": "1", "X": []}', ": header 'X' has an empty list of values"),
        ('{"X": 1}', "has a header that is not a string"),
        ('{"X": [null]}', "has a header that is not a string"),
    ],
)
def test_headers_that_are_none_are_refused(
    run: Run, tmp_path: Path, stream_name: Callable[[], str], value: str, words: str
) -> None:
    stream, rows = stream_name(), tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"h": value}) + "\n")
    done = run("ingest", rows, "--stream", stream, "--subject", stream, "--headers-from", "h", "--create", stream)
    assert done.exit_code == 1
    assert "row 1: column 'h'" in done.stderr
    assert f"{words}; nothing is stored" in done.stderr


def test_parquet_of_a_subject_that_is_not_utf_8_is_refused(
    server: NatsServer,
    ok: Json,
    run: Run,
    tmp_path: Path,
    stream_name: Callable[[], str],
    publish_raw: Callable[..., None],
) -> None:
    stream, out = stream_name(), tmp_path / "out.parquet"
    subjects = [f"{stream}.>"]
    with_js(server.url, lambda js: js.add_stream(name=stream, subjects=subjects, allow_direct=True))
    publish_raw(server, [(f"{stream}.a".encode(), b"")] * 1500 + [(stream.encode() + b".\xff", b"")])
    done = run("export", stream, out)
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert f"message 1501 of stream '{stream}' does not fit column 'subject'" in done.stderr
    assert "export to CSV or JSON lines with --lossy, which writes U+FFFD" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_nanoseconds_and_maps_of_any_parquet_file_become_json(
    server: NatsServer, ok: Json, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, rows = stream_name(), tmp_path / "rows.parquet"
    table = pa.table(
        {
            "time": pa.array([1_600_000_000_123_456_789, None], pa.timestamp("ns", tz="UTC")),
            "here": pa.array([1_600_000_000_123_456_789, None], pa.timestamp("ns", tz="-05:30")),
            "map": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int64())),
        }
    )
    pq.write_table(table, rows)
    ok("ingest", rows, "--stream", stream, "--subject", stream, "--create", stream)
    assert [json.loads(payload) for payload in payloads(server.url, stream)] == [
        {"time": "2020-09-13T12:26:40.123456789Z", "here": "2020-09-13T06:56:40.123456789-05:30", "map": {"a": 1}},
        {"time": None, "here": None, "map": None},
    ]


def test_a_parquet_export_that_was_killed_continues_after_its_journal(
    server: NatsServer, process: Start, ok: Json, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, out = stream_name(), tmp_path / "out.parquet"
    part, journal = tmp_path / "out.parquet.part", tmp_path / "out.parquet.part.json"
    fill(server.url, stream, [b"%01000d" % n for n in range(30_000)])
    with process("export", stream, out) as exporting:
        end = time.monotonic() + 60
        while exporting.poll() is None and not (journal.exists() and json.loads(journal.read_bytes())["messages"]):
            assert time.monotonic() < end, "export did not save its journal"
            time.sleep(0.001)
        exporting.kill()
        exporting.wait()
    if not out.exists():  # else it was faster
        saved = json.loads(journal.read_bytes())
        assert 0 < saved["messages"] <= 30_000
        with part.open("r+b") as file:  # what reached the disk after the journal may be anything
            file.seek(saved["size"])
            file.write(b"\xff" * 1000)
        assert ok("export", stream, out, "--resume")["messages"] == 30_000
    table = pq.read_table(out)
    assert table["seq"].to_pylist() == list(range(1, 30_001))
    assert table["data"][-1].as_py() == b"%01000d" % 29_999
    assert list(tmp_path.iterdir()) == [out]
