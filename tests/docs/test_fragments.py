"""The pieces of code in the other pages: each runs, given what its page takes for granted."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

from jetstream_ext.testing import NatsServer

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)

COMMON = """
import asyncio, datetime, nats, jetstream_ext as jsx
from nats.js.api import StreamConfig
from jetstream_ext.testing import NatsServer, ReferenceServer, VirtualClock

nc = await nats.connect(url, connect_timeout=10)
js = nc.jetstream(timeout=30)
options = {"allow_direct": True, "allow_batched": True, "allow_atomic": True, "allow_msg_ttl": True}
for name in ("ORDERS", "SCHEMAS"):
    await jsx.ensure_stream(js, name=name, subjects=[f"{name.lower()}.>"], **options)
"""
BEFORE = {
    "index": "rows = [b'1', b'2']",
    "servers": "",
    "direct-get": 'await js.publish("orders.eu", b"1")',
    "fast-ingest": "rows = [b'1', b'2']",
    "arrow": """
import polars, pyarrow as pa, pyarrow.compute, jetstream_ext.arrow
from jetstream_ext import kv as kvx
kv = await js.create_key_value(bucket="users", direct=True)
await js.publish("orders.eu", b'{"customer": "ann", "price": "1.10", "placed": "2026-01-02T03:04:05Z"}')
writer = pa.ipc.new_stream(pa.BufferOutputStream(), jetstream_ext.arrow.SCHEMA)
""",
    "atomic-batches": """
await jsx.ingest(js, [("orders.eu", b"")] * 40 + [("orders.us", b"")])
messages = [jsx.BatchMessage("orders.eu"), jsx.BatchMessage("orders.us")]
batches = [messages, messages]
""",
    "ttl-consumers-sources": """
yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
await js.publish("orders.eu", b"1")
await js.add_consumer("ORDERS", durable_name="billing", ack_policy="explicit")
await jsx.ensure_stream(js, name="OTHER", subjects=["sessions.42"], allow_msg_ttl=True)
""",
    "tables": """
kv = await js.create_key_value(bucket="flags", direct=True)
await kv.put("checkout.new-basket", b"off")
""",
    "testing-your-application": "async def my_application(url): pass",
    "reference-server": "",
}
# What a block takes for granted, by words in it.
JUST_BEFORE = {
    "await batch.commit_eob()": 'batch = jsx.AtomicBatch(js); await batch.add("orders.eu")',
    "arrow.from_arrow(js, table)": 'table = pa.table({"subject": ["orders.us"], "data": ["1"]})',
    "StreamConfig(name=": 'await js.delete_stream("OTHER")',
    "jsx.source_health(": """
entry = await jsx.create_source_consumer(js, "ORDERS", "to-hub", deliver_subject="deliver.to-hub")
await jsx.ensure_stream(js, name="ALL-READINGS", sources=[entry])
""",
}
# Run elsewhere: they never end (client/test_abandoned.py, kv/test_tables.py); it needs two servers (arrow/test_writing.py) or two domains
# (client/test_domains.py).
NOT_HERE = ("jsx.watch_abandoned(", "in flags.changes()", "arrow.from_arrow(elsewhere", 'nc.jetstream(domain="edge")')


async def run(code: str, names: dict[str, Any]) -> None:
    """Run code that may await anywhere, as Python's prompt for asyncio does."""
    compiled = compile(code, "<page>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(compiled, names)
    if inspect.iscoroutine(result):
        await result


async def run_page(page: str) -> None:
    """Run the pieces of a page in their order, on a server of their own."""
    blocks = BLOCK.findall((DOCS / f"{page}.md").read_text(encoding="utf-8"))
    assert blocks
    async with NatsServer() as server:
        names: dict[str, Any] = {"url": server.url}
        await run(COMMON + BEFORE[page], names)
        ours = names["nc"]
        for block in blocks:
            assert compile(block, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if any(words in block for words in NOT_HERE):
                continue
            for words, before in JUST_BEFORE.items():
                if words in block:
                    await run(before, names)
            await run(block, names)
            if "BatchAck(stream='ORDERS', seq=43" in block:
                assert names["batch"].ack.seq == 43, "as the comment says"
        for nc in {ours, names["nc"]}:
            await nc.close()


async def test_every_piece_runs() -> None:
    for page in BEFORE:
        try:
            await run_page(page)
        except Exception as error:
            error.add_note(f"on the page {page}")
            raise


ELSEWHERE = {
    "tutorial": "test_pages.py types it",
    "quick-start": "tests/newcomer types it",
    "web-service": "test_pages.py runs it",
    "observability": "docs/test_observability.py runs it",
    "key-value": "its code is an example, which kv/test_example.py runs",
    "spark": "test_pages.py types it",
    "log": "log/test_page.py runs it",
    "groups": "log/test_groups_page.py runs it",
}


def test_no_page_is_forgotten() -> None:
    pages = {path.stem for path in DOCS.glob("*.md") if BLOCK.search(path.read_text(encoding="utf-8"))}
    assert pages <= {*BEFORE, *ELSEWHERE}
