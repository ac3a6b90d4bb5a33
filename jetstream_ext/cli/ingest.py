"""``jetstream-ext ingest``: store a file's rows in a stream; the stream shows where an earlier run stopped."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import re
import signal
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Final

import click
import orjson
from nats.js import JetStreamContext
from nats.js.errors import NoStreamResponseError

from jetstream_ext.cli.connection import Target, connected, connection_options, existing_stream
from jetstream_ext.cli.formats import FORMATS, JsonRow, Row, RowError, Rows, format_of
from jetstream_ext.cli.output import ReportProgress, Stopped, count, is_are, one_line, progress, say, write_json
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.client.ingest import ingest
from jetstream_ext.client.streams import ensure_stream
from jetstream_ext.errors import IngestError
from jetstream_ext.protocol.headers import MSG_ID, is_reserved
from jetstream_ext.protocol.numbers import parse_number
from jetstream_ext.protocol.subjects import check_name
from jetstream_ext.types import BatchMessage, IngestProgress, IngestReport, own_headers

_PLACEHOLDER: Final = re.compile(r"\{([^{}]+)\}")
_BLOCK: Final = 5_000  # sequences
_RESUME_HINT: Final = "the same command with --resume continues"


@click.command("ingest", short_help="Store a file's rows in a stream.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--stream", required=True, metavar="NAME", help="The stream that stores the rows.")
@click.option("--subject-from", metavar="COLUMN", help="The column with each row's subject; the default is 'subject'.")
@click.option("--subject", metavar="SUBJECT", help="Each row's subject; {column} becomes the value of that column.")
@click.option("--data-from", metavar="COLUMN", help="The column with the payload; the default is the row as JSON.")
@click.option("--headers-from", metavar="COLUMN", help="The column with headers, as export writes them; not Nats-….")
@click.option("--format", "given", type=click.Choice(FORMATS), help="Format of FILE (default: from its suffix).")
@click.option(
    "--create", multiple=True, metavar="SUBJECT", help="Create a missing stream with subject SUBJECT; repeatable."
)
@click.option("--skip", type=click.IntRange(0), default=0, metavar="ROWS", help="Skip the first ROWS rows.")
@click.option("--resume", is_flag=True, help="Continue after the rows that the stream already has.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, and no progress bar.")
@connection_options()
def command(
    where: Target,
    file: Path,
    stream: str,
    subject_from: str | None,
    subject: str | None,
    data_from: str | None,
    headers_from: str | None,
    given: str | None,
    create: tuple[str, ...],
    skip: int,
    resume: bool,
    as_json: bool,
) -> None:
    """Store every row of FILE in a stream, in order and once each: CSV with a header, JSON lines or Parquet.

    The command continues by itself after a restart of the server. After Ctrl-C or an error, --resume finds in the
    stream where to continue, for which the stream needs allow_direct. The stream needs allow_batched, and the server
    must be 2.14 or newer.
    """
    check_name(stream, "stream name")  # servers do not answer requests with an invalid one
    if subject is not None and subject_from is not None:
        raise click.UsageError("give --subject or --subject-from, not both")
    if skip and resume:
        raise click.UsageError("give --skip or --resume, not both")
    pattern = subject if subject is not None else f"{{{subject_from or 'subject'}}}"
    job = _Ingest(file, format_of(file, given), stream, pattern, data_from, headers_from, skip)
    try:
        report = asyncio.run(job.run(where, create, resume=resume, show=not as_json))
    except (KeyboardInterrupt, asyncio.CancelledError):
        text = f"{count(job.in_stream, 'row')} {is_are(job.in_stream)} in {stream}; {_RESUME_HINT}"
        raise Stopped(f"stopped: at least {text}") from None
    except RowError as error:
        raise click.ClickException(f"{error.message}; {_stored_before(job.in_stream)}") from error
    except IngestError as error:
        # `ingest` counts the messages of this run; the user counts rows of the file.
        index = job.skipped + error.index
        stored = _stored_before(index)
        if error.in_doubt:
            stored = f"{stored}; " if index else ""
            after = f" and the next {error.in_doubt - 1:,}" if error.in_doubt > 1 else ""
            stored += f"this row{after} may be stored; continue with --resume"
        reason = one_line(error.__cause__ or error)
        if isinstance(error.__cause__, NoStreamResponseError):
            reason = f"no stream stores its subject {error.subject!r}"
        raise click.ClickException(f"row {index + 1} of {file}: {reason}; {stored}") from error
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
                "in_doubt": report.in_doubt,
                "complete": not job.stopping,
                "seconds": round(report.seconds, 3),
            }
        )
    if report.in_doubt:
        say(f"{count(report.in_doubt, 'row')} may be stored more than once, because of an outage", err=True)
    if job.stopping:
        raise Stopped(f"stopped: exactly {count(rows, 'row')} {is_are(rows)} in {stream}; {_RESUME_HINT}")
    if not as_json:
        before = f" ({job.skipped:,} of them were skipped or already stored)" if job.skipped else ""
        say(f"{count(rows, 'row')} of {file} {is_are(rows)} in {stream}{before} ({report.seconds:.1f} s)")


def _stored_before(rows: int) -> str:
    return f"the {count(rows, 'row')} before it {is_are(rows)} stored" if rows else "nothing is stored"


class _Ingest:
    """One run. `subject` is a pattern: ``{column}`` is replaced by the row's value in that column."""

    def __init__(
        self,
        file: Path,
        form: str,
        stream: str,
        subject: str,
        data_from: str | None,
        headers_from: str | None,
        skipped: int,
    ) -> None:
        self.stopping = False
        self.skipped = skipped
        self.in_stream = 0
        self._file = file
        self._rows = Rows(file, form)
        self._stream = stream
        self._subject = subject
        self._data_from = data_from
        self._headers_from = headers_from
        self._id_prefix = f"{_fingerprint(file, subject, data_from, headers_from)}:"

    async def run(self, where: Target, create: tuple[str, ...], *, resume: bool, show: bool) -> IngestReport:
        async with connected(where) as js:
            if create:
                subjects = list(create)
                await ensure_stream(js, name=self._stream, subjects=subjects, allow_direct=True, allow_batched=True)
            else:
                await existing_stream(js, self._stream, advice="; --create SUBJECT creates it")
            if resume:
                self.skipped = await self._rows_stored(js)
            self.in_stream = self.skipped
            with (
                progress(self._stream, self._rows.total, show=show) as report,
                self._stoppable(),
                closing(self._messages()) as messages,
            ):
                return await ingest(js, messages, on_progress=lambda now: self._report(report, now))

    async def _rows_stored(self, js: JetStreamContext) -> int:
        """Return how many rows of the file the stream holds. Rows are stored in order: search backwards for the newest."""
        state = await existing_stream(js, self._stream)
        first, last = state.first_seq, state.last_seq
        while last >= first:
            start = max(first, last - _BLOCK + 1)
            found = 0
            async with DirectGet(js, self._stream).scan(seq=start, up_to_seq=last, confirm=True) as messages:
                async for message in messages:
                    prefix, _, index = message.headers.get(MSG_ID, "").rpartition(":")
                    row = parse_number(index)  # anyone may publish such an id; no file has more rows than bytes
                    if f"{prefix}:" == self._id_prefix and row is not None and row < self._rows.total:
                        found = max(found, row + 1)
            if found:
                return found
            last = start - 1
        return 0

    def _messages(self) -> Generator[BatchMessage, None, None]:
        with closing(self._rows.read()) as rows:
            for index, row in islice(enumerate(rows), self.skipped, None):
                if self.stopping:
                    return
                place = f"{self._file}, row {index + 1}"
                subject, payload = self._row_subject(row, place), self._row_payload(row, place)
                headers = None if self._headers_from is None else self._row_headers(row, self._headers_from, place)
                yield BatchMessage(subject, payload, headers, stream=self._stream, msg_id=f"{self._id_prefix}{index}")

    def _row_subject(self, row: Row, place: str) -> str:
        def value(match: re.Match[str]) -> str:
            found = row.get(match[1])
            if isinstance(found, bool) or not isinstance(found, str | int):
                what = "has no value" if found is None else "is neither a string nor an integer"
                raise RowError(f"{place}: column {match[1]!r} {what}; the subject needs it")
            return str(found)

        return _PLACEHOLDER.sub(value, self._subject)

    def _row_payload(self, row: Row, place: str) -> bytes:
        """Return the row as JSON, or the column `data_from`, whose binary values are base64 in its ``…_base64``."""
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

    def _row_headers(self, row: Row, name: str, place: str) -> dict[str, str]:
        """Return the headers in a column: a map, or a JSON object as text. A value may be a list of values.

        Those that begin with ``Nats-`` are left out: they are instructions to the server, which were for another message.
        """
        found = row.get(name)
        try:
            given = orjson.loads(found) if found and isinstance(found, str) else found
            entries = given.items() if isinstance(given, dict) else given or ()
            several = [(header, values if isinstance(values, list) else [values]) for header, values in entries]
            pairs = [(header, value) for header, values in several for value in values if not is_reserved(header)]
        except (TypeError, ValueError, AttributeError) as error:
            raise RowError(f"{place}: column {name!r} is neither a map nor a JSON object") from error
        if not all(isinstance(text, str) for pair in pairs for text in pair):
            raise RowError(f"{place}: column {name!r} has a header that is not a string")
        return own_headers(pairs)

    def _report(self, report: ReportProgress, now: IngestProgress) -> None:
        self.in_stream = self.skipped + now.stored
        report(self._rows.position, now.stored)

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """End the source at the first Ctrl-C, so that the exact number of stored rows is known, and all at the second."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def stop() -> None:
            if self.stopping:
                task.cancel()
            else:
                say("stopping after the messages in flight; press Ctrl-C again to stop at once", err=True)
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


def _fingerprint(path: Path, subject: str, data_from: str | None, headers_from: str | None) -> str:
    """Return a digest of the file's content and of how its rows become messages."""
    how = [subject, data_from] if headers_from is None else [subject, data_from, headers_from]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.sha256(orjson.dumps(how)))
    return digest.hexdigest()[:24]


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value)  # decimals, durations
