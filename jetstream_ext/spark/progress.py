"""The records that queries of an earlier version mirrored to a bucket, as `jetstream-ext positions` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from jetstream_ext.protocol.numbers import json_number, json_text

_VERSION: Final = 1
_SOURCE: Final = "spark-source"
_SINK: Final = "spark-sink"


@dataclass(frozen=True, slots=True)
class ReadPosition:
    """How far a query has read one stream, when the record was stored."""

    stream: str
    created: str
    last_read: int
    lag: int | None = None  # sequences from there to the end of the stream


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """What the source of a streaming query stores."""

    positions: tuple[ReadPosition, ...]
    application: str | None = None


@dataclass(frozen=True, slots=True)
class SinkRecord:
    """What a sink stores after each micro-batch or batch write."""

    stream: str
    query: str  # the id of the query, or the name of the batch write
    batch: int | None
    rows: int
    already_stored: int = 0
    dropped: int = 0
    diverted: int = 0
    application: str | None = None


_COUNTS: Final = ("rows", "already_stored", "dropped", "diverted")


def decode(data: bytes) -> SourceRecord | SinkRecord | None:
    """Return the record in a value of the bucket; None if it is something else, or of a later version."""
    try:
        body = orjson.loads(data)
        if json_number(body["v"], "v") != _VERSION:
            return None
        application = json_text(body["application"], "application") if "application" in body else None
        if body["kind"] == _SOURCE:
            return SourceRecord(tuple(_decode_position(name, at) for name, at in body["streams"].items()), application)
        if body["kind"] == _SINK:
            return SinkRecord(
                json_text(body["stream"], "stream"),
                json_text(body["query"], "query"),
                json_number(body["batch"], "batch") if "batch" in body else None,
                **{name: json_number(body[name], name) for name in _COUNTS},
                application=application,
            )
    except (KeyError, TypeError, AttributeError, ValueError):
        pass
    return None


def _decode_position(stream: str, at: Mapping[str, Any]) -> ReadPosition:
    lag = json_number(at["lag"], "lag") if "lag" in at else None
    return ReadPosition(stream, json_text(at["created"], "created"), json_number(at["last_read"], "last_read"), lag)
