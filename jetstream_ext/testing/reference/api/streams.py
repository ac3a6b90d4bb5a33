"""The API of streams: create, update, info, delete, purge, lists, and single messages."""

import base64
from typing import Any

from ..streams.config import StreamConfig, check_create, check_update, invalid_config, request_schema
from ..streams.direct_get import get_schema
from ..wire import subjects, times
from ..wire.errors import api_error
from ..wire.gojson import BOOL, INT, STRING, UINT, Struct
from .requests import EMPTY_PAGE, Request, Route, is_empty, page

__all__ = ["ROUTES"]

_NAMES_LIMIT = 1024
_LIST_LIMIT = 256
_SUBJECTS_LIMIT = 100_000
_INFO = Struct("JSApiStreamInfoRequest", {"offset": INT, "deleted_details": BOOL, "subjects_filter": STRING})
_LIST = Struct("JSApiStreamListRequest", {"offset": INT, "subject": STRING})
_PURGE = Struct("JSApiStreamPurgeRequest", {"filter": STRING, "seq": UINT, "keep": UINT})
_DELETE = Struct("JSApiMsgDeleteRequest", {"seq": UINT, "no_erase": BOOL})
_OWN_METADATA = ("_nats.level", "_nats.req.level", "_nats.ver")


def _create(request: Request) -> dict[str, Any]:
    jetstream = request.jetstream
    wanted = request.decode(request_schema(request.profile))
    name = request.names[0]
    if name != wanted.get("name", ""):
        raise api_error(10056)
    if any(char in name for char in "\\/"):
        raise api_error(10128)
    if wanted.get("sealed"):
        raise invalid_config("stream configuration for create can not be sealed")
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


def _update(request: Request) -> dict[str, Any]:
    wanted = request.decode(request_schema(request.profile))
    config = check_create(wanted, request.profile, request.jetstream.find_config)
    if request.names[0] != config["name"]:
        raise api_error(10056)
    hosted = request.find_stream()
    check_update(hosted.stream.config, config, request.profile)
    _check_overlap(request, config)
    hosted.update(config)
    return hosted.info_json()


def _info(request: Request) -> dict[str, Any]:
    wanted = request.decode_optional(_INFO)
    hosted = request.find_stream()
    info = hosted.info_json(deleted=wanted.get("deleted_details", False), cluster=True)
    pattern = wanted.get("subjects_filter")
    totals = hosted.stream.store.totals(pattern) if pattern else {}
    if not totals:
        return {**dict(EMPTY_PAGE), **info}
    offset = max(wanted.get("offset", 0), 0)
    names = sorted(totals)[offset : offset + _SUBJECTS_LIMIT]
    state = info["state"]
    last = {name: state.pop(name) for name in ("num_deleted", "deleted", "consumer_count") if name in state}
    if names:
        state["subjects"] = {name: totals[name] for name in names}
    state |= last
    return {"total": len(totals), "offset": offset, "limit": _SUBJECTS_LIMIT, **info}


def _delete(request: Request) -> dict[str, Any]:
    request.require_empty()
    request.jetstream.delete(request.find_stream().stream.name)
    return {"success": True}


def _purge(request: Request) -> dict[str, Any]:
    wanted = request.decode_optional(_PURGE)
    if wanted.get("seq") and wanted.get("keep"):
        raise api_error(10003)
    stream = request.find_stream().stream
    if stream.config["sealed"]:
        raise api_error(10109)
    if stream.config["deny_purge"]:
        raise api_error(10110, "stream purge not permitted")
    purged = stream.purge(wanted.get("filter", ""), seq=wanted.get("seq", 0), keep=wanted.get("keep", 0))
    return {"success": True, "purged": purged}


def _page(request: Request, limit: int) -> tuple[dict[str, Any], list[str]]:
    wanted = request.decode_optional(_LIST)
    pattern = wanted.get("subject", "")
    names = sorted(
        name
        for name, hosted in request.jetstream.streams.items()
        if not pattern or any(subjects.collide(pattern, subject) for subject in hosted.stream.config["subjects"])
    )
    return page(wanted, names, limit)


def _names(request: Request) -> dict[str, Any]:
    fields, names = _page(request, _NAMES_LIMIT)
    return {**fields, "streams": names or None}


def _list(request: Request) -> dict[str, Any]:
    fields, names = _page(request, _LIST_LIMIT)
    return {**fields, "streams": [request.jetstream.streams[name].info_json(stored=True) for name in names]}


def _get_message(request: Request) -> dict[str, Any]:
    if is_empty(request.payload):
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
    return {"message": {**shown, "time": times.rfc3339(message.time)}}


def _delete_message(request: Request) -> dict[str, Any]:
    if is_empty(request.payload):
        raise api_error(10003)
    wanted = request.decode(_DELETE)
    stream = request.find_stream().stream
    if stream.config["sealed"]:
        raise api_error(10109)
    if stream.config["deny_delete"]:
        raise api_error(10057, "message delete not permitted")
    seq = wanted.get("seq", 0)
    if not stream.remove(seq):
        outside = seq == 0 or not stream.store.first <= seq <= stream.store.last
        if outside and stream.config["storage"] == "file":
            raise api_error(10057, "stream store EOF" if seq > stream.store.last else "no message found")
        raise api_error(10043, seq)
    return {"success": True}


ROUTES: dict[str, Route] = {
    "STREAM.CREATE": Route("stream_create", _create),
    "STREAM.UPDATE": Route("stream_update", _update),
    "STREAM.INFO": Route("stream_info", _info, on_error=EMPTY_PAGE),
    "STREAM.DELETE": Route("stream_delete", _delete),
    "STREAM.PURGE": Route("stream_purge", _purge, on_error=(("purged", 0),)),
    "STREAM.NAMES": Route("stream_names", _names, 0, (*EMPTY_PAGE, ("streams", None))),
    "STREAM.LIST": Route("stream_list", _list, 0, (*EMPTY_PAGE, ("streams", None))),
    "STREAM.MSG.GET": Route("stream_msg_get", _get_message),
    "STREAM.MSG.DELETE": Route("stream_msg_delete", _delete_message),
}
