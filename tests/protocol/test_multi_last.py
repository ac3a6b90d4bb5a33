"""The read of the last message of many subjects, against a model of replicas that lag, with either kind of storage."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest
from cells import walk
from direct_replies import eob, row, status
from hypothesis import given, settings
from hypothesis import strategies as st

from jetstream_ext import errors
from jetstream_ext.protocol.direct import EndOfBatch, Request, StoredMsg
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.range_read import (
    Action,
    AskLeader,
    AwaitConnection,
    Deliver,
    Done,
    DropReply,
    RangeRead,
    SendRequest,
    Wait,
)
from jetstream_ext.protocol.reads import MultiLast, NewestMessage, NextMessage, Question, SentRequest
from jetstream_ext.protocol.subjects import NOT_INDEXED, matcher

TIMEOUT, PAUSE = 5.0, 0.05
Rows = list[tuple[int, str]]


def reply(
    rows: Rows, pending: int = 0, up_to: int | None = None, stream: str = "S", *, old: bool = False
) -> list[Frame]:
    """A whole reply; with `old`, its end counts one message too few, as on 2.11."""
    lasts = [0, *(seq for seq, _ in rows)]
    frames = [
        row(seq, last, pending + len(rows) - place, stream, subject=subject)
        for place, ((seq, subject), last) in enumerate(zip(rows, lasts, strict=False), 1)
    ]
    return [*frames, eob(lasts[-1], max(0, pending - 1) if old else pending, up_to)]


def finder(filters: Sequence[str]) -> Callable[[str], bool]:
    """Which subjects a server finds by filters."""
    matches = matcher(filters)
    return lambda subject: matches(subject) and NOT_INDEXED not in subject


NOTHING = [status("404 No Results")]


@dataclass
class Stream:
    """Every message that was ever stored, of which the newest `history` of each subject are kept."""

    log: Rows = field(default_factory=list)
    history: int = 100
    deleted: set[int] = field(default_factory=set)

    @property
    def last(self) -> int:
        return len(self.log)

    def write(self, subject: str) -> None:
        self.log.append((self.last + 1, subject))

    def held(self, reached: int) -> Rows:
        """What a replica that has reached a sequence stores."""
        found, counts = [], dict.fromkeys((subject for _, subject in self.log), 0)
        for seq, subject in reversed(self.log[:reached]):
            counts[subject] += 1
            if counts[subject] <= self.history and seq not in self.deleted:
                found.append((seq, subject))
        return found[::-1]

    def find(self, question: Question) -> StoredMsg | None:
        """What the leader has."""
        match question:
            case NewestMessage(seq):
                found = max((row for row in self.held(self.last) if row[0] <= seq), default=None)
            case NextMessage(request):
                found = min((row for row in self.held(self.last) if row[0] >= (request.seq or 1)), default=None)
        return None if found is None else StoredMsg(stream="S", subject=found[1], seq=found[0])

    def lasts(self, filters: Sequence[str], up_to: int) -> Rows:
        """The last message of each subject, as if all had been kept."""
        matches = finder(filters)
        found = {
            subject: seq for seq, subject in self.log if seq <= up_to and matches(subject) and seq not in self.deleted
        }
        return sorted((seq, subject) for subject, seq in found.items())


@dataclass
class Replica:
    stream: Stream
    reached: int
    file: bool = True
    stuck: bool = False
    name: str = "S"
    only: str = ">"  # what a mirror holds
    most: int = 1024  # subjects
    old: bool = False

    @property
    def held(self) -> Rows:
        part = matcher([self.only])
        return [row for row in self.stream.held(self.reached) if part(row[1])]

    def answer(self, request: Request) -> list[Frame]:
        held = self.held
        assert request.multi_last
        up_to = request.up_to_seq or self.reached
        if self.file and up_to > self.reached:
            return NOTHING
        matches = finder(request.multi_last)
        lasts = {subject: seq for seq, subject in held if seq <= up_to and matches(subject)}
        if not lasts:
            return NOTHING
        if len(lasts) > self.most:
            return [status("413 Too Many Results")]
        rows = sorted((seq, subject) for subject, seq in lasts.items() if seq >= (request.seq or 0))
        count = min(request.batch or 1000, request.max_bytes or 1000)
        return reply(rows[:count], len(rows[count:]), up_to, self.name, old=self.old)


class World:
    """Drives one read against a cluster, on a virtual clock; each request goes to some replica."""

    def __init__(self, stream: Stream, replicas: list[Replica], plan: MultiLast, rng: random.Random) -> None:
        self.stream, self.replicas, self.plan, self.rng = stream, replicas, plan, rng
        self.machine = RangeRead("S", plan, TIMEOUT, pause=PAUSE)
        self.delivered: Rows = []
        self.requests: list[Request] = []
        self.questions: list[Question] = []
        self.coming: list[str] = []
        self.loss = 0.0
        self.now = 0.0
        self._replies: dict[SentRequest, list[Frame]] = {}

    def act(self) -> Exception | None:
        for _ in range(20_000):
            action = self.machine.next_action(self.now)
            if isinstance(action, Done):
                return action.error
            self.happen(action)
        pytest.fail("the read does not end")

    def happen(self, action: Action) -> None:
        match action:
            case SendRequest(sent):
                self.requests.append(sent.request)
                for replica in self.replicas:
                    if not replica.stuck:
                        replica.reached = min(self.stream.last, replica.reached + self.rng.choice([0, 0, 1, 50]))
                frames = list(self.rng.choice(self.replicas).answer(sent.request))
                if self.rng.random() < self.loss:
                    del frames[self.rng.randrange(len(frames))]
                self._replies[sent] = frames
                if self.coming:
                    self.stream.write(self.coming.pop())
            case DropReply(sent):
                self._replies.pop(sent, None)
            case Deliver(block):
                self.delivered += [(message.seq, message.subject) for message in block.messages()]
            case AskLeader(question):
                self.questions.append(question)
                if self.coming and self.rng.random() < 0.3:
                    self.stream.write(self.coming.pop())
                found, last = self.stream.find(question), 0
                if isinstance(question, NewestMessage):
                    last = self.stream.last
                    if not self.plan.proved:  # then any responder is asked for this message first
                        had = dict(self.rng.choice(self.replicas).held)
                        if question.seq in had:
                            found = StoredMsg(stream="S", subject=had[question.seq], seq=question.seq)
                self.machine.leader_answered(found, last, self.now)
            case AwaitConnection():
                self.machine.connected()
                self.machine.session += 1
            case Wait(until):
                coming = next((sent for sent, frames in self._replies.items() if frames), None)
                if coming is None or self.machine.state.value != "reading":
                    self.now = until
                    self.machine.handle_timer(until)
                else:
                    size = self.rng.choice([1, 3, 200])
                    frames = self._replies[coming]
                    self._replies[coming] = frames[size:]
                    self.machine.receive(coming, frames[:size], self.now)
                    if self.rng.random() < self.loss:
                        self.machine.disconnected()
                        self._replies.clear()


def one(
    log: str,
    request: Request,
    *,
    file: bool = True,
    proved: bool = False,
    reached: int | None = None,
    paged: bool = True,
) -> World:
    """A read of a stream with one replica; each letter of `log` is a message."""
    stream = Stream()
    for subject in log:
        stream.write(subject)
    replica = Replica(stream, stream.last if reached is None else reached, file, stuck=reached is not None)
    plan = MultiLast(request, need=stream.last if proved else None, paged=paged)
    return World(stream, [replica], plan, random.Random(1))


BOTH = walk("file", [True, False])


@BOTH
def test_the_read_by_time_pages_by_sequence(file: bool) -> None:
    when = datetime(2026, 1, 1, tzinfo=UTC)
    world = one("abc", Request(multi_last=(">",), up_to_time=when, max_bytes=2), file=file)
    assert world.act() is None
    assert [request.up_to_time for request in world.requests] == [when, None]
    assert world.delivered == [(1, "a"), (2, "b"), (3, "c")]


@BOTH
def test_a_lagging_responder_does_not_show_what_is_needed(file: bool) -> None:
    for up_to, what in ((None, "sequence 4"), (4, "message 4")):
        world = one("abca", Request(multi_last=("a",), up_to_seq=up_to), file=file, proved=True, reached=3)
        error = world.act()
        assert isinstance(error, errors.RequestTimeoutError)
        assert f"no replica that answers has {what}, which the leader has" in str(error)
        assert world.delivered == []


@BOTH
def test_an_empty_answer_counts_if_its_responder_is_known(file: bool) -> None:
    """The next request includes the subject of the leader's first message."""
    world = one("abca", Request(multi_last=("z",)), file=file, proved=True)
    assert world.act() is None
    assert [request.multi_last for request in world.requests] == [("z",), ("z", "a")]
    assert world.questions == [NextMessage(Request(seq=1, next_by_subj=">"))]
    assert (world.delivered, world.plan.end) == ([], EndOfBatch(0, 0, 4, found=False))
    world = one(
        f"{NOT_INDEXED}b", Request(multi_last=("z",)), file=file, proved=True
    )  # no filter finds its first message
    assert world.act() is None
    assert [request.multi_last for request in world.requests] == [("z",), ("z", "b")]


