"""What a hostile server says instead of, or beside, what an honest one would say.

An attack changes what passes on one connection, through a `Link`. `ATTACKS` maps the name of each to its class; the seed
decides everything else about it, so that a case can be repeated.
"""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Protocol

from frame_proxy import Frame

MARK = "HOSTILE"
"""Stands in every text of the campaign that holds something unprintable."""
SGR = "\x1b[8;5;91m"
"""A colour that no library for terminals asks for."""
TEXTS = (
    f"\x1b]0;{MARK}\x07",
    f"{MARK}\x9b2J",
    f"{MARK}\u202egnp.exe",
    f"{MARK}\u2028\u2029line",
    f"{SGR}{MARK}",
    f"{MARK}\x00\x08\x7f",
    f"{MARK}\r\n\r\n-ERR 'x'\r\n",
    f"{MARK}[bold]rich[/] {{0}} %s",
    f"{MARK}\x1b" + "x" * 50_000,
)
NUMBERS = (
    *("-1", "0", "1", "-0.0", "1.5", "1e308", "1e999", "-1e999", "NaN", "null", "true", '"1"', '"+7"', '"1_000"'),
    *(str(1 << bits) for bits in (31, 53, 62, 63, 64, 70)),
    f"-{1 << 63}",
    "9" * 5_000,  # longer than Python converts by default
)
THINGS = (
    *("null", "true", "[]", "{}", '""', "[null]", "[[]]", '[{"a":[]}]', '{"":{}}'),
    "[" * 10_000 + "]" * 10_000,
    '{"a":' * 10_000 + "1" + "}" * 10_000,
    r'"\ud800"',
    '"' + "a" * 100_000 + '"',
)
HEADER_NUMBERS = (
    *("", " ", "-1", "0", "1", "+7", "1_000", "1e3", "0x7", "\u0663", "\uff15", "NaN", "7 7", "007"),
    *(str(1 << bits) for bits in (31, 53, 63, 64, 70)),
    "9" * 5_000,
)
STATUSES = (
    *(b"100", b"100 Idle Heartbeat", b"204 EOB", b"204", b"400", b"404 Message Not Found", b"408 Bad Request", b"409"),
    *(b"413 Too Many Results", b"429", b"500", b"503", b"999", b"-1", b"0", b"2e2", b"20", b"2040", b""),
    b"9" * 4_000,
    f"404 {TEXTS[0]}".encode(),
    f"500 {TEXTS[1]}".encode(),
    "404 \ud800".encode(errors="surrogatepass"),
)
CODES = (10003, 10008, 10013, 10023, 10037, 10049, 10054, 10058, 10059, 10060, 10071, 10076, 10077, 10118, 10122, 10164)
CODES += (*range(10165, 10168), *range(10174, 10180), 10185, *range(10198, 10212), 0, -1, 1, 99999, 1 << 31, 1 << 64)


class Link(Protocol):
    """A connection of a client, as an attack sees it."""

    subscriptions: dict[str, str]
    """The client's subscriptions: sid to subject."""
    asked: dict[str, str]
    """The subjects of the client's newest messages, by where they want their answers; oldest first."""
    fed: int
    """How many bytes were sent to the client."""

    async def send(self, data: bytes) -> None:
        """Send to the client; wait while it does not read."""

    def cut(self) -> None:
        """End the connection."""

    def sid_of(self, subject: str) -> str | None:
        """Return the client's subscription that takes a subject."""


