"""A message larger than its stream's ``max_msg_size``: what servers count, and the error that names it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import nats
import nats.errors
import pytest
from client_cells import each
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import BatchMessage, errors
from jetstream_ext.log import LogReader, exactly_once
from jetstream_ext.testing import NatsServer

MakeStream = Callable[..., Awaitable[str]]
LIMIT = 1000


@pytest.fixture(scope="module", params=["2.12.8", "2.14.6", "2.15.1"])
def versions(request: pytest.FixtureRequest) -> Any:
    with NatsServer(version=request.param) as server:
        yield server


@pytest.fixture
async def js_of_version(versions: NatsServer) -> AsyncIterator[JetStreamContext]:
    nc = await nats.connect(versions.url, connect_timeout=10)
    yield nc.jetstream()
    await nc.close()


def batch(name: str, place: int, size: int, **options: Any) -> list[BatchMessage]:
    """Return three messages; the one at `place` has a payload of `size` bytes."""
    messages = [BatchMessage(f"{name}.small", b"1") for _ in range(3)]
    messages[place] = BatchMessage(f"{name}.large", bytes(size), **options)
    return messages


async def set_limit(js: JetStreamContext, name: str, size: int) -> None:
    config = (await js.stream_info(name)).config
    config.max_msg_size = size
    await js.update_stream(config)


@each("place", [0, 1, 2])
@each("options", [{}, {"headers": {"Trace": "x" * 50}}, {"msg_id": "a"}])
async def test_servers_count_payload_and_all_headers(
    js_of_version: JetStreamContext, stream_name: Callable[[], str], place: int, options: dict[str, Any]
) -> None:
    js, name = js_of_version, stream_name()
    await js.add_stream(name=name, subjects=[f"{name}.>"], allow_atomic=True, max_msg_size=LIMIT)
    with pytest.raises(errors.MessageTooLargeError) as caught:
        await jsx.publish_atomic(js, batch(name, place, LIMIT, **options))
    told = int(str(caught.value).partition(" has ")[2].split()[0])
    over = told - LIMIT  # the bytes of its headers
    assert over > 0
    with pytest.raises(errors.MessageTooLargeError, match=f"{name}.large' has {LIMIT + 1} bytes.*takes {LIMIT}"):
        await jsx.publish_atomic(js, batch(name, place, LIMIT - over + 1, **options))
    assert (await js.stream_info(name)).state.messages == 0
    over += len("Nats-Batch-Commit: 1\r\n") if place == 2 else 0
    ack = await jsx.publish_atomic(js, batch(name, place, LIMIT - over, **options))
    assert ack.batch_size == 3


class TestPublishAtomic:
    @each("how", ["list", "async iterable", "many"])
    async def test_a_message_over_the_limit_is_named(
        self, js: JetStreamContext, make_stream: MakeStream, leak_check: Any, how: str
    ) -> None:
        name = await make_stream(max_msg_size=LIMIT)
        messages = batch(name, 1, 5000)

        async def each() -> AsyncIterator[BatchMessage]:
            for message in messages:
                yield message

        publishing: dict[str, Callable[[], Awaitable[Any]]] = {
            "list": lambda: jsx.publish_atomic(js, messages),
            "async iterable": lambda: jsx.publish_atomic(js, each()),
            "many": lambda: jsx.publish_atomic_many(js, [batch(name, 1, 1), messages, batch(name, 1, 1)]).to_list(),
        }
        with pytest.raises(errors.MessageTooLargeError, match=rf"'{name}\.large' has .* takes {LIMIT}") as caught:
            await publishing[how]()
        assert (caught.value.outcome, caught.value.err_code) == ("not_stored", 10054)
        await leak_check.assert_clean()

    async def test_the_refusal_of_a_long_batch_names_the_message(
        self, js: JetStreamContext, make_stream: MakeStream
    ) -> None:
        """The server's reply to message 1000 says that the batch is incomplete."""
        name = await make_stream(max_msg_size=LIMIT)
        messages = [BatchMessage(f"{name}.a", b"1"), BatchMessage(f"{name}.large", bytes(2000))]
        with pytest.raises(errors.MessageTooLargeError, match="large"):
            await jsx.publish_atomic(js, messages + [BatchMessage(f"{name}.a", b"1")] * 1500)

    async def test_a_limit_that_was_changed_holds_at_the_latest_for_the_second_batch(
        self, js: JetStreamContext, make_stream: MakeStream
    ) -> None:
        name = await make_stream(max_msg_size=LIMIT)
        await jsx.publish_atomic(js, batch(name, 1, 1))
        await set_limit(js, name, 9000)
        with pytest.raises(errors.MessageTooLargeError, match="begin another batch"):
            await jsx.publish_atomic(js, iter(batch(name, 1, 5000)))
        await jsx.publish_atomic(js, batch(name, 1, 5000))
        await set_limit(js, name, 12_000)
        await jsx.publish_atomic(js, batch(name, 1, 10_000))  # a list is tried again
        await set_limit(js, name, LIMIT)
        with pytest.raises(errors.AtomicPublishIncompleteError, match="a message over the stream's max_msg_size"):
            await jsx.publish_atomic(js, batch(name, 1, 5000))
        with pytest.raises(errors.MessageTooLargeError, match=f"takes {LIMIT}"):
            await jsx.publish_atomic(js, batch(name, 1, 5000))


class TestExactlyOnce:
    async def test_a_position_over_the_limit_is_refused_at_once(
        self, js: JetStreamContext, make_stream: MakeStream
    ) -> None:
        name, output = await make_stream(), await make_stream(max_msg_size=50)
        with pytest.raises(errors.MessageTooLargeError, match=rf"'{output}\.at\.w'.*max_msg_size.*nothing was stored"):
            await exactly_once(LogReader(js, name), output, lambda _: None, name="w", prefix=f"{output}.at")
