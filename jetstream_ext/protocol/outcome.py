"""What a write did whose answer was lost: one search for every kind of write that a stream can show.

`find` yields a question, is sent its answer, and returns a `Verdict`; `client.outcome` asks. It proves three things:

1. *Nothing of the write is still to come.* A fence follows it on the same connection: messages that are never stored,
   whose refusals say that the leader has taken everything before them, and which sequence the stream will then reach.
2. *What is there.* The messages since then are read, proved by the leader, which is the same before and after.
3. *What is missing was never there.* Sequences are never used again, so a stream without holes lost nothing. A hole that
   has room for what is missing leaves it unknown.

A write is known by its messages: their batch id, or their message ids. A batch that was committed is stored whole, so
one message of it is enough. Fast ingest stores messages in their order up to some point, so the last one that is there
proves those before it.

A record behind a fence needs none of these proofs: only one record can follow another, so an attempt that is still to come
and its repetition are never both stored. `find_follower` reads which one did.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Final

from jetstream_ext.errors import ErrorCode, ResponseError, ServerError, Status
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.api import StreamState, recreated
from jetstream_ext.protocol.atomic_wire import answering_stream, read_reply
from jetstream_ext.protocol.direct import StoredMsg, stored_block
from jetstream_ext.protocol.numbers import parse_number

# After these refusals of the fence's first message the server does not have the batch.
_FORGOTTEN: Final = frozenset({ErrorCode.ATOMIC_DISABLED, ErrorCode.ATOMIC_INCOMPLETE, ErrorCode.ATOMIC_TOO_LARGE})
_REMOVED: Final = "the stream has removed messages since then, possibly those that are missing"
_LARGEST_BLOCK: Final = 1 << 17
# An expectation that no stream meets (the largest that servers parse): the refusal names the stream's last sequence.
_IMPOSSIBLE_SEQ: Final = (1 << 63) - 1
_LAST_SEQ: Final = re.compile(r"wrong last sequence: ([0-9]+)\Z")


class Unknown(Exception):  # noqa: N818 - a verdict, not an error
    """What the write did is not known: `later`, not yet, and another search may find it out."""

    def __init__(self, why: str, *, later: bool = False) -> None:
        super().__init__(why)
        self.later = later


class StreamGone(Unknown):
    """The stream was deleted, or deleted and created again: what it had stored is gone."""

    def __init__(self, how: str) -> None:
        super().__init__(f"the stream was {how}")
        self.how = how


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a write did: its first `stored` messages are there, and the rest is not, unless there is `doubt` about it."""

    stored: int
    seq: int = 0  # the stream sequence of the last one that is there
    doubt: str = ""
    stream: StreamState | None = field(default=None, compare=False)  # as it was then


@dataclass(frozen=True, slots=True)
class Write:
    """A write, and what was known before its first message was sent."""

    subject: str  # of its last message
    size: int
    before: StreamState  # the stream
    after: int  # a sequence that the stream had
    # Of each subject the stream removes the older messages first, so an older one shows that no later one was removed.
    oldest_first: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Batch(Write):
    """An atomic batch whose commit was sent: all of it is stored or nothing."""

    batch_id: str
    staged: bool  # the server had acknowledged a message of it
    session: int  # of the connection that the commit was written to

    @property
    def kill(self) -> bytes:
        """The headers of a message that makes the server drop what it has of it: no batch goes on with sequence 0 (10176)."""
        return h.encode([(h.BATCH_ID, self.batch_id), (h.BATCH_SEQUENCE, "0")])

    def place(self, message: StoredMsg) -> int:
        """Return the place of a message in the batch, from 1, or 0 if it is of another one, or of a schedule that has fired."""
        stored = stored_block(message)
        headers = h.decode_stored(stored)
        ours = headers.get(h.BATCH_ID) == self.batch_id and h.SCHEDULER not in stored
        number = parse_number(headers.get(h.BATCH_SEQUENCE, "")) if ours else None
        return number if number is not None and number <= self.size else 0


@dataclass(frozen=True, slots=True)
class Messages(Write):
    """Messages that were sent in their order by fast ingest, which stores them up to some point.

    With `unique` ids no other message has an id of theirs, and no two of them share one; then one that is there proves those
    before it. `known` is the id of a message that was stored before all of them, or "". `own` are a subject and ids: the
    stream is still the same if its newest message there has one of them.
    """

    ids: tuple[str, ...]
    unique: bool
    known: str
    own: tuple[str, frozenset[str]] = ("", frozenset())


@dataclass(frozen=True, slots=True)
class Record:
    """A record that was to follow the one with the sequence `fence` (0: none) on its subject; `sent` are its payloads."""

    stream: str
    subject: str
    fence: int
    sent: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class Follower:
    """The newest record on the subject, and the one of `sent` that followed the fence."""

    newest: StoredMsg | None
    own: StoredMsg | None = None


# -- questions -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskState:
    """Ask for the `StreamState` once the stream has reached `seq`, or after a few seconds; None: there is no such stream."""

    stream: str
    seq: int = 0


