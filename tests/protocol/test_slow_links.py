"""Scans over a link of some rate and latency, in virtual time: how long other calls wait behind them, and how fast they are."""

import heapq
from itertools import count

import pytest
from cells import walk
from direct_replies import eob, row

from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.range_read import AwaitConnection, Deliver, Done, DropReply, RangeRead, SendRequest, Wait
from jetstream_ext.protocol.reads import Link, Scan, SentRequest

CHUNK = 32_768
MIB = 1 << 20


class Path:
    """A server with a dense stream, behind a link that carries `rate` bytes per second in pieces of `CHUNK`."""

    def __init__(self, messages: int, size: int, rate: float, latency: float, *, link: Link | None = None) -> None:
        self.messages, self.size, self.rate, self.latency = messages, size, rate, latency
        self.link = link or Link()
        self.now = self.free_at = 0.0
        self.waits: list[tuple[float, float]] = []
        """When a request was sent, and how long another call would wait for its answer at that moment."""
        self.asked: list[int] = []
        """The bytes that each request let the server send."""

    def run(self, *, consume: float = 0.0, subject: str | None = None, **options: int) -> list[int]:
        plan = Scan(subject=subject, max_bytes=options.pop("max_bytes", 8 * MIB), **options)
        machine = RangeRead("S", plan, 30.0, pause=0.05, link=self.link)
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
                    for at, frames in self.answer(sent):
                        heapq.heappush(coming, (at, next(number), sent, frames))
                    self.waits.append((self.now, self.free_at - self.now - self.latency))
                case Wait():
                    at, _, sent, frames = heapq.heappop(coming)
                    self.now = max(self.now, at)
                    machine.receive(sent, frames, at)
                case DropReply(_):
                    pass
                case AwaitConnection():
                    pytest.fail("the connection is not lost")

    def answer(self, sent: SentRequest) -> list[tuple[float, list[Frame]]]:
        """Return what arrives and when: the frames that each piece completes."""
        request = sent.request
        assert request.seq is not None
        assert request.batch is not None
        assert request.max_bytes is not None
        fit = -(-request.max_bytes // (self.size + 1))
        seqs = range(request.seq, min(self.messages + 1, request.seq + request.batch, request.seq + fit))
        frames = [row(seq, seq - 1 if seq > request.seq else 0, self.messages - seq, size=self.size) for seq in seqs]
        frames.append(eob(seqs[-1], self.messages - seqs[-1]))
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
    assert path.run() == list(range(1, path.messages + 1))
    assert max(wait for _, wait in path.waits[3:]) < 0.8
    assert max(wait for _, wait in path.waits) < 1.0, "nor while the link is not yet known"
    assert path.now < 1.25 * path.messages * (size + 170) / rate, "the link is busy all the time"


@walk("size, rate, latency", [
    (128, 1e9, 0.0001), (10_000, 50e6, 0.2), (10_000, 125e6, 0.6), (500_000, 125e6, 0.2),
])  # fmt: skip
def test_requests_grow_to_the_usual_size_on_a_fast_link(size: int, rate: float, latency: float) -> None:
    messages = 150_000 if size == 128 else 100 * MIB // size
    fast, known = (Path(messages, size, rate, latency, link=link) for link in (None, Link(1e12)))
    for path in (fast, known):
        assert path.run() == list(range(1, messages + 1))
    usual = max(known.asked[1:])
    assert usual > 4 * MIB
    assert next(place for place, asked in enumerate(fast.asked) if asked > 0.9 * usual) <= 8
    assert len(fast.asked) <= len(known.asked) + 8


def test_the_next_scan_on_the_connection_starts_as_fast_as_the_last_one_ended() -> None:
    link = Link()
    Path(5_000, 10_000, 200e6, 0.001, link=link).run()
    again = Path(5_000, 10_000, 200e6, 0.001, link=link)
    again.run()
    assert again.asked[0] >= 8 * MIB


@walk("latency", [0.05, 0.6])
@walk("messages, size", [(3, 100), (3, 10_000), (1, 1_000_000)])
def test_replies_in_one_piece_do_not_make_a_link_slow(messages: int, size: int, latency: float) -> None:
    link = Link(100e6)
    for _ in range(50):
        Path(messages, size, 1e9, latency, link=link).run()
    assert link.rate >= 100e6


@walk("size, latency, subject", [(1_000, 0.6, None), (1_000, 0.05, ">"), (10_000, 0.3, ">"), (30_000, 0.15, None)])
def test_a_link_that_was_slow_becomes_fast_again(size: int, latency: float, subject: str | None) -> None:
    link = Link()
    for _ in range(2):
        link.adapt(100, 1000.0)
    path = Path(20_000_000 // (size + 170), size, 50e6, latency, link=link)
    path.run(subject=subject)
    assert len(path.asked) <= 15
    assert path.link.rate > 5e6


@walk(
    "size, latency, subject, known",
    [(1_000, 0.0002, None, None), (1_000, 0.3, ">", 100e6), (10_000, 0.3, None, 100e6), (10_000, 0.0002, ">", None)],
)
def test_a_very_slow_link_is_recognised(size: int, latency: float, subject: str | None, known: float | None) -> None:
    link = Link() if known is None else Link(known)
    path = Path(20_000_000 // (size + 170), size, 100e3, latency, link=link)
    path.run(subject=subject)
    assert 50e3 <= link.rate <= 300e3
    assert all(wait < 1.5 for sent, wait in path.waits if sent > 2 * path.waits[0][1] + 5)


def test_a_link_that_becomes_slow_is_noticed() -> None:
    link = Link(200e6)
    path = Path(300, 100_000, 1e6, 0.01, link=link)
    path.run()
    first = path.waits[0][1]
    assert first > 5, "the first requests rely on what is known"
    assert all(wait < 0.8 for sent, wait in path.waits if sent > 3 * first)
