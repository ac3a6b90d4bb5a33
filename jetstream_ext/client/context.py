"""A caller's JetStream context, with what this library needs of it."""

from __future__ import annotations

from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.manager import JetStreamManager

from jetstream_ext.client.base_connection import BaseConnection
from jetstream_ext.client.connection import connection_of, jetstream_parts
from jetstream_ext.protocol.subjects import check_subject


class Context:
    """The connection, the API prefix and the default timeout of a JetStream context.

    Raises:
        TypeError: `js` is not a nats-py JetStream context.
        BadSubjectError: Its prefix or domain cannot be part of a subject.
    """

    def __init__(self, js: JetStreamContext | JetStreamManager) -> None:
        if not isinstance(js, JetStreamManager):
            raise TypeError(f"expected a nats-py JetStream context (nc.jetstream()), not {type(js).__name__}")
        self.js = js
        self.nc: Client
        self.prefix: str
        self.timeout: float
        self.nc, self.prefix, self.timeout = jetstream_parts(js)
        check_subject(self.prefix)  # nats-py takes any prefix; one with a space makes the server close the connection

    @property
    def connection(self) -> BaseConnection:
        """The access to the client connection's bytes; the same object for every caller."""
        return connection_of(self.nc)
