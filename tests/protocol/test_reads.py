"""Plans of reads against a model of a server: every message once and in order, whatever the replies look like."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from unittest import mock

import pytest
from cells import walk
from hypothesis import given
from hypothesis import strategies as st

from jetstream_ext.protocol import reads
from jetstream_ext.protocol.direct import Block, EndOfBatch, Request
from jetstream_ext.protocol.reads import MAX_IN_FLIGHT, Group, Link, OneReply, Plan, Scan, SentRequest

NOT_FOUND = EndOfBatch(0, 0, found=False)
NO_LOSS: list[int | None] = []


@dataclass
class Reply:
    seqs: list[int]
    pendings: list[int]
    end: EndOfBatch


@dataclass
class Model:
    """A stream on a server: sequence to (subject, size). It answers as servers do."""

    messages: dict[int, tuple[str, int]]
    last_seq: int = 0
    old: bool = False
    """2.11: a batch's messages count themselves."""
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.last_seq = max([self.last_seq, *self.messages])

    def answer(self, request: Request) -> Reply:
        self.requests.append(request)
        assert request.batch is None or request.batch >= 1, "0 and less mean something else to a server"
        assert (request.seq is None) != (request.start_time is None)
        first = request.seq or int(request.start_time.timestamp())  # type: ignore[union-attr]
        wanted = request.next_by_subj
        found = [s for s in sorted(self.messages) if s >= first and wanted in (None, ">", self.messages[s][0])]
        taken = self._cut(found, request)
        if not taken:
            return Reply([], [], NOT_FOUND)
        pendings = [len(found) - i - (0 if self.old else 1) for i in range(len(taken))]
        return Reply(taken, pendings, EndOfBatch(len(found) - len(taken), taken[-1]))

    def _cut(self, found: list[int], request: Request) -> list[int]:
        taken, size = [], 0
        for seq in found[: request.batch]:
            taken.append(seq)
            size += self.messages[seq][1]
            if request.max_bytes is not None and size >= request.max_bytes:
                break
        return taken


class Driver:
    """What the shell does, without a network: requests are answered when sent, replies read oldest first."""

    def __init__(self, plan: Plan, model: Model, losses: list[int | None] | None = None, piece: int = 3) -> None:
        self.plan = plan
        self.model = model
        self.losses = list(losses or [])
        self.piece = piece
        self.replies: dict[SentRequest, Reply] = {}
        self.delivered: list[int] = []
        self.in_flight = 0
        self.gave_up = False

    def run(self, between: Callable[[], None] = lambda: None) -> list[int]:
        for _ in range(1000):
            if self.plan.done or self.gave_up:
                assert self.gave_up or self.plan.next_request() is None
                return self.delivered
            while (sent := self.plan.next_request()) is not None:
                self.replies[sent] = self.model.answer(sent.request)
            self.in_flight = max(self.in_flight, len(self.replies))
            between()
            assert list(self.plan.in_flight) == list(self.replies)
            self._read(self.plan.in_flight[0])
        pytest.fail("the plan does not end")

    def _read(self, sent: SentRequest) -> None:
        reply = self.replies[sent]
        lost = self.losses.pop(0) if self.losses else None
        arrived = len(reply.seqs) if lost is None else min(lost, len(reply.seqs))
        size = 0
        for start in range(0, arrived, self.piece):
            seqs = reply.seqs[start : min(start + self.piece, arrived)]
            size += sum(self.model.messages.get(seq, ("", 1))[1] for seq in seqs)
            block = Block("S", list(seqs), [b"%d" % seq for seq in seqs], [0] * len(seqs))
            block = self.plan.accept(sent, block, size, reply.pendings[start + len(seqs) - 1])
            assert block.seqs == [int(data) for data in block.datas]
            self.delivered += block.seqs
            if self.plan.done:
                return
        if lost is None:
            self.plan.finish(sent, reply.end)
            assert sent not in self.plan.in_flight
            self.replies = {sent: self.replies[sent] for sent in self.plan.in_flight}
            return
        if not self.plan.retry():
            self.gave_up = True
            return
        assert not self.plan.in_flight, "nothing stays in flight over a retry"
        self.replies = {}


def accept(plan: Plan, sent: SentRequest, seqs: list[int], pending: int) -> list[int]:
    """Hand rows to a plan, if there are any; return those to deliver."""
    if not seqs:
        return []
    return plan.accept(sent, Block("S", list(seqs), [b""] * len(seqs), [0] * len(seqs)), 1, pending).seqs


def small(plan: Callable[[], Scan]) -> Scan:
    """A scan that begins with small requests, so that small streams take many."""
    with mock.patch.object(reads, "FIRST_BATCH", 3):
        return plan()


streams = st.dictionaries(st.integers(1, 120), st.tuples(st.sampled_from("ab"), st.integers(1, 40)), max_size=60)
dense = st.integers(0, 60).map(lambda n: dict.fromkeys(range(1, n + 1), ("a", 10)))
losses = st.lists(st.none() | st.integers(0, 10), max_size=8)
maybe = st.none() | st.integers(1, 130)


