"""Every read path returns every message of a stream, whatever publishers have stored as header blocks."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import UnsupportedFeatureError
from jetstream_ext.log import LogReader
from jetstream_ext.testing import NatsServer
from jetstream_ext.testing.reference import ReferenceServer

sys.path.insert(0, str(Path(__file__).parent))

from hostile_corpus import Stored, store
from read_as_spark import read_as_spark
from run_cli import run_cli

pytestmark = pytest.mark.internals("nats-py's own parser does not return headers that it cannot read")
VERSIONS = ["2.11.0", "2.11.11", "2.12.8", "2.14.6", "2.15.1", "reference"]
all_versions = pytest.mark.parametrize("corpus", ["2.10.26", *VERSIONS], indirect=True, scope="module")
versions = pytest.mark.parametrize("corpus", VERSIONS, indirect=True, scope="module")
BUCKET, STREAM, PREFIX = "B", "KV_B", "$KV.B."


@dataclass(frozen=True, slots=True)
class Corpus:
    url: str
    batches: bool
    """Whether the server has batched direct gets."""
    messages: list[Stored]


@pytest.fixture(scope="module")
def corpus(request: pytest.FixtureRequest) -> Iterator[Corpus]:
    version = request.param
    running: Any = ReferenceServer() if version == "reference" else NatsServer(version=version)
    with running as server:

        async def prepare() -> list[Stored]:
            nc = await nats.connect(server.url)
            await nc.jetstream().create_key_value(bucket=BUCKET, history=64, direct=True)
            await nc.close()
            return await store(server.port, STREAM, PREFIX)

        yield Corpus(server.url, not server.version.startswith("2.10"), asyncio.run(prepare()))


@pytest.fixture
async def js(corpus: Corpus) -> AsyncIterator[JetStreamContext]:
    nc = await nats.connect(corpus.url)
    yield nc.jetstream(timeout=30)
    await nc.close()


def as_stored(messages: Iterable[jsx.StoredMsg]) -> list[Stored]:
    return [Stored(message.seq, message.subject, message.data, message.header_pairs) for message in messages]


@all_versions
def test_corpus_is_stored(corpus: Corpus) -> None:
    assert len({message.subject for message in corpus.messages}) > 1_500
    assert sum(message.data == b"plain" for message in corpus.messages) == 64


@all_versions
@pytest.mark.parametrize("call", ["get", "get_next", "get_last"])
async def test_single_get_returns_each_message(js: JetStreamContext, corpus: Corpus, call: str) -> None:
    direct = jsx.DirectGet(js, STREAM)
    read: dict[str, Callable[[Stored], Awaitable[jsx.StoredMsg]]] = {
        "get": lambda message: direct.get(message.seq),
        "get_next": lambda message: direct.get_next(message.subject, seq=message.seq),
        "get_last": lambda message: direct.get_last(message.subject),
    }
    newest = {message.subject: message for message in corpus.messages}
    wanted = list(newest.values()) if call == "get_last" else corpus.messages
    found = list(await asyncio.gather(*map(read[call], wanted)))
    assert as_stored(found) == wanted
    assert {message.stream for message in found} == {STREAM}


READS: dict[str, Callable[[jsx.DirectGet], Any]] = {
    "batch": lambda direct: direct.batch(100_000),
    "batch with min_seq": lambda direct: direct.batch(100_000, min_seq=1),
    "scan": lambda direct: direct.scan(),
    "scan with confirm": lambda direct: direct.scan(confirm=True),
    "scan that skips": lambda direct: direct.scan(on_bad="skip"),
    "scan in small requests": lambda direct: direct.scan(batch=7, prefetch=4),
}


@all_versions
@pytest.mark.parametrize("read", READS.values(), ids=READS)
async def test_bulk_read_returns_each_message(
    js: JetStreamContext, corpus: Corpus, read: Callable[[jsx.DirectGet], Any]
) -> None:
    reading = read(jsx.DirectGet(js, STREAM))
    if not corpus.batches:
        with pytest.raises(UnsupportedFeatureError):
            await reading.to_list()
        return
    found = await reading.to_list()
    assert as_stored(found) == corpus.messages
    assert {message.stream for message in found} == {STREAM}


@versions
async def test_multi_last_returns_the_last_message_of_each_subject(js: JetStreamContext, corpus: Corpus) -> None:
    newest = {message.subject: message for message in corpus.messages}
    subjects = list(newest)
    for start in range(0, len(subjects), 1_000):
        some = subjects[start : start + 1_000]
        found = await jsx.DirectGet(js, STREAM).multi_last(some).to_list()
        assert as_stored(found) == sorted((newest[subject] for subject in some), key=lambda message: message.seq)


@versions
async def test_log_reader_returns_each_message(js: JetStreamContext, corpus: Corpus) -> None:
    reader = LogReader(js, STREAM)
    assert as_stored([message async for message in reader]) == corpus.messages


def values(messages: Iterable[Stored]) -> dict[str, bytes]:
    """Return what a bucket of these messages holds."""
    found = {message.subject.removeprefix(PREFIX): message for message in messages}

    def is_deleted(message: Stored) -> bool:
        headers = dict(message.headers)
        return headers.get("KV-Operation") in ("DEL", "PURGE") or "Nats-Marker-Reason" in headers

    return {key: message.data for key, message in found.items() if not is_deleted(message)}


@versions
@pytest.mark.parametrize("past", [False, True], ids=["now", "past"])
async def test_snapshot_has_each_value(js: JetStreamContext, corpus: Corpus, past: bool) -> None:
    kv = await js.key_value(BUCKET)
    point = corpus.messages[-100 if past else -1].seq
    found = await kvx.snapshot(kv, at=point if past else None, strict=not past)
    wanted = values(message for message in corpus.messages if message.seq <= point)
    # A later rollup may have removed an older value, and of the plain messages the bucket has only the newest.
    assert wanted.keys() & set(found.unavailable) <= {"plain"}
    wanted = {key: value for key, value in wanted.items() if key not in found.unavailable}
    assert {key: entry.value for key, entry in found.items()} == wanted


@versions
async def test_get_many_has_each_value(js: JetStreamContext, corpus: Corpus) -> None:
    wanted = values(corpus.messages)
    found = await kvx.get_many(await js.key_value(BUCKET), wanted)
    assert {key: entry.value for key, entry in found.items()} == wanted


@versions
def test_export_refuses_the_message_that_its_file_cannot_hold(corpus: Corpus, tmp_path: Path) -> None:
    for name in ("messages.jsonl", "messages.csv"):
        command = ("export", STREAM, str(tmp_path / name), "--server", corpus.url)
        refused = run_cli(*command, home=tmp_path)
        assert refused.status == 1, refused.output
        assert (
            "column 'headers' would lose the line 'garbage', which is no header; export other messages"
            in refused.output
        )


@versions
def test_spark_has_each_message(corpus: Corpus) -> None:
    pytest.importorskip("pyspark")
    read = read_as_spark(corpus.url, stream=STREAM)
    assert read.error == ""
    assert read.data == [message.data.decode() for message in corpus.messages]
