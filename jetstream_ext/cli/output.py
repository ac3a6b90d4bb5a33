"""What the commands show: progress and failures on stderr, results on stdout."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol

import click
import nats.errors
import nats.js.errors
import orjson
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text
from rich.theme import Theme

from jetstream_ext.errors import ErrorCode, IngestError, JetStreamExtError, RequestTimeoutError
from jetstream_ext.testing import NatsServerStartError

_WIDE: Final = 200
_ROOM_FOR_A_BAR: Final = 70
_UNBROKEN: Final = Column(no_wrap=True)
_THEME: Final = Theme(
    {
        # The colours of a terminal are its user's: yellow, green and cyan cannot be read on many a light one.
        "progress.percentage": "none",
        "progress.remaining": "none",
        "bar.back": "grey50",  # rich's own grey looks like a full bar on a light one
    }
)


class Tell(Protocol):
    """Say how far a command is."""

    def __call__(self, position: int, messages: int) -> None:
        """Say it: `position` of the whole, and how many messages that were."""


class _Rate(ProgressColumn):
    """Messages, and messages per second since the start."""

    def __init__(self, before: int, *, short: bool) -> None:
        super().__init__(_UNBROKEN)
        self._before = before
        self._short = short

    def render(self, task: Task) -> Text:
        messages = task.fields["messages"]
        seconds = task.elapsed or 0.0
        rate = f" ({max(0, messages - self._before) / seconds:,.0f}/s)" if seconds > 0 else ""
        return Text(f"{messages:,}{'' if self._short else ' messages'}{rate}")


def console(*, stderr: bool = False) -> Console:
    """Return a console that writes where click does."""
    screen = Console(stderr=stderr, highlight=False, theme=_THEME)
    if not screen.is_terminal and "COLUMNS" not in os.environ:
        screen.width = _WIDE  # else 80: columns would be cut where nobody can make the window larger
    return screen


@contextmanager
def progress(what: str, total: int, *, before: int = 0, show: bool = True) -> Iterator[Tell]:
    """Show a bar on a terminal's stderr, with rate and remaining time; elsewhere nothing.

    Args:
        what: What it is.
        total: The whole.
        before: How many messages were moved by an earlier run.
        show: Whether to show it at all.
    """
    screen = console(stderr=True)
    if not (show and screen.is_terminal):  # a bar that is disabled still writes a line with old releases of rich
        yield lambda position, messages: None
        return
    roomy = screen.width >= _ROOM_FOR_A_BAR
    columns = (
        TextColumn("{task.description}", markup=False, table_column=Column(overflow="ellipsis")),
        *([BarColumn()] if roomy else []),
        TaskProgressColumn(table_column=_UNBROKEN),
        _Rate(before, short=not roomy),
        TimeRemainingColumn(table_column=_UNBROKEN),
    )
    with Progress(*columns, console=screen) as bar:
        task = bar.add_task(what, total=max(total, 1), messages=before)

        def tell(position: int, messages: int) -> None:
            bar.update(task, completed=position, messages=messages)

        yield tell


def write_json(value: Mapping[str, Any]) -> None:
    """Write a JSON object on a line of its own: UTF-8, whatever the terminal's encoding is."""
    click.echo(orjson.dumps(value))


def table(*headings: str) -> Table:
    """Return a table whose cells are folded where there is no room for them, and never cut."""
    return Table(*(Column(heading, overflow="fold") for heading in headings))


def printable(text: str) -> str:
    """Return a text that others wrote as a terminal can show it: no escape sequence reaches it."""
    return text if text.isprintable() else repr(text)


def count(number: int, what: str) -> str:
    """Return how many of something there are."""
    return f"{number:,} {what if number == 1 else f'{what}s'}"


def text_or_base64(name: str, data: bytes) -> dict[str, str]:
    """Return bytes as JSON can hold them: as text, or else in base64 under another name."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


_NOT_ENABLED: Final = frozenset({ErrorCode.NOT_ENABLED_FOR_ACCOUNT, ErrorCode.NOT_ENABLED})
_LOG_STAMP: Final = re.compile(r"^\[\d+\] \S+ \S+ \[\w+\] ")
_NATS_PY: Final = re.compile(r"^nats: (?:JetStream\.\w+ )?(?=.)")


def one_line(error: BaseException) -> str:
    """Return it in one line."""
    if isinstance(error, nats.js.errors.APIError) and not isinstance(error, IngestError):
        described = error.description or type(error).__name__
        if error.err_code in _NOT_ENABLED:
            return f"JetStream is off for this account, or on this server ({described})"
        if isinstance(error, nats.js.errors.ServiceUnavailableError):
            asked = described if "no server answers on" in described else "no server answers"  # nats-py's has no text
            if error.err_code is None:
                return f"{asked}: the server runs without JetStream, or its domain is another"
        if error.description and not isinstance(error, JetStreamExtError):  # nats-py's own texts are full of names
            return f"the server says: {error.description}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, NatsServerStartError):
        first, *_, last = str(error).splitlines()  # between them is the rest of the server's log
        return f"{first.removesuffix('. The end of its log:')}: {_LOG_STAMP.sub('', last.strip())}"
    text = " ".join(_NATS_PY.sub("", str(error)).split()) or type(error).__name__
    if isinstance(error, RequestTimeoutError | nats.errors.TimeoutError) and "connection" not in text:
        text += " (the user may lack the permission; servers do not answer then)"
    return text
