"""Streams that lost messages and kept their creation time: a running reader never passes over what they store afterwards."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import nats.errors
import nats.js.errors
import pytest
from clients import connected
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

from jetstream_ext import errors
from jetstream_ext.client import doorbell
from jetstream_ext.client.api import check_same_stream, get_at_leader, stream_state
from jetstream_ext.client.connection import Context
from jetstream_ext.log import LogReader, New, Seq, exactly_once, reading
from jetstream_ext.testing import NatsCluster, NatsServer

# nats-py leaves the sockets of lost connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored .*<function (StreamWriter|_SelectorTransport)")
Make = Callable[..., Awaitable[str]]
More = Callable[[str, int, int], Awaitable[None]]


async def seqs(reading: Awaitable[list[Any]]) -> list[int]:
    return [message.seq for message in await reading]


def matching(subject: str | None, first: int, last: int) -> list[int]:
    """Return the sequences of the messages on `subject`."""
    return [seq for seq in range(first, last + 1) if subject in (None, ("s.even", "s.odd")[seq % 2])]


class Restored:
    """A server, and a copy of its stream S from when that had 100 messages; now it has 110."""

    def __init__(self, server: NatsServer, js: JetStreamContext, copy: Path) -> None:
        self.js = js
        self._server = server
        self._stream = Path(server.store_dir) / "jetstream" / "$G" / "streams" / "S"
        self._copy = copy

    async def save(self) -> None:
        await self.publish(100)
        self._server.kill()
        shutil.copytree(self._stream, self._copy)
        await asyncio.to_thread(self._server.restart)
        await self.publish(10)

    async def restore(self) -> None:
        self._server.kill()
        shutil.rmtree(self._stream)
        shutil.copytree(self._copy, self._stream)
        await asyncio.to_thread(self._server.restart)

    async def publish(self, count: int) -> None:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(nats.errors.Error, nats.js.errors.Error):
                    last = (await self.js.stream_info("S")).state.last_seq
                    break
                await asyncio.sleep(0.05)
        for seq in range(last + 1, last + 1 + count):
            await self.js.publish("s.odd" if seq % 2 else "s.even")


@pytest.fixture
async def restored(tmp_path: Path) -> AsyncIterator[Restored]:
    with NatsServer() as server:
        async with connected(server.url) as nc:
            js = nc.jetstream(timeout=10)
            for name, subject in (("S", "s.*"), ("OUT", "out.>")):
                await js.add_stream(StreamConfig(name=name, subjects=[subject], allow_direct=True, allow_atomic=True))
            made = Restored(server, js, tmp_path / "copy")
            await made.save()
            yield made


@pytest.mark.parametrize("grown_to", [110, 120])
async def test_stream_restored_from_an_older_copy_is_an_error(restored: Restored, grown_to: int) -> None:
    """It has other messages below the position, or ends just before it. A reader may have returned nothing yet."""
    subjects = (None, "s.even", "s.odd", "s.none")
    readers = [LogReader(restored.js, "S", subject=subject) for subject in subjects]
    for subject, reader in zip(subjects, readers, strict=True):
        assert [message.seq async for message in reader] == matching(subject, 1, 110)
        assert reader.position == 111
    waiting = [LogReader(restored.js, "S", start=start) for start in (New(), Seq(105))]
    for reader in waiting:
        await reader.open()
    await restored.restore()
    await restored.publish(grown_to - 100)
    for reader in (*readers, *waiting):
        for _ in range(2):
            with pytest.raises(errors.StreamRecreatedError, match="message 110 was stored at"):
                await reader.read()
    for subject, reader in zip(subjects, readers, strict=True):
        assert reader.position == 111
        reader.seek(101)
        assert await seqs(reader.read()) == matching(subject, 101, grown_to)


async def test_stream_restored_in_the_middle_of_a_filtered_read_is_an_error(
    restored: Restored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No message matches the filter, and the position is above the messages that were stored after the restore."""
    monkeypatch.setattr(reading, "_GROUP", 105)
    monkeypatch.setattr(reading, "_WIDEST", 105)
    reader = LogReader(restored.js, "S", subject="s.none", start=Seq(2))
    accept = reading.VerifiedLog._accept

    async def restore_after(self: reading.VerifiedLog, position: int, *arguments: Any, **options: Any) -> Any:
        accepted = await accept(self, position, *arguments, **options)
        if position == 2:
            await restored.restore()
            await restored.publish(20)
        return accepted

    monkeypatch.setattr(reading.VerifiedLog, "_accept", restore_after)
    with pytest.raises(errors.StreamRecreatedError):
        await reader.read()
    assert reader.position == 107


