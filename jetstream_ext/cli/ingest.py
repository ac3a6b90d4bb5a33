"""``jetstream-ext ingest``: store a file's rows in a stream, each once; the stream shows which rows it has."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import nats.errors
from nats.js import JetStreamContext
from nats.js.errors import NoStreamResponseError, NotFoundError
from nats.nuid import NUID

from jetstream_ext.cli.completion import complete_streams
from jetstream_ext.cli.connection import Target, connected, connection_options, existing_stream
from jetstream_ext.cli.files.formats import FORMATS, STDIO, delimiter_of, format_of
from jetstream_ext.cli.files.message_files import COLUMNS, is_export
from jetstream_ext.cli.files.row_check import RowCheck
from jetstream_ext.cli.files.row_files import Row, RowError, Rows, Source, encoding_of, spooled
from jetstream_ext.cli.files.row_messages import Message, RowMapping, has_lone_brace, short_digest
from jetstream_ext.cli.files.stored_rows import MOST_ROWS, RowIds, StoredRows, stored_rows
from jetstream_ext.cli.options import Command, cli_option, json_option
from jetstream_ext.cli.output import ReportProgress, Stopped, count, is_are, one_line, progress, say, write_json
from jetstream_ext.client.api import Api, check_same_stream, stream_state
from jetstream_ext.client.connection import Context
from jetstream_ext.client.ingest import ingest
from jetstream_ext.client.streams import enable_options, ensure_stream
from jetstream_ext.errors import (
    BadHeaderError,
    BadSubjectError,
    BatchServerError,
    ErrorCode,
    IngestError,
    MaxPayloadError,
    StreamRecreatedError,
)
from jetstream_ext.protocol.advice import enable_command
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.feature_table import FAST_INGEST
from jetstream_ext.protocol.options import OPTIONS, ruled_out
from jetstream_ext.protocol.subjects import check_filter, check_name, check_subject, covers
from jetstream_ext.text import plural
from jetstream_ext.types import BatchMessage, IngestProgress, IngestReport

_CREATES: Final = "; --create SUBJECT creates it"
_OF_THE_ROW: Final = (NoStreamResponseError, MaxPayloadError, BadSubjectError, BadHeaderError)
_OF_THE_STREAM: Final = (ErrorCode.FAST_DISABLED, ErrorCode.FAST_MIRROR, ErrorCode.REQUIRED_API_LEVEL)
_LIMITS: Final = (ErrorCode.STORE_FAILED, ErrorCode.ACCOUNT_RESOURCES_EXCEEDED)
_NAMES_SHOWN: Final = 5
_MESSAGES: Final = "Messages"
_FILE: Final = "File"
_ROWS: Final = "Which rows"
_SOME: Final = 1_000  # rows between two turns of the event loop
_CONTINUE: Final = "the same command continues"
_CORRECT: Final = "correct the row or the options; the command with"
_WHY_REMOVED: Final = {
    "limits": "of its limits, newer messages of the same subjects, or a deletion",
    "interest": "no consumer has yet to acknowledge them (retention interest)",
}
_NEEDS: Final = {"batched": "fast ingest", "direct": "direct get"}  # keys of `OPTIONS`


@click.command("ingest", cls=Command, short_help="Store a file's rows in a stream.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@cli_option(
    "--stream", shell_complete=complete_streams, required=True, metavar="NAME", help="The stream that stores the rows."
)
@cli_option(
    "--subject-from",
    metavar="COLUMN",
    group=_MESSAGES,
    show_default="subject",
    help="The column with each row's subject.",
)
@cli_option(
    "--subject",
    metavar="SUBJECT",
    group=_MESSAGES,
    help="Each row's subject; {column} becomes the value of that column.",
)
@cli_option(
    "--data-from",
    metavar="COLUMN",
    group=_MESSAGES,
    show_default="the row as JSON",
    help="The column with the payload.",
)
@cli_option(
    "--headers-from",
    metavar="COLUMN",
    group=_MESSAGES,
    help="The column with headers, as export writes them; instructions to the server are left out.",
)
@cli_option(
    "--no-restore", is_flag=True, group=_MESSAGES, help="Store the rows of an exported file as those of any other file."
)
@cli_option(
    "--non-finite",
    type=click.Choice(["refuse", "null"]),
    default="refuse",
    show_default=True,
    group=_MESSAGES,
    help="What to do with inf and NaN in Parquet, which JSON cannot express.",
)
@cli_option(
    "--format", "given", type=click.Choice(FORMATS), show_default="from its suffix", group=_FILE, help="Format of FILE."
)
@cli_option("--delimiter", metavar="CHAR", group=_FILE, help="What separates the fields of CSV: a character, or 'tab'.")
@cli_option(
    "--encoding",
    metavar="NAME",
    show_default="utf-8",
    group=_FILE,
    help="Encoding of CSV and JSON lines, such as latin-1.",
)
@cli_option(
    "--create", multiple=True, metavar="SUBJECT", help="Create a missing stream with subject SUBJECT; repeatable."
)
@cli_option(
    "--skip",
    type=click.IntRange(0, MOST_ROWS),
    default=0,
    metavar="ROWS",
    group=_ROWS,
    help="Skip the first ROWS rows.",
)
@cli_option(
    "--resume", is_flag=True, group=_ROWS, help="Send the rows of a changed file that the stream does not have."
)
@cli_option("--again", is_flag=True, group=_ROWS, help="Send all rows, also those that the stream has.")
@cli_option("--dry-run", is_flag=True, group=_ROWS, help="Check every row and show the first messages; send nothing.")
@json_option("Print one JSON object, and no progress bar.")
@connection_options()
def command(
    where: Target,
    file: Path,
    stream: str,
    subject_from: str | None,
    subject: str | None,
    data_from: str | None,
    headers_from: str | None,
    no_restore: bool,
    non_finite: str,
    given: str | None,
    delimiter: str | None,
    encoding: str | None,
    create: tuple[str, ...],
    skip: int,
    resume: bool,
    again: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Store every row of FILE in a stream, in order and once each: CSV with a header, JSON lines or Parquet.

    FILE may end with .gz or .zst; - is stdin. A file of messages that export wrote is stored as the messages were.

    The same command again sends only the rows that the stream does not have, whenever that is, also after Ctrl-C, an
    error or a crash. Under another path, also after a rename or gzip, FILE counts as another file: all its rows are
    stored again. If FILE or the options were changed since, --resume sends the new and corrected rows, and --again sends
    all rows. The stream needs allow_batched and allow_direct, and the server must be 2.14 or newer.

    Examples:
        jetstream-ext ingest orders.csv --stream ORDERS --create 'orders.>' --subject 'orders.{country}'
        jetstream-ext ingest orders.csv --stream ORDERS --subject 'orders.{country}' --resume
        jetstream-ext ingest orders.csv --stream ORDERS --subject 'orders.{country}' --dry-run
        zcat orders.gz | jetstream-ext ingest - --format jsonl --stream ORDERS --subject orders.new
    """
    check_name(stream, "stream name")  # servers do not answer requests with an invalid one
    if subject is not None and subject_from is not None:
        raise click.UsageError("give --subject or --subject-from, not both")
    if resume and again:
        raise click.UsageError("give --resume or --again, not both")
    form = format_of(file, given)
    how = delimiter_of(file, delimiter, form), encoding_of(encoding, form)
    with spooled(file) as path:
        rows = Rows(Source(path, "stdin" if file == STDIO else str(file), form, *how))
        columns = rows.columns()
        restored = not no_restore and is_export(columns)
        only = COLUMNS if restored and data_from is None else ()
        if restored:
            data_from, headers_from = data_from or "data", headers_from or "headers"
        pattern = subject if subject is not None else f"{{{subject_from or 'subject'}}}"
        if has_lone_brace(pattern):
            option = f"--subject {subject!r}" if subject is not None else f"--subject-from {subject_from!r}"
            raise click.UsageError(
                f"{option}: {{ and }} can only enclose the name of a column, as in 'orders.{{country}}'"
            )
        mapping = RowMapping(pattern, data_from, headers_from, non_finite == "null", only)
        if form != "jsonl" and columns:  # each line of JSON has its own
            mapping.check_columns(columns, rows.name)
        job = _Ingest(file, rows, stream, mapping, skip, resume=resume, again=again)
        (_check if dry_run else _run)(job, where, create, as_json=as_json)


