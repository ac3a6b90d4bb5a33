"""A listener that reports how far streaming queries are in each stream, from what Spark says about their micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetstream_ext.protocol.options import check_function, check_not_coroutine
from jetstream_ext.spark.offsets import lag, sequences_read
from jetstream_ext.text import counted, get_logger

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import StreamingQueryListener
else:
    try:
        from pyspark.sql.streaming.listener import StreamingQueryListener
    except ImportError:  # where the documentation is built

        class StreamingQueryListener:
            """Stand in for the class of PySpark."""


_log = get_logger("spark")


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """What one micro-batch of a query did in one stream.

    Attributes:
        query: The query's name, or its id if it has none.
        batch: The id of the micro-batch.
        stream: The stream.
        last_read: The last sequence that the query has read.
        read: How many sequences the micro-batch covers; there are fewer rows where some are gone or filtered out.
        rows: How many rows it had; None if the source reads several streams, because Spark counts them together.
        rate: Rows a second that the query processed; None as for `rows`, or if Spark reports none.
        lag: How many sequences the stream is ahead; None before Spark 4.2, which does not report it.
    """

    query: str
    batch: int
    stream: str
    last_read: int
    read: int
    rows: int | None
    rate: float | None
    lag: int | None


class ProgressListener(StreamingQueryListener):
    """Reports the progress of the session's streaming queries that read `jetstream` sources.

    ::

        spark.streams.addListener(ProgressListener(lambda one: gauge.labels(one.query, one.stream).set(one.lag or 0)))

    Each report is also a record of the logger ``jetstream_ext.spark`` (INFO), of which it is the attribute ``progress``. Spark
    reports each micro-batch that had something to do, and nothing of a query that is idle.

    Args:
        on_progress: Called with the progress of each stream, on Spark's thread for listeners: it should return soon. An
            exception that it raises is logged. Not an async function.
    """

    def __init__(self, on_progress: Callable[[StreamProgress], object] | None = None) -> None:
        if on_progress is not None:
            check_function(on_progress, "on_progress", "a function or None", awaited=False)
        self._on_progress = on_progress

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name, as the next ones
        """Do nothing: a query that has started has read nothing."""

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        """Report the streams of a micro-batch."""
        for one in progress_of(event.progress):
            _log.info(
                "query %r: micro-batch %d read %s of stream %r up to sequence %d%s",
                one.query,
                one.batch,
                counted(one.read, "sequence") if one.rows is None else counted(one.rows, "row"),
                one.stream,
                one.last_read,
                "" if one.lag is None else f", which is {one.lag} behind its end",
                extra={"progress": one},
            )
            if self._on_progress is not None:
                try:
                    check_not_coroutine(self._on_progress(one), "the function on_progress")
                except Exception:
                    _log.exception("query %r: the function on_progress raised", one.query)

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        """Do nothing: Spark says nothing about the position of an idle query."""

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        """Do nothing: Spark logs why a query ended."""


def progress_of(progress: Any) -> list[StreamProgress]:
    """Return the progress in each stream of a ``StreamingQueryProgress``, sorted by stream for each source."""
    found: list[StreamProgress] = []
    for source in progress.sources:
        behind = lag({"sources": [source]})
        read = sequences_read(source)
        alone = len(read) == 1
        rate = source.processedRowsPerSecond if alone else None
        found += [
            StreamProgress(
                query=progress.name or str(progress.id),
                batch=progress.batchId,
                stream=stream,
                last_read=last,
                read=count,
                rows=source.numInputRows if alone else None,
                rate=rate if rate is not None and math.isfinite(rate) else None,
                lag=behind.get(stream),
            )
            for stream, (last, count) in sorted(read.items())
        ]
    return found
