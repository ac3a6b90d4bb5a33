"""The record of the benchmarks: figures by group, case and measure, with the machine and the versions.

{"taken": …, "quick": …, "machine": {…}, "versions": {…},
 "groups": {group: {"conditions": {…}, "figures": {case: {measure: {"min", "median", "max", "runs"}}}}}}
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jetstream_ext.testing import NatsServer

RATE = "messages/s"
CLIENT, SERVER = "client CPU, µs", "server CPU, µs"
WORKERS = "CPU of Spark's Python workers, µs"
Case = Callable[[], Awaitable[int]]
Json = dict[str, Any]


class Group:
    """The figures of cases that run in turn."""

    def __init__(self, name: str, **conditions: object) -> None:
        self.name = name
        self.conditions = conditions
        self._runs: dict[str, dict[str, list[float]]] = {}

    def note(self, case: str, measure: str, value: float) -> None:
        """Add a run's figure."""
        self._runs.setdefault(case, {}).setdefault(measure, []).append(value)

    def as_json(self) -> Json:
        figures = {
            case: {measure: summary(runs) for measure, runs in measures.items()}
            for case, measures in self._runs.items()
        }
        return {"conditions": self.conditions, "figures": figures}


def summary(runs: list[float]) -> Json:
    """Return the minimum, the median, the maximum and the runs of a figure."""
    rounded = [float(f"{run:.5g}") for run in runs]
    return {"min": min(rounded), "median": statistics.median(rounded), "max": max(rounded), "runs": rounded}


class Clock:
    """Measures time, and the CPU time of this process and of its children, usually one server."""

    def __init__(self) -> None:
        self._server = descendants_cpu()  # it reads files, so it comes before the other clocks start
        self._client = time.process_time()
        self._wall = time.perf_counter()

    def note(self, group: Group, case: str, count: int) -> None:
        """Record the cost of `count` messages since the object was created."""
        wall = time.perf_counter() - self._wall
        client = time.process_time() - self._client
        server = descendants_cpu() - self._server
        group.note(case, RATE, count / wall)
        group.note(case, CLIENT, client / count * 1e6)
        group.note(case, SERVER, server / count * 1e6)


def descendants_cpu(name: str = "") -> float:
    """Return the CPU seconds of the living processes below this one, or of those with a `name`; 0 where there is no /proc."""
    ticks = os.sysconf("SC_CLK_TCK")
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = path.read_text().rpartition(")")
            fields = tail.split()
        except OSError:
            continue
        pid = int(path.parent.name)
        parents[pid] = int(fields[1])
        if name in head:
            used[pid] = sum(map(int, fields[11:15])) / ticks  # with the time of its children that have ended
    total = 0.0
    for pid, seconds in used.items():
        ancestor = parents[pid]
        while ancestor > 1 and ancestor != os.getpid():
            ancestor = parents.get(ancestor, 0)
        total += seconds if ancestor == os.getpid() else 0.0
    return total


def whole(groups: Mapping[str, Json], *, quick: bool, load: float) -> Json:
    """Return the record of some groups.

    Args:
        groups: What the groups measured.
        quick: Whether it was with sizes that prove only that it runs.
        load: The machine's load before it began.
    """
    with NatsServer() as server:
        server_version = server.version
    return {
        "taken": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "machine": {
            "cpu": _cpu(),
            "cpus": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "os": f"{platform.system()} {platform.release()}",
            "load_before": round(load, 2),
        },
        "versions": {
            "python": platform.python_version(),
            "nats_server": server_version,
            **{name: version(distribution) for name, distribution in _distributions(groups).items()},
        },
        "groups": dict(groups),
    }


def _distributions(groups: Iterable[str]) -> dict[str, str]:
    spark = {"pyspark": "pyspark"} if any(name.startswith("spark") for name in groups) else {}
    return {"nats_py": "nats-py", "jetstream_ext": "nats-jetstream-ext", **spark}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
