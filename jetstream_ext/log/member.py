"""A member of a group, as its user sees it."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from jetstream_ext.errors import FencedError
from jetstream_ext.log.assigned import BLOCK, AssignedPartition
from jetstream_ext.log.dead_letter import DeadLetter, check_dead_letter
from jetstream_ext.log.group_worker import GroupWorker, MessageHandler, Pauses, serve
from jetstream_ext.log.membership import GroupMembership
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.options import check_function
from jetstream_ext.text import get_logger, plural

_log = get_logger("log")


class Member:
    """A member of a group: `Group.join` makes it, ``async with`` joins and leaves.

    Attributes:
        id: The member's id, a random one for each `join`.
        label: Its name for people, in `Group.status`.
    """

    def __init__(self, membership: GroupMembership) -> None:
        self.id: str = membership.id
        self.label: str = membership.label
        self._membership = membership
        self._assignment = membership.assignment
        self._current: AssignedPartition | None = None  # of the message that the iteration has returned last
        self._pauses = Pauses()
        self._reading = False
        self._told = False  # the caller knows the error

    def __repr__(self) -> str:
        return f"<Member {self.label!r} of group {self._membership.group.name!r}: partitions {list(self.partitions)}>"

    async def __aenter__(self) -> Self:
        await self._membership.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        membership = self._membership
        if self._current is not None:
            self._current.done.set()  # it stays in hand: only the caller knows whether it is handled
        await membership.close(clean=kind is None)
        if membership.error is not None and not self._told:
            if kind is None:
                self._check()
            _log.warning("%s has failed while it left: %r", membership.name, membership.error)

    def __del__(self) -> None:
        if "_membership" in self.__dict__:
            self._membership.dropped()

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partitions that the member has now, also those for which `on_assigned` has not returned."""
        return self._assignment.active

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StoredMsg:
        """Return the next message of any of the member's partitions; the one before it counts as handled.

        Raises:
            Exception: See `Group.join`.

        Cancellation: Safe: no message is lost.
        """
        membership, assignment = self._membership, self._assignment
        if self._reading:
            raise RuntimeError(f"{membership.name}: another task iterates over this member")
        self._reading = True
        try:
            if self._current is not None and self._current.in_hand is not None:
                await assignment.put_down(self._current)
            await self._pauses.breathe()
            while True:
                self._check()
                membership.ensure_valid()
                assignment.progress.clear()
                if (message := self._pick_up()) is not None:
                    return message
                if membership.left.is_set():
                    raise StopAsyncIteration
                await assignment.progress.wait()
        finally:
            self._reading = False

    def _pick_up(self) -> StoredMsg | None:
        """Return a message of any partition, a block of one after a block of another."""
        if self._current is None or not self._current.queue:
            found = self._assignment.reader.dispatcher.take_any(BLOCK)
            if found is None:
                return None
            self._current = self._assignment.partitions[found[0]]
            self._current.queue.extend(found[1])
        return self._current.pick_up()

    def _check(self) -> None:
        self._told = self._told or self._membership.error is not None
        self._membership.check()

    async def run(self, handler: MessageHandler, *, dead_letter: DeadLetter | None = None) -> None:
        """Call `handler` for each message: one after the other for each partition, the partitions at the same time.

        ::

            async with group.join() as member:
                await member.run(handle)            # until `stop` is called, or it is cancelled

        A message counts as handled when the handler returns. One slow partition does not hold up the others. If a partition
        is lost (see `Group.join`), its handler is cancelled; before it is handed over, its handler may finish.

        Args:
            handler: Called with a `StoredMsg`; may be an async function.
            dead_letter: What to do with a message whose handler raises. Without it the member ends. With it the handler is
                called again after a pause, which delays only the message's partition. Each failure is stored with the
                partition's position, so that attempts count across restarts and hand-overs; a crash is no attempt. After
                so many attempts the message is published on the dead letters' subject with its origin, the attempts and the
                error in headers, ``Dead-Letter-Worker`` being the group's name, cut if it would be too large; then it counts
                as handled. It is published at least once: if a member dies before it has stored the position, the next owner
                publishes it again, under the same message id, so that the server drops it within its duplicate window unless
                the first one was deleted. Its stream's limits (such as ``max_age``) may remove it. A `FencedError` of `commit` is no
                failure of the handler and ends the member. With ``auto_commit=False``, the attempts of one message behind the
                last commit are remembered, those of the message that has failed last.

        Raises:
            TypeError: `handler` is no function, or `dead_letter` is no `DeadLetter`.
            RuntimeError: Another task reads from this member, or a loop over it has a message in its hands.
            ValueError: The group would read its dead letters. Nothing was handled.
            StreamConfigMismatchError: No stream stores the subject of dead letters, its limits let one replace another
                (``max_msgs_per_subject``), it has interest retention, or ``no_ack``. Nothing was handled.
            MaxPayloadError, BadHeaderError, ServerError, RequestTimeoutError: A dead letter could not be stored. Its message
                is not handled.
            Exception: What the handler raised, without `dead_letter`: the message is not handled, and the member should be
                left. Others as for iteration.

        Cancellation: The handlers are cancelled; their messages are not handled. Leave the member then.

        Requires: With `dead_letter`: permission for its subject, and for ``STREAM.NAMES``, and ``STREAM.INFO`` and
            ``STREAM.MSG.GET`` of its stream.
        """
        check_function(handler, "handler")
        check_dead_letter(dead_letter)
        membership, current = self._membership, self._current
        self._check()
        if self._reading:
            raise RuntimeError(f"{membership.name}: another task reads from this member")
        if current is not None and current.in_hand is not None:
            raise RuntimeError(
                f"{membership.name}: a message of partition {current.number} is in the hands of a loop over this member; use "
                "either run() or a loop, or join again"
            )
        self._reading = True
        try:
            if dead_letter is not None:
                await membership.group.check_dead_letter(dead_letter.subject)
            try:
                await serve(membership, GroupWorker(membership, handler, dead_letter).work)
            finally:
                self._told = True
                if membership.error is None and not membership.left.is_set():
                    membership.fail(
                        RuntimeError(f"{membership.name}: run() has ended; leave the member, and join again")
                    )
                self._assignment.cancel_work()  # what is in hand is not handled
        finally:
            self._reading = False

    def stop(self) -> None:
        """Ask the member to leave: `run` and the iteration end once what is in hand is handled and its position stored.

        ::

            loop.add_signal_handler(signal.SIGTERM, member.stop)

        Returns at once. Handlers may finish, for up to `revoke_timeout` (see `Group.join`); then `on_revoked` is called, and
        the partitions are handed over, for up to the group's `patience` if no server answers. Call it in the event loop's thread, at
        any time: a second call does nothing, and a member that is entered afterwards leaves at once.
        """
        self._membership.stop()

    async def commit(self) -> None:
        """Store the positions behind the messages that are handled.

        In an iteration, the last message that it has returned counts as handled, whichever task calls this. In a callback the
        call stores only the positions of the callback's partitions, of which nothing is being handled any more; so call it in the
        callback itself, and not in a task that it starts. In a handler of `run`, messages that are still being handled do not count.

        Raises:
            FencedError: Another member owns one of the partitions now; the positions of the others are stored.
            Exception: Transient errors lasted longer than the group's `patience`; the positions may be stored.

        Cancellation: The positions may be stored.
        """
        self._check()
        assignment, current = self._assignment, self._current
        if numbers := assignment.callbacks.partitions_here:
            lost = await assignment.commit(numbers)
        else:
            lost = await assignment.commit(tuple(assignment.partitions), in_hand=assignment.work is None)
            if current is not None and current.uncommitted_in_hand and not assignment.holds(current):
                lost = sorted({*lost, current.number})
        if lost:
            raise FencedError(
                f"{self._membership.name}: the positions of {plural(len(lost), 'partition', 'partitions')} {', '.join(map(str, lost))} were "
                "not stored, because this member has lost them: another one may own them and handle the messages since their last "
                "commits again; the positions of the others are stored",
                name=self._membership.group.name,
            )
