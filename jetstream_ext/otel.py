"""Traces and metrics by OpenTelemetry: `instrument` turns them on, `uninstrument` off. Needs the extra ``[otel]``.

Names and attributes are those of OpenTelemetry's messaging conventions; "Logs, traces and metrics" in the documentation lists
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextvars import Token
from functools import wraps
from importlib.metadata import version
from threading import RLock
from traceback import extract_tb, format_tb
from types import TracebackType
from typing import Final, ParamSpec, Self
from urllib.parse import ParseResult
from weakref import WeakKeyDictionary

from jetstream_ext.client import telemetry
from jetstream_ext.client.base_connection import BaseConnection
from jetstream_ext.client.telemetry import Attributes, Count, Kind
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.subjects import covers, is_literal
from jetstream_ext.protocol.trace_context import TraceContext, trace_context
from jetstream_ext.text import get_logger, safe_text

try:
    from opentelemetry import metrics, propagate, trace
    from opentelemetry.context import Context, attach, detach, get_current
    from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanKind, StatusCode
except ImportError as _missing:
    raise ImportError(
        "jetstream_ext.otel needs opentelemetry-api: pip install 'nats-jetstream-ext[otel]'"
    ) from _missing

__all__ = ["extract", "instrument", "uninstrument"]


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


_log: Final = get_logger("client")

_Arguments = ParamSpec("_Arguments")

_SYSTEM: Final = "nats"
_CONSUMER: Final = "messaging.consumer.group.name"
_SCHEMA: Final = "https://opentelemetry.io/schemas/1.37.0"
_KINDS: Final = {
    Kind.SEND: SpanKind.PRODUCER,
    Kind.COMMIT: SpanKind.CLIENT,
    Kind.RECEIVE: SpanKind.CLIENT,
    Kind.PROCESS: SpanKind.CONSUMER,
    Kind.TRANSACTION: SpanKind.INTERNAL,
    Kind.INGEST: SpanKind.INTERNAL,
}
# The operations that the conventions have a type for.
_TYPES: Final = {Kind.SEND: "send", Kind.RECEIVE: "receive", Kind.PROCESS: "process"}
_MAX_LINKS: Final = 128  # of a span; the default limit of OpenTelemetry's SDK
# Seconds; the conventions' own.
_DURATIONS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)


def instrument(
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
    *,
    inject: bool = True,
) -> None:
    """Report what this process does with this package as spans and metrics of OpenTelemetry.

    It counts for every connection, also for objects that exist already. A second call replaces the providers of the first
    one; nothing is reported twice.

    Args:
        tracer_provider: Makes the spans; None is the global one.
        meter_provider: Makes the metrics; None is the global one.
        inject: Add the trace context to the headers of the messages that are sent, by the global propagator
            (``OTEL_PROPAGATORS``), so that their processing can be linked to it. A message that has such headers keeps
            them, and a message that would become too large gets none. Keys of a bucket never get any.

    What the providers, their plugins and the propagator raise later never reaches a caller of this package. Each kind of
    error is one warning of the logger ``jetstream_ext.client``.

    Raises:
        ImportError: When this module is imported: ``opentelemetry-api`` is not installed.
        TypeError: An argument is no provider.
    """
    if tracer_provider is not None and not hasattr(tracer_provider, "get_tracer"):
        raise TypeError(f"tracer_provider must be a TracerProvider or None, not {type(tracer_provider).__name__}")
    if meter_provider is not None and not hasattr(meter_provider, "get_meter"):
        raise TypeError(f"meter_provider must be a MeterProvider or None, not {type(meter_provider).__name__}")
    tracers = trace.get_tracer_provider() if tracer_provider is None else tracer_provider
    meters = metrics.get_meter_provider() if meter_provider is None else meter_provider
    _reported.clear()
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
    return _extracted(message, Context())


def _extracted(message: StoredMsg, into: Context) -> Context:
    # Publishers in Go write "Traceparent".
    return propagate.extract({name.lower(): value for name, value in message.headers.items()}, context=into)


_reported: Final[set[tuple[str, type[Exception]]]] = set()
"""What was logged since `instrument`."""


def _report(what: str, error: Exception, consequence: str) -> None:
    """Log what `what` has raised: once, because it may be raised for each message. Its text may quote the values of headers."""
    if (what, type(error)) in _reported:
        return
    _reported.add((what, type(error)))
    frame = extract_tb(error.__traceback__)[-1]
    _log.warning(
        "OpenTelemetry: %s raised %s (%s, line %s), so %s; further errors of this kind are not logged",
        what,
        type(error).__name__,
        frame.filename,
        frame.lineno,
        consequence,
    )


def _reporting(what: str, consequence: str) -> Callable[[Callable[_Arguments, None]], Callable[_Arguments, None]]:
    """Decorate what calls OpenTelemetry: its errors are reported, and are none of the call that is observed."""

    def decorate(tell: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
        @wraps(tell)
        def told(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
            try:
                tell(*args, **kwargs)
            except Exception as error:
                _report(what, error, consequence)

        return told

    return decorate


class _Operation:
    """A span, and what its metrics need when it ends."""

    __slots__ = (
        "_attributes",
        "_began",
        "_context",
        "_ended",
        "_kind",
        "_messages",
        "_observer",
        "_stream",
        "_subject",
        "_token",
        "_trace",
        "span",
    )

    def __init__(
        self,
        observer: _Observer,
        kind: Kind,
        span: Span,
        parent: Context | None,
        attributes: dict[str, str | int],
        subject: str | None,
        stream: str | None,
    ) -> None:
        self.span = span
        self._observer = observer
        self._kind = kind
        self._began = time.perf_counter()
        self._context = trace.set_span_in_context(span, parent)
        self._token: Token[Context] | None = None
        self._trace: TraceContext | bool | None = True  # True: not looked at yet
        self._subject = subject  # of the single message that it is about
        self._stream = stream
        self._messages = 0
        self._attributes = attributes  # of the metrics
        self._ended = False

    @property
    def trace(self) -> TraceContext | None:
        if isinstance(self._trace, bool):
            self._trace = self._observer.trace_of(self._context)
        return self._trace

    @_reporting("a span", "spans may lack attributes")
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
        if stream is not None and stream != self._stream:
            self._stream = stream
            self._attributes["messaging.destination.name"] = stream
            name, where = _destination(self._kind, self._subject, stream, subjects)
            span.update_name(name)
            span.set_attributes(where)

    def exclude(self, seconds: float) -> None:
        self._began += seconds

    def __enter__(self) -> Self:
        self._attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._token is not None:
            detach(self._token)
        self.end(error)

    def end(self, error: BaseException | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        seconds = time.perf_counter() - self._began
        if error is not None:
            self._attributes["error.type"] = type(error).__qualname__
        self._end_span(error)
        self._observer.ended(self._kind, seconds, self._messages, self._attributes)

    @_reporting("the context", "spans may lack their parents")
    def _attach(self) -> None:
        self._token = attach(self._context)

    @_reporting("a span processor", "spans may be missing")
    def _end_span(self, error: BaseException | None) -> None:
        try:
            if error is not None:
                kind = type(error).__qualname__
                self.span.set_attribute("error.type", kind)
                if isinstance(error, Exception) and self.span.is_recording():
                    self.span.add_event("exception", _facts_of(error))
                self.span.set_status(StatusCode.ERROR, safe_text(error) or kind)
        finally:
            self.span.end()


def _facts_of(error: Exception) -> dict[str, str]:
    """Return the attributes of the event for an exception, as `Span.record_exception` does, but without texts that are not safe."""
    facts = {"exception.type": _class_of(error), "exception.stacktrace": _stacktrace(error)}
    if text := safe_text(error):
        facts["exception.message"] = text
    return facts


def _class_of(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _stacktrace(error: BaseException) -> str:
    """Return what the interpreter prints of an exception and its causes, without texts that are not safe."""
    parts: list[str] = []
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        text = safe_text(cause)
        frames = "".join(format_tb(cause.__traceback__))
        parts.append(f"Traceback (most recent call last):\n{frames}{_class_of(cause)}{text and ': '}{text}\n")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "\nThis has led to:\n\n".join(reversed(parts))


class _Observer:
    """What `telemetry.Observer` describes, by OpenTelemetry's API."""

    def __init__(self, tracers: trace.TracerProvider, meters: metrics.MeterProvider, *, inject: bool) -> None:
        own = version("nats-jetstream-ext")
        self._tracer = tracers.get_tracer("jetstream_ext", own, schema_url=_SCHEMA)
        meter = meters.get_meter("jetstream_ext", own, schema_url=_SCHEMA)
        self._inject = inject
        self._kinds = _KINDS if inject else _KINDS | {Kind.SEND: SpanKind.CLIENT}
        self._messages = {
            Kind.SEND: meter.create_counter(
                "messaging.client.sent.messages", "{message}", "Messages that a producer sent to the server."
            ),
            Kind.RECEIVE: meter.create_counter(
                "messaging.client.consumed.messages", "{message}", "Messages that were read."
            ),
        }
        duration = meter.create_histogram(
            "messaging.client.operation.duration",
            "s",
            "Duration of an operation of a producer or consumer.",
            explicit_bucket_boundaries_advisory=_DURATIONS,
        )
        processing = meter.create_histogram(
            "messaging.process.duration",
            "s",
            "Duration of a handler.",
            explicit_bucket_boundaries_advisory=_DURATIONS,
        )
        self._durations = dict.fromkeys(Kind, duration) | {Kind.PROCESS: processing}
        self._lag = meter.create_gauge(
            "jetstream_ext.lag", "{message}", "Sequences of a stream that a reader has not read."
        )
        self._counters = {
            Count.ACKNOWLEDGED: meter.create_counter(
                Count.ACKNOWLEDGED.value, "{message}", "Messages of fast ingest that the server has acknowledged."
            ),
            Count.LOST: meter.create_counter(
                Count.LOST.value,
                "{message}",
                "Messages of fast ingest that were lost on their way, as the server reported.",
            ),
            Count.REFUSED: meter.create_counter(
                Count.REFUSED.value,
                "{message}",
                "Messages of fast ingest that the server refused while their batch continued.",
            ),
            Count.GAPS: meter.create_counter(
                Count.GAPS.value, "{gap}", "Reports of the server that messages of fast ingest were lost."
            ),
            Count.RETRIES: meter.create_counter(
                Count.RETRIES.value,
                "{retry}",
                "Attempts that failed with a transient error and were followed by another one.",
            ),
        }
        # How far readers are behind: those of one stream without a name, or of one name, are one series. A reader that is
        # far behind must not be hidden by the others.
        self._behind: dict[tuple[str, str | None], WeakKeyDictionary[object, int]] = {}
        self._noting_lag = RLock()
        # Of each kind of operation on each server; a call copies them.
        self._common: dict[tuple[Kind, str | None], dict[str, str | int]] = {}

    def begin(
        self,
        kind: Kind,
        connection: BaseConnection,
        *,
        subject: str | None = None,
        stream: str | None = None,
        subjects: Sequence[str] = (),
        sources: Sequence[StoredMsg] = (),
        consumer: str | None = None,
        attributes: Attributes | None = None,
    ) -> _Operation:
        url = connection.nc.connected_url
        common = self._common.get((kind, None if url is None else url.netloc))
        if common is None:
            common = self._common_of(kind, url)
        if consumer is not None:
            common = common | {_CONSUMER: consumer}
        if not isinstance(subject, str):
            subject = None
        name, where = _destination(kind, subject, stream, subjects)
        of_span = common | where
        if attributes is not None:
            of_span |= attributes
        links, parent = _origins(sources) if sources else ((), None)
        span: Span
        try:
            span = self._tracer.start_span(
                name,
                context=parent,
                kind=self._kinds[kind],
                attributes=of_span,
                links=links,
                record_exception=False,
                set_status_on_exception=False,
            )
        except Exception as error:
            _report("a sampler or span processor", error, "spans are missing")
            span = NonRecordingSpan(trace.get_current_span(parent).get_span_context())
        of_metrics = common.copy()
        if stream is not None:
            of_metrics["messaging.destination.name"] = stream
        return _Operation(self, kind, span, parent, of_metrics, subject, stream)

    def trace_of(self, context: Context) -> TraceContext | None:
        if not self._inject:
            return None
        carrier: dict[str, str] = {}
        try:
            propagate.inject(carrier, context=context)
        except Exception as error:
            _report("inject of the propagator", error, "messages get no trace context")
            return None
        return trace_context(carrier.items())

    @_reporting("a counter", "counts are too low")
    def count(self, what: Count, amount: int, *, stream: str | None = None, error: str | None = None) -> None:
        attributes = {"messaging.system": _SYSTEM}
        if stream is not None:
            attributes["messaging.destination.name"] = stream
        if error is not None:
            attributes["error.type"] = error
        self._counters[what].add(amount, attributes)

    @_reporting("a gauge", "the lag is not up to date")
    def lag(self, reader: object, behind: int | None, stream: str, consumer: str | None) -> None:
        with self._noting_lag:
            known = self._behind.setdefault((stream, consumer), WeakKeyDictionary())
            if behind is None:
                known.pop(reader, None)
            else:
                known[reader] = behind
            largest = max(known.values(), default=None)
        if largest is None:
            return
        attributes = {"messaging.system": _SYSTEM, "messaging.destination.name": stream}
        if consumer is not None:
            attributes[_CONSUMER] = consumer
        self._lag.set(largest, attributes)

    @_reporting("a counter or histogram", "measurements are missing")
    def ended(self, kind: Kind, seconds: float, messages: int, attributes: Attributes) -> None:
        if messages and kind in self._messages:
            self._messages[kind].add(messages, attributes)
        self._durations[kind].record(seconds, attributes)

    def _common_of(self, kind: Kind, url: ParseResult | None) -> dict[str, str | int]:
        common: dict[str, str | int] = {"messaging.system": _SYSTEM, "messaging.operation.name": kind.value}
        if kind in _TYPES:
            common["messaging.operation.type"] = _TYPES[kind]
        if url is not None:
            common["server.address"] = url.hostname or ""
            if url.port is not None:
                common["server.port"] = url.port
        self._common[kind, None if url is None else url.netloc] = common
        return common


