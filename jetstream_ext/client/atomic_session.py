"""One atomic batch on a connection, and the proof of what became of its commit.

`protocol.atomic` and `protocol.atomic_resolve` decide; this module sends, waits and asks for them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NoReturn, TypeVar

import nats.errors
import nats.js.errors
from nats.js import JetStreamContext
from nats.nuid import NUID

from jetstream_ext.client import telemetry
from jetstream_ext.client.api import (
    ask_stream,
    get_at_leader,
    known_stream_name,
    lookup_leader,
    remember_ack,
    settled_state,
    stream_state,
    why_no_jetstream,
)
from jetstream_ext.client.base_connection import ROOM, InboxHandler, InboxSubscription, Over, weakly
from jetstream_ext.client.connection import Context, connection_of
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.client.fence import send_fence
from jetstream_ext.client.retry import Retry, is_transient_read
from jetstream_ext.client.turns import Turn, Turns
from jetstream_ext.errors import (
    AtomicPublishIncompleteError,
    BatchOutcomeUnknownError,
    BatchServerError,
    JetStreamExtError,
    MessageTooLargeError,
    RequestTimeoutError,
)
from jetstream_ext.protocol import atomic_resolve, frames
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.atomic import AtomicBatchMachine, State, Unresolved
from jetstream_ext.protocol.atomic_resolve import Commit, NeverKnown, NotYetKnown, Plan, Query
from jetstream_ext.protocol.atomic_wire import Block, Encoded
from jetstream_ext.protocol.feature_table import ATOMIC
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.numbers import parse_number
from jetstream_ext.protocol.options import as_message, check_messages, check_seconds
from jetstream_ext.protocol.subjects import SubjectElsewhere
from jetstream_ext.protocol.trace_context import TraceContext
from jetstream_ext.text import counted, get_logger, log_state
from jetstream_ext.types import BatchAck, BatchMessage, Entry

_log: Final = get_logger("atomic")

# The part of a call's timeout that is kept for the reply, so that a message is not sent when its call is about to give up.
_REPLY_SHARE: Final = 0.25
# Payload bytes per write of `fill`: the server works on one block while the next is encoded.
_BLOCK: Final = 1 << 15
# The default timeout of `resolve`, in timeouts of one reply: an election takes longer than a reply.
_RESOLVE_TIMEOUTS: Final = 4
# Seconds to wait for one answer of `resolve`. During an election no server answers, and the plan starts again.
_ANSWER_TIMEOUT: Final = 2.0

# The key of the waiter for the beginning of a batch; replies have sequences from 1.
_BEGUN: Final = 0

_T = TypeVar("_T")

_Waiter = asyncio.Future[JetStreamExtError | None]
"""Done when the reply has come, with the refusal if only this message was refused, or when the batch is over."""


class _Patience:
    """How long the waits of one call may take, in seconds: until it sends, and then for the reply, together a timeout."""

    __slots__ = ("_opening", "_spent", "timeout")

    def __init__(self, timeout: float) -> None:
        self.timeout: float = timeout
        self._opening = self._spent = 0.0

    @property
    def spent(self) -> float:
        """How long the waits have taken."""
        return self._spent

    @property
    def left(self) -> float:
        return max(0.0, self.timeout - self._spent)

    @property
    def deadline(self) -> float:
        """When a wait that begins now must end, on the loop's clock."""
        return asyncio.get_running_loop().time() + self.left

    @property
    def to_send(self) -> float:
        """How long a wait may take that begins now, before the call sends; what is left then is for the reply."""
        return max(0.0, self.left - _REPLY_SHARE * self.timeout)

    @property
    def send_by(self) -> float:
        """When such a wait must end, on the loop's clock."""
        return asyncio.get_running_loop().time() + self.to_send

    async def spend(self, waiting: Awaitable[_T], *, opening: bool = False) -> _T:
        """Await something that makes the waits after it shorter; `opening`: it opens the batch."""
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            return await waiting
        finally:
            self._spent += clock() - began
            if opening:
                self._opening += clock() - began

    def next_message(self) -> None:
        """Begin again for another message of the call; opening the batch counts until the server replies."""
        self._spent = self._opening

    def replied(self) -> None:
        self._opening = self._spent = 0.0


class Adding:
    """The messages of one call: the trace context that they get, and how many are part of the batch."""

    __slots__ = ("added", "trace")

    def __init__(self, trace: TraceContext | None = None) -> None:
        self.trace: TraceContext | None = trace
        self.added: int = 0


