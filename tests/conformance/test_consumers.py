"""Consumers: the API, pull and push delivery, acknowledgements, redelivery, reset."""

import json
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from consuming import ack, create, info, pull

SECOND = 1_000_000_000


def fill(pair: Any, headers: Any) -> None:
    """Create a stream of six messages on two subjects."""
    pair.stream()
    for index in range(6):
        pair.publish(f"s.{'ab'[index % 2]}", b"m" * (index + 1), header=headers(N=index) if index == 3 else b"")


@pytest.fixture
def stream(pair: Any, headers: Any) -> Any:
    fill(pair, headers)
    return pair


CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"ack_policy": "none"},
    {"ack_policy": "all"},
    {"ack_policy": "odd"},
    {"ack_policy": "flow_control"},
    {"ack_policy": "flow_control", "deliver_subject": "out"},
    {"ack_policy": "flow_control", "deliver_subject": "out", "idle_heartbeat": 5 * SECOND},
    {"ack_policy": "flow_control", "deliver_subject": "out", "max_deliver": 5},
    {"ack_policy": "flow_control", "deliver_subject": "out", "ack_wait": 5 * SECOND},
    {"ack_policy": "flow_control", "deliver_subject": "out", "max_ack_pending": -1},
    {"deliver_policy": "last"},
    {"deliver_policy": "new"},
    {"deliver_policy": "last_per_subject"},
    {"deliver_policy": "last_per_subject", "filter_subject": "s.>"},
    {"deliver_policy": "last", "filter_subject": "s.a"},
    {"deliver_policy": "by_start_sequence"},
    {"deliver_policy": "by_start_sequence", "opt_start_seq": 4},
    {"deliver_policy": "by_start_sequence", "opt_start_seq": 99},
    {"deliver_policy": "by_start_time", "opt_start_time": "2020-01-01T00:00:00Z"},
    {"deliver_policy": "by_start_time", "opt_start_time": "2100-01-01T00:00:00Z"},
    {"deliver_policy": "by_start_time"},
    {"deliver_policy": "all", "opt_start_seq": 4},
    {"deliver_policy": "new", "opt_start_time": "2020-01-01T00:00:00Z"},
    {"filter_subject": "s.a"},
    {"filter_subject": "s..a"},
    {"filter_subjects": ["s.a", "s.b"]},
    {"filter_subjects": ["s.a", "s.*"]},
    {"filter_subjects": ["s.a", ""]},
    {"filter_subject": "s.a", "filter_subjects": ["s.b"]},
    {"max_deliver": 3, "backoff": [SECOND, 2 * SECOND, 3 * SECOND]},
    {"max_deliver": 2, "backoff": [SECOND, 2 * SECOND, 3 * SECOND]},
    {"max_ack_pending": 5, "max_waiting": 3, "description": "d", "ack_wait": 5 * SECOND},
    {"deliver_subject": "out"},
    {"deliver_subject": "out", "ack_policy": "none", "max_ack_pending": 5},
    {"deliver_subject": "out.*"},
    {"deliver_subject": "s.x"},
    {"deliver_subject": "out", "max_waiting": 5},
    {"deliver_subject": "out", "flow_control": True},
    {"deliver_subject": "out", "flow_control": True, "idle_heartbeat": 5 * SECOND},
    {"deliver_subject": "out", "idle_heartbeat": 5},
    {"deliver_subject": "out", "deliver_group": "g"},
    {"idle_heartbeat": SECOND},
    {"flow_control": True},
    {"num_replicas": 3},
    {"num_replicas": -1},
    {"name": "other"},
    {"durable_name": "other"},
    {"inactive_threshold": 60 * SECOND},
    {"headers_only": True, "mem_storage": True, "metadata": {"a": "b"}},
    {"nonsense": 1},
    {"max_deliver": -5, "max_ack_pending": -5},
]


