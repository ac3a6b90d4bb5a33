"""Writing by atomic batches: rows and a marker of them, stored together or not at all.

::

    open      layout record: written for this micro-batch, or the same as it was ─── other ──► ReplayError
              marker: how many rows of this micro-batch are there already ────────── newer ──► FencedError
    store     rows that are there: their digest must be the marker's ─────────────── other ──► ReplayError
              the rest and a new marker, if the marker is still the one that was read
                 stored                 → next
                 the marker has moved   → another attempt was here: read it, look again
                 outcome unknown        → the marker knows: read it, look again
                 refused for now        → the same again, a little later
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from nats.js import JetStreamContext

from jetstream_ext.client.api import get_at_leader
from jetstream_ext.client.atomic import publish_atomic
from jetstream_ext.client.context import Context
from jetstream_ext.errors import (
    AtomicPublishTooLargeError,
    BadHeaderError,
    FencedError,
    MaxPayloadError,
    WrongLastSequenceError,
)
from jetstream_ext.spark.dedupe import content, without_ids
from jetstream_ext.spark.markers import Marker, ReplayError
from jetstream_ext.spark.patience import Patience, SinkError, passes
from jetstream_ext.spark.rows import Message
from jetstream_ext.spark.write_options import WriteOptions
from jetstream_ext.types import BatchMessage

_ADVICE = (
    "the input is not the same each time (see the documentation on exactly-once), or its partitions have changed; "
    "nothing was stored"
)


class Digest:
    """A digest of the rows so far."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)

    def add(self, messages: Iterable[Message]) -> None:
        """Take more rows."""
        pieces: list[bytes] = []
        heads: dict[str, bytes] = {}  # what `content` begins with, for messages without headers
        for subject, data, headers, _ in messages:
            head = content(subject, b"", headers) if headers else heads.get(subject)
            if head is None:
                head = heads[subject] = content(subject, b"", None)
            pieces += (b"%d:%b" % (len(head) + len(data), head), data)
        self._hash.update(b"".join(pieces))

    def copy(self) -> Digest:
        """Return another one with the same rows."""
        other = Digest()
        other._hash = self._hash.copy()
        return other

    def text(self) -> str:
        """Return the digest."""
        return self._hash.hexdigest()


@dataclass(frozen=True, slots=True)
class Transaction:
    """Rows that are stored together.

    Attributes:
        messages: The rows.
        start: How many are before them.
        before: The digest of those before them.
        after: The digest with them.
        last: There are no more. That is what it looks like: Spark ends the input of an attempt that fails before, too.
            So the next one may have more, and only fewer are a contradiction.
    """

    messages: Sequence[Message]
    start: int
    before: Digest
    after: Digest
    last: bool

    @property
    def end(self) -> int:
        """How many rows there are with them."""
        return self.start + len(self.messages)


