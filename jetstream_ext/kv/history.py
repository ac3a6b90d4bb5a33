"""What a bucket held at a revision, from the messages that are still stored. No I/O.

A key at revision R is its newest message up to R. Servers remove the oldest messages of a key first, so if a message up to R
is stored, the newest of them is the answer. If none is stored, the key did not exist, unless something was removed that may
have been a message of the key. `Past.judge` decides that; its reasons are the table of docs/key-value.md.

What a limit removes leaves no trace, and a server does not tell since when its limits hold. So `enable` writes a record into
the metadata of the bucket's stream: the limits, and a time since which nothing else has removed messages. A record whose
limits are not those of the stream is void, because another program has changed them since.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import orjson

from jetstream_ext.kv.entries import ROLLUP, Subjects, never_expires, operation, records_of
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.api import parse_time as parse_json_time
from jetstream_ext.protocol.direct import Block, StoredMsg
from jetstream_ext.protocol.headers import (
    EXPECTED_LAST_SUBJECT,
    EXPECTED_LAST_SUBJECT_SEQ,
    MSG_TTL,
    decode_stored,
    parse_time,
)
from jetstream_ext.protocol.loss import Gaps
from jetstream_ext.protocol.numbers import parse_number
from jetstream_ext.protocol.updates import Record
from jetstream_ext.ttl import marker_reason

RECORD: Final = "jetstream_ext.limits"
"""The name of the record in the metadata."""

_LIMITS: Final = (
    "discard",
    "max_age",
    "max_bytes",
    "max_msgs",
    "max_msgs_per_subject",
    "retention",
    "subject_delete_marker_ttl",
)


def with_record(config: Mapping[str, Any], since: datetime) -> dict[str, Any]:
    """Return a configuration with the record that its limits hold since a time."""
    record = orjson.dumps({"since": since.isoformat(), "limits": limits_of(config)}).decode()
    return {**config, "metadata": {**(config.get("metadata") or {}), RECORD: record}}


def known_since(state: StreamState) -> datetime | None:
    """Return the time since which only the limits of a stream have removed messages that it had then; None: unknown."""
    try:
        record = orjson.loads(state.config["metadata"][RECORD])
        since = parse_json_time(record["since"])
        return since if record["limits"] == limits_of(state.config) else None
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return None


def limits_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits in a configuration that are set."""
    return {name: value for name in _LIMITS if (value := config.get(name)) not in (None, 0, -1)}


def drops_oldest(state: StreamState) -> bool:
    """Whether a stream makes room for new messages by removing its oldest ones, whatever their subjects."""
    sizes = ("max_bytes", "max_msgs")
    return str(state.config.get("discard") or "old") == "old" and any(name in limits_of(state.config) for name in sizes)


class Reason(enum.StrEnum):
    """Why a read of the past is refused; docs/key-value.md has a row for each."""

    LIMITS = "it is not recorded that the bucket had its limits then"
    DROPPED = "max_msgs or max_bytes may have removed the oldest messages"
    EXPIRED = "messages may have expired"
    ROLLED_UP = "a later message replaced the whole bucket"
    PURGED = "messages are missing that no history accounts for"
    REPLACED = "newer messages may have replaced it"
    NO_MESSAGE = "no message of it is stored, and messages were removed"


@dataclass(frozen=True, slots=True)
class ResolvedRevision:
    """What the `at` of a caller means."""

    revision: int
    time: datetime
    since: datetime  # a time at which it was the newest revision, or an earlier one
    state: StreamState  # of the bucket, when the leader was asked

    @property
    def is_newest(self) -> bool:
        """Whether it was the newest revision when the leader was asked: later messages may have been removed since a time."""
        return self.revision == self.state.last_seq and self.since >= self.state.last_time


@dataclass(frozen=True, slots=True)
class PastContent:
    """What is known about a revision."""

    records: dict[str, Record]  # with delete markers
    unavailable: dict[str, Reason]
    reason: Reason | None = None  # why there may have been other keys, if that is possible
    complete: bool = True  # certainly no other key existed


@dataclass(slots=True)
class _Subject:
    key: str | None  # None: the read does not want it, or it is no key
    oldest: int
    replaced: int | None  # the highest sequence that the oldest message can have replaced, if its headers say so
    accounts: bool  # newer messages have replaced older ones
    count: int = 0
    record: Record | None = None  # the newest up to the revision


