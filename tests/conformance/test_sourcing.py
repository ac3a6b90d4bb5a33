"""Mirrors and sources, with and without durable consumers."""

import base64
import json
import re
from itertools import product
from typing import Any

import pytest

SECOND = 1_000_000_000


def create(raw: Any, name: str, kind: str, source: dict[str, Any]) -> Any:
    """Create a copy on one server; the answer is not compared, because it depends on how fast the copying starts."""
    wanted = {"mirror": source} if kind == "mirror" else {"sources": [source]}
    return raw.ask(f"$JS.API.STREAM.CREATE.{name}", json.dumps({"name": name, "storage": "memory", **wanted}).encode())


def wait_for_copies(pair: Any, name: str, messages: int) -> Any:
    """Wait until a stream has this many messages on both servers, and return its info."""
    for raw in pair._clients:
        raw.frames.clear()
    return pair.ask_until(f"$JS.API.STREAM.INFO.{name}", lambda answer: answer["state"]["messages"] == messages)


def contents(pair: Any, name: str, last: int) -> list[list[tuple[Any, ...]]]:
    """Return the messages that each server has in a stream, without times and generated names."""
    found = []
    for raw in pair._clients:
        rows = []
        for seq in range(1, last + 1):
            raw.publish(f"$JS.API.STREAM.MSG.GET.{name}", b'{"seq":%d}' % seq, reply="R.get")
            raw.wait(lambda raw=raw: bool(raw.frames))
            message = raw.frames.pop().json.get("message", {})
            header = base64.b64decode(message.get("hdrs", ""))
            header = re.sub(rb"(?<=[ :=])[0-9A-Za-z]{8}(?=[\r ])", b"<id>", header)
            header = re.sub(rb"O\d+:[^ ]*", b"O:<consumer>", header)
            rows.append((message.get("subject"), message.get("seq"), message.get("data"), header))
        found.append(rows)
    return found


def rows(answer: Any) -> list[dict[str, Any]]:
    """Return the rows of mirrors and sources; `active` only says whether they were active."""
    found = answer.get("sources", []) + [answer[name] for name in ("mirror",) if name in answer]
    return [{**row, "active": row["active"] >= 0} for row in found]


def fill(pair: Any, headers: Any, **config: Any) -> None:
    pair.stream(pair.named("O"), allow_direct=True, **config)
    for index in range(6):
        pair.publish(
            f"o.{'ab'[index % 2]}", b"m" * index, header=headers(X=index, Nats_Msg_Id=index) if index % 3 else b""
        )


KINDS = ("mirror", "source")
PARTS: list[dict[str, Any]] = [
    {},
    {"filter_subject": "o.a"},
    {"opt_start_seq": 3},
    {"opt_start_time": "2020-01-01T00:00:00Z"},
]


@pytest.mark.since("2.12.8")
def test_mirrors_and_sources_copy_the_same_messages(pair: Any, headers: Any) -> None:
    def check(cell: tuple[str, dict[str, Any]]) -> None:
        kind, config = cell
        origin, copy = pair.named("O"), pair.named("C")
        fill(pair, headers)
        pair.api(f"STREAM.MSG.DELETE.{origin}", {"seq": 4})
        for raw in pair._clients:
            assert "error" not in create(raw, copy, kind, {"name": origin, **config})
        expected = 3 if {"filter_subject", "opt_start_seq"} & config.keys() else 5
        answer = wait_for_copies(pair, copy, expected)
        assert rows(answer)[0]["active"]
        pair.publish("o.a", b"late")
        wait_for_copies(pair, copy, expected + 1)
        real, reference = contents(pair, copy, 8)
        assert reference == real

    pair.each(product(KINDS, PARTS), check)


