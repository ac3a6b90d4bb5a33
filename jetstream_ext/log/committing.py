"""Reading and committing in turn."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from jetstream_ext.log.offsets import OffsetStore, StoredOffset
from jetstream_ext.log.reader import LogReader
from jetstream_ext.types import StoredMsg


class Committing:
    """The messages of a reader, whose position is committed as they are handled; see `OffsetStore.committing`.

    Nothing runs in the background: commits are made while the next message is asked for.
    """

    def __init__(self, store: OffsetStore, reader: LogReader, name: str, every: int, seconds: float) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be an integer from 1 up, not {every!r}")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise ValueError(f"seconds must be a number over 0, not {seconds!r}")
        self._store = store
        self._reader = reader
        self._name = name
        self._every = every
        self._seconds = float(seconds)
        self._committed: int | None = None
        self._handled: int | None = None
        self._count = 0
        self._since: float | None = None

    @property
    def committed(self) -> int | None:
        """The position that was committed last, or None."""
        return self._committed

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StoredMsg:
        """Return the next message; the one before it is handled now.

        Raises:
            FencedError: Another reader of this name has committed.
            Exception: As for the reader, and for `OffsetStore.commit`.

        Cancellation: The position may have been committed; nothing is left behind.
        """
        loop = asyncio.get_running_loop()
        self._note(loop.time())
        while True:
            wait = self._due(loop.time())
            if wait is not None and wait <= 0:
                await self.commit()
                wait = None
            if wait is None:
                wait = self._seconds
            found = await self._reader.read(1, wait if self._reader.tail else 0)
            if found:
                self._count += 1
                return found[0]
            self._note(loop.time())  # a filter may have moved it
            if not self._reader.tail:
                raise StopAsyncIteration

    async def commit(self) -> StoredOffset | None:
        """Commit what is handled, if it is not; None: there is nothing to commit.

        Raises:
            FencedError: Another reader of this name has committed.
            Exception: As for `OffsetStore.commit`.

        Cancellation: The position may have been committed.
        """
        if self._handled is None or self._handled == self._committed:
            return None
        stored = await self._store.commit(self._reader, name=self._name, position=self._handled)
        self._committed = stored.seq
        self._count = 0
        self._since = None
        return stored

    def _note(self, now: float) -> None:
        """Take everything that was returned as handled."""
        self._handled = self._reader.position
        if self._since is None and self._handled != self._committed:
            self._since = now

    def _due(self, now: float) -> float | None:
        """Return in how many seconds a commit is due; None: there is nothing to commit."""
        if self._handled is None or self._handled == self._committed:
            return None
        if self._count >= self._every:
            return 0.0
        assert self._since is not None
        return self._since + self._seconds - now

    async def __aenter__(self) -> Self:
        # At once: it pins a start that depends on the moment, and whoever had the name before loses it.
        self._committed = await self._reader.open()
        await self._store.commit(self._reader, name=self._name)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._note(0.0)
        # After an exception (of the handler, most often) the message it has come from is not handled, those before are.
        if kind is None or issubclass(kind, Exception):
            try:
                await self.commit()
            except Exception as failure:
                if error is None:
                    raise
                error.add_note(f"the position was not stored, either: {failure!r}")  # the first one is the user's
