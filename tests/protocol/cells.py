"""Tests that walk a table: one case of pytest for all of its cells, and each cell that fails is named."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def walk(names: str, cells: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with each cell, as `pytest.mark.parametrize` does, and fail with a line for each cell that fails.

    A table without cells is refused, and so is an async test, which would not be awaited; a cell that skips has failed.
    """
    keys = [name.strip() for name in names.split(",")]
    table = [dict(zip(keys, cell if len(keys) > 1 else [cell], strict=True)) for cell in cells]
    assert table, "the table has no cells"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        is_async = inspect.iscoroutinefunction(test) or inspect.isasyncgenfunction(test)
        assert not is_async, f"{test.__name__} is async"

        def every_cell(*arguments: Any, **fixtures: Any) -> None:
            failures, cause = [], None
            for cell in table:
                try:
                    test(*arguments, **fixtures, **cell)
                except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
                    failures.append(f"{str(list(cell.values()))[:200]}: {type(error).__name__}: {error}")
                    cause = cause or error
            if failures:
                raise AssertionError(f"{len(failures)} of {len(table)} cells fail:\n" + "\n".join(failures)) from cause

        parameters = inspect.signature(test).parameters
        every_cell.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter for name, parameter in parameters.items() if name not in keys]
        )
        every_cell.__name__, every_cell.__qualname__, every_cell.__doc__ = (
            test.__name__,
            test.__qualname__,
            test.__doc__,
        )
        every_cell.__module__, every_cell.__wrapped__ = test.__module__, test  # type: ignore[attr-defined]
        return every_cell

    return decorate
