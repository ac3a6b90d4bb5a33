"""The content of a table in a SQLite file, so that a restart reads only what came since.

A file is of one table: a stream, its creation, and the keys that are wanted. SQLite keeps it whole if the process or the
machine ends at any moment; a checksum of each row shows what SQLite does not, a page that was damaged. A file that is not
usable is rebuilt, with a warning; only a file with something else in it is an error, because it may be somebody's data.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import orjson

from jetstream_ext.protocol.table import Content
from jetstream_ext.protocol.updates import Record
from jetstream_ext.text import counted, get_logger, log_state

_T = TypeVar("_T")
_log = get_logger("kv")

_APPLICATION: Final = 0x4A53_5854  # "JSXT"
_VERSION: Final = 2
_SQLITE: Final = b"SQLite format 3\x00"  # how each file of SQLite begins
_LOCKED: Final = 0.5  # seconds to wait for another process to let go of the file


class _UnusableError(Exception):
    """The file cannot be used, and may be rebuilt; the text says why."""


class Checkpoint:
    """The file of one table, used by one thread of its own, so that the event loop never waits for a disk."""

    def __init__(self, path: Path, table: str, identity: dict[str, Any]) -> None:
        self._path = path
        self._table = table  # what the log calls it
        self._identity = identity
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jetstream_ext checkpoint")
        self._database: sqlite3.Connection | None = None
        self._saved: int | None = None  # the revision that the file has; None: the next save writes everything

    async def open(self) -> tuple[list[tuple[str, Record]], dict[str, Any]] | None:
        """Open the file and return its messages and its note; None if it is new or is not usable, which is logged.

        Raises:
            ValueError: The file is not a checkpoint.
            BlockingIOError: Another table uses it.
            OSError: It cannot be opened.
        """
        return await self._run(self._open)

    def adopt(self, revision: int) -> None:
        """Note that the table begins with what the file has, which is of `revision`."""
        self._saved = revision

    async def save(self, content: Content, note: dict[str, Any]) -> None:
        """Store what of a table has changed since the last time, and a note, in one transaction."""
        dirty, revision, complete = content.dirty or set(), content.revision, self._saved is None
        if not dirty and revision == self._saved:
            return
        content.dirty = set()
        values, deleted = content.values, content.deleted
        if complete:
            records = values | deleted
        else:
            records = {key: record for key in dirty if (record := values.get(key) or deleted.get(key))}
        gone = [] if complete else [key for key in dirty if key not in records]
        note = note | {"revision": revision, "count": len(content), "identity": self._identity}
        try:
            await self._run(lambda: self._save(records, gone, note, complete=complete))
        except BaseException:
            content.dirty |= dirty
            raise
        self._saved = revision
        fields = {"revision": revision, "keys": len(records), "complete": complete}
        log_state(_log, f"table of {self._table}", "checkpoint saved", **fields)

    async def close(self) -> None:
        """Close the file once everything before is stored."""
        self.abandon()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    def abandon(self) -> None:
        """As `close`, without waiting."""
        with contextlib.suppress(RuntimeError):
            self._thread.submit(self._close)
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # -- on the thread ------------------------------------------------------------------------------------------------

    def _open(self) -> tuple[list[tuple[str, Record]], dict[str, Any]] | None:
        try:
            self._database = self._connect()
            return self._read(self._database)
        except _UnusableError as why:
            _log.warning("checkpoint %s is rebuilt, because %s", self._path, why)
        except sqlite3.DatabaseError as error:
            kind = getattr(error, "sqlite_errorname", "").split("_")[1:2]
            if kind in (["BUSY"], ["LOCKED"]):
                raise BlockingIOError(f"checkpoint {self._path} is in use by another table") from None
            if kind not in (["CORRUPT"], ["NOTADB"], ["ERROR"]):  # the last one: it lacks a table or a column
                raise OSError(f"checkpoint {self._path} cannot be opened: {error}") from error
            _log.warning("checkpoint %s is rebuilt, because it is damaged: %s", self._path, error)
        self._close()
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        self._database = self._connect()
        return None

    def _connect(self) -> sqlite3.Connection:
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            if (head := file.read(len(_SQLITE))) and head != _SQLITE:
                if not any(head) or _SQLITE.startswith(head):
                    raise _UnusableError("its beginning is lost, as after a power failure")
                raise ValueError(
                    f"{self._path} is not a checkpoint of a table, and is left as it is; give another path"
                )
        database = sqlite3.connect(self._path, timeout=_LOCKED, isolation_level=None, check_same_thread=False)
        try:
            database.execute("PRAGMA locking_mode = EXCLUSIVE")
            database.execute("BEGIN EXCLUSIVE")
            application, version = (
                database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
            )
            empty = not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if empty and not application:
                database.execute("CREATE TABLE note (content BLOB NOT NULL)")
                database.execute(
                    "CREATE TABLE messages (key BLOB PRIMARY KEY, seq INTEGER NOT NULL, "
                    "time BLOB NOT NULL, headers BLOB NOT NULL, data BLOB NOT NULL, checksum INTEGER NOT NULL) WITHOUT ROWID"
                )
                database.execute(f"PRAGMA application_id = {_APPLICATION}")
                database.execute(f"PRAGMA user_version = {_VERSION}")
            elif application != _APPLICATION:
                raise ValueError(f"{self._path} is another program's database, and is left as it is; give another path")
            database.execute("COMMIT")
            if not empty and version != _VERSION:
                raise _UnusableError(f"another version of this package has written it (format {version})")
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
        except BaseException:
            database.close()
            raise
        return database

    def _read(self, database: sqlite3.Connection) -> tuple[list[tuple[str, Record]], dict[str, Any]] | None:
        noted = database.execute("SELECT content FROM note").fetchall()
        if not noted:
            return None
        try:
            note = orjson.loads(noted[0][0])
            identity, count = note["identity"], note["count"]
        except (ValueError, KeyError, TypeError) as error:
            raise _UnusableError(f"its note is malformed ({error})") from None
        if identity != self._identity:
            raise _UnusableError(f"it is of another table: {identity}, and not {self._identity}")
        rows: list[tuple[str, Record]] = []
        for key, seq, time, headers, data, checksum in database.execute(
            "SELECT key, seq, time, headers, data, checksum FROM messages ORDER BY seq"
        ):
            record = seq, data, time, headers
            if checksum != _checksum(key, record):
                raise _UnusableError(f"the message {seq} is damaged")
            rows.append((key.decode("utf-8", "surrogateescape"), record))
        if len(rows) != count:
            raise _UnusableError(f"it has {counted(len(rows), 'message')}, and should have {count:,}")
        return rows, note

    def _save(self, records: dict[str, Record], gone: list[str], note: dict[str, Any], *, complete: bool) -> None:
        database = self._database
        assert database is not None
        database.execute("BEGIN IMMEDIATE")
        try:
            if complete:
                database.execute("DELETE FROM messages")
            database.executemany("DELETE FROM messages WHERE key = ?", ((_encoded(key),) for key in gone))
            database.executemany("INSERT OR REPLACE INTO messages VALUES (?, ?, ?, ?, ?, ?)", _rows(records))
            database.execute("DELETE FROM note")
            database.execute("INSERT INTO note VALUES (?)", (orjson.dumps(note),))
            database.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                database.execute("ROLLBACK")
            raise

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None


def _encoded(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def _rows(records: dict[str, Record]) -> Iterator[tuple[Any, ...]]:
    for name, record in records.items():
        key, (seq, data, time, headers) = _encoded(name), record
        yield key, seq, time, headers, data, _checksum(key, record)


def _checksum(key: bytes, record: Record) -> int:
    seq, data, time, headers = record
    head = b"%d %d %d %d " % (seq, len(key), len(time), len(headers))
    return zlib.crc32(b"".join((head, key, time, headers, data)))
