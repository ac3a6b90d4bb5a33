"""Direct Get: messages of a stream, one in each reply, without the JSON API (ADR-31)."""

from collections.abc import Iterable
from typing import Any

from ..releases import Profile
from ..router import Message
from ..wire import golang, subjects
from ..wire.golang import BOOL, INT, STRING, STRINGS, TIME, UINT, JsonError, decode
from ..wire.protocol import add_headers
from .store import StoredMessage
from .stream import Stream

_MAX_SUBJECTS = 1024
_MAX_BYTES = 64 << 20
_SELECTORS = ("seq", "last_by_subj", "next_by_subj", "multi_last", "start_time")
_NOT_WITH_SUBJECT = (*_SELECTORS, "up_to_seq", "up_to_time")
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

Request = dict[str, Any]


_SINGLE: golang.Schema = {"seq": UINT, "last_by_subj": STRING, "next_by_subj": STRING, "no_hdr": BOOL}
_BATCH: golang.Schema = {
    "batch": INT,
    "max_bytes": INT,
    "start_time": TIME,
    "multi_last": STRINGS,
    "up_to_seq": UINT,
    "up_to_time": TIME,
}


def get_schema(profile: Profile) -> golang.Schema:
    """Return the fields of a get request, which the JSON API's `STREAM.MSG.GET` shares."""
    return {**_SINGLE, **_BATCH} if profile.batch_get else _SINGLE


