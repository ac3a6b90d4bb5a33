"""Run commands in this process or as processes of their own, without the connection settings of the machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from jetstream_ext.cli.__main__ import cli
from jetstream_ext.testing import NatsServer

sys.path.insert(0, str(Path(__file__).parent))

from cli_tools import RUNNER, Json, Run


@pytest.fixture
def run(server: NatsServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run a command with the shared server, or the one at `url`."""
    for name in [name for name in os.environ if name.startswith("NATS_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it for its workers
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def invoke(*arguments: object, url: str | None = server.url, stdin: bytes = b"") -> Result:
        environment = {} if url is None else {"NATS_URL": url}
        return RUNNER.invoke(cli, [str(argument) for argument in arguments], input=stdin, env=environment)

    return invoke


@pytest.fixture
def ok(run: Run) -> Json:
    """Run a command with --json; it must succeed. Return its JSON object."""

    def invoke(*arguments: object, **options: Any) -> Any:
        done = run(*arguments, "--json", **options)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    return invoke


class Command(subprocess.Popen[str]):
    """A command that is killed if its block fails, so that the test does not wait for the end of its work."""

    def __exit__(self, *exception: object) -> None:
        if exception[0] is not None:
            self.kill()
        super().__exit__(*exception)


@pytest.fixture
def process(run: Run, server: NatsServer) -> Callable[..., Command]:
    """Start a command as a process."""

    def start(*arguments: object, url: str | None = server.url, ctrl_c: bool = True) -> Command:
        def before() -> None:
            # Processes that a shell starts with `&` ignore SIGINT, and their children inherit this.
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
