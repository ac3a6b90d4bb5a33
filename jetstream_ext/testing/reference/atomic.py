"""Atomic batches: the server stages their messages until the commit, and then stores all of them or none (ADR-50)."""

from collections.abc import Callable
from dataclasses import dataclass, field

from .context import Timer
from .router import Message
from .streams.publish import DuplicateMessageError, Staged, check_intake, check_staged, pub_error, publish
from .streams.stream import Stream
from .wire.errors import ApiError, api_error
from .wire.golang import SECOND
from .wire.protocol import add_headers, get_header, parse_number, remove_header

_MAX_ID = 64


@dataclass(slots=True)
class _Batch:
    timeout: Timer
    last: int = 0
    staged: list[tuple[str, bytes, bytes]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Part:
    """The batch headers of one message."""

    id: str
    seq: int
    commit: bool = False
    eob: bool = False
    invalid_commit: bool = False


class AtomicBatches:
    def __init__(self, stream: Stream, count_on_server: Callable[[], int]) -> None:
        self._stream = stream
        self._count_on_server = count_on_server
        self._open: dict[str, _Batch] = {}

    def __len__(self) -> int:
        return len(self._open)

    def receive(self, batch_id: str, message: Message, header: bytes) -> None:
        stream = self._stream
        try:
            self._receive(batch_id, message, header)
        except ApiError as error:
            if message.reply and not stream.config["no_ack"]:
                stream.context.send(message.reply, pub_error(stream.name, error))

    def forget_all(self) -> None:
        """Drop every batch without an advisory, as a new leader does."""
        for batch_id in list(self._open):
            self._drop(batch_id)

    def _receive(self, batch_id: str, message: Message, header: bytes) -> None:
        stream = self._stream
        profile = stream.profile
        check_intake(stream, header, message.payload)
        if not stream.config["allow_atomic"]:
            raise api_error(10174)
        if len(batch_id.encode("utf-8", "surrogateescape")) > _MAX_ID:
            raise api_error(10179)
        part = self._parse(batch_id, header)
        batch = self._find_or_open(part)
        if part.invalid_commit:
            self._drop(batch_id)
            raise api_error(10200)
        if profile.required_level_in_batch and get_header(header, "Nats-Required-Api-Level"):
            if not profile.meets_required_level(header):
                self._abandon(batch_id, "unsupported" if profile.atomic_eob else "")
                raise api_error(10185)
            header = remove_header(header, "Nats-Required-Api-Level")
        batch.timeout.set_in(round(stream.context.limits.batch_timeout * SECOND))
        batch.last += 1
        if batch.last != part.seq or (part.seq == 1 and part.eob):
            self._abandon(batch_id, "incomplete")
            raise api_error(10176)
        limit = stream.context.limits.batch_messages
        if part.seq - part.eob > limit:
            self._abandon(batch_id, "large")
            raise api_error(10199, limit)
        if not part.eob:
            batch.staged.append((message.subject, header, message.payload))
        if part.commit:
            self._drop(batch_id)
            self._commit(part, batch, message.reply)
        elif message.reply and not stream.config["no_ack"]:
            stream.context.send(message.reply)

    def _parse(self, batch_id: str, header: bytes) -> _Part:
        profile = self._stream.profile
        text = get_header(header, "Nats-Batch-Sequence")
        seq = parse_number(text)
        if seq is None:
            if not text or profile.atomic_busy_is_429:
                raise api_error(10175)
            seq = (1 << 64) - 1
        commit = get_header(header, "Nats-Batch-Commit")
        if commit is None:
            return _Part(batch_id, seq)
        eob = commit == "eob" and profile.atomic_eob
        valid = eob or commit == "1" or profile.atomic_any_commit
        return _Part(batch_id, seq, commit=True, eob=eob, invalid_commit=not valid)

    def _find_or_open(self, part: _Part) -> _Batch:
        batch = self._open.get(part.id)
        if batch is not None:
            return batch
        context = self._stream.context
        limits = context.limits
        if part.seq != 1:
            # The server's counter is unsigned: the end of a batch at sequence 0 is a very large batch.
            if (part.seq - part.eob) % (1 << 64) > limits.batch_messages:
                raise api_error(10199, limits.batch_messages)
            raise api_error(10176)
        if len(self._open) >= limits.atomic_per_stream or self._count_on_server() >= limits.atomic_total:
            raise api_error(10210 if self._stream.profile.atomic_busy_is_429 else 10176)
        batch = self._open[part.id] = _Batch(Timer(context, lambda: self._abandon(part.id, "timeout")))
        return batch

    def _drop(self, batch_id: str) -> None:
        batch = self._open.pop(batch_id, None)
        if batch is not None:
            batch.timeout.cancel()

    def _abandon(self, batch_id: str, reason: str) -> None:
        self._drop(batch_id)
        if reason:
            self._stream.send_batch_abandoned(batch_id, reason)

    def _commit(self, part: _Part, batch: _Batch, reply: str) -> None:
        stream = self._stream
        staged = Staged()
        for subject, header, payload in batch.staged:
            if get_header(header, "Nats-Expected-Last-Msg-Id"):
                raise api_error(10177, "Nats-Expected-Last-Msg-Id")
            if not stream.profile.atomic_dedupe and get_header(header, "Nats-Msg-Id"):
                raise api_error(10177, "Nats-Msg-Id")
            try:
                check_staged(stream, staged, subject, header, payload)
            except DuplicateMessageError:
                raise api_error(10201) from None
        if part.eob:
            subject, header, payload = batch.staged[-1]
            batch.staged[-1] = (subject, add_headers(header, ("Nats-Batch-Commit", "1")), payload)
        for index, (subject, header, payload) in enumerate(batch.staged, 1):
            last = index == len(batch.staged)
            publish(stream, subject, header, payload, reply=reply if last else "", batch=(part.id, index))
