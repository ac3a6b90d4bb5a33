"""The Spark application that this process works for, and the name that its connections get from it."""

from __future__ import annotations

import os
import re
from typing import Final, Literal

_ID: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_YARN_CONTAINER: Final = re.compile(r"container_(?:e\d+_)?(\d+_\d+)_\d+_\d+")


def connection_name(role: Literal["driver", "executor"], application: str | None = None) -> str:
    """Return the name of a connection in the server's list: ``spark-<application>-<role>``.

    Without an application that is given or can be found out, it is ``spark-<role>``.
    """
    application = application or application_id()
    return f"spark-{application}-{role}" if application else f"spark-{role}"


def application_id() -> str | None:
    """Return the id of the Spark application, or None where this process cannot know it.

    A task has it in its local properties. The processes that plan for the driver have no task: only Kubernetes, and YARN in
    cluster mode, tell it to them, by environment variables.
    """
    from pyspark import TaskContext  # optional, and slow to import

    task = TaskContext.get()
    container = _YARN_CONTAINER.fullmatch(os.environ.get("CONTAINER_ID", ""))
    for found in (
        task.getLocalProperty("spark.app.id") if task is not None else None,
        os.environ.get("SPARK_APPLICATION_ID"),
        f"application_{container[1]}" if container else None,
    ):
        if found and _ID.fullmatch(found):
            return found
    return None
