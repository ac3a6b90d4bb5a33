"""The `jetstream_kv` data source: a bucket as a table, read through `jetstream_ext.kv`.

The driver lists the keys and pins the revision, as of which each executor reads some of the keys with `kv.snapshot`.
If a value at that revision is no longer stored, ``consistency=latest`` reads the present one, and ``strict`` fails.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from nats.js import JetStreamContext
from nats.js.errors import BadBucketError, InvalidKeyError
from nats.js.kv import KeyValue
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import BinaryType, DataType, LongType, StringType, StructType, TimestampType

from jetstream_ext.client.connection import open_bucket
from jetstream_ext.errors import HistoryUnavailableError
from jetstream_ext.kv import KeyValueEntry, snapshot
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.reads import resolve_revision
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
    keys: tuple[str, ...]
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
    keys = sorted(await bucket.list_keys(options.keys))
    if not keys or not revision:
        return []
    parts = max(min(options.min_partitions, len(keys)), -(-len(keys) // _KEYS_PER_PARTITION))
    _log.debug("planned %d partitions of bucket %r: %d keys at revision %d", parts, options.bucket, len(keys), revision)
    cuts = [len(keys) * part // parts for part in range(parts + 1)]
    return [KeyRange(tuple(keys[start:stop]), revision) for start, stop in pairwise(cuts)]


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
    """Yield the entries of a part, some at a time; raise HistoryUnavailableError if a strict read lacks one."""
    bucket = open_bucket(context, options.bucket)
    for first in range(0, len(part.keys), _KEYS_AT_ONCE):
        keys = part.keys[first : first + _KEYS_AT_ONCE]
        entries, unavailable = await _snapshot(bucket, keys, part.revision, options)
        if unavailable:
            if options.strict:
                raise HistoryUnavailableError(
                    f"bucket {options.bucket!r} at revision {part.revision}: the history needed for {len(unavailable)} of "
                    f"{len(part.keys)} keys (such as {unavailable[0]!r}) is no longer stored; keep more history, or use "
                    "consistency=latest",
                    keys=unavailable,
                )
            entries |= (await _snapshot(bucket, unavailable, None, options))[0]
        if entries:
            yield list(entries.values())


async def _snapshot(
    bucket: KeyValue, keys: Sequence[str], revision: int | None, options: KvOptions
) -> tuple[dict[str, KeyValueEntry], tuple[str, ...]]:
    """Return the entries of `keys` at a revision (None is now), and the keys whose entry is no longer known."""
    read = partial(snapshot, bucket, at=revision, strict=False, include_deletes=options.include_deleted)
    try:
        found = await read(keys)
    except InvalidKeyError:
        # Clients refuse such a key, but any publisher can store it. It is read with the whole bucket.
        found = await read(None)
    wanted = frozenset(keys)
    entries = {key: entry for key, entry in found.items() if key in wanted}
    return entries, tuple(key for key in found.unavailable if key in wanted)


def _batch(schema: StructType, entries: Sequence[KeyValueEntry]) -> RecordBatch:
    import pyarrow as pa

    types = {"value": pa.binary(), "revision": pa.int64(), "created": pa.timestamp("us", tz="UTC")}
    fields = [
        pa.field(field.name, types.get(field.name, pa.string()), nullable=field.nullable) for field in schema.fields
    ]
    columns = [pa.array([getattr(entry, field.name) for entry in entries], field.type) for field in fields]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))
