"""Whether a stream stored an atomic batch whose commit was not answered, or was refused as a repetition (10201).

A `Plan` yields a question, is sent its answer, and returns the verdict: the ack that the commit should have had, or
None, which proves that nothing of the batch is stored or will be. `client.atomic_session` asks.

A stored batch is a run of sequences, and each of its messages has the batch's id in a header. So one message with the
id proves that all were stored, and a stream in which nothing is missing proves that none was. Messages that were
removed since then leave holes. If a hole has room for the whole batch, the outcome cannot be known.

An id that was not generated may be another batch's too: of an earlier one, or of another publisher at the same time, whose
messages the server then puts into the same batch. So every message of the run that was found is compared
(`atomic_wire.fingerprint`), and a run with a hole proves nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from jetstream_ext.errors import ErrorCode, ResponseError, ServerError, Status
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.api import StreamState, recreated
from jetstream_ext.protocol.atomic_wire import answering_stream, fingerprint, read_reply
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.fence import mark, marked_seq
from jetstream_ext.protocol.gaps import find_gaps
from jetstream_ext.protocol.numbers import parse_number
from jetstream_ext.protocol.options import rfc3339
from jetstream_ext.types import BatchAck

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
    fingerprints: Sequence[int] | None = None  # of its messages; None: no other batch can have its id


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
    search: Search | _Endings
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
    state = yield from _opened_state(commit)
    after = commit.after
    if state.last_seq < after:
        raise NotYetKnown("the stream's leader lacks messages that the stream had when the batch was opened")
    ack = yield from _newest(commit, state, after)
    if ack is not None:
        return ack
    state, session = yield from _settle(commit, state)
    search = Search(commit, after, contiguous=state.contiguous)
    yield from _read(state, search, state.last_seq)
    if search.last_seq is not None:
        return _ack(commit, state, search.last_seq)
    yield from _check_leader(commit, state)
    if search.doubt:
        raise NeverKnown(search.doubt)
    if search.room:
        raise NeverKnown("the stream has removed messages since the batch was opened, possibly those of the batch")
    if session != commit.session and not commit.staged:
        # If the server had acknowledged a message, the fence is proof on any connection: it makes the server drop that
        # message, and a batch cannot start in the middle.
        raise NeverKnown("the client has reconnected, and the commit may still arrive over the old connection")
    return None


def find_earlier(commit: Commit, now: datetime) -> Plan:
    """Find out whether a batch that was refused because of its message ids (10201) had been stored before.

    The verdict None proves that it was not, within the stream's duplicate window. Raises as `find_commit` does.
    """
    state = yield from _opened_state(commit)
    ack = yield from _newest(commit, state, 0)
    if ack is not None:
        return ack
    # The leader also knows the ids of messages that it has not applied yet.
    state, _ = yield from _settle(commit, state)
    since = now - (state.duplicate_window or timedelta()) - _CLOCK_SKEW
    endings = _Endings(commit)
    yield from _read_subject(state, endings, commit.last_subject, since)
    doubt = False
    for last_seq in reversed(endings.seqs):
        search = Search(commit, last_seq - commit.size)
        yield from _read(state, search, last_seq)
        if search.last_seq is not None:
            return _ack(commit, state, search.last_seq)
        doubt |= search.partial
    state = yield from _check_leader(commit, state)
    if doubt or not (yield from _has_all(state, since)):
        raise NeverKnown("the stream has removed messages, possibly those of an earlier batch with this id")
    return None


def _opened_state(commit: Commit) -> Generator[Query, Any, StreamState]:
    if commit.opened is None:
        raise NeverKnown("the state of the stream could not be read when the batch was opened")
    if commit.fingerprints is not None and commit.opened.config.get("subject_transform"):
        raise NeverKnown("the stream transforms subjects, so its messages cannot be compared with those of the batch")
    return (yield from _state(commit.opened))


def _newest(commit: Commit, state: StreamState, after: int) -> Plan:
    """Return the ack of the batch if the last message on its last subject belongs to it and is behind `after`."""
    last: StoredMsg | None = yield AskMessage(state.name, {"last_by_subj": commit.last_subject})
    if last is None or last.seq <= after:
        return None
    newest = Search(replace(commit, fingerprints=None), last.seq - 1)
    newest.see(last)
    if newest.last_seq is not None and commit.fingerprints is not None:
        newest = Search(commit, newest.last_seq - commit.size)
        yield from _read(state, newest, newest.next_seq + commit.size - 1)
    return None if newest.last_seq is None else _ack(commit, state, newest.last_seq)


def _settle(commit: Commit, state: StreamState) -> Generator[Query, Any, tuple[StreamState, int]]:
    """Wait until the leader has applied what it had accepted; return the stream then, and the connection's session.

    The fence follows the commit on the same connection. So its refusals prove that the leader has processed the commit,
    and name the sequence that the stream will reach.
    """
    leader = state.leader
    replies: FenceReplies = yield AskFence(commit.last_subject, *_fence(commit.batch_id, state.name))
    until = _fenced(replies, state.name)
    state = yield from _state(state, until or 0)
    if state.leader != leader:
        raise NotYetKnown("the stream's leader changed during the search")
    if state.last_seq < (until or 0):
        # The leader may have refused messages when it applied them; the next attempt's fence does not count them.
        raise NotYetKnown("the stream's leader has not yet applied all messages that it accepted")
    if until is None and state.replicated:
        raise NotYetKnown("the stream's leader did not report the stream's last sequence")
    return state, replies[0]


def _check_leader(commit: Commit, before: StreamState) -> Generator[Query, Any, StreamState]:
    """Return the stream after the reads; a former leader that does not know its successor may have answered them."""
    state = yield from _state(before)
    if state.leader != before.leader or not state.leader_is_certain:
        raise NotYetKnown("the stream's leader changed, or has lost its majority")
    return state


def _has_all(state: StreamState, since: datetime) -> Generator[Query, Any, bool]:
    """Return whether the stream has removed nothing that was stored since then."""
    if state.never_removed or not state.has_every_sequence:
        return state.never_removed
    first: StoredMsg | None = yield AskMessage(state.name, {"seq": state.first_seq, "next_by_subj": ">"})
    return first is not None and first.seq == state.first_seq and first.time < since


def _state(before: StreamState, seq: int = 0) -> Generator[Query, Any, StreamState]:
    state: StreamState | None = yield AskState(before.name, seq)
    if state is None:
        raise NeverKnown("the stream no longer exists")
    if recreated(before.created, state.created):
        raise NeverKnown("the stream was deleted and re-created")
    return state


def _read(state: StreamState, search: Search, end: int) -> Generator[Query, Any, None]:
    """Pass the messages after those that `search` has seen to it, up to the sequence `end`."""
    end = min(end, state.last_seq)
    if state.allows_direct and search.next_seq <= end:
        yield AskRange(state.name, search, {"seq": search.next_seq, "up_to_seq": end, "confirm": True})
    while not state.allows_direct and search.next_seq <= end:
        found: StoredMsg | None = yield AskMessage(state.name, {"seq": search.next_seq, "next_by_subj": ">"})
        if found is None or found.seq > end:
            break
        search.see(found)
    search.skip(end)


def _read_subject(state: StreamState, endings: _Endings, subject: str, since: datetime) -> Generator[Query, Any, None]:
    """Pass the messages on `subject` since then to `endings`."""
    if not state.last_seq:
        return
    if state.allows_direct:
        options = {"subject": subject, "start_time": since, "up_to_seq": state.last_seq, "confirm": True}
        yield AskRange(state.name, endings, options)
        return
    request: dict[str, Any] = {"start_time": rfc3339(since, "since"), "next_by_subj": subject}
    while (found := (yield AskMessage(state.name, request))) is not None:
        endings.see(found)
        request = {"seq": found.seq + 1, "next_by_subj": subject}


def _ack(commit: Commit, state: StreamState, last_seq: int) -> BatchAck:
    return BatchAck(state.name, last_seq, commit.batch_id, commit.size)


def _number(batch_id: str, headers: Mapping[str, str]) -> int:
    """Return the batch sequence of a message with these headers, or 0 if it does not belong to the batch."""
    return parse_number(headers.get(h.BATCH_SEQUENCE, "")) or 0 if headers.get(h.BATCH_ID) == batch_id else 0


class _Endings:
    """Collects where batches with the id and the size of `commit` end: servers mark the last message that they store."""

    def __init__(self, commit: Commit) -> None:
        self.seqs: list[int] = []
        self._commit = commit

    def see(self, message: StoredMsg) -> None:
        if h.BATCH_COMMIT in message.headers and _number(self._commit.batch_id, message.headers) == self._commit.size:
            self.seqs.append(message.seq)


class Search:
    """Looks for a batch among the messages of a stream after the sequence `after`; it sees them in order.

    `contiguous`: the messages of a batch have consecutive sequences. On a stream with sources they may not.
    """

    def __init__(self, commit: Commit, after: int, *, contiguous: bool = True) -> None:
        self.last_seq: int | None = None  # of the batch's last message, once the batch is found
        self.next_seq: int = max(0, after) + 1
        self._commit = commit
        self._contiguous = contiguous
        self._hole = 0
        # The run of messages with the batch's id that is being compared.
        self._start = self._last_number = self._same = self._others = 0
        self._partial = self._mixed = False

    def see(self, message: StoredMsg) -> None:
        seq, headers, commit = message.seq, message.headers, self._commit
        self.skip(seq - 1)
        self.next_seq = seq + 1
        number = _number(commit.batch_id, headers)
        if commit.fingerprints is not None and number:
            self._compare(number, message, commit.fingerprints)
        elif 0 < number <= commit.size:
            self.last_seq = seq + commit.size - number

    def _compare(self, number: int, message: StoredMsg, fingerprints: Sequence[int]) -> None:
        start, size = message.seq - number, self._commit.size
        if number <= self._last_number or (self._contiguous and start != self._start):
            self._partial = self.partial  # another run begins
            self._same = self._others = 0
        self._start, self._last_number = start, number
        # Servers mark the last message of every batch that they store.
        ends = h.BATCH_COMMIT in message.headers
        if (
            number <= size
            and ends == (number == size)
            and fingerprints[number - 1] == fingerprint(message.subject, message.headers, message.data)
        ):
            self._same += 1
        else:
            self._others += 1
        if self._same == size and not self._others:
            self.last_seq = message.seq
        self._mixed |= self._same > 0 < self._others

    def skip(self, to: int) -> None:
        """Note that the stream has no more messages up to the sequence `to`."""
        for gap in find_gaps(self.next_seq - 1, (to + 1,), to):
            self._hole = max(self._hole, len(gap)) if self._contiguous else self._hole + len(gap)
            self.next_seq = gap.stop

    @property
    def partial(self) -> bool:
        """Whether a run with the batch's id could be the batch, but has a hole."""
        return self._partial or (0 < self._same < self._commit.size and not self._others)

    @property
    def doubt(self) -> str:
        """Why a batch with the same id, which is not proved to be this one, may be it or a part of it; or nothing."""
        if self.partial:
            return "the stream has removed messages of a batch with this id"
        if self._mixed:
            return "the stream has a batch with this id that has some of its messages and others: another publisher uses the id"
        return ""

    @property
    def room(self) -> bool:
        """Whether a run of missing messages has room for the batch."""
        return self._hole >= self._commit.size


