"""Per-message time to live and delete markers (ADR-43) for nats-py's own calls."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Final, Literal, TypeVar

from nats.js.api import KeyValueConfig, StreamConfig

from jetstream_ext.errors import BadHeaderError
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.options import ttl_value
from jetstream_ext.types import NEVER, TTL

_MARKER_REASON: Final = "Nats-Marker-Reason"
# The ADR's first draft; no released server writes or reads these two.
_DRAFT_MARKER_REASON: Final = "Nats-Applied-Limit"
_DRAFT_NO_EXPIRE: Final = "Nats-No-Expire"

_Config = TypeVar("_Config", StreamConfig, KeyValueConfig)


def ttl_headers(
    ttl: TTL, headers: Mapping[str, str] | None = None, *, dialect: Literal["2.14", "draft"] = "2.14"
) -> dict[str, str]:
    """Return `headers` with a time to live, for nats-py's ``js.publish(subject, payload, headers=...)``.

    ADR-43, Per-Message TTL. nats-py's own ``msg_ttl=`` cannot say "never", and turns half a second into the 0 that
    servers refuse.

    Args:
        ttl: Whole seconds from 1 to 100 years, a timedelta of such, or `NEVER`. The shorter of it and the stream's
            ``max_age`` counts; `NEVER` outlives ``max_age``.
        headers: The message's other headers; copied, not changed.
        dialect: ``"draft"`` writes `NEVER` as the ADR's first draft did (``Nats-No-Expire: 1``), which every released
            server stores and ignores; ``ReferenceServer(dialect="draft")`` honours it.

    Returns:
        A new dict.

    Raises:
        ValueError: `ttl` is out of range or a fraction of a second, or there is no such dialect.
        TypeError: `ttl` is not a number, timedelta or `NEVER`.
        BadHeaderError: `headers` has a time to live already, or what no message can carry.

    Requires: nats-server 2.11 and ``allow_msg_ttl`` on the stream (else error 10166). A 2.10 server stores the header
        and never expires the message: see `features`.
    """
    if dialect not in ("2.14", "draft"):
        raise ValueError(f"dialect must be '2.14' or 'draft', not {dialect!r}")
    result = dict(headers or {})
    for name, value in result.items():
        h.check_header(name, value)
    name, value = h.MSG_TTL, ttl_value(ttl)
    if ttl is NEVER and dialect == "draft":
        name, value = _DRAFT_NO_EXPIRE, "1"
    if name in result or h.MSG_TTL in result:
        raise BadHeaderError("the headers have a time to live already")
    result[name] = value
    return result


def marker_reason(headers: Mapping[str, str] | None) -> str | None:
    """Return why the server put this message in place of a removed one, or None for any other message.

    ADR-43, Limit Tombstones.

    Args:
        headers: The headers of a received or stored message, as nats-py or `StoredMsg` has them.

    Returns:
        ``"MaxAge"`` for a message whose ``max_age`` or own TTL ended, which is the only reason that released servers
        give; whatever else the header says otherwise.

    Requires: nats-server 2.11 and ``subject_delete_marker_ttl`` on the stream.
    """
    if not headers:
        return None
    reason = headers.get(_MARKER_REASON)
    return headers.get(_DRAFT_MARKER_REASON) if reason is None else reason


def with_ttl(config: _Config, *, marker_ttl: float | timedelta | None = None) -> _Config:
    """Return a stream's or bucket's configuration that allows times to live, and delete markers if asked.

    ADR-43, Stream Configuration. For ``js.add_stream``, `ensure_stream` and ``js.create_key_value``. The options that
    servers turn on silently together with markers are written out, so that what is asked for is what comes back.

    Args:
        config: nats-py's ``StreamConfig`` or ``KeyValueConfig``; copied, not changed. (nats-py's buckets allow times
            to live in any case.)
        marker_ttl: How long a delete marker stays: whole seconds from 1, or a timedelta; None is no markers. With
            markers, no message of the stream lives shorter than this, unless ``max_msgs_per_subject`` is 1.

    Raises:
        ValueError: `marker_ttl` is out of range; or markers on a mirror, or with ``deny_purge``; or times to live on
            a counter stream: servers refuse or silently change those.
        TypeError: `config` or `marker_ttl` is something else.

    Requires: nats-server 2.11; a 2.10 server drops both options silently (`ensure_stream` notices).
    """
    seconds: int | None = None
    if marker_ttl is not None:
        if marker_ttl is NEVER:
            raise ValueError("a delete marker's TTL must end: servers know no marker that stays for ever")
        seconds = int(ttl_value(marker_ttl))
    if isinstance(config, KeyValueConfig):
        return config if seconds is None else config.evolve(limit_marker_ttl=seconds)
    if not isinstance(config, StreamConfig):
        raise TypeError(f"config must be a StreamConfig or KeyValueConfig, not {type(config).__name__}")
    if config.allow_msg_counter:
        raise ValueError("a counter stream cannot have messages with a TTL")
    if seconds is None:
        return config.evolve(allow_msg_ttl=True)
    if config.mirror is not None:
        raise ValueError("a mirror cannot have delete markers of its own; it copies its origin's")
    if config.deny_purge:
        raise ValueError("delete markers need purges: deny_purge cannot be set with marker_ttl")
    return config.evolve(
        allow_msg_ttl=True, allow_rollup_hdrs=True, deny_purge=False, subject_delete_marker_ttl=float(seconds)
    )
