"""``jetstream-ext dlq``: the dead letters of a stream, handed back or dropped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import click
from nats.js import JetStreamContext
from nats.js.errors import NoStreamResponseError, NotFoundError

from jetstream_ext.cli.completion import complete_buckets, complete_streams
from jetstream_ext.cli.connection import Target, check_jetstream, connected, connection_options
from jetstream_ext.cli.options import CommandGroup, cli_option, json_option
from jetstream_ext.cli.output import console, count, say, shortened, table, text_or_base64, write_json
from jetstream_ext.client.api import get_at_leader
from jetstream_ext.client.connection import Context
from jetstream_ext.log import DeadLetterMessage, OffsetStore, Redriven, dead_letters, drop, redrive
from jetstream_ext.protocol.dead_letters import dead_letter_of
from jetstream_ext.protocol.numbers import LARGEST
from jetstream_ext.protocol.subjects import check_filter, check_name, covers
from jetstream_ext.text import printable

_SHOWN: Final = 200  # characters of a payload or an error in a table


@click.group("dlq", cls=CommandGroup, short_help="List dead letters, hand them back, or drop them.")
def command() -> None:
    """Show the inputs that a worker could not handle, hand them back to their streams, or drop them.

    Examples:
        jetstream-ext dlq list TOTALS totals-dead
        jetstream-ext dlq redrive TOTALS totals-dead
    """


@command.command("list", short_help="List dead letters.")
@click.argument("stream", shell_complete=complete_streams)
@click.argument("subject")
@cli_option(
    "--limit", type=click.IntRange(1), metavar="N", default=100, show_default=True, help="The most letters to list."
)
@json_option()
@connection_options()
def list_command(where: Target, stream: str, subject: str, limit: int, as_json: bool) -> None:
    """List the dead letters of STREAM on SUBJECT, the oldest first.

    Examples:
        jetstream-ext dlq list TOTALS totals-dead
    """
    _check(stream, subject)
    found = asyncio.run(_list(where, stream, subject, limit + 1))
    more = len(found) > limit
    del found[limit:]
    if as_json:
        write_json({"stream": stream, "subject": subject, "letters": [_as_json(it) for it in found], "more": more})
        return
    lacks = ["lacks"] if any(letter.cut for letter in found) else []
    rows = table("sequence", "from", "subject", "attempts", "error", *lacks)
    for letter in found:
        rows.add_row(
            str(letter.message.seq),
            f"{letter.stream} {letter.seq}",
            printable(letter.subject),
            str(letter.attempts),
            shortened(printable(letter.error), _SHOWN, count(len(letter.error), "character")),
            *[printable(", ".join(letter.cut)) for _ in lacks],
        )
    screen = console()
    screen.print(rows)
    screen.print(f"the first {limit:,} dead letters" if more else count(len(found), "dead letter"))


async def _list(where: Target, stream: str, subject: str, limit: int) -> list[DeadLetterMessage]:
    found: list[DeadLetterMessage] = []
    async with _session(where, stream) as js:
        async for letter in dead_letters(js, stream, subject, patience=where.timeout):
            found.append(letter)
            if len(found) == limit:
                break
    return found


@command.command("show", short_help="Show one dead letter.")
@click.argument("stream", shell_complete=complete_streams)
@click.argument("subject")
@click.argument("sequence", type=click.IntRange(1, LARGEST))
@cli_option("--full", is_flag=True, help="Show the whole of a long payload.")
@json_option()
@connection_options()
def show_command(where: Target, stream: str, subject: str, sequence: int, full: bool, as_json: bool) -> None:
    """Show the dead letter with SEQUENCE of STREAM: where it comes from, why, its headers and its payload.

    Examples:
        jetstream-ext dlq show TOTALS totals-dead 4711
    """
    _check(stream, subject)
    letter = asyncio.run(_find(where, stream, subject, sequence))
    if letter is None:
        raise click.ClickException(f"stream {stream!r} has no dead letter with sequence {sequence} on {subject!r}")
    if as_json:
        write_json(_as_json(letter) | {"headers": list(letter.headers)} | text_or_base64("data", letter.data))
        return
    say(f"dead letter {sequence} of stream {stream}")
    for name, value in (
        ("from", f"stream {letter.stream}, sequence {letter.seq}, {letter.time.isoformat()}"),
        ("subject", letter.subject),
        ("worker", letter.worker),
        ("attempts", str(letter.attempts)),
        ("error", letter.error),
        *([("lacks, because it was too large", ", ".join(letter.cut))] if letter.cut else ()),
        *((f"header {name}", value) for name, value in letter.headers),
    ):
        say(f"{printable(name)}: {printable(value)}")
    text = letter.data.decode("utf-8", "replace")
    size = count(len(letter.data), "byte")
    say(f"payload, {size}: {text if full else shortened(text, 10 * _SHOWN, '--full shows all of it')}")


async def _find(where: Target, stream: str, subject: str, sequence: int) -> DeadLetterMessage | None:
    async with _session(where, stream, retries=False) as js:
        message = await get_at_leader(Context(js), stream, {"seq": sequence}, where.timeout)
    return None if message is None or not covers(subject, message.subject) else dead_letter_of(message)


@command.command("redrive", short_help="Hand dead letters back to their streams.")
@click.argument("stream", shell_complete=complete_streams)
@click.argument("subject")
@click.argument("sequences", type=click.IntRange(1, LARGEST), nargs=-1)
@cli_option(
    "--to-stream",
    shell_complete=complete_streams,
    metavar="NAME",
    show_default="that of the input",
    help="The stream that must store them.",
)
@cli_option("--limit", type=click.IntRange(1), metavar="N", help="The most letters to hand back.")
@cli_option("--again", is_flag=True, help="Also letters of which it is not known whether they were handed back.")
@cli_option(
    "--bucket",
    shell_complete=complete_buckets,
    default="offsets",
    show_default=True,
    metavar="NAME",
    help="Bucket that notes what is on its way.",
)
@json_option()
@connection_options()
def redrive_command(
    where: Target,
    stream: str,
    subject: str,
    sequences: tuple[int, ...],
    to_stream: str | None,
    limit: int | None,
    again: bool,
    bucket: str,
    as_json: bool,
) -> None:
    """Publish the dead letters of STREAM on SUBJECT again where they come from, each once, and delete them.

    With SEQUENCES, only those. The command can be repeated after any failure.

    Examples:
        jetstream-ext dlq redrive TOTALS totals-dead
        jetstream-ext dlq redrive TOTALS totals-dead 4711 4712
    """
    _check(stream, subject)
    check_name(bucket, "bucket name")
    done = asyncio.run(_redrive(where, stream, subject, sequences, to_stream, limit, again, bucket))
    if as_json:
        write_json({"stream": stream, "sent": done.sent, "found": done.found, "left": done.left})
        return
    text = f"handed back {count(done.sent, 'dead letter')}"
    if done.found:
        text += f"; {done.found:,} more had been handed back by an earlier command"
    if done.left:
        text += f"; left in place: {count(done.left, 'message')} (no dead letter, or cannot be sent as it was)"
    say(text)


async def _redrive(
    where: Target,
    stream: str,
    subject: str,
    sequences: tuple[int, ...],
    to_stream: str | None,
    limit: int | None,
    again: bool,
    bucket: str,
) -> Redriven:
    async with _session(where, stream) as js:
        return await redrive(
            js,
            stream,
            subject,
            seqs=sequences or None,
            to_stream=to_stream,
            max_messages=limit,
            again=again,
            offsets=OffsetStore(js, bucket),
            patience=where.timeout,
        )


@command.command("drop", short_help="Delete dead letters.")
@click.argument("stream", shell_complete=complete_streams)
@click.argument("sequences", type=click.IntRange(1, LARGEST), nargs=-1, required=True)
@json_option()
@connection_options()
def drop_command(where: Target, stream: str, sequences: tuple[int, ...], as_json: bool) -> None:
    """Delete the dead letters with SEQUENCES from STREAM, for good.

    Examples:
        jetstream-ext dlq drop TOTALS 4711 4712
    """
    check_name(stream, "stream name")
    dropped = asyncio.run(_drop(where, stream, sequences))
    if as_json:
        write_json({"stream": stream, "dropped": dropped})
    else:
        say(f"deleted {count(dropped, 'dead letter')}")


async def _drop(where: Target, stream: str, sequences: tuple[int, ...]) -> int:
    async with _session(where, stream) as js:
        return await drop(js, stream, sequences, patience=where.timeout)


def _as_json(letter: DeadLetterMessage) -> dict[str, Any]:
    return {
        "seq": letter.message.seq,
        "origin": {
            "stream": letter.stream,
            "subject": letter.subject,
            "seq": letter.seq,
            "time": letter.time.isoformat(),
        },
        "attempts": letter.attempts,
        "error": letter.error,
        "worker": letter.worker,
        "cut": letter.cut,
        "complete": letter.complete,
    }


def _check(stream: str, subject: str) -> None:
    """Refuse invalid names: servers do not answer requests with one."""
    check_name(stream, "stream name")
    check_filter(subject)


@asynccontextmanager
async def _session(where: Target, stream: str, *, retries: bool = True) -> AsyncIterator[JetStreamContext]:
    async with connected(where) as js:
        if retries:
            await check_jetstream(js, stream)
        try:
            yield js
        except NoStreamResponseError as error:
            raise click.ClickException("no stream stores the subject of a dead letter; it stays") from error
        except NotFoundError as error:
            raise click.ClickException(str(error.description)) from error
        except ValueError as error:
            raise click.ClickException(str(error)) from error
