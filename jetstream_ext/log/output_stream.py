"""What the output stream of a worker must be, and which of its refusals are those of the outputs."""

from __future__ import annotations

from typing import Any, Final

from jetstream_ext.client.retry import is_transient
from jetstream_ext.errors import BatchServerError, ErrorCode, MessageTooLargeError, Status, StreamConfigMismatchError
from jetstream_ext.protocol.advice import enable_stream
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.feature_table import ATOMIC, FENCED_BATCHES
from jetstream_ext.protocol.subjects import covers

# What a server refuses because of the stream or the account, whatever the message is.
_OF_THE_STREAM: Final = frozenset({
    ErrorCode.ACCOUNT_RESOURCES_EXCEEDED, ErrorCode.MEMORY_EXCEEDED, ErrorCode.NOT_ENABLED, ErrorCode.STORAGE_EXCEEDED,
    ErrorCode.NOT_ENABLED_FOR_ACCOUNT, ErrorCode.STORE_FAILED, ErrorCode.STREAM_NOT_FOUND, ErrorCode.STREAM_SEALED,
    ErrorCode.ATOMIC_DISABLED, ErrorCode.ATOMIC_MIRROR,
})  # fmt: skip


def is_of_outputs(error: Exception, record: str) -> bool:
    """Return whether a commit failed because of its outputs; `record` is the subject of the position."""
    if isinstance(error, MessageTooLargeError) and error.subject == record:
        return False
    if isinstance(error, BatchServerError):
        if error.outcome != "not_stored" or is_transient(error) or error.err_code in _OF_THE_STREAM:
            return False
        return (error.code or 0) < Status.INTERNAL_ERROR or error.err_code == ErrorCode.ROLLUP_REFUSED
    return isinstance(error, TypeError | ValueError)  # raised before anything was sent


def check_output_stream(state: StreamState, subject: str, server_version: str, *, may_vanish: bool) -> None:
    """Raise an error unless a stream can hold the outputs and, on `subject`, the position of a worker."""
    config = state.config
    version = state.server_version or server_version
    ATOMIC.check(state.api_level, version, "nothing was stored")
    FENCED_BATCHES.check(version, "nothing was stored")
    state.check_sequences()
    diff: dict[str, tuple[Any, Any]] = {}
    advice: list[str] = []
    if not config.get("allow_atomic"):
        diff["allow_atomic"] = (True, False)
        advice.append(enable_stream(state.name, "atomic", what="atomic batches"))
    if not state.stores(subject):
        diff["subjects"] = ((*state.subjects, subject), state.subjects)
        advice.append(f"add {subject!r} (or a wildcard that matches it) to its subjects")
    transform = config.get("subject_transform") or {}
    if transform and covers(str(transform.get("src") or ">"), subject):
        diff["subject_transform"] = (None, transform)
        advice.append(f"exclude {subject!r} from its subject_transform, which would store it under another subject")
    if not may_vanish and (limits := _removing_limits(state)):
        diff |= limits
        advice.append(
            f"remove its limits that can delete the position ({', '.join(limits)}), or set allow_msg_ttl (for max_age) or "
            "discard='new' (for max_msgs and max_bytes), or pass position_may_vanish=True (a worker whose position is "
            "deleted begins again at the reader's start)"
        )
    if diff:
        raise StreamConfigMismatchError(
            f"stream {state.name!r} cannot hold outputs and the position of a worker: {'; '.join(advice)}", diff=diff
        )


def _removing_limits(state: StreamState) -> dict[str, tuple[Any, Any]]:
    """Return the limits of a stream that can remove the newest message of a subject, as wanted and actual values."""
    config = state.config
    found: dict[str, tuple[Any, Any]] = {}
    if state.retention != "limits":
        found["retention"] = ("limits", state.retention)
    if state.max_age and not config.get("allow_msg_ttl"):
        found["max_age"] = (0, config["max_age"])
    if str(config.get("discard") or "old") == "old":
        for name in ("max_msgs", "max_bytes"):
            if (config.get(name) or -1) > 0:
                found[name] = (-1, config[name])
    return found


def check_dead_letter_subject(state: StreamState, subject: str, *, may_vanish: bool) -> None:
    """Raise an error unless a stream that can hold a worker's position keeps dead letters on `subject`."""
    diff: dict[str, tuple[Any, Any]] = {}
    advice: list[str] = []
    transform = state.config.get("subject_transform") or {}
    if not state.stores(subject):
        diff["subjects"] = ((*state.subjects, subject), state.subjects)
        advice.append(f"add {subject!r} (or a wildcard that matches it) to its subjects")
    if transform and covers(str(transform.get("src") or ">"), subject):
        diff["subject_transform"] = (None, transform)
        advice.append(f"exclude {subject!r} from its subject_transform, which would store them under another subject")
    if not may_vanish and (most := state.config.get("max_msgs_per_subject") or -1) > 0:
        diff["max_msgs_per_subject"] = (-1, most)
        advice.append(
            "remove its max_msgs_per_subject, with which a dead letter replaces an earlier one, or pass position_may_vanish=True"
        )
    if diff:
        raise StreamConfigMismatchError(
            f"stream {state.name!r} cannot hold dead letters on {subject!r}: {'; '.join(advice)}", diff=diff
        )
