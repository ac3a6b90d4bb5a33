"""`IdSearch`: what is in a stream decides what was stored, and nothing else is claimed."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from jetstream_ext.protocol.id_search import IdSearch, Verdict

STORED, DOUBTFUL, MISSING, UNKNOWN = Verdict
Stream = dict[int, str]


def verdicts(
    stream: Stream, ids: Sequence[str], *, base: int = 0, last_seq: int, before: str = "", **sent: bool
) -> list[Verdict]:
    search = IdSearch(ids, own="run-", before=before, base=base, last_seq=last_seq, **sent)
    while (block := search.next_block()) is not None:
        search.see((seq, stream[seq]) for seq in range(block[0], block[1] + 1) if seq in stream)
    return search.verdicts()


@given(st.data())
def test_no_verdict_is_false(data: st.DataObject) -> None:
    """A batch stores a prefix of what was sent, others write too, and some of all that is removed.

    Ids that are not of this run come more than once, and others use them too.
    """
    own = data.draw(st.booleans(), label="own ids")
    count = data.draw(st.integers(1, 8), label="sent")
    numbers = st.integers(1, count)
    some = (
        list(range(1, count + 1)) if own else data.draw(st.lists(numbers, min_size=count, max_size=count), label="ids")
    )
    ids = [f"run-{n}" if own else f"id-{n}" for n in some]
    stored = data.draw(st.integers(0, len(ids)), label="stored")
    foreign = st.just("x") if own else st.one_of(st.just("x"), numbers.map("id-{}".format))
    others = data.draw(st.lists(foreign, max_size=60), label="others")
    order = data.draw(st.permutations([True] * stored + [False] * len(others)), label="order")
    base = data.draw(st.integers(0, 5), label="base")
    stream: Stream = dict.fromkeys(range(1, base + 1), "x")
    acknowledged = data.draw(st.booleans(), label="one acknowledged")
    log = (["run-0"] if acknowledged else []) + ["x"] * data.draw(st.integers(0, 5), label="others before")
    sent, written = iter(ids), iter(others)
    log += [next(sent) if mine else next(written) for mine in order]
    stream |= {base + index + 1: msg_id for index, msg_id in enumerate(log)}
    last_seq = base + len(log)
    removed = data.draw(st.sets(st.sampled_from(sorted(stream))) if stream else st.just(set()), label="removed")
    found = {seq: msg_id for seq, msg_id in stream.items() if seq not in removed}
    before = "run-0" if acknowledged else ""
    for index, verdict in enumerate(verdicts(found, ids, base=base, last_seq=last_seq, before=before)):
        if verdict is STORED or verdict is DOUBTFUL:
            assert index < stored or ids[index] in log
            assert verdict is STORED or log.count(ids[index]) > 1
        elif verdict is MISSING:
            assert index >= stored
            assert ids[index] not in log
        else:
            assert removed, "nothing is unknown in a stream that has every message"
            assert not own or not any(ids[later] in found.values() for later in range(index, count))
