"""The JSON API on `$JS.API`: finds the route of a request, calls its handler, and sends the answer."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .consumers.config import consumer_schema
from .consumers.consumer import Consumer
from .jetstream import HostedStream, JetStream
from .releases import Profile
from .router import Message
from .streams.config import StreamConfig, check_create, check_update, invalid_config, request_schema
from .streams.direct_get import get_schema
from .wire import golang, subjects
from .wire.errors import ApiError, api_error, not_modelled
from .wire.golang import BOOL, INT, STRING, UINT, Schema

_PREFIX = "$JS.API."
_TYPE = "io.nats.jetstream.api.v1."
_HANDLED_ELSEWHERE = ("$JS.API.DIRECT.GET.", "$JS.API.CONSUMER.MSG.NEXT.")
_NAMES_LIMIT = 1024
_LIST_LIMIT = 256
_SUBJECTS_LIMIT = 100_000
_EMPTY_PAGE: dict[str, Any] = {"total": 0, "offset": 0, "limit": 0}
_STREAM_INFO: Schema = {"offset": INT, "deleted_details": BOOL, "subjects_filter": STRING}
_STREAM_LIST: Schema = {"offset": INT, "subject": STRING}
_STREAM_PURGE: Schema = {"filter": STRING, "seq": UINT, "keep": UINT}
_MESSAGE_DELETE: Schema = {"seq": UINT, "no_erase": BOOL}
_CONSUMER_LIST: Schema = {"offset": INT}
_CONSUMER_RESET: Schema = {"seq": UINT}
_OWN_METADATA = ("_nats.level", "_nats.req.level", "_nats.ver")


class _UnansweredError(Exception):
    """The server sends no answer to the request."""


@dataclass(frozen=True, slots=True)
class Route:
    type: str
    """The type of the response, without prefix and suffix."""
    handler: Callable[[Request], dict[str, Any]]
    names: int = 1
    """How many names the subject ends with; -1 is one or more."""
    strict: bool = True
    """Whether an unknown field is an error."""
    since: str = ""
    """The row of `Profile` that knows the request; empty for all releases."""

    def takes(self, names: list[str]) -> bool:
        return len(names) >= 1 if self.names < 0 else len(names) == self.names


@dataclass(frozen=True, slots=True)
class Request:
    """A request of the JSON API; `names` are the tokens of its subject after those of the route.

    The methods raise an `ApiError` with the refusal.
    """

    jetstream: JetStream
    route: Route
    names: list[str]
    message: Message
    afterwards: list[Callable[[], None]] = field(default_factory=list)
    """Called once the answer is sent."""

    @property
    def profile(self) -> Profile:
        return self.jetstream.context.profile

    def find_stream(self) -> HostedStream:
        hosted = self.jetstream.streams.get(self.names[0])
        if hosted is None:
            raise api_error(10059)
        return hosted

    def decode(self, schema: Schema) -> dict[str, Any]:
        if not self.message.payload:
            return {}
        try:
            return golang.decode(self.message.payload, schema, strict=self.route.strict and self.profile.strict)
        except golang.JsonError as error:
            raise api_error(10025, error) from None

    def decode_optional(self, schema: Schema) -> dict[str, Any]:
        """Decode the payload of a request that needs none; anything but an object or a list counts as none."""
        given = self.message.payload.lstrip(b" \t\r\n")[:1] in (b"{", b"[")
        return self.decode(schema) if given else {}

    def require_empty(self) -> None:
        if not _is_empty(self.message.payload):
            raise api_error(10038)


def _is_empty(payload: bytes) -> bool:
    """Whether a payload is empty, or an empty JSON object."""
    return payload.strip() in (b"", b"{}")


def _page(request: dict[str, Any], names: list[str], limit: int) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that describe one page of a list, and the names on it."""
    offset = min(max(request.get("offset", 0), 0), len(names))
    return {"total": len(names), "offset": offset, "limit": limit}, names[offset : offset + limit]


