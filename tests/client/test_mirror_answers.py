"""A proof needs a replica: mirrors answer under the stream's name, and may be partial, late, or all that answers."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import nats
import pytest
from client_cells import each, named, seqs
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import StreamConfig, StreamSource

import jetstream_ext as jsx
from jetstream_ext import arrow, errors
from jetstream_ext.log import LogReader
from jetstream_ext.testing import NatsServer

TURNS = 25  # the server chooses a responder at random for each request: a mirror answers none of 25 once in 2**25 runs
COUNT = 60
GONE = (7, 8, 40)
SEQS = [seq for seq in range(1, COUNT + 1) if seq not in GONE]
SEQS_OF = [[seq for seq in SEQS if seq % 3 == rest] for rest in range(3)]
START = datetime(2020, 1, 1, tzinfo=UTC)

Read = Callable[[JetStreamContext, str], Awaitable[Any]]


async def up_to_41(direct: jsx.DirectGet) -> list[int]:
    return await seqs(direct.scan(up_to_time=(await direct.get(41, min_seq=41)).time, confirm=True))


async def result(found: Any) -> list[int]:
    """Return the sequences that a read of any kind finds."""
    if isinstance(found, jsx.MessageBatch):
        return await seqs(found)
    if isinstance(found, LogReader):
        return [message.seq async for message in found]
    try:
        found = await found
    except errors.MessageNotFoundError:
        return []
    return [found.seq] if isinstance(found, jsx.StoredMsg) else list(found)


async def column(js: JetStreamContext, stream: str, **options: Any) -> list[int]:
    return (await arrow.to_arrow(js, stream, **options)).column("seq").to_pylist()  # type: ignore[no-any-return]


def direct(read: Callable[[jsx.DirectGet, str], Any]) -> Read:
    return lambda js, s: result(read(jsx.DirectGet(js, s), s))


def log(js: JetStreamContext, stream: str, **options: Any) -> Awaitable[list[int]]:
    return result(LogReader(js, stream, patience=js._timeout, **options))


# Each read of a stream with the messages `SEQS`, where sequence n is on subject `<stream>.<n % 3>`, and what it finds.
CONFIRMED: dict[str, tuple[Read, list[int]]] = {
    "scan": (direct(lambda d, s: d.scan(batch=25, confirm=True)), SEQS),
    "scan of a subject": (direct(lambda d, s: d.scan(subject=f"{s}.2", confirm=True)), SEQS_OF[2]),
    "scan from a time": (direct(lambda d, s: d.scan(start_time=START, confirm=True)), SEQS),
    "scan up to a time": (direct(lambda d, s: up_to_41(d)), [seq for seq in SEQS if seq <= 41]),
    "LogReader": (log, SEQS),
    "LogReader of a subject": (lambda js, s: log(js, s, subject=f"{s}.0"), SEQS_OF[0]),
    "to_arrow": (lambda js, s: column(js, s, confirm=True), SEQS),
}
MIN_SEQ: dict[str, tuple[Read, list[int]]] = {
    "scan": (direct(lambda d, s: d.scan(batch=25, min_seq=COUNT)), SEQS),
    "batch": (direct(lambda d, s: d.batch(100, min_seq=COUNT)), SEQS),
    "batch of a subject": (direct(lambda d, s: d.batch(5, subject=f"{s}.2", seq=6, min_seq=COUNT)), SEQS_OF[2][2:7]),
    "multi_last": (direct(lambda d, s: d.multi_last([f"{s}.*"], min_seq=COUNT)), [58, 59, 60]),
    "multi_last of the past": (
        direct(lambda d, s: d.multi_last([f"{s}.>"], up_to_seq=41, min_seq=COUNT)),
        [37, 39, 41],
    ),
    "get": (direct(lambda d, s: d.get(3, min_seq=COUNT)), [3]),
    "get of a newer one": (direct(lambda d, s: d.get(59, min_seq=COUNT)), [59]),
    "get_last": (direct(lambda d, s: d.get_last(f"{s}.2", min_seq=COUNT)), [59]),
    "get_next": (direct(lambda d, s: d.get_next(f"{s}.*", seq=7, min_seq=COUNT)), [9]),
    "get_at": (direct(lambda d, s: d.get_at(START, min_seq=COUNT)), [1]),
    "get of a deleted message": (direct(lambda d, s: d.get(8, min_seq=COUNT)), []),
    "get_last of no message": (direct(lambda d, s: d.get_last(f"{s}.none", min_seq=COUNT)), []),
}
UNPROVED: dict[str, Callable[[JetStreamContext, str], Awaitable[list[jsx.StoredMsg]]]] = {
    "scan": lambda js, s: jsx.DirectGet(js, s).scan(batch=25).to_list(),
    "multi_last": lambda js, s: jsx.DirectGet(js, s).multi_last([f"{s}.>"]).to_list(),
    "get": lambda js, s: asyncio.gather(jsx.DirectGet(js, s).get(1)),
    "get_last": lambda js, s: asyncio.gather(jsx.DirectGet(js, s).get_last(f"{s}.1")),
    "LogReader": lambda js, s: LogReader(js, s, confirm=False).read(100),
}


async def fill(js: JetStreamContext, name: str, count: int = COUNT, payload: bytes = b"") -> None:
    await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True)
    for n in range(1, count + 1):
        await js.publish(f"{name}.{n % 3}", payload)


async def holed(js: JetStreamContext, name: str) -> str:
    """Create a stream with the messages `SEQS`."""
    await fill(js, name)
    for gone in GONE:
        await js.delete_msg(name, gone)
    return name


async def mirror(js: JetStreamContext, name: str, origin: str, messages: int, **options: Any) -> None:
    source = {key: options.pop(key) for key in ("filter_subject", "opt_start_seq") if key in options}
    config = StreamConfig(
        name=name, mirror=StreamSource(name=origin, **source), allow_direct=True, mirror_direct=True, **options
    )
    await js.add_stream(config)
    async with asyncio.timeout(60):
        while (await js.stream_info(name)).state.messages < messages:
            await asyncio.sleep(0.01)
        while await responder(js, origin) != name:  # only then does the test show something
            await asyncio.sleep(0.01)


async def responder(js: JetStreamContext, stream: str) -> str:
    """Return the stream that answers the next direct get."""
    answer = await js._nc.request(f"$JS.API.DIRECT.GET.{stream}", b'{"seq":1,"next_by_subj":">"}', timeout=30)
    return (answer.headers or {}).get("Nats-Stream", "")


async def all_are_complete(js: JetStreamContext, stream: str) -> None:
    """Read the stream many times in a row in each way, all ways at once."""

    async def read_often(what: str, read: Read, expected: Any) -> None:
        with named(read=what):
            for _ in range(TURNS):
                assert await read(js, stream) == expected

    async with asyncio.TaskGroup() as group:
        for table in (CONFIRMED, MIN_SEQ):
            for what, (read, expected) in table.items():
                group.create_task(read_often(what, read, expected))


# -- partial and late mirrors ------------------------------------------------------------------------------------------


PARTS: dict[str, tuple[int, Callable[[str], dict[str, Any]]]] = {
    "one subject": (18, lambda name: {"filter_subject": f"{name}.1"}),
    "the end": (18, lambda name: {"opt_start_seq": 41}),
    "without some messages": (len(SEQS), lambda name: {}),
}


@each("what", PARTS)
async def test_reads_beside_a_partial_mirror_are_complete(
    js: JetStreamContext, stream_name: Callable[[], str], what: str
) -> None:
    """The answers of the mirror look complete, or say that there is no message."""
    name = await holed(js, stream_name())
    count, options = PARTS[what]
    await mirror(js, f"{name}_PART", name, count, **options(name))
    if count == len(SEQS):
        for gone in (20, 21, 59, 60):
            await js.delete_msg(f"{name}_PART", gone)
    await all_are_complete(js, name)


async def test_messages_that_only_a_mirror_still_has_are_not_read(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    await fill(js, name)
    await mirror(js, f"{name}_COPY", name, COUNT)
    for gone in GONE:
        await js.delete_msg(name, gone)
    await all_are_complete(js, name)


async def test_a_mirror_of_an_earlier_stream_adds_no_message(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    await fill(js, name, 20, b"earlier")
    await mirror(js, f"{name}_COPY", name, 20)
    await js.delete_stream(name)
    await fill(js, name, 20, b"new")
    for _ in range(20):
        assert {message.data async for message in jsx.DirectGet(js, name).scan(confirm=True)} == {b"new"}
        assert {message.data async for message in LogReader(js, name)} == {b"new"}


async def test_reads_beside_a_lagging_mirror_are_complete(js: JetStreamContext, stream_name: Callable[[], str]) -> None:
    """The mirror takes no message of more than one byte, and so stays at sequence 20."""
    name = stream_name()
    await fill(js, name, 20)
    await mirror(js, f"{name}_LATE", name, 20, max_msg_size=1)
    for n in range(21, COUNT + 1):
        await js.publish(f"{name}.{n % 3}", b"too large for the mirror")
    for gone in GONE:
        await js.delete_msg(name, gone)
    await all_are_complete(js, name)
    assert (await js.stream_info(f"{name}_LATE")).state.last_seq == 20


# -- only a mirror answers ---------------------------------------------------------------------------------------------

# The mirror gets every direct get of the stream, as one does in the client's own cluster of a super-cluster, where the
# stream is in another cluster: servers prefer the responders of their own cluster.
NEAR = """
mappings {
  "$JS.API.DIRECT.GET.ORIGIN": "$JS.API.DIRECT.GET.NEARBY"
  "$JS.API.DIRECT.GET.ORIGIN.>": "$JS.API.DIRECT.GET.NEARBY.>"
}
"""
TIMEOUT = 1.0


@pytest.fixture(scope="module")
def far_server() -> Iterator[NatsServer]:
    """A server whose mirror NEARBY answers all direct gets of the stream ORIGIN."""

    async def create(url: str) -> None:
        async with await nats.connect(url, connect_timeout=10) as nc:
            js = nc.jetstream(timeout=30)
            await holed(js, "ORIGIN")
            await mirror(js, "NEARBY", "ORIGIN", len(SEQS))

    with NatsServer(config=NEAR) as server:
        asyncio.run(create(server.url))
        yield server


@pytest.fixture
async def far(far_server: NatsServer) -> AsyncIterator[JetStreamContext]:
    """A context whose calls end after one second."""
    async with await nats.connect(far_server.url, connect_timeout=10) as nc:
        yield nc.jetstream(timeout=TIMEOUT)


async def mirror_answers(read: Awaitable[Any], stream: str, mirror: str, *words: str) -> None:
    """Fail unless the read ends at its timeout with the error that names the mirror."""
    started = time.monotonic()
    async with asyncio.timeout(30):
        with pytest.raises(errors.JetStreamExtError) as caught:
            await read
    assert type(caught.value) is errors.MirrorAnswersError
    assert 0.5 * TIMEOUT < time.monotonic() - started < 10 * TIMEOUT
    error: Any = caught.value
    text = str(error)
    assert (error.stream, error.mirror) == (stream, mirror)
    for word in (stream, mirror, *words):
        assert word in text


@each("what", CONFIRMED, together=True)
async def test_a_confirmed_read_ends_with_an_error_if_only_a_mirror_answers(far: JetStreamContext, what: str) -> None:
    read, _ = CONFIRMED[what]
    await mirror_answers(read(far, "ORIGIN"), "ORIGIN", "NEARBY", "confirm=False")


@each("what", MIN_SEQ, together=True)
async def test_a_read_with_min_seq_ends_with_an_error_if_only_a_mirror_answers(
    far: JetStreamContext, what: str
) -> None:
    """Except a single message, which the leader sends."""
    read, expected = MIN_SEQ[what]
    if what.startswith("get"):
        assert await read(far, "ORIGIN") == expected
    else:
        await mirror_answers(read(far, "ORIGIN"), "ORIGIN", "NEARBY", "min_seq")


async def test_a_proof_that_no_replica_gives_leaves_nothing_behind(far: JetStreamContext, has_only: Any) -> None:
    await far.account_info()
    held = set(far._nc._subs)
    for read, _ in (CONFIRMED["scan"], CONFIRMED["LogReader"], MIN_SEQ["batch"], MIN_SEQ["multi_last"]):
        await mirror_answers(read(far, "ORIGIN"), "ORIGIN", "NEARBY")
    assert await has_only(far._nc, held)


async def test_an_unproved_read_is_content_with_the_mirror(far: JetStreamContext) -> None:
    for what, read in UNPROVED.items():
        with named(read=what):
            found = await read(far, "ORIGIN")
            assert {message.stream for message in found} == {"NEARBY"}
            if len(found) > 3:
                assert [message.seq for message in found] == SEQS
    assert await column(far, "ORIGIN") == SEQS


async def test_the_mirror_is_read_with_a_proof_under_its_own_name(far: JetStreamContext) -> None:
    """What the error advises."""
    for what in ("scan", "LogReader", "to_arrow"):
        with named(read=what):
            assert await CONFIRMED[what][0](far, "NEARBY") == SEQS
    assert await MIN_SEQ["batch"][0](far, "NEARBY") == SEQS


async def test_a_proof_succeeds_as_soon_as_a_replica_answers(
    nc: Client, js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    """The read is still within its timeout when the stream, for which only its mirror answers, allows direct gets again."""
    name = await holed(js, stream_name())
    await mirror(js, f"{name}_COPY", name, len(SEQS))
    config = (await js.stream_info(name)).config
    await js.update_stream(config.evolve(allow_direct=False))
    hurried = nc.jetstream(timeout=TIMEOUT)
    assert await seqs(jsx.DirectGet(hurried, name).scan()) == SEQS
    await mirror_answers(CONFIRMED["scan"][0](hurried, name), name, f"{name}_COPY", "confirm=False")
    asked = asyncio.Event()

    async def heard(_: Msg) -> None:
        asked.set()

    for subject in (f"$JS.API.DIRECT.GET.{name}", f"$JS.API.DIRECT.GET.{name}.>"):
        await nc.subscribe(subject, cb=heard)
    for what, (read, expected) in [("confirmed scan", CONFIRMED["scan"]), *MIN_SEQ.items()]:
        with named(read=what):
            await js.update_stream(config.evolve(allow_direct=False))
            asked.clear()
            reading, hears = asyncio.ensure_future(read(js, name)), asyncio.ensure_future(asked.wait())
            await asyncio.wait({reading, hears}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
            hears.cancel()
            await js.update_stream(config)
            assert await reading == expected