def test_mirror_keeps_sequences(newest: Any, headers: Any) -> None:
    origin, copy = newest.named("O"), newest.named("C")
    fill(newest, headers)
    newest.api(f"STREAM.PURGE.{origin}", {"seq": 4})
    for raw in newest._clients:
        create(raw, copy, "mirror", {"name": origin})
    answer = wait_for_copies(newest, copy, 3)
    assert (answer["state"]["first_seq"], answer["state"]["last_seq"]) == (4, 6)
    assert answer["config"]["mirror_direct"] is True


def test_copied_messages_leave_work_queue_and_interest_streams(newest: Any, headers: Any) -> None:
    def check(cell: tuple[str, str]) -> None:
        retention, kind = cell
        origin, copy = newest.named("O"), newest.named("C")
        newest.stream(origin, retention=retention)
        for raw in newest._clients:
            create(raw, copy, kind, {"name": origin})
        # Without a consumer, an interest stream stores nothing.
        newest.ask_until(f"$JS.API.CONSUMER.LIST.{origin}", lambda answer: answer["consumers"])
        for _ in range(3):
            newest.publish("o.a", b"x")
        wait_for_copies(newest, copy, 3)
        for raw in newest._clients:
            (consumer,) = raw.ask(f"$JS.API.CONSUMER.LIST.{origin}")["consumers"]
            assert consumer["config"]["ack_policy"] == "flow_control"
            assert consumer["name"].startswith("JS_MIRROR_" if kind == "mirror" else "JS_SRC_")
        newest.ask_until(f"$JS.API.STREAM.INFO.{origin}", lambda answer: not answer["state"]["messages"])

    newest.each(product(("workqueue", "interest"), KINDS), check)


def test_source_copies_through_a_durable_consumer(newest: Any, headers: Any) -> None:
    origin, copy = newest.named("O"), newest.named("C")
    fill(newest, headers, retention="workqueue")
    config = {
        "durable_name": "out",
        "ack_policy": "flow_control",
        "deliver_subject": "deliver.out",
        "max_ack_pending": 2,
    }
    newest.api(f"CONSUMER.CREATE.{origin}.out", {"stream_name": origin, "config": config})
    source = {"name": origin, "consumer": {"name": "out", "deliver_subject": "deliver.out"}}
    for raw in newest._clients:
        create(raw, copy, "source", source)
    wait_for_copies(newest, copy, 6)
    real, reference = contents(newest, copy, 6)
    assert reference == real


DURABLE: list[dict[str, Any]] = [
    {"name": "x"},
    {"deliver_subject": "d"},
    {"name": "x", "deliver_subject": "d.*"},
    {"name": "x.y", "deliver_subject": "d"},
    {"name": "x", "deliver_subject": "d", "server_managed": True},
]


@pytest.mark.since("2.12.8")
def test_durable_sourcing_configurations_are_checked_alike(pair: Any) -> None:
    def check(cell: tuple[dict[str, Any], dict[str, Any]]) -> None:
        consumer, more = cell
        source = {"name": pair.named("O"), "consumer": consumer, **more}
        for name, wanted in ((pair.named("C"), {"sources": [source]}), (pair.named("D"), {"mirror": source})):
            pair.api(f"STREAM.CREATE.{name}", {"name": name, "storage": "memory", **wanted})

    pair.each(product(DURABLE, [{}, {"opt_start_seq": 5}, {"filter_subject": "a"}]), check)


def test_source_reports_a_consumer_without_flow_control_acks(newest: Any) -> None:
    origin, copy = newest.named("O"), newest.named("C")
    newest.stream(origin)
    config = {"durable_name": "c", "ack_policy": "explicit", "deliver_subject": "d"}
    newest.api(f"CONSUMER.CREATE.{origin}.c", {"stream_name": origin, "config": config})
    for raw in newest._clients:
        create(raw, copy, "source", {"name": origin, "consumer": {"name": "c", "deliver_subject": "d"}})
    newest.ask_until(
        f"$JS.API.STREAM.INFO.{copy}",
        lambda answer: answer["sources"][0].get("error", {}).get("err_code") == 10217,
    )
