"""From what the user gave (options, environment, contexts of the `nats` tool) to a connection."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import click
import nats.errors
import orjson
from nats.aio.client import Client
from nats.js import JetStreamContext

from jetstream_ext.errors import BadSubjectError
from jetstream_ext.protocol.subjects import check_name


@dataclass(frozen=True, slots=True)
class Settings:
    """Where to connect, and as whom. The names are those of a context's file; an empty text is nothing.

    Attributes:
        url: One server or several, separated by commas.
        user: With `password`; alone, it is a token.
        password: Its password.
        token: A token.
        creds: A file with a user's JWT and seed.
        nkey: A file with an nkey's seed.
        cert: A certificate to show to the server.
        key: The key of `cert`.
        ca: The certificates to trust.
        jetstream_domain: The domain of the JetStream.
        jetstream_api_prefix: The prefix of its API.
        inbox_prefix: The prefix of the subjects that answers come on.
        tls_first: Whether TLS comes before the server's first word.
    """

    url: str = ""
    user: str = ""
    password: str = ""
    token: str = ""
    creds: str = ""
    nkey: str = ""
    cert: str = ""
    key: str = ""
    ca: str = ""
    jetstream_domain: str = ""
    jetstream_api_prefix: str = ""
    inbox_prefix: str = ""
    tls_first: bool = False

    def over(self, other: Settings) -> Settings:
        """Return these, and those of `other` where these are nothing."""
        mine = {field.name: getattr(self, field.name) or getattr(other, field.name) for field in fields(self)}
        if self.user or self.token or self.creds or self.nkey:  # whoever is named here is not also somebody else
            mine |= {name: getattr(self, name) for name in ("user", "password", "token", "creds", "nkey")}
        return Settings(**mine)


def context_folder() -> Path:
    """Return where the `nats` tool keeps its settings."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "nats"


def selected_context() -> str | None:
    """Return the name of the context that ``nats context select`` chose."""
    try:
        return (context_folder() / "context.txt").read_text(encoding="utf-8", errors="replace").strip() or None
    except FileNotFoundError:
        return None


def load_context(name: str) -> Settings:
    """Read a context.

    Args:
        name: Its name, or the absolute path of its file.

    Raises:
        click.ClickException: There is no such context, or its file is not one.
    """
    if Path(name).is_absolute():
        path = Path(name)
    else:
        if not name or Path(name).name != name:
            raise click.ClickException(f"{name!r} is no name of a context")
        path = context_folder() / "context" / f"{name}.json"
    try:
        found = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise click.ClickException(f"there is no context {name!r} ({path})") from None
    except orjson.JSONDecodeError as error:
        raise click.ClickException(f"context {name!r} is not JSON ({path}): {error}") from None
    if not isinstance(found, dict):
        raise click.ClickException(f"context {name!r} is not a JSON object ({path})")
    given: dict[str, Any] = {field.name: found.get(field.name) or field.default for field in fields(Settings)}
    for field in fields(Settings):
        if not isinstance(given[field.name], type(field.default)):
            wanted = "true or false" if isinstance(field.default, bool) else "a text"
            raise click.ClickException(f"context {name!r}: {field.name!r} is not {wanted} ({path})")
    for unsupported in ("nsc", "user_jwt", "socks_proxy"):
        if found.get(unsupported):
            raise click.ClickException(f"context {name!r} uses {unsupported!r}, which this tool does not support")
    return Settings(**given)


_F = TypeVar("_F", bound=Callable[..., Any])

_DEFAULT_PORT: Final = 4222
_GOODBYE: Final = 2.0
_DEFAULT_URL: Final = "nats://127.0.0.1:4222"
_SEED: Final = re.compile(r"BEGIN USER NKEY SEED-+\s+(\S+)")
_USER_INFO: Final = re.compile(r"(?:(?<=://)|^(?!\w+://)).*@")
_DURATION: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|m|h|$)")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
_SCHEMES: Final = frozenset({"nats", "tls", "ws", "wss"})


@dataclass(frozen=True, slots=True)
class Target:
    """What a command connects to."""

    settings: Settings
    timeout: float

    @property
    def shown(self) -> str:
        """The servers as they may be shown: without passwords and tokens."""
        return ", ".join(map(without_secrets, self.servers))

    @property
    def servers(self) -> list[str]:
        """The servers' URLs.

        Raises:
            click.ClickException: One is none.
        """
        urls = [url.strip() for url in (self.settings.url or _DEFAULT_URL).split(",") if url.strip()]
        return [_checked(url) for url in urls]


