"""An atomic batch as a machine (ADR-50, the atomic half; server API level 2, the end-of-batch marker level 4).

The server stages the messages of a batch and checks them only when it is committed, so until then nothing of it is
stored, whatever happens. `TABLE` says where each input leads in each state; docs/design/atomic-batch.md explains it.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any, Final, NamedTuple

from jetstream_ext import errors
from jetstream_ext.errors import BatchError, ErrorCode, JetStreamExtError, Outcome, ResponseError, ServerError, Status
from jetstream_ext.protocol import atomic_wire as wire
from jetstream_ext.protocol.api import StreamState, Target
from jetstream_ext.protocol.atomic_wire import Block, Encoded, Encoder, has_no_options
from jetstream_ext.protocol.feature_table import ATOMIC, ATOMIC_EOB, FENCED_BATCHES
from jetstream_ext.protocol.frames import pub
from jetstream_ext.protocol.options import as_message, check_batch_id
from jetstream_ext.protocol.subjects import SubjectElsewhere
from jetstream_ext.protocol.trace_context import TraceContext
from jetstream_ext.text import counted, get_logger, log_state
from jetstream_ext.types import BatchAck, BatchMessage, Entry

_log: Final = get_logger("atomic")

# A server that dropped the batch says so only in replies, and a source of messages may never end. So at least one
# message in so many asks for a reply, and a bulk waits for that reply if the server is so many messages behind.
_ASK_AT_LEAST_EVERY: Final = 1000
_DISCARDED_TOO_LATE: Final = "it was discarded while its commit was in flight"


class State(enum.Enum):
    """Where a batch is: the columns of `TABLE`."""

    NEW = "new"  # messages can be checked; nothing was sent, and the server is not known
    OPEN = "open"  # takes messages; a lost answer means that nothing is stored, because no commit was sent
    COMMITTING = "committing"  # the commit was sent; a lost answer means UNKNOWN
    COMMITTED = "committed"  # everything is stored
    DISCARDED = "discarded"  # nothing is stored
    FAILED = "failed"  # nothing is stored
    UNKNOWN = "unknown"  # everything is stored or nothing; only reading the stream tells (`protocol.atomic_resolve`)


class Input(enum.Enum):
    """What can happen to a batch, except that it takes messages: the rows of `TABLE`."""

    OPENED = "the server that takes the batch is known"
    COMMIT_SENT = "the commit was sent"
    DISCARDED = "the caller discarded the batch"
    STAGED = "an empty reply: the server has the message and all before it"
    ACKNOWLEDGED = "the ack of the batch"
    STORED_SEPARATELY = "the ack of an ordinary message: the server does not know batches"
    MESSAGE_REFUSED = "the newest message was refused, and the server keeps the batch without it"
    BATCH_REFUSED = "the server has refused the batch, and dropped it"
    SEEN_BEFORE = "the commit was refused for its message ids: the batch may have been stored before"
    REPLY_MALFORMED = "a reply that breaks the protocol"
    ANSWER_LOST = "no reply in time, or the connection was lost while a reply was awaited"
    DISCONNECTED = "the connection was lost while no reply was awaited"
    FOUND_STORED = "`resolve` found the batch in the stream"
    FOUND_NOTHING = "`resolve` proved that nothing of the batch is stored"


NEW, OPEN, COMMITTING, COMMITTED, DISCARDED, FAILED, UNKNOWN = State
___: Final = None

TABLE: Final[dict[Input, tuple[State | None, ...]]] = {
    #                         NEW        OPEN        COMMITTING  COMMITTED  DISCARDED  FAILED     UNKNOWN
    Input.OPENED:            (OPEN,      ___,        ___,        ___,       ___,       ___,       ___),
    Input.COMMIT_SENT:       (___,       COMMITTING, ___,        ___,       ___,       ___,       ___),
    Input.DISCARDED:         (DISCARDED, DISCARDED,  UNKNOWN,    ___,       ___,       ___,       ___),
    Input.STAGED:            (___,       OPEN,       COMMITTING, ___,       ___,       ___,       ___),
    Input.ACKNOWLEDGED:      (___,       UNKNOWN,    COMMITTED,  ___,       ___,       ___,       ___),
    Input.STORED_SEPARATELY: (___,       FAILED,     FAILED,     ___,       ___,       ___,       ___),
    Input.MESSAGE_REFUSED:   (___,       OPEN,       OPEN,       ___,       ___,       ___,       ___),
    Input.BATCH_REFUSED:     (___,       FAILED,     FAILED,     ___,       ___,       ___,       ___),
    Input.SEEN_BEFORE:       (___,       ___,        UNKNOWN,    ___,       ___,       ___,       ___),
    Input.REPLY_MALFORMED:   (___,       FAILED,     UNKNOWN,    ___,       ___,       ___,       ___),
    Input.ANSWER_LOST:       (___,       FAILED,     UNKNOWN,    ___,       ___,       ___,       ___),
    Input.DISCONNECTED:      (___,       OPEN,       ___,        ___,       ___,       ___,       ___),
    Input.FOUND_STORED:      (___,       ___,        ___,        ___,       ___,       ___,       COMMITTED),
    Input.FOUND_NOTHING:     (___,       ___,        ___,        ___,       ___,       ___,       FAILED),
}  # fmt: skip
"""Where an input leads; ``___`` ignores it."""

_NEXT: Final = {(state, event): after for event, row in TABLE.items() for state, after in zip(State, row, strict=True)}


class Measured(NamedTuple):
    """A message of a batch as it was sent; servers count its headers, those of the batch too, and its payload."""

    size: int
    subject: str
    seq: int


class Unresolved(enum.Enum):
    """What `resolve` must find out about a batch that has ended."""

    NONE = "its outcome is known"
    COMMIT = "whether its commit was applied"
    EARLIER = "whether an earlier batch with its id stored its messages"


class AtomicBatchMachine:
    """One atomic batch; `open` comes before the first `add`.

    The calls from `prepare` to `commit` raise the BatchError that ended the batch. A call that raises changes nothing.
    The arguments are those of `AtomicBatch`, and `max_payload` as in `limit_messages`. With `in_one_go` the whole batch
    is sent without returning to the caller: its newest message is held back to commit it, and a disconnection in
    between ends it.

    With `own_id` no other batch can have the id, so one message with it proves that the batch is stored. Otherwise
    another publisher may use it at the same time or may have used it before, and the machine keeps the fingerprint of
    every message, to tell this batch from others in the stream. The server tells batches apart only by their id: if it
    refuses message 1, message 2 may continue an earlier batch, and the commit would store that one. So message 1 then
    always has a reply subject, and the commit is sent after the reply to it; see `begin`.
    """

    def __init__(
        self,
        batch_id: str,
        *,
        own_id: bool = False,
        max_payload: int = 1 << 20,
        inbox_size: int = 0,
        ack_first: bool = True,
        ack_every: int | None = None,
        in_one_go: bool = False,
    ) -> None:
        self.batch_id: str = check_batch_id(batch_id)
        self.state: State = NEW
        self.sent: int = 0  # the highest batch sequence that was sent
        self.staged: int = 0  # the highest batch sequence that the server said it has
        self.ack: BatchAck | None = None
        self.error: JetStreamExtError | None = None
        self._source = f"batch {batch_id}"  # for the log
        self._encoder = Encoder(self.batch_id, max_payload, inbox_size)
        self._ack_first = ack_first
        self._ack_every = ack_every or _ASK_AT_LEAST_EVERY
        self._in_one_go = in_one_go
        # Known from `open` on.
        self._reply = b""
        self._server_version = ""
        self.no_jetstream: str = ""  # why perhaps no JetStream answers, for the error about a subject without a stream
        self._has_marker = False
        self._holds_back = False
        self._stream: StreamState | None = None
        self.target: Target = Target()
        self._other = ""  # another stream that has answered
        self._unknown: set[str] = set()  # subjects of which no server said which stream stores them
        # What the batch consists of.
        self._subjects: list[str] = []
        self._fingerprints: list[int] | None = None if own_id else []
        self.begun: bool = own_id  # the server cannot take the next message for one of another batch
        self._written: set[str] = set()
        self._first_subject = b""
        self._held: Encoded | None = None
        # The largest message, the largest one before it, and a refused one that is no longer part of the batch.
        self._largest = self._largest_before = Measured(0, "", 0)
        self._taken_back: Measured | None = None
        # What the commit consists of, to take it back.
        self._commit_has_message = False
        self._commit_held: Encoded | None = None
        self._refused: JetStreamExtError | None = None  # what the answer to the commit must confirm
        self._given_up = False
        self._duplicate: ServerError | None = None  # the refusal that led to UNKNOWN: the stream has seen message ids
        self._doubt_from = 0  # the first sequence after a disconnection that no reply has settled, or 0

    @property
    def size(self) -> int:
        """How many messages the batch will store."""
        return len(self._subjects)

    @property
    def subjects(self) -> Collection[str]:
        """The subjects of the messages that were added."""
        return self._written

    @property
    def last_subject(self) -> str:
        return self._subjects[-1] if self._subjects else ""

    @property
    def fingerprints(self) -> tuple[int, ...] | None:
        """What tells each message of the batch from others; None if no other batch can have its id."""
        return None if self._fingerprints is None else tuple(self._fingerprints)

    @property
    def ended(self) -> bool:
        """Whether no reply of the server can change the batch any more."""
        return self.state not in (NEW, OPEN, COMMITTING)

    # -- messages -----------------------------------------------------------------------------------------------

    def limit_messages(self, max_payload: int) -> None:
        """Set the server's limit for headers and payload together, in bytes, of the messages to come."""
        self._encoder.max_payload = max_payload

    @property
    def max_traced(self) -> int:
        """As `limit_messages` says, for messages with a trace context."""
        return self._encoder.max_traced

    def prepare(self, message: BatchMessage, ack: bool | None = None) -> Encoded:
        """Check and encode a message for `open`, `add` or `commit`; raise as `Encoder.encode` does.

        Raises SubjectElsewhere if the batch is open and its stream is known not to have the subject.
        """
        self.check_open()
        return self._encoder.encode(message, ack)

    def open(
        self, first: Encoded, *, api_level: int, server_version: str, reply: str, stream: StreamState | None = None
    ) -> None:
        """Open the batch for messages; `first` must be the first that is added. `stream` takes it, if that is known.

        Below API level 4 the newest message is held back, because there the only way to commit is on a message. The
        reply subject of a message is ``<reply>.<batch sequence>``. Raises UnsupportedFeatureError if the server has no
        atomic batches, or would not check what `first` expects.
        """
        self.check_open()
        if not ATOMIC.at(api_level):
            raise ATOMIC.unsupported(server_version=server_version, api_level=api_level, detail="nothing was sent")
        self._check_server(first, server_version)
        self._reply = reply.encode() + b"."
        self._server_version = server_version
        self._has_marker = ATOMIC_EOB.at(api_level)
        self._holds_back = self._in_one_go or not self._has_marker
        self._stream = stream
        self._encoder.max_msg_size = None if stream is None else stream.max_msg_size
        if stream is not None and stream.stores(first[0]):  # otherwise accounts may map subjects: the server decides
            self._encoder.subjects.limit_to(stream.stores)
        self._apply(Input.OPENED)

    def check_stream(self, subject: str, stream: str | None) -> None:
        """Take the answer to a SubjectElsewhere: the name of the stream that stores `subject`, or None if it is not known.

        Raises BadSubjectError if that is another stream than the batch's.
        """
        assert self._stream is not None
        if stream is None:
            self._unknown.add(subject)
        self._encoder.subjects.answer(subject, stream, self._stream.name, f"batch {self.batch_id}", "an atomic batch")

    def add(self, message: Encoded) -> Block:
        """Take a message; return what to send: nothing if the message is held back.

        Raises ValueError if the message cannot be at this place of the batch, and UnsupportedFeatureError if this
        server would not check what it expects.
        """
        self.check_open()
        self._check_place(message)
        self._encoder.check_size(message)
        self._check_held()
        self._count([message[0]])
        self._identify(message)
        ready: Encoded | None = message
        if self._holds_back:
            ready, self._held = self._held, message
        return self._block([ready] if ready is not None else [])

    def add_many(
        self,
        messages: Iterator[Entry],
        limit: int,
        first: Encoded | None = None,
        trace: TraceContext | None = None,
    ) -> Block:
        """Take `first` and then `messages`, until payloads and own headers have `limit` bytes or something stops it.

        The `messages` get a trace context; `first` is encoded already.

        The message that reaches the limit is the last. The messages before the one that stopped it are in the block and
        part of the batch; a refused one is not.
        """
        self.check_open()
        out: list[bytes] = []
        count = size = awaited = last_asked = 0
        # Of the newest message: most of the sizes and headers repeat.
        line, line_head, line_body, line_digits = b"", b"", -1, 0
        names: list[str] = []  # counted at once, unless the place of a message is to be checked
        stopped: BaseException | None = StopIteration()
        encoder, hold_back, ack_every = self._encoder, self._holds_back, self._ack_every
        fingerprints, largest = self._fingerprints, self._largest.size
        self._check_held()
        plain, room, known, end = encoder.plain, encoder.plain_room, encoder.subjects, wire.END
        if trace is not None:
            plain = encoder.plain_with(trace)
            room -= len(trace.lines) + encoder.max_payload - encoder.max_traced
        source: Iterator[Any] = messages if first is None else chain((first,), messages)
        try:
            for message in source:
                payload: object = None
                if type(message) is tuple and len(message) == 2:
                    name, payload = message
                elif type(message) is BatchMessage and has_no_options(message):
                    name, payload = message.subject, message.payload
                if type(payload) is bytes and len(payload) <= room:
                    # Nearly every message of a bulk; the same as `Encoder.encode` makes of it.
                    encoded: Encoded = (name, known[name], plain, payload, None, None)
                else:
                    is_first = first is not None and message is first
                    encoded = message if is_first else self._encode(as_message(message), trace)
                    self._count(names)
                    names = []
                    self._check_place(encoded)
                    limit -= len(encoded[2]) - len(plain)
                names.append(encoded[0])
                if fingerprints is not None:
                    fingerprints.append(encoder.fingerprint(encoded))
                if hold_back:
                    ready, self._held = self._held, encoded
                    if ready is None:
                        continue
                else:
                    ready = encoded
                seq = self.sent + 1
                if seq == 1 or not seq % ack_every or self._doubt_from or ready[4] is not None:
                    command, wants_reply = self._command(ready)
                    out.append(command)
                    if wants_reply:
                        last_asked = seq
                        awaited = seq if self._doubt_from or seq - self.staged >= _ASK_AT_LEAST_EVERY else 0
                else:
                    self.sent = seq
                    _, subject, head, body, _, _ = ready
                    number = b"%d" % seq
                    if len(body) != line_body or head is not line_head or len(number) != line_digits:
                        line_head, line_body, line_digits = head, len(body), len(number)
                        total = len(head) + line_digits + len(end)
                        length = total + line_body
                        line = b" %d %d\r\n%b" % (total, length, head)
                        if length > largest:
                            largest = length
                            self._measure(length, ready)
                    out += b"HPUB ", subject, line, number, end, body, b"\r\n"
                count += 1
                size += len(ready[3])
                if size >= limit or awaited:
                    stopped = None
                    break
        except BaseException as error:  # the caller raises it when the messages before it are sent
            if isinstance(error, SubjectElsewhere):
                error.entry = message
            stopped = error
        self._count(names)
        return Block(b"".join(out), count, size, awaited, last_asked, stopped)

    def _encode(self, message: BatchMessage, trace: TraceContext | None) -> Encoded:
        if trace is not None:
            message = trace.added_to(message, self._encoder.max_traced)
        return self._encoder.encode(message, None)

    def begin(self, last: Encoded | None) -> Block | None:
        """Return None if `commit` may follow at once; else what to send before, and then await that the batch has `begun`.

        The block is empty if message 1 was sent already. Raises as `commit` does.
        """
        self.check_commit(last)
        if not self._must_begin(last):
            return None
        if self.sent or last is None or self._held is None:
            return Block(b"", 0, 0, 0, 0)
        first, self._held = self._held, None
        return self._block([first])

    def commit(self, last: Encoded | None) -> Block:
        """Take the commit, with a last message or none; return what to send. `begin` must have returned None.

        Raises as `check_commit` does.
        """
        self.check_commit(last)
        assert not self._must_begin(last)
        outgoing = [message for message in (self._held, last) if message is not None]
        if last is not None:
            self._count([last[0]])
            self._identify(last)
        self._commit_has_message, self._commit_held, self._held = last is not None, None if last else self._held, None
        block = self._block(outgoing, commit=True)
        self._apply(Input.COMMIT_SENT)
        return block

    def check_commit(self, last: Encoded | None) -> None:
        """Raise what ended the batch, EmptyBatchError if no message could carry the commit, or as `add` does for `last`."""
        self.check_open()
        self._check_held()
        if last is not None:
            self._check_place(last)
            self._encoder.check_size(last)
        elif self._held is None and not (self.sent and self._has_marker):
            why = f"this server is older than {ATOMIC_EOB.since} and commits only with a message, but all messages were sent already; end the batch with commit(subject, payload)"
            raise errors.EmptyBatchError(
                f"batch {self.batch_id}: {why if self.sent else 'the batch has no messages; add one before a commit'}",
                **self._facts("not_stored"),
            )

    def discard(self) -> None:
        """Give the batch up. The server forgets it after 10 s, and nothing of it is stored unless it was committed."""
        self._given_up = True
        self._apply(Input.DISCARDED, _DISCARDED_TOO_LATE)

    # -- what callers may do --------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise the BatchError that ended the batch, if it has ended."""
        if self.state in (NEW, OPEN):
            return
        if self.error is not None:
            raise copy.copy(self.error) from self.error.__cause__
        what = "is being committed" if self.state is COMMITTING else f"has ended ({self.state.value})"
        outcomes: dict[State, Outcome] = {COMMITTED: "stored", DISCARDED: "not_stored"}
        raise errors.BatchClosedError(
            f"batch {self.batch_id} {what}", **self._facts(outcomes.get(self.state, "unknown"))
        )

    def check_added(self) -> None:
        """Raise what ended the batch, unless it was committed: a commit stores what was added before it."""
        if self.state not in (COMMITTING, COMMITTED):
            self.check_open()

    def result(self) -> BatchAck:
        """Return the ack of a commit that was answered, or raise what ended the batch."""
        if self.ack is None:
            if self.state is DISCARDED and self.error is None:
                raise errors.BatchClosedError(
                    f"batch {self.batch_id} was discarded: nothing is stored, so there is no ack",
                    **self._facts("not_stored"),
                )
            self.check_open()
            raise BatchError(
                f"batch {self.batch_id} is still open: nothing is stored; commit it first", **self._facts("not_stored")
            )
        return self.ack

    def finish(self) -> bool:
        """Return whether a clean exit of the block must commit; a batch without messages is discarded.

        Raises what ended the batch inside the block, unless the caller has discarded it since.
        """
        if self.state in (NEW, OPEN):
            if self.size:
                return True
            self._apply(Input.DISCARDED)
        elif self.state not in (COMMITTED, DISCARDED) and not (self.state is FAILED and self._given_up):
            self.check_open()
        return False

    def unresolved(self) -> Unresolved:
        """Return what `resolve` must find out; raise BatchError if the batch is open or its failure says too little."""
        if not self.ended:
            raise BatchError(
                f"batch {self.batch_id} is still open; commit or discard it before resolve()", **self._facts("unknown")
            )
        if self.state is UNKNOWN:
            return Unresolved.COMMIT if self._duplicate is None else Unresolved.EARLIER
        if self.state is FAILED and (
            not isinstance(self.error, BatchError)
            or self.error.outcome != "not_stored"
            or isinstance(self.error, errors.AtomicPublishDuplicateMessageIDError)
        ):
            self.check_open()
        return Unresolved.NONE

    def suspect(self, refusal: JetStreamExtError) -> tuple[Measured, str | None] | None:
        """Return the message that may be why the server refused, if its stream has a ``max_msg_size``, and that stream's name.

        A server drops a message that is too large without a word if it has no reply subject; then the batch is incomplete.
        """
        found: Measured | None = None
        if isinstance(refusal, errors.MessageTooLargeError):
            found = self._taken_back or self._largest
        elif isinstance(refusal, errors.AtomicPublishIncompleteError):
            found = self._largest
        if found is None:
            return None
        own = self._stream is not None and self._stream.stores(found.subject)
        return found, self._stream.name if own and self._stream else None

    def too_large(self, message: Measured, state: StreamState) -> errors.MessageTooLargeError | None:
        """Return the error for a refused batch if `message` is larger than its stream takes now."""
        limit = state.max_msg_size
        if limit is None or message.size <= limit:
            return None
        return errors.MessageTooLargeError(
            f"batch {self.batch_id}: the message on subject {message.subject!r} has {message.size} bytes with its headers, and "
            f"stream {state.name!r} takes {limit} (max_msg_size); nothing of the batch is stored; make the message smaller, or "
            "raise the stream's limit",
            code=Status.INVALID_REQUEST,
            err_code=ErrorCode.MESSAGE_TOO_LARGE,
            description="message size exceeds maximum allowed",
            subject=message.subject,
            size=message.size,
            limit=limit,
            **self._facts("not_stored"),
        )

    # -- what the server and the connection do ----------------------------------------------------------------------

    def is_of_other(self, payload: bytes) -> bool:
        """Return whether a reply is of another stream than the batch's: then it answers nothing, and is only noted."""
        if other := self.target.other(payload):
            self._other = f"; {self.target.answered_by(other)}"
            log_state(_log, self._source, "ignored an answer", other)
        return bool(other)

    def receive(self, seq: int, header: bytes, payload: bytes) -> JetStreamExtError | None:
        """Take the reply to the message with batch sequence `seq`.

        Returns only the refusal of the newest message alone, after which the batch goes on. If no caller awaits it,
        pass it on to `refusal_unobserved`.
        """
        if self.state not in (OPEN, COMMITTING) or not 0 < seq <= self.sent:
            return None  # too late, or a reply to nothing that was sent
        try:
            return self._take(seq, header, payload)
        except ResponseError as error:
            self._apply(Input.REPLY_MALFORMED, str(error), cause=error)
            return None

    def refusal_unobserved(self, refusal: JetStreamExtError) -> None:
        """Fail the batch: no caller awaits this refusal, so a message is missing that was reported as added."""
        if self.state is OPEN:
            self._apply(Input.BATCH_REFUSED, error=refusal)

    def lost(self, why: str) -> None:
        """Note that a reply that was awaited does not come: none in time, or a failed write."""
        self._apply(Input.ANSWER_LOST, why, cause=self._refused)

    def disconnected(self, *, reply_awaited: bool) -> None:
        """Take the loss of the connection.

        The server keeps the batch by its id, but messages may have been lost. So the next message asks for a reply: an
        empty one proves that everything before it arrived, and 10176 says that the batch is lost. If another batch may
        have the id, this needs the reply to message 1.
        """
        if reply_awaited:
            self.lost("the connection was lost before the answer came")
        elif self.state is OPEN and self.sent and not self.begun:
            self.lost("the connection was lost before the answer to its first message came")
        else:
            self._apply(Input.DISCONNECTED)

    def cannot_send(self) -> None:
        """Note that the connection is lost before a block is sent: this ends a batch that is sent in one go."""
        if self._in_one_go and self.sent:
            self.lost("the connection was lost while the batch was being sent")

    def commit_cancelled(self) -> None:
        """Take the end of the wait for the answer to the commit: its caller was cancelled."""
        if self.state is COMMITTING:
            self._apply(Input.DISCARDED, _DISCARDED_TOO_LATE)

    def resolved(self, ack: BatchAck | None) -> None:
        """Take the proven outcome of a commit: the ack that it should have had, or None if nothing is stored."""
        if ack is not None:
            self._apply(Input.FOUND_STORED, ack=ack)
        elif self._duplicate is not None:
            text = "the stream has messages with its ids, but not this batch"
            text = f"batch {self.batch_id}: the commit was refused: {self._duplicate.description}; {text}"
            error = errors.batch_refusal(self._duplicate, text, **self._facts("not_stored"))
            self._apply(Input.FOUND_NOTHING, error=error)
        else:
            why = "the stream has none of its messages, so it was not committed"
            self._apply(Input.FOUND_NOTHING, why, cause=self.error)

    # -- how ------------------------------------------------------------------------------------------------------

    def _check_place(self, message: Encoded) -> None:
        """Refuse expectations that servers refuse at commit, where they cost the whole batch."""
        expectations = message[5]
        if expectations is None:
            return
        if expectations.last_seq and self._subjects:
            raise ValueError("expected_last_seq can only be on the first message of an atomic batch")
        if expectations.subject in self._written:
            raise ValueError(
                f"expected_last_subject_seq on {expectations.subject!r}: an earlier message of the batch already has this "
                "subject; put the expectation on that message"
            )
        self._check_server(message, self._server_version)

    def _must_begin(self, last: Encoded | None) -> bool:
        """Return whether the commit comes after message 1, and the server may take it for that of another batch."""
        return not self.begun and (self.sent > 0 or (last is not None and self._held is not None))

    def _check_held(self) -> None:
        if self._held is not None:
            self._encoder.check_size(self._held)

    def _identify(self, message: Encoded) -> None:
        if self._fingerprints is not None:
            self._fingerprints.append(self._encoder.fingerprint(message))

    @staticmethod
    def _check_server(message: Encoded, server_version: str) -> None:
        if message[5] is not None and message[5].subject is not None:
            FENCED_BATCHES.check(server_version, "the message was not added")

    def _measure(self, size: int, message: Encoded) -> None:
        """Note the size of the message with the newest sequence."""
        if size > self._largest.size:
            self._largest, self._largest_before = Measured(size, message[0], self.sent), self._largest

    def _count(self, names: list[str]) -> None:
        self._taken_back = None
        self._subjects += names
        self._written.update(names)

    def _block(self, messages: list[Encoded], *, commit: bool = False) -> Block:
        """Return the commands of `messages`, the last one with the commit; without messages the commit is a marker."""
        out: list[bytes] = []
        asked = 0
        for message in messages:
            command, wants_reply = self._command(message, commit=commit and message is messages[-1])
            asked = self.sent if wants_reply else 0
            out.append(command)
        if commit and not messages:
            # The marker has a sequence of its own and is not stored.
            asked = self.sent = self.sent + 1
            head = b"%b%d%b" % (self._encoder.plain, asked, wire.MARKER)
            out.append(pub(self._first_subject, b"%b%d" % (self._reply, asked), head, b""))
        return Block(b"".join(out), len(out), sum(len(message[3]) for message in messages), asked, asked)

    def _command(self, message: Encoded, *, commit: bool = False) -> tuple[bytes, bool]:
        """Give a message its sequence; return its command, and whether a caller may await the reply."""
        _, subject, head, payload, ack, _ = message
        seq = self.sent = self.sent + 1
        if seq == 1:
            self._first_subject = subject
        if ack is None:
            ack = (seq == 1 and self._ack_first) or seq % self._ack_every == 0
        wants_reply = ack or commit or bool(self._doubt_from)
        has_reply = wants_reply or (seq == 1 and not self.begun)
        reply = b"%b%d" % (self._reply, seq) if has_reply else b""
        header = b"%b%d%b" % (head, seq, wire.COMMIT if commit else wire.END)
        self._measure(len(header) + len(payload), message)
        return pub(subject, reply, header, payload), wants_reply

    def _take(self, seq: int, header: bytes, payload: bytes) -> JetStreamExtError | None:
        """As `receive`; raise ResponseError for a malformed reply, before anything has changed."""
        reply = wire.read_reply(header, payload)
        answers_commit = self.state is COMMITTING and seq == self.sent
        if isinstance(reply, ServerError):
            what = "the commit" if answers_commit else f"message {seq}"
            subject = self._subjects[(seq - 1) % self.size]  # the end-of-batch marker has the first subject
            if answers_commit and isinstance(reply, errors.AtomicPublishDuplicateMessageIDError):
                self._seen_before(reply)
                return None
            error = wire.refusal_error(
                reply,
                self.batch_id,
                what,
                subject,
                in_doubt=bool(self._doubt_from),
                facts=self._facts("not_stored"),
                hint=self._hint(payload),
                no_jetstream=self.no_jetstream,
                stream=self._stream.name if self._stream is not None and self._stream.stores(subject) else "",
                expected=self._encoder.expected_streams,
                other=self._other,
            )
            if doubt := self.target.doubt(reply.err_code):
                self._apply(Input.ANSWER_LOST, f"{what} was refused: {reply.description}; {doubt}", cause=reply)
                return None
            if answers_commit and self._refused is not None:
                self._apply(Input.BATCH_REFUSED, error=self._refused)
                return None
            # With a message held back the refusal would reach the caller that adds the next one.
            if seq == self.sent and seq > 1 and self._held is None and wire.refuses_one_message(reply):
                self._apply(Input.MESSAGE_REFUSED)
                return error
            shared = self._fingerprints is not None and self.state is COMMITTING and not answers_commit
            if shared and wire.refuses_one_message(reply):
                self._refused = self._refused or error  # its place may have been taken by a message of another batch
            else:
                self._apply(Input.BATCH_REFUSED, error=error)
        elif isinstance(reply, BatchAck):
            if reply.batch_id != self.batch_id or (self.state is COMMITTING and reply.batch_size != self.size):
                raise ResponseError(
                    f"the ack is for batch {reply.batch_id!r} with {counted(reply.batch_size or 0, 'message')}, "
                    f"not for {self.batch_id!r} with {self.size}",
                    frame=payload,
                )
            if self._refused is not None:
                why = "a message was refused, so the server has committed another batch with this id"
                self._apply(Input.ANSWER_LOST, why, cause=self._refused)
            else:
                self._apply(Input.ACKNOWLEDGED, "the server acknowledged a commit that was not sent", ack=reply)
        elif reply is wire.Reply.ORDINARY:
            detail = f"{counted(self.sent, 'message')} of batch {self.batch_id} may be stored separately"
            self._apply(Input.STORED_SEPARATELY, error=ATOMIC.unsupported(detail=detail))
        elif answers_commit:
            raise ResponseError("the answer to the commit is empty", frame=header)
        else:
            self._apply(Input.STAGED, seq=seq)
        return None

    def _seen_before(self, refusal: ServerError) -> None:
        facts, what = self._facts("unknown"), f"batch {self.batch_id}: the commit was refused: {refusal.description}; "
        if self._fingerprints is None:
            text = "nothing of this batch is stored, but the stream has messages with its ids, or it has an id twice"
            error = errors.batch_refusal(refusal, what + text, **{**facts, "outcome": "not_stored"})
            self._apply(Input.BATCH_REFUSED, error=error)
        else:
            self._duplicate = refusal
            text = "either this batch was stored before, or nothing of it is stored (see AtomicBatch.resolve)"
            self._apply(Input.SEEN_BEFORE, error=errors.batch_refusal(refusal, what + text, **facts))

    def _hint(self, payload: bytes) -> str:
        """Return what may explain that a server finds the batch incomplete, or nothing."""
        answered, streams = wire.answering_stream(payload), ""
        own, stores = ("", None) if self._stream is None else (self._stream.name, self._stream.stores)
        known = self._written - self._unknown
        if answered and own and answered != own:
            streams = f"the batch is for stream {own!r}, and stream {answered!r} received a part of it"
        elif stores is None and len(self._written) > 1:
            part = f"stream {answered!r}" if answered else "the answering stream"
            streams = f"{part} may not store all of its subjects"
        elif stores is not None and (elsewhere := [subject for subject in known if not stores(subject)]):
            streams = f"stream {own!r} does not store its subject {elsewhere[0]!r}"
        elif self._unknown:
            streams = f"it is not known which stream stores its subject {min(self._unknown)!r}, if any does"
        if streams:
            return f"{streams}, and all messages of an atomic batch must be of one stream"
        if self._fingerprints is not None and not self.staged:
            return "perhaps the server still had messages of an earlier batch with this id (for up to 10 s): repeat the batch"
        return ""

    def _apply(
        self,
        event: Input,
        why: str = "",
        *,
        seq: int = 0,
        ack: BatchAck | None = None,
        error: JetStreamExtError | None = None,
        cause: BaseException | None = None,
    ) -> None:
        """Do what `TABLE` says; `error`, or else one made of `why` and `cause`, is what callers see from then on."""
        before, after = self.state, _NEXT[self.state, event]
        if after is None:
            return
        if event is Input.STAGED:
            self.staged = max(self.staged, seq)
            self.begun = self.begun or seq == 1
            if seq >= self._doubt_from:
                self._doubt_from = 0  # the server counts without gaps, so it has everything before this message
        elif event is Input.MESSAGE_REFUSED:
            self._take_back()
        elif event is Input.DISCONNECTED:
            self._doubt_from = self.sent + 1 if self.sent else 0
        if after is before:
            if event is not Input.STAGED:
                log_state(_log, self._source, event.name.lower().replace("_", " "), event.value, sent=self.sent)
            return
        self.state = after
        if after is COMMITTED:
            self.ack, self.error = ack, None
        elif after in (FAILED, UNKNOWN):
            self.error = error or self._ending(why, cause)
        if after in (FAILED, DISCARDED):
            self._held = None
        log_state(
            _log, self._source, f"{before.name} -> {after.name}", event.value,
            messages=self.size, sent=self.sent, acked=self.staged, error=self.error,
        )  # fmt: skip

    def _take_back(self) -> None:
        """Free the sequence of the newest message or commit: the server did not count it, and it may be tried again."""
        if self._largest.seq == self.sent:
            self._taken_back, self._largest = self._largest, self._largest_before
        self.sent -= 1
        if self.state is COMMITTING and not self._commit_has_message:
            self._held = self._commit_held
            return
        name = self._subjects.pop()
        if self._fingerprints is not None:
            self._fingerprints.pop()
        if name not in self._subjects:
            self._written.discard(name)

    def _ending(self, why: str, cause: BaseException | None) -> JetStreamExtError:
        error: JetStreamExtError
        text = f"batch {self.batch_id}: {why}{self._other}; "
        if self.state is UNKNOWN:
            whole = f"all of its {self.size:,} messages are stored or none"
            text += f"either {'its message is stored or not' if self.size == 1 else whole} (see AtomicBatch.resolve)"
            error = errors.BatchOutcomeUnknownError(text, **self._facts("unknown"))
        else:
            text += "nothing of the batch is stored"
            error = errors.BatchAbandonedError(text, **self._facts("not_stored"))
        error.__cause__ = cause
        return error

    def _facts(self, outcome: Outcome) -> dict[str, Any]:
        return {
            "batch_id": self.batch_id, "sent": self.sent, "acked": self.staged, "outcome": outcome, "ack": self.ack,
        }  # fmt: skip
