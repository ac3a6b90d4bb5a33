"""Fast batches: the server stores each message at once, and sends frames about progress, gaps and errors (ADR-50).

The sequence of a batch jumps when messages were lost on their way to the server. The server reports this with a gap
frame. In gap mode `ok` the batch continues after the gap. In mode `fail` the server commits the messages before the gap,
and ignores the rest.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from .context import Timer
from .releases import Profile
from .router import Message
from .streams.publish import DuplicateMessageError, Staged, check_size, check_staged, pub_ack, pub_error, publish
from .streams.stream import Stream
from .wire import golang
from .wire.errors import ApiError, api_error
from .wire.protocol import get_header, parse_number, parse_signed, remove_header

_SUFFIX = ".$FI"
_MAX_ID = 64
_MAX_FLOW = 500
_DEFAULT_FLOW = 10
_OPERATIONS = {"0": "start", "1": "append", "2": "commit", "3": "eob", "4": "ping"}


@dataclass(frozen=True, slots=True)
class _Part:
    """The reply subject of one message."""

    id: str
    flow: int
    gap_ok: bool
    seq: int
    operation: str

    @property
    def commits(self) -> bool:
        return self.operation in ("commit", "eob")


@dataclass(eq=False, slots=True)
class _Batch:
    """One open batch; sequences are batch sequences unless stated otherwise."""

    id: str
    gap_ok: bool
    max_flow: int
    timeout: Timer
    flow: int = 0
    """How many stored messages each acknowledgement covers."""
    last: int = 0
    stored: int = 0
    last_stream_seq: int = 0
    acked: int = 0
    acked_stream_seq: int = 0
    """The stream sequence of the newest acknowledged message."""
    pending: int = 0
    reply: str = ""
    committed: bool = False
    unacked: list[tuple[int, int]] = field(default_factory=list)
    """Batch and stream sequences of the stored messages that no frame has acknowledged."""

    def skip_to_last(self) -> None:
        """Count everything up to `last` as stored, unless a message is still pending."""
        if self.pending == 0:
            self.stored = self.last


def is_fast(reply: str) -> bool:
    """Whether the reply subject marks a message of a fast batch."""
    return reply.endswith(_SUFFIX) and len(reply) > len(_SUFFIX)


def _parse(reply: str) -> _Part | None:
    # From the right: <prefix>.<id>.<flow>.<gap>.<seq>.<operation>.$FI; the prefix may have any number of tokens.
    tokens = reply.rsplit(".", 6)
    if len(tokens) != 7:
        return None
    _, batch_id, flow, gap, number, code, _ = tokens
    operation = _OPERATIONS.get(code)
    seq = parse_number(number)
    if operation is None or not seq or seq == (1 << 64) - 1 or gap not in ("ok", "fail"):
        return None
    if (seq == 1 and operation in ("eob", "append")) or (seq != 1 and operation == "start"):
        return None
    wanted = parse_signed(flow)
    return _Part(batch_id, min(wanted, 65535) if wanted > 0 else _DEFAULT_FLOW, gap == "ok", seq, operation)


class FastBatches:
    def __init__(self, stream: Stream, count_on_server: Callable[[], int]) -> None:
        self._stream = stream
        self._profile = stream.profile
        self._send = stream.context.send
        self._count_on_server = count_on_server
        self._timeout = round(stream.context.limits.batch_timeout * golang.SECOND)
        self._open: dict[str, _Batch] = {}

    def __len__(self) -> int:
        return len(self._open)

    def receive(self, message: Message, header: bytes) -> None:
        try:
            self._receive(message, header)
        except ApiError as error:
            if self._profile.draft and 10205 <= error.err_code <= 10208:
                error = ApiError(error.code, error.err_code - 2, error.description)
            if not self._stream.config["no_ack"]:
                self._send(message.reply, pub_error(self._stream.name, error))

    def leader_changed(self) -> None:
        """Continue as the new leader: restart the flow, and tell every publisher what is stored."""
        for batch in list(self._open.values()):
            self._set_initial_flow(batch)
            batch.timeout.set_in(self._timeout)
            batch.committed = False
            batch.pending = 0
            batch.acked = batch.last = batch.stored
            batch.acked_stream_seq = batch.last_stream_seq
            batch.unacked.clear()  # another leader must not lose what this frame acknowledges
            self._send_ack(batch, batch.reply)

    def lose_unacked(self, count: int) -> None:
        """Remove the newest messages of the stream, as far as they belong to fast batches and are unacknowledged."""
        stream = self._stream
        for _ in range(count):
            newest = stream.store.last
            owners = [batch for batch in self._open.values() if batch.unacked and batch.unacked[-1][1] == newest]
            if not owners or not stream.undo_append(newest):
                return
            batch = owners[0]
            batch.unacked.pop()
            batch.stored, batch.last_stream_seq = (
                batch.unacked[-1] if batch.unacked else (batch.acked, batch.acked_stream_seq)
            )

    def forget_all(self) -> None:
        """Drop every batch without a frame."""
        for batch in list(self._open.values()):
            self._drop(batch)

    def _receive(self, message: Message, header: bytes) -> None:
        config, profile = self._stream.config, self._profile
        check_size(self._stream, header, message.payload)
        if not config["allow_batched"]:
            raise api_error(10205)
        part = _parse(message.reply)
        if part is None:
            raise api_error(10206)
        if len(part.id.encode("utf-8", "surrogateescape")) > _MAX_ID:
            raise api_error(10207)
        batch = self._find_or_open(part)
        if get_header(header, "Nats-Required-Api-Level"):
            if not profile.meets_required_level(header):
                self._drop(batch)
                raise api_error(10185)
            header = remove_header(header, "Nats-Required-Api-Level")
        if not batch.committed:
            batch.timeout.set_in(self._timeout)
        if part.operation == "ping":
            self._ping(batch, part, message.reply)
        elif not batch.committed and self._is_in_order(batch, part, message.reply):
            if part.seq == 1 and not part.commits and not config["no_ack"]:
                self._send(message.reply, _flow_ack(profile, 0, batch.flow))
            self._append(batch, part, message, header)

    def _find_or_open(self, part: _Part) -> _Batch:
        batch = self._open.get(part.id)
        if batch is not None:
            return batch
        if part.seq != 1 or (part.operation == "ping" and not self._profile.fast_ping_opens):
            raise api_error(10208)
        limits = self._stream.context.limits
        if len(self._open) >= limits.fast_per_stream or self._count_on_server() >= limits.fast_total:
            raise api_error(10211)
        timeout = Timer(self._stream.context, lambda: self._time_out(part.id))
        batch = self._open[part.id] = _Batch(part.id, part.gap_ok, part.flow, timeout)
        self._set_initial_flow(batch)
        return batch

    def _set_initial_flow(self, batch: _Batch) -> None:
        # A lone batch gets the flow it asked for; one of several starts low and ramps up.
        batch.flow = min(_MAX_FLOW, batch.max_flow) if len(self._open) == 1 else 1

    def _time_out(self, batch_id: str) -> None:
        self._drop(self._open[batch_id])
        if self._profile.draft:
            self._stream.send_batch_abandoned(batch_id, "timeout")

    def _drop(self, batch: _Batch) -> None:
        if self._open.get(batch.id) is batch:
            del self._open[batch.id]
        batch.timeout.cancel()

    # Order and gaps.

    def _is_in_order(self, batch: _Batch, part: _Part, reply: str) -> bool:
        """Advance to the sequence of a message; a gap is reported, and may end the batch."""
        if self._gap_ends(batch, part.seq, reply):
            self._commit(batch, reply)
            return False
        batch.last = part.seq
        return True

    def _ping(self, batch: _Batch, part: _Part, reply: str) -> None:
        """Answer with what is stored; a ping carries the last sequence the publisher has sent."""
        following = max(part.seq, batch.last) + 1
        answered = False
        if self._gap_ends(batch, following, reply):
            answered = self._commit(batch, reply)
        elif following > batch.last + 1:
            batch.last = part.seq
            batch.skip_to_last()
            answered = self._check_flow(batch, reply)
        if not answered:
            self._send_ack(batch, reply)

    def _gap_ends(self, batch: _Batch, seq: int, reply: str) -> bool:
        """Report the gap before the message with sequence `seq`, if there is one; return whether it ends the batch.

        A repeated or smaller sequence also counts as a gap, and ends the batch in both modes.
        """
        expected = batch.last + 1
        if seq > expected or (seq < expected and self._profile.fast_backward_gap):
            self._send(reply, _flow_gap(self._profile, expected, seq))
        return seq < expected or (seq > expected and not batch.gap_ok)

    # Storing messages.

    def _append(self, batch: _Batch, part: _Part, message: Message, header: bytes) -> None:
        if part.operation == "eob":
            batch.last -= 1
            batch.skip_to_last()
        if part.commits:
            self._commit(batch, message.reply)
        if part.operation == "eob":
            return
        stream, reply = self._stream, message.reply
        try:
            check_staged(stream, Staged(), message.subject, header, message.payload)
        except (ApiError, DuplicateMessageError) as error:
            self._refuse(batch, part, reply, error)
            return
        batch.pending += 1
        publish(
            stream,
            message.subject,
            header,
            message.payload,
            reply=reply,
            batch=(part.id, part.seq),
            on_stored=lambda seq: self._message_stored(part, reply, seq),
        )

    def _message_stored(self, part: _Part, reply: str, stream_seq: int) -> None:
        batch = self._open.get(part.id)
        if batch is None:
            return
        batch.reply = reply
        batch.pending = max(batch.pending - 1, 0)
        batch.last_stream_seq = stream_seq
        batch.stored = batch.last if batch.pending == 0 else part.seq
        batch.unacked.append((part.seq, stream_seq))
        if batch.committed and batch.last == batch.stored:
            self._drop(batch)
            self._send_final_ack(batch, reply)
        else:
            self._check_flow(batch, reply)

    def _refuse(self, batch: _Batch, part: _Part, reply: str, error: ApiError | DuplicateMessageError) -> None:
        name, profile = self._stream.name, self._profile
        if isinstance(error, DuplicateMessageError):
            if batch.pending == 0:
                batch.stored = part.seq
                self._check_flow(batch, reply)
            if not part.commits:
                return
        if profile.draft and isinstance(error, ApiError) and not part.gap_ok:
            self._drop(batch)
            self._send(reply, pub_error(name, error, batch=(part.id, batch.last - 1)))
            return
        if not part.gap_ok and batch.last == 1:
            self._drop(batch)
            if isinstance(error, ApiError):
                self._send(reply, pub_error(name, error))
            else:
                self._send(reply, pub_ack(name, error.seq, duplicate=True, batch=(part.id, part.seq)))
            return
        if isinstance(error, ApiError):
            self._send(reply, _flow_error(profile, part.seq, error))
        if part.gap_ok and (not part.commits or profile.fast_lost_final_ack):
            return
        if isinstance(error, ApiError):
            batch.last -= 1
            batch.skip_to_last()
        self._commit(batch, reply)

    # Acknowledging.

    def _commit(self, batch: _Batch, reply: str) -> bool:
        """Accept no more messages; return whether all are stored, in which case the final ack is sent."""
        batch.timeout.cancel()
        batch.committed = True
        if batch.last != batch.stored:
            return False
        self._drop(batch)
        self._send_final_ack(batch, reply)
        return True

    def _send_final_ack(self, batch: _Batch, reply: str) -> None:
        ack = pub_ack(self._stream.name, batch.last_stream_seq, batch=(batch.id, batch.last))
        self._send(reply, ack)

    def _send_ack(self, batch: _Batch, reply: str) -> None:
        if reply:
            self._send(reply, _flow_ack(self._profile, batch.acked, batch.flow))

    def _check_flow(self, batch: _Batch, reply: str) -> bool:
        """Send the acknowledgement if one is due, adapt the flow, and return whether one was sent."""
        steps = (batch.stored - batch.acked) // batch.flow
        if steps < 1:
            return False
        batch.acked += steps * batch.flow
        covered = [pair for pair in batch.unacked if pair[0] <= batch.acked]
        batch.unacked = batch.unacked[len(covered) :]
        batch.acked_stream_seq = covered[-1][1] if covered else batch.acked_stream_seq
        share = min(max(_MAX_FLOW // max(len(self._open), 1), 1), batch.max_flow)
        if batch.flow < share:
            batch.flow = min(batch.flow * 2, share)
        elif batch.flow > share:
            batch.flow = max(batch.flow // 2, share)
        self._send_ack(batch, reply)
        return True


def _flow_gap(profile: Profile, expected: int, seq: int) -> bytes:
    """Return the frame for the lost messages from `expected` up to and excluding `seq`."""
    if profile.draft:
        return golang.dumps({**({"last_seq": expected - 1} if expected > 1 else {}), "seq": seq})
    return golang.dumps({"type": "gap", "last_seq": expected, "seq": seq})


def _flow_ack(profile: Profile, seq: int, flow: int) -> bytes:
    """Return the frame that acknowledges a batch up to `seq`; the next is due after `flow` more messages."""
    if profile.draft:
        return golang.dumps({**({"seq": seq} if seq else {}), "ack_msgs": flow})
    return golang.dumps({"type": "ack", "seq": seq, "msgs": flow})


def _flow_error(profile: Profile, seq: int, error: ApiError) -> bytes:
    """Return the frame that refuses one message."""
    if profile.draft:
        return golang.dumps({"seq": seq, "error": error.as_json()})
    return golang.dumps({"type": "err", "seq": seq, "error": error.as_json()})
