"""``jetstream-ext doctor``: the features of a server, what its streams allow, and what they lack for a task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import click
from nats.js import JetStreamContext

from jetstream_ext.cli.completion import complete_streams
from jetstream_ext.cli.connection import Target, connected, connection_options, existing_stream
from jetstream_ext.cli.options import Command, cli_option, json_option
from jetstream_ext.cli.output import console, count, say, styled, table, write_json
from jetstream_ext.client.api import Api, malformed_as_error
from jetstream_ext.client.connection import Context
from jetstream_ext.client.consumers import source_health
from jetstream_ext.client.streams import Features, features
from jetstream_ext.protocol.advice import enable_bucket_command, enable_command
from jetstream_ext.protocol.api import StreamState, parse_stream_state
from jetstream_ext.protocol.feature_table import BY_FIELD, FEATURES
from jetstream_ext.protocol.numbers import json_number
from jetstream_ext.protocol.options import OPTIONS, marker_subjects, ruled_out
from jetstream_ext.protocol.subjects import check_name
from jetstream_ext.text import did_you_mean

_KV: Final = "KV_"
_STREAM_OPTIONS: Final = [option for option in OPTIONS if option != "spark"]
_TASKS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "read": (("direct",), ("direct",)),
    "ingest": (("direct", "batched"), ()),
    "exactly-once": (("direct", "atomic"), ()),
    "kv": ((), ("direct", "atomic")),
    "spark": (("direct", "batched"), ("direct", "atomic", "spark")),
}
"""What each task needs of a stream, and of a bucket's stream; nothing: it has no use for one."""


@dataclass(frozen=True, slots=True)
class _Needs:
    """What is asked for."""

    options: tuple[str, ...]
    tasks: tuple[str, ...]
    stream: str | None

    def of(self, stream: str) -> list[str]:
        """Return the options that a stream needs."""
        is_bucket = stream.startswith(_KV)
        wanted = [*self.options, *(option for task in self.tasks for option in _TASKS[task][is_bucket])]
        if is_bucket and self.stream is None:  # no call of this library uses fast ingest on a bucket
            wanted = [option for option in wanted if option != "batched"]
        return list(dict.fromkeys(wanted))

    def check(self) -> None:
        """Refuse a stream for which a task has no use."""
        for task in self.tasks:
            if self.stream is not None and not _TASKS[task][self.stream.startswith(_KV)]:
                about = ("buckets", "no bucket") if _TASKS[task][True] else ("streams that are not buckets", "a bucket")
                raise click.UsageError(f"--for {task} is about {about[0]}; {self.stream!r} is {about[1]}")


async def _examine_all(where: Target, needs: _Needs) -> tuple[Features, list[dict[str, Any]]]:
    async with connected(where) as js:
        found = await features(js)
        states = [await existing_stream(js, needs.stream)] if needs.stream is not None else await _all_streams(js)
        states.sort(key=lambda state: state.name)
        return found, [await _examine(js, state, found.api_level, needs) for state in states]


async def _all_streams(js: JetStreamContext) -> list[StreamState]:
    states: dict[str, StreamState] = {}
    while True:
        known = len(states)
        page = await Api(Context(js)).ask("STREAM.LIST", {"offset": known})
        with malformed_as_error("all streams"):
            infos, total = list(page.get("streams") or ()), json_number(page["total"], "total")
        states |= {state.name: state for state in map(parse_stream_state, infos)}
        if len(states) == known or len(states) >= total:
            return list(states.values())


async def _examine(js: JetStreamContext, state: StreamState, api_level: int, needs: _Needs) -> dict[str, Any]:
    """Return the report on a stream, as it is in the JSON output."""
    needed = {option: OPTIONS[option] for option in needs.of(state.name)}
    never = {field: why for field, why in ruled_out(state.config).items() if BY_FIELD[field].at(api_level)}
    fields = dict.fromkeys(feature.field for feature in OPTIONS.values())
    has = [field for field in fields if state.config.get(field) and field not in never]
    never |= {each.field: f"it needs nats-server {each.since}" for each in needed.values() if not each.at(api_level)}
    lacks = {
        option: feature.field for option, feature in needed.items() if option == "spark" or feature.field not in has
    }
    if state.stores(markers := marker_subjects(state.name)):
        lacks.pop("spark", None)
    sourcing = state.config.get("mirror") or state.config.get("sources")
    rows = [row for row in await source_health(js, state.name) if not row.ok] if sourcing else []
    return {
        "name": state.name,
        "messages": state.messages,
        "has": has,
        "lacks": [f"subject {markers}" if option == "spark" else field for option, field in lacks.items()],
        "never": [f"{field}: {why}" for field, why in never.items() if field not in has],
        "fix": _fix(state.name, [option for option, field in lacks.items() if field not in never]),
        "sources": [": ".join(filter(None, (row.name, row.state.replace("_", " "), row.detail))) for row in rows],
    }


