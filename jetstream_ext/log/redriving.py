"""Dead letters: to list them, to hand them back to the streams that they come from, and to drop them.

::

    note     store which letters are about to be sent, and the last message of each target stream
    send     publish them, each with a fence and an id of its own ── no answer ──► look for the ids, send the rest
    delete   delete the letters, and note what is still unclear

The note is a key of a bucket, fenced as a worker's position is. A call that finds the note of one that died looks for the
letters in the target streams first: what is stored there is only deleted. A letter stays in the note until it is sent and
deleted, so that each later look begins where the first one did.

An attempt without an answer may arrive at any later time. Therefore each letter names the last sequence on its subject
(``Nats-Expected-Last-Subject-Sequence``), read before the look that did not find it, or before the note: another call sends
only what it has noted itself, and this one cannot store a note then. Of all attempts, the server stores the first one that
arrives and refuses the others.

A look begins with a message that the target's leader refuses, because the leader has processed by then what was sent before
on the same connection. That a letter is absent is believed only of a leader that has no successor, and of a stream that has
the message which was its last one when the letter was noted, and everything since. Otherwise the letter is in doubt. It is
sent again only on request, and only if the target could be read.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

import nats.errors
from nats.js import JetStreamContext
from nats.js.errors import APIError
from nats.nuid import NUID

from jetstream_ext.client.api import (
    gather_bounded,
    get_at_leader,
    stream_state,
    wait_for_sequence,
)
from jetstream_ext.client.connection import Context, open_bucket
from jetstream_ext.client.fenced_write import FencedWriter, RecordMovedError
from jetstream_ext.client.retry import Retry, is_transient_read
from jetstream_ext.errors import (
    BadHeaderError,
    BadSubjectError,
    BatchServerError,
    ErrorCode,
    FencedError,
    HistoryUnavailableError,
    MaxPayloadError,
    StreamConfigMismatchError,
    batch_refusal,
    server_error,
)
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import operation
from jetstream_ext.log.lease import encode_key
from jetstream_ext.log.offsets import OffsetStore
from jetstream_ext.log.reader import LogReader
from jetstream_ext.log.redrive_fences import SubjectFences
from jetstream_ext.log.redrive_letters import LetterStream
from jetstream_ext.log.redrive_note import Key, NotedLetter, decode_note, encode_note, key_of, last_message
from jetstream_ext.log.redrive_search import Copy, CopySearch, Look, can_fence
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.dead_letters import origin, sendable_headers
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.headers import EXPECTED_LAST_SUBJECT_SEQ, EXPECTED_STREAM, MSG_ID
from jetstream_ext.protocol.options import check_int, check_seconds, check_sequence
from jetstream_ext.protocol.subjects import check_filter, check_name, covers
from jetstream_ext.text import counted, get_logger, log_state
from jetstream_ext.types import own_headers

_log = get_logger("log")

_GROUP: Final = 100  # letters under one note
_REFUSALS_IN_A_ROW: Final = 10  # of a letter by its fence: then other producers store on its subject all the time
_WRONG_LAST_SEQUENCE: Final = (ErrorCode.WRONG_LAST_SEQUENCE, ErrorCode.WRONG_LAST_SEQUENCE_CONSTANT)
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
        found: Letters that another call had handed back, and this one has deleted.
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
    check_name(stream, "stream name")
    context = Context(js)
    letters = LetterStream(context, stream, context.resolve_timeout(timeout), check_seconds(patience, "patience"))
    numbers = [check_sequence(seq, "seq") for seq in seqs]
    await letters.check()
    found: list[Key] = []
    for seq in numbers:
        message = await letters.get(seq)
        if message is not None and origin(message) is None:
            raise ValueError(
                f"stream {stream!r}: message {seq} on {message.subject!r} is no dead letter; nothing was deleted"
            )
        if message is not None:
            found.append(key_of(message))
    for key in found:
        await letters.delete(key)
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
    time, hands no letter back twice. Of several calls at the same time one continues.

    An attempt without an answer may be held up, by a server that is suspended for example. When it arrives after another
    attempt, the server refuses it, because each letter names the last sequence on its subject. Only within the target's
    ``duplicate_window`` is it refused in three cases: the target removes the newest message of that subject meanwhile (a
    work queue, or a limit); it has a ``subject_transform`` or ``allow_msg_counter``; or other producers store on the
    subject so often that the server has refused the letter ten times in a row for that.

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
        again: Hand a letter back although an earlier call may have done so, and its copy may be gone since (see Raises). A
            letter whose target cannot be read stays.
        offsets: Where the call notes what it is about to send (one key per stream, in the bucket, which is created if it does
            not exist); None is ``OffsetStore(js)``.
        timeout: Seconds to wait for each answer; None is the context's own.
        patience: Seconds that transient errors may last.

    Raises:
        HistoryUnavailableError: An earlier call did not end, or an answer was lost, and it is not known whether the target
            stream had the letters that were sent, because messages were removed from it since, the message that was its last one
            is gone, it was deleted, or it cannot be read. The others are handed back, and these stay; `keys` are their
            subjects. Repeat the call if the target could not be read; otherwise hand them back with ``again=True``, or
            `drop` them.
        FencedError: Another call for this stream has begun since; that one continues.
        nats.js.errors.NoStreamResponseError, ServerError: No stream, or another one than the letter's, stores its subject, or it refuses the
            letter. This letter and those behind it stay.
        StreamConfigMismatchError: The stream has ``deny_delete`` or is a mirror, or the bucket has a TTL or is in memory;
            nothing was sent. Or a target has ``no_ack``; its letter and those behind it stay.
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


class _Outcome(enum.Enum):
    """What an attempt to hand a letter back has done."""

    STORED = enum.auto()
    DUPLICATE = enum.auto()  # its target had a copy of an earlier attempt
    MOVED_ON = enum.auto()  # refused: its subject has a newer message than the fence
    FORGOTTEN = enum.auto()  # refused as the duplicate of a copy that its target has not any more
    GONE = enum.auto()  # the letter was deleted meanwhile


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
        self._letters = LetterStream(self._context, stream, self._timeout, self._patience)
        self._search = CopySearch(js, self._timeout, self._message_id)
        self._writer: FencedWriter
        # Letters that an earlier call or attempt may have sent; every note has them.
        self._suspect: dict[Key, NotedLetter] = {}
        self._looks: dict[Key, Look] = {}  # what is known about them
        self._wanted: dict[Key, NotedLetter] = {}  # those in doubt that this call was to hand back
        self._unread: set[str] = set()  # targets that could not be read when they were looked at once more
        self._fences = SubjectFences()
        self._id = NUID().next().decode()
        self._notes = 0

    async def check_stream(self) -> None:
        self._last_seq = (await self._letters.check()).last_seq

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
        self._check_bucket(offsets.bucket, await self._state(bucket.stream))
        stored = await self._writer.read()
        if stored is None or operation(stored.headers)[0] != "PUT":
            return
        noted = [letter for letter in self._decode(stored) if await self._letters.find(letter.key) is not None]
        self._suspect = {letter.key: letter for letter in noted}  # the others were sent and deleted, or dropped
        log_state(_log, f"redrive of stream {self._stream!r}", "resumed", in_doubt=len(noted))
        await self._store_note([])  # the other call, if it runs, sends nothing after what it is sending
        await self._look_patiently(noted)
        await self._store_note([])

    def _check_bucket(self, name: str, state: StreamState) -> None:
        if state.max_age:
            raise StreamConfigMismatchError(
                f"bucket {name!r} forgets its keys after {state.max_age}, and so what a redrive has noted: dead letters would be "
                "handed back twice; use another bucket (offsets=); nothing was sent",
                diff={"max_age": (None, state.max_age)},
            )
        if state.config.get("storage") == "memory":
            raise StreamConfigMismatchError(
                f"bucket {name!r} is in memory, so it forgets what a redrive has noted when its servers restart: dead letters would "
                "be handed back twice; use another bucket (offsets=); nothing was sent",
                diff={"storage": ("file", "memory")},
            )

    async def _look_patiently(self, letters: Sequence[NotedLetter]) -> set[Key]:
        """Look for copies; delete and return the letters that have one. A target that cannot be read holds up no others."""

        async def look(target: str) -> None:
            mine = [letter for letter in letters if letter.target == target]
            try:
                retry = Retry(self._patience, transient=is_transient_read)
                self._looks.update(await retry.call(lambda: self._look(mine)))
            except nats.errors.Error as error:
                if not self._context.connection.usable:
                    raise
                _log.warning("stream %r: it is not known what stream %r has: %s", self._stream, target, error)
                self._looks.update({letter.key: Look(Copy.UNREAD) for letter in mine})

        targets = sorted({letter.target for letter in letters})
        await gather_bounded(look, targets, limit=len(targets))  # all at once, so that all together take one patience
        found = {letter.key for letter in letters if self._looks[letter.key].copy is Copy.FOUND}
        for key in sorted(found):
            await self.delete(key)
            self._forget(key)
            self.found += 1
        return found

    async def _look(self, letters: Sequence[NotedLetter]) -> dict[Key, Look]:
        return await self._search.look(letters)

    def _forget(self, key: Key) -> None:
        self._suspect.pop(key, None)
        self._looks.pop(key, None)

    def _decode(self, stored: StoredMsg) -> list[NotedLetter]:
        try:
            return decode_note(stored.data)
        except ValueError as error:
            raise ValueError(
                f"redrive of stream {self._stream!r}: {stored.subject!r} has a value that no redrive writes ({stored.data[:80]!r}); "
                "nothing was sent; delete the key if another program has written it"
            ) from error

    async def _store_note(self, letters: Sequence[NotedLetter]) -> None:
        """Note letters that are about to be sent; raise FencedError if another call has begun."""
        self._notes += 1
        noted = self._suspect | {letter.key: letter for letter in letters}
        try:
            await self._writer.store([], encode_note(self._id, self._notes, noted.values()))
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
            message = await self._letters.get(seq)
            if message is not None and covers(subject, message.subject):
                found.append(message)
            size = _GROUP if most is None else min(_GROUP, most - self.sent)
            if found and (len(found) == size or position == len(seqs)):
                await self._send_group(found)
                found = []

    def check(self) -> None:
        """Raise HistoryUnavailableError if this call could not hand letters back."""
        if not self._wanted:
            return
        unread = {key for key in self._wanted if self._is_unread(key)}
        reasons: list[str] = []
        for keys, why in (
            (
                self._wanted.keys() - unread,
                "has lost messages since, or may have: hand them back with again=True, or drop them",
            ),
            (unread, "cannot be read: repeat the call, or drop them"),
        ):
            if keys:
                targets = sorted({self._wanted[key].target for key in keys})
                reasons.append(f"{sorted(seq for seq, _ in keys)}: stream {', '.join(map(repr, targets))} {why}")
        raise HistoryUnavailableError(
            f"stream {self._stream!r}: it is not known whether an earlier redrive has handed back these dead letters, which stay: "
            f"{'; '.join(reasons)}; this call has handed back {counted(self.sent, 'other')}",
            keys=tuple(dict.fromkeys(letter.subject for letter in self._wanted.values())),
        )

    def _in_doubt(self, key: Key) -> bool:
        """Return whether only a call with `again` may send a letter."""
        if key not in self._looks:
            return False
        return self._looks[key].copy is not Copy.ABSENT or bool(self._suspect[key].again)

    async def _send_group(self, messages: Sequence[StoredMsg]) -> None:
        deleted = await self._look_once_more([key_of(message) for message in messages]) if self._again else set()
        letters: list[NotedLetter] = []
        states: dict[str, StreamState] = {}
        failure: Exception | None = None
        for message in messages:
            key = key_of(message)
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
            look = self._looks.get(key)
            if key in deleted:
                continue
            if look is not None and self._in_doubt(key) and (not self._again or self._is_unread(key)):
                self._wanted[key] = self._suspect[key]
                continue
            target = self._to_stream or found.stream
            try:
                if target not in states:
                    states[target] = await self._target(target)
            except Exception as error:
                failure = error
                break  # those before it are handed back
            letters.append(self._letter(message, found.subject, target, states[target]))
        if letters:
            await self._read_fences(letters, states)
            await self._store_note(letters)
            await self._send(letters)
            log_state(_log, f"redrive of stream {self._stream!r}", "letters sent", letters=len(letters), sent=self.sent)
        if failure is not None:
            raise failure

    async def _look_once_more(self, keys: Sequence[Key]) -> set[Key]:
        """Look again for letters in doubt, before they are sent again; delete and return those that have a copy."""
        doubtful = [self._suspect[key] for key in keys if self._in_doubt(key)]
        letters = [letter for letter in doubtful if letter.target not in self._unread]
        found = await self._look_patiently(letters)
        self._unread |= {it.target for it in letters if it.key not in found and self._is_unread(it.key)}
        return found

    def _is_unread(self, key: Key) -> bool:
        return self._looks[key].copy is Copy.UNREAD

    def _letter(self, message: StoredMsg, subject: str, target: str, state: StreamState) -> NotedLetter:
        """Return a letter as it is noted before it is sent."""
        key = key_of(message)
        suspect = self._suspect.get(key)
        if suspect is None or suspect.target != target:
            again = "" if suspect is None else suspect.again
            return NotedLetter(*key, target, subject, *last_message(state), again)
        look = self._looks[key]
        if look.copy is Copy.ABSENT:
            return suspect  # a later look begins where the first one did
        # It is sent again. A later look begins behind this one. The server must not take the letter for its lost copy, but
        # for one that another call is sending.
        again = suspect.again if suspect.again and look.copy is Copy.UNPROVEN else self._id
        return replace(suspect, base=look.base, base_time=look.base_time, again=again)

    async def _read_fences(self, letters: Sequence[NotedLetter], states: Mapping[str, StreamState]) -> None:
        """Read the last sequences on the subjects of letters before these are noted, unless a look has read them.

        Another call sends a letter only after it has stored a note of its own, and then this one cannot store its note.
        """
        for target, state in states.items():
            if not can_fence(state):
                continue
            unknown: list[NotedLetter] = []
            for letter in letters:
                look = self._looks.get(letter.key)
                if letter.target != target:
                    continue
                if look is None or look.fence is None or self._suspect[letter.key].target != target:
                    unknown.append(letter)
                else:
                    self._fences.set(letter, look.fence)
            if unknown:
                fences = await self._last_sequences(unknown)
                for letter in unknown:
                    self._fences.set(letter, fences[letter.subject])

    async def _last_sequences(self, letters: Sequence[NotedLetter]) -> dict[str, int]:
        """Return the last sequence on the subject of each of some letters of one target."""
        subjects = {letter.subject for letter in letters}
        return await Retry(self._patience).call(lambda: self._search.fences(letters[0].target, subjects))

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

    async def _send(self, letters: Sequence[NotedLetter]) -> None:
        """Send letters that are noted, and delete them."""
        group, done = list(letters), list[NotedLetter]()
        for position, letter in enumerate(letters):
            if await self._hand_back(group, position, done):
                done.append(letter)
        await self._end(done)

    async def _hand_back(self, group: list[NotedLetter], position: int, done: Sequence[NotedLetter]) -> bool:
        """Send a letter of the group that is noted; return whether its target has it."""
        letter = group[position]
        unanswered = uncertain = False
        refusals = 0
        retry = Retry(self._patience, transient=is_transient_read)
        while True:
            try:
                if uncertain:
                    look = (await self._look([letter]))[letter.key]
                    if look.copy is Copy.FOUND:
                        return self._count(sent=unanswered)
                    if look.copy is not Copy.ABSENT:
                        return self._keep(letter, look)
                    self._fences.set(letter, look.fence if refusals < _REFUSALS_IN_A_ROW else None)
                    uncertain = False
                outcome = await self._publish(letter)
                if outcome is _Outcome.MOVED_ON:
                    refusals += 1
                    uncertain = unanswered or letter.key in self._suspect
                    if not uncertain:
                        await self._move_fence(group, position, refusals)
                    continue
                if outcome is _Outcome.FORGOTTEN and letter.key in self._suspect and letter.again != self._id:
                    letter = group[position] = replace(letter, again=self._id)
                    await self._store_note(group)
                    continue
            except Exception as error:
                if isinstance(error, _REFUSALS):
                    if not unanswered:  # else it may still be on its way: the next call looks for it
                        await self._end(done)
                    raise
                unanswered = uncertain = True
                await retry.pause_if_transient(error)
                continue
            if outcome is _Outcome.GONE:
                self._forget(letter.key)
                return False
            if outcome is _Outcome.FORGOTTEN:
                return self._keep(letter, Look(Copy.LOST))
            return self._count(sent=unanswered or outcome is _Outcome.STORED)

    def _count(self, *, sent: bool) -> bool:
        if sent:
            self.sent += 1
        else:
            self.found += 1
        return True

    def _keep(self, letter: NotedLetter, look: Look) -> bool:
        """Keep a letter in doubt."""
        self._suspect[letter.key] = self._wanted[letter.key] = letter
        self._looks[letter.key] = look
        return False

    async def _move_fence(self, group: Sequence[NotedLetter], position: int, refusals: int) -> None:
        """Follow another producer on the subject of a letter that this call alone may send."""
        letter = group[position]
        fence = (await self._search.fences(letter.target, [letter.subject]))[letter.subject]
        await self._store_note(group)  # no other call has sent these letters before this
        for other in group[position:]:
            if (other.target, other.subject) == (letter.target, letter.subject) and other.key not in self._suspect:
                self._fences.set(other, fence if other is not letter or refusals < _REFUSALS_IN_A_ROW else None)

    async def _end(self, done: Sequence[NotedLetter]) -> None:
        """Delete what was sent; what was not is no longer noted, unless an earlier call may have sent it."""
        for letter in done:
            await self.delete(letter.key)
            self._forget(letter.key)
        self._fences.clear()
        await self._store_note([])

    async def _publish(self, letter: NotedLetter) -> _Outcome:
        message = await self._letters.find(letter.key)
        found = None if message is None else origin(message)
        if message is None or found is None:
            return _Outcome.GONE
        message_id = self._message_id(letter)
        if letter.again:  # the server must not take it for a copy of the one that may be gone
            message_id += f"/{letter.again}"
        pairs = [*sendable_headers(found.headers).items(), (MSG_ID, message_id), (EXPECTED_STREAM, letter.target)]
        fence = self._fences[letter]
        if fence is not None:
            pairs.append((EXPECTED_LAST_SUBJECT_SEQ, str(fence)))
        headers = own_headers(pairs)
        what = f"the ack of dead letter {letter.seq}"
        try:
            ack = await self._context.publish(letter.subject, message.data, headers, self._timeout, what)
        except APIError as error:
            if fence is not None and error.err_code in _WRONG_LAST_SEQUENCE:
                return _Outcome.MOVED_ON
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
            await wait_for_sequence(self._context, letter.target, ack.seq, self._timeout)
            copy = await get_at_leader(self._context, letter.target, {"seq": ack.seq}, self._timeout)
            known = copy is not None and copy.headers.get(MSG_ID) == message_id
            return _Outcome.DUPLICATE if known else _Outcome.FORGOTTEN
        self._fences.stored(letter, ack.seq)
        return _Outcome.STORED

    def _message_id(self, letter: NotedLetter) -> str:
        return f"redrive:{self._stream}:{letter.seq}:{letter.time_ns}"

    # -- streams ------------------------------------------------------------------------------------------------------

    async def delete(self, key: Key) -> None:
        await self._letters.delete(key)

    async def _state(self, stream: str) -> StreamState:
        return await Retry(self._patience).call(lambda: stream_state(self._context, stream, self._timeout))
