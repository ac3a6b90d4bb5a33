"""``jetstream-ext doctor``: what a server can do, what its streams lack, and how to turn it on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import click
from nats.js import JetStreamContext
from rich.text import Text

from jetstream_ext.cli.connection import Target, check_stream, connected, connection_options, target
from jetstream_ext.cli.output import console, count, printable, table, write_json
from jetstream_ext.client.api import Api
from jetstream_ext.client.context import Context
from jetstream_ext.client.features import features
from jetstream_ext.client.sourcing import source_health
from jetstream_ext.protocol import feature_table
from jetstream_ext.protocol.feature_table import Feature

_KV: Final = "KV_"
_OF_STREAMS: Final = (feature_table.DIRECT_GET, feature_table.MSG_TTL, feature_table.ATOMIC, feature_table.FAST_INGEST)
_OF_BUCKETS: Final = {
    feature_table.DIRECT_GET: "direct=True",
    feature_table.ATOMIC: "atomic=True",
    feature_table.MSG_TTL: "ttl=True",
}
_NOT_FOR_MIRRORS: Final = (feature_table.ATOMIC, feature_table.FAST_INGEST)
_NOT_FOR_BUCKETS: Final = (feature_table.FAST_INGEST,)  # no call of this library uses it there


@dataclass(frozen=True, slots=True)
class StreamReport:
    """What one stream has and lacks.

    Attributes:
        name: The stream.
        messages: How many it holds.
        has: The options that it allows.
        lacks: The options that its server has and it does not allow.
        never: What it can never have, and why.
        fix: The call that turns on what it lacks; empty if there is nothing to turn on.
        sources: What is wrong with its mirror or sources.
    """

    name: str
    messages: int
    has: tuple[str, ...]
    lacks: tuple[str, ...]
    never: tuple[str, ...]
    fix: str
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What the doctor found.

    Attributes:
        version: The version of the connected server.
        api_level: The API level of the JetStream behind it.
        works: The features that it has.
        missing: Those that it has not.
        streams: The streams, by name.
    """

    version: str
    api_level: int
    works: tuple[Feature, ...]
    missing: tuple[Feature, ...]
    streams: tuple[StreamReport, ...]

    def as_json(self) -> dict[str, Any]:
        """Return it for scripts."""
        return {
            "server_version": self.version,
            "api_level": self.api_level,
            "works": [feature.title for feature in self.works],
            "missing": {feature.title: feature.since for feature in self.missing},
            "streams": [{name: getattr(stream, name) for name in StreamReport.__slots__} for stream in self.streams],
        }


async def examine(js: JetStreamContext, stream: str | None = None) -> Report:
    """Ask the server, and one stream or all of them.

    Args:
        js: The JetStream.
        stream: The stream to look at; None is all.

    Raises:
        NotFoundError: nats-py's: there is no such stream.
        ServiceUnavailableError, ServerError, RequestTimeoutError: As for `features`.
    """
    found = await features(js)
    works = tuple(feature for feature in feature_table.FEATURES if feature.at(found.api_level))
    door = Context(js)
    if stream is not None:
        infos = [await Api(door).ask(f"STREAM.INFO.{stream}")]
    else:
        infos = [info async for info in _streams(door)]
    return Report(
        version=found.server_version,
        api_level=found.api_level,
        works=works,
        missing=tuple(feature for feature in feature_table.FEATURES if feature not in works),
        streams=tuple([await _examine(js, info, works) for info in sorted(infos, key=_name)]),
    )


def _name(info: Mapping[str, Any]) -> str:
    return str(info["config"]["name"])


async def _streams(js: Context) -> AsyncIterator[dict[str, Any]]:
    seen = 0
    while True:
        page = await Api(js).ask("STREAM.LIST", {"offset": seen})
        infos = page.get("streams") or []
        for info in infos:
            yield info
        seen += len(infos)
        if not infos or seen >= page["total"]:
            return


