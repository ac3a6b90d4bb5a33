"""The JSON that both kinds of batch are answered with."""

from __future__ import annotations

from typing import Any

from jetstream_ext.errors import ResponseError, ServerError, server_error
from jetstream_ext.types import BatchAck


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
