"""Everything modern NATS JetStream can do, for nats-py users."""

from jetstream_ext.client.advisories import AbandonedBatches, watch_abandoned
from jetstream_ext.client.atomic import AtomicBatch, publish_atomic
from jetstream_ext.client.atomic_many import AtomicBatches, publish_atomic_many
from jetstream_ext.client.consumers import reset_consumer
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.client.direct_reader import MessageBatch
from jetstream_ext.client.fast import FastPublisher
from jetstream_ext.client.features import Features, features
from jetstream_ext.client.ingest import ingest
from jetstream_ext.client.sourcing import SourceHealth, SourceState, create_source_consumer, source_health
from jetstream_ext.client.streams import ensure_stream
from jetstream_ext.ttl import marker_reason, ttl_headers, with_ttl
from jetstream_ext.types import (
    NEVER,
    TTL,
    AbandonedBatch,
    BatchAck,
    BatchFlowAck,
    BatchFlowError,
    BatchFlowGap,
    BatchMessage,
    EndReason,
    FastPubAck,
    GapMode,
    InDoubt,
    IngestProgress,
    IngestReport,
    StoredMsg,
)

__all__ = [
    "NEVER",
    "TTL",
    "AbandonedBatch",
    "AbandonedBatches",
    "AtomicBatch",
    "AtomicBatches",
    "BatchAck",
    "BatchFlowAck",
    "BatchFlowError",
    "BatchFlowGap",
    "BatchMessage",
    "DirectGet",
    "EndReason",
    "FastPubAck",
    "FastPublisher",
    "Features",
    "GapMode",
    "InDoubt",
    "IngestProgress",
    "IngestReport",
    "MessageBatch",
    "SourceHealth",
    "SourceState",
    "StoredMsg",
    "create_source_consumer",
    "ensure_stream",
    "features",
    "ingest",
    "marker_reason",
    "publish_atomic",
    "publish_atomic_many",
    "reset_consumer",
    "source_health",
    "ttl_headers",
    "watch_abandoned",
    "with_ttl",
]
