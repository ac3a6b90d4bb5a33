"""What a transaction is going to do, and the messages that do it. No I/O.

One message per key: the server takes a batch at once or not at all, so nobody could see what came before the last
operation on a key, and of two roll-ups of one subject in a batch it refuses the second.

What a transaction has read it depends on. A key that it also writes is guarded by its own message, which expects the
revision that was read. A key that it only reads is guarded by a message of another key, which may carry one such
expectation on behalf of another subject, if it has none of its own. Where there are not enough messages without one,
the first message expects that the whole bucket has not moved on (the *fence*).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from jetstream_ext.errors import KeyConflictError, MaxPayloadError
from jetstream_ext.kv.entries import DELETE_HEADERS, PURGE_HEADERS, ROLLUP_HEADERS, KeyValueEntry, Operation
from jetstream_ext.kv.keys import check_key
from jetstream_ext.protocol.options import payload_bytes, ttl_value
from jetstream_ext.types import NEVER, TTL, BatchMessage


@dataclass(frozen=True, slots=True)
class Staged:
    """What will become of a key."""

    operation: Operation
    value: bytes = b""
    ttl: TTL | None = None
    expected: int | None = None
    """The revision that the key must be at (0: it has never been there); None: any."""
    unless_there: bool = False
    """`expected` is a guess: a deletion that has left a marker will do as well."""


class Staging:
    """The reads and writes of one transaction.

    Args:
        prefix: What comes before the key in a subject.
        max_payload: The server's limit for a message in bytes.
    """

    def __init__(self, prefix: str, *, max_payload: int) -> None:
        self._prefix = prefix
        self._max_payload = max_payload
        self.reads: dict[str, KeyValueEntry | None] = {}
        """What was read, markers included; None: there was nothing."""
        self.writes: dict[str, Staged] = {}

    # -- what the caller does -----------------------------------------------------------------------------------

    def read(self, key: str, entry: KeyValueEntry | None) -> None:
        """Take what was read from the bucket; the first time counts."""
        self.reads.setdefault(key, entry)

    def put(self, key: str, value: bytes, ttl: TTL | None) -> None:
        """Stage a value."""
        self._write(key, "PUT", value, ttl)

    def create(self, key: str, value: bytes, ttl: TTL | None) -> None:
        """Stage a value of a key that must not exist.

        Raises:
            KeyConflictError: It does, as the transaction knows already.
        """
        staged = self.writes.get(key)
        if staged is not None:
            exists = staged.operation == "PUT"
        else:
            entry = self.reads.get(key)
            exists = entry is not None and entry.operation == "PUT"
        if exists:
            raise _conflict(f"key {key!r} cannot be created: it exists", (key,))
        self._write(key, "PUT", value, ttl, expected=0, unless_there=True)

    def update(self, key: str, value: bytes, last: int, ttl: TTL | None) -> None:
        """Stage a value of a key that must be at revision `last`.

        Raises:
            KeyConflictError: It is not, as the transaction knows already.
            ValueError: The transaction itself has written it before, so it is at no revision yet.
        """
        self._write(key, "PUT", value, ttl, expected=_revision(last))

    def delete(self, key: str, last: int | None) -> None:
        """Stage a delete marker, which leaves the key's history."""
        self._write(key, "DEL", b"", None, expected=None if last is None else _revision(last))

    def purge(self, key: str, last: int | None, ttl: TTL | None) -> None:
        """Stage a purge marker, which removes the key's history."""
        self._write(key, "PURGE", b"", ttl, expected=None if last is None else _revision(last))

    def _write(
        self,
        key: str,
        operation: Operation,
        value: bytes,
        ttl: TTL | None,
        *,
        expected: int | None = None,
        unless_there: bool = False,
    ) -> None:
        check_key(key)
        value = payload_bytes(value)
        if len(value) > self._max_payload:
            raise MaxPayloadError(f"key {key!r}: {len(value)} bytes are over the server's limit of {self._max_payload}")
        if ttl is not None:
            ttl_value(ttl)
        staged = self.writes.get(key)
        if staged is not None:
            if expected is not None and not unless_there:
                raise ValueError(f"key {key!r} was written in this transaction: it is at no revision yet")
            expected, unless_there = staged.expected, staged.unless_there
        elif key in self.reads:
            known = revision_of(self.reads[key])
            if expected is not None and not unless_there and expected != known:
                raise _conflict(f"key {key!r} is at revision {known}, not {expected}", (key,))
            expected, unless_there = known, False
        self.writes[key] = Staged(operation, value, ttl, expected, unless_there)

    # -- what is to be sent -------------------------------------------------------------------------------------

    @property
    def only_read(self) -> list[str]:
        """Keys that were read and are not written."""
        return [key for key in self.reads if key not in self.writes]

    @property
    def needs_fence(self) -> bool:
        """Whether there are more of them than messages that could guard them."""
        return len(self.only_read) > sum(staged.expected is None for staged in self.writes.values())

    @property
    def expectations(self) -> dict[str, int]:
        """The revision that each key must be at."""
        own = {key: staged.expected for key, staged in self.writes.items() if staged.expected is not None}
        return own | {key: revision_of(self.reads[key]) for key in self.only_read}

    def messages(self, *, fence: int | None = None, msg_id: str | None = None) -> list[BatchMessage]:
        """Return the messages, one per key, in the order of the keys' first writes.

        Args:
            fence: The bucket's revision at which all reads were valid, if `needs_fence`.
            msg_id: An id for the duplicate window.
        """
        guards = [] if self.needs_fence else self.only_read
        assert (fence is not None) == self.needs_fence
        messages: list[BatchMessage] = []
        for key, staged in self.writes.items():
            subject = self._prefix + key
            expected, of = staged.expected, None
            if expected is None and guards:
                guarded = guards.pop()
                expected, of = revision_of(self.reads[guarded]), self._prefix + guarded
            messages.append(
                BatchMessage(
                    subject,
                    staged.value,
                    headers=_headers(staged),
                    msg_ttl=staged.ttl,
                    expected_last_subject_seq=expected,
                    expected_last_subject=of,
                )
            )
        if messages:
            messages[0] = replace(messages[0], expected_last_seq=fence, msg_id=msg_id)
        return messages

    # -- what came of it ----------------------------------------------------------------------------------------

    def refused(self, now: Mapping[str, KeyValueEntry | None]) -> KeyConflictError | None:
        """Take what the keys with expectations are now, after the server said that one of them did not hold.

        Returns:
            The conflict; None: there was none but a marker of a deleted key that was to be created, which is expected
            from now on.
        """
        wrong: list[str] = []
        words: list[str] = []
        mended = False
        for key, expected in self.expectations.items():
            revision = revision_of(now[key])
            if revision == expected:
                continue
            staged, entry = self.writes.get(key), now[key]
            if staged is not None and staged.unless_there and (entry is None or entry.operation != "PUT"):
                self.writes[key] = replace(staged, expected=revision)
                mended = True
                continue
            wrong.append(key)
            if staged is not None and staged.unless_there:
                words.append(f"key {key!r} cannot be created: it exists, at revision {revision}")
            else:
                words.append(f"key {key!r} is at revision {revision}, not {expected}")
        if mended and not wrong:
            return None
        stale = not wrong or not self.reads.keys().isdisjoint(wrong)
        if not wrong:
            words.append(
                "the bucket was written to by others" if self.needs_fence else "a key was in conflict, and is not now"
            )
        return _conflict("; ".join(words[:5]), wrong, stale_read=stale)

    def moved(self, now: Mapping[str, KeyValueEntry | None]) -> KeyConflictError | None:
        """Return the conflict, if a key that was read is now something else."""
        wrong = [key for key, entry in self.reads.items() if revision_of(now[key]) != revision_of(entry)]
        words = [
            f"key {key!r} is at revision {revision_of(now[key])}, not {revision_of(self.reads[key])}" for key in wrong
        ]
        return _conflict("; ".join(words[:5]), wrong, stale_read=True) if wrong else None


def revision_of(entry: KeyValueEntry | None) -> int:
    """Return the revision that a server compares an expectation with."""
    return 0 if entry is None else entry.revision


def _headers(staged: Staged) -> dict[str, str] | None:
    if staged.operation == "DEL":
        return dict(DELETE_HEADERS)
    if staged.operation == "PURGE":
        return dict(PURGE_HEADERS)
    if staged.ttl is None or staged.ttl is NEVER or staged.expected == 0:
        return None
    # When a value expires, the server brings the revision before it back; so there must be none.
    return dict(ROLLUP_HEADERS)


def _revision(last: int) -> int:
    if isinstance(last, bool) or not isinstance(last, int):
        raise TypeError(f"last must be a revision, not {type(last).__name__}")
    if not 0 <= last < 1 << 64:
        raise ValueError(f"last must be a revision from 0 up, not {last}")
    return last


def _conflict(message: str, keys: Iterable[str], *, stale_read: bool = False) -> KeyConflictError:
    return KeyConflictError(
        message,
        keys=tuple(keys),
        stale_read=stale_read,
        code=400,
        err_code=10071,
        description="wrong last sequence",
        outcome="not_stored",
    )
