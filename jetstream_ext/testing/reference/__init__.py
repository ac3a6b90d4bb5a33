"""A NATS server with JetStream as a state machine, and a TCP server around it.

`Engine` is the state machine: commands in, outputs out, with the time as an argument. `ReferenceServer` puts it on a port.
Neither shares code with the client side of this package: both were written from the ADRs and from observations of real
servers, independently, so that a mistake of one does not hide a mistake of the other.

Where to look, from the highest layer to the lowest:

* `server`: the TCP server, and the clocks.
* `engine`: the state machine: connections and commands.
* `api`: the JSON API. `faults`: fault plans, and how they are applied.
* `jetstream`: all streams, each with its consumers, batches and copies. `sourcing`: mirrors and sources.
* `consumers`: positions, acknowledgements, redelivery, pull and push.
* `atomic`, `fast`: the two kinds of batches, and what a gap does to a fast batch.
* `streams`: configuration, checks of published messages, storage, limits, retention, expiry, Direct Get.
* `context`: the state that all parts share. `router`: core NATS.
* `releases`: where the modelled releases of nats-server differ.
* `wire`: the client protocol, header blocks, subjects, the texts of Go (JSON, times), error codes.
"""

from .context import Limits
from .engine import Engine
from .faults import (
    ChangeLeader,
    Cut,
    Delay,
    Drop,
    Duplicate,
    Faults,
    Ignore,
    Lose,
    Overload,
    Reorder,
    Rule,
    StaleReplica,
    Stall,
    Unavailable,
)
from .releases import Profile
from .server import ReferenceServer, VirtualClock

__all__ = [
    "ChangeLeader",
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
    "Profile",
    "ReferenceServer",
    "Reorder",
    "Rule",
    "StaleReplica",
    "Stall",
    "Unavailable",
    "VirtualClock",
]


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
