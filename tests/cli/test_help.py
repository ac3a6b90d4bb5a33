"""The ``--help`` of every command: options in groups, and examples that are valid command lines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from jetstream_ext.cli.__main__ import cli
from jetstream_ext.cli.options import CONNECTION, OUTPUT, Command, CommandGroup

FILES = re.compile(r"[\w./-]+\.(?:csv|jsonl|parquet|conf)(?:\.gz|\.zst)?")


def commands(path: tuple[str, ...] = (), command: click.Command = cli) -> Iterator[tuple[tuple[str, ...], Command]]:
    """Yield the words and the object of every command."""
    assert isinstance(command, Command), f"{' '.join(path)}: give click.command(…) the argument cls=Command"
    yield path, command
    if isinstance(command, click.Group):
        for name, each in command.commands.items():
            yield from commands((*path, name), each)


EVERY = {" ".join(path): command for path, command in commands()}


def calls(line: str) -> Iterator[list[str]]:
    """Yield the arguments of each ``jetstream-ext`` of a shell's command line."""
    words = shlex.shlex(line, posix=True, punctuation_chars="|>")
    words.whitespace_split = True
    call: list[str] = []
    for word in [*words, "|"]:
        if word in ("|", ">"):
            if call[:1] == ["jetstream-ext"]:
                yield call[1:]
            call = []
        else:
            call.append(word)


def help_of(name: str) -> str:
    return CliRunner().invoke(cli, [*name.split(), "--help"]).stdout


def parse(arguments: list[str]) -> tuple[str, ...]:
    """Parse the arguments as the command line does, without running the command; return the command's words."""
    command: click.Command = cli
    context = cli.make_context("jetstream-ext", list(arguments))
    words: tuple[str, ...] = ()
    rest = arguments
    while isinstance(command, click.Group):
        name, found, rest = command.resolve_command(context, rest)
        assert name is not None
        assert found is not None
        words, command = (*words, name), found
        if isinstance(command, click.Group):
            context = command.make_context(name, list(rest), parent=context)
    command.make_context(words[-1], list(rest), parent=context)
    return words


def test_every_help_has_examples_that_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, command in EVERY.items():
        assert command.examples, (
            f"'jetstream-ext {name}' has no examples: end its docstring with a section 'Examples:', one command line per line"
        )
        shown = help_of(name)
        for line in command.examples:
            assert f"  {line}\n" in shown
            for file in FILES.findall(line):
                Path(file).touch()
            found = list(calls(line))
            assert found, f"{line!r} does not run jetstream-ext"
            for arguments in found:
                try:
                    words = parse(arguments)
                except click.UsageError as error:
                    pytest.fail(
                        f"the example {line!r} of 'jetstream-ext {name}' is wrong usage: {error.format_message()}"
                    )
                assert " ".join(words).startswith(name), f"{line!r} is no example of 'jetstream-ext {name}'"


LEAVES = {name: command for name, command in EVERY.items() if not isinstance(command, CommandGroup)}


def test_options_are_in_groups_and_all_commands_have_json() -> None:
    for name, command in LEAVES.items():
        shown = help_of(name)
        headings = re.findall(r"^(\w.*):$", shown, re.MULTILINE)
        assert len(headings) == len(set(headings)), name
        sections = dict(zip(headings, re.split(r"^\w.*:$", shown, flags=re.MULTILINE)[1:], strict=True))
        assert "  --json" in sections[OUTPUT], name
        assert "-h, --help" in sections["Options"], name
        connects = any("--server" in parameter.opts for parameter in command.params)
        assert ("-s, --server URL" in sections.get(CONNECTION, "")) == connects, name
        lines = [line for section in sections.values() for line in section.splitlines() if re.match(r"  -", line)]
        columns = {len(match[0]) for line in lines if (match := re.match(r"  -.*?  +(?=\S)", line))}
        assert len(columns) == 1, f"{name}: the descriptions do not begin in the same column"
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{parameter.opts} has no description"
                named = parameter.metavar or parameter.is_flag or not isinstance(parameter.type, click.IntRange)
                assert named, f"{parameter.opts}: name the value with metavar"
                assert re.match(r"[A-Z].*[.…]", parameter.help), f"{parameter.opts}: {parameter.help!r} is no sentence"


ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(?:bash|sh)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_command_line_of_the_pages_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        (page.relative_to(ROOT), line)
        for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
        for block in BLOCK.findall(page.read_text(encoding="utf-8"))
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("jetstream-ext ")
    ]
    assert len(lines) > 20
    monkeypatch.chdir(tmp_path)
    for page, line in lines:
        for file in FILES.findall(line):
            Path(file).touch()
        for arguments in calls(line):
            try:
                parse(arguments)
            except click.UsageError as error:
                pytest.fail(f"{page}: {line!r} is wrong usage: {error.format_message()}")


def test_a_command_line_with_a_typo_is_not_parsed() -> None:
    for line in ("jetstream-ext export S -", "jetstream-ext group status S g | cat"):
        assert [parse(arguments) for arguments in calls(line)]
    for line in ("jetstream-ext exprot S -", "jetstream-ext group status S", "cat | jetstream-ext serve --prot 1"):
        with pytest.raises(click.UsageError):
            [parse(arguments) for arguments in calls(line)]
