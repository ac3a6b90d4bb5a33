"""Keys and events of one transaction: processes and the server are killed, and each event has its keys, and they have it."""

import asyncio
import contextlib
import os
import random
import signal
import sys
from functools import partial
from pathlib import Path

import nats.errors
import nats.js.errors
from clients import connected
from nats.js import JetStreamContext

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import BatchOutcomeUnknownError
from jetstream_ext.testing import NatsServer

FULL = bool(os.environ.get("JETSTREAM_EXT_FULL"))
KILLS = 200 if FULL else 12
ACCOUNTS = [f"account.{n}" for n in range(8)]
PROCESS = Path(__file__).with_name("outbox_process.py")


async def start(url: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, str(PROCESS), url)


async def last_seq_of(js: JetStreamContext) -> int:
    with contextlib.suppress(nats.errors.Error, nats.js.errors.Error):  # while the server starts again
        return (await js.stream_info("KV_B")).state.last_seq
    return 0


async def set_fee(fee: int, tx: kvx.Transaction) -> None:
    tx.put("fee", b"%d" % fee)


async def test_no_event_is_stored_without_its_keys_and_no_keys_without_their_event() -> None:
    with NatsServer() as server:
        async with connected(server.url) as nc:
            js = nc.jetstream(timeout=10)
            kv = await kvx.ensure_bucket(js, "B", events=["transfers.>"])
            for account in ACCOUNTS:
                await kv.put(account, b"1000 0")
            await kv.put("fee", b"1")
            workers = [await start(server.url) for _ in range(2)]
            kills, servers, stored = [0, 0], 0, 0
            try:
                while sum(kills) < KILLS:
                    async with asyncio.timeout(60):  # a new process needs some time until it writes
                        while (last_seq := await last_seq_of(js)) < stored + 20:
                            await asyncio.sleep(0.05)
                    stored = last_seq
                    await asyncio.sleep(random.uniform(0, 0.05))
                    number = random.randrange(2)
                    workers[number].send_signal(signal.SIGKILL)
                    await workers[number].wait()
                    kills[number] += 1
                    if sum(kills) % 10 == 5:
                        server.kill()
                        server.restart()
                        servers += 1
                    workers[number] = await start(server.url)
                    with contextlib.suppress(BatchOutcomeUnknownError):  # whichever it is, the fee is read anew
                        await kvx.retry_transaction(kv, partial(set_fee, sum(kills) % 3))
            finally:
                for worker in workers:
                    with contextlib.suppress(ProcessLookupError):
                        worker.kill()
                    await worker.wait()
            balances = {account: [1000, 0] for account in ACCOUNTS}
            events = 0
            async for event in jsx.DirectGet(js, "KV_B").scan(subject="transfers.>"):
                a, b, amount = event.data.decode().split()
                events += 1
                for account, change in ((a, -int(amount)), (b, int(amount))):
                    balances[account][0] += change
                    balances[account][1] += 1
            found = await kvx.get_many(kv, ACCOUNTS)
            assert {key: [*map(int, entry.value.split())] for key, entry in found.items()} == balances
            assert events > 5 * KILLS
            assert servers >= KILLS // 12
            assert min(kills) > 0
