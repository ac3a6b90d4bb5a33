"""`ingest`: store every message of a source exactly once, across restarts and lost connections."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import deque
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final, TypeVar

import nats.errors
import nats.js.errors
from nats.js import JetStreamContext
from nats.nuid import NUID

from jetstream_ext.client import telemetry
from jetstream_ext.client.api import forget_stream, stream_name
from jetstream_ext.client.base_connection import NotPermittedError
from jetstream_ext.client.connection import Context
from jetstream_ext.client.fast import FastSession, Pump
from jetstream_ext.client.outcome import find_out
from jetstream_ext.client.retry import Retry, is_not_closed, is_transient
from jetstream_ext.errors import (
    BatchError,
    BatchGapError,
    BatchServerError,
    FastPublishDisabledError,
    FastPublishMirrorError,
    FastPublishUnknownBatchError,
    IngestError,
    NoStreamError,
    RequiredApiLevelError,
    StreamConfigMismatchError,
    StreamRecreatedError,
    UnsupportedFeatureError,
)
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.advice import after_refusal
from jetstream_ext.protocol.ingest import Ingest, State
from jetstream_ext.protocol.options import (
    as_message,
    check_function,
    check_messages,
    check_not_coroutine,
    check_seconds,
    given_headers,
    message_headers,
)
from jetstream_ext.protocol.outcome import StreamGone, Unknown
from jetstream_ext.text import get_logger
from jetstream_ext.types import BatchFlowAck, BatchMessage, EndReason, Entry, IngestProgress, IngestReport, own_headers

_AnyEntry = TypeVar("_AnyEntry", bound=Entry)
ProgressHandler = Callable[[IngestProgress], None]

_log: Final = get_logger("ingest")

_NO_FAST_INGEST: Final = (
    UnsupportedFeatureError,
    FastPublishDisabledError,
    FastPublishMirrorError,
    RequiredApiLevelError,
    StreamConfigMismatchError,
)


async def ingest(
    js: JetStreamContext,
    messages: Iterable[_AnyEntry] | AsyncIterable[_AnyEntry],
    *,
    msg_id: Callable[[_AnyEntry], str] | None = None,
    flow: int = 100,
    max_outstanding_acks: int = 2,
    timeout: float | None = None,
    patience: float = 60.0,
    on_progress: ProgressHandler | None = None,
    progress_every: float = 0.5,
) -> IngestReport:
    """Store every message of `messages` in its stream, in order, and return a report.

    Messages are sent by fast ingest. If a batch ends early (the server was killed, its leader changed, the connection
    was lost, messages were lost, the stream is overloaded), the stream is searched for the messages that were not
    acknowledged, and another batch sends those that it lacks. Every message has a ``Nats-Msg-Id``, so that the server drops
    a copy that arrives late. Messages that the stream cannot show, because it has removed messages meanwhile or may not be
    read, are sent again too; the report counts them in `in_doubt`, because they may be stored more than once. Every other
    message is stored exactly once. If the stream is deleted during the run, or deleted and created again, the call fails,
    because the messages that it had acknowledged are gone.

    Args:
        js: nats-py's JetStream context; its prefix, domain and timeout are honoured.
        messages: ``(subject, payload)``, ``(subject, payload, headers)`` or `BatchMessage`, from an iterable or an async
            iterable, all for one stream. It is read as fast as the messages are stored; only one window is in memory. What
            it yields is copied unless it is immutable, so it may use one buffer or dict again and again. An async iterable is
            read in a task of its own.
        msg_id: Called with each message that has no ``Nats-Msg-Id``; returns its id. The default ids are a random id of
            the run and the message's place in it. With ids that are derived from the content, a second run stores only
            what the first did not. A message is known by its id, so no other publisher may use it meanwhile. Only the
            default ids prove what was stored on a stream that has removed messages.
        flow: Messages per acknowledgement to request, as for `FastPublisher`.
        max_outstanding_acks: The window, in acknowledgements (`flow` messages each), as for `FastPublisher`.
        timeout: Seconds to wait for each answer of the server; None is the context's timeout.
        patience: Seconds of errors without a single stored message after which the call fails.
        on_progress: A plain function, called on the loop repeatedly and at the end. Its exceptions go to the loop's
            exception handler. It may start tasks, but is not an async function.
        progress_every: The minimum number of seconds between two calls of `on_progress`.

    Returns:
        An `IngestReport`.

    Raises:
        IngestError: A message was refused (the error names it; everything before it is stored and nothing after it), the
            stream does not take fast ingest or has ``no_ack``, or no message was stored for `patience` seconds. A permission
            that the server refuses ends the call: at once if it is to publish a message, after `timeout` if it is to
            receive answers. Or the stream was deleted during the run, or deleted and created again, after it had acknowledged
            messages: then no message is known to be stored, ``index`` is 0, and the cause is nats-py's NotFoundError, or a
            `StreamRecreatedError`.
        UnsupportedFeatureError: The stream's server is older than 2.14, and nothing is stored. A call that has stored
            messages waits for a newer server, for `patience`.
        ValueError, TypeError: An argument is out of its range or of another type.
        Exception: What `messages` or `msg_id` raises, once everything before it is stored.

    Cancellation: It is unknown whether the messages of the last window are stored.

    Requires: nats-server 2.14 and ``allow_batched`` on the stream.
    """
    for name, function in (("msg_id", msg_id), ("on_progress", on_progress)):
        if function is not None:
            check_function(function, name, "a function or None", awaited=False)
    patience = check_seconds(patience, "patience")
    progress = _Progress(on_progress, check_seconds(progress_every, "progress_every", zero=True))
    timeout = Context(js).resolve_timeout(timeout)

    new_session = partial(FastSession, Context(js), flow=flow, max_outstanding_acks=max_outstanding_acks, keepalive=5.0)
    source = _Source(messages, msg_id)
    run = _Run(Context(js), source, new_session, timeout, patience, progress)
    try:
        observer = telemetry.observer
        return await run.run() if observer is None else await run.run_observed(observer)
    finally:
        await source.aclose()


class _Source:
    """Reads the caller's messages, gives each an id, and puts them into the window of the run."""

    def __init__(self, messages: Iterable[Entry] | AsyncIterable[Entry], msg_id: Callable[[Any], str] | None) -> None:
        self.window: deque[Entry] = deque()
        self.ended = False
        self.error: Exception | None = None
        """The exception of the caller's iterable or `msg_id`."""
        self.run_id: str = NUID().next().decode()  # the start of the ids of this run; nothing else uses it
        self.taken = 0  # how many messages were read
        self._msg_id = msg_id
        check_messages(messages)
        self.entries: Iterator[Entry] | Pump
        if isinstance(messages, AsyncIterable):
            self.entries = _AsyncEntries(messages, self)
        else:
            self.entries = self._read(iter(messages))

    def _read(self, messages: Iterator[Entry]) -> Iterator[Entry]:
        try:
            for message in messages:
                yield self.take(message)
        except Exception as error:
            self.error = error
        self.ended = True

    def take(self, message: Entry) -> Entry:
        """Put a message into the window; return it as it is to be sent."""
        entry = self._with_id(message)
        self.window.append(entry)
        return entry

    async def aclose(self) -> None:
        if isinstance(self.entries, Pump):
            await self.entries.aclose()

    def _with_id(self, entry: Entry) -> Entry:
        """Return the message with an id; anything else stays as it is, and is refused when it is sent.

        Nothing of what is returned changes with the caller's buffers and mappings.
        """
        self.taken += 1
        if type(entry) is tuple and len(entry) > 1 and type(entry[1]) is bytes:
            # Nearly every message of a bulk is one of these two; no object is made for it.
            if len(entry) == 2:
                return entry[0], entry[1], {h.MSG_ID: self._id(entry)}
            if len(entry) == 3 and type(entry[2]) is h.EncodedHeaders:
                return entry
            if len(entry) == 3 and type(entry[2]) is dict:
                own = entry[2].copy()
                if not own.get(h.MSG_ID):
                    own[h.MSG_ID] = self._id(entry)
                return entry[0], entry[1], own
        try:
            message = as_message(entry)  # a copy
            headers = given_headers(message)
        except (TypeError, ValueError):
            return entry
        if message.msg_id is None and not headers.get(h.MSG_ID):
            others = [(name, value) for name, value in headers.items() if name != h.MSG_ID]
            message = dataclasses.replace(message, headers=own_headers([*others, (h.MSG_ID, self._id(entry))]))
        return message

    def _id(self, entry: Entry) -> str:
        if self._msg_id is None:
            return f"{self.run_id}-{self.taken}"
        name = self._msg_id(entry)
        if isinstance(name, str) and not name.strip():
            raise ValueError(
                f"msg_id returned an empty id for the message at index {self.taken - 1}; return a unique, non-empty str"
            )
        return name


