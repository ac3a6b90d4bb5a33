"""Keys that vanish without a trace and are written again: their earlier state is unavailable."""

import asyncio

import pytest

import jetstream_ext.kv as kvx
from jetstream_ext.errors import HistoryUnavailableError
from jetstream_ext.kv import reads


async def test_key_removed_by_purge_deletes_is_unavailable(make_bucket) -> None:
    """`purge_deletes`, which every client has, leaves no trace of the key."""
    for history in (1, 5):
        for again in ("put", "create", ""):
            kv = await make_bucket(history=history)
            await kv.put("a", b"1")
            await kv.put("z", b"1")
            await kv.delete("a")
            await kv.purge_deletes(olderthan=-1)
            if again:
                await getattr(kv, again)("a", b"2")
            last = await kv.create("y", b"1")
            for filters in (None, ["*"], ["a"], ["a", "z"]):
                with pytest.raises(HistoryUnavailableError) as gone:
                    await kvx.snapshot(kv, filters, at=2)
                assert gone.value.keys in ((), ("a",))
                some = await kvx.snapshot(kv, filters, at=2, strict=False)
                assert "a" not in some
                assert "a" in some.unavailable or not some.complete
            with pytest.raises(HistoryUnavailableError) as gone:
                await kvx.get_many(kv, ["z", "a"], at=2)
            assert gone.value.keys == ("a",)
            assert (await kvx.get_many(kv, ["z"], at=2))["z"].value == b"1"
            assert (await kvx.get_many(kv, ["a", "z"], at=last)).keys() == ({"a", "z"} if again else {"z"})
            assert (await kvx.snapshot(kv, at=last)).keys() == ({"a", "y", "z"} if again else {"y", "z"})


async def test_key_that_vanishes_before_a_read_of_what_was_the_newest_revision_is_unavailable(
    make_bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The revision is the newest one when the call begins; then another one is written, and the key vanishes."""
    resolve = reads.resolve_revision
    for removal in ("purge", "expiry"):
        kv = await make_bucket(history=5)
        await kv.put("a", b"1")
        await kv.create("s", b"1", msg_ttl=1 if removal == "expiry" else None)
        newest = await kv.put("z", b"1")

        async def then_vanish(*arguments: object, kv=kv, removal: str = removal) -> object:
            found = await resolve(*arguments)
            await kv.put("z", b"2")
            if removal == "purge":
                await kv._js.purge_stream(kv._stream, subject=f"{kv._pre}s")
            async with asyncio.timeout(30):
                while await kvx.get_many(kv, ["s"]):
                    await asyncio.sleep(0.05)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(reads, "resolve_revision", then_vanish)
            with pytest.raises(HistoryUnavailableError):
                await kvx.snapshot(kv, at=newest)