def connection_options(*, server: bool = True) -> Callable[[_F], _F]:
    """Return a decorator that adds the options of a connection, which arrive as the argument `target`.

    Args:
        server: Whether the server is an option; else it is the command's argument `url`.
    """
    flags: list[tuple[str, str | None, str, str]] = [
        ("--creds", "NATS_CREDS", "FILE", "User credentials."),
        ("--nkey", "NATS_NKEY", "FILE", "User nkey seed."),
        ("--user", "NATS_USER", "NAME", "User name; without a password, a token."),
        ("--password", "NATS_PASSWORD", "TEXT", "Password."),
        ("--token", "NATS_TOKEN", "TEXT", "Token."),
        ("--tlscert", "NATS_CERT", "FILE", "TLS certificate of this client."),
        ("--tlskey", "NATS_KEY", "FILE", "Its key."),
        ("--tlsca", "NATS_CA", "FILE", "TLS certificates to trust."),
        ("--js-domain", None, "NAME", "JetStream domain."),
        ("--js-api-prefix", None, "PREFIX", "Prefix of the JetStream API."),
        ("--context", "NATS_CONTEXT", "NAME", "Context of the nats tool."),
    ]
    if server:
        flags.insert(0, ("--server", "NATS_URL", "URL", f"Servers, comma-separated.  [default: {_DEFAULT_URL}]"))

    def decorate(function: _F) -> _F:
        for flag, variable, metavar, text in reversed(flags):
            option = click.option(
                flag,
                envvar=variable,
                show_envvar=variable is not None,
                metavar=metavar,
                help=text,
                default="",
                expose_value=False,
                callback=_keep,
            )
            function = option(function)
        function = click.option(
            "--tlsfirst",
            is_flag=True,
            expose_value=False,
            callback=_keep,
            help="TLS before the server's greeting (handshake_first).",
        )(function)
        return click.option(
            "--timeout",
            envvar="NATS_TIMEOUT",
            type=_seconds,
            metavar="DURATION",
            default="5s",
            show_default=True,
            show_envvar=True,
            help="How long to wait for each answer.",
        )(function)

    return decorate


def target(ctx: click.Context, timeout: float, url: str | None = None, *, selected: bool = True) -> Target:
    """Return what the options of a command say.

    A context is used if it is named. The selected one is used if no server is given: its credentials are meant for
    its own server.

    Args:
        ctx: The command's context.
        timeout: Seconds for each answer.
        url: The server, where that is no option.
        selected: Whether the selected context counts.

    Raises:
        click.ClickException: There is no such context.
    """
    given: dict[str, Any] = ctx.meta.get(__name__, {})
    settings = Settings(
        url=url or given.get("server", ""),
        user=given["user"],
        password=given["password"],
        token=given["token"],
        creds=given["creds"],
        nkey=given["nkey"],
        cert=given["tlscert"],
        key=given["tlskey"],
        ca=given["tlsca"],
        jetstream_domain=given["js_domain"],
        jetstream_api_prefix=given["js_api_prefix"],
        tls_first=given["tlsfirst"],
    )
    name = given["context"] or (None if settings.url or not selected else selected_context())
    return Target(settings.over(load_context(name)) if name else settings, timeout)


@asynccontextmanager
async def connected(target: Target) -> AsyncIterator[JetStreamContext]:
    """Connect for the length of a block; every server is tried once.

    Raises:
        click.ClickException: No connection; the text says why.
    """
    settings, servers = target.settings, target.servers
    arguments = _arguments(settings)
    if any(url.startswith("ws") for url in servers) and importlib.util.find_spec("aiohttp") is None:
        raise click.ClickException("WebSockets need the package aiohttp: pip install 'nats-py[aiohttp]'")
    if not settings.tls_first:
        await _check_tls([url for url in servers if "tls" in arguments or url.startswith("tls:")], target.timeout)
    client = Client()
    failures: list[Exception] = []
    connecting = True

    async def on_error(error: Exception) -> None:
        if connecting:
            failures.append(error)
            if len(failures) >= len(servers) or "authorization" in str(error).lower():
                raise error  # else nats-py would try again for two minutes

    try:
        try:
            async with asyncio.timeout(target.timeout):
                await client.connect(
                    servers=servers,
                    name="jetstream-ext",
                    error_cb=on_error,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=0.25,  # type: ignore[arg-type] # an int by its annotation only
                    **arguments,
                )
        except TimeoutError:
            last = f": {failures[-1]}" if failures and str(failures[-1]) else ": no answer"
            raise click.ClickException(f"no connection to {target.shown} within {target.timeout:g} s{last}") from None
        except (nats.errors.Error, OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise click.ClickException(f"no connection to {target.shown}: {reason}") from error
        connecting = False
        where = (
            {"prefix": settings.jetstream_api_prefix}
            if settings.jetstream_api_prefix
            else {"domain": settings.jetstream_domain or None}
        )
        yield client.jetstream(timeout=target.timeout, **where)
    finally:
        # A server that refuses does not wait for a goodbye, and after half a TLS handshake nats-py waits for ever.
        # The last two are asyncio's, in the first releases of Python 3.12 and 3.13, when much was still to be written.
        with suppress(OSError, TypeError, AttributeError):
            async with asyncio.timeout(_GOODBYE):
                await client.close()


async def _check_tls(urls: list[str], timeout: float) -> None:
    """Refuse servers that offer no TLS: nats-py would send them the credentials in the clear.

    Raises:
        click.ClickException: A server offers none.
    """
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme.startswith("ws"):
            continue  # the scheme decides, not the server
        try:
            async with asyncio.timeout(timeout):
                reader, writer = await asyncio.open_connection(parts.hostname, parts.port or _DEFAULT_PORT)
                try:
                    info = orjson.loads((await reader.readline()).partition(b"INFO ")[2])
                finally:
                    writer.close()
        except (OSError, ValueError):
            continue  # nats-py has words for what is wrong there
        if not (isinstance(info, dict) and info.get("tls_required")):
            raise click.ClickException(f"{without_secrets(url)} does not offer TLS, and TLS was asked for")


def check_stream(name: str) -> None:
    """Refuse what can be the name of no stream: a server does not answer a question about it.

    Raises:
        click.ClickException: It is empty, or has dots, wildcards or white space.
    """
    try:
        check_name(name, "stream name")
    except BadSubjectError as error:
        raise click.ClickException(str(error)) from None


def _seconds(text: str) -> float:
    """Return seconds, also as the nats tool writes them: 5s, 500ms, 1m30s."""
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(text))
    if not _DURATION.sub("", text) and 0 < seconds < float("inf"):
        return seconds
    raise click.BadParameter(f"{text!r} is no duration, such as 5s or 500ms")


