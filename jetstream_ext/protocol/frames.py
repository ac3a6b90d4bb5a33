"""Frames in bytes: PUB and HPUB made in bulk, as nats-py would write them, and the control lines of MSG and HMSG."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from jetstream_ext.errors import BadSubjectError, MaxPayloadError

# Everything at or below space, and DEL: a subject is one token stream on a line of a text protocol. And halves of
# surrogate pairs, which no UTF-8 has.
_FORBIDDEN = frozenset(chr(code) for code in (*range(33), 127, *range(0xD800, 0xE000)))


Frame = tuple[bytes, bytes, int]
"""One delivered message: its subject, its header block and payload in one piece, and the size of the block.

A plain tuple with one copy of the bytes: there are a million of them. `parts` cuts one up.
"""


def parts(frame: Frame) -> tuple[bytes, bytes, bytes]:
    """Return subject, header block (or nothing) and payload."""
    subject, body, header_size = frame
    return subject, body[:header_size], body[header_size:]


class MessageLine(NamedTuple):
    """The control line of a delivered message."""

    subject: bytes
    sid: bytes
    header_size: int
    total: int


def message_line(line: bytes) -> MessageLine | None:
    """Read ``MSG <subject> <sid> [reply] <size>`` or ``HMSG … <header size> <size>``; None is anything else."""
    words = line.split(b" ")
    numbers = {b"MSG": 1, b"HMSG": 2}.get(words[0])
    if numbers is None or not 3 <= len(words) - numbers <= 4:
        return None
    if not all(word.isdigit() and len(word) < 20 for word in words[-numbers:]):
        return None  # not as servers write it: nats-py says what it is
    total = int(words[-1])
    header_size = int(words[-2]) if numbers == 2 else 0
    return MessageLine(words[1], words[2], min(header_size, total), total)


class Command(NamedTuple):
    """One publish that this library made."""

    subject: str
    reply: str
    header: bytes
    payload: bytes


def check_subject(subject: str) -> None:
    """Refuse a subject that nothing can be published to.

    Raises:
        BadSubjectError: Empty, an empty token, a wildcard, white space or a control character.
        TypeError: Not a string.
    """
    if not isinstance(subject, str):
        raise TypeError(f"a subject must be str, not {type(subject).__name__}")
    if not subject or not _FORBIDDEN.isdisjoint(subject):
        raise BadSubjectError(f"subject {subject!r} is empty or has white space or control characters")
    for token in subject.split("."):
        if not token:
            raise BadSubjectError(f"subject {subject!r} has an empty token")
        if token in ("*", ">"):
            raise BadSubjectError(f"subject {subject!r} has a wildcard: messages are stored under literal subjects")


def check_filter(subject: str) -> None:
    """Refuse a subject filter that the server would not understand; wildcards are fine here.

    Raises:
        BadSubjectError: As for `check_subject`, and a ``>`` that is not last.
        TypeError: Not a string.
    """
    if not isinstance(subject, str):
        raise TypeError(f"a subject filter must be str, not {type(subject).__name__}")
    if not subject or not _FORBIDDEN.isdisjoint(subject):
        raise BadSubjectError(f"subject filter {subject!r} is empty or has white space or control characters")
    tokens = subject.split(".")
    if not all(tokens) or ">" in tokens[:-1]:
        raise BadSubjectError(f"subject filter {subject!r} has an empty token or a '>' that is not the last")


def check_name(name: str, what: str) -> None:
    r"""Refuse a stream or bucket name that would become other tokens of an API subject.

    Raises:
        BadSubjectError: Empty, or with ``.``, ``*``, ``>``, ``/``, ``\``, white space or control characters.
    """
    if not isinstance(name, str):
        raise TypeError(f"{what} must be str, not {type(name).__name__}")
    if not name or not _FORBIDDEN.isdisjoint(name) or any(char in name for char in ".*>/\\"):
        raise BadSubjectError(f"{what} {name!r} is empty or has characters that are not allowed in a name")


def check_size(header: bytes, payload: bytes, max_payload: int) -> None:
    """Refuse a message that the server would refuse for its size.

    Raises:
        MaxPayloadError: Headers and payload together are over `max_payload` bytes.
    """
    size = len(header) + len(payload)
    if size > max_payload:
        raise MaxPayloadError(
            f"a message of {size} bytes (headers included) is over the server's limit of {max_payload}"
        )


def pub(subject: bytes, reply: bytes, header: bytes, payload: bytes) -> bytes:
    """Encode one publish; `reply` and `header` may be empty."""
    gap = b" " if reply else b""
    if header:
        size = len(header)
        return b"HPUB %b %b%b%d %d\r\n%b%b\r\n" % (subject, reply, gap, size, size + len(payload), header, payload)
    return b"PUB %b %b%b%d\r\n%b\r\n" % (subject, reply, gap, len(payload), payload)


def parse_pubs(data: bytes) -> Iterator[Command]:
    """Yield the publishes that `pub` encoded into `data`."""
    pos = 0
    while pos < len(data):
        eol = data.index(b"\r\n", pos)
        words = data[pos:eol].split(b" ")
        total = int(words[-1])
        sizes = 2 if words[0] == b"HPUB" else 1
        header_size = int(words[-2]) if sizes == 2 else 0
        reply = words[2].decode() if len(words) - sizes == 3 else ""
        start = eol + 2
        body = data[start : start + total]
        yield Command(words[1].decode(), reply, body[:header_size], body[header_size:])
        pos = start + total + 2


class SubjectCache:
    """Checked subjects and their bytes. Streams are written through few subjects, so checking once is enough."""

    _LIMIT = 8192

    def __init__(self) -> None:
        self._known: dict[str, bytes] = {}

    def encode(self, subject: str) -> bytes:
        """Return the bytes of a valid subject.

        Raises:
            BadSubjectError: See `check_subject`.
        """
        known = self._known.get(subject)
        if known is None:
            check_subject(subject)
            if len(self._known) >= self._LIMIT:
                self._known.clear()
            known = self._known[subject] = subject.encode()
        return known
