"""``jetstream-ext ingest``: a file into a stream."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import Final

import click
from nats.js.errors import NoStreamResponseError, NotFoundError

from jetstream_ext.cli.connection import Target, check_stream, connected, connection_options, target
from jetstream_ext.cli.failures import one_line
from jetstream_ext.cli.formats import FORMATS, format_of
from jetstream_ext.cli.output import Tell, count, progress, write_json
from jetstream_ext.cli.resuming import message_id, rows_stored
from jetstream_ext.cli.rows import RowError, Rows, Template, fingerprint
from jetstream_ext.client.api import Api
from jetstream_ext.client.context import Context
from jetstream_ext.client.ingest import ingest
from jetstream_ext.client.streams import ensure_stream
from jetstream_ext.errors import IngestError
from jetstream_ext.types import BatchMessage, IngestProgress, IngestReport

_STOPPED: Final = 130


@click.command("ingest", short_help="Store a file's rows in a stream.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--stream", required=True, metavar="NAME", help="The stream that is to store it.")
@click.option(
    "--subject-from", metavar="COLUMN", help="Each row's subject is its value in this column; otherwise in 'subject'."
)
@click.option("--subject", metavar="SUBJECT", help="The subject; {column} in it stands for a row's value.")
@click.option("--data-from", metavar="COLUMN", help="The payload is this column; otherwise the row as JSON.")
@click.option("--format", "given", type=click.Choice(FORMATS), help="Format of FILE; otherwise its name says.")
@click.option("--create", multiple=True, metavar="SUBJECT", help="Create the stream with these subjects if needed.")
@click.option("--skip", type=click.IntRange(0), default=0, metavar="ROWS", help="Leave out the first ROWS rows.")
@click.option("--resume", is_flag=True, help="Go on behind the rows that the stream has.")
@click.option("--json", "as_json", is_flag=True, help="The result as a JSON object; no progress bar.")
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

    It survives restarts of the server. After Ctrl-C, or a failure, --resume finds in the stream where to go on; that
    needs allow_direct. Needs nats-server 2.14, and allow_batched on the stream.
    """
    check_stream(stream)
    if subject is not None and subject_from is not None:
        raise click.UsageError("give --subject or --subject-from, one of the two")
    if skip and resume:
        raise click.UsageError("give --skip or --resume, not both")
    pattern = subject if subject is not None else f"{{{subject_from or 'subject'}}}"
    job = _Ingest(file, format_of(file, given), stream, Template(pattern, data_from))
    job.run_name = fingerprint(file, pattern, data_from)
    job.skipped = skip
    try:
        report = asyncio.run(job.run(target(ctx, timeout), create, resume=resume, show=not as_json))
    except (KeyboardInterrupt, asyncio.CancelledError):
        click.echo(
            f"stopped: at least {count(job.in_stream, 'row')} {_is(job.in_stream)} in {stream}; {_HINT}", err=True
        )
        ctx.exit(_STOPPED)
    except RowError as error:
        raise click.ClickException(f"{error.message}; {_before(job.in_stream)}") from error
    except IngestError as error:
        # The library counts what it was given; the user counts rows.
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
        click.echo(f"stopped: exactly {count(rows, 'row')} {_is(rows)} in {stream}; {_HINT}", err=True)
        ctx.exit(_STOPPED)
    if not as_json:
        before = f" ({job.skipped:,} of them were left out or there already)" if job.skipped else ""
        click.echo(f"{count(rows, 'row')} of {file} {_is(rows)} in {stream}{before} ({report.seconds:.1f} s)")


_HINT: Final = "the same command with --resume goes on"


def _reason(error: IngestError) -> str:
    if isinstance(error.__cause__, NoStreamResponseError):
        return f"no stream listens on its subject {error.subject!r}"
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
        """Ingest what is to be."""
        async with connected(where) as js:
            if create:
                subjects = list(create)
                await ensure_stream(js, name=self._stream, subjects=subjects, allow_direct=True, allow_batched=True)
            else:
                try:
                    await Api(Context(js)).ask(f"STREAM.INFO.{self._stream}")
                except NotFoundError as error:
                    hint = "--create SUBJECT makes one"
                    raise click.ClickException(f"there is no stream {self._stream!r}; {hint}") from error
            if resume:
                self.skipped = await rows_stored(js, self._stream, self.run_name)
            self.in_stream = self.skipped
            with (
                progress(self._stream, self._rows.total, show=show) as tell,
                self._stoppable(),
                contextlib.closing(self._messages()) as messages,
            ):
                return await ingest(js, messages, on_progress=lambda now: self._tell(tell, now))

    def _messages(self) -> Generator[BatchMessage, None, None]:
        with contextlib.closing(self._rows.read()) as rows:
            for number, row in islice(enumerate(rows), self.skipped, None):
                if self.stopping:
                    return
                subject, payload = self._template.message(row, f"{self._file}, row {number + 1}")
                yield BatchMessage(subject, payload, stream=self._stream, msg_id=message_id(self.run_name, number))

    def _tell(self, tell: Tell, now: IngestProgress) -> None:
        self.in_stream = self.skipped + now.stored
        tell(self._rows.position, now.stored)

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        """The first Ctrl-C ends the source, so that what is stored is known to the message; a second one ends it all."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def stop() -> None:
            if self.stopping:
                task.cancel()
            else:
                click.echo("stopping as soon as it is known what is stored; Ctrl-C again does not wait", err=True)
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
