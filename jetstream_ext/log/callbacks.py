"""The options of a member of a group, and the calls of its callbacks."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from jetstream_ext.errors import FencedError
from jetstream_ext.protocol.options import check_bool, check_function, check_int, check_seconds
from jetstream_ext.text import get_logger, log_state

Callback = Callable[[tuple[int, ...]], Awaitable[None] | None]

_log = get_logger("log")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """What a member was asked to do; see `Group.join`."""

    label: str | None = None
    on_assigned: Callback | None = None
    on_revoked: Callback | None = None
    on_partitions_lost: Callback | None = None
    auto_commit: bool = True
    every: int = 1000
    seconds: float = 5.0
    revoke_timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.label is not None and not (isinstance(self.label, str) and self.label.isprintable() and self.label):
            raise ValueError(f"label must be printable text, not {self.label!r}")
        for name in ("on_assigned", "on_revoked", "on_partitions_lost"):
            if (given := getattr(self, name)) is not None:
                check_function(given, name, "a function or None")
        check_bool(self.auto_commit, "auto_commit")
        check_int(self.every, "every")
        check_seconds(self.seconds, "seconds")
        check_seconds(self.revoke_timeout, "revoke_timeout")

    def limit(self) -> asyncio.Timeout:
        """Return the time that a step of a hand-over may take from now on."""
        seconds = self.revoke_timeout
        return asyncio.timeout(None if seconds == math.inf else seconds)


class Callbacks:
    """The callbacks of one member. Hold `lock` around each call: they are called one after the other."""

    def __init__(self, group: str) -> None:
        self.lock: asyncio.Lock = asyncio.Lock()
        self._group = group
        self._running: tuple[asyncio.Task[Any] | None, tuple[int, ...]] = None, ()

    @property
    def partitions_here(self) -> tuple[int, ...]:
        """The partitions of the callback that calls this; none for another caller."""
        task, partitions = self._running
        return partitions if task is asyncio.current_task() else ()

    async def call(self, callback: Callback | None, partitions: tuple[int, ...]) -> None:
        """Call one of them, unless there are no partitions. That its commit was refused does not end the member."""
        if callback is None or not partitions:
            return
        self._running = asyncio.current_task(), partitions
        try:
            result = callback(partitions)
            if inspect.isawaitable(result):
                await result
        except FencedError as error:
            if error.name != self._group:
                raise
            log_state(_log, f"group {self._group!r}", "commit refused in a callback", error)
        finally:
            self._running = None, ()
