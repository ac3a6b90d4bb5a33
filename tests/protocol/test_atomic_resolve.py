"""Which questions a commit without an answer needs, and what the answers prove."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
import pytest
from cells import walk
from hypothesis import given
from hypothesis import strategies as st

from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.atomic_resolve import (
    AskFence,
    AskMessage,
    AskRange,
    AskState,
    Commit,
    NeverKnown,
    NotYetKnown,
    Plan,
    Query,
    Search,
    find_commit,
)
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.types import BatchAck

STATE = StreamState("S", "today", {"subjects": ["s.>"], "allow_direct": True}, last_seq=10, messages=10, leader="A")


def stored(seq: int, number: int = 0) -> StoredMsg:
    headers = {"Nats-Batch-Id": "b1", "Nats-Batch-Sequence": str(number)} if number else {}
    return StoredMsg(stream="S", subject="s.a", seq=seq, headers=headers)


def refused(err_code: int, description: str = "no", stream: str = "S") -> tuple[bytes, bytes]:
    body = {"error": {"code": 400, "err_code": err_code, "description": description}, "stream": stream, "seq": 0}
    return b"", orjson.dumps(body)


DROPPED = refused(10176)


@dataclass
class World:
    """Answers every question; `moved` changes it before the n-th look at the stream."""

    messages: dict[int, StoredMsg] = field(default_factory=dict)
    state: StreamState | None = STATE
    last: StoredMsg | None = None
    session: int = 0
    kill: tuple[bytes, bytes] = DROPPED
    mark: tuple[bytes, bytes] = refused(10071, "wrong last sequence: 10")
    moved: Callable[[int, World], None] = lambda look, world: None
    asked: list[Query] = field(default_factory=list)
    looks: int = 0

    def answer(self, question: Query) -> Any:
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
            case AskMessage():
                return self.last
            case AskRange(_, search, options):
                for seq in sorted(self.messages):
                    if options.get("seq", 1) <= seq <= options.get("up_to_seq", seq):
                        search.see(self.messages[seq])
                return None
            case AskFence():
                return self.session, self.kill, self.mark

    def follow(self, plan: Plan) -> BatchAck | None:
        answer: object = None
        while True:
            try:
                question = plan.send(answer)
            except StopIteration as verdict:
                ack: BatchAck | None = verdict.value
                return ack
            answer = self.answer(question)


def commit(**facts: Any) -> Commit:
    return replace(Commit("b1", 3, 1, "s.a", STATE, 7, 0), **facts)


def without(*seqs: int) -> dict[int, StoredMsg]:
    return {seq: stored(seq) for seq in range(1, 11) if seq not in seqs}


BATCH = {seq: stored(seq, number) for number, seq in enumerate((8, 9, 10), 1)}


@walk("direct", [True, False])
def test_a_batch_is_found_by_any_of_its_messages(direct: bool) -> None:
    state = replace(STATE, config={**STATE.config, "allow_direct": direct})
    for kept in BATCH:
        world = World({**without(*BATCH), kept: BATCH[kept]}, state=state)
        assert world.follow(find_commit(commit(opened=state))) == BatchAck("S", 10, "b1", 3)
    assert any(isinstance(each, AskRange) for each in world.asked) is direct


def test_the_read_waits_until_the_leader_has_applied_everything() -> None:
    def moved(look: int, world: World) -> None:
        world.state = replace(STATE, last_seq=min(10, 6 + look))

    world = World(BATCH, moved=moved)
    assert world.follow(find_commit(commit())) == BatchAck("S", 10, "b1", 3)
    assert AskState("S", 10) in world.asked
    assert world.looks == 4


def replace_leader(look: int, world: World) -> None:
    world.state = replace(STATE, leader="A" if look == 1 else "B")


def replace_leader_at_the_end(look: int, world: World) -> None:
    world.state = replace(STATE, leader="A" if look < 3 else "B")


def recreate(look: int, world: World) -> None:
    world.state = replace(STATE, created="today" if look == 1 else "later")


def lose_the_majority(look: int, world: World) -> None:
    world.state = replace(STATE, leader_is_certain=look < 3)


@walk(
    "world, facts, verdict, why",
    [
        ({}, {"opened": None}, NeverKnown, "could not be read when the batch was opened"),
        ({"state": None}, {}, NeverKnown, "no longer exists"),
        ({"moved": recreate}, {}, NeverKnown, "re-created"),
        ({"state": replace(STATE, last_seq=6)}, {}, NotYetKnown, "lacks messages"),
        ({"moved": replace_leader}, {}, NotYetKnown, "leader changed"),
        ({"moved": replace_leader_at_the_end}, {}, NotYetKnown, "majority"),
        ({"moved": lose_the_majority}, {}, NotYetKnown, "majority"),
        ({"mark": refused(10071, "wrong last sequence: 11")}, {}, NotYetKnown, "has not yet applied all messages"),
        (
            {"mark": refused(10164), "state": replace(STATE, replicated=True)}, {}, NotYetKnown, "did not report the stream's last sequence",
        ),
        ({"kill": (b"NATS/1.0 503\r\n\r\n", b"")}, {}, NotYetKnown, "did not confirm that it dropped the batch"),
        ({"mark": (b"NATS/1.0 503\r\n\r\n", b"")}, {}, NotYetKnown, "did not confirm that it dropped the batch"),
        ({"kill": refused(10071)}, {}, NotYetKnown, "did not confirm that it dropped the batch"),
        ({"kill": (b"", b"")}, {}, NotYetKnown, "did not refuse"),
        ({"kill": (b"", b'{"stream":"S","seq":7}')}, {}, NotYetKnown, "did not refuse"),
        ({"mark": (b"", b"no JSON")}, {}, NotYetKnown, "malformed"),
        ({"kill": refused(10176, stream="T")}, {}, NeverKnown, "belongs to stream 'T'"),
        ({"messages": without(8, 9, 10)}, {}, NeverKnown, "removed"),
        ({"session": 1}, {"staged": 0}, NeverKnown, "the old connection"),
    ],
)  # fmt: skip
def test_what_leaves_the_outcome_open(
    world: dict[str, Any], facts: dict[str, Any], verdict: type[Exception], why: str
) -> None:
    with pytest.raises(verdict, match=why):
        World(**{"messages": without(), **world}).follow(find_commit(commit(**facts)))


# -- batches with an id that others may use


# -- the messages of a stream


def search(batch: str = "b", size: int = 3, after: int = 0, *, contiguous: bool = True) -> Search:
    return Search(commit(batch_id=batch, size=size), after, contiguous=contiguous)


def header(batch: str, number: object) -> dict[str, str]:
    return {h.BATCH_ID: batch, h.BATCH_SEQUENCE: str(number)}


def with_headers(seq: int, headers: dict[str, str]) -> StoredMsg:
    return StoredMsg(stream="S", subject="s.a", seq=seq, headers=headers)


@given(st.data())
def test_a_search_never_proves_what_is_false(data: st.DataObject) -> None:
    before, size, later = (data.draw(st.integers(low, 6)) for low in (0, 1, 0))
    stored, interleaved = data.draw(st.booleans()), data.draw(st.booleans())
    stream: list[dict[str, str]] = [{} for _ in range(before)]
    for number in range(1, size + 1):
        if stored:
            stream.append(header("b", number))
            if interleaved and data.draw(st.booleans()):
                stream.append({})
    stream += [data.draw(st.sampled_from([{}, header("c", 1), header("b", size + 1)])) for _ in range(later)]
    kept = [data.draw(st.booleans()) for _ in stream]
    after = data.draw(st.integers(0, before))
    looking = search(size=size, after=after, contiguous=not interleaved)
    for seq, (headers, there) in enumerate(zip(stream, kept, strict=True), 1):
        if there and seq > after:
            looking.see(with_headers(seq, headers))
    looking.skip(len(stream))
    if looking.last_seq is not None:
        assert stored
        if not interleaved:
            assert looking.last_seq == before + size
    elif not looking.room:
        assert not stored


def test_the_fence_is_two_messages_that_are_never_stored() -> None:
    world = World(without())
    world.follow(find_commit(commit()))
    (fence,) = (each for each in world.asked if isinstance(each, AskFence))
    assert dict(h.parse_lines(fence.kill)) == {"Nats-Batch-Id": "b1", "Nats-Batch-Sequence": "0"}
    assert dict(h.parse_lines(fence.mark)) == {
        "Nats-Expected-Stream": "S", "Nats-Expected-Last-Sequence": "9223372036854775807",
    }  # fmt: skip


@walk("text, why", [
    ("wrong last sequence: 2022", "has not yet applied all messages"),
    ("wrong last sequence", "did not report the stream's last sequence"),
    ("", "did not report the stream's last sequence"), ("x: 7", "did not report the stream's last sequence"),
])  # fmt: skip
def test_the_second_refusal_may_name_the_sequence_that_the_leader_will_reach(text: str, why: str) -> None:
    world = World(without(), state=replace(STATE, replicated=True), mark=refused(10071, text))
    with pytest.raises(NotYetKnown, match=why):
        world.follow(find_commit(commit()))


def test_similar_ids_and_sequences_are_not_the_batch() -> None:
    looking = search()
    for seq, headers in enumerate(
        [header("b", "x"), header("b", 0), header("b", 4), header("B", 1), header("b", "9" * 5000), {}], 1
    ):
        looking.see(with_headers(seq, headers))
    assert (looking.last_seq, looking.room) == (None, False)


@walk("direct", [True, False])
def test_a_stream_without_holes_proves_that_nothing_is_stored(direct: bool) -> None:
    state = replace(STATE, config={**STATE.config, "allow_direct": direct})
    assert World(without(), state=state).follow(find_commit(commit(opened=state))) is None
    assert World(without(8, 9), state=state).follow(find_commit(commit(opened=state))) is None
