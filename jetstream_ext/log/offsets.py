"""Positions of readers, kept in a key-value bucket: one key per reader, fenced by its revision."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from nats.js import JetStreamContext
from nats.js.errors import BucketNotFoundError
from nats.js.kv import KeyValue
from nats.nuid import NUID

from jetstream_ext.client.context import Context
from jetstream_ext.client.fenced_write import FencedWriter, RecordMovedError
from jetstream_ext.client.retry import Retry
from jetstream_ext.errors import FencedError
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import operation
from jetstream_ext.kv.keys import check_key
from jetstream_ext.log.positions import PositionedReader, StoredOffset
from jetstream_ext.protocol.stored_msg import StoredMsg
from jetstream_ext.protocol.subjects import check_name


class OffsetStore:
    """Positions of readers in a key-value bucket: one key per reader, with stream, its `created`, and next sequence.

    A commit succeeds only if no other reader has committed under the name since this object last fetched or committed
    it. So of two readers of one name the one that fetched last goes on, and the next commit of the other one raises
    `FencedError`: it has lost its name and should stop.

    Args:
        js: nats-py's JetStream context; its prefix, domain and timeout are honoured.
        bucket: The bucket's name. It must exist (`create` makes it), and have no time to live.
        timeout: Seconds to wait for an answer; None is the context's own.
        patience: Seconds that transient errors (an election, a lost connection) may last.

    Raises:
        BadSubjectError: The bucket's name cannot be one.
        ValueError: A number is not over 0.

    Requires: nats-server 2.10, permission for ``STREAM.INFO``, ``STREAM.MSG.GET`` and the keys' subjects.
    """

    def __init__(
        self, js: JetStreamContext, bucket: str = "offsets", *, timeout: float | None = None, patience: float = 30.0
    ) -> None:
        check_name(bucket, "bucket name")
        for name, value in (("timeout", timeout), ("patience", patience)):
            if value is not None and (isinstance(value, bool) or not value > 0):
                raise ValueError(f"{name} must be a number of seconds over 0, not {value!r}")
        Context(js)
        self._context = js
        self._name = bucket
        self._timeout = timeout
        self._patience = float(patience)
        self._bucket: Bucket | None = None
        self._writers: dict[str, FencedWriter] = {}
        self._id = NUID().next().decode()

    def __repr__(self) -> str:
        return f"<OffsetStore bucket={self._name!r}>"

    @property
    def bucket(self) -> str:
        """The bucket's name."""
        return self._name

    async def create(self, *, replicas: int = 1) -> OffsetStore:
        """Create the bucket if there is none, and return this object.

        Args:
            replicas: How many servers hold it.

        Raises:
            nats.js.errors.APIError: The server refused.

        Cancellation: The bucket may have been created.
        """
        try:
            await self._open()
        except BucketNotFoundError:
            creating = self._context.create_key_value(bucket=self._name, history=1, replicas=replicas)
            await self._bounded(creating, f"the answer to the creation of bucket {self._name!r}")
        return self

    async def fetch(self, name: str) -> StoredOffset | None:
        """Return the position that is stored under a name, or None; commits may follow.

        It is the newest one: the bucket's leader is asked.

        Args:
            name: The reader's name.

        Raises:
            nats.js.errors.InvalidKeyError: The name is no key.
            nats.js.errors.BucketNotFoundError: There is no bucket; `create` makes it.
            ValueError: What is stored there is not a position.
            RequestTimeoutError, nats.js.errors.ServiceUnavailableError: No answer for longer than `patience`.

        Cancellation: Safe; nothing is left behind.
        """
        check_key(name)
        return _decode(name, await (await self._writer(name)).read())

    async def commit(
        self, reader: PositionedReader, *, name: str | None = None, position: int | None = None
    ) -> StoredOffset:
        """Store a reader's position.

        Everything below it is taken to be dealt with: commit after the messages were handled, not before.

        Args:
            reader: The reader.
            name: Its name; None is the one that it was started with (`Stored`).
            position: The next sequence to read; None is the reader's `position`.

        Returns:
            What is stored now.

        Raises:
            FencedError: Another reader has committed under the name since it was fetched, or the name was never fetched
                here and there is a position. `fetch` takes the name over.
            ValueError: There is no name, or the position is out of range.
            nats.js.errors.InvalidKeyError, nats.js.errors.BucketNotFoundError: As for `fetch`.
            RequestTimeoutError, nats.js.errors.ServiceUnavailableError: No answer for longer than `patience`; the next
                commit or `fetch` finds out whether the position was stored.

        Cancellation: The position may have been stored; the next commit finds out.
        """
        name = _name_of(reader, name)
        here = await reader.open()
        if position is None:
            position = here
        if isinstance(position, bool) or not isinstance(position, int) or not 1 <= position < 1 << 64:
            raise ValueError(f"position must be a stream sequence from 1 up, not {position!r}")
        assert reader.created is not None
        offset = StoredOffset(name, reader.stream, reader.created, position, 0, self._id)
        writer = await self._writer(name)
        known = writer.fence
        try:
            ack = await writer.store([], offset.encode())
        except RecordMovedError as moved:
            raise _fenced(self._name, name, _decode(name, moved.record), known) from moved
        return replace(offset, revision=ack.seq)

    def committing(
        self, reader: PositionedReader, *, name: str | None = None, every: int = 1000, seconds: float = 5.0
    ) -> Committing:
        """Return an async context manager that reads with `reader` and commits automatically.

        ::

            async with offsets.committing(reader, every=500) as messages:
                async for msg in messages:
                    await handle(msg)

        A message counts as handled when the next one is asked for, or the block ends without an exception. So after a
        crash, up to `every` messages (or those of `seconds`) are read again, and none is lost: at least once.

        Args:
            reader: The reader; `tail` decides whether iteration ends.
            name: As for `commit`.
            every: Commit after so many handled messages, from 1.
            seconds: Commit when the oldest handled message that is not committed is so old. A handler that takes longer
                is not interrupted: the commit follows when it asks for the next message.

        Raises:
            ValueError: A number is out of range, or there is no name.
        """
        return Committing(self, reader, _name_of(reader, name), every, seconds)

    async def _writer(self, name: str) -> FencedWriter:
        """Return what stores the positions of one reader."""
        writer = self._writers.get(name)
        if writer is None:
            retry = Retry(self._patience)
            while True:
                try:
                    bucket = await self._open()
                    break
                except Exception as error:
                    await retry.pause(error)
            writer = self._writers[name] = FencedWriter(
                bucket.context,
                bucket.stream,
                bucket.subject(name),
                name=f"reader {name!r}",
                timeout=bucket.timeout,
                patience=self._patience,
            )
        return writer

    async def _open(self) -> Bucket:
        if self._bucket is None:
            opening = self._context.key_value(self._name)
            self._bucket = Bucket(await self._bounded(opening, f"the state of bucket {self._name!r}"), self._timeout)
        return self._bucket

    async def _bounded(self, operation: Coroutine[Any, Any, KeyValue], what: str) -> KeyValue:
        context = Context(self._context)
        timeout = context.timeout if self._timeout is None else self._timeout
        return await context.connection.bounded(operation, timeout, what)


