"""Direct gets over a connection: `RangeRead` decides; this module sends, waits, asks the leader and delivers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Self, TypeVar
from weakref import WeakKeyDictionary

import nats.errors
from nats.aio.client import Client
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from jetstream_ext.client import telemetry
from jetstream_ext.client.api import (
    LAG_PAUSE,
    LOOKUP_TIMEOUT,
    Api,
    check_same_stream,
    first_since,
    get_at_leader,
    newest_up_to,
    stream_state,
    wait_for_sequence,
    why_no_jetstream,
)
from jetstream_ext.client.base_connection import BaseConnection, InboxHandler, InboxSubscription, NotPermittedError
from jetstream_ext.client.connection import Context
from jetstream_ext.client.retry import Retry
from jetstream_ext.errors import (
    DirectGetDisabledError,
    JetStreamExtError,
    MessageNotFoundError,
    RequestTimeoutError,
)
from jetstream_ext.protocol import frames
from jetstream_ext.protocol import range_read as machine
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import (
    DEFAULT_MAX_BYTES,
    Block,
    EndOfBatch,
    Request,
    StoredMsg,
    decode_single,
    no_responders,
    not_found,
)
from jetstream_ext.protocol.feature_table import START_TIME_LEVEL
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.range_read import no_answer
from jetstream_ext.protocol.reads import (
    Link,
    MultiLast,
    NewestMessage,
    NextMessage,
    OneReply,
    Plan,
    Question,
    RangePlan,
    SentRequest,
)
from jetstream_ext.text import get_logger

_log = get_logger("direct")


class _Inboxes:
    """The reply inboxes of one read, and one wait for a message to any of them or for the loss of the connection."""

    def __init__(self, connection: BaseConnection, disconnected: Callable[[Exception | None], None]) -> None:
        self._connection = connection
        self._disconnected = disconnected
        self._open: dict[SentRequest, InboxSubscription] = {}
        self._woken = asyncio.Event()

    async def send(self, sent: SentRequest, api: str, received: Callable[[list[Frame]], None], timeout: float) -> None:
        """Send a request to the subject `api`; `received` is called with the messages to its reply inbox, until `close`.

        An error other than RequestTimeoutError (the server does not read) means that nothing was sent.
        """
        connection = self._connection
        subject, payload = sent.request.address(api)
        connection.check_usable()
        frames.check_line(subject, connection.inbox_size)
        frames.check_size(len(payload), connection.max_payload)
        handler = InboxHandler(partial(self._notify, received), self._lost)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        inbox = self._open[sent] = await connection.inbox(handler, timeout=timeout)
        command = frames.pub(subject.encode(), inbox.subject.encode(), b"", payload)
        await connection.write(command, 1, len(payload), timeout=max(0.0, deadline - loop.time()))

    def _notify(self, receive: Callable[..., None], *arguments: object) -> None:
        receive(*arguments)
        self._woken.set()

    def _lost(self) -> None:
        self._notify(self._disconnected, self._connection.end)

    async def wait(self, until: float) -> None:
        """Wait for a message, the loss of the connection, or the time `until` of the loop's clock."""
        timer = asyncio.get_running_loop().call_at(until, self._woken.set)
        try:
            await self._woken.wait()
        finally:
            timer.cancel()
        self._woken.clear()

    def close(self, sent: SentRequest) -> None:
        if (inbox := self._open.pop(sent, None)) is not None:
            inbox.close()

    def close_all(self) -> None:
        for inbox in self._open.values():
            inbox.close()


_links: WeakKeyDictionary[Client, Link] = WeakKeyDictionary()


def link_of(connection: BaseConnection) -> Link:
    """Return what is known of a connection."""
    link = _links.get(connection.nc)
    if link is None:
        link = _links[connection.nc] = Link()
    link.max_payload = connection.max_payload
    return link


@dataclass(frozen=True, slots=True)
class _Proof:
    """What a read proves; see `read_blocks`."""

    confirm: bool = False
    min_seq: int | None = None
    same_stream: bool = False

    @property
    def wanted(self) -> bool:
        return self.confirm or self.min_seq is not None


