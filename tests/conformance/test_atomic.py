"""Atomic batches, frame by frame."""

import time
from typing import Any

import pytest

from jetstream_ext.testing import NatsServer
from jetstream_ext.testing.reference import Limits, ReferenceServer


def lines(batch: str = "b", seq: object = 1, commit: str | None = None, **more: object) -> dict[str, object]:
    """Return the header lines of a message of a batch."""
    end = {} if commit is None else {"Nats_Batch_Commit": commit}
    return {"Nats_Batch_Id": batch, "Nats_Batch_Sequence": seq, **end, **more}


@pytest.fixture
def batches(pair: Any, headers: Any) -> Any:
    """Send messages with these header lines, then compare the stream and the advisories."""

    def run(*messages: dict[str, object], **config: Any) -> None:
        if pair.since("2.12.0"):
            config.setdefault("allow_atomic", True)
        if not pair.since("2.11.0"):
            config.pop("allow_msg_ttl", None)
        pair.stream(allow_direct=True, **config)
        if "no_ack" in config:
            pair.quiet = 0.05
        pair.raw(b"SUB $JS.EVENT.ADVISORY.STREAM.BATCH_ABANDONED.> 2\r\n")
        for index, each in enumerate(messages):
            more = dict(each)
            if more.get("Nats_Expected_Stream") == "S":
                more["Nats_Expected_Stream"] = pair.name
            subject = str(more.pop("subject", f"s.{index}"))
            pair.publish(subject, f"m{index}".encode(), header=headers(**more))
        pair.eventually(lambda: pair.api(f"STREAM.INFO.{pair.name}"))
        if pair.since("2.11.0"):
            pair.publish(f"$JS.API.DIRECT.GET.{pair.name}", b'{"batch":20,"seq":1}', wait=1)
        pair.compare_advisories()

    return run


ONE = {"Nats_Msg_Id": "one"}


BATCHES: list[list[dict[str, object]]] = [
    [lines(), lines(seq=2), lines(seq=3, commit="1")],
    [lines(commit="1")],
    [lines(commit="eob")],
    [lines(), lines(seq=2), lines(seq=3, commit="eob")],
    [lines(), lines(seq=2, commit="eob"), lines(seq=3)],
    [lines(), lines(seq=2), lines(seq=2, commit="eob")],
    [lines(), lines(seq=3)],
    [lines(), lines(seq=1)],
    [lines(), lines(seq=1), lines(), lines(seq=2, commit="1")],
    [lines(seq=2)],
    [lines(seq=2000)],
    [lines(seq=1001, commit="eob")],
    [lines(seq=0)],
    [lines(seq="abc")],
    [lines(seq="-1")],
    [lines(seq="1.0")],
    [lines(seq="")],
    [lines(seq="01"), lines(seq=" 2", commit="1")],
    [{"Nats_Batch_Id": "b"}],
    [{"Nats_Batch_Id": "", "Nats_Batch_Sequence": 1}],
    [{"nats-batch-id": "b", "Nats_Batch_Sequence": 1}],
    [lines("x" * 64), lines("x" * 64, 2, "1")],
    [lines("x" * 65)],
    *([lines(), lines(seq=2, commit=value), lines(seq=3, commit="1")] for value in ("EOB", "0", "true", "", "2")),
    [lines(), lines(seq=2, Nats_Required_Api_Level=99), lines(seq=3)],
    [lines(Nats_Required_Api_Level=2), lines(seq=2, commit="1")],
    [lines(Nats_Expected_Last_Msg_Id="x"), lines(seq=2, commit="1")],
    [ONE, lines(Nats_Msg_Id="one"), lines(seq=2, commit="1")],
    [lines(Nats_Msg_Id="a"), lines(seq=2, Nats_Msg_Id="a", commit="1")],
    [lines(Nats_Msg_Id="a"), lines(seq=2, Nats_Msg_Id="b", commit="1"), lines("c", 1, "1", Nats_Msg_Id="b")],
    [ONE, lines(Nats_Expected_Last_Sequence=1), lines(seq=2, commit="1")],
    [ONE, lines(Nats_Expected_Last_Sequence=0), lines(seq=2, commit="1")],
    [ONE, lines(), lines(seq=2, Nats_Expected_Last_Sequence=1, commit="1")],
    [ONE, lines(), lines(seq=2, Nats_Expected_Last_Sequence=2, commit="1")],
    [ONE, lines(subject="s.0", Nats_Expected_Last_Subject_Sequence=1), lines(seq=2, commit="1")],
    [ONE, lines(subject="s.0", Nats_Expected_Last_Subject_Sequence=0), lines(seq=2, commit="1")],
    [lines(subject="s.a"), lines(subject="s.a", seq=2, Nats_Expected_Last_Subject_Sequence=0, commit="1")],
    [lines(Nats_Expected_Last_Subject_Sequence=0), lines(seq=2, Nats_Expected_Last_Subject_Sequence=0, commit="1")],
    [
        ONE,
        lines(Nats_Expected_Last_Subject_Sequence=1, Nats_Expected_Last_Subject_Sequence_Subject="s.0", commit="1"),
    ],
    [lines(Nats_Expected_Last_Subject_Sequence_Subject="s.0", commit="1")],
    [lines(Nats_Expected_Stream="S"), lines(seq=2, Nats_Expected_Stream="T", commit="1")],
    [lines(Nats_TTL=5), lines(seq=2, commit="1")],
    [lines(Nats_TTL="bad"), lines(seq=2, commit="1")],
    [lines(Nats_Rollup="sub"), lines(seq=2, commit="1")],
    [lines(), lines(seq=2), lines("c"), lines("c", 2, "1"), lines(seq=3, commit="1")],
    [lines(commit="1"), lines(commit="1")],
]


