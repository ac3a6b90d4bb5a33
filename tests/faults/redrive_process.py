"""A process that hands dead letters back: ``redrive_process.py URL``. It writes a line when it begins, and the result."""

import asyncio
import sys

import nats

from jetstream_ext import log


async def ignore(_: Exception) -> None: ...


async def main(url: str) -> None:
    nc = await nats.connect(url, reconnect_time_wait=0.02, max_reconnect_attempts=-1, error_cb=ignore)
    print("begins", flush=True)
    print(await log.redrive(nc.jetstream(timeout=5), "OUT", "out.dead", patience=30.0), flush=True)
    await nc.close()


asyncio.run(main(sys.argv[1]))
