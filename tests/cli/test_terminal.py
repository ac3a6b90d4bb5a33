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
from cli_tools import Json, Run, assert_fails, assert_usage, lacking, run_fix, with_js
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


def test_a_narrow_terminal_gets_the_whole_text(
    server: NatsServer, run: Run, stream_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = stream_name()
    bucket(server.url, name, {"k" * 90: b"", "b": b"v" * 250, "c": b"\xff" * 90})
    for width in (40, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        for arguments in (("doctor", "--need", "direct"), ("snapshot", name, "--full")):
            shown = run(*arguments).stdout
            assert "…" not in shown
            for line in shown.splitlines():
                to_copy = line.startswith("    jetstream-ext ")  # such a command is not wrapped
                assert len(line) <= width or to_copy, arguments
        for char, number in {"k": 90, "v": 250}.items():
            assert letters(shown).count(char) >= number


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


def test_no_escape_sequence_of_an_argument_reaches_the_terminal(run: Run) -> None:
    for arguments in (
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
    ):
        done = run(*arguments)
        assert done.exit_code in (1, 2), arguments
        assert done.stderr, arguments
        assert done.output.replace("\n", "").isprintable(), arguments


def test_a_url_or_password_in_the_wrong_place_is_not_repeated(run: Run) -> None:
    for arguments in (
        ["URL"],
        ["export", "URL", "out.csv"],
        ["export", "S", "URL"],
        ["ingest", "URL", "--stream", "S"],
        ["doctor", "--context", "URL"],
        ["doctor", "--timeout", "URL"],
        ["doctor", "--stream", "URL"],
        ["doctor", "127.0.0.1", "URL"],
        ["serve", "--store", __file__, "URL"],
    ):
        done = run(*(each.replace("URL", "nats://u:hun/t@er2x@127.0.0.1:4222") for each in arguments))
        assert done.exit_code in (1, 2), arguments
        assert "hun" not in done.output, arguments
        assert "er2x" not in done.output, arguments
    for extra in (
        ["u:hunter2@127.0.0.1"],  # a URL without a scheme
        ["--password", "first", "hunter2"],  # half a password
        ["nats://u:hunter2\n@127.0.0.1", "hunter2"],  # two lines
    ):
        done = run("snapshot", "B", *extra)
        assert_usage(done, "Got unexpected extra argument")
        assert "hunter2" not in done.output, extra


def test_values_that_no_server_has_are_wrong_usage(run: Run) -> None:
    for arguments, words in (
        (["export", "S", "x.csv", "--subject", "\udcff"], "Invalid value for '--subject': it is not UTF-8"),
        (["ingest", __file__, "--stream", "S", "--create", "a", "--create", "\udcff"], "'--create': it is not UTF-8"),
        (["dlq", "show", "S", "D", str(2**64)], "is not in the range"),
        (["dlq", "redrive", "S", "D", "1", str(2**64), "--bucket", "B"], "is not in the range"),
    ):
        assert_usage(run(*arguments), words)


def test_a_secret_in_place_of_its_file_is_not_repeated(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER).decode()
    file = f"-----BEGIN NATS USER JWT-----\n{'x' * 400}\n-----BEGIN USER NKEY SEED-----\n{seed}\n"
    for text in (seed, file, f"{seed}{'x' * 400}"):
        for option, variable in (("--creds", "NATS_CREDS"), ("--nkey", "NATS_NKEY"), ("--tlsca", "NATS_CA")):
            with monkeypatch.context() as patch:
                patch.setenv(variable, text)
                for done in (run("doctor"), run("doctor", option, text)):
                    assert_fails(done, "give the path of the file, not what it holds")
                    assert seed not in done.output, (option, text)


def test_help_shows_no_value_of_an_environment_variable(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NATS_PASSWORD", "NATS_TOKEN", "NATS_USER", "NATS_CREDS"):
        monkeypatch.setenv(name, "hunter2")
    for command in ("doctor", "export", "snapshot", "ingest", "group list", "dlq list"):
        done = run(*command.split(), "--help", url="nats://u:hunter2@127.0.0.1")
        assert (done.exit_code, "hunter2" in done.output, "127.0.0.1:4222" in done.output) == (0, False, True), command


def test_json_has_escapes_for_what_is_not_printable(
    run: Run, server: NatsServer, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    bucket(server.url, name, {"k": f"{EVIL}\ud7ff\U000e0001Zoë".encode()})
    done = run("snapshot", name, "--json")
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
    done = subprocess.run(
        [sys.executable, "-m", "jetstream_ext.cli", "snapshot", name, "--server", server.url],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"Zo\xeb\u2026" in done.stdout


def test_a_server_that_cannot_start_is_reported_in_one_line(server: NatsServer, run: Run) -> None:
    port = server.url.rpartition(":")[2]
    done = run("serve", "--port", port)
    assert (done.exit_code, done.stderr.count("\n"), done.stdout) == (1, 1, "")
    assert f"port {port}: address already in use; --port 0 takes any free port" in done.stderr
    assert len(done.stderr) < 400
