"""A worker ends at the end of its input, and at an output that can never be stored."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamSource, SubjectTransform

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import MessageTooLargeError, StreamConfigMismatchError
from jetstream_ext.log import LogReader, OffsetStore, exactly_once


class EndlessError(Exception):
    """The handler was called more often than there are inputs."""


async def test_worker_whose_output_is_its_input_never_handles_its_own_positions(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_atomic=True)
    for n in range(3):
        await js.publish(f"{name}.in", b"%d" % n)
    handled: list[str] = []

    def handle(message: jsx.StoredMsg) -> None:
        handled.append(message.subject)
        if len(handled) > 20:
            raise EndlessError

    try:
        await exactly_once(LogReader(js, name), name, handle, name="w", prefix=f"{name}.at")
    except ValueError:
        assert handled == [], "a refusal comes before the first message"
    else:
        assert handled == [f"{name}.in"] * 3


def source(name: str, **options: Any) -> dict[str, Any]:
    return {"sources": [StreamSource(name=name, **options)]}


COPIES: dict[str, Callable[[str], dict[str, Any]]] = {
    "a mirror": lambda name: {"mirror": StreamSource(name=name)},
    "a source": lambda name: {**source(name), "subjects": [f"{name}-copy.>"]},
    "a filtered source": lambda name: source(name, filter_subject=f"{name}.at.*"),
    "a source with a transform": lambda name: source(
        name, subject_transforms=[SubjectTransform(src=f"{name}.at.*", dest=f"{name}.in.{{{{wildcard(1)}}}}")]
    ),
    "a copy with a transform of its own": lambda name: {
        **source(name),
        "subject_transform": SubjectTransform(src=f"{name}.at.*", dest=f"{name}.in.$1"),
    },
}


async def test_worker_refuses_a_copy_of_its_output_as_its_input(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    for copy, config in COPIES.items():
        name, copied = stream_name(), stream_name()
        await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_atomic=True)
        await js.add_stream(name=copied, allow_direct=True, **config(name))
        await js.publish(f"{name}.in.1", b"1")
        for confirm in (True, False):
            reader = LogReader(js, copied, confirm=confirm)
            async with asyncio.timeout(60):  # it would read the copies of its own positions without an end
                with pytest.raises(ValueError, match=rf"{copied}.*copies.*{name}.*nothing was stored.*filter"):
                    await exactly_once(reader, name, lambda _: None, name="w", prefix=f"{name}.at")
        assert (await js.stream_info(name)).state.messages == 1, copy


async def test_worker_refuses_a_filter_that_matches_its_positions(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_atomic=True)
    for subject in (">", f"{name}.>", f"{name}.at.*", f"{name}.*.w"):
        reader = LogReader(js, name, subject=subject)
        with pytest.raises(ValueError, match=rf"is the output stream.*'{name}\.at\.w'.*subject="):
            await exactly_once(reader, name, lambda _: None, name="w", prefix=f"{name}.at")
    assert (await js.stream_info(name)).state.messages == 0


async def test_worker_may_read_its_output_stream_without_its_positions(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name, mirror, filtered = stream_name(), stream_name(), stream_name()
    await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_atomic=True)
    for n in range(3):
        await js.publish(f"{name}.in", b"%d" % n)
    await js.add_stream(name=mirror, mirror=StreamSource(name=name), allow_direct=True)
    inputs = StreamSource(name=name, filter_subject=f"{name}.in")
    await js.add_stream(name=filtered, mirror=inputs, allow_direct=True)
    async with asyncio.timeout(60):
        for each in (mirror, filtered):
            while (await js.stream_info(each)).state.messages < 3:
                await asyncio.sleep(0.05)
    for number, reader in enumerate(
        (
            LogReader(js, name, subject=f"{name}.in"),
            LogReader(js, mirror, subject=f"{name}.in"),
            LogReader(js, filtered),
        )
    ):
        done = await exactly_once(
            reader,
            name,
            lambda message: jsx.BatchMessage(f"{name}.out", message.data),
            name=f"w{number}",
            prefix=f"{name}.at",
        )
        assert (done.inputs, done.outputs) == (3, 3), number


async def test_output_larger_than_the_stream_takes_is_refused_at_once_and_named(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name, output = stream_name(), stream_name()
    await js.add_stream(name=name, subjects=[name], allow_direct=True)
    await js.add_stream(name=output, subjects=[f"{output}.>"], allow_direct=True, allow_atomic=True, max_msg_size=1000)
    await js.publish(name, b"1")
    before = time.monotonic()
    with pytest.raises(MessageTooLargeError, match=f"{output}.large"):
        await exactly_once(
            LogReader(js, name),
            output,
            lambda _: [jsx.BatchMessage(f"{output}.small", b"1"), jsx.BatchMessage(f"{output}.large", bytes(5000))],
            name="w",
            prefix=f"{output}.at",
            patience=60,
        )
    assert time.monotonic() - before < 30


async def test_position_of_a_reader_of_its_own_bucket_is_refused(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    """Each stored position would be the reader's next message, and lead to another position."""
    bucket = stream_name()
    offsets = await OffsetStore(js, bucket).create()
    await kvx.enable(await js.key_value(bucket))
    for subject in (None, f"$KV.{bucket}.>", f"$KV.{bucket}.audit"):
        reader = LogReader(js, f"KV_{bucket}", subject=subject)
        entered = offsets.committing(reader, name="audit", every=1)
        for storing in (offsets.commit(reader, name="audit"), entered.__aenter__()):
            with pytest.raises(ValueError, match=rf"'audit'.*nothing was stored.*KV\.{bucket}\.audit.*subject="):
                await storing
    assert (await js.stream_info(f"KV_{bucket}")).state.messages == 0