class Attack:
    """Passes everything on. Subclasses lie.

    Attributes:
        name: Its key in `ATTACKS`.
        seed: What decides the rest.
        rng: The source of the decisions.
    """

    endless = False
    """Whether it may feed a client for as long as it listens, with what looks like progress."""

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.seed = seed
        self.rng = Random(f"{name} {seed}")
        self._first = self.rng.choice((1, 1, 1, 1, 2, 2, 3, 4, 6, 9))
        self._always = self.rng.random() < 0.6
        self._seen = 0

    def __str__(self) -> str:
        return f"{self.name}:{self.seed}"

    async def start(self, link: Link) -> None:
        """Act when the campaign begins, and when a client connects after that."""

    async def info(self, line: bytes) -> bytes:
        """Return the first line of a connection that is made after the campaign has begun."""
        return line

    async def message(self, link: Link, frame: Frame) -> None:
        """Act instead of a message of the honest server."""
        self._seen += 1
        if self._seen == self._first or (self._seen > self._first and self._always):
            await self.lie(link, frame)
        else:
            await link.send(frame.delivery())

    async def lie(self, link: Link, frame: Frame) -> None:
        await link.send(frame.delivery())


def raw(**fields: str) -> str:
    """Return a JSON object whose values are given as they are written, also wrongly."""
    return "{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"


def with_payload(frame: Frame, payload: bytes) -> Frame:
    return Frame(frame.subject, frame.reply, frame.header, payload, frame.sid)


