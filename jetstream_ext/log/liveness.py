"""Which worker of a name is alive, and when another one may take over.

Members of groups and workers with ``standby=True`` show that they are alive by a key of a bucket. It has a TTL and is stored
again three times in that time, so the server removes the key of a program that died. A member that ends deletes its key, and
a worker stores that it has released it.

A worker without ``standby=True`` cannot know whether the other one of its name is alive. It takes over at once, unless the
other one took over itself less than `TAKEOVER` seconds before, and has not said in its record that it has ended. So two
workers that are restarted whenever they are fenced change places once in that time.

None of this makes anything safe. The fence does: see `client.fenced_write`.
"""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import Final

from nats.js.errors import APIError, BucketNotFoundError
from nats.nuid import NUID

from jetstream_ext.client.api import stream_state
from jetstream_ext.client.base_connection import cancel
from jetstream_ext.client.connection import open_bucket
from jetstream_ext.client.fenced_write import FencedWriter, RecordMovedError
from jetstream_ext.client.retry import Retry
from jetstream_ext.errors import FencedError, StreamConfigMismatchError, server_error
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.creation import create_bucket
from jetstream_ext.kv.entries import DELETE_HEADERS, operation
from jetstream_ext.log.job import Job, Source
from jetstream_ext.protocol import advice
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.headers import MSG_TTL
from jetstream_ext.protocol.options import OPTIONS
from jetstream_ext.protocol.records import Record
from jetstream_ext.text import get_logger, log_state, plural

_log = get_logger("log")

TAKEOVER: Final = 10.0
"""Seconds after a take-over in which the next start waits, unless the worker that took over has released the name."""
SECONDS: Final = 10
"""Seconds after which the server removes the lease of a worker that died."""
POLL: Final = 0.25
"""Seconds between two looks at what another worker has stored."""
RELEASE_TIMEOUT: Final = 2.0
"""Seconds that a worker which ends may take to release its name, and as many to release its lease."""


def encode_key(*names: str) -> str:
    """Return the names as a key; ``=XX`` stands for a byte that a key cannot have."""
    text = ".".join(names).encode()
    return re.sub(rb"[^-/_a-zA-Z0-9.]", lambda match: b"=%02X" % ord(match[0]), text).decode()


def decode_key(key: str) -> str:
    """Return the names that `encode_key` was given, joined by dots."""
    return re.sub(r"=([0-9A-F]{2})", lambda match: chr(int(match[1], 16)), key).encode("latin-1").decode()


async def open_ttl_bucket(
    bucket: Bucket, what: str, patience: float, *needs: str, replicas: int | None = None
) -> StreamState:
    """Return the state of a bucket whose keys may have TTLs, for `what`; create it with so many replicas if it does not exist.

    Raises:
        nats.js.errors.BucketNotFoundError: It does not exist, and `replicas` is None.
        StreamConfigMismatchError: It lacks a TTL for keys, or an option that `needs` names (of `jetstream_ext.kv.enable`).
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


async def put_key(bucket: Bucket, key: str, value: bytes | None, seconds: int, timeout: float) -> None:
    """Store a key, or with None a delete marker; the server removes it after `seconds`."""
    subject, headers = bucket.subject(key), {MSG_TTL: str(seconds)}
    if value is None:
        headers |= DELETE_HEADERS
    try:
        await bucket.context.publish(subject, value or b"", headers, timeout, f"the ack of {subject}")
    except APIError as refusal:
        error = server_error(code=refusal.code, err_code=refusal.err_code, description=refusal.description or "")
        raise error from refusal


class Lease:
    """The lease of a worker: a `Record` with a TTL on a key of the bucket of its reader's offsets.

    Attributes:
        bucket: The bucket.
        subject: The subject of the key.
        held: Whether this worker has the lease, or may have it.
    """

    def __init__(self, job: Job, reader: Source) -> None:
        self.bucket: Bucket = Bucket(open_bucket(reader.offsets.context, reader.offsets.bucket), job.timeout)
        self.subject: str = self.bucket.subject(encode_key("leases", job.output_stream, job.record))
        self.held: bool = False
        self._id = NUID().next().decode()
        self._job = job
        self._input = reader.stream
        self._writer = FencedWriter(
            self.bucket.context,
            self.bucket.stream,
            self.subject,
            name=f"the lease of {job.what}",
            timeout=min(self.bucket.timeout, SECONDS / 3),  # a renewal is on its way before the next one
            patience=job.patience,
            msg_ttl=SECONDS,
        )
        self._renewing: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Raise FencedError if another worker has the lease."""
        if not self.held:
            raise FencedError(
                f"{self._job.what}: another worker of this name has taken its lease, which was not renewed in time; stop this one, which "
                "stores nothing more",
                name=self._job.name,
            )

    async def acquire(self) -> None:
        """Wait until no other worker is alive, take the lease, and renew it from then on, until `release`.

        The bucket is created if it does not exist, with as many replicas as the input stream.

        Raises:
            ValueError: The key has another value.
            Exception: Transient errors lasted longer than the worker's `patience`.

        Cancellation: The lease may be stored; `release` releases it.
        """
        job = self._job
        try:
            await open_ttl_bucket(self.bucket, job.what, job.patience)
        except BucketNotFoundError:
            state = await Retry(job.patience).call(partial(stream_state, job.context, self._input))
            await open_ttl_bucket(self.bucket, job.what, job.patience, replicas=state.replicas)
        while not await self._store():
            log_state(_log, job.what, "stands by", "another worker of its name is alive")
            await asyncio.sleep(POLL)
        log_state(_log, job.what, "lease held")
        self._renewing = asyncio.create_task(self._renew())

    async def release(self) -> None:
        """Stop renewing the lease and release it, so that another worker can take over at once.

        Errors are ignored, and the call takes two seconds at most: the lease then ends by itself.

        Cancellation: The lease may be left; it ends by itself.
        """
        renewing, self._renewing = self._renewing, None
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT):
                if renewing is not None:
                    await cancel(renewing, RELEASE_TIMEOUT)
                if self.held and self.bucket.context.connection.usable:
                    await self._store(released=True)
        except Exception as error:
            log_state(_log, self._job.what, "lease not released", error, error=error)
        finally:
            if renewing is not None:
                renewing.cancel()

    async def _store(self, *, released: bool = False) -> bool:
        """Store the lease, or its end, unless another worker has it; return whether it is stored."""
        while True:
            self.held = holder_of(await self._writer.read()) in (None, self._id)
            if not self.held:
                return False
            try:
                await self._writer.store((), Record(seq=1, writer=self._id, released=released).encode())
            except RecordMovedError:
                continue
            return True

    async def _renew(self) -> None:
        while self.held:
            await asyncio.sleep(SECONDS / 3)
            try:
                await self._store()
            except Exception as error:  # the worker goes on: the lease is not what makes it safe
                _log.warning("%s: its lease could not be renewed: %r", self._job.what, error)
        log_state(_log, self._job.what, "lease lost")


def holder_of(found: StoredMsg | None) -> str | None:
    """Return the worker whose lease was found, or None if none holds it.

    Raises:
        ValueError: The message is no lease.
    """
    if found is None or operation(found.headers)[0] != "PUT":
        return None
    try:
        record = Record.decode(found.data)
    except ValueError as error:
        raise ValueError(
            f"stream {found.stream!r}: message {found.seq} on {found.subject!r} is not the lease of a worker ({found.data[:80]!r}), so "
            "the worker did not start; another program has written it: delete the key"
        ) from error
    return None if record.released else record.writer
