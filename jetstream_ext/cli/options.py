"""Commands whose ``--help`` has examples, and options in groups.

click has neither. The packages that add them, such as rich-click, replace the whole ``--help`` and are one more dependency.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click
from click.shell_completion import CompletionItem

_F = TypeVar("_F", bound=Callable[..., Any])

CONNECTION: Final = "Connection"
OUTPUT: Final = "Output"
_OPTIONS: Final = "Options"
_EXAMPLES: Final = re.compile(r"^Examples:\n", re.MULTILINE)
_WIDEST_FLAGS: Final = 30  # as in click


class Option(click.Option):
    """An option that ``--help`` shows under the heading `group`."""

    def __init__(self, *arguments: Any, group: str = _OPTIONS, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.group: str = group


def cli_option(*flags: str, group: str = _OPTIONS, **attributes: Any) -> Callable[[_F], _F]:
    """Return the decorator `click.option` for an option that ``--help`` shows under the heading `group`."""
    return click.option(*flags, cls=Option, group=group, **attributes)


def json_option(text: str = "Print one JSON object.") -> Callable[[_F], _F]:
    """Return a decorator that adds ``--json`` to a command, which gets it as `as_json`."""
    return cli_option("--json", "as_json", is_flag=True, group=OUTPUT, help=text)


def complete_files(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete the name of a file."""
    return [CompletionItem(incomplete, type="file")]


def _is_utf_8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Command(click.Command):
    """A command whose docstring ends with ``Examples:`` and one command line per line.

    Attributes:
        examples: These lines.
    """

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        text, *examples = _EXAMPLES.split(inspect.cleandoc(self.help or ""), maxsplit=1)
        self.help: str | None = text.strip()
        self.examples: list[str] = [line.strip() for part in examples for line in part.splitlines() if line.strip()]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse text that is not UTF-8; paths and credentials may be any bytes."""
        rest = super().parse_args(ctx, args)
        for parameter in self.params:
            if isinstance(parameter, Option) and parameter.group != CONNECTION:
                given = ctx.params.get(parameter.name or "")
                texts = given if isinstance(given, tuple) else (given,)
                if any(isinstance(text, str) and not _is_utf_8(text) for text in texts):
                    raise click.BadParameter("it is not UTF-8", ctx, parameter)
        return rest

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the text, then the examples as they are."""
        super().format_help_text(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of each group under its heading, and all descriptions in the same column."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            # Newer releases of click list arguments, too, but without a description.
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)):
                groups.setdefault(getattr(parameter, "group", _OPTIONS), []).append(record)
        width = min(_WIDEST_FLAGS, max(len(flags) for records in groups.values() for flags, _ in records))
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{flags:{width}}", text) for flags, text in records])


class CommandGroup(click.Group, Command):
    """A group of such commands, with examples of its own."""

    command_class: type[click.Command] | None = Command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Refuse an unknown command that begins like an option, for which click shows the help, 8.1 as a success."""
        name = args[0]
        if not (name[:1].isalnum() or ctx.resilient_parsing) and self.get_command(ctx, name) is None:
            ctx.fail(f"No such command {name!r}.")
        return super().resolve_command(ctx, args)
