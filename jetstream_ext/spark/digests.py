"""Rows as columns, and what identifies a row among those of its partition: the digest of its content, and how often it came before.

A second attempt at a partition may get its rows in another order, without some, or with others. A row is therefore known by
its content, and among equal rows of the partition by how many came before it: by its place, other rows would be lost or
repeated; by its content alone, equal rows would be lost.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import compress, repeat
from operator import add
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jetstream_ext.protocol.headers import CRLF, MSG_ID, VERSION, EncodedHeaders, HeaderCache, encode
from jetstream_ext.types import Entry

DIGEST_SIZE: Final = 12
"""The number of bytes of a digest."""
DIGEST_TEXT: Final = 16
"""The number of characters of a digest in base64."""
# The whole digest is compared, because a row that is taken for another one is lost.
DIGEST: Final = np.dtype(f"S{DIGEST_SIZE}")

Digests: TypeAlias = NDArray[Any]
"""Digests of one type that numpy can sort."""
Counts: TypeAlias = NDArray[np.int64]

# Smaller arrays are always merged, because a search in many of them costs more.
_SMALL: Final = 8192
_START_OF_DIGEST: Final = np.dtype([("start", np.uint64), ("rest", np.uint32)])
_START: Final = VERSION + CRLF


@dataclass(slots=True)
class Rows:
    """Rows of a partition, by columns: an object for each of millions of rows would cost more than its encoding."""

    subjects: Sequence[str]
    data: Sequence[bytes]
    headers: Sequence[Mapping[str, str] | None] | None = None  # None: no row has any
    ids: Sequence[str | None] | None = None  # the rows' own message ids; None: no row has one

    def sizes(self) -> list[int]:
        """Return about how many bytes each row has."""
        sizes = list(map(add, map(len, self.subjects), map(len, self.data)))
        for index, headers in enumerate(self.headers or ()):
            if headers:
                sizes[index] += sum(len(name) + len(value) for name, value in headers.items())
        return sizes

    def entries(self) -> list[Entry]:
        """Return the messages of the rows, without their own ids."""
        if self.headers is None:
            return list(zip(self.subjects, self.data, strict=True))
        columns = zip(self.subjects, self.data, self.headers, strict=True)
        return [(subject, data, headers) if headers else (subject, data) for subject, data, headers in columns]


class DigestCounts:
    """How often each of many digests occurs, in little memory.

    The counts are in sorted arrays, which are merged when their sizes are similar. A digest therefore costs its own size and
    four bytes, whatever the number of digests, and a look-up searches a few arrays.
    """

    def __init__(self) -> None:
        # Largest first; a digest is in at most one of them.
        self._levels: list[tuple[Digests, NDArray[np.uint32]]] = []

    def __bool__(self) -> bool:
        return bool(self._levels)

    def add(self, digests: Digests) -> Counts:
        """Add digests; return for each of them how often it was added before."""
        distinct, counts = np.unique(digests, return_counts=True)
        before = np.zeros(len(distinct), np.int64)
        new = np.ones(len(distinct), bool)
        for known, at, found in self._find(distinct):
            before[found] = known[at]
            known[at] += counts[found].astype(np.uint32)
            new[found] = False
        if new.any():
            self._insert(distinct[new], counts[new].astype(np.uint32))
        return _occurrences(digests, counts, before)

    def take(self, digests: Digests) -> NDArray[np.bool_]:
        """Remove each of the digests once, as long as there are such; return which of them were there."""
        distinct, counts = np.unique(digests, return_counts=True)
        there = np.zeros(len(distinct), np.int64)
        for known, at, found in self._find(distinct):
            there[found] = known[at]
            known[at] -= np.minimum(known[at], counts[found].astype(np.uint32))
        return _occurrences(digests, counts, -there) < 0

    def _find(self, distinct: Digests) -> Iterator[tuple[NDArray[np.uint32], Counts, Counts]]:
        """Yield counts, the places in them of those digests that are there, and their places in `distinct`."""
        for digests, counts in self._levels:
            at = digests.searchsorted(distinct)
            at[at == len(digests)] = 0
            found = np.flatnonzero(digests[at] == distinct)
            if len(found):
                yield counts, at[found], found

    def _insert(self, digests: Digests, counts: NDArray[np.uint32]) -> None:
        while self._levels and len(self._levels[-1][0]) < max(2 * len(digests), _SMALL):
            others, their_counts = self._levels.pop()
            digests, counts = np.concatenate((others, digests)), np.concatenate((their_counts, counts))
            order = np.argsort(digests, kind="stable")  # the fastest one for two sorted arrays
            digests, counts = digests[order], counts[order]
        self._levels.append((digests, counts))


def _occurrences(digests: Digests, counts: Counts, before: Counts) -> Counts:
    """Number equal digests in their order; `counts` is how many of each there are, and `before` the first number."""
    if len(counts) == len(digests) and not before.any():
        return np.zeros(len(digests), np.int64)
    first = np.cumsum(counts) - counts
    numbers = np.empty(len(digests), np.int64)
    numbers[np.argsort(digests, kind="stable")] = np.arange(len(digests)) + np.repeat(before - first, counts)
    return numbers


def content(subject: str, data: bytes, headers: Mapping[str, str] | None) -> bytes:
    """Return bytes that differ for messages that differ in subject, data or headers."""
    if not headers:
        return b"%d %d %b%b" % (0, len(subject), subject.encode(), data)
    text = "".join(f"{len(name)}:{name}{len(value)}:{value}" for name, value in headers.items())
    pairs = text.encode(errors="surrogatepass")  # the message is refused when its headers are encoded
    return b"%d %d %b%b%b" % (len(pairs), len(subject), pairs, subject.encode(), data)


def digests_of(rows: Rows) -> Digests:
    """Return the digests of those rows that have no id; equal rows have equal digests."""
    columns: Iterator[Any] = zip(rows.subjects, rows.data, rows.headers or repeat(None), strict=False)
    if rows.ids is not None:
        columns = compress(columns, [own is None for own in rows.ids])
    begun: dict[str, Any] = {}  # by subject: a copy of the digest of the start of `content`, for rows without headers
    digests: list[bytes] = []
    for subject, data, headers in columns:
        if headers:
            digests.append(blake2b(content(subject, data, headers), digest_size=DIGEST_SIZE).digest())
            continue
        if subject not in begun:
            begun[subject] = blake2b(content(subject, b"", None), digest_size=DIGEST_SIZE).copy
        digest = begun[subject]()
        digest.update(data)
        digests.append(digest.digest())
    return np.frombuffer(b"".join(digests), DIGEST)


class MessageIds:
    """Makes the message ids of a partition's rows: a prefix, the row's digest, and how often that came before.

    The prefix names the query, the micro-batch and the partition.
    """

    def __init__(self, prefix: str) -> None:
        block = encode([(MSG_ID, f"{prefix}:-")])
        self._start, _, self._end = block.rpartition(b"-")
        self._seen = DigestCounts()
        self._headers = HeaderCache()

    def entries(self, rows: Rows) -> Iterator[Entry]:
        """Return the messages of the partition's next rows with their ids, their own or else new ones.

        Their headers become objects when they are sent: thousands at once would slow the garbage collector.
        """
        made = map(EncodedHeaders, self._blocks(digests_of(rows)))
        if rows.headers is None and rows.ids is None:
            return zip(rows.subjects, rows.data, made, strict=True)
        return self._among_own(rows, made)

    def _among_own(self, rows: Rows, made: Iterator[EncodedHeaders]) -> Iterator[Entry]:
        none = repeat(None)
        for subject, data, headers, own in zip(
            rows.subjects, rows.data, rows.headers or none, rows.ids or none, strict=False
        ):
            if own is not None:
                yield subject, data, {**(headers or {}), MSG_ID: own}
                continue
            named = next(made)
            if headers:
                named = EncodedHeaders(self._headers.encode(headers)[: -len(CRLF)] + named.block[len(_START) :])
            yield subject, data, named

    def _blocks(self, digests: Digests) -> list[bytes]:
        """Return the headers of rows that have only an id, encoded."""
        count, start, end = len(digests), len(self._start), len(self._end)
        table = np.empty((count, start + DIGEST_TEXT + end), np.uint8)
        table[:, :start] = np.frombuffer(self._start, np.uint8)
        texts = b2a_base64(digests.tobytes(), newline=False)
        table[:, start:-end] = np.frombuffer(texts, np.uint8).reshape(count, DIGEST_TEXT)
        table[:, -end:] = np.frombuffer(self._end, np.uint8)
        blocks: list[bytes] = table.view(f"V{table.shape[1]}").ravel().tolist()
        # Digests that have only their starts in common get a higher number than they need.
        before = self._seen.add(digests.view(_START_OF_DIGEST)["start"])
        for index in np.flatnonzero(before).tolist():
            blocks[index] = b"%b:%d%b" % (blocks[index][:-end], before[index], self._end)
        return blocks
