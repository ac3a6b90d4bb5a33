"""Direct Get on every server from 2.10: the same calls and the answers of each version."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from client_cells import each
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

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


async def seqs(batch: jsx.MessageBatch) -> list[int]:
    return [message.seq for message in await batch.to_list()]


async def time_of(direct: jsx.DirectGet, seq: int) -> datetime:
    """Return the time when the message was stored, rounded down to a microsecond."""
    return (await direct.get(seq)).time


async def raw(server: NatsServer, *publishes: tuple[str, bytes, bytes]) -> None:
    """Publish header blocks that no client library would send."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b'CONNECT {"headers":true,"verbose":false}\r\n')
    for subject, header, payload in publishes:
        sizes = b"%d %d" % (len(header), len(header) + len(payload))
        writer.write(b"HPUB %b %b\r\n%b%b\r\n" % (subject.encode(), sizes, header, payload))
    writer.write(b"PING\r\n")
    async with asyncio.timeout(20):
        while b"PONG" not in await reader.readline():
            pass
    writer.close()
    await writer.wait_closed()


async def stored(js: JetStreamContext, stream: str, count: int) -> None:
    async with asyncio.timeout(20):
        while (await js.stream_info(stream)).state.last_seq < count:
            await asyncio.sleep(0.005)


class TestSingle:
    async def test_get_by_sequence(self, direct: jsx.DirectGet, stream: str) -> None:
        assert [((m := await direct.get(seq)).seq, m.data, m.headers) for seq in (5, 6, 7)] == [
            (5, b"m5", {"X-U": "v5"}), (6, b"", {}), (7, b"m7", {}),
        ]  # fmt: skip
        assert (m.stream, m.subject, m.num_pending, m.last_seq) == (stream, f"{stream}.A", None, None)
        assert abs(m.time - datetime.now(UTC)) < timedelta(minutes=1)

    async def test_get_last_and_get_next(self, direct: jsx.DirectGet, stream: str) -> None:
        assert (await direct.get_last(f"{stream}.B")).seq == 11
        assert (await direct.get_last(f"{stream}.>")).seq == 12
        assert (await direct.get_next(f"{stream}.B", seq=6)).seq == 11
        assert (await direct.get_next(f"{stream}.*", seq=8)).seq == 9
        assert (await direct.get_next(f"{stream}.C")).seq == 3

    async def test_min_seq_reads_one_s_own_write(self, direct: jsx.DirectGet, stream: str) -> None:
        assert (await direct.get(12, min_seq=12)).seq == 12
        assert (await direct.get_last(f"{stream}.A", min_seq=12)).seq == 10
        assert (await direct.get_next(f"{stream}.B", seq=6, min_seq=12)).seq == 11
        for missing in (direct.get(8, min_seq=12), direct.get_next(f"{stream}.A", seq=11, min_seq=12)):
            with pytest.raises(errors.MessageNotFoundError):
                await missing

    async def test_a_missing_message_is_not_found(self, direct: jsx.DirectGet, stream: str) -> None:
        for missing in (
            direct.get(8), direct.get(13), direct.get(2**64 - 1), direct.get_last(f"{stream}.D"),
            direct.get_next(f"{stream}.A", seq=11),
        ):  # fmt: skip
            with pytest.raises(errors.MessageNotFoundError, match=stream) as caught:
                await missing
            assert (caught.value.code, caught.value.stream) == (404, stream)

    async def test_get_at(self, direct: jsx.DirectGet, stream: str, batches: None) -> None:
        assert (await direct.get_at(await time_of(direct, 5))).seq == 5
        assert (await direct.get_at(await time_of(direct, 5), subject=f"{stream}.B")).seq == 5
        assert (await direct.get_at(await time_of(direct, 5), subject=f"{stream}.C", min_seq=12)).seq == 6
        with pytest.raises(errors.MessageNotFoundError, match=stream):
            await direct.get_at(datetime.now(UTC) + timedelta(days=1))


