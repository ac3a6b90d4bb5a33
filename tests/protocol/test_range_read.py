"""The machine of a read, without a socket: scripts for each row of its table, and a fuzz against a model cluster."""

import itertools
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
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
    MAX_LEADER_REQUESTS,
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
    SingleRead,
    State,
    Wait,
)
from jetstream_ext.protocol.reads import MAX_IN_FLIGHT, Group, MultiLast, OneReply, Plan, Scan, SentRequest

TIMEOUT, PAUSE = 5.0, 0.05
DOCUMENTED = (errors.RequestTimeoutError, errors.MessagesLostError, errors.DirectGetDisabledError)


TIME_NS = 1_763_673_811_200_000_000
"""When every message was stored."""


def stored(seq: int) -> StoredMsg:
    """A message at the leader: its subject, time and headers are the same as in `row`, and it has a payload."""
    return StoredMsg(stream="S", subject="a", seq=seq, data=b"x", headers={"K": "v"}, time_ns=TIME_NS)


def reply(seqs: Sequence[int], pending: int = 0, stream: str = "S") -> list[Frame]:
    """A whole reply."""
    if not seqs:
        return [status("404 Message Not Found")]
    rows = [
        row(seq, last, pending + len(seqs) - i, stream, stored="K: v\r\n") for i, (seq, last) in enumerate(zip(seqs, [0, *seqs], strict=False), 1)
    ]  # fmt: skip
    return [*rows, eob(seqs[-1], pending)]


class Script:
    """One machine, driven step by step."""

    def __init__(self, plan: Plan, prove_to: int | None = None) -> None:
        self.plan = plan
        self.machine = RangeRead("S", plan, TIMEOUT, pause=PAUSE, prove_to=prove_to)
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

    def leader(self, *found: int | None) -> Action:
        """Answer each request to the leader."""
        action = self.act()
        assert isinstance(action, AskLeader)
        assert len(action.requests) == len(found)
        self.machine.leader_answered([None if seq is None else stored(seq) for seq in found], self.now)
        return self.act()


def scan(up_to: int | None = None, batch: int = 4, prefetch: int = 1) -> Scan:
    return Scan(up_to_seq=up_to, batch=batch, max_bytes=1 << 20, prefetch=prefetch)


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


def test_a_read_that_fails_delivers_no_rows_without_the_proof_of_their_gaps() -> None:
    error = errors.RequestTimeoutError("late")
    script = Script(scan(9), prove_to=9)
    script.answer(reply([2, 3], stream="M"))
    script.machine.failed(error)
    assert failure(script.act()) is error
    assert script.delivered == []


class TestSingle:
    closed = nats.errors.ConnectionClosedError()

    def read(self) -> SingleRead:
        return SingleRead("S", TIMEOUT)

    def test_an_answer_ends_it(self) -> None:
        read = self.read()
        read.receive([row(7, 0, 0)])
        read.disconnected(None)
        read.expired()
        assert (read.state, read.result().seq) == (State.ENDED, 7)

    def test_a_lost_request_is_sent_once_more(self) -> None:
        read = self.read()
        read.disconnected(None)
        read.not_sent(self.closed)  # of the same loss
        assert read.state is State.RESUMING
        read.connected()
        read.receive([row(7, 0, 0)])
        assert read.result().seq == 7

    @walk("closed, error", [(None, errors.MessagesLostError), (closed, type(closed))])
    def test_the_second_loss_is_an_error(self, closed: Exception | None, error: type[Exception]) -> None:
        read = self.read()
        read.disconnected(None)
        read.connected()
        read.disconnected(closed)
        with pytest.raises(error):
            read.result()

    @walk("lost, what", [(False, "no answer"), (True, "did not come back")])
    def test_the_timeout_names_what_was_awaited(self, lost: bool, what: str) -> None:
        read = self.read()
        if lost:
            read.disconnected(None)
        read.expired()
        with pytest.raises(errors.RequestTimeoutError, match=rf"'S': .*{what} .*within 5 s"):
            read.result()


