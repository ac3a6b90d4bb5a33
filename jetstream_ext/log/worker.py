"""Exactly-once processing: read, process, write, with each input counted once.

::

    stand by  (standby=True) wait for the lease of this name
    claim     read the newest record of this name: its position, or the reader's start
              another worker took over lately, and is alive ────────────────► wait, read it again
              store it again as this start's own ────────────────── moved ─► ask its worker to wait, store the newer one
    process   read messages, call the handler
    commit    store the outputs and a record of the new position ── moved ─► FencedError

`client.fenced_write` stores, and finds out whether a commit was stored whose answer was lost.

With `DeadLetter` an input may fail: its handler raises, or its outputs are refused. The record then has the attempts
(`protocol.dead_letters`), the outputs of the inputs before it are stored with it, and the input is tried again after a
pause. A worker may die as well while it handles an input. So one that takes over from a worker that has not ended by itself
handles the inputs that this one may have had in its hands one at a time, and stores each attempt before it begins. The
attempt is part of the commit before it, if there is one. A worker that ends by itself stores that it has.

`log.takeover` keeps workers of one name from stopping each other without end. A worker without a `Takeover` is that of one
partition of a group, where the members decide who works: it claims at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol, cast

from nats.nuid import NUID

from jetstream_ext.client import telemetry
from jetstream_ext.client.api import lookup_stream, stream_state
from jetstream_ext.client.connection import Context, open_bucket
from jetstream_ext.client.fenced_write import FencedWriter, RecordMovedError
from jetstream_ext.client.retry import Retry, is_transient
from jetstream_ext.errors import (
    AtomicPublishTooLargeError,
    BadHeaderError,
    BadSubjectError,
    BatchServerError,
    FencedError,
    MaxPayloadError,
    RequestTimeoutError,
    batch_refusal,
)
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.log.dead_letter import DeadLetter, check_dead_letter
from jetstream_ext.log.lease import Lease, lease_key
from jetstream_ext.log.observed import observed_commit, observed_handling, reading_for
from jetstream_ext.log.offsets import (
    OffsetStore,
    PositionedReader,
    StoredOffset,
    encode_position,
    epoch_of,
    matches,
    writer_of,
)
from jetstream_ext.log.output_stream import check_dead_letter_subject, check_output_stream, is_of_outputs
from jetstream_ext.log.reader import LogReader
from jetstream_ext.log.takeover import Takeover
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.dead_letters import Attempts, describe, letter_headers, one_line
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.headers import MSG_ID
from jetstream_ext.protocol.options import (
    ENTRY,
    as_message,
    check_function,
    check_int,
    check_seconds,
    is_bulk,
    is_one_message,
    kind_of,
    payload_bytes,
    shown,
)
from jetstream_ext.protocol.subjects import check_name, check_subject, check_type
from jetstream_ext.text import counted, get_logger, log_state, numbered
from jetstream_ext.types import NEVER, BatchMessage, Entry, own_headers

Outputs = Entry | Iterable[Entry] | AsyncIterable[Entry] | None
Handler = Callable[[StoredMsg], Outputs | Awaitable[Outputs]]
GroupHandler = Callable[[list[StoredMsg]], Outputs | Awaitable[Outputs]]

_log = get_logger("log")

# Seconds that a worker with dead letters may take to store that it ends.
_END_TIMEOUT: Final = 2.0
# Seconds for which a worker waits for another one of its process that handles an input which may kill the process.
_TURN: Final = 10.0
_LONGEST_LOGGED: Final = 1024  # bytes of an error
# Seconds without input after which a position is stored that has moved over messages that the filter excludes.
_IDLE: Final = 5.0


@dataclass(frozen=True, slots=True)
class Processed:
    """What `exactly_once` has done.

    Attributes:
        inputs: Messages read and handled.
        outputs: Messages stored.
        commits: Positions stored, each with its outputs, including the one stored at the start to take the name over.
        position: The next sequence to read.
        dead_letters: Inputs that were stored as dead letters. They count as `inputs`, and not as `outputs`.
    """

    inputs: int
    outputs: int
    commits: int
    position: int
    dead_letters: int = 0


async def exactly_once(
    reader: LogReader,
    output_stream: str,
    handler: Handler | GroupHandler,
    *,
    name: str,
    prefix: str,
    max_messages: int = 100,
    grouped: bool = False,
    standby: bool = False,
    position_may_vanish: bool = False,
    dead_letter: DeadLetter | None = None,
    timeout: float | None = None,
    patience: float = 30.0,
) -> Processed:
    """Turn the messages of one stream into messages of another, and store the outputs of each exactly once.

    One atomic batch stores the outputs and the reader's new position. The position is a message of the output stream on
    ``<prefix>.<name>``, and a batch is stored only if no other worker has stored a position there meanwhile. A worker
    that is killed at any moment and started again continues after its last commit. Of two workers with the same name,
    the one that was started last continues; the next commit of the other one stores nothing and raises `FencedError`. If
    that one is started again while the other one is alive, it waits until 30 s have passed since the other took over, so
    that supervised replicas do not stop each other repeatedly (one of several may wait longer, while others take over).
    With ``standby=True`` a replica waits instead of taking over.

    ::

        async def handle(msg):
            return BatchMessage("totals." + msg.subject, b"...")

        await exactly_once(LogReader(js, "ORDERS", tail=True), "TOTALS", handle, name="sums", prefix="totals-at")

    Side effects of a handler other than its outputs can happen more than once. A message without outputs also moves the
    position.

    Args:
        reader: What to read. Its start is used the first time; later starts continue at the stored position. With
            ``confirm=False`` the worker never handles the inputs that the reader passes over, because a replica or mirror
            lacked them. To read while the origin is away, read its mirror by name, with ``confirm=True``.
        output_stream: The stream that the outputs and the position go to.
        handler: Called with a `StoredMsg`, returns its outputs: a message (a `BatchMessage`, ``(subject, payload)`` or
            ``(subject, payload, headers)``), an iterable or async iterable of messages, or None; or an awaitable of that.
            An input's headers may be passed on; a ``Nats-Msg-Id`` among headers is left out, and the option `msg_id` sets one.
            If an output has an expectation of its own and other outputs go to the same subject, set ``max_messages=1``. If
            the handler raises, the worker ends, and the next start handles again the inputs that were not committed.
        name: The worker's name; one for each input stream and purpose. Tokens of a subject.
        prefix: The position's subject is ``<prefix>.<name>``; one of the output stream's subjects must match it.
        max_messages: Inputs in one commit at most, from 1. If their outputs exceed the server's batch limit (1000 by
            default), they are split into several commits.
        grouped: `handler` is called with the list of all inputs of one commit instead. Its outputs cannot be split.
        standby: Wait while another worker of this name is alive, and take over when it ends (at once) or dies (after
            10 s). All replicas must pass it. A worker that is alive holds a lease, a key of the bucket of
            ``reader.offsets``, which is created if it does not exist. A handler that blocks the event loop for 10 s
            loses the lease. The lease makes nothing safe; the fence does. Cancel the call before you close or drain its
            connection: without one it cannot delete the lease, which then ends 10 s after it was last renewed.
        position_may_vanish: Allow an output stream whose limits can remove the position (see Raises). A worker whose
            position was removed starts at the reader's start again.
        dead_letter: What to do with an input that fails: its handler raises, or its outputs cannot be stored. Without it
            the worker ends. With it the input is tried again after a pause, alone, and after so many attempts it is stored
            on the dead letters' subject, unchanged, with its origin and its error, in one batch with the position. The
            attempts are stored, so they count across restarts. The worker waits meanwhile. A handler that returns something
            else than outputs ends the worker all the same, because that is an error of the program and not of one input.
            With ``grouped=True`` the handler gets lists of one input after a list of several has failed, until these
            are handled. An input while which the worker's process dies (SIGKILL, a crash, out of memory) fails as well:
            after such an end the next worker handles the first inputs, `max_messages` of them, one at a time, and
            stores each attempt before it begins. The first such end does not count, because it is unknown which input it
            was. A worker that ends by itself (by an exception or a cancellation, also) takes its attempt back; an end by an
            unhandled SIGTERM does not.
        timeout: Seconds to wait for an answer of the output stream; None is the context's own.
        patience: Seconds that transient errors of the output stream (an election, a restart, a lost connection) may
            last. The call fails after `timeout` and `patience` together if that stream does not answer.

    Returns:
        What was done, when a reader without ``tail=True`` has reached the end. With ``tail=True`` the call only ends
        by an exception or a cancellation.

    Raises:
        FencedError: Another worker of this name was started, or has taken the lease; this one must stop, and can store
            nothing more. Or its position was removed, for example with the output stream.
        StreamConfigMismatchError: The output stream lacks ``allow_atomic`` or a subject for the position, stores that
            under another one (``subject_transform``), or its limits can remove it: ``max_age`` (without
            ``allow_msg_ttl``), ``max_msgs`` or ``max_bytes`` (with discard ``old``), or a retention other than
            ``limits``. Raised before anything is read.
        PositionLostError, StreamRecreatedError: As for the reader: the input at the position is gone.
        StreamConfigMismatchError: As for the reader, also while the worker runs: consumers remove inputs.
        StreamRecreatedError: Also if the answer to a commit was lost, and the output stream was deleted and created again
            and now holds another position at the sequence of this worker's. Nothing of that commit is stored.
        BadSubjectError: An output's subject is not one of the output stream's, or is the position's.
        AtomicPublishTooLargeError: The outputs of one input (or of a group) exceed the server's batch limit.
        MessageTooLargeError: An output, or the position, is larger than the output stream's ``max_msg_size``. Nothing of that
            commit is stored.
        BatchError, ServerError: The server refused an output. Nothing of the batch is stored.
        UnsupportedFeatureError: The output stream's server is older than 2.12.1.
        RequestTimeoutError: For `patience` seconds another worker of this name stored its position before each attempt to
            take over. This worker asks it to make room; it cannot if that one's connection has an ``inbox_prefix`` that
            is not its own and does not begin with ``_INBOX``, or if it may not publish there.
        ValueError: The reader would return the worker's own positions, or (with ``standby=True``) its lease, without end: its
            stream is the output stream or that of the lease's bucket, or mirrors it or has it as a source, and its filter
            does not exclude them. Raised before anything is read. (For a reader with ``confirm=False`` a copy is not noticed
            if the leader of its stream does not answer within 2 s.) Or the stored position is that of a worker on another
            stream, or a number is out of range.
        TypeError: The handler returned something else than outputs, with `dead_letter` too. Nothing of that input is stored,
            and the next start handles it again. Or an argument is of another type, in which case nothing was sent.
        Exception: Exceptions of the handler, without `dead_letter`; a transient error that lasted longer than `patience`.
        StreamConfigMismatchError: With `dead_letter`: the output stream lacks its subject, stores it under another one, or its
            limits can remove dead letters, as for the position; ``max_msgs_per_subject`` is one of these.
        MessageTooLargeError, BadHeaderError, MaxPayloadError: With `dead_letter`: a dead letter, which has more headers than
            its input, cannot be stored. The input stays at the position.
        ValueError: With `dead_letter`: its subject is the position's, or the reader would return the dead letters without end.

    Cancellation: Safe at every point, as a crash is: a commit that was sent is stored completely or not at all. Nothing
        is left behind. With ``standby=True`` the call deletes its lease first, and with `dead_letter` it stores that it
        ends; each takes 2 s at most.

    Requires: nats-server 2.12.1 and ``allow_atomic`` on the output stream (ADR-50); what the reader requires;
        permission for the output subjects, and for ``STREAM.INFO`` and ``STREAM.MSG.GET`` of the output stream; with
        ``standby=True`` what `OffsetStore` requires.
    """
    if not isinstance(reader, LogReader):
        raise TypeError(f"reader must be a LogReader, not {shown(reader)}; give log.LogReader(js, stream)")
    check_name(output_stream, "stream name")
    check_function(handler, "handler")
    subject = position_subject(prefix, name)
    check_dead_letter(dead_letter)
    if dead_letter is not None and dead_letter.subject == subject:
        raise ValueError(f"subject {subject!r} is that of the worker's position; use another one for dead letters")
    context = Context(reader.context)
    timeout, patience = context.resolve_timeout(timeout), check_seconds(patience, "patience")
    worker = Worker(
        reader=reader,
        handler=cast("Callable[[Any], Outputs | Awaitable[Outputs]]", handler),
        name=name,
        context=context,
        stream=output_stream,
        subject=subject,
        max_messages=check_int(max_messages, "max_messages"),
        grouped=grouped,
        standby=standby,
        may_vanish=position_may_vanish,
        dead_letter=dead_letter,
        timeout=timeout,
        patience=patience,
        takeover=Takeover(context, output_stream, name=name, timeout=timeout, patience=patience),
    )
    with reading_for(reader, name):
        return await worker.run()


def position_subject(prefix: str, name: str) -> str:
    """Return the subject of the positions of a worker; raise BadSubjectError or TypeError if it cannot be one."""
    check_type(prefix, "prefix")
    check_type(name, "name")
    subject = f"{prefix}.{name}"
    check_subject(subject)
    return subject


class Source(PositionedReader, Protocol):
    """What a worker reads from: a `LogReader`, or one partition's part of one.

    `read_for` returns None at the end, behind which nothing comes: the worker then stores its position and returns.
    """

    confirm: bool
    offsets: OffsetStore

    def seek(self, start: StoredOffset | int) -> None: ...


@dataclass(slots=True, kw_only=True)
class Worker:
    """One start of a worker. `stream` is the output stream, `subject` that of the position.

    Without a `takeover`, something else decides which worker of the name works: this one claims the position at once.
    """

    reader: Source
    handler: Callable[[Any], Outputs | Awaitable[Outputs]]
    name: str
    context: Context
    stream: str
    subject: str
    max_messages: int
    grouped: bool
    standby: bool
    may_vanish: bool
    timeout: float
    patience: float
    takeover: Takeover | None
    dead_letter: DeadLetter | None = None
    epoch: str = ""  # of a group: records of another one do not count
    breathe: Callable[[], Awaitable[None]] | None = None  # called before each handler, which may keep the event loop

    id: str = field(default_factory=lambda: NUID().next().decode())
    state: StreamState | None = None  # of the output stream
    writer: FencedWriter = field(init=False)
    batch_limit: int | None = None  # outputs in a batch, once the server has refused a larger one
    inputs: int = 0
    outputs: int = 0
    commits: int = 0
    committed: int = 0  # the position of this start's newest record
    buried: int = 0  # inputs that are dead letters
    attempts: Attempts | None = None  # what the newest record says about them
    in_doubt: tuple[int, Attempts] | None = None  # the position and attempts of a commit that may be stored, or not
    misuse: TypeError | None = None  # the handler returned something else than outputs
    turn: asyncio.Lock | None = None  # held by the one of several workers of a process that may be killed by its input
    pause: float = 0.0  # seconds before the next attempt
    cancelled: int = 0  # how often the task was cancelled before `run`
    lease: Lease | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def _source(self) -> str:
        return f"worker {self.name!r}"  # for the log

    def stop(self) -> None:
        """Let `run` return behind the current commit, or at once from a pause after a failed attempt.

        A source ends the wait for input itself (see `Source`).
        """
        self.stopping.set()

    async def run(self) -> Processed:
        """Claim the position, and work until the source ends, `stop` is called, or an exception ends it.

        Cancellation: Safe, as a crash is; an inbox and a lease are given up.
        """
        task = asyncio.current_task()
        self.cancelled = task.cancelling() if task is not None else 0
        await self._prepare()
        log_state(_log, self._source, "started", stream=self.reader.stream, output=self.stream, id=self.id)
        try:
            if self.takeover is not None:
                await self.takeover.open()
            if self.standby:
                await Retry(self.patience).call(self.reader.offsets.create)
                bucket, key = self._lease_key()
                self.lease = Lease(bucket, key, holder=self.id, name=f"worker {self.name!r}", patience=self.patience)
                await self.lease.acquire()
                await self._prepare()  # that may have taken weeks
            await self._claim()
            log_state(_log, self._source, "position claimed", position=self.committed)
            processed = await self._work()
            log_state(_log, self._source, "ended", position=processed.position, inputs=processed.inputs)
            return processed
        except (Exception, asyncio.CancelledError) as error:
            fenced = isinstance(error, FencedError)
            log_state(_log, self._source, "fenced" if fenced else "ended", error=error, position=self.committed)
            await self._store_end(error)
            raise
        finally:
            if self.takeover is not None:
                self.takeover.close()
            if self.lease is not None:
                await self.lease.release()

    async def _work(self) -> Processed:
        reader = self.reader
        while True:
            self._check_lease()
            messages = None if self.stopping.is_set() else await reader.read_for(_IDLE, self.max_messages)
            position = await reader.open()
            if messages:
                log_state(_log, self._source, "inputs read", inputs=len(messages), position=position)
                if self.attempts is None:
                    await self._store(await self._handle(messages, position))
                    self.inputs += len(messages)
                elif not await self._attempt_all(messages, position, self.attempts):
                    position = self.committed
                    break
                continue
            if messages is None:
                break
            if position != self.committed:
                await self._commit([], position)
        if self.attempts is not None:
            await self._commit([], position, self.attempts.end())
        elif position != self.committed:
            await self._commit([], position)
        return Processed(self.inputs, self.outputs, self.commits, position, self.buried)

    async def _store_end(self, error: BaseException) -> None:
        """Store that this worker ends by itself, so that the next one need not be careful; errors are ignored."""
        if self.attempts is None or not self.commits or isinstance(error, FencedError):
            return
        try:
            async with asyncio.timeout(_END_TIMEOUT):
                if self.context.connection.usable:
                    await self._save_end(self.attempts, self.in_doubt)
        except Exception as failure:
            log_state(_log, self._source, "end not stored", error=failure)

    async def _save_end(self, attempts: Attempts, pending: tuple[int, Attempts] | None) -> None:
        """Store the end behind the newest record of this start, which may be that of a pending commit."""
        if pending is None:
            await self._save([], self.committed, attempts.end())
            return
        found = await self.writer.read()
        while found is not None and writer_of(found.data) in ((self.id, self.commits), (self.id, self.commits - 1)):
            if writer_of(found.data) == (self.id, self.commits):
                self.committed, attempts = pending
                self.commits += 1
            try:
                await self._save([], self.committed, attempts.end())
                return
            except RecordMovedError as moved:  # the commit was on its way
                found = moved.record
                self.writer.follow(found)

    async def _prepare(self) -> None:
        state = await self._look()
        check_output_stream(state, self.subject, self.context.connection.server_version, may_vanish=self.may_vanish)
        if self.dead_letter is not None:
            check_dead_letter_subject(state, self.dead_letter.subject, may_vanish=self.may_vanish)
            self.attempts = Attempts(self.dead_letter.attempts, self.max_messages)
        await self._check_input()
        config = state.config
        self.writer = FencedWriter(
            self.context,
            self.stream,
            self.subject,
            name=f"worker {self.name!r}",
            timeout=self.timeout,
            patience=self.patience,
            rollup=bool(config.get("allow_rollup_hdrs")) and not config.get("deny_purge"),
            msg_ttl=NEVER if state.max_age and config.get("allow_msg_ttl") else None,
        )

    async def _check_input(self) -> None:
        """Raise ValueError if the reader would return the positions or the leases that this worker stores."""
        await self._check_excluded("position", "the output stream", self.stream, self.subject)
        if self.dead_letter is not None:
            await self._check_excluded("dead letter", "the output stream", self.stream, self.dead_letter.subject)
        if self.standby:
            bucket, key = self._lease_key()
            if bucket.context.prefix == self.context.prefix:
                await self._check_excluded(
                    "lease", "the stream of the lease's bucket", bucket.stream, bucket.subject(key)
                )

    async def _check_excluded(self, what: str, where: str, stream: str, subject: str) -> None:
        """Raise ValueError if the reader would return what this worker stores in a stream on a literal subject."""
        reader = self.reader
        own = reader.stream == stream
        how = f"is {where}" if own else f"copies {where} {stream!r}"
        for copy in [subject] if own else await self._copied_as(stream, subject):
            if matches(reader, copy):
                raise ValueError(
                    f"worker {self.name!r}: the reader's stream {reader.stream!r} {how}, so the reader would return each {what} "
                    f"of this worker (on {copy!r}) as an input, without end; nothing was stored; give the reader a filter "
                    "(subject=) that does not match this subject"
                )

    async def _copied_as(self, stream: str, subject: str) -> list[str]:
        """Return the subjects, or filters that match them, on which the input stream has copies of another one's messages."""
        reader = self.reader
        if reader.confirm:
            look = partial(stream_state, self.context, reader.stream, self.timeout)
            return (await Retry(self.patience).call(look)).copies_of(stream, subject)
        # Its leader may be away, or not to be asked.
        known = await lookup_stream(self.context, subject, reader.stream, self.timeout)
        return [] if known is None else known[0].copies_of(stream, subject)

    def _lease_key(self) -> tuple[Bucket, str]:
        offsets = self.reader.offsets
        bucket = Bucket(open_bucket(offsets.context, offsets.bucket), self.timeout)
        return bucket, lease_key(self.stream, self.subject)

    def _check_lease(self) -> None:
        if self.lease is not None and self.lease.lost:
            raise FencedError(
                f"worker {self.name!r} on stream {self.stream!r}: another worker of this name has taken its lease, which "
                "was not renewed in time; stop this one, which stores nothing more",
                name=self.name,
            )

    async def _claim(self) -> None:
        """Take the name over: go to the stored position, and store it again as this start's own."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.patience
        found = await self.writer.read()
        while True:
            if found is not None and self.epoch and epoch_of(found.data) != self.epoch:
                found = None  # from before a reset of the group: the reader is where that has let it start
            if found is not None:
                self._go_to(found)
                if self.takeover is not None and await self.takeover.ask(found.data):
                    self._check_lease()
                    found = await self.writer.read()
                    deadline = loop.time() + self.patience
                    continue
            if self.attempts is not None:
                alive = self.takeover is not None and self.takeover.took_over > 0
                self.attempts = self.attempts.claimed(None if found is None else found.data, alive=alive)
            try:
                await self._save([], await self.reader.open())
                return
            except RecordMovedError as moved:
                if loop.time() >= deadline:
                    raise RequestTimeoutError(
                        f"worker {self.name!r} on stream {self.stream!r}: another worker of this name stored its position "
                        f"before each attempt to take over for {self.patience:.4g} s; this one has stored nothing: stop the "
                        "other one, or start this one again"
                    ) from moved
                found = moved.record
                self.writer.follow(found)
                if self.takeover is not None:
                    self.takeover.ask_to_yield()

    def _go_to(self, found: StoredMsg) -> None:
        """Move the reader to a stored position; look the input stream up only if the reader has not done so."""
        offset, reader = self._decode(found), self.reader
        known = (offset.stream, offset.created) == (reader.stream, reader.created)
        reader.seek(offset.seq if known else offset)

    async def _handle(self, messages: list[StoredMsg], position: int) -> list[tuple[list[BatchMessage], int]]:
        """Return the outputs, and the position after the input that they belong to."""
        if self.grouped:
            return [(await self._outputs_of(messages), position)]
        done = [(await self._outputs_of(message), message.seq + 1) for message in messages]
        done[-1] = (done[-1][0], position)
        return done

    async def _outputs_of(self, given: StoredMsg | list[StoredMsg]) -> list[BatchMessage]:
        outputs = await self._call(given)
        for message in outputs:
            await self._check_output(message, given)
        return outputs

    async def _call(self, given: StoredMsg | list[StoredMsg]) -> list[BatchMessage]:
        if self.breathe is not None:
            await self.breathe()
        observer = telemetry.observer
        if observer is None:
            return await self._run_handler(given)
        with observed_handling(observer, self.context.connection, self.name, given) as operation:
            outputs = await self._run_handler(given)
            trace = operation.trace if outputs else None
            if trace is None:
                return outputs
            room, own = self.context.connection.max_payload, None if self.state is None else self.state.max_msg_size
            room = room if own is None else min(room, own)
            return [trace.added_to(message, room) for message in outputs]

    async def _run_handler(self, given: StoredMsg | list[StoredMsg]) -> list[BatchMessage]:
        made = self.handler(given)
        if inspect.isawaitable(made):
            made = await made
        if made is None:
            return []
        entries: list[Any]
        if is_one_message(made):
            entries = [made]
        elif not is_bulk(made):
            raise self._misused(given, kind_of(made))
        elif isinstance(made, AsyncIterable):
            entries = [entry async for entry in made]
        else:
            entries = list(cast("Iterable[Any]", made))
        outputs = []
        for index, entry in enumerate(entries):
            try:
                outputs.append(_output(entry))
            except TypeError:
                what = (
                    kind_of(entry)
                    if entry is made
                    else f"a {type(made).__name__} whose item {index} is {kind_of(entry)}"
                )
                raise self._misused(given, what) from None
        return outputs

    def _misused(self, given: StoredMsg | list[StoredMsg], what: str) -> TypeError:
        """Return the error of a handler that returned something else than outputs."""
        self.misuse = TypeError(
            f"{self._at(given)}: the handler returned {what}; it must return None, a message ({ENTRY}), or an iterable or async "
            "iterable of messages; nothing of it is stored; correct the handler, and start the worker again"
        )
        return self.misuse

    def _at(self, given: StoredMsg | list[StoredMsg]) -> str:
        first, last = (given[0], given[-1]) if isinstance(given, list) else (given, given)
        inputs = numbered(first.seq, last.seq, "input")
        return f"worker {self.name!r} on stream {self.stream!r}: {inputs} of stream {first.stream!r}"

    async def _call_apart(self, given: StoredMsg | list[StoredMsg]) -> list[BatchMessage] | BaseException:
        """As `_call`, but return what is to end the process: raised in this task, it would end the event loop at once."""
        try:
            return await self._call(given)
        except (KeyboardInterrupt, SystemExit) as error:
            return error

    def _check_cancelled(self, error: BaseException | None = None) -> None:
        """Raise CancelledError if this worker was cancelled, whatever its handler has made of that."""
        task = asyncio.current_task()
        if task is not None and task.cancelling() > self.cancelled:
            raise asyncio.CancelledError from error

    async def _outputs_or_error(self, given: StoredMsg | list[StoredMsg]) -> list[BatchMessage] | BaseException:
        """As `_outputs_of`, but return an error that is the inputs' own."""
        # In a task of its own, because only then `Task.cancelling` of this one tells whether this worker was cancelled: the
        # handler may turn that into another error, and before Python 3.13 a TaskGroup that has failed counts as well.
        try:
            outputs = await asyncio.ensure_future(self._call_apart(given))
        except (Exception, asyncio.CancelledError) as error:
            self._check_cancelled(error)
            if error is self.misuse:
                raise
            return error
        if isinstance(outputs, BaseException):
            raise outputs
        self._check_cancelled()
        try:
            for message in outputs:
                await self._check_output(message, given)
        except (TypeError, ValueError) as error:  # a BadSubjectError is a ValueError
            return error
        return outputs

    async def _attempt_all(self, messages: list[StoredMsg], after: int, attempts: Attempts) -> bool:
        """Handle inputs, some of which may fail; return False if `stop` was called meanwhile.

        `after` is the position after all of them.
        """
        while messages:
            if self.stopping.is_set():
                return False
            self._check_lease()
            self.attempts = attempts = attempts.at(messages[0].seq)
            if attempts.worker_died and attempts.failed is not None:
                count = attempts.failed.attempts
                await self._bury(
                    messages,
                    after,
                    count,
                    f"the worker ended while it handled this input ({counted(count, 'attempt')})",
                )
                handled = 1
            else:
                handled = await self._attempt_carefully(messages, after, attempts)
            self.inputs += handled
            del messages[:handled]
            attempts = self.attempts
            await self._pause()
        return True

    async def _pause(self) -> None:
        """Wait before the next attempt, or until `stop` is called."""
        seconds, self.pause = self.pause, 0.0
        if seconds:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.stopping.wait()

    async def _attempt_carefully(self, messages: Sequence[StoredMsg], after: int, attempts: Attempts) -> int:
        """Handle the next inputs; store the attempt first if it may be the input that kills workers."""
        if not attempts.careful:
            return await self._attempt(messages, after)
        async with self._in_turn():
            if self.stopping.is_set():
                return 0
            if not attempts.begun:
                await self._commit([], messages[0].seq, attempts.begin(messages[0].seq))
            return await self._attempt(messages, after)

    @contextlib.asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[None]:
        """Wait until no other worker of this process has such an input in its hands, but not for much longer than usual.

        Otherwise an input that kills the process would let those of the other partitions count as failed.
        """
        turn = self.turn
        if turn is not None:
            try:
                async with asyncio.timeout(_TURN):
                    await turn.acquire()
            except TimeoutError:
                turn = None
        try:
            yield
        finally:
            if turn is not None:
                turn.release()

    async def _attempt(self, messages: Sequence[StoredMsg], after: int) -> int:
        """Handle the next group of inputs and commit it, or note what has failed; return how many are done."""
        assert self.attempts is not None
        group = list(messages[: self.attempts.next_group(len(messages))])
        parts: list[tuple[list[BatchMessage], int]] = []  # outputs, and of how many inputs they are
        failure: BaseException | None = None
        for given in [list(group)] if self.grouped else group:
            made = await self._outputs_or_error(given)
            if isinstance(made, BaseException):
                failure = made
                break
            parts.append((made, len(group) if self.grouped else 1))
        done, noted = 0, False
        one_by_one = False
        while parts:
            count = 1 if one_by_one else _fitting(parts, self.batch_limit)
            outputs = [message for made, _ in parts[:count] for message in made]
            inputs = sum(size for _, size in parts[:count])
            position, attempts = self._behind(messages, done + inputs, after, inputs)
            noted = False
            if failure is not None and count == len(parts):
                failed = self.attempts.done(inputs).fail(messages[done + inputs].seq, describe(failure))
                if not failed.exhausted:
                    position, attempts, noted = messages[done + inputs].seq, failed, True
            try:
                await self._commit(outputs, position, attempts)
            except _OutputsRefusedError as refused:
                noted = False
                if count == 1:
                    failure = refused.error
                    break
                if isinstance(refused.error, AtomicPublishTooLargeError):
                    self.batch_limit = len(outputs) // 2
                else:
                    one_by_one = True
            else:
                self.outputs += len(outputs)
                done += inputs
                del parts[:count]
        if failure is None:
            return done
        if self.grouped and len(group) > 1:
            log_state(_log, self._source, "inputs failed", inputs=len(group), error=failure)
            self.attempts = self.attempts.split(len(group))
            return done
        return done + await self._fail(messages[done:], after, failure, noted=noted)

    def _behind(self, messages: Sequence[StoredMsg], count: int, after: int, inputs: int) -> tuple[int, Attempts]:
        """Return the position behind `count` messages, of which the last `inputs` are done now, and its attempts."""
        assert self.attempts is not None
        attempts = self.attempts.done(inputs)
        if count == len(messages):
            return after, attempts
        if attempts.careful and self.turn is None:
            return messages[count].seq, attempts.begin(messages[count].seq)
        return messages[count - 1].seq + 1, attempts

    async def _fail(self, messages: Sequence[StoredMsg], after: int, failure: BaseException, *, noted: bool) -> int:
        """Note that the first of `messages` has failed, unless that is stored, and that a pause is due; or bury it and return 1."""
        assert self.attempts is not None
        assert self.dead_letter is not None
        seq, text = messages[0].seq, describe(failure)
        attempts = self.attempts if noted else self.attempts.fail(seq, text)
        assert attempts.failed is not None
        count = attempts.failed.attempts
        if attempts.exhausted:
            await self._bury(messages, after, count, text)
            return 1
        if not noted:
            await self._commit([], seq, attempts)
        self.pause = self.dead_letter.pause_after(count)
        log_state(_log, self._source, "input failed", seq=seq, attempts=count, seconds=self.pause, error=failure)
        return 0

    async def _bury(self, messages: Sequence[StoredMsg], after: int, attempts: int, error: str) -> None:
        """Store the first of `messages` as a dead letter, with the position behind it."""
        assert self.dead_letter is not None
        message, subject = messages[0], self.dead_letter.subject
        config = self.state.config if self.state is not None else {}
        letter = BatchMessage(
            subject,
            message.data,
            headers=letter_headers(message, attempts=attempts, error=error, worker=self.name),
            msg_ttl=NEVER if config.get("max_age") and config.get("allow_msg_ttl") else None,
        )
        what = f"worker {self.name!r} on stream {self.stream!r}: input {message.seq} of stream {message.stream!r}"
        try:
            await self._commit([letter], *self._behind(messages, 1, after, 1))
        except _OutputsRefusedError as refused:
            text = (
                f"{what} failed {counted(attempts, 'time')} ({one_line(error, 200)}), and cannot be stored as a dead letter on {subject!r}: "
                f"{refused.error}; nothing was stored, and the input stays at the position"
            )
            if isinstance(refused.error, BatchServerError):
                raise batch_refusal(refused.error, text, outcome="not_stored") from refused.error
            if isinstance(refused.error, MaxPayloadError | BadHeaderError):
                raise type(refused.error)(text) from refused.error
            raise refused.error from None
        self.buried += 1
        text = one_line(error, _LONGEST_LOGGED)
        tried = counted(attempts, "attempt")
        _log.warning("%s was stored as a dead letter on %r after %s: %s", what, subject, tried, text)

    async def _check_output(self, message: BatchMessage, given: StoredMsg | list[StoredMsg]) -> None:
        subject = message.subject
        try:
            check_type(subject, "subject")
            payload_bytes(message.payload, "the payload on subject", subject)
        except TypeError as error:
            raise TypeError(f"{self._at(given)}: an output of the handler cannot be stored: {error}") from None
        if subject == self.subject:
            raise BadSubjectError(
                f"subject {subject!r} holds the position of worker {self.name!r}; use another subject"
            )
        if (self.state is None or not self.state.stores(subject)) and not (await self._look()).stores(subject):
            text = f"output stream {self.stream!r} does not store subject {subject!r}, so nothing was stored"
            raise BadSubjectError(f"{text}; add the subject to the stream, or use another one")

    async def _store(self, parts: list[tuple[list[BatchMessage], int]]) -> None:
        """Commit all of it, in as few batches as the server takes."""
        while parts:
            count = _fitting(parts, self.batch_limit)
            outputs = [message for made, _ in parts[:count] for message in made]
            try:
                await self._commit(outputs, parts[count - 1][1])
            except AtomicPublishTooLargeError:
                if count == 1 or not outputs:
                    raise
                self.batch_limit = len(outputs) // 2
            else:
                self.outputs += len(outputs)
                del parts[:count]

    async def _commit(self, outputs: Sequence[BatchMessage], position: int, attempts: Attempts | None = None) -> None:
        """Store outputs and a position, all or nothing, and with `attempts` those at the position."""
        if self.takeover is not None:
            await self.takeover.make_room()
        observer = telemetry.observer
        if observer is None:
            await self._store_fenced(outputs, position, attempts)
            return
        with observed_commit(observer, self.context.connection, self.stream, self.name, position) as operation:
            operation.describe(messages=len(outputs))
            await self._store_fenced(outputs, position, attempts)

    async def _store_fenced(self, outputs: Sequence[BatchMessage], position: int, attempts: Attempts | None) -> None:
        try:
            await self._save(outputs, position, attempts)
        except RecordMovedError as moved:
            what = f"worker {self.name!r} on stream {self.stream!r}"
            if moved.record is None:
                raise FencedError(
                    f"{what}: its position on {self.subject!r} was removed; stop this worker (a restarted one begins "
                    "at the reader's start again)",
                    name=self.name,
                ) from moved
            seq = self._decode(moved.record).seq
            raise FencedError(
                f"{what}: another worker of this name has taken over and is at sequence {seq}; stop this one, which can "
                "store nothing more",
                name=self.name,
                seq=seq,
            ) from moved

    async def _save(self, outputs: Sequence[BatchMessage], position: int, attempts: Attempts | None = None) -> None:
        attempts = self.attempts if attempts is None else attempts
        reader, takeover = self.reader, self.takeover
        record = encode_position(
            reader.stream,
            reader.created or "",
            position,
            worker=self.id,
            commit=self.commits,
            inbox=takeover.inbox if takeover else "",
            took_over=takeover.took_over if takeover else 0,
            **({"epoch": self.epoch} if self.epoch else {}),
            **(attempts.fields() if attempts is not None else {}),
        )
        self.in_doubt = None if attempts is None else (position, attempts)
        try:
            await self.writer.store(outputs, record)
        except Exception as error:
            if isinstance(error, BatchServerError) and error.outcome == "not_stored" and not is_transient(error):
                self.in_doubt = None
            if attempts is None or not outputs or not is_of_outputs(error, self.subject):
                raise
            self.in_doubt = None
            raise _OutputsRefusedError(error) from error
        self.in_doubt, self.attempts = None, attempts
        self.committed = position
        self.commits += 1
        log_state(_log, self._source, "committed", position=position, outputs=len(outputs))

    def _decode(self, stored: StoredMsg) -> StoredOffset:
        try:
            return StoredOffset.decode(self.name, stored.data, stored.seq)
        except ValueError as error:
            raise ValueError(
                f"stream {stored.stream!r}: message {stored.seq} on {stored.subject!r} is not the position of a worker, so "
                "another program published on this subject; delete that message, or use another prefix"
            ) from error

    async def _look(self) -> StreamState:
        self.state = await Retry(self.patience).call(partial(stream_state, self.context, self.stream, self.timeout))
        return self.state


def _output(entry: object) -> BatchMessage:
    """Return a message of the handler; an input's message id among its headers is left out, as the fence does that work."""
    message = as_message(entry)
    if isinstance(message.headers, Mapping) and MSG_ID in message.headers:
        pairs = [pair for pair in message.headers.items() if pair[0] != MSG_ID]
        return replace(message, headers=own_headers(pairs))
    return message


class _OutputsRefusedError(Exception):
    """The outputs of a commit cannot be stored, whatever the state of the stream is; nothing of the commit is."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def _fitting(parts: Sequence[tuple[list[BatchMessage], int]], limit: int | None) -> int:
    """Return how many of `parts` go into the next batch, at least 1."""
    if limit is None:
        return len(parts)
    total = 0
    for count, (made, _) in enumerate(parts):
        total += len(made)
        if total > limit:
            return max(1, count)
    return len(parts)
