"""What a read needs of a bucket, asked for in as few requests as it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from jetstream_ext.client.concurrency import gather_bounded
from jetstream_ext.errors import TooManySubjectsError
from jetstream_ext.kv.bucket import Bucket, Facts
from jetstream_ext.kv.keys import EVERYTHING, is_literal
from jetstream_ext.kv.past import Holes, Past
from jetstream_ext.kv.records import Record, Records
from jetstream_ext.kv.source import Answer, Source

_CHUNK: Final = 1_000
"""Keys per request. Servers answer for 1024 subjects; where one answers for fewer, a chunk is halved."""
_CHUNK_BYTES: Final = 128 * 1024
_CHUNKS_IN_FLIGHT: Final = 3
_LOOKS_IN_FLIGHT: Final = 64
_ROWS_PER_LOOK: Final = 40
"""So many rows of the log cost as much as looking for the last message of one key up to some revision."""
SMALL_LOG: Final = 16_000
"""So many messages are read at once: knowing is cheaper than working around not knowing."""

Take = Callable[[Records], None]


async def at_once(bucket: Bucket, source: Source, patterns: list[str], facts: Facts) -> Answer | None:
    """Return the one answer that has everything, or None: it would not fit."""
    if len(_cut_up(bucket, patterns)) > 1 or (patterns == [EVERYTHING] and facts.keys > _CHUNK):
        return None
    try:
        answer = await source.last_of([bucket.subject(pattern) for pattern in patterns])
    except TooManySubjectsError:
        return None
    return None if answer.pending else answer


async def names_of(bucket: Bucket, patterns: list[str]) -> list[str] | None:
    """Return the keys that match `patterns` now, and those that are keys; None: there are too many to list."""
    names = {pattern: None for pattern in patterns if is_literal(pattern)}
    cut = len(bucket.prefix)
    for pattern in patterns:
        if not is_literal(pattern):
            info = await bucket.info(subjects_filter=bucket.subject(pattern))
            listed = info["state"].get("subjects") or {}
            if int(info.get("total") or 0) > len(listed):
                return None
            if not all(map(is_literal, listed)):
                return None  # servers store a subject with a wildcard in it, but asking for it asks for what it matches
            names.update((subject[cut:], None) for subject in listed)
    return list(names)


async def by_name(
    bucket: Bucket, source: Source, keys: Sequence[str], take: Take, *, up_to: Record | None = None
) -> None:
    """Hand over the last message of each of `keys`, in chunks of one moment each.

    Args:
        bucket: The bucket.
        source: Who is asked.
        keys: The keys.
        take: Takes the messages, among which may be one of another key.
        up_to: Look no further than this message; see `Source.last_of`.

    Raises:
        LookupError: `up_to` is not stored any more.
    """

    async def read(chunk: Sequence[str]) -> None:
        alone = len(chunk) == 1
        try:
            answer = await source.last_of([bucket.subject(key) for key in chunk], up_to=up_to, limited=not alone)
        except TooManySubjectsError:
            if alone:
                raise
        else:
            if not answer.pending:
                take(answer.records)
                return
        half = len(chunk) // 2
        await read(chunk[:half])
        await read(chunk[half:])

    await gather_bounded(read, _cut_up(bucket, keys), limit=_CHUNKS_IN_FLIGHT)


def _cut_up(bucket: Bucket, keys: Sequence[str]) -> list[Sequence[str]]:
    """Return `keys` in chunks that one request has room for."""
    room = min(_CHUNK_BYTES, bucket.js.connection.max_payload // 4)
    each = len(bucket.prefix) + 3  # with its quotes and comma
    chunks: list[Sequence[str]] = []
    start = size = 0
    for index, key in enumerate(keys):
        size += len(key) + each
        if index - start >= _CHUNK or (size > room and index > start):
            chunks.append(keys[start:index])
            start, size = index, len(key) + each
    if start < len(keys):
        chunks.append(keys[start:])
    return chunks


async def past_by_name(bucket: Bucket, source: Source, names: Sequence[str], facts: Facts, past: Past) -> bool | None:
    """Feed what decides about each of `names` at the revision of `past`.

    Its last message, where that is old enough; else the last one up to the revision; else its oldest.

    Returns:
        Whether messages up to the revision are missing; None: it did not turn out.
    """
    revision, cut = past.revision, len(bucket.prefix)
    last: dict[str, Record] = {}

    def take(records: Records) -> None:
        for row in records:
            record = Record(*row)
            if record.seq <= revision:
                past.feed((record,))
            else:
                last[record.subject[cut:]] = record

    await by_name(bucket, source, names, take)
    moved = [key for key in names if key in last]
    missing: bool | None = None
    if min(revision - facts.first, facts.messages) <= _ROWS_PER_LOOK * len(moved):
        missing = await _read_log(source, facts, past)
    else:
        await _look_back(bucket, source, moved, facts, past)

    async def look(key: str) -> None:
        if facts.history == 1:
            past.feed((last[key],))  # it is the only one
        elif (oldest := await source.oldest_of(bucket.subject(key), revision)) is not None:
            past.feed_oldest(*oldest)

    await gather_bounded(look, [key for key in moved if not past.knows(key)], limit=_LOOKS_IN_FLIGHT)
    return missing


async def _read_log(source: Source, facts: Facts, past: Past) -> bool:
    """Feed the whole log up to the revision; return whether messages of it are missing."""
    holes = Holes(facts.first, past.revision)
    async for records in source.log(facts.first, past.revision):
        holes.see(records.seqs)
        past.feed(records)
    holes.close()
    return holes.highest > 0


async def _look_back(bucket: Bucket, source: Source, keys: Sequence[str], facts: Facts, past: Past) -> None:
    """Feed the last message up to the revision of each of `keys`."""
    while keys and (newest := await source.newest_up_to(past.revision, facts.first)) is not None:
        try:
            await by_name(bucket, source, keys, past.feed, up_to=newest)
            return
        except LookupError:
            pass  # removed just now; as nothing is ever added there, this comes to an end


async def whole_log(source: Source, facts: Facts, past: Past) -> Holes:
    """Feed every message that there is; return what is missing of those that there were when the read began."""
    holes = Holes(facts.first, facts.last)

    def take(records: Records) -> None:
        holes.see(records.seqs)
        past.feed(records, log=True)

    async for records in source.log(facts.first, facts.last):
        take(records)
    await source.catch_up(facts.last, take)
    holes.close()
    return holes


async def any_missing(bucket: Bucket, source: Source, facts: Facts, revision: int) -> bool:
    """Return whether messages up to `revision` were removed, or may have been."""
    if (await bucket.facts()).gapless:
        return False
    if revision - facts.first >= SMALL_LOG:
        return True
    holes = Holes(facts.first, revision)
    async for records in source.log(facts.first, revision):
        holes.see(records.seqs)
    holes.close()
    return holes.highest > 0
