"""What can go wrong when a test asks for a server."""

__all__ = ["NatsServerError", "NatsServerNotFoundError", "NatsServerStartError"]


class NatsServerError(Exception):
    """Say why a test server cannot be used, and what to do about it."""


class NatsServerNotFoundError(NatsServerError):
    """Report that there is no nats-server binary, or that the version asked for cannot be installed."""


class NatsServerStartError(NatsServerError):
    """Report that a server process ended, or stayed silent, before it was ready; the text ends with its log."""
