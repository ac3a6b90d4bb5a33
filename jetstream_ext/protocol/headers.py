"""Message headers on the wire: a status line, then ``Name: value`` lines, then an empty line.

A direct-get reply has the stored headers first and the server's own after them. So of two lines with one name the
*last* is the server's: a publisher that stores ``Nats-Sequence: 77`` must not mislead a reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

from jetstream_ext.errors import BadHeaderError, ResponseError
from jetstream_ext.protocol.numbers import parse_number

VERSION: Final = b"NATS/1.0"
CRLF: Final = b"\r\n"

STREAM: Final = "Nats-Stream"
SUBJECT: Final = "Nats-Subject"
SEQUENCE: Final = "Nats-Sequence"
TIME_STAMP: Final = "Nats-Time-Stamp"
NUM_PENDING: Final = "Nats-Num-Pending"
LAST_SEQUENCE: Final = "Nats-Last-Sequence"
UP_TO_SEQUENCE: Final = "Nats-UpTo-Sequence"

_APPENDED: Final = (STREAM, SUBJECT, SEQUENCE, TIME_STAMP, NUM_PENDING, LAST_SEQUENCE)
# What a server adds to a direct-get reply; never part of a stored message's headers.
REPLY_HEADERS: Final = frozenset({*_APPENDED, UP_TO_SEQUENCE})
_REPLY_NAMES: Final = frozenset(name.encode() for name in REPLY_HEADERS)

_RESERVED: Final = "Nats-"

MSG_ID: Final = "Nats-Msg-Id"
MSG_TTL: Final = "Nats-TTL"
INCREMENT: Final = "Nats-Incr"
EXPECTED_STREAM: Final = "Nats-Expected-Stream"
EXPECTED_LAST_SEQ: Final = "Nats-Expected-Last-Sequence"
EXPECTED_LAST_SUBJECT_SEQ: Final = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_LAST_SUBJECT: Final = "Nats-Expected-Last-Subject-Sequence-Subject"
EXPECTED_LAST_MSG_ID: Final = "Nats-Expected-Last-Msg-Id"
BATCH_ID: Final = "Nats-Batch-Id"
BATCH_SEQUENCE: Final = "Nats-Batch-Sequence"
BATCH_COMMIT: Final = "Nats-Batch-Commit"

MAX_BLOCK: Final = 65_535
"""How many bytes of headers servers store with a message (10097 beyond that)."""

# RFC 9110 token characters: what nats-py and the server accept in a header name.
_NAME_CHARS: Final = frozenset("!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")


Row = list[bytes]
"""The header lines of a message in a direct-get reply, by the `ROW_*` places. The subject is there without its header's
name, and the stored headers are one block without the server's lines, or nothing."""
ROW_SUBJECT, ROW_SEQUENCE, ROW_TIME, ROW_PENDING, ROW_LAST, ROW_STREAM, ROW_STORED = range(7)


def reply_row(block: bytes) -> Row:
    """Cut up the header block of a message in a batched direct-get reply; return an empty row for any other block.

    Servers append exactly these six lines, in this order, to the stored headers.
    """
    lines = block.rsplit(CRLF, 8)
    if (
        len(lines) != 9
        or lines[1][:13] != b"Nats-Stream: "
        or lines[2][:14] != b"Nats-Subject: "
        or lines[3][:15] != b"Nats-Sequence: "
        or lines[4][:17] != b"Nats-Time-Stamp: "
        or lines[5][:18] != b"Nats-Num-Pending: "
        or lines[6][:20] != b"Nats-Last-Sequence: "
    ):
        return []
    stored = lines[0] if len(lines[0]) > len(VERSION) else b""
    return [lines[2][14:], lines[3], lines[4], lines[5], lines[6], lines[1], stored]


def checked_row(block: bytes) -> Row:
    """Return `reply_row` of a block that must be a message's; raise ResponseError if it is not."""
    row = reply_row(block)
    if not row:
        raise ResponseError("a message in a direct-get reply lacks a header that the server adds", frame=block)
    return row


