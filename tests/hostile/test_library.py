"""A hostile server: every call of the library ends in time, with a documented error, and needs little memory.

CI runs a sample; ``nox -s full -- hostile`` runs every call with every attack, for several seeds. A failure begins with the
case that failed. To repeat it: ``JETSTREAM_EXT_HOSTILE='texts:74:ingest' python -m pytest tests/hostile/test_library.py``.
"""

import asyncio
import logging
import os
import sys
import warnings
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

sys.path.extend([str(Path(__file__).parent), str(Path(__file__).parents[1] / "safety_net")])

from attacks import ATTACKS
from library_cases import FEEDS, LIMIT, Case, cases, run, run_fed
from wait_matrix import CALLS, Try, plain

# nats-py leaves the sockets of lost connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored .*<function (StreamWriter|_SelectorTransport)")
FULL = bool(os.environ.get("JETSTREAM_EXT_FULL"))
GIVEN = [Case.parse(text) for text in os.environ.get("JETSTREAM_EXT_HOSTILE", "").split(",") if text]
REPEATED = [case for case in GIVEN if case.call in CALLS]
SEEDS = range(1, 4)
PART = 500


def parts() -> Iterator[list[Case]]:
    """Return the cases of each test: the ones to repeat, or all, or one of every call with the attacks in turn."""
    if REPEATED:
        yield REPEATED
    elif FULL:
        every = list(cases(SEEDS))
        yield from (every[start : start + PART] for start in range(0, len(every), PART))
    else:
        attacks = sorted(ATTACKS)
        yield [Case(attacks[n % len(attacks)], n, call) for n, call in enumerate(CALLS)]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Keep nats-py's tracebacks about hostile bytes out of the report."""
    logger = logging.getLogger("nats.aio.client")
    level, logger.level = logger.level, logging.CRITICAL
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "jetstream_ext does not know the internals", RuntimeWarning)
        yield
    logger.level = level


@pytest.mark.parametrize("part", [pytest.param(part, id=f"{part[0]}...{part[-1]}") for part in parts()])
async def test_every_call_ends_in_time_with_a_documented_error_and_leaves_nothing(part: list[Case]) -> None:
    wrong = await run(part)
    assert not wrong, "\n".join(wrong)


def fed() -> list[Case]:
    if REPEATED:
        return [case for case in REPEATED if case.attack in FEEDS]
    calls = list(CALLS) if FULL else ["DirectGet.scan", "FastPublisher.add_many (gaps ok)"]
    return [Case(name, n, call) for name in FEEDS for n, call in enumerate(calls, 1)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
async def test_a_server_that_sends_without_end_does_not_fill_the_memory() -> None:
    wrong = []
    for case in fed():
        sent, growth = await run_fed(case, timeout=2.0 if FULL else 0.6)
        if growth > LIMIT:
            wrong.append(f"{case}: the server sent {sent >> 20} MiB, and {growth >> 20} MiB more memory was needed")
    assert not wrong, "\n".join(wrong)


async def _raise(t: Try) -> None:
    raise KeyError("seq")


async def _keep(t: Try) -> None:
    kept = bytearray(b"x") * (2 * LIMIT)
    await asyncio.sleep(t.timeout / 2)  # many times what the watch waits between two looks
    assert kept


async def test_the_campaign_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    wrongs: dict[str, Callable[[Try], Awaitable[object]]] = {
        "raised KeyError": _raise,
        "still waits": lambda t: asyncio.Event().wait(),
        "subscriptions are left": lambda t: t.nc.subscribe("left"),
    }
    for found, call in wrongs.items():
        monkeypatch.setitem(CALLS, "features", plain(call))
        (wrong,) = await run([Case("none", 1, "features")])
        assert wrong.startswith("none:1:features: ")
        assert found in wrong


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
async def test_the_campaign_finds_a_call_that_needs_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CALLS, "features", plain(_keep))
    _, growth = await run_fed(Case("none", 1, "features"), timeout=0.6)
    assert growth > LIMIT
