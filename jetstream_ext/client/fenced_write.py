"""The fenced writer: messages and a record of them, stored once, by one writer at a time.

A *record* is the newest message on a subject of the writer's own: how far a worker is, which rows of a micro-batch are
stored, the position of a reader. Every record names the sequence of the record before it
(``Nats-Expected-Last-Subject-Sequence``), and that is the fence: of several writers that have read the same record only
one can store the next, together with everything in its batch, and the others get `RecordMovedError`.

The record also tells what a lost answer did::

    store   messages and record, fenced by the record that was read or stored before
                stored                                        → done
                any error: read the record at the stream's leader, and the one that followed the fence
                    the follower has this store's payload     → done, the answer was lost
                    the follower has the payload of an        → again, behind it
                    earlier store without an answer
                    there is none                             → nothing is stored: again, a little later
                    anything else                             → RecordMovedError

A store that is still on its way while the record is read can do no harm: it and the one that is sent after it name the
same record before them, so only one of them is stored, and they hold the same. That is why a record's payload must say
whose it is and what it stands for: equal payloads are taken for the same store.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from nats.js import JetStreamContext
from nats.js.errors import APIError

from jetstream_ext.client.api import get_at_leader
from jetstream_ext.client.atomic import publish_atomic
from jetstream_ext.client.context import Context
from jetstream_ext.client.retry import Retry, is_transient
from jetstream_ext.errors import ErrorCode, FencedError, RequestTimeoutError
from jetstream_ext.protocol.options import as_message, message_headers
from jetstream_ext.protocol.stored_msg import StoredMsg
from jetstream_ext.types import TTL, BatchAck, BatchMessage, Entry

_WRONG_LAST_SEQUENCE: Final = frozenset({ErrorCode.WRONG_LAST_SEQUENCE, ErrorCode.WRONG_LAST_SEQUENCE_CONSTANT})
_ROLLUP: Final = {"Nats-Rollup": "sub"}

_Stored = TypeVar("_Stored")


async def store_once(
    attempt: Callable[[], Awaitable[_Stored]], find_out: Callable[[Exception], Awaitable[_Stored]], retry: Retry
) -> _Stored:
    """Call `attempt` until what it stores is stored once.

    Args:
        attempt: Stores, and returns what it stored. It may store twice without harm: a fence or message ids see to that.
        find_out: Called with the error of an attempt. Returns what the attempt stored after all; or raises why it did
            not, or why that is unknown.
        retry: Decides which of the errors of `find_out` call for another attempt, and until when.

    Raises:
        Exception: The error of `find_out` that is not transient, or the last one before the time was over.

    Cancellation: As for `attempt` and `find_out`.
    """
    while True:
        try:
            return await attempt()
        except Exception as error:
            failure = error
        try:
            return await find_out(failure)
        except Exception as why:
            await retry.pause(why)


class RecordMovedError(FencedError):
    """Another writer has stored a record since this one read it.

    Nothing was stored. If the answer to the store was lost and its record was removed since (by a limit or a rollup),
    that cannot be known; then the messages may be stored, and were part of what the other writer has read.

    Attributes:
        record: What is stored on the record's subject now, or None.
    """

    def __init__(
        self, message: str = "", *, name: str = "", seq: int | None = None, record: StoredMsg | None = None
    ) -> None:
        super().__init__(message, name=name, seq=seq)
        self.record = record


class FencedWriter:
    """Stores messages and a record of them in one stream, all or nothing, fenced by the record before.

    `read` takes the writer's place: what is stored next follows the record that was read. A writer that never read
    expects that there is no record. Then `store` as often as needed; each follows the one before. The payload of a
    record must tell whose it is and what it stands for (a random id of the writer and a count, a micro-batch and a digest
    of its rows): that is how a store whose answer was lost is found again.

    With messages, the store is one atomic batch (nats-server 2.12.1 and ``allow_atomic``; see `FENCED_BATCHES`). A record
    alone is an ordinary message, which every server and stream takes.

    Args:
        context: The context.
        stream: The stream of the messages and the record.
        subject: The record's subject. Nothing else may be stored there.
        name: Who writes, for errors: "worker 'sums'".
        timeout: Seconds to wait for an answer; None is the context's own.
        patience: Seconds that transient errors may last in one call.
        transient: Which errors are transient.
        rollup: A record takes away the one before (the stream needs ``allow_rollup_hdrs``).
        msg_ttl: The time to live of a record, such as `NEVER` on a stream with ``max_age``.
    """

    def __init__(
        self,
        context: Context,
        stream: str,
        subject: str,
        *,
        name: str,
        timeout: float | None = None,
        patience: float,
        transient: Callable[[Exception], bool] = is_transient,
        rollup: bool = False,
        msg_ttl: TTL | None = None,
    ) -> None:
        assert isinstance(context.js, JetStreamContext)  # only those publish
        self.stream = stream
        self.subject = subject
        self.fence: int = 0
        """The sequence of the record that the next one follows (0: there is none)."""
        self._context = context
        self._js: JetStreamContext = context.js
        self._name = name
        self._timeout = context.timeout if timeout is None else timeout
        self._patience = patience
        self._transient = transient
        self._rollup = rollup
        self._msg_ttl = msg_ttl
        # Payloads of stores without an answer: a later read may find one of them.
        self._in_doubt: set[bytes] = set()

    async def read(self) -> StoredMsg | None:
        """Return the newest record at the stream's leader, or None, and follow it from now on.

        Raises:
            Exception: The stream could not be read, for longer than the retry policy allows.

        Cancellation: Safe; the fence stays as it was.
        """
        record = await self._newest(self._retry())
        self.fence = 0 if record is None else record.seq
        self._in_doubt.clear()
        return record

    async def store(self, messages: Sequence[Entry], record: bytes) -> BatchAck:
        """Store messages and a record behind them, all or nothing.

        Args:
            messages: What the record stands for; none, where the record stands for itself.
            record: The record's payload.

        Returns:
            The server's ack, or what it must have been where it was lost. `seq` is the record's.

        Raises:
            RecordMovedError: Another writer has stored a record. `read` to go on behind it.
            WrongLastSequenceError: An expectation of one of the messages does not hold; nothing was stored.
            Exception: A message was refused, or transient errors lasted for longer than the retry policy allows. After
                the latter the messages may be stored; the next store or `read` finds out.

        Cancellation: The messages may be stored; the next store or `read` finds out.
        """
        retry = self._retry()

        async def attempt() -> BatchAck:
            self._in_doubt.add(record)
            return await self._publish(messages, record)

        async def find_out(error: Exception) -> BatchAck:
            newest = await self._newest(retry)
            if newest is not None and newest.seq > self.fence:
                # Only one record can follow the fence. It may be ours, and another writer has gone on behind it.
                follower = await self._find(retry, {"seq": self.fence + 1, "next_by_subj": self.subject})
                if follower is not None and follower.data in self._in_doubt:
                    if follower.data == record:
                        return BatchAck(self.stream, follower.seq, batch_size=len(messages) + 1)
                    self.fence = follower.seq
                    raise RequestTimeoutError(f"{self._name}: a record was stored whose answer was lost") from error
            why = self._why(error, newest, messages)
            raise why from (error.__cause__ if why is error else error)

        ack = await store_once(attempt, find_out, retry)
        self.fence = ack.seq
        self._in_doubt.clear()
        return ack

    async def _publish(self, messages: Sequence[Entry], record: bytes) -> BatchAck:
        """Send a store once."""
        last = BatchMessage(
            self.subject,
            record,
            headers=_ROLLUP if self._rollup else None,
            msg_ttl=self._msg_ttl,
            stream=self.stream,
            expected_last_subject_seq=self.fence,
        )
        if messages:
            # The first message names the stream, so that nothing needs to ask for it, and no permission for that.
            first = as_message(messages[0])
            batch = [first if first.stream else replace(first, stream=self.stream), *messages[1:], last]
            return await publish_atomic(self._js, batch, timeout=self._timeout)
        publish = self._js.publish(self.subject, record, timeout=self._timeout, headers=dict(message_headers(last)))
        ack = await self._context.connection.bounded(publish, self._timeout, f"the ack of {self.subject}")
        return BatchAck(ack.stream, ack.seq, batch_size=1, domain=ack.domain)

    async def _newest(self, retry: Retry) -> StoredMsg | None:
        return await self._find(retry, {"last_by_subj": self.subject})

    async def _find(self, retry: Retry, request: Mapping[str, object]) -> StoredMsg | None:
        while True:
            try:
                return await get_at_leader(self._context, self.stream, request, self._timeout)
            except Exception as error:
                await retry.pause(error)

    def _why(self, error: Exception, newest: StoredMsg | None, messages: Sequence[Entry]) -> Exception:
        """Return why a store is not stored."""
        record = f"the record on {self.subject!r} of stream {self.stream!r}"
        if (0 if newest is None else newest.seq) == self.fence:
            refused = isinstance(error, APIError) and error.err_code in _WRONG_LAST_SEQUENCE
            if not refused or any(map(_has_expectation, messages)):
                return error
            # A leader that was replaced and does not know it has refused, or answered the read.
            return RequestTimeoutError(
                f"{self._name}: the server refused {record} and does not say why; nothing was stored"
            )
        if newest is None:
            return RecordMovedError(f"{self._name}: {record} was removed", name=self._name)
        return RecordMovedError(
            f"{self._name}: {record} is another writer's (sequence {newest.seq}, expected {self.fence})",
            name=self._name,
            seq=newest.seq,
            record=newest,
        )

    def _retry(self) -> Retry:
        return Retry(self._patience, transient=self._transient)


def _has_expectation(entry: Entry) -> bool:
    """Return whether a message has an expectation of its own."""
    message = as_message(entry)
    return (
        message.expected_last_seq is not None
        or message.expected_last_subject_seq is not None
        or any(name.lower().startswith("nats-expected-") for name in message.headers or ())
    )
