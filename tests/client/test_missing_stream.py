"""A stream that does not exist, or that does not allow direct gets: every read says which, as far as it may ask."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import nats.errors
import nats.js.errors
import pytest
from client_cells import each, named
from clients import connected
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import arrow, errors
from jetstream_ext.log import Last, LogReader
from jetstream_ext.testing import NatsServer

CONFIG = """
accounts {
  A {
    jetstream: enabled
    users: [
      { user: all, password: p }
      { user: reader, password: p, permissions: {
          publish: ["$JS.API.DIRECT.GET.*", "$JS.API.DIRECT.GET.*.>"], subscribe: ["_INBOX.>"] } }
    ]
  }
  WITHOUT { users: [ { user: without, password: p } ] }
}
no_auth_user: all
"""
START = datetime(2020, 1, 1, tzinfo=UTC)
SECONDS = 10.0  # the timeout of the calls, which no error needs; a reader goes on for its `patience`

Read = Callable[[JetStreamContext, str], Awaitable[Any]]


UNPROVED: dict[str, Read] = {
    "get": lambda js, s: jsx.DirectGet(js, s).get(1),
    "get_last": lambda js, s: jsx.DirectGet(js, s).get_last("a"),
    "get_next": lambda js, s: jsx.DirectGet(js, s).get_next("a", seq=3),
    "get_at": lambda js, s: jsx.DirectGet(js, s).get_at(START),
    "get_at of a subject": lambda js, s: jsx.DirectGet(js, s).get_at(START, subject="a"),
    "batch": lambda js, s: jsx.DirectGet(js, s).batch(5).to_list(),
    "multi_last": lambda js, s: jsx.DirectGet(js, s).multi_last(["a.>"]).to_list(),
    "multi_last at a time": lambda js, s: jsx.DirectGet(js, s).multi_last(["a.>"], up_to_time=START).to_list(),
    "scan": lambda js, s: jsx.DirectGet(js, s).scan().to_list(),
    "scan of a range": lambda js, s: jsx.DirectGet(js, s).scan(subject="a", seq=2, up_to_seq=9).to_list(),
    "LogReader": lambda js, s: LogReader(js, s, confirm=False, patience=1).read(),
    "to_arrow": lambda js, s: arrow.to_arrow(js, s),
}
PROVED: dict[str, Read] = {
    "get": lambda js, s: jsx.DirectGet(js, s).get(1, min_seq=1),
    "get_last": lambda js, s: jsx.DirectGet(js, s).get_last("a", min_seq=1),
    "get_next": lambda js, s: jsx.DirectGet(js, s).get_next("a", min_seq=1),
    "get_at": lambda js, s: jsx.DirectGet(js, s).get_at(START, min_seq=1),
    "batch": lambda js, s: jsx.DirectGet(js, s).batch(5, min_seq=1).to_list(),
    "multi_last": lambda js, s: jsx.DirectGet(js, s).multi_last(["a.>"], min_seq=1).to_list(),
    "scan with min_seq": lambda js, s: jsx.DirectGet(js, s).scan(min_seq=1).to_list(),
    "scan": lambda js, s: jsx.DirectGet(js, s).scan(confirm=True).to_list(),
    "scan of a range": lambda js, s: jsx.DirectGet(js, s).scan(up_to_seq=9, confirm=True).to_list(),
    "LogReader": lambda js, s: LogReader(js, s, patience=1).read(),
    "LogReader from the end": lambda js, s: LogReader(js, s, start=Last(), patience=1).read(),
    "LogReader.open": lambda js, s: LogReader(js, s, patience=1).open(),
    "LogReader.lag": lambda js, s: LogReader(js, s, patience=1).lag(),
    "LogReader that waits": lambda js, s: LogReader(js, s, tail=True, patience=1).read(timeout=SECONDS),
    "to_arrow": lambda js, s: arrow.to_arrow(js, s, confirm=True),
}
EVERY = [
    (f"{what}, {kind}", read)
    for kind, table in (("unproved", UNPROVED), ("proved", PROVED))
    for what, read in table.items()
]


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer(config=CONFIG) as server:
        yield server


@pytest.fixture
def js(nc: Client) -> JetStreamContext:
    return nc.jetstream(timeout=SECONDS)


@pytest.fixture
async def disabled(js: JetStreamContext, stream_name: Callable[[], str]) -> str:
    """A stream with a message, without `allow_direct`."""
    name = stream_name()
    await js.add_stream(name=name, subjects=[f"{name}.>"])
    await js.publish(f"{name}.a")
    return name


@pytest.fixture
async def reader_js(server: NatsServer) -> AsyncIterator[JetStreamContext]:
    """A context of a client that may only ask for direct gets."""
    async with connected(server.url, user="reader", password="p") as nc:
        yield nc.jetstream(timeout=SECONDS)


async def error_of(read: Awaitable[Any]) -> Exception:
    """Return the error of a read, which must not wait for its timeout."""
    async with asyncio.timeout(SECONDS - 1):
        with pytest.raises(nats.errors.Error) as caught:
            await read
    assert not isinstance(caught.value, TimeoutError)
    return caught.value


@each("what, read", EVERY, together=True)
async def test_a_stream_that_does_not_exist_is_not_found(js: JetStreamContext, what: str, read: Read) -> None:
    error = await error_of(read(js, "MISSING"))
    assert isinstance(error, nats.js.errors.NotFoundError)
    assert not isinstance(error, errors.MessageNotFoundError), "the stream is missing, not a message"
    assert error.err_code == 10059
    assert "MISSING" in str(error)
    assert "allow_direct" not in str(error)


@each("what, read", EVERY, together=True)
async def test_a_stream_without_direct_gets_names_how_to_allow_them(
    js: JetStreamContext, disabled: str, what: str, read: Read
) -> None:
    error = await error_of(read(js, disabled))
    assert type(error) is errors.DirectGetDisabledError
    assert error.stream == disabled
    text = str(error)
    assert disabled in text
    assert "allow_direct=True" in text or "--allow-direct" in text
    assert "does not exist" not in text


@each("what, read", UNPROVED.items(), together=True)
async def test_a_client_that_may_not_ask_for_the_stream_hears_both_causes(
    js: JetStreamContext, reader_js: JetStreamContext, disabled: str, what: str, read: Read
) -> None:
    for name in ("MISSING", disabled):
        error = await error_of(read(reader_js, name))
        assert type(error) is errors.DirectGetDisabledError
        assert error.stream == name
        text = str(error)
        assert name in text
        assert "does not exist" in text
        assert "allow_direct" in text


async def test_an_account_or_a_server_without_jetstream_says_so(server: NatsServer) -> None:
    async def check(url: str, words: str, what: str, read: Read, **user: str) -> None:
        async with connected(url, **user) as nc:
            with named(what=what, words=words):
                assert re.search(words, str(await error_of(read(nc.jetstream(timeout=SECONDS), "MISSING"))))

    async with NatsServer(jetstream=False) as bare, asyncio.TaskGroup() as group:
        for each in EVERY:
            words = "the account has no JetStream|JetStream not enabled for account"
            group.create_task(check(server.url, words, *each, user="without", password="p"))
            group.create_task(check(bare.url, "the server (has no|runs without) JetStream", *each))


async def test_a_stream_that_is_deleted_during_a_scan_is_an_error(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True)
    config = (await js.stream_info(name)).config
    for confirm, again in ((False, False), (True, False), (True, True)):
        for _ in range(30):
            await js.publish(f"{name}.a")
        expected = errors.StreamRecreatedError if again else nats.js.errors.NotFoundError
        async with jsx.DirectGet(js, name, timeout=2).scan(batch=5, prefetch=1, confirm=confirm) as messages:
            assert (await anext(messages)).seq == 1
            await js.delete_stream(name)
            if again:
                await js.add_stream(config)
                for _ in range(40):
                    await js.publish(f"{name}.a")
            with pytest.raises(expected) as caught:
                await messages.to_list()
            assert not isinstance(caught.value, errors.MessageNotFoundError)
        if not again:
            await js.add_stream(config)


async def test_the_search_for_the_cause_leaves_nothing_behind(js: JetStreamContext, leak_check: Any) -> None:
    for _, read in EVERY:
        with pytest.raises(nats.errors.Error):
            await read(js, "MISSING")
    await leak_check.assert_clean()
