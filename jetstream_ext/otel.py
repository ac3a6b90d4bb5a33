"""Traces and metrics by OpenTelemetry: `instrument` turns them on, `uninstrument` off. Needs the extra ``[otel]``.

Names and attributes are those of OpenTelemetry's messaging conventions; "Logs, traces and metrics" in the documentation lists
them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Final

from jetstream_ext.client import telemetry
from jetstream_ext.client.base_connection import BaseConnection
from jetstream_ext.client.telemetry import Attributes, Count, Kind
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.subjects import covers, is_literal
from jetstream_ext.protocol.trace_context import TraceContext, trace_context

try:
    from opentelemetry import metrics, propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanKind, StatusCode
except ImportError as _missing:
    raise ImportError(
        "jetstream_ext.otel needs opentelemetry-api: pip install 'nats-jetstream-ext[otel]'"
    ) from _missing

__all__ = ["extract", "instrument", "uninstrument"]

_SYSTEM: Final = "nats"
_SCHEMA: Final = "https://opentelemetry.io/schemas/1.37.0"
_KINDS: Final = {
    Kind.SEND: SpanKind.PRODUCER,
    Kind.COMMIT: SpanKind.CLIENT,
}
# The operations that the conventions have a type for.
_TYPES: Final = {Kind.SEND: "send"}
# Seconds; the conventions' own.
_DURATIONS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_DESCRIPTIONS: Final = {
    Count.ACKNOWLEDGED: ("{message}", "Messages of fast ingest that the server has acknowledged."),
    Count.LOST: ("{message}", "Messages of fast ingest that were lost on their way, as the server reported."),
    Count.REFUSED: ("{message}", "Messages of fast ingest that the server refused while their batch continued."),
    Count.GAPS: ("{gap}", "Reports of the server that messages of fast ingest were lost."),
}


def instrument(
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
    *,
    inject: bool = True,
) -> None:
    """Report the fast ingest of this process (`FastPublisher`, `ingest`) as spans and metrics of OpenTelemetry.

    It counts for every connection, also for objects that exist already. A second call replaces the providers of the first
    one; nothing is reported twice.

    Args:
        tracer_provider: Makes the spans; None is the global one.
        meter_provider: Makes the metrics; None is the global one.
        inject: Add the trace context to the headers of the messages that are sent, by the global propagator
            (``OTEL_PROPAGATORS``), so that their processing can be linked to it. A message that has such headers keeps
            them, and a message that would become too large gets none. Keys of a bucket never get any.

    Raises:
        ImportError: When this module is imported: ``opentelemetry-api`` is not installed.
    """
    tracers = trace.get_tracer_provider() if tracer_provider is None else tracer_provider
    meters = metrics.get_meter_provider() if meter_provider is None else meter_provider
    telemetry.set_observer(_Observer(tracers, meters, inject=inject))


def uninstrument() -> None:
    """Undo `instrument`; calls that are under way still end their spans. Without `instrument`, nothing happens."""
    telemetry.set_observer(None)


def extract(message: StoredMsg) -> Context:
    """Return the trace context that a message carries, for a span that continues the trace of its publisher.

    ::

        async for msg in reader:
            with tracer.start_as_current_span("handle", context=otel.extract(msg)):
                ...

    Args:
        message: A message of any read of this package.

    Returns:
        A context of its own, as the global propagator reads it; without a span if the message carries none.
    """
    return propagate.extract(message.headers, context=Context())


class _Operation:
    """A span, and what its metrics need when it ends."""

    def __init__(
        self,
        observer: _Observer,
        kind: Kind,
        span: Span,
        began: int,
        attributes: dict[str, str | int],
        subject: str | None,
    ) -> None:
        self.span = span
        self.trace: TraceContext | None = None
        self._observer = observer
        self._kind = kind
        self._began = began
        self._subject = subject  # of the single message that it is about
        self._stream: str | None = None
        self._messages = 0
        self._attributes = attributes  # of the metrics
        self._ended = False

    def describe(
        self,
        *,
        stream: str | None = None,
        subjects: Sequence[str] = (),
        messages: int | None = None,
        attributes: Attributes | None = None,
    ) -> None:
        span = self.span
        if messages is not None:
            self._messages = messages
            if self._subject is None:
                span.set_attribute("messaging.batch.message_count", messages)
        if attributes is not None:
            span.set_attributes(attributes)
        if stream is None or stream == self._stream:
            return
        self._stream = stream
        self._attributes["messaging.destination.name"] = stream
        span.set_attribute("jetstream_ext.stream", stream)
        if self._subject is None:
            span.set_attribute("messaging.destination.name", stream)
            span.update_name(f"{self._kind.value} {stream}")
        elif (template := _template(self._subject, subjects)) is not None:
            span.set_attribute("messaging.destination.template", template)
            span.update_name(f"{self._kind.value} {template}")

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        with trace.use_span(self.span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
            yield

    def end(self, error: BaseException | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        if error is not None:
            kind = type(error).__qualname__
            self._attributes["error.type"] = kind
            self.span.set_attribute("error.type", kind)
            if isinstance(error, Exception):
                self.span.record_exception(error)
            self.span.set_status(StatusCode.ERROR, str(error) or kind)
        now = time.time_ns()
        self._observer.ended(self._kind, (now - self._began) / 1e9, self._messages, self._attributes)
        self.span.end(now)


class _Observer:
    """What `telemetry.Observer` describes, by OpenTelemetry's API."""

    def __init__(self, tracers: trace.TracerProvider, meters: metrics.MeterProvider, *, inject: bool) -> None:
        from jetstream_ext import __version__

        self._tracer = tracers.get_tracer("jetstream_ext", __version__, schema_url=_SCHEMA)
        meter = meters.get_meter("jetstream_ext", __version__, schema_url=_SCHEMA)
        self._inject = inject
        self._sent = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Messages that a producer sent to the server."
        )
        self._duration = meter.create_histogram(
            "messaging.client.operation.duration",
            "s",
            "Duration of an operation of a producer or consumer.",
            explicit_bucket_boundaries_advisory=_DURATIONS,
        )
        self._counters = {
            what: meter.create_counter(what.value, unit, text) for what, (unit, text) in _DESCRIPTIONS.items()
        }
        self._servers: dict[str, dict[str, str | int]] = {}

    def begin(
        self,
        kind: Kind,
        connection: BaseConnection,
        *,
        subject: str | None = None,
    ) -> _Operation:
        common: dict[str, str | int] = {"messaging.system": _SYSTEM, "messaging.operation.name": kind.value}
        if kind in _TYPES:
            common["messaging.operation.type"] = _TYPES[kind]
        common |= self._server_of(connection)
        if not isinstance(subject, str):
            subject = None
        began = time.time_ns()
        span = self._tracer.start_span(
            kind.value if subject is None else f"{kind.value} {subject}",
            kind=_KINDS[kind],
            attributes=common if subject is None else common | {"messaging.destination.name": subject},
            start_time=began,
            record_exception=False,
            set_status_on_exception=False,
        )
        operation = _Operation(self, kind, span, began, common, subject)
        if self._inject and kind is Kind.SEND:
            carrier: dict[str, str] = {}
            propagate.inject(carrier, context=trace.set_span_in_context(span))
            operation.trace = trace_context(carrier.items())
        return operation

    def count(self, what: Count, amount: int, *, stream: str | None = None, error: str | None = None) -> None:
        attributes = {"messaging.system": _SYSTEM}
        if stream is not None:
            attributes["messaging.destination.name"] = stream
        if error is not None:
            attributes["error.type"] = error
        self._counters[what].add(amount, attributes)

    def ended(self, kind: Kind, seconds: float, messages: int, attributes: Attributes) -> None:
        if kind is Kind.SEND and messages:
            self._sent.add(messages, attributes)
        self._duration.record(seconds, attributes)

    def _server_of(self, connection: BaseConnection) -> dict[str, str | int]:
        url = connection.nc.connected_url
        if url is None:
            return {}
        where = self._servers.get(url.netloc)
        if where is None:
            where = {"server.address": url.hostname or ""}
            if url.port is not None:
                where["server.port"] = url.port
            self._servers[url.netloc] = where
        return where


def _template(subject: str, subjects: Sequence[str]) -> str | None:
    """Return the subject filter of a stream that stores `subject`, if it has wildcards: few names for many subjects."""
    return next((each for each in subjects if covers(each, subject) and not is_literal(each)), None)
