"""A mirror answers direct gets of its origin; a bucket is read completely, whatever its mirror holds."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig, StreamSource, SubjectTransform

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.log import LogReader

KEYS = [f"k{n}" for n in range(100)]
# Each request has a random responder. A mirror that answers half of them answers none of 20 once in 2**20 runs.
TRIALS = 20


async def test_a_bucket_is_whole_beside_a_mirror_with_a_limit(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    for limit in ({"max_msgs": 10}, {"max_bytes": 700}):
        name = stream_name()
        kv = await kvx.enable(await js.create_key_value(bucket=name), atomic=True)
        await jsx.publish_atomic(js, [jsx.BatchMessage(f"$KV.{name}.{key}", b"1") for key in KEYS])
        source, options = StreamSource(name=f"KV_{name}"), {"max_msgs_per_subject": 1, "allow_msg_ttl": True, **limit}
        await js.add_stream(name=f"{name}_MIRROR", mirror=source, allow_direct=True, mirror_direct=True, **options)
        async with asyncio.timeout(60):
            while (await js.stream_info(f"{name}_MIRROR")).state.last_seq < len(KEYS):
                await asyncio.sleep(0.02)
        for _ in range(TRIALS):
            assert set(await kvx.snapshot(kv)) == set(KEYS), limit
            assert set(await kvx.get_many(kv, KEYS)) == set(KEYS), limit


# -- mirrors that change subjects ----------------------------------------------------------------------------------------

Transformed = Callable[..., Awaitable[str]]


@pytest.fixture
def transformed(js: JetStreamContext) -> Transformed:
    """Create mirrors of a stream that have its messages under other subjects, and answer most of its direct gets."""

    async def create(stream: str, messages: int, subjects: dict[str, str]) -> str:
        names = [f"{stream}_CHANGED_{number}" for number in range(3)]
        for name in names:
            changed = StreamSource(name=stream, subject_transforms=[SubjectTransform(*it) for it in subjects.items()])
            await js.add_stream(StreamConfig(name=name, mirror=changed, allow_direct=True, mirror_direct=True))
        async with asyncio.timeout(60):
            for name in names:
                while (await js.stream_info(name)).state.messages < messages:
                    await asyncio.sleep(0.02)
            # Only then does this test show something.
            while {(await jsx.DirectGet(js, stream).get(1)).stream for _ in range(20)} == {stream}:
                await asyncio.sleep(0.02)
        return names[0]

    return create


async def test_messages_have_the_subjects_of_the_stream_beside_a_mirror_that_changes_them(
    js: JetStreamContext, stream_name: Callable[[], str], transformed: Transformed
) -> None:
    for changed in ("012", "0"):
        name = stream_name()
        await js.add_stream(StreamConfig(name=name, subjects=[f"{name}.>"], allow_direct=True))
        expected = [(seq, f"{name}.{seq % 3}") for seq in range(1, 51)]
        for _, subject in expected:
            await js.publish(subject)
        await transformed(name, 50, {f"{name}.{n}": f"elsewhere.{n}" if n in changed else f"{name}.{n}" for n in "012"})
        direct = jsx.DirectGet(js, name)
        zero = [it for it in expected if it[1] == f"{name}.0"]
        for _ in range(10):  # three of four responders are mirrors
            for read, messages in (
                (LogReader(js, name).read(), expected),
                (direct.scan(confirm=True).to_list(), expected),
                (direct.scan(subject=f"{name}.0", confirm=True).to_list(), zero),
                (direct.scan(min_seq=50).to_list(), expected),
                (direct.batch(100, min_seq=50).to_list(), expected),
                (direct.multi_last([f"{name}.*"], min_seq=50).to_list(), expected[-3:]),
            ):
                assert [(m.seq, m.subject) for m in await read] == messages
            assert (await direct.get_last(f"{name}.0", min_seq=50)).seq == 48
            assert (await direct.get(48, min_seq=50)).subject == f"{name}.0"
            assert (await direct.get_next(f"{name}.>", seq=48, min_seq=50)).subject == f"{name}.0"


@pytest.mark.parametrize("changed", ["ab", "a"], ids=["all", "some"])
async def test_snapshot_is_whole_beside_a_mirror_that_changes_subjects(
    js: JetStreamContext, stream_name: Callable[[], str], transformed: Transformed, changed: str
) -> None:
    for keys in (50, 3000):
        name = stream_name()
        kv = await kvx.enable(await js.create_key_value(bucket=name))
        config = (await js.stream_info(f"KV_{name}")).config
        await js.update_stream(config.evolve(allow_batched=True))
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add_many((f"$KV.{name}.{'ab'[n % 2]}.{n}", b"1") for n in range(keys))
        subjects = {
            f"$KV.{name}.{part}.*": f"$KV.{name}{'_OTHER' * (part in changed)}.{part}.{{{{wildcard(1)}}}}"
            for part in "ab"
        }
        await transformed(f"KV_{name}", keys, subjects)
        expected = {f"{'ab'[n % 2]}.{n}" for n in range(keys)}
        for _ in range(4 if keys > 100 else 10):
            assert set(await kvx.snapshot(kv)) == expected
            assert set(await kvx.snapshot(kv, at=keys)) == expected
            assert set(await kvx.get_many(kv, ["a.0", "b.1"])) == {"a.0", "b.1"}
