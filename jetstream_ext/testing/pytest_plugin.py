"""Fixtures with NATS servers. pytest finds them wherever this package is installed.

The plugin does nothing until a test uses one of its fixtures. With ``PYTEST_DISABLE_PLUGIN_AUTOLOAD``, opt in with
``-p jetstream_ext.testing.pytest_plugin`` or ``pytest_plugins = ["jetstream_ext.testing.pytest_plugin"]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # pytest imports this module at each start
    from .cluster import NatsCluster
    from .reference import ReferenceServer
    from .server import NatsServer

__all__ = ["nats_cluster", "nats_server", "reference_server"]


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    """Run one nats-server with JetStream for the whole test session.

    All tests share it, so give each test its own names of streams and buckets. A test that kills or pauses a server must
    start its own.
    """
    from .server import NatsServer

    with NatsServer() as server:
        yield server


@pytest.fixture(scope="session")
def nats_cluster() -> Iterator[NatsCluster]:
    """Run one cluster of three nats-servers with JetStream for the whole test session; tests share it as well."""
    from .cluster import NatsCluster

    with NatsCluster() as cluster:
        yield cluster


@pytest.fixture
def reference_server() -> Iterator[ReferenceServer]:
    """Run an empty reference server for one test; `reference_server.faults.add(...)` adds faults."""
    from .reference import ReferenceServer

    with ReferenceServer() as server:
        yield server
