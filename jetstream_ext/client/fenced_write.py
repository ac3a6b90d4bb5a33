"""The fenced writer: messages and a record of them, stored once, by one writer at a time.

A *record* is the newest message on a subject that only one kind of writer uses: how far a worker is, which rows of a
micro-batch are stored, the position of a reader. Every record names the sequence of the record before it
(``Nats-Expected-Last-Subject-Sequence``), and that is the fence: if several writers have read the same record, only one
of them can store the next one together with its messages, and the others get `RecordMovedError`.

If a store fails or its answer is lost, the writer reads the record that followed the fence at the stream's leader:

    it has this store's payload                     the store succeeded; only its answer was lost
    it has the payload of an earlier store whose    the fence moves there, and the store is retried
    answer was lost
    no record follows the fence                     nothing is stored; the store is retried
    another payload has the sequence of the fence   StreamRecreatedError: this is another stream
    anything else                                   RecordMovedError

A store that is still on its way during that read does no harm: its retry names the same fence, so only one of the two is
stored, and both have the same content. A record's payload must therefore identify its writer and its content, because
equal payloads count as the same store.

A fence is only a sequence. If the stream is deleted and created again, and another record gets the same sequence there, the
server accepts the next store. With `checked`, a store first reads the record at the fence and compares its payload, which
leaves only the moment between that read and the store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Final

from nats.js import JetStreamContext
from nats.js.errors import APIError

from jetstream_ext.client.api import get_at_leader
from jetstream_ext.client.atomic import publish_atomic
from jetstream_ext.client.connection import Context
from jetstream_ext.client.outcome import search
from jetstream_ext.client.retry import Retry, is_transient
from jetstream_ext.errors import (
    ErrorCode,
    FencedError,
    MessageTooLargeError,
    RequestTimeoutError,
    StreamRecreatedError,
    batch_refusal,
    server_error,
)
from jetstream_ext.protocol import outcome
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.options import as_message, has_expectation, message_headers
from jetstream_ext.text import get_logger, log_state
from jetstream_ext.types import TTL, BatchAck, BatchMessage, Entry

_log: Final = get_logger("client")

_WRONG_LAST_SEQUENCE: Final = frozenset({ErrorCode.WRONG_LAST_SEQUENCE, ErrorCode.WRONG_LAST_SEQUENCE_CONSTANT})
_ROLLUP: Final = {"Nats-Rollup": "sub"}


class RecordMovedError(FencedError):
    """Another writer has stored a record since this one read it; `record` is the newest one, or None.

    Nothing was stored, with one exception: if the answer to the store was lost and its record has been removed since (by
    a limit or a rollup), the messages may be stored, and the other writer has read them.
    """

    def __init__(
        self, message: str = "", *, name: str = "", seq: int | None = None, record: StoredMsg | None = None
    ) -> None:
        super().__init__(message, name=name, seq=seq)
        self.record = record


@dataclass(eq=False)
class FencedWriter:
    """Stores messages and a record of them in one stream, all or nothing, behind the record that was read last.

    A writer that has not read expects that there is no record. Each `store` follows the one before. With messages, a
    store is one atomic batch (nats-server 2.12.1 and ``allow_atomic``; see `FENCED_BATCHES`); a record alone is an
    ordinary message, which every server and stream takes.
    """

    context: Context
    stream: str  # of the messages and the record
    subject: str  # of the record; nothing else may be stored there
    _: KW_ONLY
    name: str  # the writer's name in errors: "worker 'sums'"
    patience: float  # seconds for which one call retries after transient errors
    timeout: float | None = None  # seconds to wait for an answer; None is the context's own
    rollup: bool = False  # let each record remove the one before (the stream needs ``allow_rollup_hdrs``)
    msg_ttl: TTL | None = None  # the time to live of a record, such as `NEVER` on a stream with ``max_age``
    checked: bool = False  # read the record at the fence before each store: the stream may have been created again
    fence: int = field(default=0, init=False)  # the sequence of the newest record; 0 before the first
    _record: bytes = field(default=b"", init=False)  # the payload of that record
    # The payloads of stores since the fence whose answers were lost.
    _in_doubt: set[bytes] = field(default_factory=set, init=False)

    async def read(self) -> StoredMsg | None:
        """Return the newest record at the stream's leader, or None; the next store follows it.

        Cancellation: Safe; the fence stays as it was.
        """
        record = await self._find(self._retry(), {"last_by_subj": self.subject})
        self.follow(record)
        return record

    def follow(self, record: StoredMsg | None) -> None:
        """Let the next store follow `record`, the newest one: what was read, or that of a `RecordMovedError`."""
        self._move(*(0, b"") if record is None else (record.seq, record.data))
        self._in_doubt.clear()

    def _move(self, fence: int, record: bytes) -> None:
        self.fence, self._record = fence, record

    async def store(self, messages: Sequence[Entry], record: bytes) -> BatchAck:
        """Store `messages`, if any, and a record with the payload `record` behind them, all or nothing.

        Returns:
            The server's ack, or its equivalent if it was lost. `seq` is the record's.

        Raises:
            RecordMovedError: Another writer has stored a record. `follow` or `read` to continue behind it.
            StreamRecreatedError: The record at the fence is not the one that was read or stored; nothing was stored.
            WrongLastSequenceError: An expectation of one of the messages does not hold; nothing was stored.
            Exception: A message was refused, and nothing is stored. Or transient errors lasted for longer than `patience`. After
                the latter the messages may be stored; the next `store` or `read` finds out.

        Cancellation: The messages may be stored; the next `store` or `read` finds out.
        """
        retry = self._retry()
        if self.checked and self.fence:
            self._check_same(await self._find(retry, {"seq": self.fence}))
        on_its_way = False  # an attempt whose answer did not come: a later one may be refused because of it
        while True:
            self._in_doubt.add(record)
            try:
                timeout = retry.within(self.context.resolve_timeout(self.timeout))
                ack = await self._publish(messages, record, timeout)
                break
            except Exception as error:
                failure = error
            try:
                ack = await self._find_out(failure, messages, record, retry)
                break
            except Exception as error:
                problem = error
                log_state(_log, self.name, "store failed", error, fence=self.fence, error=error)
                if on_its_way and not is_transient(error) and getattr(error, "outcome", None) == "not_stored":
                    problem = RequestTimeoutError(
                        f"{self.name}: an attempt to store on {self.subject!r} was not answered, and the next one was refused, "
                        f"perhaps because of the first; it is not known what is stored: {error}"
                    )
                    problem.__cause__ = error
                on_its_way = on_its_way or _may_be_on_its_way(failure)
                await retry.pause_if_transient(problem)
        self._move(ack.seq, record)
        self._in_doubt.clear()
        return ack

    async def _publish(self, messages: Sequence[Entry], record: bytes, timeout: float) -> BatchAck:
        js = self.context.js
        assert isinstance(js, JetStreamContext)  # only those publish
        last = BatchMessage(
            self.subject,
            record,
            headers=_ROLLUP if self.rollup else None,
            msg_ttl=self.msg_ttl,
            stream=self.stream,
            expected_last_subject_seq=self.fence,
        )
        if messages:
            # The first message names the stream: looking it up would need another permission.
            first = as_message(messages[0])
            batch = [first if first.stream else replace(first, stream=self.stream), *messages[1:], last]
            return await publish_atomic(js, batch, timeout=timeout)
        headers = dict(message_headers(last))
        try:
            ack = await self.context.publish(self.subject, record, headers, timeout, f"the ack of {self.subject}")
        except APIError as error:
            refusal = server_error(code=error.code, err_code=error.err_code, description=error.description or "")
            text = f"{self.name}: stream {self.stream!r} refused the record on {self.subject!r}: {refusal.description}; nothing was stored"
            if isinstance(refusal, MessageTooLargeError):
                text = (
                    f"{self.name}: the record on {self.subject!r} has {len(record)} bytes and its headers, more than stream "
                    f"{self.stream!r} takes (max_msg_size); nothing was stored; raise the stream's limit"
                )
            raise batch_refusal(refusal, text, outcome="not_stored") from error
        return BatchAck(ack.stream, ack.seq, batch_size=1, domain=ack.domain)

    async def _find_out(self, error: Exception, messages: Sequence[Entry], record: bytes, retry: Retry) -> BatchAck:
        """Return the ack of a store that failed with `error` if it is stored after all, or raise why it is not."""
        where = f"the record on {self.subject!r} of stream {self.stream!r}"
        write = outcome.Record(self.stream, self.subject, self.fence, frozenset(self._in_doubt))
        timeout = self.context.resolve_timeout(self.timeout)
        found = await retry.call(lambda: search(self.context, outcome.find_follower(write), self.name, timeout))
        newest = found.newest
        self._check_same(newest, error)
        if found.own is not None:
            if found.own.data == record:
                return BatchAck(self.stream, found.own.seq, batch_size=len(messages) + 1)
            self._move(found.own.seq, found.own.data)
            raise RequestTimeoutError(
                f"{self.name}: the new record is not stored, because an earlier write of {where} succeeded after its answer "
                "was lost; repeat the call"
            ) from error
        if newest is None and self.fence:
            raise RecordMovedError(f"{self.name}: {where} was removed", name=self.name) from error
        if newest is not None and newest.seq != self.fence:
            raise RecordMovedError(
                f"{self.name}: another writer has stored {where} (sequence {newest.seq}, expected {self.fence})",
                name=self.name,
                seq=newest.seq,
                record=newest,
            ) from error
        refused = isinstance(error, APIError) and error.err_code in _WRONG_LAST_SEQUENCE
        if not refused or any(has_expectation(as_message(entry)) for entry in messages):
            raise error
        # A former leader that does not know its successor has refused the store, or has answered the read.
        raise RequestTimeoutError(
            f"{self.name}: this attempt was not stored; the server refused {where}, although sequence {self.fence} is still the newest "
            "(this can happen after a change of leader); repeat the call"
        ) from error

    def _check_same(self, found: StoredMsg | None, cause: Exception | None = None) -> None:
        """Raise StreamRecreatedError if `found` has the sequence of the fence and is another message."""
        if found is None or found.seq != self.fence or (found.subject, found.data) == (self.subject, self._record):
            return
        raise StreamRecreatedError(
            f"{self.name}: stream {self.stream!r} was deleted and created again, because its message {self.fence} is not the "
            f"record on {self.subject!r} that was stored or read last; nothing of this commit is stored; start again to continue in "
            "the new stream",
            stream=self.stream,
        ) from cause

    async def _find(self, retry: Retry, request: Mapping[str, object]) -> StoredMsg | None:
        return await retry.call(lambda: get_at_leader(self.context, self.stream, request, self.timeout))

    def _retry(self) -> Retry:
        return Retry(self.patience)


def _may_be_on_its_way(error: Exception) -> bool:
    """Return whether the server may store what an attempt with this error has sent."""
    return is_transient(error) and getattr(error, "outcome", "unknown") != "not_stored"
