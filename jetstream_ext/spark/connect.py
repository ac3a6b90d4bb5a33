"""One nats-py connection from the options of a query: references become secrets here, and nowhere earlier."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import ssl
from pathlib import Path
from typing import Any, Protocol

import nats.errors
from nats.aio.client import Client
from nats.js import JetStreamContext

from jetstream_ext.errors import JetStreamExtError
from jetstream_ext.spark.given import OptionError
from jetstream_ext.spark.options import ConnectionOptions

# Short enough for a read to survive a server's restart within its own timeout.
_RECONNECT_WAIT = 0.25
# What people may put where a file's name belongs: an nkey seed, a token, a credentials or PEM file's content.
_SECRET = re.compile(r"^\s*S[A-Z2-7]{50,}\s*$|-----|[\r\n\0]|.{1025}")


class ConnectError(JetStreamExtError):
    """No connection to any of the servers; the text has the last server's reason."""


class RefusedError(JetStreamExtError):
    """A request went unanswered because the credentials have no permission for it."""


class Where(Protocol):
    """Options that say where the JetStream is."""

    @property
    def domain(self) -> str | None:
        """Its domain."""

    @property
    def api_prefix(self) -> str | None:
        """The prefix of its API."""


class WorkerConnection:
    """A connection, and what the server last refused on it.

    The server does not answer a request it has no permission for: it says so on the side, and the request times out.
    """

    def __init__(self, options: ConnectionOptions) -> None:
        self.client: Client = Client()
        self.refusal: str | None = None
        self._options = options
        self._last_error: Exception | None = None
        self._connecting = False

    @property
    def usable(self) -> bool:
        """Whether it is connected now."""
        return bool(self.client.is_connected)

    def context(self, options: Where) -> JetStreamContext:
        """Return the JetStream context for a domain or an API prefix."""
        where = {"prefix": options.api_prefix} if options.api_prefix else {"domain": options.domain}
        return self.client.jetstream(timeout=self._options.timeout, **where)

    async def open(self, name: str) -> None:
        """Connect, trying for as long as the options' timeout allows.

        Args:
            name: What operators see in the server's list of connections.

        Raises:
            ConnectError: No server could be reached, or it refused the credentials.
            OptionError: A file or variable that an option names is not there.
        """
        options = self._options
        arguments = _arguments(options)
        self._connecting = True
        try:
            async with asyncio.timeout(options.timeout):
                await self.client.connect(
                    servers=list(options.servers),
                    name=name,
                    error_cb=self._on_error,
                    connect_timeout=options.timeout,  # type: ignore[arg-type] # an int by its annotation only
                    reconnect_time_wait=_RECONNECT_WAIT,  # type: ignore[arg-type]
                    max_reconnect_attempts=-1,
                    **arguments,
                )
        except TimeoutError:
            await self.client.close()
            raise ConnectError(
                f"no connection to {', '.join(options.servers)} within {options.timeout:g} s: {self._last_error}"
            ) from self._last_error
        except (nats.errors.Error, OSError) as error:
            await self.client.close()
            raise ConnectError(f"no connection to {', '.join(options.servers)}: {error}") from error
        except BaseException:
            await self.client.close()
            raise
        finally:
            self._connecting = False

    async def close(self) -> None:
        """Close it; safe to call twice."""
        await self.client.close()

    async def _on_error(self, error: Exception) -> None:
        """Take what nats-py reports (called by nats-py)."""
        self._last_error = error
        text = str(error).lower()
        if "permissions violation" in text:
            self.refusal = str(error)
        if self._connecting and ("authorization" in text or "authentication" in text):
            # nats-py would try again for a minute; the credentials will not get better. Raised through its connect().
            raise error


def _arguments(options: ConnectionOptions) -> dict[str, Any]:
    """Return the arguments of `Client.connect` for credentials and TLS."""
    arguments: dict[str, Any] = {}
    if options.creds_file or options.nkey_file:
        _require_nkeys("credsFile" if options.creds_file else "nkeyFile")
    if options.creds_file:
        path = _file("credsFile", options.creds_file)
        if b"BEGIN NATS USER JWT" not in path.read_bytes():  # nats-py would look for it for ever
            raise OptionError("option 'credsFile': the file is no NATS credentials file (it holds no user JWT)")
        arguments["user_credentials"] = str(path)
    if options.nkey_file:
        arguments["nkeys_seed"] = str(_file("nkeyFile", options.nkey_file))
    if options.user:
        arguments["user"] = options.user
    if options.password_env:
        arguments["password"] = _secret("passwordEnv", options.password_env)
    if options.token_env:
        arguments["token"] = _secret("tokenEnv", options.token_env)
    if options.tls_ca or options.tls_cert:
        arguments["tls"] = _tls(options)
    return arguments


def _tls(options: ConnectionOptions) -> ssl.SSLContext:
    authority = None if options.tls_ca is None else _file("tlsCa", options.tls_ca)
    try:
        context = ssl.create_default_context(cafile=authority)
    except ssl.SSLError as error:
        raise OptionError(f"option 'tlsCa': the file holds no certificates: {error}") from None
    if options.tls_cert and options.tls_key:
        certificate, key = _file("tlsCert", options.tls_cert), _file("tlsKey", options.tls_key)
        try:
            # With no password of its own OpenSSL would ask for that of an encrypted key on the terminal, and wait.
            context.load_cert_chain(certificate, key, password="")
        except ssl.SSLError as error:
            raise OptionError(
                f"options 'tlsCert', 'tlsKey': they are no certificate and its (unencrypted) key: {error}"
            ) from None
    return context


def _require_nkeys(option: str) -> None:
    if importlib.util.find_spec("nkeys") is None:
        raise OptionError(f"option {option!r}: it needs the package nkeys; pip install 'nats-py[nkeys]' on every node")


def _secret(option: str, variable: str) -> str:
    value = os.environ.get(variable)
    if not value:
        # Not the name: people put the secret itself where its name belongs.
        raise OptionError(
            f"option {option!r}: it must name an environment variable that is set on the driver and on every "
            "executor (for executors: spark.executorEnv.<NAME>)"
        )
    return value


def _file(option: str, name: str) -> Path:
    if _SECRET.search(name):
        raise OptionError(f"option {option!r}: it holds the secret itself; give the path of the file that holds it")
    path = Path(name)
    if not path.is_file() and path.name == name:
        from pyspark import SparkFiles  # only here: what was shipped with spark.files or --files

        path = Path(SparkFiles.get(name))
    if not path.is_file():
        raise OptionError(f"option {option!r}: there is no file {name!r} on this node; ship it with --files")
    return path
