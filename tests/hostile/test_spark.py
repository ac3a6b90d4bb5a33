"""A hostile server: every job of the Spark formats ends, with a documented error that can be printed, in little memory.

CI runs a sample; ``nox -s full -- hostile`` runs every job with every attack. A failure begins with the case that failed. To
repeat it: ``JETSTREAM_EXT_HOSTILE='texts:7:read' python -m pytest tests/hostile/test_spark.py``.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

sys.path.extend([str(Path(__file__).parent), str(Path(__file__).parents[1] / "safety_net")])

pytest.importorskip("pyspark")

from attacks import ATTACKS, attack
from hostile_proxy import HostileProxy
from library_cases import LIMIT, Case
from wait_matrix import fill

from jetstream_ext.testing import ReferenceServer

FULL = bool(os.environ.get("JETSTREAM_EXT_FULL"))
SECRET = "correct-horse"
PROCESSES = 4 if FULL else 1  # a write that nothing answers waits for half a minute
SECONDS = 100.0  # a write gives up half a minute after the last stored row
JOBS: dict[str, Mapping[str, str]] = {
    "read": {"stream": "R0"},
    "read_kv": {"bucket": "B0"},
    "follow": {"stream": "R0"},
    "write": {"stream": "W0"},
}
# nats-py's error, which this package's derive from, and those of the options and of the offsets of a checkpoint.
DOCUMENTED = {"Error", "ValueError"}


class SparkProcess:
    """A process that does one job of a Spark worker after another."""

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("spark_program.py")),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=os.environ | {"HOSTILE_PASSWORD": SECRET},
            limit=1 << 24,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.communicate()

    async def run(self, job: str, options: Mapping[str, str]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"job": job, "options": options}).encode() + b"\n")
        answer: dict[str, Any] = json.loads(await self._process.stdout.readline())
        return answer


def chosen() -> list[Case]:
    if repeated := os.environ.get("JETSTREAM_EXT_HOSTILE"):
        return [case for case in map(Case.parse, repeated.split(",")) if case.call in JOBS]
    if FULL:
        return [Case(name, seed, job) for seed in range(4) for name in ATTACKS for job in JOBS]
    sample = "none:1:read none:1:read_kv none:1:follow none:1:write texts:1:read headers:2:read json:3:read_kv texts:4:follow"
    return [Case.parse(text) for text in (sample + " refusal:5:write endless-reply:6:read errors:9:read").split()]


async def run_case(case: Case, spark: SparkProcess) -> dict[str, Any]:
    async with ReferenceServer() as server:
        await fill(server)  # type: ignore[arg-type]
        async with HostileProxy(server.port, attack(case.attack, case.seed), armed=True) as proxy:
            timeout = "30" if case.attack == "none" else "1"
            login = {
                "servers": proxy.url,
                "user": "alice",
                "passwordEnv": "HOSTILE_PASSWORD",
                "requestTimeout": timeout,
            }
            return await asyncio.wait_for(spark.run(case.call, {**login, **JOBS[case.call]}), SECONDS)


def wrong(answer: Mapping[str, Any], *, before: int) -> str:
    """Return what no hostile server may cause, or an empty text; `before` is the memory before the job."""
    kinds, text = answer["kinds"], answer["text"]
    if kinds and not DOCUMENTED.intersection(kinds):
        return f"raises {kinds[0]}: {text[:500]!r}"
    if not text.replace("\n", "").isprintable() or SECRET in text:
        return f"raises {kinds[0]}, whose text cannot be shown: {text[:500]!r}"
    if answer["memory"] - before > LIMIT:
        return f"needed {answer['memory'] - before >> 20} MiB more memory"
    return ""


async def run_all(waiting: Iterator[Case], found: list[str]) -> None:
    """Run cases in one process after another: a job that does not end takes its process with it."""
    while case := next(waiting, None):
        async with SparkProcess() as spark:
            try:
                while case:
                    before = (await spark.run("read", {}))["memory"]
                    answer = await run_case(case, spark)
                    if case.attack == "none" and not answer["rows"]:
                        found.append(f"{case}: fails without an attack: {answer}")
                    if text := wrong(answer, before=before):
                        found.append(f"{case}: {text}")
                    case = next(waiting, None)
            except TimeoutError:
                found.append(f"{case}: does not end")


@pytest.mark.timeout(3600 if FULL else 300)
async def test_every_job_ends_with_an_error_that_spark_can_log() -> None:
    found, waiting = list[str](), iter(chosen())
    await asyncio.gather(*(run_all(waiting, found) for _ in range(PROCESSES)))
    assert not found, "\n".join(found)


def test_the_campaign_finds_what_is_wrong() -> None:
    good = {"kinds": [], "text": "", "memory": 5, "rows": 1}
    assert wrong(good, before=5) == ""
    assert "KeyError" in wrong(good | {"kinds": ["KeyError", "Exception"], "text": "seq"}, before=5)
    documented = {"kinds": ["ConnectError", "JetStreamExtError", "Error"]}
    assert wrong(good | documented | {"text": "no connection"}, before=5) == ""
    assert "cannot be shown" in wrong(good | documented | {"text": "\x1b]0;title\x07"}, before=5)
    assert "cannot be shown" in wrong(good | documented | {"text": f"alice:{SECRET}@h"}, before=5)
    assert "memory" in wrong(good | {"memory": LIMIT + 6}, before=5)