def test_the_subject_of_the_witness_takes_no_room_of_the_batch() -> None:
    found = set()
    for seed in range(50):
        world = one("a", Request(multi_last=("z",), batch=1), proved=True)
        world.rng, world.coming = random.Random(seed), ["z"]
        assert world.act() is None
        assert world.plan.end is not None
        assert world.plan.end.num_pending == 0
        found.add((*world.delivered, len(world.requests)))
    assert found == {(2,), ((2, "z"), 3)}, "the message is found, also if the witness was in a reply before it"


@BOTH
def test_a_read_that_is_not_paged_counts_the_rest(file: bool) -> None:
    world = one("abcde", Request(multi_last=(">",), max_bytes=2), file=file, proved=True, paged=False)
    assert world.act() is None
    assert (world.delivered, len(world.requests)) == ([(1, "a"), (2, "b")], 1)
    assert world.plan.end == EndOfBatch(3, 2, 5)


@given(seed=st.integers(0, 1 << 40), proved=st.booleans(), loss=st.sampled_from([0.0, 0.0, 0.05]))
@settings(max_examples=600, deadline=None)
def test_a_read_shows_the_moment_that_it_names_or_fails(seed: int, proved: bool, loss: float) -> None:
    rng = random.Random(seed)
    stream, subjects = Stream(history=rng.choice([1, 2, 100])), "abcdefgh" + NOT_INDEXED * (rng.random() < 0.2)
    for _ in range(rng.choice([0, 3, 12, 40])):
        stream.write(rng.choice(subjects))
    stream.deleted = {seq for seq, _ in stream.log if rng.random() < rng.choice([0, 0, 0.3])}
    began = stream.last
    point = rng.choice([None, rng.randint(1, began + 5), began + 100])
    filters = rng.choice([(">",), ("a", "b", "c"), ("h",), ("*",), ("z",)])
    request = Request(
        multi_last=filters, up_to_seq=point, batch=rng.choice([None, None, 1, 3]), max_bytes=rng.choice([1, 2, 5, 1000])
    )
    replicas = [
        Replica(stream, rng.choice([began, rng.randint(0, began)]), rng.random() < 0.5, rng.random() < 0.2, old=rng.random() < 0.2)
        for _ in range(rng.randint(1, 3))
    ]  # fmt: skip
    if proved and rng.random() < 0.3:
        replicas += [
            Replica(stream, rng.randint(0, began), rng.random() < 0.5, name="M", only=rng.choice(["a", "z", ">"]))
        ]
    replicas = replicas[rng.random() < 0.1 and len(replicas) > 1 :]
    plan = MultiLast(request, need=began if proved else None)
    world = World(stream, replicas, plan, rng)
    world.coming, world.loss = [rng.choice(subjects + "i") for _ in range(rng.choice([0, 3, 10]))], loss
    had = {subject for _, subject in stream.held(began) if finder(filters)(subject)}
    error = world.act()
    if error is not None:
        gone = isinstance(error, errors.HistoryUnavailableError)
        kinds = (errors.RequestTimeoutError, errors.MessagesLostError, errors.MirrorAnswersError)
        assert gone or isinstance(error, kinds), repr(error)
        assert not gone or stream.history < 100
        own = [replica for replica in replicas if replica.name == "S"]
        assert gone or loss or all(replica.stuck for replica in own), "a responder that catches up is waited for"
    rows = world.delivered
    assert rows == sorted(rows)
    assert len({subject for _, subject in rows}) == len(rows), "a subject came twice"
    end = world.plan.end
    shown = end.up_to_seq if end is not None and end.up_to_seq is not None else world.plan.point
    if rows:
        assert shown is not None
        true = stream.lasts(filters, shown)
        assert set(rows) <= set(true), "a row is not the last one at the point in time"
    if error is not None:
        return
    assert end is not None
    if end.up_to_seq is None:
        assert (rows, point, proved and began > 0) == ([], None, False)
        return
    if proved and point is None and request.batch is None and (request.max_bytes or 0) >= 1000:
        assert had <= {subject for _, subject in rows}, "a subject that was there is missing from the only page"
    if proved or point is not None:
        most = began if point is None else min(point, began)
        held = [seq for seq, subject in stream.held(stream.last) if seq <= most and NOT_INDEXED not in subject]
        assert end.up_to_seq >= max(held, default=0)
    if point is not None:
        assert end.up_to_seq <= point
    kept = set(stream.held(stream.last)) | set(rows)
    expected = [row for row in stream.lasts(filters, end.up_to_seq) if row in kept]
    assert rows == expected[: len(rows)]
    if request.batch is None:
        assert rows == expected, "all that the stream still has"
        assert end.num_pending == 0
    else:
        assert len(rows) >= min(request.batch, len(expected))
    assert end.last_seq == (rows[-1][0] if rows else 0)
