"""Dead letters: to list them, to hand them back to the streams that they come from, and to drop them.

::

    note     store which letters are about to be sent, and the last sequence of each target stream
    send     publish them, each with an id of its own ── no answer ──► look for the ids behind those sequences, send the rest
    delete   delete the letters, and note that nothing is on its way

The note is a key of a bucket, fenced as a worker's position is. A call that finds the note of one that died looks for the
letters in the target streams first: what is stored there is only deleted. A look begins with a message that the target's
leader refuses, because the leader has processed by then what was sent before on the same connection. What another process has
sent, and has not arrived, has an id that the leader knows for as long as its ``duplicate_window`` lasts. If the target has
lost messages meanwhile, it is not known what it had: such letters are in doubt, and stay in the note until they are gone, or
are sent again on request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import nats.errors
import orjson
from nats.js import JetStreamContext
from nats.js.errors import APIError, NotFoundError
from nats.nuid import NUID

from jetstream_ext.client.api import Api, get_at_leader, stream_state, wait_for_sequence
from jetstream_ext.client.connection import Context, open_bucket
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.client.fenced_write import FencedWriter, RecordMovedError
from jetstream_ext.client.retry import Retry, is_transient_read
from jetstream_ext.errors import (
    BadHeaderError,
    BadSubjectError,
    BatchServerError,
    FencedError,
    HistoryUnavailableError,
    MaxPayloadError,
    ServerError,
    StreamConfigMismatchError,
    batch_refusal,
    server_error,
)
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import operation
from jetstream_ext.log.lease import encode_key
from jetstream_ext.log.offsets import OffsetStore
from jetstream_ext.log.reader import LogReader
from jetstream_ext.protocol.api import StreamState, recreated
from jetstream_ext.protocol.dead_letters import origin, sendable_headers
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.fence import mark_headers, marked_seq
from jetstream_ext.protocol.headers import EXPECTED_STREAM, MSG_ID
from jetstream_ext.protocol.numbers import json_number, json_text
from jetstream_ext.protocol.options import check_int, check_seconds, check_sequence
from jetstream_ext.protocol.subjects import check_filter, check_name, covers
from jetstream_ext.text import get_logger

_log = get_logger()

_VERSION: Final = 1
_GROUP: Final = 100  # letters under one note
# After these a letter is not stored, and will not be.
_REFUSALS: Final = (BatchServerError, BadSubjectError, BadHeaderError, MaxPayloadError)


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
        complete: Whether the subject and `headers` are all that the input had, so that it can be handed back.
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
    complete: bool

    @property
    def data(self) -> bytes:
        """The payload of the input."""
        return self.message.data


@dataclass(frozen=True, slots=True)
class Redriven:
    """What `redrive` has done.

    Attributes:
        sent: Letters that this call has handed back.
        found: Letters that an earlier call had handed back, and this one has deleted.
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
    js: JetStreamContext,
    stream: str,
    seqs: Sequence[int],
    *,
    timeout: float | None = None,
    patience: float = 30.0,
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
        StreamConfigMismatchError: The stream has ``deny_delete``; nothing was deleted.
        Exception: As for `DirectGet.get`; some of them may be deleted.

    Cancellation: Some of them may be deleted.

    Requires: permission for ``STREAM.INFO``, ``DIRECT.GET`` and ``STREAM.MSG.DELETE`` of the stream.
    """
    redriving = _Redriving(js, stream, timeout, patience)
    numbers = [check_sequence(seq, "seq") for seq in seqs]
    await redriving.check_stream()
    found: list[_Key] = []
    for seq in numbers:
        message = await redriving.get(seq)
        if message is not None and origin(message) is None:
            raise ValueError(
                f"stream {stream!r}: message {seq} on {message.subject!r} is no dead letter; nothing was deleted"
            )
        if message is not None:
            found.append(_key(message))
    for key in found:
        await redriving.delete(key)
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

    The input is published again, with its payload, its subject and its headers (without those that servers act on, whose
    names begin with ``Nats-``), and so gets a new sequence in its stream. A call that is killed at any moment, and repeated
    at any later time, hands no letter back twice. Of several calls at the same time one continues.

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
        again: Hand a letter back although an earlier call may have done so, and its copy may be gone since (see Raises).
        offsets: Where the call notes what it is about to send (one key per stream, in the bucket, which is created if it does
            not exist); None is ``OffsetStore(js)``.
        timeout: Seconds to wait for each answer; None is the context's own.
        patience: Seconds that transient errors may last.

    Raises:
        HistoryUnavailableError: An earlier call did not end, and messages were removed from the target stream since, or it was
            deleted, so that it is not known whether it had the letters that were sent. The others are handed back, and
            these stay; `keys` are their subjects. Hand them back with ``again=True``, or `drop` them.
        FencedError: Another call for this stream has begun since; it goes on.
        nats.js.errors.NoStreamResponseError, ServerError: No stream, or another one than the letter's, stores its subject, or it refuses the
            letter. This letter and those behind it stay.
        StreamConfigMismatchError: The stream has ``deny_delete`` or is a mirror, or the bucket has a TTL; nothing was sent. Or a
            target has ``no_ack``; its letter and those behind it stay.
        nats.js.errors.NotFoundError, DirectGetDisabledError: A target does not exist, or has no ``allow_direct``; its letter and
            those behind it stay.
        BadSubjectError, ValueError, TypeError: Invalid argument; nothing was sent.
        Exception: Transient errors lasted longer than `patience`. Letters that may be sent are found by the next call.

    Cancellation: Safe, as a crash is: the next call finds out what was sent.

    Requires: nats-server 2.11; ``allow_direct`` on all these streams; permission for ``STREAM.INFO``, ``STREAM.MSG.GET`` and
        ``DIRECT.GET`` of them, for ``STREAM.MSG.DELETE`` of the letters' stream, and for the inputs' subjects; what `OffsetStore`
        requires.
    """
    check_filter(subject)
    if to_stream is not None:
        check_name(to_stream, "stream name")
    most = None if max_messages is None else check_int(max_messages, "max_messages")
    wanted = None if seqs is None else sorted({check_sequence(seq, "seq") for seq in seqs})
    redriving = _Redriving(js, stream, timeout, patience, to_stream=to_stream, again=again)
    await redriving.check_stream()
    await redriving.resume(OffsetStore(js, timeout=timeout) if offsets is None else offsets)
    if wanted is not None:
        await redriving.send_those(subject, wanted, most)
    else:
        await redriving.send_all(subject, most)
    redriving.check()
    return Redriven(redriving.sent, redriving.found, redriving.left)


