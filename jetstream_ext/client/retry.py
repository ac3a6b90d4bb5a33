"""The one retry policy: which errors are transient, how long to pause, when to give up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from typing import Final, TypeVar

import nats.errors
from nats.js.errors import APIError, NoStreamResponseError, ServiceUnavailableError

from jetstream_ext import errors
from jetstream_ext.client import telemetry
from jetstream_ext.client.base_connection import NotPermittedError
from jetstream_ext.text import get_logger, log_state

_T = TypeVar("_T")
_log = get_logger("client")

_NO_TIME: Final = 0.001
# Seconds. A shorter attempt would end with the error that it had no time, and not with what is wrong.
_SHORTEST_ATTEMPT: Final = 0.1
_LONGEST_PAUSE: Final = 0.5
# Seconds after the deadline for an attempt that ends in time by itself: its error says better what it waited for.
_GRACE: Final = 0.1

_TRANSIENT: Final = (
    errors.MessagesLostError,
    errors.BatchAbandonedError,
    errors.BatchOutcomeUnknownError,
    errors.AtomicPublishIncompleteError,
    NoStreamResponseError,
    nats.errors.TimeoutError,
    nats.errors.NoRespondersError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.StaleConnectionError,
)


def is_transient(error: BaseException) -> bool:
    """Return whether the same call may succeed later: no leader, connection or answer, or an overloaded server."""
    if isinstance(error, errors.PositionLostError | NotPermittedError):
        return False
    if isinstance(error, APIError):
        if error.err_code in errors.TRANSIENT_CODES or error.code == errors.Status.TOO_MANY_REQUESTS:
            return True
        # A 503 without a code of its own: no server answers. nats-py does not always set its `code`.
        if not error.err_code and (
            error.code == errors.Status.UNAVAILABLE or isinstance(error, ServiceUnavailableError)
        ):
            return True
    return isinstance(error, _TRANSIENT)


def has_no_leader(error: Exception) -> bool:
    """Return whether a server answered that there is no leader now; in an election, others may not answer at all."""
    return isinstance(error, errors.ServerError) and error.err_code == errors.ErrorCode.CLUSTER_UNAVAILABLE


def is_transient_read(error: BaseException) -> bool:
    """As `is_transient`, for direct gets from a stream that allows them: then all replicas are away if none answers."""
    return is_transient(error) or isinstance(error, errors.DirectGetDisabledError | errors.MirrorAnswersError)


def is_not_closed(error: BaseException) -> bool:
    """Return False if the connection is closed or draining; after any other error that is no refusal, `ingest` goes on."""
    return not isinstance(error, nats.errors.ConnectionClosedError | nats.errors.ConnectionDrainingError)


@dataclass(eq=False)
class Retry:
    """The pauses between the attempts of one operation, and their end.

    After `give_up_after` seconds without progress the next error is raised. An attempt of `attempt` ends then, too, so
    that an operation without an answer takes the timeout of its first attempt and `give_up_after`. Each pause is twice as
    long as the one before, up to half a second. `jitter` shortens each pause by a random part, so that competing writers do
    not retry in step. `transient` decides whether another attempt may succeed after an error.
    """

    give_up_after: float
    _: KW_ONLY
    first_pause: float = 0.02
    jitter: bool = False
    transient: Callable[[Exception], bool] = is_transient

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Record progress: the deadline and the pauses start again with the next error."""
        self._pause: float = self.first_pause
        self._deadline: float | None = None
        self._last: Exception | None = None

    def start(self) -> None:
        """Start the deadline now, not with the first error."""
        self._deadline = asyncio.get_running_loop().time() + self.give_up_after

    def extend(self, seconds: float) -> None:
        """Leave out the time in which there was no trouble."""
        if self._deadline is not None:
            self._deadline += seconds

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, at least a millisecond: the timeout of an attempt."""
        if self._deadline is None:
            return self.give_up_after
        return max(_NO_TIME, self._deadline - asyncio.get_running_loop().time())

    def within(self, timeout: float) -> float:
        """Return `timeout`, or once there is a deadline at most the seconds until then."""
        return timeout if self._deadline is None else min(timeout, self.remaining)

    @property
    def over(self) -> bool:
        """Whether another attempt could only time out, and would hide the reason."""
        return self.remaining <= _NO_TIME

    async def pause_if_transient(self, error: Exception) -> None:
        """Wait before the next attempt, or raise `error` if it is not transient or the deadline has passed."""
        if not self.transient(error):
            raise error
        await self.pause_until_deadline(error)

    async def pause_until_deadline(self, error: Exception) -> None:
        """Wait before the next attempt, or raise `error`, transient or not, if the deadline has passed."""
        now = asyncio.get_running_loop().time()
        if self._deadline is None:
            self._deadline = now + self.give_up_after
        if now >= self._deadline:
            raise error
        self._last = error
        pause = self._pause * random.random() if self.jitter else self._pause  # noqa: S311 - spreads load
        left = self._deadline - now
        pause = pause if pause + _SHORTEST_ATTEMPT < left else left
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        log_state(_log, "retry", "pause", error, seconds=round(pause, 3), error=error)
        await asyncio.sleep(pause)
        if self.over:
            raise error
        if telemetry.observer is not None:
            telemetry.observer.count(telemetry.Count.RETRIES, 1, error=type(error).__qualname__)

    async def attempt(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Return what `work` returns.

        Work that has not ended a little after the deadline is cancelled, and the error of the attempt before is raised.
        """
        try:
            async with asyncio.timeout_at(None if self._deadline is None else self._deadline + _GRACE) as limit:
                return await work()
        except Exception:
            if limit.expired():
                raise self._last or errors.RequestTimeoutError(f"timed out after {self.give_up_after:.4g} s") from None
            raise

    async def call(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Return what `work` returns; call it again after each transient error, until `give_up_after` has passed."""
        if self._deadline is None:
            self.start()
        while True:
            try:
                return await self.attempt(work)
            except Exception as error:
                await self.pause_if_transient(error)
