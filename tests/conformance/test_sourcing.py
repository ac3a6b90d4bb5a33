"""Mirrors and sources, with and without durable consumers."""

import base64
import json
import re
import time
from typing import Any

import pytest

SECOND = 1_000_000_000


def steady(pair: Any, name: str, messages: int) -> Any:
    """Wait until a copy has so many messages on both servers, and compare it."""
    for raw in pair._clients:
        raw.frames.clear()
    return pair.ask_until(f"$JS.API.STREAM.INFO.{name}", lambda answer: answer["state"]["messages"] == messages)


def contents(pair: Any, name: str, last: int) -> list[list[tuple[Any, ...]]]:
    """Return the messages of a stream, of each server, without times and made-up names."""
    found = []
    for raw in pair._clients:
        rows = []
        for seq in range(1, last + 1):
            raw.publish(f"$JS.API.STREAM.MSG.GET.{name}", b'{"seq":%d}' % seq, reply="R.get")
            raw.wait(lambda raw=raw: bool(raw.frames))
            message = raw.frames.pop().json.get("message", {})
            header = base64.b64decode(message.get("hdrs", ""))
            header = re.sub(rb"(?<=[ :=])[0-9A-Za-z]{8}(?=[\r ])", b"<id>", header)
            header = re.sub(rb"O:[^ ]*", b"O:<consumer>", header)
            rows.append((message.get("subject"), message.get("seq"), message.get("data"), header))
        found.append(rows)
    return found


def rows(answer: Any) -> list[dict[str, Any]]:
    """Return the rows of mirrors and sources without how long ago they were active."""
    found = answer.get("sources", []) + [answer[name] for name in ("mirror",) if name in answer]
    return [{**row, "active": row["active"] >= 0} for row in found]


def fill(pair: Any, headers: Any, **config: Any) -> None:
    pair.stream("O", allow_direct=True, **config)
    for index in range(6):
        pair.publish(
            f"o.{'ab'[index % 2]}", b"m" * index, header=headers(X=index, Nats_Msg_Id=index) if index % 3 else b""
        )


@pytest.mark.parametrize("config", [{}, {"filter_subject": "o.a"}, {"opt_start_seq": 3}], ids=str)
@pytest.mark.parametrize("kind", ["mirror", "source"])
def test_copies(pair: Any, headers: Any, kind: str, config: dict[str, Any]) -> None:
    fill(pair, headers)
    pair.api("STREAM.MSG.DELETE.O", {"seq": 4})
    what = {"name": "O", **config}
    # Not compared: the answer depends on how fast the copying starts.
    for raw in pair._clients:
        create = {"name": "C", "storage": "memory", **({"mirror": what} if kind == "mirror" else {"sources": [what]})}
        raw.publish("$JS.API.STREAM.CREATE.C", json.dumps(create).encode(), reply="R.create")
        raw.wait(lambda raw=raw: bool(raw.frames))
        assert "error" not in raw.frames.pop().json
    expected = 3 if config else 5
    answer = steady(pair, "C", expected)
    assert rows(answer)[0]["active"]
    pair.publish("o.a", b"late")
    steady(pair, "C", expected + 1)
    real, reference = contents(pair, "C", 8)
    assert reference == real


def test_a_mirror_keeps_sequences(newest: Any, headers: Any) -> None:
    fill(newest, headers)
    newest.api("STREAM.PURGE.O", {"seq": 4})
    for raw in newest._clients:
        raw.publish(
            "$JS.API.STREAM.CREATE.C", b'{"name":"C","storage":"memory","mirror":{"name":"O"}}', reply="R.create"
        )
        raw.wait(lambda raw=raw: bool(raw.frames))
        raw.frames.clear()
    answer = steady(newest, "C", 3)
    assert (answer["state"]["first_seq"], answer["state"]["last_seq"]) == (4, 6)
    assert answer["config"]["mirror_direct"] is True


