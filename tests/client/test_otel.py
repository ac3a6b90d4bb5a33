"""Spans, metrics and trace context of fast ingest, by OpenTelemetry's SDK on a real server."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from client_cells import each
from nats.js import JetStreamContext
from opentelemetry import baggage, context, propagate, trace
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler, SamplingResult
from opentelemetry.trace import SpanKind, StatusCode

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext import log, otel
from jetstream_ext.testing import NatsServer


class Recorded:
    """What was reported since `instrument`."""

    def __init__(self) -> None:
        self._spans, self._metrics = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers = TracerProvider(shutdown_on_exit=False)
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self.meters = MeterProvider([self._metrics], shutdown_on_exit=False)

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._spans.get_finished_spans())

    def points(self, name: str) -> list[Any]:
        data = self._metrics.get_metrics_data()
        scopes = [scope for each in (data.resource_metrics if data else []) for scope in each.scope_metrics]
        return [
            point
            for scope in scopes
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]

    def total(self, name: str) -> int:
        return sum(point.value for point in self.points(name))


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    recorded = Recorded()
    otel.instrument(recorded.tracers, recorded.meters)
    yield recorded
    otel.uninstrument()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def parent_of(headers: dict[str, str]) -> tuple[int, int]:
    _, trace_id, span_id, _ = headers["traceparent"].split("-")
    return int(trace_id, 16), int(span_id, 16)


def ids_of(span: ReadableSpan) -> tuple[int, int]:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id, context.span_id


async def stored(js: JetStreamContext, stream: str) -> list[jsx.StoredMsg]:
    return await jsx.DirectGet(js, stream).scan().to_list()


async def test_a_bulk_is_one_span_whose_context_is_in_every_message(
    js: JetStreamContext, make_stream: Callable[..., Any], recorded: Recorded, server: NatsServer
) -> None:
    stream = await make_stream()
    plain: list[Any] = [(f"{stream}.{i % 3}", b"%d" % i) for i in range(250)]
    others: list[Any] = [
        (f"{stream}.h", b"h", {"a": "1"}),
        jsx.BatchMessage(f"{stream}.m", b"m", msg_id="id"),
        (f"{stream}.p", b"plain again"),
    ]
    async with jsx.FastPublisher(js) as publisher:
        await publisher.add_many([*plain, *others])
    send, commit = recorded.spans
    where = urlsplit(server.url)
    common = {
        "messaging.system": "nats",
        "messaging.destination.name": stream,
        "messaging.batch.message_count": 253,
        "server.address": where.hostname,
        "server.port": where.port,
        "jetstream_ext.stream": stream,
        "jetstream_ext.batch.id": publisher.batch_id,
    }
    assert (send.name, send.kind, send.status.status_code) == (f"send {stream}", SpanKind.PRODUCER, StatusCode.UNSET)
    assert attributes(send) == common | {"messaging.operation.name": "send", "messaging.operation.type": "send"}
    assert (commit.name, commit.kind) == (f"commit {stream}", SpanKind.CLIENT)
    assert attributes(commit) == common | {"messaging.operation.name": "commit"}
    messages = await stored(js, stream)
    assert [message.data for message in messages] == [*(b"%d" % i for i in range(250)), b"h", b"m", b"plain again"]
    assert {parent_of(message.headers) for message in messages} == {ids_of(send)}
    assert (messages[250].headers["a"], messages[251].headers["Nats-Msg-Id"]) == ("1", "id")
    assert ids_of_parent(otel.extract(messages[7])) == ids_of(send)


def ids_of_parent(context: Any) -> tuple[int, int]:
    found = trace.get_current_span(context).get_span_context()
    return found.trace_id, found.span_id


async def test_a_message_is_a_span_named_by_the_subjects_of_its_stream(
    js: JetStreamContext, make_stream: Callable[..., Any], recorded: Recorded
) -> None:
    stream = await make_stream()
    tracer = recorded.tracers.get_tracer("test")
    with tracer.start_as_current_span("request"):
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add(f"{stream}.17", b"x")
            await publisher.add_many(each async for each in one_by_one((f"{stream}.18", b"y")))
    add, bulk, commit, request = recorded.spans
    assert [add.name, bulk.name, commit.name] == [f"send {stream}.>", f"send {stream}", f"commit {stream}"]
    assert attributes(add)["messaging.destination.name"] == f"{stream}.17"
    assert attributes(add)["messaging.destination.template"] == f"{stream}.>"
    assert "messaging.batch.message_count" not in attributes(add)
    assert all(span.parent == request.get_span_context() for span in (add, bulk, commit))
    assert [parent_of(message.headers) for message in await stored(js, stream)] == [ids_of(add), ids_of(bulk)]


async def one_by_one(*entries: Any) -> Any:
    for entry in entries:
        yield entry


@each("name", ["traceparent", "Traceparent"])  # publishers in Go write it so
async def test_a_context_of_the_users_own_stays(
    js: JetStreamContext, make_stream: Callable[..., Any], recorded: Recorded, name: str
) -> None:
    stream, own = await make_stream(), {name: f"00-{'a' * 32}-{'b' * 16}-01"}
    async with jsx.FastPublisher(js) as publisher:
        await publisher.add(f"{stream}.a", b"", headers=own)
        await publisher.add_many([(f"{stream}.a", b"", own), jsx.BatchMessage(f"{stream}.a", headers=own)])
    messages = await stored(js, stream)
    assert [message.headers for message in messages] == [own] * 3
    assert ids_of_parent(otel.extract(messages[0])) == (int("a" * 32, 16), int("b" * 16, 16))


async def test_a_message_that_just_fits_into_its_stream_is_stored_without_a_context(
    js: JetStreamContext, make_stream: Callable[..., Any], recorded: Recorded
) -> None:
    stream = await make_stream(max_msg_size=1000)
    own = {"a": "1"}
    fits: list[Any] = [(f"{stream}.a", bytes(960)), (f"{stream}.a", bytes(960), own)]
    async with jsx.FastPublisher(js) as publisher:
        await publisher.add(f"{stream}.a", bytes(960))
        await publisher.add_many([*fits, jsx.BatchMessage(*fits[1]), (f"{stream}.a", b"")])
    async with jsx.AtomicBatch(js) as batch:
        await batch.add(f"{stream}.a", bytes(860))
        await batch.add_many([(f"{stream}.a", bytes(860)), (f"{stream}.a", bytes(830), own), (f"{stream}.a", b"")])
        await batch.commit(f"{stream}.a", bytes(830))
    traced = ["traceparent" in message.headers for message in await stored(js, stream)]
    assert traced == [False, False, False, False, True, False, False, False, True, False]


async def test_spans_say_nothing_of_a_payload_that_an_error_quotes(
    js: JetStreamContext, make_stream: Callable[..., Any], recorded: Recorded
) -> None:
    stream, output = await make_stream(), await make_stream()
    async with jsx.FastPublisher(js) as publisher:
        await publisher.add(f"{stream}.a", b"hunter2", headers={"Token": "hunter2"})

    def convert(message: jsx.StoredMsg) -> None:
        int(message.data)

    def convert_again(message: jsx.StoredMsg) -> None:
        try:
            convert(message)
        except ValueError as error:
            raise jsx.errors.BatchClosedError("the batch is closed") from error

    def quote(message: jsx.StoredMsg) -> None:
        raise jsx.errors.ConversionError(f"{message.data!r} is no number")

    for handler in (convert, convert_again, quote):
        with pytest.raises((ValueError, jsx.errors.BatchClosedError)):
            await log.exactly_once(log.LogReader(js, stream), output, handler, name="w", prefix=f"{output}.at")
    first, second, third = [span for span in recorded.spans if span.kind is SpanKind.CONSUMER]
    for span in recorded.spans:
        assert "hunter2" not in span.to_json()
    described = [(span.status.description, attributes(span)["error.type"]) for span in (first, second, third)]
    assert described == [
        ("ValueError", "ValueError"),
        ("the batch is closed", "BatchClosedError"),
        ("ConversionError", "ConversionError"),
    ]
    assert "exception.message" not in dict(first.events[0].attributes or {})


async def test_no_context_is_added_without_inject(js: JetStreamContext, make_stream: Callable[..., Any]) -> None:
    stream, recorded = await make_stream(), Recorded()
    otel.instrument(recorded.tracers, recorded.meters, inject=False)
    try:
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add_many([(f"{stream}.a", b"")] * 3)
    finally:
        otel.uninstrument()
    assert [message.headers for message in await stored(js, stream)] == [{}] * 3
    assert [span.name for span in recorded.spans] == [f"send {stream}", f"commit {stream}"]


async def test_failed_and_cancelled_calls_end_their_spans_as_errors(
    js: JetStreamContext, make_stream: Callable[..., Any], recorded: Recorded
) -> None:
    stream = await make_stream()
    publisher = jsx.FastPublisher(js)
    with pytest.raises(RuntimeError, match="source"):
        await publisher.add_many(broken(stream))
    await publisher.discard()
    with pytest.raises(jsx.errors.BatchClosedError):
        await publisher.add(f"{stream}.a")
    cancelled = jsx.FastPublisher(js)
    endless = asyncio.get_running_loop().create_task(cancelled.add_many((f"{stream}.a", b"") for _ in iter(int, 1)))
    async with asyncio.timeout(30):
        while not cancelled.ack_seq:
            await asyncio.sleep(0)
    endless.cancel()
    with pytest.raises(asyncio.CancelledError):
        await endless
    await cancelled.discard()
    found = [(attributes(span)["error.type"], span.status.status_code, len(span.events)) for span in recorded.spans]
    error = StatusCode.ERROR
    assert found == [("RuntimeError", error, 1), ("BatchClosedError", error, 1), ("CancelledError", error, 0)]
    assert attributes(recorded.spans[0])["messaging.batch.message_count"] == 2
    assert cancelled.batch_seq >= 1
    assert attributes(recorded.spans[2])["messaging.batch.message_count"] == cancelled.batch_seq


def broken(stream: str) -> Iterator[Any]:
    yield f"{stream}.a", b"1"
    yield f"{stream}.a", b"2"
    raise RuntimeError("source")


async def test_what_was_sent_acknowledged_and_refused_is_counted(
    js: JetStreamContext, make_stream: Callable[..., Any], recorded: Recorded
) -> None:
    stream = await make_stream()
    async with jsx.FastPublisher(js, gap=jsx.GapMode.OK) as publisher:
        await publisher.add_many([(f"{stream}.a", b"")] * 50)
        await publisher.add_many([jsx.BatchMessage(f"{stream}.a", expected_last_seq=7)])
    assert publisher.error_count == 1
    assert recorded.total("messaging.client.sent.messages") == 51
    assert recorded.total("jetstream_ext.acknowledged.messages") == 51
    (refused,) = recorded.points("jetstream_ext.refused.messages")
    assert refused.value == 1
    assert refused.attributes == {
        "messaging.system": "nats",
        "messaging.destination.name": stream,
        "error.type": "WrongLastSequenceError",
    }
    durations = recorded.points("messaging.client.operation.duration")
    assert {point.attributes["messaging.operation.name"]: point.count for point in durations} == {
        "send": 2,
        "commit": 1,
    }
    assert all(point.explicit_bounds[0] == 0.005 and point.sum < 30 for point in durations)
    subjects = {value for point in durations for value in point.attributes.values() if str(value).endswith(".a")}
    assert subjects == set()  # a metric per subject would be too many


async def test_a_second_call_replaces_the_first_and_uninstrument_ends_both(
    js: JetStreamContext, make_stream: Callable[..., Any], recorded: Recorded
) -> None:
    stream, second = await make_stream(), Recorded()
    otel.instrument(second.tracers, second.meters)
    async with jsx.FastPublisher(js) as publisher:
        await publisher.add(f"{stream}.a")
        otel.uninstrument()
        await publisher.add(f"{stream}.a")
    otel.uninstrument()
    assert (len(recorded.spans), [span.name for span in second.spans]) == (0, [f"send {stream}.>"])
    assert ["traceparent" in message.headers for message in await stored(js, stream)] == [True, False]


def test_a_missing_opentelemetry_is_named_and_nothing_else_imports_it() -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from jetstream_ext import *\n"
        "import jetstream_ext.kv, jetstream_ext.log\n"
        "import jetstream_ext.otel"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    words = "ImportError: jetstream_ext.otel needs opentelemetry-api: pip install 'nats-jetstream-ext[otel]'"
    assert done.stderr.splitlines()[-1] == words


def named(recorded: Recorded, kind: SpanKind | None = None) -> list[str]:
    return [span.name for span in recorded.spans if kind is None or span.kind is kind]


async def test_atomic_batches_are_spans_and_their_messages_carry_the_context(
    js: JetStreamContext, make_stream: Callable[..., Any], recorded: Recorded
) -> None:
    stream = await make_stream(allow_atomic=True)
    async with jsx.AtomicBatch(js) as batch:
        await batch.add(f"{stream}.1", b"1", headers={"a": "1"})
        await batch.add_many([(f"{stream}.2", b"2"), jsx.BatchMessage(f"{stream}.3", b"3", msg_id="3")])
    await jsx.publish_atomic(js, [(f"{stream}.4", b"4"), (f"{stream}.5", b"5", {"b": "1"}), (f"{stream}.6", b"6")])
    many = await jsx.publish_atomic_many(js, [[(f"{stream}.7", b"7"), (f"{stream}.8", b"8")], [(f"{stream}.9", b"9")]])
    last = jsx.AtomicBatch(js)
    await last.commit(f"{stream}.10", b"10")
    add, bulk, commit, whole, first, second, single = recorded.spans
    names = [f"send {stream}.>", f"send {stream}", f"commit {stream}", *[f"send {stream}"] * 3, f"commit {stream}"]
    assert named(recorded) == names
    counts = [attributes(span).get("messaging.batch.message_count") for span in recorded.spans]
    assert counts == [None, 2, 3, 3, 2, 1, 1]
    assert attributes(whole)["jetstream_ext.stream"] == stream
    assert [attributes(span)["jetstream_ext.batch.id"] for span in (first, second)] == [ack.batch_id for ack in many]
    otel.uninstrument()
    messages = await stored(js, stream)
    assert [message.data for message in messages] == [b"%d" % i for i in range(1, 11)]
    origins = [add, bulk, bulk, whole, whole, whole, first, first, second, single]
    assert [parent_of(message.headers) for message in messages] == [ids_of(span) for span in origins]
    assert [messages[0].headers["a"], messages[2].headers["Nats-Msg-Id"], messages[4].headers["b"]] == ["1", "3", "1"]
    assert attributes(commit)["messaging.operation.name"] == "commit"
    assert recorded.total("messaging.client.sent.messages") == 9  # the last one is part of its commit


async def test_reads_are_spans_with_the_number_of_messages(
    js: JetStreamContext, make_stream: Callable[..., Any], recorded: Recorded
) -> None:
    stream = await make_stream()
    direct = jsx.DirectGet(js, stream)
    async with jsx.FastPublisher(js) as publisher:
        await publisher.add_many([(f"{stream}.a", b"")] * 20)
    await direct.scan().to_list()
    await direct.get_at((await direct.get(7, min_seq=20)).time)
    with pytest.raises(jsx.errors.MessageNotFoundError):
        await direct.get(21)
    async with direct.scan(batch=5) as messages:
        async for message in messages:
            if message.seq == 3:
                break
        await asyncio.sleep(2)
    scan, get, found, missing, early = recorded.spans[2:]
    assert named(recorded)[2:] == [f"receive {stream}"] * 5
    assert {span.kind for span in recorded.spans[2:]} == {SpanKind.CLIENT}
    assert attributes(scan)["messaging.operation.type"] == "receive"
    counts = [attributes(span).get("messaging.batch.message_count") for span in (scan, get, found, missing)]
    assert counts == [20, 1, 1, None]
    assert attributes(missing)["error.type"] == "MessageNotFoundError"
    assert early.status.status_code is StatusCode.UNSET
    assert recorded.total("messaging.client.consumed.messages") >= 24
    (received,) = [
        point
        for point in recorded.points("messaging.client.operation.duration")
        if point.attributes["messaging.operation.name"] == "receive" and "error.type" not in point.attributes
    ]
    assert received.count == 4
    assert received.sum < 2 + sum((span.end_time - span.start_time) / 1e9 for span in (scan, get, found))


async def test_ingest_is_a_span_around_its_batches(
    js: JetStreamContext, make_stream: Callable[..., Any], recorded: Recorded
) -> None:
    stream = await make_stream()
    await jsx.ingest(js, [(f"{stream}.a", b"")] * 30)
    send, commit, whole = recorded.spans
    assert (whole.name, whole.kind) == (f"ingest {stream}", SpanKind.INTERNAL)
    assert [span.parent for span in (send, commit)] == [whole.get_span_context()] * 2
    found = {name: value for name, value in attributes(whole).items() if "ingest." in name or "count" in name}
    assert found == {
        "messaging.batch.message_count": 30,
        "jetstream_ext.ingest.batches": 1,
        "jetstream_ext.ingest.duplicates": 0,
        "jetstream_ext.ingest.resent": 0,
    }


async def test_a_transaction_is_a_span_around_its_commits_and_its_keys_carry_nothing(
    js: JetStreamContext, stream_name: Callable[[], str], recorded: Recorded
) -> None:
    kv = await kvx.enable(await js.create_key_value(bucket=stream_name()))
    runs = 0

    async def change(tx: kvx.Transaction) -> None:
        nonlocal runs
        runs += 1
        await tx.get("c")
        tx.put("a", b"1")
        tx.put("b", b"2")
        if runs == 1:
            await kv.put("c", b"")  # another writer's: this run conflicts

    await kvx.retry_transaction(kv, change)
    first, second, whole = [span for span in recorded.spans if not span.name.startswith("receive")]
    assert [first.name, second.name, whole.name] == [
        f"{what} {kv._stream}" for what in ("commit", "commit", "transaction")
    ]
    assert [attributes(span).get("error.type") for span in (first, second, whole)] == ["KeyConflictError", None, None]
    assert [span.parent for span in (first, second)] == [whole.get_span_context()] * 2
    assert attributes(second)["messaging.batch.message_count"] == 2
    (retries,) = recorded.points("jetstream_ext.retries")
    assert (retries.value, retries.attributes["error.type"]) == (1, "KeyConflictError")
    assert {"traceparent"} & {name for message in await stored(js, kv._stream) for name in message.headers} == set()


async def test_a_worker_continues_the_trace_of_its_input_in_its_outputs(
    js: JetStreamContext, make_stream: Callable[..., Any], recorded: Recorded
) -> None:
    stream, output = await make_stream(), await make_stream()
    async with jsx.FastPublisher(js) as publisher:
        await publisher.add(f"{stream}.a", b"a")
        await publisher.add_many([(f"{stream}.b", b"b"), (f"{stream}.c", b"c")])
    add, bulk, _ = recorded.spans

    def handler(message: jsx.StoredMsg) -> jsx.BatchMessage:
        if message.data == b"c":
            raise RuntimeError("c")
        return jsx.BatchMessage(f"{output}.out", message.data)

    reader = log.LogReader(js, stream)
    with pytest.raises(RuntimeError, match="c"):
        await log.exactly_once(reader, output, handler, name="w", prefix=f"{output}.at", max_messages=2)
    a, b, c = [span for span in recorded.spans if span.kind is SpanKind.CONSUMER]
    assert {span.name for span in (a, b, c)} == {f"process {stream}"}
    assert attributes(a) == attributes(a) | {
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.destination.name": f"{stream}.a",
        "messaging.message.id": "1",
        "messaging.consumer.group.name": "w",
        "jetstream_ext.stream": stream,
    }
    parents = [(span.parent.trace_id, span.parent.span_id) if span.parent else None for span in (a, b, c)]
    assert parents == [ids_of(add), ids_of(bulk), ids_of(bulk)]
    assert [[(link.context.trace_id, link.context.span_id) for link in span.links] for span in (a, b)] == [
        [ids_of(add)],
        [ids_of(bulk)],
    ]
    assert [attributes(span).get("error.type") for span in (a, b, c)] == [None, None, "RuntimeError"]
    commits = [span for span in recorded.spans if span.name == f"commit {output}"]
    assert [attributes(span)["messaging.batch.message_count"] for span in commits] == [2]
    outputs = [message for message in await stored(js, output) if message.subject == f"{output}.out"]
    assert [parent_of(message.headers) for message in outputs] == [ids_of(a), ids_of(b)]
    processed = recorded.points("messaging.process.duration")
    assert sum(point.count for point in processed) == 3
    (lag,) = recorded.points("jetstream_ext.lag")
    assert (lag.value, lag.attributes["messaging.destination.name"]) == (3, stream)


async def test_a_handler_has_the_baggage_of_its_message_and_its_outputs_pass_it_on(
    js: JetStreamContext, make_stream: Callable[..., Any], recorded: Recorded
) -> None:
    stream, output = await make_stream(), await make_stream()
    token = context.attach(baggage.set_baggage("order", "7"))
    try:
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add(f"{stream}.a")
    finally:
        context.detach(token)
    seen: list[object] = []

    def handler(message: jsx.StoredMsg) -> jsx.BatchMessage:
        seen.extend([baggage.get_baggage("order"), context.get_value("caller")])
        return jsx.BatchMessage(f"{output}.out")

    token = context.attach(context.set_value("caller", "c"))
    try:
        await log.exactly_once(log.LogReader(js, stream), output, handler, name="w", prefix=f"{output}.at")
    finally:
        context.detach(token)
    assert seen == ["7", "c"]
    assert (await jsx.DirectGet(js, output).get_last(f"{output}.out")).headers["baggage"] == "order=7"


def test_what_is_no_provider_is_refused() -> None:
    tracers: Any = TracerProvider(shutdown_on_exit=False)
    meters: Any = MeterProvider(shutdown_on_exit=False)
    for given in ("x", 5, meters):
        kind = type(given).__name__
        with pytest.raises(TypeError, match=f"^tracer_provider must be a TracerProvider or None, not {kind}$"):
            otel.instrument(given)
    with pytest.raises(TypeError, match=r"^meter_provider must be a MeterProvider or None, not TracerProvider$"):
        otel.instrument(meter_provider=tracers)


class Raising(SpanProcessor, MeterProvider):
    """A span processor, meters and instruments that raise."""

    def on_start(self, *_: Any, **__: Any) -> None:
        raise ValueError("secret")

    add = record = set = on_start

    def get_meter(self, *_: Any, **__: Any) -> Any:
        return self

    create_counter = create_histogram = create_gauge = get_meter


async def test_spans_and_metrics_that_raise_break_no_call(
    js: JetStreamContext, make_stream: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    stream, output = await make_stream(), await make_stream(allow_atomic=True)
    raising, tracers = Raising(shutdown_on_exit=False), TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(raising)
    otel.instrument(tracers, raising)
    try:
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add_many([(f"{stream}.a", b"")] * 2)
        reader = log.LogReader(js, stream)
        done = await log.exactly_once(reader, output, lambda _: None, name="w", prefix=f"{output}.at")
        await reader.lag()
    finally:
        otel.uninstrument()
    assert done.inputs == 2
    assert " raised ValueError" in caplog.text
    assert "secret" not in caplog.text


class RaisesAt(SpanProcessor, Sampler):
    """A span processor and a sampler, one of whose methods raises."""

    def __init__(self, method: str) -> None:
        self.calls = 0
        setattr(self, method, self.fail)

    def fail(self, *_: Any, **__: Any) -> Any:
        self.calls += 1
        raise ValueError("secret")

    def should_sample(self, *args: Any, **kwargs: Any) -> SamplingResult:
        return ALWAYS_ON.should_sample(*args, **kwargs)

    def get_description(self) -> str:
        return "raises"


@each("method", ["on_start", "on_end", "should_sample"])
async def test_a_span_processor_or_sampler_that_raises_breaks_no_call(
    js: JetStreamContext, make_stream: Callable[..., Any], caplog: pytest.LogCaptureFixture, method: str
) -> None:
    stream, output = await make_stream(), await make_stream(allow_atomic=True)
    plugin = RaisesAt(method)
    caplog.clear()
    own = TracerProvider(shutdown_on_exit=False)
    tracers = TracerProvider(sampler=plugin, shutdown_on_exit=False)
    tracers.add_span_processor(plugin)
    otel.instrument(tracers)
    try:
        with own.get_tracer("test").start_as_current_span("request") as request:
            async with jsx.FastPublisher(js) as publisher:
                await publisher.add(f"{stream}.a")
                await publisher.add_many([(f"{stream}.a", b"")] * 2)
            await jsx.publish_atomic(js, [(f"{output}.b", b"")])
        done = await log.exactly_once(
            log.LogReader(js, stream),
            output,
            lambda _: jsx.BatchMessage(f"{output}.out"),
            name="w",
            prefix=f"{output}.at",
        )
    finally:
        otel.uninstrument()
    assert (publisher.ack.batch_size, done.inputs, done.outputs) == (3, 3, 3)
    assert plugin.calls > 5
    (warning,) = (record.getMessage() for record in caplog.records)
    assert " raised ValueError (" in warning
    assert "secret" not in warning
    context = request.get_span_context()
    expected = context.trace_id, context.span_id
    found = {parent_of(message.headers) for message in await stored(js, stream)}
    assert {trace_id for trace_id, _ in found} == {expected[0]}
    if method != "on_end":  # without spans, the messages continue the caller's
        assert found == {expected}


async def test_a_propagator_that_raises_breaks_no_call(
    js: JetStreamContext, make_stream: Callable[..., Any], recorded: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(TextMapPropagator):
        fields = frozenset[str]()

        def inject(self, carrier: Any, context: Any = None, setter: Any = None) -> None:
            raise KeyError("secret")

        def extract(self, carrier: Any, context: Any = None, getter: Any = None) -> Any:
            raise KeyError("secret")

    stream, output = await make_stream(), await make_stream(allow_atomic=True)
    before = propagate.get_global_textmap()
    propagate.set_global_textmap(Broken())
    try:
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add_many([(f"{stream}.a", b"", {"a": "1"})] * 30)
        reader = log.LogReader(js, stream)
        done = await log.exactly_once(
            reader, output, lambda _: jsx.BatchMessage(f"{output}.out"), name="w", prefix=f"{output}.at"
        )
    finally:
        propagate.set_global_textmap(before)
    assert (done.inputs, done.outputs) == (30, 30)
    first, second = (re.sub(r"\(\S+test_otel.py, line \d+\)", "(…)", record.getMessage()) for record in caplog.records)
    once = "; further errors of this kind are not logged"
    assert first == (
        f"OpenTelemetry: inject of the propagator raised KeyError (…), so messages get no trace context{once}"
    )
    assert second == (
        "OpenTelemetry: extract of the propagator raised KeyError (…), so message 1 of stream "
        f"{stream!r} counts as one without trace context{once}"
    )
    assert "secret" not in caplog.text
