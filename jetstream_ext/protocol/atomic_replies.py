"""What a server says to a message of an atomic batch, and the errors that its refusals become."""

from __future__ import annotations

import enum
from typing import Any, Final

import orjson

from jetstream_ext.errors import (
    AtomicPublishDisabledError,
    AtomicPublishIncompleteError,
    BatchAbandonedError,
    JetStreamExtError,
    NoStreamError,
    ResponseError,
    ServerError,
    batch_refusal,
    server_error,
)
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.api import parse_batch_ack, parse_refusal
from jetstream_ext.types import BatchAck

_STILL_OPEN: Final = frozenset({10054, 10167, 10175})


class Reply(enum.Enum):
    """A reply without anything to know in it."""

    STAGED = "the server has the message"
    ORDINARY = "the server stored the message as an ordinary one: it does not know batches"


def read_reply(header: bytes, payload: bytes) -> Reply | BatchAck | ServerError:
    """Return what a reply says; a refusal is returned, not raised.

    Raises:
        ResponseError: It is malformed.
    """
    if not payload:
        status = h.parse_status(header) if header else None
        if status is None:
            return Reply.STAGED
        code, text = status
        return server_error(code=code, description=text or "no responders")
    try:
        reply = orjson.loads(payload)
    except orjson.JSONDecodeError:
        raise ResponseError("the reply to a batch message is not JSON", frame=payload) from None
    if not isinstance(reply, dict):
        raise ResponseError("the reply to a batch message is not a JSON object", frame=payload)
    if reply.get("error") is not None:
        return parse_refusal(reply["error"], payload)
    if "batch" not in reply:
        return Reply.ORDINARY
    try:
        return parse_batch_ack(reply)
    except (TypeError, ValueError):
        raise ResponseError("the ack of a batch is malformed", frame=payload) from None


def is_away(refusal: ServerError) -> bool:
    """Return whether the message reached no stream (503)."""
    return refusal.code == 503 and refusal.err_code is None


def leaves_open(refusal: ServerError) -> bool:
    """Return whether the server still has the batch, without the message that it refused."""
    return is_away(refusal) or refusal.err_code in _STILL_OPEN


def failure(
    refusal: ServerError, batch_id: str, what: str, *, in_doubt: bool, facts: dict[str, Any]
) -> JetStreamExtError:
    """Return the error that a refusal becomes.

    Args:
        refusal: What the server said.
        batch_id: The batch.
        what: What it refused, in words.
        in_doubt: The connection was lost, and this is the first answer since.
        facts: What a batch error says of its batch.
    """
    if is_away(refusal):
        return NoStreamError(
            f"batch {batch_id}: no stream listens on the subject of {what}: it does not exist, or its leader is away",
            **facts,
        )
    if in_doubt and isinstance(refusal, AtomicPublishIncompleteError):
        lost = BatchAbandonedError(
            f"batch {batch_id}: the connection was lost, and the server no longer has the whole batch; "
            "nothing of it is stored",
            **facts,
        )
        lost.__cause__ = refusal
        return lost
    if isinstance(refusal, AtomicPublishDisabledError):
        text = "the stream does not take atomic batches; turn on allow_atomic"
    else:
        text = f"{what} was refused: {refusal.description}; nothing of the batch is stored"
    return batch_refusal(refusal, f"batch {batch_id}: {text}", **facts)
