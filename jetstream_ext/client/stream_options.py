"""The options of a stream as keyword arguments: their types, and an error with a suggestion for a misspelt one."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, TypedDict

from nats.js.api import (
    Base,
    DiscardPolicy,
    PersistMode,
    Placement,
    RePublish,
    RetentionPolicy,
    StorageType,
    StoreCompression,
    StreamConsumerLimits,
    StreamSource,
    SubjectTransform,
)

from jetstream_ext.text import did_you_mean


class StreamOptions(TypedDict, total=False):
    """The fields of nats-py's ``StreamConfig`` except the name, as `ensure_stream` takes them; times are in seconds."""

    description: str | None
    subjects: list[str] | tuple[str, ...] | None
    retention: RetentionPolicy | Literal["limits", "interest", "workqueue"] | None
    max_consumers: int | None
    max_msgs: int | None
    max_bytes: int | None
    discard: DiscardPolicy | Literal["old", "new"] | None
    discard_new_per_subject: bool
    max_age: float | None
    max_msgs_per_subject: int
    max_msg_size: int | None
    storage: StorageType | Literal["file", "memory"] | None
    num_replicas: int | None
    no_ack: bool
    template_owner: str | None
    duplicate_window: float
    placement: Placement | None
    mirror: StreamSource | None
    sources: list[StreamSource] | tuple[StreamSource, ...] | None
    sealed: bool
    deny_delete: bool
    deny_purge: bool
    allow_rollup_hdrs: bool
    first_seq: int | None
    republish: RePublish | None
    subject_transform: SubjectTransform | None
    allow_direct: bool | None
    mirror_direct: bool | None
    compression: StoreCompression | Literal["none", "s2"] | None
    allow_msg_ttl: bool | None
    allow_msg_schedules: bool | None
    allow_atomic: bool | None
    allow_batched: bool | None
    allow_msg_counter: bool | None
    persist_mode: PersistMode | Literal["default", "async"] | None
    metadata: dict[str, str] | None
    consumer_limits: StreamConsumerLimits | None
    subject_delete_marker_ttl: float | None


STREAM_SYNONYMS: Final = {
    "allow_batch_publish": "allow_batched",
    "allow_atomic_publish": "allow_atomic",
    "direct": "allow_direct",
    "dupe_window": "duplicate_window",
    "history": "max_msgs_per_subject",
    "max_messages": "max_msgs",
    "replicas": "num_replicas",
    "source": "sources",
    "subject": "subjects",
    "ttl": "max_age",
}
"""What the nats tool, key-value buckets and other clients call an option of a stream."""


def check_known_options(
    call: str, options: Iterable[str], known: Iterable[str], synonyms: Mapping[str, str] | None = None
) -> None:
    """Raise TypeError for a keyword argument that `call` does not have, with the nearest one that it has."""
    known = list(known)
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known, synonyms)
            raise TypeError(f"{call}() has no option {name!r}{hint or '; its options are ' + ', '.join(sorted(known))}")


def describe_diff(diff: Mapping[str, tuple[Any, Any]]) -> str:
    """Return the difference between two configurations, (wanted, found) for each option, as people read it."""
    return ", ".join(f"{name} is {_shown(have)}, not {_shown(want)}" for name, (want, have) in diff.items())


def _shown(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return repr(value.value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, Base):
        given = {name: each for name, each in vars(value).items() if each not in (None, False, 0, "", [], {})}
        return f"{type(value).__name__}({', '.join(f'{name}={_shown(each)}' for name, each in given.items())})"
    return repr(value)
