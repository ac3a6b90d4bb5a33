"""The records of the transactional sink, and which rows of another attempt they prove to be stored.

A *marker* holds the digests of the rows of its transaction. The markers of a micro-batch's partition are a chain: each names
the one before. An attempt that finds a chain skips every row that is stored, whatever the order of its rows; of equal rows,
as many as are stored.

The stream's limits may have removed the start of the chain, and markers of version 1 have no digests of single rows. It is
then unknown which rows were stored before the rest of the chain, the *gap*. Only the same rows in the same order can be
recognised there: the next rows of the attempt fill the gap, and the digest of all stored rows in the newest marker proves
that they are the stored ones.
"""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from typing import Any, Final, Protocol, Self, TypeVar

import numpy as np
import orjson

from jetstream_ext.errors import JetStreamExtError
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.numbers import json_number, json_text
from jetstream_ext.spark.digests import DigestCounts
from jetstream_ext.spark.rows import DIGEST_SIZE, Rows, content
from jetstream_ext.text import plural

# The whole digest is compared, because a row that is taken for another one is lost.
_DIGEST: Final = np.dtype(f"S{DIGEST_SIZE}")
_DIGEST_TEXT: Final = 16  # characters of a digest in a marker
# The bytes of a marker and its headers without the digests and the stream's name.
_MARKER_BYTES: Final = 400


class ReplayError(JetStreamExtError):
    """The stored rows of a replayed micro-batch cannot be recognised; no row was stored twice."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What the sink knows about the partitions of a micro-batch."""

    batch: int = -1
    partitions: int = 0  # as an attempt declared them, or as the driver counted them; 0 if unknown
    complete: bool = False  # all rows of the micro-batch are stored
    attempt: str = ""  # that declared the number before any other attempt stored a row, if it is known
    minimum: int = 0  # a task has shown that there are so many, and that a smaller declared number was wrong

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Layout:
        """Return what a layout record says, or a marker, which has at most the first two fields."""
        json_number(body["v"], "v", low=1, high=2)
        return cls(
            json_number(body["batch"], "batch"),
            json_number(body.get("partitions", 0), "partitions"),
            body.get("complete") is True,
            json_text(body.get("attempt", ""), "attempt"),
            json_number(body.get("minimum", 0), "minimum"),
        )

    @property
    def known(self) -> bool:
        """Whether `partitions` is a number that is not known to be wrong."""
        return self.partitions >= max(1, self.minimum)

    def allows(self, partitions: int) -> bool:
        return partitions == self.partitions if self.known else partitions >= self.minimum

    def encode(self) -> bytes:
        return orjson.dumps({"v": 1, **asdict(self)})


@dataclass(frozen=True, slots=True)
class Marker:
    batch: int = -1
    rows: int = 0  # of the partition that are stored
    digest: str = ""  # of the digests of these rows in the order in which they were stored; version 1: of the rows
    digests: bytes = field(default=b"", repr=False)  # of the rows of this transaction; version 1: none
    previous: int = 0  # the sequence of the marker before this one in the micro-batch
    partitions: int = 0  # of the micro-batch, as declared; 0 if unknown

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Marker:
        version = json_number(body["v"], "v", low=1, high=2)
        marker = cls(
            json_number(body["batch"], "batch"), json_number(body["rows"], "rows"), json_text(body["digest"], "digest")
        )
        if version == 1:
            return marker
        digests = a2b_base64(json_text(body["digests"], "digests"), strict_mode=True)
        if not digests or len(digests) % DIGEST_SIZE or len(digests) > marker.rows * DIGEST_SIZE:
            raise ValueError("'digests' are not those of one or more of the rows")
        return replace(
            marker,
            digests=digests,
            previous=json_number(body["previous"], "previous"),
            partitions=json_number(body.get("partitions", 0), "partitions"),
        )

    def encode(self) -> bytes:
        return orjson.dumps(
            {"v": 2, **asdict(self)}, default=lambda digests: b2a_base64(digests, newline=False).decode()
        )


class RecordBody(Protocol):
    """A record of the sink; without arguments, what there is before the first one."""

    @property
    def batch(self) -> int:
        """The micro-batch that it is about."""

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self: ...

    def encode(self) -> bytes: ...


Record = TypeVar("Record", bound=RecordBody)


def decode(kind: type[Record], stored: StoredMsg | None) -> Record:
    """Return the record in a message, or the default without a message; raise ReplayError for any other message."""
    if stored is None:
        return kind()
    try:
        return kind.parse(orjson.loads(stored.data))
    except (KeyError, TypeError, ValueError):
        raise ReplayError(
            f"stream {stored.stream!r}: message {stored.seq} on {stored.subject!r} is not a marker of this sink; nothing else "
            "may be published there (see 'markerPrefix')"
        ) from None