@dataclass(frozen=True, slots=True)
class AskMessage:
    """Ask the leader for the message that a ``STREAM.MSG.GET`` request finds; the answer is a `StoredMsg` or None."""

    stream: str
    request: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AskRange:
    """Pass the messages that `DirectGet.scan` finds from `first` to `last` to `see`; the answer is None."""

    stream: str
    first: int
    last: int
    see: Callable[[StoredMsg], None]


@dataclass(frozen=True, slots=True)
class AskFence:
    """Send messages without payload in one write; the answer is the session and the replies, header and payload."""

    subject: str
    messages: tuple[bytes, ...]


Question = AskState | AskMessage | AskRange | AskFence
Search = Generator[Question, Any, Verdict]
Reply = tuple[bytes, bytes]


def find(write: Batch | Messages) -> Search:
    """Find out what a write did; raise Unknown if that cannot be known."""
    if isinstance(write, Batch):
        # Nothing else has its id, whatever has become of the stream.
        last: StoredMsg | None = yield AskMessage(write.before.name, {"last_by_subj": write.subject})
        if last is not None and (place := write.place(last)):
            return Verdict(write.size, last.seq + write.size - place)
    state = yield from _same_stream(write.before, own=write.own if isinstance(write, Messages) else ("", frozenset()))
    if not write.size:
        return Verdict(0, stream=state)
    if state.last_seq < write.after:
        raise Unknown("the stream's leader lacks messages that the stream had before", later=True)
    if isinstance(write, Messages) and write.unique:
        last = yield AskMessage(state.name, {"last_by_subj": write.subject})
        if last is not None and last.seq > write.after and _msg_id(last) == write.ids[-1]:
            return Verdict(write.size, last.seq, stream=state)
    leader = state.leader
    state, session = yield from _settle(write, state)
    if state.leader != leader:
        raise Unknown("the stream's leader changed during the search", later=True)
    newest = (yield AskMessage(state.name, {"last_by_subj": write.subject})) if write.oldest_first else None
    # One with a TTL of its own may outlive newer ones.
    if newest is not None and newest.seq <= write.after and h.MSG_TTL not in h.decode_stored(stored_block(newest)):
        verdict = Verdict(0)
    elif isinstance(write, Batch):
        verdict = yield from _find_batch(write, state)
    else:
        verdict = yield from _find_messages(write, state)
    if isinstance(write, Batch) and not verdict.stored and not write.staged and write.session != session:
        # If the server had acknowledged a message, the fence has ended the batch, on whichever connection.
        raise Unknown("the client has reconnected, and the commit may still arrive over the old connection")
    state = yield from _same_stream(state)
    if state.leader != leader or not state.leader_is_certain:  # a former leader may have answered the reads
        raise Unknown("the stream's leader changed, or has lost its majority", later=True)
    return replace(verdict, stream=state)


def find_follower(write: Record) -> Generator[Question, Any, Follower]:
    """Find out whether a record was stored: if it was, it followed the fence, and perhaps others followed it."""
    newest: StoredMsg | None = yield AskMessage(write.stream, {"last_by_subj": write.subject})
    if newest is None or newest.seq <= write.fence:
        return Follower(newest)
    next_one: StoredMsg | None = yield AskMessage(write.stream, {"seq": write.fence + 1, "next_by_subj": write.subject})
    return Follower(newest, next_one if next_one is not None and next_one.data in write.sent else None)


def _same_stream(
    before: StreamState, seq: int = 0, own: tuple[str, frozenset[str]] = ("", frozenset())
) -> Generator[Question, Any, StreamState]:
    state: StreamState | None = yield AskState(before.name, seq)
    if state is None:
        raise StreamGone("deleted")
    if recreated(before.created, state.created) and set(before.ends).isdisjoint(state.ends):
        # Some servers change the creation time of a stream that stays the same (2.12 to 2.12.15, 2.14 to 2.14.5).
        found: StoredMsg | None
        for end, time in before.ends:
            found = yield AskMessage(before.name, {"seq": end})
            if found is not None and found.time == time:
                return state
        subject, ids = own
        if ids:  # the stream was empty before
            found = yield AskMessage(before.name, {"last_by_subj": subject})
            if found is not None and _msg_id(found) in ids:
                return state
        raise StreamGone("deleted and created again")
    if state.last_seq < before.last_seq and not state.replicated:
        raise StreamGone("emptied")  # it is in memory, and its server was restarted
    return state


def _settle(write: Batch | Messages, before: StreamState) -> Generator[Question, Any, tuple[StreamState, int]]:
    """Wait until the leader has applied what it had accepted; return the stream then, and the connection's session."""
    kill = (write.kill,) if isinstance(write, Batch) else ()
    answer: tuple[int, list[Reply]] = yield AskFence(write.subject, (*kill, mark(before.name)))
    session, replies = answer
    refusals = [_refusal(reply, before.name) for reply in replies]
    if kill and refusals[0].err_code not in _FORGOTTEN:
        raise Unknown(
            f"the stream's leader did not confirm that it dropped the batch: {refusals[0].description}", later=True
        )
    if refusals[-1].code == Status.UNAVAILABLE:
        raise Unknown(f"the stream's leader did not answer: {refusals[-1].description}", later=True)
    until = marked_seq(refusals[-1])
    if until is None and before.replicated:
        raise Unknown("the stream's leader did not report the stream's last sequence", later=True)
    state = yield from _same_stream(before, until or 0)
    if state.last_seq < (until or 0):
        # The leader may have refused messages when it applied them; the next attempt's fence does not count them.
        raise Unknown("the stream's leader has not yet applied all messages that it accepted", later=True)
    return state, session


