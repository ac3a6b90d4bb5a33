"""Advisories about batches that the server dropped."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import nats
import nats.errors
import pytest
from client_cells import each
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.testing import NatsServer

SHORT = 'jetstream { limits { batch { timeout: "2s", max_msgs: 5 } }, %s }'


@pytest.mark.parametrize("version", ["2.12.0", "2.12.8", "2.14.6", "2.15.1"])
@each("domain", [None, "hub"])
async def test_every_reason_is_reported(version: str, domain: str | None) -> None:
    async with (
        NatsServer(version=version, config=SHORT % (f"domain: {domain}" if domain else "")) as server,
        await nats.connect(server.url, connect_timeout=10) as nc,
    ):
        js = nc.jetstream(domain=domain) if domain else nc.jetstream()
        for name in ("S", "OTHER"):
            await js.add_stream(name=name, subjects=[f"{name}.>"], allow_atomic=True)
        heard: list[jsx.AbandonedBatch] = []
        async with jsx.watch_abandoned(js, "S") as watch, asyncio.timeout(60):
            # The watch does not report another stream's batch.
            idle = [(name, jsx.AtomicBatch(js)) for name in ("OTHER", "S")]
            for name, batch in idle:
                await batch.add(f"{name}.a")
                await batch.add(f"{name}.b")  # before 2.14 the first message waits for the second
            heard.append(await anext(watch))
            for _, batch in idle:
                await batch.discard()
            with pytest.raises(errors.AtomicPublishTooLargeError) as many:
                await jsx.publish_atomic(js, [jsx.BatchMessage("S.a")] * 6)
            heard.append(await anext(watch))
            # Without waiting for an ack, so that the batch does not time out before its commit.
            holey = jsx.AtomicBatch(js)
            await holey.add("S.a")
            await holey.add("S.b")
            holey._session.machine._wire.sent += 1
            with pytest.raises(errors.AtomicPublishIncompleteError):
                await holey.commit("S.a")
            heard.append(await anext(watch))
            expected = [
                (idle[1][1].batch_id, "timeout"), (many.value.batch_id, "large"), (holey.batch_id, "incomplete"),
            ]  # fmt: skip
            if version >= "2.14":
                new = jsx.AtomicBatch(js)
                with pytest.raises(errors.RequiredApiLevelError):
                    await new.add("S.a", headers={"Nats-Required-Api-Level": "99"})
                heard.append(await anext(watch))
                expected.append((new.batch_id, "unsupported"))
        assert [(each.batch_id, each.reason) for each in heard] == expected
        assert {each.stream for each in heard} == {"S"}
        assert all(abs(each.time - datetime.now(UTC)) < timedelta(minutes=1) for each in heard)


async def test_advisories_of_other_domains_and_malformed_ones_are_ignored(nc: Client) -> None:
    subject = "$JS.EVENT.ADVISORY.STREAM.BATCH_ABANDONED.S"
    event = b'{"timestamp":"2026-11-20T21:30:40.444144476Z","stream":"S","batch":"%b","reason":"timeout"%b}'
    async with jsx.watch_abandoned(nc.jetstream(domain="hub"), "S") as watch:
        await nc.publish(subject, b"garbage")
        await nc.publish(subject, b'{"stream":1}')
        await nc.publish(subject, event % (b"a", b',"domain":"leaf"'))
        await nc.publish(subject, event % (b"b", b',"domain":"hub"'))
        await nc.publish(subject, event % (b"c", b""))
        assert [(await anext(watch)).batch_id for _ in range(2)] == ["b", "c"]


async def test_a_cancelled_or_closed_watch_leaves_nothing_behind(
    nc: Client, js: JetStreamContext, leak_check: Any
) -> None:
    watch = jsx.watch_abandoned(js, "S")
    async with watch:
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait([waiting])
        with pytest.raises(RuntimeError):
            await watch.__aenter__()
    with pytest.raises(StopAsyncIteration):
        await anext(watch)
    await watch.aclose()
    await leak_check.assert_clean()
    for ticks in range(10):
        task = asyncio.ensure_future(jsx.watch_abandoned(js, "S").__aenter__())
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            await task.result().aclose()
        await leak_check.assert_clean()


async def test_closing_a_watch_ends_its_waiting_iterations(js: JetStreamContext, leak_check: Any) -> None:
    watch = await jsx.watch_abandoned(js, "S").__aenter__()
    waiting = [asyncio.ensure_future(anext(watch)) for _ in range(2)]
    await asyncio.sleep(0)
    await watch.aclose()
    async with asyncio.timeout(30):
        for each in waiting:
            with pytest.raises(StopAsyncIteration):
                await each
    await leak_check.assert_clean()


def test_an_invalid_stream_name_is_refused(js: JetStreamContext) -> None:
    with pytest.raises(errors.BadSubjectError):
        jsx.watch_abandoned(js, "a.b")
