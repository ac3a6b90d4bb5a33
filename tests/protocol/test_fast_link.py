"""Whole fast batches over a link that loses messages and answers, against a small model of a server."""

from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from jetstream_ext.protocol import frames
from jetstream_ext.protocol.fast import FastBatch, State
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.types import BatchFlowGap, EndReason, GapMode


def reply(seq: int, op: int, body: dict[str, Any]) -> Frame:
    """An answer to the message `seq`, sent with `op`."""
    return b"_INBOX.x.b1.10.fail.%d.%d.$FI" % (seq, op), orjson.dumps(body), 0


@dataclass
class Server:
    """The server's side of fast ingest, as probed: it answers each message on that message's reply subject."""

    mode: GapMode
    flow: int
    last: int = 0
    open: bool = False
    stored: list[bytes] = field(default_factory=list)
    seen: list[tuple[int, int]] = field(default_factory=list)

    def take(self, data: bytes) -> list[Frame]:
        out: list[Frame] = []
        for command in frames.parse_pubs(data):
            out += self._take(command)
        return out

    def _take(self, command: frames.Command) -> list[Frame]:
        *_, flow, mode, raw_seq, raw_op, tail = command.reply.split(".")
        seq, op = int(raw_seq), int(raw_op)
        assert (flow, mode, tail) == ("10", self.mode.value, "$FI")
        self.seen.append((seq, op))
        if op == 0:
            self.open, self.last = True, 1
            self.stored.append(command.payload)
            return [self._flow_ack(seq, op, 0)]
        if not self.open:
            return [reply(seq, op, {"error": {"code": 400, "err_code": 10208, "description": "unknown"}})]
        out: list[Frame] = []
        reached = seq if op in (1, 3) else seq + 1
        if reached > self.last + 1:
            out.append(reply(seq, op, {"type": "gap", "last_seq": self.last + 1, "seq": reached}))
            if self.mode is GapMode.FAIL:
                return [*out, self._end(seq, op)]
            self.last = reached - 1
        if op == 1:
            self.last = seq
            self.stored.append(command.payload)
            return [*out, self._flow_ack(seq, op, seq)] if seq % self.flow == 0 else out
        return [*out, self._end(seq, op) if op == 3 else self._flow_ack(seq, op, self.last)]

    def _flow_ack(self, seq: int, op: int, up_to: int) -> Frame:
        return reply(seq, op, {"type": "ack", "seq": up_to, "msgs": self.flow})

    def _end(self, seq: int, op: int) -> Frame:
        self.open = False
        return reply(seq, op, {"stream": "F", "seq": len(self.stored), "batch": "b1", "count": self.last})


@settings(max_examples=300)
@given(
    mode=st.sampled_from(list(GapMode)), flow=st.integers(1, 12), outstanding=st.integers(1, 3),
    count=st.integers(1, 60), block=st.integers(1, 20),
    lost=st.sets(st.integers(2, 60), max_size=6), deaf=st.sets(st.integers(1, 60), max_size=12),
)  # fmt: skip
def test_any_batch_over_any_link(
    mode: GapMode, flow: int, outstanding: int, count: int, block: int, lost: set[int], deaf: set[int]
) -> None:
    """Run a batch; `lost` are batch sequences that never reach the server, `deaf` the numbers of the lost answers."""
    machine = FastBatch(
        batch_id="b1", flow=10, gap=mode, max_outstanding_acks=outstanding, stall_ping=1.0,
        ack_timeout=60.0,
    )  # fmt: skip
    machine.open("_INBOX.x")
    server = Server(mode, flow)
    now, answers, acks = 0.0, 0, [0]

    def exchange(data: bytes) -> None:
        nonlocal answers
        arrived = b"".join(
            frames.pub(c.subject.encode(), c.reply.encode(), c.header, c.payload)
            for c in frames.parse_pubs(data)
            if not (c.reply.endswith(".1.$FI") and int(c.reply.split(".")[-3]) in lost)
        )
        for frame in server.take(arrived):
            answers += 1
            # The first answer and the final one always arrive: test_fast_timers.py tests what follows without them.
            if answers == 1 or b'"batch"' in frame[1] or answers not in deaf:
                _, out = machine.receive([frame], now)
                acks.append(machine.acked)
                if out:
                    exchange(out)

    entries = iter([("f.1", b"%d" % i) for i in range(1, count + 1)])
    steps = 0
    while machine.state in (State.NEW, State.STARTING, State.OPEN) and machine.sent < count:
        steps += 1
        assert steps < 1000, "it does not get on"
        if machine.room > 0:
            data, taken, _, _ = machine.add_many(islice(entries, block), now)
            assert machine.sent - machine.acked <= machine.window.flow * outstanding
            assert taken
            exchange(data)
        else:
            machine.waiting(now)
            due = machine.next_timer()
            assert due is not None
            now = due
            events, ping = machine.handle_timer(now)
            assert (events, machine.end_reason) == ([], None)
            assert ping
            exchange(ping)
            machine.not_waiting()
    if machine.state is State.OPEN:
        exchange(machine.commit(now))

    assert acks == sorted(acks)
    assert [seq for seq, op in server.seen if op == 0] == [1]
    sent = [seq for seq, op in server.seen if op == 1]
    assert sent == sorted(set(sent)), "no sequence twice, none backwards"
    lost = {seq for seq in lost if seq <= machine.sent}
    reported = {seq for gap in machine.gaps for seq in range(gap.first_lost, gap.seq)}
    assert reported <= lost
    assert server.stored == [b"%d" % seq for seq in range(1, machine.sent + 1) if seq not in lost][: len(server.stored)]
    if mode is GapMode.OK or not lost:
        assert machine.end_reason is EndReason.COMMITTED
        assert (machine.sent, machine.acked) == (count, count)
        assert machine.ack is not None
        assert machine.ack.batch_size == count
        assert len(server.stored) == count - len(lost)
    else:
        # The report of the gap ended the batch if it arrived; otherwise the final ack did.
        assert machine.end_reason in (EndReason.GAP, EndReason.ERROR)
        assert machine.error is not None
        assert machine.ack is not None
        assert machine.ack.batch_size == min(lost) - 1
        assert server.stored == [b"%d" % seq for seq in range(1, min(lost))]
    assert all(isinstance(gap, BatchFlowGap) for gap in machine.gaps)
