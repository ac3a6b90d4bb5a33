"""What tests of consumers ask a pair of servers."""

import json
from typing import Any


def create(pair: Any, name: str = "C", stream: str = "S", **config: Any) -> Any:
    config.setdefault("ack_policy", "explicit")
    config.setdefault("durable_name", name)
    return pair.api(f"CONSUMER.CREATE.{stream}.{name}", {"stream_name": stream, "config": config})


def pull(pair: Any, payload: object = b"", *, wait: int = 1, name: str = "C", timeout: float = 10.0) -> list[Any]:
    data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return pair.publish(f"$JS.API.CONSUMER.MSG.NEXT.S.{name}", data, wait=wait, timeout=timeout)


def ack(pair: Any, seq: int, word: bytes = b"", *, delivery: int | None = None, count: int = 1, name: str = "C") -> Any:
    """Acknowledge with an answer; the token of the time is not looked at."""
    return pair.publish(f"$JS.ACK.S.{name}.{count}.{seq}.{delivery or seq}.1.0", word)


def info(pair: Any, name: str = "C") -> Any:
    return pair.api(f"CONSUMER.INFO.S.{name}")
