"""What a transactional sink keeps in the stream beside the rows: a marker per partition and a record of the layout.

A marker says how many rows of which micro-batch a partition has stored, and a digest of them. It is part of the same
atomic batch as the rows and names the marker before it (``Nats-Expected-Last-Subject-Sequence``), so of two attempts
that both believe to be the one, only one can store; the other finds out, reads the marker and goes on from there.
The layout record says in how many partitions the rows of a micro-batch come; it is fenced in the same way.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from jetstream_ext.errors import JetStreamExtError
from jetstream_ext.protocol.stored_msg import StoredMsg
from jetstream_ext.types import BatchMessage

_VERSION: Final = 1


class ReplayError(JetStreamExtError):
    """A micro-batch came again with other rows, or in another number of partitions; nothing was repeated."""


@dataclass(frozen=True, slots=True)
class Marker:
    """What a partition has stored.

    Attributes:
        batch: The micro-batch.
        rows: How many of its rows.
        digest: A digest of them.
        seq: The marker's own place in the stream; 0: there is none yet.
    """

    batch: int
    rows: int
    digest: str
    seq: int = 0

    def message(self, subject: str, after: int, *, rollup: bool) -> BatchMessage:
        """Return the marker to store, if the one before it is still at `after`."""
        body = {"v": _VERSION, "batch": self.batch, "rows": self.rows, "digest": self.digest}
        return _message(subject, body, after, rollup=rollup)

    @classmethod
    def decode(cls, stored: StoredMsg) -> Marker:
        """Return the marker in a message.

        Raises:
            ReplayError: It is none.
        """
        body = _body(stored)
        try:
            return cls(int(body["batch"]), int(body["rows"]), str(body["digest"]), stored.seq)
        except (KeyError, TypeError, ValueError):
            raise _alien(stored) from None


@dataclass(frozen=True, slots=True)
class Layout:
    """In how many partitions a micro-batch comes.

    Attributes:
        batch: The micro-batch.
        partitions: How many.
        seq: The record's own place in the stream; 0: there is none yet.
    """

    batch: int
    partitions: int
    seq: int = 0

    def message(self, subject: str, after: int, *, rollup: bool) -> BatchMessage:
        """Return the record to store, if the one before it is still at `after`."""
        return _message(
            subject, {"v": _VERSION, "batch": self.batch, "partitions": self.partitions}, after, rollup=rollup
        )

    @classmethod
    def decode(cls, stored: StoredMsg) -> Layout:
        """Return the record in a message.

        Raises:
            ReplayError: It is none.
        """
        body = _body(stored)
        try:
            return cls(int(body["batch"]), int(body["partitions"]), stored.seq)
        except (KeyError, TypeError, ValueError):
            raise _alien(stored) from None


def _message(subject: str, body: dict[str, object], after: int, *, rollup: bool) -> BatchMessage:
    return BatchMessage(
        subject,
        json.dumps(body, separators=(",", ":")).encode(),
        headers={"Nats-Rollup": "sub"} if rollup else None,
        expected_last_subject_seq=after,
    )


def _body(stored: StoredMsg) -> dict[str, Any]:
    try:
        body = json.loads(stored.data)
    except ValueError:
        raise _alien(stored) from None
    if not isinstance(body, dict) or body.get("v") != _VERSION:
        raise _alien(stored)
    return body


def _alien(stored: StoredMsg) -> ReplayError:
    return ReplayError(
        f"stream {stored.stream!r}: the message {stored.seq} on {stored.subject!r} is no marker of this sink; nothing else "
        "may be published there (see 'markerPrefix')"
    )
