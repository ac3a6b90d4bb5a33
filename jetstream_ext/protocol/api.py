"""What servers send as JSON: batch acks, refusals, answers of the JetStream API (`StreamState`), advisories."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import orjson

from jetstream_ext.errors import (
    DirectGetDisabledError,
    ErrorCode,
    ResponseError,
    ServerError,
    StreamConfigMismatchError,
    StreamRecreatedError,
    server_error,
)
from jetstream_ext.protocol import advice
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.direct import StoredMsg, single_message
from jetstream_ext.protocol.feature_table import DIRECT_BATCH
from jetstream_ext.protocol.numbers import json_int64, json_number, json_text, parse_number
from jetstream_ext.protocol.subjects import covers, overlap
from jetstream_ext.types import AbandonedBatch, BatchAck

FIRST_UNREADABLE: Final = 1 << 62
"""Servers with file storage (2.11 to 2.15) acknowledge messages from this sequence on, but find none of them for a read or a
consumer, and have lost them after a restart. `first_seq`, or a purge up to a sequence, can bring a stream there."""

ABANDONED: Final = "$JS.EVENT.ADVISORY.STREAM.BATCH_ABANDONED"
# Followers start no election for 4 s after they heard from their leader. So a leader that heard from a majority within
# this time is the only one.
_LEASE_NS: Final = 2_500_000_000
_FILLED_IN: Final = re.compile(r"\{\{\s*(\w*)|^\$\d+$")  # the part of a subject transform's destination
_IN_A_ZONE: Final = re.compile(r"(.*?)(\.\d+)?(Z|[+-][\d:]+)")
_EPOCH: Final = datetime.fromtimestamp(0, UTC)
_ZERO_TIME: Final = "0001-01-01T00:00:00Z"  # of an empty stream


@contextmanager
def parsing(what: str, frame: bytes = b"") -> Iterator[None]:
    """Raise ResponseError if the block finds a field of `what`, which another program wrote, missing or malformed."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ResponseError(f"{what} is malformed: {error!r:.200}", frame=frame) from error


def parse_object(what: str, payload: bytes) -> dict[str, Any]:
    """Parse `what`, a JSON object; raise ResponseError if it is malformed."""
    try:
        parsed = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        raise ResponseError(f"{what} is not JSON", frame=payload) from error
    if not isinstance(parsed, dict):
        raise ResponseError(f"{what} is not a JSON object", frame=payload)
    return parsed


@dataclass(frozen=True, slots=True)
class Target:
    """The stream that a context's messages are for; streams of several domains may store a subject, and all of them answer.

    Acks name the stream's domain, refusals only the stream, and other replies neither.
    """

    domain: str | None = None  # the context's; None: its connection decides
    elsewhere: bool = False  # the connected server is not of that domain
    stream: str | None = None  # if it is known

    def __str__(self) -> str:
        return f"{'' if self.stream is None else f'stream {self.stream!r} of '}domain {self.domain!r}"

    def other(self, payload: bytes) -> str:
        """Return the stream that has sent a reply, if that is certainly another one; or ""."""
        if self.domain is None or b'"stream"' not in payload:
            return ""
        try:
            reply = parse_object("the reply to a message", payload)
        except ResponseError:
            return ""  # its decoder raises
        stream, domain = _text(reply.get("stream")), _text(reply.get("domain"))
        if other := self.other_stream(stream, domain):
            return other
        if self.elsewhere and reply.get("error") and self.stream is not None and stream not in (None, "", self.stream):
            return f"stream {stream!r}, perhaps of another domain,"
        return ""

    def other_stream(self, stream: str | None, domain: str | None) -> str:
        """As `other`, for the fields of an ack."""
        return f"stream {stream!r} of domain {domain!r}" if self.domain and domain and domain != self.domain else ""

    def answered_by(self, other: str) -> str:
        """Return what the answer of another stream means, for an error."""
        return f"{other} has answered, not {self}; it stores the subject as well, and may have stored a copy"

    def doubt(self, code: int | None) -> str:
        """Return why a refusal with this ``err_code`` may be another stream's, for an error; or ""."""
        if not self.elsewhere or code != ErrorCode.STREAM_MISMATCH:
            return ""
        return f"a stream of another domain than {self.domain!r} may have refused it, which stores the subject as well"


