"""Turning on what a bucket lacks, and giving a key a new time to live."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final

import nats.errors
import nats.js.errors
from nats.js.kv import KeyValue

from jetstream_ext.client.api import Api
from jetstream_ext.errors import (
    KeyConflictError,
    MessageTTLDisabledError,
    RequestTimeoutError,
    StreamConfigMismatchError,
)
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import ROLLUP_HEADERS, operation
from jetstream_ext.kv.keys import check_key
from jetstream_ext.protocol.feature_table import BY_OPTION
from jetstream_ext.protocol.headers import EXPECTED_LAST_SUBJECT_SEQ, MSG_TTL
from jetstream_ext.protocol.options import ttl_value
from jetstream_ext.protocol.stream_state import answering_server
from jetstream_ext.types import NEVER, TTL

_WRONG_LAST: Final = frozenset({10071, 10164})
_TTL_DISABLED: Final = 10166


async def touch(kv: KeyValue, key: str, ttl: TTL, *, timeout: float | None = None) -> int:
    """Give a key a new time to live, if nobody changes it meanwhile; return its new revision.

    Servers cannot prolong a stored message, so the value is written again, with the headers that it had. A value that
    is to expire replaces the key's history: the server would bring back what came before it.

    Args:
        kv: nats-py's bucket.
        key: The key.
        ttl: Whole seconds from 1, a timedelta of such, or `NEVER`; the bucket's own time to live is an upper limit,
            except for `NEVER`.
        timeout: Seconds to wait for each answer; None is the context's own.

    Raises:
        nats.js.errors.KeyNotFoundError: There is no such key.
        KeyConflictError: It was changed between the read and the write; nothing was written.
        MessageTTLDisabledError: The bucket does not allow times to live; `enable` turns them on.
        UnsupportedFeatureError: The server is older than 2.11, and would never let it expire; nothing was written.
        nats.js.errors.InvalidKeyError, ValueError, TypeError: Refused; nothing was asked.
        RequestTimeoutError: No answer within `timeout`; the key may have been written.

    Cancellation: The key may have been written.

    Requires: nats-server 2.11, ``allow_msg_ttl`` (nats-py's buckets have it), permission for ``STREAM.MSG.GET``.
    """
    check_key(key)
    text = ttl_value(ttl)
    bucket = Bucket(kv, timeout)
    subject = bucket.subject(key)
    found = await bucket.at_leader(last_by_subj=subject)
    if found is None or operation(found.headers)[0] != "PUT":
        raise nats.js.errors.KeyNotFoundError(message=f"key {key!r} of bucket {bucket.name!r}")
    connected = bucket.js.nc.connected_server_version
    if (connected.major, connected.minor) < (2, 11):
        # Servers without times to live store the header and say nothing; but the bucket may be on a newer one.
        _require(bucket, (await bucket.info())["config"], ["allow_msg_ttl"], "nothing was written")
    headers = {name: value for name, value in found.headers.items() if not name.lower().startswith("nats-")}
    if ttl is not NEVER:
        headers |= ROLLUP_HEADERS
    headers |= {MSG_TTL: text, EXPECTED_LAST_SUBJECT_SEQ: str(found.seq)}
    try:
        ack = await bucket.context.publish(subject, found.data, timeout=bucket.timeout, headers=headers)
    except nats.errors.TimeoutError:
        raise RequestTimeoutError(
            f"no answer within {bucket.timeout:g} s: key {key!r} of bucket {bucket.name!r} may have been written"
        ) from None
    except nats.js.errors.APIError as refusal:
        if refusal.err_code in _WRONG_LAST:
            raise KeyConflictError(
                f"key {key!r} was changed while it was touched; it is no longer at revision {found.seq}",
                keys=(key,),
                code=400,
                err_code=refusal.err_code,
                description=refusal.description or "",
                outcome="not_stored",
            ) from refusal
        if refusal.err_code == _TTL_DISABLED:
            raise MessageTTLDisabledError(
                f"bucket {bucket.name!r} does not allow times to live (key {key!r}); turn them on once, "
                "with `await jetstream_ext.kv.enable(kv, ttl=True)`",
                code=400,
                err_code=_TTL_DISABLED,
                description=refusal.description or "",
                outcome="not_stored",
            ) from refusal
        raise
    return int(ack.seq)


async def enable(
    kv: KeyValue,
    *,
    direct: bool = True,
    atomic: bool = True,
    ttl: bool | float | timedelta | None = None,
    timeout: float | None = None,
) -> KeyValue:
    """Turn on what a bucket lacks; return nats-py's `KeyValue` for the bucket as it is now.

    Nothing is ever turned off, and everything else of its configuration stays as it is. A bucket that has it all is
    not written to.

    Args:
        kv: nats-py's bucket.
        direct: Direct gets, which `get_many` and `snapshot` need. (nats-py creates buckets without.)
        atomic: Atomic batches, which transactions need.
        ttl: True: times to live for single keys. A number of whole seconds or a timedelta: those, and markers that
            stay for so long wherever a key expires, so that watchers and reads of the past can tell. With markers, no
            value lives shorter than its marker, unless the bucket's history is 1.
        timeout: Seconds for all of it; None is the context's own.

    Raises:
        UnsupportedFeatureError: The server does not know an option; nothing was changed.
        nats.js.errors.BucketNotFoundError: There is no such bucket.
        ServerError: The server refused.
        ValueError, TypeError: `ttl` is none of these.

    Cancellation: The bucket may have been changed.

    Requires: Permission for ``STREAM.INFO`` and ``STREAM.UPDATE``. Servers have no conditional update: two programs
        that turn on different options at the same moment can undo each other's.
    """
    wanted = _options(direct=direct, atomic=atomic, ttl=ttl)
    bucket = Bucket(kv, timeout)
    found = (await bucket.info())["config"]
    missing = {name: value for name, value in wanted.items() if (found.get(name) or False) != value}
    if missing:
        _require(bucket, found, missing, "nothing was changed")
        answer = await Api(bucket.js, bucket.timeout).ask(f"STREAM.UPDATE.{bucket.stream}", {**found, **missing})
        echoed = answer["config"]
        ignored = {name: (value, got) for name, value in missing.items() if (got := echoed.get(name) or False) != value}
        if ignored:
            _require(bucket, echoed, ignored, "the server ignored it")
            raise StreamConfigMismatchError(
                f"the server made something else of bucket {bucket.name!r}: {ignored}", diff=ignored
            )
    bound: KeyValue = await bucket.context.key_value(bucket.name)
    return bound


def _options(*, direct: bool, atomic: bool, ttl: bool | float | timedelta | None) -> dict[str, Any]:
    wanted: dict[str, Any] = {}
    if direct:
        wanted["allow_direct"] = True
    if atomic:
        wanted["allow_atomic"] = True
    if ttl is None:
        return wanted
    if ttl is False:
        raise ValueError("times to live cannot be turned off; leave `ttl` out to let them be")
    wanted["allow_msg_ttl"] = True
    if ttl is not True:
        wanted["subject_delete_marker_ttl"] = int(ttl_value(ttl)) * 1_000_000_000
        # What servers turn on themselves together with markers.
        wanted |= {"allow_rollup_hdrs": True, "deny_purge": False}
    return wanted


def _require(bucket: Bucket, config: dict[str, Any], options: Iterable[str], detail: str) -> None:
    """Raise if the server that leads the bucket is too old for one of `options`."""
    version, level = answering_server(config)
    for name in options:
        feature = BY_OPTION.get(name)
        if feature is not None and not feature.at(level):
            server = version or bucket.js.connection.server_version
            raise feature.unsupported(server_version=server, api_level=level, detail=detail)
