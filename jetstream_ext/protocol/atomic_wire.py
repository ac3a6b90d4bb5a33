"""The messages of an atomic batch on the wire: the checks before they are sent, their encoding, and the replies.

A message is encoded when it is checked. Only its batch sequence and a commit are added when it is sent, so a message
that is held back, or sent again after a refusal, is encoded once.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from jetstream_ext import errors
from jetstream_ext.errors import BadHeaderError, ErrorCode, JetStreamExtError, ServerError
from jetstream_ext.protocol import advice
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.api import parse_batch_ack, parse_object, parse_refusal
from jetstream_ext.protocol.frames import check_size
from jetstream_ext.protocol.options import given_headers, message_headers, payload_bytes
from jetstream_ext.protocol.subjects import SubjectCache
from jetstream_ext.protocol.trace_context import TraceContext, is_of_trace
from jetstream_ext.types import BatchAck, BatchMessage

_MANAGED: Final = frozenset({h.BATCH_ID, h.BATCH_SEQUENCE, h.BATCH_COMMIT})

END: Final = b"\r\n\r\n"
COMMIT: Final = b"\r\nNats-Batch-Commit: 1" + END
MARKER: Final = b"\r\nNats-Batch-Commit: eob" + END
# A message is measured with a commit and the longest sequence that it can get, so that it still fits when it is sent.
_LONGEST: Final = len(b"%d" % (1 << 32)) + len(COMMIT)
_REPLY_TAIL: Final = len(b".%d" % (1 << 32))

# The refusals of a single message: the server drops it and keeps the batch.
_OF_ONE_MESSAGE: Final = frozenset(
    {ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.TOO_MANY_REQUESTS, ErrorCode.ATOMIC_MISSING_SEQUENCE}
)


@dataclass(frozen=True, slots=True)
class Expectations:
    """The expectations of a message that are allowed only at some places of a batch."""

    last_seq: bool  # it expects a last sequence of the stream
    subject: str | None  # the subject of which it expects a last sequence


Encoded = tuple[str, bytes, bytes, bytes, bool | None, Expectations | None]
"""A checked message without its batch sequence: its subject, the subject in bytes, its header block up to the sequence,
its payload, whether its sender wants a reply (None: the batch decides), and its expectations. It is a plain tuple
because there is one for each message."""


class Block(NamedTuple):
    """Encoded commands to send in one write."""

    data: bytes
    messages: int
    size: int  # bytes of their payloads
    awaited: int  # the sequence whose reply must be awaited before anything else is sent, or 0
    last_asked: int  # the highest sequence that asks for a reply, or 0
    stopped: BaseException | None = None  # what the source raised (StopIteration at its end), or a message's refusal


def fingerprint(subject: str, headers: Mapping[str, str], payload: bytes) -> int:
    """Return what tells a message from others, in this process: its subject, payload, and message id or headers.

    A message with an id may be sent again with other headers. Otherwise they count, but not those of a trace, nor those that
    begin with ``Nats-``, because servers change some of them. A counter stream replaces the payload by the new total
    (ADR-49); there the increment counts.
    """
    own: object = headers.get(h.MSG_ID)
    if not own:
        own = tuple(sorted(it for it in headers.items() if not (h.is_reserved(it[0]) or is_of_trace(it[0]))))
    increment = headers.get(h.INCREMENT)
    return hash((subject, own, payload if increment is None else increment))


class Encoder:
    """Checks and encodes the messages of one batch; `max_payload` bounds headers and payload together, in bytes.

    `inbox_size` is the length of the inbox to which the reply subjects belong, in bytes.
    """

    def __init__(self, batch_id: str, max_payload: int, inbox_size: int) -> None:
        own = h.encode([(h.BATCH_ID, batch_id)])[: -len(h.CRLF)]
        self._tail = own[len(h.VERSION) :] + f"{h.BATCH_SEQUENCE}: ".encode()
        self.plain: bytes = h.VERSION + self._tail  # the header block of a message without headers, up to the sequence
        self.max_payload: int = max_payload
        self.max_msg_size: int | None = None  # of the stream, if it is known
        self.expected_streams: set[str] = set()
        self.subjects: SubjectCache = SubjectCache(inbox_size + _REPLY_TAIL)

    @property
    def plain_room(self) -> int:
        """How many bytes the payload of a message without headers can have."""
        return self.max_payload - len(self.plain) - _LONGEST

    @property
    def max_traced(self) -> int:
        """How many bytes a message with a trace context can have: the stream must not refuse it because of the context."""
        return self.max_payload if self.max_msg_size is None else min(self.max_payload, self.max_msg_size)

    def plain_with(self, trace: TraceContext) -> bytes:
        """Return `plain` for messages with a trace context."""
        return h.VERSION + h.CRLF + trace.lines[: -len(h.CRLF)] + self._tail

    def encode(self, message: BatchMessage, ack: bool | None) -> Encoded:
        """Return a message that is ready for its sequence.

        Raises BadSubjectError, BadHeaderError, MaxPayloadError, ValueError or TypeError if it cannot be sent.
        """
        name, payload = message.subject, message.payload
        if type(payload) is bytes and has_no_options(message):
            # Nearly every message of a bulk.
            check_size(len(self.plain) + _LONGEST + len(payload), self.max_payload, name)
            return name, self.subjects.encode(name), self.plain, payload, ack, None
        expectations = _check_headers(message)
        if message.stream is not None:
            self.expected_streams.add(message.stream)
        subject = self.subjects.encode(name)
        payload = payload_bytes(payload, "the payload on subject", name)
        head = h.encode(message_headers(message))[: -len(END)] + self._tail
        h.check_block(len(head) + _LONGEST)
        check_size(len(head) + _LONGEST + len(payload), self.max_payload, name)
        return name, subject, head, payload, ack, expectations

    def check_size(self, message: Encoded) -> None:
        """Raise MaxPayloadError if a message is too large by now: after a reconnect the limit may be lower."""
        check_size(len(message[2]) + _LONGEST + len(message[3]), self.max_payload, message[0])

    def fingerprint(self, message: Encoded) -> int:
        """Return the `fingerprint` that the message will have in the stream."""
        name, _, head, payload, _, _ = message
        if head is self.plain:
            return hash((name, (), payload))  # as `fingerprint`, for nearly every message of a bulk
        return fingerprint(name, dict(h.parse_lines(head)), payload)


def has_no_options(message: BatchMessage) -> bool:
    """Return whether a message has neither headers nor options."""
    return (
        message.headers is None
        and message.msg_id is None
        and message.msg_ttl is None
        and message.stream is None
        and message.expected_last_seq is None
        and message.expected_last_subject_seq is None
        and message.expected_last_subject is None
    )


def _check_headers(message: BatchMessage) -> Expectations | None:
    """Refuse headers that the server would refuse at commit, where they cost the whole batch."""
    given = given_headers(message)
    for name in given:
        if not isinstance(name, str):
            raise TypeError(f"a header's name must be str, not {type(name).__name__}")
        if name in _MANAGED:
            raise BadHeaderError(f"header {name!r} is set by the batch itself")
        if name == h.EXPECTED_LAST_MSG_ID:
            raise BadHeaderError(f"header {name!r} cannot be used in an atomic batch")
    last_seq = message.expected_last_seq is not None or h.EXPECTED_LAST_SEQ in given
    subject: str | None = None
    if message.expected_last_subject_seq is not None or h.EXPECTED_LAST_SUBJECT_SEQ in given:
        subject = given.get(h.EXPECTED_LAST_SUBJECT) or message.expected_last_subject or message.subject
    return Expectations(last_seq, subject) if last_seq or subject is not None else None


class Reply(enum.Enum):
    STAGED = "the server has the message"
    ORDINARY = "the server does not know batches and stored a separate message"


def read_reply(header: bytes, payload: bytes) -> Reply | BatchAck | ServerError:
    """Return what a reply says; a refusal is returned, and ResponseError is raised for a malformed reply."""
    if not payload:
        status = h.parse_status(header) if header else None
        if status is None:
            return Reply.STAGED
        code, text = status
        return errors.server_error(code=code, description=text or "no responders")
    reply = parse_object("the reply to a batch message", payload)
    if reply.get("error") is not None:
        return parse_refusal(reply["error"], payload, stream=reply.get("stream"))
    if "batch" not in reply:
        return Reply.ORDINARY
    return parse_batch_ack(reply, payload)


def answering_stream(payload: bytes) -> str:
    """Return the stream that a reply names, or nothing."""
    stream = parse_object("the reply to a batch message", payload).get("stream") if payload else None
    return stream if isinstance(stream, str) else ""


def refuses_one_message(refusal: ServerError) -> bool:
    """Return whether the server still has the batch, without the message that it refused."""
    return errors.reached_no_stream(refusal) or refusal.err_code in _OF_ONE_MESSAGE


def refusal_error(
    refusal: ServerError,
    batch_id: str,
    what: str,
    subject: str,
    *,
    in_doubt: bool,
    facts: dict[str, Any],
    hint: str,
    no_jetstream: str,
    stream: str,
    expected: Collection[str],
    other: str = "",
) -> JetStreamExtError:
    """Return the error for a refusal of `what`.

    `in_doubt`: it is the first answer since the connection was lost. `hint`: what may explain an incomplete batch, and
    `no_jetstream` that no stream answers. `stream` takes the batch, if that is known ("" if not), and `expected` are the
    streams that its messages expect. `other`: that another stream has answered.
    """
    stream = refusal.stream or stream
    if errors.reached_no_stream(refusal):
        text = f"no stream stores subject {subject!r} of {what}, or the stream has no leader{no_jetstream}"
        return errors.NoStreamError(f"batch {batch_id}: {text}; nothing of the batch is stored", **facts)
    if in_doubt and isinstance(refusal, errors.AtomicPublishIncompleteError):
        lost = errors.BatchAbandonedError(
            f"batch {batch_id}: the connection was lost, and the server no longer has the whole batch; "
            "nothing of it is stored",
            **facts,
        )
        lost.__cause__ = refusal
        return lost
    if isinstance(refusal, errors.AtomicPublishDisabledError):
        how = advice.enable_stream(stream, "atomic", what="them", subject=subject)
        where = f"stream {stream!r}, which stores" if stream else "the stream of"
        text = f"atomic batches are disabled on {where} subject {subject!r}; nothing is stored; {how}"
    else:
        text = f"{what} was refused: {refusal.description}; nothing of the batch is stored{other}"
        if hint and isinstance(refusal, errors.AtomicPublishIncompleteError):
            text += f"; {hint}"
        text += advice.after_refusal(refusal.err_code, stream, subject, expected)
    return errors.batch_refusal(refusal, f"batch {batch_id}: {text}", **facts)
