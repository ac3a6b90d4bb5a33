"""What servers announce about atomic batches (ADR-50, Abandonment)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

import orjson

from jetstream_ext.errors import ResponseError
from jetstream_ext.protocol import headers as h
from jetstream_ext.types import AbandonedBatch

ABANDONED: Final = "$JS.EVENT.ADVISORY.STREAM.BATCH_ABANDONED"

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def parse_abandoned(payload: bytes) -> tuple[AbandonedBatch, str | None]:
    """Read an advisory; return it and the domain it comes from, where it says so.

    Raises:
        ResponseError: It is none.
    """
    try:
        event = orjson.loads(payload)
        stream, batch, reason = event["stream"], event["batch"], event["reason"]
        nanoseconds = h.parse_time_ns(h.to_utc(event["timestamp"]))
        domain = event.get("domain")
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ResponseError("an advisory about an abandoned batch is malformed", frame=payload) from None
    if not (isinstance(stream, str) and isinstance(batch, str) and isinstance(reason, str)):
        raise ResponseError("an advisory about an abandoned batch is malformed", frame=payload)
    time = _EPOCH + timedelta(microseconds=nanoseconds // 1000)
    return AbandonedBatch(stream, batch, reason, time), domain if isinstance(domain, str) else None
