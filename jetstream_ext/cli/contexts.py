"""The contexts of the `nats` tool (ADR-21): named connections in files."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click
import orjson


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


def folder() -> Path:
    """Return where the `nats` tool keeps its settings."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "nats"


def selected() -> str | None:
    """Return the name of the context that ``nats context select`` chose."""
    try:
        return (folder() / "context.txt").read_text(encoding="utf-8", errors="replace").strip() or None
    except FileNotFoundError:
        return None


def load(name: str) -> Settings:
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
        path = folder() / "context" / f"{name}.json"
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
