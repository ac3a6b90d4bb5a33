"""An atomic batch as a machine (ADR-50, the atomic half; server API level 2, the end-of-batch marker level 4).

The server stages the messages of a batch and checks them only when it is committed, so until then nothing of it is
stored, whatever happens. `TABLE` says where each input leads in each state; docs/design/atomic-batch.md explains it.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any, Final

from jetstream_ext import errors
from jetstream_ext.errors import BatchError, JetStreamExtError, Outcome, ResponseError, ServerError
from jetstream_ext.protocol import advice
from jetstream_ext.protocol.api import Server
from jetstream_ext.protocol.atomic_wire import (
    AtomicWire,
    Block,
    Encoded,
    Reply,
    has_no_options,
    read_reply,
    refuses_one_message,
)
from jetstream_ext.protocol.feature_table import ATOMIC, ATOMIC_EOB, COUNTED_MARKER, COUNTERS_IN_BATCHES, FENCED_BATCHES
from jetstream_ext.protocol.options import as_message
from jetstream_ext.text import counted, get_logger, log_state
from jetstream_ext.types import BatchAck, BatchMessage, Entry

_log: Final = get_logger("atomic")

# A server that dropped the batch says so only in replies, and a source of messages may never end. So one message in so
# many asks for a reply, and a bulk waits for that reply if the server is so many messages behind.
_ASK_EVERY: Final = 1000
_DISCARDED_TOO_LATE: Final = "it was discarded while its commit was in flight"


class State(enum.Enum):
    """Where a batch is: the columns of `TABLE`."""

    NEW = "new"  # messages can be checked; nothing was sent, and the server is not known
    OPEN = "open"  # takes messages; a lost answer means that nothing is stored, because no commit was sent
    COMMITTING = "committing"  # the commit was sent; a lost answer means UNKNOWN
    COMMITTED = "committed"  # everything is stored
    DISCARDED = "discarded"  # nothing is stored
    FAILED = "failed"  # nothing is stored
    UNKNOWN = "unknown"  # everything is stored or nothing; only reading the stream tells (`protocol.outcome`)


class Input(enum.Enum):
    """What can happen to a batch, except that it takes messages: the rows of `TABLE`."""

    OPENED = "the server that takes the batch is known"
    COMMIT_SENT = "the commit was sent"
    DISCARDED = "the caller discarded the batch"
    STAGED = "an empty reply: the server has the message and all before it"
    ACKNOWLEDGED = "the ack of the batch"
    STORED_SEPARATELY = "the ack of an ordinary message: the server does not know batches"
    REFUSED = "a message or the commit was refused"
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
    Input.REFUSED:           (___,       FAILED,     FAILED,     ___,       ___,       ___,       ___),
    Input.REPLY_MALFORMED:   (___,       FAILED,     UNKNOWN,    ___,       ___,       ___,       ___),
    Input.ANSWER_LOST:       (___,       FAILED,     UNKNOWN,    ___,       ___,       ___,       ___),
    Input.DISCONNECTED:      (___,       OPEN,       ___,        ___,       ___,       ___,       ___),
    Input.FOUND_STORED:      (___,       ___,        ___,        ___,       ___,       ___,       COMMITTED),
    Input.FOUND_NOTHING:     (___,       ___,        ___,        ___,       ___,       ___,       FAILED),
}  # fmt: skip
"""Where an input leads; ``___`` ignores it."""

_NEXT: Final = {(state, event): after for event, row in TABLE.items() for state, after in zip(State, row, strict=True)}


class AtomicBatchMachine:
    """One atomic batch; `open` comes before the first `add`.

    The calls from `prepare` to `commit` raise the BatchError that ended the batch. A call that raises changes nothing.
    With `in_one_go` the whole batch is sent without returning to the caller: its newest message is held back to commit
    it, and a disconnection in between ends it. If it is `quiet`, only the commit asks for a reply, because streams of other
    domains may store the subjects of other messages, and would answer them.
    """

    def __init__(
        self,
        batch_id: str,
        *,
        max_payload: int = 1 << 20,
        inbox_size: int = 0,
        prefix: str = "",
        in_one_go: bool = False,
        quiet: bool = False,
    ) -> None:
        self.batch_id: str = batch_id
        self.state: State = NEW
        self.staged: int = 0  # the highest batch sequence that the server said it has
        self.ack: BatchAck | None = None
        self.error: JetStreamExtError | None = None
        self.server: Server = Server(0, "")
        self._wire = AtomicWire(batch_id, max_payload, inbox_size, prefix)
        self._in_one_go = in_one_go
        self._quiet = quiet
        self._subjects: list[str] = []  # of the messages, in their order
        self._written: set[str] = set()
        self._held: Encoded | None = None
        self._other = ""  # another stream that has answered
        self._given_up = False
        self._doubt_from = 0  # the first sequence after a disconnection that no reply has settled, or 0
        self._leaves_something = False  # on the server, which keeps it for 10 s unless `farewell` is sent

    @property
    def size(self) -> int:
        """How many messages the batch will store."""
        return len(self._subjects)

    @property
    def sent(self) -> int:
        """The highest batch sequence that was sent."""
        return self._wire.sent

    @property
    def subjects(self) -> Collection[str]:
        """The subjects of the messages that were added."""
        return self._written

    @property
    def last_subject(self) -> str:
        return self._subjects[-1] if self._subjects else ""

    @property
    def ended(self) -> bool:
        """Whether no reply of the server can change the batch any more."""
        return self.state not in (NEW, OPEN, COMMITTING)

    # -- messages -----------------------------------------------------------------------------------------------

    def limit_messages(self, max_payload: int) -> None:
        """Set the server's limit for headers and payload together, in bytes, of the messages to come."""
        self._wire.max_payload = max_payload

    @property
    def largest(self) -> int:
        """How many bytes a message with its headers can have, as far as it is known."""
        return self._wire.limit

    def prepare(self, message: BatchMessage) -> Encoded:
        """Check and encode a message for `open`, `add` or `commit`; raise as `AtomicWire.encode` does."""
        self.check_open()
        return self._wire.encode(message)

    def open(self, first: Encoded, server: Server, reply: str) -> None:
        """Open the batch for messages; `first` must be the first that is added.

        The reply subject of a message is ``<reply>.<batch sequence>``. From then on only messages are taken whose subjects
        the stream stores, if it stores that of `first`. Raises UnsupportedFeatureError if the server has no atomic batches, or would
        not check what `first` expects.
        """
        self.check_open()
        ATOMIC.check(server.api_level, server.version, "nothing was sent")
        self._check_server(first, server.version)
        self.server = server
        stream = server.stream
        self._wire.open(reply, stream)
        if stream is not None and stream.stores(first[0]):
            self._wire.subjects.limit_to(stream.stores, stream.name)
        self._apply(Input.OPENED)

    def add(self, message: Encoded) -> Block:
        """Take a message; return what to send: nothing if the message is held back.

        Raises ValueError if the message cannot be at this place of the batch, and UnsupportedFeatureError if this
        server would not check what it expects.
        """
        self.check_open()
        self._check_place(message)
        wire = self._wire
        wire.check_size(message)
        ready: Encoded | None = message
        if self._holds_back:
            if self._held is not None:
                wire.check_size(self._held)
            ready, self._held = self._held, message
        self._count([message[0]])
        if ready is None:
            return Block(b"", 0, 0, 0, 0)
        asks = self._asks(wire.sent + 1)
        command = wire.command(ready, reply=asks)
        return Block(command, 1, len(ready[3]), wire.sent if asks else 0, wire.sent if asks else 0)

    def add_many(self, messages: Iterator[Entry], limit: int, first: Encoded | None = None) -> Block:
        """Take `first`, which is encoded already, and then `messages`, until their bytes reach `limit` or something stops it.

        The message that reaches the limit is the last. The messages before the one that stopped it are in the block and part
        of the batch; a refused one is not.
        """
        self.check_open()
        wire, hold_back = self._wire, self._holds_back
        out: list[bytes] = []
        count = size = awaited = last_asked = 0
        names: list[str] = []  # counted at once, unless the place of a message is to be checked
        stopped: BaseException | None = StopIteration()
        plain, room, known = wire.plain, wire.plain_room, wire.subjects
        source: Iterator[Any] = messages if first is None else chain((first,), messages)
        try:
            if self._held is not None:
                wire.check_size(self._held)
            for message in source:
                payload: object = None
                if type(message) is tuple and len(message) == 2:
                    name, payload = message
                elif type(message) is BatchMessage and has_no_options(message):
                    name, payload = message.subject, message.payload
                if type(payload) is bytes and len(payload) <= room:
                    # Nearly every message of a bulk; the same as `AtomicWire.encode` makes of it.
                    encoded: Encoded = (name, known[name], plain, payload, None)
                else:
                    is_first = first is not None and message is first
                    encoded = message if is_first else self.prepare(as_message(message))
                    wire.check_size(encoded)
                    self._count(names)
                    names = []
                    self._check_place(encoded)
                    limit -= len(encoded[2]) - len(plain)
                names.append(encoded[0])
                if hold_back:
                    encoded, self._held = self._held or encoded, encoded
                    if encoded is self._held:  # the first one
                        continue
                seq = wire.sent + 1
                if self._asks(seq):
                    out.append(wire.command(encoded, reply=True))
                    last_asked = seq
                    awaited = seq if self._doubt_from or seq - self.staged >= _ASK_EVERY else 0
                else:
                    out += wire.pieces(encoded)
                count += 1
                size += len(encoded[3])
                if size >= limit or awaited:
                    stopped = None
                    break
        except BaseException as error:  # the caller raises it when the messages before it are sent
            stopped = error
        self._count(names)
        return Block(b"".join(out), count, size, awaited, last_asked, stopped)

    def commit(self, last: Encoded | None) -> Block:
        """Take the commit, with a last message or none; return what to send.

        Raises EmptyBatchError if no message could carry the commit, or as `add` does for `last`.
        """
        self.check_commit(last)
        wire = self._wire
        outgoing = [message for message in (self._held, last) if message is not None]
        if last is not None:
            self._count([last[0]])
        self._held = None
        commands = [wire.command(message, reply=self._asks(wire.sent + 1)) for message in outgoing[:-1]]
        commands.append(wire.command(outgoing[-1], commit=True) if outgoing else wire.marker())
        self._apply(Input.COMMIT_SENT)
        size = sum(len(message[3]) for message in outgoing)
        return Block(b"".join(commands), len(commands), size, wire.sent, wire.sent)

    def check_commit(self, last: Encoded | None) -> None:
        """Raise what ended the batch, or what `commit` would raise."""
        self.check_open()
        if self._held is not None:
            self._wire.check_size(self._held, commit=last is None)
        if last is not None:
            self._check_place(last)
            self._wire.check_size(last, commit=True)
        elif self._held is None and not self.sent:
            text = f"batch {self.batch_id}: the batch has no messages; add one before a commit"
            raise errors.EmptyBatchError(text, **self._facts("not_stored"))

    def discard(self) -> None:
        """Give the batch up; nothing of it is stored unless its commit was sent."""
        self._given_up = True
        self._apply(Input.DISCARDED, _DISCARDED_TOO_LATE)

    def farewell(self) -> bytes:
        """Return, once, what ends a batch on the server that has ended here; nothing if the server has ended it."""
        data = self._wire.farewell() if self._leaves_something else b""
        self._leaves_something = False
        return data

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
            if self.state is DISCARDED:
                text = f"batch {self.batch_id} was discarded: nothing is stored, so there is no ack"
                raise errors.BatchClosedError(text, **self._facts("not_stored"))
            self.check_open()
            text = f"batch {self.batch_id} is still open: nothing is stored; commit it first"
            raise BatchError(text, **self._facts("not_stored"))
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

    def check_unresolved(self) -> bool:
        """Return whether the outcome is unknown; raise BatchError if the batch is open or its failure says too little."""
        if not self.ended:
            text = f"batch {self.batch_id} is still open; commit or discard it before resolve()"
            raise BatchError(text, **self._facts("unknown"))
        if self.state is FAILED and getattr(self.error, "outcome", None) != "not_stored":
            self.check_open()
        return self.state is UNKNOWN

    # -- what the server and the connection do ----------------------------------------------------------------------

    def is_of_other(self, payload: bytes) -> bool:
        """Return whether a reply is of another stream than the batch's: then it answers nothing, and is only noted."""
        if other := self.server.target.other(payload):
            self._other = f"; {self.server.target.answered_by(other)}"
            self._log("ignored an answer", other)
        return bool(other)

    def receive(self, seq: int, header: bytes, payload: bytes) -> None:
        """Take the reply to the message with batch sequence `seq`."""
        if self.state not in (OPEN, COMMITTING) or not 0 < seq <= self.sent:
            return  # too late, or a reply to nothing that was sent
        try:
            self._take(seq, header, payload)
        except ResponseError as error:
            self._apply(Input.REPLY_MALFORMED, str(error), cause=error)

    def lost(self, why: str) -> None:
        """Note that a reply that was awaited does not come: none in time, or a failed write."""
        self._apply(Input.ANSWER_LOST, why)

    def disconnected(self, *, reply_awaited: bool) -> None:
        """Take the loss of the connection.

        The server keeps the batch by its id, but messages may have been lost. So the next message asks for a reply: an
        empty one proves that everything before it arrived, and 10176 says that the batch is lost.
        """
        if reply_awaited:
            self.lost("the connection was lost before the answer came")
        elif self._in_one_go and self.sent:
            self.lost("the connection was lost while the batch was being sent")
        else:
            self._apply(Input.DISCONNECTED)

    def commit_cancelled(self) -> None:
        """Take the end of the wait for the answer to the commit: its caller was cancelled."""
        if self.state is COMMITTING:
            self._apply(Input.DISCARDED, _DISCARDED_TOO_LATE)

    def resolved(self, ack: BatchAck | None) -> None:
        """Take the proven outcome of a commit: the ack that it should have had, or None if nothing is stored."""
        if ack is not None:
            self._apply(Input.FOUND_STORED, ack=ack)
        else:
            why = "the stream has none of its messages, so it was not committed"
            self._apply(Input.FOUND_NOTHING, why, cause=self.error)

    # -- how ------------------------------------------------------------------------------------------------------

    @property
    def _holds_back(self) -> bool:
        marker = ATOMIC_EOB.at(self.server.api_level) and self.server.version.partition("-")[0] not in COUNTED_MARKER
        return self._in_one_go or not marker

    def _asks(self, seq: int) -> bool:
        """Return whether the message with this sequence asks for a reply."""
        return not self._quiet and (seq == 1 or not seq % _ASK_EVERY or self._doubt_from > 0)

    def _check_place(self, message: Encoded) -> None:
        """Refuse expectations that servers refuse at commit, where they cost the whole batch."""
        expectations = message[4]
        if expectations is None:
            return
        if expectations.last_seq and self._subjects:
            raise ValueError("expected_last_seq can only be on the first message of an atomic batch")
        if expectations.subject in self._written:
            raise ValueError(
                f"expected_last_subject_seq on {expectations.subject!r}: an earlier message of the batch already has this "
                "subject; put the expectation on that message"
            )
        self._check_server(message, self.server.version)

    @staticmethod
    def _check_server(message: Encoded, server_version: str) -> None:
        expectations = message[4]
        if expectations is not None and expectations.subject is not None:
            FENCED_BATCHES.check(server_version, "the message was not added")
        if expectations is not None and expectations.counts:
            COUNTERS_IN_BATCHES.check(server_version, "the message was not added")

    def _count(self, names: list[str]) -> None:
        self._subjects += names
        self._written.update(names)

    def _take(self, seq: int, header: bytes, payload: bytes) -> None:
        """As `receive`; raise ResponseError for a malformed reply, before anything has changed."""
        reply = read_reply(header, payload)
        answers_commit = self.state is COMMITTING and seq == self.sent
        if isinstance(reply, ServerError):
            self._refused(reply, seq, "the commit" if answers_commit else f"message {seq}")
        elif isinstance(reply, BatchAck):
            if reply.batch_id != self.batch_id or (self.state is COMMITTING and reply.batch_size != self.size):
                raise ResponseError(
                    f"the ack is for batch {reply.batch_id!r} with {counted(reply.batch_size or 0, 'message')}, "
                    f"not for {self.batch_id!r} with {self.size}",
                    frame=payload,
                )
            self._apply(Input.ACKNOWLEDGED, "the server acknowledged a commit that was not sent", ack=reply)
        elif reply is Reply.ORDINARY:
            detail = f"{counted(self.sent, 'message')} of batch {self.batch_id} may be stored separately"
            self._apply(Input.STORED_SEPARATELY, error=ATOMIC.unsupported(detail=detail))
        elif answers_commit:
            raise ResponseError("the answer to the commit is empty", frame=header)
        else:
            self.staged = max(self.staged, seq)
            if seq >= self._doubt_from:
                self._doubt_from = 0  # the server counts without gaps, so it has everything before this message
            self._apply(Input.STAGED)

    def _refused(self, refusal: ServerError, seq: int, what: str) -> None:
        if doubt := self.server.target.doubt(refusal.err_code):
            self._apply(Input.ANSWER_LOST, f"{what} was refused: {refusal.description}; {doubt}", cause=refusal)
        else:
            self._apply(Input.REFUSED, error=self._refusal(refusal, seq, what))
            self._leaves_something = refuses_one_message(refusal)

    def _refusal(self, refusal: ServerError, seq: int, what: str) -> JetStreamExtError:
        """Return the error for a refusal of `what`, the message or the marker with the sequence `seq`."""
        facts, nothing = self._facts("not_stored"), "nothing of the batch is stored"
        incomplete = isinstance(refusal, errors.AtomicPublishIncompleteError)
        if incomplete and self._doubt_from:
            text = "the connection was lost, and the server no longer has the whole batch"
            lost = errors.BatchAbandonedError(f"batch {self.batch_id}: {text}; {nothing}", **facts)
            lost.__cause__ = refusal
            return lost
        subject = self._subjects[(seq - 1) % self.size]  # the end-of-batch marker has the first subject
        known = self.server.stream
        dropped = "; servers drop a message over the stream's max_msg_size, or of another stream, without a word"
        return advice.refused(
            refusal, what, nothing + self._other,
            subject, known.name if known is not None and known.stores(subject) else "", self._wire.expected_streams,
            more=dropped if incomplete else "", unreachable=self.server.no_jetstream, **facts,
        )  # fmt: skip

    def _apply(
        self,
        event: Input,
        why: str = "",
        *,
        ack: BatchAck | None = None,
        error: JetStreamExtError | None = None,
        cause: BaseException | None = None,
    ) -> None:
        """Do what `TABLE` says; `error`, or else one made of `why` and `cause`, is what callers see from then on."""
        before, after = self.state, _NEXT[self.state, event]
        if after is None:
            return
        if event is Input.DISCONNECTED:
            self._doubt_from = self.sent + 1 if self.sent else 0
        if after is before:
            if event is not Input.STAGED:
                self._log(event.name.lower().replace("_", " "), event.value, sent=self.sent)
            return
        self.state = after
        if after is COMMITTED:
            self.ack, self.error = ack, None
        elif after in (FAILED, UNKNOWN):
            self.error = error or self._ending(why, cause)
        if after in (FAILED, DISCARDED):
            self._held = None
            self._leaves_something = before is OPEN and event is not Input.STORED_SEPARATELY
        self._log(
            f"{before.name} -> {after.name}", event.value,
            messages=self.size, sent=self.sent, acked=self.staged, error=self.error,
        )  # fmt: skip

    def _log(self, what: str, why: str, **fields: object) -> None:
        log_state(_log, f"batch {self.batch_id}", what, why, **fields)

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
