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

from .clock import Clock as Clock
from .clock import SystemClock as SystemClock
from .clock import VirtualClock as VirtualClock
from .context import Limits as Limits
from .engine import Engine as Engine
from .faults.rules import ChangeLeader as ChangeLeader
from .faults.rules import Cut as Cut
from .faults.rules import Delay as Delay
from .faults.rules import Drop as Drop
from .faults.rules import Duplicate as Duplicate
from .faults.rules import Faults as Faults
from .faults.rules import Ignore as Ignore
from .faults.rules import Lose as Lose
from .faults.rules import Overload as Overload
from .faults.rules import Reorder as Reorder
from .faults.rules import Rule as Rule
from .faults.rules import StaleReplica as StaleReplica
from .faults.rules import Stall as Stall
from .faults.rules import Unavailable as Unavailable
from .releases import Profile as Profile
from .router import Permissions as Permissions
from .router import User as User
from .server import ReferenceServer as ReferenceServer

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
