"""A message that is too large for the server, its headers included, is refused before it is sent."""

import base64
import contextlib
import itertools
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import nats
import nats.errors
import nats.js.errors
import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.kv import KeyValue

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import IngestError, MessageTooLargeError
from jetstream_ext.log import LogReader, OffsetStore, exactly_once
from jetstream_ext.testing import NatsServer


async def bucket(nc: Client, name: str) -> KeyValue:
    """Create a bucket whose stream also takes fast batches."""
    kv = await kvx.enable(await nc.jetstream(timeout=30).create_key_value(bucket=name), ttl=True)
    config = (await kv._js.stream_info(kv._stream)).config
    await kv._js.update_stream(config.evolve(allow_batched=True))
    return kv


LIMIT = 4096  # of the server for the tests below, in bytes
WIDEST = 450  # bytes of headers that a write adds at most, and 200


@dataclass
class AnyReader:
    """A reader of a stream whose name is as long as a test wants, for positions of any size."""

    stream: str
    name: str | None = "r"
    tail: bool = False
    created: str | None = ""
    position: int | None = 1

    async def open(self) -> int:
        return 1

    async def read(self, max_messages: int = 1, timeout: float | None = None) -> list[jsx.StoredMsg]:
        return []


Sized = Callable[[KeyValue, int], Awaitable[object]]


async def touch_value(kv: KeyValue, size: int) -> None:
    await kv.put("k", bytes(size))
    await kvx.touch(kv, "k", 60)


async def touch_value_with_headers(kv: KeyValue, size: int) -> None:
    await kv._js.publish(f"{kv._pre}k", bytes(size - 100), headers={"X-Owner": "é" * 20})
    await kvx.touch(kv, "k", jsx.NEVER)


async def put(kv: KeyValue, size: int) -> None:
    async with kvx.transaction(kv) as tx:
        tx.put("k", bytes(size))


async def put_with_a_ttl(kv: KeyValue, size: int) -> None:
    async with kvx.transaction(kv) as tx:
        tx.put("k", bytes(size), ttl=60)


async def create_with_a_ttl(kv: KeyValue, size: int) -> None:
    await kv.purge("k")
    async with kvx.transaction(kv) as tx:
        tx.create("k", bytes(size), ttl=60)


async def update_with_a_ttl(kv: KeyValue, size: int) -> None:
    last = await kv.put("k", b"")
    async with kvx.transaction(kv) as tx:
        tx.update("k", bytes(size), last=last, ttl=60)


async def put_in_a_retried_transaction(kv: KeyValue, size: int) -> None:
    async def fn(tx: kvx.Transaction) -> None:
        await tx.get_many(["a", "b", "c"])  # with one message, the commit needs a fence
        tx.put("k", bytes(size), ttl=60)

    await kvx.retry_transaction(kv, fn)


async def delete_behind_a_long_key(kv: KeyValue, size: int) -> None:
    async with kvx.transaction(kv) as tx:
        await tx.get("x" * (size - 100))
        tx.delete("k")


async def purge_behind_a_long_key(kv: KeyValue, size: int) -> None:
    async with kvx.transaction(kv) as tx:
        await tx.get("x" * (size - 100))
        tx.purge("k", ttl=60)


async def publish_atomically(kv: KeyValue, size: int) -> None:
    await jsx.publish_atomic(kv._js, [jsx.BatchMessage(f"{kv._pre}k", bytes(size))])


async def commit_with_a_message(kv: KeyValue, size: int) -> None:
    async with jsx.AtomicBatch(kv._js) as batch:
        await batch.add(f"{kv._pre}k", b"1")
        await batch.commit(f"{kv._pre}k", bytes(size))


async def publish_fast(kv: KeyValue, size: int) -> None:
    async with jsx.FastPublisher(kv._js) as publisher:
        await publisher.add(f"{kv._pre}k", b"1")
        await publisher.add(f"{kv._pre}k", bytes(size), msg_ttl=60)


async def ingest(kv: KeyValue, size: int) -> None:
    ids = itertools.count((await kv._js.stream_info(kv._stream)).state.last_seq or 0)
    messages = [(f"{kv._pre}k", b"1"), (f"{kv._pre}k", bytes(size))]
    try:
        await jsx.ingest(kv._js, messages, msg_id=lambda _: f"id-{next(ids)}")
    except IngestError as error:
        raise error.__cause__ or error from None


async def commit_a_position(kv: KeyValue, size: int) -> None:
    offsets = OffsetStore(kv._js, kv._name)
    await offsets.fetch("k")
    await offsets.commit(AnyReader("s" * (size - 100)), name="k")