def _check(job: _Ingest, where: Target, create: tuple[str, ...], *, as_json: bool) -> None:
    """Say what the command would do, and which rows cannot be sent."""
    try:
        check = asyncio.run(job.check(where, create, show=not as_json))
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise Stopped("stopped: nothing was sent") from None
    if as_json:
        found = {"already_stored": job.already_stored, "skipped": job.skipped, **check.summary}
        write_json({"file": str(job.file), "stream": job.stream, "dry_run": True, **found})
    else:
        parts = [f"{job.skipped:,} skipped"] if job.skipped else []
        parts += [f"{job.already_stored:,} already stored"] if job.already_stored else []
        parts += [f"{check.rows:,} to send"]
        say(f"{job.name} to {job.stream}: {', '.join(parts)}; nothing was sent")
        check.show()
    if check.problems:
        raise click.ClickException(f"{count(check.problems, 'row')} of {job.name} cannot be sent; nothing was sent")


def _run(job: _Ingest, where: Target, create: tuple[str, ...], *, as_json: bool) -> None:
    try:
        report = asyncio.run(job.run(where, create, show=not as_json))
    except (KeyboardInterrupt, asyncio.CancelledError):
        if not job.sending:
            raise Stopped("stopped: nothing was sent") from None
        raise Stopped(f"stopped: {job.state(job.in_stream, exact=False)}") from None
    except RowError as error:
        before = job.taken - min(job.skipped, job.taken)
        hint = f"; {job.after_correcting(job.taken)}" if before or job.has_earlier else ""
        raise click.ClickException(f"{error.message}; {job.stored_before(before)}{hint}") from error
    if as_json:
        write_json(
            {
                "file": str(job.file),
                "stream": job.stream,
                "rows": job.skipped + job.already_stored + report.stored,
                "sent": report.stored,
                "already_stored": job.already_stored,
                "skipped": job.skipped,
                "removed_meanwhile": job.removed_meanwhile,
                "headers_left_out": job.headers_left_out.total(),
                "resent": report.resent,
                "in_doubt": report.in_doubt,
                "complete": not job.stopping,
                "seconds": round(report.seconds, 3),
            }
        )
    if report.in_doubt:
        say(f"{count(report.in_doubt, 'row')} may be stored more than once, because of an outage", err=True)
    if job.headers_left_out:
        found = job.headers_left_out.most_common(_NAMES_SHOWN + 1)
        names = ", ".join(f"{name} ({number:,})" for name, number in found[:_NAMES_SHOWN])
        more = ", …" if len(found) > _NAMES_SHOWN else ""
        say(f"left out headers that were for other messages: {names}{more}", err=True)
    stored = job.already_stored + report.stored
    if job.stopping:
        raise Stopped(f"stopped: {job.state(stored, exact=True)}")
    if not as_json:
        parts = [f"{job.skipped:,} skipped"] if job.skipped else []
        parts += [f"{job.already_stored:,} already stored"] if job.already_stored else []
        parts += [f"{report.stored:,} sent"]
        where_now = is_are(stored) if job.has_all else plural(stored, "was stored", "were stored")
        text = f"{count(stored, 'row')} of {job.name} {where_now} in {job.stream}"
        say(f"{text}: {', '.join(parts)} ({report.seconds:.1f} s)")


