"""Stored messages as this package takes them: five columns, decoded in bulk."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Final, NamedTuple

from jetstream_ext.protocol.direct import Block
from jetstream_ext.protocol.headers import ROW_STORED, ROW_SUBJECT, ROW_TIME, decode_stored
from jetstream_ext.types import StoredMsg

_NONE: Final[Mapping[str, str]] = MappingProxyType({})


class Record(NamedTuple):
    """One stored message."""

    seq: int
    subject: str
    data: bytes
    headers: Mapping[str, str]
    time: datetime


def records(block: Block) -> list[Record]:
    """Return the messages of a block. There are a million of them in a large bucket: no object is made in between."""
    rows = block.rows
    subjects = [row[ROW_SUBJECT].decode("utf-8", "replace") for row in rows]
    headers = [decode_stored(row[ROW_STORED]) if row[ROW_STORED] else _NONE for row in rows]
    try:
        times = [datetime.fromisoformat(row[ROW_TIME][17:].decode()) for row in rows]
    except ValueError:
        return [record(message) for message in block.messages()]  # raises what is wrong with which
    return list(map(Record, block.seqs, subjects, block.datas, headers, times))


def record(message: StoredMsg) -> Record:
    """Return one message."""
    return Record(message.seq, message.subject, message.data, message.headers, message.time)
