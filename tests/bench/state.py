"""Workers with a state: inputs per second, and keys per second of a start, beside their upper limits in the same run.

    python tests/bench/state.py [--inputs 100000] [--keys 100000 1000000] [--rounds 3] [--rollup]

Prints two Markdown tables of medians. With ``--rollup`` the output stream keeps only the newest message of each key.
"""

import argparse
import asyncio
import time
from functools import partial
from statistics import median
from typing import Any

import nats

import jetstream_ext as jsx
from jetstream_ext import log
from jetstream_ext.testing import NatsServer

KEYS, BATCH, MOST = 1_000, 900, 990


def count(message: jsx.StoredMsg, state: Any) -> tuple[str, bytes]:
    key = message.subject
    state[key] = total = b"%d" % (int(state.get(key, 0)) + 1)
    return f"out.{key}", total


# The handler, and the inputs of a commit.
CASES: dict[str, tuple[Any, int]] = {
    "a state, an output for each input": (count, BATCH // 2),
    "a state, no outputs": (lambda message, state: count(message, state) and None, BATCH),
    "a state, grouped, an output for each changed key": (
        lambda messages, state: dict(count(each, state) for each in messages).items(),
        BATCH // 2,
    ),
    "a state, grouped, an output for each commit": (
        lambda messages, state: [count(each, state) for each in messages][-1],
        MOST,
    ),
    "a dictionary that is not stored, an output for each input": (count, BATCH // 2),
    "the same, with as many messages in a commit as with a state": (count, BATCH),
}
LIMIT = f"`publish_atomic` alone, messages in batches of {BATCH}"


async def work(js: Any, stream: str, handler: Any, name: str, **options: Any) -> float:
    """Return the seconds of a worker from its start to the end of the stream."""
    start, reader = time.perf_counter(), log.LogReader(js, stream)
    await log.exactly_once(reader, "OUT", handler, name=name, prefix="at", **options)
    return time.perf_counter() - start


async def throughput(js: Any, inputs: int, rounds: int) -> None:
    rates: dict[str, list[float]] = {title: [] for title in (*CASES, LIMIT)}
    batch, batches = [jsx.BatchMessage(f"out.in.{n}", b"%d" % n) for n in range(BATCH)], inputs // BATCH
    for number in range(rounds):
        for index, (title, (handler, most)) in enumerate(CASES.items()):
            options: dict[str, Any] = {"max_messages": most, "grouped": "grouped" in title}
            if "a state, " in title:
                given, options["state"] = handler, "state"
            else:
                given = partial(lambda held, message: count(message, held), dict[str, bytes]())
            await js.purge_stream("OUT")
            rates[title].append(inputs / await work(js, "IN", given, f"w{index}-{number}", **options))
        await js.purge_stream("OUT")
        start = time.perf_counter()
        for _ in range(batches):
            await jsx.publish_atomic(js, batch)
        rates[LIMIT].append(batches * BATCH / (time.perf_counter() - start))
    print("| worker | inputs/s | min … max |\n| --- | ---: | ---: |")
    for title, found in rates.items():
        print(f"| {title} | {median(found):,.0f} | {min(found):,.0f} … {max(found):,.0f} |")
    print("\n| keys | read at a start, keys/s | `scan` of the same | ratio |\n| ---: | ---: | ---: | ---: |")


async def load(js: Any, keys: int, rounds: int) -> None:
    def fill(message: jsx.StoredMsg, state: log.State) -> None:
        first = int(message.subject[5:]) * MOST
        state.update((f"customer.{n}", b"%d" % n) for n in range(first, min(first + MOST, keys)))

    for name in ("FILL", "OUT"):
        await js.purge_stream(name)
    await jsx.ingest(js, ((f"fill.{n}", b"") for n in range(-(-keys // MOST))))
    name, starts, scans = f"load-{keys}", list[float](), list[float]()
    await work(js, "FILL", fill, name, max_messages=1, state="state")
    for _ in range(rounds):
        starts.append(keys / await work(js, "FILL", fill, name, state="state"))
        start = time.perf_counter()
        assert len(await jsx.DirectGet(js, "OUT").scan(subject=f"state.{name}.>").to_list()) == keys
        scans.append(keys / (time.perf_counter() - start))
    ratio = median(a / b for a, b in zip(starts, scans, strict=True))
    print(f"| {keys:,} | {median(starts):,.0f} | {median(scans):,.0f} | {ratio:.2f} |", flush=True)


async def main(options: argparse.Namespace) -> None:
    with NatsServer() as server:
        async with await nats.connect(server.url) as nc:
            js = nc.jetstream(timeout=60)
            allowed: dict[str, Any] = dict.fromkeys(("allow_direct", "allow_batched", "allow_atomic"), True)
            for name, subjects in (("IN", ["in.*"]), ("FILL", ["fill.*"]), ("OUT", ["out.>", "at.*", "state.>"])):
                await jsx.ensure_stream(js, name=name, subjects=subjects, allow_rollup_hdrs=options.rollup, **allowed)
            await jsx.ingest(js, ((f"in.{n % KEYS}", b"x" * 100) for n in range(options.inputs)))
            await throughput(js, options.inputs, options.rounds)
            for keys in options.keys:
                await load(js, keys, options.rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--keys", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rollup", action="store_true")
    asyncio.run(main(parser.parse_args()))
