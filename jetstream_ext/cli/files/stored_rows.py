"""Which rows of a file a stream has, by the message ids that ``ingest`` gave them.

An id is ``<path>.<content>.<index>.<row>``: digests of the file's path, of its content with the options, and of the
message, and the row's index. The index is ``<skip>-<index>`` in a run with ``--skip``, and ``<index>~<last>`` if the
rows after it, up to `last`, were stored already. A run adds ``.<token>`` if the server may not drop its rows as
duplicates: with ``--again``, and if the stream has removed messages. Each run sends the rows that are not stored in the
order of the file. So when the stream has row `index` of a content, it has stored every row of it from `skip` to `index`,
or to `last`, even if it has removed some of them since.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Final

from nats.js import JetStreamContext

from jetstream_ext.client.direct import DirectGet
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.headers import MSG_ID
from jetstream_ext.protocol.numbers import parse_number

MOST_ROWS: Final = (1 << 63) - 1  # what SQLite's integers hold
_FIRST_BLOCK: Final = 5_000  # sequences of the first read; the next ones are longer
_LONGEST_BLOCK: Final = 100_000
_SOME: Final = 1_000  # rows between two turns of the event loop

OnProgress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _Id:
    content: str
    skip: int
    index: int
    last: int
    row: str


@dataclass(frozen=True, slots=True)
class RowIds:
    """The ids of one run."""

    path: str
    content: str
    skip: int = 0
    token: str = ""  # of a run whose rows are no duplicates, whatever the server remembers

    def make(self, index: int, row: str, last: int) -> str:
        """Return the id of the row at `index`, whose message has the digest `row`; the rows up to `last` are stored."""
        place = f"{self.skip}-{index}" if self.skip else f"{index}"
        if last > index:
            place += f"~{last}"
        return f"{self.path}.{self.content}.{place}.{row}{self.token and f'.{self.token}'}"

    def parse(self, text: str) -> _Id | None:
        """Return the parts of an id; None if the id does not belong to a file with this path."""
        path, *parts = text.split(".")
        if path != self.path or len(parts) not in (3, 4):
            return None
        skip, _, place = parts[1].rpartition("-")
        index, _, last = place.partition("~")
        first, number, end = (parse_number(each, MOST_ROWS) for each in (skip or "0", index, last or index))
        if first is None or number is None or end is None:  # anyone may publish such an id
            return None
        return _Id(parts[0], first, number, end, parts[2])


class StoredRows:
    """The rows of a file, and which of them the stream has.

    It is in a temporary database, because a file can have more rows than fit into memory.

    Attributes:
        total: The number of rows, up to the first one that cannot be read.
        stored: How many of them, without the skipped ones, the stream has.
        same_content: Whether the stream has rows of a file with this path and content.
        unrelated: How many rows of other contents of the file the stream has, if none of them is a row of the file now.
        presumed: How many of the stored rows the stream has removed since, to judge by the rows around them.
        unclear: How many rows may be new, or may have been stored and removed.
        after_unclear: The index of the first row after those, of which it is known.
    """

    def __init__(self, database: sqlite3.Connection, ids: RowIds, *, other_contents: bool) -> None:
        self.total: int | None = None
        self.stored: int = 0
        self.same_content: bool = False
        self.unrelated: int = 0
        self.presumed: int = 0
        self.unclear: int = 0
        self.after_unclear: int = 0
        self._database = database
        self._ids = ids
        self._other_contents = other_contents
        self._others_found = False
        self._certain: list[tuple[int, int]] = []  # first and last index of rows that were stored
        database.executescript(
            "CREATE TABLE rows (idx INTEGER PRIMARY KEY, row TEXT, stored INTEGER DEFAULT 0, exact INTEGER DEFAULT 0);"
            "CREATE TABLE found (content TEXT, idx INTEGER, row TEXT, skip INTEGER, last INTEGER, PRIMARY KEY (content, idx)) "
            "WITHOUT ROWID;"
            "CREATE TABLE copies (row TEXT PRIMARY KEY, skipped INTEGER, sent INTEGER) WITHOUT ROWID;"
        )

    @property
    def missing(self) -> int:
        """How many rows the stream lacks."""
        return max(0, (self.total or 0) - self._ids.skip) - self.stored

    def indexes_to_send(self) -> Iterator[tuple[int, str]]:
        """Yield the index and the digest of each row that the stream lacks."""
        yield from self._database.execute(
            "SELECT idx, row FROM rows WHERE NOT stored AND idx >= ? ORDER BY idx", (self._ids.skip,)
        )

    def index_of_sent(self, number: int) -> int:
        """Return the index of the row that is sent after `number` others."""
        if number >= self.missing:  # a row after the first one that cannot be sent, so that it is not in the database
            return max(self.total or 0, self._ids.skip) + number - self.missing
        (index,) = self._database.execute(
            "SELECT idx FROM rows WHERE NOT stored AND idx >= ? ORDER BY idx LIMIT 1 OFFSET ?", (self._ids.skip, number)
        ).fetchone()
        return int(index)

    async def find(
        self,
        js: JetStreamContext,
        state: StreamState,
        subject: str | None,
        digests: Callable[[], Generator[str, None, None]],
        on_progress: OnProgress,
    ) -> None:
        """Search the stream backwards, until all rows of the file are found or the stream ends.

        Args:
            js: nats-py's context.
            state: The stream.
            subject: A filter that all rows match; None is every subject.
            digests: Reads the file and yields the digest of each row. It is called once, if the stream has rows of it.
            on_progress: Is called with the number of sequences that were looked at.
        """
        last, size = state.last_seq, _FIRST_BLOCK
        reader = DirectGet(js, state.name)
        while last >= state.first_seq:
            start = max(state.first_seq, last - size + 1)
            same: dict[int, dict[int, _Id]] = {}
            others: list[_Id] = []
            async with reader.scan(subject=subject, seq=start, up_to_seq=last, confirm=True) as messages:
                async for message in messages:
                    found = self._ids.parse(message.headers.get(MSG_ID, ""))
                    if found is None:
                        continue
                    if found.content == self._ids.content:
                        same.setdefault(found.skip, {})[found.index] = found
                    if self._other_contents:
                        others.append(found)
                        self._others_found |= found.content != self._ids.content
                    if len(others) >= _SOME:
                        self._keep(others)
            self._keep(others)
            if same:
                await self._read(digests)
                self._note_same(same)
                if self._complete():
                    break
            on_progress(state.last_seq - start + 1)
            last, size = start - 1, min(2 * size, _LONGEST_BLOCK)
        if self._others_found and not self._complete():
            await self._read(digests)
            self._mark_certain()
            await self._compare()
            if not state.never_removed:
                self._judge_removed()
        else:
            self._mark_certain()
        (self.stored,) = self._database.execute(
            "SELECT count(*) FROM rows WHERE stored AND idx >= ?", (self._ids.skip,)
        ).fetchone()
        if self._others_found and not self._database.execute("SELECT 1 FROM rows WHERE stored LIMIT 1").fetchone():
            (self.unrelated,) = self._database.execute("SELECT count(*) FROM found").fetchone()

    def _keep(self, others: list[_Id]) -> None:
        rows = [(found.content, found.index, found.row, found.skip, found.last) for found in others]
        self._database.executemany("INSERT OR IGNORE INTO found VALUES (?, ?, ?, ?, ?)", rows)
        others.clear()

    async def _read(self, digests: Callable[[], Generator[str, None, None]]) -> None:
        if self.total is not None:
            return
        self.total = 0
        with closing(digests()) as found:
            for chunk in _chunks(found):
                rows = enumerate(chunk, self.total)
                self._database.executemany("INSERT INTO rows (idx, row) VALUES (?, ?)", rows)
                self.total += len(chunk)
                await asyncio.sleep(0)

    def _note_same(self, same: dict[int, dict[int, _Id]]) -> None:
        for skip, rows in same.items():
            for index in sorted(rows, reverse=True):
                known = self._database.execute("SELECT row FROM rows WHERE idx = ?", (index,)).fetchone()
                if known == (rows[index].row,):
                    self.same_content = True
                    self._certain.append((skip, rows[index].last))
                    break

    def _complete(self) -> bool:
        """Return whether every row that is not skipped is stored for certain."""
        if self.total is None:
            return False
        reached = self._ids.skip
        for first, last in sorted(self._certain):
            if first <= reached:
                reached = max(reached, last + 1)
        return reached >= self.total and self.same_content

    def _mark_certain(self) -> None:
        for first, last in self._certain:
            self._database.execute("UPDATE rows SET stored = 1 WHERE idx BETWEEN ? AND ?", (first, last))

    async def _compare(self) -> None:
        """Mark the rows whose messages the stream has: as often as it has them, because rows can be equal.

        First, the rows with a copy of their own index take it, and then those that are stored for certain take one. Of the
        other copies, those with indexes that this run skips belong to skipped rows, unless there are more than such rows.
        """
        skip = self._ids.skip
        count = "INSERT INTO copies SELECT row, sum(idx < ?), sum(idx >= ?) FROM found GROUP BY row"
        self._database.execute(count, (skip, skip))
        self._database.execute(
            "UPDATE rows SET exact = 1 WHERE idx IN (SELECT idx FROM found JOIN rows USING (idx) WHERE found.row = rows.row)"
        )
        if skip:
            await self._take(f"exact AND idx < {skip}", "skipped")
        await self._take(f"exact AND idx >= {skip}", "sent")
        if skip:
            await self._take(f"NOT exact AND stored AND idx < {skip}", "skipped", "sent")
        await self._take(f"NOT exact AND stored AND idx >= {skip}", "sent", "skipped")
        if skip:
            await self._take(f"NOT stored AND idx < {skip}", "skipped")
        await self._take(f"NOT stored AND idx >= {skip}", "sent", "skipped")

    async def _take(self, which: str, *columns: str) -> None:
        """Let each of some rows take one of its copies, of the first kind that is left, and mark those that have."""
        query = f"SELECT idx, row FROM rows WHERE idx >= ? AND {which} ORDER BY idx LIMIT {_SOME}"  # noqa: S608 - our own words
        takes = [f"UPDATE copies SET {each} = {each} - 1 WHERE row = ? AND {each} > 0" for each in columns]  # noqa: S608 - our own words
        start = 0
        while rows := self._database.execute(query, (start,)).fetchall():
            found = [(at,) for at, row in rows if any(self._database.execute(take, (row,)).rowcount for take in takes)]
            self._database.executemany("UPDATE rows SET stored = 1 WHERE idx = ?", found)
            start = rows[-1][0] + 1
            await asyncio.sleep(0)

    def _judge_removed(self) -> None:
        """Mark the rows that the stream has stored and removed, and count those of which that is not known.

        A content whose messages are, by most of their indexes, rows of the file now has the file's rows at the indexes of
        its removed messages, too. If the rows have moved, it is not known which ones were removed.
        """
        self._database.execute(
            "CREATE TABLE contents AS SELECT content, skip, max(CASE WHEN rows.row = found.row THEN last END) AS last, "
            "2 * total(rows.row = found.row) >= count(*) AS in_place, count(*) > max(found.idx) - skip AS whole "
            "FROM found LEFT JOIN rows USING (idx) WHERE content != ? GROUP BY content, skip",
            (self._ids.content,),
        )
        # A row that has replaced another one, whose message the stream still has, was never stored.
        self._database.execute(
            "CREATE TABLE changed AS SELECT idx FROM found JOIN rows USING (idx) JOIN contents USING (content, skip) "
            "WHERE in_place AND rows.row != found.row AND NOT stored"
        )
        for first, last in self._database.execute("SELECT skip, last FROM contents WHERE in_place").fetchall():
            mark = "UPDATE rows SET stored = 1 WHERE NOT stored AND idx BETWEEN ? AND ? AND idx NOT IN changed"
            self.presumed += self._database.execute(mark, (max(first, self._ids.skip), last)).rowcount
        if self._database.execute("SELECT 1 FROM contents WHERE NOT in_place AND NOT whole LIMIT 1").fetchone():
            (last,) = self._database.execute("SELECT max(idx) FROM rows WHERE stored").fetchone()
            unclear = "SELECT count(*) FROM rows WHERE NOT stored AND idx BETWEEN ? AND ? AND idx NOT IN changed"
            (self.unclear,) = self._database.execute(unclear, (self._ids.skip, last)).fetchone()
            self.after_unclear = (last or 0) + 1


@contextmanager
def stored_rows(ids: RowIds, *, other_contents: bool) -> Iterator[StoredRows]:
    """Return an empty `StoredRows` for the duration of a block.

    Args:
        ids: The ids of this run.
        other_contents: Whether to look also for equal rows of other contents of the file.
    """
    with closing(sqlite3.connect("", isolation_level=None)) as database:  # "" is a temporary file without a name
        database.execute("PRAGMA journal_mode = OFF")
        database.execute("BEGIN")
        yield StoredRows(database, ids, other_contents=other_contents)


def _chunks(items: Iterable[str]) -> Iterator[list[str]]:
    some: list[str] = []
    for item in items:
        some.append(item)
        if len(some) >= _SOME:
            yield some
            some = []
    if some:
        yield some
