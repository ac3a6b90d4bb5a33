"""A fake server on its own threads, with scripted answers, that records the lines it receives without TLS."""

import contextlib
import json
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

GREETING = {
    "server_id": "F",
    "version": "2.15.1",
    "proto": 1,
    "headers": True,
    "max_payload": 1 << 20,
    "jetstream": True,
}


def certificate(folder: Path, name: str = "IP:127.0.0.1") -> Path:
    """Make a certificate for a name, as in a subjectAltName, with its key in the same file."""
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=127.0.0.1"
    files = "-keyout key.pem -out certificate.pem"
    subprocess.run(
        [*command.split(), "-addext", f"subjectAltName={name}", *files.split()],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    both = folder / "both.pem"
    both.write_bytes((folder / "key.pem").read_bytes() + (folder / "certificate.pem").read_bytes())
    return both


class FakeNatsServer:
    """Speaks just enough of the protocol for a client to connect.

    Args:
        info: Returns fields that replace those of `GREETING` in the INFO of the n-th connection (from 0).
        on_connect: Returns the bytes to send after CONNECT; None ends the connection.
        on_publish: Returns the answer to a publish on a subject; None sends none. It may raise to end the connection.
        chain: A file with certificate and key. A connection whose INFO has ``tls_required`` switches to TLS, or ends if
            there is no file.
    """

    def __init__(
        self,
        *,
        info: Callable[[int], Mapping[str, Any]] = lambda n: {},
        on_connect: Callable[[], bytes | None] = lambda: b"",
        on_publish: Callable[[str], bytes | None] = lambda subject: None,
        chain: Path | None = None,
    ) -> None:
        self._open: list[socket.socket] = []
        self.clear: list[bytes] = []
        """Every line that was received without TLS."""
        self.connections = 0
        self._info = info
        self._on_connect = on_connect
        self._on_publish = on_publish
        self._tls: ssl.SSLContext | None = None
        if chain is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(chain)
            self._tls.sslsocket_class = self._kept_sockets()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.place = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.url = f"nats://{self.place}"
        self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        for thread in self._threads:
            thread.join(5)

    def close(self) -> None:
        """End all connections, and accept no more."""
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _kept_sockets(self) -> type[ssl.SSLSocket]:
        opened = self._open

        class Kept(ssl.SSLSocket):
            """Is closed with the server even if `wrap_socket` raises: ssl leaves the socket open after a reset."""

            def __new__(cls, *arguments: Any, **named: Any) -> Self:
                self = super().__new__(cls, *arguments, **named)
                opened.append(self)
                return self

        return Kept

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.append(connection)
                self.connections += 1  # before the client gets its first bytes
                self._start(self._serve, connection, self.connections - 1)

    def _serve(self, connection: socket.socket, number: int) -> None:
        try:
            with connection:
                self._talk(connection, GREETING | dict(self._info(number)))
        except (OSError, ConnectionError):
            pass  # the client is gone

    def _talk(self, connection: socket.socket, info: dict[str, Any]) -> None:
        connection.sendall(b"INFO %b\r\n" % json.dumps(info).encode())
        secure = bool(info.get("tls_required"))
        if secure:
            if self._tls is None:
                connection.recv(1)
                return
            connection = self._tls.wrap_socket(connection, server_side=True)
        elif connection.recv(1, socket.MSG_PEEK) == b"\x16":
            return  # the client has begun a TLS handshake
        subscriptions: dict[str, str] = {}
        with connection, connection.makefile("rb") as lines:
            for line in lines:
                if not secure:
                    self.clear.append(line)
                words = line.decode(errors="replace").split()
                match words[0].upper() if words else "":
                    case "CONNECT":
                        answer = self._on_connect()
                        if answer is None:
                            return
                        connection.sendall(answer)
                    case "PING":
                        connection.sendall(b"PONG\r\n")
                    case "SUB":
                        subscriptions[words[1].rstrip("*>")] = words[-1]
                    case "PUB" | "HPUB":
                        lines.read(int(words[-1]) + 2)
                        payload = self._on_publish(words[1])
                        if payload is not None:
                            inbox = words[2]
                            sid = next(sid for prefix, sid in subscriptions.items() if inbox.startswith(prefix))
                            connection.sendall(
                                b"MSG %b %b %d\r\n%b\r\n" % (inbox.encode(), sid.encode(), len(payload), payload)
                            )
