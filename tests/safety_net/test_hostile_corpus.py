"""Every read path returns every message of a stream, whatever publishers have stored as header blocks."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats
import pytest
from hostile_corpus import Stored, store
from nats.js import JetStreamContext
from read_as_spark import read_as_spark
from run_cli import run_cli

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import UnsupportedFeatureError
from jetstream_ext.log import LogReader
from jetstream_ext.testing import NatsServer
from jetstream_ext.testing.reference import ReferenceServer

pytestmark = pytest.mark.internals("nats-py's own parser does not return headers that it cannot read")
# The first and the last release with batched direct gets; `nox -s full` adds those between, and the reference server.
VERSIONS = ["2.11.0", "2.15.1"]
if os.environ.get("JETSTREAM_EXT_FULL"):
    VERSIONS += ["2.11.11", "2.12.8", "2.14.6", "reference"]
all_versions = pytest.mark.parametrize("corpus", ["2.10.26", *VERSIONS], indirect=True, scope="module")
versions = pytest.mark.parametrize("corpus", VERSIONS, indirect=True, scope="module")
newest = pytest.mark.parametrize("corpus", ["2.15.1"], indirect=True, scope="module")
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

        messages = asyncio.run(prepare())
        assert len({message.subject for message in messages}) > 1_500
        assert sum(message.data == b"plain" for message in messages) == 64
        yield Corpus(server.url, not server.version.startswith("2.10"), messages)


@pytest.fixture
async def js(corpus: Corpus) -> AsyncIterator[JetStreamContext]:
    nc = await nats.connect(corpus.url)
    yield nc.jetstream(timeout=30)
    await nc.close()


def as_stored(messages: Iterable[jsx.StoredMsg]) -> list[Stored]:
    return [
        Stored(
            message.seq,
            message.subject,
            message.data,
            [(name.decode("utf-8", "replace"), text.decode("utf-8", "replace")) for name, text in message.raw_headers],
        )
        for message in messages
    ]


@all_versions
async def test_single_get_returns_each_message(js: JetStreamContext, corpus: Corpus) -> None:
    direct = jsx.DirectGet(js, STREAM)
    newest = list({message.subject: message for message in corpus.messages}.values())
    calls: list[tuple[list[Stored], Callable[[Stored], Awaitable[jsx.StoredMsg]]]] = [
        (corpus.messages, lambda message: direct.get(message.seq)),
        (corpus.messages, lambda message: direct.get_next(message.subject, seq=message.seq)),
        (newest, lambda message: direct.get_last(message.subject)),
    ]
    for wanted, call in calls:
        found = list(await asyncio.gather(*map(call, wanted)))
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
async def test_bulk_read_returns_each_message(js: JetStreamContext, corpus: Corpus) -> None:
    for name, read in READS.items():
        reading = read(jsx.DirectGet(js, STREAM))
        if not corpus.batches:
            with pytest.raises(UnsupportedFeatureError):
                await reading.to_list()
            continue
        found = await reading.to_list()
        assert as_stored(found) == corpus.messages, name
        assert {message.stream for message in found} == {STREAM}


@versions
async def test_log_reader_and_multi_last_return_each_message(js: JetStreamContext, corpus: Corpus) -> None:
    assert as_stored([message async for message in LogReader(js, STREAM)]) == corpus.messages
    newest = {message.subject: message for message in corpus.messages}
    subjects = list(newest)
    for start in range(0, len(subjects), 1_000):
        some = subjects[start : start + 1_000]
        found = await jsx.DirectGet(js, STREAM).multi_last(some).to_list()
        assert as_stored(found) == sorted((newest[subject] for subject in some), key=lambda message: message.seq)


def values(messages: Iterable[Stored]) -> dict[str, bytes]:
    """Return what a bucket of these messages holds."""
    found = {message.subject.removeprefix(PREFIX): message for message in messages}

    def is_deleted(message: Stored) -> bool:
        headers = dict(message.headers)
        return headers.get("KV-Operation") in ("DEL", "PURGE") or "Nats-Marker-Reason" in headers

    return {key: message.data for key, message in found.items() if not is_deleted(message)}


@versions
async def test_snapshot_has_each_value(js: JetStreamContext, corpus: Corpus) -> None:
    kv = await js.key_value(BUCKET)
    for past in (False, True):
        point = corpus.messages[-100 if past else -1].seq
        found = await kvx.snapshot(kv, at=point if past else None, strict=not past)
        wanted = values(message for message in corpus.messages if message.seq <= point)
        # A later rollup may have removed an older value, and of the plain messages the bucket has only the newest.
        assert wanted.keys() & set(found.unavailable) <= {"plain"}
        wanted = {key: value for key, value in wanted.items() if key not in found.unavailable}
        assert {key: entry.value for key, entry in found.items()} == wanted
    wanted = values(corpus.messages)
    async with kvx.transaction(kv) as tx:
        for entries in (await kvx.get_many(kv, wanted), await tx.get_many(wanted)):
            assert {key: entry.value for key, entry in entries.items()} == wanted


@newest
def test_export_refuses_the_message_that_its_file_cannot_hold(corpus: Corpus, tmp_path: Path) -> None:
    for name in ("messages.jsonl", "messages.csv"):
        refused = run_cli("export", STREAM, str(tmp_path / name), "--server", corpus.url, home=tmp_path)
        assert refused.status == 1, refused.output
        assert (
            "column 'headers' would lose the line 'garbage', which is no header; export other messages"
            in refused.output
        )


@newest
def test_spark_has_each_message(corpus: Corpus) -> None:
    pytest.importorskip("pyspark")
    read = read_as_spark(corpus.url, stream=STREAM)
    assert read.error == ""
    assert read.data == [message.data.decode() for message in corpus.messages]
