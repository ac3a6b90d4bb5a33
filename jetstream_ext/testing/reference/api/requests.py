"""Requests of the JSON API: the routes, decoding, and pages of lists."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..jetstream import HostedStream, JetStream
from ..releases import Profile
from ..router import Message
from ..wire import gojson
from ..wire.errors import api_error

__all__ = ["EMPTY_PAGE", "Request", "Route", "UnansweredError", "is_empty", "page"]

EMPTY_PAGE = (("total", 0), ("offset", 0), ("limit", 0))


class UnansweredError(Exception):
    """The server sends no answer to the request."""


@dataclass(frozen=True, slots=True)
class Route:
    """One kind of request."""

    type: str
    """The type of the response, without prefix and suffix."""
    handler: Callable[[Request], dict[str, Any]]
    names: int = 1
    """How many names the subject ends with; -1 is one or more."""
    on_error: tuple[tuple[str, Any], ...] = ()
    """Further fields of a refusal."""
    strict: bool = True
    """Whether an unknown field is an error."""

    def takes(self, names: list[str]) -> bool:
        """Whether the number of names is right."""
        return len(names) >= 1 if self.names < 0 else len(names) == self.names


@dataclass(frozen=True, slots=True)
class Request:
    """A request of the JSON API; `names` are the tokens of its subject after those of the route."""

    jetstream: JetStream
    route: Route
    names: list[str]
    message: Message
    afterwards: list[Callable[[], None]] = field(default_factory=list)
    """Called once the answer is sent."""

    @property
    def payload(self) -> bytes:
        """The JSON text."""
        return self.message.payload

    @property
    def profile(self) -> Profile:
        """The release of the server."""
        return self.jetstream.context.profile

    def find_stream(self) -> HostedStream:
        """Return the stream that the first name refers to.

        Raises:
            ApiError: The stream does not exist.
        """
        hosted = self.jetstream.streams.get(self.names[0])
        if hosted is None:
            raise api_error(10059)
        return hosted

    def decode(self, schema: gojson.Struct) -> dict[str, Any]:
        """Decode the payload.

        Raises:
            ApiError: The payload does not match the schema.
        """
        if not self.payload and self.profile.empty_request_is_default:
            return {}
        try:
            return gojson.decode(self.payload, schema, strict=self.route.strict and self.profile.strict_json)
        except gojson.JsonError as error:
            raise api_error(10025, error) from None

    def decode_optional(self, schema: gojson.Struct) -> dict[str, Any]:
        """Decode the payload of a request that needs none.

        Raises:
            ApiError: The payload does not match the schema.
        """
        if self.profile.empty_request_is_default:
            given = self.payload.lstrip(b" \t\r\n")[:1] in (b"{", b"[")
        else:
            given = not is_empty(self.payload)
        return self.decode(schema) if given else {}

    def require_empty(self) -> None:
        """Check that the request has no payload.

        Raises:
            ApiError: It has one.
        """
        if not is_empty(self.payload):
            raise api_error(10038)


def is_empty(payload: bytes) -> bool:
    """Whether a payload is empty, or an empty JSON object."""
    if not payload:
        return True
    try:
        return bool(json.loads(payload) == {})
    except (ValueError, RecursionError):
        return False


def page(request: dict[str, Any], names: list[str], limit: int) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that describe one page of a list, and the names on it."""
    offset = min(max(request.get("offset", 0), 0), len(names))
    return {"total": len(names), "offset": offset, "limit": limit}, names[offset : offset + limit]
