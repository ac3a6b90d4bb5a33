"""Positions in a stream: the starts that a reader accepts, and positions stored in a key-value bucket.

The bucket has one key per reader, fenced by its revision.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from types import TracebackType
from typing import Final, Protocol, Self

from nats.js import JetStreamContext
from nats.js.errors import BucketNotFoundError
from nats.nuid import NUID

from jetstream_ext.client.api import stream_state
from jetstream_ext.client.connection import Context, open_bucket
from jetstream_ext.client.fenced_write import FencedWriter, RecordMovedError
from jetstream_ext.client.retry import Retry
from jetstream_ext.errors import FencedError
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.creation import create_bucket
from jetstream_ext.kv.entries import check_key, operation
from jetstream_ext.log.observed import store_position
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.options import check_int, check_seconds, check_sequence, rfc3339, shown
from jetstream_ext.protocol.records import Record
from jetstream_ext.protocol.subjects import check_name, overlap
from jetstream_ext.text import get_logger, log_state

_log: Final = get_logger("log")


@dataclass(frozen=True, slots=True)
class First:
    """The oldest message that is stored when the reader looks the start up."""


@dataclass(frozen=True, slots=True)
class Seq:
    """A stream sequence.

    If its message was deleted from the middle of the stream, the reader starts at the next message. The position is lost
    (see `PositionLostError`) if the sequence is below the stream's first one, or more than one above its last one.

    Args:
        seq: The sequence, from 1.

    Raises:
        ValueError: `seq` is not a stream sequence.
    """

    seq: int

    def __post_init__(self) -> None:
        check_sequence(self.seq, "seq")


@dataclass(frozen=True, slots=True)
class Time:
    """The first message stored at or after a time, by the server's clock.

    If there is none yet, the reader leaves out what is stored before that time. A stored position does not hold the time:
    a reader or worker that starts again there before that time leaves nothing out.

    Args:
        when: A timezone-aware datetime.

    Raises:
        ValueError: `when` is naive.
        TypeError: `when` is not a datetime.
    """

    when: datetime

    def __post_init__(self) -> None:
        rfc3339(self.when, "when")


@dataclass(frozen=True, slots=True)
class Last:
    """The newest message that matches when the reader starts, as nats-py's DeliverPolicy.LAST."""


@dataclass(frozen=True, slots=True)
class New:
    """The first message that is stored after the reader has started, as nats-py's DeliverPolicy.NEW."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The position that the reader's `OffsetStore` holds under a name.

    Args:
        name: The reader's name, a key of the bucket: tokens of ``[-/_=a-zA-Z0-9]`` joined by dots.
        default: Where to start if no position is stored yet.

    Raises:
        nats.js.errors.InvalidKeyError: The name is not a key.
        TypeError: `default` is not a start, or is another `Stored`.
    """

    name: str
    default: First | Seq | Time | Last | New = First()

    def __post_init__(self) -> None:
        check_key(self.name)
        if not isinstance(self.default, First | Seq | Time | Last | New):
            raise TypeError(f"default must be First(), Seq(n), Time(t), Last() or New(), not {self.default!r}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The position that `LogReader.checkpoint` returned: a reader continues there.

    Args:
        text: The text. It holds the stream's name, when the stream was created, and the next sequence to read.

    Raises:
        ValueError: `text` is not that of a checkpoint.
        TypeError: `text` is not a string.
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"text must be a string, what reader.checkpoint returned, not {shown(self.text)}")
        decode_checkpoint(self.text)


def decode_checkpoint(text: str) -> StoredOffset:
    """Return the position in the text of a checkpoint; raise ValueError if it is not one."""
    try:
        return StoredOffset.decode("", text.encode(), 0)
    except ValueError as error:
        raise ValueError(
            f"this is not a checkpoint: {shown(text)}; give the text that reader.checkpoint returned, or another start, such as "
            "First(), if none is stored yet"
        ) from error


Start = First | Seq | Time | Last | New | Stored | Checkpoint


def check_start(start: object) -> Start:
    if not isinstance(start, Start):
        raise TypeError(
            f"start must be First(), Seq(n), Time(t), Last(), New(), Stored(name) or Checkpoint(text), not {start!r}"
        )
    return start


