"""Files of rows: CSV, JSON lines and Parquet, as ``ingest`` reads them and ``export`` writes them."""

from __future__ import annotations

import base64
import csv
import importlib.util
import io
import os
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final

import click
import orjson

from jetstream_ext.cli.output import text_or_base64
from jetstream_ext.protocol.direct import StoredMsg

FORMATS: Final = ("csv", "jsonl", "parquet")
SPREADSHEET: Final = "csv for spreadsheets"
_SUFFIXES: Final = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet"}
_COLUMNS: Final = ("seq", "time", "subject", "headers", "data", "data_base64")
_PARQUET_ROWS: Final = 10_000  # converted at a time
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
        raise click.ClickException("Parquet needs pyarrow: pip install pyarrow")
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
    """Columns seq, time, subject, headers (JSON) and data (binary).

    A Parquet file cannot be appended to: the unfinished file has JSON lines, and `finish` converts them.
    """

    def finish(self, part: Path, file: Path) -> None:
        import pyarrow as pa  # an extra, and slow to import
        import pyarrow.parquet as pq

        types: list[Any] = [
            ("seq", pa.uint64()),
            ("time", pa.timestamp("us", tz="UTC")),
            ("subject", pa.string()),
            ("headers", pa.string()),
            ("data", pa.binary()),
        ]
        schema = pa.schema(types)
        fresh = file.with_name(f"{file.name}.new")
        try:
            with part.open("rb") as lines, pq.ParquetWriter(fresh, schema, compression="zstd") as writer:
                while rows := [_parquet_row(orjson.loads(line)) for line in islice(lines, _PARQUET_ROWS)]:
                    writer.write_table(pa.Table.from_pylist(rows, schema))
            with fresh.open("rb+") as written:
                os.fsync(written.fileno())  # before the unfinished file is deleted
            fresh.replace(file)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        part.unlink()


WRITERS: Final[dict[str, JsonLines]] = {
    "csv": Csv(),
    SPREADSHEET: SpreadsheetCsv(),
    "jsonl": JsonLines(),
    "parquet": Parquet(),
}


def _row(message: StoredMsg) -> dict[str, Any]:
    return {
        "seq": message.seq,
        "time": message.time.isoformat(),
        "subject": message.subject,
        "headers": message.headers,
        **text_or_base64("data", message.data),
    }


def _parquet_row(row: dict[str, Any]) -> dict[str, Any]:
    return row | {
        "time": datetime.fromisoformat(row["time"]),
        "headers": orjson.dumps(row["headers"]).decode() if row["headers"] else None,
        "data": row["data"].encode() if "data" in row else base64.b64decode(row["data_base64"]),
    }