async def test_position_of_a_reader_of_other_keys_of_its_bucket_is_stored(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    bucket = stream_name()
    offsets = await OffsetStore(js, bucket).create()
    await kvx.enable(await js.key_value(bucket))
    reader = LogReader(js, f"KV_{bucket}", subject=f"$KV.{bucket}.other")
    assert (await offsets.commit(reader, name="audit")).seq == 1


async def test_standby_worker_refuses_its_lease_as_its_input(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name, bucket, copied = stream_name(), stream_name(), stream_name()
    await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_atomic=True)
    offsets = await OffsetStore(js, bucket).create()
    await kvx.enable(await js.key_value(bucket))
    await js.add_stream(name=copied, mirror=StreamSource(name=f"KV_{bucket}"), allow_direct=True)

    async def work(reader: LogReader, worker: str = "w") -> int:
        done = await exactly_once(reader, name, lambda _: None, name=worker, prefix=f"{name}.at", standby=True)
        return done.inputs

    for source in (f"KV_{bucket}", copied):
        with pytest.raises(
            ValueError,
            match=rf"'{source}'.*the lease's bucket.*each lease.*leases\.{name}.*nothing was stored.*subject=",
        ):
            await work(LogReader(js, source, offsets=offsets))
    assert (await js.stream_info(f"KV_{bucket}")).state.messages == 0
    for source in (f"KV_{bucket}", copied):
        reader = LogReader(js, source, offsets=offsets, subject=f"$KV.{bucket}.other")
        assert await work(reader, f"of-{source}") == 0


async def test_worker_does_not_end_as_a_success_when_consumers_remove_its_inputs(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    """The retention becomes `interest` while the worker runs, and a consumer acknowledges inputs that are still unread."""
    name, output = stream_name(), stream_name()
    await js.add_stream(name=name, subjects=[name], allow_direct=True)
    await js.add_stream(name=output, subjects=[f"{output}.>"], allow_direct=True, allow_atomic=True)
    for n in range(10):
        await js.publish(name, b"%d" % n)
    handled: list[int] = []

    async def handle(message: jsx.StoredMsg) -> None:
        handled.append(message.seq)
        if message.seq == 5:
            await js.add_consumer(name, durable_name="C", ack_policy="explicit")
            await js.update_stream((await js.stream_info(name)).config.evolve(retention="interest"))
            for n in range(10):
                await js.publish(name, b"%d" % n)
            consumer = await js.pull_subscribe_bind("C", name)
            for taken in await consumer.fetch(20):
                if taken.metadata.sequence.stream in (12, 13, 14, 18):
                    await taken.ack_sync(timeout=30)

    with pytest.raises(StreamConfigMismatchError, match="interest retention"):
        await exactly_once(LogReader(js, name), output, handle, name="w", prefix=f"{output}.at")
    assert handled == list(range(1, 11))
