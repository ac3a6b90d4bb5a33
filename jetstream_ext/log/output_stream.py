"""The output stream of a worker: what it must be, what it stores, and which of its refusals are those of the outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from jetstream_ext.client.api import stream_state
from jetstream_ext.client.connection import Context
from jetstream_ext.client.fenced_write import FencedWriter
from jetstream_ext.client.retry import Retry, is_transient
from jetstream_ext.errors import BatchServerError, ErrorCode, MessageTooLargeError, Status, StreamConfigMismatchError
from jetstream_ext.protocol.advice import enable_stream
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.feature_table import ATOMIC, FENCED_BATCHES
from jetstream_ext.protocol.subjects import covers
from jetstream_ext.types import NEVER, TTL

# What a server refuses because of the stream or the account, whatever the message is.
_OF_THE_STREAM: Final = frozenset({
    ErrorCode.ACCOUNT_RESOURCES_EXCEEDED, ErrorCode.MEMORY_EXCEEDED, ErrorCode.NOT_ENABLED, ErrorCode.STORAGE_EXCEEDED,
    ErrorCode.NOT_ENABLED_FOR_ACCOUNT, ErrorCode.STORE_FAILED, ErrorCode.STREAM_NOT_FOUND, ErrorCode.STREAM_SEALED,
    ErrorCode.ATOMIC_DISABLED, ErrorCode.ATOMIC_MIRROR,
})  # fmt: skip
_MOST_KNOWN: Final = 10_000  # subjects


@dataclass(slots=True, eq=False)
class OutputStream:
    """The stream that a worker stores to, as its leader has described it last.

    Attributes:
        name: The stream.
        record: The subject of the worker's position.
        letters: The subject of its dead letters, or None.
        may_vanish: Whether the stream's limits may remove positions and dead letters.
        known: Literal subjects that it stores.
    """

    context: Context
    name: str
    record: str
    letters: str | None
    may_vanish: bool
    timeout: float
    patience: float
    state: StreamState | None = None
    known: set[str] = field(default_factory=set)

    async def look(self) -> StreamState:
        self.state = await Retry(self.patience).call(partial(stream_state, self.context, self.name, self.timeout))
        return self.state

    async def check(self) -> None:
        """Raise an error unless the stream can hold outputs, the position and the dead letters."""
        state = await self.look()
        _check_positions(state, self.record, self.context.connection.server_version, may_vanish=self.may_vanish)
        if self.letters is not None:
            if_not = ", or pass position_may_vanish=True"
            check_letters(state, self.letters, may_vanish=self.may_vanish, if_not=if_not)

    def writer(self, name: str) -> FencedWriter:
        """Return a writer of the positions of the worker `name`."""
        config = self.state.config if self.state is not None else {}
        return FencedWriter(
            self.context,
            self.name,
            self.record,
            name=f"worker {name!r}",
            timeout=self.timeout,
            patience=self.patience,
            rollup=bool(config.get("allow_rollup_hdrs")) and not config.get("deny_purge"),
            msg_ttl=self.forever,
        )

    @property
    def forever(self) -> TTL | None:
        """The time to live of a message that the stream's ``max_age`` must not remove."""
        state = self.state
        return NEVER if state is not None and state.max_age and state.config.get("allow_msg_ttl") else None

    @property
    def largest(self) -> int:
        """How many bytes a message may have."""
        most, own = self.context.connection.max_payload, None if self.state is None else self.state.max_msg_size
        return most if own is None else min(most, own)

    async def stores(self, subject: str) -> bool:
        """Return whether the stream stores messages on a literal subject."""
        if subject in self.known:
            return True
        if (self.state is None or not self.state.stores(subject)) and not (await self.look()).stores(subject):
            return False
        if len(self.known) >= _MOST_KNOWN:
            self.known.clear()
        self.known.add(subject)
        return True

    def refuses_outputs(self, error: Exception) -> bool:
        """Return whether a commit failed because of its outputs, whatever the state of the stream is."""
        if isinstance(error, MessageTooLargeError) and error.subject == self.record:
            return False
        if isinstance(error, BatchServerError):
            if error.outcome != "not_stored" or is_transient(error) or error.err_code in _OF_THE_STREAM:
                return False
            return (error.code or 0) < Status.INTERNAL_ERROR or error.err_code == ErrorCode.ROLLUP_REFUSED
        return isinstance(error, TypeError | ValueError)  # raised before anything was sent


def _check_positions(state: StreamState, subject: str, server_version: str, *, may_vanish: bool) -> None:
    """Raise an error unless a stream can hold the outputs and, on `subject`, the position of a worker."""
    config = state.config
    version = state.server_version or server_version
    ATOMIC.check(state.api_level, version, "nothing was stored")
    FENCED_BATCHES.check(version, "nothing was stored")
    state.check_sequences()
    diff, advice = _lacks(state, subject)
    if not config.get("allow_atomic"):
        diff["allow_atomic"] = (True, False)
        advice.append(enable_stream(state.name, "atomic", what="atomic batches"))
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


def _lacks(state: StreamState, subject: str) -> tuple[dict[str, tuple[Any, Any]], list[str]]:
    """Return what a stream lacks to store messages on `subject`, as wanted and actual values, and advice."""
    diff: dict[str, tuple[Any, Any]] = {}
    advice: list[str] = []
    if not state.stores(subject):
        diff["subjects"] = ((*state.subjects, subject), state.subjects)
        advice.append(f"add {subject!r} (or a wildcard that matches it) to its subjects")
    transform = state.config.get("subject_transform") or {}
    if transform and covers(str(transform.get("src") or ">"), subject):
        diff["subject_transform"] = (None, transform)
        advice.append(f"exclude {subject!r} from its subject_transform, which would store it under another subject")
    return diff, advice


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


def check_letters(state: StreamState, subject: str, *, may_vanish: bool = False, if_not: str = "") -> None:
    """Raise an error unless a stream keeps dead letters on `subject`; `if_not` says what else there is to do."""
    diff, advice = _lacks(state, subject)
    if not may_vanish and (most := state.config.get("max_msgs_per_subject") or -1) > 0:
        diff["max_msgs_per_subject"] = (-1, most)
        advice.append(f"remove its max_msgs_per_subject, with which a dead letter replaces an earlier one{if_not}")
    if diff:
        raise StreamConfigMismatchError(
            f"stream {state.name!r} cannot hold dead letters on {subject!r}: {'; '.join(advice)}", diff=diff
        )
