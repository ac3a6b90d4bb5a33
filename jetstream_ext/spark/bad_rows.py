"""Rows that can never be stored, and what the option ``onBadRow`` does with them: fail, drop them, or store them aside.

A row is bad by itself and by the configuration of its stream and server, never by what the stream holds: every attempt at a
partition has the same bad rows. The *dead letter* of a bad row has the row's data, and headers that say where it comes from
and why. Its message id is made of the writer, the micro-batch, the partition and the row's content, so that a second attempt
does not store it again while its stream knows the id. A task ends when its dead letters are stored.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final
from urllib.parse import quote_from_bytes

import nats.errors
import numpy as np
from nats.js import JetStreamContext
from nats.js.errors import APIError, NoStreamResponseError
from pyspark.sql.datasource import WriterCommitMessage

from jetstream_ext.client.api import gather_bounded, stream_name
from jetstream_ext.client.base_connection import NotPermittedError
from jetstream_ext.client.connection import Context
from jetstream_ext.client.retry import Retry
from jetstream_ext.errors import JetStreamExtError
from jetstream_ext.protocol import dead_letters as letters
from jetstream_ext.protocol import headers as h
from jetstream_ext.spark.connection import ask
from jetstream_ext.spark.digests import DIGEST, DIGEST_SIZE, DIGEST_TEXT, DigestCounts
from jetstream_ext.spark.options import ConnectionOptions
from jetstream_ext.spark.planning import PlanningError
from jetstream_ext.text import get_logger

_log = get_logger("spark")

FAIL: Final = "fail"
DROP: Final = "drop"

_IN_FLIGHT: Final = 256
_LOGGED: Final = 3  # bad rows that an attempt logs


class RowError(JetStreamExtError):
    """A row cannot be stored; the text names its partition, its index and the reason."""


class DeadLetterError(JetStreamExtError):
    """The dead letter of a bad row could not be stored. Spark tries the task again."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be stored."""

    row: int  # its index in the partition
    reason: str  # "its subject is null"
    subject: str | None  # as far as it is known; the key of a row for a bucket
    data: bytes
    headers: Mapping[str, str] | None = None


@dataclass(kw_only=True)
class TaskResult(WriterCommitMessage):
    """What a task tells the driver about its rows: the bad ones are not among `rows` and `skipped`.

    Attributes:
        writer: The name of the query, or of the batch write.
        batch: The micro-batch, or the version of the batch write.
        attempt: Names the driver's attempt at it.
        rows: How many rows it had, or distinct keys.
        skipped: How many of them another attempt had stored, or change nothing.
        dropped: How many bad rows it left out.
        diverted: How many bad rows it stored as dead letters.
        example: A bad row and the reason, if there is one.
    """

    writer: str
    batch: int = 0
    attempt: str = ""
    rows: int = 0
    skipped: int = 0
    dropped: int = 0
    diverted: int = 0
    example: str = ""


def log_results(where: str, what: str, batch: int, results: Sequence[TaskResult]) -> None:
    """Log what a micro-batch has stored, and a warning with the numbers of its bad rows, if it has any."""
    _log.info("%s: micro-batch %d: %s", where, batch, what)
    dropped, diverted = sum(one.dropped for one in results), sum(one.diverted for one in results)
    if dropped or diverted:
        example = next(one.example for one in results if one.example)
        text = "%s: bad rows of micro-batch %d: dropped: %d, stored as dead letters: %d; for example %s"
        _log.warning(text, where, batch, dropped, diverted, example)


