"""Modern NATS JetStream for nats-py: direct get, atomic batches, fast ingest, TTLs and durable sourcing."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jetstream_ext import arrow as arrow
    from jetstream_ext import errors as errors
    from jetstream_ext import kv as kv
    from jetstream_ext import log as log
    from jetstream_ext import otel as otel
    from jetstream_ext import spark as spark
    from jetstream_ext.client.atomic import (
        AbandonedBatches,
        AtomicBatch,
        AtomicBatches,
        publish_atomic,
        publish_atomic_many,
        watch_abandoned,
    )
    from jetstream_ext.client.consumers import (
        SourceHealth,
        SourceState,
        create_source_consumer,
        reset_consumer,
        source_health,
    )
    from jetstream_ext.client.direct import DirectGet
    from jetstream_ext.client.direct_reader import MessageBatch
    from jetstream_ext.client.fast import FastPublisher
    from jetstream_ext.client.ingest import ingest
    from jetstream_ext.client.streams import Features, ensure_stream, features
    from jetstream_ext.protocol.direct import StoredMsg
    from jetstream_ext.protocol.fast_wire import BatchFlowError
    from jetstream_ext.ttl import marker_reason, ttl_headers, with_ttl
    from jetstream_ext.types import (
        NEVER,
        TTL,
        AbandonedBatch,
        BatchAck,
        BatchFlowAck,
        BatchFlowGap,
        BatchMessage,
        EndReason,
        Entry,
        FastPubAck,
        GapMode,
        InDoubt,
        IngestProgress,
        IngestReport,
    )

__version__: str
"""The installed version of ``nats-jetstream-ext``."""

if not TYPE_CHECKING:  # for a type checker, `__getattr__` would declare every name
    # A name is imported when it is used: Spark starts several processes for a query, one after the other, and each of them
    # needs a part of this package only.
    _AREAS = ("arrow", "errors", "kv", "log", "otel", "spark")
    _NEEDED = {"arrow": "pyarrow", "otel": "opentelemetry"}  # by areas that cannot be imported without it
    _HOMES = {
        "client.atomic": (
            "AbandonedBatches",
            "AtomicBatch",
            "AtomicBatches",
            "publish_atomic",
            "publish_atomic_many",
            "watch_abandoned",
        ),
        "client.consumers": (
            "SourceHealth",
            "SourceState",
            "create_source_consumer",
            "reset_consumer",
            "source_health",
        ),
        "client.direct": ("DirectGet",),
        "client.direct_reader": ("MessageBatch",),
        "client.fast": ("FastPublisher",),
        "client.ingest": ("ingest",),
        "client.streams": ("Features", "ensure_stream", "features"),
        "protocol.direct": ("StoredMsg",),
        "protocol.fast_wire": ("BatchFlowError",),
        "ttl": ("marker_reason", "ttl_headers", "with_ttl"),
        "types": (
            "NEVER",
            "TTL",
            "AbandonedBatch",
            "BatchAck",
            "BatchFlowAck",
            "BatchFlowGap",
            "BatchMessage",
            "EndReason",
            "Entry",
            "FastPubAck",
            "GapMode",
            "InDoubt",
            "IngestProgress",
            "IngestReport",
        ),
    }

    def __getattr__(name):
        from importlib import import_module, metadata

        if name == "__version__":
            return metadata.version("nats-jetstream-ext")
        if name in _AREAS:
            return import_module(f"jetstream_ext.{name}")
        for module, names in _HOMES.items():
            if name in names:
                value = globals()[name] = getattr(import_module(f"jetstream_ext.{module}"), name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        from importlib.util import find_spec

        # `help` and completion import what is listed, and fail with an area that cannot be imported.
        areas = [area for area in _AREAS if area not in _NEEDED or find_spec(_NEEDED[area])]
        return sorted({*__all__, *areas, "__version__", *(name for name in globals() if name.startswith("__"))})


del TYPE_CHECKING  # not a name of this package

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
    "Entry",
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
