"""What a task of Spark knows about itself."""

from __future__ import annotations

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
