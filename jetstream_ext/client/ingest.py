"""Store everything a source has, exactly once, whatever happens to the server or the connection meanwhile."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import Final

import nats.errors
import nats.js.errors
from nats.js import JetStreamContext
from nats.nuid import NUID

from jetstream_ext.client.context import Context
from jetstream_ext.client.fast import FastPublisher
from jetstream_ext.errors import (
    BatchError,
    FastPublishDisabledError,
    FastPublishMirrorError,
    IngestError,
    RequiredApiLevelError,
    UnsupportedFeatureError,
)
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.options import message_headers, payload_bytes
from jetstream_ext.types import BatchFlowAck, BatchMessage, Entry, IngestProgress, IngestReport

MsgId = Callable[[Entry], str]
ProgressHandler = Callable[[IngestProgress], None]

_CLOSED_TO_FAST_INGEST: Final = (FastPublishDisabledError, FastPublishMirrorError, RequiredApiLevelError)
_CONNECTION_GONE: Final = (nats.errors.ConnectionClosedError, nats.errors.ConnectionDrainingError)
_RETRIED_CODES: Final = frozenset({429, 503})
_EXPECTATIONS: Final = frozenset({h.EXPECTED_LAST_SEQ, h.EXPECTED_LAST_SUBJECT_SEQ, h.EXPECTED_LAST_MSG_ID})
_DUPLICATE_IN_PROCESS: Final = 10158  # the first copy is on its way to the replicas
_PAUSES: Final = (0.02, 0.05, 0.1, 0.2, 0.5)
_LOOK_EVERY: Final = 0.02


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
    """Store every message of `messages` in its stream, in order, and return what was done.

    Messages go out by fast ingest. When a batch ends early (the server was killed, its leader changed, the connection
    was cut, messages were lost, the stream is overloaded), what it had not acknowledged is published again one by one,
    and another batch goes on from there. Every message carries a ``Nats-Msg-Id``, so that the second copy is dropped:
    everything is stored exactly once as long as the server is back within the stream's ``duplicate_window`` (2 minutes
    by default).

    Args:
        js: nats-py's JetStream context; its prefix, domain and timeout are honoured.
        messages: ``(subject, payload)``, ``(subject, payload, headers)`` or `BatchMessage`, from an iterable or an async
            iterable, all for one stream. It is read as fast as they are stored: what is in memory is one window.
        msg_id: Returns the ``Nats-Msg-Id`` of a message that has none; by default they are named after this run and
            their place in it. With ids that name the content, a second run stores only what the first did not.
        flow: Messages per acknowledgement to ask for, as for `FastPublisher`.
        max_outstanding_acks: Acknowledgements' worth of messages in the window, as for `FastPublisher`.
        timeout: Seconds of trouble without a single message getting through, after which it is given up.
        ack_timeout: Seconds to wait for each answer of the server; None is the context's timeout.
        on_progress: A plain function, called on the loop now and then and at the end. What it raises goes to the loop's
            exception handler.
        progress_every: Seconds between its calls, at least.

    Returns:
        The report; `IngestReport` says what each number means.

    Raises:
        IngestError: A message was refused (it is named; everything before it is stored and nothing after it), the stream
            does not take fast ingest, or nothing got through for `timeout` seconds.
        UnsupportedFeatureError: The server is older than 2.14.
        Exception: What `messages` or `msg_id` raises, once everything before it is stored.

    Cancellation: Nothing is left behind but the messages: up to a window of them may be stored or not.

    Requires: nats-server 2.14 and ``allow_batched`` on the stream.
    """
    if not (timeout > 0 and progress_every >= 0):
        raise ValueError("timeout must be over 0 seconds, progress_every 0 or more")
    run = _Ingest(
        js,
        _Source(messages, msg_id),
        lambda on_flow: FastPublisher(
            js, flow=flow, max_outstanding_acks=max_outstanding_acks, ack_timeout=ack_timeout, on_flow=on_flow
        ),
        timeout,
        ack_timeout,
        _Progress(on_progress, progress_every),
    )
    return await run.run()


class _Source:
    """What is read: every message with an id, and why there are no more."""

    def __init__(self, messages: Iterable[Entry] | AsyncIterable[Entry], msg_id: MsgId | None) -> None:
        self.ended = False
        self.error: Exception | None = None
        """What the source raised."""
        self._msg_id = msg_id
        self._run = NUID().next().decode()
        self._taken = 0
        self.sync: Iterator[Entry] | None = None
        self.asynchronous: AsyncIterator[Entry] | None = None
        if isinstance(messages, AsyncIterable):
            self.asynchronous = aiter(messages)
        else:
            self.sync = iter(messages)

    def feed(self, window: deque[Entry]) -> Iterator[Entry]:
        """Yield messages, each kept in `window` first."""
        assert self.sync is not None
        while not self.ended:
            try:
                entry = self._named(next(self.sync))
            except StopIteration:
                self.ended = True
            except Exception as error:
                self.ended, self.error = True, error
            else:
                window.append(entry)
                yield entry

    async def next(self, window: deque[Entry]) -> Entry | None:
        """Return the next message, kept in `window`; None is the end."""
        assert self.asynchronous is not None
        try:
            entry = self._named(await anext(self.asynchronous))
        except StopAsyncIteration:
            self.ended = True
            return None
        except Exception as error:
            self.ended, self.error = True, error
            return None
        window.append(entry)
        return entry

    def _named(self, entry: Entry) -> Entry:
        """Return the message with an id; what is no message stays as it is, to be refused where all are checked."""
        self._taken += 1
        if type(entry) is tuple:  # nearly every message of a bulk: no object is made for them
            if len(entry) == 2:
                return entry[0], entry[1], {h.MSG_ID: self._name(entry)}
            if len(entry) == 3 and type(entry[2]) is dict and entry[2].get(h.MSG_ID):
                return entry
        try:
            message = entry if isinstance(entry, BatchMessage) else BatchMessage(*entry)
            if message.msg_id is not None or dict(message.headers or {}).get(h.MSG_ID):
                return entry
            headers = dict(message.headers or {}) if isinstance(entry, tuple) and len(entry) == 3 else None
        except (TypeError, ValueError):
            return entry
        if headers is not None:
            return message.subject, message.payload, headers | {h.MSG_ID: self._name(entry)}
        return dataclasses.replace(message, msg_id=self._name(entry))

    def _name(self, entry: Entry) -> str:
        if self._msg_id is None:
            return f"{self._run}-{self._taken}"
        name = self._msg_id(entry)
        if isinstance(name, str) and not name.strip():
            raise ValueError(f"msg_id returned no id for message {self._taken - 1}: servers take an empty one for none")
        return name


class _Progress:
    """Tells the caller how far it is."""

    def __init__(self, handler: ProgressHandler | None, every: float) -> None:
        self._handler = handler
        self._every = every
        self._last: tuple[float, int] | None = None

    def report(self, stored: int, window: int, *, final: bool = False) -> None:
        """Report, if it is time."""
        if self._handler is None:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._last is None:
            self._last = now, 0
        then, before = self._last
        if not final and now - then < self._every:
            return
        self._last = now, stored
        rate = (stored - before) / (now - then) if now > then else 0.0
        try:
            self._handler(IngestProgress(stored, rate, window))
        except Exception as error:
            loop.call_exception_handler({"message": "on_progress of an ingest failed", "exception": error})


class _Ingest:
    """One run. `window` holds what was taken from the source and is not known to be stored, oldest first."""

    def __init__(
        self,
        context: JetStreamContext,
        source: _Source,
        new_publisher: Callable[[Callable[[BatchFlowAck], None]], FastPublisher],
        timeout: float,
        ack_timeout: float | None,
        progress: _Progress,
    ) -> None:
        self._context = context
        self._js = Context(context)
        self._source = source
        self._new_publisher = new_publisher
        self._timeout = timeout
        self._ack_timeout = self._js.timeout if ack_timeout is None else ack_timeout
        self._progress = progress
        self._window: deque[Entry] = deque()
        self._stored = self._duplicates = self._resent = self._batches = 0
        self._trouble_since: float | None = None
        self._refused: tuple[Entry, Exception] | None = None
        self._began = self._now()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def run(self) -> IngestReport:
        self._progress.report(0, 0)
        while not self._source.ended or self._window:
            if self._window:
                await self._send_again()
            else:
                await self._send_batch()
        self._progress.report(self._stored, 0, final=True)
        if self._refused is not None:
            entry, error = self._refused
            raise self._failure(f"was refused: {error}", entry) from error
        if self._source.error is not None:
            raise self._source.error
        return self._report()

    def _report(self) -> IngestReport:
        return IngestReport(self._stored, self._duplicates, self._resent, self._batches, self._now() - self._began)

    def _failure(self, what: str, entry: Entry | None) -> IngestError:
        subject = None
        if isinstance(entry, BatchMessage):
            subject = entry.subject
        elif isinstance(entry, tuple) and entry and isinstance(entry[0], str):
            subject = entry[0]
        named = f"message {self._stored}" + (f" (subject {subject!r})" if subject is not None else "")
        text = f"{named} {what}; the {self._stored} before it are stored"
        return IngestError(text, index=self._stored, subject=subject, report=self._report())

    def _confirm(self, count: int) -> None:
        """Note that the oldest `count` messages of the window are stored."""
        for _ in range(count):
            self._window.popleft()
        self._stored += count
        if count:
            self._trouble_since = None
        self._progress.report(self._stored, len(self._window))

    # -- by fast ingest -----------------------------------------------------------------------------------------

    async def _send_batch(self) -> None:
        """Send from the source until it ends or the batch does; what is in the window then is not acknowledged."""
        before = self._stored
        opened = False

        def acked(ack: BatchFlowAck) -> None:
            nonlocal opened
            opened = True
            self._confirm(before + publisher.ack_seq - self._stored)

        publisher = self._new_publisher(acked)
        try:
            await self._connected()
            await self._send(publisher)
            if publisher.batch_seq:
                await publisher.commit_eob()
        except IngestError:
            raise
        except (UnsupportedFeatureError, *_CLOSED_TO_FAST_INGEST) as error:
            if self._stored == 0 and isinstance(error, UnsupportedFeatureError):
                raise
            raise self._failure(f"could not be sent: {error}", self._window[0] if self._window else None) from error
        except (BatchError, nats.errors.Error) as error:
            self._in_trouble(error)
        finally:
            await publisher.discard()
            self._batches += opened
        # In fail mode everything up to the batch's final word is stored, and nothing after it.
        self._confirm(before + publisher.ack_seq - self._stored)
        if not self._window and self._trouble_since is not None:
            await asyncio.sleep(_PAUSES[0])

    async def _send(self, publisher: FastPublisher) -> None:
        source = self._source
        try:
            if source.sync is not None:
                await publisher.add_many(source.feed(self._window))
                return
            while (entry := await source.next(self._window)) is not None:
                await publisher.add_message(entry if isinstance(entry, BatchMessage) else BatchMessage(*entry))
        except Exception as error:
            broken = isinstance(error, BatchError | UnsupportedFeatureError | nats.errors.Error)
            if broken and not isinstance(error, ValueError):
                raise
            # A message that was refused here has no place in the batch; everything before it has.
            self._refused = self._window.pop(), error
            source.ended = True

    # -- one by one ---------------------------------------------------------------------------------------------

    async def _send_again(self) -> None:
        """Publish what is in the window, each message with an answer of its own.

        One at a time: the order is kept, and if one is refused nothing after it is stored.
        """
        while self._window:
            duplicate = await self._publish(self._window[0])
            self._resent += 1
            self._duplicates += duplicate
            self._confirm(1)

    async def _publish(self, entry: Entry) -> bool:
        """Publish one message until it is known to be stored; return whether it was already."""
        message = entry if isinstance(entry, BatchMessage) else BatchMessage(*entry)
        headers = dict(message_headers(message))
        payload = payload_bytes(message.payload)
        expects = not _EXPECTATIONS.isdisjoint(headers)
        tries = 0
        while True:
            await self._connected()
            trouble: Exception
            try:
                if expects:
                    return await self._publish_in_a_batch(message)
                ack = await self._context.publish(
                    message.subject, payload, timeout=self._ack_timeout, headers=dict(headers)
                )
                return bool(ack.duplicate)
            except nats.js.errors.NoStreamResponseError as error:
                if await self._nobody_stores(message.subject):
                    raise self._failure("has a subject that no stream listens on", entry) from error
                trouble = error
            except nats.js.errors.APIError as error:
                if error.code not in _RETRIED_CODES and error.err_code != _DUPLICATE_IN_PROCESS:
                    raise self._failure(f"was refused: {error.description}", entry) from error
                trouble = error
            except nats.errors.MaxPayloadError as error:  # the server that we are connected to now takes less
                raise self._failure(f"was refused: {error}", entry) from error
            except nats.errors.Error as error:
                trouble = error
            self._in_trouble(trouble)
            await asyncio.sleep(_PAUSES[min(tries, len(_PAUSES) - 1)])
            tries += 1

    async def _publish_in_a_batch(self, message: BatchMessage) -> bool:
        """Publish one message by itself; return whether it was there already.

        It expects something of the stream that no longer holds if it was stored the first time. Servers look at the id
        first only in a batch: on a stream with one replica they would refuse an ordinary message for its expectation.
        """
        publisher = self._new_publisher(lambda _: None)
        try:
            await publisher.add_message(message)
            ack = await publisher.commit_eob()
        finally:
            await publisher.discard()
        return ack.seq == 0  # nothing was stored

    async def _nobody_stores(self, subject: str) -> bool:
        """Whether it is certain that no stream has the subject; without a leader a stream does not listen either."""
        try:
            await self._context.find_stream_name_by_subject(subject)
        except nats.js.errors.NotFoundError:
            return True
        except (nats.errors.Error, nats.js.errors.APIError):
            pass  # nobody to ask, or we may not: it stays open
        return False

    # -- trouble ------------------------------------------------------------------------------------------------

    def _in_trouble(self, cause: Exception) -> None:
        """Note that something failed; give up if nothing got through for too long."""
        now = self._now()
        if self._trouble_since is None:
            self._trouble_since = now
        if now - self._trouble_since >= self._timeout or isinstance(cause, _CONNECTION_GONE):
            entry = self._window[0] if self._window else None
            why = "the connection is closed" if isinstance(cause, _CONNECTION_GONE) else f"for {self._timeout:g} s"
            raise self._failure(f"could not be stored: {why} ({cause})", entry) from cause

    async def _connected(self) -> None:
        """Wait until the connection is there."""
        connection = self._js.connection
        while not connection.usable:
            try:
                connection.check_usable()
            except nats.errors.Error as error:
                self._in_trouble(error)
            await asyncio.sleep(_LOOK_EVERY)  # nats-py tells only its user's own callback
