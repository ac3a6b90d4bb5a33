"""A worker with a state as a process: ``state_process.py URL WORK NAME STREAM LABEL``. SIGTERM lets it end.

It reads ``IN``, and stores the position, the state and the outputs, with its label, in a stream. The work is

* ``count``: count the inputs of each key. Each output is the count; a key of the state lasts while the count is odd, and if
  the stream allows it another one has a TTL.
* ``standby``: the same with ``standby=True``.
* ``group``: the same as a member of a group.
* ``bank``: transfers between accounts. The outputs are both new balances, or the transfer if it is refused.

It ends with `FENCED` if another process has taken over.
"""

import asyncio
import contextlib
import random
import signal
import sys
from typing import Any

import nats
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors, log

FENCED = 7
START = 100  # of each account
PARTITIONS = 8
HEARTBEAT = 1.0


async def ignore(_: Exception) -> None: ...


async def work(js: JetStreamContext, kind: str, name: str, stream: str, label: str) -> None:
    def output(key: str, payload: bytes) -> jsx.BatchMessage:
        return jsx.BatchMessage(f"{stream}.out.{name}.{key}", payload, headers={"Label": label})

    timed = (await js.stream_info(stream)).config.allow_msg_ttl

    def count(message: jsx.StoredMsg, state: log.State) -> jsx.BatchMessage:
        key = message.subject.split(".")[1]
        n = int(state.get(key, b"0")) + 1
        state[key] = b"%d" % n
        if n % 2:
            state[f"odd.{key}"] = b""
        else:
            del state[f"odd.{key}"]
        if timed:
            before = int(state.get(f"timed.{key}", b"0"))
            assert before == n - 1, f"{before} of {n - 1}"
            state.put(f"timed.{key}", b"%d" % n, ttl=3600)
        return output(key, b"%d" % n)

    def transfer(message: jsx.StoredMsg, state: log.State) -> list[jsx.BatchMessage]:
        a, b, amount = message.data.decode().split()
        left, right = (int(state.get(account, b"%d" % START)) for account in (a, b))
        if left < int(amount):
            return [output("refused", message.data)]
        state[a], state[b] = b"%d" % (left - int(amount)), b"%d" % (right + int(amount))
        return [output(a, state[a]), output(b, state[b])]

    options: dict[str, Any] = {
        "prefix": f"{stream}.at",
        "state": f"{stream}.state",
        "max_messages": random.choice((1, 20, 100, 100)),
        "patience": 60.0,
    }
    if kind == "group":
        group = log.Group(js, "IN", name, partitions=PARTITIONS, key=[1], heartbeat=HEARTBEAT, poll=0.05, patience=60.0)
        await log.exactly_once_group(group, stream, count, label=label, **options)
    reader = log.LogReader(js, "IN", tail=True, patience=60.0)
    handler = transfer if kind == "bank" else count
    await log.exactly_once(reader, stream, handler, name=name, standby=kind == "standby", **options)


async def main(url: str, *arguments: str) -> int:
    nc = await nats.connect(
        url, connect_timeout=30, reconnect_time_wait=0.05, max_reconnect_attempts=-1, error_cb=ignore
    )
    working = asyncio.ensure_future(work(nc.jetstream(timeout=5), *arguments))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
    code = 0
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await working
    except errors.FencedError:
        code = FENCED
    with contextlib.suppress(asyncio.CancelledError, OSError):  # nats-py raises them if the connection was just lost
        await nc.close()
    return code


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
