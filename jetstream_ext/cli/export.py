"""``jetstream-ext export``: write a stream to a file, resumable through ``FILE.part`` and ``FILE.part.json``."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import click
import nats.errors
import orjson
from nats.js import JetStreamContext

from jetstream_ext.cli.completion import complete_streams
from jetstream_ext.cli.connection import Target, connected, connection_options, existing_stream
from jetstream_ext.cli.files.formats import FORMATS, STDIO, check_open, converted, delimiter_of, exclusive, format_of
from jetstream_ext.cli.files.message_files import INSTEAD, START_AGAIN, Csv, JsonLines, Parquet, UnwritableError
from jetstream_ext.cli.files.table_files import TableCsv, TableLines, TableParquet
from jetstream_ext.cli.options import Command, cli_option, json_option
from jetstream_ext.cli.output import Stopped, count, is_are, one_line, progress, say, write_json, write_stdout
from jetstream_ext.client.connection import Context
from jetstream_ext.client.direct import DirectGet, ScanOptions
from jetstream_ext.errors import ConversionError
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.numbers import LARGEST
from jetstream_ext.protocol.subjects import check_name

if TYPE_CHECKING:
    import pyarrow as pa

_MESSAGES: Final = "Which messages"
_FILE: Final = "File"
_BLOCK: Final = 1_000
_SYNC_BYTES: Final = 8 << 20
_REPORT_EVERY: Final = 500


@click.command("export", cls=Command, short_help="Write a stream to a file.")
@click.argument("stream", shell_complete=complete_streams)
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path))
@cli_option(
    "--format", "given", type=click.Choice(FORMATS), show_default="from its suffix", group=_FILE, help="Format of FILE."
)
@cli_option(
    "--rows",
    is_flag=True,
    group=_FILE,
    help="Write the table that ingest read: the keys of JSON payloads become columns.",
)
@cli_option("--delimiter", metavar="CHAR", group=_FILE, help="What separates the fields of CSV: a character, or 'tab'.")
@cli_option(
    "--subject", default="", metavar="FILTER", group=_MESSAGES, help="Export only messages of this subject or filter."
)
@cli_option(
    "--start-seq",
    type=click.IntRange(1, LARGEST),
    default=1,
    metavar="SEQ",
    show_default=True,
    group=_MESSAGES,
    help="Start at this sequence.",
)
@cli_option("--resume", is_flag=True, help="Continue an earlier export to FILE.")
@cli_option("--overwrite", is_flag=True, help="Replace FILE and an unfinished export to it.")
@json_option("Print one JSON object, and no progress bar.")
@connection_options()
def command(
    where: Target,
    stream: str,
    file: Path,
    given: str | None,
    rows: bool,
    delimiter: str | None,
    subject: str,
    start_seq: int,
    resume: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write the messages of STREAM, up to its current last one, to FILE: CSV, JSON lines or Parquet.

    FILE may end with .gz or .zst; - is stdout. ingest stores the messages of such a file again as they were. With --rows,
    the file has the table that ingest read.

    The unfinished file is FILE.part. After Ctrl-C, a lost connection or a full disk, the same command with --resume
    continues it. The stream's leader confirms that no message is missing. The stream needs allow_direct, and the server
    must be 2.11 or newer.

    Examples:
        jetstream-ext export ORDERS orders.parquet
        jetstream-ext export ORDERS orders.csv.gz --rows
        jetstream-ext export ORDERS orders.csv.gz --rows --resume
        jetstream-ext export ORDERS - --format jsonl --subject orders.de | grep refund
    """
    check_name(stream, "stream name")  # servers do not answer requests with an invalid one
    form = format_of(file, given)
    writer = _writer(form, delimiter_of(file, delimiter, form), rows=rows)
    wanted = _Journal(stream, "", subject, start_seq, writer.name)
    start = time.monotonic()
    if file == STDIO:
        if resume or overwrite:
            raise click.UsageError("--resume and --overwrite are for files, not for -")
        done = _to_stdout(where, wanted, writer, show=not as_json)
    else:
        done = _to_file(where, file, wanted, writer, resume=resume, overwrite=overwrite, show=not as_json)
    seconds = time.monotonic() - start
    if writer.headers_left_out:
        say(f"left out {count(writer.headers_left_out, 'header')}: --rows writes only payloads", err=True)
    if as_json:
        write_json(
            {
                "file": str(file),
                "stream": done.stream,
                "messages": done.messages,
                "last_seq": done.seq,
                "end": done.end,
                "headers_left_out": writer.headers_left_out,
                "bytes": done.size if file == STDIO else file.stat().st_size,
                "seconds": round(seconds, 3),
            },
            err=file == STDIO,
        )
    else:
        name = "stdout" if file == STDIO else file
        text = f"wrote {count(done.messages, 'message')} up to sequence {done.seq:,} to {name} ({seconds:.1f} s)"
        say(text, err=file == STDIO)


