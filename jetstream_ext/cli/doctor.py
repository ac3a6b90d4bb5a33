"""``jetstream-ext doctor``: the features of a server, the options that its streams lack, and how to enable them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import click
from nats.js import JetStreamContext
from rich.text import Text

from jetstream_ext.cli.connection import Target, check_stream, connected, connection_options, target
from jetstream_ext.cli.output import console, count, printable, table, write_json
from jetstream_ext.client.api import Api, stream_state
from jetstream_ext.client.consumers import source_health
from jetstream_ext.client.context import Context
from jetstream_ext.client.features import Features, features
from jetstream_ext.protocol import feature_table
from jetstream_ext.protocol.feature_table import FEATURES, Feature
from jetstream_ext.protocol.stream_state import StreamState, parse_stream_state

_KV: Final = "KV_"
_STREAM_FEATURES: Final = (
    feature_table.DIRECT_GET,
    feature_table.MSG_TTL,
    feature_table.ATOMIC,
    feature_table.FAST_INGEST,
)
_BUCKET_OPTIONS: Final = {
    feature_table.DIRECT_GET: "direct=True",
    feature_table.ATOMIC: "atomic=True",
    feature_table.MSG_TTL: "ttl=True",
}
_NOT_FOR_MIRRORS: Final = (feature_table.ATOMIC, feature_table.FAST_INGEST)


@dataclass(frozen=True, slots=True)
class StreamReport:
    """The options of one stream; the texts in ``never`` and ``sources`` are for the user, and ``fix`` is Python."""

    name: str
    messages: int
    has: tuple[str, ...]
    lacks: tuple[str, ...]
    never: tuple[str, ...]
    fix: str
    sources: tuple[str, ...]


async def _examine_all(where: Target, stream: str | None) -> tuple[Features, list[StreamReport]]:
    async with connected(where) as js:
        found = await features(js)
        context = Context(js)
        states = [await stream_state(context, stream)] if stream is not None else await _streams(context)
        states.sort(key=lambda state: state.name)
        return found, [await _examine(js, state, found.api_level) for state in states]


async def _streams(context: Context) -> list[StreamState]:
    states: list[StreamState] = []
    while True:
        page = await Api(context).ask("STREAM.LIST", {"offset": len(states)})
        infos = page.get("streams") or []
        states += map(parse_stream_state, infos)
        if not infos or len(states) >= page["total"]:
            return states


async def _examine(js: JetStreamContext, state: StreamState, api_level: int) -> StreamReport:
    is_bucket = state.name.startswith(_KV)
    available = [feature for feature in _STREAM_FEATURES if feature.at(api_level)]
    has = [feature for feature in _STREAM_FEATURES if state.config.get(feature.option)]
    never = {feature: why for feature, why in _never(state.config).items() if feature in available}
    lacks = [feature for feature in available if feature not in (*has, *never)]
    if is_bucket:  # no call of this library uses fast ingest on a bucket
        lacks = [feature for feature in lacks if feature is not feature_table.FAST_INGEST]
    sourcing = state.config.get("mirror") or state.config.get("sources")
    rows = [row for row in await source_health(js, state.name) if not row.ok] if sourcing else []
    return StreamReport(
        name=state.name,
        messages=state.messages,
        has=tuple(feature.option for feature in has),
        lacks=tuple(feature.option for feature in lacks),
        never=tuple(f"{feature.option}: {why}" for feature, why in never.items()),
        fix=_fix(state.name, lacks, is_bucket=is_bucket),
        sources=tuple(": ".join(filter(None, (row.name, row.state.replace("_", " "), row.detail))) for row in rows),
    )


def _never(config: Mapping[str, Any]) -> dict[Feature, str]:
    if config.get("sealed"):
        return dict.fromkeys(_STREAM_FEATURES, "the stream is sealed")
    if config.get("mirror"):
        return dict.fromkeys(_NOT_FOR_MIRRORS, "the stream is a mirror")
    if config.get("persist_mode") == "async":
        return {feature_table.ATOMIC: "the stream persists asynchronously"}
    return {}


def _fix(stream: str, lacks: list[Feature], *, is_bucket: bool) -> str:
    if not lacks:
        return ""
    if is_bucket:
        options = ", ".join(_BUCKET_OPTIONS[feature] for feature in lacks)
        return f"await jetstream_ext.kv.enable(await js.key_value({_quoted(stream.removeprefix(_KV))}), {options})"
    options = ", ".join(f"{feature.option}=True" for feature in lacks)
    return f"await jetstream_ext.ensure_stream(js, (await js.stream_info({_quoted(stream)})).config, {options})"


def _quoted(name: str) -> str:
    """Return a stream's name, which is foreign text, as a Python literal that is safe to run."""
    return repr(name) if '"' in name or "\\" in name or not name.isprintable() else f'"{name}"'


@click.command("doctor", short_help="Show the features of a server and what its streams lack.")
@click.argument("url", envvar="NATS_URL", default="")
@click.option("--stream", metavar="NAME", help="Examine only this stream.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@connection_options(server=False)
@click.pass_context
def command(ctx: click.Context, url: str, stream: str | None, as_json: bool, timeout: float) -> None:
    """Show the features of the server at URL, and the options that its streams lack.

    The default of URL is NATS_URL, or else the server of the selected context, or else the one on this machine. For
    each stream the output has the Python call that enables the missing options. A missing option is not an error: the
    exit status is 0 if the server answers.
    """
    if stream is not None:
        check_stream(stream)
    found, streams = asyncio.run(_examine_all(target(ctx, timeout, url), stream))
    if as_json:
        write_json(
            {
                "server_version": found.server_version,
                "api_level": found.api_level,
                "works": [feature.title for feature in FEATURES if feature.at(found.api_level)],
                "missing": {feature.title: feature.since for feature in FEATURES if not feature.at(found.api_level)},
                "streams": [asdict(report) for report in streams],
            }
        )
    else:
        _show(found, streams)


def _show(found: Features, streams: list[StreamReport]) -> None:
    screen = console()
    screen.print(f"nats-server {found.server_version}, JetStream API level {found.api_level}")
    rows = table("feature", "here", "calls")
    for feature in FEATURES:
        here = Text("yes") if feature.at(found.api_level) else Text(f"needs {feature.since}", "bold")
        rows.add_row(feature.title, here, feature.calls.replace("`", ""))
    screen.print(rows)
    if not streams:
        screen.print("There are no streams.")
    for stream in streams:
        screen.print(Text.assemble("\n", (printable(stream.name), "bold"), f"  {count(stream.messages, 'message')}"))
        if stream.has:
            screen.print(f"  allows {', '.join(stream.has)}", markup=False)
        for reason in stream.never:
            screen.print(f"  cannot have {reason}", markup=False)
        if stream.lacks:
            screen.print(Text(f"  lacks {', '.join(stream.lacks)}", "bold"))
            screen.print("  enable the options with")
            click.echo(f"    {stream.fix}")  # not wrapped, so that it can be copied
        for problem in stream.sources:
            screen.print(Text(f"  {printable(problem)}", "bold red"))
