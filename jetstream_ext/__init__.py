"""Everything modern NATS JetStream can do, for nats-py users."""

from jetstream_ext.client.atomic import AtomicBatch, publish_atomic
from jetstream_ext.client.direct import DirectGet, MessageBatch
from jetstream_ext.client.fast import FastPublisher
from jetstream_ext.types import (
    NEVER,
    TTL,
    BatchAck,
    BatchFlowAck,
    BatchFlowError,
    BatchFlowGap,
    BatchMessage,
    EndReason,
    FastPubAck,
    GapMode,
    StoredMsg,
)

__all__ = [
    "NEVER",
    "TTL",
    "AtomicBatch",
    "BatchAck",
    "BatchFlowAck",
    "BatchFlowError",
    "BatchFlowGap",
    "BatchMessage",
    "DirectGet",
    "EndReason",
    "FastPubAck",
    "FastPublisher",
    "GapMode",
    "MessageBatch",
    "StoredMsg",
    "publish_atomic",
]
