"""Dead letters as messages, and what a worker's record says about the input at its position.

A dead letter has the payload and the headers of its input, without instructions that were carried out
(`headers.is_instruction`). Other headers on which servers act (``Nats-*``) are kept under `KEPT` and their name, because a
server would act on them again, and so are those of an earlier dead letter. A header that
no client can send (its name or its value has other bytes) is kept percent-encoded under `RAW`. The headers with the input's
origin are behind them.

The record of a worker with dead letters has two more fields. ``careful`` is how many inputs from its position on the worker
may have in its hands: if the worker dies, the next one handles so many of them one at a time, and stores each attempt before
it begins. ``failed`` is the input at the position with the attempts to handle it, and the error of the last one: an empty
error means that it has begun, and has not ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import quote, quote_from_bytes, unquote_to_bytes

import orjson

from jetstream_ext.errors import BadHeaderError, ResponseError
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.numbers import json_number, json_text, parse_number
from jetstream_ext.text import printable
from jetstream_ext.types import own_headers

STREAM: Final = "Dead-Letter-Stream"
SUBJECT: Final = "Dead-Letter-Subject"
SEQUENCE: Final = "Dead-Letter-Sequence"
TIME: Final = "Dead-Letter-Time"
ATTEMPTS: Final = "Dead-Letter-Attempts"
ERROR: Final = "Dead-Letter-Error"
WORKER: Final = "Dead-Letter-Worker"
KEPT: Final = "Dead-Letter-Header-"
"""The prefix of a header of the input that has another meaning in the dead letter."""
RAW: Final = "Dead-Letter-Raw-Header"
"""A header of the input that no client can send, as ``name=value``, both percent-encoded."""
RAW_SUBJECT: Final = "Dead-Letter-Raw-Subject"
"""The percent-encoded subject of the input, if it begins or ends with a blank that a header cannot have there. In the dead
letter of a row: the subject or key, if it has any character that a header cannot have."""
# Of the dead letters of Spark's sinks, beside `ERROR`, `SUBJECT` and `WORKER`.
KEY: Final = "Dead-Letter-Key"
TARGET: Final = "Dead-Letter-Target"
BATCH: Final = "Dead-Letter-Batch"
PARTITION: Final = "Dead-Letter-Partition"
ROW: Final = "Dead-Letter-Row"
CUT: Final = "Dead-Letter-Cut"
"""What the dead letter lacks because it would have been too large: ``data``, ``headers`` or both."""

_OWN: Final = "dead-letter-"
_ORIGIN: Final = frozenset({STREAM, SUBJECT, SEQUENCE, TIME, ATTEMPTS, ERROR, WORKER})
_LONGEST_ERROR: Final = 1024  # bytes, in a dead letter
_LONGEST_NOTE: Final = 200  # bytes, in a record
_MOST: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class Failed:
    """The input at a worker's position, and how often it was tried. Without an `error`, the last attempt has not ended."""

    seq: int
    attempts: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a dead letter comes from and why; the headers are those of the input that can be sent again.

    Attributes:
        complete: Whether the subject and `headers` are all that the input had.
    """

    stream: str
    subject: str
    seq: int
    time_ns: int
    attempts: int
    error: str
    worker: str
    headers: tuple[tuple[str, str], ...]
    complete: bool


def describe(error: BaseException) -> str:
    """Return the type and text of an error on one line."""
    name = type(error).__qualname__
    try:
        text = str.__str__(str(error))  # a str of another class may raise an error later
    except Exception:
        text = "(its text cannot be made)"
    return f"{name}: {text}" if text else name


def one_line(text: str, size: int) -> str:
    """Return printable text of one line and `size` bytes at most, as a header and a record take it."""
    text = printable(" ".join(text[: 2 * size].split()))
    encoded = text.encode()
    return text if len(encoded) <= size else encoded[: size - 3].decode("utf-8", "ignore") + "\u2026"


def kept_headers(raw: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Return the headers of an input, given in bytes, as its dead letter has them; see the module."""
    pairs: list[tuple[str, str]] = []
    for name, value in raw:
        text, content = name.decode("utf-8", "replace"), value.decode("utf-8", "replace")
        # A client strips blanks that the server does not.
        changed = content != content.strip() or (text.encode(), content.encode()) != (name, value)
        if changed or not _can_be_sent(text, content):
            pairs.append((RAW, f"{quote_from_bytes(name, safe='')}={quote_from_bytes(value, safe='')}"))
        elif h.is_reserved(text) or text.lower().startswith(_OWN):
            pairs.append((KEPT + text, content))
        else:
            pairs.append((text, content))
    return pairs


