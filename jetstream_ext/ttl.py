"""Message TTLs and delete markers (ADR-43) for nats-py's own calls."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Final, Literal, TypeVar

from nats.js.api import KeyValueConfig, StreamConfig

from jetstream_ext.errors import BadHeaderError
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.options import check_word, marker_fields, ttl_value
from jetstream_ext.types import NEVER, TTL

_MARKER_REASON: Final = "Nats-Marker-Reason"
# From the ADR's first draft: no released server writes or reads these two.
_DRAFT_MARKER_REASON: Final = "Nats-Applied-Limit"
_DRAFT_NO_EXPIRE: Final = "Nats-No-Expire"

_Config = TypeVar("_Config", StreamConfig, KeyValueConfig)


def ttl_headers(
    ttl: TTL, headers: Mapping[str, str] | None = None, *, dialect: Literal["2.14", "draft"] = "2.14"
) -> dict[str, str]:
    """Return `headers` with a TTL, for nats-py's ``js.publish(subject, payload, headers=...)``.

    ADR-43, Per-Message TTL. nats-py's own ``msg_ttl=`` has no "never", and turns half a second into 0, which servers
    refuse.

    Args:
        ttl: Whole seconds from 1 to 100 years, a timedelta of whole seconds, or `NEVER`. A message expires after its
            TTL or the stream's ``max_age``, whichever is shorter; `NEVER` overrides ``max_age``.
        headers: The message's other headers; copied, not changed.
        dialect: ``"draft"`` writes `NEVER` as the ADR's first draft does (``Nats-No-Expire: 1``). Every released
            server ignores that header; ``ReferenceServer(dialect="draft")`` honours it.

    Returns:
        A new dict.

    Raises:
        ValueError: `ttl` is out of range or has a fraction of a second, or the dialect is unknown.
        TypeError: `ttl` is not a number, timedelta or `NEVER`.
        BadHeaderError: `headers` already has a TTL, or an invalid header.

    Requires: nats-server 2.11 and ``allow_msg_ttl`` on the stream (else error 10166). A 2.10 server stores the header
        and never expires the message: see `features`.
    """
    check_word(dialect, ("2.14", "draft"), "dialect")
    result = dict(headers or {})
    for name, value in result.items():
        h.check_header(name, value)
    name, value = h.MSG_TTL, ttl_value(ttl)
    if ttl is NEVER and dialect == "draft":
        name, value = _DRAFT_NO_EXPIRE, "1"
    if name in result or h.MSG_TTL in result:
        raise BadHeaderError(f"the headers already have a TTL ({name} or {h.MSG_TTL})")
    result[name] = value
    return result


def marker_reason(headers: Mapping[str, str] | None) -> str | None:
    """Return why the server wrote this delete marker, or None for any other message.

    ADR-43, Limit Tombstones.

    Args:
        headers: The headers of a received or stored message, as nats-py or `StoredMsg` has them.

    Returns:
        The reason as the server writes it. Released servers write only ``"MaxAge"``: the last message of the subject
        expired by ``max_age`` or its own TTL.

    Requires: nats-server 2.11 and ``subject_delete_marker_ttl`` on the stream.
    """
    if not headers:
        return None
    reason = headers.get(_MARKER_REASON)
    return headers.get(_DRAFT_MARKER_REASON) if reason is None else reason


def with_ttl(config: _Config, *, marker_ttl: float | timedelta | None = None) -> _Config:
    """Return the configuration of a stream or bucket with message TTLs enabled, and optionally delete markers.

    ADR-43, Stream Configuration. For ``js.add_stream``, `ensure_stream` and ``js.create_key_value``. The result also
    sets the options that servers silently enable together with markers.

    Args:
        config: nats-py's ``StreamConfig`` or ``KeyValueConfig``; copied, not changed. (nats-py's buckets always allow
            TTLs.)
        marker_ttl: The TTL of delete markers: whole seconds from 1 up, or a timedelta; None is no markers. With
            markers, every message of the stream lives at least this long, unless ``max_msgs_per_subject`` is 1.

    Raises:
        ValueError: `marker_ttl` is out of range, or servers refuse or silently change the combination: markers on a
            mirror or with ``deny_purge``, or TTLs on a counter stream.
        TypeError: `config` or `marker_ttl` has the wrong type.

    Requires: nats-server 2.11. A 2.10 server drops both options silently, which `ensure_stream` reports.
    """
    fields = {"allow_msg_ttl": True} if marker_ttl is None else marker_fields(marker_ttl, "marker_ttl")
    if isinstance(config, KeyValueConfig):
        return config if marker_ttl is None else config.evolve(limit_marker_ttl=fields["subject_delete_marker_ttl"])
    if not isinstance(config, StreamConfig):
        raise TypeError(f"config must be a StreamConfig or KeyValueConfig, not {type(config).__name__}")
    if config.allow_msg_counter:
        raise ValueError("a counter stream cannot have messages with a TTL")
    if marker_ttl is not None and config.mirror is not None:
        raise ValueError("a mirror cannot have a marker_ttl: it copies the delete markers of its origin")
    if marker_ttl is not None and config.deny_purge:
        raise ValueError("marker_ttl and deny_purge cannot be combined: delete markers need purges")
    return config.evolve(**fields)
