"""`ingest`: store every message of a source exactly once, across restarts and lost connections."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from functools import partial
from typing import Final

import nats.errors
from nats.js import JetStreamContext
from nats.js.errors import APIError, NoStreamResponseError
from nats.nuid import NUID

from jetstream_ext.client.api import stream_name
from jetstream_ext.client.connection import Context
from jetstream_ext.client.fast import FastPublisher
from jetstream_ext.client.retry import Retry, is_not_closed, is_transient
from jetstream_ext.errors import (
    BatchError,
    FastPublishDisabledError,
    FastPublishMirrorError,
    IngestError,
    RequiredApiLevelError,
    UnsupportedFeatureError,
)
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.options import check_seconds, has_expectation, message_headers, payload_bytes
from jetstream_ext.types import BatchFlowAck, BatchMessage, Entry, IngestProgress, IngestReport

MsgId = Callable[[Entry], str]
ProgressHandler = Callable[[IngestProgress], None]

_NO_FAST_INGEST: Final = (FastPublishDisabledError, FastPublishMirrorError, RequiredApiLevelError)


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
    drops a second copy: each message is stored exactly once if the server is back within the stream's
    ``duplicate_window`` (2 minutes by default).

    Args:
        js: nats-py's JetStream context; its prefix, domain and timeout are honoured.
        messages: ``(subject, payload)``, ``(subject, payload, headers)`` or `BatchMessage`, from an iterable or an async
            iterable, all for one stream. It is read as fast as the messages are stored; only one window is in memory.
        msg_id: Called with each message that has no ``Nats-Msg-Id``; returns its id. The default ids are a random id of
            the run and the message's place in it. With ids that are derived from the content, a second run stores only
            what the first did not.
        flow: Messages per acknowledgement to request, as for `FastPublisher`.
        max_outstanding_acks: The window, in acknowledgements (`flow` messages each), as for `FastPublisher`.
        timeout: Seconds of errors without a single stored message after which the call fails.
        ack_timeout: Seconds to wait for each answer of the server; None is the context's timeout.
        on_progress: A plain function, called on the loop repeatedly and at the end. Its exceptions go to the loop's
            exception handler.
        progress_every: The minimum number of seconds between two calls of `on_progress`.

    Returns:
        An `IngestReport`.

    Raises:
        IngestError: A message was refused (the error names it; everything before it is stored and nothing after it), the
            stream does not take fast ingest, or no message was stored for `timeout` seconds.
        UnsupportedFeatureError: The server is older than 2.14.
        ValueError, TypeError: An argument is out of its range or of another type.
        Exception: What `messages` or `msg_id` raises, once everything before it is stored.

    Cancellation: It is unknown whether the messages of the last window are stored.

    Requires: nats-server 2.14 and ``allow_batched`` on the stream.
    """
    timeout = check_seconds(timeout, "timeout")
    progress_every = check_seconds(progress_every, "progress_every", zero=True)
    ack_timeout = Context(js).resolve_timeout(ack_timeout, "ack_timeout")
    new_publisher = partial(
        FastPublisher, js, flow=flow, max_outstanding_acks=max_outstanding_acks, ack_timeout=ack_timeout
    )
    source = _Source(messages, msg_id)
    try:
        return await _Ingest(js, source, new_publisher, timeout, ack_timeout, on_progress, progress_every).run()
    finally:
        await source.aclose()