def read_blocks(
    context: Context,
    stream: str,
    plan: Plan,
    timeout: float,
    *,
    confirm: bool = False,
    min_seq: int | None = None,
    same_stream: bool = False,
    allowed: bool = False,
    consumer: str | None = None,
) -> AsyncGenerator[Block, None]:
    """Yield the messages of a read as they come; see `RangeRead` for `timeout` and `DirectGet` for errors.

    Args:
        context: The context.
        stream: The stream's name.
        plan: Which requests answer the read.
        timeout: Seconds, for each wait.
        confirm: Prove that the whole range of a `RangePlan` was delivered. A range without an end ends at the leader's
            current last sequence.
        min_seq: Wait until the leader has this sequence, and prove a range at least up to it.
        same_stream: With `confirm`, check at the end that the stream was not deleted and created again, if the user may ask.
        allowed: The stream is known to allow direct gets.
        consumer: The name that an observer is told; see `telemetry.Observer.begin`.
    """
    blocks = _read_blocks(context, stream, plan, timeout, _Proof(confirm, min_seq, same_stream), allowed)
    observer = telemetry.observer
    return blocks if observer is None else _observed(observer, context, stream, consumer, blocks)


async def _observed(
    observer: telemetry.Observer,
    context: Context,
    stream: str,
    consumer: str | None,
    blocks: AsyncGenerator[Block, None],
) -> AsyncGenerator[Block, None]:
    """Yield `blocks`, as one operation that lasts as long as the read, without the time in which the caller has a block."""
    operation = observer.begin(telemetry.Kind.RECEIVE, context.connection, stream=stream, consumer=consumer)
    clock, messages = asyncio.get_running_loop().time, 0
    failure: BaseException | None = None
    try:
        async with aclosing(blocks):
            async for block in blocks:
                messages += len(block.seqs)
                given = clock()
                try:
                    yield block
                finally:
                    operation.exclude(clock() - given)
    except GeneratorExit:  # the caller needs no more
        raise
    except BaseException as error:
        failure = error
        raise
    finally:
        operation.describe(messages=messages)
        operation.end(failure)


async def _read_blocks(
    context: Context,
    stream: str,
    plan: Plan,
    timeout: float,
    proof: _Proof = _Proof(),
    allowed: bool = False,
) -> AsyncGenerator[Block, None]:
    loop, connection = asyncio.get_running_loop(), context.connection
    state = await _pinned(context, stream, plan, timeout, proof)
    plan.link = link_of(connection)
    read = machine.RangeRead(
        stream,
        plan,
        timeout,
        pause=LAG_PAUSE,
        allowed=allowed or (state is not None and bool(state.config.get("allow_direct"))),
        server_version=connection.server_version,
    )
    api = f"{context.prefix}.DIRECT.GET.{stream}"
    inboxes = _Inboxes(connection, read.disconnected)

    def receive(sent: SentRequest, frames: list[Frame]) -> None:
        read.receive(sent, frames, loop.time())

    async def perform(action: machine.Action) -> None:
        match action:
            case machine.Wait(until):
                await inboxes.wait(until)
                read.handle_timer(loop.time())
            case machine.SendRequest(sent, until):
                left = max(0.001, until - loop.time())
                read.session = connection.session
                try:
                    await inboxes.send(sent, api, partial(receive, sent), left)
                except nats.errors.ConnectionReconnectingError as error:
                    read.not_sent(sent, error)
                except RequestTimeoutError:
                    if not connection.usable:
                        raise no_answer(stream, timeout, connected=False) from None
                    # Otherwise the wait for the reply decides: the request may be in the write buffer.
            case machine.DropReply(sent):
                inboxes.close(sent)
            case machine.AskLeader(question):
                asking = partial(_ask_leader, context, stream, question, timeout, proved=plan.proved)
                read.leader_answered(*await Retry(timeout).call(asking), loop.time())
            case machine.AwaitConnection():
                await connection.wait_usable(timeout)
                read.connected()

    try:
        while True:
            match read.next_action(loop.time()):
                case machine.Deliver(block):
                    yield block
                case machine.Done(failure):
                    if failure is not None:
                        tried = timeout if read.allowed else None
                        raise await _explained(context, stream, failure, {api}, tried) from failure.__cause__
                    break
                case action:
                    try:
                        await perform(action)
                    except Exception as error:
                        read.failed(error)
    finally:
        read.closed()
        inboxes.close_all()
    if proof.same_stream and state is not None:
        await check_same_stream(context, state, timeout=timeout)


