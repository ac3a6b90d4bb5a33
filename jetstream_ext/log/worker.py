"""Exactly-once processing: read, process, write, with each input counted once.

::

    stand by  (standby=True) wait for the lease of this name (`log.liveness`)
    claim     take the name over, and go to the stored position (`log.commits`)
    work      read inputs, have them handled (`log.handling`), store what that made (`log.work`)
    release   store that this worker has ended, and delete the lease
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from nats.js.errors import BucketNotFoundError

from jetstream_ext.client.api import lookup_stream, stream_state
from jetstream_ext.client.connection import Context, open_bucket
from jetstream_ext.client.retry import Retry
from jetstream_ext.errors import FencedError
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.log.commits import Commits, Source
from jetstream_ext.log.dead_letter import DeadLetter
from jetstream_ext.log.handling import GroupHandler, Handler, Handling
from jetstream_ext.log.liveness import Lease, lease_key, open_ttl_bucket
from jetstream_ext.log.observed import reading_for
from jetstream_ext.log.offsets import matches
from jetstream_ext.log.reader import LogReader
from jetstream_ext.log.work import Job, Work
from jetstream_ext.protocol.options import shown
from jetstream_ext.protocol.subjects import check_subject, check_type
from jetstream_ext.text import get_logger, log_state

_log = get_logger("log")


@dataclass(frozen=True, slots=True)
class Processed:
    """What `exactly_once` has done.

    Attributes:
        inputs: Messages read and handled.
        outputs: Messages stored.
        commits: Positions stored, each with its outputs, including those that took the name over and released it.
        position: The next sequence to read.
        dead_letters: Inputs that were stored as dead letters. They count as `inputs`, and not as `outputs`.
    """

    inputs: int
    outputs: int
    commits: int
    position: int
    dead_letters: int = 0


async def exactly_once(
    reader: LogReader,
    output_stream: str,
    handler: Handler | GroupHandler,
    *,
    name: str,
    prefix: str,
    max_messages: int = 100,
    grouped: bool = False,
    standby: bool = False,
    position_may_vanish: bool = False,
    dead_letter: DeadLetter | None = None,
    timeout: float | None = None,
    patience: float = 30.0,
) -> Processed:
    """Turn the messages of one stream into messages of another, and store the outputs of each exactly once.

    One atomic batch stores the outputs and the reader's new position. The position is a message of the output stream on
    ``<prefix>.<name>``, and a batch is stored only if no other worker has stored a position there meanwhile. A worker
    that is killed at any moment and started again continues after its last commit. Of two workers with the same name,
    the one that was started last continues; the next commit of the other one stores nothing and raises `FencedError`.
    A start waits until the last take-over of the name is 10 s old, unless the worker that took over has ended by itself. So
    supervised replicas stop each other at most every 10 s. With ``standby=True`` a replica waits instead of taking over.

    ::

        async def handle(msg):
            return BatchMessage("totals." + msg.subject, b"...")

        await exactly_once(LogReader(js, "ORDERS", tail=True), "TOTALS", handle, name="sums", prefix="totals-at")

    The handler can be called more than once for a message, so its side effects other than outputs can happen more than
    once. While a commit is on its way, the next messages are handled already. A message without outputs also moves the
    position.

    Args:
        reader: What to read. Its start is used the first time; later starts continue at the stored position. With
            ``confirm=False`` the worker never handles the inputs that the reader passes over, because a replica or mirror
            lacked them. To read while the origin is away, read its mirror by name, with ``confirm=True``.
        output_stream: The stream that the outputs and the position go to.
        handler: Called with a `StoredMsg`, returns its outputs: a message (a `BatchMessage`, ``(subject, payload)`` or
            ``(subject, payload, headers)``), an iterable or async iterable of messages, or None; or an awaitable of that.
            An input's headers may be passed on; a ``Nats-Msg-Id`` among headers is left out, and the option `msg_id` sets one.
            If an output has an expectation of its own, set ``max_messages=1``. If the handler raises, the worker stores the
            outputs of the inputs before this one and ends; the next start handles this input again.
        name: The worker's name; one for each input stream and purpose. Tokens of a subject.
        prefix: The position's subject is ``<prefix>.<name>``; one of the output stream's subjects must match it.
        max_messages: Inputs in one commit at most, from 1. If their outputs exceed the server's batch limit (1000 by
            default), they are split into several commits. With 1, an input is handled when the outputs of the one before are
            stored.
        grouped: `handler` is called with the list of all inputs of one commit instead. Its outputs cannot be split.
        standby: Wait while another worker of this name is alive, and take over when it ends (at once) or dies (after
            10 s). All replicas must pass it. A worker that is alive holds a lease, a key with a TTL in the bucket of
            ``reader.offsets``, which is created if it does not exist. A handler that blocks the event loop for 10 s
            loses the lease. The lease makes nothing safe; the fence does. Cancel the call before you close or drain its
            connection: without one it can neither delete the lease nor release the name.
        position_may_vanish: Allow an output stream whose limits can remove the position (see Raises). A worker whose
            position was removed starts at the reader's start again.
        dead_letter: What to do with an input that fails: its handler raises, or its outputs cannot be stored. Without it
            the worker ends. With it the input is tried again after a pause, alone, and after so many attempts it is stored
            on the dead letters' subject, with its origin and its error, in one batch with the position. One that is too large
            as a dead letter is cut and marked. The attempts are stored, so they count across restarts. The worker waits
            meanwhile. A handler that returns something else than outputs ends the worker all the same, because that is an
            error of the program and not of one input. So does the end of its process, which counts as no attempt: the next
            start handles the input again. With ``grouped=True`` the handler gets lists of one input after a list of several has
            failed, until these are handled.
        timeout: Seconds to wait for an answer of the output stream; None is the context's own.
        patience: Seconds that transient errors of the output stream (an election, a restart, a lost connection) may
            last. The call fails after `timeout` and `patience` together if that stream does not answer.

    Returns:
        What was done, when a reader without ``tail=True`` has reached the end. With ``tail=True`` the call only ends
        by an exception or a cancellation.

    Raises:
        FencedError: Another worker of this name was started, or has taken the lease; this one must stop, and can store
            nothing more. Or its position was removed, for example with the output stream.
        StreamConfigMismatchError: The output stream lacks ``allow_atomic`` or a subject for the position, stores that
            under another one (``subject_transform``), or its limits can remove it: ``max_age`` (without
            ``allow_msg_ttl``), ``max_msgs`` or ``max_bytes`` (with discard ``old``), or a retention other than
            ``limits``. The same for dead letters, which ``max_msgs_per_subject`` can remove too. With ``standby=True``: the
            bucket exists and lacks ``allow_msg_ttl`` (`jetstream_ext.kv.enable`). Raised before anything is read.
        StreamConfigMismatchError: As for the reader, also while the worker runs: consumers remove inputs.
        PositionLostError, StreamRecreatedError: As for the reader: the input at the position is gone. The outputs of the
            inputs before it are stored.
        StreamRecreatedError: Also if the answer to a commit was lost, and the output stream was deleted and created again
            and now holds another position at the sequence of this worker's. Nothing of that commit is stored.
        BadSubjectError: An output's subject is not one of the output stream's, or is the position's.
        AtomicPublishTooLargeError: The outputs of one input (or of a group) exceed the server's batch limit.
        MessageTooLargeError: An output, or the position, is larger than the output stream's ``max_msg_size``. Nothing of that
            input is stored.
        BatchError, ServerError: The server refused an output. Nothing of that input is stored.
        UnsupportedFeatureError: The output stream's server is older than 2.12.1.
        RequestTimeoutError: For `patience` seconds another worker of this name stored its position before each attempt to
            take over: it commits in every round trip, and this one is farther away from the server. Stop the other one.
        ValueError: The reader would return the worker's own positions, dead letters, or (with ``standby=True``) its lease,
            without end: its stream is the output stream or that of the lease's bucket, or mirrors it or has it as a source, and
            its filter does not exclude them. Raised before anything is read. (For a reader with ``confirm=False`` a copy is not
            noticed if the leader of its stream does not answer within 2 s.) Or the stored position is that of a worker on
            another stream, a number is out of range, or the subject of dead letters is that of the position.
        TypeError: The handler returned something else than outputs, with `dead_letter` too. Nothing of that input is stored,
            and the next start handles it again. Or an argument is of another type, in which case nothing was sent.
        Exception: Exceptions of the handler, without `dead_letter`; a transient error that lasted longer than `patience`.
        MessageTooLargeError, BadHeaderError, MaxPayloadError: With `dead_letter`: even the smallest version of a dead letter,
            which has only its origin and the beginning of the error, cannot be stored. The input stays at the position.

    Cancellation: Safe at every point, as a crash is: a commit that was sent is stored completely or not at all. Nothing
        is left behind. The call first stores that it ends, and with ``standby=True`` deletes its lease; each takes 2 s at
        most.

    Requires: nats-server 2.12.1 and ``allow_atomic`` on the output stream (ADR-50); what the reader requires;
        permission for the output subjects, and for ``STREAM.INFO`` and ``STREAM.MSG.GET`` of the output stream; with
        ``standby=True`` what `OffsetStore` requires.
    """
    if not isinstance(reader, LogReader):
        raise TypeError(f"reader must be a LogReader, not {shown(reader)}; give log.LogReader(js, stream)")
    job = Job(
        context=Context(reader.context),
        output_stream=output_stream,
        handler=handler,
        max_messages=max_messages,
        grouped=grouped,
        dead_letter=dead_letter,
        position_may_vanish=position_may_vanish,
        timeout=timeout,
        patience=patience,
    )
    worker = Worker(job, reader, prefix, name, standby=standby)
    with reading_for(reader, name):
        return await worker.run()


def position_subject(prefix: str, name: str) -> str:
    """Return the subject of the positions of a worker; raise BadSubjectError or TypeError if it cannot be one."""
    check_type(prefix, "prefix")
    check_type(name, "name")
    subject = f"{prefix}.{name}"
    check_subject(subject)
    return subject


class Worker:
    """One start of the worker `name`; with an `epoch` that of a partition of a group (see `Commits`).

    `breathe` is called before each call of the handler, which may keep the event loop.
    """

    def __init__(
        self,
        job: Job,
        reader: Source,
        prefix: str,
        name: str,
        *,
        standby: bool = False,
        epoch: str = "",
        breathe: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        subject = position_subject(prefix, name)
        if job.dead_letter is not None and job.dead_letter.subject == subject:
            raise ValueError(f"subject {subject!r} is that of the worker's position; use another one for dead letters")
        self._job = job
        self._reader = reader
        self._name = name
        self._what = f"worker {name!r}"
        self._standby = standby
        self._epoch = epoch
        self._breathe = breathe
        self._output = job.output(subject)
        self._lease: Lease | None = None
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Let `run` return behind what is handled, or at once from a pause after a failed attempt.

        A source ends the wait for input itself (see `Source`).
        """
        self._stopping.set()

    async def run(self) -> Processed:
        """Claim the position, and work until the source ends, `stop` is called, or an exception ends it.

        Cancellation: Safe, as a crash is; the name and the lease are released.
        """
        handling = Handling(self._job.handler, self._output, self._name, goes_on=self._job.dead_letter is not None)
        await self._check()
        log_state(_log, self._what, "started", stream=self._reader.stream, output=self._output.name)
        commits: Commits | None = None
        try:
            if self._standby:
                await self._stand_by()
                await self._check()  # that may have taken weeks
            commits = Commits(self._output, self._reader, self._name, epoch=self._epoch)
            await commits.claim(self._check_lease)
            log_state(_log, self._what, "position claimed", position=commits.position)
            work = Work(
                self._name,
                self._reader,
                handling,
                commits,
                self._output,
                self._job,
                stopping=self._stopping,
                check=self._check_lease,
                breathe=self._breathe,
            )
            position = await work.run()
            await commits.release(position)
            log_state(_log, self._what, "ended", position=position, inputs=work.inputs)
            return Processed(work.inputs, work.outputs, commits.count, position, work.buried)
        except (Exception, asyncio.CancelledError) as error:
            position = 0 if commits is None else commits.position
            event = "fenced" if isinstance(error, FencedError) else "ended"
            log_state(_log, self._what, event, error=error, position=position)
            if commits is not None:
                await commits.release_after_error()
            raise
        finally:
            if self._lease is not None:
                await self._lease.release()

    async def _stand_by(self) -> None:
        """Wait for the lease of the name."""
        bucket, key = self._lease_key()
        patience, look = self._job.patience, partial(stream_state, self._job.context, self._reader.stream)
        try:
            await open_ttl_bucket(bucket, self._what, patience)
        except BucketNotFoundError:
            input_state = await Retry(patience).call(look)
            replicas = int(input_state.config.get("num_replicas") or 1)
            await open_ttl_bucket(bucket, self._what, patience, replicas=replicas)
        self._lease = Lease(bucket, key, name=self._what, patience=patience)
        await self._lease.acquire()

    async def _check(self) -> None:
        """Raise an error unless the output stream can be used, and ValueError if the reader would return what is stored there."""
        await self._output.check()
        output = self._output
        await self._check_excluded("position", "the output stream", output.name, output.record)
        if output.letters is not None:
            await self._check_excluded("dead letter", "the output stream", output.name, output.letters)
        if self._standby:
            bucket, key = self._lease_key()
            if bucket.context.prefix == self._job.context.prefix:
                await self._check_excluded(
                    "lease", "the stream of the lease's bucket", bucket.stream, bucket.subject(key)
                )

    async def _check_excluded(self, what: str, where: str, stream: str, subject: str) -> None:
        """Raise ValueError if the reader would return what this worker stores in a stream on a literal subject."""
        reader = self._reader
        own = reader.stream == stream
        how = f"is {where}" if own else f"copies {where} {stream!r}"
        for copy in [subject] if own else await self._copied_as(stream, subject):
            if matches(reader, copy):
                raise ValueError(
                    f"{self._what}: the reader's stream {reader.stream!r} {how}, so the reader would return each {what} "
                    f"of this worker (on {copy!r}) as an input, without end; nothing was stored; give the reader a filter "
                    "(subject=) that does not match this subject"
                )

    async def _copied_as(self, stream: str, subject: str) -> list[str]:
        """Return the subjects, or filters that match them, on which the input stream has copies of another one's messages."""
        reader = self._reader
        if reader.confirm:
            look = partial(stream_state, self._job.context, reader.stream, self._output.timeout)
            return (await Retry(self._job.patience).call(look)).copies_of(stream, subject)
        # Its leader may be away, or not to be asked.
        known = await lookup_stream(self._job.context, subject, reader.stream, self._output.timeout)
        return [] if known is None else known[0].copies_of(stream, subject)

    def _lease_key(self) -> tuple[Bucket, str]:
        offsets = self._reader.offsets
        bucket = Bucket(open_bucket(offsets.context, offsets.bucket), self._output.timeout)
        return bucket, lease_key(self._output.name, self._output.record)

    def _check_lease(self) -> None:
        if self._lease is not None and self._lease.lost:
            raise FencedError(
                f"{self._what} on stream {self._output.name!r}: another worker of this name has taken its lease, which "
                "was not renewed in time; stop this one, which stores nothing more",
                name=self._name,
            )