# -- what answers say ---------------------------------------------------------------------------------------------------


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Return every place in a JSON value, as a container and an index."""
    for index in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, index
        yield from _places(value[index])


class Json(Attack):
    """Replaces or removes values in answers that are JSON."""

    def choices(self, old: Any) -> tuple[str, ...]:
        if isinstance(old, bool | int | float):
            return NUMBERS + THINGS[:6]
        return THINGS + NUMBERS[:4]

    async def lie(self, link: Link, frame: Frame) -> None:
        try:
            value = json.loads(frame.payload)
        except ValueError:
            await link.send(frame.delivery())
            return
        written: list[str] = []
        for _ in range(self.rng.choice((1, 1, 2, 5))):
            places = [(where, index) for where, index in _places(value) if index in self.wanted(where)]
            if not places:
                break
            where, index = self.rng.choice(places)
            if self.rng.random() < self.removes:
                del where[index]
            else:
                written.append(self.rng.choice(self.choices(where[index])))
                where[index] = f"@{len(written) - 1}@"
        text = json.dumps(value)
        for n, replacement in enumerate(written):
            text = text.replace(f'"@{n}@"', replacement)
        await link.send(with_payload(frame, text.encode()).delivery())

    removes = 0.2

    def wanted(self, where: Any) -> Any:
        return where if isinstance(where, dict) else range(len(where))


_PARSED = {"type", "created", "ts", "time", "first_ts", "last_ts", "retention", "discard", "storage", "compression"}


class Texts(Json):
    """Puts escape sequences into every kind of text: strings in JSON, header values, payloads."""

    removes = 0.0

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(name, seed)
        self._parsed = self.rng.random() < 0.2  # also what is no text for a reader: times and types

    async def info(self, line: bytes) -> bytes:
        text = self.rng.choice(TEXTS)
        info = json.loads(line.removeprefix(b"INFO "))
        names = self.rng.sample(("version", "server_name", "cluster", "server_id", "domain", "go"), 3)
        return b"INFO " + json.dumps(info | {name: f"{info.get(name, '')}{text}" for name in names}).encode() + b"\r\n"

    def wanted(self, where: Any) -> Any:
        keys = where if isinstance(where, dict) else range(len(where))
        return [key for key in keys if isinstance(where[key], str) and (self._parsed or key not in _PARSED)]

    def choices(self, old: Any) -> tuple[str, ...]:
        text = self.rng.choice(TEXTS)
        return json.dumps(text), json.dumps(f"{old}{text}")

    async def lie(self, link: Link, frame: Frame) -> None:
        if frame.header and self.rng.random() < 0.7:
            text = self.rng.choice(TEXTS).replace("\r", "").replace("\n", "").encode()
            lines = frame.header.split(b"\r\n")
            skipped = (
                () if self._parsed else (b"Nats-Sequence", b"Nats-Time-Stamp", b"Nats-Num", b"Nats-Last", b"Nats-UpTo")
            )
            places = [n for n, line in enumerate(lines) if b": " in line and not line.startswith(skipped)]
            if places:
                n = self.rng.choice(places)
                name, _, value = lines[n].partition(b": ")
                lines[n] = name + b": " + (value + text if self.rng.random() < 0.5 else text)
            frame = Frame(frame.subject, frame.reply, b"\r\n".join(lines), frame.payload, frame.sid)
        if frame.payload.startswith(b"{"):
            await super().lie(link, frame)
        else:
            await link.send(with_payload(frame, frame.payload + self.rng.choice(TEXTS).encode()).delivery())


class Refusal(Attack):
    """Refuses requests with known and unknown codes."""

    async def lie(self, link: Link, frame: Frame) -> None:
        error: Any = {"code": self.rng.choice((400, 404, 500, 503, -1, 0, 1 << 64, 408, 429))}
        error["err_code"] = self.rng.choice(CODES)
        error["description"] = self.rng.choice((*TEXTS, "no", ""))
        if self.rng.random() < 0.3:
            error = json.loads(self.rng.choice(("null", "[]", '"no"', "0", '{"code":"404"}', '{"err_code":10071.5}')))
        answer = {"type": "io.nats.jetstream.api.v1.error", "stream": "X", "seq": 0, "error": error}
        await link.send(Frame(frame.subject, "", b"", json.dumps(answer).encode(), frame.sid).delivery())


class Garbage(Attack):
    """Answers with something that is no answer."""

    async def lie(self, link: Link, frame: Frame) -> None:
        payload = self.rng.choice(
            (b"", b"\x00", b"{", b"null", b"[]", b"0", b'""', b"+OK", b"-ERR", b"\xff" * 1_000, self.rng.randbytes(500))
        )
        if self.rng.random() < 0.1:
            payload = THINGS[self.rng.randrange(9, len(THINGS))].encode(errors="surrogatepass")
        header = self.rng.choice((b"", frame.header))
        await link.send(Frame(frame.subject, "", header, payload, frame.sid).delivery())


class Headers(Attack):
    """Changes, removes, repeats or breaks headers."""

    async def lie(self, link: Link, frame: Frame) -> None:
        if not frame.header:
            block = b"NATS/1.0\r\nNats-Sequence: 1\r\nNats-Stream: X\r\nNats-Subject: a\r\n\r\n"
            await link.send(Frame(frame.subject, "", block, frame.payload, frame.sid).delivery())
            return
        lines = frame.header.rstrip(b"\r\n").split(b"\r\n")
        n = self.rng.randrange(1, len(lines)) if len(lines) > 1 else 0
        name, _, value = lines[n].partition(b":")
        match self.rng.choice(
            ("change", "change", "change", "remove", "repeat", "cut", "empty", "add", "swap", "lines")
        ):
            case "change":
                new = self.rng.choice((*HEADER_NUMBERS, *TEXTS)).replace("\r", "").replace("\n", "")
                lines[n] = name + b": " + new.encode()
            case "remove":
                del lines[n]
            case "repeat":
                lines.append(name + b": " + self.rng.choice((value.strip(), b"5")))
            case "add":
                lines += [b"X-%d: y" % n for n in range(5_000)]
            case "swap":
                names = (b"Nats-Num-Pending", b"Nats-Last-Sequence", b"Nats-Sequence", b"Nats-UpTo-Sequence", b"Status")
                lines[n] = self.rng.choice(names) + b": " + self.rng.choice(HEADER_NUMBERS).encode()
            case "lines":
                lines[n] = self.rng.choice(
                    (b": x", b"x", b"\xff\xfe: \xff", b"a b: c", b"\n", name + b":", b"x:" * 900)
                )
            case "empty":
                lines = [b"NATS/1.0"]
        header = b"\r\n".join(lines) + b"\r\n\r\n"
        if self.rng.random() < 0.1:
            header = self.rng.choice((header[: len(header) // 2], b"\r\n", b"NATS/2.0\r\n\r\n", b"NATS/1.0"))
        await link.send(Frame(frame.subject, frame.reply, header, frame.payload, frame.sid).delivery())


class Status(Attack):
    """Answers with a status, among them end-of-batch without what belongs to it."""

    async def lie(self, link: Link, frame: Frame) -> None:
        names = (b"Nats-Num-Pending", b"Nats-Last-Sequence", b"Nats-UpTo-Sequence", b"Description")
        some = [name for name in names if self.rng.random() < 0.4]
        numbers = [name + b": " + self.rng.choice(HEADER_NUMBERS).encode() for name in some]
        lines = [b"NATS/1.0 " + self.rng.choice(STATUSES), *numbers]
        await link.send(Frame(frame.subject, "", b"\r\n".join(lines) + b"\r\n\r\n", b"", frame.sid).delivery())


class Repeated(Attack):
    """Sends answers several times, late, or in another order."""

    async def lie(self, link: Link, frame: Frame) -> None:
        match self.rng.choice(("twice", "often", "late", "swapped")):
            case "twice":
                await link.send(frame.delivery() * 2)
            case "often":
                await link.send(frame.delivery() * 500)
            case "late":
                await link.send(b"PING\r\n")
                await asyncio.sleep(self.rng.choice((0.05, 0.2, 0.5)))
                await link.send(frame.delivery())
            case "swapped":
                kept, self._kept = self._kept, frame
                if kept is not None:
                    await link.send(frame.delivery() + kept.delivery())

    _kept: Frame | None = None


class Redirected(Attack):
    """Sends answers to other subjects and subscriptions, known and unknown."""

    async def lie(self, link: Link, frame: Frame) -> None:
        sids = ["0", "999999", str(1 << 63), *link.subscriptions]
        subject = self.rng.choice((frame.subject, f"{frame.subject}.x", "_INBOX.nobody", "a.b", "$JS.API.INFO"))
        frame = Frame(subject, self.rng.choice(("", "reply.x")), frame.header, frame.payload, self.rng.choice(sids))
        await link.send(frame.delivery())


class Silence(Attack):
    """Answers nothing."""

    async def lie(self, link: Link, frame: Frame) -> None:
        pass


class GrowingStream(Attack):
    """Counts on: in every answer the stream has more messages than in the one before."""

    endless = True

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(name, seed)
        self._step = self.rng.choice((1, 1000, 1 << 40))
        self._always = True

    async def lie(self, link: Link, frame: Frame) -> None:
        def grown(match: re.Match[bytes]) -> bytes:
            return match[1] + b"%d" % min((1 << 64) - 1, int(match[2]) + self._seen * self._step)

        payload = re.sub(rb'("(?:last_seq|messages|num_pending|total|num_subjects)":\s*)(\d+)', grown, frame.payload)
        header = re.sub(rb"(Nats-(?:Num-Pending|UpTo-Sequence): )(\d+)", grown, frame.header)
        await link.send(Frame(frame.subject, frame.reply, header, payload, frame.sid).delivery())


class SameAnswer(Attack):
    """Repeats its first answer to each kind of request, and counts on: every page of a list is the first one."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(name, seed)
        self._answers: dict[str, bytes] = {}

    async def message(self, link: Link, frame: Frame) -> None:
        self._seen += 1
        if not frame.header:
            payload = self._answers.setdefault(link.asked.get(frame.subject, ""), frame.payload)
            frame = with_payload(frame, re.sub(rb'("total":\s*)\d+', rb"\g<1>%d" % (self._seen << 20), payload))
        await link.send(frame.delivery())


