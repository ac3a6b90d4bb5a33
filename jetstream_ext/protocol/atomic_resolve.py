"""Whether a stream stored an atomic batch whose commit was not answered: questions, and what the answers prove.

A `Plan` yields a question, is sent its answer, and returns the verdict: the ack that the commit should have had, or
None, which proves that nothing of the batch is stored or will be. `client.atomic_session` asks.

A stored batch is a run of sequences, and each of its messages has the batch's id in a header. So one message with the
id proves that all were stored, and a stream in which nothing is missing proves that none was. Messages that were
removed since then leave holes. If a hole has room for the whole batch, the outcome cannot be known.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import orjson

from jetstream_ext.errors import ErrorCode, ResponseError, ServerError, Status
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.api import StreamState, recreated
from jetstream_ext.protocol.atomic_wire import read_reply
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.gaps import find_gaps
from jetstream_ext.types import BatchAck

# An expectation that no stream meets (the largest that servers parse): the refusal names the stream's last sequence.
_IMPOSSIBLE_SEQ: Final = (1 << 63) - 1
_LAST_SEQ: Final = re.compile(r"wrong last sequence: (\d+)\Z")
# After these refusals of the fence's first message the server does not have the batch.
_FORGOTTEN: Final = frozenset({ErrorCode.ATOMIC_DISABLED, ErrorCode.ATOMIC_INCOMPLETE, ErrorCode.ATOMIC_TOO_LARGE})
# Servers remember message ids for the duplicate window; the extra minute covers clocks that differ.
_CLOCK_SKEW: Final = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Commit:
    """What was known when the commit was sent."""

    batch_id: str
    size: int  # how many messages the batch has
    staged: int  # the highest batch sequence that the server had acknowledged
    last_subject: str  # the subject of the batch's last message
    opened: StreamState | None  # the stream when the batch was opened; None: it could not be looked up
    after: int  # a sequence that the stream had then
    session: int  # the session of the connection that the commit was written to


class NeverKnown(Exception):  # noqa: N818 - a verdict, not an error
    """The outcome cannot be known, now or later."""


class NotYetKnown(Exception):  # noqa: N818
    """The outcome cannot be known now; another attempt may find it out."""


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
    """Pass the messages that `DirectGet.scan` finds with the options to `search`; the answer is None."""

    stream: str
    search: Search
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AskFence:
    """Send two messages without payload in one write; the answer is the session and the replies, header and payload."""

    subject: str
    kill: bytes
    mark: bytes


Query = AskState | AskMessage | AskRange | AskFence
FenceReplies = tuple[int, tuple[bytes, bytes], tuple[bytes, bytes]]
Plan = Generator[Query, Any, BatchAck | None]


def find_commit(commit: Commit) -> Plan:
    """Find out what became of a commit; raise NotYetKnown or NeverKnown, with the reason, if it cannot be known."""
    opened, after = commit.opened, commit.after
    if opened is None:
        raise NeverKnown("the state of the stream could not be read when the batch was opened")
    state = yield from _state(opened)
    if state.last_seq < after:
        raise NotYetKnown("the stream's leader lacks messages that the stream had when the batch was opened")

    # If the last message on the batch's last subject belongs to the batch, the whole batch is stored.
    last: StoredMsg | None = yield AskMessage(state.name, {"last_by_subj": commit.last_subject})
    if last is not None and last.seq > after:
        newest = Search(commit.batch_id, commit.size, last.seq - 1)
        newest.see(last.seq, last.headers)
        if newest.last_seq is not None:
            return _ack(commit, state, newest.last_seq)

    # The fence follows the commit on the same connection. So its refusals prove that the leader has processed the
    # commit, and name the sequence that the stream will reach. Then every message since the batch was opened is read.
    replies: FenceReplies = yield AskFence(commit.last_subject, *_fence(commit.batch_id, state.name))
    session, until = replies[0], _fenced(replies, state.name)
    leader = state.leader
    state = yield from _state(opened, until or 0)
    if state.leader != leader:
        raise NotYetKnown("the stream's leader changed during the search")
    if state.last_seq < (until or 0):
        # The leader may have refused messages when it applied them; the next attempt's fence does not count them.
        raise NotYetKnown("the stream's leader has not yet applied all messages that it accepted")
    if until is None and state.replicated:
        raise NotYetKnown("the stream's leader did not report the stream's last sequence")

    search = Search(commit.batch_id, commit.size, after, contiguous=state.contiguous)
    yield from _read(state, search)
    if search.last_seq is not None:
        return _ack(commit, state, search.last_seq)
    state = yield from _state(opened)
    if state.leader != leader or not state.leader_is_certain:
        # A former leader that does not know its successor may have answered the reads.
        raise NotYetKnown("the stream's leader changed, or has lost its majority")
    if search.room:
        raise NeverKnown("the stream has removed messages since the batch was opened, possibly those of the batch")
    if session != commit.session and not commit.staged:
        # If the server had acknowledged a message, the fence is proof on any connection: it makes the server drop that
        # message, and a batch cannot start in the middle.
        raise NeverKnown("the client has reconnected, and the commit may still arrive over the old connection")
    return None


def find_earlier(commit: Commit, now: datetime) -> Plan:
    """Find an earlier batch with the same id and size; the verdict is None unless its last message is still stored."""
    if commit.opened is None:
        return None
    stream, subject = commit.opened.name, commit.last_subject
    state: StreamState | None = yield AskState(stream)
    last: StoredMsg | None = yield AskMessage(stream, {"last_by_subj": subject})
    if state is None:
        return None
    ending = _Ending(commit.batch_id, commit.size, 0)
    if last is not None:
        ending.see(last.seq, last.headers)
    if ending.last_seq is None and state.allows_direct:
        since = now - (state.duplicate_window or timedelta()) - _CLOCK_SKEW
        yield AskRange(stream, ending, {"subject": subject, "start_time": since})
    return None if ending.last_seq is None else _ack(commit, state, ending.last_seq)


def _state(opened: StreamState, seq: int = 0) -> Generator[Query, Any, StreamState]:
    state: StreamState | None = yield AskState(opened.name, seq)
    if state is None:
        raise NeverKnown("the stream no longer exists")
    if recreated(opened.created, state.created):
        raise NeverKnown("the stream was deleted and re-created")
    return state


def _read(state: StreamState, search: Search) -> Generator[Query, Any, None]:
    """Pass the messages after those that `search` has seen to it, up to the last sequence in `state`."""
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


class Search:
    """Looks for a batch among the messages of a stream after the sequence `after`; it sees them in order.

    `contiguous`: the messages of a batch have consecutive sequences. On a stream with sources they may not.
    """

    def __init__(self, batch_id: str, size: int, after: int, *, contiguous: bool = True) -> None:
        self.last_seq: int | None = None  # of the batch's last message, once one of its messages was seen
        self.next_seq: int = after + 1
        self._batch_id = batch_id
        self._size = size
        self._contiguous = contiguous
        self._hole = 0

    def see(self, seq: int, headers: Mapping[str, str]) -> None:
        self.skip(seq - 1)
        self.next_seq = seq + 1
        number = headers.get(h.BATCH_SEQUENCE, "")
        if headers.get(h.BATCH_ID) == self._batch_id and number.isdecimal() and 0 < int(number) <= self._size:
            self.last_seq = seq + self._size - int(number)

    def skip(self, to: int) -> None:
        """Note that the stream has no more messages up to the sequence `to`."""
        for gap in find_gaps(self.next_seq - 1, (to + 1,), to):
            self._hole = max(self._hole, len(gap)) if self._contiguous else self._hole + len(gap)
            self.next_seq = gap.stop

    @property
    def room(self) -> bool:
        """Whether a run of missing messages has room for the batch."""
        return self._hole >= self._size


class _Ending(Search):
    """Looks for the last message of a batch: it has the commit header, which servers add if a marker committed it."""

    def see(self, seq: int, headers: Mapping[str, str]) -> None:
        ends = h.BATCH_COMMIT in headers and headers.get(h.BATCH_SEQUENCE) == str(self._size)
        if ends and self.last_seq is None:
            super().see(seq, headers)


def _fence(batch_id: str, stream: str) -> tuple[bytes, bytes]:
    """Return the header blocks of two messages that are never stored.

    The first makes the server drop the batch if it has it: no batch continues with sequence 0 (10176). The second
    expects a last sequence that no stream has, and its refusal (10071) names the last sequence that the leader has
    assigned. That includes messages that are still being replicated and cannot be read yet.
    """
    kill = h.encode([(h.BATCH_ID, batch_id), (h.BATCH_SEQUENCE, "0")])
    mark = h.encode([(h.EXPECTED_STREAM, stream), (h.EXPECTED_LAST_SEQ, str(_IMPOSSIBLE_SEQ))])
    return kill, mark


def _fenced(replies: FenceReplies, stream: str) -> int | None:
    """Return the sequence that the leader will reach, if the second refusal names one."""
    killed, marked = (_refusal(header, payload, stream) for header, payload in replies[1:])
    if killed.err_code not in _FORGOTTEN or marked.code == Status.UNAVAILABLE:
        raise NotYetKnown(f"the stream's leader did not confirm that it dropped the batch: {killed.description}")
    found = _LAST_SEQ.search(marked.description or "")
    return int(found[1]) if found else None


def _refusal(header: bytes, payload: bytes, stream: str) -> ServerError:
    try:
        reply = read_reply(header, payload)
    except ResponseError as error:
        raise NotYetKnown(f"the answer to a probe message of resolve() is malformed: {error}") from error
    if not isinstance(reply, ServerError):
        raise NotYetKnown("the server did not refuse a probe message of resolve() as expected")
    answering = orjson.loads(payload).get("stream", stream) if payload else stream
    if answering != stream:
        raise NeverKnown(f"the subject of the batch's last message now belongs to stream {answering!r}")
    return reply