def _fix(stream: str, options: list[str]) -> str:
    """Return the command that enables `options`, or an empty text if there are none."""
    if not options:
        return ""
    if stream.startswith(_KV) and "batched" not in options:
        return enable_bucket_command(stream.removeprefix(_KV), *options)
    return enable_command(stream, *options)


def _words(known: Iterable[str]) -> Callable[[click.Context, click.Parameter, tuple[str, ...]], tuple[str, ...]]:
    """Return a callback that splits the values of an option at commas and checks the words."""
    names = list(known)

    def split(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
        words = [word.strip() for value in values for word in value.split(",")]
        for word in words:
            if word not in names:
                raise click.BadParameter(f"{word!r} is not one of {', '.join(names)}{did_you_mean(word, names)}")
        return tuple(dict.fromkeys(words))

    return split


@click.command("doctor", cls=Command, short_help="Show what a server supports and what its streams allow.")
@cli_option("--stream", shell_complete=complete_streams, metavar="NAME", help="Examine only this stream.")
@cli_option(
    "--need",
    "options",
    multiple=True,
    metavar="OPTION,…",
    callback=_words(_STREAM_OPTIONS),
    help=f"Options that the streams must have: {', '.join(_STREAM_OPTIONS)}.",
)
@cli_option(
    "--for",
    "tasks",
    multiple=True,
    metavar="TASK,…",
    callback=_words(_TASKS),
    help=f"What the streams or buckets are for: {', '.join(_TASKS)}.",
)
@json_option()
@connection_options(url_argument=True)
def command(where: Target, stream: str | None, options: tuple[str, ...], tasks: tuple[str, ...], as_json: bool) -> None:
    """Show the features of a server, what its streams allow, and problems of mirrors and sources.

    With --need or --for, the command also shows what each stream lacks, with the command that enables it, and fails if one
    lacks something. URL is the same as --server URL.

    Examples:
        jetstream-ext doctor -s nats://127.0.0.1:4222
        jetstream-ext doctor --stream ORDERS --for ingest
        jetstream-ext doctor --need direct,atomic
    """
    if stream is not None:
        check_name(stream, "stream name")  # servers do not answer requests with an invalid one
    needs = _Needs(options, tasks, stream)
    needs.check()
    found, streams = asyncio.run(_examine_all(where, needs))
    if as_json:
        write_json(
            {
                "server_version": found.server_version,
                "api_level": found.api_level,
                "works": [feature.title for feature in FEATURES if feature.at(found.api_level)],
                "missing": {feature.title: feature.since for feature in FEATURES if not feature.at(found.api_level)},
                "streams": streams,
            }
        )
    else:
        _show(found, streams)
    if lacking := [each["name"] for each in streams if each["lacks"]]:
        what = f"stream {lacking[0]!r} lacks" if len(lacking) == 1 else f"{count(len(lacking), 'stream')} lack"
        raise click.ClickException(f"{what} something that was asked for")


def _show(found: Features, streams: list[dict[str, Any]]) -> None:
    screen = console()
    screen.print(f"nats-server {found.server_version}, JetStream API level {found.api_level}")
    rows = table("feature", "here", "calls")
    for feature in FEATURES:
        here = "yes" if feature.at(found.api_level) else styled(f"needs {feature.since}", "bold")
        rows.add_row(feature.title, here, feature.calls.replace("`", ""))
    screen.print(rows)
    if not streams:
        screen.print("There are no streams.")
    for stream in streams:
        screen.print()
        screen.print(styled(stream["name"], "bold"), f" {count(stream['messages'], 'message')}")
        if stream["has"]:
            screen.print(f"  allows {', '.join(stream['has'])}")
        for reason in stream["never"]:
            screen.print(f"  cannot have {reason}")
        if stream["lacks"]:
            screen.print(styled(f"  lacks {', '.join(stream['lacks'])}", "bold"))
        if stream["fix"]:
            screen.print("  enable it with")
            say(f"    {stream['fix']}")  # not wrapped, so that it can be copied
        for problem in stream["sources"]:
            screen.print(styled(f"  {problem}", "bold red"))
