"""Direct gets over a connection: `RangeRead` and `SingleRead` decide; this module sends, waits and delivers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Generic, Self, TypeVar
from weakref import WeakKeyDictionary

import nats.errors
from nats.aio.client import Client
from nats.js.api import DEFAULT_PREFIX

from jetstream_ext.client import telemetry
from jetstream_ext.client.api import (
    LAG_PAUSE,
    first_since,
    gather_bounded,
    get_at_leader,
    newest_up_to,
    stream_state,
    wait_for_sequence,
    why_no_jetstream,
)
from jetstream_ext.client.base_connection import InboxHandler, InboxSubscription
from jetstream_ext.client.connection import Context
from jetstream_ext.client.retry import Retry
from jetstream_ext.errors import DirectGetDisabledError, JetStreamExtError, RequestTimeoutError
from jetstream_ext.protocol import frames, range_read
from jetstream_ext.protocol.direct import Block, EndOfBatch, Request, StoredMsg, no_responders, not_found
from jetstream_ext.protocol.feature_table import START_TIME_LEVEL
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.range_read import (
    MAX_LEADER_REQUESTS,
    Action,
    RangeRead,
    SingleRead,
    State,
    no_answer,
)
from jetstream_ext.protocol.reads import NEWEST, Link, MultiLast, OneReply, Plan, RangePlan, Scan, SentRequest
from jetstream_ext.text import get_logger

_log = get_logger("direct")


class _Inboxes:
    """The reply inboxes of one read, and one wait for a message to any of them or for the loss of the connection."""

    def __init__(self, context: Context, disconnected: Callable[[Exception | None], None]) -> None:
        self._connection = context.connection
        self._disconnected = disconnected
        self._open: dict[SentRequest | None, InboxSubscription] = {}
        self._woken = asyncio.Event()

    async def send(
        self,
        subject: str,
        payload: bytes,
        received: Callable[[list[Frame]], None],
        timeout: float,
        key: SentRequest | None = None,
    ) -> None:
        """Send a request; `received` is called with the messages to its reply inbox, until `close`.

        An error other than RequestTimeoutError (the server does not read) means that nothing was sent.
        """
        connection = self._connection
        connection.check_usable()
        frames.check_line(subject, connection.inbox_size)
        frames.check_size(len(payload), connection.max_payload)
        handler = InboxHandler(partial(self._notify, received), self._lost)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        inbox = self._open[key] = await connection.inbox(handler, timeout=timeout)
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

    def close(self, key: SentRequest) -> None:
        if (inbox := self._open.pop(key, None)) is not None:
            inbox.close()

    def close_all(self) -> None:
        for inbox in self._open.values():
            inbox.close()


_links: WeakKeyDictionary[Client, tuple[int, Link]] = WeakKeyDictionary()


def link_of(context: Context) -> Link:
    """Return what is known of a connection since it last connected."""
    session = context.connection.session
    known = _links.get(context.nc)
    if known is None or known[0] != session:
        known = _links[context.nc] = session, Link()
    return known[1]


def read_blocks(
    context: Context,
    stream: str,
    plan: Plan,
    timeout: float,
    *,
    confirm: bool = False,
    min_seq: int | None = None,
    consumer: str | None = None,
) -> AsyncGenerator[Block, None]:
    """Yield the messages of a read as they come; see `RangeRead` for `timeout` and `DirectGet` for errors.

    With `confirm`, which needs a `Scan`, the leader proves that the whole range was delivered; a range without an end ends
    at the leader's current last sequence.

    With `min_seq`, the read waits until the leader has this sequence, and a range is proved at least up to it. A
    `MultiLast` with `min_seq` must be `proved`.

    `consumer` is the name that an observer is told; see `telemetry.Observer.begin`.
    """
    blocks = _read_blocks(context, stream, plan, timeout, confirm=confirm, min_seq=min_seq)
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
    context: Context, stream: str, plan: Plan, timeout: float, *, confirm: bool = False, min_seq: int | None = None
) -> AsyncGenerator[Block, None]:
    loop, connection = asyncio.get_running_loop(), context.connection
    if min_seq is not None:
        up_to = plan.up_to_seq if isinstance(plan, RangePlan) else None
        await wait_for_sequence(context, stream, min_seq, timeout, up_to=up_to)
    finds_times = (connection.api_level or 0) >= START_TIME_LEVEL
    if isinstance(plan, MultiLast) and plan.up_to_time is not None and (min_seq is not None or not finds_times):
        # A responder may lag, and with `min_seq` only the leader knows what was stored up to then.
        state = await stream_state(context, stream, timeout)
        plan.pin(await first_since(context, state, plan.up_to_time, timeout) - 1)
    prove_to = min_seq
    if confirm:
        assert isinstance(plan, Scan)
        if plan.up_to_seq is None:
            plan.up_to_seq = (await stream_state(context, stream, timeout)).last_seq
        prove_to = plan.up_to_seq
    machine = RangeRead(
        stream,
        plan,
        timeout,
        pause=LAG_PAUSE,
        prove_to=prove_to,
        link=link_of(context),
        server_version=connection.server_version,
    )
    api = f"{context.prefix}.DIRECT.GET.{stream}"
    addresses = {api, f"{DEFAULT_PREFIX}.DIRECT.GET.{stream}"}

    async def at_leader(request: Request) -> StoredMsg | None:
        return await get_at_leader(context, stream, request.body(), timeout)

    async def ask_leader(request: Request) -> StoredMsg | None:
        while True:
            asked = loop.time()
            try:
                return await Retry(timeout).call(lambda: at_leader(request))
            except RequestTimeoutError:
                if not machine.others_answered(asked):
                    raise

    def receive(sent: SentRequest, frames: list[Frame]) -> None:
        machine.receive(sent, frames, loop.time())

    async def find_newest(seq: int, filters: tuple[str, ...]) -> tuple[tuple[int, str] | None, int]:
        state = await stream_state(context, stream, timeout)
        first, last = state.lowest_seq, min(seq, state.last_seq)
        newest: StoredMsg | None = None

        async def next_of(subject: str) -> StoredMsg | None:
            return await at_leader(Request(seq=first, next_by_subj=subject))

        if seq == NEWEST and filters != (">",):  # any match does, and none may be overlooked because it is overwritten
            matches = await gather_bounded(next_of, filters, limit=MAX_LEADER_REQUESTS)
            some = max(((one.seq, one.subject) for one in matches if one is not None), default=None)
            return some, state.last_seq
        while len(filters) > 1:  # leave out those without a message after the newest one that is known
            found = zip(await gather_bounded(next_of, filters, limit=MAX_LEADER_REQUESTS), filters, strict=True)
            later = sorted((one.seq, subject) for one, subject in found if one is not None and one.seq <= last)
            filters = tuple(subject for _, subject in later[:-1])
            if later:
                first, subject = later[-1]
                newest = await newest_up_to(at_leader, last, first, subject=subject) or newest
                first = max(first, newest.seq if newest else 0) + 1
        for subject in filters:
            newest = await newest_up_to(at_leader, last, first, subject=subject) or newest
        if newest is None and seq == NEWEST:  # or all messages are overwritten as fast as they are looked for
            oldest = await at_leader(Request(seq=1, next_by_subj=">"))
            return None if oldest is None else (state.last_seq, oldest.subject), state.last_seq
        return None if newest is None else (newest.seq, newest.subject), state.last_seq

    async def perform(action: Action) -> None:
        match action:
            case range_read.Wait(until):
                await inboxes.wait(until)
                machine.handle_timer(loop.time())
            case range_read.SendRequest(sent, until):
                subject, payload = sent.request.address(api)
                addresses.add(subject)
                left = max(0.001, until - loop.time())
                try:
                    await inboxes.send(subject, payload, partial(receive, sent), left, sent)
                except nats.errors.ConnectionReconnectingError as error:
                    machine.not_sent(sent, error)
                except RequestTimeoutError:
                    if not connection.usable:
                        raise no_answer(stream, timeout, connected=False) from None
                    # Otherwise the wait for the reply decides: the request may be in the write buffer.
            case range_read.DropReply(sent):
                inboxes.close(sent)
            case range_read.AskLeader(requests):
                found = await gather_bounded(ask_leader, requests, limit=len(requests))
                machine.leader_answered(found, loop.time())
            case range_read.FindNewest(seq, filters):
                machine.newest_found(*await Retry(timeout).call(lambda: find_newest(seq, filters)), loop.time())
            case range_read.AwaitConnection():
                await connection.wait_usable(timeout)
                machine.connected()

    inboxes = _Inboxes(context, machine.disconnected)
    try:
        while True:
            match machine.next_action(loop.time()):
                case range_read.Deliver(block):
                    yield block
                case range_read.Done(failure):
                    if failure is not None:
                        raise _explained(context, failure, addresses) from failure.__cause__
                    return
                case action:
                    try:
                        await perform(action)
                    except Exception as error:
                        machine.failed(error)
    finally:
        machine.closed()
        inboxes.close_all()


def _explained(context: Context, failure: Exception, subjects: Iterable[str]) -> Exception:
    """Return the error of a read whose requests went to `subjects`, with what else may be why no server answers."""
    if isinstance(failure, RequestTimeoutError):
        return context.connection.explained(failure, subjects)
    if isinstance(failure, DirectGetDisabledError) and (no_jetstream := why_no_jetstream(context)):
        return no_responders(failure.stream, no_jetstream)
    return failure


async def skip_malformed(blocks: AsyncGenerator[Block, None]) -> AsyncGenerator[Block, None]:
    """Yield `blocks` without the messages that `StoredMsg.check` refuses; log a warning for each of those."""
    async with aclosing(blocks):
        async for block in blocks:
            for error in block.drop_malformed():
                _log.warning("skipped a message: %s", error)
            if block.seqs:
                yield block


async def read_one(context: Context, stream: str, request: Request, timeout: float) -> StoredMsg:
    """Return the message that a direct get without a batch finds, within `timeout` seconds; see `DirectGet` for errors.

    A request that was lost with the connection is sent once more.
    """
    loop, connection = asyncio.get_running_loop(), context.connection
    deadline = loop.time() + timeout
    if request.start_time is not None:
        # A batch of one message: an older server would ignore start_time in a single get and answer another message.
        plan = OneReply(replace(request, batch=1))
        try:
            reading = _read_blocks(context, stream, plan, timeout)  # the caller's read is the one that is observed
            async with asyncio.timeout_at(deadline), aclosing(reading) as blocks:
                async for block in blocks:
                    return next(block.messages())
            raise not_found(stream, request)
        except RequestTimeoutError:
            raise
        except TimeoutError:
            raise no_answer(stream, timeout, connected=connection.usable) from None
    read = SingleRead(stream, timeout)
    subject, payload = request.address(f"{context.prefix}.DIRECT.GET.{stream}")

    def remaining() -> float:
        return max(0.001, deadline - loop.time())  # without time left, a wait fails at its first suspension

    while read.state is not State.ENDED:
        inboxes = _Inboxes(context, read.disconnected)
        try:
            if read.state is State.RESUMING:
                await connection.wait_usable(remaining())
                read.connected()
            await inboxes.send(subject, payload, read.receive, remaining())
            await inboxes.wait(deadline)
            if read.state is State.READING:
                read.expired()
        except nats.errors.ConnectionReconnectingError as error:
            if loop.time() >= deadline:
                read.expired()
            read.not_sent(error)
        except RequestTimeoutError:
            read.expired()
        except Exception as error:
            read.failed(error)
        finally:
            inboxes.close_all()
    try:
        return read.result(connection.server_version, request)
    except (RequestTimeoutError, DirectGetDisabledError) as failure:
        raise _explained(context, failure, [subject]) from failure.__cause__


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