def parse_answer(subject: str, payload: bytes, what: str = "") -> dict[str, Any]:
    """Parse the answer to a JetStream API request about `what`; raise ServerError for a refusal, ResponseError if malformed."""
    answer = parse_object(f"the answer on {subject}", payload)
    if "error" in answer:
        raise parse_refusal(answer["error"], payload, what)
    return answer


def parse_batch_ack(reply: dict[str, Any], payload: bytes) -> BatchAck:
    """Return the final ack of either kind of batch; raise ResponseError if a field is missing or malformed."""
    with parsing("the ack of a batch", payload):
        return BatchAck(
            json_text(reply.get("stream"), "stream"),
            json_number(reply.get("seq"), "seq"),
            json_text(reply.get("batch"), "batch"),
            json_number(reply.get("count", 0), "count"),
            domain=_text(reply.get("domain")),
            val=_text(reply.get("val")),
        )


def parse_refusal(error: object, payload: bytes = b"", what: str = "", stream: object = None) -> ServerError:
    """Return the error in a server's reply, whose text names `what`; raise ResponseError if it is malformed.

    `stream` is what the reply names as the stream that has refused a message.
    """
    if not isinstance(error, dict):
        about = f" about {what}" if what else ""
        raise ResponseError(f"the reply's error{about} is not a JSON object", frame=payload)
    code, err_code = error.get("code"), error.get("err_code")
    description = (_text(error.get("description")) or "")[:1024]
    refusal = server_error(
        code=code if type(code) is int else None,
        err_code=err_code if type(err_code) is int else None,
        description=description,
        message=f"{what}: {description or 'the server refused the request'}" if what else "",
    )
    refusal.stream = stream if isinstance(stream, str) and stream else None
    return refusal


def _text(value: object) -> str | None:
    return str(value) if isinstance(value, str | int | float) else None


def parse_abandoned(payload: bytes) -> tuple[AbandonedBatch, str | None]:
    """Parse an advisory into the batch and the domain it names; raise ResponseError if it is malformed."""
    what = "the advisory about an abandoned batch"
    event = parse_object(what, payload)
    with parsing(what, payload):
        stream, batch, reason = (json_text(event[name], name) for name in ("stream", "batch", "reason"))
        return AbandonedBatch(stream, batch, reason, parse_time(event["timestamp"])), _text(event.get("domain"))


