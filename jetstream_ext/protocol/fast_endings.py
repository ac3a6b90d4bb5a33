"""How a fast batch says why it ended: the errors, and what each claims about what is stored."""

from __future__ import annotations

from jetstream_ext.errors import (
    BatchAbandonedError,
    BatchError,
    BatchGapError,
    BatchOutcomeUnknownError,
    JetStreamExtError,
    NoStreamError,
    Outcome,
    ServerError,
    UnsupportedFeatureError,
    batch_refusal,
)
from jetstream_ext.protocol import feature_table
from jetstream_ext.protocol.fast_record import FastRecord, State
from jetstream_ext.types import BatchFlowGap, EndReason

FAST_LEVEL = feature_table.FAST_INGEST.api_level
"""The JetStream API level that has fast ingest."""


def unsupported(server_version: str = "", *, stored_as: int = 0) -> UnsupportedFeatureError:
    """The server does not know fast ingest; `stored_as` is the message it stored as an ordinary one, if any."""
    named = f"nats-server {server_version}" if server_version else "the server"
    done = f"message {stored_as} was stored as an ordinary one" if stored_as else "nothing was sent"
    return UnsupportedFeatureError(
        f"{named} does not know fast ingest (it needs nats-server {feature_table.FAST_INGEST.since}); {done}",
        feature=feature_table.FAST_INGEST.title,
        required_api_level=FAST_LEVEL,
        server_version=server_version or None,
    )


def reason_for(cause: JetStreamExtError | None) -> EndReason:
    """Return the reason that goes with the error of a batch that the server ended."""
    return EndReason.GAP if isinstance(cause, BatchGapError) else EndReason.ERROR


def unacknowledged(batch: FastRecord) -> str:
    """Name the messages that nothing is known of."""
    lost = f"{batch.acked + 1} to {batch.sent}" if batch.sent > batch.acked else "none"
    return f"messages without an acknowledgement: {lost}"


def gap(batch: FastRecord, report: BatchFlowGap) -> BatchError:
    """Messages were lost, says a report."""
    return _lost(batch, report.first_lost, report.last_lost, f"the server acknowledged up to {batch.acked}")


def short(batch: FastRecord, count: int) -> BatchError:
    """Messages were lost, says the final ack: the report of the gap was itself lost."""
    return _lost(batch, count + 1, batch.sent, "the rest is stored")


def _lost(batch: FastRecord, first: int, last: int, rest: str) -> BatchError:
    for report in batch.errors:
        if report.seq == first:  # not lost: refused, after the commit was sent
            return refused(batch, report.error, first, "partial")
    return BatchGapError(
        f"batch {batch.batch_id}: messages {first} to {last} were lost; {rest}",
        first_lost=first,
        last_lost=last,
        **batch.facts("partial"),
    )


def out_of_order(batch: FastRecord, report: BatchFlowGap) -> BatchAbandonedError:
    """The server took a sequence for one that it had before, which only another publisher can have sent."""
    return BatchAbandonedError(
        f"batch {batch.batch_id}: the server had a message {report.first_lost - 1} before it had {report.seq}: "
        "somebody else publishes into this batch",
        **batch.facts("partial"),
    )


def ended_by_server(batch: FastRecord, count: int) -> BatchAbandonedError:
    """The final ack came unasked for."""
    return BatchAbandonedError(
        f"batch {batch.batch_id}: the server ended the batch at message {count} of {batch.sent}",
        **batch.facts("partial"),
    )


def refused(batch: FastRecord, error: ServerError, seq: int, outcome: Outcome) -> BatchError:
    """The server refused a message, and with it the batch."""
    text = f"message {seq} was refused: {error.description}"
    if error.err_code == 10205:
        text = "the stream does not take fast ingest; turn on allow_batched"
    return batch_refusal(error, f"batch {batch.batch_id}: {text}", **batch.facts(outcome))


def no_stream(batch: FastRecord, subject: bytes) -> NoStreamError:
    """Nobody took the first message."""
    return NoStreamError(
        f"no stream listens on subject {subject.decode()!r}: it does not exist, or its leader is away",
        **batch.facts("not_stored"),
    )


def unknown(batch: FastRecord, text: str) -> BatchOutcomeUnknownError:
    """The answer did not come."""
    return BatchOutcomeUnknownError(f"batch {batch.batch_id}: {text}", **batch.facts("unknown"))


def timed_out(batch: FastRecord, waited: str, refusal: ServerError | None) -> BatchOutcomeUnknownError:
    """The answer did not come in time; `refusal` is what came instead, if anything did."""
    if batch.state is State.STARTING:
        text = (
            f"no answer to the first message {waited}: the server may be older than 2.14, "
            "or the stream may have no_ack set"
        )
    elif batch.state is State.COMMITTING:
        text = f"no answer to the commit {waited}: the batch may be stored up to message {batch.sent}"
    else:
        text = f"no acknowledgement beyond message {batch.acked} of {batch.sent} {waited}"
    if refusal is not None:
        text += f"; the server said last: {refusal.description}"
    error = unknown(batch, text)
    error.__cause__ = refusal
    return error


def disconnected(batch: FastRecord, why: str, *, committing: bool = False) -> BatchError:
    """The connection was lost, and the batch with it."""
    if committing:
        return unknown(batch, f"{why} after the commit was sent; {unacknowledged(batch)}")
    return BatchAbandonedError(
        f"batch {batch.batch_id}: {why}; {unacknowledged(batch)}",
        **batch.facts(),
    )
