"""Checks of arguments, the publish options as headers, and what a stream or bucket must have for a feature."""

from __future__ import annotations

import enum
import inspect
import math
from collections.abc import AsyncIterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

from jetstream_ext.errors import BadHeaderError
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.feature_table import ATOMIC, DIRECT_GET, FAST_INGEST, MSG_TTL, Feature
from jetstream_ext.protocol.subjects import bucket_stream, check_filter, check_name
from jetstream_ext.text import counted, did_you_mean
from jetstream_ext.types import NEVER, TTL, BatchMessage

_Choice = TypeVar("_Choice", bound=enum.Enum)

_EXPECTATIONS: Final = {h.EXPECTED_LAST_SEQ, h.EXPECTED_LAST_SUBJECT_SEQ, h.EXPECTED_LAST_MSG_ID}

_SHOWN: Final = 64  # characters of a value in an error
ENTRY: Final = "a BatchMessage, (subject, payload) or (subject, payload, headers)"
"""What a message of a bulk is, in errors."""
_BARE: Final = (str, bytes, bytearray, memoryview)

COLUMN_SYNONYMS: Final = {
    "body": "data",
    "message": "data",
    "offset": "seq",
    "payload": "data",
    "sequence": "seq",
    "timestamp": "time",
    "topic": "subject",
    "value": "data",
}
"""What tables of other systems call a column of a message."""

_MAX_DURATION: Final = (1 << 63) // 1_000_000_000  # seconds: servers keep durations as nanoseconds in 64 bits

MAX_TTL = 36_525 * 86_400
"""A hundred years in seconds. Servers accept up to 2**63-1 s, but a message that expires after the year 2262 overflows
their nanosecond clock and is removed at once (2.11 to 2.15.1)."""


def ttl_value(ttl: TTL) -> str:
    """Return the ``Nats-TTL`` text for `ttl`: whole seconds, or ``never`` (ADR-43)."""
    if ttl is NEVER:
        return "never"
    if isinstance(ttl, bool) or not isinstance(ttl, int | float | timedelta):
        raise TypeError(f"a TTL must be seconds, a timedelta or NEVER, not {type(ttl).__name__}")
    if isinstance(ttl, timedelta):
        seconds, rest = divmod(ttl, timedelta(seconds=1))
        whole = not rest
    else:
        if isinstance(ttl, float) and not math.isfinite(ttl):
            raise ValueError("a TTL must be finite; use NEVER for no expiry")
        seconds, whole = int(ttl), ttl == int(ttl)
    if seconds < 1 or not whole:
        raise ValueError(f"a TTL must be a whole number of seconds of at least 1, not {ttl!r}")
    if seconds > MAX_TTL:
        raise ValueError(f"a TTL must be at most 100 years, not {ttl!r}; use NEVER for no expiry")
    return str(seconds)


def check_int(value: int, name: str, *, low: int = 1, high: int | None = None) -> int:
    """Return `value` if it is an int from `low` to `high`; raise ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        span = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise ValueError(f"{name} must be an integer {span}, not {value!r}")
    return value


def check_choice(value: object, kind: type[_Choice], name: str) -> _Choice:
    """Return `value`, or the text of one, as a member of `kind`; raise ValueError with what is allowed and the nearest."""
    if not isinstance(value, kind):
        check_word(value, [each.value for each in kind], name)
    return kind(value)


def check_word(value: object, allowed: Sequence[str], name: str) -> None:
    """Raise ValueError, with what is allowed and the nearest, unless `value` is one of the words `allowed`."""
    if value not in allowed:
        choices = f"{', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}"
        raise ValueError(f"{name} must be {choices}, not {value!r}{did_you_mean(value, allowed)}")


def check_list(value: object, name: str, what: str, *, or_one: str = "") -> None:
    """Raise TypeError unless `value` can be a list of `what`, which are str; the error shows how to give a single one.

    `or_one` names what the caller accepts as well.
    """
    if isinstance(value, str | bytes) or not _can_be_iterated(value):
        hint = f"; give [{str(value)!r}]" if isinstance(value, str) and value else ""
        alternative = f"{or_one}, or " if or_one else ""
        raise TypeError(f"{name} must be {alternative}a list of {what}, not {shown(value)}{hint}")


def check_function(given: object, name: str, what: str = "a function", *, awaited: bool = True) -> None:
    """Raise TypeError unless `given` can be called; also for an async function, if what it returns is not `awaited`."""
    if not callable(given):
        hint = "; give the function itself, without calling it" if inspect.isawaitable(given) else ""
        raise TypeError(f"{name} must be {what}, not {shown(given)}{hint}")
    if not awaited and any(
        inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each)
        for each in (given, getattr(given, "__call__", None))  # noqa: B004 - that of an object may be an async method
    ):
        raise TypeError(
            f"{name} must be a plain function, not an async one, which would never run; give a function that starts a task"
        )


def check_not_coroutine(result: object, name: str) -> None:
    """Raise TypeError if a plain function has returned a coroutine, which never runs."""
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError(f"{name} returned a coroutine, which never runs; give a function that starts a task")


def _can_be_iterated(value: object) -> bool:
    return hasattr(type(value), "__iter__") or hasattr(type(value), "__getitem__")


def shown(value: object) -> str:
    """Return a text as it is, cut if it is long, and the type's name of any other value."""
    if not isinstance(value, str):
        return type(value).__name__
    text = str(value)  # a class such as NumPy's has a repr of its own
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}…"


