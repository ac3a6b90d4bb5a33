"""The versions of a dead letter: the whole one, and smaller ones for a stream that refuses it as too large."""

from collections.abc import Iterator

import nats.js.errors
import pytest

from jetstream_ext import StoredMsg
from jetstream_ext.errors import BadHeaderError, FencedError, MaxPayloadError, MessageTooLargeError
from jetstream_ext.protocol.dead_letters import CUT, ERROR, dead_letter_of, is_too_large, letter_versions


def message(data: bytes, headers: dict[str, str]) -> StoredMsg:
    return StoredMsg(stream="S", subject="s.a", seq=7, data=data, headers=headers, time_ns=1_700_000_000_000_000_000)


def versions(data: bytes, headers: dict[str, str], error: str) -> Iterator[tuple[int, bool, str, int]]:
    """Yield how much data each version has, whether it has the input's headers, what it names, and its error's size."""
    for payload, pairs in letter_versions(message(data, headers), attempts=3, error=error, worker="w"):
        assert data.startswith(payload)
        yield len(payload), "Kept" in pairs, pairs.get(CUT, ""), len(pairs[ERROR].encode())
        found = dead_letter_of(message(payload, dict(pairs)))
        assert found is not None
        assert (found.stream, found.subject, found.seq, found.attempts, found.worker) == ("S", "s.a", 7, 3, "w")
        assert (found.cut, found.complete) == (tuple(pairs[CUT].split(", ")) if CUT in pairs else (), CUT not in pairs)


def test_a_letter_has_smaller_versions() -> None:
    kept, many, long = {"Kept": "1"}, {"Kept": "x" * 65_000}, "x" * 3000
    for data, headers, error, expected in (
        (0, {}, "no", [(0, False, "", 2)]),
        (0, {}, long, [(0, False, "", 1024), (0, False, "", 200)]),
        (0, kept, "no", [(0, True, "", 2), (0, False, "headers", 2)]),
        (10, {}, "no", [(10, False, "", 2), (0, False, "data", 2)]),
        (5000, {}, "no", [(5000, False, "", 2), (4096, False, "data", 2), (0, False, "data", 2)]),
        (
            5000,
            kept,
            long,
            [
                (5000, True, "", 1024),
                (4096, True, "data", 1024),
                (0, True, "data", 1024),
                (0, False, "data, headers", 1024),
                (0, False, "data, headers", 200),
            ],
        ),
        (10, many, "no", [(10, False, "headers", 2), (0, False, "data, headers", 2)]),
    ):
        assert list(versions(bytes(data), headers, error)) == expected, (data, error)


def test_a_letter_of_a_cut_letter_is_complete() -> None:
    [(_, first), *_] = letter_versions(message(b"", {CUT: "data"}), attempts=1, error="no", worker="w")
    found = dead_letter_of(message(b"", dict(first)))
    assert found is not None
    assert (found.cut, found.complete, found.headers) == ((), True, ((CUT, "data"),))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MaxPayloadError("too large"), True),
        (BadHeaderError("too many"), True),
        (MessageTooLargeError(code=400, description="too large"), True),
        (nats.js.errors.BadRequestError(code=400, err_code=10054), True),
        (nats.js.errors.BadRequestError(code=400, err_code=10097), True),
        (nats.js.errors.BadRequestError(code=400, err_code=10071), False),
        (FencedError("moved"), False),
    ],
)
def test_refusals_of_a_size(error: Exception, expected: bool) -> None:
    assert is_too_large(error) is expected
