"""Whether target streams have the copies of dead letters that were sent without an answer."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from nats.js import JetStreamContext
from nats.js.errors import APIError, NotFoundError

from jetstream_ext.client.api import gather_bounded, get_at_leader, still_stores, stream_state, wait_for_sequence
from jetstream_ext.client.connection import Context
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.client.retry import is_transient_read
from jetstream_ext.errors import RequestTimeoutError, server_error
from jetstream_ext.log.redrive_note import Key, NotedLetter, last_message
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.headers import MSG_ID
from jetstream_ext.protocol.outcome import mark_headers, marked_seq

_READS_IN_FLIGHT: Final = 16


class Copy(enum.Enum):
    """What is known about the copy of a letter in its target.

    Attributes:
        ABSENT: The target has everything that it stored since the letter was noted, and no copy.
        UNPROVEN: As `ABSENT`, but the message is gone that would show that the target has not lost its last messages and
            stored others at their sequences.
        LOST: The target has no copy, and it has lost messages or was created again.
        UNREAD: The target did not answer.
    """

    FOUND = enum.auto()
    ABSENT = enum.auto()
    UNPROVEN = enum.auto()
    LOST = enum.auto()
    UNREAD = enum.auto()


@dataclass(frozen=True, slots=True)
class Look:
    """What a look has found out about a letter.

    Attributes:
        fence: The last sequence of the target on the letter's subject, from before the look; None if it cannot be used.
        base: The last sequence that the look has covered; `base_time` is its time, as `NotedLetter` has it.
    """

    copy: Copy
    fence: int | None = None
    base: int = 0
    base_time: datetime | None = None


def can_fence(state: StreamState) -> bool:
    """Return whether a stream compares the expected last sequence of a subject with what it stores on that subject."""
    return not (state.config.get("subject_transform") or state.config.get("allow_msg_counter"))


class CopySearch:
    """Looks for copies; a letter's copy has the message id of `message_id`, with any suffix behind a slash."""

    def __init__(self, js: JetStreamContext, timeout: float, message_id: Callable[[NotedLetter], str]) -> None:
        self._js = js
        self._context = Context(js)
        self._timeout = timeout
        self._message_id = message_id

    async def fences(self, target: str, subjects: Iterable[str]) -> dict[str, int]:
        """Return the last sequence of a stream on each of some subjects at its leader, 0 for a subject without messages."""
        wanted = sorted(set(subjects))

        async def read(subject: str) -> int:
            newest = await get_at_leader(self._context, target, {"last_by_subj": subject}, self._timeout)
            return 0 if newest is None else newest.seq

        return dict(zip(wanted, await gather_bounded(read, wanted, limit=_READS_IN_FLIGHT), strict=True))

    async def look(self, letters: Sequence[NotedLetter]) -> dict[Key, Look]:
        """Return what is known about each letter; raise a transient error if a target cannot say so now."""
        looks: dict[Key, Look] = {}
        for target in sorted({letter.target for letter in letters}):
            mine = [letter for letter in letters if letter.target == target]
            try:
                looks |= await self._look_at(target, mine)
            except NotFoundError:
                looks |= {letter.key: Look(Copy.LOST) for letter in mine}
        return looks

    async def _look_at(self, target: str, letters: Sequence[NotedLetter]) -> dict[Key, Look]:
        # Before the look: what is stored on a subject after this read is refused a place behind this sequence.
        fences = await self.fences(target, (letter.subject for letter in letters))
        state = await self._settled(target, list(fences), max(fences.values()))
        base, base_time = last_message(state)
        looks: dict[Key, Look] = {}
        for start in {(letter.base, letter.base_time) for letter in letters}:
            mine = [letter for letter in letters if (letter.base, letter.base_time) == start]
            found, others = await self._find(state, mine)
            for letter in mine:
                copy = Copy.FOUND if letter.key in found else others
                fence = fences[letter.subject] if can_fence(state) else None
                looks[letter.key] = Look(copy, fence, base, base_time)
        return looks

    async def _find(self, state: StreamState, letters: Sequence[NotedLetter]) -> tuple[set[Key], Copy]:
        """Return which letters of one base a target has, and what is known about the copies of the others."""
        base, witness = letters[0].base, letters[0].witness
        ids = {self._message_id(letter): letter.key for letter in letters}
        found: set[Key] = set()
        count = 0
        if state.last_seq > base:
            reads = DirectGet(self._js, state.name, timeout=self._timeout)
            async for message in reads.scan(seq=base + 1, up_to_seq=state.last_seq, confirm=True):
                count += 1
                if (key := ids.get(message.headers.get(MSG_ID, "").partition("/")[0])) is not None:
                    found.add(key)
        if count != state.last_seq - base:
            return found, Copy.LOST
        if witness is None or len(found) == len(letters):
            return found, Copy.UNPROVEN
        if base:
            same = await still_stores(self._context, state, witness, self._timeout)
        else:  # all that the target has ever had was read
            same = state.created_at == witness[1] and not state.volatile
        return found, Copy.ABSENT if same else Copy.LOST if same is False else Copy.UNPROVEN

    async def _settled(self, target: str, subjects: Sequence[str], seq: int) -> StreamState:
        """Return the state of a stream once it has processed what this client has sent to it, and has the sequence `seq`.

        A message that its leader refuses tells that, on a subject that it stores. What was sent on other subjects is refused,
        because it names the target. A former leader that does not know its successor refuses it as well, so the state must be
        that of a leader that has no successor.
        """
        state = await stream_state(self._context, target, self._timeout)
        mark = next((subject for subject in subjects if state.stores(subject)), None)
        if mark is not None:
            seq = max(seq, await self._marked(target, mark))
            await wait_for_sequence(self._context, target, seq, self._timeout)
            state = await stream_state(self._context, target, self._timeout)
        if not state.leader_is_certain or state.last_seq < seq:
            raise RequestTimeoutError(
                f"stream {target!r}: its leader has not heard from the other servers lately, or has just changed, so another one may "
                f"have more than the {state.last_seq} sequences that it reported"
            )
        return state

    async def _marked(self, target: str, subject: str) -> int:
        """Send a message that is refused; return the sequence that the leader will reach."""
        try:
            await self._context.publish(subject, b"", mark_headers(target), self._timeout, "the refusal of a mark")
        except APIError as error:
            refusal = server_error(code=error.code, err_code=error.err_code, description=error.description or "")
            if is_transient_read(refusal) or not error.err_code:
                raise
            return marked_seq(refusal) or 0
        raise RuntimeError(f"stream {target!r} has stored a message that expects a sequence that no stream has")
