"""A message that is too large for the server, its headers included, is refused before it is sent."""

from collections.abc import AsyncIterator, Awaitable, Callable

import nats
import nats.errors
import pytest
from nats.aio.client import Client
from nats.js.api import StreamConfig
from nats.js.kv import KeyValue

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import IngestError
from jetstream_ext.log import LogReader, exactly_once
from jetstream_ext.testing import NatsServer

Write = Callable[[Client, str, int], Awaitable[object]]


@pytest.fixture
async def fragile(server: NatsServer) -> AsyncIterator[Client]:
    """A connection that does not come back once the server has closed it."""

    async def quiet(error: Exception) -> None:
        pass

    nc = await nats.connect(server.url, allow_reconnect=False, error_cb=quiet, connect_timeout=10)
    try:
        yield nc
    finally:
        await nc.close()


async def bucket(nc: Client, name: str) -> KeyValue:
    return await kvx.enable(await nc.jetstream().create_key_value(bucket=name), ttl=True)


async def touch(nc: Client, name: str, size: int) -> None:
    kv = await bucket(nc, name)
    await kv.put("k", bytes(size))
    await kvx.touch(kv, "k", 60, timeout=1)


async def put_in_a_transaction(nc: Client, name: str, size: int) -> None:
    async with kvx.transaction(await bucket(nc, name)) as tx:
        tx.put("k", bytes(size), ttl=60)


async def stream(nc: Client, name: str) -> None:
    config = StreamConfig(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_atomic=True, allow_msg_ttl=True)
    await jsx.ensure_stream(nc.jetstream(), config.evolve(allow_batched=True))


async def publish_atomically(nc: Client, name: str, size: int) -> None:
    await stream(nc, name)
    await jsx.publish_atomic(nc.jetstream(), [jsx.BatchMessage(f"{name}.a", bytes(size))])


async def commit_with_a_message(nc: Client, name: str, size: int) -> None:
    await stream(nc, name)
    async with jsx.AtomicBatch(nc.jetstream()) as batch:
        await batch.add(f"{name}.a", b"1")
        await batch.commit(f"{name}.a", bytes(size))


async def publish_fast(nc: Client, name: str, size: int) -> None:
    await stream(nc, name)
    async with jsx.FastPublisher(nc.jetstream()) as publisher:
        await publisher.add(f"{name}.a", b"1")
        await publisher.add(f"{name}.a", bytes(size), msg_ttl=60)


async def ingest(nc: Client, name: str, size: int) -> None:
    await stream(nc, name)
    await jsx.ingest(nc.jetstream(), [(f"{name}.a", b"1"), (f"{name}.a", bytes(size))], msg_id=lambda *_: "id")


async def work_exactly_once(nc: Client, name: str, size: int) -> None:
    await stream(nc, name)
    await nc.jetstream().publish(f"{name}.in", b"1")
    reader = LogReader(nc.jetstream(), name, subject=f"{name}.in")
    await exactly_once(
        reader, name, lambda _: jsx.BatchMessage(f"{name}.out", bytes(size)), name="w", prefix=f"{name}.at", patience=10
    )


@pytest.mark.parametrize(
    "write",
    [
        touch,
        put_in_a_transaction,
        publish_atomically,
        commit_with_a_message,
        publish_fast,
        ingest,
        work_exactly_once,
    ],
)
async def test_write_within_a_few_bytes_of_the_limit_keeps_the_connection(
    fragile: Client, stream_name: Callable[[], str], write: Write
) -> None:
    with pytest.raises(nats.errors.Error) as caught:
        await write(fragile, stream_name(), fragile.max_payload - 5)
    assert fragile.is_connected, "the server closed the user's connection"
    assert isinstance(caught.value, nats.errors.MaxPayloadError | IngestError)
