"""The cost of `jetstream_ext.otel` for `add_many`, in CPU time of the client alone.

Every round runs every case once, in random order. "off" is there twice: the two differ by the error of the measurement.
"""

import asyncio
import gc
import random
import time
from collections.abc import Iterator

import nats
from nats.js import JetStreamContext
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from record import CLIENT, Group

import jetstream_ext as jsx
from jetstream_ext import otel
from jetstream_ext.testing import NatsServer

OFF, AGAIN, SPANS, ON = "off", "off, again", "on, inject=False", "on"
CASES = (OFF, AGAIN, SPANS, ON)
SUBJECTS = [f"bench.{i}" for i in range(10)]


def case(what: str, messages: int) -> str:
    return f"{what}, {messages} messages a call"


def run(name: str, *, quick: bool) -> Group:
    messages, size, rounds = (1_000, 128, 1) if quick else (20_000, 128, 40)
    calls = (messages, 1_000) if quick else (messages, 1_000, 100)
    with NatsServer() as server:
        group = Group(name, messages=messages, size=size, rounds=rounds)
        asyncio.run(_measure(server.url, group, messages, size, rounds, calls))
    return group


async def _measure(url: str, group: Group, messages: int, size: int, rounds: int, calls: tuple[int, ...]) -> None:
    spans = InMemorySpanExporter()
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    meters = MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False)
    nc = await nats.connect(url)
    js = nc.jetstream()
    await js.add_stream(name="BENCH", subjects=["bench.>"], storage="memory", allow_batched=True)
    cases = [(what, a_call) for a_call in dict.fromkeys(calls) for what in CASES]
    for number in range(rounds + 1):  # the first warms up
        for what, a_call in random.sample(cases, len(cases)):
            if what in (OFF, AGAIN):
                otel.uninstrument()
            else:
                otel.instrument(tracers, meters, inject=what == ON)
            gc.collect()
            began = time.process_time()
            await _publish(js, messages, b"x" * size, a_call)
            used = time.process_time() - began
            if number:
                group.note(case(what, a_call), CLIENT, used / messages * 1e6)
            await js.purge_stream("BENCH")
            spans.clear()
    otel.uninstrument()
    await nc.close()


async def _publish(js: JetStreamContext, messages: int, payload: bytes, a_call: int) -> None:
    async with jsx.FastPublisher(js) as publisher:
        for _ in range(0, messages, a_call):
            await publisher.add_many(_entries(a_call, payload))


def _entries(count: int, payload: bytes) -> Iterator[tuple[str, bytes]]:
    return ((SUBJECTS[i % 10], payload) for i in range(count))
