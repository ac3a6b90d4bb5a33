"""The files that ``ingest`` reads, row by row, and the message that a row becomes."""

from __future__ import annotations

import base64
import binascii
import csv
import hashlib
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import click
import orjson

_PLACEHOLDER: Final = re.compile(r"\{([^{}]+)\}")
_CHUNK: Final = 1 << 20
_LARGEST_FIELD: Final = 1 << 30  # the csv module's own limit is below the payload that a server takes
Row = Mapping[str, Any]


class Whole(dict[str, Any]):
    """A row that is JSON in its file, with what stands there: to write it anew could change its numbers."""

    text: bytes = b""


class RowError(click.ClickException):
    """A row that cannot be read or sent."""


class Rows:
    """The rows of a file.

    Attributes:
        total: The size of the whole,
        position: and of what was read of it: bytes, or rows of a Parquet file.
    """

    def __init__(self, path: Path, form: str) -> None:
        if not path.is_file():  # it is read twice, the first time for its name
            raise RowError(f"{path} is no regular file")
        self._path = path
        self._form = form
        self.position: int = 0
        self.total: int = path.stat().st_size
        if form == "parquet":
            with _parquet_file(path) as file:
                self.total = file.metadata.num_rows

    def read(self) -> Generator[Row, None, None]:
        """Yield the rows. Close it if it is not read to its end."""
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
                        raise RowError(f"{self._path}, row {number}: it has not as many fields as the header")
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
                    raise RowError(f"{self._path}, line {number}: not a JSON object")
                row = Whole(found)
                row.text = line.strip().encode()
                yield row

    def _lines(self) -> Generator[str, None, None]:
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                self.position += len(line)
                try:
                    yield line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise RowError(f"{self._path}, line {number}: not UTF-8") from error

    def _parquet(self) -> Generator[Row, None, None]:
        with _parquet_file(self._path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    self.position += 1
                    yield row


@contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    import pyarrow as pa  # an extra, and heavy
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except pa.ArrowInvalid as error:
        raise RowError(f"{path} is no Parquet file, or broken: {error}") from error


class Template:
    """What subject and payload a row has.

    Args:
        subject: The subject; ``{column}`` stands for a row's value.
        data_from: The column that is the payload, as text, or in base64 in the column of that name and ``_base64``.
            None is the whole row as JSON.
    """

    def __init__(self, subject: str, data_from: str | None = None) -> None:
        self._subject = subject
        self._data_from = data_from

    def message(self, row: Row, place: str) -> tuple[str, bytes]:
        """Return subject and payload.

        Args:
            row: The row.
            place: Where it is, for errors.

        Raises:
            RowError: It lacks a column, or the column is no text.
        """

        def value(match: re.Match[str]) -> str:
            found = row.get(match[1])
            if isinstance(found, bool) or not isinstance(found, str | int):
                what = "has no value" if found is None else "is neither a text nor a whole number"
                raise RowError(f"{place}: column {match[1]!r} {what}, and the subject is made of it")
            return str(found)

        return _PLACEHOLDER.sub(value, self._subject), self._payload(row, place)

    def _payload(self, row: Row, place: str) -> bytes:
        name = self._data_from
        if name is None:
            return row.text if isinstance(row, Whole) else orjson.dumps(row, default=_plain)
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
            raise RowError(f"{place}: column {name!r} has no value, and it is the payload")
        return orjson.dumps(found, default=_plain)


def fingerprint(path: Path, subject: str, data_from: str | None) -> str:
    """Return a name for what a file sends: the same content sent the same way has the same name."""
    digest = hashlib.sha256(orjson.dumps([subject, data_from]))
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()[:24]


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value)  # decimals, durations
