"""Numbers and texts that no real server sends are refused with a documented error."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import nats
import pytest
from frame_proxy import Frame, FrameProxy
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

import jetstream_ext as jsx
from jetstream_ext.errors import JetStreamExtError, ResponseError
from jetstream_ext.testing import NatsServer

LARGEST_FLOW = 65_535


@pytest.fixture
async def stream(js: JetStreamContext, stream_name: Callable[[], str]) -> str:
    """A stream of nine messages that takes batches of both kinds."""
    name = stream_name()
    config = StreamConfig(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_atomic=True, allow_batched=True)
    await jsx.ensure_stream(js, config)
    for n in range(1, 10):
        await js.publish(f"{name}.a", b"%d" % n)
    return name


@pytest.fixture
async def proxied(server: NatsServer) -> AsyncIterator[tuple[JetStreamContext, FrameProxy]]:
    """A context behind a proxy."""
    async with FrameProxy(server.port) as proxy:
        nc = await nats.connect(proxy.url, connect_timeout=10)
        yield nc.jetstream(timeout=30), proxy
        await nc.close()


ODD = {
    "negative": "-5",
    "underscore": "1_000",
    "plus": "+7",
    "Arabic digit": "٣",
    "full-width digit": "\uff15",
    "over 64 bits": str(1 << 64),
}


async def test_sequence_that_no_server_would_send_is_refused(
    proxied: tuple[JetStreamContext, FrameProxy], stream: str
) -> None:
    js, proxy = proxied
    direct = jsx.DirectGet(js, stream)

    async def forge(value: str, frame: Frame) -> Frame:
        if b"\r\nNats-Sequence: 7\r\n" not in frame.header:
            return frame
        return frame.with_header(b"Nats-Sequence: 7\r\n", f"Nats-Sequence: {value}\r\n".encode())

    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "get": lambda: direct.get(7),
        "get_next": lambda: direct.get_next(f"{stream}.a", seq=7),
        "batch": lambda: direct.batch(1, seq=7).to_list(),
        "batch of three": lambda: direct.batch(3, seq=6).to_list(),
    }
    accepted = []
    for kind, value in ODD.items():
        proxy.on_delivery = partial(forge, value)
        for name, call in calls.items():
            try:
                accepted.append((name, kind, await call()))
            except ResponseError:
                pass
    assert not accepted


async def test_flow_of_a_forged_ack_is_never_larger_than_a_flow_can_be(
    proxied: tuple[JetStreamContext, FrameProxy], stream: str
) -> None:
    js, proxy = proxied
    forged = 0

    async def forge(msgs: int, frame: Frame) -> Frame:
        nonlocal forged
        if not frame.payload.startswith(b"{") or (reply := json.loads(frame.payload)).get("type") != "ack":
            return frame
        forged += 1
        return Frame(frame.subject, frame.reply, frame.header, json.dumps(reply | {"msgs": msgs}).encode(), frame.sid)

    flows: list[int] = []
    for msgs in (LARGEST_FLOW + 1, 1 << 63):
        forged, proxy.on_delivery = 0, partial(forge, msgs)
        try:
            async with jsx.FastPublisher(js, flow=2, timeout=2) as publisher:
                for n in range(6):
                    await publisher.add(f"{stream}.b", b"%d" % n)
                await publisher.flush()
                flows.append(publisher.flow)
        except JetStreamExtError:
            pass  # refusing the ack is also correct
        assert forged, "no ack passed the proxy"
    assert all(flow <= LARGEST_FLOW for flow in flows)
