"""Files of rows, as ``ingest`` reads them: CSV, JSON lines and Parquet."""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import re
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import click
import orjson

from jetstream_ext.cli.files.formats import STDIO, check_open, open_compressed
from jetstream_ext.cli.output import one_line

if TYPE_CHECKING:
    import pyarrow as pa

_LARGEST_FIELD: Final = 1 << 30  # the csv module's own limit is lower than a server's max_payload
_BLOCK: Final = 1 << 20
_SOME: Final = 100  # lines between two looks at the position
_OFFSET: Final = re.compile(r"([+-]\d\d)(\d\d)$")
_UNITS: Final = {"s": 0, "ms": 3, "us": 6, "ns": 9}  # digits after the point of a second

Row = Mapping[str, Any]


class RowError(click.ClickException):
    """A row that cannot be read or sent."""


class JsonRow(dict[str, Any]):
    """A row of a JSON file, with its text: encoding it again could change its numbers."""

    text: bytes = b""


@dataclass(frozen=True, slots=True)
class Source:
    """A file and how to read it; `name` stands for it in messages."""

    path: Path
    name: str
    form: str
    delimiter: str = ","
    encoding: str = "utf-8"


@contextmanager
def spooled(file: Path) -> Iterator[Path]:
    """Return the file, or a copy of stdin for the duration of a block, because it is read more than once."""
    if file != STDIO:
        yield file
        return
    check_open(sys.stdin, "stdin")
    with tempfile.TemporaryDirectory(prefix="jetstream-ext-") as folder:
        copy = Path(folder) / "stdin"
        with copy.open("wb") as target:
            shutil.copyfileobj(sys.stdin.buffer, target)
        yield copy


def encoding_of(given: str | None, form: str) -> str:
    """Return Python's name of the given encoding; raise UsageError if it has none of this name, or if it is of no use."""
    if given is not None and form == "parquet":
        raise click.UsageError("--encoding is for CSV and JSON lines, not for parquet")
    encoding = given or "utf-8"
    try:
        "".encode(encoding)
        return codecs.lookup(encoding).name
    except (LookupError, ValueError):
        raise click.UsageError(f"--encoding {encoding!r} is not known; for example utf-8, latin-1, utf-16") from None


class Rows:
    """The rows of a file; `position` and `total` are bytes, or rows of a Parquet file."""

    def __init__(self, source: Source) -> None:
        if not source.path.is_file():
            raise RowError(
                f"{source.name} is not a regular file; ingest reads the file twice, so it cannot read from a pipe other than "
                "stdin: give - and --format"
            )
        self._source = source
        self.name: str = source.name
        self.position: int = 0
        self.total: int = source.path.stat().st_size
        if source.form == "parquet":
            with self._parquet_file() as file:
                self.total = file.metadata.num_rows

    def read(self) -> Generator[Row, None, None]:
        """Yield the rows, from the first one; the caller must close the generator."""
        self.position = 0
        return {"csv": self._csv, "jsonl": self._jsonl, "parquet": self._parquet}[self._source.form]()

    def columns(self) -> tuple[str, ...]:
        """Return the names of the first row's columns; none if there is no row that can be read."""
        if self._source.form == "parquet":
            with self._parquet_file() as file:
                return tuple(file.schema_arrow.names)
        with closing(self.read()) as rows:
            try:
                return tuple(next(rows, ()))
            except RowError:
                return ()  # reading the rows raises it again

    def digest(self) -> bytes:
        """Return a digest of the content and of how it is read; the compression of the file does not change it."""
        digest = hashlib.sha256(f"{self._source.form} {self._source.delimiter} {self._source.encoding}\n".encode())
        with self._open() as (_, content):
            while some := content.read(_BLOCK):
                digest.update(some)
        return digest.digest()

    @contextmanager
    def _open(self) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
        try:
            with open_compressed(self._source.path) as both:
                yield both
        except (EOFError, zlib.error) as error:
            raise RowError(f"{self.name} is damaged: {one_line(error)}") from error
        except OSError as error:
            if error.errno:  # of the disk
                raise
            raise RowError(f"{self.name} is damaged: {one_line(error)}") from error

    # -- CSV and JSON lines --------------------------------------------------------------------------------------------

    def _csv(self) -> Generator[Row, None, None]:
        csv.field_size_limit(_LARGEST_FIELD)
        number = 0
        with closing(self._lines()) as lines:
            after_empty_lines = dropwhile(lambda line: not line.rstrip("\r\n"), lines)
            reader = csv.DictReader(after_empty_lines, strict=True, delimiter=self._source.delimiter)
            try:
                names = reader.fieldnames or ()
                _check_names(self.name, names)
                for number, row in enumerate(reader, 1):
                    if None in row or None in row.values():
                        raise RowError(f"{self.name}, row {number}: the number of fields differs from the header")
                    yield row
            except csv.Error as error:
                raise RowError(f"{self.name}, after row {number}: {error}") from error

    def _jsonl(self) -> Generator[Row, None, None]:
        with closing(self._lines()) as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    found = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    raise RowError(f"{self.name}, line {number}: {error}") from error
                if not isinstance(found, dict):
                    raise RowError(f"{self.name}, line {number}: the line is not a JSON object")
                row = JsonRow(found)
                row.text = line.strip().encode()
                yield row

    def _lines(self) -> Generator[str, None, None]:
        """Yield the lines, which end at line feeds only: a carriage return may be part of a field."""
        encoding, number = self._source.encoding, 0
        by_line = "\n".encode(encoding) == b"\n"
        with self._open() as (raw, content):
            lines = _decoded_lines(content, encoding) if by_line else iter(_text_file(content, encoding))
            try:
                for number, text in enumerate(lines, 1):
                    if number % _SOME == 0:
                        self.position = raw.tell()
                    yield text.removeprefix("\ufeff") if number == 1 else text
            except UnicodeError as error:
                place = f"line {number + 1}" if by_line else f"after line {number}"
                what = "UTF-8; give its --encoding" if encoding == "utf-8" else f"in the encoding {encoding}"
                raise RowError(f"{self.name}, {place}: the text is not {what}") from error

    # -- Parquet -------------------------------------------------------------------------------------------------------

    def _parquet(self) -> Generator[Row, None, None]:
        import pyarrow as pa  # an extra, and slow to import

        with self._parquet_file() as file:
            _check_names(self.name, file.schema_arrow.names)
            for batch in file.iter_batches():
                try:
                    rows = _parquet_rows(batch)
                except (
                    ValueError,
                    OverflowError,
                    pa.ArrowException,
                ) as error:  # such as a date that Python does not have
                    raise RowError(f"{self.name}, after row {self.position}: {error}") from error
                for row in rows:
                    self.position += 1
                    yield row

    @contextmanager
    def _parquet_file(self) -> Iterator[Any]:
        import pyarrow as pa  # an extra, and slow to import
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(self._source.path) as file:
                yield file
        except pa.ArrowInvalid as error:
            raise RowError(f"{self.name} is not a valid Parquet file: {error}") from error


