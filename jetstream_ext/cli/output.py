"""The output of commands: results on stdout, progress and errors on stderr.

Only this module writes to the terminal and uses rich's `Text`. Each of its functions makes text printable first, because
names, values and errors of servers, files and arguments are foreign.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, Final

import click
import nats.errors
import nats.js.errors
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text
from rich.theme import Theme

from jetstream_ext.client.api import NO_JETSTREAM
from jetstream_ext.errors import ErrorCode, IngestError, JetStreamExtError, RequestTimeoutError
from jetstream_ext.testing import NatsServerStartError
from jetstream_ext.text import counted, plural, printable

_FILE_WIDTH: Final = 200
_PAUSE: Final = 0.01  # seconds
_WIDTH_OF_A_BAR: Final = 70
_USER_INFO: Final = re.compile(r"(\w\w:/+).*@")  # the Path of a URL has only one slash
_EXTRA: Final = re.compile(r"(unexpected extra arguments?) \(.*\)", re.DOTALL)
_NOT_ASCII: Final = re.compile(r"[^ -~]")
_UNBROKEN: Final = Column(no_wrap=True)
_THEME: Final = Theme(
    {
        # rich's yellow, green and cyan are hard to read on many light terminals.
        "progress.percentage": "none",
        "progress.remaining": "none",
        "bar.back": "grey50",  # rich's own grey looks like a full bar on a light terminal
    }
)


ReportProgress = Callable[[int, int], None]
"""Shows the position in the whole, and the number of messages up to it."""


class Stopped(click.ClickException):
    """The end of a command after Ctrl-C; its text says what is stored."""

    exit_code = 130

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(self.message, file=file, err=True)


@contextmanager
def printable_errors() -> Iterator[None]:
    """Make the texts of click's exceptions printable, and hide the credentials of a URL in the wrong place.

    Extra arguments are not repeated: they may be the second half of a password that was not quoted.
    """
    try:
        yield
    except click.ClickException as error:
        text = _EXTRA.sub(r"\1", _USER_INFO.sub(r"\1", error.message))
        keep_lines = isinstance(error, click.UsageError)  # its text may be the help text
        vars(error)["message"] = printable(text, keep_lines=keep_lines)  # click declares it as final
        raise


def say(text: str, *, err: bool = False) -> None:
    """Print a line that is never wrapped."""
    click.echo(printable(text), err=err)


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


@contextmanager
def on_signal(handler: Callable[[], None], *numbers: signal.Signals) -> Iterator[None]:
    """Call `handler` for the signals `numbers` that arrive during a block."""
    before = {number: signal.signal(number, lambda *_: handler()) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class _Screen(Console):
    """Takes a str, also one in a table's cell, as foreign text without markup."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def styled(text: str, style: str = "") -> Text:
    return Text(printable(text), style)


def console(*, stderr: bool = False) -> Console:
    """Return a console on the stream that click writes to."""
    screen = _Screen(stderr=stderr, highlight=False, markup=False, emoji=False, theme=_THEME)
    if not screen.is_terminal and "COLUMNS" not in os.environ:
        screen.width = _FILE_WIDTH  # rich's default of 80 would cut columns
    return screen


@contextmanager
def progress(what: str, total: int, *, before: int = 0, show: bool = True) -> Iterator[ReportProgress]:
    """Show a progress bar if stderr is a terminal; `before` is the number of messages of an earlier run."""
    screen = console(stderr=True)
    if not (show and screen.is_terminal):  # with old releases of rich, a disabled bar writes a line
        yield lambda position, messages: None
        return
    roomy = screen.width >= _WIDTH_OF_A_BAR
    columns = (
        TextColumn("{task.description}", markup=False, table_column=Column(overflow="ellipsis")),
        *([BarColumn()] if roomy else []),
        TaskProgressColumn(table_column=_UNBROKEN),
        _Rate(before, short=not roomy),
        TimeRemainingColumn(table_column=_UNBROKEN),
    )
    with Progress(*columns, console=screen) as bar:
        task = bar.add_task(printable(what), total=max(total, 1), messages=before)

        yield lambda position, messages: bar.update(task, completed=position, messages=messages)


def write_json(value: Mapping[str, Any], *, err: bool = False) -> None:
    """Write a JSON object as one line of UTF-8, whatever the terminal's encoding."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if not text.isprintable():  # JSON's escapes are the same characters to a program, but not to a terminal
        text = _NOT_ASCII.sub(_json_escape, text)
    click.echo(text.encode(), err=err)


def write_stdout(data: bytes) -> None:
    """Write data for another program to stdout, without a buffer; a terminal gets printable text."""
    stdout: Any = sys.stdout.buffer
    if sys.stdout.isatty():
        data = printable(data.decode("utf-8", "replace"), keep_lines=True).encode()
    unbuffered = getattr(stdout, "raw", stdout)
    rest = memoryview(data)
    while rest:
        written = unbuffered.write(rest)
        if written is None:  # whoever started this process has set the pipe to be non-blocking
            time.sleep(_PAUSE)
        else:
            rest = rest[written:]


def _json_escape(found: re.Match[str]) -> str:
    char = found[0]
    return char if char.isprintable() else json.dumps(char)[1:-1].replace("\x7f", r"\u007f")


def table(*headings: str) -> Table:
    """Return a table that wraps its cells and never cuts them."""
    return Table(*(Column(heading, overflow="fold") for heading in headings))


count = counted


def shortened(text: str, most: int, size: str) -> str:
    """Return a text of up to `most` characters as it is, and of a longer one the start and the `size` of the whole."""
    return text if len(text) <= most else f"{text[:most]}… ({size})"


def is_are(number: int) -> str:
    return plural(number, "is", "are")


def text_or_base64(name: str, data: bytes) -> dict[str, str]:
    """Return bytes for JSON: as text, or else in base64 under ``name_base64``."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


_NOT_ENABLED: Final = frozenset({ErrorCode.NOT_ENABLED_FOR_ACCOUNT, ErrorCode.NOT_ENABLED})
_LOG_STAMP: Final = re.compile(r"^\[\d+\] \S+ \S+ \[\w+\] ")
_NATS_PY: Final = re.compile(r"^nats: (?:JetStream\.\w+ )?(?=.)")


def one_line(error: BaseException) -> str:
    """Return an error as one line for the user."""
    if isinstance(error, nats.js.errors.APIError) and not isinstance(error, IngestError):
        described = error.description or type(error).__name__
        if error.err_code in _NOT_ENABLED:
            return f"JetStream is not enabled for this account or on this server ({described})"
        if isinstance(error, nats.js.errors.ServiceUnavailableError) and error.err_code is None:
            return described if NO_JETSTREAM in described else f"no server answers: {NO_JETSTREAM}"
        if error.description and not isinstance(error, JetStreamExtError):  # nats-py's own text is a list of fields
            return f"the server says: {error.description}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, NatsServerStartError):
        first, *_, last = str(error).splitlines()  # in between is the server's log
        return f"{first.removesuffix('. The end of its log:')}: {_LOG_STAMP.sub('', last.strip())}"
    text = " ".join(_NATS_PY.sub("", str(error)).split()) or type(error).__name__
    known = "connection" in text or "permission" in text
    if isinstance(error, RequestTimeoutError | nats.errors.TimeoutError) and not known:
        text += " (a client without the permission gets no answer either)"
    return text
