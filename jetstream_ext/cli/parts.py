"""The unfinished file of an export: ``FILE.part``, and ``FILE.part.json`` that says how far it is."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

import click
import nats.errors
import orjson

from jetstream_ext.cli.formats import Writer
from jetstream_ext.types import StoredMsg

_BLOCK: Final = 1_000
_SYNC_BYTES: Final = 8 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """How far an export is: what its journal says.

    Attributes:
        stream: What is exported,
        created: and when that was created: another stream of the same name is another stream.
        subject: The filter, empty for none.
        first: Where it began.
        end: The last sequence that belongs to it.
        format: The file's format.
        seq: The last sequence that is in the file (0: none).
        messages: How many messages that are.
        size: How many bytes that are.
    """

    stream: str
    created: str
    subject: str
    first: int
    end: int
    format: str
    seq: int = 0
    messages: int = 0
    size: int = 0

    def same_export(self, other: Progress) -> bool:
        """Whether both are of one export."""
        return all(
            getattr(self, name) == getattr(other, name) for name in ("stream", "created", "subject", "first", "format")
        )


class Part:
    """The unfinished file, open to be appended to.

    What the journal says is on the disk, whatever happens; anything after it is cut off when the export goes on.
    """

    def __init__(self, file: Path, writer: Writer, begin: Progress, *, resume: bool) -> None:
        self.file = file
        self.path: Path = file.with_name(f"{file.name}.part")
        self.journal: Path = file.with_name(f"{file.name}.part.json")
        self.progress: Progress = self._found(begin) if resume else begin
        self._writer = writer
        self._waiting: list[StoredMsg] = []
        self._written = self.progress
        self._stream: IO[bytes] | None = None

    def _found(self, begin: Progress) -> Progress:
        try:
            found = Progress(**orjson.loads(self.journal.read_bytes()))
        except FileNotFoundError:
            return begin
        except (orjson.JSONDecodeError, TypeError) as error:
            raise click.ClickException(f"{self.journal} is not what it should be; start without --resume") from error
        if not found.same_export(begin):
            raise click.ClickException(
                f"{self.path} is of another export (stream, subject, start or format differ); start without --resume"
            )
        if not self.path.is_file() or self.path.stat().st_size < found.size:
            raise click.ClickException(f"{self.path} is shorter than its journal says; start without --resume")
        return found

    def __enter__(self) -> Self:
        if self.progress.size:
            self._stream = self.path.open("r+b")
            self._stream.truncate(self.progress.size)
            self._stream.seek(self.progress.size)
        else:
            self._stream = self.path.open("wb")
            self._append(self._writer.head(), self.progress)
            self.save()
        return self

    @property
    def begun(self) -> bool:
        """Whether a message was written, safely on the disk or not."""
        return self._written.seq > 0

    def add(self, message: StoredMsg) -> None:
        """Append a message."""
        self._waiting.append(message)
        if len(self._waiting) >= _BLOCK:
            self._flush()
            if self._written.size - self.progress.size >= _SYNC_BYTES:
                self.save()

    def save(self) -> None:
        """Bring to the disk what was added, and then note that it is there."""
        assert self._stream is not None
        self._flush()
        self._stream.flush()
        os.fsync(self._stream.fileno())
        fresh = self.journal.with_name(f"{self.journal.name}.new")
        fresh.write_bytes(orjson.dumps(dataclasses.asdict(self._written)))
        fresh.replace(self.journal)
        self.progress = self._written

    def finish(self) -> None:
        """Make the finished file of it, once it is complete and closed."""
        self._writer.finish(self.path, self.file)
        self.journal.unlink(missing_ok=True)

    def _flush(self) -> None:
        messages, self._waiting = self._waiting, []
        if messages:
            done = dataclasses.replace(
                self._written, seq=messages[-1].seq, messages=self._written.messages + len(messages)
            )
            self._append(self._writer.rows(messages), done)

    def _append(self, data: bytes, done: Progress) -> None:
        assert self._stream is not None
        self._stream.write(data)
        self._written = dataclasses.replace(done, size=done.size + len(data))

    def _close(self) -> None:
        if self._stream is not None:
            stream, self._stream = self._stream, None
            stream.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is None:
            return
        try:
            # A full disk would only be met again; but a timeout of nats-py is an OSError, too.
            if not isinstance(error, OSError) or isinstance(error, nats.errors.Error):
                self.save()
        finally:
            try:
                self._close()
            except OSError:
                if error is None:
                    raise


def remove(file: Path) -> None:
    """Remove what an unfinished export left."""
    for path in (file.with_name(f"{file.name}.part"), file.with_name(f"{file.name}.part.json")):
        path.unlink(missing_ok=True)


def as_json(progress: Progress, file: Path, *, seconds: float) -> dict[str, Any]:
    """Return the result of an export for scripts."""
    return {
        "file": str(file),
        "stream": progress.stream,
        "messages": progress.messages,
        "last_seq": progress.seq,
        "end": progress.end,
        "bytes": file.stat().st_size,
        "seconds": round(seconds, 3),
    }
