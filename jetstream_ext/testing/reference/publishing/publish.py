"""Storing one published message, and the replies to its publisher: acknowledgements, refusals and flow frames."""

from collections.abc import Callable
from typing import Any

from ..releases import Profile
from ..streams.stream import Stream
from ..wire import gojson
from ..wire.errors import ApiError
from .checks import DuplicateMessageError, UnansweredRefusalError, check_last_id, check_single

__all__ = ["flow_ack", "flow_error", "flow_gap", "pub_ack", "pub_error", "publish", "send_batch_abandoned"]

Batch = tuple[str, int]
"""The id of a batch and a batch sequence."""


def publish(
    stream: Stream,
    subject: str,
    header: bytes,
    payload: bytes,
    *,
    reply: str = "",
    batch: Batch | None = None,
    on_stored: Callable[[int], None] | None = None,
) -> None:
    """Store a message and answer its publisher.

    Args:
        stream: The stream.
        subject: The subject.
        header: The header block.
        payload: The payload.
        reply: Where the answer goes; empty for none.
        batch: The batch of the message. Its batch has then made all checks but one.
        on_stored: Called with the sequence of the stored message, instead of sending a PubAck.
    """
    answers = bool(reply) and not stream.config["no_ack"]
    send, profile = stream.context.send, stream.profile
    try:
        if batch is None:
            check_single(stream, subject, header, payload)
        elif header:
            check_last_id(stream, header)
        seq = stream.append(subject, header, payload)
    except DuplicateMessageError as duplicate:
        if answers:
            send(reply, pub_ack(profile, stream.name, duplicate.seq, duplicate=True))
        return
    except ApiError as error:
        if answers:
            send(reply, pub_error(stream.name, error))
        return
    except UnansweredRefusalError:
        return
    if on_stored is not None:
        on_stored(seq)
    elif answers:
        send(reply, pub_ack(profile, stream.name, seq, batch=batch))
    stream.announce(seq)


def pub_ack(profile: Profile, stream: str, seq: int, *, duplicate: bool = False, batch: Batch | None = None) -> bytes:
    """Return a PubAck. The server does not encode it as JSON but formats it, so its spaces differ."""
    text = f'{{"stream":{gojson.quote(stream)},{" " if profile.spaced_ack else ""}"seq":{seq}'
    if duplicate:
        text += ',"duplicate": true'
    if batch is not None:
        text += f',"batch":{gojson.quote(batch[0])},"count":{batch[1]}'
    return (text + "}").encode("utf-8", "surrogateescape")


def pub_error(stream: str, error: ApiError, *, batch: Batch | None = None) -> bytes:
    """Return a refusal; only the draft dialect names the batch."""
    value: dict[str, Any] = {"error": error.as_json(), "stream": stream, "seq": 0}
    if batch is not None:
        value |= {"batch": batch[0], "count": batch[1]}
    return gojson.dumps(value)


def flow_ack(profile: Profile, seq: int, flow: int) -> bytes:
    """Return the frame that acknowledges a fast batch up to `seq`; the next is due after `flow` more messages."""
    if profile.draft:
        return gojson.dumps({**({"seq": seq} if seq else {}), "ack_msgs": flow})
    return gojson.dumps({"type": "ack", "seq": seq, "msgs": flow})


def flow_gap(profile: Profile, expected: int, seq: int) -> bytes:
    """Return the frame that reports a gap: the messages from `expected` up to and excluding `seq` are missing."""
    if profile.draft:
        return gojson.dumps({**({"last_seq": expected - 1} if expected > 1 else {}), "seq": seq})
    return gojson.dumps({"type": "gap", "last_seq": expected, "seq": seq})


def flow_error(profile: Profile, seq: int, error: ApiError) -> bytes:
    """Return the frame that refuses one message of a fast batch."""
    if profile.draft:
        return gojson.dumps({"seq": seq, "error": error.as_json()})
    return gojson.dumps({"type": "err", "seq": seq, "error": error.as_json()})


def send_batch_abandoned(stream: Stream, batch_id: str, reason: str) -> None:
    """Publish the advisory that the server has dropped a batch."""
    kind = "batch_abandoned" if stream.profile.draft else "stream_batch_abandoned"
    fields = {"batch": batch_id, "reason": reason}
    stream.send_advisory(f"STREAM.BATCH_ABANDONED.{stream.name}", kind, fields)
