"""Read a bucket at a point in time, read many keys at once, and run transactions: the example of ADR-31, extended.

Run it with ``python examples/key_value.py``. It starts its own server.
"""

import asyncio
from datetime import timedelta

import nats
from nats.js import JetStreamContext

import jetstream_ext.kv as kvx
from jetstream_ext.errors import HistoryUnavailableError, KeyConflictError
from jetstream_ext.testing import NatsServer


def show(entries: dict[str, kvx.KeyValueEntry] | kvx.KeyValueSnapshot) -> None:
    for key, entry in entries.items():
        print(f"  {key} = {entry.value.decode()}  (revision {entry.revision})")


async def points_in_time(js: JetStreamContext) -> None:
    # [bucket]
    kv = await kvx.ensure_bucket(js, "USERS", history=2)  # with direct gets and atomic batches
    await kv.put("1234.name", b"Bob")  # revision 1
    await kv.put("1234.surname", b"Smith")  # revision 2
    await kv.put("1234.address", b"1 Main Street")  # revision 3
    await kv.put("1234.address", b"10 Oak Lane")  # revision 4 replaces revision 3
    # [now]
    now = await kvx.snapshot(kv, ["1234.>"])
    print("now:", now.revision)
    show(now)
    then = await kvx.snapshot(kv, ["1234.>"], at=3)
    print("then:", then.revision)
    show(then)
    just_before = await kvx.snapshot(kv, at=now.time - timedelta(microseconds=1))
    assert dict(just_before) == dict(then)
    # [gone]
    await kv.put("1234.address", b"Elm Street 7")  # the history keeps two revisions, so revision 3 is gone
    try:
        await kvx.snapshot(kv, ["1234.>"], at=3)
    except HistoryUnavailableError as error:
        print(error, error.keys)
    loose = await kvx.snapshot(kv, ["1234.>"], at=3, strict=False)
    print("found:", sorted(loose), "unavailable:", loose.unavailable)
    # [many]
    print("many:")
    show(await kvx.get_many(kv, ["1234.surname", "1234.phone", "1234.name"]))
    # [end]


async def transactions(js: JetStreamContext) -> None:
    # [transaction]
    kv = await kvx.ensure_bucket(js, "SHOP")
    async with kvx.transaction(kv) as tx:
        tx.put("stock.tea", b"7")
        tx.create("order.1", b"open")
    print("written:", dict(tx.revisions))
    # [conflict]
    try:
        async with kvx.transaction(kv) as tx:
            tx.put("stock.tea", b"0")
            tx.create("order.1", b"again")
    except KeyConflictError as error:
        print(error)

    # [retry]
    async def sell(tx: kvx.Transaction, order: str) -> int:
        stock = await tx.get("stock.tea")
        left = int(stock.value) - 1
        tx.put("stock.tea", b"%d" % left)
        tx.create(order, b"open")
        return left

    orders = [kvx.retry_transaction(kv, lambda tx, n=n: sell(tx, f"order.{n}")) for n in range(2, 7)]
    sold = await asyncio.gather(*orders)
    print("stock after each sale:", sorted([sale.result for sale in sold], reverse=True))
    # [touch]
    revision = await kvx.touch(kv, "order.1", ttl=3600)
    print("revision", revision, "of order.1 expires in an hour")
    # [end]


async def main() -> None:
    async with NatsServer() as server:
        nc = await nats.connect(server.url)
        await points_in_time(nc.jetstream())
        await transactions(nc.jetstream())
        await nc.close()


if __name__ == "__main__":
    asyncio.run(main())
