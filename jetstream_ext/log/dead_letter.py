"""Dead letters: inputs whose handler fails again and again, stored aside with their origin and error."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import nats.errors
from nats.js.errors import APIError

from jetstream_ext.errors import (
    BadHeaderError,
    MaxPayloadError,
    RequestTimeoutError,
    ServerError,
    batch_refusal,
    server_error,
)
from jetstream_ext.protocol.dead_letters import describe, is_too_large, letter_versions, one_line
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.options import check_int, check_seconds
from jetstream_ext.protocol.records import Failed
from jetstream_ext.protocol.subjects import check_subject
from jetstream_ext.text import counted, get_logger, log_state

_log = get_logger("log")

_MOST_ATTEMPTS: Final = 1 << 30
# Bytes of an error: in the log, and in a record.
_LONGEST_LOGGED, _LONGEST_NOTED = 1024, 200


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Where an input is stored whose handler fails, and after how many attempts.

    Args:
        subject: The dead letters' subject, without wildcards: one of the output stream's, or for `Member.run` of any stream.
            Nothing else belongs there.
        attempts: How often the handler may fail for one input, from 1.
        backoff: Seconds before the next attempt: a number, or one for each attempt, of which the last one repeats. Kept as
            a tuple.

    Raises:
        BadSubjectError: `subject` is not one that messages can be published to.
        ValueError, TypeError: A number is out of range, or of another type.
    """

    subject: str
    attempts: int = 5
    backoff: float | Sequence[float] = (1.0, 2.0, 5.0, 10.0, 30.0)

    def __post_init__(self) -> None:
        check_subject(self.subject)
        check_int(self.attempts, "attempts", high=_MOST_ATTEMPTS)
        given: Any = self.backoff
        if isinstance(given, str | bytes) or not isinstance(given, Sequence):
            given = (given,)
        pauses = tuple(check_seconds(pause, "backoff", zero=True) for pause in given)
        if not pauses or not all(map(math.isfinite, pauses)):
            raise ValueError(f"backoff must be a finite number of seconds, or a sequence of them, not {self.backoff!r}")
        object.__setattr__(self, "backoff", pauses)

    def pause_after(self, attempts: int) -> float:
        """Return the seconds between a failed attempt, counted from 1, and the next one."""
        assert isinstance(self.backoff, tuple)
        return float(self.backoff[min(attempts, len(self.backoff)) - 1])


def check_dead_letter(given: object) -> None:
    """Raise TypeError unless it is a `DeadLetter` or None."""
    if not isinstance(given, DeadLetter | None):
        raise TypeError(f"dead_letter must be a DeadLetter or None, not {type(given).__name__}")


async def after_failure(
    dead_letter: DeadLetter,
    message: StoredMsg,
    error: BaseException,
    known: Failed | None,
    *,
    what: str,
    worker: str,
    note: Callable[[Failed], Awaitable[object]],
    send: Callable[[bytes, dict[str, str]], Awaitable[Exception | None]],
    stopping: asyncio.Event,
) -> bool:
    """Note a failed attempt to handle a message, and pause; or after the last one store its dead letter.

    `known` are the attempts that are stored, perhaps of another message, and `note` stores them. `send` stores a dead letter with
    a payload and headers, or returns why it is refused. `stopping` ends the pause.

    Returns:
        Whether the dead letter is stored. If not, the message is to be handled again, unless `stopping` is set.

    Raises:
        Exception: Even the smallest dead letter cannot be stored.
    """
    attempts = known.attempts + 1 if known is not None and known.seq == message.seq else 1
    text, subject = describe(error), dead_letter.subject
    if attempts < dead_letter.attempts:
        await note(Failed(message.seq, attempts, one_line(text, _LONGEST_NOTED)))
        pause = dead_letter.pause_after(attempts)
        log_state(_log, what, "input failed", seq=message.seq, attempts=attempts, seconds=pause, error=error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await stopping.wait()
        return False
    what = f"{what}: input {message.seq} of stream {message.stream!r}"
    tried, refused = counted(attempts, "attempt"), None
    for data, headers in letter_versions(message, attempts=attempts, error=text, worker=worker):
        if refused is not None and not is_too_large(refused):
            break
        refused = await send(data, headers)
        if refused is None:
            shown = one_line(text, _LONGEST_LOGGED)
            _log.warning("%s was stored as a dead letter on %r after %s: %s", what, subject, tried, shown)
            return True
    assert refused is not None
    failure = _refusal(
        refused,
        f"{what} failed ({tried}: {one_line(text, _LONGEST_NOTED)}), and cannot be stored as a dead letter on {subject!r}: {refused}; "
        "the input stays at the position",
    )
    raise failure from (None if failure is refused else refused)


def _refusal(error: Exception, text: str) -> Exception:
    """Return an error of the same kind with another text."""
    if isinstance(error, APIError) and error.err_code:
        if not isinstance(error, ServerError):
            error = server_error(code=error.code, err_code=error.err_code, description=error.description or "")
        return batch_refusal(error, text, outcome="not_stored")
    if isinstance(error, MaxPayloadError | BadHeaderError):
        return type(error)(text)
    if isinstance(error, nats.errors.TimeoutError | APIError):
        return RequestTimeoutError(f"{text}; the dead letter may be stored")
    error.add_note(text)
    return error
