"""``jetstream-ext ingest``: store a file's rows in a stream; the stream shows where an earlier run stopped."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import csv
import hashlib
import re
import signal
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Final

import click
import orjson
from nats.js import JetStreamContext
from nats.js.errors import NoStreamResponseError, NotFoundError

from jetstream_ext.cli.connection import Target, check_stream, connected, connection_options, target
from jetstream_ext.cli.formats import FORMATS, format_of
from jetstream_ext.cli.output import STOPPED, ReportProgress, count, one_line, progress, write_json
from jetstream_ext.client.api import stream_state
from jetstream_ext.client.context import Context
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.client.ingest import ingest
from jetstream_ext.client.streams import ensure_stream
from jetstream_ext.errors import IngestError
from jetstream_ext.protocol.headers import MSG_ID
from jetstream_ext.types import BatchMessage, IngestProgress, IngestReport

_PLACEHOLDER: Final = re.compile(r"\{([^{}]+)\}")
_CHUNK: Final = 1 << 20
_LARGEST_FIELD: Final = 1 << 30  # the csv module's own limit is lower than a server's max_payload
_BLOCK: Final = 5_000  # sequences
_RESUME_HINT: Final = "the same command with --resume continues"

Row = Mapping[str, Any]


class JsonRow(dict[str, Any]):
    """A row of a JSON file, with its text: encoding it again could change its numbers."""

    text: bytes = b""


class RowError(click.ClickException):
    """A row that cannot be read or sent."""


class Rows:
    """The rows of a file; `position` and `total` are bytes, or rows of a Parquet file."""

    def __init__(self, path: Path, form: str) -> None:
        if not path.is_file():
            raise RowError(f"{path} is not a regular file; ingest reads a file twice")
        self._path = path
        self._form = form
        self.position: int = 0
        self.total: int = path.stat().st_size
        if form == "parquet":
            with _parquet_file(path) as file:
                self.total = file.metadata.num_rows

    def read(self) -> Generator[Row, None, None]:
        """Yield the rows; the caller must close the generator."""
        return {"csv": self._csv, "jsonl": self._jsonl, "parquet": self._parquet}[self._form]()

    def _csv(self) -> Generator[Row, None, None]:
        csv.field_size_limit(_LARGEST_FIELD)
        number = 0
        with closing(self._lines()) as lines:
            reader = csv.DictReader(lines, strict=True)
            try:
                names = reader.fieldnames or ()
                for name in names:
                    if names.count(name) > 1:
                        raise RowError(f"{self._path}: there are two columns {name!r}")
                for number, row in enumerate(reader, 1):
                    if None in row or None in row.values():
                        raise RowError(f"{self._path}, row {number}: the number of fields differs from the header")
                    yield row
            except csv.Error as error:
                raise RowError(f"{self._path}, after row {number}: {error}") from error

    def _jsonl(self) -> Generator[Row, None, None]:
        with closing(self._lines()) as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    found = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    raise RowError(f"{self._path}, line {number}: {error}") from error
                if not isinstance(found, dict):
                    raise RowError(f"{self._path}, line {number}: the line is not a JSON object")
                row = JsonRow(found)
                row.text = line.strip().encode()
                yield row

    def _lines(self) -> Generator[str, None, None]:
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                self.position += len(line)
                try:
                    yield line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise RowError(f"{self._path}, line {number}: the line is not UTF-8") from error

    def _parquet(self) -> Generator[Row, None, None]:
        with _parquet_file(self._path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    self.position += 1
                    yield row


@contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    import pyarrow as pa  # an extra, and slow to import
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except pa.ArrowInvalid as error:
        raise RowError(f"{path} is not a valid Parquet file: {error}") from error


class Template:
    """Makes subjects and payloads from rows.

    Args:
        subject: The subject; ``{column}`` stands for a row's value.
        data_from: The column with the payload as text; its base64 is in the column ``data_from + "_base64"``. None
            is the whole row as JSON.
    """

    def __init__(self, subject: str, data_from: str | None = None) -> None:
        self._subject = subject
        self._data_from = data_from

    def message(self, row: Row, place: str) -> tuple[str, bytes]:
        """Return the subject and payload of a row; `place` is its position, for errors."""

        def value(match: re.Match[str]) -> str:
            found = row.get(match[1])
            if isinstance(found, bool) or not isinstance(found, str | int):
                what = "has no value" if found is None else "is neither a text nor an integer"
                raise RowError(f"{place}: column {match[1]!r} {what}; the subject needs it")
            return str(found)

        return _PLACEHOLDER.sub(value, self._subject), self._payload(row, place)

    def _payload(self, row: Row, place: str) -> bytes:
        name = self._data_from
        if name is None:
            return row.text if isinstance(row, JsonRow) else orjson.dumps(row, default=_plain)
        found, coded = row.get(name), row.get(f"{name}_base64")
        if coded and not found:
            try:
                return base64.b64decode(coded, validate=True)
            except (TypeError, ValueError, binascii.Error) as error:
                raise RowError(f"{place}: column {name + '_base64'!r} is not base64") from error
        if isinstance(found, bytes):
            return found
        if isinstance(found, str):
            return found.encode()
        if found is None:
            raise RowError(f"{place}: column {name!r} has no value; the payload needs it")
        return orjson.dumps(found, default=_plain)


def fingerprint(path: Path, subject: str, data_from: str | None) -> str:
    """Return the prefix of a file's message ids, made from its content and how rows become messages."""
    digest = hashlib.sha256(orjson.dumps([subject, data_from]))
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()[:24]


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value)  # decimals, durations


