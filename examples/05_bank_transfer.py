"""Move money between keys of a bucket, concurrently and safely: ``python examples/05_bank_transfer.py URL``."""

import asyncio
import random
import sys

import nats
from nats.js.kv import KeyValue

from jetstream_ext import kv as kvx

ACCOUNTS = ["ann", "bob", "cleo"]
START = 100


async def transfer(bank: KeyValue, source: str, target: str, amount: int) -> bool:
    """Move `amount` if the balance allows it; retry if another transfer changed a balance meanwhile."""

    async def move(tx: kvx.Transaction) -> bool:
        found = await tx.get_many([source, target])  # the commit fails if either key changes meanwhile
        balance = int(found[source].value)
        if balance < amount:
            return False
        tx.put(source, b"%d" % (balance - amount))
        tx.put(target, b"%d" % (int(found[target].value) + amount))
        return True

    done = await kvx.retry_transaction(bank, move)
    return done.result


async def main(url: str) -> None:
    async with await nats.connect(url) as nc:
        js = nc.jetstream()
        bank = await kvx.ensure_bucket(js, "bank")
        for name in ACCOUNTS:
            await bank.put(name, b"%d" % START)

        pairs = [random.sample(ACCOUNTS, 2) for _ in range(12)]
        moved = await asyncio.gather(*(transfer(bank, a, b, random.randint(1, 80)) for a, b in pairs))
        balances = {name: int(entry.value) for name, entry in (await kvx.snapshot(bank)).items()}
        print(f"{sum(moved)} of {len(moved)} transfers: {balances}")
        print(f"total: {sum(balances.values())}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
