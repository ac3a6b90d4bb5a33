"""Users, tokens and permissions; the real server gets the same rules in its configuration."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from jetstream_ext.testing import NatsServer
from jetstream_ext.testing.reference import Permissions, ReferenceServer, User

USERS = """
authorization { users = [
    { user: boss, password: secret }
    { user: clerk, password: pen, permissions: {
        publish: { allow: ["work.>", "$JS.API.>"], deny: ["work.secret"] }
        subscribe: { allow: ["_INBOX.>", "work.*"], deny: ["work.private"] } } }
] }
"""
OURS = [
    User(name="boss", password="secret"),
    User(
        name="clerk",
        password="pen",
        permissions=Permissions(
            publish=["work.>", "$JS.API.>"],
            publish_deny=["work.secret"],
            subscribe=["_INBOX.>", "work.*"],
            subscribe_deny=["work.private"],
        ),
    ),
]


@pytest.fixture(scope="module")
def guarded() -> Iterator[NatsServer]:
    with NatsServer(config=USERS) as server:
        yield server


@pytest.fixture
def ports(guarded: NatsServer) -> Iterator[tuple[int, int]]:
    with ReferenceServer(users=OURS) as reference:
        yield guarded.port, reference.port


def talk(raw_client: Any, port: int, data: bytes, **connect: Any) -> tuple[list[str], list[Any], bool]:
    raw = raw_client(port, connect)
    raw.send(data + b"PING\r\n")
    raw.wait(lambda: "PONG" in raw.lines)
    raw.close()
    return [line for line in raw.lines if not line.startswith("INFO")], raw.frames, raw.closed


@pytest.mark.parametrize(
    "connect",
    [
        {},
        {"user": "boss"},
        {"user": "boss", "pass": "wrong"},
        {"user": "nobody", "pass": "secret"},
        {"auth_token": "x"},
        {"user": "boss", "pass": "secret"},
    ],
    ids=lambda connect: json.dumps(connect),
)
def test_logins_are_checked_alike(raw_client: Any, ports: tuple[int, int], connect: dict[str, Any]) -> None:
    real, reference = (talk(raw_client, port, b"", **connect) for port in ports)
    assert reference == real


@pytest.mark.parametrize(
    "data",
    [
        b"SUB work.a 1\r\nPUB work.a 1\r\nx\r\n",
        b"PUB work.secret 1\r\nx\r\nPUB other 1\r\nx\r\n",
        b"SUB other 1\r\nSUB work.private 2\r\nSUB work.> 3\r\nSUB > q 4\r\n",
        b"SUB work.* 1\r\nPUB work.private 1\r\nx\r\nPUB work.open 1\r\ny\r\n",
    ],
)
def test_permissions_are_enforced_alike(raw_client: Any, ports: tuple[int, int], data: bytes) -> None:
    real, reference = (talk(raw_client, port, data, user="clerk", **{"pass": "pen"}) for port in ports)
    assert reference == real


def test_tokens_are_checked_alike(raw_client: Any) -> None:
    with NatsServer(args=["--auth", "t0ken"]) as server, ReferenceServer(token="t0ken") as ours:
        for token in ("t0ken", "other", ""):
            real, reference = (talk(raw_client, port, b"", auth_token=token) for port in (server.port, ours.port))
            assert reference == real
