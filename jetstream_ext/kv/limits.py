"""Since when a bucket's limits are what they are: a record in the metadata of its stream. No I/O.

What a limit removes leaves no trace, and a server does not tell since when its limits hold. A read of the past that
judges by the limits of today would say of a key that expired under earlier ones that it never existed. So `enable` writes
a record: the limits, and a time since which nothing else has removed messages. A record whose limits are not those of the
stream is void, because another program has changed them since.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import orjson

from jetstream_ext.protocol.api import StreamState, parse_time

RECORD: Final = "jetstream_ext.limits"
"""The name of the record in the metadata."""

_LIMITS: Final = (
    "discard",
    "max_age",
    "max_bytes",
    "max_msgs",
    "max_msgs_per_subject",
    "retention",
    "subject_delete_marker_ttl",
)


def with_record(config: Mapping[str, Any], since: datetime) -> dict[str, Any]:
    """Return a configuration with the record that its limits hold since a time."""
    record = orjson.dumps({"since": since.isoformat(), "limits": limits_of(config)}).decode()
    return {**config, "metadata": {**(config.get("metadata") or {}), RECORD: record}}


def known_since(state: StreamState) -> datetime | None:
    """Return the time since which only the limits of a stream have removed messages that it had then; None: unknown."""
    try:
        record = orjson.loads(state.config["metadata"][RECORD])
        since = parse_time(record["since"])
        return since if record["limits"] == limits_of(state.config) else None
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return None


def limits_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits in a configuration that are set."""
    return {name: value for name in _LIMITS if (value := config.get(name)) not in (None, 0, -1)}


def drops_oldest(state: StreamState) -> bool:
    """Whether a stream makes room for new messages by removing its oldest ones, whatever their subjects."""
    sizes = ("max_bytes", "max_msgs")
    return str(state.config.get("discard") or "old") == "old" and any(name in limits_of(state.config) for name in sizes)