async def _pinned(context: Context, stream: str, plan: Plan, timeout: float, proof: _Proof) -> StreamState | None:
    """Ask the leader what a plan has to prove, and at which point in time; return the stream's state if it was asked."""
    up_to = plan.up_to_seq if isinstance(plan, RangePlan) else None
    state: StreamState | None = None
    if proof.min_seq is not None:
        state = await wait_for_sequence(context, stream, proof.min_seq, timeout, up_to=up_to)
    elif proof.confirm and (up_to is None or proof.same_stream):
        try:
            state = await stream_state(Api(context, timeout, lookup=up_to is not None), stream)
        except NotPermittedError:
            if up_to is None:
                raise
    if isinstance(plan, MultiLast) and plan.up_to_time is not None:
        if proof.wanted or not _finds_times(context):  # with `min_seq`, because a responder may lag
            state = state or await stream_state(context, stream, timeout)
            plan.pin(await first_since(context, state, plan.up_to_time, timeout) - 1)
    elif isinstance(plan, RangePlan) and plan.start_time is not None and not _finds_times(context):
        try:
            found = state or await stream_state(Api(context, timeout, lookup=not proof.wanted), stream)
            when, subject = plan.start_time, plan.subject or ">"
            if found.api_level and found.config.get("allow_direct"):  # otherwise the request says what is wrong
                seq = await first_since(context, found, when, timeout, subject=subject)
                plan.start_at(seq)
                if seq > found.last_seq:  # what is stored from now on may be older than that time
                    plan.end_at(found.last_seq)
        except (NotPermittedError, ServiceUnavailableError):
            if proof.wanted:
                raise
    if isinstance(plan, RangePlan) and proof.wanted:
        if proof.confirm and state is not None:
            state.check_sequences(up_to)
            plan.end_at(state.last_seq if up_to is None else up_to)
        prove_to = plan.up_to_seq if proof.confirm else proof.min_seq
        assert prove_to is not None
        plan.prove(prove_to)
    return state


def _finds_times(context: Context) -> bool:
    """Return whether the server finds a time where messages were deleted; older ones find another one."""
    return (context.connection.api_level or 0) >= START_TIME_LEVEL


async def _ask_leader(
    context: Context, stream: str, question: Question, timeout: float, *, proved: bool
) -> tuple[StoredMsg | None, int | None]:
    """Return the message that a plan asks for, if there is one, and the stream's last sequence if it was asked for."""

    async def at_leader(request: Request) -> StoredMsg | None:
        return await get_at_leader(context, stream, request.body(), timeout)

    match question:
        case NextMessage(request):
            return await at_leader(request), None
        case NewestMessage(seq):
            if not proved:  # nearly always it is there, and any responder's answer is as good as its pages
                with suppress(MessageNotFoundError):
                    return await read_one(context, stream, Request(seq=seq), timeout), None
            elif (found := await at_leader(Request(seq=seq))) is not None:
                return found, None
            state = await stream_state(context, stream, timeout)
            return await newest_up_to(at_leader, min(seq, state.last_seq), state.lowest_seq), state.last_seq


async def _explained(
    context: Context, stream: str, failure: Exception, subjects: Iterable[str], tried: float | None = None
) -> Exception:
    """Return the error of a read whose requests went to `subjects`, with what else may be why no server answers.

    `tried` is for how many seconds the read has waited for a responder.
    """
    if isinstance(failure, RequestTimeoutError):
        return context.connection.explained(failure, subjects)
    if not isinstance(failure, DirectGetDisabledError):
        return failure
    allowed: bool | None = None
    try:
        state = await stream_state(Api(context, min(context.timeout, LOOKUP_TIMEOUT), lookup=True), stream)
        allowed = bool(state.config.get("allow_direct"))
    except NotFoundError as missing:
        return missing
    except (nats.errors.Error, APIError):
        pass
    if allowed and tried is not None:
        return RequestTimeoutError(f"stream {stream!r}: no replica answers direct gets (tried for {tried:.4g} s)")
    return no_responders(stream, allowed=allowed, no_jetstream=why_no_jetstream(context))


async def skip_malformed(blocks: AsyncGenerator[Block, None]) -> AsyncGenerator[Block, None]:
    """Yield `blocks` without the messages whose time is malformed; log a warning for each of those."""
    async with aclosing(blocks):
        async for block in blocks:
            for error in block.drop_malformed():
                _log.warning("skipped a message: %s", error)
            if block.seqs:
                yield block


async def read_one(context: Context, stream: str, request: Request, timeout: float) -> StoredMsg:
    """Return the message that a direct get without a batch finds, within `timeout` seconds; see `DirectGet` for errors.

    The request is sent again after a lost connection, and after half of that time.
    """
    if request.start_time is not None:
        return await _read_at(context, stream, request, timeout)
    connection = context.connection
    subject, payload = request.address(f"{context.prefix}.DIRECT.GET.{stream}")
    try:
        answer = await connection.request(subject, payload, timeout, again=timeout / 2)
        return decode_single(stream, answer, connection.server_version, request)
    except (nats.errors.NoRespondersError, DirectGetDisabledError):
        raise await _explained(context, stream, no_responders(stream), []) from None
    except NotPermittedError:
        raise
    except RequestTimeoutError:
        late = no_answer(stream, timeout, connected=connection.usable)
        raise connection.explained(late, [subject]) from None


