"""Publish each order's event in the commit of its keys, and bill it once: ``python examples/16_outbox.py URL``."""

import asyncio
import contextlib
import random
import sys

import nats
from nats.js import JetStreamContext
from nats.js.kv import KeyValue

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext import log


async def order(tx: kvx.Transaction, number: int) -> None:
    found = await tx.get_many(["seats", f"order.{number}"])
    seats = int(found["seats"].value)
    if seats and f"order.{number}" not in found:
        tx.put("seats", b"%d" % (seats - 1))
        tx.put(f"order.{number}", b"booked")
        tx.publish("bookings.made", b"%d" % number)


async def take_orders(kv: KeyValue) -> None:
    for number in range(200):
        await kvx.retry_transaction(kv, lambda tx, n=number: order(tx, n))


def bill(event: jsx.StoredMsg) -> jsx.BatchMessage:
    return jsx.BatchMessage(f"bills.{event.data.decode()}", b"20 EUR")


async def send_bills(js: JetStreamContext, *, tail: bool) -> None:
    reader = log.LogReader(js, "KV_THEATRE", subject="bookings.>", tail=tail)
    await log.exactly_once(reader, "INVOICES", bill, name="biller", prefix="bills.at", max_messages=10)


async def main(url: str) -> None:
    async with await nats.connect(url) as nc:
        js = nc.jetstream()
        kv = await kvx.ensure_bucket(js, "THEATRE", events=["bookings.>"])
        await kv.put("seats", b"150")
        await jsx.ensure_stream(js, name="INVOICES", subjects=["bills.>"], allow_direct=True, allow_atomic=True)
        for _ in range(5):  # a service and a worker end at a random moment, and start again
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(random.uniform(0.01, 0.1)):
                    await asyncio.gather(take_orders(kv), send_bills(js, tail=True))
        await take_orders(kv)
        await send_bills(js, tail=False)
        booked = await kvx.snapshot(kv, ["order.>"])
        bills = [bill.subject async for bill in log.LogReader(js, "INVOICES", subject="bills.*")]
        print(f"{len(booked)} booked, {(await kv.get('seats')).value.decode()} seats left, {len(bills)} bills")
        print("each booking has one bill:", {f"bills.{key[6:]}" for key in booked} == set(bills))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
