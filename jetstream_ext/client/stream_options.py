"""The options of a stream as keyword arguments: their types, and an error with a suggestion for a misspelt one."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from datetime import timedelta
from types import UnionType
from typing import Any, Final, Literal, TypedDict, Union, get_args, get_origin, get_type_hints

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

from jetstream_ext.protocol.options import check_bool, check_choice, check_duration, check_int, shown
from jetstream_ext.text import did_you_mean

_INT32: Final = (1 << 31) - 1
_INT64: Final = (1 << 63) - 1


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
    max_age: float | timedelta | None
    max_msgs_per_subject: int
    max_msg_size: int | None
    storage: StorageType | Literal["file", "memory"] | None
    num_replicas: int | None
    no_ack: bool
    template_owner: str | None
    duplicate_window: float | timedelta
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
    subject_delete_marker_ttl: float | timedelta | None


STREAM_RANGES: Final[Mapping[str, tuple[int, int | None]]] = {
    "first_seq": (0, (1 << 64) - 1),
    "max_msg_size": (-1, _INT32),
    "num_replicas": (0, None),
}
"""The least and the most of an option that is an integer; others are at least -1."""

STREAM_SYNONYMS: Final = {"history": "max_msgs_per_subject", "ttl": "max_age"}
"""What key-value buckets call an option of a stream, where it is not similar."""


def check_known_options(
    call: str, options: Iterable[str], known: Iterable[str], synonyms: Mapping[str, str] | None = None
) -> None:
    """Raise TypeError for a keyword argument that `call` does not have, with the nearest one that it has."""
    known = list(known)
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known, synonyms)
            raise TypeError(f"{call}() has no option {name!r}{hint or '; its options are ' + ', '.join(sorted(known))}")


def check_options(
    what: str, options: Mapping[str, Any], kinds: type, ranges: Mapping[str, tuple[int, int | None]]
) -> dict[str, Any]:
    """Return the options of `what` that are not None, with times in seconds; raise TypeError or ValueError for an invalid one.

    Args:
        what: The stream or bucket, as errors call it.
        options: The options; those that `kinds` does not have are left out.
        kinds: A ``TypedDict``: its annotations are what the options are checked against.
        ranges: The least and the most of an option that is an integer; others are at least -1.
    """
    return {
        option: _checked(options[option], kind, f"{what}: {option}", ranges.get(option, (-1, None)))
        for option, kind in get_type_hints(kinds).items()
        if options.get(option) is not None
    }


def _checked(value: Any, kind: Any, name: str, span: tuple[int, int | None] = (-1, None)) -> Any:
    """Return the value of an option with times in seconds, or raise an error unless its annotation `kind` allows it."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        kinds = get_args(kind)
        return check_duration(value, name) if timedelta in kinds else _checked(value, kinds[0], name, span)
    if origin is list:
        (item,) = get_args(kind)
        if not isinstance(value, list | tuple):
            hint = f"; give [{value!r}]" if item is str and isinstance(value, str) else ""
            raise TypeError(f"{name} must be a list of {item.__name__}, not {shown(value)}{hint}")
        return type(value)(_checked(each, item, f"{name}[{index}]") for index, each in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise TypeError(f"{name} must be a dict of str to str, not {shown(value)}")
        for key, text in value.items():
            _checked(key, str, f"{name}: each key")
            _checked(text, str, f"{name}[{key!r}]")
    elif kind is bool:
        check_bool(value, name)
    elif kind is int:
        low, high = span
        check_int(value, name, low=low, high=high)
        check_int(value, name, low=low, high=high or _INT64)
    elif issubclass(kind, enum.Enum):
        return check_choice(value, kind, name)
    elif not isinstance(value, kind):
        described = f"a nats-py {kind.__name__}" if issubclass(kind, Base) else kind.__name__
        raise TypeError(f"{name} must be {described}, not {shown(value)}")
    elif isinstance(value, StreamConsumerLimits) and value.inactive_threshold is not None:
        return value.evolve(inactive_threshold=check_duration(value.inactive_threshold, f"{name}.inactive_threshold"))
    return value


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
