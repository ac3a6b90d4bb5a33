"""What the leader of a stream says of it: the one model of a ``STREAM.INFO`` answer, and what it allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from jetstream_ext.errors import DirectGetDisabledError, ResponseError
from jetstream_ext.protocol.feature_table import DIRECT_BATCH
from jetstream_ext.protocol.subjects import covers

# A follower that heard from its leader starts no election for 4 s. A leader that heard from a majority more recently
# than this is therefore the only one.
_LEASE_NS: Final = 2_500_000_000
_EPOCH: Final = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True)
class StreamState:
    """A stream at the moment when its leader answered.

    Attributes:
        name: The stream.
        created: When it was created, in the server's words.
        config: Its configuration, in the server's words.
        first_seq: The lowest sequence that it holds; ``last_seq + 1`` where it is empty.
        last_seq: The last sequence that it gave out (0: none).
        messages: How many messages it holds.
        size: Their bytes.
        num_subjects: How many subjects they have.
        last_time: When the last message was stored; when the stream was created if there is none.
        now: The leader's clock.
        replicated: Whether several servers hold it.
        leader: The server that answered, in a cluster.
        leader_is_certain: Whether no other server can be the leader at the same time.
        api_level: The API level of that server (0: before 2.11).
        server_version: Its version, where it says so.
    """

    name: str
    created: str
    config: Mapping[str, Any]
    first_seq: int = 1
    last_seq: int = 0
    messages: int = 0
    size: int = 0
    num_subjects: int = 0
    last_time: datetime = _EPOCH
    now: datetime = _EPOCH
    replicated: bool = False
    leader: str = ""
    leader_is_certain: bool = True
    api_level: int = 0
    server_version: str | None = None

    @property
    def created_at(self) -> datetime:
        """When it was created."""
        return datetime.fromisoformat(self.created).astimezone(UTC)

    @property
    def subjects(self) -> tuple[str, ...]:
        """The subjects that the stream listens on."""
        return tuple(map(str, self.config.get("subjects") or ()))

    @property
    def retention(self) -> str:
        """``"limits"``, ``"interest"`` or ``"workqueue"``."""
        return str(self.config.get("retention") or "limits")

    @property
    def allows_direct(self) -> bool:
        """Whether replicas answer direct gets."""
        return bool(self.config.get("allow_direct"))

    @property
    def contiguous(self) -> bool:
        """Whether the messages of a batch follow each other: only publishers write to the stream."""
        return not self.config.get("sources")

    @property
    def lowest_seq(self) -> int:
        """The lowest sequence that the stream can ever have had."""
        return max(1, int(self.config.get("first_seq") or 1))

    @property
    def has_every_sequence(self) -> bool:
        """Whether it holds a message for every sequence from `first_seq` to `last_seq`."""
        return self.messages == self.last_seq - self.first_seq + 1

    @property
    def never_removed(self) -> bool:
        """Whether it still holds every message that it ever stored."""
        return self.messages == self.last_seq - self.lowest_seq + 1

    @property
    def max_msgs_per_subject(self) -> int:
        """How many messages it keeps of one subject (0: all)."""
        return max(0, int(self.config.get("max_msgs_per_subject") or 0))

    @property
    def max_age(self) -> timedelta | None:
        """How long it keeps a message."""
        return _duration(self.config.get("max_age"))

    @property
    def marker_ttl(self) -> timedelta | None:
        """How long it keeps the delete markers that it leaves for expired subjects."""
        return _duration(self.config.get("subject_delete_marker_ttl"))

    @property
    def duplicate_window(self) -> timedelta | None:
        """For how long it remembers message ids."""
        return _duration(self.config.get("duplicate_window"))

    def stores(self, subject: str) -> bool:
        """Whether the stream takes messages on a literal `subject`."""
        return any(covers(pattern, subject) for pattern in self.subjects)

    def check_direct_reads(self, server_version: str, *, how: str = "") -> None:
        """Refuse a stream whose messages cannot be read by batched direct gets.

        Args:
            server_version: The connected server's version, for the error.
            how: How to turn direct gets on; the default is in terms of streams.

        Raises:
            DirectGetDisabledError: The stream lacks ``allow_direct``.
            UnsupportedFeatureError: Its server is older than 2.11.
        """
        if not self.allows_direct:
            how = how or (
                f"enable it with allow_direct=True (jetstream_ext.ensure_stream) or 'nats stream edit {self.name} "
                "--allow-direct'"
            )
            raise DirectGetDisabledError(f"stream {self.name!r}: direct get is disabled; {how}", stream=self.name)
        if not DIRECT_BATCH.at(self.api_level):
            raise DIRECT_BATCH.unsupported(
                server_version=self.server_version or server_version, api_level=self.api_level
            )


def parse_stream_state(answer: Mapping[str, Any], stream: str = "") -> StreamState:
    """Read a ``STREAM.INFO`` answer.

    Args:
        answer: The JSON object.
        stream: The stream that was asked for, for the error.

    Raises:
        ResponseError: A field is missing or malformed.
    """
    try:
        config, state, cluster = answer["config"], answer["state"], answer.get("cluster") or {}
        peers = cluster.get("replicas") or []
        fresh = [peer for peer in peers if not peer.get("offline") and int(peer.get("active") or 0) < _LEASE_NS]
        messages, last_seq = int(state["messages"]), int(state["last_seq"])
        created = str(answer["created"])
        last_time = _time(state["last_ts"])
        if last_time.year == 1:  # what servers say of a stream without a message
            last_time = _time(created)
        version, level = answering_server(config)
        return StreamState(
            name=str(config["name"]),
            created=created,
            config=dict(config),
            first_seq=max(1, int(state["first_seq"])) if messages else last_seq + 1,
            last_seq=last_seq,
            messages=messages,
            size=int(state.get("bytes") or 0),
            num_subjects=int(state.get("num_subjects") or 0),
            last_time=last_time,
            now=_time(answer["ts"]),
            replicated=bool(peers) or int(config.get("num_replicas") or 1) > 1,
            leader=str(cluster.get("leader") or ""),
            leader_is_certain=not peers or (len(fresh) + 1) * 2 > len(peers) + 1,
            api_level=level,
            server_version=version,
        )
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ResponseError(f"stream {stream!r}: the leader's answer to STREAM.INFO is malformed: {error!r}") from error


def answering_server(config: Mapping[str, Any]) -> tuple[str | None, int]:
    """Return version and API level of the server that leads a stream or consumer, from its echoed configuration.

    From 2.11 on a leader writes both into the metadata of every answer; without metadata the server is older.
    """
    metadata = config.get("metadata") or {}
    version, level = metadata.get("_nats.ver"), str(metadata.get("_nats.level", ""))
    return str(version) if version else None, int(level) if level.isascii() and level.isdecimal() else 0


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def _duration(nanoseconds: int | None) -> timedelta | None:
    return timedelta(microseconds=nanoseconds / 1000) if nanoseconds else None
