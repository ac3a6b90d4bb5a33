"""A caller's JetStream context: its connection, API prefix and timeout."""

from __future__ import annotations

from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.manager import JetStreamManager

from jetstream_ext.client.base_connection import BaseConnection
from jetstream_ext.client.connection import connection_of, jetstream_parts
from jetstream_ext.protocol.options import check_seconds
from jetstream_ext.protocol.subjects import check_subject


class Context:
    """The connection, the API prefix and the default timeout of nats-py's JetStream context `js`."""

    def __init__(self, js: JetStreamContext | JetStreamManager) -> None:
        if not isinstance(js, JetStreamManager):
            raise TypeError(f"expected a nats-py JetStream context (nc.jetstream()), not {type(js).__name__}")
        self.js = js
        self.nc: Client
        self.prefix: str
        self.timeout: float
        self.nc, self.prefix, self.timeout = jetstream_parts(js)
        check_subject(self.prefix)  # nats-py does not; a space in it makes the server close the connection

    def resolve_timeout(self, timeout: float | None, name: str = "timeout") -> float:
        """Return the context's own timeout for None; raises as `check_seconds` does."""
        return self.timeout if timeout is None else check_seconds(timeout, name)

    @property
    def connection(self) -> BaseConnection:
        return connection_of(self.nc)
