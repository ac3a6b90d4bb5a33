"""Messages that a publisher can store and that no client library sends: their header blocks, and what is stored of them."""

import asyncio
import base64
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

VERSION = b"NATS/1.0"
END = b"\r\n\r\n"

# Headers of servers and of clients, with a value that does not remove other messages.
HEADERS = {
    "Nats-Stream": "OTHER",
    "Nats-Subject": "other.subject",
    "Nats-Sequence": "77",
    "Nats-Time-Stamp": "2020-01-01T00:00:00.123Z",
    "Nats-Num-Pending": "0",
    "Nats-Last-Sequence": "0",
    "Nats-UpTo-Sequence": "5",
    "Nats-Msg-Id": "id",
    "Nats-TTL": "never",
    "Nats-Incr": "1",
    "Nats-Expected-Stream": "OTHER",
    "Nats-Expected-Last-Sequence": "0",
    "Nats-Expected-Last-Subject-Sequence": "0",
    "Nats-Expected-Last-Subject-Sequence-Subject": "a",
    "Nats-Expected-Last-Msg-Id": "x",
    "Nats-Batch-Id": "b",
    "Nats-Batch-Sequence": "1",
    "Nats-Batch-Commit": "1",
    "Nats-Rollup": "sub",
    "Nats-Marker-Reason": "MaxAge",
    "Nats-Required-Api-Level": "1",
    "Nats-Schedule": "@at 2099-01-01T00:00:00Z",
    "Nats-Schedule-Target": "x",
    "Nats-Stream-Source": "OTHER 1 > > a",
    "Nats-Counter-Sources": "{}",
    "Nats-Pending-Messages": "9",
    "Nats-Pin-Id": "p",
    "KV-Operation": "DEL",
    "Status": "204",
    "Description": "EOB",
    "A": "b\u00e4",
}
APPENDED = ("Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp", "Nats-Num-Pending", "Nats-Last-Sequence")
ODD = (
    b"x",
    b"\r\n",
    b"abc",
    b"\x00garbage\xff",
    b"garbage\r\nA: b" + END,
    b"NATS/1.0\nA: b\n\n",
    b"NATS/1.0\rA: b\r\r",
    b"NATS/1.0\r\nA: b\r\n\r",
    b"NATS/1.0\r\nA: b" + END + b"B: c" + END,
    b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 0\r\nNats-Last-Sequence: 0" + END,
    b"NATS/1.0 404 Message Not Found" + END,
    b"NATS/1.0 503" + END,
    b"NATS/1.0 99999999999999999999" + END,
    b"NATS/1.0\r\nX: Nats-Stream: FAKE\r\n",
    b"NATS/1.0\r\nX: Nats-Stream: FAKE cd",
    b"NATS/1.0\r\nNats-Stream: FAKENats-Stream: FAKExx",
    b"NATS/1.0\r\n: no name\r\nno colon\r\n \r\nA:\r\n" + END,
    b"NATS/1.0\r\n" + b"\xff\xfe: \xff\xfe" + END,
    b"NATS/1.0\r\nA: \xed\xa0\x80" + END,  # a surrogate in UTF-8
    b"NATS/1.0\r\nA: \x1b]0;owned\x07" + END,
    b"NATS/1.0\r\nA: " + b"b" * 60_000,
    b"NATS/1.0\r\n" + b"A: b\r\n" * 5_000 + b"\r\n",
)


def block(*lines: tuple[str, str]) -> bytes:
    return b"\r\n".join([VERSION, *(f"{name}: {value}".encode() for name, value in lines)]) + END


def cuts(whole: bytes) -> Iterator[bytes]:
    return (whole[:size] for size in range(1, len(whole)))


def blocks() -> Iterator[bytes]:
    """Yield header blocks: every known header repeated, in another order, and cut off at every byte."""
    yield from ODD
    for name, value in HEADERS.items():
        yield block((name, value), (name, f"{value}2"))
        yield from cuts(block((name, value)))
    forged = [(name, HEADERS[name]) for name in APPENDED]
    for turn in range(len(forged)):
        turned = forged[turn:] + forged[:turn]
        yield block(*turned)
        yield block(*turned, *turned)
        yield from cuts(block(*turned))
    source = random.Random(17)
    for _ in range(200):
        lines = source.choices(list(HEADERS.items()), k=source.randrange(2, 9))
        whole = block(*lines)
        yield whole[: source.choice((len(whole), source.randrange(1, len(whole))))]


@dataclass(frozen=True, slots=True)
class Stored:
    """A message as the leader says that it is stored."""

    seq: int
    subject: str
    data: bytes
    headers: list[tuple[str, str]]
    """Those in the lines that end before the last two bytes of the block, without the ones that servers append."""


def whole_headers(raw: bytes) -> list[tuple[str, str]]:
    lines = raw[:-2].decode("utf-8", "replace").split("\r\n")[1:-1]
    pairs = [(name.strip(), value.strip()) for name, colon, value in (line.partition(":") for line in lines) if colon]
    return [(name, value) for name, value in pairs if name not in (*APPENDED, "Nats-UpTo-Sequence")]


class RawClient:
    """A connection that publishes any header block."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        self._writer.write(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\nSUB inbox 1\r\n')
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    def publish(self, subject: str, header: bytes, data: bytes) -> None:
        size = len(header)
        self._writer.write(b"HPUB %b %d %d\r\n%b%b\r\n" % (subject.encode(), size, size + len(data), header, data))

    async def request(self, subject: str, data: bytes) -> bytes:
        self._writer.write(b"PUB %b inbox %d\r\n%b\r\n" % (subject.encode(), len(data), data))
        while True:
            line = await self._reader.readuntil(b"\r\n")
            if line.startswith((b"MSG", b"HMSG")):
                words = line.split()
                body = await self._reader.readexactly(int(words[-1]) + 2)
                return body[int(words[-2]) if words[0] == b"HMSG" else 0 : -2]
            assert not line.startswith(b"-ERR"), line


async def store(port: int, stream: str, prefix: str) -> list[Stored]:
    """Store the corpus below a prefix of subjects, with a plain message behind each; return all that is stored."""
    async with RawClient(port) as client:
        numbered = enumerate(blocks())
        while some := list(itertools.islice(numbered, 200)):
            for number, header in some:
                client.publish(f"{prefix}k{number}", header, b"%d" % number)  # many are refused
                client.publish(f"{prefix}plain", block(), b"plain")
            await client.request(f"{prefix}plain", b"plain")
        info = json.loads(await client.request(f"$JS.API.STREAM.INFO.{stream}", b""))
        found: list[Stored] = []
        for seq in range(info["state"]["first_seq"], info["state"]["last_seq"] + 1):
            answer = json.loads(await client.request(f"$JS.API.STREAM.MSG.GET.{stream}", b'{"seq":%d}' % seq))
            if (message := answer.get("message")) is not None:
                raw = base64.b64decode(message.get("hdrs") or "")
                data = base64.b64decode(message.get("data") or "")
                found.append(Stored(seq, message["subject"], data, whole_headers(raw)))
        return found
