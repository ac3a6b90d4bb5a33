"""Refusals have their error classes, whenever they arrive, on every server that has atomic batches.

Those of expectations, ids and headers are in test_atomic_model.py.
"""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import nats
import pytest
from client_cells import each
from nats.js import JetStreamContext
from nats.js.api import StreamConfig, StreamSource

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.client.connection import connection_of
from jetstream_ext.protocol import frames
from jetstream_ext.testing import NatsServer

NUMBERS = itertools.count()
VERSIONS = ["2.12.0", "2.12.8", "2.14.6", "2.15.1"]
M = jsx.BatchMessage
#: The messages, the stream's configuration, the error code, its class, and the first server that answers with it.
CASES: dict[str, tuple[list[M], dict[str, Any], int, type[errors.BatchError], str]] = {
    "too large": ([M("S.a", bytes(400))], {"max_msg_size": 300}, 10054, errors.MessageTooLargeError, "2.12.0"),
    "full": ([M("S.a")] * 3, {"max_msgs": 2, "discard": "new"}, 10077, errors.BatchServerError, "2.12.0"),
    "not allowed": ([M("S.a")] * 2, {"allow_atomic": False}, 10174, errors.AtomicPublishDisabledError, "2.12.0"),
    "too many": ([M("S.a")] * 1001, {}, 10199, errors.AtomicPublishTooLargeError, "2.12.0"),
    "level": (
        [M("S.a", headers={"Nats-Required-Api-Level": "99"})] * 2, {}, 10185, errors.RequiredApiLevelError, "2.12.8",
    ),
    "no such stream": ([M("nowhere")], {}, 0, errors.NoStreamError, "2.12.0"),
}  # fmt: skip


@pytest.fixture(scope="module", params=VERSIONS)
def old_server(request: pytest.FixtureRequest) -> Any:
    with NatsServer(version=request.param) as server:
        yield server


@asynccontextmanager
async def created(js: JetStreamContext, **config: Any) -> AsyncIterator[str]:
    """Create a stream of a new name: 2.12.0 may keep the staged messages of one that is deleted and created again."""
    name = f"S{next(NUMBERS)}"
    await js.add_stream(name=name, subjects=["S.>"], **{"allow_atomic": True, **config})
    yield name
    await js.delete_stream(name)


@pytest.fixture
async def old_js(old_server: NatsServer) -> AsyncIterator[JetStreamContext]:
    nc = await nats.connect(old_server.url, connect_timeout=10)
    js = nc.jetstream(timeout=30)
    yield js
    for info in await js.streams_info():  # of a test that failed
        await js.delete_stream(str(info.config.name))
    await nc.close()


@each("how", ["bulk", "add"])
@each("case", CASES)
async def test_each_refusal_has_its_error_class(
    old_server: NatsServer, old_js: JetStreamContext, case: str, how: str
) -> None:
    async with created(old_js, **CASES[case][1]) as name:
        await check_refusal(old_server, old_js, name, case, how)


async def check_refusal(server: NatsServer, js: JetStreamContext, name: str, case: str, how: str) -> None:
    messages, _, code, cls, since = CASES[case]

    async def publish() -> None:
        if how == "bulk":
            await jsx.publish_atomic(js, messages)
            return
        async with jsx.AtomicBatch(js) as batch:
            for message in messages:
                await batch.add_many([message])

    if server.version < since:
        await publish()
        assert (await js.stream_info(name)).state.messages == len(messages), "this server accepts it"
        return
    async with asyncio.timeout(120):
        with pytest.raises(errors.BatchError) as caught:
            await publish()
    error = caught.value
    assert error.outcome == "not_stored"
    if len(messages) > 1 and code in (10185, 10199):
        # No caller awaited the refusal, and at the commit the server no longer has the batch.
        assert isinstance(error, cls | errors.AtomicPublishIncompleteError)
    else:
        assert type(error) is cls
        assert getattr(error, "err_code", 0) == code
    assert (await js.stream_info(name)).state.messages == 0


