"""Fast ingest and the fence on streams with replicas."""

from collections.abc import Awaitable, Callable

from client_cells import each
from nats.aio.client import Client

import jetstream_ext as jsx
from jetstream_ext.client.api import settled_state, stream_state
from jetstream_ext.client.connection import Context
from jetstream_ext.client.outcome import send_fence
from jetstream_ext.protocol.atomic_wire import read_reply
from jetstream_ext.protocol.outcome import mark, marked_seq


@each("gap", ["fail", "ok"])
@each("messages", [1, 2, 30])
async def test_a_marker_that_arrives_before_the_messages_are_stored_commits_them(
    cluster_nc: Client, make_replicated: Callable[..., Awaitable[str]], gap: str, messages: int
) -> None:
    """Then the final ack is the answer to the last message, not to the marker."""
    js = cluster_nc.jetstream(timeout=10)
    name = await make_replicated(allow_batched=True)
    for turn in range(1, 21):
        async with jsx.FastPublisher(js, gap=gap) as publisher:
            await publisher.add_many((f"{name}.a", b"") for _ in range(messages))
        assert publisher.ack.batch_size == messages
        assert publisher.ack.seq == turn * messages


@each("replicas", [1, 3])
@each("option", ["none", "allow_batched", "allow_atomic"])
async def test_a_fence_counts_what_was_sent_before_it_and_is_not_stored(
    cluster_nc: Client, make_replicated: Callable[..., Awaitable[str]], replicas: int, option: str
) -> None:
    batches = {name: name == option for name in ("allow_batched", "allow_atomic")}
    name = await make_replicated(num_replicas=replicas, **batches)
    context = Context(cluster_nc.jetstream(timeout=10))
    for sent in (0, 2000, 4000):
        _, (reply,) = await send_fence(context, f"{name}.a", [mark(name)], 10)
        assert marked_seq(read_reply(*reply)) == sent
        assert (await settled_state(lambda: stream_state(context, name), sent, 60)).last_seq == sent
        for n in range(2000):
            await cluster_nc.publish(f"{name}.b", b"%d" % n)