def test_consumer_configurations_are_checked_alike(stream: Any) -> None:
    for config in CONFIGURATIONS:
        if config.get("max_deliver") == -5 and not stream.since("2.12.0"):
            continue  # older releases keep such values
        create(stream, **config)
        if config.get("durable_name") != "other":
            info(stream)
        stream.api(f"CONSUMER.LIST.{stream.name}")
        stream.api(f"CONSUMER.DELETE.{stream.name}.C")


@pytest.mark.since("2.12.8")
def test_consumer_api_requests_are_answered_alike(stream: Any) -> None:
    plain = {"stream_name": stream.name, "config": {"ack_policy": "explicit", "durable_name": "C"}}
    stream.api(f"CONSUMER.DURABLE.CREATE.{stream.name}.C", plain)
    stream.api(f"CONSUMER.DURABLE.CREATE.{stream.name}.D", plain)
    stream.api(f"CONSUMER.DURABLE.CREATE.{stream.name}.C", {"stream_name": stream.name, "config": {}})
    stream.api(f"CONSUMER.CREATE.{stream.name}", plain)
    stream.api("CONSUMER.CREATE.T.C", plain)
    stream.api("CONSUMER.CREATE.T.C", {**plain, "stream_name": "T"})
    stream.api(f"CONSUMER.CREATE.{stream.name}.C.s.a", plain)
    stream.api(
        f"CONSUMER.CREATE.{stream.name}.E.s.a",
        {"stream_name": stream.name, "config": {"name": "E", "filter_subject": "s.a"}},
    )
    stream.api(
        f"CONSUMER.CREATE.{stream.name}.E.s.a",
        {"stream_name": stream.name, "config": {"name": "E", "filter_subjects": ["s.a"]}},
    )
    stream.api(f"CONSUMER.CREATE.{stream.name}.C", {**plain, "action": "create"})
    stream.api(
        f"CONSUMER.CREATE.{stream.name}.F",
        {"stream_name": stream.name, "config": {"durable_name": "F"}, "action": "update"},
    )
    stream.api(f"CONSUMER.NAMES.{stream.name}")
    stream.api(f"CONSUMER.NAMES.{stream.name}", {"offset": 1})
    stream.api("CONSUMER.NAMES.nope")
    stream.api(f"CONSUMER.LIST.{stream.name}", {"offset": 1})
    stream.api(f"CONSUMER.INFO.{stream.name}.nope")
    stream.api("CONSUMER.INFO.nope.C")
    stream.api(f"CONSUMER.DELETE.{stream.name}.C")
    stream.api(f"CONSUMER.DELETE.{stream.name}.C")
    stream.api(f"CONSUMER.NAMES.{stream.name}")


