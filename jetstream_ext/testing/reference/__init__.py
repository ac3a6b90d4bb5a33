"""A NATS server with JetStream as a pure machine, and a loopback shell around it.

`Engine` is the machine: commands in, outputs out, time and random numbers as arguments. `ReferenceServer`
puts it on a port. Neither shares any code with the client side of this package: both were read out of the
ADRs and real servers separately, so that one's mistake is not the other's assumption.
"""

from .clock import Clock as Clock
from .clock import SystemClock as SystemClock
from .clock import VirtualClock as VirtualClock
from .connections import Permissions as Permissions
from .connections import User as User
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
from .limits import Limits as Limits
from .shell import ReferenceServer as ReferenceServer
from .versions import Profile as Profile

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