class Past:
    """The messages of a bucket, as far as they decide what it held at one revision.

    It is fed the whole log, with what is missing in it as `gaps`; or without `gaps` some subjects, or what was stored later.
    """

    def __init__(self, subjects: Subjects, point: ResolvedRevision, gaps: Gaps | None = None) -> None:
        self._key_of = subjects.key_of
        self._prefix = subjects.prefix
        self._point = point
        self._gaps = gaps
        self._subjects: dict[str, _Subject] = {}
        self._rolled_up = 0  # the newest message that replaced its subject's history
        self._all_rolled_up = False
        self.expires: bool = False
        """Whether a message showed that messages of the bucket have TTLs of their own."""
        self._last: Record | None = None  # the newest up to the revision, of any subject

    def feed(self, found: Block | Sequence[StoredMsg]) -> None:
        """Take messages, in the order of the log for each subject."""
        subjects, revision = self._subjects, self._point.revision
        for name, record in records_of(found):
            seq, _, _, stored = record
            headers = decode_stored(stored) if stored else None
            if headers:
                self._note(seq, headers)
            if (subject := subjects.get(name)) is None:
                if (key := self._key_of(name)) is None and self._gaps is None:
                    continue
                replaced = None if headers is None else _replaced(seq, name, headers)
                # An event has a subject of its own, and replaces nothing.
                accounts = name.startswith((self._prefix, "_"))
                subject = subjects[name] = _Subject(key, seq, replaced, accounts)
            subject.count += 1
            if seq <= revision:
                self._last = record if self._last is None else max(self._last, record)
                if subject.key is not None:
                    subject.record = record

    def _note(self, seq: int, headers: Mapping[str, str]) -> None:
        if _rolls_up(headers):
            self._rolled_up = max(self._rolled_up, seq)
            self._all_rolled_up |= seq > self._point.revision and headers.get(ROLLUP, "").strip().lower() == "all"
        self.expires |= shows_expiry(headers)

    def judge(
        self,
        end: StreamState,
        *,
        history: int | None = None,
        named: Collection[str] = (),
        wild: bool = True,
    ) -> PastContent:
        """Return what is known, after everything that was stored when the bucket had the state `end`.

        Args:
            end: The state after the last message.
            history: How many messages the bucket kept of a key at least; None: as many as now.
            named: The keys that the caller named.
            wild: The caller gave patterns as well, so that keys may match that nothing names.
        """
        keys = {subject.key: subject for subject in self._subjects.values() if subject.key is not None}
        records = {key: subject.record for key, subject in keys.items() if subject.record is not None}
        if end.never_removed or (self._gaps is not None and not 0 < self._gaps.lowest <= self._point.revision):
            return PastContent(records, {})
        history, reason = history or end.max_msgs_per_subject, self._why_vanished(end)
        unavailable = {
            key: Reason.REPLACED
            for key, subject in keys.items()
            if subject.record is None
            and (subject.count >= history if subject.replaced is None else subject.replaced > 0)
        }
        for key in named:
            if key not in keys:
                unavailable[key] = reason or Reason.NO_MESSAGE
            elif reason is not None and (key not in records or deletes(records[key])):
                records.pop(key, None)
                unavailable.setdefault(key, reason)
        return PastContent(records, unavailable, reason if wild else None, complete=not wild)

    def _why_vanished(self, end: StreamState) -> Reason | None:
        """Return why a key may have existed at the revision and left no message, or None."""
        point, known, then = self._point, known_since(end), self._point.since
        if self._last is not None:
            then = max(then, parse_time(self._last[2]))
        same_limits = point.is_newest and limits_of(end.config) == limits_of(point.state.config)
        if not same_limits and (known is None or then < known):
            return Reason.LIMITS
        if drops_oldest(end):
            return Reason.DROPPED
        oldest = min(known or end.created_at, end.created_at)
        if self.expires or end.marker_ttl is not None or (end.max_age and oldest + end.max_age < end.now):
            return Reason.EXPIRED
        if self._all_rolled_up:
            return Reason.ROLLED_UP
        if self._gaps is not None and self._gaps.highest > self._accounted(end.max_msgs_per_subject):
            return Reason.PURGED
        return None

    def _accounted(self, history: int) -> int:
        """Return the sequence up to which newer messages of their subjects may have replaced what is missing."""
        full = (subject for subject in self._subjects.values() if subject.accounts and subject.count >= history)
        replaced = (subject.oldest if subject.replaced is None else subject.replaced for subject in full)
        return max(self._rolled_up, max(replaced, default=0))


def deletes(record: Record) -> bool:
    """Whether a message is a delete marker."""
    return bool(record[3]) and operation(decode_stored(record[3]))[0] != "PUT"


def _rolls_up(headers: Mapping[str, str]) -> bool:
    """Whether storing a message removed every older one of its subject."""
    return bool(headers.get(ROLLUP, "").strip()) or marker_reason(headers) is not None


def _replaced(seq: int, name: str, headers: Mapping[str, str]) -> int | None:
    """Return the highest sequence that a message can have replaced (0: none), or None if its headers do not say so.

    Servers store a message with an expectation only if the expectation held.
    """
    if _rolls_up(headers):
        return seq - 1
    expected = headers.get(EXPECTED_LAST_SUBJECT, name)
    if expected != name or "\ufffd" in expected:  # another subject, or one that is not known exactly
        return None
    return parse_number(headers.get(EXPECTED_LAST_SUBJECT_SEQ, ""))


def shows_expiry(headers: Mapping[str, str]) -> bool:
    """Whether a message shows that messages of its bucket have TTLs of their own."""
    return marker_reason(headers) is not None or (MSG_TTL in headers and not never_expires(headers))
