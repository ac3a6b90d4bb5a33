"""The limits: a blocking socket with the least work that the protocol allows.

The writer's frames are joined before the clock starts. One reader only counts frames: what is left is the server, the
kernel and one pass over the bytes. The other one also cuts the frames, as any client that hands out messages must.
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


class _Requests:
    """The requests for messages 1 to `count`, two of them in flight."""

    def __init__(self, bare: Bare, stream: str, count: int, batch: int, max_bytes: int) -> None:
        self._bare = bare
        self._subject = f"$JS.API.DIRECT.GET.{stream}".encode()
        self._starts = iter(range(1, count + 1, batch))
        self._count, self._batch, self._max_bytes = count, batch, max_bytes
        self.unanswered = 0
        self.next()
        self.next()

    def next(self) -> None:
        """Send the next request, if there is one."""
        for seq in self._starts:
            body = {"seq": seq, "batch": min(self._batch, self._count - seq + 1), "max_bytes": self._max_bytes}
            request = json.dumps(body).encode()
            self._bare.socket.sendall(b"PUB %b %b.r %d\r\n%b\r\n" % (self._subject, INBOX, len(request), request))
            self.unanswered += 1
            return

    def answered(self) -> None:
        """Note the end of an answer."""
        self.unanswered -= 1
        self.next()


def read(bare: Bare, stream: str, count: int, batch: int, max_bytes: int) -> int:
    """Read messages 1 to `count`; return how many frames with a sequence came."""
    requests, seen = _Requests(bare, stream, count, batch, max_bytes), 0
    tail = b""
    while requests.unanswered:
        data = bare.socket.recv(1 << 18)
        if not data:
            raise ConnectionError("the server closed the connection")
        window = tail + data
        seen += window.count(b"\r\nNats-Sequence: ") - tail.count(b"\r\nNats-Sequence: ")
        for _ in range(window.count(b"NATS/1.0 204 EOB") - tail.count(b"NATS/1.0 204 EOB")):
            requests.answered()
        tail = window[-32:]
    return seen


def read_and_cut(bare: Bare, stream: str, count: int, batch: int, max_bytes: int) -> int:
    """As `read`, and cut every frame into header block and payload; return how many messages came."""
    requests, cut = _Requests(bare, stream, count, batch, max_bytes), 0
    rest = b""
    while requests.unanswered:
        data = bare.socket.recv(1 << 18)
        if not data:
            raise ConnectionError("the server closed the connection")
        data = rest + data
        pos, size = 0, len(data)
        messages: list[tuple[bytes, bytes]] = []
        while (eol := data.find(b"\r\n", pos)) >= 0:
            if not data.startswith(b"HMSG ", pos):  # PING, of which a server allows two without an answer
                pos = eol + 2
                continue
            _, _, _, header_size, total = data[pos:eol].split(b" ")
            start, middle, end = eol + 2, eol + 2 + int(header_size), eol + 2 + int(total)
            if end + 2 > size:
                break
            pos = end + 2
            if total == header_size and data.startswith(b"NATS/1.0 204", start):
                requests.answered()
            else:
                messages.append((data[start:middle], data[middle:end]))
        cut += len(messages)
        rest = data[pos:]
    return cut
