"""What a read returns: its messages, one by one or as a list, and what the end of it said."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from types import TracebackType
from typing import Self

from jetstream_ext.errors import JetStreamExtError
from jetstream_ext.protocol.direct import Block, EndOfBatch
from jetstream_ext.protocol.plans import Plan
from jetstream_ext.types import StoredMsg


class MessageBatch:
    """The messages of one read: iterate it, use it as an async context manager, or take `to_list`.

    The first request goes out on first use. Leave early with ``break`` and then `aclose` (or the end of the
    ``async with`` block): nothing stays behind. One task at a time may read.

    A read that raised is over; the messages that came before are good, and another read can start behind the last one.

    Raises:
        JetStreamExtError, nats.errors.Error: While iterating: see `DirectGet`; after an error or a cancellation always.
        RuntimeError: Another task is waiting for messages of the same read.

    Cancellation: A cancelled read is over and has cleaned up; it cannot be continued.

    Requires: nats-server 2.11 (ADR-31, Batched requests and Multi-subject requests).
    """

    def __init__(self, plan: Plan, blocks: AsyncGenerator[Block, None]) -> None:
        self._plan = plan
        self._blocks = blocks
        self._ready: Iterator[StoredMsg] = iter(())
        self._failure: BaseException | None = None
        self._over = False
        self._closed = False
        self._reading = False

    @property
    def num_pending(self) -> int | None:
        """How many matching messages follow what was read, as the last answer counted them; None before the end."""
        return self._end.num_pending if self._end else None

    @property
    def last_seq(self) -> int | None:
        """The stream sequence of the last message (0 if none was found); None before the end."""
        return self._end.last_seq if self._end else None

    @property
    def up_to_seq(self) -> int | None:
        """The sequence at which a `multi_last` is consistent; None before the end and for other reads."""
        return self._end.up_to_seq if self._end else None

    @property
    def _end(self) -> EndOfBatch | None:
        return self._plan.end if self._over else None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StoredMsg:
        for message in self._ready:
            return message
        while True:
            block = await self._next_block()
            if block is None:
                raise StopAsyncIteration
            self._ready = block.messages()
            for message in self._ready:
                return message

    async def to_list(self) -> list[StoredMsg]:
        """Return all remaining messages, in the order of their sequences.

        Raises:
            JetStreamExtError, nats.errors.Error, RuntimeError: As for iterating.

        Cancellation: The read is over; nothing is left behind.
        """
        messages = list(self._ready)
        while (block := await self._next_block()) is not None:
            messages += block.messages()
        return messages

    async def _next_block(self) -> Block | None:
        if self._failure is not None:
            raise JetStreamExtError(f"this read ended early and cannot be continued: {self._failure!r}")
        if self._closed:
            return None
        self._check_alone()
        self._reading = True
        try:
            return await anext(self._blocks)
        except StopAsyncIteration:
            self._over = self._plan.done
            return None
        except BaseException as failure:
            self._failure = failure
            raise
        finally:
            self._reading = False

    def _check_alone(self) -> None:
        if self._reading:
            raise RuntimeError("another task is waiting for the next messages of this read; cancel it first")

    async def aclose(self) -> None:
        """End the read; safe to call more than once.

        Raises:
            RuntimeError: Another task is waiting for messages of it; that one has to be cancelled.

        Cancellation: The read is over all the same; nothing is left behind.
        """
        self._check_alone()
        self._closed = True
        self._ready = iter(())
        await self._blocks.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
