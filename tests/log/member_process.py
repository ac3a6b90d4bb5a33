"""A member of a group as a process: ``member_process.py URL MODE LABEL HEARTBEAT``. SIGTERM lets it leave the group.

It copies the messages of ``IN`` to ``OUT`` and adds its label, slowly: exactly once in the mode ``once``; in the modes
``iterate`` and ``run``, one message after the other.
"""

import asyncio
import contextlib
import signal
import sys

import nats
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import log

PARTITIONS = 4


async def work(js: JetStreamContext, mode: str, label: str, heartbeat: float) -> None:
    group = log.Group(js, "IN", "g", partitions=PARTITIONS, key=[1], heartbeat=heartbeat, poll=0.05)

    async def copied(message: jsx.StoredMsg) -> jsx.BatchMessage:
        await asyncio.sleep(0.005)
        return jsx.BatchMessage(message.subject.replace("IN", "OUT"), message.data, headers={"Label": label})

    async def copy(message: jsx.StoredMsg) -> None:
        # Before Python 3.12, a call of nats-py swallows a cancellation that arrives with its answer.
        await jsx.publish_atomic(js, [await copied(message)])

    if mode == "once":
        await log.exactly_once_group(group, "OUT", copied, prefix="OUT.at", label=label, max_messages=10)
    async with group.join(label=label, every=10, seconds=0.5) as member:
        if mode == "run":
            await member.run(copy)
        async for message in member:
            await copy(message)


async def main(url: str, mode: str, label: str, heartbeat: str) -> None:
    nc = await nats.connect(url)
    working = asyncio.ensure_future(work(nc.jetstream(timeout=10), mode, label, float(heartbeat)))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await working
    await nc.close()


asyncio.run(main(*sys.argv[1:]))
