"""Gaps in a range that is read: which are losses."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jetstream_ext.spark.loss import HeadWatch


def watch(*, from_head: bool = False, first: int = 1, last: int = 100) -> HeadWatch:
    return HeadWatch(first, last, from_head=from_head, now=0.0)


@given(st.data())
def test_a_loss_is_never_missed(data: st.DataObject) -> None:
    """The first sequence moves up while a range is read; some messages were deleted before."""
    last = 40
    stored = set(range(1, last + 1)) - data.draw(st.sets(st.integers(1, last), max_size=10))
    reading, position, first_seq, read = watch(last=last), 0, 1, set[int]()
    expired_unread = set[int]()
    found: range | None = None
    while True:
        if data.draw(st.booleans()):
            first_seq = data.draw(st.integers(first_seq, last + 1))
            expired_unread |= {seq for seq in stored if position < seq < first_seq}
            stored = {seq for seq in stored if seq >= first_seq}
        piece = sorted(seq for seq in stored if seq > position)[: data.draw(st.integers(1, 5))]
        if not piece:
            break
        position = piece[-1]
        read |= set(piece)
        if reading.add(piece, 0.0):
            found = found or reading.answered(first_seq, 0.0)
    if reading.close():
        found = found or reading.answered(first_seq, 0.0)
    assert found is not None or not expired_unread
    assert found is None or not read & set(found)
