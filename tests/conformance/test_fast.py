"""Fast ingest, frame by frame."""

import os
from itertools import product
from typing import Any

import pytest


class Publisher:
    """Sends messages of fast batches, written in a short notation.

    `"1 2 5 7c"` are sequences; a letter after one is the operation: `c` commit, `e` end, `p` ping, `s` start;
    otherwise 1 is a start and the others are appends. `x:3` is sequence 3 of batch `x`.
    """

    def __init__(self, pair: Any, headers: Any, flow: object = 10, gap: str = "fail") -> None:
        self._pair, self._headers = pair, headers
        self.flow, self.gap = flow, gap

    def send(self, notation: str, subject: str = "s.a", **lines: object) -> list[Any]:
        """Send messages, and return the replies to the last one."""
        replies: list[Any] = []
        for word in notation.split():
            batch, _, rest = word.rpartition(":")
            number = rest.rstrip("scepa")
            letter = rest[len(number) :]
            op = {"s": 0, "a": 1, "c": 2, "e": 3, "p": 4}.get(letter, 0 if number == "1" else 1)
            reply = f"{batch or 'b'}.{self.flow}.{self.gap}.{number}.{op}.$FI"
            replies = self._pair.publish(
                subject, f"m{number}".encode(), reply=reply, header=self._headers(**lines) if lines else b""
            )
        return replies


GAPS = ("ok", "fail")


@pytest.fixture
def fast(pair: Any, headers: Any) -> Any:
    def make(flow: object = 10, gap: str = "fail", **config: Any) -> Publisher:
        if pair.since("2.14.0"):
            config.setdefault("allow_batched", True)
        else:
            config.pop("allow_batched", None)  # older releases do not know it, and 2.12 refuses it
        pair.stream(**config)
        return Publisher(pair, headers, flow, gap)

    return make


NOTATIONS = [
    "1 2 3 4c 5",
    "1 2 3 4e 5",
    "1c",
    "1e",
    "1s 2s",
    "1a",
    "1 2 3 3e",
    "1 2 3 9e",
    "1 2 5 6 7c",
    "1 2 5 3 4",
    "1 2 2",
    "1 2 1",
    "1 1",
    "1 2 0 3",
    "1 4c",
    "2",
    "5c",
    "3e",
    "1p",
    "2p",
    "1 2p",
    "1 2 2p 3 3p 4e",
    "1 2 5p 6 7e",
    "1 2 1p 3e",
    "1 x:1 2 x:2 3e x:3e",
    "1 2e 1 2e",
    "1 -3 x 18446744073709551615 2e",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21e",
    "x:1 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 x:2e 22 23 24 25 26 27 28 29 30 31e",
]


def test_sequences_gaps_and_commits_get_the_same_frames(fast: Any, pair: Any) -> None:
    def check(cell: tuple[str, str]) -> None:
        gap, notation = cell
        fast(gap=gap).send(notation)
        pair.api(f"STREAM.INFO.{pair.name}")

    pair.each(product(GAPS, NOTATIONS), check)


def test_requested_flow_is_bounded(fast: Any, pair: Any) -> None:
    pair.each([0, -5, "abc", 1, 2, 3, 1000, 70000, "1.5", ""], lambda flow: fast(flow=flow).send("1 2 3 4 5 6 7e"))


def test_unknown_gap_mode_is_refused(fast: Any, pair: Any) -> None:
    pair.each(["maybe", "OK", ""], lambda gap: fast(gap=gap).send("1 2"))


PATTERNS = [
    "$FI",
    "0.$FI",
    "1.0.$FI",
    "ok.1.0.$FI",
    "10.ok.1.0.$FI",
    "b.10.ok.1.5.$FI",
    "b.10.ok.1.01.$FI",
    "b.10.ok.1.x.$FI",
    "b.10.ok.01.0.$FI",
    "a.b.c.b.10.ok.1.0.$FI",
    "b.10.ok.1.0.$fi",
]


def test_reply_subjects_are_parsed_alike(fast: Any, pair: Any) -> None:
    fast()
    for reply in (*PATTERNS, f"{'x' * 64}.10.ok.1.0.$FI", f"{'x' * 65}.10.ok.1.0.$FI"):
        pair.publish("s.a", b"x", reply=reply)
        pair.publish("s.a", b"x", reply=reply)


