"""A bucket as a live table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nats.js.kv import KeyValue

from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import KeyValueEntry, check_filters, entry_of_record
from jetstream_ext.kv.live import Live, LiveMapping
from jetstream_ext.protocol.table import Change


@dataclass(frozen=True, slots=True)
class KeyValueChange:
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
    old: KeyValueEntry | None
    new: KeyValueEntry | None
    revision: int
    skipped: int = 0


class Table(LiveMapping[KeyValueEntry, KeyValueChange]):
    """A bucket, or a part of it, as a live dictionary: for those who read often (ADR-8, ADR-31).

    ::

        async with kvx.Table(kv, ["flags.>"]) as flags:     # loads the keys, and follows every later change
            flags["flags.checkout"].value                   # a lookup in memory
            revision = await kv.put("flags.checkout", b"on")
            await flags.wait_for(revision)                  # read your own write, or that of another process

    The table is always a state that the bucket had: with `revision` R, every key is as it was at R. It never goes back to an
    earlier one, whichever replica or mirror answers. It makes no consumer on the server.

    It follows changes within milliseconds if the client may subscribe to the keys (then the server wakes it), and otherwise
    asks up to every 0.25 s. A change whose wake-up is lost, or that is stored more than a second after it was published, is
    seen after 1 s at most, and `wait_for` asks at once. An idle table sends one request per second (two, if it has `keys` and
    the bucket's messages can have TTLs).

    While the servers do not answer, the table keeps what it has, logs a warning to the logger ``jetstream_ext.kv``,
    and tries again indefinitely. It fails, with an error for every call that waits and every later read, if the bucket is deleted or created
    again, or the connection is closed. If the servers have lost messages (a stream that was restored from an older copy), it
    waits until they have its revision again, and loads what is stored then.

    Values that expire by a TTL, or that a purge of the stream or a limit of it removes, leave the table as well, also where
    the server leaves no delete marker. A key whose messages vanish without a trace (`purge_deletes`, ``STREAM.PURGE`` with a
    filter, an expired delete marker) leaves a table of the whole bucket with the next change that the table reads, or after
    1 s. A table with `keys` compares its keys with those that are stored after every reconnect, and after each gap in which a
    delete marker could come and go. It does not notice that an administrator removes messages meanwhile. If one removes only
    the newest of several messages of a key (``STREAM.MSG.DELETE``), no table notices.

    The memory is that of the keys and values, and of the delete markers that the bucket keeps. After its block, a table still
    has its last state.

    Args:
        kv: nats-py's bucket; also one that is a mirror, which then is read alone.
        keys: Keys and patterns of keys (``*`` for a token, ``>`` for the rest); None is the whole bucket. With several, the
            server sends what matches their common prefix.
        checkpoint: A file that keeps the table (SQLite), so that another start reads only later messages. It is of one
            table and one process at a time, is at most a second old, and is written by a thread. A file that is damaged, of
            another table or written by a newer version is rebuilt, with a warning; one that is no checkpoint is an error.
        timeout: Seconds to wait for each answer, and for `wait_for`; None is the context's own.

    Raises:
        nats.js.errors.InvalidKeyError, ValueError, TypeError: As for `snapshot`.
        RuntimeError: On entering: the table was entered before.
        ValueError: On entering: the file of `checkpoint` is not one of a table. It is left as it is.
        BlockingIOError, OSError: On entering: another table uses that file, or it cannot be opened.
        Exception: On entering: as for `snapshot`.

    Cancellation: Entering and leaving may be cancelled; nothing is left behind. If leaving is cancelled, the checkpoint may
        lack the last second.

    Requires: As for `snapshot`; for the wake-ups, permission to subscribe to the keys' subjects (``$KV.<bucket>.>``).
    """

    def __init__(
        self,
        kv: KeyValue,
        keys: Sequence[str] | None = None,
        *,
        checkpoint: str | Path | None = None,
        timeout: float | None = None,
    ) -> None:
        patterns = check_filters(keys)
        bucket = Bucket(kv, timeout)
        live = Live(bucket, patterns, None if checkpoint is None else Path(checkpoint))
        super().__init__(live, partial(entry_of_record, bucket.name), partial(_change_of, bucket.name))


def _change_of(bucket: str, change: Change) -> KeyValueChange:
    key, old, new, revision, skipped = change
    return KeyValueChange(
        key,
        None if old is None else entry_of_record(bucket, key, old),
        None if new is None else entry_of_record(bucket, key, new),
        revision,
        skipped,
    )
