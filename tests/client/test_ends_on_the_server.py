"""A batch that ends here without a commit ends on the server too: it takes no place and no part of the flow.

Servers let a stream have 50 atomic batches open (10210), and share the flow of fast ingest among the open batches, each for
10 s after its last message.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import nats
import pytest
from client_cells import each
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.testing import NatsServer

MakeStream = Callable[..., Awaitable[str]]
MORE_THAN_OPEN = 60
SHORTLY = 8.0  # seconds; the server forgets an idle batch after 10

KINDS = [jsx.AtomicBatch, jsx.FastPublisher]


async def discard(batch: Any, stream: str) -> None:
    await batch.add(f"{stream}.a", b"1")
    await batch.discard()


async def raise_in_the_block(batch: Any, stream: str) -> None:
    with contextlib.suppress(ZeroDivisionError):
        async with batch:
            await batch.add(f"{stream}.a", b"1")
            raise ZeroDivisionError


async def cancel_the_block(batch: Any, stream: str) -> None:
    added = asyncio.Event()

    async def block() -> None:
        async with batch:
            await batch.add(f"{stream}.a", b"1")
            added.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await added.wait()
    task.cancel()
    await asyncio.wait({task})


async def cancel_the_first_call(batch: Any, stream: str) -> None:
    """After its message was sent; the batch is given up then."""
    size = "size" if isinstance(batch, jsx.AtomicBatch) else "batch_seq"
    task = asyncio.create_task(batch.add(f"{stream}.a", b"1"))
    while not getattr(batch, size):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    await batch.discard()


async def drop(batch: Any, stream: str) -> None:
    await batch.add(f"{stream}.a", b"1")  # and the caller has no other reference


async def refuse_a_message(batch: Any, stream: str) -> None:
    """The server refuses message 2, or the commit."""
    with contextlib.suppress(errors.JetStreamExtError):
        async with batch:
            await batch.add(f"{stream}.a", b"1")
            await batch.add(f"{stream}.a", b"2", headers={"Nats-TTL": "no"})


WAYS = [discard, raise_in_the_block, cancel_the_block, cancel_the_first_call, drop, refuse_a_message]


async def works(js: JetStreamContext, kind: type, stream: str) -> None:
    """Assert that the next batch of a stream is taken, with its whole flow."""
    if kind is jsx.AtomicBatch:
        assert (await jsx.publish_atomic(js, [(f"{stream}.next", b"")] * 2)).batch_size == 2
        return
    async with jsx.FastPublisher(js, flow=100) as publisher:
        await publisher.add(f"{stream}.next", b"")
        assert publisher.flow == 100


@pytest.mark.filterwarnings("ignore:.* was dropped while it was open:ResourceWarning")
@each("kind", KINDS)
@each("way", WAYS)
async def test_batches_that_end_without_a_commit_take_no_place(
    js: JetStreamContext, nc: Client, make_stream: MakeStream, kind: type, way: Callable[[Any, str], Awaitable[None]]
) -> None:
    stream = await make_stream()
    began = time.monotonic()
    gc.freeze()  # a collection of what all other tests have left takes long
    try:
        for _ in range(MORE_THAN_OPEN if kind is jsx.AtomicBatch else 10):
            await way(kind(js), stream)
            if way is drop:
                gc.collect()
                await asyncio.sleep(0)
    finally:
        gc.unfreeze()
    await nc.flush()
    await works(js, kind, stream)
    assert time.monotonic() - began < SHORTLY, "otherwise the server has forgotten the first ones"


@each("kind", KINDS)
async def test_so_it_is_when_the_connection_closes_at_once(
    server: NatsServer, js: JetStreamContext, make_stream: MakeStream, kind: type, request: pytest.FixtureRequest
) -> None:
    stream = await make_stream()
    for end in ("close", "drain"):
        nc = await nats.connect(server.url, connect_timeout=10)
        for _ in range(MORE_THAN_OPEN):
            batch = kind(nc.jetstream(timeout=30))
            await batch.add(f"{stream}.a", b"1")
            await batch.discard()
        if request.config.getoption("--fallback"):  # without nats-py's internals, a task of its own writes
            await nc.flush()
        await (nc.close() if end == "close" else nc.drain())
        while not nc.is_closed:
            await asyncio.sleep(0.01)
        await works(js, kind, stream)


@each("kind", KINDS)
async def test_so_it_is_while_the_connection_drains(
    server: NatsServer, js: JetStreamContext, make_stream: MakeStream, kind: type
) -> None:
    stream = await make_stream()
    nc, inside = await nats.connect(server.url, connect_timeout=10), asyncio.Event()

    async def slow(_: Any) -> None:
        inside.set()
        await asyncio.sleep(0.5)

    await nc.subscribe(f"{stream}.slow", cb=slow)
    batches = [kind(nc.jetstream(timeout=30)) for _ in range(40)]
    for batch in batches:
        await batch.add(f"{stream}.a", b"1")
    await nc.publish(f"{stream}.slow")
    await inside.wait()
    draining = asyncio.create_task(nc.drain())
    while not nc.is_draining:
        await asyncio.sleep(0)
    for batch in batches:
        await batch.discard()
    await draining
    for _ in range(20):
        await works(js, kind, stream)


async def test_a_batch_that_gave_up_waiting_ends_on_the_server(
    own_server: NatsServer, own_js: JetStreamContext, own_nc: Client, own_stream: MakeStream
) -> None:
    stream = await own_stream()
    publishers = [jsx.FastPublisher(own_js, timeout=0.5) for _ in range(10)]
    batches = [jsx.AtomicBatch(own_js, timeout=0.5) for _ in range(40)]
    for one in (*publishers, *batches):
        await one.add(f"{stream}.a", b"1")
    own_server.pause()
    with warnings.catch_warnings():
        waiting = [one.ping() for one in publishers] + [one.commit_eob() for one in batches[:5]]
        ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(each) for each in ended} == {errors.BatchOutcomeUnknownError}
    for batch in batches:
        await batch.discard()
    own_server.resume()
    await own_nc.flush()
    await works(own_js, jsx.AtomicBatch, stream)
    await works(own_js, jsx.FastPublisher, stream)


async def test_a_fast_batch_that_another_stream_refused_ends_on_its_own(
    js: JetStreamContext, nc: Client, make_stream: MakeStream
) -> None:
    stream, other = await make_stream(), await make_stream()
    began = time.monotonic()
    for _ in range(10):
        publisher = jsx.FastPublisher(js)
        await publisher.add(f"{stream}.a", b"1")
        # The other stream refuses the message, and its own lacks it: either answer may be first.
        await publisher.add(f"{other}.a", b"2")
        with pytest.raises((errors.FastPublishUnknownBatchError, errors.BatchGapError)):
            await publisher.flush()
    await nc.flush()
    await works(js, jsx.FastPublisher, stream)
    assert time.monotonic() - began < SHORTLY
