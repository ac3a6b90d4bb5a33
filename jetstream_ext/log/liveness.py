"""Which worker of a name is alive, and when another one may take over.

Members of groups and workers with ``standby=True`` show that they are alive by a key of a bucket. It has a TTL and is stored
again three times in that time, so the server removes the key of a program that died. A program that ends deletes its key.

A worker without ``standby=True`` cannot know whether the other one of its name is alive. It takes over at once, unless the
other one took over itself less than `TAKEOVER` seconds before, and has not said in its record that it has ended. So two
workers that are restarted whenever they are fenced change places once in that time.

None of this makes anything safe. The fence does: see `client.fenced_write`.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final

import orjson
from nats.js.errors import APIError, BucketNotFoundError
from nats.nuid import NUID

from jetstream_ext.client.api import get_at_leader
from jetstream_ext.client.base_connection import cancel
from jetstream_ext.client.retry import Retry
from jetstream_ext.errors import StreamConfigMismatchError, WrongLastSequenceError, server_error
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.creation import create_bucket
from jetstream_ext.kv.entries import DELETE_HEADERS, operation
from jetstream_ext.protocol import advice
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.headers import EXPECTED_LAST_SUBJECT_SEQ, MSG_TTL
from jetstream_ext.protocol.numbers import json_number, json_text
from jetstream_ext.protocol.options import OPTIONS
from jetstream_ext.text import get_logger, log_state, plural

_log = get_logger("log")

TAKEOVER: Final = 10.0
"""Seconds after a take-over in which the next start waits, unless the worker that took over has released the name."""
SECONDS: Final = 10
"""Seconds after which the server removes the lease of a worker that died."""
POLL: Final = 0.25
"""Seconds between two looks at what another worker has stored."""
_RELEASE_TIMEOUT: Final = 2.0
_VERSION: Final = 1


def encode_key(*names: str) -> str:
    """Return the names as a key; ``=XX`` stands for a byte that a key cannot have."""
    text = ".".join(names).encode()
    return re.sub(rb"[^-/_a-zA-Z0-9.]", lambda match: b"=%02X" % ord(match[0]), text).decode()


def decode_key(key: str) -> str:
    """Return the names that `encode_key` was given, joined by dots."""
    return re.sub(r"=([0-9A-F]{2})", lambda match: chr(int(match[1], 16)), key).encode("latin-1").decode()


def lease_key(*names: str) -> str:
    """Return the key of a lease."""
    return encode_key("leases", *names)


async def open_ttl_bucket(
    bucket: Bucket, what: str, patience: float, *needs: str, replicas: int | None = None
) -> StreamState:
    """Return the state of a bucket whose keys may have TTLs; create it with so many replicas if it does not exist.

    Args:
        bucket: The bucket.
        what: What needs it, in errors.
        patience: Seconds for which transient errors may last.
        needs: Further options of `jetstream_ext.kv.enable` that it must have.
        replicas: None: it must exist.

    Raises:
        nats.js.errors.BucketNotFoundError: It does not exist, and `replicas` is None.
        StreamConfigMismatchError: It lacks an option.
    """
    retry = Retry(patience)
    try:
        state = await retry.call(lambda: bucket.state(direct=False))
    except BucketNotFoundError:
        if replicas is None:
            raise
        await retry.call(lambda: create_bucket(bucket, replicas=replicas, direct=True))
        state = await retry.call(lambda: bucket.state(direct=False))
    options = (*needs, "ttl")
    lacks = {option: OPTIONS[option].field for option in options if not state.config.get(OPTIONS[option].field)}
    if lacks:
        fields = " and ".join(lacks.values())
        raise StreamConfigMismatchError(
            f"{what}: bucket {bucket.name!r} lacks {fields}, which keys need that show which programs are alive; "
            f"{advice.enable_bucket(bucket.name, *lacks, what=plural(len(lacks), 'it', 'them'))}",
            diff=dict.fromkeys(lacks.values(), (True, False)),
        )
    return state


async def put_key(
    bucket: Bucket, key: str, value: bytes, seconds: int, timeout: float, *, after: int | None = None
) -> int:
    """Store a key that the server removes after `seconds`; return its revision.

    With `after`, raise WrongLastSequenceError unless that is its revision now (0: none).
    """
    return await _publish(bucket, key, value, {MSG_TTL: str(seconds)}, timeout, after)


async def delete_key(bucket: Bucket, key: str, seconds: int, timeout: float, *, after: int | None = None) -> None:
    """Delete a key, and let the server remove the delete marker after `seconds`; `after` is as for `put_key`."""
    await _publish(bucket, key, b"", DELETE_HEADERS | {MSG_TTL: str(seconds)}, timeout, after)


async def _publish(
    bucket: Bucket, key: str, value: bytes, headers: dict[str, str], timeout: float, after: int | None
) -> int:
    subject = bucket.subject(key)
    if after is not None:
        headers = headers | {EXPECTED_LAST_SUBJECT_SEQ: str(after)}
    try:
        ack = await bucket.context.publish(subject, value, headers, timeout, f"the ack of {subject}")
    except APIError as refusal:
        error = server_error(code=refusal.code, err_code=refusal.err_code, description=refusal.description or "")
        raise error from refusal
    return ack.seq


class Lease:
    """The lease of one worker on a key of a bucket; `name` names the worker in errors."""

    def __init__(self, bucket: Bucket, key: str, *, name: str, patience: float) -> None:
        self.lost: bool = False  # another worker has taken it
        self._bucket = bucket
        self._key = key
        self._holder = NUID().next().decode()
        self._name = name
        self._patience = patience
        self._timeout = min(bucket.timeout, SECONDS / 3)  # a renewal is on its way before the next one
        self._renewing: asyncio.Task[None] | None = None

    async def acquire(self) -> None:
        """Wait until no other worker is alive, take the lease, and renew it from then on, until `release`.

        Raises:
            ValueError: The key has another value.
            Exception: Transient errors of the bucket's stream lasted longer than `patience`.

        Cancellation: The lease may be stored; `release` deletes it.
        """
        waiting = False
        while not await Retry(self._patience).call(self._take):
            if not waiting:
                log_state(_log, self._name, "stands by", "another worker of its name is alive")
                waiting = True
            await asyncio.sleep(POLL)
        log_state(_log, self._name, "lease held", seconds=SECONDS)
        self._renewing = asyncio.create_task(self._renew())

    async def release(self) -> None:
        """Stop renewing the lease and delete it, so that another worker can take over at once.

        Errors are ignored, and the call takes two seconds at most: the lease then ends by itself.

        Cancellation: The lease may be left; it ends by itself.
        """
        renewing, self._renewing = self._renewing, None
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT):
                if renewing is not None:
                    await cancel(renewing, _RELEASE_TIMEOUT)
                if self._bucket.context.connection.usable:
                    await self._delete()
        except Exception as error:
            log_state(_log, self._name, "lease not deleted", error, error=error)
        finally:
            if renewing is not None:
                renewing.cancel()

    async def _take(self) -> bool:
        """Store this worker's lease, unless another worker has one; return whether it is stored."""
        while True:
            found = await self._read()
            if self._holder_of(found) not in (None, self._holder):
                return False
            value = orjson.dumps({"v": _VERSION, "worker": self._holder})
            try:
                await put_key(self._bucket, self._key, value, SECONDS, self._timeout, after=found.seq if found else 0)
            except WrongLastSequenceError:
                continue  # another worker, or a renewal of this one, came first
            return True

    async def _renew(self) -> None:
        while not self.lost:
            await asyncio.sleep(SECONDS / 3)
            try:
                self.lost = not await self._take()
            except Exception as error:  # the worker goes on: the lease is not what makes it safe
                _log.warning("%s: its lease could not be renewed: %r", self._name, error)
        log_state(_log, self._name, "lease lost")

    async def _delete(self) -> None:
        while (found := await self._read()) is not None and self._holder_of(found) == self._holder:
            try:
                await delete_key(self._bucket, self._key, SECONDS, self._timeout, after=found.seq)
            except WrongLastSequenceError:
                continue  # the renewal that was cancelled was stored
            log_state(_log, self._name, "lease released")
            return

    async def _read(self) -> StoredMsg | None:
        request = {"last_by_subj": self._bucket.subject(self._key)}
        return await get_at_leader(self._bucket.context, self._bucket.stream, request, self._timeout)

    def _holder_of(self, found: StoredMsg | None) -> str | None:
        """Return the worker whose lease was found, or None."""
        if found is None or operation(found.headers)[0] != "PUT":
            return None
        try:
            body = orjson.loads(found.data)
            if json_number(body["v"], "v") == _VERSION:
                return json_text(body["worker"], "worker")
        except (KeyError, TypeError, ValueError):
            pass
        raise ValueError(
            f"bucket {self._bucket.name!r}: key {self._key!r} is not the lease of a worker ({found.data[:80]!r}), so {self._name} "
            "did not start; another program has written the key: delete it"
        )
