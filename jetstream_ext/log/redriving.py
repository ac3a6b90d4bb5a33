"""Dead letters: to list them, to hand them back to the streams that they come from, and to drop them.

`redrive` hands back one letter at a time. Before it sends a letter, it notes that in a key of a bucket, which is fenced as a
worker's position is, and a letter stays noted until it is deleted. A letter has a message id of its own and a *fence*: it expects
the last sequence on its subject (``Nats-Expected-Last-Subject-Sequence``) that was read before the note.

======================================= ========================================================================================
what is known of a letter               what `redrive` does
======================================= ========================================================================================
it is not noted                         read its fence, store the note, send it. Another call sends it only after a note of its
                                        own, and then this call cannot store one.
it is noted, or an attempt had no       read its fence, store the note, and look for its message id in everything that the target
answer                                  has stored since it was first noted
 the target has it                      delete it
 the target certainly does not have it  send it, with the fence from before the look
 neither is certain                     keep the letter and its note: it is in doubt
an ack says that it is stored           delete it
an ack says that it is a duplicate      delete it if the target still has the copy; otherwise it is in doubt
its fence refuses it                    begin again: another producer has stored on its subject, or an attempt has arrived
it is refused for another reason        keep it and those behind it, and raise the refusal
======================================= ========================================================================================

An attempt that is held up therefore does no harm, however late it arrives: of all attempts to send a letter, the server stores the
first one, and that changes the last sequence which the others expect. It is certain that a target does not have a letter if it is
the same stream, has the message that was its last one when the letter was noted and everything since, and its leader has no
successor (`protocol.outcome`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import orjson
from nats.js import JetStreamContext
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError
from nats.nuid import NUID

from jetstream_ext.client.api import Api, get_at_leader, stream_state
from jetstream_ext.client.connection import Context, open_bucket
from jetstream_ext.client.fenced_write import FencedWriter, RecordMovedError
from jetstream_ext.client.outcome import find_out
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
from jetstream_ext.protocol.api import StreamState, parse_time
from jetstream_ext.protocol.dead_letters import origin, sendable_headers
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.headers import EXPECTED_LAST_SUBJECT_SEQ, EXPECTED_STREAM, MSG_ID
from jetstream_ext.protocol.numbers import json_number, json_text
from jetstream_ext.protocol.options import check_int, check_seconds, check_sequence
from jetstream_ext.protocol.outcome import Messages, StreamGone, Unknown
from jetstream_ext.protocol.subjects import check_filter, check_name, covers
from jetstream_ext.text import counted, get_logger, log_state
from jetstream_ext.types import own_headers

_log = get_logger("log")

_VERSION: Final = 3
_READ: Final = 100  # messages that are read at once
# After these, this attempt to send a letter has stored nothing.
_REFUSALS: Final = (BatchServerError, BadSubjectError, BadHeaderError, MaxPayloadError, NoStreamResponseError)


@dataclass(frozen=True, slots=True)
class DeadLetterMessage:
    """A dead letter, and where it comes from.

    Attributes:
        message: The message as it is stored.
        stream: The stream of the input.
        subject: The subject of the input.
        seq: The sequence of the input in its stream.
        time: When the input was stored (aware, UTC).
        attempts: How often it was tried.
        error: The error of the last attempt.
        worker: The worker's name.
        headers: The headers of the input that can be sent again.
        cut: What the letter lacks because its stream had refused it as too large: ``data`` (all but the first 4,096 bytes, or
            everything), ``headers`` or both.
        complete: Whether `data`, the subject and `headers` are all that the input had, so that it can be handed back.
    """

    message: StoredMsg
    stream: str
    subject: str
    seq: int
    time: datetime
    attempts: int
    error: str
    worker: str
    headers: tuple[tuple[str, str], ...]
    cut: tuple[str, ...]
    complete: bool

    @property
    def data(self) -> bytes:
        """The payload of the input, or what the letter has of it (see `cut`)."""
        return self.message.data


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


def dead_letter_of(message: StoredMsg) -> DeadLetterMessage | None:
    """Return a message as a dead letter, or None if it is none."""
    found = origin(message)
    if found is None:
        return None
    seconds, nanoseconds = divmod(found.time_ns, 1_000_000_000)
    return DeadLetterMessage(
        message,
        found.stream,
        found.subject,
        found.seq,
        datetime.fromtimestamp(seconds, UTC).replace(microsecond=nanoseconds // 1000),
        found.attempts,
        found.error,
        found.worker,
        found.headers,
        found.cut,
        found.complete,
    )


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
    reader = LogReader(js, stream, subject=subject, timeout=timeout, patience=patience)
    async for message in reader:
        letter = dead_letter_of(message)
        if letter is not None:
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
    letters = _LetterStream(js, stream, timeout, patience)
    numbers = [check_sequence(seq, "seq") for seq in seqs]
    await letters.check()
    found = [message for message in [await letters.get(seq) for seq in numbers] if message is not None]
    for message in found:
        if origin(message) is None:
            raise ValueError(
                f"stream {stream!r}: message {message.seq} on {message.subject!r} is no dead letter; nothing was deleted"
            )
    for message in found:
        await letters.delete(message.seq, message.time_ns)
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
    time, hands no letter back twice: it looks in the target for what was sent, and says of which letters it cannot know that.
    Of several calls at the same time one continues. A letter that was cut (`DeadLetterMessage.cut`) stays.

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
        again: Hand a letter back although an earlier call may have done so (see Raises). A letter whose target cannot be
            read stays.
        offsets: Where the call notes what it is about to send (one key per stream, in the bucket, which is created if it does
            not exist); None is ``OffsetStore(js)``.
        timeout: Seconds to wait for each answer; None is the context's own.
        patience: Seconds that transient errors may last, a look in one target may take, and other producers may store on a
            letter's subject before each attempt to send it.

    Raises:
        HistoryUnavailableError: An earlier call did not end, or an answer was lost, and it is not known whether the target
            has the letters that were sent: it was deleted, it has lost messages since or may have, its retention is not
            ``limits``, the letters go to another stream now, or it cannot be read. The others are handed back, and these stay;
            `keys` are their subjects. Repeat the call if the target could not be read; otherwise hand them back with
            ``again=True``, or `drop` them.
        FencedError: Another call for this stream has begun since; that one continues.
        nats.js.errors.NoStreamResponseError, ServerError: No stream, or another one than the letter's, stores its subject, it refuses the
            letter, or other producers store on the subject all the time (WrongLastSequenceError). This letter and those
            behind it stay.
        StreamConfigMismatchError: The stream has ``deny_delete`` or is a mirror, or the bucket has a TTL or is in memory;
            nothing was sent. Or a target has ``no_ack``, or a ``subject_transform`` that matches the letter's subject; its
            letter and those behind it stay.
        nats.js.errors.NotFoundError: A target does not exist; its letter and those behind it stay.
        BadSubjectError, ValueError, TypeError: Invalid argument; nothing was sent.
        Exception: Transient errors lasted longer than `patience`. Letters that may be sent are found by the next call.

    Cancellation: Safe, as a crash is: the next call finds out what was sent.

    Requires: nats-server 2.11; ``allow_direct`` on the letters' stream; permission for ``STREAM.INFO`` and ``STREAM.MSG.GET`` of
        all these streams, ``DIRECT.GET`` and ``STREAM.MSG.DELETE`` of the letters' stream, and for the inputs' subjects; what
        `OffsetStore` requires. To look for letters in a target with ``allow_direct``, also ``DIRECT.GET`` of it.
    """
    check_filter(subject)
    if to_stream is not None:
        check_name(to_stream, "stream name")
    most = None if max_messages is None else check_int(max_messages, "max_messages")
    wanted = None if seqs is None else sorted({check_sequence(seq, "seq") for seq in seqs})
    letters = _LetterStream(js, stream, timeout, patience)
    redriving = _Redriving(letters, to_stream=to_stream, again=again)
    last_seq = await letters.check()
    await redriving.resume(OffsetStore(js, timeout=timeout) if offsets is None else offsets, last_seq)
    reader = LogReader(js, stream, subject=subject, timeout=timeout, patience=patience, on_lost="skip")
    while size := _READ if most is None else min(_READ, most - redriving.sent - redriving.found):
        if wanted is None:
            found = [message.seq for message in await reader.read(size) if message.seq <= last_seq]
        else:
            found, wanted = wanted[:size], wanted[size:]
        if not found:
            break
        for seq in found:
            await redriving.hand_back(seq, subject)
    return await redriving.end()


