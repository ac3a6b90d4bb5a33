"""A micro-batch that Spark runs again: the same rows where that is possible, and no row lost or repeated where it is not."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import Any

from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

EXACT = ["dedupe", "transactional"]
ROWS = 30


async def _delete(js: JetStreamContext, name: str) -> None:
    await js.delete_msg(name, 3)


async def _replace(js: JetStreamContext, name: str) -> None:
    await js.publish(f"{name}.2", b"newer")


async def _roll_up(js: JetStreamContext, name: str) -> None:
    await js.publish(f"{name}.2", b"newer", headers={"Nats-Rollup": "sub"})


async def _expire(js: JetStreamContext, name: str) -> None:
    """Wait until the third message has expired."""
    async with asyncio.timeout(60):
        while True:
            try:
                await js.get_msg(name, 3)
            except NotFoundError:
                return
            await asyncio.sleep(0.05)


# Causes of a lost row: the source's configuration, headers of the third message, and an action between the attempts.
VANISHING: dict[str, tuple[dict[str, Any], dict[str, str], Any]] = {
    "delete": ({}, {}, _delete),
    "per-subject limit": ({"max_msgs_per_subject": 1}, {}, _replace),
    "rollup": ({"allow_rollup_hdrs": True}, {}, _roll_up),
    "limit at the head": ({"max_msgs": ROWS}, {}, _replace),
    "TTL": ({"allow_msg_ttl": True}, {"Nats-TTL": "5s"}, _expire),
}


ONCE = Counter(b"%d" % number for number in range(ROWS))


def test_a_row_that_vanished_from_the_source_repeats_no_other_row(
    cell: Any, make_stream: Any, stream_query: Any, sink: Any, stored: Any, with_js: Any
) -> None:
    def check(how: str, semantics: str) -> None:
        config, headers, vanish = VANISHING[how]
        source, out = make_stream(**config), make_stream()

        async def fill(js: JetStreamContext) -> None:
            for number in range(ROWS):
                given = headers if number == 2 else None
                await js.publish(f"{source}.{number}", b"%d" % number, headers=given)

        with_js(fill)
        query = stream_query(source)
        more = {"sinkPartitions": "2", "transactionRows": "5"} if semantics == "transactional" else {}
        target = sink(out, semantics, **more)
        start = query.initial()
        end = query.latest(start)

        def run() -> None:
            parts = query.parts(start, end)
            target.write([[{"subject": f"{out}.rows", "data": row["data"]} for row in part] for part in parts])

        run()
        assert stored(out, f"{out}.rows") == ONCE, "the first attempt did not store every row once"
        with_js(lambda js: vanish(js, source))
        run()  # Spark could not record that the micro-batch was done
        assert stored(out, f"{out}.rows") == ONCE

    for how, semantics in itertools.product(VANISHING, EXACT):
        with cell(how, semantics):
            check(how, semantics)