@dataclass(frozen=True, slots=True)
class StreamState:
    """A stream at the moment when its leader answered; `created` and `config` are as the server writes them.

    `parse_stream_state` has checked the types of the fields of `config` that are used.
    """

    name: str
    created: str
    config: Mapping[str, Any]
    origin: Mapping[str, Any] = field(default_factory=dict)  # what it mirrors and how, if it is a mirror
    first_seq: int = 1  # the lowest sequence that it holds; ``last_seq + 1`` if it is empty
    last_seq: int = 0  # the last sequence that it assigned
    messages: int = 0
    size: int = 0
    num_subjects: int = 0  # without those that the request named
    consumers: int = 0  # with those of the streams that copy it
    first_time: datetime = _EPOCH  # when its first message was stored, if it has messages
    last_time: datetime = _EPOCH  # when its last message was stored, or else when the stream was created
    now: datetime = _EPOCH  # the leader's clock
    replicated: bool = False
    leader: str = ""
    leader_is_certain: bool = True  # no other server can be the leader at the same time
    api_level: int = 0  # of the leader; 0: before 2.11
    server_version: str | None = None  # of the leader, if it says so

    @property
    def created_at(self) -> datetime:
        return parse_time(self.created)

    @property
    def subjects(self) -> tuple[str, ...]:
        return tuple(self.config.get("subjects") or ())

    @property
    def retention(self) -> str:
        """``"limits"``, ``"interest"`` or ``"workqueue"``."""
        return str(self.config.get("retention") or "limits")

    @property
    def allows_direct(self) -> bool:
        return bool(self.config.get("allow_direct"))

    @property
    def contiguous(self) -> bool:
        """Whether only publishers write to it, so that the messages of a batch have consecutive sequences."""
        return not self.config.get("sources")

    @property
    def lowest_seq(self) -> int:
        """The lowest sequence that it can ever have had."""
        return max(1, self.config.get("first_seq") or 1)

    @property
    def has_every_sequence(self) -> bool:
        """Whether it holds a message for every sequence from `first_seq` to `last_seq`."""
        return self.messages == self.last_seq - self.first_seq + 1

    @property
    def removed(self) -> int:
        """How many messages it has removed, by a limit, a deletion or a purge: the number only grows."""
        return self.last_seq - self.lowest_seq + 1 - self.messages

    @property
    def never_removed(self) -> bool:
        """Whether it still holds every message that it ever stored."""
        return self.removed == 0

    @property
    def replicas(self) -> int:
        """How many servers are to hold it."""
        return int(self.config.get("num_replicas") or 1)

    @property
    def max_msgs_per_subject(self) -> int:
        """How many messages per subject it keeps (0: all)."""
        return max(0, self.config.get("max_msgs_per_subject") or 0)

    @property
    def max_msg_size(self) -> int | None:
        """How many bytes a message with its headers can have; None: the stream has no limit of its own."""
        limit = self.config.get("max_msg_size")
        return limit if limit is not None and limit >= 0 else None

    @property
    def max_bytes(self) -> int | None:
        """How many bytes its messages can have together; None: it has no such limit."""
        limit = self.config.get("max_bytes")
        return limit if limit is not None and limit > 0 else None

    def lifetime(self, ttl: int) -> int:
        """Return the seconds that the server makes of a TTL: ``max_age`` is an upper limit, the TTL of markers a lower one."""
        if self.marker_ttl is not None and self.max_msgs_per_subject != 1:
            ttl = max(ttl, int(self.marker_ttl.total_seconds()))
        return ttl if self.max_age is None else min(ttl, max(1, int(self.max_age.total_seconds())))

    @property
    def max_age(self) -> timedelta | None:
        return _duration(self.config.get("max_age"))

    @property
    def marker_ttl(self) -> timedelta | None:
        """How long it keeps the delete markers that it writes for expired subjects."""
        return _duration(self.config.get("subject_delete_marker_ttl"))

    @property
    def duplicate_window(self) -> timedelta | None:
        return _duration(self.config.get("duplicate_window"))

    @property
    def ends(self) -> tuple[tuple[int, datetime], ...]:
        """The sequences and stored times of its last and its first message, which another stream does not have."""
        last, first = (self.last_seq, self.last_time), (self.first_seq, self.first_time)
        return (last, first) if self.messages else (last,) if self.last_seq else ()

    @property
    def volatile(self) -> bool:
        """Whether it is empty after a restart of its servers, with the same `created`."""
        return bool(self.leader) and self.config.get("storage") == "memory"

    def check_created(self, created: str) -> None:
        if recreated(created, self.created):
            raise StreamRecreatedError(
                f"stream {self.name!r} was deleted and re-created at {self.created}; the position belongs to the "
                f"stream that was created at {created}",
                stream=self.name,
                expected=created,
                found=self.created,
            )

    def stores(self, subject: str) -> bool:
        """Whether it stores messages on the literal `subject`."""
        for pattern in self.config.get("subjects") or ():  # noqa: SIM110 - no generator in every publish
            if covers(pattern, subject):
                return True
        return False

    def copies_of(self, stream: str, subject: str) -> list[str]:
        """Return the subjects on which it stores copies of the messages of another stream on a subject or filter.

        After a transform they are filters that match these subjects.
        """
        copies: list[str] = []
        for source in (self.origin, *(self.config.get("sources") or ())):
            if source.get("name") != stream or source.get("external"):  # that is a stream of another account or domain
                continue
            if transforms := source.get("subject_transforms"):
                copies += [made for transform in transforms for made in _transformed(transform, subject)]
            elif overlap(source.get("filter_subject") or ">", subject):
                copies.append(subject)
        if own := self.config.get("subject_transform"):
            kept = [copy for copy in copies if not covers(own.get("src") or ">", copy)]
            copies = kept + [made for copy in copies for made in _transformed(own, copy)]
        return copies

    def check_acks(self) -> None:
        """Raise StreamConfigMismatchError if its server does not confirm what it has stored."""
        if self.config.get("no_ack"):
            raise StreamConfigMismatchError(
                f"stream {self.name!r} has no_ack, so the server does not confirm what it has stored; nothing was sent; turn "
                "no_ack off",
                diff={"no_ack": (False, True)},
            )

    def check_sequences(self, up_to: int | None = None) -> None:
        """Raise StreamConfigMismatchError if its server answers that it has no message where it has stored one.

        `up_to` is the last sequence that the caller reads (None: all of them).
        """
        storage = str(self.config.get("storage") or "file")
        readable = up_to is not None and up_to < FIRST_UNREADABLE
        if storage == "file" and not readable and self.last_seq >= FIRST_UNREADABLE:
            raise StreamConfigMismatchError(
                f"stream {self.name!r} has reached sequence {self.last_seq}, and servers with file storage do not find messages "
                "from sequence 2**62 on, although they acknowledge them; publish to a new stream with a lower first_seq or "
                "with memory storage",
                diff={"storage": ("memory", storage)},
            )

    def check_direct_reads(self, server_version: str, *, how: str = "") -> None:
        """Raise an error unless batched direct gets can read the stream; `how` overrides the advice for streams.

        Raises DirectGetDisabledError or UnsupportedFeatureError, or as `check_sequences` does.
        """
        if not self.allows_direct:
            how = how or advice.enable_stream(self.name, "direct")
            raise DirectGetDisabledError(f"stream {self.name!r}: direct get is disabled; {how}", stream=self.name)
        DIRECT_BATCH.check(self.api_level, self.server_version or server_version)
        self.check_sequences()


