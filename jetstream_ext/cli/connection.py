"""The connection of a command: from options, environment variables and contexts of the ``nats`` tool."""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import click
import nats.errors
import orjson
from click.core import ParameterSource
from nats.js import JetStreamContext
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from jetstream_ext.cli.options import CONNECTION, cli_option, complete_files
from jetstream_ext.cli.times import duration
from jetstream_ext.client.api import Api, stream_state
from jetstream_ext.client.connection import Context
from jetstream_ext.own_client import OwnClient, login, may_be_secret, tls_context
from jetstream_ext.protocol.advice import CONNECTION_OPTIONS
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.servers import Servers, parse_servers
from jetstream_ext.text import get_logger, log_state

_Command = Callable[..., None]

_log = get_logger("cli")

_FIRST_ANSWER: Final = 1.0  # seconds; a server without JetStream says so at once
_DEFAULT_URL: Final = "nats://127.0.0.1:4222"
# A Windows certificate asks for TLS, too.
_UNSUPPORTED: Final = ("nsc", "user_jwt", "socks_proxy", "windows_cert_store", "windows_ca_certs_match")
_CREDENTIALS: Final = ("user", "password", "token", "creds", "nkey")


def _attributes(variable: str | None, metavar: str, help_text: str) -> dict[str, Any]:
    found = {"envvar": variable, "show_envvar": variable is not None, "metavar": metavar, "help": help_text}
    return found | ({"shell_complete": complete_files} if metavar == "FILE" else {})


def _option(flags: str, variable: str | None, metavar: str, help_text: str) -> str:
    """Return a field of `Settings` that is also an option of the command line, unset by default."""
    return field(default="", metadata={"flags": flags.split(), "attributes": _attributes(variable, metavar, help_text)})


@dataclass(frozen=True, slots=True, repr=False)  # its repr would show the secrets
class Settings:
    """Where and as which user to connect, with the field names of a context's file; an empty text is unset."""

    url: str = _option("--server -s", "NATS_URL", "URL", "Servers, comma-separated.")
    creds: str = _option("--creds", "NATS_CREDS", "FILE", "Credentials file of the user.")
    nkey: str = _option("--nkey", "NATS_NKEY", "FILE", "File with the user's nkey seed.")
    user: str = _option("--user", "NATS_USER", "NAME", "User name, or a token if there is no password.")
    password: str = _option("--password", "NATS_PASSWORD", "TEXT", "Password.")
    token: str = _option("--token", "NATS_TOKEN", "TEXT", "Token.")
    cert: str = _option("--tlscert", "NATS_CERT", "FILE", "TLS certificate of this client.")
    key: str = _option("--tlskey", "NATS_KEY", "FILE", "Private key of the TLS certificate.")
    ca: str = _option("--tlsca", "NATS_CA", "FILE", "TLS certificates to trust.")
    jetstream_domain: str = _option("--js-domain", None, "NAME", "JetStream domain.")
    jetstream_api_prefix: str = _option("--js-api-prefix", None, "PREFIX", "Prefix of the JetStream API.")
    inbox_prefix: str = ""
    tls_first: bool = False

    def over(self, other: Settings) -> Settings:
        """Return these settings, with those of `other` where these are unset."""
        merged = {each.name: getattr(self, each.name) or getattr(other, each.name) for each in fields(self)}
        if self.user or self.token or self.creds or self.nkey:  # never mix the credentials of two users
            merged |= {name: getattr(self, name) for name in _CREDENTIALS}
        return Settings(**merged)


