"""Ingest many metrics, each exactly once: ``python examples/02_metrics_ingest.py nats://localhost:4222``."""

import asyncio
import random
import sys
from collections.abc import Iterator

import nats

import jetstream_ext as jsx

COUNT = 50_000


def metrics() -> Iterator[tuple[str, bytes]]:
    """Yield metrics; `ingest` reads any iterable or async iterable as fast as the server stores."""
    for n in range(COUNT):
        yield f"metrics.host{n % 20}.cpu", b"%.3f" % random.random()


async def main(url: str) -> None:
    async with await nats.connect(url) as nc:
        js = nc.jetstream()
        await jsx.ensure_stream(js, name="METRICS", subjects=["metrics.>"], allow_batched=True)

        # `ingest` continues after a restart or a lost connection, and the server stores each message once.
        report = await jsx.ingest(
            js, metrics(), on_progress=lambda now: print(f"{now.stored:,} stored, {now.rate:,.0f}/s")
        )
        print(f"{report.stored:,} metrics in {report.seconds:.2f} s, {report.resent} sent again")

        info = await js.stream_info("METRICS")
        print(f"the stream has {info.state.messages:,} messages")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
