"""What the `jetstream_kv` sink keeps of a partition, and the subjects that its options can name; no server is needed."""

from __future__ import annotations

from collections.abc import Iterator
from tempfile import SpooledTemporaryFile

import pytest

from jetstream_ext.kv.staging import Staged
from jetstream_ext.spark import kv_rows
from jetstream_ext.spark.kv_rows import LastRows
from jetstream_ext.spark.options import KvWriteOptions, OptionError


@pytest.fixture
def last() -> Iterator[LastRows]:
    rows = LastRows(0)
    yield rows
    rows.close()


def test_the_file_of_few_keys_with_many_rows_stays_small(last: LastRows, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[SpooledTemporaryFile[bytes]] = []

    def open_file(max_size: int) -> SpooledTemporaryFile[bytes]:
        written.append(SpooledTemporaryFile(max_size=max_size))  # noqa: SIM115
        return written[-1]

    monkeypatch.setattr(kv_rows, "_MEMORY", 10_000)
    monkeypatch.setattr(kv_rows, "SpooledTemporaryFile", open_file)
    for row in range(3000):
        last.add(f"k.{row % 7}", b"%d" % row * 50, Staged("PUT"), row)
        if written:
            assert written[-1].tell() <= 10_200
    assert written
    assert all(file.closed for file in written[:-1])
    assert [(one.key, one.value, one.row) for one in last] == [
        (f"k.{row % 7}", b"%d" % row * 50, row) for row in range(2993, 3000)
    ]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"markerPrefix": "$KV.B"}, "option 'markerPrefix': below '$KV', the markers would be keys of a bucket"),
        ({"markerPrefix": "$KV"}, "option 'markerPrefix': below '$KV', the markers would be keys of a bucket"),
        ({"onBadRow": "_spark.KV_B.dead"}, "option 'onBadRow': subjects below '_spark.KV_B' are for the markers"),
    ],
)
def test_markers_have_subjects_of_their_own(options: dict[str, str], problem: str) -> None:
    with pytest.raises(OptionError) as raised:
        KvWriteOptions.parse({"servers": "nats://unused:4222", "bucket": "B", **options}, streaming=True)
    assert str(raised.value).startswith(problem)