class Api:
    """Answer requests on `$JS.API`. As on a real server, a request without a route gets no answer."""

    def __init__(self, jetstream: JetStream) -> None:
        profile = jetstream.context.profile
        self._jetstream = jetstream
        self._requests = 0
        self._refused = 0
        self._routes = {"INFO": Route("account_info", self._account_info, 0)} | {
            path: route for path, route in _ROUTES.items() if not route.since or getattr(profile, route.since)
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
            if context.profile.strict and not context.profile.meets_required_level(request.message.header):
                raise api_error(10185)
            answer |= route.handler(request)
        except ApiError as error:
            self._refused += 1
            answer["error"] = error.as_json()
        except _UnansweredError:
            return
        if request.message.reply:
            context.send(request.message.reply, golang.dumps(answer))
        for call in request.afterwards:
            call()

    def _account_info(self, request: Request) -> dict[str, Any]:
        hosted = self._jetstream.streams.values()
        profile = request.profile
        used = {"file": 0, "memory": 0}
        for each in hosted:
            used[each.stream.config["storage"]] += each.stream.store.bytes
        unlimited = ("max_memory", "max_storage", "max_streams", "max_consumers", "max_ack_pending")
        per_stream = ("memory_max_stream_bytes", "storage_max_stream_bytes")
        level = {"level": profile.api_level} if profile.api_level else {}
        return {
            "memory": used["memory"],
            "storage": used["file"],
            "reserved_memory": 0,
            "reserved_storage": 0,
            "streams": len(hosted),
            "consumers": sum(len(each.consumers) for each in hosted),
            "limits": {**dict.fromkeys((*unlimited, *per_stream), -1), "max_bytes_required": False},
            "api": {**level, "total": self._requests, "errors": self._refused},
        }


# Streams.


def _create_stream(request: Request) -> dict[str, Any]:
    jetstream = request.jetstream
    wanted = request.decode(request_schema(request.profile))
    name = request.names[0]
    if name != wanted.get("name", ""):
        raise api_error(10056)
    if any(char in name for char in "\\/"):
        raise api_error(10128)
    if wanted.get("mirror_direct") and not wanted.get("mirror"):
        raise invalid_config("stream has no mirror but does have mirror direct")
    config = check_create(wanted, request.profile, jetstream.find_config)
    if config["num_replicas"] > 1:
        raise api_error(10074)
    hosted = jetstream.streams.get(name)
    if hosted is None:
        _check_overlap(request, config)
        hosted = jetstream.add(config)
    elif _comparable(hosted.stream.config) != _comparable(config):
        raise api_error(10058)
    return {**hosted.info_json(), "did_create": True}


def _comparable(config: StreamConfig) -> StreamConfig:
    metadata = {key: value for key, value in config["metadata"].items() if key not in _OWN_METADATA}
    return {**config, "metadata": metadata}


def _check_overlap(request: Request, config: StreamConfig) -> None:
    for name, other in request.jetstream.streams.items():
        taken = other.stream.config["subjects"]
        if name != config["name"] and any(subjects.collide(one, two) for one in config["subjects"] for two in taken):
            raise api_error(10065)


def _update_stream(request: Request) -> dict[str, Any]:
    wanted = request.decode(request_schema(request.profile))
    config = check_create(wanted, request.profile, request.jetstream.find_config)
    if request.names[0] != config["name"]:
        raise api_error(10056)
    hosted = request.find_stream()
    check_update(hosted.stream.config, config)
    _check_overlap(request, config)
    hosted.update(config)
    return hosted.info_json()


def _stream_info(request: Request) -> dict[str, Any]:
    wanted = request.decode_optional(_STREAM_INFO)
    hosted = request.find_stream()
    info = hosted.info_json(deleted=wanted.get("deleted_details", False), cluster=True)
    pattern = wanted.get("subjects_filter")
    totals = hosted.stream.store.totals(pattern) if pattern else {}
    if not totals:
        return _EMPTY_PAGE | info
    page, names = _page(wanted, sorted(totals), _SUBJECTS_LIMIT)
    if names:
        info["state"]["subjects"] = {name: totals[name] for name in names}
    return {**info, **page}


def _delete_stream(request: Request) -> dict[str, Any]:
    request.require_empty()
    request.jetstream.delete(request.find_stream().stream.name)
    return {"success": True}


def _purge_stream(request: Request) -> dict[str, Any]:
    wanted = request.decode_optional(_STREAM_PURGE)
    if wanted.get("seq") and wanted.get("keep"):
        raise api_error(10003)
    stream = request.find_stream().stream
    if stream.config["deny_purge"]:
        raise api_error(10110, "stream purge not permitted")
    purged = stream.purge(wanted.get("filter", ""), seq=wanted.get("seq", 0), keep=wanted.get("keep", 0))
    return {"success": True, "purged": purged}


def _page_of_streams(request: Request, limit: int) -> tuple[dict[str, Any], list[str]]:
    wanted = request.decode_optional(_STREAM_LIST)
    pattern = wanted.get("subject", "")
    names = sorted(
        name
        for name, hosted in request.jetstream.streams.items()
        if not pattern or any(subjects.collide(pattern, subject) for subject in hosted.stream.config["subjects"])
    )
    return _page(wanted, names, limit)


def _stream_names(request: Request) -> dict[str, Any]:
    fields, names = _page_of_streams(request, _NAMES_LIMIT)
    return {**fields, "streams": names or None}


def _list_streams(request: Request) -> dict[str, Any]:
    fields, names = _page_of_streams(request, _LIST_LIMIT)
    return {**fields, "streams": [request.jetstream.streams[name].info_json() for name in names]}


def _get_message(request: Request) -> dict[str, Any]:
    if _is_empty(request.message.payload):
        raise api_error(10003)
    wanted = request.decode(get_schema(request.profile))
    seq, last, following = wanted.get("seq", 0), wanted.get("last_by_subj", ""), wanted.get("next_by_subj", "")
    start = wanted.get("start_time")
    conflicts = (seq and last, seq and start is not None, start is not None and last, last and following)
    nothing = not (seq or last or following) and start is None
    if wanted.get("batch", 0) > 0 or wanted.get("max_bytes", 0) > 0 or any(conflicts) or nothing:
        raise api_error(10003)
    store = request.find_stream().stream.store
    if start is not None:
        seq = store.seq_from_time(start)
    message = store.next_for(following, seq) if following else store.get(seq) if seq else store.last_for(last)
    if message is None:
        raise api_error(10037)
    shown: dict[str, Any] = {"subject": message.subject, "seq": message.seq}
    if message.header and not wanted.get("no_hdr"):
        shown["hdrs"] = base64.b64encode(message.header).decode()
    if message.payload:
        shown["data"] = base64.b64encode(message.payload).decode()
    return {"message": {**shown, "time": golang.rfc3339(message.time)}}


def _delete_message(request: Request) -> dict[str, Any]:
    if _is_empty(request.message.payload):
        raise api_error(10003)
    wanted = request.decode(_MESSAGE_DELETE)
    stream = request.find_stream().stream
    if stream.config["deny_delete"]:
        raise api_error(10057, "message delete not permitted")
    seq = wanted.get("seq", 0)
    if not stream.remove(seq):
        outside = seq == 0 or not stream.store.first <= seq <= stream.store.last
        if outside and stream.config["storage"] == "file":
            raise api_error(10057, "stream store EOF" if seq > stream.store.last else "no message found")
        raise api_error(10043, seq)
    return {"success": True}


# Consumers.


def _create_consumer(request: Request) -> dict[str, Any]:
    wanted = request.decode(consumer_schema(request.profile))
    config = wanted.get("config", {})
    stream_name, *rest = request.names
    if stream_name != wanted.get("stream_name", ""):
        raise api_error(10056)
    durable = config.get("durable_name", "")
    name, pattern = rest[0] if rest else config.get("name", ""), ".".join(rest[1:])
    if any(char in name for char in "\\/"):
        raise api_error(10127)
    if request.message.subject.startswith("$JS.API.CONSUMER.DURABLE.") and not durable:
        raise api_error(10018)
    if durable and not rest:
        raise api_error(10020)
    if durable and name != durable:
        raise api_error(10017)
    config["name"] = name
    if pattern and config.get("filter_subjects"):
        raise api_error(10137)
    if pattern and config.get("filter_subject", "") != pattern:
        raise api_error(10131)
    if config.get("num_replicas", 0) > 1:
        raise api_error(10074)
    hosted = request.find_stream()
    consumer = hosted.consumers.create(hosted.stream, config, wanted.get("action", ""))
    request.afterwards.append(consumer.pump)
    return consumer.info_json()


def _find_consumer(request: Request) -> Consumer:
    consumer = request.find_stream().consumers.by_name.get(request.names[1])
    if consumer is None:
        raise api_error(10014)
    return consumer


def _consumer_info(request: Request) -> dict[str, Any]:
    request.require_empty()
    return _find_consumer(request).info_json()


def _delete_consumer(request: Request) -> dict[str, Any]:
    request.require_empty()
    _find_consumer(request).delete()
    return {"success": True}


def _consumer_names(request: Request) -> dict[str, Any]:
    wanted = request.decode_optional(_CONSUMER_LIST)
    fields, names = _page(wanted, sorted(request.find_stream().consumers.by_name), _NAMES_LIMIT)
    return {**fields, "consumers": names}


def _list_consumers(request: Request) -> dict[str, Any]:
    wanted = request.decode_optional(_CONSUMER_LIST)
    consumers = request.find_stream().consumers.by_name
    fields, names = _page(wanted, sorted(consumers), _LIST_LIMIT)
    return {**fields, "consumers": [consumers[name].info_json() for name in names]}


def _reset_consumer(request: Request) -> dict[str, Any]:
    hosted = request.jetstream.streams.get(request.names[0])
    consumer = None if hosted is None else hosted.consumers.by_name.get(request.names[1])
    if consumer is None or not request.message.reply:
        raise _UnansweredError  # the consumer itself answers
    wanted = request.decode(_CONSUMER_RESET) if request.message.payload and request.message.payload != b"null" else {}
    if request.profile.draft and wanted.get("seq") == 0:
        raise api_error(10204, "sequence must be above zero")
    try:
        seq = consumer.reset(wanted.get("seq", 0))
    except ValueError as error:
        raise api_error(10204, error) from None
    request.afterwards.append(consumer.pump)
    return {**consumer.info_json(), "reset_seq": seq}


def _refuse(request: Request) -> dict[str, Any]:
    raise not_modelled(f"the request {request.message.subject}")


_ROUTES = {
    "STREAM.CREATE": Route("stream_create", _create_stream),
    "STREAM.UPDATE": Route("stream_update", _update_stream),
    "STREAM.INFO": Route("stream_info", _stream_info),
    "STREAM.DELETE": Route("stream_delete", _delete_stream),
    "STREAM.PURGE": Route("stream_purge", _purge_stream),
    "STREAM.NAMES": Route("stream_names", _stream_names, 0),
    "STREAM.LIST": Route("stream_list", _list_streams, 0),
    "STREAM.MSG.GET": Route("stream_msg_get", _get_message),
    "STREAM.MSG.DELETE": Route("stream_msg_delete", _delete_message),
    "CONSUMER.CREATE": Route("consumer_create", _create_consumer, -1),
    "CONSUMER.DURABLE.CREATE": Route("consumer_create", _create_consumer, 2),
    "CONSUMER.INFO": Route("consumer_info", _consumer_info, 2),
    "CONSUMER.DELETE": Route("consumer_delete", _delete_consumer, 2),
    "CONSUMER.NAMES": Route("consumer_names", _consumer_names),
    "CONSUMER.LIST": Route("consumer_list", _list_consumers),
    "CONSUMER.PAUSE": Route("consumer_pause", _refuse, 2, since="pause"),
    "CONSUMER.RESET": Route("consumer_reset", _reset_consumer, 2, strict=False, since="reset"),
    "STREAM.SNAPSHOT": Route("stream_snapshot", _refuse),
    "STREAM.RESTORE": Route("stream_restore", _refuse),
    "STREAM.LEADER.STEPDOWN": Route("stream_leader_stepdown", _refuse),
    "STREAM.PEER.REMOVE": Route("stream_remove_peer", _refuse),
    "CONSUMER.LEADER.STEPDOWN": Route("consumer_leader_stepdown", _refuse, 2),
    "CONSUMER.UNPIN": Route("consumer_unpin", _refuse, 2, since="priorities"),
}
