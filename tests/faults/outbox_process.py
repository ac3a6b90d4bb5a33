"""A process that transfers between accounts, with an event each, until it is killed: ``outbox_process.py URL``."""

import asyncio
import random
import sys

import nats
import nats.errors
import nats.js.errors

import jetstream_ext.kv as kvx

ACCOUNTS = [f"account.{n}" for n in range(8)]


async def ignore(_: Exception) -> None: ...


async def transfer(tx: kvx.Transaction) -> None:
    a, b = random.sample(ACCOUNTS, 2)
    found = await tx.get_many([a, b, "fee"])
    amount = random.randrange(1, 10) + int(found["fee"].value)
    for key, change in ((a, -amount), (b, amount)):
        balance, count = map(int, found[key].value.split())
        tx.put(key, b"%d %d" % (balance + change, count + 1))
    tx.publish("transfers.made", f"{a} {b} {amount}".encode())


async def main(url: str) -> None:
    nc = await nats.connect(
        url, connect_timeout=30, reconnect_time_wait=0.05, max_reconnect_attempts=-1, error_cb=ignore
    )
    kv = None
    while True:
        try:
            kv = kv or await nc.jetstream(timeout=2).key_value("B")
            await kvx.retry_transaction(kv, transfer, patience=20)
        except (nats.errors.Error, nats.js.errors.Error) as error:
            print(repr(error), file=sys.stderr)


asyncio.run(main(sys.argv[1]))
