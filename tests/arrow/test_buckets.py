"""Snapshots of buckets as tables."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest
from nats.js import JetStreamContext

from jetstream_ext import arrow
from jetstream_ext import kv as kvx
from jetstream_ext.testing import NatsServer

INTERNALS = pytest.mark.internals("nats-py's headers have U+FFFD for other bytes than UTF-8")


async def test_a_snapshot_is_a_table_with_every_value(js: JetStreamContext, stream_name: Callable[[], str]) -> None:
    bucket = await js.create_key_value(bucket=stream_name(), direct=True)
    assert (await kvx.snapshot(bucket)).to_arrow().schema == arrow.BUCKET_SCHEMA
    await bucket.put("a", b"\0\xff")
    await bucket.put("b", b"")
    snapshot = await kvx.snapshot(bucket)
    table = snapshot.to_arrow()
    table.validate(full=True)
    assert table.schema == arrow.BUCKET_SCHEMA
    assert sorted(table.to_pylist(), key=lambda row: row["key"]) == [
        {
            "bucket": entry.bucket,
            "key": key,
            "value": entry.value,
            "revision": entry.revision,
            "created": entry.created,
            "operation": "PUT",
        }
        for key, entry in sorted(snapshot.items())
    ]
    schema = pa.schema(
        [("revision", pa.int64()), ("key", pa.large_string()), ("created", pa.timestamp("ns", tz="UTC"))]
    )
    assert snapshot.to_arrow(schema=schema).schema == schema
    with pytest.raises(
        ValueError, match="there is no column 'seq'; the columns are bucket, key, value, revision, created"
    ):
        snapshot.to_arrow(schema=arrow.SCHEMA.remove(0))
    with pytest.raises(
        arrow.ConversionError, match=r"the entry of key 'a' does not fit column 'value', which is string"
    ):
        snapshot.to_arrow(schema=pa.schema([("value", pa.string())]))


@INTERNALS
async def test_a_key_that_is_not_utf_8_needs_binary(
    js: JetStreamContext, server: NatsServer, stream_name: Callable[[], str], publish_raw: Callable[..., None]
) -> None:
    bucket = await js.create_key_value(bucket=stream_name(), direct=True)
    name = (await bucket.status()).bucket
    publish_raw(server, [(f"$KV.{name}.".encode() + b"\xff", b"x")])
    snapshot = await kvx.snapshot(bucket)
    with pytest.raises(
        arrow.ConversionError, match=rf"bucket '{name}': the entry of key .*pyarrow.binary\(\) can hold it"
    ):
        snapshot.to_arrow()
    assert snapshot.to_arrow(schema=pa.schema([("key", pa.binary())])).to_pylist() == [{"key": b"\xff"}]
