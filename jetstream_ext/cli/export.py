"""``jetstream-ext export``: a stream into a file."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Final

import click
import nats.errors
from nats.js.errors import NotFoundError

from jetstream_ext.cli import parts
from jetstream_ext.cli.connection import Target, check_stream, connected, connection_options, target
from jetstream_ext.cli.failures import one_line
from jetstream_ext.cli.formats import FORMATS, WRITERS, format_of
from jetstream_ext.cli.output import count, progress, write_json
from jetstream_ext.cli.parts import Part, Progress
from jetstream_ext.client.api import Api
from jetstream_ext.client.context import Context
from jetstream_ext.client.direct import DirectGet

_STOPPED: Final = 130
_TELL_EVERY: Final = 500


@click.command("export", short_help="Write a stream to a file.")
@click.argument("stream")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--format", "given", type=click.Choice(FORMATS), help="Format of FILE; otherwise its name says.")
@click.option("--subject", default="", metavar="FILTER", help="Only messages of these subjects.")
@click.option(
    "--start-seq", type=click.IntRange(1), default=1, metavar="SEQ", show_default=True, help="Begin at this sequence."
)
@click.option("--resume", is_flag=True, help="Go on where an earlier export to FILE stopped.")
@click.option("--overwrite", is_flag=True, help="Replace FILE, and what an earlier export left of it.")
@click.option("--json", "as_json", is_flag=True, help="The result as a JSON object; no progress bar.")
@connection_options()
@click.pass_context
def command(
    ctx: click.Context,
    stream: str,
    file: Path,
    given: str | None,
    subject: str,
    start_seq: int,
    resume: bool,
    overwrite: bool,
    as_json: bool,
    timeout: float,
) -> None:
    """Write the messages of STREAM, up to its last one now, to FILE: CSV, JSON lines or Parquet.

    Until it is complete it is FILE.part; after Ctrl-C, a lost connection or a full disk the same command with --resume
    goes on. That nothing is missing is proved at the stream's leader. Needs allow_direct, and nats-server 2.11.
    """
    check_stream(stream)
    form = format_of(file, given)
    if file.exists() and not overwrite:
        raise click.ClickException(f"{file} is there already; --overwrite replaces it")
    part_file = file.with_name(f"{file.name}.part")
    if part_file.exists() and not (resume or overwrite):
        raise click.ClickException(
            f"{part_file} is there of an earlier export; --resume goes on, --overwrite starts anew"
        )
    began = time.monotonic()
    job = _Export(target(ctx, timeout), file, Progress(stream, "", subject, start_seq, 0, form), resume=resume)
    try:
        part = asyncio.run(job.run(show=not as_json))
        part.finish()  # out of the loop, which would let a Ctrl-C wait for it
    except KeyboardInterrupt:
        if not job.keep():
            raise
        click.echo(f"stopped: {_stored(job.part)}", err=True)
        ctx.exit(_STOPPED)
    except (nats.errors.Error, OSError) as error:
        if not job.keep():
            raise
        # pyarrow has texts of its own for what is wrong with a disk
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else one_line(error)
        raise click.ClickException(f"{reason}; {_stored(job.part)}") from error
    done = part.progress
    seconds = time.monotonic() - began
    if as_json:
        write_json(parts.as_json(done, file, seconds=seconds))
    else:
        click.echo(f"{count(done.messages, 'message')} up to sequence {done.seq:,} in {file} ({seconds:.1f} s)")


def _stored(part: Part | None) -> str:
    assert part is not None
    done = part.progress
    return (
        f"{count(done.messages, 'message')} up to sequence {done.seq:,} of {done.end:,} {'is' if done.messages == 1 else 'are'} in {part.path}; "
        "the same command with --resume goes on"
    )


class _Export:
    """One run; `part` is there as soon as something may be in it."""

    def __init__(self, where: Target, file: Path, wanted: Progress, *, resume: bool) -> None:
        self.part: Part | None = None
        self._where = where
        self._file = file
        self._wanted = wanted
        self._resume = resume

    def keep(self) -> bool:
        """Return whether there is something to go on with; of an export that got no message, leave nothing."""
        if self.part is None or not self.part.path.exists():
            return False
        if not self.part.begun:
            parts.remove(self._file)
        return self.part.begun

    async def run(self, *, show: bool) -> Part:
        """Export, and return what only has to be finished."""
        wanted = self._wanted
        async with connected(self._where) as js:
            try:
                info = await Api(Context(js)).ask(f"STREAM.INFO.{wanted.stream}")
            except NotFoundError as error:
                raise click.ClickException(f"there is no stream {wanted.stream!r}") from error
            if not self._resume:
                parts.remove(self._file)
            first = max(wanted.first, info["state"]["first_seq"])
            begin = Progress(
                wanted.stream, info["created"], wanted.subject, wanted.first, info["state"]["last_seq"], wanted.format
            )
            with Part(self._file, WRITERS[wanted.format], begin, resume=self._resume) as part:
                self.part = part
                end = part.progress.end
                start = max(first, part.progress.seq + 1)
                if start <= end:
                    reads = DirectGet(js, wanted.stream).scan(
                        subject=wanted.subject or None, seq=start, up_to_seq=end, confirm=True
                    )
                    moved = part.progress.messages
                    with progress(wanted.stream, end - first + 1, before=moved, show=show) as tell:
                        async with reads as messages:
                            async for message in messages:
                                part.add(message)
                                moved += 1
                                if not moved % _TELL_EVERY:
                                    tell(message.seq - first + 1, moved)
                        tell(end - first + 1, moved)
            return part
