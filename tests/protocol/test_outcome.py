"""Which questions a write without an answer needs, and what the answers prove."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest
from cells import walk
from hypothesis import given
from hypothesis import strategies as st

from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.outcome import (
    AskFence,
    AskMessage,
    AskRange,
    AskState,
    Batch,
    Follower,
    Messages,
    Question,
    Record,
    StreamGone,
    Unknown,
    Verdict,
    find,
    find_follower,
)

THEN, NOW = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 2, 1, tzinfo=UTC)
STATE = StreamState(
    "S", "today", {"subjects": ["s.>"], "allow_direct": True}, last_seq=10, messages=10, first_time=THEN, last_time=THEN,
    leader="A",
)  # fmt: skip


def stored(seq: int, number: object = None, *, batch: str = "b1", msg_id: str = "", data: bytes = b"") -> StoredMsg:
    headers = {} if number is None else {h.BATCH_ID: batch, h.BATCH_SEQUENCE: str(number)}
    if msg_id:
        headers[h.MSG_ID] = msg_id
    return StoredMsg(stream="S", subject="s.a", seq=seq, headers=headers, data=data)


def refused(err_code: int, description: str = "no", stream: str = "S") -> tuple[bytes, bytes]:
    body = {"error": {"code": 400, "err_code": err_code, "description": description}, "stream": stream, "seq": 0}
    return b"", orjson.dumps(body)


@dataclass
class World:
    """Answers every question; `moved` changes it before the n-th look at the stream."""

    messages: dict[int, StoredMsg] = field(default_factory=dict)
    state: StreamState | None = STATE
    last: StoredMsg | None = None
    session: int = 0
    kill: tuple[bytes, bytes] = refused(10176)
    mark: tuple[bytes, bytes] = refused(10071, "wrong last sequence: 10")
    moved: Callable[[int, World], None] = lambda look, world: None
    asked: list[Question] = field(default_factory=list)
    looks: int = 0

    def answer(self, question: Question) -> Any:
        self.asked.append(question)
        match question:
            case AskState(_, seq):
                while True:
                    self.looks += 1
                    self.moved(self.looks, self)
                    if self.state is None or self.state.last_seq >= seq or self.looks > 9:
                        return self.state
            case AskMessage(_, request) if "next_by_subj" in request:
                first = request.get("seq", 1)
                return next((self.messages[seq] for seq in sorted(self.messages) if seq >= first), None)
            case AskMessage(_, request) if "seq" in request:
                return self.messages.get(request["seq"])
            case AskMessage():
                return self.last
            case AskRange(_, first, last, see):
                for seq in sorted(self.messages):
                    if first <= seq <= last:
                        see(self.messages[seq])
                return None
            case AskFence(_, messages):
                return self.session, [self.kill, self.mark][-len(messages) :]

    def follow(self, search: Generator[Question, Any, Any]) -> Any:
        answer: object = None
        while True:
            try:
                question = search.send(answer)
            except StopIteration as verdict:
                return verdict.value
            answer = self.answer(question)


def batch(**facts: Any) -> Batch:
    return replace(Batch("s.a", 3, STATE, 7, "b1", True, 0), **facts)


def messages(*ids: str, **facts: Any) -> Messages:
    return replace(Messages("s.a", len(ids), STATE, 7, ids, True, ""), **facts)


def without(*seqs: int) -> dict[int, StoredMsg]:
    return {seq: stored(seq) for seq in range(1, 11) if seq not in seqs}


BATCH = {seq: stored(seq, number) for number, seq in enumerate((8, 9, 10), 1)}


@walk("direct", [True, False])
def test_a_batch_is_found_by_any_of_its_messages(direct: bool) -> None:
    state = replace(STATE, config={**STATE.config, "allow_direct": direct})
    for kept in BATCH:
        world = World({**without(*BATCH), kept: BATCH[kept]}, state=state)
        assert world.follow(find(batch(before=state))) == Verdict(3, 10)
        assert any(isinstance(each, AskRange) for each in world.asked) is direct
    last = World(last=BATCH[9])
    assert last.follow(find(batch())) == Verdict(3, 10)
    assert len(last.asked) == 1, "the last message on the subject is enough"


@walk("direct", [True, False])
def test_a_stream_without_holes_proves_that_nothing_is_stored(direct: bool) -> None:
    state = replace(STATE, config={**STATE.config, "allow_direct": direct})
    for gone in ((), (8, 9)):
        assert World(without(*gone), state=state).follow(find(batch(before=state))) == Verdict(0)
    assert World(without(8, 9, 10), state=state).follow(find(batch(before=state))).doubt


def test_an_older_message_of_the_subject_proves_it_where_a_stream_removes_the_oldest_first() -> None:
    """A bucket that keeps one value of each key has holes wherever others write."""
    world = World(without(8, 9, 10), last=stored(7))
    for write in (batch(), messages("id")):
        assert world.follow(find(write)).doubt
        verdict = world.follow(find(replace(write, oldest_first=True)))
        assert (verdict.stored, verdict.doubt) == (0, "")
    # One with a TTL of its own may outlive newer ones.
    world.last = StoredMsg(stream="S", subject="s.a", seq=7, headers={h.MSG_TTL: "never"}, data=b"")
    for write in (batch(oldest_first=True), messages("id", oldest_first=True)):
        assert world.follow(find(write)).doubt
    world.last = stored(9, batch="other")  # it may have replaced one of the batch
    for write in (batch(oldest_first=True), messages("id", oldest_first=True)):
        assert world.follow(find(write)).doubt


def test_the_read_waits_until_the_leader_has_applied_everything() -> None:
    def moved(look: int, world: World) -> None:
        world.state = replace(STATE, last_seq=min(10, 6 + look))

    world = World(BATCH, moved=moved)
    assert world.follow(find(batch(before=replace(STATE, last_seq=7)))) == Verdict(3, 10)
    assert AskState("S", 10) in world.asked
    assert world.looks == 5


def moved_to(since: int, **facts: Any) -> Callable[[int, World], None]:
    """Change the stream from the n-th look on."""

    def moved(look: int, world: World) -> None:
        world.state = replace(STATE, **facts) if look >= since else STATE

    return moved


@walk("write", [batch(), messages("a", "b", "c")])
@walk(
    "world, later, why",
    [
        ({"state": None}, False, "was deleted$"),
        ({"moved": moved_to(1, created="later", first_time=NOW, last_time=NOW)}, False, "deleted and created again"),
        ({"state": replace(STATE, last_seq=9)}, False, "emptied"),  # in memory, and its server was restarted
        ({"moved": moved_to(2, leader="B")}, True, "leader changed"),
        ({"moved": moved_to(3, leader="B")}, True, "leader changed"),
        ({"moved": moved_to(3, leader_is_certain=False)}, True, "majority"),
        ({"mark": refused(10071, "wrong last sequence: 11")}, True, "has not yet applied all messages"),
        ({"mark": (b"NATS/1.0 503\r\n\r\n", b"")}, True, "did not answer"),
        ({"mark": (b"", b"no JSON")}, True, "malformed"),
        ({"mark": (b"", b"")}, True, "did not refuse"),
        ({"mark": (b"", b'{"stream":"S","seq":7}')}, True, "did not refuse"),
        ({"mark": refused(10071, stream="T")}, False, "belongs to stream 'T'"),
    ],
)
def test_what_leaves_the_outcome_open(write: Batch | Messages, world: dict[str, Any], later: bool, why: str) -> None:
    with pytest.raises(Unknown, match=why) as unknown:
        World(**{"messages": without(), **world}).follow(find(write))
    assert unknown.value.later is later
    assert isinstance(unknown.value, StreamGone) == ("stream was" in str(unknown.value))


@walk("kill, why", [
    ((b"NATS/1.0 503\r\n\r\n", b""), "did not confirm that it dropped"), (refused(10071), "did not confirm that it dropped"),
    ((b"", b""), "did not refuse"), (refused(10176, stream="T"), "belongs to stream 'T'"),
])  # fmt: skip
def test_a_batch_that_the_server_may_still_have_is_not_decided(kill: tuple[bytes, bytes], why: str) -> None:
    with pytest.raises(Unknown, match=why):
        World(without(), kill=kill).follow(find(batch()))


def test_a_batch_of_which_nothing_was_acknowledged_may_arrive_over_the_old_connection() -> None:
    with pytest.raises(Unknown, match="the old connection"):
        World(without(), session=1).follow(find(batch(staged=False)))
    assert World(without(), session=1).follow(find(batch())) == Verdict(0)
    assert World({**without(), **BATCH}, session=1).follow(find(batch(staged=False))) == Verdict(3, 10)


@walk("text", ["wrong last sequence", "", "x: 7"])
def test_a_replicated_stream_must_say_which_sequence_it_will_reach(text: str) -> None:
    world = World(without(), state=replace(STATE, replicated=True), mark=refused(10071, text))
    with pytest.raises(Unknown, match="did not report the stream's last sequence"):
        world.follow(find(batch(before=replace(STATE, replicated=True))))


def test_a_stream_whose_creation_time_alone_has_changed_is_the_same() -> None:
    """Servers 2.12 to 2.12.15 and 2.14 to 2.14.5 change it: the stream still has a message of before."""
    first = StoredMsg(stream="S", subject="s.a", seq=1, time_ns=int(THEN.timestamp()) * 10**9)
    state = replace(STATE, created="later", first_seq=2, first_time=NOW, last_time=NOW)
    assert World({**without(), 1: first}, state=state).follow(find(batch())) == Verdict(0)
    with pytest.raises(StreamGone):
        World(without(), state=state).follow(find(batch()))


def test_the_fence_is_messages_that_are_never_stored() -> None:
    for write, count in ((batch(), 2), (messages("a"), 1)):
        world = World(without())
        world.follow(find(write))
        (fence,) = (each for each in world.asked if isinstance(each, AskFence))
        *kills, mark = (dict(h.parse_lines(each)) for each in fence.messages)
        assert mark == {"Nats-Expected-Stream": "S", "Nats-Expected-Last-Sequence": "9223372036854775807"}
        assert kills == [{"Nats-Batch-Id": "b1", "Nats-Batch-Sequence": "0"}] * (count - 1)


def test_similar_ids_and_sequences_are_not_the_batch() -> None:
    odd = [("b1", "x"), ("b1", 0), ("b1", 4), ("B1", 1), ("b1", "9" * 5000)]
    found = without() | {6 + n: stored(6 + n, number, batch=name) for n, (name, number) in enumerate(odd)}
    assert World(found).follow(find(batch(after=5))) == Verdict(0)


@given(st.data())
def test_no_verdict_about_a_batch_is_false(data: st.DataObject) -> None:
    before, size, later = (data.draw(st.integers(low, 6)) for low in (0, 1, 0))
    is_stored, interleaved = data.draw(st.booleans()), data.draw(st.booleans())
    stream: list[tuple[str, int] | None] = [None] * before
    for number in range(1, size + 1):
        if is_stored:
            stream.append(("b1", number))
            if interleaved and data.draw(st.booleans()):
                stream.append(None)
    stream += [data.draw(st.sampled_from([None, ("c", 1), ("b1", size + 1)])) for _ in range(later)]
    kept = {
        seq: stored(seq) if what is None else stored(seq, what[1], batch=what[0])
        for seq, what in enumerate(stream, 1)
        if data.draw(st.booleans())
    }
    after = data.draw(st.integers(0, before))
    config = {**STATE.config, "sources": [{"name": "O"}] if interleaved else []}
    state = replace(STATE, config=config, last_seq=len(stream))
    mark = refused(10071, f"wrong last sequence: {len(stream)}")
    verdict = World(kept, state=state, mark=mark).follow(find(batch(before=state, after=after, size=size)))
    if verdict.stored:
        assert is_stored
        assert interleaved or verdict.seq == before + size
    elif not verdict.doubt:
        assert not is_stored


@given(st.data())
def test_no_verdict_about_messages_is_false(data: st.DataObject) -> None:
    """Fast ingest stores a prefix of what was sent, others write too, and some of all that is removed.

    Ids of the caller come more than once, and others use them too.
    """
    unique = data.draw(st.booleans(), label="own ids")
    count = data.draw(st.integers(1, 8), label="sent")
    numbers = st.integers(1, count)
    some = range(1, count + 1) if unique else data.draw(st.lists(numbers, min_size=count, max_size=count), label="ids")
    ids = [f"id-{n}" for n in some]
    prefix = data.draw(st.integers(0, count), label="stored")
    foreign = st.just("x") if unique else st.one_of(st.just("x"), numbers.map("id-{}".format))
    others = data.draw(st.lists(foreign, max_size=60), label="others")
    order = data.draw(st.permutations([True] * prefix + [False] * len(others)), label="order")
    known = data.draw(st.sampled_from(["", "known"]), label="one acknowledged")
    after = data.draw(st.integers(0, 5), label="after")
    log = ["x"] * after + [known] * bool(known) + ["x"] * data.draw(st.integers(0, 5), label="others before")
    sent, written, seen = iter(ids), iter(others), set(log)
    for mine in order:
        msg_id = next(sent) if mine else next(written)
        if msg_id == "x" or msg_id not in seen:  # others are dropped as duplicates
            log.append(msg_id)
            seen.add(msg_id)
    removed = data.draw(st.sets(st.integers(1, len(log))) if log else st.just(set()), label="removed")
    kept = {seq: stored(seq, msg_id=msg_id) for seq, msg_id in enumerate(log, 1) if seq not in removed}
    state = replace(STATE, last_seq=len(log))
    write = Messages("s.a", count, state, after, tuple(ids), unique, known)
    mark = refused(10071, f"wrong last sequence: {len(log)}")
    verdict = World(kept, state=state, mark=mark).follow(find(write))
    assert set(ids[: verdict.stored]) <= seen, "a message that is reported as stored is there, or was"
    if not verdict.doubt:
        again = set(ids[verdict.stored :]) - set(ids[: verdict.stored])
        assert not again & seen, "a message that is sent again is not there"
        assert set(ids[:prefix]) <= set(ids[: verdict.stored]) or not unique
    assert not verdict.doubt or removed or not unique, "there is no doubt about a stream that has every message"


def test_what_follows_a_fence() -> None:
    one, two, three = (stored(seq, data=b"%d" % seq) for seq in (3, 5, 8))
    write = Record("S", "s.a", 3, frozenset({b"5"}))
    assert World({3: one}, last=one).follow(find_follower(write)) == Follower(one)
    assert World({}, last=None).follow(find_follower(write)) == Follower(None)
    assert World({3: one, 5: two}, last=two).follow(find_follower(write)) == Follower(two, two)
    assert World({5: two, 8: three}, last=three).follow(find_follower(write)) == Follower(three, two)
    assert World({8: three}, last=three).follow(find_follower(write)) == Follower(three), "another writer's"
