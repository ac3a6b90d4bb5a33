"""The machine of a read, without a socket: scripts for each row of its table, and a fuzz against a model cluster."""

import itertools
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from unittest import mock

import nats.errors
import pytest
from cells import walk
from direct_replies import eob, row, status
from hypothesis import given, settings
from hypothesis import strategies as st

from jetstream_ext import errors
from jetstream_ext.protocol import range_read, reads
from jetstream_ext.protocol.direct import EndOfBatch, Request, StoredMsg
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.range_read import (
    ERR,
    TABLE,
    Action,
    AskLeader,
    AwaitConnection,
    Deliver,
    Done,
    DropReply,
    Input,
    RangeRead,
    SendRequest,
    State,
    Wait,
)
from jetstream_ext.protocol.reads import (
    MAX_IN_FLIGHT,
    Group,
    MultiLast,
    NextMessage,
    OneReply,
    Plan,
    RangePlan,
    Scan,
    SentRequest,
)

TIMEOUT, PAUSE = 5.0, 0.05
MIB = 1 << 20
DOCUMENTED = (
    errors.RequestTimeoutError,
    errors.MessagesLostError,
    errors.DirectGetDisabledError,
    errors.MirrorAnswersError,
)


def stored(seq: int | None) -> StoredMsg | None:
    """A message at the leader, or none: each is stored so many seconds after the epoch as its sequence says."""
    return None if seq is None else StoredMsg(stream="S", subject="a", seq=seq, time_ns=seq * 10**9)


@cache
def when(seq: int) -> str:
    return f"{datetime.fromtimestamp(seq, UTC):%Y-%m-%dT%H:%M:%SZ}"


def reply(seqs: Sequence[int], pending: int = 0, stream: str = "S") -> list[Frame]:
    """A whole reply."""
    if not seqs:
        return [status("404 Message Not Found")]
    rows = [
        row(seq, last, pending + len(seqs) - i, stream, time=when(seq)) for i, (seq, last) in enumerate(zip(seqs, [0, *seqs], strict=False), 1)
    ]  # fmt: skip
    return [*rows, eob(seqs[-1], pending)]


class Script:
    """One machine, driven step by step."""

    def __init__(self, plan: Plan, prove_to: int | None = None, *, allowed: bool = False) -> None:
        self.plan = plan
        if prove_to is not None:
            assert isinstance(plan, RangePlan)
            plan.prove(prove_to)
        self.machine = RangeRead("S", plan, TIMEOUT, pause=PAUSE, allowed=allowed)
        self.now = 0.0
        self.delivered: list[int] = []
        self.sent: list[SentRequest] = []

    def act(self) -> Action:
        """Return the next action that needs an answer."""
        while True:
            action = self.machine.next_action(self.now)
            if isinstance(action, Deliver):
                self.delivered += action.block.seqs
            elif isinstance(action, SendRequest):
                self.sent.append(action.sent)
            elif not isinstance(action, DropReply):
                return action

    def answer(self, frames: list[Frame]) -> Action:
        """Answer the oldest request."""
        assert isinstance(self.act(), Wait)
        self.machine.receive(self.plan.in_flight[0], frames, self.now)
        return self.act()

    def expire(self) -> Action:
        """Let the time of the wait pass."""
        action = self.act()
        assert isinstance(action, Wait)
        self.now = action.until
        self.machine.handle_timer(self.now)
        return self.act()

    def reconnect(self) -> None:
        assert isinstance(self.act(), AwaitConnection)
        self.machine.connected()
        self.machine.session += 1

    def lose(self, closed: Exception | None = None) -> None:
        """Lose the connection during the reply, and get it back if the read needs it."""
        self.act()
        self.machine.disconnected(closed)
        if isinstance(self.act(), AwaitConnection):
            self.machine.connected()
            self.machine.session += 1

    def pause(self) -> None:
        """Let the pause pass."""
        assert self.machine.state is State.PAUSED
        self.expire()
        self.reconnect()

    def leader(self, found: int | None) -> Action:
        """Answer what the leader is asked."""
        assert isinstance(self.act(), AskLeader)
        self.machine.leader_answered(stored(found), 0, self.now)
        return self.act()


