"""Buckets with what a service needs: created, or with what they lacked turned on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, Literal, TypedDict, Unpack

import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, Placement, RePublish, StorageType, StreamConfig
from nats.js.errors import BucketNotFoundError
from nats.js.kv import KeyValue

from jetstream_ext.client.api import Api, malformed_as_error, stream_state
from jetstream_ext.client.base_connection import NotPermittedError
from jetstream_ext.client.connection import open_bucket
from jetstream_ext.client.stream_options import STREAM_RANGES, check_known_options, check_options, describe_diff
from jetstream_ext.client.streams import check_leader, config_diff, create_stream, needed_features, only
from jetstream_ext.errors import StreamConfigMismatchError
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.history import known_since, limits_of, with_record
from jetstream_ext.protocol.api import StreamState, check_config
from jetstream_ext.protocol.options import bucket_fields, bucket_subjects, check_unicode, marker_fields, reads_subject
from jetstream_ext.protocol.subjects import bucket_prefix, bucket_stream
from jetstream_ext.text import get_logger

_log = get_logger("kv")

# Each update is followed by a look at the result. Two are the most that a bucket needs: its options, then the record.
_MAX_UPDATES: Final = 6
_NAME: Final = re.compile(r"[-_a-zA-Z0-9]{1,252}")  # ADR-8; the name of its stream has at most 255 characters
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

_SYNONYMS: Final = {field: option for option, field in _FIELDS.items()} | {
    "allow_atomic": "atomic",
    "allow_direct": "direct",
    "marker_ttl": "limit_marker_ttl",
}


async def ensure_bucket(
    js: JetStreamContext,
    name: str,
    *,
    direct: bool = True,
    atomic: bool = True,
    spark: bool = False,
    events: Sequence[str] = (),
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
        events: The subjects of events that transactions store together with keys; see `enable`.
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
    check_known_options(
        "ensure_bucket", options, [*_FIELDS, "direct", "atomic", "spark", "events", "timeout"], _SYNONYMS
    )
    _check_bucket_name(name)
    fields = bucket_fields(name, direct=direct, atomic=atomic or bool(events), spark=spark)
    places = bucket_subjects(name, atomic=atomic or bool(events), spark=spark, events=events)
    marker_ttl = options.pop("limit_marker_ttl", None)
    checked = check_options(f"bucket {name!r}", options, BucketOptions, _RANGES)
    wanted = {_FIELDS[option]: value for option, value in checked.items()}
    if marker_ttl is not None:
        fields |= marker_fields(marker_ttl, "limit_marker_ttl")
        wanted["subject_delete_marker_ttl"] = fields["subject_delete_marker_ttl"]
    new = _new_config(name, wanted | fields, places)
    check_unicode(new.as_dict(), f"the configuration of bucket {name!r}")
    bucket = Bucket(open_bucket(js, name), timeout)
    return await _turn_on(bucket, fields, places, wanted=wanted, new=new)


async def enable(
    kv: KeyValue,
    *,
    direct: bool = True,
    atomic: bool = True,
    ttl: bool | float | timedelta | None = None,
    spark: bool = False,
    events: Sequence[str] = (),
    timeout: float | None = None,
) -> KeyValue:
    """Turn on what a bucket lacks; return nats-py's `KeyValue` for the bucket as it is now.

    The call never turns an option off. It records in the metadata of the bucket's stream since when the bucket's limits
    hold, because reads of the past need to know that, and changes nothing else of the configuration. It does not write to a
    bucket that lacks neither an option nor the record.

    Args:
        kv: nats-py's bucket.
        direct: Direct gets, which `get_many` and `snapshot` need. (nats-py creates buckets without them.)
        atomic: Atomic batches, which transactions of several keys need, and the subject ``_reads.KV_<bucket>``, where they
            store messages without payload if they read keys that they do not write: so a transaction fails only if one of
            its own keys has changed. (A client that may not change the stream goes without that subject.)
        ttl: True: TTLs of single keys. Whole seconds or a timedelta: also delete markers that stay for that time when a
            key expires, so that watchers see the expiry. With markers, no value lives shorter than its marker, unless the
            bucket's history is 1. None: no change.
        spark: What Spark's sink `jetstream_kv` needs: atomic batches, and a place for its markers, which is the subject
            ``_spark.KV_<bucket>.>`` of the bucket's stream. Clients of the bucket do not see what is stored there, except
            that it counts in the number of values of nats-py's ``status()``.
        events: Subjects that `Transaction.publish` can store together with keys, as filters such as ``orders.events.>`` that
            end in ``.>``. They are added to the bucket's stream, where no client takes them for keys; they expire with the
            bucket's ``ttl``, and count in ``status()`` as well. Needs `atomic`, which is turned on with it.
        timeout: Seconds for the whole call; None is the context's own.

    Raises:
        UnsupportedFeatureError: The server does not know an option; nothing was changed.
        nats.js.errors.BucketNotFoundError: There is no such bucket.
        StreamConfigMismatchError: The server stored another value of an option.
        ServerError: The server refused.
        ValueError, TypeError: An argument is invalid; nothing was sent.

    Cancellation: The bucket may have been changed.

    Requires: Permission for ``STREAM.INFO`` and ``STREAM.UPDATE`` (without the latter, a bucket that lacks only the record
        is returned as it is, with a warning to the logger ``jetstream_ext.kv``). Servers have no conditional update: two
        programs that turn on different options at the same moment can undo each other's change.
    """
    bucket = Bucket(kv, timeout)
    fields = bucket_fields(bucket.name, direct=direct, atomic=atomic or bool(events), spark=spark)
    places = bucket_subjects(bucket.name, atomic=atomic or bool(events), spark=spark, events=events)
    if ttl is False:
        raise ValueError("TTLs cannot be turned off; leave `ttl` out to keep the setting")
    if ttl is not None:
        fields |= {"allow_msg_ttl": True} if ttl is True else marker_fields(ttl, "ttl")
    return await _turn_on(bucket, fields, places)


def _check_bucket_name(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the name of a bucket must be str, not {type(name).__name__}")
    if not _NAME.fullmatch(name):
        raise nats.js.errors.InvalidBucketNameError(
            f"bucket {name[:64]!r}: the name of a bucket must have 1 to 252 characters of [A-Za-z0-9_-]"
        )


def _new_config(name: str, fields: Mapping[str, Any], places: Sequence[str] = ()) -> StreamConfig:
    """Return the configuration of a new bucket's stream: nats-py's, with these fields, and these subjects as well."""
    defaults: dict[str, Any] = {
        "name": bucket_stream(name),
        "subjects": [f"{bucket_prefix(name)}>", *places],
        "allow_rollup_hdrs": True,
        "allow_msg_ttl": True,
        "deny_delete": True,
        "discard": DiscardPolicy.NEW,
        "duplicate_window": min(fields.get("max_age") or _DUPLICATE_WINDOW, _DUPLICATE_WINDOW),
        "max_consumers": -1,
        "max_msgs": -1,
        "max_msgs_per_subject": 1,
    }
    return StreamConfig(**{**defaults, **fields})


async def create_bucket(bucket: Bucket, *, replicas: int, direct: bool = False) -> None:
    """Create a bucket that keeps one value of each key, unless another client has created it; raise as `ensure_bucket` does."""
    _check_bucket_name(bucket.name)
    fields = {"num_replicas": replicas, **bucket_fields(bucket.name, direct=direct)}
    await _create(bucket, Api(bucket.context, bucket.timeout, what=bucket.what), _new_config(bucket.name, fields), {})


async def _create(bucket: Bucket, api: Api, config: StreamConfig, fields: Mapping[str, Any]) -> bool:
    """Create the bucket's stream, to have `fields`; return False if another client has created it meanwhile."""
    remedy = "give the bucket another name, or remove the subject from the stream"
    features = needed_features(only(fields))
    answer = await create_stream(api, bucket.what, config.as_dict(), features, remedy)
    if answer is None:
        return False
    with malformed_as_error(f"bucket {bucket.name!r} (which was created)"):
        check_config(answer["config"])
    return True


