"""Dead letters as messages.

A dead letter has the payload and the headers of its input, without instructions that were carried out
(`headers.is_instruction`). Other headers on which servers act (``Nats-*``) are kept under `KEPT` and their name, because a
server would act on them again, and so are those of an earlier dead letter. A header that
no client can send (its name or its value has other bytes) is kept percent-encoded under `RAW`. The headers with the input's
origin are behind them.

A stream may refuse a dead letter as too large, because it has more headers than its input. `versions` are smaller ones, which
name what they lack in `CUT`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from urllib.parse import quote, quote_from_bytes

from jetstream_ext.errors import BadHeaderError, ErrorCode, MaxPayloadError, MessageTooLargeError
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.api import parse_time
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.numbers import parse_number
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
LONGEST_ERROR: Final = 1024
"""Bytes of the error, or of a row's subject or key, in a dead letter."""
_SHORT_ERROR: Final = 200  # bytes, in the smallest version
_HEAD: Final = 4096  # bytes of the data, in a smaller version
_ROOM: Final = 512  # bytes that a publication may add to a letter's headers: its place in a batch, expectations


@dataclass(frozen=True, slots=True)
class DeadLetterMessage:
    """A dead letter, and where it comes from.

    Attributes:
        message: The message as it is stored.
        stream: The stream of the input.
        subject: The subject of the input.
        seq: The sequence of the input in its stream.
        time: When the input was stored (aware, UTC).
        attempts: How often it was tried.
        error: The error of the last attempt.
        worker: The worker's name.
        headers: The headers of the input that can be sent again.
        cut: What the letter lacks because its stream had refused it as too large: ``data`` (all but the first 4,096 bytes, or
            everything), ``headers`` or both.
        complete: Whether `data`, the subject and `headers` are all that the input had, so that it can be handed back.
    """

    message: StoredMsg
    stream: str
    subject: str
    seq: int
    time: datetime
    attempts: int
    error: str
    worker: str
    headers: tuple[tuple[str, str], ...]
    cut: tuple[str, ...]
    complete: bool

    @property
    def data(self) -> bytes:
        """The payload of the input, or what the letter has of it (see `cut`)."""
        return self.message.data


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
        try:
            h.check_header(text, content)
            # A client strips blanks that the server does not.
            is_kept = content == content.strip() and (text.encode(), content.encode()) == (name, value)
        except BadHeaderError:
            is_kept = False
        if not is_kept:
            pairs.append((RAW, f"{quote_from_bytes(name, safe='')}={quote_from_bytes(value, safe='')}"))
        elif h.is_reserved(text) or text.lower().startswith(_OWN):
            pairs.append((KEPT + text, content))
        else:
            pairs.append((text, content))
    return pairs


def letter_versions(
    message: StoredMsg, *, attempts: int, error: str, worker: str
) -> Iterator[tuple[bytes, dict[str, str]]]:
    """Yield the payload and headers of the dead letter for an input, and then smaller ones; see `versions`."""
    kept = kept_headers(
        pair for pair in message.raw_headers if not h.is_instruction(pair[0].decode("utf-8", "replace"))
    )
    about = [
        (STREAM, message.stream),
        (SUBJECT, message.subject.replace("\0", "\ufffd")),
        (SEQUENCE, str(message.seq)),
        (TIME, h.format_time_ns(message.time_ns)),
        (ATTEMPTS, str(attempts)),
        (ERROR, one_line(error, LONGEST_ERROR)),
        (WORKER, worker),
    ]
    if message.subject != message.subject.strip():
        about.append((RAW_SUBJECT, quote(message.subject, safe="")))
    yield from versions(message.data, kept, about)


def versions(
    data: bytes, kept: Sequence[tuple[str, str]], about: Sequence[tuple[str, str]]
) -> Iterator[tuple[bytes, dict[str, str]]]:
    """Yield the payload and headers of a dead letter, and then smaller ones, each for a stream that refuses the one before.

    The first one has all of the data and the `kept` headers of the input, unless servers store no message with so many. The
    last one has neither, and only the beginning of the error. All have the headers `about` the input.
    """
    size = len(data)
    fitting = list(kept) if _fit([*kept, *about]) else []
    short = [(name, one_line(value, _SHORT_ERROR) if name == ERROR else value) for name, value in about]
    choices = [(fitting, length, list(about)) for length in (size, min(size, _HEAD), 0)]
    choices += [([], 0, list(about)), ([], 0, short)]
    for index, (pairs, length, origin_pairs) in enumerate(choices):
        if choices[index] not in choices[:index]:
            lost = [name for name, is_cut in (("data", length < size), ("headers", pairs != list(kept))) if is_cut]
            yield data[:length], own_headers([*pairs, *origin_pairs, *([(CUT, ", ".join(lost))] if lost else ())])


def is_too_large(error: Exception) -> bool:
    """Return whether a message was refused because of its size, so that a smaller version may be stored."""
    codes = ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.HEADERS_TOO_LARGE
    known = MaxPayloadError | BadHeaderError | MessageTooLargeError
    return isinstance(error, known) or getattr(error, "err_code", None) in codes


def dead_letter_of(message: StoredMsg) -> DeadLetterMessage | None:
    """Return a message as a dead letter, or None if it is none."""
    known: dict[str, str] = {}
    headers: list[tuple[str, str]] = []
    cut: tuple[str, ...] = ()
    complete = True
    for name, value in message.header_pairs:
        if name in _ORIGIN:
            known[name] = value
        elif name == CUT:
            cut = tuple(value.split(", "))
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
        time = parse_time(known[TIME])
    except (ValueError, OverflowError):
        return None
    return DeadLetterMessage(
        message,
        stream=known[STREAM],
        subject=known[SUBJECT],
        seq=seq,
        time=time,
        attempts=attempts,
        error=known[ERROR],
        worker=known[WORKER],
        headers=tuple(headers),
        cut=cut,
        complete=complete and not cut and "\ufffd" not in known[SUBJECT],
    )


def _fit(pairs: Sequence[tuple[str, str]]) -> bool:
    """Return whether servers store a message with these headers, and those that its publication may add."""
    return sum(len(f"{name}: {value}\r\n".encode()) for name, value in pairs) + _ROOM <= h.MAX_BLOCK
