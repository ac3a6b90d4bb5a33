"""A bucket as a live table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, overload

from nats.js.kv import KeyValue

from jetstream_ext.errors import ConversionError
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import KeyValueEntry, T, check_filters, entry_of_record
from jetstream_ext.kv.live import Live, LiveMapping
from jetstream_ext.protocol.options import check_function, check_not_coroutine
from jetstream_ext.protocol.updates import MOST_CHANGES, Change, Record


@dataclass(frozen=True, slots=True)
class KeyValueChange(Generic[T]):
    """A change of one key.

    Attributes:
        key: The key.
        old: The entry that the watcher saw last; None if the key did not exist.
        new: The entry that it has now; None if it was deleted or purged, or has expired.
        revision: The revision of the message that changed it. For a removal without a message (an expiry without a delete
            marker, a purge of the stream), the table's revision.
        skipped: How many changes are missing before this one (see `changes`).
    """

    key: str
    old: KeyValueEntry[T] | None
    new: KeyValueEntry[T] | None
    revision: int
    skipped: int = 0


class Table(LiveMapping[KeyValueEntry[T], KeyValueChange[T]], Generic[T]):
    """A bucket, or a part of it, as a live dictionary: for those who read often (ADR-8, ADR-31).

    ::

        async with kvx.Table(kv, ["flags.>"]) as flags:     # loads the keys, and follows every later change
            flags["flags.checkout"].value                   # a lookup in memory
            revision = await kv.put("flags.checkout", b"on")
            await flags.wait_for(revision)                  # read your own write, or that of another process

    The table is always a state that the bucket had: with `revision` R, every key is as it was at R. It never goes back to an
    earlier one, whichever replica or mirror answers.

    It follows changes within milliseconds: a doorbell wakes it (see `log.LogReader`). Where there can be none it asks every
    0.25 s. A change for which the doorbell did not ring is seen after 5.5 s at most, and `wait_for` asks at once. An idle table
    sends one request in 5.5 s.

    While the servers do not answer, the table keeps what it has, logs a warning to the logger ``jetstream_ext.kv``,
    and tries again indefinitely. It fails, with an error for every call that waits and every later read, if the bucket is
    deleted or created again, or the connection is closed. If the servers have lost messages (a stream that was restored from
    an older copy), it waits until they have its revision again, and loads what is stored then.

    Values that expire by a TTL, or that a purge of the stream or a limit of it removes, leave the table as well, also where
    the server leaves no delete marker. If messages vanish without a trace (`purge_deletes`, ``STREAM.PURGE`` with a filter,
    ``STREAM.MSG.DELETE``), the table notices it within 6 s, from the leader's numbers, and loads again. In a stream that
    limits the messages per subject, writes at the same time can hide that from a table of more than 1,000 keys, unless it is
    one of the whole bucket with a history of 1.

    The memory is that of the keys and values, and of the delete markers that the bucket keeps. After its block, a table still
    has its last state.

    Args:
        kv: nats-py's bucket; also one that is a mirror, which then is read alone.
        keys: Keys and patterns of keys (``*`` for a token, ``>`` for the rest); None is the whole bucket. With several, the
            server sends what matches their common prefix.
        decode: Makes the ``value`` of each entry from its bytes, such as ``json.loads``; None leaves the bytes. It is called on
            the event loop when an entry is asked for first, once for each message. If it raises, the table goes on, and
            `value` raises ConversionError.
        checkpoint: A file that keeps the table (SQLite), so that another start reads only later messages. It is of one
            table and one process at a time, is at most a second old, and is written by a thread. A file that is damaged, of
            another table or written by a newer version is rebuilt, with a warning; one that is no checkpoint is an error.
        timeout: Seconds to wait for each answer, and for `wait_for`; None is the context's own.
        doorbell: As for `log.LogReader`; without it the table asks four times a second.

    Raises:
        nats.js.errors.InvalidKeyError, ValueError, TypeError: As for `snapshot`.
        RuntimeError: On entering: the table was entered before.
        ValueError: On entering: the file of `checkpoint` is not one of a table. It is left as it is.
        BlockingIOError, OSError: On entering: another table uses that file, or it cannot be opened.
        Exception: On entering: as for `snapshot`.

    Cancellation: Entering and leaving may be cancelled; nothing is left behind. If leaving is cancelled, the checkpoint may
        lack the last second.

    Requires: As for `snapshot`; for the doorbell, permission to subscribe to the keys' subjects (``$KV.<bucket>.>``).
    """

    @overload
    def __init__(
        self: Table[bytes],
        kv: KeyValue,
        keys: Sequence[str] | None = None,
        *,
        decode: None = None,
        checkpoint: str | Path | None = None,
        timeout: float | None = None,
        doorbell: bool = True,
    ) -> None: ...

    @overload
    def __init__(
        self,
        kv: KeyValue,
        keys: Sequence[str] | None = None,
        *,
        decode: Callable[[bytes], T],
        checkpoint: str | Path | None = None,
        timeout: float | None = None,
        doorbell: bool = True,
    ) -> None: ...

    def __init__(
        self,
        kv: KeyValue,
        keys: Sequence[str] | None = None,
        *,
        decode: Callable[[bytes], Any] | None = None,
        checkpoint: str | Path | None = None,
        timeout: float | None = None,
        doorbell: bool = True,
    ) -> None:
        patterns = check_filters(keys)
        bucket = Bucket(kv, timeout)
        live = Live(bucket, patterns, None if checkpoint is None else Path(checkpoint), doorbell=doorbell)
        entry: Callable[[str, Record], KeyValueEntry[Any]] = partial(entry_of_record, bucket.name)
        if decode is not None:
            check_function(decode, "decode", awaited=False)
            entry = _Decoding(bucket.name, decode, live)
        super().__init__(live, entry, partial(_change_of, entry))


def _change_of(entry: Callable[[str, Record], KeyValueEntry[T]], change: Change) -> KeyValueChange[T]:
    key, old, new, revision, skipped = change
    before = None if old is None else entry(key, old)
    return KeyValueChange(key, before, None if new is None else entry(key, new), revision, skipped)


class _Undecodable(KeyValueEntry[Any]):
    """An entry whose value could not be decoded: asking for the value raises."""

    __slots__ = ("_cause",)
    _cause: Exception
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, entry: KeyValueEntry, cause: Exception) -> None:
        for field in fields(entry):
            if field.name != "value":
                object.__setattr__(self, field.name, getattr(entry, field.name))
        object.__setattr__(self, "_cause", cause)

    @property
    def value(self) -> Any:
        text = f"bucket {self.bucket!r}: the value of key {self.key!r} (revision {self.revision}) cannot be decoded"
        raise ConversionError(f"{text}: {self._cause!r:.200}") from self._cause

    def __repr__(self) -> str:
        return f"<{self.key!r} at revision {self.revision}: its value cannot be decoded>"


class _Decoding:
    """Makes entries of records, and decodes the value of each message once."""

    def __init__(self, bucket: str, decode: Callable[[bytes], Any], live: Live) -> None:
        self._bucket = bucket
        self._decode = decode
        self._live = live
        self._made: dict[int, tuple[Record, KeyValueEntry[Any]]] = {}  # by sequence

    def __call__(self, key: str, record: Record) -> KeyValueEntry[Any]:
        made = self._made.get(record[0])
        if made is None or made[0] != record:  # a stream that has lost messages can use a sequence again
            made = self._made[record[0]] = record, self._decoded(entry_of_record(self._bucket, key, record))
            stored = self._live.content.values
            if len(self._made) > 2 * len(stored) + MOST_CHANGES:
                self._made = {it[0]: self._made[it[0]] for it in stored.values() if it[0] in self._made}
        return made[1]

    def _decoded(self, entry: KeyValueEntry) -> KeyValueEntry[Any]:
        try:
            value = self._decode(entry.value)
            check_not_coroutine(value, "decode")
        except Exception as error:
            return _Undecodable(entry, error)
        return replace(entry, value=value)
