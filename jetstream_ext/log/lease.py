"""A lease: a key of a bucket that one worker at a time holds and renews while it is alive.

::

    acquire   read the key ── no lease, or one that has ended ──► store this worker's lease behind what was read
                           └─ another worker's ─────────────────► wait, read it again
    renew     store the lease again, three times in its length
    release   delete the key

A lease only says which worker is alive; it makes nothing safe. A lease ends `seconds` after the bucket's leader stored
it, and only the leader's clock counts: the time of the message, and the time of an answer that was given before the
message was read. A slow answer therefore makes a lease appear younger, never older. If the bucket has ``allow_msg_ttl``,
the server also removes the key at that time.

While the bucket is away, no worker can renew its lease. A standby therefore takes the place of a worker that did not
release its lease only if it has also seen that the lease was not renewed in time, for as long as the time between two
renewals.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from datetime import datetime, timedelta
from typing import Final

import orjson
from nats.js.errors import APIError

from jetstream_ext.client.base_connection import cancel
from jetstream_ext.client.fenced_write import FencedWriter, RecordMovedError
from jetstream_ext.client.retry import Retry
from jetstream_ext.errors import StreamRecreatedError, WrongLastSequenceError, server_error
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import DELETE_HEADERS, PURGE_HEADERS, operation
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.headers import EXPECTED_LAST_SUBJECT_SEQ, MSG_TTL
from jetstream_ext.protocol.numbers import json_number, json_text
from jetstream_ext.protocol.options import MAX_TTL
from jetstream_ext.text import get_logger, log_state

_log = get_logger("log")

SECONDS: Final = 10
"""Seconds after which the lease of a worker that died ends."""
_POLL: Final = 0.25
_RELEASE_TIMEOUT: Final = 2.0
_VERSION: Final = 1


def lease_key(*names: str) -> str:
    """Return the key of a lease."""
    return encode_key("leases", *names)


def encode_key(*names: str) -> str:
    """Return the names as a key; ``=XX`` stands for a byte that a key cannot have."""
    text = ".".join(names).encode()
    return re.sub(rb"[^-/_a-zA-Z0-9.]", lambda match: b"=%02X" % ord(match[0]), text).decode()


def decode_key(key: str) -> str:
    """Return the names that `encode_key` was given, joined by dots."""
    return re.sub(r"=([0-9A-F]{2})", lambda match: chr(int(match[1], 16)), key).encode("latin-1").decode()


class Lease:
    """The lease of one worker on `key`; `holder` is a random id of the worker, `name` names it in errors.

    `seconds` is the length of the lease, a whole number from 1. One task at a time may use it.
    """

    def __init__(
        self, bucket: Bucket, key: str, *, holder: str, name: str, patience: float, seconds: int | None = None
    ) -> None:
        self.lost: bool = False  # another worker has taken it
        self._bucket = bucket
        self._key = key
        self._holder = holder
        self._name = name
        self._patience = patience
        self._seconds = SECONDS if seconds is None else seconds
        self._writer: FencedWriter | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._may_hold = False  # this worker's lease may be stored
        self._count = 0
        self._watched = 0  # the sequence of the newest lease of another worker (0: none was seen)
        self._late_since: datetime | None = None  # when it was first seen that this lease had not been renewed in time

    async def acquire(self) -> None:
        """Wait until no other worker is alive, take the lease, and renew it from then on, until `release`.

        Raises:
            ValueError: The key has another value.
            Exception: Transient errors of the bucket's stream lasted longer than `patience`.

        Cancellation: The lease may be stored; `release` deletes it.
        """
        self._writer = FencedWriter(
            self._bucket.context,
            self._bucket.stream,
            self._bucket.subject(self._key),
            name=self._name,
            timeout=self._bucket.timeout,
            patience=self._patience,
        )
        waiting = False
        while not await self._take(self._writer):
            if not waiting:
                log_state(_log, self._name, "stands by", "another worker of its name is alive")
                waiting = True
            await asyncio.sleep(_POLL)
        log_state(_log, self._name, "lease held", seconds=self._seconds)
        self._renewing = asyncio.create_task(self._renew(self._writer))

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
                if self._writer is not None and self._may_hold and self._bucket.context.connection.usable:
                    await self._delete(self._writer)
                    log_state(_log, self._name, "lease released")
        except Exception as error:
            log_state(_log, self._name, "lease not deleted", error, error=error)
        finally:
            if renewing is not None:
                renewing.cancel()

    async def _take(self, writer: FencedWriter) -> bool:
        """Store this worker's lease, unless another worker has one; return whether it is stored."""
        self._may_hold = False
        state = await Retry(self._patience).call(self._bucket.unchecked_state)  # before the read: see the module
        if not self._is_free(await writer.read(), state.now):
            return False
        # Without a rollup, the end of a lease would show the one before.
        writer.rollup = bool(state.config.get("allow_rollup_hdrs")) and not state.config.get("deny_purge")
        writer.msg_ttl = self._seconds if state.config.get("allow_msg_ttl") else None
        self._may_hold = True
        try:
            await writer.store([], self._encode())
        except RecordMovedError:
            self._may_hold = False
        else:
            self._watched, self._late_since = 0, None
        return self._may_hold

    def _is_free(self, found: StoredMsg | None, now: datetime) -> bool:
        """Return whether no other worker is alive: `found` is its lease, and `now` a time before that was read."""
        if found is None:
            seconds, age = self._seconds, timedelta.max
            if not self._watched:
                return True
        elif operation(found.headers)[0] != "PUT":
            return True  # released
        else:
            holder, seconds = self._decode(found)
            if holder == self._holder:
                return True
            age = now - found.time
            if found.seq != self._watched:
                self._watched, self._late_since = found.seq, None
        renewed_every = timedelta(seconds=seconds / 3)
        if age < 2 * renewed_every:
            return False
        self._late_since = self._late_since or now
        return age >= timedelta(seconds=seconds) and now - self._late_since >= renewed_every

    async def _renew(self, writer: FencedWriter) -> None:
        while not self.lost:
            await asyncio.sleep(self._seconds / 3)
            try:
                with contextlib.suppress(RecordMovedError, StreamRecreatedError):
                    await writer.store([], self._encode())
                    continue
                # It has ended before it was renewed, or it was deleted. Another worker may have one now.
                self.lost = not await self._take(writer)
                log_state(_log, self._name, "lease lost" if self.lost else "lease taken again")
            except Exception as error:  # the worker goes on: the lease is not what makes it safe
                _log.warning("%s: its lease could not be renewed: %r", self._name, error)

    async def _delete(self, writer: FencedWriter) -> None:
        bucket = self._bucket
        headers = PURGE_HEADERS if writer.rollup else DELETE_HEADERS
        if writer.msg_ttl is not None:
            headers = headers | {MSG_TTL: str(self._seconds)}
        while True:
            expected = headers | {EXPECTED_LAST_SUBJECT_SEQ: str(writer.fence)}
            try:
                await bucket.context.publish(
                    writer.subject, b"", expected, _RELEASE_TIMEOUT, f"the ack of {writer.subject}"
                )
                return
            except APIError as refusal:
                error = server_error(code=refusal.code, err_code=refusal.err_code, description="")
                if not isinstance(error, WrongLastSequenceError):
                    raise
            # The renewal that was cancelled may be stored.
            found = await writer.read()
            if found is None or operation(found.headers)[0] != "PUT" or self._decode(found)[0] != self._holder:
                return

    def _encode(self) -> bytes:
        self._count += 1
        return orjson.dumps({"v": _VERSION, "worker": self._holder, "seconds": self._seconds, "renewal": self._count})

    def _decode(self, found: StoredMsg) -> tuple[str, int]:
        try:
            body = orjson.loads(found.data)
            if json_number(body["v"], "v") == _VERSION:
                return json_text(body["worker"], "worker"), json_number(body["seconds"], "seconds", low=1, high=MAX_TTL)
        except (KeyError, TypeError, ValueError):
            pass
        raise ValueError(
            f"bucket {self._bucket.name!r}: key {self._key!r} is not the lease of a worker ({found.data[:80]!r}), so {self._name} "
            "did not start; another program has written the key: delete it"
        )
