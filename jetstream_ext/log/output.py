"""The output stream of a worker: what it must be, and the record of the worker's position in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from jetstream_ext.errors import StreamConfigMismatchError
from jetstream_ext.protocol.feature_table import ATOMIC, FENCED_BATCHES
from jetstream_ext.protocol.stored_msg import StoredMsg
from jetstream_ext.protocol.stream_state import StreamState
from jetstream_ext.protocol.subjects import covers

_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Record:
    """How far a worker is; the last message of every batch of outputs.

    Attributes:
        stream: The stream that it reads.
        created: When that was created, in the server's words.
        seq: The next sequence to read.
        worker: A random id of the start of a worker that stored it.
        commit: Zero-based index of the commit of that start.
    """

    stream: str
    created: str
    seq: int
    worker: str
    commit: int

    def encode(self) -> bytes:
        """Return the payload of the record."""
        return orjson.dumps(
            {
                "v": _VERSION,
                "stream": self.stream,
                "created": self.created,
                "seq": self.seq,
                "worker": self.worker,
                "commit": self.commit,
            }
        )

    @classmethod
    def decode(cls, stored: StoredMsg) -> Record:
        """Return the record in a message.

        Raises:
            ValueError: The message is not a record.
        """
        try:
            body = orjson.loads(stored.data)
            if body["v"] == _VERSION:
                return cls(
                    str(body["stream"]),
                    str(body["created"]),
                    int(body["seq"]),
                    str(body["worker"]),
                    int(body["commit"]),
                )
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            pass
        raise ValueError(
            f"stream {stored.stream!r}: message {stored.seq} on {stored.subject!r} is not the position of a worker; nothing "
            "else may be published on that subject"
        )


@dataclass(frozen=True, slots=True)
class RecordRetention:
    """How an output stream is asked to keep a record.

    Attributes:
        rollup: A record takes away the one before.
        never: It does not expire with the stream's ``max_age``.
    """

    rollup: bool
    never: bool


def check_output(state: StreamState, subject: str, server_version: str, *, may_vanish: bool) -> RecordRetention:
    """Refuse a stream that cannot hold outputs and the position of a worker.

    Args:
        state: The stream.
        subject: The subject of the position.
        server_version: The connected server's, for the error.
        may_vanish: The caller accepts that the stream's limits can remove the position.

    Raises:
        UnsupportedFeatureError: Its server is older than 2.12.1.
        StreamConfigMismatchError: Its configuration; ``diff`` says what is wrong.
    """
    config = state.config
    version = state.server_version or server_version
    if not ATOMIC.at(state.api_level):
        raise ATOMIC.unsupported(server_version=version, api_level=state.api_level, detail="nothing was stored")
    FENCED_BATCHES.check(version, "nothing was stored")
    never = bool(config.get("allow_msg_ttl"))
    diff: dict[str, tuple[Any, Any]] = {}
    advice: list[str] = []
    if not config.get("allow_atomic"):
        diff["allow_atomic"] = (True, False)
        advice.append("turn on allow_atomic")
    if not state.stores(subject):
        diff["subjects"] = ((*state.subjects, subject), state.subjects)
        advice.append(f"add {subject!r} (or a wildcard that matches it) to its subjects")
    transform = config.get("subject_transform") or {}
    if transform and covers(str(transform.get("src") or ">"), subject):
        diff["subject_transform"] = (None, transform)
        advice.append(f"its subject_transform stores {subject!r} under another subject")
    if not may_vanish and (limits := _limits(config, never=never)):
        diff |= limits
        advice.append(
            f"its limits ({', '.join(limits)}) can remove the position, and a worker would then start from the reader's "
            "start again: use a stream without them (allow_msg_ttl exempts the position from max_age, discard 'new' from "
            "the others), or pass position_may_vanish=True"
        )
    if diff:
        raise StreamConfigMismatchError(
            f"stream {state.name!r} cannot hold outputs and the position of a worker: {'; '.join(advice)}", diff=diff
        )
    return RecordRetention(
        rollup=bool(config.get("allow_rollup_hdrs")) and not config.get("deny_purge"),
        never=never and int(config.get("max_age") or 0) > 0,
    )


def _limits(config: Mapping[str, Any], *, never: bool) -> dict[str, tuple[Any, Any]]:
    """Return the limits of a stream that can remove the newest message of a subject."""
    found: dict[str, tuple[Any, Any]] = {}
    retention = str(config.get("retention") or "limits")
    if retention != "limits":
        found["retention"] = ("limits", retention)
    if int(config.get("max_age") or 0) > 0 and not never:
        found["max_age"] = (0, int(config["max_age"]))
    if str(config.get("discard") or "old") == "old":
        for name in ("max_msgs", "max_bytes"):
            if int(config.get(name) or -1) > 0:
                found[name] = (-1, int(config[name]))
    return found
