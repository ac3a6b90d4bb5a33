"""Files whose columns are the keys of the payloads, as ``export --rows`` writes them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from jetstream_ext.cli.files.exact_json import decode_exact, decode_numbers
from jetstream_ext.cli.files.formats import compressed, conversion
from jetstream_ext.cli.files.message_files import JsonLines, UnwritableError
from jetstream_ext.cli.files.row_files import types_in
from jetstream_ext.cli.output import one_line
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.headers import is_reserved

if TYPE_CHECKING:
    import pyarrow as pa

_BLOCK: Final = 10_000  # rows of a Parquet file that are converted at a time, or
_BLOCK_BYTES: Final = 8 << 20
_BARE: Final = re.compile(r"\w[\w. -]*")  # a column name that needs no quotes
_INSTEAD: Final = "export to JSON lines, or without --rows"


class TableLines(JsonLines):
    """The payloads, which are JSON objects, one in a line and otherwise unchanged."""

    name = "rows in jsonl"

    def rows(self, messages: Iterable[StoredMsg]) -> bytes:
        return b"".join(self.line(message) for message in messages)

    def line(self, message: StoredMsg) -> bytes:
        """Return a message as a line of the unfinished file; raise UnwritableError if the file cannot hold it."""
        left_out = sum(not is_reserved(name) for name, _ in message.header_pairs)
        self.headers_left_out: int = self.headers_left_out + left_out
        try:
            found = orjson.loads(message.data)
            self._check(message.data)
        except ValueError as error:
            reason = one_line(error)
            raise _refused(message, f"its payload cannot become a row: {reason}; export without --rows") from error
        if not isinstance(found, dict):
            raise _refused(message, "its payload is not a JSON object, so it has no columns; export without --rows")
        # Line breaks can only be between the values of JSON; inside of a text they are escaped.
        return message.data.strip().replace(b"\r", b" ").replace(b"\n", b" ") + b"\n"

    def _check(self, data: bytes) -> None:
        """Raise ValueError if the payload would lose something in this kind of file."""


class _Table(TableLines):
    """A file with columns, which are known at the end: the unfinished file has lines of a sequence and a payload."""

    appends = False

    def line(self, message: StoredMsg) -> bytes:
        return b"%d\t%b" % (message.seq, super().line(message))


class TableCsv(_Table):
    """A column for each key; texts are quoted, and nested values are JSON. A missing value and null are an empty cell."""

    def __init__(self, delimiter: str) -> None:
        super().__init__()
        self._delimiter = delimiter
        self.name: str = f"rows in csv with {delimiter!r}"

    def _check(self, data: bytes) -> None:
        decode_exact(data)

    def finish(self, part: Path, file: Path) -> None:
        names: dict[str, None] = {}
        for _, payload in _lines(part):
            names.update(orjson.loads(payload))
        _check_names(part, names)
        with conversion(part, file) as fresh, compressed(fresh, file) as target:
            if names:
                target.write(self._joined(self._name(name) for name in names))
            for seq, payload in _lines(part):
                row = decode_exact(payload)
                try:
                    target.write(self._joined(self._cell(row.get(name)) for name in names))
                except TypeError as error:  # orjson writes less depth than it reads
                    raise UnwritableError(f"message {seq}: its payload is nested too deeply; {_INSTEAD}") from error

    def _joined(self, cells: Iterable[str]) -> bytes:
        line = self._delimiter.join(cells) or '""'  # readers leave out empty lines
        return f"{line}\n".encode()

    def _name(self, name: str) -> str:
        bare = _BARE.fullmatch(name) and self._delimiter not in name
        return name if bare else self._text(name)

    def _cell(self, value: Any) -> str:
        if value is None:
            return ""
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, orjson.Fragment):
            number = orjson.dumps(value).decode()
            return f'"{number}"' if self._delimiter in number else number  # the delimiter may be a point or a minus
        return self._text(value if isinstance(value, str) else orjson.dumps(value).decode())

    def _text(self, text: str) -> str:
        return '"' + text.replace('"', '""') + '"'


class TableParquet(_Table):
    """A column for each key, with the type that has room for all its values. A missing value is null."""

    name = "rows in parquet"
    is_text = False

    def _check(self, data: bytes) -> None:
        decode_numbers(data)

    def finish(self, part: Path, file: Path) -> None:
        import pyarrow as pa  # an extra, and slow to import
        import pyarrow.parquet as pq

        schema = pa.schema([])
        for sequences, rows in _blocks(part):
            schema = _unified(schema, sequences, rows)
        _check_names(part, schema.names)
        for field in schema:
            if any(kind.num_fields == 0 for kind in types_in(field.type) if pa.types.is_struct(kind)):
                raise UnwritableError(
                    f"column {field.name!r} has empty objects, which Parquet cannot store; {_INSTEAD}"
                )
        with conversion(part, file) as fresh, pq.ParquetWriter(fresh, schema, compression="zstd") as writer:
            for sequences, rows in _blocks(part):
                columns = [_array(field.name, field.type, sequences, rows) for field in schema]
                writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))


def _check_names(part: Path, names: Collection[str]) -> None:
    if not names and part.stat().st_size:
        raise UnwritableError("the payloads are empty objects, so that there are no columns; export to JSON lines")


def _refused(message: StoredMsg, text: str) -> UnwritableError:
    return UnwritableError(f"message {message.seq} of stream {message.stream!r}: {text}")


def _lines(part: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the sequence and the payload of each line of an unfinished file."""
    with part.open("rb") as lines:
        for line in lines:
            seq, _, payload = line.partition(b"\t")
            yield int(seq), payload


