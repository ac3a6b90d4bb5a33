"""Types and helpers of the tests of the command line."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Callable
from inspect import signature
from typing import Any

import nats
from click.testing import CliRunner, Result
from nats.js import JetStreamContext

Run = Callable[..., Result]
Json = Callable[..., Any]

# Click 8.1 mixes stdout and stderr by default; later releases keep them apart.
RUNNER = CliRunner(**({"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}))


def with_js(url: str, function: Callable[[JetStreamContext], Any]) -> Any:
    """Return what `function` returns for a connection of its own, outside of an event loop."""

    async def connected() -> Any:
        nc = await nats.connect(url, connect_timeout=10)
        try:
            return await function(nc.jetstream(timeout=30))
        finally:
            await nc.close()

    return asyncio.run(connected())


def lacking(run: Run, *arguments: object, **options: Any) -> list[dict[str, Any]]:
    """Run ``doctor``, which must fail if and only if a stream lacks something; return its reports on the streams."""
    done = run("doctor", *arguments, "--json", **options)
    streams: list[dict[str, Any]] = json.loads(done.stdout)["streams"]
    assert done.exit_code == any(stream["lacks"] for stream in streams), done.output
    return streams


def run_fix(run: Run, command: str, **options: Any) -> None:
    """Run the command that ``doctor`` shows, as a shell would."""
    program, *arguments = shlex.split(command)
    done = run(*arguments, **options)
    assert (program, done.exit_code) == ("jetstream-ext", 0), done.output
