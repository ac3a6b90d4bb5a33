"""``jetstream-ext positions``: how far the readers and queries are that keep a record in a bucket."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import click
from nats.js import JetStreamContext
from nats.js.errors import BucketNotFoundError, NotFoundError

from jetstream_ext.cli.completion import complete_buckets
from jetstream_ext.cli.connection import Target, connected, connection_options
from jetstream_ext.cli.options import Command, json_option
from jetstream_ext.cli.output import console, count, table, write_json
from jetstream_ext.client.api import gather_bounded, stream_state
from jetstream_ext.client.connection import Context, open_bucket
from jetstream_ext.errors import BadSubjectError, ErrorCode
from jetstream_ext.kv.bucket import LOOKUPS_IN_FLIGHT, Bucket
from jetstream_ext.kv.entries import key_text, operation
from jetstream_ext.log.offsets import StoredOffset
from jetstream_ext.protocol.api import StreamState, recreated
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.subjects import check_name
from jetstream_ext.spark.progress import ReadPosition, SinkRecord, SourceRecord, decode

_MOST_KEYS: Final = 10_000
_UNITS: Final = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


@dataclass(frozen=True, slots=True)
class _Reader:
    """A record of what a reader or a query has read; a query that reads several streams has one for each."""

    name: str
    kind: str  # "reader" or "spark-source"
    at: ReadPosition
    stored: datetime


@dataclass(slots=True)
class _Found:
    now: datetime  # by the clock of the bucket's leader
    readers: list[_Reader] = field(default_factory=list)
    sinks: list[tuple[str, SinkRecord, datetime]] = field(default_factory=list)
    others: list[str] = field(default_factory=list)  # keys of something else
    states: dict[str, StreamState | None] = field(default_factory=dict)  # None: the stream does not exist

    def age(self, stored: datetime) -> float:
        return max(0.0, (self.now - stored).total_seconds())

    def lag(self, at: ReadPosition) -> tuple[int | None, str]:
        """Return how many sequences the stream is ahead now; or None, and why that is unknown."""
        state = self.states[at.stream]
        if state is None:
            return None, "the stream does not exist"
        if recreated(at.created, state.created):
            return None, "the stream was created again, or its creation time has changed"
        if at.last_read > state.last_seq:
            return 0, f"the stream ends at {state.last_seq}"
        return state.last_seq - at.last_read, ""


@click.command("positions", cls=Command, short_help="Show how far readers and Spark queries are.")
@click.argument("bucket", shell_complete=complete_buckets)
@json_option()
@connection_options()
def command(where: Target, bucket: str, as_json: bool) -> None:
    """Show the positions in BUCKET: of log readers, and of Spark queries that have it as their progressBucket.

    The position is the next sequence to read; the lag is the number of sequences from there to the end of the stream now,
    whatever filter the reader has.

    Examples:
        jetstream-ext positions offsets
    """
    check_name(bucket, "bucket name")  # servers do not answer requests with an invalid one
    found = asyncio.run(_look(where, bucket))
    if as_json:
        write_json(_as_json(bucket, found))
    else:
        _show(found)


async def _look(where: Target, bucket: str) -> _Found:
    async with connected(where) as js:
        try:
            return await _read(js, bucket)
        except BucketNotFoundError as error:
            raise click.ClickException(str(error.description)) from error


async def _read(js: JetStreamContext, name: str) -> _Found:
    bucket = Bucket(open_bucket(js, name))
    found = _Found((await bucket.state(direct=False)).now)
    keys = await bucket.list_keys([">"], most=_MOST_KEYS)
    if len(keys) > _MOST_KEYS:
        raise click.ClickException(
            f"bucket {name!r} has more than {_MOST_KEYS:,} keys, which is more than readers and queries need; name the bucket "
            "that holds their positions"
        )

    async def get(key: str) -> StoredMsg | None:
        return await bucket.get_at_leader(last_by_subj=bucket.subject(key))

    for key, message in zip(keys, await gather_bounded(get, keys, limit=LOOKUPS_IN_FLIGHT), strict=True):
        if message is not None and operation(message.headers)[0] == "PUT":
            _sort(found, key, message)

    async def state(stream: str) -> StreamState | None:
        try:
            return await stream_state(Context(js), stream)
        except NotFoundError as error:
            if error.err_code != ErrorCode.STREAM_NOT_FOUND:
                raise
            return None

    streams = sorted({one.at.stream for one in found.readers})
    found.states = dict(zip(streams, await gather_bounded(state, streams, limit=LOOKUPS_IN_FLIGHT), strict=True))
    return found


def _sort(found: _Found, key: str, message: StoredMsg) -> None:
    """Add a value of the bucket to the records of its kind."""
    record = decode(message.data) or _offset(key, message)
    try:
        match record:
            case SinkRecord():
                found.sinks.append((key, record, message.time))
                return
            case SourceRecord():
                kind, positions = "spark-source", record.positions
            case StoredOffset():
                kind = "reader"
                positions = (ReadPosition(record.stream, record.created, record.seq - 1),)
            case None:
                found.others.append(key)
                return
        for at in positions:
            check_name(at.stream, "stream name")
        found.readers += [_Reader(key, kind, at, message.time) for at in positions]
    except BadSubjectError:
        found.others.append(key)


def _offset(key: str, message: StoredMsg) -> StoredOffset | None:
    try:
        return StoredOffset.decode(key, message.data, message.seq)
    except ValueError:
        return None


def _as_json(bucket: str, found: _Found) -> dict[str, Any]:
    return {
        "bucket": bucket,
        "time": found.now.isoformat(),
        "readers": [
            {
                "name": key_text(one.name),
                "kind": one.kind,
                "stream": one.at.stream,
                "position": one.at.last_read + 1,
                "lag": lag,
                "note": note or None,
                "stored": one.stored.isoformat(),
                "age": found.age(one.stored),
            }
            for one in found.readers
            for lag, note in [found.lag(one.at)]
        ],
        "sinks": [
            {
                "name": key_text(name),
                "stream": sink.stream,
                "query": sink.query,
                "batch": sink.batch,
                "rows": sink.rows,
                "already_stored": sink.already_stored,
                "dropped": sink.dropped,
                "diverted": sink.diverted,
                "stored": stored.isoformat(),
                "age": found.age(stored),
            }
            for name, sink, stored in found.sinks
        ],
        "other_keys": [key_text(key) for key in found.others],
    }


def _show(found: _Found) -> None:
    screen = console()
    readers = table("name", "stream", "position", "lag", "stored")
    for one in found.readers:
        lag, note = found.lag(one.at)
        shown = note if lag is None else f"{lag:,} ({note})" if note else f"{lag:,}"
        readers.add_row(
            key_text(one.name), one.at.stream, f"{one.at.last_read + 1:,}", shown, _ago(found.age(one.stored))
        )
    screen.print(readers if found.readers else "No reader and no query has a position in this bucket.")
    if found.sinks:
        sinks = table("name", "stream", "micro-batch", "rows", "already stored", "dropped", "diverted", "stored")
        for name, sink, stored in found.sinks:
            counts = (sink.rows, sink.already_stored, sink.dropped, sink.diverted)
            batch = "" if sink.batch is None else str(sink.batch)
            shown_counts = (f"{each:,}" for each in counts)
            sinks.add_row(key_text(name), sink.stream, batch, *shown_counts, _ago(found.age(stored)))
        screen.print(sinks)
    if found.others:
        screen.print(f"{count(len(found.others), 'other key')} of the bucket left out, which hold no position.")


def _ago(seconds: float) -> str:
    unit, size = next((each for each in _UNITS if seconds >= each[1]), _UNITS[-1])
    return f"{int(seconds // size)} {unit} ago"