@dataclass(frozen=True, slots=True)
class Server:
    """The server that takes a batch, as far as it is known before the first message is sent.

    Without an answer (no such stream, or no permission to ask), `stream` is None and the rest is what the connection tells.
    """

    api_level: int
    version: str
    stream: StreamState | None = None  # that takes the batch, as its leader reported it
    last_seq: int = 0  # a sequence that it has already reached
    target: Target = field(default_factory=Target)
    no_jetstream: str = ""  # why perhaps no JetStream answers, for the error about a subject without a stream


def _transformed(transform: Mapping[str, Any], subject: str) -> list[str]:
    """Return a filter for what a subject transform makes of a subject or filter, or nothing if its source does not match."""
    if not overlap(transform.get("src") or ">", subject):
        return []
    tokens: list[str] = []
    for token in (transform.get("dest") or subject).split("."):
        filled_in = _FILLED_IN.search(token)
        if filled_in and (filled_in[1] or "").lower().startswith(("split", "slice")):  # it becomes several tokens
            return [".".join([*tokens, ">"])]
        tokens.append("*" if filled_in else token)
    return [".".join(tokens)]


def recreated(before: str, now: str) -> bool:
    """Return whether two streams of one name are different ones, by their creation times (empty: there was none)."""
    return before not in ("", now)


def parse_stream_state(answer: Mapping[str, Any], stream: str = "") -> StreamState:
    """Parse the answer to ``STREAM.INFO`` of `stream`; raise ResponseError if a field is missing or malformed."""
    with parsing(f"stream {stream!r}: the leader's answer to STREAM.INFO"):
        config, state, cluster = answer["config"], answer["state"], answer.get("cluster") or {}
        check_config(config)
        if stream and config["name"] != stream:
            raise ValueError("it is about another stream")
        peers = cluster.get("replicas") or []
        ages = [json_int64(peer.get("active") or 0, "active") for peer in peers if not peer.get("offline")]
        fresh = sum(age < _LEASE_NS for age in ages)
        messages, last_seq = json_number(state["messages"], "messages"), json_number(state["last_seq"], "last_seq")
        first_seq = max(1, json_number(state["first_seq"], "first_seq")) if messages else last_seq + 1
        created = parse_time(answer["created"])
        first_time = parse_time(state.get("first_ts") or _ZERO_TIME)
        last_time = parse_time(state["last_ts"])
        if last_time.year == 1:  # an empty stream
            last_time = created
        version, level = answering_server(config)
        return StreamState(
            name=config["name"],
            created=answer["created"],
            config=dict(config),
            origin=dict(config.get("mirror") or {}),
            first_seq=first_seq,
            last_seq=last_seq,
            messages=messages,
            size=json_number(state.get("bytes") or 0, "bytes"),
            num_subjects=json_number(state.get("num_subjects") or 0, "num_subjects") - len(state.get("subjects") or {}),
            consumers=json_number(state.get("consumer_count") or 0, "consumer_count"),
            first_time=first_time,
            last_time=last_time,
            now=parse_time(answer["ts"]),
            replicated=bool(peers) or (config.get("num_replicas") or 1) > 1,
            leader=json_text(cluster.get("leader") or "", "leader"),
            leader_is_certain=not peers or (fresh + 1) * 2 > len(peers) + 1,
            api_level=level,
            server_version=version,
        )


