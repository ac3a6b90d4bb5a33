"""Text that UTF-8 cannot encode is refused by every public call, in this library's words and before anything is sent."""

import functools
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from client_cells import each
from nats.js import JetStreamContext
from nats.js.api import (
    ConsumerConfig,
    ExternalStream,
    Placement,
    RePublish,
    StreamConfig,
    StreamConsumerSource,
    StreamSource,
    SubjectTransform,
)
from nats.js.errors import InvalidKeyError
from nats.js.kv import KeyValue

import jetstream_ext as jsx
from jetstream_ext import kv as kvx
from jetstream_ext import log

HALF = "\ud800"
IN_TEXT = f"a{HALF}b"
NOW = datetime.now(UTC)

Options = dict[str, Any]
Call = Callable[["Place"], Awaitable[object] | object]

MESSAGES: dict[str, Options] = {
    "subject": {"subject": IN_TEXT},
    "subject with a dot": {"subject": f"a.{HALF}"},
    "header value": {"headers": {"A": IN_TEXT}},
    "header value after others": {"headers": {"A": "1", "B": "2", "C": HALF}},
    "header name": {"headers": {IN_TEXT: "1"}},
    "msg_id": {"msg_id": HALF},
    "stream": {"stream": HALF},
    "expected_last_subject": {"expected_last_subject": HALF, "expected_last_subject_seq": 0},
}
CONFIGS: dict[str, Options] = {
    "name": {"name": HALF},
    "description": {"description": IN_TEXT},
    "subjects": {"subjects": [HALF]},
    "metadata value": {"metadata": {"a": HALF}},
    "metadata key": {"metadata": {HALF: "a"}},
    "source name": {"sources": [StreamSource(name=HALF)]},
    "source filter": {"sources": [StreamSource(name="S", filter_subject=HALF)]},
    "source external": {"sources": [StreamSource(name="S", external=ExternalStream(api=HALF))]},
    "source transform": {
        "sources": [StreamSource(name="S", subject_transforms=[SubjectTransform(src="a", dest=HALF)])]
    },
    "source consumer": {
        "sources": [StreamSource(name="S", consumer=StreamConsumerSource(name=HALF, deliver_subject="d"))]
    },
    "mirror": {"mirror": StreamSource(name=HALF)},
    "transform": {"subject_transform": SubjectTransform(src="a", dest=HALF)},
    "republish": {"republish": RePublish(src="a", dest=HALF)},
    "placement": {"placement": Placement(cluster=HALF, tags=[])},
}
CONSUMERS: dict[str, Options] = {
    "stream": {"stream": HALF},
    "name": {"name": HALF},
    "deliver_subject": {"deliver_subject": HALF},
    "filter_subject": {"filter_subject": HALF},
    "description": {"config": ConsumerConfig(description=HALF)},
    "metadata": {"config": ConsumerConfig(metadata={"a": HALF})},
    "filter_subjects": {"config": ConsumerConfig(filter_subjects=[HALF])},
    "external": {"external": ExternalStream(api=HALF)},
}


class Place:
    """What the calls use: a stream, a bucket, and a context."""

    def __init__(self, js: JetStreamContext, stream: str, bucket: KeyValue) -> None:
        self.js = js
        self.stream = stream
        self.bucket = bucket

    def message(self, options: Options) -> jsx.BatchMessage:
        return jsx.BatchMessage(**({"subject": f"{self.stream}.a"} | options))

    async def atomic_add(self, options: Options) -> None:
        async with jsx.AtomicBatch(self.js) as batch:
            await batch.add(**({"subject": f"{self.stream}.a"} | options))

    async def atomic_commit(self, options: Options) -> None:
        await jsx.AtomicBatch(self.js).commit(**({"subject": f"{self.stream}.a"} | options))

    async def atomic_add_many(self, options: Options) -> None:
        async with jsx.AtomicBatch(self.js) as batch:
            await batch.add_many([self.message(options)])

    async def publish_atomic(self, options: Options) -> None:
        await jsx.publish_atomic(self.js, [self.message(options)])

    async def publish_atomic_many(self, options: Options) -> None:
        await jsx.publish_atomic_many(self.js, [[self.message(options)]]).to_list()

    async def fast_add(self, options: Options) -> None:
        async with jsx.FastPublisher(self.js) as publisher:
            await publisher.add(**({"subject": f"{self.stream}.a"} | options))

    async def fast_add_many(self, options: Options) -> None:
        async with jsx.FastPublisher(self.js) as publisher:
            await publisher.add_many([self.message(options)])

    async def fast_commit(self, options: Options) -> None:
        await jsx.FastPublisher(self.js).commit(**({"subject": f"{self.stream}.a"} | options))

    async def ingest(self, options: Options) -> None:
        await jsx.ingest(self.js, [self.message(options)])

    async def ensure_stream(self, options: Options) -> None:
        await jsx.ensure_stream(self.js, StreamConfig(**({"name": f"{self.stream}-new"} | options)))

    async def create_source_consumer(self, options: Options) -> None:
        given = {"stream": self.stream, "name": "c", "deliver_subject": "d"} | options
        await jsx.create_source_consumer(self.js, given.pop("stream"), given.pop("name"), **given)

    async def in_transaction(self, work: Callable[[kvx.Transaction], object]) -> None:
        async with kvx.transaction(self.bucket) as tx:
            result = work(tx)
            if isinstance(result, Awaitable):
                await result

    def prefixed(self) -> JetStreamContext:
        return self.js._nc.jetstream(prefix=HALF)

    def reader(self, **options: Any) -> log.LogReader:
        return log.LogReader(self.js, self.stream, **options)

    async def exactly_once(self, **options: Any) -> None:
        given = {"name": "w", "output": self.stream, "prefix": f"{self.stream}.w"} | options
        await log.exactly_once(self.reader(start=log.First()), given.pop("output"), _drop, **given)