def check_sequence(value: int, name: str, *, low: int = 1) -> int:
    """Return `value` if it can be a stream sequence; raise ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 1 << 64:
        raise ValueError(f"{name} must be a stream sequence from {low} to 2**64-1, not {value!r}")
    return value


def _expected_sequence(name: str, value: int) -> str:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    return str(check_sequence(value, name, low=0))


def given_headers(message: BatchMessage) -> Mapping[str, str]:
    """Return the headers that the caller gave a message; raise TypeError if they are not a mapping."""
    if message.headers is None:
        return {}
    if not isinstance(message.headers, Mapping):
        raise TypeError(f"headers must be a mapping of str to str, not {type(message.headers).__name__}")
    return message.headers


def has_expectation(message: BatchMessage) -> bool:
    """Return whether the server stores a message only if its stream or subject is as the message expects."""
    return any(name in _EXPECTATIONS for name, _ in message_headers(message))


def message_headers(message: BatchMessage) -> list[tuple[str, str]]:
    """Return the headers of a message: the caller's, then those of its options; raise an error if one is invalid."""
    own = given_headers(message)
    pairs: list[tuple[str, str]] = list(own.items())
    if len(pairs) > len(own):
        names = [name for name, _ in pairs]
        for name in names:
            if h.is_reserved(name) and names.count(name) > 1:
                raise BadHeaderError(f"header {name!r} has several values; servers take only the first")
    options: list[tuple[str, str]] = []
    if message.msg_id is not None:
        if not message.msg_id:
            raise ValueError("msg_id must not be empty")
        options.append((h.MSG_ID, message.msg_id))
    if message.msg_ttl is not None:
        options.append((h.MSG_TTL, ttl_value(message.msg_ttl)))
    if message.stream is not None:
        check_name(message.stream, "stream name")
        options.append((h.EXPECTED_STREAM, message.stream))
    if message.expected_last_seq is not None:
        options.append((h.EXPECTED_LAST_SEQ, _expected_sequence("expected_last_seq", message.expected_last_seq)))
    if message.expected_last_subject_seq is not None:
        value = _expected_sequence("expected_last_subject_seq", message.expected_last_subject_seq)
        options.append((h.EXPECTED_LAST_SUBJECT_SEQ, value))
    if message.expected_last_subject is not None:
        if message.expected_last_subject_seq is None and h.EXPECTED_LAST_SUBJECT_SEQ not in own:
            raise ValueError("expected_last_subject needs expected_last_subject_seq")
        check_filter(message.expected_last_subject)  # servers take an empty one for the message's own subject
        options.append((h.EXPECTED_LAST_SUBJECT, message.expected_last_subject))
    for name, _ in options:
        if name in own:
            raise BadHeaderError(f"header {name!r} is set both in headers and by an option")
    return pairs + options