class _Source:
    """Reads the caller's messages, gives each an id, and keeps them in `window` until they are known to be stored."""

    def __init__(self, messages: Iterable[Entry] | AsyncIterable[Entry], msg_id: MsgId | None) -> None:
        self.window: deque[Entry] = deque()
        """The messages that were read and are not known to be stored, oldest first."""
        self.ended = False
        self.error: Exception | None = None
        """The exception of the caller's iterable or `msg_id`."""
        self._msg_id = msg_id
        self._run = NUID().next().decode()
        self._taken = 0
        self.entries: Iterator[Entry] | AsyncGenerator[Entry, None]
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
        """Return the message with an id; anything else stays as it is, and is refused when it is sent."""
        self._taken += 1
        if type(entry) is tuple:  # nearly every message of a bulk: no object is made for it
            if len(entry) == 2:
                return entry[0], entry[1], {h.MSG_ID: self._id(entry)}
            if len(entry) == 3 and type(entry[2]) is dict and entry[2].get(h.MSG_ID):
                return entry
        try:
            message = entry if isinstance(entry, BatchMessage) else BatchMessage(*entry)
            headers = dict(message.headers or {})
        except (TypeError, ValueError):
            return entry
        if message.msg_id is not None or headers.get(h.MSG_ID):
            return entry
        if isinstance(entry, tuple) and len(entry) == 3:
            return message.subject, message.payload, headers | {h.MSG_ID: self._id(entry)}
        return dataclasses.replace(message, msg_id=self._id(entry))

    def _id(self, entry: Entry) -> str:
        if self._msg_id is None:
            return f"{self._run}-{self._taken}"
        name = self._msg_id(entry)
        if isinstance(name, str) and not name.strip():
            raise ValueError(
                f"msg_id returned an empty id for the message at index {self._taken - 1}; return a unique, non-empty str"
            )
        return name