@dataclass(frozen=True, slots=True)
class _Sent:
    """Which rows a run sends: from `first` on all, or those that `stored` lacks."""

    first: int
    stored: StoredRows | None = None

    def index(self, number: int) -> int:
        """Return the index of the row that is sent after `number` others."""
        return self.first + number if self.stored is None else self.stored.index_of_sent(number)


class _Ingest:
    """One run.

    Attributes:
        file: The file, as it was given.
        name: What to call it in messages.
        stream: The stream.
        sending: Whether the rows that are stored are known, and others are being sent.
        stopping: Whether Ctrl-C was pressed.
        skipped: How many rows were left out on request.
        already_stored: How many of the others the stream had.
        in_stream: How many rows are in the stream.
        has_earlier: Whether the stream may have rows of this file that this run does not count.
        taken: How many rows of the file were read without an error.
        has_all: Whether the stream certainly still has all rows that it stored.
        removed_meanwhile: How many messages the stream has removed during the run; None if that is not known.
        headers_left_out: The headers of the rows that were sent that were for other messages.
    """

    def __init__(
        self, file: Path, rows: Rows, stream: str, mapping: RowMapping, skip: int, *, resume: bool, again: bool
    ) -> None:
        self.has_earlier: bool = skip > 0
        self.sending = self.stopping = self.has_all = False
        self.removed_meanwhile: int | None = None
        self.skipped = skip
        self.already_stored = self.in_stream = self.taken = 0
        self.headers_left_out: Counter[str] = Counter()
        self.file: Path = file
        self.name: str = rows.name
        self.stream: str = stream
        self._rows = rows
        self._mapping = mapping
        self._resume = resume
        self._again = again
        self._any_content = file == STDIO  # which may have anything the next time
        path = "-" if file == STDIO else str(file.resolve())
        digest = short_digest(path.encode(errors="surrogateescape"))
        self._ids = RowIds(digest, short_digest(mapping.digest, rows.digest()), skip, _new_token() if again else "")
        self._sent = _Sent(skip)
        self._subjects: tuple[str, ...] = ()
        self._compared_all = True  # false if the stream may have rows after one that cannot be sent
        self._stored_subject = ""  # the last one that was looked at

    async def run(self, where: Target, create: tuple[str, ...], *, show: bool) -> IngestReport:
        async with connected(where) as js:
            state = await self._usable_state(js, create)
            if create:
                state = await self._create_or_enable(js, create, state)
            assert state is not None
            self._subjects = state.subjects
            if not state.never_removed and not self._again:
                # The server remembers the ids of messages that it has removed. It would take their rows for duplicates.
                # Two runs at the same time have the same ids, if no message is removed between their starts.
                self._ids = dataclasses.replace(self._ids, token=str(state.removed))
            with stored_rows(self._ids, other_contents=self._resume or not self._any_content) as stored:
                if not self._again:
                    await self._look(js, state, stored, show=show)
                report = await self._send(js, show=show)
                await self._look_again(js, state)
                return report

    async def _create_or_enable(
        self, js: JetStreamContext, subjects: tuple[str, ...], state: StreamState | None
    ) -> StreamState:
        """Create the stream, or turn on what ingest needs; an existing stream keeps its subjects and limits."""
        if state is not None:
            await enable_options(Api(Context(js)), self.stream, [OPTIONS[option].field for option in _NEEDS])
        else:
            self.has_earlier = False
            self._subjects = subjects
            self._check_first_row()
            await ensure_stream(js, name=self.stream, subjects=subjects, allow_direct=True, allow_batched=True)
        return await existing_stream(js, self.stream)

    def _check_first_row(self) -> None:
        """Raise RowError if the first row cannot be sent, so that no stream is created for it."""
        with closing(self._rows_to_send()) as rows:
            for index, row, _, _ in rows:
                subject = self._mapping.message(row, self._place(index)).subject
                try:
                    check_subject(subject)
                except BadSubjectError as error:
                    raise RowError(f"{self._place(index)}: {one_line(error)}") from error
                self._check_subject(subject, self._place(index))
                break

    async def check(self, where: Target, create: tuple[str, ...], *, show: bool) -> RowCheck:
        """Check the rows that `run` would send; send nothing, and create no stream."""
        async with connected(where) as js:
            state = await self._usable_state(js, create)
            check = RowCheck(self.stream, state, create, Context(js).connection.max_payload)
            with stored_rows(self._ids, other_contents=self._resume or not self._any_content) as stored:
                if state is not None and not self._again:
                    if create and state.messages and not state.allows_direct:  # the command would allow it first
                        say(
                            f"stream {self.stream!r} does not allow direct get, which --create turns on; until then, --dry-run "
                            "cannot look for rows that are already stored, and counts all rows as those to send",
                            err=True,
                        )
                    else:
                        await self._look(js, state, stored, show=show)
                with progress("checking rows", self._rows.total, show=show) as report:
                    await self._check_rows(check, report)
            return check

    async def _usable_state(self, js: JetStreamContext, create: tuple[str, ...]) -> StreamState | None:
        """Return the stream's state, or None if the command creates the stream; raise ClickException if it takes no rows."""
        try:
            state = await existing_stream(js, self.stream, _CREATES)
        except click.ClickException:
            if create:
                return None
            raise
        if never := ruled_out(state.config).get(FAST_INGEST.field):
            raise click.ClickException(f"stream {self.stream!r} takes no rows: {never}; nothing was sent")
        if state.retention == "interest" and not state.consumers:
            raise click.ClickException(
                f"stream {self.stream!r} keeps messages only for its consumers (retention interest), and it has none, so the "
                "server would keep no row; nothing was sent; create the consumer first"
            )
        needs = ["batched"] if self._again else list(_NEEDS)
        lacks = [option for option in needs if not state.config.get(OPTIONS[option].field)]
        if create or not lacks:
            return state
        if "batched" in lacks:
            FAST_INGEST.check(state.api_level, state.server_version, "nothing was sent")
        text = f"stream {self.stream!r} does not allow {' and '.join(_NEEDS[option] for option in lacks)}"
        fix = f"'{enable_command(self.stream, *lacks)}' enables {'it' if len(lacks) == 1 else 'them'}"
        if lacks == ["direct"] and not state.messages:  # there is nothing to look for yet
            say(f"{text}, so the next run cannot look for the rows of this one; {fix}", err=True)
            return state
        if lacks == ["direct"]:
            text += ", so ingest cannot look for rows that are already stored"
            fix += ", --again sends all rows"
        raise click.ClickException(f"{text}; nothing was sent; {fix}")

    async def _check_rows(self, check: RowCheck, report: ReportProgress) -> None:
        with closing(self._rows_to_send()) as rows:
            try:
                for index, row, _, last in rows:
                    place = f"row {index + 1}"
                    try:
                        message = self._mapping.message(row, place)
                    except RowError as error:
                        check.refuse(error.message)
                    else:
                        check.add(place, self._batch_message(index, message, message.digest, last))
                    if check.rows % _SOME == 0:
                        report(self._rows.position, check.rows)
                        await asyncio.sleep(0)
            except RowError as error:  # the rows after it cannot be read
                check.refuse(error.message)

    # -- what is stored ------------------------------------------------------------------------------------------------

    async def _look(self, js: JetStreamContext, state: StreamState, stored: StoredRows, *, show: bool) -> None:
        """Find out which rows the stream has; raise ClickException if the file was changed since they were stored."""
        name = self.stream
        if not state.messages:
            _warn_about_removed(state, all_stored=False)
            return
        total = state.last_seq - state.first_seq + 1
        with progress("looking for rows that are already stored", total, show=show) as report:
            await stored.find(
                js, state, self._filter(state), self._digests, lambda position: report(position, position)
            )
        if stored.total is None:
            _warn_about_removed(state, all_stored=False)
            return
        self.has_earlier = True
        if stored.unclear:
            removed = (
                f"{count(stored.unclear, 'row')} before row {stored.after_unclear:,} of it {is_are(stored.unclear)}"
            )
            raise click.ClickException(
                f"{self.name} was changed since it was stored in {name}, or stored with other options, and the stream has "
                f"removed messages since: it is not known whether {removed} new, or stored and removed; --resume --skip {stored.after_unclear} sends only "
                "the rows after that one, --again sends all"
            )
        if stored.stored and stored.missing and not (stored.same_content or self._resume):
            total = stored.stored + stored.missing
            removed = (
                f" ({stored.presumed:,} of them and removed since, to judge by the rows around)"
                if stored.presumed
                else ""
            )
            raise click.ClickException(
                f"{self.name} was changed since it was stored in {name}, or stored with other options: {stored.stored:,} of "
                f"its {count(total, 'row')} {is_are(stored.stored)} stored{removed}; --resume sends the other "
                f"{stored.missing:,}, --again sends all"
            )
        if (earlier := stored.unrelated) and self._compared_all:
            say(
                f"{name} has {count(earlier, 'row')} of an earlier content of {self.name}, or stored with other options, "
                "none of which is in it now: all its rows count as new",
                err=True,
            )
        _warn_about_removed(state, all_stored=not stored.missing, presumed=stored.presumed)
        self.already_stored = stored.stored
        self._sent = _Sent(self.skipped, stored)

    def _filter(self, state: StreamState) -> str | None:
        """Return a filter for the subjects under which the stream has the rows."""
        subject = self._mapping.subject_filter
        if subject is None or state.config.get("subject_transform"):
            return None
        try:
            check_filter(subject)
        except BadSubjectError:
            return None  # the first row is refused, too
        return subject

    def _digests(self) -> Generator[str, None, None]:
        """Yield the digest of each row, up to the first one that cannot be read or sent; "" for one that is skipped."""
        with closing(self._rows.read()) as rows:
            try:
                for index, row in enumerate(rows):
                    try:
                        digest = self._mapping.message(row, self._place(index)).digest
                    except RowError:
                        if index >= self.skipped:
                            raise
                        digest = ""
                    yield digest
            except RowError:
                self._compared_all = False
                return  # sending the rows raises it again

    async def _look_again(self, js: JetStreamContext, before: StreamState) -> None:
        """Say whether the stream may have removed rows meanwhile; raise ClickException if it is another one than `before`."""
        try:
            if self.already_stored:
                state = await check_same_stream(Context(js), before)
            else:  # `ingest` has made sure of those that were sent
                state = await stream_state(Context(js), self.stream)
        except (StreamRecreatedError, NotFoundError) as error:
            raise click.ClickException(self._described_loss(error)) from error
        except nats.errors.Error as error:
            text = "the server has acknowledged all rows, but then did not say whether the stream still has them"
            say(f"{text}: {one_line(error)}", err=True)
            return
        removed = self.removed_meanwhile = max(0, state.removed - before.removed)
        all_are_new = not self.already_stored and not self.skipped
        self.has_all = state.never_removed or (all_are_new and not removed)
        if removed and state.retention != "workqueue":
            why = _WHY_REMOVED.get(state.retention, _WHY_REMOVED["limits"])
            say(
                f"stream {self.stream!r} has removed {count(removed, 'message')} while the rows were sent, because {why}: rows "
                "of this file may be among them",
                err=True,
            )

    # -- sending -------------------------------------------------------------------------------------------------------

    async def _send(self, js: JetStreamContext, *, show: bool) -> IngestReport:
        self.sending = True
        self.in_stream = self.already_stored
        with (
            progress(self.stream, self._rows.total, show=show) as report,
            self._stoppable(),
            closing(self._messages()) as messages,
        ):
            try:
                return await ingest(js, messages, on_progress=lambda now: self._report(report, now))
            except IngestError as error:
                raise click.ClickException(self._describe(error)) from error

    def _messages(self) -> Generator[BatchMessage, None, None]:
        with closing(self._rows_to_send()) as rows:
            for index, row, expected, last in rows:
                if self.stopping:
                    return
                message = self._mapping.message(row, self._place(index))
                digest = message.digest
                if expected not in (None, digest):
                    raise click.ClickException(f"{self.name} was changed while it was read; {_CONTINUE}")
                if message.subject != self._stored_subject:
                    self._check_subject(message.subject, self._place(index))
                self.headers_left_out.update(message.left_out)
                yield self._batch_message(index, message, digest, last)

    def _check_subject(self, subject: str, place: str) -> None:
        """Raise RowError if the stream does not store a subject, so that no row is a request to another program.

        With a subject such as ``$JS.API.STREAM.PURGE.ORDERS``, a row would be a request to the server.
        """
        if not any(covers(pattern, subject) for pattern in self._subjects):
            with suppress(BadSubjectError):  # `ingest` says what is wrong with an invalid one
                check_subject(subject)
                raise RowError(f"{place}: stream {self.stream!r} does not store its subject {subject!r}")
        self._stored_subject = subject

    def _batch_message(self, index: int, message: Message, digest: str, last: int) -> BatchMessage:
        msg_id = self._ids.make(index, digest, last)
        return BatchMessage(message.subject, message.payload, message.headers, stream=self.stream, msg_id=msg_id)

    def _rows_to_send(self) -> Generator[tuple[int, Row, str | None, int], None, None]:
        """Yield the index, the row, the digest if it is known, and the last of the stored rows after it, of each to send."""
        stored = self._sent.stored
        known = 0 if stored is None else stored.total or 0
        wanted = iter(()) if stored is None else stored.indexes_to_send()
        following = next(wanted, None)
        with closing(self._rows.read()) as rows:
            for index, row in enumerate(rows):
                self.taken = index
                if index >= known and index >= self.skipped:
                    yield index, row, None, index
                elif following is not None and index == following[0]:
                    digest, following = following[1], next(wanted, None)
                    yield index, row, digest, (known if following is None else following[0]) - 1
                self.taken = index + 1
        if self.skipped > self.taken:
            raise click.ClickException(
                f"{self.name} has only {count(self.taken, 'row')}; --skip {self.skipped} is more"
            )

    def state(self, rows: int, *, exact: bool) -> str:
        """Return how many rows the stream has after Ctrl-C, and how to go on."""
        number = f"{'exactly' if exact else 'at least'} {count(rows, 'row')} of {self.name}"
        text = f"{number} {is_are(rows)} in {self.stream}"
        if self._again:
            text = f"this run has stored {number} in {self.stream}"
        twice = ", of which some may be stored already" if self._again and not exact else ""
        return f"{text}; {self._to_continue(self.skipped + rows)}{twice}"

    def after_correcting(self, index: int) -> str:
        """Return how to go on after the row at `index` has been corrected."""
        return f"{_CORRECT} {f'--skip {index}' if self._again else '--resume'} then sends the rest"

    def _to_continue(self, index: int) -> str:
        """Return how to send the rows from `index` on; with --again, no run finds out which ones are stored."""
        return f"the same command with --skip {index} sends the rest" if self._again else _CONTINUE

    def stored_before(self, rows: int) -> str:
        """Return what is stored, for the error of the row that comes after `rows` others, without the skipped ones."""
        if self._again:
            return f"this run has stored the {count(rows, 'row')} before it" if rows else "this run has stored nothing"
        if rows:
            return f"the {count(rows, 'row')} before it {is_are(rows)} stored"
        return (
            f"rows of earlier runs stay in {self.stream}, nothing else is stored"
            if self.has_earlier
            else "nothing is stored"
        )

    def _describe(self, error: IngestError) -> str:
        """Return what happened to which row, what is stored, and how to go on: `ingest` counts only what it sent."""
        cause = error.__cause__
        if isinstance(cause, StreamRecreatedError | NotFoundError):
            return self._described_loss(cause)
        index = self._sent.index(error.index)
        before = index - min(self.skipped, index)
        stored = self.stored_before(before)
        code = getattr(cause, "err_code", None)
        reason = one_line(cause or error)
        if (
            isinstance(cause, BatchServerError) and code not in _OF_THE_STREAM
        ):  # not what the batch says of its messages
            reason = f"the server says: {cause.description}"
        elif isinstance(cause, NoStreamResponseError):
            reason = f"no stream stores its subject {error.subject!r}"
        if error.in_doubt:
            stored = f"{stored}; " if before else ""
            after = f" and the next {error.in_doubt - 1:,}" if error.in_doubt > 1 else ""
            stored += f"this row{after} may be stored; {self._to_continue(index)}"
            if self._again:
                stored += f", and {'this row' if error.in_doubt == 1 else 'these rows'} once more"
        elif code in _LIMITS and "exceeded" in reason:
            stored += f"; raise this limit first, then {self._to_continue(index)}"
        elif before:
            of_the_row = isinstance(cause, _OF_THE_ROW) or code == ErrorCode.MESSAGE_TOO_LARGE
            stored += f"; {self.after_correcting(index) if of_the_row else self._to_continue(index)}"
        return f"row {index + 1} of {self.name}: {reason}; {stored}"

    def _described_loss(self, error: Exception) -> str:
        """Return what happened to the stream of which rows were stored, and how to go on."""
        if isinstance(error, NotFoundError):
            return (
                f"stream {self.stream!r} was deleted while the rows were sent: no row of {self.name} is stored any more"
            )
        command = "the same command without --again" if self._again else "the same command"
        return (
            f"stream {self.stream!r} was deleted and created again while the rows were sent: the rows that it had before are "
            f"gone, and only those that were sent since may be stored; {command} sends the rows that the stream does not have"
        )

    def _place(self, index: int) -> str:
        return f"{self.name}, row {index + 1}"

    def _report(self, report: ReportProgress, now: IngestProgress) -> None:
        self.in_stream = self.already_stored + now.stored
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


def _warn_about_removed(state: StreamState, *, all_stored: bool, presumed: int = 0) -> None:
    """Say if the stream may have removed rows of the file, and whether such rows are sent again."""
    if state.never_removed:
        return
    if presumed:
        text = (
            f"has removed messages: {count(presumed, 'row')} that it does not have {plural(presumed, 'counts', 'count')} as "
            "stored, to judge by the rows around; if you have changed such a row, it is not sent; --again sends all rows"
        )
    elif all_stored:
        text = "has removed messages: rows of this file that were among them count as stored; --again sends all rows"
    elif state.retention == "interest":
        text = (
            "keeps only messages that a consumer has yet to acknowledge (retention interest): rows of an earlier run that it "
            "does not have are sent again"
        )
    elif state.retention != "limits":
        text = (
            f"deletes messages that were consumed (retention {state.retention}): rows of an earlier run that were "
            "consumed may be sent again"
        )
    else:
        text = "has removed messages: if rows of this file were among them, they may be sent again"
    say(f"stream {state.name!r} {text}", err=True)


def _new_token() -> str:
    return NUID().next().decode()
