"""What servers send as JSON: batch acks, refusals, answers of the JetStream API, advisories."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import orjson

from jetstream_ext.errors import ResponseError, ServerError, server_error
from jetstream_ext.protocol import headers as h
from jetstream_ext.types import AbandonedBatch, BatchAck

ABANDONED: Final = "$JS.EVENT.ADVISORY.STREAM.BATCH_ABANDONED"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def parse_object(what: str, payload: bytes) -> dict[str, Any]:
    """Parse `what`, a JSON object; raise ResponseError if it is malformed."""
    try:
        parsed = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        raise ResponseError(f"{what} is not JSON", frame=payload) from error
    if not isinstance(parsed, dict):
        raise ResponseError(f"{what} is not a JSON object", frame=payload)
    return parsed


def parse_answer(subject: str, payload: bytes) -> dict[str, Any]:
    """Parse the answer to a JetStream API request; raise ServerError for a refusal, ResponseError if malformed."""
    answer = parse_object(f"the answer on {subject}", payload)
    if "error" in answer:
        raise parse_refusal(answer["error"], payload)
    return answer


def parse_batch_ack(reply: dict[str, Any], payload: bytes) -> BatchAck:
    """Return the final ack of either kind of batch; raise ResponseError if a field is missing or malformed."""
    stream, seq = reply.get("stream"), reply.get("seq")
    batch, count = reply.get("batch"), reply.get("count", 0)
    malformed = ResponseError("the ack of a batch is malformed", frame=payload)
    if not (isinstance(stream, str) and isinstance(seq, int) and isinstance(batch, str) and isinstance(count, int)):
        raise malformed
    if seq < 0 or count < 0:
        raise malformed
    return BatchAck(stream, seq, batch, count, domain=_text(reply.get("domain")), val=_text(reply.get("val")))


def parse_refusal(error: object, payload: bytes = b"") -> ServerError:
    """Return the error in a server's reply; raise ResponseError if it is malformed."""
    if not isinstance(error, dict):
        raise ResponseError("the reply's error is not a JSON object", frame=payload)
    code, err_code = error.get("code"), error.get("err_code")
    return server_error(
        code=code if isinstance(code, int) else None,
        err_code=err_code if isinstance(err_code, int) else None,
        description=(_text(error.get("description")) or "")[:1024],
    )


def _text(value: object) -> str | None:
    # Not str() of every value: it raises RecursionError for a list that is nested a thousand deep.
    return str(value) if isinstance(value, str | int | float) else None


def parse_abandoned(payload: bytes) -> tuple[AbandonedBatch, str | None]:
    """Parse an advisory into the batch and the domain it names; raise ResponseError if it is malformed."""
    try:
        event = orjson.loads(payload)
        stream, batch, reason = event["stream"], event["batch"], event["reason"]
        nanoseconds = h.parse_time_ns(h.to_utc(event["timestamp"]))
        domain = event.get("domain")
        if not (isinstance(stream, str) and isinstance(batch, str) and isinstance(reason, str)):
            raise TypeError
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ResponseError("the advisory about an abandoned batch is malformed", frame=payload) from None
    time = _EPOCH + timedelta(microseconds=nanoseconds // 1000)
    return AbandonedBatch(stream, batch, reason, time), domain if isinstance(domain, str) else None
