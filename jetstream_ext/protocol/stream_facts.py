"""What a stream's leader says of it, as far as batches need to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

# A follower takes part in no election for 4 s after it heard from its leader; a leader that heard from a majority
# more recently than that is the only one.
_LEASE_NS: Final = 2_500_000_000


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """A part of a ``STREAM.INFO`` answer.

    Attributes:
        name: The stream.
        created: When it was made; another time is another stream of the same name.
        subjects: What it listens on.
        last_seq: Its last sequence.
        replicated: Whether several servers hold it.
        leader: The server that answered, in a cluster.
        leads: Whether the answering server is beyond doubt the only leader.
        direct: ``allow_direct``.
        contiguous: Whether the messages of a batch follow each other: nothing but publishers writes to the stream.
        window_ns: The duplicate window.
        level: The API level of the answering server (0: before 2.11).
        version: Its version, where it says so.
    """

    name: str
    created: str
    subjects: tuple[str, ...] = ()
    last_seq: int = 0
    replicated: bool = False
    leader: str = ""
    leads: bool = True
    direct: bool = False
    contiguous: bool = True
    window_ns: int = 0
    level: int = 0
    version: str | None = None

    def takes(self, subject: str) -> bool:
        """Whether a message on `subject` goes to this stream."""
        return any(matches(pattern, subject) for pattern in self.subjects)


def matches(pattern: str, subject: str) -> bool:
    """Whether a literal subject is matched by a pattern with wildcards."""
    if pattern == subject:
        return True
    tokens, wanted = subject.split("."), pattern.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(tokens) <= len(wanted):
            return False
        tokens = tokens[: len(wanted)]
    return len(tokens) == len(wanted) and all(want in ("*", token) for want, token in zip(wanted, tokens, strict=True))


def parse_stream_info(reply: dict[str, Any]) -> StreamFacts:
    """Read a ``STREAM.INFO`` answer.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: It is none.
    """
    config, state, cluster = reply["config"], reply["state"], reply.get("cluster") or {}
    metadata = config.get("metadata") or {}
    peers = cluster.get("replicas") or []
    fresh = [peer for peer in peers if not peer.get("offline") and int(peer.get("active") or 0) < _LEASE_NS]
    level = str(metadata.get("_nats.level", ""))
    return StreamFacts(
        name=str(config["name"]),
        created=str(reply["created"]),
        subjects=tuple(map(str, config.get("subjects") or ())),
        last_seq=int(state["last_seq"]),
        replicated=bool(peers) or int(config.get("num_replicas") or 1) > 1,
        leader=str(cluster.get("leader") or ""),
        leads=not peers or (len(fresh) + 1) * 2 > len(peers) + 1,
        direct=bool(config.get("allow_direct")),
        contiguous=not config.get("sources"),
        window_ns=int(config.get("duplicate_window") or 0),
        level=int(level) if level.isdecimal() else 0,
        version=metadata.get("_nats.ver"),
    )
