"""Count votes in the state of a worker that is killed (-9) again and again: ``python examples/17_state.py URL``."""

import asyncio
import random
import sys
from collections import Counter

import nats

import jetstream_ext as jsx
from jetstream_ext import log

ROUNDS, VOTES = 3, 1_000


def count(vote: jsx.StoredMsg, state: log.State) -> jsx.BatchMessage:
    name = vote.subject.removeprefix("votes.")
    state[name] = b"%d" % (int(state.get(name, 0)) + 1)
    return jsx.BatchMessage(f"polls.{name}", state[name])


async def work(url: str, *, tail: bool = True) -> None:
    async with await nats.connect(url) as nc:
        reader = log.LogReader(nc.jetstream(), "VOTES", tail=tail)
        await log.exactly_once(
            reader, "POLLS", count, name="polls", prefix="polls.at", state="polls.state", max_messages=20
        )


async def main(url: str) -> None:
    async with await nats.connect(url) as nc:
        js = nc.jetstream()
        await jsx.ensure_stream(js, name="VOTES", subjects=["votes.*"], allow_direct=True, allow_batched=True)
        await jsx.ensure_stream(js, name="POLLS", subjects=["polls.>"], allow_direct=True, allow_atomic=True)
        for _ in range(ROUNDS):
            polls = log.LogReader(js, "POLLS", start=log.New(), subject="polls.*", tail=True)
            await polls.open()
            await jsx.ingest(js, ((f"votes.candidate{random.randrange(9)}", b"") for _ in range(VOTES)))
            process = await asyncio.create_subprocess_exec(sys.executable, __file__, url, "worker")
            for _ in range(VOTES // 2):
                await anext(polls)
            process.kill()
            print(f"{VOTES // 2} votes counted: killed the worker")
            await work(url, tail=False)  # this one goes on with the counts, up to the last vote

        votes = Counter([vote.subject[6:] async for vote in log.LogReader(js, "VOTES")])
        async with log.Table(js, "POLLS", subject="polls.state.polls.>") as state:
            print("counts:", {key[18:]: int(msg.data) for key, msg in state.items()} == votes)
        polls = log.LogReader(js, "POLLS", subject="polls.*")
        stored = Counter([(msg.subject[6:], int(msg.data)) async for msg in polls])
        wanted = Counter((name, number + 1) for name, most in votes.items() for number in range(most))
        print("each count stored once:", stored == wanted)


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1]) if sys.argv[2:] else main(sys.argv[1]))
