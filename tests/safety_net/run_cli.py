"""Run the command line in this process, which is faster than a new Python for each command."""

import contextlib
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from jetstream_ext.cli.__main__ import main


@dataclass(frozen=True, slots=True)
class Finished:
    """The result of a command."""

    status: int | str | None
    output: str
    """Standard output and standard error."""


def run_cli(*arguments: object, home: Path, environment: dict[str, str] | None = None) -> Finished:
    """Run ``jetstream-ext`` without the machine's settings. Do not call it in an event loop."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("NATS_")}
    settings |= {"XDG_CONFIG_HOME": str(home)} | (environment or {})
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    status: int | str | None = 0
    with (
        mock.patch.dict(os.environ, settings, clear=True),
        mock.patch.object(sys, "argv", ["jetstream-ext", *map(str, arguments)]),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        try:
            main()
        except SystemExit as end:
            status = end.code
    return Finished(status, output.buffer.getvalue().decode())  # type: ignore[attr-defined]
