"""``jetstream-ext export``: write a stream to a file, resumable through ``FILE.part`` and ``FILE.part.json``."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

import click
import nats.errors
import orjson
from nats.js.errors import NotFoundError

from jetstream_ext.cli.connection import Target, check_stream, connected, connection_options, target
from jetstream_ext.cli.formats import FORMATS, WRITERS, JsonLines, format_of
from jetstream_ext.cli.output import STOPPED, count, one_line, progress, write_json
from jetstream_ext.client.api import stream_state
from jetstream_ext.client.context import Context
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.protocol.stored_msg import StoredMsg

_BLOCK: Final = 1_000
_SYNC_BYTES: Final = 8 << 20
_REPORT_EVERY: Final = 500


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """The content of an export's journal: what is exported, and how much of it is in the file."""

    stream: str
    created: str  # tells streams of the same name apart
    subject: str  # the filter; empty is none
    first: int
    end: int  # the last sequence of the export
    format: str
    seq: int = 0  # the last sequence in the file
    messages: int = 0
    size: int = 0

    def same_export(self, other: Progress) -> bool:
        """Whether both belong to the same export."""
        names = ("stream", "created", "subject", "first", "format")
        return all(getattr(self, name) == getattr(other, name) for name in names)


class Part:
    """The unfinished file, open for appending.

    Everything that the journal counts is on the disk. A resumed export cuts off the rest.
    """

    def __init__(self, file: Path, writer: JsonLines, begin: Progress, *, resume: bool) -> None:
        self.file = file
        self.path: Path = file.with_name(f"{file.name}.part")
        self.journal: Path = file.with_name(f"{file.name}.part.json")
        self.progress: Progress = self._journal(begin) if resume else begin
        self._writer = writer
        self._pending: list[StoredMsg] = []
        self._written = self.progress
        self._stream: IO[bytes] | None = None

    def _journal(self, begin: Progress) -> Progress:
        try:
            found = Progress(**orjson.loads(self.journal.read_bytes()))
        except FileNotFoundError:
            return begin
        except (orjson.JSONDecodeError, TypeError) as error:
            raise click.ClickException(
                f"{self.journal} is not a valid journal; start again without --resume"
            ) from error
        if not found.same_export(begin):
            raise click.ClickException(
                f"{self.path} belongs to another export (stream, subject, start or format); start without --resume"
            )
        if not self.path.is_file() or self.path.stat().st_size < found.size:
            raise click.ClickException(f"{self.path} is shorter than its journal says; start again without --resume")
        return found

    def __enter__(self) -> Self:
        if self.progress.size:
            self._stream = self.path.open("r+b")
            self._stream.truncate(self.progress.size)
            self._stream.seek(self.progress.size)
        else:
            self._stream = self.path.open("wb")
            self._append(self._writer.head(), self.progress)
            self.save()
        return self

    @property
    def begun(self) -> bool:
        """Whether a message was written, on the disk or not."""
        return self._written.seq > 0

    def add(self, message: StoredMsg) -> None:
        """Append a message."""
        self._pending.append(message)
        if len(self._pending) >= _BLOCK:
            self._flush()
            if self._written.size - self.progress.size >= _SYNC_BYTES:
                self.save()

    def save(self) -> None:
        """Write everything to the disk, then update the journal."""
        assert self._stream is not None
        self._flush()
        self._stream.flush()
        os.fsync(self._stream.fileno())
        fresh = self.journal.with_name(f"{self.journal.name}.new")
        fresh.write_bytes(orjson.dumps(dataclasses.asdict(self._written)))
        fresh.replace(self.journal)
        self.progress = self._written

    def finish(self) -> None:
        """Turn the complete, closed part into the finished file."""
        self._writer.finish(self.path, self.file)
        self.journal.unlink(missing_ok=True)

    def _flush(self) -> None:
        messages, self._pending = self._pending, []
        if messages:
            total = self._written.messages + len(messages)
            done = dataclasses.replace(self._written, seq=messages[-1].seq, messages=total)
            self._append(self._writer.rows(messages), done)

    def _append(self, data: bytes, done: Progress) -> None:
        assert self._stream is not None
        self._stream.write(data)
        self._written = dataclasses.replace(done, size=done.size + len(data))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._stream is not None
        try:
            # Do not write again after an error of the disk; nats-py's timeouts are OSErrors too.
            if not isinstance(error, OSError) or isinstance(error, nats.errors.Error):
                self.save()
        finally:
            try:
                self._stream.close()
            except OSError:
                if error is None:
                    raise


def _remove_part(file: Path) -> None:
    for path in (file.with_name(f"{file.name}.part"), file.with_name(f"{file.name}.part.json")):
        path.unlink(missing_ok=True)