def _keep(ctx: click.Context, param: click.Parameter, value: str | bool) -> None:
    ctx.meta.setdefault(__name__, {})[str(param.name)] = value


def _checked(url: str) -> str:
    """Return a server's URL in full."""
    full = url if "://" in url else f"nats://{url}"
    try:
        parts = urlsplit(full)
        port = parts.port
    except ValueError as error:
        raise click.ClickException(f"{without_secrets(url)!r} is not the URL of a server: {error}") from None
    if parts.scheme not in _SCHEMES or not parts.hostname or port == 0:
        raise click.ClickException(f"{without_secrets(url)!r} is not the URL of a server, such as {_DEFAULT_URL}")
    return full


def without_secrets(url: str) -> str:
    """Return a URL, which may be a broken one, without user, password and token."""
    return _USER_INFO.sub("", url)


def _arguments(settings: Settings) -> dict[str, Any]:
    """Return the arguments of `Client.connect` for credentials and TLS."""
    arguments: dict[str, Any] = {}
    if (settings.creds or settings.nkey) and importlib.util.find_spec("nkeys") is None:
        raise click.ClickException("credentials and nkeys need the package nkeys: pip install 'nats-py[nkeys]'")
    if settings.user and settings.password:  # the order of the nats tool
        arguments |= {"user": settings.user, "password": settings.password}
    elif settings.creds:
        path = _file("the credentials", settings.creds)
        text = path.read_text(encoding="utf-8", errors="replace")
        if "BEGIN NATS USER JWT" not in text:  # nats-py would look for it for ever
            raise click.ClickException(f"{path}: no credentials file (it holds no user JWT)")
        found = _SEED.search(text)
        _check_seed(path, found[1] if found else "")
        arguments["user_credentials"] = str(path)
    elif settings.nkey:
        path = _file("the nkey", settings.nkey)
        seed = path.read_text(encoding="utf-8", errors="replace").strip()
        _check_seed(path, seed)
        arguments["nkeys_seed_str"] = seed
    elif token := settings.token or settings.user:
        arguments["token"] = token
    if settings.inbox_prefix:
        arguments["inbox_prefix"] = settings.inbox_prefix
    if settings.ca or settings.cert or settings.key or settings.tls_first:
        arguments["tls"] = _tls(settings)
        arguments["tls_handshake_first"] = settings.tls_first
    return arguments


def _check_seed(path: Path, seed: str) -> None:
    """Refuse what is no seed: nats-py would end in the middle of connecting."""
    import nkeys  # an extra of nats-py

    try:
        nkeys.from_seed(bytearray(seed.encode()))
    except Exception:  # whatever a broken text leads to
        raise click.ClickException(f"{path}: it holds no nkey seed of a user") from None


def _tls(settings: Settings) -> ssl.SSLContext:
    authority = str(_file("the certificates to trust", settings.ca)) if settings.ca else None
    if bool(settings.cert) != bool(settings.key):
        raise click.ClickException("a TLS certificate and its key go together")
    try:
        context = ssl.create_default_context(cafile=authority)
        if settings.cert:
            context.load_cert_chain(_file("the certificate", settings.cert), _file("its key", settings.key))
    except ssl.SSLError as error:
        raise click.ClickException(f"TLS: the files are not what they should be: {error}") from error
    return context


def _file(what: str, name: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_file():
        raise click.ClickException(f"{what}: there is no file {name!r}")
    return path
