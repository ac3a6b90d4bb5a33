"""Whether a stream stored an atomic batch whose commit was not answered: what to ask next, and what the answers prove.

`find_commit` and `find_earlier` are generators: they yield a question, are sent its answer, and return the verdict: the
ack that the commit should have had, or None, which proves that nothing of the batch is stored, nor will be.
`client.atomic_session` asks.

A stored batch is a run of sequences, and every message of it has the batch's id in a header. So one message with the id
proves that all were stored, and a stream in which nothing is missing proves that none was. Messages that were removed
since (by limits, by newer messages on their subjects, by hand) leave holes: where a hole has room for the whole batch,
nothing can be known.

1. The last message on the batch's last subject may be the batch's, which proves everything.
2. A *fence* (`fence`): on the connection that carried the commit, so after it, two messages that are never stored. Their
   refusals prove that the leader has dealt with the commit, and say which sequence its stream will reach.
3. When the leader has applied that much, everything since the batch was opened is read.
4. The leader must still be the same and hear from a majority. Otherwise the reads may have come from a server that had
   been replaced without knowing it.

A connection that was replaced in between orders nothing: the commit may still be on its way through the old one. Then
the fence is proof only where the server had acknowledged an earlier message of the batch, because the fence makes the
server forget those, and a batch cannot begin in the middle.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import orjson

from jetstream_ext.errors import ErrorCode, ResponseError, ServerError
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.atomic_wire import read_reply
from jetstream_ext.protocol.stored_msg import StoredMsg
from jetstream_ext.protocol.stream_state import StreamState
from jetstream_ext.types import BatchAck

#: An expectation that no stream meets: the refusal says how far the stream is. (The largest that servers parse.)
IMPOSSIBLE_SEQ: Final = (1 << 63) - 1
PAUSE: Final = 0.05
"""Seconds between two looks at a leader that has not applied everything yet."""

# During an election no server answers. So an attempt waits for so long at most, and then begins again.
_LOOKS: Final = round(2.0 / PAUSE)
_LAST_SEQ: Final = re.compile(r"wrong last sequence: (\d+)\Z")
# After these refusals of the fence's first message the server does not have the batch.
_FORGOTTEN: Final = frozenset({ErrorCode.ATOMIC_DISABLED, ErrorCode.ATOMIC_INCOMPLETE, ErrorCode.ATOMIC_TOO_LARGE})
# Servers remember message ids for the duplicate window. A minute more is for clocks that differ.
_CLOCK_SKEW: Final = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Commit:
    """What was known when the commit was sent.

    Attributes:
        batch_id: The batch.
        size: How many messages it has.
        staged: The highest batch sequence that the server had acknowledged.
        last_subject: The subject of its last message.
        opened: The stream when the batch was opened; None where it could not be looked up.
        after: A sequence that the stream had then.
        session: The session of the connection that the commit was written to.
    """

    batch_id: str
    size: int
    staged: int
    last_subject: str
    opened: StreamState | None
    after: int
    session: int


class NeverKnown(Exception):  # noqa: N818 - a verdict, not an error
    """The outcome cannot be known, now or later."""


class NotYetKnown(Exception):  # noqa: N818
    """The outcome cannot be known now; another attempt may find it out."""


# -- questions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskState:
    """What does the stream's leader say of it? The answer is a `StreamState`, or None: there is no such stream."""

    stream: str


@dataclass(frozen=True, slots=True)
class AskMessage:
    """Which message does the leader find for a ``STREAM.MSG.GET`` request? The answer is a `StoredMsg` or None."""

    stream: str
    request: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AskRange:
    """Which messages are stored? They are shown to `search`, by direct gets. No answer."""

    stream: str
    search: Search
    options: Mapping[str, Any]
    """The options of `DirectGet.scan`."""