async def _examine(js: JetStreamContext, info: Mapping[str, Any], works: tuple[Feature, ...]) -> StreamReport:
    config, name = info["config"], _name(info)
    has = tuple(feature for feature in _OF_STREAMS if config.get(feature.option))
    never = {feature: why for feature, why in _never(config).items() if feature in works}
    lacks = tuple(
        feature
        for feature in _OF_STREAMS
        if feature in works
        and feature not in (*has, *never)
        and not (name.startswith(_KV) and feature in _NOT_FOR_BUCKETS)
    )
    sources: tuple[str, ...] = ()
    if config.get("mirror") or config.get("sources"):
        rows = await source_health(js, name)
        sources = tuple(
            ": ".join(filter(None, (row.name, row.state.replace("_", " "), row.detail))) for row in rows if not row.ok
        )
    return StreamReport(
        name=name,
        messages=info["state"]["messages"],
        has=tuple(feature.option for feature in has),
        lacks=tuple(feature.option for feature in lacks),
        never=tuple(f"{feature.option}: {why}" for feature, why in never.items()),
        fix=_fix(name, lacks),
        sources=sources,
    )


def _never(config: Mapping[str, Any]) -> dict[Feature, str]:
    if config.get("sealed"):
        return dict.fromkeys(_OF_STREAMS, "the stream is sealed")
    if config.get("mirror"):
        return dict.fromkeys(_NOT_FOR_MIRRORS, "the stream is a mirror")
    if config.get("persist_mode") == "async":
        return {feature_table.ATOMIC: "the stream persists asynchronously"}
    return {}


def _fix(stream: str, lacks: tuple[Feature, ...]) -> str:
    if not lacks:
        return ""
    if stream.startswith(_KV) and all(feature in _OF_BUCKETS for feature in lacks):
        options = ", ".join(_OF_BUCKETS[feature] for feature in lacks)
        return f"await jetstream_ext.kv.enable(await js.key_value({_quoted(stream.removeprefix(_KV))}), {options})"
    options = ", ".join(f"{feature.option}=True" for feature in lacks)
    return f"await jetstream_ext.ensure_stream(js, (await js.stream_info({_quoted(stream)})).config, {options})"


def _quoted(name: str) -> str:
    """Return a name as Python has it: others may have named the stream, and the call is there to be run."""
    return repr(name) if '"' in name or "\\" in name or not name.isprintable() else f'"{name}"'


@click.command("doctor", short_help="Say what a server can do, and its streams lack.")
@click.argument("url", envvar="NATS_URL", default="")
@click.option("--stream", metavar="NAME", help="Look at this stream only.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for scripts.")
@connection_options(server=False)
@click.pass_context
def command(ctx: click.Context, url: str, stream: str | None, as_json: bool, timeout: float) -> None:
    """Say what the server at URL can do, and what its streams lack.

    Without URL that is NATS_URL, or the server of the selected context, or the one on this machine. For each stream
    the call is shown that turns on what it lacks. An option that is not turned on is no fault: the
    exit status is 0 whenever the server could be asked.
    """
    if stream is not None:
        check_stream(stream)
    report = asyncio.run(_ask(target(ctx, timeout, url), stream))
    if as_json:
        write_json(report.as_json())
    else:
        _show(report)


async def _ask(where: Target, stream: str | None) -> Report:
    async with connected(where) as js:
        return await examine(js, stream)


def _show(report: Report) -> None:
    screen = console()
    screen.print(f"nats-server {report.version}, JetStream API level {report.api_level}")
    features = table("feature", "here", "calls")
    for feature in feature_table.FEATURES:
        here = Text("yes") if feature in report.works else Text(f"from {feature.since} on", "bold")
        features.add_row(feature.title, here, feature.calls.replace("`", ""))
    screen.print(features)
    if not report.streams:
        screen.print("There are no streams.")
    for stream in report.streams:
        _show_stream(stream)


def _show_stream(stream: StreamReport) -> None:
    screen = console()
    screen.print(Text.assemble("\n", (printable(stream.name), "bold"), f"  {count(stream.messages, 'message')}"))
    if stream.has:
        screen.print(f"  allows {', '.join(stream.has)}", markup=False)
    for reason in stream.never:
        screen.print(f"  never {reason}", markup=False)
    if stream.lacks:
        screen.print(Text(f"  lacks {', '.join(stream.lacks)}", "bold"))
        screen.print("  turn on what you need with")
        click.echo(f"    {stream.fix}")  # never wrapped: it is there to be copied
    for trouble in stream.sources:
        screen.print(Text(f"  {printable(trouble)}", "bold red"))
