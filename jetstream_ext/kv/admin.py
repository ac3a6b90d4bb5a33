"""Renewing the TTL of a key."""

from __future__ import annotations

import contextlib

import nats.errors
import nats.js.errors
from nats.js.kv import KeyValue

from jetstream_ext.client.base_connection import NotPermittedError
from jetstream_ext.errors import (
    BadHeaderError,
    BatchOutcomeUnknownError,
    KeyConflictError,
    RequestTimeoutError,
    WrongLastSequenceError,
)
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.commit import PublishCommit
from jetstream_ext.kv.entries import ROLLUP_HEADERS, check_key, operation
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.headers import MSG_ID, MSG_TTL, is_instruction
from jetstream_ext.protocol.options import ttl_value
from jetstream_ext.types import NEVER, TTL, BatchMessage, own_headers


async def touch(kv: KeyValue, key: str, ttl: TTL, *, timeout: float | None = None) -> int:
    """Give a key a new TTL, unless another client changes it meanwhile; return its new revision.

    Servers cannot extend the TTL of a stored message, so the call writes the value again, with the headers that it had:
    every value of each header, in order, except those whose name begins with ``Nats-``. NATS reserves these for the server,
    which would take them as instructions. (Names are case-sensitive, so ``nats-own`` stays.) A value that can expire
    replaces the key's history; otherwise its expiry would show the previous value again.

    Args:
        kv: nats-py's bucket.
        key: The key.
        ttl: Whole seconds from 1, a timedelta of whole seconds, or `NEVER`. The bucket's own TTL is an upper limit,
            except for `NEVER`.
        timeout: Seconds to wait for each answer; None is the context's own.

    Raises:
        nats.js.errors.KeyNotFoundError: There is no such key.
        nats.js.errors.BucketNotFoundError: There is no such bucket.
        nats.js.errors.BadBucketError: The bucket is a mirror, or the stream is not a bucket's; nothing was written.
        KeyConflictError: The key changed between the read and the write; nothing was written.
        MessageTTLDisabledError: The bucket does not allow TTLs; `enable` turns them on.
        MessageTooLargeError: The value with the headers for its TTL is larger than the bucket allows; nothing was written.
        MaxPayloadError: It is larger than the server's max_payload; nothing was written.
        NoStreamError: The bucket's leader is away, or the stream does not store the bucket's keys; nothing was written. It
            is also nats-py's ``NoStreamResponseError``.
        ServerError: The server refused the write for another reason: the bucket does not allow rollups (10111), is sealed
            (10109) or is full (10077). Nothing was written. The error is a nats-py ``APIError``, as those of nats-py's
            ``put`` are, and names the bucket and the reason.
        BadHeaderError: A header of the value has a name that clients must not send, or is not UTF-8, which nats-py cannot
            send; nothing was written.
        StreamConfigMismatchError: The key was not found, but the bucket's server does not find all that is stored, because
            the bucket has reached sequence 2**62. Only a client with permission for ``STREAM.INFO`` notices.
        UnsupportedFeatureError: The server is older than 2.11, and would never let the key expire; nothing was written.
        nats.js.errors.InvalidKeyError, ValueError, TypeError: Invalid argument; nothing was sent.
        RequestTimeoutError: No answer within `timeout`; the key may have been written.
        nats.js.errors.ServiceUnavailableError: No JetStream answers; nothing was written.

    Cancellation: The key may have been written.

    Requires: nats-server 2.11, ``allow_msg_ttl`` and ``allow_rollup_hdrs`` (nats-py's buckets have both), permission for
        ``STREAM.MSG.GET``.
    """
    check_key(key)
    ttl_value(ttl)
    bucket = Bucket(kv, timeout)
    subject = bucket.subject(key)
    found = await bucket.get_at_leader(last_by_subj=subject)
    if found is None or operation(found.headers)[0] != "PUT":
        with contextlib.suppress(NotPermittedError):
            await bucket.state(direct=False)
        raise nats.js.errors.KeyNotFoundError(message=f"key {key!r} of bucket {bucket.name!r}")
    # By its message id, the server would take the call for a duplicate of the value.
    replaced = {MSG_ID, MSG_TTL}
    pairs = [pair for pair in _text_headers(bucket, key, found) if pair[0] not in replaced]
    if ttl is not NEVER:
        pairs += ROLLUP_HEADERS.items()
    copy = BatchMessage(
        subject, found.data, headers=own_headers(pairs), msg_ttl=ttl, expected_last_subject_seq=found.seq
    )
    try:
        return (await PublishCommit(bucket, copy).commit()).seq
    except WrongLastSequenceError as refusal:
        raise KeyConflictError(
            f"bucket {bucket.name!r}: another client changed key {key!r} during touch(), so it is no longer at revision "
            f"{found.seq}; nothing was written",
            keys=(key,),
            description=refusal.description,
        ) from refusal
    except BatchOutcomeUnknownError as lost:
        raise RequestTimeoutError(
            f"bucket {bucket.name!r}: no answer within {bucket.timeout:g} s; key {key!r} may have been written"
        ) from lost


def _text_headers(bucket: Bucket, key: str, message: StoredMsg) -> list[tuple[str, str]]:
    """Return the stored headers that a copy has; raise BadHeaderError if one is not UTF-8."""
    pairs: list[tuple[str, str]] = []
    for name, value in message.raw_headers:
        try:
            pairs.append((name.decode(), value.decode()))
        except UnicodeDecodeError as error:
            raise BadHeaderError(
                f"bucket {bucket.name!r}: the header {name.decode('utf-8', 'backslashreplace')!r} of key {key!r} is not UTF-8 "
                f"({value[:64]!r}), which nats-py cannot send; nothing was written, and the key keeps its earlier TTL; put the "
                "value again with its new TTL (a transaction with put(ttl=...)), without that header"
            ) from error
    return [pair for pair in pairs if not is_instruction(pair[0])]
