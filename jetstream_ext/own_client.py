"""The connection that a command or a Spark process opens itself: its servers, its credentials and TLS."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import nats.errors
from nats.aio.client import Client

from jetstream_ext.client.base_connection import cancel
from jetstream_ext.client.connection import abort, has_internals, is_encrypted, tasks_of
from jetstream_ext.errors import JetStreamExtError
from jetstream_ext.text import get_logger, log_state

_log: Final = get_logger("client")

_CLOSE_TIMEOUT: Final = 2.0
# Short enough for a read to survive a server's restart within its own timeout.
_RECONNECT_WAIT: Final = 0.25
_SEED: Final = re.compile(r"BEGIN USER NKEY SEED-+\s+(\S+)")
# An nkey seed, the content of a credentials or PEM file, or a token that is longer than the name of a file can be.
_SECRET: Final = re.compile(r"^\s*S[A-Z2-7]{50,}\s*$|-----|[\r\n\0]|[^/]{256}|.{1025}")
# What `OwnClient` needs to send no credentials without TLS: methods of `Client` that it overrides, and attributes.
_OVERRIDDEN: Final = frozenset({"_close", "_connect_command", "_process_info"})
_TLS: Final[Mapping[str, Any]] = {
    "_current_server": object,
    "_pending": list,
    "_pending_data_size": int,
    "_server_pool": list,
    "_transport": object,
}


class OwnClient(Client):
    """A connection that this package opens itself.

    Attributes:
        opened: Whether `open` has succeeded.
        refusal: The last permission that the server refused; a request without permission gets no reply.
    """

    def __init__(self) -> None:
        super().__init__()
        self.opened: bool = False
        self.refusal: str | None = None
        self._failures: list[Exception] = []
        self._tries: float = math.inf
        self._needs_tls: bool = False
        self._closing: bool = False
        if (parser := getattr(self, "_ps", None)) is not None:
            parser.parse = _reconnecting(parser.parse)

    async def open(
        self, servers: Sequence[str], *, shown: str, timeout: float, tries: float = math.inf, **arguments: Any
    ) -> None:
        """Connect to one of `servers` within `timeout` seconds and `tries` attempts; `shown` names them in errors.

        `arguments` are those of nats-py's ``connect``.

        Raises:
            JetStreamExtError: No server could be reached, or it refused the credentials. If a URL or the arguments ask for
                TLS, a server without it never gets the credentials, not even after a reconnect.
        """
        self._needs_tls = "tls" in arguments or any(url.lower().startswith(("tls:", "wss:")) for url in servers)
        if self._needs_tls and any(url.lower().startswith("ws:") for url in servers):
            raise JetStreamExtError(f"no connection to {shown}: ws:// has no TLS, but TLS was requested; use wss://")
        if self._needs_tls and not (vars(Client).keys() >= _OVERRIDDEN and has_internals(self, _TLS)):
            raise JetStreamExtError("this version of nats-py may send credentials without TLS; install nats-py 2.16")
        if any(url.lower().startswith("ws") for url in servers) and importlib.util.find_spec("aiohttp") is None:
            raise JetStreamExtError("WebSockets need the package aiohttp: pip install 'nats-py[aiohttp]'")
        self._tries = tries
        try:
            async with asyncio.timeout(timeout) as limit:
                await self.connect(
                    servers=list(servers),
                    connect_timeout=timeout / len(servers),  # type: ignore[arg-type] # only its annotation says int
                    error_cb=self._note,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=_RECONNECT_WAIT,  # type: ignore[arg-type]
                    **arguments,
                )
            self.opened = True
        except Exception as error:  # aiohttp and ssl have types of their own
            within, last = "", error
            if limit.expired():
                within, last = f" within {timeout:g} s", self._failures[-1] if self._failures else error
            why = str(last) or ("no answer" if isinstance(last, TimeoutError) else type(last).__name__)
            if _is_refused_login(last) and "timeout" not in str(last).lower():  # it may only have been too slow
                why += f"; the server refused {_login_of(arguments)}"
            raise JetStreamExtError(f"no connection to {shown}{within}: {why}") from error
        finally:
            if not self.opened:
                await self.close_quickly()

    async def close_quickly(self) -> None:
        """Close the connection within seconds; an error of that is logged, so that it hides no other error.

        nats-py fails to close after a refusal, and hangs after half a TLS handshake. asyncio raises TypeError or
        AttributeError in the first releases of Python 3.12 and 3.13 if much is still to be written.

        Cancellation: The socket is closed.
        """
        self._closing = True
        tasks = tasks_of(self)
        closing = asyncio.ensure_future(self.close())
        try:
            await asyncio.wait({closing}, timeout=_CLOSE_TIMEOUT)
            if closing.done() and not closing.cancelled() and closing.exception() is not None:
                log_state(_log, "connection", "not closed", closing.exception() or "")
            await cancel(closing, _CLOSE_TIMEOUT)
            # One may have lost the cancellation of nats-py's close(), which cancels none while it waits for the socket.
            tasks |= tasks_of(self)
            await asyncio.gather(*(cancel(task, _CLOSE_TIMEOUT) for task in tasks))
        finally:
            closing.cancel()
            for task in tasks:
                task.cancel()
            abort(self)

    async def _connect_to_server(self, server: Any) -> None:
        if self._closing:  # a reconnect task that nats-py has lost track of
            raise asyncio.CancelledError
        abort(self)  # nats-py leaves the socket of an attempt that failed open
        await super()._connect_to_server(server)

    async def _note(self, error: Exception) -> None:
        """Note an error that nats-py reports (called by nats-py)."""
        if "permissions violation" in str(error).lower():
            self.refusal = str(error)
        if self.opened:
            return
        self._failures.append(error)
        refused = _is_refused_login(error) or isinstance(error, JetStreamExtError)
        if refused or len(self._failures) >= self._tries:
            raise error  # through nats-py's connect(), which would retry for minutes

    async def _process_connect_init(self) -> None:
        try:
            await super()._process_connect_init()
        except (nats.errors.Error, OSError):
            raise
        except Exception as error:  # nats-py checks no field of INFO, and its reconnect task would end with this error
            raise nats.errors.Error(f"the server's first answers are malformed: {error}") from error

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        before = len(self._server_pool) if self._needs_tls else 0
        await super()._process_info(info, initial_connection)
        if self._needs_tls and not is_encrypted(self) and (current := self._current_server) is not None:
            # Anyone on the network may have sent this INFO. The servers that it names must have a certificate for the
            # host that the user named, or else they could be servers of an attacker with certificates of their own.
            for server in self._server_pool[before:]:
                server.tls_name = current.tls_name or current.uri.hostname

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        if self._needs_tls and not is_encrypted(self):  # nats-py would write the pending messages to this socket
            self._pending, self._pending_data_size = [], 0
        await super()._close(status, do_cbs)

    def _connect_command(self) -> bytes:
        # nats-py calls this before each CONNECT, also after a reconnect and for servers that it has discovered. It would
        # send the credentials without TLS to a server that does not require it.
        if self._needs_tls and not is_encrypted(self):
            raise JetStreamExtError("the server does not require TLS, but TLS was requested; nothing was sent")
        return super()._connect_command()


def _is_refused_login(error: Exception) -> bool:
    text = str(error).lower()
    return "authorization" in text or "authentication" in text


def _login_of(arguments: Mapping[str, Any]) -> str:
    """Return by what nats-py logs in with the arguments of its ``connect``, without any secret."""
    # A user name may be a token.
    kinds = {
        "user_credentials": "the credentials of {}",
        "nkeys_seed": "the nkey of {}",
        "password": "the user and password",
        "token": "the token",
        "user": "the user, which has no password",
    }
    found = next((name for name in kinds if arguments.get(name)), None)
    return "a login without credentials" if found is None else kinds[found].format(arguments[found])


def _reconnecting(parse: Callable[[bytes], Awaitable[None]]) -> Callable[[bytes], Awaitable[None]]:
    """Return nats-py's `parse`, after whose errors it connects again; it would log a traceback and read no more."""

    async def parse_or_reconnect(data: bytes = b"") -> None:
        try:
            await parse(data)
        except (nats.errors.Error, OSError):
            raise
        except Exception as error:  # whatever its code meets on malformed words of a server
            raise nats.errors.ProtocolError from error

    return parse_or_reconnect