class BadRows:
    """The bad rows of one attempt at one partition, and what the option ``onBadRow`` does with them.

    Args:
        policy: `FAIL`, `DROP`, or the subject of the dead letters.
        where: The stream or bucket, for errors and logs.
        target: The stream that the rows are for.
        result: Names the micro-batch, and takes the numbers.
        partition: The partition.
        subject_header: The header of a dead letter for `BadRow.subject`.
    """

    def __init__(
        self,
        policy: str,
        where: str,
        target: str,
        result: TaskResult,
        partition: int,
        *,
        subject_header: str = letters.SUBJECT,
    ) -> None:
        self.result: TaskResult = result
        self._policy = policy
        self._what = f"{where}, partition {partition} of micro-batch {result.batch}"
        self._subject_header = subject_header
        self._partition = partition
        self._id = f"{result.writer}:{result.batch}:{partition}:bad"
        self._origin = [
            (letters.TARGET, target),
            (letters.WORKER, result.writer),
            (letters.BATCH, str(result.batch)),
            (letters.PARTITION, str(partition)),
        ]
        self._waiting: deque[BadRow] = deque()
        self._seen = DigestCounts()

    @property
    def count(self) -> int:
        return self.result.dropped + self.result.diverted

    @property
    def waiting(self) -> int:
        """How many rows wait for `send`."""
        return len(self._waiting)

    def add(self, bad: BadRow) -> None:
        """Count a bad row, and keep it for `send` if it is to become a dead letter.

        Raises RowError, which names the row and the reason, if the policy is to fail.
        """
        reason = letters.one_line(bad.reason, letters.LONGEST_ERROR)
        if self._policy == FAIL:
            raise RowError(
                f"{self._what}: row {bad.row} cannot be stored: {reason}; rows before it may be stored; correct the query, "
                "or set the option onBadRow to drop, or to a subject for dead letters"
            )
        if not self.result.example:
            self.result.example = f"row {bad.row} of partition {self._partition}: {reason}"
        if self.count < _LOGGED:
            _log.warning("%s: row %d is bad (onBadRow is %s): %s", self._what, bad.row, self._policy, reason)
        if self._policy == DROP:
            self.result.dropped += 1
            return
        self.result.diverted += 1
        self._waiting.append(bad)

    async def send(self, context: JetStreamContext, *, patience: float = 30.0) -> None:
        """Store the rows that wait as dead letters; another thread may add more meanwhile.

        Raises DeadLetterError if one is refused, or transient errors last for longer than `patience` seconds.
        """
        rows = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not rows:
            return
        js = Context(context)

        async def store(letter: tuple[BadRow, str]) -> None:
            bad, msg_id = letter
            try:
                await self._store(js, bad, msg_id, patience)
            except (JetStreamExtError, nats.errors.Error) as error:
                raise self._failure(js, bad, error) from error

        await gather_bounded(store, zip(rows, self._ids(rows), strict=True), limit=_IN_FLIGHT)

    def _ids(self, rows: list[BadRow]) -> Iterator[str]:
        """Return an id for each row: its digest, and how often that came before in the partition."""
        digests = b"".join(map(_digest, rows))
        before = self._seen.add(np.frombuffer(digests, DIGEST)).tolist()
        texts = b2a_base64(digests, newline=False).decode()
        for index, count in enumerate(before):
            text = texts[index * DIGEST_TEXT : (index + 1) * DIGEST_TEXT]
            yield f"{self._id}:{text}" + (f":{count}" if count else "")

    async def _store(self, js: Context, bad: BadRow, msg_id: str, patience: float) -> None:
        """Store the dead letter of a row, without some of its data or headers if it is too large otherwise."""
        items = () if bad.headers is None else bad.headers.items()
        kept = letters.kept_headers((raw_bytes(name), raw_bytes(value)) for name, value in items)
        refusal: Exception | None = None
        for data, headers in letters.versions(bad.data, kept, [*self._about(bad), (h.MSG_ID, msg_id)]):
            retry, what = Retry(patience), f"the ack of a dead letter on {self._policy!r}"
            retry.start()
            try:
                await retry.call(lambda: js.publish(self._policy, data, headers, retry.within(js.timeout), what))  # noqa: B023
                return
            except (JetStreamExtError, APIError) as error:
                if not letters.is_too_large(error):
                    raise
                refusal = error
        assert refusal is not None
        raise refusal

    def _about(self, bad: BadRow) -> list[tuple[str, str]]:
        pairs = [
            (letters.ERROR, letters.one_line(bad.reason, letters.LONGEST_ERROR)),
            *self._origin,
            (letters.ROW, str(bad.row)),
        ]
        if bad.subject is not None:
            shown = letters.one_line(bad.subject, letters.LONGEST_ERROR)
            pairs.append((self._subject_header, shown))
            if shown != bad.subject:
                pairs.append(
                    (letters.RAW_SUBJECT, quote_from_bytes(raw_bytes(bad.subject)[: letters.LONGEST_ERROR], safe=""))
                )
        return pairs

    def _failure(self, js: Context, bad: BadRow, error: Exception) -> DeadLetterError:
        why = f"{error}"
        if isinstance(error, NoStreamResponseError):
            why = "no stream stores that subject, or the stream has no leader"
        return DeadLetterError(
            f"{self._what}: the dead letter of row {bad.row} could not be stored on {self._policy!r}: {why}; other rows may be "
            "stored; restart the query when the stream of the dead letters takes messages, or change the option onBadRow"
        )


def _digest(bad: BadRow) -> bytes:
    digest = blake2b(digest_size=DIGEST_SIZE)
    texts = ["" if bad.subject is None else bad.subject]
    for pair in () if bad.headers is None else bad.headers.items():
        texts += pair
    for text in texts:
        part = raw_bytes(text)
        digest.update(b"%d:%b" % (len(part), part))
    digest.update(b"%d;" % len(texts))
    digest.update(bad.data)
    return digest.digest()


def raw_bytes(text: str) -> bytes:
    """Return text as bytes, whatever it holds: surrogates that stand for bytes that were not UTF-8, and halves of pairs."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return text.encode(errors="surrogatepass")


def is_utf8(text: str) -> bool:
    """Return whether text can be encoded: it has no surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


async def check_dead_letters(context: JetStreamContext, connection: ConnectionOptions, policy: str) -> None:
    """Raise PlanningError if the policy is a subject that no stream stores.

    Without permission to ask, the first dead letter finds out. With a domain or a prefix, only a warning is logged: a stream
    of another JetStream may store the subject.
    """
    if policy in (FAIL, DROP):
        return
    try:
        found = await ask(connection.timeout, lambda left: stream_name(Context(context), policy, left))
    except NotPermittedError:
        return
    if found is not None:
        return
    what = f"option 'onBadRow': no stream stores the subject {policy!r}"
    if connection.domain is None and connection.api_prefix is None:
        raise PlanningError(f"{what}; create one, or give the subject of a stream, or 'drop' or 'fail'")
    _log.warning(
        "%s in the JetStream that the options name; unless another one does, the first bad row fails the query", what
    )
