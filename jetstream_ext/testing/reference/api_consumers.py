"""The API of consumers."""

from __future__ import annotations

from .api import Route
from .versions import Profile

__all__ = ["routes"]


def routes(profile: Profile) -> dict[tuple[str, ...], Route]:
    """Return the requests that a release knows."""
    return {}
