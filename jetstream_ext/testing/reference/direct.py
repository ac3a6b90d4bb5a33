"""Direct Get: messages of a stream in a reply each, without the JSON API (ADR-31)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from . import headers, subjects, times
from .checks import required_level_met
from .gojson import BOOL, INT, STRING, STRINGS, TIME, UINT, JsonError, Struct, decode
from .versions import Profile

if TYPE_CHECKING:
    from .connections import Message
    from .store import StoredMessage
    from .stream import Stream

__all__ = ["DirectGet", "get_schema", "message_headers"]

_MAX_SUBJECTS = 1024
_MAX_BYTES = 64 << 20
_ALONE = ("seq", "last_by_subj", "next_by_subj", "multi_last", "start_time")
_NOT_WITH_SUBJECT = (*_ALONE, "batch", "up_to_seq", "up_to_time")
_EXCLUSIVE = (
    ("seq", "last_by_subj"),
    ("seq", "start_time"),
    ("start_time", "last_by_subj"),
    ("last_by_subj", "next_by_subj"),
    ("last_by_subj", "batch"),
    ("last_by_subj", "multi_last"),
    ("next_by_subj", "multi_last"),
    ("up_to_seq", "up_to_time"),
)


def get_schema(profile: Profile) -> Struct:
    """Return the fields of a get request that a release knows."""
    fields: dict[str, Any] = {"seq": UINT, "last_by_subj": STRING, "next_by_subj": STRING}
    if profile.batch_get:
        fields |= {
            "batch": INT,
            "max_bytes": INT,
            "start_time": TIME,
            "multi_last": STRINGS,
            "up_to_seq": UINT,
            "up_to_time": TIME,
        }
    if profile.get_options_on_subject:
        fields["no_hdr"] = BOOL
    return Struct("JSApiMsgGetRequest", fields)


def message_headers(profile: Profile, stream: str, message: StoredMessage) -> list[tuple[str, str]]:
    """Return the lines that say where a message comes from."""
    return [
        ("Nats-Stream", stream),
        ("Nats-Subject", message.subject),
        ("Nats-Sequence", str(message.seq)),
        ("Nats-Time-Stamp", times.rfc3339(message.time, draft=profile.draft)),
    ]


class DirectGet:
    """Answers the gets of one stream, under its own name, for the stream or for the one it mirrors."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def by_request(self, message: Message) -> None:
        """Answer a request in the payload."""
        if not message.reply:
            return
        profile = self._stream.profile
        if self._level_refused(message):
            return
        if not message.payload:
            self._status(message.reply, "408 Empty Request")
            return
        try:
            request = decode(message.payload, get_schema(profile), strict=False)
        except JsonError:
            self._status(message.reply, "408 Malformed Request")
            return
        if not any(_given(request, name) for name in _ALONE):
            self._status(message.reply, "408 Empty Request")
        elif any(
            _given(request, one) and _given(request, other)
            for one, other in _EXCLUSIVE
            if one in request or profile.batch_get
        ):
            self._status(message.reply, "408 Bad Request")
        else:
            self._answer(request, message.reply)

    def by_subject(self, message: Message) -> None:
        """Answer a request for the last message of the subject that ends the request's own."""
        if not message.reply:
            return
        profile = self._stream.profile
        if self._level_refused(message):
            return
        request: dict[str, Any] = {}
        if message.payload:
            if profile.draft or not profile.get_options_on_subject:
                self._status(message.reply, "408 Bad Request")
                return
            try:
                request = decode(message.payload, get_schema(profile), strict=False)
            except JsonError:
                self._status(message.reply, "408 Malformed Request")
                return
        key = message.subject.split(".", 5)[5]
        if any(_given(request, name) for name in _NOT_WITH_SUBJECT if name != "batch") or request.get("batch"):
            self._status(message.reply, "408 Bad Request")
        else:
            self._answer({**request, "last_by_subj": key}, message.reply)

    def _level_refused(self, message: Message) -> bool:
        profile = self._stream.profile
        if profile.required_level and not required_level_met(profile, message.header):
            self._status(message.reply, "412 Required Api Level")
            return True
        return False

    def _status(self, reply: str, line: str) -> None:
        self._stream.send(reply, header=headers.status(line))

    def _answer(self, request: dict[str, Any], reply: str) -> None:
        if request.get("multi_last"):
            self._answer_multi(request, reply)
        elif request.get("batch"):
            self._answer_batch(request, reply)
        elif (message := self._single(request)) is None:
            self._status(reply, "404 Message Not Found")
        else:
            self._send(reply, message, request, [])

    def _single(self, request: dict[str, Any]) -> StoredMessage | None:
        store = self._stream.view
        seq = self._start(request)
        if request.get("next_by_subj"):
            return store.next_for(request["next_by_subj"], seq)
        if seq:
            return store.get(seq)
        return store.last_for(request["last_by_subj"])

    def _start(self, request: dict[str, Any]) -> int:
        if "start_time" in request:
            return self._stream.view.seq_from_time(request["start_time"])
        return int(request.get("seq", 0))

    def _send(
        self, reply: str, message: StoredMessage, request: dict[str, Any], more: Iterable[tuple[str, str]]
    ) -> None:
        stream = self._stream
        header = b""
        if not request.get("no_hdr"):
            header = headers.add(message.header, *message_headers(stream.profile, stream.name, message), *more)
        stream.send(reply, message.payload, header=header)

    def _answer_batch(self, request: dict[str, Any], reply: str) -> None:
        store, profile = self._stream.view, self._stream.profile
        if profile.draft and not (request.get("next_by_subj") and (request.get("seq") or "start_time" in request)):
            self._status(reply, "408 Bad Request")
            return
        pattern = request.get("next_by_subj", "")
        seq = self._start(request)
        pending = store.count(pattern, seq)
        last = sent_bytes = 0
        for index in range(request["batch"]):
            message = store.next_for(pattern, seq)
            if message is None:
                if index == 0:
                    self._status(reply, "404 Message Not Found")
                    return
                break
            shown = pending if profile.batch_counts_itself else max(pending - 1, 0)
            if not request.get("no_hdr"):
                pending = max(pending - 1, 0)  # without headers the server does not count down either
            self._send(reply, message, request, [("Nats-Num-Pending", str(shown)), ("Nats-Last-Sequence", str(last))])
            last = message.seq
            seq = message.seq + 1
            sent_bytes += _cost(message)
            if sent_bytes >= (request.get("max_bytes") or _MAX_BYTES):
                break
        end = [("Nats-Num-Pending", str(pending)), ("Nats-Last-Sequence", str(last))]
        self._stream.send(reply, header=headers.status("204 EOB", *end))

    def _answer_multi(self, request: dict[str, Any], reply: str) -> None:
        store, profile = self._stream.view, self._stream.profile
        up_to = int(request.get("up_to_seq", 0))
        if "up_to_time" in request:
            up_to = store.seq_from_time(request["up_to_time"])
            if up_to <= store.first:
                self._status(reply, "404 No Results")
                return
            up_to -= 1
        up_to = up_to or store.last
        found = {message.seq: message for message in self._last_of_each(request["multi_last"], up_to)}
        if len(found) > _MAX_SUBJECTS:
            self._status(reply, "413 Too Many Results")
            return
        if not found:
            self._status(reply, "404 No Results")
            return
        wanted = [found[seq] for seq in sorted(found) if seq >= request.get("seq", 0)]
        last = sent_bytes = count = 0
        request = {**request, "no_hdr": False}
        for message in wanted:
            pending = len(wanted) - count - 1
            self._send(reply, message, request, [("Nats-Num-Pending", str(pending)), ("Nats-Last-Sequence", str(last))])
            count += 1
            last = message.seq
            sent_bytes += _cost(message)
            if sent_bytes >= (request.get("max_bytes") or _MAX_BYTES) or 0 < request.get("batch", 0) <= count:
                break
        pending = len(wanted) - count
        if profile.multi_end_off_by_one and pending:
            pending -= 1
        shown = max(found) if profile.draft else up_to
        end = [
            ("Nats-Num-Pending", str(pending)),
            ("Nats-Last-Sequence", str(last)),
            ("Nats-UpTo-Sequence", str(shown)),
        ]
        self._stream.send(reply, header=headers.status("204 EOB", *end))

    def _last_of_each(self, patterns: list[str], up_to: int) -> Iterable[StoredMessage]:
        store = self._stream.view
        for pattern in patterns:
            if not subjects.is_valid(pattern):
                continue
            for subject in store.totals(pattern):
                message = store.last_for(subject, up_to)
                if message is not None:
                    yield message


def _given(request: dict[str, Any], name: str) -> bool:
    if name in ("start_time", "up_to_time"):
        return name in request
    return bool(request.get(name)) and not (name == "batch" and request[name] < 0)


def _cost(message: StoredMessage) -> int:
    return len(message.subject.encode("utf-8", "surrogateescape")) + len(message.header) + len(message.payload)
