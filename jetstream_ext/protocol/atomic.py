"""An atomic batch as a machine (ADR-50, the atomic half; server API level 2, the end-of-batch marker level 4).

The server stages the messages of a batch and checks them only when it is committed, so until then nothing of it is
stored, whatever happens. After the commit was sent only its answer tells, and a lost answer means *unknown*.

`TRANSITIONS` is the whole machine: it says where each event leads in each state. An event that it does not list for a
state is ignored there, and a call that the state does not allow raises what ended the batch. The tests and the design
page drive every cell.

* **NEW** has a batch id and checks messages. Nothing was sent and the server is not known. `open` leads on.
* **OPEN** takes messages. A lost answer means that nothing is stored, because no commit was sent.
* **COMMITTING**: the commit was sent. From here on a lost answer means *unknown*.
* **UNKNOWN** is left by proof only: the stream was read (`protocol.atomic_resolve`).
* **COMMITTED, DISCARDED, FAILED**: everything is stored, or nothing is. A batch that failed because its message ids are
  stored already (10201) becomes COMMITTED when an earlier batch with its id and its messages is found.

Three kinds of refusal leave the batch on the server: 503, which means that the message reached no stream, and the
refusals of one message (10054 too large, 10167 queue full, 10175 bad sequence). If the message is the newest and not the
first, its sequence is given back and the batch stays open; a commit may be tried again. After any other refusal the
server has dropped the batch.

A server keeps a batch by its id, not by the connection, so a lost connection need not end it. Messages that were not
acknowledged may be lost, and so may the server. After a disconnection the next message therefore asks for a reply: an
empty one proves that everything before it arrived, and 10176 says that the batch is lost (`BatchAbandonedError`).

Every change of state is handed to `on_transition`, once.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from jetstream_ext.errors import (
    AtomicPublishDuplicateMessageIDError,
    BatchAbandonedError,
    BatchClosedError,
    BatchError,
    BatchOutcomeUnknownError,
    EmptyBatchError,
    JetStreamExtError,
    Outcome,
    ResponseError,
    ServerError,
)
from jetstream_ext.protocol.atomic_wire import (
    COMMIT,
    END,
    MARKER,
    NO_OPTIONS,
    Block,
    Encoded,
    Encoder,
    Reply,
    options_of,
    read_reply,
    refusal_error,
    refuses_one_message,
)
from jetstream_ext.protocol.feature_table import ATOMIC, ATOMIC_EOB, FENCED_BATCHES
from jetstream_ext.protocol.frames import pub
from jetstream_ext.protocol.options import as_message, check_batch_id
from jetstream_ext.types import BatchAck, BatchMessage, Entry

# A server that dropped the batch says so in replies only, and the source of the messages need not have an end. So at
# least every so many messages ask for a reply, and a bulk waits for it where the server is so many messages behind.
_ASK_AT_LEAST_EVERY: Final = 1000


class State(enum.Enum):
    """Where an atomic batch is."""

    NEW = "new"
    OPEN = "open"
    COMMITTING = "committing"
    COMMITTED = "committed"
    DISCARDED = "discarded"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Opened:
    """`open`: the server that takes the batch is known, and an inbox for its replies is there."""


@dataclass(frozen=True, slots=True)
class CommitSent:
    """`commit`."""


@dataclass(frozen=True, slots=True)
class Discarded:
    """`discard`, or an exception in the block."""


@dataclass(frozen=True, slots=True)
class Staged:
    """An empty reply: the server has the message with batch sequence `seq`, and all before it."""

    seq: int


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The ack of the batch."""

    ack: BatchAck


@dataclass(frozen=True, slots=True)
class StoredSeparately:
    """The ack of an ordinary message: the server does not know batches."""


@dataclass(frozen=True, slots=True)
class MessageRefused:
    """The refusal of the newest message alone; the server keeps the batch without it."""

    error: JetStreamExtError


@dataclass(frozen=True, slots=True)
class BatchRefused:
    """Any other refusal; the server has dropped the batch."""

    error: JetStreamExtError


@dataclass(frozen=True, slots=True)
class ReplyMalformed:
    """A reply that breaks the protocol, such as an empty answer to the commit."""

    error: ResponseError