def context_folder() -> Path:
    """Return the folder of the `nats` tool's configuration."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "nats"


def _selected_context() -> str:
    """Return the name of the context that ``nats context select`` selected, or an empty text."""
    try:
        return (context_folder() / "context.txt").read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""


def _load_context(name: str) -> Settings:
    """Read a context, given by its name or by the absolute path of its file."""
    path = Path(name)
    if not path.is_absolute():
        if path.name != name:
            raise click.ClickException(f"{name!r} is not a valid context name")
        path = context_folder() / "context" / f"{name}.json"
    try:
        found = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise click.ClickException(f"context {name!r} does not exist ({path})") from None
    except orjson.JSONDecodeError as error:
        raise click.ClickException(f"context {name!r} is not JSON ({path}): {error}") from None
    if not isinstance(found, dict):
        raise click.ClickException(f"context {name!r} is not a JSON object ({path})")
    values: dict[str, Any] = {}
    for each in fields(Settings):
        values[each.name] = found.get(each.name) or each.default
        if not isinstance(values[each.name], type(each.default)):
            wanted = "true or false" if isinstance(each.default, bool) else "a string"
            raise click.ClickException(f"context {name!r}: {each.name!r} is not {wanted} ({path})")
    for unsupported in _UNSUPPORTED:
        if found.get(unsupported):
            raise click.ClickException(f"context {name!r} uses {unsupported!r}, which this tool does not support")
    return Settings(**values)


@dataclass(frozen=True, slots=True)
class Target:
    """The servers and settings of a command's connection."""

    settings: Settings
    timeout: float
    server_given: bool = False  # on the command line
    context_given: str = ""

    @property
    def servers(self) -> Servers:
        try:
            return parse_servers(self.settings.url or _DEFAULT_URL)
        except ValueError as error:
            raise click.ClickException(str(error)) from None

    @property
    def shown(self) -> str:
        """The servers without passwords and tokens."""
        return ", ".join(self.servers.urls)

    @property
    def options(self) -> str:
        """The options for another command to the same servers, as the command line gave them, without credentials."""
        given = {
            "--server": ",".join(self.servers.urls) if self.server_given else "",
            "--context": self.context_given,
            "--js-domain": self.settings.jetstream_domain,
            "--js-api-prefix": self.settings.jetstream_api_prefix,
        }
        return shlex.join(part for option, value in given.items() if value for part in (option, value))


def connection_options(*, url_argument: bool = False) -> Callable[[_Command], _Command]:
    """Return a decorator that adds the connection options to a command, which gets their `Target` as `where`.

    Args:
        url_argument: Whether the server may also be given as an argument.
    """
    default = f"that of the selected context, or {_DEFAULT_URL}"

    def decorate(function: _Command) -> _Command:
        @functools.wraps(function)
        def command(*, context: str, timeout: float, url_alias: str = "", **arguments: Any) -> None:
            if url_alias:
                arguments["url"] = _one_server(url_alias, arguments["url"])
            source = click.get_current_context().get_parameter_source
            server_given = bool(url_alias) or source("url") is ParameterSource.COMMANDLINE
            context_given = context if source("context") is ParameterSource.COMMANDLINE else ""
            names = [each.name for each in fields(Settings) if each.name in arguments]
            given = Settings(**{name: arguments.pop(name) for name in names})
            function(where=Target(_in_context(given, context), timeout, server_given, context_given), **arguments)

        options = [
            cli_option(
                *each.metadata["flags"],
                each.name,
                group=CONNECTION,
                default="",
                show_default=default if each.name == "url" else None,
                **each.metadata["attributes"],
            )
            for each in fields(Settings)
            if each.metadata
        ]
        wait = _attributes("NATS_TIMEOUT", "DURATION", "How long to wait for each answer.")
        options += [
            cli_option(
                "--tlsfirst",
                "tls_first",
                is_flag=True,
                group=CONNECTION,
                help="Start TLS before the server sends its INFO.",
            ),
            cli_option(
                "--context",
                group=CONNECTION,
                default="",
                shell_complete=_complete_contexts,
                **_attributes("NATS_CONTEXT", "NAME", "Context of the nats tool."),
            ),
            cli_option("--timeout", group=CONNECTION, type=duration, default="5s", show_default=True, **wait),
        ]
        if url_argument:
            options.append(click.argument("url_alias", metavar="[URL]", default=""))
        for add in reversed(options):
            command = add(command)
        return command

    return decorate


def target_of(ctx: click.Context) -> Target:
    """Return what `connection_options` would pass to the command, from a command line that may be incomplete.

    Raises:
        click.ClickException: The context cannot be read.
    """
    given = {each.name: ctx.params[each.name] for each in fields(Settings) if ctx.params.get(each.name)}
    settings = _in_context(Settings(**given), ctx.params.get("context") or "")
    return Target(settings, ctx.params.get("timeout") or _FIRST_ANSWER)