class Transactions:
    """The transactions of one attempt at one partition.

    Args:
        context: The context.
        options: The write.
        writer: The name of the query, or of the batch write.
        batch: The micro-batch; 0 for a batch write.
        partition: The partition.
        rollup: Whether a marker may take away the one before.
    """

    def __init__(
        self, context: JetStreamContext, options: WriteOptions, writer: str, batch: int, partition: int, *, rollup: bool
    ) -> None:
        self._context = context
        self._js = Context(context)
        self._options = options
        self._batch = batch
        self._partition = partition
        self._rollup = rollup
        self._subject = f"{options.marker_prefix}.{writer}.{partition}"
        self._marker = Marker(-1, 0, "")
        self._digest = Digest()
        self._taken = 0
        self._patience = Patience(self._what())
        self.skipped: int = 0
        """Rows that were stored by an earlier attempt."""

    async def open(self) -> None:
        """Find out what is stored already.

        Raises:
            FencedError: A later micro-batch has been here.
            SinkError: The leader does not say.
        """
        await self._read_marker()

    def next(self, messages: Sequence[Message], *, last: bool) -> Transaction:
        """Make the next transaction, ready to be stored. Any thread may do it, while the one before is stored.

        Args:
            messages: The rows.
            last: There are no more.
        """
        before, start = self._digest, self._taken
        self._digest = after = before.copy()
        after.add(messages)
        self._taken += len(messages)
        return Transaction(messages, start, before, after, last)

    async def store(self, transaction: Transaction) -> None:
        """Store a transaction's rows, or find that they are stored; in the order of `next`, one after the other.

        Raises:
            FencedError, ReplayError: As for `open`; or the rows are not those that were stored before.
            SinkError: It could not be done.
            ServerError: The server refused a row.
        """
        messages, start, end = transaction.messages, transaction.start, transaction.end
        while True:
            stored = self._marker.rows if self._marker.batch == self._batch else 0
            if stored >= end:
                self._check(stored, transaction)
                self.skipped += len(messages)
                return
            if stored > start:
                some = transaction.before.copy()
                some.add(messages[: stored - start])
                self._compare(some)
            elif stored < start:
                raise ReplayError(f"{self._what()}: the marker of {start} rows is gone from {self._subject!r}")
            marker = Marker(self._batch, end, transaction.after.text())
            if await self._commit(messages[stored - start :], marker):
                return

    async def _commit(self, messages: Sequence[Message], marker: Marker) -> bool:
        """Store rows and their marker; False: look at the marker again."""
        rows = without_ids(messages)
        # The first one says which stream it is: else the library asks the server, which needs another permission.
        subject, data, headers, _ = messages[0]
        rows[0] = BatchMessage(subject, data, headers, stream=self._options.stream)
        rows.append(marker.message(self._subject, self._marker.seq, rollup=self._rollup))
        try:
            ack = await publish_atomic(self._context, rows)
        except WrongLastSequenceError:
            seen = self._marker
            await self._read_marker()
            if self._marker == seen:
                raise
            return False
        except AtomicPublishTooLargeError as error:
            raise SinkError(
                f"{self._what()}: the server takes fewer than {len(rows)} messages per batch ({error}); set the option "
                "transactionRows below that"
            ) from error
        except (BadHeaderError, MaxPayloadError) as error:
            first = marker.rows - len(messages)
            raise SinkError(f"{self._what()}: one of its rows {first} to {marker.rows - 1}: {error}") from error
        except Exception as error:
            if not passes(error):
                raise
            # Stored or not, and if the commit is still on its way: the marker tells, and fences.
            await self._patience.after(error)
            await self._read_marker()
            return False
        self._patience.reset()
        self._marker = Marker(marker.batch, marker.rows, marker.digest, ack.seq)
        return True

    def _check(self, stored: int, transaction: Transaction) -> None:
        end = transaction.end
        if transaction.last and stored > end:
            raise ReplayError(f"{self._what()}: {stored} rows of it are stored, and now it has {end} only; {_ADVICE}")
        if stored == end and stored:
            self._compare(transaction.after)

    def _compare(self, digest: Digest) -> None:
        if digest.text() != self._marker.digest:
            raise ReplayError(
                f"{self._what()}: {self._marker.rows} rows of it are stored, and now they are others; {_ADVICE}"
            )

    def _what(self) -> str:
        return f"stream {self._options.stream!r}, partition {self._partition} of micro-batch {self._batch}"

    async def _read_marker(self) -> None:
        while True:
            try:
                stored = await get_at_leader(
                    self._js, self._options.stream, {"last_by_subj": self._subject}, self._js.timeout
                )
                break
            except Exception as error:
                if not passes(error):
                    raise
                await self._patience.after(error)
        marker = Marker(-1, 0, "") if stored is None else Marker.decode(stored)
        if marker.batch > self._batch:
            raise FencedError(f"{self._what()}: micro-batch {marker.batch} has been here; this attempt is out of date")
        self._marker = marker