def scan(up_to: int | None = None, batch: int = 4, prefetch: int = 1, *, seconds: int | None = None) -> Scan:
    """Up to a sequence, or up to a time: so many seconds after the epoch."""
    up_to_ns = None if seconds is None else seconds * 10**9
    return Scan(up_to_seq=up_to, up_to_ns=up_to_ns, batch=batch, max_bytes=MIB, prefetch=prefetch)


def one_reply(batch: int = 4, max_bytes: int = MIB, *, seconds: int | None = None) -> OneReply:
    request = Request(seq=1, next_by_subj="a", batch=batch, max_bytes=max_bytes)
    return OneReply(request, up_to_ns=None if seconds is None else seconds * 10**9)


def failure(action: Action) -> Exception:
    assert isinstance(action, Done)
    assert action.error is not None
    return action.error


def test_every_input_in_every_state(caplog: pytest.LogCaptureFixture) -> None:
    """Each cell leads where the table says, by one record; an input that cannot be is an error and changes nothing."""
    caplog.set_level(logging.DEBUG, logger="jetstream_ext.direct")
    assert TABLE.keys() == set(Input)
    for (event, cells), give_up in itertools.product(TABLE.items(), (False, True)):
        for state, cell in zip(State, cells, strict=True):
            caplog.clear()
            where = f"{event.name} in {state.name}"
            machine = Script(scan()).machine
            machine.state = state
            if cell is ERR:
                with pytest.raises(RuntimeError, match=event.name):
                    machine._happen(event, give_up=give_up)
            else:
                machine._happen(event, give_up=give_up)
            after = cell[give_up] if isinstance(cell, tuple) else cell or state
            assert machine.state is after, where
            said = [f"stream 'S': {state.name} -> {after.name} ({event.value})"]
            assert caplog.messages == ([] if after is state else said), where


@walk("readers", [None, MAX_IN_FLIGHT, MAX_IN_FLIGHT + 1])
def test_only_a_few_merged_reads_ask_for_more_before_their_rows_are_taken(readers: int | None) -> None:
    group = None if readers is None else Group(readers)
    script = Script(Scan(subject="a", up_to_seq=9, batch=2, max_bytes=MIB, group=group))
    script.act()
    script.machine.receive(script.sent[0], reply([1, 2], 2), script.now)
    kinds = [type(script.machine.next_action(0.0)) for _ in range(4)]
    lazy = readers is not None and readers > MAX_IN_FLIGHT
    assert kinds == [DropReply, *((Deliver, SendRequest) if lazy else (SendRequest, Deliver)), Wait]


class TestReading:
    @walk("plan, most", [
        (scan(), 4), (scan(up_to=2), 2), (one_reply(3), 3), (one_reply(1000, 9000), 100),
        (MultiLast(Request(multi_last=("a",), max_bytes=9000)), range_read._MOST_ROWS),
    ])  # fmt: skip
    def test_a_reply_without_an_end_is_refused_when_it_exceeds_its_request(self, plan: Plan, most: int) -> None:
        script = Script(plan)
        assert isinstance(script.act(), Wait)
        sent, held = script.plan.in_flight[0], 0
        size = 0 if most != 100 else 10_000
        for seq in range(1, 2 * most + 2):
            subject, body, header = row(seq, seq - 1, 1 << 40)
            script.machine.receive(sent, [(subject, body + bytes(size), header)], script.now)
            held = max(held, sum(len(reply.frames) for reply in script.machine._flight._replies.values()))
        assert held <= most + 2
        error = failure(script.act())
        assert isinstance(error, errors.ResponseError)
        assert "is longer than its request" in str(error)

    def test_the_message_that_exceeds_max_bytes_may_be_of_any_size(self) -> None:
        script = Script(one_reply(10, 1000))
        subject, body, header = row(2, 1, 5)
        frames = [row(1, 0, 6), (subject, body + bytes(20 << 20), header), eob(2, 5)]
        assert isinstance(script.act(), Wait)
        for frame in frames:
            script.machine.receive(script.plan.in_flight[0], [frame], script.now)
        assert script.act() == Done()
        assert script.delivered == [1, 2]


