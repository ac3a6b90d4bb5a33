"""A process with a live table whose connection is cut again and again: ``table_process.py URL NAME TIMES``."""

import asyncio
import sys

import nats
import nats.errors
import nats.js.errors
from nats.js.kv import KeyValue

import jetstream_ext.kv as kvx


async def ignore(_: Exception) -> None: ...


async def put(bucket: KeyValue, key: str, value: bytes) -> int:
    while True:
        try:
            return await bucket.put(key, value)
        except (nats.errors.Error, nats.js.errors.Error):
            await asyncio.sleep(0.01)


async def main(url: str, name: str, times: int) -> None:
    connected = asyncio.Event()

    async def reconnected() -> None:
        connected.set()

    nc = await nats.connect(
        url,
        connect_timeout=30,
        reconnect_time_wait=0.01,
        max_reconnect_attempts=-1,
        error_cb=ignore,
        reconnected_cb=reconnected,
    )
    bucket = await nc.jetstream(timeout=10).key_value("B")
    async with kvx.Table(bucket) as table:
        for n in range(times):
            connected.clear()
            nc._transport._bare_io_writer.transport.abort()  # type: ignore[union-attr]
            await connected.wait()
            revision = await put(bucket, name, b"%d" % n)
            await table.wait_for(revision, timeout=60)
            assert table[name].value == b"%d" % n
    await nc.close()


asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
