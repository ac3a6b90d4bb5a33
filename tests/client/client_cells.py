"""Tables of test cases as loops inside one test, and what reads return."""

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import jetstream_ext as jsx


@contextmanager
def named(**cell: Any) -> Iterator[None]:
    """Name the cell of a table in the error that it causes; a cell that skips has failed, for it would hide the others."""
    try:
        try:
            yield
        except pytest.skip.Exception as skipped:
            raise AssertionError(f"a cell may not skip: {skipped}") from skipped
    except BaseException as error:
        error.add_note("with " + ", ".join(f"{name}={repr(value)[:200]}" for name, value in cell.items()))
        raise


def each(
    names: str, values: Iterable[Any], *, together: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run the test for every value, one after the other in one case with the same fixtures; an error names its value.

    `names` and `values` are as of `pytest.mark.parametrize`; several of these decorators run every combination. With
    `together`, all values at once, for a test that mostly waits.
    """
    arguments = [name.strip() for name in names.split(",")]
    cells = [dict(zip(arguments, row if len(arguments) > 1 else (row,), strict=True)) for row in values]
    assert cells, "the table has no cells"

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        async def run_cell(cell: dict[str, Any], *given: Any, **fixtures: Any) -> None:
            with named(**cell):
                await test(*given, **fixtures, **cell)

        @functools.wraps(test)
        async def run_async(*given: Any, **fixtures: Any) -> None:
            if together:
                async with asyncio.TaskGroup() as group:
                    for cell in cells:
                        group.create_task(run_cell(cell, *given, **fixtures))
            else:
                for cell in cells:
                    await run_cell(cell, *given, **fixtures)

        @functools.wraps(test)
        def run(*given: Any, **fixtures: Any) -> None:
            for cell in cells:
                with named(**cell):
                    test(*given, **fixtures, **cell)

        chosen: Any = run_async if inspect.iscoroutinefunction(test) else run
        signature = inspect.signature(test)
        fixtures = [parameter for name, parameter in signature.parameters.items() if name not in arguments]
        chosen.__signature__ = signature.replace(parameters=fixtures)
        return chosen  # type: ignore[no-any-return]

    return decorate


async def seqs(batch: jsx.MessageBatch) -> list[int]:
    return [message.seq for message in await batch.to_list()]
