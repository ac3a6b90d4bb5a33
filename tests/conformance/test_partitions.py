"""The partition of a subject, against the subject transform of real servers."""

import os
import random
from collections.abc import AsyncIterator, Callable

import nats
import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import SubjectTransform

import jetstream_ext as jsx
from jetstream_ext.client.api import get_at_leader
from jetstream_ext.client.connection import Context
from jetstream_ext.log import partition_of
from jetstream_ext.protocol.partitions import Partitioner
from jetstream_ext.testing import NatsServer

# By source filter: the wildcards in the server's function, counted from 1, and the tokens of the key, counted from 0.
KEYS = [
    ("in.*.*.*.*", "1", (1,)),
    ("in.*.*.*.*", "2,3", (2, 3)),
    ("in.*.*.*.*", "4,1,4", (4, 1, 4)),
    ("in.*.fixed.*.*", "1,2", (1, 3)),
    ("in.*.*.>", "2,1", (2, 1)),
]
BYTES = (*b"ab", *"ß漢🦀".encode(), 0x80, 0xC3, 0xE2, 0x82, 0xED, 0xA0, 0xF0, 0x9F, 0xFF)
NEWEST = "2.15.1"
FULL = bool(os.environ.get("JETSTREAM_EXT_FULL"))
RELEASES = ("2.11.11", "2.12.8", "2.14.6", NEWEST) if FULL else (NEWEST,)
# `partition(n)` without tokens came with 2.12.
COUNTS = (1, 2, 3, 7, 16, 64, 100, 997, 65_536, 2_147_483_647)


def random_token(rng: random.Random) -> str:
    size = rng.choice((1, 1, 2, 5, 8, 8, 20, rng.randrange(1, 300)))
    kind = rng.randrange(4)
    if kind == 0:
        return str(rng.randrange(10**9))
    if kind == 1:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyzABCXYZ0123456789-_=/:$#{}!", k=size))
    if kind == 2:
        return "".join(rng.choices("äßéñøžЖя漢字한글🦀👩‍🔬\u00a0\u2028", k=min(size, 60)))
    return rng.choice(("eu", "us", "order", "*x", "x>", "漢", "a\ufffdb"))


def random_subjects(count: int, seed: int, source: str) -> list[str]:
    """Return subjects that the filter `source` matches."""
    rng = random.Random(seed)
    found = [[random_token(rng) for _ in range(4)] for _ in range(count)]
    if "fixed" in source:
        for tokens in found:
            tokens[1] = "fixed"
    return [".".join(("in", *tokens)) for tokens in found]


async def partitions_by_server(js: JetStreamContext, source: str, function: str, subjects: list[str]) -> list[int]:
    """Return the partition that a server's subject transform gives to each subject.

    The stored subject has nothing but the partition, so that its order in the stream tells which subject it was.
    """
    tail = ".>" if source.endswith(">") else ""
    await js.add_stream(
        name="P",
        subjects=[source],
        storage="memory",
        allow_direct=True,
        subject_transform=SubjectTransform(src=source, dest=f"p.{{{{{function}}}}}{tail}"),
    )
    try:
        for at in range(0, len(subjects), 500):
            *more, last = subjects[at : at + 500]
            for subject in more:
                await js._nc.publish(subject, b"")
            await js.publish(last, b"", timeout=30)  # its ack shows that the others are stored
        found = [int(message.subject.split(".")[1]) async for message in jsx.DirectGet(js, "P").scan()]
    finally:
        await js.delete_stream("P")
    assert len(found) == len(subjects)
    return found


@pytest.fixture
async def js(version: str) -> AsyncIterator[JetStreamContext]:
    """A context of a server of the release."""
    with NatsServer(version=version) as server:
        nc = await nats.connect(server.url, connect_timeout=10)
        yield nc.jetstream(timeout=30)
        await nc.close()


def count_for(version: str) -> int:
    """Return how many subjects each case has; in the whole session they are 160,000 in all with the newest release."""
    return 2000 if FULL and version == NEWEST else 100


@pytest.mark.parametrize("version", RELEASES, indirect=True)
async def test_partitions_of_tokens_are_those_of_the_server(js: JetStreamContext, version: str) -> None:
    for seed, (source, tokens, key) in enumerate(KEYS):
        for partitions in COUNTS:
            subjects = random_subjects(count_for(version), seed * 1000 + partitions, source)
            by_server = await partitions_by_server(js, source, f"partition({partitions},{tokens})", subjects)
            ours = [partition_of(subject, partitions, key) for subject in subjects]
            assert ours == by_server, (source, partitions)


@pytest.mark.parametrize("version", [each for each in RELEASES if each != "2.11.11"], indirect=True)
async def test_partitions_of_whole_subjects_are_those_of_the_server(js: JetStreamContext, version: str) -> None:
    for seed, source in enumerate(("in.*.*.*.*", "in.*.fixed.*.*", "in.>")):
        for partitions in COUNTS:
            subjects = random_subjects(count_for(version), seed * 1000 + partitions, source)
            by_server = await partitions_by_server(js, source, f"partition({partitions})", subjects)
            assert [partition_of(subject, partitions, None) for subject in subjects] == by_server, (source, partitions)


async def test_a_subject_that_is_not_utf_8_has_one_partition_whoever_sends_it(
    nc: Client, server: NatsServer, publish_raw: Callable[..., None], stream_name: Callable[[], str]
) -> None:
    """A replica sends the bytes, and the leader's JSON has U+FFFD for each byte that is not part of a character."""
    js, name = nc.jetstream(), stream_name()
    await js.add_stream(name=name, subjects=[f"{name}.>"], storage="memory", allow_direct=True)
    rng = random.Random(5)
    subjects = [
        b"%b.%d." % (name.encode(), at) + bytes(rng.choices(BYTES, k=rng.randrange(1, 12))) + b".x" for at in range(300)
    ]
    publish_raw(server, [(subject, b"") for subject in subjects])
    direct = [message async for message in jsx.DirectGet(js, name).scan()]
    assert [message.raw_subject for message in direct] == subjects
    by_leader = [await get_at_leader(Context(js), name, {"seq": seq}, 30.0) for seq in range(1, len(subjects) + 1)]
    assert sum(one.raw_subject != other.raw_subject for one, other in zip(direct, by_leader, strict=True)) > 100
    for key in (None, (2,), (0, 1, 2)):
        partitioner = Partitioner(1 << 30, key)
        found = partitioner.of(direct)
        assert found == partitioner.of(by_leader)
        assert found == [partition_of(message.subject, 1 << 30, key) for message in direct], "also from the text"