def _to_file(
    where: Target, file: Path, wanted: _Journal, writer: JsonLines, *, resume: bool, overwrite: bool, show: bool
) -> _Journal:
    if file.exists() and not file.is_file():  # a device or pipe, which the finished file would replace
        raise click.ClickException(f"{file} is not a regular file; - with --format writes to stdout")
    if file.is_symlink():  # the finished file would replace the link, not its target
        raise click.ClickException(f"{file} is a symbolic link; give the path of its target, {os.path.realpath(file)}")
    part = _Part(file, wanted, writer)
    for path in part.files():
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise click.ClickException(
                f"{path} is a symbolic link, a directory or a pipe; export writes unfinished data there: remove it, or export "
                "to another file"
            )
    with part.locked() as unfinished:
        if file.exists() and not overwrite:
            raise click.ClickException(f"{file} already exists; --overwrite replaces it")
        if unfinished and not (resume or overwrite):
            raise click.ClickException(
                f"{part.path} has an unfinished export; --resume continues it, --overwrite starts again"
            )
        _complete(where, part, resume=resume, show=show)
    return part.saved


def _complete(where: Target, part: _Part, *, resume: bool, show: bool) -> None:
    """Write the file; if that fails, say what the unfinished file has."""
    try:
        if resume:
            part.load()  # outside the event loop, because the file may be large
        asyncio.run(_export(where, part, show=show))
        part.finish()  # outside the event loop, which would delay a Ctrl-C
    except UnwritableError:
        part.remove()  # continuing it would end in the same way
        raise
    except KeyboardInterrupt:
        if not part.keep():
            raise
        raise Stopped(f"stopped: {part.state()}") from None
    except (nats.errors.Error, OSError) as error:
        if not part.keep():
            raise
        # pyarrow replaces the text of the operating system
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else one_line(error)
        raise click.ClickException(f"{reason}; {part.state()}") from error


def _to_stdout(where: Target, wanted: _Journal, writer: JsonLines, *, show: bool) -> _Journal:
    check_open(sys.stdout, "stdout")
    terminal = sys.stdout.isatty()
    if writer.appends:
        pipe = _Pipe(wanted, writer)
        asyncio.run(_export(where, pipe, show=show and not terminal))
        return pipe.saved
    if terminal and not writer.is_text:
        raise click.UsageError("Parquet is not text: let - go to a file or another program")
    with tempfile.TemporaryDirectory(prefix="jetstream-ext-") as folder:
        file = Path(folder) / "export"
        part = _Part(file, wanted, writer)
        asyncio.run(_export(where, part, show=show and not terminal))
        part.finish()
        with file.open("rb") as content:
            while some := content.read(_SYNC_BYTES):
                write_stdout(some)
        return dataclasses.replace(part.saved, size=file.stat().st_size)


def _writer(form: str, delimiter: str, *, rows: bool) -> JsonLines:
    if form == "csv":
        return TableCsv(delimiter) if rows else Csv(delimiter)
    if form == "jsonl":
        return TableLines() if rows else JsonLines()
    return TableParquet() if rows else Parquet()


async def _export(where: Target, part: _Part | _Pipe, *, show: bool) -> None:
    wanted = part.saved
    async with connected(where) as js:
        state = await existing_stream(js, wanted.stream)
        first = max(wanted.first, state.first_seq)
        begin = dataclasses.replace(wanted, created=state.created, end=state.last_seq)
        if first <= state.last_seq:
            state.check_direct_reads(Context(js).connection.server_version)
        with part.open(begin):
            end, moved = part.saved.end, part.saved.messages
            start = max(first, part.saved.seq + 1)
            if start > end:
                return
            scan: ScanOptions = {"subject": wanted.subject or None, "seq": start, "up_to_seq": end, "confirm": True}
            with progress(wanted.stream, end - first + 1, before=moved, show=show) as report:
                columns = isinstance(part, _Part) and part.schema is not None
                copy = _copy_batches if columns else _copy_messages
                async with aclosing(copy(js, wanted.stream, scan, part)) as steps:
                    async for seq, added in steps:
                        moved += added
                        report(seq - first + 1, moved)
                report(end - first + 1, moved)


async def _copy_messages(
    js: JetStreamContext, stream: str, scan: ScanOptions, part: _Part | _Pipe
) -> AsyncGenerator[tuple[int, int], None]:
    """Add the messages to the file; yield now and then a sequence, and how many messages were added since."""
    seq = added = 0
    async with DirectGet(js, stream).scan(**scan) as messages:
        async for message in messages:
            if part.add(message):
                await part.write()
            seq, added = message.seq, added + 1
            if added == _REPORT_EVERY:
                yield seq, added
                added = 0
    await part.write()
    if added:
        yield seq, added


