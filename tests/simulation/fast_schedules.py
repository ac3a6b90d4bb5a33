"""Schedules by name; a mode, a kind of link and a seed determine one."""

from collections.abc import Callable, Iterator

from fast_world import World

from jetstream_ext.types import GapMode

Schedule = tuple[GapMode, bool, int]


def name_of(mode: GapMode, chaos: bool, seed: int) -> str:
    """Return the name under which `replay` finds a schedule."""
    return f"{mode.value}:{'chaos' if chaos else 'wire'}:{seed}"


def replay(name: str, trace: Callable[[str], None] | None = None) -> World:
    """Run the schedule of that name, and raise its error."""
    mode, link, seed = name.split(":")
    world = World(int(seed), GapMode(mode), chaos=link == "chaos", trace=trace)
    world.run()
    return world


def run(first: int, count: int) -> Iterator[tuple[Schedule, Exception | None]]:
    """Run `count` schedules in each mode, alternating between the links; yield each with its error, if any."""
    for seed in range(first, first + count):
        for mode in GapMode:
            schedule = mode, bool(seed % 2), seed
            try:
                replay(name_of(*schedule))
            except Exception as error:
                yield schedule, error
            else:
                yield schedule, None