class Committing:
    """The messages of a reader, whose position is committed as they are handled; see `OffsetStore.committing`.

    Nothing runs in the background: commits are made while the next message is asked for.
    """

    def __init__(self, store: OffsetStore, reader: PositionedReader, name: str, every: int, seconds: float) -> None:
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
        # At once: it pins a start that depends on the moment, and takes the name from the reader that had it.
        self._committed = await self._reader.open()
        await self._store.commit(self._reader, name=self._name)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._note(0.0)
        # After an exception, most often the handler's, the message that raised it is not handled; those before it are.
        if kind is None or issubclass(kind, Exception):
            try:
                await self.commit()
            except Exception as failure:
                if error is None:
                    raise
                error.add_note(f"the position was not stored: {failure!r}")  # the first error is the user's


def _name_of(reader: PositionedReader, name: str | None) -> str:
    name = reader.name if name is None else name
    if name is None:
        raise ValueError("this reader was not started with Stored(name): give the name")
    check_key(name)
    return name


def _decode(name: str, found: StoredMsg | None) -> StoredOffset | None:
    if found is None or operation(found.headers)[0] != "PUT":
        return None
    return StoredOffset.decode(name, found.data, found.seq)


def _fenced(bucket: str, name: str, stored: StoredOffset | None, known: int) -> FencedError:
    if stored is None:
        return FencedError(f"the position of {name!r} was deleted from bucket {bucket!r}; fetch it to go on", name=name)
    why = "another reader of this name has committed" if known else "there is one that was not fetched here"
    return FencedError(
        f"the position of {name!r} in bucket {bucket!r} is {stored.seq} (revision {stored.revision}): {why}; nothing was "
        "stored",
        name=name,
        seq=stored.seq,
    )
