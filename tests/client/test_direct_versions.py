"""Direct Get on every server from 2.10: the same calls and the answers of each version."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from client_cells import each, seqs
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.testing import NatsServer

VERSIONS = ["2.10.26", "2.11.0", "2.11.11", "2.12.8", "2.14.6", "2.15.1"]


@pytest.fixture(scope="module", params=VERSIONS)
def server(request: pytest.FixtureRequest) -> Iterator[NatsServer]:
    with NatsServer(version=request.param) as server:
        yield server


Make = Callable[..., Awaitable[str]]


@pytest.fixture
async def stream(js: JetStreamContext, make: Make) -> str:
    """Messages 1 to 12 on the subjects A, B, C in turn; 5 has a header, 6 no payload, 8 is deleted."""
    name = await make()
    for seq in range(1, 13):
        headers = {"X-U": "v5"} if seq == 5 else None
        payload = b"" if seq == 6 else b"m%d" % seq
        await js.publish(f"{name}.{'CAB'[seq % 3]}", payload, headers=headers)
    await js.delete_msg(name, 8)
    return name


@pytest.fixture
def direct(js: JetStreamContext, stream: str) -> jsx.DirectGet:
    return jsx.DirectGet(js, stream, timeout=60)


async def time_of(direct: jsx.DirectGet, seq: int) -> datetime:
    """Return the time when the message was stored, rounded down to a microsecond."""
    return (await direct.get(seq)).time


async def test_single_gets_find_a_message_or_say_that_there_is_none(
    direct: jsx.DirectGet, stream: str, version: tuple[int, ...]
) -> None:
    assert [((m := await direct.get(seq)).seq, m.data, m.headers) for seq in (5, 6, 7)] == [
        (5, b"m5", {"X-U": "v5"}), (6, b"", {}), (7, b"m7", {}),
    ]  # fmt: skip
    assert (m.stream, m.subject, m.num_pending, m.last_seq) == (stream, f"{stream}.A", None, None)
    assert abs(m.time - datetime.now(UTC)) < timedelta(minutes=1)
    reads = [
        (direct.get_last(f"{stream}.B"), 11), (direct.get_last(f"{stream}.>"), 12), (direct.get_next(f"{stream}.C"), 3),
        (direct.get_next(f"{stream}.B", seq=6), 11), (direct.get_next(f"{stream}.*", seq=8), 9),
        (direct.get(12, min_seq=12), 12), (direct.get_last(f"{stream}.A", min_seq=12), 10),
        (direct.get_next(f"{stream}.B", seq=6, min_seq=12), 11),
    ]  # fmt: skip
    missing = [
        direct.get(8), direct.get(13), direct.get(2**64 - 1), direct.get_last(f"{stream}.D"),
        direct.get_next(f"{stream}.A", seq=11), direct.get(8, min_seq=12),
        direct.get_next(f"{stream}.A", seq=11, min_seq=12),
    ]  # fmt: skip
    if version >= (2, 11):
        when = await time_of(direct, 5)
        reads += [
            (direct.get_at(when), 5), (direct.get_at(when, subject=f"{stream}.B"), 5),
            (direct.get_at(when, subject=f"{stream}.C", min_seq=12), 6),
        ]  # fmt: skip
        missing.append(direct.get_at(datetime.now(UTC) + timedelta(days=1)))
    for read, seq in reads:
        assert (await read).seq == seq
    for read in missing:
        with pytest.raises(errors.MessageNotFoundError, match=stream) as caught:
            await read
        assert (caught.value.code, caught.value.stream) == (404, stream)


async def test_a_server_before_2_11_refuses_batches_and_returns_no_wrong_message(
    direct: jsx.DirectGet, stream: str, leak_check: Any, version: tuple[int, ...]
) -> None:
    if version >= (2, 11):
        pytest.skip("this server has batches")
    now, every = datetime.now(UTC), [f"{stream}.>"]
    for read in (
        direct.batch(3).to_list(), direct.batch(3, subject=every[0], start_time=now).to_list(),
        direct.batch(3, start_time=now).to_list(), direct.scan().to_list(), direct.scan(confirm=True).to_list(),
        direct.scan(min_seq=12).to_list(), direct.multi_last(every).to_list(),
        direct.scan(up_to_time=now).to_list(), direct.batch(3, up_to_time=now).to_list(),
        direct.multi_last(every, up_to_seq=5).to_list(), direct.multi_last(every, up_to_time=now, batch=2).to_list(),
        direct.get_at(now), direct.get_at(now, subject=every[0]), direct.get_at(now, min_seq=1),
    ):  # fmt: skip
        async with asyncio.timeout(20):
            with pytest.raises(errors.UnsupportedFeatureError, match=r"nats-server 2\.11"):
                await read
    await leak_check.assert_clean()


@pytest.mark.usefixtures("batches")
class TestBatch:
    async def test_a_batch_is_one_request_from_a_start(
        self, direct: jsx.DirectGet, stream: str, version: tuple[int, ...]
    ) -> None:
        batch = direct.batch(3, subject=f"{stream}.>")
        messages = await batch.to_list()
        assert [(m.seq, m.subject, m.data, m.last_seq) for m in messages] == [
            (1, f"{stream}.A", b"m1", 0), (2, f"{stream}.B", b"m2", 1), (3, f"{stream}.C", b"m3", 2),
        ]  # fmt: skip
        assert (batch.num_pending, batch.last_seq, batch.up_to_seq) == (8, 3, None)
        # 2.11 counts the message itself as pending; the count in its end-of-batch is right.
        itself = 1 if version < (2, 12) else 0
        assert [m.num_pending for m in messages] == [10 + itself, 9 + itself, 8 + itself]
        batch = direct.batch(3, subject=f"{stream}.>", seq=7)
        assert (await seqs(batch), batch.num_pending, batch.last_seq) == ([7, 9, 10], 2, 10)
        assert await seqs(direct.batch(3, seq=8)) == [9, 10, 11], "also on 2.11.0, whose 404 without a subject is wrong"
        assert await seqs(direct.batch(100, subject=f"{stream}.B", seq=3)) == [5, 11]

    async def test_an_empty_stream_is_an_empty_scan(self, js: JetStreamContext, make: Make) -> None:
        name = await make()
        direct = jsx.DirectGet(js, name)
        for scan in (direct.scan(), direct.scan(confirm=True), direct.scan(subject=f"{name}.a", confirm=True)):
            assert (await seqs(scan), scan.num_pending, scan.last_seq) == ([], 0, 0)
        await js.publish(f"{name}.a", b"")
        await js.purge_stream(name)
        assert await seqs(direct.scan(confirm=True)) == []
        assert await seqs(direct.scan(min_seq=1)) == []


@pytest.mark.usefixtures("batches")
class TestMultiLast:
    async def test_the_state_at_a_time(self, direct: jsx.DirectGet, stream: str) -> None:
        # The time is exclusive, and a datetime has no nanoseconds: just before 6, so that 5 is the last one.
        when = await time_of(direct, 6)
        assert await seqs(direct.multi_last([f"{stream}.>"], up_to_time=when)) == [3, 4, 5]
        before = await time_of(direct, 1) - timedelta(seconds=1)
        assert await seqs(direct.multi_last([f"{stream}.>"], up_to_time=before)) == []
        # 2.11 does not find a time among removed messages: 8 was deleted.
        for seq, expected in ((1, []), (2, [1]), (7, [4, 5, 6]), (9, [5, 6, 7]), (10, [5, 7, 9])):
            when = await time_of(direct, seq)
            assert await seqs(direct.multi_last([f"{stream}.>"], up_to_time=when)) == expected

    @each("max_bytes", [1, 60, 100, 1 << 20])
    async def test_pages_reach_the_end(self, direct: jsx.DirectGet, stream: str, max_bytes: int) -> None:
        """On 2.11 the end of a cut page counts one message too few: 0 if one more follows."""
        multi = direct.multi_last([f"{stream}.>", f"{stream}.*", f"{stream}.A", f"{stream}.D"], max_bytes=max_bytes)
        assert (await seqs(multi), multi.num_pending, multi.last_seq, multi.up_to_seq) == ([10, 11, 12], 0, 12, 12)
        assert await seqs(direct.multi_last([f"{stream}.>"], max_bytes=max_bytes, up_to_seq=8)) == [5, 6, 7]
        when = await time_of(direct, 6)
        assert await seqs(direct.multi_last([f"{stream}.>"], max_bytes=max_bytes, up_to_time=when)) == [3, 4, 5]

    async def test_pages_are_of_one_moment(self, js: JetStreamContext, make: Make) -> None:
        for history in (1, 2):
            name = await make(max_msgs_per_subject=history)
            for key in "abc":
                await js.publish(f"{name}.{key}", key.encode())
            multi = jsx.DirectGet(js, name).multi_last([f"{name}.>"], max_bytes=1)
            read = [(await anext(multi)).seq]
            await js.publish(f"{name}.c", b"newer")  # after the request for the page with b
            if history == 1:  # the older message of c is gone
                with pytest.raises(errors.HistoryUnavailableError, match=rf"'{name}': 1 subject .*max_bytes"):
                    await seqs(multi)
            else:
                assert read + await seqs(multi) == [1, 2, 3]

    @each("storage", ["file", "memory"])
    @each("max_bytes", [1, 1 << 20])
    async def test_a_point_beyond_the_end_is_the_end(
        self, js: JetStreamContext, make: Make, storage: str, max_bytes: int
    ) -> None:
        name = await make(storage=storage)
        direct = jsx.DirectGet(js, name)
        multi = direct.multi_last([f"{name}.>"], up_to_seq=7)
        assert (await seqs(multi), multi.up_to_seq) == ([], 0)
        for key in "abcd":
            await js.publish(f"{name}.{key}")
        for filters, expected in (
            ([f"{name}.>"], [1, 2, 3, 4]), ([f"{name}.{key}" for key in "abcd"], [2, 3, 4, 5]),
        ):  # fmt: skip
            multi = direct.multi_last(filters, up_to_seq=1000, max_bytes=max_bytes)
            read = [(await anext(multi)).seq]
            last = (await js.publish(f"{name}.a")).seq
            assert read + await seqs(multi) == expected
            assert multi.up_to_seq == last - 1
        multi = direct.multi_last([f"{name}.b"], up_to_seq=1000, max_bytes=max_bytes)
        assert (await seqs(multi), multi.up_to_seq) == ([2], last), "the newest message is of another subject"
        for point in range(1, 5):
            multi = direct.multi_last([f"{name}.>"], up_to_seq=point, max_bytes=max_bytes)
            assert (await seqs(multi), multi.up_to_seq) == (list(range(1, point + 1)), point)

    @each("storage", ["file", "memory"])
    async def test_min_seq_reads_one_s_own_writes(self, js: JetStreamContext, make: Make, storage: str) -> None:
        name = await make(storage=storage)
        direct = jsx.DirectGet(js, name)
        for n in range(1, 6):
            await js.publish(f"{name}.{n % 2}")
            for max_bytes in (1, 1 << 20):
                multi = direct.multi_last([f"{name}.>"], min_seq=n, max_bytes=max_bytes)
                assert (await seqs(multi), multi.up_to_seq) == (list(range(max(1, n - 1), n + 1)), n)
            assert await seqs(direct.multi_last([f"{name}.none"], min_seq=n)) == []
            assert await seqs(direct.batch(2, seq=n, min_seq=n)) == [n]
            assert await seqs(direct.batch(2, subject=f"{name}.none", min_seq=n)) == []
            assert await seqs(direct.batch(2, min_seq=n)) == [1, 2][:n]

    async def test_the_limit_of_1024_subjects(self, js: JetStreamContext, make: Make) -> None:
        name = await make()
        await asyncio.gather(*(js.publish(f"{name}.{i}", b"") for i in range(1024)))
        direct = jsx.DirectGet(js, name)
        everything = [f"{name}.>"]
        assert len(await direct.multi_last(everything).to_list()) == 1024
        assert len(await direct.multi_last([f"{name}.{i}" for i in range(2000)]).to_list()) == 1024
        await js.publish(f"{name}.1024", b"")
        for multi in (direct.multi_last(everything), direct.multi_last(everything, batch=10)):
            with pytest.raises(errors.TooManySubjectsError, match=name):
                await multi.to_list()
        assert len(await direct.multi_last(everything, up_to_seq=1024).to_list()) == 1024


async def test_a_read_without_a_responder_is_refused_at_once(js: JetStreamContext, make: Make, leak_check: Any) -> None:
    direct = jsx.DirectGet(js, name := await make(allow_direct=False), timeout=60)
    for read in (direct.get(1), direct.get_last("a"), direct.scan().to_list(), direct.multi_last([">"]).to_list()):
        async with asyncio.timeout(20):
            with pytest.raises(errors.DirectGetDisabledError, match=rf"{name}.*allow_direct") as caught:
                await read
            assert caught.value.stream == name
    await leak_check.assert_clean()
