"""Live tables that decode their values."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from nats.js.kv import KeyValue

import jetstream_ext.kv as kvx
from jetstream_ext.errors import ConversionError

MakeBucket = Callable[..., Awaitable[KeyValue]]


class Decoder:
    """Parses JSON, and counts."""

    def __init__(self) -> None:
        self.calls: list[bytes] = []

    def __call__(self, data: bytes) -> Any:
        self.calls.append(data)
        return json.loads(data)


async def test_values_are_decoded_once(make_bucket: MakeBucket, tmp_path: Path) -> None:
    kv = await make_bucket(history=8)
    for n in range(3):
        await kv.put(f"k.{n}", b"%d" % n)
    decode = Decoder()
    async with kvx.Table(kv, decode=decode, checkpoint=tmp_path / "t.db") as table:
        first, second, called = table.changes(), table.changes(), list[kvx.KeyValueChange[Any]]()
        table.on_change(called.append)
        assert [table["k.1"].value, table["k.1"].value] == [1, 1]
        for n in range(10, 13):
            await table.wait_for(await kv.put("k.1", b"[%d]" % n))
            assert table["k.1"].value == [n]
        await kv.delete("k.1")
        found = [await anext(first) for _ in range(4)]
        assert [await anext(second) for _ in range(4)] == found == called
        assert [change.old and change.old.value for change in found] == [1, [10], [11], [12]]
        assert [change.new and change.new.value for change in found] == [[10], [11], [12], None]
        assert table["k.2"] is table["k.2"]
        assert sorted(decode.calls) == [b"1", b"2", b"[10]", b"[11]", b"[12]"]
        await kv._js.purge_stream(kv._stream, subject=f"{kv._pre}k.0")
        while "k.0" in table:
            await anext(first)
        assert {key: entry.value for key, entry in table.items()} == {"k.2": 2}
        assert len(decode.calls) == 6, "also after it was loaded again: only the value of the change"
    async with kvx.Table(kv, decode=decode, checkpoint=tmp_path / "t.db") as table:
        assert table["k.2"].value == 2


async def test_a_value_that_cannot_be_decoded_ends_nothing(make_bucket: MakeBucket) -> None:
    kv = await make_bucket()
    await kv.put("bad", b"{")
    async with kvx.Table(kv, decode=json.loads) as table:
        changes = table.changes()
        assert (set(table), table["bad"].revision, len(list(table.items()))) == ({"bad"}, 1, 1)
        assert "bad" in repr(table["bad"])
        for _ in range(2):
            with pytest.raises(ConversionError, match=r"key 'bad' .*revision 1") as caught:
                table["bad"].value  # noqa: B018
            assert isinstance(caught.value.__cause__, ValueError)
        await table.wait_for(await kv.put("bad", b"[]"))
        change = await anext(changes)
        assert change.old is not None
        assert change.new is not None
        with pytest.raises(ConversionError, match="'bad'"):
            change.old.value  # noqa: B018
        assert (change.new.value, table["bad"].value) == ([], [])


async def test_only_plain_functions_decode(make_bucket: MakeBucket) -> None:
    kv = await make_bucket()

    async def decode(_: bytes) -> int:
        return 1

    with pytest.raises(TypeError, match="decode must be a plain function"):
        kvx.Table(kv, decode=decode)
    with pytest.raises(TypeError, match="decode must be a function, not int"):
        kvx.Table(kv, decode=5)  # type: ignore[call-overload]
