"""Every fault rule, on the engine and with nats-py as the client."""

import asyncio
import json
import socket
from typing import Any

import nats
import pytest

from jetstream_ext.testing import ReferenceServer, VirtualClock
from jetstream_ext.testing.reference import (
    ChangeLeader,
    Cut,
    Delay,
    Drop,
    Duplicate,
    Engine,
    Faults,
    Lose,
    Overload,
    Reorder,
    Rule,
    StaleReplica,
    Stall,
    Unavailable,
)
from jetstream_ext.testing.reference.wire.protocol import Close, Deliver, Publish, Subscribe

SECOND = 1_000_000_000


class Bench:
    def __init__(self, *rules: Rule, seed: int = 0, **config: Any) -> None:
        self.engine = Engine(faults=Faults(*rules, seed=seed))
        self.now = 0
        self.engine.handle(1, Subscribe("R.>", "1"), 0)
        wanted = {
            "name": "S",
            "subjects": ["s.>"],
            "allow_batched": True,
            "allow_atomic": True,
            "allow_direct": True,
            **config,
        }
        self.engine.handle(1, Publish("$JS.API.STREAM.CREATE.S", json.dumps(wanted).encode()), 0)

    def publish(self, subject: str, payload: bytes = b"", reply: str = "R.1", header: bytes = b"") -> list[Any]:
        return self.engine.handle(1, Publish(subject, payload, reply, header), self.now)

    def seqs(self, count: int) -> list[list[int]]:
        """Publish, and return the sequences that were acknowledged after each message."""
        outputs = [self.publish("s.a") for _ in range(count)]
        return [[json.loads(each.payload)["seq"] for each in batch] for batch in outputs]

    def fast(self, seq: int, op: int, gap: str = "ok", flow: int = 2) -> list[Any]:
        outputs = self.publish("s.a", b"x", f"R.b.{flow}.{gap}.{seq}.{op}.$FI")
        return [json.loads(each.payload) if each.payload else each.header for each in outputs]

    def later(self, seconds: float) -> list[Any]:
        self.now += round(seconds * SECOND)
        return self.engine.handle_timer(self.now)


def test_drop_loses_a_reply() -> None:
    assert Bench(Drop(kind="pub_ack", nth=2)).seqs(3) == [[1], [], [3]]


def test_duplicate_sends_a_reply_twice() -> None:
    assert Bench(Duplicate("R.>", kind="pub_ack", times=2)).seqs(3) == [[1, 1], [2, 2], [3]]


def test_delay_sends_a_reply_later() -> None:
    bench = Bench(Delay(kind="pub_ack", seconds=2))
    assert bench.seqs(2) == [[], [2]]
    assert bench.later(1.9) == []
    assert [json.loads(each.payload)["seq"] for each in bench.later(0.1)] == [1]


def test_reorder_sends_a_reply_after_the_following_ones() -> None:
    assert Bench(Reorder(kind="pub_ack", by=2)).seqs(4) == [[], [2], [3, 1], [4]]


def test_reorder_waits_at_most_for_its_patience() -> None:
    bench = Bench(Reorder(kind="pub_ack", by=2, patience=0.5))
    assert bench.seqs(2) == [[], [2]]
    assert [json.loads(each.payload)["seq"] for each in bench.later(0.5)] == [1]


def test_lost_messages_leave_a_gap_in_a_fast_batch() -> None:
    bench = Bench(Lose("s.>", nth=3, times=2))
    assert bench.fast(1, 0) == [{"type": "ack", "seq": 0, "msgs": 2}]
    bench.fast(2, 1)
    assert bench.fast(3, 1) == bench.fast(4, 1) == []
    assert bench.fast(5, 1)[0] == {"type": "gap", "last_seq": 3, "seq": 5}


def test_unavailable_stream_answers_503() -> None:
    bench = Bench(Unavailable("s.>", nth=2))
    assert len(bench.seqs(1)[0]) == 1
    (answer,) = bench.publish("s.a")
    assert answer.header == b"NATS/1.0 503\r\nNats-Subject: s.a\r\n\r\n"
    assert bench.seqs(1) == [[2]]


