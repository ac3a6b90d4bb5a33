"""What stores a commit: an atomic batch, or for one message a publish as nats-py's ``put`` and ``update`` are."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import nats.errors
import nats.js.errors
from nats.js.api import DEFAULT_PREFIX
from nats.js.errors import BadBucketError

from jetstream_ext.client import telemetry
from jetstream_ext.client.api import lookup_stream, why_no_jetstream
from jetstream_ext.client.atomic_session import AtomicSession
from jetstream_ext.client.base_connection import NotPermittedError
from jetstream_ext.client.outcome import resolve
from jetstream_ext.client.streams import check_leader
from jetstream_ext.errors import (
    BadHeaderError,
    BadSubjectError,
    BatchOutcomeUnknownError,
    BatchServerError,
    ErrorCode,
    MaxPayloadError,
    MessageTooLargeError,
    NoStreamError,
    ServerError,
    WrongLastSequenceError,
    batch_refusal,
    server_error,
)
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.protocol import advice
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.atomic import State
from jetstream_ext.protocol.feature_table import MSG_TTL
from jetstream_ext.protocol.options import check_seconds, message_headers
from jetstream_ext.protocol.outcome import Messages
from jetstream_ext.text import counted
from jetstream_ext.types import BatchAck, BatchMessage, own_headers


class Commit(ABC):
    """Stores messages of a bucket, all of them or none; the last is that of a key, unless all are events."""

    def __init__(self, bucket: Bucket, messages: Sequence[BatchMessage], batch_id: str) -> None:
        self.bucket: Bucket = bucket
        self.messages: Sequence[BatchMessage] = messages
        self.batch_id: str = batch_id
        self.answered_by: str = ""
        """Another stream that has acknowledged the commit, and so proves nothing about the bucket."""
        # The stream had this sequence before.
        self.seen: int = max(message.expected_last_subject_seq or 0 for message in messages)

    @property
    @abstractmethod
    def unknown(self) -> bool:
        """Whether the commit was sent, and it is not known what became of it."""

    async def commit(self) -> BatchAck:
        """Store the messages.

        Raises:
            BatchOutcomeUnknownError: The answer was lost; see `resolve`.
            WrongLastSequenceError: A key is not at the revision that a message expects; nothing is stored.
            BatchServerError, NoStreamError, MaxPayloadError, BadHeaderError, RequestTimeoutError: Nothing is stored.
        """
        try:
            ack = await self._store()
        except WrongLastSequenceError:
            raise
        except ServerError as refusal:
            raise self._refused(refusal) from refusal.__cause__ or refusal
        except NoStreamError as error:
            bucket = self.bucket
            await bucket.check_known(fresh=True)
            why = f"does not exist, or has no leader{why_no_jetstream(bucket.context)}; nothing was written"
            text, sent = f"bucket {bucket.name!r} {why}", error.sent or 0
            raise NoStreamError(text, batch_id=self.batch_id, sent=sent, outcome="not_stored") from error
        except MaxPayloadError as large:
            text = self._too_large(large.subject, large.size, "server", large.limit, "max_payload")
            raise MaxPayloadError(text, subject=large.subject, size=large.size, limit=large.limit) from large
        if ack.stream != self.bucket.stream:
            self.answered_by = ack.stream
            raise self._unknown()
        return ack

    def _unknown(self, why: str = "") -> BatchOutcomeUnknownError:
        why = (
            why
            or f"the outcome is unknown: stream {self.answered_by!r} has acknowledged the write, which is not the bucket's"
        )
        text, sent = f"bucket {self.bucket.name!r}: {why}", len(self.messages)
        return BatchOutcomeUnknownError(text, batch_id=self.batch_id, sent=sent, outcome="unknown")

    @abstractmethod
    async def _store(self) -> BatchAck: ...

    @abstractmethod
    async def resolve(self, timeout: float | None) -> BatchAck | None:
        """Return the ack of the messages if they are stored, or None; raise BatchOutcomeUnknownError if that is not known."""

    def _refused(self, refusal: ServerError) -> BatchServerError:
        """Return the error to raise when the server has refused the commit: what is wrong with the bucket, and what to do."""
        bucket, said = self.bucket, refusal.description
        facts: dict[str, Any] = {"batch_id": self.batch_id, "outcome": "not_stored"}
        if isinstance(refusal, MessageTooLargeError) and refusal.subject:
            of_message = {"subject": refusal.subject, "size": refusal.size, "limit": refusal.limit}
            text = self._too_large(refusal.subject, refusal.size, "bucket", refusal.limit, "max_msg_size")
            return batch_refusal(refusal, text, **facts, **of_message)
        keys = sum(each.subject.startswith(bucket.prefix) for each in self.messages)
        events = f" and {counted(len(self.messages) - keys, 'event')}" if keys < len(self.messages) else ""
        expiring = ", ".join(repr(bucket.key(each.subject)) for each in self.messages if each.msg_ttl is not None)
        reasons: dict[int, tuple[str, str]] = {
            ErrorCode.ATOMIC_DISABLED: (
                "atomic batches, which a transaction needs, are disabled",
                f"; {advice.enable_bucket(bucket.name, 'atomic', what='them')}",
            ),
            ErrorCode.ATOMIC_TOO_LARGE: (
                f"the transaction has {counted(keys, 'key')}{events}, more than the server accepts in one batch ({said})",
                "",
            ),
            ErrorCode.MESSAGE_TTL_DISABLED: (
                f"TTLs are disabled (key {expiring})",
                f"; {advice.enable_bucket(bucket.name, 'ttl', what='them')}",
            ),
            ErrorCode.ROLLUP_REFUSED: (
                f"rollups are disabled, which purges and values with a TTL need to replace a key's history ({said})",
                f"; enable them with allow_rollup_hdrs=True or 'nats stream edit {bucket.stream} --allow-rollup'",
            ),
            ErrorCode.STREAM_SEALED: (f"it is sealed, so it takes no more writes ({said})", ""),
            ErrorCode.STORE_FAILED: (
                f"the server cannot store the write ({said})",
                "; if this is a limit of the bucket, raise it or delete keys",
            ),
        }
        if isinstance(refusal, BatchServerError) and refusal.batch_id and refusal.err_code not in reasons:
            return refusal  # its text says at which message, and what may explain it
        why, remedy = reasons.get(refusal.err_code or 0, (f"the server refused the write ({said})", ""))
        return batch_refusal(refusal, f"bucket {bucket.name!r}: {why}; nothing was written{remedy}", **facts)

    def _too_large(self, subject: str, size: int | None, what: str, limit: int | None, option: str) -> str:
        bucket = self.bucket
        return (
            f"bucket {bucket.name!r}: the message of key {bucket.key(subject)!r} has {size} bytes with its headers; the {what} "
            f"takes {limit} ({option}); nothing was written"
        )


class BatchCommit(Commit):
    """A commit of several messages."""

    def __init__(self, bucket: Bucket, messages: Sequence[BatchMessage]) -> None:
        # Through the API of another domain, only the commit, the message of a key, is sure to be the bucket's to answer.
        elsewhere = bucket.context.prefix != DEFAULT_PREFIX
        self._session = AtomicSession(bucket.context, bucket.timeout, in_one_go=True, quiet=elsewhere)
        super().__init__(bucket, messages, self._session.machine.batch_id)

    @property
    def unknown(self) -> bool:
        return bool(self.answered_by) or self._session.machine.state is State.UNKNOWN

    async def _store(self) -> BatchAck:
        session = self._session
        try:
            with session.call(telemetry.Kind.COMMIT, observed=False) as call:  # the transaction's commit is observed
                await session.fill(self.messages, call)
                return await session.commit(None)
        finally:
            session.discard()

    async def resolve(self, timeout: float | None) -> BatchAck | None:
        if self.answered_by:
            raise self._unknown()
        return await self._session.resolve(timeout, seen=self.seen, of_bucket=True)


class PublishCommit(Commit):
    """A commit of the message of one key; its `msg_id`, if it has one, shows in the stream whether it is stored."""

    def __init__(self, bucket: Bucket, message: BatchMessage) -> None:
        super().__init__(bucket, [message], message.msg_id or "")
        self._message = message
        self._headers = message_headers(message)
        self._sent = False
        self._write: Messages | None = None
        self._session = 0  # of the connection that the message was written to

    @property
    def unknown(self) -> bool:
        return bool(self.answered_by) or self._sent

    async def _store(self) -> BatchAck:
        bucket, message, clock = self.bucket, self._message, asyncio.get_running_loop().time
        context, deadline = bucket.context, clock() + bucket.timeout
        if message.msg_ttl is not None and not MSG_TTL.on(context.connection.server_version):
            # The bucket's leader, another server, may store a TTL and never heed it.
            check_leader(context, (await bucket.unchecked_state()).config, [MSG_TTL], "nothing was written")
        if self.batch_id and (known := await lookup_stream(context, "", bucket.stream, bucket.timeout / 2)):
            before, after = known[0], max(known[1], self.seen)
            ids, last = (self.batch_id,), bool(before.config.get("deny_delete"))
            self._write = Messages(message.subject, 1, before, after, ids, unique=True, known="", oldest_first=last)
        await context.connection.wait_usable(max(0.0, deadline - clock()))
        self._sent, self._session = True, context.connection.session
        subject, left = message.subject, max(0.001, deadline - clock())
        try:
            headers = own_headers(self._headers)
            ack = await context.publish(subject, message.payload, headers, left, f"the ack of {subject}")
        except (BadHeaderError, BadSubjectError, MaxPayloadError, NotPermittedError, BadBucketError):
            self._sent = False
            raise
        except nats.js.errors.NoStreamResponseError as unanswered:
            self._sent = False
            raise NoStreamError(sent=1) from unanswered
        except nats.js.errors.APIError as refused:
            self._sent = False
            raise self._read(refused) from refused
        except Exception as lost:
            why = f"the answer to the write was lost ({lost}); it may be stored; call resolve()"
            raise self._unknown(why) from lost
        self._sent = False
        return BatchAck(ack.stream, int(ack.seq), self.batch_id, 1, domain=ack.domain)

    def _read(self, refused: nats.js.errors.APIError) -> ServerError:
        error = server_error(code=refused.code, err_code=refused.err_code, description=refused.description or "")
        if isinstance(error, MessageTooLargeError):
            error.subject = self._message.subject
            error.size = len(h.encode(self._headers)) + len(self._message.payload)
            error.limit = None if self._write is None else self._write.before.max_msg_size
        return error

    async def resolve(self, timeout: float | None) -> BatchAck | None:
        bucket = self.bucket
        if self.answered_by:
            raise self._unknown()
        timeout = 4 * bucket.timeout if timeout is None else check_seconds(timeout, "timeout")
        ack = await resolve(bucket.context, self._write, timeout, batch_id=self.batch_id, size=1)
        if ack is None and bucket.context.connection.session != self._session:
            why = "the client has reconnected, and the message may still arrive over the old connection"
            raise self._unknown(f"the outcome is unknown: {why}")
        self._sent = False
        return ack
