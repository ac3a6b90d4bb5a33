"""The messages of an atomic batch on the wire: the checks before they are sent, their encoding, and the replies.

A message is encoded when it is checked. Only its batch sequence and a commit are added when it is sent, so a message
that is held back is encoded once.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

from jetstream_ext import errors
from jetstream_ext.errors import BadHeaderError, ErrorCode, ServerError
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.api import StreamState, parse_batch_ack, parse_object, parse_refusal
from jetstream_ext.protocol.frames import check_size, pub
from jetstream_ext.protocol.options import given_headers, message_headers, payload_bytes
from jetstream_ext.protocol.subjects import SubjectCache
from jetstream_ext.types import BatchAck, BatchMessage

_MANAGED: Final = frozenset({h.BATCH_ID, h.BATCH_SEQUENCE, h.BATCH_COMMIT})

END: Final = b"\r\n\r\n"
_COMMIT: Final = b"\r\nNats-Batch-Commit: 1" + END
_MARKER: Final = b"\r\nNats-Batch-Commit: eob" + END
# A message is measured with a commit and the longest sequence that it can get, so that it still fits when it is sent.
_LONGEST: Final = len(b"%d" % (1 << 32)) + len(_COMMIT)
_REPLY_TAIL: Final = len(b".%d" % (1 << 32))

# The refusals of a single message: the server keeps the rest of the batch.
_OF_ONE_MESSAGE: Final = frozenset(
    {ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.TOO_MANY_REQUESTS, ErrorCode.ATOMIC_MISSING_SEQUENCE}
)


class Expectations(NamedTuple):
    """What of a message is allowed only at some places of a batch, or by some servers."""

    last_seq: bool  # it expects a last sequence of the stream
    subject: str | None  # the subject of which it expects a last sequence
    counts: bool  # it adds to a counter


Encoded = tuple[str, bytes, bytes, bytes, Expectations | None]
"""A checked message without its batch sequence: its subject, the subject in bytes, its header block up to the sequence,
its payload, and its expectations. It is a plain tuple because there is one for each message."""


class Block(NamedTuple):
    """Encoded commands to send in one write."""

    data: bytes
    messages: int
    size: int  # bytes of their payloads
    awaited: int  # the sequence whose reply must be awaited before anything else is sent, or 0
    last_asked: int  # the highest sequence that asks for a reply, or 0
    stopped: BaseException | None = None  # what the source raised (StopIteration at its end), or a message's refusal


class AtomicWire:
    """Checks, encodes and numbers the messages of one batch.

    `max_payload` bounds headers and payload together, in bytes. `inbox_size` is the length of the inbox to which the reply
    subjects ``<reply><batch sequence>`` belong, `prefix` the context's API prefix.
    """

    def __init__(self, batch_id: str, max_payload: int, inbox_size: int, prefix: str) -> None:
        own = h.encode([(h.BATCH_ID, batch_id)])[: -len(h.CRLF)]
        self._tail = own[len(h.VERSION) :] + f"{h.BATCH_SEQUENCE}: ".encode()
        self.plain: bytes = h.VERSION + self._tail  # the header block of a message without headers, up to the sequence
        self.max_payload: int = max_payload
        self.max_msg_size: int | None = None  # of the stream, if it is known
        self.expected_streams: set[str] = set()
        self.subjects: SubjectCache = SubjectCache(inbox_size + _REPLY_TAIL, prefix)
        self.sent: int = 0  # the highest batch sequence that was sent
        self._reply = b""
        self._first_subject = b""
        self._shape = (
            b"",
            0,
            0,
        )  # of the newest message of a bulk: its header block and the lengths of payload and sequence
        self._line = b""  # what comes before its sequence

    def open(self, reply: str, stream: StreamState | None) -> None:
        self._reply = reply.encode() + b"."
        self.max_msg_size = None if stream is None else stream.max_msg_size

    @property
    def limit(self) -> int:
        """How many bytes the headers and the payload of a message can have."""
        return self.max_payload if self.max_msg_size is None else min(self.max_payload, self.max_msg_size)

    def encode(self, message: BatchMessage) -> Encoded:
        """Return a message that is ready for its sequence.

        Raises BadSubjectError, BadHeaderError, MaxPayloadError, ValueError or TypeError if it cannot be sent.
        """
        name, payload = message.subject, message.payload
        if type(payload) is bytes and has_no_options(message):
            # Nearly every message of a bulk.
            encoded: Encoded = (name, self.subjects.encode(name), self.plain, payload, None)
        else:
            expectations = _check_headers(message)
            if message.stream is not None:
                self.expected_streams.add(message.stream)
            subject = self.subjects.encode(name)
            payload = payload_bytes(payload, "the payload on subject", name)
            head = h.encode(message_headers(message))[: -len(END)] + self._tail
            h.check_block(len(head) + _LONGEST)
            encoded = name, subject, head, payload, expectations
        self.check_size(encoded)
        return encoded

    def check_size(self, message: Encoded, *, commit: bool = False) -> None:
        """Raise if a message is larger than the server or its stream takes by now: after a reconnect the limit may be lower."""
        name, _, head, payload, _ = message
        check_size(len(head) + _LONGEST + len(payload), self.max_payload, name)
        own = len(b"%d" % (self.sent + 1)) + len(_COMMIT if commit else END)
        size, limit = len(head) + own + len(payload), self.max_msg_size
        if limit is not None and size > limit:
            raise errors.MessageTooLargeError(
                f"the message on subject {name!r} has {size} bytes with its headers, and its stream takes {limit} "
                "(max_msg_size); it was not added; make it smaller, or raise the stream's limit and begin another batch",
                code=errors.Status.INVALID_REQUEST,
                err_code=ErrorCode.MESSAGE_TOO_LARGE,
                description="message size exceeds maximum allowed",
                outcome="not_stored",
                subject=name,
                size=size,
                limit=limit,
            )

    @property
    def plain_room(self) -> int:
        """How many bytes the payload of a message without headers can have, for certain."""
        return self.limit - len(self.plain) - _LONGEST

    # -- commands -------------------------------------------------------------------------------------------------

    def command(self, message: Encoded, *, reply: bool = False, commit: bool = False) -> bytes:
        """Give a message its sequence; return the bytes that publish it."""
        _, subject, head, payload, _ = message
        self.sent += 1
        if self.sent == 1:
            self._first_subject = subject
        header = b"%b%d%b" % (head, self.sent, _COMMIT if commit else END)
        return pub(subject, b"%b%d" % (self._reply, self.sent) if reply or commit else b"", header, payload)

    def pieces(self, message: Encoded) -> tuple[bytes, ...]:
        """As `command`, without a reply, in pieces: a bulk joins them once. Most of the sizes and headers repeat."""
        _, subject, head, payload, _ = message
        self.sent += 1
        number = b"%d" % self.sent
        shape = head, len(payload), len(number)
        if shape != self._shape:
            size = len(head) + len(number) + len(END)
            self._shape, self._line = shape, b" %d %d\r\n%b" % (size, size + len(payload), head)
        return b"HPUB ", subject, self._line, number, END, payload, b"\r\n"

    def marker(self) -> bytes:
        """Return the bytes that commit what was sent: the marker has a sequence of its own and is not stored."""
        self.sent += 1
        header = b"%b%d%b" % (self.plain, self.sent, _MARKER)
        return pub(self._first_subject, b"%b%d" % (self._reply, self.sent), header, b"")

    def farewell(self) -> bytes:
        """Return the bytes that end the batch on the server: a message whose sequence cannot follow. It is never stored."""
        header = b"%b%d%b" % (self.plain, self.sent + 2, END)
        return pub(self._first_subject, b"", header, b"") if self.sent else b""


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
    counts = h.INCREMENT in given
    return Expectations(last_seq, subject, counts) if last_seq or counts or subject is not None else None


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
