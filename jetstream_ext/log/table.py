"""The last message of every subject of a stream as a live table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nats.js import JetStreamContext

from jetstream_ext.kv.bucket import KeyedStream
from jetstream_ext.kv.table import Live, LiveMapping
from jetstream_ext.protocol.direct import StoredMsg, single_message
from jetstream_ext.protocol.options import check_list
from jetstream_ext.protocol.subjects import check_filter, check_name
from jetstream_ext.protocol.updates import Record


@dataclass(frozen=True, slots=True)
class MessageChange:
    """A change of the last message of one subject.

    Attributes:
        subject: The subject.
        old: The message that the watcher saw last; None if there was none.
        new: The last message now; None if it was deleted or purged, or has expired.
        revision: The sequence of the message that changed it. For a removal without a message (an expiry without a delete
            marker, a purge), the table's revision.
        skipped: How many changes are missing before this one (see `changes`).
    """

    subject: str
    old: StoredMsg | None
    new: StoredMsg | None
    revision: int
    skipped: int = 0


class Table(LiveMapping[StoredMsg, MessageChange]):
    """The last message of every subject of a stream, as a live dictionary: `kvx.Table` for any stream.

    ::

        async with log.Table(js, "PRICES", "prices.eu.>") as prices:
            prices["prices.eu.X"].data

    The keys are subjects, and `revision` is a stream sequence. A message with ``KV-Operation: DEL`` or ``PURGE``, such as that
    of a key that a worker has deleted from its state, and a delete marker that the server wrote
    (``subject_delete_marker_ttl``) remove their subject; other headers mean nothing here. Everything else is as for
    `kvx.Table`.

    Args:
        js: nats-py's JetStream context.
        stream: The stream's name.
        subject: A filter (wildcards allowed), or several.
        checkpoint: As for `kvx.Table`.
        timeout: As for `kvx.Table`.
        doorbell: As for `kvx.Table`.

    Raises:
        BadSubjectError, ValueError, TypeError: The stream's name or a filter is not valid.
        StreamConfigMismatchError: On entering: the stream's retention is not ``limits``, so that consumers remove messages.
        nats.js.errors.NotFoundError: On entering: there is no such stream.
        Exception: As for `kvx.Table`.

    Cancellation: As for `kvx.Table`.

    Requires: nats-server 2.11, ``allow_direct``, permission for ``DIRECT.GET``, ``STREAM.INFO`` and ``STREAM.MSG.GET``; for
        the doorbell, permission to subscribe to the subjects.
    """

    def __init__(
        self,
        js: JetStreamContext,
        stream: str,
        subject: str | Sequence[str] = ">",
        *,
        checkpoint: str | Path | None = None,
        timeout: float | None = None,
        doorbell: bool = True,
    ) -> None:
        check_name(stream, "stream name")
        if not isinstance(subject, str):
            check_list(subject, "subject", "filters", or_one="a filter")
        filters = [subject] if isinstance(subject, str) else list(dict.fromkeys(subject))
        if not filters:
            raise ValueError("subject must be a filter, or a list of at least one filter")
        for each in filters:
            check_filter(each)
        live = Live(
            KeyedStream(js, stream, timeout=timeout),
            [">"] if ">" in filters else filters,
            None if checkpoint is None else Path(checkpoint),
            doorbell=doorbell,
        )
        super().__init__(live, partial(_message_of, stream), MessageChange)


def _message_of(stream: str, subject: str, record: Record) -> StoredMsg:
    seq, data, time, stored = record
    row = [subject.encode("utf-8", "surrogateescape"), b"", b": " + time, b"", b"", b"", stored]
    return single_message(stream, seq, data, row)
