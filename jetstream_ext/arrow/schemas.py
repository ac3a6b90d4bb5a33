"""The schemas that a caller can ask for, and errors that name the value that does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import pyarrow as pa
from pyarrow import types

from jetstream_ext.errors import ConversionError
from jetstream_ext.protocol.options import COLUMN_SYNONYMS
from jetstream_ext.text import did_you_mean

Array: TypeAlias = "pa.Array[Any]"
Field: TypeAlias = "pa.Field[Any]"

_BYTES_HEADERS: Final = pa.map_(pa.binary(), pa.list_(pa.binary()))
_ALLOWED: Final = {
    "text": "string, large_string, binary or large_binary",
    "integer": "an integer type",
    "time": "a timestamp with a time zone",
    "headers": "a map from text to lists of text, in their order, both string, large_string, binary or large_binary",
}


def check_schema(schema: pa.Schema, columns: pa.Schema, *, optional: bool = False) -> pa.Schema:
    """Return `schema` if it selects some of `columns`, each with a type that can hold them; raise ValueError otherwise.

    With `optional`, it may select none of them.
    """
    if not isinstance(schema, pa.Schema):
        raise TypeError(f"schema must be a pyarrow.Schema, not {type(schema).__name__}")
    if not schema.names and not optional:
        raise ValueError(f"schema: it has no columns; the columns are {', '.join(columns.names)}")
    for field in schema:
        if field.name not in columns.names:
            raise ValueError(
                f"schema: there is no column {field.name!r}; the columns are {', '.join(columns.names)}"
                f"{did_you_mean(field.name, columns.names, COLUMN_SYNONYMS)}"
            )
        if schema.names.count(field.name) > 1:
            raise ValueError(f"schema: it has the column {field.name!r} twice")
        kind = _kind(columns.field(field.name).type)
        if _kind(field.type) != kind:
            raise ValueError(f"schema: column {field.name!r} cannot be {field.type}; it can be {_ALLOWED[kind]}")
    return schema


def _kind(data_type: pa.DataType) -> str:
    if _is_text(data_type):
        return "text"
    if types.is_integer(data_type):
        return "integer"
    if isinstance(data_type, pa.TimestampType) and data_type.tz is not None:
        return "time"
    if isinstance(data_type, pa.MapType) and not data_type.keys_sorted and _is_text(data_type.key_type):
        values = data_type.item_type
        if isinstance(values, pa.ListType | pa.LargeListType) and _is_text(values.value_type):
            return "headers"
    return ""


def _is_text(data_type: pa.DataType) -> bool:
    """Return whether a column has texts or bytes, in one of the types that are not views."""
    return (
        types.is_string(data_type)
        or types.is_large_string(data_type)
        or types.is_binary(data_type)
        or types.is_large_binary(data_type)
    )


def misfit(field: Field, what: str, error: object) -> ConversionError:
    """Return the error for a value of a column; `what` names the value and its place."""
    text, widest = {
        "text": ("pyarrow.binary()", pa.binary()),
        "integer": ("pyarrow.uint64()", pa.uint64()),
        "time": ("pyarrow.timestamp('ns', tz='UTC')", pa.timestamp("ns", tz="UTC")),
        "headers": ("pyarrow.map_(pyarrow.binary(), pyarrow.list_(pyarrow.binary()))", _BYTES_HEADERS),
    }[_kind(field.type)]
    advice = "" if field.type == widest else f"; {text} can hold it"
    return ConversionError(f"{what} does not fit column {field.name!r}, which is {field.type} ({error}){advice}")


def first_bad(convert: Callable[[int, int], object], count: int) -> tuple[int, Exception]:
    """Return the first of `count` rows that `convert` refuses, and its error; `convert` refused a range of all of them."""
    low, high = 0, count
    while True:
        middle = (low + high) // 2
        try:
            convert(low, high if high - low == 1 else middle)
        except ValueError as error:
            if high - low == 1:
                return low, error
            high = middle
        else:
            assert high - low > 1, "each row is accepted, but not all of them together"
            low = middle
