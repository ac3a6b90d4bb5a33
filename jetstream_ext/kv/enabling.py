"""Turning on the options that a bucket lacks, and recording since when its limits hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from nats.js.kv import KeyValue

from jetstream_ext.client.api import Api, malformed_as_error, stream_state
from jetstream_ext.client.base_connection import NotPermittedError
from jetstream_ext.client.stream_options import describe_diff
from jetstream_ext.client.streams import check_leader
from jetstream_ext.errors import StreamConfigMismatchError
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.limits import known_since, limits_of, with_record
from jetstream_ext.protocol.api import StreamState, check_config
from jetstream_ext.protocol.feature_table import BY_OPTION
from jetstream_ext.protocol.options import check_bool
from jetstream_ext.protocol.subjects import covers
from jetstream_ext.text import get_logger

_log = get_logger("kv")

# Each update is followed by a look at the result. Two are the most that a bucket needs: its options, then the record.
_MAX_UPDATES: Final = 6


def _anything(state: StreamState) -> None:
    """Accept every bucket."""


async def turn_on(
    bucket: Bucket,
    api: Api,
    options: Mapping[str, Any],
    *,
    spark: bool = False,
    check: Callable[[StreamState], None] = _anything,
) -> KeyValue:
    """Set the options of a bucket's stream, and with `spark` a place for the sink's markers; return the bucket as it is now.

    `check` may refuse the bucket: it is called with each state of it, before anything is changed.
    """
    wanted = dict(options)
    for updates_left in reversed(range(_MAX_UPDATES)):  # another program may change the configuration at the same time
        with bucket.not_found():
            state = await stream_state(api, bucket.stream)
        check(state)
        if spark:
            wanted["subjects"] = _with_markers(state)
        missing = {name: value for name, value in wanted.items() if (state.config.get(name) or False) != value}
        recorded = known_since(state) is not None or bool(state.origin)
        if not missing and recorded:
            break
        check_supported(bucket, state.config, missing, "nothing was changed")
        config = {**state.config, **missing}
        if not recorded and limits_of(config) == limits_of(state.config):
            # A bucket that still holds all that it ever stored has lost nothing under other limits.
            config = with_record(config, state.created_at if state.never_removed else state.now)
        try:
            answer = await api.ask(f"STREAM.UPDATE.{bucket.stream}", config)
        except NotPermittedError:
            if missing:
                raise
            _log.warning(
                "bucket %r: it is not recorded since when its limits hold, because the client may not update its stream; reads "
                "of the past may raise HistoryUnavailableError",
                bucket.name,
            )
            break
        with malformed_as_error(f"bucket {bucket.name!r} (which may have been changed)"):
            found = answer["config"]
            check_config(found)
        diff = {name: (value, got) for name, value in missing.items() if (got := found.get(name) or False) != value}
        if diff:
            check_supported(bucket, found, diff, "the server ignored the option")
        if diff and not updates_left:
            raise StreamConfigMismatchError(
                f"bucket {bucket.name!r} was changed, but the server stored other values: {describe_diff(diff)}",
                diff=diff,
            )
    return KeyValue(bucket.name, bucket.stream, bucket.prefix, bucket.js, direct=state.allows_direct)


def switches(bucket: str, *, direct: bool, atomic: bool, spark: bool) -> dict[str, Any]:
    """Return the options of a bucket's stream that the arguments turn on; raise TypeError unless they are True or False."""
    for name, value in (("direct", direct), ("atomic", atomic), ("spark", spark)):
        check_bool(value, f"bucket {bucket!r}: {name}")
    return dict.fromkeys([*(["allow_direct"] if direct else []), *(["allow_atomic"] if atomic or spark else [])], True)


def marker_subjects(stream: str) -> str:
    """Return where Spark's sink keeps its markers in a bucket's stream."""
    return f"_spark.{stream}.>"


def stores_markers(state: StreamState) -> bool:
    """Return whether a bucket's stream stores the markers of Spark's sink."""
    return any(covers(one, marker_subjects(state.name)) for one in state.subjects)


def _with_markers(state: StreamState) -> list[str]:
    """Return the subjects of a bucket's stream, with those of the markers of Spark's sink."""
    return [*state.subjects, *(() if stores_markers(state) else (marker_subjects(state.name),))]


def check_supported(bucket: Bucket, config: Mapping[str, Any], options: Iterable[str], detail: str) -> None:
    """Raise UnsupportedFeatureError if the bucket's leader is too old for one of `options`."""
    check_leader(bucket.context, config, [BY_OPTION[name] for name in options if name in BY_OPTION], detail)