def _check_names(place: str, names: Sequence[str]) -> None:
    for name, number in Counter(names).items():
        if number > 1:
            raise RowError(f"{place}: there are two columns {name!r}")


def _decoded_lines(content: IO[bytes], encoding: str) -> Iterator[str]:
    for line in content:
        yield line.decode(encoding)


def _text_file(content: IO[bytes], encoding: str) -> IO[str]:
    """Return the file's text; in UTF-16 and some other encodings, a line feed is not that byte."""
    return io.TextIOWrapper(content, encoding, newline="\n")


def _parquet_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return a batch's rows, with nanoseconds as text in RFC 3339, durations in ISO 8601, and maps as dicts."""
    import pyarrow as pa  # an extra, and slow to import

    columns: dict[str, list[Any]] = {}
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if isinstance(field.type, pa.TimestampType | pa.Time64Type) and field.type.unit == "ns":
            times = column.cast(pa.string()).to_pylist()  # Python's own times have microseconds
            values: list[Any] = [time and _OFFSET.sub(r"\1:\2", time.replace(" ", "T", 1)) for time in times]
        elif isinstance(field.type, pa.DurationType):
            digits = _UNITS[field.type.unit]
            numbers = column.cast(pa.int64()).to_pylist()
            values = [None if number is None else duration_text(number, digits) for number in numbers]
        else:
            values = column.to_pylist()
            if any(isinstance(kind, pa.MapType) for kind in types_in(field.type)):
                values = [_with_dicts(value, field.type) for value in values]
        columns[field.name] = values
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def duration_text(number: int, digits: int) -> str:
    """Return a duration in ISO 8601; it is a number of seconds whose last `digits` are behind the point."""
    seconds, fraction = divmod(abs(number), 10**digits)
    point = f".{fraction:0{digits}}".rstrip("0") if fraction else ""
    return f"{'-' if number < 0 else ''}PT{seconds}{point}S"


def types_in(kind: pa.DataType) -> Iterator[pa.DataType]:
    """Yield a type and all types inside of it."""
    yield kind
    for index in range(kind.num_fields):
        yield from types_in(kind.field(index).type)


def _with_dicts(value: Any, kind: pa.DataType) -> Any:
    """Return a value with its maps as dicts, at any depth; one with other keys than strings, or equal keys, stays as pairs."""
    import pyarrow as pa  # an extra, and slow to import

    if value is None or kind.num_fields == 0:
        return value
    if isinstance(kind, pa.MapType):
        pairs = [(name, _with_dicts(item, kind.item_type)) for name, item in value]
        is_object = all(isinstance(name, str) for name, _ in pairs) and len({name for name, _ in pairs}) == len(pairs)
        return dict(pairs) if is_object else pairs
    if isinstance(kind, pa.StructType):
        return {field.name: _with_dicts(value[field.name], field.type) for field in kind}
    return [_with_dicts(item, kind.field(0).type) for item in value]
