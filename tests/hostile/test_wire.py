"""A hostile server or network: whoever asks for TLS sends no secret without it, whatever the servers say.

Each case is a seed that decides how every connection goes. CI runs a sample; ``nox -s full -- hostile`` runs more. To repeat
one: ``JETSTREAM_EXT_HOSTILE='wire:7:tls scheme' python -m pytest tests/hostile/test_wire.py``.
"""

import asyncio
import contextlib
import json
import os
import shutil
import ssl
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Self

import pytest

sys.path.extend([str(Path(__file__).parent), str(Path(__file__).parents[1] / "safety_net")])

from fake_nats_server import GREETING, certificate
from library_cases import Case

from jetstream_ext.cli.connection import Settings, Target, connected

FULL = bool(os.environ.get("JETSTREAM_EXT_FULL"))
# A password and a token, which no server checks. No other process has them: its clients may reconnect to a port that was
# theirs, and is now one of a network here.
SECRETS = (f"correct-horse-{os.getpid()}", f"battery-staple-{os.getpid()}")
TIMEOUT = 1.0 if FULL else 0.5
AT_ONCE = 24
pytestmark = [
    pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl"),
    # nats-py leaves sockets after half a TLS handshake to the garbage collector.
    pytest.mark.filterwarnings("ignore:Exception ignored"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]

# How a connection goes before the client has authenticated.
GREETINGS = (
    "tls",
    "tls",
    "tls first",
    "clear",
    "available",
    "two greetings",
    "no handshake",
    "error",
    "nonce",
    "silent",
)
# How it goes after that.
CONTINUES = ("answer", "cut", "another info", "moved", "error")


class Network:
    """Two listeners with one script: every connection to either of them goes as the seed says."""

    def __init__(self, seed: int, tls: ssl.SSLContext) -> None:
        self.rng = Random(f"wire {seed}")
        self.clear = bytearray()
        """All bytes that were received without TLS."""
        self.secured = 0
        """How many connections became encrypted."""
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._listeners = [await asyncio.start_server(self._serve, "127.0.0.1", 0) for _ in range(2)]
        self.places = [f"127.0.0.1:{listener.sockets[0].getsockname()[1]}" for listener in self._listeners]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for listener in self._listeners:
            listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._talk(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError, ValueError):
            pass  # the client has ended the connection, or this network ends
        finally:
            self._tasks.discard(task)
            with contextlib.suppress(AttributeError):  # as in tests/conftest.py
                writer.transport.abort()

    def _info(self, **fields: object) -> bytes:
        more = {"connect_urls": self.places} if self.rng.random() < 0.5 else {}
        return b"INFO %b\r\n" % json.dumps(GREETING | more | fields).encode()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeting, secure = self.rng.choice(GREETINGS), False
        if greeting in ("tls", "tls first", "no handshake", "two greetings"):
            if greeting != "tls first":
                writer.write(self._info(tls_required=True))
            if greeting == "two greetings":
                writer.write(self._info())
            if greeting == "no handshake":
                writer.write(b"+OK\r\n" + self._info())
            else:
                await writer.start_tls(self._tls)
                secure, self.secured = True, self.secured + 1
            if greeting == "tls first":
                writer.write(self._info(tls_required=self.rng.random() < 0.5))
        elif greeting == "silent":
            pass
        else:
            fields: dict[str, object] = {"nonce": "abc", "auth_required": True} if greeting == "nonce" else {}
            writer.write(self._info(tls_available=greeting == "available", **fields))
            if greeting == "error":
                writer.write(b"-ERR 'Secure Connection - TLS Required'\r\n")
        while line := await reader.readline():
            if not secure:
                self.clear += line
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
            elif line.startswith((b"PUB", b"HPUB")):
                self.clear += b"" if secure else await reader.readexactly(int(line.split()[-1]) + 2)
                match self.rng.choice(CONTINUES):
                    case "cut":
                        return
                    case "another info":
                        writer.write(self._info(tls_required=False))
                    case "moved":
                        writer.write(self._info(ldm=True, connect_urls=self.places[::-1]))
                        return
                    case "error":
                        writer.write(b"-ERR 'Stale Connection'\r\n")
            await writer.drain()


WAYS: dict[str, Callable[[list[str], Path], Settings]] = {
    "tls scheme": lambda places, pem: Settings(url=",".join(f"tls://{place}" for place in places), ca=str(pem)),
    "one of two schemes": lambda places, pem: Settings(url=f"tls://{places[0]},nats://{places[1]}", ca=str(pem)),
    "authority": lambda places, pem: Settings(url=",".join(places), ca=str(pem)),
    "certificate": lambda places, pem: Settings(url=places[0], cert=str(pem), key=str(pem), ca=str(pem)),
    "first": lambda places, pem: Settings(url=places[0], ca=str(pem), tls_first=True),
    "unknown authority": lambda places, pem: Settings(url=f"tls://{places[0]}"),
}


def chosen() -> list[Case]:
    if repeated := os.environ.get("JETSTREAM_EXT_HOSTILE"):
        return [case for case in map(Case.parse, repeated.split(",")) if case.call in WAYS]
    seeds = range(200 if FULL else 3)
    return [Case("wire", seed * len(WAYS) + n, way) for seed in seeds for n, way in enumerate(WAYS)]


async def run_case(case: Case, pem: Path) -> tuple[str, int]:
    """Return what is wrong in a case, and how many connections became encrypted."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pem)
    async with Network(case.seed, tls) as network:
        settings = WAYS[case.call](network.places, pem)
        secrets = {"user": "alice", "password": SECRETS[0]} if case.seed % 2 else {"token": SECRETS[1]}
        with contextlib.suppress(
            Exception
        ):  # the network may refuse in every way; the command line's words are elsewhere
            async with asyncio.timeout(4 * TIMEOUT), connected(Target(replace(settings, **secrets), TIMEOUT)) as js:
                for _ in range(3):
                    with contextlib.suppress(Exception):
                        await js.account_info()
        shown = [secret for secret in SECRETS if secret.encode() in network.clear]
        return f"{case}: sent in the clear: {bytes(network.clear)!r}" if shown else "", network.secured


async def test_no_secret_is_sent_without_tls_if_it_was_asked_for(tmp_path: Path) -> None:
    loop, pem, waiting = asyncio.get_running_loop(), certificate(tmp_path), iter(chosen())
    loop.set_exception_handler(lambda *_: None)  # nats-py's tasks that end with half a handshake

    async def work() -> list[tuple[str, int]]:
        return [await run_case(case, pem) for case in waiting]

    found = list(chain.from_iterable(await asyncio.gather(*(work() for _ in range(AT_ONCE)))))
    assert not any(wrong for wrong, _ in found), "\n".join(wrong for wrong, _ in found)
    assert "JETSTREAM_EXT_HOSTILE" in os.environ or any(secured for _, secured in found)


async def test_the_campaign_finds_a_secret_on_the_wire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WAYS, "none", lambda places, pem: Settings(url=places[0]))
    pem = certificate(tmp_path)
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    found = await asyncio.gather(*(run_case(Case("wire", seed, "none"), pem) for seed in range(5)))
    assert any("sent in the clear" in wrong for wrong, _ in found)
