"""Mirror a work queue over a leaf node that stalls, losing nothing: ``python examples/06_work_queue_mirror.py``.

It starts two servers: `edge`, where jobs come in, is a leaf node of `hub`, where they are archived. The mirror reads
through a durable consumer, which acknowledges what the mirror has stored; the queue keeps everything else.
"""

import asyncio

import nats
from nats.js.api import RetentionPolicy

import jetstream_ext as jsx
from jetstream_ext.testing import NatsServer

COUNT = 2_000
# The leaf node connects by WebSocket here, because that is a port of which the server says which one it has chosen.
HUB = "jetstream { domain: hub }\nleafnodes { port: -1 }\nwebsocket { port: -1, no_tls: true }"
EDGE = "jetstream { domain: edge }\nleafnodes { reconnect: 1, remotes: [ { url: '%s' } ] }"


async def main() -> None:
    async with (
        NatsServer(name="hub", config=HUB) as hub,
        NatsServer(name="edge", config=EDGE % hub.endpoints["websocket"][0]) as edge,
        await nats.connect(hub.url) as at_hub,
        await nats.connect(edge.url) as at_edge,
    ):
        # With its domain the context of the queue also tells the mirror where that is.
        queue, archive = at_edge.jetstream(domain="edge"), at_hub.jetstream(domain="hub")
        work = RetentionPolicy.WORK_QUEUE
        await jsx.ensure_stream(queue, name="JOBS", subjects=["jobs.>"], retention=work, allow_batched=True)
        entry = await jsx.create_source_consumer(queue, "JOBS", "to-hub", deliver_subject="deliver.to-hub")
        await jsx.ensure_stream(archive, name="ARCHIVE", mirror=entry, allow_direct=True)
        async with asyncio.timeout(60):
            while not (health := (await jsx.source_health(archive, "ARCHIVE"))[0]).ok:
                await asyncio.sleep(0.05)
        print(f"the mirror over the leaf node is {health.state}")

        hub.pause()
        async with jsx.FastPublisher(queue) as publisher:
            await publisher.add_many((f"jobs.{n % 4}", b"%d" % n) for n in range(COUNT))
        print(f"the hub is away, {(await queue.stream_info('JOBS')).state.messages:,} jobs wait")
        hub.resume()

        async with asyncio.timeout(60):
            while (left := (await queue.stream_info("JOBS")).state.messages) > 0:
                await asyncio.sleep(0.05)
        async with jsx.DirectGet(archive, "ARCHIVE").scan(confirm=True) as messages:
            numbers = [int(message.data) async for message in messages]
        print(f"{len(numbers):,} in the archive, each once: {numbers == list(range(COUNT))}; {left} in the queue")


if __name__ == "__main__":
    asyncio.run(main())
