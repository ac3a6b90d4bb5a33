"""A NATS server with JetStream as a state machine, and a TCP server around it.

`Engine` is the state machine: commands in, outputs out, with the time as an argument. `ReferenceServer` puts it on a port.
Neither shares code with the client side of this package: both were written from the ADRs and from observations of real
servers, independently, so that a mistake of one does not hide a mistake of the other.

Where to look, from the highest layer to the lowest:

* `server`: the TCP server, and the clocks.
* `engine`: the state machine: connections, logins and commands.
* `api`: the JSON API. `faults`: fault plans, and how they are applied.
* `jetstream`: all streams, each with its consumers, batches and copies. `sourcing`: mirrors and sources.
* `consumers`: positions, acknowledgements, redelivery, pull and push.
* `atomic`, `fast`: the two kinds of batches, and what a gap does to a fast batch.
* `streams`: configuration, checks of published messages, storage, limits, retention, expiry, Direct Get.
* `context`: the state that all parts share. `router`: core NATS.
* `releases`: where the modelled releases of nats-server differ.
* `wire`: the client protocol, header blocks, subjects, the texts of Go (JSON, times), error codes.
"""

from .context import Limits as Limits
from .engine import Engine as Engine
from .faults import ChangeLeader as ChangeLeader
from .faults import Cut as Cut
from .faults import Delay as Delay
from .faults import Drop as Drop
from .faults import Duplicate as Duplicate
from .faults import Faults as Faults
from .faults import Ignore as Ignore
from .faults import Lose as Lose
from .faults import Overload as Overload
from .faults import Reorder as Reorder
from .faults import Rule as Rule
from .faults import StaleReplica as StaleReplica
from .faults import Stall as Stall
from .faults import Unavailable as Unavailable
from .releases import Profile as Profile
from .router import Permissions as Permissions
from .router import User as User
from .server import Clock as Clock
from .server import ReferenceServer as ReferenceServer
from .server import SystemClock as SystemClock
from .server import VirtualClock as VirtualClock

__all__ = [
    "ChangeLeader",
    "Clock",
    "Cut",
    "Delay",
    "Drop",
    "Duplicate",
    "Engine",
    "Faults",
    "Ignore",
    "Limits",
    "Lose",
    "Overload",
    "Permissions",
    "Profile",
    "ReferenceServer",
    "Reorder",
    "Rule",
    "StaleReplica",
    "Stall",
    "SystemClock",
    "Unavailable",
    "User",
    "VirtualClock",
]
