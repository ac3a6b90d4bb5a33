"""The messages of an atomic batch: what is refused before a sequence is taken, and their bytes, made once.

Everything of a message but its batch sequence is encoded when it is checked. What follows (the sequence, a commit) is
added when it is sent, so a message that is held back, or sent again after a refusal, costs nothing more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, NamedTuple

from jetstream_ext.errors import BadHeaderError, MaxPayloadError, UnsupportedFeatureError
from jetstream_ext.protocol import feature_table
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.frames import pub
from jetstream_ext.protocol.options import check_batch_id, given_headers, message_headers, payload_bytes
from jetstream_ext.protocol.subjects import SubjectCache
from jetstream_ext.types import BatchMessage

_MANAGED: Final = frozenset({h.BATCH_ID.lower(), h.BATCH_SEQUENCE.lower(), h.BATCH_COMMIT.lower()})

options_of: Final[Callable[[BatchMessage], tuple[Any, ...]]] = attrgetter(
    "headers", "msg_id", "msg_ttl", "stream", "expected_last_seq", "expected_last_subject_seq", "expected_last_subject"
)
NO_OPTIONS: Final = (None,) * 7

_END: Final = b"\r\n\r\n"
_COMMIT: Final = b"\r\nNats-Batch-Commit: 1" + _END
_MARKER: Final = b"\r\nNats-Batch-Commit: eob" + _END
# A message is measured with the longest sequence it can get and a commit: what passes then fits when it is sent.
_LONGEST: Final = len(b"%d" % (1 << 32)) + len(_COMMIT)


@dataclass(frozen=True, slots=True)
class Step:
    """One message to send: `encode` makes its bytes once the reply subject is known."""

    seq: int
    subject: bytes
    header: bytes
    payload: bytes
    wants_reply: bool

    def encode(self, reply: str = "") -> bytes:
        """Return the command."""
        return pub(self.subject, reply.encode(), self.header, self.payload)


class Block(NamedTuple):
    """Messages to send in one write."""

    data: bytes
    messages: int
    size: int
    """Their payloads' bytes."""
    ask: int
    """The sequence whose reply must be awaited before the next block, or 0."""
    acked: int
    """The highest sequence that wants a reply, or 0."""
    stopped: BaseException | None
    """What the source raised (``StopIteration`` at its end), or the refusal of one of its messages."""


Encoded = tuple[str, bytes, bytes, bytes, bool | None]
"""A checked message without its batch sequence: its subject, that in bytes, its header block up to the sequence, its
payload, and whether its sender wants a reply (None leaves it to the batch). A plain tuple: one is made per message."""


def header_of(encoded: Encoded, seq: int, *, commit: bool = False) -> bytes:
    """Return the whole header block of a message."""
    return b"%b%d%b" % (encoded[2], seq, _COMMIT if commit else _END)


class Encoder:
    """Checks and encodes the messages of one batch.

    Args:
        batch_id: The batch's id.
        max_payload: The server's limit for headers and payload together, in bytes.
        server_version: The version of the server that takes the batch, where it is known.
    """

    def __init__(self, batch_id: str, max_payload: int, server_version: str = "") -> None:
        own = h.encode([(h.BATCH_ID, check_batch_id(batch_id))])[: -len(h.CRLF)]
        self._tail = own[len(h.VERSION) :] + f"{h.BATCH_SEQUENCE}: ".encode()
        self.plain: bytes = h.VERSION + self._tail
        self._max_payload = max_payload
        self._server_version = server_version
        self.plain_room: int = max_payload - len(self.plain) - _LONGEST
        self.subjects: SubjectCache = SubjectCache()
        self._written: Counter[str] = Counter()

    def encode(self, message: BatchMessage, ack: bool | None, *, first: bool) -> Encoded:
        """Return a message ready for its sequence; `first` is whether it is to be the first of the batch.

        Raises:
            BadSubjectError, BadHeaderError, MaxPayloadError, ValueError, TypeError: Refused; nothing changed.
            UnsupportedFeatureError: Refused, because this server would do something else with it.
        """
        name, payload = message.subject, message.payload
        if options_of(message) == NO_OPTIONS and type(payload) is bytes:
            # Nearly every message of a bulk.
            if len(payload) > self.plain_room:
                self._check_size(self.plain, payload)
            return name, self.subjects.encode(name), self.plain, payload, ack
        self._check(message, first)
        subject = self.subjects.encode(name)
        payload = payload_bytes(payload)
        block = h.encode(message_headers(message))
        head = block[: -len(_END)] + self._tail
        self._check_size(head, payload)
        return name, subject, head, payload, ack

    def marker(self, seq: int) -> bytes:
        """Return the header block of the end-of-batch marker."""
        return b"%b%d%b" % (self.plain, seq, _MARKER)

    def count(self, names: Iterable[str]) -> None:
        """Take it that messages on these subjects are part of the batch."""
        self._written.update(names)

    def uncount(self, name: str) -> None:
        """Take it back."""
        self._written[name] -= 1

    def _check(self, message: BatchMessage, first: bool) -> None:
        """Refuse here what the server would refuse at commit, when it costs the whole batch."""
        given = given_headers(message)
        names = {str(name).lower() for name in given}
        for name in given:
            if not isinstance(name, str):
                raise TypeError(f"a header's name must be str, not {type(name).__name__}")
            if name.lower() in _MANAGED:
                raise BadHeaderError(f"header {name!r} belongs to the batch itself")
            if name.lower() == h.EXPECTED_LAST_MSG_ID.lower():
                raise BadHeaderError(f"header {name!r} cannot be used in an atomic batch")
        if not first and (message.expected_last_seq is not None or h.EXPECTED_LAST_SEQ.lower() in names):
            raise ValueError("expected_last_seq can only be on the first message of an atomic batch")
        if message.expected_last_subject_seq is not None or h.EXPECTED_LAST_SUBJECT_SEQ.lower() in names:
            subject = message.expected_last_subject or message.subject
            for name, value in given.items():
                if name.lower() == h.EXPECTED_LAST_SUBJECT.lower():
                    subject = value
            if self._written[subject]:
                raise ValueError(
                    f"expected_last_subject_seq on {subject!r}: an earlier message of the batch wrote to that subject"
                )
            if self._server_version.startswith("2.12.0"):
                # It compares the sequence with the subject of the batch's last message, so it refuses batches that are
                # right, and commits some that are wrong.
                raise UnsupportedFeatureError(
                    "expected_last_subject_seq in atomic batches needs nats-server 2.12.1: 2.12.0 compares it with "
                    "another subject; the message was not added",
                    feature=feature_table.ATOMIC.title,
                    required_api_level=feature_table.ATOMIC.api_level,
                    server_version=self._server_version,
                )

    def _check_size(self, head: bytes, payload: bytes) -> None:
        size = len(head) + _LONGEST + len(payload)
        if size > self._max_payload:
            raise MaxPayloadError(
                f"a message of {size} bytes (headers included) is over the server's limit of {self._max_payload}"
            )
