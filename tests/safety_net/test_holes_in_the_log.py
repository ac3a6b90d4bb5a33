"""A reader returns every message or reports the missing ones, wherever in the stream it started."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from clients import connected
from frame_proxy import FrameProxy, before_request
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

import jetstream_ext as jsx
from jetstream_ext import kv as kvx
from jetstream_ext.errors import PositionLostError, StreamConfigMismatchError
from jetstream_ext.log import Last, LogReader, OffsetStore, Seq, exactly_once
from jetstream_ext.testing import NatsServer

MESSAGES = 3000
PURGED = 2500


@pytest.fixture
async def numbers(js: JetStreamContext, stream_name: Callable[[], str]) -> str:
    """A stream of 3,000 messages."""
    name = stream_name()
    await jsx.ensure_stream(
        js, StreamConfig(name=name, subjects=[f"{name}.in"], allow_direct=True, allow_atomic=True, allow_msg_ttl=True)
    )
    for begin in range(0, MESSAGES, 500):
        await jsx.publish_atomic(js, [jsx.BatchMessage(f"{name}.in", b"%d" % n) for n in range(begin, begin + 500)])
    return name


def purge_between_requests(js: JetStreamContext, name: str) -> Callable[..., Awaitable[Any]]:
    """Return a hook that purges most of the stream when the reader asks for the second part of its first group."""
    return before_request(2, rf"\.DIRECT\.GET\.{name}$", lambda: js.purge_stream(name, seq=PURGED + 1))


async def lost_in(
    server: NatsServer, js: JetStreamContext, name: str, read: Callable[[LogReader], Awaitable[Any]]
) -> int:
    """Return the first sequence that the reader reports as lost, or else the one after the last message."""
    async with FrameProxy(server.port, purge_between_requests(js, name)) as proxy, connected(proxy.url) as nc:
        try:
            await read(LogReader(nc.jetstream(timeout=30), name))
        except PositionLostError as error:
            return error.expected or 0
    return MESSAGES + 1


async def test_reader_from_the_first_message_reports_a_purge_during_its_first_group(
    server: NatsServer, js: JetStreamContext, numbers: str
) -> None:
    seqs: list[int] = []

    async def read(reader: LogReader) -> None:
        async for message in reader:
            seqs.append(message.seq)  # noqa: PERF401 - messages before an error count, too

    expected = await lost_in(server, js, numbers, read)
    assert seqs == list(range(1, expected)), "the sequences that were returned have a hole"


async def test_worker_does_not_end_as_a_success_when_inputs_are_purged_unhandled(
    server: NatsServer, js: JetStreamContext, numbers: str, stream_name: Callable[[], str]
) -> None:
    output, handled = stream_name(), list[int]()
    await js.add_stream(name=output, subjects=[f"{output}.>"], allow_direct=True, allow_atomic=True)

    async def work(reader: LogReader) -> None:
        await exactly_once(reader, output, lambda message: handled.append(message.seq), name="w", prefix=f"{output}.at")

    expected = await lost_in(server, js, numbers, work)
    assert handled == list(range(1, expected)), "the worker passed over inputs"


@pytest.fixture(params=["2.11.11", "2.12.8", "2.14.6", None])
async def js_of_version(request: pytest.FixtureRequest) -> AsyncIterator[JetStreamContext]:
    """Servers with file storage find no message from sequence 2**62 on, and acknowledge them."""
    async with NatsServer(version=request.param) as server, connected(server.url) as nc:
        yield nc.jetstream()


async def make_large(js: JetStreamContext, name: str, **config: Any) -> None:
    """Store five messages, of which only the first has a sequence below 2**62."""
    config = {"subjects": [name], "allow_direct": True, "first_seq": (1 << 62) - 1, **config}
    await js.add_stream(name=name, **config)
    for n in range(5):
        await js.publish(config["subjects"][0].replace(">", "key"), b"%d" % n)


async def test_no_verified_read_passes_over_messages_with_large_sequences(js_of_version: JetStreamContext) -> None:
    js = js_of_version
    await make_large(js, "S")
    await make_large(js, "KV_B", subjects=["$KV.B.>"], max_msgs_per_subject=5, allow_rollup_hdrs=True)
    kv, direct = await js.key_value("B"), jsx.DirectGet(js, "S")
    last = (1 << 62) + 3
    reads: dict[str, Callable[[], Awaitable[Any]]] = {
        "First": lambda: LogReader(js, "S").read(),
        "Last": lambda: LogReader(js, "S", start=Last()).read(),
        "Seq": lambda: LogReader(js, "S", start=Seq(last)).read(),
        "on_lost": lambda: LogReader(js, "S", on_lost="skip").read(),
        "scan": lambda: direct.scan(confirm=True).to_list(),
        "scan to": lambda: direct.scan(confirm=True, up_to_seq=last).to_list(),
        "scan from": lambda: direct.scan(confirm=True, min_seq=last).to_list(),
        "batch": lambda: direct.batch(10, min_seq=last).to_list(),
        "multi_last": lambda: direct.multi_last(["S"], min_seq=last).to_list(),
        "get": lambda: direct.get(last, min_seq=last),
        "get_last": lambda: direct.get_last("S", min_seq=last),
        "get_many": lambda: kvx.get_many(kv, ["key"]),
        "get_many at": lambda: kvx.get_many(kv, ["key"], at=last),
        "snapshot": lambda: kvx.snapshot(kv),
        "transaction": lambda: kvx.transaction(kv).get("key"),
        "touch": lambda: kvx.touch(kv, "key", 60),
        "positions": lambda: OffsetStore(js, "B").fetch("key"),
    }
    for name, read in reads.items():
        with pytest.raises(StreamConfigMismatchError, match=r"2\*\*62") as caught:
            await read()
        assert caught.value.diff == {"storage": ("memory", "file")}, name
    for options in ({"confirm": True}, {"min_seq": last}, {"confirm": True, "min_seq": last}):
        below = await direct.scan(up_to_seq=(1 << 62) - 1, **options).to_list()
        assert [message.data for message in below] == [b"0"], "what is below can be read"


async def test_memory_storage_has_no_largest_sequence(js_of_version: JetStreamContext) -> None:
    js = js_of_version
    await make_large(js, "S", storage="memory")
    everything = [b"0", b"1", b"2", b"3", b"4"]
    assert [message.data async for message in LogReader(js, "S")] == everything
    assert [message.data for message in await jsx.DirectGet(js, "S").scan(confirm=True).to_list()] == everything


async def test_reader_notices_that_its_stream_has_reached_large_sequences(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    await js.add_stream(name=name, subjects=[name], allow_direct=True)
    await js.publish(name, b"0")
    reader = LogReader(js, name)
    assert len(await reader.read()) == 1
    await js.purge_stream(name, seq=(1 << 62) + 1)
    await js.publish(name, b"1")
    with pytest.raises(StreamConfigMismatchError, match=r"2\*\*62"):
        await reader.read()


async def test_worker_refuses_an_output_stream_with_large_sequences(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name, output = stream_name(), stream_name()
    await js.add_stream(name=name, subjects=[name], allow_direct=True)
    await js.add_stream(name=output, subjects=[f"{output}.>"], allow_atomic=True, first_seq=(1 << 62) + 1)
    with pytest.raises(StreamConfigMismatchError, match=r"2\*\*62"):
        await exactly_once(LogReader(js, name), output, lambda _: None, name="w", prefix=f"{output}.at")
