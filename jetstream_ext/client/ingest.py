"""`ingest`: store every message of a source exactly once, across restarts and lost connections."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from functools import partial
from typing import Final

import nats.errors
from nats.js import JetStreamContext
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError
from nats.nuid import NUID

from jetstream_ext.client import telemetry
from jetstream_ext.client.api import (
    LeaderInfo,
    ask_stream,
    check_same_stream,
    forget_streams,
    get_at_leader,
    settled_state,
    stream_name,
    stream_state,
    why_no_jetstream,
)
from jetstream_ext.client.base_connection import NotPermittedError, OtherDomainError, refused_message
from jetstream_ext.client.connection import Context
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.client.fast import FastPublisher
from jetstream_ext.client.fence import send_fence
from jetstream_ext.client.retry import Retry, is_not_closed, is_transient
from jetstream_ext.errors import (
    BatchError,
    BatchOutcomeUnknownError,
    FastPublishDisabledError,
    FastPublishMirrorError,
    IngestError,
    RequestTimeoutError,
    RequiredApiLevelError,
    ServerError,
    StreamConfigMismatchError,
    StreamRecreatedError,
    UnsupportedFeatureError,
)
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.advice import EXPLAINED, after_refusal
from jetstream_ext.protocol.api import StreamState, recreated
from jetstream_ext.protocol.atomic_wire import read_reply
from jetstream_ext.protocol.fence import mark, marked_seq
from jetstream_ext.protocol.id_search import IdSearch, Verdict
from jetstream_ext.protocol.options import (
    as_message,
    check_function,
    check_messages,
    check_not_coroutine,
    check_seconds,
    given_headers,
    has_expectation,
    message_headers,
    payload_bytes,
)
from jetstream_ext.text import get_logger, log_state
from jetstream_ext.types import BatchAck, BatchFlowAck, BatchMessage, Entry, IngestProgress, IngestReport, own_headers

MsgId = Callable[[Entry], str]
ProgressHandler = Callable[[IngestProgress], None]

_log: Final = get_logger("ingest")

_NO_FAST_INGEST: Final = (
    FastPublishDisabledError,
    FastPublishMirrorError,
    RequiredApiLevelError,
    StreamConfigMismatchError,
)
# The share of the duplicate window for which ids are trusted: servers measure it with a clock that may be set.
_TRUSTED_SHARE: Final = 0.75
_LOOKUP_TIMEOUT: Final = 2.0
# Linux's monotonic clock stops while the machine is suspended, and its servers do not; macOS's runs on.
_CLOCK: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))
# After so many questions without an answer from a server that answers pings, what is stored is taken as unknown.
_MAX_SILENCES: Final = 3
_BLOCK: Final = 10_000  # sequences of one read
_DELETED: Final = "deleted"


async def ingest(
    js: JetStreamContext,
    messages: Iterable[Entry] | AsyncIterable[Entry],
    *,
    msg_id: MsgId | None = None,
    flow: int = 100,
    max_outstanding_acks: int = 2,
    timeout: float = 60.0,
    ack_timeout: float | None = None,
    on_progress: ProgressHandler | None = None,
    progress_every: float = 0.5,
) -> IngestReport:
    """Store every message of `messages` in its stream, in order, and return a report.

    Messages are sent by fast ingest. If a batch ends early (the server was killed, its leader changed, the connection
    was lost, messages were lost, the stream is overloaded), the messages that it had not acknowledged are published
    again one by one, and another batch continues from there. Every message has a ``Nats-Msg-Id``, so that the server
    drops a second copy. If it may have forgotten the ids (after the stream's ``duplicate_window``, or after a restart),
    the stream is read first, and only what it lacks is sent again. Messages for which this proves nothing, because the
    stream has removed messages meanwhile or may not be read, are sent again too; the report counts them in `in_doubt`,
    because they may be stored more than once. Every other message is stored exactly once. If the stream is deleted during
    the run, or deleted and created again, the call fails, because the messages that it had acknowledged are gone.

    Args:
        js: nats-py's JetStream context; its prefix, domain and timeout are honoured.
        messages: ``(subject, payload)``, ``(subject, payload, headers)`` or `BatchMessage`, from an iterable or an async
            iterable, all for one stream. It is read as fast as the messages are stored; only one window is in memory. What
            it yields is copied unless it is immutable, so it may use one buffer or dict again and again.
        msg_id: Called with each message that has no ``Nats-Msg-Id``; returns its id. The default ids are a random id of
            the run and the message's place in it. With ids that are derived from the content, a second run stores only
            what the first did not. A message is known by its id, so no other publisher may use it meanwhile. Only the
            default ids prove what was stored on a stream that has removed messages.
        flow: Messages per acknowledgement to request, as for `FastPublisher`.
        max_outstanding_acks: The window, in acknowledgements (`flow` messages each), as for `FastPublisher`.
        timeout: Seconds of errors without a single stored message after which the call fails. A server that does not
            answer is an error after `ack_timeout`.
        ack_timeout: Seconds to wait for each answer of the server; None is the context's timeout.
        on_progress: A plain function, called on the loop repeatedly and at the end. Its exceptions go to the loop's
            exception handler. It may start tasks, but is not an async function.
        progress_every: The minimum number of seconds between two calls of `on_progress`.

    Returns:
        An `IngestReport`.

    Raises:
        IngestError: A message was refused (the error names it; everything before it is stored and nothing after it), the
            stream does not take fast ingest or has ``no_ack``, or no message was stored for `timeout` seconds. A permission
            that the server refuses, to publish a message or to receive answers, ends the call after `ack_timeout` at the
            latest. Or the stream was deleted during the run, or deleted and created again, after it had acknowledged
            messages: then no message is known to be stored, ``index`` is 0, and the cause is a `StreamRecreatedError` or
            nats-py's ``NotFoundError``.
        UnsupportedFeatureError: The stream's server is older than 2.14 and the stream lacks ``allow_batched``. During an
            upgrade, while the stream has it, the call waits for a newer server.
        ValueError, TypeError: An argument is out of its range or of another type.
        Exception: What `messages` or `msg_id` raises, once everything before it is stored.

    Cancellation: It is unknown whether the messages of the last window are stored.

    Requires: nats-server 2.14 and ``allow_batched`` on the stream.
    """
    for name, function in (("msg_id", msg_id), ("on_progress", on_progress)):
        if function is not None:
            check_function(function, name, "a function or None", awaited=False)
    timeout = check_seconds(timeout, "timeout")
    progress_every = check_seconds(progress_every, "progress_every", zero=True)
    ack_timeout = Context(js).resolve_timeout(ack_timeout, "ack_timeout")
    new_publisher = partial(
        _Publisher, js, flow=flow, max_outstanding_acks=max_outstanding_acks, ack_timeout=ack_timeout
    )
    source = _Source(messages, msg_id)
    try:
        run = _Ingest(js, source, new_publisher, timeout, ack_timeout, on_progress, progress_every)
        observer = telemetry.observer
        return await run.run() if observer is None else await run.run_observed(observer)
    finally:
        await source.aclose()


def elapsed() -> float:
    """Return the seconds since some fixed moment, with those in which the machine was suspended."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


class _Publisher(FastPublisher):
    _one_stream = False  # the message of another stream ends the batch, and is then published by itself

    @property
    def leader(self) -> LeaderInfo | None:
        """What was known about the stream's server when the batch was opened, before anything was sent."""
        return self._session.leader

    @property
    def final_ack(self) -> BatchAck | None:
        return self._batch.ack

    @property
    def subject(self) -> str:
        """The subject of the first message."""
        return self._batch.first_subject

    @property
    def other(self) -> str:
        """That another stream has answered as well, so that only the final ack says what is stored; or ""."""
        return self._batch.other

    def explained(self, error: Exception) -> Exception:
        """Return the error of the batch, or another one if nothing is stored because the user may not publish it."""
        return NotPermittedError(self.subject, refused_message(self.subject)) if self._session.not_permitted else error


class _Source:
    """Reads the caller's messages, gives each an id, and keeps them in `window` until they are known to be stored."""

    def __init__(self, messages: Iterable[Entry] | AsyncIterable[Entry], msg_id: MsgId | None) -> None:
        self.window: deque[Entry] = deque()
        """The messages that were read and are not known to be stored, oldest first."""
        self.ended = False
        self.error: Exception | None = None
        """The exception of the caller's iterable or `msg_id`."""
        self.run_id: str = NUID().next().decode()  # the start of the ids of this run; nothing else uses it
        self.taken = 0  # how many messages were read
        self._msg_id = msg_id
        self.entries: Iterator[Entry] | AsyncGenerator[Entry, None]
        check_messages(messages)
        if isinstance(messages, AsyncIterable):
            self.entries = self._read_async(aiter(messages))
        else:
            self.entries = self._read(iter(messages))

    def _read(self, messages: Iterator[Entry]) -> Iterator[Entry]:
        try:
            for message in messages:
                entry = self._with_id(message)
                self.window.append(entry)
                yield entry
        except Exception as error:
            self.error = error
        self.ended = True

    async def _read_async(self, messages: AsyncIterator[Entry]) -> AsyncGenerator[Entry, None]:
        try:
            async for message in messages:
                entry = self._with_id(message)
                self.window.append(entry)
                yield entry
        except Exception as error:
            self.error = error
        self.ended = True

    async def aclose(self) -> None:
        if isinstance(self.entries, AsyncGenerator):
            await self.entries.aclose()  # otherwise the loop closes it later, in a task

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


class _Ingest:
    """One run: fast-ingest batches, and single publishes of what a broken batch leaves in the window.

    A message that was sent without an answer may be stored. To send it again is safe while the server knows its id: for
    the duplicate window, in the process that stored the first copy. A restarted server knows only the ids of messages
    that the stream still has. Otherwise `_find_out` searches the stream. What it does not find was not stored before it
    began, so ids are trusted again from that moment on.
    """

    def __init__(
        self,
        js: JetStreamContext,
        source: _Source,
        new_publisher: Callable[..., _Publisher],
        timeout: float,
        ack_timeout: float,
        on_progress: ProgressHandler | None,
        progress_every: float,
    ) -> None:
        self._js = js
        self._context = Context(js)
        self._source = source
        self._window = source.window
        self._new_publisher = new_publisher
        self._longest_wait = ack_timeout
        self._on_progress = on_progress
        self._progress_every = progress_every
        self._progress_at, self._progress_stored = -math.inf, 0  # of the newest report
        self._retry = Retry(timeout, transient=is_not_closed)
        self._stored = self._duplicates = self._resent = self._batches = self._in_doubt = 0
        self._refused: tuple[Entry, Exception] | None = None
        self._name = f"run {source.run_id}"  # for the log
        self._began = asyncio.get_running_loop().time()

        self._stream: StreamState | None = None  # as it was when it was last known to be the one of the whole run
        self._witness: Entry | None = None  # the newest message that was certainly stored in that stream by then
        self._unchecked = False  # since then, another stream of this name may have taken its place
        self._base = 0  # a sequence that the stream had before any message of the window was sent
        self._newest: Entry | None = None  # the newest message that is certainly stored, once
        self._silences = 0  # questions without an answer since all were answered
        self._unanswered = 0  # how many messages of the window, from the oldest on, were sent and not answered
        self._verdicts: deque[Verdict] = deque()  # what is known about the oldest messages of the window
        self._sent_again = False  # the oldest message of the window was sent again
        self._answered = False  # and that was acknowledged, too late to know whether it is a second copy
        self._sent_at = 0.0  # no copy that is not known to be stored was stored before this time of `elapsed`,
        self._sent_to = ""  # or in another process than this one ("" is unknown)
        self._trusted_until = 0.0  # the end of the time in which ids are trusted, while
        self._trusted: str | int = ""  # the connected process or the session of the connection is this one

    async def run_observed(self, observer: telemetry.Observer) -> IngestReport:
        with observer.begin(telemetry.Kind.INGEST, self._context.connection) as operation:
            try:
                return await self.run()
            finally:
                stream = self._stream
                counts = {
                    "jetstream_ext.ingest.batches": self._batches,
                    "jetstream_ext.ingest.duplicates": self._duplicates,
                    "jetstream_ext.ingest.resent": self._resent,
                }
                operation.describe(
                    stream=None if stream is None else stream.name, messages=self._stored, attributes=counts
                )

    async def run(self) -> IngestReport:
        self._report_progress()
        while not self._source.ended or self._window:
            if self._window:
                await self._resend()
            else:
                await self._send_batch()
        if self._unchecked:
            await self._check_stream_or_give_up()
        self._report_progress(final=True)
        self._log_state("source ended", error=self._source.error or (self._refused and self._refused[1]))
        if self._refused is not None:
            entry, error = self._refused
            raise self._failure(f"was refused: {error}", entry) from error
        if self._source.error is not None:
            raise self._source.error
        return self._report()

    def _log_state(self, event: str, **fields: object) -> None:
        log_state(_log, self._name, event, stored=self._stored, waiting=len(self._window), **fields)

    def _report(self) -> IngestReport:
        seconds = asyncio.get_running_loop().time() - self._began
        return IngestReport(self._stored, self._duplicates, self._resent, self._batches, seconds, self._in_doubt)

    def _failure(self, what: str, entry: Entry | None = None, advice: str = "") -> IngestError:
        """Return the error about `entry`, by default the oldest message of the window; it ends with `advice`."""
        in_doubt = self._unanswered
        if entry is None and self._window:
            entry = self._window[0]
        subject = None
        if isinstance(entry, BatchMessage):
            subject = entry.subject
        elif isinstance(entry, tuple) and entry and isinstance(entry[0], str):
            subject = entry[0]
        on = f" (subject {subject!r})" if subject is not None else ""
        text = f"the message at index {self._stored}{on} {what}"
        if self._stored:
            before = "message before it is" if self._stored == 1 else f"{self._stored} messages before it are"
            text += f"; the {before} stored"
        elif not in_doubt:
            text += "; nothing is stored"
        if self._in_doubt:
            text += f", {self._in_doubt} of them perhaps more than once"
        if in_doubt:
            after = f" and the {in_doubt - 1} after it" if in_doubt > 1 else ""
            text += f"; it{after} may be stored"
        return IngestError(text + advice, index=self._stored, subject=subject, report=self._report(), in_doubt=in_doubt)

    def _confirm(self, count: int, *, in_doubt: bool = False) -> None:
        """Take the oldest `count` messages out of the window: they are stored, once unless they are `in_doubt`."""
        newest: Entry | None = None
        for _ in range(count):
            newest = self._window.popleft()
        for _ in range(min(count, len(self._verdicts))):
            self._verdicts.popleft()
        self._stored += count
        self._in_doubt += in_doubt
        self._unanswered = max(0, self._unanswered - count)
        if count:
            if not in_doubt:
                self._newest = newest
            self._sent_again = self._answered = False
            self._retry.reset()
        self._report_progress()

    def _report_progress(self, *, final: bool = False) -> None:
        if self._on_progress is None:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        seconds = now - self._progress_at
        if seconds < self._progress_every and not final:
            return
        rate = (self._stored - self._progress_stored) / seconds if seconds else 0.0
        self._progress_at, self._progress_stored = now, self._stored
        try:
            result: object = self._on_progress(IngestProgress(self._stored, rate, len(self._window)))
            check_not_coroutine(result, "on_progress")
        except Exception as error:
            loop.call_exception_handler({"message": "ingest: the callback on_progress raised", "exception": error})

    def _lost(self, what: str) -> IngestError:
        """Return the error about the end of the stream that has acknowledged messages; `what` happened to it."""
        assert self._stream is not None
        name, sent = self._stream.name, self._stored + self._unanswered
        self._stored = self._in_doubt = self._unanswered = 0
        text = f"stream {name!r} was {what} during the run, so the messages that it had acknowledged are gone; "
        if what == _DELETED:
            text += "nothing is stored"
        else:
            first = "message that was sent" if sent == 1 else f"{sent} messages that were sent"
            text += f"none of the {first} is known to be stored, but those that were sent since it was created are"
        return IngestError(text, index=0, report=self._report(), in_doubt=0 if what == _DELETED else sent)

    async def _pause(self, error: Exception) -> None:
        """Wait before the next attempt, or give up.

        A permission that the server has refused ends the call: it stays refused until someone grants it.
        """
        if isinstance(error, NotPermittedError):
            raise self._failure(f"was refused: {error}") from error
        if isinstance(error, OtherDomainError):
            raise self._failure(f"was not acknowledged: {error}") from error
        silent = isinstance(error, RequestTimeoutError | BatchOutcomeUnknownError)
        if silent and (why := self._context.connection.why_silent(())):  # no answer can come
            raise self._failure(f"was not acknowledged{why}") from error
        try:
            await self._retry.pause_if_transient(error)
        except nats.errors.Error:
            why = f"no ack for {self._retry.give_up_after:g} s"
            reason = str(error)
            if type(error) is NoStreamResponseError:
                reason = f"no stream stores the subject, or the stream has no leader{why_no_jetstream(self._context)}"
            if not is_not_closed(error):
                draining = isinstance(error, nats.errors.ConnectionDrainingError)
                why = f"the connection is {'draining' if draining else 'closed'}"
            raise self._failure(f"was not acknowledged: {why} ({reason})") from error

    @property
    def _ack_timeout(self) -> float:
        """Seconds to wait for an answer: after an error, at most until the call gives up."""
        return self._retry.within(self._longest_wait)

    @property
    def _lookup_timeout(self) -> float:
        return min(self._ack_timeout, _LOOKUP_TIMEOUT)

    async def _connected(self) -> None:
        connection = self._context.connection
        while True:
            try:
                return connection.check_usable()
            except nats.errors.Error as error:
                await self._pause(error)

    # -- fast batches -------------------------------------------------------------------------------------------------

    async def _send_batch(self) -> None:
        """Send from the source until it or the batch ends; then the window holds what is not acknowledged."""
        await self._connected()
        self._retry.reset()  # nothing waits: a lost connection before the next message says nothing about it
        before = self._stored
        opened = False
        trouble: Exception | None = None
        process = self._context.connection.server_id
        # Two moments, and how many messages had been read by then. The oldest message that is not acknowledged was read,
        # and sent, after the older moment.
        older = newer = self._source.taken, elapsed()

        def acked(_: BatchFlowAck) -> None:
            nonlocal opened, older, newer
            opened = True
            self._confirm(before + publisher.ack_seq - self._stored)
            if self._stored >= newer[0]:
                older, newer = newer, (self._source.taken, elapsed())

        publisher = self._new_publisher(on_flow=acked)
        forget_streams(self._context)  # what is cached may be older than the stream that takes the batch
        self._log_state("batch begun", batch=publisher.batch_id)
        try:
            await self._send(publisher)
            if publisher.batch_seq:
                await publisher.commit_eob()
        except (UnsupportedFeatureError, BatchError, nats.errors.Error) as error:
            trouble = publisher.explained(error)
        finally:
            await publisher.discard()
            self._batches += opened
        leader = publisher.leader
        self._confirm(before + publisher.ack_seq - self._stored)
        if leader is not None and leader.stream is not None:
            if self._is_recreated(leader.stream):
                self._base = 0  # and the next check finds out whether it is another stream
            else:
                self._note(leader.stream, leader.last_seq)
        # In fail mode everything up to the final ack is stored, and nothing after it.
        ack = publisher.final_ack
        if ack is not None:
            self._base = max(self._base, ack.seq)
        elif trouble is not None and not _is_not_stored(trouble):
            self._unanswered = publisher.batch_seq - publisher.ack_seq
            self._sent_at, self._trusted_until = older[1], 0.0
            self._sent_to = process if self._stream is not None and self._is_connected_to(self._stream) else ""
        self._log_state("batch ended", batch=publisher.batch_id, unanswered=self._unanswered, error=trouble)
        if trouble is None:
            return
        if publisher.other:
            # Its acknowledgements were taken for those of the stream.
            self._stored, self._unanswered = before, publisher.batch_seq
            raise self._failure(f"was not acknowledged: {trouble}", (publisher.subject, b"")) from trouble
        self._unchecked = True
        if isinstance(trouble, (UnsupportedFeatureError, *_NO_FAST_INGEST)):
            await self._check_upgrade(trouble)
        await self._pause(trouble)

    async def _send(self, publisher: FastPublisher) -> None:
        try:
            await publisher.add_many(self._source.entries)
        except Exception as error:
            broken = isinstance(error, BatchError | UnsupportedFeatureError | nats.errors.Error)
            if broken and not isinstance(error, ValueError):
                raise
            # The message was refused before it took a sequence; everything before it is part of the batch.
            self._refused = self._window.pop(), error
            self._source.ended = True

    async def _check_upgrade(self, error: Exception) -> None:
        """Raise unless the server lacks fast ingest only for now: the stream still has the option, so others have it."""
        if isinstance(error, UnsupportedFeatureError | RequiredApiLevelError):
            try:
                state = await self._look_up()
            except nats.errors.Error:
                if self._stored:  # the stream's leader is away, as during an upgrade
                    return
            else:
                if state is not None and state.config.get("allow_batched"):
                    return
            if not self._stored and not self._unanswered and isinstance(error, UnsupportedFeatureError):
                raise error
        raise self._failure(f"could not be sent: {error}") from error

    # -- single messages ----------------------------------------------------------------------------------------------

    async def _resend(self) -> None:
        """Publish the messages of the window that are not stored, one at a time.

        That keeps the order, and if one is refused nothing after it is stored.
        """
        self._log_state("single publishes begun", unanswered=self._unanswered)
        resent, checked = self._resent, False
        while self._window:
            await self._connected()
            try:
                search = self._answered or (self._unanswered and not self._ids_are_trusted())
                if search or not checked:
                    await self._check_stream()
                    checked = True
                if search:
                    await self._find_out()
            except IngestError:
                raise
            except nats.errors.Error as error:
                await self._pause(error)
                continue
            while self._verdicts and self._verdicts[0] in (Verdict.STORED, Verdict.DOUBTFUL):
                self._confirm(1, in_doubt=self._verdicts[0] is Verdict.DOUBTFUL)
            if self._window:
                await self._publish_oldest(in_doubt=bool(self._verdicts) and self._verdicts[0] is Verdict.UNKNOWN)
        self._log_state("single publishes ended", published=self._resent - resent, in_doubt=self._in_doubt)

    async def _publish_oldest(self, *, in_doubt: bool) -> None:
        """Publish the oldest message of the window, once; `in_doubt`: an earlier copy may be stored and unknown."""
        entry = self._window[0]
        message = as_message(entry)
        headers = own_headers(message_headers(message))
        once = self._publish_alone if not has_expectation(message) else self._publish_in_a_batch
        again = self._sent_again
        if self._unanswered:
            self._sent_again = True
        else:
            self._sent_at, self._sent_to, self._trusted_until = elapsed(), "", 0.0
        try:
            duplicate = await once(message, headers)
        except nats.errors.MaxPayloadError as error:  # after a reconnect the limit may be lower
            raise self._failure(f"was refused: {error}") from error
        except (UnsupportedFeatureError, *_NO_FAST_INGEST) as error:  # or the server older
            await self._check_upgrade(error)
            await self._pause(error)
        except nats.errors.Error as error:
            if isinstance(error, NoStreamResponseError) and await self._has_no_stream(message.subject):
                await self._check_stream_or_give_up()
                raise self._failure("has a subject that no stream stores") from error
            if isinstance(error, APIError) and (doubt := self._context.target().doubt(error.err_code)):
                self._unanswered = max(self._unanswered, 1)
                raise self._failure(f"was refused: {error.description}; {doubt}") from error
            if isinstance(error, APIError) and not is_transient(error):
                expected = () if message.stream is None else (message.stream,)
                stream = await self._stream_that_stores(message.subject) if error.err_code in EXPLAINED else ""
                advice = after_refusal(error.err_code, error.stream or stream, message.subject, expected)
                raise self._failure(f"was refused: {error.description}", advice=advice) from error
            if not isinstance(error, APIError | NoStreamResponseError | NotPermittedError):
                self._unanswered = max(self._unanswered, 1)
            await self._pause(error)
        else:
            self._duplicates += duplicate
            self._resent += 1
            once_only = duplicate and not again  # of several copies the server may know only the newest
            if self._unanswered and not once_only and not self._ids_are_trusted():
                self._answered = True  # `_find_out` counts the copies
                return
            self._confirm(1, in_doubt=in_doubt and not once_only)

    async def _publish_alone(self, message: BatchMessage, headers: dict[str, str]) -> bool:
        payload = payload_bytes(message.payload, "the payload on subject", message.subject)
        ack = await self._context.publish(message.subject, payload, headers, self._ack_timeout, "the ack of a message")
        return bool(ack.duplicate)

    async def _publish_in_a_batch(self, message: BatchMessage, headers: dict[str, str]) -> bool:
        """Publish a message whose expectation does not hold if the message was stored before.

        Only in a batch do servers check the id first. On a stream with one replica they refuse an ordinary message for
        its expectation.
        """
        publisher = self._new_publisher(ack_timeout=self._ack_timeout)
        try:
            await publisher.add_message(message)
            ack = await publisher.commit_eob()
        except UnsupportedFeatureError:
            if publisher.ack_seq:  # an older server has stored it as an ordinary message
                return False
            raise
        except BatchError as error:
            if (explained := publisher.explained(error)) is not error:
                raise explained from error
            raise
        finally:
            await publisher.discard()
        return ack.seq == 0  # nothing was stored

    async def _has_no_stream(self, subject: str) -> bool:
        """Return whether no stream has the subject, for certain; a stream without a leader does not answer either."""
        try:
            return await stream_name(self._context, subject, self._ack_timeout) is None
        except nats.errors.Error:
            return False  # no answer, or no permission to ask

    async def _stream_that_stores(self, subject: str) -> str:
        """Return the name of the stream that stores the subject, for an error, or "" if no server says it soon."""
        if self._stream is not None and self._stream.stores(subject):
            return self._stream.name
        try:
            return await stream_name(self._context, subject, self._lookup_timeout) or ""
        except nats.errors.Error:
            return ""

    # -- what is stored -----------------------------------------------------------------------------------------------

    def _ids_are_trusted(self) -> bool:
        """Whether the server knows the id of every copy that is stored and not known to be."""
        connection = self._context.connection
        return elapsed() < self._trusted_until and self._trusted in (connection.server_id, connection.session)

    def _is_connected_to(self, state: StreamState) -> bool:
        """Whether the connected process is the only one that stores the stream."""
        return not state.replicated and bool(state.leader) and state.leader == self._context.connection.server_name

    def _note(self, state: StreamState, seq: int) -> None:
        """Note what the stream's leader answered; it had the sequence `seq` before what is in the window was sent."""
        if self._is_recreated(state):
            self._base = 0
            if self._stored and self._stream is not None and self._stream.name == state.name:
                return  # `_check_stream` finds out whether it is another one
        self._stream, self._base, self._witness = state, max(self._base, seq), self._newest

    def _is_recreated(self, state: StreamState) -> bool:
        """Whether the stream may be another one than before, by its creation time; see `check_same_stream`."""
        return self._stream is not None and recreated(self._stream.created, state.created)

    # A stream that was deleted and created again lacks what the former one had acknowledged. A fast batch ends with its
    # stream, so only a run whose batch ended early asks.

    async def _check_stream(self) -> None:
        """Raise IngestError if the stream that has acknowledged messages is gone, or another one has its name now.

        Raise as `Api.ask` does.
        """
        before = self._stream
        if before is None or not self._stored:
            return
        try:
            state = await self._ask_stream(before.name)
            if state is None:
                return  # the client may not ask
            error = await self._why_another(before, state)
        except NotFoundError as missing:
            raise self._lost(_DELETED) from missing
        if error is not None and not await self._has_witness(state):
            raise self._lost("deleted and created again") from error
        self._stream, self._witness = state, self._newest

    async def _check_stream_or_give_up(self) -> None:
        while True:
            try:
                return await self._check_stream()
            except IngestError:
                raise
            except nats.errors.Error as error:
                try:
                    await self._retry.pause_if_transient(error)
                except nats.errors.Error:
                    return None  # everything was acknowledged

    async def _why_another(self, before: StreamState, state: StreamState) -> StreamRecreatedError | None:
        """Return why a stream counts as another one than `before`, or None if it is the same; raise as `Api.ask` does."""
        try:
            await check_same_stream(self._context, before, state, self._ack_timeout)
        except StreamRecreatedError as error:
            return error
        if before.ends or state.replicated or not state.volatile:
            return None
        text = f"stream {state.name!r} is in memory, and may have lost everything in a restart"
        return StreamRecreatedError(text, stream=state.name, expected=before.created, found=state.created)

    async def _has_witness(self, state: StreamState) -> bool:
        """Return whether the stream still has a message that it had acknowledged before: it is the same one."""
        if self._witness is None:
            return False
        wanted, last = _msg_id(self._witness), state.last_seq
        while last >= state.first_seq:
            first = max(state.first_seq, last - _BLOCK + 1)
            try:
                if any(msg_id == wanted for _, msg_id in await self._read(state, first, last)):
                    return True
            except NotPermittedError:
                return False
            last = first - 1
        return False

    async def _ask_stream(self, name: str) -> StreamState | None:
        """Return a stream as its leader reports it, or None if the client gets no answer; raise as `Api.ask` does."""
        try:
            return await stream_state(self._context, name, self._ack_timeout)
        except NotPermittedError:
            return None
        except RequestTimeoutError as late:
            if late.__cause__ is not None or not await self._never_answers():  # in an election there is an answer later
                raise
            return None

    async def _look_up(self) -> StreamState | None:
        """Return the stream as its leader reports it, or None if no stream stores the subject; raise as `Api.ask` does."""
        try:
            if self._stream is not None:
                return await stream_state(self._context, self._stream.name, self._ack_timeout)
            entry = self._window[0] if self._window else self._newest
            assert entry is not None
            return await ask_stream(self._context, _subject(entry), None, self._lookup_timeout)
        except NotFoundError:
            return None

    async def _never_answers(self) -> bool:
        """Count a question without an answer; return whether so many had none although the server answers pings."""
        try:
            await self._context.connection.ping(self._lookup_timeout)
        except nats.errors.Error:
            return False
        self._silences += 1
        return self._silences >= _MAX_SILENCES

    async def _find_out(self) -> None:
        """Find out whether the server knows the ids of the messages without an answer, or else which of them are stored."""
        connection = self._context.connection
        now, session = elapsed(), connection.session
        try:
            state = await self._look_up()
        except NotPermittedError:
            state = None
        except RequestTimeoutError as late:
            if late.__cause__ is not None or not await self._never_answers():  # in an election there is an answer later
                raise
            state = None
        process, trusted = "", math.inf
        if state is not None:
            process = connection.server_id if self._is_connected_to(state) else ""
            window = state.duplicate_window
            trusted = _TRUSTED_SHARE * window.total_seconds() if window else 0.0
            same = self._stream is not None and not self._is_recreated(state)
            if same and process and process == self._sent_to and not self._answered and now < self._sent_at + trusted:
                self._log_state("ids trusted")
                self._trusted_until, self._trusted = self._sent_at + trusted, process
                return
        verdicts = await self._search(state, process)
        if state is not None:
            self._note(state, 0)
        if self._answered and verdicts[0] is not Verdict.STORED:
            verdicts[0] = Verdict.DOUBTFUL
        known = [*self._verdicts, *[Verdict.MISSING] * (len(verdicts) - len(self._verdicts))]
        # A copy that may have been stored and removed before an earlier search is not seen by this one.
        worse = {Verdict.MISSING: Verdict.UNKNOWN, Verdict.STORED: Verdict.DOUBTFUL}
        self._verdicts = deque(
            worse.get(new, new) if old is Verdict.UNKNOWN else new for old, new in zip(known, verdicts, strict=True)
        )
        self._log_state(
            "stream searched", **{f"found_{each.name.lower()}": self._verdicts.count(each) for each in Verdict}
        )
        self._answered = False
        self._sent_at, self._sent_to = now, process
        self._trusted_until, self._trusted = now + trusted, process or session

    async def _search(self, state: StreamState | None, process: str) -> list[Verdict]:
        """Search the stream for the messages without an answer, from its end back to what was stored before them."""
        sent = [self._window[index] for index in range(max(1, self._unanswered))]
        unknown = [Verdict.UNKNOWN] * len(sent)
        if state is None:
            return unknown
        state, settled = await self._settle(state, _subject(sent[0]))
        base = self._base
        restarted = state.config.get("storage") == "memory" and (not process or process != self._sent_to)
        if restarted or state.last_seq < base or self._is_recreated(state):
            base = 0  # the stream may have begun again
        search = IdSearch(
            [_msg_id(entry) for entry in sent],
            own=f"{self._source.run_id}-",
            before="" if self._newest is None else _msg_id(self._newest),
            base=base,
            last_seq=state.last_seq,
            sent_again=self._sent_again,
            settled=settled,
        )
        try:
            while (block := search.next_block()) is not None:
                search.see(await self._read(state, *block))
        except NotPermittedError:
            return unknown
        except RequestTimeoutError as late:
            if self._retry.over:
                what = f"searching it did not end within {self._retry.give_up_after:g} s of the first error"
                raise RequestTimeoutError(f"stream {state.name!r}: {what}") from late
            if await self._never_answers():
                return unknown
            raise
        self._silences = 0
        if state.replicated:
            # A former leader that does not know its successor may have answered.
            now = await stream_state(self._context, state.name, self._ack_timeout)
            if now.leader != state.leader or not now.leader_is_certain:
                raise RequestTimeoutError(f"stream {state.name!r}: the leader changed during a read")
        return [
            verdict if state.stores(_subject(entry)) else Verdict.UNKNOWN
            for entry, verdict in zip(sent, search.verdicts(), strict=True)
        ]

    async def _settle(self, state: StreamState, subject: str) -> tuple[StreamState, bool]:
        """Wait until the leader has applied what this connection has sent; return the stream then, and whether it has.

        A copy may be in nats-py's buffer or in the stream's queue, and a reading overtakes both.
        """
        if not state.stores(subject):
            return state, False
        _, (reply,) = await send_fence(self._context, subject, [mark(state.name)], self._ack_timeout)
        refusal = read_reply(*reply)
        if isinstance(refusal, ServerError) and is_transient(refusal):
            raise refusal
        until = marked_seq(refusal)
        now = await settled_state(lambda: stream_state(self._context, state.name, self._ack_timeout), until or 0)
        if now.leader != state.leader or now.last_seq < (until or 0):
            raise RequestTimeoutError(f"stream {state.name!r}: its leader has not yet applied all that it has accepted")
        return now, until is not None

    async def _read(self, state: StreamState, first: int, last: int) -> list[tuple[int, str]]:
        """Return the sequences and ids of the stream's messages from `first` to `last`, proved by its leader."""
        self._check_time(state, first)
        if state.allows_direct:
            direct = DirectGet(self._js, state.name, timeout=self._ack_timeout)
            async with direct.scan(seq=first, up_to_seq=last, confirm=True) as messages:
                return [(message.seq, message.headers.get(h.MSG_ID, "").strip()) async for message in messages]
        found: list[tuple[int, str]] = []
        while first <= last:
            self._check_time(state, first)
            request = {"seq": first, "next_by_subj": ">"}
            next_one = await get_at_leader(self._context, state.name, request, self._ack_timeout)
            if next_one is None or next_one.seq > last:
                break
            found.append((next_one.seq, next_one.headers.get(h.MSG_ID, "").strip()))
            first = next_one.seq + 1
        return found

    def _check_time(self, state: StreamState, seq: int) -> None:
        """Raise RequestTimeoutError after the deadline: each of many reads may be answered in the last millisecond."""
        if self._retry.over:
            raise RequestTimeoutError(f"stream {state.name!r}: no time is left to read from sequence {seq}")


def _is_not_stored(error: Exception) -> bool:
    """Return whether no message of a batch that ended with `error` is stored."""
    return isinstance(error, NotPermittedError) or getattr(error, "outcome", "unknown") == "not_stored"


def _subject(entry: Entry) -> str:
    return entry.subject if isinstance(entry, BatchMessage) else entry[0]


def _msg_id(entry: Entry) -> str:
    """Return the id of a message that was sent, as the stream shows it."""
    headers = message_headers(as_message(entry))
    return dict(headers)[h.MSG_ID].strip()