@pytest.mark.parametrize("retention", ["workqueue", "interest"])
@pytest.mark.parametrize("kind", ["mirror", "source"])
def test_copies_of_streams_that_let_go(newest: Any, headers: Any, retention: str, kind: str) -> None:
    newest.stream("O", retention=retention)
    what = {"name": "O"}
    create = {"name": "C", "storage": "memory", **({"mirror": what} if kind == "mirror" else {"sources": [what]})}
    for raw in newest._clients:
        raw.ask("$JS.API.STREAM.CREATE.C", json.dumps(create).encode())
    newest.ask_until("$JS.API.CONSUMER.LIST.O", lambda answer: answer["consumers"])  # what nobody wants is not kept
    for _ in range(3):
        newest.publish("o.a", b"x")
    steady(newest, "C", 3)
    for raw in newest._clients:
        (consumer,) = raw.ask("$JS.API.CONSUMER.LIST.O")["consumers"]
        assert consumer["config"]["ack_policy"] == "flow_control"
        assert consumer["name"].startswith("JS_MIRROR_" if kind == "mirror" else "JS_SRC_")
    newest.ask_until("$JS.API.STREAM.INFO.O", lambda answer: not answer["state"]["messages"])


def test_durable_sourcing(newest: Any, headers: Any) -> None:
    fill(newest, headers, retention="workqueue")
    config = {
        "durable_name": "out",
        "ack_policy": "flow_control",
        "deliver_subject": "deliver.out",
        "max_ack_pending": 2,
    }
    newest.api("CONSUMER.CREATE.O.out", {"stream_name": "O", "config": config})
    create = {
        "name": "C",
        "storage": "memory",
        "sources": [{"name": "O", "consumer": {"name": "out", "deliver_subject": "deliver.out"}}],
    }
    for raw in newest._clients:
        raw.publish("$JS.API.STREAM.CREATE.C", json.dumps(create).encode(), reply="R.create")
        raw.wait(lambda raw=raw: bool(raw.frames))
        raw.frames.clear()
    steady(newest, "C", 6)
    real, reference = contents(newest, "C", 6)
    assert reference == real


@pytest.mark.parametrize(
    "consumer",
    [
        {"name": "x"},
        {"deliver_subject": "d"},
        {"name": "x", "deliver_subject": "d.*"},
        {"name": "x.y", "deliver_subject": "d"},
        {"name": "x", "deliver_subject": "d", "server_managed": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("more", [{}, {"opt_start_seq": 5}, {"filter_subject": "a"}], ids=str)
def test_configurations_of_durable_sourcing(pair: Any, consumer: dict[str, Any], more: dict[str, Any]) -> None:
    what = {"name": "O", "consumer": consumer, **more}
    # In memory: old releases may still have the folder of the last test's streams.
    pair.api("STREAM.CREATE.C", {"name": "C", "storage": "memory", "sources": [what]})
    pair.api("STREAM.CREATE.D", {"name": "D", "storage": "memory", "mirror": what})


def test_a_consumer_that_acknowledges_in_another_way(newest: Any) -> None:
    newest.stream("O")
    newest.api(
        "CONSUMER.CREATE.O.c",
        {"stream_name": "O", "config": {"durable_name": "c", "ack_policy": "explicit", "deliver_subject": "d"}},
    )
    create = b'{"name":"C","storage":"memory","sources":[{"name":"O","consumer":{"name":"c","deliver_subject":"d"}}]}'
    for raw in newest._clients:
        raw.publish("$JS.API.STREAM.CREATE.C", create, reply="R.create")
        raw.wait(lambda raw=raw: bool(raw.frames))
        raw.frames.clear()
        for _ in range(100):
            raw.publish("$JS.API.STREAM.INFO.C", reply="R.info")
            raw.wait(lambda raw=raw: bool(raw.frames))
            (row,) = raw.frames.pop().json["sources"]
            if "error" in row:
                break
            time.sleep(0.05)
        assert row["error"]["err_code"] == 10217
