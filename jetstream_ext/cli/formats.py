"""The file formats of ``export``: CSV, JSON lines and Parquet."""

from __future__ import annotations

import base64
import csv
import importlib.util
import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Final

import click
import orjson

from jetstream_ext.cli.output import text_or_base64
from jetstream_ext.protocol.stored_msg import StoredMsg

FORMATS: Final = ("csv", "jsonl", "parquet")
_SUFFIXES: Final = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet"}
_COLUMNS: Final = ("seq", "time", "subject", "headers", "data", "data_base64")
_ROWS: Final = 10_000


def format_of(path: Path, given: str | None) -> str:
    """Return the given format, or else that of the file's name; raise an error if it is unknown or needs a package."""
    chosen = given or _SUFFIXES.get(path.suffix.lower())
    if chosen is None:
        raise click.ClickException(f"{path}: the name has no known suffix; give --format {'|'.join(FORMATS)}")
    if chosen == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise click.ClickException("Parquet needs pyarrow: pip install pyarrow")
    return chosen


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
            writer.writerow(row | {"headers": orjson.dumps(row["headers"]).decode() if row["headers"] else ""})
        return text.getvalue().encode()


class Parquet(JsonLines):
    """Columns seq, time, subject, headers (JSON) and data (binary).

    A Parquet file cannot be appended to: the unfinished file has JSON lines, and `finish` converts them.
    """

    def finish(self, part: Path, file: Path) -> None:
        import pyarrow as pa  # an extra, and slow to import
        import pyarrow.parquet as pq

        columns: list[Any] = [
            ("seq", pa.uint64()),
            ("time", pa.timestamp("us", tz="UTC")),
            ("subject", pa.string()),
            ("headers", pa.string()),
            ("data", pa.binary()),
        ]
        schema = pa.schema(columns)
        fresh = file.with_name(f"{file.name}.new")
        try:
            with part.open("rb") as lines, pq.ParquetWriter(fresh, schema, compression="zstd") as writer:
                while rows := _take(lines, _ROWS):
                    writer.write_table(_table(pa, schema, rows))
            with fresh.open("rb+") as written:
                os.fsync(written.fileno())  # before the unfinished file is deleted
            fresh.replace(file)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        part.unlink()


WRITERS: Final[dict[str, JsonLines]] = {"csv": Csv(), "jsonl": JsonLines(), "parquet": Parquet()}


def _row(message: StoredMsg) -> dict[str, Any]:
    return {
        "seq": message.seq,
        "time": message.time.isoformat(),
        "subject": message.subject,
        "headers": message.headers,
        **text_or_base64("data", message.data),
    }


def _take(lines: IO[bytes], count: int) -> list[dict[str, Any]]:
    return [orjson.loads(line) for _, line in zip(range(count), lines, strict=False)]


def _table(pa: Any, schema: Any, rows: list[dict[str, Any]]) -> Any:
    from datetime import datetime

    columns = {
        "seq": [row["seq"] for row in rows],
        "time": [datetime.fromisoformat(row["time"]) for row in rows],
        "subject": [row["subject"] for row in rows],
        "headers": [orjson.dumps(row["headers"]).decode() if row["headers"] else None for row in rows],
        "data": [row["data"].encode() if "data" in row else base64.b64decode(row["data_base64"]) for row in rows],
    }
    return pa.table(columns, schema=schema)
