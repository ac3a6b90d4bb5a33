"""Mirror a work queue over a stalled leaf node without loss: ``python examples/06_work_queue_mirror.py``.

It starts two servers. `edge` receives the jobs and is a leaf node of `hub`, which archives them. The mirror reads through
a durable consumer that acknowledges a job when the mirror has stored it. Until then the queue keeps the job.
"""

import asyncio

import nats
from nats.js.api import RetentionPolicy

import jetstream_ext as jsx
from jetstream_ext.testing import NatsServer

COUNT = 2_000
# The leaf node connects by WebSocket, because a server reports its random WebSocket port, but not its random leaf-node
# port.
HUB = "jetstream { domain: hub }\nleafnodes { port: -1 }\nwebsocket { port: -1, no_tls: true }"
EDGE = "jetstream { domain: edge }\nleafnodes { reconnect: 1, remotes: [ { url: '%s' } ] }"


async def main() -> None:
    async with (
        NatsServer(name="hub", config=HUB) as hub,
        NatsServer(name="edge", config=EDGE % hub.endpoints["websocket"][0]) as edge,
        await nats.connect(hub.url) as at_hub,
        await nats.connect(edge.url) as at_edge,
    ):
        # The domain of the queue's context also tells the mirror where to find the queue.
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
        print(f"the hub is paused, {(await queue.stream_info('JOBS')).state.messages:,} jobs are queued")
        hub.resume()

        async with asyncio.timeout(60):
            while (left := (await queue.stream_info("JOBS")).state.messages) > 0:
                await asyncio.sleep(0.05)
        async with jsx.DirectGet(archive, "ARCHIVE").scan(confirm=True) as messages:
            numbers = [int(message.data) async for message in messages]
        print(
            f"{len(numbers):,} in the archive, once and in order: {numbers == list(range(COUNT))}; {left} in the queue"
        )


if __name__ == "__main__":
    asyncio.run(main())
