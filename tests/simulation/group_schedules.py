"""Schedules of the members of a group, by name: ``group:calm:4711``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from group_world import World


def name_of(seed: int, wild: bool) -> str:
    return f"group:{'wild' if wild else 'calm'}:{seed}"


def replay(name: str, trace: Callable[[str], None] | None = None) -> None:
    _, mode, seed = name.split(":")
    World(int(seed), wild=mode == "wild", trace=trace).run()


def run(first: int, count: int) -> Iterator[tuple[str, Exception | None]]:
    """Run `count` schedules of each mode; yield each name, and the error if it failed."""
    for seed in range(first, first + count):
        for wild in (False, True):
            name = name_of(seed, wild)
            try:
                replay(name)
            except Exception as error:
                yield name, error
            else:
                yield name, None
