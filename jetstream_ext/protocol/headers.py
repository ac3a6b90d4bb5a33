"""Message headers on the wire: a status line, then ``Name: value`` lines, then an empty line.

A direct-get reply has the stored block first, which servers store unchecked, and the server's own lines after it. So this
module reads the server's lines from the end of the block, where only the server writes, and trusts no line before them. A
publisher can store ``Nats-Sequence: 77``, or a block without an end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
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

_RESERVED: Final = "Nats-"
# Instructions that the server carried out when it stored the message, and its note of the origin of a sourced one. Published
# with a copy, they would be carried out again, or make the server refuse it.
INSTRUCTION_PREFIXES: Final = ("Nats-Batch-", "Nats-Expected-", "Nats-Schedule")
INSTRUCTIONS: Final = frozenset({"Nats-Rollup", "Nats-Incr", "Nats-Required-Api-Level", "Nats-Stream-Source"})

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

SCHEDULER: Final = b"\r\nNats-Scheduler:"

MAX_BLOCK: Final = 65_535
"""How many bytes of headers servers store with a message (10097 beyond that)."""

# RFC 9110 token characters: what nats-py and the server accept in a header name.
_NAME_CHARS: Final = frozenset("!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")


Row = list[bytes]
"""The header lines of a message in a direct-get reply, by the `ROW_*` places. The subject is there without its header's
name, and the stored headers are one block without the server's lines, or nothing."""
ROW_SUBJECT, ROW_SEQUENCE, ROW_TIME, ROW_PENDING, ROW_LAST, ROW_STREAM, ROW_STORED = range(7)


_LINES: Final = tuple(f"{name}: ".encode() for name in _APPENDED)


def reply_row(block: bytes) -> Row:
    """Cut up the header block of a message in a batched direct-get reply; return an empty row for any other block.

    Servers append exactly these six lines, in this order, to the stored headers.
    """
    lines = block.rsplit(CRLF, 8)
    if (
        len(lines) == 9
        and lines[1].rfind(b"Nats-Stream: ") == 0  # the publisher's last line may be before it
        and lines[2][:14] == b"Nats-Subject: "
        and lines[3][:15] == b"Nats-Sequence: "
        and lines[4][:17] == b"Nats-Time-Stamp: "
        and lines[5][:18] == b"Nats-Num-Pending: "
        and lines[6][:20] == b"Nats-Last-Sequence: "
    ):
        stored = lines[0] if lines[0] != VERSION else b""
        return [lines[2][14:], lines[3], lines[4], lines[5], lines[6], lines[1], stored]
    if not lines[-1] and lines[-3:][0].startswith(_LINES[3]):
        return []  # the reply to a single get
    found = _cut_off(block, _LINES)
    if not found:
        return []
    stream, subject, sequence, time, pending, last, stored = found
    return [subject[14:], sequence, time, pending, last, stream, stored]


def are_in_place(row: Row) -> bool:
    """Return whether the lines of a row have the names that belong to their places."""
    return (
        row[ROW_SEQUENCE][:15] == b"Nats-Sequence: "
        and row[ROW_TIME][:17] == b"Nats-Time-Stamp: "
        and row[ROW_PENDING][:18] == b"Nats-Num-Pending: "
        and row[ROW_LAST][:20] == b"Nats-Last-Sequence: "
    )


def is_inside_batch(stored: bytes) -> bool:
    """Return whether a message, by its stored headers, belongs to an atomic batch and is not the last one of it.

    The message of a schedule that has fired has the headers of the one that scheduled it.
    """
    return b"\r\nNats-Batch-Id:" in stored and b"\r\nNats-Batch-Commit:" not in stored and SCHEDULER not in stored


def single_row(block: bytes) -> Row:
    """As `reply_row`, for the reply to a single direct get, which has only the first four lines."""
    found = _cut_off(block, _LINES[:4])
    if not found:
        return []
    stream, subject, sequence, time, stored = found
    return [subject[14:], sequence, time, b"", b"", stream, stored]


def _cut_off(block: bytes, names: tuple[bytes, ...]) -> list[bytes]:
    """Return the server's lines at the end of a block, by `names`, and what is stored in one piece; nothing for others.

    Another order, or new lines between them, does not matter. A server appends its lines to the stored block without its
    last two bytes. If these are not its empty line, the server's first line continues the publisher's last one, whose end
    is lost, so that it counts as no header.
    """
    lines = block.split(CRLF)
    if any(lines[-2:]) or names[0] not in block:  # the end of a reply has none of them
        return []
    found: dict[bytes, bytes] = {}
    while len(found) < len(names):
        if not lines:
            return []
        line = lines.pop()
        missing = [name for name in names if name not in found]
        for name in missing:
            begin = line.rfind(name)  # none of the values has a blank
            if begin == 0 or (begin > 0 and len(missing) == 1):
                found[name] = line[begin:]
    return [*map(found.__getitem__, names), CRLF.join(lines) if lines != [VERSION] else b""]


