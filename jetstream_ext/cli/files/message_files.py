"""Files of messages, as ``export`` writes them: one row per message."""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import orjson

from jetstream_ext.cli.files.formats import compress, conversion
from jetstream_ext.cli.output import one_line, text_or_base64
from jetstream_ext.protocol.direct import StoredMsg, stored_block
from jetstream_ext.protocol.headers import CRLF, VERSION, format_time_ns, line_without_header

if TYPE_CHECKING:
    import pyarrow as pa

START_AGAIN: Final = "--overwrite discards the export and starts again"
INSTEAD: Final = "export other messages with --subject or --start-seq, and read this one with DirectGet"
COLUMNS: Final = ("seq", "time", "subject", "headers", "data", "data_base64")
_VERSION_LINE: Final = VERSION + CRLF
_PARQUET_ROWS: Final = 10_000  # converted at a time, or
_PARQUET_BYTES: Final = 8 << 20


def is_export(columns: Iterable[str]) -> bool:
    """Return whether the columns of a file are those that ``export`` writes."""
    names = set(columns)
    return names.issuperset(COLUMNS[:4]) and names.issubset(COLUMNS) and len(names) > 4


class UnwritableError(click.ClickException):
    """A message that the file cannot hold."""


class JsonLines:
    """One JSON object per message; a binary payload is in ``data_base64``.

    Attributes:
        name: What a journal calls files of this kind.
        appends: Whether the finished file is what `head` and `rows` return.
        is_text: Whether a terminal can show the finished file.
        headers_left_out: How many headers of the messages the file lacks.
    """

    name: str = "jsonl"
    appends: bool = True
    is_text: bool = True

    def __init__(self) -> None:
        self.headers_left_out: int = 0

    def head(self) -> bytes:
        """Return the bytes before the first message."""
        return b""

    def rows(self, messages: Iterable[StoredMsg]) -> bytes:
        """Return messages as bytes of the unfinished file."""
        return b"".join(orjson.dumps(self._row(message)) + b"\n" for message in messages)

    def finish(self, part: Path, file: Path) -> None:
        """Turn the unfinished file into the finished one."""
        compress(part, file)

    def _row(self, message: StoredMsg) -> dict[str, Any]:
        subject, pairs, lines = message.subject, message.header_pairs, stored_block(message)
        if not (message.raw_subject.isascii() and lines.isascii()):
            _check_utf_8(message)
        if lines and (lines.count(CRLF) != len(pairs) or not lines.startswith(_VERSION_LINE)):
            _check_lines(message)
        headers: dict[str, str | list[str]] = dict(pairs)
        if len(headers) < len(pairs):
            values: dict[str, list[str]] = {}
            for name, value in pairs:
                values.setdefault(name, []).append(value)
            headers = {name: found if len(found) > 1 else found[0] for name, found in values.items()}
        return {
            "seq": message.seq,
            "time": _time_text(message.time_ns),
            "subject": subject,
            "headers": headers,
            **text_or_base64("data", message.data),
        }


def _time_text(time_ns: int) -> str:
    seconds, fraction = divmod(time_ns, 1_000_000_000)
    return f"{_second_text(seconds)}.{fraction:09d}Z"


@functools.lru_cache(maxsize=16)  # neighbours have the same second
def _second_text(seconds: int) -> str:
    return format_time_ns(seconds * 1_000_000_000).removesuffix("Z")


def _check_utf_8(message: StoredMsg) -> None:
    """Raise UnwritableError if the subject or a header of a message is not UTF-8."""
    for what, raw in (("subject", message.raw_subject), *(("headers", raw) for raw in chain(*message.raw_headers))):
        try:
            raw.decode()
        except UnicodeDecodeError:
            raise UnwritableError(
                f"message {message.seq} of stream {message.stream!r}: column {what!r} would lose bytes that are not UTF-8; "
                f"{INSTEAD}"
            ) from None


def _check_lines(message: StoredMsg) -> None:
    """Raise UnwritableError if a line among a message's headers is not a header."""
    if (line := line_without_header(stored_block(message))) is not None:
        raise UnwritableError(
            f"message {message.seq} of stream {message.stream!r}: column 'headers' would lose the line {line!r}, which is no "
            f"header; {INSTEAD}"
        )


class Csv(JsonLines):
    """One row per message; headers are a JSON object, and a binary payload is in ``data_base64``."""

    name: str = "csv"

    def __init__(self, delimiter: str) -> None:
        super().__init__()
        self._delimiter = delimiter
        if delimiter != ",":
            self.name = f"{self.name} with {delimiter!r}"

    def head(self) -> bytes:
        return f"{self._delimiter.join(COLUMNS)}\n".encode()

    def rows(self, messages: Iterable[StoredMsg]) -> bytes:
        text = io.StringIO(newline="")
        # Quote all texts: older Pythons do not quote a lone carriage return, and readers lose it.
        options: Any = {"lineterminator": "\n", "quoting": csv.QUOTE_NONNUMERIC, "delimiter": self._delimiter}
        writer = csv.DictWriter(text, COLUMNS, **options)
        for message in messages:
            row = self._row(message)
            row["headers"] = orjson.dumps(row["headers"]).decode() if row["headers"] else ""
            writer.writerow(row)
        return text.getvalue().encode()


class Parquet(JsonLines):
    """Columns seq, time, subject, headers and data, each with every value exact.

    A Parquet file cannot be appended to: the unfinished file is an Arrow IPC stream, and `finish` converts it.
    """

    name = "parquet from Arrow"  # unfinished files of older versions are JSON lines, and their name "parquet"
    appends = False
    is_text = False

    @property
    def schema(self) -> pa.Schema:
        """The columns of the file."""
        import pyarrow as pa  # an extra, and slow to import

        from jetstream_ext.columns import SCHEMA

        return pa.schema([SCHEMA.field(name) for name in ("seq", "time", "subject", "headers", "data")])

    def head(self) -> bytes:
        return self.schema.serialize().to_pybytes()

    def batch(self, batch: pa.RecordBatch) -> bytes:
        """Return a batch as bytes of the unfinished file."""
        return batch.serialize().to_pybytes()

    def finish(self, part: Path, file: Path) -> None:
        import pyarrow.parquet as pq  # an extra, and slow to import

        with (
            conversion(part, file) as fresh,
            pq.ParquetWriter(fresh, self.schema, compression="zstd") as writer,
        ):
            for table in _joined(_batches(part)):
                writer.write_table(table)


def _batches(part: Path) -> Iterator[pa.RecordBatch]:
    """Yield the batches of an unfinished file; raise ClickException if it is damaged."""
    import pyarrow as pa

    try:
        with pa.OSFile(str(part), "rb") as source, pa.ipc.open_stream(source) as batches:
            yield from batches
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # of the disk
            raise
        raise click.ClickException(f"{part} is damaged: {one_line(error)}; {START_AGAIN}") from error


def _joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield tables of about `_PARQUET_ROWS` rows, or `_PARQUET_BYTES`."""
    import pyarrow as pa

    some: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        some.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= _PARQUET_ROWS or size >= _PARQUET_BYTES:
            yield pa.Table.from_batches(some)
            some, rows, size = [], 0, 0
    if some:
        yield pa.Table.from_batches(some)
