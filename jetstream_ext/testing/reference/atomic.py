"""Atomic batches: the server stages their messages until the commit, and then stores all of them or none (ADR-50)."""

from collections.abc import Callable
from dataclasses import dataclass, field

from .context import Timer
from .router import Message
from .streams.publish import DuplicateMessageError, Staged, check_size, check_staged, pub_error, publish
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
        check_size(stream, header, message.payload)
        if not stream.config["allow_atomic"]:
            raise api_error(10174)
        if len(batch_id.encode("utf-8", "surrogateescape")) > _MAX_ID:
            raise api_error(10179)
        seq = parse_number(get_header(header, "Nats-Batch-Sequence"))
        if seq is None:
            raise api_error(10175)
        commit = get_header(header, "Nats-Batch-Commit")
        eob = commit == "eob" and profile.atomic_eob
        batch = self._find_or_open(batch_id, seq, seq - eob)
        if commit not in (None, "1") and not eob:
            self._drop(batch_id)
            raise api_error(10200)
        if get_header(header, "Nats-Required-Api-Level"):
            if not profile.meets_required_level(header):
                self._abandon(batch_id, "unsupported")
                raise api_error(10185)
            header = remove_header(header, "Nats-Required-Api-Level")
        batch.timeout.set_in(round(stream.context.limits.batch_timeout * SECOND))
        batch.last += 1
        if batch.last != seq or (seq == 1 and eob):
            self._abandon(batch_id, "incomplete")
            raise api_error(10176)
        limit = stream.context.limits.batch_messages
        if seq - eob > limit:
            self._abandon(batch_id, "large")
            raise api_error(10199, limit)
        if not eob:
            batch.staged.append((message.subject, header, message.payload))
        if commit is not None:
            self._drop(batch_id)
            self._commit(batch_id, batch, message.reply, eob=eob)
        elif message.reply and not stream.config["no_ack"]:
            stream.context.send(message.reply)

    def _find_or_open(self, batch_id: str, seq: int, size: int) -> _Batch:
        batch = self._open.get(batch_id)
        if batch is not None:
            return batch
        context = self._stream.context
        limits = context.limits
        if seq != 1:
            # The server's counter is unsigned: the end of a batch at sequence 0 is a very large batch.
            raise (
                api_error(10199, limits.batch_messages)
                if size % (1 << 64) > limits.batch_messages
                else api_error(10176)
            )
        if len(self._open) >= limits.atomic_per_stream or self._count_on_server() >= limits.atomic_total:
            raise api_error(10210)
        batch = self._open[batch_id] = _Batch(Timer(context, lambda: self._abandon(batch_id, "timeout")))
        return batch

    def _drop(self, batch_id: str) -> None:
        batch = self._open.pop(batch_id, None)
        if batch is not None:
            batch.timeout.cancel()

    def _abandon(self, batch_id: str, reason: str) -> None:
        self._drop(batch_id)
        self._stream.send_batch_abandoned(batch_id, reason)

    def _commit(self, batch_id: str, batch: _Batch, reply: str, *, eob: bool) -> None:
        stream = self._stream
        staged = Staged()
        for subject, header, payload in batch.staged:
            if get_header(header, "Nats-Expected-Last-Msg-Id"):
                raise api_error(10177, "Nats-Expected-Last-Msg-Id")
            try:
                check_staged(stream, staged, subject, header, payload)
            except DuplicateMessageError:
                raise api_error(10201) from None
        if eob:
            subject, header, payload = batch.staged[-1]
            batch.staged[-1] = (subject, add_headers(header, ("Nats-Batch-Commit", "1")), payload)
        for index, (subject, header, payload) in enumerate(batch.staged, 1):
            last = index == len(batch.staged)
            publish(stream, subject, header, payload, reply=reply if last else "", batch=(batch_id, index))