async def _copy_batches(
    js: JetStreamContext, stream: str, scan: ScanOptions, part: _Part | _Pipe
) -> AsyncGenerator[tuple[int, int], None]:
    """As `_copy_messages`, for a file with columns."""
    from jetstream_ext.arrow.reading import exact_record_batches  # an extra, and slow to import

    assert isinstance(part, _Part)
    assert part.schema is not None
    try:
        async with exact_record_batches(js, stream, part.schema, _BLOCK, **scan) as batches:
            async for batch in batches:
                part.add_batch(batch)
                yield part.last_seq, batch.num_rows
    except ConversionError as error:
        raise UnwritableError(f"{one_line(error)}; {INSTEAD}") from error


@dataclasses.dataclass(frozen=True, slots=True)
class _Journal:
    """What is exported, and how much of it is in the file."""

    stream: str
    created: str  # tells streams of the same name apart
    subject: str  # the filter; "" selects all subjects
    first: int
    format: str
    end: int = 0  # the last sequence of the export
    seq: int = 0  # the last sequence in the file
    messages: int = 0
    size: int = 0
    crc: int = 0  # CRC-32 of these bytes of the file

    @classmethod
    def parse(cls, text: bytes) -> _Journal:
        """Return a stored journal; raise ValueError if it is not one."""
        found = orjson.loads(text)
        fields = dataclasses.fields(cls)
        if not isinstance(found, dict) or found.keys() != {field.name for field in fields}:
            raise ValueError
        for field in fields:
            value = found[field.name]
            if type(value).__name__ != field.type or (type(value) is int and value < 0):
                raise ValueError
        return cls(**found)


