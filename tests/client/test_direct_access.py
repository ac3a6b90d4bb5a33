"""Direct Get with permissions, inbox prefixes, domains and imported APIs, on every server from 2.10."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest
from client_cells import seqs
from clients import connected
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.testing import NatsServer

VERSIONS = ["2.10.26", "2.11.11", "2.12.8", "2.14.6", "2.15.1"]

# Account APP has users with different permissions and inboxes. GOOD imports the API of APP through an export for streams
# of answers, NARROW through an export that passes only one message for each request.
CONFIG = """
jetstream { domain: hub }
accounts {
  APP {
    jetstream: enabled
    users: [
      { user: all, password: p }
      { user: direct, password: p, permissions: {
          publish: ["$JS.API.DIRECT.GET.*", "$JS.API.DIRECT.GET.*.>"], subscribe: ["_MINE.>"] } }
    ]
    exports: [
      { service: "$JS.API.>", response_type: stream, accounts: [GOOD] }
      { service: "$JS.hub.API.>", accounts: [NARROW] }
    ]
  }
  GOOD {
    users: [ { user: good, password: p } ]
    imports: [ { service: { account: APP, subject: "$JS.API.>" }, to: "APP.API.>" } ]
  }
  NARROW {
    users: [ { user: narrow, password: p } ]
    imports: [ { service: { account: APP, subject: "$JS.hub.API.>" }, to: "APP.API.>" } ]
  }
}
no_auth_user: all
"""


@pytest.fixture(scope="module", params=VERSIONS)
def server(request: pytest.FixtureRequest) -> Iterator[NatsServer]:
    with NatsServer(version=request.param, config=CONFIG) as server:
        yield server


Make = Callable[..., Awaitable[str]]


@pytest.fixture
async def stream(js: JetStreamContext, make: Make) -> str:
    """Messages 1 to 12 on the subjects A, B, C in turn; 8 is deleted."""
    name = await make()
    for seq in range(1, 13):
        await js.publish(f"{name}.{'CAB'[seq % 3]}", b"m%d" % seq)
    await js.delete_msg(name, 8)
    return name


async def test_the_client_s_inbox_prefix_is_used(server: NatsServer, stream: str, version: tuple[int, ...]) -> None:
    async with connected(server.url, user="direct", password="p", inbox_prefix="_MINE") as nc:
        direct = jsx.DirectGet(nc.jetstream(), stream, timeout=20)
        assert (await direct.get_last(f"{stream}.B")).seq == 11
        assert (await direct.get(3)).seq == 3
        if version >= (2, 11):
            assert await seqs(direct.scan(batch=2)) == [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12]
            assert await seqs(direct.multi_last([f"{stream}.>"], max_bytes=1)) == [10, 11, 12]
            with pytest.raises(errors.RequestTimeoutError):
                await jsx.DirectGet(nc.jetstream(timeout=0.3), stream, timeout=0.3).scan(confirm=True).to_list()


async def test_a_domain_is_honoured(nc: Client, stream: str, version: tuple[int, ...]) -> None:
    direct = jsx.DirectGet(nc.jetstream(domain="hub"), stream)
    assert (await direct.get_last(f"{stream}.A")).seq == 10
    with pytest.raises(errors.DirectGetDisabledError):
        await jsx.DirectGet(nc.jetstream(domain="elsewhere"), stream).get(1)
    if version >= (2, 11):
        assert len(await direct.scan(batch=4, confirm=True).to_list()) == 11


async def test_an_imported_api_is_usable(server: NatsServer, stream: str, version: tuple[int, ...]) -> None:
    async with connected(server.url, user="good", password="p") as nc:
        direct = jsx.DirectGet(nc.jetstream(prefix="APP.API"), stream, timeout=20)
        assert (await direct.get_last(f"{stream}.A", min_seq=12)).seq == 10
        assert (await direct.get_next(f"{stream}.C", seq=4)).seq == 6
        if version >= (2, 11):
            for confirm in (False, True):
                assert await seqs(direct.scan(batch=4, confirm=confirm)) == [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12]
            assert await seqs(direct.multi_last([f"{stream}.>"], max_bytes=1)) == [10, 11, 12]
        with pytest.raises(errors.DirectGetDisabledError):
            await jsx.DirectGet(nc.jetstream(), stream).get(1)


async def test_an_export_for_single_answers_is_an_error(server: NatsServer, stream: str, batches: None) -> None:
    async with connected(server.url, user="narrow", password="p") as nc:
        assert (await jsx.DirectGet(nc.jetstream(prefix="APP.API"), stream, timeout=30).get(3)).seq == 3
        timeout, ends = 0.5, []
        while not (ends and all("response_type" in str(end) for end in ends)):
            timeout *= 2  # the one answer that each read gets may be late on a busy machine
            assert timeout < 30, ends
            direct = jsx.DirectGet(nc.jetstream(prefix="APP.API"), stream, timeout=timeout)
            reads = (direct.scan(), direct.batch(5), direct.multi_last([f"{stream}.>"]))
            ends = await asyncio.gather(*(read.to_list() for read in reads), return_exceptions=True)
            assert [type(end) for end in ends] == [errors.RequestTimeoutError] * 3