class _Ingest:
    """One run: fast-ingest batches, and single publishes of what a broken batch leaves in the window."""

    def __init__(
        self,
        js: JetStreamContext,
        source: _Source,
        new_publisher: Callable[..., FastPublisher],
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
        self._ack_timeout = ack_timeout
        self._on_progress = on_progress
        self._progress_every = progress_every
        self._progress_at, self._progress_stored = -math.inf, 0  # of the newest report
        self._retry = Retry(timeout, transient=is_not_closed)
        self._stored = self._duplicates = self._resent = self._batches = 0
        self._refused: tuple[Entry, Exception] | None = None
        self._in_doubt = 0  # how many messages of the window, from the oldest on, were sent and not answered
        self._began = asyncio.get_running_loop().time()

    async def run(self) -> IngestReport:
        self._report_progress()
        while not self._source.ended or self._window:
            if self._window:
                await self._resend()
            else:
                await self._send_batch()
        self._report_progress(final=True)
        if self._refused is not None:
            entry, error = self._refused
            raise self._failure(f"was refused: {error}", entry) from error
        if self._source.error is not None:
            raise self._source.error
        return self._report()

    def _report(self) -> IngestReport:
        seconds = asyncio.get_running_loop().time() - self._began
        return IngestReport(self._stored, self._duplicates, self._resent, self._batches, seconds)

    def _failure(self, what: str, entry: Entry | None = None) -> IngestError:
        """Return the error about `entry`, by default the oldest message of the window."""
        in_doubt = self._in_doubt
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
        if in_doubt:
            after = f" and the {in_doubt - 1} after it" if in_doubt > 1 else ""
            text += f"; it{after} may be stored"
        return IngestError(text, index=self._stored, subject=subject, report=self._report(), in_doubt=in_doubt)

    def _confirm(self, count: int) -> None:
        """Take the oldest `count` messages out of the window: they are stored."""
        for _ in range(count):
            self._window.popleft()
        self._stored += count
        self._in_doubt = max(0, self._in_doubt - count)
        if count:
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
            self._on_progress(IngestProgress(self._stored, rate, len(self._window)))
        except Exception as error:
            loop.call_exception_handler({"message": "ingest: the callback on_progress raised", "exception": error})

    async def _pause(self, error: Exception) -> None:
        """Wait before the next attempt, or give up."""
        try:
            await self._retry.pause_if_transient(error)
        except nats.errors.Error:
            why = f"no ack for {self._retry.give_up_after:g} s" if is_not_closed(error) else "the connection is closed"
            raise self._failure(f"was not acknowledged: {why} ({error})") from error

    async def _connected(self) -> None:
        while True:
            try:
                return self._context.connection.check_usable()
            except nats.errors.Error as error:
                await self._pause(error)

    async def _send_batch(self) -> None:
        """Send from the source until it or the batch ends; then the window holds what is not acknowledged."""
        await self._connected()
        before = self._stored
        opened = False
        trouble: Exception | None = None

        def acked(_: BatchFlowAck) -> None:
            nonlocal opened
            opened = True
            self._confirm(before + publisher.ack_seq - self._stored)

        publisher = self._new_publisher(on_flow=acked)
        try:
            await self._send(publisher)
            if publisher.batch_seq:
                await publisher.commit_eob()
        except (UnsupportedFeatureError, BatchError, nats.errors.Error) as error:
            if self._stored == 0 and isinstance(error, UnsupportedFeatureError):
                raise
            trouble = error
        finally:
            await publisher.discard()
            self._batches += opened
        self._confirm(before + publisher.ack_seq - self._stored)
        if trouble is None:
            return
        # In fail mode everything up to the final ack is stored, and nothing after it.
        if publisher.ack is None and getattr(trouble, "outcome", "unknown") != "not_stored":
            self._in_doubt = publisher.batch_seq - publisher.ack_seq
        if isinstance(trouble, (UnsupportedFeatureError, *_NO_FAST_INGEST)):
            raise self._failure(f"could not be sent: {trouble}") from trouble
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

    async def _resend(self) -> None:
        """Publish the messages of the window one at a time.

        That keeps the order, and if one is refused nothing after it is stored.
        """
        while self._window:
            duplicate = await self._publish(self._window[0])
            self._duplicates += duplicate
            self._resent += 1
            self._confirm(1)

    async def _publish(self, entry: Entry) -> bool:
        """Publish the oldest message of the window until it is stored; return whether it was stored before."""
        message = entry if isinstance(entry, BatchMessage) else BatchMessage(*entry)
        headers = dict(message_headers(message))
        once = self._publish_alone if not has_expectation(message) else self._publish_in_a_batch
        while True:
            await self._connected()
            try:
                return await once(message, headers)
            except nats.errors.MaxPayloadError as error:  # after a reconnect the limit may be lower
                raise self._failure(f"was refused: {error}") from error
            except (UnsupportedFeatureError, *_NO_FAST_INGEST) as error:  # or the server older
                raise self._failure(f"could not be sent: {error}") from error
            except nats.errors.Error as error:
                if isinstance(error, NoStreamResponseError) and await self._has_no_stream(message.subject):
                    raise self._failure("has a subject that no stream stores") from error
                if isinstance(error, APIError) and not is_transient(error):
                    raise self._failure(f"was refused: {error.description}") from error
                if not isinstance(error, APIError | NoStreamResponseError):
                    self._in_doubt = max(self._in_doubt, 1)
                await self._pause(error)

    async def _publish_alone(self, message: BatchMessage, headers: dict[str, str]) -> bool:
        payload = payload_bytes(message.payload)
        ack = await self._context.publish(message.subject, payload, headers, self._ack_timeout, "the ack of a message")
        return bool(ack.duplicate)

    async def _publish_in_a_batch(self, message: BatchMessage, headers: dict[str, str]) -> bool:
        """Publish a message whose expectation does not hold if the message was stored before.

        Only in a batch do servers check the id first. On a stream with one replica they refuse an ordinary message for
        its expectation.
        """
        publisher = self._new_publisher()
        try:
            await publisher.add_message(message)
            ack = await publisher.commit_eob()
        finally:
            await publisher.discard()
        return ack.seq == 0  # nothing was stored

    async def _has_no_stream(self, subject: str) -> bool:
        """Return whether no stream has the subject, for certain; a stream without a leader does not answer either."""
        try:
            return await stream_name(self._context, subject, self._ack_timeout) is None
        except nats.errors.Error:
            return False  # no answer, or no permission to ask
