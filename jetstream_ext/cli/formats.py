"""Files of rows: CSV, JSON lines and Parquet, as ``ingest`` reads them and ``export`` writes them."""

from __future__ import annotations

import csv
import importlib.util
import io
import os
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import orjson

from jetstream_ext.cli.output import one_line, text_or_base64
from jetstream_ext.protocol.direct import StoredMsg

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS: Final = ("csv", "jsonl", "parquet")
SPREADSHEET: Final = "csv for spreadsheets"
START_AGAIN: Final = "--overwrite discards the export and starts again"
PARQUET: Final = "parquet from Arrow"  # unfinished files of older versions are JSON lines, and their format "parquet"
_SUFFIXES: Final = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet"}
_COLUMNS: Final = ("seq", "time", "subject", "headers", "data", "data_base64")
_PARQUET_ROWS: Final = 10_000  # converted at a time, or
_PARQUET_BYTES: Final = 8 << 20
# Spreadsheets take a cell with such a start as a formula, the last four in East Asian versions. Where a comma is the
# decimal sign, they split the file at semicolons and line breaks instead, also inside quotes.
_FORMULA: Final = re.compile('^(?=[\t\r\n])|(^|[;\t\r\n]"*)(?=[-=+@\uff1d\uff0b\uff0d\uff20])')
_NUMBER: Final = re.compile(r"-(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")  # a negative one of JSON
_LARGEST_FIELD: Final = 1 << 30  # the csv module's own limit is lower than a server's max_payload

Row = Mapping[str, Any]


def format_of(path: Path, given: str | None) -> str:
    """Return the given format, or else that of the file's name; raise an error if it is unknown or needs a package."""
    chosen = given or _SUFFIXES.get(path.suffix.lower())
    if chosen is None:
        raise click.ClickException(f"{path}: the name has no known suffix; give --format {'|'.join(FORMATS)}")
    if chosen == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise click.ClickException("Parquet needs pyarrow: pip install 'nats-jetstream-ext[arrow]'")
    return chosen


# -- reading -------------------------------------------------------------------------------------------------------


class RowError(click.ClickException):
    """A row that cannot be read or sent."""


class JsonRow(dict[str, Any]):
    """A row of a JSON file, with its text: encoding it again could change its numbers."""

    text: bytes = b""


class Rows:
    """The rows of a file; `position` and `total` are bytes, or rows of a Parquet file."""

    def __init__(self, path: Path, form: str) -> None:
        if not path.is_file():
            raise RowError(f"{path} is not a regular file; ingest reads the file twice, so it cannot read from a pipe")
        self._path = path
        self._form = form
        self.position: int = 0
        self.total: int = path.stat().st_size
        if form == "parquet":
            with _parquet_file(path) as file:
                self.total = file.metadata.num_rows

    def read(self) -> Generator[Row, None, None]:
        """Yield the rows, from the first one; the caller must close the generator."""
        self.position = 0
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
                try:
                    rows = _parquet_rows(batch)
                except (ValueError, OverflowError) as error:  # such as nanoseconds in a list, which need pandas
                    raise RowError(f"{self._path}, after row {self.position}: {error}") from error
                for row in rows:
                    self.position += 1
                    yield row


def _parquet_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return a batch's rows, with nanoseconds as text in RFC 3339 and maps as dicts."""
    import pyarrow as pa  # an extra, and slow to import

    columns: dict[str, list[Any]] = {}
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if isinstance(field.type, pa.TimestampType | pa.Time64Type) and field.type.unit == "ns":
            times = column.cast(pa.string()).to_pylist()  # Python's own times have microseconds
            values: list[Any] = [time and time.replace(" ", "T", 1) for time in times]
        elif isinstance(field.type, pa.MapType):
            values = [pairs and _as_dict(pairs) for pairs in column.to_pylist()]
        else:
            values = column.to_pylist()
        columns[field.name] = values
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _as_dict(pairs: list[tuple[Any, Any]]) -> object:
    names = dict(pairs)
    return names if len(names) == len(pairs) else pairs


@contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    import pyarrow as pa  # an extra, and slow to import
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except pa.ArrowInvalid as error:
        raise RowError(f"{path} is not a valid Parquet file: {error}") from error


# -- writing -------------------------------------------------------------------------------------------------------


class JsonLines:
    """One JSON object per message; a binary payload is in ``data_base64``."""

    def head(self) -> bytes:
        """Return the bytes before the first message."""
        return b""

    def rows(self, messages: Iterable[StoredMsg]) -> bytes:
        """Return messages as bytes of the unfinished file."""
        return b"".join(orjson.dumps(_row(message)) + b"\n" for message in messages)

    def finish(self, part: Path, file: Path) -> None:
        """Turn the unfinished file into the finished one."""
        part.replace(file)


class Csv(JsonLines):
    """One row per message; headers are a JSON object, and a binary payload is in ``data_base64``."""

    def head(self) -> bytes:
        return f"{','.join(_COLUMNS)}\n".encode()

    def rows(self, messages: Iterable[StoredMsg]) -> bytes:
        text = io.StringIO(newline="")
        # Quote all texts: older Pythons do not quote a lone carriage return, and readers lose it.
        writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
        for message in messages:
            row = _row(message)
            row["headers"] = orjson.dumps(row["headers"]).decode() if row["headers"] else ""
            writer.writerow({name: self._cell(value) for name, value in row.items()})
        return text.getvalue().encode()

    def _cell(self, value: str | int) -> str | int:
        return value


class SpreadsheetCsv(Csv):
    """CSV whose text a spreadsheet does not run as formulas (OWASP, "CSV Injection"); numbers such as -5 stay numbers."""

    def _cell(self, value: str | int) -> str | int:
        if isinstance(value, int) or _NUMBER.fullmatch(value):
            return value
        return _FORMULA.sub(r"\1'", value)


class Parquet(JsonLines):
    """Columns seq, time, subject, headers and data, each with every value exact.

    A Parquet file cannot be appended to: the unfinished file is an Arrow IPC stream, and `finish` converts it.
    """

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

        fresh = file.with_name(f"{file.name}.new")
        try:
            with pq.ParquetWriter(fresh, self.schema, compression="zstd") as writer:
                for table in _joined(_batches(part)):
                    writer.write_table(table)
            with fresh.open("rb+") as written:
                os.fsync(written.fileno())  # before the unfinished file is deleted
            fresh.replace(file)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        part.unlink()


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


WRITERS: Final[dict[str, JsonLines]] = {
    "csv": Csv(),
    SPREADSHEET: SpreadsheetCsv(),
    "jsonl": JsonLines(),
    PARQUET: Parquet(),
}


def _row(message: StoredMsg) -> dict[str, Any]:
    return {
        "seq": message.seq,
        "time": message.time.isoformat(),
        "subject": message.subject,
        "headers": message.headers,
        **text_or_base64("data", message.data),
    }