@dataclass(frozen=True, slots=True)
class StoredOffset:
    """A stored position.

    Attributes:
        name: The reader.
        stream: The stream that it reads.
        created: When that stream was created, as the server writes it. A stream of the same name that was created at
            another time has other sequences. Empty if the reader had ``confirm=False`` and did not know it.
        seq: The next sequence to read, from 1.
        revision: The key's revision in the bucket, which the next commit must follow.
        writer: A random id of the `OffsetStore` object that stored the position.
    """

    name: str
    stream: str
    created: str
    seq: int
    revision: int = 0
    writer: str = ""

    def encode(self) -> bytes:
        """Return the value of the reader's key."""
        return Record(stream=self.stream, created=self.created, seq=self.seq, writer=self.writer).encode()

    @classmethod
    def decode(cls, name: str, data: bytes, revision: int) -> StoredOffset:
        """Return the position in a value.

        Raises:
            ValueError: The value is not a position.
        """
        try:
            found = Record.decode(data)
            if not found.stream:
                raise ValueError("it has no stream")
        except ValueError as error:
            raise ValueError(
                f"the stored value of {name!r} is not a position: {data[:80]!r}; use another name"
            ) from error
        return cls(name, found.stream, found.created, found.seq, revision, found.writer)


class PositionedReader(Protocol):
    """What an `OffsetStore` uses of a `LogReader`."""

    name: str | None
    stream: str
    subject: str | None
    context: JetStreamContext

    @property
    def created(self) -> str | None: ...
    @property
    def position(self) -> int | None: ...
    async def open(self) -> int: ...
    async def read_for(self, seconds: float, max_messages: int = ...) -> list[StoredMsg] | None: ...


def matches(reader: PositionedReader, subject: str) -> bool:
    """Return whether a reader returns messages on `subject`, which may be a filter."""
    return reader.subject is None or overlap(reader.subject, subject)


