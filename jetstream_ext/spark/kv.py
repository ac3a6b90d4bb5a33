"""The `jetstream_kv` data source: a bucket as a table, read through `jetstream_ext.kv`.

The driver lists the keys and pins the revision, as of which each executor reads some of the keys with `kv.snapshot`.
If a value at that revision is no longer stored, ``consistency=latest`` reads the present one, and ``strict`` fails.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from nats.js import JetStreamContext
from nats.js.errors import BadBucketError
from nats.js.kv import KeyValue
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import BinaryType, DataType, LongType, StringType, StructType, TimestampType

from jetstream_ext.client.connection import open_bucket
from jetstream_ext.errors import HistoryUnavailableError
from jetstream_ext.kv import KeyValueEntry, snapshot
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import is_key, key_text
from jetstream_ext.kv.reads import resolve_revision
from jetstream_ext.protocol.subjects import matcher
from jetstream_ext.spark.connection import ask, connected, run_on_driver
from jetstream_ext.spark.options import KvOptions
from jetstream_ext.spark.planning import PlanningError, state_of
from jetstream_ext.spark.source import check_schema, schema_of
from jetstream_ext.text import get_logger

if TYPE_CHECKING:
    from pyarrow import RecordBatch

_log = get_logger("spark")

_COLUMNS: Final[dict[str, DataType]] = {
    "bucket": StringType(),
    "key": StringType(),
    "value": BinaryType(),
    "revision": LongType(),
    "created": TimestampType(),
    "operation": StringType(),
}
_KEYS_PER_PARTITION: Final = 50_000
_KEYS_AT_ONCE: Final = 10_000


class JetStreamKvDataSource(DataSource):
    """The `jetstream_kv` format: a key-value bucket as a table of its keys, as of one revision.

    Columns: ``bucket string, key string, value binary, revision long, created timestamp, operation string``.

    The options, and the permissions and servers that they need, are in the documentation (Spark, "Options"). A wrong
    option or schema is an error on the driver: `OptionError`, `SchemaError`.
    """

    @classmethod
    def name(cls) -> str:
        return "jetstream_kv"

    def schema(self) -> StructType:
        """Return all columns, after a check of the options, so that ``load()`` raises their errors."""
        KvOptions.parse(self.options)
        return schema_of(_COLUMNS)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = KvOptions.parse(self.options)
        check_schema(schema, _COLUMNS)
        return JetStreamKvReader(options, schema)


class JetStreamKvReader(DataSourceReader):
    def __init__(self, options: KvOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        parts = run_on_driver(self._options.connection, lambda context: plan_kv(context, self._options))
        return [InputPartition(part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        return read_keys(self._options, self._schema, partition.value)


@dataclass(frozen=True, slots=True)
class KeyRange:
    keys: tuple[str, ...] | None  # None: those that clients refuse
    revision: int  # as of which they are read


async def plan_kv(context: JetStreamContext, options: KvOptions) -> list[KeyRange]:
    kv = open_bucket(context, options.bucket)
    bucket = Bucket(kv)
    state = await state_of(context, bucket.stream)
    if state is None:
        raise PlanningError(
            f"bucket {options.bucket!r} does not exist; check 'bucket', 'servers', 'domain' and 'apiPrefix'"
        )
    try:
        bucket.check(state)
        revision = state.last_seq
        if (as_of := options.as_of) is not None:
            point = await ask(bucket.timeout, lambda left: resolve_revision(Bucket(kv, left), state, as_of))
            revision = point.revision
    except BadBucketError as error:
        raise PlanningError(f"option 'bucket': {error.description}") from error
    except ValueError as error:
        raise PlanningError(f"option 'asOf': {error}") from error
    # Listed afterwards, so that no key of that revision is missing.
    listed = await bucket.list_keys(options.keys)
    keys = sorted(filter(is_key, listed))
    if not listed or not revision:
        return []
    parts = max(min(options.min_partitions, len(keys)), -(-len(keys) // _KEYS_PER_PARTITION))
    cuts = [len(keys) * part // parts for part in range(parts + 1)] if parts else []
    ranges = [KeyRange(tuple(keys[start:stop]), revision) for start, stop in pairwise(cuts)]
    if len(keys) < len(listed):
        ranges.append(KeyRange(None, revision))
    _log.debug(
        "planned %d partitions of bucket %r: %d keys at revision %d", len(ranges), options.bucket, len(listed), revision
    )
    return ranges


def read_keys(options: KvOptions, schema: StructType, part: KeyRange | None) -> Iterator[RecordBatch]:
    """Read the keys of `part` as record batches; `part` is None if Spark reads an empty plan."""
    if part is None:
        return
    with connected(options.connection, "executor") as (lease, context):
        for entries in lease.iterate(_read(context, options, part)):
            yield _batch(schema, entries)


async def _read(
    context: JetStreamContext, options: KvOptions, part: KeyRange
) -> AsyncGenerator[list[KeyValueEntry], None]:
    """Yield the entries of a part, some at a time (perhaps none); raise HistoryUnavailableError if a strict read lacks one."""
    bucket = open_bucket(context, options.bucket)
    if part.keys is None:
        # Any publisher can store keys that clients refuse. They cannot be asked for, so other keys are read with them.
        matches = matcher(options.keys)
        yield await _read_some(bucket, None, part.revision, options, lambda key: matches(key) and not is_key(key))
        return
    for first in range(0, len(part.keys), _KEYS_AT_ONCE):
        keys = part.keys[first : first + _KEYS_AT_ONCE]
        yield await _read_some(bucket, keys, part.revision, options)


async def _read_some(
    bucket: KeyValue,
    keys: Sequence[str] | None,
    revision: int,
    options: KvOptions,
    wanted: Callable[[str], bool] = lambda _: True,
) -> list[KeyValueEntry]:
    """Return the entries of the wanted keys among `keys` (None: all) at a revision, or else now if that is no longer stored.

    A strict read raises HistoryUnavailableError instead.
    """
    read = partial(snapshot, bucket, strict=False, include_deletes=options.include_deleted)
    found = await read(keys, at=revision)
    entries = {key: entry for key, entry in found.items() if wanted(key)}
    unavailable = tuple(filter(wanted, found.unavailable))
    if unavailable and options.strict:
        raise HistoryUnavailableError(
            f"bucket {options.bucket!r} at revision {revision}: the history needed for {len(unavailable)} of "
            f"{len(entries) + len(unavailable)} keys (such as {unavailable[0]!r}) is no longer stored; keep more history, or "
            "use consistency=latest",
            keys=unavailable,
        )
    if unavailable:
        now = await read(None if keys is None else unavailable)
        entries |= {key: now[key] for key in unavailable if key in now}
    return list(entries.values())


def _batch(schema: StructType, entries: Sequence[KeyValueEntry]) -> RecordBatch:
    import pyarrow as pa

    types = {"value": pa.binary(), "revision": pa.int64(), "created": pa.timestamp("us", tz="UTC")}
    fields = [
        pa.field(field.name, types.get(field.name, pa.string()), nullable=field.nullable) for field in schema.fields
    ]
    columns = [pa.array([_cell(entry, field.name) for entry in entries], field.type) for field in fields]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _cell(entry: KeyValueEntry, column: str) -> object:
    # NATS accepts any bytes in a key; Spark's strings are UTF-8.
    return key_text(entry.key) if column == "key" else getattr(entry, column)
