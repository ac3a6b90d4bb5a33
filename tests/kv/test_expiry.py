"""TTLs: delete markers, keys that expired without one, and `touch`."""

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import nats
import pytest
from nats.js.errors import KeyNotFoundError

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.client.connection import open_bucket
from jetstream_ext.errors import (
    BadHeaderError,
    HistoryUnavailableError,
    KeyConflictError,
    MaxPayloadError,
    MessageTooLargeError,
    MessageTTLDisabledError,
)
from jetstream_ext.kv import bucket
from jetstream_ext.protocol.headers import parse_lines
from jetstream_ext.testing import NatsServer
from jetstream_ext.types import own_headers

MakeBucket = Callable[..., Awaitable[Any]]


async def expired(kv, key: str) -> None:
    """Wait until a key has expired."""
    async with asyncio.timeout(60):
        while True:
            entry = (await kvx.snapshot(kv, [key], include_deletes=True)).get(key)
            if entry is None or entry.operation != "PUT":
                return
            await asyncio.sleep(0.05)


async def stored(kv, key: str) -> tuple[bytes, bytes]:
    """Return the header block and the value of a key as the server stores them."""
    request = json.dumps({"last_by_subj": f"{kv._pre}{key}"}).encode()
    message = (await kv._js._api_request(f"$JS.API.STREAM.MSG.GET.{kv._stream}", request))["message"]
    return base64.b64decode(message["hdrs"]), base64.b64decode(message["data"])


async def all_at_once(*checks: Callable[[MakeBucket], Awaitable[None]], make_bucket: MakeBucket) -> None:
    """Run checks at the same time, because each of them waits some seconds until a key has expired."""
    async with asyncio.TaskGroup() as group:
        for check in checks:
            group.create_task(check(make_bucket))


class TestReads:
    async def test_reads_after_an_expiry_are_exact_or_refused(self, make_bucket) -> None:
        await all_at_once(
            self.markers_show_which_keys_expired,
            self.key_without_a_marker_is_unavailable,
            self.past_is_unavailable_after_the_ttl_of_the_bucket,
            self.mirror_that_does_not_heed_ttls_keeps_the_key,
            make_bucket=make_bucket,
        )

    @staticmethod
    async def markers_show_which_keys_expired(make_bucket: MakeBucket) -> None:
        for history in (1, 4):
            kv = await make_bucket(history=history, limit_marker_ttl=60 if history == 1 else 1)
            await kv.put("other", b"1")
            await kv.create("session", b"2", msg_ttl=1)
            await kv.put("last", b"3")
            await expired(kv, "session")
            now = await kvx.snapshot(kv, include_deletes=True)
            if history == 1:
                marker = now["session"]
                assert (marker.operation, marker.reason, marker.value) == ("PURGE", "MaxAge", b"")
                with pytest.raises(HistoryUnavailableError) as caught:
                    await kvx.snapshot(kv, at=3)
                assert caught.value.keys == ("session",)
                after = await kvx.snapshot(kv, at=marker.revision, include_deletes=True)
                assert (after["session"], after.unavailable) == (marker, ())
            assert set(await kvx.snapshot(kv)) == {"other", "last"}
            assert set(await kvx.get_many(kv, ["other", "session", "last"])) == {"other", "last"}
            assert set(await kvx.snapshot(kv, at=1)) == {"other"}

    @staticmethod
    async def key_without_a_marker_is_unavailable(make_bucket: MakeBucket) -> None:
        kv = await make_bucket()
        await kv.create("session", b"1", msg_ttl=4)  # long enough for a read before it expires
        await kv.put("a", b"2")
        await kv.create("b", b"3")
        assert set(await kvx.snapshot(kv, at=2)) == {"session", "a"}
        await expired(kv, "session")
        for read in (kvx.get_many(kv, ["session", "a"], at=2), kvx.snapshot(kv, ["session", "a"], at=2)):
            with pytest.raises(HistoryUnavailableError) as caught:
                await read
            assert caught.value.keys == ("session",)
        loose = await kvx.snapshot(kv, ["session", "a"], at=2, strict=False)
        assert (set(loose), loose.unavailable) == ({"a"}, ("session",))
        assert (await kvx.snapshot(kv, at=2, strict=False)).complete is False

    @staticmethod
    async def past_is_unavailable_after_the_ttl_of_the_bucket(make_bucket: MakeBucket) -> None:
        kv = await make_bucket(ttl=4, history=3)  # long enough for the reads before anything expires
        await kv.put("old", b"1")
        second = await kv.put("other", b"1")
        first = (await kvx.snapshot(kv)).time
        assert set(await kvx.snapshot(kv, at=first)) == {"old", "other"}
        await expired(kv, "old")
        await expired(kv, "other")
        await kv.put("new", b"2")
        last = await kv.put("old", b"3")
        for read in (
            kvx.get_many(kv, ["old"], at=second),
            kvx.snapshot(kv, ["old"], at=second),
            kvx.snapshot(kv, at=second),
        ):
            with pytest.raises(HistoryUnavailableError):
                await read
        assert set(await kvx.snapshot(kv, at=last)) == {"new", "old"}

    @staticmethod
    async def mirror_that_does_not_heed_ttls_keeps_the_key(make_bucket: MakeBucket) -> None:
        kv = await make_bucket(history=1)
        name = f"KV_{kv._name}_M"
        source = nats.js.api.StreamSource(name=kv._stream)
        await kv._js.add_stream(name=name, mirror=source, max_msgs_per_subject=1, allow_direct=True)
        await kv.create("short", b"1", msg_ttl=4)  # time enough for the mirror to copy it
        async with jsx.FastPublisher(kv._js, flow=500) as publisher:  # more than one answer
            await publisher.add_many((f"{kv._pre}k.{n}", b"") for n in range(1_100))
        async with asyncio.timeout(30):
            while (await kv._js.stream_info(name)).state.last_seq < 1101:
                await asyncio.sleep(0.02)
        await expired(kv, "short")
        mirror = await kv._js.key_value(f"{kv._name}_M")
        assert "short" in await kvx.get_many(mirror, ["short"])
        assert len(await kvx.snapshot(mirror)) == 1101


