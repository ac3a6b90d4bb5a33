"""How much the server takes on."""

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a server allows; the defaults are a real one's."""

    batch_messages: int = 1000
    atomic_per_stream: int = 50
    atomic_total: int = 1000
    fast_per_stream: int = 1000
    fast_total: int = 50_000
    batch_timeout: float = 10.0
    """Seconds without a message after which a batch is given up."""
