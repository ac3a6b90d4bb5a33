"""The NATS client protocol: bytes into commands, outputs into bytes, and header blocks. No sockets."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

MAX_CONTROL_LINE = 4096
_SIZE = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Connect:
    """CONNECT, with its JSON options."""

    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ping:
    """PING."""


@dataclass(frozen=True, slots=True)
class Pong:
    """PONG."""


@dataclass(frozen=True, slots=True)
class Subscribe:
    """SUB subject [queue] sid."""

    subject: str
    sid: str
    queue: str = ""


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """UNSUB sid [max]; a `limit` of 0 ends the subscription at once."""

    sid: str
    limit: int = 0


@dataclass(frozen=True, slots=True)
class Publish:
    """PUB or HPUB; `header` is the complete block, from the `NATS/1.0` line to the final empty line, or empty."""

    subject: str
    payload: bytes = b""
    reply: str = ""
    header: bytes = b""


@dataclass(frozen=True, slots=True)
class Refused:
    """Input that ends the connection; `reason` is the text of the `-ERR` line, and empty if the server sends none."""

    reason: str


Command = Connect | Ping | Pong | Subscribe | Unsubscribe | Publish | Refused


@dataclass(frozen=True, slots=True)
class Deliver:
    """A message for a subscription: MSG, or HMSG if it has a header block."""

    connection: int
    sid: str
    subject: str
    payload: bytes = b""
    reply: str = ""
    header: bytes = b""


@dataclass(frozen=True, slots=True)
class Line:
    """A control line for a connection, such as `PONG`, without its line ending."""

    connection: int
    text: str


@dataclass(frozen=True, slots=True)
class Close:
    """The end of a connection, after all earlier outputs."""

    connection: int


Output = Deliver | Line | Close


def encode(output: Output) -> bytes:
    """Encode an output; a `Close` becomes empty bytes."""
    match output:
        case Deliver(header=b""):
            reply = f" {output.reply}" if output.reply else ""
            line = f"MSG {output.subject} {output.sid}{reply} {len(output.payload)}\r\n"
            return _text(line) + output.payload + b"\r\n"
        case Deliver():
            reply = f" {output.reply}" if output.reply else ""
            size = len(output.header)
            line = f"HMSG {output.subject} {output.sid}{reply} {size} {size + len(output.payload)}\r\n"
            return _text(line) + output.header + output.payload + b"\r\n"
        case Line():
            return _text(output.text) + b"\r\n"
        case Close():
            return b""


def _text(line: str) -> bytes:
    return line.encode("utf-8", "surrogateescape")


class Parser:
    """Parse the bytes of one client into commands; the bytes may be split at any position."""

    def __init__(self, max_payload: int) -> None:
        self._max_payload = max_payload
        self._buffer = bytearray()
        self._pending: tuple[str, str, int, int] | None = None  # subject, reply, header size, total size
        self._refused = False

    def feed(self, data: bytes) -> list[Command]:
        """Add bytes and return the commands that are now complete; after a `Refused` there are none."""
        self._buffer += data
        commands: list[Command] = []
        position = 0
        while not self._refused:
            if self._pending is not None:
                subject, reply, header_size, total = self._pending
                if len(self._buffer) < position + total + 2:
                    break
                if self._buffer[position + total : position + total + 2] != b"\r\n":
                    commands.append(self._refuse("Unknown Protocol Operation"))
                    break
                block = bytes(self._buffer[position : position + total])
                position += total + 2
                self._pending = None
                commands.append(Publish(subject, block[header_size:], reply, block[:header_size]))
                continue
            end = self._buffer.find(b"\n", position)
            if end < 0:
                if len(self._buffer) - position > MAX_CONTROL_LINE:
                    commands.append(self._refuse("maximum control line exceeded"))
                break
            line = bytes(self._buffer[position:end]).rstrip(b"\r").decode("utf-8", "surrogateescape")
            position = end + 1
            if line.strip():
                command = self._command(line)
                if command is not None:
                    commands.append(command)
        del self._buffer[:position]
        return commands

    def _refuse(self, reason: str) -> Refused:
        self._refused = True
        return Refused(reason)

    def _command(self, line: str) -> Command | None:
        name, _, rest = line.replace("\t", " ").lstrip().partition(" ")
        if len(rest) > MAX_CONTROL_LINE:
            return self._refuse("maximum control line exceeded")
        arguments = rest.split()
        match name.upper(), arguments:
            case "PUB", [subject, *reply, size] if len(reply) <= 1:
                return self._publish(subject, "".join(reply), "0", size)
            case "HPUB", [subject, *reply, header_size, size] if len(reply) <= 1:
                return self._publish(subject, "".join(reply), header_size, size)
            case "SUB", [subject, sid]:
                return Subscribe(subject, sid)
            case "SUB", [subject, queue, sid]:
                return Subscribe(subject, sid, queue)
            case "UNSUB", [sid]:
                return Unsubscribe(sid)
            case "UNSUB", [sid, limit]:
                return Unsubscribe(sid, int(limit) if _SIZE.fullmatch(limit) else 0)
            case "PING", _:
                return Ping()
            case "PONG", _:
                return Pong()
            case "CONNECT", _:
                return self._connect(rest)
            case (("PUB" | "HPUB" | "SUB" | "UNSUB"), _):
                return self._refuse("")
            case _:
                return self._refuse("Unknown Protocol Operation")

    def _connect(self, text: str) -> Command:
        try:
            options = json.loads(text)
        except (ValueError, RecursionError):
            options = None
        return Connect(options) if isinstance(options, dict) else self._refuse("")

    def _publish(self, subject: str, reply: str, header_size: str, size: str) -> Command | None:
        if not (_SIZE.fullmatch(size) and _SIZE.fullmatch(header_size)) or int(header_size) > int(size):
            return self._refuse("")
        if int(size) > self._max_payload:
            return self._refuse("Maximum Payload Violation")
        self._pending = (subject, reply, int(header_size), int(size))
        return None


# -- header blocks: bytes with case-sensitive names, of which the first occurrence counts -----------------------------

_LINE = b"NATS/1.0\r\n"
_EMPTY = _LINE + b"\r\n"


def get_header(header: bytes, name: str) -> str | None:
    """Return the first value of a header without leading spaces, or `None`; the name is case-sensitive."""
    start = _find(header, name)
    if start < 0:
        return None
    start += len(name) + 1
    end = header.find(b"\r\n", start)
    return header[start : end if end >= 0 else len(header)].lstrip(b" ").decode("utf-8", "surrogateescape")


def _find(header: bytes, name: str) -> int:
    index = header.find(b"\r\n" + name.encode() + b":")
    return index + 2 if index >= 0 else -1


def remove_header(header: bytes, name: str) -> bytes:
    """Return the block without this header; a block without any header left becomes empty bytes."""
    while (start := _find(header, name)) >= 0:
        end = header.find(b"\r\n", start)
        if end < 0:
            return header
        header = header[:start] + header[end + 2 :]
        if len(header) <= len(_EMPTY):
            return b""
    return header


def add_headers(header: bytes, *pairs: tuple[str, str]) -> bytes:
    return (header[:-2] if len(header) > 2 else _LINE) + _lines(pairs)


def status_header(line: str, *pairs: tuple[str, str]) -> bytes:
    """Return a block with a status and headers, such as `status_header("204 EOB")`."""
    return f"NATS/1.0 {line}\r\n".encode() + _lines(pairs)


def _lines(pairs: Iterable[tuple[str, str]]) -> bytes:
    lines = [f"{name}: {value}\r\n".encode("utf-8", "surrogateescape") for name, value in pairs]
    return b"".join(lines) + b"\r\n"


def strip_status(header: bytes) -> bytes:
    """Return the block without the status on its first line; a block without any header becomes empty bytes."""
    end = header.find(b"\r")
    if not header.startswith(b"NATS/1.0") or end <= 8:
        return header
    header = b"NATS/1.0" + header[end:]
    return b"" if len(header) == len(_EMPTY) else header


def header_names(header: bytes) -> list[str]:
    lines = header.split(b"\r\n")[1:]
    return [line.split(b":", 1)[0].decode("utf-8", "surrogateescape") for line in lines if b":" in line]


def parse_number(text: str | None) -> int | None:
    """Parse an unsigned 64-bit number of plain digits; return `None` for anything else."""
    if not text or not text.isascii() or not text.isdigit() or len(text.lstrip("0")) > 20:
        return None
    number = int(text)
    return number if number < 1 << 64 else None


def parse_signed(text: str) -> int:
    """Parse a number below 2**63 as the server parses expectations and TTLs: -1 for anything else."""
    number = parse_number(text)
    return -1 if number is None or number >= 1 << 63 else number