class DirectGet:
    """Answer the gets of one stream, under its own name or under the name of the stream it mirrors."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._send_status = stream.context.send_status

    def by_request(self, message: Message) -> None:
        """Answer a request in the payload."""
        request = self._decode(message) if self._accepts(message) else None
        if request is None:
            return
        if not any(_has(request, name) for name in _SELECTORS):
            self._send_status(message.reply, "408 Empty Request")
        elif any(_has(request, one) and _has(request, other) for one, other in _EXCLUSIVE):
            self._send_status(message.reply, "408 Bad Request")
        else:
            self._answer(request, message.reply)

    def by_subject(self, message: Message) -> None:
        """Answer a request for the last message on the subject that is appended to the request's subject."""
        if not self._accepts(message):
            return
        request: Request | None = {}
        if message.payload:
            if self._stream.profile.draft:
                self._send_status(message.reply, "408 Bad Request")
                return
            request = self._decode(message)
        if request is None:
            return
        if any(_has(request, name) for name in _NOT_WITH_SUBJECT) or request.get("batch"):
            self._send_status(message.reply, "408 Bad Request")
        else:
            self._answer({**request, "last_by_subj": message.subject.split(".", 5)[5]}, message.reply)

    def _accepts(self, message: Message) -> bool:
        profile = self._stream.profile
        if message.reply and profile.strict and not profile.meets_required_level(message.header):
            self._send_status(message.reply, "412 Required Api Level")
            return False
        return bool(message.reply)

    def _decode(self, message: Message) -> Request | None:
        if not message.payload:
            self._send_status(message.reply, "408 Empty Request")
            return None
        try:
            return decode(message.payload, get_schema(self._stream.profile), strict=False)
        except JsonError:
            self._send_status(message.reply, "408 Malformed Request")
            return None

    def _answer(self, request: Request, reply: str) -> None:
        if request.get("multi_last"):
            self._answer_multi(request, reply)
        elif request.get("batch"):
            self._answer_batch(request, reply)
        elif (message := self._find_single(request)) is None:
            self._send_status(reply, "404 Message Not Found")
        else:
            self._send(reply, message, request)

    def _find_single(self, request: Request) -> StoredMessage | None:
        store = self._stream.view
        seq = self._first_seq(request)
        if request.get("next_by_subj"):
            return store.next_for(request["next_by_subj"], seq)
        if seq:
            return store.get(seq)
        return store.last_for(request["last_by_subj"])

    def _first_seq(self, request: Request) -> int:
        if "start_time" in request:
            return self._stream.view.seq_from_time(request["start_time"])
        return int(request.get("seq", 0))

    def _answer_batch(self, request: Request, reply: str) -> None:
        store, profile = self._stream.view, self._stream.profile
        if profile.draft and not (request.get("next_by_subj") and (request.get("seq") or "start_time" in request)):
            self._send_status(reply, "408 Bad Request")
            return
        pattern = request.get("next_by_subj", "")
        seq = self._first_seq(request)
        pending = store.count(pattern, seq)
        last = sent_bytes = 0
        for index in range(request["batch"]):
            message = store.next_for(pattern, seq)
            if message is None:
                if index == 0:
                    self._send_status(reply, "404 Message Not Found")
                    return
                break
            shown = max(pending - 1, 0)
            if not request.get("no_hdr"):
                pending = max(pending - 1, 0)  # the server does not count down without headers
            self._send(reply, message, request, *_position(shown, last))
            last = message.seq
            seq = message.seq + 1
            sent_bytes += _size(message)
            if sent_bytes >= (request.get("max_bytes") or _MAX_BYTES):
                break
        self._send_status(reply, "204 EOB", *_position(pending, last))

    def _answer_multi(self, request: Request, reply: str) -> None:
        store, profile = self._stream.view, self._stream.profile
        up_to = int(request.get("up_to_seq", 0))
        if "up_to_time" in request:
            up_to = store.seq_from_time(request["up_to_time"])
            if up_to <= store.first:
                self._send_status(reply, "404 No Results")
                return
            up_to -= 1
        up_to = up_to or store.last
        if store.file and up_to > store.last:
            self._send_status(reply, "404 No Results")  # a store in memory answers with what it has
            return
        found = {message.seq: message for message in self._last_of_each(request["multi_last"], up_to)}
        if len(found) > _MAX_SUBJECTS:
            self._send_status(reply, "413 Too Many Results")
            return
        if not found:
            self._send_status(reply, "404 No Results")
            return
        wanted = [found[seq] for seq in sorted(found) if seq >= request.get("seq", 0)]
        last = sent_bytes = 0
        pending = len(wanted)
        for message in wanted:
            pending -= 1
            self._send(reply, message, {}, *_position(pending, last))  # `no_hdr` has no effect here
            last = message.seq
            sent_bytes += _size(message)
            if sent_bytes >= (request.get("max_bytes") or _MAX_BYTES):
                break
            if 0 < request.get("batch", 0) <= len(wanted) - pending:
                break
        shown = max(found) if profile.draft else up_to
        self._send_status(reply, "204 EOB", *_position(pending, last), ("Nats-UpTo-Sequence", str(shown)))

    def _last_of_each(self, patterns: list[str], up_to: int) -> Iterable[StoredMessage]:
        store = self._stream.view
        for pattern in patterns:
            if not subjects.is_valid(pattern):
                continue
            for subject in store.totals(pattern):
                message = store.last_for(subject, up_to)
                if message is not None:
                    yield message

    def _send(self, reply: str, message: StoredMessage, request: Request, *more: tuple[str, str]) -> None:
        stream = self._stream
        header = b""
        if not request.get("no_hdr"):
            origin = (
                ("Nats-Stream", stream.name),
                ("Nats-Subject", message.subject),
                ("Nats-Sequence", str(message.seq)),
                ("Nats-Time-Stamp", golang.rfc3339(message.time, draft=stream.profile.draft)),
            )
            header = add_headers(message.header, *origin, *more)
        stream.context.send(reply, message.payload, header=header)


def _position(pending: int, last: int) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("Nats-Num-Pending", str(pending)), ("Nats-Last-Sequence", str(last))


def _has(request: Request, name: str) -> bool:
    if name in ("start_time", "up_to_time"):
        return name in request
    return bool(request.get(name)) and not (name == "batch" and request[name] < 0)


def _size(message: StoredMessage) -> int:
    return len(message.subject.encode("utf-8", "surrogateescape")) + len(message.header) + len(message.payload)
