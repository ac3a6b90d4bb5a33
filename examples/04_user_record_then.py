"""Read a user's record at an earlier revision: ``python examples/04_user_record_then.py nats://localhost:4222``."""

import asyncio
import sys

import nats

import jetstream_ext as jsx
from jetstream_ext import kv as kvx


def show(when: str, entries: kvx.KeyValueSnapshot) -> None:
    print(when, {key: entry.value.decode() for key, entry in sorted(entries.items())})


async def main(url: str) -> None:
    async with await nats.connect(url) as nc:
        js = nc.jetstream()
        users = await kvx.ensure_bucket(js, "users", history=10)
        await users.put("1234.name", b"Ann")
        await users.put("1234.address", b"Alder Street 1")
        before = await users.put("1234.email", b"ann@example.org")

        # The user moves and removes her email address, and another user is added.
        await users.put("1234.address", b"Birch Road 2")
        await users.delete("1234.email")
        await users.put("5678.name", b"Bob")

        show("now: ", await kvx.snapshot(users, ["1234.>"]))
        show("then:", await kvx.snapshot(users, ["1234.>"], at=before))

        # A bucket with history 1 does not keep the old value, so the read raises an error.
        short = await kvx.ensure_bucket(js, "users_short")
        then = await short.put("1234.name", b"Ann")
        await short.put("1234.name", b"Anna")
        try:
            await kvx.snapshot(short, at=then)
        except jsx.errors.HistoryUnavailableError as error:
            print("unavailable:", *error.keys)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