class TestSilence:
    def test_sending_and_the_reply_share_the_timeout(self) -> None:
        machine = RangeRead("S", one_reply(), TIMEOUT, pause=PAUSE)
        sending = machine.next_action(0.0)
        assert isinstance(sending, SendRequest)
        assert sending.until == TIMEOUT
        waiting = machine.next_action(4.0)  # the write buffer had no room until now
        assert waiting == Wait(TIMEOUT), "too late to ask once more"
        machine.handle_timer(TIMEOUT)
        done = machine.next_action(TIMEOUT)
        assert isinstance(failure(done), errors.RequestTimeoutError)

    def test_is_repeated_behind_the_last_row_and_fails_the_second_time(self) -> None:
        script = Script(scan())
        script.answer([row(1, 0, 9)])
        assert script.expire() == Wait(TIMEOUT)
        assert isinstance(script.answer([row(2, 0, 8)]), Wait)
        assert script.sent[-1].request.seq == 2
        assert script.expire() == Wait(1.5 * TIMEOUT), "one message for each request is no progress"
        error = failure(script.expire())
        assert isinstance(error, errors.RequestTimeoutError)
        assert "stopped after 1 message, with nothing more for 5 s" in str(error)
        assert script.delivered == [1, 2]
        assert len(script.sent) == 2
        assert script.now == 1.5 * TIMEOUT, "the whole time after the last message"

    @walk("silences", [0, 1])
    @walk("make", [lambda: scan(up_to=3), lambda: one_reply(3)])
    def test_after_the_last_message_ends_the_read_soon(self, make: Callable[[], Plan], silences: int) -> None:
        """A server may stop between the last message and the end of its reply."""
        script = Script(make())
        for _ in range(silences):
            script.expire()
        script.answer([row(1, 0, 2), row(2, 1, 1), row(3, 2, 0)])
        before = script.now
        assert script.expire() == Done()
        assert script.delivered == [1, 2, 3]
        assert script.now == before + PAUSE
        assert script.plan.end == EndOfBatch(0, 3)

    @walk("before", [0, 1])
    @walk("make, end", [
        (scan, eob(3, 0)), (lambda: scan(batch=2, prefetch=3), eob(3, 0)),
        (one_reply, eob(3, 0)),
        (lambda: MultiLast(Request(multi_last=("a",))), eob(3, 0, 3)),
    ])  # fmt: skip
    def test_the_first_reply_counts_although_it_was_repeated(
        self, make: Callable[[], Plan], end: Frame, before: int
    ) -> None:
        script = Script(make())
        frames = [row(1, 0, 2), row(2, 1, 1), row(3, 2, 0), end]
        if before:
            script.answer(frames[:before])
        script.expire()
        script.act()
        script.machine.receive(script.sent[0], frames[before:], script.now)
        assert script.act() == Done()
        assert script.delivered == [1, 2, 3]

    def test_a_reply_that_a_blocked_loop_has_not_read_still_counts(self) -> None:
        script = Script(scan())
        script.act()
        script.now = 10 * TIMEOUT
        script.machine.handle_timer(script.now)
        assert script.act() == Wait(script.now + PAUSE)
        script.machine.receive(script.sent[0], reply([1]), script.now)
        assert script.act() == Done()