async def _read_at(context: Context, stream: str, request: Request, timeout: float) -> StoredMsg:
    # A batch of one message: an older server would ignore start_time in a single get and answer another message.
    plan = OneReply(replace(request, batch=1, max_bytes=DEFAULT_MAX_BYTES))
    try:
        reading = _read_blocks(context, stream, plan, timeout)  # the caller's read is the one that is observed
        async with asyncio.timeout(timeout), aclosing(reading) as blocks:
            async for block in blocks:
                return next(block.messages())
        raise not_found(stream, request)
    except RequestTimeoutError:
        raise
    except TimeoutError:
        raise no_answer(stream, timeout, connected=context.connection.usable) from None


_T = TypeVar("_T")


class ExclusiveReader(Generic[_T]):
    """A generator that one task at a time reads, until it ends, fails or is closed; see `MessageBatch` for errors."""

    def __init__(self, items: AsyncGenerator[_T, None]) -> None:
        self.closed: bool = False
        self._items = items
        self._failure: BaseException | None = None
        self._reading = False

    async def next(self) -> _T | None:
        """Return the next item, or None at the end."""
        if self._failure is not None:
            raise JetStreamExtError(
                "this read failed or was cancelled and cannot be continued; start another one after the last message "
                f"received ({self._failure!r})"
            )
        if self.closed:
            return None
        self._check_alone()
        self._reading = True
        try:
            return await anext(self._items)
        except StopAsyncIteration:
            return None
        except BaseException as failure:
            self._failure = failure
            raise
        finally:
            self._reading = False

    def _check_alone(self) -> None:
        if self._reading:
            raise RuntimeError("another task is waiting for the next messages of this read; cancel it first")

    async def aclose(self) -> None:
        """End the read; raise RuntimeError if a task is waiting in `next`."""
        self._check_alone()
        self.closed = True
        await self._items.aclose()


class MessageBatch:
    """The messages of one read: iterate over it, use it as an async context manager, or call `to_list`.

    The first request goes out on first use. To leave early, use ``break`` and then `aclose` (or the end of the
    ``async with`` block): nothing is left behind. Only one task at a time may read.

    An error ends the read. The messages before it are valid, and another read can start after the last of them.

    Raises:
        JetStreamExtError, nats.errors.Error: While iterating: see `DirectGet`. After an error or a cancellation, every
            further use of the read.
        RuntimeError: Another task is waiting for messages of the same read.

    Cancellation: A cancelled read is over and nothing is left behind; it cannot be continued.

    Requires: nats-server 2.11 (ADR-31, Batched requests and Multi-subject requests).
    """

    def __init__(self, plan: Plan, blocks: AsyncGenerator[Block, None]) -> None:
        self._plan = plan
        self._blocks = ExclusiveReader(blocks)
        self._ready: Iterator[StoredMsg] = iter(())
        self._end: EndOfBatch | None = None
        self._last_seq = 0

    @property
    def num_pending(self) -> int | None:
        """The number of matching messages after those that were read, as the last answer says; None before the end."""
        return self._end.num_pending if self._end else None

    @property
    def last_seq(self) -> int | None:
        """The stream sequence of the last message (0 if none was found); None before the end."""
        return self._last_seq if self._end else None

    @property
    def up_to_seq(self) -> int | None:
        """The sequence at which a `multi_last` is consistent; None before the end and for other reads."""
        return self._end.up_to_seq if self._end else None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StoredMsg:
        while True:
            for message in self._ready:
                return message
            if (block := await self._next_block()) is None:
                raise StopAsyncIteration
            self._ready = block.messages()

    async def to_list(self) -> list[StoredMsg]:
        """Return all remaining messages, in the order of their sequences.

        Raises:
            JetStreamExtError, nats.errors.Error, RuntimeError: As while iterating.

        Cancellation: The read is over; nothing is left behind.
        """
        messages = list(self._ready)
        while (block := await self._next_block()) is not None:
            messages += block.messages()
        return messages

    async def _next_block(self) -> Block | None:
        block = await self._blocks.next()
        if block is not None:
            self._last_seq = block.seqs[-1]
        elif self._plan.done and not self._blocks.closed:
            self._end = self._plan.end
        return block

    async def aclose(self) -> None:
        """End the read; safe to call more than once.

        Raises:
            RuntimeError: Another task is waiting for messages of the read; cancel that task first.

        Cancellation: The read is over; nothing is left behind.
        """
        await self._blocks.aclose()
        self._ready = iter(())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