def test_overloaded_stream_answers_429() -> None:
    bench = Bench(Overload("s.>"))
    (answer,) = bench.publish("s.a")
    assert answer.header == b"NATS/1.0 429 Too Many Requests\r\n\r\n"
    error = b'{"error":{"code":429,"err_code":10167,"description":"too many requests"},"stream":"S","seq":0}'
    assert answer.payload == error


@pytest.mark.parametrize("gap", ["ok", "fail"])
def test_leader_change_without_loss_sends_one_frame(gap: str) -> None:
    bench = Bench(ChangeLeader("s.>", nth=4))
    for seq in range(1, 4):
        bench.fast(seq, 1 if seq > 1 else 0, gap)
    told = bench.fast(4, 1, gap)
    assert told == [{"type": "ack", "seq": 3, "msgs": 2}]
    assert bench.fast(5, 1, gap) == [{"type": "ack", "seq": 5, "msgs": 2}]
    assert bench.fast(6, 3, gap)[-1]["count"] == 5


def test_leader_change_can_lose_unacknowledged_messages() -> None:
    bench = Bench(ChangeLeader("s.>", nth=6, unavailable=2, unsaved=9))
    for seq in range(1, 6):
        bench.fast(seq, 1 if seq > 1 else 0, flow=2)
    # A frame has acknowledged 4, so only 5 can be lost with the old leader.
    told = bench.fast(6, 1)
    assert told == [{"type": "ack", "seq": 4, "msgs": 2}, b"NATS/1.0 503\r\nNats-Subject: s.a\r\n\r\n"]
    assert bench.fast(7, 1) == [b"NATS/1.0 503\r\nNats-Subject: s.a\r\n\r\n"]
    assert bench.fast(8, 1)[0] == {"type": "gap", "last_seq": 5, "seq": 8}
    assert bench.fast(9, 3)[-1] == {"stream": "S", "seq": 5, "batch": "b", "count": 8}


def test_message_that_was_reported_as_a_duplicate_is_not_lost_with_the_leader() -> None:
    bench = Bench(ChangeLeader("s.>", nth=3, unsaved=1))
    header = b"NATS/1.0\r\nNats-Msg-Id: one\r\n\r\n"
    bench.publish("s.a", b"x", "R.b.9.ok.1.0.$FI", header)
    (answer,) = bench.publish("s.a", b"x", header=header)
    assert json.loads(answer.payload)["duplicate"]
    (answer,) = bench.publish("s.a", b"x", header=header)[-1:]
    assert json.loads(answer.payload) == {"stream": "S", "seq": 1, "duplicate": True}


def test_leader_change_drops_open_atomic_batches() -> None:
    bench = Bench(ChangeLeader("s.>", nth=2))
    head = "NATS/1.0\r\nNats-Batch-Id: b\r\nNats-Batch-Sequence: {}\r\n\r\n"
    bench.publish("s.a", b"x", header=head.format(1).encode())
    (answer,) = bench.publish("s.a", b"x", header=head.format(2).encode())
    assert json.loads(answer.payload)["error"]["err_code"] == 10176


def test_message_lost_with_the_leader_can_be_published_again() -> None:
    bench = Bench(ChangeLeader("s.>", nth=3, unsaved=1))
    bench.fast(1, 0)
    header = b"NATS/1.0\r\nNats-Msg-Id: one\r\n\r\n"
    bench.publish("s.a", b"x", "R.b.9.ok.2.1.$FI", header)
    bench.publish("s.a", b"x", "R.b.9.ok.3.1.$FI", header)
    (answer,) = bench.publish("$JS.API.STREAM.INFO.S")
    assert json.loads(answer.payload)["state"]["messages"] == 2


def test_stale_replica_answers_with_older_messages() -> None:
    bench = Bench(StaleReplica("$JS.API.DIRECT.GET.>", behind=2, nth=2), max_msgs_per_subject=1)
    for payload in (b"1", b"2", b"3"):
        bench.publish("s.a", payload)
    answers = [bench.publish("$JS.API.DIRECT.GET.S.s.a")[0].payload for _ in range(3)]
    assert answers == [b"3", b"1", b"3"]


def test_cut_closes_the_connection_after_the_message() -> None:
    bench = Bench(Cut("s.>", nth=2))
    bench.publish("s.a")
    assert [type(each) for each in bench.publish("s.a")] == [Deliver, Close]


