"""The limits: a blocking socket with the least work that the protocol allows.

The writer's frames are joined before the clock starts, the reader only counts end-of-batch frames: what is left is the
server, the kernel and one pass over the bytes.
"""

import json
import re
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

INBOX = b"_INBOX.bare"
_ACK = re.compile(rb'"seq":(\d+),"msgs":(\d+)')
_EOB = re.compile(rb"NATS/1\.0 204 EOB\r\nNats-Num-Pending: (\d+)\r\nNats-Last-Sequence: (\d+)")


class Bare:
    """A connection without a client library."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        assert address.hostname is not None
        self.socket = socket.create_connection((address.hostname, address.port or 4222))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = b""
        self.socket.sendall(
            b'CONNECT {"verbose":false,"headers":true,"no_responders":true,"protocol":1}\r\n'
            b"SUB %b.> 1\r\nPING\r\n" % INBOX
        )
        self.until(b"PONG\r\n")

    def until(self, mark: bytes) -> bytes:
        """Read up to and including `mark`, and return what was read."""
        while mark not in self.buffer:
            self.more()
        head, _, self.buffer = self.buffer.partition(mark)
        return head + mark

    def more(self) -> None:
        """Read once more."""
        data = self.socket.recv(1 << 18)
        if not data:
            raise ConnectionError("the server closed the connection")
        self.buffer += data

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


def frames(
    subjects: list[bytes], payload: bytes, count: int, batch: bytes, flow: int, *, ids: bool = False
) -> Iterator[bytes]:
    """Yield the fast-ingest frames of a batch, its end included; with `ids` each has a ``Nats-Msg-Id``."""
    reply = b"%b.%b.%d.fail." % (INBOX, batch, flow)
    for seq in range(1, count + 1):
        op = 0 if seq == 1 else 1
        subject = subjects[seq % len(subjects)]
        if ids:
            header = b"NATS/1.0\r\nNats-Msg-Id: %b-%d\r\n\r\n" % (batch, seq)
            total = len(header) + len(payload)
            yield b"HPUB %b %b%d.%d.$FI %d %d\r\n%b%b\r\n" % (
                subject, reply, seq, op, len(header), total, header, payload
            )  # fmt: skip
            continue
        yield b"PUB %b %b%d.%d.$FI %d\r\n%b\r\n" % (subject, reply, seq, op, len(payload), payload)
    yield b"PUB %b %b%d.3.$FI 0\r\n\r\n" % (subjects[0], reply, count + 1)


def joined(commands: list[bytes], flow: int) -> tuple[bytes, list[bytes], bytes]:
    """Return the first frame, the rest joined by `flow`, and the end."""
    body = commands[1:-1]
    return commands[0], [b"".join(body[i : i + flow]) for i in range(0, len(body), flow)], commands[-1]


def publish(bare: Bare, first: bytes, blocks: list[bytes], end: bytes, flow: int, outstanding: int) -> int:
    """Write a batch with the window `flow` times `outstanding`; return the count in the server's final ack."""
    bare.socket.sendall(first)
    while not _ACK.search(bare.buffer):
        bare.more()
    bare.buffer = b""
    acked = 0
    window = flow * outstanding
    for sent, block in enumerate(blocks):
        while sent * flow + 1 - acked > window - flow:
            bare.more()
            for match in _ACK.finditer(bare.buffer):
                acked = max(acked, int(match[1]))
            # Keep the start of an incomplete ack: it follows the last line break.
            bare.buffer = bare.buffer[bare.buffer.rfind(b"\n") + 1 :]
        bare.socket.sendall(block)
    bare.socket.sendall(end)
    while b'"count":' not in bare.buffer or not bare.buffer.endswith(b"}\r\n"):
        bare.more()
    count = int(bare.buffer.rpartition(b'"count":')[2].partition(b"}")[0])
    bare.buffer = b""
    return count


def atomic_frames(subjects: list[bytes], payload: bytes, count: int, batch: bytes) -> bytes:
    """Return an atomic batch, joined: a reply to the first message is asked for, the last one commits."""
    out = []
    for seq in range(1, count + 1):
        commit = b"Nats-Batch-Commit: 1\r\n" if seq == count else b""
        header = b"NATS/1.0\r\nNats-Batch-Id: %b\r\nNats-Batch-Sequence: %d\r\n%b\r\n" % (batch, seq, commit)
        reply = b"%b.%d " % (INBOX, seq) if seq in (1, count) else b""
        size = len(header)
        subject = subjects[seq % len(subjects)]
        out.append(b"HPUB %b %b%d %d\r\n%b%b\r\n" % (subject, reply, size, size + len(payload), header, payload))
    return b"".join(out)


def publish_atomic(bare: Bare, batches: list[bytes]) -> int:
    """Write atomic batches one after another; return the number of stored messages, as the server reports it."""
    stored = 0
    for batch in batches:
        bare.socket.sendall(batch)
        bare.until(b'"count":')
        stored += int(bare.until(b"}")[:-1])
    return stored


def read(bare: Bare, stream: str, count: int, batch: int, max_bytes: int) -> int:
    """Read messages 1 to `count` with two requests in flight; return the number that the server reports."""
    subject = f"$JS.API.DIRECT.GET.{stream}".encode()

    def ask(seq: int) -> None:
        request = json.dumps({"seq": seq, "batch": min(batch, count - seq + 1), "max_bytes": max_bytes}).encode()
        bare.socket.sendall(b"PUB %b %b.r %d\r\n%b\r\n" % (subject, INBOX, len(request), request))

    starts = list(range(1, count + 1, batch))
    for seq in starts[:2]:
        ask(seq)
    ended, seen, asked = 0, 0, min(2, len(starts))
    tail = b""
    while ended < len(starts):
        data = bare.socket.recv(1 << 18)
        if not data:
            raise ConnectionError("the server closed the connection")
        window = tail + data
        seen += window.count(b"\r\nNats-Sequence: ") - tail.count(b"\r\nNats-Sequence: ")
        for _ in range(window.count(b"NATS/1.0 204 EOB") - tail.count(b"NATS/1.0 204 EOB")):
            ended += 1
            if asked < len(starts):
                ask(starts[asked])
                asked += 1
        tail = window[-32:]
    return seen
