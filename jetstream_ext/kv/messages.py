"""A stored message as a bucket's clients write and read it: operations, markers, times to live (ADR-8, 43 and 48)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from nats.js.api import Header
from nats.js.kv import KV_DEL, KV_OP, KV_PURGE, MSG_ROLLUP_SUBJECT

from jetstream_ext.kv.records import Record
from jetstream_ext.kv.values import KeyValueEntry, Operation
from jetstream_ext.ttl import marker_reason

TTL: Final = Header.MSG_TTL.value
ROLLUP: Final = Header.ROLLUP.value
_EXPECTED: Final = Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value
_EXPECTED_OF: Final = f"{_EXPECTED}-Subject"

PURGE_HEADERS: Final = {KV_OP: KV_PURGE, ROLLUP: MSG_ROLLUP_SUBJECT}
DELETE_HEADERS: Final = {KV_OP: KV_DEL}
ROLLUP_HEADERS: Final = {ROLLUP: MSG_ROLLUP_SUBJECT}

_OPERATIONS: Final[dict[str, Operation]] = {KV_DEL: "DEL", KV_PURGE: "PURGE"}
# nats-py reads markers so; a reason that is not known yet says no less that the key is gone.
_REASONS: Final[dict[str, Operation]] = {"MaxAge": "PURGE", "Purge": "PURGE", "Remove": "DEL"}

_GO_DURATION: Final = re.compile(r"(\d+(?:\.\d*)?)(ns|us|µs|ms|h|m|s)")
_SECONDS: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


@dataclass(frozen=True, slots=True)
class Subjects:
    """How a bucket's subjects and the keys of one read go together."""

    bucket: str
    prefix: str
    """What comes before the key: ``$KV.<bucket>.``."""
    wanted: Callable[[str], bool]
    """Whether a key is asked for."""


def operation(headers: Mapping[str, str]) -> tuple[Operation, str | None]:
    """Return what a message with these headers does to its key, and the reason on a server's marker."""
    known = _OPERATIONS.get(headers.get(KV_OP, ""))
    if known is not None:
        return known, None
    reason = marker_reason(headers)
    return ("PUT", None) if reason is None else (_REASONS.get(reason, "PURGE"), reason)


def entry_of(bucket: str, key: str, record: Record) -> KeyValueEntry:
    """Return a stored message as the entry it is."""
    if not record.headers:
        return KeyValueEntry(bucket, key, record.data, record.seq, record.time)
    op, reason = operation(record.headers)
    return KeyValueEntry(bucket, key, record.data, record.seq, record.time, op, reason)


def ttl_of(headers: Mapping[str, str]) -> timedelta | None:
    """Return the time to live in a message's headers as servers read it, in whole seconds; None: it has none."""
    text = headers.get(TTL, "").strip()
    if text.isdigit():
        seconds = float(text)
    else:
        parts = _GO_DURATION.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            return None
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    try:
        return timedelta(seconds=int(seconds))
    except OverflowError:
        return None


def lives_forever(headers: Mapping[str, str]) -> bool:
    """Return whether the bucket's maximum age does not count for a message."""
    return headers.get(TTL, "").strip().lower() == "never"


def follows(headers: Mapping[str, str], subject: str) -> int | None:
    """Return the revision of the same key that a message replaced (0: there was none); None: it does not say.

    Servers store a message with an expectation only if it held.
    """
    if ROLLUP in headers:
        return None
    expected = headers.get(_EXPECTED, "")
    if not expected.isdigit() or headers.get(_EXPECTED_OF, subject) != subject:
        return None
    return int(expected)


def replaced_all(headers: Mapping[str, str]) -> bool:
    """Return whether storing a message removed every older one of its key."""
    return ROLLUP in headers or marker_reason(headers) is not None


def shows_expiry(headers: Mapping[str, str]) -> bool:
    """Return whether a message tells that values of this bucket have times to live of their own."""
    if marker_reason(headers) is not None:
        return True
    return TTL in headers and KV_OP not in headers and not lives_forever(headers)
