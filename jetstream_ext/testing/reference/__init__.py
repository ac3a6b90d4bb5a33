"""A NATS server with JetStream as a state machine, and a TCP server around it.

`Engine` is the state machine: commands in, outputs out, with the time as an argument. `ReferenceServer` puts it on a port.
Neither shares code with the client side of this package: both were written from the ADRs and from observations of real
servers, independently, so that a mistake of one does not hide a mistake of the other.

From the lowest layer to the highest:

* `wire`: the client protocol, header blocks, subjects, JSON, times, error codes.
* `releases`: where the modelled releases of nats-server differ.
* `router`, `context`: core NATS, and the state that all parts of the server share.
* `streams`: stored messages, limits, retention, expiry, Direct Get.
* `publishing`: checks of published messages, single messages, atomic batches, fast batches with their gaps.
* `consumers`: positions, acknowledgements, redelivery, pull and push.
* `sourcing`, `jetstream`: mirrors and sources; everything that belongs to one stream, and all streams.
* `api`: the JSON API.
* `faults`: fault plans.
* `engine`, `server`, `clock`: the state machine, the TCP server, and its sources of time.
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
