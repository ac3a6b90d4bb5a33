"""Reads that are complete and current, whichever replica or mirror answers.

A replica may lag. A mirror may lack messages, because it has limits of its own, it keeps what the stream has removed, and
it may change subjects.
No answer shows that a mirror holds the same messages. So `VerifiedReader` accepts only answers of the stream itself that
show that their responder has reached the needed sequence. Otherwise it asks again, and if only mirrors answer, because
they are nearer, it asks the leader for one message after the other. `range_read.RangeRead` does the same for ranges.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from jetstream_ext.client.api import (
    LAG_PAUSE,
    Api,
    check_same_stream,
    gather_bounded,
    get_at_leader,
    malformed_as_error,
    newest_up_to,
    stream_state,
    wait_for_sequence,
)
from jetstream_ext.client.connection import Context
from jetstream_ext.client.direct_reader import link_of, read_blocks, read_one
from jetstream_ext.client.retry import Retry
from jetstream_ext.errors import (
    DirectGetDisabledError,
    MessageNotFoundError,
    MessagesLostError,
    RequestTimeoutError,
    TooManySubjectsError,
)
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import DEFAULT_MAX_BYTES, Block, Request, StoredMsg, not_found
from jetstream_ext.protocol.headers import BATCH_ID, decode_stored, is_inside_batch
from jetstream_ext.protocol.numbers import json_number
from jetstream_ext.protocol.range_read import MAX_LEADER_REQUESTS, MAX_MIRROR_ANSWERS
from jetstream_ext.protocol.reads import OneReply, Scan, reached_now
from jetstream_ext.protocol.subjects import can_be_asked_for
from jetstream_ext.text import counted

_CATCH_UP_BATCH: Final = 16_000
# So few messages are read one by one: the server counts what follows a batch, which takes it milliseconds in large streams.
_FEW: Final = 8
_NO_LIMIT: Final = 1 << 31
_FIRST_PAUSE: Final = 0.001  # short, because another responder may answer the next request
_AWAY: Final = "no replica answers"  # a stream that does not allow direct gets is refused before
# Messages with wildcards in their subjects that are passed over to find one that can be asked for.
_MOST_PASSED: Final = 64
_LONGEST_COMMIT: Final = 0.3  # after so many seconds, the rest of an atomic batch is taken for removed
# So many pauses in, it is asked whether the stream is still the same: perhaps nothing will ever catch up.
_PAUSES_BEFORE_A_CHECK: Final = 8
# A read catches up with the writers only if it is faster than they are, by so much that it will end.
_SLOWER: Final = 0.9


def _batch_id(message: StoredMsg) -> str | None:
    return decode_stored(message.stored_lines).get(BATCH_ID)


class _UnverifiedError(Exception):
    """An answer does not show that its responder holds what is needed; the text says why."""


class AskLeaderError(Exception):
    """No answer of a replica of the stream can be had, or be told from that of a mirror; the leader can be asked."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One complete reply: the messages of one moment."""

    block: Block  # its `stream` is the responder's name, or empty if there are no messages
    pending: int  # how many more messages match
    up_to_seq: int  # the newest sequence of the responder (`multi_last` only)


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive messages of the log; there may be none."""

    found: Block | list[StoredMsg]
    exact: bool = False
    """No reply has passed the last message, and it is the last one."""
    whole: bool = True
    """The last message is not inside an atomic batch, as far as its headers say."""

    def __len__(self) -> int:
        return len(self.found)

    @property
    def last(self) -> StoredMsg:
        return self.found[-1] if isinstance(self.found, list) else self.found.message(-1)


class VerifiedReader:
    """The verified reads of one call.

    `timeout` limits, in seconds, the wait for an answer and for a responder that has caught up; then every read raises
    RequestTimeoutError. A responder must have the sequence `need`: the leader's last one when the read began, or the
    reader's own write. Errors name what is read: `what`, or else the stream.
    """

    def __init__(self, context: Context, stream: str, timeout: float, *, need: int, what: str = "") -> None:
        self._context = context
        self._stream = stream
        self._timeout = timeout
        self._need = need
        self._what = what or f"stream {stream!r}"
        self.before: StreamState | None = None
        """A state of the stream from before the reads. Then a stream that was deleted and created again since is a
        StreamRecreatedError, and no responder that never catches up."""
        self._pauses = 0
        self._mirror_answers = 0  # in a row
        self._witness: str | None = None
        self.replies: int = 0
        """How many answers were accepted. Those of one reply are all of the stream that has the name at that moment."""
        self.end: StreamState = StreamState(stream, "", {})
        """What the leader said when `follow` or `catch_up` asked it last."""

    @property
    def only_mirrors_answer(self) -> bool:
        """Whether so many answers of mirrors came in a row that no replica of the stream seems to be near."""
        return self._mirror_answers > MAX_MIRROR_ANSWERS

    async def replicas_answer(self) -> bool:
        """Find out whether replicas of the stream answer, unless an answer has shown it already."""
        if not self.replies and not self.only_mirrors_answer:
            with contextlib.suppress(AskLeaderError):
                await self.last_of(())
        return not self.only_mirrors_answer

    async def get(self, request: Request) -> StoredMsg:
        """Return the message that a single get finds; ask the leader if the answer proves too little.

        Raises:
            MessageNotFoundError: The leader has no such message.
        """
        retry = self._retry()
        retry.start()
        with contextlib.suppress(MessageNotFoundError):
            found = await read_one(self._context, self._stream, request, self._timeout)
            if found.stream == self._stream and found.seq >= self._need:
                return found
        try:
            await wait_for_sequence(self._context, self._stream, self._need, retry.remaining)
            at_leader = await get_at_leader(self._context, self._stream, request.body(), retry.remaining)
        except RequestTimeoutError as error:
            late = f"the leader did not answer or did not reach sequence {self._need} within {self._timeout:.4g} s"
            raise RequestTimeoutError(f"{self._what}: {late}") from error
        if at_leader is None:
            raise not_found(self._stream, request)
        return at_leader

    async def last_of(
        self, subjects: Sequence[str], *, up_to: StoredMsg | None = None, in_flight: int | None = 1
    ) -> Answer:
        """Return the last message of every subject that matches one of `subjects`, all of one moment.

        The answer may include the last message of one more subject. With `up_to` (see `newest_to_ask_for`), it is of the
        moment when that message was stored. The answer is no longer than the connection carries with so many `in_flight`,
        and `Answer.pending` counts the rest; None does not limit it.

        Raises:
            TooManySubjectsError: The subjects match too many.
            LookupError: `up_to` is no longer stored.
            AskLeaderError: Use `last_at_leader`.
        """
        retry = self._retry()
        while True:
            # A reply without messages does not show its responder, so the request includes one subject that has messages.
            witness = up_to.subject if up_to is not None else self._witness or await self._find_witness()
            if witness is None:
                self.replies += 1
                return Answer(Block(), pending=0, up_to_seq=self._need)
            request = Request(
                multi_last=(*subjects, witness),
                up_to_seq=None if up_to is None else up_to.seq,
                max_bytes=_NO_LIMIT if in_flight is None else self._room(in_flight),
            )
            try:
                answer = await self._ask(request)
                if up_to is None:
                    if not len(answer.block):
                        self._witness = None
                    self._check(answer.block.stream, reached_now(answer.block, answer.up_to_seq), self._need)
                else:
                    # A complete reply ends with the newest message that the responder has up to that point.
                    reached = up_to.seq if answer.pending else max(answer.block.seqs, default=0)
                    if 0 < reached < up_to.seq and await self._at_leader(Request(seq=up_to.seq)) is None:
                        raise LookupError
                    self._check(answer.block.stream, reached, up_to.seq)
                self.replies += 1
                return answer
            except _UnverifiedError as doubt:
                await self._pause(retry, doubt)

    async def last_from_any(self, subjects: Sequence[str]) -> Block | None:
        """As `last_of`, from the first responder and without the leader; None if its answer does not show that it has `need`.

        Answers without messages do not show that.
        """
        try:
            answer = await self._ask(Request(multi_last=tuple(subjects), max_bytes=self._room(1)))
            self._check(answer.block.stream, reached_now(answer.block, answer.up_to_seq), self._need)
        except (_UnverifiedError, AskLeaderError, TooManySubjectsError):
            return None
        if answer.pending:
            return None
        self.replies += 1
        return answer.block

    async def last_at_leader(self, subjects: Sequence[str], *, up_to: int | None = None) -> list[StoredMsg]:
        """Return what the leader has as the last message of each of `subjects`, up to a sequence, at different moments."""
        self.replies += 2
        # A new leader may still have to apply what its predecessor acknowledged.
        await wait_for_sequence(self._context, self._stream, self._need, self._timeout)

        async def find(subject: str) -> StoredMsg | None:
            newest = await self._at_leader(Request(last_by_subj=subject))
            if newest is None or up_to is None or newest.seq <= up_to:
                return newest
            return await newest_up_to(self._at_leader, up_to, 1, subject=subject)

        found = await gather_bounded(find, subjects, limit=MAX_LEADER_REQUESTS)
        return [message for message in found if message is not None]

    async def newest_up_to(self, seq: int, first: int) -> StoredMsg | None:
        """Return the newest message up to `seq` that the leader still has, or None; `first` is the lowest sequence."""
        return await newest_up_to(self._at_leader, seq, first)

    async def newest_to_ask_for(self, seq: int, first: int) -> StoredMsg | None:
        """As `newest_up_to`, but pass over messages with a wildcard in their subjects; raise AskLeaderError for too many."""
        for _ in range(_MOST_PASSED):
            found = await self.newest_up_to(seq, first)
            if found is None or can_be_asked_for(found.subject):
                return found
            seq = found.seq - 1
        raise AskLeaderError

    async def oldest_of(self, subject: str, after: int) -> tuple[StoredMsg, int] | None:
        """Return the oldest message of a subject and the number of its messages, or None if it has none.

        The subject is known to have no messages up to the sequence `after`.
        """
        retry = self._retry()
        request = Request(seq=1, next_by_subj=subject, batch=1, max_bytes=DEFAULT_MAX_BYTES)
        while True:
            try:
                answer = await self._ask(request)
                block = answer.block
                if not len(block) and await self._at_leader(Request(last_by_subj=subject)) is None:
                    return None
                self._check(block.stream, max(block.seqs, default=0), after + 1)
                self.replies += 1
                return block.message(0), answer.pending + 1
            except _UnverifiedError as doubt:
                await self._pause(retry, doubt)
            except AskLeaderError:
                oldest = await self._at_leader(Request(seq=1, next_by_subj=subject))
                return None if oldest is None else (oldest, await self._count_at_leader(subject))

    async def log(self, first: int, last: int, *, subject: str | None = None) -> AsyncGenerator[Block, None]:
        """Yield the messages from sequence `first` to `last` in order; the leader proves that they are complete.

        `subject` is a filter for the server.
        """
        position, retry = first - 1, self._retry()
        while position < last:
            plan = Scan(subject=subject, seq=position + 1, up_to_seq=last, max_bytes=DEFAULT_MAX_BYTES)
            reading = read_blocks(self._context, self._stream, plan, self._timeout, confirm=True)
            try:
                async with contextlib.aclosing(reading) as blocks:
                    async for block in blocks:
                        position = block.seqs[-1]
                        self.replies += 1
                        retry.reset()
                        yield block
                return
            except DirectGetDisabledError:
                await self._pause(retry, _UnverifiedError(_AWAY))

    async def catch_up(self, position: int, take: Callable[[Block | list[StoredMsg]], None]) -> StoredMsg | None:
        """Pass the messages after `position` to `take`, up to an end that no reply of this read has passed.

        Return the last message, or None. Raise RequestTimeoutError if messages are stored faster than they are read for
        half of `timeout`.
        """
        loop = asyncio.get_running_loop()
        newest: StoredMsg | None = None
        start: tuple[int, int] | None = None  # where this read and the leader were
        until = 0.0
        async with contextlib.aclosing(self.follow(position)) as pieces:
            async for piece in pieces:
                if len(piece):
                    take(piece.found)
                    newest = piece.last
                    position = newest.seq
                if piece.exact or loop.time() < until:
                    continue
                leader = self.end.last_seq
                if start is not None and (position - start[0]) * _SLOWER < leader - start[1]:
                    raise RequestTimeoutError(
                        f"{self._what}: {counted(leader - position, 'message')} still unread, because messages are stored "
                        f"faster than this read returns them (for {self._timeout / 2:g} s); repeat the call when fewer are stored, or read "
                        "fewer keys with get_many"
                    )
                start, until = (position, leader), loop.time() + self._timeout / 2
        if newest is None and position:
            last = await self._at_leader(Request(seq=position))
            if last is not None and is_inside_batch(last.stored_lines) and await self._is_followed(last):
                return await self.catch_up(position, take)
        return newest

    async def follow(self, position: int, *, subject: str | None = None) -> AsyncGenerator[Piece, None]:
        """Yield the messages after `position` in pieces.

        The last piece is exact: no reply of this read, or of earlier ones that ended where it begins, has passed it. It goes
        up to `end.last_seq` or farther: `end` is what the leader said last, before the last reply. It does not end inside an
        atomic batch, unless the rest of the batch was removed. `subject` is a filter for the server; other messages may be
        among them.
        """
        retry = self._retry()
        while True:
            # Every responder so far had at most what the leader has now; the next reply must reach that.
            self.end = state = await stream_state(self._context, self._stream, self._timeout)
            leader = state.last_seq
            if leader == position:
                yield Piece([], exact=True)
                return
            try:
                found, more = await self._next_piece(position, leader, subject)
                piece = Piece(found)
                if len(piece):
                    last = piece.last
                    position = last.seq
                    piece = Piece(found, whole=not is_inside_batch(last.stored_lines))
                    self.replies += 1
                    retry.reset()
                    if more or (not piece.whole and await self._is_followed(last, subject)):
                        yield piece
                        continue
                after = Request(seq=position + 1, next_by_subj=subject or ">")
                missing = await self._at_leader(after) if position < leader else None
                if missing is None or missing.seq > leader:
                    yield replace(piece, exact=True)
                    return
                if len(piece):
                    yield piece
                self._check(self._stream, position, missing.seq)
            except _UnverifiedError as doubt:
                await self._pause(retry, doubt)

    async def _next_piece(
        self, position: int, leader: int, subject: str | None
    ) -> tuple[Block | list[StoredMsg], bool]:
        """Return messages after `position`, and whether there are more or they have passed the sequence `leader`."""
        if not 0 < leader - position <= _FEW:
            request = Request(
                seq=position + 1,
                next_by_subj=subject or ">",  # without one, 2.11.0 answers 404 if the first message was deleted
                batch=_CATCH_UP_BATCH,
                max_bytes=self._room(1),
            )
            with contextlib.suppress(AskLeaderError):
                answer = await self._ask(request)
                if len(answer.block):
                    self._check(answer.block.stream)
                return answer.block, answer.pending > 0
        found = await self._next_at_leader(position, min(max(1, leader - position), MAX_LEADER_REQUESTS))
        due = [message for message in found if message.seq <= leader]
        if not found or len(due) == leader - position:  # no reply has passed the last one
            return due, False
        return found, True

    async def _is_followed(self, last: StoredMsg, subject: str | None = None) -> bool:
        """Return whether more messages, which match `subject`, follow one that is inside an atomic batch.

        Servers show the messages of a batch while they store it. The last message of the stream tells whether that is over.
        If none follows then, the others of the batch do not match or were removed.
        """
        batch, pause = _batch_id(last), _FIRST_PAUSE
        while pause < _LONGEST_COMMIT:
            state = await stream_state(self._context, self._stream, self._timeout)
            if state.last_seq >= last.seq:  # otherwise the leader has yet to learn of the message
                newest = await self._at_leader(Request(seq=state.last_seq))
                after = Request(seq=last.seq + 1, next_by_subj=subject or ">")
                if await self._at_leader(after) is not None:
                    return True
                if newest is not None and not (is_inside_batch(newest.stored_lines) and _batch_id(newest) == batch):
                    return False
            await asyncio.sleep(pause)
            pause *= 2
        return False

    def _check(self, responder: str, reached: int = 0, need: int = 0) -> None:
        """Raise `_UnverifiedError` unless the stream itself answered and has reached `need`.

        Raise AskLeaderError if only mirrors have answered for a while. `responder` is empty for an answer without messages.
        `reached` is a sequence that the answer shows it to have.
        """
        if responder != self._stream:
            self._mirror_answers += 1  # perhaps: a mirror that has none of the messages does not tell its name
            if self.only_mirrors_answer:
                raise AskLeaderError
            if not responder:
                raise _UnverifiedError("no replica has caught up with the leader")
            raise _UnverifiedError(f"only stream {responder!r} answered, a mirror, which may hold other messages")
        self._mirror_answers = 0
        if reached < need:
            raise _UnverifiedError(f"no replica with sequence {need} answered")

    async def _ask(self, request: Request) -> Answer:
        if self.only_mirrors_answer:
            raise AskLeaderError
        plan, joined = OneReply(request, whole=True), Block()
        try:
            async with contextlib.aclosing(read_blocks(self._context, self._stream, plan, self._timeout)) as blocks:
                async for block in blocks:
                    joined.stream = block.stream
                    joined.extend(block)
        except MessagesLostError:
            raise _UnverifiedError("a reply was incomplete") from None
        except DirectGetDisabledError:
            raise _UnverifiedError(_AWAY) from None
        assert plan.end is not None
        return Answer(joined, pending=plan.end.num_pending, up_to_seq=plan.end.up_to_seq or 0)

    async def _at_leader(self, request: Request) -> StoredMsg | None:
        return await get_at_leader(self._context, self._stream, request.body(), self._timeout)

    async def _next_at_leader(self, position: int, count: int) -> list[StoredMsg]:
        """Return up to `count` messages after `position`, with every one that is stored up to the last of them."""

        async def find(seq: int) -> StoredMsg | None:
            return await self._at_leader(Request(seq=seq, next_by_subj=">"))

        seqs = range(position + 1, position + 1 + count)
        found = await gather_bounded(find, seqs, limit=MAX_LEADER_REQUESTS)
        by_seq = {message.seq: message for message in found if message is not None}
        return [by_seq[seq] for seq in sorted(by_seq)]

    async def _count_at_leader(self, subject: str) -> int:
        api = Api(self._context, self._timeout)
        answer = await api.stream(self._stream, {"subjects_filter": subject})
        with malformed_as_error(f"stream {self._stream!r}"):
            # If the messages have been removed meanwhile, there may have been any number of them.
            return json_number((answer["state"].get("subjects") or {}).get(subject, _NO_LIMIT), "subjects")

    async def _find_witness(self) -> str | None:
        """Return a subject that has a message now, or None if the stream is empty."""
        # The first message: servers find it at once in a stream of any size, it is seldom removed, and servers may find
        # no last message if its sequence was deleted.
        seq = 1
        for _ in range(_MOST_PASSED):
            oldest = await self._at_leader(Request(seq=seq, next_by_subj=">"))
            if oldest is None and seq == 1:
                return None
            if oldest is None:
                break
            if can_be_asked_for(oldest.subject):
                self._witness = oldest.subject
                return self._witness
            seq = oldest.seq + 1
        raise AskLeaderError

    def _room(self, in_flight: int) -> int:
        return min(DEFAULT_MAX_BYTES, link_of(self._context).room(in_flight))

    def _retry(self) -> Retry:
        return Retry(self._timeout, first_pause=_FIRST_PAUSE, longest_pause=LAG_PAUSE, factor=1.5)

    async def _pause(self, retry: Retry, doubt: _UnverifiedError) -> None:
        self._pauses += 1
        if self.before is not None and self._pauses == _PAUSES_BEFORE_A_CHECK:
            await check_same_stream(self._context, self.before, timeout=self._timeout)
        await retry.pause_until_deadline(RequestTimeoutError(f"{self._what}: {doubt} (tried for {self._timeout:g} s)"))
