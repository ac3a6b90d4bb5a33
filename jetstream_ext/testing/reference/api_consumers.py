"""The API of consumers: create, info, delete, lists, pause and reset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import ids, times
from .api import PAGED, Request, Route, UnansweredError, decode_optional, decode_request, is_empty
from .consumer import Consumer
from .consumer_config import (
    ConsumerConfig,
    check_consumer,
    check_consumer_update,
    consumer_schema,
    set_inactive_threshold,
)
from .errors import api_error
from .gojson import INT, TIME, UINT, Struct
from .versions import Profile

if TYPE_CHECKING:
    from .stream import Stream

__all__ = ["routes"]

_NAMES_LIMIT = 1024
_LIST_LIMIT = 256
_LIST = Struct("JSApiConsumersRequest", {"offset": INT})
_PAUSE = Struct("JSApiConsumerPauseRequest", {"pause_until": TIME})
_RESET = Struct("JSApiConsumerResetRequest", {"seq": UINT})


def _create(request: Request) -> dict[str, Any]:
    wanted = decode_request(request, consumer_schema(request.jetstream.profile))
    config = wanted.get("config", {})
    stream_name, *rest = request.names
    durable = request.message.subject.startswith("$JS.API.CONSUMER.DURABLE.")
    if stream_name != wanted.get("stream_name", ""):
        raise api_error(10056)
    name = rest[0] if rest else config.get("name", "")
    if any(char in name for char in "\\/"):
        raise api_error(10127)
    pattern = ".".join(rest[1:])
    if durable:
        if not config.get("durable_name"):
            raise api_error(10018)
        if name != config["durable_name"]:
            raise api_error(10017)
        if request.jetstream.profile.strict_json:
            config["name"] = name
    elif rest:
        if config.get("durable_name") and name != config["durable_name"]:
            raise api_error(10017)
        config["name"] = name
    elif config.get("durable_name"):
        raise api_error(10020)
    if pattern and config.get("filter_subjects"):
        raise api_error(10137)
    if pattern and config.get("filter_subject", "") != pattern:
        raise api_error(10131)
    if config.get("num_replicas", 0) > 1:
        raise api_error(10074)
    stream = request.stream()
    consumer = _add(stream, config, wanted.get("action", ""), pedantic=wanted.get("pedantic", False))
    request.after(consumer.pump)
    return consumer.info_json()


def _add(stream: Stream, given: dict[str, Any], action: str, *, pedantic: bool) -> Consumer:
    config = check_consumer(given, stream.config, stream.profile, pedantic=pedantic)
    name = config["durable_name"] or config["name"]
    existing = stream.consumers.get(name) if name else None
    if existing is not None:
        set_inactive_threshold(config)
        if action == "create" and config != existing.config:
            raise api_error(10148)
        bound = (
            stream.jetstream.has_interest(existing.config["deliver_subject"])
            if existing.config["deliver_subject"]
            else False
        )
        check_consumer_update(existing.config, config, bound=bound)
        config["pause_until"] = existing.config["pause_until"]
        existing.update(config)
        return existing
    if action == "update":
        raise api_error(10149)
    if 0 < stream.config["max_consumers"] <= len(stream.consumers):
        raise api_error(10026)
    if stream.config["retention"] == "workqueue":
        _check_work_queue(stream, config)
    if not name:
        name = config["name"] = ids.short(stream.random)
    set_inactive_threshold(config)
    consumer = stream.consumers[name] = Consumer(stream, name, config)
    return consumer


def _check_work_queue(stream: Stream, config: ConsumerConfig) -> None:
    if config["ack_policy"] not in ("explicit", "flow_control"):
        raise api_error(10098)
    if config["deliver_policy"] != "all":
        raise api_error(10101)
    if not stream.consumers:
        return
    filters = [config["filter_subject"]] if config["filter_subject"] else config["filter_subjects"]
    if not filters:
        raise api_error(10099)
    if any(consumer.cursor.overlaps(filters) for consumer in stream.consumers.values()):
        raise api_error(10100)


def _find(request: Request) -> Consumer:
    consumer = request.stream().consumers.get(request.names[1])
    if consumer is None:
        raise api_error(10014)
    return consumer


def _info(request: Request) -> dict[str, Any]:
    if not is_empty(request.payload):
        raise api_error(10038)
    return _find(request).info_json()


def _delete(request: Request) -> dict[str, Any]:
    if not is_empty(request.payload):
        raise api_error(10038)
    _find(request).delete()
    return {"success": True}


def _names(request: Request) -> dict[str, Any]:
    wanted = decode_optional(request, _LIST)
    names = sorted(request.stream().consumers)
    offset = min(max(wanted.get("offset", 0), 0), len(names))
    return {
        "total": len(names),
        "offset": offset,
        "limit": _NAMES_LIMIT,
        "consumers": names[offset : offset + _NAMES_LIMIT],
    }


def _list(request: Request) -> dict[str, Any]:
    wanted = decode_optional(request, _LIST)
    consumers = request.stream().consumers
    names = sorted(consumers)
    offset = min(max(wanted.get("offset", 0), 0), len(names))
    rows = [consumers[name].info_json(stored=True) for name in names[offset : offset + _LIST_LIMIT]]
    return {"total": len(names), "offset": offset, "limit": _LIST_LIMIT, "consumers": rows}


def _pause(request: Request) -> dict[str, Any]:
    wanted = decode_optional(request, _PAUSE)
    consumer = _find(request)
    consumer.pause(wanted.get("pause_until"))
    until = wanted.get("pause_until")
    shown = times.ZERO_TIME if until is None else times.rfc3339(until)
    left = consumer.paused_for
    return {"paused": bool(left), "pause_until": shown, **({"pause_remaining": left} if left else {})}


def _reset(request: Request) -> dict[str, Any]:
    consumer = None
    if request.names[0] in request.jetstream.streams:
        consumer = request.stream().consumers.get(request.names[1])
    if consumer is None or not request.message.reply:
        # The consumer itself answers, so where there is none, nobody does.
        raise UnansweredError
    profile = request.jetstream.profile
    wanted = decode_request(request, _RESET) if request.payload and request.payload != b"null" else {}
    if profile.draft and wanted.get("seq") == 0:
        raise api_error(10204, "sequence must be above zero")
    try:
        seq = consumer.reset(wanted.get("seq", 0))
    except ValueError as error:
        raise api_error(10204, error) from None
    answer = {**consumer.info_json(), "reset_seq": seq}
    request.after(consumer.pump)
    return answer


def routes(profile: Profile) -> dict[tuple[str, ...], Route]:
    """Return the requests that a release knows."""
    found = {
        ("CONSUMER", "CREATE"): Route("consumer_create", _create),
        ("CONSUMER", "DURABLE", "CREATE"): Route("consumer_create", _create),
        ("CONSUMER", "INFO"): Route("consumer_info", _info),
        ("CONSUMER", "DELETE"): Route("consumer_delete", _delete),
        ("CONSUMER", "NAMES"): Route("consumer_names", _names, (*PAGED, ("consumers", []))),
        ("CONSUMER", "LIST"): Route("consumer_list", _list, (*PAGED, ("consumers", []))),
    }
    if profile.metadata:
        found["CONSUMER", "PAUSE"] = Route(
            "consumer_pause", _pause, (("paused", False), ("pause_until", times.ZERO_TIME))
        )
    if profile.reset:
        found["CONSUMER", "RESET"] = Route("consumer_reset", _reset, (("reset_seq", 0),), strict=False)
    return found