def complete_lines(block: bytes) -> bytes:
    """Return the stored headers of a message as `ROW_STORED` has them; `block` is its whole header block."""
    stored = block[: -len(CRLF)].rpartition(CRLF)[0]
    return stored if stored != VERSION else b""


def stored_lines(headers: Mapping[str, str]) -> bytes:
    """Return headers as `ROW_STORED` has them."""
    return CRLF.join([VERSION, *(f"{name}: {value}".encode() for name, value in headers.items())]) if headers else b""


def check_header(name: str, value: str) -> None:
    """Raise BadHeaderError for a header that could end its line early or that the server would drop."""
    if not isinstance(name, str):
        raise TypeError(f"a header's name must be str, not {type(name).__name__}")
    if not isinstance(value, str):
        raise TypeError(f"header {name!r}: the value must be str, not {type(value).__name__}")
    if not name or not _NAME_CHARS.issuperset(name):
        raise BadHeaderError(f"header name {name!r} is empty or has characters that are not allowed in a header name")
    if "\r" in value or "\n" in value or "\0" in value:
        raise BadHeaderError(f"the value of header {name!r} has a line break or a NUL character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadHeaderError(
            f"the value of header {name!r} has half of a surrogate pair, which UTF-8 cannot encode; nothing was sent"
        ) from None


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
        if start is None or type(value) is not str or not value.isprintable():  # a surrogate is not
            check_header(name, value)
            if len(_known_names) >= _KNOWN_LIMIT:
                _known_names.clear()
            # A name of an enum, such as nats-py's `Header`, is equal to its value, and is formatted differently.
            start = _known_names[name] = f"{str.__str__(name)}: "
        text += f"{start}{value.strip()}\r\n"
    if _BLANK_ID in text:
        raise BadHeaderError(
            f"a message id ({MSG_ID}) is blank; servers ignore it, so that they would store duplicates"
        )
    block = (text + "\r\n").encode()
    check_block(len(block))
    return block


def outside_a_batch(block: bytes) -> bytes:
    """Return a header block; raise BadHeaderError if it would make the message one of an atomic batch."""
    if b"\r\nNats-Batch-" in block:
        raise BadHeaderError(
            "a header begins with 'Nats-Batch-', with which servers take a message for one of an atomic batch; leave it out "
            "(`StoredMsg.headers` does)"
        )
    return block


class EncodedHeaders(Mapping[str, str]):
    """Headers that are encoded and checked already."""

    __slots__ = ("block",)

    def __init__(self, block: bytes) -> None:
        self.block: bytes = block

    def __getitem__(self, name: str) -> str:
        return dict(parse_lines(self.block))[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in parse_lines(self.block))

    def __len__(self) -> int:
        return len(parse_lines(self.block))


class HeaderCache:
    """Encodes the header blocks of a bulk: one that repeats is encoded once."""

    _LIMIT = 256
    _LARGEST = 1024  # bytes; with the number above it bounds the memory

    def __init__(self) -> None:
        self._blocks: dict[tuple[tuple[str, str], ...], bytes] = {}

    def encode(self, headers: Mapping[str, str]) -> bytes:
        """As the function `encode`."""
        if MSG_ID in headers:  # an id never repeats
            value = headers[MSG_ID]
            if len(headers) == 1 and type(value) is str and value.isprintable() and len(value) < self._LARGEST:
                raw = value.strip().encode()
                if raw:  # the same as `encode` returns
                    return b"NATS/1.0\r\nNats-Msg-Id: %b\r\n\r\n" % raw
            return outside_a_batch(encode(headers.items()))
        items = tuple(headers.items())
        try:
            return self._blocks[items]
        except TypeError:  # a value that cannot be hashed is no str
            return outside_a_batch(encode(items))
        except KeyError:
            pass
        block = outside_a_batch(encode(items))
        if len(block) <= self._LARGEST:
            if len(self._blocks) >= self._LIMIT:
                self._blocks.clear()
            self._blocks[items] = block
        return block


def rebuild(headers: Mapping[str, str] | None) -> bytes:
    """Return the bytes that nats-py parsed into `headers`, as nearly as they can be known; the server's lines are last.

    If the sender of a stored message left out the end of its block, the server's first line continues the sender's last
    one, which is then the first of the server's lines.
    """
    if not headers:
        return b""
    first, lines = VERSION, dict(headers)
    if SEQUENCE in lines:  # a stored message
        if any(type(name) is not str for name in lines):  # nats-py's own name for the text of a stored status line
            lines.pop("Status", None)
            lines.pop("Description")
        names = list(lines)
        own = [name for name in names if name not in REPLY_HEADERS]
        glued = [name for name in own if name.endswith(STREAM) or f"{STREAM}: " in lines[name]]
        if glued and STREAM not in names[names.index(own[-1]) :]:  # if it is before, the sender wrote it
            lines.pop(STREAM, None)
            lines[glued[-1]] = lines.pop(glued[-1])
        lines |= {name: lines.pop(name) for name in _APPENDED if name in lines}
    elif "Status" in lines:
        # If there are both a status line and headers, nats-py leaves the headers in the description as well.
        text = lines.pop("Description", "").split("\n")[0].strip()
        first += f" {lines.pop('Status')} {text}".rstrip().encode()
    return CRLF.join([first, *(f"{name}: {value}".encode() for name, value in lines.items()), b"", b""])


