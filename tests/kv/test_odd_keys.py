"""Any publisher can store keys that clients refuse, also keys that are not UTF-8: no read takes one for another."""

from collections.abc import Callable
from typing import Any

import nats
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.js.kv import KeyValue

import jetstream_ext.kv as kvx
from jetstream_ext.kv import present, reads
from jetstream_ext.kv.entries import key_text
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


async def test_reads_keep_keys_that_are_not_utf8_apart(
    server: NatsServer, publish_raw: PublishRaw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On each line of servers, and in the ways in which buckets of different sizes are read."""
    async with NatsServer(version="2.11.11") as old, NatsServer(version="2.12.8") as older:
        for each in (old, older, server):
            async with await nats.connect(each.url) as nc:
                for names in ((), ("_CHUNK",), ("_CHUNK", "_DEEP", "_ROWS_PER_LOOKUP")):
                    with monkeypatch.context() as patch:
                        for name in names:  # one answer does not have room for all keys
                            module = present if hasattr(present, name) else reads
                            patch.setattr(module, name, {"_CHUNK": 2, "_DEEP": 0}.get(name, 1))
                        await check_reads(nc, each, f"ODD{len(names)}", publish_raw)


async def check_reads(nc: nats.NATS, server: NatsServer, name: str, publish_raw: PublishRaw) -> None:
    kv = await kvx.enable(await nc.jetstream().create_key_value(bucket=name, history=5), atomic=False)
    publish_raw(server, messages(kv, b"1:"))
    first = await kvx.snapshot(kv)
    assert values(first) == stored(b"1:")
    publish_raw(server, messages(kv, b"2:"))
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


@given(st.lists(st.binary(), min_size=2, max_size=2, unique=True), st.sampled_from([b"", b"\\xff", b"\\\\xff"]))
def test_different_keys_have_different_texts(raw: list[bytes], more: bytes) -> None:
    one, other = (key.decode("utf-8", "surrogateescape") for key in (raw[0] + more, raw[1] + b"\xff"))
    assert (key_text(one) == key_text(other)) is (one == other)
    key_text(one).encode()
