"""Buckets that are there when a service starts: created, or with what they lacked turned on."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Final, Literal, TypedDict, Unpack

import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, Placement, RePublish, StorageType, StreamConfig
from nats.js.errors import BucketNotFoundError
from nats.js.kv import KeyValue

from jetstream_ext.client.api import Api, malformed_as_error
from jetstream_ext.client.stream_options import STREAM_RANGES, check_known_options, check_options, describe_diff
from jetstream_ext.client.streams import config_diff, create_stream
from jetstream_ext.errors import StreamConfigMismatchError
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.enabling import check_supported, marker_subjects, switches, turn_on
from jetstream_ext.protocol.api import StreamState, check_config
from jetstream_ext.protocol.feature_table import BY_OPTION
from jetstream_ext.protocol.options import check_unicode, ttl_value
from jetstream_ext.protocol.subjects import bucket_prefix, bucket_stream, is_bucket_name
from jetstream_ext.types import NEVER

_RANGES: Final = {
    "history": (1, 64),  # ADR-8: clients refuse more
    "max_value_size": STREAM_RANGES["max_msg_size"],
    "replicas": (1, None),
}
_DUPLICATE_WINDOW: Final = 120.0  # seconds, as in the buckets of nats-py; servers refuse one that is longer than `ttl`


class BucketOptions(TypedDict, total=False):
    """The options of a bucket, as nats-py's ``KeyValueConfig`` names them; times are in seconds."""

    description: str | None
    max_value_size: int | None
    history: int | None
    ttl: float | timedelta | None
    max_bytes: int | None
    storage: StorageType | Literal["file", "memory"] | None
    replicas: int | None
    placement: Placement | None
    republish: RePublish | None
    limit_marker_ttl: float | timedelta | None


_FIELDS: Final = {
    "description": "description",
    "max_value_size": "max_msg_size",
    "history": "max_msgs_per_subject",
    "ttl": "max_age",
    "max_bytes": "max_bytes",
    "storage": "storage",
    "replicas": "num_replicas",
    "placement": "placement",
    "republish": "republish",
    "limit_marker_ttl": "subject_delete_marker_ttl",
}
"""The field of the stream's configuration for each option."""

_SYNONYMS: Final = {
    "allow_atomic": "atomic",
    "allow_direct": "direct",
    "marker_ttl": "limit_marker_ttl",
    "max_age": "ttl",
    "max_msg_size": "max_value_size",
    "num_replicas": "replicas",
    "subject_delete_marker_ttl": "limit_marker_ttl",
}


async def ensure_bucket(
    js: JetStreamContext,
    name: str,
    *,
    direct: bool = True,
    atomic: bool = True,
    spark: bool = False,
    timeout: float | None = None,
    **options: Unpack[BucketOptions],
) -> KeyValue:
    """Create a bucket, or turn on what an existing one lacks; return nats-py's `KeyValue` for it.

    A service can call it at every start: a bucket that is as wanted is not changed, and of several processes that call it
    at once, one creates the bucket and the others find it. No option is ever turned off. What is left out matches any
    value of an existing bucket; a new one gets nats-py's default. As `enable` does, the call records since when the
    bucket's limits hold.

    Args:
        js: nats-py's JetStream context; its prefix and domain are honoured.
        name: The bucket's name.
        direct: Direct gets, which `get_many` and `snapshot` need.
        atomic: Atomic batches, which transactions need.
        spark: What Spark's sink `jetstream_kv` needs; see `enable`.
        timeout: Seconds for the whole call; None is the context's own.
        options: As nats-py's ``KeyValueConfig``: ``history`` is how many values of a key are kept (1 to 64); ``ttl`` is
            after how many seconds a value expires; ``limit_marker_ttl`` lets keys that expire leave a delete marker for
            that many whole seconds; ``storage`` is ``"file"`` or ``"memory"``; ``replicas`` is how many servers hold the
            bucket; ``max_bytes`` and ``max_value_size`` are limits in bytes; ``description``, ``placement`` and
            ``republish``. Each time may be a timedelta. TTLs of single keys are allowed in a new bucket; for an existing
            one, see `enable`.

    Raises:
        StreamConfigMismatchError: The bucket exists with another value of an option, or the server stored another one;
            ``diff`` maps each option to (wanted, found). In the first case nothing was changed.
        UnsupportedFeatureError: The server does not know an option; nothing was created or changed.
        nats.js.errors.InvalidBucketNameError: The name is empty, too long, or not of letters, digits, ``-`` and ``_``.
        nats.js.errors.BadBucketError: A stream has the name of the bucket's stream and is not a bucket's, or is a mirror.
        ServerError: The server refused, for instance because there is no room for the bucket.
        TypeError, ValueError: There is no such option, or its value is invalid; nothing was sent.
        nats.js.errors.ServiceUnavailableError, RequestTimeoutError: There is no JetStream, or no leader or answer in time.
        ResponseError: The answer is malformed.

    Cancellation: The bucket may have been created or changed; nothing else is left behind.

    Requires: Permission for ``STREAM.INFO``, and for ``STREAM.CREATE`` and ``STREAM.UPDATE`` if the bucket does not exist or
        lacks something (without the latter see `enable`). Servers have no conditional update: two programs that turn on
        different options at the same moment can undo each other's change.
    """
    check_known_options("ensure_bucket", options, [*_FIELDS, "direct", "atomic", "spark", "timeout"], _SYNONYMS)
    _check_bucket_name(name)
    turned_on = switches(name, direct=direct, atomic=atomic, spark=spark)
    wanted = _given(name, options)
    config = _new_config(name, wanted, direct=direct, atomic=atomic or spark, spark=spark)
    body = config.as_dict()
    check_unicode(body, f"the configuration of bucket {name!r}")
    bucket = Bucket(KeyValue(name, bucket_stream(name), bucket_prefix(name), js, direct=direct), timeout)
    api = Api(bucket.context, bucket.timeout, what=bucket.what)
    if "limit_marker_ttl" in wanted:
        marker_ttl = body["subject_delete_marker_ttl"]
        turned_on |= {"allow_msg_ttl": True, "subject_delete_marker_ttl": marker_ttl}
        turned_on |= {"allow_rollup_hdrs": True, "deny_purge": False}
    check = partial(_check_same, bucket, wanted)
    created = False
    while True:
        try:
            return await turn_on(bucket, api, turned_on, spark=spark, check=check)
        except BucketNotFoundError:
            if created:  # another client has deleted it
                raise
        await _create(bucket, api, body, turned_on)
        created = True


