"""Stored messages as this package takes them: five columns, decoded in bulk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Final, NamedTuple

from jetstream_ext.protocol.direct import Block
from jetstream_ext.protocol.headers import ROW_STORED, ROW_SUBJECT, ROW_TIME, decode_stored, parse_time_ns
from jetstream_ext.types import StoredMsg

_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})

Row = tuple[int, str, bytes, Mapping[str, str], datetime]
"""A `Record`, or the same without its names."""


class Record(NamedTuple):
    """One stored message."""

    seq: int
    subject: str
    data: bytes
    headers: Mapping[str, str]
    time: datetime


class Records:
    """Stored messages, in ascending order.

    As columns, because a large bucket has a million of them: iterating makes one tuple after the other, and none stays.
    """

    __slots__ = ("_datas", "_headers", "_subjects", "_times", "seqs")

    def __init__(self) -> None:
        self.seqs: list[int] = []
        """Their sequences."""
        self._subjects: list[str] = []
        self._datas: list[bytes] = []
        self._headers: list[Mapping[str, str]] = []
        self._times: list[datetime] = []

    def __iter__(self) -> Iterator[Row]:
        return zip(self.seqs, self._subjects, self._datas, self._headers, self._times, strict=True)

    def __len__(self) -> int:
        return len(self.seqs)

    def __getitem__(self, index: int) -> Record:
        return Record(
            self.seqs[index], self._subjects[index], self._datas[index], self._headers[index], self._times[index]
        )

    def add(self, block: Block) -> None:
        """Append the messages of a block.

        Raises:
            ResponseError: One is malformed.
        """
        subjects, times, headers = self._subjects.append, self._times.append, self._headers.append
        for row in block.each_row():
            subjects(row[ROW_SUBJECT].decode("utf-8", "replace"))
            times(_time(row[ROW_TIME]))
            headers(decode_stored(row[ROW_STORED]) if row[ROW_STORED] else _NO_HEADERS)
        self.seqs += block.seqs
        self._datas += block.datas


def _time(line: bytes) -> datetime:
    try:
        return datetime.fromisoformat(line[17:].decode())
    except ValueError:
        # Not as servers write it: the form of a draft, or none, which is an error there.
        return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=parse_time_ns(line[17:]) // 1000)


def record(message: StoredMsg) -> Record:
    """Return one message."""
    return Record(message.seq, message.subject, message.data, message.headers, message.time)