def letter_headers(message: StoredMsg, *, attempts: int, error: str, worker: str) -> dict[str, str]:
    """Return the headers of the dead letter for an input."""
    pairs = kept_headers(
        pair for pair in message.raw_headers if not h.is_instruction(pair[0].decode("utf-8", "replace"))
    )
    if message.subject != message.subject.strip():
        pairs.append((RAW_SUBJECT, quote(message.subject, safe="")))
    pairs += [
        (STREAM, message.stream),
        (SUBJECT, message.subject.replace("\0", "\ufffd")),
        (SEQUENCE, str(message.seq)),
        (TIME, h.format_time_ns(message.time_ns)),
        (ATTEMPTS, str(attempts)),
        (ERROR, one_line(error, _LONGEST_ERROR)),
        (WORKER, worker),
    ]
    return own_headers(pairs)


def letter_versions(
    message: StoredMsg, *, attempts: int, error: str, worker: str
) -> Iterator[tuple[bytes, dict[str, str]]]:
    """Yield the payload and headers of the dead letter for an input, and then smaller ones, for a stream that refuses it."""
    yield message.data, letter_headers(message, attempts=attempts, error=error, worker=worker)


def origin(message: StoredMsg) -> Origin | None:
    """Return where a dead letter comes from, or None if the message is no dead letter."""
    known: dict[str, str] = {}
    headers: list[tuple[str, str]] = []
    complete = True
    for name, value in message.header_pairs:
        if name in _ORIGIN:
            known[name] = value
        elif name.startswith(KEPT):
            headers.append((name.removeprefix(KEPT), value))
        elif name in (RAW, RAW_SUBJECT):
            complete = False
        elif not h.is_reserved(name):  # the server's own, such as the batch's
            headers.append((name, value))
    seq, attempts = (parse_number(known.get(name, "")) for name in (SEQUENCE, ATTEMPTS))
    if known.keys() != _ORIGIN or not seq or attempts is None or not known[STREAM] or not known[SUBJECT]:
        return None
    try:
        time_ns = h.parse_time_ns(known[TIME].encode())
    except ResponseError:
        return None
    return Origin(
        stream=known[STREAM],
        subject=known[SUBJECT],
        seq=seq,
        time_ns=time_ns,
        attempts=attempts,
        error=known[ERROR],
        worker=known[WORKER],
        headers=tuple(headers),
        complete=complete and "\ufffd" not in known[SUBJECT],
    )


def raw_headers(message: StoredMsg) -> list[tuple[bytes, bytes]]:
    """Return the input's headers that no client can send."""
    halves = (value.partition("=") for name, value in message.header_pairs if name == RAW)
    return [(unquote_to_bytes(name), unquote_to_bytes(value)) for name, _, value in halves]