class _LetterStream:
    """The stream that the dead letters are in, at its leader; each call retries after transient errors."""

    def __init__(self, js: JetStreamContext, name: str, timeout: float | None, patience: float) -> None:
        check_name(name, "stream name")
        self.context = Context(js)
        self.name = name
        self.timeout: float = self.context.resolve_timeout(timeout)
        self.patience: float = check_seconds(patience, "patience")

    async def check(self) -> int:
        """Return the stream's last sequence; raise StreamConfigMismatchError if its letters cannot be deleted."""
        state = await self.state(self.name)
        if state.config.get("deny_delete"):
            raise StreamConfigMismatchError(
                f"stream {self.name!r} has deny_delete, so its dead letters cannot be deleted; nothing was sent or deleted",
                diff={"deny_delete": (False, True)},
            )
        if state.origin:
            raise StreamConfigMismatchError(
                f"stream {self.name!r} is a mirror, and deleting its copies leaves the dead letters in stream "
                f"{state.origin.get('name')!r}; name that one; nothing was sent or deleted",
                diff={"mirror": (None, state.origin.get("name"))},
            )
        return state.last_seq

    async def get(self, seq: int) -> StoredMsg | None:
        return await self.find(self.name, {"seq": seq})

    async def is_gone(self, seq: int, time_ns: int) -> bool:
        """Return whether a letter was deleted; its stream may have been created again, with another message there."""

        async def look() -> StoredMsg | None:
            if (message := await self.get(seq)) is not None:
                return message
            # A new leader may still have to apply the letter, and a former one may not know of it.
            state = await self.state(self.name)
            if state.last_seq < seq or not state.leader_is_certain:
                raise RequestTimeoutError(
                    f"stream {self.name!r}: its leader does not say whether dead letter {seq} is stored"
                )
            return await self.get(seq)

        message = await Retry(self.patience).call(look)
        return message is None or message.time_ns != time_ns

    async def delete(self, seq: int, time_ns: int) -> None:
        async def attempt() -> None:
            if not await self.is_gone(seq, time_ns):
                body = {"seq": seq, "no_erase": True}
                await Api(self.context, self.timeout).ask(f"STREAM.MSG.DELETE.{self.name}", body)

        # A refusal may be that of a letter which an earlier request, or another call, has deleted.
        await Retry(self.patience, transient=lambda it: is_transient(it) or isinstance(it, ServerError)).call(attempt)

    async def state(self, stream: str) -> StreamState:
        return await Retry(self.patience).call(lambda: stream_state(self.context, stream, self.timeout))

    async def find(self, stream: str, request: Mapping[str, Any]) -> StoredMsg | None:
        return await Retry(self.patience).call(lambda: get_at_leader(self.context, stream, request, self.timeout))