@dataclass(frozen=True, slots=True)
class AskFence:
    """Send two messages without payload in one write; the answer is the session and the replies, header and payload."""

    subject: str
    kill: bytes
    mark: bytes


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for `PAUSE` seconds."""


Question = AskState | AskMessage | AskRange | AskFence | Pause
FenceReplies = tuple[int, tuple[bytes, bytes], tuple[bytes, bytes]]
Plan = Generator[Question, Any, BatchAck | None]


# -- verdicts -----------------------------------------------------------------------------------------------------


def find_commit(commit: Commit) -> Plan:
    """Find out what became of a commit.

    Raises:
        NotYetKnown, NeverKnown: It cannot be known, with the reason.
    """
    opened, after = commit.opened, commit.after
    if opened is None:
        raise NeverKnown("the stream could not be looked up when the batch was opened")
    state = yield from _state(opened)
    if state.last_seq < after:
        raise NotYetKnown("its leader does not have the messages that it had")

    last: StoredMsg | None = yield AskMessage(state.name, {"last_by_subj": commit.last_subject})
    if last is not None and last.seq > after:
        newest = Search(commit.batch_id, commit.size, last.seq - 1)
        newest.see(last.seq, last.headers)
        if newest.last_seq is not None:
            return _ack(commit, state, newest.last_seq)

    replies: FenceReplies = yield AskFence(commit.last_subject, *fence(commit.batch_id, state.name))
    session, until = replies[0], _fenced(replies, state.name)
    leader = state.leader
    for _ in range(_LOOKS):
        state = yield from _state(opened)
        if state.leader != leader:
            raise NotYetKnown("the stream changed its leader")
        if state.last_seq >= (until or 0):
            break
        yield Pause()
    else:
        # The leader may have refused messages when it applied them. A new fence names the sequence without them.
        raise NotYetKnown("the leader has not applied everything that is on its way")
    if until is None and state.replicated:
        raise NotYetKnown("the leader does not say how far it is")

    search = Search(commit.batch_id, commit.size, after, contiguous=state.contiguous)
    yield from _read(state, search)
    if search.last_seq is not None:
        return _ack(commit, state, search.last_seq)
    state = yield from _state(opened)
    if state.leader != leader or not state.leader_is_certain:
        raise NotYetKnown("the stream's leader does not hear from a majority")
    if search.room:
        raise NeverKnown("messages were removed from the stream since, and its own may have been among them")
    if session != commit.session and not commit.staged:
        raise NeverKnown("the connection was replaced, and the commit may still be on its way through the old one")
    return None


def find_earlier(commit: Commit, now: datetime) -> Plan:
    """Find an earlier batch with the same id and size, if its last message is still stored; None: there is none."""
    if commit.opened is None:
        return None
    stream, subject = commit.opened.name, commit.last_subject
    state: StreamState | None = yield AskState(stream)
    last: StoredMsg | None = yield AskMessage(stream, {"last_by_subj": subject})
    if state is None:
        return None
    ending = _Ending(commit.batch_id, commit.size)
    if last is not None:
        ending.see(last.seq, last.headers)
    if ending.last_seq is None and state.allows_direct:
        since = now - (state.duplicate_window or timedelta()) - _CLOCK_SKEW
        yield AskRange(stream, ending, {"subject": subject, "start_time": since})
    return None if ending.last_seq is None else _ack(commit, state, ending.last_seq)


def _state(opened: StreamState) -> Generator[Question, Any, StreamState]:
    state: StreamState | None = yield AskState(opened.name)
    if state is None:
        raise NeverKnown("the stream no longer exists")
    if state.created != opened.created:
        raise NeverKnown("the stream was deleted and created again")
    return state


def _read(state: StreamState, search: Search) -> Generator[Question, Any, None]:
    """Show `search` the stream from where it is to the last sequence in `state`."""
    end = state.last_seq
    if state.allows_direct and search.next_seq <= end:
        yield AskRange(state.name, search, {"seq": search.next_seq, "up_to_seq": end, "confirm": True})
    while not state.allows_direct and search.next_seq <= end:
        found: StoredMsg | None = yield AskMessage(state.name, {"seq": search.next_seq, "next_by_subj": ">"})
        if found is None or found.seq > end:
            break
        search.see(found.seq, found.headers)
    search.skip(end)


def _ack(commit: Commit, state: StreamState, last_seq: int) -> BatchAck:
    return BatchAck(state.name, last_seq, commit.batch_id, commit.size)


# -- the messages of a stream -------------------------------------------------------------------------------------


class Search:
    """Looks for a batch among the messages of a stream, which it is shown in order.

    Args:
        batch_id: The batch.
        size: How many messages it has.
        after: A sequence that the stream had before the batch was committed.
        contiguous: Whether the messages of a batch follow each other. On a stream that stores messages of other
            streams as well they need not.
    """

    def __init__(self, batch_id: str, size: int, after: int, *, contiguous: bool = True) -> None:
        self.last_seq: int | None = None
        """The sequence of the batch's last message, once one of its messages was seen."""
        self.next_seq: int = after + 1
        self._batch_id = batch_id
        self._size = size
        self._contiguous = contiguous
        self._hole = 0

    def see(self, seq: int, headers: Mapping[str, str]) -> None:
        """Take a message."""
        self.skip(seq - 1)
        self.next_seq = seq + 1
        number = headers.get(h.BATCH_SEQUENCE, "")
        if headers.get(h.BATCH_ID) == self._batch_id and number.isdecimal() and 0 < int(number) <= self._size:
            self.last_seq = seq + self._size - int(number)

    def skip(self, to: int) -> None:
        """Note that the stream has no more messages up to the sequence `to`."""
        missing = to + 1 - self.next_seq
        if missing > 0:
            self._hole = max(self._hole, missing) if self._contiguous else self._hole + missing
            self.next_seq = to + 1

    @property
    def room(self) -> bool:
        """Whether the batch could have been where messages are missing."""
        return self._hole >= self._size


