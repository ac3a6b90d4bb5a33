"""A member of a group as a process: ``group_process.py URLS MODE LABEL``. SIGTERM lets it leave the group.

It copies the messages of ``IN`` to ``OUT`` and adds its label: exactly once in the mode ``once``; in the modes ``iterate``
and ``run`` each message after the other, at least once. In the mode ``iterate`` it leaves behind the message in its hands, in
the mode ``run`` it is stopped, and in the mode ``once`` it is cancelled.
"""

import asyncio
import contextlib
import signal
import sys

import nats
import nats.errors
import nats.js.errors
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import log

PARTITIONS = 8
HEARTBEAT = 1.0
EVERY = 20
TIMEOUT = 2.0


async def ignore(_: Exception) -> None: ...


async def work(js: JetStreamContext, mode: str, label: str, stopping: asyncio.Event) -> None:
    def output(message: jsx.StoredMsg) -> jsx.BatchMessage:
        return jsx.BatchMessage(f"OUT.{message.subject.split('.')[1]}", message.data, headers={"Label": label})

    async def copy(message: jsx.StoredMsg) -> None:
        """Publish until it is acknowledged."""
        copied = output(message)
        while True:
            with contextlib.suppress(nats.errors.Error, nats.js.errors.Error):
                await js.publish(copied.subject, copied.payload, headers={"Label": label})
                return
            await asyncio.sleep(0.05)

    group = log.Group(js, "IN", "g", partitions=PARTITIONS, key=[1], heartbeat=HEARTBEAT, poll=0.05, patience=60.0)
    if mode == "once":
        await log.exactly_once_group(group, "OUT", output, prefix="OUT.at", label=label, patience=60.0)
    async with group.join(label=label, every=EVERY, seconds=1.0) as member:
        if mode == "run":
            leaving = asyncio.ensure_future(stopping.wait())
            leaving.add_done_callback(lambda _: member.stop())
            await member.run(copy)
            return
        async for message in member:
            await copy(message)
            if stopping.is_set():
                break


async def main(urls: str, mode: str, label: str) -> None:
    nc = await nats.connect(
        urls.split(","), connect_timeout=30, reconnect_time_wait=0.05, max_reconnect_attempts=-1, error_cb=ignore
    )
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    working = asyncio.ensure_future(work(nc.jetstream(timeout=TIMEOUT), mode, label, stopping))

    def stop() -> None:
        stopping.set()
        if mode != "run":
            loop.call_later(2.0 if mode == "iterate" else 0.0, working.cancel)  # it may have no message

    loop.add_signal_handler(signal.SIGTERM, stop)
    with contextlib.suppress(asyncio.CancelledError):
        await working
    with contextlib.suppress(asyncio.CancelledError, OSError):  # nats-py raises them if the connection was just lost
        await nc.close()


asyncio.run(main(*sys.argv[1:]))
