"""``jetstream-ext export``: a stream into a file, resumable by ``FILE.part`` and ``FILE.part.json``."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

import click
import nats.errors
import orjson
from nats.js.errors import NotFoundError

from jetstream_ext.cli.connection import Target, check_stream, connected, connection_options, target
from jetstream_ext.cli.formats import FORMATS, WRITERS, Writer, format_of
from jetstream_ext.cli.output import count, one_line, progress, write_json
from jetstream_ext.client.api import Api
from jetstream_ext.client.context import Context
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.protocol.stored_msg import StoredMsg

_BLOCK: Final = 1_000
_SYNC_BYTES: Final = 8 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """How far an export is: what its journal says.

    Attributes:
        stream: What is exported,
        created: and when that was created: another stream of the same name is another stream.
        subject: The filter, empty for none.
        first: Where it began.
        end: The last sequence that belongs to it.
        format: The file's format.
        seq: The last sequence that is in the file (0: none).
        messages: How many messages that are.
        size: How many bytes that are.
    """

    stream: str
    created: str
    subject: str
    first: int
    end: int
    format: str
    seq: int = 0
    messages: int = 0
    size: int = 0

    def same_export(self, other: Progress) -> bool:
        """Whether both are of one export."""
        return all(
            getattr(self, name) == getattr(other, name) for name in ("stream", "created", "subject", "first", "format")
        )


class Part:
    """The unfinished file, open to be appended to.

    What the journal says is on the disk, whatever happens; anything after it is cut off when the export goes on.
    """

    def __init__(self, file: Path, writer: Writer, begin: Progress, *, resume: bool) -> None:
        self.file = file
        self.path: Path = file.with_name(f"{file.name}.part")
        self.journal: Path = file.with_name(f"{file.name}.part.json")
        self.progress: Progress = self._found(begin) if resume else begin
        self._writer = writer
        self._waiting: list[StoredMsg] = []
        self._written = self.progress
        self._stream: IO[bytes] | None = None

    def _found(self, begin: Progress) -> Progress:
        try:
            found = Progress(**orjson.loads(self.journal.read_bytes()))
        except FileNotFoundError:
            return begin
        except (orjson.JSONDecodeError, TypeError) as error:
            raise click.ClickException(f"{self.journal} is not what it should be; start without --resume") from error
        if not found.same_export(begin):
            raise click.ClickException(
                f"{self.path} is of another export (stream, subject, start or format differ); start without --resume"
            )
        if not self.path.is_file() or self.path.stat().st_size < found.size:
            raise click.ClickException(f"{self.path} is shorter than its journal says; start without --resume")
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
        """Whether a message was written, safely on the disk or not."""
        return self._written.seq > 0

    def add(self, message: StoredMsg) -> None:
        """Append a message."""
        self._waiting.append(message)
        if len(self._waiting) >= _BLOCK:
            self._flush()
            if self._written.size - self.progress.size >= _SYNC_BYTES:
                self.save()

    def save(self) -> None:
        """Bring to the disk what was added, and then note that it is there."""
        assert self._stream is not None
        self._flush()
        self._stream.flush()
        os.fsync(self._stream.fileno())
        fresh = self.journal.with_name(f"{self.journal.name}.new")
        fresh.write_bytes(orjson.dumps(dataclasses.asdict(self._written)))
        fresh.replace(self.journal)
        self.progress = self._written

    def finish(self) -> None:
        """Make the finished file of it, once it is complete and closed."""
        self._writer.finish(self.path, self.file)
        self.journal.unlink(missing_ok=True)

    def _flush(self) -> None:
        messages, self._waiting = self._waiting, []
        if messages:
            done = dataclasses.replace(
                self._written, seq=messages[-1].seq, messages=self._written.messages + len(messages)
            )
            self._append(self._writer.rows(messages), done)

    def _append(self, data: bytes, done: Progress) -> None:
        assert self._stream is not None
        self._stream.write(data)
        self._written = dataclasses.replace(done, size=done.size + len(data))

    def _close(self) -> None:
        if self._stream is not None:
            stream, self._stream = self._stream, None
            stream.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is None:
            return
        try:
            # A full disk would only be met again; but a timeout of nats-py is an OSError, too.
            if not isinstance(error, OSError) or isinstance(error, nats.errors.Error):
                self.save()
        finally:
            try:
                self._close()
            except OSError:
                if error is None:
                    raise


def _remove_part(file: Path) -> None:
    """Remove what an unfinished export left."""
    for path in (file.with_name(f"{file.name}.part"), file.with_name(f"{file.name}.part.json")):
        path.unlink(missing_ok=True)


def _as_json(progress: Progress, file: Path, *, seconds: float) -> dict[str, Any]:
    """Return the result of an export for scripts."""
    return {
        "file": str(file),
        "stream": progress.stream,
        "messages": progress.messages,
        "last_seq": progress.seq,
        "end": progress.end,
        "bytes": file.stat().st_size,
        "seconds": round(seconds, 3),
    }


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
        write_json(_as_json(done, file, seconds=seconds))
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
            _remove_part(self._file)
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
                _remove_part(self._file)
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
