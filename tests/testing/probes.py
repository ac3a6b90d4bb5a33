"""Probes for the tests of real servers: sockets and HTTP requests."""

import contextlib
import socket
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs prctl(PR_SET_PDEATHSIG) or /proc")
on_posix = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals or fork")


@contextlib.contextmanager
def dialled(url: str) -> Iterator[socket.socket]:
    """A bare connection, past the server's greeting."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as sock:
        assert sock.recv(4096).startswith(b"INFO ")
        yield sock


def answers(sock: socket.socket) -> bool:
    sock.sendall(b"PING\r\n")
    return b"PONG" in sock.recv(4096)


def closed_by_peer(sock: socket.socket) -> bool:
    try:
        return sock.recv(4096) == b""
    except ConnectionResetError:
        return True


def refused(url: str) -> bool:
    try:
        with dialled(url):
            return False
    except ConnectionRefusedError:
        return True
