"""Counts of digests, compared with a dict."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetstream_ext.spark import digests
from jetstream_ext.spark.digests import DigestCounts

# Few digests, so that they repeat; the bytes end in zeros, which numpy must not take for padding.
DIGESTS = [bytes([number, 0, 0]) for number in range(20)]
STEPS = st.lists(st.tuples(st.booleans(), st.lists(st.sampled_from(DIGESTS), max_size=12)), max_size=20)


@pytest.fixture(autouse=True)
def _several_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_SMALL", 0)


@given(STEPS)
def test_digests_are_counted(steps: list[tuple[bool, list[bytes]]]) -> None:
    counts, model = DigestCounts(), Counter[bytes]()
    for add, some in steps:
        given = np.array(some, "S3")
        expected = []
        for one in some:
            expected.append(model[one] if add else model[one] > 0)
            model[one] += 1 if add else -(model[one] > 0)
        assert (counts.add(given) if add else counts.take(given)).tolist() == expected


def test_many_digests_take_little_memory_and_few_arrays() -> None:
    counts = DigestCounts()
    for chunk in range(1000):
        counts.add(np.arange(chunk * 100, chunk * 100 + 100, dtype=np.uint64))
    levels = counts._levels
    assert sum(digests.nbytes + counted.nbytes for digests, counted in levels) == 100_000 * 12
    assert len(levels) <= 11
