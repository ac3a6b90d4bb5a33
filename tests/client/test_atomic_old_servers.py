"""Servers before 2.12 store the messages of a batch as separate messages, so nothing is sent to them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing

import nats
import nats.js.errors
import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.testing import NatsServer
from jetstream_ext.testing.process import HeldPort

HUB = """
leafnodes { listen: 127.0.0.1:%d }
mappings = { "$JS.API.>": "$JS.old.API.>" }
"""
LEAF = 'jetstream { domain: old }\nleafnodes { remotes [ { url: "nats-leaf://127.0.0.1:%d" } ] }'


@asynccontextmanager
async def behind(version: str) -> AsyncIterator[JetStreamContext]:
    """A stream ``S`` on a server of that version, behind a new one without JetStream."""
    with closing(HeldPort()) as port:
        hub = NatsServer(jetstream=False, config=HUB % port.port)
        port.make_way()
        async with hub, NatsServer(version=version, config=LEAF % port.port) as leaf:
            direct = await nats.connect(leaf.url, connect_timeout=10)
            await direct.jetstream().add_stream(name="S", subjects=["s.>"], allow_atomic=True)
            await direct.close()
            async with await nats.connect(hub.url, connect_timeout=10) as nc:
                js = nc.jetstream()
                async with asyncio.timeout(60):
                    while True:
                        try:
                            await js.stream_info("S")
                            break
                        except nats.js.errors.ServiceUnavailableError:
                            await asyncio.sleep(0.01)  # the leaf has not connected yet
                yield js


async def assert_refused(js: JetStreamContext, version: str) -> None:
    for call in (
        lambda: jsx.AtomicBatch(js).add("s.a", b"x"),
        lambda: jsx.AtomicBatch(js).add("s.a", b"x"),
        lambda: jsx.AtomicBatch(js).commit("s.a", b"x"),
        lambda: jsx.AtomicBatch(js).add("s.a", b"x", stream="S"),
        lambda: jsx.publish_atomic(js, [jsx.BatchMessage("s.a")] * 3),
    ):
        with pytest.raises(errors.UnsupportedFeatureError, match="nothing was sent") as caught:
            await call()
        assert (caught.value.required_api_level, caught.value.server_version) == (2, version)
    assert (await js.stream_info("S")).state.messages == 0


@pytest.mark.parametrize("version", ["2.10.26", "2.11.11"])
async def test_nothing_is_sent_to_an_old_server(version: str) -> None:
    async with NatsServer(version=version) as server, await nats.connect(server.url, connect_timeout=10) as nc:
        await nc.jetstream().add_stream(name="S", subjects=["s.>"], allow_atomic=True)
        await assert_refused(nc.jetstream(), "older" if version.startswith("2.10") else version)


async def test_nothing_is_sent_to_an_old_server_behind_a_new_one() -> None:
    # The INFO is the new server's; only the stream's answer names the server that would take the messages.
    async with behind("2.11.11") as js:
        await assert_refused(js, "2.11.11")


@pytest.mark.parametrize("version", ["2.12.0", "2.12.8"])
async def test_a_batch_commits_on_a_server_without_the_marker_behind_one_with_it(version: str) -> None:
    async with behind(version) as js:
        async with jsx.AtomicBatch(js) as batch:
            for i in range(3):
                await batch.add(f"s.{i}")
        assert batch.ack == jsx.BatchAck("S", 3, batch.batch_id, 3, domain="old")
        assert (await js.stream_info("S")).state.messages == 3


async def test_subject_expectations_are_refused_on_2_12_0(
    has_only: Callable[[Client, set[int]], Awaitable[bool]],
) -> None:
    # 2.12.0 compares them with another subject: it would store a batch whose expectation does not hold.
    async with NatsServer(version="2.12.0") as server, await nats.connect(server.url, connect_timeout=10) as nc:
        js = nc.jetstream()
        await js.add_stream(name="S", subjects=["s.>"], allow_atomic=True)
        await js.publish("s.a", b"")
        held = set(nc._subs)
        wrong = jsx.BatchMessage("s.a", expected_last_subject_seq=0)
        batch = jsx.AtomicBatch(js)
        for call in (
            lambda: jsx.publish_atomic(js, [wrong, jsx.BatchMessage("s.new")]),
            lambda: jsx.publish_atomic(js, [jsx.BatchMessage("s.new"), wrong]),
            lambda: batch.add_many([wrong]),
            lambda: batch.commit("s.a", expected_last_subject_seq=0),
        ):
            with pytest.raises(errors.UnsupportedFeatureError, match="another subject") as caught:
                await call()
            assert caught.value.server_version == "2.12.0"
            assert await has_only(nc, held)
        await batch.add("s.new")
        with pytest.raises(errors.UnsupportedFeatureError, match="not added"):
            await batch.add_many([wrong])
        assert (await batch.commit_eob()).batch_size == 1
        assert (await js.stream_info("S")).state.messages == 2


@pytest.mark.parametrize("version", ["2.12.8", "2.14.0", "2.14.2", "2.14.6"])
async def test_a_batch_of_as_many_messages_as_a_server_takes_is_committed(version: str) -> None:
    """2.14.0 to 2.14.2 count the end-of-batch marker as a message, and refuse it behind the last one."""
    async with NatsServer(version=version) as server, await nats.connect(server.url, connect_timeout=10) as nc:
        js = nc.jetstream()
        await js.add_stream(name="S", subjects=["s.>"], allow_atomic=True)
        async with jsx.AtomicBatch(js) as batch:
            await batch.add_many([("s.a", b"%d" % n) for n in range(1000)])
        assert (await jsx.publish_atomic(js, [("s.a", b"")] * 1000)).batch_size == batch.ack.batch_size == 1000
        one_more = jsx.AtomicBatch(js)
        await one_more.add_many([("s.a", b"")] * 1000)
        with pytest.raises(errors.AtomicPublishTooLargeError):
            await one_more.commit("s.a", b"")
        assert (await js.stream_info("S")).state.messages == 2000


@pytest.mark.parametrize("version", ["2.12.0", "2.12.8", "2.14.2", "2.14.6"])
async def test_counters_in_a_batch_are_refused_by_name_where_servers_store_an_empty_value(version: str) -> None:
    async with NatsServer(version=version) as server, await nats.connect(server.url, connect_timeout=10) as nc:
        js = nc.jetstream()
        await js.add_stream(name="S", subjects=["s.>"], allow_atomic=True, allow_msg_counter=True, allow_direct=True)
        add_five = jsx.BatchMessage("s.a", headers={"Nats-Incr": "+5"})
        batch = jsx.AtomicBatch(js)
        if version < "2.14.3":
            for call in (
                jsx.publish_atomic(js, [add_five]),
                batch.add_many([add_five]),
                batch.commit("s.a", headers={"Nats-Incr": "1"}),
            ):
                with pytest.raises(errors.UnsupportedFeatureError, match=r"counter .* needs nats-server 2\.14\.3"):
                    await call
            await batch.discard()
            assert (await js.stream_info("S")).state.messages == 0
        else:
            await batch.add_many([add_five] * 2)
            await batch.commit_eob()
            assert [each.data for each in await jsx.DirectGet(js, "S").scan().to_list()] == [
                b'{"val":"5"}',
                b'{"val":"10"}',
            ]