def message_id(run: str, row: int) -> str:
    """Return the message id of a row; `row` is its zero-based index."""
    return f"{run}:{row}"


async def rows_stored(js: JetStreamContext, stream: str, run: str) -> int:
    """Return how many rows of a file, whose message ids begin with `run`, the stream holds.

    Rows are stored in order, so it reads backwards to the newest message with an id of this file. A stream without any
    of them is read completely.
    """
    state = await stream_state(Context(js), stream)
    first, last = state.first_seq, state.last_seq
    prefix = message_id(run, 0).removesuffix("0")
    while last >= first:
        start = max(first, last - _BLOCK + 1)
        found = 0
        async with DirectGet(js, stream).scan(seq=start, up_to_seq=last, confirm=True) as messages:
            async for message in messages:
                name = message.headers.get(MSG_ID, "")
                if name.startswith(prefix) and name[len(prefix) :].isdecimal():
                    found = max(found, int(name[len(prefix) :]) + 1)
        if found:
            return found
        last = start - 1
    return 0


@click.command("ingest", short_help="Store a file's rows in a stream.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--stream", required=True, metavar="NAME", help="The stream that stores the rows.")
@click.option("--subject-from", metavar="COLUMN", help="The column with each row's subject; the default is 'subject'.")
@click.option("--subject", metavar="SUBJECT", help="The subject; {column} stands for a row's value.")
@click.option("--data-from", metavar="COLUMN", help="The column with the payload; the default is the row as JSON.")
@click.option("--format", "given", type=click.Choice(FORMATS), help="Format of FILE; the default is that of its name.")
@click.option(
    "--create", multiple=True, metavar="SUBJECT", help="Create the stream with these subjects if it does not exist."
)
@click.option("--skip", type=click.IntRange(0), default=0, metavar="ROWS", help="Skip the first ROWS rows.")
@click.option("--resume", is_flag=True, help="Continue after the rows that the stream has.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, and no progress bar.")
@connection_options()
@click.pass_context
def command(
    ctx: click.Context,
    file: Path,
    stream: str,
    subject_from: str | None,
    subject: str | None,
    data_from: str | None,
    given: str | None,
    create: tuple[str, ...],
    skip: int,
    resume: bool,
    as_json: bool,
    timeout: float,
) -> None:
    """Store every row of FILE in a stream, in order and once each: CSV with a header, JSON lines or Parquet.

    The command continues after restarts of the server. After Ctrl-C or an error, --resume finds in the stream where to
    continue, which needs allow_direct. Needs nats-server 2.14, and allow_batched on the stream.
    """
    check_stream(stream)
    if subject is not None and subject_from is not None:
        raise click.UsageError("--subject and --subject-from exclude each other")
    if skip and resume:
        raise click.UsageError("--skip and --resume exclude each other")
    pattern = subject if subject is not None else f"{{{subject_from or 'subject'}}}"
    job = _Ingest(file, format_of(file, given), stream, Template(pattern, data_from))
    job.run_name = fingerprint(file, pattern, data_from)
    job.skipped = skip
    try:
        report = asyncio.run(job.run(target(ctx, timeout), create, resume=resume, show=not as_json))
    except (KeyboardInterrupt, asyncio.CancelledError):
        click.echo(
            f"stopped: at least {count(job.in_stream, 'row')} {_is(job.in_stream)} in {stream}; {_RESUME_HINT}",
            err=True,
        )
        ctx.exit(STOPPED)
    except RowError as error:
        raise click.ClickException(f"{error.message}; {_before(job.in_stream)}") from error
    except IngestError as error:
        # `ingest` counts the messages of this run; the user counts rows of the file.
        text = f"row {job.skipped + error.index + 1} of {file}: {_reason(error)}"
        raise click.ClickException(f"{text}; {_before(job.skipped + error.index)}") from error
    rows = job.skipped + report.stored
    if as_json:
        write_json(
            {
                "file": str(file),
                "stream": stream,
                "rows": rows,
                "sent": report.stored,
                "skipped": job.skipped,
                "resent": report.resent,
                "complete": not job.stopping,
                "seconds": round(report.seconds, 3),
            }
        )
    if job.stopping:
        click.echo(f"stopped: exactly {count(rows, 'row')} {_is(rows)} in {stream}; {_RESUME_HINT}", err=True)
        ctx.exit(STOPPED)
    if not as_json:
        before = f" ({job.skipped:,} of them were skipped or already stored)" if job.skipped else ""
        click.echo(f"{count(rows, 'row')} of {file} {_is(rows)} in {stream}{before} ({report.seconds:.1f} s)")


