"""The stream of a checkpoint: it stays the same after a restart or a restore, and `onRecreate` decides about another one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import nats
import nats.errors
import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig, StreamSource

from jetstream_ext.testing import NatsServer


def _read_on(query: Any, start: dict[str, Any], more: Callable[[], None]) -> list[int]:
    """Return the sequences of the micro-batch after `start`, when there is more to read."""
    more()
    return list(query.seqs(start, query.latest(start)))


async def _publish_ten(js: JetStreamContext) -> None:
    for _ in range(10):
        await js.publish("S.a")


async def _with_js(url: str | list[str], question: Callable[[JetStreamContext], Any]) -> Any:
    nc = await nats.connect(url, connect_timeout=10)
    try:
        return await question(nc.jetstream(timeout=10))
    finally:
        await nc.close()


@pytest.mark.parametrize("fail", ["true", "false"])
def test_a_server_2_12_8_that_restarts_after_a_config_update_keeps_its_streams(stream_query: Any, fail: str) -> None:
    config = StreamConfig(name="S", subjects=["S.>"], allow_direct=True)
    with NatsServer(version="2.12.8") as server:

        def ask(question: Callable[[JetStreamContext], Any]) -> Any:
            return asyncio.run(_with_js(server.url, question))

        created = ask(lambda js: js.add_stream(config)).created
        ask(_publish_ten)
        server.restart()
        query = stream_query("S", servers=server.url, failOnDataLoss=fail)
        end = query.latest(query.initial())
        ask(lambda js: js.update_stream(config.evolve(description="the same stream")))
        server.restart()
        assert ask(lambda js: js.stream_info("S")).created != created, "`created` is the same"
        restarted = stream_query("S", servers=server.url, failOnDataLoss=fail)
        assert _read_on(restarted, end, lambda: ask(_publish_ten)) == list(range(11, 21))


async def _caught_up(js: JetStreamContext, name: str, messages: int) -> None:
    async with asyncio.timeout(60):
        while (await js.stream_info(name)).state.messages < messages:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("fail", ["true", "false"])
def test_a_stream_rebuilt_from_its_mirror_is_the_same_stream(
    make_stream: Any, stream_query: Any, stream_name: Any, publish: Any, with_js: Any, fail: str
) -> None:
    name, copy = make_stream(10), stream_name()

    async def rebuild(js: JetStreamContext) -> None:
        config = (await js.stream_info(name)).config
        await js.add_stream(StreamConfig(name=copy, mirror=StreamSource(name=name)))
        await _caught_up(js, copy, 10)
        await js.delete_stream(name)
        await js.update_stream(StreamConfig(name=copy))
        rebuilt = StreamConfig(name=name, mirror=StreamSource(name=copy), allow_direct=True)
        await js.add_stream(rebuilt)
        await _caught_up(js, name, 10)
        await js.delete_stream(copy)
        await js.update_stream(rebuilt.evolve(mirror=None, subjects=config.subjects, allow_batched=True))

    end = (query := stream_query(name)).latest(query.initial())
    before = with_js(lambda js: js.get_msg(name, 10)).time
    with_js(rebuild)
    assert with_js(lambda js: js.get_msg(name, 10)).time == before, "the messages have other times"
    query = stream_query(name, failOnDataLoss=fail)
    assert _read_on(query, end, lambda: publish([(f"{name}.a", b"")] * 5)) == list(range(11, 16))


def _recreate(js: JetStreamContext, name: str, messages: int) -> Any:
    async def recreate() -> None:
        config = (await js.stream_info(name)).config
        await js.delete_stream(name)
        await js.add_stream(config)
        for _ in range(messages):
            await js.publish(f"{name}.a", b"other")

    return recreate()


@pytest.mark.parametrize(("choice", "expected"), [("earliest", range(1, 16)), ("keep", range(11, 16))])
def test_on_recreate_decides_where_a_recreated_stream_continues(
    make_stream: Any, stream_query: Any, with_js: Any, choice: str, expected: range
) -> None:
    name = make_stream(10)
    end = (query := stream_query(name)).latest(query.initial())
    with_js(lambda js: _recreate(js, name, 15))
    query = stream_query(name, onRecreate=choice)
    assert query.seqs(end, query.latest(end)) == list(expected)
