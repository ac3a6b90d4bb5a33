"""Schedules of whole calls by name; a kind of call and a seed determine one."""

from collections.abc import Callable, Iterable, Iterator

from call_world import JOBS, World


def replay(name: str, trace: Callable[[str], None] | None = None) -> None:
    """Run the schedule of that name, such as ``ingest:4711``, and raise its error."""
    kind, seed = name.split(":")
    World(kind, int(seed), trace).run()


def run(first: int, count: int, kinds: Iterable[str] = JOBS) -> Iterator[tuple[str, Exception | None]]:
    """Run `count` schedules of each kind of call; yield the name of each, with its error, if any."""
    for seed in range(first, first + count):
        for kind in kinds:
            try:
                replay(f"{kind}:{seed}")
            except Exception as error:
                yield f"{kind}:{seed}", error
            else:
                yield f"{kind}:{seed}", None
