"""Terminal output is complete, holds no foreign escape sequences, and escapes characters that the terminal lacks."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nkeys
import pytest
from cli_tools import Json, Run, lacking, run_fix, with_js
from nats.js import JetStreamContext

from jetstream_ext.cli import doctor, output
from jetstream_ext.cli.__main__ import main
from jetstream_ext.testing import NatsServer


def bucket(url: str, name: str, keys: dict[str, bytes]) -> None:
    async def fill(js: JetStreamContext) -> None:
        await js.create_key_value(bucket=name, direct=True)
        for key, value in keys.items():
            await js.publish(f"$KV.{name}.{key}", value)  # nats-py's own put refuses such keys; others do not

    with_js(url, fill)


def letters(text: str) -> str:
    """Return a table's text, of all its lines and columns, as one."""
    return "".join(char for char in text if char.isalnum())


@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_terminal_gets_the_whole_text(
    server: NatsServer, run: Run, stream_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    name = stream_name()
    bucket(server.url, name, {"k" * 90: b"", "b": b"v" * 250, "c": b"\xff" * 90})
    shown = {
        arguments: run(*arguments).stdout
        for arguments in [
            ("doctor", "--need", "direct"),
            ("snapshot", name, "--full"),
            ("bench", "--messages", 500, "--rounds", 1),
        ]
    }
    for arguments, text in shown.items():
        assert "…" not in text
        for line in text.splitlines():
            to_copy = line.startswith("    jetstream-ext ")  # such a command is not wrapped
            assert len(line) <= width or to_copy, arguments
    table = shown["snapshot", name, "--full"]
    for char, number in {"k": 90, "v": 250}.items():
        assert letters(table).count(char) >= number


def test_no_foreign_escape_sequence_reaches_the_terminal(ok: Json, run: Run) -> None:
    stream = "X\"'"
    with NatsServer() as server:
        with_js(server.url, lambda js: js.add_stream(name=stream, subjects=["x"]))
        with_js(server.url, lambda js: js.add_stream(name="X\x1b[31m", subjects=["y"]))
        bucket(server.url, "B", {"\x1b[31mred": b"[bold]1[/bold]", "[red]a[/red]": b"2"})
        for arguments in (["doctor"], ["doctor", "--need", "direct"], ["snapshot", "B"]):
            done = run(*arguments, url=server.url)
            assert (done.exit_code, "\x1b" in done.output) == (int("--need" in arguments), False)
        assert "[bold]1[/bold]" in done.stdout
        assert "[red]a[/red]" in done.stdout
        asked = ("--stream", stream, "--need", "direct")
        [found] = lacking(run, *asked, url=server.url)
        run_fix(run, found["fix"], url=server.url)
        assert lacking(run, *asked, url=server.url)[0]["lacks"] == []


EVIL = "\x1b]0;owned\x07\x1b[31mred\x9b2J\x7f\u202e[bold]"
ESCAPED = r"\x1b]0;owned\x07\x1b[31mred\x9b2J\x7f\u202e[bold]"


@pytest.mark.parametrize(
    "arguments",
    [
        [EVIL],
        [f"--{EVIL}"],
        ["doctor", f"--{EVIL}"],
        ["doctor", "a", EVIL],
        ["doctor", "--stream", f"{EVIL} "],
        ["doctor", "--timeout", EVIL],
        ["doctor", "--context", EVIL],
        ["doctor", f"nats://{EVIL}@127.0.0.1:{EVIL}"],
        ["doctor", f"nats://{EVIL}:1", "--timeout", "1s"],
        ["snapshot", "B", "--at", EVIL],
        ["group", EVIL],
        ["group", "status", EVIL, "g"],
        ["group", "reset", "S", "g", "--start", EVIL],
        ["group", "reset", "S", "g", "--key", EVIL],
        ["dlq", EVIL],
        ["dlq", "list", "S", EVIL],
        ["dlq", "show", "S", "s", EVIL],
        ["dlq", "redrive", "S", "s", "--to-stream", EVIL],
        ["dlq", "drop", EVIL, "1"],
        ["export", EVIL, "out.csv"],
        ["export", "S", f"{EVIL}.txt"],
        ["export", "S", "out.csv", "--format", EVIL],
        ["ingest", EVIL, "--stream", "S"],
        ["serve", "--config", EVIL],
    ],
    ids=lambda arguments: " ".join(arguments).replace(EVIL, "EVIL"),
)
def test_no_escape_sequence_of_an_argument_reaches_the_terminal(run: Run, arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.exit_code in (1, 2)
    assert done.stderr
    assert done.output.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    "arguments",
    [
        ["URL"],
        ["export", "URL", "out.csv"],
        ["export", "S", "URL"],
        ["ingest", "URL", "--stream", "S"],
        ["doctor", "--context", "URL"],
        ["doctor", "--timeout", "URL"],
        ["doctor", "--stream", "URL"],
        ["doctor", "127.0.0.1", "URL"],
        ["serve", "--store", __file__, "URL"],
    ],
    ids=" ".join,
)
def test_a_url_in_the_wrong_place_is_shown_without_its_credentials(run: Run, arguments: list[str]) -> None:
    done = run(*(each.replace("URL", "nats://u:hun/t@er2x@127.0.0.1:4222") for each in arguments))
    assert done.exit_code in (1, 2)
    assert "hun" not in done.output
    assert "er2x" not in done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["snapshot", "B", "u:SECRET@127.0.0.1"],
        ["snapshot", "B", "--password", "first", "SECRET"],
        ["snapshot", "B", "nats://u:SECRET\n@127.0.0.1", "SECRET"],
    ],
    ids=["URL without a scheme", "half a password", "two lines"],
)
def test_an_extra_argument_is_not_repeated(run: Run, arguments: list[str]) -> None:
    done = run(*(each.replace("SECRET", "hunter2") for each in arguments))
    assert done.exit_code == 2
    assert "Got unexpected extra argument" in done.stderr
    assert "hunter2" not in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", "S", "x.csv", "--subject", "\udcff"], "Invalid value for '--subject': it is not UTF-8"),
        (["ingest", __file__, "--stream", "S", "--create", "a", "--create", "\udcff"], "'--create': it is not UTF-8"),
        (["dlq", "show", "S", "D", str(2**64)], "is not in the range"),
        (["dlq", "redrive", "S", "D", "1", str(2**64), "--bucket", "B"], "is not in the range"),
    ],
)
def test_values_that_no_server_has_are_wrong_usage(run: Run, arguments: list[str], words: str) -> None:
    done = run(*arguments)
    assert (done.exit_code, words in done.stderr) == (2, True), done.output


