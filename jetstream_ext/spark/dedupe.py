"""Writing by fast ingest: a message id for every row, so that the server drops the second copy.

An id names the query, the micro-batch, the partition, the row's place in it and the row's content. The place alone
would lose a row if a second attempt gets the rows in another order; the content alone would lose equal rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

from jetstream_ext.protocol.headers import MSG_ID
from jetstream_ext.spark.rows import Message
from jetstream_ext.types import Entry


def content(subject: str, data: bytes, headers: Mapping[str, str] | None) -> bytes:
    """Return everything of a message, so that two that differ anywhere give different bytes."""
    if not headers:
        return b"%d %d %b%b" % (0, len(subject), subject.encode(), data)
    pairs = "".join(f"{len(name)}:{name}{len(value)}:{value}" for name, value in headers.items()).encode()
    return b"%d %d %b%b%b" % (len(pairs), len(subject), pairs, subject.encode(), data)


def with_ids(messages: Iterable[Message], prefix: str, first: int) -> Iterator[Entry]:
    """Yield messages with their ids, each made when it is sent: thousands at once would keep the collector busy.

    Args:
        messages: Consecutive rows.
        prefix: What comes before the row in their ids.
        first: The place of the first of them.
    """
    begun: dict[str, Any] = {}  # by subject: the digest of what `content` begins with, for messages without headers
    for row, (subject, data, headers, msg_id) in enumerate(messages, first):
        if msg_id is None:
            if headers:
                digest = blake2b(content(subject, data, headers), digest_size=8)
            else:
                start = begun.get(subject)
                if start is None:
                    start = begun[subject] = blake2b(content(subject, b"", None), digest_size=8)
                digest = start.copy()
                digest.update(data)
            msg_id = f"{prefix}:{row}:{digest.hexdigest()}"
        yield subject, data, {**headers, MSG_ID: msg_id} if headers else {MSG_ID: msg_id}


def without_ids(messages: Iterable[Message]) -> list[Entry]:
    """Return messages as they are."""
    return [(subject, data) if headers is None else (subject, data, headers) for subject, data, headers, _ in messages]
