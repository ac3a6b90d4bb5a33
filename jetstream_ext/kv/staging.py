"""The reads and writes of a transaction, and the messages that commit them. No I/O.

A transaction stores one message per key: the server stores a batch completely or not at all, so no reader could see
what came before the last operation on a key, and it refuses the second of two rollups of a subject in a batch.

The commit depends on every key that the transaction read. The message of a key expects the revision that was read. A
key that is only read has no message, so another message carries its expectation: an event, the message of a key that
expects nothing itself, or else a *carrier*, a message without payload on a subject of the bucket's stream that only
transactions use (`options.reads_subject`). If the stream does not store that subject, the first message expects that the
whole bucket has not changed (the *fence*).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from jetstream_ext.errors import BadHeaderError, BadSubjectError, KeyConflictError, MaxPayloadError
from jetstream_ext.kv.entries import DELETE_HEADERS, PURGE_HEADERS, ROLLUP_HEADERS, KeyValueEntry, Operation, check_key
from jetstream_ext.protocol.headers import encode, is_instruction
from jetstream_ext.protocol.options import check_sequence, message_headers, payload_bytes, ttl_value
from jetstream_ext.protocol.subjects import check_subject
from jetstream_ext.types import NEVER, TTL, BatchMessage


@dataclass(frozen=True, slots=True)
class Staged:
    """The operation on a key that will be committed."""

    operation: Operation
    value: bytes = b""
    ttl: TTL | None = None
    expected: int | None = None  # the revision that the key must be at (0: the key never existed); None: any
    creates: bool = False  # if the key is not at `expected`, it may instead be at a delete marker

    def message(self, subject: str, expected: int | None = None, of: str | None = None) -> BatchMessage:
        """Return the message that stores it, with its own expectation or that about the subject `of`."""
        return BatchMessage(
            subject,
            self.value,
            headers=self._headers,
            msg_ttl=self.ttl,
            expected_last_subject_seq=self.expected if self.expected is not None else expected,
            expected_last_subject=of,
        )

    @property
    def _headers(self) -> dict[str, str] | None:
        if self.operation != "PUT":
            return DELETE_HEADERS if self.operation == "DEL" else PURGE_HEADERS
        if self.ttl is None or self.ttl is NEVER or self.expected == 0:
            return None
        return ROLLUP_HEADERS  # when a value expires, the server exposes the revision before it, so there must be none


class Staging:
    """The reads and writes of one transaction; `prefix` comes before the key in a subject, `bucket` is for errors."""

    def __init__(self, prefix: str, *, bucket: str, max_payload: int) -> None:
        self._prefix = prefix
        self._bucket = bucket
        self._max_payload = max_payload
        self.reads: dict[str, KeyValueEntry | None] = {}
        """What was read, delete markers included; None: the key had no message."""
        self.writes: dict[str, Staged] = {}
        self.events: list[BatchMessage] = []

    @property
    def is_one_message(self) -> bool:
        """Whether one message commits everything, so that it needs no batch."""
        return len(self.writes) == 1 and not self.events and not self.only_read

    def read(self, key: str, entry: KeyValueEntry | None) -> None:
        """Take what was read from the bucket; only the first read of a key counts."""
        self.reads.setdefault(key, entry)

    def create(self, key: str, value: bytes, ttl: TTL | None = None) -> None:
        """Stage a value for a key that must not exist; raise KeyConflictError if the transaction knows that it does."""
        staged, found = self.writes.get(key), self.reads.get(key)
        known = staged or found
        if known is not None and known.operation == "PUT":
            why = _exists(found.revision) if found and not staged else "this transaction already writes it"
            raise self._conflict(f"key {key!r} cannot be created, because {why}", (key,))
        self.write("PUT", key, value, ttl, creates=True)

    def write(
        self,
        operation: Operation,
        key: str,
        value: bytes = b"",
        ttl: TTL | None = None,
        *,
        last: int | None = None,
        creates: bool = False,
    ) -> None:
        """Stage an operation on a key that must be at revision `last` (None: any); see `Transaction.update`."""
        check_key(key)
        value = payload_bytes(value, "the value of key", key)
        if len(value) > self._max_payload:
            raise MaxPayloadError(
                f"bucket {self._bucket!r}: the value of key {key!r} has {len(value)} bytes, more than the server's "
                f"max_payload of {self._max_payload}"
            )
        if ttl is not None:
            ttl_value(ttl)
        if last is not None:
            check_sequence(last, "last", low=0)
        expected = 0 if creates else last
        earlier = self.writes.get(key)
        if earlier is not None:
            if last is not None:
                raise ValueError(
                    f"bucket {self._bucket!r}: key {key!r} was already written in this transaction, so it has no revision "
                    "to compare with"
                )
            expected, creates = earlier.expected, earlier.creates
        elif key in self.reads:
            expected, creates = _revision_of(self.reads[key]), False
            if last is not None and last != expected:
                raise self._conflict(_moved(key, expected, last), (key,))
        self.writes[key] = Staged(operation, value, ttl, expected, creates)

    def publish(self, subject: str, payload: bytes, headers: Mapping[str, str] | None) -> str:
        """Stage an event; see `Transaction.publish`."""
        check_subject(subject)
        if subject.startswith(("$", "_")):
            raise BadSubjectError(
                f"bucket {self._bucket!r}: the subject of an event cannot begin with '$' or '_': {subject!r}"
            )
        for name in headers or ():
            if is_instruction(name):
                raise BadHeaderError(
                    f"bucket {self._bucket!r}: an event cannot have the header {name!r}: servers would obey it"
                )
        whole = f"{subject}.{time.time_ns():016x}{secrets.token_hex(5)}"
        event = BatchMessage(whole, payload_bytes(payload, "the payload on subject", subject), headers=headers)
        size = len(encode(message_headers(event))) + len(event.payload)
        if size > self._max_payload:
            raise MaxPayloadError(
                f"bucket {self._bucket!r}: the event on {subject!r} has {size} bytes with its headers, more than the server's "
                f"max_payload of {self._max_payload}"
            )
        self.events.append(event)
        return whole

    @property
    def oldest_read(self) -> KeyValueEntry | None:
        """The oldest entry that was read, delete markers included; it shows which bucket was read.

        Concurrent reads have no order, but a bucket that was created again has only newer messages.
        """
        found = [entry for entry in self.reads.values() if entry is not None]
        return min(found, key=lambda entry: entry.created, default=None)

    @property
    def only_read(self) -> list[str]:
        """The keys that were read and are not written."""
        return [key for key in self.reads if key not in self.writes]

    @property
    def needs_carriers(self) -> bool:
        """Whether there are more such keys than other messages that could carry their expectations."""
        free = sum(staged.expected is None for staged in self.writes.values()) + len(self.events)
        return len(self.only_read) > free

    @property
    def expectations(self) -> dict[str, int]:
        """The revision that each key must be at."""
        own = {key: staged.expected for key, staged in self.writes.items() if staged.expected is not None}
        return own | {key: _revision_of(self.reads[key]) for key in self.only_read}

    def messages(self, *, fence: int | None = None, carrier: str = "") -> list[BatchMessage]:
        """Return the messages: events, carriers, and one per key in the order of the keys' first writes.

        If it `needs_carriers`, they have the subject `carrier`; or `fence` is the bucket's revision at which all reads were
        valid.
        """
        only_read = [] if fence is not None else self.only_read

        def carried() -> tuple[int | None, str | None]:
            """Return an expectation that a message is to carry."""
            if not only_read:
                return None, None
            key = only_read.pop()
            return _revision_of(self.reads[key]), self._prefix + key

        messages: list[BatchMessage] = []
        for event in self.events:
            expected, of = carried()
            messages.append(replace(event, expected_last_subject_seq=expected, expected_last_subject=of))
        for key, staged in self.writes.items():
            expected, of = carried() if staged.expected is None else (None, None)
            messages.append(staged.message(self._prefix + key, expected, of))
        keys = len(self.events)
        while only_read:
            expected, of = carried()
            message = BatchMessage(carrier, expected_last_subject_seq=expected, expected_last_subject=of)
            messages.insert(keys, message)
        messages[0] = replace(messages[0], expected_last_seq=fence)
        return messages

    def refused(self, now: Mapping[str, KeyValueEntry | None], *, fenced: bool) -> KeyConflictError | None:
        """Return the conflict, after the server refused an expectation; `now` has the keys with expectations.

        None: the only conflicts were delete markers of keys to be created. They are expected from now on.
        """
        wrong: dict[str, str] = {}
        found_markers = False
        for key, expected in self.expectations.items():
            staged, entry = self.writes.get(key), now[key]
            revision = _revision_of(entry)
            if revision == expected:
                continue
            if staged is None or not staged.creates:
                wrong[key] = _moved(key, revision, expected)
            elif entry is not None and entry.operation == "PUT":
                wrong[key] = f"key {key!r} cannot be created, because {_exists(revision)}"
            else:
                self.writes[key] = replace(staged, expected=revision)
                found_markers = True
        if wrong:
            return self._changed(wrong, stale_read=not self.reads.keys().isdisjoint(wrong))
        if found_markers:
            return None
        why = "the server reported a conflict, but every key is at its expected revision now"
        if fenced:
            why = "another client wrote to the bucket"
        return self._conflict(f"{why}; run the transaction again", (), stale_read=True)

    def moved(self, now: Mapping[str, KeyValueEntry | None]) -> KeyConflictError | None:
        """Return the conflict if a key that was read has changed."""
        wrong: dict[str, str] = {}
        for key, entry in self.reads.items():
            newest = now[key]
            if _revision_of(newest) != _revision_of(entry):
                wrong[key] = _moved(key, _revision_of(newest), _revision_of(entry))
            elif newest is not None and entry is not None and newest.created != entry.created:
                wrong[key] = f"key {key!r} has another message at revision {entry.revision} than the one that was read"
        return self._changed(wrong, stale_read=True) if wrong else None

    def _changed(self, wrong: Mapping[str, str], *, stale_read: bool) -> KeyConflictError:
        return self._conflict(", ".join([*wrong.values()][:5]), wrong, stale_read=stale_read)

    def _conflict(self, message: str, keys: Iterable[str], *, stale_read: bool = False) -> KeyConflictError:
        return KeyConflictError(
            f"bucket {self._bucket!r}: nothing was written; {message}",
            keys=tuple(keys),
            stale_read=stale_read,
            description="wrong last sequence",
        )


def _revision_of(entry: KeyValueEntry | None) -> int:
    return 0 if entry is None else entry.revision


def _moved(key: str, revision: int, expected: int) -> str:
    return f"key {key!r} is at revision {revision}, not {expected}"


def _exists(revision: int) -> str:
    return f"it exists (at revision {revision})"