class TestConnection:
    def test_a_new_message_allows_another_loss(self) -> None:
        script = Script(one_reply(max_bytes=1000))
        for seq in range(1, 4):
            script.lose()
            assert isinstance(script.answer([row(seq, 0, 4 - seq)]), Wait)
        assert script.delivered == [1, 2, 3]

    @walk("make", [lambda: one_reply(max_bytes=MIB), lambda: MultiLast(Request(multi_last=("a",), max_bytes=MIB))])
    def test_each_loss_at_one_place_lets_the_read_ask_for_an_eighth(self, make: Callable[[], Plan]) -> None:
        script = Script(make())
        while not isinstance(script.act(), Done):
            script.lose()
        assert [sent.request.max_bytes for sent in script.sent] == [MIB, MIB // 8, MIB // 64]
        assert isinstance(failure(script.act()), errors.MessagesLostError)
        assert "max_pending" in str(failure(script.act()))

    def test_messages_that_are_missing_in_a_reply_let_it_ask_for_less_as_well(self) -> None:
        script = Script(one_reply(max_bytes=MIB))
        script.act()
        script.answer(reply([1], 3)[:1] + reply([2, 3], 1)[1:])
        script.reconnect()
        script.act()
        assert script.delivered == [1]
        assert [sent.request.max_bytes for sent in script.sent][1] <= MIB // 8

    def test_the_requests_of_a_scan_shrink_as_well_and_go_out_one_at_a_time(self) -> None:
        script = Script(scan(prefetch=3, batch=2))
        script.plan.link.rate = float(64 * MIB)
        script.answer(reply([1, 2], 98))
        assert len(script.plan.in_flight) == 3
        script.lose()
        script.act()
        [again] = script.plan.in_flight
        assert (again.request.seq, script.plan.link.most) == (3, MIB // 8), "of the server's max_payload"
        assert (again.request.max_bytes or 0) <= MIB // 8
        script.answer(reply([3, 4], 96))
        assert len(script.plan.in_flight) == 1
        script.now = 601.0
        script.answer(reply([5, 6], 94))
        script.act()
        assert len(script.plan.in_flight) == 3, "ten minutes later"
        assert {sent.request.max_bytes for sent in script.plan.in_flight} == {MIB}

    def test_the_rest_of_a_reply_that_the_connection_made_short_is_requested(self) -> None:
        script = Script(one_reply(9, MIB))
        script.lose()
        script.answer([*reply([1, 2], 3)])
        assert script.sent[-1].request.batch == 7
        assert script.answer(reply([5, 6, 7])) == Done()
        assert (script.delivered, script.plan.end) == ([1, 2, 5, 6, 7], EndOfBatch(0, 7))

    def test_requests_that_cannot_be_sent_for_the_timeout_are_an_error(self) -> None:
        script = Script(scan())
        error = nats.errors.ConnectionReconnectingError()
        while not isinstance(action := script.machine.next_action(script.now), Done):
            if isinstance(action, SendRequest):
                script.machine.not_sent(action.sent, error)
                script.now += TIMEOUT / 4
            elif isinstance(action, AwaitConnection):
                script.machine.connected()
                script.machine.session += 1
        assert failure(action) is error
        assert TIMEOUT <= script.now <= 1.5 * TIMEOUT


class TestNoResponder:
    @walk("allowed", [False, True])
    def test_it_is_retried_for_the_timeout_if_the_stream_allows_direct_gets(self, allowed: bool) -> None:
        """It does if a responder has answered."""
        script = Script(scan(batch=1), allowed=allowed)
        if not allowed:
            script.answer(reply([1], 9))
        pauses = []
        while isinstance(action := script.answer([status("503")]), Wait):
            pauses.append(action.until - script.now)
            script.pause()
        assert isinstance(failure(action), errors.DirectGetDisabledError)
        assert TIMEOUT <= script.now <= TIMEOUT + 2 * PAUSE
        assert script.delivered == ([] if allowed else [1])
        assert pauses[:3] == pytest.approx([0.001, 0.002, 0.004])
        assert max(pauses) == pytest.approx(PAUSE)


class TestProof:
    def test_a_replica_that_stays_behind_is_an_error_that_says_what_is_missing(self) -> None:
        script = Script(scan(9), 9)
        script.answer(reply([1]))
        while isinstance(action := script.leader(5), Wait):
            script.pause()
            script.answer(reply([]))
        error = failure(action)
        assert isinstance(error, errors.RequestTimeoutError)
        assert "no replica that answers has message 5, which the leader has (tried for 5 s)" in str(error)
        assert TIMEOUT <= script.now <= TIMEOUT + 2 * PAUSE

    @walk("make", [lambda: scan(9), lambda: one_reply(9), lambda: MultiLast(Request(multi_last=("a",)), need=9)])
    def test_a_mirror_is_an_error_that_names_it(self, make: Callable[[], Plan]) -> None:
        plan = make()
        script = Script(plan, 9 if isinstance(plan, RangePlan) else None)
        while isinstance(action := script.answer(reply([1, 9], stream="M")), Wait):
            script.pause()
        error = failure(action)
        assert isinstance(error, errors.MirrorAnswersError)
        assert (error.stream, error.mirror) == ("S", "M")
        assert (script.delivered, plan.done) == ([], False)
        assert TIMEOUT <= script.now <= TIMEOUT + 2 * PAUSE

    def test_a_row_of_a_replica_starts_the_wait_for_a_mirror_again(self) -> None:
        script = Script(scan(9), 9)
        for seq in range(1, 9):
            script.answer(reply([9], stream="M"))
            script.now += TIMEOUT - PAUSE
            script.pause()
            assert isinstance(script.answer([row(seq, 0, 9 - seq)]), Wait)
            script.answer([eob(seq, 9 - seq)])
        assert script.answer(reply([9])) == Done()
        assert script.delivered == list(range(1, 10))


class TestProvedBatch:
    @walk("found, pending", [(None, 0), (10, 0), (9, 1)])
    def test_the_leader_says_whether_more_follows_a_full_batch(self, found: int | None, pending: int) -> None:
        """A replica that lags counts nothing."""
        script = Script(one_reply(2), 9)
        script.answer(reply([1, 2], 0))
        assert script.leader(found) == Done()
        assert (script.delivered, script.plan.end) == ([1, 2], EndOfBatch(pending, 2))

    def test_a_batch_of_so_many_bytes_as_the_client_counts_is_proved(self) -> None:
        """Only the server counts them exactly."""
        script = Script(one_reply(100, max_bytes=1), 9)
        script.answer(reply([1], 0))
        assert isinstance(script.leader(2), Wait)
        script.pause()
        assert script.answer(reply([2], 7)) == Done()
        assert script.delivered == [1, 2]


each_plan = walk("make", [lambda: scan(batch=9, seconds=5), lambda: one_reply(9, seconds=5)])


@each_plan
@walk("found", [None, 6, 99])
def test_the_leader_proves_that_its_next_message_is_later(make: Callable[[], Plan], found: int | None) -> None:
    script = Script(make(), 20)
    script.answer(reply([3, 4]))
    assert script.leader(found) == Done()
    assert (script.delivered, script.plan.end) == ([3, 4], EndOfBatch(0, 4))


@each_plan
@walk("seqs, whole", [([3, 4], True), ([3, 4], False), ([], True), ([], False)])
def test_rows_after_the_time_end_the_read_and_are_pending(
    make: Callable[[], Plan], seqs: list[int], whole: bool
) -> None:
    """The end of the reply is not needed; message 6 is stored at 6 s."""
    script = Script(make(), 20)
    frames = reply([*seqs, 6, 7], 2)
    done = script.answer(frames if whole else frames[:-1])
    assert (done if whole else script.expire()) == Done()
    assert (script.now, script.delivered) == (0.0 if whole else PAUSE, seqs)
    assert script.plan.end is not None
    assert (script.plan.end.num_pending, script.plan.end.last_seq) == (4, max(seqs, default=0))


# -- a model cluster ----------------------------------------------------------------------------------------------------


@dataclass
class Responder:
    """A replica or a mirror: what it holds, and how far it is."""

    stream: str
    held: set[int]
    reached: int
    stuck: bool = False
    room: int = MIB
    """How many messages ``max_bytes`` lets into one reply."""

    def answer(self, request: Request, matches: Callable[[int], bool]) -> list[Frame]:
        assert request.batch
        first = request.seq or int(request.start_time.timestamp())  # type: ignore[union-attr]
        found = [seq for seq in sorted(self.held) if first <= seq <= self.reached and matches(seq)]
        count = min(request.batch, self.room)
        return reply(found[:count], max(0, len(found) - count), self.stream)


@dataclass
class Cluster:
    """A stream without new messages, its responders, and every failure that can happen."""

    rng: random.Random
    held: set[int] = field(default_factory=set)
    last: int = 0
    responders: list[Responder] = field(default_factory=list)
    trouble: float = 0.0
    kinds: list[str] = field(default_factory=lambda: ["503", "silence", "cut", "lost"])

    @classmethod
    def random(cls, rng: random.Random) -> "Cluster":
        last = rng.choice([0, 1, 5, 30, 120, 400])
        held = {seq for seq in range(1, last + 1) if rng.random() < rng.choice([1.0, 0.9, 0.5, 0.1])}
        cluster = cls(rng, held, last, trouble=rng.choice([0.0, 0.02, 0.2, 0.6, 1.0]))
        if rng.random() < 0.3:
            cluster.kinds = [rng.choice(cluster.kinds)]
        mirrors = rng.randint(0, 2)
        for _ in range(rng.randint(0 if mirrors else 1, 3)):
            cluster.responders.append(Responder("S", held, rng.choice([last, last, rng.randint(0, last)])))
        for number in range(mirrors):
            some = rng.choice([0.0, 0.3, 0.9, 1.0])
            more = rng.choice([0.0, 0.1])  # what the stream has removed
            part = {seq for seq in range(1, last + 1) if rng.random() < (some if seq in held else more)}
            cluster.responders.append(Responder(f"M{number}", part, rng.choice([last, rng.randint(0, last)])))
        for responder in cluster.responders:
            responder.stuck, responder.room = rng.random() < 0.2, rng.choice([2, 5, MIB])
        return cluster

    def frames(self, request: Request, matches: Callable[[int], bool]) -> list[Frame]:
        rng = self.rng
        for responder in self.responders:
            if not responder.stuck:
                responder.reached = min(self.last, responder.reached + rng.choice([0, 0, 1, 50]))
        frames = rng.choice(self.responders).answer(request, matches)
        if rng.random() < self.trouble:
            match rng.choice(self.kinds):
                case "503":
                    return [status("503")]
                case "silence":
                    return []
                case "cut":
                    return frames[: rng.randint(0, len(frames))]
                case "lost":
                    del frames[rng.randrange(len(frames))]
        return frames

    def next(self, first: int, matches: Callable[[int], bool]) -> int | None:
        return min((seq for seq in self.held if seq >= first and matches(seq)), default=None)

    @property
    def has_replica(self) -> bool:
        """Whether a replica of the stream gets all of it."""
        return any(each.stream == "S" and (not each.stuck or each.reached == self.last) for each in self.responders)


class World:
    """Drives one machine against a cluster, on a virtual clock."""

    def __init__(self, seed: int, *, proved: bool, limited: bool = False) -> None:
        rng = self.rng = random.Random(seed)
        self.cluster = Cluster.random(rng)
        last = self.cluster.last
        self.first = rng.randint(1, last + 1)
        self.up_to = rng.randint(0, last + 2) if proved or rng.random() < 0.5 else None
        by_time = rng.random() < 0.2
        self.odd = rng.random() < 0.2
        self.until = rng.randint(0, last + 2) if rng.random() < 0.2 else None
        up_to_ns = None if self.until is None else self.until * 10**9 + rng.choice([0, 999_999_999])
        with mock.patch.object(reads, "FIRST_BATCH", 7):
            self.plan: Scan | OneReply = Scan(
                subject="odd" if self.odd else None,
                seq=1 if by_time else self.first,
                start_time=datetime.fromtimestamp(self.first, UTC) if by_time else None,
                up_to_seq=self.up_to,
                up_to_ns=up_to_ns,
                batch=rng.choice([None, 1, 3, 1000]),
                max_bytes=MIB,
                prefetch=rng.randint(1, 4),
            )
        self.limit: int | None = None
        if limited:
            self.up_to, self.limit = None, rng.choice([1, 5, 1000])
            request = Request(
                seq=None if by_time else self.first, start_time=self.plan.start_time,
                next_by_subj="odd" if self.odd else ">", batch=self.limit, max_bytes=MIB,
            )  # fmt: skip
            self.plan = OneReply(request, up_to_ns=up_to_ns)
        self.proved = proved
        if proved:
            self.plan.prove(last if self.up_to is None else self.up_to)
        self.machine = RangeRead("S", self.plan, TIMEOUT, pause=PAUSE, allowed=rng.random() < 0.5)
        self.delivered: list[int] = []
        self.open: dict[SentRequest, list[list[Frame]]] = {}
        self.now = self.delivered_at = 0.0

    def matches(self, seq: int) -> bool:
        return not self.odd or seq % 2 == 1

    def run(self) -> Exception | None:
        for _ in range(100_000):
            match self.machine.next_action(self.now):
                case SendRequest(sent):
                    self.send(sent)
                case DropReply(sent):
                    self.open.pop(sent, None)
                case AskLeader(NextMessage(request)):
                    first = request.seq or int(request.start_time.timestamp())  # type: ignore[union-attr]
                    self.machine.leader_answered(stored(self.cluster.next(first, self.matches)), 0, self.now)
                case AwaitConnection():
                    self.machine.connected()
                    self.machine.session += 1
                case Deliver(block):
                    assert len(block) == len(block.bodies) == len(block.header_sizes) > 0
                    assert not self.proved or block.stream == "S", "a message of a mirror"
                    self.delivered += block.seqs
                    self.delivered_at = self.now
                case Done(error):
                    return error
                case Wait(until):
                    self.wait(until)
        pytest.fail("the read does not end")

    def send(self, sent: SentRequest) -> None:
        if self.rng.random() < self.cluster.trouble / 10:
            self.machine.not_sent(sent, nats.errors.ConnectionReconnectingError())
            return
        frames = self.cluster.frames(sent.request, self.matches)
        pieces: list[list[Frame]] = []
        while frames:
            size = self.rng.choice([1, 3, 200])
            pieces.append(frames[:size])
            frames = frames[size:]
        self.open[sent] = pieces

    def wait(self, until: float) -> None:
        assert until >= self.now
        coming = [sent for sent, pieces in self.open.items() if pieces]
        late = self.rng.random() < self.cluster.trouble / 5
        if coming and self.machine.state is State.READING and not late:
            sent = self.rng.choice(coming)
            self.now += self.rng.choice([0.0, 0.001, 0.1])
            self.machine.receive(sent, self.open[sent].pop(0), self.now)
        elif coming and self.rng.random() < self.cluster.trouble / 5:
            self.machine.disconnected()
        else:
            self.now = until
        if self.rng.random() < self.cluster.trouble / 20:
            self.machine.disconnected()
            self.open = {sent: [] for sent in self.open}
        self.machine.handle_timer(self.now)

    def check(self) -> None:
        error = self.run()
        cluster, end = self.cluster, self.cluster.last if self.up_to is None else self.up_to
        end = end if self.until is None else min(end, self.until)
        wanted = [seq for seq in sorted(cluster.held) if self.first <= seq <= end and self.matches(seq)]
        assert self.delivered == sorted(set(self.delivered)), "in order, each once"
        assert all(self.first <= seq <= end for seq in self.delivered)
        if self.proved:  # what was delivered has no gap, whatever followed
            assert self.delivered == wanted[: len(self.delivered)]
        if error is not None:
            assert isinstance(error, (*DOCUMENTED, nats.errors.ConnectionReconnectingError)), repr(error)
            if not cluster.trouble:
                self.check_patience(error)
            return
        ended = self.plan.end
        assert ended is not None
        assert ended.last_seq == (self.delivered[-1] if self.delivered else 0)
        if self.limit is not None:
            assert len(self.delivered) <= self.limit
        if self.proved and (self.limit is None or len(self.delivered) < self.limit):
            short = any(responder.room < MIB for responder in cluster.responders)
            cut = self.limit is not None and short and ended.num_pending  # by the bytes of the request
            assert cut or self.delivered == wanted, "a gap was reported as success"

    def check_patience(self, error: Exception) -> None:
        """Without trouble, only a proved read fails, and only if no replica gets what the leader has."""
        assert self.proved
        assert not self.cluster.has_replica, repr(error)
        assert isinstance(error, errors.MirrorAnswersError | errors.RequestTimeoutError)
        if {each.stream for each in self.cluster.responders} == {"M0"} and self.cluster.responders[0].reached:
            mirror = self.cluster.responders[0]
            shown = any(self.first <= seq <= mirror.reached and self.matches(seq) for seq in mirror.held)
            assert isinstance(error, errors.MirrorAnswersError) == shown
        assert TIMEOUT <= self.now - self.delivered_at <= TIMEOUT + 1.0


@given(seed=st.integers(0, 1 << 40), proved=st.booleans(), limited=st.booleans())
@settings(max_examples=400, deadline=None)
def test_a_read_never_reports_a_gap_as_success_and_always_ends(seed: int, proved: bool, limited: bool) -> None:
    World(seed, proved=proved, limited=limited).check()


def test_nothing_is_logged_for_a_row(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="jetstream_ext.direct"):
        Script(scan(batch=1000)).answer(reply(range(1, 1001)))
    assert [record.message.partition(": ")[2].split("; ")[0] for record in caplog.records] == [
        "request sent",
        "reply ended",
        "READING -> ENDED (everything was delivered, and nothing is left to prove)",
    ]