def rows_per_marker(stream: str, size: int) -> int:
    """Return how many rows a marker in `stream` can have, if a message can have `size` bytes."""
    return max(0, (size - _MARKER_BYTES - len(stream)) // _DIGEST_TEXT)


class StoredRows:
    """The rows of a micro-batch's partition that its markers prove to be stored, compared with those of one attempt."""

    def __init__(self, what: str, subject: str) -> None:
        self._what = what
        self._subject = subject  # of the markers
        self._newest = Marker()
        self._digest = blake2b(digest_size=16)  # of the stored rows' digests, those behind a gap excepted
        self._left = (
            DigestCounts()
        )  # the stored rows that the attempt has not had, except for a gap and what is behind it
        self._gap = 0  # rows of the gap that the attempt has not had
        self._behind_gap: list[bytes] = []  # the digests of the stored rows behind the gap, the newest ones first
        self._content: blake2b | None = None  # the digest of version 1

    @property
    def rows(self) -> int:
        """How many rows are stored."""
        return self._newest.rows

    def learn(self, newest: Marker, digests: list[bytes]) -> None:
        """Take in the newest marker; raise ReplayError if it contradicts those known.

        `digests` are those of the markers that are not known, from the newest one on as far back as they are stored. The
        list is emptied.
        """
        if not newest.digests and not self.rows:
            self._content = blake2b(digest_size=16)
        self._gap = newest.rows - self.rows - sum(map(len, digests)) // DIGEST_SIZE
        self._behind_gap = digests
        self._newest = newest
        if self._gap < 0:
            raise self._differ()
        if not self._gap:
            self._close_gap()

    def select(self, rows: Rows, digests: bytes) -> tuple[Rows, bytes]:
        """Return those of the attempt's next rows that are not stored, and their digests.

        Raises ReplayError if they are not the rows that were stored in the gap.
        """
        rows, digests = self._without_left(rows, digests)
        if self._gap and rows:
            there = min(self._gap, len(rows))
            self._digest.update(digests[: there * DIGEST_SIZE])
            if self._content is not None:
                _add_content(self._content, rows[:there])
            rows, digests = rows[there:], digests[there * DIGEST_SIZE :]
            self._gap -= there
            if not self._gap:
                self._close_gap()
                rows, digests = self._without_left(rows, digests)
        return rows, digests

    def _without_left(self, rows: Rows, digests: bytes) -> tuple[Rows, bytes]:
        if not self._left:
            return rows, digests
        given = np.frombuffer(digests, _DIGEST)
        new = ~self._left.take(given)
        return rows.where(new.tolist()), given[new].tobytes()

    def _close_gap(self) -> None:
        while self._behind_gap:
            digests = self._behind_gap.pop()  # which frees them: there may be many
            self._digest.update(digests)
            self._left.add(np.frombuffer(digests, _DIGEST))
        if (self._content or self._digest).hexdigest() != self._newest.digest:
            raise self._differ()
        self._content = None

    def next_marker(self, batch: int, partitions: int, digests: bytes, previous: int) -> Marker:
        """Return the marker of a transaction with rows of these digests."""
        digest = self._digest.copy()
        digest.update(digests)
        rows = self.rows + len(digests) // DIGEST_SIZE
        return Marker(batch, rows, digest.hexdigest(), digests, previous, partitions)

    def add(self, marker: Marker) -> None:
        """Note that the transaction of `next_marker` is stored."""
        self._digest.update(marker.digests)
        self._newest = marker

    def check_end(self) -> None:
        """Raise ReplayError if the attempt has ended inside the gap."""
        if self._gap:
            raise self._differ()

    def _differ(self) -> ReplayError:
        return ReplayError(
            f"{self._what}: {self.rows:,} of its rows {plural(self.rows, 'is', 'are')} already stored, but some of their markers were removed from the stream (or "
            "were written by an older version of this library), and the rows of this attempt are not the same in the same order. "
            "Nothing more was stored. Keep limits and purges of the stream from removing the markers of a micro-batch. To store "
            f"all rows of this attempt, also those that are stored, purge the subject {self._subject!r}"
        )


def _add_content(digest: blake2b, rows: Rows) -> None:
    """Add rows to a digest of version 1."""
    for subject, data, headers, _ in rows:
        row = content(subject, data, headers)
        digest.update(b"%d:%b" % (len(row), row))
