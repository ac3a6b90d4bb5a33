"""``jetstream-ext snapshot``: a key-value bucket at a revision or a time."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any, Final

import click
from nats.js.errors import BucketNotFoundError

from jetstream_ext.cli.completion import complete_buckets
from jetstream_ext.cli.connection import Target, connected, connection_options
from jetstream_ext.cli.options import OUTPUT, Command, cli_option, json_option
from jetstream_ext.cli.output import console, count, is_are, shortened, table, text_or_base64, write_json
from jetstream_ext.cli.times import moment, shown
from jetstream_ext.client.connection import open_bucket
from jetstream_ext.errors import HistoryUnavailableError
from jetstream_ext.kv import KeyValueSnapshot
from jetstream_ext.kv import snapshot as take_snapshot
from jetstream_ext.kv.entries import key_text
from jetstream_ext.protocol.numbers import LARGEST, parse_number
from jetstream_ext.protocol.subjects import check_name

_MOST: Final = 200  # characters of a value in the table


def _revision_or_time(text: str) -> int | datetime:
    if text.isascii() and text.isdecimal():
        if not (revision := parse_number(text)):
            raise click.BadParameter(f"{text!r} is not a revision: they are from 1 to {LARGEST}")
        return revision
    try:
        return moment(text)
    except ValueError as error:
        raise click.BadParameter(str(error).replace(" is not ", " is not a revision or ", 1)) from None


@click.command("snapshot", cls=Command, short_help="Show a bucket now, or at a revision or time.")
@click.argument("bucket", shell_complete=complete_buckets)
@cli_option(
    "--at", type=_revision_or_time, metavar="REVISION|TIME", help="Show the bucket as it was then, instead of now."
)
@cli_option("--key", "keys", multiple=True, metavar="PATTERN", help="Show only matching keys (* and >); repeatable.")
@cli_option("--partial", is_flag=True, help="Leave out keys whose history is no longer stored, instead of failing.")
@cli_option("--full", is_flag=True, group=OUTPUT, help=f"Show the whole of values of more than {_MOST} characters.")
@json_option()
@connection_options()
def command(
    where: Target,
    bucket: str,
    at: int | datetime | None,
    keys: tuple[str, ...],
    partial: bool,
    full: bool,
    as_json: bool,
) -> None:
    """Show BUCKET exactly as it is now, or as it was at a revision or a time.

    A time is RFC 3339, a local date or time, or relative to now; the output says which instant it is. If the bucket no
    longer stores the history that this needs, the command fails.

    Examples:
        jetstream-ext snapshot prices
        jetstream-ext snapshot prices --key 'eu.*' --full
        jetstream-ext snapshot prices --at '10 minutes ago'
        jetstream-ext snapshot prices --at '2026-11-25 14:30'
    """
    check_name(bucket, "bucket name")  # servers do not answer requests with an invalid one
    found = asyncio.run(_take(where, bucket, at, keys, partial=partial))
    if as_json:
        write_json(_as_json(bucket, found))
        return
    entries = table("key", "value", "revision", "created")
    cut = 0
    for key, entry in sorted(found.items()):
        whole = _shown(entry.value)
        value = whole if full else shortened(whole, _MOST, count(len(entry.value), "byte"))
        cut += value != whole
        entries.add_row(
            key_text(key),
            value,
            str(entry.revision),
            entry.created.isoformat(sep=" ", timespec="milliseconds"),
        )
    screen = console()
    if isinstance(at, datetime):
        screen.print(f"{bucket} at {shown(at)}: revision {found.revision}")
    else:
        screen.print(f"{bucket} at revision {found.revision}, {shown(found.time)}")
    screen.print(entries)
    screen.print(count(len(found), "key"))
    if cut:
        screen.print(f"{count(cut, 'long value')} {is_are(cut)} shortened; --full shows all of it")
    if found.unavailable:
        left_out = ", ".join(map(key_text, found.unavailable))
        screen.print(f"left out, because their history is no longer stored: {left_out}")
    if not found.complete:
        screen.print("Further keys may be missing: the stream has removed messages.")


def _shown(value: bytes) -> str:
    [(name, text)] = text_or_base64("value", value).items()
    return text if name == "value" else f"base64 {text}"


async def _take(
    where: Target, bucket: str, at: int | datetime | None, keys: tuple[str, ...], *, partial: bool
) -> KeyValueSnapshot:
    async with connected(where) as js:
        try:
            return await take_snapshot(open_bucket(js, bucket), list(keys) or None, at=at, strict=not partial)
        except BucketNotFoundError as error:
            raise click.ClickException(str(error.description)) from error
        except HistoryUnavailableError as error:
            problem = str(error).partition(";")[0]  # the advice after it is for Python
            when = f" ({shown(at)})" if isinstance(at, datetime) else ""
            raise click.ClickException(f"{problem}{when}; --partial shows the rest") from error
        except ValueError as error:
            raise click.ClickException(str(error)) from error


def _as_json(bucket: str, found: KeyValueSnapshot) -> dict[str, Any]:
    return {
        "bucket": bucket,
        "revision": found.revision,
        "time": found.time.isoformat(),
        "complete": found.complete,
        "unavailable": [key_text(key) for key in found.unavailable],
        "entries": {
            key_text(key): {
                **text_or_base64("value", entry.value),
                "revision": entry.revision,
                "created": entry.created.isoformat(),
            }
            for key, entry in sorted(found.items())
        },
    }