def _refusal(reply: Reply, stream: str) -> ServerError:
    header, payload = reply
    try:
        refusal = read_reply(header, payload)
    except ResponseError as error:
        raise Unknown(f"the answer to a probe message is malformed: {error}", later=True) from error
    if not isinstance(refusal, ServerError):
        raise Unknown("the server did not refuse a probe message as expected", later=True)
    answering = answering_stream(payload) or stream
    if answering != stream:
        raise Unknown(f"the subject of the last message now belongs to stream {answering!r}")
    return refusal


# -- the fence -----------------------------------------------------------------------------------------------------------


def mark(stream: str) -> bytes:
    """Return the header block of a message that expects a last sequence that no stream has.

    Its refusal names the last sequence that the leader has assigned. That includes messages that are still being
    replicated and cannot be read yet.
    """
    return h.encode(list(mark_headers(stream).items()))


def mark_headers(stream: str) -> dict[str, str]:
    """Return the headers of a `mark`."""
    return {h.EXPECTED_STREAM: stream, h.EXPECTED_LAST_SEQ: str(_IMPOSSIBLE_SEQ)}


def marked_seq(refusal: object) -> int | None:
    """Return the sequence that the leader will reach, if the answer to a `mark` names one."""
    if not isinstance(refusal, ServerError) or refusal.err_code != ErrorCode.WRONG_LAST_SEQUENCE:
        return None
    found = _LAST_SEQ.search(refusal.description or "")
    return parse_number(found[1]) if found else None


# -- reading -------------------------------------------------------------------------------------------------------------


def _find_batch(write: Batch, state: StreamState) -> Search:
    """A message with the id of the batch proves that all were stored; without one, a hole may have had room for it."""
    previous, hole, found = write.after, 0, 0

    def see(message: StoredMsg) -> None:
        nonlocal found
        note(message.seq)
        if place := write.place(message):
            found = message.seq + write.size - place

    def note(seq: int) -> None:
        nonlocal previous, hole
        gap, previous = seq - previous - 1, seq
        # With sources the messages of a batch may not have consecutive sequences.
        hole = max(hole, gap) if state.contiguous else hole + gap

    yield from _read(state, write.after + 1, state.last_seq, see)
    note(state.last_seq + 1)
    if found:
        return Verdict(write.size, found)
    return Verdict(0, doubt=_REMOVED if hole >= write.size else "")


def _find_messages(write: Messages, state: StreamState) -> Search:
    """Read backwards, until a message shows that those before it were stored."""
    places: dict[str, int] = {}
    for place, msg_id in enumerate(write.ids, 1):
        places.setdefault(msg_id, place)
    found: dict[int, int] = {}  # by the place of a message, its sequence
    missing = 0  # the highest sequence without a message
    reached = write.after
    end, size = state.last_seq, 2 * write.size + 16  # enough, unless others write much more
    while end > reached:
        first = max(write.after + 1, end - size + 1)
        previous = first - 1

        def see(message: StoredMsg) -> None:
            nonlocal previous, missing, reached
            if message.seq != previous + 1:
                missing = max(missing, message.seq - 1)
            previous = message.seq
            msg_id = _msg_id(message)
            if write.known and msg_id == write.known:
                reached = message.seq  # all of them were sent later
                for early in [place for place, seq in found.items() if seq < reached]:
                    del found[early]
            elif place := places.get(msg_id):
                found[place] = message.seq

        yield from _read(state, first, end, see)
        if previous != end:
            missing = max(missing, end)
        if write.unique and found:
            break
        end, size = first - 1, min(2 * size, _LARGEST_BLOCK)
    last = stored = max(found, default=0)
    if not write.unique:
        stored = next(place for place in count() if place + 1 not in found)
    seq = found.get(stored, 0)
    doubt = _REMOVED if missing > (seq if write.unique and seq else reached) else ""
    if last > stored:
        doubt = (
            "the stream had one of the message ids before"  # from an earlier run; so the server dropped that message
        )
    return Verdict(stored, seq, doubt if stored < write.size else "")


def _msg_id(message: StoredMsg) -> str:
    return message.headers.get(h.MSG_ID, "").strip()


def _read(
    state: StreamState, first: int, last: int, see: Callable[[StoredMsg], None]
) -> Generator[Question, Any, None]:
    """Pass the messages from `first` to `last` to `see`."""
    if state.allows_direct and first <= last:
        yield AskRange(state.name, first, last, see)
    while not state.allows_direct and first <= last:
        one: StoredMsg | None = yield AskMessage(state.name, {"seq": first, "next_by_subj": ">"})
        if one is None or one.seq > last:
            break
        see(one)
        first = one.seq + 1
