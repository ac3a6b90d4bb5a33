"""Processes that end in the middle of a handler: a crash is no attempt, so the message is handled again and is no dead letter."""

import asyncio
import sys
from collections.abc import Awaitable, Callable

import pytest
from nats.js import JetStreamContext

from jetstream_ext import log
from jetstream_ext.testing import NatsServer

Make = Callable[..., Awaitable[str]]

PROGRAM = """
import asyncio, os, sys
import nats
from jetstream_ext import log

async def main(url, kind, source, target, crash):
    js = (await nats.connect(url)).jetstream(timeout=10)
    letters = log.DeadLetter(target + ".dead", attempts=1, backoff=0)

    async def handle(message):
        if message.data == b"1" and crash == "True":
            os._exit(9)
        if message.data == b"2":
            raise ZeroDivisionError
        await js.publish(target + ".handled", message.data)

    if kind == "worker":
        reader = log.LogReader(js, source)
        await log.exactly_once(reader, target, handle, name="w", prefix=target + ".at", dead_letter=letters)
        return
    async with log.Group(js, source, "g", partitions=1, bucket=target, heartbeat=0.5).join(seconds=0.1) as member:
        working = asyncio.create_task(member.run(handle, dead_letter=letters))
        reader = log.LogReader(js, target, subject=target + ".handled", tail=True)
        async for message in reader:
            if message.data == b"3":
                break
        member.stop()
        await working

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("kind", ["worker", "member"])
async def test_a_crash_is_no_attempt(js: JetStreamContext, server: NatsServer, make_stream: Make, kind: str) -> None:
    source, target = await make_stream(), await make_stream(allow_atomic=True)
    for number in range(4):
        await js.publish(f"{source}.x", b"%d" % number)

    async def run(*, crash: bool) -> int | None:
        arguments = server.url, kind, source, target, str(crash)
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, *arguments)
        try:
            async with asyncio.timeout(60):
                return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()

    assert [await run(crash=crash) for crash in (True, False)] == [9, 0]
    letters = [letter async for letter in log.dead_letters(js, target, f"{target}.dead")]
    assert [(letter.data, letter.attempts) for letter in letters] == [(b"2", 1)], (
        "an error is an attempt, a crash is none"
    )
    handled = [message.data async for message in log.LogReader(js, target, subject=f"{target}.handled")]
    assert set(handled) == {b"0", b"1", b"3"}
