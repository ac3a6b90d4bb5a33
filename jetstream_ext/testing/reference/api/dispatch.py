"""The JSON API: find the route of a request, call its handler, and send the answer."""

from typing import Any

from ..jetstream import JetStream
from ..router import Message
from ..wire import gojson
from ..wire.errors import ApiError, api_error
from . import consumers, streams
from .requests import Request, Route, UnansweredError

__all__ = ["Api"]

_PREFIX = "$JS.API."
_TYPE = "io.nats.jetstream.api.v1."
_HANDLED_ELSEWHERE = ("$JS.API.DIRECT.GET.", "$JS.API.CONSUMER.MSG.NEXT.")


class Api:
    """Answer requests on `$JS.API`. As on a real server, a request without a route gets no answer."""

    def __init__(self, jetstream: JetStream) -> None:
        self._jetstream = jetstream
        self._requests = 0
        self._refused = 0
        self._routes = {
            "INFO": Route("account_info", self._account_info, 0),
            **streams.ROUTES,
            **consumers.routes(jetstream.context.profile),
        }
        jetstream.context.router.respond_to("$JS.API.>", self._handle)

    def _handle(self, message: Message) -> bool:
        if message.subject.startswith(_HANDLED_ELSEWHERE):
            return False
        tokens = message.subject.removeprefix(_PREFIX).split(".")
        for size in (3, 2, 1):
            route, names = self._routes.get(".".join(tokens[:size])), tokens[size:]
            if route is not None and route.takes(names):
                self._answer(Request(self._jetstream, route, names, message))
                break
        return True

    def _answer(self, request: Request) -> None:
        context, route = self._jetstream.context, request.route
        self._requests += 1
        answer: dict[str, Any] = {"type": f"{_TYPE}{route.type}_response"}
        try:
            if context.profile.required_level and not context.profile.meets_required_level(request.message.header):
                raise api_error(10185)
            answer |= route.handler(request)
        except ApiError as error:
            self._refused += 1
            answer |= {"error": error.as_json(), **dict(route.on_error)}
        except UnansweredError:
            return
        if request.message.reply:
            context.send(request.message.reply, gojson.dumps(answer))
        for call in request.afterwards:
            call()

    def _account_info(self, request: Request) -> dict[str, Any]:
        hosted = self._jetstream.streams.values()
        profile = request.profile
        used = {"file": 0, "memory": 0}
        reserved = 0
        for each in hosted:
            config = each.stream.config
            used[config["storage"]] += each.stream.store.bytes
            if profile.reserves_unlimited and config["storage"] == "file":
                reserved += config["max_bytes"]
        unlimited = ("max_memory", "max_storage", "max_streams", "max_consumers", "max_ack_pending")
        level = {"level": profile.api_level} if profile.api_level else {}
        return {
            "memory": used["memory"],
            "storage": used["file"],
            "reserved_memory": 0,
            "reserved_storage": reserved % (1 << 64),
            "streams": len(hosted),
            "consumers": sum(len(each.consumers) for each in hosted),
            "limits": {
                **dict.fromkeys(unlimited, -1),
                "memory_max_stream_bytes": -1,
                "storage_max_stream_bytes": -1,
                "max_bytes_required": False,
            },
            "api": {**level, "total": self._requests, "errors": self._refused},
        }