def parse_message(stream: str, answer: Mapping[str, Any]) -> StoredMsg:
    """Parse the answer to ``STREAM.MSG.GET`` of `stream`; raise ResponseError if a field is missing or malformed."""
    with parsing(f"the server's answer about a message of stream {stream!r}"):
        found = answer["message"]
        block = base64.b64decode(found["hdrs"], validate=True) if found.get("hdrs") else b""
        subject, seq = json_text(found["subject"], "subject").encode(), json_number(found["seq"], "seq", low=1)
        # A leader answers in the zone that its server runs in.
        if (parts := _IN_A_ZONE.fullmatch(json_text(found["time"], "time"))) is None:
            raise ValueError("the time has no offset from UTC")
        time = f"{parse_time(parts[1] + parts[3]).replace(tzinfo=None).isoformat()}{parts[2] or ''}Z".encode()
        h.parse_time_ns(time)
        row = [subject, b"", b": " + time, b"", b"", b"", h.complete_lines(block)]
        return single_message(stream, seq, base64.b64decode(found.get("data") or "", validate=True), row)


# The fields of a stream's configuration that are read, by their kinds. A field may be absent or null.
_NUMBERS: Final = (
    "max_msgs", "max_bytes", "max_msgs_per_subject", "max_msg_size", "max_age", "duplicate_window",
    "subject_delete_marker_ttl", "num_replicas",
)  # fmt: skip
_TEXTS: Final = ("retention", "storage", "discard")


def check_config(config: Mapping[str, Any]) -> None:
    """Raise one of the errors of `parsing` if a field of a stream's configuration has another type."""

    def check_texts(fields: Mapping[str, Any], *names: str) -> None:
        for name in names:
            if type(value := fields.get(name) or "") is not str:
                json_text(value, name)

    json_text(config["name"], "name")
    if (value := config.get("first_seq")) is not None:
        json_number(value, "first_seq")
    for name in _NUMBERS:
        if (value := config.get(name)) is not None and not (type(value) is int and -(1 << 63) <= value < 1 << 63):
            json_int64(value, name)
    check_texts(config, *_TEXTS)
    transforms = [transform] if (transform := config.get("subject_transform")) else []
    mirror = config.get("mirror")
    for source in (*((mirror,) if mirror else ()), *(config.get("sources") or ())):
        check_texts(source, "name", "filter_subject")
        check_texts(source.get("external") or {}, "api")
        check_texts(source.get("consumer") or {}, "name", "deliver_subject")
        transforms += source.get("subject_transforms") or ()
    for transform in transforms:
        check_texts(transform, "src", "dest")
    for text in (*(config.get("subjects") or ()), *(config.get("metadata") or {}).values()):
        if type(text) is not str:
            json_text(text, "subjects or metadata")


def answering_server(config: Mapping[str, Any]) -> tuple[str | None, int]:
    """Return the version and API level of a stream's or consumer's leader; from 2.11 on they are in the metadata."""
    metadata = config.get("metadata") or {}
    return _text(metadata.get("_nats.ver")) or None, parse_number(_text(metadata.get("_nats.level")) or "") or 0


def parse_time(text: object) -> datetime:
    """Return the time in a JSON document; raise ValueError or OverflowError if it has none with an offset from UTC."""
    time = datetime.fromisoformat(json_text(text, "time"))
    if time.tzinfo is None:
        raise ValueError("a time has no offset from UTC")
    return time.astimezone(UTC)


def _duration(nanoseconds: int | None) -> timedelta | None:
    return timedelta(microseconds=nanoseconds / 1000) if nanoseconds else None
