"""Frames in bytes: PUB and HPUB made in bulk, as nats-py would write them, and the control lines of MSG and HMSG."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from jetstream_ext.errors import BadSubjectError, MaxPayloadError

# Servers close the connection if a command's line is longer, in bytes without the command's name. It is their default,
# and their INFO does not tell another one.
MAX_CONTROL_LINE: Final = 4096
_SIZES: Final = len(" 65535 1000000000 ")  # the sizes in the line of a publish, with the blanks around them

Frame = tuple[bytes, bytes, int]
"""One delivered message: its subject, its header block and payload in one piece, and the size of the block. It
is a plain tuple, because a bulk read has a million of them; `parts` cuts it up."""


def parts(frame: Frame) -> tuple[bytes, bytes, bytes]:
    """Return subject, header block (or nothing) and payload."""
    subject, body, header_size = frame
    return subject, body[:header_size], body[header_size:]


class MessageLine(NamedTuple):
    subject: bytes
    sid: bytes
    header_size: int
    total: int


def message_line(line: bytes) -> MessageLine | None:
    """Read ``MSG <subject> <sid> [reply] <size>`` or ``HMSG … <header size> <size>``; None for any other line."""
    words = line.split(b" ")
    numbers = {b"MSG": 1, b"HMSG": 2}.get(words[0])
    if numbers is None or not 3 <= len(words) - numbers <= 4:
        return None
    if not all(word.isdigit() and len(word) < 20 for word in words[-numbers:]):
        return None  # not as servers write it: nats-py decides what it is
    total = int(words[-1])
    header_size = int(words[-2]) if numbers == 2 else 0
    return MessageLine(words[1], words[2], min(header_size, total), total)


class Command(NamedTuple):
    subject: str
    reply: str
    header: bytes
    payload: bytes


def check_size(size: int, max_payload: int, subject: str = "") -> None:
    """Raise MaxPayloadError if a message's headers and payload together are over the server's limit, in bytes."""
    if size > max_payload:
        raise MaxPayloadError(
            f"the message{f' on subject {subject!r}' if subject else ''} has {size} bytes with its headers, more than the server's "
            f"max_payload of {max_payload}",
            subject=subject,
            size=size,
            limit=max_payload,
        )


def check_line(subject: str, reply_size: int) -> None:
    """Raise BadSubjectError if `subject` is too long to be published to, with a reply subject of `reply_size` bytes."""
    size, room = len(subject.encode()), MAX_CONTROL_LINE - _SIZES - reply_size
    if size > room:
        raise BadSubjectError(
            f"subject {subject[:64]!r}… has {size} bytes, and at most {room} can be sent with its reply subject: a server "
            f"closes the connection after a line of more than {MAX_CONTROL_LINE} bytes; nothing was sent"
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
