"""Every public call of the library against every attack: it ends in time, with a documented error, and leaves nothing.

A case is the name of an attack, a seed, and the name of a call. `run` runs many of them at once against one reference
server, each on a connection of its own.
"""

import logging
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

sys.path.extend([str(Path(__file__).parent), str(Path(__file__).parents[1] / "safety_net")])

from attacks import ATTACKS, attack
from hostile_proxy import HostileProxy
from memory_watch import MemoryWatch
from wait_matrix import CALLS, Cell, fill, run_round

from jetstream_ext.testing import ReferenceServer

TIMEOUT = 0.4
AT_ONCE = 24
# `ingest` gives up after a time without a stored message. While one after another is stored in time, it goes on.
SLOW_PROGRESS = {"from_arrow": 30.0, "ingest": 30.0}


@dataclass(frozen=True, slots=True)
class Case:
    attack: str
    seed: int
    call: str

    def __str__(self) -> str:
        return f"{self.attack}:{self.seed}:{self.call}"

    @classmethod
    def parse(cls, text: str) -> "Case":
        """Return the case whose ``str`` is `text`, for repeating it."""
        name, seed, call = text.split(":", 2)
        return cls(name, int(seed), call)

    def cell(self) -> Cell:
        lie = attack(self.attack, self.seed)
        return Cell(
            self.call,
            str(self),
            fallback=self.seed % 3 == 0,
            through=lambda port: HostileProxy(port, lie),
            longer=SLOW_PROGRESS.get(self.call, 0.0),
        )


def cases(seeds: Iterable[int]) -> Iterator[Case]:
    """Return every call with every attack, once for each seed; no two cases have the same seed of an attack."""
    for seed in seeds:
        for name in ATTACKS:
            for n, call in enumerate(CALLS):
                yield Case(name, seed * len(CALLS) + n, call)


class Logs(logging.Handler):
    """Collects what this package logs that holds something unprintable, or is long."""

    LONGEST = 5_000

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.wrong: list[str] = []
        self._logger = logging.getLogger("jetstream_ext")

    def __enter__(self) -> Self:
        self._level, self._propagates = self._logger.level, self._logger.propagate
        self._logger.setLevel(logging.DEBUG)
        self._logger.propagate = False
        self._logger.addHandler(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)
        self._logger.propagate = self._propagates

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if not text.replace("\n", "").isprintable() or len(text) > self.LONGEST:
            self.wrong.append(f"{record.pathname}:{record.lineno} logs {text[:300]!r}")


async def run(chosen: Iterable[Case]) -> list[str]:
    """Run cases, and return what is wrong in each, with what repeats it."""
    left, wrong = list(chosen), list[str]()
    with Logs() as logs:
        while left:
            # A new server from time to time: the attacks leave batches and messages on it.
            some, left = left[: 10 * AT_ONCE], left[10 * AT_ONCE :]
            async with ReferenceServer() as server:
                await fill(server)  # type: ignore[arg-type]
                cells = [case.cell() for case in some]
                for start in range(0, len(cells), AT_ONCE):
                    await run_round(server, cells[start : start + AT_ONCE], timeout=TIMEOUT)  # type: ignore[arg-type]
            wrong += [f"{cell.fault}: {cell.wrong}" for cell in cells if cell.wrong]
    return wrong + logs.wrong


FEEDS = ("endless-reply", "endless-answers", "endless-bytes", "flood")
LIMIT = 64 << 20


async def run_fed(case: Case, *, timeout: float) -> tuple[int, int]:
    """Run a case alone; return how many bytes its client was sent, and how much more memory that needed."""
    made: list[HostileProxy] = []

    def through(port: int) -> HostileProxy:
        made.append(HostileProxy(port, attack(case.attack, case.seed)))
        return made[-1]

    cell = replace(case.cell(), through=through)
    if case.attack == "endless-bytes":
        cell.fallback = False  # then these bytes reach only nats-py's own parser, which buffers them all
    async with ReferenceServer() as server:
        await fill(server)  # type: ignore[arg-type]
        async with MemoryWatch() as memory:
            await run_round(server, [cell], timeout=timeout)  # type: ignore[arg-type]
    return sum(proxy.fed for proxy in made), memory.growth
