"""A service that reads its feature flags from memory: ``python examples/14_feature_flags.py nats://localhost:4222``.

The handlers are as a web framework has them: `lifespan` opens what all requests share, and a handler gets it. With FastAPI,
pass `lifespan` to ``FastAPI(lifespan=...)``, and keep the service in ``app.state``.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

import nats
from nats.js.kv import KeyValue

import jetstream_ext.kv as kvx


@dataclass
class Service:
    bucket: KeyValue
    flags: kvx.Table


@contextlib.asynccontextmanager
async def lifespan(url: str) -> AsyncIterator[Service]:
    async with await nats.connect(url) as nc:
        bucket = await nc.jetstream().create_key_value(bucket="flags", direct=True)
        async with kvx.Table(bucket, ["shop.>"]) as flags:
            flags.on_change(report)
            yield Service(bucket, flags)


def report(change: kvx.KeyValueChange) -> None:
    print(f"{change.key} is {'gone' if change.new is None else change.new.value.decode()}")


async def get_basket(service: Service, customer: str) -> str:
    """GET /basket: two flags, and no request to a server."""
    flag = service.flags.get("shop.new-basket")
    color = service.flags.get(f"shop.color.{customer}")
    basket = "new" if flag is not None and flag.value == b"on" else "old"
    return f"the {basket} basket{'' if color is None else ' in ' + color.value.decode()}"


async def put_flag(service: Service, name: str, value: str) -> int:
    """PUT /flags/{name}: the revision in the answer lets a caller wait for the flag at any instance of the service."""
    return await service.bucket.put(f"shop.{name}", value.encode())


async def get_flag(service: Service, name: str, revision: int = 1) -> str:
    """GET /flags/{name}?revision=…: as it is at that revision, or later."""
    await service.flags.wait_for(revision)
    return service.flags[f"shop.{name}"].value.decode()


async def main(url: str) -> None:
    async with lifespan(url) as here, lifespan(url) as elsewhere:  # two instances of the service
        print(await get_basket(here, "ann"))
        revision = await put_flag(elsewhere, "new-basket", "on")
        print("the flag is", await get_flag(here, "new-basket", revision))
        print(await get_basket(here, "ann"))
        await here.flags.wait_for(await put_flag(elsewhere, "color.ann", "green"))
        print(await get_basket(here, "ann"))
        print(f"{len(here.flags)} flags at revision {here.flags.revision}, {here.flags.lag} behind")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
