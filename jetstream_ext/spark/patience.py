"""What passes by itself, and how long a sink waits for it."""

from __future__ import annotations

from typing import Final

from jetstream_ext.client import retry
from jetstream_ext.errors import BatchError, JetStreamExtError, ServerError

# Seconds of trouble without anything getting through: an election, a restart.
PATIENCE: Final = 30.0


class SinkError(JetStreamExtError):
    """Rows could not be stored. Spark tries the task again."""


def passes(error: Exception) -> bool:
    """Return whether the same call may succeed a little later: no leader, no connection, no answer, too busy."""
    # A batch that ended for any other reason than the server's refusal is sent anew: its marker tells if it was stored.
    return retry.is_transient(error) or (isinstance(error, BatchError) and not isinstance(error, ServerError))


class Patience:
    """Waits between tries, and gives up.

    Args:
        what: What is being done, for the error.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._waits = retry.Retry(PATIENCE, transient=passes)

    def reset(self) -> None:
        """Note that something got through."""
        self._waits.reset()

    async def after(self, error: Exception) -> None:
        """Wait a little after `error`.

        Raises:
            SinkError: For too long nothing got through.
        """
        try:
            await self._waits.pause(error)
        except Exception as last:
            raise SinkError(f"{self._what}: nothing could be stored for {PATIENCE:g} s: {last}") from last
