"""Two domains that store the same subjects: publishing to one of them over a leaf node, when the other one answers too."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import nats
import nats.errors
import pytest
from client_cells import named
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.client import api
from jetstream_ext.testing import NatsServer

STREAMS = {"subjects": ["s.>"], "allow_direct": True, "allow_atomic": True, "allow_batched": True}
FULL = {"max_msgs": 1, "discard": "new"}
"""Of a stream that refuses nearly everything."""


class Domains:
    """The contexts of both domains, of a client of the leaf node."""

    def __init__(self, nc: Client) -> None:
        self.hub: JetStreamContext = nc.jetstream(domain="hub", timeout=20)
        self.leaf: JetStreamContext = nc.jetstream(domain="leaf", timeout=20)

    async def create(self, *, hub: dict[str, Any] | None, leaf: dict[str, Any] | None, leaf_name: str = "S") -> None:
        if hub is not None:
            await self.hub.add_stream(name="S", **STREAMS, **hub)
        if leaf is not None:
            await self.leaf.add_stream(name=leaf_name, **STREAMS, **leaf)
        # Every stream refuses this message, as soon as the leaf node has heard of it.
        nc, streams = self.hub._nc, (hub is not None) + (leaf is not None)
        async with asyncio.timeout(60):
            while await self._refusals(nc, streams) < streams:
                pass

    @staticmethod
    async def _refusals(nc: Client, enough: int) -> int:
        refusals = 0
        inbox = await nc.subscribe(nc.new_inbox())
        await nc.publish("s.probe", b"", reply=inbox.subject, headers={"Nats-Expected-Stream": "none"})
        with contextlib.suppress(nats.errors.TimeoutError):
            while refusals < enough:
                refusals += bool((await inbox.next_msg(timeout=1)).data)
        await inbox.unsubscribe()
        return refusals

    async def delete(self) -> None:
        """Delete all streams of both domains."""
        for js in (self.hub, self.leaf):
            for info in await js.streams_info():
                await js.delete_stream(str(info.config.name))

    async def stored(self) -> list[int]:
        """Return how many messages the streams of hub and leaf have."""
        counts: list[int] = []
        for js in (self.hub, self.leaf):
            names = [info.config.name for info in await js.streams_info()]
            counts += [(await js.stream_info(name)).state.messages for name in names if name is not None]
        return counts


@pytest.fixture
async def domains(leaf: NatsServer) -> AsyncIterator[Domains]:
    nc = await nats.connect(leaf.url, connect_timeout=10)
    domains = Domains(nc)
    async with asyncio.timeout(60):
        while True:
            try:
                await domains.delete()
                break
            except nats.errors.Error:  # the leaf node is not connected yet
                await asyncio.sleep(0.05)
    yield domains
    await nc.close()


async def atomic(js: JetStreamContext, **options: Any) -> Any:
    return await jsx.publish_atomic(js, [jsx.BatchMessage("s.a", b"%d" % n, **options) for n in range(3)])


async def fast(js: JetStreamContext, **options: Any) -> Any:
    async with jsx.FastPublisher(js, timeout=js._timeout) as publisher:
        await publisher.add_many([jsx.BatchMessage("s.a", b"%d" % n, **options) for n in range(3)])
    return publisher.ack


async def ingest(js: JetStreamContext, **options: Any) -> Any:
    return await jsx.ingest(js, [jsx.BatchMessage("s.a", b"%d" % n, **options) for n in range(3)], patience=5)


Call = Callable[..., Awaitable[Any]]
CALLS: list[Call] = [atomic, fast, ingest]


async def test_the_ack_of_the_stream_of_the_own_domain_is_returned(domains: Domains) -> None:
    await domains.create(hub={"first_seq": 1000}, leaf={})
    for number, call in enumerate(CALLS * 5, 1):
        done = await call(domains.hub)
        assert isinstance(done, jsx.IngestReport) or (done.domain, done.seq) == ("hub", 999 + 3 * number)
    assert (await domains.stored())[0] == 45
    ack = await jsx.publish_atomic(
        domains.leaf._nc.jetstream(timeout=20), [("s.a", b"")]
    )  # no domain: any ack is right
    assert ack.domain in ("hub", "leaf")


async def test_the_refusal_of_a_stream_of_another_name_is_ignored(domains: Domains) -> None:
    await domains.create(hub={}, leaf={}, leaf_name="LOCAL")
    for call in CALLS:
        await call(domains.hub, stream="S")
    assert await domains.stored() == [9, 0]


async def test_what_only_another_domain_stores_is_no_success(domains: Domains) -> None:
    await domains.create(hub=None, leaf={})
    js = domains.hub._nc.jetstream(domain="hub", timeout=6)
    for error in await asyncio.gather(*(call(js) for call in CALLS), return_exceptions=True):
        assert isinstance(error, errors.BatchError | errors.IngestError)
        assert getattr(error, "outcome", "unknown") == "unknown"
        assert getattr(error, "in_doubt", 3) == 3
        assert "stream 'S' of domain 'leaf' has answered, not domain 'hub'" in str(error)
    assert await domains.stored() == [9]


async def test_a_batch_that_only_another_domain_takes_is_no_success(domains: Domains) -> None:
    for call in CALLS:
        with named(call=call):
            await domains.delete()
            await domains.create(hub=FULL, leaf={})
            with pytest.raises((errors.BatchError, errors.IngestError)) as caught:
                await call(domains.hub)
            (hub, _) = await domains.stored()
            report = getattr(caught.value, "report", None)
            assert report is None or report.stored <= hub


async def test_a_refusal_that_may_be_of_another_domain_leaves_the_outcome_unknown(
    domains: Domains, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unknown(*_: object) -> None:
        return None

    monkeypatch.setattr(api, "lookup_stream", unknown)  # as without the permission to ask
    await domains.create(hub=None, leaf={}, leaf_name="LOCAL")
    for call in CALLS:
        with named(call=call):
            with pytest.raises((errors.BatchError, errors.IngestError)) as caught:
                await call(domains.hub, stream="S")
            assert "a stream of another domain than 'hub' may have refused it, which stores the subject as well" in str(
                caught.value
            )
            assert getattr(caught.value, "outcome", "unknown") == "unknown"
            # The server acknowledges the first message before it refuses it: the others may have followed it.
            assert getattr(caught.value, "in_doubt", 1) in (1, 3)
            # The context's own domain, and a context without one, know whose refusal it is.
            for js in (domains.leaf, domains.hub._nc.jetstream(timeout=20)):
                with pytest.raises((errors.BatchError, errors.IngestError), match=r"nothing (of the batch )?is stored"):
                    await call(js, stream="S")
