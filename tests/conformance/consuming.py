"""Requests to the consumers of a test's stream, sent to a pair of servers."""

import json
from typing import Any


def create(pair: Any, name: str = "C", **config: Any) -> Any:
    config.setdefault("ack_policy", "explicit")
    config.setdefault("durable_name", name)
    return pair.api(f"CONSUMER.CREATE.{pair.name}.{name}", {"stream_name": pair.name, "config": config})


def pull(pair: Any, payload: object = b"", *, wait: int = 1, name: str = "C", timeout: float = 10.0) -> list[Any]:
    data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return pair.publish(f"$JS.API.CONSUMER.MSG.NEXT.{pair.name}.{name}", data, wait=wait, timeout=timeout)


def ack(pair: Any, seq: int, word: bytes = b"", *, delivery: int | None = None, count: int = 1, name: str = "C") -> Any:
    """Acknowledge with a reply subject; the servers ignore the token of the time."""
    return pair.publish(f"$JS.ACK.{pair.name}.{name}.{count}.{seq}.{delivery or seq}.1.0", word)


def info(pair: Any, name: str = "C") -> Any:
    return pair.api(f"CONSUMER.INFO.{pair.name}.{name}")