class OffsetStore:
    """Positions of readers in a key-value bucket: one key per reader, with the stream and the next sequence.

    A commit succeeds only if no other reader has committed under the name since this object last fetched or committed
    it. Of two readers with the same name, the one that fetched last continues. The next commit of the other one
    raises `FencedError`; that reader should stop. A bucket that was deleted and created again since is another one.

    Args:
        js: nats-py's JetStream context; its prefix, domain and timeout are honoured.
        bucket: The bucket's name. The bucket must exist (`create` makes it) and must not have a TTL.
        timeout: Seconds to wait for an answer; None is the context's own.
        patience: Seconds that transient errors (an election, a lost connection) may last. A call fails after `timeout` and
            `patience` together if nothing answers.

    Attributes:
        bucket: The bucket's name.
        context: The JetStream context.

    Raises:
        BadSubjectError: `bucket` is not a valid name.
        ValueError, TypeError: `timeout` or `patience` is not a number over 0.

    Requires: nats-server 2.10, permission for ``STREAM.INFO``, ``STREAM.MSG.GET`` and the keys' subjects.
    """

    def __init__(
        self, js: JetStreamContext, bucket: str = "offsets", *, timeout: float | None = None, patience: float = 30.0
    ) -> None:
        check_name(bucket, "bucket name")
        self.bucket: str = bucket
        self.context: JetStreamContext = js
        self._context = Context(js)
        self._timeout = self._context.resolve_timeout(timeout)
        self._patience = check_seconds(patience, "patience")
        self._writers: dict[str, FencedWriter] = {}
        self._id = NUID().next().decode()

    def __repr__(self) -> str:
        return f"<OffsetStore bucket={self.bucket!r}>"

    @cached_property
    def _bucket(self) -> Bucket:
        return Bucket(open_bucket(self.context, self.bucket), self._timeout)

    async def create(self, stream: str | None = None, *, replicas: int | None = None) -> OffsetStore:
        """Create the bucket if it does not exist, and return this object.

        Args:
            stream: The stream that is read: the bucket gets as many replicas. A bucket that exists is left as it is.
            replicas: How many servers hold the bucket, if not as many as the stream; without either, one.

        Raises:
            BadSubjectError: `stream` is not the name of a stream.
            nats.js.errors.NotFoundError: There is no such stream.
            nats.js.errors.APIError: The server refused.
            RequestTimeoutError: No answer in time.

        Cancellation: The bucket may have been created.
        """
        if stream is not None:
            check_name(stream, "stream name")
        try:
            await self._open()
        except BucketNotFoundError:
            if replicas is None and stream is not None:
                replicas = (await stream_state(self._context, stream, self._timeout)).replicas
            await create_bucket(self._bucket, replicas=1 if replicas is None else replicas)
        return self

    async def fetch(self, name: str) -> StoredOffset | None:
        """Return the newest position that is stored under a name, or None, and take the name over.

        The bucket's leader answers. The next commit follows the position that this call returned.

        Args:
            name: The reader's name.

        Raises:
            nats.js.errors.InvalidKeyError: The name is not a key.
            nats.js.errors.BucketNotFoundError: The bucket does not exist; `create` makes it.
            nats.js.errors.BadBucketError: It is a mirror, or the stream is not a bucket's.
            StreamConfigMismatchError: It has file storage and has reached revision 2**62, from which on servers find nothing.
            ValueError: The stored value is not a position.
            RequestTimeoutError, nats.js.errors.ServiceUnavailableError: No answer for longer than `patience`.

        Cancellation: Safe; nothing is left behind.
        """
        check_key(name)
        return _decode(name, await (await self._writer(name)).read())

    async def commit(
        self, reader: PositionedReader, *, name: str | None = None, position: int | None = None
    ) -> StoredOffset:
        """Store a reader's position.

        A restarted reader does not return the messages below the position again, so commit after you have handled them.

        Args:
            reader: The reader.
            name: Its name; None is the one that it was started with (`Stored`).
            position: The next sequence to read; None is the reader's `position`.

        Returns:
            What is stored now.

        Raises:
            FencedError: Another reader has committed under the name since this object fetched it, or a position exists
                that this object has not fetched. Nothing is stored. `fetch` takes the name over.
            StreamRecreatedError: The bucket was deleted and created again since. The position is not stored. `fetch` takes
                the name over in the new bucket.
            ValueError: The reader has no name, the position is out of range, or the reader would return the stored position as
                its next message: it reads the bucket's stream, and its filter matches the key. Nothing is stored.
            nats.js.errors.InvalidKeyError, nats.js.errors.BucketNotFoundError, nats.js.errors.BadBucketError: As for `fetch`.
            ServerError: The server refused the position, because the bucket is sealed or full, for example; nothing is stored.
                The error is also a nats-py ``APIError``.
            RequestTimeoutError, nats.js.errors.ServiceUnavailableError: No answer for longer than `patience`; the next
                commit or `fetch` finds out whether the position was stored.

        Cancellation: The position may have been stored; the next commit finds out.
        """
        name = _name_of(reader, name)
        self._check_excluded(reader, name)
        here = await reader.open()
        seq = check_sequence(here if position is None else position, "position")
        offset = StoredOffset(name, reader.stream, reader.created or "", seq, writer=self._id)
        writer = await self._writer(name)
        fetched = writer.fence != 0
        try:
            ack = await store_position(writer, offset.encode(), name, seq)
            log_state(_log, f"reader {name!r}", "position committed", position=seq)
        except RecordMovedError as moved:
            stored = _decode(name, moved.record)
            what = f"reader {name!r}: nothing was stored; its position in bucket {self.bucket!r}"
            if stored is None:
                raise FencedError(f"{what} was deleted; call fetch() before the next commit", name=name) from moved
            why = "another reader of this name has committed it; stop this reader"
            if not fetched:
                why = "this OffsetStore has not fetched it; call fetch() first"
            raise FencedError(
                f"{what} is {stored.seq} (revision {stored.revision}), and {why}", name=name, seq=stored.seq
            ) from moved
        return replace(offset, revision=ack.seq)

    def committing(
        self, reader: PositionedReader, *, name: str | None = None, every: int = 1000, seconds: float = 5.0
    ) -> Committing:
        """Return an async context manager that reads with `reader` and commits automatically.

        ::

            async with offsets.committing(reader, every=500) as messages:
                async for msg in messages:
                    await handle(msg)

        A message counts as handled when the loop asks for the next one, or when the block ends without an exception.
        After a crash, the reader repeats up to `every` messages (or those of `seconds`) and loses none: at least once.

        Args:
            reader: The reader; its `tail` decides whether the iteration ends.
            name: As for `commit`.
            every: Commit after this many handled messages, from 1.
            seconds: Commit when the oldest handled message that is not committed is this old. A handler that takes
                longer is not interrupted: the commit follows when it asks for the next message. A position that has moved
                only over messages that the filter excludes is committed within twice this time.

        Raises:
            ValueError, TypeError: `every` or `seconds` is out of range, or the reader has no name. When the block is entered:
                the reader would return its own positions (see `commit`).
        """
        return Committing(self, reader, _name_of(reader, name), every, seconds)

    async def _writer(self, name: str) -> FencedWriter:
        if name not in self._writers:
            await Retry(self._patience).call(self._open)
            self._writers[name] = FencedWriter(
                self._bucket.context,
                self._bucket.stream,
                self._bucket.subject(name),
                name=f"reader {name!r}",
                timeout=self._timeout,
                patience=self._patience,
                checked=True,
            )
        return self._writers[name]

    def _check_excluded(self, reader: PositionedReader, name: str) -> None:
        """Raise ValueError if the reader would return its own stored position."""
        subject = self._bucket.subject(name)
        if reader.stream != self._bucket.stream or Context(reader.context).prefix != self._context.prefix:
            return
        if matches(reader, subject):
            raise ValueError(
                f"reader {name!r}: nothing was stored, because its stream {reader.stream!r} is the stream of bucket "
                f"{self.bucket!r}, so the reader would return each of its positions (on {subject!r}), and each would lead to "
                "another one; give the reader a filter (subject=) that does not match this subject, or use another bucket"
            )

    async def _open(self) -> None:
        try:
            (await self._bucket.state(direct=False)).check_sequences()
        except BucketNotFoundError as error:
            error.description = f"{error.description}; OffsetStore(js, {self.bucket!r}).create() creates it"
            raise