def may_be_secret(name: str) -> bool:
    """Return whether a text may be a secret itself, given where the name of its file belongs; then never repeat it."""
    return _SECRET.search(name) is not None


def login(path: Path, *, jwt: bool = False) -> dict[str, Any]:
    """Return nats-py's arguments for a file with an nkey seed, or with `jwt` for a credentials file.

    Raises:
        JetStreamExtError: The file is not valid, on which nats-py would fail or search indefinitely, or nkeys is missing.
    """
    if importlib.util.find_spec("nkeys") is None:
        raise JetStreamExtError("credentials and nkeys need the package nkeys: pip install 'nats-py[nkeys]'")
    text = path.read_text(encoding="utf-8", errors="replace")
    if jwt:
        if "BEGIN NATS USER JWT" not in text:
            raise JetStreamExtError(f"{path} is not a credentials file: it has no user JWT")
        text = found[1] if (found := _SEED.search(text)) else ""
    import nkeys  # an extra of nats-py

    try:
        nkeys.from_seed(bytearray(text.strip().encode()))
    except Exception:  # nkeys raises many types
        raise JetStreamExtError(f"{path} has no nkey seed of a user") from None
    return {"user_credentials" if jwt else "nkeys_seed": str(path)}


def tls_context(authority: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext:
    """Return the TLS context for files in PEM format (None: the system's authorities, no certificate).

    Raises:
        JetStreamExtError: A file is not valid.
    """
    try:
        context = ssl.create_default_context(cafile=authority)
    except ssl.SSLError as error:
        raise JetStreamExtError(f"the TLS files are not valid: {authority} holds no certificates: {error}") from None
    if certificate is not None and key is not None:
        try:
            # Without a password, OpenSSL would prompt for the one of an encrypted key on the terminal.
            context.load_cert_chain(certificate, key, password="")
        except ssl.SSLError as error:
            raise JetStreamExtError(
                f"the TLS files are not valid: {certificate} and {key} are not a certificate and its unencrypted key: {error}"
            ) from None
    return context