def _check_bucket_name(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the name of a bucket must be str, not {type(name).__name__}")
    if not is_bucket_name(name):
        raise nats.js.errors.InvalidBucketNameError(
            f"bucket {name[:64]!r}: the name of a bucket must have 1 to 252 characters of [A-Za-z0-9_-]"
        )


def _given(bucket: str, options: BucketOptions) -> dict[str, Any]:
    """Return the options that are not None, with times in seconds; raise ValueError or TypeError for an invalid one."""
    given: dict[str, Any] = dict(options)
    marker_ttl = given.pop("limit_marker_ttl", None)
    checked = check_options(f"bucket {bucket!r}", given, BucketOptions, _RANGES)
    if marker_ttl is NEVER:
        raise ValueError("limit_marker_ttl must be finite: servers have no delete markers without expiry")
    if marker_ttl is not None:
        checked["limit_marker_ttl"] = int(ttl_value(marker_ttl))
    return checked


def _new_config(name: str, wanted: Mapping[str, Any], *, direct: bool, atomic: bool, spark: bool) -> StreamConfig:
    """Return the configuration of a new bucket's stream: nats-py's, with the switches of this library."""
    ttl = wanted.get("ttl")
    stream = bucket_stream(name)
    return StreamConfig(
        name=stream,
        subjects=[f"{bucket_prefix(name)}>", *([marker_subjects(stream)] if spark else [])],
        allow_direct=direct,
        allow_atomic=atomic or None,
        allow_rollup_hdrs=True,
        allow_msg_ttl=True,
        deny_delete=True,
        discard=DiscardPolicy.NEW,
        duplicate_window=min(ttl or _DUPLICATE_WINDOW, _DUPLICATE_WINDOW),
        max_consumers=-1,
        max_msgs=-1,
        **{"max_msgs_per_subject": 1} | {_FIELDS[option]: value for option, value in wanted.items()},
    )


async def create_bucket(bucket: Bucket, *, replicas: int, direct: bool = False) -> None:
    """Create a bucket that keeps one value of each key, unless another client has created it; raise as `ensure_bucket` does."""
    _check_bucket_name(bucket.name)
    config = _new_config(
        bucket.name, _given(bucket.name, {"history": 1, "replicas": replicas}), direct=direct, atomic=False, spark=False
    )
    await _create(bucket, Api(bucket.context, bucket.timeout, what=bucket.what), config.as_dict(), {})


async def _create(bucket: Bucket, api: Api, body: dict[str, Any], switches: Mapping[str, Any]) -> None:
    """Create the bucket's stream, unless another client has created it meanwhile."""
    needed = [BY_OPTION[name] for name in switches if name in BY_OPTION]
    remedy = "give the bucket another name, or remove the subject from the stream"
    answer = await create_stream(api, bucket.what, body, needed, remedy)
    if answer is None:
        return
    with malformed_as_error(f"bucket {bucket.name!r} (which was created)"):
        found = answer["config"]
        check_config(found)
    check_supported(bucket, found, [name for name in switches if not found.get(name)], "the server ignored the option")


def _check_same(bucket: Bucket, wanted: Mapping[str, Any], state: StreamState) -> None:
    """Raise StreamConfigMismatchError if an option has another value, or BadBucketError if the stream is not a bucket."""
    bucket.check(state, direct=False)
    left_out: dict[str, Any] = dict.fromkeys(vars(StreamConfig()))
    given = StreamConfig(**left_out | {_FIELDS[option]: want for option, want in wanted.items()})
    with malformed_as_error(bucket.what):
        fields = config_diff(given, state.config)
    if not state.config.get("subject_delete_marker_ttl"):
        fields.pop("subject_delete_marker_ttl", None)  # it is turned on
    if fields:
        diff = {option: fields[field] for option, field in _FIELDS.items() if field in fields}
        raise StreamConfigMismatchError(
            f"bucket {bucket.name!r} exists with another configuration: {describe_diff(diff)}; nothing was changed; give the "
            f"existing values, or change the bucket with js.update_stream or 'nats kv edit {bucket.name}'",
            diff=diff,
        )
