"""The command line, run in this process or as a process of its own, with no connection settings of the machine's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from jetstream_ext.cli.app import cli
from jetstream_ext.testing import NatsServer

Run = Callable[..., Result]
# Click 8.1 has to be told to keep stdout and stderr apart; later ones always do.
RUNNER = CliRunner(**({"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}))


@pytest.fixture
def run(server: NatsServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run a command against the shared server, or with `url` against another one."""
    for name in [name for name in os.environ if name.startswith("NATS_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it for its workers
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def invoke(*arguments: object, url: str | None = server.url) -> Result:
        environment = {} if url is None else {"NATS_URL": url}
        return RUNNER.invoke(cli, [str(argument) for argument in arguments], env=environment)

    return invoke


@pytest.fixture
def ok(run: Run) -> Callable[..., Any]:
    """Run a command that must succeed, with --json; return what it says."""

    def invoke(*arguments: object, **options: Any) -> Any:
        done = run(*arguments, "--json", **options)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    return invoke


class Command(subprocess.Popen[str]):
    """A command that ends with its block: a test that fails in it does not wait for the end of its work."""

    def __exit__(self, *exception: object) -> None:
        if exception[0] is not None:
            self.kill()
        super().__exit__(*exception)


@pytest.fixture
def process(run: Run, server: NatsServer) -> Callable[..., Command]:
    """Start a command as a process."""

    def start(*arguments: object, url: str | None = server.url, ctrl_c: bool = True) -> Command:
        def before() -> None:
            # What a shell starts with `&` ignores it, and so does all that it starts.
            signal.signal(signal.SIGINT, signal.default_int_handler if ctrl_c else signal.SIG_IGN)

        return Command(
            [sys.executable, "-m", "jetstream_ext.cli", *map(str, arguments)],
            env=os.environ | ({} if url is None else {"NATS_URL": url}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=before,
        )

    return start