class TestGroup:
    """Reads that are merged."""

    def script(self, readers: int, prove_to: int | None = None) -> tuple[Script, Group]:
        group = Group(readers)
        return Script(Scan(subject="a", up_to_seq=9, batch=2, max_bytes=1 << 20, group=group), prove_to), group

    @walk("readers", [MAX_IN_FLIGHT, MAX_IN_FLIGHT + 1])
    def test_only_a_few_reads_ask_for_more_before_their_rows_are_taken(self, readers: int) -> None:
        script, _ = self.script(readers)
        script.act()
        script.machine.receive(script.sent[0], reply([1, 2], 2), script.now)
        kinds = [type(script.machine.next_action(0.0)) for _ in range(4)]
        assert kinds == [
            DropReply,
            *((Deliver, SendRequest) if readers > MAX_IN_FLIGHT else (SendRequest, Deliver)),
            Wait,
        ]

    def test_a_wait_begins_again_while_other_reads_are_answered(self) -> None:
        script, group = self.script(2)
        script.act()
        for _ in range(5):
            group.heard = script.now + 1
            assert isinstance(script.expire(), Wait)
        assert len(script.sent) == 1, "the request has not been repeated"
        waited = script.now
        assert isinstance(script.expire(), Wait)
        assert len(script.sent) == 2
        error = failure(script.expire())
        assert isinstance(error, errors.RequestTimeoutError)
        assert script.now == waited + TIMEOUT


