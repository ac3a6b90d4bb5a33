"""Exactly-once processing by a group: each partition is a worker whose commits are fenced in the output stream.

The group's members decide which of them works on a partition. That only keeps two workers apart; if both think that the
partition is theirs, the fence of its position in the output stream lets only one of them store.
"""

from __future__ import annotations

from jetstream_ext.client.connection import Context
from jetstream_ext.errors import FencedError
from jetstream_ext.log.assigned import AssignedPartition
from jetstream_ext.log.callbacks import Callback, JoinOptions
from jetstream_ext.log.dead_letter import DeadLetter
from jetstream_ext.log.group import Group, plan_of
from jetstream_ext.log.group_worker import PartitionSource, serve
from jetstream_ext.log.handling import GroupHandler, Handler
from jetstream_ext.log.membership import GroupMembership
from jetstream_ext.log.pauses import Pauses
from jetstream_ext.log.work import Job
from jetstream_ext.log.worker import Worker, position_subject
from jetstream_ext.protocol.subjects import covers


async def exactly_once_group(
    group: Group,
    output_stream: str,
    handler: Handler | GroupHandler,
    *,
    prefix: str,
    label: str | None = None,
    max_messages: int = 100,
    grouped: bool = False,
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
    position_subject(prefix, group.name)
    job = Job(
        context=Context(group.context),
        output_stream=output_stream,
        handler=handler,
        max_messages=max_messages,
        grouped=grouped,
        dead_letter=dead_letter,
        position_may_vanish=position_may_vanish,
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
    member, pauses = GroupMembership(plan, options, (output_stream, prefix)), Pauses()

    async def work(assigned: AssignedPartition) -> None:
        worker = Worker(
            job,
            PartitionSource(member, assigned),
            prefix,
            f"{group.name}.{assigned.number}",
            epoch=member.assignment.settings.epoch,
            breathe=pauses.breathe,
        )
        assigned.stop = worker.stop
        try:
            await worker.run()
        except FencedError as error:
            if error.seq is None:  # its position was removed: it would start again
                raise
            member.assignment.fenced(assigned)

    member.assignment.work = work
    await member.open()
    try:
        await serve(member, work)
    finally:
        await member.close(clean=False)
