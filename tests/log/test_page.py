"""The page on the log: its code blocks run unchanged, and its names and figures are those of the code."""

import ast
import inspect
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import log
from jetstream_ext.log import StoredOffset
from jetstream_ext.testing import NatsServer

PAGE = (Path(__file__).parents[2] / "docs" / "log.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


async def run(code: str, names: dict[str, Any]) -> None:
    """Run code with top-level await, as ``python -m asyncio`` does."""
    result = eval(compile(code, "log.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if inspect.iscoroutine(result):
        await result


@pytest.fixture
async def own() -> Any:
    async with NatsServer() as server:
        nc = await nats.connect(server.url, connect_timeout=10)
        yield nc.jetstream()
        await nc.close()


async def test_every_code_block_runs(own: JetStreamContext, capsys: pytest.CaptureFixture[str]) -> None:
    await jsx.ensure_stream(own, name="ORDERS", subjects=["orders.>"], allow_direct=True, allow_batched=True)
    await jsx.ensure_stream(
        own, name="TOTALS", subjects=["totals.>", "totals-at.*"], allow_direct=True, allow_atomic=True
    )
    await jsx.ingest(own, ((f"orders.{place}.{n}", b"1") for n in range(10) for place in ("eu", "us")))
    handled: list[int] = []

    async def handle(msg: jsx.StoredMsg) -> None:
        handled.append(msg.seq)

    names = {"js": own, "jsx": jsx, "handle": handle, "yesterday": datetime.now(UTC) - timedelta(days=1)}
    code = blocks("python")
    assert len(code) == 11
    for block in code:
        await run(block, names)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "1 orders.eu.0 b'1'"
    assert said[10] == "21", "the position, after a message that does not match"
    assert said[-1] == "20 20 21"
    assert handled == list(range(1, 21))
    stored = await log.OffsetStore(own, "offsets").fetch("billing")
    assert stored is not None
    assert stored.seq == 21
    (shown,) = blocks("json")
    assert json.loads(shown).keys() == json.loads(stored.encode()).keys()
    assert StoredOffset.decode("billing", shown.encode(), 1).stream == "ORDERS"


def test_the_pages_name_every_public_name() -> None:
    values = {
        "Committing",
        "DeadLetterMessage",
        "MessageChange",
        "StoredOffset",
        "Processed",
        "Redriven",
        "GroupStatus",
        "Member",
        "MemberStatus",
        "PartitionStatus",
    }
    pages = PAGE + (Path(__file__).parents[2] / "docs" / "groups.md").read_text(encoding="utf-8")
    assert {name for name in log.__all__ if not re.search(rf"\b{name}\b", pages)} <= values


def test_the_figures_of_the_page_are_those_of_the_code() -> None:
    from jetstream_ext.client import api, doorbell, replaced
    from jetstream_ext.log import commits, liveness, work

    assert (replaced._MOST_MESSAGES, replaced._MOST_BYTES, api.SETTLE) == (4096, 4 << 20, 3.0)
    assert (doorbell._QUIET, doorbell.REST, doorbell._KEPT, doorbell._INACTIVE) == (0.002, 5.5, 1.0, 5.0)
    assert (doorbell._MOST_SUBJECTS, doorbell._LONG_QUIET, work._IDLE) == (8, 0.25, 5.0)
    assert (commits._IN_A_ROW, commits._TIMES, commits._LONGEST_PAUSE) == (200, 5, 0.5)
    assert (liveness.TAKEOVER, liveness.SECONDS, liveness.POLL) == (10.0, 10, 0.25)
    signature = inspect.signature(log.LogReader)
    assert signature.parameters["poll"].default == 0.25
    assert inspect.signature(log.exactly_once).parameters["max_messages"].default == 100
