"""Which requests a read sends, over a link of some rate and latency in virtual time: how large, how many, how soon."""

import heapq
from bisect import bisect_left
from itertools import count
from typing import Any

import pytest
from cells import walk
from direct_replies import eob, row

from jetstream_ext.protocol import reads
from jetstream_ext.protocol.direct import EndOfBatch, Request
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.range_read import AwaitConnection, Deliver, Done, DropReply, RangeRead, SendRequest, Wait
from jetstream_ext.protocol.reads import MAX_IN_FLIGHT, Group, Link, Scan, SentRequest

CHUNK = 32_768
MIB = 1 << 20
NOT_FOUND = EndOfBatch(0, 0, found=False)


def link_of(rate: float) -> Link:
    link = Link()
    link.rate = rate
    return link


class Path:
    """A server with every `step`-th message of a stream, behind a link that carries `rate` bytes per second in pieces."""

    def __init__(
        self,
        messages: int,
        size: int,
        rate: float = 1e9,
        latency: float = 0.0001,
        *,
        step: int = 1,
        link: Link | None = None,
    ) -> None:
        self.held, self.size, self.rate, self.latency = range(1, messages * step + 1, step), size, rate, latency
        self.link = link or Link()
        self.now = self.free_at = 0.0
        self.waits: list[tuple[float, float]] = []
        """When a request was sent, and how long another call would wait for its answer at that moment."""
        self.requests: list[Request] = []
        self.asked: list[int] = []
        """The bytes that each request let the server send."""
        self.in_flight = 0
        """The most requests at once."""

    def run(self, *, consume: float = 0.0, max_bytes: int = 8 * MIB, **options: Any) -> list[int]:
        plan = Scan(max_bytes=max_bytes, **options)
        plan.link = self.link
        machine = RangeRead("S", plan, 30.0, pause=0.05)
        coming: list[tuple[float, int, SentRequest, list[Frame]]] = []
        number = count()
        read: list[int] = []
        while True:
            match machine.next_action(self.now):
                case Done(error):
                    assert error is None
                    return read
                case Deliver(block):
                    read += block.seqs
                    self.now += consume
                case SendRequest(sent):
                    for at, frames in self.answer(sent.request):
                        heapq.heappush(coming, (at, next(number), sent, frames))
                    self.waits.append((self.now, self.free_at - self.now - self.latency))
                    self.in_flight = max(self.in_flight, len(plan.in_flight))
                case Wait():
                    at, _, sent, frames = heapq.heappop(coming)
                    self.now = max(self.now, at)
                    machine.receive(sent, frames, at)
                case DropReply(_):
                    pass
                case AwaitConnection():
                    pytest.fail("the connection is not lost")

    def answer(self, request: Request) -> list[tuple[float, list[Frame]]]:
        """Return what arrives and when: the frames that each piece completes."""
        self.requests.append(request)
        assert request.seq is not None
        assert request.batch is not None
        assert request.max_bytes is not None
        first = bisect_left(self.held, request.seq)
        seqs = self.held[first : first + min(request.batch, -(-request.max_bytes // (self.size + 1)))]
        left = len(self.held) - first
        frames = [
            row(seq, last, left - place, size=self.size)
            for place, (seq, last) in enumerate(zip(seqs, [0, *seqs], strict=False), 1)
        ]
        frames.append(eob(seqs[-1], left - len(seqs)))
        self.asked.append(sum(len(body) for _, body, _ in frames))
        start = max(self.now + self.latency, self.free_at)
        arrived: list[tuple[float, list[Frame]]] = []
        done = 0
        for frame in frames:
            done += len(frame[1])
            at = start + -(-done // CHUNK) * CHUNK / self.rate
            if arrived and arrived[-1][0] == at:
                arrived[-1][1].append(frame)
            else:
                arrived.append((at, [frame]))
        self.free_at = start + done / self.rate
        return arrived


@walk(
    "size, rate, latency",
    [(128, 1e6, 0.0002), (128, 400e3, 0.05), (10_000, 3e6, 0.05), (100_000, 400e3, 0.0002), (100_000, 1e6, 0.05)],
)
def test_other_calls_wait_for_about_half_a_second_on_a_slow_link(size: int, rate: float, latency: float) -> None:
    path = Path(int(30 * rate / (size + 170)), size, rate, latency)
    assert path.run() == list(range(1, len(path.held) + 1))
    assert max(wait for _, wait in path.waits[3:]) < 0.8
    assert max(wait for _, wait in path.waits) < 1.0, "nor while the link is not yet known"
    assert path.now < 1.25 * len(path.held) * (size + 170) / rate, "the link is busy all the time"


@walk("size, rate, latency", [
    (128, 1e9, 0.0001), (10_000, 50e6, 0.2), (10_000, 125e6, 0.6), (500_000, 125e6, 0.2),
])  # fmt: skip
def test_requests_grow_to_the_usual_size_on_a_fast_link(size: int, rate: float, latency: float) -> None:
    messages = 150_000 if size == 128 else 100 * MIB // size
    fast, known = (Path(messages, size, rate, latency, link=link) for link in (None, link_of(1e12)))
    for path in (fast, known):
        assert path.run() == list(range(1, messages + 1))
    usual = max(known.asked[1:])
    assert usual > 4 * MIB
    assert next(place for place, asked in enumerate(fast.asked) if asked > 0.9 * usual) <= 8
    assert len(fast.asked) <= len(known.asked) + 8


@walk("latency", [0.05, 0.6])
@walk("messages, size", [(3, 100), (3, 10_000), (1, 1_000_000)])
def test_replies_in_one_piece_do_not_make_a_link_slow(messages: int, size: int, latency: float) -> None:
    link = link_of(100e6)
    for _ in range(50):
        Path(messages, size, 1e9, latency, link=link).run()
    assert link.rate >= 100e6


@walk("size, latency, subject", [(1_000, 0.6, None), (1_000, 0.05, ">"), (10_000, 0.3, ">"), (30_000, 0.15, None)])
def test_a_link_that_was_slow_becomes_fast_again(size: int, latency: float, subject: str | None) -> None:
    link = Link()
    for _ in range(2):
        link.adapt(0, 100_000, 0.0, 1e6, 0.0)
    path = Path(20_000_000 // (size + 170), size, 50e6, latency, link=link)
    path.run(subject=subject)
    assert len(path.asked) <= 15
    assert path.link.rate > 5e6


@walk(
    "size, latency, subject, known",
    [(1_000, 0.0002, None, None), (1_000, 0.3, ">", 100e6), (10_000, 0.3, None, 100e6), (10_000, 0.0002, ">", None)],
)
def test_a_very_slow_link_is_recognised(size: int, latency: float, subject: str | None, known: float | None) -> None:
    link = Link() if known is None else link_of(known)
    path = Path(20_000_000 // (size + 170), size, 100e3, latency, link=link)
    path.run(subject=subject)
    assert 50e3 <= link.rate <= 300e3
    assert all(wait < 1.5 for sent, wait in path.waits if sent > 2 * path.waits[0][1] + 5)


def test_a_link_lets_requests_shrink_with_each_loss_to_a_floor() -> None:
    link = Link()
    most = []
    for session in range(4):
        for _ in range(2):  # two reads notice each loss
            link.lost(link.limit(3 * MIB), 100.0, session)
        most.append(link.limit(3 * MIB))
    assert most == [MIB // 8, MIB // 64, MIB // 64, MIB // 64], "of the server's max_payload"
    assert (link.limit(1000), link.limit(8 * MIB)) == (1000, MIB // 64)
    assert link.room(2) <= MIB // 128


def test_a_link_recovers_the_later_the_more_often_it_is_lost() -> None:
    link, now = Link(), 100.0
    for session, seconds in enumerate((15, 120, 960, 960)):
        link.lost(8 * MIB, now, session)
        link.adapt(0, MIB, 0.0, 0.01, now + seconds)
        assert link.most is not None
        now += seconds + 0.1
        link.adapt(0, MIB, 0.0, 0.01, now)
        assert link.limit(8 * MIB) == 8 * MIB
    link.lost(8 * MIB, now + 1000, 5)
    link.adapt(0, MIB, 0.0, 0.01, now + 1015.1)
    assert link.most is None, "so long after the last one, it is an accident again"


def test_a_loss_while_few_bytes_are_asked_for_does_not_make_requests_smaller() -> None:
    link = Link()
    link.lost(1000, 0.0, 0)
    assert link.limit(8 * MIB) == 8 * MIB


def test_the_reads_of_a_connection_share_what_it_carries() -> None:
    link = link_of(8e6)
    assert link.room(2) == 2_000_000
    link.in_flight = 6
    assert (link.room(2), link.room(2, own=2)) == (500_000, 666_666)


@walk("readers", [1, 2, 5, MAX_IN_FLIGHT, 100, 10_000])
def test_the_reads_of_a_group_ask_for_no_more_than_one_read(readers: int) -> None:
    group, link = Group(readers), link_of(1e5)
    for _ in range(2):
        path = Path(300, 100, 1e5, link=link)
        assert path.run(subject="a", max_bytes=80_000, group=group) == list(range(1, 301))
        for request in path.requests:
            assert request.max_bytes is not None
            assert request.batch is not None
            assert request.max_bytes <= max(1, 80_000 // readers)
            assert request.batch == 1 or request.batch * 256 <= 80_000 // readers


def test_sends_guesses_ahead_on_a_dense_stream_and_throws_none_away() -> None:
    path = Path(100, 10)
    assert path.run(batch=10, prefetch=3) == list(range(1, 101))
    assert path.in_flight == 3
    assert [request.seq for request in path.requests] == list(range(1, 101, 10))


def test_does_not_guess_where_sequences_are_missing_or_filtered() -> None:
    for subject, step in ((None, 2), ("a", 1)):
        path = Path(60, 1, step=step)
        assert path.run(subject=subject, batch=5, prefetch=4) == list(path.held)
        assert path.in_flight == 1


def test_requests_follow_the_size_of_the_messages() -> None:
    big = Path(99, 100, link=link_of(1e12))
    big.run(max_bytes=1000, prefetch=1)
    assert big.requests[0].batch == reads.FIRST_BATCH
    assert {request.batch for request in big.requests[1:]} == {7}, "three quarters of the bytes"
    tiny = Path(6000, 1, link=link_of(1e12))
    tiny.run(max_bytes=1 << 20, prefetch=1)
    assert [request.batch for request in tiny.requests] == [1000, 4000, 16000]


def test_an_empty_range_sends_no_request() -> None:
    for seq, up_to in ((5, 4), (2, 1), (1, 0)):
        plan = Scan(seq=seq, up_to_seq=up_to, max_bytes=10)
        assert (plan.done, plan.end, plan.next_request()) == (True, NOT_FOUND, None)
