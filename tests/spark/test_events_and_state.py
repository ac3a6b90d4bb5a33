"""The example of docs/spark.md that reads the state of a worker."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import StoredMsg, log
from jetstream_ext.testing import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = Path(__file__).parents[2] / "docs" / "spark.md"


def test_the_example_reads_the_state_of_a_worker(
    spark: SparkSession, server: NatsServer, with_js: Any, stream_name: Callable[[], str]
) -> None:
    if not PAGE.is_file():
        pytest.skip("no documentation beside the tests")
    sold, tally = stream_name(), stream_name()

    def count(msg: StoredMsg, state: log.State) -> None:
        product = msg.subject.split(".")[1]
        if product == "end":
            del state["milk"]
        else:
            state[product] = b"%d" % (int(state.get(product, 0)) + 1)

    async def work(js: JetStreamContext) -> None:
        await jsx.ensure_stream(js, name=sold, subjects=[f"{sold}.>"], allow_direct=True)
        options = {"allow_direct": True, "allow_atomic": True, "allow_rollup_hdrs": True}
        await jsx.ensure_stream(js, name=tally, subjects=[f"{tally}.>"], **options)
        for product in ("tea", "milk", "tea", "end"):
            await js.publish(f"{sold}.{product}")
        places = {"prefix": f"{tally}.at", "state": f"{tally}.state"}
        await log.exactly_once(log.LogReader(js, sold), tally, count, name="w", max_messages=1, **places)
        await js.publish(f"{tally}.state.w.old", headers={"Nats-Marker-Reason": "MaxAge"})

    with_js(work)
    [example] = re.findall(
        r"```python\n(from pyspark[^`]*counts = .*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    for here, there in (("nats://localhost:4222", server.url), ("tally.state", f"{tally}.state"), ("TALLY", tally)):
        example = example.replace(here, there)
    names: dict[str, Any] = {"spark": spark}
    exec(example, names)
    assert [tuple(row) for row in names["counts"].collect()] == [(f"{tally}.state.w.tea", "2")]
    options = {"servers": server.url, "subjects": f"{tally}.state.*.milk"}
    *_, last = spark.read.format("jetstream").options(**options).load(tally).orderBy("seq").collect()
    assert (bytes(last.data), last.headers["KV-Operation"]) == (b"", ["DEL"])