def _destination(
    kind: Kind, subject: str | None, stream: str | None, subjects: Sequence[str]
) -> tuple[str, dict[str, str]]:
    """Return the name of a span and the attributes of its destination, as far as it is known."""
    where: dict[str, str] = {}
    place = subject or stream
    if place is not None:
        where["messaging.destination.name"] = place
    if stream is not None:
        where["jetstream_ext.stream"] = stream
        if subject is not None and (template := _template(subject, subjects)) is not None:
            where["messaging.destination.template"] = place = template
        elif not subjects:
            place = stream  # a span for each subject of a stream would have too many names
    return kind.value if place is None else f"{kind.value} {place}", where


def _origins(sources: Sequence[StoredMsg]) -> tuple[list[Link], Context | None]:
    """Return links to the contexts that messages carry, and the parent: that of a single message, if there is no other."""
    found: dict[tuple[int, int], Link] = {}
    for message in sources:
        if len(found) == _MAX_LINKS:
            break
        if message.headers:
            origin = trace.get_current_span(_safely_extracted(message, Context())).get_span_context()
            if origin.is_valid:
                found.setdefault((origin.trace_id, origin.span_id), Link(origin))
    alone = len(sources) == 1 and found and not trace.get_current_span().get_span_context().is_valid
    return list(found.values()), _safely_extracted(sources[0], get_current()) if alone else None


def _safely_extracted(message: StoredMsg, into: Context) -> Context:
    """As `_extracted`, for a handler's input: no header of a message may keep the handler from it."""
    try:
        return _extracted(message, into)
    except Exception as error:
        where = f"message {message.seq} of stream {message.stream!r}"
        _report("extract of the propagator", error, f"{where} counts as one without trace context")
        return into


def _template(subject: str, subjects: Sequence[str]) -> str | None:
    """Return the subject filter of a stream that stores `subject`, if it has wildcards: few names for many subjects."""
    return next((each for each in subjects if covers(each, subject) and not is_literal(each)), None)