@click.command("export", short_help="Write a stream to a file.")
@click.argument("stream")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--format", "given", type=click.Choice(FORMATS), help="Format of FILE; the default is that of its name.")
@click.option("--subject", default="", metavar="FILTER", help="Export only messages of this subject or filter.")
@click.option(
    "--start-seq", type=click.IntRange(1), default=1, metavar="SEQ", show_default=True, help="Start at this sequence."
)
@click.option("--resume", is_flag=True, help="Continue an earlier export to FILE.")
@click.option("--overwrite", is_flag=True, help="Replace FILE and an unfinished export to it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, and no progress bar.")
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
    """Write the messages of STREAM, up to its current last one, to FILE: CSV, JSON lines or Parquet.

    The unfinished file is FILE.part. After Ctrl-C, a lost connection or a full disk, the same command with --resume
    continues it. The stream's leader confirms that no message is missing. Needs allow_direct and nats-server 2.11.
    """
    check_stream(stream)
    form = format_of(file, given)
    if file.exists() and not overwrite:
        raise click.ClickException(f"{file} already exists; --overwrite replaces it")
    part_file = file.with_name(f"{file.name}.part")
    if part_file.exists() and not (resume or overwrite):
        raise click.ClickException(
            f"{part_file} has an unfinished export; --resume continues it, --overwrite starts again"
        )
    start = time.monotonic()
    job = _Export(target(ctx, timeout), file, Progress(stream, "", subject, start_seq, 0, form), resume=resume)
    try:
        part = asyncio.run(job.run(show=not as_json))
        part.finish()  # outside the event loop, which would delay a Ctrl-C
    except KeyboardInterrupt:
        if not job.keep():
            raise
        click.echo(f"stopped: {_stored(job.part)}", err=True)
        ctx.exit(STOPPED)
    except (nats.errors.Error, OSError) as error:
        if not job.keep():
            raise
        # pyarrow replaces the text of the operating system
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else one_line(error)
        raise click.ClickException(f"{reason}; {_stored(job.part)}") from error
    done = part.progress
    seconds = time.monotonic() - start
    if as_json:
        write_json(
            {
                "file": str(file),
                "stream": done.stream,
                "messages": done.messages,
                "last_seq": done.seq,
                "end": done.end,
                "bytes": file.stat().st_size,
                "seconds": round(seconds, 3),
            }
        )
    else:
        click.echo(f"{count(done.messages, 'message')} up to sequence {done.seq:,} in {file} ({seconds:.1f} s)")


def _stored(part: Part | None) -> str:
    assert part is not None
    done = part.progress
    is_are = "is" if done.messages == 1 else "are"
    return (
        f"{count(done.messages, 'message')} up to sequence {done.seq:,} of {done.end:,} {is_are} in {part.path}; "
        "the same command with --resume continues"
    )


class _Export:
    """One run; `part` is set before anything is written."""

    def __init__(self, where: Target, file: Path, wanted: Progress, *, resume: bool) -> None:
        self.part: Part | None = None
        self._where = where
        self._file = file
        self._wanted = wanted
        self._resume = resume

    def keep(self) -> bool:
        """Return whether the export can be resumed; without any message, remove its files."""
        if self.part is None or not self.part.path.exists():
            return False
        if not self.part.begun:
            _remove_part(self._file)
        return self.part.begun

    async def run(self, *, show: bool) -> Part:
        """Export, and return the complete part."""
        wanted = self._wanted
        async with connected(self._where) as js:
            try:
                state = await stream_state(Context(js), wanted.stream)
            except NotFoundError as error:
                raise click.ClickException(f"stream {wanted.stream!r} does not exist") from error
            if not self._resume:
                _remove_part(self._file)
            first = max(wanted.first, state.first_seq)
            begin = dataclasses.replace(wanted, created=state.created, end=state.last_seq)
            with Part(self._file, WRITERS[wanted.format], begin, resume=self._resume) as part:
                self.part = part
                end = part.progress.end
                start = max(first, part.progress.seq + 1)
                if start <= end:
                    reads = DirectGet(js, wanted.stream).scan(
                        subject=wanted.subject or None, seq=start, up_to_seq=end, confirm=True
                    )
                    moved = part.progress.messages
                    with progress(wanted.stream, end - first + 1, before=moved, show=show) as report:
                        async with reads as messages:
                            async for message in messages:
                                part.add(message)
                                moved += 1
                                if not moved % _REPORT_EVERY:
                                    report(message.seq - first + 1, moved)
                        report(end - first + 1, moved)
            return part
