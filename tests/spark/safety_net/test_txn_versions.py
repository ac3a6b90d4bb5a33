"""``foreachBatch`` with the transactional sink: Delta's ``txnAppId`` and ``txnVersion`` name a micro-batch."""

from __future__ import annotations

from collections import Counter
from typing import Any


def _rows(out: str, batch: int) -> list[list[dict[str, Any]]]:
    """Two partitions of a micro-batch."""
    return [[{"subject": f"{out}.rows", "data": b"%d %d" % (batch, part)}] for part in range(2)]


def _save(sink: Any, out: str, batch: int) -> None:
    target = sink(out, "transactional", sinkPartitions="2", txnAppId="app", txnVersion=f"{batch}")
    target.save(_rows(out, batch))


def test_the_markers_of_a_query_do_not_grow_with_its_micro_batches(
    make_stream: Any, sink: Any, stored: Any, with_js: Any
) -> None:
    out = make_stream(allow_rollup_hdrs=True)

    def markers() -> int:
        return sum(stored(out, f"_spark.{out}.>").values())

    for batch in range(2):
        _save(sink, out, batch)
    before = markers()
    for batch in range(2, 6):
        _save(sink, out, batch)
    assert (markers(), sum(stored(out, f"{out}.rows").values())) == (before, 12)


def test_a_repeated_micro_batch_stores_nothing(make_stream: Any, sink: Any, stored: Any) -> None:
    out = make_stream()
    for batch in (0, 1, 1, 0):
        _save(sink, out, batch)
    assert stored(out, f"{out}.rows") == Counter(b"%d %d" % (batch, part) for batch in range(2) for part in range(2))
