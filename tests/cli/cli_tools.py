"""Types and helpers of the tests of the command line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import nats
from click.testing import Result
from nats.js import JetStreamContext

Run = Callable[..., Result]
Json = Callable[..., Any]


def with_js(url: str, function: Callable[[JetStreamContext], Any]) -> Any:
    """Return what `function` returns for a connection of its own, outside of an event loop."""

    async def connected() -> Any:
        nc = await nats.connect(url, connect_timeout=10)
        try:
            return await function(nc.jetstream())
        finally:
            await nc.close()

    return asyncio.run(connected())


async def run_fix(js: JetStreamContext, call: str) -> None:
    """Run the Python call that ``doctor`` shows."""
    space: dict[str, Any] = {"js": js}
    exec(f"import jetstream_ext, jetstream_ext.kv\nasync def fix():\n    {call}", space)
    await space["fix"]()
