"""FastPublisher on a stream with replicas."""

from collections.abc import Awaitable, Callable

from client_cells import each
from nats.aio.client import Client

import jetstream_ext as jsx


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
