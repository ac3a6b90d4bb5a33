"""The commit of a transaction: its messages, what stores them, and what the server's answer means.

A transaction stores one message per key: the server stores a batch completely or not at all, so no reader could see
what came before the last operation on a key, and it refuses the second of two rollups of a subject in a batch.

The commit depends on every key that the transaction read. The message of a key expects the revision that was read. A
key that is only read has no message, so another message carries its expectation: an event, the message of a key that
expects nothing itself, or else a *carrier*, a message without payload on a subject of the bucket's stream that only
transactions use (`options.reads_subject`). If the stream does not store that subject, the first message expects that the
whole bucket has not changed (the *fence*).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import nats.errors
import nats.js.errors
from nats.js.api import DEFAULT_PREFIX
from nats.js.errors import BadBucketError
from nats.nuid import NUID

from jetstream_ext.client import telemetry
from jetstream_ext.client.api import forget_stream, lookup_stream, why_no_jetstream
from jetstream_ext.client.atomic_session import AtomicSession
from jetstream_ext.client.base_connection import NotPermittedError
from jetstream_ext.client.outcome import resolve
from jetstream_ext.client.retry import Retry
from jetstream_ext.client.streams import check_leader
from jetstream_ext.errors import (
    AtomicPublishIncompleteError,
    AtomicPublishTooLargeError,
    BadHeaderError,
    BadSubjectError,
    BatchOutcomeUnknownError,
    BatchServerError,
    ErrorCode,
    KeyConflictError,
    MaxPayloadError,
    MessageTooLargeError,
    NoStreamError,
    RequestTimeoutError,
    ServerError,
    StreamRecreatedError,
    WrongLastSequenceError,
    batch_refusal,
    server_error,
)
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import DELETE_HEADERS, PURGE_HEADERS, ROLLUP_HEADERS, KeyValueEntry, Operation
from jetstream_ext.protocol import advice
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.atomic import State
from jetstream_ext.protocol.feature_table import MSG_TTL
from jetstream_ext.protocol.options import check_seconds, message_headers, reads_subject
from jetstream_ext.protocol.outcome import Messages
from jetstream_ext.text import counted, get_logger, log_state
from jetstream_ext.types import NEVER, TTL, BatchAck, BatchMessage, own_headers

_log: Final = get_logger("kv")

_CARRIERS_REFUSED: Final = AtomicPublishTooLargeError, AtomicPublishIncompleteError, NoStreamError
# How often a commit is sent again because a key to be created turned out to have a delete marker.
_MAX_COMMIT_RETRIES: Final = 3


@dataclass(frozen=True, slots=True)
class Staged:
    """The operation on a key that will be committed."""

    operation: Operation
    value: bytes = b""
    ttl: TTL | None = None
    expected: int | None = None  # the revision that the key must be at (0: the key never existed); None: any
    creates: bool = False  # if the key is not at `expected`, it may instead be at a delete marker

    def message(self, subject: str) -> BatchMessage:
        """Return the message that stores it."""
        headers: Mapping[str, str] | None = None
        if self.operation != "PUT":
            headers = DELETE_HEADERS if self.operation == "DEL" else PURGE_HEADERS
        elif self.ttl is not None and self.ttl is not NEVER and self.expected != 0:
            headers = (
                ROLLUP_HEADERS  # when a value expires, the server exposes the revision before it: there must be none
            )
        return BatchMessage(
            subject, self.value, headers=headers, msg_ttl=self.ttl, expected_last_subject_seq=self.expected
        )


class Commit:
    """The commit of what a transaction has read (None: the key had no message) and of what it writes."""

    def __init__(
        self,
        bucket: Bucket,
        reads: Mapping[str, KeyValueEntry | None],
        writes: dict[str, Staged],
        events: Sequence[BatchMessage],
    ) -> None:
        self.write: Write | None = None
        """The newest attempt."""
        self._bucket = bucket
        self._reads = reads
        self._writes = writes
        self._events = events
        self._only_read = [key for key in reads if key not in writes]
        self._found = [entry for entry in reads.values() if entry is not None]  # delete markers included

    @property
    def batch_id(self) -> str:
        return "" if self.write is None else self.write.batch_id

    @property
    def unknown(self) -> bool:
        return self.write is not None and self.write.unknown

    async def resolve(self, timeout: float | None) -> dict[str, int] | None:
        """Return what `run` would have returned if everything is stored, or None; raise BatchOutcomeUnknownError if unknown."""
        assert self.write is not None
        ack = await self.write.resolve(timeout)
        return None if ack is None else self._revisions(ack)

    def _revisions(self, ack: BatchAck) -> dict[str, int]:
        first = ack.seq - len(self._writes) + 1  # the messages of the keys are the last ones
        return {key: first + place for place, key in enumerate(self._writes)}

    async def run(self) -> dict[str, int]:
        """Store everything, and return the new revision of each key; see `Transaction.commit`."""
        if not (self._writes or self._events):
            await self._check_that_nothing_changed()
            return {}
        await self._check_events()
        bucket, writes = self._bucket, self._writes
        # Events, and the messages of keys that expect nothing, can carry the expectation of a key that is only read.
        free = len(self._events) + sum(staged.expected is None for staged in writes.values())
        lacking = len(self._only_read) > free
        carrier = await self._carrier() if lacking else ""
        for retries in range(_MAX_COMMIT_RETRIES + 1):
            await self._check_bucket()
            fence: int | None = None
            if lacking and not carrier:
                fence = (await bucket.state(direct=False)).last_seq
                await self._check_reads()  # raises unless everything was as it was read at the fence
            messages = self._messages(fence, carrier)
            if len(writes) == 1 and not self._events and not self._only_read:
                self.write = PublishWrite(bucket, replace(messages[0], msg_id=NUID().next().decode()))
            else:
                self.write = BatchWrite(bucket, messages)
            source = f"transaction on {bucket.name!r}"
            log_state(_log, source, "attempt", batch=self.batch_id, number=retries + 1, fence=fence)
            try:
                return self._revisions(await self.write.store())
            except WrongLastSequenceError as refusal:
                conflict = await self._find_conflict(fenced=fence is not None)
                log_state(_log, source, "conflict", batch=self.batch_id, error=conflict or refusal)
                if conflict is not None or retries == _MAX_COMMIT_RETRIES:
                    raise conflict or refusal from refusal
            except _CARRIERS_REFUSED:
                if not carrier:
                    raise
                # They are too many, the client may not publish them, or the stream no longer stores them: the fence needs none.
                carrier = ""
        raise AssertionError

    def _messages(self, fence: int | None, carrier: str) -> list[BatchMessage]:
        """Return the messages: events, carriers, and one per key in the order of the keys' first writes.

        `fence` is the bucket's revision at which all reads were valid; with it, no message carries an expectation of another.
        """
        bucket, only_read = self._bucket, [] if fence is not None else self._only_read.copy()

        def carrying(message: BatchMessage) -> BatchMessage:
            if not only_read:
                return message
            expected = revision_of(self._reads[key := only_read.pop()])
            return replace(message, expected_last_subject_seq=expected, expected_last_subject=bucket.subject(key))

        messages = [carrying(event) for event in self._events]
        place = len(messages)
        for key, staged in self._writes.items():
            message = staged.message(bucket.subject(key))
            messages.append(carrying(message) if staged.expected is None else message)
        messages[place:place] = [carrying(BatchMessage(carrier)) for _ in only_read.copy()]
        if fence is not None:
            messages[0] = replace(messages[0], expected_last_seq=fence)
        return messages

    # -- before the server is asked to store --------------------------------------------------------------------------

    async def _check_events(self) -> None:
        """Raise BadSubjectError if the bucket's stream does not store an event, or may not be the one that stores it."""
        bucket = self._bucket
        if self._events and not self._writes and bucket.context.prefix != DEFAULT_PREFIX:
            raise BadSubjectError(
                f"bucket {bucket.name!r}: nothing was written; through an API of its own ({bucket.context.prefix}), only the "
                "message of a key is sure to reach the bucket, so a transaction with events has to write a key"
            )
        for event in self._events:
            if not await self._stores(event.subject):
                raise BadSubjectError(
                    f"bucket {bucket.name!r}: nothing was written, because its stream does not store events on {event.subject!r}; "
                    "add their subjects with ensure_bucket(events=[...]) or enable(kv, events=[...])"
                )

    async def _carrier(self) -> str:
        """Return the subject of messages that only carry expectations; "" if the bucket has none."""
        subject = reads_subject(self._bucket.stream)
        own = self._bucket.context.prefix == DEFAULT_PREFIX  # servers send only keys through the API of a domain
        return subject if own and await self._stores(subject) else ""

    async def _stores(self, subject: str) -> bool:
        """Return whether the bucket's stream stores a subject, as far as the client can find out."""
        bucket = self._bucket
        for _ in range(2):  # the first answer may be from a cache
            known = await lookup_stream(bucket.context, "", bucket.stream, bucket.timeout)
            if known is None or known[0].stores(subject):
                break
            forget_stream(bucket.context, bucket.stream)
        return known is not None and known[0].stores(subject)

    async def _check_bucket(self) -> None:
        """Raise StreamRecreatedError if another message has the revision of the oldest entry that was read.

        If no message has it, the key or the bucket has changed, and the server refuses the commit. Concurrent reads have no
        order, but a bucket that was created again has only newer messages.
        """
        oldest = min(self._found, key=lambda entry: entry.created, default=None)
        if oldest is not None and await self._bucket.has_replaced(oldest):
            raise StreamRecreatedError(
                f"bucket {self._bucket.name!r}: nothing was written; the bucket was deleted and created again, because revision "
                f"{oldest.revision} is not the message of key {oldest.key!r} that was read; run the transaction again",
                stream=self._bucket.stream,
            )

    async def _check_that_nothing_changed(self) -> None:
        """Do what the commit of a transaction without writes does."""
        bucket, retry = self._bucket, Retry(self._bucket.timeout)
        if not self._reads:
            return
        # Raises for a mirror, where keys have another prefix. Only a leader that can have no successor knows what is newest.
        while not (state := await bucket.state(direct=False)).leader_is_certain:
            late = (
                f"bucket {bucket.name!r}: its leader has not heard from the other servers lately, so what was read may be out of "
                f"date (tried for {bucket.timeout:.4g} s); run the transaction again"
            )
            await retry.pause_until_deadline(RequestTimeoutError(late))
        if len(self._reads) > 1 or state.replicated:  # else a single read was of one moment, and of the only server
            await self._check_reads()

    async def _check_reads(self) -> None:
        """Raise an error unless everything was as it was read at a moment between the last read and now.

        Raises KeyConflictError, or StreamRecreatedError if that is the reason.
        """
        now, wrong = await self._bucket.look_up(self._reads), dict[str, str]()
        for key, entry in self._reads.items():
            newest = now[key]
            if revision_of(newest) != revision_of(entry):
                wrong[key] = moved(key, revision_of(newest), revision_of(entry))
            elif newest is not None and entry is not None and newest.created != entry.created:
                wrong[key] = f"key {key!r} has another message at revision {entry.revision} than the one that was read"
        if wrong:
            await self._check_bucket()
            raise self._changed(wrong, stale_read=True)

    # -- after it has refused -----------------------------------------------------------------------------------------

    async def _find_conflict(self, *, fenced: bool) -> KeyConflictError | None:
        """Return the conflict, after the server refused an expectation.

        None: the only conflicts were delete markers of keys to be created. They are expected from now on.
        """
        expectations = {key: staged.expected for key, staged in self._writes.items() if staged.expected is not None}
        expectations |= {key: revision_of(self._reads[key]) for key in self._only_read}
        now, wrong, found_markers = await self._bucket.look_up(expectations), dict[str, str](), False
        for key, expected in expectations.items():
            staged, entry = self._writes.get(key), now[key]
            revision = revision_of(entry)
            if revision == expected:
                continue
            if staged is None or not staged.creates:
                wrong[key] = moved(key, revision, expected)
            elif entry is not None and entry.operation == "PUT":
                wrong[key] = f"key {key!r} cannot be created, because {exists(revision)}"
            else:
                self._writes[key] = replace(staged, expected=revision)
                found_markers = True
        if wrong:
            return self._changed(wrong, stale_read=not self._reads.keys().isdisjoint(wrong))
        if found_markers:
            return None
        why = "the server reported a conflict, but every key is at its expected revision now"
        if fenced:
            why = "another client wrote to the bucket"
        return conflict(self._bucket, f"{why}; run the transaction again", (), stale_read=True)

    def _changed(self, wrong: Mapping[str, str], *, stale_read: bool) -> KeyConflictError:
        return conflict(self._bucket, ", ".join([*wrong.values()][:5]), wrong, stale_read=stale_read)