class TestReading:
    def test_rows_are_delivered_after_the_next_request_is_sent(self) -> None:
        script = Script(scan())
        script.act()
        machine, first = script.machine, script.sent[0]
        machine.receive(first, reply([1, 2, 3, 4], 2), script.now)
        kinds = [type(machine.next_action(0.0)) for _ in range(4)]
        assert kinds == [DropReply, SendRequest, Deliver, Wait]

    def test_replies_are_decoded_in_order_whatever_comes_first(self) -> None:
        script = Script(scan(prefetch=2))
        assert isinstance(script.answer(reply([1, 2, 3, 4], 8)), Wait)
        second, third = script.plan.in_flight
        script.machine.receive(third, reply([9, 10, 11, 12]), script.now)
        assert isinstance(script.act(), Wait)
        assert script.delivered == [1, 2, 3, 4]
        script.machine.receive(second, reply([5, 6, 7, 8], 4), script.now)
        assert script.act() == Done()
        assert script.delivered == list(range(1, 13))

    @walk("plan, most", [
        (scan(), 4), (scan(up_to=2), 2), (OneReply(Request(seq=1, batch=3, max_bytes=1 << 20)), 3),
        (OneReply(Request(seq=1, batch=1000, max_bytes=9000)), 100),
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
            held = max(held, sum(len(reply.frames) for reply in script.machine._replies.values()))
        assert held <= most + 2
        error = failure(script.act())
        assert isinstance(error, errors.ResponseError)
        assert "is longer than its request" in str(error)

    def test_the_message_that_exceeds_max_bytes_may_be_of_any_size(self) -> None:
        script = Script(OneReply(Request(seq=1, batch=10, max_bytes=1000)))
        subject, body, header = row(2, 1, 5)
        frames = [row(1, 0, 6), (subject, body + bytes(20 << 20), header), eob(2, 5)]
        assert isinstance(script.act(), Wait)
        for frame in frames:
            script.machine.receive(script.plan.in_flight[0], [frame], script.now)
        assert script.act() == Done()
        assert script.delivered == [1, 2]


class TestSilence:
    def test_sending_and_the_reply_share_the_timeout(self) -> None:
        machine = RangeRead("S", OneReply(Request(seq=1, batch=4)), TIMEOUT, pause=PAUSE)
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
        script.expire()
        error = failure(script.expire())
        assert isinstance(error, errors.RequestTimeoutError)
        assert "stopped after 1 message, with nothing more for 5 s" in str(error)
        assert script.delivered == [1, 2]
        assert len(script.sent) == 2
        assert script.now == 1.5 * TIMEOUT, "the whole time after the last message"

    def test_of_the_repetition_as_well_ends_the_read_in_time(self) -> None:
        script = Script(scan())
        script.expire()
        error = failure(script.expire())
        assert "no answer to a direct get within 5 s" in str(error)
        assert (script.now, len(script.sent)) == (TIMEOUT, 2)

    @walk("silences", [0, 1])
    @walk("make", [lambda: scan(up_to=3), lambda: OneReply(Request(seq=1, batch=3))])
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
        (lambda: OneReply(Request(seq=1, batch=4)), eob(3, 0)),
        (lambda: OneReply(Request(seq=1, batch=4), whole=True), eob(3, 0)),
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
        assert isinstance(script.act(), Wait)
        script.machine.receive(script.sent[0], reply([1]), script.now)
        assert script.act() == Done()


class TestConnection:
    def test_a_second_loss_at_the_same_place_is_an_error(self) -> None:
        script = Script(scan())
        for _ in range(2):
            script.act()
            script.machine.disconnected()
            if script.machine.state is not State.ENDED and isinstance(script.act(), AwaitConnection):
                script.machine.connected()
        assert isinstance(failure(script.act()), errors.MessagesLostError)

    def test_a_request_that_could_not_be_sent_leaves_the_repetition(self) -> None:
        script = Script(scan())
        script.machine.next_action(0.0)
        script.machine.not_sent(script.plan.in_flight[0], nats.errors.ConnectionReconnectingError())
        script.reconnect()
        script.act()
        script.machine.disconnected()
        script.reconnect()
        assert script.answer(reply([1])) == Done()

    def test_requests_that_cannot_be_sent_for_the_timeout_are_an_error(self) -> None:
        script = Script(scan())
        error = nats.errors.ConnectionReconnectingError()
        while not isinstance(action := script.machine.next_action(script.now), Done):
            if isinstance(action, SendRequest):
                script.machine.not_sent(action.sent, error)
                script.now += TIMEOUT / 4
            elif isinstance(action, AwaitConnection):
                script.machine.connected()
        assert failure(action) is error
        assert TIMEOUT <= script.now <= 1.5 * TIMEOUT

    def test_the_second_loss_of_a_closed_connection_is_its_error(self) -> None:
        script = Script(scan())
        script.act()
        script.machine.disconnected()
        script.reconnect()
        script.act()
        script.machine.disconnected(closed := nats.errors.ConnectionClosedError())
        assert failure(script.act()) is closed


class TestNoResponder:
    def test_before_the_first_answer_it_is_an_error(self) -> None:
        assert isinstance(failure(Script(scan()).answer([status("503")])), errors.DirectGetDisabledError)

    def test_after_an_answer_it_is_retried_for_the_timeout(self) -> None:
        script = Script(scan(batch=1))
        script.answer(reply([1], 9))
        while isinstance(action := script.answer([status("503")]), Wait):
            assert script.machine.state is State.PAUSED
            assert action.until == script.now + PAUSE
            script.expire()
            script.reconnect()
        assert isinstance(failure(action), errors.DirectGetDisabledError)
        assert TIMEOUT <= script.now <= TIMEOUT + 2 * PAUSE
        assert script.delivered == [1]


class TestProof:
    def test_a_lagging_replica_is_asked_again_after_a_pause(self) -> None:
        script = Script(scan(9), prove_to=9)
        script.answer(reply([1]))
        assert isinstance(script.leader(2), Wait)
        assert script.delivered == [1, 2], "what the leader has counts"
        script.expire()
        script.reconnect()
        script.act()
        assert script.sent[-1].request.seq == 3
        assert script.answer(reply([3, 4, 9])) == Done()
        assert script.now == PAUSE
        assert script.delivered == [1, 2, 3, 4, 9]

    def test_an_answer_of_the_leader_that_does_not_go_on_is_an_error(self) -> None:
        script = Script(scan(9), prove_to=9)
        script.answer(reply([4]))
        assert isinstance(failure(script.leader(4)), errors.ResponseError)


class TestProvedBatch:
    @staticmethod
    def script(batch: int, prove_to: int) -> Script:
        return Script(OneReply(Request(seq=1, next_by_subj="a", batch=batch, max_bytes=100)), prove_to=prove_to)

    @walk("batch, seqs, pending", [(2, [1, 2], 0), (2, [1, 2], 9), (5, [1], 4)])
    def test_a_batch_that_its_own_limits_end_is_complete(self, batch: int, seqs: list[int], pending: int) -> None:
        script = self.script(batch, 9)
        assert script.answer(reply(seqs, pending)) == Done()
        assert script.delivered == seqs

    def test_nothing_found_is_proved(self) -> None:
        script = self.script(5, 3)
        script.answer(reply([]))
        assert script.leader(None) == Done()
        assert script.plan.end is not None
        assert (script.delivered, script.plan.end.last_seq, script.plan.end.found) == ([], 0, False)


# -- a model cluster ----------------------------------------------------------------------------------------------------


@dataclass
class Responder:
    """A replica or a mirror: what it holds, and how far it is."""

    stream: str
    held: set[int]
    reached: int
    stuck: bool = False
    room: int = 1 << 20
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
        for _ in range(rng.randint(1, 3)):
            cluster.responders.append(Responder("S", held, rng.choice([last, last, rng.randint(0, last)])))
        for number in range(rng.randint(0, 2)):
            some = rng.choice([0.0, 0.3, 0.9, 1.0])
            more = rng.choice([0.0, 0.1])  # what the stream has removed
            part = {seq for seq in range(1, last + 1) if rng.random() < (some if seq in held else more)}
            cluster.responders.append(Responder(f"M{number}", part, rng.choice([last, rng.randint(0, last)])))
        for responder in cluster.responders:
            responder.stuck, responder.room = rng.random() < 0.2, rng.choice([2, 5, 1 << 20])
        return cluster

    def frames(self, request: Request, matches: Callable[[int], bool]) -> list[Frame]:
        rng = self.rng
        responder = rng.choice(self.responders)
        if not responder.stuck:
            responder.reached = min(self.last, responder.reached + rng.choice([0, 0, 1, 50]))
        frames = responder.answer(request, matches)
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
        with mock.patch.object(reads, "FIRST_BATCH", 7):
            self.plan: Scan | OneReply = Scan(
                subject="odd" if self.odd else None,
                seq=1 if by_time else self.first,
                start_time=datetime.fromtimestamp(self.first, UTC) if by_time else None,
                up_to_seq=self.up_to,
                batch=rng.choice([None, 1, 3, 1000]),
                max_bytes=1 << 20,
                prefetch=rng.randint(1, 4),
            )
        self.limit: int | None = None
        if limited:
            self.up_to, self.limit = None, rng.choice([1, 5, 1000])
            request = Request(
                seq=None if by_time else self.first, start_time=self.plan.start_time,
                next_by_subj="odd" if self.odd else ">", batch=self.limit, max_bytes=1 << 20,
            )  # fmt: skip
            self.plan = OneReply(request)
        self.prove_to = (last if limited else self.up_to) if proved else None
        self.machine = RangeRead("S", self.plan, TIMEOUT, pause=PAUSE, prove_to=self.prove_to)
        self.delivered: list[int] = []
        self.open: dict[SentRequest, list[list[Frame]]] = {}
        self.now = 0.0

    def matches(self, seq: int) -> bool:
        return not self.odd or seq % 2 == 1

    def run(self) -> Exception | None:
        for _ in range(100_000):
            match self.machine.next_action(self.now):
                case SendRequest(sent):
                    self.send(sent)
                case DropReply(sent):
                    self.open.pop(sent, None)
                case AskLeader(requests):
                    assert len(requests) <= MAX_LEADER_REQUESTS
                    found = [self.leader(request) for request in requests]
                    self.machine.leader_answered([None if seq is None else stored(seq) for seq in found], self.now)
                case AwaitConnection():
                    self.machine.connected()
                case Deliver(block):
                    assert len(block) == len(block.bodies) == len(block.header_sizes) > 0
                    assert self.prove_to is None or block.stream == "S", "a message of a mirror"
                    self.delivered += block.seqs
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

    def leader(self, request: Request) -> int | None:
        first = request.seq or int(request.start_time.timestamp())  # type: ignore[union-attr]
        return self.cluster.next(first, self.matches)

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
        end = self.cluster.last if self.up_to is None else self.up_to
        wanted = [seq for seq in sorted(self.cluster.held) if self.first <= seq <= end and self.matches(seq)]
        assert self.delivered == sorted(set(self.delivered)), "in order, each once"
        assert self.prove_to is None or set(self.delivered) <= set(wanted)
        if error is not None:
            assert isinstance(error, (*DOCUMENTED, nats.errors.ConnectionReconnectingError)), repr(error)
        elif self.limit is not None:
            assert len(self.delivered) <= self.limit
            whole = len(self.delivered) == min(self.limit, len(wanted))
            assert whole or self.prove_to is None or self.plan.end.num_pending, "a gap was reported as success"  # type: ignore[union-attr]
        elif self.prove_to is not None:
            assert self.delivered == wanted, "a gap was reported as success"
        if self.prove_to is not None:  # what was delivered has no gap, whatever followed
            assert self.delivered == wanted[: len(self.delivered)]
        assert error is None or self.cluster.trouble, "without trouble, nothing ends a read early"


@given(seed=st.integers(0, 1 << 40), proved=st.booleans(), limited=st.booleans())
@settings(max_examples=400, deadline=None)
def test_a_read_never_reports_a_gap_as_success_and_always_ends(seed: int, proved: bool, limited: bool) -> None:
    World(seed, proved=proved, limited=limited).check()


@given(seed=st.integers(0, 1 << 40), limited=st.booleans(), most=st.sampled_from([1, 2, 5]))
@settings(max_examples=400, deadline=None)
def test_a_read_beside_a_near_mirror_reports_no_gap_as_success(seed: int, limited: bool, most: int) -> None:
    with mock.patch.multiple(range_read, MAX_MIRROR_ANSWERS=1, MAX_LEADER_REQUESTS=most):
        World(seed, proved=True, limited=limited).check()


def test_nothing_is_logged_for_a_row(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="jetstream_ext.direct"):
        Script(scan(batch=1000)).answer(reply(range(1, 1001)))
    assert [record.message.partition(": ")[2].split("; ")[0] for record in caplog.records] == [
        "request sent",
        "reply ended",
        "READING -> ENDED (everything was delivered, and nothing is left to prove)",
    ]
