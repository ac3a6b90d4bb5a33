"""What a server answers to fast ingest, decoded (ADR-50).

Released servers type their control frames (``ack``, ``gap``, ``err``); the ADR's draft put all three into one untyped
frame. Both become the same values here. A reply without a type is a final ack (it names the batch), a refusal (it has
an error), or the ordinary ack of a server that does not know fast ingest and stored the message as any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import orjson

from jetstream_ext.errors import ResponseError, ServerError, server_error
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.api import parse_batch_ack, parse_refusal
from jetstream_ext.protocol.frames import Frame, parts
from jetstream_ext.types import BatchAck, BatchFlowAck, BatchFlowError, BatchFlowGap

START: Final = b"0"
APPEND: Final = b"1"
COMMIT_EOB: Final = b"3"
PING: Final = b"4"

_OPERATIONS: Final = frozenset({START, APPEND, COMMIT_EOB, PING})
_MAX_DIGITS: Final = 20  # 2**64


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal that is no control frame: by JSON, or by a bare status (then without an ``err_code``)."""

    error: ServerError


@dataclass(frozen=True, slots=True)
class OrdinaryAck:
    """The ack of an ordinary publish: the server does not know fast ingest."""


@dataclass(frozen=True, slots=True)
class UnknownReply:
    """A control frame of a type that this version does not know."""

    payload: bytes


Said = BatchFlowAck | BatchFlowGap | BatchFlowError | BatchAck | Refusal | OrdinaryAck | UnknownReply


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer, and the message that it is about."""

    seq: int
    op: bytes
    said: Said


def decode(frame: Frame) -> Reply:
    """Decode one frame.

    Raises:
        ResponseError: It is no fast-ingest reply.
    """
    subject, header, payload = parts(frame)
    words = subject.rsplit(b".", 3)
    if len(words) != 4 or not words[1].isdigit() or len(words[1]) > _MAX_DIGITS or words[2] not in _OPERATIONS:
        raise ResponseError("a reply came to a subject that is no fast-ingest reply subject", frame=subject)
    return Reply(int(words[1]), words[2], _said(header, payload))


def _said(header: bytes, payload: bytes) -> Said:
    if header and not payload:
        status = h.parse_status(header)
        if status is not None:
            code, text = status
            description = "no stream listens on the subject" if code == 503 else text
            return Refusal(server_error(code=code, description=description))
    try:
        reply = orjson.loads(payload)
    except orjson.JSONDecodeError:
        raise ResponseError("a fast-ingest reply is not JSON", frame=payload) from None
    if not isinstance(reply, dict):
        raise ResponseError("a fast-ingest reply is not a JSON object", frame=payload)
    kind = reply.get("type")
    if kind == "ack":
        return BatchFlowAck(_number(reply, "seq", payload), _number(reply, "msgs", payload))
    if kind == "gap":
        return BatchFlowGap(_number(reply, "last_seq", payload), _number(reply, "seq", payload))
    if kind == "err":
        return BatchFlowError(_number(reply, "seq", payload), parse_refusal(reply.get("error"), payload))
    if kind is not None:
        return UnknownReply(payload[:1024])
    if "ack_msgs" in reply or "last_seq" in reply or reply.keys() == {"seq", "error"}:
        return _draft(reply, payload)
    if reply.get("error") is not None:
        return Refusal(parse_refusal(reply["error"], payload))
    if "batch" in reply:
        try:
            return parse_batch_ack(reply)
        except (TypeError, ValueError):
            raise ResponseError("the final ack of a batch is malformed", frame=payload) from None
    if "stream" in reply and "seq" in reply:
        return OrdinaryAck()
    raise ResponseError("a fast-ingest reply is of no known kind", frame=payload)


def _draft(reply: dict[str, Any], payload: bytes) -> Said:
    last, seq = _number(reply, "last_seq", payload, 0), _number(reply, "seq", payload, 0)
    if reply.get("error"):
        return BatchFlowError(seq, parse_refusal(reply["error"], payload))
    if last and seq > last + 1 and not reply.get("ack_msgs"):
        return BatchFlowGap(last + 1, seq)
    return BatchFlowAck(max(last, seq), _number(reply, "ack_msgs", payload, 1))


def _number(reply: dict[str, Any], name: str, payload: bytes, default: int | None = None) -> int:
    value = reply.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ResponseError(f"a fast-ingest reply has no valid {name!r}", frame=payload)
    return value