def sendable_headers(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return an input's headers as it is handed back; that publish has a message id of its own."""
    return own_headers([(name, value) for name, value in pairs if name != h.MSG_ID and not h.is_instruction(name)])


@dataclass(frozen=True, slots=True)
class Attempts:
    """How a worker with dead letters goes on: a value for each record, which says the same to the worker after it.

    Attributes:
        limit: Attempts after which an input becomes a dead letter.
        group: Inputs in one commit at most.
        alone: The next inputs that are handled one at a time.
        careful: Those of them whose attempts are stored before they begin.
        failed: The next input, if it was tried.
        begun: The last attempt of `failed` is one of this start, and is stored; `before` is `failed` without it.
        ended: The worker has ended by itself, so that it has nothing in its hands.
    """

    limit: int
    group: int
    alone: int = 0
    careful: int = 0
    failed: Failed | None = None
    begun: bool = False
    before: Failed | None = None
    ended: bool = False

    def claimed(self, record: bytes | None, *, alive: bool = False) -> Attempts:
        """Continue behind the record of another start; its worker is `alive`, or may have died."""
        if record is None:
            return Attempts(self.limit, self.group)
        failed, careful = read_record(record)
        if alive and failed is not None and not failed.error:  # the attempt has not killed its worker
            failed = replace(failed, attempts=failed.attempts - 1) if failed.attempts > 1 else None
        careful = self.group if careful is None else careful
        return Attempts(self.limit, self.group, alone=careful, careful=careful, failed=failed)

    def at(self, seq: int) -> Attempts:
        """The next input has the sequence `seq`: one that was tried and has another one is no longer stored."""
        if self.failed is None or self.failed.seq == seq:
            return self
        return replace(self, failed=None, begun=False, before=None)

    @property
    def worker_died(self) -> bool:
        """Whether the worker ended in each attempt that is left for the next input, or in the last one."""
        failed = self.failed
        return failed is not None and not failed.error and not self.begun and failed.attempts >= self.limit

    @property
    def exhausted(self) -> bool:
        return self.failed is not None and self.failed.attempts >= self.limit

    def next_group(self, available: int) -> int:
        """Return how many inputs are handled next."""
        return 1 if self.alone or self.failed is not None else available

    def begin(self, seq: int) -> Attempts:
        """An attempt to handle the next input is about to begin."""
        attempts = self.failed.attempts if self.failed is not None else 0
        return replace(self, failed=Failed(seq, attempts + 1), begun=True, before=self.failed)

    def fail(self, seq: int, error: str) -> Attempts:
        """The attempt to handle the next input has failed."""
        attempts = self.failed.attempts if self.failed is not None else 0
        return replace(self, failed=Failed(seq, attempts + (not self.begun), error), begun=False, before=None)

    def split(self, inputs: int) -> Attempts:
        """A call of the handler with the next `inputs` inputs has failed: it gets one at a time."""
        return replace(self, alone=max(self.alone, inputs))

    def done(self, inputs: int) -> Attempts:
        """The next `inputs` inputs are handled, or are dead letters."""
        left, careful = max(0, self.alone - inputs), max(0, self.careful - inputs)
        return replace(self, alone=left, careful=careful, failed=None, begun=False, before=None)

    def end(self) -> Attempts:
        """The worker ends by itself: an attempt that it has begun does not count."""
        failed = self.before if self.begun else self.failed
        return replace(self, failed=failed, begun=False, before=None, ended=True)

    def fields(self) -> dict[str, Any]:
        """Return the fields of the worker's record; see the module."""
        fields: dict[str, Any] = {"careful": self.careful if self.ended else self.careful or self.group}
        if (failed := self.failed) is not None:
            error = one_line(failed.error, _LONGEST_NOTE)
            fields["failed"] = {"seq": failed.seq, "attempts": failed.attempts, "error": error}
        return fields


def read_record(data: bytes) -> tuple[Failed | None, int | None]:
    """Return ``failed`` and ``careful`` of a record; None for one that it lacks, or that another program has written."""
    failed: Failed | None = None
    careful: int | None = None
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None, None
    if not isinstance(body, Mapping):
        return None, None
    try:
        careful = json_number(body.get("careful"), "careful", high=_MOST)
    except ValueError:
        careful = None
    try:
        found = body.get("failed")
        if isinstance(found, Mapping):
            failed = Failed(
                json_number(found.get("seq"), "seq", low=1),
                json_number(found.get("attempts"), "attempts", low=1, high=_MOST),
                one_line(json_text(found.get("error"), "error"), _LONGEST_NOTE),
            )
    except ValueError:
        failed = None
    return failed, careful


def _can_be_sent(name: str, value: str) -> bool:
    try:
        h.check_header(name, value)
    except BadHeaderError:
        return False
    return True