#: Refusals of what this library does not send: the messages, a pattern in their headers and its replacement, the error.
REWRITTEN: dict[str, tuple[list[M], bytes, bytes, int, type[errors.BatchError], str]] = {
    "another commit": (
        [M("S.a")] * 2, rb"Nats-Batch-Commit: \w+", b"Nats-Batch-Commit: yes", 10200,
        errors.AtomicPublishInvalidCommitError, "2.12.8",
    ),
    "a long id": (
        [M("S.a")], rb"Nats-Batch-Id: \w+", b"Nats-Batch-Id: " + b"x" * 65, 10179,
        errors.AtomicPublishInvalidBatchIDError, "2.12.0",
    ),
    "no sequence": (
        [M("S.a")], rb"Nats-Batch-Sequence: \d+\r\n", b"", 10175, errors.AtomicPublishMissingSequenceError, "2.12.0",
    ),
    "a hole": (
        [M("S.a")] * 2, b"Nats-Batch-Sequence: 2", b"Nats-Batch-Sequence: 3", 10176,
        errors.AtomicPublishIncompleteError, "2.12.0",
    ),
    "a header": (
        [M("S.a", headers={"Xats-Expected-Last-Msg-Id": "1"})], b"Xats", b"Nats", 10177,
        errors.AtomicPublishUnsupportedHeaderError, "2.12.0",
    ),
    "the last sequence, later": (
        [M("S.a"), M("S.b", headers={"Xats-Expected-Last-Sequence": "1"})], b"Xats", b"Nats", 10164,
        errors.WrongLastSequenceError, "2.12.0",
    ),
    "the last sequence of a subject that was written to": (
        [M("S.a"), M("S.a", headers={"Xats-Expected-Last-Subject-Sequence": "0"})], b"Xats", b"Nats", 10164,
        errors.WrongLastSequenceError, "2.12.0",
    ),
}  # fmt: skip


@each("bulk", [True, False])
@each("case", REWRITTEN)
async def test_refusals_of_rewritten_messages_have_their_error_class(
    old_server: NatsServer, old_js: JetStreamContext, case: str, bulk: bool
) -> None:
    async with created(old_js) as name:
        with pytest.MonkeyPatch.context() as patch:
            await check_rewritten(old_server, old_js, name, patch, case, bulk)


async def check_rewritten(
    server: NatsServer, js: JetStreamContext, name: str, patch: pytest.MonkeyPatch, case: str, bulk: bool
) -> None:
    messages, pattern, instead, code, cls, since = REWRITTEN[case]
    connection = connection_of(js._nc)
    write = connection.write_nowait

    def rewrite(data: bytes, count: int, size: int) -> None:
        changed = (
            frames.pub(each.subject.encode(), each.reply.encode(), re.sub(pattern, instead, each.header), each.payload)
            for each in frames.parse_pubs(data)
        )
        write(b"".join(changed), count, size)

    patch.setattr(connection, "write_nowait", rewrite)
    batch = jsx.AtomicBatch(js)

    async def publish() -> None:
        for message in messages[:-1]:
            await batch.add_many([message])
        await batch.commit(messages[-1].subject, headers=messages[-1].headers)

    if server.version < since:
        await (jsx.publish_atomic(js, messages) if bulk else publish())
        assert (await js.stream_info(name)).state.messages == len(messages), "this server accepts it"
        return
    with pytest.raises(cls) as caught:
        await (jsx.publish_atomic(js, messages) if bulk else publish())
    error: Any = caught.value
    assert type(error) is cls
    assert (error.err_code, error.code, error.outcome) == (code, 400, "not_stored")
    assert bulk or batch.state == "failed"
    assert (await js.stream_info(name)).state.messages == 0