def _blocks(part: Path) -> Iterator[tuple[list[int], list[dict[str, Any]]]]:
    """Yield the sequences and the payloads of about `_BLOCK` rows, or `_BLOCK_BYTES`."""
    sequences, rows, size = list[int](), list[dict[str, Any]](), 0
    for seq, payload in _lines(part):
        sequences.append(seq)
        rows.append(decode_numbers(payload))
        size += len(payload)
        if len(rows) >= _BLOCK or size >= _BLOCK_BYTES:
            yield sequences, rows
            sequences, rows, size = [], [], 0
    if rows:
        yield sequences, rows


def _unified(schema: pa.Schema, sequences: list[int], rows: list[dict[str, Any]]) -> pa.Schema:
    """Return the schema with room for these rows; raise UnwritableError if there is none."""
    import pyarrow as pa

    for name in dict.fromkeys(name for row in rows for name in row):
        found = pa.schema([(name, _array(name, None, sequences, rows).type)])
        try:
            schema = pa.unify_schemas([schema, found], promote_options="permissive")
        except pa.ArrowException as error:
            types = f"{schema.field(name).type} before message {sequences[0]}, {found.field(name).type} from it on"
            raise UnwritableError(f"column {name!r} has values of different types, {types}; {_INSTEAD}") from error
    return schema


def _array(name: str, kind: pa.DataType | None, sequences: list[int], rows: list[dict[str, Any]]) -> Any:
    """Return a column of some rows; raise UnwritableError, which names the first message that does not fit."""
    import pyarrow as pa

    values = [row.get(name) for row in rows]
    try:
        return _converted(values, kind)
    except (pa.ArrowException, OverflowError) as error:
        reason, fits, too_many = error, 0, len(values)
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            try:
                _converted(values[:middle], kind)
                fits = middle
            except (pa.ArrowException, OverflowError) as earlier:
                reason, too_many = earlier, middle
        text = f"message {sequences[fits]}: column {name!r} cannot have its value ({one_line(reason)}); {_INSTEAD}"
        raise UnwritableError(text) from error


def _converted(values: list[Any], kind: pa.DataType | None) -> Any:
    import pyarrow as pa

    array = pa.array(values, kind)
    if _has_bool_as_number(array.type, values):  # pyarrow makes true 1.0
        raise pa.ArrowTypeError("Expected number, got bool")
    return array


def _has_bool_as_number(kind: pa.DataType, values: Iterable[Any]) -> bool:
    import pyarrow as pa

    if pa.types.is_floating(kind):
        return any(isinstance(value, bool) for value in values)
    present = [value for value in values if value is not None]
    if pa.types.is_list(kind):
        return _has_bool_as_number(kind.value_type, chain.from_iterable(present))
    return pa.types.is_struct(kind) and any(
        _has_bool_as_number(field.type, [value.get(field.name) for value in present]) for field in kind
    )
