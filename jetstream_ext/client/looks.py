"""What many ask a stream's leader at the same time: one request, whose answer is for all that need no later one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from jetstream_ext.client.api import gather_bounded, get_at_leader, stream_state
from jetstream_ext.client.base_connection import mark_retrieved
from jetstream_ext.client.connection import Context
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import StoredMsg

_T = TypeVar("_T")


class Shared(Generic[_T]):
    """A question that several callers have: one request at a time is under way."""

    def __init__(self) -> None:
        self._asked = -math.inf
        self._answer: asyncio.Future[_T] | None = None

    async def get(self, after: float, ask: Callable[[], Awaitable[_T]]) -> tuple[float, _T]:
        """Return the answer to a request that was sent after a time, and when that was; raise as `ask` does."""
        loop = asyncio.get_running_loop()
        while (answer := self._answer) is not None and (self._asked > after or not answer.done()):
            asked = self._asked
            if not answer.done():
                await asyncio.wait([answer])
            if asked > after and not answer.cancelled():
                return asked, answer.result()
        asked, answer = self._asked, self._answer = loop.time(), loop.create_future()
        try:
            answer.set_result(await ask())
        except Exception as error:
            answer.set_exception(error)
            mark_retrieved(answer)
            raise
        finally:
            answer.cancel()  # unless it is done; another caller asks
            if self._answer is answer and (answer.cancelled() or answer.exception() is not None):
                self._answer = None  # an error is for those that wait already
        return asked, answer.result()


class Look:
    """What the leader says: the stream's state, and messages that match a filter (None: all). `ask` first."""

    state: StreamState

    def __init__(self, context: Context, stream: str, subject: str | None) -> None:
        self._context = context
        self._stream = stream
        self._subject = subject or ">"
        self._messages: dict[int, Shared[StoredMsg | None]] = {}

    async def ask(self, seqs: Sequence[int], timeout: float) -> Look:
        """Ask for the state, and at the same time for the messages at some sequences."""

        async def ask_for_state() -> None:
            self.state = await stream_state(self._context, self._stream, timeout)

        questions: list[Callable[[], Awaitable[Any]]] = [ask_for_state]
        questions += [partial(self.message, seq, timeout) for seq in seqs]
        await gather_bounded(lambda question: question(), questions, limit=len(questions))
        return self

    async def message(self, seq: int, timeout: float) -> StoredMsg | None:
        """Return the first message at or after a sequence, or None; raise as `get_at_leader` does."""
        request = {"seq": seq, "next_by_subj": self._subject}
        ask = partial(get_at_leader, self._context, self._stream, request, timeout)
        _, found = await self._messages.setdefault(seq, Shared()).get(-math.inf, ask)
        if found is None:
            self._messages.pop(seq, None)  # it may be stored soon
        return found