def conflict(bucket: Bucket, message: str, keys: Iterable[str], *, stale_read: bool = False) -> KeyConflictError:
    return KeyConflictError(
        f"bucket {bucket.name!r}: nothing was written; {message}",
        keys=tuple(keys),
        stale_read=stale_read,
        description="wrong last sequence",
    )


def revision_of(entry: KeyValueEntry | None) -> int:
    return 0 if entry is None else entry.revision


def moved(key: str, revision: int, expected: int) -> str:
    return f"key {key!r} is at revision {revision}, not {expected}"


def exists(revision: int) -> str:
    return f"it exists (at revision {revision})"


class Write(ABC):
    """Stores messages of a bucket, all of them or none; the last is that of a key, unless all are events."""

    def __init__(self, bucket: Bucket, messages: Sequence[BatchMessage], batch_id: str) -> None:
        self.batch_id: str = batch_id
        self.unknown: bool = False
        """Whether it was sent, and it is not known what became of it."""
        self._bucket = bucket
        self._messages = messages
        self._answered_by = ""  # another stream that has acknowledged it, which proves nothing about the bucket
        # The stream had this sequence before.
        self._seen = max(message.expected_last_subject_seq or 0 for message in messages)

    async def store(self) -> BatchAck:
        """Store the messages.

        Raises:
            BatchOutcomeUnknownError: The answer was lost; see `resolve`.
            WrongLastSequenceError: A key is not at the revision that a message expects; nothing is stored.
            BatchServerError, NoStreamError, MaxPayloadError, BadHeaderError, RequestTimeoutError: Nothing is stored.
        """
        bucket = self._bucket
        try:
            ack = await self._store()
        except WrongLastSequenceError:
            raise
        except ServerError as refusal:
            raise self._refused(refusal) from refusal.__cause__ or refusal
        except NoStreamError as error:
            await bucket.check_known(fresh=True)
            why = f"does not exist, or has no leader{why_no_jetstream(bucket.context)}; nothing was written"
            text, sent = f"bucket {bucket.name!r} {why}", error.sent or 0
            raise NoStreamError(text, batch_id=self.batch_id, sent=sent, outcome="not_stored") from error
        except MaxPayloadError as large:
            text = self._too_large(large.subject, large.size, "server", large.limit, "max_payload")
            raise MaxPayloadError(text, subject=large.subject, size=large.size, limit=large.limit) from large
        if ack.stream != bucket.stream:
            self.unknown, self._answered_by = True, ack.stream
            raise self._answered_elsewhere()
        return ack

    async def resolve(self, timeout: float | None) -> BatchAck | None:
        """Return the ack of the messages if they are stored, or None; raise BatchOutcomeUnknownError if that is not known."""
        if self._answered_by:
            raise self._answered_elsewhere()
        ack = await self._resolve(timeout)
        self.unknown = False
        return ack

    @abstractmethod
    async def _store(self) -> BatchAck: ...

    @abstractmethod
    async def _resolve(self, timeout: float | None) -> BatchAck | None: ...

    def _answered_elsewhere(self) -> BatchOutcomeUnknownError:
        stream = self._answered_by
        return self._lost(
            f"the outcome is unknown: stream {stream!r} has acknowledged the write, which is not the bucket's"
        )

    def _lost(self, why: str) -> BatchOutcomeUnknownError:
        text, sent = f"bucket {self._bucket.name!r}: {why}", len(self._messages)
        return BatchOutcomeUnknownError(text, batch_id=self.batch_id, sent=sent, outcome="unknown")

    def _refused(self, refusal: ServerError) -> BatchServerError:
        """Return the error to raise when the server has refused the commit: what is wrong with the bucket, and what to do."""
        bucket, said = self._bucket, refusal.description
        facts: dict[str, Any] = {"batch_id": self.batch_id, "outcome": "not_stored"}
        if isinstance(refusal, MessageTooLargeError) and refusal.subject:
            of_message = {"subject": refusal.subject, "size": refusal.size, "limit": refusal.limit}
            text = self._too_large(refusal.subject, refusal.size, "bucket", refusal.limit, "max_msg_size")
            return batch_refusal(refusal, text, **facts, **of_message)
        keys = sum(each.subject.startswith(bucket.prefix) for each in self._messages)
        events = f" and {counted(len(self._messages) - keys, 'event')}" if keys < len(self._messages) else ""
        expiring = ", ".join(repr(bucket.key(each.subject)) for each in self._messages if each.msg_ttl is not None)
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
        bucket = self._bucket
        return (
            f"bucket {bucket.name!r}: the message of key {bucket.key(subject)!r} has {size} bytes with its headers; the {what} "
            f"takes {limit} ({option}); nothing was written"
        )


