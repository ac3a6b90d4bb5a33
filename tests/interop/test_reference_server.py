"""nats.js on the reference server, and on a real server, which shows that the expectations are right."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from peers import HERE, Peer

from jetstream_ext.testing import NatsServer, ReferenceServer


@pytest.fixture(params=["reference", "real"])
async def js_client(request: pytest.FixtureRequest, nats_js: Path, server: NatsServer) -> AsyncIterator[Peer]:
    """An application with nats.js, connected to one of the two."""
    async with ReferenceServer() as reference:
        url = reference.url if request.param == "reference" else server.url
        async with Peer(nats_js, HERE / "client_peer.mjs", url) as peer:
            yield peer


async def test_connect(js_client: Peer) -> None:
    info = await js_client.call("info")
    assert info.pop("rtt") >= 0
    assert info == {"version": "2.15.1", "headers": True, "max_payload": 1 << 20}


async def test_request_and_reply(js_client: Peer, stream_name: Callable[[], str]) -> None:
    found = await js_client.call("request", subject=stream_name(), text="hello")
    assert (found["text"], found["kept"]) == ("HELLO", ["one", "two"])
    assert found["nobody"]["name"] == "NoResponders"


async def test_queue_groups(js_client: Peer, stream_name: Callable[[], str]) -> None:
    found = await js_client.call("queue", subject=stream_name(), members=3, count=300)
    assert found["everybody"] == sum(found["seen"]) == 300
    assert all(found["seen"]), "one of three members got nothing of 300 messages"


async def test_publish(js_client: Peer, stream_name: Callable[[], str]) -> None:
    name = stream_name()
    found = await js_client.call("publish", stream=name)
    assert found["acks"] == [
        {"stream": name, "seq": 1, "duplicate": False},
        {"stream": name, "seq": 1, "duplicate": True},
        {"stream": name, "seq": 2, "duplicate": False},
    ]
    assert found["wrong"] == {"name": "JetStreamApiError", "code": 10071}
    assert found["subjects"] == {f"{name}.a": 1, f"{name}.b": 1}
    assert found["last"] == "2"


async def test_pull_consumer(js_client: Peer, stream_name: Callable[[], str]) -> None:
    name = stream_name()
    await js_client.call("publish", stream=name)
    await js_client.call("publish_many", subject=f"{name}.c", count=8)
    found = await js_client.call("pull", stream=name, count=10)
    assert sorted(found["deliveries"]) == sorted([[1, 1], [1, 2], *([seq, 1] for seq in range(2, 11))])
    assert found["nothing"] is None
    assert (found["num_pending"], found["num_ack_pending"], found["floor"]) == (0, 0, 10)


async def test_ordered_consumer(js_client: Peer, stream_name: Callable[[], str]) -> None:
    name = stream_name()
    await js_client.call("publish", stream=name)
    await js_client.call("publish_many", subject=f"{name}.c", count=48)
    assert await js_client.call("ordered", stream=name, count=50) == list(range(1, 51))


async def test_key_value(js_client: Peer, stream_name: Callable[[], str]) -> None:
    found = await js_client.call("key_value", bucket=stream_name())
    assert (found["first"], found["second"]) == (1, 2)
    assert found["wrong"]["code"] == found["exists"]["code"] == 10071
    assert (found["value"], found["keys"], found["history"]) == ("2", ["a", "b"], ["1", "2"])
    assert found["seen"] == [["a", "PUT", 1], ["a", "PUT", 2], ["b", "PUT", 3], ["a", "DEL", 4], ["b", "PURGE", 5]]
    assert (found["deleted"], found["values"]) == ("DEL", 4)


async def test_drain(js_client: Peer, stream_name: Callable[[], str]) -> None:
    assert await js_client.call("drain", subject=stream_name(), count=200) == {"taken": 200, "closed": True}
