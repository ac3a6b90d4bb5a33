"""The API of streams: create, update, info, delete, purge, lists, and single messages."""

from __future__ import annotations

import base64
from typing import Any

from . import subjects, times
from .api import PAGED, Request, Route, decode_optional, decode_request, is_empty
from .errors import api_error
from .gojson import BOOL, INT, STRING, TIME, UINT, Struct
from .sourcing import start_pullers
from .stream_config import StreamConfig, check_create, check_update, invalid, request_schema

__all__ = ["ROUTES"]

_NAMES_LIMIT = 1024
_LIST_LIMIT = 256
_SUBJECTS_LIMIT = 100_000
_INFO = Struct("JSApiStreamInfoRequest", {"offset": INT, "deleted_details": BOOL, "subjects_filter": STRING})
_LIST = Struct("JSApiStreamListRequest", {"offset": INT, "subject": STRING})
_PURGE = Struct("JSApiStreamPurgeRequest", {"filter": STRING, "seq": UINT, "keep": UINT})
_DELETE = Struct("JSApiMsgDeleteRequest", {"seq": UINT, "no_erase": BOOL})


def _create(request: Request) -> dict[str, Any]:
    jetstream = request.jetstream
    wanted = decode_request(request, request_schema(jetstream.profile))
    name = request.names[0]
    if name != wanted.get("name", ""):
        raise api_error(10056)
    if any(char in name for char in "\\/"):
        raise api_error(10128)
    if wanted.get("sealed"):
        raise invalid("stream configuration for create can not be sealed")
    if wanted.get("mirror_direct") and not wanted.get("mirror"):
        raise invalid("stream has no mirror but does have mirror direct")
    config = check_create(wanted, jetstream.profile, jetstream.find_config)
    if config["num_replicas"] > 1:
        raise api_error(10074)
    existing = jetstream.streams.get(name)
    if existing is not None:
        if _comparable(existing.config) != _comparable(config):
            raise api_error(10058)
        return {**existing.info_json(), "did_create": True}
    _check_overlap(request, config, "")
    stream = jetstream.add(config)
    return {**stream.info_json(), "did_create": True}


def _comparable(config: StreamConfig) -> StreamConfig:
    own = ("_nats.level", "_nats.req.level", "_nats.ver")
    metadata = {key: value for key, value in config["metadata"].items() if key not in own}
    return {**config, "metadata": metadata}


def _check_overlap(request: Request, config: StreamConfig, name: str) -> None:
    for other in request.jetstream.streams.values():
        if other.name != name and any(
            subjects.collide(one, two) for one in config["subjects"] for two in other.config["subjects"]
        ):
            raise api_error(10065)


def _update(request: Request) -> dict[str, Any]:
    jetstream = request.jetstream
    wanted = decode_request(request, request_schema(jetstream.profile))
    config = check_create(wanted, jetstream.profile, jetstream.find_config)
    if request.names[0] != config["name"]:
        raise api_error(10056)
    stream = request.stream()
    check_update(stream.config, config, jetstream.profile)
    _check_overlap(request, config, stream.name)
    for puller in stream.pullers:
        puller.close()
    stream.update(config)
    start_pullers(stream)
    return stream.info_json()


def _info(request: Request) -> dict[str, Any]:
    wanted = decode_optional(request, _INFO)
    stream = request.stream()
    info = stream.info_json(deleted=wanted.get("deleted_details", False), cluster=True)
    page = dict(PAGED)
    totals = stream.store.totals(wanted["subjects_filter"]) if wanted.get("subjects_filter") else {}
    if totals:
        offset = max(wanted.get("offset", 0), 0)
        names = sorted(totals)[offset : offset + _SUBJECTS_LIMIT]
        page = {"total": len(totals), "offset": offset, "limit": _SUBJECTS_LIMIT}
        state = info["state"]
        consumers = state.pop("consumer_count")
        deleted = {name: state.pop(name) for name in ("num_deleted", "deleted") if name in state}
        if names:
            state["subjects"] = {name: totals[name] for name in names}
        state |= {**deleted, "consumer_count": consumers}
    return {**page, **info}


