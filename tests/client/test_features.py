"""The features that a server reports."""

import dataclasses
import json
from collections.abc import Callable

import nats
import nats.js.errors
import pytest
from client_cells import each
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext.errors import RequestTimeoutError
from jetstream_ext.testing import NatsServer


async def test_the_newest_server_has_every_feature(js: JetStreamContext, server: NatsServer) -> None:
    found = await jsx.features(js)
    assert found.server_version == server.version
    assert found.api_level >= 5
    flags = [getattr(found, field.name) for field in dataclasses.fields(found) if field.type == "bool"]
    assert len(flags) == 7
    assert all(flags)
    assert hash(found) == hash(await jsx.features(js))
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.atomic = False  # type: ignore[misc]


@each(
    "level, has",
    [
        (None, []),
        (0, []),
        (1, ["direct_batch", "msg_ttl"]),
        (2, ["direct_batch", "msg_ttl", "atomic"]),
        (3, ["direct_batch", "msg_ttl", "atomic"]),
        (4, ["direct_batch", "msg_ttl", "atomic", "atomic_eob", "fast_ingest", "consumer_reset", "durable_source"]),
    ],
)
async def test_the_api_level_decides_the_features(
    nc: Client, stream_name: Callable[[], str], level: int | None, has: list[str]
) -> None:
    prefix = stream_name()

    async def answer(msg: Msg) -> None:
        await msg.respond(json.dumps({"api": {} if level is None else {"level": level}}).encode())

    await nc.subscribe(f"{prefix}.INFO", cb=answer)
    found = await jsx.features(nc.jetstream(prefix=prefix))
    assert found.api_level == (level or 0)
    assert [name for name, value in dataclasses.asdict(found).items() if value is True] == has


async def test_a_server_without_jetstream_is_an_error() -> None:
    async with NatsServer(jetstream=False) as server, await nats.connect(server.url, connect_timeout=10) as nc:
        with pytest.raises(nats.js.errors.ServiceUnavailableError):
            await jsx.features(nc.jetstream())


async def test_without_the_permission_to_ask_the_server_info_is_used() -> None:
    config = (
        "jetstream { domain: hub }\n"
        "authorization { users: [ { user: u, password: p, permissions: "
        "{ publish: { deny: ['$JS.API.INFO', '$JS.hub.API.INFO'] } } } ] }"
    )

    async def quiet(error: Exception) -> None:
        pass  # the server reports a denied publish to the connection, not to the request

    async with (
        NatsServer(config=config) as server,
        await nats.connect(server.url, user="u", password="p", connect_timeout=10, error_cb=quiet) as nc,
    ):
        found = await jsx.features(nc.jetstream(), timeout=0.2)
        assert found.api_level >= 5  # from the connected server's INFO
        with pytest.raises(RequestTimeoutError):
            await jsx.features(nc.jetstream(domain="hub"), timeout=0.2)
