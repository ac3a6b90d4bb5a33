"""Bill orders by four processes, one of which is killed again and again: ``python examples/15_group.py URL``."""

import asyncio
import random
import sys

import nats

import jetstream_ext as jsx
from jetstream_ext import log

CUSTOMERS, ORDERS = 20, 3_000


async def bill(order: jsx.StoredMsg) -> jsx.BatchMessage:
    await asyncio.sleep(0.01)  # the work
    return jsx.BatchMessage(order.subject.replace("placed.", "fees."), order.data)


async def work(url: str) -> None:
    async with await nats.connect(url) as nc:
        # The key of an order is its customer. The members' keys have a TTL of 2 s.
        group = log.Group(nc.jetstream(), "PLACED", "billing", partitions=12, key=[1], heartbeat=0.5)
        await log.exactly_once_group(group, "FEES", bill, prefix="at", max_messages=10)


async def by_customer(reader: log.LogReader) -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = {f"customer{n}": [] for n in range(CUSTOMERS)}
    async for msg in reader:
        found[msg.subject.split(".")[1]].append(msg.data)
    return found


async def main(url: str) -> None:
    async with await nats.connect(url) as nc:
        js = nc.jetstream()
        await jsx.ensure_stream(js, name="PLACED", subjects=["placed.*"], allow_direct=True, allow_batched=True)
        await jsx.ensure_stream(js, name="FEES", subjects=["fees.*", "at.*.*"], allow_direct=True, allow_atomic=True)
        bills = log.LogReader(js, "FEES", start=log.New(), subject="fees.*", tail=True)
        await bills.open()
        await jsx.ingest(js, ((f"placed.customer{n % CUSTOMERS}", b"%d" % n) for n in range(ORDERS)))

        member = sys.executable, __file__, url, "work"
        members = [await asyncio.create_subprocess_exec(*member) for _ in range(4)]
        for number in range(ORDERS):
            await anext(bills)
            if number % 1_000 == 500:
                members.append(await asyncio.create_subprocess_exec(*member))
                members.pop(random.randrange(4)).kill()
                print(f"{number} bills: killed a member")
        for process in members:
            process.kill()
        ordered = await by_customer(log.LogReader(js, "PLACED"))
        print("billed once and in order:", ordered == await by_customer(log.LogReader(js, "FEES", subject="fees.*")))


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1]) if sys.argv[2:] else main(sys.argv[1]))