class _AsyncEntries(Pump):
    """The messages of an async iterable, which go on in the next batch if one ends."""

    def __init__(self, messages: AsyncIterable[Entry], source: _Source) -> None:
        super().__init__(messages)
        self._source = source

    def take(self) -> Entry:
        try:
            return self._source.take(super().take())
        except StopAsyncIteration:
            self._source.ended = True
            raise
        except Exception as error:
            self._source.error, self._source.ended = error, True
            raise StopAsyncIteration from None


class _Progress:
    """Calls `on_progress` now and then."""

    def __init__(self, call: ProgressHandler | None, every: float) -> None:
        self._call, self._every = call, every
        self._at, self._stored = -math.inf, 0  # of the newest report

    def report(self, stored: int, waiting: int, *, final: bool = False) -> None:
        if self._call is None:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        seconds = now - self._at
        if seconds < self._every and not final:
            return
        rate = (stored - self._stored) / seconds if seconds else 0.0
        self._at, self._stored = now, stored
        try:
            check_not_coroutine(self._call(IngestProgress(stored, rate, waiting)), "on_progress")
        except Exception as error:
            loop.call_exception_handler({"message": "ingest: the callback on_progress raised", "exception": error})


class _Run:
    """Does what `protocol.ingest` says: sends batches, searches after one that broke, and gives up."""

    def __init__(
        self,
        context: Context,
        source: _Source,
        new_session: Callable[..., FastSession],
        timeout: float,
        patience: float,
        progress: _Progress,
    ) -> None:
        self._context = context
        self._source = source
        self._new_session = new_session
        self._timeout = timeout
        self._retry = Retry(patience, transient=is_not_closed)
        self._progress = progress
        self._machine = Ingest(source.run_id, source.window, _msg_id, _subject)
        self._refused: tuple[Entry, Exception] | None = None
        self._trouble: Exception | None = None  # how the newest batch ended
        self._began = asyncio.get_running_loop().time()

    async def run_observed(self, observer: telemetry.Observer) -> IngestReport:
        with observer.begin(telemetry.Kind.INGEST, self._context.connection) as operation:
            try:
                return await self.run()
            finally:
                counts, stream = self._machine.counts, self._machine.stream
                facts = {
                    "jetstream_ext.ingest.batches": counts.batches,
                    "jetstream_ext.ingest.duplicates": counts.found,
                    "jetstream_ext.ingest.resent": counts.resent,
                }
                name = None if stream is None else stream.name
                operation.describe(stream=name, messages=counts.stored, attributes=facts)

    async def run(self) -> IngestReport:
        machine, source = self._machine, self._source
        self._report_progress()
        while not (source.ended and not machine.window and machine.state is State.SENDING):
            if machine.state is State.SENDING:
                await self._send_batch()
            else:
                await self._search()
                await self._judge(self._trouble)
        machine.stop()
        self._report_progress(final=True)
        if self._refused is not None:
            entry, error = self._refused
            raise self._failure(f"was refused: {error}", entry) from error
        if source.error is not None:
            raise source.error
        return self._report()

    # -- sending ----------------------------------------------------------------------------------------------------

    async def _send_batch(self) -> None:
        """Send the window and then from the source, until it or the batch ends."""
        await self._connected()
        machine, source = self._machine, self._source
        if not machine.window:
            self._retry.reset()  # nothing waits: a lost connection before the next message says nothing about it

        clock, opened = asyncio.get_running_loop().time, math.inf

        def acked(_: BatchFlowAck) -> None:
            nonlocal opened
            opened = min(opened, clock())
            batch.clock.timeout = self._timeout  # it may be a shorter one
            self._acknowledge(batch.acked)

        again = machine.begin()
        session = self._new_session(
            handlers={BatchFlowAck: acked}, batch_id=NUID().next().decode(), timeout=self._retry.within(self._timeout)
        )
        batch = session.batch
        session.one_stream = machine.stream
        forget_stream(self._context)  # what is cached may be older than the stream that takes the batch
        trouble: Exception | None = None
        try:
            # After a refused message nothing more is read.
            if (not again or await self._send(session, iter(again))) and not source.ended:
                await self._send(session, source.entries)
            if batch.sent:
                await session.commit()
        except (UnsupportedFeatureError, BatchError, nats.errors.Error) as error:
            trouble = error
        finally:
            session.discard()
        if session.not_permitted:  # it stays refused until someone grants it
            trouble = NotPermittedError(batch.first_subject)
        if batch.end_reason is not EndReason.TIMEOUT:
            # While it was open, messages were stored, although no ack may have told of them: that time was no trouble.
            self._retry.extend(max(0.0, clock() - opened))
        if session.opened:
            machine.opened(batch.server.stream, batch.server.last_seq)
        self._acknowledge(batch.acked)
        machine.ended(
            sent=batch.sent,
            final=None if batch.ack is None else batch.ack.seq,
            stored_nothing=isinstance(trouble, NotPermittedError) or getattr(trouble, "outcome", "") == "not_stored",
            committed=trouble is None,
        )
        self._trouble = trouble
        if isinstance(trouble, NotPermittedError):
            raise self._failure(f"was refused: {trouble}") from trouble
        if batch.other and trouble is not None:  # its acknowledgements were taken for those of the stream
            machine.distrust(batch.sent)
            raise self._failure(f"was not acknowledged: {trouble}") from trouble

    async def _send(self, session: FastSession, messages: Iterator[Entry] | Pump) -> bool:
        """Send messages; return False if one was refused before it took a sequence: then it ends the run."""
        try:
            await session.send_all(messages)
        except Exception as error:
            broken = isinstance(error, BatchError | UnsupportedFeatureError | nats.errors.Error)
            if broken and not isinstance(error, ValueError):
                raise
            batch = session.batch
            self._acknowledge(batch.acked)
            unanswered = batch.sent - batch.acked
            self._refused = self._machine.window[unanswered], error
            self._source.ended = True
            self._machine.drop_unsent(unanswered)
            return False
        return True

    def _acknowledge(self, seq: int) -> None:
        if self._machine.acknowledged(seq):
            self._retry.reset()
            self._report_progress()

    async def _judge(self, trouble: Exception | None) -> None:
        """Wait before the next batch, or raise the error that ends the run."""
        waits = bool(self._machine.window)
        if trouble is None or isinstance(trouble, BatchGapError) or (self._source.ended and not waits):
            return
        if waits and (failure := await self._refusal(trouble)) is not None:
            raise failure from (trouble.__cause__ if failure is trouble else trouble)
        await self._pause(trouble)

    async def _refusal(self, trouble: Exception) -> Exception | None:
        """Return the error for a refusal that another attempt would meet again; None for any other trouble."""
        machine = self._machine
        if isinstance(trouble, _NO_FAST_INGEST):
            # During an upgrade a server that is too old may lead after one that has taken messages.
            if not machine.counts.stored and not machine.may_be_stored and isinstance(trouble, UnsupportedFeatureError):
                return trouble
            if not machine.counts.stored or not isinstance(trouble, UnsupportedFeatureError | RequiredApiLevelError):
                return self._failure(f"could not be sent: {trouble}")
        elif isinstance(trouble, NoStreamError) and await self._has_no_stream():
            return self._failure("has a subject that no stream stores")
        elif isinstance(trouble, FastPublishUnknownBatchError):
            return None  # a message of another stream: as the first one of the next batch, it gets a better answer
        elif isinstance(trouble, BatchServerError) and trouble.outcome != "unknown" and not is_transient(trouble):
            name = machine.stream.name if machine.stream is not None else ""
            refused = machine.window[0]
            expected = [refused.stream] if isinstance(refused, BatchMessage) and refused.stream else []
            advice = after_refusal(trouble.err_code, trouble.stream or name, _subject(refused), expected)
            return self._failure(f"was refused: {trouble.description}", advice=advice)
        return None

    async def _pause(self, error: Exception) -> None:
        """Wait before the next attempt, or give up."""
        if why := self._context.connection.why_silent(()):  # no answer can come
            raise self._failure(f"was not acknowledged{why}") from error
        try:
            await self._retry.pause_if_transient(error)
        except nats.errors.Error:
            why = f"no ack for {self._retry.give_up_after:g} s"
            if not is_not_closed(error):
                draining = isinstance(error, nats.errors.ConnectionDrainingError)
                why = f"the connection is {'draining' if draining else 'closed'}"
            raise self._failure(f"was not acknowledged: {why} ({error})") from error

    async def _connected(self) -> None:
        while True:
            try:
                return self._context.connection.check_usable()
            except nats.errors.Error as error:
                await self._pause(error)

    async def _has_no_stream(self) -> bool:
        """Return whether no stream has the subject, for certain; a stream without a leader does not answer either."""
        try:
            return await stream_name(self._context, _subject(self._machine.window[0]), self._timeout) is None
        except nats.errors.Error:
            return False  # no answer, or no permission to ask

    # -- searching --------------------------------------------------------------------------------------------------

    async def _search(self) -> None:
        machine = self._machine
        write = machine.write()
        if write is None:
            return machine.not_readable()
        try:
            verdict = await find_out(self._context, write, self._retry.remaining, f"run {self._source.run_id}")
        except StreamGone as gone:
            machine.gone()
            if machine.state is State.DONE:
                deleted = gone.how == "deleted"
                cause = (
                    nats.js.errors.NotFoundError()
                    if deleted
                    else StreamRecreatedError(str(gone), stream=write.before.name)
                )
                raise self._lost(gone) from cause
        except NotPermittedError:
            machine.not_readable()
        except Unknown as unknown:
            if unknown.later:
                raise self._unfound(unknown) from unknown
            machine.not_readable()
        except nats.errors.Error as error:
            await self._pause(error)
        else:
            if verdict.stored:
                self._retry.reset()
            machine.found(verdict)
            self._report_progress()

    # -- reports ----------------------------------------------------------------------------------------------------

    def _report_progress(self, *, final: bool = False) -> None:
        self._progress.report(self._machine.counts.stored, len(self._machine.window), final=final)

    def _report(self) -> IngestReport:
        counts, seconds = self._machine.counts, asyncio.get_running_loop().time() - self._began
        return IngestReport(counts.stored, counts.found, counts.resent, counts.batches, seconds, counts.in_doubt)

    def _failure(self, what: str, entry: Entry | None = None, advice: str = "") -> IngestError:
        """Return the error about `entry`, by default the oldest message of the window; it ends with `advice`."""
        machine = self._machine
        stored, in_doubt = machine.counts.stored, machine.may_be_stored
        if entry is None and machine.window:
            entry = machine.window[0]
        subject = _subject(entry) if isinstance(entry, tuple | BatchMessage) and entry else None
        on = f" (subject {subject!r})" if isinstance(subject, str) else ""
        text = f"the message at index {stored}{on} {what}"
        if stored:
            text += f"; the {'message before it is' if stored == 1 else f'{stored} messages before it are'} stored"
        elif not in_doubt:
            text += "; nothing is stored"
        if machine.counts.in_doubt:
            text += f", {machine.counts.in_doubt} of them perhaps more than once"
        if in_doubt:
            after = f" and the {in_doubt - 1} after it" if in_doubt > 1 else ""
            text += f"; it{after} may be stored"
        return IngestError(text + advice, index=stored, subject=subject, report=self._report(), in_doubt=in_doubt)

    def _unfound(self, unknown: Unknown) -> IngestError:
        """Return the error about a search that has not ended in time."""
        stored, stream = self._machine.counts.stored, self._machine.stream
        if self._machine.window or stream is None:
            return self._failure(f"was not acknowledged: {unknown}")
        text = f"stream {stream.name!r} has acknowledged {stored} messages; whether it still has them is not known: {unknown}"
        return IngestError(text, index=stored, report=self._report(), in_doubt=0)

    def _lost(self, gone: StreamGone) -> IngestError:
        """Return the error about the end of the stream that has acknowledged messages."""
        machine = self._machine
        assert machine.stream is not None
        name, sent = machine.stream.name, machine.counts.stored + machine.may_be_stored
        machine.counts.stored = machine.counts.in_doubt = 0
        text = f"stream {name!r} was {gone.how} during the run, so the messages that it had acknowledged are gone; "
        if gone.how == "deleted":
            text, sent = text + "nothing is stored", 0
        else:
            first = "message that was sent" if sent == 1 else f"{sent} messages that were sent"
            text += f"none of the {first} is known to be stored, but those that were sent since it was created are"
        return IngestError(text, index=0, report=self._report(), in_doubt=sent)


def _subject(entry: Entry) -> str:
    return entry.subject if isinstance(entry, BatchMessage) else entry[0]


def _msg_id(entry: Entry) -> str:
    """Return the id of a message that was sent, as the stream shows it."""
    return dict(message_headers(as_message(entry)))[h.MSG_ID].strip()
