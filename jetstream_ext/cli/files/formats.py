"""Formats and compressions of files, by the suffixes of their names."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import click

if sys.platform != "win32":
    import fcntl

STDIO: Final = Path("-")  # stdin or stdout
FORMATS: Final = ("csv", "jsonl", "parquet")
_SUFFIXES: Final = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet"}
_TABS: Final = (".tsv", ".tab")
_COMPRESSIONS: Final = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_BLOCK: Final = 1 << 20


def check_open(stream: IO[str] | None, name: str) -> None:
    """Raise ClickException if the shell closed stdin or stdout; Python then has None for it."""
    if stream is None:
        raise click.ClickException(f"{name} is closed")


def compression_of(path: Path) -> str:
    """Return ``"gzip"``, ``"zstd"`` or an empty text, by the end of the file's name."""
    return _COMPRESSIONS.get(path.suffix.lower(), "")


def _inner_suffix(path: Path) -> str:
    return (Path(path.stem) if compression_of(path) else path).suffix.lower()


def format_of(path: Path, given: str | None) -> str:
    """Return the given format, or else that of the file's name; raise an error if it is unknown or needs a package."""
    suffix, compression = _inner_suffix(path), compression_of(path)
    chosen = given or ("csv" if suffix in _TABS else _SUFFIXES.get(suffix))
    if chosen is None and path == STDIO:
        raise click.UsageError(f"- needs --format {'|'.join(FORMATS)}")
    if chosen is None:
        raise click.ClickException(f"{path}: the name has no known suffix; give --format {'|'.join(FORMATS)}")
    if chosen == "parquet" and compression:
        raise click.ClickException(f"{path}: Parquet files are compressed inside; leave out {path.suffix}")
    _need_pyarrow("Parquet" if chosen == "parquet" else "zstd" if compression == "zstd" else "")
    return chosen


def _need_pyarrow(what: str) -> None:
    if what and importlib.util.find_spec("pyarrow") is None:
        raise click.ClickException(f"{what} needs pyarrow: pip install 'nats-jetstream-ext[arrow]'")


def delimiter_of(path: Path, given: str | None, form: str) -> str:
    """Return the character between the fields of a CSV file: the given one, or a tab by the file's name, or a comma."""
    if given is None:
        return "\t" if _inner_suffix(path) in _TABS else ","
    if form != "csv":
        raise click.UsageError(f"--delimiter is for CSV, not for {form}")
    chosen = "\t" if given.lower() in ("tab", "\\t") else given
    if len(chosen) != 1 or chosen in '"\r\n_' or chosen.isalnum() or not chosen.isascii():
        raise click.UsageError(f"--delimiter is 'tab' or one ASCII character, no letter, digit or quote, not {given!r}")
    return chosen


@contextmanager
def open_compressed(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a file; yield it as it is on the disk, and as what it contains."""
    compression = compression_of(path)
    with path.open("rb") as raw:
        if compression == "gzip":
            unpacked: Any = gzip.GzipFile(fileobj=raw)  # it lacks some methods of IO
            with unpacked:
                yield raw, unpacked
        elif compression == "zstd":
            import pyarrow as pa  # an extra, and slow to import

            stream: Any = pa.CompressedInputStream(pa.PythonFile(raw), "zstd")
            with io.BufferedReader(stream) as lines:
                yield raw, lines
        else:
            yield raw, raw


@contextmanager
def exclusive(path: Path) -> Iterator[bool]:
    """Keep other exports from an unfinished file, which is created if it is missing; yield whether it was there.

    Raises ClickException if another export has the file.
    """
    if sys.platform == "win32":  # which has no such locks, and renames no file that is open
        yield path.exists()
        return
    while True:
        descriptor, existed = _opened(path)
        try:
            if not _locked(descriptor):
                raise click.ClickException(f"another export writes {path}; wait for it, or export to another file")
            if _is_at(descriptor, path):  # else another export has just finished with it
                yield existed
                return
        finally:
            os.close(descriptor)


def _opened(path: Path) -> tuple[int, bool]:
    while True:
        with contextlib.suppress(FileExistsError):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), False
        with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile, and is no link to a missing file
            return os.open(path, os.O_RDWR | os.O_NOFOLLOW), True


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # some network file systems have no locks
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def converted(file: Path) -> Path:
    """Return the path for what `file` is replaced by."""
    return file.with_name(f"{file.name}.new")


@contextmanager
def conversion(part: Path, file: Path) -> Iterator[Path]:
    """Yield the path for what the unfinished file `part` is converted to; then replace `file` by it and remove `part`."""
    fresh = converted(file)
    try:
        yield fresh
        with fresh.open("rb+") as written:
            os.fsync(written.fileno())  # before the unfinished file is deleted
        fresh.replace(file)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    part.unlink()


def compress(part: Path, file: Path) -> None:
    """Write the content of `part` to `file`, compressed by its name; then remove `part`."""
    if not compression_of(file):
        part.replace(file)
        return
    with conversion(part, file) as fresh, part.open("rb") as content, compressed(fresh, file) as target:
        while some := content.read(_BLOCK):
            target.write(some)


@contextmanager
def compressed(path: Path, file: Path) -> Iterator[IO[bytes]]:
    """Open `path` for writing; what is written is compressed as the name of `file` says."""
    compression = compression_of(file)
    target: Any
    with path.open("wb") as raw:
        if compression == "gzip":
            target = gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0)
        elif compression == "zstd":
            import pyarrow as pa  # an extra, and slow to import

            target = io.BufferedWriter(pa.CompressedOutputStream(pa.PythonFile(raw), "zstd"))
        else:
            target = raw
        with target:
            yield target