def lay_out(block: bytes, values: Mapping[str, str]) -> bytes:
    """Return the header block of a reply in the layout that `reply_row` takes, whatever the server's order was.

    `values` are the last values of its names. Raises ResponseError if a line that servers append is missing.
    """
    lines = block.split(CRLF)[1:]
    stored = [line for line in lines if line and line.partition(b":")[0].strip() not in _REPLY_NAMES]
    try:
        appended = [f"{name}: {values[name]}".encode() for name in _APPENDED]
    except KeyError as missing:
        raise ResponseError(f"a direct-get reply lacks the header {missing}", frame=block) from None
    return CRLF.join([VERSION, *stored, *appended, b"", b""])


def message_block(stored: Mapping[str, str], appended: Iterable[object]) -> bytes:
    """Return the header block of a message in a batched reply: its stored headers, and the values that servers append."""
    lines = [*stored.items(), *zip(_APPENDED, appended, strict=True)]
    return CRLF.join([VERSION, *(f"{name}: {value}".encode() for name, value in lines), b"", b""])


def check_header(name: str, value: str) -> None:
    """Raise BadHeaderError for a header that could end its line early or that the server would drop."""
    if not isinstance(name, str) or not isinstance(value, str):
        raise TypeError(
            f"header {name!r}: name and value must be str, not {type(name).__name__}, {type(value).__name__}"
        )
    if not name or not _NAME_CHARS.issuperset(name):
        raise BadHeaderError(f"header name {name!r} is empty or has characters that are not allowed in a header name")
    if "\r" in value or "\n" in value or "\0" in value:
        raise BadHeaderError(f"the value of header {name!r} has a line break or a NUL character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _not_unicode(name) from None


def _not_unicode(name: str) -> BadHeaderError:
    return BadHeaderError(
        f"the value of header {name!r} has half of a surrogate pair, which UTF-8 cannot encode; nothing was sent"
    )


def check_block(size: int) -> None:
    """Raise BadHeaderError if servers do not store a header block of `size` bytes."""
    if size > MAX_BLOCK:
        raise BadHeaderError(f"the headers have {size} bytes; servers store at most {MAX_BLOCK} with a message")


_known_names: dict[str, str] = {}
_KNOWN_LIMIT: Final = 1024
_BLANK_ID: Final = f"\r\n{MSG_ID}: \r\n"


def encode(items: Iterable[tuple[str, str]]) -> bytes:
    """Encode a header block; every pair and the size are checked.

    Blanks around a value are left out, as nats-py does: otherwise a message id would depend on the client. A blank
    message id is refused: servers ignore it.
    """
    text = "NATS/1.0\r\n"
    for name, value in items:
        # Bulks have few names and millions of values: a name is checked once.
        start = _known_names.get(name)
        if start is None or type(value) is not str or "\r" in value or "\n" in value or "\0" in value:
            check_header(name, value)
            if len(_known_names) >= _KNOWN_LIMIT:
                _known_names.clear()
            start = _known_names[name] = f"{name}: "
        text += f"{start}{value.strip()}\r\n"
    if _BLANK_ID in text:
        raise BadHeaderError(
            f"a message id ({MSG_ID}) is blank; servers ignore it, so that they would store duplicates"
        )
    try:
        block = (text + "\r\n").encode()
    except UnicodeEncodeError as error:
        # Names are ASCII, and a value has no line break, so the name is at the start of the line.
        raise _not_unicode(text[: error.start].rpartition("\r\n")[2].partition(":")[0]) from None
    check_block(len(block))
    return block


def rebuild(headers: Mapping[str, str] | None) -> bytes:
    """Return the bytes that nats-py parsed into `headers`, as nearly as they can be known."""
    if not headers:
        return b""
    lines = dict(headers)
    first = VERSION
    if SEQUENCE not in lines and "Status" in lines:
        # If there are both a status line and headers, nats-py leaves the headers in the description as well.
        text = lines.pop("Description", "").split("\n")[0].strip()
        first += f" {lines.pop('Status')} {text}".rstrip().encode()
    return CRLF.join([first, *(f"{name}: {value}".encode() for name, value in lines.items()), b"", b""])


def parse_status(block: bytes) -> tuple[int, str] | None:
    """Return the inline status ``(code, text)``, or None; raise ResponseError if `block` is not a header block."""
    line = block.partition(CRLF)[0]
    if not line.startswith(VERSION):
        raise ResponseError("a header block does not begin with NATS/1.0", frame=block)
    code, _, text = line[len(VERSION) :].strip().partition(b" ")
    if not code:
        return None
    number = parse_number(code, 999)
    if number is None:
        raise ResponseError("a header block has a status that is not a number from 0 to 999", frame=block)
    return number, text.decode("utf-8", "replace")


def parse_lines(block: bytes) -> list[tuple[str, str]]:
    """Return the ``(name, value)`` pairs of a header block in order; lines without a colon are skipped."""
    pairs: list[tuple[str, str]] = []
    for line in block.split(CRLF)[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            pairs.append((name.strip().decode("utf-8", "replace"), value.strip().decode("utf-8", "replace")))
    return pairs


def line_value(line: bytes) -> bytes:
    return line.partition(b": ")[2]


def line_number(line: bytes) -> int:
    return count(line_value(line))


def count(value: bytes) -> int:
    """Return a sequence or a count that a server sent; raise ResponseError if it is not from 0 to 2**64-1."""
    number = parse_number(value)
    if number is None:
        raise ResponseError("a header that the server adds is not a number from 0 to 2**64-1", frame=value)
    return number


def is_reserved(name: str) -> bool:
    """Return whether a header is an instruction to the server, or what the server notes about a message.

    Servers compare names case-sensitively: to them, ``nats-rollup`` is a header like any other.
    """
    return name.startswith(_RESERVED)


def stored_pairs(block: bytes) -> list[tuple[str, str]]:
    """Return a stored message's own headers in order: the block's, without what the server adds to a reply."""
    return [(name, value) for name, value in parse_lines(block) if name not in REPLY_HEADERS]


def decode_stored(block: bytes) -> dict[str, str]:
    """Return `stored_pairs` as a mapping, with the last value of each name."""
    return dict(stored_pairs(block))


def to_utc(text: str) -> bytes:
    """Return an RFC 3339 time with any offset in UTC, fraction digits kept; raise ValueError or OverflowError for others."""
    if text.endswith("Z"):
        return text.encode()
    # STREAM.MSG.GET answers in the zone that the server runs in.
    sign = max(text.rfind("+"), text.rfind("-"))
    seconds, _, fraction = text[:sign].partition(".")
    local = datetime.fromisoformat(seconds + text[sign:])
    if local.tzinfo is None:
        raise ValueError(f"the time {text[:64]!r} has no offset from UTC")
    when = local.astimezone(UTC).replace(tzinfo=None)
    return f"{when.isoformat()}{'.' if fraction else ''}{fraction}Z".encode()


def format_time_ns(time_ns: int) -> str:
    """Return an RFC 3339 time in UTC of nanoseconds since the epoch."""
    seconds, fraction = divmod(time_ns, 1_000_000_000)
    when = datetime(1970, 1, 1) + timedelta(seconds=seconds)  # noqa: DTZ001 - in UTC
    return f"{when.isoformat()}.{fraction:09d}Z"


def parse_time_ns(value: bytes) -> int:
    """Return the nanoseconds since the epoch of an RFC 3339 time in UTC, or raise ResponseError.

    The time has 0 to 9 fraction digits. The form of ADR-31's examples, ``2022-08-06 00:29:27.5 +0000 UTC``, is accepted
    too; no released server writes it.
    """
    text = value.decode("ascii", "replace")
    if text.endswith(" +0000 UTC"):
        text = text.removesuffix(" +0000 UTC") + "Z"
    try:
        if not text.endswith("Z"):
            raise ValueError
        seconds, _, fraction = text[:-1].partition(".")
        if len(seconds) != 19 or len(fraction) > 9 or (fraction and not fraction.isdigit()):
            raise ValueError
        whole = datetime.fromisoformat(seconds).replace(tzinfo=UTC)
        days = (whole - datetime(1970, 1, 1, tzinfo=UTC)).days
        second = whole.hour * 3600 + whole.minute * 60 + whole.second
        return (days * 86400 + second) * 1_000_000_000 + int(fraction.ljust(9, "0"))
    except ValueError:
        raise ResponseError(f"the server sent a time that is not RFC 3339: {text[:64]!r}", frame=value) from None