async def _turn_on(
    bucket: Bucket,
    fields: Mapping[str, Any],
    places: Sequence[str],
    *,
    wanted: Mapping[str, Any] | None = None,
    new: StreamConfig | None = None,
) -> KeyValue:
    """Set fields of a bucket's stream, and give it the subjects `places` as well; return the bucket as it is now.

    A bucket with other fields than those `wanted` is an error. If it does not exist, it is created with the configuration
    `new`, if there is one.
    """
    api, stored = Api(bucket.context, bucket.timeout, what=bucket.what), "nothing was changed"
    for updates_left in reversed(range(_MAX_UPDATES)):  # another program may change the configuration at the same time
        try:
            with bucket.not_found():
                state = await stream_state(api, bucket.stream)
        except BucketNotFoundError:
            if new is None:  # it did not exist before, or another client has deleted it
                raise
            if await _create(bucket, api, new, fields):
                stored = "the bucket was created without it"
            new = None
            continue
        if wanted is not None:
            _check_same(bucket, wanted, state)
        lacking = [] if state.origin else [subject for subject in places if not state.stores(subject)]
        asked = only({**fields, **({"subjects": [*state.subjects, *lacking]} if lacking else {})})
        with malformed_as_error(bucket.what):
            missing = config_diff(asked, state.config)
        recorded = known_since(state) is not None or bool(state.origin)
        if not missing and recorded:
            break
        check_leader(bucket.context, state.config, needed_features(asked, missing), stored)
        as_sent = asked.as_dict()
        config = {**state.config, **{name: as_sent[name] for name in missing}}
        if not recorded and limits_of(config) == limits_of(state.config):
            # A bucket that still holds all that it ever stored has lost nothing under other limits.
            config = with_record(config, state.created_at if state.never_removed else state.now)
        try:
            answer = await api.ask(f"STREAM.UPDATE.{bucket.stream}", config)
        except NotPermittedError:
            if missing.keys() - {"subjects"} or lacking not in ([], [reads_subject(bucket.stream)]):
                raise
            _log.warning(
                "bucket %r: the client may not update its stream, so it is not recorded since when its limits hold, and reads of "
                "the past may raise HistoryUnavailableError; or transactions that only read a key may fail when others are written",
                bucket.name,
            )
            break
        with malformed_as_error(f"bucket {bucket.name!r} (which may have been changed)"):
            found = answer["config"]
            check_config(found)
            diff = config_diff(asked, found)
        check_leader(bucket.context, found, needed_features(asked, diff), "the server ignored the option")
        if diff and not updates_left:
            raise StreamConfigMismatchError(
                f"bucket {bucket.name!r} was changed, but the server stored other values: {describe_diff(diff)}",
                diff=diff,
            )
    return KeyValue(bucket.name, bucket.stream, bucket.prefix, bucket.js, direct=state.allows_direct)


def _check_same(bucket: Bucket, wanted: Mapping[str, Any], state: StreamState) -> None:
    """Raise StreamConfigMismatchError if a field has another value, or BadBucketError if the stream is not a bucket."""
    bucket.check(state, direct=False)
    with malformed_as_error(bucket.what):
        fields = config_diff(only(wanted), state.config)
    if not state.marker_ttl:
        fields.pop("subject_delete_marker_ttl", None)  # it is turned on
    if fields:
        diff = {option: fields[field] for option, field in _FIELDS.items() if field in fields}
        raise StreamConfigMismatchError(
            f"bucket {bucket.name!r} exists with another configuration: {describe_diff(diff)}; nothing was changed; give the "
            f"existing values, or change the bucket with js.update_stream or 'nats kv edit {bucket.name}'",
            diff=diff,
        )
