"""A server or an account without JetStream: errors about a message that no server answers name this cause."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import nats
import pytest
from client_cells import each
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError
from nats.js.kv import KeyValue

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext import errors
from jetstream_ext.testing import NatsServer

Connect = Callable[..., Awaitable[Client]]
Call = Callable[[JetStreamContext], Awaitable[Any]]
ACCOUNTS = "accounts { WITH { jetstream: enabled, users = [{ user: js, password: p }] }, A { users = [{ user: a, password: p }] } }"
NONE = "the server has no JetStream"


async def write(js: JetStreamContext) -> None:
    async with kvx.transaction(KeyValue("B", "KV_B", "$KV.B.", js, direct=False)) as tx:
        tx.put("a", b"1")


# Each call, and the text before and after the cause.
CALLS: dict[str, tuple[Call, str, str]] = {
    "DirectGet.get": (
        lambda js: jsx.DirectGet(js, "S").get(1),
        "lacks allow_direct, or none of its replicas is available",
        "; enable direct gets",
    ),
    "DirectGet.scan": (
        lambda js: jsx.DirectGet(js, "S").scan().to_list(),
        "lacks allow_direct, or none of its replicas is available",
        "; enable direct gets",
    ),
    "FastPublisher.add": (
        lambda js: jsx.FastPublisher(js).add("a.b", b"1"),
        "no stream stores subject 'a.b', or the stream has no leader",
        "; nothing is stored",
    ),
    "AtomicBatch.add": (
        lambda js: jsx.AtomicBatch(js).add("a.b", b"1"),
        "no stream stores subject 'a.b', or the stream has no leader",
        "; nothing of the batch is stored",
    ),
    "ingest": (
        lambda js: jsx.ingest(js, [("a.b", b"1")], patience=2),
        "no stream stores subject 'a.b', or the stream has no leader",
        "; nothing is stored",
    ),
    "transaction": (write, "bucket 'B' does not exist, or has no leader", "; nothing was written"),
}
EVERY = each("call, before, after", CALLS.values(), together=True)
KINDS = (errors.DirectGetDisabledError, errors.NoStreamError, errors.IngestError)


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    made: list[Client] = []

    async def connect(url: str, **options: Any) -> Client:
        made.append(await nats.connect(url, connect_timeout=10, **options))
        return made[-1]

    yield connect
    for nc in made:
        await nc.close()


@pytest.fixture(scope="module")
def bare_server() -> Iterator[NatsServer]:
    with NatsServer(jetstream=False) as server:
        yield server


@EVERY
async def test_a_server_without_jetstream(
    bare_server: NatsServer, connect: Connect, call: Call, before: str, after: str
) -> None:
    js = (await connect(bare_server.url)).jetstream(timeout=30)
    with pytest.raises(KINDS, match=re.escape(f"{before}, or {NONE}{after}")):
        await call(js)


@pytest.fixture(scope="module")
def server_of_accounts() -> Iterator[NatsServer]:
    with NatsServer(config=ACCOUNTS) as server:
        yield server


@EVERY
async def test_an_account_without_jetstream(
    server_of_accounts: NatsServer, connect: Connect, call: Call, before: str, after: str
) -> None:
    js = (await connect(server_of_accounts.url, user="a", password="p")).jetstream(timeout=30)
    with pytest.raises(errors.ServerError, match="JetStream not enabled for account"):
        await jsx.features(js)
    with pytest.raises(KINDS, match=re.escape(f"{before}, or the account has no JetStream{after}")):
        await call(js)


def without_cause(name: str, before: str, after: str) -> str:
    """Return the pattern of an error on a server with JetStream, which `ingest` and reads ask for the stream."""
    if name.startswith("DirectGet"):
        return "stream 'S' does not exist"
    return "has a subject that no stream stores" if name == "ingest" else re.escape(f"{before}{after}")


@each("name", CALLS)
async def test_jetstream_is_no_cause_where_it_answers(js: JetStreamContext, name: str) -> None:
    call, *texts = CALLS[name]
    with pytest.raises((*KINDS, NotFoundError), match=without_cause(name, *texts)):
        await call(js)
