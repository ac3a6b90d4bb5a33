"""What the server announces on its own account."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import gojson, ids, times

if TYPE_CHECKING:
    from .stream import Stream

__all__ = ["batch_abandoned", "deliveries_exceeded"]

_EVENTS = "$JS.EVENT.ADVISORY"


def batch_abandoned(stream: Stream, batch_id: str, reason: str) -> None:
    """Tell whoever listens that a batch was given up."""
    kind = "batch_abandoned" if stream.profile.draft else "stream_batch_abandoned"
    _send(stream, f"STREAM.BATCH_ABANDONED.{stream.name}", kind, {"batch": batch_id, "reason": reason})


def deliveries_exceeded(stream: Stream, consumer: str, seq: int, count: int) -> None:
    """Tell whoever listens that a message was delivered as often as it may be."""
    subject = f"CONSUMER.MAX_DELIVERIES.{stream.name}.{consumer}"
    _send(stream, subject, "max_deliver", {"consumer": consumer, "stream_seq": seq, "deliveries": count})


def _send(stream: Stream, subject: str, kind: str, what: dict[str, Any]) -> None:
    advisory = {
        "type": f"io.nats.jetstream.advisory.v1.{kind}",
        "id": ids.nuid(stream.random),
        "timestamp": times.rfc3339(stream.now),
        "stream": stream.name,
        **what,
    }
    stream.send(f"{_EVENTS}.{subject}", gojson.dumps(advisory))
