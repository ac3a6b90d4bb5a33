"""What the messages of a stream say of a batch: against a stream that really had it, or not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.atomic_resolve import Search, fence, reached


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
