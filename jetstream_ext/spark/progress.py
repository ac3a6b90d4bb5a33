"""The progress of a query in a key-value bucket, for people and tools that do not have Spark.

The records are information only: Spark's checkpoint is the position of a query, and nothing reads a record back into it. So
a record that cannot be stored is a warning, and costs the query a bounded time. A record is JSON::

    {"v": 1, "kind": "spark-source", "time": "2026-01-31T13:45:00.123456Z", "application": "app-20260131134000-0007",
     "streams": {"ORDERS": {"created": "2026-01-31T08:00:00Z", "last_read": 9000, "lag": 500}}}

    {"v": 1, "kind": "spark-sink", "time": "2026-01-31T13:45:00.123456Z", "application": "app-20260131134000-0007",
     "stream": "BILLED", "query": "6f1c…", "batch": 17, "rows": 500, "already_stored": 0, "dropped": 0, "diverted": 0}

``application`` and ``lag`` are absent where they are unknown, ``batch`` where a batch write has no number. No record looks
like a position of `log.OffsetStore`, so a reader of that name refuses it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

import orjson
from nats.js import JetStreamContext
from nats.js.errors import NoStreamResponseError

from jetstream_ext.client.connection import Context, open_bucket
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.protocol.numbers import json_number, json_text
from jetstream_ext.protocol.options import rfc3339
from jetstream_ext.spark.application import application_id
from jetstream_ext.spark.connection import run_on_driver
from jetstream_ext.spark.offsets import Position
from jetstream_ext.spark.options import KvWriteOptions, WriteOptions
from jetstream_ext.text import get_logger

_log = get_logger("spark")

_VERSION: Final = 1
_SOURCE: Final = "spark-source"
_SINK: Final = "spark-sink"
_SINK_SUFFIX: Final = ".sink"

_TIMEOUT: Final = 2.0  # to store a record: the longest delay of a query
_INTERVAL: Final = 1.0  # between two records of a source
_PAUSE: Final = 30.0  # after a failure


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

    def encode(self, now: datetime) -> bytes:
        streams: dict[str, Any] = {}
        for at in self.positions:
            streams[at.stream] = {"created": at.created, "last_read": at.last_read}
            if at.lag is not None:
                streams[at.stream]["lag"] = at.lag
        return _encode(_SOURCE, now, self.application, streams=streams)


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

    def encode(self, now: datetime) -> bytes:
        batch = {} if self.batch is None else {"batch": self.batch}
        counts = {name: getattr(self, name) for name in _COUNTS}
        return _encode(_SINK, now, self.application, stream=self.stream, query=self.query, **batch, **counts)


_COUNTS: Final = ("rows", "already_stored", "dropped", "diverted")


def _encode(kind: str, now: datetime, application: str | None, **fields: Any) -> bytes:
    known = {} if application is None else {"application": application}
    return orjson.dumps({"v": _VERSION, "kind": kind, "time": rfc3339(now, "time"), **known, **fields})


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


class PositionMirror:
    """Stores the position of a streaming query under a key of a bucket: when it has changed, about once a second at most.

    It belongs to a reader that Spark pickles, so it holds no connection.
    """

    def __init__(self, bucket: str, name: str, application: str | None = None) -> None:
        self._bucket = bucket
        self._name = name
        self._application = application
        self._stored: Mapping[str, tuple[str, int]] = {}
        self._next = float("-inf")

    async def store(
        self, context: JetStreamContext, positions: Mapping[str, Position], lags: Mapping[str, int], *, last: bool
    ) -> None:
        """Store positions that have changed; never raises.

        Args:
            context: The JetStream context.
            positions: What the query has finished, by stream.
            lags: How many sequences the streams are ahead; unknown for the others.
            last: Store them now, although the last record is younger than a second: the query may end here.
        """
        now = time.monotonic()
        places = {stream: (at.created, at.seq) for stream, at in positions.items()}
        if places == self._stored or (now < self._next and not last):
            return
        read = tuple(ReadPosition(name, at.created, at.seq, lags.get(name)) for name, at in sorted(positions.items()))
        record = SourceRecord(read, self._application or application_id())
        if await store_record(context, self._bucket, self._name, record):
            self._stored = places
            self._next = now + _INTERVAL
        else:
            self._next = time.monotonic() + _PAUSE


def store_sink_progress(options: WriteOptions | KvWriteOptions, record: SinkRecord) -> None:
    """Store what a sink has done if the options ask for it (on the driver); a failure is logged, and never raised."""
    bucket, name = options.progress_bucket, options.progress_name
    if bucket is None or name is None:
        return
    key = name + _SINK_SUFFIX  # a query may use one name for its source and its sink
    record = replace(record, application=options.connection.application_id or application_id())
    try:
        run_on_driver(options.connection, lambda context: store_record(context, bucket, key, record))
    except Exception as error:  # no connection
        _log.warning("the progress %r was not stored in bucket %r: %s; the query continues", key, bucket, error)


async def store_record(context: JetStreamContext, bucket: str, key: str, record: SourceRecord | SinkRecord) -> bool:
    """Store a record, within `_TIMEOUT` seconds; return whether it is stored. A failure is logged, and never raised."""
    try:
        subject = Bucket(open_bucket(context, bucket), _TIMEOUT).subject(key)
        what = f"the ack of {subject} (without the permission to publish there, none comes)"
        await Context(context).publish(subject, record.encode(datetime.now(UTC)), {}, _TIMEOUT, what)
    except NoStreamResponseError:
        what = "the progress %r was not stored: bucket %r does not exist; create it with 'nats kv add %s'; the query continues"
        _log.warning(what, key, bucket, bucket)
    except Exception as error:
        _log.warning("the progress %r was not stored in bucket %r: %s; the query continues", key, bucket, error)
    else:
        return True
    return False
