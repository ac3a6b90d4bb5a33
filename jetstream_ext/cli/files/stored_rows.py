"""Which rows of a file a stream has, by the message ids that ``ingest`` gave them.

An id is ``<path>.<content>.<index>.<row>``: digests of the file's path, of its content with the options, and of the
message, and the row's index. The index is ``<skip>-<index>`` in a run with ``--skip``, and ``<index>~<last>`` if the
rows after it, up to `last`, were stored already. A run adds ``.<token>`` if the server may not drop its rows as
duplicates: with ``--again``, and if the stream has removed messages. Each run sends the rows that are not stored in the
order of the file. So when the stream has row `index` of a content, it has stored every row of it from `skip` to `index`,
or to `last`, even if it has removed some of them since.

That is no proof if the stream was deleted and created again while rows were sent: the rows before belong to the former
stream. So a stream that has never removed a message must show each row, or the first row before the others. And no message
proves more rows than the stream had stored by then.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Final

from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from jetstream_ext.client.direct import DirectGet
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.headers import MSG_ID
from jetstream_ext.protocol.numbers import parse_number
from jetstream_ext.protocol.subjects import covers

MOST_ROWS: Final = (1 << 63) - 1  # what SQLite's integers hold
_FIRST_BLOCK: Final = 5_000  # sequences of the first read; the next ones are longer
_LONGEST_BLOCK: Final = 100_000
_SOME: Final = 1_000  # rows between two turns of the event loop
# Where rows under other subjects are looked for: the last message of each subject, and the newest messages.
_MOST_SUBJECTS: Final = 1_000  # a server answers for 1,024
_NEWEST: Final = 1_000

Digests = Callable[[], Generator[str, None, None]]
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
        self._unproved = False  # some rows prove nothing about those before them
        self._replacing = False  # newer rows of other contents may have replaced rows of this one
        self._starts_with_row: bool | None = None  # the first row is in the stream, before the newest one
        self._first_seq = 0  # where it is, if the newest one is the last row and nothing else was published meanwhile
        self._certain: list[tuple[int, int]] = []  # first and last index of rows that were stored
        database.executescript(
            "CREATE TABLE rows (idx INTEGER PRIMARY KEY, row TEXT, stored INTEGER DEFAULT 0, exact INTEGER DEFAULT 0);"
            "CREATE TABLE found (content TEXT, idx INTEGER, row TEXT, skip INTEGER, last INTEGER, seq INTEGER, "
            "PRIMARY KEY (content, idx)) WITHOUT ROWID;"
            "CREATE TABLE copies (row TEXT PRIMARY KEY, skipped INTEGER, sent INTEGER) WITHOUT ROWID;"
            "CREATE TABLE contents (content TEXT, skip INTEGER, last INTEGER, in_place INTEGER, whole INTEGER);"
            "CREATE TABLE changed (idx INTEGER PRIMARY KEY);"
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
        self, js: JetStreamContext, state: StreamState, subject: str | None, digests: Digests, on_progress: OnProgress
    ) -> None:
        """Search the stream backwards, until all rows of the file are found or the stream ends.

        Args:
            js: nats-py's context.
            state: The stream.
            subject: A filter that all rows match; None is every subject. If it does not find all rows, and the stream seems
                to have rows of the file under other subjects, every subject is searched.
            digests: Reads the file and yields the digest of each row. It is called once, if the stream has rows of it.
            on_progress: Is called with the number of sequences that were looked at.
        """
        reader = DirectGet(js, state.name)
        looked_at = await self._search(reader, state, subject, digests, on_progress)
        await self._conclude(reader, state, subject, digests)
        if subject is None or looked_at >= state.messages or (self.total is not None and not self.missing):
            return
        if await self._has_rows_elsewhere(reader, state, subject):
            self._forget()
            await self._search(reader, state, None, digests, on_progress)
            await self._conclude(reader, state, None, digests)

    async def _search(
        self, reader: DirectGet, state: StreamState, subject: str | None, digests: Digests, on_progress: OnProgress
    ) -> int:
        """Note the rows that the stream has; return how many messages were looked at."""
        last, size, looked_at = state.last_seq, _FIRST_BLOCK, 0
        while last >= state.first_seq:
            start = max(state.first_seq, last - size + 1)
            same: dict[int, dict[int, tuple[_Id, int]]] = {}
            kept: list[tuple[_Id, int]] = []
            async with reader.scan(subject=subject, seq=start, up_to_seq=last, confirm=True) as messages:
                async for message in messages:
                    looked_at += 1
                    found = self._ids.parse(message.headers.get(MSG_ID, ""))
                    if found is None:
                        continue
                    if found.content == self._ids.content:
                        same.setdefault(found.skip, {})[found.index] = found, message.seq
                    elif self._other_contents:
                        self._others_found = True
                    else:
                        continue
                    kept.append((found, message.seq))
                    if len(kept) >= _SOME:
                        self._keep(kept)
            self._keep(kept)
            if same:
                await self._read(digests)
                self._note_same(same, state)
                if await self._all_found(reader, state, subject):
                    break
            on_progress(state.last_seq - start + 1)
            last, size = start - 1, min(2 * size, _LONGEST_BLOCK)
        return looked_at

    async def _all_found(self, reader: DirectGet, state: StreamState, subject: str | None) -> bool:
        """Return whether no earlier message can change what is known."""
        if self._replacing or not self._complete() or not await self._is_proof(reader, state, subject):
            return False
        if self._others_found and not state.never_removed:
            self._mark_certain()
            self._replacing = bool(self._replaced(state))
        return not self._replacing

    async def _conclude(self, reader: DirectGet, state: StreamState, subject: str | None, digests: Digests) -> None:
        """Mark the rows that are stored."""
        if self.total is None and not self._others_found:
            return
        await self._read(digests)
        proof = await self._is_proof(reader, state, subject)
        if proof:
            self._mark_certain()
        if self._replacing or not (proof and self._complete()):
            if self._others_found or self._unproved or not proof:
                await self._compare()
            if self._others_found and not state.never_removed:
                self._judge_removed(state)
        (self.stored,) = self._database.execute(
            "SELECT count(*) FROM rows WHERE stored AND idx >= ?", (self._ids.skip,)
        ).fetchone()
        if self._others_found and not self._database.execute("SELECT 1 FROM rows WHERE stored LIMIT 1").fetchone():
            (self.unrelated,) = self._database.execute("SELECT count(*) FROM found").fetchone()

    async def _is_proof(self, reader: DirectGet, state: StreamState, subject: str | None) -> bool:
        """Return whether a row proves that those before it were stored, because this stream has taken the first one."""
        if not state.never_removed:
            return True
        if self._starts_with_row is None:
            self._starts_with_row = await self._has_first_row(reader, subject or ">", state.first_seq)
        if not self._starts_with_row and self._first_seq >= state.first_seq:
            self._starts_with_row = await self._has_first_row(reader, ">", self._first_seq)
            self._first_seq = 0
        return self._starts_with_row

    async def _has_first_row(self, reader: DirectGet, subject: str, seq: int) -> bool:
        """Return whether the first message of a subject from a sequence on is the first row."""
        try:
            return self._is_first_row(await reader.get_next(subject, seq=seq))
        except NotFoundError:
            return False

    def _is_first_row(self, message: StoredMsg) -> bool:
        found = self._ids.parse(message.headers.get(MSG_ID, ""))
        if found is None or found.content != self._ids.content:
            return False
        return found.index == found.skip <= self._ids.skip and self._row(found.index) == found.row

    async def _has_rows_elsewhere(self, reader: DirectGet, state: StreamState, subject: str) -> bool:
        """Return whether messages on other subjects than those of a filter are rows of the file, as far as a look shows."""
        newest = reader.scan(seq=max(state.first_seq, state.last_seq - _NEWEST + 1), up_to_seq=state.last_seq)
        few = state.num_subjects <= _MOST_SUBJECTS
        for some in (newest, *([reader.multi_last([">"])] if few else [])):
            async with some as messages:
                async for message in messages:
                    found = self._ids.parse(message.headers.get(MSG_ID, ""))
                    if found is None or covers(subject, message.subject):
                        continue
                    if self._other_contents or found.content == self._ids.content:
                        return True
        return False

    def _forget(self) -> None:
        """Forget what the stream has."""
        self._others_found = self._unproved = self._replacing = self.same_content = False
        self._starts_with_row = None
        self._first_seq = 0
        self._certain = []
        self.presumed = self.unclear = self.after_unclear = self.unrelated = self.stored = 0
        for table in ("found", "copies", "contents", "changed"):
            self._database.execute(f"DELETE FROM {table}")  # noqa: S608 - our own words
        self._database.execute("UPDATE rows SET stored = 0, exact = 0")

    def _keep(self, kept: list[tuple[_Id, int]]) -> None:
        """Note messages; of several of one content and index, the newest stays."""
        self._database.executemany(
            "INSERT INTO found VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET row = excluded.row, "
            "skip = excluded.skip, last = excluded.last, seq = excluded.seq WHERE excluded.seq > seq",
            [(found.content, found.index, found.row, found.skip, found.last, seq) for found, seq in kept],
        )
        kept.clear()

    def _row(self, index: int) -> str | None:
        """Return the digest of a row of the file."""
        known = self._database.execute("SELECT row FROM rows WHERE idx = ?", (index,)).fetchone()
        return None if known is None else str(known[0])

    async def _read(self, digests: Digests) -> None:
        if self.total is not None:
            return
        self.total = 0
        with closing(digests()) as found:
            for chunk in _chunks(found):
                rows = enumerate(chunk, self.total)
                self._database.executemany("INSERT INTO rows (idx, row) VALUES (?, ?)", rows)
                self.total += len(chunk)
                await asyncio.sleep(0)

    def _note_same(self, same: dict[int, dict[int, tuple[_Id, int]]], state: StreamState) -> None:
        for skip, rows in same.items():
            for index in sorted(rows, reverse=True):
                found, seq = rows[index]
                if self._row(index) == found.row:
                    self.same_content = True
                    if found.last - skip <= seq - state.lowest_seq:
                        self._certain.append((skip, found.last))
                        if not self._first_seq and found.last == index and index + 1 == self.total:
                            self._first_seq = seq - (index - skip)
                        break
                    self._unproved = True

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

    def _judge_removed(self, state: StreamState) -> None:
        """Mark the rows that the stream has stored and removed, and count those of which that is not known.

        A content whose messages are, by most of their indexes, rows of the file now has the file's rows at the indexes of
        its removed messages, too. If the rows have moved, it is not known which ones were removed.
        """
        self._database.execute(
            "INSERT INTO contents SELECT content, skip, "
            "max(CASE WHEN rows.row = found.row AND last - skip <= seq - ? THEN last END), "
            "2 * total(rows.row = found.row) >= count(*), count(*) > max(found.idx) - skip "
            "FROM found LEFT JOIN rows USING (idx) WHERE content != ? GROUP BY content, skip",
            (state.lowest_seq, self._ids.content),
        )
        # A row that has replaced another one, whose message the stream still has, was never stored.
        self._database.execute(
            "INSERT OR IGNORE INTO changed SELECT idx FROM found JOIN rows USING (idx) JOIN contents USING (content, skip) "
            "WHERE in_place AND rows.row != found.row AND NOT stored"
        )
        for first, last in self._database.execute("SELECT skip, last FROM contents WHERE in_place").fetchall():
            mark = "UPDATE rows SET stored = 2 WHERE NOT stored AND idx BETWEEN ? AND ? AND idx NOT IN changed"
            self._database.execute(mark, (max(first, self._ids.skip), last))
        replaced = [(index,) for index in self._replaced(state)]
        self._database.executemany("UPDATE rows SET stored = 0 WHERE idx = ?", replaced)
        self._database.executemany("INSERT OR IGNORE INTO changed VALUES (?)", replaced)
        (self.presumed,) = self._database.execute("SELECT count(*) FROM rows WHERE stored = 2").fetchone()
        if self._database.execute("SELECT 1 FROM contents WHERE NOT in_place AND NOT whole LIMIT 1").fetchone():
            (last,) = self._database.execute("SELECT max(idx) FROM rows WHERE stored").fetchone()
            unclear = "SELECT count(*) FROM rows WHERE NOT stored AND idx BETWEEN ? AND ? AND idx NOT IN changed"
            (self.unclear,) = self._database.execute(unclear, (self._ids.skip, last)).fetchone()
            self.after_unclear = (last or 0) + 1

    def _replaced(self, state: StreamState) -> list[int]:
        """Return the indexes of the rows that were stored, but which another content of the file has replaced since.

        The stream has removed such a row, and has a newer message with another row of this index. It is newer than every
        message that proves that the row was stored.
        """
        others = self._database.execute(
            "SELECT idx, max(seq) AS newest FROM found JOIN rows USING (idx) WHERE content != ? AND idx >= ? "
            "AND stored AND found.row != rows.row AND rows.row NOT IN (SELECT row FROM found) GROUP BY idx ORDER BY newest DESC",
            (self._ids.content, self._ids.skip),
        ).fetchall()
        if not others:
            return []
        proofs = self._database.execute(
            "SELECT seq, found.skip, found.last FROM found JOIN rows USING (idx) LEFT JOIN contents USING (content, skip) "
            "WHERE found.row = rows.row AND (content = ? OR in_place) AND found.last - found.skip <= seq - ? "
            "ORDER BY seq DESC",
            (self._ids.content, state.lowest_seq),
        )
        proof = proofs.fetchone()
        proved: dict[int, int] = {}  # the last index, by the first one
        replaced: list[int] = []
        for index, newest in others:
            while proof is not None and proof[0] > newest:
                proved[proof[1]] = max(proof[2], proved.get(proof[1], 0))
                proof = proofs.fetchone()
            if not any(first <= index <= last for first, last in proved.items()):
                replaced.append(index)
        return replaced


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