def test_cut_before_closes_the_connection_without_an_answer() -> None:
    assert [type(each) for each in Bench(Cut("s.>", before=True)).publish("s.a")] == [Close]


def test_stalled_connection_is_served_later() -> None:
    bench = Bench(Stall("s.>", seconds=3))
    assert bench.seqs(2) == [[], []]
    assert bench.later(2.9) == []
    assert [json.loads(each.payload)["seq"] for each in bench.later(0.1)] == [1, 2]


def test_chance_is_seeded() -> None:
    def lost(seed: int) -> list[list[int]]:
        return Bench(Drop(kind="pub_ack", times=None, chance=0.5), seed=seed).seqs(30)

    assert lost(1) == lost(1) != lost(2)
    assert 5 < sum(map(bool, lost(1))) < 25


def test_counts_of_a_plan_restart_with_every_server() -> None:
    rule = Drop(kind="pub_ack", nth=2, chance=0.9)
    plan = Faults(rule, seed=3)

    def run() -> list[bool]:
        engine = Engine(faults=plan)
        for command in (Subscribe("R", "1"), Publish("$JS.API.STREAM.CREATE.S", b'{"name":"S","subjects":["s"]}')):
            engine.handle(1, command, 0)
        return [bool(engine.handle(1, Publish("s", b"", "R"), 0)) for _ in range(3)]

    assert run() == run() == [True, False, True]
    assert plan.seen[id(rule)] == 3


IMPOSSIBLE: list[tuple[type[Rule], dict[str, Any]]] = [
    (Drop, {"kind": "puback"}),
    (Lose, {"subject": "s", "kind": "pub_ack"}),
    (Delay, {"subject": 0.02}),
    (Drop, {"subject": "s..a"}),
    (Drop, {"nth": 0}),
    (Drop, {"times": 0}),
    (Drop, {"chance": 0}),
    (Drop, {"chance": 50}),
]


def test_rule_that_can_never_match_is_refused() -> None:
    for rule, arguments in IMPOSSIBLE:
        with pytest.raises(ValueError, match=r"subject|kind|nth|chance"):
            rule(**arguments)


def test_rules_can_be_added_and_removed() -> None:
    rule = Drop(kind="pub_ack", times=None)
    bench = Bench(rule)
    assert bench.seqs(1) == [[]]
    faults = bench.engine.injector.faults
    faults.remove(rule)
    assert bench.seqs(1) == [[2]]
    with pytest.raises(ValueError, match="not in the plan"):
        faults.remove(rule)
    faults.add(rule)
    assert bench.seqs(1) == [[]]
    assert "Drop(" in repr(faults)


async def test_client_reconnects_after_a_cut() -> None:
    async with ReferenceServer() as server:
        back = asyncio.Event()

        async def reconnected() -> None:
            back.set()

        nc = await nats.connect(server.url, reconnect_time_wait=0.01, reconnected_cb=reconnected, connect_timeout=10)
        js = nc.jetstream()
        await js.add_stream(name="S", subjects=["s.>"])
        server.disconnect_all()
        await asyncio.wait_for(back.wait(), 60)
        assert (await js.publish("s.a", b"x")).seq == 1
        await nc.close()


def test_plain_with_runs_the_server_in_a_thread() -> None:
    clock = VirtualClock()
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1)
    with ReferenceServer(clock=clock) as server:

        async def work() -> int:
            nc = await nats.connect(server.url, connect_timeout=10)
            js = nc.jetstream()
            await js.add_stream(name="S", subjects=["s.>"], max_age=10)
            seq = (await js.publish("s.a", b"x")).seq
            await asyncio.to_thread(clock.advance, 10)
            messages = (await js.stream_info("S")).state.messages
            server.change_leader("S")
            await nc.close()
            return seq + messages

        assert asyncio.run(work()) == 1


def test_server_that_is_not_started_is_reported() -> None:
    server = ReferenceServer()
    with pytest.raises(RuntimeError, match="not started"):
        _ = server.url
    with pytest.raises(RuntimeError, match="not started"):
        server.disconnect_all()
    with pytest.raises(ValueError, match="dialect"):
        ReferenceServer(dialect="3.0")


def test_port_in_use_is_reported_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = ReferenceServer(port=taken.getsockname()[1])
        with pytest.raises(RuntimeError, match="did not start"):
            server.__enter__()
