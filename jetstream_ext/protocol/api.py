"""What servers answer and announce in JSON: acks, refusals, answers of the JetStream API, advisories."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import orjson

from jetstream_ext.errors import ResponseError, ServerError, server_error
from jetstream_ext.protocol import headers as h
from jetstream_ext.types import AbandonedBatch, BatchAck

ABANDONED: Final = "$JS.EVENT.ADVISORY.STREAM.BATCH_ABANDONED"

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def parse_answer(subject: str, payload: bytes) -> dict[str, Any]:
    """Read the JSON answer to a request of the JetStream API.

    Raises:
        ServerError: The server refused.
        ResponseError: The answer is malformed.
    """
    try:
        answer = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        raise ResponseError(f"the answer on {subject} is not JSON", frame=payload) from error
    if not isinstance(answer, dict):
        raise ResponseError(f"the answer on {subject} is not a JSON object", frame=payload)
    if "error" in answer:
        raise parse_refusal(answer["error"], payload)
    return answer


def parse_batch_ack(reply: dict[str, Any]) -> BatchAck:
    """Return the final ack in a server's reply; both kinds of batch end with one.

    Raises:
        ValueError, TypeError: A field is missing or not of its kind.
    """
    stream, seq = reply.get("stream"), reply.get("seq")
    batch, count = reply.get("batch"), reply.get("count", 0)
    if not (isinstance(stream, str) and isinstance(seq, int) and isinstance(batch, str) and isinstance(count, int)):
        raise TypeError("a batch ack needs stream, seq, batch and count")
    if seq < 0 or count < 0:
        raise ValueError("a batch ack has a negative number")
    domain, val = _text(reply.get("domain")), _text(reply.get("val"))
    return BatchAck(
        stream=stream,
        seq=seq,
        batch_id=batch,
        batch_size=count,
        domain=domain,
        val=val,
    )


def parse_refusal(error: object, payload: bytes = b"") -> ServerError:
    """Return the error in a server's reply.

    Raises:
        ResponseError: It is malformed.
    """
    if not isinstance(error, dict):
        raise ResponseError("a reply's error is not an object", frame=payload)
    code, err_code = error.get("code"), error.get("err_code")
    return server_error(
        code=code if isinstance(code, int) else None,
        err_code=err_code if isinstance(err_code, int) else None,
        description=(_text(error.get("description")) or "")[:1024],
    )


def _text(value: object) -> str | None:
    # Only what can be text: the text of a list in a list in a list, a thousand deep, is a RecursionError.
    return str(value) if isinstance(value, str | int | float) else None


def parse_abandoned(payload: bytes) -> tuple[AbandonedBatch, str | None]:
    """Read an advisory; return it and the domain it comes from, where it says so.

    Raises:
        ResponseError: It is none.
    """
    try:
        event = orjson.loads(payload)
        stream, batch, reason = event["stream"], event["batch"], event["reason"]
        nanoseconds = h.parse_time_ns(h.to_utc(event["timestamp"]))
        domain = event.get("domain")
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ResponseError("an advisory about an abandoned batch is malformed", frame=payload) from None
    if not (isinstance(stream, str) and isinstance(batch, str) and isinstance(reason, str)):
        raise ResponseError("an advisory about an abandoned batch is malformed", frame=payload)
    time = _EPOCH + timedelta(microseconds=nanoseconds // 1000)
    return AbandonedBatch(stream, batch, reason, time), domain if isinstance(domain, str) else None
