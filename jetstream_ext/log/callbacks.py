"""The options of a member of a group, and the calls of its callbacks."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from jetstream_ext.errors import FencedError
from jetstream_ext.protocol.options import check_function, check_int, check_seconds
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
        if not isinstance(self.auto_commit, bool):
            raise TypeError(f"auto_commit must be True or False, not {self.auto_commit!r}")
        check_int(self.every, "every")
        check_seconds(self.seconds, "seconds")
        check_seconds(self.revoke_timeout, "revoke_timeout")

    def deadline(self) -> float | None:
        """Return until when what begins now may take `revoke_timeout`, by the loop's clock; None: indefinitely."""
        return None if self.revoke_timeout == math.inf else asyncio.get_running_loop().time() + self.revoke_timeout


class Callbacks:
    """The callbacks of one member. Hold `lock` around each call: they are called one after the other.

    Attributes:
        committable: Of the callback that runs: the partitions that it may commit; None is all that the member has.
        refused: The error of its last commit.
    """

    def __init__(self, options: JoinOptions, member: str) -> None:
        self.lock: asyncio.Lock = asyncio.Lock()
        self.committable: tuple[int, ...] | None = None
        self.refused: FencedError | None = None
        self._options = options
        self._member = member
        self._task: asyncio.Task[Any] | None = None  # runs one of them

    @property
    def is_running_here(self) -> bool:
        """Whether the caller is a callback of this member."""
        return self._task is not None and self._task is asyncio.current_task()

    async def assigned(self, partitions: tuple[int, ...]) -> None:
        """Call `on_assigned`, which may take its time, but is said to."""
        loop, seconds = asyncio.get_running_loop(), self._options.revoke_timeout
        text = "%s: on_assigned has not returned for %g s; partitions %s wait for it"
        warn = partial(_log.warning, text, self._member, seconds, partitions)
        warning = None if seconds == math.inf else loop.call_later(seconds, warn)
        try:
            await self._call(self._options.on_assigned, partitions, committable=None)
        finally:
            if warning is not None:
                warning.cancel()

    async def revoked(self, partitions: tuple[int, ...]) -> None:
        """Call `on_revoked`; the caller limits the time."""
        await self._call(self._options.on_revoked, partitions, committable=partitions)

    async def lost(self, partitions: tuple[int, ...]) -> None:
        """Call what is to be called for lost partitions, for up to `revoke_timeout`."""
        limit = asyncio.timeout_at(self._options.deadline())
        try:
            async with limit:
                callback = self._options.on_partitions_lost or self._options.on_revoked
                await self._call(callback, partitions, committable=partitions)
        except TimeoutError:
            if not limit.expired():
                raise
            _log.warning(
                "%s: the callback for the lost partitions %s was cancelled, because it had not returned after %g s",
                self._member,
                partitions,
                self._options.revoke_timeout,
            )

    async def _call(
        self, callback: Callback | None, partitions: tuple[int, ...], *, committable: tuple[int, ...] | None
    ) -> None:
        """Call one of them. That a commit in it was refused because of lost partitions does not end the member."""
        if callback is None or not partitions:
            return
        self._task, self.committable = asyncio.current_task(), committable
        try:
            result = callback(partitions)
            if inspect.isawaitable(result):
                await result
        except FencedError as error:
            if error is not self.refused:
                raise
            log_state(_log, self._member, "commit refused in a callback", error)
        finally:
            self._task = self.refused = None
