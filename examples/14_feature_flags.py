"""A service that reads feature flags from memory: ``python examples/14_feature_flags.py nats://localhost:4222``.

`lifespan` opens what all requests share, as a web framework wants it: ``FastAPI(lifespan=...)``.
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
        bucket = await kvx.ensure_bucket(nc.jetstream(), "flags")
        async with kvx.Table(bucket, ["shop.>"]) as flags:
            yield Service(bucket, flags)


async def get_basket(service: Service) -> str:
    """GET /basket: no request to a server."""
    flag = service.flags.get("shop.new-basket")
    return "the new basket" if flag is not None and flag.value == b"on" else "the old basket"


async def put_flag(service: Service, name: str, value: str) -> int:
    """PUT /flags/{name}: with the revision, a caller can wait for the flag at any instance of the service."""
    return await service.bucket.put(f"shop.{name}", value.encode())


async def get_flag(service: Service, name: str, revision: int = 1) -> str:
    """GET /flags/{name}?revision=…: the flag as it is at that revision, or later."""
    await service.flags.wait_for(revision)
    return service.flags[f"shop.{name}"].value.decode()


async def main(url: str) -> None:
    async with lifespan(url) as here, lifespan(url) as elsewhere:  # two instances of the service
        here.flags.on_change(lambda change: print(f"changed: {change.key}"))
        print(await get_basket(here))
        revision = await put_flag(elsewhere, "new-basket", "on")
        print("the flag is", await get_flag(here, "new-basket", revision))
        print(await get_basket(here))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
