"""A subscription that the server refuses, at once or later, ends what waits for its messages."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest
from client_cells import each
from nats.aio.client import Client
from test_fallback import with_unknown_internals

import jetstream_ext as jsx
from jetstream_ext import kv as kvx
from jetstream_ext.testing import NatsServer

ADVISORIES = "$JS.EVENT.ADVISORY.STREAM.BATCH_ABANDONED"
USERS = """
system_account: SYS
accounts {{
  SYS {{ users: [ {{ user: system, password: p }} ] }}
  APP {{ jetstream: enabled, users: [
    {{ user: admin, password: p }}
    {{ user: some, password: p, permissions: {{ subscribe: {{ deny: ["{denied}"] }} }} }}
  ] }}
}}
"""
KINDS = [False, True]  # also with a nats-py whose internals are not known

pytestmark = pytest.mark.filterwarnings("ignore:jetstream_ext does not know the internals:RuntimeWarning")


class Guarded:
    """A server whose configuration says to what the user `some` may not subscribe."""

    def __init__(self, folder: Path) -> None:
        self._users = folder / "users.conf"
        self.deny("nothing")
        # The server takes every path as relative to the folder of its configuration.
        self.server = NatsServer(config=f'jetstream {{}}\ninclude "{"../" * 32}{self._users}"')

    def deny(self, subject: str) -> None:
        self._users.write_text(USERS.format(denied=subject), encoding="utf-8")

    async def reload(self) -> None:
        async with await nats.connect(self.server.url, user="system", password="p", connect_timeout=10) as nc:
            await nc.request(f"$SYS.REQ.SERVER.{nc._server_info['server_id']}.RELOAD", timeout=30)

    @asynccontextmanager
    async def client(self, *, fallback: bool) -> AsyncIterator[Client]:
        async def ignore(_: Exception) -> None: ...

        nc = await nats.connect(
            self.server.url, user="some", password="p", error_cb=ignore, connect_timeout=10, reconnect_time_wait=0.01
        )
        async with nc, asyncio.timeout(60):
            yield with_unknown_internals(nc) if fallback else nc


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    guarded = Guarded(tmp_path)
    async with guarded.server:
        yield guarded


@each("fallback", KINDS)
async def test_a_watch_without_the_permission_fails_at_once(guarded: Guarded, fallback: bool) -> None:
    guarded.deny(f"{ADVISORIES}.S")
    await guarded.reload()
    async with guarded.client(fallback=fallback) as nc:
        watch = jsx.watch_abandoned(nc.jetstream(timeout=30), "S")
        for _ in range(2):
            with pytest.raises(nats.errors.Error, match=rf"(?i)no permission to subscribe to '?{_escaped('S')}"):
                async with watch:
                    await anext(watch)
        async with jsx.watch_abandoned(nc.jetstream(timeout=30), "T"):
            pass  # the refusal of one subject is not that of another


def _escaped(stream: str) -> str:
    return f"{ADVISORIES}.{stream}".replace("$", r"\$").replace(".", r"\.")


@each("fallback", KINDS)
@each("how", ["reload", "restart"])
async def test_a_watch_whose_permission_is_revoked_ends(guarded: Guarded, how: str, fallback: bool) -> None:
    guarded.deny("nothing")
    await guarded.reload()
    async with guarded.client(fallback=fallback) as nc, jsx.watch_abandoned(nc.jetstream(), "S") as watch:
        waiting = [asyncio.ensure_future(anext(watch)) for _ in range(2)]
        await asyncio.sleep(0)
        guarded.deny(f"{ADVISORIES}.>")
        if how == "reload":
            await guarded.reload()
        else:
            guarded.server.restart()
        for each_ in waiting:
            with pytest.raises(nats.errors.Error, match=rf"(?i)no permission to subscribe to '?{_escaped('S')}"):
                await each_
        with pytest.raises(nats.errors.Error, match="no permission"):
            await anext(watch)


async def test_a_table_whose_permission_is_revoked_polls(guarded: Guarded) -> None:
    async with (
        guarded.client(fallback=False) as nc,
        await nats.connect(guarded.server.url, user="admin", password="p", connect_timeout=10) as admin,
    ):
        kv = await kvx.enable(await admin.jetstream(timeout=30).create_key_value(bucket="B"))
        async with kvx.Table(await nc.jetstream(timeout=30).key_value("B")) as table:
            revision = await kv.put("a", b"1")
            await table.wait_for(revision, timeout=30)
            guarded.deny("$KV.B.>")
            await guarded.reload()
            for value in (b"2", b"3"):
                await kv.put("a", value)
                while table["a"].value != value:
                    await asyncio.sleep(0.01)


async def test_a_refused_watch_leaves_nothing_behind(guarded: Guarded, leak_check: Any, has_only: Any) -> None:
    guarded.deny(f"{ADVISORIES}.>")
    await guarded.reload()
    async with guarded.client(fallback=False) as nc:
        before = set(nc._subs)
        async with jsx.watch_abandoned(nc.jetstream(timeout=30), "S") as watch:
            with pytest.raises(nats.errors.Error):
                await anext(watch)
        assert await has_only(nc, before)
    await leak_check.assert_clean()


@each("fallback", KINDS)
async def test_a_request_ends_at_once_if_the_user_may_not_hear_the_answer(guarded: Guarded, fallback: bool) -> None:
    guarded.deny("_INBOX.>")
    await guarded.reload()
    async with guarded.client(fallback=fallback) as nc, asyncio.timeout(20):
        with pytest.raises(nats.errors.TimeoutError, match=r"no permission to subscribe to _INBOX\.>"):
            await jsx.source_health(nc.jetstream(timeout=60), "S")