async def test_worker_does_not_end_as_a_success_when_its_input_was_restored(restored: Restored) -> None:
    handled: list[int] = []

    async def handle(message: Any) -> None:
        handled.append(message.seq)
        if message.seq == 110:
            await restored.restore()
            await restored.publish(20)

    with pytest.raises(errors.StreamRecreatedError, match="message 110"):
        await exactly_once(LogReader(restored.js, "S"), "OUT", handle, name="w", prefix="out.at")
    assert handled == list(range(1, 111))


async def test_memory_stream_on_three_servers_that_all_restarted_is_an_error(wait_for_interest: Any) -> None:
    """It is empty, with the same creation time, and then has as many new messages as before and more."""
    with NatsCluster(3) as cluster:
        async with connected(cluster.urls, reconnect_time_wait=0.2) as nc:
            js = nc.jetstream(timeout=5)
            config = StreamConfig(name="S", subjects=["s.*"], allow_direct=True, storage="memory", num_replicas=3)
            await js.add_stream(config)
            await wait_for_interest(js, "s.a")
            for _ in range(20):
                await js.publish("s.a")
            readers = [LogReader(js, "S", subject=subject, patience=60) for subject in (None, "s.a", "s.b")]
            assert [len(await reader.read()) for reader in readers] == [20, 20, 0]
            before = await stream_state(Context(js), "S")
            for server in cluster.servers:
                server.kill()
            for server in cluster.servers:
                await asyncio.to_thread(server.restart)
            await asyncio.to_thread(cluster.wait_ready)
            stored = 0
            async with asyncio.timeout(60):
                while stored < 30:
                    with contextlib.suppress(nats.errors.Error, nats.js.errors.Error):
                        stored = (await js.publish("s.b")).seq
            for reader in readers:
                with pytest.raises(errors.StreamRecreatedError):
                    await reader.read()
            with pytest.raises(errors.StreamRecreatedError, match="lost everything"):
                await check_same_stream(Context(js), before)


async def test_messages_that_were_removed_prove_nothing(js: JetStreamContext, make_stream: Make, more: More) -> None:
    for subject in (None, "1"):
        name = await make_stream(9)
        reader = LogReader(js, name, subject=subject and f"{name}.{subject}")

        async def read(first: int, last: int) -> None:
            wanted = [seq for seq in range(first, last + 1) if subject is None or seq % 3 == 1]  # noqa: B023
            assert [message.seq async for message in reader] == wanted  # noqa: B023

        await read(1, 9)
        await js.delete_msg(name, 9)
        await more(name, 10, 12)
        await read(10, 12)
        await js.delete_msg(name, 12)
        await js.delete_msg(name, 1)
        assert await reader.read() == []
        await js.purge_stream(name)
        for _ in range(3):
            assert await reader.read() == []
        await more(name, 13, 15)
        await read(13, 15)


class FormerLeader:
    """For its first answers, a server that takes itself for the leader of a stream and has only its first messages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last_seq: int, answers: int) -> None:
        self.answers = answers
        self._last_seq = last_seq
        self._look = doorbell.stream_state
        monkeypatch.setattr(doorbell, "stream_state", self.look)

    async def look(self, *arguments: Any) -> Any:
        self.answers -= 1
        context, stream, timeout = arguments
        state = await self._look(*arguments)
        if self.answers < 0:
            return state
        last = await get_at_leader(context, stream, {"seq": self._last_seq}, timeout)
        assert last is not None
        former = replace(state, last_seq=last.seq, last_time=last.time, messages=last.seq)
        return replace(former, replicated=True, leader_is_certain=False)


async def test_former_leader_does_not_end_a_read(
    js: JetStreamContext, make_stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lacks message 9, and perhaps what the reader has read."""
    for subject, last_seq, expected in ((None, 5, [7, 8, 9]), (None, 7, [7]), ("mine", 5, [9]), ("mine", 7, [9])):
        name = await make_stream(6)
        reader = LogReader(js, name, subject=subject and f"{name}.{subject}")
        assert len(await reader.read()) == (0 if subject else 6)
        assert await reader.read() == []
        for n in (7, 8):
            await js.publish(f"{name}.other", b"%d" % n)
        await js.publish(f"{name}.mine")
        with monkeypatch.context() as patch:
            former = FormerLeader(patch, last_seq, answers=3)
            assert await seqs(reader.read(timeout=0)) == expected, (subject, last_seq)
            assert former.answers < 3


async def test_wait_for_a_certain_leader_ends(
    js: JetStreamContext, make_stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = LogReader(js, await make_stream(2), patience=0.3)
    FormerLeader(monkeypatch, 2, answers=1000)
    assert await seqs(reader.read()) == [1, 2], "what is stored is read"
    with pytest.raises(errors.RequestTimeoutError, match="has not heard from the other servers"):
        await reader.read()
    assert reader.position == 3
