"""What an idle query costs, how it notices a message, and what streams without new messages cost."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamSource


def _settle(query: Any, end: dict[str, Any], seconds: float = 2.0) -> None:
    """Ask as Spark does, until an idle query trusts its doorbells."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert query.latest(end) == end, "there is something new"
        time.sleep(0.01)


@pytest.mark.parametrize("streams", [1, 8])
def test_an_idle_query_asks_once_a_second_and_a_message_ends_the_wait(
    make_stream: Any, stream_query: Any, publish: Any, requests_seen: Any, streams: int
) -> None:
    names = [make_stream(10) for _ in range(streams)]
    query = stream_query(",".join(names))
    end = query.latest(query.initial())
    for count in (1, 2, 3):
        _settle(query, end)
        with requests_seen(*names) as requests:
            _settle(query, end, 4.0)
        assert len(requests) < 7 * streams  # it looks once a second, whatever else there is
        publish([(f"{names[-1]}.a", b"")])
        end = query.next(end)
        assert end["streams"][names[-1]]["seq"] == 10 + count


@pytest.mark.parametrize("pattern", [False, True])
def test_an_answer_has_what_was_stored_before_the_call(
    make_stream: Any, stream_query: Any, publish: Any, pattern: bool
) -> None:
    """`processAllAvailable` relies on that."""
    name = make_stream(10)
    query = stream_query("", streamPattern=name) if pattern else stream_query(name)
    end = query.latest(query.initial())
    for _ in range(20):
        assert query.latest(end) == end
        publish([(f"{name}.a", b"")])
        before, end = end, query.latest(end)
        assert end["streams"][name]["seq"] == before["streams"][name]["seq"] + 1


def test_a_consumer_wakes_a_query_of_a_mirror_and_is_deleted_when_the_query_stops(
    make_stream: Any, stream_query: Any, publish: Any, with_js: Any
) -> None:
    origin = make_stream(10)
    mirror = make_stream(
        name=f"{origin}M", mirror=StreamSource(name=origin), subjects=None, allow_atomic=None, allow_batched=None
    )

    async def consumers(js: JetStreamContext) -> int:
        return (await js.stream_info(mirror)).state.consumer_count

    query = stream_query(mirror)
    end = query.next(query.initial())
    while end["streams"][mirror]["seq"] < 10:
        end = query.next(end)
    _settle(query, end)
    assert with_js(consumers) == 1
    publish([(f"{origin}.a", b"")])
    end = query.next(end)
    _settle(query, end)
    query.reader.stop()
    while with_js(consumers):
        pass


def test_a_query_that_stops_leaves_no_subscription(make_stream: Any, stream_query: Any, measured: Any) -> None:
    def subscriptions() -> list[str]:
        with urllib.request.urlopen(f"{measured.endpoints['monitoring'][0]}/connz?subs=1") as answer:
            connections = json.load(answer)["connections"]
        return [one for connection in connections for one in connection.get("subscriptions_list", []) if "QUIET" in one]

    async def make(js: JetStreamContext) -> None:
        await js.add_stream(name="QUIET", subjects=["QUIET.>"], allow_direct=True)

    _on(measured, make)
    query = stream_query("QUIET", servers=measured.url)
    end = query.latest(query.initial())
    _settle(query, end)
    assert subscriptions() == ["QUIET.>"]
    query.reader.stop()
    while subscriptions():
        pass


def _on(server: Any, work: Any) -> None:
    import asyncio

    import nats

    async def connected() -> None:
        async with await nats.connect(server.url, connect_timeout=10) as nc:
            await work(nc.jetstream())

    asyncio.run(connected())


def test_streams_without_new_messages_have_no_partition_and_cost_no_request_of_the_plan(
    make_stream: Any, stream_query: Any, publish: Any, requests_seen: Any
) -> None:
    names = sorted(make_stream(1) for _ in range(20))
    query = stream_query(",".join(names))
    start = query.latest(query.initial())
    publish([(f"{names[5]}.a", b"new")])
    with requests_seen(*names) as requests:
        end = query.next(start)
        parts = query.parts(start, end)
    assert [[(row["stream"], row["seq"]) for row in part] for part in parts] == [[(names[5], 2)]]
    asked = [name for request in requests for name in names if name in request]
    assert all(asked.count(name) <= 1 for name in names if name != names[5])
    again = stream_query(",".join(names))
    with requests_seen(*names) as requests:
        assert again.partitions(start, end)
    assert all(names[5] in request for request in requests)


@pytest.mark.parametrize(("option", "expected"), [(None, 1), ("4", 4)])
def test_a_micro_batch_is_filled_up_to_min_partitions_only_if_that_is_given(
    make_stream: Any, stream_query: Any, publish: Any, option: str | None, expected: int
) -> None:
    names = [make_stream(1), make_stream(1)]
    query = stream_query(",".join(names), **({} if option is None else {"minPartitions": option}))
    start = query.latest(query.initial())
    publish([(f"{names[0]}.a", b"")])
    end = query.next(start)
    assert len(query.partitions(start, end)) == expected
    # An offset that has the number keeps it, whatever the options are.
    assert len(query.partitions(start, end | {"partitions": 3})) == 3