class _Ending(Search):
    """Looks for the last message of a batch: servers leave the commit on it, or put it there for a marker."""

    def __init__(self, batch_id: str, size: int) -> None:
        super().__init__(batch_id, size, 0)

    def see(self, seq: int, headers: Mapping[str, str]) -> None:
        """Take a message."""
        ends = h.BATCH_COMMIT in headers and headers.get(h.BATCH_SEQUENCE) == str(self._size)
        if ends and self.last_seq is None:
            super().see(seq, headers)


# -- the fence ----------------------------------------------------------------------------------------------------


def fence(batch_id: str, stream: str) -> tuple[bytes, bytes]:
    """Return the header blocks of two messages that are never stored, to be sent after a commit on one connection.

    The first makes the server drop the batch, if it still has it: no batch goes on with sequence 0 (10176). The second
    expects a last sequence that no stream has, and its refusal (10071) names the sequence that the leader has given
    out: what is under way to its followers is counted, though it cannot be read yet.
    """
    kill = h.encode([(h.BATCH_ID, batch_id), (h.BATCH_SEQUENCE, "0")])
    mark = h.encode([(h.EXPECTED_STREAM, stream), (h.EXPECTED_LAST_SEQ, str(IMPOSSIBLE_SEQ))])
    return kill, mark


def reached(description: str) -> int | None:
    """Return the sequence in the refusal of a fence's second message, where it names one."""
    found = _LAST_SEQ.search(description)
    return int(found[1]) if found else None


def _fenced(replies: FenceReplies, stream: str) -> int | None:
    """Return the sequence that the leader will reach, where it says so."""
    killed, marked = (_refusal(header, payload, stream) for header, payload in replies[1:])
    if killed.err_code not in _FORGOTTEN or marked.code == 503:
        raise NotYetKnown(f"the stream's leader does not answer for the batch: {killed.description}")
    return reached(marked.description or "")


def _refusal(header: bytes, payload: bytes, stream: str) -> ServerError:
    try:
        reply = read_reply(header, payload)
    except ResponseError as error:
        raise NotYetKnown(f"the answer to a fence is malformed: {error}") from error
    if not isinstance(reply, ServerError):
        raise NotYetKnown("the server did not refuse a message that cannot be stored")
    answering = orjson.loads(payload).get("stream", stream) if payload else stream
    if answering != stream:
        raise NeverKnown(f"the batch's last subject belongs to stream {answering!r} by now")
    return reply
