"""The NATS client protocol: parse bytes into commands, and encode outputs as bytes. No sockets."""

import json
import re
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