def _in_context(given: Settings, context: str) -> Settings:
    """Return the settings with those of the context where they are unset.

    Without a server and a context it is the selected one. That one is never used for a named server, because its
    credentials are meant for its own server.
    """
    if not given.url:
        context = context or _selected_context()
    return given.over(_load_context(context)) if context else given


def _complete_contexts(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    found = (path.stem for path in (context_folder() / "context").glob("*.json"))
    return sorted(name for name in found if name.startswith(incomplete))


def _one_server(argument: str, option: str) -> str:
    """Return the server of the argument URL; the option may repeat it, and NATS_URL may name another one."""
    given = click.get_current_context().get_parameter_source("url")
    if given is ParameterSource.COMMANDLINE and option != argument:
        raise click.UsageError("--server and the argument URL name different servers; give only one of them")
    return argument


@asynccontextmanager
async def connected(target: Target) -> AsyncIterator[JetStreamContext]:
    """Connect for the duration of a block; the first attempt tries every server once."""
    settings, client, servers = target.settings, OwnClient(), target.servers
    arguments = _arguments(settings, servers)
    arguments |= {"name": "jetstream-ext", "shown": target.shown, "tries": len(servers.urls)}
    CONNECTION_OPTIONS.set(target.options)
    await client.open(servers.urls, timeout=target.timeout, **arguments)
    prefix, domain = settings.jetstream_api_prefix, settings.jetstream_domain or None
    where = {"prefix": prefix} if prefix else {"domain": domain}
    try:
        yield client.jetstream(timeout=target.timeout, **where)
    finally:
        await client.close_quickly()


async def check_jetstream(js: JetStreamContext, stream: str) -> None:
    """Raise ServiceUnavailableError if no server serves requests about a stream, for calls that would retry for a while.

    That is so without JetStream, or if the domain differs, but not during an election: then servers answer, or do not, and
    the call has its patience. The request is one that such a call sends as well, so it needs no other permission.
    """
    try:
        await Api(Context(js), _FIRST_ANSWER, lookup=True).ask(f"STREAM.INFO.{stream}")
    except ServiceUnavailableError:
        raise
    except (nats.errors.Error, APIError) as error:
        log_state(_log, f"stream {stream!r}", "not looked up", error, error=error)


async def existing_stream(js: JetStreamContext, name: str, advice: str = "") -> StreamState:
    """Return a stream's state, or raise an error with `advice` if the stream does not exist."""
    try:
        return await stream_state(Context(js), name)
    except NotFoundError as error:
        raise click.ClickException(f"stream {name!r} does not exist{advice}") from error


def _arguments(settings: Settings, servers: Servers) -> dict[str, Any]:
    """Return the arguments of `Client.connect` for credentials, TLS and the inbox prefix."""
    arguments: dict[str, Any] = {}
    if settings.user and settings.password:  # in the nats tool's order of precedence
        arguments |= {"user": settings.user, "password": settings.password}
    elif settings.creds:
        arguments |= login(_file("the credentials", settings.creds), jwt=True)
    elif settings.nkey:
        arguments |= login(_file("the nkey", settings.nkey))
    elif token := settings.token or settings.user:
        arguments["token"] = token
    elif servers.password is not None:
        arguments |= {"user": servers.user, "password": servers.password}
    elif servers.user:
        arguments["token"] = servers.user
    if settings.inbox_prefix:
        arguments["inbox_prefix"] = settings.inbox_prefix
    if bool(settings.cert) != bool(settings.key):
        raise click.ClickException("give --tlscert and --tlskey together")
    if settings.ca or settings.cert or settings.tls_first:
        arguments["tls"] = tls_context(
            _file("the certificates to trust", settings.ca) if settings.ca else None,
            _file("the certificate", settings.cert) if settings.cert else None,
            _file("its key", settings.key) if settings.key else None,
        )
        arguments["tls_handshake_first"] = settings.tls_first
    return arguments


def _file(what: str, name: str) -> Path:
    if may_be_secret(name):
        raise click.ClickException(f"{what}: give the path of the file, not what it holds")
    path = Path(name).expanduser()
    if not path.is_file():
        raise click.ClickException(f"{what}: file {name!r} does not exist")
    return path
