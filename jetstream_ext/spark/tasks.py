"""What a task of Spark knows about itself."""

from __future__ import annotations

import re

from pyspark import TaskContext

from jetstream_ext.spark.transactional import SinkError


def current_task() -> TaskContext:
    """Return the context of the task that calls."""
    context = TaskContext.get()
    assert context is not None
    return context


def micro_batch_of(context: TaskContext, instead: str) -> tuple[str, int]:
    """Return the query and the micro-batch of a task; `instead` says what to do where Spark does not pass them on."""
    query = context.getLocalProperty("sql.streaming.queryId")
    batch = context.getLocalProperty("streaming.sql.batchId")
    if not query or not batch:
        raise SinkError(
            "Spark did not pass the query id and the micro-batch id to this task, so the sink could not recognise replayed rows; "
            f"nothing was stored; {instead}"
        )
    return query, int(batch)


def run_of(context: TaskContext) -> str:
    """Return the id of a query's run, which repeats no micro-batch; "" if the program has given its jobs another group."""
    group = context.getLocalProperty("spark.jobGroup.id") or ""
    return group if re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", group) else ""