def _delete(request: Request) -> dict[str, Any]:
    if not is_empty(request.payload):
        raise api_error(10038)
    request.jetstream.delete(request.stream())
    return {"success": True}


def _purge(request: Request) -> dict[str, Any]:
    wanted = decode_optional(request, _PURGE)
    if wanted.get("seq") and wanted.get("keep"):
        raise api_error(10003)
    stream = request.stream()
    if stream.config["sealed"]:
        raise api_error(10109)
    if stream.config["deny_purge"]:
        raise api_error(10110, "stream purge not permitted")
    gone = stream.purge(wanted.get("filter", ""), seq=wanted.get("seq", 0), keep=wanted.get("keep", 0))
    return {"success": True, "purged": gone}


def _page(request: Request) -> tuple[list[str], int]:
    wanted = decode_optional(request, _LIST)
    pattern = wanted.get("subject", "")
    names = sorted(
        name
        for name, stream in request.jetstream.streams.items()
        if not pattern or any(subjects.collide(pattern, subject) for subject in stream.config["subjects"])
    )
    return names, min(max(wanted.get("offset", 0), 0), len(names))


def _names(request: Request) -> dict[str, Any]:
    names, offset = _page(request)
    return {
        "total": len(names),
        "offset": offset,
        "limit": _NAMES_LIMIT,
        "streams": names[offset : offset + _NAMES_LIMIT] or None,
    }


def _list(request: Request) -> dict[str, Any]:
    names, offset = _page(request)
    streams = [request.jetstream.streams[name].info_json(stored=True) for name in names[offset : offset + _LIST_LIMIT]]
    return {"total": len(names), "offset": offset, "limit": _LIST_LIMIT, "streams": streams}


def _get_schema(request: Request) -> Struct:
    fields: dict[str, Any] = {"seq": UINT, "last_by_subj": STRING, "next_by_subj": STRING}
    if request.jetstream.profile.batch_get:
        fields |= {"batch": INT, "max_bytes": INT, "start_time": TIME, "up_to_seq": UINT, "up_to_time": TIME}
    if request.jetstream.profile.get_options_on_subject:
        fields["no_hdr"] = BOOL
    return Struct("JSApiMsgGetRequest", fields)


def _get(request: Request) -> dict[str, Any]:
    if is_empty(request.payload):
        raise api_error(10003)
    wanted = decode_request(request, _get_schema(request))
    seq, last, following = wanted.get("seq", 0), wanted.get("last_by_subj", ""), wanted.get("next_by_subj", "")
    start = wanted.get("start_time")
    conflicts = (seq and last, seq and start is not None, start is not None and last, last and following)
    nothing = not (seq or last or following) and start is None
    if wanted.get("batch", 0) > 0 or wanted.get("max_bytes", 0) > 0 or any(conflicts) or nothing:
        raise api_error(10003)
    store = request.stream().store
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
    wanted = decode_request(request, _DELETE)
    stream = request.stream()
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


ROUTES: dict[tuple[str, ...], Route] = {
    ("STREAM", "CREATE"): Route("stream_create", _create),
    ("STREAM", "UPDATE"): Route("stream_update", _update),
    ("STREAM", "INFO"): Route("stream_info", _info, PAGED),
    ("STREAM", "DELETE"): Route("stream_delete", _delete),
    ("STREAM", "PURGE"): Route("stream_purge", _purge, (("purged", 0),)),
    ("STREAM", "NAMES"): Route("stream_names", _names, (*PAGED, ("streams", None))),
    ("STREAM", "LIST"): Route("stream_list", _list, (*PAGED, ("streams", None))),
    ("STREAM", "MSG", "GET"): Route("stream_msg_get", _get),
    ("STREAM", "MSG", "DELETE"): Route("stream_msg_delete", _delete_message),
}
