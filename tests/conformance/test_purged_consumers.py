"""What a purge of its stream leaves of a consumer."""

import json
from typing import Any

import pytest

PURGES: list[dict[str, Any]] = [
    {},
    {"seq": 1},
    {"seq": 1, "filter": ">"},
    {"seq": 4},
    {"seq": 99},
    {"keep": 2},
    {"keep": 99},
    {"filter": "s.a"},
    {"filter": "s.a", "seq": 1},
    {"filter": "s.a", "seq": 4},
    {"filter": "s.a", "keep": 1},
    {"filter": "zz"},
]


def pull(pair: Any, batch: int, *, wait: int) -> None:
    pair.publish("$JS.API.CONSUMER.MSG.NEXT.S.C", json.dumps({"batch": batch, "no_wait": True}).encode(), wait=wait)


@pytest.mark.parametrize("purge", PURGES, ids=str)
@pytest.mark.parametrize("taken", [0, 2])
@pytest.mark.parametrize("pattern", ["", "s.a", "s.*"])
@pytest.mark.parametrize("storage", ["memory", "file"])
def test_a_purge(pair: Any, storage: str, pattern: str, taken: int, purge: dict[str, Any]) -> None:
    if not pair.since("2.11.0"):
        # There it is the last sequence that was looked at.
        pair.hidden |= {("delivered", "stream_seq"), ("ack_floor", "stream_seq")}
    if not pair.since("2.14.0"):
        pair.hidden.add(("ack_floor", "last_active"))  # either of two ways to hear of it may win there
    pair.stream(storage=storage, max_msgs=5)
    config = {"ack_policy": "explicit", "durable_name": "C", "filter_subject": pattern}
    pair.api("CONSUMER.CREATE.S.C", {"stream_name": "S", "config": config})
    for subject in ("s.a", "s.b", "s.a"):
        pair.publish(subject)
    if taken:
        pull(pair, taken, wait=taken)
    for subject in ("s.b", "s.a", "s.b", "s.a"):
        pair.publish(subject)
    pair.api("STREAM.PURGE.S", purge)
    pair.eventually(lambda: pair.api("CONSUMER.INFO.S.C"))
    pull(pair, 4, wait=1)
    pair.eventually(lambda: pair.api("CONSUMER.INFO.S.C"))
