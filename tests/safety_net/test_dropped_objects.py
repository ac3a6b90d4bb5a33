"""A publisher or batch that its user has dropped leaves nothing behind."""

import asyncio
import gc
import sys
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx

MakeStream = Callable[..., Awaitable[str]]


async def drop_publisher(js: JetStreamContext, stream: str) -> None:
    publisher = jsx.FastPublisher(js, keepalive=0.05)
    await publisher.add(f"{stream}.a", b"1")


async def drop_publisher_with_a_handler(js: JetStreamContext, stream: str) -> None:
    handled = asyncio.Event()

    async def handle(_: jsx.BatchFlowAck) -> None:
        handled.set()
        await asyncio.Event().wait()

    publisher = jsx.FastPublisher(js, flow=1, keepalive=0.05, on_flow=handle)
    for _ in range(5):  # the others wait for the first one
        await publisher.add(f"{stream}.a", b"1")
    await publisher.flush()
    await handled.wait()


async def drop_batch(js: JetStreamContext, stream: str) -> None:
    batch = jsx.AtomicBatch(js)
    await batch.add(f"{stream}.a", b"1")


async def drop_watch(js: JetStreamContext, stream: str) -> None:
    await jsx.watch_abandoned(js, stream).__aenter__()


DROP = pytest.mark.parametrize("drop", [drop_publisher, drop_publisher_with_a_handler, drop_batch, drop_watch])
Drop = Callable[[JetStreamContext, str], Awaitable[None]]


async def drop_and_collect(drop: Drop, js: JetStreamContext, stream: str) -> list[str]:
    """Open an object and drop it; return the resource warnings."""
    gc.collect()  # objects that other tests have dropped
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        await drop(js, stream)
        gc.collect()
        await asyncio.sleep(0.05)
    return [str(warning.message) for warning in caught if warning.category is ResourceWarning]


async def test_a_dropped_publisher_sends_nothing_more(
    nc: Client, js: JetStreamContext, make_stream: MakeStream
) -> None:
    await drop_and_collect(drop_publisher, js, await make_stream())
    before = nc.stats["out_msgs"]
    for _ in range(100):  # a ping ends the wait
        if nc.stats["out_msgs"] != before:
            break
        await asyncio.sleep(0.01)
    assert nc.stats["out_msgs"] == before


@DROP
async def test_a_dropped_object_leaves_no_subscription_task_or_timer(
    js: JetStreamContext, make_stream: MakeStream, leak_check: Any, drop: Drop
) -> None:
    found = await drop_and_collect(drop, js, await make_stream())
    await leak_check.assert_clean()
    assert any(text.startswith(("FastPublisher", "AtomicBatch", "watch_abandoned")) for text in found), "no warning"


@DROP
async def test_a_dropped_object_leaves_nothing_where_warnings_are_errors(
    js: JetStreamContext, make_stream: MakeStream, leak_check: Any, drop: Drop, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: ignored.append(error.exc_type))
    stream = await make_stream()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        await drop(js, stream)
        gc.collect()
        await asyncio.sleep(0.05)
    assert ResourceWarning in ignored
    await leak_check.assert_clean()
