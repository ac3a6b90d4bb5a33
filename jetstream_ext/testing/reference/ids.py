"""Names that the server makes up, from the engine's own random numbers."""

from random import Random

__all__ = ["nuid", "server_id", "short"]

_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_BASE32 = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"


def nuid(random: Random) -> str:
    """Return 22 letters and digits."""
    return "".join(random.choices(_DIGITS, k=22))


def short(random: Random) -> str:
    """Return 8 letters and digits, as in the names of ephemeral consumers."""
    return "".join(random.choices(_DIGITS, k=8))


def server_id(random: Random) -> str:
    """Return an id in the form of a server's public key."""
    return "N" + "".join(random.choices(_BASE32, k=55))