class TestBefore211:
    @pytest.fixture(autouse=True)
    def _old(self, version: tuple[int, ...]) -> None:
        if version >= (2, 11):
            pytest.skip("this server has batches")

    @each(
        "read",
        [
            lambda d, s: d.batch(3).to_list(),
            lambda d, s: d.batch(3, subject=f"{s}.>", start_time=datetime.now(UTC)).to_list(),
            lambda d, s: d.batch(3, start_time=datetime.now(UTC)).to_list(),
            lambda d, s: d.scan().to_list(),
            lambda d, s: d.scan(confirm=True).to_list(),
            lambda d, s: d.scan(min_seq=12).to_list(),
            lambda d, s: d.multi_last([f"{s}.>"]).to_list(),
            lambda d, s: d.multi_last([f"{s}.>"], up_to_seq=5).to_list(),
            lambda d, s: d.multi_last([f"{s}.>"], up_to_time=datetime.now(UTC), batch=2).to_list(),
            lambda d, s: d.get_at(datetime.now(UTC)),
            lambda d, s: d.get_at(datetime.now(UTC), subject=f"{s}.>"),
            lambda d, s: d.get_at(datetime.now(UTC), min_seq=1),
        ],
    )
    async def test_unsupported_reads_raise_and_return_no_wrong_message(
        self,
        direct: jsx.DirectGet,
        stream: str,
        leak_check: Any,
        read: Callable[[jsx.DirectGet, str], Awaitable[object]],
    ) -> None:
        async with asyncio.timeout(20):
            with pytest.raises(errors.UnsupportedFeatureError, match=r"nats-server 2\.11"):
                await read(direct, stream)
        await leak_check.assert_clean()


