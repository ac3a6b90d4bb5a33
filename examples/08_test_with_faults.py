"""Test an application with injected faults, without a real server: ``python examples/08_test_with_faults.py``.

With pytest, the fixture ``reference_server`` provides such a server for each test.
"""

import asyncio

import nats

import jetstream_ext as jsx
from jetstream_ext.testing import Drop, Faults, Lose, ReferenceServer


async def application(url: str) -> jsx.IngestReport:
    """Run the application under test, which must store every measurement once."""
    async with await nats.connect(url) as nc:
        js = nc.jetstream()
        await jsx.ensure_stream(js, name="M", subjects=["m.>"], allow_batched=True)
        return await jsx.ingest(js, ((f"m.{n % 4}", b"%d" % n) for n in range(500)), timeout=0.5)


async def main() -> None:
    # Two messages never reach the stream, and the answer to one that is sent again is lost.
    faults = Faults(Lose("m.>", nth=100), Lose("m.>", nth=300), Drop(kind="pub_ack", nth=3))
    async with ReferenceServer(faults=faults) as server:
        report = await application(server.url)
        async with await nats.connect(server.url) as nc:
            stored = (await nc.jetstream().stream_info("M")).state.messages
    print(f"reported {report.stored}, stored {stored}, sent again: {report.resent > 0}")
    assert report.stored == stored == 500


if __name__ == "__main__":
    asyncio.run(main())
