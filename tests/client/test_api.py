"""Malformed and missing answers of the JetStream API: every call raises the same error."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from itertools import chain, repeat
from typing import Any

import nats
import nats.errors
import nats.js.errors
import pytest
from client_cells import each
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext.errors import ResponseError
from jetstream_ext.log import LogReader, Time
from jetstream_ext.testing import NatsServer

CALLS: dict[str, Callable[[JetStreamContext], Awaitable[Any]]] = {
    "reset": lambda js: jsx.reset_consumer(js, "S", "c"),
    "reset to a time": lambda js: jsx.reset_consumer(js, "S", "c", time=datetime.now(UTC)),
    "health": lambda js: jsx.source_health(js, "S"),
    "ensure": lambda js: jsx.ensure_stream(js, name="S"),
    "features": jsx.features,
}
OTHERS: dict[str, Callable[[JetStreamContext], Awaitable[Any]]] = {
    "batch": lambda js: jsx.publish_atomic(js, [("S.a", b"")]),
    "get": lambda js: jsx.DirectGet(js, "S").get(1),
    "scan": lambda js: jsx.DirectGet(js, "S").scan(confirm=True, min_seq=7).to_list(),
    "log": lambda js: LogReader(js, "S").open(),
}
RESET = ("reset", "reset to a time")
NEW = b'"metadata":{"_nats.level":"5"}'


@each(
    "answer, calls",
    [
        (b"", tuple(CALLS)),
        (b"x", tuple(CALLS)),
        (b"[]", tuple(CALLS)),
        (b'{"error":7}', tuple(CALLS)),
        (b'{"config":7,"state":7}', (*RESET, "health", "ensure")),
        (b'{"config":{"metadata":7},"state":{}}', RESET),
        (b'{"config":{%b}}' % NEW, RESET),
        (b'{"config":{%b},"state":{"last_seq":null}}' % NEW, RESET),
        (b'{"config":{%b},"state":{"last_seq":1}}' % NEW, RESET),
        (b'{"config":{%b},"state":{"last_seq":1},"message":{}}' % NEW, RESET),
        (b'{"config":{"name":"S","mirror":7},"state":{}}', ("health", "ensure")),
        (b'{"config":{"name":"S","sources":[{}]},"state":{}}', ("health", "ensure")),
        (b'{"config":{"name":"S","sources":[{"name":"S"}]},"sources":[7]}', ("health",)),
        (b'{"config":{"name":"S","sources":[{"name":"S"}]},"sources":[{"name":"S","active":null}]}', ("health",)),
        (b'{"config":{"name":"S","sources":[{"name":"S","consumer":{}}]}}', ("health",)),
        (b'{"config":{"name":"S","sources":[{"name":"S 0\\r\\nPUB x 0\\r\\n"}]}}', ("health",)),
        (b'{"config":{"name":"S","sources":[{"name":"S","external":{"api":"x 0\\r\\nPUB x"}}]}}', ("health",)),
        (b'{"config":{"name":"S","sources":[{"name":"S","consumer":{"name":"c d"}}]}}', ("health",)),
    ],
)
async def test_a_malformed_answer_is_a_response_error(
    nc: Client, stream_name: Callable[[], str], leak_check: Any, answer: bytes, calls: tuple[str, ...]
) -> None:
    prefix = stream_name()

    async def reply(msg: Msg) -> None:
        await msg.respond(answer)

    sub = await nc.subscribe(f"{prefix}.>", cb=reply)
    for name in calls:
        with pytest.raises(ResponseError):
            await CALLS[name](nc.jetstream(prefix=prefix, timeout=20))
    await sub.unsubscribe()
    await leak_check.assert_clean()


@each("what, call", CALLS.items())
@each("code", [10014, 10059])  # a consumer, a stream
async def test_not_found_is_that_error_whatever_the_request_was(
    nc: Client,
    stream_name: Callable[[], str],
    what: str,
    call: Callable[[JetStreamContext], Awaitable[Any]],
    code: int,
) -> None:
    prefix = stream_name()

    async def reply(msg: Msg) -> None:
        await msg.respond(b'{"error":{"code":404,"err_code":%d,"description":"odd"}}' % code)

    sub = await nc.subscribe(f"{prefix}.>", cb=reply)
    with pytest.raises(nats.js.errors.NotFoundError):
        await call(nc.jetstream(prefix=prefix, timeout=20))
    await sub.unsubscribe()


@each("what, call", (CALLS | OTHERS).items())
async def test_closing_the_connection_ends_the_wait(
    nc: Client,
    server: NatsServer,
    stream_name: Callable[[], str],
    what: str,
    call: Callable[[JetStreamContext], Awaitable[Any]],
) -> None:
    prefix, asked = stream_name(), asyncio.Event()

    async def say_nothing(msg: Msg) -> None:
        asked.set()

    await nc.subscribe(f"{prefix}.>", cb=say_nothing)
    await nc.request("$JS.API.INFO", timeout=30)  # nats-py's flush() overtakes the subscription
    other = await nats.connect(server.url, connect_timeout=10)
    waiting = asyncio.ensure_future(call(other.jetstream(prefix=prefix, timeout=1000)))
    async with asyncio.timeout(60):
        await asked.wait()
        await other.close()
        with pytest.raises((nats.errors.ConnectionClosedError, nats.js.errors.ServiceUnavailableError)):
            await waiting


@each("version", ["2.11.0", "2.11.11", "2.12.8", "2.15.1"])
async def test_a_time_finds_the_same_message_on_every_server(version: str) -> None:
    """2.11 answers with an earlier or a later message, or none, where sequences were deleted."""
    async with NatsServer(version=version) as server, await nats.connect(server.url, connect_timeout=10) as nc:
        js = nc.jetstream(timeout=10)
        for storage in ("memory", "file"):
            for number, deleted in enumerate([(), (4, 5, 6), (4, 5, 6, 10), (4, 5, 6, 9, 10)]):
                name = f"{storage}{number}"
                await js.add_stream(name=name, subjects=[f"{name}.*"], allow_direct=True, storage=storage)
                for seq in range(1, 11):
                    await js.publish(f"{name}.{seq % 2}")
                direct = jsx.DirectGet(js, name)
                times = {seq: (await direct.get(seq)).time for seq in range(1, 11)}
                for seq in deleted:
                    await js.delete_msg(name, seq)
                for when in (datetime(1970, 1, 1, tzinfo=UTC), *times.values(), times[10] + timedelta(hours=1)):
                    left = [seq for seq in times if seq not in deleted and times[seq] >= when]
                    assert await LogReader(js, name, start=Time(when)).open() == min(left, default=11)
                    odd = LogReader(js, name, start=Time(when), subject=f"{name}.1")
                    assert await odd.open() == min((seq for seq in left if seq % 2), default=11)


NO_LEADER = b'{"error":{"code":503,"err_code":10008,"description":"JetStream system temporarily unavailable"}}'


@each("call", [CALLS["ensure"], OTHERS["log"]])
async def test_a_read_in_an_election_waits_for_the_leader(
    nc: Client, stream_name: Callable[[], str], leak_check: Any, call: Callable[[JetStreamContext], Awaitable[Any]]
) -> None:
    """Whether a server says that there is no leader, or none answers, depends on who leads the cluster."""
    prefix, answers = stream_name(), chain([NO_LEADER, NO_LEADER], repeat(b"[]"))

    async def reply(msg: Msg) -> None:
        await msg.respond(next(answers))

    sub = await nc.subscribe(f"{prefix}.>", cb=reply)
    with pytest.raises(ResponseError):  # the answer of the leader
        await call(nc.jetstream(prefix=prefix, timeout=20))
    await sub.unsubscribe()
    await leak_check.assert_clean()