@pytest.mark.parametrize("option", ["--creds", "--nkey", "--tlsca", "NATS_CREDS", "NATS_NKEY", "NATS_CA"])
@pytest.mark.parametrize("secret", ["seed", "file", "line"])
def test_a_secret_in_place_of_its_file_is_not_repeated(
    run: Run, monkeypatch: pytest.MonkeyPatch, option: str, secret: str
) -> None:
    seed = nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER).decode()
    text = {
        "seed": seed,
        "file": f"-----BEGIN NATS USER JWT-----\n{'x' * 400}\n-----BEGIN USER NKEY SEED-----\n{seed}\n",
        "line": f"{seed}{'x' * 400}",
    }[secret]
    arguments = [option, text]
    if option.startswith("NATS_"):
        monkeypatch.setenv(option, text)
        arguments = []
    done = run("doctor", *arguments)
    assert (done.exit_code, "give the path of the file, not what it holds" in done.stderr) == (1, True)
    assert seed not in done.output


def test_help_shows_no_value_of_an_environment_variable(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NATS_PASSWORD", "NATS_TOKEN", "NATS_USER", "NATS_CREDS"):
        monkeypatch.setenv(name, "hunter2")
    for command in ("doctor", "bench", "export", "snapshot", "ingest", "group list", "dlq list"):
        done = run(*command.split(), "--help", url="nats://u:hunter2@127.0.0.1")
        assert (done.exit_code, "hunter2" in done.output, "127.0.0.1:4222" in done.output) == (
            0,
            False,
            command != "bench",  # which starts a server if none is named
        )


def test_json_has_escapes_for_what_is_not_printable(ok: Json, run: Run, server: NatsServer) -> None:
    with NatsServer() as own:
        bucket(own.url, "B", {"k": f"{EVIL}\ud7ff\U000e0001Zoë".encode()})
        done = run("snapshot", "B", "--json", url=own.url)
    assert done.stdout.removesuffix("\n").isprintable()
    assert "Zoë" in done.stdout
    assert json.loads(done.stdout)["entries"]["k"]["value"] == f"{EVIL}\ud7ff\U000e0001Zoë"


def test_json_names_a_file_whose_name_is_not_utf_8(ok: Json, tmp_path: Path, stream_name: Callable[[], str]) -> None:
    name, rows = stream_name(), tmp_path / os.fsdecode(b"\xff.jsonl")
    rows.write_text("{}")
    assert ok("ingest", rows, "--stream", name, "--subject", name, "--create", name)["file"] == str(rows)


def test_a_terminal_gets_the_escape_sequences_of_rich_and_no_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "300")
    with output.progress(EVIL, 10) as report:
        report(5, 5)
    screen, rows = output.console(), output.table("a", "b")
    rows.add_row(EVIL, output.styled(EVIL, "bold"))
    screen.print(rows, EVIL, output.styled(EVIL, "bold"))
    output.say(EVIL)
    shown = capsys.readouterr()
    assert "\x1b[" in shown.out
    assert "\x1b[" in shown.err
    assert shown.out.count(ESCAPED) == 5
    assert ESCAPED in shown.err
    for char in "\x07\x9b\x7f\u202e":
        assert char not in shown.out + shown.err


