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
from .limits import Limits as Limits
from .shell import ReferenceServer as ReferenceServer
from .versions import Profile as Profile

__all__ = [
    "Clock",
    "Engine",
    "Limits",
    "Permissions",
    "Profile",
    "ReferenceServer",
    "SystemClock",
    "User",
    "VirtualClock",
]
