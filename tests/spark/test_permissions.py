"""The table of permissions in docs/spark.md: a user with only the permissions of a row can read or write."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING

import nats
import pytest

from jetstream_ext import kv as kvx
from jetstream_ext.testing import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = Path(__file__).parents[2] / "docs" / "spark.md"
ROWS = ["reading", "writing, dedupe or none", "writing, transactional", "buckets"]
STREAM = "S"
OPTIONS = {"allow_direct": True, "allow_atomic": True, "allow_batched": True}


def allowed(row: str) -> list[str]:
    """Return the subjects that a row allows, for stream S with the subjects s.> and for bucket B."""
    table = PAGE.read_text(encoding="utf-8").partition("## Permissions")[2]
    cells = dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", table.replace("`", ""), re.MULTILINE))
    stream = "KV_B" if row == "buckets" else STREAM
    wanted = cells["reading"] if row == "buckets" else cells[row]
    inherited = allowed("writing, dedupe or none") if "the same" in wanted else []
    named = [subject.replace("<S>", stream) for subject in re.findall(r"[\w$.<>]+\.[\w$.<>]+", wanted)]
    return [*inherited, *named, *(["s.>"] if "rows' subjects" in wanted else [])]


def test_the_table_of_permissions_is_parsed() -> None:
    assert allowed("reading") == ["$JS.API.STREAM.INFO.S", "$JS.API.DIRECT.GET.S", "$JS.API.STREAM.MSG.GET.S"]
    assert allowed("writing, dedupe or none") == ["$JS.API.STREAM.INFO.S", "$JS.API.STREAM.NAMES", "s.>"]
    assert set(allowed("writing, transactional")) == {
        "$JS.API.STREAM.INFO.S", "$JS.API.STREAM.NAMES", "s.>", "_spark.S.>", "$JS.API.STREAM.MSG.GET.S"
    }  # fmt: skip
    assert allowed("buckets")[0] == "$JS.API.STREAM.INFO.KV_B"


async def prepare(url: str) -> None:
    async with await nats.connect(url, user="admin", password="x", connect_timeout=10) as nc:
        js = nc.jetstream()
        await js.add_stream(name=STREAM, subjects=["s.>", "_spark.S.>"], **OPTIONS)
        await js.publish("s.a", b"1")
        kv = await kvx.enable(await js.create_key_value(bucket="B"))
        await kv.put("k", b"1")


async def stored(url: str) -> int:
    async with await nats.connect(url, user="admin", password="x", connect_timeout=10) as nc:
        info = await nc.jetstream().stream_info(STREAM, subjects_filter="s.>")
        return sum((info.state.subjects or {}).values())


@pytest.mark.parametrize("row", ROWS)
def test_the_permissions_of_a_row_suffice(spark: SparkSession, row: str) -> None:
    publish = ", ".join(f'"{subject}"' for subject in allowed(row))
    user = f'{{ user: some, password: correct-horse-battery, permissions: {{ publish: [{publish}], subscribe: "_INBOX.>" }} }}'
    with NatsServer(config=f"authorization {{ users: [ {{ user: admin, password: x }}, {user} ] }}") as server:
        asyncio.run(prepare(server.url))
        options = {"servers": server.url, "user": "some", "passwordEnv": "JETSTREAM_EXT_TEST_PASSWORD"}
        if row == "reading":
            assert spark.read.format("jetstream").options(**options).load(STREAM).count() == 1
        elif row == "buckets":
            assert spark.read.format("jetstream_kv").options(**options).load("B").count() == 1
        else:
            semantics = ["transactional"] if "transactional" in row else ["dedupe", "none"]
            for each in semantics:
                rows = spark.createDataFrame([("s.b", b"2"), ("s.c", b"3")], "subject string, data binary")
                sink = rows.write.format("jetstream").options(**options, stream=STREAM, semantics=each)
                sink.mode("append").save()
            assert asyncio.run(stored(server.url)) == 1 + 2 * len(semantics)
