"""What a fast batch puts on the wire (ADR-50): its messages, its pings and its end, and what each is called by.

The reply subject ``<inbox>.<id>.<flow>.<gap>.<seq>.<op>.$FI`` is all that tells a server about the batch. It keeps the
flow that was asked for, whatever the server sets later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.fast_replies import APPEND, COMMIT_EOB, PING, START
from jetstream_ext.protocol.frames import check_size, pub
from jetstream_ext.protocol.options import message_headers, payload_bytes
from jetstream_ext.protocol.subjects import SubjectCache
from jetstream_ext.types import BatchMessage, Entry, GapMode

BLOCK: Final = 1 << 20
"""Payload bytes after which a block of the bulk road ends: a window of large messages is not held in memory twice."""


class FastFrames:
    """The encoder of one batch. It checks messages and knows nothing of the batch's state."""

    def __init__(self, *, batch_id: str, inbox: str, flow: int, gap: GapMode, max_payload: int) -> None:
        self.subject: bytes = b""
        """The first message's: pings and the end have to go to a subject of the stream."""
        self._max_payload = max_payload
        self._reply = f"{inbox}.{batch_id}.{flow}.{gap.value}.".encode()
        self._append_tail = b"." + APPEND + b".$FI"
        self._subjects = SubjectCache()

    def message(self, message: BatchMessage, seq: int) -> bytes:
        """Return the bytes that publish `message` as the batch's message number `seq`.

        Raises:
            BadSubjectError, BadHeaderError, MaxPayloadError, ValueError, TypeError: It is refused.
        """
        subject = self._subjects.encode(message.subject)
        pairs = message_headers(message)
        header = h.encode(pairs) if pairs else b""
        payload = payload_bytes(message.payload)
        check_size(header, payload, self._max_payload)
        if seq == 1:
            self.subject = subject
        return pub(subject, self._reply_to(seq, START if seq == 1 else APPEND), header, payload)

    def plain(self, subject: str, payload: bytes, seq: int) -> bytes:
        """As `message`, for one without headers or options."""
        if seq == 1 or type(payload) is not bytes or len(payload) > self._max_payload:
            return self.message(BatchMessage(subject, payload), seq)
        raw = self._subjects.encode(subject)
        return b"PUB %b %b%d%b %d\r\n%b\r\n" % (raw, self._reply, seq, self._append_tail, len(payload), payload)

    def many(self, entries: Iterator[Entry], limit: int, sent: int) -> tuple[list[bytes], int, BaseException | None]:
        """Encode up to `limit` messages (and about `BLOCK` bytes) from `entries`, numbered from ``sent + 1``.

        Returns:
            Their bytes, the sum of their payloads' sizes, and what `entries` raised or a message was refused with.
        """
        out: list[bytes] = []
        size = 0
        reply, tail, known, top = self._reply, self._append_tail, self._subjects.encode, self._max_payload
        seq = sent
        try:
            while len(out) < limit and size < BLOCK:
                entry = next(entries)
                if seq and type(entry) is tuple:
                    # Nearly every message of a bulk is one of these two, made in one step.
                    if len(entry) == 2:
                        subject, payload = entry
                        if type(payload) is bytes and len(payload) <= top:
                            out.append(
                                b"PUB %b %b%d%b %d\r\n%b\r\n"
                                % (known(subject), reply, seq + 1, tail, len(payload), payload)
                            )
                            seq += 1
                            size += len(payload)
                            continue
                    elif len(entry) == 3 and type(entry[1]) is bytes and type(entry[2]) is dict and entry[2]:
                        subject, payload, pairs = entry
                        header = h.encode(pairs.items())
                        total = len(header) + len(payload)
                        if total <= top:
                            out.append(
                                b"HPUB %b %b%d%b %d %d\r\n%b%b\r\n"
                                % (known(subject), reply, seq + 1, tail, len(header), total, header, payload)
                            )
                            seq += 1
                            size += len(payload)
                            continue
                message = entry if isinstance(entry, BatchMessage) else BatchMessage(*entry)
                out.append(self.message(message, seq + 1))
                seq += 1
                size += len(message.payload)
        except BaseException as error:
            return out, size, error
        return out, size, None

    def ping(self, sent: int) -> bytes:
        """Return the bytes that ask where the server is, after `sent` messages."""
        return pub(self.subject, self._reply_to(max(1, sent), PING), b"", b"")

    def end(self, sent: int) -> bytes:
        """Return the bytes that end the batch after `sent` messages.

        The marker takes a sequence of its own but does not count as a message.
        """
        return pub(self.subject, self._reply_to(sent + 1, COMMIT_EOB), b"", b"")

    def _reply_to(self, seq: int, op: bytes) -> bytes:
        return b"%b%d.%b.$FI" % (self._reply, seq, op)
