"""A nats-py with other internals is used through its public interface; nothing fails with an `AttributeError`."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.js.kv import KeyValue

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import JetStreamExtError

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the fallback warns


class Hidden:
    """An attribute that nats-py itself still finds under its name, but this package does not."""

    def __init__(self, kind: type, name: str) -> None:
        self._name = name
        self._method = kind.__dict__.get(name)

    def __get__(self, owner: Any, kind: type) -> Any:
        if sys._getframe(1).f_globals["__name__"].startswith("jetstream_ext"):
            raise AttributeError(self._name)
        return self._method.__get__(owner, kind) if self._method is not None else owner.__dict__[self._name]

    def __set__(self, owner: Any, value: Any) -> None:
        if sys._getframe(1).f_globals["__name__"].startswith("jetstream_ext"):
            raise AttributeError(self._name)
        owner.__dict__[self._name] = value


async def put_two(js: JetStreamContext, name: str) -> KeyValue:
    kv = await kvx.enable(await js.create_key_value(bucket=name))
    await kv.put("a", b"1")
    await kv.put("b", b"2")
    return kv


@pytest.mark.parametrize("name", ["_stop_processing", "_id"])
async def test_read_falls_back_when_a_subscription_lacks_an_internal(
    js: JetStreamContext, stream_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    await put_two(js, bucket := stream_name())
    monkeypatch.setattr(Subscription, name, Hidden(Subscription, name), raising=False)
    messages = await jsx.DirectGet(js, f"KV_{bucket}").batch(10, seq=1).to_list()
    assert [message.data for message in messages] == [b"1", b"2"]


@pytest.mark.parametrize("name", ["_prefix", "_timeout", "_nc"])
async def test_read_works_or_says_why_when_a_context_lacks_an_internal(
    js: JetStreamContext, stream_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    await put_two(js, bucket := stream_name())
    monkeypatch.setattr(JetStreamContext, name, Hidden(JetStreamContext, name), raising=False)
    try:
        messages = await jsx.DirectGet(js, f"KV_{bucket}").batch(10, seq=1).to_list()
    except JetStreamExtError:
        return
    assert [message.data for message in messages] == [b"1", b"2"]


@pytest.mark.parametrize("name", ["_js", "_name", "_stream", "_pre"])
async def test_read_works_or_says_why_when_a_bucket_lacks_an_internal(
    js: JetStreamContext, stream_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    await put_two(js, bucket := stream_name())
    kv = await js.key_value(bucket)
    monkeypatch.setattr(KeyValue, name, Hidden(KeyValue, name), raising=False)
    try:
        snapshot = await kvx.snapshot(kv)
    except JetStreamExtError:
        return
    assert set(snapshot) == {"a", "b"}
