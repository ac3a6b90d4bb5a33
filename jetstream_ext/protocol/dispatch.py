"""How a member reads a stream for several partitions, with bounded memory. No I/O.

Each partition has a queue of messages that were given to it, and a sequence from which it still has to get messages.
While all partitions keep up, these sequences are equal, and each message is read once. A partition whose queue is full
stays behind; once it has room, the reader goes back for it, and then returns to the others. So a message may be read
more than once, and it is given once.

The shell's loop::

    while (read := dispatcher.next_read()) is None:
        ...  # wait for `wake`
    rows = ...  # of `read`; it may wait if `read.may_wait`, until `wake`
    dispatcher.feed(rows, read, position)

Where readers can be filtered by the partition, one that is behind is *alone*: it has reads of its own, which leave out the
messages of the others, until one has reached the end of the stream. These reads and the common ones take turns.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from jetstream_ext.protocol.direct import StoredMsg, size_of

TURN_MESSAGES: Final = 4096
TURN_READS: Final = 32
"""After so many messages or common reads from one place, partitions elsewhere in the stream have their turn."""

_MAX_READ: Final = 512
_MIN_READ: Final = 16


class Read(NamedTuple):
    """What to read next.

    Attributes:
        start: The sequence to start at.
        max_messages: How many messages to read. More would only be read again, once the queues have room for them.
        may_wait: No partition needs other messages, so that the read may wait for new ones. Otherwise it must return at
            once if there are none, because others wait for their turn.
        partition: The one to read for alone; None reads for those that are not alone.
    """

    start: int
    max_messages: int
    may_wait: bool
    partition: int | None = None


class _Partition:
    __slots__ = ("is_full", "next", "queue", "served", "size")

    def __init__(self, position: int, turn: int) -> None:
        self.next: int = position  # it has got its messages below
        self.queue: deque[StoredMsg] = deque()
        self.size: int = 0  # bytes of the messages in `queue`
        self.is_full: bool = False  # until it is half empty, so that the reader does not go back for single messages
        self.served: int = turn  # the last turn in which its messages were read


class Dispatcher:
    """Gives the messages of a stream to the queues of the owned partitions.

    Each partition takes exactly its messages, from the position at which it was added, in their order and each once.
    The queue of one holds at most `buffer` messages, and at most `buffer_bytes` and one message more.

    Turns are fair. With k places of the stream at which partitions need messages, each place is read in one of about k
    turns, and a turn has at most `TURN_MESSAGES` messages and one read more. Hence neither a partition that is millions
    of messages behind nor those at the end stop the others.

    Args:
        partitions_of: Returns the partition of each message, such as `Partitioner.of`.
        buffer: The most messages in a partition's queue.
        buffer_bytes: The most bytes in a partition's queue, as servers count messages; a single message may be larger.
        partitions: Readers can be filtered: how many partitions the group has. Each owned one begins alone, and is alone
            again once its queue was full, or once there was much to read of which other members own a part.
        wake: Called when the next read can have changed without a `feed`.
    """

    def __init__(
        self,
        partitions_of: Callable[[Sequence[StoredMsg]], Sequence[int]],
        *,
        buffer: int = 1000,
        buffer_bytes: int = 8 << 20,
        partitions: int | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._partitions_of = partitions_of
        self._buffer = buffer
        self._buffer_bytes = buffer_bytes
        self._low = buffer // 4
        self._partitions = partitions
        self._wake = wake
        self._owned: dict[int, _Partition] = {}
        # None stands for the common reads, the others are alone; the next one to read for comes first.
        self._lanes: OrderedDict[int | None, None] = OrderedDict({None: None})
        self._with_messages: OrderedDict[int, None] = OrderedDict()  # the next one to take from first
        self._at = 0  # where the last common read ended
        self._turn = 0
        self._messages_left = self._reads_left = 0  # of this turn

    def __contains__(self, partition: int) -> bool:
        return partition in self._owned

    def add(self, partition: int, position: int) -> None:
        """Own a partition, whose next message is at the sequence `position` or after it."""
        self._owned[partition] = _Partition(position, self._turn)
        if self._partitions is not None:
            self._lanes[partition] = None
        self._wake()

    def remove(self, partition: int) -> None:
        """Stop owning a partition and drop the messages in its queue; nothing if it is not owned."""
        self._lanes.pop(partition, None)
        self._with_messages.pop(partition, None)
        if self._owned.pop(partition, None) is not None:
            self._wake()

    @property
    def parted(self) -> bool:
        """Whether a partition is alone."""
        return len(self._lanes) > 1

    def next_read(self) -> Read | None:
        """Return what to read, or None if no partition has room, or those that have need no messages yet."""
        reads = (self._common_read() if lane is None else self._read_of(lane) for lane in self._lanes)
        due = (read for read in reads if read is not None)
        first = next(due, None)
        if first is not None and first.may_wait and next(due, None) is not None:
            return first._replace(may_wait=False)
        return first

    def _read_of(self, partition: int) -> Read | None:
        it = self._owned[partition]
        if it.is_full or len(it.queue) > self._low:
            return None
        return Read(it.next, self._most(self._buffer - len(it.queue)), may_wait=False, partition=partition)

    def _common_read(self) -> Read | None:
        """Stay at one place until the turn ends. Then go to the partition that has waited for the longest.

        Or go a little further back, if this serves others too: they are read for together from then on.
        """
        owned = [it for number, it in self._owned.items() if number not in self._lanes]
        waiting = [it for it in owned if not it.is_full]
        if len(waiting) < len(owned):
            # What is read now has to be read again for those that are full: wait until the others need it.
            waiting = [it for it in waiting if len(it.queue) <= self._low]
        if not waiting:
            return None
        nexts = [it.next for it in waiting]
        if self._is_in_turn and self._at in nexts:
            start = self._at
        else:
            first = min(waiting, key=lambda it: (it.served, it.next))
            start = first.next
            if self._turn - first.served <= len(self._owned):  # else those further back have filled their queues
                start = min(at for at in nexts if start - TURN_MESSAGES < at <= start)
        room = sum(self._buffer - len(it.queue) for it in waiting if it.next == start)
        return Read(start, self._most(room), may_wait=start == min(nexts))

    def _most(self, room: int) -> int:
        return min(_MAX_READ, max(_MIN_READ, room))

    @property
    def _is_in_turn(self) -> bool:
        return self._messages_left > 0 and self._reads_left > 0

    def feed(self, messages: Sequence[StoredMsg], read: Read, end: int, *, at_end: bool = False) -> set[int]:
        """Take what was read, give it to the partitions that need it, and return which got messages.

        Args:
            messages: The messages in the order of their sequences: all between `read.start` and `end` that were not removed
                from the stream, or for a partition that is alone at least all of its own.
            read: What was read. If it was for a partition that is not alone any more, nothing changes.
            end: The sequence at which the next one would start.
            at_end: The stream has no more.

        Raises:
            BadSubjectError: The partition of a message is not defined; nothing has changed.
        """
        begin, alone = read.start, read.partition
        if alone is None:
            partitions = self._partitions_of(messages)
            if begin != self._at or not self._is_in_turn:
                self._turn += 1
                self._messages_left, self._reads_left = TURN_MESSAGES, TURN_READS
            self._at = end
            self._messages_left -= len(messages)
            self._reads_left = self._reads_left - 1 if end > begin else 0  # nothing is there: others may have more
            candidates = {number: it for number, it in self._owned.items() if number not in self._lanes}
        else:
            partitions = [alone] * len(messages)
            candidates = {alone: self._owned[alone]} if alone in self._lanes else {}
        reached = {number: it for number, it in candidates.items() if begin <= it.next <= end}
        took = reached.copy()
        given = self._give(messages, partitions, reached)
        for it in reached.values():
            it.next = end
        for number, it in took.items():
            it.served = self._turn
            it.is_full = it.is_full or len(it.queue) >= self._buffer or it.size >= self._buffer_bytes
            if it.is_full and self._partitions is not None:
                self._lanes[number] = None
        self._with_messages.update(dict.fromkeys(given))
        self._change_lanes(alone, at_end=at_end, is_full=len(messages) >= read.max_messages)
        return given

    def _change_lanes(self, alone: int | None, *, at_end: bool, is_full: bool) -> None:
        if alone is None and is_full and len(self._owned) < (self._partitions or 0):
            self._lanes.update(dict.fromkeys(self._owned))
        if alone in self._lanes:
            self._lanes.move_to_end(alone)
            if alone is not None and at_end:
                del self._lanes[alone]

    def _give(
        self, messages: Sequence[StoredMsg], partitions: Sequence[int], reached: dict[int, _Partition]
    ) -> set[int]:
        """Put messages into queues; leave those partitions in `reached` that could take all of theirs."""
        given = set[int]()
        buffer, buffer_bytes, get, note = self._buffer, self._buffer_bytes, reached.get, given.add
        for message, number in zip(messages, partitions, strict=True):
            it = get(number)
            if it is None or (seq := message.seq) < it.next:
                continue
            queue = it.queue
            if len(queue) >= buffer or it.size >= buffer_bytes:
                it.next, it.is_full = seq, True
                del reached[number]
                continue
            queue.append(message)
            it.size += size_of(message)
            note(number)
        return given

    def take(self, partition: int, max_messages: int = 1) -> list[StoredMsg]:
        """Return the next messages of a partition, at most `max_messages`; none if it has none or is not owned."""
        it = self._owned.get(partition)
        if it is None:
            return []
        queue = it.queue
        many = len(queue) > self._low
        if max_messages >= len(queue):
            taken = list(queue)
            queue.clear()
            it.size = 0
            self._with_messages.pop(partition, None)
        else:
            taken = [queue.popleft() for _ in range(max_messages)]
            it.size -= sum([size_of(message) for message in taken])
            self._with_messages.move_to_end(partition)
        has_room = it.is_full and 2 * len(queue) <= self._buffer and 2 * it.size <= self._buffer_bytes
        it.is_full = it.is_full and not has_room
        if has_room or (many and len(queue) <= self._low):
            self._wake()
        return taken

    def take_any(self, max_messages: int = 1) -> tuple[int, list[StoredMsg]] | None:
        """Return messages of one partition, of each partition in turn, and its number; None if no partition has any."""
        partition = next(iter(self._with_messages), None)
        return None if partition is None else (partition, self.take(partition, max_messages))

    def position(self, partition: int) -> int:
        """Return the sequence of an owned partition's next message, or below which it has none left to take."""
        it = self._owned[partition]
        return it.queue[0].seq if it.queue else it.next
