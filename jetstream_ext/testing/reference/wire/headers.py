"""Header blocks as the server reads them: bytes with case-sensitive names, of which the first occurrence counts."""

from collections.abc import Iterable

_LINE = b"NATS/1.0\r\n"
_EMPTY = _LINE + b"\r\n"


def get(header: bytes, name: str) -> str | None:
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


def remove(header: bytes, name: str) -> bytes:
    """Return the block without this header; a block without any header left becomes empty bytes."""
    while (start := _find(header, name)) >= 0:
        end = header.find(b"\r\n", start)
        if end < 0:
            return header
        header = header[:start] + header[end + 2 :]
        if len(header) <= len(_EMPTY):
            return b""
    return header


def add(header: bytes, *pairs: tuple[str, str]) -> bytes:
    return (header[:-2] if len(header) > 2 else _LINE) + _lines(pairs)


def status(line: str, *pairs: tuple[str, str]) -> bytes:
    """Return a block with a status and headers, such as `status("204 EOB")`."""
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


def names(header: bytes) -> list[str]:
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
