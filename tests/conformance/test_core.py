"""Core NATS: INFO, subscriptions, queue groups, errors."""

import json
from typing import Any


def both(pair: Any, data: bytes, *, lines: int = 0, **connect: Any) -> tuple[Any, Any]:
    """Send to a new connection of each server; return the connections after a PONG or their end."""
    clients = pair.fresh(**connect)
    for raw in clients:
        raw.send(data + b"PING\r\n")
        raw.wait(lambda raw=raw: "PONG" in raw.lines)
    return clients


def shown(raw: Any) -> tuple[list[str], list[Any]]:
    """Return everything that a connection received, except INFO."""
    return [line for line in raw.lines if not line.startswith("INFO")], raw.frames


def same(pair: Any, data: bytes, **connect: Any) -> tuple[list[str], list[Any]]:
    real, reference = both(pair, data, **connect)
    try:
        assert shown(reference) == shown(real)
        assert reference.closed == real.closed
        return shown(reference)
    finally:
        real.close()
        reference.close()


def test_info_has_the_fields_of_the_release(pair: Any) -> None:
    infos = []
    for raw in both(pair, b""):
        [first, *_] = [json.loads(line[5:]) for line in raw.lines if line.startswith("INFO")]
        infos.append(first)
        raw.close()
    theirs, ours = infos
    # The build, a key for encrypted logins, and what differs between two servers.
    not_compared = {"git_commit", "go", "xkey", "server_id", "server_name", "host", "port", "client_id", "client_ip"}
    assert {k: v for k, v in ours.items() if k not in not_compared} == {
        k: v for k, v in theirs.items() if k not in not_compared
    }


COMMANDS = [
    b"SUB foo 1\r\nPUB foo 2\r\nhi\r\n",
    b"SUB foo 1\r\nPUB foo r 0\r\n\r\n",
    b"SUB foo.* 1\r\nSUB foo.> 2\r\nSUB > 3\r\nPUB foo.bar 1\r\nx\r\nPUB foo.bar.baz 1\r\ny\r\nPUB foo 1\r\nz\r\n",
    b"SUB foo 1\r\nSUB foo 1\r\nPUB foo 1\r\nx\r\n",
    b"SUB foo 1\r\nUNSUB 1\r\nPUB foo 1\r\nx\r\n",
    b"SUB foo 1\r\nUNSUB 1 2\r\nPUB foo 1\r\na\r\nPUB foo 1\r\nb\r\nPUB foo 1\r\nc\r\n",
    b"SUB foo 1\r\nPUB foo 1\r\na\r\nUNSUB 1 1\r\nPUB foo 1\r\nb\r\n",
    b"SUB foo q 1\r\nPUB foo 1\r\na\r\nPUB foo 1\r\nb\r\n",
    b"SUB foo 1\r\nHPUB foo 22 24\r\nNATS/1.0\r\nA: b\r\nC:\r\n\r\nhi\r\n",
    b"SUB foo 1\r\nHPUB foo r 12 12\r\nNATS/1.0\r\n\r\n\r\n",
    b"SUB r 1\r\nPUB nobody r 1\r\nx\r\n",
    b"SUB r.* 1\r\nPUB nobody r.1 1\r\nx\r\n",
    b"PUB nobody r 1\r\nx\r\n",
    b"SUB foo..bar 1\r\n",
    b"SUB foo. 1\r\n",
    b"SUB >.foo 1\r\n",
    b"SUB foo 1\r\nPUB foo. 1\r\nx\r\nPUB .foo 1\r\ny\r\n",
    b"SUB foo.> 1\r\nPUB foo.* 1\r\nx\r\nPUB foo.> 1\r\ny\r\n",
    b"sub foo 1\r\npub foo 1\r\nx\r\nunsub 1\r\n",
    b"SUB  foo   1\r\nPUB  foo   1\r\nx\r\n",
    b"SUB foo 1\r\nUNSUB 1 " + b"9" * 30 + b"\r\nPUB foo 1\r\nx\r\n",
    "SUB foo 1\r\nUNSUB 1 \u00b2\r\nPUB foo 1\r\nx\r\n".encode(),
    b"SUB foo 1\r\nUNSUB 1 -3\r\nPUB foo 1\r\nx\r\n",
]


def test_commands_get_the_same_answers(newest: Any) -> None:
    newest.each(COMMANDS, lambda data: same(newest, data))


VIOLATIONS = [
    b"NONSENSE\r\n",
    b"PUB foo\r\n",
    b"PUB foo x\r\n",
    b"PUB foo 3\r\nabcdef\r\n",
    b"PUB foo 2000000\r\n",
    b"CONNECT x\r\n",
    b"SUB foo\r\n",
    "PUB foo \u00b2\r\n".encode(),
    b"PUB foo " + b"9" * 3000 + b"\r\n",
    b"PUB foo -1\r\n",
    b"HPUB foo 9 3\r\nabc\r\n",
    b"SUB " + b"f" * 5000 + b" 1\r\n",
    b"CONNECT " + b"[" * 3000 + b"\r\n",
]


def test_protocol_violation_ends_the_connection(newest: Any) -> None:
    def check(data: bytes) -> None:
        (lines, _) = same(newest, data)
        assert "PONG" not in lines

    newest.each(VIOLATIONS, check)


def test_client_without_echo_does_not_get_its_own_messages(newest: Any) -> None:
    assert same(newest, b"SUB foo 1\r\nPUB foo 1\r\nx\r\n", echo=False) == (["PONG"], [])


def test_client_without_no_responders_gets_no_503(newest: Any) -> None:
    assert same(newest, b"SUB r 1\r\nPUB nobody r 1\r\nx\r\n", no_responders=False) == (["PONG"], [])


def test_client_without_headers_support_gets_plain_messages(newest: Any) -> None:
    data = b"SUB foo 1\r\nPUB foo 1\r\nx\r\n"
    same(newest, data, headers=False, no_responders=False)


def test_request_without_responders_gets_503(pair: Any) -> None:
    (frame,) = pair.publish("nobody.there", wait=1)
    assert frame.status == "503"


def test_queue_group_gets_each_message_once(newest: Any) -> None:
    for raw in newest.fresh():
        for sid in range(3):
            raw.send(f"SUB work g {sid}\r\nSUB work other {sid + 10}\r\n".encode())
        for _ in range(30):
            raw.publish("work", b"x")
        raw.flush()
        assert len(raw.frames) == 60
        raw.close()
