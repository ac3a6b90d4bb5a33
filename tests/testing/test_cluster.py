"""`NatsCluster` with real processes."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats.errors
import nats.js.errors
import pytest

from jetstream_ext.testing import NatsCluster, NatsServerStartError
from jetstream_ext.testing import cluster as module

sys.path.insert(0, str(Path(__file__).parent))

from clients import connected
from probes import refused


def test_cluster_elects_a_leader(cluster: NatsCluster) -> None:
    assert len(cluster.servers) == 3
    assert cluster.wait_ready() in cluster.servers
    assert cluster.urls == [server.url for server in cluster.servers]
    assert cluster.url in cluster.urls


async def test_stream_with_three_replicas_can_be_created_at_once() -> None:
    async with NatsCluster(config="max_payload: 2048") as cluster, connected(cluster.urls) as nc:
        await nc.jetstream(timeout=30).add_stream(name="S", subjects=["s"], num_replicas=3)
        assert nc.max_payload == 2048


async def test_a_cluster_that_gives_a_server_no_stream_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a moment after the start: three servers cannot hold four replicas."""
    trial_config = module._trial_config
    with NatsCluster() as cluster:
        monkeypatch.setattr(module, "_trial_config", lambda _: trial_config(4))
        with pytest.raises(NatsServerStartError, match="or not all its servers take streams, after 1 s"):
            cluster.wait_ready(timeout=1)
        monkeypatch.undo()
        cluster.wait_ready()
        async with connected(cluster.url) as nc:
            assert await nc.jetstream(timeout=30).streams_info() == []


async def test_a_cluster_that_asks_for_a_password_is_ready() -> None:
    with NatsCluster(2, config="authorization { user: u, password: p }") as cluster:
        assert cluster.wait_ready() in cluster.servers


def test_a_cluster_whose_clients_may_not_ask_jetstream_is_ready() -> None:
    no_jetstream = "users: [{user: a, password: a}]"
    no_permission = "jetstream: enabled, users: [{user: a, password: a, permissions: {publish: [x]}}]"
    for account in (no_jetstream, no_permission):
        config = f"accounts {{ A {{ {account} }} }}\nno_auth_user: a"
        with NatsCluster(2, config=config) as cluster:
            assert cluster.wait_ready() in cluster.servers, account


async def test_stream_with_three_replicas_survives_a_kill(
    cluster: NatsCluster, stream_name: Callable[[], str], wait_for_interest: Any
) -> None:
    name = stream_name()
    async with connected(cluster.urls) as nc:
        js = nc.jetstream(timeout=30)
        await js.add_stream(name=name, subjects=[name], num_replicas=3)
        await wait_for_interest(js, name)
        await js.publish(name, b"kept")
        victim = cluster.wait_ready()
        victim.kill()
        assert cluster.wait_ready() is not victim
        assert cluster.url != victim.url
        async with asyncio.timeout(60):
            while True:
                try:
                    await js.publish(name, b"after", timeout=1)
                    break
                except (nats.errors.Error, nats.js.errors.Error):
                    pass  # the stream elects a leader of its own, some time after the meta group
            assert (await js.get_msg(name, 1)).data == b"kept"
    victim.restart()
    cluster.wait_ready()


def test_cluster_without_a_leader_is_reported() -> None:
    with NatsCluster(2) as cluster:
        cluster.servers[1].kill()
        with pytest.raises(NatsServerStartError, match=r"cluster of 2 has no JetStream leader, (?s:.*)killed"):
            cluster.wait_ready(timeout=0.5)


async def test_cluster_survives_kill_and_pause_of_all_servers(wait_for_interest: Any) -> None:
    with NatsCluster() as cluster:
        async with connected(cluster.url) as nc:
            js = nc.jetstream(timeout=10)
            await js.add_stream(name="KEPT", subjects=["kept"], num_replicas=3)
            await wait_for_interest(js, "kept")
            await js.publish("kept", b"kept")
        await asyncio.to_thread(cluster.kill)
        assert not any(server.running for server in cluster.servers)
        await asyncio.to_thread(cluster.restart)
        await asyncio.to_thread(cluster.pause)
        assert not any(server.running for server in cluster.servers)
        await asyncio.to_thread(cluster.resume)
        await asyncio.to_thread(cluster.wait_ready)
        async with connected(cluster.url) as nc, asyncio.timeout(60):
            while True:
                try:
                    assert (await nc.jetstream(timeout=1).get_msg("KEPT", 1)).data == b"kept"
                    break
                except (nats.errors.Error, nats.js.errors.Error):
                    await asyncio.sleep(0.1)  # the stream elects a leader of its own


def test_cluster_that_cannot_start_leaves_no_process() -> None:
    cluster = NatsCluster(config="no_such_option: 1")
    with pytest.raises(NatsServerStartError, match="no_such_option"):
        cluster.start()
    with pytest.raises(RuntimeError, match="not started"):
        cluster.servers  # noqa: B018


def test_stopped_cluster_can_be_started_again() -> None:
    cluster = NatsCluster(2)
    with cluster:
        urls = cluster.urls
        with pytest.raises(RuntimeError, match="already started"):
            cluster.start()
    assert all(refused(url) for url in urls)
    cluster.stop()
    with cluster:
        assert cluster.wait_ready().running


def test_cluster_of_one_server_is_refused() -> None:
    assert "NatsCluster" in repr(NatsCluster(2))
    with pytest.raises(ValueError, match="NatsServer"):
        NatsCluster(1)