def _fence(batch_id: str, stream: str) -> tuple[bytes, bytes]:
    """Return the header blocks of two messages that are never stored.

    The first makes the server drop the batch if it has it: no batch continues with sequence 0 (10176).
    """
    return h.encode([(h.BATCH_ID, batch_id), (h.BATCH_SEQUENCE, "0")]), mark(stream)


def _fenced(replies: FenceReplies, stream: str) -> int | None:
    """Return the sequence that the leader will reach, if the second refusal names one."""
    killed, marked = (_refusal(header, payload, stream) for header, payload in replies[1:])
    if killed.err_code not in _FORGOTTEN or marked.code == Status.UNAVAILABLE:
        raise NotYetKnown(f"the stream's leader did not confirm that it dropped the batch: {killed.description}")
    return marked_seq(marked)


def _refusal(header: bytes, payload: bytes, stream: str) -> ServerError:
    try:
        reply = read_reply(header, payload)
    except ResponseError as error:
        raise NotYetKnown(f"the answer to a probe message of resolve() is malformed: {error}") from error
    if not isinstance(reply, ServerError):
        raise NotYetKnown("the server did not refuse a probe message of resolve() as expected")
    answering = answering_stream(payload) or stream
    if answering != stream:
        raise NeverKnown(f"the subject of the batch's last message now belongs to stream {answering!r}")
    return reply
