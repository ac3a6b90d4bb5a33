"""Live tables of streams from which messages are removed in every way, at random."""

import asyncio
import contextlib
import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

import jetstream_ext as jsx
import jetstream_ext.log as log


def random_limits(dice: random.Random) -> dict[str, Any]:
    ttls = dice.choice([{}, {}, {"allow_msg_ttl": True}, {"allow_msg_ttl": True, "subject_delete_marker_ttl": 1.0}])
    rollups = dice.random() < 0.3 or "subject_delete_marker_ttl" in ttls
    limits = {"max_msgs_per_subject": dice.choice([0, 1, 3]), "max_msgs": dice.choice([-1, -1, 25])}
    return {"discard": "old", "allow_rollup_hdrs": rollups} | limits | ttls


async def work(js: JetStreamContext, stream: str, dice: random.Random, limits: dict[str, Any], pause: float) -> None:
    """Write and remove messages."""
    for _ in range(30):
        subject = f"{stream}.{dice.choice('ab')}.{dice.randrange(5)}"
        headers = {"Nats-TTL": "1s"} if "allow_msg_ttl" in limits and dice.random() < 0.3 else {}
        if limits["allow_rollup_hdrs"] and dice.random() < 0.2:
            headers = {"Nats-Rollup": "sub"}
        match dice.choices(["publish", "delete", "purge a subject", "purge"], [55, 30, 8, 2])[0]:
            case "publish":
                await js.publish(subject, b"", headers=headers)
            case "delete":
                state = (await js.stream_info(stream)).state
                with contextlib.suppress(nats.js.errors.APIError):  # there is none
                    await js.delete_msg(stream, dice.randint(min(state.first_seq, state.last_seq), state.last_seq))
            case "purge a subject":
                await js.purge_stream(stream, subject=subject)
            case "purge":
                await js.purge_stream(stream, seq=max(1, (await js.stream_info(stream)).state.last_seq - 8))
        await asyncio.sleep(pause * (dice.random() < 0.2))


async def stored(js: JetStreamContext, stream: str, subject: str) -> dict[str, int]:
    """Return the sequences of the last messages, without the server's delete markers."""
    last: dict[str, int] = {}
    async for message in jsx.DirectGet(js, stream).scan(subject=subject, confirm=True):
        last[message.subject] = message.seq
        if "Nats-Marker-Reason" in message.headers:
            del last[message.subject]
    return last


async def test_a_table_has_what_is_stored(js: JetStreamContext, stream_name: Callable[[], str], tmp_path: Path) -> None:
    async def check(seed: int) -> None:
        dice, stream = random.Random(seed), stream_name()
        limits = random_limits(dice)
        config = StreamConfig(name=stream, subjects=[f"{stream}.>"], allow_direct=True)
        await js.add_stream(config.evolve(**limits))
        for _ in range(2):
            await work(js, stream, dice, limits, 0)  # while no table is open
            async with AsyncExitStack() as stack:
                tables = []
                for subject in (f"{stream}.>", f"{stream}.a.>"):
                    for checkpoint in (None, tmp_path / f"{subject[:-2]}.db"):
                        table = await stack.enter_async_context(log.Table(js, stream, subject, checkpoint=checkpoint))
                        tables.append((subject, table))
                await work(js, stream, dice, limits, dice.choice([0.0, 0.05, 0.3]))
                try:
                    async with asyncio.timeout(10):
                        for subject, table in tables:
                            while {name: message.seq for name, message in table.items()} != await stored(
                                js, stream, subject
                            ):
                                await asyncio.sleep(0.1)
                except TimeoutError:
                    raise AssertionError(f"seed {seed}: {limits}, {subject}") from None

    async with asyncio.TaskGroup() as group:
        for seed in range(12):
            group.create_task(check(seed))
