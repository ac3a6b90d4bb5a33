"""Bill orders by four processes, of which one is killed again and again: ``python examples/15_group.py URL``."""

import asyncio
import random
import sys

import nats

import jetstream_ext as jsx
from jetstream_ext import log

CUSTOMERS, ORDERS, MEMBERS = 20, 3_000, 4


def orders(js: nats.js.JetStreamContext) -> log.Group:
    # The key is the customer. A short heartbeat finds killed members soon.
    return log.Group(js, "ORDERS", "billing", partitions=12, key=[1], heartbeat=0.5)


async def bill(order: jsx.StoredMsg) -> jsx.BatchMessage:
    await asyncio.sleep(0.01)  # the work
    return jsx.BatchMessage(order.subject.replace("orders.", "bills."), order.data)


async def work(url: str) -> None:
    async with await nats.connect(url) as nc:
        await log.exactly_once_group(orders(nc.jetstream()), "BILLS", bill, prefix="billed", max_messages=10)


async def start(url: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, __file__, url, "work")


async def main(url: str) -> None:
    async with await nats.connect(url) as nc:
        js = nc.jetstream()
        await jsx.ensure_stream(js, name="ORDERS", subjects=["orders.*"], allow_direct=True, allow_batched=True)
        subjects = ["bills.*", "billed.*.*"]  # each partition has its position next to its outputs
        await jsx.ensure_stream(js, name="BILLS", subjects=subjects, allow_direct=True, allow_atomic=True)
        done = await jsx.ingest(js, ((f"orders.customer{n % CUSTOMERS}", b"%d" % n) for n in range(ORDERS)))
        members = [await start(url) for _ in range(MEMBERS)]
        bills: list[jsx.StoredMsg] = []
        async for found in log.LogReader(js, "BILLS", subject="bills.*", tail=True):
            bills.append(found)
            if len(bills) % 500 == 0 and len(bills) < ORDERS:
                victim = members.pop(random.randrange(MEMBERS))
                victim.kill()
                members.append(await start(url))
        print(done)


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1]) if sys.argv[2:] else main(sys.argv[1]))
