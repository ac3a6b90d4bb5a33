"""The transactional sink and the number of partitions: a wrong one is corrected without repeated rows, or is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from nats.js import JetStreamContext

from jetstream_ext.spark.markers import ReplayError

Rows = list[dict[str, Any]]


class Target:
    """A stream, and the rows that are written to it."""

    def __init__(self, name: str, sink: Any, stored: Any) -> None:
        self.name = name
        self.rows: Rows = [{"subject": f"{name}.rows", "data": b"%d" % number} for number in range(9)]
        self._sink, self._stored = sink, stored

    def sink(self, partitions: int, **options: str) -> Any:
        return self._sink(self.name, "transactional", sinkPartitions=f"{partitions}", **options)

    def stored(self) -> Counter[bytes]:
        counts: Counter[bytes] = self._stored(self.name, f"{self.name}.rows")
        return counts

    def once(self, rows: Rows | None = None) -> Counter[bytes]:
        return Counter(row["data"] for row in (self.rows if rows is None else rows))


@pytest.fixture
def target(make_stream: Callable[..., str], sink: Any, stored: Any) -> Target:
    return Target(make_stream(), sink, stored)


def failing(rows: Rows = ()) -> Iterator[dict[str, Any]]:  # type: ignore[assignment]
    yield from rows
    raise RuntimeError("the task fails")


def test_a_number_that_was_too_small_is_corrected(target: Target) -> None:
    rows = target.rows
    parts = [rows[:3], rows[3:6], rows[6:]]
    with pytest.raises(
        ReplayError, match=r"a partition with index 2, but the option sinkPartitions is 2; .* at least 3"
    ):
        target.sink(2).write(parts)
    assert target.stored() == target.once(rows[:6])
    with pytest.raises(ReplayError, match="at least 3 partitions"):
        target.sink(2).write([rows[::2], rows[1::2]], attempt=1)
    assert target.stored() == target.once(rows[:6])
    target.sink(3).write(parts, attempt=2)
    assert target.stored() == target.once()
    with pytest.raises(ReplayError, match="first stored with 3 partitions and now has 4"):
        target.sink(4).write([rows[:1], rows[1:3], rows[3:6], rows[6:]], attempt=3)
    assert target.stored() == target.once()


def test_more_partitions_than_an_earlier_attempt_had_do_not_change_the_number(target: Target) -> None:
    rows = target.rows
    with pytest.raises(RuntimeError, match="the task fails"):
        target.sink(2).write([rows[:4], failing()])
    parts = [rows[6:], rows[:3], rows[3:6]]
    with pytest.raises(ReplayError, match=r"a partition with index 2.* as in an earlier attempt"):
        target.sink(2).write([[], [], rows[3:6]], attempt=1)
    with pytest.raises(ReplayError, match="first stored with 2 partitions and now has 3"):
        target.sink(3).write(parts, attempt=2)
    target.sink(2).write([rows[:4], rows[4:]], attempt=3)
    assert target.stored() == target.once()


def test_a_wrong_number_of_a_later_attempt_is_not_said_to_repeat_no_row(target: Target) -> None:
    rows = target.rows
    wrong = target.sink(4, writeId="w")
    with pytest.raises(RuntimeError, match="the task fails"):
        wrong.save([[], rows[2:4], rows[4:6], failing()])
    with pytest.raises(ReplayError, match=r"the rows had 2 partitions; .* may be stored twice") as caught:
        wrong.save([rows[:4], rows[4:]])
    assert "once" not in str(caught.value)
    before = target.stored()
    target.sink(2, writeId="w").save([rows[:4], rows[4:]])
    assert target.stored() == before


class TestWithoutLayout:
    """The layout is the oldest record of a micro-batch, so limits remove it first."""

    @pytest.fixture
    def interrupted(self, target: Target, with_js: Any) -> Target:
        """A micro-batch of three partitions, of which only the second has a marker, and whose layout was removed."""

        async def remove(js: JetStreamContext) -> None:
            await js.purge_stream(target.name, subject=f"_spark.{target.name}.*._layout")

        with pytest.raises(RuntimeError, match="the task fails"):
            target.sink(3).write([[], target.rows[:6], failing()])
        with_js(remove)
        return target

    def test_another_number_is_refused(self, interrupted: Target) -> None:
        rows = interrupted.rows
        for parts in ([rows[:4], rows[4:]], [rows[:2], rows[2:4], rows[4:6], rows[6:]]):
            with pytest.raises(ReplayError, match="first stored with 3 partitions"):
                interrupted.sink(len(parts)).write(parts, attempt=1)
        assert interrupted.stored() == interrupted.once(rows[:6])

    def test_another_number_is_refused_although_the_layout_has_left_a_delete_marker(
        self, interrupted: Target, with_js: Any
    ) -> None:
        async def expire(js: JetStreamContext) -> None:
            for name in ("_layout", "2"):
                subject = f"_spark.{interrupted.name}.a-query.{name}"
                await js.publish(subject, b"", headers={"Nats-Marker-Reason": "MaxAge"})

        with_js(expire)
        self.test_another_number_is_refused(interrupted)

    def test_the_same_number_is_continued_and_stored_again(self, interrupted: Target, with_js: Any) -> None:
        rows = interrupted.rows
        interrupted.sink(3).write([[], rows[:6], rows[6:]], attempt=1)
        assert interrupted.stored() == interrupted.once()

        async def newest(js: JetStreamContext) -> bytes:
            found = await js.get_last_msg(interrupted.name, f"_spark.{interrupted.name}.a-query._layout")
            return found.data or b""

        assert b'"partitions":3' in with_js(newest)


def test_a_complete_version_with_more_partitions_stores_nothing(target: Target) -> None:
    rows = target.rows
    version = target.sink(2, txnAppId="app", txnVersion="3")
    version.save([rows[:4], rows[4:]])
    version.save([rows[:4], rows[4:6], rows[6:]])
    target.sink(2, txnAppId="app", txnVersion="2").save([rows[:4], rows[4:6], rows[6:]])
    assert target.stored() == target.once()
