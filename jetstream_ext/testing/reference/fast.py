"""Fast ingest: batches that are stored as they come, with acknowledgements now and then (ADR-50)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from . import headers, times
from .acks import flow_ack, flow_error, flow_gap, pub_ack, pub_error
from .advisories import batch_abandoned
from .checks import DuplicateMessageError, Staged, check_staged, required_level_met
from .errors import ApiError, api_error

if TYPE_CHECKING:
    from .connections import Message
    from .stream import Stream
    from .timers import Timer

__all__ = ["SUFFIX", "FastBatches", "FastMessage", "parse_reply"]

SUFFIX = ".$FI"
_MAX_ID = 64
_MAX_FLOW = 500
_DRAFT_CODES = {10205: 10203, 10206: 10204, 10207: 10205, 10208: 10206}
_OPERATIONS = {"0": "start", "1": "append", "2": "commit", "3": "eob", "4": "ping"}


@dataclass(frozen=True, slots=True)
class FastMessage:
    """What the reply subject of a message says."""

    id: str
    flow: int
    gap_ok: bool
    seq: int
    operation: str

    @property
    def commits(self) -> bool:
        """Whether it ends the batch."""
        return self.operation in ("commit", "eob")


def parse_reply(reply: str) -> FastMessage | None:
    """Read `<prefix>.<id>.<flow>.<gap>.<seq>.<operation>.$FI` from the right; `None` if it is not in that form."""
    tokens = reply.rsplit(".", 6)
    if len(tokens) != 7:
        return None
    _, batch_id, flow, gap, number, op, _ = tokens
    operation = _OPERATIONS.get(op)
    seq = headers.parse_number(number)
    if operation is None or not seq or seq == (1 << 64) - 1 or gap not in ("ok", "fail"):
        return None
    if (seq == 1 and operation in ("eob", "append")) or (seq != 1 and operation == "start"):
        return None
    wanted = headers.parse_signed(flow)
    return FastMessage(batch_id, min(wanted, 65535) if wanted > 0 else 10, gap == "ok", seq, operation)


@dataclass(eq=False, slots=True)
class _Batch:
    """One open batch; the sequences are batch sequences unless they say otherwise."""

    id: str
    gap_ok: bool
    max_messages: int
    messages: int = 0
    """A frame is due every so many messages."""
    last: int = 0
    stored: int = 0
    stream_seq: int = 0
    acked: int = 0
    acked_seq: int = 0
    """The stream sequence of the newest message that a frame has acknowledged."""
    pending: int = 0
    reply: str = ""
    committed: bool = False
    timer: Timer | None = None
    unsaved: list[tuple[int, int]] = field(default_factory=list)
    """Batch and stream sequences that no frame has acknowledged."""


class FastBatches:
    """The open fast batches of one stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._open: dict[str, _Batch] = {}

    def __len__(self) -> int:
        return len(self._open)

    def receive(self, message: Message, header: bytes) -> None:
        """Take a message whose reply subject ends in `$FI`."""
        stream = self._stream
        try:
            self._receive(message, header)
        except ApiError as error:
            if not stream.config["no_ack"]:
                stream.send(message.reply, pub_error(stream.name, self._worded(error)))

    def leader_changed(self) -> None:
        """Go on as the new leader: flow starts afresh, and every publisher hears what is stored."""
        for batch in list(self._open.values()):
            self._set_initial_flow(batch)
            self._restart_timer(batch)
            batch.committed = False
            batch.pending = 0
            batch.acked = batch.last = batch.stored
            self._send_ack(batch, batch.reply)

    def lose_unsaved(self, count: int) -> None:
        """Take back the newest messages of the stream, as long as no frame has acknowledged them."""
        stream = self._stream
        for _ in range(count):
            newest = stream.store.last
            owners = [batch for batch in self._open.values() if batch.unsaved and batch.unsaved[-1][1] == newest]
            if not owners or not stream.take_back(newest):
                return
            batch = owners[0]
            batch.unsaved.pop()
            batch.stored, batch.stream_seq = batch.unsaved[-1] if batch.unsaved else (batch.acked, batch.acked_seq)

    def forget_all(self) -> None:
        """Drop every batch without a word."""
        for batch in list(self._open.values()):
            self._drop(batch)

    def message_stored(self, fast: FastMessage, reply: str, stream_seq: int) -> None:
        """Note that a message went into the stream, and send the frame that is due, if one is."""
        batch = self._open.get(fast.id)
        if batch is None:
            return
        batch.reply = reply
        batch.pending = max(batch.pending - 1, 0)
        batch.stream_seq = stream_seq
        batch.stored = batch.last if batch.pending == 0 else fast.seq
        batch.unsaved.append((fast.seq, stream_seq))
        if batch.committed and batch.last == batch.stored:
            self._drop(batch)
            self._send_final(batch, reply)
            return
        self._check_flow(batch, reply)

    def _worded(self, error: ApiError) -> ApiError:
        if self._stream.profile.draft and error.err_code in _DRAFT_CODES:
            return ApiError(error.code, _DRAFT_CODES[error.err_code], error.description)
        return error

    def _receive(self, message: Message, header: bytes) -> None:
        stream, config, profile = self._stream, self._stream.config, self._stream.profile
        if config["sealed"]:
            raise api_error(10109)
        if 0 <= config["max_msg_size"] < len(header) + len(message.payload):
            raise api_error(10054)
        if not config["allow_batched"]:
            raise api_error(10205)
        fast = parse_reply(message.reply)
        if fast is None:
            raise api_error(10206)
        if len(fast.id.encode("utf-8", "surrogateescape")) > _MAX_ID:
            raise api_error(10207)
        batch = self._find(fast)
        if headers.get(header, "Nats-Required-Api-Level"):
            if not required_level_met(profile, header):
                self._drop(batch)
                raise api_error(10185)
            header = headers.remove(header, "Nats-Required-Api-Level")
        if not batch.committed:
            self._restart_timer(batch)
        if fast.operation == "ping":
            self._ping(batch, fast, message.reply)
        elif not batch.committed and self._in_order(batch, fast, message.reply):
            if fast.seq == 1 and not fast.commits and not config["no_ack"]:
                stream.send(message.reply, flow_ack(profile, 0, batch.messages))
            self._append(batch, fast, message, header)

    def _find(self, fast: FastMessage) -> _Batch:
        batch = self._open.get(fast.id)
        if batch is not None:
            return batch
        stream = self._stream
        if fast.seq != 1 or (fast.operation == "ping" and not stream.profile.fast_ping_opens):
            raise api_error(10208)
        limits = stream.limits
        if len(self._open) >= limits.fast_per_stream or stream.count_fast_batches() >= limits.fast_total:
            raise api_error(10211)
        batch = self._open[fast.id] = _Batch(fast.id, fast.gap_ok, fast.flow)
        self._set_initial_flow(batch)
        return batch

    def _set_initial_flow(self, batch: _Batch) -> None:
        # Alone it may have what it asked for; beside others it starts low and ramps up.
        batch.messages = min(_MAX_FLOW, batch.max_messages) if len(self._open) == 1 else 1

    def _restart_timer(self, batch: _Batch) -> None:
        if batch.timer is not None:
            batch.timer.cancel()
        stream = self._stream
        batch.timer = stream.at(
            stream.now + round(stream.limits.batch_timeout * times.SECOND), lambda: self._timed_out(batch)
        )

    def _timed_out(self, batch: _Batch) -> None:
        self._drop(batch)
        if self._stream.profile.draft:
            batch_abandoned(self._stream, batch.id, "timeout")

    def _drop(self, batch: _Batch) -> None:
        if self._open.get(batch.id) is batch:
            del self._open[batch.id]
        if batch.timer is not None:
            batch.timer.cancel()

    def _ping(self, batch: _Batch, fast: FastMessage, reply: str) -> None:
        if fast.seq > batch.last:
            self._stream.send(reply, flow_gap(self._stream.profile, batch.last + 1, fast.seq + 1))
            if not batch.gap_ok:
                if self._commit(batch, reply):
                    return
            else:
                batch.last = fast.seq
                if batch.pending == 0:
                    batch.stored = batch.last
                if self._check_flow(batch, reply):
                    return
        self._send_ack(batch, reply)

    def _in_order(self, batch: _Batch, fast: FastMessage, reply: str) -> bool:
        """Note the sequence; `False` if it ends the batch."""
        batch.last += 1
        if fast.seq == batch.last:
            return True
        profile = self._stream.profile
        if fast.seq > batch.last or profile.fast_backward_gap:
            self._stream.send(reply, flow_gap(profile, batch.last, fast.seq))
        if batch.gap_ok and fast.seq > batch.last:
            batch.last = fast.seq
            return True
        batch.last -= 1
        self._commit(batch, reply)
        return False

    def _append(self, batch: _Batch, fast: FastMessage, message: Message, header: bytes) -> None:
        if fast.commits:
            if fast.operation == "eob":
                batch.last -= 1
                if batch.pending == 0:
                    batch.stored = batch.last
            self._commit(batch, message.reply)
            if fast.operation == "eob":
                return
        stream = self._stream
        try:
            check_staged(stream, Staged(), message.subject, header, message.payload)
        except (ApiError, DuplicateMessageError) as error:
            self._refuse(batch, fast, message.reply, error)
            return
        batch.pending += 1
        stream.process(
            message.subject, header, message.payload, reply=message.reply, batch=(fast.id, fast.seq), fast=fast
        )

    def _refuse(self, batch: _Batch, fast: FastMessage, reply: str, error: ApiError | DuplicateMessageError) -> None:
        stream, profile = self._stream, self._stream.profile
        if isinstance(error, DuplicateMessageError):
            if batch.pending == 0:
                batch.stored = fast.seq
                self._check_flow(batch, reply)
            if not fast.commits:
                return
        if profile.draft and isinstance(error, ApiError) and not fast.gap_ok:
            self._drop(batch)
            stream.send(reply, pub_error(stream.name, error, batch=(fast.id, batch.last - 1)))
            return
        if not fast.gap_ok and batch.last == 1:
            self._drop(batch)
            if isinstance(error, ApiError):
                stream.send(reply, pub_error(stream.name, error))
            else:
                stream.send(reply, pub_ack(profile, stream.name, error.seq, duplicate=True, batch=(fast.id, fast.seq)))
            return
        if isinstance(error, ApiError):
            stream.send(reply, flow_error(profile, fast.seq, error))
        if fast.gap_ok and (not fast.commits or profile.fast_lost_final_ack):
            return
        if isinstance(error, ApiError):
            batch.last -= 1
            if batch.pending == 0:
                batch.stored = batch.last
        self._commit(batch, reply)

    def _commit(self, batch: _Batch, reply: str) -> bool:
        """Take no more messages; return whether all are stored, so that this was the end."""
        if batch.timer is not None:
            batch.timer.cancel()
        batch.committed = True
        if batch.last != batch.stored:
            return False
        self._drop(batch)
        self._send_final(batch, reply)
        return True

    def _send_final(self, batch: _Batch, reply: str) -> None:
        stream = self._stream
        stream.send(reply, pub_ack(stream.profile, stream.name, batch.stream_seq, batch=(batch.id, batch.last)))

    def _send_ack(self, batch: _Batch, reply: str) -> None:
        if reply:
            self._stream.send(reply, flow_ack(self._stream.profile, batch.acked, batch.messages))

    def _check_flow(self, batch: _Batch, reply: str) -> bool:
        """Send the frame that is due, if one is, and let the flow follow the publisher's share."""
        steps = (batch.stored - batch.acked) // batch.messages
        if steps < 1:
            return False
        batch.acked += steps * batch.messages
        covered = [pair for pair in batch.unsaved if pair[0] <= batch.acked]
        batch.unsaved = batch.unsaved[len(covered) :]
        batch.acked_seq = covered[-1][1] if covered else batch.acked_seq
        share = min(max(_MAX_FLOW // max(len(self._open), 1), 1), batch.max_messages)
        if batch.messages < share:
            batch.messages = min(batch.messages * 2, share)
        elif batch.messages > share:
            batch.messages = max(batch.messages // 2, share)
        self._send_ack(batch, reply)
        return True