HEADERS: list[dict[str, object]] = [
    {"Nats_Expected_Last_Sequence": 99},
    {"Nats_Expected_Last_Subject_Sequence": 99},
    {"Nats_Expected_Last_Msg_Id": "x"},
    {"Nats_Expected_Stream": "T"},
    {"Nats_Msg_Id": "old"},
    {"Nats_TTL": "5"},
    {"Nats_Rollup": "sub"},
    {"Nats_Required_Api_Level": 99},
    {"Nats_Required_Api_Level": 4},
    {"Nats_Stream_Source": "O 1"},
    {"Nats_Batch_Id": "other", "Nats_Batch_Sequence": 1},
]


def test_headers_of_messages_are_checked(fast: Any, pair: Any, headers: Any) -> None:
    def check(cell: tuple[str, str, dict[str, object]]) -> None:
        gap, at, lines = cell
        publisher = fast(flow=2, gap=gap)
        pair.publish("s.a", header=headers(Nats_Msg_Id="old"))
        if at.startswith("2"):
            publisher.send("1")
        publisher.send(at, **lines)
        publisher.send("2 3e" if at == "1" else "3 4 4p 5e")
        pair.api(f"STREAM.INFO.{pair.name}")

    pair.each(product(GAPS, ("1", "1c", "2", "2c"), HEADERS), check)


def test_duplicates_are_acknowledged_like_other_messages(fast: Any, pair: Any, headers: Any) -> None:
    publisher = fast(flow=2)
    for seq in range(1, 7):
        publisher.send(f"{seq}", Nats_Msg_Id=f"id{seq}")
    publisher.send("7e")
    for seq in range(1, 7):
        publisher.send(f"x:{seq}", Nats_Msg_Id=f"id{seq}")
    publisher.send("x:7 x:8e")


CONFIGURATIONS: list[dict[str, Any]] = [
    {"allow_batched": False},
    {"no_ack": True},
    {"discard": "new", "max_msgs": 2},
    {"max_msg_size": 1},
    {"max_msgs": 1},
    {"storage": "file"},
    {"retention": "interest"},
]


def test_fast_batch_respects_the_stream_configuration(fast: Any, pair: Any) -> None:
    def check(cell: tuple[dict[str, Any], str]) -> None:
        config, gap = cell
        publisher = fast(flow=2, gap=gap, **config)
        if "no_ack" in config:
            pair.quiet = 0.05
        publisher.send("1 2 3 4 5 6e")
        publisher.send("x:1 x:2 x:3c")

    pair.each(product(CONFIGURATIONS, GAPS), check)


def test_message_outside_the_stream_leaves_a_gap(fast: Any, pair: Any) -> None:
    publisher = fast(gap="ok")
    publisher.send("1")
    pair.publish("elsewhere", b"x", reply="b.10.ok.2.1.$FI", wait=1)
    publisher.send("3 4e")


def test_flow_ramps_up_and_is_shared(newest: Any, headers: Any) -> None:
    newest.stream(allow_batched=True)
    publishers = [Publisher(newest, headers, flow) for flow in (1000, 300, 20)]
    for name, publisher in zip("abc", publishers, strict=True):
        publisher.send(f"{name}:1")
    for seq in range(2, 700, 1):
        for raw in newest._clients:
            raw.publish("s.a", b"", reply=f"R.b.300.fail.{seq}.1.$FI")
            raw.publish("s.b", b"", reply=f"R.c.20.fail.{seq}.1.$FI")
    newest.settle()
    publishers[0].send("a:2e")
    for seq in range(700, 1400):
        for raw in newest._clients:
            raw.publish("s.a", b"", reply=f"R.b.300.fail.{seq}.1.$FI")
    newest.settle()


@pytest.mark.skipif(not os.environ.get("JETSTREAM_EXT_FULL"), reason="nox -s conformance runs it")
def test_first_2_14_release_loses_the_final_ack(servers: Any, make_pair: Any, headers: Any) -> None:
    for pair in make_pair("2.14.0", servers):
        pair.stream(allow_batched=True)
        publisher = Publisher(pair, headers, 2, "ok")
        publisher.send("1 2")
        assert len(publisher.send("3c", Nats_Expected_Last_Sequence=99)) == 1
        publisher.send("3p")
        publisher.send("4e")
