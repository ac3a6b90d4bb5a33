"""A nats-py with other internals is used through its public interface; nothing fails with an `AttributeError`."""

import inspect
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.js.kv import KeyValue
from nats.protocol.parser import Parser

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.client.base_connection import FallbackConnection
from jetstream_ext.client.connection import _CLIENT, _PARSER, Connection, connection_of, open_bucket
from jetstream_ext.errors import JetStreamExtError
from jetstream_ext.log import LogReader
from jetstream_ext.own_client import _TLS, OwnClient
from jetstream_ext.testing import NatsServer

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the fallback warns


class Hidden:
    """An attribute that nats-py itself still finds under its name, but this package does not."""

    def __init__(self, kind: type, name: str) -> None:
        self._name = name
        self._of_the_kind = kind.__dict__.get(name)

    def __get__(self, owner: Any, kind: type) -> Any:
        if sys._getframe(1).f_globals["__name__"].startswith("jetstream_ext"):
            raise AttributeError(self._name)
        if inspect.isfunction(self._of_the_kind):
            return self._of_the_kind.__get__(owner, kind)
        return owner.__dict__[self._name] if self._of_the_kind is None else self._of_the_kind

    def __set__(self, owner: Any, value: Any) -> None:
        if sys._getframe(1).f_globals["__name__"].startswith("jetstream_ext"):
            raise AttributeError(self._name)
        owner.__dict__[self._name] = value


async def put_two(js: JetStreamContext, name: str) -> KeyValue:
    kv = await kvx.enable(await js.create_key_value(bucket=name))
    await kv.put("a", b"1")
    await kv.put("b", b"2")
    return kv


def hide(patch: pytest.MonkeyPatch, kind: type, name: str) -> None:
    patch.setattr(kind, name, Hidden(kind, name), raising=False)


async def test_read_works_or_says_why_when_a_subscription_or_context_or_bucket_lacks_an_internal(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    kv = await put_two(js, bucket := stream_name())
    internals: list[tuple[type, str]] = [
        *((Subscription, name) for name in ("_stop_processing", "_id")),
        *((JetStreamContext, name) for name in ("_prefix", "_timeout", "_nc")),
        *((KeyValue, name) for name in ("_js", "_name", "_stream", "_pre")),
    ]
    for kind, name in internals:
        with pytest.MonkeyPatch.context() as patch:
            hide(patch, kind, name)
            try:
                messages = await jsx.DirectGet(js, f"KV_{bucket}").batch(10, seq=1).to_list()
                snapshot = await kvx.snapshot(kv)
            except JetStreamExtError:
                assert kind is not Subscription, name
            else:
                assert [message.data for message in messages] == [b"1", b"2"], name
                assert set(snapshot) == {"a", "b"}, name


async def test_client_works_and_warns_once_when_any_internal_is_missing(
    server: NatsServer, js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    stream = stream_name()
    features = {"allow_direct": True, "allow_batched": True, "allow_atomic": True}
    await jsx.ensure_stream(js, name=stream, subjects=[f"{stream}.>"], **features)
    for kind, name in [*((Client, name) for name in _CLIENT), *((Parser, name) for name in _PARSER)]:
        warned: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            hide(patch, kind, name)
            patch.setattr("warnings.warn", lambda message, *_, to=warned, **__: to.append(str(message)))
            async with await nats.connect(server.url, connect_timeout=10) as nc:
                assert isinstance(connection_of(nc), FallbackConnection), name
                await use(nc.jetstream(timeout=30), stream)
        assert len(warned) == 1, (name, warned)
        assert "does not know the internals of this version of nats-py" in warned[0]


async def use(js: JetStreamContext, stream: str) -> None:
    """Write three messages to a stream by both kinds of batches, and read them."""
    ack = await jsx.publish_atomic(js, [jsx.BatchMessage(f"{stream}.{name}", name.encode()) for name in "ab"])
    async with jsx.FastPublisher(js) as publisher:
        await publisher.add(f"{stream}.c", b"c")
    stored = await jsx.DirectGet(js, stream).scan(seq=ack.seq - 1, confirm=True).to_list()
    assert [message.data for message in stored] == [b"a", b"b", b"c"]


async def test_version_and_level_of_a_server_are_known_without_its_info(
    js: JetStreamContext, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await jsx.features(js)
    monkeypatch.setattr(Client, "_server_info", Hidden(Client, "_server_info"), raising=False)
    found = await jsx.features(js)
    assert found.server_version == server.version
    assert [getattr(found, name) for name in ("atomic", "fast_ingest")] == [expected.atomic, expected.fast_ingest]


CALLS: dict[str, Callable[[JetStreamContext], Any]] = {
    "features": jsx.features,
    "ensure_stream": lambda js: jsx.ensure_stream(js, name="S"),
    "DirectGet": lambda js: jsx.DirectGet(js, "S"),
    "AtomicBatch": jsx.AtomicBatch,
    "publish_atomic": lambda js: jsx.publish_atomic(js, [jsx.BatchMessage("s")]),
    "publish_atomic_many": lambda js: jsx.publish_atomic_many(js, [[jsx.BatchMessage("s")]]),
    "watch_abandoned": lambda js: jsx.watch_abandoned(js, "S"),
    "FastPublisher": jsx.FastPublisher,
    "ingest": lambda js: jsx.ingest(js, [("s", b"")]),
    "create_source_consumer": lambda js: jsx.create_source_consumer(js, "S", "c", deliver_subject="d"),
    "reset_consumer": lambda js: jsx.reset_consumer(js, "S", "c"),
    "source_health": lambda js: jsx.source_health(js, "S"),
    "LogReader": lambda js: LogReader(js, "S"),
    "snapshot": lambda js: kvx.snapshot(open_bucket(js, "S")),
    "get_many": lambda js: kvx.get_many(open_bucket(js, "S"), ["a"]),
    "transaction": lambda js: kvx.transaction(open_bucket(js, "S")),
}


async def test_every_call_says_which_nats_py_works_when_a_context_lacks_an_internal(
    js: JetStreamContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, JetStreamContext, "_prefix")
    for call in CALLS.values():
        with pytest.raises(
            JetStreamExtError, match=r"cannot use this version of nats-py: _prefix; install nats-py 2\.16"
        ):
            await awaited(call, js)


async def awaited(call: Callable[[JetStreamContext], Any], js: JetStreamContext) -> None:
    if isinstance(pending := call(js), Awaitable):
        await pending


async def test_own_client_refuses_tls_without_an_internal_that_proves_it(server: NatsServer) -> None:
    for name in _TLS:
        with pytest.MonkeyPatch.context() as patch:
            hide(patch, Client, name)
            with pytest.raises(JetStreamExtError, match=r"may send credentials without TLS; install nats-py 2\.16"):
                await OwnClient().open([f"tls://127.0.0.1:{server.port}"], shown="h", timeout=30)


async def test_known_nats_py_is_used_without_a_warning(nc: Client, recwarn: pytest.WarningsRecorder) -> None:
    assert isinstance(connection_of(nc), Connection)
    assert not recwarn.list
