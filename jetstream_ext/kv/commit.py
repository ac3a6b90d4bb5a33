"""One message of a key: a compare-and-set publish, as nats-py's ``put`` and ``update`` are, and what it did."""

from __future__ import annotations

import asyncio

import nats.errors
import nats.js.errors
from nats.js.errors import BadBucketError

from jetstream_ext.client.api import lookup_stream
from jetstream_ext.client.base_connection import NotPermittedError
from jetstream_ext.client.outcome import resolve
from jetstream_ext.errors import (
    BadHeaderError,
    BadSubjectError,
    BatchOutcomeUnknownError,
    MaxPayloadError,
    MessageTooLargeError,
    NoStreamError,
    WrongLastSequenceError,
    batch_refusal,
    server_error,
)
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.options import check_seconds, message_headers
from jetstream_ext.protocol.outcome import Messages
from jetstream_ext.types import BatchAck, BatchMessage, own_headers


class KeyPublish:
    """Stores one message of a bucket's key; its `msg_id`, if it has one, shows in the stream whether it is stored."""

    def __init__(self, bucket: Bucket, message: BatchMessage) -> None:
        self._bucket = bucket
        self._message = message
        self.batch_id: str = message.msg_id or ""
        self.unknown: bool = False
        """Whether the message was sent, and it is not known what became of it."""
        self._write: Messages | None = None
        self._session = 0  # of the connection that the message was written to
        self._headers = message_headers(message)

    async def commit(self) -> BatchAck:
        """Store the message.

        Raises:
            BatchOutcomeUnknownError: The answer was lost; see `resolve`.
            WrongLastSequenceError: The key is not at the revision that the message expects.
            BatchServerError, NoStreamError, MaxPayloadError, BadHeaderError, RequestTimeoutError: Nothing is stored.
        """
        bucket, message, clock = self._bucket, self._message, asyncio.get_running_loop().time
        deadline = clock() + bucket.timeout
        if message.msg_ttl is not None:
            await bucket.check_ttl()
        if self.batch_id and (known := await lookup_stream(bucket.context, "", bucket.stream, bucket.timeout / 2)):
            state, last_seq = known
            after = max(last_seq, message.expected_last_subject_seq or 0)
            ids, last = (self.batch_id,), bool(state.config.get("deny_delete"))
            self._write = Messages(message.subject, 1, state, after, ids, unique=True, known="", oldest_first=last)
        await bucket.context.connection.wait_usable(max(0.0, deadline - clock()))
        self.unknown, self._session = True, bucket.context.connection.session
        try:
            ack = await self._publish(max(0.001, deadline - clock()))
        except (BadHeaderError, BadSubjectError, MaxPayloadError, NoStreamError, NotPermittedError, BadBucketError):
            self.unknown = False
            raise
        except nats.js.errors.APIError as refused:
            self.unknown = False
            raise self._explain(refused) from refused
        except Exception as lost:
            text = (
                f"bucket {bucket.name!r}: the answer to the write was lost ({lost}); it may be stored; call resolve()"
            )
            raise BatchOutcomeUnknownError(text, batch_id=self.batch_id, sent=1, outcome="unknown") from lost
        self.unknown = False
        return ack

    async def _publish(self, timeout: float) -> BatchAck:
        bucket, message = self._bucket, self._message
        subject, headers = message.subject, own_headers(self._headers)
        try:
            ack = await bucket.context.publish(subject, message.payload, headers, timeout, f"the ack of {subject}")
        except nats.js.errors.NoStreamResponseError as unanswered:
            raise await bucket.no_stream(self.batch_id, 1) from unanswered
        except MaxPayloadError as large:
            text = bucket.too_large(subject, large.size, "server", large.limit, "max_payload")
            raise MaxPayloadError(text, subject=subject, size=large.size, limit=large.limit) from large
        return BatchAck(ack.stream, int(ack.seq), self.batch_id, 1, domain=ack.domain)

    def _explain(self, refusal: nats.js.errors.APIError) -> Exception:
        bucket, subject = self._bucket, self._message.subject
        error = server_error(code=refusal.code, err_code=refusal.err_code, description=refusal.description or "")
        if isinstance(error, WrongLastSequenceError):
            return error
        if isinstance(error, MessageTooLargeError):
            limit = None if self._write is None else self._write.before.max_msg_size
            size = len(h.encode(self._headers)) + len(self._message.payload)
            text = bucket.too_large(subject, size, "bucket", limit, "max_msg_size")
            facts = {"subject": subject, "size": size, "limit": limit}
            return batch_refusal(error, text, batch_id=self.batch_id, outcome="not_stored", **facts)
        return bucket.refused(error, [bucket.key(subject)], batch_id=self.batch_id)

    async def resolve(self, timeout: float | None) -> BatchAck | None:
        """Return the ack of the message if it is stored, or None; raise BatchOutcomeUnknownError if that is not known."""
        timeout = 4 * self._bucket.timeout if timeout is None else check_seconds(timeout, "timeout")
        ack = await resolve(self._bucket.context, self._write, timeout, batch_id=self.batch_id, size=1)
        if ack is None and self._bucket.context.connection.session != self._session:
            text = "the client has reconnected, and the message may still arrive over the old connection"
            text = f"bucket {self._bucket.name!r}: the outcome is unknown: {text}"
            raise BatchOutcomeUnknownError(text, batch_id=self.batch_id, sent=1, outcome="unknown")
        self.unknown = False
        return ack