@pytest.mark.usefixtures("batches")
class TestBatchForms:
    """The six forms of ADR-31."""

    async def test_form_1_reads_from_the_start(
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

    async def test_form_2_reads_from_a_sequence(self, direct: jsx.DirectGet, stream: str) -> None:
        batch = direct.batch(3, subject=f"{stream}.>", seq=7)
        assert (await seqs(batch), batch.num_pending, batch.last_seq) == ([7, 9, 10], 2, 10)
        assert await seqs(direct.batch(3, seq=7)) == [7, 9, 10]
        assert await seqs(direct.batch(3, seq=8)) == [9, 10, 11], "also on 2.11.0, whose 404 without a subject is wrong"
        assert await seqs(direct.batch(100, subject=f"{stream}.B", seq=3)) == [5, 11]


@pytest.mark.usefixtures("batches")
class TestMultiLastForms:
    """The six forms of ADR-31."""

    async def test_form_1_reads_the_current_state(self, direct: jsx.DirectGet, stream: str) -> None:
        multi = direct.multi_last([f"{stream}.A", f"{stream}.C", f"{stream}.D"])
        messages = await multi.to_list()
        assert [(m.seq, m.subject) for m in messages] == [(10, f"{stream}.A"), (12, f"{stream}.C")]
        assert (multi.num_pending, multi.last_seq, multi.up_to_seq) == (0, 12, 12)
        assert await seqs(direct.multi_last([f"{stream}.>", f"{stream}.*", f"{stream}.A"])) == [10, 11, 12]

    async def test_form_3_reads_up_to_a_time(self, direct: jsx.DirectGet, stream: str) -> None:
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
        multi = direct.multi_last([f"{stream}.>"], max_bytes=max_bytes)
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

    async def test_a_limited_read_whose_subjects_change_is_an_error(self, js: JetStreamContext, make: Make) -> None:
        name = await make(max_msgs_per_subject=1)
        for number in range(20):
            await js.publish(f"{name}.{number}")
        multi = jsx.DirectGet(js, name).multi_last([f"{name}.>"], max_bytes=1, batch=15)
        assert (await anext(multi)).seq == 1
        for number in (8, 9):
            await js.publish(f"{name}.{number}")
        with pytest.raises(errors.HistoryUnavailableError, match="2 subjects"):
            await seqs(multi)

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


@pytest.mark.usefixtures("batches")
class TestScan:
    async def test_an_empty_stream_is_an_empty_scan(self, js: JetStreamContext, make: Make) -> None:
        name = await make()
        direct = jsx.DirectGet(js, name)
        for scan in (direct.scan(), direct.scan(confirm=True), direct.scan(subject=f"{name}.a", confirm=True)):
            assert (await seqs(scan), scan.num_pending, scan.last_seq) == ([], 0, 0)
        await js.publish(f"{name}.a", b"")
        await js.purge_stream(name)
        assert await seqs(direct.scan(confirm=True)) == []
        assert await seqs(direct.scan(min_seq=1)) == []


IMITATION = (
    b"NATS/1.0\r\nNats-Stream: X\r\nNats-Subject: x\r\nNats-Sequence: 9\r\nNats-Time-Stamp: 2020-01-01T00:00:00Z\r\n"
    b"Nats-Num-Pending: 0\r\nNats-Last-Sequence: 8\r\n\r\n"
)


class TestForgedHeaders:
    @each(
        "block",
        [
            b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 0\r\nNats-Last-Sequence: 0\r\n\r\n",
            b"NATS/1.0 404 Message Not Found\r\n\r\n",
            b"NATS/1.0 503\r\n\r\n",
            b"NATS/1.0 408 Bad Request\r\nNats-Stream: EVIL\r\n\r\n",
            IMITATION,
        ],
    )
    async def test_stored_status_lines_are_data(
        self, js: JetStreamContext, make: Make, server: NatsServer, version: tuple[int, ...], block: bytes
    ) -> None:
        """Servers before 2.12 return a stored status line unchanged."""
        name = await make()
        await raw(server, *((f"{name}.{i}", block, payload) for i, payload in enumerate((b"", b"x", b"", b"end"))))
        await stored(js, name, 4)
        direct = jsx.DirectGet(js, name)
        reads = [[await direct.get(seq) for seq in range(1, 5)]]
        if version >= (2, 11):
            reads += [await direct.scan(batch=size).to_list() for size in (1, 2, 9)]
            reads += [await direct.multi_last([f"{name}.>"], max_bytes=size).to_list() for size in (1, 9999)]
        for messages in reads:
            assert [(m.seq, m.subject, m.data) for m in messages] == [
                (1, f"{name}.0", b""), (2, f"{name}.1", b"x"), (3, f"{name}.2", b""), (4, f"{name}.3", b"end"),
            ]  # fmt: skip
            assert [m.headers for m in messages] == [{}] * 4


class TestRefusals:
    @each("missing", ["stream", "allow_direct"])
    @each(
        "read",
        [
            lambda d: d.get(1), lambda d: d.get_last("a"), lambda d: d.get_next("a"),
            lambda d: d.get_at(datetime.now(UTC)), lambda d: d.batch(1).to_list(), lambda d: d.scan().to_list(),
            lambda d: d.multi_last([">"]).to_list(),
        ],
    )  # fmt: skip
    async def test_503_is_prompt(
        self, js: JetStreamContext, make: Make, leak_check: Any, missing: str,
        read: Callable[[jsx.DirectGet], Awaitable[object]],
    ) -> None:  # fmt: skip
        name = "NONE" if missing == "stream" else await make(allow_direct=False)
        async with asyncio.timeout(20):
            if missing == "stream":
                with pytest.raises(NotFoundError, match=f"stream '{name}' does not exist"):
                    await read(jsx.DirectGet(js, name, timeout=60))
            else:
                with pytest.raises(errors.DirectGetDisabledError, match=rf"{name}.*allow_direct") as caught:
                    await read(jsx.DirectGet(js, name, timeout=60))
                assert caught.value.stream == name
        await leak_check.assert_clean()