def parse_status(block: bytes) -> tuple[int, str] | None:
    """Return the inline status ``(code, text)``, or None; raise ResponseError if `block` is not a header block."""
    line = block.partition(CRLF)[0]
    if not line.startswith(VERSION):
        raise ResponseError("it does not begin with NATS/1.0", frame=block)
    code, _, text = line[len(VERSION) :].strip().partition(b" ")
    if not code:
        return None
    number = parse_number(code, 999)
    if number is None:
        raise ResponseError("its status is not a number from 0 to 999", frame=block)
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
        raise ResponseError(f"{value[:64]!r} is not a number from 0 to 2**64-1", frame=value)
    return number


def is_reserved(name: str) -> bool:
    """Return whether a header is an instruction to the server, or what the server notes about a message.

    Servers compare names case-sensitively: to them, ``nats-rollup`` is a header like any other, which they store.
    """
    return name.startswith(_RESERVED)


def is_instruction(name: str) -> bool:
    """Return whether a stored header is an instruction that was carried out, which a copy of the message must not have."""
    return name.startswith(INSTRUCTION_PREFIXES) or name in INSTRUCTIONS


def stored_pairs(block: bytes) -> list[tuple[str, str]]:
    """Return every stored header of a message in order, without what the server adds to a reply."""
    return [pair for pair in parse_lines(block) if pair[0] not in REPLY_HEADERS]


def copied_pairs(block: bytes) -> list[tuple[str, str]]:
    """Return the stored headers in order that a copy of the message has, too: those that are no instructions."""
    return [pair for pair in stored_pairs(block) if not is_instruction(pair[0])]


def line_without_header(block: bytes) -> str | None:
    """Return the first line among a stored message's headers that is not a header: a status, or a line without a colon."""
    first, *lines = block.split(CRLF)
    others = [first] if first.strip() != VERSION else []
    others += [line for line in lines if b":" not in line]
    return next((line.decode("utf-8", "replace") for line in others if line.strip()), None)


def raw_pairs(block: bytes) -> list[tuple[bytes, bytes]]:
    """As `stored_pairs`, without decoding."""
    lines = (line.partition(b":") for line in block.split(CRLF)[1:])
    pairs = [(name.strip(), value.strip()) for name, colon, value in lines if colon]
    return [(name, value) for name, value in pairs if name.decode("utf-8", "replace") not in REPLY_HEADERS]


def decode_stored(block: bytes) -> dict[str, str]:
    """Return `stored_pairs` as a mapping, with the last value of each name."""
    return dict(stored_pairs(block))


def format_time_ns(time_ns: int) -> str:
    """Return an RFC 3339 time in UTC of nanoseconds since the epoch as servers write it: without zeros at the end."""
    seconds, fraction = divmod(time_ns, 1_000_000_000)
    when = datetime(1970, 1, 1) + timedelta(seconds=seconds)  # noqa: DTZ001 - in UTC
    return f"{when.isoformat()}.{fraction:09d}".rstrip("0").rstrip(".") + "Z"


def parse_time(value: bytes) -> datetime:
    """As `parse_time_ns`, to the microsecond."""
    if value[7:8] == b"-" and value[10:11] == b"T" and value.endswith(b"Z"):
        # Six times as fast as by nanoseconds, and truncates the same digits.
        try:
            return datetime.fromisoformat(value.decode())
        except ValueError:
            pass  # `parse_time_ns` raises the error
    return _EPOCH + timedelta(microseconds=parse_time_ns(value) // 1000)


_EPOCH: Final = datetime.fromtimestamp(0, UTC)
_RFC3339: Final = re.compile(rb"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z| \+0000 UTC)")


def parse_time_ns(value: bytes) -> int:
    """Return the nanoseconds since the epoch of an RFC 3339 time in UTC, or raise ResponseError.

    The time has 0 to 9 fraction digits. The form of ADR-31's examples, ``2022-08-06 00:29:27.5 +0000 UTC``, is accepted
    too; no released server writes it.
    """
    try:
        if (found := _RFC3339.fullmatch(value)) is None:
            raise ValueError
        since = datetime.fromisoformat(f"{found[1].decode()}T{found[2].decode()}Z") - _EPOCH
        return (since.days * 86400 + since.seconds) * 1_000_000_000 + int((found[3] or b"").ljust(9, b"0"))
    except ValueError:
        raise ResponseError(f"{value[:64]!r} is a time that is not RFC 3339", frame=value) from None
