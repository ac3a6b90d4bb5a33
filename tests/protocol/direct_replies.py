"""Replies to direct gets, as frames."""

from jetstream_ext.protocol.frames import Frame


def status(text: str) -> Frame:
    block = f"NATS/1.0 {text}\r\n\r\n".encode()
    return b"_INBOX.x", block, len(block)


def row(
    seq: int,
    last: int,
    pending: int,
    stream: str = "S",
    *,
    subject: str = "a",
    stored: str = "",
    size: int = 0,
    time: str = "2025-11-20T21:23:31.2Z",
) -> Frame:
    """A message of a batch, with the header lines that its publisher has stored, and a payload of zeros."""
    block = (
        f"NATS/1.0\r\n{stored}Nats-Stream: {stream}\r\nNats-Subject: {subject}\r\nNats-Sequence: {seq}\r\n"
        f"Nats-Time-Stamp: {time}\r\nNats-Num-Pending: {pending}\r\nNats-Last-Sequence: {last}\r\n\r\n"
    ).encode()
    return b"_INBOX.x", block + bytes(size), len(block)


def eob(last: int, pending: int, up_to: int | None = None) -> Frame:
    text = f"204 EOB\r\nNats-Num-Pending: {pending}\r\nNats-Last-Sequence: {last}"
    return status(text if up_to is None else f"{text}\r\nNats-UpTo-Sequence: {up_to}")
