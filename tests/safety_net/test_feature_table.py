"""The feature table and the reference server agree with released servers."""

import runpy
from collections.abc import Awaitable, Callable
from pathlib import Path

import orjson
import pytest
from nats.aio.client import Client

from jetstream_ext.testing import NatsServer, ReferenceServer

# nats-py leaves the sockets of lost connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored .*<function (StreamWriter|_SelectorTransport)")
Connect = Callable[..., Awaitable[Client]]
SCRIPT = Path(__file__).parents[2] / "docs" / "_ext" / "feature_table.py"


def test_the_table_says_that_exactly_once_needs_2_12_1() -> None:
    rows = [line for line in runpy.run_path(str(SCRIPT))["markdown_table"]().splitlines() if "exactly_once" in line]
    assert any("2.12.1" in row for row in rows)


async def answers(nc: Client) -> list[tuple[str | None, str | None]]:
    """Ask for the newest messages at a sequence that file storage has not reached; return status and sequence."""
    js = nc.jetstream()
    await js.add_stream(name="S", subjects=["s.>"], allow_direct=True)
    await js.publish("s.a", b"1")
    inbox = nc.new_inbox()
    replies = await nc.subscribe(inbox)
    body = orjson.dumps({"multi_last": ["s.>"], "up_to_seq": 100})
    await nc.publish("$JS.API.DIRECT.GET.S", body, reply=inbox)
    found = []
    while not found or found[-1][0] is None:
        headers = (await replies.next_msg(timeout=30)).headers or {}
        found.append((headers.get("Status"), headers.get("Nats-Sequence")))
    return found


async def test_reference_server_answers_as_a_real_one_for_a_sequence_beyond_the_end(
    own_server: NatsServer, connect: Connect
) -> None:
    async with ReferenceServer(version=own_server.version) as reference:
        assert await answers(await connect(reference.url)) == await answers(await connect(own_server.url))