class AtomicSession:
    """One atomic batch on a connection; the arguments are those of `AtomicBatch` and `AtomicBatchMachine`."""

    _inbox: InboxSubscription | None = None

    def __init__(
        self,
        context: Context,
        batch_id: str | None = None,
        timeout: float | None = None,
        *,
        ack_first: bool = True,
        ack_every: int | None = None,
        in_one_go: bool = False,
    ) -> None:
        self._connection = connection_of(context.nc)
        self.machine: AtomicBatchMachine = AtomicBatchMachine(
            NUID().next().decode() if batch_id is None else batch_id,
            own_id=batch_id is None,
            inbox_size=self._connection.inbox_size,
            ack_first=ack_first,
            ack_every=ack_every,
            in_one_go=in_one_go,
        )
        self._context = context
        self._timeout = context.resolve_timeout(timeout)
        # One call of the user's, which began now, sends and commits the whole batch.
        self._only_call = _Patience(self._timeout) if in_one_go else None
        self._only_call_began = asyncio.get_running_loop().time() if in_one_go else None
        self._turns = Turns()
        self._waiters: dict[int, _Waiter] = {}
        self._commit_waiter: _Waiter | None = None
        self._commit_deadline = 0.0
        # For `resolve`: the stream when the batch was opened, a sequence that it had then, and the connection's session
        # when the commit was written.
        self._opened: tuple[StreamState | None, int] = None, 0
        self._session = 0

    # -- operations -----------------------------------------------------------------------------------------------

    def begin(
        self, observer: telemetry.Observer, kind: telemetry.Kind, subject: str | None = None
    ) -> telemetry.Operation:
        """Begin an operation on the batch, about one message of `subject` or any number of messages."""
        name, subjects = self._stream_facts()
        facts = {"jetstream_ext.batch.id": self.machine.batch_id}
        return observer.begin(kind, self._connection, subject=subject, stream=name, subjects=subjects, attributes=facts)

    def describe(self, operation: telemetry.Operation, messages: int) -> None:
        """Tell an operation of how many messages it was, and the batch's stream, which is known once it is opened."""
        name, subjects = self._stream_facts()
        operation.describe(stream=name, subjects=subjects, messages=messages)

    def _stream_facts(self) -> tuple[str | None, Sequence[str]]:
        stream = self._opened[0]
        return (None, ()) if stream is None else (stream.name, stream.subjects)

    async def add(self, message: BatchMessage, ack: bool | None, adding: Adding | None = None) -> None:
        """Send a message; wait for its reply if it requests one."""
        patience = _Patience(self._timeout)
        encoded = await self._prepared(message, patience, ack, None if adding is None else adding.trace)
        self._check_usable()
        block = self.machine.add(encoded)
        if adding is not None:
            adding.added += 1
        waiter = self._expect(block.awaited) if block.awaited else None
        if block.messages:
            try:
                self._connection.write_nowait(block.data, block.messages, block.size)
            except nats.errors.Error as error:
                self._write_failed(error)
        if waiter is not None:
            await self._reply(block.awaited, waiter, patience.deadline)
        self.machine.check_added()

    async def add_many(self, messages: Iterable[Entry] | AsyncIterable[Entry], adding: Adding | None = None) -> None:
        """Send `messages`, and wait for the last reply that they request."""
        patience = _Patience(self._timeout)
        seq = await self.fill(messages, adding, patience)
        if seq > self.machine.staged:
            self.machine.check_open()
            await self._reply(seq, self._expect(seq), patience.deadline)
            self.machine.check_added()

    async def fill(
        self,
        messages: Iterable[Entry] | AsyncIterable[Entry],
        adding: Adding | None = None,
        patience: _Patience | None = None,
    ) -> int:
        """Send `messages` in blocks; return the highest sequence among them that asked for a reply, or 0."""
        check_messages(messages)
        patience, adding = patience or self._new_call(), adding or Adding()
        asked = 0
        if isinstance(messages, AsyncIterable):
            # One write each: nats-py's buffer joins them, and a slow source must not wait for a full block.
            async for entry in messages:
                patience.next_message()
                alone = await self._prepared(as_message(entry), patience, None, adding.trace)
                asked = max(asked, (await self._send_block(None, alone, patience, adding)).last_asked)
            return asked
        source = iter(messages)
        for entry in source:
            first: Encoded | None = await self._prepared(as_message(entry), patience, None, adding.trace)
            while True:
                block = await self._send_block(source, first, patience, adding)
                asked = max(asked, block.last_asked)
                if block.stopped is not None and not isinstance(block.stopped, SubjectElsewhere):
                    break
                patience.next_message()
                first = None
                if block.stopped is None:
                    await asyncio.sleep(0)  # lets nats-py's flusher write
                else:
                    first = await self._prepared(as_message(block.stopped.entry), patience, None, adding.trace)
            break
        return asked

    async def commit(self, message: BatchMessage | None, trace: TraceContext | None = None) -> BatchAck:
        """Commit, with or without a last message."""
        await self.send_commit(message, trace)
        return await self.committed()

    async def send_commit(self, message: BatchMessage | None, trace: TraceContext | None = None) -> None:
        """Send the commit; `committed` waits for the answer."""
        patience = self._new_call()
        last = await self._prepared_commit(message, patience, trace)
        self._check_usable()
        block = self.machine.commit(last)
        self._session = self._connection.session
        self._commit_waiter, self._commit_deadline = self._expect(block.awaited), patience.deadline
        try:
            await self._write(block, patience)
        except asyncio.CancelledError:
            self._abandon_commit()
            raise

    @property
    def answered(self) -> bool:
        """Whether `committed` will return or raise at once."""
        return self._commit_waiter is not None and self._commit_waiter.done()

    async def committed(self) -> BatchAck:
        """Wait for the answer to the commit that was sent."""
        assert self._commit_waiter is not None
        try:
            await self._reply(self.machine.sent, self._commit_waiter, self._commit_deadline)
        except asyncio.CancelledError:
            self._abandon_commit()
            raise
        ack = self.machine.result()
        remember_ack(self._context, ack)
        return ack

    async def explained(self, work: Awaitable[_T]) -> _T:
        """Return what `work` on this batch returns, or raise its error; a message that is too large for its stream is named."""
        began = asyncio.get_running_loop().time()
        try:
            return await work
        except (AtomicPublishIncompleteError, MessageTooLargeError) as refusal:
            await self.raise_explained(refusal, began)

    async def raise_explained(self, refusal: BatchServerError, began: float) -> NoReturn:
        """Raise a refusal of the server, or an error that names the message that is too large, if one is.

        The stream is asked for its limit only within the timeout of the call, which began at the time `began`.
        """
        left = (self._only_call_began or began) + self._timeout - asyncio.get_running_loop().time()
        if left <= 0 or (suspect := self.machine.suspect(refusal)) is None:
            raise refusal
        message, stream = suspect
        try:  # the stream now: its limit may have changed
            state = await ask_stream(self._context, message.subject, stream, left)
        except nats.errors.Error:
            state = None
        error = None if state is None else self.machine.too_large(message, state)
        if error is None:
            raise refusal
        raise error from refusal

    def discard(self) -> None:
        self.machine.discard()
        self._settle()

    async def finish(self) -> None:
        """Do what a clean exit of ``async with`` does."""
        if self.machine.finish():
            try:
                await self.commit(None)
            finally:
                self.discard()  # a refused commit must leave nothing open after the block
        self._settle()

    async def resolve(self, timeout: float | None) -> BatchAck | None:
        """Return the ack of the batch if it is stored, or None."""
        machine = self.machine
        timeout = _RESOLVE_TIMEOUTS * self._timeout if timeout is None else check_seconds(timeout, "timeout")
        unresolved = machine.unresolved()
        if unresolved is Unresolved.NONE:
            return machine.ack
        facts = machine.batch_id, machine.size, machine.staged, machine.last_subject
        commit = Commit(*facts, *self._opened, self._session, machine.fingerprints)

        def plan() -> Plan:
            if unresolved is Unresolved.COMMIT:
                return atomic_resolve.find_commit(commit)
            return atomic_resolve.find_earlier(commit, datetime.now(UTC))

        machine.resolved(await _find_out(self._context, commit, plan, timeout, machine.error))
        if unresolved is Unresolved.EARLIER:
            machine.result()
        return machine.ack

    # -- opening and sending --------------------------------------------------------------------------------------

    def _new_call(self) -> _Patience:
        return self._only_call or _Patience(self._timeout)

    def _encoded(self, message: BatchMessage, ack: bool | None, trace: TraceContext | None) -> Encoded:
        machine = self.machine
        machine.limit_messages(self._connection.max_payload)
        return machine.prepare(message if trace is None else trace.added_to(message, machine.max_traced), ack)

    def _prepared_now(self, message: BatchMessage, ack: bool | None, trace: TraceContext | None) -> Encoded | None:
        """Check and encode a message; return None if it must wait before it can be added."""
        machine, connection = self.machine, self._connection
        try:
            encoded = self._encoded(message, ack, trace)
        except SubjectElsewhere:
            return None
        return encoded if machine.state is not State.NEW and connection.has_room and not self._turns.queue else None

    async def _prepared(
        self, message: BatchMessage, patience: _Patience, ack: bool | None = None, trace: TraceContext | None = None
    ) -> Encoded:
        """Check and encode a message; return when it can be added at once, or raise RequestTimeoutError.

        It then is its turn, the connection has room, and the batch is open and has its subject. A message that gives up
        before is not part of the batch, and a batch that it was the first of can still be one of any stream.
        """
        if (ready := self._prepared_now(message, ack, trace)) is not None:
            return ready
        with self._turns.join() as turn:
            return await self._in_turn(turn, message, patience, ack, trace)

    async def _in_turn(
        self, turn: Turn, message: BatchMessage, patience: _Patience, ack: bool | None, trace: TraceContext | None
    ) -> Encoded:
        """Do what `_prepared` says, with a turn that the caller keeps."""
        machine, connection = self.machine, self._context.connection
        while True:
            try:
                encoded = self._encoded(message, ack, trace)
            except SubjectElsewhere as question:
                await patience.spend(self._find_stream(question.subject, patience.left / 2))
                continue
            self._check_usable()
            try:
                if not turn.has_come:
                    await patience.spend(turn.wait(patience.send_by))
                elif not connection.has_room:
                    await patience.spend(self._wait_room(patience.to_send))
                elif machine.state is State.NEW:
                    await patience.spend(self._open(encoded, message, patience.to_send), opening=True)
                else:
                    return encoded
            except RequestTimeoutError as late:
                raise self._not_sent("a message was not added", patience, late) from late

    async def _prepared_commit(
        self, message: BatchMessage | None, patience: _Patience, trace: TraceContext | None
    ) -> Encoded | None:
        """Return when the commit can be sent at once, with or without a last message; raise as `_prepared` does."""
        machine = self.machine
        with self._turns.join() as turn:
            while True:
                machine.check_open()
                last = None if message is None else await self._in_turn(turn, message, patience, None, trace)
                if turn.has_come:
                    machine.check_commit(last)
                self._check_usable()
                try:
                    if not turn.has_come:
                        await patience.spend(turn.wait(patience.send_by))
                    elif not self._connection.has_room:
                        await patience.spend(self._wait_room(patience.to_send))
                    elif (first := machine.begin(last)) is not None:
                        await self._begin(first, patience)
                    else:
                        return last
                except RequestTimeoutError as late:
                    raise self._not_sent("the commit was not sent", patience, late) from late

    async def _begin(self, first: Block, patience: _Patience) -> None:
        """Send what must come before the commit, and wait until the server has begun the batch, or it has ended."""
        if first.messages:
            await patience.spend(self._write(first, patience))
        if self.machine.begun or self.machine.ended:  # during the write
            return
        waiter = self._expect(_BEGUN)
        try:
            async with asyncio.timeout_at(patience.send_by):
                await patience.spend(waiter)
        except TimeoutError:
            raise RequestTimeoutError("no reply says that the server has its first message") from None
        finally:
            self._forget(_BEGUN, waiter)
        if self._only_call is not None:
            patience.replied()  # as after the reply to any other write

    def _not_sent(self, what: str, patience: _Patience, why: RequestTimeoutError) -> RequestTimeoutError:
        return RequestTimeoutError(f"batch {self.machine.batch_id}: {what} within {patience.spent:.3g} s: {why}")

    async def _find_stream(self, subject: str, timeout: float) -> None:
        """Ask which stream stores `subject`; raise BadSubjectError if it is another one than the batch's."""
        asking = known_stream_name(self._context, subject, timeout)
        try:
            stream = await self._connection.bounded(asking, math.inf, "the stream", over=lambda: self.machine.ended)
        except Over:
            self.machine.check_open()
            raise
        self.machine.check_stream(subject, stream)

    async def _wait_room(self, timeout: float) -> None:
        try:
            await self._connection.wait_room(timeout, over=lambda: self.machine.ended)
        except RequestTimeoutError:
            raise RequestTimeoutError(f"no {ROOM}") from None
        except nats.errors.Error as error:
            if self.machine.state is State.NEW:
                raise
            self._write_failed(error)

    async def _open(self, first: Encoded, message: BatchMessage, timeout: float) -> None:
        """Open the batch for its first message, unless the connection has no room for it any more."""
        connection, clock = self._connection, asyncio.get_running_loop().time
        deadline = clock() + timeout
        # A server before 2.12 stores the messages of a batch as separate ones.
        leader = await lookup_leader(self._context, message.subject, message.stream, timeout, ATOMIC)
        handler = InboxHandler(weakly(self._receive), weakly(self._disconnected))
        inbox = await connection.inbox(handler, tail=".*", timeout=max(0.0, deadline - clock()))
        try:
            connection.check_usable()
            if connection.has_room:
                self.machine.open(
                    first,
                    api_level=leader.api_level,
                    server_version=leader.server_version,
                    reply=inbox.subject,
                    stream=leader.stream,
                )
                own = leader.stream if leader.stream is not None and leader.stream.stores(message.subject) else None
                self.machine.target = self._context.target(None if own is None else own.name)
                self.machine.no_jetstream = why_no_jetstream(self._context)
                self._opened, self._inbox = (leader.stream, leader.last_seq), inbox
                self._turns.wake()
        finally:
            if self._inbox is None:
                inbox.close()

    def _check_usable(self) -> None:
        """Raise what ended the batch, or nats-py's error if nothing can be written."""
        try:
            self._connection.check_usable()
        except nats.errors.ConnectionReconnectingError:
            self.machine.cannot_send()
            self._settle()
            self.machine.check_open()
            raise

    async def _send_block(
        self, source: Iterator[Entry] | None, first: Encoded | None, patience: _Patience, adding: Adding
    ) -> Block:
        """Send one block; raise the error that stopped it before the end of `source`, except a SubjectElsewhere."""
        self._check_usable()
        self.machine.limit_messages(self._connection.max_payload)
        before = self.machine.size
        if source is None:
            block = self.machine.add_many(iter(()), _BLOCK, first)
        else:
            with self._turns.join():  # a call that the source makes, in an eager task, has its turn after the block
                block = self.machine.add_many(source, _BLOCK, first, adding.trace)
        adding.added += self.machine.size - before
        if isinstance(block.stopped, SubjectElsewhere) and self._only_call is not None:
            # Before anything of the block is sent.
            await patience.spend(self._find_stream(block.stopped.subject, patience.left / 2))
        if block.messages:
            waiter, deadline = self._expect(block.awaited) if block.awaited else None, patience.deadline
            try:
                await self._write(block, patience)
            except asyncio.CancelledError:
                self._forget(block.awaited, waiter)
                raise
            if waiter is not None:
                await self._reply(block.awaited, waiter, deadline)
                patience.replied()
            self.machine.check_added()
        if block.stopped is not None and not isinstance(block.stopped, StopIteration | SubjectElsewhere):
            raise block.stopped
        return block

    async def _write(self, block: Block, patience: _Patience) -> None:
        try:
            await self._connection.write(
                block.data, block.messages, block.size, timeout=patience.left, over=lambda: self.machine.ended
            )
        except nats.errors.Error as error:
            self._write_failed(error)

    def _write_failed(self, error: nats.errors.Error) -> None:
        """End the batch, whose error the caller raises."""
        self.machine.lost(f"writing to the connection failed ({error!r})")
        self._settle()

    def _abandon_commit(self) -> None:
        self.machine.commit_cancelled()
        self._settle()

    # -- replies --------------------------------------------------------------------------------------------------

    def _expect(self, seq: int) -> _Waiter:
        waiter = self._waiters[seq] = asyncio.get_running_loop().create_future()
        return waiter

    def _forget(self, seq: int, waiter: _Waiter | None) -> None:
        if self._waiters.get(seq) is waiter:  # the sequence of a refused message may have been reused
            self._waiters.pop(seq, None)

    async def _reply(self, seq: int, waiter: _Waiter, deadline: float) -> None:
        """Wait for a reply until `deadline`; raise if it is the refusal of this one message."""
        refusal: JetStreamExtError | None = None
        try:
            async with asyncio.timeout_at(deadline):
                refusal = await waiter
        except TimeoutError:
            self.machine.lost(
                f"no answer within {self._timeout:g} s{self._connection.why_silent(self.machine.subjects)}"
            )
        finally:
            self._forget(seq, waiter)
            self._settle()
        if refusal is not None:
            raise refusal

    def _receive(self, received: list[Frame]) -> None:
        for frame in received:
            subject, header, payload = frames.parts(frame)
            token = subject.rpartition(b".")[2]
            seq = parse_number(token)
            if seq is None or self.machine.is_of_other(payload):
                continue  # not a reply subject of this batch, or not its stream
            refusal = self.machine.receive(seq, header, payload)
            waiter = self._waiters.pop(seq, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(refusal)
            elif refusal is not None:
                self.machine.refusal_unobserved(refusal)
        begun = self._waiters.get(_BEGUN)
        if begun is not None and self.machine.begun and not begun.done():
            begun.set_result(None)
        self._settle()

    def _disconnected(self) -> None:
        self.machine.disconnected(reply_awaited=bool(self._waiters))
        self._settle()

    def __del__(self) -> None:
        if self._inbox is not None:
            self._inbox.owner_dropped(f"AtomicBatch {self.machine.batch_id}")

    def _settle(self) -> None:
        """Close the inbox and wake every waiter if the batch has ended."""
        if not self.machine.ended:
            return
        self._turns.wake()
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_result(None)
        if self._inbox is not None:
            self._inbox.close()


# -- the outcome of a commit ---------------------------------------------------------------------------------------------


async def _find_out(
    context: Context, commit: Commit, plan: Callable[[], Plan], timeout: float, cause: BaseException | None
) -> BatchAck | None:
    """Return the ack that the commit should have had, or None: nothing of the batch is stored, nor will be.

    `plan` starts an attempt. `cause` is the error that left the outcome unknown; a BatchOutcomeUnknownError of this call
    is raised from it.
    """
    source = f"batch {commit.batch_id}"  # for the log
    retry = Retry(timeout, transient=_may_be_known_later)
    retry.start()
    why = "the stream's leader did not answer"
    try:
        async with asyncio.timeout(timeout):
            while True:
                try:
                    return await _follow(context, plan(), _ANSWER_TIMEOUT, source)
                except Exception as error:
                    why, cause = str(error) or why, error
                    log_state(_log, source, "outcome not found", error, error=error)
                    await retry.pause_if_transient(error)
    except (TimeoutError, NotYetKnown, NeverKnown, nats.errors.Error) as error:
        if isinstance(error, TimeoutError) or _may_be_known_later(error):
            why += f" (tried for {timeout:g} s)"
    raise BatchOutcomeUnknownError(
        f"batch {commit.batch_id}: the outcome is unknown: {why}; its {counted(commit.size, 'message')} may be stored",
        batch_id=commit.batch_id,
        sent=commit.size,
        acked=commit.staged,
        outcome="unknown",
    ) from cause


def _may_be_known_later(error: Exception) -> bool:
    return isinstance(error, NotYetKnown) or is_transient_read(error)


async def _follow(context: Context, plan: Plan, timeout: float, source: str) -> BatchAck | None:
    """Answer the questions of a plan; return its verdict."""
    answer: object = None
    try:
        while True:
            query = plan.send(answer)
            log_state(_log, source, "outcome searched", query=type(query).__name__)
            answer = await _ask(context, query, timeout)
    except StopIteration as verdict:
        ack: BatchAck | None = verdict.value
        return ack


async def _ask(context: Context, query: Query, timeout: float) -> Any:
    match query:
        case atomic_resolve.AskState(stream, seq):
            try:
                return await settled_state(lambda: stream_state(context, stream, timeout), seq)
            except nats.js.errors.NotFoundError:
                return None
        case atomic_resolve.AskMessage(stream, request):
            return await get_at_leader(context, stream, request, timeout)
        case atomic_resolve.AskRange(stream, search, options):
            assert isinstance(context.js, JetStreamContext)  # only those publish
            async with DirectGet(context.js, stream, timeout=timeout).scan(**options) as messages:
                async for message in messages:
                    search.see(message)
        case atomic_resolve.AskFence(subject, kill, mark):
            session, replies = await send_fence(context, subject, (kill, mark), timeout)
            return session, *replies
    return None