@dataclass(frozen=True, slots=True)
class AnswerLost:
    """No reply within the timeout, or the connection was lost while a reply was awaited."""

    why: str


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection was lost while no reply was awaited."""


@dataclass(frozen=True, slots=True)
class FoundStored:
    """`resolve` found the batch in the stream."""

    ack: BatchAck


@dataclass(frozen=True, slots=True)
class FoundNothing:
    """`resolve` proved that nothing of the batch is stored."""


Event = (
    Opened
    | CommitSent
    | Discarded
    | Staged
    | Acknowledged
    | StoredSeparately
    | MessageRefused
    | BatchRefused
    | ReplyMalformed
    | AnswerLost
    | Disconnected
    | FoundStored
    | FoundNothing
)
"""Everything that can happen to a batch but the taking of messages, which changes no state."""

TRANSITIONS: Final[dict[State, dict[type[Event], State]]] = {
    State.NEW: {
        Opened: State.OPEN,
        Discarded: State.DISCARDED,
    },
    State.OPEN: {
        CommitSent: State.COMMITTING,
        Discarded: State.DISCARDED,
        Staged: State.OPEN,
        Acknowledged: State.UNKNOWN,  # no commit was sent
        StoredSeparately: State.FAILED,
        MessageRefused: State.OPEN,
        BatchRefused: State.FAILED,
        ReplyMalformed: State.FAILED,
        AnswerLost: State.FAILED,
        Disconnected: State.OPEN,
    },
    State.COMMITTING: {
        Discarded: State.UNKNOWN,
        Staged: State.COMMITTING,
        Acknowledged: State.COMMITTED,
        StoredSeparately: State.FAILED,
        MessageRefused: State.OPEN,
        BatchRefused: State.FAILED,
        ReplyMalformed: State.UNKNOWN,
        AnswerLost: State.UNKNOWN,
    },
    State.UNKNOWN: {
        FoundStored: State.COMMITTED,
        FoundNothing: State.FAILED,
    },
    State.FAILED: {
        FoundStored: State.COMMITTED,
    },
    State.COMMITTED: {},
    State.DISCARDED: {},
}
"""Where each event leads; what is not listed for a state is ignored there."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One change of a batch's state, with the counts at that moment and nothing of the messages' content."""

    batch_id: str
    before: State
    event: Event
    after: State
    size: int
    sent: int
    staged: int


class Doubt(enum.Enum):
    """What `resolve` has to find out about a batch that has ended."""

    NONE = "its outcome is known"
    COMMIT = "whether its commit was applied"
    EARLIER = "whether an earlier batch with its id stored its messages"


