"""Types and helpers of the tests of the command line."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

import nats
from click.testing import CliRunner, Result
from nats.js import JetStreamContext

import jetstream_ext as jsx

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


def fill(url: str, stream: str, payloads: Iterable[bytes], **options: Any) -> None:
    """Create a stream whose subjects are its name and all below, and publish payloads on its name."""

    async def publish(js: JetStreamContext) -> None:
        allowed = {"allow_direct": True, "allow_batched": True}
        await jsx.ensure_stream(js, name=stream, **({"subjects": [stream, f"{stream}.>"]} | allowed | options))
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add_many((stream, payload) for payload in payloads)

    with_js(url, publish)


def stored(url: str, stream: str) -> list[jsx.StoredMsg]:
    """Return the messages of a stream."""
    found: list[jsx.StoredMsg] = with_js(url, lambda js: jsx.DirectGet(js, stream).scan().to_list())
    return found


def payloads(url: str, stream: str) -> list[bytes]:
    """Return the payloads of a stream."""
    return [message.data for message in stored(url, stream)]


def assert_fails(done: Result, *words: str) -> None:
    """Assert that a command failed with one line on stderr, which has the words."""
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.exception or done.output
    for word in words:
        assert word in done.stderr, (word, done.stderr)


def assert_usage(done: Result, words: str) -> None:
    """Assert that a command was wrong usage, for the reason in `words`."""
    assert (done.exit_code, words in done.stderr) == (2, True), done.output


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