# -- replies without an end ---------------------------------------------------------------------------------------------


class EndlessReply(Attack):
    """Goes on with the messages of a direct get, and never ends."""

    endless = True
    size: int

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(name, seed)
        self.size = self.rng.choice((0, 100, 60_000))
        self._step = self.rng.choice((1, 1, 1, 0, -1))
        self._pending = self.rng.choice((b"0", b"1", b"1000", b"18446744073709551615"))
        self._chained = self.rng.random() < 0.8

    async def lie(self, link: Link, frame: Frame) -> None:
        match = re.search(rb"Nats-Sequence: (\d+)", frame.header)
        if match is None or b"Nats-Num-Pending" not in frame.header:
            await link.send(frame.delivery())
            return
        await link.send(frame.delivery())
        seq, body = int(match[1]), bytes(self.size)
        header = re.sub(rb"Nats-Num-Pending: \d+", b"Nats-Num-Pending: " + self._pending, frame.header)
        while link.sid_of(frame.subject) is not None:
            some = []
            for _ in range(max(1, 60_000 // (self.size + 200))):
                last, seq = seq, max(1, seq + self._step)
                block = re.sub(rb"Nats-Sequence: \d+", b"Nats-Sequence: %d" % seq, header)
                if self._chained:
                    block = re.sub(rb"Nats-Last-Sequence: \d+", b"Nats-Last-Sequence: %d" % last, block)
                some.append(Frame(frame.subject, "", block, body, frame.sid).delivery())
            await link.send(b"".join(some))


class EndlessPages(Attack):
    """Ends every reply with the promise of more, and has no more."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(name, seed)
        self._always = True
        self._pending = self.rng.choice((b"1", b"5", b"1000", b"18446744073709551615"))
        self._drops = self.rng.random() < 0.5

    async def lie(self, link: Link, frame: Frame) -> None:
        header = re.sub(rb"Nats-Num-Pending: \d+", b"Nats-Num-Pending: " + self._pending, frame.header)
        if self._drops and b"Nats-Sequence:" in header:
            return
        await link.send(Frame(frame.subject, frame.reply, header, frame.payload, frame.sid).delivery())


class EndlessAnswers(Attack):
    """Repeats any answer without end."""

    endless = True

    async def lie(self, link: Link, frame: Frame) -> None:
        answer = frame.delivery() * max(1, 30_000 // (len(frame.payload) + 100))
        while link.sid_of(frame.subject) is not None:
            await link.send(answer)


# -- the protocol -------------------------------------------------------------------------------------------------------


class BrokenFrame(Attack):
    """Breaks the protocol instead of answering; then goes on, falls silent, or ends the connection."""

    async def lie(self, link: Link, frame: Frame) -> None:
        whole = frame.delivery()
        address = f"MSG {frame.subject} {frame.sid} ".encode()
        broken = self.rng.choice(
            (
                whole[: self.rng.randrange(1, len(whole))],
                address + b"%d\r\nx" % (1 << 63),
                address + b"-1\r\n\r\n",
                address + b"x\r\n\r\n",
                address + b"9" * 5_000 + b"\r\n\r\n",
                b"H" + address + b"100 10\r\nNATS/1.0\r\n\r\n",
                b"H" + address + b"%d %d\r\n" % (1 << 63, 1 << 63),
                b"MSG " + b"a" * 100_000,
                b"MSG a x 1\r\na\r\n",
                b"MSG\r\n",
                b"\r\n",
                b"\x00\xff\r\n",
                b"HELLO\r\n",
                b"-ERR\r\n",
                b"INFO {\r\n",
                b"+OK\nPING\n",
                b"GET / HTTP/1.1\r\n\r\n",
                b"x" * (1 << 20),
            )
        )
        await link.send(broken)
        match self.rng.choice(("close", "silence", "go on")):
            case "close":
                link.cut()
            case "silence":
                await asyncio.Event().wait()
            case "go on":
                await link.send(whole)


class EndlessBytes(Attack):
    """Begins a line or a message that never ends."""

    async def lie(self, link: Link, frame: Frame) -> None:
        address = f"MSG {frame.subject} {frame.sid}".encode()
        sizes = (str(1 << 63), str(1 << 40), "9" * 4_000)
        beginnings = (
            b"MSG ",
            b"-ERR '",
            b"INFO {",
            b"x",
            address,
            *(b"%b %b\r\n" % (address, n.encode()) for n in sizes),
        )
        await link.send(self.rng.choice(beginnings))
        while True:
            await link.send(b"x" * 60_000)


class Drip(Attack):
    """Sends one byte at a time."""

    async def lie(self, link: Link, frame: Frame) -> None:
        for byte in frame.delivery():
            await link.send(bytes([byte]))
            await asyncio.sleep(0.01)


class Cut(Attack):
    """Ends the connection instead of answering."""

    async def lie(self, link: Link, frame: Frame) -> None:
        link.cut()


class Errors(Attack):
    """Sends ``-ERR``, also to a client that connects."""

    def _error(self, subject: str) -> bytes:
        text = self.rng.choice(
            (
                *("Stale Connection", "Authorization Violation", "Authentication Timeout", "Slow Consumer", "", "'"),
                *("Maximum Payload Violation", "Invalid Subject", "Maximum Connections Exceeded", "Parser Error"),
                f"Authorization Violation {self.rng.choice(TEXTS)}",
                f'Permissions Violation for Publish to "{subject}"',
                'Permissions Violation for Publish to "$JS.API.>"',
                f'Permissions Violation for Subscription to "{subject}"',
                f'Permissions Violation for Publish to "{self.rng.choice(TEXTS)}"',
                f'Permissions Violation for Publish to "{"[" * 1000}"',
                *TEXTS,
            )
        )
        return b"-ERR '%b'\r\n" % text.encode()

    async def info(self, line: bytes) -> bytes:
        return line + (self._error("a") if self.rng.random() < 0.5 else b"")

    async def lie(self, link: Link, frame: Frame) -> None:
        await link.send(self._error(frame.subject))
        if self.rng.random() < 0.5:
            await link.send(frame.delivery())


class Flood(Attack):
    """Floods the client with lines that need no answer, or a short one."""

    async def lie(self, link: Link, frame: Frame) -> None:
        inbox = frame.subject.rpartition(".")[0] or frame.subject
        flood = self.rng.choice(
            (
                b"PING\r\n",
                b"PONG\r\n",
                b"+OK\r\n",
                b"MSG nobody 999999 1\r\nx\r\n",
                f"MSG {inbox}.unasked {frame.sid} 1\r\nx\r\n".encode(),
                b"-ERR 'Permissions Violation for Publish to \"x\"'\r\n",
                b'INFO {"max_payload":1048576}\r\n',
            )
        )
        await link.send(frame.delivery())
        await link.send(flood * (60_000 // len(flood)))
        for _ in range(self.rng.choice((0, 5))):
            await link.send(flood * (60_000 // len(flood)))


class SecondInfo(Attack):
    """Sends another INFO in the middle, then may end the connection so that the client connects again."""

    async def lie(self, link: Link, frame: Frame) -> None:
        await link.send(b"INFO " + hostile_info(self.rng) + b"\r\n")
        if self.rng.random() < 0.3:
            link.cut()
        else:
            await link.send(frame.delivery())


class NextInfo(Attack):
    """Ends the connection; the next ones begin with another INFO."""

    async def lie(self, link: Link, frame: Frame) -> None:
        link.cut()

    async def info(self, line: bytes) -> bytes:
        return self.rng.choice((b"INFO ", b"INFO ", b"INFO ", b"")) + hostile_info(self.rng) + b"\r\n"


def hostile_info(rng: Random) -> bytes:
    """Return the fields of an INFO."""
    text = json.dumps(rng.choice(TEXTS))
    info = {
        "server_id": '"F"',
        "version": '"2.15.1"',
        "proto": "1",
        "headers": "true",
        "max_payload": "1048576",
        "jetstream": "true",
        "api_lvl": "4",
    }
    changes = [(name, number) for name in ("max_payload", "proto", "client_id", "port") for number in NUMBERS]
    changes += [(name, thing) for name in ("max_payload", "connect_urls", "version", "nonce") for thing in THINGS]
    changes += [(name, text) for name in ("version", "server_name", "cluster", "server_id", "domain", "xkey", "ip")]
    changes += [
        ("connect_urls", urls) for urls in (f"[{text}]", '["::"]', '["127.0.0.1:1"]', '["a:b:c"]', '["[::1:4"]')
    ]
    changes += [("ldm", "true"), ("headers", "false"), ("jetstream", "false"), ("auth_required", "true")]
    changes += [("tls_available", "true"), ("nonce", '"abc"'), ("version", '"2"'), ("version", '"9.9.9-x+y"')]
    if rng.random() < 0.1:
        return rng.choice((*THINGS, "", "{", '"x"', "0")).encode(errors="surrogatepass")
    return raw(**(info | dict(rng.sample(changes, rng.choice((1, 1, 3)))))).encode(errors="surrogatepass")


class Unasked(Attack):
    """Sends messages that no one asked for to every subscription, before any answer."""

    async def start(self, link: Link) -> None:
        for sid, subject in list(link.subscriptions.items()):
            place = subject.replace("*", "x").replace(">", "x.y")
            for payload in (
                b"",
                b"{",
                b'{"type":"ack"}',
                b'{"error":{"code":500}}',
                self.rng.choice(THINGS[:8]).encode(),
            ):
                await link.send(Frame(place, "", b"", payload, sid).delivery())
            await link.send(Frame(place, "", b"NATS/1.0 503\r\n\r\n", b"", sid).delivery())

    async def lie(self, link: Link, frame: Frame) -> None:
        await self.start(link)
        await link.send(frame.delivery())


class ForgedBatches(Attack):
    """Forges the answers to batches: to whatever message of the client wanted an answer."""

    async def lie(self, link: Link, frame: Frame) -> None:
        number = self.rng.choice(NUMBERS)
        small = str(self.rng.randrange(0, 8))
        error = raw(code="400", err_code=str(self.rng.choice(CODES)), description='"no"')
        stream = {"stream": '"X"'}
        forged = self.rng.choice(
            (
                raw(type='"ack"', seq=small, msgs=number),
                raw(type='"ack"', seq=number, msgs=small),
                raw(type='"ack"'),
                raw(type='"gap"', last_seq=number, seq=small),
                raw(type='"gap"', last_seq=small, seq=number),
                raw(type='"err"', seq=small, error=error),
                raw(type='"err"', seq="1", error=number),
                raw(type=self.rng.choice((*THINGS, number))),
                raw(last_seq=number, seq=small),
                raw(**stream, seq=number, batch='"b"', count=small),
                raw(**stream, seq=small, batch=number, count=small),
                raw(**stream, seq="1", batch='"b"', count="1", error=error),
                raw(stream='""', seq=number),
            )
        ).encode(errors="surrogatepass")
        for subject in list(link.asked)[-3:]:
            if (sid := link.sid_of(subject)) is not None:
                await link.send(Frame(subject, "", b"", forged, sid).delivery())
        if self.rng.random() < 0.5:
            await link.send(frame.delivery())


ATTACKS: dict[str, Callable[[str, int], Attack]] = {
    "json": Json,
    "texts": Texts,
    "refusal": Refusal,
    "garbage": Garbage,
    "headers": Headers,
    "status": Status,
    "repeated": Repeated,
    "redirected": Redirected,
    "silence": Silence,
    "growing-stream": GrowingStream,
    "same-answer": SameAnswer,
    "endless-reply": EndlessReply,
    "endless-pages": EndlessPages,
    "endless-answers": EndlessAnswers,
    "broken-frame": BrokenFrame,
    "endless-bytes": EndlessBytes,
    "drip": Drip,
    "cut": Cut,
    "errors": Errors,
    "flood": Flood,
    "second-info": SecondInfo,
    "next-info": NextInfo,
    "unasked": Unasked,
    "forged-batches": ForgedBatches,
}


def attack(name: str, seed: int) -> Attack:
    """Return an attack by its name, or what is honest for ``"none"``."""
    return ATTACKS.get(name, Attack)(name, seed)
