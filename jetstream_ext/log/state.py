"""What the leader says of the stream that is read, and what that means for a position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jetstream_ext.client.api import Api
from jetstream_ext.client.connection import JetStream
from jetstream_ext.errors import DirectGetDisabledError, ResponseError, StreamConfigMismatchError
from jetstream_ext.protocol.stream_facts import StreamFacts, parse_stream_info
from jetstream_ext.protocol.support import DIRECT_BATCH


@dataclass(frozen=True, slots=True)
class LogState:
    """A stream at one moment.

    Attributes:
        facts: What batches need to know of it.
        first: The lowest sequence that it holds; one more than the last where it is empty.
        config: Its configuration, in the server's words.
    """

    facts: StreamFacts
    first: int
    config: dict[str, Any]

    @property
    def created(self) -> str:
        """When it was created; another time is another stream of the same name."""
        return self.facts.created

    @property
    def last(self) -> int:
        """The last sequence that was given out (0: none)."""
        return self.facts.last_seq


async def look(js: JetStream, stream: str, timeout: float) -> LogState:
    """Return what the leader of a stream says of it.

    Raises:
        nats.js.errors.NotFoundError: There is no such stream.
        nats.js.errors.ServiceUnavailableError, RequestTimeoutError: Nobody answers.
        ServerError, ResponseError: The server refused, or the answer is malformed.
    """
    info = await Api(js, timeout).ask(f"STREAM.INFO.{stream}")
    try:
        state, facts = info["state"], parse_stream_info(info)
        first = int(state["first_seq"]) if int(state["messages"]) else facts.last_seq + 1
        return LogState(facts, max(1, first), dict(info["config"]))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ResponseError(f"stream {stream!r}: what its leader says of it is malformed") from None


def check_readable(state: LogState, server_version: str, *, others_delete: bool) -> None:
    """Refuse a stream that a log cannot be read from.

    Args:
        state: The stream.
        server_version: The connected server's, for the error.
        others_delete: The reader does not mind that consumers delete messages before it has read them.

    Raises:
        DirectGetDisabledError: It lacks ``allow_direct``.
        StreamConfigMismatchError: Its consumers delete messages.
        UnsupportedFeatureError: Its server is older than 2.11.
    """
    facts = state.facts
    if not DIRECT_BATCH.at(facts.level):
        raise DIRECT_BATCH.unsupported(server_version=facts.version or server_version, api_level=facts.level)
    if not facts.direct:
        raise DirectGetDisabledError(
            f"stream {facts.name!r} has no allow_direct, which reading it without a consumer needs; turn it on once "
            f"(nats stream edit {facts.name} --allow-direct, or allow_direct=True in its configuration)",
            stream=facts.name,
        )
    retention = str(state.config.get("retention") or "limits")
    if retention != "limits" and not others_delete:
        raise StreamConfigMismatchError(
            f"stream {facts.name!r} has {retention} retention: acknowledgements of its consumers delete messages that "
            "this reader has not read. Read a copy of it with limits retention, or read what there happens to be with "
            "on_lost='skip'",
            diff={"retention": ("limits", retention)},
        )


def first_missing(seqs: Sequence[int], start: int, end: int) -> int | None:
    """Return the first sequence of the range from `start` to `end` that is not in `seqs` (ascending); None: all are."""
    if len(seqs) == end - start + 1:
        return None
    for expected, seq in enumerate(seqs, start):
        if seq != expected:
            return expected
    return start + len(seqs)