# The sequence and the time of a message, which identify it also if its stream is created again.
_Key = tuple[int, int]


def _key(message: StoredMsg) -> _Key:
    return message.seq, message.time_ns


@dataclass(frozen=True, slots=True)
class _Letter:
    """A dead letter that is handed back."""

    seq: int
    time_ns: int
    target: str
    subject: str
    created: str  # the target, when the letter was noted for the first time
    base: int  # its last sequence then
    again: str  # of the call that has sent it again although it was in doubt; or empty

    @property
    def key(self) -> _Key:
        return self.seq, self.time_ns


class _Redriving:
    """One call."""

    def __init__(
        self,
        js: JetStreamContext,
        stream: str,
        timeout: float | None,
        patience: float,
        *,
        to_stream: str | None = None,
        again: bool = False,
    ) -> None:
        check_name(stream, "stream name")
        self.sent: int = 0
        self.found: int = 0
        self.left: int = 0
        self._js = js
        self._stream = stream
        self._context = Context(js)
        self._timeout = self._context.resolve_timeout(timeout)
        self._patience = check_seconds(patience, "patience")
        self._to_stream = to_stream
        self._again = again
        self._last_seq = 0
        self._writer: FencedWriter
        # Letters of which it is not known whether they were sent; every note has them.
        self._doubtful: dict[_Key, _Letter] = {}
        self._wanted: dict[_Key, _Letter] = {}  # those of them that this call was to hand back
        self._id = NUID().next().decode()
        self._notes = 0

    async def check_stream(self) -> None:
        state = await self._state(self._stream)
        state.check_direct_reads(self._context.connection.server_version)
        if state.config.get("deny_delete"):
            raise StreamConfigMismatchError(
                f"stream {self._stream!r} has deny_delete, so its dead letters cannot be deleted; nothing was sent or deleted",
                diff={"deny_delete": (False, True)},
            )
        if state.origin:
            raise StreamConfigMismatchError(
                f"stream {self._stream!r} is a mirror, and deleting its copies leaves the dead letters in stream "
                f"{state.origin.get('name')!r}; name that one; nothing was sent or deleted",
                diff={"mirror": (None, state.origin.get("name"))},
            )
        self._last_seq = state.last_seq

    # -- the note -----------------------------------------------------------------------------------------------------

    async def resume(self, offsets: OffsetStore) -> None:
        """Find out what an earlier call has sent, and delete it."""
        await Retry(self._patience).call(offsets.create)
        bucket = Bucket(open_bucket(offsets.context, offsets.bucket), self._timeout)
        self._writer = FencedWriter(
            bucket.context,
            bucket.stream,
            bucket.subject(encode_key("redrive", self._stream)),
            name=f"redrive of stream {self._stream!r}",
            timeout=self._timeout,
            patience=self._patience,
        )
        max_age = (await self._state(bucket.stream)).max_age
        if max_age:
            raise StreamConfigMismatchError(
                f"bucket {offsets.bucket!r} forgets its keys after {max_age}, and so what a redrive has noted: dead letters would be "
                "handed back twice; use another bucket (offsets=); nothing was sent",
                diff={"max_age": (None, max_age)},
            )
        stored = await self._writer.read()
        if stored is None or operation(stored.headers)[0] != "PUT":
            return
        noted: list[_Letter] = []
        for letter in self._decode(stored):
            message = await self.get(letter.seq)
            if message is not None and _key(message) == letter.key:  # else it was sent and deleted, or dropped
                noted.append(letter)
        await self._store_note(noted)  # the other call, if it runs, sends nothing after what it is sending
        found = await self._look_patiently(noted)
        for letter in found:
            await self.delete(letter.key)
        self.found = len(found)
        await self._store_note([])

    async def _look_patiently(self, letters: Sequence[_Letter]) -> set[_Letter]:
        """As `_look`; if a target cannot be read, its letters are in doubt and hold up no others."""
        found: set[_Letter] = set()
        for target in sorted({letter.target for letter in letters}):
            mine = [letter for letter in letters if letter.target == target]
            look = Retry(self._patience, transient=is_transient_read)
            try:
                found |= await look.call(partial(self._look, mine))
            except nats.errors.Error as error:
                if not self._context.connection.usable:
                    raise
                _log.warning("stream %r: it is not known what stream %r has: %s", self._stream, target, error)
                self._doubtful |= {letter.key: letter for letter in mine}
        return found

    def _decode(self, stored: StoredMsg) -> list[_Letter]:
        try:
            body = orjson.loads(stored.data)
            if json_number(body["v"], "v") == _VERSION:
                return [
                    _Letter(
                        json_number(seq, "seq", low=1),
                        json_number(time_ns, "time"),
                        json_text(target, "stream"),
                        json_text(subject, "subject"),
                        json_text(created, "created"),
                        json_number(base, "base"),
                        json_text(again, "again"),
                    )
                    for seq, time_ns, target, subject, created, base, again in body["letters"]
                ]
        except (KeyError, TypeError, ValueError):
            pass
        raise ValueError(
            f"redrive of stream {self._stream!r}: {stored.subject!r} has a value that no redrive writes ({stored.data[:80]!r}); "
            "nothing was sent; delete the key if another program has written it"
        )

    async def _store_note(self, letters: Sequence[_Letter]) -> None:
        self._notes += 1
        noted = self._doubtful | {letter.key: letter for letter in letters}
        body: dict[str, Any] = {
            "v": _VERSION,
            "writer": self._id,
            "number": self._notes,
            "letters": [
                [it.seq, it.time_ns, it.target, it.subject, it.created, it.base, it.again] for it in noted.values()
            ],
        }
        try:
            await self._writer.store([], orjson.dumps(body))
        except RecordMovedError as moved:
            raise FencedError(
                f"redrive of stream {self._stream!r}: another call has begun since; stop this one, which has handed back "
                f"{self.sent} dead letters",
                name=self._stream,
            ) from moved

    # -- sending ------------------------------------------------------------------------------------------------------

    async def send_all(self, subject: str, most: int | None) -> None:
        reader = LogReader(
            self._js, self._stream, subject=subject, timeout=self._timeout, patience=self._patience, on_lost="skip"
        )
        left = most
        while left is None or left > 0:
            size = _GROUP if left is None else min(_GROUP, left)
            messages = [it for it in await reader.read(size) if it.seq <= self._last_seq]
            if not messages:
                return
            before = self.sent
            await self._send_group(messages)
            if left is not None:
                left -= self.sent - before

    async def send_those(self, subject: str, seqs: Sequence[int], most: int | None) -> None:
        found: list[StoredMsg] = []
        for position, seq in enumerate(seqs, 1):
            if most is not None and self.sent >= most:
                return
            message = await self.get(seq)
            if message is not None and covers(subject, message.subject):
                found.append(message)
            size = _GROUP if most is None else min(_GROUP, most - self.sent)
            if found and (len(found) == size or position == len(seqs)):
                await self._send_group(found)
                found = []

    def check(self) -> None:
        """Raise HistoryUnavailableError if this call could not hand letters back."""
        if self._wanted:
            wanted = self._wanted.values()
            targets = ", ".join(repr(target) for target in sorted({letter.target for letter in wanted}))
            raise HistoryUnavailableError(
                f"stream {self._stream!r}: it is not known whether an earlier redrive has handed back the dead letters "
                f"{[letter.seq for letter in wanted]}, because stream {targets} has lost messages since, or cannot be read; they stay: "
                f"hand them back with again=True, or drop them; this call has handed back {self.sent} others",
                keys=tuple(dict.fromkeys(letter.subject for letter in wanted)),
            )

    async def _send_group(self, messages: Sequence[StoredMsg]) -> None:
        letters: list[_Letter] = []
        states: dict[str, StreamState] = {}
        failure: Exception | None = None
        for message in messages:
            found = origin(message)
            if found is None or not found.complete:
                self.left += 1
                _log.warning(
                    "stream %r: message %d on %r stays: it is no dead letter, or cannot be sent as it was",
                    self._stream,
                    message.seq,
                    message.subject,
                )
                continue
            target = self._to_stream or found.stream
            doubtful = self._doubtful.get(_key(message))
            if doubtful is not None and not self._again:
                self._wanted[doubtful.key] = doubtful
                continue
            try:
                if target not in states:
                    states[target] = await self._target(target)
            except Exception as error:
                failure = error
                break  # those before it are handed back
            state = states[target]
            if doubtful is not None:
                # The note keeps when it was sent first: if this call dies, the letter is in doubt as before.
                letters.append(replace(doubtful, target=target, again=self._id))
                continue
            letters.append(
                _Letter(message.seq, message.time_ns, target, found.subject, state.created, state.last_seq, again="")
            )
        if letters:
            await self._store_note(letters)
            await self._send(letters)
        if failure is not None:
            raise failure

    async def _target(self, stream: str) -> StreamState:
        """Return the state of a target; raise an error if it could not be found out later what it has stored."""
        state = await self._state(stream)
        state.check_direct_reads(self._context.connection.server_version)
        if state.config.get("no_ack"):
            raise StreamConfigMismatchError(
                f"stream {stream!r} has no_ack, so it does not say what it has stored; its dead letters stay",
                diff={"no_ack": (False, True)},
            )
        return state

    async def _send(self, letters: Sequence[_Letter]) -> None:
        """Send letters that are noted, and delete them."""
        done: list[_Letter] = []
        retry = Retry(self._patience, transient=is_transient_read)
        for letter in letters:
            unanswered = False
            while True:
                try:
                    if unanswered and await self._look([letter]):
                        stored = True
                    elif unanswered and letter.key in self._doubtful:
                        stored = False
                    else:
                        stored = await self._publish(letter)
                except Exception as error:
                    if isinstance(error, _REFUSALS):
                        if not unanswered:  # else it may still be on its way: the next call looks for it
                            await self._end(done)
                        raise
                    unanswered = True
                    await retry.pause_if_transient(error)
                    continue
                break
            retry.reset()
            if stored:
                self.sent += 1
                done.append(letter)
            elif letter.key in self._doubtful:
                self._wanted[letter.key] = letter
        await self._end(done)

    async def _end(self, done: Sequence[_Letter]) -> None:
        """Delete what was sent; what was not is no longer noted, unless it is in doubt."""
        for letter in done:
            await self.delete(letter.key)
            self._doubtful.pop(letter.key, None)
        await self._store_note([])

    async def _publish(self, letter: _Letter) -> bool:
        """Publish a letter; return False if it is gone, or if it is not known whether its target has it."""
        message = await self.get(letter.seq)
        found = None if message is None else origin(message)
        if message is None or found is None or _key(message) != letter.key:
            return False
        message_id = self._message_id(letter)
        if letter.again:  # the server must not take it for a copy of the one that may be gone
            message_id += f"/{letter.again}"
        headers = sendable_headers(found.headers) | {MSG_ID: message_id, EXPECTED_STREAM: letter.target}
        what = f"the ack of dead letter {letter.seq}"
        try:
            ack = await self._context.publish(letter.subject, message.data, headers, self._timeout, what)
        except APIError as error:
            refusal = server_error(code=error.code, err_code=error.err_code, description=error.description or "")
            if is_transient_read(refusal) or not error.err_code:
                raise
            raise batch_refusal(
                refusal,
                f"stream {self._stream!r}: dead letter {letter.seq} on {letter.subject!r} was refused, and stays with those behind "
                f"it: {refusal.description}; it goes to stream {letter.target!r}",
                outcome="not_stored",
            ) from error
        if ack.duplicate:
            copy = await get_at_leader(self._context, letter.target, {"seq": ack.seq}, self._timeout)
            if copy is None or copy.headers.get(MSG_ID) != message_id:
                self._doubtful[letter.key] = letter
                return False
        return True

    def _message_id(self, letter: _Letter) -> str:
        return f"redrive:{self._stream}:{letter.seq}:{letter.time_ns}"

    # -- what was sent ------------------------------------------------------------------------------------------------

    async def _look(self, letters: Sequence[_Letter]) -> set[_Letter]:
        """Return which letters their targets have; those of which it is not known are in doubt."""
        stored: set[_Letter] = set()
        for target, created, base in {(letter.target, letter.created, letter.base) for letter in letters}:
            mine = [it for it in letters if (it.target, it.created, it.base) == (target, created, base)]
            found, complete = await self._find(target, created, base, mine)
            stored |= found
            if not complete:
                self._doubtful |= {letter.key: letter for letter in mine if letter not in found}
        return stored

    async def _find(
        self, target: str, created: str, base: int, letters: Sequence[_Letter]
    ) -> tuple[set[_Letter], bool]:
        """Return which letters a target has, and whether it has everything that was stored since they were noted."""
        try:
            state = await self._settled(target, [letter.subject for letter in letters])
        except NotFoundError:
            return set(), False
        if recreated(created, state.created) or state.last_seq < base:
            return set(), False
        if state.last_seq == base:
            return set(), True
        ids = {self._message_id(letter): letter for letter in letters}
        found: set[_Letter] = set()
        count = 0
        reads = DirectGet(self._js, target, timeout=self._timeout)
        async for message in reads.scan(seq=base + 1, up_to_seq=state.last_seq, confirm=True):
            count += 1
            if (letter := ids.get(message.headers.get(MSG_ID, "").partition("/")[0])) is not None:
                found.add(letter)
        return found, count == state.last_seq - base

    async def _settled(self, target: str, subjects: Sequence[str]) -> StreamState:
        """Return the state of a stream once it has processed what this client has sent to it.

        A message that its leader refuses tells that, on a subject that it stores. What was sent on other subjects is refused,
        because it names the target.
        """
        state = await self._state(target)
        mark = next((subject for subject in subjects if state.stores(subject)), None)
        if mark is None:
            return state
        try:
            await self._context.publish(mark, b"", mark_headers(target), self._timeout, "the refusal of a mark")
        except APIError as error:
            refusal = server_error(code=error.code, err_code=error.err_code, description=error.description or "")
            if is_transient_read(refusal) or not error.err_code:
                raise
            seq = marked_seq(refusal)
            if seq is not None:
                await wait_for_sequence(self._context, target, seq, self._timeout)
            return await self._state(target)
        raise RuntimeError(f"stream {target!r} has stored a message that expects a sequence that no stream has")

    # -- the letters' stream ------------------------------------------------------------------------------------------

    async def get(self, seq: int) -> StoredMsg | None:
        retry = Retry(self._patience)
        return await retry.call(lambda: self._get(seq))

    async def _get(self, seq: int) -> StoredMsg | None:
        return await get_at_leader(self._context, self._stream, {"seq": seq}, self._timeout)

    async def delete(self, key: _Key) -> None:
        """Delete a dead letter; another message that has its sequence now, in a stream that was created again, stays."""
        seq = key[0]

        async def attempt() -> None:
            message = await self._get(seq)
            if message is None or _key(message) != key:
                return
            try:
                body = {"seq": seq, "no_erase": True}
                await Api(self._context, self._timeout).ask(f"STREAM.MSG.DELETE.{self._stream}", body, repeat=True)
            except ServerError:
                if await self._get(seq) is not None:  # else an earlier request has deleted it
                    raise

        await Retry(self._patience).call(attempt)

    async def _state(self, stream: str) -> StreamState:
        return await Retry(self._patience).call(lambda: stream_state(self._context, stream, self._timeout))