class TestTouch:
    async def test_touched_key_expires_by_its_new_ttl_only(self, make_bucket) -> None:
        await all_at_once(
            self.new_ttl_replaces_the_old_one,
            self.expiry_exposes_no_older_value,
            self.never_overrides_the_ttl_of_the_bucket,
            make_bucket=make_bucket,
        )

    @staticmethod
    async def new_ttl_replaces_the_old_one(make_bucket: MakeBucket) -> None:
        kv = await make_bucket(history=3)
        await kv.create("s", b"value", msg_ttl=5)
        await kv.create("untouched", b"value", msg_ttl=5)
        assert await kvx.touch(kv, "s", ttl=60) == 3
        await expired(kv, "untouched")
        assert (await kv.get("s")).value == b"value"

    @staticmethod
    async def expiry_exposes_no_older_value(make_bucket: MakeBucket) -> None:
        kv = await make_bucket(history=5)
        await kv.put("s", b"older")
        await kv.put("s", b"newer")
        assert await kvx.touch(kv, "s", ttl=timedelta(seconds=1)) == 3
        await expired(kv, "s")
        assert len(await kvx.snapshot(kv, include_deletes=True)) == 0
        with pytest.raises(KeyNotFoundError):
            await kv.get("s")

    @staticmethod
    async def never_overrides_the_ttl_of_the_bucket(make_bucket: MakeBucket) -> None:
        kv = await make_bucket(history=2, ttl=4)  # long enough for `touch`
        await kv.put("s", b"1")
        await kvx.touch(kv, "s", ttl=jsx.NEVER)
        await kv.put("other", b"2")
        await expired(kv, "other")
        assert (await kv.get("s")).value == b"1"
        assert len([m for m in await jsx.DirectGet(kv._js, kv._stream).scan().to_list() if m.subject[-1] == "s"]) == 1

    async def test_touch_keeps_every_header_but_those_of_the_server(self, make_bucket) -> None:
        """The server compares names case-sensitively: only those that begin with ``Nats-`` mean something to it."""
        kv = await make_bucket()
        users = [
            ("X", "1"), ("Content-Type", "text/plain"), ("X", "2"), ("nats-own", "keep"), ("NATS-App", "1"),
            ("nats-ttl", "1"), ("nats-rollup", "all"), ("nats-expected-last-sequence", "999"),
            ("NATS-EXPECTED-STREAM", "ANOTHER"), ("nats-msg-id", "1"), ("Natsy", ""), ("X", "1"),
        ]  # fmt: skip
        servers = [("Nats-Msg-Id", "1"), ("Nats-Expected-Last-Sequence", "1"), ("Nats-TTL", "7")]
        await kv.put("other", b"1")
        headers = own_headers([*users[:3], *servers, *users[3:]])
        await kv._js.publish(f"{kv._pre}s", b"v", headers=headers)
        await kvx.touch(kv, "s", ttl=60)
        block, value = await stored(kv, "s")
        assert value == b"v"
        pairs = parse_lines(block)
        added = [("Nats-Rollup", "sub"), ("Nats-TTL", "60"), ("Nats-Expected-Last-Subject-Sequence", "2")]
        assert pairs == users + added
        assert set(await kvx.snapshot(kv)) == {"other", "s"}  # ``nats-rollup: all`` removed nothing
        await kvx.touch(kv, "s", ttl=jsx.NEVER)
        block, _ = await stored(kv, "s")
        assert parse_lines(block) == [*users, ("Nats-TTL", "never"), ("Nats-Expected-Last-Subject-Sequence", "3")]

    async def test_touch_refuses_to_change_a_header_that_is_not_utf8(
        self, make_bucket, server: NatsServer, publish_raw
    ) -> None:
        kv = await make_bucket()
        for line in (b"X: caf\xe9", b"X\xff: 1"):
            block = b"NATS/1.0\r\nA: \xef\xbf\xbd\r\n%b\r\n\r\n" % line
            publish_raw(server, [(f"{kv._pre}s".encode(), b"v")], block=block)
            with pytest.raises(
                BadHeaderError, match=r"the header 'X.*' of key 's' is not UTF-8 .*; nothing was written"
            ):
                await kvx.touch(kv, "s", ttl=60)
            assert await stored(kv, "s") == (block, b"v")
        await kv._js.publish(f"{kv._pre}s", b"v", headers={"X": "\ufffd é"})  # a replacement character is one of UTF-8
        await kvx.touch(kv, "s", ttl=60)
        assert parse_lines((await stored(kv, "s"))[0])[0] == ("X", "\ufffd é")

    async def test_touch_conflicts_with_a_concurrent_write(self, make_bucket, monkeypatch: pytest.MonkeyPatch) -> None:
        kv = await make_bucket()
        await kv.put("s", b"1")
        read = bucket.Bucket.get_at_leader

        async def slow(self, **request: object) -> jsx.StoredMsg | None:
            found = await read(self, **request)
            await kv.put("s", b"2")
            return found

        monkeypatch.setattr(bucket.Bucket, "get_at_leader", slow)
        with pytest.raises(KeyConflictError) as caught:
            await kvx.touch(kv, "s", ttl=60)
        assert caught.value.keys == ("s",)
        assert caught.value.outcome == "not_stored"
        assert (await kv.get("s")).value == b"2"

    async def test_touch_of_a_missing_or_deleted_key_raises_key_not_found(self, make_bucket) -> None:
        kv = await make_bucket()
        with pytest.raises(KeyNotFoundError, match="nothing"):
            await kvx.touch(kv, "nothing", ttl=60)
        await kv.put("gone", b"1")
        await kv.delete("gone")
        with pytest.raises(KeyNotFoundError):
            await kvx.touch(kv, "gone", ttl=60)

    async def test_touch_of_a_missing_key_needs_no_permission_for_the_stream(self) -> None:
        allowed = '"$JS.API.STREAM.MSG.GET.KV_B", "$KV.B.>"'
        users = f"{{user: a, password: a}}, {{user: b, password: b, permissions: {{publish: [{allowed}]}}}}"
        with NatsServer(config=f"authorization {{users: [{users}]}}") as server:
            async with await nats.connect(server.url, user="a", password="a", connect_timeout=10) as nc:
                await nc.jetstream().create_key_value(bucket="B")
            async with await nats.connect(server.url, user="b", password="b", connect_timeout=10) as nc:
                with pytest.raises(KeyNotFoundError, match="nothing"):
                    await kvx.touch(open_bucket(nc.jetstream(), "B"), "nothing", ttl=60)

    async def test_touch_of_a_value_that_is_too_large_with_its_headers_names_the_key(self, make_bucket, nc) -> None:
        kv = await make_bucket(max_value_size=64)
        await kv.put("s", b"1" * 60)
        with pytest.raises(
            MessageTooLargeError, match=rf"'{kv._name}'.*key 's'.*max_msg_size.*nothing was written"
        ) as caught:
            await kvx.touch(kv, "s", ttl=60)
        assert (caught.value.subject, caught.value.outcome) == (f"{kv._pre}s", "not_stored")
        assert (await kv.get("s")).revision == 1
        kv = await make_bucket()
        await kv.put("s", b"1" * nc.max_payload)
        with pytest.raises(MaxPayloadError, match=rf"'{kv._name}'.*key 's'.*max_payload.*nothing was written"):
            await kvx.touch(kv, "s", ttl=60)
        assert (await kv.get("s")).revision == 1

    async def test_touch_refuses_invalid_ttls(self, make_bucket) -> None:
        kv = await make_bucket()
        await kv.put("s", b"1")
        for ttl in (0, 0.5, -1, timedelta(milliseconds=1500)):
            with pytest.raises(ValueError, match="TTL"):
                await kvx.touch(kv, "s", ttl=ttl)

    async def test_touch_names_enable_if_ttls_are_disabled(self, js, stream_name) -> None:
        name = stream_name()
        await js.add_stream(
            name=f"KV_{name}",
            subjects=[f"$KV.{name}.>"],
            max_msgs_per_subject=1,
            allow_rollup_hdrs=True,
            allow_direct=True,
        )
        kv = await js.key_value(name)
        await kv.put("s", b"1")
        with pytest.raises(MessageTTLDisabledError, match="enable"):
            await kvx.touch(kv, "s", ttl=60)
        kv = await kvx.enable(kv, ttl=True)
        assert await kvx.touch(kv, "s", ttl=60) == 2
