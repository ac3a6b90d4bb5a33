"""Exactly-once processing: read, process, write, with each input counted once; `log.work` does it.

In a group each partition is a worker whose commits are fenced in the output stream. The group's members decide which of them
works on a partition. That only keeps two workers apart; if both think that the partition is theirs, the fence of its position
lets only one of them store.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from jetstream_ext.client.connection import Context
from jetstream_ext.errors import FencedError
from jetstream_ext.log.assigned import AssignedPartition
from jetstream_ext.log.callbacks import Callback, JoinOptions
from jetstream_ext.log.dead_letter import DeadLetter
from jetstream_ext.log.group import Group, plan_of
from jetstream_ext.log.group_worker import PartitionSource, Pauses, serve
from jetstream_ext.log.handling import Handler
from jetstream_ext.log.job import Job
from jetstream_ext.log.membership import GroupMembership
from jetstream_ext.log.observed import reading_for
from jetstream_ext.log.reader import LogReader
from jetstream_ext.log.work import Processed, run_worker
from jetstream_ext.protocol.options import shown
from jetstream_ext.protocol.subjects import covers


async def exactly_once(
    reader: LogReader,
    output_stream: str,
    handler: Handler,
    *,
    name: str,
    prefix: str,
    max_messages: int = 100,
    grouped: bool = False,
    state: str | None = None,
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
        state: Give the handler a second argument: its `State`, a dictionary of text to bytes that survives (``put(key, value,
            ttl=...)`` lets a key expire). A changed key is a message of the output stream on ``<state>.<name>.<key>``, in one
            batch with the outputs and the position; a deleted one has ``KV-Operation: DEL``. So each start has the state of its
            position, which it reads into memory. Keys are percent-encoded as in URLs where a subject cannot have them as they
            are (`urllib.parse.unquote` returns the key). No other program may publish there. Of two workers,
            the name of one must not begin with that of the other and a dot.
        standby: Wait while another worker of this name is alive, and take over when it ends (at once) or dies (after
            10 s). All replicas must pass it. A worker that is alive holds a lease, a key with a TTL in the bucket of
            ``reader.offsets``, which is created if it does not exist. A handler that blocks the event loop for 10 s
            loses the lease. The lease makes nothing safe; the fence does. Cancel the call before you close or drain its
            connection: without one it can release neither the lease nor the name.
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
            bucket exists and lacks ``allow_msg_ttl`` (`jetstream_ext.kv.enable`). Raised before anything is read. As for the
            reader, also while the worker runs: consumers remove inputs.
        PositionLostError, StreamRecreatedError: As for the reader: the input at the position is gone. The outputs of the
            inputs before it are stored. The latter also if the answer to a commit was lost, and the output stream was deleted
            and created again, and has another position at the sequence of this worker's. Nothing of that commit is stored.
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
        is left behind. The call first stores that it ends, and with ``standby=True`` releases its lease; each takes 2 s at
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
        name=name,
        prefix=prefix,
        max_messages=max_messages,
        grouped=grouped,
        dead_letter=dead_letter,
        position_may_vanish=position_may_vanish,
        keeps_state=state,
        timeout=timeout,
        patience=patience,
    )
    with reading_for(reader, name):
        return await run_worker(job, reader, standby=standby, stopping=asyncio.Event())


async def exactly_once_group(
    group: Group,
    output_stream: str,
    handler: Handler,
    *,
    prefix: str,
    label: str | None = None,
    max_messages: int = 100,
    grouped: bool = False,
    state: str | None = None,
    on_assigned: Callback | None = None,
    on_revoked: Callback | None = None,
    on_partitions_lost: Callback | None = None,
    revoke_timeout: float = 60.0,
    dead_letter: DeadLetter | None = None,
    position_may_vanish: bool = False,
    timeout: float | None = None,
    patience: float = 30.0,
) -> None:
    """Join a group, and turn the messages of this member's partitions into outputs that are stored exactly once.

    ::

        group = log.Group(js, "ORDERS", "sums", partitions=8, key=[1])
        await log.exactly_once_group(group, "TOTALS", handle, prefix="totals-at")    # until it is cancelled

    Each partition is processed as by `exactly_once`, at the same time as the others: one atomic batch stores the outputs of
    its inputs and its position, on ``<prefix>.<group>.<partition>`` in the output stream. The inputs of a key are handled in
    order, also when the partition moves to another member. A member that was suspended and has lost its partitions stores
    nothing more.

    The handler is called by several tasks at once, one for each partition, on one event loop. To use several cores, start
    several processes.

    Args:
        group: The group; its `start` is where it begins.
        output_stream: The stream that the outputs and the positions go to.
        handler: As for `exactly_once`.
        prefix: One of the output stream's subjects must match ``<prefix>.<group>.<partition>``. All members must agree on it.
        label: The member's name for people, as for `Group.join`.
        on_assigned: As for `Group.join`.
        on_revoked: As for `Group.join`; the partitions' last commits are stored already.
        on_partitions_lost: As for `Group.join`.
        revoke_timeout: As for `Group.join`; the handlers of what is lost are cancelled.
        max_messages: As for `exactly_once`, for each partition.
        grouped: As for `exactly_once`: the inputs of one list are all of one partition.
        state: As for `exactly_once`; each partition has a state of its own, on ``<state>.<group>.<partition>.<key>``, which
            moves with it. `Group.reset` does not remove it: purge ``<state>.<group>.>`` as well, before members join again.
        dead_letter: As for `exactly_once`. A pause before the next attempt does not hold up the other partitions.
        position_may_vanish: As for `exactly_once`.
        timeout: Seconds to wait for an answer of the output stream; None is the context's own.
        patience: As for `exactly_once`.

    Raises:
        StreamConfigMismatchError: The output stream cannot hold the outputs and positions (see `exactly_once`), or the group
            has other settings.
        Exception: As for `Group.join` and `exactly_once`, except FencedError: a partition that another member has taken is
            given up. Exceptions of the handler end the member, and another member handles the input.

    Cancellation: Safe at every point, as for `exactly_once`. The member leaves first: its partitions have
        1 s to end behind their current commits.

    Requires: What `Group` and `exactly_once` require.
    """
    plan = plan_of(group)
    job = Job(
        context=Context(group.context),
        output_stream=output_stream,
        handler=handler,
        name=group.name,
        prefix=prefix,
        max_messages=max_messages,
        grouped=grouped,
        dead_letter=dead_letter,
        position_may_vanish=position_may_vanish,
        keeps_state=state,
        timeout=timeout,
        patience=patience,
    )
    if dead_letter is not None and covers(f"{prefix}.{group.name}.*", dead_letter.subject):
        raise ValueError(f"subject {dead_letter.subject!r} is that of a position; use another one for dead letters")
    options = JoinOptions(
        label=label,
        on_assigned=on_assigned,
        on_revoked=on_revoked,
        on_partitions_lost=on_partitions_lost,
        revoke_timeout=revoke_timeout,
    )
    member, pauses = GroupMembership(plan, options), Pauses()

    async def work(assigned: AssignedPartition) -> None:
        stopping = asyncio.Event()
        assigned.stop = stopping.set
        try:
            await run_worker(
                replace(job, name=f"{group.name}.{assigned.number}"),
                PartitionSource(member, assigned),
                epoch=member.assignment.settings.epoch,
                stopping=stopping,
                breathe=pauses.breathe,
            )
        except FencedError as error:
            if error.seq is None:  # its position was removed: it would start again
                raise
            member.assignment.fenced(assigned)

    member.assignment.work = work
    await member.open((output_stream, prefix))
    try:
        await serve(member, work)
    finally:
        await member.close(clean=False)
