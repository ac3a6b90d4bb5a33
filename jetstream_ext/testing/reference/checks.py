"""The checks of a published message: expectations, TTL, duplicates, roll-ups, discard policy."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from . import headers, times
from .errors import ApiError, api_error
from .versions import Profile

if TYPE_CHECKING:
    from .stream import Stream

__all__ = [
    "DuplicateMessageError",
    "SilentRefusalError",
    "Staged",
    "check_direct",
    "check_staged",
    "message_ttl",
    "required_level_met",
]

_MAX_HEADER = 65535
_LEVEL = re.compile(r"[+-]?[0-9]{1,18}")
FULL = {
    "msgs": "maximum messages exceeded",
    "bytes": "maximum bytes exceeded",
    "subject": "maximum messages per subject exceeded",
}


class DuplicateMessageError(Exception):
    """Say that the message id was seen already, and under which sequence."""

    def __init__(self, seq: int) -> None:
        super().__init__(seq)
        self.seq = seq


class SilentRefusalError(Exception):
    """Say that a release drops a message without an answer."""


@dataclass(slots=True)
class Staged:
    """What the earlier messages of an atomic batch would change."""

    count: int = 0
    ids: set[str] = field(default_factory=set)
    written: dict[str, list[int]] = field(default_factory=dict)  # subject -> sizes
    expected: dict[str, int] = field(default_factory=dict)


def message_ttl(profile: Profile, header: bytes) -> int:
    """Return the TTL in whole seconds, 0 for none and -1 for never.

    Raises:
        ApiError: The header is there, and makes no sense.
    """
    if not profile.ttl:
        return 0
    if profile.draft and headers.get(header, "Nats-No-Expire") == "1":
        return -1
    text = headers.get(header, "Nats-TTL")
    if not text or (profile.draft and text == "0"):
        return 0
    if text.lower() == "never":
        return -1
    duration = times.go_seconds(text)
    if duration is not None:
        if duration < times.SECOND:
            raise api_error(10165)
        return duration // times.SECOND
    seconds = headers.parse_signed(text)
    if seconds < 0:
        raise api_error(10165)
    return seconds


def required_level_met(profile: Profile, header: bytes) -> bool:
    """Whether the server has the API level that a message asks for."""
    text = headers.get(header, "Nats-Required-Api-Level")
    if not text:
        return True
    return _LEVEL.fullmatch(text) is not None and int(text) <= profile.api_level


def check_direct(stream: Stream, subject: str, header: bytes, payload: bytes) -> None:
    """Check an ordinary message.

    Raises:
        ApiError: It is refused.
        DuplicateMessageError: Its id was stored already.
    """
    profile, config = stream.profile, stream.config
    if config["sealed"]:
        raise api_error(10109)
    if profile.release >= (2, 15, 0):
        _check_size(stream, header, payload)
    if header:
        _check_stream(stream, header)
        if _ttl_or_zero(profile, header) and not config["allow_msg_ttl"]:
            raise api_error(10166)
        if not profile.strict_json:
            _check_duplicate(stream, header)
        wanted = _expected(header, "Nats-Expected-Last-Subject-Sequence")
        other = headers.get(header, "Nats-Expected-Last-Subject-Sequence-Subject") if profile.ttl else None
        if wanted is not None:
            last = stream.store.last_for(other or subject)
            if wanted != (last.seq if last else 0):
                raise api_error(10071, last.seq if last else 0)
        elif other and profile.strict_json:
            raise api_error(10193)
        wanted = _expected(header, "Nats-Expected-Last-Sequence")
        if wanted is not None and wanted != stream.store.last:
            raise api_error(10071, stream.store.last)
        _check_source(profile, header)
        _check_duplicate(stream, header)
        check_last_id(stream, header)
        _check_rollup(stream, header)
    _check_size(stream, header, payload)


def check_last_id(stream: Stream, header: bytes) -> None:
    """Check `Nats-Expected-Last-Msg-Id`, which the server also does for messages of a batch."""
    wanted = headers.get(header, "Nats-Expected-Last-Msg-Id")
    if wanted and wanted != stream.last_msg_id:
        raise api_error(10070, stream.last_msg_id)


def check_staged(stream: Stream, staged: Staged, subject: str, header: bytes, payload: bytes) -> None:
    """Check a message of a batch against the stream and what the batch changed before; note what it changes.

    Raises:
        ApiError: It is refused.
        DuplicateMessageError: Its id was stored already; its error for an atomic batch is 10201.
    """
    profile, config = stream.profile, stream.config
    rollup = ""
    if header:
        if len(header) > _MAX_HEADER:
            raise api_error(10097)
        _check_stream(stream, header)
        try:
            ttl, bad = message_ttl(profile, header), None
        except ApiError as error:
            ttl, bad = 0, error
        if (ttl or bad) and not config["allow_msg_ttl"]:
            raise api_error(10166)
        if bad:
            raise bad
        msg_id = headers.get(header, "Nats-Msg-Id")
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
        _check_room(stream, staged, subject, header)


def _check_expectations(stream: Stream, staged: Staged, subject: str, header: bytes) -> None:
    wanted = _expected(header, "Nats-Expected-Last-Sequence")
    if wanted is not None:
        if wanted != stream.store.last + staged.count:
            raise api_error(10071, stream.store.last + staged.count)
        if staged.written:
            raise api_error(10164)
    wanted = _expected(header, "Nats-Expected-Last-Subject-Sequence")
    other = headers.get(header, "Nats-Expected-Last-Subject-Sequence-Subject")
    if wanted is None:
        if other:
            raise api_error(10193)
        return
    subject = other or subject
    if subject in staged.written:
        raise api_error(10164)
    if subject not in staged.expected:
        last = stream.store.last_for(subject)
        if wanted != (last.seq if last else 0):
            raise api_error(10071, last.seq if last else 0)
        staged.expected[subject] = wanted
        return
    if staged.expected[subject] != wanted:
        raise api_error(10071, staged.expected[subject])


def _check_room(stream: Stream, staged: Staged, subject: str, header: bytes) -> None:
    config, store = stream.config, stream.store
    sizes = [size for each in staged.written.values() for size in each]
    if 0 < config["max_msgs"] < len(store) + len(sizes):
        raise api_error(10077, FULL["msgs"])
    if 0 < config["max_bytes"] < store.bytes + sum(sizes):
        raise api_error(10077, FULL["bytes"])
    limit = config["max_msgs_per_subject"]
    per_subject = config["discard_new_per_subject"] and not headers.get(header, "Nats-Rollup")
    if per_subject and store.count(subject) + len(staged.written[subject]) > limit:
        raise api_error(10077, FULL["subject"])


def _expected(header: bytes, name: str) -> int | None:
    text = headers.get(header, name)
    return headers.parse_signed(text) if text else None


def _ttl_or_zero(profile: Profile, header: bytes) -> int:
    try:
        return message_ttl(profile, header)
    except ApiError:
        return 0  # reported later, after every other check


def _check_stream(stream: Stream, header: bytes) -> None:
    wanted = headers.get(header, "Nats-Expected-Stream")
    if wanted and wanted != stream.name:
        raise api_error(10060)


def _check_source(profile: Profile, header: bytes) -> None:
    if profile.refuses_source_header and headers.get(header, "Nats-Stream-Source"):
        raise api_error(10227)


def _check_duplicate(stream: Stream, header: bytes) -> None:
    msg_id = headers.get(header, "Nats-Msg-Id")
    seq = stream.duplicate_of(msg_id) if msg_id and not stream.config["mirror"] else 0
    if seq:
        raise DuplicateMessageError(seq)


def _check_rollup(stream: Stream, header: bytes) -> str:
    rollup = (headers.get(header, "Nats-Rollup") or "").lower()
    if rollup:
        if not stream.config["allow_rollup_hdrs"] or stream.config["deny_purge"]:
            raise api_error(10111, "rollup not permitted")
        if rollup not in ("sub", "all"):
            if not stream.profile.ttl:
                raise SilentRefusalError
            raise api_error(10111, f'rollup value invalid: "{rollup}"')
    return rollup


def _check_size(stream: Stream, header: bytes, payload: bytes) -> None:
    limit = stream.config["max_msg_size"]
    if 0 <= limit < len(header) + len(payload):
        raise api_error(10054)
    if len(header) > _MAX_HEADER:
        raise api_error(10097)
