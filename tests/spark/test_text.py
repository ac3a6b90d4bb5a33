"""Text that is not UTF-8, which Spark does not check: payloads are stored as their bytes, and another text makes a bad row."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig, StreamConfig
from pyspark.sql.types import LongType, MapType, StringType

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.spark.bad_rows import RowError

TEXT, WRONG = StringType(), b"a\xffb"
BATCHES = itertools.count()


@pytest.fixture
def letters(with_js: Any, stream_name: Callable[[], str]) -> Callable[[], list[tuple[bytes, str]]]:
    """The payloads and errors of dead letters on the subject ``dead.<name>``."""
    name = stream_name()
    with_js(lambda js: js.add_stream(StreamConfig(name=name, subjects=[f"dead.{name}"], allow_direct=True)))

    def read() -> list[tuple[bytes, str]]:
        found = with_js(lambda js: jsx.DirectGet(js, name).scan().to_list())
        return [(one.data, one.headers["Dead-Letter-Error"]) for one in found]

    read.subject = f"dead.{name}"  # type: ignore[attr-defined]
    return read


def check(target: Callable[..., Any], rows: list[Any], wrong: Any, reason: str, letters: Any, data: bytes) -> None:
    """Write a wrong row among others with each way to treat bad rows."""
    given = [rows[0], wrong, rows[1]]
    with pytest.raises(RowError, match=rf"partition 0 of micro-batch \d+: row 1 cannot be stored: {reason}"):
        target(onBadRow="fail").write([given], batch=next(BATCHES))
    [done] = target(onBadRow="drop").write([given], batch=next(BATCHES))
    assert (done.rows, done.dropped) == (2, 1)
    before = letters()
    [done] = target(onBadRow=letters.subject).write([given], batch=next(BATCHES))
    assert (done.rows, done.diverted) == (2, 1)
    [(payload, error)] = letters()[len(before) :]
    assert payload == data
    assert error.startswith(reason)


def test_columns_of_a_stream(cell: Any, with_js: Any, stream_name: Any, sink: Any, letters: Any) -> None:
    name = stream_name()
    config = StreamConfig(
        name=name,
        subjects=[f"{name}.*", f"_spark.{name}.>"],
        allow_batched=True,
        allow_atomic=True,
        allow_direct=True,
        allow_msg_ttl=True,
    )
    with_js(lambda js: js.add_stream(config))
    good = {"subject": f"{name}.a", "data": WRONG}
    for column, kind, value, reason in [
        ("subject", TEXT, f"{name}.".encode() + WRONG, "its subject "),
        ("headers", MapType(TEXT, TEXT), {"A": WRONG}, "its header 'A' is not UTF-8"),
        ("headers", MapType(TEXT, TEXT), {WRONG: "1"}, "its header "),
        ("msgId", TEXT, WRONG, "its header 'Nats-Msg-Id' is not UTF-8"),
        ("msgTtl", TEXT, WRONG, "its msgTtl is invalid: "),
    ]:
        for semantics in ("dedupe", "transactional", "none"):
            if column == "msgId" and semantics != "dedupe":
                continue
            with cell(column, semantics):
                more = {"sinkPartitions": "1"} if semantics == "transactional" else {}
                columns = {"subject": TEXT, "data": TEXT, column: kind}

                def target(semantics: str = semantics, columns: Any = columns, more: Any = more, **options: str) -> Any:
                    return sink(name, semantics, columns, **more, **options)

                check(target, [good, good], good | {column: value}, reason, letters, WRONG)
    found = with_js(lambda js: jsx.DirectGet(js, name).scan(subject=f"{name}.*").to_list())
    assert {one.data for one in found} == {WRONG}


def test_columns_of_a_bucket(cell: Any, with_js: Any, stream_name: Any, kv_sink: Any, letters: Any) -> None:
    bucket = stream_name()

    async def make(js: JetStreamContext) -> None:
        await kvx.enable(await js.create_key_value(KeyValueConfig(bucket=bucket, history=64)), spark=True, ttl=True)

    with_js(make)
    rows = [{"key": "a", "value": WRONG}, {"key": "b", "value": b"\xfe"}]
    for column, value, reason in [
        ("key", WRONG, "key "),
        ("operation", b"PUT\xff", "its operation "),
        ("ttl", b"\xff5s", "its ttl "),
    ]:
        with cell(column):
            kinds = {"key": TEXT, "value": TEXT, "operation": TEXT, "ttl": TEXT, "expectedRevision": LongType()}
            bad = {"key": "c", "value": WRONG, column: value}
            check(lambda **options: kv_sink(bucket, kinds, **options), rows, bad, reason, letters, WRONG)  # noqa: B023
    found = with_js(lambda js: jsx.DirectGet(js, f"KV_{bucket}").scan(subject="$KV.>").to_list())
    assert {(one.subject.rpartition(".")[2], one.data) for one in found} == {("a", WRONG), ("b", b"\xfe")}
