"""``jetstream-ext enable`` and ``enable-bucket``: turn on the options that a stream or a bucket lacks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Final

import click
from nats.js.errors import BucketNotFoundError, NotFoundError

from jetstream_ext.cli.completion import complete_buckets, complete_streams
from jetstream_ext.cli.connection import Target, connected, connection_options, existing_stream
from jetstream_ext.cli.options import Command, cli_option, json_option
from jetstream_ext.cli.output import say, write_json
from jetstream_ext.cli.times import duration
from jetstream_ext.client.api import Api
from jetstream_ext.client.connection import Context, open_bucket
from jetstream_ext.client.streams import enable_options
from jetstream_ext.kv import enable as enable_in_bucket
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.history import known_since
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.options import OPTIONS, marker_subjects, ruled_out, ttl_value
from jetstream_ext.protocol.subjects import check_name

_MARKER_TTL: Final = "subject_delete_marker_ttl"


def _marker_ttl(text: str) -> int:
    try:
        return int(ttl_value(duration(text)))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command("enable", cls=Command, short_help="Turn on options of a stream.")
@click.argument("stream", shell_complete=complete_streams)
@cli_option("--direct", is_flag=True, help="Direct gets, which DirectGet, log readers, tables and export need.")
@cli_option("--atomic", is_flag=True, help="Atomic batches (AtomicBatch, exactly_once); nats-server 2.12.")
@cli_option("--batched", is_flag=True, help="Fast ingest (FastPublisher, ingest, Spark's sink); nats-server 2.14.")
@cli_option("--ttl", is_flag=True, help="TTLs of single messages; nats-server 2.11.")
@json_option()
@connection_options()
def stream_command(where: Target, stream: str, as_json: bool, **flags: bool) -> None:
    """Turn on options that STREAM lacks, all or none of them. No option is turned off, and nothing else is changed.

    The command can be repeated: it does not touch a stream that has the options.

    Examples:
        jetstream-ext enable ORDERS --direct --atomic
    """
    check_name(stream, "stream name")  # servers do not answer requests with an invalid one
    fields = [OPTIONS[option].field for option, given in flags.items() if given]
    if not fields:
        raise click.UsageError(f"name what to enable: {', '.join(f'--{option}' for option in flags)}")
    before = asyncio.run(_enable(where, stream, fields))
    was_on = {field: bool(before.config.get(field)) for field in fields}
    _report({"stream": stream}, f"stream {stream}", was_on, as_json=as_json)


async def _enable(where: Target, stream: str, fields: list[str]) -> StreamState:
    """Turn on options of a stream, and return its state before."""
    async with connected(where) as js:
        before = await existing_stream(js, stream)
        _check_possible(f"stream {stream!r}", before, fields)
        try:
            await enable_options(Api(Context(js)), stream, fields)
        except NotFoundError as error:
            raise click.ClickException(f"stream {stream!r} does not exist any more") from error
        return before


@click.command("enable-bucket", cls=Command, short_help="Turn on options of a key-value bucket.")
@click.argument("bucket", shell_complete=complete_buckets)
@cli_option("--direct", is_flag=True, help="Direct gets, which get_many, snapshot and Table need.")
@cli_option("--atomic", is_flag=True, help="Atomic batches, which transactions need; nats-server 2.12.")
@cli_option("--ttl", is_flag=True, help="TTLs of single keys; nats-server 2.11.")
@cli_option(
    "--marker-ttl",
    type=_marker_ttl,
    metavar="DURATION",
    help="Also delete markers, which stay for that long when a key expires.",
)
@cli_option(
    "--spark", is_flag=True, help="What Spark's sink jetstream_kv needs: --atomic, and a place for its markers."
)
@json_option()
@connection_options()
def bucket_command(where: Target, bucket: str, as_json: bool, marker_ttl: int | None, **flags: bool) -> None:
    """Turn on options that BUCKET lacks. No option is turned off.

    Without options, the command turns on --direct and --atomic, as jetstream_ext.kv.enable does. It also records since
    when the bucket's limits hold, which reads of the past need to know. It can be repeated: it does not touch a bucket
    that lacks nothing.

    Examples:
        jetstream-ext enable-bucket prices --direct --ttl
        jetstream-ext enable-bucket sessions --marker-ttl 1h
    """
    check_name(bucket, "bucket name")
    options = [option for option, given in flags.items() if given]
    if not options and marker_ttl is None:
        options = ["direct", "atomic"]
    before, after = asyncio.run(_enable_in_bucket(where, bucket, options, marker_ttl))
    was_on = {field: bool(before.config.get(field)) for field in _fields(options, marker_ttl)}
    if flags["spark"]:
        markers = marker_subjects(before.name)
        was_on[f"subject {markers}"] = before.stores(markers)
    if marker_ttl is not None:
        was_on[_MARKER_TTL] = before.config.get(_MARKER_TTL) == after.config.get(_MARKER_TTL)
    recorded = known_since(before) is None and known_since(after) is not None
    _report({"bucket": bucket, "stream": before.name}, f"bucket {bucket}", was_on, as_json=as_json, recorded=recorded)


async def _enable_in_bucket(
    where: Target, bucket: str, options: list[str], marker_ttl: int | None
) -> tuple[StreamState, StreamState]:
    """Turn on options of a bucket, and return the states of its stream before and after."""
    async with connected(where) as js:
        kv = open_bucket(js, bucket)
        try:
            before = await Bucket(kv).unchecked_state()
            _check_possible(f"bucket {bucket!r}", before, _fields(options, marker_ttl))
            await enable_in_bucket(
                kv,
                direct="direct" in options,
                atomic="atomic" in options,
                ttl=marker_ttl if marker_ttl is not None else "ttl" in options or None,
                spark="spark" in options,
            )
            return before, await Bucket(kv).unchecked_state()
        except BucketNotFoundError as error:
            raise click.ClickException(str(error.description)) from error


def _fields(options: Iterable[str], marker_ttl: int | None) -> list[str]:
    needed = [*options, *(["ttl"] if marker_ttl is not None else [])]
    return [OPTIONS[option].field for option in needed]


def _check_possible(what: str, state: StreamState, fields: Iterable[str]) -> None:
    never = ruled_out(state.config)
    for field in fields:
        if field in never and not state.config.get(field):
            raise click.ClickException(f"{what} cannot have {field}: {never[field]}; nothing was changed")


def _report(
    target: dict[str, str], what: str, was_on: Mapping[str, bool], *, as_json: bool, recorded: bool = False
) -> None:
    """Say which options are on now that were not; with `recorded`, also that it is recorded since when the limits hold."""
    enabled = [name for name, on in was_on.items() if not on]
    already = [name for name, on in was_on.items() if on]
    if as_json:
        write_json({**target, "enabled": enabled, "already": already})
        return
    parts = []
    if enabled:
        parts.append(f"enabled {', '.join(enabled)}")
    if already:
        parts.append(f"{', '.join(already)} {'was' if len(already) == 1 else 'were'} on already")
    if recorded:
        parts.append("recorded since when its limits hold")
    say(f"{what}: {'; '.join(parts)}")
