"""The servers that a user of the command line or of Spark names, and the credentials in their URLs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote, urlsplit

_NEXT_URL: Final = re.compile(r",\s*(?=(?:nats|tls|wss?)://)", re.IGNORECASE)
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


@dataclass(frozen=True, slots=True)
class Servers:
    """Servers and the credentials that their URLs held.

    Attributes:
        urls: The URLs, each with its scheme and without credentials.
        user: The user, percent-decoded; None without one. Without a password, it is a token.
        password: The password, percent-decoded; None without one.
    """

    urls: tuple[str, ...]
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)


def parse_servers(text: str) -> Servers:
    """Parse comma-separated URLs, which may lack the scheme ``nats://``.

    Credentials end at the last ``@`` of a URL, and a comma in front of it starts another server only if a scheme follows.
    So a password may hold any character that is not percent-encoded.

    Raises:
        ValueError: A URL is invalid or ambiguous. The text repeats nothing that may be a part of the credentials.
    """
    urls: list[str] = []
    credentials: set[str] = set()
    for part in filter(None, map(str.strip, _NEXT_URL.split(text))):
        found = _SCHEME.match(part)
        scheme, rest = (found[1].lower(), part[found.end() :]) if found else ("nats", part)
        user_info, at, hosts = rest.rpartition("@")
        if "," in user_info and "@" in user_info:
            raise ValueError(
                "the credentials in a URL hold both ',' and '@', so it is not clear where they end; "
                "write each server with its scheme, and percent-encode the credentials (%2C for ',', %40 for '@')"
            )
        if scheme in ("ws", "wss") and "/" in user_info:
            raise ValueError(
                f"a URL with {scheme}:// has '/' in front of '@', so it is not clear where its credentials end; "
                "percent-encode them (%2F for '/'), or the path (%40 for '@')"
            )
        if user_info:
            credentials.add(user_info)
        named = [host for host in map(str.strip, hosts.split(",")) if host]
        for host in named or [""] * bool(found or at):
            if problem := _problem(scheme, host):
                # Without an "@", the text may be credentials whose host is missing.
                which = f"server {len(urls) + 1} ({host!r})" if at else f"server {len(urls) + 1}"
                raise ValueError(f"the URL of {which} is invalid: {problem}")
            urls.append(f"{scheme}://{host}")
            scheme = "nats"  # of those that follow without a scheme
    if not urls:
        raise ValueError("it is empty; give at least one URL such as nats://host:4222")
    if len(credentials) > 1:
        raise ValueError("the URLs have different credentials; one connection is for one user")
    user, colon, password = "".join(credentials).partition(":")
    names = _unquoted(user), _unquoted(password)
    if None in names:
        raise ValueError("the credentials in a URL are not UTF-8 once they are percent-decoded")
    return Servers(
        urls=tuple(dict.fromkeys(urls)), user=names[0] if credentials else None, password=names[1] if colon else None
    )


def _unquoted(text: str) -> str | None:
    """Return a percent-decoded text, or None; the codec's error would hold the text."""
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        return None


def _problem(scheme: str, host: str) -> str:
    """Return what is wrong with a URL, or an empty text."""
    if scheme not in ("nats", "tls", "ws", "wss"):
        return "its scheme must be nats, tls, ws or wss"
    try:
        parts = urlsplit(f"{scheme}://{host}")
        valid = bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    return "" if valid else "it needs a host, and a port from 1 to 65535 if any"
