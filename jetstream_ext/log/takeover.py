"""The courtesy between workers of one name that a supervisor restarts: they do not stop each other without end.

Two replicas that are restarted whenever they are fenced would take over from each other in turns. Therefore every worker
subscribes to an inbox and names it in its records, and a worker that takes over from a live one (no server answers "no
responders" for the inbox) writes the time of the take-over into its records. The next worker waits while that time is less
than `TAKEOVER_PAUSE` ago and the inbox has its subscriber. Times are those of the output stream's leader. A record without
an inbox (an empty one) is that of a partition's worker in a group, where the members decide who works: it may be taken over.

Whoever may publish on the record's subject can write any inbox into it. A worker therefore sends only to what is an inbox
by nats's conventions (see `_is_inbox`), and takes another worker for alive that names anything else. Two messages go there:
an empty request, and `_YIELD`, after which the receiver stores nothing for `_YIELD_SECONDS`, so that a claim from far away
is not refused again and again because the receiver commits in every round trip. A forged `_YIELD` only delays a commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from functools import partial
from typing import Final

import nats.errors
import orjson

from jetstream_ext.client.api import stream_state
from jetstream_ext.client.base_connection import InboxHandler, InboxSubscription
from jetstream_ext.client.connection import Context
from jetstream_ext.client.retry import Retry
from jetstream_ext.errors import RequestTimeoutError
from jetstream_ext.protocol import frames
from jetstream_ext.text import get_logger, log_state

_log = get_logger("log")

TAKEOVER_PAUSE: Final = 30.0
"""Seconds after a take-over from a live worker in which the next worker waits, if the one that took over is alive."""
# Seconds without the answer "no responders" after which the subscriber of an inbox counts as alive.
_ALIVE_AFTER: Final = 1.0
# A literal subject that is no system's, with an id in the end as nats-py, nats.go and others write it.
_INBOX: Final = re.compile(r"(?!\$)(?:[^\s.*>]+\.)+[0-9A-Za-z]{22}")
_LONGEST_INBOX: Final = 256
_YIELD: Final = b"yield"
_YIELD_SECONDS: Final = 5.0


class Takeover:
    """What one start of a worker knows about the worker before it; `stream` is the output stream.

    Attributes:
        inbox: Where other workers of the name reach this one; its subscription shows that this one is alive.
        took_over: When it took over from a live worker, in seconds since 1970; 0: it did not.
    """

    def __init__(self, context: Context, stream: str, *, name: str, timeout: float, patience: float) -> None:
        self.inbox: str = ""
        self.took_over: int = 0
        self._context = context
        self._stream = stream
        self._source = f"worker {name!r}"  # for the log
        self._timeout = timeout
        self._patience = patience
        self._subscription: InboxSubscription | None = None
        self._yield_until = 0.0  # by the loop's clock: another worker is about to take over
        self._other: str | None = None  # the inbox of the worker whose record is the newest
        self._may_take_over_now = False
        self._patient_until = 0.0

    async def open(self) -> None:
        """Subscribe to the inbox; `close` ends that."""
        connection = self._context.connection
        handler = InboxHandler(frames=self._asked, disconnected=lambda: None)
        self._subscription = await Retry(self._patience).call(lambda: connection.inbox(handler, timeout=self._timeout))
        self.inbox = self._subscription.subject

    def close(self) -> None:
        if self._subscription is not None:
            self._subscription.close()

    async def ask(self, record: bytes) -> bool:
        """Ask the worker with the newest record whether it is alive, unless it may be taken over.

        Returns:
            True if it was asked, which takes a while: read the record again. False if it may be taken over.
        """
        body = orjson.loads(record)
        inbox, took_over = body.get("inbox"), body.get("took_over")
        if not isinstance(inbox, str) or type(took_over) is not int:
            return False  # a record of an earlier version
        if inbox != self._other:
            self._other, self._may_take_over_now = inbox, not inbox
            self._patient_until = asyncio.get_running_loop().time() + TAKEOVER_PAUSE
            self.took_over = 0
        if self._may_take_over_now:
            return False
        self._may_take_over_now = (
            await self._may_take_over(inbox, took_over) or asyncio.get_running_loop().time() >= self._patient_until
        )
        return True

    def ask_to_yield(self) -> None:
        """Ask the worker with the newest record to store nothing for a moment."""
        if self._other is not None and _is_inbox(self._other, self.inbox):
            with contextlib.suppress(nats.errors.Error):  # then the next attempt finds out
                request = frames.pub(self._other.encode(), b"", b"", _YIELD)
                self._context.connection.write_nowait(request, 1, len(_YIELD))

    async def make_room(self) -> None:
        """Wait while another worker has asked this one to."""
        await asyncio.sleep(max(0.0, self._yield_until - asyncio.get_running_loop().time()))

    async def _may_take_over(self, inbox: str, took_over: int) -> bool:
        """Return False, after a second, if the worker with this inbox is alive and took over a moment ago."""
        self.took_over = 0
        if not await Retry(self._patience).call(partial(self._is_alive, inbox)):
            return True
        look = partial(stream_state, self._context, self._stream, self._timeout)
        self.took_over = int((await Retry(self._patience).call(look)).now.timestamp())
        if self.took_over - took_over >= TAKEOVER_PAUSE:
            log_state(_log, self._source, "takes over", "from a worker that is alive")
            return True
        log_state(_log, self._source, "waits", "another worker of its name has just taken over")
        return False

    async def _is_alive(self, inbox: str) -> bool:
        if not _is_inbox(inbox, self.inbox):
            await asyncio.sleep(_ALIVE_AFTER)
            return True
        with contextlib.suppress(RequestTimeoutError):
            try:
                await self._context.connection.request(inbox, b"", _ALIVE_AFTER)
            except nats.errors.NoRespondersError:
                return False
        return True

    def _asked(self, given: list[frames.Frame]) -> None:
        if any(len(data) > header_size for _, data, header_size in given):  # only `_YIELD` is not empty
            self._yield_until = asyncio.get_running_loop().time() + _YIELD_SECONDS
            log_state(
                _log, self._source, "makes room", "another worker of its name asks for it", seconds=_YIELD_SECONDS
            )


def _is_inbox(subject: str, own: str) -> bool:
    """Return whether `subject` is an inbox by nats's conventions: its prefix is `own`'s, or begins with ``_INBOX``."""
    if len(subject) > _LONGEST_INBOX or not subject.isascii() or not subject.isprintable():
        return False
    prefix = own.rpartition(".")[0] + "."
    return _INBOX.fullmatch(subject) is not None and subject.startswith(("_INBOX", prefix))
