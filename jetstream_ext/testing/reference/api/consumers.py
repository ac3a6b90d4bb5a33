"""The API of consumers: create, info, delete, lists, pause and reset."""

from typing import Any

from ..consumers.config import consumer_schema
from ..consumers.consumer import Consumer
from ..releases import Profile
from ..wire import times
from ..wire.errors import api_error
from ..wire.gojson import INT, TIME, UINT, Struct
from .requests import EMPTY_PAGE, Request, Route, UnansweredError, page

__all__ = ["routes"]

_NAMES_LIMIT = 1024
_LIST_LIMIT = 256
_LIST = Struct("JSApiConsumersRequest", {"offset": INT})
_PAUSE = Struct("JSApiConsumerPauseRequest", {"pause_until": TIME})
_RESET = Struct("JSApiConsumerResetRequest", {"seq": UINT})


def _create(request: Request) -> dict[str, Any]:
    wanted = request.decode(consumer_schema(request.profile))
    config = wanted.get("config", {})
    stream_name, *rest = request.names
    if stream_name != wanted.get("stream_name", ""):
        raise api_error(10056)
    name = rest[0] if rest else config.get("name", "")
    if any(char in name for char in "\\/"):
        raise api_error(10127)
    pattern = ".".join(rest[1:])
    if request.message.subject.startswith("$JS.API.CONSUMER.DURABLE."):
        if not config.get("durable_name"):
            raise api_error(10018)
        if name != config["durable_name"]:
            raise api_error(10017)
        if request.profile.strict_config:
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
    hosted = request.find_stream()
    pedantic = wanted.get("pedantic", False)
    consumer = hosted.consumers.create(hosted.stream, config, wanted.get("action", ""), pedantic=pedantic)
    request.afterwards.append(consumer.pump)
    return consumer.info_json()


def _find(request: Request) -> Consumer:
    consumer = request.find_stream().consumers.by_name.get(request.names[1])
    if consumer is None:
        raise api_error(10014)
    return consumer


def _info(request: Request) -> dict[str, Any]:
    request.require_empty()
    return _find(request).info_json()


def _delete(request: Request) -> dict[str, Any]:
    request.require_empty()
    _find(request).delete()
    return {"success": True}


def _names(request: Request) -> dict[str, Any]:
    wanted = request.decode_optional(_LIST)
    fields, names = page(wanted, sorted(request.find_stream().consumers.by_name), _NAMES_LIMIT)
    return {**fields, "consumers": names}


def _list(request: Request) -> dict[str, Any]:
    wanted = request.decode_optional(_LIST)
    consumers = request.find_stream().consumers.by_name
    fields, names = page(wanted, sorted(consumers), _LIST_LIMIT)
    return {**fields, "consumers": [consumers[name].info_json(stored=True) for name in names]}


def _pause(request: Request) -> dict[str, Any]:
    until = request.decode_optional(_PAUSE).get("pause_until")
    consumer = _find(request)
    consumer.pause(until)
    shown = times.ZERO_TIME if until is None else times.rfc3339(until)
    left = consumer.paused_for
    return {"paused": bool(left), "pause_until": shown, **({"pause_remaining": left} if left else {})}


def _reset(request: Request) -> dict[str, Any]:
    hosted = request.jetstream.streams.get(request.names[0])
    consumer = None if hosted is None else hosted.consumers.by_name.get(request.names[1])
    if consumer is None or not request.message.reply:
        raise UnansweredError  # the consumer itself answers
    wanted = request.decode(_RESET) if request.payload and request.payload != b"null" else {}
    if request.profile.draft and wanted.get("seq") == 0:
        raise api_error(10204, "sequence must be above zero")
    try:
        seq = consumer.reset(wanted.get("seq", 0))
    except ValueError as error:
        raise api_error(10204, error) from None
    request.afterwards.append(consumer.pump)
    return {**consumer.info_json(), "reset_seq": seq}


def routes(profile: Profile) -> dict[str, Route]:
    """Return the requests that a release knows."""
    empty_list: tuple[tuple[str, Any], ...] = (*EMPTY_PAGE, ("consumers", []))
    unpaused = (("paused", False), ("pause_until", times.ZERO_TIME))
    found = {
        "CONSUMER.CREATE": Route("consumer_create", _create, -1),
        "CONSUMER.DURABLE.CREATE": Route("consumer_create", _create, 2),
        "CONSUMER.INFO": Route("consumer_info", _info, 2),
        "CONSUMER.DELETE": Route("consumer_delete", _delete, 2),
        "CONSUMER.NAMES": Route("consumer_names", _names, on_error=empty_list),
        "CONSUMER.LIST": Route("consumer_list", _list, on_error=empty_list),
    }
    if profile.pause:
        found["CONSUMER.PAUSE"] = Route("consumer_pause", _pause, 2, unpaused)
    if profile.reset:
        found["CONSUMER.RESET"] = Route("consumer_reset", _reset, 2, (("reset_seq", 0),), strict=False)
    return found
