"""What the messages of a stream say of a batch: against a stream that really had it, or not."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.atomic_search import Search, fence, reached
from jetstream_ext.protocol.stream_state import StreamState, matches, parse_stream_state


def header(batch: str, number: object) -> dict[str, str]:
    return {h.BATCH_ID: batch, h.BATCH_SEQUENCE: str(number)}


@given(st.data())
def test_it_never_says_what_is_not_so(data: st.DataObject) -> None:
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
    search = Search("b", size, after, contiguous=not interleaved)
    for seq, (headers, there) in enumerate(zip(stream, kept, strict=True), 1):
        if there and seq > after:
            search.see(seq, headers)
    search.skip(len(stream))
    if search.last_seq is not None:
        assert stored
        if not interleaved:
            assert search.last_seq == before + size
    elif not search.room:
        assert not stored


def test_ids_that_only_look_right() -> None:
    search = Search("b", 3, 0)
    for seq, headers in enumerate([header("b", "x"), header("b", 0), header("b", 4), header("B", 1), {}], 1):
        search.see(seq, headers)
    assert (search.last_seq, search.room) == (None, False)


def test_the_fence() -> None:
    kill, mark = fence("b1", "S")
    assert dict(h.parse_lines(kill)) == {"Nats-Batch-Id": "b1", "Nats-Batch-Sequence": "0"}
    assert dict(h.parse_lines(mark)) == {
        "Nats-Expected-Stream": "S", "Nats-Expected-Last-Sequence": "9223372036854775807",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "seq"), [("wrong last sequence: 2022", 2022), ("wrong last sequence", None), ("", None), ("x: 7", None)]
)
def test_how_far_the_leader_is(text: str, seq: int | None) -> None:
    assert reached(text) == seq


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a", "a", True), ("a", "b", False), ("a.*", "a.b", True), ("a.*", "a", False), ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True), ("a.>", "a", False), (">", "a", True), ("*.b", "a.b", True), ("a.b", "a.b.c", False),
    ],
)  # fmt: skip
def test_subjects(pattern: str, subject: str, expected: bool) -> None:
    assert matches(pattern, subject) is expected
    assert StreamState("S", "", (pattern,)).stores(subject) is expected


def info(**more: Any) -> dict[str, Any]:
    return {"config": {"name": "S"}, "created": "now", "state": {"first_seq": 1, "last_seq": 9}, **more}


def test_an_old_or_single_server() -> None:
    facts = parse_stream_state(info())
    assert facts == StreamState("S", "now", last_seq=9)
    assert facts.leader_is_certain


@pytest.mark.parametrize(
    ("active", "offline", "leads"),
    [((1, 1), (), True), ((1, 9), (), True), ((9, 9), (), False), ((1, 9), (0,), False)],
)
def test_a_leader_that_hears_from_a_majority(active: tuple[int, ...], offline: tuple[int, ...], leads: bool) -> None:
    peers = [
        {"name": f"n{i}", "active": seconds * 1_000_000_000, "offline": i in offline}
        for i, seconds in enumerate(active)
    ]
    facts = parse_stream_state(info(cluster={"leader": "n9", "replicas": peers}))
    assert (facts.leader, facts.replicated, facts.leader_is_certain) == ("n9", True, leads)


def test_what_the_server_echoes() -> None:
    config = {
        "name": "S", "subjects": ["a", "b.>"], "allow_atomic": True, "allow_direct": True, "num_replicas": 3,
        "sources": [{}], "duplicate_window": 5, "metadata": {"_nats.level": "4", "_nats.ver": "2.14.6"},
    }  # fmt: skip
    facts = parse_stream_state(info(config=config))
    assert facts == StreamState(
        "S", "now", ("a", "b.>"), 9, replicated=True, direct=True, contiguous=False, window_ns=5,
        level=4, version="2.14.6",
    )  # fmt: skip