def _drop(message: jsx.StoredMsg) -> list[jsx.BatchMessage]:
    return []


def direct(place: Place, name: str = "") -> jsx.DirectGet:
    return jsx.DirectGet(place.js, name or place.stream)


def cases() -> Iterator[tuple[str, Call]]:
    groups = (
        (MESSAGES, ("atomic_add", "atomic_commit", "atomic_add_many", "publish_atomic", "publish_atomic_many")),
        (MESSAGES, ("fast_add", "fast_add_many", "fast_commit", "ingest")),
        (CONFIGS, ("ensure_stream",)),
        (CONSUMERS, ("create_source_consumer",)),
    )
    for options, calls in groups:
        for call in calls:
            for what, given in options.items():
                run = functools.partial(lambda place, call, given: getattr(place, call)(given), call=call, given=given)
                yield f"{call}, {what}", run
    yield from OTHERS.items()


OTHERS: dict[str, Call] = {
    "gap mode": lambda place: jsx.FastPublisher(place.js, gap=HALF),  # type: ignore[arg-type]
    "watch_abandoned": lambda place: jsx.watch_abandoned(place.js, HALF),
    "message id of ingest": lambda place: jsx.ingest(place.js, [place.message({})], msg_id=lambda message: HALF),
    "ttl_headers value": lambda place: jsx.ttl_headers(5, {"A": HALF}),
    "ttl_headers name": lambda place: jsx.ttl_headers(5, {HALF: "A"}),
    "ttl_headers dialect": lambda place: jsx.ttl_headers(5, dialect=HALF),  # type: ignore[arg-type]
    "prefix": lambda place: jsx.DirectGet(place.prefixed(), place.stream),
    "prefix of features": lambda place: jsx.features(place.prefixed()),
    "DirectGet": lambda place: jsx.DirectGet(place.js, HALF),
    "get_last": lambda place: direct(place).get_last(HALF),
    "get_next": lambda place: direct(place).get_next(HALF),
    "get_at": lambda place: direct(place).get_at(NOW, subject=HALF),
    "batch": lambda place: direct(place).batch(1, subject=HALF),
    "scan": lambda place: direct(place).scan(subject=HALF),
    "multi_last": lambda place: direct(place).multi_last(["a", HALF]),
    "reset_consumer stream": lambda place: jsx.reset_consumer(place.js, HALF, "c"),
    "reset_consumer name": lambda place: jsx.reset_consumer(place.js, place.stream, HALF),
    "source_health": lambda place: jsx.source_health(place.js, HALF),
    "get_many": lambda place: kvx.get_many(place.bucket, ["a", HALF]),
    "get_many at": lambda place: kvx.get_many(place.bucket, [HALF], at=1),
    "snapshot": lambda place: kvx.snapshot(place.bucket, filters=[HALF]),
    "touch": lambda place: kvx.touch(place.bucket, HALF, 5),
    "put": lambda place: place.in_transaction(lambda tx: tx.put(HALF, b"")),
    "create": lambda place: place.in_transaction(lambda tx: tx.create(HALF, b"")),
    "update": lambda place: place.in_transaction(lambda tx: tx.update(HALF, b"", last=1)),
    "delete": lambda place: place.in_transaction(lambda tx: tx.delete(HALF)),
    "purge": lambda place: place.in_transaction(lambda tx: tx.purge(HALF)),
    "get in a transaction": lambda place: place.in_transaction(lambda tx: tx.get(HALF)),
    "get_many in a transaction": lambda place: place.in_transaction(lambda tx: tx.get_many([HALF])),
    "LogReader stream": lambda place: log.LogReader(place.js, HALF),
    "LogReader subject": lambda place: place.reader(subject=HALF),
    "Stored": lambda place: log.Stored(HALF),
    "bucket of an OffsetStore": lambda place: log.OffsetStore(place.js, HALF),
    "name of a stored position": lambda place: log.OffsetStore(place.js, "offsets").fetch(HALF),
    "name of a commit": lambda place: log.OffsetStore(place.js, "offsets").commit(place.reader(), name=HALF),
    "name of committing": lambda place: log.OffsetStore(place.js, "offsets").committing(place.reader(), name=HALF),
    "name of a worker": lambda place: place.exactly_once(name=HALF),
    "prefix of a worker": lambda place: place.exactly_once(prefix=HALF),
    "output stream of a worker": lambda place: place.exactly_once(output=HALF),
}


async def run(call: Call, place: Place) -> None:
    result = call(place)
    if isinstance(result, Awaitable):
        await result


@each("what, call", cases())
async def test_text_that_is_not_unicode_is_refused_before_anything_is_sent(
    js: JetStreamContext, what: str, call: Call
) -> None:
    # Nothing of it needs to exist, because nothing is sent.
    place = Place(js, "S", KeyValue("B", "KV_B", "$KV.B.", js, direct=False))
    sent = js._nc.stats["out_msgs"]
    with pytest.raises((jsx.errors.JetStreamExtError, ValueError, InvalidKeyError)) as caught:
        await run(call, place)
    assert not isinstance(caught.value, UnicodeError)
    assert "codec" not in str(caught.value)
    assert "surrogates not allowed" not in str(caught.value)
    assert js._nc.stats["out_msgs"] == sent
    str(caught.value).encode(errors="strict")
