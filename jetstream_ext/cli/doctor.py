"""``jetstream-ext doctor``: the features of a server, the options that its streams lack, and how to enable them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import click
from nats.js import JetStreamContext

from jetstream_ext.cli.connection import Target, connected, connection_options, existing_stream
from jetstream_ext.cli.output import console, count, say, styled, table, write_json
from jetstream_ext.client.api import Api, malformed_as_error
from jetstream_ext.client.connection import Context
from jetstream_ext.client.consumers import source_health
from jetstream_ext.client.streams import Features, features
from jetstream_ext.protocol.api import StreamState, parse_stream_state
from jetstream_ext.protocol.feature_table import ATOMIC, DIRECT_GET, FAST_INGEST, FEATURES, MSG_TTL, Feature
from jetstream_ext.protocol.numbers import json_number
from jetstream_ext.protocol.subjects import check_name

_KV: Final = "KV_"
_STREAM_FEATURES: Final = (DIRECT_GET, MSG_TTL, ATOMIC, FAST_INGEST)
_BUCKET_OPTIONS: Final = {DIRECT_GET: "direct=True", MSG_TTL: "ttl=True", ATOMIC: "atomic=True"}


async def _examine_all(where: Target, stream: str | None) -> tuple[Features, list[dict[str, Any]]]:
    async with connected(where) as js:
        found = await features(js)
        states = [await existing_stream(js, stream)] if stream is not None else await _all_streams(js)
        states.sort(key=lambda state: state.name)
        return found, [await _examine(js, state, found.api_level) for state in states]


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


async def _examine(js: JetStreamContext, state: StreamState, api_level: int) -> dict[str, Any]:
    """Return the report on a stream, as it is in the JSON output."""
    is_bucket = state.name.startswith(_KV)
    has = [feature for feature in _STREAM_FEATURES if state.config.get(feature.option)]
    never = {feature: why for feature, why in _never(state.config).items() if feature.at(api_level)}
    lacks = [each for each in _STREAM_FEATURES if each.at(api_level) and each not in (*has, *never)]
    if is_bucket:  # no call of this library uses fast ingest on a bucket
        lacks = [each for each in lacks if each in _BUCKET_OPTIONS]
    sourcing = state.config.get("mirror") or state.config.get("sources")
    rows = [row for row in await source_health(js, state.name) if not row.ok] if sourcing else []
    return {
        "name": state.name,
        "messages": state.messages,
        "has": [feature.option for feature in has],
        "lacks": [feature.option for feature in lacks],
        "never": [f"{feature.option}: {why}" for feature, why in never.items()],
        "fix": _fix(state.name, lacks, is_bucket=is_bucket),
        "sources": [": ".join(filter(None, (row.name, row.state.replace("_", " "), row.detail))) for row in rows],
    }


def _never(config: Mapping[str, Any]) -> dict[Feature, str]:
    if config.get("sealed"):
        return dict.fromkeys(_STREAM_FEATURES, "the stream is sealed")
    if config.get("mirror"):
        return dict.fromkeys((ATOMIC, FAST_INGEST), "the stream is a mirror")
    if config.get("persist_mode") == "async":
        return {ATOMIC: "the stream persists asynchronously"}
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
    """Return a stream's name, which may contain quotes and escape sequences, as a Python literal."""
    return repr(name) if '"' in name or "\\" in name or not name.isprintable() else f'"{name}"'


@click.command("doctor", short_help="Show the features of a server and what its streams lack.")
@click.option("--stream", metavar="NAME", help="Examine only this stream.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@connection_options(url_argument=True)
def command(where: Target, stream: str | None, as_json: bool) -> None:
    """Show the features of a server, and the options that its streams lack. URL is the same as --server URL.

    For each stream it shows the Python call that enables the missing options. A missing option is not an error: the
    exit status is 0 if the server answers.
    """
    if stream is not None:
        check_name(stream, "stream name")  # servers do not answer requests with an invalid one
    found, streams = asyncio.run(_examine_all(where, stream))
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
            screen.print("  enable the options with")
            say(f"    {stream['fix']}")  # not wrapped, so that it can be copied
        for problem in stream["sources"]:
            screen.print(styled(f"  {problem}", "bold red"))