REQUESTS: list[list[tuple[object, int]]] = [
    [(b"", 1), (b"2", 2), ({"batch": 2}, 2)],
    [({"batch": 10, "no_wait": True}, 7)],
    [({"batch": 6, "no_wait": True}, 6), ({"batch": 1, "no_wait": True}, 1)],
    [({"batch": 10, "expires": SECOND // 5}, 7)],
    [(b"x", 1), (b"{", 1), ({"batch": 1, "idle_heartbeat": SECOND, "expires": SECOND}, 1)],
]


@pytest.mark.since("2.11.11")
def test_pull_requests_get_the_same_replies(pair: Any, headers: Any) -> None:
    def check(requests: list[tuple[object, int]]) -> None:
        fill(pair, headers)
        create(pair)
        for request, replies in requests:
            pull(pair, request, wait=replies)
            info(pair)

    pair.each(REQUESTS, check)


def test_pull_requests_above_max_waiting_are_refused(pair: Any) -> None:
    pair.stream()
    create(pair, max_waiting=1)
    pull(pair, {"batch": 1, "expires": 60 * SECOND}, wait=0)
    [refused] = pull(pair, {"batch": 1, "expires": 60 * SECOND})
    assert refused.status == "409 Exceeded MaxWaiting"


def test_waiting_pull_request_gets_new_messages(pair: Any) -> None:
    pair.stream()
    create(pair, filter_subject="s.a")
    assert pull(pair, {"batch": 2, "expires": 60 * SECOND}, wait=0) == []
    info(pair)
    pair.publish("s.b", b"other")
    assert len(pair.publish("s.a", b"one")) == 2
    assert len(pair.publish("s.a", b"two")) == 2
    assert len(pair.publish("s.a", b"three")) == 1
    pair.eventually(lambda: info(pair))


def test_pull_request_gets_heartbeats_until_it_expires(newest: Any) -> None:
    newest.stream()
    create(newest)
    request = b'{"batch":1,"expires":1500000000,"idle_heartbeat":200000000}'
    heard = []
    for raw in newest._clients:
        raw.publish(f"$JS.API.CONSUMER.MSG.NEXT.{newest.name}.C", request, reply="R.beats")
        assert raw.wait(lambda raw=raw: bool(raw.frames) and raw.frames[-1].status.startswith("408"))
        *beats, end = (newest._shown(frame) for frame in raw.frames)
        # How many there are depends on the machine: a server that was busy leaves some out.
        assert 1 <= len(beats) <= 7
        assert beats == beats[:1] * len(beats)
        assert [frame.status for frame in raw.frames[-2:]] == ["100 Idle Heartbeat", "408 Request Timeout"]
        heard.append((beats[0], end))
        raw.frames.clear()
    assert heard[0] == heard[1]


ACKS = ((2, b""), (1, b"+ACK"), (1, b"+ACK"), (4, b"+WPI"), (5, b"+TERM"), (3, b"+OK"), (99, b""), (6, b"nonsense"))


def test_acknowledgements_change_the_same_state(pair: Any, headers: Any) -> None:
    def check(policy: str) -> None:
        fill(pair, headers)
        create(pair, ack_policy=policy)
        pull(pair, {"batch": 6, "no_wait": True}, wait=6)
        info(pair)
        for seq, word in ACKS:
            ack(pair, seq, word)
            info(pair)
        ack(pair, 6, b"+NXT")
        pair.api(f"STREAM.INFO.{pair.name}")

    pair.each(["explicit", "all", "none"], check)


def test_naks_and_timeouts_redeliver(stream: Any) -> None:
    create(stream, ack_wait=60 * SECOND, max_deliver=3)
    pull(stream, {"batch": 2, "no_wait": True}, wait=2)
    ack(stream, 1, b"-NAK")
    pull(stream, {"batch": 1, "no_wait": True})
    ack(stream, 2, b'-NAK {"delay": 100000000}')
    time.sleep(0.5)  # longer than the delay
    pull(stream, {"batch": 1, "no_wait": True})
    info(stream)


def test_delivery_ends_at_max_deliver_with_an_advisory(newest: Any) -> None:
    newest.stream()
    newest.publish("s.a", b"x")
    newest.raw(b"SUB $JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.> 2\r\n")
    create(newest, ack_wait=SECOND // 4, max_deliver=2)
    frames = pull(newest, {"batch": 5, "expires": 2 * SECOND}, wait=3)
    assert len(frames) == 3
    info(newest)
    newest.compare_advisories()


def test_backoff_sets_the_times_of_redelivery(newest: Any) -> None:
    newest.stream()
    newest.publish("s.a", b"x")
    create(newest, backoff=[SECOND // 5, SECOND // 2], max_deliver=4)
    frames = pull(newest, {"batch": 5, "expires": 3 * SECOND}, wait=5)
    assert len(frames) == 5
    info(newest)


def test_max_ack_pending_stops_delivery_until_an_ack(stream: Any) -> None:
    create(stream, max_ack_pending=2)
    pull(stream, {"batch": 4, "expires": 60 * SECOND}, wait=2)
    info(stream)
    ack(stream, 1)
    stream.settle()
    info(stream)


PUSHED: list[dict[str, Any]] = [
    {},
    {"ack_policy": "none"},
    {"filter_subject": "s.b"},
    {"filter_subjects": ["s.a", "s.z"]},
    {"deliver_policy": "last"},
    {"deliver_policy": "new"},
    {"deliver_policy": "last_per_subject", "filter_subject": "s.*"},
    {"deliver_policy": "by_start_sequence", "opt_start_seq": 4},
    {"headers_only": True},
    {"max_ack_pending": 2},
]


def test_push_consumer_delivers_the_same_messages(pair: Any, headers: Any) -> None:
    def check(config: dict[str, Any]) -> None:
        fill(pair, headers)
        pair.raw(b"SUB Q.out 7\r\n")
        create(pair, deliver_subject="Q.out", **config)
        info(pair)
        pair.publish("s.a", b"more")
        pair.publish("s.b", b"more")
        ack(pair, 1)
        info(pair)
        pull(pair, b"1")

    pair.each(PUSHED, check)


def test_push_consumer_of_a_group_delivers_to_the_group(stream: Any) -> None:
    create(stream, deliver_subject="Q.out", deliver_group="g")
    stream.raw(b"SUB Q.out 7\r\n")
    stream.settle()
    info(stream)
    stream.raw(b"SUB Q.out g 8\r\n")
    stream.settle()
    stream.publish("s.a", wait=2)
    stream.eventually(lambda: info(stream))


def test_push_consumer_waits_for_a_subscriber(stream: Any) -> None:
    create(stream, deliver_subject="Q.out")
    info(stream)
    stream.raw(b"SUB Q.out 7\r\n")
    stream.settle()
    info(stream)
    stream.raw(b"UNSUB 7\r\n")
    stream.publish("s.a", b"x")
    stream.eventually(lambda: info(stream))


def test_idle_push_consumer_sends_heartbeats(newest: Any) -> None:
    newest.stream()
    newest.publish("s.a", b"x")
    newest.raw(b"SUB Q.out 7\r\n")
    config = {"ack_policy": "explicit", "durable_name": "C", "deliver_subject": "Q.out", "idle_heartbeat": SECOND // 5}
    request = json.dumps({"stream_name": newest.name, "config": config}).encode()
    heard = []
    for raw in newest._clients:
        raw.ask(f"$JS.API.CONSUMER.CREATE.{newest.name}.C", request)
        assert raw.wait(lambda raw=raw: len(raw.frames) >= 3)
        heard.append([newest._shown(frame) for frame in raw.frames[:3]])
    assert heard[0] == heard[1]
    assert [frame.status for frame in raw.frames[:3]] == ["", "100 Idle Heartbeat", "100 Idle Heartbeat"]


def test_deleting_a_consumer_ends_its_pull_requests(stream: Any) -> None:
    create(stream)
    pull(stream, {"batch": 9, "expires": 60 * SECOND}, wait=6)
    stream.api(f"CONSUMER.DELETE.{stream.name}.C")
    pull(stream)
    pull(stream, name="nope")


def test_ephemeral_consumer_without_subscriber_is_deleted(newest: Any) -> None:
    newest.stream()
    newest.raw(b"SUB Q.out 7\r\n")
    create(newest, name="E", durable_name="", deliver_subject="Q.out", inactive_threshold=SECOND // 5)
    assert newest.api(f"CONSUMER.NAMES.{newest.name}")["consumers"] == ["E"]
    newest.raw(b"UNSUB 7\r\n")
    newest.ask_until(f"$JS.API.CONSUMER.NAMES.{newest.name}", lambda answer: not answer["consumers"])
    assert not newest.api(f"CONSUMER.NAMES.{newest.name}")["consumers"]


def test_removed_messages_are_no_longer_pending(stream: Any) -> None:
    create(stream)
    pull(stream, {"batch": 3, "no_wait": True}, wait=3)
    stream.api(f"STREAM.MSG.DELETE.{stream.name}", {"seq": 2})
    info(stream)
    stream.api(f"STREAM.PURGE.{stream.name}", {"filter": "s.a"})
    info(stream)
    stream.api(f"STREAM.PURGE.{stream.name}")
    info(stream)
    stream.publish("s.a", b"new")
    pull(stream)
    info(stream)


@pytest.mark.since("2.15.1")
def test_message_is_removed_when_no_consumer_needs_it(pair: Any) -> None:
    def check(retention: str) -> None:
        pair.stream(retention=retention)
        create(pair, filter_subject="s.a")
        create(pair, "D", filter_subject="s.a")
        create(pair, "E", filter_subject="s.>")
        create(pair, "F", filter_subject="s.b", ack_policy="none")
        for subject in ("s.a", "s.b", "s.c", "s.a"):
            pair.publish(subject, b"x")
        pair.api(f"STREAM.INFO.{pair.name}", {"deleted_details": True})
        pull(pair, {"batch": 5, "no_wait": True}, wait=2)
        ack(pair, 1)
        pair.api(f"STREAM.INFO.{pair.name}", {"deleted_details": True})
        for name in pair.api(f"CONSUMER.NAMES.{pair.name}")["consumers"]:
            pair.api(f"CONSUMER.DELETE.{pair.name}.{name}")
        pair.settle()
        pair.api(f"STREAM.INFO.{pair.name}", {"deleted_details": True})

    pair.each(["workqueue", "interest"], check)


RESETS: list[object] = [
    b"",
    b"{}",
    b"null",
    {"seq": 3},
    {"seq": 0},
    {"seq": 99},
    {"sequence": 3},
    b"[]",
    {"seq": -1},
    {"seq": "3"},
]


def test_reset_changes_the_same_state(stream: Any) -> None:
    if not stream.since("2.14.0"):
        assert stream.api(f"CONSUMER.RESET.{stream.name}.C", timeout=0.05) is None
        return
    for policy, request in product(("explicit", "all"), RESETS):
        create(stream, ack_policy=policy)
        pull(stream, {"batch": 4, "no_wait": True}, wait=4)
        for seq in (1, 2, 4):
            ack(stream, seq)
        stream.api(f"CONSUMER.RESET.{stream.name}.C", request)
        info(stream)
        pull(stream, {"batch": 2, "no_wait": True})
        info(stream)
        stream.api(f"CONSUMER.DELETE.{stream.name}.C")


STARTS: list[dict[str, Any]] = [
    {"deliver_policy": "new"},
    {"deliver_policy": "last"},
    {"deliver_policy": "by_start_sequence", "opt_start_seq": 3},
    {"deliver_policy": "by_start_time", "opt_start_time": "2020-01-01T00:00:00Z"},
    {"deliver_subject": "Q.out"},
]


@pytest.mark.since("2.14.6")
def test_reset_respects_the_deliver_policy(pair: Any, headers: Any) -> None:
    def check(config: dict[str, Any]) -> None:
        fill(pair, headers)
        pair.raw(b"SUB Q.out 7\r\n")
        create(pair, **config)
        for request in ({"seq": 2}, {"seq": 3}, {"seq": 5}, b""):
            pair.api(f"CONSUMER.RESET.{pair.name}.C", request)
            info(pair)
        pair.api(f"CONSUMER.RESET.{pair.name}.C", header=headers(Nats_Required_Api_Level=99))
        pair.api(f"CONSUMER.RESET.{pair.name}.nope", timeout=0.05)

    pair.each(STARTS, check)


def test_flow_control_acks_limit_delivery(newest: Any, headers: Any) -> None:
    newest.stream()
    newest.raw(b"SUB Q.out 7\r\n")
    create(newest, ack_policy="flow_control", deliver_subject="Q.out", max_ack_pending=2)
    for _ in range(3):
        newest.publish("s.a", b"x")
    newest.eventually(lambda: info(newest))