class TestScan:
    @given(
        messages=streams | dense, subject=st.sampled_from([None, "a", "b"]), seq=st.integers(1, 130), up_to=maybe,
        batch=st.none() | st.integers(1, 20), max_bytes=st.integers(1, 400), prefetch=st.integers(1, 4),
        lost=losses, piece=st.integers(1, 7), old=st.booleans(), by_time=st.booleans(),
    )  # fmt: skip
    def test_any_range_of_any_stream(
        self, messages: dict[int, tuple[str, int]], subject: str | None, seq: int, up_to: int | None,
        batch: int | None, max_bytes: int, prefetch: int, lost: list[int | None], piece: int, old: bool, by_time: bool,
    ) -> None:  # fmt: skip
        # By time: the model's clock ticks once per sequence.
        start = datetime.fromtimestamp(seq, UTC) if by_time else None
        plan = small(lambda: Scan(
            subject=subject, seq=1 if by_time else seq, start_time=start, up_to_seq=up_to, batch=batch,
            max_bytes=max_bytes, prefetch=prefetch,
        ))  # fmt: skip
        driver = Driver(plan, Model(messages, old=old), lost, piece)
        expected = [s for s in sorted(messages) if seq <= s <= (up_to or 999) and subject in (None, messages[s][0])]
        assert driver.run() == expected
        assert plan.end is not None
        assert plan.end.last_seq == (expected[-1] if expected else 0)
        assert driver.in_flight <= prefetch
        assert all(up_to is None or not r.seq or r.seq + (r.batch or 0) - 1 <= up_to for r in driver.model.requests)
        if not old:
            after = [s for s in messages if s > (up_to or 999) and s >= seq and subject in (None, messages[s][0])]
            # Nothing is requested beyond a range, so nothing may be known of what follows it.
            assert plan.end.num_pending in (0, len(after))

    @walk("readers", [1, 2, 5, MAX_IN_FLIGHT, 100, 10_000])
    def test_the_reads_of_a_group_ask_for_no_more_than_one_read(self, readers: int) -> None:
        group = Group(readers)
        plans = [Scan(subject="a", max_bytes=80_000, group=group) for _ in range(2)]
        link = Link(1e5)
        for plan in plans:
            plan.link = link
            driver = Driver(plan, Model(dict.fromkeys(range(1, 301), ("a", 100))))
            assert driver.run() == list(range(1, 301))
            for request in driver.model.requests:
                assert request.max_bytes is not None
                assert request.batch is not None
                assert request.max_bytes <= max(1, 80_000 // readers)
                assert request.max_bytes * min(readers, MAX_IN_FLIGHT) <= link.room(1) / 0.75
                assert request.batch == 1 or request.batch * 256 <= 80_000 // readers

    def test_sends_guesses_ahead_on_a_dense_stream_and_throws_none_away(self) -> None:
        model = Model(dict.fromkeys(range(1, 101), ("a", 10)))
        plan = Scan(batch=10, max_bytes=1 << 20, prefetch=3)
        driver = Driver(plan, model)
        assert driver.run() == list(range(1, 101))
        assert driver.in_flight == 3
        assert [request.seq for request in model.requests] == list(range(1, 101, 10))

    def test_does_not_guess_where_sequences_are_missing_or_filtered(self) -> None:
        for subject, step in ((None, 2), ("a", 1)):
            driver = Driver(
                Scan(subject=subject, batch=5, max_bytes=1 << 20, prefetch=4),
                Model(dict.fromkeys(range(1, 61, step), ("a", 1))),
            )
            driver.run()
            assert driver.in_flight == 1

    def test_two_empty_replies_end_the_scan(self) -> None:
        plan = Scan(batch=2, max_bytes=100, prefetch=1)
        for end in (EndOfBatch(2, 2), NOT_FOUND, NOT_FOUND):
            ask = plan.next_request()
            assert ask is not None
            seqs = [1, 2] if end.found else []
            accept(plan, ask, seqs, end.num_pending)
            plan.finish(ask, end)
        assert plan.done
        assert plan.end == EndOfBatch(0, 2, found=False)

    def test_requests_follow_the_size_of_the_messages(self) -> None:
        big = Driver(Scan(max_bytes=1000, prefetch=1), Model(dict.fromkeys(range(1, 100), ("a", 100))))
        big.run()
        assert big.model.requests[0].batch == reads.FIRST_BATCH
        assert {request.batch for request in big.model.requests[1:]} == {7}, "three quarters of the bytes"
        tiny = Driver(Scan(max_bytes=1 << 20, prefetch=1), Model(dict.fromkeys(range(1, 6001), ("a", 1))))
        tiny.run()
        assert [request.batch for request in tiny.model.requests] == [1000, 4000, 16000]

    @walk("seq, up_to", [(5, 4), (2, 1), (1, 0)])
    def test_an_empty_range_sends_no_request(self, seq: int, up_to: int) -> None:
        plan = Scan(seq=seq, up_to_seq=up_to, max_bytes=10)
        assert (plan.done, plan.end, plan.next_request()) == (True, NOT_FOUND, None)


LOG = Request(seq=7, batch=10)
LASTS = Request(multi_last=("a.>",))


class TestOneWholeReply:
    def test_the_end_of_a_cut_multi_last_is_what_its_last_message_says(self) -> None:
        plan = OneReply(LASTS, whole=True)
        ask = plan.next_request()
        assert ask is not None
        accept(plan, ask, [7], 1)
        plan.finish(ask, EndOfBatch(0, 7, 12))  # as 2.11 ends it
        assert plan.end == EndOfBatch(1, 7, 12)