class _Part:
    """The unfinished file, and its journal `saved`, which counts only what is on the disk; resuming cuts off the rest."""

    def __init__(self, file: Path, wanted: _Journal, writer: JsonLines) -> None:
        self.path: Path = file.with_name(f"{file.name}.part")
        self.saved: _Journal = wanted
        self._file = file
        self._journal: Path = file.with_name(f"{file.name}.part.json")
        self._fresh_journal: Path = file.with_name(f"{file.name}.part.json.new")
        self._writer = writer
        self._pending: list[StoredMsg] = []
        self._written = wanted
        self._stream: IO[bytes] | None = None
        self._found: _Journal | None = None

    def files(self) -> tuple[Path, ...]:
        """Return the paths that the export writes before the file is finished."""
        return self.path, self._journal, self._fresh_journal, converted(self._file)

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Keep other exports from the file for the duration of a block; yield whether there is an unfinished one."""
        with exclusive(self.path) as existed:
            try:
                yield existed
            finally:
                if not existed and self._stream is None:  # this export did not begin
                    self.path.unlink(missing_ok=True)

    def load(self) -> None:
        """Find the export to continue, if there is one; raise ClickException if it is damaged."""
        try:
            self._found = _Journal.parse(self._journal.read_bytes())
        except FileNotFoundError:
            if self.path.exists() and not self._is_new():
                text = f"{self.path} lacks its journal {self._journal}; {START_AGAIN}"
                raise click.ClickException(text) from None
            return
        except ValueError as error:
            raise click.ClickException(
                f"{self._journal} is not a valid journal, or one of an older version; {START_AGAIN}"
            ) from error
        crc = _checksum(self.path, self._found.size) if self.path.is_file() else None
        if crc is None:
            raise click.ClickException(f"{self.path} is shorter than its journal says; {START_AGAIN}")
        if crc != self._found.crc:
            raise click.ClickException(f"{self.path} is damaged: it is not what was written; {START_AGAIN}")

    def _is_new(self) -> bool:
        """Return whether the file ends before its first message."""
        head = self._writer.head()
        with self.path.open("rb") as file:
            return head.startswith(file.read(len(head) + 1))

    @contextmanager
    def open(self, begin: _Journal) -> Iterator[None]:
        """Append to the file for the duration of a block; afterwards everything is on the disk."""
        if (found := self._found) is None:
            self._journal.unlink(missing_ok=True)
        else:
            same = {name: getattr(found, name) for name in ("end", "seq", "messages", "size", "crc")}
            if dataclasses.replace(begin, **same) != found:
                raise click.ClickException(
                    f"{self.path} belongs to an export with another stream, subject, start or format; {START_AGAIN}"
                )
            begin = found
        self.saved = self._written = begin
        with self.path.open("r+b" if begin.size else "wb") as self._stream:
            if begin.size:
                self._stream.truncate(begin.size)
                self._stream.seek(begin.size)
            else:
                self._append(self._writer.head(), begin)
                self._save()
            try:
                yield
            except BaseException as error:
                # Do not write again after an error of the disk; nats-py's timeouts are OSErrors too.
                if not isinstance(error, OSError) or isinstance(error, nats.errors.Error):
                    self._save()
                raise
            self._save()

    def add(self, message: StoredMsg) -> bool:
        """Take a message; return whether it is time to write."""
        self._pending.append(message)
        return len(self._pending) >= _BLOCK

    async def write(self) -> None:
        """Write the messages that were taken."""
        self._flush()
        self._save_often()

    def _save_often(self) -> None:
        if self._written.size - self.saved.size >= _SYNC_BYTES:
            self._save()

    @property
    def schema(self) -> pa.Schema | None:
        """The columns of batches for `add_batch`; None if the file is made of messages."""
        return self._writer.schema if isinstance(self._writer, Parquet) else None

    @property
    def last_seq(self) -> int:
        return self._written.seq

    def add_batch(self, batch: pa.RecordBatch) -> None:
        assert isinstance(self._writer, Parquet)
        total = self._written.messages + batch.num_rows
        seq = batch.column("seq")[-1].as_py()
        self._append(self._writer.batch(batch), dataclasses.replace(self._written, seq=seq, messages=total))
        self._save_often()

    def finish(self) -> None:
        self._writer.finish(self.path, self._file)
        self._journal.unlink(missing_ok=True)

    def keep(self) -> bool:
        """Return whether the export can be resumed; if this run has no message, remove its files."""
        if self._stream is None or not self.path.exists():
            return False
        if not self._written.seq:
            self.remove()
        return self._written.seq > 0

    def state(self) -> str:
        """Return what the file has, and how to continue."""
        done = self.saved
        return (
            f"{count(done.messages, 'message')} up to sequence {done.seq:,} of {done.end:,} {is_are(done.messages)} in "
            f"{self.path}; the same command with --resume continues"
        )

    def _save(self) -> None:
        """Write everything to the disk, then update the journal."""
        assert self._stream is not None
        self._flush()
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._fresh_journal.write_bytes(orjson.dumps(dataclasses.asdict(self._written)))
        self._fresh_journal.replace(self._journal)
        self.saved = self._written

    def _flush(self) -> None:
        messages, self._pending = self._pending, []
        if messages:
            total = self._written.messages + len(messages)
            done = dataclasses.replace(self._written, seq=messages[-1].seq, messages=total)
            self._append(self._writer.rows(messages), done)

    def _append(self, data: bytes, done: _Journal) -> None:
        assert self._stream is not None
        self._stream.write(data)
        self._written = dataclasses.replace(done, size=done.size + len(data), crc=zlib.crc32(data, done.crc))

    def remove(self) -> None:
        """Remove the unfinished file and its journal."""
        for path in (self.path, self._journal):
            path.unlink(missing_ok=True)


class _Pipe:
    """Stdout, for data that need no file in between; `saved` counts what was written."""

    def __init__(self, wanted: _Journal, writer: JsonLines) -> None:
        self.saved: _Journal = wanted
        self._writer = writer
        self._pending: list[StoredMsg] = []

    @contextmanager
    def open(self, begin: _Journal) -> Iterator[None]:
        """Write the head; then the block adds the messages and writes them."""
        head = self._writer.head()
        self.saved = dataclasses.replace(begin, size=len(head))
        write_stdout(head)
        yield

    def add(self, message: StoredMsg) -> bool:
        """As `_Part.add`."""
        self._pending.append(message)
        return len(self._pending) >= _BLOCK

    async def write(self) -> None:
        """Write the messages that were taken; a program that reads slowly does not block the connection."""
        messages, self._pending = self._pending, []
        if messages:
            data, done = self._writer.rows(messages), self.saved
            await _in_thread(lambda: write_stdout(data))
            total, size = done.messages + len(messages), done.size + len(data)
            self.saved = dataclasses.replace(done, seq=messages[-1].seq, messages=total, size=size)


async def _in_thread(function: Callable[[], None]) -> None:
    """Call a function that may block forever in a thread, which does not delay the end of the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish(error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def call() -> None:
        failed = None
        try:
            function()
        except BaseException as error:
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, failed)

    threading.Thread(target=call, daemon=True).start()
    await done


def _checksum(path: Path, size: int) -> int | None:
    """Return the CRC-32 of the first `size` bytes of a file; None if it has fewer."""
    crc = 0
    with path.open("rb") as file:
        while size and (some := file.read(min(size, _SYNC_BYTES))):
            crc = zlib.crc32(some, crc)
            size -= len(some)
    return None if size else crc