def check_messages(messages: object) -> None:
    """Raise TypeError, with the call that was probably meant, unless `messages` can be a bulk of messages."""
    if isinstance(messages, BatchMessage):
        given, hint = "one BatchMessage", "; give [message]"
    elif isinstance(messages, _BARE):
        given, hint = type(messages).__name__, "; give [(subject, payload)]"
    elif isinstance(messages, tuple) and messages and isinstance(messages[0], str):
        given, hint = "one message", f"; give [({messages[0]!r}, ...)]"
    elif isinstance(messages, Mapping) and isinstance(next(iter(messages), None), str):
        given, hint = type(messages).__name__, "; give its items()"
    elif not (isinstance(messages, AsyncIterable) or _can_be_iterated(messages)):
        hint = "; await it" if inspect.isawaitable(messages) else "; call it" if callable(messages) else ""
        given = type(messages).__name__
    else:
        return
    raise TypeError(f"messages must be a list or another iterable of messages, each {ENTRY}, not {given}{hint}")


def as_message(entry: object) -> BatchMessage:
    """Return a `BatchMessage` or ``(subject, payload[, headers])`` as a `BatchMessage`; raise TypeError for others."""
    if isinstance(entry, BatchMessage):
        return entry
    if isinstance(entry, tuple) and 2 <= len(entry) <= 3:
        return BatchMessage(*entry)
    hint = "; await it" if inspect.isawaitable(entry) else ""
    if isinstance(entry, _BARE):
        hint = "; a payload needs its subject: (subject, payload)"
    raise TypeError(f"a message must be {ENTRY}, not {kind_of(entry)}{hint}")


def kind_of(entry: object) -> str:
    """Return what the caller gave, or a handler returned, instead of a message: a type's name, or the length of a tuple."""
    return f"a tuple of {counted(len(entry), 'item')}" if isinstance(entry, tuple) else type(entry).__name__


def is_one_message(given: object) -> bool:
    """Whether `given`, where there may be one message or several, is meant as one; its tuple may have a wrong length."""
    return isinstance(given, BatchMessage) or (isinstance(given, tuple) and bool(given) and isinstance(given[0], str))


def is_bulk(given: object) -> bool:
    """Whether `given` can be several messages."""
    if isinstance(given, (*_BARE, Mapping)):
        return False
    return isinstance(given, AsyncIterable) or _can_be_iterated(given)


def payload_bytes(payload: object, what: str, name: str) -> bytes:
    """Return a payload as bytes; raise TypeError, with `what` and the `name` of its place, unless it is a buffer of bytes."""
    if isinstance(payload, bytes):
        return payload
    if not isinstance(payload, bytearray | memoryview):
        hint = "; encode it, for example with .encode()" if isinstance(payload, str) else ""
        raise TypeError(f"{what} {name!r} must be bytes, not {type(payload).__name__}{hint}")
    return bytes(payload)


def check_seconds(value: float, name: str, *, zero: bool = False) -> float:
    """Return a duration; raise TypeError if it is not a number, ValueError unless it is over 0 (`zero` allows 0)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__}")
    if not (value > 0 or (zero and value == 0)):
        raise ValueError(f"{name} must be {'at least' if zero else 'over'} 0 seconds, not {value!r}")
    return float(value)


def check_duration(value: float | timedelta, name: str) -> float:
    """Return a duration of a configuration in seconds; raise TypeError for anything else, ValueError for one out of range."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, int | float) and seconds > _MAX_DURATION:
        raise ValueError(f"{name} must be at most {_MAX_DURATION} seconds (292 years), not {value!r}")
    return check_seconds(seconds, name, zero=True)


