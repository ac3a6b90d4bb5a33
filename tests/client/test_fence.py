"""The fence: its answer names a sequence that includes everything sent before it, and it is never stored."""

from collections.abc import Awaitable, Callable

from client_cells import each
from nats.aio.client import Client

from jetstream_ext.client.api import settled_state, stream_state
from jetstream_ext.client.connection import Context
from jetstream_ext.client.fence import send_fence
from jetstream_ext.protocol.atomic_wire import read_reply
from jetstream_ext.protocol.fence import mark, marked_seq


@each("replicas", [1, 3])
@each("option", ["none", "allow_batched", "allow_atomic"])
async def test_the_mark_counts_what_was_sent_before_it(
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