async def work(kv: KeyValue, size: int) -> None:
    await kv._js.purge_stream(kv._stream, subject=f"{kv._pre}at.w")

    def make(_: jsx.StoredMsg) -> jsx.BatchMessage:
        return jsx.BatchMessage(f"{kv._pre}k", bytes(size), headers={"X": "1"}, msg_ttl=60)

    reader = LogReader(kv._js, f"{kv._name}-in")
    await exactly_once(reader, kv._stream, make, name="w", prefix=f"{kv._pre}at", patience=10)


async def largest_since(kv: KeyValue, seq: int) -> int:
    """Return the size of the largest message stored after `seq`, as the server counts it for its limit."""
    sizes = []
    last = (await kv._js.stream_info(kv._stream)).state.last_seq
    for number in range(seq + 1, last + 1):
        with contextlib.suppress(nats.js.errors.NotFoundError):
            answer = await kv._js._api_request(
                f"$JS.API.STREAM.MSG.GET.{kv._stream}", json.dumps({"seq": number}).encode()
            )
            found = answer["message"]
            sizes.append(sum(len(base64.b64decode(found.get(part) or "")) for part in ("hdrs", "data")))
    return max(sizes)


@pytest.fixture(scope="module")
def small_server() -> Iterator[NatsServer]:
    with NatsServer(config=f"max_payload: {LIMIT}") as server:
        yield server


# How many bytes below the limit a write is refused: a batch leaves room for the longest number.
SPARE: dict[Sized, int] = {
    touch_value: 0,
    touch_value_with_headers: 0,
    put: 40,
    put_with_a_ttl: 40,
    create_with_a_ttl: 40,
    update_with_a_ttl: 40,
    put_in_a_retried_transaction: 40,
    delete_behind_a_long_key: 40,
    purge_behind_a_long_key: 40,
    publish_atomically: 40,
    commit_with_a_message: 40,
    publish_fast: 0,
    ingest: 0,
    commit_a_position: 0,
    work: 40,
}
WINDOW = 6  # sizes on each side of the first that is refused of which every one is tried


async def test_message_of_any_size_near_the_limit_is_stored_or_refused(
    small_server: NatsServer, stream_name: Callable[[], str]
) -> None:
    nc = await nats.connect(small_server.url, allow_reconnect=False, connect_timeout=10)
    try:
        js = nc.jetstream(timeout=30)
        for write, spare in SPARE.items():
            kv = await bucket(nc, stream_name())
            await js.add_stream(name=f"{kv._name}-in", subjects=[f"{kv._name}-in"], allow_direct=True)
            await js.publish(f"{kv._name}-in", b"1")
            # From here on a revision has three digits, so that each write adds as many bytes as the one before.
            await jsx.publish_atomic(js, [(f"{kv._pre}first", b"")] * 100)
            stored: list[int] = []

            async def is_refused(
                size: int, write: Sized = write, kv: KeyValue = kv, stored: list[int] = stored
            ) -> bool:
                before = (await js.stream_info(kv._stream)).state.last_seq
                try:
                    await write(kv, size)
                except nats.errors.MaxPayloadError:
                    return True
                finally:
                    assert nc.is_connected, f"{write.__name__}: the server closed the connection at {size} bytes"
                stored.append(await largest_since(kv, before))
                return False

            low, high = LIMIT - WIDEST, LIMIT
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if await is_refused(middle) else (middle, high)
            refused = [size for size in range(high - WINDOW, high + WINDOW) if await is_refused(size)]
            assert refused == list(range(high, high + WINDOW)), f"{write.__name__}: larger ones are stored"
            assert LIMIT - spare <= max(stored) <= LIMIT, write.__name__
    finally:
        await nc.close()


async def test_value_of_any_size_near_the_limit_of_the_bucket_is_stored_or_named(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    kv = await kvx.enable(await js.create_key_value(bucket=stream_name(), max_value_size=1000), ttl=True)
    refusals: list[str] = []
    for size in range(800, 1001):

        async def fn(tx: kvx.Transaction, size: int = size) -> None:
            tx.put("small", b"1")
            tx.put("large", bytes(size), ttl=60)
            tx.put("last", b"1")

        try:
            await kvx.retry_transaction(kv, fn)
        except MessageTooLargeError as error:
            refusals.append(str(error))
        else:
            assert not refusals, f"{size} bytes are stored, although fewer were refused"
    assert 0 < len(refusals) < 200
    assert all("the message of key 'large' has" in text for text in refusals)