@pytest.mark.since("2.14.6")
def test_batches_are_stored_or_refused_alike(batches: Any, pair: Any) -> None:
    pair.each(BATCHES, lambda messages: batches(*messages))


@pytest.mark.since("2.12.8")
def test_rollups_in_a_batch_are_checked(batches: Any, pair: Any) -> None:
    same = {"subject": "s.a"}

    def check(rollups: tuple[str | None, str | None]) -> None:
        first, second = ({} if value is None else {"Nats_Rollup": value} for value in rollups)
        batches(ONE | same, lines(**first, **same), lines(seq=2, commit="1", **second, **same), allow_rollup_hdrs=True)

    pair.each([("sub", None), (None, "sub"), ("all", None), (None, "all"), ("odd", None)], check)


CONFIGURATIONS: list[dict[str, Any]] = [
    {"allow_atomic": False},
    {"discard": "new", "max_msgs": 2},
    {"discard": "new", "max_msgs": 3},
    {"discard": "new", "max_bytes": 150},
    {"max_msgs": 2},
    {"max_msg_size": 62},
    {"allow_msg_ttl": True},
    {"no_ack": True},
    {"storage": "file"},
]


@pytest.mark.since("2.12.8")
def test_batch_respects_the_stream_configuration(batches: Any, pair: Any) -> None:
    same = {"subject": "s.a"}

    def check(config: dict[str, Any]) -> None:
        ttl = 5 if "allow_msg_ttl" in config else 0
        batches(ONE, lines(Nats_TTL=ttl, **same), lines(seq=2, commit="1", **same), **config)

    pair.each(CONFIGURATIONS, check)


@pytest.mark.since("2.14.6")
def test_batch_above_the_limit_of_open_batches_is_refused(pair: Any, headers: Any) -> None:
    pair.stream(allow_atomic=True)
    for index in range(51):  # all at once: batches expire after 10 s
        for raw in pair._clients:
            raw.publish("s.a", header=headers(**lines(f"b{index}")), reply=f"R.b{index}")
    pair.settle(wait=51)
    pair.publish("s.a", header=headers(**lines("extra", 1, "1")))
    pair.publish("s.a", header=headers(**lines("b7", 2, "1")))
    pair.publish("s.a", header=headers(**lines("extra", 1, "1")))


def test_batch_above_1000_messages_is_refused(newest: Any, headers: Any) -> None:
    newest.stream(allow_atomic=True)
    newest.raw(b"SUB $JS.EVENT.ADVISORY.STREAM.BATCH_ABANDONED.> 2\r\n")
    for batch, commit in (("a", "eob"), ("b", None)):
        for seq in range(1, 1001):
            for raw in newest._clients:
                raw.publish("s.a", header=headers(**lines(batch, seq)))
        newest.publish("s.a", header=headers(**lines(batch, 1001, commit)))


def test_disabling_atomic_publish_ends_the_open_batch(newest: Any, headers: Any) -> None:
    newest.stream(allow_atomic=True)
    newest.publish("s.a", header=headers(**lines()))
    newest.api(f"STREAM.UPDATE.{newest.name}", {"name": newest.name, "subjects": ["s.>"], "storage": "memory"})
    newest.publish("s.a", header=headers(**lines(seq=2, commit="1")))


def test_end_of_batch_on_another_stream_does_not_commit(newest: Any, headers: Any) -> None:
    newest.stream(allow_atomic=True)
    newest.publish("s.a", header=headers(**lines()))
    newest.publish("elsewhere", header=headers(**lines(seq=2, commit="eob")), wait=1)
    newest.publish("s.a", header=headers(**lines(seq=2, commit="eob")))


def test_idle_batch_is_abandoned_after_its_timeout(raw_client: Any, headers: Any) -> None:
    config = "jetstream { limits { batch { timeout: 1s } } }"
    with NatsServer(config=config) as server, ReferenceServer(limits=Limits(batch_timeout=1.0)) as reference:
        told = []
        for port in (server.port, reference.port):
            raw = raw_client(port)
            raw.send(b"SUB $JS.EVENT.ADVISORY.STREAM.BATCH_ABANDONED.S 1\r\nSUB R.> 2\r\n")
            raw.publish("$JS.API.STREAM.CREATE.S", b'{"name":"S","subjects":["s"],"allow_atomic":true}', reply="R.0")
            raw.wait(lambda raw=raw: len(raw.frames) == 1)
            began = time.monotonic()
            raw.publish("s", header=headers(**lines()), reply="R.1")
            raw.wait(lambda raw=raw: len(raw.frames) == 3)
            assert 0.8 < time.monotonic() - began < 9.8  # the default timeout is 10 s
            told.append([set(raw.frames[2].json), raw.frames[2].json["reason"], raw.frames[1:2]])
            raw.close()
        assert told[0] == told[1]