class Committing:
    """The messages of a reader, whose position is committed as they are handled; see `OffsetStore.committing`.

    Nothing runs in the background: a commit is made when the next message is asked for.

    Attributes:
        committed: The position that was committed last; None before the block was entered.
    """

    def __init__(self, store: OffsetStore, reader: PositionedReader, name: str, every: int, seconds: float) -> None:
        self._every = check_int(every, "every")
        self._seconds = check_seconds(seconds, "seconds")
        self._store = store
        self._reader = reader
        self._name = name
        self.committed: int | None = None
        self._handled: int | None = None
        self._count = 0  # messages returned since the last commit
        self._since: float | None = None  # when the oldest of them was handled

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StoredMsg:
        """Return the next message; the one before it counts as handled.

        Raises:
            Exception: As for the reader, and for `OffsetStore.commit` (such as FencedError).

        Cancellation: The position may have been committed; nothing is left behind.
        """
        loop = asyncio.get_running_loop()
        self._note_handled(loop.time())
        while True:
            wait = self._seconds
            if self._since is not None:
                wait = 0.0 if self._count >= self._every else self._since + self._seconds - loop.time()
            if wait <= 0:
                await self.commit()
                wait = self._seconds
            found = await self._reader.read_for(wait, 1)
            if found:
                self._count += 1
                return found[0]
            self._note_handled(loop.time())  # the position also moves over messages that the filter excludes
            if found is None:
                raise StopAsyncIteration

    async def commit(self) -> StoredOffset | None:
        """Commit the position behind the handled messages; return None if it is committed already.

        Raises:
            Exception: As for `OffsetStore.commit` (such as FencedError).

        Cancellation: The position may have been committed.
        """
        if self._handled is None or self._handled == self.committed:
            return None
        stored = await self._store.commit(self._reader, name=self._name, position=self._handled)
        self.committed = stored.seq
        self._count = 0
        self._since = None
        return stored

    def _note_handled(self, now: float) -> None:
        self._handled = self._reader.position
        if self._since is None and self._handled != self.committed:
            self._since = now

    async def __aenter__(self) -> Self:
        # Commit at once: it pins a start that depends on the moment, and takes the name over from another reader.
        self.committed = await self._reader.open()
        await self._store.commit(self._reader, name=self._name)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._note_handled(0.0)
        # After an exception, the message that the loop has in its hands is not handled; those before it are.
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
        raise ValueError("the reader was not started with Stored(name); pass name=")
    check_key(name)
    return name


def _decode(name: str, found: StoredMsg | None) -> StoredOffset | None:
    if found is None or operation(found.headers)[0] != "PUT":
        return None
    return StoredOffset.decode(name, found.data, found.seq)