class AtomicBatchMachine:
    """One atomic batch.

    Messages are checked and encoded by `prepare`, in any state. `open` comes before the first `add`.

    Args:
        batch_id: 1 to 64 characters of ``[A-Za-z0-9_-]``.
        max_payload: The server's limit for headers and payload together, in bytes; see `limit_messages`.
        ack_first: Ask for a reply to the first message.
        ack_every: Ask for a reply to every n-th message; None is every 1000th.
        in_one_go: The whole batch is sent without returning to the caller. It is committed by its newest message, which
            is held back for that, and a disconnection in between ends it.
        on_transition: Called with every change of state; it must not raise.

    Raises:
        ValueError, TypeError: The batch id cannot be one.
    """

    def __init__(
        self,
        batch_id: str,
        *,
        max_payload: int = 1 << 20,
        ack_first: bool = True,
        ack_every: int | None = None,
        in_one_go: bool = False,
        on_transition: Callable[[Transition], None] = lambda transition: None,
    ) -> None:
        self.batch_id: str = check_batch_id(batch_id)
        self.state: State = State.NEW
        self.sent: int = 0
        """The highest batch sequence that was sent."""
        self.staged: int = 0
        """The highest batch sequence that the server said it has."""
        self.ack: BatchAck | None = None
        self.error: JetStreamExtError | None = None
        self._encoder = Encoder(self.batch_id, max_payload)
        self._ack_first = ack_first
        self._ack_every = ack_every or _ASK_AT_LEAST_EVERY
        self._in_one_go = in_one_go
        self._on_transition = on_transition
        # Known from `open` on.
        self._reply = b""
        self._server_version = ""
        self._has_marker = False
        self._holds_back = False
        # What the batch consists of.
        self._subjects: list[str] = []
        self._written: set[str] = set()
        self._first_subject = b""
        self._held: Encoded | None = None
        # What the commit consists of, to take it back.
        self._commit_has_message = False
        self._commit_held: Encoded | None = None
        self._given_up = False
        self._doubt_from = 0
        """The first sequence after a disconnection that no reply has settled, or 0."""

    @property
    def size(self) -> int:
        """How many messages the batch will store."""
        return len(self._subjects)

    @property
    def last_subject(self) -> str:
        """The subject of the newest of them."""
        return self._subjects[-1] if self._subjects else ""

    @property
    def ended(self) -> bool:
        """Whether no reply of the server can change the batch any more."""
        return self.state not in (State.NEW, State.OPEN, State.COMMITTING)

    # -- messages -----------------------------------------------------------------------------------------------

    def limit_messages(self, max_payload: int) -> None:
        """Set the server's limit for headers and payload of the messages to come."""
        self._encoder.max_payload = max_payload

    def prepare(self, message: BatchMessage, ack: bool | None = None) -> Encoded:
        """Check and encode a message for `open`, `add` or `commit`; nothing changes.

        Raises:
            BatchError: The batch has ended.
            BadSubjectError, BadHeaderError, MaxPayloadError, ValueError, TypeError: The message is refused.
        """
        self.check_open()
        return self._encoder.encode(message, ack)

    def open(self, first: Encoded, *, api_level: int, server_version: str, reply: str) -> None:
        """Open the batch for messages.

        Args:
            first: The message that is going to be added.
            api_level: The API level of the server that takes the batch. Below 4 the newest message is held back,
                because there the only way to commit is on a message.
            server_version: Its version.
            reply: The inbox; the reply subject of a message is ``<reply>.<batch sequence>``.

        Raises:
            BatchError: The batch has ended; nothing changed.
            UnsupportedFeatureError: The server has no atomic batches, or would not check what `first` expects; nothing
                changed.
        """
        self.check_open()
        if not ATOMIC.at(api_level):
            raise ATOMIC.unsupported(server_version=server_version, api_level=api_level, detail="nothing was sent")
        self._check_server(first, server_version)
        self._reply = reply.encode() + b"."
        self._server_version = server_version
        self._has_marker = ATOMIC_EOB.at(api_level)
        self._holds_back = self._in_one_go or not self._has_marker
        self._apply(Opened())

    def add(self, message: Encoded) -> Block:
        """Take a message; return what to send (nothing, where the message is held back).

        Raises:
            BatchError: The batch has ended.
            ValueError, UnsupportedFeatureError: The message cannot be at this place of the batch, or this server would
                not check what it expects; nothing changed.
        """
        self.check_open()
        self._check_place(message)
        self._count([message[0]])
        ready: Encoded | None = message
        if self._holds_back:
            ready, self._held = self._held, message
        return self._block([ready] if ready is not None else [])

    def add_many(self, messages: Iterator[Entry], limit: int, first: Encoded | None = None) -> Block:
        """Take messages until their payloads have `limit` bytes, or something stops it.

        The messages before the one that stopped it are in the block and part of the batch; a refused one is not.

        Args:
            messages: Where they come from.
            limit: Payload bytes after which to return; the message that reaches it is the last.
            first: A message to take before those.

        Raises:
            BatchError: The batch has ended; nothing was taken.
        """
        self.check_open()
        out: list[bytes] = []
        size = awaited = last_asked = 0
        names: list[str] = []  # counted at once, unless the place of a message is to be checked
        stopped: BaseException | None = StopIteration()
        encoder, hold_back, ack_every = self._encoder, self._holds_back, self._ack_every
        plain, room, known = encoder.plain, encoder.plain_room, encoder.subjects.encode
        source: Iterator[Any] = messages if first is None else chain((first,), messages)
        try:
            for message in source:
                if (
                    type(message) is tuple
                    and len(message) == 2
                    and type(message[1]) is bytes
                    and len(message[1]) <= room
                ):
                    name, payload = message
                    encoded: Encoded = (name, known(name), plain, payload, None, None)
                elif (
                    type(message) is BatchMessage
                    and options_of(message) == NO_OPTIONS
                    and type(message.payload) is bytes
                    and len(message.payload) <= room
                ):
                    # These two are nearly every message of a bulk; the same as `Encoder.encode` makes of it.
                    encoded = (message.subject, known(message.subject), plain, message.payload, None, None)
                else:
                    is_first = first is not None and message is first
                    encoded = message if is_first else encoder.encode(as_message(message), None)
                    self._count(names)
                    names = []
                    self._check_place(encoded)
                names.append(encoded[0])
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
                    _, subject, head, payload, _, _ = ready
                    total = len(head) + len(str(seq)) + 4
                    out.append(
                        b"HPUB %b %d %d\r\n%b%d\r\n\r\n%b\r\n"
                        % (subject, total, total + len(payload), head, seq, payload)
                    )
                size += len(ready[3])
                if size >= limit or awaited:
                    stopped = None
                    break
        except BaseException as error:  # the caller raises it when the messages before it are sent
            stopped = error
        self._count(names)
        return Block(b"".join(out), len(out), size, awaited, last_asked, stopped)

    def commit(self, last: Encoded | None) -> Block:
        """Take the commit, with a last message or none; return what to send.

        Raises:
            EmptyBatchError: There are no messages, or none that could carry the commit; nothing changed.
            BatchError: The batch has ended.
            ValueError, UnsupportedFeatureError: As for `add`.
        """
        self.check_open()
        held = self._held
        if last is not None:
            self._check_place(last)
            outgoing = [last] if held is None else [held, last]
            self._count([last[0]])
        elif held is not None:
            outgoing = [held]
        elif self.sent and self._has_marker:
            outgoing = []
        else:
            why = "a server before 2.14 can only commit on a message, and all are sent: commit with a last message"
            raise EmptyBatchError(
                f"batch {self.batch_id}: {why if self.sent else 'there is nothing to commit'}",
                **self._facts("not_stored"),
            )
        self._commit_has_message, self._commit_held, self._held = last is not None, None if last else held, None
        block = self._block(outgoing, commit=True)
        self._apply(CommitSent())
        return block

    def discard(self) -> None:
        """Give the batch up. The server forgets it after 10 s, and nothing of it is stored unless it was committed."""
        self._given_up = True
        self._apply(Discarded())

    # -- what callers may do --------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise what ended the batch, if something did.

        Raises:
            BatchError: The reason.
        """
        if self.state in (State.NEW, State.OPEN):
            return
        if self.error is not None:
            raise copy.copy(self.error) from self.error.__cause__
        what = "is being committed" if self.state is State.COMMITTING else f"has ended ({self.state.value})"
        outcomes: dict[State, Outcome] = {State.COMMITTED: "stored", State.DISCARDED: "not_stored"}
        raise BatchClosedError(f"batch {self.batch_id} {what}", **self._facts(outcomes.get(self.state, "unknown")))

    def check_added(self) -> None:
        """Raise what ended the batch, unless it was committed: a commit stores what was added before it."""
        if self.state not in (State.COMMITTING, State.COMMITTED):
            self.check_open()

    def result(self) -> BatchAck:
        """Return the ack of a commit that was answered, or raise what ended the batch."""
        if self.ack is None:
            self.check_open()
            raise BatchError(f"batch {self.batch_id} was not committed", **self._facts("not_stored"))
        return self.ack

    def leave(self) -> bool:
        """Return whether a clean exit of the block has to commit; a batch without messages is discarded.

        Raises:
            BatchError: What ended the batch inside the block, unless the caller has discarded it since.
        """
        if self.state in (State.NEW, State.OPEN):
            if self.size:
                return True
            self._apply(Discarded())
        elif self.state not in (State.COMMITTED, State.DISCARDED) and not (
            self.state is State.FAILED and self._given_up
        ):
            self.check_open()
        return False

    def doubt(self) -> Doubt:
        """Return what `resolve` has to find out.

        Raises:
            BatchError: The batch has not ended, or it failed in a way that cannot be looked into.
        """
        if not self.ended:
            raise BatchError(f"batch {self.batch_id} has not ended: commit or discard it", **self._facts("unknown"))
        if self.state is State.UNKNOWN:
            return Doubt.COMMIT
        if self.state is State.FAILED:
            if isinstance(self.error, AtomicPublishDuplicateMessageIDError):
                return Doubt.EARLIER
            if not isinstance(self.error, BatchError) or self.error.outcome != "not_stored":
                self.check_open()
        return Doubt.NONE

    # -- what the server and the connection do ----------------------------------------------------------------------

    def receive(self, seq: int, header: bytes, payload: bytes) -> Event | None:
        """Take the reply to the message with batch sequence `seq`; return what it means, or None if it is ignored.

        If nothing awaits the reply, pass a `MessageRefused` on to `refused_unheard`.
        """
        if Staged not in TRANSITIONS[self.state] or not 0 < seq <= self.sent:
            return None  # too late, or a reply to nothing that was sent
        try:
            event = self._read(seq, header, payload)
        except ResponseError as error:
            event = ReplyMalformed(error)
        self._apply(event)
        return event

    def refused_unheard(self, event: MessageRefused) -> None:
        """Fail the batch because no caller awaits the refusal: a message is missing that was reported as added."""
        if self.state is State.OPEN:
            self._apply(BatchRefused(event.error))

    def lost(self, why: str) -> None:
        """Take the loss of a reply that was awaited: no reply in time, or a failed write."""
        self._apply(AnswerLost(why))

    def disconnected(self, *, reply_awaited: bool) -> None:
        """Take the loss of the connection."""
        self._apply(AnswerLost("the connection was lost before the answer came") if reply_awaited else Disconnected())

    def cannot_send(self) -> None:
        """Take a lost connection at the moment of sending: it ends a batch that is sent in one go."""
        if self._in_one_go and self.sent:
            self._apply(AnswerLost("the connection was lost while the batch was being sent"))

    def commit_unheard(self) -> None:
        """Take the end of the wait for the answer to the commit: its caller was cancelled."""
        if self.state is State.COMMITTING:
            self._apply(Discarded())

    def resolved(self, ack: BatchAck | None) -> None:
        """Take the proven outcome of a commit: the ack that it should have had, or None if nothing is stored."""
        self._apply(FoundNothing() if ack is None else FoundStored(ack))

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
                f"expected_last_subject_seq on {expectations.subject!r}: an earlier message of the batch wrote to that "
                "subject"
            )
        self._check_server(message, self._server_version)

    @staticmethod
    def _check_server(message: Encoded, server_version: str) -> None:
        if message[5] is not None and message[5].subject is not None:
            FENCED_BATCHES.check(server_version, "the message was not added")

    def _count(self, names: list[str]) -> None:
        self._subjects += names
        self._written.update(names)

    def _uncount(self) -> None:
        name = self._subjects.pop()
        if name not in self._subjects:
            self._written.discard(name)

    def _block(self, messages: list[Encoded], *, commit: bool = False) -> Block:
        """Return the commands of `messages`, the last of them with the commit; without messages the commit is a marker."""
        out: list[bytes] = []
        asked = 0
        for message in messages:
            command, wants_reply = self._command(message, commit=commit and message is messages[-1])
            asked = self.sent if wants_reply else 0
            out.append(command)
        if commit and not messages:
            # The marker has a sequence of its own and is not stored.
            asked = self.sent = self.sent + 1
            head = b"%b%d%b" % (self._encoder.plain, asked, MARKER)
            out.append(pub(self._first_subject, b"%b%d" % (self._reply, asked), head, b""))
        return Block(b"".join(out), len(out), sum(len(message[3]) for message in messages), asked, asked)

    def _command(self, message: Encoded, *, commit: bool = False) -> tuple[bytes, bool]:
        """Give a message its sequence; return its command, and whether it asks for a reply."""
        _, subject, head, payload, ack, _ = message
        seq = self.sent = self.sent + 1
        if seq == 1:
            self._first_subject = subject
        if ack is None:
            ack = (seq == 1 and self._ack_first) or seq % self._ack_every == 0
        wants_reply = ack or commit or bool(self._doubt_from)
        reply = b"%b%d" % (self._reply, seq) if wants_reply else b""
        return pub(subject, reply, b"%b%d%b" % (head, seq, COMMIT if commit else END), payload), wants_reply

    def _read(self, seq: int, header: bytes, payload: bytes) -> Event:
        """Return what a reply means; nothing changes."""
        reply = read_reply(header, payload)
        answers_commit = self.state is State.COMMITTING and seq == self.sent
        if isinstance(reply, ServerError):
            what = "the commit" if answers_commit else f"message {seq}"
            error = refusal_error(
                reply, self.batch_id, what, in_doubt=bool(self._doubt_from), facts=self._facts("not_stored")
            )
            # With a message held back the refusal would reach the caller that adds the next one.
            newest = seq == self.sent and seq > 1 and self._held is None
            return MessageRefused(error) if newest and refuses_one_message(reply) else BatchRefused(error)
        if isinstance(reply, BatchAck):
            if reply.batch_id != self.batch_id or (self.state is State.COMMITTING and reply.batch_size != self.size):
                raise ResponseError(
                    f"the ack is for batch {reply.batch_id!r} with {reply.batch_size} messages, "
                    f"not for {self.batch_id!r} with {self.size}",
                    frame=payload,
                )
            return Acknowledged(reply)
        if reply is Reply.ORDINARY:
            return StoredSeparately()
        if answers_commit:
            raise ResponseError("the answer to the commit is empty", frame=header)
        return Staged(seq)

    def _apply(self, event: Event) -> None:
        """Go where `event` leads."""
        before = self.state
        after = TRANSITIONS[before].get(type(event))
        if after is None:
            return
        if isinstance(event, Staged):
            self.staged = max(self.staged, event.seq)
            if event.seq >= self._doubt_from:
                self._doubt_from = 0  # the server counts without gaps: all that came before is there
        elif isinstance(event, MessageRefused):
            self._take_back()
        elif isinstance(event, Disconnected):
            self._doubt_from = self.sent + 1 if self.sent else 0
        if after is before:
            return
        self.state = after
        if after is State.COMMITTED and isinstance(event, Acknowledged | FoundStored):
            self.ack, self.error = event.ack, None
        elif after in (State.FAILED, State.UNKNOWN):
            self.error = self._error(event)
        if after in (State.FAILED, State.DISCARDED):
            self._held = None
        self._on_transition(Transition(self.batch_id, before, event, after, self.size, self.sent, self.staged))

    def _take_back(self) -> None:
        """Free the sequence of the newest message or commit: the server did not count it, and it may be tried again."""
        self.sent -= 1
        if self.state is State.OPEN or self._commit_has_message:
            self._uncount()
        else:
            self._held = self._commit_held

    def _error(self, event: Event) -> JetStreamExtError:
        """Return what callers see after `event` has led to FAILED or UNKNOWN."""
        if isinstance(event, BatchRefused):
            return event.error
        if isinstance(event, StoredSeparately):
            return ATOMIC.unsupported(
                detail=f"{self.sent} messages of batch {self.batch_id} may be stored as ordinary ones"
            )
        cause: BaseException | None = None
        if isinstance(event, ReplyMalformed):
            why, cause = str(event.error), event.error
        elif isinstance(event, FoundNothing):
            why, cause = "the stream has nothing of it: it was not committed", self.error
        elif isinstance(event, AnswerLost):
            why = event.why
        elif isinstance(event, Acknowledged):
            why = "the server says that it committed the batch, but no commit was sent"
        else:
            why = "it was discarded while its commit was in flight"
        error: JetStreamExtError
        if self.state is State.UNKNOWN:
            what = f"its {self.size} messages are either all stored or none"
            error = BatchOutcomeUnknownError(f"batch {self.batch_id}: {why}; {what}", **self._facts("unknown"))
        else:
            what = "nothing of the batch is stored"
            error = BatchAbandonedError(f"batch {self.batch_id}: {why}; {what}", **self._facts("not_stored"))
        error.__cause__ = cause
        return error

    def _facts(self, outcome: Outcome) -> dict[str, Any]:
        return {
            "batch_id": self.batch_id,
            "sent": self.sent,
            "acked": self.staged,
            "outcome": outcome,
            "ack": self.ack,
        }
