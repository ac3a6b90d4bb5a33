"""A stream that was deleted and created again is told from one whose creation time changed."""

from collections.abc import Awaitable, Callable
from typing import Any

import nats
import nats.errors
import nats.js.errors
import pytest
from client_cells import each
from nats.js import JetStreamContext
from nats.js.api import StreamConfig
from nats.js.errors import NotFoundError

from jetstream_ext.client.api import Api, check_same_stream, stream_state
from jetstream_ext.client.connection import Context
from jetstream_ext.errors import StreamRecreatedError
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.testing import NatsServer, ReferenceServer

Change = Callable[[JetStreamContext], Awaitable[Any]]


async def create(js: JetStreamContext, messages: int = 3) -> StreamState:
    await js.add_stream(StreamConfig(name="S", subjects=["S.>"], max_msgs_per_subject=1))
    for number in range(messages):
        await js.publish(f"S.{number}")
    return await stream_state(Context(js), "S")


async def publish_first_again(js: JetStreamContext) -> None:
    await js.publish("S.0")


async def publish_last_again(js: JetStreamContext) -> None:
    await js.publish("S.2")


async def delete_last(js: JetStreamContext) -> None:
    await js.delete_msg("S", 3)


async def purge(js: JetStreamContext) -> None:
    await js.purge_stream("S")


async def nothing(js: JetStreamContext) -> None:
    pass


@each("change", [nothing, publish_first_again, publish_last_again, delete_last, purge])
async def test_stream_whose_creation_time_changed_on_restart_is_the_same(change: Change) -> None:
    with NatsServer(version="2.12.8") as server:
        async with await nats.connect(server.url, connect_timeout=10) as nc:
            await create(nc.jetstream())
        server.restart()
        async with await nats.connect(server.url, connect_timeout=10) as nc:
            js = nc.jetstream(timeout=10)
            before = await stream_state(Context(js), "S")
            await change(js)
            await js.update_stream((await js.stream_info("S")).config.evolve(description="the same stream"))
        server.restart()
        async with await nats.connect(server.url, connect_timeout=10) as nc:
            context = Context(nc.jetstream(timeout=10))
            now = await stream_state(context, "S")
            assert now.created != before.created
            assert await check_same_stream(context, before, now) == now
            assert (await check_same_stream(Api(context), before)).created == now.created


@pytest.mark.parametrize("server", ["2.10.26", "2.12.8", "2.15.1", "reference"])
async def test_stream_created_again_is_another_one(server: str) -> None:
    async with (
        ReferenceServer() if server == "reference" else NatsServer(version=server) as running,
        await nats.connect(running.url, connect_timeout=10) as nc,
    ):
        js = nc.jetstream(timeout=10)
        for messages in (0, 2, 3, 4):
            before = await create(js)
            assert [seq for seq, _ in before.ends] == [3, 1]
            await js.delete_stream("S")
            with pytest.raises(NotFoundError):
                await check_same_stream(Context(js), before)
            now = await create(js, messages)
            why = "deleted and created again" if messages else "are gone"
            with pytest.raises(StreamRecreatedError, match=why) as caught:
                await check_same_stream(Context(js), before, timeout=10)
            error = caught.value
            assert (error.stream, error.expected, error.found) == ("S", before.created, now.created), messages
            await js.delete_stream("S")


async def test_stream_without_a_message_to_compare_counts_as_another_one(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    await js.add_stream(name=name, subjects=[name])
    before = await stream_state(Context(js), name)
    await js.delete_stream(name)
    await js.add_stream(name=name, subjects=[name])
    with pytest.raises(StreamRecreatedError, match="so it counts as another one"):
        await check_same_stream(Context(js), before)
