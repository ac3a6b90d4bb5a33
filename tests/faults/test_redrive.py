"""Processes that hand dead letters back are killed, and so is the server: each letter is handed back once."""

import asyncio
import contextlib
import os
import random
import sys
from pathlib import Path

from clients import connected

import jetstream_ext as jsx
from jetstream_ext import log
from jetstream_ext.testing import NatsServer

FULL = bool(os.environ.get("JETSTREAM_EXT_FULL"))
KILLS = 200 if FULL else 12
PROCESS = Path(__file__).with_name("redrive_process.py")


def fail(_: jsx.StoredMsg) -> None:
    raise ZeroDivisionError


async def test_each_letter_is_handed_back_once() -> None:
    count, rng = 25 * KILLS, random.Random(5)
    with NatsServer() as server:
        async with connected(server.url) as nc:
            js = nc.jetstream(timeout=10)
            # A window of 0.1 s, so that the server soon forgets what it has stored.
            await js.add_stream(name="IN", subjects=["in.*"], allow_direct=True, duplicate_window=0.1)
            await js.add_stream(name="OUT", subjects=["out.>"], allow_direct=True, allow_atomic=True)
            for number in range(count):
                await js.publish(f"in.{number % 7}", b"%d" % number)
            letters = log.DeadLetter("out.dead", attempts=1, backoff=0)
            reader = log.LogReader(js, "IN")
            done = await log.exactly_once(reader, "OUT", fail, name="w", prefix="out.at", dead_letter=letters)
            assert done.dead_letters == count
            kills = 0
            while True:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, str(PROCESS), server.url, stdout=asyncio.subprocess.PIPE
                )
                assert process.stdout is not None
                async with asyncio.timeout(60):
                    assert await process.stdout.readline() == b"begins\n"
                if kills == KILLS:
                    result, _ = await process.communicate()
                    break
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), rng.uniform(0.0, 0.2))
                assert process.returncode is None, "there are too few letters"
                if kills % 4 == 3:
                    server.kill()
                    server.restart()
                process.kill()
                await process.wait()
                kills += 1
                await asyncio.sleep(rng.choice((0.0, 0.2)))
        async with connected(server.url) as nc:
            js = nc.jetstream(timeout=10)
            found = [int(it.data) async for it in jsx.DirectGet(js, "IN").scan(seq=count + 1)]
            assert sorted(found) == list(range(count)), result
            assert [it async for it in log.dead_letters(js, "OUT", "out.dead")] == []
    print(f"{kills} kills, {count} letters; the last process: {result.decode().strip()}")
