"""The size of the columns of an Arrow IPC stream, found without decompressing them.

A compressed buffer begins with its size, for which pyarrow allocates memory before it decompresses the rest. pyarrow offers
no way to see these sizes, so this module reads the places of buffers from the metadata of each message: FlatBuffers, which
pyarrow has verified, as Message.fbs of the Arrow format defines them.
"""

from __future__ import annotations

import struct
from typing import Final

import pyarrow as pa

_U16: Final = struct.Struct("<H").unpack_from
_U32: Final = struct.Struct("<I").unpack_from
_I32: Final = struct.Struct("<i").unpack_from
_I64: Final = struct.Struct("<q").unpack_from
_BUFFER: Final = struct.Struct("<qq")  # offset, length

# The numbers of fields in their tables.
_MESSAGE_HEADER: Final = 2
_DICTIONARY_DATA, _DICTIONARY_IS_DELTA = 1, 2
_BATCH_BUFFERS, _BATCH_COMPRESSION = 2, 3
_EARLIER_COMPRESSION: Final = b"ARROW:experimental_compression"  # before Arrow 1.0, outside of the batch


def expanded_size(stream: pa.Buffer, enough: int) -> int:
    """Return how many bytes the columns of a stream have in memory; stop counting beyond `enough`.

    Raises ArrowException or OSError, as pyarrow does, if it is no stream.
    """
    total = dictionaries = 0
    for message in pa.ipc.MessageReader.open_stream(stream):
        kind = message.type
        if kind == "record batch":
            data = memoryview(message.metadata)
            total += _batch_size(message, data, _target(data, _follow(data, 0), _MESSAGE_HEADER))
        elif kind == "dictionary":
            data = memoryview(message.metadata)
            dictionary = _target(data, _follow(data, 0), _MESSAGE_HEADER)
            size = _batch_size(message, data, _target(data, dictionary, _DICTIONARY_DATA))
            dictionaries += size
            is_delta = _field(data, dictionary, _DICTIONARY_IS_DELTA)
            # pyarrow makes a new dictionary of a delta and all before it, which earlier batches still use.
            total += dictionaries if is_delta and data[is_delta] else size
        if total > enough:
            break
    return total


def _batch_size(message: pa.Message, data: memoryview, batch: int) -> int:
    """Return the size of the buffers of a record batch in memory."""
    if not (vector := _target(data, batch, _BATCH_BUFFERS)):
        return 0
    places = _BUFFER.iter_unpack(data[vector + 4 : vector + 4 + _BUFFER.size * _U32(data, vector)[0]])
    if not _field(data, batch, _BATCH_COMPRESSION) and _EARLIER_COMPRESSION not in data.tobytes():
        return sum([length for _, length in places])
    body = memoryview(message.body or b"")
    return sum([_declared_size(body, offset, length) for offset, length in places])


def _declared_size(body: memoryview, offset: int, length: int) -> int:
    if not length or not 0 <= offset <= len(body) - 8:  # empty, or pyarrow will refuse it
        return 0
    declared: int = _I64(body, offset)[0]
    return max(declared, length)  # -1: the rest is not compressed


def _follow(data: memoryview, at: int) -> int:
    """Return the place to which the offset at `at` points."""
    offset: int = _U32(data, at)[0]
    return at + offset


def _target(data: memoryview, table: int, number: int) -> int:
    """Return the place to which a field of a table points; 0 if the table does not have it."""
    at = _field(data, table, number)
    return at and _follow(data, at)


def _field(data: memoryview, table: int, number: int) -> int:
    """Return the place of a field of a table; 0 if the table does not have it, or is itself a missing one (0)."""
    if not table:
        return 0
    fields = table - _I32(data, table)[0]
    place = 4 + 2 * number
    offset: int = _U16(data, fields + place)[0] if place < _U16(data, fields)[0] else 0
    return offset and table + offset
