"""Terminal output is complete, holds no foreign escape sequences, and escapes characters that the terminal lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from cli_tools import Json, Run, run_fix, with_js
from nats.js import JetStreamContext

from jetstream_ext.cli import output
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
        for arguments in [("doctor",), ("snapshot", name), ("bench", "--messages", 500, "--rounds", 1)]
    }
    for arguments, text in shown.items():
        assert "…" not in text
        for line in text.splitlines():
            assert len(line) <= width or line.startswith("    await "), arguments  # a call to copy is not wrapped
    table = shown["snapshot", name]
    for char, number in {"k": 90, "v": 250}.items():
        assert letters(table).count(char) >= number


def test_no_foreign_escape_sequence_reaches_the_terminal(ok: Json, run: Run) -> None:
    stream = "X\"'"
    with NatsServer() as server:
        with_js(server.url, lambda js: js.add_stream(name=stream, subjects=["x"]))
        with_js(server.url, lambda js: js.add_stream(name="X\x1b[31m", subjects=["y"]))
        bucket(server.url, "B", {"\x1b[31mred": b"[bold]1[/bold]", "[red]a[/red]": b"2"})
        for arguments in (["doctor"], ["snapshot", "B"]):
            done = run(*arguments, url=server.url)
            assert (done.exit_code, "\x1b" in done.output) == (0, False)
        assert "[bold]1[/bold]" in done.stdout
        assert "[red]a[/red]" in done.stdout
        [found] = ok("doctor", "--stream", stream, url=server.url)["streams"]
        with_js(server.url, lambda js: run_fix(js, found["fix"]))
        assert ok("doctor", "--stream", stream, url=server.url)["streams"][0]["lacks"] == []


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
    assert "address already in use" in done.stderr
    assert len(done.stderr) < 400
