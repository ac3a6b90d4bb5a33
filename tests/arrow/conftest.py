"""Fixtures of the Arrow tests."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from nats.js import JetStreamContext

MakeStream = Callable[..., Awaitable[str]]


@pytest.fixture
def make_stream(js: JetStreamContext, stream_name: Callable[[], str]) -> MakeStream:
    """Create a stream that takes fast ingest and answers direct gets (or as given); its subjects are ``<name>.>``."""

    async def make(**config: Any) -> str:
        name = stream_name()
        await js.add_stream(
            name=name, subjects=[f"{name}.>"], **{"allow_direct": True, "allow_batched": True, **config}
        )
        return name

    return make


@pytest.fixture(autouse=True)
async def loop_is_quiet() -> AsyncIterator[None]:
    """Fail if the loop's exception handler was called."""
    heard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
    yield
    gc.collect(1)
    await asyncio.sleep(0)
    assert heard == []
