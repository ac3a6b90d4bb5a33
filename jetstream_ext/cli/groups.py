"""``jetstream-ext group``: the partitioned groups of a bucket, their members and positions, and a new start."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import click
from nats.js import JetStreamContext
from nats.js.errors import BucketNotFoundError, NotFoundError

from jetstream_ext.cli.completion import complete_buckets, complete_streams
from jetstream_ext.cli.connection import Target, check_jetstream, connected, connection_options
from jetstream_ext.cli.options import CommandGroup, cli_option, json_option
from jetstream_ext.cli.output import console, count, say, table, write_json
from jetstream_ext.cli.times import moment, shown
from jetstream_ext.log import First, Group, GroupStatus, Last, New, Seq, Time, list_groups
from jetstream_ext.protocol.subjects import bucket_stream, check_name

_Start = First | Last | New | Seq | Time

_STARTS: Final[dict[str, _Start]] = {"first": First(), "last": Last(), "new": New()}
_WHOLE_SUBJECT: Final = "all"


def _start(text: str) -> _Start:
    if text in _STARTS:
        return _STARTS[text]
    if text.isascii() and text.isdecimal() and int(text):
        return Seq(int(text))
    try:
        return Time(moment(text))
    except ValueError as error:
        known = f" is not {', '.join(_STARTS)}, a sequence from 1, or "
        raise click.BadParameter(str(error).replace(" is not ", known, 1)) from None


def _key(text: str) -> tuple[int, ...]:
    """Return positions of tokens; none of them for the whole subject."""
    if text == _WHOLE_SUBJECT:
        return ()
    numbers = text.split(",")
    if not all(number.isascii() and number.isdecimal() for number in numbers):
        raise click.BadParameter(f"{text!r} is neither positions of tokens from 0, such as 1,2, nor {_WHOLE_SUBJECT}")
    return tuple(map(int, numbers))


_BUCKET = cli_option(
    "--bucket",
    shell_complete=complete_buckets,
    default="groups",
    show_default=True,
    metavar="NAME",
    help="Bucket that holds the groups.",
)


@click.group("group", cls=CommandGroup, short_help="List, show and reset partitioned groups.")
def command() -> None:
    """Show the workers that share a stream in a partitioned group, and let a group start again.

    Examples:
        jetstream-ext group list
        jetstream-ext group status ORDERS billing
        jetstream-ext group reset ORDERS billing --start first
    """


@command.command("list", short_help="List the groups of a bucket.")
@_BUCKET
@json_option()
@connection_options()
def list_command(where: Target, bucket: str, as_json: bool) -> None:
    """List the groups of a bucket, and their streams.

    Examples:
        jetstream-ext group list
        jetstream-ext group list --bucket groups-eu --json
    """
    check_name(bucket, "bucket name")  # servers do not answer requests with an invalid one
    found = asyncio.run(_list(where, bucket))
    if as_json:
        write_json({"bucket": bucket, "groups": [{"stream": stream, "group": name} for stream, name in found]})
        return
    rows = table("stream", "group")
    for stream, name in found:
        rows.add_row(stream, name)
    screen = console()
    screen.print(rows)
    screen.print(count(len(found), "group"))


async def _list(where: Target, bucket: str) -> list[tuple[str, str]]:
    async with _session(where, bucket) as js:
        return await list_groups(js, bucket)


@command.command("status", short_help="Show the members and partitions of a group.")
@click.argument("stream", shell_complete=complete_streams)
@click.argument("name")
@_BUCKET
@json_option()
@connection_options()
def status_command(where: Target, stream: str, name: str, bucket: str, as_json: bool) -> None:
    """Show the members of the group NAME of STREAM that are alive, and the owner and position of each partition.

    The lag of a partition is the number of sequences from its position to the end of the stream, and includes the
    messages of other partitions.

    Examples:
        jetstream-ext group status ORDERS billing
    """
    _check(stream, name, bucket)
    status = asyncio.run(_status(where, stream, name, bucket))
    if as_json:
        write_json(_as_json(status))
    else:
        _show(status)


async def _status(where: Target, stream: str, name: str, bucket: str) -> GroupStatus:
    async with _session(where, bucket) as js:
        group = await Group.open(js, stream, name, bucket=bucket, patience=where.timeout)
        return await group.status()


def _as_json(status: GroupStatus) -> dict[str, Any]:
    return {
        "stream": status.stream,
        "group": status.name,
        "last_seq": status.last_seq,
        "members": [
            {
                "id": member.id,
                "label": member.label,
                "last_seen": member.last_seen.isoformat(),
                "leaving": member.leaving,
                "partitions": list(member.partitions),
            }
            for member in status.members
        ],
        "partitions": [
            {"partition": each.partition, "owner": each.owner, "position": each.position, "lag": each.lag}
            for each in status.partitions
        ],
    }


def _show(status: GroupStatus) -> None:
    screen = console()
    screen.print(f"group {status.name} of stream {status.stream}, whose last sequence is {status.last_seq:,}")
    members = table("member", "id", "last seen", "partitions")
    for member in status.members:
        members.add_row(
            f"{member.label} (leaving)" if member.leaving else member.label,
            member.id,
            member.last_seen.isoformat(sep=" ", timespec="milliseconds"),
            ", ".join(map(str, member.partitions)) or "none",
        )
    screen.print(members if status.members else "No member is alive.")
    labels = Counter(member.label for member in status.members)
    owners = {
        member.id: member.label if labels[member.label] == 1 else f"{member.label} {member.id}"
        for member in status.members
    }
    partitions = table("partition", "owner", "position", "lag")
    for each in status.partitions:
        owner = "none" if each.owner is None else owners[each.owner]
        partitions.add_row(str(each.partition), owner, f"{each.position:,}", f"{each.lag:,}")
    screen.print(partitions)


@command.command("reset", short_help="Let a group start again, or change its partitions or key.")
@click.argument("stream", shell_complete=complete_streams)
@click.argument("name")
@cli_option(
    "--start",
    type=_start,
    metavar="first|last|new|SEQ|TIME",
    show_default="the lowest position of the group",
    help="Where all partitions start.",
)
@cli_option("--partitions", type=click.IntRange(1), metavar="N", help="Change the number of partitions.")
@cli_option(
    "--key",
    "tokens",  # the connection has an option `key`
    type=_key,
    metavar="N,…",
    help=f"Change the key: positions of the subject's tokens, from 0, or {_WHOLE_SUBJECT} for the whole subject.",
)
@_BUCKET
@json_option()
@connection_options()
def reset_command(
    where: Target,
    stream: str,
    name: str,
    start: _Start | None,
    partitions: int | None,
    tokens: tuple[int, ...] | None,
    bucket: str,
    as_json: bool,
) -> None:
    """Let all partitions of the group NAME of STREAM start at one place; settings that are not given stay as they are.

    Stop all members first: if one is alive, the command fails and changes nothing. Without --start, messages of the
    partitions that were further than others are handled again. A group that stores outputs exactly once needs --start.

    Examples:
        jetstream-ext group reset ORDERS billing --partitions 32
        jetstream-ext group reset ORDERS billing --start first
        jetstream-ext group reset ORDERS billing --start 'yesterday 14:30'
    """
    _check(stream, name, bucket)
    group, seq = asyncio.run(_reset(where, stream, name, bucket, start, partitions, tokens))
    if as_json:
        write_json({"stream": stream, "group": name, "start": seq, "partitions": group.partitions})
    else:
        partitions_now = count(group.partitions, "partition")
        since = f" (messages from {shown(start.when)} on)" if isinstance(start, Time) else ""
        say(f"group {name} of stream {stream} starts at sequence {seq:,}{since}, with {partitions_now}")


async def _reset(
    where: Target,
    stream: str,
    name: str,
    bucket: str,
    start: _Start | None,
    partitions: int | None,
    tokens: tuple[int, ...] | None,
) -> tuple[Group, int]:
    async with _session(where, bucket) as js:
        known = await Group.open(js, stream, name, bucket=bucket, patience=where.timeout)
        group = Group(
            js,
            stream,
            name,
            partitions=partitions or known.partitions,
            key=known.key if tokens is None else tokens or None,
            subject=known.subject,
            token=known.token,
            bucket=bucket,
            patience=where.timeout,
        )
        return group, await group.reset(start)


def _check(stream: str, name: str, bucket: str) -> None:
    """Refuse invalid names: servers do not answer requests with one."""
    check_name(stream, "stream name")
    check_name(name, "group name")
    check_name(bucket, "bucket name")


@asynccontextmanager
async def _session(where: Target, bucket: str) -> AsyncIterator[JetStreamContext]:
    """Connect for the duration of a block, and report what a group raises besides errors of NATS."""
    async with connected(where) as js:
        await check_jetstream(js, bucket_stream(bucket))
        try:
            yield js
        except BucketNotFoundError as error:
            raise click.ClickException(str(error.description)) from error
        except NotFoundError as error:
            raise click.ClickException(str(error.description)) from error
        except KeyError as error:
            raise click.ClickException(str(error.args[0])) from error
        except ValueError as error:
            raise click.ClickException(str(error).replace("pass start", "give --start")) from error
