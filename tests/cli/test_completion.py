"""The shell completes commands, options, and the names of streams, buckets, contexts and files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_tools import RUNNER, Run, with_js
from click.testing import Result
from nats.js import JetStreamContext

from jetstream_ext.cli import completion, connection
from jetstream_ext.cli.__main__ import cli
from jetstream_ext.testing import NatsServer

Complete = Callable[..., Result]


@pytest.fixture
def complete(run: Run) -> Complete:
    """Ask for what a shell completes at the end of a command line."""

    def ask(line: str, *, shell: str = "bash", url: str) -> Result:
        words = line.split(" ")
        now = words[-1] if shell == "fish" else str(len(words) - 1)
        asked = {"_JETSTREAM_EXT_COMPLETE": f"{shell}_complete", "COMP_WORDS": line, "COMP_CWORD": now}
        return RUNNER.invoke(cli, [], prog_name="jetstream-ext", env=asked | {"NATS_URL": url})

    return ask


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell must not wait; a test on a busy machine must."""
    monkeypatch.setattr(completion, "_LIMIT", 60)


@pytest.fixture
def names(server: NatsServer, stream_name: Callable[[], str]) -> tuple[str, str]:
    """Create a stream and a bucket, and return their names."""
    stream, bucket = stream_name(), stream_name()

    async def create(js: JetStreamContext) -> None:
        await js.add_stream(name=stream, subjects=[stream])
        await js.create_key_value(bucket=bucket)

    with_js(server.url, create)
    return stream, bucket


def test_names_are_completed_from_the_server(server: NatsServer, complete: Complete, names: tuple[str, str]) -> None:
    stream, bucket = names
    for shell, line, name in (
        ("bash", f"export {stream[:-1]}", stream),
        ("bash", f"doctor -s {server.url} --stream {stream[:-1]}", stream),
        ("bash", f"group status --server {server.url} {stream[:-1]}", stream),
        ("bash", f"ingest rows.csv --stream {stream[:-1]}", stream),
        ("zsh", f"snapshot {bucket[:-1]}", bucket),
        ("fish", f"group list --bucket {bucket[:-1]}", bucket),
    ):
        named = "nats://127.0.0.1:1" if server.url in line else server.url
        done = complete(f"jetstream-ext {line}", shell=shell, url=named)
        assert (done.exit_code, done.stderr) == (0, "")
        assert name in done.stdout.replace(",", "\n").splitlines(), (line, done.stdout)


def test_commands_options_contexts_and_files_are_completed(complete: Complete) -> None:
    folder = connection.context_folder() / "context"
    folder.mkdir(parents=True)
    (folder / "production.json").write_text("{}")
    for line, found in (
        ("sna", "plain,snapshot"),
        ("group st", "plain,status"),
        ("doctor --st", "plain,--stream"),
        ("doctor --context pro", "plain,production"),
        ("doctor --creds my", "file,my"),
        ("ingest ro", "file,ro"),
    ):
        assert complete(f"jetstream-ext {line}", url="nats://127.0.0.1:1").stdout == f"{found}\n", line


def test_without_an_answer_nothing_is_completed_and_no_error_shown(complete: Complete) -> None:
    with NatsServer(jetstream=False) as bare, NatsServer(config="authorization { user: u, password: p }") as guarded:
        for url in ("nats://127.0.0.1:1", "http://no.such.scheme", bare.url, guarded.url):
            done = complete("jetstream-ext export ", url=url)
            assert (done.exit_code, done.output.strip()) == (0, ""), url
    done = complete("jetstream-ext export --context none ", url="")
    assert (done.exit_code, done.output.strip()) == (0, "")


def test_a_name_that_a_shell_may_obey_is_not_offered(
    server: NatsServer, complete: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(api: object) -> list[str]:
        return ["A$(reboot)", "A`reboot`", "A;reboot", "A\x1b[31m", "A|b", "A&", "A'", "A\\", "A~", "A-B_1=2+c@d"]

    monkeypatch.setattr(completion, "stream_names", answer)
    assert complete("jetstream-ext export A", url=server.url).stdout == "plain,A-B_1=2+c@d\n"


def test_a_silent_server_delays_the_shell_for_a_moment_only(
    server: NatsServer, complete: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(api: object) -> list[str]:
        raise AssertionError("asked after the time was up")

    monkeypatch.setattr(completion, "_LIMIT", 0.0)
    monkeypatch.setattr(completion, "stream_names", answer)
    done = complete("jetstream-ext export A", url=server.url)
    assert (done.exit_code, done.output.strip()) == (0, "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="runs the script of the page in bash")
def test_bash_completes_with_the_script_of_the_page(server: NatsServer, names: tuple[str, str], tmp_path: Path) -> None:
    stream, _ = names
    command = tmp_path / "jetstream-ext"
    # As `python -m jetstream_ext.cli`, which offers nothing if the machine needs more than a second.
    program = "from jetstream_ext.cli import __main__, completion; completion._LIMIT = 60; __main__.main()"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{program}" "$@"\n')
    command.chmod(0o755)
    script = f"""
        eval "$(_JETSTREAM_EXT_COMPLETE=bash_source jetstream-ext)"
        complete -p jetstream-ext
        COMP_WORDS=(jetstream-ext export {stream[:-1]}) COMP_CWORD=2
        _jetstream_ext_completion jetstream-ext
        echo "${{COMPREPLY[@]}}"
    """
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NATS_URL": server.url}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    registered, found = done.stdout.splitlines()
    assert registered == "complete -o nosort -F _jetstream_ext_completion jetstream-ext"
    assert stream in found.split()
    assert done.stderr == ""