def check_bool(value: object, name: str) -> None:
    """Raise TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {shown(value)}")


def check_unicode(document: object, what: str) -> None:
    """Raise ValueError if a text in `document`, which is to be sent as JSON, cannot be encoded; `what` leads to it."""
    if isinstance(document, str):
        try:
            document.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{what} has half of a surrogate pair, which UTF-8 cannot encode: {document[:64]!r}; nothing was sent"
            ) from None
    elif isinstance(document, Mapping):
        for name, value in document.items():
            check_unicode(name, f"a name in {what}")
            check_unicode(value, f"{name} of {what}")
    elif isinstance(document, list | tuple):
        for value in document:
            check_unicode(value, what)


def rfc3339(when: datetime, name: str) -> str:
    """Return an aware datetime as servers accept it in requests; raise ValueError or TypeError for others."""
    if not isinstance(when, datetime):
        raise TypeError(f"{name} must be a datetime, not {type(when).__name__}")
    if when.tzinfo is None or when.utcoffset() is None:
        raise ValueError(f"{name} must be timezone-aware, not {when!r}")
    try:
        return when.astimezone(UTC).isoformat()  # in UTC, because RFC 3339 has no offsets with seconds
    except OverflowError:
        raise ValueError(f"{name} must be in the years 1 to 9999 in UTC, not {when!r}") from None


OPTIONS: Final[Mapping[str, Feature]] = {
    "direct": DIRECT_GET,
    "atomic": ATOMIC,
    "batched": FAST_INGEST,  # not of buckets
    "ttl": MSG_TTL,
    "spark": ATOMIC,  # only of buckets, with `marker_subjects`
}
"""What a stream or bucket can lack, as ``jetstream-ext enable`` and `kv.enable` call it: each option turns on the field of the
stream's configuration that its feature names."""

_RULED_OUT: Final = (
    ("persist_mode", ("allow_atomic",), "it persists asynchronously"),
    ("allow_msg_counter", ("allow_msg_ttl",), "it holds counters"),
    ("no_ack", ("allow_atomic", "allow_batched"), "it has no_ack, so the server does not confirm what it has stored"),
    ("mirror", ("allow_atomic", "allow_batched"), "it is a mirror"),
    ("sealed", ("allow_atomic", "allow_batched", "allow_msg_ttl"), "it is sealed, so it takes no messages"),
)
"""Fields of a configuration, with those that a stream can never have beside them, and why; the last reason counts."""


def ruled_out(config: Mapping[str, Any]) -> dict[str, str]:
    """Return which fields that enable a feature a stream of this configuration can never have, and why."""
    return {
        field: why
        for given, fields, why in _RULED_OUT
        if (config.get(given) or "default") != "default"
        for field in fields
    }


def bucket_fields(bucket: str, **options: bool) -> dict[str, Any]:
    """Return the fields that these `OPTIONS` turn on in a bucket's stream; raise TypeError unless each is True or False."""
    for option, value in options.items():
        check_bool(value, f"bucket {bucket!r}: {option}")
    return {OPTIONS[option].field: True for option, value in options.items() if value}


def marker_fields(ttl: TTL, name: str) -> dict[str, Any]:
    """Return the fields of a stream that writes delete markers with a TTL: those that servers turn on together.

    Raises ValueError or TypeError, with the `name` of the argument, if the TTL is invalid.
    """
    if ttl is NEVER:
        raise ValueError(f"{name} must be finite: servers have no delete markers without expiry")
    return {
        "allow_msg_ttl": True,
        "allow_rollup_hdrs": True,
        "deny_purge": False,
        "subject_delete_marker_ttl": int(ttl_value(ttl)),
    }


def bucket_subjects(bucket: str, *, atomic: bool, spark: bool, events: Sequence[str]) -> list[str]:
    """Return the subjects that a bucket's stream needs besides its keys; raise ValueError or TypeError for bad `events`."""
    stream = bucket_stream(bucket)
    what = f"bucket {bucket!r}: events"
    check_list(events, what, "subject filters")
    for subject in events:
        check_filter(subject)
        first = subject.partition(".")[0]
        if not subject.endswith(".>") or first == "*" or first.startswith(("$", "_")):
            raise ValueError(
                f"{what}: {subject!r} must end in '.>', and begin with a token that has no wildcard and no '$' or '_' at its start"
            )
    own = [reads_subject(stream)] if atomic else []
    return [*own, *([marker_subjects(stream)] if spark else []), *dict.fromkeys(events)]


def reads_subject(stream: str) -> str:
    """Return where transactions store messages that carry the expectations of keys that they only read."""
    return f"_reads.{stream}"


def marker_subjects(stream: str) -> str:
    """Return where Spark's sink keeps its markers in a bucket's stream."""
    return f"_spark.{stream}.>"
