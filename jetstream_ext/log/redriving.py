"""Dead letters: to list them, to hand them back to the streams that they come from, and to drop them.

`redrive` hands back one letter at a time. Before it sends a letter, it notes that in a key of a bucket, which is fenced as a
worker's position is, and a letter stays noted until it is deleted. A letter has a message id of its own and a *fence*: it expects
the last sequence on its subject (``Nats-Expected-Last-Subject-Sequence``), which was read before the note and is part of it. So if
an attempt to send it was stored, it is the first message on its subject behind the fence.

============================================== =================================================================================
what is known of a letter                      what `redrive` does
============================================== =================================================================================
it is not noted                                read the fence, store the note, send it
it is noted, or an attempt had no answer       read the fence, and the first message behind the fence of the note
 that message is the letter                    delete it
 it is not, and the target may have lost it    raise HistoryUnavailableError
 it is not, and nothing behind the note is     store the note, send it
 missing in the target
its fence refuses it                           begin again: another producer has stored on its subject, or an attempt has arrived
============================================== =================================================================================

An attempt that is held up does no harm, however late it arrives: of all attempts to send a letter, the server stores the first one,
and that changes the last sequence which the others expect. Nothing behind a note is missing if the target has the message that was
its last one, and has removed only its oldest messages since.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final

import orjson
from nats.js import JetStreamContext
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError
from nats.nuid import NUID

from jetstream_ext.client.api import Api, get_at_leader, settled_state, stream_state
from jetstream_ext.client.connection import Context, open_bucket
from jetstream_ext.client.fenced_write import FencedWriter, RecordMovedError
from jetstream_ext.client.retry import Retry, is_transient, is_transient_read
from jetstream_ext.errors import (
    BadHeaderError,
    BadSubjectError,
    BatchServerError,
    FencedError,
    HistoryUnavailableError,
    MaxPayloadError,
    RequestTimeoutError,
    ServerError,
    StreamConfigMismatchError,
    WrongLastSequenceError,
    batch_refusal,
    server_error,
)
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import operation
from jetstream_ext.log.liveness import encode_key
from jetstream_ext.log.offsets import OffsetStore
from jetstream_ext.log.reader import LogReader
from jetstream_ext.protocol.api import StreamState, parsing
from jetstream_ext.protocol.dead_letters import DeadLetterMessage, dead_letter_of
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.headers import EXPECTED_LAST_SUBJECT_SEQ, EXPECTED_STREAM, MSG_ID, is_instruction
from jetstream_ext.protocol.options import check_int, check_seconds, check_sequence
from jetstream_ext.protocol.subjects import check_filter, check_name, covers
from jetstream_ext.text import counted, get_logger, log_state
from jetstream_ext.types import own_headers

_log = get_logger("log")

_Key = tuple[int, int]  # of a letter: its sequence and time, which another stream of the name does not have together

_VERSION: Final = 4
_READ: Final = 100  # messages that are read at once
# After these, this attempt to send a letter has stored nothing.
_REFUSALS: Final = (BatchServerError, BadSubjectError, BadHeaderError, MaxPayloadError, NoStreamResponseError)


@dataclass(frozen=True, slots=True)
class Redriven:
    """What `redrive` has done.

    Attributes:
        sent: Letters that this call has handed back.
        found: Letters that this call has deleted because their targets had them, from an earlier call or from an attempt
            without an answer.
        left: Messages that are no dead letters, or cannot be sent as they were; they stay.
    """

    sent: int
    found: int
    left: int


async def dead_letters(
    js: JetStreamContext, stream: str, subject: str, *, timeout: float | None = None, patience: float = 30.0
) -> AsyncIterator[DeadLetterMessage]:
    """Iterate over the dead letters of a stream that are stored now, the oldest first; other messages are left out.

    Args:
        js: nats-py's JetStream context.
        stream: The output stream of the workers.
        subject: The subject of `DeadLetter`, or a filter.
        timeout: Seconds to wait for each answer; None is the context's own.
        patience: Seconds that transient errors may last.

    Raises:
        BadSubjectError: A name or the filter is not valid.
        Exception: As for `LogReader`.

    Cancellation: Safe; nothing is left behind.

    Requires: What `LogReader` requires.
    """
    check_filter(subject)
    async for message in LogReader(js, stream, subject=subject, timeout=timeout, patience=patience):
        if (letter := dead_letter_of(message)) is not None:
            yield letter


async def drop(
    js: JetStreamContext, stream: str, seqs: Sequence[int], *, timeout: float | None = None, patience: float = 30.0
) -> int:
    """Delete dead letters; return how many of them were stored.

    Args:
        js: nats-py's JetStream context.
        stream: The stream that they are in.
        seqs: Their sequences in that stream. Messages that are no dead letters are refused.
        timeout: Seconds to wait for each answer; None is the context's own.
        patience: Seconds that transient errors may last.

    Raises:
        ValueError: A sequence is that of another message; nothing was deleted.
        StreamConfigMismatchError: The stream has ``deny_delete`` or is a mirror; nothing was deleted.
        Exception: As for `DirectGet.get`; some of them may be deleted.

    Cancellation: Some of them may be deleted.

    Requires: permission for ``STREAM.INFO``, ``STREAM.MSG.GET`` and ``STREAM.MSG.DELETE`` of the stream.
    """
    letters = _Letters(js, stream, timeout, patience)
    numbers = [check_sequence(seq, "seq") for seq in seqs]
    await letters.check()
    found = [
        message for message in [await letters.find(stream, {"seq": seq}) for seq in numbers] if message is not None
    ]
    for message in found:
        if dead_letter_of(message) is None:
            raise ValueError(
                f"stream {stream!r}: message {message.seq} on {message.subject!r} is no dead letter; nothing was deleted"
            )
    for message in found:
        await letters.delete((message.seq, message.time_ns))
    return len(found)


async def redrive(
    js: JetStreamContext,
    stream: str,
    subject: str,
    *,
    seqs: Sequence[int] | None = None,
    to_stream: str | None = None,
    max_messages: int | None = None,
    again: bool = False,
    offsets: OffsetStore | None = None,
    timeout: float | None = None,
    patience: float = 30.0,
) -> Redriven:
    """Hand dead letters back to the streams that they come from, each once, and delete them.

    The input is published again, with its payload, its subject, its headers as `StoredMsg.headers` has them, and a message
    id of its own, and so gets a new sequence in its stream. A call that is killed at any moment, and repeated at any later
    time, hands no letter back twice: it looks in the target for what was sent. Of several calls at the same time one
    continues. A letter that was cut (`DeadLetterMessage.cut`) stays. If a call fails at a letter, this one and those behind
    it stay.

    ::

        done = await log.redrive(js, "TOTALS", "totals-dead")

    Args:
        js: nats-py's JetStream context.
        stream: The stream that the dead letters are in.
        subject: The subject of `DeadLetter`, or a filter.
        seqs: Only the letters on `subject` with these sequences; None is all that are stored when the call begins.
        to_stream: The stream that must store them; None is the one that the input comes from. Give the origin of a mirror if
            the worker read the mirror.
        max_messages: How many to hand back at most, from 1; None is all of them.
        again: Hand a letter back although an earlier call may have done so (see Raises).
        offsets: Where the call notes what it is about to send (one key per stream, in the bucket, which is created if it does
            not exist); None is ``OffsetStore(js)``.
        timeout: Seconds to wait for each answer; None is the context's own.
        patience: Seconds that transient errors may last, and that other producers may store on a letter's subject before each
            attempt to send it.

    Raises:
        HistoryUnavailableError: An earlier call did not end, or an answer was lost, and it is not known whether the target
            has stored the letter that was sent: it does not have it, but was deleted, may have lost messages, has removed
            others than its oldest ones since, has another retention than ``limits``, or the letter goes to another stream
            now. `keys` has its subject. Hand it back with ``again=True``, or `drop` it; `seqs` leaves it out.
        FencedError: Another call for this stream has begun since; that one continues.
        nats.js.errors.NoStreamResponseError, ServerError: No stream, or another one than the letter's, stores its subject, it refuses the
            letter, or other producers store on the subject all the time (WrongLastSequenceError).
        StreamConfigMismatchError: The stream has ``deny_delete`` or is a mirror, or the bucket has a TTL or is in memory;
            nothing was sent. Or a target has ``no_ack``, or a ``subject_transform`` that matches the letter's subject.
        nats.js.errors.NotFoundError: The stream or a target does not exist.
        ResponseError: What earlier calls have noted cannot be read; nothing was sent.
        BadSubjectError, ValueError, TypeError: Invalid argument; nothing was sent.
        Exception: Transient errors lasted longer than `patience`. A letter that may be sent is found by the next call.

    Cancellation: Safe, as a crash is: the next call finds out what was sent.

    Requires: nats-server 2.11; ``allow_direct`` on the letters' stream; permission for ``STREAM.INFO`` and ``STREAM.MSG.GET`` of
        all these streams, ``DIRECT.GET`` and ``STREAM.MSG.DELETE`` of the letters' stream, and for the inputs' subjects; what
        `OffsetStore` requires.
    """
    check_filter(subject)
    if to_stream is not None:
        check_name(to_stream, "stream name")
    most = None if max_messages is None else check_int(max_messages, "max_messages")
    wanted = None if seqs is None else sorted({check_sequence(seq, "seq") for seq in seqs})
    letters = _Letters(js, stream, timeout, patience, to_stream)
    last_seq = await letters.check()
    await letters.read_notes(OffsetStore(js, timeout=timeout) if offsets is None else offsets, last_seq, again=again)
    reader = LogReader(js, stream, subject=subject, timeout=timeout, patience=patience, on_lost="skip")
    while letters.sent + letters.found != most:
        if wanted is None:
            found = [message.seq for message in await reader.read(_READ) if message.seq <= last_seq]
        else:
            found, wanted = wanted, []
        if not found:
            break
        for seq in found:
            if letters.sent + letters.found != most:
                await letters.hand_back(seq, subject)
    return Redriven(letters.sent, letters.found, letters.left)


@dataclass(frozen=True, slots=True)
class _Note:
    """A letter that may be sent.

    Attributes:
        stream: The stream that it is for.
        fence: The last sequence on its subject there; 0 is none.
        last_seq, last_time: The stream's last sequence, and when it was stored. Without one, when the stream was created.
        first_seq, holes: The stream's first sequence, and how many messages were missing behind it.
    """

    stream: str
    fence: int
    last_seq: int
    last_time: str
    first_seq: int
    holes: int


class _Letters:
    """The dead letters of a stream, and what one call does with them; the leaders of all streams are asked."""

    def __init__(
        self, js: JetStreamContext, name: str, timeout: float | None, patience: float, to_stream: str | None = None
    ) -> None:
        check_name(name, "stream name")
        self.sent: int = 0
        self.found: int = 0
        self.left: int = 0
        self._stream = name
        self._context = Context(js)
        self._timeout: float = self._context.resolve_timeout(timeout)
        self._patience: float = check_seconds(patience, "patience")
        self._to_stream = to_stream
        self._writer: FencedWriter
        self._noted: dict[_Key, _Note] = {}
        self._again: set[_Key] = set()  # may be sent again if they are in doubt

    async def find(self, stream: str, request: Mapping[str, Any]) -> StoredMsg | None:
        return await Retry(self._patience).call(lambda: get_at_leader(self._context, stream, request, self._timeout))

    async def _state(self, stream: str) -> StreamState:
        return await Retry(self._patience).call(lambda: stream_state(self._context, stream, self._timeout))

    async def check(self) -> int:
        """Return the stream's last sequence; raise StreamConfigMismatchError if its letters cannot be deleted."""
        state = await self._state(self._stream)
        mirrored = state.origin.get("name")
        if mirrored or state.config.get("deny_delete"):
            why = f"is a mirror of stream {mirrored!r}; name that one" if mirrored else "has deny_delete"
            raise StreamConfigMismatchError(
                f"stream {self._stream!r}: dead letters cannot be deleted, because it {why}; nothing was sent or deleted",
                diff={"mirror": (None, mirrored)} if mirrored else {"deny_delete": (False, True)},
            )
        return state.last_seq

    async def _is_gone(self, letter: _Key) -> bool:
        """Return whether a letter was deleted; its stream may have been created again, with another message there."""
        seq, time_ns = letter
        message = await self.find(self._stream, {"seq": seq})
        if message is None:
            # A new leader may still have to apply the letter, and a former one may not know of it.
            state = await self._state(self._stream)
            if state.last_seq < seq or not state.leader_is_certain:
                why = "its leader does not say whether dead letter"
                raise RequestTimeoutError(f"stream {self._stream!r}: {why} {seq} is stored")
            message = await self.find(self._stream, {"seq": seq})
        return message is None or message.time_ns != time_ns

    async def delete(self, letter: _Key) -> None:
        async def attempt() -> None:
            if not await self._is_gone(letter):
                body = {"seq": letter[0], "no_erase": True}
                await Api(self._context, self._timeout).ask(f"STREAM.MSG.DELETE.{self._stream}", body)

        # A refusal may be that of a letter which an earlier request, or another call, has deleted.
        await Retry(self._patience, transient=lambda it: is_transient(it) or isinstance(it, ServerError)).call(attempt)

    async def read_notes(self, offsets: OffsetStore, last_seq: int, *, again: bool) -> None:
        """Read which letters earlier calls may have sent."""
        await Retry(self._patience).call(offsets.create)
        bucket = Bucket(open_bucket(offsets.context, offsets.bucket), self._timeout)
        state = await self._state(bucket.stream)
        if state.max_age or state.config.get("storage") == "memory":
            raise StreamConfigMismatchError(
                f"bucket {offsets.bucket!r} has a TTL or is in memory, so it may lose what a redrive has noted, and dead letters would "
                "be handed back twice; use another bucket (offsets=); nothing was sent",
                diff={"max_age": (None, state.max_age), "storage": ("file", state.config.get("storage"))},
            )
        self._writer = FencedWriter(
            bucket.context,
            bucket.stream,
            bucket.subject(encode_key("redrive", self._stream)),
            name=f"redrive of stream {self._stream!r}",
            timeout=self._timeout,
            patience=self._patience,
        )
        stored = await self._writer.read()
        if stored is None or operation(stored.headers)[0] != "PUT":
            return
        with parsing(f"{self._writer.name}: the note of earlier calls on {stored.subject!r}", stored.data):
            notes = orjson.loads(stored.data)
            if notes["letters"] and notes["v"] != _VERSION:
                raise ValueError(
                    "it names letters that may be sent; finish the redrive with the version that has written it"
                )
            noted = {(int(seq), int(time_ns)): _Note(**note) for seq, time_ns, note in notes["letters"]}
        for key, note in noted.items():
            is_gone = partial(self._is_gone, key)  # it was handed back or dropped
            if key[0] > last_seq or not await Retry(self._patience).call(is_gone):
                self._noted[key] = note
        self._again = set(self._noted) if again else set()

    async def _store_notes(self) -> None:
        """Store which letters may be sent; raise FencedError if another call has begun since."""
        letters = [(*key, note) for key, note in self._noted.items()]
        notes = {"v": _VERSION, "writer": NUID().next().decode(), "letters": letters}
        try:
            await self._writer.store([], orjson.dumps(notes))
        except RecordMovedError as moved:
            raise FencedError(
                f"{self._writer.name}: another call has begun since; stop this one, which has handed back {counted(self.sent, 'letter')}",
                name=self._stream,
            ) from moved

    async def hand_back(self, seq: int, subject: str) -> None:
        """Hand back the letter with a sequence, if it is still stored and has the subject."""
        # A reader may have got it from a replica that has not deleted it yet.
        message = await self.find(self._stream, {"seq": seq})
        if message is None or not covers(subject, message.subject):
            return
        letter = dead_letter_of(message)
        if letter is None or not letter.complete:
            self.left += 1
            what = "stream %r: message %d on %r stays: it is no dead letter, or cannot be sent as it was"
            _log.warning(what, self._stream, seq, message.subject)
            return
        key = message.seq, message.time_ns
        retry = Retry(self._patience, transient=_may_succeed_later)
        while (is_new := await self._send(key, letter, retry)) is None:
            pass
        await self.delete(key)
        del self._noted[key]
        self.sent += is_new
        self.found += not is_new
        log_state(_log, self._writer.name, "letter handed back", seq=seq, sent=self.sent, found=self.found)

    async def _send(self, key: _Key, letter: DeadLetterMessage, retry: Retry) -> bool | None:
        """Send a letter, unless its target has it; return whether it is stored now and not before, or None to try again."""
        stream, message_id = self._to_stream or letter.stream, f"redrive:{self._stream}:{key[0]}:{key[1]}"
        last = await self.find(stream, {"last_by_subj": letter.subject})
        now = await self._state(stream)
        _check_target(now, letter.subject)
        fence = 0 if last is None else last.seq
        note = _Note(stream, fence, now.last_seq, now.last_time.isoformat(), now.first_seq, _holes(now))
        before = self._noted.get(key)
        if before is not None:
            doubt = await self._look(before, note, letter.subject, message_id)
            if doubt is None:
                return False
            if doubt and key not in self._again:
                raise HistoryUnavailableError(
                    f"{self._writer.name}: dead letter {key[0]} stays, with those behind it, because it is not known whether stream "
                    f"{before.stream!r} has stored it: {doubt}; hand it back with again=True, or drop it; this call has handed back "
                    f"{counted(self.sent, 'other')}",
                    keys=(letter.subject,),
                )
        self._again.discard(key)
        self._noted[key] = note
        await self._store_notes()
        try:
            return await self._publish(letter, stream, message_id, fence)
        except Exception as error:
            if before is None and isinstance(error, _REFUSALS):  # the next call need not look for it
                del self._noted[key]
                await self._store_notes()
            await retry.pause_if_transient(error)
            return None

    async def _look(self, before: _Note, note: _Note, subject: str, message_id: str) -> str | None:
        """Return None if the target has a letter that was noted, "" if it certainly has not, or why that is not known."""
        try:
            found = await self.find(before.stream, {"seq": before.fence + 1, "next_by_subj": subject})
            if found is not None and found.headers.get(MSG_ID) == message_id:
                return None
            now = await settled_state(lambda: self._state(before.stream), before.last_seq)
            time: datetime | None = now.last_time
            if now.last_seq != before.last_seq:
                last = await self.find(before.stream, {"seq": before.last_seq or 1})
                time = last and last.time
        except NotFoundError:
            return "it was deleted"
        if before.stream != note.stream:
            return f"an attempt may still arrive there, and the letter goes to stream {note.stream!r} now"
        if now.volatile and not before.last_seq:
            return "it was empty, is in memory, and may have lost what it has stored since"
        if now.retention != "limits":
            return f"it removes messages that were consumed (retention {now.retention!r})"
        if time is None or time.isoformat() != before.last_time:
            return "it was created again, or may have lost messages, because its last message of that time is gone"
        if _holes(now) and (_holes(now), now.first_seq) != (before.holes, before.first_seq):
            return "it has removed messages since then"
        if found is None and note.fence > before.fence:
            return "its leader does not say what it has stored on the subject"
        return ""

    async def _publish(self, letter: DeadLetterMessage, stream: str, message_id: str, fence: int) -> bool:
        """Store a letter, and return whether it was not stored before; after one of `_REFUSALS` it is not stored."""
        what = f"dead letter {letter.message.seq}"
        pairs = [(name, value) for name, value in letter.headers if name != MSG_ID and not is_instruction(name)]
        pairs += [(MSG_ID, message_id), (EXPECTED_STREAM, stream), (EXPECTED_LAST_SUBJECT_SEQ, str(fence))]
        headers = own_headers(pairs)
        try:
            ack = await self._context.publish(letter.subject, letter.data, headers, self._timeout, f"the ack of {what}")
        except APIError as error:
            refusal = server_error(code=error.code, err_code=error.err_code, description=error.description or "")
            if is_transient_read(refusal) or not error.err_code:
                raise
            why = refusal.description
            if isinstance(refusal, WrongLastSequenceError):
                why = f"other producers store on its subject all the time ({why})"
            raise batch_refusal(
                refusal,
                f"stream {self._stream!r}: {what} on {letter.subject!r} was refused, and stays with those behind it: {why}; it goes "
                f"to stream {stream!r}",
                outcome="not_stored",
            ) from error
        if ack.duplicate:
            copy = await self.find(stream, {"seq": ack.seq})
            if copy is not None and copy.headers.get(MSG_ID) == message_id:
                return False  # an earlier call has sent it, whose note was lost
            raise RequestTimeoutError(
                f"stream {self._stream!r}: {what} stays with those behind it: stream {stream!r} has had a copy at sequence {ack.seq}, "
                "and refuses another one until its duplicate_window is over; repeat the call then"
            )
        return True


def _may_succeed_later(error: Exception) -> bool:
    return is_transient_read(error) or isinstance(error, WrongLastSequenceError)


def _holes(state: StreamState) -> int:
    return state.last_seq - state.first_seq + 1 - state.messages


def _check_target(state: StreamState, subject: str) -> None:
    """Raise StreamConfigMismatchError unless a stream says what it stores, and compares a fence with what it stores."""
    state.check_acks()
    transform = state.config.get("subject_transform")
    if transform and covers(str(transform.get("src") or ">"), subject):
        raise StreamConfigMismatchError(
            f"stream {state.name!r} stores {subject!r} under another subject (subject_transform), so it cannot refuse a second "
            "attempt to hand a dead letter back; the letter stays",
            diff={"subject_transform": (None, transform)},
        )
