"""``foreachBatch`` with the transactional sink: Delta's ``txnAppId`` and ``txnVersion`` name a micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest


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


def test_a_version_that_was_not_completed_is_completed(make_stream: Any, sink: Any, stored: Any) -> None:
    out = make_stream()
    [first, second] = _rows(out, 0)
    target = sink(out, "transactional", sinkPartitions="2", txnAppId="app", txnVersion="0")

    def failing() -> Iterator[Any]:
        raise RuntimeError("the task fails")
        yield

    with pytest.raises(RuntimeError, match="the task fails"):
        target.save([first, failing()])
    assert stored(out, f"{out}.rows") == {b"0 0": 1}
    target.save([first, second])
    assert stored(out, f"{out}.rows") == {b"0 0": 1, b"0 1": 1}


def test_a_version_that_follows_an_incomplete_one_is_logged(
    make_stream: Any, sink: Any, stored: Any, caplog: pytest.LogCaptureFixture
) -> None:
    out = make_stream()
    _save(sink, out, 0)
    _save(sink, out, 1)
    assert not caplog.text

    def failing() -> Iterator[Any]:
        raise RuntimeError("the task fails")
        yield

    with pytest.raises(RuntimeError, match="the task fails"):
        sink(out, "transactional", sinkPartitions="2", txnAppId="app", txnVersion="2").save(
            [_rows(out, 2)[0], failing()]
        )
    for version in (3, 2):
        _save(sink, out, version)
    assert caplog.text.count("version 3 of 'app' begins, but version 2 was never completed") == 1
    assert stored(out, f"{out}.rows") == {
        b"%d %d" % (version, part): 1 for version in range(4) for part in range(2 if version != 2 else 1)
    }


def test_a_complete_version_with_other_rows_stores_nothing(make_stream: Any, sink: Any, stored: Any) -> None:
    out = make_stream()
    _save(sink, out, 3)
    target = sink(out, "transactional", sinkPartitions="2", txnAppId="app", txnVersion="3")
    target.save(_rows(out, 4))
    target.save([])
    assert stored(out, f"{out}.rows") == {b"3 0": 1, b"3 1": 1}


def test_a_version_without_rows_is_complete(make_stream: Any, sink: Any, stored: Any) -> None:
    out = make_stream()
    sink(out, "transactional", sinkPartitions="2", txnAppId="app", txnVersion="5").save([])
    _save(sink, out, 5)
    assert not stored(out, f"{out}.rows")
    _save(sink, out, 6)
    assert sum(stored(out, f"{out}.rows").values()) == 2


def test_a_later_version_ends_the_tasks_of_an_earlier_one(make_stream: Any, sink: Any, stored: Any) -> None:
    out = make_stream()

    def overtaken() -> Iterator[Any]:
        yield from _rows(out, 0)[0]
        _save(sink, out, 1)

    sink(out, "transactional", sinkPartitions="1", txnAppId="app", txnVersion="0").save([overtaken()])
    assert stored(out, f"{out}.rows") == {b"1 0": 1, b"1 1": 1}


def test_dedupe_takes_its_ids_from_the_version(make_stream: Any, sink: Any, stored: Any) -> None:
    out = make_stream()
    for version in (0, 1, 1):
        sink(out, txnAppId="app", txnVersion=f"{version}").save([[{"subject": f"{out}.rows", "data": b"row"}]])
    assert stored(out, f"{out}.rows") == {b"row": 2}
