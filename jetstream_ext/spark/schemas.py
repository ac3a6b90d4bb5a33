"""The columns of a format, and schemas that name some of them."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql.types import DataType, StructType


class SchemaError(ValueError):
    """The schema given with ``.schema(...)`` has columns that the format does not have."""


def schema_of(columns: Mapping[str, DataType]) -> StructType:
    """Return the schema with all columns."""
    schema = StructType()
    for name, kind in columns.items():
        schema = schema.add(name, kind)
    return schema


def check_schema(schema: StructType, columns: Mapping[str, DataType]) -> None:
    """Refuse a schema that has other columns, or other types.

    Raises:
        SchemaError: It does.
    """
    declared = ", ".join(f"{name} {kind.simpleString()}" for name, kind in columns.items())
    if not schema.fields or len(set(schema.names)) != len(schema.names):
        raise SchemaError(f"the schema must name some of these columns, each once: {declared}")
    for field in schema.fields:
        kind = columns.get(field.name)
        if kind is None:
            raise SchemaError(f"there is no column {field.name!r}; the format has: {declared}")
        if field.dataType != kind:
            raise SchemaError(
                f"column {field.name!r} is {kind.simpleString()}, not {field.dataType.simpleString()}; "
                "declare it so and cast it in the query"
            )