@dataclass(eq=False, slots=True)
class _Letter:
    """A letter that is sent, or may be.

    Attributes:
        seq, time_ns: They identify it, also if its stream is created again.
        subject: The subject of the input.
        target: The stream that it is for, as it was before the letter was sent.
        tried: It may be sent already: another call has noted it, or an attempt had no answer.
        doubt: Why it is not known whether the target has it.
    """

    seq: int
    time_ns: int
    subject: str
    target: StreamState
    tried: bool = False
    doubt: Unknown | None = None

    def encode(self) -> list[Any]:
        it = self.target
        target = [it.name, it.created, it.last_seq, it.last_time.isoformat(), it.replicated]
        return [self.seq, self.time_ns, self.subject, *target]

    @classmethod
    def decode(cls, row: Any) -> _Letter:
        seq, time_ns, subject, name, created, last_seq, last_time, replicated = row
        target = StreamState(
            json_text(name, "stream"),
            json_text(created, "created"),
            {},
            last_seq=json_number(last_seq, "last sequence"),
            last_time=parse_time(last_time),
            replicated=bool(replicated),
        )
        number, time = json_number(seq, "sequence", low=1), json_number(time_ns, "time")
        return cls(number, time, json_text(subject, "subject"), target, tried=True)


class _Redriving:
    """One call."""

    def __init__(self, letters: _LetterStream, *, to_stream: str | None, again: bool) -> None:
        self.sent: int = 0
        self.found: int = 0
        self.left: int = 0
        self._letters = letters
        self._name = f"redrive of stream {letters.name!r}"
        self._to_stream = to_stream
        self._again = again
        self._writer: FencedWriter
        self._pending: dict[tuple[int, int], _Letter] = {}  # letters that may be sent, which each note has
        self._noted = False  # whether the newest note is this call's
        self._targets: dict[str, StreamState] = {}
        self._unread: set[str] = set()  # targets that could not be read

    async def resume(self, offsets: OffsetStore, last_seq: int) -> None:
        """Read which letters earlier calls may have sent."""
        letters = self._letters
        await Retry(letters.patience).call(offsets.create)
        bucket = Bucket(open_bucket(offsets.context, offsets.bucket), letters.timeout)
        state = await letters.state(bucket.stream)
        if state.max_age or state.config.get("storage") == "memory":
            raise StreamConfigMismatchError(
                f"bucket {offsets.bucket!r} has a TTL or is in memory, so it may lose what a redrive has noted, and dead letters would "
                "be handed back twice; use another bucket (offsets=); nothing was sent",
                diff={"max_age": (None, state.max_age), "storage": ("file", state.config.get("storage"))},
            )
        self._writer = FencedWriter(
            bucket.context,
            bucket.stream,
            bucket.subject(encode_key("redrive", letters.name)),
            name=self._name,
            timeout=letters.timeout,
            patience=letters.patience,
        )
        stored = await self._writer.read()
        if stored is None or operation(stored.headers)[0] != "PUT":
            return
        try:
            noted = [_Letter.decode(row) for row in _rows(stored.data)]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"{self._name}: {stored.subject!r} has a value that this version does not write ({stored.data[:80]!r}); nothing was sent; "
                "finish the redrive with the version that has written it: the value names letters that may be sent already"
            ) from error
        for letter in noted:
            key = letter.seq, letter.time_ns
            if letter.seq > last_seq or not await letters.is_gone(*key):  # else it was handed back or dropped
                self._pending[key] = letter
        log_state(_log, self._name, "resumed", noted=len(self._pending))

    async def _note(self) -> None:
        """Store which letters may be sent; raise FencedError if another call has begun since."""
        note = {
            "v": _VERSION,
            "writer": NUID().next().decode(),
            "letters": [letter.encode() for letter in self._pending.values()],
        }
        try:
            await self._writer.store([], orjson.dumps(note))
        except RecordMovedError as moved:
            raise FencedError(
                f"{self._name}: another call has begun since; stop this one, which has handed back {self.sent} dead letters",
                name=self._letters.name,
            ) from moved
        self._noted = True

    async def hand_back(self, seq: int, subject: str) -> None:
        """Hand back the letter with a sequence, if it is still stored and has the subject."""
        message = await self._letters.get(seq)  # a reader may have got it from a replica that has not deleted it yet
        if message is None or not covers(subject, message.subject):
            return
        found = origin(message)
        if found is None or not found.complete:
            self.left += 1
            what = "stream %r: message %d on %r stays: it is no dead letter, or cannot be sent as it was"
            _log.warning(what, self._letters.name, seq, message.subject)
            return
        key = message.seq, message.time_ns
        letter = self._pending.get(key)
        if letter is None:
            target = await self._target(self._to_stream or found.stream, found.subject)
            letter = self._pending[key] = _Letter(*key, found.subject, target)
        try:
            await self._hand_back(letter, message.data, found.headers)
        except _REFUSALS:
            if not letter.tried:  # the next call need not look for it
                del self._pending[key]
                await self._note()
            raise
        if letter.doubt is None:
            await self._letters.delete(*key)
            del self._pending[key]
            log_state(_log, self._name, "letter handed back", seq=seq, sent=self.sent, found=self.found)

    async def _hand_back(self, letter: _Letter, data: bytes, headers: Iterable[tuple[str, str]]) -> None:
        """Store a letter in its target, or set its `doubt`."""
        again = self._again and letter.tried
        retry = Retry(self._letters.patience, transient=is_transient_read)
        while True:
            sent = False
            try:
                fence = await self._prepare(letter)
                sent = fence is not None
                if fence is not None and await self._publish(letter, data, headers, fence):
                    self.sent += 1
                else:
                    self.found += 1
                return
            except Unknown as doubt:
                if not again or doubt.later:
                    letter.tried, letter.doubt = True, doubt
                    return
                letter.target = await self._target(self._to_stream or letter.target.name, letter.subject)
                letter.tried = again = False
            except (WrongLastSequenceError, NoStreamResponseError) as error:
                await retry.pause_until_deadline(error)
            except Exception as error:
                if not sent or isinstance(error, _REFUSALS):
                    raise
                letter.tried = True
                await retry.pause_if_transient(error)

    async def _prepare(self, letter: _Letter) -> int | None:
        """Note a letter, and return its fence, or None if its target has the letter.

        Raises Unknown if that is not known.
        """
        name = letter.target.name
        try:
            last = await self._letters.find(name, {"last_by_subj": letter.subject})
        except Exception as error:
            if letter.tried and isinstance(error, NotFoundError):
                raise StreamGone("deleted") from error
            if letter.tried and is_transient_read(error):
                raise Unknown(f"the stream cannot be read: {error}", later=True) from error
            raise
        await self._note()
        if letter.tried and await self._is_stored(letter):
            return None
        return 0 if last is None else last.seq

    async def _is_stored(self, letter: _Letter) -> bool:
        """Look for a letter in its target; raise Unknown unless it is there, or certainly is not and will not be."""
        before = letter.target
        if before.name in self._unread:
            raise Unknown("the stream cannot be read", later=True)
        ids = (self._message_id(letter),)
        write = Messages(letter.subject, 1, before, before.last_seq, ids=ids, unique=True, known="")
        try:
            verdict = await find_out(self._letters.context, write, self._letters.patience, self._name)
        except Unknown as unknown:
            if unknown.later:
                self._unread.add(before.name)
            raise
        if verdict.stored:
            return True
        state = verdict.stream
        assert state is not None
        _check_target(state, letter.subject)
        if verdict.doubt:
            raise Unknown(verdict.doubt)
        if state.retention != "limits":
            raise Unknown(f"the stream removes messages that were consumed (retention {state.retention!r})")
        if self._to_stream not in (None, before.name):
            raise Unknown(f"an attempt may still arrive there, and the letter goes to stream {self._to_stream!r} now")
        if before.last_seq:
            last = await self._letters.find(before.name, {"seq": before.last_seq})
            same = last is not None and last.time == before.last_time
        else:
            same = not state.volatile
        if not same:
            raise Unknown(
                f"the stream may have lost its last messages, because its message {before.last_seq} of that time is gone"
            )
        return False

    async def _publish(self, letter: _Letter, data: bytes, headers: Iterable[tuple[str, str]], fence: int) -> bool:
        """Send a letter; return whether it is stored now, and not before."""
        message_id, target = self._message_id(letter), letter.target.name
        own = [(MSG_ID, message_id), (EXPECTED_STREAM, target), (EXPECTED_LAST_SUBJECT_SEQ, str(fence))]
        pairs = own_headers([*sendable_headers(headers).items(), *own])
        timeout, what = self._letters.timeout, f"the ack of dead letter {letter.seq}"
        try:
            ack = await self._letters.context.publish(letter.subject, data, pairs, timeout, what)
        except APIError as error:
            refusal = server_error(code=error.code, err_code=error.err_code, description=error.description or "")
            if is_transient_read(refusal) or not error.err_code:
                raise
            why = refusal.description
            if isinstance(refusal, WrongLastSequenceError):
                why = f"other producers store on its subject all the time ({why})"
            raise batch_refusal(
                refusal,
                f"stream {self._letters.name!r}: dead letter {letter.seq} on {letter.subject!r} was refused, and stays with those "
                f"behind it: {why}; it goes to stream {target!r}",
                outcome="not_stored",
            ) from error
        if not ack.duplicate:
            return True
        copy = await self._letters.find(target, {"seq": ack.seq})
        if copy is None or copy.headers.get(MSG_ID) != message_id:
            raise Unknown(
                f"the stream had it at sequence {ack.seq}, and refuses another one as a duplicate until its duplicate_window is over; then "
                "hand it back with again=True",
                later=True,
            )
        return False

    def _message_id(self, letter: _Letter) -> str:
        return f"redrive:{self._letters.name}:{letter.seq}:{letter.time_ns}"

    async def _target(self, name: str, subject: str) -> StreamState:
        """Return a target as it was when this call first sent to it, which is where a look begins."""
        if name not in self._targets:
            self._targets[name] = await self._letters.state(name)
        _check_target(self._targets[name], subject)
        return self._targets[name]

    async def end(self) -> Redriven:
        """Return what was done; raise HistoryUnavailableError if letters are in doubt."""
        if self._noted:
            await self._note()
        doubtful = [letter for letter in self._pending.values() if letter.doubt is not None]
        if not doubtful:
            return Redriven(self.sent, self.found, self.left)
        reasons = [
            f"{letter.seq} (stream {letter.target.name!r}: {letter.doubt}; "
            + ("repeat the call)" if letter.doubt and letter.doubt.later else "use again=True, or drop it)")
            for letter in doubtful
        ]
        raise HistoryUnavailableError(
            f"{self._name}: these dead letters stay, because it is not known whether they were handed back before: "
            f"{', '.join(reasons)}; this call has handed back {counted(self.sent, 'other')}",
            keys=tuple(dict.fromkeys(letter.subject for letter in doubtful)),
        )


def _rows(note: bytes) -> list[Any]:
    body = orjson.loads(note)
    if body["v"] != _VERSION:
        raise ValueError("another version")
    rows: list[Any] = body["letters"]
    return rows


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
