"""The JSON API: finds the handler of a request, and puts the answer together."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import gojson
from .checks import required_level_met
from .errors import ApiError, api_error

if TYPE_CHECKING:
    from .connections import Message
    from .jetstream import JetStream
    from .stream import Stream

__all__ = ["Api", "Request", "UnansweredError", "decode_optional", "decode_request", "is_empty"]

_TYPE = "io.nats.jetstream.api.v1."
_NOT_OURS = ("$JS.API.DIRECT.GET.", "$JS.API.CONSUMER.MSG.NEXT.")


@dataclass(frozen=True, slots=True)
class Request:
    """A request of the API; `names` are the tokens of its subject that are names."""

    jetstream: JetStream
    names: list[str]
    message: Message
    strict: bool = True
    afterwards: list[Callable[[], None]] = field(default_factory=list)

    @property
    def payload(self) -> bytes:
        """The JSON."""
        return self.message.payload

    def after(self, call: Callable[[], None]) -> None:
        """Do something when the answer is on its way."""
        self.afterwards.append(call)

    def stream(self) -> Stream:
        """Return the stream that is named first.

        Raises:
            ApiError: There is none.
        """
        stream = self.jetstream.streams.get(self.names[0])
        if stream is None:
            raise api_error(10059)
        return stream


@dataclass(frozen=True, slots=True)
class Route:
    """A kind of request: its answer's type, its handler, and what a refusal shows besides the error."""

    type: str
    handler: Callable[[Request], dict[str, Any]]
    on_error: tuple[tuple[str, Any], ...] = ()
    strict: bool = True
    """Whether a field that it does not know is an error."""


PAGED = (("total", 0), ("offset", 0), ("limit", 0))


def decode_request(request: Request, schema: gojson.Struct) -> dict[str, Any]:
    """Return the decoded payload.

    Raises:
        ApiError: It does not decode.
    """
    if not request.payload and request.jetstream.profile.ttl:
        return {}
    try:
        return gojson.decode(request.payload, schema, strict=request.strict and request.jetstream.profile.strict_json)
    except gojson.JsonError as error:
        raise api_error(10025, error) from None


def decode_optional(request: Request, schema: gojson.Struct) -> dict[str, Any]:
    """Return the decoded payload where one may be left out.

    Raises:
        ApiError: It does not decode.
    """
    given = is_object(request.payload) if request.jetstream.profile.ttl else not is_empty(request.payload)
    return decode_request(request, schema) if given else {}


def is_object(payload: bytes) -> bool:
    """Whether a payload begins like a JSON object or array; anything else counts as none."""
    return payload.lstrip(b" \t\r\n")[:1] in (b"{", b"[")


def is_empty(payload: bytes) -> bool:
    """Whether a payload is nothing, or an empty JSON object."""
    if not payload:
        return True
    try:
        return bool(json.loads(payload) == {})
    except (ValueError, RecursionError):
        return False


class Api:
    """Answers on `$JS.API`. A subject that nobody knows is swallowed without an answer, as on a real server."""

    def __init__(self, jetstream: JetStream) -> None:
        from . import api_consumers, api_streams

        self._jetstream = jetstream
        self.requests: int = 0
        self.refused: int = 0
        self._routes: dict[tuple[str, ...], Route] = {("INFO",): Route("account_info", self._account)}
        self._routes.update(api_streams.ROUTES)
        self._routes.update(api_consumers.routes(jetstream.profile))
        jetstream.respond_to("$JS.API.>", self._handle)

    def _handle(self, message: Message) -> bool:
        if message.subject.startswith(_NOT_OURS):
            return False
        tokens = message.subject.split(".")[2:]
        for size in (3, 2, 1):
            key = tuple(tokens[:size])
            route = self._routes.get(key)
            if route is not None and _fits(key, len(tokens) - size):
                self._answer(route, Request(self._jetstream, tokens[size:], message, route.strict))
                return True
        return True

    def _answer(self, route: Route, request: Request) -> None:
        profile = self._jetstream.profile
        self.requests += 1
        answer: dict[str, Any] = {"type": f"{_TYPE}{route.type}_response"}
        try:
            if profile.required_level and not required_level_met(profile, request.message.header):
                raise api_error(10185)
            answer |= route.handler(request)
        except ApiError as error:
            self.refused += 1
            answer |= {"error": error.as_json(), **dict(route.on_error)}
        except UnansweredError:
            return
        if request.message.reply:
            self._jetstream.send(request.message.reply, gojson.dumps(answer))
        for call in request.afterwards:
            call()

    def _account(self, request: Request) -> dict[str, Any]:
        streams = self._jetstream.streams.values()
        level = self._jetstream.profile.api_level
        used = {"file": 0, "memory": 0}
        for stream in streams:
            used[stream.config["storage"]] += stream.store.bytes
        unlimited = ("max_memory", "max_storage", "max_streams", "max_consumers", "max_ack_pending")
        return {
            "memory": used["memory"],
            "storage": used["file"],
            "reserved_memory": 0,
            "reserved_storage": self._reserved() % (1 << 64),
            "streams": len(self._jetstream.streams),
            "consumers": sum(len(stream.consumers) for stream in streams),
            "limits": {
                **dict.fromkeys(unlimited, -1),
                "memory_max_stream_bytes": -1,
                "storage_max_stream_bytes": -1,
                "max_bytes_required": False,
            },
            "api": {**({"level": level} if level else {}), "total": self.requests, "errors": self.refused},
        }

    def _reserved(self) -> int:
        # 2.10 counts a stream without a limit as -1 byte.
        if self._jetstream.profile.ttl:
            return 0
        return sum(
            stream.config["max_bytes"]
            for stream in self._jetstream.streams.values()
            if stream.config["storage"] == "file"
        )


class UnansweredError(Exception):
    """Say that the server sends no answer at all."""


def _fits(key: tuple[str, ...], names: int) -> bool:
    """Whether a subject has as many names after the words of its kind as it should."""
    if key == ("INFO",) or key in (("STREAM", "NAMES"), ("STREAM", "LIST")):
        return names == 0
    if key == ("CONSUMER", "CREATE"):
        return names >= 1
    return names == (1 if key[0] == "STREAM" or key[1] in ("NAMES", "LIST") else 2)