def test_the_traceback_of_an_unexpected_error_is_printable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise ZeroDivisionError(EVIL)

    monkeypatch.setattr(doctor.command, "callback", fail)
    monkeypatch.setattr(sys, "argv", ["jetstream-ext", "doctor"])
    with pytest.raises(SystemExit) as ended:
        main()
    text = ended.value.code
    assert isinstance(text, str)
    assert text.startswith("Traceback")
    assert text.endswith(f"ZeroDivisionError: {ESCAPED}")
    assert text.replace("\n", "").isprintable()


def test_records_that_no_handler_takes_are_printable(capsys: pytest.CaptureFixture[str], run: Run) -> None:
    assert run("serve", "--port", "-1").exit_code == 2  # any command sets it up
    record = logging.LogRecord("nats.aio.client", logging.ERROR, __file__, 1, "%s", (EVIL,), None)
    assert logging.lastResort is not None
    logging.lastResort.handle(record)
    assert capsys.readouterr().err == f"{ESCAPED}\n"


def test_output_escapes_characters_that_the_terminal_lacks(server: NatsServer, stream_name: Callable[[], str]) -> None:
    name = stream_name()
    bucket(server.url, name, {"a": "Zoë…".encode()})
    said = {}
    for option in ([], ["--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "jetstream_ext.cli", "snapshot", name, "--server", server.url, *option],
            env=os.environ | {"PYTHONIOENCODING": "ascii"},
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        said[bool(option)] = done.stdout
    assert rb"Zo\xeb\u2026" in said[False]
    assert json.loads(said[True])["entries"]["a"]["value"] == "Zoë…"


def test_a_closed_pipe_ends_the_command(server: NatsServer) -> None:
    command = [sys.executable, "-m", "jetstream_ext.cli", "doctor", "--json", server.url]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_count_uses_singular_and_plural() -> None:
    assert [output.count(number, "row") for number in (0, 1, 2_000)] == ["0 rows", "1 row", "2,000 rows"]


def test_a_server_that_cannot_start_is_reported_in_one_line(server: NatsServer, run: Run) -> None:
    port = server.url.rpartition(":")[2]
    done = run("serve", "--port", port)
    assert (done.exit_code, done.stderr.count("\n"), done.stdout) == (1, 1, "")
    assert f"port {port}: address already in use; --port 0 takes any free port" in done.stderr
    assert len(done.stderr) < 400
