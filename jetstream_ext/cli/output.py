"""What the commands show: progress on stderr, results on stdout."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol

import click
import orjson
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

_WIDE: Final = 200


class Tell(Protocol):
    """Say how far a command is."""

    def __call__(self, position: int, messages: int) -> None:
        """Say it: `position` of the whole, and how many messages that were."""


class _Rate(ProgressColumn):
    """Messages, and messages per second since the start."""

    def render(self, task: Task) -> Text:
        messages = task.fields["messages"]
        seconds = task.elapsed or 0.0
        rate = f" ({messages / seconds:,.0f}/s)" if seconds > 0 else ""
        return Text(f"{messages:,} messages{rate}")


def console(*, stderr: bool = False) -> Console:
    """Return a console that writes where click does."""
    screen = Console(stderr=stderr, highlight=False)
    if not screen.is_terminal and "COLUMNS" not in os.environ:
        screen.width = _WIDE  # else 80: columns would be cut where nobody can make the window larger
    return screen


@contextmanager
def progress(what: str, total: int, *, show: bool = True) -> Iterator[Tell]:
    """Show a bar on a terminal's stderr, with rate and remaining time; elsewhere nothing."""
    screen = console(stderr=True)
    if not (show and screen.is_terminal):  # a bar that is disabled still writes a line with old releases of rich
        yield lambda position, messages: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        _Rate(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=screen) as bar:
        task = bar.add_task(what, total=max(total, 1), messages=0)

        def tell(position: int, messages: int) -> None:
            bar.update(task, completed=position, messages=messages)

        yield tell


def write_json(value: Mapping[str, Any]) -> None:
    """Write a JSON object on a line of its own."""
    click.echo(orjson.dumps(value).decode())


def text_or_base64(name: str, data: bytes) -> dict[str, str]:
    """Return bytes as JSON can hold them: as text, or else in base64 under another name."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}
