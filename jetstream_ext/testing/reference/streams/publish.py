"""One published message: its checks, storing it, and the answer to its publisher.

A check raises an `ApiError` with the refusal, or a `DuplicateMessageError`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..releases import Profile
from ..wire import golang
from ..wire.errors import ApiError, api_error, not_modelled
from ..wire.protocol import get_header, header_names, parse_signed
from .stream import Stream, message_ttl, valid_ttl

_MAX_HEADER = 65535
_NOT_MODELLED = {
    "Nats-Schedule": "schedules",
    "Nats-Incr": "counters",
    "Nats-Counter-": "counters",
    "Nats-Trace-": "tracing",
}
"""Prefixes of headers, each with the row of `Profile` that knows them."""
_OTHER_SUBJECT = "Nats-Expected-Last-Subject-Sequence-Subject"


class DuplicateMessageError(Exception):
    """The message id was published before, as the message with this sequence."""

    def __init__(self, seq: int) -> None:
        super().__init__(seq)
        self.seq = seq


@dataclass(slots=True)
class Staged:
    """The changes by the earlier messages of an atomic batch."""

    count: int = 0
    ids: set[str] = field(default_factory=set)
    written: dict[str, list[int]] = field(default_factory=dict)
    """The sizes of the messages by subject."""
    expected: dict[str, int] = field(default_factory=dict)
    """The expected last sequences by subject."""


def check_size(stream: Stream, header: bytes, payload: bytes) -> None:
    """Check the size of a message, which precedes the checks of a batch."""
    if 0 <= stream.config["max_msg_size"] < len(header) + len(payload):
        raise api_error(10054)


def check_single(stream: Stream, subject: str, header: bytes, payload: bytes) -> None:
    """Check a message that is not part of a batch."""
    profile, config = stream.profile, stream.config
    check_size(stream, header, payload)
    if header:
        if len(header) > _MAX_HEADER:
            raise api_error(10097)
        _check_modelled(profile, header)
        _check_stream(stream, header)
        if valid_ttl(profile, header) and not config["allow_msg_ttl"]:
            raise api_error(10166)
        wanted = _expected(header, "Nats-Expected-Last-Subject-Sequence")
        other = get_header(header, _OTHER_SUBJECT) if profile.expects_other_subject else None
        if wanted is not None:
            _check_last(stream, other or subject, wanted)
        elif other:
            raise api_error(10193)
        wanted = _expected(header, "Nats-Expected-Last-Sequence")
        if wanted is not None and wanted != stream.store.last:
            raise api_error(10071, stream.store.last)
        _check_source(profile, header)
        _check_duplicate(stream, header)
        check_last_id(stream, header)
        _check_rollup(stream, header)


def check_last_id(stream: Stream, header: bytes) -> None:
    """Check `Nats-Expected-Last-Msg-Id`, also of a message in a batch."""
    wanted = get_header(header, "Nats-Expected-Last-Msg-Id")
    if wanted and wanted != stream.last_msg_id:
        raise api_error(10070, stream.last_msg_id)


def check_staged(stream: Stream, staged: Staged, subject: str, header: bytes, payload: bytes) -> None:
    """Check a message of a batch against the stream and the earlier messages, and add it to `staged`."""
    profile, config = stream.profile, stream.config
    rollup = ""
    if header:
        if len(header) > _MAX_HEADER:
            raise api_error(10097)
        _check_modelled(profile, header)
        _check_stream(stream, header)
        try:
            has_ttl = message_ttl(profile, header) != 0
        except ApiError:
            if config["allow_msg_ttl"]:
                raise
            has_ttl = True
        if has_ttl and not config["allow_msg_ttl"]:
            raise api_error(10166)
        msg_id = get_header(header, "Nats-Msg-Id")
        if msg_id:
            if msg_id in staged.ids:
                raise DuplicateMessageError(0)
            _check_duplicate(stream, header)
            staged.ids.add(msg_id)
        _check_source(profile, header)
        _check_expectations(stream, staged, subject, header)
        rollup = _check_rollup(stream, header)
        if (rollup == "sub" and subject in staged.written) or (rollup == "all" and staged.written):
            raise api_error(10111, f"batch rollup {rollup} invalid")
    staged.written.setdefault(subject, []).append(stream.store.size(subject, header, payload))
    staged.count += 1
    if config["discard"] == "new":
        _check_room(stream, staged)


def _check_expectations(stream: Stream, staged: Staged, subject: str, header: bytes) -> None:
    wanted = _expected(header, "Nats-Expected-Last-Sequence")
    if wanted is not None:
        if wanted != stream.store.last + staged.count:
            raise api_error(10071, stream.store.last + staged.count)
        if staged.written:
            raise api_error(10164)
    wanted = _expected(header, "Nats-Expected-Last-Subject-Sequence")
    other = get_header(header, _OTHER_SUBJECT)
    if wanted is None:
        if other:
            raise api_error(10193)
        return
    subject = other or subject
    if subject in staged.written:
        raise api_error(10164)
    if subject not in staged.expected:
        _check_last(stream, subject, wanted)
        staged.expected[subject] = wanted
    elif staged.expected[subject] != wanted:
        raise api_error(10071, staged.expected[subject])


def _check_room(stream: Stream, staged: Staged) -> None:
    config, store = stream.config, stream.store
    sizes = [size for each in staged.written.values() for size in each]
    if 0 < config["max_msgs"] < len(store) + len(sizes):
        raise api_error(10077, "maximum messages exceeded")
    if 0 < config["max_bytes"] < store.bytes + sum(sizes):
        raise api_error(10077, "maximum bytes exceeded")


def _expected(header: bytes, name: str) -> int | None:
    text = get_header(header, name)
    return parse_signed(text) if text else None


def _check_last(stream: Stream, subject: str, wanted: int) -> None:
    last = stream.store.last_for(subject)
    if wanted != (last.seq if last else 0):
        raise api_error(10071, last.seq if last else 0)


def _check_stream(stream: Stream, header: bytes) -> None:
    wanted = get_header(header, "Nats-Expected-Stream")
    if wanted and wanted != stream.name:
        raise api_error(10060)


def _check_modelled(profile: Profile, header: bytes) -> None:
    for name in header_names(header):
        known = any(name.startswith(prefix) and getattr(profile, row) for prefix, row in _NOT_MODELLED.items())
        if known and get_header(header, name):
            raise not_modelled(f"header {name}")


def _check_source(profile: Profile, header: bytes) -> None:
    if profile.source_header_has_identity and get_header(header, "Nats-Stream-Source"):
        raise api_error(10227)


def _check_duplicate(stream: Stream, header: bytes) -> None:
    msg_id = get_header(header, "Nats-Msg-Id")
    seq = stream.duplicate_of(msg_id) if msg_id and not stream.config["mirror"] else 0
    if seq:
        raise DuplicateMessageError(seq)


def _check_rollup(stream: Stream, header: bytes) -> str:
    rollup = (get_header(header, "Nats-Rollup") or "").lower()
    if rollup:
        if not stream.config["allow_rollup_hdrs"] or stream.config["deny_purge"]:
            raise api_error(10111, "rollup not permitted")
        if rollup not in ("sub", "all"):
            raise api_error(10111, f'rollup value invalid: "{rollup}"')
    return rollup


Batch = tuple[str, int]
"""The id of a batch and a batch sequence."""


def publish(
    stream: Stream,
    subject: str,
    header: bytes,
    payload: bytes,
    *,
    reply: str = "",
    batch: Batch | None = None,
    on_stored: Callable[[int], None] | None = None,
) -> None:
    """Check a message, store it, and answer its publisher if there is a `reply` subject.

    The messages of a `batch` were checked when they were staged, except for one header. `on_stored` is called with the
    sequence of the stored message, instead of sending a PubAck.
    """
    answers = bool(reply) and not stream.config["no_ack"]
    send = stream.context.send
    try:
        if batch is None:
            check_single(stream, subject, header, payload)
        elif header:
            check_last_id(stream, header)
        seq = stream.append(subject, header, payload)
    except DuplicateMessageError as duplicate:
        if answers:
            send(reply, pub_ack(stream.name, duplicate.seq, duplicate=True))
        return
    except ApiError as error:
        if answers:
            send(reply, pub_error(stream.name, error))
        return
    if on_stored is not None:
        on_stored(seq)
    elif answers:
        send(reply, pub_ack(stream.name, seq, batch=batch))
    stream.announce(seq)


def pub_ack(stream: str, seq: int, *, duplicate: bool = False, batch: Batch | None = None) -> bytes:
    value: dict[str, Any] = {"stream": stream, "seq": seq}
    if batch is not None:
        value |= {"batch": batch[0], "count": batch[1]}
    ack = golang.dumps(value)
    return ack[:-1] + b',"duplicate": true}' if duplicate else ack  # the server writes this space


def pub_error(stream: str, error: ApiError, *, batch: Batch | None = None) -> bytes:
    """Return a refusal; only the draft dialect names the batch."""
    value: dict[str, Any] = {"error": error.as_json(), "stream": stream, "seq": 0}
    if batch is not None:
        value |= {"batch": batch[0], "count": batch[1]}
    return golang.dumps(value)