async def test_a_mirror_with_allow_atomic_is_refused(old_js: JetStreamContext) -> None:
    # Clients cannot publish to a mirror, so the server refuses to create one with allow_atomic.
    async with created(old_js) as name:
        config = StreamConfig(name="COPY", mirror=StreamSource(name=name), allow_atomic=True)
        with pytest.raises(errors.AtomicPublishMirrorError) as caught:
            await jsx.ensure_stream(old_js, config)
    assert (caught.value.err_code, caught.value.code) == (10198, 400)


async def test_the_refusal_names_the_stream_and_the_expected_one(old_js: JetStreamContext) -> None:
    name = f"S{next(NUMBERS)}"
    await old_js.add_stream(name=name, subjects=["S.>"])
    disabled = f"atomic batches are disabled on stream '{name}', which stores subject 'S.a'; nothing of the batch is stored; .*"
    with pytest.raises(
        errors.AtomicPublishDisabledError, match=f"{disabled} 'jetstream-ext enable {name} --atomic' "
    ) as off:
        await jsx.publish_atomic(old_js, [("S.a", b"")])
    assert off.value.stream == name
    await old_js.update_stream(name=name, subjects=["S.>"], allow_atomic=True)
    with pytest.raises(
        errors.MessageTTLDisabledError, match=f"on stream '{name}' .* 'jetstream-ext enable {name} --ttl' "
    ):
        await jsx.publish_atomic(old_js, [M("S.a", msg_ttl=5)])
    with pytest.raises(errors.StreamMismatchError, match=f"; a message expects stream 'T', and stream '{name}' stores"):
        await jsx.publish_atomic(old_js, [M("S.a"), M("S.b", stream="T")])


async def test_too_many_open_batches_are_refused(old_server: NatsServer, old_js: JetStreamContext) -> None:
    await old_js.add_stream(name=f"S{next(NUMBERS)}", subjects=["S.>"], allow_atomic=True)
    batches = [jsx.AtomicBatch(old_js) for _ in range(51)]

    async def open_(batch: jsx.AtomicBatch) -> None:
        await batch.add("S.a")
        await batch.add("S.a")  # before 2.14 this sends the first message: the newest is held back

    await asyncio.gather(*map(open_, batches[:50]))  # all at once: the server drops a batch after 10 s
    with pytest.raises(errors.BatchServerError) as caught:
        await batches[50].commit("S.a")
    assert caught.value.err_code == (10210 if old_server.version >= "2.14" else 10176)
    assert caught.value.retryable is (old_server.version >= "2.14")
    for batch in batches:
        await batch.discard()


async def test_an_open_batch_fails_once_allow_atomic_is_off(old_js: JetStreamContext) -> None:
    name = f"S{next(NUMBERS)}"
    await old_js.add_stream(name=name, subjects=["S.>"], allow_atomic=True)
    batch = jsx.AtomicBatch(old_js)
    await batch.add("S.a")
    await batch.add("S.a")
    await old_js.update_stream(name=name, subjects=["S.>"], allow_atomic=False)
    with pytest.raises(errors.AtomicPublishDisabledError, match="allow_atomic"):
        await batch.commit_eob()


async def test_an_overloaded_server_stores_only_whole_batches() -> None:
    # The refusal has a status and a JSON body. The server has dropped the message and keeps the batch without it.
    async with (
        NatsServer(config="jetstream { max_buffered_msgs: 1 }") as server,
        await nats.connect(server.url, connect_timeout=10) as nc,
    ):
        js = nc.jetstream(timeout=30)
        await js.add_stream(name="S", subjects=["S.>"], allow_atomic=True)
        refused = 0
        async with asyncio.timeout(60):
            while refused < 3:
                try:
                    await jsx.publish_atomic(js, [M("S.a", bytes(1000))] * 900)
                except (errors.TooManyRequestsError, errors.AtomicPublishIncompleteError) as error:
                    refused += 1
                    assert error.outcome == "not_stored"  # noqa: PT017
                except errors.BatchAbandonedError:
                    refused += 1
        assert (await js.stream_info("S")).state.messages % 900 == 0