class BatchWrite(Write):
    """A write of several messages."""

    def __init__(self, bucket: Bucket, messages: Sequence[BatchMessage]) -> None:
        # Through the API of another domain, only the commit, the message of a key, is sure to be the bucket's to answer.
        elsewhere = bucket.context.prefix != DEFAULT_PREFIX
        self._session = AtomicSession(bucket.context, bucket.timeout, in_one_go=True, quiet=elsewhere)
        super().__init__(bucket, messages, self._session.machine.batch_id)

    async def _store(self) -> BatchAck:
        session = self._session
        try:
            with session.call(telemetry.Kind.COMMIT, observed=False) as call:  # the transaction's commit is observed
                await session.fill(self._messages, call)
                return await session.commit(None)
        finally:
            session.discard()
            self.unknown: bool = session.machine.state is State.UNKNOWN

    async def _resolve(self, timeout: float | None) -> BatchAck | None:
        return await self._session.resolve(timeout, seen=self._seen, of_bucket=True)


class PublishWrite(Write):
    """A write of the message of one key; its `msg_id`, if it has one, shows in the stream whether it is stored."""

    def __init__(self, bucket: Bucket, message: BatchMessage) -> None:
        super().__init__(bucket, [message], message.msg_id or "")
        self._message = message
        self._headers = message_headers(message)
        self._question: Messages | None = None
        self._session = 0  # of the connection that the message was written to

    async def _store(self) -> BatchAck:
        bucket, message, clock = self._bucket, self._message, asyncio.get_running_loop().time
        context, deadline = bucket.context, clock() + bucket.timeout
        if message.msg_ttl is not None and not MSG_TTL.on(context.connection.server_version):
            # The bucket's leader, another server, may store a TTL and never heed it.
            check_leader(context, (await bucket.unchecked_state()).config, [MSG_TTL], "nothing was written")
        if self.batch_id and (known := await lookup_stream(context, "", bucket.stream, bucket.timeout / 2)):
            before, after = known[0], max(known[1], self._seen)
            ids, last = (self.batch_id,), bool(before.config.get("deny_delete"))
            self._question = Messages(message.subject, 1, before, after, ids, unique=True, known="", oldest_first=last)
        await context.connection.wait_usable(max(0.0, deadline - clock()))
        self._session = context.connection.session
        self.unknown: bool = True
        subject, left = message.subject, max(0.001, deadline - clock())
        try:
            headers = own_headers(self._headers)
            ack = await context.publish(subject, message.payload, headers, left, f"the ack of {subject}")
        except (BadHeaderError, BadSubjectError, MaxPayloadError, NotPermittedError, BadBucketError):
            self.unknown = False
            raise
        except nats.js.errors.NoStreamResponseError as unanswered:
            self.unknown = False
            raise NoStreamError(sent=1) from unanswered
        except nats.js.errors.APIError as refused:
            self.unknown = False
            raise self._read(refused) from refused
        except Exception as lost:
            raise self._lost(f"the answer to the write was lost ({lost}); it may be stored; call resolve()") from lost
        self.unknown = False
        return BatchAck(ack.stream, int(ack.seq), self.batch_id, 1, domain=ack.domain)

    def _read(self, refused: nats.js.errors.APIError) -> ServerError:
        error = server_error(code=refused.code, err_code=refused.err_code, description=refused.description or "")
        if isinstance(error, MessageTooLargeError):
            error.subject = self._message.subject
            error.size = len(h.encode(self._headers)) + len(self._message.payload)
            error.limit = None if self._question is None else self._question.before.max_msg_size
        return error

    async def _resolve(self, timeout: float | None) -> BatchAck | None:
        bucket = self._bucket
        timeout = 4 * bucket.timeout if timeout is None else check_seconds(timeout, "timeout")
        ack = await resolve(bucket.context, self._question, timeout, batch_id=self.batch_id, size=1)
        if ack is None and bucket.context.connection.session != self._session:
            why = "the client has reconnected, and the message may still arrive over the old connection"
            raise self._lost(f"the outcome is unknown: {why}")
        return ack
