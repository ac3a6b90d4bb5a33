"""The page on permissions: a user who has just what a row says can make the call, and without it cannot."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import kv as kvx
from jetstream_ext.testing import NatsServer

PAGE = Path(__file__).parents[1] / "docs" / "permissions.md"
NAMES = {"<stream>": "S", "<subject>": "s.a", "<consumer>": "C", "<bucket>": "B"}

Call = Callable[[JetStreamContext], Awaitable[Any]]


def allowed(call: str) -> list[str]:
    """Return what the row of a call allows."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        first, *rest = line.strip("|").split("|")
        if rest and f"`{call}`" in first:
            found = re.findall(r"`([^`]+)`", rest[0])
            return [re.sub(r"<\w+>", lambda match: NAMES[match[0]], subject) for subject in found]
    raise AssertionError(f"no row has {call}")


async def fast(js: JetStreamContext) -> None:
    async with jsx.FastPublisher(js, ack_timeout=1) as publisher:
        await publisher.add("s.a", b"1")


async def atomic(js: JetStreamContext) -> None:
    async with jsx.AtomicBatch(js) as batch:
        await batch.add("s.a", b"1")
        await batch.add("s.a", b"2")


async def transfer(js: JetStreamContext) -> None:
    async with kvx.transaction(await js.key_value("B")) as tx:
        await tx.get("k")
        tx.put("k", b"2")


async def enable(js: JetStreamContext) -> None:
    await kvx.enable(await js.key_value("B"))


async def touch(js: JetStreamContext) -> None:
    await kvx.touch(await js.key_value("B"), "k", 60)


CALLS: dict[str, Call] = {
    "DirectGet.get_last": lambda js: jsx.DirectGet(js, "S").get_last("s.a"),
    "scan": lambda js: jsx.DirectGet(js, "S").scan().to_list(),
    "multi_last": lambda js: jsx.DirectGet(js, "S").multi_last(["s.>"]).to_list(),
    "scan(confirm=True)": lambda js: jsx.DirectGet(js, "S").scan(confirm=True).to_list(),
    "FastPublisher": fast,
    "ingest": lambda js: jsx.ingest(js, [("s.a", b"1")], timeout=1, ack_timeout=0.5),
    "AtomicBatch": atomic,
    "features": jsx.features,
    "ensure_stream": lambda js: jsx.ensure_stream(js, name="S", subjects=["s.>"], allow_msg_ttl=True),
    "reset_consumer": lambda js: jsx.reset_consumer(js, "S", "C"),
    "create_source_consumer": lambda js: jsx.create_source_consumer(js, "S", "C", deliver_subject="d"),
    "kv.get_many": lambda js: read(js, kvx.get_many, ["k"]),
    "kv.snapshot": lambda js: read(js, kvx.snapshot),
    "kv.transaction": transfer,
    "kv.touch": touch,
    "kv.enable": enable,
}


async def read(js: JetStreamContext, function: Callable[..., Awaitable[Any]], *arguments: object) -> None:
    assert await function(await js.key_value("B"), *arguments)


async def prepare(url: str, call: str) -> None:
    async with await nats.connect(url, user="admin", password="x") as nc:
        js = nc.jetstream()
        await js.add_stream(name="S", subjects=["s.>"], allow_direct=True, allow_atomic=True, allow_batched=True)
        await js.publish("s.a", b"0")
        if call == "reset_consumer":
            await js.add_consumer("S", durable_name="C", ack_policy="explicit")
        kv = await js.create_key_value(bucket="B")
        if call != "kv.enable":
            await kvx.enable(kv)
        await kv.put("k", b"1")


@pytest.mark.parametrize("call", CALLS)
async def test_what_the_page_allows_is_enough(call: str) -> None:
    publish = ", ".join(f'"{subject}"' for subject in allowed(call))
    limited = f'{{ user: some, password: x, permissions: {{ publish: [{publish}], subscribe: "_INBOX.>" }} }}'
    config = f"authorization {{ users: [ {{ user: admin, password: x }}, {limited} ] }}"
    async with NatsServer(config=config) as server:
        await prepare(server.url, call)
        refused: list[str] = []

        async def on_error(error: Exception) -> None:
            refused.append(str(error))

        nc = await nats.connect(server.url, user="some", password="x", error_cb=on_error)
        try:
            await CALLS[call](nc.jetstream(timeout=2))
        except (nats.errors.Error, jsx.errors.JetStreamExtError) as error:
            pytest.fail(f"{error!r}; refused: {refused}")
        finally:
            await nc.close()