def _reason(error: IngestError) -> str:
    if isinstance(error.__cause__, NoStreamResponseError):
        return f"no stream stores its subject {error.subject!r}"
    return one_line(error.__cause__ or error)


def _before(rows: int) -> str:
    return f"the {count(rows, 'row')} before it {_is(rows)} stored" if rows else "nothing is stored"


def _is(rows: int) -> str:
    return "is" if rows == 1 else "are"


class _Ingest:
    """One run."""

    def __init__(self, file: Path, form: str, stream: str, template: Template) -> None:
        self.stopping = False
        self.skipped = 0
        self.in_stream = 0
        self.run_name = ""
        self._file = file
        self._rows = Rows(file, form)
        self._stream = stream
        self._template = template

    async def run(self, where: Target, create: tuple[str, ...], *, resume: bool, show: bool) -> IngestReport:
        """Connect, create the stream if asked to, and store the rows."""
        async with connected(where) as js:
            if create:
                subjects = list(create)
                await ensure_stream(js, name=self._stream, subjects=subjects, allow_direct=True, allow_batched=True)
            else:
                try:
                    await stream_state(Context(js), self._stream)
                except NotFoundError as error:
                    text = f"stream {self._stream!r} does not exist; --create SUBJECT creates it"
                    raise click.ClickException(text) from error
            if resume:
                self.skipped = await rows_stored(js, self._stream, self.run_name)
            self.in_stream = self.skipped
            with (
                progress(self._stream, self._rows.total, show=show) as report,
                self._stoppable(),
                contextlib.closing(self._messages()) as messages,
            ):
                return await ingest(js, messages, on_progress=lambda now: self._report(report, now))

    def _messages(self) -> Generator[BatchMessage, None, None]:
        with contextlib.closing(self._rows.read()) as rows:
            for number, row in islice(enumerate(rows), self.skipped, None):
                if self.stopping:
                    return
                subject, payload = self._template.message(row, f"{self._file}, row {number + 1}")
                yield BatchMessage(subject, payload, stream=self._stream, msg_id=message_id(self.run_name, number))

    def _report(self, report: ReportProgress, now: IngestProgress) -> None:
        self.in_stream = self.skipped + now.stored
        report(self._rows.position, now.stored)

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        """End the source at the first Ctrl-C, so that the exact number of stored rows is known, and all at the second."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def stop() -> None:
            if self.stopping:
                task.cancel()
            else:
                click.echo("stopping after the messages in flight; press Ctrl-C again to stop at once", err=True)
            self.stopping = True

        try:
            loop.add_signal_handler(signal.SIGINT, stop)
        except (NotImplementedError, RuntimeError, ValueError):  # Windows; not the main thread
            yield
            return
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)
