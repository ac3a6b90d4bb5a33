"""Any publisher can store keys that clients refuse, also keys that are not UTF-8: no read takes one for another."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import nats
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.js.errors import InvalidKeyError
from nats.js.kv import KeyValue

import jetstream_ext.kv as kvx
from jetstream_ext.errors import ResponseError
from jetstream_ext.kv import present, reads
from jetstream_ext.kv.entries import check_key, key_text, rows_of
from jetstream_ext.kv.history import replaced_revision
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.testing import NatsServer

ODD = (b"\xff", b"\xfe", "\ufffd".encode(), b"\xc3", "é".encode(), b"\\xff", b"a.\xff", b"a.\xfe.b", b"\xed\xb3\xbf")
KEYS = {raw: raw.decode("utf-8", "surrogateescape") for raw in (b"ok", *ODD)}


PublishRaw = Callable[..., None]


def messages(kv: KeyValue, data: bytes) -> list[tuple[bytes, bytes]]:
    """Return what stores `data` and the key under each key."""
    return [(kv._pre.encode() + key, data + key) for key in KEYS]


def values(found: Any) -> dict[str, bytes]:
    return {key: entry.value for key, entry in found.items()}


def stored(data: bytes, keys: tuple[bytes, ...] = tuple(KEYS)) -> dict[str, bytes]:
    return {KEYS[key]: data + key for key in keys}


@pytest.fixture(params=["2.11.11", "2.12.8", ""], ids=["2.11", "2.12", "newest"])
async def every(request: pytest.FixtureRequest, server: NatsServer) -> AsyncIterator[NatsServer]:
    """A server of each minor version."""
    if not request.param:
        yield server
        return
    async with NatsServer(version=request.param) as older:
        yield older


@pytest.fixture(params=["small", "by name", "log"])
def strategy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways in which buckets of different sizes are read."""
    if request.param != "small":
        monkeypatch.setattr(present, "_CHUNK", 2)  # one answer does not have room for all keys
    if request.param == "by name":
        monkeypatch.setattr(reads, "_SMALL_LOG", 0)
        monkeypatch.setattr(present, "_DEEP", 0)
        monkeypatch.setattr(reads, "_ROWS_PER_LOOKUP", 0)


@pytest.mark.usefixtures("strategy")
async def test_reads_keep_keys_that_are_not_utf8_apart(
    every: NatsServer, stream_name: Callable[[], str], publish_raw: PublishRaw
) -> None:
    async with await nats.connect(every.url) as nc:
        kv = await kvx.enable(await nc.jetstream().create_key_value(bucket=stream_name(), history=5), atomic=False)
        publish_raw(every, messages(kv, b"1:"))
        first = await kvx.snapshot(kv)
        assert values(first) == stored(b"1:")
        publish_raw(every, messages(kv, b"2:"))
        now = await kvx.snapshot(kv)
        assert values(now) == stored(b"2:")
        assert [entry.key for entry in now.values()] == list(now)
        assert values(await kvx.snapshot(kv, ["a.>", "ok"])) == stored(b"2:", (b"a.\xff", b"a.\xfe.b", b"ok"))
        for at in (first.revision, first.time):
            assert values(await kvx.snapshot(kv, at=at)) == stored(b"1:")
        assert values(await kvx.snapshot(kv, at=4)) == stored(b"1:", tuple(KEYS)[:4])
        assert values(await kvx.snapshot(kv, ["a.*.*"], at=first.revision)) == stored(b"1:", (b"a.\xfe.b",))
        assert values(await kvx.get_many(kv, ["ok"])) == stored(b"2:", (b"ok",))
        assert values(await kvx.get_many(kv, ["ok"], at=first.revision)) == stored(b"1:", (b"ok",))


async def test_key_that_the_leader_does_not_tell_is_an_error_beside_a_near_mirror(
    make_bucket, server: NatsServer, publish_raw: PublishRaw, mirrored, near
) -> None:
    kv = await make_bucket(history=2)
    publish_raw(server, messages(kv, b"1:"))
    near(kv._stream, await mirrored(kv, "NEAR", len(KEYS), allow_direct=True))
    for at in (None, len(KEYS) - 1):
        with pytest.raises(ResponseError, match="the key of message 2 is not known"):
            await kvx.snapshot(kv, at=at)
        assert values(await kvx.snapshot(kv, ["ok", "*.c"], at=at)) == stored(b"1:", (b"ok",))
        assert values(await kvx.get_many(kv, ["ok"], at=at)) == stored(b"1:", (b"ok",))


def test_message_of_the_leader_with_an_unknown_subject_is_no_row() -> None:
    with pytest.raises(ResponseError, match="stream 'S': the key of message 3 is not known"):
        rows_of([StoredMsg(stream="S", subject="$KV.B.\ufffd", seq=3)])


async def test_transaction_refuses_keys_that_are_not_utf8(
    make_bucket, server: NatsServer, publish_raw: PublishRaw
) -> None:
    kv = await make_bucket()
    publish_raw(server, messages(kv, b"1:"))
    async with kvx.transaction(kv) as tx:
        for key in set(KEYS.values()) - {"ok"}:
            with pytest.raises(InvalidKeyError):
                await tx.get(key)
            with pytest.raises(InvalidKeyError):
                tx.put(key, b"2")
        assert values(await tx.get_many(["ok"])) == stored(b"1:", (b"ok",))
        tx.put("ok", b"2:ok")
    assert values(await kvx.snapshot(kv)) == stored(b"1:") | stored(b"2:", (b"ok",))


def test_expectation_about_a_subject_that_is_not_utf8_tells_nothing_of_the_key() -> None:
    named = {"Nats-Expected-Last-Subject-Sequence": "5", "Nats-Expected-Last-Subject-Sequence-Subject": "$KV.B.\ufffd"}
    assert replaced_revision(named, "$KV.B.\ufffd") is None
    assert replaced_revision(named, "$KV.B.\udcff") is None


@given(st.lists(st.binary(), min_size=2, max_size=2, unique=True), st.sampled_from([b"", b"\\xff", b"\\\\xff"]))
def test_different_keys_have_different_texts(raw: list[bytes], more: bytes) -> None:
    one, other = (key.decode("utf-8", "surrogateescape") for key in (raw[0] + more, raw[1] + b"\xff"))
    assert (key_text(one) == key_text(other)) is (one == other)
    key_text(one).encode()


def test_key_that_clients_accept_is_its_own_text() -> None:
    check_key("a-/_=Z9.b")
    assert key_text("a-/_=Z9.b") == "a-/_=Z9.b"
    assert key_text("\udcff\\xff é") == "\\xff\\\\xff é"
